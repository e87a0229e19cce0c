"""Encoding and decoding of whole buffers in host memory, chunk by chunk.

Result records, raw fallback, checksums and every check that is the same for all codecs stand here;
codec modules see one chunk at a time. They compute in the default floating-point mode, whatever
that of the caller; infinities and subnormals are ordinary there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .codecs.common.base import Bits, Bytes, Chunk, ChunkResult, Key, Plan, tail_problem
from .codecs.common.float_mode import default_floats
from .formats.checksum import MASK64, ordinal_terms, record_term
from .formats.errors import FormatError
from .formats.header import (
    ALIGN,
    ASSEMBLED,
    MAX_HEADER,
    MAX_NBYTES,
    OVERFLOW,
    RAW,
    RECORD,
    Header,
    align,
    parse_header,
)
from .formats.header import DEFAULT_MAX_NBYTES as DEFAULT_MAX_NBYTES
from .places import MANY_CHUNKS, Place, place_of, static_gaps
from .planning import backend_module, call_tiny, integer, is_tiny, kernels_known, plan_of_header
from .single_calls import (
    PACKED_RECORD,
    SingleCalls,
    end_of,
    fits_thread,
    is_quick,
    read_one,
    store_raw,
    sum_of_parts,
    write_one,
    write_quick,
)

MAX_CACHED_HEADER = 4096


def _chunk(plan: Plan, place: Place, i: int, data: Bytes, dynamic: Bytes, info: int = 0) -> Chunk:
    """As `Plan.chunk`."""
    return Chunk(
        plan.dtype,
        place.nelem,
        plan.layout.sections,
        data[place.static],
        dynamic,
        i,
        place.elements.start,
        plan.shape,
        info,
    )


def _any(data: Bytes) -> bool:
    """Whether a byte is not zero."""
    # For a few bytes NumPy takes longer to start.
    return bool(data.tobytes().strip(b"\0")) if data.size < 1 << 12 else bool(data.any())


@default_floats()
def encode_into(
    plan: Plan,
    bits: Bits,
    out: Bytes,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
    backend: str | None = None,
    base: Bits | None = None,
) -> None:
    """Encode `bits` (plan.nelem elements, 1-D, host) into `out` (uint8, plan.nbytes).

    `base` is that of plans that need one, like `bits`. `backend` None takes Numba, but see
    `call_tiny`.
    """
    encode_here(plan, bits, out, stats, key, threads, backend, base)


def encode_here(
    plan: Plan,
    bits: Bits,
    out: Bytes,
    stats: npt.NDArray[Any] | None,
    key: Key | None,
    threads: int,
    backend: str | None,
    base: Bits | None = None,
) -> None:
    """As `encode_into`, in the caller's floating-point mode."""
    if is_tiny(plan, backend):
        call_tiny(
            plan,
            "encode",
            lambda chosen: write_into(plan, bits, out, stats, key, threads, chosen, base),
        )
    else:
        write_into(plan, bits, out, stats, key, threads, backend, base)


def write_into(
    plan: Plan,
    bits: Bits,
    out: Bytes,
    stats: npt.NDArray[Any] | None,
    key: Key | None,
    threads: int,
    backend: str | None,
    base: Bits | None = None,
) -> None:
    """As `encode_here`, with no look at the size."""
    module = backend_module(plan.codec.name, backend)
    against = _base_of(plan, base)
    if stats is None and plan.codec.needs_stats:
        stats = plan.codec.measure(bits, plan.dtype)
    if fits_thread(plan, threads) and write_one(plan, module, bits, out, stats, key):
        return

    def encode(i: int, chunk: Chunk) -> ChunkResult:
        given = {} if against is None else {"base": against[place_of(plan, i).elements]}
        found: ChunkResult = module.encode_chunk(
            plan.codec, chunk, elements(i), stats=stats, key=key, threads=threads, **given
        )
        return found

    def elements(i: int) -> Bits:
        return bits[place_of(plan, i).elements]

    # One empty chunk is encoded; what is behind it are its copies.
    last = min(plan.filled_chunks + 1, plan.chunks)
    write_chunks(plan, out, module, range(last), encode, elements)


