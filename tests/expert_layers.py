"""Experts that tests share out to ranks, tokens for them, and the layer in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tightwire.adapters.training import moe

WIDTH, INNER = 129, 67
#: Tokens of the ranks: odd numbers, one that has none, and one.
TOKENS = (41, 0, 130, 1)


class Expert(torch.nn.Module):  # type: ignore[misc]
    """What maps rows of WIDTH to such rows, as those of Mixtral do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first, self.gate = (torch.nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.last = torch.nn.Linear(INNER, WIDTH)
        # Ranks are threads, which share PyTorch's own generator.
        generator = torch.Generator().manual_seed(number)
        for p in self.parameters():
            p.data.uniform_(-0.1, 0.1, generator=generator)

    def forward(self, x: Any) -> Any:
        return self.last(torch.nn.functional.silu(self.gate(x)) * self.first(x))


def tokens(rank: int, experts: int, dtype: Any, n: int | None = None) -> tuple[Any, Any]:
    """Tokens of a rank and their logits; the last expert gets none, if they have a choice."""
    generator = torch.Generator().manual_seed(100 + rank)
    n = TOKENS[rank] if n is None else n
    x = torch.randn(n, WIDTH, generator=generator).to(dtype)
    logits = torch.randn(n, experts, generator=generator).to(dtype)
    logits[:, -1] -= 50
    return x.requires_grad_(), logits.requires_grad_()


def dense(x: Any, logits: Any, experts: list[Any], top_k: int) -> Any:
    """The layer in one process: every expert sees every token."""
    routing = moe.route(logits, top_k)
    results = torch.stack([expert(x) for expert in experts], 1)
    index = routing.experts[..., None].expand(-1, -1, results.shape[-1])
    weights = routing.weights.to(x.dtype)[..., None]
    return (results.gather(1, index) * weights).sum(1)


def experts_of(numbers: Any, dtype: Any) -> list[Any]:
    return [Expert(number).to(dtype) for number in numbers]


def layer_of(parallel: moe.ExpertParallel, dtype: Any, top_k: int) -> Any:
    experts = experts_of(parallel.local_experts, dtype)
    return moe.MixtureOfExperts(experts, parallel, top_k=top_k)


def trained(
    parallel: moe.ExpertParallel, dtype: Any, top_k: int, lengths: Sequence[int] = TOKENS
) -> list[Any]:
    """The output of this rank, and all its gradients."""
    x, logits = tokens(parallel.rank, parallel.experts, dtype, lengths[parallel.rank])
    layer = layer_of(parallel, dtype, top_k)
    y = layer(x, logits)
    y.square().sum().backward()
    return [y.detach(), x.grad, logits.grad, *(p.grad for p in layer.parameters())]
