"""All-to-all-v whose metadata are on the device: AllToAllvDynamic of NCCLX, section 6.1.

A router's kernel decides which rows are sent where; its arrays are taken as they are. ``x``, shape
``(rows, *row_shape)``, is cut into consecutive splits: ``send_splits[k]`` rows in split k; rows
after the last split are not sent. ``send_indices`` lists the splits to send, those for rank 0
first: ``send_indices_block_lens[j]`` of them are for rank j. A split may be sent to many ranks, to
one rank more than once, or not at all.

``DynamicAllToAll`` reads the metadata of all ranks once on the host and sends exactly the rows that
are needed. ``FixedRateAllToAll`` never reads them: every size is fixed in advance, so a CUDA graph
can contain it. Sending results back needs no indices: one split per source, as ``Received`` says.

Left out: the paddings that the paper keeps between received splits (results are packed, with their
offsets), and of section 6.2 what belongs to the transport, such as memory handles exchanged at
capture. Rows are gathered in one pass, into the memory that the encoder reads: the gather is not
fused with it. Parts too small for the codec are sent raw.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import arrays
from ...arrays import ArrayInfo, Target
from ...formats.dtypes import BY_NAME
from ...formats.errors import FormatError
from ...formats.header import OVERFLOW, align
from ...planning import integer
from ...prepared import prepare_decode_many, prepare_encode_many
from ..errors import CollectiveError
from .communicator import Communicator

Ints = npt.NDArray[np.int64]

_NAME = "dynamic_all_to_all"
_INT64 = BY_NAME["int64"]
#: The int64 word of a result record in whose low half the flags are.
_FLAGS = 2

#: What a rank says of its exchange, in `FixedRateAllToAll.status`; 0 is well.
INVALID, ABOVE_CAPACITY, OVERFLOWED, DAMAGED = 1, 2, 4, 8


@dataclass(frozen=True)
class Received:
    """The received rows, in the library and on the device of ``x``; int64 except ``data``.

    To send results back to where the rows came from, exchange ``data`` with ``send_splits=counts``,
    ``send_indices=arange(world_size)`` and ``send_indices_block_lens=ones(world_size)``. With a
    capacity flatten ``data`` to rows, with ``counts[i]`` and ``capacity - counts[i]`` as
    alternating splits, and use the even indices.

    Attributes:
        data: Rows of rank 0 first, then those of rank 1, and so on; within a rank in the order of
            its ``send_indices``. Shape ``(all rows, *row_shape)``; of ``FixedRateAllToAll``
            ``(world_size, capacity, *row_shape)``, where rows of rank i from ``counts[i]`` on have
            no meaning.
        counts: Shape ``(world_size,)``: the number of rows from each rank.
        offsets: Shape ``(world_size,)``: the first row of each rank in ``data`` as one array of
            rows.
        splits: Shape ``(world_size, max_splits)``: the ``send_splits`` of all ranks, then zeros.
        indices: Shape ``(world_size, max_indices)``: the splits received from each rank, then -1.
        lengths: Shape ``(world_size, max_indices)``: the rows of these splits, then zeros.
    """

    data: Any
    counts: Any
    offsets: Any
    splits: Any
    indices: Any
    lengths: Any


class _Routes(NamedTuple):
    """One rank's metadata on the host, checked. `blocks[j]` are the positions for rank j."""

    starts: Ints
    splits: Ints
    indices: Ints
    blocks: list[slice]

    @property
    def lengths(self) -> Ints:
        """Rows of every split that goes, in order, shape (sum of block lens,)."""
        return self.splits[self.indices]

    @property
    def counts(self) -> list[int]:
        """Rows for every rank."""
        lengths = self.lengths
        return [int(lengths[block].sum()) for block in self.blocks]

    @property
    def rows(self) -> Ints:
        """The rows that go, rank 0's first, shape (sum of counts,)."""
        lengths = self.lengths
        ends = np.cumsum(lengths)
        first = self.starts[self.indices] - (ends - lengths)
        return np.repeat(first, lengths) + np.arange(lengths.sum())


