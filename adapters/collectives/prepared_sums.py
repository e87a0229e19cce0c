"""Prepared sums over ranks: reduce-scatter, and all-reduce, one-shot or two-shot."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ... import arrays
from ...codecs.common.base import Plan
from ...formats.dtypes import BY_NAME, DType
from . import tensors
from .calls import Call
from .kernel_order import KERNEL_ORDER
from .prepared_exchange import (
    INT64,
    Bounds,
    Exchanged,
    Given,
    NoMessages,
    Part,
    Shares,
    Slot,
    bounds_of,
    equal_bounds,
    lengths,
    need_apart,
    part_of,
    shares_of,
)
from .prepared_work import Body, Prepared, Work
from .recorded import capturing

if TYPE_CHECKING:
    from .prepared import PreparedCalls

_FLOAT32 = BY_NAME["float32"]
#: All-reduces over a network that run alone are made in pieces of so many bytes or more, at most so
#: many. While messages of one are exchanged another's are coded.
PIECE_NBYTES, MOST_PIECES = 32 << 20, 4


class _Sums(Prepared):
    """What prepared sums share: what travels, and what sums are multiplied by."""

    #: What is summed beside the rest.
    _pieces: Sequence[Any] = ()

    def __init__(
        self, calls: PreparedCalls, like: Any, facts: str, wire: Any, scale: float | None
    ) -> None:
        likes = list(like) if isinstance(like, (list, tuple)) else [like]
        self._wires = [_wire_of(part_of(x), wire) for x in likes]
        self._scale = scale
        names = dict.fromkeys(dtype.name for dtype in self._wires)
        travels = "" if wire is None else f", {' and '.join(names)} travels"
        super().__init__(calls, like, f"{facts}{travels}, times {scale}")

    @property
    def _wire(self) -> str | None:
        """The dtype that was asked for, of which some parts may be already."""
        pairs = zip(self._wires, self._parts, strict=True)
        return next((wire.name for wire, part in pairs if wire != part.dtype), None)

    @property
    def _dtypes(self) -> list[DType | None]:
        """Of results that are wider than what travels."""
        pairs = zip(self._wires, self._parts, strict=True)
        return [part.dtype if wire != part.dtype else None for wire, part in pairs]

    def _body(self, x: Any, out: Any) -> Body:
        """What a call queues, of arrays that have been looked at."""
        raise NotImplementedError

    def _summed(self, x: Any, out: Any) -> Work:
        """Make a call whose result may lie over its terms."""
        again = self._again(lambda: self._terms_as_they_are(x, out), x, out)
        return self._call(again, lambda: self._body(x, out))

    def _terms_as_they_are(self, x: Any, out: Any) -> Callable[[bool], None]:
        """What makes a sum once more, also where it overwrites its terms."""
        terms = x
        if self._learns:
            lists = (list(v) if self._listed else [v] for v in (x, out))
            kept = _kept(*([tensors.as_input(v)[0] for v in values] for values in lists))
            terms = kept if self._listed else kept[0]
        return lambda _: self._exactly(terms, out)

    def _sent(self, part: int, values: Any) -> Any:
        """`values` of a part as they travel."""
        return tensors.cast(values, self._wires[part])

    @property
    def _beside(self) -> bool:
        """Whether exchanges run while other pieces are coded."""
        return len(self._pieces) > 1

    def _cut(self) -> list[tuple[Bounds, ...]]:
        """By piece, where the pieces of the parts begin and end."""
        count = 1
        # Side by side the network is busy with other calls, and moves large messages faster.
        if self._calls.route.by_network and not self._calls.side_by_side:
            nbytes = sum(part.nbytes for part in self._parts)
            count = max(1, min(nbytes // PIECE_NBYTES, MOST_PIECES))
        return list(zip(*(bounds_of(part.nelem, count) for part in self._parts), strict=True))


class ReduceScatter(_Sums):
    """``call(x, out)``: ``out`` gets this rank's share of the sum of all ranks' ``x``."""

    collective = "reduce_scatter"

    def __init__(
        self, calls: PreparedCalls, like: Any, *, dtype: Any, wire: Any, scale: float | None
    ) -> None:
        self._dtype = None if dtype is None else arrays.as_dtype(dtype)
        facts = "" if self._dtype is None else f", {self._dtype.name} sums"
        super().__init__(calls, like, facts, wire, scale)
        #: Dtypes of the results.
        self._sum_dtypes = [self._dtype or wire for wire in self._wires]
        for wire_dtype, sum_dtype in zip(self._wires, self._sum_dtypes, strict=True):
            if sum_dtype not in (wire_dtype, _FLOAT32):
                raise ValueError(
                    f"dtype is {sum_dtype.name}; allowed: {wire_dtype.name}, float32, None"
                )
        self._bounds = [equal_bounds(part.nelem, self._ranks) for part in self._parts]
        self._start()

    def _exchanges(self) -> list[Exchanged]:
        rows = zip(self._wires, self._bounds, strict=True)
        return [Exchanged("swapped", [Shares(lengths(bounds), wire) for wire, bounds in rows])]

    def _prepared_exactly(self, calls: PreparedCalls) -> Any:
        dtype = None if self._dtype is None else self._dtype.name
        return ReduceScatter(calls, self._alike(), dtype=dtype, wire=self._wire, scale=self._scale)

    def __call__(
        self,
        x: Any,
        out: Any,
        late: Callable[[Any], None] | None = None,
        *,
        scale: float | None = None,
    ) -> Work:
        """Make the call.

        Args:
            x: Contiguous, of ``world_size * n`` elements. It stays as it is until the work has been
                waited for.
            out: The result, of ``n`` elements of the result's dtype; it does not overlap ``x``.
            late: Called with the exact result, like ``out``, by the work, if terms did not fit on
                this rank; then ``out`` has been -0.0, to which sums can be added later without a
                change of bits. None: ``out`` is overwritten.
            scale: What this sum is multiplied by. None: what was prepared.

        Returns:
            The work. ``out`` is right when it has been waited for.

        Raises:
            CollectiveError: If the exchange fails.
            ValueError: If an array is not what was prepared for. Nothing has been sent then.
        """
        factor = self._scale if scale is None else scale
        exactly = functools.partial(self._exact_sum, x, out, late, factor)
        again = self._again(lambda: exactly, x, out)
        if again.place is not None:
            # A recording has its factor.
            again = again._replace(place=(again.place, factor))
        return self._call(again, lambda: self._shares(x, out, factor))

    def _shares(self, x: Any, out: Any, factor: float | None) -> Body:
        """What a call queues, of arrays that have been looked at."""
        ranks, me = range(self._ranks), self._rank
        xs = self._flat(x, [part.nelem for part in self._parts], "x")
        counts = [part.nelem // self._ranks for part in self._parts]
        totals = self._flat(out, counts, "out", self._sum_dtypes, written=True)
        need_apart(totals, xs)
        shares = [shares_of(v, bounds) for v, bounds in zip(xs, self._bounds, strict=True)]

        def body(slot: Slot, call: Call) -> None:
            given = [
                Given(self._sent(part, own[j]), j, part)
                for j in ranks
                if j != me
                for part, own in enumerate(shares)
            ]
            self._encode(slot, call, 0, given)
            self._exchange(slot, call, 0)
            for part, (own, total) in enumerate(zip(shares, totals, strict=True)):
                dtype = self._sum_dtypes[part]
                self._sum(slot, call, 0, own[me], total, part=part, dtype=dtype, scale=factor)
            nbytes = sum(part.nbytes for part in self._parts)
            call.raw_bytes += (self._ranks - 1) * nbytes // self._ranks

        return body

    def _exact_sum(
        self,
        x: Any,
        out: Any,
        late: Callable[[Any], None] | None,
        factor: float | None,
        wrong: bool,
    ) -> None:
        """The sum once more, exactly; `wrong` on this rank if `out` is."""
        if late is None:
            self._exactly(x, out, scale=factor)
            return
        rows = zip(self._parts, self._sum_dtypes, strict=True)
        fresh = [tensors.empty((p.nelem // self._ranks,), t, self._like) for p, t in rows]
        total = fresh if self._listed else fresh[0]
        self._exactly(x, total, scale=factor)
        if wrong:
            late(total)


class OneShot(_Sums):
    """``call(x, out)``: every rank sends all of ``x``, and adds up what all have sent."""

    collective = "all_reduce"

    def __init__(self, calls: PreparedCalls, like: Any, *, wire: Any, scale: float | None) -> None:
        super().__init__(calls, like, ", one-shot", wire, scale)
        self._pieces = self._cut()
        self._start()

    def _exchanges(self) -> list[Exchanged]:
        pieces = [
            [
                Shares([b - a] * self._ranks, wire)
                for wire, (a, b) in zip(self._wires, piece, strict=True)
            ]
            for piece in self._pieces
        ]
        return [Exchanged("gathered", shares, piece=i) for i, shares in enumerate(pieces)]

    def _prepared_exactly(self, calls: PreparedCalls) -> Any:
        return OneShot(calls, self._alike(), wire=self._wire, scale=self._scale)

    def __call__(self, x: Any, out: Any) -> Work:
        """Make the call.

        Args:
            x: Contiguous, of as many elements as were prepared for.
            out: The result, as large, of the same dtype; it may be ``x``.

        Returns:
            The work. ``out`` is right when it has been waited for.

        Raises:
            CollectiveError: If the exchange fails.
            ValueError: If an array is not what was prepared for. Nothing has been sent then.
        """
        return self._summed(x, out)

    def _body(self, x: Any, out: Any) -> Body:
        counts = [part.nelem for part in self._parts]
        xs, totals = self._flat(x, counts, "x"), self._flat(out, counts, "out", written=True)
        need_apart(totals, xs, totals)

        def body(slot: Slot, call: Call) -> None:
            gathered = []
            for at, piece in enumerate(self._pieces):
                values = [x[slice(*b)] for x, b in zip(xs, piece, strict=True)]
                given = [Given(self._sent(part, v), 0, part) for part, v in enumerate(values)]
                self._encode(slot, call, at, given)
                gathered.append(self._exchange(slot, call, at, beside=self._beside))
            for at, (piece, arrived) in enumerate(zip(self._pieces, gathered, strict=True)):
                arrived()
                for part, (whole, b) in enumerate(zip(totals, piece, strict=True)):
                    options: Any = {"dtype": self._dtypes[part], "scale": self._scale}
                    self._sum(slot, call, at, None, whole[slice(*b)], part=part, **options)
            call.raw_bytes += (self._ranks - 1) * sum(part.nbytes for part in self._parts)

        return body


class OneLaunch(_Sums):
    """As ``OneShot``, out of peers' memory by one launch, which adds up what is still encoded.

    Args:
        calls: The calls that it is one of.
        like: An array, as in ``PreparedCalls.all_reduce``.
        plan: What ``plan_of`` gives.
        scale: As there.
    """

    collective = "all_reduce"

    def __init__(self, calls: PreparedCalls, like: Any, *, plan: Plan, scale: float | None) -> None:
        super().__init__(calls, like, ", one-shot, one launch", None, scale)
        self._nbytes = plan.chunks * plan.static_stride
        self._peers = calls.route.peer_sum(plan, like)
        # All ranks have said that they prepare this: they make memory alike.
        calls.route.begin_sum(self._peers)
        self._start()

    @staticmethod
    def plan_of(calls: PreparedCalls, like: Any, wire: Any) -> Plan | None:
        """The plan by which arrays are summed so; None if they are not. The same on all ranks."""
        if isinstance(like, (list, tuple)) or calls.route.by_network or not tensors.is_torch(like):
            return None
        part = part_of(like)
        if not part.dtype.is_float or _wire_of(part, wire) != part.dtype:
            return None
        plan = calls.codec.plan((part.nelem,), part.dtype.name, checksum=calls.checksum)
        return plan if calls.route.peer_sum(plan, like) is not None else None

    def _exchanges(self) -> list[Exchanged]:
        return []

    @tensors.kept
    def _lay_out(self, slot: Slot) -> None:
        slot.exchanges = [NoMessages()]
        slot.needs_at = slot.late_at = self._ranks
        slot.words = tensors.empty((self._ranks + 1,), INT64, self._like)
        slot.words[...] = 0

    def _make(self, slot: Slot, queue: Callable[[Slot, Call], Work]) -> Work:
        # In a graph of the user's there is no order but the user's.
        with contextlib.nullcontext() if capturing() else KERNEL_ORDER.next(self._like.device):
            return super()._make(slot, queue)

    def _collect(self, slot: Slot) -> None:
        """The launch has written all words."""

    def __call__(self, x: Any, out: Any) -> Work:
        """Make the call; see ``OneShot``."""
        return self._summed(x, out)

    def _body(self, x: Any, out: Any) -> Body:
        (part,) = self._parts
        (x,) = self._flat(x, [part.nelem], "x")
        (out,) = self._flat(out, [part.nelem], "out", written=True)
        need_apart([out], [x], [out])

        def body(slot: Slot, call: Call) -> None:
            with call.stage("sum"):
                self._peers.sum(x, out, slot.words, self._scale)
            call.raw_bytes += (self._ranks - 1) * part.nbytes
            call.wire_bytes += (self._ranks - 1) * self._nbytes

        return body


class _Piece(NamedTuple):
    """A piece of an all-reduce that is summed beside the others.

    Attributes:
        swapped: Number of the exchange of its terms.
        gathered: That of its sums.
        bounds: By part, the shares of the ranks.
    """

    swapped: int
    gathered: int
    bounds: list[list[Bounds]]


class AllReduce(_Sums):
    """``call(x, out)``: a two-shot sum: a reduce-scatter, and an all-gather of the sums."""

    collective = "all_reduce"

    def __init__(self, calls: PreparedCalls, like: Any, *, wire: Any, scale: float | None) -> None:
        super().__init__(calls, like, ", two-shot", wire, scale)
        cut = self._cut()
        self._pieces = [
            _Piece(at, len(cut) + at, [bounds_of(b - a, self._ranks, a) for a, b in parts])
            for at, parts in enumerate(cut)
        ]
        self._start()

    def _exchanges(self) -> list[Exchanged]:
        pieces = [
            [Shares(lengths(b), wire) for wire, b in zip(self._wires, piece.bounds, strict=True)]
            for piece in self._pieces
        ]
        kinds: tuple[Literal["swapped"], Literal["gathered"]] = ("swapped", "gathered")
        return [Exchanged(k, shares, piece=i) for k in kinds for i, shares in enumerate(pieces)]

    def _prepared_exactly(self, calls: PreparedCalls) -> Any:
        return AllReduce(calls, self._alike(), wire=self._wire, scale=self._scale)

    def __call__(self, x: Any, out: Any) -> Work:
        """Make the call.

        Args:
            x: Contiguous, of as many elements as were prepared for.
            out: The result, as large, of the same dtype; it may be ``x``.

        Returns:
            The work. ``out`` is right when it has been waited for.

        Raises:
            CollectiveError: If the exchange fails.
            ValueError: If an array is not what was prepared for. Nothing has been sent then.
        """
        return self._summed(x, out)

    def _body(self, x: Any, out: Any) -> Body:
        counts = [part.nelem for part in self._parts]
        xs, outs = self._flat(x, counts, "x"), self._flat(out, counts, "out", written=True)
        need_apart(outs, xs, outs)

        def body(slot: Slot, call: Call) -> None:
            wholes = [
                whole if dtype is None else tensors.empty(whole.shape, wire, whole)
                for whole, dtype, wire in zip(outs, self._dtypes, self._wires, strict=True)
            ]
            swapped = [self._send_terms(slot, call, piece, xs) for piece in self._pieces]
            # Own terms are read while sums are written.
            owns = [_kept(self._own(piece, xs), outs) for piece in self._pieces]
            gathered = []
            for piece, own, arrived in zip(self._pieces, owns, swapped, strict=True):
                arrived()
                gathered.append(self._send_sums(slot, call, piece, own, self._own(piece, wholes)))
            for piece, arrived in zip(self._pieces, gathered, strict=True):
                arrived()
                self._take_sums(slot, call, piece, wholes)
            for whole, result in zip(wholes, outs, strict=True):
                if whole is not result:
                    tensors.put(result, whole)
            nbytes = sum(part.nbytes for part in self._parts)
            call.raw_bytes += 2 * nbytes * (self._ranks - 1) // self._ranks

        return body

    def _own(self, piece: _Piece, values: Sequence[Any]) -> list[Any]:
        """This rank's shares."""
        return [v[slice(*b[self._rank])] for v, b in zip(values, piece.bounds, strict=True)]

    def _send_terms(
        self, slot: Slot, call: Call, piece: _Piece, xs: Sequence[Any]
    ) -> Callable[[], None]:
        """Encode the terms of other ranks' sums, and send them; what waits for theirs."""
        given = [
            Given(self._sent(part, share), j, part)
            for part, (x, bounds) in enumerate(zip(xs, piece.bounds, strict=True))
            for j, share in enumerate(shares_of(x, bounds))
            if j != self._rank
        ]
        self._encode(slot, call, piece.swapped, given)
        return self._exchange(slot, call, piece.swapped, beside=self._beside)

    def _send_sums(
        self, slot: Slot, call: Call, piece: _Piece, own: Sequence[Any], totals: Sequence[Any]
    ) -> Callable[[], None]:
        """Add up, into `totals`, and send the sums; what waits for those of other ranks."""
        at, scale = piece.swapped, self._scale
        for part, (term, total) in enumerate(zip(own, totals, strict=True)):
            self._sum(slot, call, at, term, total, part=part, scale=scale, travels_on=True)
        given = [Given(total, 0, part) for part, total in enumerate(totals)]
        self._encode(slot, call, piece.gathered, given)
        return self._exchange(slot, call, piece.gathered, beside=self._beside)

    def _take_sums(self, slot: Slot, call: Call, piece: _Piece, wholes: Sequence[Any]) -> None:
        """Decode the sums; with a lossy codec also this rank's own, as the others have them."""
        rows = [shares_of(whole, b) for whole, b in zip(wholes, piece.bounds, strict=True)]
        keeps = self._calls.codec.lossless
        ranks = range(self._ranks)
        wanted = [None if i == self._rank and keeps else row[i] for i in ranks for row in rows]
        self._decode(slot, call, piece.gathered, wanted)


def _wire_of(part: Part, wire: Any) -> DType:
    """The dtype that a part travels as where `wire` is asked for."""
    if not part.dtype.is_float:
        raise TypeError(f"like is {part.dtype.name}; allowed in sums: floats")
    found = part.dtype if wire is None else arrays.as_dtype(wire)
    narrower = found.is_float and found.itemsize < _FLOAT32.itemsize
    if found != part.dtype and not (part.dtype == _FLOAT32 and narrower):
        raise ValueError(
            f"wire is {found.name}, the tensor {part.dtype.name}; allowed: its dtype, or "
            "a narrower one for float32"
        )
    return found


def _kept(xs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """`xs`, as copies of those that results lie over."""
    return [tensors.copied(x) if any(tensors.overlap(x, o) for o in outs) else x for x in xs]
