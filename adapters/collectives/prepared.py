"""Prepared calls: collectives of one shape, dtype and group, for which everything is ready.

A ``PreparedCalls`` object prepares them. Making one takes time, and all ranks make it together;
calling it then encodes, has the route exchange messages, and decodes. On a GPU that only queues
work: the host waits for nothing, and allocates nothing, except for copies: of terms that ``wire=``
casts, and of those that a sum of learnt size overwrites. What it returns, a ``Work``, tells later
whether all of it was right:

    from tightwire.adapters.collectives.prepared import PreparedCalls
    from tightwire.adapters.transports.torch_dist import TorchDist

    calls = PreparedCalls(TorchDist.new_group())
    gather = calls.all_gather(shard)
    for _ in range(steps):
        work = gather(shard, whole)
        ...                 # queue other work
        work.wait()         # `whole` is right from here on

A CUDA graph can hold calls on peers' memory, and with a lossy codec those over a network: make them
while it captures, and ``check()`` them after replays; such works are not waited for.

Messages over a network have a size that earlier calls taught. Data that do not fit are found when
the work is waited for, and then exchanged again, exactly. Between GPUs of a host that read one
another's memory (``peers``) everything fits.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from ...codec import Codec, as_codec
from ...planning import integer
from ..errors import CollectiveError, described
from ..transports.base import Transport
from ..transports.peer import PeerMemory
from . import running, tensors
from .agreement import agree, gather_apart
from .arguments import check_collective, check_round_trips, peer_of
from .calls import Call, TraceRecord
from .exact_messages import ExactRoute
from .messages import NetworkRoute, PeerRoute, Route
from .prepared_exchange import part_of
from .prepared_gathers import AllGather, AllToAll, Broadcast
from .prepared_sums import AllReduce, OneLaunch, OneShot, ReduceScatter
from .recorded import GraphRecorder, Recorder

_P = TypeVar("_P")
Sizes = Literal["learnt", "exact"]
SIZES: tuple[Sizes, ...] = get_args(Sizes)
#: Bytes of a tensor up to which an all-reduce has every rank send all of it.
ONE_SHOT_NBYTES = 256 << 10


class PreparedCalls:
    """Prepares collectives of a fixed set of ranks.

    All ranks prepare the same calls in the same order, and make them in the same order; they also
    wait for works in the same order. Sums are made in float32 (float64 for float64) in the order of
    ranks, with this rank's own term as it is, and rounded once; all ranks that get a result get the
    same bits. With a lossless codec gathered data arrive bit for bit.

    Calls of an object share memory, in ``depth`` sets. On a GPU each call follows the one before,
    whatever their streams, or with ``side_by_side`` the one before with the same set; replays of
    graphs that hold calls have to be ordered by the caller.

    Args:
        transport: The transport, for these calls alone.
        codec: A codec or its name. Tensors of a dtype that it does not compress are sent raw.
        peers: Memory that the ranks can read from one another, used in place of the transport,
            which then serves for agreement. None: messages go through the transport.
        sizes: How many bytes a message has over a network. ``"learnt"``: as many as earlier ones
            taught, which the host does not wait for; what does not fit is sent again.
            ``"exact"``: as many as it needs. The host waits until it is encoded, one more exchange
            tells sizes, and memory is for any data: for links on which what a learnt size has to
            spare costs more than that. Not with ``peers``, who read no more than they need, and
            not in CUDA graphs. A rank that finds damage makes no later calls; the others, who may
            have got NaN for a sum that it could not add up, get an error by the next one.
        checksum: Whether messages have checksums.
        depth: How many sets of memory there are, at least 2, which calls take one after the other.
            A call waits for the last one of the same prepared collective with the same set.
        side_by_side: On a GPU calls with different sets of memory may run at the same time: while
            the messages of one are exchanged another is coded. Before each call the caller makes a
            stream current that belongs to set ``phase`` alone. Exchanges keep the order of calls.
            Not with ``peers``.
        seed: Seed of codecs that round at random, from 0 to 2^64 - 1.
        trace: Number of works that ``trace()`` remembers. 0 costs nothing.
        name: What ``running_calls`` and errors call them.

    Raises:
        CollectiveError: On all ranks, if they differ in an argument, or prepare different calls.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is not allowed.
    """

    def __init__(
        self,
        transport: Transport,
        codec: str | Codec = "zipccl",
        *,
        peers: PeerMemory | None = None,
        sizes: Sizes = "learnt",
        checksum: bool = True,
        depth: int = 2,
        side_by_side: bool = False,
        seed: int = 0,
        trace: int = 0,
        name: str = "",
    ) -> None:
        if integer("trace", trace) < 0:
            raise ValueError(f"trace is {trace}; allowed: at least 0")
        if integer("depth", depth) < 2:
            raise ValueError(f"depth is {depth}; allowed: at least 2")
        self.codec = as_codec(codec)
        check_round_trips(self.codec)
        check_collective(self.codec)
        self.transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        if peers is not None and (peers.rank, peers.world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"peers is rank {peers.rank} of {peers.world_size}, transport rank {self.rank} of "
                f"{self.world_size}; needed: the same ranks"
            )
        if sizes not in SIZES:
            raise ValueError(f"sizes is {sizes!r}; allowed: {SIZES}")
        if sizes == "exact" and peers is not None:
            raise ValueError("sizes is 'exact', peers is given; allowed with peers: 'learnt'")
        if side_by_side and peers is not None:
            raise ValueError("side_by_side and peers are given; allowed: one of them")
        network = ExactRoute if sizes == "exact" else NetworkRoute
        self.route: Route = network(transport) if peers is None else PeerRoute(peers)
        self.checksum, self.depth, self.seed, self.name = bool(checksum), depth, seed, name
        #: Why this route was taken, for records; set by who has chosen it.
        self.reason = ""
        #: Calls so far, prepared and made.
        self.number = 0
        #: Which memory the next call takes, from 0 to below ``depth``.
        self.phase = 0
        self.side_by_side = side_by_side
        #: On a GPU the streams of the last calls, by `queue_of`.
        self._streams: dict[int, _Stream] = {}
        self._exact: PreparedCalls | None = None
        self._recorder: Recorder | None = None
        #: Of exchanges that run beside what encodes and decodes, on a GPU.
        self._beside: Any = None
        #: What has been prepared, as far as somebody has it.
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()
        self.broken = ""
        self._told = False
        self.records: deque[TraceRecord] = deque(maxlen=trace)
        #: Tells when ranks leave, where the transport knows.
        self.presence: Any = transport.presence()
        facts = f"{self.codec!r}, {self.route.name}, seed {seed}, depth {depth}"
        self.agreed("PreparedCalls", f"{facts}, checksum {self.checksum}")

    def all_gather(self, like: Any) -> AllGather:
        """Prepare an all-gather of tensors like this one.

        Args:
            like: An array: its dtype, number of elements, library and device count. Or a list of
                arrays, of any dtypes and sizes: calls take lists then, and are one exchange.
        """
        return self._prepare("all_gather", lambda: AllGather(self, like))

    def all_to_all(self, like: Any) -> AllToAll:
        """Prepare an all-to-all: equal share j of the tensor goes to rank j.

        Args:
            like: As in ``all_gather``, of ``world_size * n`` elements.
        """
        return self._prepare("all_to_all", lambda: AllToAll(self, like))

    def reduce_scatter(
        self, like: Any, *, dtype: Any = None, wire: Any = None, scale: float | None = None
    ) -> ReduceScatter:
        """Prepare a sum over ranks, of which each gets its share.

        Args:
            like: As in ``all_gather``, of ``world_size * n`` elements.
            dtype: Dtype of the result: None, that of what travels, or float32.
            wire: Dtype in which terms of other ranks travel, of at most the tensor's precision.
                None: that of ``like``.
            scale: A number that sums are multiplied by, such as ``1 / world_size``. None: nothing.

        Raises:
            TypeError: If the dtype is not a float.
            ValueError: If a dtype is not allowed, or there are no equal shares.
        """
        options = {"dtype": dtype, "wire": wire, "scale": scale}
        return self._prepare("reduce_scatter", lambda: ReduceScatter(self, like, **options))

    def all_reduce(
        self,
        like: Any,
        *,
        wire: Any = None,
        scale: float | None = None,
        algorithm: str | None = None,
    ) -> AllReduce | OneLaunch | OneShot:
        """Prepare a sum over ranks, which all of them get.

        Args:
            like: As in ``all_gather``.
            wire: As in ``reduce_scatter``. Two-shot sums are rounded to it, one-shot ones are not.
            scale: As in ``reduce_scatter``.
            algorithm: ``"two-shot"``, ``"one-shot"``, or None: one-shot between two ranks, where
                both send as many bytes, and for at most ``ONE_SHOT_NBYTES`` bytes.

        Raises:
            TypeError: If the dtype is not a float.
            ValueError: For another ``algorithm`` or ``wire``.
        """

        def make() -> AllReduce | OneLaunch | OneShot:
            if algorithm not in (None, "one-shot", "two-shot"):
                allowed = "'one-shot', 'two-shot', None"
                raise ValueError(f"algorithm is {algorithm!r}; allowed: {allowed}")
            likes = like if isinstance(like, (list, tuple)) else [like]
            nbytes = sum(part_of(x).nbytes for x in likes)
            few = nbytes <= ONE_SHOT_NBYTES or self.world_size <= 2
            one_shot = few if algorithm is None else algorithm == "one-shot"
            plan = OneLaunch.plan_of(self, like, wire) if one_shot else None
            if plan is not None:
                return OneLaunch(self, like, plan=plan, scale=scale)
            kind = OneShot if one_shot else AllReduce
            return kind(self, like, wire=wire, scale=scale)

        return self._prepare("all_reduce", make)

    def broadcast(self, like: Any, *, root: int = 0) -> Broadcast:
        """Prepare a broadcast: all ranks get the tensor of one.

        Args:
            like: As in ``all_gather``.
            root: Number of that rank.

        Raises:
            ValueError: If there is no such rank.
        """
        return self._prepare(
            "broadcast",
            lambda: Broadcast(self, like, root=peer_of("root", root, self.world_size)),
        )

    def _prepare(self, collective: str, make: Callable[[], _P]) -> _P:
        """What `make` prepares; what it refuses on one rank is an error on all of them."""
        number = self.number
        try:
            return make()
        except (TypeError, ValueError) as error:
            if self.number == number:
                # The others are about to compare what they prepare.
                self.agreed(f"prepare {collective}", f"refused, {error}")
            raise

    def trace(self) -> list[TraceRecord]:
        """Records of the last works that were waited for, oldest first."""
        return list(self.records)

    def close(self) -> None:
        """Close the transport. Later calls raise CollectiveError, on other ranks, too.

        Close calls over NCCL before ``destroy_process_group``, which waits for what is recorded.
        """
        self.broken = self.broken or "the calls are closed"
        self.forget()
        if self.presence is not None:
            self.presence.leave()
        self.transport.close()

    def forget(self) -> None:
        """Drop what has been recorded of calls."""
        for prepared in list(self.made):
            prepared.forget()

    def recorder(self, like: Any) -> Recorder | None:
        """What records calls on the device of an array; None where they are queued anew each time.

        All of a call is recorded as one where a graph can hold what the transport does, except
        exchanges of calls that run at the same time: see ``queue``.

        Args:
            like: The array.
        """
        if not tensors.is_cuda(like) or self.records.maxlen or self.codec.spec.draws:
            return None
        if self.route.reads_sizes:
            return None
        if self._recorder is None:
            alone = not self.side_by_side
            whole = not self.route.learns or (alone and self.transport.capturable)
            self._recorder = GraphRecorder(like.device, whole=whole)
        return self._recorder

    def queue(self, like: Any, work: Callable[[], None], beside: bool) -> Callable[[], None]:
        """Queue work of the network, perhaps beside what is queued next.

        Of calls that run at the same time all of it goes to one stream: there exchanges follow one
        another, with no gap in which what else is computed takes their processors.

        Args:
            like: An array of the device.
            work: Queues it, behind what is queued already.
            beside: Whether what is queued next need not follow it. On the host it does.

        Returns:
            What has the current stream wait for the work.
        """
        if not tensors.is_cuda(like):
            work()
            return _nothing
        queue = _run if self._recorder is None else self._recorder.queue
        if not (beside or self.side_by_side):
            queue(work)
            return _nothing
        import torch

        from .side_stream import FIRST

        if self._beside is None:
            self._beside = torch.cuda.Stream(like.device, FIRST)
        side, done = self._beside, torch.cuda.Event()

        def run() -> None:
            side.wait_stream(torch.cuda.current_stream(like.device))
            with torch.cuda.stream(side):
                work()
                done.record(side)

        def wait() -> None:
            torch.cuda.current_stream(like.device).wait_event(done)

        def run_and_wait() -> None:
            run()
            wait()

        queue(run if beside else run_and_wait)
        return (lambda: queue(wait)) if beside else _nothing

    def join(self, like: Any) -> None:
        """Have the current stream wait for what runs at the same time, after an error.

        Args:
            like: An array of the device.
        """
        if self._beside is not None:
            import torch

            # A stream that takes no part in what is captured cannot be waited for there.
            with contextlib.suppress(RuntimeError):
                torch.cuda.current_stream(like.device).wait_stream(self._beside)

    def ordered(self, phase: int) -> AbstractContextManager[Any]:
        """Have what is queued inside follow all calls that were made with some memory.

        Args:
            phase: Which memory.
        """
        if self.queue_of(phase) not in self._streams:
            return contextlib.nullcontext()
        import torch

        found: AbstractContextManager[Any] = torch.cuda.stream(self.stream_of(phase))
        return found

    def exact(self) -> PreparedCalls:
        """Calls of the same ranks whose messages are not compressed.

        They are made in between, on any stream, and so have memory of their own.
        """
        if self._exact is None:
            self._exact = object.__new__(PreparedCalls)
            own: dict[str, Any] = {"codec": as_codec("raw"), "route": NetworkRoute(self.transport)}
            own |= {"_streams": {}, "side_by_side": False, "_exact": None}
            own |= {"_recorder": None, "_beside": None}
            # Each is waited for at once.
            own |= {"depth": 1, "phase": 0}
            self._exact.__dict__.update(self.__dict__ | own)
        return self._exact

    def restart(self) -> None:
        """Have calls take memory in the same order again; on all ranks between the same calls.

        Calls that are repeated step by step then find what has been recorded of them. With a depth
        of 2 it changes nothing, as two calls one after the other never share memory.
        """
        last = (self.phase - 1) % self.depth
        self.phase = int(last == 0)

    def queue_of(self, phase: int) -> int:
        """Calls with the same number follow one another; others may overlap.

        Args:
            phase: Which memory they take.
        """
        return phase if self.side_by_side else 0

    def follow(self, like: Any, phase: int) -> None:
        """Have what is queued now follow earlier calls, which have used the same memory.

        Args:
            like: An array on the GPU.
            phase: Which memory.
        """
        import torch

        key = like.get_device(), torch._C._cuda_getCurrentRawStream(like.get_device())
        before = self._streams.get(self.queue_of(phase))
        if before is not None and before.key == key:
            return
        now = _Stream(key, torch.cuda.current_stream(like.device))
        self._streams[self.queue_of(phase)] = now
        if before is not None:
            now.stream.wait_stream(before.stream)

    def stream_of(self, phase: int) -> Any:
        """The stream of the last call with some memory, on a GPU.

        Args:
            phase: Which memory.
        """
        return self._streams[self.queue_of(phase)].stream

    def agreed(self, what: str, facts: str) -> None:
        """Raise CollectiveError, on all ranks, if they prepare something else."""
        call = Call(self.rank, what, self.number, "", self.name)
        self.number += 1
        with running.noted(call), call.stage("agree"):
            agree(call, functools.partial(gather_apart, self.transport), facts)

    def fail(self, error: BaseException) -> None:
        """Refuse later calls, and have those of other ranks fail: the ranks are out of step."""
        # Damage may have ended calls before, of which the others know nothing yet.
        self.broken = self.broken or described(error)
        self.give_up()

    def give_up(self) -> None:
        """Tell the other ranks once, if calls are refused here, and have theirs fail."""
        if self.broken and not self._told:
            self._told = True
            self.transport.abort(self.broken)

    def refusal(self, collective: str) -> CollectiveError | None:
        """The error of a call, if an earlier one has failed."""
        if not self.broken:
            return None
        why = f"an earlier call has failed: {self.broken}"
        return CollectiveError(self.rank, collective, self.number, "start", why)

    def begin(self, collective: str, text: str) -> Call:
        """Number a call, and refuse it if an earlier one has failed."""
        refusal = self.refusal(collective)
        if refusal is not None:
            # The others make it.
            self.give_up()
            raise refusal
        call = Call(self.rank, collective, self.number, "", self.name)
        self.number += 1
        self.phase = (self.phase + 1) % self.depth
        call.text, call.algorithm = text, f"{self.codec.name}, {self.route.name}"
        call.reason, call.traced = self.reason, bool(self.records.maxlen)
        return call


class _Stream(NamedTuple):
    """A stream of PyTorch.

    Attributes:
        key: The device, and CUDA's number of the stream.
        stream: PyTorch's object.
    """

    key: tuple[int, int]
    stream: Any


def _nothing() -> None:
    """Wait for what is done already."""


def _run(work: Callable[[], None]) -> None:
    work()
