"""Times the paths of a collective and of messages, for ``algorithm="auto"``."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ... import arrays
from ...arrays import ArrayInfo
from ...formats.dtypes import BY_NAME, DType
from . import tensors
from .agreement import opened, with_checksum
from .calls import Call, TraceRecord
from .cost import Choice
from .path_selection import UNEQUAL, Measured, place_of
from .session import Session
from .steps import Steps

if TYPE_CHECKING:
    from .communicator import Communicator
    from .point_to_point import PointToPoint

#: Bytes of a rank's input that the paths are timed with, and how often.
_MEASURED_GPU = (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
_MEASURED_HOST = (1 << 13, 1 << 17, 1 << 21)
#: The same of messages.
_MESSAGES_GPU = (1 << 20, 1 << 23, 1 << 26)
_MESSAGES_HOST = (1 << 20, 1 << 22)
#: At most so many bytes of all ranks in one place.
_MOST_GPU, _MOST_HOST = 1 << 30, 1 << 24
_TIMED = 4
_PIECES = 4
_PATHS = (
    Choice("native", 1, 0.0, 0.0, "measured"),
    Choice("compressed", 1, 0.0, 0.0, "measured"),
    Choice("pipelined", _PIECES, 0.0, 0.0, "measured"),
)
#: A message that says that another one has arrived.
_ACKNOWLEDGEMENT = 8


def measure(
    comm: Communicator,
    steps: Steps,
    collective: str,
    like: Any,
    info: ArrayInfo,
    source: DType | None,
    topology: str,
) -> Measured:
    """Time the paths of a collective of `comm`; every rank gets the same numbers.

    `like` is an array of their library and device, of which `info` travels; `source` is its dtype
    if that is another, `topology` that of a sum, else "". The collective `UNEQUAL` is an all-to-all
    whose parts differ, and differ from call to call.
    """
    session = steps.session
    what = [info.dtype.name] if source is None else [source.name, info.dtype.name]
    key = " ".join([collective, topology, *what, place_of(like)])
    kept = _kept(session, key)
    if kept is not None:
        return kept
    call = _call(session, collective, info)
    named = {"topology": topology} if topology else {}
    if source is not None and source != info.dtype:
        named["wire"] = info.dtype.name
    if collective == UNEQUAL:
        run = _unequal(comm)
    else:
        run = functools.partial(getattr(comm, collective), **named)
    with _apart(session), call.stage("measure"):
        # Ranks with other tensors would take other paths.
        digests = [call.digest(info, info.shape)] * session.size
        steps.comparisons.compare(call, like, digests, digests, "measure")
        found = _timed(run, steps, call, like, info, source or info.dtype)
    _keep(session, key, found)
    return found


def tell_sizes(steps: Steps, x: Any, info: ArrayInfo) -> None:
    """Have all ranks know how large their inputs `x` of an unequal all-to-all are."""
    session = steps.session
    row = info._replace(shape=info.shape[1:])
    call = _call(session, "all_to_all", row)
    call.splits = info.dtype, math.prod(info.shape) * info.dtype.itemsize
    with _apart(session), call.stage("measure"):
        digests = [call.digest(row, row.shape)] * session.size
        steps.comparisons.compare(call, x, digests, digests, "measure")


def measure_messages(
    messages: PointToPoint, session: Session, like: Any, info: ArrayInfo, peer: int, *, sends: bool
) -> Measured:
    """Time messages from this rank to `peer` if it `sends`, else from `peer` to this one.

    Both ranks call it, and get the same numbers: those of the sender, which waits until each
    message has arrived.
    """
    sender = session.rank if sends else peer
    receiver = peer if sends else session.rank
    key = f"message to {receiver} {info.dtype.name} {place_of(like)}"
    kept = _kept(session, key, sender)
    if kept is not None:
        return kept
    call = _call(session, "send" if sends else "recv", info)
    cuda = tensors.is_cuda(like)
    sizes = _MESSAGES_GPU if cuda else _MESSAGES_HOST
    rows: list[list[float]] = []
    with _apart(session), call.stage("measure"):
        more = True
        while more:
            start = time.perf_counter()
            n = sizes[len(rows)] // info.dtype.itemsize
            x = tensors.random_normal(n, info.dtype, like)
            what = arrays.describe(x)
            move = functools.partial(messages.send if sends else messages.receive, x, what, peer)
            row = []
            for choice in _PATHS[:2]:
                with session.paths.forced(choice):
                    row.append(_time_message(session, move, x, peer, sends))
            record = TraceRecord(*session.records[-1])
            spent = time.perf_counter() - start
            # Only the sender's counts: the other rank follows.
            messages.measuring_left -= spent
            more = _goes_on(sizes, len(rows) + 1, spent, messages.measuring_left)
            said = np.array([*row, record.wire_bytes / record.raw_bytes, more], np.float64)
            *row, ratio, again = _told(session, said, peer, sends).tolist()
            rows.append(row)
            more = bool(again)
    found = Measured(sizes[: len(rows)], rows, 0, ratio)
    _keep(session, key, found, sender)
    return found


def _kept(session: Session, key: str, owner: int = 0) -> Measured | None:
    """What an earlier program, or a communicator before, has measured, if it is kept."""
    found = None if session.measurements is None else session.measurements.get(key, owner)
    return None if found is None else Measured(tuple(found[0]), *found[1:])


def _keep(session: Session, key: str, found: Measured, owner: int = 0) -> None:
    if session.measurements is not None:
        session.measurements.put(key, list(found), owner)


def _unequal(comm: Communicator) -> Callable[..., Any]:
    """All-to-alls of parts that are up to three times as long as others, other ones each time.

    Each rank sends and receives as many elements as it would in equal parts.
    """
    calls = itertools.count()

    def run(x: Any, out: Any = None) -> Any:
        number = next(calls)
        rows = [uneven(x.shape[0], comm.world_size, r, number) for r in range(comm.world_size)]
        receives = [row[comm.rank] for row in rows]
        return comm.all_to_all(x, out, send_splits=rows[comm.rank], receive_splits=receives)

    return run


def uneven(nelem: int, ranks: int, rank: int, number: int) -> list[int]:
    """How many of `nelem` elements, a multiple of `ranks`, a rank sends to each in a timed call.

    Other ranks send as many to it in all. Calls of another `number` have other parts, as those of a
    program have: what is planned for one is of no use to the next.
    """
    each = nelem // ranks
    more = max(each // 2 - number, 0)
    counts = [each] * ranks
    for peer in range(0, ranks - 1, 2):
        counts[(rank + peer) % ranks] += more
        counts[(rank + peer + 1) % ranks] -= more
    return counts


def _call(session: Session, collective: str, info: ArrayInfo) -> Call:
    call = Call(session.rank, collective, session.counts["group"], "", session.name)
    call.text = f"{info.dtype.name} {info.shape} {collective}"
    return call


@contextmanager
def _apart(session: Session) -> Iterator[None]:
    """Calls that measure: no records, and no trace in what calls learn; their memory is freed."""
    records, session.records = session.records, deque(maxlen=1)
    scaling, session.scaling = session.scaling, copy.copy(session.scaling)
    try:
        yield
    except BaseException as error:
        session.broken = session.broken or str(error)
        raise
    finally:
        session.records, session.scaling = records, scaling
        # What the largest sizes took is worth more than the time to get it again.
        session.memory.clear()


def _timed(
    run: Callable[..., Any], steps: Steps, call: Call, like: Any, info: ArrayInfo, source: DType
) -> Measured:
    session, collective = steps.session, call.collective
    cuda = tensors.is_cuda(like)
    sizes: tuple[int, ...] = _MEASURED_GPU if cuda else _MEASURED_HOST
    most = _MOST_GPU if cuda else _MOST_HOST
    gathered = session.size if collective == "all_gather" else 1
    sizes = tuple(n for n in sizes if n * gathered <= most) or sizes[:2]
    # Parts of unequal sizes are not cut into pieces.
    paths = _PATHS[:2] if collective == UNEQUAL else _PATHS
    rows: list[list[float]] = []
    for nbytes in sizes:
        start = time.perf_counter()
        n = nbytes // info.dtype.itemsize // session.size * session.size
        bits = tensors.random_normal(n, source, like)
        row = []
        for choice in paths:
            with session.paths.forced(choice):
                row.append(_time(run, steps, bits, collective != "broadcast"))
            if choice.algorithm == "compressed":
                record = TraceRecord(*session.records[-1])
        rows.append(row)
        spent = _most(session, time.perf_counter() - start)
        session.measuring_left -= spent
        if not _goes_on(sizes, len(rows), spent, session.measuring_left):
            break
    ratio = record.wire_bytes / record.raw_bytes if record.raw_bytes else 1.0
    found = session.transport.empty(8 * (len(paths) * len(rows) + 1))
    table = np.array([*np.ravel(rows), ratio])
    found[:] = tensors.on_device(table.view(np.uint8), tensors.device_of(found))
    values = tensors.view(found, BY_NAME["float64"])
    session.transport.all_reduce(values, "max")
    agreed = arrays.host_array(values)
    digests = [call.digest_of(agreed.tobytes(), info)] * session.size
    steps.comparisons.compare(call, like, digests, digests, "measure", "have other measurements")
    times = agreed[:-1].reshape(-1, len(paths)).tolist()
    return Measured(sizes[: len(rows)], times, _PIECES, float(agreed[-1]))


def _goes_on(sizes: Sequence[int], done: int, spent: float, left: float) -> bool:
    """Whether one more size is timed, where the last of `done` ones took `spent` seconds."""
    if done < 2 or done == len(sizes):
        return done < 2
    return spent * sizes[done] / sizes[done - 1] < left


def _most(session: Session, seconds: float) -> float:
    """The most seconds of any rank."""
    mine = np.array([seconds], np.float64)
    return float(session.gather_plain(mine.view(np.uint8)).view(np.float64).max())


def _time(run: Callable[..., Any], steps: Steps, x: Any, takes_out: bool) -> float:
    """Seconds of one call, the median of some: what a call takes, not what it can take."""
    out = None
    samples = []
    for _ in range(_TIMED + 1):
        tensors.synchronize(x)
        steps.session.transport.barrier()
        start = time.perf_counter()
        out = run(x, out) if takes_out else run(x)
        tensors.synchronize(x)
        samples.append(time.perf_counter() - start)
    # The first one compiles and allocates.
    return statistics.median(samples[1:])


def _time_message(
    session: Session, move: Callable[[], None], x: Any, peer: int, sends: bool
) -> float:
    """Seconds of a message and its acknowledgement, the median of some."""
    transport, samples = session.transport, []
    word = transport.empty(_ACKNOWLEDGEMENT)
    word[:] = 0
    for _ in range(_TIMED + 1):
        tensors.synchronize(x)
        start = time.perf_counter()
        move()
        if sends:
            transport.recv(word, peer)
        else:
            tensors.synchronize(x)
            transport.send(word, peer)
        tensors.synchronize(x)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def _told(
    session: Session, said: npt.NDArray[np.float64], peer: int, sends: bool
) -> npt.NDArray[np.float64]:
    """What the sender of messages says, on both ranks, which say as many numbers."""
    data = with_checksum(said.view(np.uint8))
    x = session.transport.empty(data.size)
    if sends:
        x[:] = tensors.on_device(data, tensors.device_of(x))
        session.transport.send(x, peer)
        return said
    session.transport.recv(x, peer)
    received: npt.NDArray[np.uint8] = opened(arrays.host_array(x).reshape(1, -1), [peer])[0]
    return received.view(np.float64)
