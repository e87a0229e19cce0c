"""Compressed collectives for FSDP2, ``torch.distributed.fsdp.fully_shard``.

To try it, run ``torchrun --nproc-per-node 2 example.py`` with::

    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from tightwire import fsdp

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
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

With ``fsdp.compress(model, gradients="nvfp4", error_feedback=ErrorFeedback())`` parameters arrive
bit for bit, and gradients take 4.5 bits each. With ``fsdp.compress(model, gradients="dynamiq",
topology="ring")`` gradients take 5 bits, summed around a ring.

On nodes of 8 ranks ``fsdp.compress(model, node=8)`` sends as it is what stays within a node. With
``node=8, weight_differences=True, gradients=tw.codec("sdp4bit", bits=4), within=tw.codec("sdp4bit",
bits=8)`` that is SDP4Bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ...arrays import as_dtype
from ...codec import Codec, as_codec
from ..collectives import tensors
from ..collectives.auto_scale import AutoScale
from ..collectives.calls import TraceRecord
from ..collectives.communicator import Communicator
from ..collectives.nodes import AnyCommunicator
from ..collectives.session import Topology
from ..errors import CollectiveError
from ..transports.threads import connect
from .error_feedback import ErrorFeedback
from .hooks import (
    Channel,
    Closing,
    average,
    check_feedback,
    check_gradients,
    check_nodes,
    check_options,
    collectives_of_average,
    finished,
    gather,
    node_communicator,
    scatter,
    wide,
)
from .leaving import AwayHooks, Communication, Kind, ModuleHooks, remove, take_replicas
from .prepared_fsdp import PreparedGather, PreparedScatter, kind_and_factor
from .prepared_hooks import Route, check_route
from .sharded import WeightDifferences


class _Hook(Closing):
    """A communicator for every process group of the modules, made by its ranks at the first call.

    Args:
        node: Ranks of a node, for a ``NodeCommunicator``. None: a ``Communicator``.
        within: With ``node``: a codec of terms of sums within nodes. None: they travel as they are.
        **options: Arguments of ``Communicator``, of nodes that between them.

    Raises:
        TypeError: As ``Communicator``.
        ValueError: As ``Communicator``.
    """

    def __init__(
        self, *, node: int | None = None, within: str | Codec | None = None, **options: Any
    ) -> None:
        check_nodes(node, within)
        self._alone = Communicator(connect(1)[0], **options)
        self._options = options
        self._levels = node, within
        #: Process groups whose ranks are in other nodes each.
        self._between: set[Any] = set()
        self._channels: dict[Any, Channel] = {}
        self._closed = False
        #: Of modules that are left to FSDP itself.
        self.away = AwayHooks(self._look_again)

    def _look_again(self, group: Any) -> None:
        self._channels[group].comm.session.look_again()

    def _open(self) -> Iterable[Channel]:
        return self._channels.values()

    def close(self) -> None:
        """Close the communicators. Later calls raise CollectiveError; closing twice is fine."""
        self._closed = True
        self.away.close()
        super().close()

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks without compression, in all calls so far."""
        return sum(channel.raw_bytes for channel in self._channels.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks, in all calls so far."""
        return sum(channel.wire_bytes for channel in self._channels.values())

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls of every communicator, group by group."""
        return [record for c in self._channels.values() for record in c.comm.trace()]

    def _went_natively(self, group: Any) -> bool:
        """Whether the last call of a process group was native."""
        return any(r.algorithm == "native" for r in self._channels[group].comm.trace(last=1))

    def _run(
        self, group: Any, tensor: Any, call: Callable[[AnyCommunicator], None], collectives: int = 1
    ) -> Any:
        channel = self._channels.get(group)
        if channel is None:
            kind = type(self).__name__
            if self._closed:
                raise CollectiveError(group.rank(), kind, 0, "start", "the hook is closed")
            place = group, tensor.device, f"FSDP: {kind}, route 'exact'"
            options = {"name": f"FSDP: {kind}"} | self._options
            levels = (None, None) if group in self._between else self._levels
            made = node_communicator(*place, *levels, **options)
            channel = self._channels[group] = Channel(made)
        comm = channel.comm
        return channel.run(tensor, lambda: call(comm), collectives)


class CommHook(_Hook):
    """A hook of FSDP2 that allocates the memory of its collective."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised memory for FSDP to communicate from or to.

        Args:
            size: Shape.
            dtype: Element type.
            device: Device.
        """
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(CommHook):
    """Compressed all-gather of parameters, for ``FSDPModule.set_custom_all_gather``.

    With a lossless codec parameters arrive bit for bit. With a lossy one layers compute with
    decoded parameters, the same on all ranks, while the shards that are trained stay exact. One
    object serves all modules and process groups, and nothing else than all-gathers. Parameters of
    different dtypes in one FSDP module are bytes to FSDP and are sent raw.
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
        return finished(done, async_op)

    def with_feedback(self, feedback: ErrorFeedback, name: str, module: Any) -> Any:
        """This object with error feedback for one FSDP module.

        What encoding loses of a parameter shard is added to it at the next gather: the mean over
        gathers of the weights that layers compute with becomes right, and they follow changes that
        are smaller than a step of the codec. A single gather does not improve, and two gathers of
        the same weights differ. So this makes sense where weights are gathered once a step and
        change little from step to step. It does not where backward gathers them again and so
        computes with other weights than forward (``reshard_after_forward=False`` avoids that), and
        little with gradient accumulation. ``DifferenceGather`` keeps what is lost in a replica
        instead, and gives the same weights as long as shards stay the same.

        Residuals are not used or changed while ``module`` is in evaluation mode
        (``module.eval()``). FSDP gathers without gradients in training too, so ``no_grad`` makes no
        difference. A shard whose size changes starts at zero. Parameters of several dtypes, which
        are sent raw, have no residual.

        Args:
            feedback: Where the residual is kept.
            name: Its name, which no other tensor in ``feedback`` may have.
            module: The FSDP module.

        Raises:
            ValueError: If the codec is lossless.
        """
        check_feedback(feedback, self._alone)
        return _Named(self, self._corrected, feedback=feedback, name=name, module=module)

    def _corrected(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        async_op: bool = False,
        *,
        feedback: ErrorFeedback,
        name: str,
        module: Any,
    ) -> Any:
        if not module.training or not input_tensor.is_floating_point():
            return self(output_tensor, input_tensor, group, async_op)
        parts = [(name, input_tensor.numel())]
        done = self._run(
            group,
            output_tensor,
            lambda comm: gather(comm, input_tensor, output_tensor, feedback, parts),
        )
        return finished(done, async_op)


class DifferenceGather(AllGather):
    """All-gather of parameters as weight differences, for ``FSDPModule.set_custom_all_gather``.

    Parameters are sent by ``sharded.WeightDifferences``: layers compute with replicas of the
    parameters, while the shards that are trained stay exact. Every rank keeps a replica of the
    unsharded parameters: this saves traffic and no memory. Where forward and backward both gather,
    the second gather sends nothing.

    Source: SDP4Bit (NeurIPS 2024), quantization of weight differences.

    Args:
        node: As in ``AllGather``; replicas are then those of the shards of a rank's number.
        **options: Arguments of ``Communicator``, with a lossless codec.

    Raises:
        ValueError: If the codec is lossy.
    """

    def __init__(self, *, node: int | None = None, **options: Any) -> None:
        super().__init__(node=node, **options)
        WeightDifferences(self._alone)
        self._differences: dict[AnyCommunicator, WeightDifferences] = {}

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks without compression, in all calls so far."""
        return sum(one.raw_bytes for one in self._differences.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks, in all calls so far."""
        return sum(one.wire_bytes for one in self._differences.values())

    def trace(self) -> list[TraceRecord]:
        """Records of the last gathers, group by group."""
        return [record for one in self._differences.values() for record in one.trace()]

    def reset(self) -> None:
        """Send all parameters in full once more, as after loading others; on all ranks."""
        for one in self._differences.values():
            one.reset()

    def close(self) -> None:
        """Close the communicators and free the replicas."""
        for one in self._differences.values():
            one.close()
        super().close()

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        """As of an `AllGather`, for a single FSDP module; `named` is for more."""
        return self._gather(output_tensor, input_tensor, group, async_op)

    def named(self, name: str) -> Any:
        """This object for one FSDP module.

        Args:
            name: Name of the module's replica.
        """
        return _Named(self, self._gather, name=name)

    def _gather(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        async_op: bool = False,
        name: str = "",
    ) -> Any:
        def call(comm: AnyCommunicator) -> None:
            if comm not in self._differences:
                self._differences[comm] = WeightDifferences(comm)
            self._differences[comm].gather(name, input_tensor, output_tensor)

        return finished(self._run(group, output_tensor, call), async_op)


class ReduceScatter(CommHook):
    """Compressed reduce-scatter of gradients, for ``FSDPModule.set_custom_reduce_scatter``.

    Gradients are encoded in ``reduce_dtype``. One object serves all modules and process groups, and
    nothing else than reduce-scatters.

    Args:
        node: As in ``AllGather``.
        within: As there.
        **options: As there.
    """

    def __init__(
        self, *, node: int | None = None, within: str | Codec | None = None, **options: Any
    ) -> None:
        super().__init__(node=node, within=within, **options)
        #: Of HSDP, by the process group of replicas: the hooks that ``compress`` has set besides.
        self.replicas: dict[Any, AllReduce] = {}

    def mean_over(self, group: Any) -> AllReduce:
        """The hook of the mean over replicas, whose bytes and calls count here.

        Args:
            group: The process group of the replicas.

        Returns:
            The hook, the same for all modules of these replicas.
        """
        if group not in self.replicas:
            self.replicas[group] = AllReduce(group, **self._options)
        return self.replicas[group]

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks without compression, in all calls so far."""
        return super().raw_bytes + sum(hook.raw_bytes for hook in self.replicas.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks, in all calls so far."""
        return super().wire_bytes + sum(hook.wire_bytes for hook in self.replicas.values())

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls, group by group; of replicas last."""
        return super().trace() + [r for hook in self.replicas.values() for r in hook.trace()]

    def close(self) -> None:
        """Close the communicators, those of replicas too. Later calls raise CollectiveError."""
        for hook in self.replicas.values():
            hook.close()
        super().close()

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor`, shape (n,), with this rank's share of all ranks' `input_tensor`.

        This has shape (ranks * n,). Sums are made in float32 (float64 in float64) in the order of
        ranks; they are scaled there too, for ReduceOp.AVG and PREMUL_SUM, and rounded once. With
        another topology the input is scaled instead, in float32 (float64), and by hops partial sums
        are rounded to the input's dtype at each, whose order is that of the terms.
        Returns like `AllGather`. Raises CollectiveError, and ValueError for another `op`.
        """
        return self._reduce(output_tensor, input_tensor, group, op, async_op)

    def with_feedback(self, feedback: ErrorFeedback, name: str) -> Any:
        """This object with error feedback for one FSDP module.

        Args:
            feedback: Where the residual is kept.
            name: Its name, which no other tensor in ``feedback`` may have.

        Raises:
            ValueError: If the codec is lossless, or sums are not two-shot.
        """
        check_feedback(feedback, self._alone)
        return _Named(self, self._reduce, feedback=feedback, name=name)

    def _reduce(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        op: Any,
        async_op: bool = False,
        feedback: ErrorFeedback | None = None,
        name: str = "",
    ) -> Any:
        kind, factor = kind_and_factor(op)

        def call(comm: AnyCommunicator) -> None:
            total = wide(output_tensor.numel(), output_tensor)
            if total.dtype == output_tensor.dtype:
                total = output_tensor

            def scale(x: Any) -> None:
                if kind == dist.ReduceOp.AVG:
                    tensors.change(lambda v: v.div_(comm.world_size), x)
                elif kind == dist.ReduceOp.PREMUL_SUM:
                    tensors.change(lambda v: v.mul_(factor), x)

            if kind == dist.ReduceOp.SUM or comm.topology == "two-shot":
                self._sum(comm, input_tensor, total, feedback, name)
                scale(total)
            else:
                # Partial sums travel in the input's dtype, which they must not overflow.
                terms = wide(input_tensor.numel(), input_tensor).copy_(input_tensor)
                scale(terms)
                self._sum(comm, terms.to(input_tensor.dtype), total, feedback, name)
            if total is not output_tensor:
                output_tensor.copy_(total)

        return finished(self._run(group, output_tensor, call), async_op)

    def _sum(
        self, comm: AnyCommunicator, x: Any, total: Any, feedback: ErrorFeedback | None, name: str
    ) -> None:
        scatter(comm, x, total, feedback, [(name, x.numel())])


class _Named:
    """An all-gather or reduce-scatter of one FSDP module: `call`, with its `own` arguments."""

    def __init__(self, inner: CommHook, call: Callable[..., Any], **own: Any) -> None:
        self._inner, self._call, self._own = inner, call, own

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options, **self._own)


class _AutoHook:
    """A hook of one FSDP module, which leaves when its communicator has sent calls natively."""

    together: ModuleHooks

    def __init__(self, hook: CommHook, kind: Kind) -> None:
        self._hook: Any = hook
        self._kind: Kind = kind

    def forget(self, group: Any) -> None:
        """Nothing: a communicator knows no steps."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._hook.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **options: Any
    ) -> Any:
        done = self._hook(output_tensor, input_tensor, group, *args, **options)
        self.together.found(self._kind, group, self._hook._went_natively(group))
        return done


class AllReduce(_Hook):
    """Compressed mean over replicas for HSDP, for ``FSDPModule.set_all_reduce_hook``.

    Shard with a one-dimensional mesh, and pass the process group of the other dimension. On a
    two-dimensional mesh FSDP itself makes the all-reduce, uncompressed, before it calls the hook,
    unless ``compress`` is told of nodes.

    Args:
        group: The process group of the ranks that hold the same shard.
        **options: Arguments of ``Communicator``, ``node`` and ``within`` as in ``AllGather``.

    Raises:
        TypeError: As ``Communicator``.
        ValueError: As ``Communicator``.
    """

    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__(**options)
        self._group = group

    def __call__(self, reduce_output: Any) -> None:
        """Overwrite a module's sharded gradients, 1-D, with their mean over the group.

        Sums are made in float32, divided there and rounded once; with another topology terms are
        divided in float32 instead, and by hops partial sums rounded to the gradients' dtype at
        each. Raises CollectiveError.
        """
        self._average(reduce_output)

    def with_feedback(self, feedback: ErrorFeedback, name: str) -> Callable[[Any], None]:
        """This hook with error feedback for one FSDP module.

        What encoding loses of a module's sharded gradients, and of this rank's share of their sum,
        is added to the next ones. Gradients whose number changes start at zero.

        Args:
            feedback: Where the residual is kept.
            name: Its name, which no other tensor in ``feedback`` may have, that of the module's
                ``ReduceScatter`` included.

        Returns:
            The hook.

        Raises:
            ValueError: If the codec is lossless, or sums are not two-shot.
        """
        check_feedback(feedback, self._alone)
        return functools.partial(self._average, feedback=feedback, name=name)

    def _average(
        self, reduce_output: Any, feedback: ErrorFeedback | None = None, name: str = ""
    ) -> None:
        parts = [(name, reduce_output.numel())]
        done = self._run(
            self._group,
            reduce_output,
            lambda comm: average(comm, reduce_output, feedback, parts),
            collectives_of_average(self._alone.topology),
        )
        done.wait()


class Hooks(NamedTuple):
    """The hooks that ``compress`` has set. A context manager, which ends with ``close()``.

    Attributes:
        all_gather: The hook of parameters, with ``raw_bytes``, ``wire_bytes`` and ``trace()``; of
            prepared calls also with ``why_no_peers``, which says by process group why the route
            "auto" takes the network there.
        reduce_scatter: The hook of gradients, with the same.
    """

    all_gather: Any
    reduce_scatter: Any

    def remove(self) -> None:
        """Take the hooks off, and close them: the model goes on with FSDP's own communication.

        All ranks call it between the same steps. Modules whose hook somebody else has replaced
        keep what they have. A model may be compressed once more.
        """
        remove(self.all_gather, self.reduce_scatter)

    def close(self) -> None:
        """Close both hooks. Later calls raise CollectiveError, also those of the model."""
        self.all_gather.close()
        self.reduce_scatter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()


def compress(
    module: Any,
    *,
    gradients: str | Codec | None = None,
    error_feedback: ErrorFeedback | None = None,
    parameter_feedback: ErrorFeedback | None = None,
    topology: Topology = "two-shot",
    scaling: AutoScale | None = None,
    weight_differences: bool = False,
    node: int | None = None,
    within: str | Codec | None = None,
    route: Route = "exact",
    wire: str | None = None,
    **options: Any,
) -> Hooks:
    """Compress all-gather and reduce-scatter of every FSDP module in a model.

    All ranks call it, before training. Each process group gets two communicators with connections
    of their own when it is first used, which all its ranks must do in the same order. The mean of
    gradients needs no divide factor or forced sum; those that are set are respected.

    Args:
        module: The model, after ``fully_shard``; it may be an FSDP module itself.
        gradients: Codec of the reduce-scatter. None: the codec of ``options``. A lossy one, say,
            while parameters arrive bit for bit.
        error_feedback: Adds what is lost of a module's gradients to the next ones. Each rank passes
            an object of its own; its residuals, one per module by name, are as large as the
            unsharded gradients, and start at zero when other parameters get gradients.
        parameter_feedback: The same for shards of parameters, where the codec of ``options`` is
            lossy; ``AllGather.with_feedback`` says when that helps. It may be the same object.
        topology: How gradients are summed. Over hops partial sums are rounded to ``reduce_dtype``
            and encoded at each hop, without error feedback.
        scaling: For mx with ``scale_rule="agreed"``, as in ``Communicator``.
        weight_differences: Whether parameters are sent by ``DifferenceGather``; not with
            ``parameter_feedback``.
        node: Ranks of a node, whose numbers in each process group are consecutive. Calls are then
            those of a ``NodeCommunicator``: as they are within nodes, encoded between them. A
            process group that lies in one node has nothing encoded. On a two-dimensional mesh
            (HSDP) the hooks also take over the mean over replicas, which are in other nodes each;
            FSDP makes it at every reduction, and ``set_requires_all_reduce`` has no effect.
        within: With ``node``: a codec of gradients within nodes.
        route: ``"exact"``: a ``Communicator`` sends every tensor in as many bytes as it needs, and
            the host waits for them. Else prepared calls are made, and the host waits for no sizes:
            ``"network"`` sends messages of a size that earlier ones taught, and with a lossless
            codec the host waits for gathers and at the end of backward; by ``"peers"`` the GPUs
            of a host read one another's memory; ``"auto"`` takes peers where it can (else
            ``why_no_peers`` of the hooks, and the logger "tightwire" at level INFO, say why),
            measures, and gives modules FSDP's own communication back for as long as that is faster;
            with ``"exact"`` the option ``algorithm="auto"`` does so, unless there are nodes, error
            feedback or weight differences. With a route for prepared calls the only other arguments
            are ``gradients``, ``wire``, ``codec``, ``checksum``, ``seed``, ``trace`` (works that
            are remembered, 0 by default: on a GPU it costs time), with ``"auto"``
            ``measurements``, which is as in ``Communicator``, ``ahead`` and ``keep_nbytes``.
            ``ahead`` is how many modules FSDP gathers ahead in forward, once two forwards in a row
            have had the same order, by ``set_modules_to_forward_prefetch``, unless you have called
            that; FSDP holds the parameters of so many modules more. Modules have to have one root,
            which is compressed, too. None: 2 with ``"network"``, where the host waits for gathers,
            and 0 else. ``keep_nbytes`` is bytes of memory for
            encoded shards. Over the network, a shard that has not changed since the last gather
            is not encoded again, if there is memory for it. None: 256 MiB on the host, where shards
            are compared with copies, and 0, which keeps nothing, on a GPU. There nothing is
            compared: what forward has sent is sent again by the
            first backward, unless an optimizer has stepped or PyTorch has counted a change of the
            shard. Changes that it does not count must not be made in between: by ``.data``,
            collectives, checkpoints that are loaded in place, or other libraries.
        wire: Dtype in which gradients of ``reduce_dtype`` float32 travel, such as ``"bfloat16"``;
            not with the route ``"exact"``.
        **options: Arguments of ``Communicator``.

    Returns:
        The hooks.

    Raises:
        TypeError: If ``module`` is not a module, or has complex parameters; for unknown options.
        ValueError: If there is no FSDP module, or one with several meshes; for the codecs lhc and
            omnireduce, which ruin dense gradients; if error feedback is
            given with a lossless codec or another topology than two-shot; for arguments that
            exclude each other.
    """
    check_route(route, options, ("keep_nbytes", "ahead"))
    given = (error_feedback, parameter_feedback, scaling, node, within)
    if route != "exact":
        if given != (None,) * 5 or weight_differences or topology != "two-shot":
            raise ValueError(
                f"route is {route!r}, given with error feedback, scaling, weight_differences, "
                "node, within or topology; allowed with those: 'exact'"
            )
        return _compress_prepared(module, route, gradients, wire, options)
    if wire is not None:
        raise ValueError(f"wire is {wire!r}, route 'exact'; allowed with wire: other routes")
    reducing = options | {"topology": topology}
    if gradients is not None:
        reducing["codec"] = gradients
    if scaling is not None:
        reducing["scaling"] = scaling
    if weight_differences and parameter_feedback is not None:
        raise ValueError(
            "weight_differences is given with parameter_feedback; allowed: either, as replicas "
            "keep what is lost"
        )
    check_options(compress, options)
    kind = DifferenceGather if weight_differences else AllGather
    gathers = kind(node=node, **options)
    scatters = ReduceScatter(node=node, within=within, **reducing)
    check_gradients(scatters._alone.codec)
    check_feedback(error_feedback, scatters._alone)
    check_feedback(parameter_feedback, gathers._alone)
    # Others keep what is lost, or have nodes.
    simple = node is None and not weight_differences
    leaves = simple and options.get("algorithm") == "auto"
    for name, m in fsdp_modules(module):
        own: Any = gathers
        if isinstance(gathers, DifferenceGather):
            own = gathers.named(name)
        elif parameter_feedback is not None:
            own = gathers.with_feedback(parameter_feedback, f"{name}, parameters", m)
        _install(gathers.away, m, "all_gather", own, leaves and own is gathers)
        reduce: Any = scatters
        if error_feedback is not None:
            reduce = scatters.with_feedback(error_feedback, name)
        away = scatters.away
        _install(away, m, "reduce_scatter", reduce, leaves and reduce is scatters)
        if node is not None:
            mean = functools.partial(_mean, scatters, error_feedback, f"{name}, replicas")
            take_replicas(m, away, mean)
    return Hooks(gathers, scatters)


def _mean(scatters: ReduceScatter, feedback: ErrorFeedback | None, name: str, group: Any) -> Any:
    """The hook of the mean over replicas of an FSDP module."""
    hook = scatters.mean_over(group)
    return hook if feedback is None else hook.with_feedback(feedback, name)


def _install(away: AwayHooks, module: Any, kind: Kind, hook: Any, leaves: bool) -> None:
    """Set a hook of an FSDP module, which leaves when native calls are faster, or stays."""
    if leaves:
        ModuleHooks(away, module, {kind: _AutoHook(hook, kind)}).install()
    else:
        away.install(Communication(module, kind), hook)


def _compress_prepared(
    module: Any, route: Route, gradients: str | Codec | None, wire: str | None, options: Any
) -> Hooks:
    """`compress` by prepared calls."""
    if wire is not None:
        as_dtype(wire)
    own = {name: options.pop(name, None) for name in ("keep_nbytes", "ahead")}
    gathers = PreparedGather(route, **own, **options)
    codec = options.get("codec", "zipccl") if gradients is None else gradients
    check_gradients(as_codec(codec))
    scatters = PreparedScatter(route, wire, gathers=gathers, **options | {"codec": codec})

    def look_again(group: Any) -> None:
        gathers.look_again(group)
        scatters.look_again(group)

    away = gathers.away = scatters.away = AwayHooks(look_again)
    for _, m in fsdp_modules(module):
        hooks: dict[Kind, Any] = {"all_gather": gathers.of(m), "reduce_scatter": scatters.of(m)}
        if route == "auto":
            ModuleHooks(away, m, hooks).install()
        else:
            for kind, hook in hooks.items():
                away.install(Communication(m, kind), hook)
    return Hooks(gathers, scatters)


def fsdp_modules(module: Any) -> list[tuple[str, Any]]:
    """The FSDP modules of a model, itself included, with their names.

    Args:
        module: The model.

    Raises:
        TypeError: If ``module`` is not a module, or has complex parameters.
        ValueError: If there is no FSDP module.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; allowed: a module after fully_shard")
    modules = [(name, m) for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError("module has no FSDP modules; fully_shard comes first")
    for name, p in module.named_parameters():
        if p.is_complex():
            raise TypeError(
                f"parameter {name!r} is {p.dtype}, which no codec takes; allowed: parameters of "
                "real dtypes, as torch.view_as_real() makes them"
            )
    return modules
