"""Write the vectors of container.md: `python specs/make_container_vectors.py [FOLDER]`.

FOLDER is `vectors/container` beside this file unless it is given. A published vector never changes:
a file that is there already is kept, and expected.json only grows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.convert import compress_file
from tightwire.formats.container import (
    DIGEST_KEY,
    NO_DIGEST,
    PLAIN_KEY,
    TIED_KEY,
    TREE_KEY,
    crc32c,
    read_directory,
)
from tightwire.formats.dtypes import BY_SAFETENSORS

RAW = bytes(tw.encode(np.array([1, 2, 3], np.uint8), "raw"))
FLOATS = (np.arange(1300) % 97 / 64 - 0.5).astype(np.float32).reshape(13, 100)


def file_of(fields: Any, data: bytes = b"", **layout: Any) -> bytes:
    """A file with this header, an object or its bytes; `layout` is for json.dumps."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields, **layout).encode()
    text += b" " * (-(8 + len(text)) % 128)
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, **other: Any) -> dict[str, Any]:
    """The entry of a buffer."""
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} | other


def container(buffers: Mapping[str, bytes], metadata: Mapping[str, str], **fields: Any) -> bytes:
    """A container of these buffers; `fields` are members of the header beside or instead."""
    header: dict[str, Any] = {"__metadata__": {"tightwire": "1"} | dict(metadata)}
    data = b"".join(buffers.values())
    at = 0
    for name, buffer in buffers.items():
        header[name] = entry(at, at + len(buffer))
        at += len(buffer)
    return file_of(header | fields, data)


def source_of(fields: Any, pack: bool = True) -> dict[str, str]:
    """The metadata of a container that was made from a file with this header."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return {"tightwire.source": base64.b64encode(zlib.compress(text, 9) if pack else text).decode()}


def odd_source() -> bytes:
    """A plain file: an indented header with names of all sorts, tensors that are not aligned."""
    x = FLOATS.tobytes()
    header = {
        "__metadata__": {"format": "pt", "né \U0001f600": '{"a": [1, "}"]}'},
        "b\n{": {"data_offsets": [0, 3], "shape": [3], "dtype": "U8"},
        "é": {"dtype": "F32", "shape": [13, 100], "data_offsets": [3, 3 + len(x)]},
        "none": {"dtype": "BF16", "shape": [0, 9], "data_offsets": [3 + len(x)] * 2},
    }
    text = json.dumps(header, indent=3).encode() + b" \n  "
    return len(text).to_bytes(8, "little") + text + bytes([1, 2, 3]) + x


COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}


def first(tensors: Mapping[str, Any], codec: str = "zipccl", **metadata: str) -> bytes:
    """A container of version 1, as it was written."""
    buffers = {name: bytes(tw.encode(x, codec)) for name, x in tensors.items()}
    own = {"tightwire": "1"}
    is_list = metadata.keys() == {"tightwire.list"}
    header: dict[str, Any] = {"__metadata__": own | metadata if is_list else metadata | own}
    at = 0
    for name, buffer in buffers.items():
        header[name] = entry(at, at + len(buffer))
        at += len(buffer)
    return file_of(header, b"".join(buffers.values()), **COMPACT)


def first_compressed(plain: bytes) -> bytes:
    """The container of version 1 made from a plain file."""
    directory = read_directory(memoryview(plain))
    tensors = {}
    for e in directory.entries:
        data = np.frombuffer(plain[directory.span(e)], np.uint8)
        tensors[e.name] = data.view(BY_SAFETENSORS[e.dtype].numpy).reshape(e.shape)
    metadata = dict(directory.metadata) | source_of(directory.json_bytes)
    return first(tensors, **metadata)


def digested(data: bytes) -> bytes:
    """The file with the right digest in the place of its digest, `NO_DIGEST`."""
    n = int.from_bytes(data[:8], "little")
    digest = hashlib.sha256(data[8 : 8 + n]).hexdigest()
    return data.replace(NO_DIGEST.encode(), digest.encode(), 1)


#: A plain entry: safetensors' dtype, shape, bytes.
Plain = tuple[str, list[int], bytes]


def header_2(
    buffers: Mapping[str, bytes],
    plain: Mapping[str, Plain] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], bytes]:
    """Header and data of a container of version 2, its digest to be computed."""
    own = {"tightwire": "2", DIGEST_KEY: NO_DIGEST}
    header: dict[str, Any] = {}
    data = b""
    for name, buffer in buffers.items():
        header[name] = entry(len(data), len(data) + len(buffer))
        data += buffer
    for name, (dtype, shape, raw) in (plain or {}).items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    if plain:
        own[PLAIN_KEY] = "".join(f"{crc32c(memoryview(raw)):08x}" for _, _, raw in plain.values())
    return {"__metadata__": own | dict(metadata or {})} | header, data


def container_2(
    buffers: Mapping[str, bytes],
    plain: Mapping[str, Plain] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """A container of version 2."""
    return digested(file_of(*header_2(buffers, plain, metadata), **COMPACT))


def compressed(plain: bytes) -> bytes:
    """The container made from a plain file."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        source.write_bytes(plain)
        compress_file(source, target)
        return target.read_bytes()


