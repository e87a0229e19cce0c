"""Mixtures of experts: tokens travel encoded to the ranks of their experts, and results back.

To try it, run ``torchrun --nproc-per-node 2 example.py`` with::

    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from tightwire import moe

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    parallel = moe.connect(4, "zipccl", "mx")
    torch.manual_seed(0)
    router = torch.nn.Linear(64, 4, bias=False)
    experts = [torch.nn.Linear(64, 64) for _ in range(4)]
    layer = moe.MixtureOfExperts([experts[i] for i in parallel.local_experts], parallel)
    x = torch.randn(100, 64, requires_grad=True)
    layer(x, router(x)).square().mean().backward()
    print(parallel.raw_bytes, parallel.wire_bytes)
    dist.destroy_process_group()

Every rank has as many experts, and tokens of its own. Of a token that goes to several experts each
gets a copy. No capacity is set: all tokens arrive, and rows are not padded.

What the host waits for: in ``dispatch`` for the numbers of rows, which other ranks tell (with
``node=`` twice: between nodes, then within); with a lossless codec in each exchange for what
messages need, while they are in flight. With a lossy codec ``combine`` and both backward exchanges
only queue work.

Source: Mixtral of Experts (2024), section 2.1, for the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...codec import Codec
from ...planning import integer
from ..collectives import tensors
from ..collectives.arguments import shares_of
from ..collectives.calls import TraceRecord
from ..collectives.nodes import AnyCommunicator
from ..transports.peer import PeerMemory
from ..transports.torch_dist import TorchDist
from . import weighted_rows
from .expert_rows import Copies, Order, Rows, Splits, rows_of
from .hooks import Channel, Closing, Collective, finished, two_communicators
from .prepared_hooks import Peers, peers_of
from .resident_experts import ResidentDispatched as ResidentDispatched
from .resident_experts import ResidentExperts as ResidentExperts


class Routing(NamedTuple):
    """Which experts get each token of a rank, and what their results count.

    Attributes:
        experts: Numbers from 0 on: int64, shape ``(tokens, top_k)``.
        weights: What results are multiplied by: floats, shape ``(tokens, top_k)``.
    """

    experts: Any
    weights: Any


def route(logits: Any, top_k: int, *, normalize: bool = True) -> Routing:
    """Choose experts by the router's logits, as Mixtral does, in float32 (float64 for float64).

    Args:
        logits: Shape ``(tokens, experts)``.
        top_k: Experts of each token.
        normalize: Divide the weights of a token, which the softmax over all experts gives, by their
            sum.

    Returns:
        The routing; gradients go through its weights.

    Raises:
        ValueError: If ``logits`` is not of two dimensions, or ``top_k`` above its experts.
    """
    if logits.dim() != 2 or not 1 <= integer("top_k", top_k) <= logits.shape[1]:
        raise ValueError(
            f"logits have shape {list(logits.shape)}, top_k is {top_k}; allowed: (tokens, experts) "
            "and top_k from 1 to experts"
        )
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights, experts = torch.softmax(logits, -1, dtype=wide).topk(top_k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights)


class Dispatched(NamedTuple):
    """The tokens that the experts of this rank have received.

    Attributes:
        rows: Shape ``(rows, ...)``: those of the first local expert first; within one those from
            rank 0 first, in the order of their tokens.
        counts: Rows of each local expert.
        counts_on_device: The same as int64, shape ``(local experts,)``, on the device of ``rows``.
        routing: What this rank's tokens were sent by.
        splits: How many rows have gone which way.
        sent_order: Copies of tokens, in the order of their experts.
    """

    rows: Any
    counts: list[int]
    counts_on_device: Any
    routing: Routing
    splits: Splits
    sent_order: Order

    @property
    def sends(self) -> list[int]:
        """Rows that this rank has sent to each rank."""
        return self.splits.sends

    @property
    def receives(self) -> list[int]:
        """Rows from each rank."""
        return self.splits.receives


class AllToAll(Closing):
    """Ranks whose all-to-alls autograd differentiates, with a codec for each direction.

    All ranks make the same calls in the same order, forward and backward. A context manager, which
    ends with ``close()``.

    Args:
        forward: Communicator of what is sent, used by nothing else. It may be one of nodes.
        backward: Communicator of its gradients, of the same ranks. None: the same one.

    Raises:
        ValueError: If ranks of the communicators differ.
        CollectiveError: By calls, if anything goes wrong on the wire.
    """

    def __init__(self, forward: AnyCommunicator, backward: AnyCommunicator | None = None) -> None:
        backward = forward if backward is None else backward
        places = [(comm.rank, comm.world_size) for comm in (forward, backward)]
        if places[0] != places[1]:
            raise ValueError(f"rank and world size are {places[0]} forward, {places[1]} backward")
        self._forward = Channel(forward)
        self._backward = self._forward if backward is forward else Channel(backward)
        self.rank, self.world_size = places[0]

    #: The process group, None where it is not known.
    _group: Any = None

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks without compression so far."""
        return sum(channel.raw_bytes for channel in self._open())

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks so far."""
        return sum(channel.wire_bytes for channel in self._open())

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls: those of forward, then those of backward if it has its own."""
        return [record for channel in self._open() for record in channel.comm.trace()]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """As ``torch.distributed.all_to_all_single``, and gradients go from output to input.

        ``output`` is filled in place, and becomes part of the graph.

        Args:
            output: Contiguous, of the dtype of ``input``: rows from rank 0 first.
            input: Rows for rank 0 first. It needs a gradient on all ranks or on none: nothing
                compares that, and ranks that need one wait in backward for those that do not.
            output_split_sizes: Rows from each rank. None: equal shares. On a GPU all ranks give
                splits, or none does.
            input_split_sizes: Rows for each rank. None: equal shares.
            group: The group that this object was made of, or None.
            async_op: Return a Work, which is done.

        Returns:
            ``output``, or the Work.

        Raises:
            CollectiveError: If anything goes wrong on the wire, or splits of two ranks differ.
            ValueError: If splits do not add up, ``output`` does not fit, or ``group`` is another.
        """
        if group is not None and group is not self._group:
            raise ValueError(f"group is {group}; allowed: that of this object, or None")
        splits = output_split_sizes, input_split_sizes
        # On the host calls with splits are as cheap, and other ranks may give some. An empty list
        # stands for none in PyTorch.
        equal = input.device.type != "cpu" and not any(splits)
        ranks, here = self.world_size, self._here
        sends = shares_of("input_split_sizes", splits[1], "input", input.shape, ranks, here)
        receives = shares_of("output_split_sizes", splits[0], "output", output.shape, ranks, here)
        there = {} if equal else {"send_splits": sends, "receive_splits": receives}
        back = {} if equal else {"send_splits": receives, "receive_splits": sends}

        def run(x: Any, out: Any) -> Any:
            comm, x = self._forward.comm, x.detach().contiguous()
            return self._forward.run(out, lambda: comm.all_to_all(x, out.detach(), **there))

        def run_back(x: Any) -> Any:
            comm, x = self._backward.comm, x.contiguous()
            out = x.new_empty((sum(sends), *x.shape[1:]))
            self._backward.run(out, lambda: comm.all_to_all(x, out, **back)).wait()
            return out

        _Filled.apply(output, input, lambda x, out: run(x, out).wait(), run_back)
        if async_op:
            done: Any = torch.futures.Future()
            done.set_result(output)
            return finished(done, async_op)
        return output

    @property
    def _here(self) -> str:
        name = self._forward.comm.name
        return f"rank {self.rank}" + (f" of {name!r}" if name else "")

    def _open(self) -> list[Channel]:
        one = self._backward is self._forward
        return [self._forward] if one else [self._forward, self._backward]


