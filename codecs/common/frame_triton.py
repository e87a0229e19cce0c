# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The frame of a buffer on a GPU: header, records, checksums, elements and status words.

Kernels never wait for the host. They put what they find wrong into a status word by an atomic
maximum; the host reads it when it reads the device anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats import checksum
from ...formats.errors import FormatError
from .base import Plan
from .launch_triton import Variant, kernel, options

#: Header words (8 bytes) that travel as arguments of a kernel: enough for 4 dimensions.
HEADER_WORDS = 12

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
CHUNK_SUM = tl.constexpr(0)
CHUNK_PADDING = tl.constexpr(1)
CHUNK_PAYLOAD = tl.constexpr(2)

_STAGES = ("bad_header", "bad_record", "dynamic_overflow", "bad_record", "reserved_not_zero")
_KINDS = ("checksum_mismatch", "reserved_not_zero", "bad_payload")


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


def header_words(plan: Plan) -> tuple[int, ...]:
    """The header as 64-bit words, padded to a multiple of HEADER_WORDS."""
    words = plan.header_bytes.view("<u8").tolist()
    return tuple(words + [0] * (-len(words) % HEADER_WORDS))


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
def header_word(i, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11):
    """Words `h0` to `h11` as a vector over `i` = 0 .. 15."""
    zero = tl.zeros([16], tl.uint64)
    v = tl.where(i == 0, h0, zero)
    v = tl.where(i == 1, h1, v)
    v = tl.where(i == 2, h2, v)
    v = tl.where(i == 3, h3, v)
    v = tl.where(i == 4, h4, v)
    v = tl.where(i == 5, h5, v)
    v = tl.where(i == 6, h6, v)
    v = tl.where(i == 7, h7, v)
    v = tl.where(i == 8, h8, v)
    v = tl.where(i == 9, h9, v)
    v = tl.where(i == 10, h10, v)
    return tl.where(i == 11, h11, v)


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
    total = tl.zeros([128], tl.uint64)
    any_set = tl.zeros([128], tl.int32)
    at = start
    while at < stop:
        i = at + tl.arange(0, 128)
        v = tl.load(ptr + i, mask=i < stop, other=0)
        total += weigh_bytes(v, i)
        any_set |= v.to(tl.int32)
        at += 128
    return tl.sum(total, 0), tl.max(any_set, 0)


@triton.jit
def check_header(
    src_ptr, status_ptr, head, chunks, static_at, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11
):
    """Compare the header's first words with those given; what follows the records must be zero."""
    i = tl.arange(0, 16)
    v = header_word(i, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
    use = i < tl.minimum(head, 12)
    w = tl.load(src_ptr.to(tl.pointer_type(tl.uint64)) + i, mask=use, other=0)
    if tl.max((use & (v != w)).to(tl.int32), 0) > 0:
        report(status_ptr, HEADER)
    end = head.to(tl.int64) * 8 + chunks.to(tl.int64) * 32
    _, padding = padding_of(src_ptr, end, static_at * 128)
    if padding != 0:
        report(status_ptr, PADDING)


@triton.jit
def check_record(
    src_ptr,
    sums_ptr,
    status_ptr,
    chunk,
    n,
    head,
    identity,
    planned,
    summed,
    whole,
    terms,
    padding,
    SUMS: tl.constexpr,
):
    """The record of a chunk of `n` elements without dynamic part, raw form or info.

    If the chunk was decoded `whole`, also its padding, the OR of whose bytes is `padding`, and with
    SUMS its checksum: of the chunk's word at `sums_ptr` and `terms`.
    """
    record = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    both = tl.load(record + 2)
    where = chunk << 8
    if (both & 0xFFFFFFFC) != 0:
        report(status_ptr, FLAGS + where)
    if (both & 2) != 0:
        report(status_ptr, OVERFLOWED + where)
    odd = (both & 1) | tl.load(record + 1) | tl.load(record + 3)
    if planned != 0:
        odd |= ((both >> 32) & 0xFFFFFFFF) ^ chunk
    if summed == 0:
        odd |= tl.load(record)
    if odd != 0:
        report(status_ptr, RECORD + where)
    if whole:
        if padding != 0:
            report(status_ptr, CHUNK + where + CHUNK_PADDING)
        if SUMS:
            total = terms + tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True) + identity
            total += record_term(n, n * 0, both & 0xFFFFFFFF, both >> 32)
            if total != tl.load(record).to(tl.uint64, bitcast=True):
                report(status_ptr, CHUNK + where + CHUNK_SUM)


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


@kernel
def _more_header_kernel(
    out_ptr,
    at: tl.int32,
    head: tl.int32,
    h0: tl.uint64,
    h1: tl.uint64,
    h2: tl.uint64,
    h3: tl.uint64,
    h4: tl.uint64,
    h5: tl.uint64,
    h6: tl.uint64,
    h7: tl.uint64,
    h8: tl.uint64,
    h9: tl.uint64,
    h10: tl.uint64,
    h11: tl.uint64,
):
    i = tl.arange(0, 16)
    v = header_word(i, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
    tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + at + i, v, mask=(i < 12) & (at + i < head))


@kernel
def _match_header_kernel(
    src_ptr,
    status_ptr,
    at: tl.int32,
    head: tl.int32,
    h0: tl.uint64,
    h1: tl.uint64,
    h2: tl.uint64,
    h3: tl.uint64,
    h4: tl.uint64,
    h5: tl.uint64,
    h6: tl.uint64,
    h7: tl.uint64,
    h8: tl.uint64,
    h9: tl.uint64,
    h10: tl.uint64,
    h11: tl.uint64,
):
    i = tl.arange(0, 16)
    v = header_word(i, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
    use = (i < 12) & (at + i < head)
    w = tl.load(src_ptr.to(tl.pointer_type(tl.uint64)) + at + i, mask=use, other=0)
    if tl.max((use & (v != w)).to(tl.int32), 0) > 0:
        report(status_ptr, HEADER)


_MATCH_HEADER = Variant(_match_header_kernel, options(1))
_MORE_HEADER = Variant(_more_header_kernel, options(1))


def add_header(plan: Plan, out: torch.Tensor, words: tuple[int, ...]) -> None:
    """Write what a header has beyond HEADER_WORDS words: that of five or more dimensions."""
    for at in range(HEADER_WORDS, len(words), HEADER_WORDS):
        part = words[at : at + HEADER_WORDS]
        _MORE_HEADER.launch(1, (out,), at, plan.header.nbytes // 8, *part)


def match_header(
    plan: Plan,
    src: torch.Tensor,
    status: torch.Tensor,
    words: tuple[int, ...],
    first: int = HEADER_WORDS,
) -> None:
    """Compare the words of a header from number `first` on, by default beyond those that kernels
    get as arguments, with the plan's.
    """
    for at in range(first, len(words), HEADER_WORDS):
        part = words[at : at + HEADER_WORDS]
        _MATCH_HEADER.launch(1, (src, status), at, plan.header.nbytes // 8, *part)


def touched(plan: Plan, start: int, stop: int) -> tuple[int, int, int, int]:
    """First and past-the-last chunk of a range, and of those that lie whole in it.

    A whole tensor touches its empty chunks too. No other range is empty.
    """
    if (start, stop) == (0, plan.nelem):
        return 0, plan.chunks, 0, plan.chunks
    size = plan.chunk_nelem
    end = -(-stop // size)
    return start // size, end, -(-start // size), end if stop == plan.nelem else stop // size
