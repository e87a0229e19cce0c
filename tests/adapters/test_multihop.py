"""Sums by hops: schedules, results bit for bit, agreement on statistics, damage, hooks."""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from lossy import DTYPES, inputs
from processes import join, launch
from ranks import exact
from support import examples
from tightwire import arrays
from tightwire.adapters.collectives import pipelined
from tightwire.adapters.collectives.auto_scale import AutoScale
from tightwire.adapters.collectives.calls import Call, TraceRecord, rounding_key
from tightwire.adapters.collectives.chunk_views import DESCRIPTOR_NBYTES
from tightwire.adapters.collectives.hops import Hop, hops
from tightwire.adapters.collectives.path_selection import Measured
from tightwire.adapters.collectives.session import Topology
from tightwire.adapters.collectives.statistics import device_summary
from tightwire.adapters.collectives.sums import Op
from tightwire.adapters.training.error_feedback import ErrorFeedback
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks
from tightwire.arrays import Target, from_bits
from tightwire.codecs.mx import Mx
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
    tw.codec("taco"),
    tw.codec("tahquant", hidden=48),
    tw.codec("mx", element="e2m1", scale_rule="agreed"),
)
SEED = 7
#: Sums have scales that fall from call to call whatever overflows.
SHRINK = 2.0**-0.75


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
        self,
        codec: tw.Codec,
        terms: Sequence[Array],
        share: int,
        number: int,
        call: int,
        coded: int,
    ) -> None:
        """`coded` sums were not raw, before this one."""
        self.codec, self.terms, self.share = codec, terms, share
        self.size = len(terms)
        self.key = functools.partial(rounding_key, SEED, call, number)
        self.stats = None
        if codec.reduce_op == "sum":
            stats = [codec.measure(x) for x in terms]
            self.stats = np.minimum(functools.reduce(np.add, stats), np.finfo(np.float32).max)
        elif isinstance(codec.spec, Mx) and codec.spec.agrees:
            largest = functools.reduce(np.maximum, [codec.measure(x) for x in terms]).astype(int)
            steps = math.ceil(max(math.log2(self.size) - 0.75 * coded, 0))
            special = largest >= 255 - codec.spec.format.emax
            stats = np.where(special, largest, np.minimum(largest + steps, 254))
            self.stats = stats.astype(np.uint8)

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
    codec: tw.Codec,
    xs: Sequence[Array],
    topology: Topology,
    step: int,
    call: int,
    scatter: bool,
    coded: int,
) -> Array:
    """The sum of `xs`, shape (n,), pieces of shares having at most `step` elements.

    `coded` calls before this one were not raw.
    """
    size, n = len(xs), xs[0].size
    if size == 1:
        return xs[0].astype(np.float32) if scatter else xs[0]
    each = -(-n // size)
    spans = [slice(a, min(a + step, each)) for a in range(0, each, step)]
    rows = [np.pad(x, (0, each * size - n)).reshape(size, each) for x in xs]
    found = np.empty((size, each), np.float32 if scatter else xs[0].dtype)
    for c in range(size):
        for k, span in enumerate(spans):
            terms = [row[c, span] for row in rows]
            hand = ByHand(codec, terms, c, c * len(spans) + k, call, coded)
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
        first = min(step(each), each)
        coded = int(codec.plan((first,), dtype).codec == codec.spec)
        self.sum = reference(codec, self.xs, topology, step(each), 0, False, 0)
        with np.errstate(all="ignore"):
            terms = [(x.astype(np.float32) / size).astype(x.dtype) for x in self.xs]
        self.mean = reference(codec, terms, topology, step(each), 1, False, coded)
        shares = reference(codec, self.rows, topology, step(n), 2, True, 2 * coded)
        self.shares = shares.reshape(size, n)


def check_sums(
    transport: Any, wanted: Wanted, library: str = "numpy", device: Any = None
) -> tw.Communicator:
    """Both sums of the communicator, in place and with poisoned outputs."""
    me = transport.rank
    options: dict[str, Any] = {"algorithm": "pipelined", "pieces": 3} if wanted.in_pieces else {}
    if isinstance(wanted.codec.spec, Mx) and wanted.codec.spec.agrees:
        options["scaling"] = AutoScale(threshold=1 - 2**-20, shrink=SHRINK)
    comm = tw.Communicator(transport, wanted.codec, seed=SEED, topology=wanted.topology, **options)

    def own(x: Array) -> Any:
        kind = BY_NAME[x.dtype.name]
        return from_bits(x.view(kind.bits).copy(), kind, x.shape, Target(library, device))

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


@examples(12)
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


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("topology", HOPS)
@pytest.mark.parametrize("size", range(1, 10))
def test_every_number_of_ranks(topology: Topology, size: int) -> None:
    codec = CODECS[(0, 1, -1)[size % 3]]
    wanted = Wanted(codec, topology, "float32", size, 401 * size + 5)
    run_ranks(size, lambda t: check_sums(t, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 3, -1], ids=["dynamiq", "mx", "agreed"])
@pytest.mark.parametrize(("topology", "size"), [("ring", 3), ("butterfly", 4), ("butterfly", 5)])
def test_sums_in_pieces(
    at: int, topology: Topology, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = CODECS[at]
    monkeypatch.setattr(pipelined, "_PIECE", 512)
    wanted = Wanted(codec, topology, "bfloat16", size, 1300 * size - 1, 512)
    for comm in run_ranks(size, lambda t: check_sums(t, wanted)):
        name = f"{topology}, no sizes, {codec.name}"
        assert comm.trace()[0].algorithm == f"{name}, 3 pieces"


@pytest.mark.slow
def test_sums_of_tensors() -> None:
    pytest.importorskip("torch")
    for n in (1999, 0):
        wanted = Wanted(CODECS[0], "ring", "bfloat16", 3, n)
        run_ranks(3, functools.partial(check_sums, wanted=wanted, library="torch"))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shares_that_lie_anywhere_in_the_input(library: str) -> None:
    if library == "torch":
        pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "mx", topology="ring")
        given = inputs(comm.codec, "float32", 2, 2000)[comm.rank]
        wanted = comm.reduce_scatter(given)
        for at in (0, 3, 500, 1000):
            x = from_bits(
                given.view(np.uint32).copy(), BY_NAME["float32"], (2000,), Target(library)
            )
            exact(comm.reduce_scatter(x, x[at : at + 1000]), wanted)

    run_ranks(2, task)


class Noted(ThreadTransport):
    """Counts bytes to others; `damage(outs)` sees what came, `change(x)` what was summed."""

    def __init__(
        self,
        inner: ThreadTransport,
        damage: Callable[[int, Any], None] | None = None,
        change: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.damage, self.change = damage, change
        self.sent: list[tuple[int, int]] = []
        self.steps = 0

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        super().all_to_all_v(outs, xs)
        self.sent += [(r, sum(x.size for x in part)) for r, part in enumerate(xs) if part]
        if self.damage is not None:
            self.damage(self.steps, outs)
        self.steps += 1

    def all_gather(self, out: Any, x: Any) -> None:
        super().all_gather(out, x)
        self.sent += [(r, x.size) for r in range(self.world_size)]
        # Of sums, behind the descriptors.
        if self.damage is not None and self.steps and x.size > 512:
            self.damage(self.steps, [[None, part] for part in out.reshape(self.world_size, -1)])

    def all_reduce(self, x: Any, op: Any = "sum") -> None:
        super().all_reduce(x, op)
        if self.change is not None:
            self.change(x)


def failures(size: int, task: Callable[[ThreadTransport], Any]) -> list[tw.CollectiveError | None]:
    """The error of each rank, None of those that had none; a rank that fails leaves the group."""

    def caught(transport: ThreadTransport) -> tw.CollectiveError | None:
        try:
            task(transport)
        except tw.CollectiveError as error:
            transport.close()
            return error
        return None

    return run_ranks(size, caught, timeout=10)


@pytest.mark.parametrize("topology", HOPS)
def test_bytes_on_the_wire(topology: Topology) -> None:
    """Of 4 ranks each sends three of four shares in hops, and its own to three others."""

    def task(transport: ThreadTransport) -> None:
        noted = Noted(transport)
        comm = tw.Communicator(noted, "mx", topology=topology)
        x = np.ones(4 * 8192, np.float32)
        comm.all_reduce(x)
        noted.sent.clear()
        noted.steps = 0
        comm.all_reduce(x)
        record = comm.trace()[-1]
        others = [(r, nbytes) for r, nbytes in noted.sent if r != comm.rank]
        # On the host every call is compared with the other ranks' first.
        assert sum(nbytes for _, nbytes in others) == record.wire_bytes - 3 * DESCRIPTOR_NBYTES
        assert record.raw_bytes == 6 * 8192 * 4
        assert record.algorithm == f"{topology}, no sizes, mx"
        assert noted.steps == (3 if topology == "ring" else 2)
        # Before what all ranks gather: descriptors, and static parts.
        to = {r for r, _ in others[:-6]}
        ring = {(comm.rank + 1) % 4}
        assert to == (ring if topology == "ring" else {comm.rank ^ 1, comm.rank ^ 2})

    run_ranks(4, task)


@pytest.mark.parametrize("other", ["next", "nan"])
@pytest.mark.parametrize("topology", HOPS)
def test_statistics_that_differ_are_refused(topology: Topology, other: str) -> None:
    """By all ranks, before anything is encoded."""

    def task(transport: ThreadTransport) -> None:
        def change(x: Any) -> None:
            x[2] = np.nan if other == "nan" else np.nextafter(x[2], np.float32(np.inf))

        noted = Noted(transport, change=change if transport.rank == 1 else None)
        comm = tw.Communicator(noted, "dynamiq", topology=topology)
        with pytest.raises(tw.CollectiveError, match="have other sums of statistics") as caught:
            comm.all_reduce(np.ones(3000, np.float32))
        assert caught.value.stage == "statistics"
        strange = "[0, 2]" if comm.rank == 1 else "[1]"
        assert strange in caught.value.detail
        assert noted.steps == 0
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            comm.all_reduce(np.ones(3000, np.float32))

    run_ranks(3, task)


def test_statistics_that_no_codec_takes_are_refused() -> None:
    def task(transport: ThreadTransport) -> None:
        noted = Noted(transport, change=lambda x: x.fill(np.nan))
        comm = tw.Communicator(noted, "dynamiq", topology="ring")
        with pytest.raises(tw.CollectiveError, match="not finite") as caught:
            comm.all_reduce(np.ones(3000, np.float32))
        assert caught.value.stage == "statistics"

    run_ranks(2, task)


@pytest.mark.parametrize("codec", ["dynamiq", "mx"])
@pytest.mark.parametrize("in_descriptor", [False, True])
@pytest.mark.parametrize(
    ("topology", "collective", "at", "source"),
    [
        ("ring", "all_reduce", 1, 0),
        ("ring", "reduce_scatter", 2, 0),
        ("butterfly", "all_reduce", 0, 3),
        ("butterfly", "reduce_scatter", 1, 0),
    ],
)
def test_a_damaged_hop_is_named(
    codec: str, in_descriptor: bool, topology: Topology, collective: str, at: int, source: int
) -> None:
    """Rank 1 receives it, and the others notice that it has left."""

    def damage(step: int, outs: Any) -> None:
        if step == at:
            outs[source][0 if in_descriptor else 1][5] ^= 4

    def task(transport: ThreadTransport) -> None:
        noted = Noted(transport, damage if transport.rank == 1 else None)
        comm = tw.Communicator(noted, codec, topology=topology)
        x = np.random.default_rng(comm.rank).standard_normal(4 * 1000, np.float32)
        getattr(comm, collective)(x)

    found = failures(4, task)
    error = found[1]
    assert error is not None
    assert error.rank == 1
    assert f"(hop {at}, from rank {source})" in error.detail
    assert error.stage == ("sizes" if in_descriptor else "sum")
    assert ("another call" if in_descriptor else "checksum_mismatch") in error.detail
    for other in found:
        assert other is error or other is None or other.stage in ("exchange", "sizes")
    # Nobody waits for rank 1 after the last hop of a reduce-scatter.
    assert collective == "reduce_scatter" or any(found[r] is not None for r in (0, 2, 3))


def test_damage_of_what_is_handed_on_is_found_by_who_hands_it_on() -> None:
    """Of 3 ranks rank 2 gets its share of the sum from rank 0 in the last hop, for all to have."""

    def damage(step: int, outs: Any) -> None:
        if step == 2:
            outs[0][1][5] ^= 4

    def task(transport: ThreadTransport) -> None:
        noted = Noted(transport, damage if transport.rank == 2 else None)
        comm = tw.Communicator(noted, "dynamiq", topology="butterfly")
        comm.all_reduce(np.ones(3000, np.float32))

    error = failures(3, task)[2]
    assert error is not None
    assert error.stage == "sum"
    assert "checksum_mismatch" in error.detail
    assert "(hop 2, from rank 0)" in error.detail


def test_damage_in_the_gather_is_named() -> None:
    def damage(step: int, outs: Any) -> None:
        if step == 1:
            outs[1][1][5] ^= 4

    def task(transport: ThreadTransport) -> None:
        noted = Noted(transport, damage if transport.rank == 0 else None)
        comm = tw.Communicator(noted, "mx", topology="ring")
        comm.all_reduce(np.ones(3000, np.float32))

    error, other = failures(2, task)
    assert other is None
    assert error is not None
    assert error.stage == "decode"
    assert "payload of chunk 1 (gather, chunk i is rank i's)" in error.detail


def test_damage_in_a_reduce_scatters_last_hop_leaves_ranks_in_step() -> None:
    armed = True

    def damage(step: int, outs: Any) -> None:
        if armed:
            outs[0][1][5] ^= 4

    def task(transport: ThreadTransport) -> None:
        nonlocal armed
        noted = Noted(transport, damage if transport.rank else None)
        comm = tw.Communicator(noted, "mx", topology="ring")
        x = np.ones(2000, np.float32)
        if comm.rank:
            with pytest.raises(tw.CollectiveError, match="checksum"):
                comm.reduce_scatter(x)
            armed = False
        else:
            comm.reduce_scatter(x)
        transport.barrier()
        exact(comm.reduce_scatter(x), np.full(1000, 2, np.float32))

    run_ranks(2, task)


def test_a_rank_that_has_left_is_named() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "mx", topology="ring")
        comm.all_reduce(np.ones(3000, np.float32))
        # As on a GPU, where ranks compare the first call of a kind alone before data move.
        comm._steps.comparisons.compare_new = lambda *_: None  # type: ignore[method-assign]
        if comm.rank != 1:
            comm.all_reduce(np.ones(3000, np.float32))
        transport.close()

    found = failures(3, task)
    assert found[1] is None
    assert found[2] is not None
    assert "rank 1 has left (hop 0, from rank 1)" in found[2].detail


@pytest.mark.parametrize("topology", HOPS)
def test_special_values(topology: Topology) -> None:
    """Of one rank: its super-group is lost, and no other; energies may overflow."""

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "dynamiq", topology=topology)
        x = np.zeros(3 * 1024, np.float32)
        found = comm.all_reduce(x)
        assert not found.any()
        if comm.rank == 2:
            x[300], x[2000] = np.nan, -np.inf
        x[700] = 1e38
        found = comm.all_reduce(x).reshape(-1, 256)
        lost = np.isnan(found).all(axis=1)
        assert np.flatnonzero(lost).tolist() == [1, 7]
        assert np.isfinite(found[~lost]).all()
        assert abs(found.reshape(-1)[700] / 3e38 - 1) < 0.1

    run_ranks(3, task)


