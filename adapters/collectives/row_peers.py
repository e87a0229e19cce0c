"""Messages of rows that are read where they lie, in memory that the ranks of a host can all read.

A rank encodes into its own memory, all come to a barrier, and each decodes what is for it out of
the memory of the others. Everything fits, and no more is read than there is; on a GPU nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...arrays import ArrayInfo
from ...buffer import Buffer
from ...formats.dtypes import BY_NAME
from ...formats.header import ALIGN
from ..transports.peer import PeerMemory, Region
from . import tensors
from .calls import Call
from .row_messages import OTHER_CALL
from .steps import Steps

_INT64 = BY_NAME["int64"]
#: Memory is made in multiples of this, and of its size in so many bits less one.
_LEAST, _STEPS = 1 << 12, 4
#: Layouts of messages that are kept.
_KEPT = 64


class PendingWords(NamedTuple):
    """Digests of all ranks, and on a GPU who did not come, in flight to the host: see ``Late``."""

    arriving: tensors.PendingHostCopy
    digest: int
    ranks: int
    #: Takes `arriving` back when it is over.
    spare: list[tensors.PendingHostCopy]

    def settle(self, call: Call, timeout: float) -> None:
        """Raise if a rank did not come, or makes another call."""
        told = self.arriving.wait(timeout).tolist()
        for word in told[self.ranks :]:
            if word:
                raise call.failure("exchange", f"rank {word - 1} did not come in time")
        strange = [i for i, word in enumerate(told[: self.ranks]) if word != self.digest]
        if strange:
            raise call.failure("exchange", f"ranks {strange} {OTHER_CALL}; here: {call.text}")
        self.spare.append(self.arriving)


class _Layout(NamedTuple):
    """Where messages of certain plans lie.

    Attributes:
        plans: Those to each rank: who looks a layout up knows them by their `id`.
        data: Memory of each of these.
        buffers: Those that come from each rank.
        words: By rank the digest of its call: int64, shape (1,).
    """

    plans: Sequence[Any]
    data: list[Any]
    buffers: list[Buffer]
    words: list[Any]


class PeerMessages:
    """As ``RowMessages``, between ranks that all know how many rows each has for each.

    Args:
        steps: Those of a session. Tensors are PyTorch's.
        peers: The memory.
    """

    def __init__(self, steps: Steps, peers: PeerMemory) -> None:
        self._memory, self._coding, self._comparisons = (
            steps.memory,
            steps.coding,
            steps.comparisons,
        )
        self._rank, self._size = steps.session.rank, steps.session.size
        self._peers = peers
        #: Calls take turns: who writes again has seen all come that read this memory before. What
        #: is too small stays, as others may still read it.
        self._regions: tuple[list[Region], list[Region]] = ([], [])
        self._turn = 0
        self._layouts: dict[Any, _Layout] = {}
        self._spare: list[tensors.PendingHostCopy] = []

    def exchange(
        self,
        call: Call,
        parts: Sequence[Any],
        outs: Sequence[Any],
        info: ArrayInfo,
        sizes: Sequence[Sequence[int]],
        meanwhile: Callable[[], None],
    ) -> None:
        """Send `parts[j]`, 1-D, to rank j, and fill `outs[i]` with what rank i sends.

        Those of this rank itself are empty. `sizes[i][j]` elements go from rank i to rank j,
        whatever a rank has for itself; `meanwhile` is called when all have come.
        """
        plan, dtype = self._memory.plan, info.dtype
        nelems = {n for i, row in enumerate(sizes) for j, n in enumerate(row) if i != j}
        stride = max(plan(dtype, n).nbytes for n in nelems)
        with call.stage("exchange"):
            region = self._region(ALIGN + self._size * stride)
        there = [plan(dtype, part.shape[0]) for part in parts]
        here = [plan(dtype, out.shape[0]) for out in outs]
        key = id(region), stride, tuple(map(id, there)), tuple(map(id, here))
        if key not in self._layouts:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            self._layouts[key] = self._laid(region, stride, there, here, parts[0])
        laid = self._layouts[key]
        self._coding.encode_to(call, parts, there, laid.data)
        digest = call.digest(info, info.shape[1:])
        with call.stage("exchange"):
            laid.words[self._rank].fill_(digest)
            region.barrier()
            pending = PendingWords(self._told(region, laid.words), digest, self._size, self._spare)
            self._comparisons.check_late(call, pending)
        meanwhile()
        some = [p for p in there if p.nelem]
        call.raw_bytes += sum(p.nelem * dtype.itemsize for p in some)
        # Nobody knows here how much of a dynamic part there is.
        call.wire_bytes += sum(p.dynamic_offset for p in some)
        call.exchanged = True
        self._coding.decode_many(call, laid.buffers, outs)

    @tensors.kept
    def _told(self, region: Region, words: Sequence[Any]) -> tensors.PendingHostCopy:
        import torch

        late = region.late()
        told = torch.cat([*words] if late is None else [*words, late])
        return tensors.PendingHostCopy(told, self._spare.pop() if self._spare else None)

    @tensors.kept
    def _region(self, nbytes: int) -> Region:
        """Memory of at least so many bytes, the same on all ranks."""
        self._turn = 1 - self._turn
        known = self._regions[self._turn]
        before = known[-1].parts[self._rank].shape[0] if known else 0
        if before < nbytes:
            # All that is too small together takes a few times as much as the last.
            nbytes = max(nbytes, before + before // 2)
            known.append(self._peers.region(tensors.rounded(nbytes, _STEPS, _LEAST)))
        return known[-1]

    @tensors.kept
    def _laid(
        self, region: Region, stride: int, there: Sequence[Any], here: Sequence[Any], like: Any
    ) -> _Layout:
        """Where messages lie, behind a word of each rank."""
        memory = [_tensor(part) for part in region.parts]
        mine, begin = memory[self._rank], ALIGN + self._rank * stride
        data = [mine[ALIGN + j * stride :][: plan.nbytes] for j, plan in enumerate(there)]
        buffers = [
            Buffer.wrap(plan, part[begin : begin + plan.nbytes])
            for plan, part in zip(here, memory, strict=True)
        ]
        tensors.report(buffers, self._memory.status_words(like))
        digests = [tensors.view(part[: _INT64.itemsize], _INT64) for part in memory]
        return _Layout(there, data, buffers, digests)


def _tensor(memory: Any) -> Any:
    """Memory of threads is NumPy's."""
    if tensors.is_torch(memory):
        return memory
    import torch

    return torch.from_numpy(memory)