#: What is wrong with a routing: bits of a fault.
_FAULTS = ("numbers of experts are out of range", "router weights are not all finite")


class ExpertParallel(AllToAll):
    """Ranks that share the experts of a layer: rank 0 has the first ones, and all have as many.

    ``dispatch`` sends tokens to experts, and ``combine`` their results back. Shapes of rows and
    dtypes are equal on all ranks; numbers of tokens, and of experts of a token, need not be.
    Another object of the same ranks may combine what this one has dispatched, with other codecs.

    Args:
        forward: Communicator of tokens and results, used by nothing else. It may be one of nodes:
            tokens go to the rank of this number in another node, and results come from there.
        backward: Communicator of their gradients, of the same ranks and nodes. None: the same one.
        experts: Experts of all ranks, a multiple of their number.
        peers: Memory that the ranks can read from one another: what is encoded is read there, and
            the communicators tell numbers of rows. None: they move all.

    Raises:
        ValueError: If ranks of the communicators differ, experts cannot be divided, or peers are
            given with nodes.
        CollectiveError: On each rank, if experts differ; by calls, if anything goes wrong on the
            wire.
    """

    #: Why ``connect`` with the route "auto" did not take peers' memory; ``""`` if it did.
    why_no_peers: str = ""

    def __init__(
        self,
        forward: AnyCommunicator,
        backward: AnyCommunicator | None = None,
        *,
        experts: int,
        peers: PeerMemory | None = None,
    ) -> None:
        super().__init__(forward, backward)
        if integer("experts", experts) < 1 or experts % self.world_size:
            raise ValueError(
                f"experts is {experts}; allowed: multiples of {self.world_size}, the ranks"
            )
        self.experts = int(experts)
        self._there = self._back = rows_of(self._forward, self.experts, _FAULTS, peers)
        if self._backward is not self._forward:
            self._back = rows_of(self._backward, self.experts, _FAULTS, peers)
        if self._there.grid != self._back.grid:
            raise ValueError(
                f"nodes and their ranks are {self._there.grid} forward, {self._back.grid} backward"
            )

    @property
    def local_experts(self) -> range:
        """Numbers of this rank's experts."""
        each = self.experts // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, x: Any, routing: Routing) -> Dispatched:
        """Send every token to its experts.

        Args:
            x: This rank's tokens, shape ``(tokens, ...)``. It needs a gradient on all ranks or on
                none.
            routing: Their experts, and the weights of these.

        Returns:
            The rows for the experts of this rank, with gradients to the tokens.

        Raises:
            CollectiveError: On every rank, naming those whose routing has numbers of no expert, or
                weights that are NaN or infinite: nothing but counts was sent then, and the next
                call is fine. Also if ranks dispatch other rows, or anything goes wrong on the wire.
            TypeError: If an argument has a wrong type.
            ValueError: If shapes or devices do not fit.
        """
        _check_routing(x, routing)
        copies = self._there.copies(*routing)
        known: list[Any] = []

        def know(splits: Splits) -> None:
            counts = splits.table.sum(0)
            on_device = tensors.on_device(counts, x.device)
            known.extend((splits, counts.tolist(), on_device, self._there.inverse(copies)))

        rows = _Copied.apply(x, self._there, self._back, copies, know, known)
        splits, counts, on_device, inverse = known
        order = Order(copies.index, inverse)
        return Dispatched(rows, counts, on_device, routing, splits, order)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, y: Any, dispatched: Dispatched) -> Any:
        """Send the results of experts back, and add up those of each token by its weights.

        Sums are of results and weights in the dtype of ``y``: in float32 and rounded once by a
        kernel, where there is one, else by PyTorch.

        Args:
            y: The results for ``dispatched.rows``, in that order: shape ``(rows, width)``. They are
                computed from these rows, also where there are none: gradients of other ranks'
                tokens come by the way that they have gone.
            dispatched: What ``dispatch`` has returned on this rank.

        Returns:
            Shape ``(tokens, width)``, with gradients to ``y`` and to the weights.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
            TypeError: If ``y`` has integers, which no weights could multiply.
            ValueError: If ``y`` does not fit, or does not depend on rows that need a gradient.
        """
        rows = dispatched.rows
        if not (y.is_floating_point() or y.is_complex()):
            raise TypeError(f"y is {y.dtype} on {self._here}; allowed: floats")
        if y.dim() != 2 or y.shape[0] != rows.shape[0] or y.device != rows.device:
            raise ValueError(
                f"y has shape {list(y.shape)} on {y.device} and {self._here}; needed: "
                f"({rows.shape[0]}, width) on {rows.device}"
            )
        if dispatched.splits.grid != self._there.grid:
            raise ValueError(
                f"dispatched has gone by nodes and ranks {dispatched.splits.grid}, {self._here} "
                f"has {self._there.grid}; needed: equal ones"
            )
        if rows.requires_grad and torch.is_grad_enabled() and not y.requires_grad:
            raise ValueError(
                f"y does not depend on the rows dispatched to {self._here}, which need a gradient; "
                "needed: results that are computed from them, also of experts without tokens"
            )
        there, back, splits = self._there, self._back, dispatched.splits
        y = Collective.apply(
            y,
            lambda y: there.move(y.detach().contiguous(), splits, back=True),
            lambda gradient: back.move(gradient.contiguous(), splits),
        )
        return weighted_rows.summed(y, dispatched.routing.weights, dispatched.sent_order)


