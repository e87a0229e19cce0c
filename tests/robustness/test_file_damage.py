"""Damaged files: every reader gives the exact tensors, or all refuse for the same reason."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import resource
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import readers
import tightwire as tw
from mutants import Rng, edit_value
from support import make_bits, repair
from tightwire import convert, tree
from tightwire.formats.container import (
    SOURCE_KEY,
    TIED_KEY,
    TREE_KEY,
    Entry,
    directory_bytes,
    read_directory,
)
from tightwire.formats.dtypes import BY_NAME


def _weights(n: int) -> Any:
    return make_bits("scales", BY_NAME["bfloat16"], n).view(ml_dtypes.bfloat16)


def _compressed() -> bytes:
    """A container with a source header."""
    x = np.linspace(-1, 1, 300, dtype=np.float32).reshape(3, 100)
    entries = [Entry("w", "F32", x.shape, 0, 1200), Entry("none", "I64", (0, 5), 1200, 1200)]
    entries.append(Entry("ids", "U8", (7,), 1200, 1207))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        source.write_bytes(directory_bytes(entries, {"format": "pt"}) + x.tobytes() + bytes(7))
        convert.compress_file(source, target)
        return target.read_bytes()


VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors" / "container"
NAMES = ("dict", "tree", "list", "sparse", "source", "plain", "every node")


@cache
def samples() -> dict[str, bytes]:
    """Files by name, made when a test needs them: nothing is compiled while tests are collected."""
    tied = _weights(800)
    files: dict[str, Any] = {
        "dict": {"a": _weights(1300).reshape(13, 100), "b/é": np.arange(5), "c": np.ones(())},
        "tree": {"a": {"w": tied, "again": tied}, "b": [_weights(700), 7, "x", None]},
        "list": [np.arange(9, dtype=np.int16), _weights(1100)],
    }
    found = {name: tw.dumps(content) for name, content in files.items()}
    found["sparse"] = tw.dumps({"x": _weights(900)}, tw.codec("omnireduce", block=64))
    found["source"] = _compressed()
    found["plain"] = (VECTORS / "plain_behind.safetensors").read_bytes()
    found["every node"] = (VECTORS / "tree.safetensors").read_bytes()
    assert tuple(found) == NAMES
    return found


@cache
def sample_values() -> set[readers.Value]:
    """All tensors in the samples."""
    return {
        readers.value(x)
        for data in samples().values()
        for x in tree.flatten([tw.loads(data)])[0].values()
    }


Mutant = Callable[[Rng, bytes], bytes]


def flip(rng: Rng, data: bytes) -> bytes:
    """One to three bits, anywhere or in the header."""
    broken = bytearray(data)
    end = len(data) if rng.random() < 0.5 else read_directory(memoryview(data)).data_at
    for at in rng.integers(0, end, rng.integers(1, 4)):
        broken[at] ^= 1 << int(rng.integers(8))
    return bytes(broken)


def cut(rng: Rng, data: bytes) -> bytes:
    return data[: rng.integers(len(data))] + bytes(int(rng.integers(0, 2)) * 128)


def splice(rng: Rng, data: bytes) -> bytes:
    """A piece of a file in the place of another: bytes, or whole blocks of 128."""
    other = samples()[str(rng.choice(NAMES))]
    unit = int(rng.choice([1, 128]))
    n = int(rng.integers(1, 300 if unit == 1 else 6)) * unit
    at = int(rng.integers(len(data) // unit)) * unit
    start = int(rng.integers(len(other) // unit)) * unit
    removed = n if rng.random() < 0.7 else 0
    return data[:at] + other[start : start + n] + data[at + removed :]


def with_header(data: bytes, text: bytes) -> bytes:
    """The file with another header, whose digest is right."""
    none = b'"tightwire.digest":"%s"'
    pattern = re.compile(none % b"[0-9a-f]{64}")
    digest = hashlib.sha256(pattern.sub(none % (b"0" * 64), text)).hexdigest()
    text = pattern.sub(none % digest.encode(), text)
    return len(text).to_bytes(8, "little") + text + data[read_directory(memoryview(data)).data_at :]


TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\u0061", b"\\ud800", b"\0", b"\xff", b"1e9"]
TOKENS += [b'"x":{},', b"[" * 3000, b'{"a":' * 3000, b" " * 5000, b"9" * 5000, b"null", b"-", b"\n"]


def edit(rng: Rng, data: bytes) -> bytes:
    """One field of the header is something else: a number, another type, gone, renamed, moved."""
    header: Any = json.loads(read_directory(memoryview(data)).json_bytes)
    edit_value(rng, header)
    return with_header(data, json.dumps(header, separators=(",", ":")).encode())


def edit_metadata(rng: Rng, data: bytes) -> bytes:
    """What `edit` does, in a tree or in the names of tied tensors; else in a source header."""
    header: Any = json.loads(read_directory(memoryview(data)).json_bytes)
    metadata = header["__metadata__"]
    keys = [key for key in (TREE_KEY, TIED_KEY, SOURCE_KEY) if key in metadata]
    if not keys:
        keys = [str(rng.choice([TREE_KEY, TIED_KEY]))]
        names = {name: name for name in header if name != "__metadata__"}
        tree = {"dict": [[name, {"tensor": name}] for name in names]}
        metadata[keys[0]] = json.dumps(tree if keys[0] == TREE_KEY else {"z": next(iter(names))})
    key = keys[int(rng.integers(len(keys)))]
    text = metadata[key]
    if key == SOURCE_KEY:
        text = zlib.decompress(base64.b64decode(text)).decode()
    value = json.loads(text)
    for _ in range(int(rng.integers(1, 3))):
        if value:
            edit_value(rng, value)
    text = json.dumps(value)
    if key == SOURCE_KEY:
        text = base64.b64encode(zlib.compress(text.encode())).decode()
    metadata[key] = text
    return with_header(data, json.dumps(header, separators=(",", ":")).encode())


def edit_text(rng: Rng, data: bytes) -> bytes:
    """A token in the header's text, for another one or between two."""
    text = read_directory(memoryview(data)).json_bytes
    at, n = int(rng.integers(len(text))), int(rng.integers(0, 3))
    return with_header(data, text[:at] + TOKENS[int(rng.integers(len(TOKENS)))] + text[at + n :])