def valid() -> Iterator[tuple[str, bytes]]:
    """Containers that every reader takes."""
    yield "one", first({"x": np.array([1, 2, 3], np.uint8)}, "raw")
    yield "none", first({})
    yield "two", first({"weight": FLOATS, "scalar": np.float64(3.5)})
    a_list = {"0": FLOATS[0], "1": np.arange(3), "2": FLOATS[:0]}
    yield "list", first(a_list, **{"tightwire.list": "1"})
    yield "empty_list", first({}, **{"tightwire.list": "1"})
    yield "source", first_compressed(odd_source())
    yield "unknown_own_key", container({"x": RAW}, {"tightwire.later": "?"})
    # Members in another order than their data, white space, escapes.
    text = b'\n{ "b" :{"shape":[256],"data_offsets":[256,512],"dtype":"U8"},\t"\\u0061":'
    text += json.dumps(entry(0, 256), indent=1).encode()
    text += b' , "__metadata__" : {"tightwire" : "1"} }\r\n'
    yield "spaces", file_of(text, RAW * 2)
    x = json.dumps(entry(0, 256)).encode()
    yield "size_minus_zero", file_of(one_entry(x.replace(b"[0,", b"[-0,")), RAW)
    yield "longest_entry", file_of(one_entry(x[:-1] + b" " * (4096 - len(x)) + b"}"), RAW)
    yield "source_longest", container({"x": RAW}, LONG_USER | source_of(long_source(0)))
    spare = source_of(spare_bits())
    value = spare["tightwire.source"]
    spare["tightwire.source"] = value.rstrip("=")[:-1] + other_last_digit(value)
    yield "source_spare_bits", container({"x": RAW}, spare)
    yield from valid_2()


ONE: Plain = ("F32", [], np.float32(1.5).tobytes())
PLAIN: dict[str, Plain] = {
    "f64": ("F64", [1, 2], np.array([np.nan, -0.0]).tobytes()),
    "c64": ("C64", [1], np.complex64(1 - 2j).tobytes()),
    "none": ("I64", [3, 0, 1 << 40], b""),
    "f32": ONE,
    "bf16": ("BF16", [3], bytes.fromhex("803fc07f0080")),
    "f8": ("F8_E8M0", [2, 2], bytes([0, 127, 254, 255])),
    "bool": ("BOOL", [3], bytes([1, 0, 1])),
    "byte": ("U8", [], bytes([7])),
    "bytes": ("U8", [2, 2], bytes([1, 2, 3, 4])),
    "f6_e2m3": ("F6_E2M3", [2, 4], bytes(range(6))),
    "f6_e3m2": ("F6_E3M2", [8], bytes(range(6, 12))),
    "f4": ("F4", [3, 2], bytes([0x10, 0x32, 0xFE])),
}
TREE: list[Any] = [
    {"tensor": "x"},
    {"tensor": "again"},
    {"dict": [["a", 1], [1, "é"], [2.5, None], [False, True], [None, {"tensor": "x"}]]},
    {"tuple": [-0.0, 1e300, 10**40, {"float": "nan"}, {"float": "inf"}, {"float": "-inf"}]},
    {"bytes": "AAH/"},
    {"tuple": []},
    {"dict": []},
    [],
    [[""]],
]


