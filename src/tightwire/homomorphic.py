"""Sums of homomorphic buffers without decoding them, and how an index of lhc will peel.

Ranks agree on what they measure (by ``Codec.reduce_op``: lhc by bitwise OR, thc and omnireduce by
maximum), encode with it as ``stats``, and add their payload elements over any transport::

    stats = all_reduce(codec.measure(x), codec.reduce_op)
    buf = codec.encode(x, stats=stats)
    all_reduce_sum(sketch(buf, 0))      # in place
    seal(buf)
    total = tw.decode(buf)

Source: TAGC, algorithm 1. "Sums" on the codecs' pages in specs/ says what is exact.
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
from .arguments import device_for
from .buffer import Buffer
from .codec import Codec, as_codec
from .codecs.common.base import Bytes, CodecSpec, Plan
from .codecs.common.float_mode import default_floats
from .codecs.lhc import Lhc, chunk_bits, mapping_of
from .decoding import decode
from .formats.dtypes import DType
from .planning import backend_module

#: Peeling ends fully up to this share of the cells, of elements in no special order (specs/lhc.md).
SAFE_LOAD = 0.75
MAX_NIBBLE_RANKS = 15
INDEX_MODES = ("or", "4bit", "1bit")


def sketch(buf: Buffer, chunk: int = 0) -> Any:
    """The payload elements of a chunk, which add up: a view of the buffer.

    In the library and on the device of the buffer. For JAX, and for CuPy where the host encodes, it
    is a copy. For PyTorch uint16 becomes int16, since PyTorch does not add uint16. Once they are
    changed, the checksum of the chunk is wrong until ``seal``.

    Args:
        buf: A buffer of a homomorphic codec.
        chunk: Number of the chunk.

    Returns:
        Shape ``(n,)``, floats for lhc and omnireduce, unsigned integers for thc.

    Raises:
        IndexError: If there is no such chunk.
        TypeError: If ``buf`` is not a ``Buffer``, and for bfloat16 elements in CuPy, which has no
            such dtype.
        ValueError: If the codec is not homomorphic.
    """
    spec = _spec(buf)
    kind = spec.cell_dtype(buf.plan.dtype)
    part = buf.static(chunk)[: buf.plan.layout.sections[0].nbytes]
    if buf.target.library == "torch":
        name = "int16" if kind.name == "uint16" else kind.name
        return part.view(getattr(importlib.import_module("torch"), name))
    return part.view(kind.numpy)


def seal(buf: Buffer) -> Buffer:
    """Write the checksums of a buffer on the host again, after its payload elements were changed.

    Whatever the buffer holds counts as right from then on. Does nothing without checksums.

    Args:
        buf: A buffer of a homomorphic codec.

    Returns:
        ``buf``.

    Raises:
        TypeError: If ``buf`` is not a ``Buffer``.
        ValueError: If the codec is not homomorphic, or the buffer has checksums and is in GPU
            memory: encode with ``checksum=False``.
    """
    _spec(buf)
    if buf.plan.checksum:
        if buf._host is None:
            raise ValueError("the buffer is in GPU memory; allowed there: checksum=False")
        engine.seal(buf.plan, buf._bytes)
    return buf


@default_floats()
def add(first: Buffer, *others: Buffer) -> Buffer:
    """Add buffers on the host that were encoded with the same ``stats``.

    Payload elements are added in their dtype, from left to right.

    Args:
        first: A buffer of a homomorphic codec.
        *others: Buffers of the same plan.

    Returns:
        A new buffer, which decodes to the sum.

    Raises:
        FormatError: If a buffer is damaged.
        TypeError: If an argument is not a ``Buffer``.
        ValueError: If plans, indexes, norms or seeds of signs differ, or the sum is of more ranks
            than the payload elements can hold.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> from tightwire import homomorphic
        >>> codec = tw.codec("omnireduce", bits=8, block=64)
        >>> x, y = np.ones(4096, np.float32), np.full(4096, 2, np.float32)
        >>> stats = np.maximum(codec.measure(x), codec.measure(y))
        >>> total = homomorphic.add(codec.encode(x, stats=stats), codec.encode(y, stats=stats))
        >>> float(tw.decode(total).max())
        3.0
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
        raise ValueError(f"{buf!r} cannot be summed; allowed: buffers of homomorphic codecs")
    return spec


