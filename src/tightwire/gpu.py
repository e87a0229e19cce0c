"""Buffers in GPU memory: what runs there, on which stream, in whose memory.

PyTorch provides streams and memory; the kernels are those of codecs/*_triton.py. CuPy and JAX
arrays cross by DLPack, without copies. Imported when the first GPU array comes along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from . import arrays, gpu_memory
from .apart import span_of
from .arguments import (
    ADDED,
    ENCODED,
    check_base,
    check_base_of_buffer,
    check_decoded,
    check_out,
)
from .arrays import Target, describe
from .buffer import Buffer, parsed_source
from .codecs.common.base import CodecSpec, Key, Plan
from .codecs.common.float_mode import default_floats
from .engine import (
    DEFAULT_MAX_NBYTES,
    Head,
    Parsed,
    check_limit,
    selection,
    touched_chunks,
)
from .formats.dtypes import BY_NAME, DType
from .formats.header import ASSEMBLED
from .gpu_arrays import (
    _DTYPES,
    _NEEDS,
    _TORCH,
    DEVICE_ALIGN,
    _as_torch,
    _base_on,
    _bytes,
    _export,
    _fits,
    _output,
    _place,
    _scope,
    _upload,
    _values,
    _wide,
    _writable_bytes,
)
from .gpu_memory import Memory, _checked_head, _new_status, _read_head, _settle
from .planning import device_module, make_plan, spec_class

_UINT8 = BY_NAME["uint8"]
_FUSED_ADD = tuple(BY_NAME[name] for name in ("bfloat16", "float16", "float32"))


class _Source(NamedTuple):
    """What to decode. `starts` are int64 offsets of the dynamic parts, None if they are in slots.

    `memory` is None for bytes that no Buffer keeps: damage is raised at once.
    """

    kernels: ModuleType
    plan: Plan
    data: torch.Tensor
    starts: torch.Tensor | None = None
    memory: Memory | None = None


def wrap(plan: Plan, array: Any, assembled: bool = False) -> Buffer:
    """See `Buffer.wrap`; `array` is in device memory."""
    info = describe(array)
    place = _place(info.library, info.device, "array")
    if info.dtype != _UINT8:
        raise TypeError(f"Expected bytes or a uint8 array, got {info.dtype.name}")
    with _scope(place, info.library):
        data = _bytes(_as_torch(array, info), plan.nbytes, "array", place)
    memory = Memory(data, foreign=info.library == "jax", assembled=assembled)
    return Buffer(plan, None, Target(info.library, info.device), memory)


def encode(
    spec: CodecSpec,
    x: Any,
    *,
    base: Any,
    stats: Any,
    key: Key | None,
    out: Any,
    scratch: Any,
    chunks: int | None,
    dynamic_capacity: int | None,
    checksum: bool,
    required: bool,
) -> Any:
    """As `Codec.encode`, on the device of `x`; NotImplemented where that is the host's to do.

    If it is `required` here, ValueError says what is missing instead.
    """
    info = describe(x)
    library = info.library
    place = _place(library, info.device, "x" if required else None)
    if place is None or (out is not None and _is_host(out, required)):
        return NotImplemented
    plan = make_plan(spec, info.dtype, info.shape, chunks, dynamic_capacity, checksum)
    base_info = check_base(spec, plan, base)
    kernels = _kernels(plan, required, based=True)
    if kernels is None:
        return NotImplemented
    with _scope(place, library, library if out is None else _library_of(out)):
        tensor = _as_torch(x, info)
        more = {}
        if base_info is not None and plan.needs_base:
            against = _base_on(base, base_info, place, required)
            if against is None:
                return NotImplemented
            more["base"] = against
        memory = _output_memory(out, plan, place)
        work = _workspace(plan, scratch, place)
        elements = tensor if tensor.is_contiguous() else tensor.contiguous()
        check_out(plan, out, {ENCODED: x, "base": base, "stats": stats}, scratch)
        if stats is not None:
            stats = _stats(spec, stats, info.dtype, place)
        if stats is None or plan.codec != spec:
            stats = _measured(kernels, plan, elements)
        kernels.encode(plan, elements, memory.data, work, stats, key, **more)
        if library == "jax":
            for read in (tensor, *more.values()):
                memory.lease(read)
    target = Target(library, info.device)
    if isinstance(out, Buffer) and out.plan is plan and out.target == target:
        return out
    return Buffer(plan, None, target, memory)


def to_device(buffer: Buffer, out: Any) -> Buffer:
    """`buffer`, encoded on the host, in GPU memory: new, or `out`, a uint8 array or a Buffer."""
    plan, target = buffer.plan, buffer.target
    place = _place(target.library, target.device, "the array that is encoded")
    with _scope(place, target.library, None if out is None else _library_of(out)):
        memory = _output_memory(out, plan, place)
        buffer.zero_slack()
        memory.data[: plan.nbytes].copy_(_upload(buffer._bytes, place))
    return Buffer(plan, None, target, memory)


def measure(spec: CodecSpec, x: Any, *, required: bool) -> Any:
    """As `Codec.measure`, on the device of `x`; NotImplemented where that is the host's to do."""
    info = describe(x)
    place = _place(info.library, info.device, "x" if required else None)
    if place is None:
        return NotImplemented
    if not _takes_stats(spec, info.dtype):
        return None
    kernels = _kernels_for(spec.name, info.dtype, required)
    if kernels is None:
        return NotImplemented
    with _scope(place, info.library):
        tensor = _as_torch(x, info)
        found = kernels.measure(spec, info.dtype, tensor.contiguous())
        if found is None or info.library == "torch":
            return found
        target = Target(info.library, info.device)
        if info.library == "jax":
            # JAX may reuse the memory of `x` as soon as this returns; it has no int64.
            torch.cuda.current_stream(place).synchronize()
            found = found.to(torch.int32) if found.dtype == torch.int64 else found
        return _export(found, _DTYPES[found.dtype], target)


