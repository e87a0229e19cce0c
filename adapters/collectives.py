"""Compressed collectives, written once over any `Transport`.

After ZipCCL, sections 3 and 5.1: what travels of a tensor is the static parts of its chunks, whose
size every rank knows beforehand, the used bytes of the dynamic parts, and per chunk a card: what
call this is, and the chunk's result record, which has the size. One chunk goes to or comes from one
rank. They travel out of the buffer that the encoder wrote, and into one that the decoder
reads: header and places follow from the plan, so the receiver lays its buffer out before it comes.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import ArrayInfo
from ..buffer import Buffer
from ..codec import Codec, as_codec, decode
from ..codecs.base import Bytes, Plan
from ..formats.dtypes import BY_NAME, DType
from ..formats.errors import FormatError
from ..formats.header import ASSEMBLED, MAJOR, MINOR, RECORD, align
from ..planning import integer
from .transport import Transport

Design = Literal["first", "between"]
DESIGNS = ("first", "between")

_DIGEST = 8
_CARD = _DIGEST + RECORD.itemsize
_TWO_DESIGNS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


class CollectiveError(RuntimeError):
    """A collective that failed on this rank; `__cause__` is what the transport or decoder raised.

    `rank` is this rank, `sequence` counts collectives (messages: those of the pair), `stage` is
    what it was at. If the ranks are still in step (everything had been exchanged, only decoding
    failed), the communicator goes on; else it refuses every later call.
    """

    def __init__(self, rank: int, collective: str, sequence: int, stage: str, detail: str) -> None:
        super().__init__(rank, collective, sequence, stage, detail)
        self.rank = rank
        self.collective = collective
        self.sequence = sequence
        self.stage = stage
        self.detail = detail

    def __str__(self) -> str:
        call = f"{self.collective} #{self.sequence}"
        return f"rank {self.rank}: {call} failed in stage {self.stage!r}: {self.detail}"


@dataclass(frozen=True)
class TraceRecord:
    """What one call did on this rank.

    `raw_bytes` and `wire_bytes` went to other ranks (of recv: came), uncompressed and in fact; an
    all-gather counts its share once for every other rank. `seconds` by stage are the host's: on a
    GPU, stages that wait for nothing only queue work.
    """

    collective: str
    sequence: int
    algorithm: str
    reason: str
    raw_bytes: int
    wire_bytes: int
    seconds: dict[str, float]
    error: str | None


class _Call:
    """One call under way: its name and number, and what the trace will say of it."""

    def __init__(self, rank: int, collective: str, sequence: int, key: str) -> None:
        self.rank = rank
        self.collective = collective
        self.sequence = sequence
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.seconds: dict[str, float] = {}
        #: Nothing is left to exchange: a failure from now on is this rank's own.
        self.exchanged = False
        self._key = key
        self._stage = "start"

    @contextmanager
    def stage(self, name: str, note: str = "") -> Iterator[None]:
        """Time what happens inside, and name the stage in its errors; `note` explains them."""
        self._stage = name
        start = time.perf_counter()
        try:
            yield
        except CollectiveError:
            raise
        except (FormatError, RuntimeError, OSError) as error:
            raise self.failure(f"{error}{note}") from error
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def failure(self, detail: str) -> CollectiveError:
        """The error of this call at its present stage."""
        return CollectiveError(self.rank, self.collective, self.sequence, self._stage, detail)

    def digest(self, info: ArrayInfo, shape: tuple[int, ...]) -> bytes:
        """8 bytes that both sides of a share must agree on: this call, dtype and shape."""
        what = f"{self._key} {self.sequence} {info.dtype.name} {shape}"
        return hashlib.blake2b(what.encode(), digest_size=_DIGEST).digest()


class _Share(NamedTuple):
    """The chunk of one rank: uint8 views, `slot` with room for its dynamic part."""

    record: Any
    static: Any
    slot: Any
    raw_nbytes: int


class _Shares:
    """The chunks of one or more buffers, which lie one behind the other in `room`."""

    def __init__(self, plans: Sequence[Plan], room: Any) -> None:
        self.plans = plans
        self.data: list[Any] = []
        self.shares: list[_Share] = []
        at = 0
        for plan in plans:
            data = room[at : at + plan.nbytes]
            at += plan.nbytes
            self.data.append(data)
            for i in range(plan.chunks):
                record = plan.header.nbytes + i * RECORD.itemsize
                slot = plan.dynamic_offset + i * plan.dynamic_stride
                lo, hi = plan.chunk_range(i)
                share = _Share(
                    data[record : record + RECORD.itemsize],
                    data[plan.static_range(i)],
                    data[slot : slot + plan.dynamic_stride],
                    (hi - lo) * plan.dtype.itemsize,
                )
                self.shares.append(share)

    @property
    def statics(self) -> Any:
        """All static parts as one array, None if they do not lie side by side."""
        if len(self.plans) > 1:
            return None
        return self.data[0][self.plans[0].static_offset : self.plans[0].dynamic_offset]

    def buffers(self, cards: Any) -> list[Buffer]:
        """The buffers that were received: headers are written here, records come with the cards."""
        for share, card in zip(self.shares, cards, strict=True):
            share.record[:] = card[_DIGEST:]
        for plan, data in zip(self.plans, self.data, strict=True):
            header = _assembled_header(plan)
            data[: header.size] = _like(header, data)
            data[header.size + RECORD.itemsize * plan.chunks : plan.static_offset] = 0
        return [Buffer.wrap(p, data) for p, data in zip(self.plans, self.data, strict=True)]


class Communicator:
    """Collectives of a group of ranks that send every tensor encoded.

    Tensors are NumPy arrays or PyTorch tensors that the transport can move; results are of the same
    library. With a lossless codec everything but sums is bit for bit what came in, and sums are
    bit-identical on all ranks. A dtype that the codec cannot help goes raw. Work memory, up to
    about twice the largest tensor, is kept between calls.

    `sizes` is one of ZipCCL's two designs: "first" sends the sizes of the compressed shares before
    anything else, "between" sends them behind the static parts, which need not wait for slow ranks.

    All ranks make the same calls in the same order, with equal dtypes and matching shapes, from one
    thread at a time. `out` may overlap the input. Bad arguments raise TypeError or ValueError
    before anything is sent; what goes wrong later raises CollectiveError, and `out` is undefined.
    """

    def __init__(
        self,
        transport: Transport,
        codec: str | Codec = "zipccl",
        *,
        sizes: Design = "first",
        checksum: bool = True,
        trace: int = 1000,
    ) -> None:
        """Made by all ranks together: raises CollectiveError on each of them if they differ.

        Compared are the versions of format and codec and all parameters. `trace` is the number of
        calls that `trace()` remembers.
        """
        if sizes not in DESIGNS:
            raise ValueError(f"sizes is {sizes!r}; allowed: {DESIGNS}")
        if integer("trace", trace) < 0:
            raise ValueError(f"trace is {trace}; allowed: at least 0")
        self._transport = transport
        self._codec = as_codec(codec)
        self._sizes_first = sizes == "first"
        self._checksum = bool(checksum)
        self._trace: deque[TraceRecord] = deque(maxlen=trace)
        self._counts: Counter[str] = Counter()
        self._rooms: dict[str, Any] = {}
        self._broken: str | None = None
        self._rank = transport.rank
        self._size = transport.world_size
        self._agree(sizes)

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def codec(self) -> Codec:
        """The codec of all ranks."""
        return self._codec

    def trace(self) -> list[TraceRecord]:
        """The last calls, oldest first, with those that failed."""
        return list(self._trace)

    def all_gather(self, x: Any, out: Any = None) -> Any:
        """The `x` of all ranks, one behind the other along the first dimension.

        `x` has the same shape everywhere; n scalars give shape (n,). Returns `out` if it is given.
        """
        x, info = _input(x)
        shape = (self._size * info.shape[0], *info.shape[1:]) if info.shape else (self._size,)
        into = _output(out, info, shape)
        plans = self._gather_plans(info, shape)
        with self._call("all_gather", "all-gather", plans[0]) as call:
            digest = call.digest(info, info.shape)
            gathered = self._all_gather(call, x, plans, into, digest)
        return gathered if out is None else out

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
    ) -> Any:
        """Share j of `x` goes to rank j; share i of the result comes from rank i.

        Shares are rows, along the first dimension: equal ones, or `send_splits[j]` rows for rank j
        and `receive_splits[i]` from rank i. Returns `out` if it is given.
        """
        x, info = _input(x)
        rows, row = _rows(info)
        if send_splits is None and receive_splits is None:
            outward = inward = self._equal_splits(rows)
            sends = receives = [self._plan(info, info.shape, chunks=self._size)]
        elif send_splits is None or receive_splits is None:
            raise ValueError("send_splits and receive_splits are given both or not at all")
        else:
            outward = self._splits("send_splits", send_splits)
            inward = self._splits("receive_splits", receive_splits)
            if sum(outward) != rows:
                raise ValueError(f"send_splits add up to {sum(outward)}; x has {rows} rows")
            # The chunks of a buffer are equal, so every share is a buffer of its own.
            sends = [self._plan(info, (n, *row)) for n in outward]
            receives = [self._plan(info, (n, *row)) for n in inward]
        shape = (sum(inward), *row)
        into = _output(out, info, shape)
        with self._call("all_to_all", "all-to-all", sends[0]) as call:
            send = self._encode(call, _split(x, sends), sends)
            receive = self._room("receive", receives, x)
            there = [call.digest(info, (n, *row)) for n in outward]
            here = [call.digest(info, (n, *row)) for n in inward]
            buffers = self._all_to_all(call, send, receive, there, here)
            if into is None:
                into = _empty(shape, info.dtype, x)
            for i, (buffer, part) in enumerate(zip(buffers, _split(into, receives), strict=True)):
                self._decode(call, buffer, part, i if len(buffers) > 1 else None)
        return into if out is None else out

    def reduce_scatter(self, x: Any, out: Any = None) -> Any:
        """Share r, of equal shares along the first dimension, of the sum of all ranks' `x`.

        An all-to-all; then floats are added up in float32 (float64 in float64) in the order of
        ranks and rounded once, integers wrap around. `out` may have the dtype of the sum: bfloat16
        travels, and float32 is what arrives. Returns `out` if it is given.
        """
        x, info = _input(x)
        wide = _sum_dtype(info.dtype)
        rows, row = _rows(info)
        shape = (self._equal_splits(rows)[0], *row)
        is_wide = out is not None and arrays.describe(out).dtype == wide
        into = _output(out, info._replace(dtype=wide) if is_wide else info, shape)
        plans = self._reduce_plans(info, math.prod(shape))
        with self._call("reduce_scatter", "all-to-all and sum", plans[0]) as call:
            total = into.reshape(-1) if is_wide else _empty((math.prod(shape),), wide, x)
            digest = call.digest(info, info.shape)
            buffers = self._swap_shares(call, x.reshape(-1), plans, digest)
            call.exchanged = True
            self._sum(call, buffers, total)
            if into is None:
                return _cast(total, info.dtype).reshape(shape)
            if not is_wide:
                into[...] = _cast(total, info.dtype).reshape(shape)
        return out

    def all_reduce(self, x: Any, out: Any = None) -> Any:
        """The sum of all ranks' `x`, which has any shape. Returns `out` if it is given.

        In two shots: a reduce-scatter, whose sums are those of `reduce_scatter`, and an all-gather
        of its results.
        """
        x, info = _input(x)
        wide = _sum_dtype(info.dtype)
        into = _output(out, info, info.shape)
        flat = x.reshape(-1)
        # What equal shares leave over is less than an element for each rank: it goes as it is.
        each, rest = divmod(math.prod(info.shape), self._size)
        main = self._size * each
        scatter = self._reduce_plans(info, each)
        gather = self._gather_plans(info._replace(shape=(each,)), (main,))
        with self._call("all_reduce", "two-shot", scatter[0]) as call:
            digest = call.digest(info, info.shape)
            total = _empty((each,), wide, x)
            self._sum(call, self._swap_shares(call, flat[:main], scatter, digest), total)
            left = _empty((rest,), wide, x)
            if rest:
                self._sum_plain(call, flat[main:], left)
            if into is None:
                into = _empty(info.shape, info.dtype, x)
            result = into.reshape(-1)
            result[main:] = _cast(left, info.dtype)
            self._all_gather(call, _cast(total, info.dtype), gather, result[:main], digest)
        return into if out is None else out

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite `x` on all ranks with that of rank `root`, and return it.

        The root encodes once and scatters the chunks, and an all-gather spreads them.
        """
        root = self._peer("root", root)
        values, info = _input(x)
        _output(x, info, info.shape, "x")
        plan = self._plan(info, info.shape, chunks=self._size)
        is_root = self._rank == root
        with self._call("broadcast", "scatter and all-gather", plan) as call:
            digests = [call.digest(info, (root, *info.shape))] * self._size
            whole = self._room("receive", [plan], x)
            if is_root:
                send = self._encode(call, [values], [plan])
                cards = self._cards(send, digests)
                parts = [[cards.reshape(-1)]] * self._size
            else:
                cards = _bytes_like(self._size * _CARD, x).reshape(self._size, _CARD)
                parts = [[]] * self._size
            with call.stage("sizes"):
                self._scatter(call, root, parts, [cards.reshape(-1)])
                sizes = self._sizes(call, cards, whole, digests, root)
            if is_root:
                own = send.shares[root]
                parts = _pieces(send, sizes, static=True)
                call.raw_bytes += sum(s.raw_nbytes for s in send.shares) - own.raw_nbytes
            else:
                # Not in its place in `whole`: an all-gather must not overlap itself.
                room = self._bytes("send", plan.static_stride + align(max(sizes)), x)
                own = whole.shares[self._rank]._replace(
                    static=room[: plan.static_stride], slot=room[plan.static_stride :]
                )
            with call.stage("scatter"):
                self._scatter(call, root, parts, [own.static, own.slot[: sizes[self._rank]]])
            self._gather_static(call, own, whole)
            buffer = self._gather_dynamic(call, own, whole, cards, sizes)
            if not is_root:
                self._decode(call, buffer, x, root)
        return x

    def send(self, x: Any, to: int) -> None:
        """Send `x` to another rank, which calls `recv` with an array of its shape and dtype."""
        to = self._peer("to", to, other=True)
        x, info = _input(x)
        plan = self._plan(info, info.shape)
        with self._call("send", "message", plan, f"from {self._rank} to {to}") as call:
            shares = self._encode(call, [x], [plan])
            digests = [call.digest(info, info.shape)]
            cards = self._cards(shares, digests)
            with call.stage("sizes"):
                self._transport.send(cards.reshape(-1), to)
                sizes = self._sizes(call, cards, shares, digests)
            self._message(call, shares, sizes[0], to, self._transport.send)

    def recv(self, out: Any, source: int) -> Any:
        """Fill `out` with what rank `source` sends to this rank, and return it."""
        source = self._peer("source", source, other=True)
        _, info = _input(out)
        _output(out, info, info.shape)
        plan = self._plan(info, info.shape)
        with self._call("recv", "message", plan, f"from {source} to {self._rank}") as call:
            shares = self._room("receive", [plan], out)
            card = _bytes_like(_CARD, out)
            cards = card.reshape(1, _CARD)
            with call.stage("sizes"):
                self._transport.recv(card, source)
                digests = [call.digest(info, info.shape)]
                sizes = self._sizes(call, cards, shares, digests, source)
            self._message(call, shares, sizes[0], source, self._transport.recv)
            self._decode(call, shares.buffers(cards)[0], out, source)
        return out

    # Arguments, plans and memory.

    def _agree(self, sizes: str) -> None:
        spec = self._codec.spec
        facts = {
            "format": f"{MAJOR}.{MINOR}",
            "codec": f"{spec.name} version {spec.version}, {spec!r}",
            "sizes": sizes,
            "checksum": self._checksum,
        }
        mine = ", ".join(f"{name} {value}" for name, value in facts.items()).encode()
        call = _Call(self._rank, "Communicator", 0, "")
        with call.stage("agree"):
            length = np.array([len(mine)], np.int64).view(np.uint8)
            longest = int(self._gather_plain(length).view(np.int64).max())
            padded = np.frombuffer(bytearray(mine.ljust(longest)), np.uint8)
            texts = [row.tobytes().decode().rstrip() for row in self._gather_plain(padded)]
        groups = {text: [r for r, t in enumerate(texts) if t == text] for text in texts}
        if len(groups) > 1:
            found = "; ".join(f"ranks {ranks}: {text}" for text, ranks in groups.items())
            raise call.failure(f"ranks differ: {found}")

    def _gather_plain(self, mine: Bytes) -> Bytes:
        """`mine` of all ranks, shape (world_size, mine.size), through the transport's arrays."""
        x = self._transport.empty(mine.size)
        out = self._transport.empty(self._size * mine.size)
        x[:] = _like(mine, x)
        self._transport.all_gather(out, x)
        gathered: Bytes = arrays.host_array(out).reshape(self._size, mine.size)
        return gathered

    @contextmanager
    def _call(
        self, collective: str, algorithm: str, plan: Plan, pair: str | None = None
    ) -> Iterator[_Call]:
        """Number a call, keep its record, and remember a failure that leaves ranks out of step."""
        key = collective if pair is None else pair
        # Messages concern two ranks only, so that every pair counts its own.
        counter = "group" if pair is None else pair
        sequence = self._counts[counter]
        self._counts[counter] += 1
        call = _Call(self._rank, collective, sequence, key)
        if self._broken is not None:
            raise call.failure(f"an earlier call has failed: {self._broken}")
        name = self._codec.name
        if plan.codec.name == name:
            reason = f"{name} codes {plan.dtype.name}"
        else:
            reason = f"{name} gains nothing on {plan.dtype.name}{list(plan.shape)}"
        if collective in _TWO_DESIGNS:
            algorithm += f", sizes {'first' if self._sizes_first else 'between'}"
        error: str | None = None
        try:
            yield call
        except BaseException as caught:
            error = str(caught)
            if not call.exchanged:
                self._broken = error
            raise
        finally:
            record = TraceRecord(
                collective,
                sequence,
                f"{algorithm}, {plan.codec.name}",
                reason,
                call.raw_bytes,
                call.wire_bytes,
                call.seconds,
                error,
            )
            self._trace.append(record)

    def _plan(
        self,
        info: ArrayInfo,
        shape: tuple[int, ...],
        chunks: int = 1,
        capacity: int | None = None,
    ) -> Plan:
        return self._codec.plan(
            shape,
            info.dtype,
            chunks=chunks,
            dynamic_capacity=capacity,
            checksum=self._checksum,
        )

    def _gather_plans(self, info: ArrayInfo, shape: tuple[int, ...]) -> tuple[Plan, Plan]:
        """Plans of one rank's buffer and of that of all ranks, whose chunks are laid out alike."""
        return self._plan(info, info.shape), self._plan(info, shape, chunks=self._size)

    def _reduce_plans(self, info: ArrayInfo, each: int) -> tuple[Plan, Plan]:
        """Plans of the buffer that is sent and of those that come, whose chunks are alike."""
        whole = self._plan(info, (self._size * each,), chunks=self._size)
        return whole, self._plan(info, (each,))

    def _equal_splits(self, rows: int) -> list[int]:
        if rows % self._size:
            raise ValueError(f"x has {rows} rows; allowed: a multiple of {self._size}, the ranks")
        return [rows // self._size] * self._size

    def _splits(self, name: str, splits: Sequence[int]) -> list[int]:
        found = [integer(f"an entry of {name}", n) for n in splits]
        if len(found) != self._size or min(found) < 0:
            raise ValueError(f"{name} is {found}; allowed: {self._size} numbers of rows >= 0")
        return found

    def _peer(self, name: str, rank: int, other: bool = False) -> int:
        rank = integer(name, rank)
        if not 0 <= rank < self._size or (other and rank == self._rank):
            allowed = f"0 to {self._size - 1}" + (f" but {self._rank}" if other else "")
            raise ValueError(f"{name} is {rank}; allowed: {allowed}")
        return rank

    def _bytes(self, name: str, nbytes: int, like: Any) -> Any:
        """The communicator's own memory called `name`, which grows."""
        info = arrays.describe(like)
        key = f"{name} {info.library} {info.device}"
        room = self._rooms.get(key)
        if room is None or room.shape[0] < nbytes:
            room = self._rooms[key] = _bytes_like(nbytes, like)
        return room[:nbytes]

    def _room(self, name: str, plans: Sequence[Plan], like: Any) -> _Shares:
        return _Shares(plans, self._bytes(name, sum(plan.nbytes for plan in plans), like))

    # Steps that the collectives are made of.

    def _encode(self, call: _Call, parts: Sequence[Any], plans: Sequence[Plan]) -> _Shares:
        """Encode each part by its plan, straight into the memory that is sent from."""
        with call.stage("encode"):
            shares = self._room("send", plans, parts[0])
            for part, plan, data in zip(parts, plans, shares.data, strict=True):
                self._codec.encode(part, out=data, chunks=plan.chunks, checksum=self._checksum)
        return shares

    def _decode(self, call: _Call, buffer: Buffer, out: Any, source: int | None) -> Any:
        """Decode what came from rank `source`; None: chunk i of the buffer came from rank i.

        The last step of a call.
        """
        call.exchanged = True
        came = "chunk i is rank i's" if source is None else f"from rank {source}"
        with call.stage("decode", f" ({came})"):
            result = decode(buffer, out=out)
            # What decoding on a GPU finds is not known before.
            buffer.check()
        return result

    def _cards(self, shares: _Shares, digests: Sequence[bytes]) -> Any:
        """The card of every share, shape (shares, _CARD)."""
        host = np.zeros((len(digests), _CARD), np.uint8)
        host[:, :_DIGEST] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, _DIGEST)
        cards = _like(host, shares.data[0])
        for card, share in zip(cards, shares.shares, strict=True):
            card[_DIGEST:] = share.record
        return cards

    def _sizes(
        self,
        call: _Call,
        cards: Any,
        shares: _Shares,
        digests: Sequence[bytes],
        source: int | None = None,
    ) -> list[int]:
        """Dynamic bytes by the cards. Raises if one is of another call, or does not fit.

        The cards are those of all ranks, or all from rank `source`.
        """
        host = arrays.host_array(cards)
        strange = [i for i, d in enumerate(digests) if host[i, :_DIGEST].tobytes() != d]
        if strange:
            strange = strange if source is None else [source]
            raise call.failure(f"ranks {strange} make another call, or of another dtype or shape")
        records = np.ascontiguousarray(host[:, _DIGEST:]).view(RECORD)
        sizes: list[int] = records["dynamic_nbytes"].reshape(-1).tolist()
        for i, (size, share) in enumerate(zip(sizes, shares.shares, strict=True)):
            if size > share.slot.shape[0]:
                sender, most = i if source is None else source, share.slot.shape[0]
                raise call.failure(f"rank {sender} claims {size} dynamic bytes, at most {most}")
        return sizes

    def _all_to_all(
        self,
        call: _Call,
        send: _Shares,
        receive: _Shares,
        there: Sequence[bytes],
        here: Sequence[bytes],
    ) -> list[Buffer]:
        """Share j of `send` goes to rank j; returns the buffers of `receive`, filled.

        `there` are the digests of the shares that go, `here` of those that come.
        """
        if not self._sizes_first:
            with call.stage("static"):
                out, x = receive.statics, send.statics
                if out is None or x is None:
                    outs = [[share.static] for share in receive.shares]
                    self._transport.all_to_all_v(outs, [[share.static] for share in send.shares])
                else:
                    self._transport.all_to_all(out, x)
        cards = self._cards(send, there)
        came = _bytes_like(self._size * _CARD, cards).reshape(self._size, _CARD)
        with call.stage("sizes"):
            self._transport.all_to_all(came.reshape(-1), cards.reshape(-1))
            incoming = self._sizes(call, came, receive, here)
            outgoing = self._sizes(call, cards, send, there)
        with call.stage("payload" if self._sizes_first else "dynamic"):
            outs = _pieces(receive, incoming, static=self._sizes_first)
            xs = _pieces(send, outgoing, static=self._sizes_first)
            self._transport.all_to_all_v(outs, xs)
        for peer, (share, size) in enumerate(zip(send.shares, outgoing, strict=True)):
            if peer != self._rank:
                call.raw_bytes += share.raw_nbytes
                call.wire_bytes += _CARD + share.static.shape[0] + size
        return receive.buffers(came)

    def _all_gather(
        self, call: _Call, x: Any, plans: tuple[Plan, Plan], out: Any, digest: bytes
    ) -> Any:
        send = self._encode(call, [x], [plans[0]])
        whole = self._room("receive", [plans[1]], x)
        own = send.shares[0]
        if not self._sizes_first:
            self._gather_static(call, own, whole)
        cards = _bytes_like(self._size * _CARD, x).reshape(self._size, _CARD)
        with call.stage("sizes"):
            card = self._cards(send, [digest])
            self._transport.all_gather(cards.reshape(-1), card.reshape(-1))
            sizes = self._sizes(call, cards, whole, [digest] * self._size)
        call.wire_bytes += (self._size - 1) * _CARD
        if self._sizes_first:
            self._gather_static(call, own, whole)
        buffer = self._gather_dynamic(call, own, whole, cards, sizes)
        return self._decode(call, buffer, out, None)

    def _gather_static(self, call: _Call, own: _Share, whole: _Shares) -> None:
        with call.stage("static"):
            self._transport.all_gather(whole.statics, own.static)
        call.raw_bytes += (self._size - 1) * own.raw_nbytes
        call.wire_bytes += (self._size - 1) * own.static.shape[0]

    def _gather_dynamic(
        self, call: _Call, own: _Share, whole: _Shares, cards: Any, sizes: Sequence[int]
    ) -> Buffer:
        """Gather the dynamic parts behind the static ones, and return the whole buffer.

        Its slots are as long as the largest part, so that an equal all-gather fills them.
        """
        (plan,) = whole.plans
        plan = replace(plan, dynamic_stride=align(max(sizes)))
        with call.stage("dynamic"):
            shares = _Shares([plan], whole.data[0])
            if plan.dynamic_stride:
                out = shares.data[0][plan.dynamic_offset :]
                self._transport.all_gather(out, own.slot[: plan.dynamic_stride])
        call.wire_bytes += (self._size - 1) * plan.dynamic_stride
        return shares.buffers(cards)[0]

    def _swap_shares(
        self, call: _Call, flat: Any, plans: tuple[Plan, Plan], digest: bytes
    ) -> list[Buffer]:
        """All ranks' buffers of this rank's share of `flat`, shape (ranks * n,)."""
        send = self._encode(call, [flat], [plans[0]])
        # A buffer for each rank, as decode_add adds a whole one.
        receive = self._room("receive", [plans[1]] * self._size, flat)
        return self._all_to_all(call, send, receive, [digest] * self._size, [digest] * self._size)

    def _sum(self, call: _Call, buffers: Sequence[Buffer], total: Any) -> None:
        _clear(total)
        for source, buffer in enumerate(buffers):
            with call.stage("decode", f" (from rank {source})"):
                if buffer.plan.dtype.is_float:
                    # Sums may be infinite or NaN; NumPy would warn.
                    with np.errstate(all="ignore"):
                        self._codec.decode_add(buffer, total)
                else:
                    _add(total, decode(buffer))
                buffer.check()

    def _sum_plain(self, call: _Call, x: Any, total: Any) -> None:
        """Sum all ranks' few elements `x` to `total`; they travel as they are."""
        dtype = arrays.describe(x).dtype
        mine = _empty((x.shape[0],), dtype, x)
        mine[:] = x
        nbytes = x.shape[0] * dtype.itemsize
        came = _bytes_like(self._size * nbytes, x)
        with call.stage("rest"):
            self._transport.all_gather(came, _view(mine, BY_NAME["uint8"]))
        call.raw_bytes += (self._size - 1) * nbytes
        call.wire_bytes += (self._size - 1) * nbytes
        _clear(total)
        for values in _view(came, dtype).reshape(self._size, -1):
            _add(total, values)

    def _scatter(
        self, call: _Call, root: int, parts: Sequence[Sequence[Any]], into: Sequence[Any]
    ) -> None:
        """The arrays `parts[j]` of rank `root` fill the arrays `into` of every other rank j."""
        outs: list[Sequence[Any]] = [[] for _ in range(self._size)]
        xs = list(outs)
        if self._rank == root:
            xs = [part if peer != root else [] for peer, part in enumerate(parts)]
            call.wire_bytes += sum(piece.shape[0] for part in xs for piece in part)
        else:
            outs[root] = into
        self._transport.all_to_all_v(outs, xs)

    def _message(
        self,
        call: _Call,
        shares: _Shares,
        size: int,
        peer: int,
        move: Callable[[Any, int], None],
    ) -> None:
        """Send or receive the payload of one buffer: static and dynamic part are neighbours."""
        (plan,), (data,) = shares.plans, shares.data
        payload = data[plan.static_offset : plan.dynamic_offset + size]
        with call.stage("payload"):
            if payload.shape[0]:
                move(payload, peer)
        call.raw_bytes += shares.shares[0].raw_nbytes
        call.wire_bytes += _CARD + int(payload.shape[0])


