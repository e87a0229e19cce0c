"""Sums by hops: schedules, results bit for bit, agreement on statistics, damage, hooks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tightwire as tw
from lossy import DTYPES, inputs
from ranks import exact
from tightwire.adapters import collectives
from tightwire.adapters.calls import rounding_key
from tightwire.adapters.group import Topology
from tightwire.adapters.memory import run_ranks
from tightwire.adapters.multihop import Hop, hops
from tightwire.arrays import Target, from_bits
from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]
HOPS: tuple[Topology, ...] = ("ring", "butterfly")
CODECS = (
    tw.codec("dynamiq"),
    tw.codec("dynamiq", bits=4, widths="pow2", grid="signed", scales="stochastic"),
    tw.codec("dynamiq", widths="fixed", rounding="nearest", center=True),
    tw.codec("mx"),
    tw.codec("mx", element="e2m1"),
    tw.codec("nvfp4"),
    tw.codec("taco", format="int8", rounding="stochastic", block=32),
    tw.codec("sdp4bit", rounding="stochastic"),
)
SEED = 7


@pytest.mark.parametrize("topology", HOPS)
@pytest.mark.parametrize("size", range(1, 18))
def test_every_term_reaches_every_share_once(topology: Topology, size: int) -> None:
    steps = [hops(topology, rank, size) for rank in range(size)]
    assert len({len(found) for found in steps}) == 1
    # What each rank has of each share: ranks whose terms are in it.
    held = [{c: [rank] for c in range(size)} for rank in range(size)]
    encoded: list[tuple[int, int]] = []
    for at in range(len(steps[0])):
        sent = {}
        for rank, found in enumerate(steps):
            hop = found[at]
            if hop.to is not None:
                assert (steps[hop.to][at].source, steps[hop.to][at].into) == (rank, hop.out)
                sent[hop.to] = {c: held[rank].pop(c) for c in hop.out}
                encoded += [(rank, c) for c in hop.out]
        for rank, found in enumerate(steps):
            assert (found[at].source is None) == (rank not in sent)
            for c, terms in sent.get(rank, {}).items():
                held[rank][c] = terms + held[rank].get(c, [])
    for rank in range(size):
        assert list(held[rank]) == [rank]
        assert sorted(held[rank][rank]) == list(range(size))
    # The owner encodes its share as well, unless that has been encoded as a whole.
    assert len(set(encoded)) == len(encoded)
    core = 1 << size.bit_length() - 1
    assert len(encoded) == size * size - (size if topology == "ring" else core)


def test_schedules_of_four_ranks() -> None:
    assert hops("ring", 1, 4) == [
        Hop(2, (0,), 0, (3,)),
        Hop(2, (3,), 0, (2,)),
        Hop(2, (2,), 0, (1,)),
    ]
    assert hops("butterfly", 1, 4) == [Hop(3, (2, 3), 3, (0, 1)), Hop(0, (0,), 0, (1,))]


class ByHand:
    """Sums of one piece of one share, by calls of the codec for all ranks' terms of it."""

    def __init__(
        self, codec: tw.Codec, terms: Sequence[Array], share: int, number: int, call: int
    ) -> None:
        self.codec, self.terms, self.share = codec, terms, share
        self.size = len(terms)
        self.key = functools.partial(rounding_key, SEED, call, number)
        self.stats = None
        if codec.reduce_op == "sum":
            stats = [codec.measure(x) for x in terms]
            self.stats = np.minimum(functools.reduce(np.add, stats), np.finfo(np.float32).max)

    def encoded(self, rank: int, came: Sequence[tw.Buffer]) -> tw.Buffer:
        """Of the term of `rank` and what has come, in this order."""
        key, x = self.key(rank, self.size), self.terms[rank]
        if not came:
            return self.codec.encode(x, stats=self.stats, key=key)
        x = self.summed(rank, came[:-1]) if came[1:] else x
        return self.codec.decode_add_encode(came[-1], x, stats=self.stats, key=key)

    def summed(self, rank: int, came: Sequence[tw.Buffer]) -> Array:
        total = self.terms[rank].astype(np.float32)
        for buffer in came:
            total += tw.decode(bytes(buffer)).astype(np.float32)
        return total

    def ring(self) -> tuple[int, list[tw.Buffer]]:
        """The share's last rank but for those that are given the sum, and what comes to it."""
        came: list[tw.Buffer] = []
        for step in range(1, self.size):
            came = [self.encoded((self.share + step) % self.size, came)]
        return self.share, came

    def butterfly(self) -> tuple[int, list[tw.Buffer]]:
        core = 1 << self.size.bit_length() - 1

        def came_to(rank: int, least: int) -> list[tw.Buffer]:
            """Before ranks swap whose numbers differ in a bit below `least`."""
            found = [self.encoded(rank + core, [])] if rank + core < self.size else []
            bit = core // 2
            while bit >= least:
                found.append(self.encoded(rank ^ bit, came_to(rank ^ bit, 2 * bit)))
                bit //= 2
            return found

        return self.share % core, came_to(self.share % core, 1)

    def reduced(self, topology: Topology) -> Array:
        rank, came = getattr(self, topology)()
        found: Array = tw.decode(bytes(self.encoded(rank, came)))
        return found

    def scattered(self, topology: Topology) -> Array:
        """Float32: the last rank encodes it only if it is to be given to another."""
        rank, came = getattr(self, topology)()
        if rank == self.share:
            return self.summed(rank, came)
        return self.reduced(topology).astype(np.float32)