@dataclass(frozen=True)
class Diagnosis:
    """How an index, that of all ranks, peels in a codec. Numbers are of all chunks together.

    Source: TAGC, section 2.2; specs/lhc.md, "Peeling".

    Attributes:
        spec: The codec.
        dtype: Element type of the tensor.
        nelem: Number of elements of the tensor.
        chunk_nelem: Number of elements of a whole chunk.
        occupied: Elements in the index.
        peeled: Those of them that are recovered exactly.
        rounds: Rounds of peeling.
    """

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
        """The ratio of the codec."""
        return float(self.spec.ratio)

    @property
    def estimated(self) -> int:
        """Number of elements that are not peeled, whose values are estimates."""
        return self.occupied - self.peeled

    @property
    def density(self) -> float:
        """Share of the elements that are in the index, from 0 to 1."""
        return self.occupied / max(self.nelem, 1)

    @property
    def limit(self) -> float:
        """The density up to which peeling is known to end, for elements in no special order.

        0 with the mapping "published", for which no limit is known.
        """
        return SAFE_LOAD / self.ratio if self.spec.mapping == "rotated" else 0.0

    @property
    def structured(self) -> bool:
        """True if peeling did not end although the index is sparse enough for elements in no order.

        The elements are then in an order that conflicts with the mapping, such as whole rows in a
        small tensor.
        """
        return self.estimated > 0 and self.density <= self.limit

    @property
    def advice(self) -> str | None:
        """What to change if values are estimated, else None."""
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
    """Peel an index as encoding a tensor with it would.

    Args:
        codec: The codec lhc or its name.
        index: The agreed result of ``Codec.measure``: uint8, one bit per element.
        shape: Shape of the tensor.
        dtype: Its element type.
        chunks: Number of chunks.

    Returns:
        The result.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the codec is not lhc or would store such a tensor raw, or the index has
            another size.
    """
    chosen = as_codec(codec)
    plan = chosen.plan(shape, dtype, chunks=chunks)
    spec = plan.codec
    if not isinstance(spec, Lhc):
        raise ValueError(
            f"{chosen.name} stores {shape} as {spec.name}; allowed: tensors that lhc codes"
        )
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
    """A tensor encoded by lhc to be summed, without checksums, with the result of peeling.

    On a GPU with kernels nothing is peeled twice and nothing waits for the device; damage that
    decoding finds is raised by ``buffer.check()``. On the host it is raised at once.

    Args:
        codec: The codec lhc.
        x: The tensor, of any shape.
        index: The agreed index: uint8, one bit per element.
        chunks: Number of chunks.
        backend: As in ``Codec.encode``.

    Raises:
        TypeError: As ``Codec.encode``.
        ValueError: As ``diagnose`` and ``Codec.encode``.
    """

    def __init__(
        self, codec: Codec, x: Any, index: Any, *, chunks: int = 1, backend: str | None = None
    ) -> None:
        info = arrays.describe(x)
        self.codec, self._index = codec, index
        self.plan = codec.plan(info.shape, info.dtype.name, chunks=chunks, checksum=False)
        if not isinstance(self.plan.codec, Lhc):
            name = self.plan.codec.name
            raise ValueError(
                f"{codec.name} stores {info.shape} as {name}; allowed: tensors that lhc codes"
            )
        self._device = device_for(backend, x)
        self._work = None
        if self._device is not None and info.library == "torch":
            self._work = self._device.workspace_for(self.plan, x)
        self.buffer = codec.encode(
            x, stats=index, chunks=chunks, checksum=False, scratch=self._work, backend=backend
        )

    def counts(self) -> Any:
        """Elements in the index, those of them that are peeled, and rounds.

        Returns:
            int64, shape ``(3,)``, as in ``Diagnosis``, a tensor on the device if kernels have
            encoded, else a NumPy array.
        """
        if self._device is not None and self._work is not None:
            return self._device.peeling(self.plan, self._work)
        plan = self.plan
        found = diagnose(self.codec, self._index, plan.shape, plan.dtype.name, chunks=plan.chunks)
        return np.array([found.occupied, found.peeled, found.rounds])

    def diagnosis(self, counts: Sequence[int]) -> Diagnosis:
        """The values of ``counts`` by name.

        Args:
            counts: The three numbers, on the host.
        """
        return diagnosis_of(self.plan, counts)

    def report_to(self, word: Any) -> None:
        """Have what decoding finds on a GPU written to a word, where ``check`` would look for it.

        Args:
            word: int64, shape ``(1,)``, zero, on the device. ``frame_triton.problem`` reads it.
        """
        if self._work is not None and self.buffer._memory is not None:
            self.buffer._memory.report_to(word)

    def check(self) -> None:
        """Raise what decoding has found so far. Waits for the device.

        Raises:
            FormatError: If the sums are damaged.
        """
        if self._work is not None:
            self.buffer.check()

    def decode(self, start: int, stop: int) -> Any:
        """Decode elements of the buffer, whose payload may have been summed with the same index.

        Args:
            start: First flat element.
            stop: One past the last.

        Returns:
            Shape ``(stop - start,)``.

        Raises:
            FormatError: If the payload is damaged; on a GPU by ``check()``.
        """
        if self._device is None or self._work is None:
            return decode(self.buffer.array, start=start, stop=stop)
        torch = importlib.import_module("torch")
        kind = getattr(torch, self.plan.dtype.name)
        out = torch.empty(stop - start, dtype=kind, device=self._work.device)
        options = {"add": False, "peeled": True}
        self._device.decode_into(self.buffer, out, self._work, start, stop, **options)
        return out