def _base_of(plan: Plan, base: Bits | None) -> Bits | None:
    """The base of plans that need one; ValueError if there is none."""
    if not plan.needs_base:
        return None
    if base is None:
        needed = f"{plan.dtype.name}{list(plan.shape)}"
        raise ValueError(f"{plan.codec.name} codes against a base. Needed: base, of {needed}")
    return base


def write_chunks(
    plan: Plan,
    out: Bytes,
    module: ModuleType,
    chunks: Sequence[int],
    encode: Callable[[int, Chunk], ChunkResult],
    elements: Callable[[int], Bits],
) -> None:
    """Write a buffer: `encode` encodes `chunks`, the others are copies of the first empty one.

    `elements` gives those of a chunk that is to be stored raw.
    """
    out[: plan.static_offset] = plan.head_bytes
    for i in chunks:
        place = place_of(plan, i)
        chunk = _chunk(plan, place, i, out, out[place.slot])
        for start, stop in place.gaps:
            chunk.static[start:stop] = 0
        result = encode(i, chunk)
        dynamic_nbytes, words_sum, flags = result.dynamic_nbytes, result.words_sum, 0
        raw_dynamic = place.raw_dynamic
        if plan.codec.raw_fallback and dynamic_nbytes > raw_dynamic:
            if raw_dynamic <= plan.dynamic_stride:
                flags, dynamic_nbytes, words_sum = RAW, raw_dynamic, None
                store_raw(elements(i).view(np.uint8), chunk.static, chunk.dynamic)
            else:
                flags, dynamic_nbytes = OVERFLOW, raw_dynamic
        elif dynamic_nbytes > plan.dynamic_stride:
            flags = OVERFLOW
        total = 0
        if plan.checksum and not flags & OVERFLOW:
            if words_sum is None:
                dynamic = chunk.dynamic[:dynamic_nbytes]
                words_sum = sum_of_parts(module, chunk.static, dynamic)
            total = (
                words_sum + place.identity_term + record_term(dynamic_nbytes, flags, i, result.info)
            )
        record_at = plan.header_bytes.size + i * RECORD.itemsize
        PACKED_RECORD.pack_into(
            out.data, record_at, total & MASK64, dynamic_nbytes, flags, i, result.info
        )
    if min(plan.filled_chunks + 1, plan.chunks) < plan.chunks:
        _repeat_empty(plan, out)


def _repeat_empty(plan: Plan, out: Bytes) -> None:
    """Copy the first empty chunk to all behind it: they differ in ordinal and checksum alone."""
    start = plan.header.nbytes
    records = out[start : start + RECORD.itemsize * plan.chunks].view(RECORD)
    statics = out[plan.static_offset : plan.dynamic_offset].reshape(plan.chunks, -1)
    slots = out[plan.dynamic_offset : plan.nbytes].reshape(plan.chunks, -1)
    first, others = plan.filled_chunks, slice(plan.filled_chunks + 1, None)
    statics[others] = statics[first]
    used = min(int(records["dynamic_nbytes"][first]), plan.dynamic_stride)
    slots[others, :used] = slots[first, :used]
    ordinals = np.arange(plan.chunks, dtype=np.uint64)
    records[others] = records[first]
    records["ordinal"] = ordinals
    if plan.checksum and not records["flags"][first] & OVERFLOW:
        terms = ordinal_terms(ordinals)
        records["checksum"][others] += terms[others] - terms[first]


class Record(NamedTuple):
    """One chunk's result record; specs/buffer.md, "Result records"."""

    checksum: int
    dynamic_nbytes: int
    flags: int
    ordinal: int
    info: int


