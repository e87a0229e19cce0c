"""Path selection of a Communicator, and what it knows about its paths (ZipCCL, section 5.2)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ..arrays import ArrayInfo
from ..codec import Codec
from ..formats.dtypes import DType
from . import tensors
from .cost import Choice, Model, Ratios, expected_ratio

Algorithm = Literal["auto", "native", "compressed", "pipelined"]
ALGORITHMS = ("auto", "native", "compressed", "pipelined")

#: A call like one that went natively.
AS_BEFORE = Choice("native", 1, 0.0, 0.0, "as before")
#: A ratio travels as a whole number of these.
_UNIT = 1 << 20
#: Shapes that are remembered.
_MOST = 4096
#: Calls that follow a choice before it is thought over.
_KEPT = 100
#: Collectives whose native calls may skip the question.
SUMS = ("reduce_scatter", "all_reduce")
_FAST = ("all_gather", "all_to_all", *SUMS)
_MOST_PIECES = 8
#: Bytes of a message from which on it is compressed, and of what counts as a large one.
_MESSAGE = 1 << 20
_LARGE = 1 << 28
#: Of small messages headers and cards are more than half.
_WORST = 1.5


class Measured(NamedTuple):
    """Seconds of native, compressed and pipelined path by bytes of a rank's input."""

    sizes: tuple[int, ...]
    seconds: list[list[float]]
    #: Of the pipelined path.
    pieces: int
    #: Of the data that were sent.
    ratio: float


_Measure = Callable[[str, Any, ArrayInfo, DType | None], Measured]


class Before:
    """A native call that may be repeated `left` times; what it needed to know, found once."""

    __slots__ = ("left", "nbytes", "shape", "summed")

    def __init__(self, left: int) -> None:
        self.left = left
        #: Of the result, None if it is not known yet.
        self.shape: tuple[int, ...] | None = None
        #: To other ranks.
        self.nbytes = 0
        #: The network sums this dtype.
        self.summed = False


