"""Parameters that FSDP2 gathers ahead in forward, in the order in which modules were gathered."""

from __future__ import annotations

from typing import Any


class GatheringAhead:
    """Has FSDP gather the parameters of the next modules before a module computes.

    Without it FSDP asks for parameters when a module needs them, and then waits for them. A host
    that waits there until they are known to be right queues no other gather meanwhile, and the
    network is idle while it queues the module's kernels.

    The order is that of two forwards in a row. If a later one differs, nothing is gathered ahead
    any more. Modules for which the user has asked for others, by
    ``set_modules_to_forward_prefetch``, keep these, and so do all.

    Args:
        count: How many modules are ahead. 0: none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        #: The modules of this forward so far, and of the one before it.
        self._now: list[Any] = []
        self._before: list[Any] = []
        #: The modules that gather ahead.
        self._set: list[Any] = []

    @property
    def active(self) -> bool:
        """Whether modules gather ahead."""
        return bool(self._set)

    def note(self, module: Any, begins: bool) -> None:
        """Note a gather of a forward.

        Args:
            module: The FSDP module.
            begins: Whether it is the first one of a forward.
        """
        if not self._count:
            return
        if begins:
            if self._before and self._now == self._before:
                self._begin()
            elif self._set:
                self.end()
                return
            self._before, self._now = self._now, []
        self._now.append(module)

    def _begin(self) -> None:
        if self._set:
            return
        if len(set(self._now)) < len(self._now) or any(_asks(m) for m in self._now):
            self.end()
            return
        for at, module in enumerate(self._now[:-1], 1):
            module.set_modules_to_forward_prefetch(self._now[at : at + self._count])
            self._set.append(module)

    def end(self) -> None:
        """Gather nothing ahead any more."""
        for module in self._set:
            module.set_modules_to_forward_prefetch([])
        self._count = 0
        for modules in (self._set, self._now, self._before):
            modules.clear()


def _asks(module: Any) -> bool:
    """Whether the user has said what a module gathers ahead."""
    # Nothing public tells.
    return bool(module._get_fsdp_state()._states_to_forward_prefetch)
