"""Buffers of one chunk that a single call of the codec's module encodes or decodes whole."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .codecs.common import threads as threading
from .codecs.common.base import Bits, Bytes, Key, Plan
from .formats import checksum as checksum_ref
from .formats.checksum import MASK64, record_term
from .formats.header import RAW, RECORD, align
from .places import place_of
from .planning import is_tiny, kernels_known

if TYPE_CHECKING:
    from .engine import Parsed

#: A result record.
PACKED_RECORD = struct.Struct("<QQIIQ")


class SingleCalls(NamedTuple):
    """Buffers of a plan with one chunk, of which a single call codes all.

    Attributes:
        module: Whose calls they are; plans are shared by all backends.
        header: The packed header.
        padding: The zeros behind the record.
        most: Most dynamic bytes of a chunk that is stored as it is encoded.
        raw: Those of one that is stored raw instead; -1 if it may not be, or they do not fit.
        term: The checksum's term of what is planned.
        gaps: Bytes of the static part that are zero, those of `Place`, in the buffer.
        encode: The codec's `buffer_encoder`, or None.
        decode: The codec's `buffer_decoder`, or None.
    """

    module: ModuleType
    header: bytes
    padding: bytes
    most: int
    raw: int
    term: int
    gaps: tuple[tuple[int, int], ...]
    encode: Callable[..., tuple[int, int | None]] | None
    decode: Callable[..., int | None] | None


def _one(plan: Plan, module: ModuleType) -> SingleCalls | None:
    """What is known of buffers of a plan, made once; None if `module` has no single calls."""
    found: SingleCalls | None = plan.__dict__.get("_one")
    if found is not None and found.module is module:
        return found
    encoder = getattr(module, "buffer_encoder", None)
    decoder = getattr(module, "buffer_decoder", None)
    if plan.chunks != 1 or not plan.nelem or encoder is decoder is None:
        return None
    place = place_of(plan, 0)
    most, raw = plan.dynamic_stride, -1
    if plan.codec.raw_fallback and place.raw_dynamic <= most:
        most = raw = place.raw_dynamic
    start, header = plan.static_offset, plan.header_bytes
    behind = header.size + RECORD.itemsize
    gaps = tuple((start + lo, start + hi) for lo, hi in place.gaps)
    found = plan.__dict__["_one"] = SingleCalls(
        module,
        header.tobytes(),
        bytes(start - behind),
        most,
        raw,
        place.identity_term,
        gaps,
        encoder(plan) if encoder else None,
        decoder(plan, np.array([(behind, start), *gaps], np.int64)) if decoder else None,
    )
    return found


def summer(module: ModuleType) -> Callable[..., int]:
    """The checksum function that goes with a codec's backend module."""
    if module.__name__.endswith("_cpu"):
        from .codecs.common import checksum_cpu

        return checksum_cpu.words_sum
    return checksum_ref.words_sum


