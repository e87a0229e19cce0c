"""The calls of a PyTorch process group, made by a communicator.

A function for each, with the arguments that ``torch.distributed`` gives to a process group. What it
returns says what the policy asks about, and how the call is made. It is None for calls that only
the network makes: other reductions, sparse tensors, lists of different dtypes, wrong arguments.
All ranks find the same, since they give equal dtypes and sizes. Strides decide nothing: ranks may
differ in them. Elements travel in the order of dimensions. A tensor whose memory has another order
is copied for the call, and what it receives is copied back before the call ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .arguments import shares_of
from .communicator import Communicator
from .sums import Op

_MEANS: dict[Any, Op] = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean"}


@dataclass(frozen=True)
class GroupCall:
    """A call that a communicator can make.

    Attributes:
        op: Its name in a policy.
        tensors: What it reads and writes; the first says dtype and device.
        nbytes: Bytes of this rank's input.
        result: What the future of its work holds.
        run: Makes it; ``wire`` is what the rule says, for sums.
        run_splits: Of an all-to-all without splits: makes it as one with equal splits.
    """

    op: str
    tensors: list[Any]
    nbytes: int
    result: Any
    run: Callable[[Communicator, str | None], None] = field(repr=False)
    run_splits: Callable[[Communicator, str | None], None] | None = field(default=None, repr=False)

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return str(self.tensors[0].dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        found: torch.device = self.tensors[0].device
        return found


def all_reduce(tensors: Any, opts: Any = None, *_: Any) -> GroupCall | None:
    """Sums or means of tensors, in place."""
    op = _op(opts, (dist.AllreduceOptions, dist.AllreduceCoalescedOptions))
    xs = _tensors(tensors)
    if op is None or xs is None:
        return None

    def run(comm: Communicator, wire: str | None) -> None:
        whole = _joined(xs)
        comm.all_reduce(whole, whole, op=op, wire=wire)
        _part(whole, xs)

    return GroupCall("all_reduce", xs, _nbytes(xs), tensors, run)


def broadcast(tensors: Any, opts: Any = None, *_: Any) -> GroupCall | None:
    """One rank's tensor, on all."""
    xs = _tensors(tensors)
    if xs is None or not isinstance(opts, dist.BroadcastOptions) or len(xs) != 1:
        return None
    root = opts.rootRank

    def run(comm: Communicator, wire: str | None) -> None:
        whole = _joined(xs)
        comm.broadcast(whole, root)
        _part(whole, xs)

    return GroupCall("broadcast", xs, _nbytes(xs), tensors, run)


def all_gather(output: Any, x: Any, *_: Any) -> GroupCall | None:
    """All ranks' tensors in one."""
    return all_gathers([output], [x]) if isinstance(output, torch.Tensor) else None


def all_gathers(outputs: Any, inputs: Any, *_: Any) -> GroupCall | None:
    """The same of several tensors."""
    outs, xs = _tensors(outputs), _tensors(inputs)
    if outs is None or xs is None or not _fits(outs, xs):
        return None

    def run(comm: Communicator, wire: str | None) -> None:
        if len(xs) == 1:
            whole = _flat(outs[0])
            comm.all_gather(_flat(xs[0]), whole)
            _part(whole, outs)
            return
        rows = comm.all_gather(_joined(xs)).view(comm.world_size, -1)
        for out, part in zip(outs, rows.split([x.numel() for x in xs], 1), strict=True):
            whole = _flat(out)
            whole.view(comm.world_size, -1).copy_(part)
            _part(whole, [out])

    return GroupCall("all_gather", [*xs, *outs], _nbytes(xs), outputs, run)


def all_gather_list(outputs: Any, inputs: Any, *_: Any) -> GroupCall | None:
    """All ranks' tensors, each in one of its own."""
    xs = _tensors(inputs)
    outs = _tensors(outputs[0]) if _is_list(outputs) and _is_list(outputs[0]) else None
    if xs is None or outs is None or len(xs) != 1 or len(outputs) != 1:
        return None
    # Ranks may give tensors of different sizes, and then do not know all of them.
    if any(out.numel() != xs[0].numel() for out in outs) or not _alike([*outs, *xs]):
        return None

    def run(comm: Communicator, wire: str | None) -> None:
        _part(comm.all_gather(_flat(xs[0])), outs)

    return GroupCall("all_gather", [*xs, *outs], _nbytes(xs), outputs, run)


def reduce_scatter(output: Any, x: Any, opts: Any = None, *_: Any) -> GroupCall | None:
    """This rank's share of a sum or mean."""
    return reduce_scatters([output], [x], opts) if isinstance(output, torch.Tensor) else None