class _Exchange:
    """What both forms share: parameters that the ranks have agreed on, checks, and errors."""

    def __init__(
        self,
        comm: Communicator,
        row_shape: Sequence[int],
        dtype: Any,
        max_splits: int,
        max_indices: int | None,
        *more: int,
    ) -> None:
        self._comm = comm
        self._transport = comm.transport
        self._size = comm.world_size
        self._row = tuple(integer("a dimension of row_shape", n) for n in row_shape)
        self._max_splits = _positive("max_splits", max_splits)
        indices = max_splits if max_indices is None else max_indices
        self._max_indices = _positive("max_indices", indices)
        if min(self._row, default=1) < 1:
            raise ValueError(f"row_shape is {self._row}; allowed: sizes of at least 1")
        self._dtype = comm.codec.plan(self._row, dtype).dtype
        self._sequence = 0
        self._broken: str | None = None
        facts = [self._max_splits, self._max_indices, self._dtype.id, *more, *self._row]
        self._agree(f"{type(self).__name__} {self._dtype.name}{list(self._row)}", facts)

    def _agree(self, what: str, facts: list[int]) -> None:
        """Raise CollectiveError on all ranks if they were made with different parameters."""
        digest = hashlib.blake2b(f"{what} {facts}".encode(), digest_size=8).digest()
        x = self._transport.empty(len(digest))
        out = self._transport.empty(self._size * len(digest))
        mine = np.frombuffer(bytearray(digest), np.uint8)
        x[:] = arrays.from_bits(mine, BY_NAME["uint8"], mine.shape, arrays.target_of(x))
        with self._stage("agree"):
            self._transport.all_gather(out, x)
            gathered = arrays.host_array(out).reshape(self._size, -1)
        others = [r for r in range(self._size) if gathered[r].tobytes() != digest]
        if others:
            raise self._failure("agree", f"ranks {others} differ from {what} {facts}", lost=True)
        #: Below 2^62, so that a sequence number can be added.
        self._salt = int.from_bytes(digest, "little") >> 2

    def _failure(self, stage: str, detail: str, *, lost: bool = False) -> CollectiveError:
        """The error of this call, which is over; `lost` if the ranks are out of step now."""
        error = CollectiveError(self._comm.rank, _NAME, self._sequence, stage, detail)
        if lost:
            self._broken = detail
        self._sequence += 1
        return error

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            # After a failure to decode the communicator, and so the ranks, go on.
            if error.stage != "decode":
                self._broken = str(error)
            raise
        except (RuntimeError, OSError) as error:
            raise self._failure(name, str(error), lost=True) from error

    def _need_whole(self) -> None:
        if self._broken is not None:
            raise self._failure("start", f"an earlier call has failed: {self._broken}")

    def _checked(self, x: Any, metadata: Sequence[Any]) -> tuple[Any, ArrayInfo]:
        """`x`, ready to gather from; TypeError or ValueError if an argument is not as agreed."""
        info = arrays.describe(x)
        if info.library not in ("numpy", "torch"):
            raise TypeError(f"x is a {info.library} array; allowed: NumPy and PyTorch")
        if info.dtype != self._dtype or not info.shape or info.shape[1:] != self._row:
            wanted = f"{self._dtype.name}, rows of shape {self._row}"
            raise ValueError(f"x is {info.dtype.name}{list(info.shape)}; needed: {wanted}")
        names = ("send_splits", "send_indices", "send_indices_block_lens")
        ranges = ((0, self._max_splits), (0, self._max_indices), (self._size, self._size))
        for name, values, (least, most) in zip(names, metadata, ranges, strict=True):
            found = arrays.describe(values)
            if (found.library, found.device) != (info.library, info.device):
                raise ValueError(f"{name} must be where x is, in its library")
            fits = len(found.shape) == 1 and least <= found.shape[0] <= most
            if found.dtype != _INT64 or not fits:
                given = f"{found.dtype.name}{list(found.shape)}"
                span = f"{most}" if least == most else f"{least} to {most}"
                raise ValueError(f"{name} is {given}; needed: int64, {span} of them")
        if info.library == "torch":
            return x.detach(), info
        return arrays.host_array(x).astype(info.dtype.numpy, copy=False), info