def sum_of_parts(module: ModuleType, static: Bytes, dynamic: Bytes) -> int:
    """The checksum over the static part and the used dynamic bytes of a chunk."""
    words_sum = summer(module)
    return words_sum(static) + words_sum(dynamic, static.size // 4)


def store_raw(data: Bytes, static: Bytes, dynamic: Bytes) -> None:
    """Store the bytes of a chunk's elements as they are: zeros behind them in the static part."""
    cut = min(data.size, static.size)
    static[:cut] = data[:cut]
    static[cut:] = 0
    dynamic[: data.size - cut] = data[cut:]


def fits_thread(plan: Plan, threads: int) -> bool:
    """Whether a tensor is coded on one thread."""
    return threads == 1 or plan.nelem * plan.dtype.itemsize < 2 * threading.MIN_SPAN_NBYTES


def write_one(
    plan: Plan,
    module: ModuleType,
    bits: Bits,
    out: Bytes,
    stats: npt.NDArray[Any] | None,
    key: Key | None,
) -> bool:
    """Write a buffer in a single call; False if that does not do."""
    one = _one(plan, module)
    if one is None or one.encode is None:
        return False
    out[: plan.static_offset] = plan.head_bytes
    for start, stop in one.gaps:
        out[start:stop] = 0
    (dynamic_nbytes, words_sum), flags = one.encode(out, bits, stats, key), 0
    if dynamic_nbytes > one.most and one.raw >= 0:
        dynamic_nbytes, flags = one.raw, RAW
        static = out[plan.static_offset : plan.dynamic_offset]
        dynamic = out[plan.dynamic_offset :][:dynamic_nbytes]
        store_raw(bits.view(np.uint8), static, dynamic)
        words_sum = sum_of_parts(module, static, dynamic) if plan.checksum else None
    if dynamic_nbytes > one.most or (words_sum is None and plan.checksum):
        return False
    total = 0
    if plan.checksum and words_sum is not None:
        total = (words_sum + one.term + record_term(dynamic_nbytes, flags, 0, 0)) & MASK64
    PACKED_RECORD.pack_into(out.data, len(one.header), total, dynamic_nbytes, flags, 0, 0)
    return True


def is_quick(plan: Plan, threads: int, backend: str | None) -> bool:
    """Whether `write_quick` and `read_quick` may do for buffers of a plan.

    Codecs without loss compute with integers: the floating-point mode is nothing to them.
    """
    usual = plan.codec.lossless and not plan.codec.needs_base
    return usual and backend != "ref" and plan.checksum and fits_thread(plan, threads)


def is_aligned(data: Bytes) -> bool:
    """Whether memory is aligned as kernels read it."""
    return bool(data.__array_interface__["data"][0] % 8 == 0)


def write_quick(plan: Plan, bits: Bits, out: Bytes) -> bool:
    """Write a buffer as `write_one` does, if one of the plan was written or read before."""
    one: SingleCalls | None = plan.__dict__.get("_one")
    if one is None or (is_tiny(plan, None) and not kernels_known(plan, "encode")):
        return False
    stats = plan.codec.measure(bits, plan.dtype) if plan.codec.needs_stats else None
    return write_one(plan, one.module, bits, out, stats, None)


def end_of(plan: Plan, data: Bytes) -> int:
    """Where the dynamic bytes end in a buffer that `write_quick` has written."""
    used: int = PACKED_RECORD.unpack_from(data.data, plan.header_bytes.size)[1]
    return plan.dynamic_offset + used


def read_quick(plan: Plan, data: Bytes, out: Bits) -> bool:
    """Read a buffer as `read_one` does, header and record included, if one was read before.

    `data` is aligned to 8 (`is_aligned`), and is read faster if it is marked as not to be written.
    False says nothing about the bytes: `parse` and `decode_range` do.
    """
    one: SingleCalls | None = plan.__dict__.get("_one")
    if one is None or one.decode is None or data.size < plan.dynamic_offset:
        return False
    if is_tiny(plan, None) and not kernels_known(plan, "decode"):
        return False
    head = data[: plan.static_offset].tobytes()
    checksum, nbytes, flags, ordinal, info = PACKED_RECORD.unpack_from(head, len(one.header))
    if flags or ordinal or info or not head.startswith(one.header):
        return False
    end = plan.dynamic_offset + nbytes
    if plan.dynamic_stride:
        fits = nbytes <= one.most and data.size == plan.nbytes
        data = data[:end]
    else:
        fits = nbytes <= place_of(plan, 0).raw_dynamic and data.size == align(end)
    if not fits:
        return False
    words_sum = one.decode(data, out, nbytes)
    if words_sum is None:
        return False
    total: int = words_sum + one.term + record_term(nbytes, 0, 0, 0)
    return bool(total & MASK64 == checksum)


def read_one(parsed: Parsed, module: ModuleType, out: Bits) -> bool:
    """Decode and check a buffer in a single call; False if that does not do, or it is damaged."""
    plan = parsed.plan
    one = _one(plan, module)
    if one is None or one.decode is None or not plan.checksum:
        return False
    record = parsed.records[0]
    if record.flags or record.ordinal or record.info:
        return False
    data, nbytes = parsed.data, record.dynamic_nbytes
    if plan.dynamic_stride:
        # In a slot nothing is behind them.
        data = data[: plan.dynamic_offset + nbytes]
    words_sum = one.decode(data, out, nbytes)
    if words_sum is None:
        return False
    total = words_sum + one.term + record_term(nbytes, 0, 0, 0)
    return total & MASK64 == record.checksum
