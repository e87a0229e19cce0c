# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Triton form of codecs/common/norms.py: the same bits, every addition by halves spelled out."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...formats.dtypes import DType
from .launch_triton import Variant, kernel, options, program
from .minifloat import INFINITY
from .minifloat_triton import elements_at, widen

#: Elements of a program, whole blocks, each loaded in parts whose sums meet in registers.
_TILE, _PARTS = tl.constexpr(8192), tl.constexpr(8)
_INFINITY = tl.constexpr(INFINITY)
_INFINITE_DOUBLE = tl.constexpr(0x7FF << 52)
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_OPTIONS = options(num_warps=4)


@kernel
def _norms_kernel(
    x_ptr,
    out_ptr,
    nelem: tl.int64,
    BLOCK: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
    ROOTS: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    member=None,
):
    """Energies of a program's blocks, float64, or with ROOTS the roots of FACTOR times those."""
    ROWS: tl.constexpr = _TILE // BLOCK
    WIDTH: tl.constexpr = BLOCK // _PARTS
    number = program(member).to(tl.int64)
    row = number * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * BLOCK + tl.arange(0, WIDTH)[None, :]
    x = elements_at(x_ptr, ITEM)
    parts = ()
    for part in tl.static_range(_PARTS):
        at = i + part * WIDTH
        if (number + 1) * _TILE <= nelem:
            v = tl.load(x + at)
        else:
            v = tl.load(x + at, mask=at < nelem, other=0)
        value = widen(v, EXP, ITEM).to(tl.float32, bitcast=True).to(tl.float64)
        parts = parts + (value * value,)
    for k in tl.static_range(3):
        found = ()
        for part in tl.static_range(_PARTS >> (k + 1)):
            found = found + (parts[part] + parts[part + (_PARTS >> (k + 1))],)
        parts = found
    s = parts[0]
    for k in tl.static_range(LOG_WIDTH):
        s = tl.sum(tl.reshape(s, [ROWS, 2, WIDTH >> (k + 1)]), 1)
    energy = tl.reshape(s, [ROWS])
    infinite = tl.full([ROWS], _INFINITE_DOUBLE, tl.int64).to(tl.float64, bitcast=True)
    energy = tl.where(energy != energy, infinite, energy)
    use = row * BLOCK < nelem
    if ROOTS:
        root = tl.minimum(tl.sqrt(energy * FACTOR), _FLT_MAX).to(tl.float32)
        bits = tl.where(energy == infinite, _INFINITY, root.to(tl.int32, bitcast=True))
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + row, bits, mask=use)
    else:
        tl.store(out_ptr.to(tl.pointer_type(tl.float64)) + row, energy, mask=use)


@functools.cache
def _norms_variant(dtype: DType, block: int, factor: float, roots: bool) -> Variant:
    return Variant(
        _norms_kernel,
        _OPTIONS,
        BLOCK=block,
        LOG_WIDTH=(block // int(_PARTS.value)).bit_length() - 1,
        FACTOR=factor,
        ROOTS=roots,
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
    )


def roots(dtype: DType, x: torch.Tensor, block: int, factor: float, out: torch.Tensor) -> None:
    """The square roots of `factor` times the energies of blocks of `x` into `out`, float32.

    Shape (blocks,). At most the largest finite number, but infinity where an element is a NaN or
    infinite.
    """
    _launch(_norms_variant(dtype, block, factor, True), x, out)


def energies(dtype: DType, x: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """See `norms.energies`, into the first of `out`, float64."""
    _launch(_norms_variant(dtype, block, 1.0, False), x, out)


def _launch(variant: Variant, x: torch.Tensor, out: torch.Tensor) -> None:
    programs = -(-x.numel() // int(_TILE.value))
    if programs:
        variant.launch(programs, (x, out.view(torch.uint8)), x.numel())


@triton.jit
def _clamped(bits):
    """Bits of norms, int32: 0 for negative ones, infinity for NaNs."""
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > _INFINITY, _INFINITY, tl.maximum(bits, 0))


@triton.jit
def agreed(norms_ptr, norms, first, block, here, BLOCK: tl.constexpr):
    """See `norms.of_chunk`: bits, int32, of the norm of `block`s of a chunk, 0 if not `here`."""
    words = norms_ptr.to(tl.pointer_type(tl.int32))
    at = first // BLOCK + block
    found = _clamped(tl.load(words + at, mask=here, other=0))
    across = here & (first + block * 0 != first // BLOCK * BLOCK)
    beside = tl.load(words + tl.minimum(at + 1, norms - 1), mask=across, other=0)
    return tl.maximum(found, _clamped(beside))


@triton.jit
def of_tensor(norms_ptr):
    """Bits, int32, of the one norm there is."""
    return _clamped(tl.load(norms_ptr.to(tl.pointer_type(tl.int32))))