class DynamicAllToAll(_Exchange):
    """The eager form: exactly the requested rows are sent, in the communicator's codec.

    All ranks make it together, with equal parameters. A call moves ``metadata_nbytes`` bytes of
    metadata from each rank to each other one. The host waits for the device twice: for the
    metadata, all at once, and in ``Communicator.all_to_all``, which moves the rows, for the sizes
    that encoding made. ``comm.trace()`` has the bytes.

    Source: NCCLX, section 6.1.

    Args:
        comm: The communicator.
        row_shape: Shape of a row.
        dtype: Dtype of the rows: a name, a NumPy dtype or PyTorch's.
        max_splits: Most splits of ``x``.
        max_indices: Most entries of ``send_indices``; None: ``max_splits``.

    Raises:
        CollectiveError: On every rank, if parameters differ; by calls, if metadata are not valid on
            a rank or anything goes wrong on the wire.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, or arrays of a call have a wrong shape, dtype or
            device.
    """

    def __init__(
        self,
        comm: Communicator,
        row_shape: Sequence[int],
        dtype: Any,
        *,
        max_splits: int,
        max_indices: int | None = None,
    ) -> None:
        super().__init__(comm, row_shape, dtype, max_splits, max_indices)
        # Words: checksum, rows, number of splits, number of indices; splits; block lens; indices.
        self._words = 4 + self._max_splits + self._size + self._max_indices
        self._keys = checksum_keys(self._words - 1)
        self._gathered: Any = None

    @property
    def metadata_nbytes(self) -> int:
        """Bytes of metadata from a rank to another in a call."""
        return 8 * self._words

    def __call__(
        self, x: Any, send_splits: Any, send_indices: Any, send_indices_block_lens: Any
    ) -> Received:
        """Exchange rows of `x`, shape (rows, *row_shape); the module says how they are chosen.

        `send_splits`, shape (up to max_splits,), `send_indices`, shape (up to max_indices,), and
        `send_indices_block_lens`, shape (world_size,), are int64, in the library and on the device
        of `x`. `send_indices` may be longer than the block lens add up to. `x` is not modified.

        Raises TypeError or ValueError for arrays that are not these, before anything is sent.
        CollectiveError on every rank names the ranks whose metadata make no sense: negative
        numbers, splits beyond the rows, indices of no split, block lens beyond the indices.
        Nothing but metadata was sent then, and the next call is fine.
        """
        metadata = (send_splits, send_indices, send_indices_block_lens)
        x, info = self._checked(x, metadata)
        self._need_whole()
        target = Target(info.library, info.device)
        host = self._gather(info, metadata, target)
        routes = self._read(host)
        self._sequence += 1
        me = self._comm.rank
        mine = routes[me]
        counts = np.array([r.lengths[r.blocks[me]].sum() for r in routes], np.int64)
        offsets = np.cumsum(counts) - counts
        indices = np.full((self._size, self._max_indices), -1, np.int64)
        lengths = np.zeros_like(indices)
        for i, route in enumerate(routes):
            block = route.blocks[me]
            indices[i, : block.stop - block.start] = route.indices[block]
            lengths[i, : block.stop - block.start] = route.lengths[block]
        splits = host[:, 4 : 4 + self._max_splits]
        # One upload: what is returned, and the rows to gather.
        rows, *parts = self._upload((mine.rows, counts, offsets, splits, indices, lengths), target)
        gathered = self._select(x, rows)
        with self._stage("payload"):
            data = self._comm.all_to_all(
                gathered, send_splits=mine.counts, receive_splits=counts.tolist()
            )
        return Received(data, *parts)

    def _gather(self, info: ArrayInfo, metadata: Sequence[Any], target: Target) -> Ints:
        """The metadata of all ranks on the host, shape (world_size, words)."""
        splits, indices, lens = metadata
        call = self._salt + self._sequence
        words = np.zeros(self._words, np.int64)
        words[:4] = call, info.shape[0], splits.shape[0], indices.shape[0]
        record, keys = self._upload((words, self._keys), target)
        at = 4 + self._max_splits
        record[4 : 4 + splits.shape[0]] = splits
        record[at : at + self._size] = lens
        at += self._size
        record[at : at + indices.shape[0]] = indices
        record[:1] += (record[1:] * keys).sum()
        everyone = _empty(record, (self._size * self._words,))
        with self._stage("metadata"):
            self._transport.all_gather(_bytes(everyone), _bytes(record))
            host: Ints = arrays.host_array(everyone).reshape(self._size, self._words)
        strange = (host[:, 1:] * self._keys).sum(1) + call != host[:, 0]
        if strange.any():
            ranks = np.flatnonzero(strange).tolist()
            detail = f"ranks {ranks} make another call, or their data were damaged in transit"
            raise self._failure("metadata", detail, lost=True)
        return host

    def _read(self, host: Ints) -> list[_Routes]:
        """The checked metadata of all ranks; CollectiveError if any are bad."""
        routes, problems = [], []
        for i in range(self._size):
            try:
                routes.append(self._routes(host[i]))
            except ValueError as error:
                problems.append(f"rank {i}: {error}")
        if problems:
            raise self._failure("metadata", "; ".join(problems))
        return routes

    def _routes(self, words: Ints) -> _Routes:
        rows, split_count, index_count = words[1:4].tolist()
        splits = words[4 : 4 + self._max_splits][:split_count]
        lens = words[4 + self._max_splits :][: self._size]
        indices = words[4 + self._max_splits + self._size :][:index_count]
        # Each number first, so that no sum wraps around.
        if ((splits < 0) | (splits > rows)).any() or splits.sum() > rows:
            raise ValueError(f"send_splits are {_some(splits)}; x has {rows} rows")
        if ((lens < 0) | (lens > index_count)).any() or lens.sum() > index_count:
            raise ValueError(
                f"send_indices_block_lens are {_some(lens)}; send_indices has {index_count}"
            )
        used = indices[: lens.sum()]
        if ((used < 0) | (used >= split_count)).any():
            raise ValueError(f"send_indices are {_some(used)}; allowed: 0 to {split_count - 1}")
        stops = np.cumsum(lens).tolist()
        blocks = [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]
        return _Routes(np.cumsum(splits) - splits, splits, used, blocks)

    def _upload(self, values: Sequence[Ints], target: Target) -> list[Any]:
        flat = _like(np.concatenate([v.reshape(-1) for v in values]), target)
        parts, at = [], 0
        for value in values:
            parts.append(flat[at : at + value.size].reshape(value.shape))
            at += value.size
        return parts

    def _select(self, x: Any, rows: Any) -> Any:
        """The chosen rows of `x`, in memory that is kept between calls."""
        count, place = rows.shape[0], arrays.target_of(x)
        kept = self._gathered
        if kept is None or kept.shape[0] < count or arrays.target_of(kept) != place:
            self._gathered = kept = _empty(x, (count, *self._row))
        gathered = kept[:count]
        if count:
            if place.library == "torch":
                import torch

                torch.index_select(_bits(x), 0, rows, out=_bits(gathered))
            else:
                # In "raise" mode NumPy would go through a buffer; the rows have been checked.
                bits = self._dtype.bits
                np.take(x.view(bits), rows, axis=0, out=gathered.view(bits), mode="clip")
        return gathered