class Switch:
    """Chooses between the paths of a collective; equal calls make equal choices on every rank.

    A ratio that a rank has seen travels in the descriptors of its next call, and the largest of all
    counts: ranks see different data, but choose alike.
    """

    def __init__(
        self,
        codec: Codec,
        algorithm: Algorithm,
        pieces: int | None,
        granularity: int,
        measure: _Measure,
    ) -> None:
        """`measure` is a method, of the object that holds this: it is referred to weakly."""
        self._codec = codec
        self._auto = algorithm == "auto"
        self._measure = _weakly(measure)
        self._forced: Choice | None = None
        #: Bytes of a piece, where their number is to follow from the size.
        self._granularity = 0
        if algorithm != "auto":
            if algorithm == "pipelined" and pieces is None:
                self._granularity = granularity
            count = pieces or 1 if algorithm == "pipelined" else 1
            self._forced = Choice(algorithm, count, 0.0, 0.0, "")
        self._models: dict[tuple[str, str, str], Model] = {}
        self._choices: dict[tuple[Any, ...], Choice] = {}
        self._fast: dict[tuple[Any, ...], Before] = {}
        self._last: dict[tuple[str, str, int], int] = {}
        self._ratios = Ratios(patience=10)
        #: By dtype, of codecs without dynamic parts; 0 where it depends on the data.
        self._known: dict[DType, float] = {}

    def choose(
        self, collective: str, x: Any, info: ArrayInfo, source: DType | None = None
    ) -> Choice:
        """The path for `x`, whose shape all ranks know and whose elements travel as `info` says.

        `source` is their dtype if that is another.
        """
        if self._forced is not None:
            if not self._granularity:
                return self._forced
            nbytes = math.prod(info.shape) * info.dtype.itemsize
            return replace(self._forced, pieces=max(1, -(-nbytes // self._granularity)))
        name, dtype = self._codec.name, info.dtype.name
        wire = None if source is None or source == info.dtype else dtype
        if not self._gains(info.dtype, math.prod(info.shape)):
            choice = Choice("native", 1, 0.0, 0.0, f"{name} gains nothing on {dtype}")
            return self._natively(collective, x, choice, wire)
        # Natively the dtype that x has is what is summed.
        pair = dtype if source is None or wire is None else f"{source.name} as {dtype}"
        key = collective, pair, _place(x)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = _model(self._measure(collective, x, info, source))
        nbytes = math.prod(info.shape) * info.dtype.itemsize
        ratio = self._ratio(info.dtype, nbytes)
        question = (*key, nbytes, ratio)
        found = self._choices.get(question)
        if found is None:
            if len(self._choices) >= _MOST:
                self._choices.clear()
            found = self._choices[question] = model.choose(nbytes, ratio, _MOST_PIECES)
        return self._natively(collective, x, found, wire)

    def choose_splits(self, x: Any, info: ArrayInfo) -> Choice:
        """The path of an all-to-all in which every rank knows sizes of its own only.

        What all-to-alls of equal shares were measured to take decides, if there were any, for large
        messages.
        """
        if self._forced is not None:
            return self._forced
        name, dtype = self._codec.name, info.dtype.name
        if not self._gains(info.dtype, _LARGE // info.dtype.itemsize):
            return Choice("native", 1, 0.0, 0.0, f"{name} gains nothing on {dtype}")
        model = self._models.get(("all_to_all", dtype, _place(x)))
        if model is None:
            return Choice("compressed", 1, 0.0, 0.0, "nothing has been measured yet")
        return model.choose(_LARGE, expected_ratio(name, dtype), 1)

    def choose_message(self, info: ArrayInfo) -> Choice:
        """The path of a message: a plain rule, as its two ranks measure nothing by themselves."""
        if self._forced is not None:
            return self._forced
        nelem = math.prod(info.shape)
        if nelem * info.dtype.itemsize < _MESSAGE:
            return Choice("native", 1, 0.0, 0.0, f"under {_MESSAGE} bytes")
        name, dtype = self._codec.name, info.dtype.name
        if not self._gains(info.dtype, nelem):
            return Choice("native", 1, 0.0, 0.0, f"{name} gains nothing on {dtype}")
        return Choice("compressed", 1, 0.0, 0.0, f"at least {_MESSAGE} bytes")

    def _gains(self, dtype: DType, nelem: int) -> bool:
        # Of a chunk's size there is a limit, and more than this changes nothing.
        nelem = min(nelem, _LARGE // dtype.itemsize)
        return self._codec.plan((nelem,), dtype).codec.name == self._codec.name

    def _natively(self, collective: str, x: Any, choice: Choice, wire: str | None) -> Choice:
        """Remember a native choice for calls like this one."""
        if choice.algorithm == "native" and collective in _FAST:
            if len(self._fast) >= _MOST:
                self._fast.clear()
            self._fast[collective, x.dtype, x.shape, wire] = Before(_KEPT)
        return choice

    def as_before(self, collective: str, x: Any, wire: str | None = None) -> Before | None:
        """What is known of `x` if a call like this went natively before, and still may.

        Who makes the call counts it, `left`, once its arguments are found right: on every rank.
        """
        # A bare lookup: small native calls are to cost as little as without a switch.
        if not self._fast or self._forced is not None:
            return None
        key = collective, getattr(x, "dtype", None), getattr(x, "shape", None), wire
        before = self._fast.get(key)
        return before if before is not None and before.left > 0 else None

    @contextmanager
    def forced(self, choice: Choice) -> Iterator[None]:
        """Take one path whatever the model says."""
        before, self._forced = self._forced, choice
        try:
            yield
        finally:
            self._forced = before

    def ratio(self, collective: str, dtype: DType, nbytes: int) -> int:
        """This rank's last ratio at about this size, for a descriptor; 0 if there was none."""
        return self._last.get((collective, dtype.name, nbytes.bit_length()), 0)

    def went(self, collective: str, dtype: DType, nbytes: int, ratio: float) -> None:
        """This rank sent `ratio` bytes for each byte of an input of `nbytes`."""
        key = collective, dtype.name, nbytes.bit_length()
        self._last[key] = max(1, round(ratio * _UNIT))

    def came(self, dtype: DType, nbytes: int, said: Any) -> None:
        """The ratios of all ranks, shape (world_size,), by their descriptors."""
        worst = int(said.max(initial=0))
        if self._auto and self._forced is None and 0 < worst <= 2 * _UNIT:
            self._ratios.update(self._codec.name, dtype.name, nbytes, worst / _UNIT)

    def _ratio(self, dtype: DType, nbytes: int) -> float:
        known = self._known.get(dtype)
        if known is None:
            plan = self._codec.plan((_LARGE // dtype.itemsize,), dtype)
            fixed = not plan.dynamic_stride
            known = self._known[dtype] = plan.static_stride / _LARGE if fixed else 0.0
        if known:
            return known
        return self._ratios.ratio(self._codec.name, dtype.name, nbytes)


def _weakly(method: _Measure) -> _Measure:
    """`method`, without a reference to its object: that goes with its last user, not in a cycle."""
    found = weakref.WeakMethod(method)

    def call(collective: str, x: Any, info: ArrayInfo, source: DType | None) -> Measured:
        bound = found()
        assert bound is not None
        return bound(collective, x, info, source)

    return call


def _place(x: Any) -> str:
    """What a model is of: ranks have devices of their own, and the host's memory is one."""
    return "gpu" if tensors.is_cuda(x) else "host"


def _model(measured: Measured) -> Model:
    native, compressed, pipelined = (
        [(n, row[k]) for n, row in zip(measured.sizes, measured.seconds, strict=True)]
        for k in range(3)
    )
    ratio = min(measured.ratio, _WORST)
    nbytes, seconds = pipelined[-1]
    return Model.measured(native, compressed, ratio, (nbytes, measured.pieces, seconds))
