"""Ratio and speed of codecs on the tensors of a safetensors file, compared with memcpy and other
libraries.

No lossless codec is timed before its result has been compared with the input bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .bench_others import Other, others
from .codec import Codec, codec, list_codecs
from .codecs.common.base import Bytes, Key
from .codecs.common.threads import cpu_count
from .convert import cast_bits, cast_dtype, plain_tensors
from .decoding import decode
from .engine import DEFAULT_MAX_NBYTES, parse
from .file_tensors import FileTensors, file_tensors
from .formats.dtypes import DType, dtype_named
from .storage import PathLike, save_figure

#: Fills outputs before they are written, so that a byte left out does not go unseen.
POISON = 0xA5
#: What codecs that round at random draw by.
KEY = Key(0)

#: Elements that are compared at a time.
_BATCH = 1 << 20

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Speed:
    """One codec on one file. Speeds in GB/s (1e9 bytes) of raw data, None if not `identical`.

    `ratio` is packed size over raw size. `identical` is None for a lossy codec. `vnmse` is its
    error, `sum((x - y)^2) / sum(x^2)` over all elements that it codes; None where it is lossless or
    the error is not finite.
    """

    name: str
    ratio: float
    identical: bool | None
    encode_gbps: float | None
    decode_gbps: float | None
    vnmse: float | None = None


@dataclass(frozen=True)
class BenchReport:
    """What was measured on how much: `raw_nbytes` is the tensors' size after the cast.

    `left_out` names the codecs that code none of the tensors' types.
    """

    dtypes: tuple[str, ...]
    n_tensors: int
    raw_nbytes: int
    threads: int
    repeat: int
    speeds: tuple[Speed, ...]
    left_out: tuple[str, ...] = ()


#: Told before each pass what is measured, and the share of all passes done since it was last told.
Progress = Callable[[str, float], None]


def no_progress(what: str, share: float) -> None:
    """Report nothing."""


class _Contestant(NamedTuple):
    """Calls that encode and decode tensor `i`; decoding fills `outs[i]`."""

    name: str
    encode: Callable[[int], Any]
    decode: Callable[[int], Any]
    packed_nbytes: Callable[[], int]
    outs: list[Array]
    lossless: bool = True
    #: Names of the dtypes that it codes; others it stores as they are.
    dtypes: Collection[str] = ()


def bench_file(
    path: PathLike,
    names: Sequence[str] = (),
    *,
    cast: DType | None = None,
    repeat: int = 3,
    limit_nbytes: int | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
    base: PathLike | None = None,
) -> BenchReport:
    """Measure the codecs called `names` on a plain safetensors file, in this order.

    Without names: the lossless codecs that code a type of the file, other libraries, and then the
    lossy ones. With `base`, a safetensors file, compressed or not: codec delta against its tensors
    of the same names, and what codec huffman and other libraries make of the XOR.
    Encoding and decoding are whole calls per tensor into buffers allocated before; the fastest of
    `repeat` passes counts. `limit_nbytes` cuts off the tensors' data. Of other libraries those
    are measured that are installed: zstd, ZipNN, OpenZL, blosc2. Raises FormatError, OSError,
    TypeError or ValueError.
    """
    chosen = [codec(name) for name in names]
    n_threads = threads or cpu_count()
    progress("reading", 0)
    named = _load(path, cast, limit_nbytes)
    arrays = list(named.values())
    bases: list[Array | None] = [None] * len(arrays)
    if base is not None:
        with file_tensors(base, DEFAULT_MAX_NBYTES) as known:
            names_there = set(known.names)
            bases = [
                _base(a, known, name, cast) if name in names_there else None
                for name, a in named.items()
            ]
    raw_nbytes = sum(a.nbytes for a in arrays)
    if not raw_nbytes:
        raise ValueError("no tensor data to measure")
    dtypes = tuple(sorted({a.dtype.name for a in arrays}))
    left_out: list[str] = []
    if not names and base is None:
        chosen, left_out = fitting(dtypes)
    # Made one after the other: each holds buffers for the whole file.
    made: list[Callable[[], _Contestant]] = [partial(_memcpy, arrays)]
    made += [partial(_codec, c, arrays, n_threads) for c in chosen]
    if base is not None:
        made.append(partial(_delta, arrays, bases, n_threads))
        made.append(partial(_other, _huffman(n_threads), arrays, bases))
    lossless = len(made) if names or base else 1 + sum(c.lossless for c in chosen)
    made[lossless:lossless] = [partial(_other, o, arrays, bases) for o in others(n_threads)]
    # A pass to check, and `repeat` passes each of encoding and decoding.
    share = 1 / (len(made) * (1 + 2 * repeat))
    speeds = [_measure(make(), arrays, repeat, progress, share) for make in made]
    return BenchReport(
        dtypes=dtypes,
        n_tensors=len(arrays),
        raw_nbytes=raw_nbytes,
        threads=n_threads,
        repeat=repeat,
        speeds=tuple(speeds),
        left_out=tuple(left_out),
    )


def fitting(dtypes: Collection[str]) -> tuple[list[Codec], list[str]]:
    """The codecs for tensors of these types, and the names of those that code none of them.

    Lossless ones come first, and of these raw, which only copies, last. Codecs that need a base are
    in neither list.
    """
    chosen, left_out = [], []
    for c in map(codec, list_codecs()):
        if c.needs_base:
            continue
        if set(c.dtypes).intersection(dtypes):
            chosen.append(c)
        else:
            left_out.append(c.name)
    chosen.sort(key=lambda c: (not c.lossless, c.name == "raw"))
    return chosen, left_out


def _base(x: Array, known: FileTensors, name: str, cast: DType | None) -> Array | None:
    """What of a tensor of the other file goes with `x`, its first elements; None if none does."""
    dtype, _ = known.kind(name)
    if not isinstance(dtype, DType):
        return None
    target = cast_dtype(dtype, cast)
    found: Array = cast_bits(known.bits(name).view(np.uint8), dtype, target).view(target.numpy)
    if found.dtype != x.dtype or found.size < x.size:
        return None
    return found[: x.size]


def _load(path: PathLike, cast: DType | None, limit: int | None) -> dict[str, Array]:
    """The file's tensors as flat arrays in memory, as far as `limit` bytes reach."""
    arrays: dict[str, Array] = {}
    for entry, dtype, bits in plain_tensors(path, cast):
        values = bits.view(dtype.numpy)
        whole = limit is None or values.nbytes <= limit
        kept = values if whole else values[: (limit or 0) // dtype.itemsize]
        arrays[entry.name] = kept.copy()
        if not whole:
            break
        if limit is not None:
            limit -= values.nbytes
    return arrays


def _poisoned(nbytes: int) -> Bytes:
    return np.full(nbytes, POISON, np.uint8)


def _memcpy(arrays: list[Array]) -> _Contestant:
    outs: list[Array] = [_poisoned(a.nbytes).view(a.dtype) for a in arrays]

    def copy(i: int) -> None:
        np.copyto(outs[i], arrays[i])

    return _Contestant("memcpy", copy, copy, lambda: sum(a.nbytes for a in arrays), outs)


def _codec(c: Codec, arrays: list[Array], threads: int) -> _Contestant:
    buffers: list[Any] = [_poisoned(c.plan(a.shape, a.dtype, chunks=None).nbytes) for a in arrays]
    outs: list[Array] = [_poisoned(a.nbytes).view(a.dtype) for a in arrays]

    def encode_one(i: int) -> None:
        buffers[i] = c.encode(arrays[i], key=KEY, out=buffers[i], chunks=None, threads=threads)

    def decode_one(i: int) -> None:
        decode(buffers[i], out=outs[i], threads=threads)

    def packed_nbytes() -> int:
        return sum(buffer.nbytes for buffer in buffers)

    return _Contestant(c.name, encode_one, decode_one, packed_nbytes, outs, c.lossless, c.dtypes)


def _delta(arrays: list[Array], bases: list[Array | None], threads: int) -> _Contestant:
    """Tensors without a base are coded by themselves."""
    alone = codec("zipccl")
    codecs = [alone if base is None else codec("delta") for base in bases]
    buffers: list[Any] = [
        _poisoned(c.plan(a.shape, a.dtype, chunks=None).nbytes)
        for c, a in zip(codecs, arrays, strict=True)
    ]
    outs: list[Array] = [_poisoned(a.nbytes).view(a.dtype) for a in arrays]

    def encode_one(i: int) -> None:
        buffers[i] = codecs[i].encode(
            arrays[i], base=bases[i], out=buffers[i], chunks=None, threads=threads
        )

    def decode_one(i: int) -> None:
        decode(buffers[i], base=bases[i], out=outs[i], threads=threads)

    def packed_nbytes() -> int:
        return sum(buffer.nbytes for buffer in buffers)

    return _Contestant("delta", encode_one, decode_one, packed_nbytes, outs)


def _huffman(threads: int) -> Other:
    """Codec huffman as a compressor of bytes."""
    chosen = codec("huffman")

    def compress(data: Bytes, dtype: str) -> bytes:
        x = data.view(dtype_named(dtype).numpy)
        return bytes(chosen.encode(x, chunks=None, threads=threads))

    def decompress(packed: bytes, out: Bytes) -> None:
        dtype = parse(np.frombuffer(packed, np.uint8)).plan.dtype
        decode(packed, out=out.view(dtype.numpy), threads=threads)

    return Other(chosen.name, compress, decompress)


def _other(other: Other, arrays: list[Array], bases: list[Array | None]) -> _Contestant:
    """A compressor of bytes; with a base, of the XOR with it."""
    raw = [a.view(np.uint8) for a in arrays]
    given = [None if base is None else base.view(np.uint8) for base in bases]
    packed = [b""] * len(arrays)
    outs: list[Array] = [_poisoned(a.nbytes).view(a.dtype) for a in arrays]

    def encode_one(i: int) -> None:
        base = given[i]
        data = raw[i] if base is None else raw[i] ^ base
        packed[i] = other.compress(data, arrays[i].dtype.name)

    def decode_one(i: int) -> None:
        out, base = outs[i].view(np.uint8), given[i]
        other.decompress(packed[i], out)
        if base is not None:
            np.bitwise_xor(out, base, out=out)

    name = other.name if all(base is None for base in bases) else f"{other.name} of XOR"
    return _Contestant(name, encode_one, decode_one, lambda: sum(map(len, packed)), outs)


def _measure(
    contestant: _Contestant, arrays: list[Array], repeat: int, progress: Progress, share: float
) -> Speed:
    """Check first, which also compiles or loads kernels, then time.

    `share` is that of a pass among all passes of all contestants.
    """
    name = contestant.name
    progress(f"{name}: check", 0)
    for i in range(len(arrays)):
        contestant.encode(i)
        contestant.decode(i)
    progress(f"{name}: check", share)
    raw_nbytes = sum(a.nbytes for a in arrays)
    ratio = contestant.packed_nbytes() / raw_nbytes
    identical = vnmse = None
    if not contestant.lossless:
        pairs = zip(arrays, contestant.outs, strict=True)
        vnmse = _vnmse([(a, b) for a, b in pairs if a.dtype.name in contestant.dtypes])
    else:
        pairs = zip(arrays, contestant.outs, strict=True)
        identical = all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)
    if identical is False:
        progress(name, 2 * repeat * share)
        return Speed(name, ratio, identical, None, None)
    gbps = []
    for what, call in (("encode", contestant.encode), ("decode", contestant.decode)):

        def done(what: str = what) -> None:
            progress(f"{name}: {what}", share)

        gbps.append(raw_nbytes / 1e9 / _fastest(call, len(arrays), repeat, done))
    encode_gbps, decode_gbps = gbps
    return Speed(name, ratio, identical, encode_gbps, decode_gbps, vnmse)


