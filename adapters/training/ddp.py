"""Compressed gradients for DistributedDataParallel: a communication hook over a ``Communicator``.

To try it, run ``torchrun --nproc-per-node 2 example.py`` with::

    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from tightwire import ddp

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    model = DistributedDataParallel(torch.nn.Linear(1000, 1000).bfloat16())
    hook = ddp.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 1000).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(hook.raw_bytes, hook.wire_bytes)
    dist.destroy_process_group()

With ``ddp.register(model, codec="nvfp4", error_feedback=ErrorFeedback())`` gradients take 4.5 bits
each, and what that loses is added to the next ones. With ``ddp.register(model, codec="dynamiq",
topology="ring")`` sums are made around a ring, in 5 bits each; with ``node=8`` besides, among nodes
of 8 ranks each, whose gradients are summed as they are first.
"""

# DDP compares the annotations of a hook, which must therefore not be strings.
from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ...codec import Codec, as_codec
from ..collectives.communicator import Communicator
from ..collectives.nodes import AnyCommunicator
from .error_feedback import ErrorFeedback
from .hooks import (
    NOT_CONNECTED,
    Channel,
    Closing,
    Connecting,
    average,
    check_feedback,
    check_gradients,
    check_nodes,
    check_options,
    collectives_of_average,
    distributed,
    in_backward,
    install,
    trained_device,
)
from .leaving import NativeBuckets
from .prepared_ddp import PreparedDdpHook as PreparedDdpHook
from .prepared_ddp import prepared_ddp_hook as prepared_ddp_hook
from .prepared_hooks import Route, check_route


class DdpHook(Closing):
    """The state of ``ddp_hook``: a communicator of the model's ranks, used by nothing else.

    A bucket takes one reduce-scatter and one all-gather or, with a communicator that sums over
    hops, one all-reduce (DynamiQ, section 4). A context manager, which ends with ``close()``.
    A copy makes a communicator of its own when it is first used, in the default process group,
    unless one was passed to ``register``.

    Args:
        comm: The communicator, which may be one of nodes.
        error_feedback: What a lossy codec loses of the gradients of each parameter, kept by its
            name, so that buckets may change. Its ``state_dict()`` on every rank belongs into a
            checkpoint.
        names: Parameters of the model to their names; needed with ``error_feedback``.

    Raises:
        TypeError: If ``error_feedback`` is not an ``ErrorFeedback``.
        ValueError: If it is given without names, with a lossless codec or another topology than
            two-shot, or has the state of another rank or number of ranks.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        error_feedback: ErrorFeedback | None = None,
        names: Mapping[Any, str] | None = None,
    ) -> None:
        check_feedback(error_feedback, comm)
        if error_feedback is not None and names is None:
            raise ValueError("error_feedback is given, names are not; needed: both or none")
        if error_feedback is not None and names is not None:
            error_feedback.belongs(names.values(), comm.rank, comm.world_size)
        self._channel: Channel | None = Channel(comm)
        #: Of what the communicator was made; None if it was given.
        self._connecting: Connecting | None = None
        self.error_feedback = error_feedback
        self._names = names or {}
        #: Buckets that are left to PyTorch, and the model's process group, if they may be.
        self.native_buckets: NativeBuckets | None = None
        self.group: Any = None

    def __getstate__(self) -> dict[str, Any]:
        own = self._connecting
        return {
            "_connecting": own and own.of_copy(),
            "error_feedback": self.error_feedback,
            "_names": self._names,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._channel = self.native_buckets = self.group = None

    def _connected(self, device: torch.device) -> Channel:
        """The channel, which a copy makes when it is first used."""
        if self._channel is None:
            self._channel = Channel(self._connect_copy(self._connecting, device))
            self._leave_to(dist.group.WORLD)
        return self._channel

    def _leave_to(self, group: Any) -> None:
        """Leave buckets to PyTorch where the communicator finds native calls faster.

        `group` is the model's.
        """
        comm = self.comm
        if self.error_feedback is not None or not isinstance(comm, Communicator):
            return
        if comm.session.paths.chooses:
            self.native_buckets = NativeBuckets(comm.session.look_again)
            self.group = group

    def close(self) -> None:
        """See ``Closing``."""
        if self.native_buckets is not None:
            self.native_buckets.clear()
        super().close()

    def _open(self) -> Iterable[Channel]:
        return [] if self._channel is None else [self._channel]

    @property
    def comm(self) -> AnyCommunicator:
        """The communicator; its ``trace()`` has the calls one by one.

        Raises:
            TypeError: If this is a copy that has made no call.
        """
        if self._channel is None:
            raise TypeError(NOT_CONNECTED)
        comm: AnyCommunicator = self._channel.comm
        return comm

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks without compression so far; 0 if the communicator has no trace."""
        return 0 if self._channel is None else self._channel.raw_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks so far; 0 if the communicator has ``trace=0``."""
        return 0 if self._channel is None else self._channel.wire_bytes

    def _average(self, bucket: Any) -> None:
        if self.error_feedback is None:
            average(self.comm, bucket.buffer())
            if self.native_buckets is not None:
                last = self.comm.trace(last=collectives_of_average(self.comm.topology))
                if last and all(record.algorithm == "native" for record in last):
                    self.native_buckets.add(bucket)
            return
        parts = [(self._names[p], p.numel()) for p in bucket.parameters()]
        average(self.comm, bucket.buffer(), self.error_feedback, parts)


def ddp_hook(state: DdpHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: averages the gradients of a bucket over ranks, compressed.

    For ``model.register_comm_hook(DdpHook(comm), ddp_hook)``. Gradients travel encoded, and so do
    their means. Sums are made in float32 (float64 for float64) in the order of ranks, divided there
    and rounded once, and are bit-identical on all ranks. With ``algorithm`` "auto" or "native" the
    network may sum float32; over hops see ``Communicator.all_reduce``. On a GPU all of it runs on a
    stream of its own, where the host waits for sizes.

    Args:
        state: The state.
        bucket: Gradients, one-dimensional, of any float dtype, which are overwritten.

    Returns:
        A Future of the averaged gradients.

    Raises:
        TypeError: For sparse or complex gradients; by a copy of a hook to which a communicator was
            passed.
        CollectiveError: If anything goes wrong on the wire. ``backward()`` raises errors at its
            end, when all buckets were sent; gradients are then undefined. The next step works if
            the communicator can be used on; else it raises again (without ``register`` maybe as
            RuntimeError of DistributedDataParallel), and a new DistributedDataParallel and
            ``register`` are needed.
    """
    if state.native_buckets is not None and state.native_buckets.take(bucket):
        return allreduce_hook(state.group, bucket)
    gradients = bucket.buffer()

    def call() -> Any:
        channel = state._connected(gradients.device)
        collectives = collectives_of_average(state.comm.topology)
        return channel.run(gradients, lambda: state._average(bucket), collectives)

    return in_backward(state, gradients, call)