def reduce_scatters(outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> GroupCall | None:
    """The same of several tensors."""
    op = _op(opts, dist.ReduceScatterOptions)
    outs, xs = _tensors(outputs), _tensors(inputs)
    if op is None or outs is None or xs is None or not _fits(xs, outs):
        return None

    def run(comm: Communicator, wire: str | None) -> None:
        if len(xs) == 1:
            _scatter(comm, _flat(xs[0]), outs[0], op, wire)
            return
        rows = torch.cat([_flat(x).view(comm.world_size, -1) for x in xs], 1)
        share = outs[0].new_empty(rows.shape[1])
        _scatter(comm, rows.view(-1), share, op, wire)
        _part(share, outs)

    return GroupCall("reduce_scatter", [*xs, *outs], _nbytes(xs), outputs, run)


def reduce_scatter_list(outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> GroupCall | None:
    """This rank's share of a sum whose shares are tensors of their own."""
    op = _op(opts, dist.ReduceScatterOptions)
    outs = _tensors(outputs)
    xs = _tensors(inputs[0]) if _is_list(inputs) and _is_list(inputs[0]) else None
    if op is None or outs is None or xs is None or len(outs) != 1 or len(inputs) != 1:
        return None
    if any(x.numel() != outs[0].numel() for x in xs) or not _alike([*outs, *xs]):
        return None

    def run(comm: Communicator, wire: str | None) -> None:
        _scatter(comm, _joined(xs), outs[0], op, wire)

    return GroupCall("reduce_scatter", [*xs, *outs], _nbytes(xs), outputs, run)


def all_to_all(
    output: Any, x: Any, out_splits: Any = (), in_splits: Any = (), *_: Any
) -> GroupCall | None:
    """Shares of all ranks' tensors; with splits, which are rows, of unequal ones."""
    found = _tensors([output, x])
    if found is None:
        return None
    out, sent = found
    equal = not len(out_splits) and not len(in_splits)
    if equal:
        if out.numel() != sent.numel():
            return None
    elif not output.dim() or output.shape[1:] != x.shape[1:]:
        return None
    width = math.prod(x.shape[1:])

    def exchange(comm: Communicator, **splits: Any) -> None:
        whole = _flat(out)
        comm.all_to_all(_flat(sent), whole, **splits)
        _part(whole, [out])

    def run(comm: Communicator, wire: str | None) -> None:
        exchange(comm)

    def run_splits(comm: Communicator, wire: str | None) -> None:
        here = f"rank {comm.rank} of {comm.name!r}"
        each = sent.numel() // comm.world_size
        splits = []
        for name, given, what, tensor in (
            ("input_split_sizes", in_splits, "input", x),
            ("output_split_sizes", out_splits, "output", output),
        ):
            rows = shares_of(name, given, what, tensor.shape, comm.world_size, here)
            splits.append([n * width for n in rows])
        outward, inward = [[each] * comm.world_size] * 2 if equal else splits
        exchange(comm, send_splits=outward, receive_splits=inward)

    op = "all_to_all" if equal else "all_to_all_v"
    make = run if equal else run_splits
    splittable = run_splits if equal else None
    return GroupCall(op, [sent, out], _nbytes([sent]), output, make, splittable)


def _scatter(comm: Communicator, x: Any, out: Any, op: Op, wire: str | None) -> None:
    if op == "sum":
        total = _flat(out)
        comm.reduce_scatter(x, total, wire=wire)
    else:
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        total = out.new_empty(out.numel(), dtype=wide)
        comm.reduce_scatter(x, total, wire=wire)
        total.div_(comm.world_size)
    _part(total, [out])


def _op(opts: Any, kind: Any) -> Op | None:
    """What a communicator calls a reduction; None for those that it has not."""
    if opts is None:
        return "sum"
    # Factors (PREMUL_SUM) are not among the keys.
    return _MEANS.get(opts.reduceOp.op) if isinstance(opts, kind) else None


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and len(x) > 0


def _tensors(values: Any) -> list[Any] | None:
    """Strided tensors of one dtype and device, detached; None if that is not what they are."""
    if not _is_list(values) or not all(isinstance(x, torch.Tensor) for x in values):
        return None
    if any(x.layout != torch.strided for x in values) or not _alike(values):
        return None
    return [x.detach() for x in values]


def _flat(x: Any) -> Any:
    """The elements of a tensor, 1-D: its memory, or a copy if its memory has another order."""
    return x.resolve_conj().resolve_neg().contiguous().view(-1)


def _alike(values: Sequence[Any]) -> bool:
    return len({(x.dtype, x.device) for x in values}) == 1


def _fits(wholes: list[Any], parts: list[Any]) -> bool:
    """Whether each is as many times as long as the part of it, and all are of one kind."""
    if len(wholes) != len(parts) or not _alike([*wholes, *parts]):
        return False
    if any(not part.numel() for part in parts):
        return False
    times = {whole.numel() / part.numel() for whole, part in zip(wholes, parts, strict=True)}
    return len(times) == 1


def _nbytes(values: list[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in values)


def _joined(values: list[Any]) -> Any:
    flat = [_flat(x) for x in values]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _part(whole: Any, values: list[Any]) -> None:
    """Copy what lies one behind the other to where it belongs, if it is not there."""
    if len(values) == 1 and values[0].data_ptr() == whole.data_ptr():
        return
    for value, part in zip(values, whole.split([x.numel() for x in values]), strict=True):
        value.copy_(part.view(value.shape))
