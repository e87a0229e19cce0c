"""A codec of zarr v3, and its data type bfloat16.

zarr finds both by their entry points where tightwire is installed::

    from tightwire.adapters.weights.plugins.zarr import TightwireCodec

    zarr.create_array("w.zarr", data=x, chunks=x.shape, serializer=TightwireCodec(), compressors=())

Reading needs no import: ``zarr.open_array("w.zarr")``. The interfaces are those of zarr 3.1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.core.common import parse_named_configuration
from zarr.core.dtype.npy.float import BaseFloat
from zarr.registry import register_codec

from ....arrays import as_dtype
from ....buffer import parsed_source
from ....codec import Codec, as_lossless
from ....decoding import decode
from ....formats.errors import FormatError

NAME = "tightwire"


@dataclass(frozen=True)
class TightwireCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):  # type: ignore[misc]
    """Stores each chunk of an array as one buffer, for ``serializer=``.

    A read of some rows of a chunk decodes the tiles that they are in.

    Args:
        codec: Name of a lossless codec.

    Raises:
        TypeError: If ``codec`` is not a name.
        ValueError: If there is no such codec, it is lossy, or it needs a base.
    """

    is_fixed_size: ClassVar[bool] = False
    codec: str = "zipccl"

    def __post_init__(self) -> None:
        self._lossless()

    def _lossless(self) -> Codec:
        return as_lossless(self.codec)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TightwireCodec:
        """The codec that an array's metadata names; zarr calls it.

        Args:
            data: Its part of the metadata.

        Returns:
            The codec.
        """
        _, given = parse_named_configuration(data, NAME, require_configuration=False)
        return cls(**(given or {}))

    def to_dict(self) -> dict[str, Any]:
        """What the metadata of an array says; zarr calls it.

        Returns:
            Name and configuration.
        """
        return {"name": NAME, "configuration": {"codec": self.codec}}

    def validate(self, *, shape: Any, dtype: Any, chunk_grid: Any) -> None:
        """Refuse arrays of dtypes that buffers do not have; zarr calls it.

        Args:
            shape: Of the array.
            dtype: Of the array, a data type of zarr.
            chunk_grid: Of the array.

        Raises:
            TypeError: If buffers do not have the dtype.
        """
        as_dtype(dtype.to_native_dtype())

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Not known beforehand; zarr asks where a codec needs fixed sizes.

        Args:
            input_byte_length: Bytes of a chunk.
            chunk_spec: What zarr knows of it.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("the size of an encoded chunk depends on what is in it")

    async def _encode_single(self, chunk_array: Any, chunk_spec: Any) -> Any:
        data = np.asarray(chunk_array.as_numpy_array(), order="C")
        packed = await asyncio.to_thread(lambda: self._lossless().encode(data).packed())
        return chunk_spec.prototype.buffer.from_array_like(np.asarray(packed).view("B"))

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        found = await asyncio.to_thread(_decoded, chunk_bytes, chunk_spec, None)
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(found)

    async def _decode_partial_single(
        self, byte_getter: Any, selection: Any, chunk_spec: Any
    ) -> Any | None:
        chunk_bytes = await byte_getter.get(prototype=chunk_spec.prototype)
        if chunk_bytes is None:
            return None
        where = selection if isinstance(selection, tuple) else (selection,)
        rows = _rows(where, chunk_spec.shape)
        found = await asyncio.to_thread(_decoded, chunk_bytes, chunk_spec, rows)
        chosen = found[where if rows is None else (slice(None), *where[1:])]
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(np.asarray(chosen))


def _rows(where: tuple[Any, ...], shape: tuple[int, ...]) -> range | None:
    """The rows of a chunk that a selection needs, if it starts with a slice of step 1; else None.

    None stands for all.
    """
    first = where[0] if where else None
    if not shape or not isinstance(first, slice) or first.step not in (None, 1):
        return None
    start, stop, _ = first.indices(shape[0])
    return range(start, max(start, stop))


def _decoded(chunk_bytes: Any, chunk_spec: Any, rows: range | None) -> Any:
    """The array of a chunk, or some of its rows."""
    dtype, shape = chunk_spec.dtype.to_native_dtype(), tuple(chunk_spec.shape)
    data = chunk_bytes.as_numpy_array()
    limit = math.prod(shape) * dtype.itemsize
    parsed = parsed_source(data, limit)
    plan = parsed.plan
    if plan.shape != shape:
        raise FormatError("bad_header", f"a chunk of shape {plan.shape}; wanted: {shape}")
    if plan.dtype.numpy != dtype.newbyteorder("="):
        raise FormatError("bad_header", f"a chunk of {plan.dtype.name}; wanted: {dtype}")
    if rows is None or len(rows) == shape[0]:
        return decode(parsed)
    width = math.prod(shape[1:])
    flat = decode(parsed, start=rows.start * width, stop=rows.stop * width)
    return flat.reshape(len(rows), *shape[1:])


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat):  # type: ignore[misc]
    """The data type ``bfloat16``, in NumPy that of ml_dtypes."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return 2


def register() -> None:
    """Make zarr know codec and data type where tightwire's entry points are not installed."""
    from zarr.core.dtype import data_type_registry

    register_codec(NAME, TightwireCodec)
    data_type_registry.register("bfloat16", BFloat16)


register()