@dataclass(eq=False, slots=True)
class Head:
    """Header and records of a buffer of `nbytes` bytes, checked; its payload need not be here.

    Nothing writes to it. A frozen class would take longer to make than a small buffer to check.
    """

    header: Header
    plan: Plan
    records: list[Record]
    dynamic_at: list[int]
    nbytes: int

    @property
    def packed_nbytes(self) -> int:
        """Size of the packed form."""
        return self.plan.dynamic_offset + sum(align(r.dynamic_nbytes) for r in self.records)

    @property
    def packed_header(self) -> Bytes:
        """The header of the packed form."""
        return np.frombuffer(replace(self.header, dynamic_stride=0).pack(), np.uint8)


@dataclass(eq=False, slots=True)
class Parsed(Head):
    """A whole buffer whose header, sizes and records have been checked; its payload has not."""

    data: Bytes

    def chunk(self, i: int) -> Chunk:
        """Bytes of chunk `i`."""
        record, at = self.records[i], self.dynamic_at[i]
        dynamic = self.data[at : at + record.dynamic_nbytes]
        return _chunk(self.plan, place_of(self.plan, i), i, self.data, dynamic, record.info)

    def distinct(self, chunks: range) -> Sequence[int]:
        """`chunks` without empty ones with the bytes of the first empty one, which is among them.

        What is found of that one holds for the others.
        """
        plan, first = self.plan, self.plan.filled_chunks
        if first not in chunks or chunks.stop == first + 1:
            return chunks
        start = self.header.nbytes
        records = self.data[start : start + RECORD.itemsize * plan.chunks].view(RECORD)
        one, others = records[first], records[first + 1 : chunks.stop]
        alike = (others["dynamic_nbytes"] == 0) & (one["dynamic_nbytes"] == 0)
        alike &= (others["flags"] == one["flags"]) & (others["info"] == one["info"])
        if plan.checksum:
            here = records[first : chunks.stop]
            sums = here["checksum"] - ordinal_terms(here["ordinal"].astype(np.uint64))
            alike &= sums[1:] == sums[0]
        statics = self.data[plan.static_offset : plan.dynamic_offset].view(np.uint64)
        rows = statics.reshape(plan.chunks, -1)[first : chunks.stop]
        alike &= (rows[1:] == rows[0]).all(axis=1)
        differ = np.flatnonzero(~alike) + first + 1
        return [*range(chunks.start, first + 1), *differ.tolist()]

    def pieces(self) -> Iterator[Bytes]:
        """The canonical bytes, piece by piece and mostly without copies."""
        plan, size = self.plan, self.header.nbytes
        yield self.packed_header
        yield self.data[size : plan.dynamic_offset]
        for record, at in zip(self.records, self.dynamic_at, strict=True):
            if record.dynamic_nbytes:
                yield self.data[at : at + record.dynamic_nbytes]
                yield np.zeros(-record.dynamic_nbytes % ALIGN, np.uint8)

    def pack(self) -> Bytes:
        """The canonical bytes: dynamic parts close up, padding is zero."""
        return np.concatenate(list(self.pieces()))


def encode_packed(
    plan: Plan,
    bits: Bits,
    out: Bytes,
    threads: int = 1,
    backend: str | None = None,
    base: Bits | None = None,
) -> int:
    """Encode `bits` as `encode_into` does and pack the buffer where it is: its packed size."""
    if base is None and is_quick(plan, threads, backend) and write_quick(plan, bits, out):
        header = packed_plan(plan).header_bytes
        out[: header.size] = header
        end = end_of(plan, out)
        out[end : align(end)] = 0
        return align(end)
    encode_into(plan, bits, out, threads=threads, backend=backend, base=base)
    parsed = parse(out, MAX_NBYTES)
    out[: parsed.header.nbytes] = parsed.packed_header
    end = plan.dynamic_offset
    for record, at in zip(parsed.records, parsed.dynamic_at, strict=True):
        used, size = record.dynamic_nbytes, align(record.dynamic_nbytes)
        if at != end:
            out[end : end + used] = out[at : at + used]
        out[end + used : end + size] = 0
        end += size
    return end