class FixedRateAllToAll(_Exchange):
    """The form for CUDA graphs: as many rows from rank to rank in each call, all sizes fixed.

    PyTorch only. ``launch`` neither reads the device nor makes a shape depend on data: one equal
    all-to-all moves metadata, and for each rank a buffer of ``capacity`` rows in the codec at a
    fixed rate. All tensors except small ones for indices (from PyTorch's allocator or a graph's own
    pool) are made here. One batch encodes the rows for all ranks, and one decodes theirs. Call
    ``launch`` once before it is captured; the transport's ``all_to_all`` must be capturable, as
    NCCL's is. Call ``finish``, outside of the graph, after every launch and replay: received rows
    are not valid before.

    The attributes ``status``, int64, shape ``(world_size,)``, and ``overflowed``, bool, shape
    ``()``, are on the device and equal on all ranks unless bytes were damaged (DAMAGED): per rank 0
    or a sum of INVALID, ABOVE_CAPACITY and OVERFLOWED, and whether any rank's data exceeded the
    fixed rate. A rank with another status than 0 and OVERFLOWED counts as one that sent nothing.

    Source: NCCLX, section 6.2.

    Args:
        comm: The communicator.
        row_shape: Shape of a row.
        dtype: Dtype of the rows.
        max_splits: Most splits of ``x``.
        capacity: Most rows from a rank to another.
        max_indices: Most entries of ``send_indices``; None: ``max_splits``.
        dynamic_capacity: Bytes for the dynamic part of what is sent to one rank. None: a sixteenth
            of its uncompressed size.
        device: Device of the tensors. None: that of the transport's arrays.

    Raises:
        CollectiveError: On every rank, if parameters differ.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, the codec rounds at random, or there are no kernels
            for it on the device.
    """

    def __init__(
        self,
        comm: Communicator,
        row_shape: Sequence[int],
        dtype: Any,
        *,
        max_splits: int,
        capacity: int,
        max_indices: int | None = None,
        dynamic_capacity: int | None = None,
        device: Any = None,
    ) -> None:
        import torch

        capacity = _positive("capacity", capacity)
        shape = (capacity, *row_shape)
        if dynamic_capacity is None:
            dynamic_capacity = comm.codec.plan(shape, dtype).dtype.itemsize * math.prod(shape) // 16
        if getattr(comm.codec.spec, "rounding", "nearest") != "nearest":
            raise ValueError(f"codec is {comm.codec!r}; allowed: codecs that round to nearest")
        self._plan = comm.codec.plan(shape, dtype, dynamic_capacity=dynamic_capacity)
        super().__init__(
            comm, row_shape, dtype, max_splits, max_indices, capacity, self._plan.dynamic_stride
        )
        n, self._capacity = self._size, capacity
        if device is None:
            found = self._transport.empty(0)
            device = found.device if arrays.library_of(found) == "torch" else "cpu"

        def make(*shape: int, dtype: Any = torch.int64) -> Any:
            return torch.zeros(shape, dtype=dtype, device=device)

        # To each rank: checksum, status, rows; splits; indices for that rank; a buffer.
        self._words = 3 + self._max_splits + self._max_indices
        self._head = align(8 * self._words)
        self._send = make(n, self._head + self._plan.nbytes, dtype=torch.uint8)
        self._receive = torch.zeros_like(self._send)
        element = getattr(torch, self._dtype.name)
        self._gathered = make(n, *shape, dtype=element)
        self._state = make(3, n)
        self.status = self._state[0]
        self.overflowed = make(dtype=torch.bool)
        self._splits, self._indices = make(self._max_splits), make(self._max_indices)
        self._positions = torch.arange(self._max_indices, device=device)
        self._slots = torch.arange(capacity, device=device)
        self._keys = torch.from_numpy(checksum_keys(self._words - 1)).to(device)
        self._received = Received(
            data=make(n, *shape, dtype=element),
            counts=self._state[1],
            offsets=torch.arange(n, device=device) * capacity,
            splits=make(n, self._max_splits),
            indices=make(n, self._max_indices),
            lengths=make(n, self._max_indices),
        )
        plans = [self._plan] * n
        mine, theirs = ([row[self._head :] for row in x] for x in (self._send, self._receive))
        self._encode_all = prepare_encode_many(plans, list(self._gathered), mine)
        self._decode_all = prepare_decode_many(plans, theirs, list(self._received.data))
        self._launched = False

    @property
    def nbytes(self) -> int:
        """Bytes from a rank to another in a launch."""
        return self._head + self._plan.nbytes

    def launch(
        self, x: Any, send_splits: Any, send_indices: Any, send_indices_block_lens: Any
    ) -> Received:
        """Queue the exchange.

        Unused rows of the capacity are filled with copies of rows of ``x``.

        Args:
            x: Shape ``(rows, *row_shape)``, on the device.
            send_splits: int64, rows of each split, on the device.
            send_indices: int64, numbers of the splits to send, on the device.
            send_indices_block_lens: int64, shape ``(world_size,)``, number of splits for each rank,
                on the device.

        Returns:
            The same tensors every time, which a replay fills again; valid after ``finish``.

        Raises:
            CollectiveError: If the transport fails.
            TypeError: If an array has a wrong type.
            ValueError: If an array has a wrong shape, dtype or device.
        """
        metadata = (send_splits, send_indices, send_indices_block_lens)
        x, info = self._checked(x, metadata)
        if info.library != "torch" or x.device != self._send.device:
            raise ValueError(f"x must be a PyTorch tensor on {self._send.device}")
        self._need_whole()
        status = self._choose(x, *metadata)
        self._encode(status)
        with self._stage("exchange"):
            self._transport.all_to_all(self._receive.view(-1), self._send.view(-1))
        self._unpack()
        self._decode_all()
        # A prepared call does not tell autograd.
        arrays.mark_written(self._received.data)
        self._launched = True
        return self._received

    def finish(self) -> Received:
        """Wait for the exchange and make it valid.

        If data of any rank exceeded the fixed rate, all ranks send their rows again by
        ``Communicator.all_to_all``, at the size they need: the result is exact.

        Returns:
            The result of ``launch``, now valid.

        Raises:
            CollectiveError: On every rank, naming the ranks at fault, if metadata were not valid or
                a rank had more than ``capacity`` rows for another; the next launch works then.
                Also, on the rank that finds it, for damaged bytes.
            ValueError: If nothing was launched.
        """
        if not self._launched:
            raise ValueError("finish() was called before launch()")
        self._need_whole()
        status, counts, sent = arrays.host_array(self._state).tolist()
        cause = self._verdict()
        damaged = _ranks_with(status, DAMAGED)
        if damaged:
            detail = f"metadata of ranks {damaged} were damaged in transit"
            raise self._failure("exchange", detail, lost=True)
        problem = self._problem(status)
        if problem is not None:
            raise self._failure("metadata", problem)
        if any(status):
            with self._stage("resend"):
                self._resend(counts, sent)
        elif cause is not None:
            raise self._failure("decode", f"{cause} (from rank {cause.number or 0})") from cause
        self._sequence += 1
        return self._received

    def _verdict(self) -> FormatError | None:
        """What decoding found wrong first. It is kept until it was asked for."""
        try:
            self._decode_all.check()
        except FormatError as error:
            return error
        return None

    def _problem(self, status: list[int]) -> str | None:
        problems = []
        invalid, above = _ranks_with(status, INVALID), _ranks_with(status, ABOVE_CAPACITY)
        if invalid:
            problems.append(
                f"metadata of ranks {invalid} are invalid; allowed: splits that x has rows for, "
                "indices of splits, block lens that send_indices has entries for"
            )
        if above:
            problems.append(
                f"ranks {above} have more rows for a rank than capacity, {self._capacity}"
            )
        return "; ".join(problems) or None

    def _resend(self, counts: list[int], sent: list[int]) -> None:
        import torch

        x = torch.cat([rows[:n] for rows, n in zip(self._gathered, sent, strict=True)])
        received = self._comm.all_to_all(x, send_splits=sent, receive_splits=counts)
        at = 0
        for rows, n in zip(self._received.data, counts, strict=True):
            rows[:n] = received[at : at + n]
            at += n

    # From here on nothing may wait for the device: no .item(), no shape that depends on data.

    def _choose(self, x: Any, splits: Any, indices: Any, lens: Any) -> Any:
        """Gather the rows for every rank and write the metadata; returns the status, shape ().

        Whatever the metadata say, nothing outside of `x` is read.
        """
        import torch

        rows, split_count, index_count = x.shape[0], splits.shape[0], indices.shape[0]
        for slots, values in ((self._splits, splits), (self._indices, indices)):
            slots[: values.shape[0]] = values
            slots[values.shape[0] :] = 0
        sizes = self._splits.clamp(0, rows)
        lens_here = lens.clamp(0, index_count)
        # Positions in `indices` where the block of each rank starts and stops, shape (ranks,).
        stops = lens_here.cumsum(0)
        valid = (sizes == self._splits).all() & (lens_here == lens).all()
        valid &= (sizes.sum() <= rows) & (stops[-1] <= index_count)
        stops.clamp_(max=index_count)
        begins = stops - lens_here
        used = self._positions < stops[-1]
        chosen = self._indices.clamp(0, max(split_count - 1, 0))
        valid &= ((chosen == self._indices) | ~used).all()
        if not split_count:
            valid &= ~used.any()
        lengths = torch.where(used, sizes.index_select(0, chosen), 0)
        ends = lengths.cumsum(0)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        first = bounds.index_select(0, begins)
        counts = bounds.index_select(0, stops) - first
        above = (counts > self._capacity).any()
        # Row k for rank j is row `order[j, k]` of all that go, and lies in position `place[j, k]`.
        order = torch.minimum(self._slots[None], (counts[:, None] - 1).clamp_(min=0))
        order += first[:, None]
        place = torch.searchsorted(ends, order, right=True).clamp_(max=self._max_indices - 1)
        shift = (sizes.cumsum(0) - sizes).index_select(0, chosen) - (ends - lengths)
        source = shift.index_select(0, place.view(-1)) + order.view(-1)
        if rows:
            into = _bits(self._gathered).view(-1, *self._row)
            torch.index_select(_bits(x), 0, source.clamp_(0, rows - 1), out=into)
        words = self._send.view(torch.int64)
        self._state[2].copy_(counts)
        words[:, 2] = counts
        at = 3 + self._max_splits
        words[:, 3:at] = sizes
        block = (begins[:, None] + self._positions).clamp_(max=self._max_indices - 1)
        listed = chosen.index_select(0, block.view(-1)).view_as(block)
        mine = self._positions < lens_here[:, None]
        words[:, at : self._words] = torch.where(mine, listed, -1)
        return (~valid).long() * INVALID + above.long() * ABOVE_CAPACITY

    def _encode(self, status: Any) -> None:
        import torch

        self._encode_all()
        words = self._send.view(torch.int64)
        flags = words[:, (self._head + self._plan.header.nbytes) // 8 + _FLAGS]
        words[:, 1] = status + ((flags & OVERFLOW) != 0).any() * OVERFLOWED
        words[:, 0] = self._sums(words)

    def _unpack(self) -> None:
        """Metadata and status of all ranks."""
        import torch

        words, received = self._receive.view(torch.int64), self._received
        intact = words[:, 0] == self._sums(words)
        self.status.copy_(torch.where(intact, words[:, 1], DAMAGED))
        self.overflowed.copy_(((self.status & OVERFLOWED) != 0).any())
        # What comes later on the device may use these before anybody has looked at the status.
        usable = (self.status & ~OVERFLOWED) == 0
        received.counts.copy_(torch.where(usable, words[:, 2], 0))
        at = 3 + self._max_splits
        received.splits.copy_(torch.where(usable[:, None], words[:, 3:at], 0))
        received.indices.copy_(torch.where(usable[:, None], words[:, at : self._words], -1))
        chosen = received.indices.clamp(0, self._max_splits - 1)
        lengths = received.splits.gather(1, chosen)
        received.lengths.copy_(torch.where(received.indices >= 0, lengths, 0))

    def _sums(self, words: Any) -> Any:
        """The checksum of every rank's metadata, shape (ranks,), modulo 2^64."""
        return (words[:, 1 : self._words] * self._keys).sum(1) + self._salt


def _positive(name: str, value: int) -> int:
    if integer(name, value) < 1:
        raise ValueError(f"{name} is {value}; allowed: at least 1")
    return integer(name, value)


def _ranks_with(status: list[int], flag: int) -> list[int]:
    return [rank for rank, word in enumerate(status) if word & flag]


def _some(values: Ints) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"[{shown}{', ...' if values.size > 8 else ''}]"


def checksum_keys(count: int) -> Ints:
    """Odd factors of a checksum, modulo 2^64, of metadata: any one word that differs changes it."""
    odd = np.arange(1, 2 * count, 2, dtype=np.uint64)
    return (odd * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the library, device and element type of `like`."""
    if arrays.library_of(like) == "torch":
        return like.new_empty(shape)
    return np.empty(shape, like.dtype)


def _like(host: Ints, target: Target) -> Any:
    return arrays.from_bits(host.view(np.uint64), _INT64, host.shape, target)


def _bytes(x: Any) -> Any:
    """The contiguous array `x` as uint8, shape (n,)."""
    if arrays.library_of(x) == "torch":
        import torch

        return x.view(torch.uint8)
    return x.view(np.uint8)


def _bits(x: Any) -> Any:
    """The tensor `x` as signed integers, which every operation knows; complex128 as it is."""
    import torch

    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(signed[x.element_size()]) if x.element_size() in signed else x
