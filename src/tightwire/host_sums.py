"""Sums of buffers in host memory: added to an array, as elements, or encoded again.

What a sum is, codecs/common/sums.py says. Every checksum and all padding is checked before anything
is added.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from .codecs.common.base import Bits, Bytes, Chunk, ChunkResult, Key, Plan
from .codecs.common.float_mode import default_floats
from .codecs.common.sums import FLOAT32, Damaged, sum_of
from .engine import (
    Parsed,
    check_chunks,
    load_raw,
    raise_problem,
    read_range,
    write_chunks,
    write_into,
)
from .formats.dtypes import DType
from .formats.errors import FormatError
from .formats.header import RAW
from .planning import backend_module, call_tiny, is_tiny, kernels_known

#: A term of a sum: a buffer, or elements (1-D) of its dtype or of float32.
Term = Parsed | Bits


@default_floats()
def decode_add(parsed: Parsed, acc: npt.NDArray[Any], *, threads: int = 1) -> bool:
    """Add a whole buffer's elements to `acc` (1-D) in one pass, chunk by chunk.

    `acc` is float32, or bits of elements of the buffer's float dtype. False, and nothing done,
    without Numba, and for a tiny tensor whose kernels are not there. Raises FormatError; `acc` is
    undefined after the reason "bad_payload".
    """
    plan = parsed.plan
    module = backend_module(plan.codec.name, None)
    if not _is_compiled(module) or (is_tiny(plan, None) and not _may_add(plan, acc)):
        return False
    from .codecs.common import driver_cpu

    check_chunks(parsed)
    for i in parsed.distinct(range(plan.chunks)):
        lo, hi = plan.chunk_range(i)
        with _damage((parsed,), i):
            term = _term(parsed, i, module, threads)
            driver_cpu.add_to(term, acc[lo:hi], plan.dtype, threads)
    return True


def _may_add(plan: Plan, acc: npt.NDArray[Any]) -> bool:
    """Whether elements can be decoded and added to `acc` without compiling anything.

    It is asked beforehand, as what was added cannot be taken back.
    """
    if not kernels_known(plan, "decode"):
        return False
    from .codecs.common.compile_cache import NotCompiledError, only_compiled
    from .codecs.common.driver_cpu import add_elements

    try:
        with only_compiled():
            add_elements(acc[:0], np.empty(0, plan.dtype.bits), plan.dtype)
    except NotCompiledError:
        return False
    return True


@default_floats()
def sum_into(
    terms: Sequence[Term],
    out: Bits,
    *,
    scale: float | None = None,
    wide: bool = False,
    threads: int = 1,
    backend: str | None = None,
) -> None:
    """Write the sum of buffers of one plan, and at most one local tensor, to `out` (bits, 1-D).

    `out` has elements of the buffers' dtype, with `wide` of float32. Raises FormatError, whose
    detail names the buffer if there are several.
    """
    plan = _buffers(terms)[0].plan
    target = FLOAT32 if wide else plan.dtype
    if is_tiny(plan, backend):
        call_tiny(plan, "sum", lambda chosen: _sum(terms, out, scale, target, threads, chosen))
    else:
        _sum(terms, out, scale, target, threads, backend)


@default_floats()
def encode_sum(
    plan: Plan,
    terms: Sequence[Term],
    out: Bytes,
    *,
    scale: float | None = None,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
    backend: str | None = None,
) -> None:
    """Encode the sum of `terms`, as of `sum_into`, into `out` (uint8, plan.nbytes).

    Where `plan` fuses those of the buffers, and no `stats` are given, a codec whose sums keep
    statistics takes those of the first buffer, which is the first term; others measure the sum. It
    is in memory as a whole only if `plan` does not fuse them, where it is measured, or where a
    codec has to see all of a chunk before it encodes any.
    """
    if is_tiny(plan, backend):
        call_tiny(
            plan,
            "sum",
            lambda chosen: _encode_sum(plan, terms, out, scale, stats, key, threads, chosen),
        )
    else:
        _encode_sum(plan, terms, out, scale, stats, key, threads, backend)


def _encode_sum(
    plan: Plan,
    terms: Sequence[Term],
    out: Bytes,
    scale: float | None,
    stats: npt.NDArray[Any] | None,
    key: Key | None,
    threads: int,
    backend: str | None,
) -> None:
    spec, module = plan.codec, backend_module(plan.codec.name, backend)
    buffers = _buffers(terms)
    fuses = all(plan.fuses(buffer.plan) for buffer in buffers)
    keeps = fuses and spec.sums_keep_stats and stats is None
    by_pieces = fuses and _is_compiled(module) and hasattr(module, "encoder")
    total: Bits | None = None
    if not by_pieces or (stats is None and _measures(plan)):
        total = np.empty(plan.nelem, plan.dtype.bits)
        _sum(terms, total, scale, plan.dtype, threads, backend)
        if not keeps:
            write_into(plan, total, out, stats, key, threads, backend)
            return

    def encode(i: int, chunk: Chunk) -> ChunkResult:
        kept = buffers[0].chunk(i) if keeps else None
        if total is not None:
            found: ChunkResult = module.encode_chunk(spec, chunk, elements(i), key=key, kept=kept)
            return found
        from .codecs.common import driver_cpu

        with _damage(terms, i):
            given = driver_cpu.Given(None, stats, key, kept, threads)
            parts = _chunk_terms(terms, i, threads, backend)
            return driver_cpu.encode_sum(module.encoder, spec, chunk, given, parts, scale)

    def elements(i: int) -> Bits:
        cut = slice(*plan.chunk_range(i))
        if total is not None:
            return total[cut]
        bits = np.empty(cut.stop - cut.start, plan.dtype.bits)
        _sum_chunk(terms, i, bits, scale, plan.dtype, threads, backend)
        return bits

    write_chunks(plan, out, module, _check(terms), encode, elements)


def _measures(plan: Plan) -> bool:
    """Whether a sum is measured before it is encoded."""
    spec = plan.codec
    if spec.sums_keep_stats or not spec.needs_stats:
        return False
    # Of no elements: that says whether there is anything to measure.
    return spec.measure(np.empty(0, plan.dtype.bits), plan.dtype) is not None


def _sum(
    terms: Sequence[Term],
    out: Bits,
    scale: float | None,
    target: DType,
    threads: int,
    backend: str | None,
) -> None:
    plan = _buffers(terms)[0].plan
    if not _is_compiled(backend_module(plan.codec.name, backend)):
        out[:] = sum_of(_decoded(terms, backend), plan.dtype, scale, target)
        return
    for i in _check(terms):
        cut = slice(*plan.chunk_range(i))
        _sum_chunk(terms, i, out[cut], scale, target, threads, backend)


def _sum_chunk(
    terms: Sequence[Term],
    i: int,
    out: Bits,
    scale: float | None,
    target: DType,
    threads: int,
    backend: str | None,
) -> None:
    """Write chunk `i` of a sum to `out`, with Numba."""
    from .codecs.common import driver_cpu

    dtype = _buffers(terms)[0].plan.dtype
    with _damage(terms, i):
        parts = _chunk_terms(terms, i, threads, backend)
        driver_cpu.sum_into(parts, dtype, scale, out, target, threads)


def _is_compiled(module: ModuleType) -> bool:
    return module.__name__.endswith("_cpu")


def _buffers(terms: Sequence[Term]) -> list[Parsed]:
    return [term for term in terms if isinstance(term, Parsed)]


def _chunk_terms(terms: Sequence[Term], i: int, threads: int, backend: str | None) -> list[Any]:
    """Chunk `i` of every term, as driver_cpu has terms."""
    plan = _buffers(terms)[0].plan
    found: list[Any] = []
    for number, term in enumerate(terms):
        if isinstance(term, Parsed):
            module = backend_module(term.plan.codec.name, backend)
            with _damage(terms, i, number):
                found.append(_term(term, i, module, threads))
        else:
            found.append(term[slice(*plan.chunk_range(i))])
    return found


def _term(parsed: Parsed, i: int, module: ModuleType, threads: int) -> Any:
    """What decodes chunk `i` piece by piece."""
    from .codecs.common import driver_cpu

    raw = _raw_term(parsed, i)
    return raw or driver_cpu.decoder_of(module, parsed.plan.codec, parsed.chunk(i), threads)


def _raw_term(parsed: Parsed, i: int) -> Any:
    """What decodes chunk `i` if it is stored raw, else None."""
    if not parsed.records[i].flags & RAW:
        return None
    from .codecs.common import driver_cpu

    return driver_cpu.Decoder(functools.partial(_load_elements, parsed.chunk(i)))


def _load_elements(chunk: Chunk, out: Bits, start: int) -> None:
    load_raw(chunk, out.view(np.uint8), start * chunk.dtype.itemsize)


def _decoded(terms: Sequence[Term], backend: str | None) -> list[Bits]:
    found: list[Bits] = []
    for number, term in enumerate(terms):
        if isinstance(term, Parsed):
            bits: Bits = np.empty(term.plan.nelem, term.plan.dtype.bits)
            with _named(terms, number):
                read_range(term, bits, 0, None, 1, backend)
            found.append(bits)
        else:
            found.append(term)
    return found


def _check(terms: Sequence[Term]) -> list[int]:
    """Check all buffers but their payload; the chunks of which not all are copies of others."""
    found: set[int] = set()
    for number, term in enumerate(terms):
        if isinstance(term, Parsed):
            with _named(terms, number):
                check_chunks(term)
            found.update(term.distinct(range(term.plan.chunks)))
    return sorted(found)


@contextmanager
def _damage(terms: Sequence[Term], i: int, number: int | None = None) -> Iterator[None]:
    """What is wrong with chunk `i` of a term, of term `number` if it is known, as FormatError."""
    try:
        yield
    except Damaged as error:
        with _named(terms, error.term if number is None else number):
            raise_problem(i, error.problem)


@contextmanager
def _named(terms: Sequence[Term], number: int) -> Iterator[None]:
    """An error within names the buffer that is term `number`, if there are several buffers."""
    try:
        yield
    except FormatError as error:
        raise (error if len(_buffers(terms)) == 1 else error.of_buffer(number)) from None