def packed_plan(plan: Plan) -> Plan:
    """The plan of the packed form of buffers of `plan`."""
    found: Plan | None = plan.__dict__.get("_packed")
    if found is None:
        header = replace(plan.header, dynamic_stride=0)
        found = plan.__dict__["_packed"] = _header_and_plan(
            np.frombuffer(header.pack(), np.uint8), header.nbytes
        )[1]
    return found


def parse(data: Bytes, max_nbytes: int = DEFAULT_MAX_NBYTES) -> Parsed:
    """Check header, sizes and records of the buffer in `data` (uint8, 1-D). Raises FormatError.

    Nothing is allocated for the tensor. The order of the checks is that of specs/buffer.md.
    """
    if data.__array_interface__["data"][0] % 8:
        data = data.copy()
    head = parse_head(lambda nbytes: data, data.size, max_nbytes)
    return Parsed(head.header, head.plan, head.records, head.dynamic_at, head.nbytes, data)


def parse_as(plan: Plan, data: Bytes) -> Parsed:
    """As `parse`, of a buffer of `plan`. Raises FormatError."""
    one: SingleCalls | None = plan.__dict__.get("_one")
    if one is not None and data.size == plan.nbytes and plan.checksum:
        head, at = data[: plan.static_offset].tobytes(), len(one.header)
        record = Record._make(PACKED_RECORD.unpack_from(head, at))
        _, dynamic_nbytes, flags, ordinal, info = record
        # Anything else is looked at closely.
        usual = head.startswith(one.header) and head.endswith(one.padding)
        usual = usual and not (flags or ordinal or info) and dynamic_nbytes <= one.most
        if usual and data.__array_interface__["data"][0] % 8 == 0:
            places = [plan.dynamic_offset]
            return Parsed(plan.header, plan, [record], places, data.size, data)
    parsed = parse(data, MAX_NBYTES)
    check_plan(parsed, plan)
    return parsed


def parse_head(read: Callable[[int], Bytes], nbytes: int, max_nbytes: int) -> Head:
    """As `parse`, of a buffer of `nbytes` bytes whose payload is not read.

    `read(n)` gives its first n bytes or more (all, if there are fewer), aligned to 8.
    """
    head = read(MAX_CACHED_HEADER)
    header_nbytes = int.from_bytes(head[8:12].tobytes(), "little")
    if head.size < min(header_nbytes, nbytes) and header_nbytes <= MAX_HEADER:
        head = read(header_nbytes)
    header, plan = _header_and_plan(head, header_nbytes)
    check_limit(plan, max_nbytes)
    if nbytes < plan.dynamic_offset:
        detail = f"{nbytes} bytes, the static parts end at {plan.dynamic_offset}"
        raise FormatError("truncated", detail)
    if head.size < plan.static_offset:
        head = read(plan.static_offset)
    records_end = header_nbytes + RECORD.itemsize * plan.chunks
    if plan.chunks == 1:
        records = [Record(*PACKED_RECORD.unpack_from(head.data, header_nbytes))]
        _check_records(header, plan, ((0, records[0]),))
    else:
        table = head[header_nbytes:records_end].view(RECORD)
        records = list(map(Record._make, table.tolist()))
        _check_records(header, plan, [(i, records[i]) for i in _notable(plan, table)])
    sizes = [header.dynamic_stride or align(r.dynamic_nbytes) for r in records]
    *dynamic_at, end = itertools.accumulate(sizes, initial=plan.dynamic_offset)
    if nbytes < end:
        raise FormatError("truncated", f"{nbytes} bytes, the buffer has {end}")
    if nbytes > end:
        raise FormatError("trailing_bytes", f"{nbytes} bytes, the buffer ends at {end}")
    if _any(head[records_end : plan.static_offset]):
        raise FormatError("reserved_not_zero", "padding after the records")
    return Head(header, plan, records, dynamic_at, nbytes)


