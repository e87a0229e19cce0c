"""The safetensors header: what safetensors itself reads, and every kind of damage."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, strategies

import tightwire as tw
from tightwire.formats import container
from tightwire.formats.container import (
    BASE_KEY,
    BITS,
    DIGEST_KEY,
    LIST_KEY,
    MAX_METADATA,
    MAX_TREE,
    NO_DIGEST,
    OWN_KEYS,
    PLAIN_KEY,
    SOURCE_KEY,
    STATE_KEY,
    TIED_KEY,
    TREE_KEY,
    Entry,
    directory_bytes,
    parse_directory,
    read_directory,
    tied_text,
)


def file_of(fields: Any, data: bytes = b"", pad: int = 0) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def reason(data: bytes) -> str:
    with pytest.raises(tw.FormatError) as caught:
        read_directory(memoryview(data))
    return caught.value.reason


def test_a_good_file() -> None:
    directory = read_directory(memoryview(file_of(GOOD, bytes(8), pad=5)))
    assert directory.entries == (Entry("a", "F32", (2,), 0, 8),)
    assert read_directory(memoryview(file_of({}))).entries == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        file_of(GOOD, bytes(7)),
        file_of(GOOD, bytes(9)),
        file_of(GOOD, bytes(8))[:20],
        (1 << 62).to_bytes(8, "little") + b"{}",
        file_of(b"not json"),
        file_of(b"\xff\xfe"),
        file_of(b"[" * 100000),
        file_of([]),
        file_of(b'{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "a": 1}', b"1"),
        file_of({"__metadata__": {"a": 1}}),
        file_of({"__metadata__": []}),
        file_of({"a": []}),
        file_of({"a": {"dtype": "F32", "shape": [2]}}),
        file_of({"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)),
        file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, bytes(8)),
        file_of({**GOOD, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)),
        file_of({"a": {"dtype": "U8", "shape": [1 << 62] * 100_000, "data_offsets": [0, 1]}}, b"1"),
        file_of(b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"1"),
        file_of({"a": {"dtype": "U8", "shape": [1 << 63], "data_offsets": [0, 1 << 63]}}),
    ],
)
def test_damage(data: bytes) -> None:
    assert reason(data) == "bad_container"


SMALL = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
MIB = 1 << 20
HOSTILE = {
    "objects": '{"a":[' + "{}," * MIB + "{}]}",
    "lists": '{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + "[]," * MIB + "[]]}}",
    "numbers": '{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + "1234," * MIB + "0]}}",
    "fields": '{"a":{' + ",".join(f'"{i}":1' for i in range(MIB // 4)) + "}}",
    "objects in metadata": '{"__metadata__":{"a":[' + "{}," * MIB + "{}]}}",
    "metadata": '{"__metadata__":{' + ",".join(f'"{i}":""' for i in range(MIB // 4)) + "}}",
    "depth": '{"a":' * MIB,
    "digits": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,' + "9" * 3 * MIB + "]}}",
    "one entry": '{"a":{"dtype":"U8",' + " " * 3 * MIB + '"shape":[0],"data_offsets":[0,0]}}',
}


def traced(json_bytes: bytes) -> tuple[float, tw.FormatError | None]:
    """Peak memory of reading a header over its size, and the refusal."""
    tracemalloc.start()
    try:
        parse_directory(json_bytes)
        refusal = None
    except tw.FormatError as error:
        refusal = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak / len(json_bytes), refusal


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_header_takes_little_memory(name: str) -> None:
    """A JSON parser makes 8 to 25 times the size of these."""
    peak, refusal = traced(HOSTILE[name].encode())
    assert refusal is not None
    assert refusal.reason == "bad_container"
    # The most metadata that a header may have takes some 10 MB.
    assert peak < (7 if name == "metadata" else 3)


def test_memory_of_a_header_is_in_proportion() -> None:
    """Entries are as short as entries can be; the emoji makes all characters wide."""
    for name in ("a", "\U0001f600"):
        members = [f'"{i}":{SMALL}' for i in range(20_000)]
        peak, refusal = traced(f'{{"{name}":{SMALL},{",".join(members)}}}'.encode())
        assert refusal is None
        assert peak < 12


SIZE = MAX_TREE // 64
#: Own metadata: of a tree, each as short as its nodes can be.
METADATA = {
    "lists": (TREE_KEY, "[" + "[]," * (SIZE // 3) + "0]"),
    "tuples": (TREE_KEY, "[" + '{"tuple":[]},' * (SIZE // 13) + "0]"),
    "nested": (TREE_KEY, "[" + ("[" * 60 + "]" * 60 + ",") * (SIZE // 121) + "0]"),
    "objects": (TREE_KEY, "[" + "{}," * (SIZE // 3) + "0]"),
    "wide": (TREE_KEY, '["\U0001f600",' + "[]," * (SIZE // 3) + "0]"),
    "alias": (TIED_KEY, '{"' + "a" * SIZE + '":"0"}'),
    "aliases": (TIED_KEY, "{" + ",".join(f'"a{i:x}":"0"' for i in range(1 << 16)) + "}"),
    "too many": (TIED_KEY, "{" + ",".join(f'"a{i:x}":"0"' for i in range(70_000)) + "}"),
    "objects in tied": (TIED_KEY, '{"a":[' + "{}," * SIZE + "0]}"),
    "digits": (PLAIN_KEY, "0" * SIZE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METADATA)
def test_own_metadata_takes_little_memory(name: str) -> None:
    """A tree of the greatest size, 64 times as large as these, takes some 400 MB."""
    key, text = METADATA[name]
    data = directory_bytes(
        [Entry("0", "I8", (0,), 0, 0)],
        {"tightwire": "2", DIGEST_KEY: NO_DIGEST, PLAIN_KEY: "00000000"} | {key: text},
    )
    tracemalloc.start()
    try:
        if name in ("objects", "too many", "objects in tied", "digits"):
            with pytest.raises(tw.FormatError, match="bad_container"):
                tw.loads(data)
        else:
            tw.loads(data)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (100 if key == TREE_KEY else 20) * len(data)


def test_many_plain_tensors_take_little_memory() -> None:
    n = 4000
    entries = [Entry(str(i), "I8", (0,), 0, 0) for i in range(n)]
    own = {"tightwire": "2", DIGEST_KEY: NO_DIGEST, PLAIN_KEY: "0" * 8 * n}
    data = directory_bytes(entries, own)
    tracemalloc.start()
    tensors = tw.loads(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(tensors) == n
    assert peak < 15 * len(data)


def test_limits_of_own_metadata() -> None:
    tied = {f"a{i}": "0" for i in range((1 << 16) + 1)}
    with pytest.raises(ValueError, match="allowed: 65536"):
        tied_text(tied)
    for n, good in ((MAX_METADATA - len(OWN_KEYS), True), (MAX_METADATA, False)):
        metadata = {str(i): "" for i in range(n)}
        x = np.ones(3, np.float32)
        if good:
            # As many keys of tightwire's as there can be.
            out = io.BytesIO()
            tw.save_file({"x": x, "y": {"z": x}}, out, metadata=metadata)
            own = read_directory(memoryview(out.getvalue())).metadata.keys() - metadata.keys()
            assert own == {*OWN_KEYS} - {SOURCE_KEY, LIST_KEY, BASE_KEY, STATE_KEY}
            assert tw.load_file(out.getvalue())["y"]["z"].tolist() == [1, 1, 1]
        else:
            with pytest.raises(ValueError, match="metadata entries; allowed: "):
                tw.save_file({"x": x}, io.BytesIO(), metadata=metadata)


@pytest.mark.slow
def test_many_tensors() -> None:
    entries = tuple(
        Entry(f"layers.{i}.é", "BF16", (4, 2), 16 * i, 16 * i + 16) for i in range(10**5)
    )
    metadata = {f"{i}": '{"}": [' for i in range(1 << 16)}
    found = parse_directory(directory_bytes(entries, metadata)[8:])
    assert found.entries == entries
    assert found.metadata == metadata


@pytest.mark.slow
def test_limits_of_a_header() -> None:
    for spaces, good in ((4096 - len(SMALL), True), (4097 - len(SMALL), False)):
        text = f'{{"a":{SMALL[:-1] + " " * spaces}}}}}'.encode()
        assert (traced(text)[1] is None) == good
    for n, good in ((1 << 16, True), ((1 << 16) + 1, False)):
        text = json.dumps({"__metadata__": {str(i): "" for i in range(n)}}).encode()
        assert (traced(text)[1] is None) == good
    with pytest.raises(ValueError, match="100000000"):
        directory_bytes([], {"a": "b" * 100_000_000})


@given(
    strategies.recursive(
        strategies.none()
        | strategies.booleans()
        | strategies.integers()
        | strategies.floats()
        | strategies.text(max_size=3)
        | strategies.sampled_from(["U8", "dtype"]),
        lambda inner: (
            strategies.lists(inner, max_size=3)
            | strategies.dictionaries(
                strategies.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"])
                | strategies.text(max_size=2),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_json_is_refused_or_a_header(fields: Any) -> None:
    """What is taken is what Python's parser reads."""
    for indent in (None, 1):
        text = json.dumps(fields, indent=indent).encode()
        try:
            found = parse_directory(text)
        except tw.FormatError as error:
            assert error.reason == "bad_container"
            continue
        assert isinstance(fields, dict)
        assert found.metadata == fields.get("__metadata__", {})
        assert {e.name for e in found.entries} == set(fields) - {"__metadata__"}
        for e in found.entries:
            assert (e.dtype, list(e.shape)) == (fields[e.name]["dtype"], fields[e.name]["shape"])