def nested(depth: int) -> str:
    """A tree whose deepest node has this depth."""
    return "[" * depth + "0" + "]" * depth


def mixed_source() -> bytes:
    """A plain file with tensors that are stored plain before, between and behind others."""
    x = FLOATS.tobytes()
    rows = [("b", "F4", [4], b"12"), ("é", "F32", [13, 100], x), ("", "BOOL", [1, 1], b"\1")]
    rows += [("ids", "U8", [3], b"abc"), ("a", "F64", [], bytes(8)), ("none", "I8", [0, 2], b"")]
    header: dict[str, Any] = {}
    data = b""
    for name, dtype, shape, raw in rows:
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    header = dict(sorted(header.items())) | {"__metadata__": {"format": "pt"}}
    return file_of(header, data)


def valid_2() -> Iterator[tuple[str, bytes]]:
    """Containers of version 2 that every reader takes."""
    yield "example", container_2({"x": RAW}, {"y": ONE})
    yield "nothing", tw.dumps({})
    yield "written", tw.dumps({"weight": FLOATS, "scalar": np.float64(3.5)})
    yield "plain_only", container_2({}, PLAIN)
    yield "plain_behind", container_2({"x": RAW}, PLAIN)
    # Its data is not aligned, and nothing says that it has to be.
    small_first = dict(reversed(PLAIN.items()))
    yield "plain_unaligned", container_2({"x": RAW}, small_first)
    header, data = header_2({"b": RAW, "a": RAW}, {"c": ONE})
    yield "names_order", digested(file_of(dict(reversed(header.items())), data, **COMPACT))
    yield "tied", container_2({"x": RAW}, {"y": ONE}, {TIED_KEY: '{"é":"x", "a":"y", "b":"x"}'})
    yield "tied_none", container_2({"x": RAW}, None, {TIED_KEY: " {}"})
    both = {TIED_KEY: '{"again":"x"}', TREE_KEY: json.dumps(TREE, ensure_ascii=False)}
    yield "tree", container_2({"x": RAW}, {"left out": ONE}, both)
    yield "tree_deep", container_2({}, None, {TREE_KEY: nested(64)})
    yield "tree_value", container_2({}, None, {TREE_KEY: '\n"no tensor"'})
    for name, text in TREE_GOOD.items():
        yield f"tree_{name}", container_2({}, None, {TREE_KEY: text})
    a_list = {"tightwire.list": "1"}
    yield "list_2", container_2({"0": RAW, "1": RAW}, {"2": ONE}, a_list)
    header, data = header_2({"1": RAW}, {"0": ONE}, a_list)
    header["1"] = header.pop("1")
    yield "list_plain_first", digested(file_of(header, data, **COMPACT))
    yield "source_mixed", compressed(mixed_source())
    later = {"tightwire.later": "?", "user": '"tightwire.digest":""'}
    yield "unknown_own_key_2", container_2({"x": RAW}, None, later)
    ignored = {DIGEST_KEY: "?", PLAIN_KEY: "?", TIED_KEY: "?", TREE_KEY: "?"}
    yield "other_own_keys_in_1", container({"x": RAW}, ignored)


def one_entry(text: bytes) -> bytes:
    """The header of version 1 whose only entry, `x`, is written so."""
    return b'{"x":' + text + b',"__metadata__":{"tightwire":"1"}}'


