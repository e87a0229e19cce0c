# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Blocks of lhc's bitmaps on a GPU, each as eight words of a thread: 256 bits are rotated without
loads, and without exchange between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.minifloat_triton import funnel
from .lhc import BLOCK

_BLOCK_WORDS = tl.constexpr(BLOCK // 32)


@triton.jit
def _half_block(at, use, PTX: tl.constexpr):
    """Four words at pointers, multiples of 16 bytes with PTX; 0 if not `use`."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $5, 0;
            mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
            @p ld.global.v4.u32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            (at.to(tl.int64), use.to(tl.int32)),
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=False,
            pack=1,
        )
    else:
        return (
            tl.load(at, mask=use, other=0),
            tl.load(at + 1, mask=use, other=0),
            tl.load(at + 2, mask=use, other=0),
            tl.load(at + 3, mask=use, other=0),
        )


@triton.jit
def block_at(at, use, PTX: tl.constexpr):
    """The eight words of blocks at pointers."""
    return _half_block(at, use, PTX) + _half_block(at + 4, use, PTX)


@triton.jit
def _store_half(at, a, b, c, d, use, PTX: tl.constexpr):
    """Store four words at pointers; see `_half_block`."""
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $6, 0;
            @p st.global.v4.u32 [$1], {$2, $3, $4, $5};
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r,r,r",
            (at.to(tl.int64), a, b, c, d, use.to(tl.int32)),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(at, a, mask=use)
        tl.store(at + 1, b, mask=use)
        tl.store(at + 2, c, mask=use)
        tl.store(at + 3, d, mask=use)


@triton.jit
def store_block(at, words, use, PTX: tl.constexpr):
    """Store the eight words of blocks at pointers."""
    _store_half(at, words[0], words[1], words[2], words[3], use, PTX)
    _store_half(at + 4, words[4], words[5], words[6], words[7], use, PTX)


@triton.jit
def rotated_at(bitmap, block, by, use, PTX: tl.constexpr):
    """Words of blocks of a bitmap: bit i is bit (i + `by`) % 256 of the block; 0 if not `use`."""
    return rotate(loaded_at(bitmap, block, by, use, PTX), by, PTX)


@triton.jit
def loaded_at(bitmap, block, by, use, PTX: tl.constexpr):
    """What `rotate` takes: words, those of the other half first if they are rotated by that."""
    half = ((by >> 5) & 4).to(tl.int32)
    at = bitmap + block * _BLOCK_WORDS
    return _half_block(at + half, use, PTX) + _half_block(at + (half ^ 4), use, PTX)


@triton.jit
def rotate(words, by, PTX: tl.constexpr):
    """See `rotated_at`. By itself, so that several loads are under way before the first is used."""
    by = by.to(tl.int32)
    a, b, c, d, e, f, g, h = words
    # By 64 bits, then 32.
    two = (by & 64) != 0
    # fmt: off
    a, c, e, g = tl.where(two, c, a), tl.where(two, e, c), tl.where(two, g, e), tl.where(two, a, g)
    b, d, f, h = tl.where(two, d, b), tl.where(two, f, d), tl.where(two, h, f), tl.where(two, b, h)
    one = (by & 32) != 0
    w0, w1, w2, w3, w4, w5, w6, w7 = (
        tl.where(one, b, a), tl.where(one, c, b), tl.where(one, d, c), tl.where(one, e, d),
        tl.where(one, f, e), tl.where(one, g, f), tl.where(one, h, g), tl.where(one, a, h),
    )
    # fmt: on
    return (
        funnel(w0, w1, by, PTX),
        funnel(w1, w2, by, PTX),
        funnel(w2, w3, by, PTX),
        funnel(w3, w4, by, PTX),
        funnel(w4, w5, by, PTX),
        funnel(w5, w6, by, PTX),
        funnel(w6, w7, by, PTX),
        funnel(w7, w0, by, PTX),
    )


@triton.jit
def union(x, y):
    """Bits of either."""
    return (
        x[0] | y[0],
        x[1] | y[1],
        x[2] | y[2],
        x[3] | y[3],
        x[4] | y[4],
        x[5] | y[5],
        x[6] | y[6],
        x[7] | y[7],
    )


@triton.jit
def common(x, y):
    """Bits of both."""
    return (
        x[0] & y[0],
        x[1] & y[1],
        x[2] & y[2],
        x[3] & y[3],
        x[4] & y[4],
        x[5] & y[5],
        x[6] & y[6],
        x[7] & y[7],
    )


@triton.jit
def inverse(x):
    """Bits that are not set."""
    return ~x[0], ~x[1], ~x[2], ~x[3], ~x[4], ~x[5], ~x[6], ~x[7]


@triton.jit
def any_set(x):
    """Which blocks have a bit."""
    return (x[0] | x[1] | x[2] | x[3] | x[4] | x[5] | x[6] | x[7]) != 0


@triton.jit
def below(x, y, behind):
    """One more bit, higher than those before, of which numbers `x` are below numbers `y`."""
    return union(common(inverse(x), y), common(union(inverse(x), y), behind))
