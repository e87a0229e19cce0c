"""Prepared calls: codec calls on fixed memory, made ready once and then made again and again.

A collective knows its plans and its memory before its first step. What a call checks, looks up and
allocates is done here beforehand; the call itself launches kernels, or on the host runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import arrays, engine, host_many, host_sums
from .apart import Spans, check_apart, span_of, spans_of
from .arguments import (
    device_for,
    each,
    host_stats,
    need_key,
    need_no_base,
    number,
    output_memory,
    thread_count,
)
from .codecs.common.base import Bits, Bytes, Key, Plan
from .codecs.common.float_mode import default_floats
from .codecs.common.sums import FLOAT32
from .engine import Parsed, parse_as
from .formats.dtypes import BY_NAME, DType
from .formats.errors import FormatError
from .planning import backend_module, device_module
from .single_calls import is_aligned, is_quick, read_quick, write_quick

_UINT8 = BY_NAME["uint8"]


class Prepared:
    """A call that is ready to be made: ``call()`` does it once more.

    It keeps the arrays that it was prepared with, and the work memory that it has of its own, and
    reads and writes them where they are. On a GPU it launches kernels on the current stream, waits
    for nothing and allocates nothing, so that a captured CUDA graph can have it. As its work memory
    is one, calls of one object follow one another: on one stream, or on streams that wait for each
    other, and on the host in one thread at a time. Different objects are independent. Autograd is
    not told of what a call writes.

    Args:
        steps: What a call does, one after the other.
        check: What ``check`` does.
        statuses: A word for each buffer that is decoded, int64, shape ``(buffers,)``: 0 while
            nothing is wrong with it. On a GPU a tensor there, on the host a NumPy array. Nothing
            but ``check`` clears it.
    """

    __slots__ = ("_check", "_steps", "statuses")

    def __init__(
        self, steps: Sequence[Callable[[], object]], statuses: Any, check: Callable[[], None]
    ) -> None:
        self._steps = tuple(steps)
        self._check = check
        self.statuses = statuses

    def __call__(self) -> None:
        """Make the call. What is wrong with buffers that it decodes is kept in ``statuses``."""
        for step in self._steps:
            step()

    def check(self) -> None:
        """Raise what is wrong with a buffer that was decoded, and forget it; waits for the device.

        Raises:
            FormatError: If a buffer is damaged; if there are several, its ``number`` is the place
                of the first such buffer.
        """
        self._check()


class Terms(NamedTuple):
    """The terms of a sum: buffers of a plan, and a local array or None before number ``place``.

    Attributes:
        buffers: The bytes of buffers, uint8, each of the plan's size.
        x: An array of the plan's shape, and of its dtype or float32.
        place: How many of the buffers are added before ``x``.
        scale: What the sum is multiplied by, or None.
    """

    buffers: Sequence[Any]
    x: Any = None
    place: int = 0
    scale: float | None = None


def prepare_encode(
    plan: Plan,
    x: Any,
    out: Any,
    *,
    stats: Any = None,
    key: Key | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Prepared:
    """Prepare encoding of ``x`` into ``out``.

    Args:
        plan: The plan of the buffer.
        x: A contiguous array of its shape and dtype, a PyTorch tensor if it is on a GPU.
        out: uint8, of at least ``plan.nbytes`` bytes, aligned to 16 on a GPU, apart from ``x``.
        stats: Statistics as ``Codec.encode`` takes them. Each call reads them anew if they are an
            array on the device of ``x``; others are read once. None: each call measures ``x``.
        key: As in ``Codec.encode``. Its numbers are the same in each call; of arrays on the device
            of ``x`` each call takes what they hold then.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        The call.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an array does not fit, or there are no kernels for the codec on its GPU.
    """
    return prepare_encode_many(
        [plan],
        [x],
        [out],
        stats=None if stats is None else [stats],
        key=key,
        threads=threads,
        backend=backend,
    )


def prepare_encode_many(
    plans: Sequence[Plan],
    xs: Sequence[Any],
    outs: Sequence[Any],
    *,
    stats: Sequence[Any] | None = None,
    key: Key | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Prepared:
    """Prepare encoding of arrays of one device and dtype, as ``prepare_encode`` does of one.

    Args:
        plans: The plans, one for each array. On a GPU those of more than one array have one chunk
            or as many as they like, but all are of one codec, or raw.
        xs: The arrays.
        outs: Memory of the buffers.
        stats: Statistics, one for each array, or None.
        key: As in ``prepare_encode``.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        The call.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an array does not fit, or there are no kernels for a codec on its GPU.
    """
    _check_many(plans, xs, outs, stats, key)
    some = [None] * len(plans) if stats is None else stats
    gpu = _gpu_for(backend, *xs, *outs)
    if gpu is not None:
        found: Prepared = gpu.encode_many(plans, xs, outs, stats, key)
        return found
    encoded = each("outs", output_memory, plans, outs)
    bits = [
        _elements(f"xs[{i}]", x, plan.dtype, plan.shape)
        for i, (x, plan) in enumerate(zip(xs, plans, strict=True))
    ]
    given = each("stats", host_stats, [plan.codec for plan in plans], plans, some)
    items = list(map(host_many.Encoding, plans, bits, encoded, given))
    count = thread_count(threads)

    quick = all(is_quick(item.plan, count, backend) and item.stats is None for item in items)
    quick = quick and key is None and (count == 1 or len(items) == 1)

    def encode() -> None:
        if quick and all(write_quick(plan, bits, out) for plan, bits, out, _ in items):
            return
        host_many.encode_all(items, key, count, backend, "xs")

    return Prepared([encode], np.zeros(0, np.int64), _nothing)


def has_kernels(plan: Plan, like: Any) -> bool:
    """Whether a plan's elements are coded where they are; if not, a GPU's go by way of the host.

    Args:
        plan: The plan.
        like: An array of the library and device.
    """
    gpu = _gpu_for(None, like)
    return gpu is None or bool(gpu.has_kernels(plan))


def peer_sum(plan: Plan, like: Any, ranks: int, rank: int) -> Any:
    """What sums up tensors of a plan over GPUs that read one another's memory, in one launch.

    Args:
        plan: The plan.
        like: A tensor of PyTorch's on this rank's GPU.
        ranks: Number of ranks.
        rank: Number of this one.

    Returns:
        A ``codecs.common.peer_sums_triton.PeerSum``; None where the codec has no such kernel.
    """
    module = device_module(plan.codec.name) if has_kernels(plan, like) else None
    driver = getattr(module, "driver_of", None)
    if driver is None:
        return None
    from .codecs.common.peer_sums_triton import PeerSum, takes

    found = driver(plan)
    return PeerSum(found, plan, like.device, ranks, rank) if takes(found, plan) else None


def encode_planned(
    plans: Sequence[Plan], xs: Sequence[Any], outs: Sequence[Any], *, backend: str | None = None
) -> None:
    """Encode arrays by plans once, as a call of ``prepare_encode_many`` would.

    On a GPU nothing waits for the device, and a graph that is being captured can have the call.

    Args:
        plans: At least one, as in ``prepare_encode_many``, of codecs that do not draw.
        xs: As there.
        outs: As there.
        backend: As there.
    """
    gpu = _gpu_for(backend, *xs, *outs)
    if gpu is None:
        prepare_encode_many(plans, xs, outs, backend=backend)()
        return
    _check_many(plans, xs, outs, None, None)
    gpu.encode_planned(plans, xs, outs)


def _check_many(
    plans: Sequence[Plan],
    xs: Sequence[Any],
    outs: Sequence[Any],
    stats: Sequence[Any] | None,
    key: Key | None,
) -> None:
    """Raise for arguments that do not fit each other."""
    _need_no_base(plans)
    for plan in plans:
        need_key(plan.codec, plan.dtype, key)
    _need_as_many(len(plans), xs=xs, outs=outs, stats=stats)
    written = [span_of(out, plan.nbytes) for out, plan in zip(outs, plans, strict=True)]
    some = [None] * len(plans) if stats is None else stats
    read: dict[str, Spans] = {"xs[{}]": spans_of(xs), "stats[{}]": spans_of(some)}
    check_apart({"outs[{}]": written}, read)


def prepare_decode(
    plan: Plan,
    src: Any,
    out: Any,
    *,
    start: int = 0,
    stop: int | None = None,
    add: bool = False,
    threads: int | None = None,
    backend: str | None = None,
) -> Prepared:
    """Prepare decoding of the buffer in ``src`` to ``out``, or adding it there.

    Args:
        plan: The plan of the buffer. One of another plan is damaged.
        src: Its bytes: uint8, of at least ``plan.nbytes`` bytes, aligned to 16 on a GPU. A tensor
            may be a view of another GPU's memory that is mapped on this one.
        out: A contiguous array of the selection: of the plan's shape for a whole tensor, else of
            ``stop - start`` elements; of the plan's dtype, or to ``add`` to also float32.
        start: First flat element to decode.
        stop: One past the last. None: all.
        add: Add the elements to ``out``, as ``Codec.decode_add`` does; of a whole tensor.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        The call.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an array does not fit, or there are no kernels for this on its GPU.
    """
    lo, hi, shape = engine.selection(plan, start or None, stop)
    if add and (lo, hi) != (0, plan.nelem):
        raise ValueError(f"add with start={start}, stop={stop}; allowed: a whole tensor")
    _need_no_base([plan])
    check_apart({"out": [span_of(out)]}, {"src": [span_of(src, plan.nbytes)]})
    gpu = _gpu_for(backend, src, out)
    if gpu is not None:
        found: Prepared = gpu.decode(plan, src, out, lo, hi, shape, add)
        return found
    data = _buffer("src", plan, src)
    dtype = arrays.describe(out).dtype if add else plan.dtype
    if add and (not plan.dtype.is_float or dtype not in (plan.dtype, FLOAT32)):
        raise ValueError(f"out is {dtype.name}; allowed: {plan.dtype.name}, float32, both floats")
    bits = arrays.writable_bits(out, dtype, shape, "out")
    count = thread_count(threads)

    @default_floats()
    def decode(parsed: list[Parsed]) -> None:
        if not add:
            engine.decode_range(parsed[0], bits, lo, threads=count, backend=backend)
            return
        values = bits.view(dtype.numpy)
        # Sums in the buffer's dtype are rounded once.
        own = dtype == plan.dtype and dtype != FLOAT32
        fused = backend in (None, "cpu")
        if not (fused and engine.decode_add(parsed[0], bits if own else values, threads=count)):
            decoded = np.empty(plan.nelem, plan.dtype.bits)
            engine.decode_range(parsed[0], decoded, 0, threads=count, backend=backend)
            values += decoded.view(plan.dtype.numpy).astype(values.dtype)

    whole = not add and (lo, hi) == (0, plan.nelem)
    if not (whole and is_quick(plan, count, backend) and is_aligned(data)):
        return _reading([plan], [data], decode)
    quick = partial(read_quick, plan, _read_only(data), bits)
    return _reading([plan], [data], decode, quick=quick)


def prepare_decode_many(
    plans: Sequence[Plan],
    srcs: Sequence[Any],
    outs: Sequence[Any],
    *,
    threads: int | None = None,
    backend: str | None = None,
) -> Prepared:
    """Prepare decoding of whole buffers, as ``prepare_decode`` does of one.

    Args:
        plans: The plans, one for each buffer, on a GPU all of one codec and dtype.
        srcs: The bytes of the buffers.
        outs: Contiguous arrays of the plans' shapes and dtypes.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        The call. If some buffers are damaged it decodes the others.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an array does not fit, or there are no kernels for a codec on its GPU.
    """
    _need_no_base(plans)
    _need_as_many(len(plans), srcs=srcs, outs=outs)
    read = [span_of(src, plan.nbytes) for src, plan in zip(srcs, plans, strict=True)]
    check_apart({"outs[{}]": spans_of(outs)}, {"srcs[{}]": read})
    gpu = _gpu_for(backend, *srcs, *outs)
    if gpu is not None:
        found: Prepared = gpu.decode_many(plans, srcs, outs)
        return found
    sources, elements = [], []
    for i, (plan, src, out) in enumerate(zip(plans, srcs, outs, strict=True)):
        sources.append(_buffer(f"srcs[{i}]", plan, src))
        elements.append(arrays.writable_bits(out, plan.dtype, plan.shape, f"outs[{i}]"))
    count = thread_count(threads)
    held = _Held(plans, sources)
    quick = count == 1 and all(is_quick(plan, count, backend) for plan in plans)
    quick = quick and all(map(is_aligned, sources))
    views = list(map(_read_only, sources))

    def decode() -> None:
        if quick and all(map(read_quick, plans, views, elements)):
            return
        parsed = held.parsed()
        known = [(p, bits) for p, bits in zip(parsed, elements, strict=True) if p is not None]
        numbers = [i for i, p in enumerate(parsed) if p is not None]
        for i, error in zip(numbers, host_many.decode_all(known, count, backend), strict=True):
            if error is not None:
                held.note(i, error)

    return Prepared([decode], held.statuses, held.check)


def prepare_decode_sum(
    plan: Plan,
    terms: Terms,
    out: Any,
    *,
    threads: int | None = None,
    backend: str | None = None,
) -> Prepared:
    """Prepare the sum of buffers and a local array, written to ``out``.

    Args:
        plan: The plan of the buffers, of a float dtype.
        terms: What is added, see ``tightwire.decode_sum``.
        out: A contiguous array of the plan's shape, and of its dtype or float32, apart from all
            terms.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        The call.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an array does not fit, or there are no kernels for the sum on its GPU.
    """
    _need_no_base([plan])
    _check_terms_apart(plan, terms, span_of(out))
    gpu = _gpu_for(backend, *terms.buffers, terms.x, out)
    if gpu is not None:
        found: Prepared = gpu.decode_sum(plan, terms, out)
        return found
    sources, x = _terms(plan, terms)
    info = arrays.describe(out)
    if info.dtype not in (plan.dtype, FLOAT32):
        raise ValueError(f"out is {info.dtype.name}; allowed: {plan.dtype.name}, float32")
    bits = arrays.writable_bits(out, info.dtype, plan.shape, "out")
    count = _count(plan, threads, backend)

    def add(parsed: list[Parsed]) -> None:
        host_sums.sum_into(
            _with(parsed, x, terms.place),
            bits,
            scale=terms.scale,
            wide=info.dtype != plan.dtype,
            threads=count,
            backend=backend,
        )

    return _reading([plan] * len(sources), sources, add, terms)


def prepare_encode_sum(
    plan: Plan,
    terms: Terms,
    out: Any,
    *,
    stats: Any = None,
    key: Key | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Prepared:
    """Prepare the sum of buffers and a local array, encoded into ``out`` by the buffers' plan.

    Args:
        plan: The plan of the buffers and of the sum, of a float dtype.
        terms: What is added, see ``Codec.encode_sum``.
        out: uint8, of at least ``plan.nbytes`` bytes, aligned to 16 on a GPU, apart from all terms.
        stats: As in ``prepare_encode``; see ``Codec.encode_sum``.
        key: As in ``prepare_encode``.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        The call.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an array does not fit, or there are no kernels for the sum on its GPU.
    """
    _need_no_base([plan])
    need_key(plan.codec, plan.dtype, key)
    _check_terms_apart(plan, terms, span_of(out, plan.nbytes), stats)
    gpu = _gpu_for(backend, *terms.buffers, terms.x, out)
    if gpu is not None:
        found: Prepared = gpu.encode_sum(plan, terms, out, stats, key)
        return found
    sources, x = _terms(plan, terms)
    encoded = output_memory(plan, out)
    given = host_stats(plan.codec, plan, stats)
    count = _count(plan, threads, backend)

    def add(parsed: list[Parsed]) -> None:
        host_sums.encode_sum(
            plan,
            _with(parsed, x, terms.place),
            encoded,
            scale=terms.scale,
            stats=given,
            key=key,
            threads=count,
            backend=backend,
        )

    return _reading([plan] * len(sources), sources, add, terms)


def _nothing() -> None:
    pass


def _read_only(data: Bytes) -> Bytes:
    view = data.view()
    view.flags.writeable = False
    return view


def _gpu_for(backend: str | None, *values: Any) -> ModuleType | None:
    """The module of calls on a GPU if one of `values` is there or Triton is asked for."""
    if device_for(backend, *values) is None:
        return None
    from . import gpu_prepared

    return gpu_prepared


def _need_no_base(plans: Sequence[Plan]) -> None:
    for codec in {plan.codec for plan in plans}:
        need_no_base(codec, "prepared calls", "code each tensor by itself")


def _need_as_many(n: int, **named: Sequence[Any] | None) -> None:
    """Raise ValueError unless all of these have `n` elements."""
    for name, values in named.items():
        if values is not None and len(values) != n:
            raise ValueError(f"{name} has {len(values)} elements; needed: {n}, as plans")


def _elements(name: str, x: Any, dtype: DType, shape: tuple[int, ...]) -> Bits:
    """The elements of a contiguous array on the host, in its memory."""
    info = arrays.describe(x)
    if (info.dtype, info.shape) != (dtype, shape):
        found, needed = f"{info.dtype.name}{list(info.shape)}", f"{dtype.name}{list(shape)}"
        raise ValueError(f"{name} is {found}; needed: {needed}, as the plan")
    bits = arrays.host_bits(x, dtype)
    if bits.size and not np.may_share_memory(bits, arrays.host_array(x)):
        raise ValueError(f"{name} must be contiguous and in native byte order")
    return bits


def _buffer(name: str, plan: Plan, src: Any) -> Bytes:
    """The bytes of a buffer of a plan, in their memory."""
    info = arrays.describe(src)
    data = _elements(name, src, _UINT8, info.shape)
    if data.size < plan.nbytes:
        raise ValueError(f"{name} has {data.size} bytes; the plan needs {plan.nbytes}")
    return data[: plan.nbytes]


def _check_terms_apart(plan: Plan, terms: Terms, out: tuple[int, int], stats: Any = None) -> None:
    """Raise ValueError if the memory of a sum overlaps what is read."""
    read: dict[str, Spans] = {"buffers[{}]": [span_of(src, plan.nbytes) for src in terms.buffers]}
    check_apart({"out": [out]}, read | {"x": [span_of(terms.x)], "stats": [span_of(stats)]})


def _terms(plan: Plan, terms: Terms) -> tuple[list[Bytes], Bits | None]:
    """The buffers of a sum, and the elements of its local array."""
    check_terms(plan, terms)
    sources = [_buffer(f"buffers[{i}]", plan, src) for i, src in enumerate(terms.buffers)]
    if terms.x is None:
        return sources, None
    dtype = arrays.describe(terms.x).dtype
    wide = dtype == FLOAT32 and plan.dtype.itemsize < 4
    return sources, _elements("x", terms.x, dtype if wide else plan.dtype, plan.shape)


def check_terms(plan: Plan, terms: Terms) -> None:
    """Raise TypeError or ValueError unless these are terms of a sum of buffers of the plan."""
    if not plan.dtype.is_float:
        raise TypeError(f"the plan is of {plan.dtype.name}; allowed: float dtypes")
    if not terms.buffers or not 0 <= terms.place <= len(terms.buffers):
        n = len(terms.buffers)
        raise ValueError(f"place is {terms.place} of {n} buffers; allowed: 0 to {n}, and a buffer")
    number("scale", terms.scale)


def _count(plan: Plan, threads: int | None, backend: str | None) -> int:
    """How many threads a call may take. Raises ValueError also for an unknown backend."""
    backend_module(plan.codec.name, backend)
    return thread_count(threads)


def _with(parsed: list[Parsed], x: Bits | None, place: int) -> list[Parsed | Bits]:
    """The terms of a sum in their order."""
    return [*parsed[:place], *(() if x is None else (x,)), *parsed[place:]]


def _reading(
    plans: Sequence[Plan],
    sources: Sequence[Bytes],
    call: Callable[[list[Parsed]], None],
    terms: Terms | None = None,
    quick: Callable[[], bool] | None = None,
) -> Prepared:
    """A call on the host that needs all of its buffers, those of a sum of `terms`.

    `quick` does it if it returns True.
    """
    held = _Held(plans, sources)

    def read() -> None:
        if quick is not None and quick():
            return
        parsed = [p for p in held.parsed() if p is not None]
        if len(parsed) < len(sources):
            return
        try:
            call(parsed)
        except FormatError as error:
            # A sum counts its local array.
            number = error.number or 0
            if terms is not None and terms.x is not None and number > terms.place:
                number -= 1
            held.note(number, error)

    return Prepared([read], held.statuses, held.check)


class _Held:
    """Buffers on the host that calls read, and what was found wrong with them."""

    def __init__(self, plans: Sequence[Plan], sources: Sequence[Bytes]) -> None:
        self._plans, self._datas = plans, sources
        self._errors: dict[int, FormatError] = {}
        self.statuses: npt.NDArray[np.int64] = np.zeros(len(sources), np.int64)

    def parsed(self) -> list[Parsed | None]:
        """The buffers, their headers and records checked; None for what is damaged."""
        found: list[Parsed | None] = []
        for i, (plan, data) in enumerate(zip(self._plans, self._datas, strict=True)):
            try:
                found.append(parse_as(plan, data))
            except FormatError as error:
                self.note(i, error)
                found.append(None)
        return found

    def note(self, number: int, error: FormatError) -> None:
        """Keep what is wrong with a buffer, if it is the first that is."""
        self._errors.setdefault(number, error)
        self.statuses[number] = 1

    def check(self) -> None:
        """Raise the first error, if there is one, and forget all."""
        errors, self._errors = self._errors, {}
        self.statuses[:] = 0
        if errors:
            first = min(errors)
            raise named(errors[first], first, len(self._datas))


def named(error: FormatError, number: int, buffers: int) -> FormatError:
    """An error with the number of its buffer, if there are several."""
    detail = error.detail.removeprefix(f"buffer {error.number}: ")
    plain = FormatError(error.reason, detail)
    return plain.of_buffer(number) if buffers > 1 else plain
