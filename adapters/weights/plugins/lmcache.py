r"""A lossless serde of LMCache: blocks of keys and values that are stored compressed, bit for bit.

Importing this module registers it as ``"tightwire"``. A server of LMCache that has it::

    python -m tightwire.adapters.weights.plugins.lmcache server ... --l2-adapter \
        '{"type": "fs", "base_path": "/cache", "serde": {"type": "tightwire"}}'

The interface is ``lmcache.v1.distributed.serde`` of LMCache 0.5.6.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)

from ....codecs.common.base import Bytes, Plan
from .blocks import Blocks

NAME = "tightwire"


class TightwireSerializer(Serializer):  # type: ignore[misc]
    """Encodes what a memory object of LMCache holds, each of its tensors as a buffer.

    Args:
        blocks: What encodes one tensor.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes to reserve for an encoded object; LMCache calls it.

        Args:
            layout_desc: Shapes and dtypes of its tensors.

        Returns:
            The bytes; with a ratio exactly as many as ``serialize`` writes.
        """
        return sum(plan.nbytes for plan in _plans(self._blocks, layout_desc))

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode ``src`` into ``dst``; LMCache calls it.

        Args:
            src: The memory object of keys and values, in host memory.
            dst: One of bytes, of the estimated size at least.
            key: Not used.

        Returns:
            How many bytes were written.

        Raises:
            ValueError: If a tensor does not fit in what the ratio leaves it. LMCache then does not
                store the objects of that call.
        """
        target, written = _bytes_of(dst), 0
        for plan, tensor in _tensors(self._blocks, src):
            written += self._blocks.encode(plan, tensor, target[written:])
        return written


class TightwireDeserializer(Deserializer):  # type: ignore[misc]
    """Decodes what ``TightwireSerializer`` wrote, whatever its codec and ratio.

    Args:
        blocks: What decodes one tensor.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode ``src`` into ``dst``; LMCache calls it.

        Args:
            src: The memory object of bytes, perhaps longer than what was written.
            dst: The memory object of keys and values, in host memory.
            key: Not used.

        Raises:
            FormatError: If the bytes are damaged, or those of another shape or dtype. LMCache then
                takes the objects of that call as not found.
        """
        data, at = _bytes_of(src), 0
        for plan, tensor in _tensors(self._blocks, dst):
            at += self._blocks.decode(plan, data[at:], tensor)


def create(config: Mapping[str, Any]) -> SerdeProcessor:
    """Make the serde that a configuration asks for; LMCache calls it.

    Args:
        config: ``{"codec": "zipccl", "ratio": 0.75, "max_workers": 1}`` are the defaults. With
            ``"ratio": null`` objects take what they need. The storage must then take objects of
            any size: LMCache's ``fs`` loads only those of the size that it reserved.

    Returns:
        The processor.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of range, or a key unknown.
    """
    given: dict[str, Any] = {"codec": "zipccl", "ratio": 0.75, "max_workers": 1} | dict(config)
    workers, codec, ratio = given.pop("max_workers"), given.pop("codec"), given.pop("ratio")
    if given:
        allowed = "codec, max_workers, ratio"
        raise ValueError(f"{NAME}: unknown keys {sorted(given)}; allowed: {allowed}")
    blocks = Blocks(codec, ratio=ratio)
    return AsyncSerdeProcessor(
        TightwireSerializer(blocks), TightwireDeserializer(blocks), max_workers=workers
    )


def _plans(blocks: Blocks, layout: Any) -> Iterator[Plan]:
    return map(blocks.plan, map(tuple, layout.shapes), layout.dtypes)


def _tensors(blocks: Blocks, obj: Any) -> Iterator[tuple[Plan, Bytes]]:
    """The tensors of a memory object, one behind the other: their plans and their bytes."""
    data = _bytes_of(obj)
    shapes: Sequence[Any] = obj.get_shapes()
    plans = list(map(blocks.plan, map(tuple, shapes), obj.get_dtypes()))
    sizes = [plan.nelem * plan.dtype.itemsize for plan in plans]
    *starts, end = itertools.accumulate(sizes, initial=0)
    if end != data.size:
        raise ValueError(f"an object of {data.size} bytes; its tensors have {end}")
    for plan, start, size in zip(plans, starts, sizes, strict=True):
        yield plan, data[start : start + size]


def _bytes_of(obj: Any) -> Bytes:
    """The memory of a memory object, of its logical size."""
    # One object may be shared by threads, so this view is as writable as the memory.
    return np.frombuffer(obj.byte_array, np.uint8)


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, create)

if __name__ == "__main__":
    from lmcache.cli.main import main

    main()
