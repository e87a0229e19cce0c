"""Results of experts added up by the router's weights: in one pass on a GPU, else by PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .expert_rows import Order, has_kernels


def summed(y: Any, weights: Any, order: Order) -> Any:
    """The sum over the copies of each token of their results, by weights.

    Args:
        y: Results of copies in the order of their experts, shape ``(tokens * top_k, width)``.
        weights: Shape ``(tokens, top_k)``.
        order: That of the copies.

    Returns:
        Shape ``(tokens, width)``, with gradients to ``y`` and ``weights``.
    """
    weights = weights.to(y.dtype)
    kernels = kernels_for(y)
    if kernels is not None:
        return _Summed.apply(y, weights, order.inverse, kernels)
    results = _Permuted.apply(y, order.inverse, order.index).view(*weights.shape, y.shape[1])
    # Kernels do not follow autocast either.
    with torch.autocast(y.device.type, enabled=False):
        return torch.bmm(weights.unsqueeze(1), results).squeeze(1)


def kernels_for(y: Any) -> Any:
    """The module of kernels that add up rows such as those of `y`, or None."""
    if not has_kernels(y):
        return None
    from ...codecs.common import weighted_triton

    return weighted_triton if y.dtype in weighted_triton.DTYPES else None


class _Summed(torch.autograd.Function):  # type: ignore[misc]
    """Rows `places` of `y`, each of which is taken once, added up by `weights` in one pass."""

    @staticmethod
    def forward(ctx: Any, y: Any, weights: Any, places: Any, kernels: Any) -> Any:
        y, weights = y.contiguous(), weights.contiguous()
        ctx.save_for_backward(y, weights, places)
        ctx.kernels = kernels
        with torch.cuda.device_of(y):
            return kernels.weighted_sum(y, weights, places)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        with torch.cuda.device_of(gradient):
            found = ctx.kernels.weighted_sum_back(gradient.contiguous(), *ctx.saved_tensors)
        return *found, None, None


class _Permuted(torch.autograd.Function):  # type: ignore[misc]
    """Rows `index` of `x`, each of which is taken once: nothing is added up for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, index: Any, inverse: Any) -> Any:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None
