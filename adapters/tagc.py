"""Gradients of large layers by index and sketch, for FSDP2 and DistributedDataParallel.

After TAGC (EuroMLSys '25), algorithm 1. To try it, `torchrun --nproc-per-node 2 example.py` with

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from tightwire.adapters import tagc

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 10))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    hooks = tagc.compress(model, tagc.Tagc(ratio=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for report in hooks.state.reports:
        assert report.estimated == 0, report
    print(hooks.reduce_scatter.raw_bytes, hooks.reduce_scatter.wire_bytes)
    dist.destroy_process_group()

Other layers than `Tagc.layers` names, and parameters, go by the codec of a `Communicator`, lossless
unless another is asked for.

On the CPU backward waits for the hooks, and nothing overlaps. On a GPU a unit's hook has a stream
of its own, behind its gradients: sparsification, index and sketch run beside the all-gather of the
next unit's parameters, which FSDP has queued before, and beside what is queued of the backward
pass. The host waits for the agreed index to be whole, when the device has sketches to make, and for
the sums, with which it gets what they report; with `fallback` for the diagnosis before it sends.
Where the codec lhc has no kernels, index, sketch and peeling are on the host.
"""

# DDP compares the annotations of a hook, which must therefore not be strings.
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .calls import TraceRecord
from .collectives import Communicator
from .fsdp import AllGather, _Comm, _finish, _scale
from .hooks import Channel, average, communicator, wide
from .layers import Rule
from .sketches import Report, Sketches, State, Tagc

__all__ = [
    "DdpHook",
    "Hooks",
    "ReduceScatter",
    "Report",
    "Rule",
    "State",
    "Tagc",
    "compress",
    "ddp_hook",
    "register",
]


class _Sums:
    """Sums over the ranks of a communicator, of some layers by sketch; bytes of both count."""

    def __init__(self, comm: Communicator, tagc: Tagc, state: State) -> None:
        self.comm = comm
        self.sketches = Sketches(comm, tagc, state)
        self._seen = 0
        self._raw = 0
        self._wire = 0

    def count(self) -> None:
        """Add the communicator's calls since the last time."""
        for last in self.comm.trace(last=1):
            for record in self.comm.trace(last=last.sequence + 1 - self._seen):
                self._raw += record.raw_bytes
                self._wire += record.wire_bytes
            self._seen = last.sequence + 1

    @property
    def raw_bytes(self) -> int:
        return self._raw + self.sketches.raw_bytes

    @property
    def wire_bytes(self) -> int:
        return self._wire + self.sketches.wire_bytes


