"""``decode``, for buffers of any codec and arrays of any library."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays, engine
from .arguments import (
    base_of_buffer,
    check_decoded,
    check_scratch,
    device_for,
    on_gpu,
    source_target,
    thread_count,
)
from .buffer import parsed_source
from .engine import selection
from .planning import integer

#: What is decoded: a ``Buffer``, bytes or a uint8 array.
Source = Any


def decode(
    src: Source,
    *,
    base: Any = None,
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
        base: For buffers of codecs with ``needs_base`` the array that the tensor was coded against.
            A wrong one is refused before anything is written. Of other buffers those of codec
            ``raw`` take one, which is not used.
        out: An array of the right dtype and shape to fill. After an error its contents are
            undefined. It may be ``base``, which is then left alone if an error is raised. Autograd
            sees a write as by ``Tensor.copy_``; a tensor that requires grad is refused outside of
            ``torch.no_grad()``.
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
            ``max_nbytes``; with the reason ``"base_mismatch"`` if ``base`` is another tensor than
            the one that was encoded against.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, ``out`` does not fit, or ``base`` is missing or does
            not fit.

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
            base=base,
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
    check_scratch(scratch)
    parsed = parsed_source(src, max_nbytes)
    target = source_target(src)
    plan = parsed.plan
    against = base_of_buffer(plan, base)
    lo, hi, shape = selection(plan, start, stop)
    to_gpu = gpu is not None and on_gpu(out)
    check_decoded(src, out, base=base)
    if out is None or to_gpu:
        bits = np.empty((hi - lo) * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
    else:
        bits = arrays.writable_bits(out, plan.dtype, shape, "out")
        if base is not None and not plan.needs_base and verify is not False:
            engine.check_before_writing(parsed, lo, hi, verify)
    engine.decode_range(
        parsed,
        bits,
        lo,
        verify=verify,
        threads=thread_count(threads),
        backend=backend,
        base=against,
    )
    if gpu is not None and to_gpu:
        values = arrays.from_bits(bits, plan.dtype, shape, arrays.target_of(out))
        gpu.copy_into(out, values)
    if out is not None:
        return out
    return arrays.from_bits(bits, plan.dtype, shape, chosen or target)