def decode(
    src: Any,
    *,
    base: Any,
    out: Any,
    chosen: Target | None,
    start: int | None,
    stop: int | None,
    max_nbytes: int | None,
    verify: bool | None,
    scratch: Any,
    required: bool,
) -> Any:
    """As `tightwire.decode`, on the device of the result; NotImplemented where that is the host's.

    `chosen` is what `like` says.
    """
    info = None if out is None else describe(out)
    if info is not None:
        target = Target(info.library, info.device)
    else:
        target = chosen or target_of_source(src)
    place = _place(target.library, target.device, "the result" if required else None)
    if place is None:
        return NotImplemented
    with _scope(place, target.library, _library_of_buffer(src)):
        source = _open(src, place, max_nbytes, required, based=base is not None)
        if source is None:
            return NotImplemented
        plan, against = source.plan, None
        base_info = check_base_of_buffer(plan, base)
        if base_info is not None and plan.needs_base:
            against = _base_on(base, base_info, place, required)
            if against is None:
                return NotImplemented
        lo, hi, shape = selection(plan, start, stop)
        if info is None:
            result = torch.empty(shape, dtype=_TORCH[plan.dtype], device=place)
        else:
            result = _output(out, info, plan.dtype, shape, "out", place)
        check_decoded(src, out, base=base, scratch=scratch)
        held = result
        if out is not None and base is not None and against is None:
            # Left alone if the buffer is damaged: it may lie over the base.
            held = torch.empty_like(result)
        _launch(source, held, lo, hi, verify, scratch, base=against)
        if held is not result:
            gpu_memory.take_sound(result, held, None if verify else source.memory)
        if out is not None:
            return out
        return _export(result, plan.dtype, target)


def verify(src: Any, max_nbytes: int | None) -> Any:
    """As `tightwire.verify`, on the device of `src`; NotImplemented where that is the host's."""
    target = target_of_source(src)
    place = _place(target.library, target.device, None)
    if place is None:
        return NotImplemented
    with _scope(place, target.library):
        source = _open(src, place, max_nbytes, False)
        if source is None:
            return NotImplemented
        _launch(source, None, 0, source.plan.nelem, True, None)
    return None


def head(src: Any) -> Head:
    """Header and records of a Buffer or uint8 array in device memory. Raises FormatError."""
    if isinstance(src, Buffer) and src._memory is not None:
        return src._memory.head(src.target, src.plan)
    target = target_of_source(src)
    place = _place(target.library, target.device, None)
    if place is None:
        return parsed_source(src, 1 << 63)
    with _scope(place, target.library):
        return _foreign(src, 1 << 63)[0]


