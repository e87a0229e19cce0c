"""Prepared collectives that add nothing up: all-gather, all-to-all and broadcast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import tensors
from .calls import Call
from .kept_messages import KeptMessage
from .prepared_exchange import (
    Exchanged,
    Given,
    Shares,
    Slot,
    bounds_of,
    equal_bounds,
    lengths,
    need_apart,
    shares_of,
)
from .prepared_work import Again, Body, Prepared, Work
from .recorded import capturing

if TYPE_CHECKING:
    from .prepared import PreparedCalls


class _Gathering(Prepared):
    """What all-gather and all-to-all share."""

    @contextlib.contextmanager
    def _copying(self, call: Call, pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """Copy what is this rank's own into results, while the block queues decoding.

        Decoding out of peers' memory waits for links: copies run at the same time.
        """

        def copy(put: Callable[[Any, Any], None]) -> None:
            for to, x in pairs:
                put(to, x)

        if not pairs or self._calls.route.by_network or call.events is not None:
            copy(tensors.put)
            yield
            return
        put = _resident_copy if tensors.is_cuda(self._like) else tensors.put
        copied = self._calls.queue(self._like, lambda: copy(put), beside=True)
        try:
            yield
        finally:
            copied()


class AllGather(_Gathering):
    """``call(x, out)``: ``out``, shape ``(world_size * n,)``, gets the tensors of all ranks.

    ``x`` may be this rank's share of ``out``.
    """

    collective = "all_gather"

    def __init__(self, calls: PreparedCalls, like: Any) -> None:
        super().__init__(calls, like)
        self._start()

    def _exchanges(self) -> list[Exchanged]:
        shares = [Shares([part.nelem] * self._ranks, part.dtype) for part in self._parts]
        return [Exchanged("gathered", shares)]

    def _prepared_exactly(self, calls: PreparedCalls) -> Any:
        return AllGather(calls, self._alike())

    def __call__(self, x: Any, out: Any, kept: KeptMessage | None = None) -> Work:
        """Make the call.

        Args:
            x: This rank's tensor, contiguous, of ``n`` elements. It stays as it is until the work
                has been waited for.
            out: The result, contiguous, of ``world_size * n`` elements of the same dtype.
            kept: Has the message that is sent, if it is that of ``x``, and otherwise gets it. Other
                ranks need not do the same. Unused for peers, and in a graph. A call with it is not
                recorded.

        Returns:
            The work. ``out`` is right when it has been waited for.

        Raises:
            CollectiveError: If the exchange fails.
            ValueError: If an array is not what was prepared for. Nothing has been sent then.
        """
        again = self._again(lambda: lambda _: self._exactly(x, out), x, out)
        if kept is not None:
            again = again._replace(place=None)
        return self._call(again, lambda: self._body(x, out, kept))

    def _body(self, x: Any, out: Any, kept: KeptMessage | None) -> Body:
        counts = [part.nelem for part in self._parts]
        xs = self._flat(x, counts, "x")
        outs = self._flat(out, [self._ranks * n for n in counts], "out", written=True)
        # Of every rank its share of every result.
        rows = [
            [whole[rank * n : (rank + 1) * n] for whole, n in zip(outs, counts, strict=True)]
            for rank in range(self._ranks)
        ]
        need_apart(outs, xs, rows[self._rank])

        def body(slot: Slot, call: Call) -> None:
            message = None if kept is None else self._kept(slot, kept)
            if kept is None or message is None or not kept.holds(xs):
                given = [Given(v, 0, part) for part, v in enumerate(xs)]
                self._encode(slot, call, 0, given, message)
                if kept is not None and message is not None:
                    kept.note(xs)
            self._exchange(slot, call, 0, message)
            wanted: list[Any] = [share for row in rows for share in row]
            copies: list[tuple[Any, Any]] = []
            if self._calls.codec.lossless:
                first = self._rank * len(xs)
                wanted[first : first + len(xs)] = [None] * len(xs)
                own = zip(rows[self._rank], xs, strict=True)
                copies = [(to, x) for to, x in own if not tensors.same_memory(to, x)]
            with self._copying(call, copies):
                self._decode(slot, call, 0, wanted)
            call.raw_bytes += (self._ranks - 1) * sum(part.nbytes for part in self._parts)

        return body

    def _kept(self, slot: Slot, kept: KeptMessage) -> Any:
        """Memory for this rank's message that outlives the call, or None."""
        exchange = slot.exchanges[0]
        if not exchange.messages.moves or (tensors.is_cuda(self._like) and capturing()):
            return None
        return kept.memory(exchange.layouts[self._rank], self._like)


