# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The frame of a buffer on a GPU: header, records, checksums, elements and status words.

Kernels never wait for the host. They put what they find wrong into a status word by an atomic
maximum; the host reads it when it reads the device anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ...formats import checksum
from ...formats.checksum import identity_term
from ...formats.errors import FormatError
from .base import Gap, Plan
from .launch_triton import Variant, kernel, options, program, programs, recorded_by

KEY_STEP = tl.constexpr(checksum.KEY_STEP)
F_NELEM = tl.constexpr(checksum.F_NELEM)
F_DYNAMIC = tl.constexpr(checksum.F_DYNAMIC)
F_FLAGS = tl.constexpr(checksum.F_FLAGS)

# A status word is STATUS_TOP minus (stage, chunk, kind): what comes first in the order of
# specs/buffer.md, "Reading", is the largest. Zero says that nothing was found.
STATUS_TOP = tl.constexpr(1 << 48)
HEADER = tl.constexpr(0 << 40)
PADDING = tl.constexpr(4 << 40)
FLAGS = tl.constexpr(1 << 40)
OVERFLOWED = tl.constexpr(2 << 40)
RECORD = tl.constexpr(3 << 40)
CHUNK = tl.constexpr(5 << 40)
#: What is looked for when all chunks have passed that.
LATE = tl.constexpr(6 << 40)
CHUNK_SUM = tl.constexpr(0)
CHUNK_PADDING = tl.constexpr(1)
CHUNK_PAYLOAD = tl.constexpr(2)
BASE_CHUNK = tl.constexpr(3)

_STAGES = ("bad_header", "bad_record", "dynamic_overflow", "bad_record", "reserved_not_zero")
_KINDS = ("checksum_mismatch", "reserved_not_zero", "bad_payload", "base_mismatch")


def problem(status: int) -> FormatError | None:
    """The error that a status word stands for, None for 0."""
    if status == 0:
        return None
    code = STATUS_TOP.value - status
    stage, chunk, kind = code >> 40, code >> 8 & 0xFFFFFFFF, code & 0xFF
    if stage < len(_STAGES):
        where = "the header or the padding behind the records" if stage in (0, 4) else "the record"
        return FormatError(_STAGES[stage], f"{where} of chunk {chunk}, found on the device")
    return FormatError(_KINDS[kind], f"payload of chunk {chunk}, found on the device")


@triton.jit
def key_of(index):
    """Checksum keys of word positions."""
    return index.to(tl.uint32) * KEY_STEP + 1


@triton.jit
def key_ahead(key, n):
    """Keys of the positions `n` words behind those of `key`."""
    return key + (key * 0 + n) * KEY_STEP


@triton.jit
def weigh(word, index):
    """Terms of the payload checksum: words (32 bits) at word positions `index`."""
    return word.to(tl.uint64) * key_of(index).to(tl.uint64)


@triton.jit
def weigh_bytes(value, at):
    """Terms of values of at most 16 bits that lie at byte position `at` and in one word."""
    shift = (at & 3).to(tl.uint32) * 8
    return weigh(value.to(tl.uint32) << shift, at >> 2)


@triton.jit
def weigh_from(value, key, ahead):
    """As `weigh_bytes`, for positions `ahead` (32 bits) behind the word that `key` belongs to."""
    shift = (ahead & 3).to(tl.uint32) * 8
    term = (value.to(tl.uint32) << shift).to(tl.uint64)
    return term * (key + (ahead >> 2).to(tl.uint32) * KEY_STEP).to(tl.uint64)


@triton.jit
def record_term(nelem, dynamic_nbytes, flags, ordinal):
    """Terms of a record's fields and of a chunk's number of elements."""
    both = flags.to(tl.uint64) | (ordinal.to(tl.uint64) << 32)
    total = nelem.to(tl.uint64) * F_NELEM + dynamic_nbytes.to(tl.uint64) * F_DYNAMIC
    return total + both * F_FLAGS


