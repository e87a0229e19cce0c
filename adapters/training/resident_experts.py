"""Experts on the GPUs of a host whose exchanges never wait for the host, and fit in a CUDA graph.

Numbers of rows stay on the device. The rows that a rank gets are a tensor of a fixed capacity,
those of its first expert first, with their ends on the device, as ``torch._grouped_mm`` takes
them. What is behind the last row is not read: the layout is padded, and not what crosses the link.

A token is encoded once, whatever the number of its experts, and each of these reads it where it
lies. Results are encoded once, and read, weighted and added up in one launch; those behind the last
row are not encoded.

Launches on a GPU, whatever the number of ranks: ``dispatch`` makes 6, which are two that order
copies, one that encodes, a barrier, one that finds which rows are for this rank, and one that
decodes. ``combine`` makes 3: encode, barrier, decode and add up. So do both backward, with 2 more
if weights need a gradient. With ``nvfp4`` what is encoded is measured first, by 2 more.

Messages have no checksums: checks of the link guard what crosses NVLink.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...codec import Codec, codec
from ...planning import integer
from ..errors import CollectiveError
from ..transports.peer import PeerMemory
from .expert_rows import has_kernels
from .resident_rows import (
    CODECS,
    FAULTS,
    Exchanges,
    KernelRows,
    Layout,
    PlainRows,
    Prepared,
    as_tensor,
    name_of,
)

#: Dtypes of rows, and those of weights.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WEIGHTS = (*_DTYPES, torch.float64)
#: Most experts: a kernel counts the copies of all of them at once.
MOST_EXPERTS = 509


class ResidentDispatched(NamedTuple):
    """The tokens that the experts of this rank have received.

    Attributes:
        rows: Shape ``(capacity, hidden)``: those of the first local expert first; within one those
            from rank 0 first, in the order of their tokens. Those behind the last are zeros, or any
            numbers if they are not cleared.
        ends: Where the rows of each local expert end: int32, shape ``(local experts,)``, on the
            device of ``rows``.
        weights: The router's weights, which ``combine`` applies.
        layout: Where rows come from and go to.
    """

    rows: Any
    ends: Any
    weights: Any
    layout: Layout


class ResidentExperts:
    """Ranks that share the experts of a layer, and read one another's memory.

    Rank 0 has the first experts, and all have as many. All ranks make the same calls in the same
    order, forward and backward; what needs a gradient on one needs it on all. Calls are queued, and
    never wait for the host: what was wrong is told by ``check``. On a GPU they can be captured in a
    CUDA graph, once each has been made before; replays and other calls may alternate.

    A layer may have an object of its own, or many may share one: nothing is kept in the object
    between calls. On a GPU calls are made on one stream, or on streams that you order. On the CPU
    ranks are threads, and PyTorch does what kernels do on a GPU.

    Args:
        memory: What the ranks can read from one another: ``SymmetricMemory`` of GPUs.
        experts: Experts of all ranks, a multiple of their number, at most 509.
        tokens: Tokens of a rank, at most.
        top_k: Experts of a token.
        hidden: Elements of a token, and of a result.
        dtype: Of both: bfloat16, float16 or float32.
        capacity: Rows that a rank may get in all. None: as many as any routing could send.
        forward: Codec of tokens and results: ``"mx"``, ``"taco"``, ``"nvfp4"``, or ``"raw"``, which
            is None too.
        backward: Codec of their gradients, as ``forward``.
        device: Where the tensors are.
        clear: Rows behind the last are zeros. False: they are not written, for experts that read
            ``ends``.

    Raises:
        CollectiveError: On each rank, if what they prepare differs.
        TimeoutError: If a rank does not come, between threads.
        ValueError: If a value is not allowed.
        RuntimeError: If memory cannot be made, or a rank does not come to make it.
    """

    def __init__(
        self,
        memory: PeerMemory,
        *,
        experts: int,
        tokens: int,
        top_k: int,
        hidden: int,
        dtype: Any = torch.bfloat16,
        capacity: int | None = None,
        forward: str | Codec | None = None,
        backward: str | Codec | None = None,
        device: Any = "cpu",
        clear: bool = True,
    ) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        for name, value in (("tokens", tokens), ("top_k", top_k), ("hidden", hidden)):
            if integer(name, value) < 1:
                raise ValueError(f"{name} is {value}; allowed: from 1 on")
        if integer("experts", experts) < 1 or experts % self.world_size or experts > MOST_EXPERTS:
            raise ValueError(
                f"experts is {experts}; allowed: multiples of {self.world_size}, the ranks, up to "
                f"{MOST_EXPERTS}"
            )
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, _DTYPES))}")
        if capacity is None:
            # A token's experts are different ones; a routing may say otherwise, and is told of.
            capacity = tokens * min(top_k, experts // self.world_size) * self.world_size
        if not 1 <= integer("capacity", capacity) < 1 << 31:
            raise ValueError(f"capacity is {capacity}; allowed: 1 to {(1 << 31) - 1}")
        if tokens * top_k * self.world_size >= 1 << 31:
            raise ValueError(
                f"tokens is {tokens}, top_k {top_k} on {self.world_size} ranks; allowed: fewer "
                "copies than 2^31 in all"
            )
        codecs = _codec_of("forward", forward), _codec_of("backward", backward)
        self.experts, self.device, self._clear = int(experts), torch.device(device), bool(clear)
        self._prepared = Prepared(
            self.experts, int(tokens), int(top_k), int(hidden), int(capacity), dtype, codecs
        )
        self._calls, self._failed = 0, False
        self._agree(memory)
        on_gpu = has_kernels(torch.empty(0, device=self.device))
        self._exchanges: Exchanges = (
            KernelRows(memory, self._prepared, self.device)
            if on_gpu
            else PlainRows(memory, self._prepared)
        )

    @property
    def local_experts(self) -> range:
        """Numbers of this rank's experts."""
        each = self.experts // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    @property
    def capacity(self) -> int:
        """Rows that this rank may get in all."""
        return self._prepared.capacity

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, x: Any, routing: Any) -> ResidentDispatched:
        """Send every token to its experts.

        A copy for a number of no expert goes nowhere, and nor does one that exceeds a capacity:
        its result counts as zeros. ``check`` tells of both.

        Args:
            x: This rank's tokens, shape ``(tokens, hidden)``, at most so many as were prepared for.
            routing: A ``Routing``, or ``(experts, weights)``: int64 and floats, both of shape
                ``(tokens, top_k)``.

        Returns:
            The rows for the experts of this rank, with gradients to the tokens.

        Raises:
            CollectiveError: If a rank did not come, where that is known, or an earlier call failed.
            TypeError: If an argument has a wrong type.
            ValueError: If shapes or devices do not fit.
        """
        experts, weights = routing
        self._check_dispatch(x, experts, weights)
        found: list[Layout] = []
        rows = _Dispatched.apply(x, weights.detach(), self, experts.contiguous(), found)
        return ResidentDispatched(rows, found[0].ends, weights, found[0])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, y: Any, dispatched: ResidentDispatched) -> Any:
        """Send the results of experts back, and add up those of each token by its weights.

        Weights are rounded to the dtype of ``y``, sums are made in float32 and rounded once.
        Results behind the last row are not read.

        Args:
            y: The results for ``dispatched.rows``, in that order: shape ``(capacity, hidden)``.
                Where rows need a gradient they are computed from these.
            dispatched: What ``dispatch`` has returned on this rank.

        Returns:
            Shape ``(tokens, hidden)``, with gradients to ``y`` and to the weights: those are dot
            products of results with the gradients that arrived, in float32.

        Raises:
            CollectiveError: If a rank did not come, where that is known, or an earlier call failed.
            TypeError: If ``y`` is not a tensor.
            ValueError: If ``y`` does not fit, or does not depend on rows that need a gradient.
        """
        rows = dispatched.rows
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"y is a {type(y).__name__}; allowed: a tensor of PyTorch")
        if y.shape != rows.shape or y.dtype != rows.dtype or y.device != rows.device:
            raise ValueError(
                f"y has shape {list(y.shape)}, {y.dtype}, on {y.device}; needed: "
                f"{list(rows.shape)}, {rows.dtype}, on {rows.device}"
            )
        if rows.requires_grad and torch.is_grad_enabled() and not y.requires_grad:
            raise ValueError(
                f"y does not depend on the rows dispatched to rank {self.rank}, which need a "
                "gradient; needed: results that are computed from them"
            )
        return _Combined.apply(y, dispatched.weights, self, dispatched.layout)

    def check(self) -> None:
        """Wait for the calls queued on the current stream, and raise what was wrong with them.

        What was wrong is told once. Faults of a routing are known to all ranks.

        Raises:
            CollectiveError: Naming ranks whose routing has numbers of no expert or weights that are
                NaN or infinite, those that get more rows than their capacity, and a rank that did
                not come in time: then no later call can be made.
        """
        late = self._exchanges.late
        report = self._exchanges.report
        words = (report if late is None else torch.cat([report, late])).tolist()
        report.zero_()
        if any(words[self.world_size + 1 :]):
            self._failed = True
            raise self._failure("exchange", f"rank {words[-1] - 1} did not come in time")
        found = []
        for bit, text in enumerate(FAULTS):
            ranks = [r for r, word in enumerate(words[: self.world_size]) if word >> bit & 1]
            if ranks:
                found.append(f"on ranks {ranks} {text}")
        if found:
            raise self._failure("check", "; ".join(found))
        if words[self.world_size]:
            raise self._failure("decode", "rows that this rank has read are damaged")

    def _begin(self) -> Exchanges:
        """Note a call, and give what makes it."""
        if self._failed:
            raise self._failure("begin", "an earlier call has failed")
        self._calls += 1
        return self._exchanges

    def _failure(self, stage: str, text: str) -> CollectiveError:
        return CollectiveError(self.rank, type(self).__name__, self._calls, stage, text)

    def _agree(self, memory: PeerMemory) -> None:
        """Compare what ranks prepare."""
        p = self._prepared
        codecs = " and ".join(str(found.spec) for found in p.codecs)
        text = (
            f"{p.experts} experts, {p.tokens} tokens, top {p.top_k}, {p.hidden} {name_of(p.dtype)},"
            f" capacity {p.capacity}, {codecs}"
        )
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        # Kept, as others may still read it.
        region = self._compared = memory.region(128)
        words = [as_tensor(part)[:8].view(torch.int64) for part in region.parts]
        words[self.rank].fill_(int.from_bytes(digest, "little", signed=True))
        region.barrier()
        late = region.late()
        told = torch.cat(words if late is None else [*words, late]).tolist()
        if any(told[self.world_size :]):
            raise self._failure("agree", f"rank {told[-1] - 1} did not come in time")
        strange = [r for r, word in enumerate(told[: self.world_size]) if word != told[self.rank]]
        if strange:
            raise self._failure("agree", f"ranks {strange} prepare something else; here: {text}")

    def _check_dispatch(self, x: Any, experts: Any, weights: Any) -> None:
        """Raise TypeError or ValueError for what cannot be sent."""
        p = self._prepared
        if not all(isinstance(t, torch.Tensor) for t in (x, experts, weights)):
            kinds = ", ".join(type(t).__name__ for t in (x, experts, weights))
            raise TypeError(f"x, experts and weights are {kinds}; allowed: tensors of PyTorch")
        if experts.dtype != torch.int64 or weights.dtype not in _WEIGHTS:
            raise TypeError(
                f"experts are {experts.dtype}, weights {weights.dtype}; needed: torch.int64 and "
                "floats"
            )
        if x.dim() != 2 or x.shape[1] != p.hidden or x.shape[0] > p.tokens or x.dtype != p.dtype:
            raise ValueError(
                f"x has shape {list(x.shape)}, {x.dtype}; prepared: (up to {p.tokens}, {p.hidden}),"
                f" {p.dtype}"
            )
        wanted = x.shape[0], p.top_k
        if tuple(experts.shape) != wanted or tuple(weights.shape) != wanted:
            raise ValueError(
                f"experts have shape {list(experts.shape)}, weights {list(weights.shape)}; needed: "
                f"{list(wanted)} twice"
            )
        if not x.device == experts.device == weights.device == self._exchanges.report.device:
            raise ValueError(
                f"x is on {x.device}, experts on {experts.device}, weights on {weights.device}; "
                f"needed: {self._exchanges.report.device}"
            )


