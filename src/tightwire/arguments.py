"""Checks of what public calls are passed, the same for one tensor and for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import arrays
from .arrays import ArrayInfo, Target
from .buffer import Buffer
from .codecs.common.base import Bits, Bytes, CodecSpec, Plan
from .codecs.common.float_mode import default_floats
from .codecs.common.philox import check_key, key_numbers
from .codecs.common.threads import cpu_count
from .engine import Parsed
from .formats.dtypes import BY_NAME, DType
from .planning import DEVICE_BACKEND, device_engine, integer, spec_class

_UINT8 = BY_NAME["uint8"]


#: Starts and ends of memory: pairs, or an array of shape (n, 2).
Spans = Sequence[tuple[int, int]] | npt.NDArray[np.int64]


def device_for(backend: str | None, *values: Any) -> ModuleType | None:
    """`tightwire.gpu` if one of `values` is in GPU memory or Triton is asked for, else None.

    Raises ValueError if Triton is asked for and PyTorch is missing.
    """
    if backend is None:
        if not any(map(on_gpu, values)):
            return None
    elif backend != DEVICE_BACKEND:
        return None
    found = device_engine()
    if isinstance(found, ModuleType):
        return found
    if backend is None:
        return None
    raise ValueError(f"backend {backend!r} needs {found}: pip install 'tightwire[triton]'")


def on_gpu(x: Any) -> bool:
    """True for a Buffer or an array in GPU memory."""
    return x._memory is not None if isinstance(x, Buffer) else arrays.on_gpu(x)


def thread_count(threads: int | None) -> int:
    """``threads`` if it is a number of threads, and the number of processors for None."""
    if threads is None:
        return cpu_count()
    if integer("threads", threads) < 1:
        raise ValueError(f"threads is {threads}; allowed: at least 1")
    return threads


def check_scratch(scratch: Any) -> None:
    """Refuse what is not an array; the host has no use for one."""
    if not (scratch is None or arrays.is_array(scratch)):
        raise TypeError(f"scratch is {scratch!r}; allowed: a uint8 array, None")


def check_like(found: ArrayInfo, acc: ArrayInfo) -> None:
    """Raise TypeError or ValueError if a decoded array cannot be added to `acc`."""
    need_float(found.dtype, "the buffer")
    if found.shape != acc.shape:
        raise ValueError(f"acc has shape {acc.shape}; needed: {found.shape}, that of the buffer")


def check_added(x: ArrayInfo, shape: tuple[int, ...], dtype: DType) -> None:
    """Raise ValueError if `x` cannot be added to a decoded array of this shape and dtype."""
    wider = x.dtype.name == "float32" and dtype.is_float and dtype.itemsize < 4
    if x.shape != shape or not (x.dtype == dtype or wider):
        wanted = f"{dtype.name}{list(shape)}"
        raise ValueError(f"x is {x.dtype.name}{list(x.shape)}; needed: {wanted}, as the buffer")


def check_base(spec: CodecSpec, plan: Plan, base: Any) -> ArrayInfo | None:
    """What the base is that `spec` is to code a tensor of `plan` against; None where there is none.

    TypeError or ValueError if the base is missing or does not fit.
    """
    if base is None and not spec.needs_base:
        return None
    needed = f"{plan.dtype.name}{list(plan.shape)}"
    if base is None:
        raise ValueError(f"{spec.name} codes against a base. Needed: base, of {needed}")
    info = arrays.describe(base)
    if not spec.needs_base:
        raise ValueError(f"codec {spec.name!r} takes no base. Allowed: base=None")
    if (info.dtype, info.shape) != (plan.dtype, plan.shape):
        found = f"{info.dtype.name}{list(info.shape)}"
        raise ValueError(f"base is {found}; needed: {needed}, as the tensor")
    return info


def base_bits(spec: CodecSpec, plan: Plan, base: Any) -> Bits | None:
    """Elements on the host of the base, see `check_base`; None where it is not used.

    That is where the tensor is stored raw.
    """
    info = check_base(spec, plan, base)
    return arrays.host_bits(base, info.dtype) if info and plan.needs_base else None


def check_base_of_buffer(plan: Plan, base: Any) -> ArrayInfo | None:
    """As `check_base`, to decode a buffer of `plan`.

    One that is stored raw may have been encoded against a base: it takes any that fits.
    """
    if base is None and not plan.needs_base:
        return None
    return check_base(_spec_of_base(plan, base), plan, base)


def _spec_of_base(plan: Plan, base: Any) -> CodecSpec:
    takes = plan.codec.name == "raw" and base is not None
    found: CodecSpec = spec_class("delta")() if takes else plan.codec
    return found


def base_of_buffer(plan: Plan, base: Any) -> Bits | None:
    """As `base_bits`, to decode a buffer of `plan`; see `check_base_of_buffer`."""
    return base_bits(_spec_of_base(plan, base), plan, base)


def need_no_base(spec: CodecSpec) -> None:
    """ValueError for codecs that need a base: sums have none."""
    if spec.needs_base:
        raise ValueError(f"{spec.name} needs a base, which sums do not take: decode it by itself")


def check_over_base(bits: Bits, base: Bits | None) -> None:
    """ValueError if the result `bits` overlaps the base and is not all of it."""
    if base is not None and np.may_share_memory(bits, base):
        at, base_at = (a.__array_interface__["data"][0] for a in (bits, base))
        if at != base_at or bits.size != base.size:
            raise ValueError("out overlaps base. Allowed: the same memory, or other memory")


def need_float(dtype: DType, what: str) -> None:
    """Raise TypeError if `what` has not a float dtype."""
    if not dtype.is_float:
        raise TypeError(f"{what} is {dtype.name}; allowed: float dtypes")


def need_key(spec: CodecSpec, dtype: DType, key: Any) -> None:
    """Check that `key` is what encoding tensors of `dtype` needs. Raises TypeError, ValueError."""
    check_key(key, spec.max_world)
    # However few elements there are: small tensors are stored raw, and the next may be large.
    if key is None and spec.draws and dtype.name in spec.dtypes:
        key_numbers(key)


def source_target(src: Any) -> Target:
    """Library and device that `src` decodes to if nothing else is said."""
    if isinstance(src, Buffer):
        return src.target
    return Target() if isinstance(src, Parsed) or arrays.is_bytes(src) else arrays.target_of(src)


def output_memory(plan: Plan, out: Any) -> Bytes:
    """Memory for a buffer: `out` if that fits, or new memory if it is None."""
    if out is None:
        return np.empty(plan.nbytes, np.uint8)
    if isinstance(out, Buffer):
        if out._host is None:
            raise ValueError("out is a Buffer in GPU memory; allowed: one on the host")
        memory: Bytes = out._host
        if memory.size == plan.nbytes and memory.flags.writeable:
            return memory
        out = memory
    info = arrays.describe(out)
    target_bytes = arrays.writable_bits(out, _UINT8, info.shape, "out")
    if target_bytes.size < plan.nbytes:
        raise ValueError(f"out has {target_bytes.size} bytes; the plan needs {plan.nbytes}")
    return target_bytes[: plan.nbytes]


def memory_apart(plan: Plan, out: Any, bits: Bits, base: Bits | None) -> Bytes:
    """As `output_memory`; ValueError if it overlaps the elements `bits`, or those of `base`."""
    found = output_memory(plan, out)
    if out is not None and np.may_share_memory(found, bits):
        raise ValueError("out overlaps the array that is encoded")
    if base is not None and np.may_share_memory(found, base):
        raise ValueError("out overlaps base")
    return found


def host_stats(spec: CodecSpec, plan: Plan, stats: Any, encoded: Bytes) -> npt.NDArray[Any] | None:
    """Checked statistics for `plan`, on the host and apart from the memory of the buffer.

    None where they are for `spec`, which the plan does not use.
    """
    if stats is None:
        return None
    found = arrays.host_array(stats) if on_gpu(stats) else np.asarray(stats)
    with default_floats():
        spec.check_stats(found, plan.dtype)
    if np.may_share_memory(encoded, found):
        raise ValueError("out overlaps stats")
    return found if plan.codec == spec else None


def spans_of(arrays_of: Sequence[Bits]) -> list[tuple[int, int]]:
    """Start and end of the memory of contiguous arrays on the host."""
    starts = [x.__array_interface__["data"][0] for x in arrays_of]
    return [(start, start + x.nbytes) for start, x in zip(starts, arrays_of, strict=True)]


def number(name: str, value: Any) -> float | None:
    """A number, or None, as it is given. Raises TypeError, or ValueError if no float can be it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {value!r}; allowed: a number, None")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large; allowed: numbers that a float can be") from None


