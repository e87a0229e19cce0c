"""A codec of numcodecs, for zarr v2 and what else stores arrays by it.

numcodecs finds it by its entry point where tightwire is installed::

    codec = numcodecs.get_codec({"id": "tightwire"})
    x = codec.decode(codec.encode(x))

Bytes come back as they lay. Buffers have elements in the processor's byte order alone, so arrays in
the other one are stored as unsigned integers. The interface is that of numcodecs 0.16.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numcodecs.abc import Codec as Base
from numcodecs.compat import ensure_contiguous_ndarray_like, ndarray_copy
from numcodecs.registry import register_codec

from ....arrays import as_dtype
from ....codec import as_lossless
from ....decoding import decode


class Tightwire(Base):  # type: ignore[misc]
    """Stores an array as one buffer.

    Args:
        codec: Name of a lossless codec.
        dtype: What the elements are, such as ``"bfloat16"``, where the caller passes bytes or
            integers. None: what the array says.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there is no such codec or dtype, or the codec is lossy or needs a base.
    """

    codec_id: ClassVar[str] = "tightwire"

    def __init__(self, codec: str = "zipccl", dtype: str | None = None) -> None:
        self.codec, self.dtype = codec, dtype
        self._codec = as_lossless(codec)
        self._dtype = None if dtype is None else as_dtype(dtype)

    def encode(self, buf: Any) -> bytes:
        """Encode an array.

        Args:
            buf: The array, or an object with the buffer protocol.

        Returns:
            The bytes of a buffer.

        Raises:
            TypeError: If buffers do not have the dtype.
            ValueError: If the bytes are no elements of ``dtype``.
        """
        array = ensure_contiguous_ndarray_like(buf)
        if self._dtype is not None:
            array = array.reshape(-1).view("B").view(self._dtype.numpy)
        elif not array.dtype.isnative:
            array = array.view(_words(array.dtype))
        return bytes(self._codec.encode(array))

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode an array.

        Args:
            buf: What ``encode`` returned, or any other bytes of a buffer.
            out: Memory to fill, of the size of the array, or None.

        Returns:
            The array's bytes, of one dimension and the dtype that was encoded, or of unsigned
            integers if that was not in native byte order; ``out`` if that is given.

        Raises:
            FormatError: If the bytes are damaged.
            ValueError: If ``out`` has another size.
        """
        data = ensure_contiguous_ndarray_like(buf).reshape(-1).view("B")
        if out is None:
            return decode(data)
        target = ensure_contiguous_ndarray_like(out).reshape(-1)
        found = decode(data, max_nbytes=target.nbytes)
        if found.nbytes != target.nbytes:
            raise ValueError(f"out has {target.nbytes} bytes; needed: {found.nbytes}")
        ndarray_copy(found.view("B"), target.view("B"))
        return out


def _words(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What elements in the other byte order are stored as. Raises TypeError for other kinds."""
    size = as_dtype(dtype).itemsize
    return np.dtype(f"u{size}" if size <= 8 else "u1")


register_codec(Tightwire)