@pytest.mark.parametrize("topology", HOPS)
def test_correlated_rounding_finds_the_other_ranks(topology: Topology) -> None:
    """Errors of ranks cancel as far as they are drawn from different parts of [0, 1)."""
    codecs = [tw.codec("dynamiq", rounding=name) for name in ("correlated", "stochastic")]
    rng = np.random.default_rng(0)
    scale = np.repeat(np.exp(rng.standard_normal(1 << 7)), 256)
    xs = (rng.standard_t(4, (4, scale.size)) * scale).astype(np.float32)
    total = xs.sum(axis=0, dtype=np.float64)

    def task(transport: ThreadTransport) -> list[float]:
        comms = [tw.Communicator(transport, codec, topology=topology) for codec in codecs]
        found = [comm.all_reduce(xs[transport.rank]) for comm in comms]
        return [float(((y - total) ** 2).sum() / (total**2).sum()) for y in found]

    first, *others = run_ranks(4, task)
    assert others == [first] * 3
    correlated, independent = first
    assert correlated < 0.9 * independent < 5e-3


def test_calls_that_are_refused() -> None:
    def task(transport: ThreadTransport) -> None:
        with pytest.raises(ValueError, match="topology is 'tree'; allowed"):
            tw.Communicator(transport, "mx", topology="tree")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"depend on the data; allowed: \['two-shot'\]"):
            tw.Communicator(transport, topology="ring")
        with pytest.raises(ValueError, match="depend on the data"):
            tw.Communicator(transport).all_reduce(np.ones(4), topology="ring")
        with pytest.raises(ValueError, match=r"codec 'thc'; allowed: .*'in-network'"):
            tw.Communicator(transport, "thc", topology="ring")
        comm = tw.Communicator(transport, "mx", topology="ring")
        assert comm.topology == "ring"
        x = np.ones(640, np.float32)
        with pytest.raises(ValueError, match="decoded is given, topology is 'ring'"):
            comm.reduce_scatter(x, decoded=np.empty_like(x))
        with pytest.raises(ValueError, match="op is 'max'; allowed"):
            comm.all_reduce(x, op="max")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="allowed for a mean: floats"):
            comm.all_reduce(np.ones(4, np.int32), op="mean")
        # None of these has counted as a call.
        comm.all_reduce(x, topology="two-shot")
        (record,) = comm.trace()
        assert (record.sequence, record.algorithm) == (0, "two-shot, no sizes, mx")

    run_ranks(2, task)


