"""What CPU backends do with the elements of a chunk, piece by piece and on threads.

A codec's CPU module gives two functions of one chunk: `decoder` and `encoder`. From them this
module makes `encode_chunk` and `decode_chunk`, and all that adds: into an accumulator, and sums
(codecs/common/sums.py) as elements or encoded again. Elements are added while they are in cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...formats.dtypes import DType
from . import sums_cpu
from .arrays_cpu import as_read_only
from .base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, tail_problem
from .sums import Damaged, Values, wide_dtype
from .threads import run, spans

#: Elements that are decoded, added and encoded while they are in cache.
PIECE = 1 << 15


class Decoder(NamedTuple):
    """What decodes any elements of one chunk, from several threads at once.

    Attributes:
        decode: ``decode(out, start)`` writes the elements from number `start` on, as many as `out`
            (1-D) has, at least one. It gives a number of `problems`, or None.
        tile: Elements that are decoded together; a power of two up to `PIECE`.
        problems: What the numbers mean that `decode` gives.
        problem: What is known to be wrong before anything is decoded.
        words_sum: Checksum over the chunk, after `decode` of all of its elements.
    """

    decode: Callable[[Bits, int], Any]
    tile: int = PIECE
    problems: Sequence[str | None] = (None,)
    problem: str | None = None
    words_sum: Callable[[], int] | None = None


def _no_result(results: list[Any]) -> ChunkResult:
    return ChunkResult(0)


class Encoder(NamedTuple):
    """What encodes one chunk.

    Attributes:
        span: ``span(start, stop)`` gives the ``encode(x, at)`` of elements `start` to `stop`. That
            writes the elements `x` (1-D, read-only), of which the first has the number `at`, and
            is called for one piece after the other; of several spans at once. Spans and pieces end
            with a tile, or with the chunk.
        tile: Elements that are encoded together; a power of two up to `PIECE`.
        finish: Gives the result of the chunk, from those of ``encode`` in the order of elements.
    """

    span: Callable[[int, int], Callable[[Bits, int], Any]]
    tile: int
    finish: Callable[[list[Any]], ChunkResult] = _no_result


class Given(NamedTuple):
    """What a chunk is encoded with.

    Attributes:
        bits: All of its elements (1-D), or None if they are not known yet.
        stats: The statistics of the tensor, or None.
        key: The key, or None.
        kept: A chunk whose statistics the new one has where there are no `stats`, for codecs whose
            sums keep them.
        threads: Threads that may be used before anything is encoded.
    """

    bits: Bits | None = None
    stats: npt.NDArray[Any] | None = None
    key: Key | None = None
    kept: Chunk | None = None
    threads: int = 1


#: ``decoder(spec, chunk, start, stop, summed)``: what decodes elements `start` to `stop`; `summed`
#: if `words_sum` is wanted.
MakesDecoder = Callable[..., Decoder]
#: ``encoder(spec, chunk, given)``; None if it has to see elements that are not known.
MakesEncoder = Callable[[Any, Chunk, Given], Encoder | None]
#: A term of a sum: a chunk, or elements.
Term = Decoder | Bits


def encode_by(encoder: MakesEncoder) -> Callable[..., ChunkResult]:
    """The `encode_chunk` of a stem."""

    def encode_chunk(
        spec: CodecSpec,
        chunk: Chunk,
        bits: Bits,
        *,
        stats: npt.NDArray[Any] | None = None,
        key: Key | None = None,
        threads: int = 1,
    ) -> ChunkResult:
        """Encode the chunk's elements `bits` (1-D)."""
        made = encoder(spec, chunk, Given(bits, stats, key, threads=threads))
        assert made is not None
        return _encode(made, bits, threads)

    return encode_chunk


def decode_by(decoder: MakesDecoder) -> Callable[..., ChunkDecoded]:
    """The `decode_chunk` of a stem."""

    def decode_chunk(
        spec: CodecSpec, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
    ) -> ChunkDecoded:
        """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D)."""
        whole = out.size == chunk.nelem
        made = decoder(spec, chunk, start, start + out.size, whole)
        if made.problem is not None or not out.size:
            return ChunkDecoded(made.problem)
        cuts = _cuts(start, start + out.size, made.tile, out.nbytes, threads)
        found = run(made.decode, [(out[lo - start : hi - start], lo) for lo, hi in cuts])
        problem = next((made.problems[n] for n in found if n), None)
        return ChunkDecoded(problem, made.words_sum() if made.words_sum else None)

    return decode_chunk