def decode_add(src: Any, acc: Any, scratch: Any) -> Any:
    """As `Codec.decode_add` in one pass; NotImplemented where there is no kernel for that."""
    info = describe(acc)
    place = _place(info.library, info.device, None)
    if place is None:
        return NotImplemented
    with _scope(place, info.library, _library_of_buffer(src)):
        source = _open(src, place, None, False)
        if source is None:
            return NotImplemented
        plan = source.plan
        if plan.dtype not in _FUSED_ADD or info.dtype not in (plan.dtype, BY_NAME["float32"]):
            return NotImplemented
        if plan.shape != info.shape:
            raise ValueError(
                f"acc has shape {info.shape}; needed: {plan.shape}, that of the buffer"
            )
        result = _output(acc, info, info.dtype, info.shape, "acc", place)
        check_decoded(src, acc, scratch=scratch, what="acc")
        _launch(source, result, 0, plan.nelem, None, scratch, add=True)
    return acc


def add(acc: Any, values: Any) -> None:
    """Round `values`, in `acc`'s library and of its shape, to `acc`'s dtype and add them there."""
    info = describe(acc)
    place = _place(info.library, info.device, "acc")
    with _scope(place, info.library):
        result = _output(acc, info, info.dtype, info.shape, "acc", place).view(_TORCH[info.dtype])
        rounded = _values(values, describe(values)).to(result.dtype)
        result.copy_(_wide(result) + _wide(rounded))


def added(values: Any, x: Any) -> Any:
    """`values` plus `x`, of one shape: summed in float32 (float64), in the dtype of `values`."""
    info = describe(values)
    place = _place(info.library, info.device, "x")
    with _scope(place, info.library):
        total = _wide(_values(values, info)) + _wide(_values(x, describe(x)))
        return _export(total.to(_TORCH[info.dtype]), info.dtype, Target(info.library, info.device))


def decode_add_encode(
    spec: CodecSpec,
    src: Any,
    x: Any,
    *,
    stats: Any,
    key: Key | None,
    out: Any,
    scratch: Any,
    chunks: int | None,
    checksum: bool,
) -> Any:
    """As `Codec.decode_add_encode` in one pass; NotImplemented where there is no kernel for that.

    There is one where the plan of the sum fuses that of `src`.
    """
    info = describe(x)
    place = _place(info.library, info.device, None)
    if place is None or info.library == "jax" or (out is not None and _is_host(out, False)):
        return NotImplemented
    with _scope(place, info.library, info.library if out is None else _library_of(out)):
        source = _open(src, place, None, False)
        if source is None or not hasattr(source.kernels, "decode_add_encode"):
            return NotImplemented
        kernels, source_plan, data, _, memory = source
        dtype = source_plan.dtype
        if dtype not in _FUSED_ADD or info.dtype not in (dtype, BY_NAME["float32"]):
            return NotImplemented
        plan = make_plan(spec, dtype, info.shape, chunks, checksum=checksum)
        if not plan.fuses(source_plan):
            return NotImplemented
        tensor = _as_torch(x, info)
        sums, work = _output_memory(out, plan, place), _workspace(plan, scratch, place)
        elements = tensor if tensor.is_contiguous() else tensor.contiguous()
        check_out(plan, out, {ADDED: x, "stats": stats}, scratch)
        check_decoded(src, None, scratch=scratch)
        start, stop = span_of(data, source_plan.nbytes)
        first, last = span_of(sums.data, plan.nbytes)
        if first < stop and start < last:
            if not spec.sums_keep_stats:
                return NotImplemented
            data = data.clone()
        if stats is not None:
            stats = _stats(spec, stats, plan.dtype, place)
        own_status = _new_status(place) if memory is None else None
        status = memory.status if memory is not None else own_status
        planned = memory is not None and not memory.assembled
        kernels.decode_add_encode(
            plan,
            source_plan,
            data,
            elements,
            sums.data,
            work,
            status,
            stats=stats,
            key=key,
            planned=planned,
        )
        if own_status is not None:
            _settle(own_status)
    return Buffer(plan, None, Target(info.library, info.device), sums)


def encode_into(
    plan: Plan,
    x: torch.Tensor,
    data: torch.Tensor,
    work: torch.Tensor,
    key: Key | None,
    stats: torch.Tensor | None = None,
) -> bool:
    """Encode `x` by `plan` into `data` with the workspace `work`; False if the host is to do it.

    For callers that own this memory, and have checked what `encode` checks at every call: `x` is
    contiguous, of the plan's dtype and size, uint8 `data` and `work` are as large as the plan says,
    `stats` are what its codec measures, on this device.
    """
    kernels = _kernels(plan, False) if data.is_cuda else None
    if kernels is None:
        return False
    with _scope(data.device, "torch"):
        found = _measured(kernels, plan, x) if stats is None else stats
        kernels.encode(plan, x, data, work, found, key)
    return True


