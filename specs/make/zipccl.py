"""zipccl.md."""

from __future__ import annotations

import functools
import struct
from dataclasses import replace

import numpy as np

import tightwire as tw
from tightwire.engine import encode_into
from tightwire.formats.dtypes import BY_NAME, DTYPES
from tightwire.formats.header import ALIGN, RECORD

from . import common, data

DTYPE_NAMES = tuple(d.name for d in DTYPES if d.is_float)


FLOAT8 = tuple(name for name in DTYPE_NAMES if name.startswith("float8"))


SIZES = {
    "bfloat16": (640, 2048, 2049, 4095, 4096, 4097, 10000),
    "float16": (2048, 4095, 4097),
    "float32": (2048, 4096, 4097),
    "float64": (640, 4097),
} | dict.fromkeys(FLOAT8, (2048, 4095, 4097))


def scaled_tiles(seed: int, dtype: str, n: int) -> data.Array:
    """Values whose scale falls by 2^12 at every tile, as rows of a matrix may."""
    return data.narrowed(
        np.ldexp(data.bell(seed, "float64", n), -12 * (np.arange(n) // 4096)), dtype
    )


def spread(seed: int, n: int) -> data.Array:
    """bfloat16 whose exponents lie higher in the groups that a whole tile's sample takes."""
    shift = np.where(np.arange(n) // 16 % 8 == np.arange(n) // 128 % 8, 9, 0)
    bits: data.Array = (100 + shift + data.random_words(seed, n) % np.uint64(6)).astype(
        np.uint16
    ) << 7
    return bits.view(BY_NAME["bfloat16"].numpy)


def all_bfloat16() -> data.Array:
    """All 65,536 patterns, exponents in order, so that every tile has 16 of them."""
    i = np.arange(1 << 16)
    exponent, sign, mantissa = i >> 8, i >> 7 & 1, i & 127
    return (sign << 15 | exponent << 7 | mantissa).astype("<u2").view(BY_NAME["bfloat16"].numpy)


def slotted(buffer: tw.Buffer) -> bytes:
    """The bytes of a fresh buffer, the slack of its slots set to zero."""
    data = buffer.array.copy()
    plan = buffer.plan
    for i, used in enumerate(buffer.sizes.tolist()):
        slot = plan.dynamic_offset + i * plan.dynamic_stride
        data[slot + used : slot + plan.dynamic_stride] = 0
    return bytes(data)


def valid() -> common.Vectors:
    """Vectors of codec zipccl."""
    coded = functools.partial(common.lossless, codec="zipccl")
    ones = np.ones(2048, np.float32)
    yield coded("bfloat16_2048_ones", ones.astype(BY_NAME["bfloat16"].numpy))
    yield coded("float32_2048_ones", ones)
    yield coded("bfloat16_2048_zeros", (0 * ones).astype(BY_NAME["bfloat16"].numpy))
    yield coded("bfloat16_all", all_bfloat16())
    for name in DTYPE_NAMES:
        for n in SIZES[name]:
            yield coded(f"{name}_{n}", data.bell(n, name, n))
        yield coded(f"{name}_specials", data.specials(name, 4200 if name in FLOAT8 else 2200))
        yield coded(f"{name}_random_bits", data.random_bits(50, name, (2, 1030)))
    for name in ("bfloat16", "float32", "float8_e5m2"):
        yield coded(f"{name}_zero_mode", data.with_zeros(51, name, 4500))

    # A partial tile as wide as a whole one: all its elements choose its window, not a sample.
    yield coded("bfloat16_4000_spread", spread(65, 4000))
    x = scaled_tiles(52, "bfloat16", 4800)
    for window in ("tile", "sigma", "histogram"):
        yield coded(f"bfloat16_window_{window}", x, window=window)
    yield coded("bfloat16_window_explicit", x * x.dtype.type(2.0**-120), window=4)
    for name in ("float32", "float64", "float8_e4m3fn"):
        x = data.bell(63, name, 4800 if name in FLOAT8 else 1000)
        yield coded(f"{name}_window_sigma", x, window="sigma")

    x = data.bell(53, "bfloat16", 3 * 1500)
    data.bits_of(x)[1500:3000] = data.random_bits(54, "uint16", (1500,))
    yield coded("bfloat16_one_raw_chunk", x.reshape(3, 1500), chunks=3)
    yield coded("bfloat16_8193_2_chunks", data.bell(55, "bfloat16", 8193), chunks=2)
    yield coded("bfloat16_short_raw_chunk", data.random_bits(56, "bfloat16", (1921,)), chunks=3)
    yield coded("bfloat16_no_checksum", data.bell(57, "bfloat16", 1000), checksum=False)
    x = data.bell(58, "bfloat16", 3000)
    fresh = common.encoded(x, "zipccl", chunks=2)
    yield "zipccl/bfloat16_slotted", slotted(fresh), x.tobytes()
    fixed = common.encoded(x, "zipccl", chunks=2, dynamic_capacity=256)
    yield "zipccl/bfloat16_fixed_rate", slotted(fixed), x.tobytes()


def zipccl_parts() -> common.Parts:
    """Two chunks, each a tile of 1250 elements, W = 160: block of 1760 bytes, index at 1792.

    The header has 72 bytes, the table at 40 and the parameters at 64.
    """
    return common.Parts.of(common.encoded(data.bell(61, "bfloat16", 2500), "zipccl", chunks=2))


def three_tiles() -> common.Parts:
    """A chunk of two whole tiles and one of 16 columns, with escapes in each; index at 6272."""
    x = data.bell(62, "float8_e5m2", 8200)
    data.bits_of(x)[-1] = 3 << 2
    return common.Parts.of(common.encoded(x, "zipccl"))


def two_windows() -> common.Parts:
    """Two tiles with different windows."""
    return common.Parts.of(common.encoded(scaled_tiles(52, "bfloat16", 4800), "zipccl"))


def one_zero_tile() -> common.Parts:
    """One tile in zero mode."""
    return common.Parts.of(common.encoded(data.with_zeros(51, "bfloat16", 2000), "zipccl"))


def explicit() -> common.Parts:
    """Windows at the explicit base 4."""
    x = scaled_tiles(52, "bfloat16", 4800)
    return common.Parts.of(common.encoded(x * x.dtype.type(2.0**-120), "zipccl", window=4))


def random_chunks() -> common.Parts:
    """Three raw chunks of 641, 641 and 639 elements; static parts have 1280 bytes."""
    return common.Parts.of(
        common.encoded(data.random_bits(64, "bfloat16", (1921,)), "zipccl", chunks=3)
    )


def zeros() -> common.Parts:
    """A tile in zero mode with escapes."""
    return common.Parts.of(common.encoded(data.with_zeros(67, "float8_e5m2", 2500), "zipccl"))


def half_escape() -> common.Parts:
    """A float64 chunk with a byte too many behind its escapes."""
    parts = common.Parts.of(common.encoded(data.bell(66, "float64", 640), "zipccl"))
    parts.dynamic[0].append(0)
    return parts


def forced(x: data.Array) -> bytes:
    """A zipccl buffer of values that an encoder stores by raw; it has no escapes."""
    dtype, spec = BY_NAME[x.dtype.name], tw.codec("zipccl").spec
    plan = tw.Plan(spec, dtype, x.shape, 1, spec.layout(dtype, x.size), 0)
    out = np.zeros(plan.nbytes, np.uint8)
    encode_into(plan, data.bits_of(x), out, backend="ref")
    return bytes(out)


def too_many_elements() -> bytes:
    """A header that would be right for a chunk of 2^32 elements, with room for its record."""
    parts = zipccl_parts()
    layout = tw.codec("zipccl").spec.layout(parts.header.dtype, 1 << 32)
    header = replace(parts.header, shape=(1 << 32,), chunks=1, sections=layout.sections)
    return header.pack() + bytes(RECORD.itemsize)


def set_code(parts: common.Parts, element: int, code: int) -> None:
    """Give an element of the last chunk of `zipccl_parts` another code."""
    row, column = divmod(element, 160)
    for plane in range(3):
        at = 8 * 160 + plane * 160 + column
        bit = 1 << row
        parts.static[1][at] = parts.static[1][at] & ~bit | (bit if code >> plane & 1 else 0)


def window(parts: common.Parts) -> int:
    """The window of the last chunk of `zipccl_parts`."""
    return int.from_bytes(parts.static[1][1796:1798], "little")


def put_index(parts: common.Parts, tile: int, offset: int) -> None:
    """Add to the escape offset of a tile of `three_tiles`."""
    at = 6272 + 4 * tile
    old = int.from_bytes(parts.static[0][at : at + 4], "little")
    common.put(parts, 0, at, (old + offset).to_bytes(4, "little"))


def put_window(parts: common.Parts, by: int) -> None:
    """Add a multiple of 8, with which codes stay right, to the base of the first tile."""
    old = int.from_bytes(parts.static[0][6284:6286], "little")
    common.put(parts, 0, 6284, (old + by).to_bytes(2, "little"))


def last_escape(parts: common.Parts, exponent: int) -> None:
    """Change the last escape of the first chunk."""
    parts.dynamic[0][-1] = exponent


def shifted(parts: common.Parts) -> None:
    """Put an escape that belongs to no tile in front of the others."""
    parts.dynamic[0].insert(0, 0)
    for tile in range(3):
        put_index(parts, tile, 1)


def padding_escaped(parts: common.Parts) -> None:
    """Escape the last padding element, which is the last element of the last column."""
    set_code(parts, 1279, (window(parts) + 7) % 8)
    parts.dynamic[1].append(0)


def zero_base(parts: common.Parts) -> int:
    """The base of the tile of `zeros`."""
    index = parts.header.sections[0].nbytes
    return int.from_bytes(parts.static[0][index + 4 : index + 6], "little") % 32768


def zero_mode_base_0(parts: common.Parts) -> None:
    """Code all elements of the first tile as zeros of a window at base 0, in zero mode."""
    block = 512 * 6
    common.put(parts, 0, 0, bytes(block))
    gone = int.from_bytes(parts.static[0][6276:6280], "little")
    del parts.dynamic[0][:gone]
    put_index(parts, 1, -gone)
    put_index(parts, 2, -gone)
    common.put(parts, 0, 6272 + 12, b"\0\x80")


def header_vectors() -> common.Invalid:
    """Step 9 of "Reading" for zipccl."""
    tiles, index, escapes = zipccl_parts().header.sections
    more_tiles = replace(tiles, nbytes=tiles.nbytes + ALIGN)
    more_escapes = replace(escapes, nbytes=escapes.nbytes + ALIGN)
    wrong = {
        "base_250": (0, struct.pack("<BBHI", 3, 12, 250, 0)),
        "base_65535": (0, struct.pack("<BBHI", 3, 12, 65535, 0)),
        "window_kind_4": (0, b"\4"),
        "tile_size_13": (1, b"\x0d"),
        "base_not_explicit": (2, b"\1"),
        "parameters_reserved": (7, b"\1"),
    }
    found = {
        "sections_swapped": common.sectioned(zipccl_parts(), 1, 0, 2),
        "no_escapes_section": common.sectioned(zipccl_parts(), 0, 1),
        "four_sections": common.sectioned(zipccl_parts(), 0, 1, 2, 2),
        "tiles_too_large": common.changed(zipccl_parts(), sections=(more_tiles, index, escapes)),
        "escapes_too_large": common.changed(zipccl_parts(), sections=(tiles, index, more_escapes)),
        "gains_nothing": forced(np.ones(100, BY_NAME["bfloat16"].numpy)),
        "no_elements": forced(np.ones(0, BY_NAME["bfloat16"].numpy)),
        "2_32_elements": too_many_elements(),
        "slots_too_large": common.changed(zipccl_parts(), dynamic_stride=escapes.nbytes + ALIGN),
        "of_uint16": common.changed(zipccl_parts(), dtype=BY_NAME["uint16"]),
        "of_float8_e8m0fnu": common.changed(zipccl_parts(), dtype=BY_NAME["float8_e8m0fnu"]),
    }
    version = common.changed(zipccl_parts(), codec_version=2), "unsupported_version"
    return (
        common.with_params(zipccl_parts, wrong)
        | common.refused("bad_header", found)
        | {"version_2": version}
    )


def payload_vectors() -> common.Invalid:
    """Step 15 of "Reading" and zipccl.md, "Checks"."""
    coded = zipccl_parts().join()
    nonzero = {
        "padding_behind_tiles": common.edited(
            zipccl_parts, lambda p: common.put(p, 1, 1760, b"\1")
        ),
        "padding_behind_index": common.edited(
            zipccl_parts, lambda p: common.put(p, 0, 1798, b"\1")
        ),
        "padding_of_static_end": common.edited(
            zipccl_parts, lambda p: common.put(p, 0, 1919, b"\1")
        ),
        "padding_of_raw_chunk": common.edited(
            random_chunks, lambda p: common.put(p, 2, 1278, b"\1")
        ),
        "padding_behind_escapes": common.poked(coded, len(coded) - 1, b"\1"),
    }
    bad = {
        "half_escape": half_escape().join(),
        "first_offset": common.edited(three_tiles, shifted),
        "offset_falls": common.edited(
            three_tiles, lambda p: common.put(p, 0, 6272 + 8, b"\1\0\0\0")
        ),
        "offset_above_escapes": common.edited(three_tiles, lambda p: put_index(p, 2, 2)),
        "escape_of_other_tile": common.edited(three_tiles, lambda p: put_index(p, 1, 1)),
        "escape_missing": common.edited(three_tiles, lambda p: p.dynamic[0].pop()),
        "escape_left_over": common.edited(three_tiles, lambda p: p.dynamic[0].append(0)),
        "escape_too_large": common.edited(three_tiles, lambda p: last_escape(p, 32)),
        "escape_255": common.edited(three_tiles, lambda p: last_escape(p, 255)),
        "escape_in_window": common.edited(three_tiles, lambda p: last_escape(p, 15)),
        "escape_of_zero": common.edited(zeros, lambda p: last_escape(p, 0)),
        "escape_in_zero_window": common.edited(zeros, lambda p: last_escape(p, zero_base(p) + 6)),
        "window_base_too_large": common.edited(three_tiles, lambda p: put_window(p, 24)),
        "window_base_15_bits": common.edited(three_tiles, lambda p: put_window(p, 32736)),
        "sigma_two_windows": common.changed(two_windows(), params=b"\1\14" + bytes(6)),
        "histogram_zero_mode": common.changed(one_zero_tile(), params=b"\2\14" + bytes(6)),
        "explicit_other_window": common.changed(explicit(), params=b"\3\14\5\0" + bytes(4)),
        "zero_mode_base_0": common.edited(three_tiles, zero_mode_base_0),
        "padding_mantissa": common.edited(zipccl_parts, lambda p: common.put(p, 1, 1279, b"\1")),
        "padding_sign": common.edited(zipccl_parts, lambda p: common.put(p, 1, 1250, b"\x80")),
        "padding_code": common.edited(zipccl_parts, lambda p: set_code(p, 1250, window(p) % 8)),
        "padding_escaped": common.edited(zipccl_parts, padding_escaped),
    }
    return common.refused("reserved_not_zero", nonzero) | common.refused("bad_payload", bad)


def invalid() -> common.Invalid:
    """What is wrong in zipccl buffers only."""
    return common.named("zipccl", header_vectors()) | payload_vectors()