@overload
def register(
    model: Any,
    comm: AnyCommunicator | None = None,
    *,
    node: int | None = None,
    within: str | Codec | None = None,
    error_feedback: ErrorFeedback | None = None,
    route: Literal["exact"] = "exact",
    **options: Any,
) -> DdpHook: ...
@overload
def register(
    model: Any, *, route: Literal["network", "peers", "auto"], **options: Any
) -> PreparedDdpHook: ...
def register(
    model: Any,
    comm: AnyCommunicator | None = None,
    *,
    node: int | None = None,
    within: str | Codec | None = None,
    error_feedback: ErrorFeedback | None = None,
    route: Route = "exact",
    **options: Any,
) -> DdpHook | PreparedDdpHook:
    """Register ``ddp_hook`` on a DistributedDataParallel model.

    All ranks of the model call it; other ranks take no part.

    Args:
        model: The DistributedDataParallel model.
        comm: A communicator of the model's ranks, or a ``NodeCommunicator``. None: one is made with
            connections of its own, which ends with ``close()`` of the result or with the model.
        node: Ranks of a node, whose numbers are consecutive: gradients are summed within nodes as
            they are, and encoded between nodes, as ``NodeCommunicator`` says. Not with ``comm``.
        within: With ``node``: a codec of gradients within nodes.
        error_feedback: Each rank passes an object of its own. What a lossy codec loses of a
            gradient is then added to the next one, for a float32 of memory per parameter.
        route: How bytes travel, as in ``fsdp.compress``. With another than ``"exact"`` options are
            ``codec``, ``checksum``, ``seed``, ``trace``, with ``"auto"`` ``measurements``, which is
            as in ``Communicator``, and ``wire``: the dtype in which float32 gradients travel, such
            as ``"bfloat16"``.
        **options: Arguments of ``Communicator``, such as ``codec``; not with ``comm``.

    Returns:
        The state of the hook.

    Raises:
        TypeError: If ``model`` is another model, an option has no such name, or an argument a wrong
            type.
        ValueError: If ``comm`` and options are given, or a value is not allowed; for the codecs lhc
            and omnireduce, which ruin dense gradients.
        CollectiveError: If ranks differ, or do not all call it within the timeout.
    """
    model = distributed(model)
    check_route(route, options, ("wire",))
    if route != "exact":
        if (comm, error_feedback, node, within) != (None,) * 4:
            raise ValueError(
                f"route is {route!r}, given with comm, node, within or error_feedback; allowed "
                "then: 'exact'"
            )
        check_gradients(as_codec(options.get("codec", "zipccl")))
        prepared = PreparedDdpHook(route, model.process_group, **options)
        prepared.meet(model.process_group, trained_device(model))
        install(model, prepared, prepared_ddp_hook)
        return prepared
    connecting: Connecting | None = None
    given = sorted(options | {k: v for k, v in (("node", node), ("within", within)) if v})
    if comm is None:
        check_options(register, options)
        check_nodes(node, within)
        connecting = Connecting(model.process_group, "ddp.register", node, within, options)
        comm = connecting.connect(trained_device(model))
    elif given:
        raise ValueError(f"comm and {given} are given; allowed: one or the other")
    else:
        check_gradients(comm.codec)
    names = {p: name for name, p in model.module.named_parameters()}
    state = DdpHook(comm, error_feedback, names)
    state._connecting = connecting
    state._leave_to(model.process_group)
    install(model, state, ddp_hook)
    return state
