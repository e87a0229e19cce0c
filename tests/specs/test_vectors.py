"""The vectors: every backend and the decoder written from the pages alone agree about each."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decoders.buffer as decoder
import make_vectors
import tightwire as tw
from decoders.common import FormatError
from support import vector_key
from tightwire.formats.dtypes import BY_ID
from tightwire.formats.errors import REASONS
from tightwire.formats.header import CHECKSUM
from tightwire.planning import spec_class

SPECS = Path(__file__).resolve().parents[2] / "specs"
VECTORS = SPECS / "vectors"
INVALID = VECTORS / "invalid"
VALID_NAMES = sorted(
    f"{codec}/{p.stem}" for codec in tw.list_codecs() for p in (VECTORS / codec).glob("*.tw")
)
REASON_OF: dict[str, str] = json.loads((INVALID / "reasons.json").read_text())

#: Valid buffers that no encode() with known parameters gives: slotted, or edited afterwards.
NOT_PACKED_ENCODINGS = {
    "nvfp4/float32_two_scales",
    "delta/bfloat16_slotted",
    "raw/uint8_assembled",
    "raw/uint8_newer_minor",
    "zipccl/bfloat16_fixed_rate",
    "zipccl/bfloat16_slotted",
    *(name for name in VALID_NAMES if name.endswith(("_all_codes", "_sum"))),
}
#: The decoder written from the pages.
DECODER = [SPECS / "decoder.py", *sorted((SPECS / "decoders").glob("*.py"))]
RAW_CHUNKS = {
    "zipccl/bfloat16_one_raw_chunk": (1,),
    "zipccl/bfloat16_short_raw_chunk": (0, 1, 2),
}


def codec_of(header: tw.Header) -> tw.Codec:
    """The codec with the parameters of a header."""
    return tw.Codec(spec_class(header.codec).unpack_params(header.params))


def vector(name: str) -> tuple[bytes, bytes]:
    path = VECTORS / f"{name}.tw"
    return path.read_bytes(), path.with_suffix(".bin").read_bytes()


def base_of(path: Path) -> bytes | None:
    """The base of a vector of a codec that needs one."""
    base = path.with_suffix(".base")
    return base.read_bytes() if base.exists() else None


def given(path: Path) -> dict[str, Any]:
    """What decoding a vector needs: nothing, or a base of its dtype and shape."""
    base = base_of(path)
    if base is None:
        return {}
    # The CRC of a header may be what is wrong.
    data = path.read_bytes()
    shape = np.frombuffer(data, "<u8", data[14], 32).tolist()
    found = np.frombuffer(base, BY_ID[data[13]].numpy)
    return {"base": found.reshape(shape) if found.size == np.prod(shape) else found}


def page(name: str) -> str:
    return (SPECS / name).read_text()


@pytest.mark.parametrize("name", VALID_NAMES)
def test_valid_decodes(name: str, backend: str) -> None:
    data, tensor = vector(name)
    beside = given(VECTORS / f"{name}.tw")
    decoded = tw.decode(data, backend=backend, **beside)
    header = tw.inspect(data).header
    assert (decoded.dtype, decoded.shape) == (header.dtype.numpy, header.shape)
    assert decoded.tobytes() == tensor
    if backend != "ref":
        tw.verify(data, **beside)


@pytest.mark.parametrize("name", sorted(set(VALID_NAMES) - NOT_PACKED_ENCODINGS))
def test_valid_encodes_to_the_same_bytes(name: str, backend: str) -> None:
    data, tensor = vector(name)
    header = tw.inspect(data).header
    codec = codec_of(header)
    if not codec.lossless:
        tensor = (VECTORS / f"{name}.input").read_bytes()
    x = np.frombuffer(tensor, header.dtype.numpy).reshape(header.shape)
    checksum = bool(header.required & CHECKSUM)
    key = vector_key(name)
    beside = given(VECTORS / f"{name}.tw")
    options = {"chunks": header.chunks, "checksum": checksum, "key": key, **beside}
    buffer = codec.encode(x, backend=backend, **options)
    assert bytes(buffer) == data


@pytest.mark.parametrize("name", VALID_NAMES)
def test_valid_decodes_from_the_pages(name: str) -> None:
    data, tensor = vector(name)
    header = tw.inspect(data).header
    base = base_of(VECTORS / f"{name}.tw")
    assert decoder.decode(data, base=base) == (header.dtype.name, header.shape, tensor)


@pytest.mark.parametrize("name", sorted(NOT_PACKED_ENCODINGS & set(VALID_NAMES)))
def test_other_encodings(name: str) -> None:
    data, _ = vector(name)
    info = tw.inspect(data)
    assert (info.header.dynamic_stride > 0) == ("slotted" in name or "fixed_rate" in name)
    assert (info.nbytes > info.packed_nbytes) == (info.header.dynamic_stride > 0)
    assert (info.header.required > CHECKSUM) == ("assembled" in name)


@pytest.mark.parametrize("name", [n for n in VALID_NAMES if n.startswith("zipccl/")])
def test_raw_chunks_are_those_meant(name: str) -> None:
    expected = (0,) if "random_bits" in name else RAW_CHUNKS.get(name, ())
    assert tw.inspect(vector(name)[0]).raw_chunks == expected


@pytest.mark.parametrize("name", [n for n in VALID_NAMES if "zero_mode" in n])
def test_zero_mode_is_on(name: str) -> None:
    data = vector(name)[0]
    header = tw.inspect(data).header
    index = 128 + header.sections[0].nbytes
    windows = np.frombuffer(data, "<u2", 2, index + 2 * 4)
    assert (windows >= 1 << 15).all()


def test_vectors_and_reasons_are_complete() -> None:
    assert {p.stem for p in INVALID.glob("*.tw")} == set(REASON_OF)
    assert set(REASON_OF.values()) == set(REASONS) - {"bad_container"}
    tensors = {f"{p.parent.name}/{p.stem}" for p in VECTORS.rglob("*.bin")}
    assert tensors == set(VALID_NAMES)
    given = {f"{p.parent.name}/{p.stem}" for p in VECTORS.rglob("*.input")}
    lossy = {n for n in VALID_NAMES if not tw.codec(n.partition("/")[0]).lossless}
    assert given == lossy - NOT_PACKED_ENCODINGS
    assert set(VALID_NAMES) >= NOT_PACKED_ENCODINGS


@pytest.mark.parametrize("name", REASON_OF)
def test_invalid_is_refused(name: str, backend: str) -> None:
    with pytest.raises(tw.FormatError) as caught:
        path = INVALID / f"{name}.tw"
        tw.decode(path.read_bytes(), backend=backend, **given(path))
    assert caught.value.reason == REASON_OF[name]


@pytest.mark.parametrize("name", REASON_OF)
def test_invalid_fails_verify(name: str) -> None:
    with pytest.raises(tw.FormatError) as caught:
        path = INVALID / f"{name}.tw"
        tw.verify(path.read_bytes(), **given(path))
    assert caught.value.reason == REASON_OF[name]


@pytest.mark.parametrize("name", REASON_OF)
def test_invalid_is_refused_from_the_pages(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        path = INVALID / f"{name}.tw"
        decoder.decode(path.read_bytes(), base=base_of(path))
    assert caught.value.reason == REASON_OF[name]


@pytest.mark.parametrize("name", ["raw/uint16_3_chunks", "zipccl/bfloat16_2048_ones"])
def test_reader_limit(name: str) -> None:
    data, tensor = vector(name)
    assert decoder.decode(data, len(tensor))[2] == tensor
    with pytest.raises(FormatError) as caught:
        decoder.decode(data[:200], len(tensor) - 1)
    assert caught.value.reason == "limit_exceeded"
    with pytest.raises(tw.FormatError) as from_code:
        tw.decode(data[:200], max_nbytes=len(tensor) - 1)
    assert from_code.value.reason == "limit_exceeded"


def test_every_truncation_of_a_vector_is_refused_alike() -> None:
    for name in ("raw/uint8_3", "zipccl/float8_e5m2_2048", "zipccl/bfloat16_slotted"):
        data, _ = vector(name)
        for length in range(0, len(data), 41):
            with pytest.raises(FormatError) as caught:
                decoder.decode(data[:length])
            with pytest.raises(tw.FormatError) as from_code:
                tw.decode(data[:length])
            assert caught.value.reason == from_code.value.reason == "truncated"


@pytest.mark.parametrize("path", DECODER, ids=lambda path: path.stem)
def test_decoder_imports_the_standard_library_only(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            if node.level == 0:
                imported.add(str(node.module).split(".")[0])
        else:
            assert not (isinstance(node, ast.Name) and node.id == "__import__")
    # buffer.py finds the modules of its folder.
    own = {"decoder": {"decoders"}, "buffer": {"importlib"}}.get(path.stem, set())
    assert imported - own <= sys.stdlib_module_names - {"importlib"}


@pytest.mark.parametrize("codec", tw.list_codecs())
def test_decoder_runs_without_installed_packages(codec: str, tmp_path: Path) -> None:
    source = min((VECTORS / codec).glob("*.tw"), key=lambda path: path.stat().st_size)
    command = [sys.executable, "-E", "-S", str(SPECS / "decoder.py")]
    command += [str(source), str(tmp_path / "out")]
    if base_of(source) is not None:
        command.append(str(source.with_suffix(".base")))
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "out").read_bytes() == source.with_suffix(".bin").read_bytes()


@pytest.mark.slow
def test_make_vectors_reproduces_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_vectors.write(tmp_path) == 0
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*.*")}
    there = {p.relative_to(VECTORS): p.read_bytes() for p in VECTORS.rglob("*.*")}
    # Files of containers have a test and a generator of their own.
    assert made == {p: data for p, data in there.items() if p.parts[0] != "container"}
    assert sum(map(len, made.values())) < 8_000_000

    changed = tmp_path / "raw" / "uint8_3.bin"
    changed.write_bytes(b"\1\2\4")
    reasons = tmp_path / "invalid" / "reasons.json"
    reasons.write_text('{"magic": "truncated"}')
    capsys.readouterr()
    assert make_vectors.write(tmp_path) == 2
    assert changed.read_bytes() == b"\1\2\4"
    assert reasons.read_text() == '{"magic": "truncated"}'
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("kept")]
    assert lines == ["DIFFERENT, kept raw/uint8_3.bin", "DIFFERENT, kept invalid/reasons.json"]


def test_vectors_of_one_codec_leave_the_others_alone(tmp_path: Path) -> None:
    reasons = tmp_path / "invalid" / "reasons.json"
    reasons.parent.mkdir()
    reasons.write_text('{"magic": "bad_magic"}')
    assert make_vectors.write(tmp_path, ["raw"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"invalid", "raw"}
    made = {p.stem for p in tmp_path.glob("invalid/*.tw")}
    assert "raw_parameters" in made
    assert json.loads(reasons.read_text()) == {
        name: REASON_OF[name] for name in sorted(made | {"magic"})
    }


def test_worked_example_of_buffer_page() -> None:
    data, tensor = vector("raw/uint8_3")
    text = page("buffer.md")
    example = text[text.index("## Worked example") :]
    size = re.search(r"is (\d+) bytes", example)
    assert size is not None
    assert (len(data), list(tensor)) == (int(size[1]), [1, 2, 3])
    checked = 0
    for offset, fields in re.findall(r"^    ([0-9a-f]{3})  (.{48})", example, re.MULTILINE):
        shown = bytes.fromhex(fields.partition("...")[0])
        at = int(offset, 16)
        assert data[at : at + len(shown)] == shown
        checked += len(shown)
    assert checked == 0x50 + 1 + 4
    crc = re.search(r"CRC32C ([0-9a-f]{8})", example)
    assert crc is not None
    assert int(crc[1], 16) == int.from_bytes(data[28:32], "little")
    assert not any(data[0x50:0x80])
    assert not any(data[0x83:])


def test_worked_example_of_taco_page() -> None:
    data, tensor = vector("taco/bfloat16_384_none")
    text = page("taco.md")
    example = text[text.index("## Worked example") :]
    numbers = re.search(
        r"(\d+) elements 1\.0,.*s = 1 / (\d+) = `(\w{8})`.*code `(\w\w)`:\s+(\d+) bytes `7e`, "
        r"then three words `(.{11})`, and (\d+) zeros",
        example,
        re.DOTALL,
    )
    assert numbers is not None
    n, q, zeros = (int(numbers[i]) for i in (1, 2, 7))
    assert int(numbers[3], 16) == int((np.float32(1) / np.float32(q)).view(np.uint32))
    assert bytes.fromhex(numbers[6]) == bytes.fromhex(numbers[3])[::-1]
    assert n == int(numbers[5])
    scales = 3 * bytes.fromhex(numbers[6])
    assert data[128:] == bytes.fromhex(numbers[4]) * n + scales + bytes(zeros)
    assert tensor == b"\x80\x3f" * n


def test_worked_example_of_sdp4bit_page() -> None:
    data, tensor = vector("sdp4bit/bfloat16_257_none")
    text = page("sdp4bit.md")
    example = text[text.index("## Worked example") :]
    numbers = re.search(
        r"(\d+) elements: 1\.0, -3\.5,.* s = 1 = `(\w{8})`: scales are\s+`([^`]*)`",
        example,
        re.DOTALL,
    )
    assert numbers is not None
    n, scales = int(numbers[1]), bytes.fromhex(numbers[3])
    start = re.search(r"payload starts `(\w\w)`, the other (\d+) bytes are 00", example)
    assert start is not None
    codes = bytes.fromhex(start[1]) + bytes(int(start[2]))
    assert (len(codes), len(scales)) == (-(-n // 2), 4 * -(-n // 128))
    assert scales[4:] == 2 * bytes.fromhex(numbers[2])[::-1]
    assert data[128:] == codes.ljust(256, b"\0") + scales.ljust(128, b"\0")
    assert tensor == b"\x80\x3f\x60\xc0" + bytes(2 * (n - 2))


def test_worked_example_of_tahquant_page() -> None:
    data, tensor = vector("tahquant/bfloat16_ramp")
    text = page("tahquant.md")
    example = text[text.index("## Worked example") :]
    planes = re.findall(r"`(\w{16})`", example)
    scales = re.search(r"scales (\d+) times `(.{11})`, then (\d+) pivot bytes 00", example)
    assert scales is not None
    tiles = int(scales[1])
    assert len(planes) == 4
    assert tiles == int(scales[3]) == 16
    static = data[128:]
    words = b"".join(bytes.fromhex(word)[::-1] * tiles for word in planes)
    assert static[: len(words)] == words
    scale_bytes = bytes.fromhex(scales[2]) * tiles + bytes(tiles)
    assert static[len(words) :] == scale_bytes.ljust(128, b"\0") + bytes(128)
    expected = (np.arange(1024) % 16).astype(np.float32).view("<u4") >> 16
    assert tensor == expected.astype("<u2").tobytes()


def test_worked_example_of_dynamiq_page() -> None:
    data, tensor = vector("dynamiq/bfloat16_512_fixed")
    text = page("dynamiq.md")
    example = text[text.index("## Worked example") :]
    numbers = re.search(
        r"(\d+) elements, 1\.0 and -1\.0 .* index `(\w\w)`\..*"
        r"scales `([^`]*)` and (\d+) bytes `ff`.*"
        r"planes is `(\w\w)` .*, `(\w\w)` .*: (\d+) times `([^`]*)` in each of (\d+) planes",
        example,
        re.DOTALL,
    )
    assert numbers is not None
    n, ones, times, planes = (int(numbers[i]) for i in (1, 4, 7, 9))
    pair = bytes.fromhex(numbers[8])
    assert pair == bytes.fromhex(numbers[5] + numbers[6])
    payload = pair * (times * planes)
    scales = bytes.fromhex(numbers[3]) + b"\xff" * ones
    index = bytes.fromhex(numbers[2])
    expected = [part.ljust(-(-len(part) // 128) * 128, b"\0") for part in (payload, scales, index)]
    assert data[128:] == b"".join(expected)
    assert tensor == b"\x80\x3f\x80\xbf" * (n // 2)


def test_worked_example_of_zipccl_page() -> None:
    data, tensor = vector("zipccl/bfloat16_2048_ones")
    text = " ".join(page("zipccl.md").split())
    example = text[text.index("## Worked example") :]
    numbers = re.search(
        r"(\d+) elements 1\.0 \(0x(\w+)\).*W = (\d+).*window (\d+) = `79 00`.* is "
        r"(\d+) bytes 00 and 3 \* (\d+) bytes ff,\s+(\d+) in all; "
        r"index: offset `00 00 00 00`, window `79 00`; no escapes",
        example,
        re.DOTALL,
    )
    assert numbers is not None
    n, columns, window, zeros, ones, block = (int(numbers[i]) for i in (1, 3, 4, 5, 6, 7))
    assert tensor == int(numbers[2], 16).to_bytes(2, "little") * n
    assert (columns, zeros, ones, block) == (n // 8, n, n // 8, zeros + 3 * ones)
    static = data[128:] if len(data) == 128 + 2944 else b""
    assert static[:block] == bytes(zeros) + b"\xff" * (3 * ones)
    assert static[block:] == bytes(4) + window.to_bytes(2, "little") + bytes(122)
    assert tw.inspect(data).dynamic_nbytes == (0,)


def test_worked_example_of_lhc_page() -> None:
    data, tensor = vector("lhc/float32_example")
    text = page("lhc.md")
    example = text[text.index("## Worked example") :]
    hashes = [int(h, 16) for h in re.findall(r"`(\w{8})`", example)]
    offsets = re.search(r"offsets (\d+), (\d+) and (\d+)", example)
    assert offsets is not None
    assert [h % 256 for h in hashes] == [int(o) for o in offsets.groups()]
    expected = bytearray(4096 + 256)
    for word, at in re.findall(r"`(\w\w \w\w \w\w \w\w)` at (?:byte )?(\d+)", example):
        expected[int(at) : int(at) + 4] = bytes.fromhex(word)
    for byte, at in re.findall(r"`(\w\w)` at (?:byte )?(\d+)", example):
        expected[4096 + int(at)] = int(byte, 16)
    assert sum(b > 0 for b in expected) == 5 + 3
    assert data[128:] == expected
    x = np.zeros(2048, np.float32)
    x[[0, 1023, 1029]] = 1.5, -2, 3
    assert tensor == x.tobytes()


def test_worked_example_of_thc_page() -> None:
    data, tensor = vector("thc/float32_example")
    text = page("thc.md")
    example = text[text.index("## Worked example") :]
    words = [int(w, 16) for w in re.findall(r"`(\w{8})`", example)]
    sign, norm, *drawn = words
    assert (sign & 1, norm, len(drawn)) == (1, 0x3D000000, 4)
    runs = re.findall(r"`((?:\w\w ?)+)`", example)
    first, count, scales = (bytes.fromhex(run) for run in runs if len(run) != 8)
    steps = np.float32(480 / 2.1539) / np.uint32(norm).view(np.float32) * np.float32(-(2.0**-10))
    u = float(steps + np.float32(15))
    assert f"u = {u:.4f}" in example
    assert first == bytes(9 if (w >> 16) * 2 < (u - 7) * 2**16 else 7 for w in drawn)
    assert data[128 : 128 + 4] == first
    assert set(data[128 : 128 + 1024]) == {7, 9}
    assert data[128 + 1024 :] == count.ljust(128, b"\0") + scales.ljust(128, b"\0")
    assert (
        tw.error(np.frombuffer(tensor, np.float32), np.eye(1, 1024, dtype=np.float32)[0]).max < 0.1
    )


def test_worked_example_of_omnireduce_page() -> None:
    data, tensor = vector("omnireduce/float32_example")
    text = page("omnireduce.md")
    example = text[text.index("## Worked example") :]
    expected = bytearray(2 * 256 * 2 + 128)
    for cell, at in re.findall(r"`(\w\w \w\w)` at (?:byte )?(\d+)", example):
        expected[int(at) : int(at) + 2] = bytes.fromhex(cell)
    index = re.search(r"index is `(\w\w)`", example)
    assert index is not None
    expected[1024] = int(index[1], 16)
    assert sum(b > 0 for b in expected) == 4
    assert data[128:] == expected
    x = np.zeros(513, np.float32)
    x[[0, 300]] = 1, -2
    assert tensor == x.tobytes()
