"""Plans from shapes, and plans back from headers. The one place that decides sizes."""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from .codecs.common.base import CodecSpec, Plan
from .codecs.common.float_mode import default_floats
from .formats.codec_ids import CODEC_IDS
from .formats.dtypes import DType
from .formats.errors import FormatError
from .formats.errors import integer as integer
from .formats.header import CHECKSUM, MAX_CHUNKS, MAX_NBYTES, MAX_RANK, Header, align

T = TypeVar("T")

HOST_BACKENDS = ("ref", "cpu")
DEVICE_BACKEND = "triton"
BACKENDS = (*HOST_BACKENDS, DEVICE_BACKEND)

#: Fewer bytes than these are coded by NumPy before Numba would be imported (about 1 s).
SMALL_NBYTES = 4 << 20
#: Tensors of fewer bytes do not wait for kernels to be compiled; see `call_tiny`.
TINY_NBYTES = 64 << 10
#: Seconds that NumPy may take for the tiny tensors of a codec and dtype, in one direction, before
#: kernels are compiled: about as long as that takes.
PATIENCE_S = 2.0
#: Bytes that NumPy codes in the time that a call for one chunk takes beside them (0.5 ms).
_CALL_NBYTES = 16 << 10


def spec_class(name: str) -> type[CodecSpec]:
    """The class of the codec called `name`; ValueError lists the codecs there are."""
    if not isinstance(name, str):
        raise TypeError(f"codec is {name!r}; allowed: a name, one of {', '.join(CODEC_IDS)}")
    if name not in CODEC_IDS:
        raise ValueError(f"Unknown codec {name!r}. Allowed: {', '.join(CODEC_IDS)}")
    return _spec_class(name)


@functools.cache
@default_floats()
def _spec_class(name: str) -> type[CodecSpec]:
    # Modules compute tables when they are imported.
    spec: type[CodecSpec] = importlib.import_module(f"tightwire.codecs.{CODEC_IDS[name][1]}").SPEC
    return spec


def backend_module(name: str, backend: str | None) -> ModuleType:
    """The host module that codes codec `name`; `backend` None picks the fastest here.

    For a tiny tensor `call_tiny` may pick another.
    """
    if backend is not None and backend not in HOST_BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {BACKENDS} or None")
    return _backend_module(name, backend)


@functools.cache
@default_floats()
def _backend_module(name: str, backend: str | None) -> ModuleType:
    stem = f"tightwire.codecs.{CODEC_IDS[name][1]}"
    if backend == "ref":
        return importlib.import_module(stem)
    try:
        return importlib.import_module(f"{stem}_cpu")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "filelock", f"{stem}_cpu"):
            raise
        if backend == "cpu":
            if error.name == f"{stem}_cpu":
                raise ValueError(
                    f"codec {name!r} has no compiled form: there is no module {error.name}. "
                    "Allowed: backend 'ref' or None"
                ) from None
            raise ValueError(
                f"backend 'cpu' needs {error.name}: pip install 'tightwire[cpu]'"
            ) from None
        return importlib.import_module(stem)


def is_tiny(plan: Plan, backend: str | None) -> bool:
    """Whether a tensor is for `call_tiny`: small, and nobody has named a backend."""
    return backend is None and 0 < plan.nelem * plan.dtype.itemsize < TINY_NBYTES


@dataclass
class _Waiting:
    """Seconds that NumPy took so far, and `kernels_taken()` when kernels were last asked for."""

    spent_s: float = 0.0
    taken: int = -1


#: By codec, dtype and direction; None where kernels are there.
_waiting: dict[tuple[CodecSpec, str, str], _Waiting | None] = {}
_NEW = _Waiting()


def kernels_known(plan: Plan, direction: str) -> bool:
    """Whether `call_tiny` would take Numba without asking."""
    return _waiting.get((plan.codec, plan.dtype.name, direction), _NEW) is None


