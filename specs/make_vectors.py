"""Write the vectors: `python specs/make_vectors.py [FOLDER]`.

FOLDER is `vectors` beside this file unless it is given.

A published vector never changes: a file that is there already is kept, and if its bytes are not
those that would be written the exit status is 1. Only reasons.json may grow.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tightwire as tw
from tightwire import homomorphic
from tightwire.codecs import zipccl
from tightwire.codecs.common import minifloat
from tightwire.codecs.common.base import Chunk
from tightwire.codecs.common.philox import key_numbers
from tightwire.codecs.common.philox import random_words as philox_words
from tightwire.codecs.thc import NORMS
from tightwire.engine import encode_into
from tightwire.formats.checksum import MASK64, identity_term, record_term, words_sum
from tightwire.formats.dtypes import BY_NAME, DTYPES
from tightwire.formats.header import (
    ALIGN,
    ASSEMBLED,
    CHECKSUM,
    OVERFLOW,
    RAW,
    RECORD,
    Header,
    Section,
    align,
    header_crc,
    parse_header,
)

Array = npt.NDArray[Any]
Vector = tuple[str, bytes, bytes]
LossyVector = tuple[str, bytes, bytes, bytes]

ZIPCCL_DTYPES = tuple(d.name for d in DTYPES if d.is_float)


# Data. Raw words of PCG64 and exact float64 arithmetic, which no NumPy release may change.


def random_words(seed: int, n: int) -> npt.NDArray[np.uint64]:
    """`n` random 64-bit words."""
    return np.asarray(np.random.PCG64(seed).random_raw(n), np.uint64)


def random_bits(seed: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """An array whose bits are random; bool is 0 or 1."""
    d = BY_NAME[dtype]
    nbytes = math.prod(shape) * d.itemsize
    data = random_words(seed, -(-nbytes // 8)).view(np.uint8)[:nbytes]
    x: Array = (data & 1 if dtype == "bool" else data).view(d.numpy)
    return x.reshape(shape)


def bell(seed: int, dtype: str, n: int) -> Array:
    """`n` values that are spread nearly as a normal distribution, standard deviation about 1.8."""
    words = random_words(seed, 2 * n).astype("<u8")
    shape = words[:n].view("<u2").reshape(n, 4).sum(axis=1, dtype=np.int64) - 131070
    values: Array = shape / 32768 * (1 + words[n:] / 2.0**64)
    narrow: Array = values if dtype == "float64" else values.astype(np.float32)
    return narrow.astype(BY_NAME[dtype].numpy)


def bits_of(x: Array) -> Array:
    """The elements as unsigned integers, a view."""
    return x.view(f"<u{x.itemsize}")


def specials(dtype: str, n: int) -> Array:
    """Values with both zeros, subnormals, infinities, NaN payloads and extremes in between."""
    d = BY_NAME[dtype]
    one, top = 1 << d.mantissa, ((1 << d.exponent) - 1) << d.mantissa
    magnitudes = [0, 1, one - 1, one, one | 1, top - 1, top, top | 1, top | one >> 1, top | one - 1]
    sign = 1 << 8 * d.itemsize - 1
    x = bell(7, dtype, n)
    patterns = np.array([m | s for m in magnitudes for s in (0, sign)], bits_of(x).dtype)
    bits_of(x)[::37] = np.resize(patterns, -(-n // 37))
    return x


def with_zeros(seed: int, dtype: str, n: int) -> Array:
    """Values of which about five in eight are exact zeros, some of them negative."""
    x = bell(seed, dtype, n)
    words = random_words(seed + 1, n)
    bits_of(x)[words % 8 < 5] = 0
    bits_of(x)[words % 64 == 7] = 1 << 8 * x.itemsize - 1
    return x


def scaled_tiles(seed: int, dtype: str, n: int) -> Array:
    """Values whose scale falls by 2^12 at every tile, as rows of a matrix may."""
    x = np.ldexp(bell(seed, "float64", n), -12 * (np.arange(n) // 4096))
    narrow: Array = x.astype(np.float32)
    return narrow.astype(BY_NAME[dtype].numpy)


def spread(seed: int, n: int) -> Array:
    """bfloat16 whose exponents lie higher in the groups that a whole tile's sample takes."""
    shift = np.where(np.arange(n) // 16 % 8 == np.arange(n) // 128 % 8, 9, 0)
    bits = (100 + shift + random_words(seed, n) % np.uint64(6)).astype(np.uint16) << 7
    return bits.view(BY_NAME["bfloat16"].numpy)


def all_bfloat16() -> Array:
    """All 65,536 patterns, exponents in order, so that every tile has 16 of them."""
    i = np.arange(1 << 16)
    exponent, sign, mantissa = i >> 8, i >> 7 & 1, i & 127
    return (sign << 15 | exponent << 7 | mantissa).astype("<u2").view(BY_NAME["bfloat16"].numpy)


# Valid vectors


def encoded(x: Array, codec: str, window: str | int = "tile", **options: Any) -> tw.Buffer:
    """A fresh buffer of the reference backend."""
    params = {} if codec == "raw" else {"window": window}
    return tw.codec(codec, **params).encode(x, backend="ref", **options)


def vector(name: str, x: Array, codec: str, **options: Any) -> Vector:
    """A packed vector under the codec's name, which must be what the encoder used."""
    buffer = encoded(x, codec, **options)
    if buffer.header.codec != codec:
        raise AssertionError(f"{name} was stored by {buffer.header.codec}")
    return f"{codec}/{name}", bytes(buffer), x.tobytes()


def slotted(buffer: tw.Buffer) -> bytes:
    """The bytes of a fresh buffer, the slack of its slots set to zero."""
    data = buffer.array.copy()
    plan = buffer.plan
    for i, used in enumerate(buffer.sizes.tolist()):
        slot = plan.dynamic_offset + i * plan.dynamic_stride
        data[slot + used : slot + plan.dynamic_stride] = 0
    return bytes(data)


def raw_vectors() -> Iterator[Vector]:
    """Vectors of codec raw."""
    yield vector("uint8_3", np.array([1, 2, 3], np.uint8), "raw")
    for d in DTYPES:
        yield vector(f"{d.name}_3x5", random_bits(d.id, d.name, (3, 5)), "raw")
        yield vector(f"{d.name}_empty", random_bits(0, d.name, (0,)), "raw")
    yield vector("float32_scalar", random_bits(40, "float32", ()), "raw")
    yield vector("complex128_scalar", random_bits(41, "complex128", ()), "raw")
    yield vector("float16_3x0x2", random_bits(0, "float16", (3, 0, 2)), "raw")
    yield vector("int64_empty_chunks", random_bits(0, "int64", (0,)), "raw", chunks=3)
    for n in (127, 128, 129):
        yield vector(f"uint8_{n}", random_bits(n, "uint8", (n,)), "raw")
    yield vector("int8_32_dims", random_bits(42, "int8", (2, *(1,) * 31)), "raw")
    yield vector("uint16_3_chunks", random_bits(43, "uint16", (10, 100)), "raw", chunks=3)
    yield vector("complex64_4_chunks", random_bits(44, "complex64", (77,)), "raw", chunks=4)
    yield vector("uint8_empty_last_chunks", random_bits(45, "uint8", (9,)), "raw", chunks=7)
    yield vector("float32_no_checksum", random_bits(46, "float32", (50,)), "raw", checksum=False)

    x = random_bits(47, "uint8", (300,))
    parts = Parts.of(encoded(x, "raw", chunks=3))
    parts.records["ordinal"] = [2, 0, 5]
    parts.header = replace(parts.header, required=CHECKSUM | ASSEMBLED)
    yield "raw/uint8_assembled", parts.join(), x.tobytes()
    parts = Parts.of(encoded(x, "raw"))
    parts.header = replace(parts.header, minor=7, optional=0x8001)
    yield "raw/uint8_newer_minor", parts.join(), x.tobytes()


FLOAT8 = tuple(name for name in ZIPCCL_DTYPES if name.startswith("float8"))
SIZES = {
    "bfloat16": (640, 2048, 2049, 4095, 4096, 4097, 10000),
    "float16": (2048, 4095, 4097),
    "float32": (2048, 4096, 4097),
    "float64": (640, 4097),
} | dict.fromkeys(FLOAT8, (2048, 4095, 4097))


def zipccl_vectors() -> Iterator[Vector]:
    """Vectors of codec zipccl."""
    coded = functools.partial(vector, codec="zipccl")
    ones = np.ones(2048, np.float32)
    yield coded("bfloat16_2048_ones", ones.astype(BY_NAME["bfloat16"].numpy))
    yield coded("float32_2048_ones", ones)
    yield coded("bfloat16_2048_zeros", (0 * ones).astype(BY_NAME["bfloat16"].numpy))
    yield coded("bfloat16_all", all_bfloat16())
    for name in ZIPCCL_DTYPES:
        for n in SIZES[name]:
            yield coded(f"{name}_{n}", bell(n, name, n))
        yield coded(f"{name}_specials", specials(name, 4200 if name in FLOAT8 else 2200))
        yield coded(f"{name}_random_bits", random_bits(50, name, (2, 1030)))
    for name in ("bfloat16", "float32", "float8_e5m2"):
        yield coded(f"{name}_zero_mode", with_zeros(51, name, 4500))

    # A partial tile as wide as a whole one: all its elements choose its window, not a sample.
    yield coded("bfloat16_4000_spread", spread(65, 4000))
    x = scaled_tiles(52, "bfloat16", 4800)
    for window in ("tile", "sigma", "histogram"):
        yield coded(f"bfloat16_window_{window}", x, window=window)
    yield coded("bfloat16_window_explicit", x * x.dtype.type(2.0**-120), window=4)
    for name in ("float32", "float64", "float8_e4m3fn"):
        x = bell(63, name, 4800 if name in FLOAT8 else 1000)
        yield coded(f"{name}_window_sigma", x, window="sigma")

    x = bell(53, "bfloat16", 3 * 1500)
    bits_of(x)[1500:3000] = random_bits(54, "uint16", (1500,))
    yield coded("bfloat16_one_raw_chunk", x.reshape(3, 1500), chunks=3)
    yield coded("bfloat16_8193_2_chunks", bell(55, "bfloat16", 8193), chunks=2)
    yield coded("bfloat16_short_raw_chunk", random_bits(56, "bfloat16", (1921,)), chunks=3)
    yield coded("bfloat16_no_checksum", bell(57, "bfloat16", 1000), checksum=False)
    x = bell(58, "bfloat16", 3000)
    fresh = encoded(x, "zipccl", chunks=2)
    yield "zipccl/bfloat16_slotted", slotted(fresh), x.tobytes()
    fixed = encoded(x, "zipccl", chunks=2, dynamic_capacity=256)
    yield "zipccl/bfloat16_fixed_rate", slotted(fixed), x.tobytes()


def scaled_blocks(seed: int, dtype: str, n: int) -> Array:
    """Blocks of 32 at scales over the dtype's range; the first ones are special."""
    d = BY_NAME[dtype]
    low, high = (-24, 15) if dtype == "float16" else (-140, 127)
    exponents = low + np.arange(n) // 32 * 37 % (high - low)
    x = np.ldexp(bell(seed, "float64", n), exponents).astype(np.float32).astype(d.numpy)
    bits, sign = bits_of(x), 1 << 8 * d.itemsize - 1
    infinity = ((1 << d.exponent) - 1) << d.mantissa
    bits[32:64] = 0
    bits[40] = sign
    bits[70] = infinity | 1
    bits[100] = sign | infinity
    bits[128:160] = np.arange(32) * 3 + (np.arange(32) % 2) * sign
    bits[160:192] = infinity - 1 - np.arange(32)
    bits[192:224] = sign | (bits_of(np.ones(1, d.numpy)) + (np.arange(32) << d.mantissa - 5))
    return x


def lossy(name: str, x: Array, codec: tw.Codec, **options: Any) -> LossyVector:
    """A packed vector of a lossy codec: its tensor is what decoding gives."""
    buffer = codec.encode(x, backend="ref", **options)
    if buffer.header.codec != codec.name:
        raise AssertionError(f"{name} was stored by {buffer.header.codec}")
    tensor = tw.decode(buffer, backend="ref")
    return f"{codec.name}/{name}", bytes(buffer), tensor.tobytes(), x.tobytes()


MX_ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")


def all_codes(element: str, dtype: str) -> tuple[str, bytes, bytes]:
    """Every code at seven scales, also those that no encoder writes."""
    codec = tw.codec("mx", element=element)
    n = 256 * 7
    parts = Parts.of(codec.encode(np.zeros(n, BY_NAME[dtype].numpy), backend="ref"))
    spec: Any = codec.spec
    codes = np.resize(np.arange(1 << spec.format.bits), n).astype(np.uint8)
    put(parts, 0, 0, minifloat.pack(codes, spec.format).tobytes())
    scales = np.repeat(np.array([0, 1, 105, 127, 130, 254, 255], np.uint8), 8)
    put(parts, 0, parts.header.sections[0].nbytes, scales.tobytes())
    data = parts.join()
    return f"mx/{dtype}_{element}_all_codes", data, tw.decode(data, backend="ref").tobytes()


def mx_vectors() -> Iterator[LossyVector | Vector]:
    """Vectors of codec mx."""
    x = np.zeros(257, BY_NAME["bfloat16"].numpy)
    x[:2] = 1.0, -3.0
    yield lossy("bfloat16_e2m1_example", x, tw.codec("mx", element="e2m1"))
    for i, element in enumerate(MX_ELEMENTS):
        for j, dtype in enumerate(("bfloat16", "float16", "float32")):
            rule = ("floor", "ceil")[(i + j) % 2]
            codec = tw.codec("mx", element=element, scale_rule=rule)
            n = 321 + 7 * i + j
            yield lossy(f"{dtype}_{element}_{rule}", scaled_blocks(80 + n, dtype, n), codec)
        for dtype in ("bfloat16", "float16", "float32")[i % 3 :][:1]:
            yield all_codes(element, dtype)
    x = scaled_blocks(81, "float32", 1601)
    yield lossy("float32_e3m2_5_chunks", x, tw.codec("mx", element="e3m2"), chunks=5)
    x = bell(82, "bfloat16", 2002).reshape(26, 77)
    yield lossy("bfloat16_e2m1_4_chunks", x, tw.codec("mx", element="e2m1"), chunks=4)
    yield lossy("bfloat16_no_checksum", bell(83, "bfloat16", 500), tw.codec("mx"), checksum=False)
    x, codec = scaled_blocks(84, "float32", 1601), tw.codec("mx", scale_rule="agreed")
    yield lossy("float32_e4m3_agreed_3_chunks", x, codec, chunks=3)


def nvfp4_blocks(largest: float, *blocks: tuple[float, ...]) -> Array:
    """float32, shape (272,): the tensor's largest value, then blocks of 16 that start as given."""
    x = np.zeros((17, 16), np.float32)
    x[0, 0] = largest
    for row, block in zip(x[1:], blocks, strict=False):
        row[: len(block)] = block
    return x.reshape(-1)


#: Largest value of the tensor and of a block, and an element there, for which one way alone to
#: compute scale or code gives another code than specs/nvfp4.md does.
NVFP4_ORDERS = {
    "g_by_6": (1224, "0x1.271248p+3", "0x0p+0"),
    "ag_times_c": (362, "0x1.eb4922p+6", "0x0p+0"),
    "ag_by_6": (1338, "0x1.c5f6dap+1", "0x0p+0"),
    "a_by_6": (1415, "0x1.229492p+8", "0x0p+0"),
    "x_by_quotient": (698, "0x1.8edb6ep+8", "0x1.8edb6cp+5"),
    "g_by_s": (1269, "0x1.2696dap+6", "0x1.eafb6ep+4"),
}


def nvfp4_rules() -> Iterator[LossyVector | Vector]:
    """Vectors that catch one wrong reading each."""
    codec = tw.codec("nvfp4")
    ties = (0.53125, 0.59375, 8.5, 9.5, 272, 304, 336, 368, 400, 2**-10, 3 * 2**-10)
    x = nvfp4_blocks(2688, *((6.0 * tie,) for tie in ties))
    yield lossy("float32_scale_ties", x, codec)
    codes = (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)
    x = nvfp4_blocks(2688, codes, tuple(-v for v in codes))
    yield lossy("float32_code_ties", x, codec)
    for name, (largest, a, v) in NVFP4_ORDERS.items():
        block = float.fromhex(a), float.fromhex(v)
        yield lossy(f"float32_{name}", nvfp4_blocks(largest, block), codec)
    parts = Parts.of(codec.encode(bell(100, "float32", 600), chunks=2, backend="ref"))
    put(parts, 1, parts.header.sections[0].nbytes, struct.pack("<f", 3.0))
    data = parts.join()
    tensor = tw.decode(data, backend="ref").tobytes()
    yield "nvfp4/float32_two_scales", data, tensor


def nvfp4_vectors() -> Iterator[LossyVector | Vector]:
    """Vectors of codec nvfp4."""
    codec = tw.codec("nvfp4")
    x = np.zeros(257, np.float32)
    x[:2] = 1.0, -3.0
    yield lossy("float32_example", x, codec)
    for i, dtype in enumerate(("bfloat16", "float16", "float32")):
        yield lossy(f"{dtype}_{400 + i}", bell(90 + i, dtype, 400 + i), codec)
        yield lossy(f"{dtype}_scaled", scaled_blocks(93 + i, dtype, 501), codec)
        small = np.ldexp(bell(96, "float32", 300), -14 if dtype == "float16" else -125)
        yield lossy(f"{dtype}_small", small.astype(BY_NAME[dtype].numpy), codec)
    yield lossy("bfloat16_zeros", np.zeros(300, BY_NAME["bfloat16"].numpy), codec)
    yield lossy("float32_5_chunks", bell(97, "float32", 1601), codec, chunks=5)
    yield lossy("float32_66_chunks", bell(101, "float32", 65 * 65), codec, chunks=66)
    yield lossy("float16_no_checksum", bell(98, "float16", 500), codec, checksum=False)
    stats = np.array([np.float32(1.0).view(np.int32)])
    parts = Parts.of(codec.encode(bell(99, "float16", 16 * 256), stats=stats, backend="ref"))
    codes = np.resize(np.arange(16, dtype=np.uint8), 16 * 256)
    put(parts, 0, 0, minifloat.pack(codes, minifloat.BY_NAME["e2m1"]).tobytes())
    put(parts, 0, parts.header.sections[0].nbytes + 16, bytes(range(256)))
    data = parts.join()
    yield "nvfp4/float16_all_codes", data, tw.decode(data, backend="ref").tobytes()
    yield from nvfp4_rules()


TACO_PARAMS: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "e5m2": {"format": "e5m2"},
    "int8": {"format": "int8"},
    "hadamard": {"transform": "hadamard", "block": 128},
    "hadamard_int8": {"transform": "hadamard", "format": "int8", "scales": "merged"},
    "none_e5m2": {"transform": "none", "format": "e5m2", "block": 64},
    "none_int8": {"transform": "none", "format": "int8", "block": 32},
    "merged": {"scales": "merged", "block": 512},
    "block_32": {"block": 32},
    "stochastic": {"rounding": "stochastic"},
    "stochastic_e5m2": {"rounding": "stochastic", "format": "e5m2", "transform": "none"},
    "stochastic_int8": {"rounding": "stochastic", "format": "int8", "block": 64},
}
TACO_DTYPES = ("bfloat16", "float16", "float32")
#: The key of every vector that was rounded at random.
TACO_KEY = tw.Key(0x0123456789ABCDEF, step=7, rank=3)