def check_apart(
    written: Mapping[str, Spans],
    read: Mapping[str, Spans],
) -> None:
    """Raise ValueError if memory that is written overlaps other, read or written.

    Both are starts and ends, by name, with braces where a message is to say which.
    """
    names = [*written, *read]
    groups = [*written.values(), *read.values()]
    spans = np.concatenate([np.reshape(np.asarray(group, np.int64), (-1, 2)) for group in groups])
    group = np.repeat(np.arange(len(groups)), list(map(len, groups)))
    number = np.concatenate([np.arange(len(group)) for group in groups])
    # Empty ones overlap nothing.
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    order = order[spans[order, 0] < spans[order, 1]]
    starts, ends = spans[order].T
    is_written = group[order] < len(written)
    # Of what starts no later the furthest end: of all, and of what is written.
    others = [np.maximum.accumulate(kind)[:-1] for kind in (ends, np.where(is_written, ends, 0))]
    found = np.flatnonzero(starts[1:] < np.where(is_written[1:], *others))
    if found.size:
        this = int(found[0]) + 1
        before = ends[:this] if is_written[this] else np.where(is_written[:this], ends[:this], 0)
        pair = order[[this, int(before.argmax())]]
        texts = [names[group[i]].format(number[i]) for i in pair]
        raise ValueError(f"{texts[0]} overlaps {texts[1]}")