def outcome(text: bytes) -> Any:
    """What reading a header gives: all its parts, or the refusal."""
    try:
        found = parse_directory(text)
    except tw.FormatError as error:
        return str(error)
    return found.entries, dict(found.metadata), found.names


@given(data=strategies.data())
def test_usual_headers_are_read_as_all_others(data: strategies.DataObject) -> None:
    """Also after a change of some characters: the same entries, or the same refusal."""
    names = strategies.text(max_size=3) | strategies.sampled_from(
        ["__metadata__", 'a"', "\\n", "weight"]
    )
    shapes = (
        strategies.lists(strategies.integers(0, 9), max_size=3)
        | strategies.just([2**62, 0])
        | strategies.just([1] * 33)
    )
    kinds = strategies.sampled_from(["F32", "U8", "BF16", "F4"])
    entries, at = [], 0
    for name, shape, kind in data.draw(
        strategies.lists(strategies.tuples(names, shapes, kinds), max_size=4)
    ):
        end = at + math.prod(shape) * BITS[kind] // 8
        entries.append(Entry(name, kind, tuple(shape), at, end))
        at = end
    text = directory_bytes(entries, data.draw(strategies.dictionaries(names, names, max_size=2)))[
        8:
    ]
    for _ in range(data.draw(strategies.integers(0, 2))):
        place = data.draw(strategies.integers(0, len(text)))
        stop = place + data.draw(strategies.integers(0, 2))
        text = text[:place] + data.draw(strategies.sampled_from(CHANGES)) + text[stop:]
    found = outcome(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container, "_usual_entries", lambda text, at, members: at)
        assert found == outcome(text)