@triton.jit
def report(status_ptr, code):
    """Leave an error code; the first in the order of checks wins."""
    tl.atomic_max(status_ptr, tl.full([], STATUS_TOP, tl.int64) - code, sem="relaxed")


@triton.jit
def clear(ptr, start, stop, part, parts):
    """This program's share of clearing bytes `start` to `stop`."""
    at = start + part.to(tl.int64) * 1024
    while at < stop:
        i = at + tl.arange(0, 1024)
        tl.store(ptr + i, tl.zeros([1024], tl.uint8), mask=i < stop)
        at += parts.to(tl.int64) * 1024


@triton.jit
def padding_of(ptr, start, stop):
    """(checksum terms, OR of the bytes) of padding bytes `start` to `stop` of a static part."""
    return _gap(ptr, start, start, stop)


@triton.jit
def _gap(ptr, start, weighed, stop):
    """(checksum terms of bytes `weighed` to `stop`, OR of the bytes `start` to `stop`)."""
    total = tl.zeros([128], tl.uint64)
    any_set = tl.zeros([128], tl.int32)
    at = tl.minimum(start, weighed)
    while at < stop:
        i = at + tl.arange(0, 128)
        v = tl.load(ptr + i, mask=i < stop, other=0)
        total += tl.where(i >= weighed, weigh_bytes(v, i), 0)
        any_set |= tl.where(i >= start, v, 0).to(tl.int32)
        at += 128
    return tl.sum(total, 0), tl.max(any_set, 0)