def reference(
    codec: tw.Codec, xs: Sequence[Array], topology: Topology, step: int, call: int, scatter: bool
) -> Array:
    """The sum of `xs`, shape (n,), pieces of shares having at most `step` elements."""
    size, n = len(xs), xs[0].size
    each = -(-n // size)
    spans = [slice(a, min(a + step, each)) for a in range(0, each, step)]
    rows = [np.pad(x, (0, each * size - n)).reshape(size, each) for x in xs]
    found = np.empty((size, each), np.float32 if scatter else xs[0].dtype)
    for c in range(size):
        for k, span in enumerate(spans):
            terms = [row[c, span] for row in rows]
            hand = ByHand(codec, terms, c, c * len(spans) + k, call)
            found[c, span] = hand.scattered(topology) if scatter else hand.reduced(topology)
    return found.reshape(-1)[:n]


class Wanted:
    """What the calls of `check_sums` give, for all ranks."""

    def __init__(
        self,
        codec: tw.Codec,
        topology: Topology,
        dtype: str,
        size: int,
        n: int,
        piece: int = 0,
    ) -> None:
        def step(each: int) -> int:
            return max(piece, -(-each // (3 * piece)) * piece) if piece else max(each, 1)

        self.codec, self.topology, self.in_pieces = codec, topology, piece > 0
        self.xs = inputs(codec, dtype, size, n)
        self.rows = inputs(codec, dtype, size, size * n)
        each = -(-n // size)
        self.sum = reference(codec, self.xs, topology, step(each), 0, False)
        total = reference(codec, self.xs, topology, step(each), 1, False)
        with np.errstate(all="ignore"):
            self.mean = (total.astype(np.float32) / size).astype(total.dtype)
        self.shares = reference(codec, self.rows, topology, step(n), 2, True).reshape(size, n)


def check_sums(transport: Any, wanted: Wanted, library: str = "numpy") -> tw.Communicator:
    """Both sums of the communicator, in place and with poisoned outputs."""
    me = transport.rank
    options: dict[str, Any] = {"algorithm": "pipelined", "pieces": 3} if wanted.in_pieces else {}
    comm = tw.Communicator(transport, wanted.codec, seed=SEED, topology=wanted.topology, **options)

    def own(x: Array) -> Any:
        kind = BY_NAME[x.dtype.name]
        return from_bits(x.view(kind.bits).copy(), kind, x.shape, Target(library))

    x, out = own(wanted.xs[me]), own(np.full_like(wanted.xs[me], -7))
    assert comm.all_reduce(x, out) is out
    exact(out, wanted.sum)
    exact(x, wanted.xs[me])
    exact(comm.all_reduce(x, x, op="mean"), wanted.mean)
    wide = own(np.full(wanted.shares.shape[1], -7, np.float32))
    exact(comm.reduce_scatter(own(wanted.rows[me]), wide), wanted.shares[me])
    integers = np.arange(9, dtype=np.int32)
    exact(comm.all_reduce(own(integers)), integers * transport.world_size)
    return comm


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(1, 5),
    topology=st.sampled_from(HOPS),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    n=st.integers(0, 9) | st.integers(200, 3000),
)
def test_sums_are_what_the_codec_gives_by_hand(
    size: int, topology: Topology, codec: tw.Codec, dtype: str, n: int
) -> None:
    wanted = Wanted(codec, topology, dtype, size, n)
    run_ranks(size, lambda t: check_sums(t, wanted))


@pytest.mark.parametrize("topology", HOPS)
@pytest.mark.parametrize("size", range(1, 10))
def test_every_number_of_ranks(topology: Topology, size: int) -> None:
    wanted = Wanted(CODECS[size % 2], topology, "float32", size, 401 * size + 5)
    run_ranks(size, lambda t: check_sums(t, wanted))


@pytest.mark.parametrize("codec", [CODECS[0], CODECS[3]], ids=["dynamiq", "mx"])
@pytest.mark.parametrize(("topology", "size"), [("ring", 3), ("butterfly", 4), ("butterfly", 5)])
def test_sums_in_pieces(
    codec: tw.Codec, topology: Topology, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_PIECE", 512)
    wanted = Wanted(codec, topology, "bfloat16", size, 1300 * size - 1, 512)
    for comm in run_ranks(size, lambda t: check_sums(t, wanted)):
        name = f"{topology}, no sizes, {codec.name}"
        assert comm.trace()[0].algorithm == f"{name}, 3 pieces"


def test_sums_of_tensors() -> None:
    pytest.importorskip("torch")
    wanted = Wanted(CODECS[0], "ring", "bfloat16", 3, 1999)
    run_ranks(3, lambda t: check_sums(t, wanted, "torch"))
