"""A hook for DistributedDataParallel that waits for nothing until the end of backward.

``ddp.register(model, route=...)`` sets it.
"""

# DDP compares the annotations of a hook, which must therefore not be strings.
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ..collectives.prepared_work import Work
from ..collectives.side_stream import SideStream
from ..errors import CollectiveError
from .hooks import Channel, Closing, in_backward, raise_at_the_end, warn_of_group
from .leaving import NativeBuckets
from .prepared_hooks import EndOfBackward, PreparedHook, Route

#: Steps after which the memory of a bucket that has not come again is given back. Several models
#: may take turns.
_KEPT = 4


class PreparedDdpHook(PreparedHook, Closing):
    """The state of ``prepared_ddp_hook``. A context manager, which ends with ``close()``.

    A bucket takes an all-reduce: one-shot if it is small, or between two ranks, else two-shot. Over
    a network the next bucket is encoded while the messages of one are exchanged. Whether all
    messages fitted is looked at before backward returns; a bucket of which one did not is summed
    again, exactly. A copy prepares calls of its own when it is first used, in the default process
    group.

    Args:
        route: How bytes travel.
        group: The process group of the model.
        wire: Dtype in which float32 gradients travel. None: as they are.
        **options: Arguments of ``PreparedCalls``.
    """

    purpose = "DDP"
    side_by_side = True

    def __init__(
        self, route: Route, group: Any, *, wire: str | None = None, **options: Any
    ) -> None:
        super().__init__(route, **options)
        #: What a copy is made of.
        own = {"route": route, "wire": wire, "measurements": self._measurements}
        self._arguments = options | own
        self._group = group
        self._wire = wire
        self._stream = SideStream()
        #: Buckets whose means are under way.
        self._sent: list[Work] = []
        #: Steps so far, and the last one of each bucket.
        self._step = 0
        self._used: dict[Hashable, int] = {}
        #: Buckets that are left to PyTorch.
        self.native_buckets = NativeBuckets(lambda: self.look_again(group))
        self._end = EndOfBackward(self._judge)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has no connections, memory or counts; it is of the default process group."""
        warn_of_group(self._group)
        return _copy, (self._arguments,)

    def _open(self) -> Iterable[Channel]:
        return ()

    def _refuses(self) -> CollectiveError | None:
        return next((c.refusal("backward") for c in self._calls.values() if c.broken), None)

    def _give_up(self) -> None:
        for calls in self._calls.values():
            calls.give_up()

    @property
    def group(self) -> Any:
        """The process group of the model."""
        return self._group

    def close(self) -> None:
        """See ``PreparedHook``."""
        self.native_buckets.clear()
        super().close()

    def average(self, bucket: Any) -> Any:
        """A Future of the gradients of a bucket, overwritten with their mean."""
        x = bucket.buffer()
        if x.layout != torch.strided or not x.dtype.is_floating_point:
            raise TypeError(f"x is {x.dtype}, {x.layout}; allowed: dense floating-point tensors")
        # Each bucket has slots of its own, so that none waits for another.
        wire = self._wire if x.dtype == torch.float32 else None
        key = x.device, x.numel(), x.dtype, wire, bucket.index()
        scale = 1 / self._group.size()

        def ours() -> None:
            copy = x.clone()
            with self._stream.within(x, self._next()):
                self._prepared[(self._group, *key)](copy, copy).wait()

        def call() -> None:
            group = self._group
            if self._repeats(group, bucket.index()):
                self._step += 1
                # DistributedDataParallel makes other buckets after the first step.
                first = self._step - _KEPT
                self._used = {which: step for which, step in self._used.items() if step >= first}
                self._keep_only(self._used)
            self._used[(group, *key)] = self._step
            reduce = self._get(
                group, key, lambda calls: calls.all_reduce(x, scale=scale, wire=wire)
            )
            # Measured on copies: sums of sums would grow.
            if self._native(group, key, lambda: self._mean(x.clone()), ours, x):
                self._mean(x)
                self.forget(group, bucket.index())
                self.native_buckets.add(bucket)
                return
            # Unless the ways were measured that is the current stream.
            with self._stream.within(x, self._next()):
                work = reduce(x, x)
            self._count(work)
            self._sent.append(work)

        return self._stream.run(x, call, self._next())

    def _next(self) -> int:
        """The number of the stream that the next call belongs to."""
        calls = self._calls.get(self._group)
        return 0 if calls is None else calls.queue_of(calls.phase)

    def end(self, bucket: Any) -> None:
        """See to it that buckets are judged before gradients are copied out of them.

        DistributedDataParallel knows which gradients that are, and which it leaves alone. When a
        gradient has made a bucket ready, it asks for the copies behind what is asked for here.

        Args:
            bucket: The bucket whose call has been made.
        """
        if type(torch._C._current_autograd_node()).__name__ == "AccumulateGrad":
            self._end.ask()
            return
        # In the first step of a static graph all buckets are ready when backward ends, and the
        # copies follow at once. Buckets do not say which of them is the last one.
        static = torch._C._current_graph_task_id() != -1
        # Outside of backward a rank that has joined early makes the calls of the others, which
        # judge behind the last bucket.
        if static or bucket.is_last():
            self._judge()

    def _mean(self, x: Any) -> None:
        """Overwrite `x` with its mean over the ranks, by the process group itself."""
        self._calls[self._group].transport.all_reduce(x.div_(self._group.size()))

    def _judge(self) -> None:
        sent, self._sent = self._sent, []
        problem: CollectiveError | None = None
        for work in sent:
            try:
                work.wait()
            except CollectiveError as error:
                problem = problem or error
        if problem is not None:
            raise_at_the_end(self, problem)


def _copy(arguments: dict[str, Any]) -> PreparedDdpHook:
    return PreparedDdpHook(group=dist.distributed_c10d._get_default_group(), **arguments)


def prepared_ddp_hook(
    state: PreparedDdpHook, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: averages the gradients of a bucket over ranks, compressed.

    Args:
        state: The state.
        bucket: Gradients, one-dimensional, of any float dtype, which are overwritten.

    Returns:
        A Future of the averaged gradients. They are right when backward has returned.

    Raises:
        TypeError: For sparse or complex gradients.
        CollectiveError: If anything goes wrong on the wire; ``backward()`` raises it at its end.
    """
    if state.native_buckets.take(bucket):
        state.end(bucket)
        return allreduce_hook(state.group, bucket)
    future = in_backward(state, bucket.buffer(), lambda: state.average(bucket))
    state.end(bucket)
    return future
