"""The side of weight transfer that receives: from a transport, or from a delta directory."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from ... import against_base, arrays, engine
from ...arguments import thread_count
from ...codecs.common.base import Bits
from ...codecs.delta import index_of
from ...decoding import decode
from ...delta_apply import (
    Change,
    Decoding,
    Update,
    array_of,
    changes,
    check_fit,
    place_of,
    prepare_delta,
)
from ...delta_files import newest_version
from ...formats.dtypes import DType
from ...formats.errors import FormatError
from ...formats.header import RAW
from ...overlaps import check_overlaps, overlapping
from ...patches import Patch, host_memory, patch_of
from ...pipeline import BUDGET_NBYTES
from ...planning import is_tiny
from ...state_tensors import ArrayState, digest, digests_of, opened_target
from ...storage import PathLike
from ..collectives import tensors
from ..transports.base import Transport
from .announcement import DIGEST_NBYTES, Announced, Announcement, Stream, state_digest
from .aside import Aside, Made
from .rounds import NONE, Group, Meeting, Message, Status, placed

#: What is held until it is written: elements, or the bytes that came.
Hold = Literal["elements", "buffers"]
#: Seconds between looks at a directory.
_LOOK = 0.05


class _Updates:
    """The newest update, and the version that the target has by it."""

    def __init__(self) -> None:
        self._latest: Update | None = None
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """See `transfer.Subscriber`."""
        if self._latest is not None and self._latest.written:
            self._version, self._latest = self._latest.version, None
        return self._version

    def replace(self, update: Update | None) -> None:
        """Only the newest update may be written: the earlier one is against the same tensors."""
        if self._latest is not None:
            self._latest.drop()
        self._latest = update


class TransportSubscriber:
    """Receives by a transport; see `transfer.Subscriber`."""

    def __init__(
        self,
        target: Any,
        transport: Transport,
        hold: Hold | None,
        max_nbytes: int,
        threads: int | None,
    ) -> None:
        check_target(target, max_nbytes)
        self._target = target
        self._group = Group(transport)
        self._hold, self._max_nbytes = hold, max_nbytes
        self._threads = thread_count(threads)
        self._updates = _Updates()
        self._aside = Aside()

    @property
    def version(self) -> int | None:
        """See `transfer.Subscriber`."""
        return self._updates.version

    def receive(self) -> Update:
        """See `transfer.Subscriber`."""
        since = self.version
        self._updates.replace(None)
        with opened_target(self._target, self._max_nbytes) as state:
            digests = digests_of(state, self._threads)
            held = NONE if since is None else since
            meeting = self._group.meet(Status(False, held, state_digest(state, digests)))
            change = Change({}, {}, [])
            if meeting.streams:
                change = self._received(state, digests, meeting)
            need = meeting.needs[self._group.transport.rank]
            update = Update(
                meeting.version, None if need == "whole" else since, change, self._target
            )
        self._updates.replace(update)
        return update

    def update(self) -> int:
        """See `transfer.Subscriber`."""
        update = self.receive()
        update.write()
        return update.version

    def _received(self, state: ArrayState, digests: Mapping[str, str], meeting: Meeting) -> Change:
        """Everything from the announcement on: what is to be written, all of it checked."""
        group, root = self._group, meeting.root
        mine = meeting.needs[group.transport.rank]
        text = group.spread("announce", None, meeting.publisher.nbytes, root)
        problem: Exception | None = None
        taker: Taker | None = None
        try:
            announcement = _parsed(arrays.host_array(text).tobytes(), meeting, self._max_nbytes)
            if mine is not None:
                check_fit(self._target, state, announcement)
                taker = Taker(state, digests, announcement, self._hold)
        except Exception as error:
            # All ranks are told below, and this one raises it.
            problem = error
        group.agree("announce", problem)
        running: deque[Future[None]] = deque()
        complete = False
        # Streams of other libraries are not known here.
        overlapped = taker is not None and taker.on_gpu
        overlapped = overlapped and all(map(tensors.is_torch, state.arrays.values()))
        with (
            ThreadPoolExecutor(self._threads, thread_name_prefix="tightwire-weights") as pool,
            closing(self._messages(announcement, meeting, overlapped)) as messages,
        ):
            for stream, bucket, message in messages:
                if message is None:
                    break
                if stream != mine or taker is None or problem is not None:
                    continue
                if taker.on_gpu:
                    # Kernels go to the stream of this thread.
                    problem = _problem_of(partial(taker.take, bucket, message, self._threads))
                    continue
                running.append(pool.submit(taker.take, bucket, message, self._share(bucket)))
                if len(running) > 2 * self._threads:
                    problem = _problem_of(running.popleft().result)
            else:
                complete = True
            for future in running:
                found = _problem_of(future.result)
                problem = problem or found
        change = Change({}, {}, [])
        if complete and taker is not None and problem is None:
            try:
                change = taker.change()
            except (FormatError, ValueError) as error:
                problem = error
        group.agree("verify", problem)
        return change

    def _messages(
        self, announcement: Announcement, meeting: Meeting, overlapped: bool
    ) -> Generator[tuple[Stream, list[Announced], Message | None], None, None]:
        """The messages as they come, None for the last one if the publisher has given up.

        If `overlapped`, on a GPU, one is pending while the one before is decoded.
        """
        aside = self._aside
        aside.begin(self._group.device if overlapped else None)
        before: tuple[Stream, list[Announced], Made] | None = None
        try:
            for stream, bucket in announcement.messages(meeting.streams):
                made = aside.message(partial(self._group.receive, bucket, meeting.root))
                if before is not None:
                    yield *before[:2], before[2].take()
                before = stream, bucket, made
                if made.message is None:
                    break
                if not aside.overlaps:
                    yield stream, bucket, made.take()
                    before = None
            if before is not None:
                yield *before[:2], before[2].take()
        finally:
            aside.end()

    def _share(self, bucket: Sequence[Announced]) -> int:
        """Threads for one message: more where a few large ones take much memory."""
        nbytes = sum(tensor.nbytes for tensor in bucket)
        return min(-(-self._threads * nbytes // BUDGET_NBYTES), self._threads) or 1


class _Piece(NamedTuple):
    """A buffer for an array: what was announced, the array's name, itself, its base, the bytes."""

    tensor: Announced
    name: str
    x: Any
    base: Any
    data: Any


