"""What collectives of a lossy codec must give: encoding and decoding by hand, and plain sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import tightwire as tw
from ranks import exact
from tightwire.adapters.collectives.calls import rounding_key
from tightwire.adapters.transports.base import Transport
from tightwire.arrays import Target, from_bits
from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]

#: Of every lossy codec the forms that differ in what a Communicator has to do for them.
CODECS = (
    tw.codec("mx"),
    tw.codec("mx", element="e2m1", scale_rule="ceil"),
    tw.codec("mx", scale_rule="agreed"),
    tw.codec("nvfp4"),
    tw.codec("taco"),
    tw.codec("taco", format="int8", rounding="stochastic", block=32),
    tw.codec("sdp4bit", rounding="stochastic"),
    tw.codec("tahquant", hidden=48),
    tw.codec("dynamiq"),
)
DTYPES = ("bfloat16", "float32", "float16")


class Reference:
    """The same calls as a Communicator's, made of the inputs of all ranks; counts calls like it."""

    def __init__(self, codec: tw.Codec, world_size: int, seed: int) -> None:
        self.codec, self.size, self.seed = codec, world_size, seed
        self.sequence = 0

    def coded(self, x: Array, chunks: int, rank: int, encoding: int, call: int) -> Array:
        """What others decode of encoding number `encoding` of rank `rank` in a call."""
        if self.size == 1:
            # Nobody does.
            return x
        key = rounding_key(self.seed, call, encoding, rank, self.size)
        found: Array = tw.decode(bytes(self.codec.encode(x, chunks=chunks, key=key)))
        return found

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence - 1

    def _gathered(self, xs: Sequence[Array], spans: Sequence[slice], call: int, at: int) -> Array:
        whole = [
            np.concatenate([self.coded(x[s], 1, r, at + k, call) for k, s in enumerate(spans)])
            for r, x in enumerate(xs)
        ]
        return np.concatenate(whole)

    def _swapped(self, xs: Sequence[Array], spans: Sequence[slice], call: int) -> Array:
        """What comes from each rank for each rank: shape (from, to, n)."""
        rows = np.stack([x.reshape(self.size, -1) for x in xs])
        found = np.empty_like(rows)
        for k, s in enumerate(spans):
            for r, row in enumerate(rows):
                piece = self.coded(row[:, s].reshape(-1), self.size, r, k, call)
                found[r, :, s] = piece.reshape(self.size, -1)
        return found

    def _sums(self, xs: Sequence[Array], spans: Sequence[slice], call: int) -> Array:
        """The sums of every rank's share, float32, shape (ranks, n)."""
        parts = self._swapped(xs, spans, call)
        total = np.full(parts.shape[1:], -0.0, np.float32)
        for part in parts:
            total += part.astype(np.float32)
        return total

    def all_gather(self, xs: Sequence[Array], spans: Sequence[slice]) -> Array:
        return self._gathered(xs, spans, self._next(), 0)

    def all_to_all(self, xs: Sequence[Array], spans: Sequence[slice]) -> Array:
        """Of all ranks, shape (ranks, ranks * n)."""
        return self._swapped(xs, spans, self._next()).swapaxes(0, 1).reshape(self.size, -1)

    def reduce_scatter(self, xs: Sequence[Array], spans: Sequence[slice]) -> Array:
        """Of all ranks, float32, shape (ranks, n)."""
        return self._sums(xs, spans, self._next())

    def all_reduce(self, xs: Sequence[Array], spans: Sequence[slice]) -> Array:
        call, dtype = self._next(), xs[0].dtype
        main = xs[0].size // self.size * self.size
        total = self._sums([x[:main] for x in xs], spans, call).astype(dtype)
        gathered = self._gathered(list(total), spans, call, len(spans))
        rest = np.full(xs[0].size - main, -0.0, np.float32)
        for x in xs:
            rest += x[main:].astype(np.float32)
        return np.concatenate([gathered, rest.astype(dtype)])

    def broadcast(self, xs: Sequence[Array], root: int) -> Array:
        return self.coded(xs[root], self.size, root, 0, self._next())


