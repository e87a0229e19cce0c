"""Encoding and decoding in a session's own memory, and what decoding has to say of damage."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ...buffer import Buffer
from ...codecs.common.base import Key, Plan
from ...decoding import decode
from ...formats.errors import FormatError
from ...many import decode_many
from ...planning import device_many
from . import tensors
from .calls import Call, rounding_key
from .chunk_views import ChunkViews
from .session import Session

#: How errors say where a buffer came from that all ranks have made.
CHUNKS = " (chunk i is rank i's)"
Span = tuple[int, int]


class Coding:
    """Encodes to and decodes from the memory of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._memory = session.memory
        self._codec = session.codec
        self._rank, self._size = session.rank, session.size

    def encode(
        self, call: Call, parts: Sequence[Any], plans: Sequence[Plan], name: str = "send"
    ) -> ChunkViews:
        """Encode each part by its plan, straight into the memory that is sent from."""
        with call.stage("encode"):
            shares = self._memory.chunks(name, plans, parts[0])
            self._memory.hold(name, shares)
            for part, plan, data in zip(parts, plans, shares.data, strict=True):
                self.encode_into(part, plan, data, self.key(call))
        return shares

    def encode_many(self, call: Call, parts: Sequence[Any], plans: Sequence[Plan]) -> ChunkViews:
        """As `encode`, in one batch: the parts draw by one key, and empty ones are left out."""
        with call.stage("encode"):
            shares = self._memory.chunks("send", plans, parts[0])
            self._memory.hold("send", shares)
        self.encode_to(call, parts, plans, shares.data)
        return shares

    def encode_to(
        self, call: Call, parts: Sequence[Any], plans: Sequence[Plan], outs: Sequence[Any]
    ) -> None:
        """As `encode_many`, to memory of the caller's for each part."""
        with call.stage("encode"):
            some = [i for i, plan in enumerate(plans) if plan.nelem]
            if not some:
                return
            first, *more = some
            key, checksum = self.key(call), self._session.checksum
            if not more:
                self.encode_into(parts[first], plans[first], outs[first], key)
                return
            xs, into = [parts[i] for i in some], [outs[i] for i in some]
            kernels = _kernels_of_many(xs[0])
            if kernels is not None:
                contiguous = list(map(tensors.contiguous, xs))
                if kernels.encode_into([plans[i] for i in some], contiguous, into, key):
                    return
            self._codec.encode_many(xs, out=into, key=key, checksum=checksum)

    def encode_into(
        self,
        x: Any,
        plan: Plan,
        data: Any,
        key: Key | None,
        stats: Any = None,
        *,
        raw: bool = False,
    ) -> None:
        """Encode `x` to `data`, by the raw codec if `raw`."""
        if tensors.is_cuda(x):
            from ...gpu import encode_into

            work = self._memory.scratch("encode", plan.scratch_nbytes, x)
            if encode_into(plan, tensors.contiguous(x), data, work, key, stats):
                return
        codec, checksum = self._memory.raw if raw else self._codec, self._session.checksum
        codec.encode(x, stats=stats, key=key, out=data, chunks=plan.chunks, checksum=checksum)

    def sum_into(self, buffer: Buffer, x: Any, data: Any, key: Key, stats: Any = None) -> None:
        """Encode the sum of `buffer` and `x` to `data`."""
        if tensors.is_cuda(x):
            from ...gpu import sum_into

            work = self._memory.scratch("encode", buffer.plan.scratch_nbytes, x)
            if sum_into(buffer, tensors.contiguous(x), data, work, key, stats):
                return
        checksum = self._session.checksum
        self._codec.decode_add_encode(buffer, x, stats=stats, key=key, out=data, checksum=checksum)

    def decode_into(self, buffer: Buffer, out: Any, name: str = "decode") -> None:
        """Decode `buffer` to `out`; on a GPU the memory called `name` is used."""
        if not self._decode_here(buffer, out, 0, buffer.plan.nelem, name):
            decode(buffer, out=out)

    def add_into(self, buffer: Buffer, total: Any, name: str = "decode") -> None:
        """Add `buffer` to `total`; on a GPU the memory called `name` is used."""
        plan = buffer.plan
        if self.adds_here(plan, total) and self._decode_here(
            buffer, total, 0, plan.nelem, name, add=True
        ):
            return
        if plan.dtype.is_float:
            # Sums may be infinite or NaN; NumPy would warn.
            with np.errstate(all="ignore"):
                self._codec.decode_add(buffer, total)
        else:
            tensors.add(total, decode(buffer))

    def add_chunks(self, buffer: Buffer, total: Any) -> None:
        """Add every chunk of `buffer` to `total`, where `adds_here`."""
        n = total.shape[0]
        for r in range(buffer.plan.chunks):
            self._decode_here(buffer, total, r * n, (r + 1) * n, add=True)

    def adds_here(self, plan: Plan, total: Any) -> bool:
        """True if buffers of this plan are added to `total` as they are decoded, on a GPU."""
        if not tensors.is_cuda(total):
            return False
        from ...gpu import adds_into

        return adds_into(plan, total)

    def _decode_here(
        self,
        buffer: Buffer,
        out: Any,
        start: int,
        stop: int,
        name: str = "decode",
        *,
        add: bool = False,
    ) -> bool:
        """Decode elements `start` to `stop` on a GPU; False where that cannot be done."""
        if not tensors.is_cuda(out):
            return False
        from ...gpu import decode_into

        work = self._memory.scratch(name, buffer.plan.scratch_nbytes, out)
        return decode_into(buffer, out, work, start, stop, add=add)

    def key(self, call: Call) -> Key:
        """What the next encoding of `call` draws by."""
        encoding = call.encodings
        call.encodings += 1
        return rounding_key(self._session.seed, call.sequence, encoding, self._rank, self._size)

    def decode(
        self,
        call: Call,
        buffer: Buffer,
        out: Any,
        source: int | None,
        word: int = 0,
        note: str = CHUNKS,
    ) -> None:
        """Decode what rank `source` has sent; None: `note` says where the chunks came from.

        `word` is the buffer's number in its `ChunkViews`.
        """
        where = note if source is None else f" (from rank {source})"
        with call.stage("decode", where):
            self.decode_into(buffer, out)
        self.decoded(call, buffer, where, word)

    def decode_many(self, call: Call, buffers: Sequence[Buffer], outs: Sequence[Any]) -> None:
        """Decode what ranks have sent, in one batch; buffer i is rank i's, and some are empty."""
        some = [i for i, buffer in enumerate(buffers) if buffer.plan.nelem]
        with call.stage("decode"):
            try:
                self._decode_all([buffers[i] for i in some], [outs[i] for i in some])
            except FormatError as error:
                detail = f"{error} (from rank {some[error.number or 0]})"
                raise call.failure("decode", detail) from error
        for i in some:
            self.decoded(call, buffers[i], f" (from rank {i})", i)

    def _decode_all(self, buffers: Sequence[Buffer], outs: Sequence[Any]) -> None:
        if len(buffers) == 1:
            self.decode_into(buffers[0], outs[0])
        elif buffers:
            kernels = _kernels_of_many(outs[0])
            if kernels is None or not kernels.decode_into(buffers, outs):
                decode_many(buffers, out=outs)

    def decode_rows(
        self, call: Call, buffer: Buffer, out: Any, span: Span, note: str = CHUNKS
    ) -> None:
        """Chunk r of `buffer` to the elements `span` of row r of `out`, shape (ranks * n,)."""
        a, b = span
        rows = out.reshape(self._size, -1)
        with call.stage("decode", note):
            if tensors.is_cuda(out):
                # Host time counts here: two launches instead of two for each rank.
                tensors.put(rows[:, a:b], decode(buffer).view(self._size, b - a))
            else:
                for r, row in enumerate(rows):
                    decode(buffer, out=row[a:b], start=r * (b - a), stop=(r + 1) * (b - a))
        self.decoded(call, buffer, note)

    def decode_sent(self, call: Call, send: ChunkViews, out: Any) -> None:
        """Decode this rank's own encoding to `out`, of the shape of the plan or (ranks, n)."""
        with call.stage("decode", " (its own)"):
            buffer = Buffer.wrap(send.plans[0], send.data[0])
            tensors.put(out, decode(buffer).reshape(out.shape))

    def decoded(self, call: Call, buffer: Buffer, note: str, word: int = 0) -> None:
        """What decoding on a GPU finds is not known before; `word` is the buffer's number."""
        if buffer._memory is None:
            return
        if self._session.verify:
            with call.stage("decode", note):
                buffer.check()
        else:
            # A word may be that of several buffers, one after the other.
            before = call.unchecked.get(word, "")
            if note not in before:
                call.unchecked[word] = f"{before} or{note}" if before else note
            call.place = buffer._memory.data


def _kernels_of_many(x: Any) -> Any:
    """The module `tightwire.gpu_many` where `x` is on a GPU, and Triton is there; else None."""
    found = device_many() if tensors.is_cuda(x) else None
    return found if isinstance(found, ModuleType) else None
