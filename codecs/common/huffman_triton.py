# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""What kernels of codecs/common/huffman.py share."""

from __future__ import annotations

import triton
import triton.language as tl

from . import huffman

RUN, RUNS, TILE = (tl.constexpr(n) for n in (huffman.RUN, huffman.RUNS, huffman.TILE))
STORED, CONSTANT, NARROW, WIDE = (
    tl.constexpr(n) for n in (huffman.STORED, huffman.CONSTANT, huffman.NARROW, huffman.WIDE)
)


@triton.jit
def padded(n, K: tl.constexpr):
    """`n` rounded up to a multiple of K."""
    return (n + (K - 1)) // K * K
