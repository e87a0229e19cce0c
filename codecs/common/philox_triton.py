# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton form of codecs/common/philox.py: the same words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import philox
from .base import Key

_STREAM_SHIFT = tl.constexpr(philox.STREAM_SHIFT)
_ROUNDS = tl.constexpr(philox.ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(m) for m in philox.MULTIPLIERS)
_WEYL_0, _WEYL_1 = (tl.constexpr(w) for w in philox.WEYL)

#: Where a kernel finds a key: nowhere, in its numbers, or (seed and step) in device memory.
NO_KEY, KEY_IN_NUMBERS, KEY_ON_DEVICE = 0, 1, 2


@triton.jit
def philox4(seed, step, rank, stream, group):
    """Words 4 * group to 4 * group + 3, uint32, of the shape of `group` (int64).

    `seed`, `step` and `rank` are uint64 scalars.
    """
    c0 = group.to(tl.uint32)
    c1 = (group >> 32).to(tl.uint32) | ((c0 * 0 + stream) << _STREAM_SHIFT)
    c2 = c0 * 0 + step.to(tl.uint32)
    c3 = c0 * 0 + rank.to(tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    # Products of 64 bits: `tl.philox` takes two multiplications for each.
    for _ in tl.static_range(_ROUNDS):
        a = c0.to(tl.uint64) * _MULTIPLIER_0
        b = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0, c1, c2, c3


def key_arguments(
    key: Key | None, device: torch.device
) -> tuple[int, torch.Tensor | None, tuple[int, int, int]]:
    """(where the key is, seed and step in device memory, seed, step and rank) for a kernel.

    A key of integers travels in the launch. Device arrays are not read here: a captured graph
    draws anew when they change. Raises as `philox.key_numbers`.
    """
    if key is None or not any(isinstance(value, torch.Tensor) for value in key):
        return KEY_IN_NUMBERS, None, philox.key_numbers(key)
    rank = philox.number("rank", key.rank)
    both = torch.cat([_word(key.seed, device), _word(key.step, device)])
    return KEY_ON_DEVICE, both, (0, 0, rank)


def _word(value: object, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_floating_point() or value.is_complex():
            raise TypeError(f"a number of the key is {value!r}; allowed: a tensor of one integer")
        return value.reshape(1).to(device, torch.int64)
    number = philox.key_numbers(Key(value)).seed
    signed = number - (1 << 64) if number >> 63 else number
    # A fill takes the value along: nothing waits.
    return torch.full((1,), signed, dtype=torch.int64, device=device)