def sum_into(
    buffer: Buffer,
    x: torch.Tensor,
    data: torch.Tensor,
    work: torch.Tensor,
    key: Key | None,
    stats: torch.Tensor | None,
) -> bool:
    """Encode the sum of `buffer` and `x` into `data`, as `buffer` is, in a pass; as `encode_into`.

    `x` may also be float32.
    """
    plan, memory = buffer.plan, buffer._memory
    kernels = None if memory is None else _kernels(plan, False)
    if memory is None or not plan.fuses(plan) or not hasattr(kernels, "decode_add_encode"):
        return False
    if plan.dtype not in _FUSED_ADD:
        return False
    with _scope(data.device, "torch"):
        kernels.decode_add_encode(  # type: ignore[union-attr]
            plan,
            plan,
            memory.data,
            x,
            data,
            work,
            memory.status,
            stats=stats,
            key=key,
            planned=not memory.assembled,
        )
    return True


def decode_into(
    buffer: Buffer,
    out: torch.Tensor,
    work: torch.Tensor,
    start: int,
    stop: int,
    *,
    add: bool,
    **options: bool,
) -> bool:
    """Decode elements `start` to `stop` to `out`, or `add` them; False if the host is to do it.

    For callers that have checked `out` and `work` as for `encode_into`; see `adds_into`. `options`
    are those of the codec's own kernels.
    """
    plan, memory = buffer.plan, buffer._memory
    kernels = None if memory is None else _kernels(plan, False)
    if memory is None or kernels is None:
        return False
    with _scope(memory.data.device, "torch"):
        kernels.decode(
            plan,
            memory.data,
            out,
            work,
            memory.status,
            start=start,
            stop=stop,
            add=add,
            planned=not memory.assembled,
            **options,
        )
    return True


def workspace_for(plan: Plan, x: Any) -> torch.Tensor | None:
    """Scratch for `plan` on the device of the tensor `x`; None if the host is to encode it."""
    if _kernels(plan, False) is None:
        return None
    return torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device=x.device)


def peeling(plan: Plan, work: torch.Tensor) -> torch.Tensor:
    """What encoding by the lhc plan has found, by what it left in `work`: int64, shape (3,).

    See `tightwire.homomorphic.Sketched.counts`.
    """
    with _scope(work.device, "torch"):
        found: torch.Tensor = device_module("lhc").peeling(plan, work)  # type: ignore[union-attr]
    return found


def adds_into(plan: Plan, total: torch.Tensor) -> bool:
    """True if `decode_into` adds buffers of `plan` to `total`."""
    fused = plan.dtype in _FUSED_ADD and total.dtype in (torch.float32, _TORCH[plan.dtype])
    return fused and total.is_cuda and _kernels(plan, False) is not None


def copy_into(out: Any, values: Any) -> None:
    """Copy `values` to the GPU array `out` of the same library, dtype and shape."""
    info = describe(values)
    out_info = describe(out)
    place = _place(out_info.library, out_info.device, "out")
    with _scope(place, out_info.library):
        result = _output(out, out_info, info.dtype, info.shape, "out", place)
        result.copy_(_as_torch(values, info).view(result.dtype))


def target_of_source(src: Any) -> Target:
    """Library and device of what decode() makes of `src` if not told otherwise."""
    if isinstance(src, Buffer):
        return src.target
    return Target() if arrays.is_bytes(src) else arrays.target_of(src)


def _library_of_buffer(x: Any) -> str | None:
    """Library in whose order the bytes of a Buffer in device memory are written, else None.

    Other arrays are ordered when they are passed by DLPack.
    """
    return x.target.library if isinstance(x, Buffer) and x._memory is not None else None


def _library_of(out: Any) -> str | None:
    return _library_of_buffer(out) if isinstance(out, Buffer) else describe(out).library


def _kernels(plan: Plan, required: bool, based: bool = False) -> ModuleType | None:
    """As `_kernels_for`; for plans that need a base there are none unless calls are `based`."""
    if plan.needs_base and not based:
        return None
    return _kernels_for(plan.codec.name, plan.dtype, required)