SOURCE_X: dict[str, Any] = {"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
#: Metadata whose characters are fewer than its bytes, in UTF-8 as in JSON.
LONG_USER = {"é\n": "\U0001f600"}


def long_source(more: int) -> bytes:
    """A source header of L bytes, and `more`, for a container of `x` and `LONG_USER`."""
    texts = ["x", "tightwire", "1", *LONG_USER, *LONG_USER.values()]
    limit = (1 << 20) + 16 * (sum(map(len, texts)) + 64)
    return json.dumps({"__metadata__": LONG_USER} | SOURCE_X).encode().ljust(limit + more)


def spare_bits() -> bytes:
    """A source header whose stream ends within a group of base64."""
    text = json.dumps(SOURCE_X).encode()
    while not source_of(text)["tightwire.source"].endswith("="):
        text += b" "
    return text


def other_last_digit(value: str) -> str:
    """The last digit of this base64, its unused bits set, and the padding."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    padding = value.count("=")
    last = digits.index(value.rstrip("=")[-1])
    return digits[last | (1 << 2 * padding) - 1] + "=" * padding


def own_metadata(key: str) -> dict[str, str]:
    """A source header with a key of tightwire's."""
    x = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    return source_of({"__metadata__": {key: "1"}, "x": x})


def invalid() -> Iterator[tuple[str, bytes, str]]:
    """Containers that every reader refuses, with the reason."""
    bad = "bad_container"
    good = container({"x": RAW}, {})
    yield "cut_off", good[:-1], bad
    yield "trailing", good + b"\0", bad
    yield "header_past_the_end", (1 << 40).to_bytes(8, "little") + good[8:], bad
    yield "no_version", file_of({"x": entry(0, 256)}, RAW), bad
    yield "version_2", container({"x": RAW}, {"tightwire": "2"}), bad
    yield "int8", container({"x": RAW}, {}, x=entry(0, 256, dtype="I8")), bad
    yield "two_dimensions", container({"x": RAW}, {}, x=entry(0, 256, shape=[2, 128])), bad
    yield "gap", container({"x": RAW}, {}, x=entry(128, 384)) + bytes(128), bad
    yield "overlap", container({"x": RAW}, {}, y=entry(128, 256)), bad
    yield "float_size", container({"x": RAW}, {}, x=entry(0, 256, shape=[256.0])), bad
    exponent = json.dumps(entry(0, 256)).encode().replace(b"256]", b"256e0]", 1)
    yield "size_exponent", file_of(one_entry(exponent), RAW), bad
    yield (
        "byte_order_mark",
        file_of("\ufeff".encode() + one_entry(exponent.replace(b"e0", b"")), RAW),
        bad,
    )
    yield "other_field", container({"x": RAW}, {}, x=entry(0, 256, more=1)), bad
    yield "nested", container({"x": RAW}, {}, x=entry(0, 256, shape=[{}] * 9)), bad
    yield "metadata_number", container({"x": RAW}, {}, __metadata__={"tightwire": 1}), bad
    x = json.dumps(entry(0, 256)).encode()
    metadata = b'"__metadata__":{"tightwire":"1"}'
    yield "twice", file_of(b'{"x":' + x + b',"\\u0078":' + x + b"," + metadata + b"}", RAW), bad
    long = x[:-1] + b" " * (4097 - len(x)) + b"}"
    yield "long_entry", file_of(b'{"x":' + long + b"," + metadata + b"}", RAW), bad
    yield "comma", file_of(b'{"x":' + x + b"," + metadata + b",}", RAW), bad
    for where, text in (
        ("name", '"\\ud800":1'),
        ("key", '"\\udfff":""'),
        ("value", '"k":"\\ud83d"'),
    ):
        fields = b'{"__metadata__":{"tightwire":"1"},"x":' + x + b"}"
        if where == "name":
            fields = fields.replace(b'"x"', b'"\\ud800"')
        else:
            fields = fields.replace(b'"1"', b'"1",' + text.encode())
        yield f"surrogate_{where}", file_of(fields, RAW), bad
    yield "list_names", container({"1": RAW, "0": RAW}, {"tightwire.list": "1"}), bad
    yield "list_version", container({"0": RAW}, {"tightwire.list": "2"}), bad

    plain = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    right = {"x": plain}
    yield "source_no_base64", container({"x": RAW}, {"tightwire.source": "!"}), bad
    yield "source_no_zlib", container({"x": RAW}, source_of(right, pack=False)), bad
    yield "source_no_json", container({"x": RAW}, source_of(b"{")), bad
    yield (
        "source_gap",
        container({"x": RAW}, source_of({"x": plain | {"data_offsets": [1, 4]}})),
        bad,
    )
    mark = "\ufeff".encode() + json.dumps(right).encode()
    yield "source_byte_order_mark", container({"x": RAW}, source_of(mark)), bad
    longer = container({"x": RAW}, LONG_USER | source_of(long_source(1)))
    yield "source_longer", longer, bad
    yield "source_other_name", container({"x": RAW}, source_of({"y": plain})), bad
    yield (
        "source_other_dtype",
        container({"x": RAW}, source_of({"x": plain | {"dtype": "I8"}})),
        bad,
    )
    wide = source_of({"x": plain | {"shape": [3, 1]}})
    yield "source_other_shape", container({"x": RAW}, wide), bad
    yield "source_surrogate", container({"x": RAW}, own_metadata("\ud800")), bad
    for key in ("tightwire", "tightwire.source", "tightwire.list", "tightwire.later"):
        yield f"source_{key}", container({"x": RAW}, own_metadata(key)), bad
    yield "source_too_large", container({"x": RAW}, source_of(b"{}" + b" " * (1 << 21))), bad

    many = np.tile(FLOATS, (2, 1)).astype(np.float16)
    slotted = tw.encode(many, dynamic_capacity=1024, out=np.zeros(1 << 14, np.uint8))
    if not slotted.header.dynamic_stride:
        raise AssertionError("the buffer has no slots")
    yield "slotted", container({"x": bytes(slotted.array)}, {}), bad
    damaged = bytearray(RAW)
    damaged[128] ^= 1
    yield "payload", container({"x": bytes(damaged)}, {}), "checksum_mismatch"
    yield "empty_buffer", container({"x": b""}, {}), "truncated"
    yield "half_buffer", container({"x": RAW[:128]}, {}), "truncated"
    yield "two_buffers", container({"x": RAW * 2}, {}), "trailing_bytes"
    # Two defects: the order of the checks says which counts.
    no_magic = bytes(4) + RAW[4:]
    both = {"x": bytes(damaged), "y": no_magic}
    yield "payload_and_magic", container(both, {}), "bad_magic"
    yield "magic_and_source", container({"x": no_magic}, own_metadata("tightwire")), bad
    yield "magic_and_shape", container({"x": no_magic}, wide), "bad_magic"
    yield from invalid_2()


def invalid_2() -> Iterator[tuple[str, bytes, str]]:
    """Containers of version 2 that every reader refuses, with the reason."""
    bad = "bad_container"
    good = container_2({"a": RAW, "b": RAW}, {"y": ONE})
    digest = good[good.index(b'digest":"') + 9 :][:64]
    yield "version_3", container_2({"x": RAW}, None, {"tightwire": "3"}), bad
    yield "digest_wrong", good.replace(digest, digest[::-1]), bad
    yield "digest_upper_case", good.replace(digest, digest.upper()), bad
    yield "digest_short", good.replace(digest + b'"', digest[:63] + b'" '), bad
    yield "digest_zero", good.replace(digest, NO_DIGEST.encode()), bad
    header, data = header_2({"x": RAW})
    yield "digest_white_space", digested(file_of(header, data)), bad
    escaped = file_of(header, data, **COMPACT).replace(
        b"tightwire.digest", b"tightwire\\u002edigest"
    )
    n = int.from_bytes(escaped[:8], "little") + 5
    yield "digest_escaped", digested(n.to_bytes(8, "little") + escaped[8:]), bad
    yield "name_changed", good.replace(b'"a":', b'"c":'), bad
    swapped = good.replace(b'"a":', b'"?":').replace(b'"b":', b'"a":').replace(b'"?":', b'"b":')
    yield "names_swapped", swapped, bad
    yield "header_padded", grown(good, 128), bad
    user = container_2({"x": RAW}, None, {"user": "1"})
    yield "metadata_changed", user.replace(b'"user":"1"', b'"user":"2"'), bad

    y = {"y": ONE}
    for name, text in (
        ("missing", ""),
        ("short", "1234567"),
        ("upper", "1234567A"),
        ("+", "+1234567"),
    ):
        name = {"+": "sign"}.get(name, name)
        yield f"plain_{name}", container_2({"x": RAW}, y, {PLAIN_KEY: text}), bad
    yield "plain_too_many", container_2({"x": RAW}, None, {PLAIN_KEY: "00000000"}), bad
    yield "plain_two_for_three", container_2({}, PLAIN, {PLAIN_KEY: "0" * 88}), bad
    yield "plain_value", container_2({"x": RAW}, y, {PLAIN_KEY: "00000000"}), "checksum_mismatch"
    yield "plain_data", good[:-1] + b"\x40", "checksum_mismatch"
    yield "plain_in_version_1", container({"x": RAW}, {}, y=ONE_ENTRY) + ONE[2], bad
    header, data = header_2({"x": RAW}, y)
    for which, at in (("x", 4), ("y", 0)):
        header[which]["data_offsets"] = [at, at + (256 if which == "x" else 4)]
    yield "buffer_behind_plain", digested(file_of(header, data[-4:] + RAW, **COMPACT)), bad
    empty = {"none": ("F32", [0], b""), "y": ONE}
    header, data = header_2({"x": RAW}, empty)
    header["none"]["data_offsets"] = [0, 0]
    yield "empty_plain_before_buffer", digested(file_of(header, data, **COMPACT)), bad
    huge = {"x": ("I8", [0, 1 << 62, 2], b"")}
    yield "plain_shape", container_2({}, huge), bad
    largest = {"x": ("F4", [0, 1 << 62, 4], b"")}
    yield "plain_shape_f4", container_2({}, largest), bad
    yield "f4_odd", container_2({}, {"x": ("F4", [3], bytes(2))}), bad
    damaged = bytearray(RAW)
    damaged[128] ^= 1
    two = container_2({"x": bytes(damaged)}, y, {PLAIN_KEY: "00000000"})
    yield "payload_and_plain", two, "checksum_mismatch"
    yield (
        "plain_and_magic",
        container_2({"x": bytes(4) + RAW[4:]}, y, {PLAIN_KEY: "0" * 8}),
        "bad_magic",
    )

    for name, text in TIED_BAD.items():
        yield f"tied_{name}", container_2({"x": RAW}, y, {TIED_KEY: text}), bad
    for name, text in TREE_BAD.items():
        yield f"tree_{name}", container_2({"x": RAW}, y, {TREE_KEY: text}), bad
    yield "tree_surrogate", container_2({"x": RAW}, y, {TREE_KEY: '"\\ud800"'}), bad

    source = compressed(mixed_source())
    fields, data = json_of(source)
    keys = fields["__metadata__"]
    for key, value in ((TIED_KEY, "{}"), (TREE_KEY, "0"), ("tightwire.list", "1")):
        more = fields | {"__metadata__": keys | {key: value, DIGEST_KEY: NO_DIGEST}}
        yield f"source_beside_{key[10:]}", digested(file_of(more, data, **COMPACT)), bad
    a_list = {"tightwire.list": "1"}
    yield "list_beside_tied", container_2({"0": RAW}, None, a_list | {TIED_KEY: "{}"}), bad
    yield "list_beside_tree", container_2({"0": RAW}, None, a_list | {TREE_KEY: "0"}), bad
    yield "list_names_2", container_2({"1": RAW}, {"0": ONE}, a_list), bad
    for what, changed in (
        ("dtype", {"dtype": "I32"}),
        ("shape", {"shape": [1]}),
    ):
        meta = source_of({"y": ONE_ENTRY | {"data_offsets": [0, 4]} | changed})
        yield f"source_plain_{what}", container_2({}, y, meta), bad
    other = source_of({"z": ONE_ENTRY | {"data_offsets": [0, 4]}})
    yield "source_plain_name", container_2({}, y, other), bad


TREE_GOOD = {
    # 2^53 + 1 is no binary64; the nearest one is 2^53.
    "keys_exact": '{"dict":[[9007199254740993,0],[9007199254740992.0,1],[1,2],["1",3],[null,4]]}',
    "minus_zero": "[-0,-0.0]",
    "largest_integer": "-" + "1" * 4300,
    "spare_bits": '{"bytes":"AB=="}',
    "white_space": "\t[ ]\r\n ",
}
ONE_ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [], "data_offsets": [256, 260]}
TIED_BAD = {
    "nothing": '{"z":"?"}',
    "entry": '{"y":"x"}',
    "itself": '{"z":"z"}',
    "chain": '{"z":"x","zz":"z"}',
    "metadata": '{"__metadata__":"x"}',
    "twice": '{"z":"x","z":"x"}',
    "list": '["z"]',
    "number": '{"z":1}',
    "no_json": '{"z":"x",}',
    "end": '{"z":"x"} {}',
    "surrogate": '{"\\ud800":"x"}',
    "byte_order_mark": "\ufeff{}",
    "empty": "",
}
TREE_BAD = {
    "deep": nested(65),
    "very_deep": "[" * 5000,
    "unknown": '{"set":[]}',
    "two_members": '{"tuple":[],"dict":[]}',
    "no_members": "{}",
    "member_twice": '{"tuple":[],"tuple":[]}',
    "no_tensor": '{"tensor":"z"}',
    "tensor_number": '{"tensor":1}',
    "key_twice": '{"dict":[["a",1],["a",2]]}',
    "key_by_value": '{"dict":[[1,0],[true,0]]}',
    "key_false": '{"dict":[[-0.0,0],[false,0]]}',
    "key_minus_zero": '{"dict":[[0,0],[-0.0,0]]}',
    "key_float": '{"dict":[[9007199254740992,0],[9007199254740992.0,0]]}',
    "key_list": '{"dict":[[[],1]]}',
    "key_nan": '{"dict":[[{"float":"nan"},1]]}',
    "key_alone": '{"dict":[["a"]]}',
    "dict_object": '{"dict":{"a":1}}',
    "tuple_text": '{"tuple":"ab"}',
    "bytes": '{"bytes":"AA"}',
    "bytes_space": '{"bytes":"AA== "}',
    "bytes_url": '{"bytes":"_-8="}',
    "byte_order_mark": "\ufeff[]",
    "float": '{"float":"1.5"}',
    "nan": "[NaN]",
    "infinity": "-Infinity",
    "large_float": "1e999",
    "large_integer": "1" * 4301,
    "no_json": "[1,]",
    "end": "[] []",
    "empty": "",
}


