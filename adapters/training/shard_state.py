"""What is known of changes of an FSDP module's shard without looking at its bytes."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class ShardState:
    """A state of a shard. It equals another one if PyTorch has seen no change between them.

    PyTorch counts changes of tensors, but not those by ``foreach`` and fused optimizers in the
    tensors of a DTensor: steps of optimizers are counted besides. It counts none that are made by
    ``.data``, by ``torch.distributed``, by loading a checkpoint in place, or by another library.

    Args:
        tensors: The tensors of the shard.
        span: States of different spans are different.
    """

    def __init__(self, tensors: list[Any], span: int) -> None:
        self._tensors = [weakref.ref(x) for x in tensors]
        self._step = span, _steps()[0]
        self._versions = [x._version for x in tensors]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardState) or not self.is_of_the_step_of(other):
            return False
        if self._versions != other._versions:
            return False
        rows = zip(self._tensors, other._tensors, strict=True)
        return all(a() is not None and a() is b() for a, b in rows)

    def is_of_the_step_of(self, other: ShardState) -> bool:
        """Whether no optimizer has stepped between two states of one span. All ranks find the same.

        Args:
            other: The other state.
        """
        return self._step == other._step


def shard_state(groups: list[Any], span: int) -> ShardState | None:
    """The state of what an FSDP module gathers next. None if it is not known.

    Args:
        groups: Its ``FSDPParamGroup`` objects.
        span: As in ``ShardState``.
    """
    if len(groups) != 1 or not groups[0].is_sharded:
        return None
    tensors = []
    for p in groups[0].fsdp_params:
        local = p.sharded_param._local_tensor
        # Such tensors say themselves what is gathered.
        if hasattr(local, "fsdp_pre_all_gather"):
            return None
        tensors += [p.sharded_param, local, p._sharded_param_data]
    # Those of inference mode count nothing.
    return None if any(x.is_inference() for x in tensors) else ShardState(tensors, span)


@functools.cache
def _steps() -> list[int]:
    """How many steps all optimizers of ``torch.optim`` have made since the first call."""
    found = [0]

    def count(*_: Any) -> None:
        found[0] += 1

    register_optimizer_step_post_hook(count)
    return found
