"""What every collective does, on one rank of any transport, against an uncompressed result."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import tightwire as tw
from support import make_bits
from tightwire.adapters.collectives.calls import TraceRecord
from tightwire.adapters.collectives.communicator import Design
from tightwire.adapters.collectives.path_selection import Algorithm
from tightwire.adapters.transports.base import Transport
from tightwire.adapters.transports.threads import ThreadTransport, connect
from tightwire.arrays import Target, from_bits, host_array
from tightwire.formats.dtypes import BY_NAME

DESIGNS: tuple[Design, ...] = ("first", "between")
DTYPES = ("bfloat16", "float32", "float16", "float8_e4m3fn", "int32")
#: For groups of more than two processes: a smaller one of the same transport meets all.
SOME_DTYPES = ("bfloat16", "int32")
PATTERNS = ("normal", "scales", "random", "mixed_zeros")


class Alone(ThreadTransport):
    """A rank of a group of any size in which all others do what it does: nothing travels."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, connect(1)[0]._pipes, 30.0)
        self.ranks = ranks

    @property
    def world_size(self) -> int:
        return self.ranks

    def _exchange(self, kind: str, outs: Any, xs: Any) -> None:
        for receives, sends in zip(outs, xs, strict=True):
            for out, x in zip(receives, sends, strict=True):
                host_array(out)[...] = host_array(x)


class Counted(ThreadTransport):
    """Counts bytes to others."""

    def __init__(self, inner: ThreadTransport) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.sent = 0

    def _post(self, kind: str, to: int, x: Any) -> None:
        self.sent += x.nbytes * (to != self.rank)
        super()._post(kind, to, x)


def nodes_of(
    within: Any, between: Any, codec: Any = "zipccl", **options: Any
) -> tw.NodeCommunicator:
    """Native within nodes."""
    near = tw.Communicator(within, algorithm="native")
    return tw.NodeCommunicator(near, tw.Communicator(between, codec, **options))


