"""Checks of what public calls are passed, the same for one tensor and for many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import arrays
from .apart import Spans, check_apart, span_of
from .arrays import ArrayInfo, Target
from .buffer import Buffer
from .codecs.common.base import Bits, Bytes, CodecSpec, Plan
from .codecs.common.float_mode import default_floats
from .codecs.common.philox import check_key, key_numbers
from .codecs.common.threads import cpu_count
from .engine import Parsed
from .formats.dtypes import BY_NAME, DType
from .formats.errors import FormatError
from .planning import DEVICE_BACKEND, device_engine, integer, spec_class

T = TypeVar("T")

_UINT8 = BY_NAME["uint8"]

#: What messages call what is read.
ENCODED = "the array that is encoded"
ADDED = "the array that is added"
DECODED = "the buffer that is decoded"


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


def need_no_base(spec: CodecSpec, calls: str, instead: str) -> None:
    """ValueError for codecs that need a base, in calls that take none."""
    if spec.needs_base:
        raise ValueError(f"{spec.name} needs a base, which {calls} do not take: {instead}")


def need_no_base_in_batch(plan: Plan) -> None:
    """FormatError for a buffer that needs a base: batches have none, and go on without it."""
    if plan.needs_base:
        text = f"{plan.codec.name} needs a base, which batches do not take: decode it by itself"
        raise FormatError("base_mismatch", text)


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


def check_out(plan: Plan, out: Any, read: Mapping[str, Any], scratch: Any = None) -> None:
    """ValueError if memory for a buffer, or `scratch`, overlaps what is read, by name."""
    if out is not None or scratch is not None:
        written = {"out": [span_of(out, plan.nbytes)], "scratch": [span_of(scratch)]}
        spans = {name: [span_of(x)] for name, x in read.items() if x is not None}
        check_apart(written, spans)


def check_decoded(
    src: Any, out: Any, *, base: Any = None, scratch: Any = None, what: str = "out"
) -> None:
    """ValueError if `out`, which messages call `what`, or `scratch` overlaps what is read.

    `out` may be the memory of the base, all of it.
    """
    if out is None and scratch is None:
        return
    here = span_of(out)
    read: dict[str, Spans] = {DECODED: [span_of(src)]}
    against = None if base is None else span_of(base)
    if against is not None and against != here:
        read["base"] = [against]
    check_apart({what: [here], "scratch": [span_of(scratch)]}, read)


def numbered(error: Exception, what: str) -> Exception:
    """A TypeError or ValueError as `error` is one, which says that it is of `what`."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{what}: {error}")


def each(name: str, call: Callable[..., T], *values: Iterable[Any]) -> list[T]:
    """What `call` gives for each element of `values`, or of several at a time.

    A TypeError or ValueError says which of `name` it is of.
    """
    found: list[T] = []
    try:
        for row in zip(*values, strict=True):
            found.append(call(*row))
    except (TypeError, ValueError) as error:
        raise numbered(error, f"{name}[{len(found)}]") from None
    return found


def host_stats(spec: CodecSpec, plan: Plan, stats: Any) -> npt.NDArray[Any] | None:
    """Checked statistics for `plan`, on the host.

    None where they are for `spec`, which the plan does not use.
    """
    if stats is None:
        return None
    found = arrays.host_array(stats) if on_gpu(stats) else np.asarray(stats)
    with default_floats():
        spec.check_stats(found, plan.dtype)
    return found if plan.codec == spec else None


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
