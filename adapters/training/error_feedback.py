"""Error feedback: what a lossy codec loses of a tensor is added to the next one of its name.

After Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014), and Karimireddy et al.,
"Error Feedback Fixes SignSGD" (ICML 2019), algorithm 2: x + e is encoded, and e becomes what
decoding has lost of it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import arrays
from ...buffer import Buffer
from ...codec import Codec
from ...decoding import decode
from ...formats.dtypes import DType
from ..collectives import tensors
from ..collectives.arguments import check_round_trips

#: Names and numbers of elements of the tensors that lie one behind the other in another.
Parts = Sequence[tuple[str, int]]
#: A rank, and the number of ranks.
_Place = tuple[int, int]


class ErrorFeedback:
    """Residuals by name: what encoding loses of a tensor is added to the next one of that name.

    Residuals are float32 (float64 for float64) and take as much memory as the tensors. A tensor may
    be made of *parts*, pairs of a name and a number of elements: each has its residual, so that
    buckets may be cut differently from step to step. A residual whose size changes starts at zero;
    entries that are infinite or NaN become zero.

    Tensors are PyTorch's or NumPy's, on any device, and are not modified. Not for use by several
    threads at once. Every rank has an object of its own, with the residuals of what it sends; a
    saved state is for the rank that saved it, among as many ranks, and others are refused.

    The residual of a step whose result is discarded, as after another rank's overflow, is lost:
    where steps are skipped, take a ``state_dict()`` before. With loss scaling residuals are scaled
    alike.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et
    al., "Error Feedback Fixes SignSGD" (ICML 2019), algorithm 2.

    Raises:
        ValueError: By methods, for a state of another rank or number of ranks.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> feedback = tw.ErrorFeedback()
        >>> x = np.full(1024, 0.3, np.float32)
        >>> mx4 = tw.codec("mx", element="e2m1")
        >>> sent = [tw.decode(feedback.encode(mx4, x, "x")) for _ in range(100)]
        >>> bool(abs(np.mean(sent) - 0.3) < 0.001)
        True
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Any] = {}
        #: The residuals of parts that came together lie in one array.
        self._joined: dict[tuple[tuple[str, int], ...], Any] = {}
        #: By name, whose residual it is: rank and number of ranks.
        self._places: dict[str, _Place] = {}
        #: The same of what was loaded, until `belongs`; None if the state did not say.
        self._loaded: dict[str, _Place | None] = {}

    def belongs(self, names: Iterable[str], rank: int, world_size: int) -> None:
        """Note that residuals of these names are of this rank, of so many ranks. Hooks call it.

        Args:
            names: Names of residuals.
            rank: This rank.
            world_size: Number of ranks.

        Raises:
            ValueError: If a residual was loaded from the state of another rank or number of ranks,
                or from one that does not say.
        """
        mine = rank, world_size
        for name in names:
            found = self._loaded.get(name, self._places.get(name, mine))
            if found != mine:
                raise ValueError(_wrong_place(name, found, mine))
            self._places[name] = mine
            self._loaded.pop(name, None)

    def encode(self, codec: Codec, x: Any, name: str, **options: Any) -> Buffer:
        """Encode x + e; the residual e becomes (x + e) - decode(buffer).

        x + e is computed in float32 (float64 for float64) and rounded to the dtype of ``x``; that
        rounding is part of the residual.

        Args:
            codec: A lossy codec.
            x: The tensor, of a float dtype.
            name: Its name.
            **options: As in ``Codec.encode``.

        Returns:
            The buffer.

        Raises:
            TypeError: If the dtype is not a float.
            ValueError: If ``codec.round_trips`` is False.
        """
        check_round_trips(codec)
        x, info, _ = tensors.as_input(x)
        parts = [(name, math.prod(info.shape))]
        corrected = self.corrected(x.reshape(-1), parts)
        buffer = codec.encode(tensors.cast(corrected, info.dtype).reshape(info.shape), **options)
        self.keep(parts, corrected, decode(buffer).reshape(-1))
        return buffer

    def corrected(self, x: Any, parts: Parts) -> Any:
        """Compute x + e; ``keep`` comes next.

        Args:
            x: The tensor, with n elements, of a float dtype.
            parts: Pairs of a name and a number of elements, n in all.

        Returns:
            float32 (float64 for float64), shape ``(n,)``.

        Raises:
            TypeError: If the dtype is not a float.
            ValueError: If the parts do not have n elements.
        """
        x, info, _ = tensors.as_input(x)
        if not info.dtype.is_float:
            raise TypeError(f"x is {info.dtype.name}; allowed: float dtypes")
        total = sum(n for _, n in parts)
        if info.shape != (total,):
            raise ValueError(f"x has shape {info.shape}; its parts have {total} elements")
        e = self._residual(parts, tensors.sum_dtype(info.dtype), x)
        return tensors.elementwise(operator.add, tensors.cast(x, tensors.sum_dtype(info.dtype)), e)

    def keep(self, parts: Parts, corrected: Any, decoded: Any) -> None:
        """Set e to corrected - decoded.

        Args:
            parts: Pairs of a name and a number of elements, n in all.
            corrected: What was to be sent: the result of ``corrected``.
            decoded: What was received, shape ``(n,)``.
        """
        e = self._residual(parts, arrays.describe(corrected).dtype, corrected)
        decoded = tensors.cast(decoded, arrays.describe(e).dtype)
        lost = tensors.elementwise(operator.sub, corrected, decoded)
        tensors.put(e, _finite(lost))

    def replace(self, parts: Parts, e: Any) -> None:
        """Set e to a given array, which is kept, not copied.

        Args:
            parts: Pairs of a name and a number of elements, n in all.
            e: Finite, float32 (float64 for float64), shape ``(n,)``.

        Raises:
            ValueError: If the parts do not have n elements.
        """
        total = sum(n for _, n in parts)
        if tuple(e.shape) != (total,):
            raise ValueError(f"e has shape {tuple(e.shape)}; its parts have {total} elements")
        at = 0
        for name, n in parts:
            before = self._residuals.get(name)
            if before is not None and tensors.is_cuda(before):
                # It may be of another stream, on which its memory would be used again.
                before.record_stream(sys.modules["torch"].cuda.current_stream(before.device))
            self._residuals[name] = e[at : at + n]
            at += n
        self._join(tuple(parts), e)

    def add(self, parts: Parts, start: int, lost: Any) -> None:
        """Add an array to a part of e: what this rank has lost of something else, such as a sum.

        Source: Tang et al., "DoubleSqueeze" (ICML 2019).

        Args:
            parts: Pairs of a name and a number of elements.
            start: First flat element to add to.
            lost: Shape ``(m,)``.
        """
        e = self._residual(parts, arrays.describe(lost).dtype, lost)
        here = e[start : start + lost.shape[0]]
        added = tensors.elementwise(operator.add, here, lost[: here.shape[0]])
        tensors.put(here, _finite(added))

    def residual(self, name: str) -> Any:
        """The residual of a tensor or part: a view, shape ``(n,)``.

        Args:
            name: Its name.

        Raises:
            KeyError: If there is none of that name.
        """
        return self._residuals[name]

    def reset(self) -> None:
        """Forget all residuals, and to which rank they belong."""
        self._residuals.clear()
        self._joined.clear()
        self._places.clear()
        self._loaded.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint of this rank.

        Returns:
            ``"residuals"`` has copies by name, ``"ranks"`` pairs of a rank and the number of ranks
            by name, for residuals that belong to a rank.
        """
        residuals = {name: tensors.copied(e) for name, e in self._residuals.items()}
        places = {**self._places, **self._loaded}
        ranks = {name: places[name] for name in residuals if places.get(name) is not None}
        return {"residuals": residuals, "ranks": ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all residuals by those of a state. They move to the devices of their tensors.

        Args:
            state: A result of ``state_dict``. A plain mapping of names to residuals does not say
                whose they are, and serves ``encode`` alone.

        Raises:
            ValueError: If a residual is of another rank or number of ranks than a hook has
                registered it for; nothing is then replaced. Hooks that are made later raise it at
                their first call.
        """
        residuals, said = state.get("residuals"), state.get("ranks", {})
        if not isinstance(residuals, Mapping):
            residuals, said = state, {}
        loaded: dict[str, _Place | None] = {}
        for name in residuals:
            place = said.get(name)
            loaded[name] = None if place is None else (int(place[0]), int(place[1]))
            mine = self._places.get(name)
            if mine is not None and loaded[name] != mine:
                raise ValueError(_wrong_place(name, loaded[name], mine))
        self._joined.clear()
        self._loaded = loaded
        self._residuals = {name: tensors.copied(e) for name, e in residuals.items()}

    @tensors.kept
    def _residual(self, parts: Parts, dtype: DType, like: Any) -> Any:
        """The residuals of `parts` in one array of the library and device of `like`."""
        key = tuple(parts)
        if len({name for name, _ in key}) < len(key):
            raise ValueError(f"parts are {[name for name, _ in key]}; allowed: different names")
        joined = self._joined.get(key)
        if joined is not None and _is_like(joined, dtype, like):
            return joined
        joined = tensors.empty((sum(n for _, n in parts),), dtype, like)
        at = 0
        for name, n in parts:
            here, before = joined[at : at + n], self._residuals.get(name)
            if before is not None and tuple(before.shape) == (n,):
                tensors.put(here, in_library_of(before, like))
                if tensors.is_cuda(before):
                    # It may be of another stream, on which its memory would be used again.
                    before.record_stream(sys.modules["torch"].cuda.current_stream(before.device))
            else:
                tensors.fill(here, 0)
            self._residuals[name] = here
            at += n
        self._join(key, joined)
        return joined

    def _join(self, key: tuple[tuple[str, int], ...], joined: Any) -> None:
        # A part has its residual in one place.
        names = {name for name, _ in key}
        self._joined = {k: j for k, j in self._joined.items() if names.isdisjoint(n for n, _ in k)}
        self._joined[key] = joined


def _wrong_place(name: str, found: _Place | None, mine: _Place) -> str:
    of = "of an unknown rank" if found is None else f"of rank {found[0]} of {found[1]}"
    return (
        f"the residual {name!r} is {of}, this is rank {mine[0]} of {mine[1]}; allowed: the state "
        "that this rank has saved among as many ranks, or none: reset()"
    )


def _is_like(e: Any, dtype: DType, like: Any) -> bool:
    same_place = tensors.is_torch(e) == tensors.is_torch(like)
    same_place = same_place and tensors.device_of(e) == tensors.device_of(like)
    return same_place and arrays.describe(e).dtype == dtype


def in_library_of(e: Any, like: Any) -> Any:
    """`e` in the library of `like`: a loaded residual may be of another."""
    if tensors.is_torch(e) == tensors.is_torch(like):
        return e
    return tensors.on_device(arrays.host_array(e), tensors.device_of(like))


def _finite(e: Any) -> Any:
    """`e` with zeros for infinities and NaN."""
    if tensors.is_torch(e):
        return e.nan_to_num_(0.0, 0.0, 0.0)
    return np.nan_to_num(e, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