def decoder_of(module: ModuleType, spec: CodecSpec, chunk: Chunk, threads: int) -> Decoder:
    """What decodes a chunk; where a module has no `decoder`, all is decoded here."""
    tail = tail_problem(spec, chunk)
    if hasattr(module, "decoder"):
        found: Decoder = module.decoder(spec, chunk, 0, chunk.nelem, False)
        return found._replace(problem=found.problem or tail)
    bits = np.empty(chunk.nelem, chunk.dtype.bits)
    decoded = module.decode_chunk(spec, chunk, bits, threads=threads)
    return Decoder(partial(_copy, bits), problem=decoded.problem or tail)


def _copy(bits: Bits, out: Bits, start: int) -> None:
    out[:] = bits[start : start + out.size]


def by_tiles(decode: Callable[[Bits, int], Any], tile: int, nelem: int) -> Any:
    """The `decode` of a `Decoder`, from one that writes whole tiles, and the chunk's last."""

    def decode_any(out: Bits, start: int) -> Any:
        stop = start + out.size
        first, last = -(-start // tile) * tile, stop if stop == nelem else stop // tile * tile
        if first == start and last == stop:
            return decode(out, start)
        found = decode(out[first - start : last - start], first) if first < last else None
        # Of tiles at the ends a part is wanted.
        ends = [(first - tile, start, min(first, stop))] if start < first else []
        ends += [(last, last, stop)] if first <= last < stop else []
        for at, lo, hi in ends:
            whole = np.empty(min(tile, nelem - at), out.dtype)
            found = found or decode(whole, at)
            out[lo - start : hi - start] = whole[lo - at : hi - at]
        return found

    return decode_any


def add_to(decoder: Decoder, acc: Values, dtype: DType, threads: int) -> None:
    """Add a chunk's elements to `acc` (1-D): float values, or bits of elements of `dtype`.

    Sums are rounded once, to what `acc` has. Raises `Damaged`; of a problem that is known before
    anything is decoded, `acc` is left alone.
    """
    if decoder.problem is not None:
        raise Damaged(decoder.problem)
    cuts = _cuts(0, acc.size, PIECE, acc.nbytes, threads)
    run(_add_pieces, [(decoder, acc, dtype, *cut) for cut in cuts])


def _add_pieces(decoder: Decoder, acc: Values, dtype: DType, start: int, stop: int) -> None:
    space = np.empty(min(PIECE, stop - start), dtype.bits)
    for at in range(start, stop, PIECE):
        target = acc[at : min(at + PIECE, stop)]
        add_elements(target, _load(decoder, space[: target.size], at, 0), dtype)


def add_elements(acc: Values, bits: Bits, dtype: DType) -> None:
    """Add elements of `dtype` to `acc`, as `add_to` has it."""
    if acc.dtype.kind == "u":
        sums_cpu.add(acc, bits, dtype)
    else:
        sums_cpu.accumulate(acc, bits, dtype)


def sum_into(
    terms: Sequence[Term],
    dtype: DType,
    scale: float | None,
    out: Bits,
    target: DType,
    threads: int,
) -> None:
    """Write the sum of `terms` (see sums.py), chunks and elements of `dtype`, to `out` (1-D).

    `target`, `dtype` or float32, is that of the elements `out`. Raises `Damaged`.
    """
    _check(terms)
    cuts = _cuts(0, out.size, PIECE, out.nbytes, threads)
    run(_sum_pieces, [(terms, dtype, scale, out, target, *cut) for cut in cuts])


def _check(terms: Sequence[Term]) -> None:
    for i, term in enumerate(terms):
        if isinstance(term, Decoder) and term.problem is not None:
            raise Damaged(term.problem, i)


def _sum_pieces(
    terms: Sequence[Term],
    dtype: DType,
    scale: float | None,
    out: Bits,
    target: DType,
    start: int,
    stop: int,
) -> None:
    piece = _Piece(min(PIECE, stop - start), dtype)
    for at in range(start, stop, PIECE):
        piece.sum(terms, scale, out[at : min(at + PIECE, stop)], target, at)


class _Piece:
    """Memory for a piece of a sum of `dtype`, of up to `nelem` elements."""

    def __init__(self, nelem: int, dtype: DType) -> None:
        self._dtype = dtype
        self._bits = np.empty(nelem, dtype.bits)
        self._total: Values | None = None

    def sum(
        self, terms: Sequence[Term], scale: float | None, out: Bits, target: DType, at: int
    ) -> None:
        """Write the sum of the terms' elements from number `at` on, as many as `out` has, to it."""
        dtype, bits = self._dtype, self._bits[: out.size]
        if len(terms) == 2 and scale is None and target is dtype:
            found = _load(terms[0], out, at, 0)
            other = _load(terms[1], bits, at, 1)
            if found is not out and found.dtype != out.dtype:
                found, other = other, found
            if found is not out:
                out[:] = found
            sums_cpu.add(out, other, dtype)
            return
        if self._total is None:
            self._total = np.empty(bits.size, wide_dtype(dtype))
        total = self._total[: out.size]
        for i, term in enumerate(terms):
            sums_cpu.accumulate(total, _load(term, bits, at, i), dtype, is_first=i == 0)
        sums_cpu.round_scaled(total, scale, out, target)


def _load(term: Term, space: Bits, at: int, number: int) -> Bits:
    """Elements of a term from number `at` on, as many as `space` has, perhaps there."""
    if not isinstance(term, Decoder):
        return term[at : at + space.size]
    found = term.decode(space, at)
    problem = term.problems[found] if found else None
    if problem is not None:
        raise Damaged(problem, number)
    return space


def encode_sum(
    encoder: MakesEncoder,
    spec: CodecSpec,
    chunk: Chunk,
    given: Given,
    terms: Sequence[Term],
    scale: float | None = None,
) -> ChunkResult:
    """Encode the sum of `terms`, whose elements are not yet `given`, into `chunk`.

    It is in memory as a whole only if the encoder has to see it first. Raises `Damaged`.
    """
    _check(terms)
    dtype, threads = chunk.dtype, given.threads
    made = encoder(spec, chunk, given)
    if made is None:
        total = np.empty(chunk.nelem, dtype.bits)
        sum_into(terms, dtype, scale, total, dtype, threads)
        made = encoder(spec, chunk, given._replace(bits=total))
        assert made is not None
        return _encode(made, total, threads)
    cuts = _cuts(0, chunk.nelem, PIECE, chunk.nelem * dtype.itemsize, threads)
    calls = [(made.span(*cut), terms, dtype, scale, *cut) for cut in cuts]
    return made.finish(list(itertools.chain(*run(_encode_pieces, calls))))


def _encode_pieces(
    encode: Callable[[Bits, int], Any],
    terms: Sequence[Term],
    dtype: DType,
    scale: float | None,
    start: int,
    stop: int,
) -> list[Any]:
    total = np.empty(min(PIECE, stop - start), dtype.bits)
    piece, found = _Piece(total.size, dtype), []
    # An empty chunk is one piece.
    for at in range(start, max(stop, start + 1), PIECE):
        part = total[: min(PIECE, stop - at)]
        if part.size:
            piece.sum(terms, scale, part, dtype, at)
        found.append(encode(as_read_only(part), at))
    return found


def _encode(encoder: Encoder, bits: Bits, threads: int) -> ChunkResult:
    x = as_read_only(bits)
    cuts = _cuts(0, bits.size, encoder.tile, bits.nbytes, threads)
    if len(cuts) == 1:
        return encoder.finish([encoder.span(0, x.size)(x, 0)])
    calls = [(encoder.span(lo, hi), x[lo:hi], lo) for lo, hi in cuts]
    return encoder.finish(run(_call, calls))


def _call(encode: Callable[[Bits, int], Any], x: Bits, at: int) -> Any:
    return encode(x, at)


def _cuts(start: int, stop: int, tile: int, nbytes: int, threads: int) -> list[tuple[int, int]]:
    """Elements `start` to `stop`, of `nbytes`, cut at multiples of `tile` for threads."""
    if threads == 1:
        return [(start, stop)]
    first, last = start // tile, -(-stop // tile)
    cuts = spans(last - first, nbytes, threads)
    if len(cuts) == 1:
        return [(start, stop)]
    return [(max(start, (first + a) * tile), min(stop, (first + b) * tile)) for a, b in cuts]