def _rows(info: ArrayInfo) -> tuple[int, tuple[int, ...]]:
    """Number and shape of the rows of x."""
    if not info.shape:
        raise ValueError("x has no dimensions; shares need one to lie along")
    return info.shape[0], info.shape[1:]


def _pieces(shares: _Shares, sizes: Sequence[int], *, static: bool) -> list[list[Any]]:
    """What travels of each share: its dynamic bytes, with `static` the static part before them."""
    pairs = zip(shares.shares, sizes, strict=True)
    if static:
        return [[share.static, share.slot[:size]] for share, size in pairs]
    return [[share.slot[:size]] for share, size in pairs]


def _split(x: Any, plans: Sequence[Plan]) -> list[Any]:
    """`x` in consecutive parts of the plans' rows."""
    if len(plans) == 1:
        return [x]
    parts, at = [], 0
    for plan in plans:
        parts.append(x[at : at + plan.shape[0]])
        at += plan.shape[0]
    return parts


@functools.lru_cache(maxsize=256)
def _assembled_header(plan: Plan) -> Bytes:
    """The plan's header, for chunks that were encoded elsewhere, under any number."""
    header = replace(plan.header, required=plan.header.required | ASSEMBLED)
    return np.frombuffer(bytearray(header.pack()), np.uint8)