def test_a_wrong_topology_is_refused_natively_too() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "mx", algorithm="native")
        x = np.ones(640, np.float32)
        calls: tuple[Callable[..., Any], ...] = (comm.all_reduce, comm.reduce_scatter)
        for call in calls:
            call(x)
            with pytest.raises(ValueError, match="topology is 'tree'; allowed"):
                call(x, topology="tree")

    run_ranks(2, task)


def test_statistics_are_summed_up_on_their_device() -> None:
    torch = pytest.importorskip("torch")
    stats = torch.rand(10_001, generator=torch.Generator().manual_seed(0))
    word, least, most, *sample = device_summary(stats, 4096).tolist()
    bounds = np.array([least, most], np.int32).view(np.float32)
    assert bounds.tolist() == [stats.min().item(), stats.max().item()]
    assert np.array(sample, np.int32).tobytes() == stats[::3].numpy().tobytes()
    for at in (0, 5000, 10_000):
        other = stats.clone()
        other.view(torch.int32)[at] ^= 1 << at % 31
        assert device_summary(other, 4096)[0].item() != word
    swapped = stats.flip(0)
    assert device_summary(swapped, 4096)[0].item() != word


@pytest.mark.parametrize("bad", [None, "other", -1.0, float("inf"), float("nan")])
def test_statistics_of_a_device_are_judged_in_the_end(bad: Any) -> None:
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> str:
        comm = tw.Communicator(transport, "dynamiq", topology="ring")
        stats = torch.ones(5000)
        if isinstance(bad, float):
            stats[77] = bad
        elif bad is not None and transport.rank == 1:
            stats[77] = 1 + 2**-20
        call = Call(transport.rank, "all_reduce", 0, "")
        comm._statistics.summarize(call, stats, arrays.describe(np.ones(3, np.float32)))
        assert call.verdict is not None
        call.exchanged = True
        try:
            comm._statistics.judge(call)
        except tw.CollectiveError as error:
            assert error.stage == "statistics"
            # Whatever else has gone well: no rank goes on.
            assert not call.exchanged
            return error.detail
        assert call.exchanged
        return call.reason

    found = run_ranks(3, task)
    if bad is None:
        assert len(set(found)) == 1
        assert "energies are flat" in found[0]
    elif bad == "other":
        others = "have other sums of statistics"
        assert found == [f"ranks {ranks} {others}" for ranks in ([1], [0, 2], [1])]
    else:
        assert all("negative or not finite" in detail for detail in found)


