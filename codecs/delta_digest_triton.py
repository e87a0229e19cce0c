# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Digests of tensors on a GPU, of many in a launch. specs/delta.md, "Digests"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl

from .common.launch_triton import Variant, kernel, options
from .delta_words_triton import keys_of

#: Bytes of a tensor that a program adds up.
SPAN = 1 << 18
_BLOCK = tl.constexpr(2048)


@kernel
def _digest_kernel(sources_ptr, sums_ptr):
    """Add the terms of a span to the digest of its tensor.

    A row of the table at `sources_ptr` is the span's address, its bytes, the number of its first
    word in the tensor, and the number of the tensor.
    """
    row = sources_ptr + tl.program_id(0).to(tl.int64) * 4
    address, nbytes = tl.multiple_of(tl.load(row), 16), tl.load(row + 1)
    first = tl.load(row + 2).to(tl.uint32)
    words_ptr = address.to(tl.pointer_type(tl.uint32))
    words = (nbytes // 4).to(tl.int32)
    terms = tl.zeros([_BLOCK], tl.uint64)
    for at in range(0, words, _BLOCK):
        i = at + tl.arange(0, _BLOCK)
        word = tl.load(words_ptr + i, mask=i < words, other=0)
        terms += word.to(tl.uint64) * keys_of(first + i.to(tl.uint32)).to(tl.uint64)
    total = tl.sum(terms, 0)
    # Bytes behind the last whole word.
    i = tl.arange(0, 4)
    behind_ptr = address.to(tl.pointer_type(tl.uint8)) + words * 4
    behind = tl.load(behind_ptr + i, mask=i < nbytes - words * 4, other=0).to(tl.uint32)
    word = tl.sum(behind << (i * 8).to(tl.uint32), 0)
    total += word.to(tl.uint64) * keys_of(first + words.to(tl.uint32)).to(tl.uint64)
    tl.atomic_add(sums_ptr + tl.load(row + 3), total.to(tl.int64, bitcast=True), sem="relaxed")


_VARIANT = Variant(_digest_kernel, options(8))


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Digests of the bytes of tensors of one device, as `delta.digest_of` says. Waits once."""
    if not tensors:
        return []
    # 16 bytes are read at once.
    placed = [
        x
        if x.data_ptr() % 16 == 0 and x.is_contiguous()
        else x.clone(memory_format=torch.contiguous_format)
        for x in tensors
    ]
    sizes = np.array([x.nbytes for x in placed], np.int64)
    spans = -(-sizes // SPAN)
    number = np.repeat(np.arange(len(placed)), spans)
    within = (np.arange(number.size) - np.repeat(spans.cumsum() - spans, spans)) * SPAN
    addresses = np.array([x.data_ptr() for x in placed], np.int64)
    columns = (
        addresses[number] + within,
        np.minimum(sizes[number] - within, SPAN),
        within // 4,
        number,
    )
    device = placed[0].device
    sums = torch.zeros(len(placed), dtype=torch.int64, device=device)
    if number.size:
        table = torch.from_numpy(np.stack(columns, 1)).to(device)
        _VARIANT.launch(number.size, (table, sums))
    return [value & (1 << 64) - 1 for value in sums.tolist()]
