"""Simulated collectives, up to 100,000 ranks: time, bytes and error growth of each algorithm.

Times are those of the alpha-beta model on equal links without contention (Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). vNMSE is that of
DynamiQ, section 5: ``E[|X - X'|^2] / |X|^2`` of the result of a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ...codec import Codec
from .cost import Line, Link, Node

Collective = Literal["all_reduce", "all_gather", "all_to_all"]
Between = Literal["ring", "two_shot", "butterfly"]
Algorithm = Literal["ring", "two_shot", "butterfly", "hierarchical", "direct"]
ALGORITHMS: dict[Collective, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring", "two_shot", "butterfly", "hierarchical"),
    "all_gather": ("ring", "direct", "hierarchical"),
    "all_to_all": ("direct", "hierarchical"),
}
WORLDS = (8, 64, 1024, 16384, 100_000)

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Coding:
    """The effect of a codec on a collective.

    Args:
        ratio: Packed over raw bytes.
        encode: Time of one call, by raw bytes.
        decode: Time of one call, by raw bytes.
        error: vNMSE of one encoding; 0.0 if it is lossless.
        rounds: Messages of an exchange; more than one where sizes are sent before the data.

    Raises:
        ValueError: If a value is out of range.
    """

    ratio: float
    encode: Line
    decode: Line
    error: float = 0.0
    rounds: int = 1

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and math.isfinite(self.ratio)):
            raise ValueError(f"ratio is {self.ratio}; allowed: finite numbers above 0")
        if not (self.error >= 0 and math.isfinite(self.error)):
            raise ValueError(f"error is {self.error}; allowed: finite numbers of at least 0")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; allowed: at least 1")


#: No codec: bytes travel as they are.
NATIVE = Coding(1.0, Line(0.0, 0.0), Line(0.0, 0.0))


@dataclass(frozen=True)
class Result:
    """The outcome of a simulated collective.

    Attributes:
        seconds: Its time.
        wire_bytes: Bytes that the busiest rank sends over the network, without those within a node.
        vnmse: vNMSE of the result.
    """

    seconds: float
    wire_bytes: float
    vnmse: float


class Row(NamedTuple):
    """One row of ``table``.

    Attributes:
        algorithm: The algorithm.
        world: Number of ranks.
        native: Without a codec.
        compressed: With it.
    """

    algorithm: Algorithm
    world: int
    native: Result
    compressed: Result


def rounding_error(significand: int) -> float:
    """The vNMSE of rounding to nearest.

    With errors uniform within an ulp, ulp^2 / 12, and the scale's logarithm uniform within a
    binade, E[1 / m^2] = 3 / (8 ln 2). Additions of numbers of one type drop few bits, so ties are
    frequent: they round up to a fifth worse.

    Args:
        significand: Bits of the significand with the hidden one: bfloat16 8, float16 11, float32
            24.
    """
    return 4.0 ** (1 - significand) / (32 * math.log(2))


def simulate(
    algorithm: Algorithm,
    world: int,
    nbytes: int,
    link: Link,
    codec: Coding = NATIVE,
    *,
    collective: Collective = "all_reduce",
    rounding: float = 0.0,
    node: Node | None = None,
    between: Between = "two_shot",
) -> Result:
    """Simulate one collective.

    For the error of an all-reduce, inputs of all ranks are independent and have equal energy, and
    errors are unbiased and independent of each other.

    Args:
        algorithm: The algorithm. ``"hierarchical"`` is that of a ``NodeCommunicator``.
        world: Number of ranks.
        nbytes: Bytes of the input of each rank.
        link: The link of each rank.
        codec: The codec.
        collective: Name of the collective.
        rounding: vNMSE of rounding after each addition, see ``rounding_error``.
        node: Needed by ``"hierarchical"``; its size must divide ``world``.
        between: Algorithm between nodes.

    Returns:
        The outcome.

    Raises:
        ValueError: If a value is not allowed.
    """
    _check(algorithm, collective, world, node, between)
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; allowed: at least 0")
    if algorithm == "hierarchical":
        assert node is not None
        return _hierarchical(collective, world, nbytes, link, codec, rounding, node, between)
    if collective != "all_reduce":
        return _forwarded(algorithm, collective, world, nbytes, link, codec)
    return _flat(algorithm, world, nbytes, link, codec, rounding, 0.0)


def table(
    collective: Collective,
    nbytes: int,
    link: Link,
    codec: Coding,
    worlds: Sequence[int] = WORLDS,
    *,
    rounding: float = 0.0,
    node: Node | None = None,
    between: Between = "two_shot",
) -> list[Row]:
    """Simulate every algorithm of a collective at every number of ranks, native and compressed.

    "hierarchical" is left out without a node, and where its size does not divide the number of
    ranks.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the input of each rank.
        link: The link of each rank.
        codec: The codec.
        worlds: Numbers of ranks.
        rounding: As in ``simulate``.
        node: As in ``simulate``.
        between: As in ``simulate``.

    Raises:
        ValueError: If a value is not allowed.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"collective is {collective!r}; allowed: {[*ALGORITHMS]}")
    rows = []
    for algorithm in ALGORITHMS[collective]:
        for world in worlds:
            if algorithm == "hierarchical" and (node is None or world % node.size):
                continue
            native, compressed = (
                simulate(
                    algorithm,
                    world,
                    nbytes,
                    link,
                    coding,
                    collective=collective,
                    rounding=rounding,
                    node=node,
                    between=between,
                )
                for coding in (NATIVE, codec)
            )
            rows.append(Row(algorithm, world, native, compressed))
    return rows


def _check(
    algorithm: str, collective: Collective, world: int, node: Node | None, between: str
) -> None:
    if collective not in ALGORITHMS:
        raise ValueError(f"collective is {collective!r}; allowed: {[*ALGORITHMS]}")
    if algorithm not in ALGORITHMS[collective]:
        allowed = ALGORITHMS[collective]
        raise ValueError(f"algorithm of {collective} is {algorithm!r}; allowed: {allowed}")
    if world < 1:
        raise ValueError(f"world is {world}; allowed: at least 1")
    if algorithm != "hierarchical":
        return
    if node is None:
        raise ValueError('algorithm "hierarchical" needs a node')
    if world % node.size:
        raise ValueError(f"world is {world}; allowed: multiples of the node's {node.size}")
    if between not in get_args(Between):
        raise ValueError(f"between is {between!r}; allowed: {get_args(Between)}")


def _forwarded(
    algorithm: Algorithm,
    collective: Collective,
    world: int,
    nbytes: float,
    link: Link,
    codec: Coding,
) -> Result:
    """All-gather and all-to-all: every value is encoded once, and forwarded as it came."""
    gather = collective == "all_gather"
    sent = nbytes * codec.ratio * ((world - 1) if gather else (world - 1) / world)
    if algorithm == "ring":
        wire = (world - 1) * link.exchange(1, nbytes * codec.ratio, codec.rounds)
    else:
        wire = link.exchange(world - 1, sent, codec.rounds)
    coding = codec.encode.seconds(nbytes) + codec.decode.seconds(nbytes * (world if gather else 1))
    return Result(wire + coding, sent, codec.error)


def _flat(
    algorithm: Algorithm,
    world: int,
    nbytes: float,
    link: Link,
    codec: Coding,
    rounding: float,
    start: float,
) -> Result:
    """An all-reduce over one kind of link; `start` is the relative error of the inputs."""
    if world == 1:
        return Result(0.0, 0.0, start)
    seconds, sent = {"ring": _ring, "two_shot": _two_shot, "butterfly": _butterfly}[algorithm](
        world, nbytes, link, codec
    )
    error = {"ring": error_ring, "two_shot": error_two_shot, "butterfly": error_butterfly}
    return Result(seconds, sent, error[algorithm](world, codec.error, rounding, start))


def _ring(world: int, nbytes: float, link: Link, codec: Coding) -> tuple[float, float]:
    share = nbytes / world
    hop = link.exchange(1, share * codec.ratio, codec.rounds)
    # Partial sums are decoded, added to and encoded at every rank; the sums only pass through.
    scatter = (world - 1) * (codec.encode.seconds(share) + hop + codec.decode.seconds(share))
    gather = codec.encode.seconds(share) + (world - 1) * hop + codec.decode.seconds(nbytes)
    return scatter + gather, 2 * (world - 1) * share * codec.ratio


def _two_shot(world: int, nbytes: float, link: Link, codec: Coding) -> tuple[float, float]:
    share = nbytes / world
    sent = (world - 1) * share * codec.ratio
    exchange = link.exchange(world - 1, sent, codec.rounds)
    scatter = codec.encode.seconds(nbytes) + exchange + codec.decode.seconds(nbytes)
    gather = codec.encode.seconds(share) + exchange + codec.decode.seconds(nbytes)
    return scatter + gather, 2 * sent


def _butterfly(world: int, nbytes: float, link: Link, codec: Coding) -> tuple[float, float]:
    levels = world.bit_length() - 1
    seconds = sent = 0.0
    for level in range(1, levels + 1):
        half = nbytes / 2**level
        hop = link.exchange(1, half * codec.ratio, codec.rounds)
        # Once when sums are halved, once when they are gathered.
        seconds += codec.encode.seconds(half) + 2 * hop + codec.decode.seconds(half)
        sent += 2 * half * codec.ratio
    seconds += codec.encode.seconds(nbytes / 2**levels) + codec.decode.seconds(nbytes)
    if world > 2**levels:
        # The ranks beyond a power of two hand their input to another one, and get the result.
        hop = link.exchange(1, nbytes * codec.ratio, codec.rounds)
        seconds += codec.encode.seconds(nbytes) + 2 * hop + 2 * codec.decode.seconds(nbytes)
        sent += nbytes * codec.ratio
    return seconds, sent


def _hierarchical(
    collective: Collective,
    world: int,
    nbytes: int,
    link: Link,
    codec: Coding,
    rounding: float,
    node: Node,
    between: Between,
) -> Result:
    nodes = world // node.size
    inside = node.within(collective, nodes).seconds(nbytes)
    share = nbytes * node.share(collective)
    if collective == "all_reduce":
        start = error_two_shot(node.size, 0.0, rounding)
        across = _flat(between, nodes, share, link, codec, rounding, start)
    elif nodes == 1:
        across = Result(0.0, 0.0, 0.0)
    else:
        across = _forwarded("direct", collective, nodes, share, link, codec)
    # What an all-to-all leaves in a node is not encoded.
    coded = (nodes - 1) / nodes if collective == "all_to_all" else 1.0
    return Result(inside + across.seconds, across.wire_bytes, coded * across.vnmse)


# Error growth. The sum of k inputs has energy k; `noise` is the energy of the error in it.


def error_ring(world: int, error: float, rounding: float = 0.0, start: float = 0.0) -> float:
    """The vNMSE of a ring all-reduce: partial sums are encoded by each rank except the last.

    To first order, with error alone: error * (world + 1) / 2. It compounds: infinity if it is above
    all floats.

    Args:
        world: Number of ranks.
        error: vNMSE of one encoding.
        rounding: vNMSE of one addition.
        start: vNMSE of the inputs.
    """
    noise = start
    for k in range(2, world + 1):
        if noise > 1e300:
            return math.inf
        noise += error * (k - 1 + noise) + start
        noise += rounding * (k + noise)
    return _spread(world, error, noise)


def error_two_shot(world: int, error: float, rounding: float = 0.0, start: float = 0.0) -> float:
    """The vNMSE of a two-shot all-reduce: inputs are encoded, added in order, the sum is encoded.

    With error alone: 2 * error + error^2.

    Args:
        world: Number of ranks.
        error: vNMSE of one encoding.
        rounding: vNMSE of one addition.
        start: vNMSE of the inputs.
    """
    each = start + error * (1 + start) if world > 1 else start
    noise = each
    for k in range(2, world + 1):
        noise += each
        noise += rounding * (k + noise)
    return _spread(world, error, noise)


