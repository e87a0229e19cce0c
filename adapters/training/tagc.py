"""Gradients of large layers by index and sketch, for FSDP2 and DistributedDataParallel.

After TAGC (EuroMLSys '25), algorithm 1. To try it, run ``torchrun --nproc-per-node 2 train.py``
with::

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from tightwire import tagc

    model = torch.nn.Sequential(torch.nn.Linear(512, 999), torch.nn.ReLU(), torch.nn.Linear(999, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    hooks = tagc.compress(model, tagc.Tagc(ratio=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 512), torch.randint(8, (64,))
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item(), hooks.reduce_scatter.wire_bytes / hooks.reduce_scatter.raw_bytes)

``hooks.state.reports`` has the numbers of peeled, estimated and lost elements of each layer and
step.

Layers that ``Tagc.layers`` does not select, and parameters, are sent by the codec of a
``Communicator``, which is lossless by default.

On the CPU backward waits for the hooks, and nothing overlaps. On a GPU the hook of a unit has a
stream of its own, which follows its gradients: sparsification, index and sketch overlap the
all-gather of the next unit's parameters, which FSDP has queued before, and the queued part of the
backward pass. The host waits for sums before backward returns, and then adds their reports. For the
agreed index of a unit it waits in the first step only. With ``fallback`` it waits in the hook: for
the diagnosis before it sends, the index and the sums. Where the codec lhc has no kernels, index,
sketch and peeling are on the host.
"""

# DDP compares the annotations of a hook, which must therefore not be strings.
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
import torch.distributed as dist

from ..collectives import tensors
from ..collectives.calls import TraceRecord
from ..collectives.communicator import Communicator
from ..collectives.nodes import AnyCommunicator, NodeCommunicator
from .fsdp import AllGather, CommHook, fsdp_modules
from .hooks import (
    NOT_CONNECTED,
    Channel,
    Closing,
    Connecting,
    average,
    check_gradients,
    check_nodes,
    check_options,
    distributed,
    finished,
    in_backward,
    install,
    raise_at_the_end,
    trained_device,
    wide,
)
from .layers import Rule
from .leaving import Communication, param_groups, remove, take_replicas
from .prepared_fsdp import PreparedGather, kind_and_factor
from .prepared_hooks import EndOfBackward, Route, check_route
from .sketches import Report, Sketches, State, Tagc

__all__ = [
    "DdpHook",
    "Hooks",
    "Parameter",
    "ReduceScatter",
    "Report",
    "Rule",
    "State",
    "Tagc",
    "compress",
    "ddp_hook",
    "register",
]


class Parameter(NamedTuple):
    """A parameter of an FSDP module.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        nelem: Number of padded elements of a rank's share.
    """

    name: str
    shape: Sequence[int]
    nelem: int


class _Counted:
    """A communicator that adds up the bytes of its calls, which remembers one at least."""

    def __init__(self, comm: AnyCommunicator) -> None:
        self._comm = comm
        self.raw_bytes = 0
        self.wire_bytes = 0
        self._next = 0
        for record in comm.trace(last=1):
            self._next = record.sequence + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather(self, *args: Any, **options: Any) -> Any:
        return self._call(self._comm.all_gather, args, options)

    def all_reduce(self, *args: Any, **options: Any) -> Any:
        return self._call(self._comm.all_reduce, args, options)

    def reduce_scatter(self, *args: Any, **options: Any) -> Any:
        return self._call(self._comm.reduce_scatter, args, options)

    def _call(self, collective: Callable[..., Any], args: Any, options: Any) -> Any:
        try:
            return collective(*args, **options)
        finally:
            for record in self._comm.trace(last=1):
                # A call that was refused has no record.
                if record.sequence >= self._next:
                    self._next = record.sequence + 1
                    self.raw_bytes += record.raw_bytes
                    self.wire_bytes += record.wire_bytes


