# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Rounding of floats on a GPU, to elements of tensors and to smaller floats.

Rounding is float arithmetic that is exact but for the one step that rounds: the same everywhere.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .base import Plan
from .frame_triton import float_of
from .launch_triton import PTX
from .minifloat import INFINITY, NAN

MAGNITUDE = tl.constexpr((1 << 31) - 1)
_BINADE = tl.constexpr(INFINITY)
_NAN = tl.constexpr(NAN)


@triton.jit
def by_ptx(ASM: tl.constexpr, REGISTERS: tl.constexpr, args):
    """Words that PTX makes of each element of `args`; see `tl.inline_asm_elementwise`."""
    return tl.inline_asm_elementwise(ASM, REGISTERS, args, dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def funnel(low, high, n, PTX: tl.constexpr):
    """32 bits from bit `n` & 31 of two words on, uint32."""
    if PTX:
        return by_ptx("shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", (low, high, n))
    else:
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        return ((both >> (n & 31).to(tl.uint64)) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def elements_at(ptr, ITEM: tl.constexpr):
    """A pointer to bytes as one to element bits of ITEM bytes."""
    return ptr.to(tl.pointer_type(tl.uint16 if ITEM == 2 else tl.uint32))


@triton.jit
def widen(v, EXP: tl.constexpr, ITEM: tl.constexpr):
    """float32 bits, int32, of element bits."""
    return float_of(v.to(tl.uint32), EXP, ITEM).to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """float32 of bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(value):
    """Bits of float32 values, int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def round_magnitude(value, M: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr):
    """Code without sign of floats that are not negative, to nearest even, as the bits above the
    lowest 23 - M of an integer. LIMIT: the largest value that has a code.
    """
    value = tl.minimum(value, LIMIT)
    binade = tl.maximum(as_bits(value) & _BINADE, (128 - BIAS) << 23)
    # In the binade of `anchor`, neighbouring floats are a step of the code apart.
    anchor = as_float(binade) * (1 << (23 - M))
    rounded = (value + anchor) - anchor
    # Its least normal value becomes float32's, its subnormal ones likewise.
    return as_bits(rounded * (2.0 ** (BIAS - 127)))


@triton.jit
def narrow(value, EXP: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr):
    """Element bits, uint32, nearest to float32 values; every NaN is the quiet, positive one."""
    return tl.where(value != value, nan_bits(EXP, ITEM), narrow_number(value, EXP, ITEM, PTX))


@triton.jit
def nan_bits(EXP: tl.constexpr, ITEM: tl.constexpr):
    """Bits of the quiet, positive NaN of a dtype."""
    return tl.full([], _NAN if ITEM == 4 else (0x7FC0 if EXP == 8 else 0x7E00), tl.uint32)


@triton.jit
def narrow_number(value, EXP: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr):
    """As `narrow`, of values that are not NaN."""
    bits = as_bits(value)
    if ITEM == 4:
        found = bits.to(tl.uint32, bitcast=True)
    elif EXP == 8:
        if PTX:
            found = value.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            wide = bits.to(tl.uint32, bitcast=True)
            found = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    else:
        if PTX:
            found = value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            # 2^16, the end of the binade after the largest, becomes infinity.
            code = round_magnitude(as_float(bits & MAGNITUDE), 10, 15, 65536.0) >> 13
            found = (code | ((bits >> 16) & 0x8000)).to(tl.uint32, bitcast=True)
    return found


@triton.jit
def converted(
    v,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    TO_EXP: tl.constexpr,
    TO_ITEM: tl.constexpr,
    PTX: tl.constexpr,
):
    """Bits of values of one dtype, uint32, as those of another."""
    if EXP == TO_EXP and ITEM == TO_ITEM:
        return v.to(tl.uint32)
    else:
        return narrow(widen(v, EXP, ITEM).to(tl.float32, bitcast=True), TO_EXP, TO_ITEM, PTX)


@triton.jit
def halves(word, EXP: tl.constexpr):
    """float32 values of the lower and of the upper element of a word."""
    if EXP == 8:
        return as_float(word << 16), as_float(word & 0xFFFF0000)
    else:
        low = word.to(tl.uint16).to(tl.float16, bitcast=True)
        high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def add_pair(a, b, EXP: tl.constexpr):
    """Sums of words' elements. Rounded from the exact sum they are what a rounding to float32 in
    between gives, as it has at least twice the bits and two more (Figueroa, When is double rounding
    innocuous?, 1995); a NaN becomes any NaN.
    """
    return by_ptx(
        "add.rn." + ("bf16x2" if EXP == 8 else "f16x2") + " $0, $1, $2;", "=r,r,r", (a, b)
    )


def aligned_for(plan: Plan, tensor: torch.Tensor, start: int = 0) -> bool:
    """Whether every chunk's elements start at a multiple of 16 bytes of `tensor`."""
    even = plan.chunks == 1 or plan.chunk_nelem % 16 == 0
    return even and start % 16 == 0 and tensor.data_ptr() % 16 == 0


@functools.cache
def converts(device: torch.device) -> bool:
    """True if the device converts small floats by itself and has the packed integers of sm_90."""
    if not PTX or device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))
