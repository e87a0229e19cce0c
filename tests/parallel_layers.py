"""A layer that tests of tensor parallelism cut in parts, and what goes through it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from tightwire.adapters.training import tensor_parallel as tp

BATCH, TIME, WIDTH, INNER = 7, 44, 37, 132


class Half(torch.nn.Module):  # type: ignore[misc]
    """Three column-parallel matrices in one layer, something between, and a row-parallel one."""

    def __init__(self, parallel: Any = None, sequence_dim: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(WIDTH, 3 * INNER)
        self.last = torch.nn.Linear(INNER, WIDTH)
        if parallel is not None:
            self.first = tp.ColumnParallelLinear(
                self.first, parallel, parts=3, sequence_dim=sequence_dim
            )
            self.last = tp.RowParallelLinear(self.last, parallel, sequence_dim=sequence_dim)

    def forward(self, x: Any) -> Any:
        a, b, c = self.first(x).chunk(3, -1)
        return self.last(a.tanh() * b + c)


def made(device: Any, dtype: Any, *arguments: Any) -> Any:
    """The module of the full model, or of this rank with its arguments; equal weights."""
    return Half(*arguments).to(device=device, dtype=dtype)


def batch(device: Any, dtype: Any) -> tuple[Any, Any]:
    """An input, and the gradient of the output."""
    torch.manual_seed(2)
    shape = (BATCH, TIME, WIDTH)
    x, gradient = torch.randn(shape, device=device), torch.randn(shape, device=device)
    return x.to(dtype).requires_grad_(), gradient.to(dtype)


def mine(x: Any, dim: int, parts: int = 1) -> Any:
    """This rank's share of each part along a dimension."""
    shares = [
        part.chunk(dist.get_world_size(), dim)[dist.get_rank()] for part in x.chunk(parts, dim)
    ]
    return torch.cat(shares, dim)


def digest(*tensors: Any) -> str:
    found = hashlib.blake2b()
    for x in tensors:
        found.update(x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
