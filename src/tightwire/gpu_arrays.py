"""Arrays of any library as tensors in GPU memory, and back; streams, and checks of memory.

PyTorch provides streams and memory. CuPy and JAX arrays cross by DLPack, without copies.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from . import arrays
from .arrays import ArrayInfo, Target, describe
from .codecs.common.base import Bytes
from .formats.dtypes import BY_NAME, DTYPES, DType
from .formats.header import ALIGN

#: Alignment of buffers and workspaces in device memory, in bytes.
DEVICE_ALIGN = 16

_UINT8 = BY_NAME["uint8"]
_TORCH = {d: getattr(torch, d.name) for d in DTYPES if hasattr(torch, d.name)}
_DTYPES = {t: d for d, t in _TORCH.items()}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_NEEDS = "backend 'triton' needs {}: pip install 'tightwire[triton]'"
_HERE = contextlib.nullcontext()
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _place(library: str, device: Any, required: str | None) -> Any:
    """Where kernels for an array run, None for the host; ValueError if `required` names it."""
    if library == "torch":
        if device is not None and device.type == "cuda":
            return device
        if device is None and _interpreting():
            return torch.device("cpu")
    elif device is not None and torch.cuda.is_available():
        return torch.device("cuda", device.id if library == "cupy" else device.local_hardware_id)
    if required is not None:
        if _interpreting() is None:
            raise ValueError(_NEEDS.format("triton"))
        raise ValueError(
            f"{required} is a {library} array on {device or 'the host'}, which Triton does not "
            "reach; allowed: GPU arrays (and PyTorch arrays on the host with TRITON_INTERPRET=1)"
        )
    return None


@functools.cache
def _interpreting() -> bool | None:
    """True if kernels run under the Triton interpreter, on host memory; None without Triton."""
    try:
        from .codecs.common.launch_triton import INTERPRETED
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return bool(INTERPRETED)


def _scope(device: Any, library: str, other: str | None = None) -> AbstractContextManager[Any]:
    """Makes `device` current and works in the order of `library`'s stream there.

    `other` is the library of an array that takes part: what it queued before is waited for on the
    device, and what it queues later waits.
    """
    if "cupy" in (library, other):
        return _streams(device, library, other or library)
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(device)  # type: ignore[no-any-return]
    return _HERE


@contextlib.contextmanager
def _streams(device: torch.device, library: str, other: str) -> Iterator[None]:
    here, there = _stream(device, library), _stream(device, other)
    with torch.cuda.stream(here):
        if there != here:
            here.wait_stream(there)
        try:
            yield
        finally:
            if there != here:
                there.wait_stream(here)


def _stream(device: torch.device, library: str) -> Any:
    if library != "cupy":
        return torch.cuda.current_stream(device)
    import cupy

    pointer = cupy.cuda.get_current_stream(device.index).ptr
    # Of these two names of the default stream PyTorch makes another stream, or none.
    if pointer in (0, 1):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device=device)


@contextlib.contextmanager
def unrelated() -> Iterator[None]:
    """Views that are made within are tensors of their own to autograd, with versions of their own.

    Those of one operation may else not be written to by what requires grad.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        yield


