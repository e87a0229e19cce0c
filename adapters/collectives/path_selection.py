"""Path selection of a Communicator, and what it knows about its paths (ZipCCL, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ...arrays import ArrayInfo
from ...codec import Codec
from ...formats.dtypes import DType
from . import tensors
from .cost import Choice, Model, Ratios

Algorithm = Literal["auto", "native", "compressed", "pipelined"]
ALGORITHMS = ("auto", "native", "compressed", "pipelined")

#: A call like one that went natively.
NATIVE_AGAIN = Choice("native", 1, 0.0, 0.0, "as before")
#: A ratio travels as a whole number of these.
_UNIT = 1 << 20
#: Shapes that are remembered.
_MOST = 4096
#: Calls that follow a choice before it is thought over.
_KEPT = 100
#: Collectives whose native calls may skip the question.
SUMS = ("reduce_scatter", "all_reduce")
#: An all-to-all of unequal parts, as what is measured.
UNEQUAL = "all_to_all_v"
_FAST = ("all_gather", "all_to_all", *SUMS)
_MOST_PIECES = 8
#: Seconds that all measurements of a communicator may take. After that two sizes are timed.
BUDGET = 2.0
#: Bytes of a message from which on it may be compressed, and of what counts as a large one.
_MESSAGE = 1 << 20
_LARGE = 1 << 28
#: Of small messages headers and descriptors are more than half.
_WORST = 1.5


class Measured(NamedTuple):
    """Seconds of native, compressed and pipelined path by bytes of a rank's input.

    Messages and all-to-alls of unequal parts have no pipelined path.
    """

    sizes: tuple[int, ...]
    seconds: list[list[float]]
    #: Of the pipelined path.
    pieces: int
    #: Of the data that were sent.
    ratio: float


Measure = Callable[[str, Any, ArrayInfo, DType | None, str], Measured]


class NativeCall:
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


class PathSelection:
    """Chooses between the paths of a collective; equal calls make equal choices on every rank.

    A ratio that a rank has seen travels in the descriptors of its next call, and the largest of all
    counts: ranks see different data, but choose alike.
    """

    def __init__(
        self, codec: Codec, algorithm: Algorithm, pieces: int | None, granularity: int
    ) -> None:
        self._codec = codec
        self._auto = algorithm == "auto"
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
        self._fast: dict[tuple[Any, ...], NativeCall] = {}
        self._last: dict[tuple[str, str, int], int] = {}
        #: By pair of ranks, of messages; "" for those of collectives, which all ranks share.
        self._ratios: dict[str, Ratios] = {}
        #: Bytes of the largest input of all ranks in the last unequal all-to-all, by dtype.
        self._largest: dict[str, int] = {}
        #: By dtype, of codecs without dynamic parts; 0 where it depends on the data.
        self._known: dict[DType, float] = {}

    @property
    def chooses(self) -> bool:
        """Whether the path depends on what is measured."""
        return self._auto

    @property
    def codes(self) -> bool:
        """Whether the path is another than the native one, whatever is measured."""
        return self._forced is not None and self._forced.algorithm != "native"

    def choose(
        self,
        collective: str,
        x: Any,
        info: ArrayInfo,
        source: DType | None,
        topology: str,
        measure: Measure,
    ) -> Choice:
        """The path for `x`, whose shape all ranks know and whose elements travel as `info` says.

        `source` is their dtype if that is another, `topology` that of a sum, else "". `measure`
        times the paths where that has not been done: collective, array, what travels, `source` and
        `topology`.
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
            return self._natively(collective, x, choice, wire, topology)
        # Natively the dtype that x has is what is summed.
        pair = dtype if source is None or wire is None else f"{source.name} as {dtype}"
        key = f"{collective} {topology}", pair, place_of(x)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = _model(measure(collective, x, info, source, topology))
        nbytes = math.prod(info.shape) * info.dtype.itemsize
        found = self._chosen(key, model, nbytes, info.dtype, _MOST_PIECES)
        return self._natively(collective, x, found, wire, topology)

    def choose_splits(
        self, x: Any, info: ArrayInfo, measure: Measure, tell: Callable[[], None]
    ) -> Choice:
        """The path of an all-to-all in which every rank knows sizes of its own only.

        The largest input of all ranks decides, in the last such call: its descriptors have told it.
        Before the first one `tell` makes them. `measure` times all-to-alls of unequal parts.
        """
        if self._forced is not None:
            return self._forced
        name, dtype = self._codec.name, info.dtype.name
        if not self._gains(info.dtype, _LARGE // info.dtype.itemsize):
            return Choice("native", 1, 0.0, 0.0, f"{name} gains nothing on {dtype}")
        key = f"{UNEQUAL} ", dtype, place_of(x)
        row = info._replace(shape=info.shape[1:])
        if dtype not in self._largest:
            tell()
        if key not in self._models:
            self._models[key] = _model(measure(UNEQUAL, x, row, None, ""))
        return self._chosen(key, self._models[key], _rounded(self._largest[dtype]), info.dtype, 1)

    def choose_message(
        self, x: Any, info: ArrayInfo, pair: str, measure: Callable[[], Measured]
    ) -> Choice:
        """The path of a message of `pair`, two ranks in one direction, which `measure` times.

        Both ranks have made the same calls with each other, and choose alike. Small messages are
        native, and nothing is timed for them.
        """
        if self._forced is not None:
            return self._forced
        nelem = math.prod(info.shape)
        if nelem * info.dtype.itemsize < _MESSAGE:
            return Choice("native", 1, 0.0, 0.0, f"under {_MESSAGE} bytes")
        name, dtype = self._codec.name, info.dtype.name
        if not self._gains(info.dtype, nelem):
            return Choice("native", 1, 0.0, 0.0, f"{name} gains nothing on {dtype}")
        key = pair, dtype, place_of(x)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = _model(measure())
        return self._chosen(key, model, nelem * info.dtype.itemsize, info.dtype, 1, pair)

    def _chosen(
        self,
        key: tuple[str, str, str],
        model: Model,
        nbytes: int,
        dtype: DType,
        most_pieces: int,
        pair: str = "",
    ) -> Choice:
        """What the model of `key` says of `nbytes`; ratios of messages are those of the `pair`."""
        ratio = self._ratio(dtype, nbytes, pair)
        question = (*key, nbytes, ratio)
        found = self._choices.get(question)
        if found is None:
            if len(self._choices) >= _MOST:
                self._choices.clear()
            found = self._choices[question] = model.choose(nbytes, ratio, most_pieces)
        return found

    def _gains(self, dtype: DType, nelem: int) -> bool:
        # Of a chunk's size there is a limit, and more than this changes nothing.
        nelem = min(nelem, _LARGE // dtype.itemsize)
        return self._codec.plan((nelem,), dtype).codec.name == self._codec.name

    def _natively(
        self, collective: str, x: Any, choice: Choice, wire: str | None, topology: str
    ) -> Choice:
        """Remember a native choice for calls like this one."""
        if choice.algorithm == "native" and collective in _FAST:
            if len(self._fast) >= _MOST:
                self._fast.clear()
            self._fast[collective, x.dtype, x.shape, wire, topology] = NativeCall(_KEPT)
        return choice

    def native_again(
        self, collective: str, x: Any, wire: str | None = None, topology: str = ""
    ) -> NativeCall | None:
        """What is known of `x` if a call like this went natively before, and still may.

        Who makes the call counts it, `left`, once its arguments are found right: on every rank.
        """
        # A bare lookup: small native calls are to cost as little as without a switch.
        if not self._fast or self._forced is not None:
            return None
        key = collective, getattr(x, "dtype", None), getattr(x, "shape", None), wire, topology
        before = self._fast.get(key)
        return before if before is not None and before.left > 0 else None

    def look_again(self) -> None:
        """Forget what was measured and seen; on all ranks between the same calls."""
        for known in (self._models, self._choices, self._fast, self._ratios):
            known.clear()

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

    def learn(self, dtype: DType, nbytes: int, said: Any) -> None:
        """The ratios of all ranks, shape (world_size,), by their descriptors."""
        worst = int(said.max(initial=0))
        if self._auto and self._forced is None and 0 < worst <= 2 * _UNIT:
            self._seen("").update(self._codec.name, dtype.name, nbytes, worst / _UNIT)

    def learn_message(self, pair: str, dtype: DType, nbytes: int, ratio: float) -> None:
        """A message of `nbytes` took `ratio` bytes for each; both ranks of the `pair` know."""
        if self._auto and self._forced is None:
            self._seen(pair).update(self._codec.name, dtype.name, nbytes, ratio)

    def learn_splits(self, dtype: DType, said: Any) -> None:
        """The bytes of all ranks' inputs, by their descriptors, in an unequal all-to-all."""
        if self._auto and self._forced is None:
            self._largest[dtype.name] = int(said.max())

    def _seen(self, pair: str) -> Ratios:
        found = self._ratios.get(pair)
        if found is None:
            found = self._ratios[pair] = Ratios(patience=10)
        return found

    def _ratio(self, dtype: DType, nbytes: int, pair: str = "") -> float:
        known = self._known.get(dtype)
        if known is None:
            plan = self._codec.plan((_LARGE // dtype.itemsize,), dtype)
            fixed = not plan.dynamic_stride
            known = self._known[dtype] = plan.static_stride / _LARGE if fixed else 0.0
        if known:
            return known
        return self._seen(pair).ratio(self._codec.name, dtype.name, nbytes)


def place_of(x: Any) -> str:
    """Where what is measured is: ranks have devices of their own, and the host's memory is one."""
    return "gpu" if tensors.is_cuda(x) else "host"


def _model(measured: Measured) -> Model:
    native, compressed, *pipelined = (
        [(n, row[k]) for n, row in zip(measured.sizes, measured.seconds, strict=True)]
        for k in range(len(measured.seconds[0]))
    )
    ratio = min(measured.ratio, _WORST)
    if not pipelined:
        return Model.measured(native, compressed, ratio)
    nbytes, seconds = pipelined[0][-1]
    return Model.measured(native, compressed, ratio, (nbytes, measured.pieces, seconds))


def _rounded(nbytes: int) -> int:
    """The next power of two, as sizes of every call differ."""
    return 1 << max(0, nbytes - 1).bit_length()
