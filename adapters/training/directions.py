"""Collectives of tensor parallelism, of activations or of their gradients, by either way.

``tensor_parallel.connect`` makes them: with ``route="exact"`` by a communicator, else by prepared
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.calls import TraceRecord
from ..collectives.prepared import PreparedCalls
from .hooks import Channel
from .prepared_hooks import EndOfBackward, Pending, PreparedHook, Route


class ExactDirection(Channel):
    """Calls of a communicator."""

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls."""
        return list(self.comm.trace())

    def all_reduce(self, x: Any, out: Any) -> None:
        """Fill `out`, of the shape and dtype of `x`, with the sum over ranks."""
        self.run(out, lambda: self.comm.all_reduce(x, out)).wait()

    def all_gather(self, x: Any, out: Any) -> None:
        """Fill `out` with the tensors of all ranks, one behind the other."""
        self.run(out, lambda: self.comm.all_gather(x, out)).wait()

    def reduce_scatter(self, x: Any, out: Any) -> None:
        """Fill `out`, of the dtype of `x` or float32, with this rank's share of the sum."""
        self.run(out, lambda: self.comm.reduce_scatter(x, out)).wait()


class PreparedDirection(PreparedHook):
    """Prepared calls, one of each size, which is prepared when the first call of it is made.

    What a call returns is right. Where messages fit any data, with lossy codecs and out of peers'
    memory, nobody waits for that. Else the host waits. Damage, also of a forward, is raised before
    the backward returns that follows. Outside of backward it is raised as soon as it is known, by
    this call or a later one. It ends the calls of both directions.

    Args:
        route: How bytes travel.
        group: The process group.
        native: Whether everything is left to the process group.
        other: The other direction of the same layers, which is judged with this one.
        **options: Arguments of ``PreparedCalls``.
    """

    purpose = "tensor_parallel.connect"

    def __init__(
        self,
        route: Route,
        group: Any,
        *,
        native: bool,
        other: PreparedDirection | None = None,
        **options: Any,
    ) -> None:
        super().__init__(route, **options)
        self._group = dist.group.WORLD if group is None else group
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._plain = native
        if other is None:
            self._late = Pending(self.end_calls)
            self._end = EndOfBackward(self.judge)
        else:
            self._late, self._end = other._late, other._end
            self.partners, other.partners = [other], [self]

    def judge(self) -> None:
        """Raise what is wrong with calls of both directions so far; waits for them.

        Raises:
            CollectiveError: If a rank was late, or bytes were damaged.
        """
        self._late.judge()

    def unchanged(self, gradient: Any) -> Any:
        """A gradient as it is, of what a call of the other direction has given.

        Args:
            gradient: The gradient.
        """
        self._end.ask()
        return gradient.view_as(gradient)

    def all_reduce(self, x: Any, out: Any) -> None:
        """Fill `out`, of the shape and dtype of `x`, with the sum over ranks."""

        def native(transport: Any) -> None:
            transport.all_reduce(out.copy_(x))

        self._make("all_reduce", x, out, lambda calls: calls.all_reduce(x), native)

    def all_gather(self, x: Any, out: Any) -> None:
        """Fill `out` with the tensors of all ranks, one behind the other."""

        def native(transport: Any) -> None:
            transport.all_gather(out, x)

        self._make("all_gather", x, out, lambda calls: calls.all_gather(x), native)

    def reduce_scatter(self, x: Any, out: Any) -> None:
        """Fill `out`, of the dtype of `x` or float32, with this rank's share of the sum."""
        wide = str(out.dtype).removeprefix("torch.")

        def native(transport: Any) -> None:
            # The network rounds sums to what travels.
            total = out if out.dtype == x.dtype else torch.empty_like(out, dtype=x.dtype)
            transport.reduce_scatter(total.view(-1), x.view(-1))
            if total is not out:
                out.copy_(total)

        def prepare(calls: PreparedCalls) -> Any:
            return calls.reduce_scatter(x, dtype=wide)

        self._make("reduce_scatter", x, out, prepare, native)

    def _make(
        self,
        name: str,
        x: Any,
        out: Any,
        prepare: Callable[[PreparedCalls], Any],
        native: Callable[[Any], None],
    ) -> None:
        """Make a call, which is prepared when it is the first of its size."""
        # Also where this direction sends nothing encoded: the other one may have.
        in_backward = self._end.ask()
        if not x.numel():
            return
        key = x.device, name, x.numel(), x.dtype, out.dtype
        group = self._group
        with self._lock:
            if not in_backward:
                self._tell()
            self._begun(group, x.device)

            def plainly() -> None:
                native(self._calls[group].transport)

            def ours() -> None:
                self.wait_for(call(x, out))

            # Nothing else is summed by codecs.
            encoded = x.is_floating_point() and not self._plain
            call: Any = self._get(group, key, prepare) if encoded else None
            if call is None or self._native(group, key, plainly, ours, x):
                plainly()
                nbytes = _sent(name, x, self.world_size)
                self.raw_bytes += nbytes
                self.wire_bytes += nbytes
                return
            work = call(x, out)
            self._count(work)
            if work.may_change:
                self.wait_for(work)
            else:
                self._late.append(work)
            if not in_backward:
                self._tell()

    def _tell(self) -> None:
        """Raise what is known to be wrong by now."""
        self._late.take_done()
        self._late.tell()


def _sent(name: str, x: Any, ranks: int) -> int:
    """Bytes that a rank sends to others for `x`."""
    nbytes = int(x.numel()) * int(x.element_size()) * (ranks - 1)
    return {"all_gather": nbytes, "reduce_scatter": nbytes // ranks}.get(name, 2 * nbytes // ranks)