class MixtureOfExperts(torch.nn.Module):  # type: ignore[misc]
    """The sparse layer of Mixtral and others, whose experts are shared out to ranks.

    Parameters of experts are those of one rank alone: data-parallel wrappers must not average them.

    Args:
        experts: This rank's experts, ``parallel.local_experts`` in this order: modules that map
            ``(rows, hidden)`` to ``(rows, width)``, also with no rows.
        parallel: The ranks.
        top_k: Experts of each token.
        normalize: As in ``route``.

    Raises:
        ValueError: If there is another number of experts than this rank has.
    """

    def __init__(
        self,
        experts: Iterable[Any],
        parallel: ExpertParallel,
        *,
        top_k: int = 2,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(experts)
        if len(self.experts) != len(parallel.local_experts):
            raise ValueError(
                f"experts are {len(self.experts)} on rank {parallel.rank}; needed: "
                f"{len(parallel.local_experts)}, numbers {parallel.local_experts}"
            )
        self._parallel, self._top_k, self._normalize = parallel, top_k, normalize

    def forward(self, x: Any, logits: Any) -> Any:
        """Apply the layer.

        Args:
            x: This rank's tokens, shape ``(..., hidden)``.
            logits: What the router makes of them, shape ``(..., experts)``.

        Returns:
            Shape ``(..., width)``.

        Raises:
            CollectiveError: If anything goes wrong on the wire, or logits are NaN on any rank.
            ValueError: If shapes do not fit.
        """
        if x.dim() < 2 or tuple(logits.shape) != (*x.shape[:-1], self._parallel.experts):
            raise ValueError(
                f"x has shape {list(x.shape)}, logits {list(logits.shape)}; needed: (..., hidden) "
                f"and (..., {self._parallel.experts})"
            )
        routing = route(logits.flatten(0, -2), self._top_k, normalize=self._normalize)
        came = self._parallel.dispatch(x.flatten(0, -2), routing)
        parts = came.rows.split(came.counts)
        # Experts without tokens too: what they return connects the graph, their gradients are 0.
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return self._parallel.combine(y, came).unflatten(0, x.shape[:-1])


def connect(
    experts: int,
    forward: str | Codec | None = "zipccl",
    backward: str | Codec | None = "zipccl",
    *,
    group: Any = None,
    device: Any = "cpu",
    node: int | None = None,
    route: Literal["network", "peers", "auto"] = "network",
    **options: Any,
) -> ExpertParallel:
    """Make expert parallelism of the ranks of a process group.

    All ranks of the group call it; each direction gets connections of its own.

    Args:
        experts: Experts of all ranks, a multiple of their number.
        forward: Codec of tokens and results, such as ``"zipccl"``, ``"taco"`` or ``"mx"``; None
            sends them as they are.
        backward: Codec of their gradients; None sends them as they are.
        group: The process group; None: the default one.
        device: Device of the tensors.
        node: Ranks of a node, whose numbers are consecutive: rows travel as they are within nodes,
            and encoded between nodes, a token once to all its experts of a node. Results and
            gradients of its copies travel each.
        route: ``"network"`` sends messages; by ``"peers"`` the GPUs of a host read one another's
            memory, not with ``node``; ``"auto"`` takes peers where it can, and not if
            ``NCCL_P2P_DISABLE`` is set. If it does not, ``why_no_peers`` of the result, and the
            logger "tightwire" at level INFO, say why.
        **options: Arguments of ``Communicator``, for both directions, of nodes that between them.

    Returns:
        The object that dispatches and combines.

    Raises:
        TypeError: As ``Communicator``.
        ValueError: As ``Communicator`` and ``ExpertParallel``.
        CollectiveError: If ranks differ, or do not all call it within the timeout.
        RuntimeError: If the ranks cannot read one another's memory by ``"peers"``.
    """
    if route not in ("network", "peers", "auto") or (node is not None and route == "peers"):
        raise ValueError(
            f"route is {route!r}, node {node}; allowed: 'network', 'auto', 'peers' without node"
        )
    purpose = "moe.connect"
    TorchDist.meet(group, device, f"{purpose}, route {route!r}")
    if node is None:
        peers = peers_of(route, group, torch.device(device), purpose)
    else:
        peers = Peers(None, "node= is given" if route == "auto" else "")
    comms = two_communicators(purpose, forward, backward, group, device, options, node)
    found = ExpertParallel(*comms, experts=experts, peers=peers.memory)
    found.why_no_peers = peers.why_not
    found._group = dist.group.WORLD if group is None else group
    return found


def connect_resident(
    experts: int,
    forward: str | Codec | None = None,
    backward: str | Codec | None = None,
    *,
    tokens: int,
    top_k: int,
    hidden: int,
    dtype: Any = torch.bfloat16,
    capacity: int | None = None,
    clear: bool = True,
    group: Any = None,
    device: Any = "cuda",
) -> ResidentExperts:
    """Make experts whose exchanges never wait for the host, of the GPUs of one host.

    All ranks of the group call it. It opens no connections.

    Args:
        experts: As ``ResidentExperts``.
        forward: The same.
        backward: The same.
        tokens: The same.
        top_k: The same.
        hidden: The same.
        dtype: The same.
        capacity: The same.
        clear: The same.
        group: The process group; None: the default one.
        device: This rank's GPU.

    Returns:
        The object that dispatches and combines.

    Raises:
        ValueError: As ``ResidentExperts``, or if the device is not a GPU.
        CollectiveError: If ranks prepare different things, or do not all call it within the
            timeout.
        RuntimeError: If the ranks cannot read one another's memory.
    """
    place = torch.device(device)
    if place.type != "cuda":
        raise ValueError(f"device is {device}; allowed: a GPU")
    if place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    TorchDist.meet(group, place, "moe.connect_resident")
    memory = peers_of("peers", group, place, "moe.connect_resident").memory
    assert memory is not None
    return ResidentExperts(
        memory,
        experts=experts,
        tokens=tokens,
        top_k=top_k,
        hidden=hidden,
        dtype=dtype,
        capacity=capacity,
        forward=forward,
        backward=backward,
        device=place,
        clear=clear,
    )


def connect_all_to_all(
    forward: str | Codec | None = "zipccl",
    backward: str | Codec | None = "zipccl",
    *,
    group: Any = None,
    device: Any = "cpu",
    node: int | None = None,
    **options: Any,
) -> AllToAll:
    """Make all-to-alls of the ranks of a process group, for code that has its own layers.

    All ranks of the group call it; each direction gets connections of its own.

    Args:
        forward: Codec of what is sent; None sends it as it is.
        backward: Codec of its gradients; None sends them as they are.
        group: The process group; None: the default one.
        device: Device of the tensors.
        node: As in ``connect``; rows go by way of the rank of the receiver's number in this node.
        **options: Arguments of ``Communicator``, for both directions, of nodes that between them.

    Returns:
        The object whose ``all_to_all_single`` takes the place of PyTorch's.

    Raises:
        TypeError: As ``Communicator``.
        ValueError: As ``Communicator``.
        CollectiveError: If ranks differ, or do not all call it within the timeout.
    """
    purpose = "moe.connect_all_to_all"
    comms = two_communicators(purpose, forward, backward, group, device, options, node)
    found = AllToAll(*comms)
    found._group = dist.group.WORLD if group is None else group
    return found


class _Filled(torch.autograd.Function):  # type: ignore[misc]
    """`output`, which `fill(x, output)` has filled; the gradient of `x` is `backward` of its."""

    @staticmethod
    def forward(ctx: Any, output: Any, x: Any, fill: Any, backward: Any) -> Any:
        ctx.mark_dirty(output)
        ctx.of_gradient = backward
        fill(x, output)
        return output

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        return None, ctx.of_gradient(gradient), None, None


class _Copied(torch.autograd.Function):  # type: ignore[misc]
    """The copies that arrive of those of `x` that `there` sends; gradients come by `back`.

    `know` adds to `known`: how many go which way, last the inverse of their order.

    The gradient of a row is the sum over its copies, in the order of their experts' ranks among
    the `top_k`: the same bits every time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        there: Rows,
        back: Rows,
        copies: Copies,
        know: Callable[[Splits], None],
        known: list[Any],
    ) -> Any:
        found, splits = there.spread(x.detach(), copies, know)
        ctx.save_for_backward(known[-1])
        ctx.top_k = copies.choices.shape[1]
        ctx.back, ctx.splits = back, splits
        return found

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        found = ctx.back.move(gradient.contiguous(), ctx.splits, back=True)
        kernels = weighted_rows.kernels_for(found) if found.dim() == 2 else None
        if kernels is not None:
            with torch.cuda.device_of(found):
                return kernels.weighted_sum(found, None, inverse, ctx.top_k), *[None] * 5
        copies = found.index_select(0, inverse).unflatten(0, (-1, ctx.top_k))
        return copies.sum(1), *[None] * 5


def _check_routing(x: Any, routing: Routing) -> None:
    """Raise TypeError or ValueError for what no rank can send."""
    experts, weights = routing
    if not all(isinstance(t, torch.Tensor) for t in (x, experts, weights)):
        kinds = ", ".join(type(t).__name__ for t in (x, experts, weights))
        raise TypeError(f"x, experts and weights are {kinds}; allowed: tensors of PyTorch")
    if experts.dtype != torch.int64 or not weights.is_floating_point():
        raise TypeError(
            f"experts are {experts.dtype}, weights {weights.dtype}; needed: torch.int64 and floats"
        )
    shape = tuple(experts.shape)
    fits = x.dim() >= 2 and len(shape) == 2 and shape[0] == x.shape[0] and shape[1] >= 1
    if not fits or tuple(weights.shape) != shape:
        raise ValueError(
            f"x has shape {list(x.shape)}, experts {list(shape)}, weights {list(weights.shape)}; "
            "needed: (tokens, ...), and (tokens, top_k) twice"
        )
    if not x.device == experts.device == weights.device:
        raise ValueError(
            f"x is on {x.device}, experts on {experts.device}, weights on {weights.device}; "
            "needed: one device"
        )
