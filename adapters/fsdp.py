"""Compressed collectives for FSDP2, `torch.distributed.fsdp.fully_shard`.

To try it, `torchrun --nproc-per-node 2 example.py` with

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from tightwire.adapters import fsdp

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 10))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    hooks = fsdp.compress(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        print(hook.raw_bytes, hook.wire_bytes)
    dist.destroy_process_group()

With `fsdp.compress(model, gradients="nvfp4", error_feedback=ErrorFeedback())` parameters arrive bit
for bit, and gradients travel in 4.5 bits each; with
`fsdp.compress(model, gradients="dynamiq", topology="ring")` in 5, summed around a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule

from ..codec import Codec
from .calls import TraceRecord
from .collectives import Communicator
from .error_feedback import ErrorFeedback
from .group import Topology
from .hooks import (
    Channel,
    average,
    check_feedback,
    collectives_of_average,
    communicator,
    scatter,
    wide,
)
from .memory import connect


class _Hook:
    """A communicator for every process group it meets, made by its ranks at the first call."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of `Communicator`, and checked here."""
        Communicator(connect(1)[0], **options)
        self._options = options
        self._channels: dict[Any, Channel] = {}

    @property
    def raw_bytes(self) -> int:
        """Bytes that would have gone to other ranks uncompressed, in all calls so far."""
        return sum(channel.raw_bytes for channel in self._channels.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that went to other ranks, in all calls so far."""
        return sum(channel.wire_bytes for channel in self._channels.values())

    def trace(self) -> list[TraceRecord]:
        """The last calls of every communicator, group by group."""
        return [record for c in self._channels.values() for record in c.comm.trace()]

    def _run(
        self, group: Any, tensor: Any, call: Callable[[Communicator], None], collectives: int = 1
    ) -> Any:
        channel = self._channels.get(group)
        if channel is None:
            comm = communicator(group, tensor.device, **self._options)
            channel = self._channels[group] = Channel(comm)
        comm = channel.comm
        return channel.run(tensor, lambda: call(comm), collectives)


class _Comm(_Hook):
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for FSDP to communicate from or to, uninitialised."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Comm):
    """For `FSDPModule.set_custom_all_gather`: parameters travel encoded.

    With a lossless codec they arrive bit for bit. With a lossy one layers compute with what
    decoding gives, the same on all ranks, while the shards that are trained stay as they are.

    One object serves all modules and groups, and nothing but all-gathers. Parameters of
    different dtypes in one FSDP module are bytes to FSDP and go raw.
    """

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor`, shape (ranks * n,), with all ranks' `input_tensor`, shape (n,).

        The input may lie in the output. Returns a Work with `async_op`, else None; on a GPU both
        concern the current stream alone. Raises CollectiveError.
        """
        done = self._run(
            group, output_tensor, lambda comm: comm.all_gather(input_tensor, output_tensor)
        )
        return _finish(done, async_op)


class ReduceScatter(_Comm):
    """For `FSDPModule.set_custom_reduce_scatter`: gradients travel encoded, in `reduce_dtype`.

    One object serves all modules and groups, and nothing but reduce-scatters.
    """

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor`, shape (n,), with this rank's share of all ranks' `input_tensor`.

        This has shape (ranks * n,). Sums are made in float32 (float64 in float64) in the order of
        ranks; they are scaled there too, for ReduceOp.AVG and PREMUL_SUM, and rounded once.
        Returns like `AllGather`. Raises CollectiveError, and ValueError for another `op`.
        """
        return self._reduce(output_tensor, input_tensor, group, op, async_op)

    def with_feedback(self, feedback: ErrorFeedback, name: str) -> Any:
        """This object for one FSDP module, whose residual in `feedback` is called `name`."""
        return _Named(self, feedback, name)

    def _reduce(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        op: Any,
        async_op: bool,
        feedback: ErrorFeedback | None = None,
        name: str = "",
    ) -> Any:
        kind, factor = _scale(op)

        def call(comm: Communicator) -> None:
            total = wide(output_tensor.numel(), output_tensor)
            if total.dtype == output_tensor.dtype:
                total = output_tensor
            scatter(comm, input_tensor, total, feedback, [(name, input_tensor.numel())])
            if kind == dist.ReduceOp.AVG:
                total.div_(comm.world_size)
            elif kind == dist.ReduceOp.PREMUL_SUM:
                total.mul_(factor)
            if total is not output_tensor:
                output_tensor.copy_(total)

        return _finish(self._run(group, output_tensor, call), async_op)


class _Named:
    """A `ReduceScatter` of one FSDP module, with error feedback."""

    def __init__(self, inner: ReduceScatter, feedback: ErrorFeedback, name: str) -> None:
        self._inner, self._feedback, self._name = inner, feedback, name

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        own = self._feedback, self._name
        return self._inner._reduce(output_tensor, input_tensor, group, op, async_op, *own)


class AllReduce(_Hook):
    """For `FSDPModule.set_all_reduce_hook`: HSDP with a compressed mean over replicas.

    Shard with a one-dimensional mesh, and give the process group of the other dimension: on a
    two-dimensional mesh FSDP itself makes the all-reduce, uncompressed, before it calls the hook.
    """

    def __init__(self, group: Any, **options: Any) -> None:
        """`group` has the ranks that hold the same shard; `options` are those of `Communicator`."""
        super().__init__(**options)
        self._group = group

    def __call__(self, reduce_output: Any) -> None:
        """Overwrite a module's sharded gradients, 1-D, with their mean over the group.

        Sums are made in float32, divided there and rounded once. Raises CollectiveError.
        """
        collectives = collectives_of_average(self._options.get("topology", "two-shot"))
        done = self._run(
            self._group, reduce_output, lambda comm: average(comm, reduce_output), collectives
        )
        done.wait()


class Hooks(NamedTuple):
    """What `compress` has set, for their `raw_bytes`, `wire_bytes` and `trace()`."""

    all_gather: AllGather
    reduce_scatter: ReduceScatter


def compress(
    module: Any,
    *,
    gradients: str | Codec | None = None,
    error_feedback: ErrorFeedback | None = None,
    topology: Topology = "two-shot",
    **options: Any,
) -> Hooks:
    """Compress all-gather and reduce-scatter of every FSDP module in `module`, itself included.

    `gradients` is the codec of the reduce-scatter where it is not that of `options`: a lossy one,
    say, while parameters arrive bit for bit. `error_feedback`, one of each rank, sends what was
    lost of a module's gradients with the next ones; it has a residual for each module by its name,
    as large as the unsharded gradients, which starts anew when other parameters get gradients.
    `topology` is how gradients are summed: by hops a rank decodes its share at the end of the
    reduce-scatter, without error feedback.

    On all ranks, before training. `options` are those of `Communicator`; each process group gets
    two communicators on new process groups when it is first used, which all its ranks must do in
    the same order. The gradients' mean needs
    no divide factor or forced sum; those that are set are respected. Raises ValueError if there is
    no FSDP module, or one with several meshes.
    """
    check_feedback(error_feedback, topology)
    reducing = options | {"topology": topology}
    if gradients is not None:
        reducing["codec"] = gradients
    hooks = Hooks(AllGather(**options), ReduceScatter(**reducing))
    modules = [(name, m) for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError("module has no FSDP modules; fully_shard comes first")
    for name, m in modules:
        m.set_custom_all_gather(hooks.all_gather)
        reduce = hooks.reduce_scatter
        if error_feedback is not None:
            reduce = reduce.with_feedback(error_feedback, name)
        m.set_custom_reduce_scatter(reduce)
    return hooks


def _finish(done: Any, async_op: bool) -> Any:
    if async_op:
        return _create_work_from_future(done)
    done.wait()
    return None


def _scale(op: Any) -> tuple[Any, Any]:
    """The kind of a ReduceOp, and the factor of PREMUL_SUM."""
    for kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        if op == kind:
            return kind, None
    if op == dist.ReduceOp.PREMUL_SUM:
        # The factor shows nowhere else.
        return dist.ReduceOp.PREMUL_SUM, op.__getstate__()[1]
    raise ValueError(f"op is {op}; allowed: SUM, AVG and PREMUL_SUM")
