"""When a compressed collective pays: an alpha-beta model, and its measured parameters.

After ZipCCL, section 5.2, equations 6 and 7: the native collective takes alpha + beta * d seconds
for d bytes, the compressed one alpha' + beta' * e * s * d, with e the codec's ratio and s that of
the element sizes that travel. Here ``ratio`` is e * s, and the codec's own time counts too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Collective = Literal[
    "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "send"
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Algorithm = Literal["native", "compressed", "pipelined"]

#: A path replaces a simpler one only if it is predicted to take less time by this share.
MARGIN = 0.03
#: The same for messages larger than any that was measured.
FAR_MARGIN = 0.15
#: Times the time of a call with twice the bytes or more: below, it is the host's.
FLAT = 1.5
#: Most pieces that `Model.choose` cuts a message into.
MAX_PIECES = 16
#: Sizes above this many bytes are not looked at by `Model.crossover`.
_LARGEST = 1 << 50

#: zipccl's packed bytes over raw bytes for N(0, sigma^2): specs/zipccl.md, "Why 3 bits".
RATIOS = {
    "bfloat16": 0.698,
    "float16": 0.885,
    "float32": 0.849,
    "float64": 0.880,
    "float8_e4m3fn": 0.90,
    "float8_e5m2": 0.77,
}

#: The same of huffman (fp8: N(0, 16)).
ENTROPY_RATIOS = {
    "bfloat16": 0.662,
    "float16": 0.844,
    "float32": 0.831,
    "float64": 0.881,
    "float8_e4m3fn": 0.82,
    "float8_e5m2": 0.69,
}
_BY_CODEC = {"zipccl": RATIOS, "huffman": ENTROPY_RATIOS}

_MIB = 1 << 20
#: MiB of one tensor, GB/s of encode and of decode by zipccl, checksum off, N(0, 0.02) (fp8:
#: N(0, 16)), on one H200: benchmarks/results/gpu.md, "Speed".
_H200 = {
    "bfloat16": (
        (2, 197, 252),
        (16, 915, 1143),
        (64, 1600, 1777),
        (256, 2025, 2222),
        (1024, 2164, 2382),
    ),
    "float16": (
        (2, 193, 243),
        (16, 897, 1064),
        (64, 1475, 1657),
        (256, 1816, 2032),
        (1024, 1928, 2169),
    ),
    "float32": (
        (2, 193, 281),
        (16, 953, 1173),
        (64, 1579, 1804),
        (256, 1969, 2084),
        (1024, 2090, 2177),
    ),
    "float8_e4m3fn": ((16, 800, 857), (256, 1535, 1426)),
    "float8_e5m2": ((16, 856, 892), (256, 1621, 1459)),
}
#: GB/s of encode and of decode of 64 MiB by zipccl on one thread of an AMD EPYC, checksum on, and
#: the microseconds of 1 KiB: benchmarks/results/README.md, "Speed on the CPU".
_CPU = {
    "bfloat16": (5.34, 7.11),
    "float16": (4.12, 4.87),
    "float32": (5.99, 6.51),
    "float64": (6.45, 6.19),
    "float8_e4m3fn": (3.13, 3.63),
}
_CPU_KIB_US = (24, 37)

Device = Literal["h200", "cpu"]
DEVICES: tuple[Device, ...] = get_args(Device)


@dataclass(frozen=True)
class Line:
    """Time as a straight line in the number of bytes.

    Args:
        alpha: Seconds, at least 0.
        beta: Seconds per byte, at least 0.

    Raises:
        ValueError: If a value is negative or not finite.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; allowed: finite numbers of at least 0")

    def seconds(self, nbytes: float) -> float:
        """Predicted seconds.

        Args:
            nbytes: Number of bytes.
        """
        return self.alpha + self.beta * nbytes

    def times(self, calls: float, nbytes: float) -> Line:
        """The line of several calls that together take some bytes for each byte of a message.

        Args:
            calls: Number of calls.
            nbytes: Their bytes for each byte of the message.
        """
        return Line(self.alpha * calls, self.beta * nbytes)