# What NumPy and PyTorch do not share.


def _input(x: Any) -> tuple[Any, ArrayInfo]:
    info = arrays.describe(x)
    if info.library == "torch":
        return x.detach(), info
    if info.library != "numpy":
        raise TypeError(f"x is a {info.library} array; allowed: NumPy and PyTorch")
    return arrays.host_array(x).astype(info.dtype.numpy, copy=False), info


def _output(out: Any, info: ArrayInfo, shape: tuple[int, ...], what: str = "out") -> Any:
    """The memory of `out`, None if it is None.

    Raises TypeError or ValueError if it is not fit for a result of this shape, like `info` else.
    """
    if out is None:
        return None
    found = arrays.describe(out)
    if (found.library, found.device) != (info.library, info.device):
        where = f"{found.library} on {found.device or 'the host'}"
        raise ValueError(f"{what} is {where}; needed: {info.library} where x is")
    arrays.check_writable(out, found, info.dtype, shape, what)
    if found.library == "torch":
        fit = out.is_contiguous()
    else:
        fit = isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable
        fit = fit and out.dtype.isnative
    if not fit:
        raise ValueError(f"{what} must be contiguous, writable and in native byte order")
    return out.detach() if found.library == "torch" else out


def _is_torch(x: Any) -> bool:
    return arrays.library_of(x) == "torch"


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return getattr(torch, dtype.name)