def check_limit(plan: Plan, max_nbytes: int) -> None:
    """FormatError if the tensor has more than `max_nbytes` bytes."""
    tensor_nbytes = plan.nelem * plan.dtype.itemsize
    if tensor_nbytes > max_nbytes:
        raise FormatError("limit_exceeded", f"{tensor_nbytes} bytes, max_nbytes is {max_nbytes}")


def check_plan(head: Head, plan: Plan) -> None:
    """FormatError if `head` is not that of a buffer of `plan`."""
    if head.plan is not plan and head.plan != plan:
        raise FormatError("bad_header", "the bytes are not a buffer of this plan")


def _header_and_plan(head: Bytes, nbytes: int) -> tuple[Header, Plan]:
    if 32 <= nbytes <= min(head.size, MAX_CACHED_HEADER):
        return _cached_header_and_plan(head[:nbytes].tobytes())
    header = parse_header(head.data)
    return header, plan_of_header(header)


@functools.lru_cache(maxsize=1024)
def _cached_header_and_plan(data: bytes) -> tuple[Header, Plan]:
    header = parse_header(memoryview(data))
    return header, plan_of_header(header)


def _notable(plan: Plan, table: npt.NDArray[Any]) -> Sequence[int]:
    """Numbers of the records that may be bad: those of many empty chunks say nothing."""
    if table.size < MANY_CHUNKS:
        return range(table.size)
    found = table["ordinal"] != np.arange(table.size)
    for field in ("dynamic_nbytes", "flags", "info", *(() if plan.checksum else ("checksum",))):
        found |= table[field] != 0
    numbers: list[int] = np.flatnonzero(found).tolist()
    return numbers


def _check_records(header: Header, plan: Plan, numbered: Sequence[tuple[int, Record]]) -> None:
    for _, r in numbered:
        if r.flags & ~(RAW | OVERFLOW):
            raise FormatError("bad_record", "unknown flags")
    for i, r in numbered:
        if r.flags & OVERFLOW:
            detail = (
                f"chunk {i} needs {r.dynamic_nbytes} dynamic bytes, has {header.dynamic_stride}"
            )
            raise FormatError("dynamic_overflow", detail)
    assembled = header.required & ASSEMBLED
    for i, r in numbered:
        if r.checksum and not plan.checksum:
            raise FormatError(
                "bad_record", f"chunk {i} has a checksum in a buffer without checksums"
            )
        if r.info and not plan.codec.uses_info:
            raise FormatError("bad_record", f"info of chunk {i} is not zero")
        if r.ordinal != i and not assembled:
            raise FormatError("bad_record", f"chunk {i} was encoded as chunk {r.ordinal}")
        raw_dynamic = place_of(plan, i).raw_dynamic
        fallback = plan.codec.raw_fallback
        if r.flags & RAW and (not fallback or r.dynamic_nbytes != raw_dynamic):
            raise FormatError(
                "bad_record", f"chunk {i} as raw with {r.dynamic_nbytes} dynamic bytes"
            )
        bound = raw_dynamic if fallback else plan.layout.dynamic_bound
        if header.dynamic_stride:
            bound = min(bound, header.dynamic_stride)
        if r.dynamic_nbytes > bound:
            detail = f"chunk {i} has {r.dynamic_nbytes} dynamic bytes, at most {bound}"
            raise FormatError("bad_record", detail)


def selection(plan: Plan, start: int | None, stop: int | None) -> tuple[int, int, tuple[int, ...]]:
    """First and past-the-last flat element of a selection, and the shape of its result."""
    lo = 0 if start is None else integer("start", start)
    hi = plan.nelem if stop is None else integer("stop", stop)
    if not 0 <= lo <= hi <= plan.nelem:
        raise ValueError(f"start={start}, stop={stop}; allowed: 0 <= start <= stop <= {plan.nelem}")
    return lo, hi, plan.shape if start is None and stop is None else (hi - lo,)