@dataclass(frozen=True)
class Link(Line):
    """The connection of a rank to the others.

    Args:
        alpha: Latency of a message, in seconds.
        beta: Seconds per byte: 1 / speed.
        gap: Seconds from one message of a rank to its next (LogP's g). None: ``alpha``, as if each
            waited for the one before (Hockney).

    Raises:
        ValueError: If a value is negative or not finite.
    """

    gap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gap is not None:
            Line(self.gap, 0.0)

    def exchange(self, peers: int, nbytes: float, rounds: int = 1) -> float:
        """Seconds in which a rank exchanges data with several others.

        Args:
            peers: Number of other ranks.
            nbytes: Bytes that a rank sends in all.
            rounds: Number of rounds, each of which waits for the one before and has a message to
                each peer.
        """
        if peers == 0:
            return 0.0
        gap = self.alpha if self.gap is None else self.gap
        return rounds * (self.alpha + (peers - 1) * gap) + self.beta * nbytes


@dataclass(frozen=True)
class Node:
    """The ranks of one machine, as a ``NodeCommunicator`` uses them.

    Args:
        size: Number of ranks.
        link: The link of each rank to the others of the machine.

    Raises:
        ValueError: If ``size`` is below 1.
    """

    size: int
    link: Link

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}; allowed: at least 1")

    def share(self, collective: Collective) -> float:
        """Find how much of a rank's input goes into the call between nodes.

        Args:
            collective: Name of the collective.

        Returns:
            A share of 1.
        """
        summed = collective in ("reduce_scatter", "all_reduce", "broadcast")
        return 1 / self.size if summed else 1.0

    def within(self, collective: Collective, nodes: int) -> Line:
        """Find the time of the calls within a node, which are native.

        Args:
            collective: Name of the collective.
            nodes: Number of nodes.

        Returns:
            Their line, by bytes of a rank's input.
        """
        peers = self.size - 1
        others = peers / self.size
        # Calls, and bytes that each rank sends in all of them; of a broadcast two are in the root's
        # node alone.
        calls, nbytes = {
            "all_gather": (1, nodes * peers),
            "all_to_all": (1, others),
            "reduce_scatter": (1, others),
            "all_reduce": (2, 2 * others),
            "broadcast": (3, 3 * others),
            "send": (0, 0),
        }[collective]
        if not peers:
            return Line(0.0, 0.0)
        return Line(self.link.exchange(peers, 0, calls), self.link.beta * nbytes)


def fit(samples: Sequence[tuple[float, float]]) -> Line:
    """Fit a line to measurements, with alpha and beta at least 0.

    The line has the least sum of absolute relative errors, so small messages count as much as large
    ones, and a few slow samples change little.

    Args:
        samples: Pairs of bytes and seconds.

    Returns:
        The line.

    Raises:
        ValueError: If there are fewer than two sizes, or a value is negative, zero seconds or not
            finite.
    """
    pairs = np.asarray(samples, np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"samples have shape {pairs.shape}; needed: pairs of bytes and seconds")
    nbytes, seconds = pairs.T
    if not (np.isfinite(pairs).all() and (nbytes >= 0).all() and (seconds > 0).all()):
        raise ValueError("a sample has negative bytes, or seconds that are not above 0")
    if len(set(nbytes.tolist())) < 2:
        raise ValueError(f"samples have sizes {sorted(set(nbytes.tolist()))}; needed: two or more")
    scale = nbytes.max()
    # Rows of a @ (alpha, beta * scale) = 1; reweighted least squares find the least absolute sum.
    a = np.stack([1 / seconds, nbytes / scale / seconds], axis=1)
    weights = np.ones(len(a))
    x = np.zeros(2)
    for _ in range(50):
        x = _least_squares(a, weights)
        weights = 1 / np.maximum(abs(a @ x - 1), 1e-4)
    return Line(float(x[0]), float(x[1] / scale))