def test_topologies_that_differ_are_refused() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "mx")
        own = HOPS[transport.rank]
        with pytest.raises(tw.CollectiveError, match="make another call"):
            comm.all_reduce(np.ones(3000, np.float32), topology=own)
        with pytest.raises(tw.CollectiveError, match=r"ranks differ.*topology"):
            tw.Communicator(transport, "mx", topology=own)

    run_ranks(2, task)


def test_feedback_is_for_two_shots() -> None:
    torch = pytest.importorskip("torch")
    from tightwire.adapters.training import ddp, fsdp, hooks

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "mx", topology="ring")
        feedback = ErrorFeedback()
        for call in (
            lambda: ddp.DdpHook(comm, feedback, {}),
            lambda: hooks.average(comm, torch.ones(4), feedback, [("x", 4)]),
            lambda: fsdp.compress(
                torch.nn.Linear(1, 1), error_feedback=feedback, topology="ring", gradients="mx"
            ),
        ):
            with pytest.raises(ValueError, match="allowed with it: 'two-shot'"):
                call()

    run_ranks(1, task)


def test_the_switch_takes_hops_where_they_are_faster() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "dynamiq", algorithm="auto", topology="ring")
        # Small sums are faster natively, large ones by hops.
        rows = [[1e-4, 1e-2, 1e-1], [1e-1, 2e-2, 1e-1]]
        measured = Measured((1 << 10, 1 << 20), rows, 4, 0.14)
        comm._measure = lambda *_: measured  # type: ignore[method-assign]
        for n in (100, 1 << 18):
            comm.all_reduce(np.ones(n, np.float32))
        small, large = comm.trace()
        assert small.algorithm == "native"
        assert large.algorithm == "ring, no sizes, dynamiq"
        assert {"statistics", "encode", "exchange", "sum", "decode"} <= set(large.seconds)

    run_ranks(2, task)