def _kernels_for(codec: str, dtype: DType, required: bool) -> ModuleType | None:
    """The kernels for a codec and dtype, None if there are none; ValueError if `required`."""
    module = device_module(codec)
    if isinstance(module, ModuleType):
        if _takes(module, codec, dtype):
            return module
        problem = f"backend 'triton' does not code {dtype.name} with {codec}; allowed: None"
    else:
        problem = _NEEDS.format(module)
        if module.startswith("tightwire."):
            problem = f"codec {codec!r} has no kernels: there is no module {module}. "
            problem += "Allowed: backend None"
    if required:
        raise ValueError(problem)
    return None


@functools.lru_cache(maxsize=1024)
def _takes(module: ModuleType, codec: str, dtype: DType) -> bool:
    """Whether the kernels of a codec are for a dtype."""
    supports = getattr(module, "supports", None)
    taken = supports(dtype) if supports else dtype.name in spec_class(codec).dtypes
    return dtype in _TORCH and bool(taken)


def _is_host(out: Any, required: bool) -> bool:
    """True if `out` is in host memory; ValueError if it is `required` in device memory."""
    if isinstance(out, Buffer):
        if out._memory is None and required:
            raise ValueError("out is a Buffer in host memory; needed: one in device memory")
        return out._memory is None
    info = describe(out)
    return _place(info.library, info.device, "out" if required else None) is None


def _output_memory(out: Any, plan: Plan, place: torch.device) -> Memory:
    """Memory for a buffer of `plan`: `out`, a Buffer or a uint8 array there, or new."""
    if out is None:
        return Memory(torch.empty(plan.nbytes, dtype=torch.uint8, device=place))
    if isinstance(out, Buffer):
        memory = out._memory
        if memory is None or memory.foreign:
            raise TypeError("out is a Buffer in memory that cannot be written to")
        _fits(memory.data, plan.nbytes, "out", place)
        return memory
    return Memory(_writable_bytes(out, plan.nbytes, "out", place))


def output_memory(out: Any, plan: Plan, library: str, device: Any) -> Memory:
    """Memory that `out` has for a buffer of a tensor of a library and device, checked."""
    return _output_memory(out, plan, _place(library, device, "out"))


def _workspace(plan: Plan, scratch: Any, place: torch.device) -> torch.Tensor | None:
    """Work memory of a call: `scratch`, or new.

    None, and kernels make it, if it is no more than checksum terms, which some calls have no use
    for.
    """
    if scratch is not None:
        return _writable_bytes(scratch, plan.scratch_nbytes, "scratch", place)
    if type(plan.codec).scratch_nbytes is CodecSpec.scratch_nbytes:
        return None
    return torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device=place)


def _measured(kernels: ModuleType, plan: Plan, x: torch.Tensor) -> torch.Tensor | None:
    """Statistics of `x` for encode, None where it measures by itself or needs none."""
    if plan.codec.measures_in_encode or not hasattr(kernels, "measure"):
        return None
    found: torch.Tensor | None = kernels.measure(plan.codec, plan.dtype, x)
    return found


@functools.lru_cache(maxsize=256)
def _stats_kind(spec: CodecSpec, dtype: DType) -> str | None:
    """Name of the dtype of a tensor's statistics, None if there are none."""
    found = spec.measure(np.zeros(1, dtype.bits), dtype)
    return None if found is None else found.dtype.name


def _takes_stats(spec: CodecSpec, dtype: DType) -> bool:
    return _stats_kind(spec, dtype) is not None


def _stats(spec: CodecSpec, stats: Any, dtype: DType, place: torch.device) -> torch.Tensor:
    """Statistics on the device. Those that come from there are not read: kernels clamp them."""
    if not (arrays.on_gpu(stats) or (place.type == "cpu" and isinstance(stats, torch.Tensor))):
        stats = np.asarray(stats)
        with default_floats():
            spec.check_stats(stats, dtype)
        if stats.dtype in (np.float32, np.uint8):
            return _upload(np.ascontiguousarray(stats), place)
        # A fill takes the value along: nothing waits, and a captured graph keeps it.
        return torch.full((1,), int(stats[0]), dtype=torch.int64, device=place)
    kind = _stats_kind(spec, dtype)
    if kind is None:
        raise ValueError(f"{spec.name} takes no stats for {dtype.name} with these parameters")
    info = describe(stats)
    if kind in ("float32", "uint8"):
        fits, allowed = info.dtype.name == kind and len(info.shape) == 1, f"{kind}, 1-D"
    else:
        fits, allowed = info.dtype.name in ("int32", "int64"), "one int32 or int64"
        fits = fits and info.shape == (1,)
    if not fits:
        raise ValueError(f"stats are {info.dtype.name}{list(info.shape)}; allowed: {allowed}")
    tensor = _as_torch(stats, info)
    if tensor.device != place:
        raise ValueError(f"stats are on {tensor.device}; needed: {place}")
    return tensor.contiguous().view(_TORCH[info.dtype])