def diagnosis_of(plan: Plan, counts: Sequence[int]) -> Diagnosis:
    """The values of ``Sketched.counts`` by name.

    Args:
        plan: ``Sketched.plan``.
        counts: The three numbers, on the host.
    """
    occupied, peeled, rounds = counts
    assert isinstance(plan.codec, Lhc)
    return Diagnosis(plan.codec, plan.dtype, plan.nelem, plan.chunk_nelem, occupied, peeled, rounds)


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
    """Choose a ratio that is safe for an index: ``codec`` itself, or one with a lower ratio.

    It counts bits and does not peel, so it takes no account of an index with a structure;
    ``Diagnosis`` does. Ranks with the same index choose the same.

    Args:
        codec: The codec lhc or its name.
        index: The agreed index: uint8, one bit per element.
        nelem: Number of elements.
        dtype: Element type of the tensor.
        ratios: Lower ratios to try, in falling order.
        chunks: Number of chunks.

    Returns:
        ``codec`` if the index is sparse enough, else the codec with the highest ratio for which it
        is and that does not store the tensor raw. None if there is no such ratio, and with the
        mapping "published": send the tensor uncompressed.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``codec`` is not lhc, or a ratio is not allowed.
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
    """Prepare an index so that ranks can combine it by a reduction of their transport.

    Args:
        index: The result of ``Codec.measure``: uint8, one dimension.
        mode: ``"or"``: the index itself, by bitwise OR. ``"4bit"``: half a byte per element, by
            SUM, for at most 15 ranks. ``"1bit"``: the index itself, by SUM, as in the paper;
            elements that several ranks have are lost from the agreed index, and others may appear
            (TAGC, section 2.2).
        world_size: Number of ranks.

    Returns:
        The bytes to reduce, uint8 (a tensor on the device of ``index`` for PyTorch, else a NumPy
        array), and the operation.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the mode is unknown, the index has another dtype or shape, or the mode does
            not allow so many ranks.
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
    """The index, for ``stats``, from the reduced bytes of ``index_to_reduce``.

    With ``"1bit"`` it may lack elements that are not zero, which ``encode`` refuses: set them to
    zero first, and keep them for the next step.

    Args:
        reduced: The reduced bytes: uint8, one dimension.
        mode: As in ``index_to_reduce``.

    Returns:
        uint8, one bit per element, in the library and on the device of ``reduced``.

    Raises:
        ValueError: If the mode is unknown, or half bytes do not make a whole index.
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
