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

RAW = bytes(tw.encode(np.array([1, 2, 3], np.uint8), "raw"))
FLOATS = (np.arange(1300) % 97 / 64 - 0.5).astype(np.float32).reshape(13, 100)


def file_of(fields: Any, data: bytes = b"") -> bytes:
    """A file with this header, an object or its bytes."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
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


def compressed(plain: bytes) -> bytes:
    """The container made from a plain file."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        source.write_bytes(plain)
        compress_file(source, target)
        return target.read_bytes()


def valid() -> Iterator[tuple[str, bytes]]:
    """Containers that every reader takes."""
    yield "one", tw.dumps({"x": np.array([1, 2, 3], np.uint8)}, "raw")
    yield "none", tw.dumps({})
    yield "two", tw.dumps({"weight": FLOATS, "scalar": np.float64(3.5)})
    yield "list", tw.dumps([FLOATS[0], np.arange(3), FLOATS[:0]])
    yield "empty_list", tw.dumps([])
    yield "source", compressed(odd_source())
    yield "unknown_own_key", container({"x": RAW}, {"tightwire.later": "?"})
    # Members in another order than their data, white space, escapes.
    text = b'\n{ "b" :{"shape":[256],"data_offsets":[256,512],"dtype":"U8"},\t"\\u0061":'
    text += json.dumps(entry(0, 256), indent=1).encode()
    text += b' , "__metadata__" : {"tightwire" : "1"} }\r\n'
    yield "spaces", file_of(text, RAW * 2)


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


def expected_of(data: bytes) -> dict[str, Any]:
    """What reading a valid container gives."""
    tensors = tw.loads(data)
    named = tensors if isinstance(tensors, dict) else {str(i): x for i, x in enumerate(tensors)}
    rows = [
        [name, x.dtype.name, list(x.shape), hashlib.sha256(x.tobytes()).hexdigest()]
        for name, x in named.items()
    ]
    return {"tensors": rows, "list": isinstance(tensors, list)}


def write(folder: Path) -> None:
    """Write what is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "expected.json"
    expected: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    cases = {name: (data, expected_of(data)) for name, data in valid()}
    cases["source"][1]["restored"] = hashlib.sha256(odd_source()).hexdigest()
    cases |= {name: (data, {"reason": reason}) for name, data, reason in invalid()}
    for name, (data, meaning) in cases.items():
        if name not in expected:
            (folder / f"{name}.safetensors").write_bytes(data)
            expected[name] = meaning
    path.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    default = Path(__file__).parent / "vectors" / "container"
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
