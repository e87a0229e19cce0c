"""Messages that are encoded once for several calls on a tensor that has not changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import arrays
from . import tensors
from .messages import Layout, zeros

#: Words of eight bytes that are compared at once: a change mostly shows in the first.
_PIECE = 32 << 10


class Budget:
    """Memory that kept messages may take together.

    Args:
        nbytes: Bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def take(self, nbytes: int) -> bool:
        """Whether there are so many bytes, which are taken then; a negative number gives back.

        Args:
            nbytes: Bytes.
        """
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True


class KeptMessage:
    """A message for ``prepared_gathers.AllGather``, sent again while its tensors are the same.

    Args:
        budget: What messages may take together.
        compares: Whether tensors are compared with copies, bit for bit. The host would have to wait
            for that on a GPU. Else tensors are the same if ``state`` is.
    """

    def __init__(self, budget: Budget, *, compares: bool = True) -> None:
        #: If tensors are not compared: what those of the next call depend on. None: not known.
        self.state: Any = None
        #: Calls for which nothing was encoded.
        self.sent_again = 0
        self._budget, self.compares = budget, compares
        self._taken = 0
        self._layout: Layout | None = None
        self._memory: Any = None
        self._stream: Any = None
        #: What the message was encoded from: copies, or a state.
        self._copies: list[Any] = []
        self._encoded: Any = None
        #: Whether the message was encoded to its end.
        self._whole = False

    def memory(self, layout: Layout, like: Any) -> Any:
        """Memory of a message that is laid out so; None if none may be taken.

        On a GPU a message stays on one stream, which orders its encoding and its exchanges.

        Args:
            layout: Of the message.
            like: An array of the library and device.
        """
        if layout != self._layout:
            self.free()
            copies = sum(plan.nelem * plan.dtype.itemsize for plan in layout.plans)
            nbytes = layout.nbytes + (copies if self.compares else 0)
            if not self._budget.take(nbytes):
                return None
            self._taken, self._layout = nbytes, layout
            self._memory = tensors.kept(zeros)(layout.nbytes, like)
            self._stream = tensors.current_stream(like)
        return self._memory if tensors.current_stream(like) == self._stream else None

    def holds(self, xs: Sequence[Any]) -> bool:
        """Whether the message is that of these tensors. If not, it may be overwritten.

        Args:
            xs: Contiguous, one for each buffer of the message.
        """
        if not self._whole:
            return False
        if not self.compares:
            self._whole = self.state is not None and bool(self.state == self._encoded)
        else:
            rows = zip(self._copies, xs, strict=True)
            self._whole = all(_equal(copy, _host(x)) for copy, x in rows)
        self.sent_again += self._whole
        return self._whole

    def note(self, xs: Sequence[Any]) -> None:
        """Say that these tensors have been encoded as the message.

        Args:
            xs: As in ``holds``.
        """
        if not self.compares:
            self._encoded = self.state
        elif self._copies:
            for copy, x in zip(self._copies, xs, strict=True):
                copy[...] = _host(x)
        else:
            self._copies = [_host(x).copy() for x in xs]
        self._whole = True

    def free(self) -> None:
        """Give the memory back."""
        self._budget.take(-self._taken)
        self._taken, self._layout, self._whole = 0, None, False
        self._memory = self._encoded = None
        self._copies = []


def _host(x: Any) -> Any:
    return arrays.host_array(tensors.as_bytes(x))


def _equal(x: Any, y: Any) -> bool:
    end = x.shape[0] // 8 * 8
    # NumPy compares words faster than bytes.
    words, others = x[:end].view(np.int64), y[:end].view(np.int64)
    pieces = (slice(at, at + _PIECE) for at in range(0, words.shape[0], _PIECE))
    same = all(np.array_equal(words[piece], others[piece]) for piece in pieces)
    return same and np.array_equal(x[end:], y[end:])
