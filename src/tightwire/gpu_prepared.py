"""Prepared calls on a GPU: see `tightwire.prepared`.

What a call does there is recorded once (codecs/common/record_triton.py): kernels with all of their
arguments, and what PyTorch fills or copies in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arrays import describe
from .codecs.common.base import Key, Plan
from .codecs.common.frame_triton import places_of, problem
from .codecs.common.record_triton import record
from .formats.dtypes import BY_NAME, DType
from .formats.errors import FormatError
from .gpu import _FUSED_ADD, _kernels, _measured, _stats, _takes_stats
from .gpu_arrays import _TORCH, _bytes, _output, _place, _scope
from .gpu_many import _alike, _encode_alike, _some, _Work
from .gpu_memory import Memory
from .prepared import Prepared, Terms, check_terms, named

_UINT8, _FLOAT32 = BY_NAME["uint8"], BY_NAME["float32"]


def encode_many(
    plans: Sequence[Plan],
    xs: Sequence[Any],
    outs: Sequence[Any],
    stats: Sequence[Any] | None,
    key: Key | None,
) -> Prepared:
    """As `prepare_encode_many`."""
    if not plans:
        return Prepared([], torch.zeros(0, dtype=torch.int64, device="cpu"), _nothing)
    place = _place_of(xs[0], "xs[0]")
    return _prepared(place, _encoder(plans, xs, outs, stats, key), _new_statuses(0, place))


def has_kernels(plan: Plan) -> bool:
    """Whether there are kernels for a plan."""
    return _kernels(plan, False) is not None


def encode_planned(plans: Sequence[Plan], xs: Sequence[Any], outs: Sequence[Any]) -> None:
    """As `prepared.encode_planned`."""
    encode = _encoder(plans, xs, outs, None, None)
    with _scope(_place_of(xs[0], "xs[0]"), "torch"):
        encode()


def _encoder(
    plans: Sequence[Plan],
    xs: Sequence[Any],
    outs: Sequence[Any],
    stats: Sequence[Any] | None,
    key: Key | None,
) -> Callable[[], None]:
    """What encodes tensors of a device, all of which are looked at here."""
    place = _place_of(xs[0], "xs[0]")
    kernels = [_kernels_for(plan) for plan in plans]
    elements = [
        _elements(f"xs[{i}]", x, (plan.dtype,), plan.shape, place)
        for i, (x, plan) in enumerate(zip(xs, plans, strict=True))
    ]
    buffers = [
        _buffer(f"outs[{i}]", out, plan, place)
        for i, (out, plan) in enumerate(zip(outs, plans, strict=True))
    ]
    given = None
    if stats is not None:
        given = [
            _stats(p.codec, s, p.dtype, place) if _takes_stats(p.codec, p.dtype) else None
            for p, s in zip(plans, stats, strict=True)
        ]

    memories = list(map(Memory, buffers))

    def encode() -> None:
        work = _Work(None, place)
        for numbers in _alike(plans):
            if len(numbers) > 1 and not hasattr(kernels[numbers[0]], "encode_many"):
                # Each has work memory of its own.
                for i in numbers:
                    one = None if given is None else [given[i]]
                    _encode_alike(
                        [plans[i]], [elements[i]], [memories[i]], one, key, _Work(None, place)
                    )
                continue
            some = None if given is None else _some(given, numbers)
            _encode_alike(
                _some(plans, numbers),
                _some(elements, numbers),
                _some(memories, numbers),
                None if some is None or some[0] is None else some,
                key,
                work,
            )

    return encode


def decode(
    plan: Plan,
    src: Any,
    out: Any,
    start: int,
    stop: int,
    shape: tuple[int, ...],
    add: bool,
) -> Prepared:
    """As `prepare_decode`."""
    place = _place_of(out, "out")
    kernels = _kernels_for(plan)
    allowed: tuple[DType, ...] = (plan.dtype,)
    if add:
        if plan.dtype not in _FUSED_ADD:
            names = ", ".join(dtype.name for dtype in _FUSED_ADD)
            raise ValueError(f"the plan is of {plan.dtype.name}; kernels add {names}")
        allowed = (plan.dtype, _FLOAT32)
    data = _buffer("src", src, plan, place)
    result = _output_of("out", out, allowed, shape, place)
    statuses = _new_statuses(1, place)
    work = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device=place)

    def call() -> None:
        options: dict[str, Any] = {"start": start, "stop": stop, "add": add, "planned": True}
        kernels.decode(plan, data, result, work, statuses, **options)

    return _prepared(place, call, statuses)


def decode_many(plans: Sequence[Plan], srcs: Sequence[Any], outs: Sequence[Any]) -> Prepared:
    """As `prepare_decode_many`."""
    if not plans:
        return Prepared([], torch.zeros(0, dtype=torch.int64, device="cpu"), _nothing)
    place = _place_of(outs[0], "outs[0]")
    kernels = _kernels_for(plans[0])
    for i, plan in enumerate(plans):
        if (plan.codec, plan.dtype) != (plans[0].codec, plans[0].dtype):
            raise ValueError(
                f"plans[{i}] is of {plan.codec.name}, {plan.dtype.name}; allowed: plans of one "
                "codec and dtype"
            )
    sources = [
        _buffer(f"srcs[{i}]", src, plan, place)
        for i, (src, plan) in enumerate(zip(srcs, plans, strict=True))
    ]
    results = [
        _output_of(f"outs[{i}]", out, (plan.dtype,), plan.shape, place)
        for i, (out, plan) in enumerate(zip(outs, plans, strict=True))
    ]
    statuses = _new_statuses(len(plans), place)
    words = list(statuses.split(1))

    def call() -> None:
        if hasattr(kernels, "decode_many"):
            kernels.decode_many(plans, sources, results, words, [True] * len(plans))
            return
        for plan, data, result, word in zip(plans, sources, results, words, strict=True):
            work = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device=place)
            kernels.decode(plan, data, result, work, word, planned=True)

    return _prepared(place, call, statuses)


def decode_sum(plan: Plan, terms: Terms, out: Any) -> Prepared:
    """As `prepare_decode_sum`."""
    place = _place_of(out, "out")
    kernels = _kernels_for_sums(plan)
    sources, x = _terms(plan, terms, place)
    result = _output_of("out", out, (plan.dtype, _FLOAT32), plan.shape, place)
    statuses = _new_statuses(len(sources), place)

    def call() -> None:
        sums = torch.empty((len(sources), plan.chunks), dtype=torch.int64, device=place)
        places = places_of(sources, sums, statuses)
        options = {"x": x, "place": terms.place, "factor": terms.scale, "planned": True}
        kernels.sum(plan, places, result, **options)

    return _prepared(place, call, statuses)


def encode_sum(plan: Plan, terms: Terms, out: Any, stats: Any, key: Key | None) -> Prepared:
    """As `prepare_encode_sum`."""
    place = _place_of(out, "out")
    kernels = _kernels_for_sums(plan)
    sources, x = _terms(plan, terms, place)
    encoded = _buffer("out", out, plan, place)
    given = None if stats is None else _stats(plan.codec, stats, plan.dtype, place)
    fused = hasattr(kernels, "encode_sum")
    if not fused and given is None and plan.codec.sums_keep_stats:
        raise ValueError(f"no kernel keeps the statistics of {plan.codec.name}; allowed: stats")
    measures = given is None and not plan.codec.sums_keep_stats
    measures = measures and _takes_stats(plan.codec, plan.dtype)
    statuses = _new_statuses(len(sources), place)

    def call() -> None:
        sums = torch.empty((len(sources), plan.chunks), dtype=torch.int64, device=place)
        places = places_of(sources, sums, statuses)
        options = {"x": x, "place": terms.place, "factor": terms.scale, "planned": True}
        if not measures and fused:
            kernels.encode_sum(plan, places, encoded, stats=given, key=key, **options)
            return
        total = torch.empty(plan.shape, dtype=_TORCH[plan.dtype], device=place)
        kernels.sum(plan, places, total, **options)
        found = _measured(kernels, plan, total) if given is None else given
        work = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device=place)
        kernels.encode(plan, total, encoded, work, found, key)

    return _prepared(place, call, statuses)


def _nothing() -> None:
    pass


def _prepared(place: torch.device, call: Callable[[], None], statuses: torch.Tensor) -> Prepared:
    """What `call` does on a device, whose work memory is its own."""
    on_gpu = place.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise ValueError("a call is prepared while a graph is captured; allowed: before")
    with _scope(place, "torch"):
        steps = record(call)
        if on_gpu:
            # Tables are there whatever stream the first call is on.
            torch.cuda.current_stream(place).synchronize()

    def check() -> None:
        words = statuses.tolist()
        if any(words):
            statuses.zero_()
            first = next(i for i, word in enumerate(words) if word)
            error: FormatError | None = problem(words[first])
            if error is not None:
                raise named(error, first, len(words))

    if not on_gpu:
        return Prepared(steps, statuses, check)

    def run() -> None:
        with _scope(place, "torch"):
            for step in steps:
                step()

    return Prepared([run], statuses, check)


def _new_statuses(number: int, place: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(number, dtype=torch.int64, device=place)


def _place_of(x: Any, name: str) -> torch.device:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; allowed on a GPU: PyTorch tensors")
    info = describe(x)
    place: torch.device = _place(info.library, info.device, name)
    return place


def _kernels_for(plan: Plan) -> Any:
    return _kernels(plan, True)


def _kernels_for_sums(plan: Plan) -> Any:
    kernels = _kernels_for(plan)
    if not hasattr(kernels, "sum") or plan.dtype not in _FUSED_ADD:
        what = f"{plan.dtype.name} with {plan.codec.name}"
        raise ValueError(f"no kernel sums up buffers of {what}; allowed: what decode_add adds")
    return kernels


def _on(name: str, x: Any, place: torch.device) -> torch.Tensor:
    """A contiguous tensor on a device, without what autograd keeps of it."""
    if _place_of(x, name) != place:
        raise ValueError(f"{name} is on {x.device}; needed: memory on {place}")
    tensor: torch.Tensor = x.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} must be contiguous")
    return tensor


def _elements(
    name: str, x: Any, dtypes: Sequence[DType], shape: tuple[int, ...], place: torch.device
) -> torch.Tensor:
    tensor, info = _on(name, x, place), describe(x)
    if info.dtype not in dtypes or info.shape != shape:
        needed = " or ".join(dtype.name for dtype in dtypes)
        found = f"{info.dtype.name}{list(info.shape)}"
        raise ValueError(f"{name} is {found}; needed: {needed}{list(shape)}")
    return tensor


def _output_of(
    name: str, x: Any, dtypes: Sequence[DType], shape: tuple[int, ...], place: torch.device
) -> torch.Tensor:
    _elements(name, x, dtypes, shape, place)
    info = describe(x)
    return _output(x, info, info.dtype, shape, name, place)


def _buffer(name: str, x: Any, plan: Plan, place: torch.device) -> torch.Tensor:
    """The bytes of a buffer of `plan`."""
    tensor, info = _on(name, x, place), describe(x)
    if info.dtype != _UINT8:
        raise TypeError(f"{name} is {info.dtype.name}; allowed: uint8")
    return _bytes(tensor, plan.nbytes, name, place)[: plan.nbytes]


def _terms(
    plan: Plan, terms: Terms, place: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    check_terms(plan, terms)
    sources = [_buffer(f"buffers[{i}]", b, plan, place) for i, b in enumerate(terms.buffers)]
    if terms.x is None:
        return sources, None
    return sources, _elements("x", terms.x, (plan.dtype, _FLOAT32), plan.shape, place)