class AllToAll(_Gathering):
    """``call(x, out)``: share i of ``out`` is share ``rank`` of rank i's ``x``."""

    collective = "all_to_all"

    def __init__(self, calls: PreparedCalls, like: Any) -> None:
        super().__init__(calls, like)
        self._bounds = [equal_bounds(part.nelem, self._ranks) for part in self._parts]
        self._start()

    def _exchanges(self) -> list[Exchanged]:
        rows = zip(self._parts, self._bounds, strict=True)
        return [Exchanged("swapped", [Shares(lengths(b), part.dtype) for part, b in rows])]

    def _prepared_exactly(self, calls: PreparedCalls) -> Any:
        return AllToAll(calls, self._alike())

    def __call__(self, x: Any, out: Any) -> Work:
        """Make the call.

        Args:
            x: Contiguous, of ``world_size * n`` elements. It stays as it is until the work has been
                waited for.
            out: The result, as large; it does not overlap ``x``.

        Returns:
            The work. ``out`` is right when it has been waited for.

        Raises:
            CollectiveError: If the exchange fails.
            ValueError: If an array is not what was prepared for. Nothing has been sent then.
        """
        again = self._again(lambda: lambda _: self._exactly(x, out), x, out)
        return self._call(again, lambda: self._body(x, out))

    def _body(self, x: Any, out: Any) -> Body:
        counts = [part.nelem for part in self._parts]
        xs, outs = self._flat(x, counts, "x"), self._flat(out, counts, "out", written=True)
        need_apart(outs, xs)
        sent = [shares_of(v, bounds) for v, bounds in zip(xs, self._bounds, strict=True)]
        got = [shares_of(v, bounds) for v, bounds in zip(outs, self._bounds, strict=True)]
        ranks, me = range(self._ranks), self._rank

        def body(slot: Slot, call: Call) -> None:
            given = [Given(s[j], j, part) for j in ranks if j != me for part, s in enumerate(sent)]
            self._encode(slot, call, 0, given)
            self._exchange(slot, call, 0)
            with self._copying(call, [(g[me], s[me]) for s, g in zip(sent, got, strict=True)]):
                wanted = [None if i == me else g[i] for i in ranks for g in got]
                self._decode(slot, call, 0, wanted)
            nbytes = sum(part.nbytes for part in self._parts)
            call.raw_bytes += (self._ranks - 1) * nbytes // self._ranks

        return body


class Broadcast(Prepared):
    """``call(x)``: ``x`` of all ranks gets the values of that of one, the root.

    Over a network each rank gets a share from the root, and all gather the shares. With a lossy
    codec ``x`` of the root is overwritten too, with what the others decode.
    """

    collective = "broadcast"

    def __init__(self, calls: PreparedCalls, like: Any, *, root: int) -> None:
        super().__init__(calls, like, f" from rank {root}")
        self._root = root
        self._bounds = [bounds_of(part.nelem, self._ranks) for part in self._parts]
        self._start()

    def _exchanges(self) -> list[Exchanged]:
        rows = zip(self._parts, self._bounds, strict=True)
        shares = [Shares(lengths(bounds), part.dtype) for part, bounds in rows]
        return [Exchanged("spread", shares, self._root)]

    def _prepared_exactly(self, calls: PreparedCalls) -> Any:
        return Broadcast(calls, self._alike(), root=self._root)

    def __call__(self, x: Any) -> Work:
        """Make the call.

        Args:
            x: Contiguous, of as many elements as were prepared for. That of the root stays as it is
                until the work has been waited for.

        Returns:
            The work. ``x`` is right when it has been waited for.

        Raises:
            CollectiveError: If the exchange fails.
            ValueError: If an array is not what was prepared for. Nothing has been sent then.
        """
        # The root decodes what a lossy codec has made of its own.
        written = self._rank != self._root or not self._calls.codec.lossless
        xs = self._flat(x, [part.nelem for part in self._parts], "x", written=written)
        shares = [shares_of(v, bounds) for v, bounds in zip(xs, self._bounds, strict=True)]
        is_root, ranks = self._rank == self._root, range(self._ranks)

        def body(slot: Slot, call: Call) -> None:
            given = [Given(s[i], i, part) for i in ranks for part, s in enumerate(shares)]
            if is_root:
                self._encode(slot, call, 0, given)
            self._exchange(slot, call, 0)
            if not (is_root and self._calls.codec.lossless):
                self._decode(slot, call, 0, [one.x for one in given])
            sends = slot.exchanges[0].sends(self._calls.route.by_network)
            call.raw_bytes += sends * sum(part.nbytes for part in self._parts) // self._ranks

        return self._run(body, Again(lambda: lambda _: self._exactly(x)))


def _resident_copy(to: Any, x: Any) -> None:
    # Triton is there: decoding out of peers' memory needs it.
    from .resident_copy_triton import resident_copy

    resident_copy(to, x)
