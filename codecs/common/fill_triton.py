# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Work memory that is cleared, and results that are overwritten if something was wrong, without a
pass over them if nothing was.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl

from .frame_triton import clear
from .launch_triton import Variant, kernel, options, program, programs

_BLOCK, _PROGRAMS = 4096, 1024
#: By dtype, the bits of NaN and of -0.0.
_BITS = {
    torch.bfloat16: (0x7FC0, 0x8000),
    torch.float16: (0x7E00, 0x8000),
    torch.float32: (0x7FC00000, 0x80000000),
    torch.float8_e4m3fn: (0x7F, 0x80),
    torch.float8_e5m2: (0x7F, 0x80),
}


@kernel
def _fill_kernel(
    status_ptr,
    out_ptr,
    number: tl.int32,
    stride: tl.int32,
    bits: tl.int64,
    nelem: tl.int64,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wrong = tl.load(status_ptr)
    for k in range(1, number):
        wrong |= tl.load(status_ptr + k * stride)
    if wrong != 0:
        WORD: tl.constexpr = tl.uint8 if ITEM == 1 else tl.uint16 if ITEM == 2 else tl.uint32
        to_ptr = out_ptr.to(tl.pointer_type(WORD))
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        value = tl.zeros([BLOCK], WORD) + bits.to(WORD)
        for first in range(start, nelem, step):
            at = first + tl.arange(0, BLOCK)
            tl.store(to_ptr + at, value, mask=at < nelem)


_FILL = {
    item: Variant(_fill_kernel, options(8), ITEM=item, BLOCK=_BLOCK)
    for item in {dtype.itemsize for dtype in _BITS}
}


def fill_if(words: torch.Tensor, stride: int, out: torch.Tensor, value: float) -> None:
    """Overwrite a tensor if a status word is not 0, in the order of torch's current stream.

    Args:
        words: Status words, int64, shape (n,), of which every `stride`-th counts, from the first.
        stride: At least 1.
        out: A contiguous float tensor on the same device.
        value: NaN or -0.0.
    """
    known = _BITS.get(out.dtype)
    if known is None:
        out.masked_fill_(words[::stride].any(), value)
        return
    programs = min(-(-out.numel() // _BLOCK), _PROGRAMS)
    if programs:
        bits = known[0] if math.isnan(value) else known[1]
        number = -(-words.numel() // stride)
        tensors = words, out.view(torch.uint8)
        _FILL[out.dtype.itemsize].launch(programs, tensors, number, stride, bits, out.numel())


@kernel
def _zero_kernel(out_ptr, nbytes: tl.int64, member=None):
    part = program(member)
    clear(out_ptr, nbytes * 0, nbytes, part, programs(member))


_ZERO = Variant(_zero_kernel, options(4))


def zero(memory: torch.Tensor) -> None:
    """Clear contiguous memory, by a launch: so it is one of `merged_triton` as well."""
    nbytes = memory.nbytes
    programs = max(1, min(nbytes >> 12, _PROGRAMS))
    _ZERO.launch(programs, (memory.view(torch.uint8),), nbytes)