class _Held(NamedTuple):
    """Checked buffers for a GPU: arrays by name, bytes, and what decodes them."""

    arrays: dict[str, Any]
    nbytes: int
    together: Any


class Taker:
    """Decodes and checks the tensors of messages; collects what is to be written.

    Raises TypeError or ValueError for a target that cannot be written to.
    """

    def __init__(
        self,
        state: ArrayState,
        digests: Mapping[str, str],
        announcement: Announcement,
        hold: Hold | None,
    ) -> None:
        entries, changed, self._vanished = changes(
            state, digests, announcement, announcement.digests
        )
        self._state = state
        self._entries, self._changed = set(entries), set(changed)
        # Where arrays overlap, differences would be added more than once.
        self._overlaps = overlapping(state)
        self._overlapping = set(chain.from_iterable(self._overlaps))
        self._kept = {n: d for n, d in announcement.digests.items() if n not in self._entries}
        self._names = announcement.names
        self._place = place_of(state)
        self._hold = hold
        self.on_gpu = any(map(arrays.on_gpu, state.arrays.values()))
        self._patches: dict[str, tuple[Any, DType | str, Patch]] = {}
        self._made: dict[str, Any] = {}
        self._decodings: list[Decoding] = []
        self._together: list[_Held] = []
        self._decoded: set[str] = set()

    def take(self, bucket: Sequence[Announced], message: Message, threads: int) -> None:
        """One message. Raises FormatError."""
        together: dict[Any, list[_Piece]] = {}
        for tensor, (against, data) in zip(bucket, message.pieces(), strict=True):
            names = [n for n in tensor.names if n in self._changed or n in self._entries]
            held = [n for n in names if n in self._changed and self._keeps_buffer(tensor, n)]
            for name in held:
                x = self._state.arrays[name]
                piece = _Piece(tensor, name, x, x if against else None, data)
                if arrays.on_gpu(x):
                    info = arrays.describe(x)
                    together.setdefault((info.library, info.device), []).append(piece)
                else:
                    self._keep(self._decoding(piece))
            others = [n for n in names if n not in held]
            if others:
                self._take_elements(tensor, others, against, arrays.host_array(data), threads)
        for pieces in together.values():
            self._check_together(pieces)

    def _keep(self, decoding: Decoding) -> None:
        self._decodings.append(decoding)
        self._decoded.update(decoding.arrays)

    def change(self) -> Change:
        """What all messages have made.

        Raises FormatError if tensors have not come, ValueError if overlapping ones do not agree.
        """
        missing = [
            *(self._entries - self._made.keys()),
            *(self._changed - self._patches.keys() - self._decoded),
        ]
        if missing:
            raise FormatError("bad_container", f"{sorted(missing)[0]!r} is new and has not come")
        check_overlaps(self._state, self._overlaps, self._patches, self._kept)
        entries = {name: self._made[name] for name in self._names if name in self._made}
        decodings = [*self._decodings]
        if self._together:
            held = {name: x for one in self._together for name, x in one.arrays.items()}
            nbytes = sum(one.nbytes for one in self._together)
            decodings.append(Decoding(held, nbytes, partial(_write_together, self._together)))
        return Change(self._patches, entries, self._vanished, decodings)

    def _keeps_buffer(self, tensor: Announced, name: str) -> bool:
        """Whether a buffer is held, and decoded over its array when that is written."""
        x = self._state.arrays[name]
        if tensor.is_plain or self._hold == "elements" or name in self._overlapping:
            return False
        if self._hold is None and not arrays.on_gpu(x):
            return False
        library = arrays.library_of(x)
        if library == "torch":
            return bool(x.is_contiguous())
        return bool(x.flags.c_contiguous) and (library == "cupy" or x.dtype.isnative)

    def _decoding(self, piece: _Piece) -> Decoding:
        """Decode a buffer to memory of its own, to check it; what does it again, in place."""
        tensor, name, x, base, data = piece
        data = placed(data, tensors.device_of(x))
        memory = _memory_like(x)
        decode(data, base=base, out=memory, verify=True)
        assert isinstance(tensor.dtype, DType)
        _check_digest(tensor, digest(arrays.host_bits(memory, tensor.dtype)))
        write = partial(decode, data, base=base, out=x, verify=True)
        return Decoding({name: x}, int(data.shape[0]), write)

    def _check_together(self, pieces: Sequence[_Piece]) -> None:
        """As `_decoding`, of buffers for one GPU: the host waits for all of them at once."""
        from ...gpu_together import Coded, Together, bytes_at, place_of

        data = [bytes_at(piece.data, place_of(piece.x)) for piece in pieces]
        held = {piece.name: piece.x for piece in pieces}
        with _naming([*held]):
            coded = [Coded(d, piece.base, piece.x) for d, piece in zip(data, pieces, strict=True)]
            together = Together(coded)
            found = together.digests()
        for piece, value in zip(pieces, found, strict=True):
            _check_digest(piece.tensor, f"{value:016x}")
        self._together.append(_Held(held, sum(int(d.shape[0]) for d in data), together))
        self._decoded.update(held)

    def _take_elements(
        self, tensor: Announced, names: Sequence[str], against: bool, piece: Any, threads: int
    ) -> None:
        """Decode a tensor on the host, for arrays of these names."""
        overlaps = not self._overlapping.isdisjoint(names)
        if len(names) == 1 and against and not tensor.is_plain and not overlaps:
            decoding = self._in_place(tensor, names[0], piece, threads)
            if decoding is not None:
                self._keep(decoding)
                return
        bits = self._bits(tensor, against, piece, threads)
        _check_digest(tensor, digest(bits))
        made = [name for name in names if name in self._entries]
        if made:
            x = array_of(bits, tensor.dtype, tensor.shape, self._place)
            self._made.update(dict.fromkeys(made, x))
        for name in names:
            if name in self._changed:
                patch = patch_of(self._state.bits(name, threads), bits)
                assert patch is not None
                self._patches[name] = self._state.arrays[name], tensor.dtype, patch

    def _in_place(self, tensor: Announced, name: str, piece: Any, threads: int) -> Decoding | None:
        """Find what has changed in an array; what then writes it. None where that cannot be done.

        That is for arrays that are small, on a GPU or with gaps, and for several chunks, which have
        digests of their own.
        """
        parsed = _parsed_as(tensor, piece)
        if is_tiny(parsed.plan, None):
            return None
        x = self._state.arrays[name]
        memory = host_memory(x, parsed.plan.dtype)
        if memory is None or parsed.plan.chunks > 1 or parsed.plan.codec.name != "delta":
            return None
        if parsed.records[0].flags & RAW:
            return None
        write = against_base.prepare(parsed, memory, threads)
        _check_digest(tensor, f"{index_of(parsed.chunk(0)).digests[1]:016x}")

        def mark_and_write() -> None:
            arrays.mark_written(x)
            write(memory)

        return Decoding({name: x}, int(piece.size), mark_and_write)

    def _bits(self, tensor: Announced, against: bool, piece: Any, threads: int) -> Bits:
        """The elements of a tensor, in memory of their own."""
        kind = tensor.dtype.bits if isinstance(tensor.dtype, DType) else np.dtype(np.uint8)
        if tensor.is_plain:
            found: Bits = piece.copy().view(kind)
            return found
        parsed = _parsed_as(tensor, piece)
        out = np.empty(tensor.nbytes, np.uint8).view(kind)
        base = None
        if parsed.plan.needs_base:
            if not against:
                detail = f"{tensor.names[0]!r} is against a base that it is said not to need"
                raise FormatError("bad_container", detail)
            base = self._state.bits(tensor.names[0], threads)
        engine.decode_range(parsed, out, 0, threads=threads, base=base)
        return out