class _Dispatched(torch.autograd.Function):  # type: ignore[misc]
    """The rows for this rank's experts; `found` gets the layout."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weights: Any,
        owner: ResidentExperts,
        experts: Any,
        found: list[Layout],
    ) -> Any:
        with torch.cuda.device_of(x), _named(owner):
            exchanges = owner._begin()
            layout = exchanges.tell(x.contiguous(), experts, weights.contiguous())
            rows = exchanges.take(layout, clear=owner._clear)
        found.append(layout)
        ctx.owner, ctx.layout, ctx.tokens = owner, layout, x.shape[0]
        return rows

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        layout = ctx.layout
        with torch.cuda.device_of(gradient), _named(ctx.owner):
            exchanges = ctx.owner._begin()
            exchanges.put(gradient.contiguous(), layout.ends, backward=True)
            found = exchanges.sum(layout, ctx.tokens, None, backward=True)
        return found, *[None] * 4


class _Combined(torch.autograd.Function):  # type: ignore[misc]
    """The results of tokens."""

    @staticmethod
    def forward(ctx: Any, y: Any, weights: Any, owner: ResidentExperts, layout: Layout) -> Any:
        y, weights = y.contiguous(), weights.contiguous()
        ctx.save_for_backward(y)
        ctx.owner, ctx.layout, ctx.dtype = owner, layout, weights.dtype
        with torch.cuda.device_of(y), _named(owner):
            exchanges = owner._begin()
            exchanges.put(y, layout.ends, backward=False)
            ctx.shape = weights.shape
            return exchanges.sum(layout, weights.shape[0], weights, backward=False)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        (y,) = ctx.saved_tensors
        factors = None
        with torch.cuda.device_of(gradient), _named(ctx.owner):
            exchanges = ctx.owner._begin()
            exchanges.put(gradient.contiguous(), None, backward=True)
            rows = exchanges.scaled(ctx.layout, y)
            if ctx.needs_input_grad[1]:
                factors = exchanges.dots(ctx.layout, ctx.dtype).view(ctx.shape)
        return rows, factors, None, None


class _named:
    """Within, a rank that does not come is a CollectiveError."""

    def __init__(self, owner: ResidentExperts) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if isinstance(error, TimeoutError):
            self._owner._failed = True
            raise self._owner._failure("exchange", str(error)) from error


def _codec_of(name: str, given: str | Codec | None) -> Codec:
    """The codec that is meant; ValueError if it cannot be taken."""
    found = codec("raw" if given is None else given) if not isinstance(given, Codec) else given
    if found.name not in CODECS or found.spec.draws:
        raise ValueError(
            f"{name} is {found.spec}; allowed: None, {', '.join(CODECS)}, rounded to nearest"
        )
    return found
