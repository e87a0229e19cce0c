"""Entry point of the command line; typer is imported only once it is called."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `tightwire`; without the [cli] extra, say in one line how to get it."""
    try:
        from .commands.app import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(_without(error.name))
    run()


def _without(name: str) -> int:
    sys.stderr.write(f"tightwire: {name} is not installed: pip install 'tightwire[cli]'\n")
    return 5


if __name__ == "__main__":
    main()
