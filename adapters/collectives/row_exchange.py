"""Rows that go where a router has sent them: all ranks tell how many, then exactly those travel.

The numbers are made on the device, and the host reads them once, together with those of the other
ranks. Whoever sends the rows back, or their gradients, knows them already: messages are as long as
they have to be, see ``row_messages``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import ArrayInfo
from ...formats.dtypes import BY_NAME
from ..transports.peer import PeerMemory
from . import running, tensors
from .agreement import agree
from .all_to_all_v import checksum_keys
from .calls import Call
from .chunk_views import split
from .communicator import ALONE, Communicator
from .cost import Choice
from .native import Native, sent_plain
from .row_messages import RowMessages
from .row_peers import PeerMessages
from .steps import Steps

_INT64 = BY_NAME["int64"]
NAME = "row_counts"
#: In place of bits of a fault.
ANOTHER_CALL = -1
#: What goes as it is, whatever the codec.
_COUNTS = Choice("native", 1, 0.0, 0.0, "counts of rows")
_PLAIN = Choice("native", 1, 0.0, 0.0, "rows that go as they are")


class Counts(NamedTuple):
    """The rows of an exchange.

    Attributes:
        sent: Rows for each bin of each rank: int64, shape ``(ranks, bins of a rank)``.
        table: Rows from each rank for each bin of this one: int64, shape ``(ranks, bins)``.
        on_device: The same on the device of the rows.
        faults: Bits of what is wrong on each rank; ``ANOTHER_CALL`` if what it tells is of another
            call.
    """

    sent: npt.NDArray[np.int64]
    table: npt.NDArray[np.int64]
    on_device: Any
    faults: list[int]


class Routed(NamedTuple):
    """The rows of an exchange of which all ranks know all numbers.

    Attributes:
        pairs: Rows from each rank to each: int64, shape ``(ranks, ranks)``.
        table: Rows from each rank for each bin of this one: int64, shape ``(ranks, bins)``.
    """

    pairs: npt.NDArray[np.int64]
    table: npt.NDArray[np.int64]


class RowExchange:
    """Exchanges of rows between ranks, each of which has as many bins that rows go to.

    All ranks make it together.

    Args:
        comm: The communicator, whose calls these are.
        bins: Bins of all ranks, a multiple of their number: rank 0 has the first ones.
        faults: What the bits of a fault mean, from the lowest one on. ``routed`` needs it.
        peers: Memory that the ranks can read from one another, where what is encoded is read. None:
            it goes through the transport.

    Raises:
        CollectiveError: On every rank, if the number of bins differs; by calls, if anything goes
            wrong on the wire.
    """

    def __init__(
        self,
        comm: Communicator,
        bins: int,
        faults: Sequence[str] | None,
        peers: PeerMemory | None = None,
    ) -> None:
        self._comm = comm
        self._session = comm.session
        self._transport = comm.transport
        self._size = comm.world_size
        self._steps = Steps(self._session)
        self._messages = RowMessages(self._steps)
        self._peers = None if peers is None else PeerMessages(self._steps, peers)
        self._native = Native(self._steps)
        self._each = bins // self._size
        self._faults = faults
        #: Behind a seal and what is wrong there are the counts.
        self._words = 2 + self._each
        self._keys = checksum_keys(self._words - 1)
        self._keys_on: dict[Any, Any] = {}
        self._told_in: dict[Any, tuple[Any, Any]] = {}
        self._arriving: tensors.PendingHostCopy | None = None
        where = "" if peers is None else ", out of peers' memory"
        call = Call(comm.rank, "RowExchange", 0, "", comm.name)
        with running.noted(call), call.stage("agree"):
            agree(call, self._session.gather_plain, f"{bins} bins of rows{where}")

    def counts(self, info: ArrayInfo, counts: Any, fault: Any) -> Counts:
        """Tell every rank how many rows it will get; the host waits for their numbers.

        Args:
            info: What the rows are. Only their number, the first dimension, may differ by rank.
            counts: Rows for each bin of all ranks: int64, shape ``(bins,)``, on their device.
            fault: Bits of what is wrong on this rank, 0 if nothing: int64, shape ``(1,)``.

        Returns:
            Those numbers, and the faults that ranks have told of, which nothing is raised for.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
        """
        n, row = self._size, info._replace(shape=info.shape[1:])
        with self._session.call(NAME, "all-to-all", row, _COUNTS) as call:
            both = tensors.empty((2, n, self._words), _INT64, counts)
            mine, theirs = both
            digest = call.digest(row, row.shape)
            mine[:, 1] = fault
            mine[:, 2:] = counts.reshape(n, -1)
            with np.errstate(over="ignore"):
                mine[:, 0] = (mine[:, 1:] * self._keys_for(counts)).sum(1) + digest
            with call.stage("counts"):
                self._transport.all_to_all(tensors.as_bytes(theirs), tensors.as_bytes(mine))
                arriving = tensors.PendingHostCopy(both)
                # It lies in memory that may be used again.
                sent, told = np.array(arriving.wait(self._transport.timeout))
            sent_plain(call, 8 * self._words * (n - 1))
            with np.errstate(over="ignore"):
                strange = (told[:, 1:] * self._keys).sum(1) + digest != told[:, 0]
            faults = np.where(strange, ANOTHER_CALL, told[:, 1]).tolist()
        table = told[:, 2:]
        return Counts(sent[:, 2:], table, theirs[:, 2:], faults)

    def routed(
        self,
        info: ArrayInfo,
        mine: Any,
        bad: Callable[[npt.NDArray[np.int64]], list[int]],
        meanwhile: Callable[[], None],
    ) -> Routed:
        """Tell every rank how many rows all will get; the host waits for their numbers.

        Args:
            info: As in ``counts``.
            mine: int64, shape ``(2, words)``, on the device of the rows, of which this fills the
                second row. In the first, ``mine[0, b]`` rows are for bins before ``b``, for ``b``
                from 0 to the number of all ranks' bins; other words follow.
            bad: Gives bits of a fault by rank for the words of all, shape ``(ranks, words)``.
            meanwhile: Called when the words are in flight.

        Raises:
            CollectiveError: On every rank, if one has told of a fault: it is named, and the next
                call is fine. Also if ranks exchange other rows.
        """
        import torch

        n, row = self._size, info._replace(shape=info.shape[1:])
        with self._session.call(NAME, "all-to-all", row, _COUNTS) as call:
            # The words, and the same with the digest, by which damage and other calls are known.
            digest = call.digest(row, row.shape)
            torch.bitwise_xor(mine[0], digest, out=mine[1])
            theirs, received = self._memory_for(mine)
            with call.stage("counts"):
                self._transport.all_gather(received, tensors.as_bytes(mine))
                self._arriving = tensors.PendingHostCopy(theirs, self._arriving)
                meanwhile()
                told = self._arriving.wait(self._transport.timeout)
            sent_plain(call, 8 * mine.numel() * (n - 1))
            words = told[:, 0]
            strange, faults = told[:, 1] ^ words != digest, bad(words)
            if strange.any() or any(faults):
                found = np.where(strange.any(1), ANOTHER_CALL, faults).tolist()
                self._judge(call, row, found)
            call.exchanged = True
        # In memory of their own: that of the words is used again.
        each, first = self._each, self._comm.rank * self._each
        by_rank, mine = words[:, : n * each + 1 : each], words[:, first : first + each + 1]
        return Routed(by_rank[:, 1:] - by_rank[:, :-1], mine[:, 1:] - mine[:, :-1])

    @tensors.kept
    def _memory_for(self, mine: Any) -> tuple[Any, Any]:
        """Memory for words such as `mine` of all ranks, and its bytes."""
        key = tensors.device_of(mine), mine.shape
        if key not in self._told_in:
            memory = mine.new_empty((self._size, *mine.shape))
            self._told_in[key] = memory, tensors.as_bytes(memory)
        return self._told_in[key]

    def _judge(self, call: Call, row: ArrayInfo, faults: list[int]) -> None:
        """Raise what ranks have told of."""
        assert self._faults is not None
        found = dict(enumerate(faults))
        if ANOTHER_CALL in faults:
            raise call.failure("counts", other_calls(found, self._comm.name, row))
        # All ranks know of it, and are in step.
        call.exchanged = True
        raise call.failure("counts", faults_told(found, self._comm.name, self._faults))

    @property
    def own_apart(self) -> bool:
        """Whether calls leave a rank's own rows out of what the network moves, unless `plain`."""
        return self._size > 1 and self._session.paths.codes

    def move(
        self,
        x: Any,
        out: Any,
        sends: Sequence[int],
        receives: Sequence[int],
        *,
        plain: bool = False,
        purpose: str = "",
        meanwhile: Callable[[], None] | None = None,
        own: Callable[[], None] | None = None,
        stream: Any = None,
        pairs: Any = None,
    ) -> None:
        """Send rows to ranks and receive theirs, as many as ranks have told each other.

        A rank's own rows are not encoded. With a dynamic part the host waits for what others need
        when all is in flight.

        Args:
            x: Those for rank 0 first: shape ``(sum(sends), ...)``.
            out: Contiguous; those from rank 0 first: shape ``(sum(receives), ...)``.
            sends: Rows for each rank.
            receives: Rows from each rank.
            plain: Rows go as they are, whatever the codec.
            purpose: What calls have in common whose data are alike.
            meanwhile: Called when rows are in flight.
            own: Called then in place of a copy of this rank's own rows, if they are `own_apart`.
            stream: Where on a GPU runs what does not wait for the network: that which has made
                ``x``. None: the current one.
            pairs: Rows from each rank to each, shape ``(ranks, ranks)``, where there is peers'
                memory.

        Raises:
            CollectiveError: If anything goes wrong on the wire.
        """
        paths, rank = self._session.paths, self._comm.rank
        besides = _nothing if meanwhile is None else meanwhile
        if paths.chooses and self._size > 1 and not plain:
            # Ranks choose by what they tell each other when they compare splits.
            self._comm.all_to_all(x, out, send_splits=sends, receive_splits=receives)
            tensors.put(split(out, receives)[rank], split(x, sends)[rank])
            besides()
            return
        x, info, _ = tensors.as_input(x)
        width = math.prod(info.shape[1:])
        if self._size == 1:
            choice = ALONE
        else:
            choice = _PLAIN if plain else paths.choose_splits(x, info, _never, _never)
        share = max(sends) * width
        with self._session.call("all_to_all", "all-to-all", info, choice, share=share) as call:
            flat, result = tensors.contiguous(x).reshape(-1), out.reshape(-1)
            leaving, coming = [k * width for k in sends], [k * width for k in receives]
            if choice.algorithm == "native":
                self._compare(call, flat, info)
                self._native.all_to_all(call, flat, result, leaving, coming, False)
                besides()
                return
            parts, outs = split(flat, leaving), split(result, coming)
            mine, to = parts[rank], outs[rank]
            parts[rank], outs[rank] = mine[:0], to[:0]

            def at_once() -> None:
                with tensors.on_stream(stream):
                    if own is None:
                        tensors.put(to, mine)
                    else:
                        own()
                    besides()

            if self._peers is not None:
                sizes = (np.asarray(pairs) * width).tolist()
                self._peers.exchange(call, parts, outs, info, sizes, at_once)
            else:
                if self._session.fixed:
                    self._compare(call, flat, info)
                self._messages.exchange(call, parts, outs, info, purpose, at_once, stream)

    def _compare(self, call: Call, x: Any, info: ArrayInfo) -> None:
        """On the host, have ranks compare what they make before rows move; a GPU is not waited for.

        Gloo ends a process that gets more bytes than it expects.
        """
        if self._size > 1 and not tensors.is_cuda(x):
            digests = [call.digest(info, info.shape[1:])] * self._size
            self._steps.comparisons.compare(call, x, digests, digests)

    def _keys_for(self, like: Any) -> Any:
        """Factors of the checksum, on the device of `like`."""
        device = tensors.device_of(like)
        if device not in self._keys_on:
            self._keys_on[device] = tensors.on_device(self._keys, device)
        return self._keys_on[device]


def other_calls(faults: Mapping[int, int], name: str, row: ArrayInfo) -> str:
    """Which ranks of a group `name` are not known to make this call, of such rows."""
    ranks = sorted(rank for rank, fault in faults.items() if fault == ANOTHER_CALL)
    what = "make another call, or one with other rows, or their data were damaged"
    here = f"{row.dtype.name}, rows of shape {list(row.shape)}"
    return f"ranks {ranks}{_of(name)} {what}; here: {here}"


def faults_told(faults: Mapping[int, int], name: str, meanings: Sequence[str]) -> str:
    """What ranks of a group `name` have told of."""
    found = [
        f"rank {rank}{_of(name)}: {what}"
        for rank, word in sorted(faults.items())
        for bit, what in enumerate(meanings)
        if word >> bit & 1
    ]
    return "; ".join(found)


def _of(name: str) -> str:
    return f" of {name!r}" if name else ""


def _nothing() -> None:
    pass


def _never(*_: Any) -> Any:
    raise AssertionError("nothing is measured for a path that is given")