@pytest.mark.parametrize("widths", ["any", "pow2", "fixed"])
def test_the_trace_says_when_energies_are_flat(widths: str) -> None:
    rng = np.random.default_rng(0)
    alike = rng.standard_normal((2, 10_000)).astype(np.float32)
    local = alike * np.repeat(np.exp(2 * rng.standard_normal(40)), 250).astype(np.float32)

    def task(transport: ThreadTransport) -> list[str]:
        comm = tw.Communicator(transport, tw.codec("dynamiq", widths=widths), topology="ring")
        for xs in (alike, local):
            comm.all_reduce(xs[transport.rank])
        return [record.reason for record in comm.trace()]

    remark = "; energies are flat, nine of ten within a factor of 4: "
    said = {
        "any": f"{remark}their widths are equal or neighbours",
        "pow2": f"{remark}widths 'any' have less error",
        "fixed": "",
    }[widths]
    coded = "dynamiq codes float32"
    assert run_ranks(2, task) == [[coded + said, coded]] * 2


def test_means_of_other_paths() -> None:
    def task(transport: ThreadTransport) -> None:
        x = np.arange(5, dtype=np.float32) * (1 + transport.rank)
        for codec, algorithm in (("zipccl", "compressed"), ("mx", "native")):
            comm = tw.Communicator(transport, codec, algorithm=algorithm)  # type: ignore[arg-type]
            exact(comm.all_reduce(x, op="mean"), np.arange(5, dtype=np.float32) * 2)
        narrow = comm.all_reduce(x, op="mean", wire="bfloat16", topology="ring")
        assert np.abs(narrow - np.arange(5, dtype=np.float32) * 2).max() < 0.5

    run_ranks(3, task)


