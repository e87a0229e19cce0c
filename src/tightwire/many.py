"""Calls for many tensors: batches, each tensor a buffer of its own, and sums of buffers.

`Codec.encode_many` and `Codec.encode_sum` are implemented here.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import arrays, engine, host_many, host_sums
from .apart import Spans, check_apart, span_of, spans_of
from .arguments import (
    check_added,
    check_decoded,
    check_like,
    check_scratch,
    device_for,
    each,
    host_stats,
    need_float,
    need_key,
    need_no_base,
    need_no_base_in_batch,
    number,
    numbered,
    on_gpu,
    output_memory,
    source_target,
    thread_count,
)
from .arrays import Target
from .buffer import Buffer, parsed_source
from .codecs.common.base import Bits, Bytes, CodecSpec, Key, Plan
from .codecs.common.float_mode import default_floats
from .codecs.common.sums import FLOAT32
from .codecs.common.threads import cpu_count
from .engine import Parsed
from .formats.dtypes import DType
from .formats.errors import FormatError
from .formats.header import ALIGN
from .planning import device_many, integer, make_plan
from .terms import check_decoded_apart, check_encoded_apart, check_plans, of_term, split

if TYPE_CHECKING:
    from .codec import Codec


def encode_many(
    codec: Codec,
    tensors: Sequence[Any],
    *,
    out: Sequence[Any] | None,
    stats: Sequence[Any] | None,
    key: Key | None,
    scratch: Any,
    checksum: bool,
    threads: int | None,
    backend: str | None,
) -> list[Buffer]:
    """See `Codec.encode_many`."""
    tensors = _listed("tensors", tensors)
    outs = _one_each("out", out, len(tensors))
    given = _one_each("stats", stats, len(tensors))
    count = thread_count(threads)
    check_scratch(scratch)
    if not tensors:
        return []
    kinds = _described(tensors)
    codec.require_key(tensors[0], key)
    need_no_base(codec.spec, "batches", "encode each by itself")
    gpu = device_for(backend, tensors[0], *outs)
    if gpu is not None:
        on_device, found = device_many(), NotImplemented
        if isinstance(on_device, ModuleType):
            found = on_device.encode_many(
                codec.spec,
                tensors,
                kinds,
                out=out if out is None else outs,
                stats=stats if stats is None else given,
                key=key,
                scratch=scratch,
                checksum=checksum,
                required=backend is not None,
            )
        if found is not NotImplemented:
            return found
    library, device, dtype, shapes, _ = kinds
    plans = [make_plan(codec.spec, dtype, tuple(shape), checksum=checksum) for shape in shapes]
    memory = _memory(plans, out, kinds, gpu)
    if out is not None or scratch is not None:
        spans = [span_of(o, plan.nbytes) for o, plan in zip(outs, plans, strict=True)]
        read: dict[str, Spans] = {"tensors[{}]": spans_of(tensors), "stats[{}]": spans_of(given)}
        check_apart({"out[{}]": spans, "scratch": [span_of(scratch)]}, read)
    if gpu is not None:
        options = {"key": key, "scratch": scratch, "checksum": checksum}
        options |= {"threads": threads, "backend": backend}
        return [
            codec.encode(x, stats=s, out=o, **options)
            for x, s, o in zip(tensors, given, outs, strict=True)
        ]
    bits = [arrays.host_bits(x, dtype) for x in tensors]
    checked = each("stats", partial(host_stats, codec.spec), plans, given)
    items = list(map(host_many.Encoding, plans, bits, memory, checked))
    host_many.encode_all(items, key, count, backend, "tensors")
    target = Target(library, device)
    return [Buffer(plan, encoded, target) for plan, encoded in zip(plans, memory, strict=True)]


def _described(tensors: list[Any]) -> arrays.Listed:
    """What tensors are. TypeError or ValueError if that is not of one library, device and dtype."""
    found = arrays.plain_tensors(tensors)
    if found is not None:
        return found
    infos = []
    for i, x in enumerate(tensors):
        if isinstance(x, Buffer):
            raise TypeError(f"tensors[{i}] is a Buffer, which is encoded already. Allowed: arrays")
        try:
            infos.append(arrays.describe(x))
        except TypeError as error:
            raise TypeError(f"tensors[{i}]: {error}") from None
    first = infos[0]
    for i, info in enumerate(infos):
        if info[:3] != first[:3]:
            raise ValueError(
                f"tensors[{i}] is {_kind(info)}; needed: {_kind(first)}, as tensors[0]"
            )
    return arrays.Listed(*first[:3], [info.shape for info in infos])


def _kind(info: arrays.ArrayInfo) -> str:
    return f"{info.library} {info.dtype.name} on {info.device or 'the host'}"


def _listed(name: str, values: Any) -> list[Any]:
    """The elements of a sequence; one array is none."""
    single = isinstance(values, (str, dict, Buffer)) or arrays.is_array(values)
    if single or arrays.is_bytes(values):
        raise TypeError(f"{name} is {type(values).__name__}; allowed: a list or tuple")
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {values!r}; allowed: a list or tuple") from None


def _one_each(name: str, values: Any, n: int) -> list[Any]:
    """The `n` elements of a sequence, or of None as many times None."""
    if values is None:
        return [None] * n
    found = _listed(name, values)
    if len(found) != n:
        raise ValueError(f"{name} has {len(found)} elements; needed: {n}")
    return found


def _memory(
    plans: Sequence[Plan], out: Sequence[Any] | None, kinds: arrays.Listed, gpu: Any
) -> list[Any]:
    """Memory for buffers: checked, of `out` if that is not None.

    With `gpu`, `tightwire.gpu`, it may be there; what is to be new is then None.
    """
    if out is None:
        return [None] * len(plans) if gpu is not None else list(_side_by_side(plans))

    def memory(plan: Plan, o: Any) -> Any:
        if gpu is None:
            return output_memory(plan, o)
        if on_gpu(o):
            return gpu.output_memory(o, plan, kinds.library, kinds.device)
        return None if o is None else output_memory(plan, o)

    return each("out", memory, plans, out)


def _side_by_side(plans: Sequence[Plan]) -> list[Bytes]:
    """Memory for buffers in one allocation, each at a multiple of ALIGN bytes in it."""
    sizes = [-(-plan.nbytes // ALIGN) * ALIGN for plan in plans]
    *starts, end = itertools.accumulate(sizes, initial=0)
    memory = np.empty(end, np.uint8)
    return [memory[at : at + plan.nbytes] for at, plan in zip(starts, plans, strict=True)]


def decode_many(
    buffers: Sequence[Any],
    *,
    out: Sequence[Any] | None = None,
    scratch: Any = None,
    max_nbytes: int | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> list[Any]:
    """Decode many buffers, of any codecs, dtypes and sizes, faster than one by one.

    Each is checked as ``decode`` checks it. If some are damaged the others are decoded all the
    same; then the error of the first damaged one is raised. A buffer that needs a base, which
    ``decode`` alone takes, counts as damaged, with the reason ``"base_mismatch"``.

    Args:
        buffers: A list or tuple of what ``decode`` takes: ``Buffer`` objects, bytes-like objects
            and uint8 arrays.
        out: Arrays to fill, one for each buffer, of its dtype and shape; None in their place, or in
            place of the list, allocates. Their contents are undefined for damaged buffers.
        scratch: As in ``Codec.encode``.
        max_nbytes: Most bytes that each of the tensors may have. None is 64 GiB, and for a
            ``Buffer`` no limit.
        threads: Most threads on the host. None: every processor where the size is worth it.
        backend: As in ``Codec.encode``.

    Returns:
        A list of arrays, in the order of ``buffers``. They are those of ``out``, or new ones, each
        in the library that ``decode`` returns.

    Raises:
        FormatError: If a buffer is damaged; its ``number`` is the place of the first such buffer in
            ``buffers``, and its ``detail`` starts with it. Buffers on a GPU raise by
            ``Buffer.check()``, each its own error.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, or an array of ``out`` does not fit, or overlaps a
            buffer, ``scratch`` or another array. Nothing has been decoded then.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> tensors = [np.arange(n, dtype=np.float32) for n in (3, 1000)]
        >>> buffers = tw.codec("zipccl").encode_many(tensors)
        >>> [x.shape for x in tw.decode_many(buffers)]
        [(3,), (1000,)]
    """
    buffers = _listed("buffers", buffers)
    outs = _one_each("out", out, len(buffers))
    count = thread_count(threads)
    check_scratch(scratch)
    if max_nbytes is not None:
        max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    failed: dict[int, FormatError] = {}
    known: dict[int, tuple[Parsed, Bits]] = {}
    there = _on_device(buffers, outs, backend)
    here = [] if len(there) == len(buffers) else sorted({*range(len(buffers))}.difference(there))
    for i in here:
        try:
            parsed = parsed_source(buffers[i], max_nbytes)
            need_no_base_in_batch(parsed.plan)
        except FormatError as error:
            failed[i] = error
        except (TypeError, ValueError) as error:
            raise numbered(error, f"buffers[{i}]") from None
        else:
            known[i] = parsed, _elements(f"out[{i}]", outs[i], parsed.plan)
    if here and (out is not None or scratch is not None):
        written: dict[str, Spans] = {"out[{}]": spans_of(outs), "scratch": [span_of(scratch)]}
        check_apart(written, {"buffers[{}]": spans_of(buffers)})
    results = list(outs)
    if there:
        options = {"scratch": scratch, "max_nbytes": max_nbytes, "threads": threads}
        required = backend is not None
        failed |= _decode_there(there, buffers, out, results, required=required, **options)
    errors = host_many.decode_all(list(known.values()), count, backend)
    for (i, (parsed, bits)), problem in zip(known.items(), errors, strict=True):
        if problem is not None:
            failed[i] = problem
        elif results[i] is None:
            plan = parsed.plan
            results[i] = arrays.from_bits(bits, plan.dtype, plan.shape, source_target(buffers[i]))
    if failed:
        first = min(failed)
        raise failed[first].of_buffer(first) from None
    return results


def _on_device(buffers: list[Any], outs: list[Any], backend: str | None) -> list[int]:
    """Numbers of the buffers that `device_for` has a device for."""
    n = len(buffers)
    if backend is not None:
        return list(range(n)) if device_for(backend) is not None else []
    if set(map(type, buffers)) == {Buffer} and all(b._memory is not None for b in buffers):
        return list(range(n))
    return [i for i in range(n) if device_for(None, buffers[i], outs[i]) is not None]


def _placed(numbers: Iterable[int], read: Sequence[Bits], n: int) -> list[tuple[int, int]]:
    """Where the arrays of these numbers are among `n`, of which the others have no memory."""
    found = [(0, 0)] * n
    for i, span in zip(numbers, spans_of(read), strict=True):
        found[i] = span
    return found


def _elements(name: str, out: Any, plan: Plan, dtype: DType | None = None) -> Bits:
    """Memory for the elements of a tensor of `plan`: `out`, or new if it is None.

    `dtype` is theirs if it is not the plan's.
    """
    dtype = plan.dtype if dtype is None else dtype
    if out is None:
        return np.empty(plan.nelem * dtype.itemsize, np.uint8).view(dtype.bits)
    return arrays.writable_bits(out, dtype, plan.shape, name)


def _decode_there(
    numbers: list[int],
    buffers: list[Any],
    out: Sequence[Any] | None,
    results: list[Any],
    **options: Any,
) -> dict[int, FormatError]:
    """Decode the buffers with these numbers where a GPU is, to `results`: those of `out`, or None.

    What is wrong with others.
    """
    module = device_many()
    if not isinstance(module, ModuleType):
        module = importlib.import_module("tightwire.gpu_each")
    found: dict[int, FormatError] = module.decode_many(buffers, numbers, out, results, **options)
    return found


class _Terms(NamedTuple):
    """The terms of a sum on the host, the first buffer's plan, and where the result goes.

    `tensor` is that among the terms as it was passed, or None.
    """

    terms: list[Parsed | Bits]
    plan: Plan
    target: Target
    tensor: Any


def _terms(terms: list[Any]) -> _Terms:
    """Check the terms of a sum. Raises FormatError, whose number is the place of a buffer."""
    numbers, tensor = split(terms)
    found: list[Any] = list(terms)
    for i in numbers:
        with of_term(i, len(numbers) > 1):
            found[i] = parsed_source(terms[i], None)
    check_plans(numbers, [found[i].plan for i in numbers])
    plan, target = found[numbers[0]].plan, source_target(terms[numbers[0]])
    if tensor is not None:
        info = arrays.describe(terms[tensor])
        check_added(info, plan.shape, plan.dtype)
        found[tensor] = arrays.host_bits(terms[tensor], info.dtype)
        target = Target(info.library, info.device)
    return _Terms(found, plan, target, None if tensor is None else terms[tensor])


def decode_sum(
    terms: Sequence[Any],
    *,
    scale: float | None = None,
    dtype: Any = None,
    out: Any = None,
    scratch: Any = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Any:
    """Decode the sum of buffers and of at most one tensor, in one pass.

    Terms are added in the order given, in float32 (float64 for float64), multiplied by ``scale``,
    and rounded once. NaNs in the result are the quiet, positive one.

    Args:
        terms: A list or tuple of what ``decode`` takes, of one codec, float dtype, shape and number
            of chunks, and at most one array of that shape: of that dtype, or float32 where that is
            wider. A uint8 array is a buffer.
        scale: A number that the sum is multiplied by, such as ``1 / len(terms)``. None: nothing.
        dtype: Dtype of the result: None, that of the buffers, or ``"float32"``.
        out: An array of the result's dtype and shape to fill, which overlaps no term. After an
            error its contents are undefined.
        scratch: As in ``Codec.encode``.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        ``out``, or a new array of the buffers' shape. That is in the library and on the device of
        the tensor among the terms, or as ``decode`` of the first buffer returns it.

    Raises:
        FormatError: If a buffer is damaged. If there are several, its ``number`` is the place of
            the buffer in ``terms``. Buffers on a GPU raise by ``Buffer.check()``.
        TypeError: If an argument has a wrong type, or the buffers' dtype is not a float.
        ValueError: If a value is out of range, the terms do not fit one another, or ``out`` does
            not fit.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> x = np.linspace(-1, 1, 4096, dtype=np.float32)
        >>> bufs = [tw.encode(x), tw.encode(3 * x)]
        >>> bool((tw.decode_sum(bufs, scale=0.5) == 2 * x).all())
        True
    """
    terms = _listed("terms", terms)
    factor, count = number("scale", scale), thread_count(threads)
    check_scratch(scratch)
    wanted = None if dtype is None else arrays.as_dtype(dtype)
    gpu = device_for(backend, *terms, out)
    if gpu is not None:
        on_device, found = device_many(), NotImplemented
        if isinstance(on_device, ModuleType):
            found = on_device.decode_sum(
                terms,
                scale=factor,
                dtype=dtype,
                out=out,
                scratch=scratch,
                required=backend is not None,
            )
        if found is not NotImplemented:
            return found
    given, plan, target, _ = _terms(terms)
    if wanted is None:
        wanted = plan.dtype
    if wanted not in (plan.dtype, FLOAT32):
        allowed = ", ".join(dict.fromkeys((plan.dtype.name, "float32", "None")))
        raise ValueError(f"dtype is {wanted.name}; allowed: {allowed}")
    to_gpu = gpu is not None and on_gpu(out)
    bits = _elements("out", None if to_gpu else out, plan, wanted)
    check_decoded_apart(terms, out, scratch)
    host_sums.sum_into(
        given, bits, scale=factor, wide=wanted != plan.dtype, threads=count, backend=backend
    )
    if gpu is not None and to_gpu:
        gpu.copy_into(out, arrays.from_bits(bits, wanted, plan.shape, arrays.target_of(out)))
    if out is not None:
        return out
    return arrays.from_bits(bits, wanted, plan.shape, target)


def add_here(src: Any, acc: Any, info: arrays.ArrayInfo) -> None:
    """`Codec.decode_add` on the host; `info` describes `acc`."""
    acc_bits = arrays.writable_bits(acc, info.dtype, info.shape, "acc")
    need_float(info.dtype, "acc")
    values = acc_bits.view(info.dtype.numpy)
    parsed = parsed_source(src, None)
    need_no_base(parsed.plan.codec, "sums", "decode it by itself")
    check_decoded(src, acc, what="acc")
    plan = parsed.plan
    check_like(info._replace(dtype=plan.dtype, shape=plan.shape), info)
    # Sums in the buffer's dtype are rounded once.
    own = info.dtype == plan.dtype and info.dtype != FLOAT32
    if not engine.decode_add(parsed, acc_bits if own else values, threads=cpu_count()):
        decoded = np.empty(plan.nelem, plan.dtype.bits)
        engine.decode_range(parsed, decoded, 0, threads=cpu_count())
        with default_floats():
            values += decoded.view(plan.dtype.numpy).astype(values.dtype)


def encode_sum(
    codec: Codec,
    terms: Sequence[Any],
    *,
    scale: float | None,
    stats: Any,
    key: Key | None,
    out: Any,
    scratch: Any,
    checksum: bool,
    threads: int | None,
    backend: str | None,
) -> Buffer:
    """See `Codec.encode_sum`."""
    terms = _listed("terms", terms)
    factor, count = number("scale", scale), thread_count(threads)
    check_scratch(scratch)
    gpu = device_for(backend, *terms, out)
    if gpu is not None:
        on_device, found = device_many(), NotImplemented
        if isinstance(on_device, ModuleType):
            found = on_device.encode_sum(
                codec.spec,
                terms,
                scale=factor,
                stats=stats,
                key=key,
                out=out,
                scratch=scratch,
                checksum=checksum,
                required=backend is not None,
            )
        if found is not NotImplemented:
            return found
    given = _terms(terms)
    need_key(codec.spec, given.plan.dtype, key)
    to_gpu = gpu is not None and on_gpu(out)
    plan = make_plan(
        codec.spec, given.plan.dtype, given.plan.shape, given.plan.chunks, checksum=checksum
    )
    check_encoded_apart(plan, terms, given.tensor, out, stats, scratch)
    encoded = encode_sum_here(
        codec.spec,
        plan,
        given.terms,
        None if to_gpu else out,
        scale=factor,
        stats=stats,
        key=key,
        threads=count,
        backend=backend,
    )
    buffer = Buffer(plan, encoded, given.target)
    if gpu is not None and to_gpu:
        buffer = gpu.to_device(buffer, out)
    return buffer


def encode_sum_here(
    spec: CodecSpec,
    plan: Plan,
    terms: Sequence[Parsed | Bits],
    out: Any,
    *,
    stats: Any,
    key: Key | None,
    threads: int,
    backend: str | None,
    scale: float | None = None,
) -> Bytes:
    """Encode a sum by `plan`, that of `spec`, into `out` or new memory, which is returned.

    `out` may be memory of a buffer among the terms, and is then written last. It is apart from all
    else that is read.
    """
    need_no_base(spec, "sums", "encode the sum by itself")
    memory = output_memory(plan, out)
    buffers = [term for term in terms if isinstance(term, Parsed)] if out is not None else []
    shared = any(np.may_share_memory(memory, buffer.data) for buffer in buffers)
    encoded = np.empty_like(memory) if shared else memory
    stats = host_stats(spec, plan, stats)
    host_sums.encode_sum(
        plan, terms, encoded, scale=scale, stats=stats, key=key, threads=threads, backend=backend
    )
    if shared:
        memory[:] = encoded
    return memory
