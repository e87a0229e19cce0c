"""Arrays of any library as flat element bits on the host, and back. A library is imported
only when an array of it is passed or requested.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .codecs.common.base import Bits, Bytes
from .formats.dtypes import BY_NAME, DType, dtype_named

_LIBRARIES = ("numpy", "torch", "cupy", "jax")
_CLASSES = {"torch": "Tensor", "cupy": "ndarray", "jax": "Array"}

#: The number of host memory in DLPack.
DLPACK_CPU = 1

_by_numpy: dict[np.dtype[Any], DType] = {}
_by_torch: dict[Any, DType] = {}

#: Names of dtypes that are accepted beside the full ones.
SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


class ArrayInfo(NamedTuple):
    """What an array is: its library, its device (None on the host), element type and shape."""

    library: str
    device: Any
    dtype: DType
    shape: tuple[int, ...]


class Listed(NamedTuple):
    """What arrays of one library, device and element type are.

    `addresses` are where their elements start, int64, if they are contiguous tensors without lazy
    views; None: each has to be looked at.
    """

    library: str
    device: Any
    dtype: DType
    shapes: list[tuple[int, ...]]
    addresses: npt.NDArray[np.int64] | None = None


class Target(NamedTuple):
    """Where a result goes: library and device (None for the library's host memory)."""

    library: str = "numpy"
    device: Any = None


def numpy_dtype(dtype: np.dtype[Any]) -> DType:
    """The `DType` of a NumPy dtype in either byte order."""
    found = _by_numpy.get(dtype)
    if found is None:
        if dtype.hasobject or dtype.names or dtype.subdtype:
            raise TypeError(f"dtype {dtype} is not supported; supported: {', '.join(BY_NAME)}")
        found = _by_numpy[dtype] = dtype_named(dtype.name)
    return found


def as_dtype(dtype: Any) -> DType:
    """The `DType` of a name (full or of `SHORT_DTYPES`), a NumPy dtype or a library's dtype.

    Raises TypeError for anything else.
    """
    if isinstance(dtype, DType):
        return dtype
    if dtype is None:
        raise TypeError("dtype is None; allowed: a name, a NumPy dtype or a library's dtype")
    name = str(dtype).removeprefix("torch.")
    name = SHORT_DTYPES.get(name, name)
    if name in BY_NAME:
        return BY_NAME[name]
    try:
        return numpy_dtype(np.dtype(dtype))
    except TypeError:
        return dtype_named(name)


def _is_a(library: str, x: Any) -> bool:
    """True if `x` is an array of `library`, which is not imported for that."""
    module = sys.modules.get(library)
    return module is not None and isinstance(x, getattr(module, _CLASSES[library], ()))


def library_of(x: Any) -> str:
    """Name of the array library that `x` belongs to; TypeError if it is not an array."""
    library = _library(x)
    if library is None:
        raise TypeError(
            f"Expected an array, got {type(x).__name__}. Allowed: arrays of NumPy, PyTorch, CuPy "
            f"and JAX, and objects on the host with __dlpack__{_advice(x)}"
        )
    return library


def _advice(x: Any) -> str:
    """What to do with something that is not an array."""
    if isinstance(x, dict):
        return ". For a dict of arrays there is tightwire.dumps"
    if isinstance(x, (list, tuple)):
        return ". For a list of numbers there is np.asarray, for one of arrays tightwire.dumps"
    return ". np.asarray makes an array of a number" if isinstance(x, (int, float)) else ""


def is_array(x: Any) -> bool:
    """True for an array of any library; TypeError for a masked one."""
    return _library(x) is not None


def _library(x: Any) -> str | None:
    torch = sys.modules.get("torch")
    if torch is not None and type(x) is getattr(torch, "Tensor", None):
        return "torch"
    if "numpy.ma" in sys.modules and isinstance(x, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask: call .filled(...) first")
    if isinstance(x, np.ndarray):
        return "numpy"
    for name in _CLASSES:
        if _is_a(name, x):
            return name
    if isinstance(x, np.generic) or (hasattr(x, "__dlpack__") and not isinstance(x, type)):
        return "numpy"
    return None


#: What is on the host whatever else is imported.
_QUICK = (np.ndarray, bytes, bytearray, memoryview, type(None))


def on_gpu(x: Any) -> bool:
    """True for PyTorch (CUDA or ROCm), CuPy and JAX arrays in GPU memory; any object is taken."""
    if type(x) in _QUICK:
        return False
    if _is_a("torch", x):
        return bool(x.is_cuda)
    if _is_a("jax", x):
        return not _is_traced(x) and all(device.platform == "gpu" for device in x.devices())
    return _is_a("cupy", x)


def _is_traced(x: Any) -> bool:
    """True for what stands for an array while JAX traces a function."""
    return isinstance(x, sys.modules["jax"].core.Tracer)


def has_memory(x: Any) -> bool:
    """False for a tensor whose elements are nowhere in memory.

    Such are tensors of FakeTensorMode, within torch.func transforms or with freed storage,
    ZeroTensors, and subclasses that wrap other tensors (DTensor).
    """
    try:
        if type(x) is not sys.modules["torch"].Tensor and x.untyped_storage().device.type == "meta":
            # To ask a FakeTensor for its address would warn.
            return False
        return bool(x.data_ptr()) or not x.numel()
    except RuntimeError:
        return False


def _plain_tensor(x: Any, torch: Any) -> ArrayInfo | None:
    """What a `torch.Tensor` with memory of its own is, quickly; None for what has to be looked at.

    Nested tensors have no shape, sparse ones and those without memory no address.
    """
    dtype = _by_torch.get(x.dtype)
    try:
        if dtype is None or not (x.data_ptr() or not x.numel()):
            return None
        shape = tuple(x.shape)
    except RuntimeError:
        return None
    if x.is_cuda:
        return ArrayInfo("torch", x.device, dtype, shape)
    return ArrayInfo("torch", None, dtype, shape) if x.is_cpu else None


def describe(x: Any) -> ArrayInfo:
    """Library, device, element type and shape of an array, without touching its data."""
    if type(x) is np.ndarray:
        return ArrayInfo("numpy", None, numpy_dtype(x.dtype), x.shape)
    torch = sys.modules.get("torch")
    known = None if torch is None or type(x) is not torch.Tensor else _plain_tensor(x, torch)
    if known is not None:
        return known
    library = library_of(x)
    if library == "torch":
        name = str(x.dtype).removeprefix("torch.")
        if x.is_quantized:
            raise TypeError(
                "a quantized tensor is not supported: call .dequantize() or .int_repr()"
            )
        if x.layout != sys.modules["torch"].strided or x.is_nested:
            raise TypeError(f"a {x.layout} tensor is not supported: call .to_dense() first")
        if x.device.type == "meta":
            raise TypeError("a meta tensor has no data. Allowed: tensors on the host or a GPU")
        if not has_memory(x):
            raise TypeError(
                f"{_kind(x)} has no memory of its own. Allowed: tensors with data, outside of "
                "FakeTensorMode and torch.func transforms; for a DTensor x.to_local()"
            )
        device = None if x.device.type == "cpu" else x.device
        dtype = _by_torch[x.dtype] = dtype_named(name)
        return ArrayInfo("torch", device, dtype, tuple(x.shape))
    if library == "cupy":
        return ArrayInfo("cupy", x.device, numpy_dtype(x.dtype), tuple(x.shape))
    if library == "jax":
        jax = sys.modules["jax"]
        if _is_traced(x):
            raise TypeError(
                f"{_kind(x)} has no data while JAX traces. Allowed: arrays outside of jax.jit, "
                "jax.vmap and jax.grad, or within a jax.pure_callback"
            )
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(
                f"dtype {x.dtype} is not supported. Allowed: for random keys jax.random.key_data(x)"
            )
        devices = x.devices()
        if len(devices) != 1:
            raise TypeError(
                f"a JAX array on {len(devices)} devices is not supported. Allowed: its shards"
            )
        (device,) = devices
        host = device.platform == "cpu"
        return ArrayInfo("jax", None if host else device, numpy_dtype(x.dtype), tuple(x.shape))
    if not isinstance(x, (np.ndarray, np.generic)):
        x = _from_dlpack(x)
    return ArrayInfo("numpy", None, numpy_dtype(x.dtype), x.shape)


def plain_tensors(xs: Sequence[Any]) -> Listed | None:
    """What contiguous tensors of one device and element type are, in less time than `describe` of
    each; None where one of them has to be looked at.
    """
    torch = sys.modules.get("torch")
    if torch is None or not xs or not set(map(type, xs)) <= {torch.Tensor, torch.nn.Parameter}:
        return None
    kinds = list(map(_kind_of, xs))
    torch_dtype, device = kinds[0]
    dtype = _by_torch.get(torch_dtype)
    if dtype is None or kinds.count(kinds[0]) != len(xs) or not (xs[0].is_cpu or xs[0].is_cuda):
        return None
    tensor = torch.Tensor
    # Complex numbers have lazy views, and so have the floats that they consist of.
    if dtype.name in _MAY_BE_LAZY and (any(map(tensor.is_neg, xs)) or any(map(tensor.is_conj, xs))):
        return None
    try:
        shapes = [x.shape for x in xs]
        addresses = np.fromiter(map(tensor.data_ptr, xs), np.int64, len(xs))
        contiguous = all(map(tensor.is_contiguous, xs))
    except RuntimeError:
        return None
    if not contiguous or any(xs[i].numel() for i in np.flatnonzero(addresses == 0).tolist()):
        return None
    return Listed("torch", None if xs[0].is_cpu else device, dtype, shapes, addresses)


_kind_of = operator.attrgetter("dtype", "device")
_MAY_BE_LAZY = ("float16", "float32", "float64", "complex64", "complex128")


def _kind(x: Any) -> str:
    """What to call an array whose class says little."""
    name = type(x).__name__
    return "the tensor" if name in ("Tensor", "Parameter") else f"a {name}"


def _from_dlpack(x: Any) -> np.ndarray[Any, np.dtype[Any]]:
    kind = x.__dlpack_device__()[0]
    if kind != DLPACK_CPU:
        raise TypeError(f"{type(x).__name__} is on DLPack device {kind}; allowed: host memory")
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{type(x).__name__} is not supported: {error}") from None


def host_array(x: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """`x` as a NumPy array on the host: a view where that is possible, else a copy.

    Types that NumPy has no name for come as unsigned integers of the same size.
    """
    if type(x) is np.ndarray:
        return x
    library = library_of(x)
    if library == "torch":
        torch = sys.modules["torch"]
        x = x.detach().resolve_conj().resolve_neg().cpu()
        known = torch.float16, torch.float32, torch.float64
        if x.dtype.is_floating_point and x.dtype not in known:
            x = x.view({1: torch.uint8, 2: torch.uint16}[x.element_size()])
        return x.numpy()  # type: ignore[no-any-return]
    if library == "cupy":
        return sys.modules["cupy"].asnumpy(x)  # type: ignore[no-any-return]
    if library == "jax":
        return np.asarray(x)
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x)
    return _from_dlpack(x)


def host_bits(x: Any, dtype: DType) -> Bits:
    """The elements of `x` in C order, as unsigned integers in native order, shape (n,)."""
    host = host_array(x)
    if host.dtype.isnative and host.flags.c_contiguous:
        return host.reshape(-1).view(dtype.bits)
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    return np.ascontiguousarray(host).reshape(-1).view(dtype.bits)


def from_bits(bits: Bits, dtype: DType, shape: tuple[int, ...], target: Target) -> Any:
    """An array of `target`'s library that holds `bits` (host, 1-D); shares memory if it can."""
    if target.library == "torch":
        import torch

        tensor = torch.from_numpy(bits.view(np.uint8)) if bits.size else None
        if tensor is None:
            # Not where torch.set_default_device says.
            tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        tensor = tensor.view(getattr(torch, dtype.name)).reshape(shape)
        return tensor if target.device is None else tensor.to(target.device)
    array = bits.view(dtype.numpy).reshape(shape)
    if target.library == "cupy":
        import cupy

        with cupy.cuda.Device(target.device):
            return cupy.asarray(array)
    if target.library == "jax":
        import jax

        return check_jax(jax.device_put(array, target.device), dtype)
    return array


def check_jax(x: Any, dtype: DType) -> Any:
    """The JAX array `x`; TypeError if JAX has narrowed it from `dtype`."""
    if x.dtype != dtype.numpy:
        raise TypeError(
            f"JAX would convert {dtype.name} into {x.dtype}: enable jax_enable_x64, or use "
            'like="numpy"'
        )
    return x


def check_writable(
    x: Any, info: ArrayInfo, dtype: DType, shape: tuple[int, ...], what: str
) -> None:
    """Raise TypeError or ValueError if `x` is not memory of this dtype and shape to write to.

    Of tensors that require grad, views of them included, that is ValueError unless gradients are
    off: the write would not be part of the graph.
    """
    if info.library == "jax":
        raise TypeError(f"{what} is a JAX array, which cannot be written to")
    if isinstance(x, np.generic) or (info.library == "torch" and (x.is_conj() or x.is_neg())):
        raise ValueError(f"{what} is a scalar or a lazy view, and cannot be written to")
    if info.library == "torch" and x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            f"{what} requires grad, and autograd would not see the write. Allowed: within "
            "torch.no_grad(), or a tensor that does not require grad"
        )
    if info.dtype != dtype or info.shape != shape:
        raise ValueError(
            f"{what} is {info.dtype.name}{list(info.shape)}; needed: {dtype.name}{list(shape)}"
        )


def mark_written(x: Any) -> None:
    """Tell autograd that the memory of `x`, if it is a tensor, gets other values.

    As after `Tensor.copy_`: the version counter, which views share, goes up, so that a backward
    pass that needs the old values raises. Inference tensors have none, and no backward pass.
    """
    if _is_a("torch", x):
        sys.modules["torch"].autograd.graph.increment_version(x)


def mark_all_written(tensors: Sequence[Any]) -> None:
    """As `mark_written`, of tensors."""
    increment = sys.modules["torch"].autograd.graph.increment_version
    try:
        increment(tensors)
    except TypeError:
        # Older versions of PyTorch take one.
        for x in tensors:
            increment(x)


def writable_bits(x: Any, dtype: DType, shape: tuple[int, ...], what: str) -> Bits:
    """The memory of the host array `x` as bits, shape (n,), which counts as written from here on.

    It must have this dtype and shape.
    """
    if type(x) is np.ndarray and x.dtype == dtype.numpy and x.shape == shape:
        flags = x.flags
        if flags.c_contiguous and flags.writeable and x.dtype.isnative:
            return x.reshape(-1).view(dtype.bits)
    info = describe(x)
    if info.device is not None and info.library != "jax":
        raise ValueError(f"{what} is on {info.device}; allowed: an array on the host")
    check_writable(x, info, dtype, shape, what)
    host = host_array(x)
    if not (host.flags.c_contiguous and host.flags.writeable and host.dtype.isnative):
        raise ValueError(f"{what} must be contiguous, writable and in native byte order")
    mark_written(x)
    return host.reshape(-1).view(dtype.bits)


def memory_of(x: Any) -> Any:
    """What is equal for two arrays of exactly the same elements in memory; None if not known."""
    library = library_of(x)
    if library == "torch":
        # x and x.conj() have one memory and other elements.
        lazy = x.is_conj(), x.is_neg()
        key = (str(x.device), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), lazy)
        return (library, *key) if x.numel() else None
    if library == "numpy" and isinstance(x, np.ndarray) and x.size:
        return library, x.__array_interface__["data"][0], x.dtype, x.shape, x.strides
    return None