@pytest.mark.parametrize("topology", ["two-shot", "ring"])
@pytest.mark.parametrize("algorithm", ["compressed", "native"])
def test_ranks_that_want_sum_and_mean_are_refused(topology: Topology, algorithm: Any) -> None:
    """In the first call of a kind as in later ones, which are not compared before they move."""

    def task(transport: ThreadTransport) -> None:
        ops: tuple[Op, ...] = ("sum", "mean")
        x = np.ones(3000, np.float32)
        for first in (True, False):
            comm = tw.Communicator(transport, "mx", algorithm=algorithm, topology=topology)
            if not first:
                for op in ops:
                    comm.all_reduce(x, op=op)
                if algorithm == "native":
                    # Nothing is compared any more.
                    continue
            with pytest.raises(tw.CollectiveError, match="make another call"):
                comm.all_reduce(x, op=ops[transport.rank])

    run_ranks(2, task)


@pytest.mark.parametrize("topology", ["two-shot", *HOPS])
def test_one_rank_alone_loses_nothing(topology: Topology) -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "dynamiq", topology=topology)
        for dtype in ("float32", "bfloat16"):
            x = inputs(comm.codec, dtype, 1, 4001)[0]
            assert_same = functools.partial(exact, wanted=x)
            assert_same(comm.all_reduce(x))
            assert_same(comm.all_reduce(x, op="mean", wire=dtype))
            assert_same(comm.all_reduce(x, wire="float16"))
            assert_same(comm.reduce_scatter(x, wire="float16"))
            assert_same(comm.all_gather(x))
            assert_same(comm.all_to_all(x))
            assert_same(comm.all_to_all(x, send_splits=[4001], receive_splits=[4001]))
            assert_same(comm.broadcast(x.copy()))
            if topology == "two-shot":
                decoded = np.full_like(x, -7)
                assert_same(comm.reduce_scatter(x, wire="float16", decoded=decoded))
                assert_same(decoded)
        for record in comm.trace():
            assert (record.algorithm, record.reason) == ("native", "one rank")
            assert (record.raw_bytes, record.wire_bytes) == (0, 0)

    run_ranks(1, task)


