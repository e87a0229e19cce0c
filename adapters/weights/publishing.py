"""The side of weight transfer that sends: by a transport, or to a delta directory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import closing
from functools import cached_property, partial
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ... import arrays
from ...arguments import thread_count
from ...codec import Codec
from ...delta_directory import save_delta
from ...delta_files import check_version, delta_files, newest_version
from ...files import Against, encode_shorter
from ...formats.dtypes import BY_NAME, DType
from ...formats.header import align
from ...pipeline import Job, Memory, in_order
from ...planning import make_plan
from ...state_tensors import (
    ArrayState,
    bytes_of,
    digests_of,
    is_module,
    memory_key,
    opened_state,
)
from ...storage import PathLike
from ..collectives import tensors
from ..errors import CollectiveError
from ..transports.base import Transport
from .announcement import DIGEST_NBYTES, Announced, Announcement, Stream, state_digest
from .aside import Aside
from .rounds import NONE, Group, Meeting, Message, Status

#: Bytes of tensors that share a message, and on a GPU, where each costs the host milliseconds.
BUCKET_NBYTES, BUCKET_NBYTES_ON_GPU = 32 << 20, 256 << 20


class TransportPublisher:
    """Sends by a transport; see `transfer.Publisher`."""

    def __init__(
        self,
        source: Any,
        transport: Transport,
        codec: Codec,
        delta: Codec,
        keep: bool,
        bucket_nbytes: int | None,
        threads: int | None,
    ) -> None:
        check_source(source)
        self.version: int | None = None
        self._source = source
        self._group = Group(transport)
        self._codec, self._delta = codec, delta
        self._keep, self._bucket_nbytes = keep, bucket_nbytes
        self._threads = thread_count(threads)
        #: What was sent last, and its digests: of its tensors, and of all of it. Zeros are those of
        #: no state.
        self._base: ArrayState | None = None
        self._digests: dict[str, str] = {}
        self._of_base = bytes(DIGEST_NBYTES)
        self._aside = Aside()

    def send(self, version: int | None = None) -> int:
        """See `transfer.Publisher`."""
        asked = NONE if version is None else check_version(version)
        with opened_state(self._source, "source", 0) as state:
            assert isinstance(state, ArrayState)
            digests = digests_of(state, self._threads)
            nbytes = self._bucket_nbytes
            if nbytes is None:
                there = any(map(arrays.on_gpu, state.arrays.values()))
                nbytes = BUCKET_NBYTES_ON_GPU if there else BUCKET_NBYTES
            announcement = Announcement.of(state, digests, self._base, self._digests, nbytes)
            text, of_state = announcement.pack(), state_digest(state, digests)
            mine = Status(
                True,
                NONE if self.version is None else self.version,
                of_state,
                asked,
                len(text),
                self._of_base,
                hashlib.blake2b(text, digest_size=DIGEST_NBYTES).digest(),
            )
            meeting = self._group.meet(mine)
            kept = (digests, of_state) if self._keep else None
            if meeting.streams:
                self._send(state, announcement, text, meeting, kept)
            self.version = meeting.version
            if not meeting.streams and kept is not None:
                self._remember(state, *kept)
        return meeting.version

    def _send(
        self,
        state: ArrayState,
        announcement: Announcement,
        text: bytes,
        meeting: Meeting,
        kept: tuple[dict[str, str], bytes] | None,
    ) -> None:
        """Everything from the announcement on; `kept` is what `_remember` needs to know."""
        group = self._group
        data = np.frombuffer(bytearray(text), np.uint8)
        group.spread("announce", data, data.size, meeting.root)
        encoder = Encoder(state, self._base, self._codec, self._delta, self._threads, self._aside)
        counts = [len(bucket) for _, bucket in announcement.messages(meeting.streams)]
        sent, problem = 0, None
        try:
            with closing(encoder.messages(announcement, meeting.streams)) as messages:
                # Made while the others look at the announcement; what fails is told them below.
                first = _first_of(messages)
                group.agree("announce")
                for message in chain(first(), messages):
                    group.send(message)
                    sent += 1
            if kept is not None:
                # While the others check what they got.
                self._remember(state, *kept)
        except CollectiveError:
            raise
        except Exception as error:
            # The others learn of it in place of the next message.
            problem = error
            if sent < len(counts):
                group.give_up(counts[sent])
        try:
            group.agree("verify", problem)
        except CollectiveError:
            # If what was announced was at fault, the next round does not repeat it.
            self._forget()
            raise

    def _forget(self) -> ArrayState | None:
        """Keep no base any longer; gives it."""
        old, self._base = self._base, None
        self._digests, self._of_base = {}, bytes(DIGEST_NBYTES)
        return old

    def _remember(self, state: ArrayState, digests: dict[str, str], of_state: bytes) -> None:
        """Copy what has changed: the next version is against it."""
        known = self._digests
        old = self._forget()
        before = {} if old is None else old.arrays
        alike = [n for n in before if n in digests and old and old.kind(n) == state.kind(n)]
        same = {n for n in alike if digests[n] == known[n]}
        usable = {
            n: before[n] for n in alike if n in same or _may_write(before[n], state.arrays[n])
        }
        # Memory that is of no use is freed before other is taken.
        del old, before
        self._base = ArrayState(_copies(state, usable, same), "what was sent last")
        self._digests, self._of_base = digests, of_state


class Begun(NamedTuple):
    """A message whose tensors are being encoded on a device.

    Attributes:
        bucket: Its tensors.
        based: Those that are encoded against the base.
        deltas: Their buffers by name.
        others: Buffers, or bytes, of the other ones.
    """

    bucket: list[Announced]
    based: list[Announced]
    deltas: dict[str, Any]
    others: dict[str, Any]


class Encoder:
    """Makes the messages of a round: buffers of a state, against a base or whole."""

    def __init__(
        self,
        state: ArrayState,
        base: ArrayState | None,
        codec: Codec,
        delta: Codec,
        threads: int,
        aside: Aside,
    ) -> None:
        self._state, self._base = state, base
        self._codec, self._delta = codec, delta
        self._threads, self._aside = threads, aside

    @cached_property
    def _device(self) -> Any:
        """Where messages are made: the GPU of the first tensor that is on one."""
        places = map(self._place, self._state.names)
        return next((place for place in places if place is not None), None)

    def _place(self, name: str) -> Any:
        """The GPU of a tensor; None of one on the host, and of one without a dtype of ours."""
        from ...gpu_together import place_of

        if not isinstance(self._state.kind(name)[0], DType):
            return None
        return place_of(self._state.arrays[name])

    def messages(
        self, announcement: Announcement, streams: Sequence[Stream]
    ) -> Generator[Message, None, None]:
        """The messages; one is valid until the next is asked for."""
        found = announcement.messages(streams)
        values = [*self._state.arrays.values()]
        if any(map(arrays.on_gpu, values)):
            # Streams of other libraries are not known here.
            self._aside.begin(self._device if all(map(tensors.is_torch, values)) else None)
            try:
                yield from self._on_device(found)
            finally:
                # What was begun and is not sent reads the tensors and the base, too.
                self._aside.end()
            return
        jobs = [
            Job(sum(map(_needed, bucket)), partial(self._on_host, stream, bucket))
            for stream, bucket in found
        ]
        with in_order(jobs, self._threads) as results:
            yield from results

    def _on_device(
        self, found: Iterator[tuple[Stream, list[Announced]]]
    ) -> Generator[Message, None, None]:
        """The messages. One is being encoded while the host waits for the sizes of that before."""
        before: Begun | None = None
        for stream, bucket in found:
            begun = self._aside.run(partial(self.begin, stream, bucket))
            if before is not None:
                yield self._aside.message(partial(self.finish, before)).taken()
            before = begun
        if before is not None:
            yield self._aside.message(partial(self.finish, before)).taken()

    def _is_based(self, tensor: Announced, stream: Stream) -> bool:
        """Whether a tensor is to be coded against the base."""
        named = isinstance(tensor.dtype, DType) and tensor.dtype.name in self._delta.dtypes
        return stream == "delta" and tensor.before is not None and named and not tensor.is_plain

    def _on_host(
        self, stream: Stream, bucket: list[Announced], memory: Memory, threads: int
    ) -> Message:
        """A message, encoded by `threads` threads into memory of a job."""
        data = memory.take(sum(align(_bound(t, self._codec, self._delta)) for t in bucket))
        sizes, against, at = [], [], 0
        for tensor in bucket:
            name, dtype = tensor.names[0], tensor.dtype
            if tensor.is_plain or not isinstance(dtype, DType):
                size, based = tensor.nbytes, False
                data[at : at + size] = bytes_of(self._state, name)
            else:
                plan = whole = make_plan(self._codec.spec, dtype, tensor.shape, None)
                given = None
                if self._is_based(tensor, stream) and self._base is not None:
                    plan = make_plan(self._delta.spec, dtype, tensor.shape, None)
                    if plan.needs_base:
                        given = Against(self._base.bits(name), whole)
                part = data[at : at + plan.nbytes]
                plan, size = encode_shorter(plan, given, self._state.bits(name), part, threads)
                based = plan.needs_base
            data[at + size : at + align(size)] = 0
            sizes.append(size)
            against.append(based)
            at += align(size)
        return Message(sizes, against, data[:at])

    def begin(self, stream: Stream, bucket: list[Announced]) -> Begun:
        """Launch what encodes a message where its tensors are: tensors of a kind in one batch."""
        from ...gpu_together import encode_against

        based = []
        if self._base is not None:
            based = [
                tensor
                for tensor in bucket
                if self._is_based(tensor, stream) and self._place(tensor.names[0]) == self._device
            ]
            names = [tensor.names[0] for tensor in based]
            olds = [self._base.arrays[name] for name in names]
            news = [self._state.arrays[name] for name in names]
            # Longer ones are sent whole.
            made = encode_against(self._delta, news, olds, most=0.5)
            found = dict(zip(names, made, strict=True))
        else:
            found = {}
        others = [tensor for tensor in bucket if tensor.names[0] not in found]
        return Begun(bucket, based, found, self._whole(others))

    def finish(self, begun: Begun) -> Message:
        """The message. Against the base are tensors that take at most half of their bytes so."""
        from ...gpu_together import pack_together, packed_nbytes, records_of

        records = dict(zip(begun.deltas, records_of([*begun.deltas.values()]), strict=True))
        longer = [
            tensor
            for tensor in begun.based
            if 2 * packed_nbytes(begun.deltas[tensor.names[0]], records[tensor.names[0]])
            > tensor.nbytes
        ]
        items = begun.deltas | begun.others | self._whole(longer)
        names = [tensor.names[0] for tensor in begun.bucket]
        ordered = [items[name] for name in names]
        known = {i: records[n] for i, n in enumerate(names) if items[n] is begun.deltas.get(n)}
        data, sizes = pack_together(ordered, known)
        return Message(sizes, [i in known for i in range(len(names))], data)

    def _whole(self, bucket: list[Announced]) -> dict[str, Any]:
        """What is sent of tensors without the base: buffers, or bytes, on the device."""
        items: dict[str, Any] = {}
        alike: dict[Any, list[str]] = {}
        for tensor in bucket:
            name, dtype = tensor.names[0], tensor.dtype
            x = self._state.arrays[name]
            here = self._place(name) == self._device
            if tensor.is_plain or not here or not isinstance(dtype, DType):
                items[name] = self._bytes(tensor, self._device)
            elif math.prod(tensor.shape) > self._codec.spec.max_chunk_nelem(dtype):
                items[name] = self._codec.encode(x, chunks=None)
            else:
                alike.setdefault(arrays.describe(x)[:3], []).append(name)
        for names in alike.values():
            found = self._codec.encode_many([self._state.arrays[name] for name in names])
            items.update(zip(names, found, strict=True))
        return items

    def _bytes(self, tensor: Announced, device: Any) -> Any:
        """What is sent of a tensor that is plain, or is not on the `device`: bytes there."""
        from ...gpu_together import bytes_at

        x = self._state.arrays[tensor.names[0]]
        if not tensor.is_plain:
            return bytes_at(self._codec.encode(x, chunks=None).packed(), device)
        if isinstance(tensor.dtype, DType) and tensors.is_torch(x):
            # Without a way by the host.
            return bytes_at(tensors.view(x.detach().contiguous(), BY_NAME["uint8"]), device)
        return bytes_at(bytes_of(self._state, tensor.names[0]), device)


class DirectoryPublisher:
    """Writes to a delta directory; see `transfer.Publisher`."""

    def __init__(
        self,
        source: Any,
        directory: PathLike,
        codec: Codec,
        form: str,
        keep: bool,
        chain_limit: int,
        threads: int | None,
    ) -> None:
        check_source(source)
        self.version: int | None = None
        self._source, self._directory = source, directory
        self._codec, self._form = codec, form
        self._keep, self._chain_limit, self._threads = keep, chain_limit, threads
        self._base: dict[str, Any] | None = None

    def send(self, version: int | None = None) -> int:
        """See `transfer.Publisher`."""
        base: Any = self._base
        newest = newest_version(self._directory)
        if self.version is not None and newest != self.version:
            raise ValueError(_not_its_own(self._directory, self.version, newest))
        if base is None and newest is not None:
            base = self._directory
        if version is None and newest is not None:
            # Also if nothing has changed: subscribers wait for a version.
            version = newest + 1
        try:
            found = save_delta(
                self._source,
                base,
                self._directory,
                version=version,
                form=self._form,
                codec=self._codec,
                chain_limit=self._chain_limit,
                threads=self._threads,
            )
        except BaseException:
            self._look_again()
            raise
        self._remember(found)
        return found

    def _look_again(self) -> None:
        """After an error, see whether the version is there: its folder may not have been synced."""
        newest = newest_version(self._directory)
        if newest is not None and newest != self.version:
            note = delta_files(self._directory)[0].note()
            with opened_state(self._source, "source", 0) as state:
                if digests_of(state, thread_count(self._threads)) == note.digests:
                    self._remember(newest)

    def _remember(self, version: int) -> None:
        """Take a version as sent."""
        self.version, self._base = version, None
        if self._keep:
            with opened_state(self._source, "source", 0) as state:
                assert isinstance(state, ArrayState)
                self._base = _copies(state)


def _not_its_own(directory: PathLike, sent: int, newest: int | None) -> str:
    """Why a publisher does not go on, whose version is not the newest of the directory."""
    known = "no version" if newest is None else newest
    what = f"this publisher sent version {sent}, and {directory} has {known}: "
    if newest is not None and newest > sent:
        return what + (
            "another one writes there. Only one may; a new one goes on from the newest version"
        )
    return f"{what}it was begun anew. Make a new publisher, which goes on from what is there"


def _first_of(messages: Iterator[Message]) -> Callable[[], list[Message]]:
    """Make the first message. What is returned gives it, if there is one, or raises what it did."""
    made: Future[list[Message]] = Future()
    try:
        made.set_result(list(islice(messages, 1)))
    except Exception as error:
        made.set_exception(error)
    return made.result


def check_source(source: Any) -> None:
    """Refuse what is neither names to arrays nor a module. Raises TypeError or ValueError."""
    if not isinstance(source, Mapping) and not is_module(source):
        kind = type(source).__name__
        raise TypeError(f"source is a {kind}; allowed: names to arrays, a torch.nn.Module")
    with opened_state(source, "source", 0):
        return


def _bound(tensor: Announced, codec: Codec, delta: Codec) -> int:
    """Bytes that are enough to encode a tensor to, in any way."""
    if tensor.is_plain or not isinstance(tensor.dtype, DType):
        return tensor.nbytes
    plans = [make_plan(c.spec, tensor.dtype, tensor.shape, None) for c in (codec, delta)]
    return max(plan.nbytes for plan in plans)


def _needed(tensor: Announced) -> int:
    """Bytes of memory that encoding a tensor takes, about."""
    return 2 * tensor.nbytes


def _copies(
    state: ArrayState,
    usable: Mapping[str, Any] = MappingProxyType({}),
    same: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Copies of all arrays by name.

    Some names have earlier copies, of the same kind, that are `usable`: their memory is written, or
    they are the `same` already.
    """
    made: dict[Any, Any] = {}
    taken: set[int] = set()
    olds, news = [], []
    for name, x in state.arrays.items():
        key = memory_key(state, name)
        if key in made:
            continue
        old = usable.get(name)
        # Names that were one tensor may be several now.
        if old is None or id(old) in taken:
            made[key] = _copied(x)
            continue
        made[key] = old
        taken.add(id(old))
        if name in same:
            continue
        if tensors.is_torch(x):
            olds.append(old)
            news.append(x.detach())
        else:
            old[...] = arrays.host_array(x) if isinstance(old, np.ndarray) else x
    if olds:
        import torch

        with torch.no_grad():
            torch._foreach_copy_(olds, news)
    return {name: made[memory_key(state, name)] for name in state.names}


def _may_write(old: Any, x: Any) -> bool:
    """Whether the values of an array can be written to an earlier copy, where it is."""
    library = arrays.library_of(old)
    if library != arrays.library_of(x):
        return False
    if library == "torch":
        return bool(old.device == x.device) and not old.is_inference()
    return library == "numpy" or (library == "cupy" and bool(old.device == x.device))


def _copied(x: Any) -> Any:
    """The values of an array in memory of their own, where it is."""
    library = arrays.library_of(x)
    if library == "torch":
        import torch

        # Also a later round may write to it.
        with torch.inference_mode(False), torch.no_grad():
            return x.detach().clone()
    if library == "jax":
        # It does not change.
        return x
    return arrays.host_array(x).copy() if library == "numpy" else x.copy()