def taco_encoded(x: Array, params: dict[str, Any], **options: Any) -> tw.Buffer:
    """A fresh buffer of the reference backend."""
    return tw.codec("taco", **params).encode(x, key=TACO_KEY, backend="ref", **options)


def taco_vectors() -> Iterator[tuple[str, bytes, bytes, bytes]]:
    """Vectors of codec taco: buffer, decoded tensor, encoded tensor."""

    def coded(name: str, x: Array, **options: Any) -> tuple[str, bytes, bytes, bytes]:
        params = options.pop("params", {})
        buffer = taco_encoded(x, params, **options)
        if buffer.header.codec != "taco":
            raise AssertionError(f"{name} was stored by {buffer.header.codec}")
        return (
            f"taco/{name}",
            bytes(buffer),
            tw.decode(buffer, backend="ref").tobytes(),
            x.tobytes(),
        )

    ones = np.ones(384, np.float32).astype(BY_NAME["bfloat16"].numpy)
    example = {"transform": "none", "scales": "merged", "block": 128}
    yield coded("bfloat16_384_none", ones, params=example)
    for i, (name, params) in enumerate(TACO_PARAMS.items()):
        dtype = TACO_DTYPES[i % 3]
        yield coded(f"{dtype}_{name}", bell(80 + i, dtype, 900), params=params)
    for dtype in TACO_DTYPES:
        yield coded(f"{dtype}_specials", specials(dtype, 1500), params={"block": 32})
        yield coded(f"{dtype}_zeros", with_zeros(100, dtype, 700), params={"transform": "none"})
        yield coded(f"{dtype}_random_bits", random_bits(101, dtype, (3, 511)), params={"block": 32})
    huge = np.ldexp(bell(102, "float32", 700), 125).astype(np.float32)
    for name in ("e4m3", "int8", "hadamard", "none_int8"):
        yield coded(f"float32_huge_{name}", huge, params=TACO_PARAMS[name])
    tiny = np.ldexp(bell(103, "float32", 700), -30 - np.arange(700) // 64 * 4).astype(np.float32)
    for name in ("e4m3", "int8", "hadamard_int8", "none_e5m2"):
        yield coded(f"float32_tiny_{name}", tiny, params=TACO_PARAMS[name])
    for n in (511, 512, 513):
        yield coded(f"bfloat16_{n}", bell(n, "bfloat16", n), params={"block": 128})
    x = bell(104, "bfloat16", 2000)
    yield coded("bfloat16_3_chunks", x.reshape(4, 500), chunks=3)
    yield coded("float16_7_chunks_none", bell(105, "float16", 2450), chunks=7, params=example)
    params = TACO_PARAMS["stochastic"]
    yield coded("bfloat16_3_chunks_stochastic", x, chunks=3, params=params)
    yield coded("bfloat16_no_checksum", x, checksum=False)


SDP4BIT_PARAMS: dict[str, dict[str, Any]] = {
    "4": {},
    "8": {"bits": 8},
    "weights": {"group": 2048, "rotate": "none"},
    "8_encode": {"bits": 8, "rotate": "encode"},
    "4_decode": {"group": 32, "rotate": "decode"},
    "8_none": {"bits": 8, "group": 4096, "rotate": "none"},
    "4_stochastic": {"rounding": "stochastic"},
    "8_stochastic": {"bits": 8, "group": 64, "rounding": "stochastic", "rotate": "none"},
}


def sdp4bit_vectors() -> Iterator[LossyVector | Vector]:
    """Vectors of codec sdp4bit."""

    def coded(name: str, x: Array, params: dict[str, Any], **options: Any) -> LossyVector:
        return lossy(name, x, tw.codec("sdp4bit", **params), key=TACO_KEY, **options)

    x = np.zeros(257, BY_NAME["bfloat16"].numpy)
    x[:2] = 1.0, -3.5
    yield coded("bfloat16_257_none", x, {"rotate": "none"})
    for i, (name, params) in enumerate(SDP4BIT_PARAMS.items()):
        dtype = TACO_DTYPES[i % 3]
        n = 901 if params.get("group", 0) < 2048 else 4201
        yield coded(f"{dtype}_{name}", bell(110 + i, dtype, n + i), params)
    for i, dtype in enumerate(TACO_DTYPES):
        yield coded(f"{dtype}_specials", specials(dtype, 1500), {"group": 32, "bits": 8})
        yield coded(f"{dtype}_scaled", scaled_blocks(120 + i, dtype, 1001), {"group": 32})
        yield coded(f"{dtype}_random_bits", random_bits(123, dtype, (3, 511)), {"rotate": "none"})
        huge = np.full(1000, float(np.finfo(np.float16).max), np.float32)
        if dtype != "float16":
            huge = np.ldexp(huge, 111)
        huge[1::3] *= -1
        yield coded(f"{dtype}_huge", huge.astype(BY_NAME[dtype].numpy), {"bits": 8})
    tiny = np.ldexp(bell(124, "float32", 2000), -80 - np.arange(2000) // 64).astype(np.float32)
    yield coded("float32_tiny", tiny, {"group": 64})
    yield coded("float32_tiny_none", tiny, {"group": 64, "bits": 8, "rotate": "none"})
    for n in (0, 1, 31, 32, 33):
        yield coded(f"bfloat16_{n}_encode", bell(n, "bfloat16", n), {"rotate": "encode"})
    yield coded("float16_scalar_decode", bell(125, "float16", 1).reshape(()), {"rotate": "decode"})
    x = bell(126, "bfloat16", 3001)
    for name in ("4", "8_encode", "4_stochastic"):
        yield coded(f"bfloat16_3_chunks_{name}", x, SDP4BIT_PARAMS[name], chunks=3)
    yield coded("bfloat16_no_checksum", x, {}, checksum=False)
    for bits in (8, 4):
        yield sdp4bit_all_codes(bits)


def sdp4bit_all_codes(bits: int) -> Vector:
    """Every code but that of no encoder, in groups with the least, the largest and other scales."""
    n = 32 * 15
    parts = sdp4bit_parts(n, 1, bits=bits, group=32)
    codes = np.resize(np.arange(1, 1 << bits, dtype=np.uint8) ^ (1 << bits - 1), n)
    if bits == 4:
        codes = codes[0::2] | codes[1::2] << 4
    put(parts, 0, 0, codes.tobytes())
    scales = np.resize(np.array([-107, 126, -20, 0, 110], np.float32), 15)
    put(parts, 0, parts.header.sections[0].nbytes, np.exp2(scales).astype("<f4").tobytes())
    data = parts.join()
    return f"sdp4bit/float32_{bits}_all_codes", data, tw.decode(data, backend="ref").tobytes()


def activations(seed: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """Tokens of unlike entropy, with an outlier here and there."""
    nelem = math.prod(shape)
    powers = np.abs(bell(seed, "float32", nelem)).reshape(shape)
    x = bell(seed + 1, "float32", nelem).reshape(shape)
    tokens = np.arange(nelem // shape[-1]).reshape(shape[:-1])
    for k in range(1, 4):
        x[tokens % 4 >= k] *= powers[tokens % 4 >= k]
    x.reshape(-1)[random_words(seed, nelem) % 150 == 0] *= 20
    return x.astype(BY_NAME[dtype].numpy)


def tahquant_vectors() -> Iterator[LossyVector]:
    """Vectors of codec tahquant: buffer, decoded tensor, encoded tensor."""

    def coded(name: str, x: Array, **options: Any) -> LossyVector:
        fields = ("direction", "hidden")
        params = {k: options.pop(k) for k in fields if k in options}
        return lossy(f"{x.dtype.name}_{name}", x, tw.codec("tahquant", **params), **options)

    ramp = np.resize(np.arange(16, dtype=np.float32), (1, 1024))
    yield coded("ramp", ramp.astype(BY_NAME["bfloat16"].numpy))
    for i, dtype in enumerate(TACO_DTYPES):
        x = activations(120 + i, dtype, (12, 128))
        yield coded("tokens", x)
        yield coded("backward", x, direction="backward")
        yield coded("short_tiles", activations(130 + i, dtype, (3, 7, 100)))
        yield coded("specials", specials(dtype, 1500).reshape(15, 100))
        yield coded("random_bits", random_bits(140, dtype, (11, 192)), hidden=64)
        yield coded("zeros", with_zeros(141, dtype, 1200).reshape(10, 120))
    x = activations(142, "bfloat16", (2000,))
    yield coded("one_token", x)
    yield coded("short_last_token", x, hidden=190)
    yield coded("3_chunks", x.reshape(20, 100), chunks=3)
    yield coded("4_chunks_of_tokens", x, hidden=100, chunks=4)
    yield coded("backward_3_chunks", x.reshape(50, 40), chunks=3, direction="backward")
    yield coded("no_checksum", x.reshape(10, 200), checksum=False)
    wide = activations(143, "float32", (12, 100))
    for name, power in (("huge", 13), ("small", -18), ("lost", 40), ("subnormal", -140)):
        yield coded(name, np.ldexp(wide, power - np.arange(100) // 25).astype(np.float32))
    yield coded("equal_tokens", np.tile(wide[0], (12, 1)))


DYNAMIQ_PARAMS: dict[str, dict[str, Any]] = {
    "5": {},
    "pow2": {"widths": "pow2", "grid": "signed"},
    "paper": {"widths": "pow2", "grid": "signed", "scales": "stochastic"},
    "fixed_uniform": {"widths": "fixed", "grid": "uniform", "rounding": "stochastic"},
    "wide": {"scales": "wide", "group": 32, "rounding": "nearest"},
    "8": {"bits": 8, "super_group": 512, "group": 8},
    "3": {"bits": 3, "super_group": 128, "grid": "signed"},
    "center": {"bits": 4.0625, "center": True, "super_group": 1024, "group": 64},
    "wide_center": {"scales": "wide", "center": True, "group": 64, "widths": "fixed"},
}


def scaled_super_groups(seed: int, dtype: str, n: int) -> Array:
    """Values whose scale is another one at every 128 elements, some of which are zeros."""
    powers = random_words(seed + 1, -(-n // 128)).astype("<i8") % 9
    x = np.ldexp(bell(seed, "float64", n), np.repeat(powers - 6, 128)[:n]).astype(np.float32)
    x[np.arange(n) // 128 % 7 == 3] = 0
    return x.astype(BY_NAME[dtype].numpy)


def dynamiq_vectors() -> Iterator[LossyVector]:
    """Vectors of codec dynamiq: buffer, decoded tensor, encoded tensor."""

    def coded(name: str, x: Array, params: dict[str, Any], **options: Any) -> LossyVector:
        codec = tw.codec("dynamiq", **params)
        return lossy(f"{x.dtype.name}_{name}", x, codec, key=TACO_KEY, **options)

    turns = np.resize(np.array([1.0, -1.0], np.float32), 512).astype(BY_NAME["bfloat16"].numpy)
    params = {"widths": "fixed", "grid": "signed", "rounding": "nearest"}
    yield coded("512_fixed", turns, params)
    for i, (name, params) in enumerate(DYNAMIQ_PARAMS.items()):
        yield coded(name, scaled_super_groups(150 + i, TACO_DTYPES[i % 3], 3500 + i), params)
    small = {"super_group": 128, "group": 16}
    for i, dtype in enumerate(TACO_DTYPES):
        yield coded("specials", specials(dtype, 1500), small)
        # Some are infinite, and their super-groups lost.
        with np.errstate(over="ignore"):
            blocks = scaled_blocks(160 + i, dtype, 1701)
        yield coded("scaled", blocks, small)
        yield coded("random_bits", random_bits(163, dtype, (3, 511)), small)
        yield coded("zeros", with_zeros(164, dtype, 900), {"grid": "signed"})
        yield coded("flat", bell(165 + i, dtype, 2000), {})
    huge = np.ldexp(bell(168, "float32", 2000), 125).astype(np.float32)
    yield coded("huge", huge, {"center": True})
    yield coded("huge_wide", huge, {"scales": "wide", "group": 32})
    tiny = np.ldexp(bell(169, "float32", 4000), -80 - np.arange(4000) // 128).astype(np.float32)
    for scales in ("up", "stochastic", "wide"):
        yield coded(f"tiny_{scales}", tiny, {"scales": scales, "group": 64, "center": True})
    yield coded("offset", bell(170, "float32", 2100) + np.float32(40), {"center": True})
    x = scaled_super_groups(171, "bfloat16", 4001)
    yield coded("3_chunks", x, {}, chunks=3)
    yield coded("3_chunks_paper", x, DYNAMIQ_PARAMS["paper"], chunks=3)
    yield coded("4_chunks_aligned", x[:2048].reshape(4, 512), {}, chunks=4)
    yield coded("no_checksum", x, {}, checksum=False)
    key = TACO_KEY._replace(world=8)
    yield lossy("bfloat16_of_8_ranks", x, tw.codec("dynamiq"), key=key, chunks=3)


def sparse(seed: int, dtype: str, n: int, one_in: int) -> Array:
    """One element in so many, on average, is not zero; some are special."""
    x = np.zeros(n, BY_NAME[dtype].numpy)
    words = random_words(seed, n)
    chosen = words % one_in == 0
    x[chosen] = bell(seed + 1, dtype, n)[chosen]
    odd = chosen & (words // one_in % 50 == 0)
    bits_of(x)[odd] = bits_of(random_bits(seed + 2, dtype, (n,)))[odd]
    return x


def lhc_vectors() -> Iterator[LossyVector]:
    """Vectors of codec lhc: buffer, decoded tensor, encoded tensor."""

    def coded(name: str, x: Array, **options: Any) -> LossyVector:
        fields = ("ratio", "sketch", "mapping")
        params = {k: options.pop(k) for k in fields if k in options}
        return lossy(f"{x.dtype.name}_{name}", x, tw.codec("lhc", **params), **options)

    example = np.zeros(2048, np.float32)
    example[[0, 1023, 1029]] = 1.5, -2, 3
    yield coded("example", example, ratio=2)
    for i, dtype in enumerate(TACO_DTYPES):
        x = sparse(150 + 10 * i, dtype, 8 * 1024, 6)
        yield coded("peeled", x)
        yield coded("estimated", sparse(153 + 10 * i, dtype, 6 * 1024, 3), ratio=3)
        yield coded("published", x[: 5 * 1024], mapping="published", ratio=2.5)
    x = sparse(180, "float32", 9999, 7)
    for cells in ("bfloat16", "float16"):
        yield coded(f"in_{cells}", x, sketch=cells)
    yield coded("dense_in_float16", x[x != 0].repeat(3), sketch="float16", ratio=1.5)
    narrow = sparse(183, "bfloat16", 10000, 12)
    yield coded("in_float32", narrow, sketch="float32", ratio=5)
    yield coded("3_chunks", x, chunks=3, ratio=2)
    yield coded("tail", x[: 4 * 1024 + 1])
    yield coded("zeros", np.zeros((3, 1024), np.float32))
    yield coded("no_checksum", narrow.reshape(100, 100), checksum=False)


def summed(name: str, codec: tw.Codec, xs: list[Array], **options: Any) -> Vector:
    """The sum of the buffers of ranks 0, 1, ..., which no encoder writes."""
    combine: Any = np.bitwise_or if codec.reduce_op == "or" else np.maximum
    stats = combine.reduce([codec.measure(x) for x in xs])
    keys = [TACO_KEY._replace(rank=rank) for rank in range(len(xs))]
    pairs = zip(xs, keys, strict=True)
    parts = [codec.encode(x, stats=stats, key=k, backend="ref", **options) for x, k in pairs]
    total = homomorphic.add(*parts)
    tensor = tw.decode(total, backend="ref").tobytes()
    return f"{codec.name}/{xs[0].dtype.name}_{name}_sum", bytes(total), tensor


def thc_vectors() -> Iterator[LossyVector | Vector]:
    """Vectors of codec thc."""

    def coded(name: str, x: Array, **options: Any) -> LossyVector:
        params = {k: options.pop(k) for k in ("bits", "norm") if k in options}
        codec = tw.codec("thc", **params)
        return lossy(f"{x.dtype.name}_{name}", x, codec, key=TACO_KEY, **options)

    one = np.zeros(1024, np.float32)
    one[0] = 1.0
    yield coded("example", one)
    for i, dtype in enumerate(TACO_DTYPES):
        yield coded("block", bell(190 + i, dtype, 1250 + i), norm=NORMS[i % 2])
        x = specials(dtype, 1200)
        bits_of(x)[1024:] = bits_of(with_zeros(193 + i, dtype, 176))
        yield coded("specials", x)
    yield coded("scaled", scaled_super_groups(196, "float32", 1111))
    tiny = np.ldexp(bell(197, "float32", 1100), -80 - np.arange(1100) // 1024 * 12)
    yield coded("tiny", tiny.astype(np.float32))
    yield coded("tiny_tensor", tiny[:650].astype(np.float32), norm="tensor", bits=16)
    huge = np.full(1100, np.finfo(np.float32).max)
    huge[::2] *= -1
    yield coded("huge", huge, bits=16)
    yield coded("lost_tensor", specials("float32", 500), norm="tensor")
    yield coded("zeros", np.zeros((2, 700), BY_NAME["bfloat16"].numpy))
    yield coded("3_chunks", bell(198, "bfloat16", 3901), chunks=3)
    yield coded("no_checksum", bell(199, "float16", 900), checksum=False)
    ranks = [bell(200 + i, "float32", 1100) for i in range(8)]
    yield summed("8", tw.codec("thc"), ranks)
    codec = tw.codec("thc", bits=16, norm="tensor")
    yield summed("9", codec, [*ranks, -ranks[3]])
    yield summed(
        "2_chunks", tw.codec("thc"), [bell(208 + i, "bfloat16", 2701) for i in range(2)], chunks=2
    )


def omnireduce_vectors() -> Iterator[LossyVector | Vector]:
    """Vectors of codec omnireduce."""

    def coded(name: str, x: Array, **options: Any) -> LossyVector:
        fields = ("bits", "block", "values")
        params = {k: options.pop(k) for k in fields if k in options}
        return lossy(f"{x.dtype.name}_{name}", x, tw.codec("omnireduce", **params), **options)

    example = np.zeros(513, np.float32)
    example[[0, 300, 512]] = 1, -2, 1
    yield coded("example", example, bits=11)
    for i, dtype in enumerate(TACO_DTYPES):
        for values in sorted(set(TACO_DTYPES) - {dtype}):
            params: dict[str, Any] = {"bits": 4 + i, "block": 64, "values": values}
            yield coded(f"in_{values}", scaled_super_groups(210 + i, dtype, 601 + i), **params)
        yield coded("specials", specials(dtype, 900), block=64, values=dtype)
    x = np.ldexp(bell(213, "float32", 900), -70 - np.arange(900) // 64 * 5)
    yield coded("tiny", x.astype(np.float32), block=64, values="float32", bits=20)
    yield coded("zeros", with_zeros(214, "bfloat16", 1050) * 0)
    yield coded("few", np.concatenate([bell(215, "float32", 300), np.zeros(900, np.float32)]))
    yield coded("equal", np.ones((21, 51), BY_NAME["float16"].numpy), bits=3.0625, block=64)
    yield coded("3_chunks", scaled_super_groups(216, "float32", 1501), chunks=3, block=64)
    yield coded("no_checksum", bell(217, "bfloat16", 1537), block=256, bits=1, checksum=False)
    ranks = [scaled_super_groups(218 + i, "float32", 1100) for i in range(3)]
    yield summed("3", tw.codec("omnireduce", block=64), ranks)


# Vectors that tell a rule from wrong readings of it; tests/specs/test_readings.py has the readings.


def permuted(seed: int, x: Array) -> Array:
    """The elements of `x` in another order."""
    return x[np.argsort(random_words(seed, x.size), kind="stable")]


def sdp4bit_halfway(bits: int) -> Array:
    """float32 whose codes one addition, v + D, and two, v + Q + 1, round differently.

    Of 8 bits each lies next to the middle of two of the numbers that v + 128 can be; of 4 bits
    below one of them, by a little more than half the distance. The word that rank 3 draws for it
    makes the smallest difference count.
    """
    n, largest = 320, (1 << bits - 1) - 1
    words = philox_words(key_numbers(TACO_KEY), 0, n)
    steps = 65535 - (words >> np.uint32(16)).astype(np.int64)
    if bits == 8:
        x = steps * 2.0**-16 + 2.0**-17 + np.where(steps % 2 == 0, 1, -1) * 2.0**-24
    else:
        x = (steps + 1) * 2.0**-16 - 2.0**-21 - 2.0**-24
    x[(x < 0.5) | (np.arange(n) % 32 == 0)] = largest
    return x.astype(np.float32)


def sdp4bit_rules() -> Iterator[LossyVector]:
    """sdp4bit.md: v + D is one addition; a decoded value may round to -0."""
    for bits in (8, 4):
        codec = tw.codec("sdp4bit", bits=bits, group=32, rotate="none", rounding="stochastic")
        yield lossy(f"float32_{bits}_one_addition", sdp4bit_halfway(bits), codec, key=TACO_KEY)
    codec = tw.codec("sdp4bit", bits=8, group=32, rotate="none")
    yield lossy("float32_product_with_r", bell(3894, "float32", 320), codec)
    small = np.ldexp(bell(230, "float32", 320), -24).astype(np.float16)
    yield lossy("float16_minus_zeros", small, tw.codec("sdp4bit", bits=8))


def taco_rules() -> Iterator[LossyVector]:
    """taco.md: r = K / s, and the merged scale is s / alpha."""
    codec = tw.codec("taco", block=32, scales="merged", format="int8")
    yield lossy("float32_order_of_quotients", bell(815, "float32", 320), codec)


def rising(seed: int, dtype: str, n: int, block: int) -> Array:
    """Values whose scale grows from block to block."""
    x = bell(seed, "float64", n) * (1 + np.arange(n) // block)
    return x.astype(np.float32).astype(BY_NAME[dtype].numpy)


def norm_near_a_tie() -> Array:
    """Blocks whose root mean square is rounded up only if their sums are added as the page says.

    Nearly all is in the first block: 3443599^2 + 23687400^2 = 23936401^2, which has 25 bits and is
    halfway between two float32. Each of the others is below half a step of the first block's sum;
    blocks 1 and 3 together are above.
    """
    x = np.zeros((5, 1024), np.float32)
    x[0, :512], x[0, 512:] = 3 * 3443599 / 2.0**24, 3 * 23687400 / 2.0**24
    step = np.spacing(512 * 9 * (23936401 / 2.0**24) ** 2)
    x[1:, 0] = np.sqrt(step * np.array([0.45, 0.1, 0.3, 0.1]))
    return x.reshape(-1)[:4608]


def thc_rules() -> Iterator[LossyVector | Vector]:
    """thc.md: whose norm a block of a chunk takes; chunks may be sums of unlike ranks."""
    codec = tw.codec("thc")
    yield lossy(
        "float32_short_blocks", rising(231, "float32", 1300, 1024), codec, key=TACO_KEY, chunks=3
    )
    x = rising(232, "bfloat16", 1400, 1024)
    parts = Parts.of(codec.encode(x, key=TACO_KEY, chunks=2, backend="ref"))
    keys = [TACO_KEY._replace(seed=1 << 63 | 5, step=9, rank=rank) for rank in range(2)]
    stats = np.float32(2) * codec.measure(x)
    two = [codec.encode(x, key=k, stats=stats, chunks=2, backend="ref") for k in keys]
    parts.static[1] = Parts.of(homomorphic.add(*two)).static[1]
    data = parts.join()
    tensor = tw.decode(data, backend="ref").tobytes()
    yield "thc/bfloat16_unlike_chunks_sum", data, tensor

    # Chunk 3 has elements of block 1 alone, and the norm of block 2 for that of its neighbour.
    x = bell(290, "float32", 2103)
    x[2090] = np.nan
    yield lossy("float32_lost_neighbour", x, codec, key=TACO_KEY, chunks=5)
    codec = tw.codec("thc", norm="tensor")
    yield lossy("float32_order_of_norms", norm_near_a_tie(), codec, key=TACO_KEY)
    yield lossy("float16_30_blocks", bell(291, "float16", 30000), codec, key=TACO_KEY)


def omnireduce_rules() -> Iterator[LossyVector]:
    """omnireduce.md: whose norm a block of a chunk takes; zeros keep their signs."""
    codec = tw.codec("omnireduce", block=64)
    x = bell(233, "bfloat16", 600)
    x[448:512] *= x.dtype.type(100)
    yield lossy("bfloat16_short_blocks", x, codec, chunks=3)
    x = bell(234, "float32", 200)
    x[::3], x[1::5] = -0.0, -(2.0**-149)
    yield lossy("float32_minus_zeros", x, codec)


def dynamiq_rules() -> Iterator[LossyVector | Vector]:
    """dynamiq.md: strata of odd worlds, orders of sums, the last step up, lost super-groups."""

    def coded(name: str, x: Array, world: int = 1, chunks: int = 1, **params: Any) -> LossyVector:
        codec, key = tw.codec("dynamiq", **params), TACO_KEY._replace(world=world)
        return lossy(f"{x.dtype.name}_{name}", x, codec, key=key, chunks=chunks)

    for i, world in enumerate((3, 5)):
        x = scaled_super_groups(235 + i, TACO_DTYPES[i], 700)
        yield coded(f"of_{world}_ranks", x, world)
    small: dict[str, Any] = {"super_group": 128, "rounding": "nearest"}
    values = bell(400, "float32", 128)
    x = np.concatenate([permuted(401 + i, values) for i in range(6)])
    yield coded("order_of_energies", x, **small)
    values = np.concatenate([values[:64], -values[:64]])
    x = np.concatenate([permuted(270 + i, values) for i in range(4)])[:-56]
    yield coded("order_of_means", x, center=True, **small)

    # Energies 255 and 7680: to 4 bits the one gains as much as the other to 8, for half the units.
    x = np.zeros((8, 128), BY_NAME["bfloat16"].numpy)
    x[[0, 2, 3, 4], :3], x[[0, 2, 3, 4], 3:66] = 1, 2
    x[1, :30] = 16
    yield coded("step_that_does_not_fit", x.reshape(-1), bits=3.5, widths="pow2", **small)
    for i, grid in enumerate(("balanced", "signed", "uniform")):
        yield dynamiq_all_codes(grid, TACO_DTYPES[i], 280 + 4 * i, center=i == 1)

    # Chunks of 258 elements, two super-groups, but for the last one, of 255.
    x = scaled_super_groups(292, "float32", 1287)
    yield coded("short_chunk", x, chunks=5, rounding="nearest")
    x = scaled_super_groups(294, "float32", 1501) + np.float32(3)
    x = x.astype(BY_NAME["bfloat16"].numpy)
    yield coded("3_chunks_center", x, chunks=3, **(small | {"center": True}))
    # A magnitude of 2^110 or none: the mean is 0 of the first two super-groups alone.
    x = np.resize(np.ldexp(np.float32(1), [110, 109]), 384).astype(np.float32)
    x[256:] /= 2
    params: dict[str, Any] = {"widths": "pow2", "grid": "uniform", "scales": "wide"}
    yield coded("center_limit", x, super_group=128, center=True, **params)


def dynamiq_all_codes(grid: str, dtype: str, seed: int, **params: Any) -> Vector:
    """Random codes of every width; super-group 5 is lost, whatever else it has."""
    n, size = 7, 128
    codec = tw.codec("dynamiq", bits=8, super_group=size, grid=grid, rounding="nearest", **params)
    spec: Any = codec.spec
    x = np.ones(n * size, BY_NAME[dtype].numpy)
    parts = Parts.of(codec.encode(x, backend="ref"))
    payload, scales, _ = (s.nbytes for s in parts.header.sections)
    widths = [2 + 3 * j % 7 for j in range(n)]
    codes = random_bits(seed, "uint8", (sum(widths) * size // 8,)).tobytes()
    put(parts, 0, 0, codes.ljust(payload, b"\0"))
    pairs = zip(widths[0::2], [*widths[1::2], 0], strict=True)
    put(parts, 0, payload + scales, bytes(low | high << 4 for low, high in pairs))
    words = (random_words(seed + 1, n) % (8 << 7) + (122 << 7)).astype("<u2")
    words[3], words[5] = 0, 0x7FC0
    means = (random_words(seed + 2, n) % (4 << 7) + (122 << 7)).astype("<u2")
    fractions = random_bits(seed + 3, "uint8", (n * size // spec.group,))
    kept = [words, means, fractions] if spec.center else [words, fractions]
    put(parts, 0, payload, b"".join(part.tobytes() for part in kept))
    data = parts.join()
    name = f"dynamiq/{dtype}_{grid}_all_codes"
    return name, data, tw.decode(data, backend="ref").tobytes()


def tahquant_rules() -> Iterator[LossyVector]:
    """tahquant.md: how lg rounds; the least value of a tile is never -0."""
    x = bell(928, "float32", 320).reshape(20, 16)
    yield lossy("float32_close_entropies", x, tw.codec("tahquant"))
    x = bell(290, "float16", 640).reshape(5, 128)
    x[0], x[1, ::2], x[1, 1::2] = -0.0, 0.0, -0.0
    x[2:4] = np.abs(x[2:4])
    x[2:, ::3] = -0.0
    yield lossy("float16_minus_zeros", x, tw.codec("tahquant"))
    backward = tw.codec("tahquant", direction="backward")
    yield lossy("float16_backward_minus_zeros", x, backward)


def lhc_rules() -> Iterator[Vector]:
    """lhc.md: sums; an element of the index may be -0 on a rank."""
    xs = []
    for i in range(4):
        chosen = random_words(300 + 2 * i, 2000) % 40 == 0
        xs.append(np.where(chosen, bell(301 + 2 * i, "float16", 2000), np.float16(0)))
    xs[0][xs[1] != 0] = -0.0
    yield summed("4", tw.codec("lhc", ratio=2), xs)


# Invalid vectors: a valid buffer with one thing changed, header CRC32C and checksums repaired.


@dataclass
class Parts:
    """A buffer taken apart. `join` puts the parts together, however wrong they are."""

    header: Header
    records: Array
    static: list[bytearray]
    dynamic: list[bytearray]

    @classmethod
    def of(cls, buffer: tw.Buffer) -> Parts:
        """The parts of the packed form."""
        data = bytes(buffer)
        header = parse_header(memoryview(data))
        records = np.frombuffer(data, RECORD, header.chunks, header.nbytes).copy()
        chunks = range(header.chunks)
        static = [bytearray(buffer.static(i)) for i in chunks]
        return cls(header, records, static, [bytearray(buffer.dynamic(i)) for i in chunks])

    def join(self) -> bytes:
        """The buffer; record fields other than sizes and checksums are taken as they are."""
        h = self.header
        chunk_nelem = -(-h.nelem // h.chunks)
        for i, record in enumerate(self.records):
            nelem = max(0, min(chunk_nelem, h.nelem - i * chunk_nelem))
            static, dynamic = (np.frombuffer(p[i], np.uint8) for p in (self.static, self.dynamic))
            total = words_sum(static) + words_sum(dynamic, static.size // 4)
            total += identity_term(h.codec_id, h.codec_version, h.dtype.id, nelem)
            flags, ordinal, info = (int(record[k]) for k in ("flags", "ordinal", "info"))
            total += record_term(dynamic.size, flags, ordinal, info)
            record["checksum"] = total & MASK64 if h.required & CHECKSUM else 0
            record["dynamic_nbytes"] = dynamic.size
        head = h.pack() + self.records.tobytes()
        out = bytearray(head.ljust(align(len(head)), b"\0") + b"".join(self.static))
        for part in self.dynamic:
            slot = h.dynamic_stride or align(len(part))
            out += part.ljust(slot, b"\0")[:slot]
        return bytes(out)


def poked(data: bytes, at: int, new: bytes) -> bytes:
    """`data` with other bytes at offset `at`."""
    return data[:at] + new + data[at + len(new) :]


def repaired(data: bytes) -> bytes:
    """`data` with the CRC32C of its header made right; H must be within it."""
    header = data[: int.from_bytes(data[8:12], "little")]
    return poked(data, 28, struct.pack("<I", header_crc(header)))


def raw_parts() -> Parts:
    """Two chunks of 100 bytes: 384 bytes, records at 48, static parts at 128 and 256."""
    return Parts.of(encoded(random_bits(60, "uint8", (200,)), "raw", chunks=2))


def zipccl_parts() -> Parts:
    """Two chunks, each a tile of 1250 elements, W = 160: block of 1760 bytes, index at 1792.

    The header has 72 bytes, the table at 40 and the parameters at 64.
    """
    return Parts.of(encoded(bell(61, "bfloat16", 2500), "zipccl", chunks=2))


def three_tiles() -> Parts:
    """A chunk of two whole tiles and one of 16 columns, with escapes in each; index at 6272."""
    x = bell(62, "float8_e5m2", 8200)
    bits_of(x)[-1] = 3 << 2
    return Parts.of(encoded(x, "zipccl"))


def two_windows() -> Parts:
    """Two tiles with different windows."""
    return Parts.of(encoded(scaled_tiles(52, "bfloat16", 4800), "zipccl"))


def one_zero_tile() -> Parts:
    """One tile in zero mode."""
    return Parts.of(encoded(with_zeros(51, "bfloat16", 2000), "zipccl"))


def explicit() -> Parts:
    """Windows at the explicit base 4."""
    x = scaled_tiles(52, "bfloat16", 4800)
    return Parts.of(encoded(x * x.dtype.type(2.0**-120), "zipccl", window=4))


def random_chunks() -> Parts:
    """Three raw chunks of 641, 641 and 639 elements; static parts have 1280 bytes."""
    return Parts.of(encoded(random_bits(64, "bfloat16", (1921,)), "zipccl", chunks=3))


def unsummed() -> Parts:
    """As `zipccl_parts`, without checksums."""
    return Parts.of(encoded(bell(61, "bfloat16", 2500), "zipccl", chunks=2, checksum=False))


def zeros() -> Parts:
    """A tile in zero mode with escapes."""
    return Parts.of(encoded(with_zeros(67, "float8_e5m2", 2500), "zipccl"))


def spare_chunks() -> Parts:
    """Five elements in four chunks; the last one is empty."""
    return Parts.of(encoded(random_bits(68, "uint8", (5,)), "raw", chunks=4))


def assembled() -> bytes:
    """As `raw_parts`, put together from chunks with other numbers."""
    parts = raw_parts()
    parts.records["ordinal"] = [1, 0]
    return changed(parts, required=CHECKSUM | ASSEMBLED)


def half_escape() -> Parts:
    """A float64 chunk with a byte too many behind its escapes."""
    parts = Parts.of(encoded(bell(66, "float64", 640), "zipccl"))
    parts.dynamic[0].append(0)
    return parts


def changed(parts: Parts, **fields: Any) -> bytes:
    """The buffer with other header fields."""
    parts.header = replace(parts.header, **fields)
    return parts.join()


def sectioned(parts: Parts, *order: int, **fields: Any) -> bytes:
    """The buffer with the sections of these numbers, with other fields."""
    return changed(
        parts, sections=tuple(replace(parts.header.sections[i], **fields) for i in order)
    )


def forced(x: Array) -> bytes:
    """A zipccl buffer of values that an encoder stores by raw; it has no escapes."""
    dtype, spec = BY_NAME[x.dtype.name], tw.codec("zipccl").spec
    plan = tw.Plan(spec, dtype, x.shape, 1, spec.layout(dtype, x.size), 0)
    out = np.zeros(plan.nbytes, np.uint8)
    encode_into(plan, bits_of(x), out, backend="ref")
    return bytes(out)


def too_many_elements() -> bytes:
    """A header that would be right for a chunk of 2^32 elements, with room for its record."""
    parts = zipccl_parts()
    layout = tw.codec("zipccl").spec.layout(parts.header.dtype, 1 << 32)
    header = replace(parts.header, shape=(1 << 32,), chunks=1, sections=layout.sections)
    return header.pack() + bytes(RECORD.itemsize)


def edited(make: Callable[[], Parts], edit: Callable[[Parts], object]) -> bytes:
    """The buffer after `edit` changed its parts."""
    parts = make()
    edit(parts)
    return parts.join()


def record(parts: Parts, chunk: int, field: str, value: int) -> None:
    """Set a field of a chunk's record."""
    parts.records[field][chunk] = value


def grow(parts: Parts, chunk: int, nbytes: int) -> None:
    """Give a chunk this many dynamic bytes."""
    parts.dynamic[chunk] = parts.dynamic[chunk][:nbytes].ljust(nbytes, b"\0")


def put(parts: Parts, chunk: int, at: int, new: bytes) -> None:
    """Change bytes of a chunk's static part."""
    parts.static[chunk][at : at + len(new)] = new


def set_code(parts: Parts, element: int, code: int) -> None:
    """Give an element of the last chunk of `zipccl_parts` another code."""
    row, column = divmod(element, 160)
    for plane in range(3):
        at = 8 * 160 + plane * 160 + column
        bit = 1 << row
        parts.static[1][at] = parts.static[1][at] & ~bit | (bit if code >> plane & 1 else 0)


def window(parts: Parts) -> int:
    """The window of the last chunk of `zipccl_parts`."""
    return int.from_bytes(parts.static[1][1796:1798], "little")


def put_index(parts: Parts, tile: int, offset: int) -> None:
    """Add to the escape offset of a tile of `three_tiles`."""
    at = 6272 + 4 * tile
    old = int.from_bytes(parts.static[0][at : at + 4], "little")
    put(parts, 0, at, (old + offset).to_bytes(4, "little"))


def put_window(parts: Parts, by: int) -> None:
    """Add a multiple of 8, with which codes stay right, to the base of the first tile."""
    old = int.from_bytes(parts.static[0][6284:6286], "little")
    put(parts, 0, 6284, (old + by).to_bytes(2, "little"))


def last_escape(parts: Parts, exponent: int) -> None:
    """Change the last escape of the first chunk."""
    parts.dynamic[0][-1] = exponent


Invalid = dict[str, tuple[bytes, str]]


def header_vectors() -> Invalid:
    """Steps 1 to 9 of "Reading", as far as they are the same for all codecs."""
    raw = raw_parts().join()
    sections = raw_parts().header.sections
    h = struct.Struct("<I").pack
    return {
        "empty": (b"", "truncated"),
        "magic_cut": (raw[:3], "truncated"),
        "magic": (poked(raw, 0, b"\x9eTWC"), "bad_magic"),
        "magic_short": (b"\x9fTWB", "bad_magic"),
        "fixed_header_cut": (raw[:31], "truncated"),
        "chunks_65537": (repaired(poked(raw, 20, h(65537))), "bad_header"),
        "major_0": (repaired(poked(raw, 4, b"\0")), "unsupported_version"),
        "major_2": (repaired(poked(raw, 4, b"\2")), "unsupported_version"),
        "header_nbytes_too_large": (poked(raw, 8, h((1 << 20) + 8)), "header_too_large"),
        "header_nbytes_24": (repaired(poked(raw, 8, h(24))), "bad_header"),
        "header_nbytes_52": (repaired(poked(raw, 8, h(52))), "bad_header"),
        "header_cut": (raw[:40], "truncated"),
        "header_crc": (poked(raw, 18, b"\1"), "checksum_mismatch"),
        "header_crc_of_table": (poked(raw, 40, b"\2"), "checksum_mismatch"),
        "required_bit_4": (changed(raw_parts(), required=CHECKSUM | 4), "unknown_feature"),
        "required_bit_32768": (changed(raw_parts(), required=CHECKSUM | 32768), "unknown_feature"),
        "codec_0": (changed(raw_parts(), codec_id=0), "unknown_codec"),
        "codec_65535": (changed(raw_parts(), codec_id=65535), "unknown_codec"),
        "dtype_0": (repaired(poked(raw, 13, b"\0")), "bad_header"),
        "dtype_10": (repaired(poked(raw, 13, b"\x0a")), "bad_header"),
        "ndim_33": (changed(raw_parts(), shape=(200, *(1,) * 32)), "bad_header"),
        "chunks_0": (repaired(poked(raw, 20, h(0))), "bad_header"),
        "no_room_for_shape": (repaired(poked(raw, 14, b"\x20")), "bad_header"),
        "no_room_for_table": (repaired(poked(raw, 15, b"\2")), "bad_header"),
        "size_2_63": (changed(raw_parts(), shape=(1 << 31, 1 << 32)), "limit_exceeded"),
        "size_2_64": (changed(raw_parts(), shape=(1 << 32, 1 << 32)), "limit_exceeded"),
        "size_2_63_beside_0": (
            changed(raw_parts(), shape=(0, 1 << 62, 2), sections=(replace(sections[0], nbytes=0),)),
            "limit_exceeded",
        ),
        "section_kind_7": (repaired(poked(raw, 40, b"\7")), "bad_header"),
        "section_dynamic_2": (repaired(poked(raw, 41, b"\2")), "bad_header"),
        "section_reserved": (repaired(poked(raw, 43, b"\1")), "bad_header"),
        "raw_version_2": (changed(raw_parts(), codec_version=2), "unsupported_version"),
        "raw_parameters": (changed(raw_parts(), params=bytes(8)), "bad_header"),
        "raw_no_section": (changed(raw_parts(), sections=()), "bad_header"),
        "raw_two_sections": (sectioned(raw_parts(), 0, 0), "bad_header"),
        "raw_section_kind": (sectioned(raw_parts(), 0, kind=2), "bad_header"),
        "raw_section_size": (sectioned(raw_parts(), 0, nbytes=256), "bad_header"),
        "raw_section_dynamic": (sectioned(raw_parts(), 0, dynamic=True), "bad_header"),
        "raw_dynamic_stride": (changed(raw_parts(), dynamic_stride=ALIGN), "bad_header"),
    }


def zipccl_header_vectors() -> Invalid:
    """Step 9 of "Reading" for zipccl."""
    params = zipccl_parts().header.params
    sections = zipccl_parts().header.sections
    dtypes = {f"zipccl_of_{name}": BY_NAME[name] for name in ("uint16", "float8_e8m0fnu")}
    explicit = {
        name: struct.pack("<BBHI", 3, 12, base, 0)
        for name, base in (("zipccl_base_250", 250), ("zipccl_base_65535", 65535))
    }
    wrong_params = explicit | {
        "zipccl_no_parameters": b"",
        "zipccl_16_byte_parameters": params + bytes(8),
        "zipccl_window_kind_4": poked(params, 0, b"\4"),
        "zipccl_tile_size_13": poked(params, 1, b"\x0d"),
        "zipccl_base_not_explicit": poked(params, 2, b"\1"),
        "zipccl_parameters_reserved": poked(params, 7, b"\1"),
    }
    slots = zipccl_parts().header.sections[2].nbytes
    vectors = {
        "zipccl_version_2": (changed(zipccl_parts(), codec_version=2), "unsupported_version"),
        "zipccl_sections_swapped": (sectioned(zipccl_parts(), 1, 0, 2), "bad_header"),
        "zipccl_no_escapes_section": (sectioned(zipccl_parts(), 0, 1), "bad_header"),
        "zipccl_four_sections": (sectioned(zipccl_parts(), 0, 1, 2, 2), "bad_header"),
        "zipccl_tiles_too_large": (
            changed(
                zipccl_parts(),
                sections=(replace(sections[0], nbytes=sections[0].nbytes + ALIGN), *sections[1:]),
            ),
            "bad_header",
        ),
        "zipccl_escapes_too_large": (
            changed(
                zipccl_parts(), sections=(*sections[:2], replace(sections[2], nbytes=slots + ALIGN))
            ),
            "bad_header",
        ),
        "zipccl_gains_nothing": (forced(np.ones(100, BY_NAME["bfloat16"].numpy)), "bad_header"),
        "zipccl_no_elements": (forced(np.ones(0, BY_NAME["bfloat16"].numpy)), "bad_header"),
        "zipccl_2_32_elements": (too_many_elements(), "bad_header"),
        "zipccl_slots_too_large": (
            changed(zipccl_parts(), dynamic_stride=slots + ALIGN),
            "bad_header",
        ),
    }
    for name, dtype in dtypes.items():
        vectors[name] = (changed(zipccl_parts(), dtype=dtype), "bad_header")
    for name, params in wrong_params.items():
        vectors[name] = (changed(zipccl_parts(), params=params), "bad_header")
    return vectors


def own_bound(parts: Parts) -> None:
    """Store the last chunk coded, with as many escapes as only a whole chunk may have."""
    grow(parts, 2, 2)
    record(parts, 2, "flags", 0)


def too_many_escapes(parts: Parts) -> None:
    """Code the last chunk although it has more escapes than its bound, which is 580."""
    x = bell(69, "bfloat16", 1250)
    bits_of(x)[:600] = 1 << 7
    h = parts.header
    static, dynamic = np.zeros(1920, np.uint8), np.zeros(1250, np.uint8)
    chunk = Chunk(h.dtype, x.size, h.sections, static, dynamic)
    used = zipccl.encode_chunk(zipccl.Zipccl(), chunk, bits_of(x)).dynamic_nbytes
    parts.static[1], parts.dynamic[1] = bytearray(static), bytearray(dynamic[:used])


def record_vectors() -> Invalid:
    """Steps 10 to 14 of "Reading"."""
    raw = raw_parts().join()
    coded = zipccl_parts().join()
    x = bell(61, "bfloat16", 2500)
    fixed = slotted(encoded(x, "zipccl", chunks=2, dynamic_capacity=128))
    bits_of(x)[1250:] = random_bits(65, "uint16", (1250,))
    overflow = slotted(encoded(x, "zipccl", chunks=2, dynamic_capacity=128))

    def fixed_rate(parts: Parts) -> None:
        parts.header = replace(parts.header, dynamic_stride=128)
        grow(parts, 1, 129)

    return {
        "records_cut": (raw[:100], "truncated"),
        "static_cut": (raw[:-1], "truncated"),
        "flags_4": (edited(zipccl_parts, lambda p: record(p, 1, "flags", 4)), "bad_record"),
        "overflow": (overflow, "dynamic_overflow"),
        "overflow_raw": (
            edited(raw_parts, lambda p: record(p, 0, "flags", OVERFLOW)),
            "dynamic_overflow",
        ),
        "checksum_where_none": (poked(unsummed().join(), 72 + 32, b"\1"), "bad_record"),
        "info": (edited(zipccl_parts, lambda p: record(p, 1, "info", 1 << 63)), "bad_record"),
        "ordinal": (edited(zipccl_parts, lambda p: record(p, 1, "ordinal", 0)), "bad_record"),
        "raw_flag_of_raw": (edited(raw_parts, lambda p: record(p, 0, "flags", RAW)), "bad_record"),
        "dynamic_of_raw": (edited(raw_parts, lambda p: grow(p, 1, 1)), "bad_record"),
        "dynamic_above_bound": (edited(zipccl_parts, too_many_escapes), "bad_record"),
        "dynamic_2_64": (poked(coded, 72 + 8, b"\xff" * 8), "bad_record"),
        "dynamic_above_own_bound": (edited(random_chunks, own_bound), "bad_record"),
        "raw_chunk_too_short": (edited(random_chunks, lambda p: grow(p, 1, 1)), "bad_record"),
        "raw_chunk_too_long": (edited(random_chunks, lambda p: grow(p, 2, 2)), "bad_record"),
        "dynamic_above_slot": (edited(zipccl_parts, fixed_rate), "bad_record"),
        "dynamic_cut": (coded[:-1], "truncated"),
        "dynamic_missing": (coded[:-256], "truncated"),
        "slots_cut": (fixed[:-1], "truncated"),
        "trailing_byte": (coded + b"\0", "trailing_bytes"),
        "trailing_block": (raw + bytes(128), "trailing_bytes"),
        "trailing_slot": (fixed + bytes(128), "trailing_bytes"),
        "behind_records": (poked(raw, 112, b"\1"), "reserved_not_zero"),
        "before_static": (poked(coded, 255, b"\x80"), "reserved_not_zero"),
    }


def shifted(parts: Parts) -> None:
    """Put an escape that belongs to no tile in front of the others."""
    parts.dynamic[0].insert(0, 0)
    for tile in range(3):
        put_index(parts, tile, 1)


def padding_escaped(parts: Parts) -> None:
    """Escape the last padding element, which is the last element of the last column."""
    set_code(parts, 1279, (window(parts) + 7) % 8)
    parts.dynamic[1].append(0)


def zero_base(parts: Parts) -> int:
    """The base of the tile of `zeros`."""
    index = parts.header.sections[0].nbytes
    return int.from_bytes(parts.static[0][index + 4 : index + 6], "little") % 32768


def zero_mode_base_0(parts: Parts) -> None:
    """Code all elements of the first tile as zeros of a window at base 0, in zero mode."""
    block = 512 * 6
    put(parts, 0, 0, bytes(block))
    gone = int.from_bytes(parts.static[0][6276:6280], "little")
    del parts.dynamic[0][:gone]
    put_index(parts, 1, -gone)
    put_index(parts, 2, -gone)
    put(parts, 0, 6272 + 12, b"\0\x80")


def payload_vectors() -> Invalid:
    """Step 15 of "Reading" and zipccl.md, "Checks"."""
    raw, coded = raw_parts().join(), zipccl_parts().join()
    dynamic_at = 256 + 2 * 1920
    mismatched = {
        "checksum_of_static": poked(raw, 256, bytes([raw[256] ^ 16])),
        "checksum_of_dynamic": poked(coded, dynamic_at, bytes([coded[dynamic_at] ^ 1])),
        "checksum_of_padding": poked(raw, 383, b"\1"),
        "checksum_field": poked(raw, 48 + 32, bytes([raw[80] ^ 1])),
        "checksum_of_swapped_words": raw[:128] + raw[132:136] + raw[128:132] + raw[136:],
        "checksum_of_ordinal": poked(assembled(), 48 + 20, b"\7"),
    }
    nonzero = {
        "padding_of_raw": edited(raw_parts, lambda p: put(p, 0, 100, b"\1")),
        "padding_of_empty_chunk": edited(spare_chunks, lambda p: put(p, 3, 0, b"\1")),
        "padding_behind_tiles": edited(zipccl_parts, lambda p: put(p, 1, 1760, b"\1")),
        "padding_behind_index": edited(zipccl_parts, lambda p: put(p, 0, 1798, b"\1")),
        "padding_of_static_end": edited(zipccl_parts, lambda p: put(p, 0, 1919, b"\1")),
        "padding_of_raw_chunk": edited(random_chunks, lambda p: put(p, 2, 1278, b"\1")),
        "padding_behind_escapes": poked(coded, len(coded) - 1, b"\1"),
    }
    bad = {
        "half_escape": half_escape().join(),
        "first_offset": edited(three_tiles, shifted),
        "offset_falls": edited(three_tiles, lambda p: put(p, 0, 6272 + 8, b"\1\0\0\0")),
        "offset_above_escapes": edited(three_tiles, lambda p: put_index(p, 2, 2)),
        "escape_of_other_tile": edited(three_tiles, lambda p: put_index(p, 1, 1)),
        "escape_missing": edited(three_tiles, lambda p: p.dynamic[0].pop()),
        "escape_left_over": edited(three_tiles, lambda p: p.dynamic[0].append(0)),
        "escape_too_large": edited(three_tiles, lambda p: last_escape(p, 32)),
        "escape_255": edited(three_tiles, lambda p: last_escape(p, 255)),
        "escape_in_window": edited(three_tiles, lambda p: last_escape(p, 15)),
        "escape_of_zero": edited(zeros, lambda p: last_escape(p, 0)),
        "escape_in_zero_window": edited(zeros, lambda p: last_escape(p, zero_base(p) + 6)),
        "window_base_too_large": edited(three_tiles, lambda p: put_window(p, 24)),
        "window_base_15_bits": edited(three_tiles, lambda p: put_window(p, 32736)),
        "sigma_two_windows": changed(two_windows(), params=b"\1\14" + bytes(6)),
        "histogram_zero_mode": changed(one_zero_tile(), params=b"\2\14" + bytes(6)),
        "explicit_other_window": changed(explicit(), params=b"\3\14\5\0" + bytes(4)),
        "zero_mode_base_0": edited(three_tiles, zero_mode_base_0),
        "padding_mantissa": edited(zipccl_parts, lambda p: put(p, 1, 1279, b"\1")),
        "padding_sign": edited(zipccl_parts, lambda p: put(p, 1, 1250, b"\x80")),
        "padding_code": edited(zipccl_parts, lambda p: set_code(p, 1250, window(p) % 8)),
        "padding_escaped": edited(zipccl_parts, padding_escaped),
    }
    return (
        {name: (data, "checksum_mismatch") for name, data in mismatched.items()}
        | {name: (data, "reserved_not_zero") for name, data in nonzero.items()}
        | {name: (data, "bad_payload") for name, data in bad.items()}
    )


def order_vectors() -> Invalid:
    """Two things wrong at once: the earlier check gives the reason."""

    def flags_and_overflow(parts: Parts) -> None:
        parts.records["flags"] = [OVERFLOW, 4]

    def info_and_overflow(parts: Parts) -> None:
        parts.records["info"] = [1, 0]
        parts.records["flags"] = [0, OVERFLOW]

    def padding_and_payload(parts: Parts) -> None:
        put(parts, 1, 1760, b"\1")
        put(parts, 1, 1250, b"\x80")

    coded = zipccl_parts().join()
    behind_escapes = poked(coded, len(coded) - 1, b"\1")
    first_static = zipccl_parts()
    put(first_static, 0, 1250, b"\x80")
    return {
        "order_size_and_section": (
            changed(raw_parts(), shape=(1 << 63,), sections=(Section(7, ALIGN),)),
            "limit_exceeded",
        ),
        "order_section_and_version": (
            changed(raw_parts(), codec_version=2, sections=(Section(7, ALIGN),)),
            "bad_header",
        ),
        "order_version_and_parameters": (
            changed(zipccl_parts(), codec_version=2, params=b""),
            "unsupported_version",
        ),
        "order_flags_and_overflow": (edited(zipccl_parts, flags_and_overflow), "bad_record"),
        "order_info_and_overflow": (edited(zipccl_parts, info_and_overflow), "dynamic_overflow"),
        "order_trailing_and_reserved": (poked(coded, 255, b"\1") + b"\0", "trailing_bytes"),
        "order_reserved_and_checksum": (
            poked(poked(coded, 255, b"\1"), 256, bytes([coded[256] ^ 1])),
            "reserved_not_zero",
        ),
        "order_checksum_and_padding": (
            poked(behind_escapes, 256 + 1920, bytes([coded[256 + 1920] ^ 1])),
            "checksum_mismatch",
        ),
        "order_padding_and_payload": (
            edited(zipccl_parts, padding_and_payload),
            "reserved_not_zero",
        ),
        "order_payload_and_next_checksum": (
            poked(first_static.join(), 256 + 1920, bytes([coded[256 + 1920] ^ 1])),
            "bad_payload",
        ),
    }


def mx_parts(element: str = "e2m1") -> Parts:
    """Two chunks of 501 and 500 elements; e2m1 has 251 and 250 bytes of codes, scales at 256."""
    x = bell(84, "bfloat16", 1001)
    return Parts.of(tw.codec("mx", element=element).encode(x, chunks=2, backend="ref"))


def mx_small(n: int) -> bytes:
    """A header of a size that an encoder leaves to raw, with everything that belongs to it."""
    spec: Any = tw.codec("mx").spec
    plan = tw.Plan(spec, BY_NAME["bfloat16"], (n,), 1, spec.layout(BY_NAME["bfloat16"], n), 0)
    out = np.zeros(plan.nbytes, np.uint8)
    encode_into(plan, bits_of(bell(85, "bfloat16", n)), out, backend="ref")
    return bytes(out)


def mx_invalid() -> Invalid:
    """What is wrong in mx buffers only."""
    params, sections = mx_parts().header.params, mx_parts().header.sections
    wrong = {
        "mx_no_parameters": b"",
        "mx_16_byte_parameters": params + bytes(8),
        "mx_element_6": poked(params, 0, b"\6"),
        "mx_scale_rule_3": poked(params, 1, b"\3"),
        "mx_block_16": poked(params, 2, b"\4"),
        "mx_parameters_reserved": poked(params, 3, b"\1"),
        "mx_parameters_end": poked(params, 7, b"\1"),
        "mx_other_element": poked(params, 0, b"\3"),
    }
    larger = (replace(sections[0], nbytes=sections[0].nbytes + ALIGN), sections[1])
    bad_header = {
        "mx_of_float64": changed(mx_parts(), dtype=BY_NAME["float64"]),
        "mx_of_uint16": changed(mx_parts(), dtype=BY_NAME["uint16"]),
        "mx_sections_swapped": sectioned(mx_parts(), 1, 0),
        "mx_one_section": sectioned(mx_parts(), 0),
        "mx_payload_too_large": changed(mx_parts(), sections=larger),
        "mx_dynamic_stride": changed(mx_parts(), dynamic_stride=ALIGN),
        "mx_gains_nothing": mx_small(100),
        "mx_no_elements": mx_small(0),
    }
    bad_record = {
        "mx_raw_flag": edited(mx_parts, lambda p: record(p, 1, "flags", RAW)),
        "mx_dynamic": edited(mx_parts, lambda p: grow(p, 1, 1)),
        "mx_info": edited(mx_parts, lambda p: record(p, 0, "info", 1)),
    }
    nonzero = {
        "mx_padding_of_payload": edited(mx_parts, lambda p: put(p, 1, 250, b"\1")),
        "mx_padding_of_scales": edited(mx_parts, lambda p: put(p, 0, 256 + 16, b"\1")),
    }

    def tail(element: str, chunk: int, at: int, bit: int) -> bytes:
        parts = mx_parts(element)
        put(parts, chunk, at, bytes([parts.static[chunk][at] | bit]))
        return parts.join()

    bad_payload = {
        "mx_tail_of_4_bits": tail("e2m1", 0, 250, 16),
        "mx_tail_of_6_bits": tail("e3m2", 0, 375, 128),
    }
    coded = mx_parts().join()
    return (
        {name: (changed(mx_parts(), params=data), "bad_header") for name, data in wrong.items()}
        | {name: (data, "bad_header") for name, data in bad_header.items()}
        | {"mx_version_2": (changed(mx_parts(), codec_version=2), "unsupported_version")}
        | {name: (data, "bad_record") for name, data in bad_record.items()}
        | {"mx_checksum": (poked(coded, 300, bytes([coded[300] ^ 1])), "checksum_mismatch")}
        | {name: (data, "reserved_not_zero") for name, data in nonzero.items()}
        | {name: (data, "bad_payload") for name, data in bad_payload.items()}
    )


def nvfp4_parts() -> Parts:
    """Two chunks of 501 and 500 elements: 251 and 250 bytes of codes, scales at 256."""
    return Parts.of(tw.codec("nvfp4").encode(bell(86, "float16", 1001), chunks=2, backend="ref"))


def nvfp4_invalid() -> Invalid:
    """What is wrong in nvfp4 buffers only."""
    sections = nvfp4_parts().header.sections
    bad_header = {
        "nvfp4_parameters": changed(nvfp4_parts(), params=bytes(8)),
        "nvfp4_of_float64": changed(nvfp4_parts(), dtype=BY_NAME["float64"]),
        "nvfp4_sections_swapped": sectioned(nvfp4_parts(), 1, 0),
        "nvfp4_gains_nothing": changed(nvfp4_parts(), shape=(200,)),
        "nvfp4_scales_too_large": changed(
            nvfp4_parts(), sections=(sections[0], replace(sections[1], nbytes=256))
        ),
    }
    edits: dict[str, tuple[int, int, bytes, str]] = {
        "padding_of_payload": (1, 250, b"\1", "reserved_not_zero"),
        "padding_behind_tensor_scale": (0, 256 + 15, b"\1", "reserved_not_zero"),
        "padding_of_scales": (0, 256 + 16 + 32, b"\1", "reserved_not_zero"),
        "tensor_scale_0": (0, 256, bytes(4), "bad_payload"),
        "tensor_scale_negative": (1, 259, b"\xc4", "bad_payload"),
        "tensor_scale_infinite": (1, 256, struct.pack("<f", math.inf), "bad_payload"),
        "tensor_scale_nan": (0, 256, struct.pack("<f", math.nan), "bad_payload"),
        "tail": (0, 250, b"\x1f", "bad_payload"),
    }
    vectors = {name: (data, "bad_header") for name, data in bad_header.items()}
    for name, (chunk, at, new, reason) in edits.items():
        parts = nvfp4_parts()
        put(parts, chunk, at, new)
        vectors[f"nvfp4_{name}"] = parts.join(), reason
    raw_flag = edited(nvfp4_parts, lambda p: record(p, 1, "flags", RAW))
    return vectors | {
        "nvfp4_version_2": (changed(nvfp4_parts(), codec_version=2), "unsupported_version"),
        "nvfp4_raw_flag": (raw_flag, "bad_record"),
    }


def taco_parts(**params: Any) -> Parts:
    """Two chunks of 1000 elements: 4 blocks, whose scales lie at 1024 to 1056 (merged: 1040)."""
    x = bell(106, "bfloat16", 2000)
    bits_of(x)[1256:1512] = 0x7F80
    return Parts.of(taco_encoded(x, params, chunks=2))


def taco_invalid() -> Invalid:
    """Step 9 of "Reading" for taco, and taco.md, "Checks"; block 1 of chunk 1 is lost."""
    params = taco_parts().header.params
    sections = taco_parts().header.sections
    headers = {
        "taco_version_2": (changed(taco_parts(), codec_version=2), "unsupported_version"),
        "taco_sections_swapped": (sectioned(taco_parts(), 1, 0), "bad_header"),
        "taco_no_scales_section": (sectioned(taco_parts(), 0), "bad_header"),
        "taco_three_sections": (sectioned(taco_parts(), 0, 1, 1), "bad_header"),
        "taco_scales_of_kind_2": (
            changed(taco_parts(), sections=(sections[0], replace(sections[1], kind=2))),
            "bad_header",
        ),
        "taco_scales_dynamic": (
            changed(taco_parts(), sections=(sections[0], replace(sections[1], dynamic=True))),
            "bad_header",
        ),
        "taco_dynamic_stride": (changed(taco_parts(), dynamic_stride=ALIGN), "bad_header"),
        "taco_raw_flag": (edited(taco_parts, lambda p: record(p, 0, "flags", RAW)), "bad_record"),
        "taco_dynamic_bytes": (edited(taco_parts, lambda p: grow(p, 1, 1)), "bad_record"),
    }
    for name in ("float64", "float8_e4m3fn", "int16"):
        headers[f"taco_of_{name}"] = (changed(taco_parts(), dtype=BY_NAME[name]), "bad_header")
    wrong = {
        "no_parameters": b"",
        "16_byte_parameters": params + bytes(8),
        "format_3": poked(params, 0, b"\3"),
        "block_16": poked(params, 1, b"\4"),
        "block_1024": poked(params, 1, b"\12"),
        "block_2_255": poked(params, 1, b"\xff"),
        "transform_3": poked(params, 2, b"\3"),
        "scales_2": poked(params, 3, b"\2"),
        "rounding_2": poked(params, 4, b"\2"),
        "parameters_reserved": poked(params, 5, b"\1"),
        "parameters_end": poked(params, 7, b"\1"),
    }
    for name, bad in wrong.items():
        headers[f"taco_{name}"] = (changed(taco_parts(), params=bad), "bad_header")

    word = struct.Struct("<f").pack
    merged: dict[str, Any] = {"scales": "merged"}

    def with_scale(chunk: int, at: int, new: bytes, **params: Any) -> bytes:
        return edited(lambda: taco_parts(**params), lambda p: put(p, chunk, 1024 + at, new))

    def with_code(chunk: int, at: int, code: int, **params: Any) -> bytes:
        return edited(lambda: taco_parts(**params), lambda p: put(p, chunk, at, bytes([code])))

    bad_scales = {
        "alpha_zero": with_scale(0, 0, bytes(4)),
        "alpha_negative": with_scale(0, 8, word(-1.0)),
        "alpha_infinite": with_scale(1, 0, word(math.inf)),
        "alpha_too_small": with_scale(0, 24, word(2.0**-11)),
        "alpha_too_large": with_scale(1, 24, word(2.0**11)),
        "alpha_lost": with_scale(0, 0, b"\0\0\xc0\x7f"),
        "s_zero": with_scale(0, 4, bytes(4)),
        "s_negative": with_scale(0, 12, word(-1.0)),
        "s_lost": with_scale(0, 4, b"\0\0\xc0\x7f"),
        "s_other_nan": with_scale(1, 4, b"\1\0\xc0\x7f"),
        "s_too_small": with_scale(0, 28, word(2.0**-87)),
        "s_too_large": with_scale(0, 28, word(2.0**127)),
        "quotient_too_large": with_scale(0, 0, word(2.0**-10) + word(2.0**120)),
        "alpha_of_lost_block": with_scale(1, 8, word(1.0)),
        "merged_zero": with_scale(0, 4, bytes(4), **merged),
        "merged_infinite": with_scale(0, 4, word(math.inf), **merged),
        "merged_negative": with_scale(1, 0, word(-1.0), **merged),
        "merged_too_small": with_scale(1, 12, word(2.0**-97), **merged),
    }
    bad_codes = {
        "nan_e4m3": with_code(0, 0, 0x7F),
        "negative_nan_e4m3": with_code(1, 1023, 0xFF),
        "infinity_e5m2": with_code(0, 255, 0x7C, format="e5m2"),
        "nan_e5m2": with_code(1, 768, 0xFF, format="e5m2"),
        "minus_128": with_code(0, 256, 0x80, format="int8"),
        "code_of_lost_block": with_code(1, 300, 1),
        "nan_code_none": with_code(1, 999, 0x7F, transform="none"),
    }
    padding = {
        "padding_none": with_code(0, 1000, 1, transform="none"),
        "padding_behind_scales": with_scale(0, 32, b"\1"),
        "padding_of_merged": with_scale(1, 16, b"\1", **merged),
    }
    return (
        headers
        | {f"taco_{name}": (data, "bad_payload") for name, data in (bad_scales | bad_codes).items()}
        | {f"taco_{name}": (data, "reserved_not_zero") for name, data in padding.items()}
    )


def sdp4bit_parts(n: int = 2001, chunks: int = 2, **params: Any) -> Parts:
    """Usually chunks of 1001 and 1000 elements, whose group 2 is lost, with scales at 512."""
    x = bell(127, "float32", n)
    x[300:1000:1001] = math.inf
    codec = tw.codec("sdp4bit", **params)
    return Parts.of(codec.encode(x, chunks=chunks, backend="ref"))


def sdp4bit_invalid() -> Invalid:
    """Step 9 of "Reading" for sdp4bit, and sdp4bit.md, "Checks"; group 2 of chunk 0 is lost."""
    params = sdp4bit_parts().header.params
    sections = sdp4bit_parts().header.sections
    wrong = {
        "no_parameters": b"",
        "16_byte_parameters": params + bytes(8),
        "bits_5": poked(params, 0, b"\5"),
        "group_16": poked(params, 1, b"\4"),
        "group_8192": poked(params, 1, b"\15"),
        "group_2_255": poked(params, 1, b"\xff"),
        "rotate_4": poked(params, 2, b"\4"),
        "rounding_2": poked(params, 3, b"\2"),
        "parameters_reserved": poked(params, 4, b"\1"),
        "parameters_end": poked(params, 7, b"\1"),
        "other_bits": poked(params, 0, b"\x08"),
    }
    encode = sdp4bit_parts(33, 1, rotate="encode")
    vectors: Invalid = {
        "version_2": (changed(sdp4bit_parts(), codec_version=2), "unsupported_version"),
        "of_float64": (changed(sdp4bit_parts(), dtype=BY_NAME["float64"]), "bad_header"),
        "encode_of_float64": (changed(encode, dtype=BY_NAME["float64"]), "bad_header"),
        "sections_swapped": (sectioned(sdp4bit_parts(), 1, 0), "bad_header"),
        "one_section": (sectioned(sdp4bit_parts(), 0), "bad_header"),
        "payload_too_large": (
            changed(
                sdp4bit_parts(),
                sections=(replace(sections[0], nbytes=sections[0].nbytes + ALIGN), sections[1]),
            ),
            "bad_header",
        ),
        "gains_nothing": (changed(encode, params=params), "bad_header"),
        "raw_flag": (edited(sdp4bit_parts, lambda p: record(p, 1, "flags", RAW)), "bad_record"),
        "dynamic": (edited(sdp4bit_parts, lambda p: grow(p, 1, 1)), "bad_record"),
        "info": (edited(sdp4bit_parts, lambda p: record(p, 0, "info", 1)), "bad_record"),
    }
    for name, data in wrong.items():
        vectors[name] = changed(sdp4bit_parts(), params=data), "bad_header"

    def with_bytes(chunk: int, at: int, new: bytes, **params: Any) -> bytes:
        return edited(lambda: sdp4bit_parts(**params), lambda p: put(p, chunk, at, new))

    word = struct.Struct("<f").pack
    vectors |= {
        name: (with_bytes(chunk, 512 + at, new), "bad_payload")
        for name, chunk, at, new in (
            ("scale_zero", 0, 0, bytes(4)),
            ("scale_negative", 1, 4, word(-1.0)),
            ("scale_infinite", 1, 28, word(math.inf)),
            ("scale_other_nan", 0, 8, b"\1\0\xc0\x7f"),
            ("scale_too_small", 0, 28, word(2.0**-108)),
            ("scale_too_large", 0, 4, word(2.0**127)),
        )
    }
    vectors |= {
        "minus_8_low": (with_bytes(0, 7, b"\x18"), "bad_payload"),
        "minus_8_high": (with_bytes(1, 499, b"\x81"), "bad_payload"),
        "minus_128": (with_bytes(1, 999, b"\x80", bits=8), "bad_payload"),
        "code_of_lost_group": (with_bytes(0, 150, b"\x10"), "bad_payload"),
        "tail": (with_bytes(0, 500, b"\x11"), "bad_payload"),
        "padding_of_payload": (with_bytes(1, 500, b"\1"), "reserved_not_zero"),
        "padding_of_scales": (with_bytes(0, 512 + 32, b"\1"), "reserved_not_zero"),
    }
    return {f"sdp4bit_{name}": vector for name, vector in vectors.items()}


def tahquant_parts(**params: Any) -> Parts:
    """Two chunks of 7 tokens of 144 elements, 3 tiles each, the last one short; one is narrow.

    In a chunk of 21 tiles, words lie at 768, pivots at 852 to 873, the index is at 896.
    """
    x = activations(144, "bfloat16", (14, 144))
    return Parts.of(tw.codec("tahquant", **params).encode(x, chunks=2, backend="ref"))


def tahquant_invalid() -> Invalid:
    """Step 9 of "Reading" for tahquant, and tahquant.md, "Checks"."""
    make = tahquant_parts
    params, index = make().header.params, make().static[0][896]
    free = (index ^ 0x7F) & -(index ^ 0x7F)

    def with_bytes(chunk: int, at: int, new: bytes, **params: Any) -> bytes:
        return edited(lambda: make(**params), lambda p: put(p, chunk, at, new))

    wrong = {
        "no_parameters": b"",
        "8_byte_parameters": params[:8],
        "direction_2": poked(params, 0, b"\2"),
        "other_direction": poked(params, 0, b"\1"),
        "parameters_reserved": poked(params, 1, b"\1"),
        "parameters_end": poked(params, 7, b"\1"),
        "hidden_0": params[:8] + bytes(8),
        "hidden_2_63": params[:8] + (1 << 63).to_bytes(8, "little"),
        "hidden_1": params[:8] + (1).to_bytes(8, "little"),
        "hidden_64": params[:8] + (64).to_bytes(8, "little"),
    }
    headers = {name: (changed(make(), params=bad), "bad_header") for name, bad in wrong.items()}
    headers |= {
        "version_2": (changed(make(), codec_version=2), "unsupported_version"),
        "of_float64": (changed(make(), dtype=BY_NAME["float64"]), "bad_header"),
        "sections_swapped": (sectioned(make(), 0, 2, 1), "bad_header"),
        "no_index_section": (sectioned(make(), 0, 1), "bad_header"),
        "dynamic_stride": (changed(make(), dynamic_stride=ALIGN), "bad_header"),
        "raw_flag": (edited(make, lambda p: record(p, 0, "flags", RAW)), "bad_record"),
        "dynamic_bytes": (edited(make, lambda p: grow(p, 1, 1)), "bad_record"),
    }
    bad = {
        "no_narrow_token": with_bytes(0, 896, b"\0"),
        "two_narrow_tokens": with_bytes(0, 896, bytes([index | free])),
        "narrow_token_behind_the_last": with_bytes(1, 896, b"\x80"),
        "least_infinite": with_bytes(0, 768, b"\0\x7c\0\x3c"),
        "least_nan": with_bytes(0, 772, b"\0\x7e\0\x3c"),
        "least_minus_infinity": with_bytes(1, 768 + 80, b"\0\xfc\0\x3c"),
        "step_infinite": with_bytes(0, 768, b"\0\0\0\x7c"),
        "step_negative": with_bytes(1, 780, b"\0\0\0\x80"),
        "step_lost": with_bytes(0, 768, b"\0\0\0\x7e"),
        "backward_step_nan": with_bytes(0, 896, b"\0\0\1\x7c", direction="backward"),
        "pivot_1": with_bytes(0, 852, b"\1"),
        "pivot_64": with_bytes(0, 860, b"\x40"),
        "pivot_192": with_bytes(1, 872, b"\xc0"),
    }
    padding = {
        "padding_of_payload": with_bytes(0, 8 * (4 * 21 - 3), b"\1"),
        "padding_of_scales": with_bytes(1, 873, b"\x80"),
        "padding_of_index": with_bytes(1, 897, b"\1"),
    }
    found = headers
    found |= {name: (data, "bad_payload") for name, data in bad.items()}
    found |= {name: (data, "reserved_not_zero") for name, data in padding.items()}
    return {f"tahquant_{name}": pair for name, pair in found.items()}


def dynamiq_parts(**params: Any) -> Parts:
    """Two chunks of 1501 and 1500 elements, 6 super-groups each; number 2 of chunk 0 is lost.

    Payload has 832 bytes in use of 896, scales 108 at 896, the index 3 at 1024.
    """
    x = scaled_super_groups(172, "bfloat16", 3001)
    bits_of(x)[600] = 0x7F80
    codec = tw.codec("dynamiq", **params)
    return Parts.of(codec.encode(x, chunks=2, key=TACO_KEY, backend="ref"))


def dynamiq_invalid() -> Invalid:
    """Step 9 of "Reading" for dynamiq, and dynamiq.md, "Checks"."""
    make = dynamiq_parts
    params = make().header.params

    def with_bytes(chunk: int, at: int, new: bytes, **params: Any) -> bytes:
        return edited(lambda: make(**params), lambda p: put(p, chunk, at, new))

    wrong = {
        "no_parameters": b"",
        "16_byte_parameters": params + bytes(8),
        "budget_47": poked(params, 0, b"\x2f"),
        "budget_129": poked(params, 0, b"\x81"),
        "other_budget": poked(params, 0, b"\x60"),
        "group_4": poked(params, 1, b"\2"),
        "group_128": poked(params, 1, b"\7"),
        "super_group_64": poked(params, 2, b"\6"),
        "super_group_2_255": poked(params, 2, b"\xff"),
        "widths_3": poked(params, 3, b"\3"),
        "grid_3": poked(params, 4, b"\3"),
        "scales_3": poked(params, 5, b"\3"),
        "rounding_3": poked(params, 6, b"\3"),
        "center_2": poked(params, 7, b"\2"),
        "budget_too_small": poked(poked(params, 0, b"\x30"), 1, b"\3"),
    }
    headers = {name: (changed(make(), params=bad), "bad_header") for name, bad in wrong.items()}
    headers |= {
        "version_2": (changed(make(), codec_version=2), "unsupported_version"),
        "of_float64": (changed(make(), dtype=BY_NAME["float64"]), "bad_header"),
        "sections_swapped": (sectioned(make(), 0, 2, 1), "bad_header"),
        "no_index_section": (sectioned(make(), 0, 1), "bad_header"),
        "dynamic_stride": (changed(make(), dynamic_stride=ALIGN), "bad_header"),
        "raw_flag": (edited(make, lambda p: record(p, 0, "flags", RAW)), "bad_record"),
        "dynamic_bytes": (edited(make, lambda p: grow(p, 1, 1)), "bad_record"),
    }
    fixed, pow2, wide = {"widths": "fixed"}, {"widths": "pow2"}, {"scales": "wide", "group": 64}
    bad = {
        "width_0": with_bytes(0, 1024, b"\x20"),
        "width_1": with_bytes(0, 1024, b"\x21"),
        "width_9": with_bytes(1, 1026, b"\x92"),
        "widths_above_the_budget": with_bytes(0, 1024, b"\x88\x88\x88"),
        "width_5_pow2": with_bytes(0, 1024, b"\x25\x22\x22", **pow2),
        "width_2_fixed": with_bytes(0, 1024, b"\x24\x44\x44", **fixed),
        "rows_without_a_use": with_bytes(0, 1024, b"\x22\x22\x22"),
        "row_behind_fixed": with_bytes(0, 6 * 4 * 32, b"\1", **fixed),
        "scale_infinite": with_bytes(0, 896, b"\x80\x7f"),
        "scale_other_nan": with_bytes(0, 900, b"\xc1\x7f"),
        "scale_negative": with_bytes(1, 898, b"\x80\xbf"),
        "scale_minus_zero": with_bytes(1, 898, b"\0\x80"),
        "scale_too_small": with_bytes(1, 906, b"\x7f\x0d"),
        "mean_infinite": with_bytes(0, 896 + 12, b"\x80\x7f", center=True),
        "mean_nan": with_bytes(0, 896 + 16, b"\xc0\xff", center=True),
        "part_of_wide_lost": with_bytes(0, 896, b"\xc0\x7f", **wide),
    }
    padding = {
        "padding_of_payload": with_bytes(0, 26 * 32, b"\1"),
        "padding_of_scales": with_bytes(1, 896 + 108, b"\x80"),
        "padding_of_index": with_bytes(1, 1024 + 3, b"\1"),
    }
    found = headers
    found |= {name: (data, "bad_payload") for name, data in bad.items()}
    found |= {name: (data, "reserved_not_zero") for name, data in padding.items()}
    return {f"dynamiq_{name}": pair for name, pair in found.items()}


def lhc_parts(nelem: int = 3 * 1024 + 3, **params: Any) -> Parts:
    """A chunk of 4 rows and a sketch of one row: cells to 4096, index to 4481, padding to 4608."""
    x = np.zeros(nelem, np.float32)
    x[:5] = 1, 2, 3, 4, 5
    return Parts.of(tw.codec("lhc", **params).encode(x, backend="ref"))


def lhc_invalid() -> Invalid:
    """Step 9 of "Reading" for lhc, and lhc.md, "Checks"."""
    make = lhc_parts
    params = make().header.params

    def with_bytes(at: int, new: bytes, **params: Any) -> bytes:
        return edited(lambda: make(**params), lambda p: put(p, 0, at, new))

    wrong = {
        "no_parameters": b"",
        "16_byte_parameters": params + bytes(8),
        "ratio_1": struct.pack("<IBBH", 1000, 0, 0, 0),
        "ratio_1001": struct.pack("<IBBH", 1000001, 0, 0, 0),
        "other_ratio": struct.pack("<IBBH", 2000, 0, 0, 0),
        "cells_4": poked(params, 4, b"\4"),
        "other_cells": poked(params, 4, b"\2"),
        "mapping_2": poked(params, 5, b"\2"),
        "parameters_reserved": poked(params, 6, b"\1"),
        "parameters_end": poked(params, 7, b"\1"),
    }
    headers = {name: (changed(make(), params=bad), "bad_header") for name, bad in wrong.items()}
    headers |= {
        "version_2": (changed(make(), codec_version=2), "unsupported_version"),
        "of_float64": (changed(make(), dtype=BY_NAME["float64"]), "bad_header"),
        "gains_nothing": (changed(make(), shape=(1024,)), "bad_header"),
        "sections_swapped": (sectioned(make(), 1, 0), "bad_header"),
        "no_index_section": (sectioned(make(), 0), "bad_header"),
        "dynamic_stride": (changed(make(), dynamic_stride=ALIGN), "bad_header"),
        "raw_flag": (edited(make, lambda p: record(p, 0, "flags", RAW)), "bad_record"),
        "dynamic_bytes": (edited(make, lambda p: grow(p, 0, 1)), "bad_record"),
    }
    # The five cells are 222 to 226, their elements' first.
    bad = {
        "cell_of_nobody": with_bytes(4 * 221, b"\1"),
        "minus_zero_of_nobody": with_bytes(4 * 227 + 3, b"\x80"),
        "second_cell": with_bytes(4 * 813, b"\0\0\x80\x3f"),
        "element_missing_in_index": with_bytes(4096, b"\x1e"),
        "index_behind_the_end": with_bytes(4096 + 384, b"\x08"),
    }
    found = headers | {name: (data, "bad_payload") for name, data in bad.items()}
    found["padding_of_index"] = with_bytes(4096 + 385, b"\1"), "reserved_not_zero"
    return {f"lhc_{name}": pair for name, pair in found.items()}


def thc_parts(**params: Any) -> Parts:
    """Two blocks, the second of which is lost.

    Of 8-bit cells 2048 bytes, the count at 2048, seed and norms at 2176 and 2192.
    """
    x = bell(221, "float32", 1250)
    x[-1] = np.inf
    codec = tw.codec("thc", **params)
    return Parts.of(codec.encode(x, key=TACO_KEY, backend="ref"))


def thc_invalid() -> Invalid:
    """Step 9 of "Reading" for thc, and thc.md, "Checks"."""
    make = thc_parts
    params = make().header.params

    def with_bytes(at: int, new: bytes, **params: Any) -> bytes:
        return edited(lambda: make(**params), lambda p: put(p, 0, at, new))

    wrong = {
        "no_parameters": b"",
        "16_byte_parameters": params + bytes(8),
        "bits_12": poked(params, 0, b"\x0c"),
        "other_bits": poked(params, 0, b"\x10"),
        "norm_2": poked(params, 1, b"\2"),
        "parameters_reserved": poked(params, 2, b"\1"),
        "parameters_end": poked(params, 7, b"\1"),
    }
    headers = {name: (changed(make(), params=bad), "bad_header") for name, bad in wrong.items()}
    headers |= {
        "version_2": (changed(make(), codec_version=2), "unsupported_version"),
        "of_float64": (changed(make(), dtype=BY_NAME["float64"]), "bad_header"),
        "gains_nothing": (changed(make(), shape=(300,)), "bad_header"),
        "sections_swapped": (sectioned(make(), 1, 0), "bad_header"),
        "no_scales_section": (sectioned(make(), 0), "bad_header"),
        "dynamic_stride": (changed(make(), dynamic_stride=ALIGN), "bad_header"),
        "raw_flag": (edited(make, lambda p: record(p, 0, "flags", RAW)), "bad_record"),
        "dynamic_bytes": (edited(make, lambda p: grow(p, 0, 1)), "bad_record"),
    }
    wide = {"bits": 16, "norm": "tensor"}
    bad = {
        "no_ranks": with_bytes(2048, b"\0"),
        "9_ranks": with_bytes(2048, b"\x09"),
        "2185_ranks": with_bytes(4096, b"\x89\x08", **wide),
        "cell_31": with_bytes(1023, b"\x1f"),
        "cell_of_lost_block": with_bytes(2047, b"\1"),
        "cell_of_lost_tensor": with_bytes(4095, b"\1", **wide),
        "norm_infinite": with_bytes(2192, b"\0\0\x80\x7f"),
        "norm_other_nan": with_bytes(2196, b"\1\0\xc0\x7f"),
        "norm_negative": with_bytes(2192 + 3, b"\xbf"),
        "norm_minus_zero": with_bytes(2192, b"\0\0\0\x80"),
        "norm_too_small": with_bytes(2192, b"\xff\xff\x7f\x12"),
        "cells_of_a_zero_norm": with_bytes(2192, bytes(4)),
    }
    padding = {
        "padding_behind_the_count": with_bytes(2049, b"\1"),
        "padding_of_seed": with_bytes(2176 + 12, b"\1"),
        "padding_of_norms": with_bytes(2200, b"\1"),
    }
    found = headers
    found |= {name: (data, "bad_payload") for name, data in bad.items()}
    found |= {name: (data, "reserved_not_zero") for name, data in padding.items()}
    return {f"thc_{name}": pair for name, pair in found.items()}


def omnireduce_parts(**params: Any) -> Parts:
    """Two chunks of 12 blocks, the last one of 46 elements, with 6 slots each.

    Cells to 768, the index to 770. Chunk 0 keeps blocks 3 and 11, chunk 1 block 0, whose elements
    lie in the same block of the tensor as the last of chunk 0, and which is all zeros.
    """
    x = np.zeros(1500, np.float32)
    x[[200, 749]] = 1, 2
    codec = tw.codec("omnireduce", block=64, **params)
    return Parts.of(codec.encode(x, chunks=2, backend="ref"))


def omnireduce_invalid() -> Invalid:
    """Step 9 of "Reading" for omnireduce, and omnireduce.md, "Checks"."""
    make = omnireduce_parts
    params = make().header.params

    def with_bytes(chunk: int, at: int, new: bytes) -> bytes:
        return edited(make, lambda p: put(p, chunk, at, new))

    wrong = {
        "no_parameters": b"",
        "16_byte_parameters": params + bytes(8),
        "budget_0": poked(params, 0, b"\0"),
        "budget_513": poked(params, 0, b"\1\2"),
        "other_budget": poked(params, 0, b"\x40"),
        "block_32": poked(params, 2, b"\5"),
        "block_8192": poked(params, 2, b"\x0d"),
        "values_3": poked(params, 3, b"\3"),
        "parameters_reserved": poked(params, 4, b"\1"),
    }
    headers = {name: (changed(make(), params=bad), "bad_header") for name, bad in wrong.items()}
    headers |= {
        "version_2": (changed(make(), codec_version=2), "unsupported_version"),
        "of_float64": (changed(make(), dtype=BY_NAME["float64"]), "bad_header"),
        "gains_nothing": (changed(make(), shape=(20,)), "bad_header"),
        "sections_swapped": (sectioned(make(), 1, 0), "bad_header"),
        "no_index_section": (sectioned(make(), 0), "bad_header"),
        "dynamic_stride": (changed(make(), dynamic_stride=ALIGN), "bad_header"),
        "raw_flag": (edited(make, lambda p: record(p, 0, "flags", RAW)), "bad_record"),
        "dynamic_bytes": (edited(make, lambda p: grow(p, 0, 1)), "bad_record"),
    }
    bad = {
        "cell_behind_the_end": with_bytes(0, 2 * (64 + 46), b"\1"),
        "cell_of_no_block": with_bytes(1, 2 * 64, b"\1"),
        "minus_zero_of_no_block": with_bytes(1, 767, b"\x80"),
        "index_behind_the_end": with_bytes(1, 769, b"\x10"),
        "7_blocks": with_bytes(1, 768, b"\x7f"),
    }
    found = headers | {name: (data, "bad_payload") for name, data in bad.items()}
    found["padding_of_index"] = with_bytes(0, 770, b"\1"), "reserved_not_zero"
    return {f"omnireduce_{name}": pair for name, pair in found.items()}


def all_invalid() -> Invalid:
    """Every invalid buffer with its reason."""
    return (
        header_vectors()
        | zipccl_header_vectors()
        | record_vectors()
        | payload_vectors()
        | order_vectors()
        | mx_invalid()
        | nvfp4_invalid()
        | taco_invalid()
        | sdp4bit_invalid()
        | tahquant_invalid()
        | dynamiq_invalid()
        | lhc_invalid()
        | thc_invalid()
        | omnireduce_invalid()
    )


def all_files() -> dict[str, bytes]:
    """Every file but reasons.json, by its path in the folder."""
    files = {}
    for vectors in (
        raw_vectors,
        zipccl_vectors,
        mx_vectors,
        nvfp4_vectors,
        taco_vectors,
        sdp4bit_vectors,
        tahquant_vectors,
        dynamiq_vectors,
        lhc_vectors,
        thc_vectors,
        omnireduce_vectors,
        taco_rules,
        sdp4bit_rules,
        tahquant_rules,
        dynamiq_rules,
        thc_rules,
        omnireduce_rules,
        lhc_rules,
    ):
        for name, buffer, tensor, *given in vectors():
            files[f"{name}.tw"], files[f"{name}.bin"] = buffer, tensor
            files |= {f"{name}.input": data for data in given}
    return files | {f"invalid/{name}.tw": data for name, (data, _) in all_invalid().items()}


def write(folder: Path) -> int:
    """Write what is not there yet; the number of files that differ from what they should be."""
    changed_files = 0
    for name, data in all_files().items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"wrote {name}")
        elif path.read_bytes() == data:
            print(f"kept {name}")
        else:
            print(f"DIFFERENT, kept {name}")
            changed_files += 1

    path = folder / "invalid" / "reasons.json"
    reasons = {name: reason for name, (_, reason) in sorted(all_invalid().items())}
    old = json.loads(path.read_text()) if path.exists() else {}
    if old.items() <= reasons.items():
        print("wrote invalid/reasons.json" if old != reasons else "kept invalid/reasons.json")
        path.write_text(json.dumps(reasons, indent=1) + "\n")
    else:
        print("DIFFERENT, kept invalid/reasons.json")
        changed_files += 1
    return changed_files


def main() -> int:
    """Write the vectors."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "vectors"
    return 1 if write(folder) else 0


if __name__ == "__main__":
    sys.exit(main())
