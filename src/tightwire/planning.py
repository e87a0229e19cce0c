"""Plans from shapes, and plans back from headers. The one place that decides sizes."""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType

from .codecs.base import CodecSpec, Plan
from .formats.codec_ids import CODEC_IDS
from .formats.dtypes import DType
from .formats.errors import FormatError
from .formats.header import CHECKSUM, MAX_NBYTES, MAX_RANK, Header, align

BACKENDS = ("ref", "cpu")


def spec_class(name: str) -> type[CodecSpec]:
    """The class of the codec called `name`; ValueError lists the codecs there are."""
    if name not in CODEC_IDS:
        raise ValueError(f"codec {name!r} is not known; known: {', '.join(CODEC_IDS)}")
    spec: type[CodecSpec] = importlib.import_module(f"tightwire.codecs.{CODEC_IDS[name][1]}").SPEC
    return spec


@functools.cache
def backend_module(name: str, backend: str | None) -> ModuleType:
    """The module that encodes and decodes codec `name`; `backend` None picks the fastest here."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {BACKENDS} or None")
    stem = f"tightwire.codecs.{CODEC_IDS[name][1]}"
    if backend == "ref":
        return importlib.import_module(stem)
    try:
        return importlib.import_module(f"{stem}_cpu")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", f"{stem}_cpu"):
            raise
        if backend == "cpu":
            raise ValueError(
                f"backend 'cpu' needs {error.name}: pip install 'tightwire[cpu]'"
            ) from None
        return importlib.import_module(stem)


@functools.lru_cache(maxsize=1024)
def make_plan(
    spec: CodecSpec,
    dtype: DType,
    shape: tuple[int, ...],
    chunks: int | None = 1,
    dynamic_capacity: int | None = None,
    checksum: bool = True,
) -> Plan:
    """Plan a buffer. Falls to the raw codec where `spec` has nothing to gain.

    `chunks` None takes as few as the codec allows. Raises ValueError for sizes out of range.
    """
    if len(shape) > MAX_RANK:
        raise ValueError(f"{len(shape)} dimensions; allowed: at most {MAX_RANK}")
    nelem = math.prod(shape)
    if math.prod(d for d in shape if d) * dtype.itemsize > MAX_NBYTES:
        raise ValueError(f"shape {shape} has more than 2**63 - 1 bytes")
    if chunks is None:
        chunks = max(1, -(-nelem // spec.max_chunk_nelem))
    if not 1 <= chunks < 1 << 32:
        raise ValueError(f"chunks is {chunks}; allowed: 1 to 2**32 - 1")
    chunk_nelem = -(-nelem // chunks)
    if chunk_nelem > spec.max_chunk_nelem:
        least = -(-nelem // spec.max_chunk_nelem)
        raise ValueError(
            f"{nelem} elements in {chunks} chunks; {spec.name} needs chunks >= {least}"
        )
    if not spec.accepts(dtype, chunk_nelem):
        spec = spec_class("raw")()
    layout = spec.layout(dtype, chunk_nelem)
    stride = align(layout.dynamic_bound)
    if dynamic_capacity is not None:
        if dynamic_capacity < 0:
            raise ValueError(f"dynamic_capacity is {dynamic_capacity}; allowed: bytes >= 0")
        stride = min(stride, align(dynamic_capacity))
    return Plan(spec, dtype, shape, chunks, layout, stride, checksum)


def plan_of_header(header: Header) -> Plan:
    """The plan that a parsed header claims; FormatError if no encoder would have written it."""
    cls = spec_class(header.codec)
    if header.codec_version != cls.version:
        found = header.codec_version
        raise FormatError(
            "unsupported_version", f"{header.codec} version {found}, not {cls.version}"
        )
    spec = cls.unpack_params(header.params)
    nelem = header.nelem
    if header.dtype.name not in spec.dtypes:
        raise FormatError("bad_header", f"{header.codec} does not code {header.dtype.name}")
    if -(-nelem // header.chunks) > spec.max_chunk_nelem:
        raise FormatError("bad_header", f"{nelem} elements in {header.chunks} chunks")
    try:
        plan = make_plan(
            spec,
            header.dtype,
            header.shape,
            header.chunks,
            header.dynamic_stride,
            bool(header.required & CHECKSUM),
        )
    except ValueError as error:
        raise FormatError("bad_header", str(error)) from None
    if plan.codec != spec or plan.layout.sections != header.sections:
        raise FormatError("bad_header", f"sections are not those of {header.codec}")
    if plan.dynamic_stride != header.dynamic_stride:
        raise FormatError("bad_header", f"dynamic stride {header.dynamic_stride}")
    return plan
