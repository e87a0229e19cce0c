# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""nvfp4 on a GPU: a pass for the tensor's largest magnitude unless it is given, then as mx.

Numbers in the kernels are those of the element types: e2m1 has codes of 4 bits, a mantissa of 1 and
bias 1, e4m3 a mantissa of 3, bias 7 and the largest code 126.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from ..formats.dtypes import DType
from .base import CodecSpec, Plan
from .device import (
    HEADER_WORDS,
    Variant,
    add_header,
    clear,
    header_word,
    header_words,
    kernel,
    options,
    record_term,
    store_element,
    touched,
    weigh,
    weigh_bytes,
)
from .minifloat import INFINITY, NAN, WIDENED
from .minifloat_triton import (
    aligned_for,
    check_chunks,
    elements_at,
    narrow,
    round_codes,
    round_part,
    store_words,
    unpack,
    widen,
)
from .nvfp4 import BLOCK, ELEMENT, NAN_SCALE, NO_RECIPROCAL, RANGE, SCALES_HEAD, SIXTH

#: Blocks of a tile, one program's share.
_BLOCKS = tl.constexpr(128)
_BLOCK = tl.constexpr(BLOCK)
_HEAD = tl.constexpr(SCALES_HEAD)
_INFINITY = tl.constexpr(INFINITY)
_NAN = tl.constexpr(NAN)
_FLT_MAX = tl.constexpr(float.fromhex("0x1.fffffep127"))
_RANGE, _SIXTH = tl.constexpr(float(RANGE)), tl.constexpr(float(SIXTH))
_NO_RECIPROCAL = tl.constexpr(float(NO_RECIPROCAL))
_NAN_SCALE = tl.constexpr(NAN_SCALE)
_OPTIONS = options(num_warps=4)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _indices(block):
    """Elements of the blocks from `block` on, shape (blocks, words, codes)."""
    i = tl.arange(0, _BLOCKS)[:, None, None] * _BLOCK + tl.arange(0, 8)[None, None, :]
    return block * _BLOCK + (i + tl.arange(0, 2)[None, :, None] * 8)


@triton.jit
def _value(codes):
    """float32 values of e4m3 codes; those of NaN are NaN."""
    magnitudes = codes & 127
    below = magnitudes.to(tl.float32) * 0.001953125
    above = _float((magnitudes << 20) + (120 << 23))
    bits = tl.where(magnitudes < 8, below, above).to(tl.int32, bitcast=True)
    bits = tl.where(magnitudes == 127, _NAN, bits | ((codes & 128) << 24))
    return _float(bits)


