# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""blocks8 on a GPU: two threads share a block."""

import triton
import triton.language as tl

from tightwire.codecs.common.columns_triton import to_columns
from tightwire.codecs.common.driver_triton import Driver, Tiling, functions, many_functions
from tightwire.codecs.common.frame_triton import weigh, weigh_bytes
from tightwire.codecs.common.runs_triton import in_rows, lanes
from tightwire.codecs.common.tiles_triton import Format, no_scale

_ANCHOR = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _places(t, L: tl.constexpr):
    """Where a tile's elements are in their chunk, shape [rows, 32], and its blocks."""
    row = t.tile * L.rows + lanes(L.rows)
    block = t.tile * (L.rows // 2) + tl.arange(0, L.rows // 2)
    return row[:, None] * 32 + tl.arange(0, 32)[None, :], block


@triton.jit
def _each(x, L: tl.constexpr):
    """Values of blocks for their elements."""
    blocks: tl.constexpr = L.rows // 2
    return tl.reshape(tl.broadcast_to(x[:, None], [blocks, 2]), [L.rows])[:, None]


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    x = in_rows(v)
    i, block = _places(t, L)
    top = tl.max(tl.reshape(tl.abs(x), [L.rows // 2, 64]), 1)
    scales = tl.where(top > 0, tl.div_rn(top, top * 0 + 127.0), 1.0)
    codes = (tl.div_rn(x, x * 0 + _each(scales, L)) + _ANCHOR) - _ANCHOR
    codes = codes.to(tl.int32).to(tl.uint8)
    tl.store(t.static_ptr + i, codes, mask=i < t.n)
    words = scales.to(tl.uint32, bitcast=True)
    at = t.at * 32 + block
    own = block * 64 < t.n
    tl.store(t.static_ptr.to(tl.pointer_type(tl.uint32)) + at, words, mask=own)
    total = tl.sum(tl.sum(tl.where(i < t.n, weigh_bytes(codes, i), 0), 1), 0)
    return total + tl.sum(tl.where(own, weigh(words, at), 0), 0)


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    i, block = _places(t, L)
    codes = tl.load(t.static_ptr + i, mask=i < t.n, other=0)
    at = t.at * 32 + block
    ptr = t.static_ptr.to(tl.pointer_type(tl.uint32)) + at
    words = tl.load(ptr, mask=block * 64 < t.n, other=0)
    wrong = (codes == 128) & (i >= lo) & (i < hi)
    bad = (words - 1 >= 0x7F7FFFFF) & (block * 64 < hi) & (block * 64 + 64 > lo)
    wrong |= _each(bad.to(tl.int32), L) != 0
    y = codes.to(tl.int8, bitcast=True).to(tl.float32)
    y *= _each(words.to(tl.float32, bitcast=True), L)
    total = tl.sum(tl.sum(weigh_bytes(codes, i), 1), 0) + tl.sum(weigh(words, at), 0)
    return to_columns(y, L.rows, 32, 5), tl.max(wrong.to(tl.int32), 1) != 0, total


_FORM = Format(run=32, limited=False, pairs=False, checked=True)
_DRIVER = Driver(_pack, _unpack, no_scale, _FORM, (Tiling(128, 4),) * 3)


def driver_of(plan):
    return _DRIVER


encode, decode_add_encode, decode = functions(driver_of)
encode_many, decode_many, sum, encode_sum = many_functions(driver_of)
