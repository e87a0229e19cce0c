"""Runs another implementation's decoder over the vectors; specs/README.md, "Vectors"."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .formats.codec_ids import CODEC_IDS, NAMES_BY_ID


@dataclass(frozen=True)
class Result:
    """The outcome of one vector; `detail` says why it did not pass, and is empty if it did."""

    name: str
    passed: bool
    detail: str


def default_vectors() -> Path:
    """The vectors that are installed with this package; else FileNotFoundError."""
    folder = (Path(__file__).parent / "vectors").resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"no vectors at {folder}: pass --vectors DIR")
    return folder


def run(
    command: str, vectors: Path, timeout: float = 60, codecs: Collection[str] = ()
) -> list[Result]:
    """Run `command` once for every vector in the folder, for at most `timeout` seconds each.

    In each argument {in} stands for the buffer's path and {out} for the path to write to. {base}
    stands for the path of the base: the argument is left out for buffers that have none. Where the
    command has no {base}, buffers that have one are left out; see `left_out`. With `codecs`,
    buffers of other codecs are left out, valid or not. Raises ValueError for a command that lacks
    {in} or {out} and for an unknown codec, FileNotFoundError if there are no vectors or no such
    program.
    """
    arguments = shlex.split(command)
    for placeholder in ("{in}", "{out}"):
        if not any(placeholder in argument for argument in arguments):
            raise ValueError(f"command {command!r} has no {placeholder}")
    paths = _paths(vectors, codecs)
    if "{base}" not in command:
        paths = [path for path in paths if not _base_of(path).exists()]
    if not paths:
        which = f" of {', '.join(codecs)}" if codecs else ""
        raise FileNotFoundError(f"no vectors{which} in {vectors}")
    reasons_path = vectors / "invalid" / "reasons.json"
    reasons = json.loads(reasons_path.read_text()) if reasons_path.exists() else {}
    results = []
    with tempfile.TemporaryDirectory(prefix="tightwire-") as scratch:
        out = Path(scratch, "out")
        for path in paths:
            out.unlink(missing_ok=True)
            base = _base_of(path)
            places = {"{in}": str(path), "{out}": str(out), "{base}": str(base)}
            given = [a for a in arguments if "{base}" not in a or base.exists()]
            replaced = [_replaced(argument, places) for argument in given]
            name = path.relative_to(vectors).with_suffix("").as_posix()
            invalid = path.parent == reasons_path.parent
            if invalid and path.stem not in reasons:
                raise ValueError(f"{reasons_path} has no reason for {path.stem}")
            reason = reasons[path.stem] if invalid else None
            detail = _problem(replaced, path, out, reason, timeout)
            results.append(Result(name, not detail, detail))
    return results


def left_out(command: str, vectors: Path, codecs: Collection[str] = ()) -> int:
    """How many vectors `run` leaves out because they have a base and the command no {base}."""
    if "{base}" in command:
        return 0
    return sum(_base_of(path).exists() for path in _paths(vectors, codecs))


def _paths(vectors: Path, codecs: Collection[str]) -> list[Path]:
    """The buffers of a folder of vectors, of all codecs or of these."""
    for name in codecs:
        if name not in CODEC_IDS:
            raise ValueError(f"Unknown codec {name!r}. Allowed: {', '.join(CODEC_IDS)}")
    paths = sorted(vectors.rglob("*.tw"))
    return [path for path in paths if not codecs or _codec_of(path) in codecs]


def _base_of(path: Path) -> Path:
    """Where a buffer's base is, if it has one."""
    return path.with_suffix(".base")


def _replaced(argument: str, places: dict[str, str]) -> str:
    for placeholder, path in places.items():
        argument = argument.replace(placeholder, path)
    return argument


def _codec_of(path: Path) -> str | None:
    """The codec that a buffer names in its header, None for an unknown one."""
    with path.open("rb") as file:
        start = file.read(8)
    return NAMES_BY_ID.get(int.from_bytes(start[6:8], "little"))


def _problem(
    arguments: list[str], path: Path, out: Path, reason: str | None, timeout: float
) -> str:
    # A file, not a pipe: a grandchild that keeps a pipe open would be waited for.
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return f"took more than {timeout:g} s"
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    last = lines[-1].strip() if lines else ""
    if reason is None:
        if done.returncode:
            return f"exit status {done.returncode}: {last}"
        if not out.is_file():
            return "wrote no output"
        same = out.read_bytes() == path.with_suffix(".bin").read_bytes()
        return "" if same else "wrote other bytes"
    if not done.returncode:
        return f"accepted, expected {reason}"
    found = last.split()[0].rstrip(":") if last else ""
    return "" if found == reason else f"gave {last or 'no reason'!r}, expected {reason}"
