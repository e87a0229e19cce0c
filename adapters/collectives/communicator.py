"""Compressed collectives, written once over any `Transport`.

After ZipCCL, sections 3 and 5.1. Of a tensor there travel the static parts of its chunks, whose
size every rank knows beforehand, the used bytes of the dynamic parts, and per chunk a descriptor:
which call this is, and the chunk's result record, which has the size. Each chunk has one sender and
one receiver. Chunks are sent out of the buffer that the encoder wrote and received into a buffer
that the decoder reads: header and offsets follow from the plan, so the receiver lays out its buffer
in advance.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar, cast

from ... import arrays
from ...arrays import ArrayInfo
from ...codec import Codec
from ...formats.dtypes import DType
from ..errors import CollectiveError
from ..transports.base import Transport
from . import tensors
from .algorithms import SumAlgorithms
from .arguments import equal_splits, peer_of, rows_of, splits_of
from .auto_scale import AutoScale, Scaling
from .calls import TraceRecord
from .chunk_views import split
from .compressed import Compressed
from .cost import Choice
from .measuring import measure, tell_sizes
from .native import Native
from .path_selection import NATIVE_AGAIN, Algorithm, Measured, NativeCall
from .point_to_point import PointToPoint, exchange
from .session import DESIGNS, TOPOLOGIES, Design, Options, Session, Topology, Verify
from .statistics import Statistics
from .steps import Steps
from .sums import OPS, Op, Sum, wire_dtype
from .tensors import as_input, as_output, as_result

__all__ = ["DESIGNS", "TOPOLOGIES", "Communicator", "Design", "Topology"]

#: Nothing travels, so nothing is encoded.
ALONE = Choice("native", 1, 0.0, 0.0, "one rank")

_Init = TypeVar("_Init", bound=Callable[..., None])


def _naming(init: _Init) -> _Init:
    """`init` of a `Communicator`, with a message that says which options there are."""

    @functools.wraps(init)
    def checked(self: Communicator, *args: Any, **options: Any) -> None:
        check_options(options, ["transport"])
        init(self, *args, **options)

    return cast(_Init, checked)


def check_options(options: Iterable[str], own: Sequence[str] = ()) -> None:
    """Raise TypeError for names of neither arguments of ``Communicator`` nor `own`."""
    allowed = [*own, *list(inspect.signature(Communicator).parameters)[1:]]
    if unknown := sorted(set(options) - set(allowed)):
        raise TypeError(f"options are {unknown}; allowed: {list(dict.fromkeys(allowed))}")


class Communicator:
    """Compressed collectives of a group of ranks.

    All ranks make the same calls in the same order, with equal dtypes and matching shapes, from one
    thread at a time. Tensors are arrays that the transport can move: NumPy and PyTorch, on a GPU
    also CuPy and JAX, which are passed by DLPack; results are of the same library. Tensors of a
    dtype that the codec does not compress are sent raw. ``out`` may overlap the input. Work memory,
    up to about twice the largest tensor, is kept. A context manager, which ends with ``close()``.

    **Exactness.** With a lossless codec data arrive bit for bit. Sums are made in float32 (float64
    for float64), and are bit-identical on all ranks; for 8-bit floats if all ranks use one library,
    as NumPy and PyTorch round these differently. With a lossy codec all ranks that get a result get
    the same one, a rank's own part too. What is encoded once is off by at most the error bound of
    the codec's page; a sum by the bounds of its terms, the rounding of the sum and, in an
    all-reduce, the bound of the sum, which is encoded again. Statistics of a tensor (nvfp4's
    largest magnitude) travel with each chunk, and ranks need not agree on them. Native calls, which
    ``algorithm="auto"`` may take, lose only what sums round; a group of one rank loses nothing.

    **Sums.** ``"two-shot"`` is a reduce-scatter and an all-gather; each rank keeps its own scales
    and norms. ``"ring"`` and ``"butterfly"`` sum over several hops (DynamiQ, section 3.4): every
    rank encodes the sum so far, so rounding errors of ``world_size`` encodings add up, and a rank
    exchanges data with one other at a time. Statistics that add up (dynamiq's energies) are summed
    over ranks first. For mx with ``scale_rule="agreed"`` scales are the largest of all ranks, times
    a factor that follows ``scaling``, one for all tensors of the communicator. Random rounding
    differs between ranks only in the rank of the key, as correlated rounding needs it. By
    ``"in-network"`` reduction, of thc and omnireduce, payload elements are added without decoding,
    by NCCL itself or a share by each rank, after ranks agreed on the maximum of their norms; its
    error is smaller than in two-shot.

    **Damage.** Everything that is encoded has a checksum, and damage raises ``CollectiveError`` on
    the rank that receives it: on the host and with ``verify=True`` at once, on a GPU at the end of
    a later call or by ``check()``. Native calls and in-network reduction have no checksums. With
    ``verify="digest"`` ranks compare digests of what each sent and received after every such call,
    and all of them raise if any differ (for a message its receiver); on a GPU as above. The
    communicator then refuses later calls. Sums are then made by ranks, in the order of ranks, and
    not by the network.

    **Mismatch.** On the host every call is compared among ranks before data move, so that other
    calls, dtypes and shapes raise; on a GPU native calls are compared before the first of each
    collective, dtype and shape.

    Source: ZipCCL, sections 3 and 5; DynamiQ, sections 2.1, 3.4 and 4; TACO, section 4.4.2
    (pipelining).

    Args:
        transport: The transport, for this communicator alone.
        codec: A codec or its name, with all parameters given: collectives flatten tensors.
        algorithm: ``"compressed"``; ``"pipelined"``, in pieces, so that encoding, transfer and
            decoding overlap; ``"native"``, uncompressed; or ``"auto"``, the fastest of these: the
            first call of a collective, topology and dtype measures them here, and later ones follow
            the cost model (ZipCCL, section 5.2). Of messages those from 1 MiB on are measured, by
            each pair of ranks.
        pieces: Number of pieces of ``"pipelined"``. None: as many as have ``granularity`` bytes.
        granularity: Bytes of a piece of a rank's tensor.
        sizes: ZipCCL's two designs. ``"first"`` sends the sizes of compressed parts before anything
            else; ``"between"`` sends them after the static parts, which then do not wait for slow
            ranks. Codecs without a dynamic part (all lossy ones) need neither.
        checksum: Whether encoded data have checksums.
        verify: False, True or ``"digest"``: see above.
        trace: Number of calls that ``trace()`` remembers.
        seed: Seed of codecs that round at random, from 0 to 2^64 - 1; used with the number of the
            call and the rank.
        topology: ``"two-shot"``, ``"ring"``, ``"butterfly"`` or ``"in-network"``, for sums that do
            not name one.
        scaling: For mx with ``scale_rule="agreed"``: how the scales of sums over hops follow the
            sums. None is ``AutoScale()``.
        measurements: With ``"auto"``: a file in which measurements are kept for the next program on
            the same machines, by ``KeptMeasurements``. Needs the package filelock. None: nothing is
            kept.
        name: What ``running_calls`` and errors call the communicator; ranks need not agree.

    Raises:
        CollectiveError: On each rank, if ranks differ in format, codec or parameters, if
            ``measurements`` cannot be read on one, and by calls that fail after anything was sent;
            ``out`` is then undefined.
        TypeError: If an argument has a wrong type; here and by calls before anything is sent.
        ValueError: If a value is not allowed, the codec takes a parameter from the shape of
            tensors, or it does not decode to what was encoded (``round_trips``).

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> from tightwire.adapters.transports.threads import run_ranks
        >>> def task(transport):
        ...     with tw.Communicator(transport) as comm:
        ...         return comm.all_reduce(np.full(4, comm.rank + 1, np.float32))
        >>> run_ranks(2, task)[0]
        array([3., 3., 3., 3.], dtype=float32)
    """

    @_naming
    def __init__(
        self,
        transport: Transport,
        codec: str | Codec = "zipccl",
        *,
        algorithm: Algorithm = "compressed",
        pieces: int | None = None,
        granularity: int = 64 << 20,
        sizes: Design = "first",
        checksum: bool = True,
        verify: Verify = False,
        trace: int = 1000,
        seed: int = 0,
        topology: Topology = "two-shot",
        scaling: AutoScale | None = None,
        measurements: str | os.PathLike[str] | None = None,
        name: str = "",
    ) -> None:
        """Made by all ranks together, which compare format, codec and parameters."""
        options = Options(
            algorithm=algorithm,
            pieces=pieces,
            granularity=granularity,
            sizes=sizes,
            checksum=checksum,
            verify=verify,
            trace=trace,
            seed=seed,
            topology=topology,
            scaling=scaling,
            measurements=measurements,
            name=name,
        )
        self._session = Session(transport, codec, options)
        self._steps = Steps(self._session)
        self._paths = self._session.paths
        self._transport = transport
        self._size = self._session.size
        self._native = Native(self._steps)
        self._compressed = Compressed(self._steps)
        self._messages = PointToPoint(self._steps)
        self._statistics = Statistics(self._steps)
        self._sums = SumAlgorithms(self._steps, self._compressed, self._native, self._statistics)
        self._sums.check(topology)
        self._session.agree()

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._session.size

    @property
    def name(self) -> str:
        """The name that the communicator was given."""
        return self._session.name

    @property
    def codec(self) -> Codec:
        """The codec of all ranks."""
        return self._session.codec

    @property
    def scaling(self) -> Scaling | None:
        """The factor of scales in sums over hops, of mx with ``scale_rule="agreed"``; else None."""
        return self._session.scaling

    @property
    def topology(self) -> Topology:
        """How sums are made that do not name a topology."""
        return self._session.topology

    @property
    def session(self) -> Session:
        """What the communicator knows of its group and its calls, for the hooks of this package."""
        return self._session

    @property
    def transport(self) -> Transport:
        """The transport that moves the bytes."""
        return self._session.transport

    def trace(self, last: int | None = None) -> list[TraceRecord]:
        """Records of the last calls, oldest first, with those that failed.

        Calls that the communicator refused are left out, and those that measure paths.

        Args:
            last: Number of records. None: all that are remembered.
        """
        return self._session.trace(last)

    def check(self) -> None:
        """Raise what decoding on a GPU has found so far. Waits for the device.

        Raises:
            CollectiveError: If received data are damaged.
        """
        self._session.check()

    def refusal(self, collective: str, sequence: int | None = None) -> CollectiveError | None:
        """The error that later calls will raise.

        Args:
            collective: Name of the later call.
            sequence: Its number. None: the next one.

        Returns:
            The error, or None if the communicator can be used.
        """
        return self._session.refusal(collective, sequence)

    def check_topology(self, topology: Topology) -> None:
        """Raise ValueError if the codec or the group does not sum like this.

        Args:
            topology: How a sum would be made.

        Raises:
            ValueError: If it cannot.
        """
        self._sums.check(topology)

    def close(self) -> None:
        """Free work memory, and close the transport, which no other communicator may then use.

        Later calls raise CollectiveError; ``trace()`` still works. Closing again does nothing. A
        process group that ``TorchDist`` was given stays open.
        """
        self._session.close()
        self._statistics.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()

    def slow_ranks(self, calls: int = 100) -> list[tuple[int, float]]:
        """Find which ranks the others wait for.

        A collective: all ranks call it, and all get the same answer. In the first stage that
        exchanges anything every rank waits for the last one, so a rank that waits less came later.
        Native calls count on the host only: on a GPU they wait for nothing.

        Args:
            calls: How many of the last calls to take into account.

        Returns:
            Pairs of a rank and the seconds that others waited for it, the slowest first.

        Raises:
            CollectiveError: If the exchange fails.
        """
        return self._session.slow_ranks(calls)

    def all_gather(self, x: Any, out: Any = None) -> Any:
        """Gather the tensors of all ranks along the first dimension.

        Args:
            x: This rank's tensor, of the same shape and dtype on all ranks.
            out: Where to write the result: shape ``(world_size * x.shape[0], ...)``.

        Returns:
            ``out``, or a new array of that shape with the tensors of rank 0, 1, ...; of scalars
            shape ``(world_size,)``. With a lossy codec this rank's own part is decoded too, so that
            all ranks get the same bits.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: If ``out`` does not fit.
        """
        before = self._paths.native_again("all_gather", x)
        if before is not None:
            move = self._transport.all_gather
            found = self._native.again("all_gather", before, x, out, move)
            if found is not None:
                return found
        x, info, target = as_input(x)
        shape = (self._size * info.shape[0], *info.shape[1:]) if info.shape else (self._size,)
        into = as_output(out, info, shape, target)
        choice = self._choose("all_gather", x, info, before)
        with self._session.call("all_gather", "all-gather", info, choice) as call:
            call.nbytes = _nbytes(info)
            result = self._result(x, into, shape, info.dtype, choice)
            if choice.algorithm == "native":
                self._native.all_gather(call, x, result, info)
            else:
                flat = x.reshape(-1)
                self._compressed.all_gather(call, flat, result.reshape(-1), info, choice)
            into = _placed(into, result)
        return as_result(into, info.dtype, target) if out is None else out

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
    ) -> Any:
        """Send share j of a tensor to rank j, and receive share i of the result from rank i.

        Shares are rows, along the first dimension.

        Args:
            x: This rank's tensor, of the same row shape and dtype on all ranks.
            out: Where to write the result.
            send_splits: Rows for each rank. None: equal shares.
            receive_splits: Rows from each rank; given if and only if ``send_splits`` is.

        Returns:
            ``out``, or a new array with the rows from rank 0, 1, ... With a lossy codec the rank's
            own share is decoded too.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: If rows cannot be divided equally, splits do not add up, or ``out`` does not
                fit.
        """
        before = self._paths.native_again("all_to_all", x) if send_splits is None else None
        if before is not None:
            move = self._transport.all_to_all
            found = self._native.again("all_to_all", before, x, out, move)
            if found is not None:
                return found
        x, info, target = as_input(x)
        rows, row = rows_of(info)
        if send_splits is None and receive_splits is None:
            outward = inward = equal_splits(rows, self._size)
        elif send_splits is None or receive_splits is None:
            raise ValueError("one of send_splits and receive_splits is given; needed: both or none")
        else:
            outward = splits_of("send_splits", send_splits, self._size)
            inward = splits_of("receive_splits", receive_splits, self._size)
            if sum(outward) != rows:
                raise ValueError(f"send_splits add up to {sum(outward)}; x has {rows} rows")
        equal = send_splits is None
        shape = (sum(inward), *row)
        into = as_output(out, info, shape, target)
        if equal:
            choice = self._choose("all_to_all", x, info, before)
        else:
            choice = self._choose_splits(x, info)
        width = math.prod(row)
        sends, receives = [n * width for n in outward], [n * width for n in inward]
        name, share = "all-to-all", max(sends)
        with self._session.call("all_to_all", name, info, choice, share=share) as call:
            if equal:
                call.nbytes = _nbytes(info)
            else:
                call.splits = info.dtype, _nbytes(info)
            whole = self._result(x, into, shape, info.dtype, choice)
            flat, result = x.reshape(-1), whole.reshape(-1)
            if equal:
                there = here = [call.digest(info, info.shape)] * self._size
            else:
                there = [call.digest(info, (n, *row)) for n in outward]
                here = [call.digest(info, (n, *row)) for n in inward]
            if choice.algorithm == "native":
                if equal:
                    self._steps.comparisons.compare_new(call, x, there, here)
                else:
                    # Splits change from call to call, and not on all ranks at once.
                    self._steps.comparisons.compare(call, x, there, here)
                self._native.all_to_all(call, flat, result, sends, receives, equal)
            elif equal:
                self._compressed.all_to_all(call, flat, result, info, choice, there)
            else:
                parts, outs = split(flat, sends), split(result, receives)
                self._compressed.all_to_all_parts(call, parts, outs, info, there, here)
            into = _placed(into, whole)
        return as_result(into, info.dtype, target) if out is None else out

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        wire: str | None = None,
        decoded: Any = None,
        topology: Topology | None = None,
    ) -> Any:
        """Sum the tensors of all ranks, and keep this rank's share.

        Shares are equal, along the first dimension. In two-shot form this is an all-to-all, after
        which floats are added in float32 (float64 for float64) in the order of ranks and rounded
        once; integers wrap around. Over hops (``"ring"``, ``"butterfly"``) terms are added in the
        order of the hops, what a rank passes on is rounded to what travels, and a rank's own term
        and the last sum are not encoded. Partial sums that overflow what travels are infinite and
        stay so; ``all_reduce`` with ``op="mean"`` avoids that. Native calls round nothing, and the
        network sums float32, float64, int32 and int64 (in an all-reduce by a lossy codec on a GPU
        also bfloat16 and float16) in its own order.

        Args:
            x: This rank's tensor, of equal shape and dtype on all ranks.
            out: Where to write the result; it may have the dtype of the sum, so that bfloat16 is
                sent and float32 returned.
            wire: ``"bfloat16"`` or ``"float16"``: dtype that ``x`` is rounded to before it is
                encoded.
            decoded: An array like ``x``, which does not overlap it, to be filled with what the
                other ranks decode of ``x``: the difference is what a lossy codec (or ``wire``) has
                lost. Two-shot only.
            topology: How the sum is made; None: as the communicator was told. Dtypes that the codec
                does not compress always take two-shot.

        Returns:
            ``out``, or a new array with the shape ``(x.shape[0] / world_size, ...)``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type or dtype.
            ValueError: If rows cannot be divided equally, an array does not fit, or ``topology``,
                ``wire`` or ``decoded`` is not allowed with the codec.
        """
        if topology is not None:
            self.check_topology(topology)
        asked = topology or self.topology
        before = self._paths.native_again("reduce_scatter", x, wire, asked)
        if before is not None and decoded is None:
            move = self._transport.reduce_scatter
            found = self._native.again("reduce_scatter", before, x, out, move)
            if found is not None:
                return found
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        rows, row = rows_of(info)
        shape = (equal_splits(rows, self._size)[0], *row)
        is_wide = out is not None and arrays.describe(out).dtype == wide
        into = as_output(out, info._replace(dtype=wide) if is_wide else info, shape, target)
        sent = wire_dtype(wire, info.dtype, self._size)
        kept = as_output(decoded, info, info.shape, target, "decoded")
        by = self._sums.chosen(asked, sent, math.prod(shape))
        algorithm = self._sums[by]
        if kept is not None and not algorithm.tells_decoded:
            raise ValueError(f"decoded is given, topology is {by!r}; allowed: 'two-shot'")
        part = info._replace(dtype=sent)
        choice = self._choose("reduce_scatter", x, part, before, info.dtype, asked)
        kept = None if kept is None else kept.reshape(-1)
        what = Sum(info, sent, choice, by, decoded=kept)
        name = algorithm.scatter_name or by
        share = math.prod(shape)
        with self._session.call("reduce_scatter", name, info, choice, sent, share=share) as call:
            call.nbytes = _nbytes(part)
            here = into if is_wide else None
            if here is not None and not algorithm.in_place and tensors.overlap(x, here):
                here = None
            total = self._result(x, here, shape, wide, choice)
            self._sums[what.algorithm].reduce_scatter(call, x, total.reshape(-1), what)
            result = total if is_wide else tensors.cast(total, info.dtype)
            into = _placed(into, result)
        return as_result(into, info.dtype, target) if out is None else out

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        wire: str | None = None,
        op: Op = "sum",
        topology: Topology | None = None,
    ) -> Any:
        """Sum the tensors of all ranks, of any shape; all ranks get the same bits.

        Two-shot is a reduce-scatter, whose sums are rounded to what travels, and an all-gather of
        them: every term is encoded once, and so is the sum. The last ``x.size % world_size``
        elements are sent uncompressed, with a checksum. Over hops each rank encodes its share of
        the sum and all ranks decode that; shares are equally long, padded with zeros. Natively the
        network sums as in ``reduce_scatter``.

        A sum that overflows what travels is infinite, and with lossy codecs more than that element
        suffers (most make its block NaN, dynamiq its super-group); over hops a partial sum that
        overflows is enough.

        Args:
            x: This rank's tensor, of equal shape and dtype on all ranks.
            out: Where to write the result.
            wire: As in ``reduce_scatter``.
            op: ``"sum"``, or ``"mean"`` for floats. Over hops, in-network, and where a lossy codec
                gets float32 or float64, terms are divided by the number of ranks before they are
                rounded to what travels, so that no sum overflows whose mean fits; otherwise the sum
                is divided before it is rounded.
            topology: As in ``reduce_scatter``.

        Returns:
            ``out``, or a new array like ``x``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type, or its dtype has no mean.
            ValueError: If ``out`` does not fit, or ``op``, ``topology`` or ``wire`` is not allowed.
        """
        if op not in OPS:
            raise ValueError(f"op is {op!r}; allowed: {OPS}")
        if topology is not None:
            self.check_topology(topology)
        asked = topology or self.topology
        before = self._paths.native_again("all_reduce", x, wire, asked)
        if before is not None and op == "sum":
            move = self._native.reduce_plain
            found = self._native.again("all_reduce", before, x, out, move)
            if found is not None:
                return found
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        if op == "mean" and not wide.is_float:
            raise TypeError(f"x is {info.dtype.name}; allowed for a mean: floats")
        into = as_output(out, info, info.shape, target)
        sent = wire_dtype(wire, info.dtype, self._size)
        part = info._replace(dtype=sent)
        nelem = math.prod(info.shape)
        by = self._sums.chosen(asked, sent, nelem)
        choice = self._choose("all_reduce", x, part, before, info.dtype, asked)
        what = Sum(info, sent, choice, by, op)
        share, algorithm = self._sums[by].share(nelem), self._sums[what.algorithm]
        with self._session.call("all_reduce", by, info, choice, sent, share=share, op=op) as call:
            call.nbytes = _nbytes(part)
            if algorithm.in_place:
                whole = tensors.empty(info.shape, info.dtype, x) if into is None else into
            else:
                whole = self._result(x, into, info.shape, info.dtype, choice)
            algorithm.all_reduce(call, x.reshape(-1), whole.reshape(-1), what)
            into = _placed(into, whole)
        return as_result(into, info.dtype, target) if out is None else out

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite ``x`` on all ranks with that of one rank.

        The root encodes once and scatters the chunks, and an all-gather spreads them. With a lossy
        codec its own ``x`` is overwritten with what the others decode.

        Args:
            x: A writable array, of equal shape and dtype on all ranks.
            root: The rank whose ``x`` is sent.

        Returns:
            ``x``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` is not an array that the transport moves.
            ValueError: If ``x`` is read-only, or there is no such rank.
        """
        root = peer_of("root", root, self._size)
        values, info, target = as_input(x)
        into = as_output(x, info, info.shape, target, "x").reshape(-1)
        choice = self._choose("broadcast", values, info)
        share = -(-math.prod(info.shape) // self._size)
        name = "scatter and all-gather"
        with self._session.call("broadcast", name, info, choice, share=share) as call:
            if choice.algorithm == "native":
                self._native.broadcast(call, into, root)
            else:
                flat = values.reshape(-1)
                self._compressed.broadcast(call, flat, into, info, root)
        return x

    def send(self, x: Any, to: int) -> None:
        """Send a tensor to another rank, which calls ``recv``.

        With a lossy codec ``x`` stays as it is on this rank.

        Args:
            x: The tensor.
            to: Number of the other rank.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` is not an array that the transport moves.
            ValueError: If there is no such rank, or it is this one.
        """
        to = peer_of("to", to, self._size, self.rank)
        x, info, _ = as_input(x)
        self._messages.send(x, info, to)

    def recv(self, out: Any, source: int) -> Any:
        """Receive the tensor that another rank sends to this rank.

        Args:
            out: A writable array of the shape and dtype of the sender's tensor.
            source: Number of the other rank.

        Returns:
            ``out``.

        Raises:
            CollectiveError: If anything goes wrong, such as another shape or dtype.
            TypeError: If ``out`` is not an array that the transport moves.
            ValueError: If ``out`` is read-only, there is no such rank, or it is this one.
        """
        source = peer_of("source", source, self._size, self.rank)
        _, info, target = as_input(out)
        into = as_output(out, info, info.shape, target)
        self._messages.receive(into, info, source)
        return out

    def sendrecv(self, x: Any, to: int, out: Any, source: int) -> Any:
        """Send a tensor to one rank, and receive that of another, or of the same one.

        Ranks may do so in pairs, rings and other cycles: a rank that sends to a lower one receives
        first, so that not all wait for each other.

        Args:
            x: The tensor to send.
            to: Number of the rank that receives it.
            out: A writable array of the shape and dtype that ``source`` sends.
            source: Number of that rank.

        Returns:
            ``out``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: If ``out`` is read-only or may overlap ``x``, there is no such rank, or
                it is this one.
        """
        to = peer_of("to", to, self._size, self.rank)
        source = peer_of("source", source, self._size, self.rank)
        return exchange(self, x, to, out, source)

    def _choose(
        self,
        collective: str,
        x: Any,
        info: ArrayInfo,
        before: NativeCall | None = None,
        source: DType | None = None,
        topology: str = "",
    ) -> Choice:
        """The path of a call whose arguments are right; `info` is what travels of `source`."""
        if before is not None:
            before.left -= 1
            return NATIVE_AGAIN
        if self._session.broken is not None:
            # Not worth a measurement: the call is about to be refused.
            return NATIVE_AGAIN
        if self._size == 1:
            return ALONE
        return self._paths.choose(collective, x, info, source, topology, self._measure)

    def _choose_splits(self, x: Any, info: ArrayInfo) -> Choice:
        """The path of an all-to-all of unequal splits."""
        if self._session.broken is not None:
            return NATIVE_AGAIN
        if self._size == 1:
            return ALONE
        tell = functools.partial(tell_sizes, self._steps, x, info)
        return self._paths.choose_splits(x, info, self._measure, tell)

    def _result(
        self, x: Any, into: Any, shape: tuple[int, ...], dtype: DType, choice: Choice
    ) -> Any:
        """Where the result of `x` is made: in `into`, unless that is being read meanwhile."""
        once = choice.algorithm == "compressed"
        if into is None or (not once and tensors.overlap(x, into)):
            return tensors.empty(shape, dtype, x)
        return into

    def _measure(
        self, collective: str, like: Any, info: ArrayInfo, source: DType | None, topology: str
    ) -> Measured:
        return measure(self, self._steps, collective, like, info, source, topology)


def _placed(into: Any, result: Any) -> Any:
    """`result` in the memory that was asked for, if any was."""
    if into is None or into is result:
        return result
    tensors.put(into, result)
    return into


def _nbytes(info: ArrayInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize
