"""The state of a communicator, its memory, and the exchange steps that its collectives share."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast, get_args

import numpy as np

from .. import arrays
from ..arrays import ArrayInfo
from ..buffer import Buffer
from ..codec import Codec, as_codec, decode
from ..codecs.common.base import Bytes, Key, Plan
from ..codecs.mx import Mx
from ..formats.dtypes import BY_NAME, DType
from ..formats.header import MAJOR, MINOR
from ..planning import integer
from . import tensors
from .auto_scale import AutoScale, Scaling
from .calls import Call, CollectiveError, LateCards, LateDigests, TraceRecord, rounding_key
from .cost import Choice
from .digests import content_digest, content_digests
from .shares import (
    CARD_NBYTES,
    CARD_WORDS,
    Share,
    Shares,
    pieces,
    plain_descriptor,
    seal,
    sealed,
    sizes_on,
    text_on,
)
from .switch import ALGORITHMS, SUMS, Algorithm, Measured, Switch
from .transport import Transport

Design = Literal["first", "between"]
DESIGNS = ("first", "between")
Verify = bool | Literal["digest"]
Topology = Literal["two-shot", "ring", "butterfly", "cells"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
#: Collectives that come in both designs, and that all ranks take part in alike.
TWO_DESIGNS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")

_INT64 = BY_NAME["int64"]
#: How errors say where a buffer came from that all ranks have made.
CHUNKS = " (chunk i is rank i's)"
_OTHER_CALL = "make another call, or one with another dtype or shape"
#: Elements from which on their number says nothing about the codec that is taken.
_NAMED = 1 << 20
#: Layouts that are kept: a model has so many sizes of buckets.
_KEPT = 256
#: Shapes whose first call has been compared.
_MOST = 4096
#: The fields of a TraceRecord, which costs more to make.
_Traced = tuple[str, int, str, str, int, int, dict[str, float], str | None]


class Exchange(NamedTuple):
    """Shares whose chunk descriptors and static parts were sent; their dynamic parts were not."""

    send: Shares
    receive: Shares
    #: None if there are no dynamic parts: then all is there.
    arriving: tensors.OnTheWay | None
    digests: Sequence[int]


class _Unchecked(NamedTuple):
    """What decoding on a GPU will have found; `words` are 0 if nothing."""

    call: Call
    words: tensors.OnTheWay | None

    def done(self) -> bool:
        """True if settling would not wait."""
        cards = (late.arriving.done() for late in self.call.late)
        return (self.words is None or self.words.done()) and all(cards)


_Init = TypeVar("_Init", bound=Callable[..., None])


def _naming(init: _Init) -> _Init:
    """`init` of a `Group`, with a message that says which options there are."""

    @functools.wraps(init)
    def checked(self: Group, *args: Any, **options: Any) -> None:
        self._check_options(options, ["transport"])
        init(self, *args, **options)

    return cast(_Init, checked)


class Group:
    """A fixed set of ranks with a codec; see ``collectives.Communicator``, which adds the calls."""

    @_naming
    def __init__(
        self,
        transport: Transport,
        codec: str | Codec = "zipccl",
        *,
        algorithm: Algorithm = "compressed",
        pieces: int | None = None,
        granularity: int = 64 << 20,
        sizes: Design = "first",
        checksum: bool = True,
        verify: Verify = False,
        trace: int = 1000,
        seed: int = 0,
        topology: Topology = "two-shot",
        scaling: AutoScale | None = None,
    ) -> None:
        """Made by all ranks together, which compare format, codec and parameters.

        The arguments are described at ``collectives.Communicator``.
        """
        if not all(hasattr(transport, name) for name in ("rank", "world_size", "all_to_all_v")):
            raise TypeError(
                f"Expected a transport, got {type(transport).__name__}. Allowed: one of "
                "tightwire.adapters; for a process group of PyTorch TorchDist(group) of "
                "tightwire.adapters.torch_dist"
            )
        if sizes not in DESIGNS:
            raise ValueError(f"sizes is {sizes!r}; allowed: {DESIGNS}")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is {algorithm!r}; allowed: {ALGORITHMS}")
        if integer("trace", trace) < 0:
            raise ValueError(f"trace is {trace}; allowed: at least 0")
        if pieces is not None and integer("pieces", pieces) < 1:
            raise ValueError(f"pieces is {pieces}; allowed: at least 1, or None")
        if integer("granularity", granularity) < 1:
            raise ValueError(f"granularity is {granularity}; allowed: at least 1 byte")
        if not 0 <= integer("seed", seed) < 1 << 64:
            raise ValueError(f"seed is {seed}; allowed: 0 to 2**64 - 1")
        if verify not in (False, True, "digest"):
            raise ValueError(f"verify is {verify!r}; allowed: False, True, 'digest'")
        if verify == "digest" and not checksum:
            raise ValueError("verify is 'digest', checksum False; allowed with it: checksum=True")
        self._transport = transport
        self._codec = self._accepted(as_codec(codec))
        self._raw = as_codec("raw")
        self._seed = seed
        self._sizes_first = sizes == "first"
        self._checksum = bool(checksum)
        self._verify = bool(verify) and verify != "digest"
        #: Ranks compare digests of what travels without checksums.
        self._digests = verify == "digest"
        self._trace: deque[_Traced] = deque(maxlen=trace)
        self._counts: Counter[str] = Counter()
        self._plans: dict[tuple[DType, int, int, bool], Plan] = {}
        #: Pieces are laid out by the thread that encodes, too.
        self._layout_lock = threading.RLock()
        self._memories: dict[tuple[str, Any], Any] = {}
        self._layouts: dict[tuple[Any, ...], Shares] = {}
        #: The layout that each memory has at present.
        self._holders: dict[tuple[str, Any], Shares] = {}
        self._words: dict[Any, Any] = {}
        self._unchecked: deque[_Unchecked] = deque()
        self._spare: list[tensors.OnTheWay] = []
        self._summaries: list[tensors.OnTheWay] = []
        #: Descriptors of native calls by text and device, and memory for those that come late.
        self._texts: dict[tuple[str, Any], Any] = {}
        self._spare_descriptors: list[tensors.OnTheWay] = []
        self._compared: set[tuple[object, ...]] = set()
        self._broken: str | None = None
        self._closed = False
        #: Small native calls need not become uint8 first.
        self._plain_dtypes: frozenset[Any] = getattr(transport, "plain_dtypes", frozenset())
        self._rank = transport.rank
        self._size = transport.world_size
        self._switch = Switch(self._codec, algorithm, pieces, granularity, self._measure)
        #: No buffer has a dynamic part: cards tell no sizes, and nobody waits for them.
        self._fixed = not any(
            self._plan(BY_NAME[name], _NAMED).dynamic_stride for name in self._codec.dtypes
        )
        self._check_topology(topology)
        self._topology: Topology = topology
        cut = f"{granularity} bytes" if pieces is None else f"{pieces} pieces"
        path = f"pipelined in {cut}" if algorithm == "pipelined" else algorithm
        self._scaling = self._scaling_of(scaling)
        self._agree(sizes, path, seed, scaling)

    @classmethod
    def _check_options(cls, options: Iterable[str], own: Sequence[str] = ()) -> None:
        """Raise TypeError for names of neither arguments nor `own`."""
        allowed = [*own, *list(inspect.signature(cls).parameters)[1:]]
        if unknown := sorted(set(options) - set(allowed)):
            raise TypeError(f"options are {unknown}; allowed: {list(dict.fromkeys(allowed))}")

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
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
    def scaling(self) -> Scaling | None:
        """The factor of scales in sums over hops, of mx with ``scale_rule="agreed"``; else None."""
        return self._scaling

    @property
    def topology(self) -> Topology:
        """How sums are made that do not name a topology."""
        return self._topology

    @property
    def transport(self) -> Transport:
        """The transport that moves the bytes."""
        return self._transport

    def trace(self, last: int | None = None) -> list[TraceRecord]:
        """Records of the last calls, oldest first, with those that failed.

        Calls that the communicator refused are left out, and those that measure paths.

        Args:
            last: Number of records. None: all that are remembered.
        """
        skipped = 0 if last is None else max(len(self._trace) - last, 0)
        return [TraceRecord(*traced) for traced in itertools.islice(self._trace, skipped, None)]

    def check(self) -> None:
        """Raise what decoding on a GPU has found so far. Waits for the device.

        Raises:
            CollectiveError: If received data are damaged.
        """
        while self._unchecked:
            self._settle(self._unchecked.popleft())

    def refusal(self, collective: str, sequence: int | None = None) -> CollectiveError | None:
        """The error that later calls will raise.

        Args:
            collective: Name of the later call.
            sequence: Its number. None: the next one.

        Returns:
            The error, or None if the communicator can be used.
        """
        if self._broken is None:
            return None
        number = self._counts["group"] if sequence is None else sequence
        why = f"an earlier call has failed: {self._broken}"
        why = "the communicator is closed" if self._closed else why
        return CollectiveError(self._rank, collective, number, "start", why)

    def close(self) -> None:
        """Free work memory, and close the transport, which no other communicator may then use.

        Later calls raise CollectiveError; ``trace()`` still works. Closing again does nothing. A
        process group that ``TorchDist`` was given stays open.
        """
        if self._closed:
            return
        self._closed = True
        # Also refuses what `_call` does not see.
        self._broken = self._broken or "the communicator is closed"
        for memory in (self._unchecked, self._spare, self._summaries, self._words, self._plans):
            memory.clear()
        for named in (self._memories, self._layouts, self._holders):
            named.clear()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()

    def slow_ranks(self, calls: int = 100) -> list[tuple[int, float]]:
        """Find which ranks the others wait for.

        A collective: all ranks call it, and all get the same answer. In the first stage that
        exchanges anything every rank waits for the last one, so a rank that waits less came later.
        Native calls count on the host only: on a GPU they wait for nothing.

        Args:
            calls: How many of the last calls to take into account.

        Returns:
            Pairs of a rank and the seconds that others waited for it, the slowest first.

        Raises:
            CollectiveError: If the exchange fails.
        """
        names = {"sizes", "exchange", "native"} | (set() if self._sizes_first else {"static"})
        last = [r for r in self.trace() if r.collective in TWO_DESIGNS and r.error is None]
        waits = [sum(s for n, s in r.seconds.items() if n in names) for r in last[-calls:]]
        mine = np.zeros(calls, np.float64)
        mine[: len(waits)] = waits
        call = Call(self._rank, "slow_ranks", self._counts["group"], "")
        with call.stage("gather"):
            table = self._gather_plain(mine.view(np.uint8)).view(np.float64)
        behind = (table.max(0) - table).sum(1)
        order = np.argsort(-behind, kind="stable")
        return [(int(rank), float(behind[rank])) for rank in order]

    def _measure(
        self, collective: str, like: Any, info: ArrayInfo, source: DType | None
    ) -> Measured:
        raise NotImplementedError

    # Arguments, plans and memory.

    def _agree(
        self, sizes: str, algorithm: str, seed: int, scaling: AutoScale | None = None
    ) -> None:
        spec = self._codec.spec
        facts = {
            "format": f"{MAJOR}.{MINOR}",
            "codec": f"{spec.name} version {spec.version}, {spec!r}",
            "algorithm": algorithm,
            "sizes": sizes,
            "checksum": self._checksum,
            "seed": seed,
            "topology": self._topology,
            "digests": self._digests,
        }
        if self._scaling is not None:
            facts["scaling"] = scaling or AutoScale()
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
        """`mine` of all ranks, shape (world_size, mine.size), through the transport's arrays.

        A checksum goes with it; RuntimeError if one does not fit.
        """
        sent = np.concatenate([mine, _checksum(mine)])
        x = self._transport.empty(sent.size)
        out = self._transport.empty(self._size * sent.size)
        x[:] = tensors.on_device(sent, tensors.device_of(x))
        self._transport.all_gather(out, x)
        came = arrays.host_array(out).reshape(self._size, sent.size)
        found: Bytes = np.ascontiguousarray(came[:, : mine.size])
        sums = came[:, mine.size :]
        damaged = [r for r, row in enumerate(found) if (_checksum(row) != sums[r]).any()]
        if damaged:
            raise RuntimeError(f"data from ranks {damaged} were damaged in transit")
        return found

    @contextmanager
    def _call(
        self,
        collective: str,
        algorithm: str,
        info: ArrayInfo,
        choice: Choice,
        sent: DType | None = None,
        *,
        share: int | None = None,
        op: str | None = None,
        pair: str | None = None,
    ) -> Iterator[Call]:
        """Number a call, keep its record, and remember a failure that leaves ranks out of step.

        `share` is the number of elements that are encoded for a rank, if that is not all of them.
        """
        key = (collective if op is None else f"{collective} {op}") if pair is None else pair
        # Messages concern two ranks only, so that every pair counts its own.
        counter = "group" if pair is None else pair
        sequence = self._counts[counter]
        self._counts[counter] += 1
        call = Call(self._rank, collective, sequence, key)
        dtype = sent or info.dtype
        call.kind = key, dtype.name, info.shape, choice.algorithm, algorithm
        call.text = f"{dtype.name} {info.shape} {key if pair is None else collective}"
        refusal = self.refusal(collective, sequence)
        if refusal is not None:
            raise refusal
        call.algorithm, call.reason = "native", choice.reason
        if choice.algorithm != "native":
            nelem = math.prod(info.shape) if share is None else share
            taken = self._plan(dtype, min(nelem, _NAMED)).codec.name
            call.algorithm = f"{algorithm}, {taken}"
            if self._fixed:
                call.algorithm = f"{algorithm}, no sizes, {taken}"
            elif collective in TWO_DESIGNS:
                design = "first" if self._sizes_first else "between"
                call.algorithm = f"{algorithm}, sizes {design}, {taken}"
            if not call.reason:
                name = self._codec.name
                does = "codes" if taken == name else "gains nothing on"
                what = dtype.name if share is None else f"shares of {share} {dtype.name}"
                call.reason = f"{name} {does} {dtype.name if taken == name else what}"
            if collective in SUMS and taken == self._codec.name and self._codec.spec.caution:
                call.reason += f"; {self._codec.spec.caution}"
        error: str | None = None
        try:
            yield call
            # What is raised now is of an earlier call, or this rank's own.
            call.exchanged = True
            self._finish(call)
        except BaseException as caught:
            error = str(caught)
            # Cards that have not been read may say that ranks are out of step.
            if not call.exchanged or call.late:
                self._broken = error
            raise
        finally:
            self._trace.append(call.record(error))

    def _accepted(self, codec: Codec) -> Codec:
        spec = codec.spec
        if spec.bind((1,)) != spec:
            raise ValueError(
                f"codec is {spec!r}, which takes a parameter from the tensor's shape, and "
                f"collectives flatten tensors; allowed: {codec.name} with all parameters given"
            )
        return codec

    def _scaling_of(self, given: AutoScale | None) -> Scaling | None:
        spec = self._codec.spec
        if not isinstance(spec, Mx) or not spec.agrees:
            if given is not None:
                raise ValueError(
                    f"scaling is given, codec is {spec!r}; allowed with it: mx with "
                    'scale_rule="agreed"'
                )
            return None
        if not isinstance(given, AutoScale | None):
            raise TypeError(f"scaling is {given!r}; allowed: an AutoScale() or None")
        return Scaling(AutoScale() if given is None else given, spec, self._size)

    def _check_topology(self, topology: Topology) -> None:
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology is {topology!r}; allowed: {TOPOLOGIES}")
        codec, allowed = self._codec, ["two-shot"]
        adds_up = codec.homomorphic and codec.reduce_op == "max"
        if adds_up:
            allowed.append("cells")
        elif self._fixed and not codec.homomorphic:
            allowed += ["ring", "butterfly"]
        if topology not in allowed:
            why = "" if self._fixed else ", whose sizes depend on the data"
            raise ValueError(
                f"topology is {topology!r}, codec {codec.name!r}{why}; allowed: {allowed}"
            )
        most = codec.spec.max_ranks
        if topology == "cells" and most is not None and self._size > most:
            raise ValueError(
                f"{codec.spec!r} adds up at most {most} ranks; the group has {self._size}"
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

    def _plan(self, dtype: DType, nelem: int, chunks: int = 1, *, raw: bool = False) -> Plan:
        key = dtype, nelem, chunks, raw
        plan = self._plans.get(key)
        if plan is None:
            codec = self._raw if raw else self._codec
            plan = codec.plan((nelem,), dtype, chunks=chunks, checksum=self._checksum)
            with self._layout_lock:
                if len(self._plans) >= _KEPT:
                    self._plans.clear()
                    self._layouts.clear()
                plan = self._plans.setdefault(key, plan)
        return plan

    @tensors.kept
    def _bytes(self, name: str, nbytes: int, like: Any) -> Any:
        """The communicator's own memory called `name`, which grows."""
        with self._layout_lock:
            key = name, tensors.device_of(like)
            memory = self._memories.get(key)
            if memory is None or memory.shape[0] < nbytes:
                # The old one goes first, with all views: both may not fit.
                self._memories.pop(key, None)
                self._holders.pop(key, None)
                self._layouts = {k: s for k, s in self._layouts.items() if k[:2] != key}
                memory = self._memories[key] = tensors.empty_bytes(nbytes, like)
            return memory

    @tensors.kept
    def _shares(self, name: str, plans: Sequence[Plan], like: Any) -> Shares:
        """Shares of these plans, which `_plan` has made, in the memory called `name`."""
        with self._layout_lock:
            # Plans are kept as long as their layouts, so that ids tell them apart.
            ids = tuple(map(id, plans))
            key = (name, tensors.device_of(like), ids)
            found = self._layouts.get(key)
            if found is None:
                if len(self._layouts) >= _KEPT:
                    self._layouts.clear()
                memory = self._bytes(name, sum(plan.nbytes for plan in plans), like)
                found = self._layouts[key] = Shares(list(plans), memory)
            return found

    def _take(self, name: str, shares: Shares) -> bool:
        """Lay the memory called `name` out as `shares`; True if it was something else."""
        key = name, tensors.device_of(shares.memory)
        changed = self._holders.get(key) is not shares
        self._holders[key] = shares
        return changed

    @tensors.kept
    def _words_of(self, like: Any) -> Any:
        """What decoding finds, int64, shape (world_size,), on the device of `like`."""
        device = tensors.device_of(like)
        words = self._words.get(device)
        if words is None:
            words = tensors.empty((self._size,), _INT64, like)
            words[...] = 0
            self._words[device] = words
        return words

    # Steps.

    def _encode(
        self, call: Call, parts: Sequence[Any], plans: Sequence[Plan], name: str = "send"
    ) -> Shares:
        """Encode each part by its plan, straight into the memory that is sent from."""
        with call.stage("encode"):
            shares = self._shares(name, plans, parts[0])
            self._take(name, shares)
            for part, plan, data in zip(parts, plans, shares.data, strict=True):
                key = self._key(call)
                if not self._encode_here(part, plan, data, key):
                    self._codec.encode(
                        part, out=data, chunks=plan.chunks, checksum=self._checksum, key=key
                    )
        return shares

    def _encode_here(
        self, x: Any, plan: Plan, data: Any, key: Key | None, stats: Any = None
    ) -> bool:
        """Encode on a GPU, in memory of the communicator's own; False on the host."""
        if not tensors.is_cuda(x):
            return False
        from ..gpu import encode_into

        work = self._bytes("encode", plan.scratch_nbytes, x)
        return encode_into(plan, tensors.contiguous(x), data, work, key, stats)

    def _sum_here(self, buffer: Buffer, x: Any, data: Any, key: Key, stats: Any) -> bool:
        """Encode the sum of `buffer` and `x`, as `_encode_here`."""
        if not tensors.is_cuda(x):
            return False
        from ..gpu import sum_into

        work = self._bytes("encode", buffer.plan.scratch_nbytes, x)
        return sum_into(buffer, tensors.contiguous(x), data, work, key, stats)

    def _decode_here(
        self,
        buffer: Buffer,
        out: Any,
        start: int,
        stop: int,
        *,
        add: bool = False,
        name: str = "decode",
    ) -> bool:
        """Decode on a GPU, as `_encode_here`, in the memory called `name`."""
        if not tensors.is_cuda(out):
            return False
        from ..gpu import decode_into

        work = self._bytes(name, buffer.plan.scratch_nbytes, out)
        return decode_into(buffer, out, work, start, stop, add=add)

    def _key(self, call: Call) -> Key:
        """What the next encoding of `call` draws by."""
        encoding = call.encodings
        call.encodings += 1
        return rounding_key(self._seed, call.sequence, encoding, self._rank, self._size)

    def _receive(self, name: str, plans: Sequence[Plan], like: Any) -> Shares:
        """Memory for the chunks to receive, with their headers written."""
        shares = self._shares(name, plans, like)
        if self._take(name, shares):
            shares.write_headers()
        return shares

    def _adds_here(self, plan: Plan, total: Any) -> bool:
        """True if `_decode_here` adds buffers of this plan to `total`."""
        if not tensors.is_cuda(total):
            return False
        from ..gpu import adds_into

        return adds_into(plan, total)

    def _decode(
        self,
        call: Call,
        buffer: Buffer,
        out: Any,
        source: int | None,
        word: int = 0,
        note: str = CHUNKS,
    ) -> None:
        """Decode what rank `source` has sent; None: `note` says where the chunks came from.

        `word` is the buffer's number in its `Shares`.
        """
        came = note if source is None else f" (from rank {source})"
        with call.stage("decode", came):
            if not self._decode_here(buffer, out, 0, buffer.plan.nelem):
                decode(buffer, out=out)
        self._decoded(call, buffer, came, word)

    def _decoded(self, call: Call, buffer: Buffer, note: str, word: int = 0) -> None:
        """What decoding on a GPU finds is not known before; `word` is the buffer's number."""
        if buffer._memory is None:
            return
        if self._verify:
            with call.stage("decode", note):
                buffer.check()
        else:
            # A word may be that of several buffers, one after the other.
            before = call.unchecked.get(word, "")
            if note not in before:
                call.unchecked[word] = f"{before} or{note}" if before else note
            call.place = buffer._memory.data

    def _finish(self, call: Call) -> None:
        """Have the verdict on this call fetched, and raise for those that have come."""
        on_the_way: tensors.OnTheWay | None = None
        if call.unchecked:
            words = self._words_of(call.place)
            spare = self._spare.pop() if self._spare else None
            on_the_way = tensors.OnTheWay(words, spare)
            # The next call's verdict is to be its own.
            tensors.fill(words, 0)
        if call.unchecked or call.late:
            self._unchecked.append(_Unchecked(call, on_the_way))
        self._settle_known()

    def _settle_known(self) -> None:
        """Raise for verdicts that have come."""
        while self._unchecked and self._unchecked[0].done():
            self._settle(self._unchecked.popleft())

    def _settle(self, unchecked: _Unchecked) -> None:
        call = unchecked.call
        try:
            with call.stage("sizes"):
                for late in call.late:
                    if isinstance(late, LateDigests):
                        self._check_digests(call, late)
                        continue
                    self._check_descriptors(call, late)
        except CollectiveError as strange:
            # Ranks are out of step, whatever has gone well since.
            self._broken = self._broken or str(strange)
            raise
        if unchecked.words is None:
            return
        found = unchecked.words.wait(self._transport.timeout).tolist()
        self._spare.append(unchecked.words)
        for word, note in call.unchecked.items():
            if found[word]:
                from ..codecs.common.frame_triton import problem

                error = problem(found[word])
                if error is not None:
                    with call.stage("decode", note):
                        raise error

    def _sizes(
        self,
        call: Call,
        cards: Any,
        shares: Shares,
        source: int | None = None,
    ) -> list[int]:
        """Dynamic bytes by the descriptors, which are on the host. Raises if they do not fit."""
        sizes = sizes_on(cards)
        for i, (size, share) in enumerate(zip(sizes, shares.shares, strict=True)):
            if not 0 <= size <= share.slot.shape[0]:
                sender, most = i if source is None else source, share.slot.shape[0]
                detail = f"rank {sender} claims {size} dynamic bytes, at most {most}"
                raise call.failure("sizes", detail)
        if source is None and call.nbytes:
            self._switch.came(shares.plans[0].dtype, call.nbytes, cards[:, 1])
        return sizes

    def _cards(
        self,
        call: Call,
        arriving: tensors.OnTheWay,
        digests: Sequence[int],
        source: int | None = None,
        note: str = "",
        stage: str = "sizes",
        what: str = _OTHER_CALL,
    ) -> Any:
        """The descriptors on the host, (shares, CARD_WORDS); raises if one is of another call.

        They are those of all ranks, or all from rank `source`. Of other things that ranks must
        agree on `what` says what those do that differ.
        """
        host = arriving.wait(self._transport.timeout)
        seals, said = host[:, 0].tolist(), host[:, 1].tolist()
        strange = [i for i, digest in enumerate(digests) if seals[i] != sealed(digest, said[i])]
        if strange:
            told = {i if source is None else source: text_on(host[i]) for i in strange}
            detail = f"ranks {list(told)} {what}{note}"
            if what == _OTHER_CALL:
                texts = [f"; rank {rank}: {text}" for rank, text in told.items() if text]
                detail += f"{''.join(texts)}; here: {call.text}"
            raise call.failure(stage, detail)
        call.compared = True
        return host

    def _compare_late(
        self,
        call: Call,
        shares: Shares,
        digests: Sequence[int],
        source: int | None = None,
        note: str = "",
    ) -> None:
        """Have the descriptors compared: now if they are on the host, else with the call's verdict.

        For descriptors that have no other use. They are those of all ranks, or all from rank
        `source`.
        """
        with call.stage("sizes"):
            arriving = shares.arriving_late()
            late = LateCards(arriving, digests, source, shares.spare, note)
            self._check_descriptors_late(call, late)

    def _check_descriptors_late(self, call: Call, late: LateCards) -> None:
        if self._verify or late.arriving.done():
            self._check_descriptors(call, late)
        else:
            call.late.append(late)

    def _check_descriptors(self, call: Call, late: LateCards) -> None:
        self._cards(call, late.arriving, late.digests, late.source, late.note)
        late.spare.append(late.arriving)

    def _exchange_fixed(
        self,
        call: Call,
        send: Shares,
        receive: Shares,
        parcels: Sequence[Sequence[Any]],
        there: Sequence[int],
        here: Sequence[int],
        note: str = "",
    ) -> Exchange:
        """Descriptors and static parts in one step, where there are no dynamic parts.

        `parcels[j]` goes to rank j; digests are those of `_begin_swap`, `note` explains errors.
        """
        if call.nbytes:
            self._compare_new(call, send.memory, there, here)
        with call.stage("exchange", note):
            self._transport.all_to_all_v(receive.parcels, parcels)
        self._compare_late(call, receive, here, note=note)
        return Exchange(send, receive, None, here)

    def _begin_swap(
        self,
        call: Call,
        send: Shares,
        receive: Shares,
        there: Sequence[int],
        here: Sequence[int],
    ) -> Exchange:
        """Send share j of `send` to rank j, without its dynamic part.

        Where no buffer has one, that is a single step in which nobody waits. `there`
        are the digests of the shares that go, `here` of those that come.
        """
        if self._fixed:
            send.write_cards(there, self._ratio(call, send))
            return self._exchange_fixed(call, send, receive, send.parcels, there, here)
        both = receive.paired(send)
        send.write_cards(there, self._ratio(call, send))
        digests = [*here, *there]
        arriving: tensors.OnTheWay | None = None
        if not self._sizes_first and call.nbytes:
            self._compare_new(call, send.memory, there, here)
        for first in (self._sizes_first, not self._sizes_first):
            if first:
                with call.stage("sizes"):
                    self._transport.all_to_all(receive.card_bytes, send.card_bytes)
                    arriving = receive.arriving(both)
                    if arriving.done():
                        self._cards(call, arriving, digests)
                continue
            with call.stage("static"):
                if receive.statics is None or send.statics is None:
                    outs = [[share.static] for share in receive.shares]
                    self._transport.all_to_all_v(outs, [[share.static] for share in send.shares])
                else:
                    self._transport.all_to_all(receive.statics, send.statics)
        assert arriving is not None
        return Exchange(send, receive, arriving, digests)

    def _end_swap(self, call: Call, began: Exchange) -> list[Buffer]:
        """The buffers of `began.receive`, filled."""
        send, receive, me = began.send, began.receive, self._rank
        if began.arriving is None:
            outgoing = [0] * self._size
        else:
            with call.stage("sizes"):
                cards = self._cards(call, began.arriving, began.digests)
                incoming = self._sizes(call, cards[: self._size], receive)
                outgoing = sizes_on(cards[self._size :])
            with call.stage("dynamic"):
                self._transport.all_to_all_v(pieces(receive, incoming), pieces(send, outgoing))
        buffers = receive.buffers(self._words_of(receive.memory))
        own = send.shares[me]
        raw = send.raw_nbytes - own.raw_nbytes
        wire = CARD_NBYTES * (self._size - 1) + send.static_nbytes - int(own.static.shape[0])
        self._account(call, send.plans[0].dtype, raw, wire + sum(outgoing) - outgoing[me])
        return buffers

    def _begin_gather(
        self, call: Call, send: Shares, digest: int, name: str, note: str = ""
    ) -> Exchange:
        """Gather the one share of `send`, without its dynamic part; `note` explains errors."""
        (plan,) = send.plans
        whole = self._plan(plan.dtype, self._size * plan.nelem, self._size)
        receive = self._receive(name, [whole], send.memory)
        send.write_cards([digest], self._ratio(call, send))
        digests = [digest] * self._size
        if self._fixed:
            parcels = send.parcels * self._size
            return self._exchange_fixed(call, send, receive, parcels, digests, digests, note)
        arriving: tensors.OnTheWay | None = None
        if not self._sizes_first and call.nbytes:
            self._compare_new(call, send.memory, digests, digests)
        for first in (self._sizes_first, not self._sizes_first):
            if first:
                with call.stage("sizes"):
                    self._transport.all_gather(receive.card_bytes, send.card_bytes)
                    arriving = receive.arriving(receive.cards)
                    if arriving.done():
                        self._cards(call, arriving, digests)
            else:
                with call.stage("static"):
                    self._transport.all_gather(receive.statics, send.shares[0].static)
        assert arriving is not None
        return Exchange(send, receive, arriving, digests)

    def _end_gather(self, call: Call, began: Exchange) -> Buffer:
        """The whole buffer, filled."""
        own = began.send.shares[0]
        if began.arriving is None:
            sizes = [0] * self._size
            buffer = began.receive.buffers(self._words_of(began.receive.memory))[0]
        else:
            with call.stage("sizes"):
                cards = self._cards(call, began.arriving, began.digests)
                sizes = self._sizes(call, cards, began.receive)
            buffer = self._gather_dynamic(call, own, began.receive, sizes)
        others = self._size - 1
        wire = CARD_NBYTES + int(own.static.shape[0]) + sizes[self._rank]
        self._account(call, began.send.plans[0].dtype, others * own.raw_nbytes, others * wire)
        return buffer

    def _gather_dynamic(
        self, call: Call, own: Share, whole: Shares, sizes: Sequence[int]
    ) -> Buffer:
        """Send the dynamic part of `own` to all ranks; the whole buffer."""
        with call.stage("dynamic"):
            # They differ in size, so this is no all-gather.
            mine = own.slot[: sizes[self._rank]]
            self._transport.all_to_all_v(pieces(whole, sizes), [[mine]] * self._size)
            return whole.buffers(self._words_of(whole.memory))[0]

    def _account(self, call: Call, dtype: DType, raw: int, wire: int) -> None:
        call.raw_bytes += raw
        call.wire_bytes += wire
        if raw and call.nbytes:
            self._switch.went(call.collective, dtype, call.nbytes, wire / raw)

    def _ratio(self, call: Call, send: Shares) -> int:
        dtype = send.plans[0].dtype
        return self._switch.ratio(call.collective, dtype, call.nbytes) if call.nbytes else 0

    def _compare(
        self,
        call: Call,
        like: Any,
        there: Sequence[int],
        here: Sequence[int],
        stage: str = "sizes",
        what: str = _OTHER_CALL,
    ) -> None:
        """Raise if another rank makes another call: `there` are digests for them, `here` theirs.

        `stage` and `what` are those of `_cards`.
        """
        like = tensors.empty((1,), _INT64, like)
        mine = tensors.empty((self._size, CARD_WORDS), _INT64, like)
        came = tensors.empty(mine.shape, _INT64, like)
        with call.stage(stage):
            alike = self._descriptor(call, there[0], like)
            if call.collective == "all_gather":
                # As its descriptors do: ranks that take other paths are to meet here.
                self._transport.all_gather(tensors.as_bytes(came), tensors.as_bytes(alike))
            else:
                tensors.put(mine, alike)
                seals = np.array([sealed(digest, 0) for digest in there], np.int64)
                tensors.put(mine[:, 0], tensors.on_device(seals, tensors.device_of(like)))
                self._transport.all_to_all(tensors.as_bytes(came), tensors.as_bytes(mine))
            self._cards(call, tensors.OnTheWay(came), here, stage=stage, what=what)
        call.wire_bytes += CARD_NBYTES * (self._size - 1)

    def _descriptor(self, call: Call, digest: int, like: Any, word: Any = None) -> Any:
        """A descriptor that tells this call and `word`: int64, shape (1, CARD_WORDS)."""
        key = call.text, tensors.device_of(like)
        kept = self._texts.get(key)
        if kept is None:
            if len(self._texts) >= _MOST:
                self._texts.clear()
            kept = tensors.on_device(plain_descriptor(call.text), tensors.device_of(like))
            self._texts[key] = kept
        descriptor = tensors.copied(kept)
        seal(descriptor, digest, word)
        return descriptor

    def _compare_new(
        self, call: Call, like: Any, there: Sequence[int], here: Sequence[int]
    ) -> None:
        """Compare before a call moves data that has compared nothing yet.

        On the host that is every call: gloo ends a process that gets more bytes than it expects,
        and other networks leave what does not come as it was. On a GPU, which the host would wait
        for, it is the first call of a kind; all ranks know the shape, so that it is the first on
        each of them.
        """
        known = self._size == 1 or (tensors.is_cuda(like) and call.kind in self._compared)
        if known or call.compared:
            return
        if len(self._compared) >= _MOST:
            self._compared.clear()
        self._compare(call, like, there, here)
        self._compared.add(call.kind)

    def _compare_shape(self, call: Call, like: Any, info: ArrayInfo, *more: int) -> None:
        """`_compare_new` where all ranks have one shape, and one root if `more` says which."""
        digests = [call.digest(info, (*more, *info.shape))] * self._size
        self._compare_new(call, like, digests, digests)

    # Digests of what travels without a checksum.

    def _agree_on_digests(
        self, call: Call, words: Sequence[Any], check: Callable[[Any], list[int]]
    ) -> None:
        """Gather `words`, int64, shape (1,) each, and raise for ranks that `check` finds in them.

        On a GPU the host does not wait for that: the error comes with the call's verdict.
        """
        mine = tensors.empty((len(words),), _INT64, words[0])
        for i, word in enumerate(words):
            tensors.put(mine[i : i + 1], word)
        everyone = tensors.empty((self._size * len(words),), _INT64, mine)
        with call.stage("digest"):
            self._transport.all_gather(tensors.as_bytes(everyone), tensors.as_bytes(mine))
        call.wire_bytes += 8 * len(words) * (self._size - 1)
        self._check_digests_late(call, everyone.reshape(self._size, -1), check)

    def _check_digests_late(
        self, call: Call, words: Any, check: Callable[[Any], list[int]]
    ) -> None:
        """Have `check` look at `words`: now if they are on the host, else with the call's verdict.

        On a GPU it is never now: all ranks are to come to the end of the call.
        """
        late = LateDigests(tensors.OnTheWay(words), check)
        if tensors.is_cuda(words) or not late.arriving.done():
            call.late.append(late)
        else:
            self._check_digests(call, late)

    def _check_digests(self, call: Call, late: LateDigests) -> None:
        """Raise if digests on the host, or still on the way, show that results are damaged."""
        with call.stage("digest"):
            found = late.check(late.arriving.wait(self._transport.timeout))
        if found:
            raise call.failure("digest", f"ranks {found} got other bytes than were sent")

    def _check_gathered(self, call: Call, x: Any, whole: Any) -> None:
        """Have all ranks raise if the shares of `whole` are not the `x` of all ranks."""
        if not self._digests:
            return
        with call.stage("digest"):
            own = content_digest(x)
            shares = content_digest(content_digests(whole, [math.prod(x.shape)] * self._size))

        def check(found: Any) -> list[int]:
            wanted = content_digest(np.ascontiguousarray(found[:, 0]))
            return _numbers(found[:, 1] != wanted)

        self._agree_on_digests(call, [own, shares], check)

    def _check_swapped(
        self, call: Call, x: Any, sends: Sequence[int], whole: Any, receives: Sequence[int]
    ) -> None:
        """Have all ranks raise if elements of `x` for a rank are not those of its `whole`."""
        if not self._digests:
            return
        with call.stage("digest"):
            mine, found = content_digests(x, sends), content_digests(whole, receives)
            told = tensors.empty((self._size,), _INT64, found)
            self._transport.all_to_all(tensors.as_bytes(told), tensors.as_bytes(mine))
            strange = (told != found).any().reshape(1)
        call.wire_bytes += 8 * (self._size - 1)
        self._agree_on_digests(call, [strange], lambda found: _numbers(found[:, 0] != 0))

    def _check_broadcast(self, call: Call, before: Any, x: Any, root: int) -> None:
        """Have all ranks raise if the `x` of one is not what it was `before` on rank `root`.

        `before` is a digest.
        """
        with call.stage("digest"):
            words = [before, content_digest(x)]

        def check(found: Any) -> list[int]:
            return _numbers(found[:, 1] != found[root, 0])

        self._agree_on_digests(call, words, check)


def _checksum(data: Bytes) -> Bytes:
    return np.frombuffer(hashlib.blake2b(data.tobytes(), digest_size=8).digest(), np.uint8)


def _numbers(marked: Any) -> list[int]:
    """Of the marked entries or rows."""
    return np.flatnonzero(marked).tolist()