def inputs(codec: tw.Codec, dtype: str, world_size: int, n: int) -> list[Array]:
    """Of every rank n finite values, not all of one size, and some zeros."""
    rng = np.random.default_rng([n, world_size, BY_NAME[dtype].id])
    values = rng.standard_normal((world_size, n)) * 2.0 ** (np.arange(n) // 50 % 7 - 3)
    values[rng.random(values.shape) < 0.1] = 0
    return list(values.astype(BY_NAME[dtype].numpy))


def check_lossy(
    transport: Transport,
    codec: tw.Codec,
    dtype: str,
    library: str,
    each: int,
    odd: int,
    piece: int = 0,
    device: Any = None,
) -> None:
    """Every collective against the reference, bit for bit; shares have `each` elements.

    All-reduces have `odd` more. With `piece` in pieces of so many elements, two at most.
    """
    n, me, seed = transport.world_size, transport.rank, 7
    options: dict[str, Any] = {"algorithm": "pipelined", "pieces": 2} if piece else {}
    comm = tw.Communicator(transport, codec, seed=seed, **options)
    reference = Reference(codec, n, seed)
    kind = BY_NAME[dtype]

    def given(x: Array) -> Any:
        own = BY_NAME[x.dtype.name]
        return from_bits(x.view(own.bits).copy(), own, x.shape, Target(library, device))

    def spans(size: int) -> list[slice]:
        step = max(piece, -(-size // (2 * piece)) * piece) if piece else max(size, 1)
        return [slice(a, min(a + step, size)) for a in range(0, size, step)] or [slice(0, 0)]

    xs = inputs(codec, dtype, n, n * each)
    for _ in range(2):
        wanted = reference.all_gather([x[:each] for x in xs], spans(each))
        exact(comm.all_gather(given(xs[me][:each])), wanted)
    exact(comm.all_to_all(given(xs[me])), reference.all_to_all(xs, spans(each))[me])
    sums = reference.reduce_scatter(xs, spans(each))[me]
    out = given(np.zeros(each, kind.numpy)) if dtype != "float32" else None
    found = comm.reduce_scatter(given(xs[me]), out)
    exact(found, sums.astype(kind.numpy))
    more = inputs(codec, dtype, n, n * each + odd)
    for _ in range(2):
        x = given(more[me])
        exact(comm.all_reduce(x, x), reference.all_reduce(more, spans(each + odd // n)))
    x = given(xs[me])
    comm.broadcast(x, n - 1)
    exact(x, reference.broadcast(xs, n - 1))
    numbers = np.arange(n * 300, dtype=np.int32)
    exact(comm.all_reduce(given(numbers * (me + 1))), numbers * (n * (n + 1) // 2))
    if n > 1 and me < 2:
        # The only message of its pair.
        key = rounding_key(seed, 0, -2, 0, n)
        sent = tw.decode(bytes(codec.encode(xs[0], key=key)))
        if me == 0:
            comm.send(given(xs[0]), 1)
        else:
            x = given(np.zeros_like(xs[0]))
            exact(comm.recv(x, 0), sent)
    comm.check()


def check_over_time(found: Sequence[Array], exact: Array, left: Array, plain: Array) -> None:
    """Results of one call with feedback, made over and over, against the `exact` one.

    With what is `left` in residuals they add up to it, so that their mean comes as near as
    1 / len(found), while `plain`, without feedback, is off by as much in every call.
    """
    sums = np.cumsum(np.asarray(found, np.float64), axis=0)
    most = np.abs(sums).max()
    np.testing.assert_allclose(sums[-1] + left, len(found) * exact, rtol=0, atol=1e-5 * most)

    def error(mean: Array) -> float:
        return float(np.sqrt(np.mean(np.square(mean - exact))))

    count = len(found)
    few, many = (error(sums[n - 1] / n) for n in (count // 4, count))
    assert many < 0.5 * few, (few, many)
    assert many < 4 / count * error(plain), (many, error(plain))
    assert many > 0


class Residuals:
    """Means with error feedback of all ranks, for codecs that do not round at random."""

    def __init__(self, codec: tw.Codec, world_size: int) -> None:
        self.codec, self.size = codec, world_size
        #: Of every rank by name.
        self.e: list[dict[str, Array]] = [{} for _ in range(world_size)]

    def coded(self, x: Array, chunks: int) -> Array:
        if self.size == 1:
            return x.astype(np.float32)
        found: Array = tw.decode(bytes(self.codec.encode(x, chunks=chunks))).astype(np.float32)
        return found

    def _joined(self, rank: int, parts: Sequence[tuple[str, int]]) -> Array:
        zeros = [self.e[rank].get(name, np.zeros(n, np.float32)) for name, n in parts]
        return np.concatenate(zeros)

    def _keep(self, rank: int, parts: Sequence[tuple[str, int]], e: Array) -> None:
        at = 0
        for name, n in parts:
            self.e[rank][name] = e[at : at + n]
            at += n

    def scatter(self, xs: Sequence[Array], parts: Sequence[tuple[str, int]]) -> Array:
        """Sums of every rank's share, float32, shape (ranks, n)."""
        padding = -xs[0].size % self.size
        total = np.full((self.size, (xs[0].size + padding) // self.size), -0.0, np.float32)
        for rank, x in enumerate(xs):
            corrected = x.astype(np.float32) + self._joined(rank, parts)
            padded = np.pad(corrected, (0, padding))
            coded = self.coded(padded.astype(x.dtype), self.size)
            total += coded.reshape(self.size, -1)
            self._keep(rank, parts, corrected - coded[: x.size])
        return total

    def average(self, xs: Sequence[Array], parts: Sequence[tuple[str, int]]) -> Array:
        total = self.scatter(xs, parts) / np.float32(self.size)
        found = np.stack([self.coded(mean, 1) for mean in total.astype(xs[0].dtype)])
        each = total.shape[1]
        for rank in range(self.size):
            e = self._joined(rank, parts)
            here = slice(rank * each, (rank + 1) * each)
            lost = (total[rank] - found[rank]) * np.float32(self.size)
            e[here] += lost[: e[here].size]
            self._keep(rank, parts, e)
        return found.reshape(-1)[: xs[0].size].astype(xs[0].dtype)