@pytest.mark.parametrize(("topology", "n"), [("two-shot", 1600), ("ring", 1600), ("ring", 1601)])
def test_the_trace_is_of_what_travels(topology: Topology, n: int) -> None:
    """dynamiq codes 400 elements, and their quarters not."""

    def task(transport: ThreadTransport) -> list[TraceRecord]:
        comm = tw.Communicator(transport, "dynamiq", topology=topology)
        for size in (n, n // 16):
            comm.all_reduce(np.ones(size, np.float32))
        return comm.trace()

    for coded, raw in run_ranks(4, task):
        assert (coded.algorithm, raw.algorithm) == tuple(
            f"{topology}, no sizes, {name}" for name in ("dynamiq", "raw")
        )
        assert coded.reason.startswith("dynamiq codes float32")
        assert raw.reason == "dynamiq gains nothing on shares of 25 float32"
        assert coded.wire_bytes < coded.raw_bytes
        assert raw.wire_bytes > raw.raw_bytes


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("topology", ["two-shot", *HOPS])
@pytest.mark.parametrize("codec", ["dynamiq", "mx"])
def test_means_that_fit_do_not_overflow(codec: str, topology: Topology) -> None:
    """Though the sum does, in what travels and (float32) in what it is made in."""

    def task(transport: ThreadTransport) -> None:
        size = transport.world_size
        comm = tw.Communicator(transport, codec, topology=topology)
        dtype, value = (np.float32, 1e38) if size == 8 else (np.float16, 40_000)
        # In two shots an element is left over, and sent as it is.
        x = np.full(size * 1024 + (topology == "two-shot"), value, dtype)
        found = comm.all_reduce(x, op="mean").astype(np.float64)
        assert np.abs(found / value - 1).max() < 0.3
        assert not np.isfinite(comm.all_reduce(x)).any()

    for size in (2, 4, 8):
        run_ranks(size, task)


def test_averages_that_fit_do_not_overflow() -> None:
    torch = pytest.importorskip("torch")
    from tightwire.adapters.training import hooks

    def task(transport: ThreadTransport) -> None:
        for topology in ("two-shot", *HOPS):
            comm = tw.Communicator(transport, "dynamiq", topology=topology)
            x = torch.full((4096,), 40_000.0, dtype=torch.float16)
            hooks.average(comm, x)
            assert (x.float() / 40_000 - 1).abs().max() < 0.3

    run_ranks(4, task)


@pytest.mark.parametrize("topology", ["two-shot", *HOPS])
def test_scattered_means_that_fit_do_not_overflow(topology: Topology) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from tightwire.adapters.training import fsdp
    from tightwire.adapters.training.hooks import Channel

    def task(transport: ThreadTransport) -> None:
        hook = fsdp.ReduceScatter(codec="dynamiq", topology=topology)
        comm = tw.Communicator(transport, "dynamiq", topology=topology)
        hook._channels[None] = Channel(comm)
        x = torch.full((4096,), 40_000.0, dtype=torch.float16)
        for op in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.25)):
            out = torch.full((1024,), -7.0, dtype=torch.float16)
            hook(out, x, None, op)
            assert (out.float() / 40_000 - 1).abs().max() < 0.3
            assert (x == 40_000).all()
        hook(out, x, None, dist.ReduceOp.SUM)
        assert not out.isfinite().any()

    run_ranks(4, task)


