"""The sum of one call, and the interface of the algorithms that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from ... import arrays
from ...arrays import ArrayInfo
from ...formats.dtypes import DType
from . import tensors
from .calls import Call
from .cost import Choice
from .session import Topology

Op = Literal["sum", "mean"]
OPS: tuple[Op, ...] = get_args(Op)


@dataclass(frozen=True)
class Sum:
    """The sum of one call.

    Attributes:
        info: Dtype and shape of this rank's tensor, and of those of all other ranks.
        sent: Dtype that its elements travel as.
        choice: The path.
        topology: How sums are made that are encoded.
        op: Whether it is divided by the number of ranks.
        decoded: An array, shape (ranks * n,), to be filled with what arrives of this rank's terms,
            or None; of a reduce-scatter in two-shot form only.
    """

    info: ArrayInfo
    sent: DType
    choice: Choice
    topology: Topology
    op: Op = "sum"
    decoded: Any = None

    @property
    def native(self) -> bool:
        """Whether nothing is encoded."""
        return self.choice.algorithm == "native"

    @property
    def algorithm(self) -> Topology:
        """What makes the sum: native ones are two-shot where the network has none of its own."""
        return "two-shot" if self.native else self.topology

    @property
    def travelling(self) -> ArrayInfo:
        """What travels of the tensor."""
        return self.info._replace(dtype=self.sent)

    @property
    def wide(self) -> DType:
        """The dtype that terms are added in."""
        return tensors.sum_dtype(self.info.dtype)


class SumAlgorithm(Protocol):
    """What makes sums of a communicator.

    Attributes:
        allowed: Whether buffers of the session's codec are summed like this.
        max_ranks: Most ranks of a group; None: any number.
        in_place: Whether results may lie over the input, in pieces too.
        tells_decoded: Whether a reduce-scatter fills ``Sum.decoded``.
        scatter_name: What traces call its reduce-scatter; None: the topology.
    """

    allowed: bool
    max_ranks: int | None
    in_place: bool
    tells_decoded: bool
    scatter_name: str | None

    def sums(self, sent: DType, nelem: int) -> bool:
        """Whether parts of `nelem` elements that travel as `sent` are summed like this."""

    def share(self, nelem: int) -> int:
        """Elements of an all-reduce of `nelem` that are encoded together."""

    def all_reduce(self, call: Call, flat: Any, result: Any, what: Sum) -> None:
        """The sum of all ranks' `flat`, shape (n,), to `result`."""

    def reduce_scatter(self, call: Call, x: Any, total: Any, what: Sum) -> None:
        """This rank's share of the sum of all ranks' `x`, of ranks * n elements, to `total`, (n,).

        `total` is as wide as sums are made.
        """


def divided(x: Any, op: Op, ranks: int) -> Any:
    """For a mean `x` over the number of ranks, in the dtype of sums; else `x` itself."""
    if op == "sum":
        return x
    wide = tensors.cast(x, tensors.sum_dtype(tensors.dtype_of(x)))
    return tensors.elementwise(lambda v: v / ranks, wide)


def wire_dtype(wire: str | None, dtype: DType, ranks: int) -> DType:
    """The dtype that elements of `dtype` travel as; of one rank alone they do not."""
    if wire is None:
        return dtype
    sent = arrays.as_dtype(wire)
    if not (sent.is_float and dtype.is_float and sent.itemsize <= dtype.itemsize):
        allowed = "floats no wider than x"
        raise ValueError(f"wire is {wire!r}, x {dtype.name}; allowed: {allowed}")
    return dtype if ranks == 1 else sent