def _empty(shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
    if _is_torch(like):
        return like.new_empty(shape, dtype=_torch_dtype(dtype))
    return np.empty(shape, dtype.numpy)


def _bytes_like(nbytes: int, like: Any) -> Any:
    return _empty((nbytes,), BY_NAME["uint8"], like)


def _like(host: Bytes, like: Any) -> Any:
    """`host` as an array of the library and device of `like`."""
    if _is_torch(like):
        import torch

        return torch.from_numpy(host).to(like.device)
    return host


def _view(x: Any, dtype: DType) -> Any:
    """The 1-D array `x` with its bytes as elements of `dtype`."""
    return x.view(_torch_dtype(dtype) if _is_torch(x) else dtype.numpy)


def _cast(x: Any, dtype: DType) -> Any:
    """`x` in `dtype`: `x` itself if it is that already."""
    if _is_torch(x):
        return x.to(_torch_dtype(dtype))
    with np.errstate(all="ignore"):
        return x.astype(dtype.numpy, copy=False)


def _clear(total: Any) -> None:
    # A sum that starts at 0.0 would lose the sign of -0.0 + -0.0.
    is_float = arrays.describe(total).dtype.is_float
    total[...] = -0.0 if is_float else 0


def _add(total: Any, values: Any) -> None:
    dtype = arrays.describe(total).dtype
    if not dtype.is_float:
        # PyTorch adds no unsigned integers; signed ones have the same bits.
        dtype = BY_NAME[f"int{8 * dtype.itemsize}"]
        total, values = _view(total, dtype), _view(values, dtype)
    with np.errstate(all="ignore"):
        total += _cast(values, dtype)


def _sum_dtype(dtype: DType) -> DType:
    """The dtype that sums of `dtype` are made in; TypeError if there is none."""
    if dtype.is_float:
        return BY_NAME["float64" if dtype.name == "float64" else "float32"]
    if dtype.numpy.kind not in "iu":
        raise TypeError(f"x is {dtype.name}; allowed: floats and integers")
    return dtype
