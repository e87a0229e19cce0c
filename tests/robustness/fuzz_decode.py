"""Coverage-guided fuzzing: bytes decode to the same tensor on every backend, or raise FormatError.

    python tests/robustness/fuzz_decode.py FOLDER -max_total_time=600

FOLDER holds the corpus: `test_fuzz.py` fills one from specs/vectors. Options are libFuzzer's.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import atheris
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
MAX_NBYTES = 1 << 22
FOLDERS = ("codecs", "formats", "adapters")


def compiled() -> list[str]:
    """Modules that Numba compiles from their bytecode, which therefore must stay as it is."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*_cpu.py")]
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths]
    return [f"tightwire.{name}" for name in names]


with atheris.instrument_imports(include=["tightwire"], exclude=compiled()):
    import tightwire as tw
    from tightwire.formats.errors import REASONS
    from tightwire.planning import HOST_BACKENDS, backend_module

    # Codecs are imported at their first use.
    for name in tw.list_codecs():
        for backend in HOST_BACKENDS:
            backend_module(name, backend)

from support import repair  # noqa: E402


def base_for(data: bytes) -> Any:
    """A base of zeros for buffers that need one."""
    header = tw.inspect(data).header
    too_large = header.nelem * header.dtype.itemsize > MAX_NBYTES
    if too_large or not tw.codec(header.codec).needs_base:
        return None
    return np.zeros(header.shape, header.dtype.numpy)


def decoded(data: bytes, backend: str) -> Any:
    """The tensor as dtype, shape and bytes, or the reason of the refusal."""
    try:
        base = base_for(data)
        x = tw.decode(data, base=base, backend=backend, max_nbytes=MAX_NBYTES)
    except tw.FormatError as error:
        assert error.reason in REASONS
        return error.reason
    return str(x.dtype), x.shape, x.tobytes()


def check(data: bytes) -> None:
    """Decode one buffer on every backend, and read one file."""
    found = [decoded(data, backend) for backend in HOST_BACKENDS]
    assert all(other == found[0] for other in found), found
    try:
        tw.load_file(io.BytesIO(data), max_nbytes=MAX_NBYTES)
    except tw.FormatError as error:
        assert error.reason in REASONS


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """A mutation of libFuzzer's, half of them with right checksums: others are refused early."""
    found = bytearray(atheris.Mutate(data, max_size))
    if random.Random(seed).random() < 0.5:
        repair(found)
    return bytes(found)


if __name__ == "__main__":
    atheris.Setup(sys.argv, check, custom_mutator=mutate)
    atheris.Fuzz()