def decode_small(
    data: Bytes, max_nbytes: int, empty: Callable[[int], Bytes]
) -> tuple[Plan, Bits] | None:
    """Plan and elements of a packed buffer, checked, of which a single call decodes all.

    `empty` gives so many bytes for the elements. None where a single call does not do, also for bad
    bytes: `parse` and `decode_range` say what is wrong.
    """
    size = int.from_bytes(data[8:12].tobytes(), "little")
    if not 32 <= size <= min(data.size - RECORD.itemsize, MAX_CACHED_HEADER):
        return None
    found = _small(data[:size].tobytes())
    if found is None or data.__array_interface__["data"][0] % 8:
        return None
    plan, decode, identity = found
    if is_tiny(plan, None) and not kernels_known(plan, "decode"):
        return None
    checksum, dynamic_nbytes, *others = PACKED_RECORD.unpack_from(data.data, size)
    nbytes = plan.nelem * plan.dtype.itemsize
    if any(others) or nbytes > max_nbytes or dynamic_nbytes > plan.raw_dynamic(0):
        return None
    if data.size != plan.dynamic_offset + align(dynamic_nbytes):
        return None
    bits = empty(nbytes).view(plan.dtype.bits)
    words_sum = decode(data, bits, dynamic_nbytes)
    if words_sum is None:
        return None
    total = words_sum + identity + record_term(dynamic_nbytes, 0, 0, 0)
    return (plan, bits) if total & MASK64 == checksum else None


@functools.lru_cache(maxsize=1024)
def _small(header_bytes: bytes) -> tuple[Plan, Callable[..., int | None], int] | None:
    """Plan, decoder and identity term of buffers with this header, None if there is no decoder."""
    try:
        header, plan = _cached_header_and_plan(header_bytes)
    except FormatError:
        return None
    module = backend_module(plan.codec.name, None)
    if header.dynamic_stride or not plan.checksum or not hasattr(module, "buffer_decoder"):
        return None
    gaps = [(header.nbytes + RECORD.itemsize * plan.chunks, plan.static_offset)]
    sections = plan.layout.sections
    for lo, hi in static_gaps(plan.codec, plan.dtype, plan.nelem, sections, False):
        gaps.append((plan.static_offset + lo, plan.static_offset + hi))
    decode = module.buffer_decoder(plan, np.array(gaps, np.int64))
    return None if decode is None else (plan, decode, plan.identity_term(0))


