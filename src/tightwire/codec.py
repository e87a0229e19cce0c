"""The public codec value, and ``encode`` and ``decode`` for arrays of any library."""

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
from .codecs.common.base import Bits, Bytes, CodecSpec, Key, Plan, ReduceOp
from .codecs.common.float_mode import default_floats
from .codecs.common.philox import check_key, key_numbers
from .codecs.common.threads import cpu_count
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
Source = Any


@dataclass(frozen=True)
class Codec:
    """A codec with its parameters, as ``tightwire.codec`` makes it.

    Immutable, hashable, comparable and safe to share between threads. All methods take arrays of
    NumPy, PyTorch, CuPy and JAX.

    Args:
        spec: The parameters, a dataclass of ``tightwire.codecs``, such as
            ``tightwire.codecs.mx.Mx``.

    Example:
        >>> import tightwire as tw
        >>> tw.codec("mx", element="e4m3") == tw.codec("mx")
        True
        >>> tw.codec("mx").lossless
        False
    """

    spec: CodecSpec

    @property
    def name(self) -> str:
        """Name of the codec, such as ``"zipccl"``."""
        return self.spec.name

    @property
    def lossless(self) -> bool:
        """True if decoding returns the input bit for bit."""
        return self.spec.lossless

    @property
    def homomorphic(self) -> bool:
        """True if adding the payload elements of two buffers encodes the sum of their tensors."""
        return self.spec.homomorphic

    @property
    def round_trips(self) -> bool:
        """False if decoding returns another tensor than was encoded.

        That is so for sdp4bit with ``rotate="encode"`` or ``"decode"``, which do half of a
        rotation.
        """
        return self.spec.round_trips

    @property
    def reduce_op(self) -> ReduceOp | None:
        """How ranks combine the results of ``measure`` before they encode.

        ``"sum"``, ``"max"`` or ``"or"``; None if they need not agree.
        """
        return self.spec.reduce_op

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that this codec compresses; tensors of others are stored raw."""
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
        """Compute every size and offset of a buffer before any data is seen.

        Args:
            shape: Shape of the tensor.
            dtype: Its element type: a name (``"bfloat16"``, or short: bf16, fp16, fp32, fp64, e4m3,
                e5m2), a NumPy dtype or a dtype of another library.
            chunks: Number of chunks, which can be decoded independently. None: as few as the codec
                allows.
            dynamic_capacity: Bytes of each chunk's dynamic slot, for a fixed rate. None: enough for
                any data.
            checksum: Whether the buffer has checksums.

        Returns:
            The plan. ``plan.nbytes`` is what to allocate.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If a value is out of range.

        Example:
            >>> import tightwire as tw
            >>> tw.codec("mx", element="e2m1").plan((1024, 1024), "bfloat16").nbytes
            557184
        """
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise TypeError(f"shape is {shape!r}; allowed: a tuple of integers")
        sizes = tuple(integer("a dimension of shape", d) for d in shape)
        kind = arrays.as_dtype(dtype)
        return make_plan(self.spec, kind, sizes, chunks, dynamic_capacity, checksum)

    def measure(self, x: Any, *, backend: str | None = None) -> Any:
        """Compute the statistics that ranks may agree on and pass to ``encode`` as ``stats``.

        Args:
            x: The array to measure.
            backend: As in ``encode``.

        Returns:
            A small array that ranks combine by ``reduce_op``, or None if the codec has no use for
            it. Its shape and dtype are in the codec's documentation. For an array on a GPU it is on
            that device and in the same library, integers as int64 (JAX: int32), and the device is
            not waited for (JAX: it is).

        Raises:
            TypeError: If ``x`` is not an array.
            ValueError: If the backend is unknown, missing or does not reach ``x``.
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
        """Encode an array of any shape into a ``Buffer``. ``x`` is never modified.

        Arrays on a GPU are encoded there, on the current stream (of PyTorch or CuPy; JAX arrays use
        PyTorch's), without waiting for the device. Where Triton or a kernel for the dtype is
        missing they are encoded on the host.

        Args:
            x: The array.
            stats: Statistics that ranks have agreed on, as ``measure`` returns them. None: the
                codec measures ``x``.
            key: Seed of codecs that round at random; other codecs check its type only.
            out: A ``Buffer`` to reuse, or a writable uint8 array of at least ``plan.nbytes`` bytes,
                on the host or, aligned to 16 bytes, on the GPU of ``x``. With ``out`` and
                ``scratch`` nothing is allocated.
            scratch: Work memory on the GPU of ``x``: uint8, aligned to 16 bytes, of at least
                ``plan.scratch_nbytes`` bytes.
            chunks: As in ``plan``.
            dynamic_capacity: As in ``plan``.
            checksum: Whether the buffer gets checksums.
            threads: Most threads on the host. None: every processor where the size is worth it.
            backend: ``"ref"`` or ``"cpu"`` (host), ``"triton"`` (GPU), or None for the fastest:
                ``"ref"`` only for tensors of less than 64 KiB while ``"cpu"`` would have to compile
                first.

        Returns:
            The buffer, in the memory of ``out`` if that is given.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If a value is out of range, the codec needs a ``key`` and none is passed,
                ``out`` is too small or overlaps ``x``, or the backend is missing.

        Example:
            >>> import numpy as np
            >>> import tightwire as tw
            >>> x = np.linspace(-1, 1, 4096, dtype=np.float32)
            >>> buf = tw.codec("nvfp4").encode(x)
            >>> x.nbytes, buf.nbytes
            (16384, 2560)
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
        _check_scratch(scratch)
        info = arrays.describe(x)
        bits = arrays.host_bits(x, info.dtype)
        plan = make_plan(self.spec, info.dtype, info.shape, chunks, dynamic_capacity, checksum)
        target = Target(info.library, info.device)
        to_gpu = gpu is not None and _on_gpu(out)
        if gpu is not None and out is None and self.homomorphic and info.library == "torch":
            # Where its cells can be added to.
            to_gpu = _on_gpu(x)
        buffer = Buffer(plan, _output_memory(plan, None if to_gpu else out, bits), target)
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
            buffer = gpu.to_device(buffer, out)
        return buffer

    def decode(
        self, src: Source, *, out: Any = None, scratch: Any = None, max_nbytes: int | None = None
    ) -> Any:
        """Decode a buffer; see ``tightwire.decode``.

        The buffer names its codec, which decodes it whatever this codec is.

        Args:
            src: As in ``tightwire.decode``.
            out: As in ``tightwire.decode``.
            scratch: As in ``encode``.
            max_nbytes: As in ``tightwire.decode``.

        Returns:
            The decoded array.

        Raises:
            FormatError: If the bytes are not a valid buffer.
            TypeError: If an argument has a wrong type.
            ValueError: If ``out`` does not fit.
        """
        return decode(src, out=out, scratch=scratch, max_nbytes=max_nbytes)

    def decode_add(self, src: Source, acc: Any, *, scratch: Any = None) -> Any:
        """Decode ``src`` and add it to ``acc`` in place.

        The decoded values are rounded to the dtype of ``acc`` and then added in it. On the host
        checksums and padding are checked first, and codecs that can add to float32 in one pass. On
        a GPU nothing waits; bfloat16, float16 and float32 are added in the pass that decodes them
        if ``acc`` is float32 or has the dtype of the buffer.

        Args:
            src: As in ``tightwire.decode``.
            acc: A writable array of the buffer's shape, of any float dtype. To autograd it is what
                ``out`` of ``tightwire.decode`` is.
            scratch: As in ``encode``.

        Returns:
            ``acc``.

        Raises:
            FormatError: If the buffer is damaged. ``acc`` is undefined after the reason
                ``"bad_payload"``, since other chunks may have been added, and on a GPU after any
                error.
            TypeError: If the dtype of ``acc`` or of the buffer is not a float.
            ValueError: If ``acc`` has another shape, is read-only or overlaps ``src``.
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
        """Decode ``src``, add the local array ``x``, and encode the sum with this codec.

        The step of sums over several hops. The sum is taken in float32 (float64 for float64) and
        rounded to the dtype of the buffer. It is one pass where the codec has a kernel for it and
        ``src`` has the plan that the sum gets, ``chunks`` and ``checksum`` included (for sdp4bit
        the parameters may differ). On the host ``x`` must then have the dtype of the buffer;
        dynamiq and mx also take float32. nvfp4 needs a second pass on a GPU unless ``stats`` are
        given.

        Args:
            src: As in ``tightwire.decode``.
            x: The local term, of the buffer's shape and float dtype, or float32 where that is
                wider.
            stats: As in ``encode``. Without them dynamiq keeps the widths of ``src``, and mx with
                ``scale_rule="agreed"`` its scales, if the sum is one pass; otherwise the sum is
                measured.
            key: As in ``encode``.
            out: As in ``encode``. It may be the memory of ``src`` but not overlap ``x``.
            scratch: As in ``encode``.
            chunks: As in ``encode``.
            checksum: As in ``encode``.
            backend: As in ``encode``.

        Returns:
            The buffer of the sum.

        Raises:
            FormatError: If ``src`` is damaged; on a GPU ``src.check()`` raises it.
            TypeError: If an argument has a wrong type.
            ValueError: If shapes or dtypes do not match, or ``out`` does not fit.
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
        if fuses and (info.dtype == dtype or plan.codec.adds_float32):
            buffer = Buffer(plan, _output_memory(plan, out, bits, _ADDED), target)
            shared = np.may_share_memory(buffer._bytes, parsed.data)
            target_bytes = np.empty_like(buffer._bytes) if shared else buffer._bytes
            engine.encode_into(
                plan,
                bits,
                target_bytes,
                key=key,
                threads=cpu_count(),
                backend=backend,
                source=parsed,
            )
            if shared:
                buffer._bytes[:] = target_bytes
            return buffer
        if out is not None:
            out = _output_memory(plan, out, bits, _ADDED)
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
        """Check that ``key`` is what encoding ``x`` needs.

        Args:
            x: The array to encode.
            key: The key, or None.

        Raises:
            TypeError: If ``key`` is not a ``Key``.
            ValueError: If the codec rounds at random and ``key`` is None, or a number is out of
                range.
        """
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
    """Make a codec from its name and parameters.

    Args:
        name: One of ``list_codecs()``.
        **params: Parameters of the codec; the page "Choosing a codec" and the classes of
            ``tightwire.codecs`` list them.

    Returns:
        The codec.

    Raises:
        TypeError: If a parameter is unknown or has a wrong type. The message lists what is allowed.
        ValueError: If the name is unknown or a value is not allowed. The message lists what is
            allowed.

    Example:
        >>> import tightwire as tw
        >>> tw.codec("mx", element="e2m1").name
        'mx'
    """
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


def list_codecs() -> tuple[str, ...]:
    """Names of all codecs.

    Example:
        >>> import tightwire as tw
        >>> "zipccl" in tw.list_codecs()
        True
    """
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
    """Encode an array of any library into a ``Buffer``. ``x`` is never modified.

    Arrays on a GPU are encoded there, on the current stream, without waiting for the device;
    ``Codec.encode`` has the details.

    Args:
        x: The array, of any shape, on the host or a GPU.
        codec: A codec or its name, which stands for its default parameters. What it does not take,
            such as integers and "mx", is stored by "raw": ``header.codec`` says which it was.
        stats: Statistics that ranks have agreed on, as ``Codec.measure`` returns them. None: the
            codec measures ``x``.
        key: Seed of codecs that round at random.
        out: A ``Buffer`` to reuse, or a writable uint8 array of at least ``plan.nbytes`` bytes.
        scratch: Work memory on the GPU of ``x``, uint8, of at least ``plan.scratch_nbytes`` bytes.
        chunks: Number of chunks, which can be decoded independently. None: as few as the codec
            allows.
        dynamic_capacity: Bytes of each chunk's dynamic slot, for a fixed rate. None: enough for any
            data.
        checksum: Whether the buffer has checksums.
        threads: Most threads on the host. None: every processor where the size is worth it.
        backend: ``"ref"`` or ``"cpu"`` (host), ``"triton"`` (GPU), or None for the fastest.

    Returns:
        The buffer, with header, result records and encoded chunks.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, the codec needs a ``key`` and none is passed, or
            ``out`` does not fit.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> x = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float32)
        >>> buf = tw.encode(x)
        >>> buf.nbytes < 0.9 * x.nbytes
        True
        >>> np.array_equal(tw.decode(bytes(buf)), x)
        True
    """
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
    """Decode a buffer into an array.

    Whole chunks are checked whole: checksum, padding and payload. Of a chunk that is decoded in
    part the tiles in use are checked (specs/buffer.md, "Partial decoding"). Header and records are
    always checked.

    A result on a GPU is decoded there; bytes of the host are uploaded first, and the host checks
    header and records before. A ``Buffer`` on that GPU is decoded without waiting for the device:
    damage is raised by ``Buffer.check()``, or at once with ``verify=True``.

    Args:
        src: A ``Buffer``, a bytes-like object, or a uint8 array of any library.
        out: An array of the right dtype and shape to fill. After an error its contents are
            undefined. Autograd sees a write as by ``Tensor.copy_``; a tensor that requires grad is
            refused outside of ``torch.no_grad()``.
        like: An array or a library's name, which says where the result goes. None: the library of
            the encoded tensor (for a ``Buffer``) or of ``src`` (for an array), NumPy for bytes.
        start: First flat element to decode; with it or ``stop`` the result has the shape ``(stop -
            start,)``, and only the tiles that hold these elements are decoded.
        stop: One past the last flat element to decode.
        max_nbytes: Most bytes that the whole tensor may have. None is 64 GiB, and for a ``Buffer``
            no limit.
        verify: True checks chunks whole that are decoded in part, which decodes them whole. False
            leaves out checksums and padding.
        scratch: As in ``Codec.encode``.
        threads: As in ``Codec.encode``.
        backend: As in ``Codec.encode``.

    Returns:
        ``out``, or a new array of the encoded shape and dtype.

    Raises:
        FormatError: If the bytes are not a valid buffer, or the tensor is larger than
            ``max_nbytes``.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, or ``out`` does not fit.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> buf = tw.encode(np.arange(10, dtype=np.float32))
        >>> tw.decode(buf, start=2, stop=5)
        array([2., 3., 4.], dtype=float32)
    """
    if max_nbytes is not None:
        max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    if not (verify is None or isinstance(verify, bool)):
        raise TypeError(f"verify is {verify!r}; allowed: True, False, None")
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
    _check_scratch(scratch)
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


def _check_scratch(scratch: Any) -> None:
    """Refuse what is not an array; the host has no use for one."""
    if not (scratch is None or arrays.is_array(scratch)):
        raise TypeError(f"scratch is {scratch!r}; allowed: a uint8 array, None")


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
    """`tightwire.gpu` if one of `values` is in GPU memory or Triton is asked for, else None.

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
    """``threads`` if it is a number of threads, and the number of processors for None."""
    if threads is None:
        return cpu_count()
    if integer("threads", threads) < 1:
        raise ValueError(f"threads is {threads}; allowed: at least 1")
    return threads


def _output_memory(
    plan: Plan, out: Any, bits: Bits, what: str = "the array that is encoded"
) -> Bytes:
    """Memory for a buffer: `out` if it is fit for that and apart from `what`, `bits`; else new."""
    if out is None:
        return np.empty(plan.nbytes, np.uint8)
    if isinstance(out, Buffer):
        if out._host is None:
            raise ValueError("out is a Buffer in GPU memory; allowed: one on the host")
        out = out._host
    info = arrays.describe(out)
    target_bytes = arrays.writable_bits(out, _UINT8, info.shape, "out")
    if target_bytes.size < plan.nbytes:
        raise ValueError(f"out has {target_bytes.size} bytes; the plan needs {plan.nbytes}")
    if np.may_share_memory(target_bytes, bits):
        raise ValueError(f"out overlaps {what}")
    return target_bytes[: plan.nbytes]