def memory_range(x: Any) -> tuple[str, int, int] | None:
    """Where the elements of an array lie: the device, the first byte and that after the last.

    None if there are none, or it is not known.
    """
    library = library_of(x)
    if library == "torch":
        device, at, size = str(x.device), x.data_ptr(), x.element_size()
        strides = [size * stride for stride in x.stride()]
    elif library == "numpy" and isinstance(x, np.ndarray):
        device, at, size = "cpu", x.__array_interface__["data"][0], x.itemsize
        strides = list(x.strides)
    elif library == "cupy":
        device, at, size = f"cuda:{x.device.id}", x.data.ptr, x.itemsize
        strides = list(x.strides)
    else:
        return None
    if 0 in x.shape:
        return None
    steps = [(n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)]
    first = at + sum(step for step in steps if step < 0)
    return device, first, at + sum(step for step in steps if step > 0) + size


def span_of(x: Any) -> tuple[int, int]:
    """Start and end of the memory that an array or bytes lie in; (0, 0) for anything else."""
    if type(x) is np.ndarray and x.flags.c_contiguous:
        start: int = x.__array_interface__["data"][0]
        return start, start + x.nbytes
    torch = sys.modules.get("torch")
    try:
        if torch is not None and type(x) is torch.Tensor and x.is_contiguous():
            start = x.data_ptr()
            return start, start + x.nbytes
        if is_bytes(x):
            x = bytes_view(x)
        library = _library(x)
        if library is None or (library == "torch" and not has_memory(x)):
            return 0, 0
        if library == "jax":
            start = 0 if _is_traced(x) else x.unsafe_buffer_pointer()
            return start, start and start + x.nbytes
        found = memory_range(host_array(x) if library == "numpy" else x)
    except (RuntimeError, ValueError):
        # Sparse tensors, those of torch.func transforms, and arrays on several devices have none.
        return 0, 0
    return (0, 0) if found is None else found[1:]


