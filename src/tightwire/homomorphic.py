"""Sums of homomorphic buffers without decoding them, and what an index of lhc means for peeling.

Ranks agree on what they measure (`Codec.measure`, by `Codec.reduce_op`: lhc by bitwise OR, thc and
omnireduce by maximum), encode with it as `stats`, and reduce their cells by any transport:

    stats = all_reduce(codec.measure(x), codec.reduce_op)
    buf = codec.encode(x, stats=stats)
    all_reduce_sum(sketch(buf, 0))      # in place
    seal(buf)
    total = tw.decode(buf)

After TAGC, algorithm 1. "Sums" on the codecs' pages in specs/ says what is exact.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import arrays, engine
from .buffer import Buffer
from .codec import Codec, as_codec, decode, device_for
from .codecs.base import Bytes, CodecSpec
from .codecs.float_mode import default_floats
from .codecs.lhc import Lhc, chunk_bits, mapping_of
from .formats.dtypes import DType
from .planning import backend_module

#: Peeling ends fully up to this share of the cells, of elements in no special order (specs/lhc.md).
SAFE_LOAD = 0.75
MAX_NIBBLE_RANKS = 15
INDEX_MODES = ("or", "4bit", "1bit")


def sketch(buf: Buffer, chunk: int = 0) -> Any:
    """The cells of a chunk, of the codec's cell dtype, shape (cells,), a view of the buffer.

    In the library and on the device of the buffer (JAX, and CuPy where the host encodes: a copy;
    PyTorch: int16 for uint16, which it does not add). Once changed, the chunk's checksum is wrong
    until `seal`. Raises ValueError if the buffer is not of a homomorphic codec, TypeError if `buf`
    is no Buffer, and for CuPy and bfloat16 cells.
    """
    spec = _spec(buf)
    kind = spec.cell_dtype(buf.plan.dtype)
    part = buf.static(chunk)[: buf.plan.layout.sections[0].nbytes]
    if buf.target.library == "torch":
        name = "int16" if kind.name == "uint16" else kind.name
        return part.view(getattr(importlib.import_module("torch"), name))
    return part.view(kind.numpy)


def seal(buf: Buffer) -> Buffer:
    """Write the checksums of a buffer on the host anew, after its cells were changed; gives `buf`.

    Whatever the buffer holds counts as right from then on. Nothing to do without checksums.
    Raises TypeError if `buf` is no Buffer, ValueError for a buffer with checksums in GPU memory:
    encode with `checksum=False`.
    """
    _spec(buf)
    if buf.plan.checksum:
        if buf._host is None:
            raise ValueError("the buffer is in GPU memory; allowed there: checksum=False")
        engine.seal(buf.plan, buf._bytes)
    return buf


@default_floats()
def add(first: Buffer, *others: Buffer) -> Buffer:
    """The buffer of the sum, made of buffers on the host that were encoded with the same stats.

    Cells are added in their dtype, from left to right. Raises FormatError for a damaged buffer,
    TypeError for what is no Buffer, and ValueError if plans, indexes, norms or seeds of signs
    differ, or cells do not hold such a sum or one that is given.
    """
    spec = _spec(first)
    for buf in (first, *others):
        _spec(buf)
        if buf._host is None:
            raise ValueError("a buffer is in GPU memory; allowed: buffers on the host")
        if buf.plan != first.plan:
            raise ValueError(f"{buf!r} and {first!r} differ; allowed: buffers of one plan")
        engine.check_chunks(buf.parsed())
    total = Buffer(first.plan, first._bytes.copy(), first.target)
    kind, at = spec.cell_dtype(first.plan.dtype), first.plan.layout.sections[0].nbytes
    for i in range(first.plan.chunks):
        where = first.plan.static_range(i)
        static = total._bytes[where]
        cells = static[:at].view(kind.numpy)
        spec.check_sum(cells)
        for other in others:
            part = other._bytes[where]
            if (part[at:] != static[at:]).any():
                raise ValueError(
                    "indexes, norms or seeds differ; allowed: buffers encoded with stats that "
                    f"all ranks agreed on (by {spec.reduce_op}), and keys of one seed and step"
                )
            term = part[:at].view(kind.numpy)
            # Before the count itself can overflow.
            spec.check_sum(term)
            cells += term
            spec.check_sum(cells)
    return seal(total)


def _spec(buf: Buffer) -> CodecSpec:
    if not isinstance(buf, Buffer):
        given = f"{type(buf).__module__}.{type(buf).__qualname__}"
        raise TypeError(f"buf is {given}; allowed: a Buffer, as encode() and Buffer.wrap() give")
    spec = buf.plan.codec
    if not spec.homomorphic:
        raise ValueError(f"{buf!r} does not add up; allowed: buffers of homomorphic codecs")
    return spec


@dataclass(frozen=True)
class Diagnosis:
    """What an index, that of all ranks, means for a codec. Numbers are of all chunks together."""

    spec: Lhc
    dtype: DType
    nelem: int
    #: Elements of a chunk, but for the last ones.
    chunk_nelem: int
    #: Elements in the index, those of them that come back exactly, and rounds of the slowest chunk.
    occupied: int
    peeled: int
    rounds: int

    @property
    def ratio(self) -> float:
        """That of the codec."""
        return float(self.spec.ratio)

    @property
    def estimated(self) -> int:
        """Elements that are not peeled."""
        return self.occupied - self.peeled

    @property
    def density(self) -> float:
        """Share of the elements that are in the index."""
        return self.occupied / max(self.nelem, 1)

    @property
    def limit(self) -> float:
        """The density up to which peeling is known to end, of elements in no special order.

        0 with the mapping "published", of which nothing is known.
        """
        return SAFE_LOAD / self.ratio if self.spec.mapping == "rotated" else 0.0

    @property
    def structured(self) -> bool:
        """Peeling has not ended, though the index is sparse enough for elements in no order.

        So they are in one that meets with the mapping, such as whole rows in a small tensor.
        """
        return self.estimated > 0 and self.density <= self.limit

    @property
    def advice(self) -> str | None:
        """What to change, if a value is estimated."""
        if not self.estimated:
            return None
        what = (
            f"{self.estimated} of {self.occupied} values are estimated: {self.density:.3g} of the "
            f"elements are in the index"
        )
        most = math.floor(SAFE_LOAD / self.density * 100) / 100
        dense = self.density * self.ratio > SAFE_LOAD and most < self.ratio
        rotated = self.spec.mapping == "rotated"
        if rotated and not dense:
            return (
                f"{what}, which would peel at {self.ratio:g}x in no special order, but not in this "
                "one (structured: whole rows, for example); take a lower ratio, zero more entries, "
                "or send it uncompressed"
            )
        mapping = "" if rotated else "the mapping 'rotated'"
        if not dense:
            return f"{what}; take {mapping}"
        what += f", at most {SAFE_LOAD / self.ratio:.3g} peel at {self.ratio:g}x"
        if most <= 1 or not replace(self.spec, ratio=most).accepts(self.dtype, self.chunk_nelem):
            return f"{what}; send it uncompressed, or zero more entries"
        ratio = f"a ratio of at most {most:g}"
        return f"{what}; take {f'{mapping} and ' if mapping else ''}{ratio}, or zero more entries"


def diagnose(
    codec: str | Codec, index: Any, shape: tuple[int, ...], dtype: Any, *, chunks: int = 1
) -> Diagnosis:
    """Peel an index (`Codec.measure`, agreed) as encoding `shape` and `dtype` would.

    Raises ValueError if the codec is not lhc, would store such a tensor raw, or the index has
    another size.
    """
    chosen = as_codec(codec)
    plan = chosen.plan(shape, dtype, chunks=chunks)
    spec = plan.codec
    if not isinstance(spec, Lhc):
        raise ValueError(f"{chosen.name} stores {shape} by {spec.name}; allowed: what lhc codes")
    found = _host_index(index, plan.nelem)
    peel = backend_module("lhc", None).peel
    rows, occupied, peeled, rounds = spec.rows(plan.chunk_nelem), 0, 0, 0
    for i in range(plan.chunks):
        lo, hi = plan.chunk_range(i)
        own = np.packbits(chunk_bits(found, lo, hi - lo), bitorder="little")
        peeling = peel(own, hi - lo, mapping_of(spec, hi - lo, rows), rows * 1024)
        occupied += peeling.own.size
        peeled += int(np.count_nonzero(peeling.own >= 0))
        rounds = max(rounds, peeling.rounds)
    return Diagnosis(spec, plan.dtype, plan.nelem, plan.chunk_nelem, occupied, peeled, rounds)


class Sketched:
    """A tensor encoded by lhc to be summed, without checksums, and what encoding has found out.

    On a GPU that has kernels nothing is peeled twice and nothing waits for the device, damage that
    decoding finds is raised by `buffer.check()`; on the host it is raised at once. Raises
    ValueError as `diagnose` and `Codec.encode` do.
    """

    def __init__(
        self, codec: Codec, x: Any, index: Any, *, chunks: int = 1, backend: str | None = None
    ) -> None:
        """Encode `x`, of any shape, with the agreed `index` as stats; see `Codec.encode`."""
        info = arrays.describe(x)
        self.codec, self._index = codec, index
        self.plan = codec.plan(info.shape, info.dtype.name, chunks=chunks, checksum=False)
        if not isinstance(self.plan.codec, Lhc):
            name = self.plan.codec.name
            raise ValueError(f"{codec.name} stores {info.shape} by {name}; allowed: what lhc codes")
        self._device = device_for(backend, x)
        self._work = None
        if self._device is not None and info.library == "torch":
            self._work = self._device.workspace_for(self.plan, x)
        self.buffer = codec.encode(
            x, stats=index, chunks=chunks, checksum=False, scratch=self._work, backend=backend
        )

    def counts(self) -> Any:
        """Elements in the index, those of them that are peeled, rounds: int64, shape (3,).

        As in `Diagnosis`; a tensor on the device if kernels have encoded, else of NumPy.
        """
        if self._device is not None and self._work is not None:
            return self._device.peeling(self.plan, self._work)
        plan = self.plan
        found = diagnose(self.codec, self._index, plan.shape, plan.dtype.name, chunks=plan.chunks)
        return np.array([found.occupied, found.peeled, found.rounds])

    def diagnosis(self, counts: Sequence[int]) -> Diagnosis:
        """The values of `counts` by name."""
        occupied, peeled, rounds = counts
        plan = self.plan
        assert isinstance(plan.codec, Lhc)
        return Diagnosis(
            plan.codec, plan.dtype, plan.nelem, plan.chunk_nelem, occupied, peeled, rounds
        )

    def check(self) -> None:
        """Raise FormatError for what decoding has found so far. Waits for the device."""
        if self._work is not None:
            self.buffer.check()

    def decode(self, start: int, stop: int) -> Any:
        """Elements `start` to `stop` of the buffer, whose cells may have been summed: shape (n,).

        The index must not have changed.
        """
        if self._device is None or self._work is None:
            return decode(self.buffer.array, start=start, stop=stop)
        torch = importlib.import_module("torch")
        kind = getattr(torch, self.plan.dtype.name)
        out = torch.empty(stop - start, dtype=kind, device=self._work.device)
        options = {"add": False, "peeled": True}
        self._device.decode_into(self.buffer, out, self._work, start, stop, **options)
        return out


@default_floats()
def safe_codec(
    codec: str | Codec,
    index: Any,
    nelem: int,
    dtype: Any,
    ratios: Sequence[float] = (10, 4, 2),
    *,
    chunks: int = 1,
) -> Codec | None:
    """`codec` if an index of `nelem` elements is sparse enough for its ratio, else a safer one.

    That is the codec with the highest of the lower `ratios` for which it is, and by which a tensor
    of `dtype` in `chunks` is not stored raw; None if there is none, and with the mapping
    "published": the tensor should go uncompressed. It counts bits and does not peel (`Diagnosis`
    has what becomes of an index with a structure); ranks with one index choose the same. Raises
    ValueError if `codec` is not lhc, and for ratios that it does not take.
    """
    chosen = as_codec(codec)
    spec = chosen.spec
    if not isinstance(spec, Lhc):
        raise ValueError(f"codec is {chosen.name}; allowed: lhc")
    found = _host_index(index, nelem)
    occupied = int(np.count_nonzero(chunk_bits(found, 0, nelem)))
    others = [Codec(replace(spec, ratio=ratio)) for ratio in sorted(ratios, reverse=True)]
    if spec.mapping != "rotated":
        return None
    for candidate in (chosen, *others):
        tried = candidate.spec
        assert isinstance(tried, Lhc)
        fits = tried.ratio <= spec.ratio and occupied * tried.ratio <= SAFE_LOAD * nelem
        if fits and candidate.plan((nelem,), dtype, chunks=chunks).codec == tried:
            return candidate
    return None


def index_to_reduce(
    index: Any, mode: str, world_size: int
) -> tuple[Any, Literal["bitwise_or", "sum"]]:
    """The bytes of an index that `world_size` ranks reduce, uint8, and by which operation.

    A tensor of PyTorch on the device of `index` if that is one, else an array of NumPy.

    "or": the index itself, by bitwise OR. "4bit": half a byte for each element, by SUM, for at most
    15 ranks. "1bit": the index itself, by SUM, as in the paper: elements that ranks share are lost
    from the agreed index, and others may appear (TAGC, section 2.2). Raises ValueError for another
    mode, an index that is none, and too few or too many ranks.
    """
    _check_mode(mode)
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; allowed: at least 1")
    found = index if arrays.library_of(index) == "torch" else arrays.host_array(index)
    if str(found.dtype).removeprefix("torch.") != "uint8" or found.ndim != 1:
        given = f"{found.dtype}{list(found.shape)}"
        raise ValueError(f"index is {given}; allowed: uint8, one dimension")
    if mode == "or":
        return found, "bitwise_or"
    if mode == "1bit":
        return found, "sum"
    if world_size > MAX_NIBBLE_RANKS:
        raise ValueError(
            f"mode is '4bit' for {world_size} ranks; allowed: at most {MAX_NIBBLE_RANKS}, or 'or'"
        )
    pairs = [found >> 2 * k for k in range(4)]
    return _interleaved([pair & 1 | (pair & 2) << 3 for pair in pairs]), "sum"


def agreed_index(reduced: Any, mode: str) -> Any:
    """The index, for `stats`, from what `index_to_reduce` gave and ranks reduced.

    In the library and on the device of `reduced`. With "1bit" it may lack elements that are not
    zero, which encode() refuses: set them to zero before, and keep them for the next step. Raises
    ValueError for another mode, and for half bytes of no whole index.
    """
    _check_mode(mode)
    if mode != "4bit":
        return reduced
    if arrays.library_of(reduced) != "torch":
        reduced = arrays.host_array(reduced).astype(np.uint8, copy=False)
    if len(reduced) % 4:
        raise ValueError(f"reduced has {len(reduced)} bytes; allowed: a multiple of 4")
    # 1 where half a byte is not 0.
    low, high = (reduced & 15) + 15 >> 4, (reduced >> 4) + 15 >> 4
    pairs = (low | high << 1).reshape(-1, 4)
    return pairs[:, 0] | pairs[:, 1] << 2 | pairs[:, 2] << 4 | pairs[:, 3] << 6


def _check_mode(mode: str) -> None:
    if mode not in INDEX_MODES:
        raise ValueError(f"mode is {mode!r}; allowed: {', '.join(INDEX_MODES)}")


def _interleaved(parts: Sequence[Any]) -> Any:
    """Arrays of shape (n,), the first elements of all before the second ones."""
    if arrays.library_of(parts[0]) == "torch":
        return importlib.import_module("torch").stack(parts, 1).reshape(-1)
    return np.stack(parts, axis=1).reshape(-1)


def _host_index(index: Any, nelem: int) -> Bytes:
    found: npt.NDArray[Any] = arrays.host_array(index)
    if found.dtype != np.uint8 or found.shape != (-(-nelem // 8),):
        given = f"{found.dtype}{list(found.shape)}"
        raise ValueError(f"index is {given}; allowed: uint8[{-(-nelem // 8)}]")
    return found