def twice(rng: Rng, data: bytes) -> bytes:
    """A member of the header a second time."""
    text = read_directory(memoryview(data)).json_bytes.rstrip()
    header = json.loads(text)
    key = str(rng.choice(list(header)))
    member = f"{json.dumps(key)}:{json.dumps(header[key])}".encode()
    return with_header(data, text[:-1] + b"," + member + b"}")


def repaired(rng: Rng, data: bytes) -> bytes:
    """A buffer with some changed bytes, whose checksums are right."""
    directory = read_directory(memoryview(data))
    entries = [e for e in directory.entries if e.is_buffer]
    where = directory.span(entries[int(rng.integers(len(entries)))])
    buffer = bytearray(data[where])
    end = len(buffer) if rng.random() < 0.3 else min(len(buffer), 160)
    for at in rng.integers(0, end, rng.integers(1, 4)):
        buffer[at] = int(rng.choice([0, 1, 2, 0x7F, 0x80, 0xFF, int(rng.integers(256))]))
    repair(buffer)
    return data[: where.start] + bytes(buffer) + data[where.stop :]


MUTANTS: tuple[Mutant, ...] = (flip, cut, splice, edit, edit_metadata, edit_text, twice, repaired)
#: Peak memory that hundreds of readings may add: tensors of at most MAX_NBYTES, in each reader.
MEMORY = 16 * readers.MAX_NBYTES


def check(mutant: Mutant, seed: int, path: Path) -> bool:
    """Read one mutant by all readers; True if they took it."""
    rng = np.random.default_rng(seed)
    name = NAMES[seed % len(NAMES)]
    data = mutant(rng, samples()[name])
    path.write_bytes(data)
    start = time.process_time()
    found = readers.agreed(path)
    assert time.process_time() - start < 20
    if isinstance(found, str):
        return False
    # Names have no checksum, tensors do; those whose checksums were repaired may be any.
    assert mutant is repaired or set(found.values()) <= sample_values()
    return True


def check_many(mutant: Mutant, seeds: range, path: Path) -> int:
    """How many of the mutants the readers took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mock.patch.object(os, "fsync"):
        taken = sum(check(mutant, seed, path) for seed in seeds)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < MEMORY
    return taken


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_read_by_all(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(samples()[name])
    found = readers.agreed(path)
    assert isinstance(found, dict)
    assert set(found.values()) <= sample_values()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutants(mutant: Mutant, tmp_path: Path) -> None:
    n = 150
    taken = check_many(mutant, range(n), tmp_path / "x")
    assert taken < n
    # Some of these are harmless: that all are refused would mean that the samples are.
    assert taken > 0 or mutant not in (edit, edit_metadata, edit_text, repaired)


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_many_mutants(mutant: Mutant, tmp_path: Path) -> None:
    assert check_many(mutant, range(150, 10_000), tmp_path / "x") < 9_850


@pytest.mark.parametrize("name", NAMES)
def test_flipped_bits_of_the_data_are_refused(name: str, tmp_path: Path) -> None:
    """A bit of every 97th byte behind the header."""
    data, path = samples()[name], tmp_path / "x"
    for at in range(read_directory(memoryview(data)).data_at, len(data), 97):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        path.write_bytes(broken)
        assert readers.reason(convert.verify_file, path) is not None, at