def error_butterfly(world: int, error: float, rounding: float = 0.0, start: float = 0.0) -> float:
    """The vNMSE of recursive halving and doubling: each level encodes half of a partial sum.

    To first order, with error alone, for 2^L ranks: error * (L / 2 + 1). With another number of
    ranks those beyond are added first, and the mean over all partial sums is followed.

    Args:
        world: Number of ranks.
        error: vNMSE of one encoding.
        rounding: vNMSE of one addition.
        start: vNMSE of the inputs.
    """
    levels = world.bit_length() - 1
    parts = 2**levels
    extra = (world - parts) / parts
    size = 1 + extra
    noise = start + extra * (start + error * (1 + start))
    noise += extra * rounding * (2 + 2 * start)
    for _ in range(levels):
        noise += noise + error * (size + noise)
        size *= 2
        noise += rounding * (size + noise)
    return _spread(world, error, noise)


def _spread(world: int, error: float, noise: float) -> float:
    """The vNMSE once the sum of all has been encoded for the other ranks."""
    if world > 1:
        noise += error * (world + noise)
    return noise / world


class Found(NamedTuple):
    """What ``monte_carlo`` has found.

    Attributes:
        wire_bytes: Bytes that the busiest rank has sent over the network, without those within a
            node.
        vnmse: vNMSE of the results.
    """

    wire_bytes: int
    vnmse: float


def monte_carlo(
    algorithm: Algorithm,
    inputs: Floats,
    codec: str | Codec,
    *,
    collective: Collective = "all_reduce",
    node_size: int = 1,
    between: Between = "two_shot",
) -> Found:
    """Have the library itself make a collective of given inputs, by a thread for each rank.

    Args:
        algorithm: The algorithm, as in ``simulate``; of an all-gather ``"direct"`` or
            ``"hierarchical"``.
        inputs: Shape ``(ranks, n)``, of a dtype of the codec.
        codec: The codec, of nodes that between them.
        collective: Name of the collective.
        node_size: Ranks of a node, for ``"hierarchical"``.
        between: Algorithm between nodes.

    Raises:
        ValueError: If a value is not allowed, or the codec does not sum like this.
    """
    from ..transports.threads import run_grid
    from .communicator import Communicator
    from .nodes import NodeCommunicator

    world, nodes = len(inputs), algorithm == "hierarchical"
    _check(algorithm, collective, world, Node(node_size, Link(0.0, 0.0)), between)
    if collective == "all_gather" and algorithm == "ring":
        raise ValueError('algorithm of all_gather is "ring", which the library leaves to networks')
    size = node_size if nodes else 1
    by: Any = "two-shot"
    if collective == "all_reduce":
        by = (between if nodes else algorithm).replace("_", "-")

    def task(near: Any, far: Any) -> tuple[Floats, int]:
        comm: Any = Communicator(far, codec, topology=by)
        if nodes:
            comm = NodeCommunicator(Communicator(near, algorithm="native"), comm)
        found = getattr(comm, collective)(inputs[comm.rank])
        return found, comm.trace()[-1].wire_bytes

    results = run_grid(world // size, size, task)
    exact = np.asarray(inputs, np.float64)
    if collective == "all_reduce":
        wanted = np.stack([exact.sum(axis=0)] * world)
    elif collective == "all_gather":
        wanted = np.stack([exact.reshape(-1)] * world)
    else:
        wanted = exact.reshape(world, world, -1).swapaxes(0, 1).reshape(world, -1)
    error = np.stack([found for found, _ in results]).astype(np.float64) - wanted
    vnmse = float((error**2).sum() / (wanted**2).sum())
    return Found(max(wire for _, wire in results), vnmse)
