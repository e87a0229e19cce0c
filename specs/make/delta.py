"""delta.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

import tightwire as tw
from tightwire.codecs.delta import Delta, Writer, digest_of, encode_new, ordered, unordered
from tightwire.formats.dtypes import BY_NAME

from . import common, data
from .data import Array

#: The last file of a vector is the base.
GIVEN = "base"


def coded(name: str, x: Array, base: Array, form: str = "difference", **options: Any) -> Any:
    """A vector: its tensor and the base that it was coded against."""
    buffer = tw.codec("delta", form=form).encode(x, base=base, backend="ref", **options)
    common.check_codec(buffer, "delta", name)
    return f"delta/{name}", bytes(buffer), x.tobytes(), base.tobytes()


def moved(seed: int, dtype: str, base: Array, share: float, size: int) -> Array:
    """`base` with a share of its elements moved by up to `size` units, up or down."""
    rng = np.random.default_rng(seed)
    kind = BY_NAME[dtype]
    old = ordered(base.view(kind.bits), kind)
    top = (1 << 8 * kind.itemsize) - 1
    new = [
        min(max(v + int(d), 0), top)
        for v, d in zip(old.tolist(), rng.integers(-size, size + 1, base.size), strict=True)
    ]
    chosen = rng.random(base.size) < share
    bits = unordered(np.where(chosen, np.array(new, kind.bits), old), kind)
    return bits.view(kind.numpy)


def random(seed: int, dtype: str, n: int) -> Array:
    """All bit patterns."""
    kind = BY_NAME[dtype]
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8)
    return (found & 1 if dtype == "bool" else found).view(kind.numpy)


def step(seed: int, dtype: str, n: int, rate: float) -> tuple[Array, Array]:
    """Weights before and after a step of about `rate`."""
    rng = np.random.default_rng(seed)
    w = rng.normal(0, 0.02, n)
    kind = BY_NAME[dtype].numpy
    return w.astype(kind), (w - rate * rng.normal(0, 0.5, n)).astype(kind)


def valid() -> Iterator[Any]:
    """Vectors of codec delta."""
    ones = np.ones(100, BY_NAME["bfloat16"].numpy)
    example = ones.copy()
    example.view(np.uint16)[70] += 1
    yield coded("bfloat16_100", example, ones)
    for i, dtype in enumerate(Delta.dtypes):
        base = random(900 + i, dtype, 300)
        if BY_NAME[dtype].is_float and BY_NAME[dtype].itemsize > 1:
            base = data.bell(900 + i, dtype, 300)
        x = base ^ (np.arange(300) % 37 == 5) if dtype == "bool" else moved(i, dtype, base, 0.1, 3)
        yield coded(f"{dtype}_few", x, base)
        yield coded(f"{dtype}_overwrite", x, base, "overwrite")
    base, x = step(940, "bfloat16", 33000, 1e-6)
    yield coded("bfloat16_33000", x, base)
    base, x = step(941, "bfloat16", 3000, 1e-3)
    yield coded("bfloat16_most", x, base)
    yield coded("bfloat16_most_overwrite", x, base, "overwrite")
    base, x = step(942, "float32", 2000, 1e-5)
    yield coded("float32_dense", x, base)
    # Plain tiles, the whole one and the last, each beside one with a single change.
    base = random(943, "uint8", 33001)
    x = base.copy()
    x[:32768] = random(944, "uint8", 32768)
    x[33000] ^= 255
    yield coded("uint8_plain_tile", x, base)
    base = random(954, "uint8", 37000)
    x = base.copy()
    x[32768:] = random(955, "uint8", 4232)
    x[20000] ^= 255
    yield coded("uint8_plain_tile_overwrite", x, base, "overwrite")
    # Mantissas of ones: exponents change if bits are rounded.
    base = np.full(1000, np.nextafter(1.0, 0.0))
    x = base.copy()
    x[[3, 990]] = 1.0
    yield coded("float64_below_one", x, base)
    yield from rules()
    yield from adaptive()


def adaptive() -> Iterator[Any]:
    """The form adaptive: tiles of planes, and what is as in the form difference."""

    def made(name: str, x: Array, base: Array, **options: Any) -> Any:
        return coded(name, x, base, "adaptive", **options)

    base = data.bell(960, "bfloat16", 1000)
    yield made("bfloat16_signs", flipped(961, base, {15: 0.5}), base)
    # Differences would be short, too.
    base = data.bell(981, "bfloat16", 3000)
    yield made("bfloat16_few_signs", flipped(982, base, {15: 0.02}), base)
    base = random(983, "bool", 5000)
    yield made("bool_mask", base ^ (random(984, "uint8", 5000) < 3), base)
    base = data.bell(960, "bfloat16", 1000)
    # Planes of ones alone, a bitmap, few ones and few zeros.
    doubled = (2 * base.astype(np.float32)).astype(base.dtype)
    yield made("bfloat16_doubled", doubled, base)
    yield made("bfloat16_planes", flipped(962, base, {0: 0.375, 3: 1, 4: 0.01, 9: 0.97}), base)
    base, x = step(963, "bfloat16", 1500, 1e-6)
    yield made("bfloat16_adaptive", x, base)
    base = data.bell(964, "bfloat16", 1501)
    x = flipped(965, base, {15: 0.5})
    x[501:1002] = base[501:1002]
    x.view(np.uint16)[1002::90] += 1
    yield made("bfloat16_planes_3_chunks", x, base, chunks=3)
    # Tiles of differences, plain, of planes.
    base = random(966, "uint8", 66000)
    x = flipped(967, base, {2: 0.4, 7: 0.1})
    x[:32768] = base[:32768]
    x[5:32768:6000] ^= 1
    x[32768:65536] = random(980, "uint8", 32768)
    yield made("uint8_three_tiles", x, base)
    base = random(968, "int32", 700)
    yield made("int32_planes", flipped(969, base, {0: 0.5, 31: 0.2, 17: 0.9}), base)
    base = data.bell(970, "float8_e4m3fn", 900)
    yield made("float8_e4m3fn_planes", flipped(971, base, {7: 0.5, 0: 0.1}), base)
    base = data.bell(972, "float32", 600)
    yield made("float32_planes", flipped(973, base, {31: 0.5, 23: 1, 24: 0.5}), base)
    base = data.bell(974, "float64", 333)
    yield made("float64_planes", flipped(975, base, {63: 0.5, 52: 0.8, 1: 0.02}), base)
    base = random(976, "uint64", 250)
    yield made("uint64_planes", flipped(977, base, {0: 0.5, 62: 1}), base)


def flipped(seed: int, base: Array, shares: dict[int, float]) -> Array:
    """`base` with these bits flipped, each in a share of the elements."""
    rng = np.random.default_rng(seed)
    kind = BY_NAME[base.dtype.name]
    bits = base.view(kind.bits).copy()
    for k, share in shares.items():
        bits[rng.random(base.size) < share] ^= kind.bits.type(1 << k)
    return bits.view(kind.numpy)


def rules() -> Iterator[Any]:
    """Chunks, special values, exceptions, and centers at the ends of the exponents."""
    base, x = step(945, "bfloat16", 1500, 1e-5)
    x[500:1000] = base[500:1000]
    yield coded("bfloat16_3_chunks", x, base, chunks=3)
    yield coded("bfloat16_unchanged", base, base)
    yield coded("bfloat16_empty_chunk", *step(953, "bfloat16", 4356, 1e-6)[::-1], chunks=67)
    yield coded("bfloat16_no_checksum", x, base, checksum=False)
    y = x.copy()
    y[:500] = random(946, "bfloat16", 500)
    yield coded("bfloat16_raw_chunk", y, base, chunks=3)
    buffer = tw.codec("delta", form="difference").encode(x, base=base, backend="ref", chunks=3)
    slotted = buffer.array.copy()
    slotted[buffer.plan.dynamic_offset :] = 0
    for i in range(3):
        at = buffer.plan.dynamic_offset + i * buffer.plan.dynamic_stride
        slotted[at : at + buffer.dynamic(i).size] = buffer.dynamic(i)
    yield "delta/bfloat16_slotted", slotted.tobytes(), x.tobytes(), base.tobytes()
    for dtype in ("bfloat16", "float64"):
        special = data.specials(dtype, 600)
        yield coded(f"{dtype}_specials", moved(947, dtype, special, 0.05, 2), special)
        weights = data.bell(948, dtype, 600)
        outliers = weights.copy()
        outliers[::150] = data.specials(dtype, 600)[::150] * 0 - 1
        outliers[7] = -outliers[7]
        yield coded(f"{dtype}_exceptions", moved(949, dtype, outliers, 0.05, 1), weights)
        zeros = data.with_zeros(950, dtype, 600)
        yield coded(f"{dtype}_from_zero", moved(951, dtype, zeros, 0.1, 40), zeros)
    infinite = np.full(200, np.inf, BY_NAME["bfloat16"].numpy)
    yield coded("bfloat16_center_255", moved(952, "bfloat16", infinite, 0.1, 1), infinite)
    for dtype in ("int64", "uint64", "uint8"):
        info = np.iinfo(dtype)
        base = np.full(200, info.min, dtype)
        x = base.copy()
        x[[3, 150]] = info.max, info.min + 1
        yield coded(f"{dtype}_ends", x, base)


# Invalid vectors


def ones(n: int = 100, dtype: str = "bfloat16") -> Array:
    """The base of most invalid vectors."""
    return np.ones(n, BY_NAME[dtype].numpy)


def parts(n: int = 2000, chunks: int = 1, form: str = "difference", dtype: str = "bfloat16") -> Any:
    """A buffer in which of `n` ones every 97th moved up by one."""
    base, kind = ones(n, dtype), BY_NAME[dtype]
    x = base.copy()
    x.view(kind.bits)[::97] += kind.bits.type(1)
    buffer = tw.codec("delta", form=form).encode(x, base=base, chunks=chunks, backend="ref")
    return common.Parts.of(buffer)


def edit(change: Callable[[common.Parts], object], **options: Any) -> tuple[bytes, bytes]:
    """A buffer of `parts` after a change, and its base."""
    made = parts(**options)
    change(made)
    return made.join(), ones(options.get("n", 2000), options.get("dtype", "bfloat16")).tobytes()


def tile(
    dtype: str, x: Array, *fields: tuple[str, Any], form: str = "difference"
) -> tuple[bytes, bytes]:
    """A buffer with one tile, made of these codes, whose result is to be `x`; base: see `ones`.

    Checksum and digests are right: where the tile is wrong the digest of the result is not looked
    at.
    """
    made = parts(x.size, dtype=dtype, form=form)
    out = Writer()
    for name, value in fields:
        if name == "unary":
            out.unary(np.array(value, np.int64))
        elif name == "gamma":
            out.gamma(value)
        else:
            out.number(value, int(name))
    made.dynamic[0] = bytearray(out.done().tobytes())
    made.static[0][8:16] = digest_of(x.view(np.uint8)).to_bytes(8, "little")
    return made.join(), ones(x.size, dtype).tobytes()


def swapped() -> tuple[bytes, bytes]:
    """A buffer, and another base than its own: two pairs of neighbours are swapped."""
    base = np.zeros(4000, np.int32)
    base[[100, 2001]] = 1
    x = base.copy()
    x[3000] = 5
    other = np.zeros(4000, np.int32)
    other[[101, 2000]] = 1
    buffer = tw.codec("delta", form="difference").encode(x, base=base, backend="ref")
    return bytes(buffer), other.tobytes()


def codes(dtype: str = "uint8", **wrong: Any) -> list[tuple[str, Any]]:
    """The codes of a tile of 200 integers of which number 150 becomes 2, in their order."""
    scale_bits = {"uint8": 4, "int8": 4, "uint16": 5}[dtype]
    found: dict[str, Any] = {
        "plain": ("1", 0),
        "scale": (str(scale_bits), 0),
        "count": ("gamma", 2),
        "exceptions": ("gamma", 1),
        "low": ("7", 22),
        "sign": ("1", 0),
        "quotient": ("unary", [1]),
        "hot": ("unary", []),
        "hot_low": ("0", 0),
        "places": ("0", 0),
    }
    for name, value in wrong.items():
        found[name] = value
    listed: list[tuple[str, Any]] = []
    for value in found.values():
        listed += value if isinstance(value, list) else [value]
    return listed


def one_changed(n: int = 200, dtype: str = "uint8") -> Array:
    """What `codes` is about."""
    x = ones(n, dtype)
    x[150] = 2
    return x


def plain(first: int, values: bytes, form: str = "difference") -> tuple[bytes, bytes]:
    """A buffer whose second tile, of 233 integers, is a first word and these bytes."""
    made = parts(33001, dtype="uint8", form=form)
    made.dynamic[0] = bytearray(first.to_bytes(4, "little") + values)
    made.dynamic[0] += bytes(-len(values) % 4)
    made.static[0][16:24] = bytes(8)
    return made.join(), ones(33001, "uint8").tobytes()


def last_tile(
    n: int, places: Any, value: int, words: npt.NDArray[np.uint8], form: str
) -> tuple[bytes, bytes]:
    """A buffer of `n` more integers than a tile has: its second tile has these words.

    They make `value` of those at `places` of this tile; checksum and digests are right.
    """
    x = ones(32768 + n, "uint8")
    x[32768:][places] = value
    made = parts(x.size, dtype="uint8", form=form)
    made.dynamic[0] = bytearray(words.tobytes())
    made.static[0][8:16] = digest_of(x).to_bytes(8, "little")
    made.static[0][16:24] = bytes(8)
    return made.join(), ones(x.size, "uint8").tobytes()


def coded_last(n: int, places: Any, value: int, *codes: Any, form: str) -> tuple[bytes, bytes]:
    """As `last_tile`, from codes."""
    out = Writer()
    for number, nbits in codes:
        out.fields(np.asarray(number, np.uint64), nbits)
    return last_tile(n, places, value, out.done(), form)


def long_tiles() -> dict[str, tuple[bytes, bytes]]:
    """delta.md, "Checks", 2: tiles that are right but for having more words than a plain one."""
    one = np.ones(200, np.uint64)
    # All of 200 integers rise by one, which is a size of 0: quotient 0 and eight low bits.
    gamma = [([1 << 7], 8), ([201 & 127], 7), ([1], 1)]
    head = [([0], 1), ([9], 4), *gamma, (0 * one, 1), (one, 1)]
    every = slice(None)
    differences = {
        form: coded_last(200, every, 2, *head, (0 * one, 8), form=form)
        for form in ("difference", "adaptive")
    }
    # All but a few of 2000 integers.
    changed = np.arange(2000) % 180 != 170
    new = np.full(2000, 7, np.uint8)
    overwritten = encode_new(BY_NAME["uint8"], new, changed)
    # Each bit of every second one of 200 integers.
    bitmap = np.array([1, 0] * 100, np.uint64)
    planes = [([3], 2), ([255], 8), (np.full(8, 99), 15), (np.tile(bitmap, 8), 1)]
    return {
        "delta_long_differences": differences["difference"],
        "delta_long_differences_adaptive": differences["adaptive"],
        "delta_long_new_values": last_tile(2000, changed, 7, overwritten, "overwrite"),
        "delta_long_planes": coded_last(200, slice(None, None, 2), 254, *planes, form="adaptive"),
    }


def bad_tiles() -> dict[str, tuple[bytes, bytes]]:
    """delta.md, "Checks", 3 to 9."""
    x = one_changed()
    right = tile("uint8", x, *codes())
    if tw.decode(right[0], base=ones(200, "uint8")).tobytes() != x.tobytes():
        raise AssertionError("the tile without damage is not right")
    other = x.copy()
    other[151] = 2
    exceptions = [("15", 0), ("8", 5), ("15", 0), ("8", 5)]
    return {
        "delta_tile_word_left": tile("uint8", x, *codes(), ("32", 0)),
        "delta_tile_bits_left": tile("uint8", x, *codes(), ("1", 1)),
        "delta_plain_bits": plain(3, bytes(233)),
        "delta_plain_short": plain(1, bytes(232)),
        "delta_plain_long": plain(1, bytes(240)),
        "delta_plain_padding": plain(1, bytes(233) + b"\1"),
        "delta_gamma_large": tile("uint8", x, *codes(count=("gamma", 1 << 16))),
        "delta_gamma_endless": tile("uint8", x, ("32", 0), ("32", 0)),
        "delta_count_above_class": tile("uint8", x, *codes(count=("gamma", 202))),
        "delta_count_zero": tile("uint8", x, *codes(count=("gamma", 1))),
        "delta_gap_beyond": tile("uint8", x, *codes(low=("7", 72))),
        "delta_gap_far_beyond": tile("uint8", x, *codes(quotient=("unary", [40]))),
        "delta_gaps_end_early": tile("uint8", x, *codes(quotient=("12", 0))),
        "delta_quotient_16": tile("uint8", x, *codes(scale=("4", 1), hot=("unary", [16]))),
        "delta_quotient_beyond_width": tile(
            "uint8", x, *codes(scale=("4", 8), hot=("unary", [2]), hot_low=("7", 0))
        ),
        "delta_exceptions_equal": tile(
            "uint8", x, *codes(exceptions=("gamma", 3), places=exceptions)
        ),
        "delta_exception_of_none": tile(
            "uint8", x, *codes(exceptions=("gamma", 2), places=[("15", 1), ("8", 5)])
        ),
        "delta_exceptions_missing": tile("uint8", x, *codes(exceptions=("gamma", 5))),
        "delta_below_zero": tile(
            "uint8",
            x,
            *codes(sign=("1", 1), exceptions=("gamma", 2), places=[("15", 0), ("8", 1)]),
        ),
        "delta_above_largest": tile(
            "uint8", x, *codes(exceptions=("gamma", 2), places=[("15", 0), ("8", 254)])
        ),
        "delta_result_digest": tile("uint8", other, *codes()),
    }


def planes(n: int = 200, **wrong: Any) -> list[tuple[str, Any]]:
    """The codes of a tile of planes of `n` integers of 8 bits, in their order.

    Bit 1 of number 150 is flipped, and bit 7 of every second one.
    """
    found: dict[str, Any] = {
        "head": ("2", 3),
        "there": ("8", 0b10000010),
        "ones": [("15", 0), ("15", 99)],
        "low": ("7", 22),
        "quotient": ("unary", [1]),
        "bitmap": [("50", 0x1555555555555)] * 4,
    }
    listed: list[tuple[str, Any]] = []
    for value in (found | wrong).values():
        listed += value if isinstance(value, list) else [value]
    return listed


def bad_planes() -> dict[str, tuple[bytes, bytes]]:
    """delta.md, "Checks", 3 to 5 and 9, of a tile of planes."""
    x = ones(200, "uint8")
    x[150] ^= 2
    x[::2] ^= 128

    def of(*codes: tuple[str, Any], form: str = "adaptive") -> tuple[bytes, bytes]:
        return tile("uint8", x, *codes, form=form)

    right = of(*planes())
    if tw.decode(right[0], base=ones(200, "uint8")).tobytes() != x.tobytes():
        raise AssertionError("the tile without damage is not right")
    other = x.copy()
    other[0] ^= 1
    few = [("15", 0)]
    return {
        "delta_planes_in_difference": of(*planes(), form="difference"),
        "delta_planes_in_overwrite": of(*planes(), form="overwrite"),
        "delta_planes_none": of(*planes(there=("8", 0), ones=[], low=[], quotient=[], bitmap=[])),
        "delta_planes_count_above_tile": of(*planes(ones=[("15", 200), ("15", 99)])),
        "delta_planes_gap_beyond": of(*planes(low=("7", 72))),
        "delta_planes_gap_far_beyond": of(*planes(quotient=("unary", [40]))),
        "delta_planes_gaps_end_early": of(
            *planes(there=("8", 2), ones=few, quotient=("20", 0), bitmap=[])
        ),
        "delta_planes_bitmap_ends_early": of(*planes(bitmap=[("50", 0x1555555555555)] * 3)),
        "delta_planes_bitmap_ones": of(*planes(bitmap=[("50", 0x1555555555555)] * 3 + [("50", 1)])),
        "delta_planes_bits_left": of(*planes(), ("1", 1)),
        "delta_planes_word_left": of(*planes(), ("32", 0)),
        "delta_planes_head_alone": of(("2", 3), ("8", 255)),
        "delta_planes_result_digest": tile("uint8", other, *planes(), form="adaptive"),
        "delta_adaptive_plain_bits": plain(5, bytes(233), form="adaptive"),
    }


def invalid() -> dict[str, tuple[bytes, str, bytes]]:
    """What is wrong in delta buffers only."""
    base = ones(2000).tobytes()
    other = ones(2000)
    other[1999] = 2
    index, changes = parts().header.sections
    wrong = {
        "form_2": (0, b"\2"),
        "form_4": (0, b"\4"),
        "tile_size_14": (1, b"\x0e"),
        "parameters_reserved": (7, b"\1"),
    }
    headers = common.with_params(parts, wrong) | common.refused(
        "bad_header",
        {
            "sections_swapped": common.sectioned(parts(), 1, 0),
            "no_changes_section": common.sectioned(parts(), 0),
            "changes_too_large": common.changed(
                parts(), sections=(index, replace(changes, nbytes=changes.nbytes + 128))
            ),
            "of_complex64": common.changed(parts(), dtype=BY_NAME["complex64"]),
            "gains_nothing": common.changed(parts(), shape=(64,)),
        },
    )
    headers |= {"version_2": (common.changed(parts(), codec_version=2), "unsupported_version")}
    found = {f"delta_{name}": (*pair, base) for name, pair in headers.items()}

    zeros = {
        "delta_padding_of_index": edit(lambda p: common.put(p, 0, 20, b"\1")),
        "delta_padding_behind_changes": (
            common.poked(parts().join(), len(parts().join()) - 1, b"\1"),
            base,
        ),
    }
    mismatch = {
        "delta_other_base": (parts().join(), other.tobytes()),
        "delta_other_base_of_last_chunk": (parts(chunks=3).join(), other.tobytes()),
        "delta_other_base_before_payload": (
            edit(lambda p: p.dynamic[0].append(1), chunks=3)[0],
            other.tobytes(),
        ),
        "delta_base_digest": edit(lambda p: common.put(p, 0, 3, b"\1")),
        "delta_other_base_overwrite": (parts(form="overwrite").join(), other.tobytes()),
        "delta_base_with_swaps": swapped(),
    }
    many = 40000
    bad = (
        bad_tiles()
        | bad_planes()
        | long_tiles()
        | {
            "delta_half_word": edit(lambda p: p.dynamic[0].extend(b"\0\0")),
            "delta_ends_early": edit(lambda p: p.dynamic[0].__delitem__(slice(-4, None))),
            "delta_first_offset": edit(lambda p: common.put(p, 0, 16, b"\1")),
            "delta_offset_falls": edit(lambda p: common.put(p, 0, 16, b"\2\0\0\0\1"), n=many),
            "delta_offset_beyond": edit(
                lambda p: common.put(p, 0, 20, b"\xff\xff\xff\xff"), n=many
            ),
            "delta_overwrite_gap_beyond": edit(overwrite_beyond, form="overwrite", n=300),
        }
    )
    for reason, group in (
        ("reserved_not_zero", zeros),
        ("base_mismatch", mismatch),
        ("bad_payload", bad),
    ):
        found |= {name: (buffer, reason, given) for name, (buffer, given) in group.items()}
    return found


def overwrite_beyond(made: common.Parts) -> None:
    """A quotient of 50 in the place of the first."""
    out = Writer()
    out.number(0, 1)
    out.gamma(2)
    out.number(0, 8)
    out.unary(np.array([50]))
    out.number(7, 16)
    made.dynamic[0] = bytearray(out.done().tobytes())
