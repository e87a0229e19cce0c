"""Compressed collectives, written once over any `Transport`.

After ZipCCL, sections 3 and 5.1: what travels of a tensor is the static parts of its chunks, whose
size every rank knows beforehand, the used bytes of the dynamic parts, and per chunk a card: what
call this is, and the chunk's result record, which has the size. One chunk goes to or comes from one
rank. They travel out of the buffer that the encoder wrote, and into one that the decoder
reads: header and places follow from the plan, so the receiver lays its buffer out before it comes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import ArrayInfo
from ..buffer import Buffer
from ..codec import Codec, as_codec, decode
from ..codecs.base import Bytes, Plan
from ..formats.dtypes import BY_NAME, DType
from ..formats.header import MAJOR, MINOR, align
from ..planning import integer
from . import tensors
from .calls import Call, TraceRecord
from .cost import Choice
from .lanes import Lanes
from .shares import CARD_NBYTES, CARD_WORDS, Share, Shares, pieces, sealed, sizes_on, split
from .switch import ALGORITHMS, AS_BEFORE, Algorithm, Measured, Switch
from .tensors import as_input, as_output, as_result
from .transport import Transport

Design = Literal["first", "between"]
DESIGNS = ("first", "between")

#: Elements of a piece of a pipelined message are a multiple of this, so that tiles are whole.
_PIECE = 1 << 16
#: Bytes of a rank's input that the paths are timed with, and how often.
_MEASURED_GPU = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
_MEASURED_HOST = (1 << 13, 1 << 17, 1 << 21)
_TIMED = 4
_PATHS = (
    Choice("native", 1, 0.0, 0.0, "measured"),
    Choice("compressed", 1, 0.0, 0.0, "measured"),
    Choice("pipelined", 4, 0.0, 0.0, "measured"),
)
_TWO_DESIGNS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
_INT64 = BY_NAME["int64"]

Span = tuple[int, int]
#: The fields of a TraceRecord, which costs more to make.
_Traced = tuple[str, int, str, str, int, int, dict[str, float], str | None]


class _Exchange(NamedTuple):
    """A piece whose cards and static parts are on the wire; its dynamic parts are not yet."""

    send: Shares
    receive: Shares
    cards: Any
    came: Any
    on_the_way: tensors.OnTheWay
    digests: Sequence[int]


class _Unchecked(NamedTuple):
    """What decoding on a GPU will have found: `word` is 0 if nothing."""

    call: Call
    note: str
    buffer: Buffer
    word: tensors.OnTheWay


class Communicator:
    """Collectives of a group of ranks that send every tensor encoded.

    Tensors are arrays that the transport can move: NumPy and PyTorch, on a GPU also CuPy and JAX,
    which cross by DLPack; results are of the same library. With a lossless codec everything but
    sums is bit for bit what came in, and sums are bit-identical on all ranks. A dtype that the
    codec cannot help goes raw. Work memory, up to about twice the largest tensor, is kept.

    `algorithm` is "compressed", "pipelined" (in `pieces` pieces, so that encoding, wire and
    decoding overlap), "native" (as it is), or "auto": the first call of a kind (collective, dtype)
    measures the paths on this group, and every call takes what the model of `cost.py` says is
    fastest. After ZipCCL, section 5.2.

    `sizes` is one of ZipCCL's two designs: "first" sends the sizes of the compressed shares before
    anything else, "between" sends them behind the static parts, which need not wait for slow ranks.

    All ranks make the same calls in the same order, with equal dtypes and matching shapes, from one
    thread at a time. `out` may overlap the input. Bad arguments raise TypeError or ValueError
    before anything is sent; what goes wrong later raises CollectiveError, and `out` is undefined.
    Damage that decoding on a GPU meets is raised at the end of a later call or by `check()`, with
    `verify=True` at once.
    """

    def __init__(
        self,
        transport: Transport,
        codec: str | Codec = "zipccl",
        *,
        algorithm: Algorithm = "compressed",
        pieces: int = 4,
        sizes: Design = "first",
        checksum: bool = True,
        verify: bool = False,
        trace: int = 1000,
    ) -> None:
        """Made by all ranks together: raises CollectiveError on each of them if they differ.

        Compared are the versions of format and codec and all parameters. `trace` is the number of
        calls that `trace()` remembers.
        """
        if sizes not in DESIGNS:
            raise ValueError(f"sizes is {sizes!r}; allowed: {DESIGNS}")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is {algorithm!r}; allowed: {ALGORITHMS}")
        if integer("trace", trace) < 0:
            raise ValueError(f"trace is {trace}; allowed: at least 0")
        if integer("pieces", pieces) < 1:
            raise ValueError(f"pieces is {pieces}; allowed: at least 1")
        self._transport = transport
        self._codec = as_codec(codec)
        self._sizes_first = sizes == "first"
        self._checksum = bool(checksum)
        self._verify = bool(verify)
        self._trace: deque[_Traced] = deque(maxlen=trace)
        self._counts: Counter[str] = Counter()
        self._rooms: dict[str, Any] = {}
        self._unchecked: deque[_Unchecked] = deque()
        self._broken: str | None = None
        self._rank = transport.rank
        self._size = transport.world_size
        self._switch = Switch(self._codec, algorithm, pieces, self._measure)
        self._agree(sizes, algorithm, pieces)

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

    @property
    def transport(self) -> Transport:
        """What moves the bytes."""
        return self._transport

    def trace(self, last: int | None = None) -> list[TraceRecord]:
        """The last calls, oldest first, with those that failed; all that are known or `last`."""
        skipped = 0 if last is None else max(len(self._trace) - last, 0)
        return [TraceRecord(*traced) for traced in itertools.islice(self._trace, skipped, None)]

    def check(self) -> None:
        """Raise CollectiveError for damage that decoding on a GPU has met. Waits for the device."""
        while self._unchecked:
            self._settle(self._unchecked.popleft())

    def slow_ranks(self, calls: int = 100) -> list[tuple[int, float]]:
        """Ranks and the seconds that the others waited for each in the last `calls` calls.

        The slowest first. A collective: every rank asks, and gets the same answer. In the stage
        "sizes" every rank waits until the last has come: who waits less came later.
        """
        names = {"sizes", "native"}
        last = [r for r in self.trace() if r.collective in _TWO_DESIGNS and r.error is None]
        waits = [sum(s for n, s in r.seconds.items() if n in names) for r in last[-calls:]]
        mine = np.zeros(calls, np.float64)
        mine[: len(waits)] = waits
        table = self._gather_plain(mine.view(np.uint8)).view(np.float64)
        behind = (table.max(0) - table).sum(1)
        order = np.argsort(-behind, kind="stable")
        return [(int(rank), float(behind[rank])) for rank in order]

    def all_gather(self, x: Any, out: Any = None) -> Any:
        """The `x` of all ranks, one behind the other along the first dimension.

        `x` has the same shape everywhere; n scalars give shape (n,). Returns `out` if it is given.
        """
        native = self._switch.is_native("all_gather", x)
        if native:
            found = self._fast("all_gather", x, out, self._size, self._transport.all_gather)
            if found is not None:
                return found
        x, info, target = as_input(x)
        shape = (self._size * info.shape[0], *info.shape[1:]) if info.shape else (self._size,)
        into = as_output(out, info, shape, target)
        choice = AS_BEFORE if native else self._switch.choose("all_gather", x, info)
        with self._call("all_gather", "all-gather", info, choice) as call:
            if into is None:
                into = tensors.empty(shape, info.dtype, x)
            if choice.algorithm == "native":
                self._gather_native(call, x, into)
            else:
                self._gather(call, x.reshape(-1), into.reshape(-1), info, choice)
        return as_result(into, info.dtype, target) if out is None else out

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
        native = send_splits is None and self._switch.is_native("all_to_all", x)
        if native:
            found = self._fast("all_to_all", x, out, 1, self._transport.all_to_all)
            if found is not None:
                return found
        x, info, target = as_input(x)
        rows, row = _rows(info)
        if send_splits is None and receive_splits is None:
            outward = inward = self._equal_splits(rows)
        elif send_splits is None or receive_splits is None:
            raise ValueError("send_splits and receive_splits are given both or not at all")
        else:
            outward = self._splits("send_splits", send_splits)
            inward = self._splits("receive_splits", receive_splits)
            if sum(outward) != rows:
                raise ValueError(f"send_splits add up to {sum(outward)}; x has {rows} rows")
        equal = send_splits is None
        shape = (sum(inward), *row)
        into = as_output(out, info, shape, target)
        # Ranks know sizes of their own only: unequal shares cannot be a matter of choice.
        choice = AS_BEFORE
        if not native:
            choice = self._switch.choose("all_to_all", x, info, fixed=not equal)
        with self._call("all_to_all", "all-to-all", info, choice) as call:
            if into is None:
                into = tensors.empty(shape, info.dtype, x)
            width = math.prod(row)
            flat, result = x.reshape(-1), into.reshape(-1)
            if choice.algorithm == "native":
                sends, receives = [n * width for n in outward], [n * width for n in inward]
                self._swap_native(call, flat, result, sends, receives, equal)
            elif equal:
                self._swap_equal(call, flat, result, info, choice)
            else:
                # The chunks of a buffer are equal, so every share is a buffer of its own.
                outs = [self._plan(info.dtype, n * width) for n in outward]
                ins = [self._plan(info.dtype, n * width) for n in inward]
                there = [call.digest(info, (n, *row)) for n in outward]
                here = [call.digest(info, (n, *row)) for n in inward]
                parts = split(flat, outs) if len(outs) > 1 else [flat]
                send = self._encode(call, parts, outs)
                receive = self._room("receive", ins, x)
                began = self._begin_swap(call, send, receive, there, here)
                buffers = self._end_swap(call, began)
                for i, (buffer, part) in enumerate(zip(buffers, split(result, ins), strict=True)):
                    self._decode(call, buffer, part, i)
        return as_result(into, info.dtype, target) if out is None else out

    def reduce_scatter(self, x: Any, out: Any = None, *, wire: str | None = None) -> Any:
        """Share r, of equal shares along the first dimension, of the sum of all ranks' `x`.

        An all-to-all; then floats are added up in float32 (float64 in float64) in the order of
        ranks and rounded once, integers wrap around. `out` may have the dtype of the sum: bfloat16
        travels, and float32 is what arrives. `wire` is a dtype that `x` is rounded to before it
        travels. Returns `out` if it is given.

        Natively float32, float64, int32 and int64 are summed by the network, in its own order.
        """
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        rows, row = _rows(info)
        shape = (self._equal_splits(rows)[0], *row)
        is_wide = out is not None and arrays.describe(out).dtype == wide
        into = as_output(out, info._replace(dtype=wide) if is_wide else info, shape, target)
        sent = _wire_dtype(wire, info.dtype)
        choice = self._switch.choose("reduce_scatter", x, info._replace(dtype=sent))
        with self._call("reduce_scatter", "all-to-all and sum", info, choice, sent) as call:
            total = into if is_wide else tensors.empty(shape, wide, x)
            self._scatter_sums(call, x, total.reshape(-1), info, sent, choice)
            result = total if is_wide else tensors.cast(total, info.dtype)
            if into is not None and not is_wide:
                into[...] = result
        return as_result(result, info.dtype, target) if out is None else out

    def all_reduce(self, x: Any, out: Any = None, *, wire: str | None = None) -> Any:
        """The sum of all ranks' `x`, which has any shape. Returns `out` if it is given.

        In two shots: a reduce-scatter, whose sums are those of `reduce_scatter`, and an all-gather
        of its results, rounded to what travels.
        """
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        into = as_output(out, info, info.shape, target)
        sent = _wire_dtype(wire, info.dtype)
        choice = self._switch.choose("all_reduce", x, info._replace(dtype=sent))
        with self._call("all_reduce", "two-shot", info, choice, sent) as call:
            if into is None:
                into = tensors.empty(info.shape, info.dtype, x)
            flat, result = x.reshape(-1), into.reshape(-1)
            if choice.algorithm == "native" and self._sum_native(call, flat, result, info, sent):
                return as_result(into, info.dtype, target) if out is None else out
            # What equal shares leave over is less than an element for each rank: it goes as it is.
            each, rest = divmod(math.prod(info.shape), self._size)
            main = self._size * each
            total = tensors.empty((each,), wide, x)
            left = tensors.empty((rest,), wide, x)
            self._scatter_sums(call, flat[:main], total, info, sent, choice, last=False)
            if rest:
                self._sum_plain(call, flat[main:], left)
            rounded = tensors.cast(total, sent)
            gathered = result[:main]
            if sent != info.dtype:
                gathered = tensors.empty((main,), sent, x)
            if choice.algorithm == "native":
                self._gather_native(call, rounded, gathered)
            else:
                part = info._replace(dtype=sent)
                self._gather(call, rounded, gathered, part, choice)
            if sent != info.dtype:
                result[:main] = tensors.cast(gathered, info.dtype)
            result[main:] = tensors.cast(tensors.cast(left, sent), info.dtype)
        return as_result(into, info.dtype, target) if out is None else out

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite `x` on all ranks with that of rank `root`, and return it.

        The root encodes once and scatters the chunks, and an all-gather spreads them.
        """
        root = self._peer("root", root)
        values, info, target = as_input(x)
        into = as_output(x, info, info.shape, target, "x").reshape(-1)
        choice = self._switch.choose("broadcast", values, info, fixed=True)
        with self._call("broadcast", "scatter and all-gather", info, choice) as call:
            if choice.algorithm == "native":
                self._broadcast_native(call, into, root)
            else:
                self._broadcast(call, values.reshape(-1), into, info, root)
        return x

    def send(self, x: Any, to: int) -> None:
        """Send `x` to another rank, which calls `recv` with an array of its shape and dtype."""
        to = self._peer("to", to, other=True)
        x, info, _ = as_input(x)
        choice = self._switch.choose("send", x, info, fixed=True)
        key = f"from {self._rank} to {to}"
        with self._call("send", "message", info, choice, pair=key) as call:
            if choice.algorithm == "native":
                payload = tensors.as_bytes(tensors.contiguous(x))
                self._message_native(call, payload, to, self._transport.send)
                return
            plan = self._plan(info.dtype, math.prod(info.shape))
            shares = self._encode(call, [x.reshape(-1)], [plan])
            digests = [call.digest(info, info.shape)]
            cards = shares.cards(digests, 0)
            with call.stage("sizes"):
                self._transport.send(tensors.as_bytes(cards), to)
                arrived = tensors.OnTheWay(cards)
                sizes = self._sizes(call, arrived, shares, digests)
            self._message(call, shares, sizes[0], to, self._transport.send)

    def recv(self, out: Any, source: int) -> Any:
        """Fill `out` with what rank `source` sends to this rank, and return it."""
        source = self._peer("source", source, other=True)
        x, info, target = as_input(out)
        into = as_output(out, info, info.shape, target)
        choice = self._switch.choose("recv", x, info, fixed=True)
        key = f"from {source} to {self._rank}"
        with self._call("recv", "message", info, choice, pair=key) as call:
            if choice.algorithm == "native":
                payload = tensors.as_bytes(into)
                self._message_native(call, payload, source, self._transport.recv)
                return out
            plan = self._plan(info.dtype, math.prod(info.shape))
            shares = self._room("receive", [plan], into)
            cards = tensors.empty((1, CARD_WORDS), _INT64, into)
            with call.stage("sizes"):
                self._transport.recv(tensors.as_bytes(cards), source)
                digests = [call.digest(info, info.shape)]
                arrived = tensors.OnTheWay(cards)
                sizes = self._sizes(call, arrived, shares, digests, source)
            self._message(call, shares, sizes[0], source, self._transport.recv)
            self._decode(call, shares.buffers(cards)[0], into.reshape(-1), source)
        return out

    # Arguments, plans and memory.

    def _agree(self, sizes: str, algorithm: str, pieces: int) -> None:
        spec = self._codec.spec
        facts = {
            "format": f"{MAJOR}.{MINOR}",
            "codec": f"{spec.name} version {spec.version}, {spec!r}",
            "algorithm": f"{algorithm} in {pieces} pieces"
            if algorithm == "pipelined"
            else algorithm,
            "sizes": sizes,
            "checksum": self._checksum,
        }
        mine = ", ".join(f"{name} {value}" for name, value in facts.items()).encode()
        call = Call(self._rank, "Communicator", 0, "")
        with call.stage("agree"):
            length = np.array([len(mine)], np.int64).view(np.uint8)
            longest = int(self._gather_plain(length).view(np.int64).max())
            padded = np.frombuffer(bytearray(mine.ljust(longest)), np.uint8)
            texts = [row.tobytes().decode().rstrip() for row in self._gather_plain(padded)]
            groups = {text: [r for r, t in enumerate(texts) if t == text] for text in texts}
            if len(groups) > 1:
                found = "; ".join(f"ranks {ranks}: {text}" for text, ranks in groups.items())
                raise call.failure("agree", f"ranks differ: {found}")

    def _gather_plain(self, mine: Bytes) -> Bytes:
        """`mine` of all ranks, shape (world_size, mine.size), through the transport's arrays."""
        x = self._transport.empty(mine.size)
        out = self._transport.empty(self._size * mine.size)
        x[:] = tensors.on_device(mine, tensors.device_of(x))
        self._transport.all_gather(out, x)
        gathered: Bytes = arrays.host_array(out).reshape(self._size, mine.size)
        return gathered

    @contextmanager
    def _call(
        self,
        collective: str,
        algorithm: str,
        info: ArrayInfo,
        choice: Choice,
        sent: DType | None = None,
        *,
        pair: str | None = None,
    ) -> Iterator[Call]:
        """Number a call, keep its record, and remember a failure that leaves ranks out of step."""
        key = collective if pair is None else pair
        # Messages concern two ranks only, so that every pair counts its own.
        counter = "group" if pair is None else pair
        sequence = self._counts[counter]
        self._counts[counter] += 1
        call = Call(self._rank, collective, sequence, key)
        if self._broken is not None:
            raise call.failure("start", f"an earlier call has failed: {self._broken}")
        plan = self._plan((sent or info.dtype), math.prod(info.shape))
        if choice.algorithm == "native":
            call.algorithm = "native"
        else:
            if collective in _TWO_DESIGNS:
                algorithm += f", sizes {'first' if self._sizes_first else 'between'}"
            call.algorithm = f"{algorithm}, {plan.codec.name}"
            if choice.pieces > 1:
                call.algorithm += f", {choice.pieces} pieces"
        call.reason = choice.reason
        if not call.reason:
            name, dtype = self._codec.name, plan.dtype.name
            gains = plan.codec.name == name
            call.reason = f"{name} {'codes' if gains else 'gains nothing on'} {dtype}"
        error: str | None = None
        try:
            yield call
            self._settle_old()
        except BaseException as caught:
            error = str(caught)
            if not call.exchanged:
                self._broken = error
            raise
        finally:
            self._trace.append(call.record(error))

    def _plan(self, dtype: DType, nelem: int, chunks: int = 1, capacity: int | None = None) -> Plan:
        return self._codec.plan(
            (nelem,), dtype, chunks=chunks, dynamic_capacity=capacity, checksum=self._checksum
        )

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
        key = f"{name} {arrays.library_of(like)} {tensors.device_of(like)}"
        room = self._rooms.get(key)
        if room is None or room.shape[0] < nbytes:
            # The old one goes first: there may not be room for both.
            self._rooms.pop(key, None)
            room = self._rooms[key] = tensors.empty_bytes(nbytes, like)
        return room[:nbytes]

    def _room(self, name: str, plans: Sequence[Plan], like: Any) -> Shares:
        return Shares(plans, self._bytes(name, sum(plan.nbytes for plan in plans), like))

    def _spans(self, n: int, pieces: int) -> list[Span]:
        """Elements 0 to n in at most `pieces` pieces of whole tiles."""
        step = max(_PIECE, -(-n // (pieces * _PIECE)) * _PIECE)
        return [(a, min(a + step, n)) for a in range(0, n, step)] or [(0, 0)]

    # Steps that the collectives are made of.

    def _encode(
        self, call: Call, parts: Sequence[Any], plans: Sequence[Plan], name: str = "send"
    ) -> Shares:
        """Encode each part by its plan, straight into the memory that is sent from."""
        with call.stage("encode"):
            shares = self._room(name, plans, parts[0])
            for part, plan, data in zip(parts, plans, shares.data, strict=True):
                self._codec.encode(part, out=data, chunks=plan.chunks, checksum=self._checksum)
        return shares

    def _decode(
        self, call: Call, buffer: Buffer, out: Any, source: int | None, last: bool = True
    ) -> None:
        """Decode what came from rank `source`; None: chunk i of the buffer came from rank i.

        If it is the `last` step of a call, ranks stay in step whatever happens.
        """
        call.exchanged = last
        came = " (chunk i is rank i's)" if source is None else f" (from rank {source})"
        with call.stage("decode", came):
            decode(buffer, out=out)
        self._finish(call, buffer, came)

    def _finish(self, call: Call, buffer: Buffer, note: str) -> None:
        """What decoding on a GPU finds is not known before."""
        if buffer._memory is None:
            return
        if self._verify:
            with call.stage("decode", note):
                buffer.check()
        else:
            word = tensors.OnTheWay(buffer._memory.status)
            self._unchecked.append(_Unchecked(call, note, buffer, word))

    def _settle(self, unchecked: _Unchecked) -> None:
        if unchecked.word.wait(self._transport.timeout).any():
            with unchecked.call.stage("decode", unchecked.note):
                unchecked.buffer.check()

    def _settle_old(self) -> None:
        """Raise for damage that is known by now, without a wait."""
        while self._unchecked and self._unchecked[0].word.done():
            self._settle(self._unchecked.popleft())

    def _sizes(
        self,
        call: Call,
        arriving: tensors.OnTheWay,
        shares: Shares,
        digests: Sequence[int],
        source: int | None = None,
    ) -> list[int]:
        """Dynamic bytes by the cards. Raises if one is of another call, or does not fit.

        The cards are those of all ranks, or all from rank `source`.
        """
        host = self._cards(call, arriving, digests, source)
        sizes = sizes_on(host)
        for i, (size, share) in enumerate(zip(sizes, shares.shares, strict=True)):
            if not 0 <= size <= share.slot.shape[0]:
                sender, most = i if source is None else source, share.slot.shape[0]
                detail = f"rank {sender} claims {size} dynamic bytes, at most {most}"
                raise call.failure("sizes", detail)
        if source is None:
            self._switch.came(call.collective, shares.plans[0].dtype, host[:, 1])
        return sizes

    def _cards(
        self,
        call: Call,
        arriving: tensors.OnTheWay,
        digests: Sequence[int],
        source: int | None = None,
    ) -> Any:
        """The cards on the host, shape (shares, CARD_WORDS); raises if one is of another call."""
        host = arriving.wait(self._transport.timeout)
        said = host[:, 1].tolist()
        seals = [sealed(d, r) for d, r in zip(digests, said, strict=True)]
        strange = [i for i, seal in enumerate(seals) if host[i, 0] != seal]
        if strange:
            strange = strange if source is None else [source]
            detail = f"ranks {strange} make another call, or of another dtype or shape"
            raise call.failure("sizes", detail)
        return host

    def _begin_swap(
        self,
        call: Call,
        send: Shares,
        receive: Shares,
        there: Sequence[int],
        here: Sequence[int],
    ) -> _Exchange:
        """Send share j of `send` to rank j, but for its dynamic part.

        `there` are the digests of the shares that go, `here` of those that come.
        """
        cards = send.cards(there, self._switch.ratio(call.collective, send.plans[0].dtype))
        came = tensors.empty(cards.shape, _INT64, cards)
        arriving: tensors.OnTheWay | None = None
        for first in (self._sizes_first, not self._sizes_first):
            if first:
                with call.stage("sizes"):
                    self._transport.all_to_all(tensors.as_bytes(came), tensors.as_bytes(cards))
                    # Both ways at once: on a GPU one wait instead of two.
                    both = _stacked(came, cards)
                    arriving = tensors.OnTheWay(both)
                    if arriving.done():
                        self._cards(call, arriving, [*here, *there])
                continue
            with call.stage("static"):
                out, x = receive.statics, send.statics
                if out is None or x is None:
                    outs = [[share.static] for share in receive.shares]
                    self._transport.all_to_all_v(outs, [[share.static] for share in send.shares])
                else:
                    self._transport.all_to_all(out, x)
        assert arriving is not None
        return _Exchange(send, receive, cards, came, arriving, [*here, *there])

    def _end_swap(self, call: Call, began: _Exchange) -> list[Buffer]:
        """The buffers of `began.receive`, filled."""
        send, receive = began.send, began.receive
        with call.stage("sizes"):
            incoming, outgoing = self._both_sizes(call, began)
        with call.stage("dynamic"):
            outs, xs = pieces(receive, incoming), pieces(send, outgoing)
            self._transport.all_to_all_v(outs, xs)
        raw = wire = 0
        for peer, (share, size) in enumerate(zip(send.shares, outgoing, strict=True)):
            if peer != self._rank:
                raw += share.raw_nbytes
                wire += CARD_NBYTES + share.static.shape[0] + size
        self._account(call, send.plans[0].dtype, raw, wire)
        return receive.buffers(began.came)

    def _both_sizes(self, call: Call, began: _Exchange) -> tuple[list[int], list[int]]:
        n = self._size
        host = began.on_the_way.wait(self._transport.timeout)
        incoming = tensors.OnTheWay(host[:n])
        outgoing = sizes_on(host[n:])
        return self._sizes(call, incoming, began.receive, began.digests[:n]), outgoing

    def _account(self, call: Call, dtype: DType, raw: int, wire: int) -> None:
        call.raw_bytes += raw
        call.wire_bytes += wire
        if raw:
            self._switch.went(call.collective, dtype, wire / raw)

    def _swap_equal(
        self, call: Call, flat: Any, result: Any, info: ArrayInfo, choice: Choice
    ) -> None:
        """An all-to-all of equal shares, elements of shape (ranks * n,)."""
        n = flat.shape[0] // self._size
        spans = self._spans(n, choice.pieces)
        if len(spans) == 1:
            plan = self._plan(info.dtype, flat.shape[0], self._size)
            digests = [call.digest(info, info.shape)] * self._size
            send = self._encode(call, [flat], [plan])
            receive = self._room("receive", [plan], flat)
            began = self._begin_swap(call, send, receive, digests, digests)
            self._decode(call, self._end_swap(call, began)[0], result, None)
            return

        def put(buffers: list[Buffer], span: Span) -> None:
            for source, buffer in enumerate(buffers):
                at = source * n
                self._decode(call, buffer, result[at + span[0] : at + span[1]], source, False)

        self._swap_pieces(call, flat, info, spans, put)

    def _swap_pieces(
        self,
        call: Call,
        flat: Any,
        info: ArrayInfo,
        spans: Sequence[Span],
        put: Callable[[list[Buffer], Span], None],
    ) -> None:
        """Pieces `spans` of every share of `flat` go round one behind the other; `put` takes them.

        The cards and static parts of a piece go ahead of the dynamic parts of the one before, so
        that its sizes are known when these have gone.
        """
        n = flat.shape[0] // self._size
        before: tuple[_Exchange, Span] | None = None

        def end(began: _Exchange, span: Span) -> None:
            buffers = self._end_swap(call, began)
            lanes.decode(lambda: put(buffers, span))

        with Lanes(flat) as lanes:
            encoded = []
            for k, (a, b) in enumerate(spans):
                plans = [self._plan(info.dtype, b - a)] * self._size
                parts = [flat[r * n + a : r * n + b] for r in range(self._size)]
                encoded.append(lanes.encode(self._encoding(call, parts, plans, f"send {k}")))
            for k, (ready, span) in enumerate(zip(encoded, spans, strict=True)):
                with call.stage("encode"):
                    send = ready()
                receive = self._room(f"receive {k}", send.plans, flat)
                digests = [call.digest(info, info.shape, k)] * self._size
                began = self._begin_swap(call, send, receive, digests, digests)
                if before is not None:
                    end(*before)
                before = began, span
            if before is not None:
                end(*before)
        call.exchanged = True

    def _encoding(
        self, call: Call, parts: Sequence[Any], plans: Sequence[Plan], name: str
    ) -> Callable[[], Shares]:
        return lambda: self._encode(call, parts, plans, name)

    def _gather(self, call: Call, x: Any, out: Any, info: ArrayInfo, choice: Choice) -> None:
        """An all-gather of `x`, shape (n,), to `out`, shape (ranks * n,)."""
        n = x.shape[0]
        spans = self._spans(n, choice.pieces)
        if len(spans) == 1:
            send = self._encode(call, [x], [self._plan(info.dtype, n)])
            began = self._begin_gather(call, send, call.digest(info, info.shape), "receive")
            self._decode(call, self._end_gather(call, began), out, None)
            return
        before: tuple[_Exchange, Span] | None = None

        def put(buffer: Buffer, span: Span) -> None:
            a, b = span
            with call.stage("decode", " (chunk i is rank i's)"):
                for r in range(self._size):
                    lo, hi = r * (b - a), (r + 1) * (b - a)
                    decode(buffer, out=out[r * n + a : r * n + b], start=lo, stop=hi)
            self._finish(call, buffer, " (chunk i is rank i's)")

        def end(began: _Exchange, span: Span) -> None:
            buffer = self._end_gather(call, began)
            lanes.decode(lambda: put(buffer, span))

        with Lanes(x) as lanes:
            encoded = [
                lanes.encode(
                    self._encoding(call, [x[a:b]], [self._plan(info.dtype, b - a)], f"send {k}")
                )
                for k, (a, b) in enumerate(spans)
            ]
            for k, (ready, span) in enumerate(zip(encoded, spans, strict=True)):
                with call.stage("encode"):
                    send = ready()
                digest = call.digest(info, info.shape, k)
                began = self._begin_gather(call, send, digest, f"receive {k}")
                if before is not None:
                    end(*before)
                before = began, span
            if before is not None:
                end(*before)
        call.exchanged = True

    def _begin_gather(self, call: Call, send: Shares, digest: int, name: str) -> _Exchange:
        """Gather the one share of `send`, but for its dynamic part."""
        plan = send.plans[0]
        own = send.shares[0]
        whole = self._room(
            name, [self._plan(plan.dtype, self._size * plan.nelem, self._size)], send.data[0]
        )
        card = send.cards([digest], self._switch.ratio(call.collective, plan.dtype))
        cards = tensors.empty((self._size, CARD_WORDS), _INT64, card)
        arriving: tensors.OnTheWay | None = None
        for first in (self._sizes_first, not self._sizes_first):
            if first:
                with call.stage("sizes"):
                    self._transport.all_gather(tensors.as_bytes(cards), tensors.as_bytes(card))
                    arriving = tensors.OnTheWay(cards)
                    if arriving.done():
                        self._cards(call, arriving, [digest] * self._size)
            else:
                with call.stage("static"):
                    self._transport.all_gather(whole.statics, own.static)
        assert arriving is not None
        return _Exchange(send, whole, card, cards, arriving, [digest] * self._size)

    def _end_gather(self, call: Call, began: _Exchange) -> Buffer:
        """The whole buffer, filled."""
        with call.stage("sizes"):
            sizes = self._sizes(call, began.on_the_way, began.receive, began.digests)
        own = began.send.shares[0]
        buffer, dynamic = self._gather_dynamic(call, own, began.receive, began.came, sizes)
        others = self._size - 1
        wire = CARD_NBYTES + own.static.shape[0] + dynamic
        dtype = began.send.plans[0].dtype
        self._account(call, dtype, others * own.raw_nbytes, others * wire)
        return buffer

    def _gather_dynamic(
        self, call: Call, own: Share, whole: Shares, cards: Any, sizes: Sequence[int]
    ) -> tuple[Buffer, int]:
        """Gather the dynamic parts behind the static ones; the whole buffer, and bytes of a part.

        Its slots are as long as the largest part, so that an equal all-gather fills them.
        """
        (plan,) = whole.plans
        plan = replace(plan, dynamic_stride=align(max(sizes)))
        with call.stage("dynamic"):
            shares = Shares([plan], whole.data[0])
            if plan.dynamic_stride:
                out = shares.data[0][plan.dynamic_offset :]
                self._transport.all_gather(out, own.slot[: plan.dynamic_stride])
            return shares.buffers(cards)[0], plan.dynamic_stride

    # Sums.

    def _scatter_sums(
        self,
        call: Call,
        x: Any,
        total: Any,
        info: ArrayInfo,
        sent: DType,
        choice: Choice,
        last: bool = True,
    ) -> None:
        """This rank's share of the sum of all ranks' `x`, whose elements travel as `sent`."""
        n = total.shape[0]
        if choice.algorithm == "native":
            if self._scatter_native(call, x, total, info):
                return
            flat = tensors.contiguous(tensors.cast(x, sent)).reshape(-1)
            came = self._bytes("plain", flat.shape[0] * sent.itemsize, x)
            came = tensors.view(came, sent)
            equal = [n] * self._size
            self._swap_native(call, flat, came, equal, equal, True)
            with call.stage("sum"):
                tensors.clear(total)
                for values in came.reshape(self._size, n):
                    tensors.add(total, values)
            return
        flat = tensors.cast(x, sent).reshape(-1)
        info = info._replace(dtype=sent)
        spans = self._spans(n, choice.pieces)
        tensors.clear(total)
        if len(spans) == 1:
            whole = self._plan(sent, flat.shape[0], self._size)
            # A buffer for each rank, as decode_add adds a whole one.
            each = [self._plan(sent, n)] * self._size
            digests = [call.digest(info, info.shape)] * self._size
            send = self._encode(call, [flat], [whole])
            receive = self._room("receive", each, flat)
            began = self._begin_swap(call, send, receive, digests, digests)
            buffers = self._end_swap(call, began)
            call.exchanged = last
            self._add(call, buffers, total)
            return

        def put(buffers: list[Buffer], span: Span) -> None:
            self._add(call, buffers, total[span[0] : span[1]])

        self._swap_pieces(call, flat, info, spans, put)
        call.exchanged = last

    def _add(self, call: Call, buffers: Sequence[Buffer], total: Any) -> None:
        """Add the buffers of all ranks to `total`."""
        for source, buffer in enumerate(buffers):
            note = f" (from rank {source})"
            with call.stage("decode", note):
                if buffer.plan.dtype.is_float:
                    # Sums may be infinite or NaN; NumPy would warn.
                    with np.errstate(all="ignore"):
                        self._codec.decode_add(buffer, total)
                else:
                    tensors.add(total, decode(buffer))
            self._finish(call, buffer, note)

    def _sum_plain(self, call: Call, x: Any, total: Any) -> None:
        """Sum all ranks' few elements `x` to `total`; they travel as they are."""
        dtype = arrays.describe(x).dtype
        mine = tensors.as_bytes(tensors.contiguous(x))
        nbytes = x.shape[0] * dtype.itemsize
        came = tensors.empty_bytes(self._size * nbytes, x)
        with call.stage("rest"):
            self._transport.all_gather(came, mine)
        call.raw_bytes += (self._size - 1) * nbytes
        call.wire_bytes += (self._size - 1) * nbytes
        tensors.clear(total)
        for values in tensors.view(came, dtype).reshape(self._size, -1):
            tensors.add(total, values)

    # Messages and broadcast.

    def _broadcast(self, call: Call, values: Any, into: Any, info: ArrayInfo, root: int) -> None:
        plan = self._plan(info.dtype, values.shape[0], self._size)
        digests = [call.digest(info, (root, *info.shape))] * self._size
        whole = self._room("receive", [plan], values)
        is_root = self._rank == root
        if is_root:
            send = self._encode(call, [values], [plan])
            cards = send.cards(digests, 0)
            parts = [[tensors.as_bytes(cards)]] * self._size
        else:
            cards = tensors.empty((self._size, CARD_WORDS), _INT64, values)
            parts = [[]] * self._size
        with call.stage("sizes"):
            self._scatter(call, root, parts, [tensors.as_bytes(cards)])
            sizes = self._sizes(call, tensors.OnTheWay(cards), whole, digests, root)
        if is_root:
            own = send.shares[root]
            dynamic = pieces(send, sizes)
            parts = [[s.static, *d] for s, d in zip(send.shares, dynamic, strict=True)]
            call.raw_bytes += sum(s.raw_nbytes for s in send.shares) - own.raw_nbytes
        else:
            # Not in its place in `whole`: an all-gather must not overlap itself.
            room = self._bytes("send", plan.static_stride + align(max(sizes)), values)
            own = whole.shares[self._rank]._replace(
                static=room[: plan.static_stride], slot=room[plan.static_stride :]
            )
        with call.stage("scatter"):
            self._scatter(call, root, parts, [own.static, own.slot[: sizes[self._rank]]])
        with call.stage("static"):
            self._transport.all_gather(whole.statics, own.static)
        buffer, dynamic_nbytes = self._gather_dynamic(call, own, whole, cards, sizes)
        others = self._size - 1
        call.raw_bytes += others * own.raw_nbytes
        call.wire_bytes += others * (own.static.shape[0] + dynamic_nbytes)
        call.exchanged = True
        if not is_root:
            self._decode(call, buffer, into, root)

    def _scatter(
        self, call: Call, root: int, parts: Sequence[Sequence[Any]], into: Sequence[Any]
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
        call: Call,
        shares: Shares,
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
        call.wire_bytes += CARD_NBYTES + int(payload.shape[0])

    # The native paths.

    def _fast(
        self,
        collective: str,
        x: Any,
        out: Any,
        times: int,
        move: Callable[[Any, Any], None],
    ) -> Any:
        """A native call like one before, with as little host work as can be; None if it is not.

        `out` has `times` the rows of `x`.
        """
        if self._broken is not None or not tensors.is_torch(x) or x.requires_grad:
            return None
        shape = (times * x.shape[0], *x.shape[1:]) if x.dim() else (times,)
        if out is None:
            out = x.new_empty(shape)
        elif not (
            tensors.is_torch(out)
            and out.dtype == x.dtype
            and out.device == x.device
            and tuple(out.shape) == shape
            and out.is_contiguous()
        ):
            return None
        if not x.is_contiguous():
            return None
        sequence = self._counts["group"]
        self._counts["group"] = sequence + 1
        start = time.perf_counter()
        try:
            move(tensors.as_bytes(out), tensors.as_bytes(x))
        except (RuntimeError, OSError) as error:
            self._broken = str(error)
            call = Call(self._rank, collective, sequence, collective)
            raise call.failure("native", str(error)) from error
        seconds = {"native": time.perf_counter() - start}
        sent = x.nbytes * (self._size - 1) // (1 if times > 1 else self._size)
        self._trace.append(
            (collective, sequence, "native", AS_BEFORE.reason, sent, sent, seconds, None)
        )
        return out

    def _gather_native(self, call: Call, x: Any, out: Any) -> None:
        mine = tensors.as_bytes(tensors.contiguous(x))
        with call.stage("native"):
            self._transport.all_gather(tensors.as_bytes(out), mine)
        self._sent_plain(call, (self._size - 1) * int(mine.shape[0]))

    def _swap_native(
        self,
        call: Call,
        flat: Any,
        result: Any,
        sends: Sequence[int],
        receives: Sequence[int],
        equal: bool,
    ) -> None:
        """Elements `sends[j]` of `flat` go to rank j, `receives[i]` of `result` come from i."""
        flat = tensors.contiguous(flat)
        with call.stage("native"):
            if equal:
                self._transport.all_to_all(tensors.as_bytes(result), tensors.as_bytes(flat))
            else:
                outs = [[part] for part in _byte_parts(result, receives)]
                self._transport.all_to_all_v(outs, [[part] for part in _byte_parts(flat, sends)])
        item = arrays.describe(flat).dtype.itemsize
        self._sent_plain(call, (sum(sends) - sends[self._rank]) * item)

    def _scatter_native(self, call: Call, x: Any, total: Any, info: ArrayInfo) -> bool:
        """The network's own reduce-scatter; False if it has none for this dtype."""
        if not self._sums(info.dtype, total):
            return False
        flat = tensors.contiguous(x).reshape(-1)
        with call.stage("native"):
            try:
                self._transport.reduce_scatter(total, flat)
            except NotImplementedError:
                return False
        self._sent_plain(call, (self._size - 1) * total.shape[0] * info.dtype.itemsize)
        return True

    def _sum_native(self, call: Call, flat: Any, result: Any, info: ArrayInfo, sent: DType) -> bool:
        """The network's own all-reduce; False if it has none for this dtype."""
        if not self._sums(info.dtype, result):
            return False
        with call.stage("native"):
            result[...] = flat
            self._transport.all_reduce(result)
        share = flat.shape[0] * info.dtype.itemsize // self._size
        self._sent_plain(call, 2 * (self._size - 1) * share)
        return True

    def _sums(self, dtype: DType, total: Any) -> bool:
        if dtype.name not in ("float32", "float64", "int32", "int64"):
            return False
        return bool(arrays.describe(total).dtype == dtype)

    def _broadcast_native(self, call: Call, into: Any, root: int) -> None:
        """Scatter and all-gather, as they are; what equal shares leave over goes to everybody."""
        data = tensors.as_bytes(into)
        each = int(data.shape[0]) // self._size
        main = self._size * each
        mine = tensors.empty_bytes(each, into)
        tail = data[main:]
        with call.stage("native"):
            if self._rank == root:
                parts = [[data[r * each : (r + 1) * each], tail] for r in range(self._size)]
                mine[:] = parts[root][0]
                self._scatter(call, root, parts, [])
            else:
                self._scatter(call, root, [[]] * self._size, [mine, tail])
            self._transport.all_gather(data[:main], mine)
        call.raw_bytes = call.wire_bytes = call.wire_bytes + (self._size - 1) * each
        call.exchanged = True

    def _message_native(
        self, call: Call, payload: Any, peer: int, move: Callable[[Any, int], None]
    ) -> None:
        with call.stage("native"):
            if payload.shape[0]:
                move(payload, peer)
        self._sent_plain(call, int(payload.shape[0]))

    def _sent_plain(self, call: Call, nbytes: int) -> None:
        call.raw_bytes += nbytes
        call.wire_bytes += nbytes

    # Measuring.

    def _measure(self, collective: str, like: Any, info: ArrayInfo) -> Measured:
        """Time the paths of a collective on this group; every rank gets the same numbers."""
        cuda = tensors.is_cuda(like)
        sizes = _MEASURED_GPU if cuda else _MEASURED_HOST
        rng = np.random.default_rng(0)
        rows = []
        for nbytes in sizes:
            n = nbytes // info.dtype.itemsize // self._size * self._size
            bits = tensors.random_normal(rng, n, info.dtype, like)
            row = []
            for choice in _PATHS:
                with self._switch.forced(choice):
                    row.append(self._time(collective, bits))
            rows.append(row)
        record = TraceRecord(*self._trace[-1])
        ratio = record.wire_bytes / record.raw_bytes if record.raw_bytes else 1.0
        found = self._transport.empty(8 * (3 * len(rows) + 1))
        table = np.array([*np.ravel(rows), ratio])
        found[:] = tensors.on_device(table.view(np.uint8), tensors.device_of(found))
        values = tensors.view(found, BY_NAME["float64"])
        self._transport.all_reduce(values, "max")
        agreed = arrays.host_array(values)
        return Measured(sizes, agreed[:-1].reshape(-1, 3).tolist(), float(agreed[-1]))

    def _time(self, collective: str, x: Any) -> float:
        """Seconds of one call, the least of some."""
        run = getattr(self, collective)
        out = None
        samples = []
        for _ in range(_TIMED + 1):
            tensors.synchronize(x)
            self._transport.barrier()
            start = time.perf_counter()
            out = run(x, out) if collective != "broadcast" else run(x)
            tensors.synchronize(x)
            samples.append(time.perf_counter() - start)
        # The first one compiles and allocates.
        return min(samples[1:])


def _rows(info: ArrayInfo) -> tuple[int, tuple[int, ...]]:
    """Number and shape of the rows of x."""
    if not info.shape:
        raise ValueError("x has no dimensions; shares need one to lie along")
    return info.shape[0], info.shape[1:]


def _wire_dtype(wire: str | None, dtype: DType) -> DType:
    if wire is None:
        return dtype
    sent = BY_NAME.get(wire)
    if sent is None or not (sent.is_float and dtype.is_float and sent.itemsize <= dtype.itemsize):
        raise ValueError(f"wire is {wire!r}, x {dtype.name}; allowed: floats no wider than x")
    return sent


def _byte_parts(x: Any, counts: Sequence[int]) -> list[Any]:
    """The bytes of the contiguous 1-D array `x` in parts of so many elements."""
    item = arrays.describe(x).dtype.itemsize
    data, found, at = tensors.as_bytes(x), [], 0
    for count in counts:
        found.append(data[at : at + count * item])
        at += count * item
    return found


def _stacked(came: Any, cards: Any) -> Any:
    both = tensors.empty((came.shape[0] + cards.shape[0], came.shape[1]), _INT64, came)
    both[: came.shape[0]] = came
    both[came.shape[0] :] = cards
    return both
