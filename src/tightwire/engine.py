"""Encoding and decoding of whole buffers in host memory, chunk by chunk.

Result records, raw fallback, checksums and every check that is the same for all codecs stand here;
codec modules see one chunk at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from .codecs.base import Bits, Bytes, Chunk, Key, Plan
from .formats import checksum as checksum_ref
from .formats.checksum import MASK64, record_term
from .formats.errors import FormatError
from .formats.header import (
    ASSEMBLED,
    OVERFLOW,
    RAW,
    RECORD,
    Header,
    align,
    parse_header,
)
from .planning import backend_module, plan_of_header

_RECORD = struct.Struct("<QQIIQ")
DEFAULT_MAX_NBYTES = 64 << 30


def _summer(module: ModuleType) -> Callable[..., int]:
    """The checksum function that goes with a codec's backend module."""
    if module.__name__.endswith("_cpu"):
        from .formats import checksum_cpu

        return checksum_cpu.words_sum  # type: ignore[no-any-return]
    return checksum_ref.words_sum


def _chunk_sum(module: ModuleType, chunk: Chunk) -> int:
    words_sum = _summer(module)
    return words_sum(chunk.static) + words_sum(chunk.dynamic, chunk.static.size // 4)


def _used_ranges(module: ModuleType, plan: Plan, chunk: Chunk, raw: bool) -> list[tuple[int, int]]:
    if raw:
        return [(0, min(chunk.nelem * plan.dtype.itemsize, chunk.static.size))]
    used: list[tuple[int, int]] = backend_module(plan.codec.name, "ref").static_used(chunk)
    return used


def _gaps(used: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    starts = [0, *(hi for _, hi in used)]
    stops = [*(lo for lo, _ in used), size]
    return [(lo, hi) for lo, hi in zip(starts, stops, strict=True) if lo < hi]


def encode_into(
    plan: Plan,
    bits: Bits,
    out: Bytes,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
    backend: str | None = None,
) -> None:
    """Encode `bits` (plan.nelem elements, 1-D, host) into `out` (uint8, plan.nbytes)."""
    module = backend_module(plan.codec.name, backend)
    header = plan.header_bytes
    out[: header.size] = header
    out[header.size + RECORD.itemsize * plan.chunks : plan.static_offset] = 0
    if stats is None:
        stats = plan.codec.measure(bits, plan.dtype)
    for i in range(plan.chunks):
        lo, hi = plan.chunk_range(i)
        static_at = plan.static_offset + i * plan.static_stride
        slot_at = plan.dynamic_offset + i * plan.dynamic_stride
        chunk = Chunk(
            plan.dtype,
            hi - lo,
            plan.layout.sections,
            out[static_at : static_at + plan.static_stride],
            out[slot_at : slot_at + plan.dynamic_stride],
        )
        for start, stop in _gaps(_used_ranges(module, plan, chunk, False), plan.static_stride):
            chunk.static[start:stop] = 0
        result = module.encode_chunk(
            plan.codec, chunk, bits[lo:hi], stats=stats, key=key, threads=threads
        )
        dynamic_nbytes, words_sum, flags = result.dynamic_nbytes, result.words_sum, 0
        raw_nbytes = (hi - lo) * plan.dtype.itemsize
        raw_dynamic = max(0, raw_nbytes - plan.static_stride)
        if plan.codec.raw_fallback and dynamic_nbytes > raw_dynamic:
            if raw_dynamic <= plan.dynamic_stride:
                flags, dynamic_nbytes, words_sum = RAW, raw_dynamic, None
                _store_raw(bits[lo:hi].view(np.uint8), chunk)
            else:
                flags = OVERFLOW
        elif dynamic_nbytes > plan.dynamic_stride:
            flags = OVERFLOW
        total = 0
        if plan.checksum and not flags & OVERFLOW:
            if words_sum is None:
                words_sum = _chunk_sum(
                    module, chunk._replace(dynamic=chunk.dynamic[:dynamic_nbytes])
                )
            total = words_sum + plan.identity_term(i) + record_term(dynamic_nbytes, flags, i)
        record_at = header.size + i * RECORD.itemsize
        _RECORD.pack_into(
            out, record_at, total & MASK64, dynamic_nbytes, flags, i, result.info
        )


def _store_raw(data: Bytes, chunk: Chunk) -> None:
    cut = min(data.size, chunk.static.size)
    chunk.static[:cut] = data[:cut]
    chunk.static[cut:] = 0
    chunk.dynamic[: data.size - cut] = data[cut:]


@dataclass(frozen=True)
class Parsed:
    """A buffer whose header, sizes and records have been checked; its payload has not."""

    header: Header
    plan: Plan
    data: Bytes
    records: npt.NDArray[Any]
    dynamic_at: npt.NDArray[np.int64]

    def chunk(self, i: int) -> Chunk:
        """Bytes of chunk `i`."""
        plan = self.plan
        lo, hi = plan.chunk_range(i)
        static_at = plan.static_offset + i * plan.static_stride
        dynamic_at = int(self.dynamic_at[i])
        used = int(self.records["dynamic_nbytes"][i])
        return Chunk(
            plan.dtype,
            hi - lo,
            plan.layout.sections,
            self.data[static_at : static_at + plan.static_stride],
            self.data[dynamic_at : dynamic_at + used],
        )

    @property
    def packed_nbytes(self) -> int:
        """Size of the packed form."""
        used = self.records["dynamic_nbytes"].astype(np.int64)
        return self.plan.dynamic_offset + int((-(-used // 128) * 128).sum())

    def pack(self) -> Bytes:
        """The canonical bytes: dynamic parts close up, padding is zero."""
        plan, size = self.plan, self.header.nbytes
        out = np.zeros(self.packed_nbytes, np.uint8)
        packed_header = _repacked(self.header)
        out[:size] = np.frombuffer(packed_header, np.uint8)
        out[size : plan.dynamic_offset] = self.data[size : plan.dynamic_offset]
        at = plan.dynamic_offset
        for i in range(plan.chunks):
            dynamic = self.chunk(i).dynamic
            out[at : at + dynamic.size] = dynamic
            at += align(dynamic.size)
        return out


def _repacked(header: Header) -> bytes:
    from dataclasses import replace

    return replace(header, dynamic_stride=0).pack()


def parse(data: Bytes, max_nbytes: int = DEFAULT_MAX_NBYTES) -> Parsed:
    """Check header, sizes and records of the buffer in `data` (uint8, 1-D). Raises FormatError.

    Nothing is allocated for the tensor. The order of the checks is that of specs/buffer.md.
    """
    if data.__array_interface__["data"][0] % 8:
        data = data.copy()
    header = parse_header(memoryview(data))
    plan = plan_of_header(header)
    tensor_nbytes = plan.nelem * plan.dtype.itemsize
    if tensor_nbytes > max_nbytes:
        raise FormatError("limit_exceeded", f"tensor of {tensor_nbytes} bytes, max_nbytes={max_nbytes}")
    if data.size < plan.dynamic_offset:
        raise FormatError("truncated", f"{data.size} bytes, the static parts end at {plan.dynamic_offset}")
    records_end = header.nbytes + RECORD.itemsize * plan.chunks
    records = data[header.nbytes : records_end].view(RECORD)
    _check_records(header, plan, records)
    used = records["dynamic_nbytes"].astype(np.int64)
    if header.dynamic_stride:
        at = plan.dynamic_offset + np.arange(plan.chunks, dtype=np.int64) * header.dynamic_stride
        end = plan.dynamic_offset + plan.chunks * header.dynamic_stride
    else:
        ends = plan.dynamic_offset + (-(-used // 128) * 128).cumsum()
        at = np.concatenate(([plan.dynamic_offset], ends[:-1]))
        end = int(ends[-1])
    if data.size < end:
        raise FormatError("truncated", f"{data.size} bytes, the buffer has {end}")
    if data.size > end:
        raise FormatError("trailing_bytes", f"{data.size} bytes, the buffer ends at {end}")
    if data[records_end : plan.static_offset].any():
        raise FormatError("reserved_not_zero", "padding after the records")
    return Parsed(header, plan, data, records, at)


def _check_records(header: Header, plan: Plan, records: npt.NDArray[Any]) -> None:
    flags = records["flags"]
    if (flags & ~np.uint32(RAW | OVERFLOW)).any():
        raise FormatError("bad_record", "unknown flags")
    if (flags & OVERFLOW).any():
        first = int(np.flatnonzero(flags & OVERFLOW)[0])
        need = int(records["dynamic_nbytes"][first])
        have = header.dynamic_stride
        raise FormatError("dynamic_overflow", f"chunk {first} needs {need} dynamic bytes, has {have}")
    if not plan.checksum and records["checksum"].any():
        raise FormatError("bad_record", "a checksum in a buffer without checksums")
    if records["info"].any():
        raise FormatError("bad_record", f"{plan.codec.name} leaves the info field zero")
    ordinals = np.arange(plan.chunks, dtype=np.uint32)
    if not header.required & ASSEMBLED and (records["ordinal"] != ordinals).any():
        raise FormatError("bad_record", "chunks are not in their order")
    lengths = np.full(plan.chunks, plan.chunk_nelem, np.int64)
    whole = plan.nelem // plan.chunk_nelem if plan.chunk_nelem else plan.chunks
    lengths[whole : whole + 1] = plan.nelem - whole * plan.chunk_nelem
    lengths[whole + 1 :] = 0
    raw_dynamic = np.maximum(lengths * plan.dtype.itemsize - plan.static_stride, 0)
    used = records["dynamic_nbytes"]
    raw = (flags & RAW) != 0
    if raw.any() and not plan.codec.raw_fallback:
        raise FormatError("bad_record", f"{plan.codec.name} has no raw fallback")
    bound = raw_dynamic if plan.codec.raw_fallback else np.int64(plan.layout.dynamic_bound)
    if (used > np.uint64(1 << 62)).any() or (used.astype(np.int64) > bound).any():
        raise FormatError("bad_record", "more dynamic bytes than a chunk can need")
    if (used.astype(np.int64)[raw] != raw_dynamic[raw]).any():
        raise FormatError("bad_record", "dynamic bytes of a raw chunk")
    if header.dynamic_stride and (used > np.uint64(header.dynamic_stride)).any():
        raise FormatError("bad_record", "more dynamic bytes than the slot has")


def decode_range(
    parsed: Parsed,
    out: Bits,
    start: int,
    *,
    verify: bool,
    threads: int = 1,
    backend: str | None = None,
) -> None:
    """Decode flat elements `start` to `start + out.size` into `out` (bits, 1-D).

    With `verify` every chunk touched is checked whole: checksum, then padding, then payload.
    """
    plan = parsed.plan
    module = backend_module(plan.codec.name, backend)
    stop = start + out.size
    if plan.chunk_nelem == 0:
        touched = range(plan.chunks) if verify else range(0)
    elif start == 0 and stop == plan.nelem:
        touched = range(plan.chunks)
    else:
        touched = range(start // plan.chunk_nelem, -(-stop // plan.chunk_nelem))
    for i in touched:
        lo, hi = plan.chunk_range(i)
        chunk = parsed.chunk(i)
        first, last = max(start, lo), max(min(stop, hi), max(start, lo))
        target = out[first - start : last - start]
        _, _, flags, ordinal, _ = parsed.records[i].item()
        whole = target.size == hi - lo
        if verify and not whole:
            _check_sum(parsed, i, _chunk_sum(module, chunk))
        problem = None
        words_sum = None
        if flags & RAW:
            _load_raw(chunk, target.view(np.uint8), (first - lo) * plan.dtype.itemsize)
        else:
            problem, words_sum = module.decode_chunk(
                plan.codec, chunk, target, first - lo, threads=threads
            )
        if verify:
            if whole:
                if words_sum is None and plan.checksum:
                    words_sum = _chunk_sum(module, chunk)
                _check_sum(parsed, i, words_sum or 0)
            _check_padding(parsed, i, chunk, module, bool(flags & RAW))
        if problem is not None:
            raise FormatError("bad_payload", f"chunk {i}: {problem}")


def _check_sum(parsed: Parsed, i: int, words_sum: int) -> None:
    if not parsed.plan.checksum:
        return
    found, dynamic_nbytes, flags, ordinal, _ = parsed.records[i].item()
    total = words_sum + parsed.plan.identity_term(i) + record_term(dynamic_nbytes, flags, ordinal)
    if total & MASK64 != found:
        raise FormatError("checksum_mismatch", f"payload of chunk {i}")


def _check_padding(parsed: Parsed, i: int, chunk: Chunk, module: ModuleType, raw: bool) -> None:
    used = _used_ranges(module, parsed.plan, chunk, raw)
    for start, stop in _gaps(used, chunk.static.size):
        if chunk.static[start:stop].any():
            raise FormatError("reserved_not_zero", f"padding in the static part of chunk {i}")
    if not parsed.header.dynamic_stride:
        end = int(parsed.dynamic_at[i]) + chunk.dynamic.size
        if parsed.data[end : align(end)].any():
            raise FormatError("reserved_not_zero", f"padding in the dynamic part of chunk {i}")


def _load_raw(chunk: Chunk, target: Bytes, start: int) -> None:
    stop = start + target.size
    cut = chunk.static.size
    from_static = max(0, min(stop, cut) - start)
    target[:from_static] = chunk.static[start : start + from_static]
    at = max(start, cut) - cut
    target[from_static:] = chunk.dynamic[at : at + target.size - from_static]
