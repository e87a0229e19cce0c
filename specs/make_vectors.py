"""Write the vectors: `python specs/make_vectors.py [--folder FOLDER] [NAME ...]`.

NAME is that of a module of `make/`: a codec, or `buffer` for what all codecs share; all of them
unless some are given. FOLDER is `vectors` beside this file unless it is given.

A published vector never changes: a file that is there already is kept, and if its bytes are not
those that would be written the exit status is 1. Only reasons.json may grow.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from make.common import Invalid

SPECS = Path(__file__).resolve().parent


def makers() -> dict[str, ModuleType]:
    """The modules of `make/` that have vectors, by name."""
    names = sorted(path.stem for path in (SPECS / "make").glob("[!_]*.py"))
    modules = {name: importlib.import_module(f"make.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "invalid")}


def all_files(modules: Iterable[ModuleType], refused: Invalid) -> dict[str, bytes]:
    """Every file but reasons.json, by its path in the folder."""
    files = {}
    for module in modules:
        for name, buffer, tensor, *given in module.valid():
            files[f"{name}.tw"], files[f"{name}.bin"] = buffer, tensor
            suffix = getattr(module, "GIVEN", "input")
            files |= {f"{name}.{suffix}": data for data in given}
    for name, (buffer, _, *base) in refused.items():
        files[f"invalid/{name}.tw"] = buffer
        files |= {f"invalid/{name}.base": data for data in base}
    return files


def write(folder: Path, names: Iterable[str] = ()) -> int:
    """Write what is not there yet; the number of files that differ from what they should be."""
    found = makers()
    modules = [found[name] for name in names or found]
    refused: Invalid = {}
    for module in modules:
        refused |= module.invalid()
    changed_files = 0
    for name, data in all_files(modules, refused).items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"wrote {name}")
        elif path.read_bytes() == data:
            print(f"kept {name}")
        else:
            print(f"DIFFERENT, kept {name}")
            changed_files += 1

    path = folder / "invalid" / "reasons.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    made = {name: reason for name, (_, reason, *_) in refused.items()}
    reasons = dict(sorted((old | made).items()))
    # Names that nobody makes any more are told from those of modules that were not asked for.
    if old.items() <= reasons.items() and (names or old.keys() <= made.keys()):
        print("wrote invalid/reasons.json" if old != reasons else "kept invalid/reasons.json")
        path.write_text(json.dumps(reasons, indent=1) + "\n")
    else:
        print("DIFFERENT, kept invalid/reasons.json")
        changed_files += 1
    return changed_files


def main() -> int:
    """Write the vectors that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write the vectors that are not there yet.")
    parser.add_argument("--folder", type=Path, default=SPECS / "vectors")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(makers()))
    arguments = parser.parse_args()
    unknown = set(arguments.names) - makers().keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return 1 if write(arguments.folder, arguments.names) else 0


if __name__ == "__main__":
    sys.exit(main())
