"""The session of a communicator: its ranks, its codec, its calls, and what is known to be wrong."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ...arrays import ArrayInfo
from ...codec import Codec, as_codec
from ...codecs.common.base import Bytes
from ...formats.dtypes import BY_NAME, DType
from ...formats.header import MAJOR, MINOR
from ...planning import integer
from ..errors import CollectiveError
from ..transports.base import Transport
from . import running, tensors
from .agreement import agree, gather_plain
from .arguments import check_collective, check_round_trips
from .auto_scale import AutoScale, Scaling, scaling_of
from .calls import Call, TraceRecord, newest
from .cost import Choice
from .kept_measurements import KeptMeasurements, check_measurements
from .measurements_file import absolute
from .path_selection import ALGORITHMS, BUDGET, SUMS, Algorithm, PathSelection
from .work_memory import WorkMemory

Design = Literal["first", "between"]
DESIGNS = ("first", "between")
Verify = bool | Literal["digest"]
Topology = Literal["two-shot", "ring", "butterfly", "in-network"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
#: Collectives that come in both designs, and that all ranks take part in alike.
TWO_DESIGNS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")

#: Elements from which on their number says nothing about the codec that is taken.
_NAMED = 1 << 20
#: The fields of a TraceRecord, which costs more to make.
_Traced = tuple[str, int, str, str, int, int, dict[str, float], str | None]


class _PendingStatus(NamedTuple):
    """What decoding on a GPU will have found; `words` are 0 if nothing."""

    call: Call
    words: tensors.PendingHostCopy | None

    def done(self) -> bool:
        """True if settling would not wait."""
        descriptors = (late.arriving.done() for late in self.call.late)
        return (self.words is None or self.words.done()) and all(descriptors)


@dataclass(frozen=True)
class Options:
    """The arguments of ``Communicator`` besides transport and codec, which are described there."""

    algorithm: Algorithm = "compressed"
    pieces: int | None = None
    granularity: int = 64 << 20
    sizes: Design = "first"
    checksum: bool = True
    verify: Verify = False
    trace: int = 1000
    seed: int = 0
    topology: Topology = "two-shot"
    scaling: AutoScale | None = None
    measurements: str | os.PathLike[str] | None = None
    name: str = ""

    def check(self) -> None:
        """Raise TypeError or ValueError for what no codec and no group allows."""
        if self.sizes not in DESIGNS:
            raise ValueError(f"sizes is {self.sizes!r}; allowed: {DESIGNS}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is {self.algorithm!r}; allowed: {ALGORITHMS}")
        if integer("trace", self.trace) < 0:
            raise ValueError(f"trace is {self.trace}; allowed: at least 0")
        if self.pieces is not None and integer("pieces", self.pieces) < 1:
            raise ValueError(f"pieces is {self.pieces}; allowed: at least 1, or None")
        if integer("granularity", self.granularity) < 1:
            raise ValueError(f"granularity is {self.granularity}; allowed: at least 1 byte")
        if not 0 <= integer("seed", self.seed) < 1 << 64:
            raise ValueError(f"seed is {self.seed}; allowed: 0 to 2**64 - 1")
        if self.verify not in (False, True, "digest"):
            raise ValueError(f"verify is {self.verify!r}; allowed: False, True, 'digest'")
        if self.verify == "digest" and not self.checksum:
            raise ValueError("verify is 'digest', checksum False; allowed with it: checksum=True")
        check_measurements(self.measurements, "algorithm", self.algorithm)
        if not isinstance(self.name, str):
            raise TypeError(f"name is {self.name!r}; allowed: a string")

    @property
    def path(self) -> str:
        """How ranks that compare their options name the algorithm."""
        if self.algorithm != "pipelined":
            return self.algorithm
        count = f"{self.granularity} bytes" if self.pieces is None else f"{self.pieces} pieces"
        return f"pipelined in {count}"


class Session:
    """A fixed set of ranks with a codec, which all of them make together.

    It numbers calls, keeps their records and their work memory, and remembers what leaves ranks out
    of step.

    Args:
        transport: The transport, for this session alone.
        codec: A codec or its name, with all parameters given.
        options: What a communicator is told besides.
        round_trips: Whether the codec has to decode to what was encoded.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is not allowed.
    """

    def __init__(
        self,
        transport: Transport,
        codec: str | Codec,
        options: Options,
        *,
        round_trips: bool = True,
    ) -> None:
        if not all(hasattr(transport, name) for name in ("rank", "world_size", "all_to_all_v")):
            raise TypeError(
                f"Expected a transport, got {type(transport).__name__}. Allowed: one of "
                "tightwire.adapters; for a process group of PyTorch TorchDist(group) of "
                "tightwire.adapters.transports.torch_dist"
            )
        options.check()
        self.name = options.name
        self.transport = transport
        self.codec = _accepted(as_codec(codec), round_trips)
        self.seed = options.seed
        self.sizes_first = options.sizes == "first"
        self.checksum = bool(options.checksum)
        #: Damage of what is encoded is looked for at once, on a GPU too.
        self.verify = bool(options.verify) and options.verify != "digest"
        #: Ranks compare digests of what travels without checksums.
        self.digests = options.verify == "digest"
        self.records: deque[_Traced] = deque(maxlen=options.trace)
        self.traced = options.trace > 0
        #: Numbers of the next calls: of the group, and of each pair that sends messages.
        self.counts: Counter[str] = Counter()
        #: Calls whose data or descriptors have not been judged yet.
        self.unchecked: deque[_PendingStatus] = deque()
        self._spare: list[tensors.PendingHostCopy] = []
        #: Why later calls are refused, None if they are not.
        self.broken: str | None = None
        self._closed = False
        #: Dtypes that the transport moves as they are: small native calls need not become uint8.
        self.plain_dtypes: frozenset[Any] = transport.plain_dtypes
        self.rank = transport.rank
        self.size = transport.world_size
        self.paths = PathSelection(
            self.codec, options.algorithm, options.pieces, options.granularity
        )
        #: Seconds left for measurements of collectives, the same on all ranks.
        self.measuring_left = BUDGET
        self.memory = WorkMemory(self.codec, self.checksum, self.size)
        #: No buffer has a dynamic part: descriptors tell no sizes, and nobody waits for them.
        self.fixed = not any(
            self.memory.plan(BY_NAME[name], _NAMED).dynamic_stride for name in self.codec.dtypes
        )
        #: Of earlier programs, if the user wants them.
        self.measurements: KeptMeasurements | None = None
        self.topology: Topology = options.topology
        self.scaling: Scaling | None = scaling_of(options.scaling, self.codec.spec, self.size)
        self._options = options

    def agree(self) -> None:
        """Compare format, codec and options with those of all ranks; once, before any call.

        Raises CollectiveError on each rank if they differ.
        """
        spec, options = self.codec.spec, self._options
        facts = {
            "format": f"{MAJOR}.{MINOR}",
            "codec": f"{spec.name} version {spec.version}, {spec!r}",
            "algorithm": options.path,
            "sizes": options.sizes,
            "checksum": self.checksum,
            "seed": self.seed,
            "topology": self.topology,
            "digests": self.digests,
        }
        if self.scaling is not None:
            facts["scaling"] = options.scaling or AutoScale()
        if options.measurements is not None:
            facts["measurements"] = "kept"
        text = ", ".join(f"{name} {value}" for name, value in facts.items())
        call = Call(self.rank, "Communicator", 0, "", self.name)
        with running.noted(call), call.stage("agree"):
            agree(call, self.gather_plain, text)
        if options.measurements is None:
            return
        if self.size == 1:
            # Nothing is measured.
            absolute(options.measurements)
            return
        about = f"{facts['codec']}, checksum {self.checksum}, sizes {options.sizes}"
        about += f", digests {self.digests}, verify {self.verify}"
        self.measurements = KeptMeasurements(options.measurements, self.transport, about, self.name)

    def look_again(self) -> None:
        """Have the paths be measured again by the next calls; on all ranks between the same calls.

        That may take as long as the first time.
        """
        self.paths.look_again()
        self.measuring_left = BUDGET
        if self.measurements is not None:
            self.measurements.look_again()

    def trace(self, last: int | None = None) -> list[TraceRecord]:
        """Records of the last calls, oldest first; of all that are remembered if `last` is None."""
        return [TraceRecord(*traced) for traced in newest(self.records, last)]

    def slow_ranks(self, calls: int) -> list[tuple[int, float]]:
        """Ranks and the seconds that others waited for them in the last `calls`, slowest first."""
        names = {"sizes", "exchange", "native"} | (set() if self.sizes_first else {"static"})
        last = [r for r in self.trace() if r.collective in TWO_DESIGNS and r.error is None]
        waits = [sum(s for n, s in r.seconds.items() if n in names) for r in last[-calls:]]
        mine = np.zeros(calls, np.float64)
        mine[: len(waits)] = waits
        call = Call(self.rank, "slow_ranks", self.counts["group"], "", self.name)
        with running.noted(call), call.stage("gather"):
            table = self.gather_plain(mine.view(np.uint8)).view(np.float64)
        behind = (table.max(0) - table).sum(1)
        order = np.argsort(-behind, kind="stable")
        return [(int(rank), float(behind[rank])) for rank in order]

    def gather_plain(self, mine: Bytes) -> Bytes:
        """`mine` of all ranks, shape (world_size, mine.size), on the host."""
        return gather_plain(self.transport, mine)

    # Calls.

    def refusal(self, collective: str, sequence: int | None = None) -> CollectiveError | None:
        """The error of a later call, by default the next one; None if there is none."""
        if self.broken is None:
            return None
        number = self.counts["group"] if sequence is None else sequence
        why = f"an earlier call has failed: {self.broken}"
        why = "the communicator is closed" if self._closed else why
        return CollectiveError(self.rank, collective, number, "start", why)

    @contextmanager
    def call(
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
        sequence = self.counts[counter]
        self.counts[counter] += 1
        call = Call(self.rank, collective, sequence, key, self.name)
        dtype = sent or info.dtype
        call.traced = self.traced
        call.kind = key, dtype.name, info.shape, choice.algorithm, algorithm
        call.text = f"{dtype.name} {info.shape} {key if pair is None else collective}"
        refusal = self.refusal(collective, sequence)
        if refusal is not None:
            raise refusal
        call.algorithm, call.reason = "native", choice.reason
        if choice.algorithm != "native":
            self._tell(call, algorithm, dtype, math.prod(info.shape), share)
        error: str | None = None
        running.begin(call)
        try:
            yield call
            # What is raised now is of an earlier call, or this rank's own.
            call.exchanged = True
            self._finish(call)
        except BaseException as caught:
            error = str(caught)
            # Descriptors that have not been read may say that ranks are out of step.
            if not call.exchanged or call.late:
                self.broken = error
            raise
        finally:
            running.end(call)
            self.records.append(call.record(error))

    def _tell(
        self, call: Call, algorithm: str, dtype: DType, nelem: int, share: int | None
    ) -> None:
        """Have the record say how a compressed call is made, and why."""
        spec, name = self.codec.spec, self.codec.name
        coded = nelem if share is None else share
        taken = self.memory.plan(dtype, min(coded, _NAMED)).codec.name
        call.algorithm = f"{algorithm}, {taken}"
        if self.fixed:
            call.algorithm = f"{algorithm}, no sizes, {taken}"
        elif call.collective in TWO_DESIGNS:
            design = "first" if self.sizes_first else "between"
            call.algorithm = f"{algorithm}, sizes {design}, {taken}"
        if not call.reason:
            what = dtype.name if share is None else f"shares of {share} {dtype.name}"
            gains = f"codes {dtype.name}" if taken == name else f"gains nothing on {what}"
            call.reason = f"{name} {gains}"
        if call.collective in SUMS and taken == name and spec.caution:
            call.reason += f"; {spec.caution}"

    # Damage.

    def _finish(self, call: Call) -> None:
        """Have the verdict on this call fetched, and raise for those that have come."""
        words: tensors.PendingHostCopy | None = None
        if call.unchecked:
            found = self.memory.status_words(call.place)
            words = tensors.PendingHostCopy(found, self._spare.pop() if self._spare else None)
            # The next call's verdict is to be its own.
            tensors.fill(found, 0)
        if call.unchecked or call.late:
            self.unchecked.append(_PendingStatus(call, words))
        self.settle_known()

    def check(self) -> None:
        """Raise what decoding on a GPU has found so far. Waits for the device."""
        while self.unchecked:
            self._settle(self.unchecked.popleft())

    def settle_known(self) -> None:
        """Raise for verdicts that have come."""
        while self.unchecked and self.unchecked[0].done():
            self._settle(self.unchecked.popleft())

    def _settle(self, pending: _PendingStatus) -> None:
        call = pending.call
        try:
            with call.stage("sizes"):
                for late in call.late:
                    late.settle(call, self.transport.timeout)
        except CollectiveError as strange:
            # Ranks are out of step, whatever has gone well since.
            self.broken = self.broken or str(strange)
            raise
        if pending.words is None:
            return
        found = pending.words.wait(self.transport.timeout).tolist()
        self._spare.append(pending.words)
        for word, note in call.unchecked.items():
            if found[word]:
                from ...codecs.common.frame_triton import problem

                error = problem(found[word])
                if error is not None:
                    with call.stage("decode", note):
                        raise error

    def close(self) -> None:
        """Free work memory, and close the transport. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        # Also refuses what `call` does not see.
        self.broken = self.broken or "the communicator is closed"
        self.unchecked.clear()
        self._spare.clear()
        self.memory.close()
        if self.measurements is not None:
            self.measurements.finish()
        self.transport.close()


def _accepted(codec: Codec, round_trips: bool) -> Codec:
    if round_trips:
        check_round_trips(codec)
    check_collective(codec)
    return codec
