"""The public codec value: validated parameters, plans, and encode / decode for any array."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import numpy as np

from . import arrays, engine
from .arrays import Target
from .buffer import Buffer, parsed_source
from .codecs.base import Bits, Bytes, CodecSpec, Key, Plan, ReduceOp
from .codecs.float_mode import default_floats
from .codecs.philox import check_key, key_numbers
from .codecs.threads import cpu_count
from .engine import selection
from .formats.codec_ids import CODEC_IDS
from .formats.dtypes import BY_NAME, DType
from .planning import (
    DEVICE_BACKEND,
    backend_module,
    device_engine,
    device_module,
    integer,
    make_plan,
    spec_class,
)

_UINT8 = BY_NAME["uint8"]
_DECODED = "the buffer that is decoded"
_ADDED = "the array that is added"
_FUSED = "decode_add_encode_chunk"
#: Modules with this name take float32 with narrower buffers there.
_FUSED_WIDE = "ADDS_FLOAT32"
Source = Any


@dataclass(frozen=True)
class Codec:
    """A codec with its parameters. Hashable, comparable, safe to share between threads."""

    spec: CodecSpec

    @property
    def name(self) -> str:
        """The codec's name on the wire."""
        return self.spec.name

    @property
    def lossless(self) -> bool:
        """True if decode returns the input bit for bit."""
        return self.spec.lossless

    @property
    def homomorphic(self) -> bool:
        """True if adding wire sections element by element encodes the sum."""
        return self.spec.homomorphic

    @property
    def round_trips(self) -> bool:
        """False if what decodes is another tensor than what was encoded: sdp4bit half rotated."""
        return self.spec.round_trips

    @property
    def reduce_op(self) -> ReduceOp | None:
        """How ranks combine `measure` before encoding, None if they need not."""
        return self.spec.reduce_op

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that this codec codes; others go through raw."""
        return self.spec.dtypes

    def plan(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        chunks: int | None = 1,
        dynamic_capacity: int | None = None,
        checksum: bool = True,
    ) -> Plan:
        """Every size and offset of a buffer for `shape` and `dtype`, before any data is seen.

        `dtype` is a name ("bfloat16", or short: bf16, fp16, fp32, fp64, e4m3, e5m2), a NumPy dtype
        or a library's dtype. `dynamic_capacity` fixes the bytes of each chunk's dynamic slot (fixed
        rate). Raises TypeError or ValueError for bad calls.
        """
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise TypeError(f"shape is {shape!r}; allowed: a tuple of integers")
        sizes = tuple(integer("a dimension of shape", d) for d in shape)
        kind = arrays.as_dtype(dtype)
        return make_plan(self.spec, kind, sizes, chunks, dynamic_capacity, checksum)

    def measure(self, x: Any, *, backend: str | None = None) -> Any:
        """Statistics that ranks may agree on and pass to encode() as `stats`, or None.

        A NumPy array; of a GPU array one of its library on its device, int64 (JAX: int32), or what
        the codec measures in float32 or uint8, without waiting for it (JAX: it waits).
        """
        gpu = device_for(backend, x)
        if gpu is not None:
            found = gpu.measure(self.spec, x, required=backend is not None)
            if found is not NotImplemented:
                return found
        info = arrays.describe(x)
        with default_floats():
            return self.spec.measure(arrays.host_bits(x, info.dtype), info.dtype)

    def encode(
        self,
        x: Any,
        *,
        stats: Any = None,
        key: Key | None = None,
        out: Any = None,
        scratch: Any = None,
        chunks: int | None = 1,
        dynamic_capacity: int | None = None,
        checksum: bool = True,
        threads: int | None = None,
        backend: str | None = None,
    ) -> Buffer:
        """Encode an array of any shape into a Buffer; `x` is never modified.

        `out` is a Buffer to reuse or a writable uint8 array of at least `plan.nbytes`, on the host
        or, 16-byte aligned, on the GPU of `x`. `threads` None uses every processor where the size
        is worth it. `backend` is "ref" or "cpu" (host), "triton" (GPU), None picks the fastest:
        "ref" only for tensors of less than 64 KiB while "cpu" would have to compile first.
        `key` is what codecs that round at random draw by; others only look whether it is one.

        GPU arrays are encoded where they are, on the current stream (PyTorch's, CuPy's; a JAX array
        on PyTorch's), without waiting for the device; so that nothing is allocated give `out` and
        `scratch`, uint8 on that GPU, 16-byte aligned, of at least `plan.scratch_nbytes`. Where
        Triton or a kernel for the dtype is missing they are encoded on the host.

        Raises TypeError or ValueError for bad calls, as without `key` where the codec draws.
        """
        if isinstance(x, Buffer):
            raise TypeError(
                "x is a Buffer, which is encoded already. Allowed: arrays, as x.packed()"
            )
        self.require_key(x, key)
        gpu = device_for(backend, x)
        if gpu is not None:
            encoded = gpu.encode(
                self.spec,
                x,
                stats=stats,
                key=key,
                out=out,
                scratch=scratch,
                chunks=chunks,
                dynamic_capacity=dynamic_capacity,
                checksum=checksum,
                required=backend is not None,
            )
            if encoded is not NotImplemented:
                return encoded  # type: ignore[no-any-return]
        info = arrays.describe(x)
        bits = arrays.host_bits(x, info.dtype)
        plan = make_plan(self.spec, info.dtype, info.shape, chunks, dynamic_capacity, checksum)
        target = Target(info.library, info.device)
        to_gpu = gpu is not None and _on_gpu(out)
        if gpu is not None and out is None and self.homomorphic and info.library == "torch":
            # Where its cells can be added to.
            to_gpu = _on_gpu(x)
        buffer = Buffer(plan, _room(plan, None if to_gpu else out, bits), target)
        if stats is not None:
            stats = arrays.host_array(stats) if _on_gpu(stats) else np.asarray(stats)
            with default_floats():
                self.spec.check_stats(stats, info.dtype)
            if np.may_share_memory(buffer._bytes, stats):
                raise ValueError("out overlaps stats")
            if plan.codec != self.spec:
                stats = None
        engine.encode_into(
            plan,
            bits,
            buffer._bytes,
            stats=stats,
            key=key,
            threads=thread_count(threads),
            backend=backend,
        )
        if gpu is not None and to_gpu:
            buffer = gpu.moved(buffer, out)
        return buffer

    def decode(
        self, src: Source, *, out: Any = None, scratch: Any = None, max_nbytes: int | None = None
    ) -> Any:
        """See `tightwire.decode`; the codec that decodes is the one that the buffer names."""
        return decode(src, out=out, scratch=scratch, max_nbytes=max_nbytes)

    def decode_add(self, src: Source, acc: Any, *, scratch: Any = None) -> Any:
        """Decode `src` and add it to `acc` (same shape, any float dtype) in place.

        The decoded values, floats as well, are rounded to `acc`'s dtype, then added in it. Returns
        `acc`, which is to autograd as `out` of `tightwire.decode`. On the host checksums and
        padding are checked first, and a codec that can adds to float32 in one pass. On a
        GPU nothing waits; bfloat16, float16 and float32 are added in the same pass that decodes
        them if `acc` is float32 or of the buffer's dtype. `scratch` is that of `encode`. `acc` is
        undefined after FormatError("bad_payload"), which later chunks may raise when others have
        been added, and on a GPU after any error.

        Raises FormatError for a damaged buffer, TypeError or ValueError for an `acc` that cannot
        take the sum or overlaps `src`.
        """
        info = arrays.describe(acc)
        gpu = device_for(None, src, acc)
        if gpu is not None:
            _need_float(info.dtype, "acc")
            if gpu.decode_add(src, acc, scratch) is not NotImplemented:
                return acc
            if _on_gpu(acc):
                gpu.check_apart(_DECODED, src, "acc", acc)
                values = decode(src, like=acc, scratch=scratch)
                _check_like(arrays.describe(values), info)
                gpu.add(acc, values)
                return acc
        acc_bits = arrays.writable_bits(acc, info.dtype, info.shape, "acc")
        _need_float(info.dtype, "acc")
        values = acc_bits.view(info.dtype.numpy)
        parsed = parsed_source(src, None)
        if np.may_share_memory(values, parsed.data):
            raise ValueError(f"acc overlaps {_DECODED}")
        fits = parsed.plan.shape == info.shape and info.dtype.name == "float32"
        if fits and engine.decode_add(parsed, values, threads=cpu_count()):
            return acc
        decoded = decode(src, like="numpy")
        _check_like(arrays.describe(decoded), info)
        with default_floats():
            values += decoded.reshape(-1).astype(values.dtype)
        return acc

    def decode_add_encode(
        self,
        src: Source,
        x: Any,
        *,
        stats: Any = None,
        key: Key | None = None,
        out: Any = None,
        scratch: Any = None,
        chunks: int | None = 1,
        checksum: bool = True,
        backend: str | None = None,
    ) -> Buffer:
        """Decode `src`, add the local array `x` to it, encode the sum with this codec.

        `x` has the shape of the buffer, and its float dtype or, if that is narrower, float32. The
        sum is taken in float32 (float64 for float64) and rounded to the dtype of the buffer. Where
        the codec can, and `src` is of the plan that the sum gets (`chunks` and `checksum` among it;
        of sdp4bit, but for its parameters), all of it is one pass (on the host only of `x` in the
        buffer's dtype, of dynamiq and mx of float32 too); nvfp4 needs another one on a GPU unless
        `stats` are given. In one pass, and without `stats`, dynamiq keeps the widths of `src`, and
        mx scales that are agreed on; else they are chosen anew, by the stats or by what the sum
        measures. `out` may be the memory of
        `src` but not overlap `x`. On a GPU nothing waits; damage of `src` is raised by
        `src.check()`.
        """
        info = arrays.describe(x)
        _need_float(info.dtype, "x")
        self.require_key(x, key)
        gpu = device_for(backend, x)
        if gpu is not None:
            fused = gpu.decode_add_encode(
                self.spec,
                src,
                x,
                stats=stats,
                key=key,
                out=out,
                scratch=scratch,
                chunks=chunks,
                checksum=checksum,
            )
            if fused is not NotImplemented:
                return fused  # type: ignore[no-any-return]
            values = decode(src, like=x, scratch=scratch, backend=backend)
            found = arrays.describe(values)
            _check_added(info, found.shape, found.dtype)
            gpu.check_apart(_ADDED, x, "out", out)
            return self.encode(
                gpu.added(values, x),
                stats=stats,
                key=key,
                out=out,
                scratch=scratch,
                chunks=chunks,
                checksum=checksum,
                backend=backend,
            )
        bits = arrays.host_bits(x, info.dtype)
        target = Target(info.library, info.device)
        parsed = parsed_source(src, None)
        dtype = parsed.plan.dtype
        _check_added(info, parsed.plan.shape, dtype)
        plan = make_plan(self.spec, dtype, info.shape, chunks, checksum=checksum)
        module = backend_module(plan.codec.name, backend)
        fuses = plan.fuses(parsed.plan) and stats is None and hasattr(module, _FUSED)
        if fuses and (info.dtype == dtype or hasattr(module, _FUSED_WIDE)):
            buffer = Buffer(plan, _room(plan, out, bits, _ADDED), target)
            shared = np.may_share_memory(buffer._bytes, parsed.data)
            room = np.empty_like(buffer._bytes) if shared else buffer._bytes
            engine.encode_into(
                plan,
                bits,
                room,
                key=key,
                threads=cpu_count(),
                backend=backend,
                source=parsed,
            )
            if shared:
                buffer._bytes[:] = room
            return buffer
        if out is not None:
            out = _room(plan, out, bits, _ADDED)
        local = bits.view(info.dtype.numpy).reshape(info.shape)
        decoded = decode(src, like="numpy", backend=backend)
        wide = np.float64 if dtype.name == "float64" else np.float32
        with default_floats():
            total = (decoded.astype(wide) + local.astype(wide)).astype(decoded.dtype)
        bits = total.reshape(-1).view(dtype.bits)
        return self.encode(
            arrays.from_bits(bits, dtype, info.shape, target),
            stats=stats,
            key=key,
            out=out,
            chunks=chunks,
            checksum=checksum,
            backend=backend,
        )

    def require_key(self, x: Any, key: Any) -> None:
        """Raise TypeError or ValueError if `key` is not what encoding `x` needs."""
        check_key(key, self.spec.max_world)
        # However few elements there are: small tensors are stored raw, and the next may be large.
        if key is None and self.spec.draws and arrays.describe(x).dtype.name in self.dtypes:
            key_numbers(key)

    def _fuses(self, x: Any, dtype: DType) -> bool:
        """True if `decode_add_encode` of buffers of `dtype` and of `x` is one pass.

        `x` is of that dtype or float32.
        """
        if dtype.name not in self.dtypes:
            return False
        if device_for(None, x) is None:
            alike = arrays.describe(x).dtype == dtype
            return alike and hasattr(backend_module(self.name, None), _FUSED)
        return hasattr(device_module(self.name), "decode_add_encode")


@default_floats()
def codec(name: str, **params: Any) -> Codec:
    """The codec called `name` with its parameters; ValueError or TypeError says what is allowed."""
    spec = spec_class(name)
    if not params:
        return _plain_codec(name)
    known = [field.name for field in fields(spec)]
    unknown = [param for param in params if param not in known]
    if unknown:
        allowed = ", ".join(known) or "no parameters"
        many = "parameters" if len(unknown) > 1 else "parameter"
        listed = ", ".join(map(repr, unknown))
        raise TypeError(f"Unknown {many} {listed} of {name}. Allowed: {allowed}")
    return Codec(spec(**params))


@functools.cache
def _plain_codec(name: str) -> Codec:
    return Codec(spec_class(name)())


def codecs() -> tuple[str, ...]:
    """Names of all codecs."""
    return tuple(CODEC_IDS)


def encode(
    x: Any,
    codec: str | Codec = "zipccl",
    *,
    stats: Any = None,
    key: Key | None = None,
    out: Any = None,
    scratch: Any = None,
    chunks: int | None = 1,
    dynamic_capacity: int | None = None,
    checksum: bool = True,
    threads: int | None = None,
    backend: str | None = None,
) -> Buffer:
    """Encode an array with a codec or the one of that name; see `Codec.encode`."""
    return as_codec(codec).encode(
        x,
        stats=stats,
        key=key,
        out=out,
        scratch=scratch,
        chunks=chunks,
        dynamic_capacity=dynamic_capacity,
        checksum=checksum,
        threads=threads,
        backend=backend,
    )


def decode(
    src: Source,
    *,
    out: Any = None,
    like: Any = None,
    start: int | None = None,
    stop: int | None = None,
    max_nbytes: int | None = None,
    verify: bool | None = None,
    scratch: Any = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Any:
    """Decode a Buffer, bytes-like object or uint8 array into an array.

    The result is in the library of the encoded tensor (a Buffer), of `src` (a uint8 array) or
    NumPy (bytes); `like`, an array or a library's name, chooses another. `out`, an array of the
    right dtype and shape, is filled and returned; after an error its contents are undefined. To
    autograd a tensor was written to as by `Tensor.copy_`, except that one that requires grad, leaf
    or not, is refused outside of torch.no_grad().

    `start` and `stop` select flat elements: the result then has shape (stop - start,), and only
    the tiles that hold them are decoded. Chunks that are decoded whole are checked whole: checksum,
    padding, payload. Of a chunk that is decoded in part the tiles touched are checked (specs/
    buffer.md, "Partial decoding"), and with `verify=True` all of it, which decodes it whole. Header
    and records are always checked. `verify=False` leaves checksums and padding out.

    A result on a GPU is decoded there, from bytes of the host after an upload, as `Codec.encode`
    says of streams and `scratch`. A Buffer on that GPU is decoded without waiting for the device:
    its damage is raised by `Buffer.check()`, or at once with `verify=True`. Of anything else the
    host checks header and records first, and damage is raised at once.

    Raises FormatError if the bytes are not a valid buffer or the whole tensor has more than
    `max_nbytes` bytes; None is 64 GiB, and for a Buffer no limit.
    """
    if max_nbytes is not None:
        max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    chosen = None if like is None else arrays.target_of(like)
    gpu = device_for(backend, src, out, like)
    if gpu is not None:
        decoded = gpu.decode(
            src,
            out=out,
            chosen=chosen,
            start=start,
            stop=stop,
            max_nbytes=max_nbytes,
            verify=verify,
            scratch=scratch,
            required=backend is not None,
        )
        if decoded is not NotImplemented:
            return decoded
    parsed = parsed_source(src, max_nbytes)
    if isinstance(src, Buffer):
        target = src.target
    else:
        target = Target() if _is_host_bytes(src) else arrays.target_of(src)
    plan = parsed.plan
    lo, hi, shape = selection(plan, start, stop)
    to_gpu = gpu is not None and _on_gpu(out)
    if out is None or to_gpu:
        bits = np.empty((hi - lo) * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
    else:
        bits = arrays.writable_bits(out, plan.dtype, shape, "out")
        if np.may_share_memory(bits, parsed.data):
            raise ValueError(f"out overlaps {_DECODED}")
    engine.decode_range(
        parsed,
        bits,
        lo,
        verify=verify,
        threads=thread_count(threads),
        backend=backend,
    )
    if gpu is not None and to_gpu:
        values = arrays.from_bits(bits, plan.dtype, shape, arrays.target_of(out))
        gpu.copy_into(out, values)
    if out is not None:
        return out
    return arrays.from_bits(bits, plan.dtype, shape, chosen or target)


def _is_host_bytes(src: Any) -> bool:
    return isinstance(src, engine.Parsed) or arrays.is_bytes(src)


def as_codec(value: str | Codec) -> Codec:
    """`value` itself, or the codec of that name."""
    if isinstance(value, Codec):
        return value
    if isinstance(value, str):
        return codec(value)
    raise TypeError(f"codec is {value!r}; allowed: a name or a tightwire.Codec")


def device_for(backend: str | None, *values: Any) -> ModuleType | None:
    """`tightwire.device` if one of `values` is in GPU memory or Triton is asked for, else None.

    Raises ValueError if Triton is asked for and PyTorch is missing.
    """
    if backend is None:
        if not any(map(_on_gpu, values)):
            return None
    elif backend != DEVICE_BACKEND:
        return None
    found = device_engine()
    if isinstance(found, ModuleType):
        return found
    if backend is None:
        return None
    raise ValueError(f"backend {backend!r} needs {found}: pip install 'tightwire[triton]'")


def _on_gpu(x: Any) -> bool:
    return x._memory is not None if isinstance(x, Buffer) else arrays.on_gpu(x)


def _check_like(found: arrays.ArrayInfo, acc: arrays.ArrayInfo) -> None:
    _need_float(found.dtype, "the buffer")
    if found.shape != acc.shape:
        raise ValueError(f"acc has shape {acc.shape}; needed: {found.shape}, that of the buffer")


def _check_added(x: arrays.ArrayInfo, shape: tuple[int, ...], dtype: DType) -> None:
    """Raise ValueError if `x` cannot be added to a decoded array of this shape and dtype."""
    wider = x.dtype.name == "float32" and dtype.is_float and dtype.itemsize < 4
    if x.shape != shape or not (x.dtype == dtype or wider):
        wanted = f"{dtype.name}{list(shape)}"
        raise ValueError(f"x is {x.dtype.name}{list(x.shape)}; needed: {wanted}, as the buffer")


def _need_float(dtype: DType, what: str) -> None:
    if not dtype.is_float:
        raise TypeError(f"{what} is {dtype.name}; allowed: float dtypes")


def thread_count(threads: int | None) -> int:
    """`threads` if it is a number of threads, every processor if it is None."""
    if threads is None:
        return cpu_count()
    if integer("threads", threads) < 1:
        raise ValueError(f"threads is {threads}; allowed: at least 1")
    return threads


def _room(plan: Plan, out: Any, bits: Bits, what: str = "the array that is encoded") -> Bytes:
    """Memory for a buffer: `out` if it is fit for that and apart from `what`, `bits`; else new."""
    if out is None:
        return np.empty(plan.nbytes, np.uint8)
    if isinstance(out, Buffer):
        if out._host is None:
            raise ValueError("out is a Buffer in GPU memory; allowed: one on the host")
        out = out._host
    info = arrays.describe(out)
    room = arrays.writable_bits(out, _UINT8, info.shape, "out")
    if room.size < plan.nbytes:
        raise ValueError(f"out has {room.size} bytes; the plan needs {plan.nbytes}")
    if np.may_share_memory(room, bits):
        raise ValueError(f"out overlaps {what}")
    return room[: plan.nbytes]