def touched_chunks(plan: Plan, start: int, stop: int) -> range:
    """Chunks that hold flat elements `start` to `stop`; of a whole tensor all, the empty too."""
    if stop - start == plan.nelem:
        return range(plan.chunks)
    if start == stop:
        return range(0)
    size = plan.chunk_nelem
    return range(start // size, -(-stop // size))


@default_floats()
def decode_range(
    parsed: Parsed,
    out: Bits,
    start: int,
    *,
    verify: bool | None = None,
    threads: int = 1,
    backend: str | None = None,
    base: Bits | None = None,
) -> None:
    """Decode flat elements `start` to `start + out.size` into `out` (bits, 1-D).

    With `verify` every chunk touched is checked whole: checksum, then padding, then payload. None
    does so for chunks that are decoded whole; of the others the payload is checked as far as
    specs/buffer.md, "Partial decoding", says. `backend` None takes Numba, but see `call_tiny`.
    `base` is that of plans that need one: all elements of the tensor, perhaps the memory of `out`.
    """
    decode_here(parsed, out, start, verify, threads, backend, base)


def decode_here(
    parsed: Parsed,
    out: Bits,
    start: int,
    verify: bool | None,
    threads: int,
    backend: str | None,
    base: Bits | None = None,
) -> None:
    """As `decode_range`, in the caller's floating-point mode."""
    if is_tiny(parsed.plan, backend):
        call_tiny(
            parsed.plan,
            "decode",
            lambda chosen: read_range(parsed, out, start, verify, threads, chosen, base),
        )
    else:
        read_range(parsed, out, start, verify, threads, backend, base)


def read_range(
    parsed: Parsed,
    out: Bits,
    start: int,
    verify: bool | None,
    threads: int,
    backend: str | None,
    base: Bits | None = None,
) -> None:
    """As `decode_here`, with no look at the size."""
    plan = parsed.plan
    stop = start + out.size
    against = _base_of(plan, base)
    if against is not None:
        from . import against_base

        chunks = parsed.distinct(touched_chunks(plan, start, stop))
        against_base.read(parsed, chunks, out, start, against, verify, threads, backend)
        return
    if out.size == plan.nelem and verify is not False and fits_thread(plan, threads):
        module = backend_module(plan.codec.name, backend)
        if read_one(parsed, module, out):
            return
    for i in parsed.distinct(touched_chunks(plan, start, stop)):
        elements = place_of(plan, i).elements
        lo, hi = elements.start, elements.stop
        first = max(start, lo)
        last = max(min(stop, hi), first)
        target = out[first - start : last - start]
        check = (first, last) == (lo, hi) if verify is None else verify
        _decode_chunk(
            parsed, i, target, first, last, verify=check, threads=threads, backend=backend
        )


def _decode_chunk(
    parsed: Parsed,
    i: int,
    target: Bits,
    first: int,
    last: int,
    *,
    verify: bool,
    threads: int,
    backend: str | None = None,
) -> None:
    """Decode flat elements `first` to `last`, all of chunk `i`, into `target`."""
    plan = parsed.plan
    elements = place_of(plan, i).elements
    lo, hi = elements.start, elements.stop
    if verify and (first, last) != (lo, hi):
        whole = np.empty((hi - lo) * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
        _decode_chunk(parsed, i, whole, lo, hi, verify=True, threads=threads, backend=backend)
        target[:] = whole[first - lo : last - lo]
        return
    module = backend_module(plan.codec.name, backend)
    chunk = parsed.chunk(i)
    raw = bool(parsed.records[i].flags & RAW)
    problem = None
    words_sum = None
    if raw:
        load_raw(chunk, target.view(np.uint8), (first - lo) * plan.dtype.itemsize)
    else:
        problem, words_sum = module.decode_chunk(
            plan.codec, chunk, target, first - lo, threads=threads
        )
        if last == hi:
            problem = problem or tail_problem(plan.codec, chunk)
    if verify:
        if plan.checksum:
            if words_sum is None:
                words_sum = sum_of_parts(module, chunk.static, chunk.dynamic)
            _check_sum(parsed, i, words_sum)
        _check_padding(parsed, i, chunk, raw)
    raise_problem(i, problem)


def raise_problem(i: int, problem: str | None) -> None:
    """FormatError if there is a problem with chunk `i`."""
    if problem is not None:
        raise FormatError("bad_payload", f"chunk {i}: {problem}")


def check_chunk(parsed: Parsed, i: int, module: ModuleType) -> None:
    """Checksum and padding of chunk `i`."""
    chunk = parsed.chunk(i)
    if parsed.plan.checksum:
        _check_sum(parsed, i, sum_of_parts(module, chunk.static, chunk.dynamic))
    _check_padding(parsed, i, chunk, bool(parsed.records[i].flags & RAW))


def decode_add(parsed: Parsed, acc: npt.NDArray[Any], *, threads: int = 1) -> bool:
    """See `host_sums.decode_add`."""
    from . import host_sums

    return host_sums.decode_add(parsed, acc, threads=threads)


def check_chunks(parsed: Parsed) -> None:
    """Checksum and padding of every chunk. Raises FormatError."""
    module = backend_module(parsed.plan.codec.name, None)
    for i in parsed.distinct(range(parsed.plan.chunks)):
        check_chunk(parsed, i, module)


def check_before_writing(parsed: Parsed, start: int, stop: int, verify: bool | None) -> None:
    """What `decode_range` checks of a buffer of raw, before it writes to what may be a base."""
    module = backend_module(parsed.plan.codec.name, None)
    for i in parsed.distinct(touched_chunks(parsed.plan, start, stop)):
        lo, hi = parsed.plan.chunk_range(i)
        if verify or (start <= lo and hi <= stop):
            check_chunk(parsed, i, module)


def seal(plan: Plan, data: Bytes) -> None:
    """Write the checksum of every chunk anew; for plans without dynamic parts or raw chunks."""
    module = backend_module(plan.codec.name, None)
    start = plan.header.nbytes
    records = data[start : start + RECORD.itemsize * plan.chunks].view(RECORD)
    for i in range(plan.chunks):
        place = place_of(plan, i)
        total = sum_of_parts(module, data[place.static], data[:0]) + place.identity_term
        total += record_term(0, 0, int(records["ordinal"][i]), int(records["info"][i]))
        records["checksum"][i] = total & MASK64


@default_floats()
def verify_chunks(
    parsed: Parsed,
    threads: int = 1,
    backend: str | None = None,
    out: Bytes | None = None,
    base: Bits | None = None,
) -> None:
    """Check every chunk whole, in memory for one decoded chunk, `out` if given.

    Of plans that need a base checksums and padding alone are checked if there is no `base`. Raises
    FormatError.
    """
    plan = parsed.plan
    if plan.needs_base:
        from . import against_base

        if base is None:
            check_chunks(parsed)
        else:
            against_base.verify(parsed, base, threads, backend)
        return
    decoded = (np.empty(chunk_nbytes(plan), np.uint8) if out is None else out).view(plan.dtype.bits)
    for i in parsed.distinct(range(plan.chunks)):
        lo, hi = plan.chunk_range(i)
        target = decoded[: hi - lo]
        _decode_chunk(parsed, i, target, lo, hi, verify=True, threads=threads, backend=backend)


def chunk_nbytes(plan: Plan) -> int:
    """Bytes of the largest chunk, decoded."""
    return plan.chunk_nelem * plan.dtype.itemsize


def _check_sum(parsed: Parsed, i: int, words_sum: int) -> None:
    r = parsed.records[i]
    total = words_sum + place_of(parsed.plan, i).identity_term
    total += record_term(r.dynamic_nbytes, r.flags, r.ordinal, r.info)
    if total & MASK64 != r.checksum:
        raise FormatError("checksum_mismatch", f"payload of chunk {i}")


def _check_padding(parsed: Parsed, i: int, chunk: Chunk, raw: bool) -> None:
    plan = parsed.plan
    gaps = place_of(plan, i).gaps
    if raw:
        gaps = static_gaps(plan.codec, plan.dtype, chunk.nelem, chunk.sections, True)
    for start, stop in gaps:
        if _any(chunk.static[start:stop]):
            raise FormatError("reserved_not_zero", f"padding in the static part of chunk {i}")
    if not parsed.header.dynamic_stride:
        end = parsed.dynamic_at[i] + chunk.dynamic.size
        if _any(parsed.data[end : align(end)]):
            raise FormatError("reserved_not_zero", f"padding in the dynamic part of chunk {i}")


def load_raw(chunk: Chunk, target: Bytes, start: int) -> None:
    """Bytes of a chunk stored raw, from number `start` on, to `target`."""
    stop = start + target.size
    cut = chunk.static.size
    from_static = max(0, min(stop, cut) - start)
    target[:from_static] = chunk.static[start : start + from_static]
    at = max(start, cut) - cut
    target[from_static:] = chunk.dynamic[at : at + target.size - from_static]
