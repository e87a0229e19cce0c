"""What collectives do to arrays themselves, in NumPy and PyTorch alike.

Arrays of CuPy and JAX cross by DLPack where they are: to PyTorch on a GPU, to NumPy on the host.
On the host everything is computed in the default floating-point mode, whatever the caller's. That
binds the calling thread alone, and PyTorch's threads have the modes in which they were made: so
PyTorch is given no more elements at once than it computes on the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ... import arrays
from ...arrays import ArrayInfo, Target
from ...codecs.common.float_mode import default_floats
from ...formats.dtypes import BY_NAME, DType

if TYPE_CHECKING:
    from ...buffer import Buffer

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

_UINT8 = BY_NAME["uint8"]
#: Elements up to which PyTorch uses no other threads (at::internal::GRAIN_SIZE).
_GRAIN = 1 << 15
#: Seconds of waiting after which it is asked who has left.
_ASK = 0.1


def as_input(x: Any) -> tuple[Any, ArrayInfo, Target]:
    """`x` as a NumPy array or a tensor, what it is then, and what it was."""
    info = arrays.describe(x)
    target = Target(info.library, info.device)
    if info.library == "torch":
        x = x.detach() if x.requires_grad else x
        if x.is_complex() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        return x, info, target
    if arrays.on_gpu(x):
        from ...gpu_arrays import _as_torch

        tensor = _as_torch(x, info).view(torch_dtype(info.dtype))
        return tensor, info._replace(library="torch", device=tensor.device), target
    host = arrays.host_array(x).astype(info.dtype.numpy, copy=False)
    return host, info._replace(library="numpy", device=None), target


def as_output(
    out: Any, info: ArrayInfo, shape: tuple[int, ...], target: Target, what: str = "out"
) -> Any:
    """The memory of `out`, None if it is None; it counts as written from here on.

    Raises TypeError or ValueError if it cannot hold a result of this shape and else like `info`,
    and for tensors that require grad unless gradients are off.
    """
    if out is None:
        return None
    found = arrays.describe(out)
    if Target(found.library, found.device) != target:
        where = f"{found.library} on {found.device or 'the host'}"
        raise ValueError(f"{what} is {where}; needed: {target.library} where x is")
    arrays.check_writable(out, found, info.dtype, shape, what)
    if found.library == "torch":
        fit = out.is_contiguous()
        out = out.detach() if out.requires_grad else out
    elif arrays.on_gpu(out):
        from ...gpu_arrays import _as_torch

        fit = out.flags.c_contiguous
        out = _as_torch(out, found).view(torch_dtype(found.dtype))
    else:
        fit = isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable
        fit = fit and out.dtype.isnative
    if not fit:
        raise ValueError(f"{what} must be contiguous, writable and in native byte order")
    arrays.mark_written(out)
    return out


def check_result(x: Any, values: Any, info: ArrayInfo, what: str) -> None:
    """Raise TypeError or ValueError if an array cannot be written to, whatever its dtype and shape.

    `values` and `info` are what `as_input` gives of it, but the library is that of `x`.
    """
    arrays.check_writable(x, info, info.dtype, info.shape, what)
    if not is_torch(values):
        if not values.flags.writeable:
            raise ValueError(f"{what} is read-only; needed: memory that can be written")
    elif values.is_inference() and not sys.modules["torch"].is_inference_mode_enabled():
        raise ValueError(
            f"{what} is an inference tensor, which PyTorch does not write to outside of inference "
            "mode. Allowed: within torch.inference_mode(), or another tensor"
        )


def writing(*given: Any) -> AbstractContextManager[Any]:
    """Have results be written that `check_result` has allowed before, perhaps in another mode.

    `given` are arrays or lists of them, the results among them.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext()
    xs = itertools.chain.from_iterable(x if isinstance(x, (list, tuple)) else [x] for x in given)
    inference = any(is_torch(x) and x.is_inference() for x in xs)
    found: AbstractContextManager[Any] = torch.inference_mode() if inference else torch.no_grad()
    return found


def as_result(x: Any, dtype: DType, target: Target) -> Any:
    """The result `x` in the library that was asked in."""
    if target.library in ("numpy", "torch"):
        return x
    if is_torch(x):
        import torch

        from ...gpu_arrays import _export

        if target.library == "jax":
            # JAX does not follow PyTorch's stream.
            torch.cuda.current_stream(x.device).synchronize()
        return _export(x, dtype, target)
    return arrays.from_bits(x.reshape(-1).view(dtype.bits), dtype, x.shape, target)


def overlap(x: Any, out: Any) -> bool:
    """True if the arrays may share memory."""
    if not is_torch(x):
        return bool(np.may_share_memory(x, out))
    if not x.numel() or not out.numel() or x.device != out.device:
        return False
    start, begin = x.data_ptr(), out.data_ptr()
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    stop = start + (last + 1) * x.element_size()
    return bool(start < begin + out.numel() * out.element_size() and begin < stop)


def same_memory(x: Any, y: Any) -> bool:
    """True if two contiguous arrays of one size begin at the same place."""
    if is_torch(x):
        return bool(x.data_ptr() == y.data_ptr())
    return bool(x.ctypes.data == y.ctypes.data)