def between_processes(device: Any) -> list[str]:
    """Sums by hops over gloo or NCCL; digests of what all ranks must have alike."""
    import torch
    import torch.distributed as dist

    from tightwire.adapters.transports.torch_dist import TorchDist

    transport = TorchDist(dist.new_group(), device)
    size, found = transport.world_size, []
    where = device if device.type == "cuda" else None
    for topology in HOPS:
        agreed = tw.codec("mx", scale_rule="agreed")
        for i, codec in enumerate((CODECS[0], agreed, CODECS[6])):
            if codec.reduce_op != "sum" or size == 2:
                # Sums of more than two statistics depend on the network's order.
                wanted = Wanted(codec, topology, DTYPES[i], size, 700 + i)
                check_sums(transport, wanted, "torch" if i or where else "numpy", where)
            comm = tw.Communicator(transport, codec, topology=topology)
            xs = inputs(codec, "float32", size, 70_000)
            own = torch.from_numpy(xs[comm.rank]).to(where) if where else xs[comm.rank]
            total = comm.all_reduce(own)
            total = total.cpu().numpy() if where else total
            assert np.abs(total - sum(xs)).max() < np.abs(xs).max() / 2
            found.append(hashlib.sha256(total.tobytes()).hexdigest())
    for name in ("thc", "omnireduce"):
        comm = tw.Communicator(transport, name, topology="in-network")
        xs = inputs(comm.codec, "float32", size, size * 9000)
        own = torch.from_numpy(xs[comm.rank]).to(where) if where else xs[comm.rank]
        for total in (comm.all_reduce(own), comm.reduce_scatter(own)):
            total = total.cpu().numpy() if where else total
            whole = np.sum(xs, 0)
            exact_sum = whole if total.size == whole.size else np.split(whole, size)[comm.rank]
            # omnireduce has room for half of the blocks.
            assert tw.error(exact_sum, total).vnmse < {"thc": 0.2, "omnireduce": 0.6}[name]
            record = comm.trace()[-1]
            assert record.algorithm == f"in-network, no sizes, {name}"
            assert 0 < record.wire_bytes < 0.6 * record.raw_bytes
        comm.check()
        again = comm.all_reduce(own)
        again = again.cpu().numpy() if where else again
        found.append(hashlib.sha256(again.tobytes()).hexdigest())
    return [*found, trained(device)]


def trained(device: Any) -> str:
    """Gradients of DDP and FSDP against sums of the communicator; their digest."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from tightwire.adapters.training import ddp, fsdp
    from tightwire.adapters.transports.torch_dist import TorchDist

    size, me = dist.get_world_size(), dist.get_rank()

    def linear() -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(100, 40 * size, bias=False, device=device)

    def step(model: Any, rank: int) -> None:
        torch.manual_seed(1 + rank)
        model(torch.randn(8, 100, device=device)).square().mean().backward()

    terms = []
    for rank in range(size):
        plain = linear()
        step(plain, rank)
        assert plain.weight.grad is not None
        terms.append(plain.weight.grad.reshape(-1))
    comm = tw.Communicator(TorchDist(dist.new_group()), "dynamiq", topology="ring")

    model = DistributedDataParallel(linear())
    hook = ddp.register(model, codec="dynamiq", topology="ring")
    step(model, me)
    wanted = comm.all_reduce(terms[me], op="mean")
    gradients = model.module.weight.grad.reshape(-1)
    assert torch.equal(gradients, wanted)
    # They have no locality, which is hard on 5 bits.
    assert (gradients - sum(terms) / size).norm() < 0.25 * gradients.norm()
    (record,) = hook.comm.trace()
    assert record.algorithm == "ring, no sizes, dynamiq"
    assert (hook.raw_bytes, hook.wire_bytes) == (record.raw_bytes, record.wire_bytes)
    assert hook.wire_bytes < 0.2 * hook.raw_bytes

    sharded = linear()
    fully_shard(sharded)
    hooks = fsdp.compress(sharded, gradients="dynamiq", topology="ring")
    # The number of the call is what is drawn by.
    comm = tw.Communicator(TorchDist(dist.new_group()), "dynamiq", topology="ring")
    step(sharded, me)
    wanted = comm.reduce_scatter(terms[me] / size)
    share: Any = sharded.weight.grad
    assert torch.equal(share.to_local().reshape(-1), wanted)
    (record,) = hooks.reduce_scatter.trace()
    assert record.algorithm == "ring, no sizes, dynamiq"
    return hashlib.sha256(gradients.cpu().numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_between_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    world_size = 4
    first, *others = launch(__file__, "between_processes", world_size, tmp_path)
    assert len(first) == 9
    assert others == [first] * (world_size - 1)


@pytest.mark.multi_gpu
def test_between_gpus(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    first, *others = launch(__file__, "between_processes", 2, tmp_path, "cuda", "default")
    assert len(first) == 9
    assert others == [first]


if __name__ == "__main__":
    join(globals(), sys.argv[1:])


@pytest.mark.parametrize("topology", HOPS)
@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_sums_of_nothing(topology: Topology, size: int) -> None:
    """Also where a hop moves several shares, none of which has elements."""
    codec = next(codec for codec in CODECS if isinstance(codec.spec, Mx))
    wanted = Wanted(codec, topology, "bfloat16", size, 0)
    run_ranks(size, lambda t: check_sums(t, wanted))
