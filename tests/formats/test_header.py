"""The planned header: bytes, limits, versions and feature bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tightwire as tw
from tightwire.formats.codec_ids import CODEC_IDS
from tightwire.formats.dtypes import BY_ID, BY_NAME
from tightwire.formats.errors import REASONS
from tightwire.formats.header import ASSEMBLED, CHECKSUM, Header, header_crc, parse_header


def header(**changes: object) -> Header:
    plan = tw.codec("zipccl").plan((3, 5000), "bfloat16", chunks=2)
    return replace(plan.header, **changes)  # type: ignore[arg-type]


def reason(data: bytes) -> str:
    with pytest.raises(tw.FormatError) as caught:
        parse_header(memoryview(data))
    return caught.value.reason


def repaired(data: bytes) -> bytes:
    return data[:28] + header_crc(data).to_bytes(4, "little") + data[32:]


def test_headers_come_back() -> None:
    for h in (header(), header(shape=()), header(minor=7), header(required=CHECKSUM | ASSEMBLED)):
        assert parse_header(memoryview(h.pack())) == h
        assert len(h.pack()) == h.nbytes


def test_crc_is_castagnolis() -> None:
    data = b"1234" + bytes(24) + b"????" + b"56789"
    whole = data[:28] + data[32:]
    table = []
    for i in range(256):
        for _ in range(8):
            i = i >> 1 ^ (0x82F63B78 if i & 1 else 0)
        table.append(i)
    crc = 0xFFFFFFFF
    for byte in whole:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    assert header_crc(data) == crc ^ 0xFFFFFFFF


def test_reasons() -> None:
    data = header().pack()
    assert reason(data[:3]) == "truncated"
    assert reason(b"PK\3\4" + data[4:]) == "bad_magic"
    assert reason(data[:20]) == "truncated"
    assert reason(data[:4] + b"\2" + data[5:]) == "unsupported_version"
    assert reason(data[:-8]) == "truncated"
    assert reason(data[:8] + (1 << 20 | 8).to_bytes(4, "little") + data[12:]) == "header_too_large"
    assert reason(data[:8] + (24).to_bytes(4, "little") + data[12:]) == "bad_header"
    assert reason(data[:30] + bytes([data[30] ^ 1]) + data[31:]) == "checksum_mismatch"
    assert reason(header(required=4).pack()) == "unknown_feature"
    assert reason(header(codec_id=999).pack()) == "unknown_codec"
    assert reason(header(chunks=0).pack()) == "bad_header"
    assert reason(header(shape=(1,) * 33).pack()) == "bad_header"
    assert reason(header(shape=(1 << 32, 1 << 31)).pack()) == "limit_exceeded"
    assert reason(repaired(data[:13] + b"\xff" + data[14:])) == "bad_header"


def test_unknown_optional_bits_and_newer_minor_versions_are_read() -> None:
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    data = bytes(tw.encode(x))
    for at, value in ((5, 200), (18, 255), (19, 128)):
        changed = repaired(data[:at] + bytes([value]) + data[at + 1 : 72]) + data[72:]
        assert len(changed) == len(data)
        assert tw.inspect(data).header.nbytes == 72
        assert tw.decode(changed).tobytes() == x.tobytes()


def test_assembled_buffers_may_have_any_ordinal() -> None:
    x = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    halves = [tw.encode(x[:4500]), tw.encode(x[4500:])]
    plan = tw.codec("zipccl").plan((9000,), "float32", chunks=2)
    parts = [replace(plan.header, dynamic_stride=0, required=CHECKSUM | ASSEMBLED).pack()]
    for half in halves:
        start = half.plan.header.nbytes
        parts.append(bytes(half.array[start : start + 32]))
    parts.append(bytes(plan.static_offset - sum(map(len, parts))))
    parts += [bytes(half.static(0)) for half in halves]
    for half in halves:
        dynamic = bytes(half.dynamic(0))
        parts.append(dynamic + bytes(-len(dynamic) % 128))
    data = b"".join(parts)
    assert tw.decode(data).tobytes() == x.tobytes()
    plain = repaired(data[:16] + b"\1" + data[17 : plan.header.nbytes])
    with pytest.raises(tw.FormatError, match="bad_record"):
        tw.decode(plain + data[plan.header.nbytes :])


def test_ids_are_those_of_the_pages() -> None:
    assert CODEC_IDS["raw"][0] == 1
    assert CODEC_IDS["zipccl"][0] == 2
    assert {n: BY_NAME[n].id for n in ("float16", "bfloat16", "float32", "float64")} == {
        "float16": 16,
        "bfloat16": 17,
        "float32": 18,
        "float64": 19,
    }
    assert len(BY_ID) == len(BY_NAME)


def test_reasons_are_those_of_the_page() -> None:
    with pytest.raises(AssertionError):
        tw.FormatError("no_such_reason", "")
    assert len(set(REASONS)) == len(REASONS)