def is_contiguous(x: Any) -> bool:
    """True if elements lie one behind the other."""
    return bool(x.is_contiguous() if is_torch(x) else x.flags.c_contiguous)


def is_torch(x: Any) -> bool:
    """True for a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_cuda(x: Any) -> bool:
    """True for a tensor on a GPU."""
    return is_torch(x) and bool(x.is_cuda)


def torch_dtype(dtype: DType) -> Any:
    """PyTorch's dtype of this name."""
    import torch

    return getattr(torch, dtype.name)


def kept(function: F) -> F:
    """For functions that make what is kept: memory of inference mode is of no use outside."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False):
            return function(*args, **options)

    return run  # type: ignore[return-value]


def empty(shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
    """New memory of the library and device of `like`."""
    if is_torch(like):
        return like.new_empty(shape, dtype=torch_dtype(dtype))
    return np.empty(shape, dtype.numpy)


def empty_bytes(nbytes: int, like: Any) -> Any:
    """New memory, uint8, shape (nbytes,)."""
    return empty((nbytes,), _UINT8, like)


def device_of(x: Any) -> Any:
    """PyTorch's device of a tensor, None of a NumPy array."""
    return x.device if is_torch(x) else None


def on_device(host: Array, device: Any) -> Any:
    """`host` as a tensor on PyTorch's `device`, or as it is if that is None."""
    if device is None:
        return host
    import torch

    x = torch.from_numpy(host)
    if device.type == "cuda":
        # Nobody waits for a copy out of pinned memory, which PyTorch keeps until it is over.
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def dtype_of(x: Any) -> DType:
    """The element type of an array or tensor."""
    return arrays.describe(x).dtype


def view(x: Any, dtype: DType) -> Any:
    """The contiguous array `x` with its bytes as elements of `dtype`, shape (n,)."""
    if not is_torch(x):
        return x.reshape(-1).view(dtype.numpy)
    flat = x.reshape(-1)
    if flat.numel() < 2:
        # Of so few PyTorch calls any stride contiguous, but does not look at them otherwise.
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch_dtype(dtype))


def as_bytes(x: Any) -> Any:
    """The memory of the contiguous array `x`: uint8, shape (n,)."""
    return view(x, _UINT8)


def cast(x: Any, dtype: DType) -> Any:
    """`x` in `dtype`: `x` itself if it is that already."""
    if is_torch(x):
        kind = torch_dtype(dtype)
        return x if x.dtype == kind else elementwise(lambda v: v.to(kind), x)
    with default_floats():
        return x.astype(dtype.numpy, copy=False)


def contiguous(x: Any) -> Any:
    """`x` in row order: `x` itself if it is that already."""
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(x).reshape(x.shape)


def copied(x: Any) -> Any:
    """The values of `x` in memory of their own."""
    return x.clone() if is_torch(x) else x.copy()


def clear(total: Any) -> None:
    """Make `total` what sums start from."""
    # A sum that starts at 0.0 would lose the sign of -0.0 + -0.0.
    if is_torch(total):
        total.fill_(-0.0 if total.is_floating_point() else 0)
    else:
        total[...] = -0.0 if arrays.describe(total).dtype.is_float else 0


def put(x: Any, values: Any) -> None:
    """Copy `values` to `x`, in its dtype."""
    if is_cuda(x):
        x.copy_(values)
    elif is_torch(x):
        x.copy_(cast(values, dtype_of(x)) if is_torch(values) else values)
    else:
        with default_floats():
            x[...] = values


def fill(x: Any, value: float) -> None:
    """Make all elements of `x` this number."""
    if is_torch(x):
        x.fill_(value)
    else:
        x[...] = value


def add(total: Any, values: Any) -> None:
    """Add `values`, in the dtype of `total`, to it; integers wrap around."""
    dtype = arrays.describe(total).dtype
    if not dtype.is_float:
        # PyTorch adds no unsigned integers; signed ones have the same bits.
        signed = BY_NAME[f"int{8 * dtype.itemsize}"]
        values = cast(values, dtype)
        if is_torch(total):
            total, values = total.view(torch_dtype(signed)), values.view(torch_dtype(signed))
        else:
            total, values = total.view(signed.numpy), values.view(signed.numpy)
        dtype = signed
    if is_torch(total):
        # One kernel, which adds in the wider dtype, that of `total`. 8-bit floats have none.
        is_narrow = values.is_floating_point() and values.element_size() == 1
        change(operator.iadd, total, cast(values, dtype) if is_narrow else values)
        return
    change(operator.iadd, total, cast(values, dtype))


def elementwise(function: Callable[..., Any], *xs: Any) -> Any:
    """`function(*xs)`, which works element by element, of arrays of one shape."""
    if is_cuda(xs[0]):
        return function(*xs)
    with default_floats():
        if not is_torch(xs[0]) or xs[0].numel() <= _GRAIN:
            return function(*xs)
        import torch

        return torch.cat([function(*pieces) for pieces in _pieces(xs)]).reshape(xs[0].shape)


