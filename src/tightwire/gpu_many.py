"""Many tensors in GPU memory in a call: batches of tensors and of buffers, and sums of buffers.

The GPU module of a codec may have functions for them, beside those of `tightwire.gpu`. Tensors are
contiguous, buffers uint8 with slots, all on torch's current device; plans are of one codec and
dtype, and nothing waits. Buffers and status words are tensors, or given by their addresses, int64,
shape (n,):

- `encode_many(plans, xs, outs, stats, key)` encodes tensors into buffers; `stats`: a tensor of
  statistics for each, or None where none are needed.
- `measure_many(spec, dtype, xs)` gives such, the rows of a tensor, or None.
- `decode_many(plans, srcs, outs, statuses, planned)` decodes whole buffers. Each has a status word
  of its own, int64, shape (1,), and its header is compared with its plan's if it is `planned`.
- `sum(plan, places, out, *, x, place, factor, planned)` stores the sum of the buffers of `Places`
  (frame_triton), with the tensor `x`, or None, before number `place`, times `factor`, or None, in
  `out`, of the plan's dtype or float32; codecs/common/sums.py says what a sum is.
- `encode_sum(plan, places, out, *, x, place, factor, stats, key, planned)` encodes it into `out`.

Codecs from outside that lack one take a call for each tensor or buffer; so does `sum` of dtypes
that kernels do not add up. So do buffers that are bytes in host memory or uint8 arrays, whose
headers the host reads; those in memory of another GPU are copied. A
`Buffer` is decoded from where it lies if its array is a tensor of the GPU that decodes: such are
views of other GPUs' memory that is mapped there, as PyTorch's symmetric memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from . import arrays
from .apart import Spans, check_apart, span_of, spans_of
from .arguments import check_added, each, source_target
from .arrays import ArrayInfo, Listed, Target, describe, plain_tensors
from .buffer import Buffer
from .codecs.common.base import CodecSpec, Key, Plan
from .codecs.common.frame_triton import Places, Words, places_of
from .codecs.common.sums import FLOAT32, rounded, wide_dtype
from .decoding import decode
from .engine import Parsed, check_limit
from .formats.dtypes import BY_NAME, DType
from .formats.errors import FormatError
from .formats.header import ALIGN
from .gpu import (
    _FUSED_ADD,
    _is_host,
    _kernels,
    _library_of,
    _measured,
    _output_memory,
    _stats,
    _takes_stats,
    _workspace,
    decode_add_encode,
    head,
)
from .gpu_arrays import (
    _TORCH,
    _as_torch,
    _export,
    _output,
    _place,
    _scope,
    _values,
    _writable_bytes,
    new_tensors,
)
from .gpu_each import check_each, decode_each
from .gpu_memory import Memory, Views
from .planning import make_plan
from .terms import check_decoded_apart, check_encoded_apart, check_plans, of_term, split

T = TypeVar("T")

#: What sums are rounded to here; other dtypes are the host's.
_ROUNDED = (*_FUSED_ADD, *(BY_NAME[name] for name in ("float64", "float8_e4m3fn", "float8_e5m2")))
#: Integers as wide as elements, by their bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_many(
    spec: CodecSpec,
    tensors: Sequence[Any],
    kinds: Listed,
    *,
    out: Sequence[Any] | None,
    stats: Sequence[Any] | None,
    key: Key | None,
    scratch: Any,
    checksum: bool,
    required: bool,
) -> Any:
    """As `Codec.encode_many`, on the device of the tensors, which are of `kinds`.

    NotImplemented where that is the host's to do; if it is `required` here, ValueError says what is
    missing instead.
    """
    library, device, dtype, shapes, addresses = kinds
    place = _place(library, device, "tensors[0]" if required else None)
    if place is None or (out is not None and _are_on_host(out, required)):
        return NotImplemented
    plan_of = {
        shape: make_plan(spec, dtype, tuple(shape), checksum=checksum)
        for shape in dict.fromkeys(shapes)
    }
    if any(_kernels(plan, required) is None for plan in plan_of.values()):
        return NotImplemented
    plans = [plan_of[shape] for shape in shapes]
    given: Sequence[torch.Tensor] = tensors
    other = next((_library_of(o) for o in out or () if o is not None), library)
    with _scope(place, library, other):
        if addresses is None:
            infos = [ArrayInfo(library, device, dtype, shape) for shape in shapes]
            given = [_as_torch(x, info) for x, info in zip(tensors, infos, strict=True)]
        xs = given if addresses is not None else [x.contiguous() for x in given]
        memories = memories_of(plans, out, place)
        work = _Work(scratch, place)
        own = None
        if stats is not None:
            own = each(
                "stats", lambda s: None if s is None else _stats(spec, s, dtype, place), stats
            )
        if out is not None or scratch is not None:
            read = {
                "tensors[{}]": _spans_of(tensors, addresses, plans),
                "stats[{}]": spans_of(stats or ()),
            }
            check_apart({"out[{}]": _spans(memories, plans), "scratch": [span_of(scratch)]}, read)
        for numbers in _alike(plans):
            # Buffers of another codec than that asked for are raw.
            measured = own is not None and plans[numbers[0]].codec == spec
            _encode_alike(
                _some(plans, numbers),
                _some(xs, numbers),
                _some(memories, numbers),
                _some(own, numbers) if own is not None and measured else None,
                key,
                work,
            )
        if library == "jax":
            for memory, x in zip(memories, given, strict=True):
                memory.lease(x)
    target = Target(library, device)
    if out is None:
        return list(map(Buffer, plans, repeat(None), repeat(target), memories))
    return [
        o
        if isinstance(o, Buffer) and o.plan is plan and o._target == target
        else Buffer(plan, None, target, memory)
        for o, plan, memory in zip(out, plans, memories, strict=True)
    ]


def _are_on_host(outs: Sequence[Any], required: bool) -> bool:
    """Whether memory for buffers, None where there is none, is on the host; see `_is_host`."""
    if all(type(o) is Buffer and o._memory is not None for o in outs):
        return False
    return any(each("out", lambda o: o is not None and _is_host(o, required), outs))


def encode_into(
    plans: Sequence[Plan],
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    key: Key | None,
) -> bool:
    """Encode tensors by plans into their memory; False if the host is to encode any of them.

    For callers that own this memory, and have checked what `encode_many` checks at every call, as
    for `tightwire.gpu.encode_into`.
    """
    if any(_kernels(plan, False) is None for plan in plans):
        return False
    place = outs[0].device
    work = _Work(None, place)
    with _scope(place, "torch"):
        for numbers in _alike(plans):
            memories = list(map(Memory, _some(outs, numbers)))
            _encode_alike(_some(plans, numbers), _some(xs, numbers), memories, None, key, work)
    return True


def decode_into(buffers: Sequence[Buffer], outs: Sequence[torch.Tensor]) -> bool:
    """Decode Buffers to their memory; False if that takes a call for any of them.

    For callers as those of `encode_into`.
    """
    plans = [buffer.plan for buffer in buffers]
    if not all(hasattr(_kernels(plan, False), "decode_many") for plan in plans):
        return False
    with _scope(outs[0].device, "torch"):
        for numbers in _alike(plans):
            memories: list[Any] = [buffers[i]._memory for i in numbers]
            begins = Memory.addresses(memories)
            _decode_alike(_some(plans, numbers), memories, begins, _some(outs, numbers))
    return True


def _alike(plans: Sequence[Plan]) -> list[list[int]]:
    """Numbers of the plans that a launch may have together: of one codec and dtype."""
    distinct = dict(zip(map(id, plans), plans, strict=True))
    kind_of = {key: _kind(plan) for key, plan in distinct.items()}
    if len(set(kind_of.values())) == 1:
        return [list(range(len(plans)))]
    groups: dict[Any, list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault(kind_of[id(plan)], []).append(i)
    return list(groups.values())


def _some(values: Sequence[T], numbers: list[int]) -> list[T]:
    """Those of `values` with these numbers, which go up."""
    return list(values) if len(numbers) == len(values) else [values[i] for i in numbers]


def _kind(plan: Plan) -> tuple[Any, ...]:
    """What plans have in common whose tensors kernels take together."""
    return plan.codec, plan.dtype, plan.checksum


class _Work:
    """Workspace of single calls: the caller's, or as much as the largest call so far took."""

    def __init__(self, scratch: Any, place: torch.device) -> None:
        self.given = []
        if scratch is not None:
            self.given.append(_writable_bytes(scratch, 0, "scratch", place))
        self._place = place
        self._last: torch.Tensor | None = None

    def of(self, plan: Plan) -> torch.Tensor | None:
        """What `_workspace` gives for `plan`."""
        if self.given:
            return _workspace(plan, self.given[0], self._place)
        if self._last is None or self._last.numel() < plan.scratch_nbytes:
            self._last = _workspace(plan, None, self._place)
        return self._last