class DirectorySubscriber:
    """Receives from a delta directory; see `transfer.Subscriber`."""

    def __init__(
        self,
        target: Any,
        directory: PathLike,
        timeout: float,
        max_nbytes: int,
        threads: int | None,
    ) -> None:
        check_target(target, max_nbytes)
        if not timeout >= 0:
            raise ValueError(f"timeout is {timeout}; allowed: seconds, at least 0")
        self._target, self._directory = target, directory
        self._timeout, self._max_nbytes = timeout, max_nbytes
        self._threads = thread_count(threads)
        self._updates = _Updates()

    @property
    def version(self) -> int | None:
        """See `transfer.Subscriber`."""
        return self._updates.version

    def receive(self) -> Update:
        """See `transfer.Subscriber`."""
        known = self.version
        self._updates.replace(None)
        until = time.monotonic() + self._timeout
        while True:
            newest = newest_version(self._directory)
            if newest is not None and (known is None or newest > known):
                try:
                    update = prepare_delta(
                        self._target,
                        self._directory,
                        whole=True,
                        max_nbytes=self._max_nbytes,
                        threads=self._threads,
                    )
                except FileNotFoundError:
                    # Files of old versions were removed meanwhile.
                    if time.monotonic() > until:
                        raise
                else:
                    self._updates.replace(update)
                    return update
            if time.monotonic() > until:
                raise TimeoutError(self._nothing_newer(known, newest))
            time.sleep(_LOOK)

    def _nothing_newer(self, known: int | None, newest: int | None) -> str:
        """Why there was nothing to receive."""
        after = "" if known is None else f" after {known}"
        what = f"no version{after} in {self._directory} for {self._timeout:g} s: "
        if known is None or newest == known:
            return f"{what}is the publisher there?"
        there = "none" if newest is None else f"version {newest}"
        return f"{what}it has {there}, so it was begun anew. Make a new subscriber"

    def update(self) -> int:
        """See `transfer.Subscriber`."""
        update = self.receive()
        update.write()
        return update.version


