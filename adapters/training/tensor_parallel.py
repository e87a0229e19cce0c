"""Tensor parallelism whose activations and gradients travel encoded, after Megatron-LM and TACO.

TACO, section 2.1 and figure 2: a column-parallel linear, which all-reduces the gradient of its
input, and a row-parallel linear, which all-reduces its output; with sequence parallelism these
become an all-gather and a reduce-scatter along the sequence.

To try it, run ``torchrun --nproc-per-node 2 example.py`` with::

    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from tightwire import tensor_parallel as tp

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    torch.manual_seed(0)
    parallel = tp.connect("taco", "taco", wire="bfloat16")
    model = torch.nn.Sequential(
        tp.ColumnParallelLinear(torch.nn.Linear(256, 1024), parallel),
        torch.nn.GELU(),
        tp.RowParallelLinear(torch.nn.Linear(1024, 256), parallel),
    )
    x = torch.randn(64, 256, requires_grad=True)
    model(x).square().mean().backward()
    print(parallel.raw_bytes, parallel.wire_bytes)
    dist.destroy_process_group()

Error feedback is off unless ``tp.set_error_feedback(model, ErrorFeedback())`` sets it. Gradients of
parameters are much alike from step to step; activations and their gradients are those of another
batch. What encoding loses of one is then not a part of the next: adding it takes a bias of the
codec out of the mean over steps, and makes the single step worse (about twice the mean square
error, where errors of two steps are independent). Rudakov et al., "Activations and Gradients
Compression for Model-Parallel Training" (2024), found that error feedback does not improve
training, but that models trained with it can do without compression at inference. AQ-SGD (Wang et
al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with Guarantees",
NeurIPS 2022) sends how a sample's activations have changed since an epoch ago instead, and stores
those of all samples.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from ...arrays import SHORT_DTYPES
from ...codec import Codec
from ..collectives.calls import TraceRecord
from ..collectives.nodes import AnyCommunicator
from .directions import ExactDirection, PreparedDirection
from .error_feedback import ErrorFeedback
from .hooks import (
    Closing,
    Collective,
    check_feedback,
    collectives_of_average,
    gather,
    scatter,
    two_communicators,
    two_shots,
    wide,
)
from .prepared_hooks import Route, check_route

WIRES = (None, "bfloat16", "float16")

Direction = Literal["forward", "backward"]


class TensorParallel(Closing):
    """The ranks that share a model's layers, and the four collectives that autograd differentiates.

    Tensors have any shape and are on the communicators' device; only floating-point tensors may
    need gradients. Shapes and dtypes are equal on all ranks. What all ranks get is bit-identical,
    with a lossy codec too. All ranks make the same calls in the same order, forward and backward.
    There are no gradients of gradients. ``torch.compile`` breaks its graph at each collective. A
    context manager, which ends with ``close()``.

    Args:
        forward: Communicator of the activations, used by nothing else. It may be one of nodes.
        backward: Communicator of their gradients, of the same ranks. None: the same one.
        wire: ``"bfloat16"`` or ``"float16"``: dtype that wider tensors are rounded to before they
            are encoded. None: their own.

    Raises:
        ValueError: If ``wire`` is another dtype, or ranks of the communicators differ.
        CollectiveError: By calls, if anything goes wrong on the wire.
    """

    def __init__(
        self,
        forward: AnyCommunicator,
        backward: AnyCommunicator | None = None,
        *,
        wire: str | None = None,
    ) -> None:
        if backward is None:
            backward = forward
        places = [(comm.rank, comm.world_size) for comm in (forward, backward)]
        if places[0] != places[1]:
            raise ValueError(f"rank and world size are {places[0]} forward, {places[1]} backward")
        there = ExactDirection(forward)
        back = there if backward is forward else ExactDirection(backward)
        self._begin(there, back, *places[0], wire)

    def _begin(
        self,
        forward: ExactDirection | PreparedDirection,
        backward: ExactDirection | PreparedDirection,
        rank: int,
        world_size: int,
        wire: str | None,
    ) -> None:
        wire = SHORT_DTYPES.get(wire or "", wire)
        if wire not in WIRES:
            raise ValueError(f"wire is {wire!r}; allowed: {WIRES}")
        self._forward, self._backward = forward, backward
        self.rank, self.world_size = rank, world_size
        self._wire = wire
        self._feedback: ErrorFeedback | None = None
        self._name = ""

    @classmethod
    def _prepared(
        cls, forward: PreparedDirection, backward: PreparedDirection, wire: str | None
    ) -> TensorParallel:
        found = object.__new__(cls)
        found._begin(forward, backward, forward.rank, forward.world_size, wire)
        return found

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks without compression so far, in the dtype that ``wire`` names."""
        return sum(way.raw_bytes for way in self._directions())

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks so far."""
        return sum(way.wire_bytes for way in self._directions())

    @property
    def why_no_peers(self) -> str:
        """Why messages go over the network with the route "auto"; ``""`` if they do not, or yet."""
        ways = [way for way in self._directions() if isinstance(way, PreparedDirection)]
        return next((why for way in ways for why in way.why_no_peers.values()), "")

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls: those of forward, then those of backward if it has its own."""
        return [record for way in self._directions() for record in way.trace()]

    def with_feedback(self, feedback: ErrorFeedback | None, name: str) -> TensorParallel:
        """This object with error feedback, for one place of a model.

        In directions with a lossy codec the residuals keep what encoding loses of this rank's
        tensor, and of its share of an all-reduced sum, and add it to the next tensor of that place,
        whatever batch that is of. A residual is named ``name.direction.collective``, such as
        ``"mlp.last.forward.all_reduce"``. It is float32 (float64 for float64), as large as the
        tensor, and starts at zero when its size changes, so batches should keep their shape. What
        ``wire`` rounds away is a part of it.

        Under ``no_grad`` and in inference mode residuals are not used or changed; all ranks are to
        be in the same mode. Tensors of other dtypes than floats have none. Activation checkpointing
        makes the forward calls twice, and the second, with other residuals, gives other results
        than the first.

        Args:
            feedback: Where the residuals are kept, one object per rank. None: no error feedback.
            name: Name of the place.

        Returns:
            An object with the same communicators.

        Raises:
            ValueError: If no codec is lossy, a lossy one does not sum two-shot, or calls are
                prepared (``route``).
        """
        comms = [way.comm for way in self._exact()]
        if feedback is not None and not comms:
            raise ValueError("feedback is given, and a route; allowed with it: route 'exact'")
        for comm in [comm for comm in comms if not comm.codec.lossless] or comms[:1]:
            check_feedback(feedback, comm)
        found = copy.copy(self)
        found._feedback, found._name = feedback, name
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def copy(self, x: Any) -> Any:
        """Identity; the gradient is the sum over ranks (f in TACO, figure 2).

        Also for replicated parameters that are applied to one rank's share of a sequence.

        Args:
            x: A tensor that all ranks have.

        Returns:
            ``x``.

        Raises:
            CollectiveError: In backward, if anything goes wrong on the wire.
        """
        return Collective.apply(x, _identity, self._sum("backward", x))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def all_reduce(self, x: Any) -> Any:
        """Sum over ranks; the gradient is the same on all ranks (g in TACO, figure 2).

        Args:
            x: This rank's term.

        Returns:
            The sum, of the same shape and dtype.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
        """
        return Collective.apply(x, self._sum("forward", x), self._unchanged())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def all_gather(self, x: Any, dim: int = 0) -> Any:
        """Concatenate the tensors of all ranks; the gradient is reduce-scattered.

        Args:
            x: This rank's part.
            dim: Dimension to concatenate along.

        Returns:
            The whole, ``world_size`` times as long along ``dim``.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
            ValueError: If ``x`` has no dimensions.
        """
        _need_dimension(x)
        gathered, scattered = self._gather("forward", x, dim), self._scatter("backward", x, dim)
        return Collective.apply(x, gathered, scattered)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def reduce_scatter(self, x: Any, dim: int = 0) -> Any:
        """Sum over ranks, and keep this rank's share; the gradient is all-gathered.

        Args:
            x: This rank's term.
            dim: Dimension that is divided into equal shares.

        Returns:
            This rank's share of the sum.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
            ValueError: If the size along ``dim`` cannot be divided, or ``x`` has no dimensions.
        """
        _need_dimension(x)
        scattered, gathered = self._scatter("forward", x, dim), self._gather("backward", x, dim)
        return Collective.apply(x, scattered, gathered)

    def check(self) -> None:
        """Raise what is wrong with calls so far; waits for them.

        Only prepared calls on a GPU, outside of training, may be wrong unnoticed. Call it behind a
        forward that no backward follows, before its result is used.

        Raises:
            CollectiveError: If a rank was late, or bytes were damaged.
        """
        if isinstance(self._forward, PreparedDirection):
            self._forward.judge()

    def close(self) -> None:
        """Free connections and memory. Later calls raise CollectiveError; counts stay."""
        for way in self._directions():
            way.close()

    def _open(self) -> list[ExactDirection]:
        return self._exact()

    def _directions(self) -> list[ExactDirection | PreparedDirection]:
        one = self._backward is self._forward
        return [self._forward] if one else [self._forward, self._backward]

    def _exact(self) -> list[ExactDirection]:
        return [way for way in self._directions() if isinstance(way, ExactDirection)]

    def _unchanged(self) -> Callable[[Any], Any]:
        """The gradient of a sum that all ranks have."""
        way = self._backward
        return way.unchanged if isinstance(way, PreparedDirection) else _identity

    def _way(self, direction: Direction) -> ExactDirection | PreparedDirection:
        return self._forward if direction == "forward" else self._backward

    def _fed_back(
        self, direction: Direction, collective: str, x: Any
    ) -> tuple[ErrorFeedback | None, str]:
        """The error feedback of a call that begins now with `x`, and the name in it."""
        way = self._way(direction)
        lossy = isinstance(way, ExactDirection) and not way.comm.codec.lossless
        training = torch.is_grad_enabled() and x.is_floating_point()
        feedback = self._feedback if training and lossy else None
        return feedback, f"{self._name}.{direction}.{collective}"

    def _travels(self, x: Any) -> Any:
        """The dtype that `x` travels in.

        Without feedback it is rounded to that first: a native call would not.
        """
        if self._wire is None or not x.is_floating_point() or x.element_size() <= 2:
            return x.dtype
        return getattr(torch, self._wire)

    def _sum(self, direction: Direction, like: Any) -> Callable[[Any], Any]:
        way = self._way(direction)
        feedback, name = self._fed_back(direction, "all_reduce", like)

        def run(x: Any) -> Any:
            x = x.detach().contiguous()
            out = torch.empty_like(x, dtype=self._travels(x))
            if feedback is None or not isinstance(way, ExactDirection):
                sent = x.to(out.dtype)
                way.all_reduce(sent, out)
            else:
                flat, parts = (x.view(-1), out.view(-1)), [(name, x.numel())]
                way.run(
                    out,
                    lambda: two_shots(way.comm, *flat, feedback, parts),
                    collectives_of_average("two-shot"),
                ).wait()
            return out.to(x.dtype)

        return run

    def _gather(self, direction: Direction, like: Any, dim: int) -> Callable[[Any], Any]:
        way = self._way(direction)
        feedback, name = self._fed_back(direction, "all_gather", like)

        def run(x: Any) -> Any:
            x = x.detach().movedim(dim, 0).contiguous()
            shape = (self.world_size * x.shape[0], *x.shape[1:])
            out = x.new_empty(shape, dtype=self._travels(x))
            if feedback is None or not isinstance(way, ExactDirection):
                sent = x.to(out.dtype)
                way.all_gather(sent, out)
            else:
                flat, parts = (x.view(-1), out.view(-1)), [(name, x.numel())]
                way.run(out, lambda: gather(way.comm, *flat, feedback, parts)).wait()
            return out.to(x.dtype).movedim(0, dim)

        return run

    def _scatter(self, direction: Direction, like: Any, dim: int) -> Callable[[Any], Any]:
        way = self._way(direction)
        feedback, name = self._fed_back(direction, "reduce_scatter", like)

        def run(x: Any) -> Any:
            x = x.detach().movedim(dim, 0).contiguous()
            travels = self._travels(x)
            shape = (x.shape[0] // self.world_size, *x.shape[1:])
            if feedback is None or not isinstance(way, ExactDirection):
                sent = x.to(travels)
                # Sums of what was narrowed stay in float32.
                out = x.new_empty(shape, dtype=x.dtype if sent is x else torch.float32)
                way.reduce_scatter(sent, out)
            else:
                out, parts = wide(math.prod(shape), x).view(shape), [(name, x.numel())]
                way.run(
                    out, lambda: scatter(way.comm, x, out, feedback, parts, dtype=travels)
                ).wait()
            return out.to(x.dtype).movedim(0, dim)

        return run


def connect(
    forward: str | Codec | None,
    backward: str | Codec | None,
    *,
    group: Any = None,
    device: Any = "cpu",
    wire: str | None = None,
    route: Route = "exact",
    node: int | None = None,
    within: str | Codec | None = None,
    **options: Any,
) -> TensorParallel:
    """Make tensor parallelism of the ranks of a process group.

    All ranks of the group call it; each direction gets connections of its own.

    Args:
        forward: Codec of activations; None sends them as they are.
        backward: Codec of their gradients; None sends them as they are.
        group: The process group; None: the default one.
        device: Device of the tensors.
        wire: As in ``TensorParallel``.
        route: How bytes travel, as in ``fsdp.compress``. With another than ``"exact"`` options are
            ``checksum``, ``seed`` and ``trace``, the group itself is used, and there are neither
            error feedback nor nodes.
        node: Ranks of a node, whose numbers in the group are consecutive: calls are as they are
            within nodes, and encoded between nodes, as ``NodeCommunicator`` says.
        within: With ``node``: a codec of terms of sums within nodes.
        **options: Arguments of ``Communicator``, for both directions, of nodes that between them.

    Returns:
        The object that layers take.

    Raises:
        TypeError: As ``Communicator``.
        ValueError: As ``Communicator`` and ``TensorParallel``.
        CollectiveError: If ranks differ, or do not all call it within the timeout.
    """
    check_route(route, options)
    if route != "exact":
        if (node, within) != (None, None):
            raise ValueError(
                f"route is {route!r}, given with node or within; allowed with those: 'exact'"
            )
        made = functools.partial(PreparedDirection, route, group, **options)
        there = made(native=forward is None, codec=forward or "raw")
        back = made(native=backward is None, codec=backward or "raw", other=there)
        return TensorParallel._prepared(there, back, wire)
    purpose = "tensor_parallel.connect"
    directions = forward, backward, group, device, options, node, within
    comms = two_communicators(purpose, *directions, route="exact")
    return TensorParallel(*comms, wire=wire)


class ColumnParallelLinear(torch.nn.Module):  # type: ignore[misc]
    """This rank's output features of a linear layer: ``(..., in)`` to ``(..., out / world_size)``.

    The gradient of the input is all-reduced. With ``sequence_dim`` the input is this rank's share
    along that dimension: it is all-gathered, and its gradient reduce-scattered.

    Source: Megatron-LM; TACO, section 2.1 and figure 2.

    Args:
        linear: An ``nn.Linear``, equal on all ranks, whose share is copied.
        parallel: The ranks.
        parts: Number of matrices that are stacked in the weight, each of which is divided: 3 where
            query, key and value are one layer.
        sequence_dim: Dimension of the sequence. None: no sequence parallelism.

    Raises:
        ValueError: If the output features cannot be divided.
    """

    def __init__(
        self,
        linear: Any,
        parallel: TensorParallel,
        *,
        parts: int = 1,
        sequence_dim: int | None = None,
    ) -> None:
        super().__init__()
        self._parallel = self._training_parallel = parallel
        self._sequence_dim = sequence_dim
        self.weight = _share(linear.weight, 0, parallel, parts)
        bias = linear.bias
        self.bias = None if bias is None else _share(bias, 0, parallel, parts)

    def forward(self, x: Any) -> Any:
        """Apply the layer.

        Args:
            x: Shape ``(..., in)``, equal on all ranks, or with ``sequence_dim`` a share of it.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
        """
        parallel = self._training_parallel if self.training else self._parallel
        if self._sequence_dim is None:
            x = parallel.copy(x)
        else:
            x = parallel.all_gather(x, self._sequence_dim)
        return torch.nn.functional.linear(x, self.weight, self.bias)


class RowParallelLinear(torch.nn.Module):  # type: ignore[misc]
    """This rank's input features of a linear layer: ``(..., in / world_size)`` to ``(..., out)``.

    The output is all-reduced. With ``sequence_dim`` it is reduce-scattered along that dimension,
    and its gradient all-gathered. The bias is added after that, once.

    Source: Megatron-LM; TACO, section 2.1 and figure 2.

    Args:
        linear: An ``nn.Linear``, equal on all ranks, whose share is copied.
        parallel: The ranks.
        sequence_dim: Dimension of the sequence. None: no sequence parallelism.

    Raises:
        ValueError: If the input features cannot be divided.
    """

    def __init__(
        self, linear: Any, parallel: TensorParallel, *, sequence_dim: int | None = None
    ) -> None:
        super().__init__()
        self._parallel = self._training_parallel = parallel
        self._sequence_dim = sequence_dim
        self.weight = _share(linear.weight, 1, parallel)
        bias = linear.bias
        self.bias = None if bias is None else _parameter(bias, bias.requires_grad)

    def forward(self, x: Any) -> Any:
        """Apply the layer.

        Args:
            x: Shape ``(..., in / world_size)``: the output of a column-parallel layer.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
        """
        parallel = self._training_parallel if self.training else self._parallel
        y = torch.nn.functional.linear(x, self.weight)
        bias = self.bias
        if self._sequence_dim is None:
            y = parallel.all_reduce(y)
        else:
            y = parallel.reduce_scatter(y, self._sequence_dim)
            # Each rank sees the gradients of its own share only.
            bias = None if bias is None else parallel.copy(bias)
        return y if bias is None else y + bias


def set_error_feedback(model: Any, feedback: ErrorFeedback | None) -> None:
    """Set or remove error feedback of the column- and row-parallel linears of a model.

    All ranks call it. Residuals are named by the layers, as ``TensorParallel.with_feedback`` says:
    of the output of a row-parallel linear "mlp.last" the residual is
    ``"mlp.last.forward.all_reduce"``, with ``sequence_dim`` ``"mlp.last.forward.reduce_scatter"``.
    Layers in evaluation mode (``layer.eval()``) do not use or change residuals, not for gradients
    either.

    Args:
        model: The model.
        feedback: Each rank passes an object of its own, whose ``state_dict()`` belongs into the
            rank's checkpoint. None removes error feedback.

    Raises:
        ValueError: If ``model`` has no such layers, or as ``TensorParallel.with_feedback``; nothing
            is then set.
    """
    kinds = (ColumnParallelLinear, RowParallelLinear)
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]
    if not layers:
        allowed = " and ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"model has no layers to give error feedback; allowed: {allowed}")
    given = [layer._parallel.with_feedback(feedback, name) for name, layer in layers]
    for (_, layer), parallel in zip(layers, given, strict=True):
        layer._training_parallel = parallel


def _need_dimension(x: Any) -> None:
    if x.dim() == 0:
        raise ValueError("x has shape (); allowed: at least one dimension")


def _identity(x: Any) -> Any:
    return x.view_as(x)


def _parameter(x: Any, requires_grad: bool) -> Any:
    return torch.nn.Parameter(x.detach().clone(), requires_grad)


def _share(x: Any, dim: int, parallel: TensorParallel, parts: int = 1) -> Any:
    """A parameter: this rank's share along `dim` of each of the `parts` of the parameter x."""
    size = x.shape[dim]
    if size % (parts * parallel.world_size):
        allowed = f"a multiple of {parts} parts times {parallel.world_size} ranks"
        raise ValueError(f"linear has {size} features to divide; allowed: {allowed}")
    shares = x.unflatten(dim, (parts, parallel.world_size, -1))
    return _parameter(shares.select(dim + 1, parallel.rank).flatten(dim, dim + 1), x.requires_grad)
