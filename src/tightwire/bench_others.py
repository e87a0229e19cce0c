"""Lossless compressors of other libraries, which bench sets beside the codecs where installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from .codecs.common.base import Bytes
from .formats.dtypes import BY_NAME

#: Writes what it makes of the packed bytes to the memory given.
Decompress = Callable[[bytes, Bytes], None]


class Other(NamedTuple):
    """A compressor: `compress` takes the bytes of an array and the name of its dtype."""

    name: str
    compress: Callable[[Bytes, str], bytes]
    decompress: Decompress


def others(threads: int) -> Iterator[Other]:
    """Those whose packages are installed."""
    for package, make in _MADE.items():
        if find_spec(package):
            yield make(threads)


def _zstd(threads: int) -> Other:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=1, threads=threads if threads > 1 else 0)
    decompressor = zstandard.ZstdDecompressor()

    def decompress(packed: bytes, out: Bytes) -> None:
        with decompressor.stream_reader(packed) as reader:
            at = 0
            while at < out.size and (n := reader.readinto(out.data[at:])):
                at += n

    return Other("zstd -1", lambda data, dtype: compressor.compress(data.data), decompress)


def _zipnn(threads: int) -> Other:
    import zipnn

    made: dict[str, Any] = {}

    def of(dtype: str) -> Any:
        if dtype not in made:
            # What it has no form for it takes as another type: bytes are bytes.
            kind = dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16"
            made[dtype] = zipnn.ZipNN(bytearray_dtype=kind, input_format="byte", threads=threads)
        return made[dtype]

    def compress(data: Bytes, dtype: str) -> bytes:
        # It writes over its input.
        packed: bytes = of(dtype).compress(bytearray(data.data))
        return packed

    def decompress(packed: bytes, out: Bytes) -> None:
        out[:] = np.frombuffer(of("bfloat16").decompress(packed), np.uint8)

    return Other("ZipNN", compress, decompress)


def _openzl(threads: int) -> Other:
    import openzl.ext as zl

    nodes = {
        "bfloat16": zl.nodes.BFloat16Deconstruct,
        "float16": zl.nodes.Float16Deconstruct,
        "float32": zl.nodes.Float32Deconstruct,
    }
    made: dict[str, Any] = {}

    def of(dtype: str) -> Any:
        if dtype not in made:
            compressor = zl.Compressor()
            entropy = zl.graphs.Entropy()
            if dtype in nodes:
                graph = nodes[dtype]()(compressor, zl.graphs.Store(), entropy)
            else:
                graph = zl.graphs.Compress()(compressor)
            compressor.select_starting_graph(graph)
            made[dtype] = compressor
        # What is set holds for one call.
        context = zl.CCtx()
        context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        context.ref_compressor(made[dtype])
        return context

    def compress(data: Bytes, dtype: str) -> bytes:
        numbers = data.view(f"u{BY_NAME[dtype].itemsize}")
        packed: bytes = of(dtype).compress([zl.Input(zl.Type.Numeric, numbers)])
        return packed

    def decompress(packed: bytes, out: Bytes) -> None:
        (found,) = zl.DCtx().decompress(packed)
        out[:] = np.asarray(found.content.as_nparray()).view(np.uint8)

    return Other("OpenZL", compress, decompress)


def _blosc2(threads: int) -> Other:
    import blosc2

    blosc2.set_nthreads(threads)

    def compress(data: Bytes, dtype: str) -> bytes:
        width = BY_NAME[dtype].itemsize
        packed: bytes = blosc2.compress(data, typesize=width, clevel=1, codec=blosc2.Codec.ZSTD)
        return packed

    def decompress(packed: bytes, out: Bytes) -> None:
        blosc2.decompress(packed, dst=out)

    return Other("blosc2 zstd -1", compress, decompress)


_MADE = {"zstandard": _zstd, "zipnn": _zipnn, "openzl": _openzl, "blosc2": _blosc2}