def check_target(target: Any, max_nbytes: int) -> None:
    """Refuse what cannot be written to. Raises TypeError or ValueError."""
    with opened_target(target, max_nbytes):
        return


def _parsed(text: bytes, meeting: Meeting, max_nbytes: int) -> Announcement:
    """The announcement of a round. Raises FormatError."""
    publisher = meeting.publisher
    if hashlib.blake2b(text, digest_size=DIGEST_NBYTES).digest() != publisher.text:
        raise FormatError("checksum_mismatch", "the announcement was damaged in transit")
    announcement = Announcement.parse(text, max_nbytes)
    if state_digest(announcement, announcement.digests) != publisher.state:
        raise FormatError("bad_container", "the announcement is of another state than is offered")
    return announcement


def _parsed_as(tensor: Announced, piece: Any) -> engine.Parsed:
    """The buffer of a tensor that was announced. Raises FormatError."""
    parsed = engine.parse(piece, max(1, tensor.nbytes))
    if (parsed.plan.dtype, parsed.plan.shape) != (tensor.dtype, tensor.shape):
        raise FormatError("bad_container", f"{tensor.names[0]!r} comes as another tensor")
    return parsed


def _write_together(held: Sequence[_Held]) -> None:
    """Decode all of what is held. Raises FormatError, which names a tensor."""
    for one in held:
        with _naming([*one.arrays]):
            one.together.start()
    for one in held:
        with _naming([*one.arrays]):
            one.together.settle()


@contextmanager
def _naming(names: Sequence[str]) -> Iterator[None]:
    """A FormatError with the number of a buffer names its tensor."""
    try:
        yield
    except FormatError as error:
        if error.number is None:
            raise
        detail = f"tensor {names[error.number]!r}: {error.detail}"
        raise FormatError(error.reason, detail) from None


def _problem_of(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _check_digest(tensor: Announced, found: str) -> None:
    if found != tensor.digest:
        detail = f"tensor {tensor.names[0]!r} has not the digest that the publisher gives"
        raise FormatError("checksum_mismatch", detail)


def _memory_like(x: Any) -> Any:
    """Memory of the kind of a contiguous array."""
    if tensors.is_torch(x):
        return x.detach().new_empty(x.shape)
    return x.copy() if arrays.library_of(x) == "cupy" else np.empty_like(x)