def _open(
    src: Any,
    place: torch.device,
    max_nbytes: int | None,
    required: bool,
    based: bool = False,
) -> _Source | None:
    """`src` in memory at `place`, after the host's checks unless it is a Buffer there.

    None if there are no kernels, see `_kernels`.
    """
    if isinstance(src, Buffer) and max_nbytes is not None:
        check_limit(src.plan, max_nbytes)
    memory = src._memory if isinstance(src, Buffer) else None
    if memory is not None and memory.data.device == place:
        kernels = _kernels(src.plan, required, based)
        return None if kernels is None else _Source(kernels, src.plan, memory.data, None, memory)
    head, bring = _foreign(src, max_nbytes)
    kernels = _kernels(head.plan, required, based)
    if kernels is None:
        return None
    if head.header.required & ASSEMBLED:
        if required:
            raise ValueError("an assembled buffer is decoded on the host; allowed: backend=None")
        return None
    data = bring(place)
    if data.data_ptr() % DEVICE_ALIGN:
        data = data.clone()
    starts = None
    if not head.header.dynamic_stride and head.plan.layout.dynamic_bound:
        starts = _upload(np.array(head.dynamic_at, np.int64), place)
    return _Source(kernels, head.plan, data, starts)


def _foreign(
    src: Any, max_nbytes: int | None
) -> tuple[Head, Callable[[torch.device], torch.Tensor]]:
    """What the host has checked of bytes that are elsewhere, and how they come to a device."""
    if isinstance(src, Buffer) and src._memory is not None:
        data = src._memory.data[: src.plan.nbytes]
        return _checked_head(data, src.plan), data.to
    if not (isinstance(src, (Buffer, Parsed)) or arrays.is_bytes(src)):
        info = describe(src)
        if _place(info.library, info.device, None) is not None:
            if info.dtype != _UINT8:
                raise TypeError(f"Expected bytes or a uint8 array, got {info.dtype.name}")
            data = _as_torch(src, info).reshape(-1)
            limit = DEFAULT_MAX_NBYTES if max_nbytes is None else max_nbytes
            return _read_head(data, limit), data.to
    parsed = parsed_source(src, max_nbytes)
    return parsed, functools.partial(_upload, parsed.data)


def _launch(
    source: _Source,
    out: torch.Tensor | None,
    lo: int,
    hi: int,
    verify: bool | None,
    scratch: Any,
    *,
    add: bool = False,
    base: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Decode flat elements `lo` to `hi` to `out`, or if that is None only check them.

    `out` may be the memory of `base`, all of it. What is wrong is told in `status`, int64, shape
    (1,), zero so far, which the caller reads. The device compares the header with the plan's where
    the host has not read it.
    """
    kernels, plan, data, starts, memory = source
    planned = memory is not None and not memory.assembled
    work = _workspace(plan, scratch, data.device)
    more: dict[str, Any] = {} if base is None else {"base": base}
    if base is not None:
        if out is not None and span_of(out) == span_of(base):
            more["in_place"] = True
    elif add:
        more["add"] = True
    own_status = None
    if status is None:
        # A verdict at once is on this call alone; the Buffer's word waits for `check`.
        if memory is None or verify:
            status = own_status = _new_status(data.device)
        else:
            status = memory.status
    if lo == hi and plan.nelem:
        # No chunk is touched. All that the host has not read is the header.
        if planned:
            gpu_memory.match_header(plan, data, status)
        if own_status is not None:
            _settle(own_status)
        return
    check = verify is not False
    if verify:
        touched = touched_chunks(plan, lo, hi)
        first, last = plan.chunk_range(touched.start)[0], plan.chunk_range(touched.stop)[0]
        if (first, last) != (lo, hi):
            kernels.decode(
                plan,
                data,
                None,
                work,
                status,
                start=first,
                stop=last,
                dynamic_starts=starts,
                store=False,
                planned=planned,
                **more,
            )
            check = False
    kernels.decode(
        plan,
        data,
        out,
        work,
        status,
        start=lo,
        stop=hi,
        check=check,
        dynamic_starts=starts,
        store=out is not None,
        planned=planned,
        **more,
    )
    if memory is not None and memory.foreign:
        memory.lease(data)
    if own_status is not None:
        _settle(own_status)
