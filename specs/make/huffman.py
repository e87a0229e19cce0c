"""huffman.md."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.codecs.common import huffman
from tightwire.formats.dtypes import BY_NAME, DTYPES
from tightwire.formats.header import RAW

from . import common, data

DTYPE_NAMES = tuple(d.name for d in DTYPES if "complex" not in d.name)
_SIZES = {
    "bfloat16": (1023, 1024, 2049),
    "float32": (2049,),
    "float16": (2049,),
    "float8_e5m2": (33000,),
}
_INDEX_NBYTES = 5


def typical(seed: int, dtype: str, n: int) -> data.Array:
    """Values as tensors of a dtype have them; integers are small, bool is mostly 0."""
    d = BY_NAME[dtype]
    if d.is_float:
        return data.bell(seed, dtype, n)
    words = data.random_words(seed, n)
    if dtype == "bool":
        return np.asarray(words % np.uint64(5) == 0)
    if d.itemsize == 1:
        small = (words % np.uint64(16) * (words >> np.uint64(8)) % np.uint64(7)).astype(np.uint8)
        return small.view(d.numpy)
    return (words % np.uint64(300 if d.itemsize == 2 else 30000)).astype(d.numpy)


def example() -> data.Array:
    """The worked example of the page."""
    x = np.where(np.arange(1024) % 4 == 3, -2.0, 1.0)
    return data.narrowed(x, "bfloat16")


def encoded(x: data.Array, **options: Any) -> tw.Buffer:
    """A fresh buffer of the reference."""
    return tw.codec("huffman").encode(x, backend="ref", **options)


def lossless(name: str, x: data.Array, **options: Any) -> common.Vector:
    """A packed vector."""
    buffer = encoded(x, **options)
    common.check_codec(buffer, "huffman", name)
    return f"huffman/{name}", bytes(buffer), x.tobytes()


def left_out(n: int) -> data.Array:
    """Which of the first elements of a group are in no sample; see huffman.md, "Tables"."""
    i = np.arange(n)
    return np.asarray((i >> 5 & 7) != (i >> 8 ^ i >> 11 ^ i >> 14) & 7)


def groups() -> data.Array:
    """Two groups of float8, of which the first has a sample, the second a shorter tile."""
    x = data.bell(72, "float8_e5m2", 8 * huffman.TILE + 700)
    bits = data.bits_of(x)
    # Mostly zeros, which have short codes, and a value that no sample has.
    zeros = data.random_words(71, x.size) % 8 > 0
    bits[zeros] = 0
    rare = np.flatnonzero(left_out(8 * huffman.TILE) & ~zeros[: 8 * huffman.TILE])
    bits[rare[::97]] = 1
    return x


def tiles() -> data.Array:
    """bfloat16 with a sample: tiles that are wide, constant and stored.

    The first has zeros, values, and an exponent that the sample has not.
    """
    n = 2 * huffman.TILE + 1000
    x = data.bell(73, "bfloat16", n)
    bits = data.bits_of(x)
    bits[:9000] = 0
    bits[huffman.TILE : 2 * huffman.TILE] = 0
    bits[2 * huffman.TILE :] = data.random_bits(74, "uint16", (1000,))
    rare = left_out(n) & (np.arange(n) % 97 == 0)
    rare[:9000] = rare[huffman.TILE :] = False
    bits[rare] = 0x0180
    return x


def valid() -> common.Vectors:
    """Vectors of codec huffman."""
    yield lossless("bfloat16_example", example())
    for dtype in DTYPE_NAMES:
        for n in _SIZES.get(dtype, ()):
            yield lossless(f"{dtype}_{n}", typical(n, dtype, n))
        # The last run is nearly whole, so that sizes of runs are alike.
        n = 3001 if BY_NAME[dtype].itemsize == 1 else 2001
        yield lossless(f"{dtype}_{n}", typical(70, dtype, n))
        yield lossless(f"{dtype}_zeros", np.zeros(1100, BY_NAME[dtype].numpy))
        if BY_NAME[dtype].is_float:
            n = 4200 if BY_NAME[dtype].itemsize == 1 else 2100
            yield lossless(f"{dtype}_specials", data.specials(dtype, n))
    yield lossless("float8_e5m2_2_groups", groups())
    yield lossless("bfloat16_modes", tiles())
    # Low bits that are zero: planes with few values, and no escape.
    x = data.bell(75, "float32", 2100)
    data.bits_of(x)[:] &= np.uint32(0xFFFFE000)
    yield lossless("float32_low_zeros", x)
    x = np.zeros(4000, bool)
    x[::7] = True
    data.bits_of(x)[100] = 255
    yield lossless("bool_other_bytes", x)

    x = data.bell(76, "bfloat16", 3 * 1100)
    data.bits_of(x)[1100:2200] = data.random_bits(77, "uint16", (1100,))
    yield lossless("bfloat16_one_raw_chunk", x.reshape(3, 1100), chunks=3)
    yield lossless("bfloat16_3001_2_chunks", data.bell(78, "bfloat16", 3001), chunks=2)
    yield lossless("bfloat16_no_checksum", data.bell(79, "bfloat16", 1500), checksum=False)


def parts() -> common.Parts:
    """One chunk of 3000 elements of bfloat16: no second tile, one plane coded."""
    return common.Parts.of(encoded(data.bell(80, "bfloat16", 3000)))


def of_tiles() -> common.Parts:
    """Two tiles of float8, the second shorter: one plane, a table and two blocks."""
    return common.Parts.of(encoded(data.bell(81, "float8_e5m2", 40000)))


def of_example() -> common.Parts:
    """The worked example: two tables, two blocks at 304 and 440."""
    return common.Parts.of(encoded(example()))


def changed(make: Callable[[], common.Parts], at: int, new: bytes) -> bytes:
    """The buffer with other bytes in its payload; a negative place is one from the end."""
    found = make()
    at += len(found.dynamic[0]) if at < 0 else 0
    found.dynamic[0][at : at + len(new)] = new
    return found.join()


def in_index(make: Callable[[], common.Parts], at: int, new: bytes) -> bytes:
    """The buffer with other bytes in its index."""
    return common.with_bytes(make, 0, at, new)


def header_vectors() -> common.Invalid:
    """Headers and records."""
    found = {
        "parameters": common.changed(parts(), params=bytes(8)),
        "of_complex64": common.changed(parts(), dtype=BY_NAME["complex64"]),
        "no_index": common.sectioned(parts(), 1),
        "no_payload": common.sectioned(parts(), 0),
        "sections_swapped": common.sectioned(parts(), 1, 0),
        "static_payload": common.sectioned(parts(), 0, 1, dynamic=False),
        "gains_nothing": common.changed(parts(), shape=(60,)),
    }
    records = {
        "flagged_raw": common.edited(parts, lambda p: common.record(p, 0, "flags", RAW)),
        "longer_than_raw": common.edited(parts, lambda p: common.grow(p, 0, 6000)),
    }
    version = {"version_2": common.changed(parts(), codec_version=2)}
    return (
        common.refused("bad_header", found)
        | common.refused("bad_record", records)
        | common.refused("unsupported_version", version)
    )


def payload_vectors() -> common.Invalid:
    """Index and payload."""
    whole = of_example().dynamic[0]
    tiles = of_tiles()
    second = struct.unpack("<I", tiles.static[0][4:8])[0]
    in_second = 8 * second
    bad = {
        "odd_payload": common.edited(parts, lambda p: common.grow(p, 0, len(p.dynamic[0]) + 4)),
        "no_payload_bytes": common.edited(parts, lambda p: common.grow(p, 0, 0)),
        "half_of_the_payload": common.edited(of_example, lambda p: common.grow(p, 0, 304)),
        "longer_payload": common.edited(of_example, lambda p: common.grow(p, 0, 592)),
        "end_not_zero": changed(of_example, -1, b"\1"),
        "first_offset": in_index(of_example, 0, b"\1"),
        "offset_falls": in_index(of_tiles, 0, struct.pack("<I", second + 1)),
        "offset_of_table": in_index(of_tiles, 4, struct.pack("<I", 2)),
        "offset_too_early": in_index(of_tiles, 4, struct.pack("<I", second - 1)),
        "offset_too_late": in_index(of_tiles, 4, struct.pack("<I", second + 1)),
        "offset_behind_the_end": in_index(of_tiles, 4, b"\xff\xff\xff\xff"),
        "third_plane": in_index(of_example, _INDEX_NBYTES - 1, b"\7"),
        "one_plane_too_few": in_index(of_example, _INDEX_NBYTES - 1, b"\1"),
        "length_13": changed(of_example, 152 + 16, b"\x2d"),
        "code_incomplete": changed(of_example, 152 + 24, b"\x34"),
        "code_too_full": changed(of_example, 152 + 24, b"\x32"),
        "code_has_one_more": changed(of_example, 152 + 17, b"\x0c"),
        "escape_too_many": changed(of_example, 152 + 144, b"\x0c"),
        "escape_of_length_200": changed(of_example, 152 + 144, b"\xc8"),
        "no_codes": changed(of_example, 152 + 16, bytes(9)),
        "table_end": changed(of_example, 151, b"\1"),
        "mode_4": changed(of_example, 304, b"\4"),
        "value_of_narrow": changed(of_example, 305, b"\1"),
        "base_of_wide": changed(of_example, 304, b"\3"),
        "base_too_small": changed(of_example, 306, b"\xff\3"),
        "base_too_large": changed(of_example, 306, b"\1\4"),
        "size_0": changed(of_example, 306, b"\0\0"),
        "size_65535": changed(of_example, 306, b"\xff\xff"),
        "behind_the_sizes": changed(of_example, 309, b"\1"),
        "constant_then_more": changed(of_example, 304, b"\1\0\0\0"),
        "stored_too_long": changed(of_example, 304, b"\0\0\0\0"),
        "base_of_stored": changed(of_example, 304, b"\0\0\1\0"),
        "code_of_other_length": changed(of_example, 448, b"\x64"),
        "tile_end": changed(
            of_tiles, in_second - 1, bytes([tiles.dynamic[0][in_second - 1] ^ 128])
        ),
        "run_ends_early": changed(of_example, 440 + 4, b"\1"),
    }
    assert len(whole) == 584
    gap = common.with_bytes(parts, 0, _INDEX_NBYTES, b"\1")
    return common.refused("bad_payload", bad) | {"behind_the_index": (gap, "reserved_not_zero")}


def invalid() -> common.Invalid:
    """What is wrong in huffman buffers only."""
    return common.named("huffman", header_vectors(), payload_vectors())
