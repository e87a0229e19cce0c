"""What prepared collectives share: memory, encoding, decoding, and works that are judged later."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...codecs.common.base import Plan
from ...decoding import decode
from ...formats.dtypes import DType
from ...formats.errors import FormatError
from ...formats.header import align
from ...many import decode_many, decode_sum
from ...prepared import encode_planned, has_kernels
from ..errors import CollectiveError
from . import running, tensors
from .calls import Call, rounding_key
from .messages import Capacity, Layout, Messages, Phase
from .prepared_exchange import INT64, Exchange, Exchanged, Given, Slot, part_of
from .prepared_judgement import Judged
from .recorded import Recording, Recordings, capturing

if TYPE_CHECKING:
    from .prepared import PreparedCalls

#: The library of what is moved, and its device.
Place: TypeAlias = tuple[str, Any]
#: Queues what a call does, in a slot.
Body: TypeAlias = Callable[[Slot, Call], None]


class Work:
    """A prepared call that was made. ``wait`` makes its result right, or raises."""

    def __init__(
        self,
        owner: Prepared | None,
        slot: Slot | None,
        call: Call,
        report: Any,
        again: Callable[[bool], Any] | None,
    ) -> None:
        #: None when it has been waited for, and in a captured graph.
        self._owner = owner
        self._slot = slot
        #: Whether the first `wait` has begun.
        self._begun = False
        self._call = call
        #: Bytes to other ranks, without compression and as they were sent.
        self.raw_bytes, self.wire_bytes = call.raw_bytes, call.wire_bytes
        #: What decoding found, or a copy of it that is under way.
        self._report = report
        #: Makes the call once more, exactly. It is told whether this rank's result was wrong.
        self._again: Callable[[bool], Any] | None = again
        #: Whether the call was made once more, as a message did not fit.
        self.repeated = False
        #: Whether all messages are known to fit. Then the call is never made once more.
        self.certain = False
        #: By exchange and part, the most dynamic bytes that a message needed, when that is known.
        self.needs: list[int] = []
        self._error: BaseException | None = None

    def __del__(self) -> None:
        # On a GPU: nobody has waited for it, and nobody can any more.
        running.end(self._call)

    @property
    def may_change(self) -> bool:
        """Whether ``wait`` may have to make the call once more."""
        return not self.certain and self._owner is not None and self._owner.may_change

    def note_fit(self) -> None:
        """Note that all messages are known to fit. Nothing is kept any more to make it again."""
        self.certain, self._again = True, None

    @property
    def judged(self) -> bool:
        """Whether it has been waited for."""
        return self._owner is None

    def has_space_for(self, earlier: Work) -> bool:
        """Whether messages of an earlier call of the same data are known to fit into this one's.

        Args:
            earlier: The work of that call.
        """
        if self._slot is None or not earlier.judged or earlier.repeated or earlier._error:
            return False
        needs, capacities = earlier.needs, self._slot.capacities
        return len(needs) == len(capacities) and all(map(int.__le__, needs, capacities))

    def done(self) -> bool:
        """True if ``wait`` would not wait for the device."""
        # Another thread may be in `wait`, at whose end there is none.
        report = self._report
        return not isinstance(report, tensors.PendingHostCopy) or bool(report.done())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all has been decoded, and see to it that it is right.

        On a GPU the host waits for the queued call. Ranks wait for works in the same order. The
        first ``wait`` does all; later ones, of other threads too, wait until it is over, and raise
        what it raised.

        Args:
            timeout: Seconds that the first ``wait`` takes at most. None: the transport's.

        Returns:
            True.

        Raises:
            CollectiveError: If a rank was late or gone, or bytes were damaged; the error names it.
        """
        slot = self._slot
        if slot is not None:
            with slot.waiting:
                # A thread that waits within its own first `wait` must go on.
                if not self._begun:
                    self._begun = True
                    self._wait_first(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait_first(self, timeout: float | None) -> None:
        owner = self._owner
        assert owner is not None
        own: CollectiveError | None = None
        try:
            owner._judge(self, timeout)
        except CollectiveError as error:
            own = error
        except BaseException as error:
            # Nobody is to take the result for right.
            self._error = self._error or error
            raise
        finally:
            running.end(self._call)
            owner._remember(self._call, own)
            self._owner = self._slot = self._report = self._again = None
        # What a work found for which nobody waited comes first.
        self._error = self._error or own


class Again(NamedTuple):
    """How a call is made once more, exactly, and what it has in common with others.

    Attributes:
        ready: Called before the call is queued, which may overwrite what it reads. It gives what
            makes the call once more; that is told whether this rank's result was wrong.
        place: What the recorder says of its arrays.
    """

    ready: Callable[[], Callable[[bool], Any]]
    place: Hashable | None = None


class Prepared(Judged):
    """What prepared collectives share: memory, encoding, decoding, and the judgement of works."""

    #: How errors name it.
    collective = ""

    def __init__(self, calls: PreparedCalls, like: Any, facts: str = "") -> None:
        self._calls = calls
        self._rank, self._ranks = calls.rank, calls.world_size
        self._listed = isinstance(like, (list, tuple))
        likes = list(like) if self._listed else [like]
        if not likes:
            raise ValueError("like is an empty list; needed: at least one array")
        self._parts = [part_of(x) for x in likes]
        values, info, _ = tensors.as_input(likes[0])
        self._place: Place = info.library, info.device
        self._like = tensors.empty((0,), self._parts[0].dtype, values)
        self._width = self._ranks * len(self._parts)
        texts = ", ".join(f"{part.dtype.name} ({part.nelem},)" for part in self._parts)
        self._text = f"{texts} {self.collective}{facts}"
        self._slots = [Slot(phase) for phase in range(calls.depth)]
        #: What a work has found that nobody had waited for: the next one raises it.
        self._untold: CollectiveError | None = None
        self._exact: Any = None
        #: By exchange and part what is learnt; None where messages fit any data.
        self._capacities: list[Capacity | None] = []
        #: Whether a message may not fit.
        self._learns = False
        #: Whether tensors are coded where they are, and a GPU's not by way of the host.
        self._coded_here = True
        self._recordings = Recordings()
        calls.made.add(self)
        calls.agreed(f"prepare {self.collective}", self._text)

    @property
    def may_change(self) -> bool:
        """Whether works may have to make calls once more."""
        return self._learns

    # What a collective says of itself.

    def _exchanges(self) -> list[Exchanged]:
        """The exchanges of a call."""
        raise NotImplementedError

    def _prepared_exactly(self, calls: PreparedCalls) -> Any:
        """This collective without compression."""
        raise NotImplementedError

    # Memory.

    def _start(self) -> None:
        """Lay out the memory, once a subclass knows all."""
        learns = self._calls.route.learns and self._calls.codec.lossless
        for shares in itertools.chain.from_iterable(what.parts for what in self._exchanges()):
            nelem = max(shares.counts)
            plan = self._plan(nelem, shares.dtype, None)
            self._coded_here = self._coded_here and has_kernels(plan, self._like)
            bound = plan.dynamic_stride
            raw = nelem * shares.dtype.itemsize
            self._capacities.append(Capacity(bound, raw) if learns and bound else None)
        self._learns = any(capacity is not None for capacity in self._capacities)
        # What is coded on the host cannot be recorded.
        if self._coded_here and not self._listed:
            self._recordings = Recordings(self._calls.recorder(self._like))
        if self._calls.side_by_side:
            # Memory belongs to the stream of its calls: it is made with the first of them.
            return
        for slot in self._slots:
            self._lay_out(slot)
        if self._slots[0].words is not None and not capturing():
            # What is zero here is so before the first call, whatever its stream.
            self._calls.follow(self._slots[0].words, 0)

    def _plan(self, nelem: int, dtype: DType, capacity: Capacity | None) -> Plan:
        return self._calls.codec.plan(
            (nelem,),
            dtype.name,
            dynamic_capacity=None if capacity is None else capacity.nbytes,
            checksum=self._calls.checksum,
        )

    @tensors.kept
    def _lay_out(self, slot: Slot) -> None:
        """Give a slot memory for messages of the present capacities."""
        slot.exchanges = []
        slot.recordings.clear()
        self._recordings.forget()
        slot.capacities = []
        plans: list[Plan] = []
        for what in self._exchanges():
            layouts = self._layouts(what, len(slot.capacities))
            messages = self._messages(what, layouts[0].nbytes, (slot.phase, what.piece))
            slot.exchanges.append(Exchange(what, layouts, messages, self._rank, self._ranks))
            of_parts = list(zip(*(layout.plans for layout in layouts), strict=True))
            slot.capacities += [max(plan.dynamic_stride for plan in part) for part in of_parts]
            plans += itertools.chain.from_iterable(of_parts)
        if self._learns:
            words = [[word for _, word in e.needs] + e.checks for e in slot.exchanges]
            slot.need_words = list(itertools.chain.from_iterable(words))
        for prepared in list(self._calls.made):
            prepared.leave()
        if not tensors.is_cuda(self._like):
            return
        scratch = max(1, *(plan.scratch_nbytes for plan in plans))
        slot.scratch = tensors.empty_bytes(scratch, self._like)
        slot.needs_at = self._width * len(slot.exchanges)
        slot.late_at = slot.needs_at + len(slot.need_words)
        slot.words = tensors.empty((slot.late_at + len(slot.exchanges),), INT64, self._like)
        slot.words[...] = 0
        flat = [buffer for exchange in slot.exchanges for buffer in exchange.buffers]
        tensors.report(flat, slot.words)

    def rest(self) -> None:
        """Give up the memory of messages until the next call, as far as nobody waits for a work."""
        for slot in self._slots:
            slot.release()

    def leave(self) -> None:
        """Give up memory that other calls have left for larger memory."""
        for slot in self._slots:
            if not slot.shares:
                slot.release()

    def _layouts(self, what: Exchanged, first: int) -> list[Layout]:
        """The messages of an exchange, by rank, all as long as the longest.

        `first` is the number of the capacity of its first part.
        """
        # Other ranks do not see what messages to one another needed.
        tells = self._learns and what.kind == "swapped"
        prefix = align(2 * INT64.itemsize * len(self._parts)) if tells else 0
        learnt = self._capacities[first : first + len(what.parts)]
        capacities = list(zip(what.parts, learnt, strict=True))
        found = [
            Layout.of([self._plan(p.counts[rank], p.dtype, most) for p, most in capacities], prefix)
            for rank in range(self._ranks)
        ]
        nbytes = max(layout.nbytes for layout in found)
        return [layout._replace(nbytes=nbytes) for layout in found]

    def _messages(self, what: Exchanged, nbytes: int, phase: Phase) -> Messages:
        route = self._calls.route
        if what.kind == "gathered":
            return route.gathered(nbytes, self._like, phase)
        if what.kind == "swapped":
            return route.swapped(nbytes, self._like, phase)
        return route.spread(nbytes, self._like, phase, what.root)

    # A call.

    def _ready(self) -> Slot:
        """The next slot, when nobody uses it any more, with memory for what has been learnt."""
        on_gpu = tensors.is_cuda(self._like)
        if self._learns and on_gpu and capturing():
            # A replay could not be made once more.
            raise ValueError(
                f"{self.collective} over a network is captured in a CUDA graph, of messages by "
                f"{self._calls.codec.name} that may not fit; allowed: peers, or a lossy codec"
            )
        earlier = self._slots[self._calls.phase].work
        if on_gpu and earlier is not None and not earlier.judged and capturing():
            raise ValueError(
                f"{self.collective} is captured in a CUDA graph, and the work of an earlier call "
                "has not been waited for; needed: work.wait() before"
            )
        with self._failing():
            return self._free_slot()

    def _free_slot(self) -> Slot:
        slot = self._slots[self._calls.phase]
        if slot.work is not None:
            if not slot.work.judged:
                self._settle(slot.work)
            for capacity, need in zip(self._capacities, slot.work.needs, strict=False):
                if capacity is not None:
                    capacity.learn(need)
            slot.work = None
            if self._outgrown(slot):
                # What is about to be outgrown grows with it: new memory is recorded anew.
                for capacity in self._capacities:
                    if capacity is not None:
                        capacity.refit()
        # A graph goes on using the memory that it has captured.
        if not slot.captured and (not slot.exchanges or not slot.shares or self._outgrown(slot)):
            self._lay_out(slot)
        return slot

    def _outgrown(self, slot: Slot) -> bool:
        """Whether other capacities have been learnt."""
        if not self._learns:
            return False
        learnt = zip(slot.capacities, self._capacities, strict=True)
        return any(known is not None and size != known.nbytes for size, known in learnt)

    def _take(self, slot: Slot) -> Call:
        """The call that takes a slot, which is ready."""
        call = self._calls.begin(self.collective, self._text)
        if slot.words is not None:
            if not capturing():
                self._calls.follow(slot.words, slot.phase)
            if call.traced:
                call.events = []
        slot.found.clear()
        slot.needs.clear()
        slot.misled = False
        return call

    def _settle(self, work: Work) -> None:
        """Wait for a work whose memory is needed."""
        try:
            work.wait()
        except CollectiveError as error:
            if self._calls.broken:
                raise
            # The others, who found nothing, make the next call. So does this rank, to stay in step.
            self._untold = self._untold or error

    def _encode(
        self, slot: Slot, call: Call, at: int, given: Sequence[Given], message: Any = None
    ) -> None:
        """Encode tensors as messages of exchange `at`; in `message`, if there is one elsewhere."""
        exchange = slot.exchanges[at]
        wanted = [one for one in given if one.x.shape[0]]
        with call.stage("encode"):
            single = len(wanted) == 1 or self._calls.codec.spec.draws
            if single or not self._coded_here:
                for one in wanted:
                    self._encode_one(slot, call, exchange, one, message)
            else:
                # A batch has one dtype.
                for dtype in dict.fromkeys(exchange.what.parts[one.part].dtype for one in wanted):
                    batch = [one for one in wanted if exchange.what.parts[one.part].dtype == dtype]
                    plans = [exchange.layout(one.number).plans[one.part] for one in batch]
                    outs = [exchange.memory(one.number, one.part, message) for one in batch]
                    encode_planned(plans, [one.x for one in batch], outs)
            exchange.tell_needs()

    def _encode_one(
        self, slot: Slot, call: Call, exchange: Exchange, one: Given, message: Any
    ) -> None:
        calls = self._calls
        plan = exchange.layout(one.number).plans[one.part]
        calls.codec.encode(
            one.x,
            out=exchange.memory(one.number, one.part, message),
            scratch=slot.scratch,
            dynamic_capacity=plan.dynamic_stride,
            checksum=calls.checksum,
            key=_next_key(self._calls, call),
        )

    def _exchange(
        self, slot: Slot, call: Call, at: int, message: Any = None, *, beside: bool = False
    ) -> Callable[[], None]:
        """Queue exchange `at`, perhaps beside what is queued next; what waits for it there."""
        exchange = slot.exchanges[at]
        # Peers read what there is of the dynamic part, and nobody knows here how much that is.
        layout, by_network = exchange.layouts[0], self._calls.route.by_network
        nbytes = layout.nbytes if by_network else layout.certain_nbytes
        planned = exchange.sends(by_network) * nbytes
        given = [] if message is None else [message]
        # Where stages are timed they follow each other.
        beside = beside and call.events is None
        with call.stage("exchange"):
            move = functools.partial(exchange.messages.exchange, *given)
            wait = self._calls.queue(self._like, move, beside)
        moved = None if exchange.messages.cut is None else exchange.messages.cut.moved
        call.wire_bytes += planned if moved is None else moved
        return wait

    def _decode(self, slot: Slot, call: Call, at: int, outs: Sequence[Any]) -> None:
        """Decode what exchange `at` received into `outs`, one for each buffer; None: not wanted."""
        exchange = slot.exchanges[at]
        wanted = [
            (number, buffer, out)
            for number, (buffer, out) in enumerate(zip(exchange.buffers, outs, strict=True))
            if buffer is not None and out is not None
        ]
        if not wanted:
            return
        numbers, buffers, into = zip(*wanted, strict=True)
        with call.stage("decode"):
            try:
                if len(wanted) == 1:
                    decode(buffers[0], out=into[0], scratch=slot.scratch)
                else:
                    decode_many(buffers, out=into, scratch=slot.scratch)
            except FormatError as error:
                sender = exchange.sender(numbers[error.number or 0])
                slot.found.append((at, sender, error))

    def _sum(
        self,
        slot: Slot,
        call: Call,
        at: int,
        own: Any,
        out: Any,
        *,
        part: int = 0,
        dtype: DType | None = None,
        scale: float | None = None,
        travels_on: bool = False,
    ) -> None:
        """Fill `out` with the sum of what exchange `at` received of a part, and of `own`.

        `own` is this rank's term; None: its message is one, too. If a message did not fit, or was
        damaged, `out` is -0.0; with `travels_on` it is NaN, so that ranks that get the sum do not
        take it for right. Of no elements nothing was sent.
        """
        if not out.shape[0]:
            return
        lost = math.nan if travels_on else -0.0
        by_network = self._calls.route.by_network
        exchange, parts = slot.exchanges[at], len(self._parts)
        terms: list[Any] = list(exchange.buffers[part::parts])
        if own is not None:
            terms[self._rank] = own
        with call.stage("sum"):
            if len(terms) == 1 and own is not None:
                # A group of one.
                travels = dtype or exchange.what.parts[part].dtype
                terms = [
                    self._calls.codec.encode(
                        tensors.cast(own, travels), key=_next_key(self._calls, call)
                    )
                ]
            try:
                decode_sum(terms, scale=scale, dtype=dtype and dtype.name, out=out)
            except FormatError as error:
                only = 1 - self._rank if self._ranks == 2 else self._rank
                source = only if error.number is None else error.number
                slot.found.append((at, source, error))
                tensors.fill(out, lost)
            if slot.words is not None and (self._learns or (travels_on and by_network)):
                from ...codecs.common.fill_triton import fill_if

                words = slot.words[at * self._width + part : (at + 1) * self._width]
                fill_if(words, parts, out, lost)

    def _end(self, slot: Slot, call: Call, again: Callable[[bool], Any] | None) -> Work:
        """The work of what was queued; `again` makes the call once more, exactly."""
        self._collect(slot)
        report: Any = None
        if slot.words is not None:
            if capturing():
                # A replay may follow at once, and write what others still read.
                _meet(slot)
                running.end(call)
                slot.captured = True
                return Work(None, None, call, None, None)
            report = slot.pending = tensors.PendingHostCopy(slot.words, slot.pending)
        return self._work(slot, call, report, again)

    def _work(
        self, slot: Slot, call: Call, report: Any, again: Callable[[bool], Any] | None
    ) -> Work:
        if report is None:
            # On the host all of it is done; what `wait` makes once more is a call of its own.
            running.end(call)
        slot.work = Work(self, slot, call, report, again)
        slot.work._error, self._untold = self._untold, None
        return slot.work

    def forget(self) -> None:
        """Drop what has been recorded, which has connections of NCCL's."""
        for slot in self._slots:
            slot.recordings.clear()

    def _exactly(self, *arrays: Any, **options: Any) -> None:
        """Make a call of these arrays without compression, and wait for it; all ranks do."""
        refusal = self._calls.refusal(self.collective)
        if refusal is not None:
            raise refusal
        if self._exact is None:
            self._exact = self._prepared_exactly(self._calls.exact())
        with tensors.writing(*arrays):
            self._exact(*arrays, **options).wait()
        # Seldom needed, and as large as what is sent.
        self._exact.rest()

    def _run(self, body: Body, again: Again) -> Work:
        """Make a call, which `body` queues."""
        return self._make(self._ready(), lambda slot, call: self._queue(slot, call, body, again))

    def _make(self, slot: Slot, queue: Callable[[Slot, Call], Work]) -> Work:
        call = self._take(slot)
        running.begin(call)
        try:
            with self._failing():
                return queue(slot, call)
        except BaseException:
            running.end(call)
            self._calls.join(self._like)
            raise

    def _queue(self, slot: Slot, call: Call, body: Body, again: Again) -> Work:
        place = again.place
        if not self._recordings.wanted(place, slot.recordings) or capturing():
            exactly = self._exactly_again(again)
            if slot.words is not None and capturing():
                # Before a replay others may still read what it writes.
                _meet(slot)
            body(slot, call)
            return self._end(slot, call, exactly)
        recording = slot.recordings[place] = self._record(slot, call, body)
        return self._replay(slot, call, recording, again)

    def _exactly_again(self, again: Again) -> Callable[[bool], Any] | None:
        """What makes a call once more; None if it never is: then its arrays are not kept."""
        return again.ready() if self._learns else None

    # Recordings.

    def _again(self, make: Callable[[], Callable[[bool], Any]], *arrays: Any) -> Again:
        """How a call of these arrays is made once more; `make` as in ``Again``."""
        return Again(make, self._recordings.place(*arrays))

    def _call(self, again: Again, prepare: Callable[[], Body]) -> Work:
        """Make a call as it has been recorded, or what `prepare` gives, which looks at arrays."""
        if again.place is not None:
            ready = self._ready()
            known = ready.recordings.get(again.place)
            if known is not None and not capturing():
                return self._make(ready, lambda slot, call: self._replay(slot, call, known, again))
        return self._run(prepare(), again)

    def _record(self, slot: Slot, call: Call, body: Body) -> Recording:
        if slot.words is not None:
            slot.pending = tensors.PendingHostCopy(slot.words, slot.pending)

        def queue() -> None:
            try:
                body(slot, call)
            except BaseException:
                # A graph cannot end before what runs beside.
                self._calls.join(self._like)
                raise
            self._collect(slot)
            if slot.pending is not None:
                slot.pending.copy(slot.words)

        replay = self._recordings.record(queue, self._calls.queue_of(slot.phase))
        return Recording(replay, call.raw_bytes, call.wire_bytes)

    def _replay(self, slot: Slot, call: Call, recording: Recording, again: Again) -> Work:
        call.raw_bytes, call.wire_bytes = recording.raw_bytes, recording.wire_bytes
        exactly = self._exactly_again(again)
        with call.stage("exchange"):
            recording.replay()
        if slot.pending is not None:
            slot.pending.mark(self._calls.stream_of(slot.phase))
        return self._work(slot, call, slot.pending, exactly)

    def _alike(self) -> Any:
        """Arrays like those that it was prepared for."""
        found = [tensors.empty((part.nelem,), part.dtype, self._like) for part in self._parts]
        return found if self._listed else found[0]

    def _flat(
        self,
        x: Any,
        counts: Sequence[int],
        name: str,
        dtypes: Sequence[DType] | None = None,
        *,
        written: bool = False,
    ) -> list[Any]:
        """`x`, an array or a list of them, as tensors of one dimension, without a copy.

        What is `written` must allow that.
        """
        given = list(x) if self._listed and isinstance(x, (list, tuple)) else [x]
        if len(given) != len(self._parts):
            raise ValueError(f"{name} has {len(given)} arrays; needed: {len(self._parts)}")
        wanted = dtypes or [part.dtype for part in self._parts]
        return [
            _flat(values, n, f"{name}[{i}]" if self._listed else name, dtype, self._place, written)
            for i, (values, n, dtype) in enumerate(zip(given, counts, wanted, strict=True))
        ]


def _flat(x: Any, nelem: int, name: str, dtype: DType, place: Place, written: bool) -> Any:
    values, info, target = tensors.as_input(x)
    if (info.library, info.device) != place:
        here, needed = (
            f"{library} on {device or 'the host'}"
            for library, device in ((info.library, info.device), place)
        )
        raise ValueError(f"{name} is {here}; needed: {needed}, as was prepared")
    if written:
        tensors.check_result(x, values, info._replace(library=target.library), name)
    if info.dtype != dtype or math.prod(info.shape) != nelem:
        raise ValueError(
            f"{name} is {info.dtype.name} of {math.prod(info.shape)} elements; needed: "
            f"{dtype.name} of {nelem}, as was prepared"
        )
    if not tensors.is_contiguous(values):
        raise ValueError(f"{name} is not contiguous; needed: contiguous memory")
    return values.reshape(-1)


def _next_key(calls: PreparedCalls, call: Call) -> Any:
    """The key of a call's next encoding, for codecs that draw."""
    number = call.encodings
    call.encodings += 1
    return rounding_key(calls.seed, call.sequence, number, calls.rank, calls.world_size)


def _meet(slot: Slot) -> None:
    """Have all ranks come before anything of a captured call that follows here."""
    for exchange in slot.exchanges:
        if exchange.messages.late is not None:
            exchange.messages.exchange()