@triton.jit
def float_of(v, EXP: tl.constexpr, ITEM: tl.constexpr):
    """float32 values of element bits."""
    if ITEM == 4:
        return v.to(tl.float32, bitcast=True)
    elif EXP == 8:
        return (v << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_element(out_ptr, at, v, use, EXP: tl.constexpr, ITEM: tl.constexpr, ADD: tl.constexpr):
    """Store, or add, elements one by one."""
    if ADD == 0:
        if ITEM == 1:
            tl.store(out_ptr.to(tl.pointer_type(tl.uint8)) + at, v.to(tl.uint8), mask=use)
        elif ITEM == 2:
            tl.store(out_ptr.to(tl.pointer_type(tl.uint16)) + at, v.to(tl.uint16), mask=use)
        else:
            tl.store(out_ptr.to(tl.pointer_type(tl.uint32)) + at, v, mask=use)
    else:
        add_to(accumulator(out_ptr, EXP, ADD) + at, float_of(v, EXP, ITEM), use, EXP, ADD)


@triton.jit
def accumulator(out_ptr, EXP: tl.constexpr, ADD: tl.constexpr):
    """`out_ptr` to what is added to: float32, float16, or the bits of bfloat16."""
    if ADD == 4:
        return out_ptr.to(tl.pointer_type(tl.float32))
    elif EXP == 8:
        return out_ptr.to(tl.pointer_type(tl.uint16))
    else:
        return out_ptr.to(tl.pointer_type(tl.float16))


@triton.jit
def add_to(acc, value, use, EXP: tl.constexpr, ADD: tl.constexpr):
    """Add `value` in float32 at `acc`, and round to the type there."""
    if use is None:
        old = tl.load(acc)
    else:
        old = tl.load(acc, mask=use, other=0)
    if ADD == 4:
        tl.store(acc, old + value, mask=use)
    elif EXP == 8:
        total = (old.to(tl.uint32) << 16).to(tl.float32, bitcast=True) + value
        tl.store(acc, round_bfloat16(total), mask=use)
    else:
        tl.store(acc, (old.to(tl.float32) + value).to(tl.float16), mask=use)


@triton.jit
def round_bfloat16(value):
    """Bits of the nearest bfloat16, ties to even; every NaN is quiet."""
    v = value.to(tl.uint32, bitcast=True)
    rounded = (v + 0x7FFF + ((v >> 16) & 1)) >> 16
    quiet = (v >> 16) | 0x40
    return tl.where((v & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.uint16)


#: Gaps of a static part that a table has place for.
GAPS = 5
_GAPS = tl.constexpr(GAPS)
#: Words of a table: before what it says of three kinds of chunks, and of each of them.
_PLAN_WORDS, _KIND_WORDS = tl.constexpr(8), tl.constexpr(3 * GAPS + 2)
#: Words that a launch takes along.
_TAKEN = 16
#: A row of a table of chunks of several buffers. Addresses: of the buffer's bytes (a multiple of
#: 16), of its chunks' checksum terms, of its status word, of its plan's table, of the tensor, and
#: of its statistics. `first` is the number of the chunk's first program. Sizes are in elements;
#: `static` (the first static part), `stride` and `second` (the second section in a static part) are
#: in units of 128 bytes, `head` (the header) in words. Flags: `ROW_ALIGNED`, `ROW_PLANNED`.
#: `row` is the row's number before those without programs were put behind the others.
ROW = np.dtype(
    [
        (name, np.int64)
        for name in (
            "data",
            "sums",
            "status",
            "plan",
            "chunk",
            "elements",
            "stats",
            "first",
            "nelem",
            "chunk_nelem",
            "static",
            "stride",
            "second",
            "head",
            "flags",
            "row",
        )
    ]
)
#: Chunks of the tensor start at multiples of 16 bytes; the header is compared with the plan's.
ROW_ALIGNED, ROW_PLANNED = 1, 2
#: Words of a row of `Places`, and of `ROW`.
PLACE_WORDS, ROW_WORDS = tl.constexpr(3), tl.constexpr(len(ROW.names or ()))
_ROW_PLANNED = tl.constexpr(ROW_PLANNED)
#: Bytes that a program clears in one chunk, and the most programs of a chunk.
_PART_NBYTES, _MAX_PARTS = 1 << 14, 1 << 10


@triton.jit
def chunk_kind(plan_ptr, chunk):
    """(elements of a chunk, where the table says what holds for chunks of so many)."""
    nelem, size = tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    n = tl.maximum(tl.minimum(size, nelem - chunk * size), 0)
    kind = tl.where(n == size, 0, tl.where(n > 0, 1, 2))
    return n, plan_ptr + _PLAN_WORDS + kind * _KIND_WORDS


@triton.jit
def check_header(src_ptr, plan_ptr, status_ptr):
    """Compare a header with the plan's; what is behind the records must be zero."""
    head = tl.load(plan_ptr)
    words_ptr = plan_ptr + _PLAN_WORDS + 3 * _KIND_WORDS
    at = head * 0
    while at < head:
        i = at + tl.arange(0, 32)
        planned = tl.load(words_ptr + i, mask=i < head, other=0)
        found = tl.load(src_ptr.to(tl.pointer_type(tl.int64)) + i, mask=i < head, other=0)
        if tl.max((planned != found).to(tl.int32), 0) > 0:
            report(status_ptr, HEADER)
        at += 32
    records_end = head * 8 + tl.load(plan_ptr + 1) * 32
    _, padding = padding_of(src_ptr, records_end, tl.load(plan_ptr + 4))
    if padding != 0:
        report(status_ptr, PADDING)


@triton.jit
def static_of(ptr, plan_ptr, chunk):
    """Where a chunk's static part is."""
    return ptr + tl.load(plan_ptr + 4) + chunk * tl.load(plan_ptr + 5)


@triton.jit
def check_record(src_ptr, plan_ptr, status_ptr, chunk, planned, most, raw_dynamic):
    """Check the fields of a chunk's record; gives where it is.

    It may claim `most` dynamic bytes, and `raw_dynamic` if the chunk is stored raw, which none is
    with -1. Ordinals are compared if they are `planned`.
    """
    record = src_ptr.to(tl.pointer_type(tl.int64)) + tl.load(plan_ptr) + chunk * 4
    claimed, both = tl.load(record + 1), tl.load(record + 2)
    where = chunk << 8
    if (both & 0xFFFFFFFC) != 0:
        report(status_ptr, FLAGS + where)
    if (both & 2) != 0:
        report(status_ptr, OVERFLOWED + where)
    # A number beyond 2^63 is negative here, and out of bounds as well.
    odd = (claimed < 0) | (claimed > most) | (tl.load(record + 3) != 0)
    odd = odd | (((both & 1) != 0) & (claimed != raw_dynamic))
    odd = odd | ((planned != 0) & (((both >> 32) & 0xFFFFFFFF) != chunk))
    odd = odd | ((tl.load(plan_ptr + 7) == 0) & (tl.load(record) != 0))
    if odd:
        report(status_ptr, RECORD + where)
    return record


@triton.jit
def gaps_of(static_ptr, kind_ptr):
    """(checksum terms that the frame adds, OR of the bytes) of the gaps of a static part."""
    total = tl.zeros([], tl.uint64)
    padding = tl.zeros([], tl.int32)
    for k in tl.static_range(_GAPS):
        start, weighed = tl.load(kind_ptr + 3 * k), tl.load(kind_ptr + 3 * k + 1)
        terms, behind = _gap(static_ptr, start, weighed, tl.load(kind_ptr + 3 * k + 2))
        total += terms
        padding |= behind
    return total, padding


@triton.jit
def check_whole(plan_ptr, status_ptr, record, chunk, n, padding, total, summed):
    """Check a chunk's padding by the OR of its bytes and, if `summed`, the terms of all words."""
    where = chunk << 8
    if padding != 0:
        report(status_ptr, CHUNK + where + CHUNK_PADDING)
    if summed != 0:
        both = tl.load(record + 2)
        total += tl.load(plan_ptr + 6).to(tl.uint64, bitcast=True)
        total += record_term(n, tl.load(record + 1), both & 0xFFFFFFFF, both >> 32)
        if total != tl.load(record).to(tl.uint64, bitcast=True):
            report(status_ptr, CHUNK + where + CHUNK_SUM)


@triton.jit
def place_of(sources_ptr, number, WORDS: tl.constexpr = 3):
    """(bytes, checksum terms, status word) of a buffer of several; see `Places` and `ROW`."""
    row = sources_ptr + number * WORDS
    sums_ptr = tl.load(row + 1).to(tl.pointer_type(tl.int64))
    status_ptr = tl.load(row + 2).to(tl.pointer_type(tl.int64))
    return pointer_of(tl.load(row)), sums_ptr, status_ptr


@triton.jit
def pointer_of(address):
    """A pointer to bytes at a multiple of 16; a hint on the address itself would be lost."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def plan_of_row(row_ptr):
    """(table of the plan, number of the chunk) of a row, see `ROW`."""
    return tl.load(row_ptr + 3).to(tl.pointer_type(tl.int64)), tl.load(row_ptr + 4)


@kernel
def _begin_kernel(
    out_ptr,
    zero_ptr,
    plan_ptr,
    parts: tl.int64,
    zero_blocks: tl.int64,
    ROWS: tl.constexpr,
    member=None,
):
    """A chunk's record and gaps, by `parts` programs; once, the header. All clear `zero_ptr`.

    ROWS: `out_ptr` is a table of chunks.
    """
    pid = program(member).to(tl.int64)
    clear(zero_ptr, pid * 0, zero_blocks * 128, pid, programs(member))
    chunk, part = pid // parts, pid % parts
    if ROWS:
        rows_ptr = out_ptr.to(tl.pointer_type(tl.int64))
        out_ptr, _, _ = place_of(rows_ptr, chunk, ROW_WORDS)
        plan_ptr, chunk = plan_of_row(rows_ptr + chunk * ROW_WORDS)
    n, kind_ptr = chunk_kind(plan_ptr, chunk)
    static_ptr = static_of(out_ptr, plan_ptr, chunk)
    for k in tl.static_range(_GAPS):
        start, stop = tl.load(kind_ptr + 3 * k), tl.load(kind_ptr + 3 * k + 2)
        clear(static_ptr, start, stop, part, parts)
    if part == 0:
        head = tl.load(plan_ptr)
        record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        identity = tl.load(plan_ptr + 6).to(tl.uint64, bitcast=True)
        total = identity + record_term(n, n * 0, n * 0, chunk)
        summed = tl.load(plan_ptr + 7) != 0
        tl.store(record, tl.where(summed, total, 0).to(tl.int64, bitcast=True))
        tl.store(record + 1, n * 0)
        tl.store(record + 2, chunk << 32)
        tl.store(record + 3, n * 0)
        if chunk == 0:
            words_ptr = plan_ptr + _PLAN_WORDS + 3 * _KIND_WORDS
            at = head * 0
            while at < head:
                i = at + tl.arange(0, 32)
                word = tl.load(words_ptr + i, mask=i < head, other=0)
                tl.store(out_ptr.to(tl.pointer_type(tl.int64)) + i, word, mask=i < head)
                at += 32
            records_end = head * 8 + tl.load(plan_ptr + 1) * 32
            clear(out_ptr, records_end, tl.load(plan_ptr + 4), part, part + 1)


@triton.jit
def _check_chunk(
    src_ptr,
    plan_ptr,
    sums_ptr,
    status_ptr,
    chunk,
    start,
    stop,
    first_whole,
    end_whole,
    planned,
    summed,
):
    """A chunk's record and last code; if it was decoded whole its padding, and with `summed` its
    checksum.
    """
    n, kind_ptr = chunk_kind(plan_ptr, chunk)
    record = check_record(src_ptr, plan_ptr, status_ptr, chunk, planned, n * 0, n * 0 - 1)
    static_ptr = static_of(src_ptr, plan_ptr, chunk)
    first = chunk * tl.load(plan_ptr + 3)
    mask = tl.load(kind_ptr + 3 * _GAPS + 1).to(tl.int32)
    if (mask != 0) & (first + n > start) & (first + n <= stop):
        last = tl.load(static_ptr + tl.load(kind_ptr + 3 * _GAPS)).to(tl.int32)
        if (last & mask) != 0:
            report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
    if (chunk >= first_whole) & (chunk < end_whole):
        total, padding = gaps_of(static_ptr, kind_ptr)
        if summed != 0:
            total += tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True)
        check_whole(plan_ptr, status_ptr, record, chunk, n, padding, total, summed)


@kernel
def _check_kernel(
    src_ptr,
    plan_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int64,
    first_whole: tl.int64,
    end_whole: tl.int64,
    planned: tl.int32,
    summed: tl.int32,
    WORDS: tl.constexpr,
    member=None,
):
    """One chunk of what was decoded, see `_check_chunk`; once, the header.

    With WORDS `src_ptr` is a table whose rows have so many: of several buffers of the plan
    (`Places`), or of chunks of any buffers (`ROW`). They were decoded whole.
    """
    pid = program(member).to(tl.int64)
    chunk = first_chunk + pid
    if WORDS > 0:
        rows_ptr = src_ptr.to(tl.pointer_type(tl.int64))
        number = pid
        if WORDS == PLACE_WORDS:
            number = pid // tl.load(plan_ptr + 1)
            chunk = pid % tl.load(plan_ptr + 1)
        else:
            row_ptr = rows_ptr + pid * WORDS
            plan_ptr, chunk = plan_of_row(row_ptr)
            planned = (tl.load(row_ptr + 14) & _ROW_PLANNED).to(tl.int32)
            summed = tl.load(plan_ptr + 7).to(tl.int32)
        src_ptr, sums_ptr, status_ptr = place_of(rows_ptr, number, WORDS)
        end_whole, stop = tl.load(plan_ptr + 1), tl.load(plan_ptr + 2)
    if (planned != 0) & (chunk == first_chunk):
        check_header(src_ptr, plan_ptr, status_ptr)
    # fmt: off
    _check_chunk(
        src_ptr, plan_ptr, sums_ptr, status_ptr, chunk, start, stop, first_whole, end_whole,
        planned, summed,
    )
    # fmt: on


@kernel
def _header_kernel(src_ptr, plan_ptr, status_ptr):
    check_header(src_ptr, plan_ptr, status_ptr)


@kernel
def _table_kernel(
    plan_ptr,
    at: tl.int32,
    w0: tl.int64,
    w1: tl.int64,
    w2: tl.int64,
    w3: tl.int64,
    w4: tl.int64,
    w5: tl.int64,
    w6: tl.int64,
    w7: tl.int64,
    w8: tl.int64,
    w9: tl.int64,
    w10: tl.int64,
    w11: tl.int64,
    w12: tl.int64,
    w13: tl.int64,
    w14: tl.int64,
    w15: tl.int64,
):
    words = (w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15)
    for k in tl.static_range(16):
        tl.store(plan_ptr + at + k, words[k])


_BEGIN, _BEGIN_ROWS = (Variant(_begin_kernel, options(1), ROWS=rows) for rows in (False, True))
_CHECK, _CHECK_PLACES, _CHECK_ROWS = (
    Variant(_check_kernel, options(1), WORDS=words)
    for words in (0, PLACE_WORDS.value, ROW_WORDS.value)
)
_CHECK_HEADER = Variant(_header_kernel, options(1))
_WRITE = Variant(_table_kernel, options(1))
#: Tables that captured graphs read: they stay, as graphs do not say when they go.
_captured: dict[int, torch.Tensor] = {}
#: Devices on which `_table_kernel` ran.
_loaded: set[torch.device] = set()

Words = npt.NDArray[np.int64]


def new_table(words: int, device: torch.device) -> torch.Tensor:
    """Memory for `words` numbers, int64, to be filled by `fill`."""
    return torch.empty(-(-words // _TAKEN) * _TAKEN, dtype=torch.int64, device=device)


def fill(table: torch.Tensor, words: Words) -> None:
    """Write numbers to a new table, in the order of torch's current stream. Nothing waits.

    While a graph is captured they travel in launches, so that the graph has them. Calls that are
    recorded find them there.
    """
    with recorded_by(None):
        _fill(table, words)


def _fill(table: torch.Tensor, words: Words) -> None:
    if table.device.type != "cuda":
        table[: words.size] = torch.from_numpy(words)
        return
    taken = words.size
    if not torch.cuda.is_current_stream_capturing():
        pinned = torch.empty(words.size, dtype=torch.int64, device="cpu", pin_memory=True)
        pinned.numpy()[:] = words
        table[: words.size].copy_(pinned, non_blocking=True)
        # A kernel has to be loaded before a graph is captured.
        taken = 0 if table.device in _loaded else min(_TAKEN, words.size)
        _loaded.add(table.device)
    padded = [*words[:taken].tolist(), *[0] * (-taken % _TAKEN)]
    for at in range(0, len(padded), _TAKEN):
        _WRITE.launch(1, (table,), at, *padded[at : at + _TAKEN])


def table_of(words: list[int] | Words, device: torch.device) -> torch.Tensor:
    """A new table of numbers, int64, on a device."""
    with torch.inference_mode(False):
        table = new_table(len(words), device)
        fill(table, np.asarray(words, np.int64))
    return table


class Places(NamedTuple):
    """Where several buffers are: anywhere in memory that the device reads.

    Attributes:
        table: For each buffer three addresses: of its bytes (a multiple of 16), of its chunks'
            checksum terms, and of its status word.
        number: How many buffers.
        sums: The terms, int64, shape (buffers, chunks).
        kept: What else lies at the addresses.
    """

    table: torch.Tensor
    number: int
    sums: torch.Tensor
    kept: tuple[torch.Tensor, ...]


def places_of(
    buffers: Sequence[torch.Tensor],
    sums: torch.Tensor,
    statuses: torch.Tensor | Sequence[torch.Tensor],
) -> Places:
    """The places of buffers, uint8.

    Terms are at `sums`, int64, shape (buffers, chunks), and status words at `statuses`: int64,
    shape (buffers,), or a tensor of one for each.
    """
    words = []
    for data, row, status in zip(buffers, sums, statuses, strict=True):
        words += [data.data_ptr(), row.data_ptr(), status.data_ptr()]
    return Places(table_of(words, sums.device), len(buffers), sums, (*buffers, *statuses))


class _Written(NamedTuple):
    """Numbers in device memory, and a word in host memory that is not 0 once all are there."""

    words: torch.Tensor
    marker: torch.Tensor


class Table:
    """Numbers that kernels read in device memory; the first is not 0.

    They are written for each stream once, in its order, so that nothing waits. A graph may run on
    any stream: while one is captured it gets a table, of whatever stream, that is written by then.
    If there is none it gets its own, and writes that whenever it runs. Threads that come first at
    the same time may write a table each.
    """

    def __init__(self, words: Sequence[int]) -> None:
        #: The numbers, int64.
        self.words: Words = np.array(words, np.int64)
        self._tables: dict[tuple[torch.device, int], _Written] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """The table in the memory of a device, int64, for torch's current stream there."""
        # Of torch's functions those that every call can afford.
        on_gpu = device.type == "cuda"
        if on_gpu and torch._C._cuda_isCurrentStreamCapturing():
            return self._for_graph(device)
        stream = torch._C._cuda_getCurrentRawStream(device.index) if on_gpu else 0
        table = self._tables.get((device, stream))
        if table is None:
            words = marker = table_of(self.words, device)
            if on_gpu:
                # To look at host memory is allowed while capturing.
                with torch.inference_mode(False), recorded_by(None):
                    marker = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
                    marker.copy_(words[:1], non_blocking=True)
            table = self._tables[device, stream] = _Written(words, marker)
        return table.words

    def _for_graph(self, device: torch.device) -> torch.Tensor:
        for (place, _), table in tuple(self._tables.items()):
            if place == device and int(table.marker[0]):
                _captured[id(table.words)] = table.words
                return table.words
        return table_of(self.words, device)


class Frame:
    """Header, records and padding of a plan's buffers, as a GPU writes and checks them.

    What kernels have to know lies in a small table in device memory, int64: the plan (see
    `chunk_kind`, `check_header` and `_begin_kernel`), the gaps and the tail of whole chunks, of
    the last one with elements and of empty ones, and the header.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        codec, sections = plan.codec, plan.layout.sections
        header = plan.header_bytes.view("<i8").tolist()
        identity = identity_term(codec.id, codec.version, plan.dtype.id, 0)
        words = [len(header), plan.chunks, plan.nelem, plan.chunk_nelem]
        words += [plan.static_offset, plan.static_stride, _signed(identity), int(plan.checksum)]
        last = plan.nelem - plan.chunk_nelem * max(0, plan.filled_chunks - 1)
        largest = 0
        for nelem in (plan.chunk_nelem, last, 0):
            gaps = codec.gaps(plan.dtype, nelem, sections)
            if len(gaps) > GAPS:
                found = f"{codec.name} has {len(gaps)} gaps in its static part"
                raise ValueError(f"{found}; allowed on a GPU: at most {GAPS}")
            for gap in [*gaps, *[Gap(0, 0, 0)] * (GAPS - len(gaps))]:
                words += gap
                largest = max(largest, gap.stop - gap.start)
            words += codec.tail(nelem)
        self._table = Table(words + header)
        self._parts = max(1, largest // _PART_NBYTES)

    @property
    def words(self) -> Words:
        """The table, int64."""
        return self._table.words

    def table(self, device: torch.device) -> torch.Tensor:
        """The table in the memory of a device; see `Table.on`."""
        return self._table.on(device)

    @property
    def parts(self) -> int:
        """Programs that begin a chunk with the most to clear."""
        return min(self._parts, _MAX_PARTS)

    def begin(
        self, out: torch.Tensor, zero: torch.Tensor | None = None, nbytes: int | None = None
    ) -> None:
        """Write all of a buffer but what its codec does; encoders add their checksum terms.

        Clears `zero` as well, uint8, what else a codec wants to start as zeros, or its first
        `nbytes` bytes: a multiple of 128.
        """
        chunks = self._plan.chunks
        if nbytes is None:
            nbytes = 0 if zero is None else zero.numel()
        parts = min(max(self._parts, nbytes // (chunks * _PART_NBYTES)), _MAX_PARTS)
        tensors = out, out if zero is None else zero, self.table(out.device)
        # In units of 128 bytes, so that the kernel knows the alignment.
        _BEGIN.launch(chunks * parts, tensors, parts, nbytes // 128)

    def check(
        self,
        src: torch.Tensor,
        sums: torch.Tensor,
        status: torch.Tensor,
        start: int,
        stop: int,
        *,
        whole: bool,
        summed: bool,
        planned: bool,
    ) -> None:
        """Check the chunks that elements `start` to `stop` lie in, after they were decoded.

        Those that were decoded `whole` have their padding checked, and if they were `summed` their
        checksum: the decoder's terms are at `sums`, int64, a word for each chunk. The header is
        compared if it is `planned`.
        """
        first, end, first_whole, end_whole = touched(self._plan, start, stop)
        _CHECK.launch(
            end - first,
            (src, self.table(src.device), sums, status),
            start,
            stop,
            first,
            first_whole,
            end_whole if whole else first_whole,
            int(planned),
            int(summed),
        )

    def check_places(self, places: Places, *, summed: bool, planned: bool) -> None:
        """As `check`, of several buffers of the plan that were decoded whole."""
        table = places.table
        tensors = table, self.table(table.device), table, table
        programs = self._plan.chunks * places.number
        _CHECK_PLACES.launch(programs, tensors, 0, 0, 0, 0, 0, int(planned), int(summed))

    def check_header(self, src: torch.Tensor, status: torch.Tensor) -> None:
        """Compare a buffer's header with the plan's."""
        _CHECK_HEADER.launch(1, (src, self.table(src.device), status))


def begin_rows(table: torch.Tensor, at: int, number: int, parts: int) -> None:
    """As `Frame.begin`, of `number` chunks of any buffers, by `parts` programs for each.

    Their rows, see `ROW`, start at byte `at` of the table.
    """
    _BEGIN_ROWS.launch(number * parts, (table,) * 3, parts, 0, offsets=(at,) * 3)


def check_rows(table: torch.Tensor, at: int, number: int) -> None:
    """As `Frame.check`, of `number` chunks of any buffers, that were decoded whole."""
    _CHECK_ROWS.launch(number, (table,) * 4, 0, 0, 0, 0, 0, 0, 0, offsets=(at,) * 4)


def frame_of(plan: Plan) -> Frame:
    """The frame of a plan, made once."""
    frame: Frame | None = plan.__dict__.get("_frame")
    if frame is None:
        frame = plan.__dict__["_frame"] = Frame(plan)
    return frame


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def touched(plan: Plan, start: int, stop: int) -> tuple[int, int, int, int]:
    """First and past-the-last chunk of a range, and of those that lie whole in it.

    A whole tensor touches its empty chunks too. No other range is empty.
    """
    if (start, stop) == (0, plan.nelem):
        return 0, plan.chunks, 0, plan.chunks
    size = plan.chunk_nelem
    end = -(-stop // size)
    return start // size, end, -(-start // size), end if stop == plan.nelem else stop // size