def is_float4(x: Any) -> bool:
    """True for PyTorch's packed tensors of 4-bit floats, two in each byte of the last dimension."""
    return _is_a("torch", x) and str(x.dtype) == "torch.float4_e2m1fn_x2" and x.dim() > 0


def float4_bytes(x: Any) -> Bytes:
    """The bytes of such a tensor, shape (n,)."""
    return host_bits(x.view(sys.modules["torch"].uint8), BY_NAME["uint8"])


def from_packed(data: Bytes, name: str, shape: tuple[int, ...], target: Target) -> Any:
    """An array of elements of less than a byte, of safetensors' dtype `name`.

    PyTorch has a type for pairs of F4; anything else is uint8 of shape (n,).
    """
    flat = from_bits(data, BY_NAME["uint8"], (data.size,), target)
    dtype = None
    if target.library == "torch" and name == "F4" and shape and shape[-1] % 2 == 0:
        dtype = getattr(sys.modules["torch"], "float4_e2m1fn_x2", None)
    return flat if dtype is None else flat.view(dtype).reshape(*shape[:-1], shape[-1] // 2)


def aligned_bytes(raw: Bytes, itemsize: int) -> Bytes:
    """`raw`, or a copy of it where its address does not suit elements of `itemsize` bytes."""
    return raw.copy() if raw.__array_interface__["data"][0] % itemsize else raw


def is_bytes(src: Any) -> bool:
    """True for bytes-like objects of the standard library: bytes, memoryview, mmap, array ..."""
    if isinstance(src, (bytes, bytearray, memoryview)):
        return True
    if isinstance(src, (np.ndarray, np.generic)) or hasattr(src, "__dlpack__"):
        return False
    try:
        memoryview(src)
    except TypeError:
        return False
    return True


def bytes_view(src: Any, allowed: str = "bytes or a uint8 array") -> Bytes:
    """`src` (bytes-like, or a contiguous uint8 array of any library) as uint8, shape (n,).

    `allowed` is what the message of a TypeError asks for.
    """
    if is_bytes(src):
        view = memoryview(src)
        if not view.c_contiguous:
            raise ValueError("a memoryview must be contiguous")
        return np.frombuffer(view, np.uint8)
    library = _library(src)
    if library is None:
        path = isinstance(src, (str, os.PathLike))
        advice = ". Files are read by tightwire.open and the command tightwire" if path else ""
        raise TypeError(f"Expected {allowed}, got {type(src).__name__}{advice}")
    if library == "numpy" and isinstance(src, np.ndarray) and src.dtype == np.uint8:
        return np.ascontiguousarray(src).reshape(-1)
    info = describe(src)
    if info.dtype != BY_NAME["uint8"]:
        raise TypeError(f"Expected {allowed}, got {info.dtype.name}")
    return host_bits(src, info.dtype)


def target_of(like: Any) -> Target:
    """Library and device of `like`: an array, or a library's name."""
    if isinstance(like, str):
        if like not in _LIBRARIES:
            raise ValueError(f"like is {like!r}; allowed: an array or one of {_LIBRARIES}")
        try:
            importlib.import_module(like)
        except ModuleNotFoundError as error:
            if error.name != like:
                raise
            text = f"like={like!r} needs {like}: pip install 'tightwire[{like}]'"
            raise ModuleNotFoundError(text, name=like) from None
        return Target(like)
    library = library_of(like)
    if library == "numpy":
        return Target()
    info = describe(like)
    return Target(info.library, info.device)