@kernel
def _measure_kernel(
    x_ptr,
    stats_ptr,
    nelem: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The largest finite magnitude of one tile, as float32 bits, into `stats_ptr`."""
    first = tl.program_id(0).to(tl.int64) * 8192
    x = elements_at(x_ptr, ITEM)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    i = first + tl.arange(0, 8192)
    if first + 8192 <= nelem:
        v = tl.load(x + i)
    else:
        v = tl.load(x + i, mask=i < nelem, other=0)
    magnitudes = widen(v, EXP, ITEM) & 0x7FFFFFFF
    largest = tl.max(tl.where(magnitudes < _INFINITY, magnitudes, 0), 0)
    tl.atomic_max(stats_ptr, largest.to(tl.int64), sem="relaxed")


@triton.jit
def _encode_tile(
    x,
    payload,
    scales_ptr,
    scales_at,
    g,
    block,
    n,
    words,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode blocks from `block` on of a chunk of `n` elements; gives the checksum terms."""
    i = _indices(block)
    if MASKED:
        v = tl.load(x + i, mask=i < n, other=0)
    else:
        v = tl.load(x + i)
    values = widen(v, EXP, ITEM)
    tops = tl.max(tl.max(values & 0x7FFFFFFF, 2), 1)
    special = tops >= _INFINITY
    wanted = _float(tl.where(special, 0, tops)) * (g * _SIXTH)
    scales = round_part(wanted.to(tl.int32, bitcast=True), 3, 121 << 23)
    scales = tl.minimum(scales, 126)
    steps = tl.div_rn(_value(scales), tl.zeros([_BLOCKS], tl.float32) + g)
    none = steps <= _NO_RECIPROCAL
    ones = tl.full([_BLOCKS], 1.0, tl.float32)
    factors = tl.where(none, _FLT_MAX, tl.div_rn(ones, tl.where(none, 1.0, steps)))
    values = tl.where(special[:, None, None], 0, values)
    scaled = _float(values) * factors[:, None, None]
    scaled = tl.minimum(tl.maximum(scaled, -6.0), 6.0).to(tl.int32, bitcast=True)
    # The limits leave zeros as they are, but which zero is left to the hardware.
    scaled = (scaled & 0x7FFFFFFF) | (values & -2147483648)
    one = tl.full([1, 1, 1], 127, tl.int32)
    codes = round_codes(scaled, one, 4, 1, 1, 7, False)
    total = store_words(payload, codes, block, words, _BLOCKS, 2, 4, MASKED)
    scales = tl.where(special, _NAN_SCALE, scales)
    at = block + tl.arange(0, _BLOCKS)
    if MASKED:
        tl.store(scales_ptr + at, scales.to(tl.uint8), mask=at * _BLOCK < n)
        scales = tl.where(at * _BLOCK < n, scales, 0)
    else:
        tl.store(scales_ptr + at, scales.to(tl.uint8))
    return total + tl.sum(weigh_bytes(scales, scales_at + at), 0)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    stats_ptr,
    h0: tl.uint64,
    h1: tl.uint64,
    h2: tl.uint64,
    h3: tl.uint64,
    h4: tl.uint64,
    h5: tl.uint64,
    h6: tl.uint64,
    h7: tl.uint64,
    h8: tl.uint64,
    h9: tl.uint64,
    h10: tl.uint64,
    h11: tl.uint64,
    identity: tl.uint64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Encode one tile of one chunk. Header and records were cleared before."""
    pid = tl.program_id(0)
    chunk = pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    x = elements_at(x_ptr, ITEM) + first
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    codes_at = scales_at * 128 + _HEAD
    scales_ptr = static_ptr + codes_at
    block = tile.to(tl.int64) * _BLOCKS
    words = (n + 7) // 8
    largest = tl.minimum(tl.maximum(tl.load(stats_ptr), 0), _INFINITY - 1).to(tl.int32)
    divisor = _float(tl.where(largest == 0, 0x3F800000, largest))
    g = tl.minimum(tl.div_rn(divisor * 0 + _RANGE, divisor), _FLT_MAX)
    g = tl.where(largest == 0, 1.0, g)
    # fmt: off
    if (block + _BLOCKS) * _BLOCK <= n:
        total = _encode_tile(
            x, payload, scales_ptr, codes_at, g, block, n, words, EXP, ITEM, False
        )
    else:
        total = _encode_tile(
            x, payload, scales_ptr, codes_at, g, block, n, words, EXP, ITEM, True
        )
    # fmt: on
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if tile == tiles - 1:
        clear(static_ptr, words * 4, scales_at * 128, tile * 0, tile * 0 + 1)
        j = tl.arange(0, 4)
        g_bits = tl.where(j == 0, g.to(tl.uint32, bitcast=True), tl.zeros([4], tl.uint32))
        tl.store(payload + scales_at * 32 + j, g_bits)
        total += tl.sum(weigh(g_bits, scales_at * 32 + j), 0)
        scales_end = codes_at + (n + _BLOCK - 1) // _BLOCK
        clear(static_ptr, scales_end, static_stride * 128, tile * 0, tile * 0 + 1)
        tl.store(record + 2, chunk.to(tl.int64) << 32)
        total += identity + record_term(n, n * 0, chunk * 0, chunk)
        if chunk == 0:
            k = tl.arange(0, 16)
            w = header_word(k, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
            tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + k, w, mask=k < tl.minimum(head, 12))
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _decode_tile(
    payload,
    scales_ptr,
    scales_at,
    g,
    out_ptr,
    at,
    lo,
    hi,
    block,
    n,
    words,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode blocks from `block` on; gives the checksum terms.

    Element i of the chunk goes to `at + i` if it is in [lo, hi).
    """
    codes, total = unpack(payload, block, words, _BLOCKS, 2, 4, MASKED)
    rows = block + tl.arange(0, _BLOCKS)
    if MASKED:
        scales = tl.load(scales_ptr + rows, mask=rows * _BLOCK < n, other=0).to(tl.int32)
    else:
        scales = tl.load(scales_ptr + rows).to(tl.int32)
    total += tl.sum(weigh_bytes(scales, scales_at + rows), 0)
    if STORE:
        steps = tl.div_rn(_value(scales), tl.zeros([_BLOCKS], tl.float32) + g)
        magnitudes = codes & 7
        above = _float((magnitudes << 22) + (126 << 23))
        values = tl.where(magnitudes < 2, magnitudes.to(tl.float32) * 0.5, above)
        values = _float(values.to(tl.int32, bitcast=True) | ((codes & 8) << 28))
        bits = narrow(values * steps[:, None, None], EXP, ITEM)
        i = _indices(block)
        if MASKED:
            store_element(out_ptr, at + i, bits, (i >= lo) & (i < hi), EXP, ITEM, ADD)
        else:
            store_element(out_ptr, at + i, bits, None, EXP, ITEM, ADD)
    return total


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk."""
    pid = tl.program_id(0)
    chunk = first_chunk + pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    codes_at = scales_at * 128 + _HEAD
    scales_ptr = static_ptr + codes_at
    g = tl.load((payload + scales_at * 32).to(tl.pointer_type(tl.float32)))
    # A damaged one is reported by the check; what is decoded with it has no meaning.
    g = tl.where(g > 0, g, 1.0)
    block = tile.to(tl.int64) * _BLOCKS
    words = (n + 7) // 8
    at = first - start
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    # fmt: off
    if (block * _BLOCK >= lo) & ((block + _BLOCKS) * _BLOCK <= hi):
        total = _decode_tile(
            payload, scales_ptr, codes_at, g, out_ptr, at, lo, hi, block, n, words, EXP, ITEM,
            ADD, STORE, False,
        )
    else:
        total = _decode_tile(
            payload, scales_ptr, codes_at, g, out_ptr, at, lo, hi, block, n, words, EXP, ITEM,
            ADD, STORE, True,
        )
    # fmt: on
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


def supports(dtype: DType) -> bool:
    """True for the dtypes that nvfp4 takes."""
    return dtype.name in WIDENED


@functools.cache
def _measure_variant(dtype: DType, aligned: bool) -> Variant:
    return Variant(
        _measure_kernel, _OPTIONS, EXP=dtype.exponent, ITEM=dtype.itemsize, ALIGNED=aligned
    )


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """As `Nvfp4.measure`, int64, shape (1,), on the device of `x`."""
    stats = torch.zeros(1, dtype=torch.int64, device=x.device)
    if x.numel():
        variant = _measure_variant(dtype, x.data_ptr() % 16 == 0)
        variant.launch(-(-x.numel() // 8192), (x, stats), x.numel())
    return stats


@functools.cache
def _encode_variant(dtype: DType, aligned: bool, sums: bool) -> Variant:
    chosen = {"EXP": dtype.exponent, "ITEM": dtype.itemsize, "ALIGNED": aligned}
    return Variant(_encode_kernel, _OPTIONS, **chosen, SUMS=sums)


@functools.cache
def _decode_variant(dtype: DType, aligned: bool, add: int, store: bool, sums: bool) -> Variant:
    chosen = {"EXP": dtype.exponent, "ITEM": dtype.itemsize, "ALIGNED": aligned}
    return Variant(_decode_kernel, _OPTIONS, **chosen, ADD=add, STORE=store, SUMS=sums)


def _tiles(plan: Plan) -> int:
    tile = BLOCK * int(_BLOCKS.value)
    return max(1, -(-plan.chunk_nelem // tile))


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """See `zipccl_triton.encode`."""
    if stats is None:
        stats = measure(plan.codec, plan.dtype, x)
    tiles = _tiles(plan)
    out[: plan.static_offset].zero_()
    header = header_words(plan)
    _encode_variant(plan.dtype, aligned_for(plan, x), plan.checksum).launch(
        tiles * plan.chunks,
        (x, out, stats.to(torch.int64)),
        *header[:HEADER_WORDS],
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem,
        plan.chunk_nelem,
        tiles,
        plan.header.nbytes // 8,
        plan.static_offset // 128,
        plan.static_stride // 128,
        plan.layout.sections[0].nbytes // 128,
    )
    add_header(plan, out, header)


def decode(
    plan: Plan,
    src,
    out,
    scratch,
    status,
    *,
    start: int = 0,
    stop: int | None = None,
    check: bool = True,
    dynamic_starts=None,
    store: bool = True,
    add: bool = False,
    planned: bool = True,
) -> None:
    """See `zipccl_triton.decode`."""
    stop = plan.nelem if stop is None else stop
    tiles = _tiles(plan)
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    if start < stop and (store or sums):
        adding = out.element_size() if add else 0
        even = aligned_for(plan, out, start)
        _decode_variant(plan.dtype, even, adding, store, sums).launch(
            tiles * (end - first),
            (src, out, scratch),
            start,
            stop,
            first,
            plan.nelem,
            plan.chunk_nelem,
            tiles,
            plan.static_offset // 128,
            plan.static_stride // 128,
            plan.layout.sections[0].nbytes // 128,
        )
    check_chunks(
        plan,
        src,
        scratch,
        status,
        start,
        stop,
        check,
        sums,
        planned,
        ELEMENT.bits,
        BLOCK,
        SCALES_HEAD,
    )