def grown(data: bytes, nbytes: int) -> bytes:
    """The file with more spaces behind the header."""
    n = int.from_bytes(data[:8], "little")
    head = (n + nbytes).to_bytes(8, "little") + data[8 : 8 + n] + b" " * nbytes
    return head + data[8 + n :]


def json_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file."""
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def expected_of(data: bytes) -> dict[str, Any]:
    """What reading a valid container gives."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        path.write_bytes(data)
        with tw.open(path) as file:
            rows = [
                [name, x.dtype, list(x.shape), hashlib.sha256(x.numpy().tobytes()).hexdigest()]
                for name, x in ((name, file[name]) for name in file)
            ]
    return {"tensors": rows, "list": "tightwire.list" in json_of(data)[0].get("__metadata__", {})}


def write(folder: Path) -> None:
    """Write what is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "expected.json"
    expected: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    cases = {name: (data, expected_of(data)) for name, data in valid()}
    for name, plain in (("source", odd_source()), ("source_mixed", mixed_source())):
        cases[name][1]["restored"] = hashlib.sha256(plain).hexdigest()
    cases |= {name: (data, {"reason": reason}) for name, data, reason in invalid()}
    for name, (data, meaning) in cases.items():
        if name not in expected:
            (folder / f"{name}.safetensors").write_bytes(data)
            expected[name] = meaning
    path.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    default = Path(__file__).parent / "vectors" / "container"
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