def change(function: Callable[..., Any], x: Any, *others: Any) -> None:
    """Call `function(x, *others)`, which changes contiguous `x` in place, as `elementwise` does."""
    if is_cuda(x):
        function(x, *others)
        return
    with default_floats():
        if not is_torch(x) or x.numel() <= _GRAIN:
            function(x, *others)
            return
        for pieces in _pieces((x.view(-1), *others)):
            function(*pieces)


def _pieces(xs: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    return zip(*(x.reshape(-1).split(_GRAIN) for x in xs), strict=True)


def sum_dtype(dtype: DType) -> DType:
    """The dtype that sums of `dtype` are made in; TypeError if there is none."""
    if dtype.is_float:
        return BY_NAME["float64" if dtype.name == "float64" else "float32"]
    if dtype.numpy.kind not in "iu":
        raise TypeError(f"x is {dtype.name}; allowed: floats and integers")
    return dtype


def random_normal(n: int, dtype: DType, like: Any) -> Any:
    """N(0, 0.02), shape (n,), of the library and device of `like`."""
    if is_torch(like):
        import torch

        return cast(torch.randn(n, device=like.device).mul_(0.02), dtype)
    values = np.random.default_rng(0).standard_normal(n, np.float32) * np.float32(0.02)
    return values.astype(dtype.numpy)


def rounded(nbytes: int, bits: int, least: int = 1) -> int:
    """So many bytes or a few more, so that few sizes of memory differ.

    They are a multiple of `least` and of a power of two, at most ``nbytes / 2 ** (bits - 1)``.
    """
    unit = max(least, 1 << max(0, nbytes.bit_length() - bits))
    return -(-nbytes // unit) * unit


def report(buffers: Iterable[Buffer | None], words: Any) -> None:
    """Have what decoding on a GPU finds go to `words`, int64, shape (buffers,) or longer."""
    for k, buffer in enumerate(buffers):
        if buffer is not None and buffer._memory is not None:
            buffer._memory.report_to(words[k : k + 1])


def current_stream(x: Any) -> Any:
    """The stream that calls on `x` are queued on; None on the host."""
    if not is_cuda(x):
        return None
    import torch

    return torch.cuda.current_stream(x.device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Have what is queued inside go to a stream as `current_stream` gives it; None: the current."""
    if stream is None:
        return contextlib.nullcontext()
    import torch

    found: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return found


def follow(stream: Any) -> None:
    """Have what is queued from now on wait for what is queued on a stream, None: for nothing."""
    if stream is not None:
        import torch

        torch.cuda.current_stream(stream.device).wait_stream(stream)


def synchronize(x: Any) -> None:
    """Wait for what is queued on the GPU of `x`, if it is on one."""
    stream = current_stream(x)
    if stream is not None:
        stream.synchronize()


class PendingHostCopy:
    """A small int64 array that is copied to the host, behind what is queued on the device now."""

    @kept
    def __init__(self, x: Any, spare: PendingHostCopy | None = None) -> None:
        """`spare` is one that is over; its memory is used again if it has the same shape."""
        self._host: Any = x
        self._event: Any = None
        if is_cuda(x):
            import torch

            if spare is not None and spare._host.shape == x.shape:
                self._host, self._event = spare._host, spare._event
            else:
                self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
                self._event = torch.cuda.Event()
            self.copy(x)
            self.mark()

    def copy(self, x: Any) -> None:
        """Queue the copy of an array on a GPU; `mark` is what it is known by."""
        self._host.copy_(x, non_blocking=True)

    def mark(self, stream: Any = None) -> None:
        """Have `wait` wait for what is queued on a stream now, a copy from a GPU among it.

        None: the current stream.
        """
        if self._event is not None:
            self._event.record(stream)

    @property
    def on_host(self) -> bool:
        """Whether the array is in host memory, and so here at once."""
        return self._event is None

    def done(self) -> bool:
        """True if `wait` would not wait."""
        return self._event is None or bool(self._event.query())

    def wait(self, timeout: float, left: Callable[[], dict[int, str]] | None = None) -> Any:
        """The values in NumPy; TimeoutError after `timeout` seconds.

        ConnectionError soon after `left()` gives ranks that have left.
        """
        if self._event is not None:
            start = asked = time.monotonic()
            while not self._event.query():
                now = time.monotonic()
                if left is not None and now - asked > _ASK:
                    asked = now
                    # What arrived before they left is as good as ever.
                    if (gone := left()) and not self._event.query():
                        why = "".join(f"; {text}" for text in gone.values() if text)
                        raise ConnectionError(f"ranks {list(gone)} have left{why}")
                waited = time.monotonic() - start
                if waited > timeout:
                    raise TimeoutError(
                        f"nothing arrived within {timeout:g} s: a rank is late or gone"
                    )
                # The first millisecond at full speed: that is how long most calls wait.
                if waited > 1e-3:
                    time.sleep(5e-5)
        return self.values()

    def values(self) -> Any:
        """The values in NumPy, once `done`."""
        return arrays.host_array(self._host) if self._event is None else self._host.numpy()