def _encode_alike(
    plans: list[Plan],
    xs: list[torch.Tensor],
    memories: list[Memory],
    stats: list[torch.Tensor | None] | None,
    key: Key | None,
    work: _Work,
) -> None:
    """Encode tensors by plans of one codec and dtype, with statistics of all, some or none.

    Those without, if others have some, are encoded by themselves.
    """
    kernels: Any = _kernels(plans[0], False)
    if stats is not None and any(s is None for s in stats):
        given = [i for i, s in enumerate(stats) if s is not None]
        others = [i for i, s in enumerate(stats) if s is None]
        for numbers in filter(None, (given, others)):
            some: Any = _some(stats, numbers) if numbers is given else None
            parts = _some(plans, numbers), _some(xs, numbers), _some(memories, numbers)
            _encode_alike(*parts, some, key, work)
        return
    if len(plans) > 1 and hasattr(kernels, "encode_many"):
        found: Any = _measured_many(kernels, plans[0], xs) if stats is None else stats
        outs = Views(memories, Memory.addresses(memories), "data")
        kernels.encode_many(plans, xs, outs, found, key)
        return
    for i, (plan, x, memory) in enumerate(zip(plans, _detached(xs), memories, strict=True)):
        own = _measured(kernels, plan, x) if stats is None else stats[i]
        kernels.encode(plan, x, memory.data, work.of(plan), own, key)


