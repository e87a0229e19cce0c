"""The public codec value, and ``encode`` for arrays of any library."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from . import arrays, engine
from .apart import check_apart, span_of
from .arguments import (
    ADDED,
    ENCODED,
    base_bits,
    check_added,
    check_decoded,
    check_like,
    check_out,
    check_scratch,
    device_for,
    host_stats,
    need_float,
    need_key,
    need_no_base,
    on_gpu,
    output_memory,
    thread_count,
)
from .arrays import Target
from .buffer import Buffer, parsed_source
from .codecs.common.base import CodecSpec, Key, Plan, ReduceOp
from .codecs.common.float_mode import default_floats
from .codecs.common.threads import cpu_count
from .decoding import Source, decode
from .formats.codec_ids import CODEC_IDS
from .formats.dtypes import DType
from .planning import backend_module, device_module, integer, make_plan, spec_class


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
    def needs_base(self) -> bool:
        """True if encoding and decoding need ``base``, a tensor of the same shape and dtype."""
        return self.spec.needs_base

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
        base: Any = None,
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
            base: The array that ``x`` is coded against, of its shape and dtype, for codecs with
                ``needs_base``; no other takes one. It is never modified.
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
            ValueError: If a value is out of range, the codec needs a ``key`` or a ``base`` and none
                is passed, the base does not fit, ``out`` is too small or overlaps ``x``, or the
                backend is missing.

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
            on_device = gpu.encode(
                self.spec,
                x,
                base=base,
                stats=stats,
                key=key,
                out=out,
                scratch=scratch,
                chunks=chunks,
                dynamic_capacity=dynamic_capacity,
                checksum=checksum,
                required=backend is not None,
            )
            if on_device is not NotImplemented:
                return on_device  # type: ignore[no-any-return]
        check_scratch(scratch)
        info = arrays.describe(x)
        bits = arrays.host_bits(x, info.dtype)
        plan = make_plan(self.spec, info.dtype, info.shape, chunks, dynamic_capacity, checksum)
        against = base_bits(self.spec, plan, base)
        target = Target(info.library, info.device)
        to_gpu = gpu is not None and on_gpu(out)
        if gpu is not None and out is None and self.homomorphic and info.library == "torch":
            # Where its cells can be added to.
            to_gpu = on_gpu(x)
        encoded = output_memory(plan, None if to_gpu else out)
        check_out(plan, out, {ENCODED: x, "base": base, "stats": stats})
        buffer = Buffer(plan, encoded, target)
        stats = host_stats(self.spec, plan, stats)
        engine.encode_into(
            plan,
            bits,
            encoded,
            stats=stats,
            key=key,
            threads=thread_count(threads),
            backend=backend,
            base=against,
        )
        if gpu is not None and to_gpu:
            buffer = gpu.to_device(buffer, out)
        return buffer

    def decode(
        self,
        src: Source,
        *,
        base: Any = None,
        out: Any = None,
        scratch: Any = None,
        max_nbytes: int | None = None,
    ) -> Any:
        """Decode a buffer; see ``tightwire.decode``.

        The buffer names its codec, which decodes it whatever this codec is.

        Args:
            src: As in ``tightwire.decode``.
            base: As in ``tightwire.decode``.
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
        return decode(src, base=base, out=out, scratch=scratch, max_nbytes=max_nbytes)

    def decode_add(self, src: Source, acc: Any, *, scratch: Any = None) -> Any:
        """Decode ``src`` and add it to ``acc`` in place.

        The decoded values are rounded to the dtype of ``acc`` and then added in it. A NaN stays a
        NaN; which one it becomes depends on the machine. On the host
        checksums and padding are checked first, and values are added in the pass that decodes them.
        On a GPU nothing waits; bfloat16, float16 and float32 are added in that pass if ``acc`` is
        float32 or has the dtype of the buffer.

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
            need_float(info.dtype, "acc")
            if gpu.decode_add(src, acc, scratch) is not NotImplemented:
                return acc
            if on_gpu(acc):
                check_decoded(src, acc, what="acc")
                values = decode(src, like=acc, scratch=scratch)
                check_like(arrays.describe(values), info)
                gpu.add(acc, values)
                return acc
        from . import many

        many.add_here(src, acc, info)
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
        the parameters may differ), unless the sum has to be measured first. nvfp4 needs a second
        pass on a GPU unless ``stats`` are given.

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
        need_float(info.dtype, "x")
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
            check_added(info, found.shape, found.dtype)
            check_apart({"out": [span_of(out)]}, {ADDED: [span_of(x)]})
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
        from . import many

        target = Target(info.library, info.device)
        parsed = parsed_source(src, None)
        need_no_base(parsed.plan.codec, "sums", "decode it by itself")
        dtype = parsed.plan.dtype
        check_added(info, parsed.plan.shape, dtype)
        plan = make_plan(self.spec, dtype, info.shape, chunks, checksum=checksum)
        check_out(plan, out, {ADDED: x, "stats": stats})
        encoded = many.encode_sum_here(
            self.spec,
            plan,
            (parsed, bits),
            out,
            stats=stats,
            key=key,
            threads=cpu_count(),
            backend=backend,
        )
        return Buffer(plan, encoded, target)

    def encode_many(
        self,
        tensors: Sequence[Any],
        *,
        out: Sequence[Any] | None = None,
        stats: Sequence[Any] | None = None,
        key: Key | None = None,
        scratch: Any = None,
        checksum: bool = True,
        threads: int | None = None,
        backend: str | None = None,
    ) -> list[Buffer]:
        """Encode many tensors, each into a buffer of its own, faster than one by one.

        The bytes are those of ``encode`` for each tensor. On the host large tensors are encoded on
        all threads, one after the other, and small ones at the same time.

        Args:
            tensors: A list or tuple of arrays of one library, device and dtype, of any shapes.
            out: A list or tuple of what ``encode`` takes as ``out``, one for each tensor. None:
                one allocation for all, where each buffer starts at a multiple of 128 bytes; it is
                freed when the last of the buffers is gone.
            stats: A list or tuple of what ``encode`` takes as ``stats``, one for each tensor, None
                among them.
            key: As in ``encode``, the same for all tensors.
            scratch: As in ``encode``.
            checksum: As in ``encode``.
            threads: As in ``encode``.
            backend: As in ``encode``.

        Returns:
            The buffers, in the order of ``tensors``. Each has one chunk.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If a value is out of range, the tensors are not of one library, device and
                dtype, or memory in ``out`` is too small or overlaps other memory.

        Example:
            >>> import numpy as np
            >>> import tightwire as tw
            >>> tensors = [np.zeros(n, np.float32) for n in (4096, 0, 65536)]
            >>> [buf.header.shape for buf in tw.codec("mx").encode_many(tensors)]
            [(4096,), (0,), (65536,)]
        """
        from . import many

        return many.encode_many(
            self,
            tensors,
            out=out,
            stats=stats,
            key=key,
            scratch=scratch,
            checksum=checksum,
            threads=threads,
            backend=backend,
        )

    def encode_sum(
        self,
        terms: Sequence[Any],
        *,
        scale: float | None = None,
        stats: Any = None,
        key: Key | None = None,
        out: Any = None,
        scratch: Any = None,
        checksum: bool = True,
        threads: int | None = None,
        backend: str | None = None,
    ) -> Buffer:
        """Encode the sum that ``tightwire.decode_sum`` decodes, with as many chunks.

        It is one pass for buffers that this codec has made, unless the sum is measured. On a GPU
        that is so for raw, mx, sdp4bit, taco, dynamiq, and nvfp4 with ``stats``. Otherwise the sum
        is held in memory as a whole.

        Args:
            terms: As in ``tightwire.decode_sum``.
            scale: As in ``tightwire.decode_sum``.
            stats: As in ``encode``. Without them dynamiq keeps the widths of the first buffer, and
                mx with ``scale_rule="agreed"`` its scales, if that is the first term and the sum is
                one pass; otherwise the sum is measured.
            key: As in ``encode``.
            out: As in ``encode``. It may be memory of a buffer, but not overlap the tensor.
            scratch: As in ``encode``.
            checksum: As in ``encode``.
            threads: As in ``encode``.
            backend: As in ``encode``.

        Returns:
            The buffer of the sum.

        Raises:
            FormatError: As in ``tightwire.decode_sum``.
            TypeError: If an argument has a wrong type, or the buffers' dtype is not a float.
            ValueError: If a value is out of range, the terms do not fit one another, or ``out``
                does not fit.

        Example:
            >>> import numpy as np
            >>> import tightwire as tw
            >>> x = np.linspace(-1, 1, 4096, dtype=np.float32)
            >>> codec = tw.codec("zipccl")
            >>> total = codec.encode_sum([codec.encode(x), codec.encode(x), x])
            >>> bool((tw.decode(total) == 3 * x).all())
            True
        """
        from . import many

        return many.encode_sum(
            self,
            terms,
            scale=scale,
            stats=stats,
            key=key,
            out=out,
            scratch=scratch,
            checksum=checksum,
            threads=threads,
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
        if key is not None or self.spec.draws:
            need_key(self.spec, arrays.describe(x).dtype, key)

    def _fuses(self, x: Any, dtype: DType) -> bool:
        """True if `decode_add_encode` of buffers of `dtype` and of `x` is one pass.

        `x` is of that dtype or float32.
        """
        if dtype.name not in self.dtypes:
            return False
        if device_for(None, x) is None:
            alike = arrays.describe(x).dtype == dtype
            measures = self.reduce_op is not None and not self.spec.sums_keep_stats
            return alike and not measures and hasattr(backend_module(self.name, None), "encoder")
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
    base: Any = None,
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
        base: The array that ``x`` is coded against, of its shape and dtype, for ``"delta"``; no
            other codec takes one.
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
        ValueError: If a value is out of range, the codec needs a ``key`` or a ``base`` and none is
            passed, or ``base`` or ``out`` does not fit.

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
        base=base,
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


def as_codec(value: str | Codec) -> Codec:
    """`value` itself, or the codec of that name."""
    if isinstance(value, Codec):
        return value
    if isinstance(value, str):
        return codec(value)
    raise TypeError(f"codec is {value!r}; allowed: a name or a tightwire.Codec")


def as_lossless(value: str | Codec) -> Codec:
    """As `as_codec`, for what is to come back from its own bytes alone."""
    found = as_codec(value)
    if not found.lossless or found.needs_base:
        raise ValueError(f"codec is {found.name!r}; allowed: lossless codecs that need no base")
    return found