def _least_squares(a: Floats, weights: Floats) -> Floats:
    """The x of shape (2,), at least 0, with the least sum of weights * (a @ x - 1)^2."""
    (aa, ab), (_, bb) = (a.T * weights) @ a
    ra, rb = a.T @ weights
    det = aa * bb - ab * ab
    if det > 0:
        both: Floats = np.array([ra * bb - rb * ab, rb * aa - ra * ab]) / det
        if (both >= 0).all():
            return both
    # Else the best point lies on an axis.
    edges: list[Floats] = [np.array([ra / aa, 0.0]), np.array([0.0, rb / bb])]
    return min(edges, key=lambda x: float(weights @ (a @ x - 1) ** 2))


@dataclass(frozen=True)
class Choice:
    """What to do with a message. Times are predicted.

    Attributes:
        algorithm: ``"native"``, ``"compressed"`` or ``"pipelined"``.
        pieces: Number of pieces; 1 unless pipelined.
        seconds: Seconds of this choice.
        native_seconds: Seconds of the native path.
        reason: Why, for people.
    """

    algorithm: Algorithm
    pieces: int
    seconds: float
    native_seconds: float
    reason: str


class Largest(NamedTuple):
    """The largest measurement of the compressed path.

    Attributes:
        nbytes: Bytes of the input.
        seconds: Seconds it took.
        ratio: Ratio of the data.
    """

    nbytes: float
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Model:
    """Times of one collective in one group, in seconds, by the bytes of one rank's input.

    Source: ZipCCL, section 5.2, equations 6 and 7.

    Args:
        native: The uncompressed path, by bytes of the input.
        wire: The transfer of the compressed path, by bytes that travel for an input: nbytes *
            ratio.
        encode: All encoding of a rank, by bytes of the input.
        decode: All decoding of a rank, by bytes of the input.
        slack: Measured over predicted time of the pipelined path.
        largest: The largest measurement, beyond which time grows in proportion to bytes; None: the
            lines hold everywhere.
        reach: Largest measured input, in bytes; None: no limit.
        inside: Calls within nodes, which nothing overlaps, by bytes of the input; the native path
            has them in its line.
    """

    native: Line
    wire: Line
    encode: Line
    decode: Line
    #: How many times as long as `pipelined` would say several pieces take, by measurement.
    slack: float = 1.0
    #: The largest input that was measured, if the host's time says nothing of larger ones.
    largest: Largest | None = None
    #: Bytes of the largest input that was measured at all.
    reach: int | None = None
    inside: Line = Line(0.0, 0.0)

    @classmethod
    def of(
        cls,
        collective: Collective,
        world: int,
        link: Link,
        encode: Line,
        decode: Line,
        node: Node | None = None,
    ) -> Model:
        """Model a group on equal links, without a measurement of the collective.

        Native and compressed path move the same bytes apart from the ratio (broadcast: a chain
        against scatter and all-gather), the compressed one in the rounds of ``Communicator``: chunk
        descriptors, static parts, dynamic parts.

        Args:
            collective: Name of the collective.
            world: Number of ranks.
            link: The link of each rank.
            encode: One call of the codec, by bytes of the tensor.
            decode: One call of the codec, by bytes of the tensor.
            node: For ranks of several nodes, of which ``link`` is the one between nodes. None: all
                links are equal.

        Raises:
            ValueError: If the collective is unknown, ``world`` is below 1, or nodes are uneven.
        """
        if collective not in COLLECTIVES:
            raise ValueError(f"collective is {collective!r}; allowed: {COLLECTIVES}")
        if world < 1:
            raise ValueError(f"world is {world}; allowed: at least 1")
        if node is not None:
            return cls._of_nodes(collective, world, link, encode, decode, node)
        others = (world - 1) / world
        # Rounds and bytes moved of the native path, of the compressed one; encoded and decoded in
        # how many calls, and how many bytes: all for each byte of one rank's input.
        native, wire, encoded, decoded = {
            "all_gather": ((1, world - 1), (3, world - 1), (1, 1), (1, world)),
            "all_to_all": ((1, others), (3, others), (1, 1), (1, 1)),
            "reduce_scatter": ((1, others), (3, others), (1, 1), (world, 1)),
            "all_reduce": ((2, 2 * others), (6, 2 * others), (2, 1 + 1 / world), (world + 1, 2)),
            "broadcast": ((1, 1), (4, 2 * others), (1, 1), (1, 1)),
            "send": ((1, 1), (2, 1), (1, 1), (1, 1)),
        }[collective]
        peers = min(world - 1, 1) if collective == "send" else world - 1

        def line(rounds: int, nbytes: float) -> Line:
            return Line(link.exchange(peers, 0, rounds), link.beta * nbytes if peers else 0.0)

        return cls(line(*native), line(*wire), encode.times(*encoded), decode.times(*decoded))

    @classmethod
    def _of_nodes(
        cls,
        collective: Collective,
        world: int,
        link: Link,
        encode: Line,
        decode: Line,
        node: Node,
    ) -> Model:
        """`of` for nodes: the calls between nodes, of a share of the input, and those within."""
        if world % node.size:
            raise ValueError(f"world is {world}; allowed: multiples of the node's {node.size}")
        nodes, share = world // node.size, node.share(collective)
        inside = node.within(collective, nodes)
        between = cls.of(collective, nodes, link, encode, decode)
        native, wire, encoding, decoding = (
            line.times(1, share)
            for line in (between.native, between.wire, between.encode, between.decode)
        )
        whole = Line(native.alpha + inside.alpha, native.beta + inside.beta)
        return cls(whole, wire, encoding, decoding, inside=inside)

    @classmethod
    def measured(
        cls,
        native: Sequence[tuple[float, float]],
        compressed: Sequence[tuple[float, float]],
        ratio: float,
        pipelined: tuple[int, int, float] | None = None,
    ) -> Model:
        """Model a group by measurements of both paths; see ``fit``.

        For data of the measured ratio the model gives the line through the samples. For other
        ratios it assumes that the compressed path spends on the wire what the native one would for
        as many bytes, or all of its time if that is less, and that the rest is the codec's and
        depends on the tensor's bytes alone. That rest, half encoding and half decoding, includes
        extra rounds of messages. Where the largest compressed input took less than FLAT times as
        long as the one before it, with twice its bytes or more, the host's time hides what a byte
        costs: beyond it time grows in proportion to bytes.

        Args:
            native: Pairs of bytes of one rank's input and seconds.
            compressed: The same of the compressed path.
            ratio: Ratio of the data that the compressed path was measured with.
            pipelined: A measurement in pieces: bytes, pieces, seconds; it counts if it took longer
                than predicted.

        Raises:
            ValueError: If the samples do not make a line.
        """
        _check(0, ratio)
        plain, whole = fit(native), fit(compressed)
        wire = Line(min(plain.alpha, whole.alpha), min(plain.beta, whole.beta / ratio))
        # max: rounding.
        rest = Line(whole.alpha - wire.alpha, max(whole.beta - wire.beta * ratio, 0.0))
        (before, less), (nbytes, most) = sorted(compressed)[-2:]
        flat = nbytes >= 2 * before and most < FLAT * less
        largest = Largest(nbytes, most, ratio) if flat else None
        halves = rest.times(0.5, 0.5)
        model = cls(plain, wire, halves, halves, largest=largest, reach=int(nbytes))
        if pipelined is None:
            return model
        size, pieces, seconds = pipelined
        slack = max(1.0, seconds / model.pipelined(size, ratio, pieces))
        return replace(model, slack=slack)

    def compressed(self, nbytes: int, ratio: float) -> float:
        """Seconds of encoding, transfer and decoding, one after the other.

        Args:
            nbytes: Bytes of one rank's input.
            ratio: Packed over raw bytes.
        """
        return self.pipelined(nbytes, ratio, 1)

    def pipelined(self, nbytes: int, ratio: float, pieces: int) -> float:
        """Seconds in equal pieces, one in transfer while others are encoded and decoded.

        Encoding and decoding share a processor, so the slower of wire and codec sets the pace.

        Args:
            nbytes: Bytes of one rank's input.
            ratio: Packed over raw bytes.
            pieces: Number of pieces.

        Raises:
            ValueError: If a value is out of range.
        """
        _check(nbytes, ratio, pieces)
        each = nbytes / pieces
        wire = self.wire.seconds(each * ratio)
        codec = self.encode.seconds(each) + self.decode.seconds(each)
        slack = self.slack if pieces > 1 else 1.0
        inside = self.inside.seconds(nbytes)
        return slack * (wire + codec + (pieces - 1) * max(wire, codec)) + inside

    def _behind(self, nbytes: int) -> float:
        """By how much the compressed path exceeds its line beyond `largest`."""
        if self.largest is None or nbytes <= self.largest.nbytes:
            return 1.0
        size, seconds, ratio = self.largest
        return max(1.0, seconds * nbytes / size / self.compressed(nbytes, ratio))

    def choose(self, nbytes: int, ratio: float, max_pieces: int = MAX_PIECES) -> Choice:
        """The path to take; ranks with equal models and arguments choose the same.

        Native, compressed, and then 2, 4, ... pieces are compared: each must beat the choice so far
        by MARGIN, or by FAR_MARGIN where ``nbytes`` is more than was measured. The choice is never
        predicted slower than native.

        Args:
            nbytes: Bytes of one rank's input.
            ratio: Packed over raw bytes.
            max_pieces: Most pieces; 1 for a collective that cannot be cut.

        Returns:
            The choice.

        Raises:
            ValueError: If a value is out of range.
        """
        _check(nbytes, ratio, max_pieces)
        behind = self._behind(nbytes)
        margin = MARGIN if self.reach is None or nbytes <= self.reach else FAR_MARGIN
        native = best = self.native.seconds(nbytes)
        chosen = 0
        found = {}
        pieces = 1
        # A piece has a byte or more.
        while pieces <= max(min(max_pieces, nbytes), 1):
            seconds = found[pieces] = behind * self.pipelined(nbytes, ratio, pieces)
            if seconds < best * (1 - margin):
                best, chosen = seconds, pieces
            pieces *= 2
        if not chosen:
            fastest = min(found, key=found.__getitem__)
            nearest = f"{_path(fastest)} {duration(found[fastest])}"
            reason = f"{nearest} not {margin:.0%} below native {duration(native)}"
            return Choice("native", 1, native, native, reason)
        algorithm: Algorithm = "pipelined" if chosen > 1 else "compressed"
        reason = f"{_path(chosen)} {duration(best)} < native {duration(native)}"
        return Choice(algorithm, chosen, best, native, reason)

    def crossover(self, ratio: float, max_pieces: int = MAX_PIECES) -> int | None:
        """The size from which on ``choose`` compresses.

        Found by halving from 1 PiB on, so gaps between two powers of two are not seen.

        Args:
            ratio: Packed over raw bytes.
            max_pieces: As in ``choose``.

        Returns:
            Bytes; None if it does not compress at 1 PiB.

        Raises:
            ValueError: If a value is out of range.
        """

        def compresses(nbytes: int) -> bool:
            return self.choose(nbytes, ratio, max_pieces).algorithm != "native"

        high = _LARGEST
        if not compresses(high):
            return None
        while high and compresses(high // 2):
            high //= 2
        low = high // 2  # native, or equal to high and 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if compresses(middle) else (middle, high)
        return high


class Ratios:
    """Running ratios of compressed tensors, by codec, dtype and size to a power of two.

    Call ``update`` after each compressed call and ``ratio`` before the next. Answers follow from
    the calls alone, so ranks that make the same ones get the same answers: update only with values
    that all ranks share, such as the sum of all sizes in an all-gather.

    Args:
        weight: Weight of the newest value in the exponentially weighted mean, above 0, at most 1.
        patience: Number of questions without an update after which a mean is forgotten, so that
            data that changed are noticed where nothing is compressed.

    Raises:
        ValueError: If a value is out of range.
    """

    def __init__(self, weight: float = 0.25, patience: int = 1000) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight is {weight}; allowed: above 0, at most 1")
        if patience < 1:
            raise ValueError(f"patience is {patience}; allowed: at least 1")
        self._weight = weight
        self._patience = patience
        #: The mean, and how often it has been asked for since it changed.
        self._means: dict[tuple[str, str, int], tuple[float, int]] = {}

    def update(self, codec: str, dtype: str, nbytes: int, ratio: float) -> None:
        """Take the ratio of a tensor into account.

        Args:
            codec: Name of the codec.
            dtype: Name of the dtype.
            nbytes: Bytes of the tensor.
            ratio: Packed over raw bytes.
        """
        _check(nbytes, ratio)
        key = codec, dtype, nbytes.bit_length()
        mean, _ = self._means.get(key, (ratio, 0))
        self._means[key] = mean + self._weight * (ratio - mean), 0

    def ratio(self, codec: str, dtype: str, nbytes: int) -> float:
        """The expected ratio of a tensor, to two decimals; without a mean ``expected_ratio``.

        Args:
            codec: Name of the codec.
            dtype: Name of the dtype.
            nbytes: Bytes of the tensor.
        """
        key = codec, dtype, nbytes.bit_length()
        if key not in self._means:
            return expected_ratio(codec, dtype)
        mean, asked = self._means[key]
        if asked + 1 >= self._patience:
            del self._means[key]
        else:
            self._means[key] = mean, asked + 1
        return max(round(mean, 2), 0.01)


def expected_ratio(codec: str, dtype: str) -> float:
    """Packed over raw bytes of normally distributed values; 1.0 for codecs without a promise.

    Args:
        codec: Name of the codec.
        dtype: Name of the dtype.
    """
    return _BY_CODEC.get(codec, {}).get(dtype.replace("fnuz", "fn"), 1.0)


@functools.cache
def codec_lines(device: Device, dtype: str) -> tuple[Line, Line]:
    """Times of zipccl for one tensor, from the recorded benchmarks.

    Args:
        device: A device of the records; ``"cpu"`` is one thread.
        dtype: Name of the dtype.

    Returns:
        The lines of encoding and decoding, by bytes of the tensor.

    Raises:
        ValueError: If nothing is recorded.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; allowed: {DEVICES}")
    recorded = list(_H200 if device == "h200" else _CPU)
    if dtype not in recorded:
        raise ValueError(f"no speed of {dtype} on {device} is recorded; there are {recorded}")
    if device == "h200":
        table = _H200[dtype]
        encode = [(n * _MIB, n * _MIB / (speed * 1e9)) for n, speed, _ in table]
        decode = [(n * _MIB, n * _MIB / (speed * 1e9)) for n, _, speed in table]
        return fit(encode), fit(decode)
    kib = [(1024, us * 1e-6) for us in _CPU_KIB_US]
    large = [(64 * _MIB, 64 * _MIB / (speed * 1e9)) for speed in _CPU[dtype]]
    return fit([kib[0], large[0]]), fit([kib[1], large[1]])


def duration(seconds: float) -> str:
    """A time as people read it: three digits in s, ms or us.

    Args:
        seconds: The time.
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds / 1e-6:.3g} us"


def _path(pieces: int) -> str:
    return "compressed" if pieces == 1 else f"pipelined in {pieces} pieces"


def _check(nbytes: int, ratio: float, pieces: int = 1) -> None:
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; allowed: at least 0")
    if not (ratio > 0 and math.isfinite(ratio)):
        raise ValueError(f"ratio is {ratio}; allowed: finite numbers above 0")
    if pieces < 1:
        raise ValueError(f"pieces is {pieces}; allowed: at least 1")
