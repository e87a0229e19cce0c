"""Exchanges of rows of experts out of peers' memory, for which the host never waits.

An exchange is: write into this rank's memory, a barrier, read where the others have written. Memory
has two halves, which exchanges use alternately, so that one barrier suffices: who writes to a half
again has come to the barrier behind which the other half was read last.

``KernelRows`` launches kernels on a GPU. ``PlainRows`` does the same by PyTorch, on the CPU: it is
what the kernels are compared with.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ... import arrays
from ...codec import Codec, encode
from ...decoding import decode
from ...formats.header import align
from ...planning import device_module
from ..transports.peer import PeerMemory, Region

#: What is wrong on a rank, by bit of a report.
FAULTS = (
    "numbers of experts are out of range",
    "router weights are not all finite",
    "rows exceed the capacity",
)
#: Codecs whose rows are encoded each by itself.
CODECS = ("raw", "mx", "nvfp4", "taco")


class Prepared(NamedTuple):
    """What was prepared, the same on all ranks.

    Attributes:
        experts: Those of all ranks.
        tokens: Of a rank, at most.
        top_k: Experts of a token.
        hidden: Elements of a row.
        capacity: Rows that a rank gets, at most.
        dtype: Of rows.
        codecs: Forward and backward.
    """

    experts: int
    tokens: int
    top_k: int
    hidden: int
    capacity: int
    dtype: torch.dtype
    codecs: tuple[Codec, Codec]

    @property
    def most(self) -> int:
        """Copies of a rank, at most."""
        return self.tokens * self.top_k


class Layout(NamedTuple):
    """Where rows come from and go to, on the device. A place is `rank << 32 | row`; -1 is none.

    Attributes:
        sources: The place of the token of each row of the capacity, int64.
        factors: Its weight, of the dtype of rows.
        targets: The place of the result of each copy of this rank's tokens, int64.
        ends: Ends of the rows of each local expert, int32.
    """

    sources: torch.Tensor
    factors: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor


class Exchanges(Protocol):
    """The exchanges of rows. ``backward`` says which codec is taken.

    Attributes:
        report: Bits of what is wrong on each rank, see ``FAULTS``, and a word that is not 0 if rows
            that were read are damaged: int64.
        late: As ``Region.late`` gives it.
    """

    report: torch.Tensor
    late: Any

    def tell(self, x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> Layout:
        """Write tokens, and what goes where; the barrier. Gives what the others have told."""

    def put(self, x: torch.Tensor, ends: torch.Tensor | None, *, backward: bool) -> None:
        """Write rows, with `ends` those of experts alone; the barrier."""

    def take(self, layout: Layout, *, clear: bool) -> torch.Tensor:
        """The tokens for this rank's experts; what is behind them is `clear`, zeros, or not."""

    def sum(
        self, layout: Layout, tokens: int, weights: torch.Tensor | None, *, backward: bool
    ) -> torch.Tensor:
        """The sums of the copies of each token, by their weights."""

    def scaled(self, layout: Layout, y: torch.Tensor) -> torch.Tensor:
        """Gradients of rows: those of tokens, times weights. For `dots` it keeps what `y` gives."""

    def dots(self, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """Gradients of the weights of copies; one more barrier."""


class Places(NamedTuple):
    """Where what a rank writes is in a half of its memory, in bytes.

    Attributes:
        copies: Copies by expert, int64, and their rows, and the inverse. Before are the words: how
            many copies are for experts before number 0, 1, and so on to the last, and how many
            there are in all; then bits that are not 0 if a weight is not finite.
        weights: Of copies, of the dtype of rows.
        dots: Dot products, float32: so many of each row of the capacity.
        rows: What is encoded.
        half: How large a half is.
    """

    copies: int
    weights: int
    dots: int
    rows: int
    half: int

    @classmethod
    def of(cls, prepared: Prepared, dots: int, nbytes: int) -> Places:
        """Those for rows that take `nbytes`, with so many dot products each."""
        index = align(8 * (prepared.experts + 3))
        weights = align(index + 24 * prepared.most)
        dots_at = align(weights + prepared.dtype.itemsize * prepared.most)
        rows = align(dots_at + 4 * dots * prepared.capacity)
        return cls(index, weights, dots_at, rows, align(rows + nbytes))


class KernelRows:
    """`Exchanges` by kernels, on a GPU.

    Args:
        memory: The ranks' memory.
        prepared: What they exchange.
        device: The GPU.
    """

    def __init__(self, memory: PeerMemory, prepared: Prepared, device: torch.device) -> None:
        from ...codecs.common import layout_triton, order_triton, rows_triton

        self._layouts, self._orders, self._prepared = layout_triton, order_triton, prepared
        coders = []
        for codec in prepared.codecs:
            plan = codec.plan((prepared.hidden,), prepared.dtype, checksum=False)
            kernels: Any = device_module(plan.codec.name)
            measuring = getattr(kernels, "measuring_of", None)
            found = None if measuring is None else measuring(plan)
            coders.append(rows_triton.Rows(plan, kernels.driver_of(plan), found, device))
        self._forward, self._backward = coders
        count = max(prepared.tokens, prepared.capacity)
        nbytes = count * max(coder.plan.static_stride for coder in coders)
        places = Places.of(prepared, self._backward.dot_tiles(), nbytes)
        self._region = memory.region(2 * places.half)
        parts = [as_tensor(part) for part in self._region.parts]
        addresses = [part.data_ptr() for part in parts]
        self._memory = rows_triton.Memory(
            torch.tensor(addresses, dtype=torch.int64, device=device),
            self._region.number(),
            places.half,
            places.rows,
            places.dots,
            memory.rank,
        )
        mine = parts[memory.rank]
        self._told = order_triton.Told(
            mine,
            mine[places.copies :],
            mine[places.weights :],
            self._memory.turn,
            places.half,
            prepared.dtype,
        )
        self._sizes = layout_triton.Sizes(
            memory.world_size,
            prepared.experts,
            prepared.most,
            prepared.top_k,
            prepared.capacity,
            places.copies,
            places.weights,
            prepared.dtype,
        )
        self.report = torch.zeros(memory.world_size + 1, dtype=torch.int64, device=device)
        self._faults, self._status = self.report[:-1], self.report[-1:]
        self.late = self._region.late()
        if device.type == "cuda":
            # Calls may be made on other streams.
            torch.cuda.current_stream(device).synchronize()

    def tell(self, x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> Layout:
        """See `Exchanges`."""
        self._orders.tell(choices, weights, self._prepared.experts, self._told)
        self._forward.put(x, self._memory)
        self._region.barrier()
        found = self._layouts.find(choices, self._memory, self._sizes, self._faults)
        return Layout(*found)

    def put(self, x: torch.Tensor, ends: torch.Tensor | None, *, backward: bool) -> None:
        """See `Exchanges`."""
        limit = None if ends is None else ends[-1:]
        (self._backward if backward else self._forward).put(x, self._memory, limit)
        self._region.barrier()

    def take(self, layout: Layout, *, clear: bool) -> torch.Tensor:
        """See `Exchanges`."""
        out = self._new(self._prepared.capacity, layout)
        self._forward.take(out, layout.sources, self._memory, self._status, clear)
        return out

    def sum(
        self, layout: Layout, tokens: int, weights: torch.Tensor | None, *, backward: bool
    ) -> torch.Tensor:
        """See `Exchanges`."""
        out = self._new(tokens, layout)
        coder = self._backward if backward else self._forward
        coder.sum(out, layout.targets, self._memory, self._status, weights=weights)
        return out

    def scaled(self, layout: Layout, y: torch.Tensor) -> torch.Tensor:
        """See `Exchanges`."""
        out = self._new(self._prepared.capacity, layout)
        given = {"weights": layout.factors, "y": y}
        self._backward.sum(out, layout.sources, self._memory, self._status, **given)
        return out

    def dots(self, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """See `Exchanges`."""
        self._region.barrier()
        tiles = self._backward.dot_tiles()
        found: torch.Tensor = self._layouts.fetch_dots(layout.targets, self._memory, tiles, dtype)
        return found

    def _new(self, rows: int, layout: Layout) -> torch.Tensor:
        shape = rows, self._prepared.hidden
        return torch.empty(shape, dtype=self._prepared.dtype, device=layout.ends.device)


class PlainRows:
    """`Exchanges` by PyTorch and the public functions, on the CPU.

    Args:
        memory: The ranks' memory, NumPy's or PyTorch's on the CPU.
        prepared: What they exchange.
    """

    def __init__(self, memory: PeerMemory, prepared: Prepared) -> None:
        self._prepared, self._rank, self._ranks = prepared, memory.rank, memory.world_size
        self._count = max(prepared.tokens, prepared.capacity)
        shape = self._count, prepared.hidden
        options: Any = {"chunks": self._count, "checksum": False}
        plans = [codec.plan(shape, prepared.dtype, **options) for codec in prepared.codecs]
        self._nbytes = [plan.nbytes for plan in plans]
        self._places = Places.of(prepared, 1, max(self._nbytes))
        self._region: Region = memory.region(2 * self._places.half)
        self._parts = [as_tensor(part) for part in self._region.parts]
        self._turn = 0
        self.report = torch.zeros(self._ranks + 1, dtype=torch.int64)
        self.late: Any = None

    def tell(self, x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> Layout:
        """See `Exchanges`."""
        experts, copies = self._prepared.experts, choices.numel()
        flat = choices.reshape(-1).clamp(-1, experts)
        ranked, index = flat.sort(stable=True)
        mine = self._half(self._rank, 1)
        words = mine[: 8 * (experts + 3)].view(torch.int64)
        torch.searchsorted(ranked, torch.arange(experts + 1), out=words[: experts + 1])
        words[experts + 1] = copies
        words[experts + 2] = 0 if torch.isfinite(weights).all() else 1
        self._index(self._rank, 1)[:copies] = index
        self._weights(self._rank, 1)[:copies] = weights.reshape(-1).to(self._prepared.dtype)
        self.put(x, None, backward=False)
        return self._found(flat, index)

    def _found(self, flat: torch.Tensor, index: torch.Tensor) -> Layout:
        """What all have told, behind the barrier; `index`: this rank's copies by expert."""
        prepared, ranks = self._prepared, self._ranks
        experts, capacity = prepared.experts, prepared.capacity
        each = experts // ranks
        told = [self._half(r, 0)[: 8 * (experts + 3)].view(torch.int64) for r in range(ranks)]
        words = torch.stack(told)
        counts = words[:, : experts + 1].diff()
        total = counts.sum(0)
        faults = (words[:, 0] != 0) | (words[:, experts] != words[:, experts + 1])
        faults = faults.long() + 2 * (words[:, experts + 2] != 0).long()
        faults += 4 * (total.view(ranks, each).sum(1) > capacity).long()
        self.report[:-1] |= faults

        first = self._rank * each
        sources, factors = [], []
        for e in range(first, first + each):
            for r in range(ranks):
                begin, n = int(words[r, e]), int(counts[r, e])
                copies = self._index(r, 0)[begin : begin + n]
                sources.append((r << 32) | copies // prepared.top_k)
                factors.append(self._weights(r, 0)[copies])
        source, factor = torch.cat(sources)[:capacity], torch.cat(factors)[:capacity]
        rest = capacity - source.shape[0]
        source = torch.cat([source, source.new_full((rest,), -1)])
        factor = torch.cat([factor, factor.new_zeros(rest)])
        ends = total[first : first + each].cumsum(0).clamp(max=capacity).int()

        place = torch.empty_like(index)
        place[index] = torch.arange(index.shape[0])
        choice = flat.clamp(0, experts - 1)
        before = counts[: self._rank].sum(0)
        starts = (total.cumsum(0) - total).view(ranks, each)
        starts = (starts - starts[:, :1]).reshape(-1)
        row = (starts + before - words[self._rank, :experts])[choice] + place
        fine = (flat == choice) & (row < capacity)
        targets = torch.where(fine, (choice // each << 32) | row, -1)
        return Layout(source, factor, targets, ends)

    def put(self, x: torch.Tensor, ends: torch.Tensor | None, *, backward: bool) -> None:
        """See `Exchanges`."""
        count = x.shape[0] if ends is None else int(ends[-1])
        padded = x.new_zeros(self._count, self._prepared.hidden)
        padded[:count] = x[:count]
        options: Any = {"chunks": self._count, "checksum": False}
        buffer = encode(padded, self._prepared.codecs[backward], **options)
        self._message(self._rank, 1, backward).copy_(as_tensor(buffer.array))
        self._region.barrier()
        self._turn += 1

    def take(self, layout: Layout, *, clear: bool) -> torch.Tensor:
        """See `Exchanges`."""
        return self._taken(layout.sources, backward=False)

    def sum(
        self, layout: Layout, tokens: int, weights: torch.Tensor | None, *, backward: bool
    ) -> torch.Tensor:
        """See `Exchanges`."""
        top_k = self._prepared.top_k
        copies = self._taken(layout.targets, backward=backward).unflatten(0, (tokens, top_k))
        if weights is None:
            return copies.sum(1)
        return torch.bmm(weights.to(copies.dtype).unsqueeze(1), copies).squeeze(1)

    def scaled(self, layout: Layout, y: torch.Tensor) -> torch.Tensor:
        """See `Exchanges`."""
        gradient = self._taken(layout.sources, backward=True)
        used = (layout.sources >= 0).unsqueeze(1)
        products = gradient.double() * y.double().masked_fill(~used, 0)
        self._dots(self._rank, 1).copy_(products.sum(1))
        return gradient * layout.factors.unsqueeze(1)

    def dots(self, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """See `Exchanges`."""
        self._region.barrier()
        self._turn += 1
        found = torch.zeros(layout.targets.shape, dtype=dtype)
        for r in range(self._ranks):
            here, rows = self._rows_of(layout.targets, r)
            found[here] = self._dots(r, 0)[rows].to(dtype)
        return found

    def _taken(self, places: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """The rows at places, zeros where there is none."""
        shape = places.shape[0], self._prepared.hidden
        out = torch.zeros(shape, dtype=self._prepared.dtype)
        for r in range(self._ranks):
            here, rows = self._rows_of(places, r)
            if rows.numel():
                out[here] = decode(self._message(r, 0, backward), like=out)[rows]
        return out

    def _rows_of(self, places: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(which places are of a rank, numbers of their rows)."""
        here = (places >> 32) == rank
        return here, places[here] & 0xFFFFFFFF

    def _half(self, rank: int, ahead: int) -> torch.Tensor:
        """The half that is read, or with 1 the one that is written."""
        half = self._places.half
        begin = (self._turn + ahead) % 2 * half
        return self._parts[rank][begin : begin + half]

    def _index(self, rank: int, ahead: int) -> torch.Tensor:
        begin = self._places.copies
        found = self._half(rank, ahead)[begin : begin + 8 * self._prepared.most]
        return found.view(torch.int64)

    def _weights(self, rank: int, ahead: int) -> torch.Tensor:
        begin, dtype = self._places.weights, self._prepared.dtype
        nbytes = dtype.itemsize * self._prepared.most
        return self._half(rank, ahead)[begin : begin + nbytes].view(dtype)

    def _dots(self, rank: int, ahead: int) -> torch.Tensor:
        begin = self._places.dots
        found = self._half(rank, ahead)[begin : begin + 4 * self._prepared.capacity]
        return found.view(torch.float32)

    def _message(self, rank: int, ahead: int, backward: bool) -> torch.Tensor:
        begin = self._places.rows
        return self._half(rank, ahead)[begin : begin + self._nbytes[backward]]


def as_tensor(memory: Any) -> torch.Tensor:
    """Memory of threads is NumPy's."""
    return memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return arrays.as_dtype(dtype).name