def _vnmse(pairs: list[tuple[Array, Array]]) -> float | None:
    """The error of the second arrays as one vector; None if it is not finite."""
    difference = norm = 0.0
    for a, b in pairs:
        for at in range(0, a.size, _BATCH):
            x, y = (v[at : at + _BATCH].astype(np.float64) for v in (a, b))
            with np.errstate(invalid="ignore"):
                difference += float(np.sum((x - y) ** 2))
            norm += float(np.sum(x**2))
    if difference == 0:
        return 0.0
    found = difference / norm if norm else math.inf
    return found if math.isfinite(found) else None


def _fastest(call: Callable[[int], Any], n: int, repeat: int, done: Callable[[], None]) -> float:
    """Seconds of the fastest of `repeat` passes over all tensors; `done` is called after each."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for i in range(n):
            call(i)
        best = min(best, time.perf_counter() - start)
        done()
    return best


def plot_speeds(report: BenchReport, path: PathLike) -> None:
    """Draw encode and decode speed per codec, with the ratio under the name. Needs matplotlib."""
    from matplotlib.figure import Figure

    shown = [s for s in report.speeds if s.encode_gbps is not None]
    at = np.arange(len(shown))
    figure = Figure(figsize=(7, 1.2 + 0.7 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for offset, what in ((-0.2, "encode"), (0.2, "decode")):
        values = [getattr(s, f"{what}_gbps") for s in shown]
        axes.bar_label(axes.barh(at + offset, values, 0.38, label=what), fmt="%.2f", padding=3)
    axes.set_yticks(at, [f"{s.name}\nratio {s.ratio:.3f}" for s in shown])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"GB/s of raw data, {', '.join(report.dtypes)}, threads: {report.threads}")
    axes.legend()
    save_figure(figure, path)