def _measured_many(
    kernels: Any, plan: Plan, xs: list[torch.Tensor]
) -> Sequence[torch.Tensor] | torch.Tensor | None:
    """As `_measured`, of tensors of one dtype; the rows of a tensor are those of each."""
    if plan.codec.measures_in_encode or not hasattr(kernels, "measure"):
        return None
    if hasattr(kernels, "measure_many"):
        found: torch.Tensor | None = kernels.measure_many(plan.codec, plan.dtype, xs)
        return found
    first, *others = _detached(xs)
    stats = kernels.measure(plan.codec, plan.dtype, first)
    if stats is None:
        return None
    return [stats, *[kernels.measure(plan.codec, plan.dtype, x) for x in others]]


def _detached(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors whose operations autograd does not see."""
    return [x.detach() if x.requires_grad else x for x in xs]


def memories_of(
    plans: Sequence[Plan], outs: Sequence[Any] | None, place: torch.device
) -> list[Memory]:
    """Memory for buffers: what is given, else one allocation, each at a multiple of ALIGN in it."""
    if outs is not None and all(type(o) is Buffer for o in outs):
        found = [o._memory for o in outs]
        wholes = {id(memory.whole): memory.whole for memory in found}.values()
        fit = all(m.nbytes >= plan.nbytes for m, plan in zip(found, plans, strict=True))
        if fit and not any(m.foreign for m in found) and all(w.device == place for w in wholes):
            return found
    sizes = [-(-plan.nbytes // ALIGN) * ALIGN for plan in plans]
    if outs is not None:
        sizes = [size if o is None else 0 for size, o in zip(sizes, outs, strict=True)]
    *starts, end = accumulate(sizes, initial=0)
    whole = torch.empty(end, dtype=torch.uint8, device=place)
    made = list(map(Memory, repeat(whole), starts, map(operator.add, starts, sizes)))
    if outs is None:
        return made

    def memory_of(memory: Memory, plan: Plan, o: Any) -> Memory:
        return memory if o is None else _output_memory(o, plan, place)

    return each("out", memory_of, made, plans, outs)


def decode_many(
    buffers: Sequence[Any],
    numbers: Sequence[int],
    out: Sequence[Any] | None,
    results: list[Any],
    *,
    scratch: Any,
    max_nbytes: int | None,
    threads: int | None,
    required: bool,
) -> dict[int, FormatError]:
    """Decode the buffers with these numbers as `tightwire.decode_many`, to `results`.

    These are those of `out`, or None. Damage in a Buffer is found when that is checked; the errors
    that are returned, by number, are of sources whose headers the host reads.
    """
    outs = [None] * len(buffers) if out is None else out
    fit = None if out is None else plain_tensors(out)
    groups, alone = _groups(buffers, numbers, out, fit, required)
    limits: dict[str, Any] = {"max_nbytes": max_nbytes, "required": required}
    alone, failed = check_each(alone, buffers, outs, **limits)
    parts: list[_Part] = []
    for (place, _, target), numbers in groups.items():
        kept = numbers
        if max_nbytes is not None:
            kept = []
            for i in numbers:
                try:
                    check_limit(buffers[i].plan, max_nbytes)
                    kept.append(i)
                except FormatError as error:
                    failed[i] = error
        if kept:
            some = _some(buffers, kept)
            plans, memories = [b.plan for b in some], [b._memory for b in some]
            with _scope(place, target.library):
                if out is None:
                    elements = _new_elements(plans, place)
                elif len(kept) == len(out):
                    elements = _elements(plans, list(out), kept, fit, place)
                else:
                    given = [out[i] for i in kept]
                    elements = _elements(plans, given, kept, plain_tensors(given), place)
            begins = Memory.addresses(memories)
            parts.append(_Part(kept, plans, memories, begins, elements, target, place))
    if out is not None or scratch is not None:
        _check_outs_apart(parts, buffers, outs, scratch)
    for numbers, plans, memories, begins, elements, target, place in parts:
        with _scope(place, target.library):
            _decode_alike(plans, memories, begins, elements)
            lacking = zip(numbers, elements, strict=True) if fit is None else ()
            for i, x in lacking:
                if outs[i] is None:
                    results[i] = _export(x, plans[0].dtype, target)
    options: dict[str, Any] = {"scratch": scratch, "threads": threads}
    return failed | decode_each(alone, buffers, results, **limits, **options)


def _groups(
    buffers: Sequence[Any],
    numbers: Sequence[int],
    out: Sequence[Any] | None,
    fit: Listed | None,
    required: bool,
) -> tuple[dict[Any, list[int]], list[int]]:
    """Of `numbers` those of buffers that are decoded at a time, by `_group_of`, and the others.

    `fit` is what `out` is, if it is known.
    """
    groups: dict[Any, list[int]] = {}
    alone: list[int] = []
    known: dict[tuple[int, int, int], list[int]] = {}
    for i in numbers:
        src = buffers[i]
        if type(src) is not Buffer or src._memory is None:
            alone.append(i)
            continue
        key = id(src.plan), id(src._target), id(src._memory.whole)
        alike = known.get(key)
        if alike is None:
            group = _group_of(src)
            alike = known[key] = alone if group is None else groups.setdefault(group, [])
        if out is not None and fit is None and out[i] is not None and alike is not alone:
            alike = alike if _is_at(out[i], src.target) else alone
        alike.append(i)
    if fit is not None:
        for group in [group for group in groups if group[2] != fit[:2]]:
            alone += groups.pop(group)
    return {group: alike for group, alike in groups.items() if alike}, sorted(alone)


def _is_at(x: Any, target: Target) -> bool:
    """Whether `x` is an array of a library and on a device."""
    return arrays.is_array(x) and describe(x)[:2] == target


def _group_of(src: Buffer) -> Any:
    """What Buffers in device memory have in common that are decoded at a time; None for one that
    is not among them.

    (device, codec and dtype, library and device of results).
    """
    plan, target = src.plan, src.target
    place = _place(target.library, target.device, None)
    if place is None or src._memory is None or src._memory.whole.device != place:
        return None
    if not hasattr(_kernels(plan, False), "decode_many"):
        return None
    return place, (plan.codec, plan.dtype), target


class _Part(NamedTuple):
    """Buffers that are decoded at a time, by number, where they are, what to, and where that is."""

    numbers: list[int]
    plans: list[Plan]
    memories: list[Memory]
    begins: Words
    elements: list[torch.Tensor]
    target: Target
    place: torch.device


def _check_outs_apart(
    parts: list[_Part], buffers: Sequence[Any], outs: Sequence[Any], scratch: Any
) -> None:
    """Raise ValueError if `outs` or `scratch` overlap other memory that is read or written."""
    written, read = np.zeros((2, len(outs), 2), np.int64)
    alone = np.ones(len(outs), bool)
    for part in parts:
        starts = np.fromiter(map(torch.Tensor.data_ptr, part.elements), np.int64)
        written[part.numbers] = _with_ends(starts, part.plans)
        read[part.numbers] = _with_sizes(part.begins, part.plans)
        alone[part.numbers] = False
    for i in np.flatnonzero(alone).tolist():
        written[i], read[i] = span_of(outs[i]), span_of(buffers[i])
    check_apart({"out[{}]": written, "scratch": [span_of(scratch)]}, {"buffers[{}]": read})


def _decode_alike(
    plans: list[Plan], memories: list[Memory], begins: Words, results: Sequence[torch.Tensor]
) -> None:
    """Decode Buffers of one codec and dtype, which begin at these addresses."""
    kernels: Any = _kernels(plans[0], False)
    planned = [not memory.assembled for memory in memories]
    srcs = Views(memories, begins, "data")
    statuses = Views(memories, Memory.status_addresses(memories), "status")
    kernels.decode_many(plans, srcs, results, statuses, planned)
    for memory in memories:
        if memory.foreign:
            memory.lease(memory.data)


def _elements(
    plans: list[Plan],
    outs: list[Any],
    numbers: list[int],
    fit: Listed | None,
    place: torch.device,
) -> list[torch.Tensor]:
    """Memory for tensors: what is given, or new where that is None.

    `numbers` are those of `outs`, and `fit` is what these are, if it is known.
    """
    dtype = plans[0].dtype
    fits = fit is not None and (fit.dtype, fit.shapes) == (dtype, [plan.shape for plan in plans])
    if fits and not (torch.is_grad_enabled() and any(x.requires_grad for x in outs)):
        arrays.mark_all_written(outs)
        return outs
    new = iter(_new_elements([p for p, o in zip(plans, outs, strict=True) if o is None], place))
    return [
        next(new)
        if o is None
        else _output(o, describe(o), dtype, plan.shape, f"out[{number}]", place)
        for number, plan, o in zip(numbers, plans, outs, strict=True)
    ]


def _new_elements(plans: list[Plan], place: torch.device) -> list[torch.Tensor]:
    """New memory for tensors of one dtype."""
    return new_tensors([plan.shape for plan in plans], plans[0].dtype, place) if plans else []


class _Terms(NamedTuple):
    """The terms of a sum: buffers and their plan, and a tensor, or None, before number `place`."""

    plan: Plan
    buffers: list[Any]
    x: Any
    place: int

    @property
    def library(self) -> str | None:
        """The library in whose order buffers in device memory are written."""
        return next((b.target.library for b in self.buffers if isinstance(b, Buffer)), None)

    def memory(self, place: torch.device) -> list[torch.Tensor]:
        """The bytes of the buffers that are on a device."""
        found = [b._memory for b in self.buffers if isinstance(b, Buffer)]
        return [_within(m, self.plan) for m in found if m is not None and m.data.device == place]

    def target(self, out: Any) -> Target:
        """Where the sum goes: where `out` is, else the tensor, else what a buffer decodes to."""
        if out is not None and not isinstance(out, Buffer):
            info = describe(out)
            return Target(info.library, info.device)
        if self.x is not None:
            return Target(*describe(self.x)[:2])
        return source_target(self.buffers[0])

    def planned(self, place: torch.device) -> bool | None:
        """Whether headers are compared with the plan's; None if kernels cannot take the buffers.

        They take Buffers of one plan there, all assembled or none.
        """
        memories = [b._memory if isinstance(b, Buffer) else None for b in self.buffers]
        for buffer, memory in zip(self.buffers, memories, strict=True):
            if memory is None or memory.data.device != place or buffer.plan != self.plan:
                return None
        assembled = {memory.assembled for memory in memories if memory is not None}
        return None if len(assembled) > 1 else True not in assembled


def _terms(terms: Sequence[Any]) -> _Terms:
    """The terms of a sum, checked. FormatError names a buffer whose header the host reads."""
    numbers, tensor = split(terms)
    plans = []
    for number in numbers:
        src = terms[number]
        with of_term(number, len(numbers) > 1):
            plans.append(src.plan if isinstance(src, (Buffer, Parsed)) else head(src).plan)
    check_plans(numbers, plans)
    x = None if tensor is None else terms[tensor]
    if x is not None:
        check_added(describe(x), plans[0].shape, plans[0].dtype)
    return _Terms(plans[0], [terms[number] for number in numbers], x, tensor or 0)


def decode_sum(
    terms: Sequence[Any], *, scale: float | None, dtype: Any, out: Any, scratch: Any, required: bool
) -> Any:
    """As `tightwire.decode_sum`, on the device of the result; NotImplemented where that is the
    host's.
    """
    given = _terms(terms)
    plan, target = given.plan, given.target(out)
    wanted = plan.dtype if dtype is None else arrays.as_dtype(dtype)
    if wanted not in (plan.dtype, FLOAT32):
        raise ValueError(f"dtype is {wanted.name}; allowed: {plan.dtype.name}, float32, None")
    place = _place(target.library, target.device, "the result" if required else None)
    if place is None or wanted not in _ROUNDED:
        return NotImplemented
    with _scope(place, target.library, given.library):
        if out is None:
            result = torch.empty(plan.shape, dtype=_TORCH[wanted], device=place)
        else:
            result = _output(out, describe(out), wanted, plan.shape, "out", place)
        check_decoded_apart(terms, out, scratch)
        x = _local(given, place)
        _sum_into(given, x, result, wanted, scale, scratch)
        return _export(result, wanted, target) if out is None else out


def encode_sum(
    spec: CodecSpec,
    terms: Sequence[Any],
    *,
    scale: float | None,
    stats: Any,
    key: Key | None,
    out: Any,
    scratch: Any,
    checksum: bool,
    required: bool,
) -> Any:
    """As `Codec.encode_sum`, on the device of the tensor, or of the first buffer; NotImplemented
    where that is the host's.

    It is one pass where the codec has kernels for it, the buffers have the plan of the sum, and
    nothing has to be measured.
    """
    given = _terms(terms)
    source, target = given.plan, given.target(None)
    place = _place(target.library, target.device, "the first term" if required else None)
    dtype = source.dtype
    if place is None or dtype not in _ROUNDED or (out is not None and _is_host(out, required)):
        return NotImplemented
    plan = make_plan(spec, dtype, source.shape, source.chunks, checksum=checksum)
    kernels: Any = _kernels(plan, required)
    if kernels is None:
        return NotImplemented
    measures = stats is None and not spec.sums_keep_stats and _takes_stats(spec, dtype)
    planned = given.planned(place) if plan == source else None
    fused = planned is not None and not measures and hasattr(kernels, "encode_sum")
    fused = fused and plan.dtype in _FUSED_ADD
    if not fused and stats is None and spec.sums_keep_stats:
        # What a buffer has of them only kernels keep, and the host.
        total = NotImplemented
        if given.x is not None and (given.place, len(given.buffers), scale) == (1, 1, None):
            options = {"key": key, "out": out, "scratch": scratch, "checksum": checksum}
            options |= {"stats": None, "chunks": plan.chunks}
            total = decode_add_encode(spec, given.buffers[0], given.x, **options)
        if total is NotImplemented and required:
            raise ValueError(
                f"backend 'triton' encodes no such sum with {spec.name}; allowed: None"
            )
        return total
    with _scope(place, target.library, target.library if out is None else _library_of(out)):
        x = _local(given, place)
        memory = _output_memory(out, plan, place)
        first, last = span_of(memory.data, plan.nbytes)
        check_encoded_apart(plan, terms, given.x, out, stats, scratch)
        if stats is not None:
            stats = _stats(spec, stats, dtype, place)
        if planned is not None and fused:
            srcs = [
                data.clone() if start < last and first < stop else data
                for data in given.memory(place)
                for start, stop in [span_of(data)]
            ]
            kernels.encode_sum(
                plan,
                _places(given, srcs),
                memory.data,
                x=x,
                place=given.place,
                factor=scale,
                planned=planned,
                stats=stats,
                key=key,
            )
        else:
            total = torch.empty(plan.shape, dtype=_TORCH[dtype], device=place)
            _sum_into(given, x, total, dtype, scale, scratch)
            if stats is None or plan.codec != spec:
                stats = _measured(kernels, plan, total)
            work = _workspace(plan, scratch, place)
            kernels.encode(plan, total, memory.data, work, stats, key)
    if isinstance(out, Buffer) and out.plan is plan and out.target == target:
        return out
    return Buffer(plan, None, target, memory)


def _local(given: _Terms, place: torch.device) -> torch.Tensor | None:
    """The tensor among the terms, contiguous; it must be on the device."""
    if given.x is None:
        return None
    x = _values(given.x, describe(given.x))
    if x.device != place:
        raise ValueError(f"the array that is added is on {x.device}; needed: {place}")
    return x.contiguous()


def _places(given: _Terms, srcs: Sequence[torch.Tensor]) -> Places:
    """Where the buffers of a sum are that its kernels take."""
    memories = [buffer._memory for buffer in given.buffers]
    Memory.status_addresses(memories)
    sums = torch.empty((len(memories), given.plan.chunks), dtype=torch.int64, device=srcs[0].device)
    return places_of(srcs, sums, [memory.status for memory in memories])


def _sum_into(
    given: _Terms,
    x: torch.Tensor | None,
    out: torch.Tensor,
    dtype: DType,
    scale: float | None,
    scratch: Any,
) -> None:
    """Write a sum, of `dtype`, to `out`; by one launch, or by decoding one buffer after another."""
    plan, place = given.plan, out.device
    kernels: Any = _kernels(plan, False)
    planned = given.planned(place)
    if planned is not None and plan.dtype in _FUSED_ADD and hasattr(kernels, "sum"):
        places = _places(given, given.memory(place))
        kernels.sum(plan, places, out, x=x, place=given.place, factor=scale, planned=planned)
        return
    wide = torch.float64 if wide_dtype(plan.dtype).itemsize == 8 else torch.float32
    decoded = torch.empty(plan.shape, dtype=_TORCH[plan.dtype], device=place)
    terms = list(given.buffers)
    if x is not None:
        terms.insert(given.place, x)
    total: torch.Tensor | None = None
    for number, src in enumerate(terms):
        values = src
        if src is not x:
            with of_term(number, len(given.buffers) > 1):
                values = decode(src, out=decoded, scratch=scratch)
        # Never in place: a term of float32 is not copied by `to`.
        total = values.to(wide, copy=True) if total is None else total + values.to(wide)
    assert total is not None
    if scale is not None:
        total = total * scale
    bits = total.to(out.dtype).view(_INTEGERS[out.element_size()])
    if dtype.name == "float8_e4m3fn":
        # What rounds to more than its largest number is NaN; PyTorch has changed its mind on that.
        bits = torch.where(total.abs() > 464, bits | 0x7F, bits)
    quiet = int(rounded(np.array([np.nan], wide_dtype(dtype)), dtype)[0])
    out.copy_(bits.masked_fill_(total.isnan(), quiet).view(out.dtype))


def _within(memory: Memory, plan: Plan) -> torch.Tensor:
    return memory.data[: plan.nbytes]


def _spans(memories: Sequence[Memory], plans: Sequence[Plan]) -> Spans:
    """Start and end of buffers."""
    return _with_sizes(Memory.addresses(memories), plans)


def _with_sizes(begins: Words, plans: Sequence[Plan]) -> Spans:
    """Start and end of buffers that begin at these addresses."""
    return np.stack([begins, begins + [plan.nbytes for plan in plans]], 1)


def _spans_of(tensors: Sequence[Any], addresses: Words | None, plans: Sequence[Plan]) -> Spans:
    """Start and end of tensors; of contiguous ones at `addresses`."""
    if addresses is None:
        return spans_of(tensors)
    return _with_ends(addresses, plans)


def _with_ends(starts: Words, plans: Sequence[Plan]) -> Spans:
    """Start and end of contiguous tensors of plans of one dtype."""
    item = plans[0].dtype.itemsize
    return np.stack([starts, starts + [plan.nelem * item for plan in plans]], 1)
