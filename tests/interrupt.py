"""A backward that raises in the middle: an error of the user's."""

from __future__ import annotations

from typing import Any

import torch


class Interrupt(torch.autograd.Function):  # type: ignore[misc]
    """The identity, whose backward raises what it is armed with."""

    armed: Exception | None = None

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if Interrupt.armed is not None:
            raise Interrupt.armed
        return gradient