CHANGES = [
    b"",
    b" ",
    b"0",
    b"1",
    b"-",
    b'"',
    b",",
    b"}",
    b"{",
    b"]",
    b"a",
    b"\\",
    b"\n",
    b"\xd9\xa3",
]


def test_many_usual_entries_are_read_without_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON parser sees the first names and the last entry, not thousands of them."""
    entries = [Entry(f"a.{i}", "U8", (128,), 128 * i, 128 * i + 128) for i in range(2000)]
    text = directory_bytes(entries, {"tightwire": "2"})[8:]
    calls = []
    decoder = json.JSONDecoder(object_pairs_hook=container.unique_members)

    class Counting:
        def raw_decode(self, *args: Any) -> Any:
            calls.append(args)
            return decoder.raw_decode(*args)

    monkeypatch.setattr(container, "_JSON", Counting())
    assert parse_directory(text).entries == tuple(entries)
    assert len(calls) < 10


def test_written_headers_are_aligned_and_read_by_safetensors(tmp_path: Path) -> None:
    for n in range(40):
        entries = [Entry(f"t{i}" + "é" * n, "U8", (128,), 128 * i, 128 * i + 128) for i in range(3)]
        head = directory_bytes(entries, {"k": "v" * n})
        assert len(head) % 128 == 0
        assert parse_directory(head[8:]).entries == tuple(entries)
        path = tmp_path / f"{n}.safetensors"
        path.write_bytes(head + bytes(384))
        assert set(safetensors.numpy.load_file(path)) == {e.name for e in entries}


def test_compressed_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    x = np.random.default_rng(0).standard_normal((90, 100)).astype(ml_dtypes.bfloat16)
    tw.save_file({"x": x, "empty": np.zeros((0, 4)), "i": np.arange(9)}, path, metadata={"k": "v"})
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == {"x", "empty", "i"}
    assert loaded["i"].tolist() == list(range(9))
    assert tw.decode(loaded["x"]).tobytes() == x.tobytes()
    with safetensors.safe_open(path, "numpy") as file:
        found = file.metadata()
        assert {"k": found["k"], "tightwire": found["tightwire"]} == {"k": "v", "tightwire": "2"}
    data = path.read_bytes()
    assert (8 + int.from_bytes(data[:8], "little")) % 128 == 0


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", (128, 1)), ("I8", (128,)), ("F32", (32,)), ("U8", (0,))]
)
def test_compressed_tensors_are_flat_bytes(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    n = 128 if 0 not in shape else 0
    head = directory_bytes([Entry("x", dtype, shape, 0, n)], {"tightwire": "1"})
    (tmp_path / "x").write_bytes(head + bytes(n))
    expected = "truncated" if n == 0 else "bad_container"
    with pytest.raises(tw.FormatError, match=expected):
        tw.load_file(tmp_path / "x")
