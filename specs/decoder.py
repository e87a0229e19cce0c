"""A decoder of tightwire buffers, written from the pages in this folder alone.

It shows what the pages mean and is slow: `decoders/` has a module for a page, one section of code
per section of the page. Run it as `python specs/decoder.py IN OUT
[BASE]`.
"""

import sys
from pathlib import Path

from decoders.buffer import decode
from decoders.common import FormatError


def main() -> int:
    """Decode the file IN to the file OUT, against the file BASE where a codec needs one."""
    if len(sys.argv) not in (3, 4):
        sys.stderr.write("usage: decoder.py IN OUT [BASE]\n")
        return 2
    base = Path(sys.argv[3]).read_bytes() if len(sys.argv) == 4 else None
    try:
        out = decode(Path(sys.argv[1]).read_bytes(), base=base)[2]
    except FormatError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    Path(sys.argv[2]).write_bytes(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
