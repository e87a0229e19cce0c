"""Parameters that FSDP2 gathers ahead in forward, in the order in which modules were gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .leaving import param_groups

#: How often an order is learnt. Models whose order changes again and again gather nothing ahead.
_TRIES = 3
#: Gathers after which a forward has no end that anybody tells: its root has no hooks.
_MOST = 1 << 14


class GatheringAhead:
    """Has FSDP gather the parameters of the next modules before a module computes.

    Without it FSDP asks for parameters when a module needs them, and then waits for them. A host
    that waits there until they are known to be right queues no other gather meanwhile, and the
    network is idle while it queues the module's kernels.

    The order is that of two forwards in a row. Modules may be missing in later ones that still have
    their parameters, as after an evaluation. If the order is another one, or modules did not need
    what was gathered, nothing is gathered ahead until the next two forwards that are alike. Where
    the user asks for others, by ``set_modules_to_forward_prefetch``, nothing is gathered ahead
    besides.

    FSDP is asked at the first gather of each forward, and no longer when that has ended: backward
    may call modules once more. What was gathered ahead does not outlive the forward either:
    parameters may change behind it.

    Args:
        count: How many modules are ahead. 0: none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tries = _TRIES
        #: The modules of this forward so far, and of the one before it.
        self._now: list[Any] = []
        self._before: list[Any] = []
        #: The modules of a forward in which some gather ahead.
        self._order: list[Any] = []
        #: Those that do in this forward, and their lists of FSDP's.
        self._asked: list[tuple[Any, Any]] = []

    @property
    def active(self) -> bool:
        """Whether modules gather ahead."""
        return bool(self._order)

    def note(self, module: Any) -> None:
        """Note a gather of a forward.

        Args:
            module: The FSDP module.
        """
        if not self._count:
            return
        if not self._now:
            self._ask()
        self._now.append(module)
        if len(self._now) > _MOST:
            self.end()

    def _ask(self) -> None:
        if any(_lists(module) for module in self._order):
            self.end()
            return
        for at, module in enumerate(self._order[:-1], 1):
            module.set_modules_to_forward_prefetch(self._order[at : at + self._count])
            self._asked.append((module, _lists(module)))

    def _ask_no_more(self) -> None:
        for module, lists in self._asked:
            # Not what the user has set since.
            if _lists(module) is lists:
                module.set_modules_to_forward_prefetch([])
        self._asked = []

    def end_forward(self) -> None:
        """Say that a forward has ended, or raised. All ranks do, between the same gathers.

        Raises:
            CollectiveError: If what nobody needed was damaged, or a rank was late.
        """
        self._ask_no_more()
        now, self._now = self._now, []
        unused = [module for module in self._order if _is_gathered(module)]
        if unused or not _is_part(now, self._order or now):
            self._order = []
            self._tries -= 1
            if not self._tries:
                self._count = 0
        elif now and self._count and not self.active and now == self._before:
            self._learn(now)
        self._before = now or self._before
        for module in unused:
            _drop(module)

    def _learn(self, modules: list[Any]) -> None:
        if len(set(modules)) < len(modules) or any(_lists(module) for module in modules):
            self.end()
        else:
            self._order = modules

    def end(self) -> None:
        """Gather nothing ahead any more."""
        self._ask_no_more()
        self._order, self._now, self._count = [], [], 0


def _is_part(some: Sequence[Any], modules: Sequence[Any]) -> bool:
    """Whether modules come in the order of others, of which some may be missing."""
    rest = iter(modules)
    return all(module in rest for module in some)


# Nothing public tells what follows.


def _lists(module: Any) -> Any:
    """What an FSDP module gathers ahead in forward."""
    return module._get_fsdp_state()._states_to_forward_prefetch


def _is_gathered(module: Any) -> bool:
    """Whether a module's parameters were gathered, and nobody has used them yet."""
    return any(group._all_gather_result is not None for group in param_groups(module))


def _drop(module: Any) -> None:
    """Drop what was gathered and not used, as FSDP does behind backward."""
    for group in param_groups(module):
        result, group._all_gather_result = group._all_gather_result, None
        if result is None:
            continue
        event, work = result.all_gather_event, result.all_gather_work
        if event is not None:
            group.device_handle.current_stream().wait_event(event)
            # Its memory is taken again by what these streams gather next.
            group._wait_all_gather_streams_on_event(event)
        if isinstance(work, torch.distributed.Work):
            work.wait()


def forward_context(module: Any) -> Any:
    """What the FSDP modules of one root have in common; no others wait for one another's streams.

    Args:
        module: The FSDP module.
    """
    return module._get_fsdp_state()._state_ctx


def is_outermost(module: Any) -> bool:
    """Whether a forward ends with that of this FSDP module, of which FSDP's hook comes first.

    Args:
        module: The module.
    """
    state = module._get_fsdp_state()
    # FSDP's hook does not run if the module has raised.
    return state._state_ctx.iter_forward_root in (None, state)