class Ranks:
    """Data of all ranks, which every rank can make, and what a collective makes of it."""

    def __init__(self, world_size: int, library: str, dtype: str, device: Any = None) -> None:
        self.world_size = world_size
        self.target = Target(library, device)
        self.dtype = BY_NAME[dtype]

    def host(self, rank: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The tensor of one rank in NumPy. Ranks differ in how well they compress."""
        pattern = PATTERNS[rank % len(PATTERNS)]
        bits = make_bits(pattern, self.dtype, int(np.prod(shape)), seed=rank)
        return bits.view(self.dtype.numpy).reshape(shape)

    def array(self, rank: int, shape: tuple[int, ...]) -> Any:
        """The same in the library under test."""
        bits = self.host(rank, shape).reshape(-1).view(self.dtype.bits)
        return from_bits(bits, self.dtype, shape, self.target)

    def poison(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        """An output that no result looks like."""
        kind = self.dtype if dtype is None else BY_NAME[dtype]
        bits = np.full(int(np.prod(shape)) * kind.itemsize, 0xAB, np.uint8).view(kind.bits)
        return from_bits(bits, kind, shape, self.target)

    def sum(self, shape: tuple[int, ...], wide: bool = False) -> npt.NDArray[Any]:
        """The sum over ranks: floats in float32, in order, rounded as the library does."""
        total = self.added([self.host(rank, shape) for rank in range(self.world_size)])
        return total if wide else self.rounded(total)

    def added(self, terms: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The sum of terms: floats in float32, in order."""
        dtype = np.dtype(np.float32) if self.dtype.is_float else self.dtype.numpy
        total = np.full(terms[0].shape, -0.0 if self.dtype.is_float else 0, dtype)
        with np.errstate(all="ignore"):
            for term in terms:
                total += term.astype(dtype)
        return total

    def rounded(self, total: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A sum in the dtype of its terms, rounded as the library does."""
        if not self.dtype.is_float:
            return total
        with np.errstate(all="ignore"):
            if self.target.library == "torch":
                torch = sys.modules["torch"]
                rounded = torch.from_numpy(total).to(getattr(torch, self.dtype.name))
                return np.asarray(tw.decode(bytes(tw.encode(rounded, "raw"))))
            return total.astype(self.dtype.numpy)


class NodeRanks(Ranks):
    """The same of nodes, whose sums are rounded to the dtype before they are added."""

    def __init__(self, nodes: int, size: int, library: str, dtype: str) -> None:
        super().__init__(nodes * size, library, dtype)
        self.size = size

    def sum(self, shape: tuple[int, ...], wide: bool = False) -> npt.NDArray[Any]:
        terms = [self.host(rank, shape) for rank in range(self.world_size)]
        starts = range(0, self.world_size, self.size)
        nodes = [self.added(terms[at : at + self.size]) for at in starts]
        # Of one node nothing travels.
        total = self.added([self.rounded(node) for node in nodes]) if nodes[1:] else nodes[0]
        return total if wide else self.rounded(total)


def same(found: Any, wanted: npt.NDArray[Any]) -> None:
    """Assert equal shapes, and equal values bit for bit but for the bits of a NaN."""
    assert tuple(found.shape) == wanted.shape
    host = tw.decode(bytes(tw.encode(found, "raw")))
    assert host.dtype == wanted.dtype
    if wanted.dtype.kind in "iu" or host.tobytes() == wanted.tobytes():
        assert host.tobytes() == wanted.tobytes()
        return
    nan = np.isnan(wanted.astype(np.float32))
    assert np.array_equal(np.isnan(host.astype(np.float32)), nan)
    assert host[~nan].tobytes() == wanted[~nan].tobytes()


def exact(found: Any, wanted: npt.NDArray[Any]) -> None:
    """Assert equal dtypes, shapes and bits."""
    assert tuple(found.shape) == wanted.shape
    host = tw.decode(bytes(tw.encode(found, "raw")))
    assert host.dtype == wanted.dtype
    assert host.tobytes() == wanted.tobytes()


def check_collectives(
    transport: Transport,
    library: str,
    dtype: str,
    design: Design,
    rows: int = 5,
    width: int = 1237,
    algorithm: Algorithm = "compressed",
    device: Any = None,
) -> list[TraceRecord]:
    """Every collective once or more, with odd sizes, empty shares and poisoned outputs."""
    comm = tw.Communicator(transport, sizes=design, algorithm=algorithm, pieces=4)
    data = Ranks(comm.world_size, library, dtype, device)
    check_calls(comm, data, rows, width)
    for shape in ((rows, width), (3,), (0,)):
        ring(comm, data, shape)
    return comm.trace()


def check_calls(
    comm: tw.Communicator | tw.NodeCommunicator, data: Ranks, rows: int, width: int
) -> None:
    """Every collective but messages once or more, as `check_collectives` says."""
    n, me = comm.world_size, comm.rank
    everyone = range(n)

    shape: tuple[int, ...]
    for shape in ((rows, width), (0, 3), ()):
        wanted = np.concatenate([data.host(r, shape).reshape(-1) for r in everyone])
        whole = (n * shape[0], *shape[1:]) if shape else (n,)
        out = data.poison(whole)
        assert comm.all_gather(data.array(me, shape), out) is out
        exact(out, wanted.reshape(whole))
        exact(comm.all_gather(data.array(me, shape)), wanted.reshape(whole))

    shape = (n * rows, width)
    shares = [data.host(r, shape)[me * rows : (me + 1) * rows] for r in everyone]
    out = data.poison(shape)
    assert comm.all_to_all(data.array(me, shape), out) is out
    exact(out, np.concatenate(shares))
    exact(comm.all_to_all(data.array(me, (0, 7))), data.host(0, (0, 7)))

    # Rank i sends (3 i + j) % 4 rows to rank j: some of the shares are empty.
    splits = [[(3 * i + j) % 4 for j in everyone] for i in everyone]
    starts = [list(itertools.accumulate(row, initial=0)) for row in splits]
    inward = [splits[i][me] for i in everyone]
    parts = [
        data.host(i, (sum(splits[i]), width))[starts[i][me] : starts[i][me + 1]] for i in everyone
    ]
    out = data.poison((sum(inward), width))
    x = data.array(me, (sum(splits[me]), width))
    comm.all_to_all(x, out, send_splits=splits[me], receive_splits=inward)
    exact(out, np.concatenate(parts))

    shape = (n * rows, width)
    mine = slice(me * rows, (me + 1) * rows)
    out = data.poison((rows, width))
    assert comm.reduce_scatter(data.array(me, shape), out) is out
    same(out, data.sum(shape)[mine])
    if data.dtype.is_float:
        out = data.poison((rows, width), "float32")
        comm.reduce_scatter(data.array(me, shape), out)
        same(out, data.sum(shape, wide=True)[mine])

    for shape in ((rows, width), (n,), (1,), (0,), ()):
        out = data.poison(shape)
        assert comm.all_reduce(data.array(me, shape), out) is out
        same(out, data.sum(shape))
        in_place = data.array(me, shape)
        same(comm.all_reduce(in_place, in_place), data.sum(shape))
        # Bit-identical everywhere: every rank's result is that of rank 0.
        everywhere = comm.all_gather(out.reshape(-1))
        size = int(np.prod(shape))
        for r in everyone:
            same(everywhere[r * size : (r + 1) * size], data.sum(shape).reshape(-1))
            part = bytes(tw.encode(everywhere[r * size : (r + 1) * size], "raw"))
            assert part == bytes(tw.encode(everywhere[:size], "raw"))

    for shape, root in (((rows, width), n - 1), ((2,), 0), ((0, 4), 0)):
        x = data.array(me, shape) if me == root else data.poison(shape)
        assert comm.broadcast(x, root) is x
        exact(x, data.host(root, shape))


def ring(comm: tw.Communicator, data: Ranks, shape: tuple[int, ...]) -> None:
    """Every rank sends to the next; even ranks first."""
    n, me = comm.world_size, comm.rank
    if n == 1:
        return
    before, after = (me - 1) % n, (me + 1) % n
    out = data.poison(shape)
    if me % 2 == 0:
        comm.send(data.array(me, shape), after)
        comm.recv(out, before)
    else:
        comm.recv(out, before)
        comm.send(data.array(me, shape), after)
    exact(out, data.host(before, shape))