class _Sums:
    """Sums over the ranks of a communicator, of some layers by sketch; bytes of both count.

    Of nodes sketches are those of sums of a node, and go between nodes.
    """

    def __init__(self, comm: AnyCommunicator, tagc: Tagc, state: State) -> None:
        # Like communicators.
        self.comm = cast(Any, _Counted(comm))
        self._nodes = comm if isinstance(comm, NodeCommunicator) else None
        self._peers = self.comm if self._nodes is None else cast(Any, _Counted(self._nodes.between))
        self.sketches = Sketches(self._peers, tagc, state)

    @property
    def raw_bytes(self) -> int:
        return sum(counted.raw_bytes for counted in self._counted)

    @property
    def wire_bytes(self) -> int:
        return sum(counted.wire_bytes for counted in self._counted)

    @property
    def _counted(self) -> list[Any]:
        return [self.sketches, self.comm, *([] if self._nodes is None else [self._peers])]

    @property
    def in_one_node(self) -> bool:
        """Whether there are nodes, and all ranks are in one."""
        return self._nodes is not None and self._nodes.between.world_size == 1

    def obstacle(self, nelem: int, dtype: torch.dtype) -> str:
        """Why a layer with so many elements for each rank does not go by sketch, or ""."""
        if self.in_one_node:
            return "there is one node"
        return self.sketches.obstacle(nelem, dtype)

    def by_sketch(self, layers: Sequence[tuple[str, Any]], everywhere: bool = False) -> list[Any]:
        """`Sketches.sums`, where of nodes a layer has a row for each rank of the whole."""
        nodes = self._nodes
        if nodes is None:
            return self.sketches.sums(layers, everywhere)
        found = self.sketches.sums([(name, _node_sum(nodes, x)) for name, x in layers], everywhere)
        if not everywhere:
            return found
        return [nodes.spread_in_node(x.view(-1)).view(nodes.world_size, -1) for x in found]

    def average(self, x: Any, parts: Sequence[tuple[str, bool, int]], missing: str = "") -> None:
        """Overwrite the flat gradients `x` with their mean over the ranks; layers go by sketch.

        `parts` are those of `x`: names, whether they are layers to sketch, and sizes. With
        `missing`, a reason, `x` has others, and none goes by sketch.
        """
        ranks, state = self.comm.world_size, self.sketches.state
        layers, places, others, at = [], [], [], 0
        for name, chosen, n in parts:
            part = x[at : at + n]
            at += n
            if chosen:
                share = -(-n // ranks)
                obstacle = missing or self.obstacle(share, x.dtype)
                if not obstacle:
                    padded = torch.nn.functional.pad(part, (0, share * ranks - n))
                    layers.append((name, padded.view(ranks, share)))
                    places.append(part)
                    continue
                _skip(state, name, n, obstacle)
            others.append(part)
        if missing:
            others = [x]
        self.sketches.agree([name for name, _, _ in parts], [name for name, _ in layers])
        sums = self.by_sketch(layers, everywhere=True)
        for part, total in zip(places, sums, strict=True):
            part.copy_(total.div_(ranks).view(-1)[: part.numel()])
        if others:
            rest = torch.cat(others)
            average(self.comm, rest)
            for part, mean in zip(others, rest.split([o.numel() for o in others]), strict=True):
                part.copy_(mean)


def _node_sum(nodes: NodeCommunicator, x: Any) -> Any:
    """The sum over this node of rows that ranks of this number own, rounded to the dtype of `x`."""
    total = wide(x.shape[1] * nodes.between.world_size, x)
    nodes.sum_of_node(x, total)
    return total.to(x.dtype).view(-1, x.shape[1])


class ReduceScatter(CommHook):
    """The reduce-scatters of all FSDP modules of a model. ``compress`` makes it and its units.

    Args:
        tagc: The settings.
        state: The state of this rank.
        node: As in ``compress``.
        gathers: The hook of the same modules' parameters, if it makes prepared calls: they are
            judged before backward returns.
        **options: Arguments of ``Communicator``, for what is not sent by sketch. Bytes are counted
            whatever ``trace`` is.

    Raises:
        TypeError: As ``Communicator``.
        ValueError: As ``Communicator``.
    """

    def __init__(
        self,
        tagc: Tagc,
        state: State,
        *,
        node: int | None = None,
        gathers: PreparedGather | None = None,
        **options: Any,
    ) -> None:
        super().__init__(node=node, **options)
        self._tagc, self._state = tagc, state
        self._gathers = gathers
        self._end = EndOfBackward(self._judge)
        self._sums: dict[AnyCommunicator, _Sums] = {}
        if gathers is not None:
            gathers.ends.append(self._end_calls)

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks without compression, in all calls so far."""
        return sum(sums.raw_bytes for sums in self._sums.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks, in all calls so far."""
        return sum(sums.wire_bytes for sums in self._sums.values())

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls, group by group: of the communicator, then of sketches."""
        return super().trace() + [r for s in self._sums.values() for r in s.sketches.trace()]

    def _end_calls(self, why: str) -> None:
        """Refuse later calls, and have those of the other ranks fail."""
        for comm in [channel.comm for channel in self._channels.values()]:
            nodes = isinstance(comm, NodeCommunicator)
            for one in (comm.within, comm.between) if nodes else (comm,):
                if one.session.broken is None:
                    one.session.broken = why
                    one.transport.abort(why)

    def _judge(self) -> None:
        """Raise what is wrong with sums and gathers that nobody has waited for yet, and report."""
        judges = [sums.sketches.settle for sums in self._sums.values()]
        if self._gathers is not None:
            judges.append(self._gathers.judge)
        problem: Exception | None = None
        for judge in judges:
            try:
                judge()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def unit(self, parameters: Callable[[], list[Parameter]]) -> Any:
        """The object for ``set_custom_reduce_scatter`` of one FSDP module.

        Args:
            parameters: Returns the parameters that require gradients when it is called, in FSDP's
                order.
        """
        return _Unit(self, parameters)

    def mean(self, parameters: Callable[[], list[Parameter]], group: Any) -> Any:
        """The object for ``set_all_reduce_hook`` of one FSDP module.

        Args:
            parameters: As of ``unit``.
            group: The process group of the replicas, which are in other nodes each.
        """
        self._between.add(group)
        return _Mean(self, parameters, group)

    def _sums_of(self, comm: AnyCommunicator, in_backward: bool) -> _Sums:
        sums = self._sums.get(comm)
        if sums is None:
            sums = self._sums[comm] = _Sums(comm, self._tagc, self._state)
        sums.sketches.defers = in_backward
        return sums

    def _average(self, parameters: Sequence[Parameter], missing: str, x: Any, group: Any) -> None:
        """Overwrite a unit's sharded gradients with their mean over replicas."""
        in_backward = self._end.ask()
        # A reduce-scatter between nodes has sums of the same layers.
        parts = [
            (f"{name}, replicas", self._tagc.layers(name, shape), n)
            for name, shape, n in parameters
        ]

        def call(comm: AnyCommunicator) -> None:
            self._sums_of(comm, in_backward).average(x, parts, missing)

        self._run(group, x, call, collectives=0).wait()

    def _reduce(
        self,
        parameters: Sequence[Parameter],
        missing: str,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        op: Any,
        async_op: bool,
    ) -> Any:
        kind, factor = kind_and_factor(op)
        in_backward = self._end.ask()

        def call(comm: AnyCommunicator) -> None:
            sums = self._sums_of(comm, in_backward)
            total = self._total(sums, parameters, missing, output_tensor, input_tensor)
            if kind == dist.ReduceOp.AVG:
                tensors.change(lambda v: v.div_(comm.world_size), total)
            elif kind == dist.ReduceOp.PREMUL_SUM:
                tensors.change(lambda v: v.mul_(factor), total)
            output_tensor.copy_(total)

        return finished(self._run(group, output_tensor, call, collectives=0), async_op)

    def _total(
        self,
        sums: _Sums,
        parameters: Sequence[Parameter],
        missing: str,
        output_tensor: Any,
        input_tensor: Any,
    ) -> Any:
        """This rank's share of the sum of a unit's gradients, whose columns are parameters."""
        total = wide(output_tensor.numel(), output_tensor)
        rows = input_tensor.view(sums.comm.world_size, -1)
        # Of replicas only the mean is between nodes.
        whole = bool(self._between) and sums.in_one_node
        layers, places, others, at = [], [], [], 0
        for name, shape, n in parameters:
            if not whole and self._tagc.layers(name, shape):
                obstacle = missing or sums.obstacle(n, rows.dtype)
                if not obstacle:
                    layers.append((name, rows[:, at : at + n].contiguous()))
                    places.append(slice(at, at + n))
                    at += n
                    continue
                _skip(self._state, name, n * len(rows), obstacle)
            others.append(slice(at, at + n))
            at += n
        if missing:
            others = [slice(0, rows.shape[1])]
        sums.sketches.agree([name for name, _, _ in parameters], [name for name, _ in layers])
        for place, part in zip(places, sums.by_sketch(layers), strict=True):
            total[place] = part
        if others:
            rest = torch.cat([rows[:, place] for place in others], 1).view(-1)
            share = sums.comm.reduce_scatter(rest, total.new_empty(rest.numel() // len(rows)))
            sizes = [place.stop - place.start for place in others]
            for place, part in zip(others, share.split(sizes), strict=True):
                total[place] = part
        return total


class _Columns:
    """The parameters of one FSDP module that require gradients, as far as they can be told.

    FSDP passes gradients of those that have one, and does not say which. They are among those that
    require one now, unless that has changed since gradients began to accumulate: these are all if
    the sizes add up.
    """

    def __init__(self, inner: ReduceScatter, parameters: Callable[[], list[Parameter]]) -> None:
        self._inner, self._parameters = inner, parameters
        self._before = parameters()

    def _now(self, nelem: int) -> tuple[list[Parameter], str]:
        """The parameters of so many elements, and why some might be others, or ""."""
        now, before = self._parameters(), self._before
        self._before = now
        missing = ""
        if [p.name for p in now] != [p.name for p in before]:
            missing = "other parameters of its FSDP module require gradients than before"
        elif sum(p.nelem for p in now) != nelem:
            missing = "parameters of its FSDP module have no gradient"
        return now, missing


class _Unit(_Columns):
    """The reduce-scatter of one FSDP module."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        tensors = output_tensor, input_tensor
        return self._inner._reduce(*self._now(output_tensor.numel()), *tensors, group, op, async_op)


class _Mean(_Columns):
    """The mean over replicas of the shards of one FSDP module."""

    def __init__(
        self, inner: ReduceScatter, parameters: Callable[[], list[Parameter]], group: Any
    ) -> None:
        super().__init__(inner, parameters)
        self._group = group

    def __call__(self, reduce_output: Any) -> None:
        self._inner._average(*self._now(reduce_output.numel()), reduce_output, self._group)


class Hooks(NamedTuple):
    """The hooks that ``compress`` has set. A context manager, which ends with ``close()``.

    Attributes:
        all_gather: The hook of parameters, with ``raw_bytes``, ``wire_bytes`` and, with the route
            ``"exact"``, ``trace()``.
        reduce_scatter: The hook of gradients, with all of these.
        state: The state of this rank: residuals and reports.
    """

    all_gather: Any
    reduce_scatter: ReduceScatter
    #: `reports` of layers and steps; `residuals.state_dict()` belongs in the rank's checkpoint.
    state: State

    def remove(self) -> None:
        """As of ``fsdp.Hooks``."""
        remove(self.all_gather, self.reduce_scatter)

    def close(self) -> None:
        """Close both hooks. Later calls raise CollectiveError."""
        self.all_gather.close()
        self.reduce_scatter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()


def compress(
    module: Any,
    tagc: Tagc | None = None,
    *,
    state: State | None = None,
    node: int | None = None,
    route: Route = "exact",
    **options: Any,
) -> Hooks:
    """Sum the gradients of large layers of every FSDP module in a model by sketch.

    All ranks call it, before training, while parameters are sharded. Layers are selected within
    FSDP modules too. Other layers and the all-gather of parameters use a ``Communicator``, lossless
    by default. FSDP calls no hook in a group of one rank.

    Index and sketch are sent once: an element of a large layer takes 5.2 bits at a ratio of 10 for
    float32 gradients, 3.6 bits for bfloat16 and float16. For small layers it is more, as sketches
    have whole rows of 1024 buckets: 6 bits in a share of 32 x 1024 elements.

    Parameters may be frozen and unfrozen between steps, on all ranks alike, but not while gradients
    accumulate without communication. In a step in which a parameter that requires a gradient gets
    none, and in the first step after other parameters require gradients, its unit is sent by the
    communicator, which the reports say.

    Source: TAGC (EuroMLSys 2025), section 3 and algorithm 1.

    Args:
        module: The model, after ``fully_shard``.
        tagc: The settings, equal on all ranks; None: ``Tagc()``.
        state: State of this rank of an earlier run. None: a new one.
        node: Ranks of a node, whose numbers are consecutive, as in ``fsdp.compress``: gradients of
            a node are summed as they are, and index and sketch of the sums go between nodes. On a
            two-dimensional mesh (HSDP) the mean over replicas goes by sketch, which are in other
            nodes each; reports name its layers with ``", replicas"`` behind. As in
            ``fsdp.compress`` it is made at every reduction.
        route: How parameters travel, as in ``fsdp.compress``: with another route than ``"exact"``
            by prepared calls, so that the host does not wait for their sizes. Gradients travel as
            before. Options are ``codec``, ``checksum``, ``seed``, ``trace``, ``keep_nbytes``,
            ``ahead`` and, with ``"auto"``, ``measurements`` then.
        **options: Arguments of ``Communicator``.

    Returns:
        The hooks.

    Raises:
        TypeError: For unknown options, another kind of module, or complex parameters.
        ValueError: For a value that is not allowed; if ``node`` is given with another route than
            ``"exact"``; if there is no FSDP module, or one with several
            meshes; by the first call, if the index mode does not allow so many ranks.
    """
    check_route(route, options, ("keep_nbytes", "ahead"))
    gathers: PreparedGather | None = None
    if route != "exact":
        if node is not None:
            raise ValueError(f"route is {route!r}, node {node}; allowed with node: 'exact'")
        gathers = PreparedGather(route, **options)
        for own in ("keep_nbytes", "ahead", "measurements"):
            options.pop(own, None)
    state, tagc, options = _checked(compress, state, tagc, options)
    modules = fsdp_modules(module)
    scatters = ReduceScatter(tagc, state, node=node, gathers=gathers, **options)
    hooks = Hooks(gathers or AllGather(node=node, **options), scatters, state)
    names = {id(p): name for name, p in module.named_parameters()}
    for _, m in modules:
        gather = hooks.all_gather if gathers is None else gathers.of(m)
        hooks.all_gather.away.install(Communication(m, "all_gather"), gather)
        parameters = _parameters(m, names)
        scatters.away.install(Communication(m, "reduce_scatter"), scatters.unit(parameters))
        if node is not None:
            take_replicas(m, scatters.away, functools.partial(scatters.mean, parameters))
    return hooks


def _parameters(module: Any, names: Mapping[int, str]) -> Callable[[], list[Parameter]]:
    """See `ReduceScatter.unit`; nothing public tells which parameters are a unit, and in order."""
    params = [p for group in param_groups(module) for p in group.fsdp_params]
    if any(id(p.sharded_param) not in names for p in params):
        raise ValueError("a parameter is not sharded; allowed: before forward, or after reshard()")
    # FSDP has other sharded tensors after load_state_dict() or to(), of the same parameter.
    named = [(p, names[id(p.sharded_param)]) for p in params]

    def now() -> list[Parameter]:
        return [
            Parameter(name, p.sharded_param.shape, p.padded_sharded_param_size.numel())
            for p, name in named
            if p.sharded_param.requires_grad
        ]

    return now


class DdpHook(Closing):
    """The state of ``ddp_hook``: a communicator of the model's ranks, used by nothing else.

    Copies are as those of ``ddp.DdpHook``.

    Args:
        comm: The communicator, with a trace, by which bytes are counted.
        tagc: The settings, equal on all ranks.
        state: The state of this rank.
        names: Parameters of the model to their names.

    Raises:
        ValueError: If the communicator has ``trace=0``, or the index mode does not allow so many
            ranks.
    """

    def __init__(
        self, comm: AnyCommunicator, tagc: Tagc, state: State, names: Mapping[Any, str]
    ) -> None:
        far = comm.between if isinstance(comm, NodeCommunicator) else comm
        if far.session.records.maxlen == 0:
            raise ValueError(
                "comm was made with trace=0; allowed: at least 1, as bytes are counted by it"
            )
        self._tagc, self._names = tagc, names
        self.state = state
        #: As of ``ddp.DdpHook``.
        self._connecting: Connecting | None = None
        self._channel: Channel | None = Channel(comm)
        self._made: _Sums | None = _Sums(comm, tagc, state)
        self._end = EndOfBackward(self._judge)

    def __getstate__(self) -> dict[str, Any]:
        own = self._connecting
        return {
            "_connecting": own and own.of_copy(),
            "_tagc": self._tagc,
            "_names": self._names,
            "state": self.state,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._channel = self._made = None
        self._end = EndOfBackward(self._judge)

    def _connected(self, device: torch.device) -> Channel:
        """The channel, which a copy makes when it is first used."""
        if self._channel is None:
            comm = self._connect_copy(self._connecting, device)
            self._made = _Sums(comm, self._tagc, self.state)
            self._channel = Channel(comm)
        return self._channel

    @property
    def _sums(self) -> _Sums:
        if self._made is None:
            raise TypeError(NOT_CONNECTED)
        return self._made

    def _open(self) -> Iterable[Channel]:
        return [] if self._channel is None else [self._channel]

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks of an uncompressed reduce-scatter and all-gather, so far."""
        return 0 if self._made is None else self._sums.raw_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that were sent to other ranks so far."""
        return 0 if self._made is None else self._sums.wire_bytes

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls: those of the communicator, then those by sketch."""
        if self._made is None:
            return []
        return [*self._sums.comm.trace(), *self._sums.sketches.trace()]

    def _judge(self) -> None:
        """Have backward() raise what is wrong with sums, and report on them."""
        try:
            self._sums.sketches.settle()
        except Exception as error:
            raise_at_the_end(self, error)

    def _average(self, bucket: Any) -> None:
        x = bucket.buffer()
        self._sums.sketches.defers = self._end.ask()
        if x.layout != torch.strided or not x.dtype.is_floating_point:
            raise TypeError(f"x is {x.dtype}, {x.layout}; allowed: dense floating-point tensors")
        parts = []
        for p in bucket.parameters():
            name = self._names[p]
            parts.append((name, self._tagc.layers(name, p.shape), p.numel()))
        self._sums.average(x, parts)


def ddp_hook(state: DdpHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: averages a bucket's gradients over ranks, large layers by sketch.

    For ``model.register_comm_hook(DdpHook(...), ddp_hook)``. The sums of layers that are sent by
    sketch are made by their owners; all ranks get and peel the sketches of the sums, so sketches
    are sent twice (TAGC, section 3.1). An element of a large layer takes 8.4 bits at a ratio of 10
    for float32 gradients, of the 64 bits of a reduce-scatter and an all-gather; for bfloat16 and
    float16 5.2 of 32. All ranks get the same bits.

    Args:
        state: The state.
        bucket: Gradients, one-dimensional, of any float dtype, which are overwritten.

    Returns:
        A Future of the averaged gradients.

    Raises:
        TypeError: For sparse or complex gradients.
        CollectiveError: If anything goes wrong on the wire. ``backward()`` raises errors at its
            end, as with ``ddp.ddp_hook``.
    """
    x = bucket.buffer()

    def call() -> Any:
        channel = state._connected(x.device)
        return channel.run(x, lambda: state._average(bucket), collectives=0)

    return in_backward(state, x, call)


def register(
    model: Any,
    tagc: Tagc | None = None,
    comm: AnyCommunicator | None = None,
    *,
    state: State | None = None,
    node: int | None = None,
    **options: Any,
) -> DdpHook:
    """Register ``ddp_hook`` on a DistributedDataParallel model.

    All ranks of the model call it; other ranks take no part.

    Args:
        model: The DistributedDataParallel model.
        tagc: The settings, equal on all ranks; None: ``Tagc()``.
        comm: A communicator of the model's ranks, or a ``NodeCommunicator``, whose codec the other
            layers use. None: one is made with connections of its own.
        state: State of this rank of an earlier run. None: a new one.
        node: As in ``compress``; not with ``comm``.
        **options: Arguments of ``Communicator``; not with ``comm``.

    Returns:
        The state of the hook.

    Raises:
        TypeError: For another kind of model, settings, communicator or option.
        ValueError: If ``comm`` and options are given, a value is not allowed, or the index mode
            does not allow so many ranks.
        CollectiveError: If ranks differ, or do not all call it within the timeout.
    """
    model = distributed(model)
    if comm is not None and not isinstance(comm, Communicator | NodeCommunicator):
        raise TypeError(f"comm is {comm!r}; allowed: a Communicator, or None")
    connecting: Connecting | None = None
    given = sorted(options | ({} if node is None else {"node": node}))
    state, tagc, options = _checked(register, state, tagc, options)
    if comm is None:
        check_nodes(node, None)
        connecting = Connecting(model.process_group, "tagc.register", node, None, options)
        comm = connecting.connect(trained_device(model))
    elif given:
        raise ValueError(f"comm and {given} are given; allowed: one or the other")
    else:
        check_gradients(comm.codec)
    names = {p: name for name, p in model.module.named_parameters()}
    hook = DdpHook(comm, tagc, state, names)
    hook._connecting = connecting
    install(model, hook, ddp_hook)
    return hook


def _checked(
    call: Callable[..., Any], state: State | None, tagc: Tagc | None, options: dict[str, Any]
) -> tuple[State, Tagc, dict[str, Any]]:
    """What was given or is the default; TypeError or ValueError, before there is a process group.

    Options let a communicator remember a call at least, by whose record its bytes are counted.
    """
    tagc = Tagc() if tagc is None else tagc
    if not isinstance(tagc, Tagc):
        raise TypeError(f"tagc is {tagc!r}; allowed: a Tagc(), or None")
    state = State() if state is None else state
    if not isinstance(state, State):
        raise TypeError(f"state is {state!r}; allowed: a State(), or None")
    check_options(call, options)
    return state, tagc, options | ({"trace": 1} if options.get("trace") == 0 else {})


def _skip(state: State, name: str, nelem: int, reason: str) -> None:
    """Report a layer that the rule names and that goes by the communicator, as it is."""
    facts: dict[str, Any] = {"theta": 0.0, "kept": nelem, "lost": 0}
    state.note(name, nelem=nelem, reason=reason, diagnosis=None, ratio=None, **facts)
