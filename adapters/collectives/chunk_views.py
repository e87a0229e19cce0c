"""The bytes of a collective: buffers whose chunks have one sender and one receiver each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...buffer import Buffer
from ...codecs.common.base import Plan
from ...formats.dtypes import BY_NAME
from ...formats.header import ASSEMBLED, RECORD
from . import tensors

_INT64 = BY_NAME["int64"]

#: Words of a chunk descriptor: digest of call and next word, the sender's ratio, the chunk's
#: result record.
DESCRIPTOR_WORDS = 2 + RECORD.itemsize // 8
DESCRIPTOR_NBYTES = 8 * DESCRIPTOR_WORDS
_ODD = 0x9E3779B97F4A7C15
_SIZE = 2 + RECORD.fields["dynamic_nbytes"][1] // 8  # type: ignore[index]
#: Bytes of text in a descriptor without a record: what the sender calls.
_TEXT_NBYTES = RECORD.itemsize


class Share(NamedTuple):
    """The chunk of one rank: uint8 views, `slot` for its dynamic part."""

    static: Any
    slot: Any
    raw_nbytes: int


class ChunkViews:
    """The chunks of one or more consecutive buffers in `memory`.

    Made once for memory and its plans, used by many calls: on a GPU every view costs host time.
    """

    def __init__(self, plans: Sequence[Plan], memory: Any) -> None:
        self.plans = plans
        self.memory = memory
        self.data: list[Any] = []
        self.shares: list[Share] = []
        #: Of every buffer its first share, and its records, int64, shape (chunks, 4).
        self._records: list[tuple[int, Any]] = []
        at = 0
        for plan in plans:
            data = memory[at : at + plan.nbytes]
            at += plan.nbytes
            self.data.append(data)
            start = plan.header.nbytes
            raw = data[start : start + RECORD.itemsize * plan.chunks]
            records = tensors.view(raw, _INT64).reshape(plan.chunks, -1)
            self._records.append((len(self.shares), records))
            for i in range(plan.chunks):
                slot = plan.dynamic_offset + i * plan.dynamic_stride
                lo, hi = plan.chunk_range(i)
                share = Share(
                    data[plan.static_range(i)],
                    data[slot : slot + plan.dynamic_stride],
                    (hi - lo) * plan.dtype.itemsize,
                )
                self.shares.append(share)
        #: All static parts as one array, None if they do not lie side by side.
        self.statics: Any = None
        if len(plans) == 1:
            self.statics = self.data[0][plans[0].static_offset : plans[0].dynamic_offset]
        self.static_nbytes = sum(int(share.static.shape[0]) for share in self.shares)
        self.raw_nbytes = sum(share.raw_nbytes for share in self.shares)
        self._partner: tuple[ChunkViews, Any] | None = None
        self._arriving: tensors.PendingHostCopy | None = None
        #: Memory on the host for descriptors that nobody waits for.
        self.spare: list[tensors.PendingHostCopy] = []
        self._buffers: list[Buffer] = []
        #: Of many buffers, so that one operation reaches all of them.
        self._places = _Places(plans, memory) if len(plans) > 1 else None
        self._hold(_no_descriptors(len(self.shares), memory))

    def _hold(self, descriptors: Any) -> None:
        #: Descriptors of these shares, int64, shape (shares, DESCRIPTOR_WORDS), also as bytes.
        self.descriptors = descriptors
        self.descriptor_bytes = tensors.as_bytes(descriptors)
        self._seals, self._ratios = descriptors[:, 0], descriptors[:, 1]
        self._in_descriptors = [
            (descriptors[at : at + r.shape[0], 2:], r) for at, r in self._records
        ]
        self._ratio: int | None = None
        self._parcels: list[list[Any]] = []

    @property
    @tensors.kept
    def parcels(self) -> list[list[Any]]:
        """Descriptor and static part of each share: all that travels without dynamic parts."""
        if not self._parcels:
            descriptors = self.descriptor_bytes
            self._parcels = [
                [descriptors[i * DESCRIPTOR_NBYTES : (i + 1) * DESCRIPTOR_NBYTES], share.static]
                for i, share in enumerate(self.shares)
            ]
        return self._parcels

    @tensors.kept
    def paired(self, other: ChunkViews) -> Any:
        """Descriptors of these shares and of `other` as one array, copied to the host at once."""
        pair = self._partner
        if pair is None or pair[0] is not other or other._partner is not pair:
            n = len(self.shares)
            both = _no_descriptors(n + len(other.shares), self.memory)
            self._hold(both[:n])
            other._hold(both[n:])
            self._arriving = None
            pair = self._partner = other._partner = other, both
        return pair[1]

    def arriving(self, descriptors: Any) -> tensors.PendingHostCopy:
        """The pending copy of `descriptors` to the host; that of the call before is over."""
        self._arriving = tensors.PendingHostCopy(descriptors, self._arriving)
        return self._arriving

    @tensors.kept
    def arriving_late(self) -> tensors.PendingHostCopy:
        """A copy of `descriptors` to the host; it may be pending when the next call has begun."""
        return tensors.PendingHostCopy(self.descriptors, self.spare.pop() if self.spare else None)

    def write_descriptors(self, digests: Sequence[int], ratio: int) -> Any:
        """Fill `descriptors` for what has been encoded here, and return it."""
        seals = [sealed(digest, ratio) for digest in digests]
        if len(set(seals)) == 1:
            # A fill takes the number along: a GPU is not waited for.
            tensors.fill(self._seals, seals[0])
        else:
            host = np.array(seals, np.int64)
            tensors.put(self._seals, tensors.on_device(host, tensors.device_of(self.descriptors)))
        if self._ratio != ratio:
            tensors.fill(self._ratios, ratio)
            self._ratio = ratio
        if self._places is not None:
            self._places.read_records(self.descriptors)
        else:
            for in_descriptor, record in self._in_descriptors:
                tensors.put(in_descriptor, record)
        return self.descriptors

    def write_headers(self) -> None:
        """Write the headers before chunks are received here: the memory held other data."""
        if self._places is not None:
            self._places.write_heads()
            return
        (plan,), (data,) = self.plans, self.data
        data[: plan.static_offset] = tensors.on_device(_head(plan), tensors.device_of(data))

    @tensors.kept
    def buffers(self, words: Any) -> list[Buffer]:
        """The buffers that were received: their records are in the descriptors.

        What decoding on a GPU finds goes to `words`, int64, shape (buffers,) or longer.
        """
        if self._places is not None:
            self._places.write_records(self.descriptors)
        else:
            for in_descriptor, record in self._in_descriptors:
                tensors.put(record, in_descriptor)
        if not self._buffers:
            self._buffers = [
                Buffer.wrap(plan, data, assembled=True)
                for plan, data in zip(self.plans, self.data, strict=True)
            ]
            tensors.report(self._buffers, words)
        return self._buffers


def sealed(digest: int, ratio: int) -> int:
    """The first word of a descriptor, which covers the second."""
    word = (digest + ratio * _ODD) % 2**64
    return word - (word >> 63 << 64)


def plain_descriptor(text: str) -> npt.NDArray[np.int64]:
    """A descriptor of what is not encoded: `text`, no seal. int64, shape (1, DESCRIPTOR_WORDS)."""
    data = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    start = bytes(DESCRIPTOR_NBYTES - _TEXT_NBYTES)
    return np.frombuffer(bytearray(start + data), np.int64).reshape(1, DESCRIPTOR_WORDS)


def seal(descriptor: Any, digest: int, word: Any = None) -> None:
    """Write the first words of `descriptor`, int64, shape (1, DESCRIPTOR_WORDS).

    The seal covers `word`, shape (1,), on the device of `descriptor`, and 0 if it is None.
    Nothing waits for it.
    """
    tensors.fill(descriptor[0, :1], sealed(digest, 0))
    if word is not None:
        tensors.put(descriptor[0, 1:2], word)
        with np.errstate(over="ignore"):
            descriptor[0, :1] += word * (_ODD - 2**64)


def text_on(descriptor: npt.NDArray[np.int64]) -> str:
    """The text of a descriptor, shape (DESCRIPTOR_WORDS,), which may be anything, or ""."""
    data = descriptor.view(np.uint8)[DESCRIPTOR_NBYTES - _TEXT_NBYTES :].tobytes().rstrip(b"\0")
    text = data.decode("ascii", "replace")
    return text if text.split(" ")[0] in BY_NAME and text.isprintable() else ""


def sizes_on(descriptors: Any) -> list[int]:
    """Dynamic bytes by the descriptors, which are on the host. They may be anything."""
    sizes: list[int] = descriptors[:, _SIZE].tolist()
    return sizes


def pieces(shares: ChunkViews, sizes: Sequence[int]) -> list[list[Any]]:
    """What travels of each share besides its static part: its dynamic bytes."""
    return [[share.slot[:size]] for share, size in zip(shares.shares, sizes, strict=True)]


def split(x: Any, counts: Sequence[int]) -> list[Any]:
    """`x` in consecutive parts of so many rows."""
    ends = itertools.accumulate(counts, initial=0)
    return [x[start:stop] for start, stop in itertools.pairwise(ends)]


class _Places:
    """Where consecutive buffers have what comes before their static parts.

    As many launches as for one buffer: a rank of an all-to-all has one for each other rank.
    """

    def __init__(self, plans: Sequence[Plan], memory: Any) -> None:
        self._plans = plans
        *starts, end = itertools.accumulate((plan.nbytes // 8 for plan in plans), initial=0)
        self._starts = starts
        self._words = tensors.view(memory[: 8 * end], _INT64)
        self._device = tensors.device_of(memory)

    def read_records(self, descriptors: Any) -> None:
        """Copy records to `descriptors`, shape (chunks of all buffers, DESCRIPTOR_WORDS).

        Not those of buffers without elements, which nobody encodes.
        """
        records, where = self._encoded
        descriptors.reshape(-1)[where] = self._words[records]

    def write_records(self, descriptors: Any) -> None:
        """Copy records from `descriptors`."""
        records, where = self._all
        self._words[records] = descriptors.reshape(-1)[where]

    @functools.cached_property
    def _encoded(self) -> Any:
        return self._numbers([plan.nelem > 0 for plan in self._plans])

    @functools.cached_property
    def _all(self) -> Any:
        return self._numbers([True] * len(self._plans))

    @tensors.kept
    def _numbers(self, wanted: Sequence[bool]) -> Any:
        """Words of the records of the buffers that are wanted, and their places in descriptors."""
        words = RECORD.itemsize // 8
        records, where, chunks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for plan, start, some in zip(self._plans, self._starts, wanted, strict=True):
            if some:
                count = words * plan.chunks
                records.append(start + plan.header.nbytes // 8 + np.arange(count))
                rows = np.arange(chunks, chunks + plan.chunks) * DESCRIPTOR_WORDS
                where.append((rows[:, None] + np.arange(2, 2 + words)).reshape(-1))
            chunks += plan.chunks
        both = np.stack([np.concatenate(records), np.concatenate(where)])
        return tensors.on_device(both, self._device)

    def write_heads(self) -> None:
        """Write headers, and records of zeros."""
        heads = np.concatenate([_head(plan) for plan in self._plans]).view(np.int64)
        where = np.concatenate(
            [
                np.arange(start, start + plan.static_offset // 8)
                for plan, start in zip(self._plans, self._starts, strict=True)
            ]
        )
        where, heads = tensors.on_device(np.stack([where, heads]), self._device)
        self._words[where] = heads


def _no_descriptors(count: int, like: Any) -> Any:
    found = tensors.empty((count, DESCRIPTOR_WORDS), _INT64, like)
    tensors.fill(found, 0)
    return found


def _head(plan: Plan) -> npt.NDArray[np.uint8]:
    """All before the static parts; the records are zero.

    The chunks were encoded elsewhere, under any number.
    """
    header = replace(plan.header, required=plan.header.required | ASSEMBLED)
    head = np.zeros(plan.static_offset, np.uint8)
    head[: plan.header.nbytes] = np.frombuffer(header.pack(), np.uint8)
    return head
