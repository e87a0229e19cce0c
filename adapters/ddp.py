"""Compressed gradients for DistributedDataParallel: a communication hook over a `Communicator`.

To try it, `torchrun --nproc-per-node 2 example.py` with

    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from tightwire.adapters import ddp

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

With `ddp.register(model, codec="nvfp4", error_feedback=ErrorFeedback())` gradients travel in
4.5 bits each, and what that loses goes with the next ones; with
`ddp.register(model, codec="dynamiq", topology="ring")` their sums go around a ring in 5 bits each.
"""

# DDP compares the annotations of a hook, which must therefore not be strings.
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .collectives import Communicator
from .error_feedback import ErrorFeedback
from .hooks import (
    Channel,
    Closing,
    average,
    check_feedback,
    collectives_of_average,
    communicator,
    distributed,
    in_backward,
    install,
    trained_device,
)


class DdpHook(Closing):
    """The state of `ddp_hook`: a communicator of the ranks of the model, for nothing else.

    `error_feedback` keeps what a lossy codec loses of the gradients of each parameter, by its name
    in `names`; so buckets may change, and its `state_dict()` of every rank goes into a checkpoint.

    A bucket is one reduce-scatter and one all-gather, or with a communicator that sums by hops one
    all-reduce (DynamiQ, section 4); `raw_bytes` and `wire_bytes` of all buckets
    so far went to other ranks, uncompressed and in fact (with a communicator made with `trace=0`
    they stay 0).
    """

    def __init__(
        self,
        comm: Communicator,
        error_feedback: ErrorFeedback | None = None,
        names: Mapping[Any, str] | None = None,
    ) -> None:
        """`names` are those of the model's parameters; ValueError if feedback comes without.

        And if it comes with a communicator of a lossless codec, or not in two shots, or has loaded
        the state of another rank or number of ranks.
        """
        check_feedback(error_feedback, comm)
        if error_feedback is not None and names is None:
            raise ValueError("error_feedback is given, names are not; needed: both or none")
        if error_feedback is not None and names is not None:
            error_feedback.belongs(names.values(), comm.rank, comm.world_size)
        self._channel = Channel(comm)
        self.error_feedback = error_feedback
        self._names = names or {}

    def _open(self) -> Iterable[Channel]:
        return [self._channel]

    @property
    def comm(self) -> Communicator:
        """The communicator; its `trace()` has the calls one by one."""
        return self._channel.comm

    @property
    def raw_bytes(self) -> int:
        """Bytes that would have gone to other ranks."""
        return self._channel.raw_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that went to other ranks."""
        return self._channel.wire_bytes

    def _average(self, bucket: Any) -> None:
        if self.error_feedback is None:
            average(self.comm, bucket.buffer())
            return
        parts = [(self._names[p], p.numel()) for p in bucket.parameters()]
        average(self.comm, bucket.buffer(), self.error_feedback, parts)


def ddp_hook(state: DdpHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A Future of the bucket's gradients (1-D, any float dtype), averaged over ranks in place.

    For `model.register_comm_hook(DdpHook(comm), ddp_hook)`. Gradients travel encoded, and
    their means again; sums are made in float32 (float64 in float64) in the order of ranks, divided
    there and rounded once, and are bit-identical on all ranks (with `algorithm` "auto" or
    "native" sums of float32 are the network's own; by hops see `Communicator.all_reduce`). On a GPU
    all of it runs on a stream of its own; the host waits there for sizes. Raises TypeError for
    sparse or complex gradients, CollectiveError for what goes wrong on the wire; backward() raises
    them in the end, when all buckets have gone, and gradients are then undefined. The next step
    goes on if the communicator does; else it raises CollectiveError too (without `register` it may
    be DistributedDataParallel's RuntimeError), and a new DistributedDataParallel and `register` are
    needed.
    """
    gradients = bucket.buffer()
    collectives = collectives_of_average(state.comm.topology)

    def call() -> Any:
        return state._channel.run(gradients, lambda: state._average(bucket), collectives)

    return in_backward(state, gradients, call)


def register(
    model: Any,
    comm: Communicator | None = None,
    *,
    error_feedback: ErrorFeedback | None = None,
    **options: Any,
) -> DdpHook:
    """Register `ddp_hook` on a DistributedDataParallel model, on all ranks, and return its state.

    Without `comm`, one is made with `options` (see `Communicator`) for the model's ranks, with
    connections of its own; other ranks take no part. It ends with `close()` of what is returned, or
    with the model. Raises TypeError for other models, ValueError if `comm` and options are given,
    CollectiveError if ranks differ or do not come. With a lossy codec, `error_feedback` (each
    rank makes its own) sends what was lost of a gradient with the next one, for a float32 number
    of memory for each parameter.
    """
    model = distributed(model)
    if comm is None:
        device = trained_device(model)
        comm = communicator(model.process_group, device, "ddp.register", **options)
    elif options:
        raise ValueError(f"comm and {sorted(options)} are given; allowed: one or the other")
    names = {p: name for name, p in model.module.named_parameters()}
    state = DdpHook(comm, error_feedback, names)
    install(model, state, ddp_hook)
    return state
