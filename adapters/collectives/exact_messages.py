"""Messages of prepared calls in as many bytes as they need: ``PreparedCalls(sizes="exact")``.

Memory is for any data, so everything fits. What a message needs is read on the host when it has
been encoded, and told to those who receive it, before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import arrays
from ...formats.dtypes import BY_NAME
from ...formats.header import align
from . import tensors
from .agreement import gather_plain, opened, with_checksum
from .messages import Cut, Layout, Messages, NetworkRoute, Phase

_INT64 = BY_NAME["int64"]
#: Bytes of each buffer of some messages, shape (messages, parts).
_Sizes = npt.NDArray[np.int64]


class ExactRoute(NetworkRoute):
    """Messages that a transport moves without what they do not need."""

    learns = False
    reads_sizes = True
    name = "network, exact sizes"

    def gathered(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """See ``Route``."""
        whole = super().gathered(nbytes, like, phase)
        received = whole.received
        rank, ranks = self._transport.rank, range(self._transport.world_size)

        def exchange(layouts: Sequence[Layout], message: Any = whole.sent[0]) -> int:
            mine = _sizes([message], [layouts[rank]], [0])
            sizes = gather_plain(self._transport, mine.reshape(-1).view(np.uint8)).view(np.int64)
            parts = _pieces(message, layouts[rank], mine[0])
            outs = [_pieces(received[r], layouts[r], sizes[r]) for r in ranks]
            tensors.put(received[rank], message)
            return self._move(outs, [parts] * len(ranks))

        return self._exact(whole, exchange)

    def swapped(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """See ``Route``."""
        whole = super().swapped(nbytes, like, phase)
        sent, received = whole.sent, whole.received
        rank, ranks = self._transport.rank, range(self._transport.world_size)

        def exchange(layouts: Sequence[Layout]) -> int:
            # Nobody encodes what a rank would send to itself.
            mine = _sizes(sent, layouts, [r for r in ranks if r != rank])
            told = np.stack([with_checksum(row.view(np.uint8)) for row in mine])
            x, out = (self._transport.empty(told.size) for _ in range(2))
            x[:] = tensors.on_device(told.reshape(-1), tensors.device_of(x))
            self._transport.all_to_all(out, x)
            arrived = arrays.host_array(out).reshape(told.shape)
            sizes = opened(arrived, ranks).view(np.int64)
            xs = [_pieces(sent[r], layouts[r], mine[r]) for r in ranks]
            outs = [_pieces(received[r], layouts[rank], sizes[r]) for r in ranks]
            return self._move(outs, xs)

        return self._exact(whole, exchange)

    def spread(self, nbytes: int, like: Any, phase: Phase, root: int) -> Messages:
        """See ``Route``."""
        whole = super().spread(nbytes, like, phase, root)
        sent, received = whole.sent, whole.received
        rank, ranks = self._transport.rank, range(self._transport.world_size)

        def exchange(layouts: Sequence[Layout]) -> int:
            # The others have encoded nothing.
            mine = _sizes(sent, layouts, ranks if rank == root else [])
            told = with_checksum(mine.reshape(-1).view(np.uint8))
            x = self._transport.empty(told.size)
            x[:] = tensors.on_device(told, tensors.device_of(x))
            self._transport.broadcast(x, root)
            found = opened(arrays.host_array(x).reshape(1, -1), [root]).view(np.int64)
            sizes = found.reshape(len(ranks), -1)
            shares = [_pieces(sent[r], layouts[r], sizes[r]) for r in ranks]
            xs = [share if rank == root else [] for share in shares]
            moved = self._move([shares[rank] if r == root else [] for r in ranks], xs)
            tensors.put(received[rank], sent[rank])
            outs = [_pieces(received[r], layouts[r], sizes[r]) for r in ranks]
            return moved + self._move(outs, [shares[rank]] * len(ranks))

        return self._exact(whole, exchange)

    def _exact(self, whole: Messages, exchange: Callable[..., int]) -> Messages:
        """`whole`, whose messages are cut by `exchange` if their sizes depend on data."""
        # It must not refer to the messages, which refer to it.
        plainly, cut = whole.exchange, Cut()

        def chosen(*message: Any) -> None:
            if any(plan.dynamic_stride for layout in cut.layouts for plan in layout.plans):
                cut.moved = exchange(cut.layouts, *message)
            else:
                plainly(*message)

        whole.exchange, whole.cut = chosen, cut
        return whole

    def _move(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> int:
        """Send pieces to other ranks, and receive theirs; the bytes that were sent."""
        rank = self._transport.rank
        others = [[[] if r == rank else list(row) for r, row in enumerate(v)] for v in (outs, xs)]
        self._transport.all_to_all_v(*others)
        return sum(int(piece.shape[0]) for row in others[1] for piece in row)


def _sizes(messages: Sequence[Any], layouts: Sequence[Layout], encoded: Sequence[int]) -> _Sizes:
    """How many bytes of each buffer are needed, by message; none of those not `encoded`.

    Waits for the device.
    """
    sizes = np.zeros((len(layouts), len(layouts[0].plans)), np.int64)
    # What has no elements is not encoded either.
    places = [(m, p) for m in encoded for p, plan in enumerate(layouts[m].plans) if plan.nelem]
    if not places:
        return sizes
    words = [tensors.view(messages[m], _INT64)[layouts[m].record(p) :][:1] for m, p in places]
    if tensors.is_torch(words[0]):
        import torch

        found = torch.cat(words).cpu().numpy()
    else:
        found = np.concatenate(words)
    for (m, p), need in zip(places, found, strict=True):
        plan = layouts[m].plans[p]
        sizes[m, p] = min(align(plan.dynamic_offset + int(need)), plan.nbytes)
    return sizes


def _pieces(message: Any, layout: Layout, sizes: npt.NDArray[np.int64]) -> list[Any]:
    """The bytes of a message's buffers that are needed."""
    rows = zip(layout.starts, sizes.tolist(), strict=True)
    return [message[start : start + nbytes] for start, nbytes in rows if nbytes]
