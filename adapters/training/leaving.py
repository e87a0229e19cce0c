"""Communication that hooks leave to PyTorch, for as long as that is faster.

Where FSDP2 lets a hook be replaced, its own communication is put back, and no code of this package
is called. One module of a group keeps a counter, which has the hooks come back and look again. A
hook of DistributedDataParallel stays, and hands buckets on to PyTorch's own hook.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch

from ..collectives.faster import AGAIN

Kind = Literal["all_gather", "reduce_scatter"]


def param_groups(module: Any) -> list[Any]:
    """What FSDP itself has of the parameters of an FSDP module; nothing public tells.

    Args:
        module: The FSDP module.

    Returns:
        Its ``FSDPParamGroup`` objects.
    """
    fsdp = module._get_fsdp_state()
    groups = getattr(fsdp, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    # Versions of PyTorch without that have one at most.
    return [] if fsdp._fsdp_param_group is None else [fsdp._fsdp_param_group]


class Communication:
    """One kind of communication of an FSDP module: PyTorch's own, or a hook in its place.

    A hook that has an attribute ``own`` is one of this package.

    Args:
        module: The FSDP module.
        kind: Which.
    """

    def __init__(self, module: Any, kind: Kind) -> None:
        self.module, self._kind = module, kind
        current = self.current()
        #: PyTorch's own, or what the user has set before. None where it is not known.
        self.own: Any = getattr(current, "own", current)

    def current(self) -> Any:
        """What is set; None where it is not known."""
        groups = param_groups(self.module)
        return getattr(groups[0], f"_{self._kind}_comm", None) if groups else None

    def set(self, comm: Any) -> None:
        """Have the module's later calls be those of `comm`."""
        getattr(self.module, f"set_custom_{self._kind}")(comm)


class Counting:
    """PyTorch's own communication of an FSDP module, whose calls are counted."""

    def __init__(self, own: Any, count: Callable[[], None]) -> None:
        self.own, self._count = own, count

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As PyTorch's own."""
        memory: torch.Tensor = self.own.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As PyTorch's own."""
        self._count()
        return self.own(*args, **options)


class Absent:
    """Hooks of FSDP modules that are away, by process group, until they come back to look again.

    All ranks of a group make the same calls in the same order. What counts are calls, so that hooks
    leave and come back between the same calls on all ranks.

    Args:
        renew: Called with a group whose hooks are back.
        again: Calls of one module after which those of a group come back. None: ``AGAIN``.
    """

    def __init__(self, renew: Callable[[Any], None], again: int | None = None) -> None:
        self._renew = renew
        self._again = AGAIN if again is None else again
        self._away: dict[Any, list[tuple[Communication, Any, Any]]] = {}
        self._left: dict[Any, int] = {}

    def leave(self, group: Any, hooks: Sequence[tuple[Communication, Any]]) -> None:
        """Put PyTorch's own communication in the place of these hooks.

        Args:
            group: The process group.
            hooks: What they are hooks of, and they themselves.
        """
        if any(communication.own is None for communication, _ in hooks):
            return
        away = self._away.setdefault(group, [])
        for communication, hook in hooks:
            own = communication.own
            if not away:
                self._left[group] = self._again
                own = Counting(own, functools.partial(self._count, group))
            communication.set(own)
            away.append((communication, hook, own))

    def _count(self, group: Any) -> None:
        self._left[group] -= 1
        if not self._left[group]:
            self._back(group)
            self._renew(group)

    def _back(self, group: Any) -> None:
        for communication, hook, own in self._away.pop(group):
            # Somebody may have set another one.
            if communication.current() is own:
                communication.set(hook)

    def close(self) -> None:
        """Have all hooks come back, as they are to refuse calls."""
        for group in list(self._away):
            self._back(group)


class LeftBuckets:
    """Buckets of a DistributedDataParallel model that are left to PyTorch's own hook.

    Args:
        renew: Called when none is any more.
        again: Calls of one bucket after which all of them are looked at again. None: ``AGAIN``.
    """

    def __init__(self, renew: Callable[[], None], again: int | None = None) -> None:
        self._renew = renew
        self._again = AGAIN if again is None else again
        self._keys: set[Hashable] = set()
        #: Whose calls are counted: the model makes other buckets after its first step.
        self._counted: Hashable = None
        self._left = 0

    def leave(self, bucket: Any) -> None:
        """Leave later calls of a bucket to PyTorch."""
        self._counted, self._left = _key(bucket), self._again
        self._keys.add(self._counted)

    def has(self, bucket: Any) -> bool:
        """Whether this call of a bucket is left to PyTorch. Counts it."""
        key = _key(bucket)
        if key not in self._keys:
            return False
        if key == self._counted:
            self._left -= 1
            if not self._left:
                self.clear()
                self._renew()
        return True

    def clear(self) -> None:
        """Leave nothing to PyTorch."""
        self._keys.clear()


def _key(bucket: Any) -> Hashable:
    return bucket.index(), bucket.buffer().numel()


class Leaving:
    """The hooks of one FSDP module, which leave together when none of them is faster.

    Sums that may have to be made once more need gathers to tell steps apart, and gathers need sums
    to be judged before backward returns.

    Args:
        absent: Where they go.
        module: The FSDP module.
        gather: Its hook of parameters.
        scatter: Its hook of gradients.
    """

    def __init__(self, absent: Absent, module: Any, gather: Any, scatter: Any) -> None:
        self._absent, self._module = absent, module
        hooks: list[tuple[Kind, Any]] = [("all_gather", gather), ("reduce_scatter", scatter)]
        self._hooks = [(Communication(module, kind), hook) for kind, hook in hooks]
        for communication, hook in self._hooks:
            hook.own, hook.leaving = communication.own, self
        #: By hook and process group, whether PyTorch's own was faster last.
        self._native: dict[tuple[Kind, Any], bool] = {}

    def found(self, kind: Kind, group: Any, native: bool) -> None:
        """Say whether PyTorch's own communication is the faster one.

        Args:
            kind: Of which hook.
            group: The process group of the call.
            native: Whether it is.
        """
        self._native[kind, group] = native
        if not native or not all(self._native.values()):
            return
        kinds = {kind for kind, _ in self._native}
        if len(kinds) < 2 and any(p.requires_grad for p in self._parameters()):
            return
        self._native.clear()
        for _, hook in self._hooks:
            hook.leaves(group)
        self._absent.leave(group, self._hooks)

    def _parameters(self) -> list[Any]:
        return [p.sharded_param for g in param_groups(self._module) for p in g.fsdp_params]