def call_tiny(plan: Plan, direction: str, call: Callable[[str | None], T]) -> T:
    """`call(backend)`, "encode" or "decode" of a tiny tensor, with the backend that is quickest.

    That is Numba where the kernels are in memory or in the cache on disk. Where they would have to
    be compiled, which takes seconds, it is NumPy, until it has taken PATIENCE_S for this codec,
    dtype and direction; then they are compiled. The bytes are the same. `call` may be called twice.
    """
    key = plan.codec, plan.dtype.name, direction
    waiting = _waiting.get(key, _NEW)
    if waiting is None:
        return call(None)
    name = plan.codec.name
    if backend_module(name, None) is backend_module(name, "ref"):
        return call("ref")
    from .codecs.common.compile_cache import NotCompiledError, kernels_taken, only_compiled

    if waiting is _NEW:
        waiting = _waiting[key] = _Waiting()
    if waiting.taken != kernels_taken():
        waiting.taken = kernels_taken()
        try:
            with only_compiled():
                found = call(None)
        except NotCompiledError:
            pass
        else:
            _waiting[key] = None
            return found
    if waiting.spent_s < PATIENCE_S:
        start = time.perf_counter()
        found = call("ref")
        waiting.spent_s += time.perf_counter() - start
        return found
    found = call(None)
    _waiting[key] = None
    return found


def backend_for_once(plans: Iterable[Plan]) -> str | None:
    """The host backend for tensors that a process codes once: "ref" if small, else None.

    The bytes are those of any backend; it saves importing Numba and loading its functions.
    """
    nbytes = sum(p.nelem * p.dtype.itemsize + p.chunks * _CALL_NBYTES for p in plans)
    return "ref" if nbytes < SMALL_NBYTES else None


@functools.cache
@default_floats()
def device_module(name: str) -> ModuleType | str:
    """The module that codes codec `name` on a GPU, or the name of the package that it lacks."""
    stem = f"tightwire.codecs.{CODEC_IDS[name][1]}_{DEVICE_BACKEND}"
    return _module_or_missing(stem, "torch", "triton", stem)


@functools.cache
def device_engine() -> ModuleType | str:
    """The module `tightwire.gpu`, or the name of the package that it lacks."""
    return _module_or_missing("tightwire.gpu", "torch")


@functools.cache
def device_many() -> ModuleType | str:
    """The module `tightwire.gpu_many`, or the name of the package that it lacks."""
    return _module_or_missing("tightwire.gpu_many", "torch", "triton")


@functools.cache
def device_files() -> ModuleType | str:
    """The module `tightwire.gpu_files`, or the name of the package that it lacks."""
    return _module_or_missing("tightwire.gpu_files", "torch", "triton")


def _module_or_missing(module: str, *packages: str) -> ModuleType | str:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # Triton before 3.4 has not all that is imported from it.
        name = error.name or ""
        for missing in (name, name.split(".")[0]):
            if missing in packages:
                return missing
        raise


def make_plan(
    spec: CodecSpec,
    dtype: DType,
    shape: tuple[int, ...],
    chunks: int | None = 1,
    dynamic_capacity: int | None = None,
    checksum: bool = True,
) -> Plan:
    """Plan a buffer. Falls to the raw codec where `spec` has nothing to gain.

    `chunks` None takes as few as the codec allows. Raises TypeError or ValueError for bad values.
    """
    if chunks is not None:
        chunks = integer("chunks", chunks)
    if dynamic_capacity is not None:
        dynamic_capacity = integer("dynamic_capacity", dynamic_capacity)
    return _make_plan(spec, dtype, shape, chunks, dynamic_capacity, bool(checksum))


@functools.lru_cache(maxsize=1024)
@default_floats()
def _make_plan(
    spec: CodecSpec,
    dtype: DType,
    shape: tuple[int, ...],
    chunks: int | None,
    dynamic_capacity: int | None,
    checksum: bool,
) -> Plan:
    if len(shape) > MAX_RANK:
        raise ValueError(f"{len(shape)} dimensions; allowed: at most {MAX_RANK}")
    if any(d < 0 for d in shape):
        raise ValueError(f"shape is {shape}; allowed: sizes >= 0")
    spec = spec.bind(shape)
    nelem = math.prod(shape)
    if math.prod(d for d in shape if d) * dtype.itemsize > MAX_NBYTES:
        raise ValueError(f"shape {shape} has more than 2**63 - 1 bytes")
    if chunks is None:
        chunks = max(1, -(-nelem // spec.max_chunk_nelem(dtype)))
    if not 1 <= chunks <= MAX_CHUNKS:
        raise ValueError(f"chunks is {chunks}; allowed: 1 to {MAX_CHUNKS}")
    chunk_nelem = -(-nelem // chunks)
    if chunk_nelem > spec.max_chunk_nelem(dtype):
        least = -(-nelem // spec.max_chunk_nelem(dtype))
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


@default_floats()
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
    if -(-nelem // header.chunks) > spec.max_chunk_nelem(header.dtype):
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