class ReduceScatter(_Comm):
    """The reduce-scatters of all FSDP modules of a model; `compress` makes it and its units."""

    def __init__(self, tagc: Tagc, state: State, **options: Any) -> None:
        """`options` are those of `Communicator`, for what does not go by sketch."""
        super().__init__(**options)
        self._tagc, self._state = tagc, state
        self._sums: dict[Communicator, _Sums] = {}

    @property
    def raw_bytes(self) -> int:
        """Bytes that would have gone to other ranks uncompressed, in all calls so far."""
        return sum(sums.raw_bytes for sums in self._sums.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that went to other ranks, in all calls so far."""
        return sum(sums.wire_bytes for sums in self._sums.values())

    def trace(self) -> list[TraceRecord]:
        """The last calls, group by group: those of the communicator, then those by sketch."""
        return super().trace() + [r for s in self._sums.values() for r in s.sketches.trace()]

    def unit(self, parameters: Sequence[tuple[str, Any, int]]) -> Any:
        """For `set_custom_reduce_scatter` of one FSDP module.

        `parameters` are the names, shapes and padded elements of a rank's share of those that get
        gradients, in FSDP's order.
        """
        return _Unit(self, parameters)

    def _reduce(
        self,
        parameters: Sequence[tuple[str, Any, int]],
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        op: Any,
        async_op: bool,
    ) -> Any:
        kind, factor = _scale(op)

        def call(comm: Communicator) -> None:
            sums = self._sums.get(comm)
            if sums is None:
                sums = self._sums[comm] = _Sums(comm, self._tagc, self._state)
            try:
                total = self._total(sums, parameters, output_tensor, input_tensor)
            finally:
                sums.count()
            if kind == dist.ReduceOp.AVG:
                total.div_(comm.world_size)
            elif kind == dist.ReduceOp.PREMUL_SUM:
                total.mul_(factor)
            output_tensor.copy_(total)

        return _finish(self._run(group, output_tensor, call, collectives=0), async_op)

    def _total(
        self,
        sums: _Sums,
        parameters: Sequence[tuple[str, Any, int]],
        output_tensor: Any,
        input_tensor: Any,
    ) -> Any:
        """This rank's share of the sum of a unit's gradients, whose columns are parameters."""
        total = wide(output_tensor.numel(), output_tensor)
        rows = input_tensor.view(sums.comm.world_size, -1)
        whole = sum(n for _, _, n in parameters) == rows.shape[1]
        layers, places, others, at = [], [], [], 0
        for name, shape, n in parameters:
            if self._tagc.layers(name, shape):
                if whole and self._tagc.pays(n, rows.dtype):
                    layers.append((name, rows[:, at : at + n].contiguous()))
                    places.append(slice(at, at + n))
                    at += n
                    continue
                missing = "parameters of its FSDP module have no gradient"
                small = f"{n} elements a rank of {rows.dtype} take no fewer bytes by sketch"
                _skip(self._state, name, n * len(rows), small if whole else missing)
            others.append(slice(at, at + n))
            at += n
        if not whole:
            others = [slice(0, rows.shape[1])]
        sums.sketches.agree([name for name, _, _ in parameters], [name for name, _ in layers])
        for place, part in zip(places, sums.sketches.sums(layers), strict=True):
            total[place] = part
        if others:
            rest = torch.cat([rows[:, place] for place in others], 1).view(-1)
            share = sums.comm.reduce_scatter(rest, total.new_empty(rest.numel() // len(rows)))
            sizes = [place.stop - place.start for place in others]
            for place, part in zip(others, share.split(sizes), strict=True):
                total[place] = part
        return total


class _Unit:
    """The reduce-scatter of one FSDP module."""

    def __init__(self, inner: ReduceScatter, parameters: Sequence[tuple[str, Any, int]]) -> None:
        self._inner, self._parameters = inner, parameters

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        tensors = output_tensor, input_tensor
        return self._inner._reduce(self._parameters, *tensors, group, op, async_op)


class Hooks(NamedTuple):
    """What `compress` has set: for `raw_bytes` and `wire_bytes`, and the state of this rank."""

    all_gather: AllGather
    reduce_scatter: ReduceScatter
    #: `reports` of layers and steps; `residuals.state_dict()` belongs in the rank's checkpoint.
    state: State


def compress(
    module: Any, tagc: Tagc | None = None, *, state: State | None = None, **options: Any
) -> Hooks:
    """Sum the gradients of large layers of every FSDP module in `module` by sketch.

    On all ranks, before training, while parameters are sharded. Layers are told apart within
    FSDP modules too. Other layers and the all-gather of parameters go by a `Communicator` with
    `options`, bit for bit by default. `state` has residuals of an earlier run. FSDP calls no hook
    in a group of one rank. If a parameter of a unit gets no gradient in a step, the unit goes
    by the communicator, which its layers' reports say.

    Raises ValueError if there is no FSDP module, or one with several meshes, and at the first call
    for an index mode that does not carry so many ranks.
    """
    state = State() if state is None else state
    tagc = Tagc() if tagc is None else tagc
    hooks = Hooks(AllGather(**options), ReduceScatter(tagc, state, **options), state)
    names = {id(p): name for name, p in module.named_parameters()}
    modules = [m for m in module.modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError("module has no FSDP modules; fully_shard comes first")
    for m in modules:
        m.set_custom_all_gather(hooks.all_gather)
        m.set_custom_reduce_scatter(hooks.reduce_scatter.unit(_parameters(m, names)))
    return hooks


def _parameters(module: Any, names: Mapping[int, str]) -> list[tuple[str, Any, int]]:
    """See `ReduceScatter.unit`; nothing public tells which parameters are a unit, and in order."""
    fsdp = module._get_fsdp_state()
    groups = getattr(fsdp, "_fsdp_param_groups", None)
    if groups is None:
        groups = [fsdp._fsdp_param_group] if fsdp._fsdp_param_group is not None else []
    found = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
    if any(id(p.sharded_param) not in names for p in found):
        raise ValueError("a parameter is not sharded; allowed: before forward, or after reshard()")
    return [
        (names[id(p.sharded_param)], p.sharded_param.shape, p.padded_sharded_param_size.numel())
        for p in found
    ]


class DdpHook:
    """The state of `ddp_hook`: a communicator of the ranks of the model, for nothing else."""

    def __init__(
        self, comm: Communicator, tagc: Tagc, state: State, names: Mapping[Any, str]
    ) -> None:
        """`names` are those of the model's parameters. ValueError as of `Sketches`."""
        self._channel = Channel(comm)
        self._sums = _Sums(comm, tagc, state)
        self._tagc, self._names = tagc, names
        self.state = state

    @property
    def raw_bytes(self) -> int:
        """Bytes that would have gone to other ranks: of a reduce-scatter and an all-gather."""
        return self._sums.raw_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that went to other ranks."""
        return self._sums.wire_bytes

    def trace(self) -> list[TraceRecord]:
        """The last calls: those of the communicator, then those by sketch."""
        return self._sums.comm.trace() + self._sums.sketches.trace()

    def _average(self, bucket: Any) -> None:
        x, comm = bucket.buffer(), self._sums.comm
        if x.layout != torch.strided or not x.dtype.is_floating_point:
            raise TypeError(f"x is {x.dtype}, {x.layout}; allowed: dense floating-point tensors")
        ranks, layers, places, others, at = comm.world_size, [], [], [], 0
        for p in bucket.parameters():
            name, part = self._names[p], x[at : at + p.numel()]
            at += p.numel()
            if self._tagc.layers(name, p.shape):
                share = -(-p.numel() // ranks)
                if self._tagc.pays(share, x.dtype):
                    padded = torch.nn.functional.pad(part, (0, share * ranks - part.numel()))
                    layers.append((name, padded.view(ranks, share)))
                    places.append(part)
                    continue
                reason = f"{share} elements a rank of {x.dtype} take no fewer bytes by sketch"
                _skip(self.state, name, p.numel(), reason)
            others.append(part)
        try:
            names = [self._names[p] for p in bucket.parameters()]
            self._sums.sketches.agree(names, [name for name, _ in layers])
            sums = self._sums.sketches.sums(layers, everywhere=True)
            for part, total in zip(places, sums, strict=True):
                part.copy_(total.div_(ranks).view(-1)[: part.numel()])
            if others:
                rest = torch.cat(others)
                average(comm, rest)
                for part, mean in zip(others, rest.split([o.numel() for o in others]), strict=True):
                    part.copy_(mean)
        finally:
            self._sums.count()


def ddp_hook(state: DdpHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A Future of the bucket's gradients (1-D), averaged over ranks in place.

    For `model.register_comm_hook(DdpHook(...), ddp_hook)`. Of layers that go by sketch, sums are
    made by their owners, and all ranks get and peel the sketches of the sums (TAGC, section 3.1: as
    much traffic as the lossless homomorphic compression that it builds on). All ranks get the same
    bits. Raises TypeError for sparse or complex gradients, CollectiveError for what goes wrong on
    the wire; backward() raises them.
    """
    return state._channel.run(bucket.buffer(), lambda: state._average(bucket), collectives=0)


def register(
    model: Any,
    tagc: Tagc | None = None,
    comm: Communicator | None = None,
    *,
    state: State | None = None,
    **options: Any,
) -> DdpHook:
    """Register `ddp_hook` on a DistributedDataParallel model, on all ranks, and return its state.

    Without `comm`, one is made with `options` (see `Communicator`) on a new process group of the
    model's ranks. Raises ValueError if both are given, and for an index mode that does not carry so
    many ranks. Other layers go by the communicator's codec. `state` has residuals of an earlier
    run.
    """
    if comm is None:
        device = next(p.device for p in model.parameters() if p.requires_grad)
        comm = communicator(model.process_group, device, **options)
    elif options:
        raise ValueError(f"comm and {sorted(options)} are given; allowed: one or the other")
    names = {p: name for name, p in model.module.named_parameters()}
    state = State() if state is None else state
    hook = DdpHook(comm, Tagc() if tagc is None else tagc, state, names)
    model.register_comm_hook(hook, ddp_hook)
    return hook


def _skip(state: State, name: str, nelem: int, reason: str) -> None:
    """Report a layer that the rule names and that goes by the communicator, as it is."""
    facts: dict[str, Any] = {"theta": 0.0, "kept": nelem, "lost": 0}
    state.note(name, nelem=nelem, reason=reason, diagnosis=None, ratio=None, **facts)
