# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""A copy on a GPU that leaves most of it to others: few programs, each of which copies much.

PyTorch's copies start as many programs as there is memory, and kernels that are queued on other
streams have to wait until all of them have started.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from ...codecs.common.launch_triton import Variant, kernel, options

#: Programs of a copy, of 8 warps each: less than half of what an H100 runs at the same time.
PROGRAMS = 64
#: Bytes from which on a copy takes long enough to be in the way of others.
LEAST_NBYTES = 1 << 20
#: Words of four bytes that a program copies at once: eight loads of 16 bytes by each thread.
_WORDS = 8192
#: Bytes of a program at once behind the last whole block.
_TAIL = tl.constexpr(1024)


@kernel
def _copy_kernel(x_ptr, out_ptr, nbytes: tl.int64, WORDS: tl.constexpr):
    """Copy so many bytes, from and to addresses that are multiples of 16."""
    pid, step = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    blocks = nbytes // (WORDS * 4)
    x_words = x_ptr.to(tl.pointer_type(tl.uint32))
    out_words = out_ptr.to(tl.pointer_type(tl.uint32))
    i = tl.arange(0, WORDS)
    for block in range(pid, blocks, step):
        tl.store(out_words + block * WORDS + i, tl.load(x_words + block * WORDS + i))
    k = tl.arange(0, _TAIL)
    for first in range(blocks * (WORDS * 4) + pid * _TAIL, nbytes, step * _TAIL):
        at = first + k
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < nbytes), mask=at < nbytes)


_COPY = Variant(_copy_kernel, options(8), WORDS=_WORDS)


def resident_copy(out: Any, x: Any) -> None:
    """Copy a tensor, in the order of torch's current stream.

    Small tensors, and those that do not begin at multiples of 16 bytes, are copied by PyTorch.

    Args:
        out: Contiguous, of the dtype and size of ``x``.
        x: A contiguous tensor on the same device, which ``out`` does not overlap.
    """
    nbytes = x.numel() * x.element_size()
    if nbytes < LEAST_NBYTES or (x.data_ptr() | out.data_ptr()) % 16:
        out.copy_(x)
        return
    # Of fewer blocks than programs, those that have none copy the tail.
    programs = min(PROGRAMS, -(-nbytes // (_WORDS * 4)))
    _COPY.launch(programs, (x, out), nbytes)