def new_tensors(
    shapes: Sequence[tuple[int, ...]], dtype: DType, place: torch.device
) -> list[torch.Tensor]:
    """New tensors in one allocation, each at a multiple of ALIGN; those of a shape by one view."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(i)
    unit = ALIGN // dtype.itemsize
    sizes = [-(-math.prod(shape) // unit) * unit for shape in alike]
    total = sum(map(operator.mul, sizes, map(len, alike.values())))
    memory = torch.empty(total, dtype=_TORCH[dtype], device=place)
    found: list[Any] = [None] * len(shapes)
    at = 0
    with unrelated():
        for (shape, numbers), size in zip(alike.items(), sizes, strict=True):
            steps = [size, *(math.prod(shape[i:]) for i in range(1, len(shape) + 1))]
            some = memory.as_strided((len(numbers), *shape), steps, at).unbind()
            for i, x in zip(numbers, some, strict=True):
                found[i] = x
            at += len(numbers) * size
    return found


def _as_torch(x: Any, info: ArrayInfo) -> torch.Tensor:
    """`x` over its own memory, as a tensor with elements of the same size, strides kept.

    A copy only of lazy views, of CuPy arrays with negative strides, and of JAX arrays of a type
    that this PyTorch does not take by DLPack.
    """
    if info.library == "torch":
        if x.requires_grad:
            x = x.detach()
        return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
    unsigned = _UNSIGNED.get(info.dtype.itemsize)
    if 0 in info.shape:
        place = _place(info.library, info.device, "x")
        return torch.empty(info.shape, dtype=_TORCH[info.dtype], device=place)
    if info.library == "cupy":
        import cupy

        if min(x.strides, default=0) < 0:
            x = cupy.ascontiguousarray(x)
        # CuPy gives no bfloat16 and 8-bit floats away; every library has their bits.
        return torch.from_dlpack(x if unsigned is None else x.view(f"u{info.dtype.itemsize}"))
    try:
        return torch.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError):
        if unsigned is None:
            raise
    import jax

    return torch.from_dlpack(jax.lax.bitcast_convert_type(x, f"uint{8 * info.dtype.itemsize}"))


def _export(tensor: torch.Tensor, dtype: DType, target: Target) -> Any:
    """`tensor` as an array of `target`'s library, in the same memory where that can be.

    JAX gets a copy of types that it does not take by DLPack.
    """
    if target.library == "torch":
        return tensor
    unsigned = _UNSIGNED.get(dtype.itemsize)
    if target.library == "cupy":
        import cupy

        if not tensor.numel():
            return cupy.empty(tuple(tensor.shape), dtype.numpy)
        if unsigned is None:
            return cupy.from_dlpack(tensor)
        return cupy.from_dlpack(tensor.view(unsigned)).view(dtype.numpy)
    import jax

    if not tensor.numel():
        empty = np.empty(tuple(tensor.shape), dtype.numpy)
        return arrays.check_jax(jax.device_put(empty, target.device), dtype)
    try:
        return arrays.check_jax(jax.dlpack.from_dlpack(tensor), dtype)
    except (BufferError, RuntimeError, ValueError):
        if unsigned is None:
            raise
    bits = jax.dlpack.from_dlpack(tensor.view(unsigned))
    return jax.lax.bitcast_convert_type(bits, dtype.numpy)


def _values(x: Any, info: ArrayInfo) -> torch.Tensor:
    return _as_torch(x, info).view(_TORCH[info.dtype])


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _writable_bytes(x: Any, nbytes: int, what: str, place: torch.device) -> torch.Tensor:
    """The memory of the uint8 array `x`, shape (n,), which must be fit for kernels.

    It counts as written from here on.
    """
    if not (type(x) is torch.Tensor and x.dtype == torch.uint8 and x.layout is torch.strided):
        info = describe(x)
        arrays.check_writable(x, info, _UINT8, info.shape, what)
        x = _as_torch(x, info)
    data = _bytes(x, nbytes, what, place)
    arrays.mark_written(data)
    return data


def _bytes(tensor: torch.Tensor, nbytes: int, what: str, place: torch.device) -> torch.Tensor:
    """uint8 `tensor` as shape (n,), n >= `nbytes`; ValueError if it is not fit for kernels."""
    _fits(tensor, nbytes, what, place)
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous")
    if tensor.data_ptr() % DEVICE_ALIGN:
        raise ValueError(f"{what} must start at a multiple of {DEVICE_ALIGN} bytes")
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _fits(tensor: torch.Tensor, nbytes: int, what: str, place: torch.device) -> None:
    if tensor.device != place:
        raise ValueError(f"{what} is on {tensor.device}; needed: memory on {place}")
    if tensor.numel() < nbytes:
        raise ValueError(f"{what} has {tensor.numel()} bytes; the plan needs {nbytes}")


def _output(
    x: Any, info: ArrayInfo, dtype: DType, shape: tuple[int, ...], what: str, place: torch.device
) -> torch.Tensor:
    """The memory of the array `x`, which must be fit to hold this dtype and shape.

    It counts as written from here on.
    """
    arrays.check_writable(x, info, dtype, shape, what)
    tensor = _as_torch(x, info)
    if tensor.device != place:
        raise ValueError(f"{what} is on {tensor.device}; needed: memory on {place}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous")
    arrays.mark_written(tensor)
    return tensor


def _download(data: torch.Tensor) -> Bytes:
    host: Bytes = data.cpu().numpy()
    return host


def _upload(host: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> torch.Tensor:
    # PyTorch warns about memory that may not be written to.
    return torch.from_numpy(host if host.flags.writeable else host.copy()).to(device)


def _base_on(base: Any, info: ArrayInfo, place: torch.device, required: bool) -> Any:
    """The base's elements on a device, contiguous; None if they are not there.

    If they are `required` there, ValueError.
    """
    tensor = None
    if _place(info.library, info.device, "base" if required else None) == place:
        tensor = _as_torch(base, info)
    if tensor is None and required:
        raise ValueError(f"base is elsewhere; needed: memory on {place}")
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()
