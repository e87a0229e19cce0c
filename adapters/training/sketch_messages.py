"""Messages of sums by index and sketch, whose verdicts are waited for later."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch

from ..collectives.calls import Call
from ..collectives.communicator import Communicator
from ..collectives.tensors import PendingHostCopy, is_cuda

#: Bytes before every message: a digest of the call, a checksum of what follows.
DESCRIPTOR_NBYTES = 16
#: What can be wrong with a message.
_DAMAGED, _OTHER = 1, 2


class Verdict(NamedTuple):
    """The stages of some messages, and of each what is wrong with those from each rank."""

    stages: list[str]
    arriving: PendingHostCopy


class Wire:
    """Messages of a call, each after its descriptor: uint8, (rows, DESCRIPTOR_NBYTES + n)."""

    def __init__(self, comm: Communicator, call: Call, facts: str) -> None:
        """All ranks must have the same `facts`."""
        self._transport, self._call = comm.transport, call
        self._facts, self._digest = facts, digest(facts)
        #: Stages of messages, and on the device what is wrong with those from each rank.
        self._verdicts: list[tuple[str, Any]] = []

    def message(self, rows: int, nbytes: int, like: Any) -> Any:
        """Memory for a message of `nbytes`, a multiple of 8, to each of so many ranks."""
        return like.new_empty((rows, DESCRIPTOR_NBYTES + nbytes), dtype=torch.uint8)

    def all_to_all(self, stage: str, sent: Any) -> Any:
        """Row j of `sent` to rank j; row i is rank i's, without descriptor: shape (ranks, n)."""
        with self._call.stage(stage):
            self._seal(sent)
            received = torch.empty_like(sent)
            self._transport.all_to_all(received.view(-1), sent.view(-1))
            self._call.wire_bytes += sent[0].numel() * (len(sent) - 1)
            return self._opened(stage, received)

    def all_gather(self, stage: str, sent: Any) -> Any:
        """The only row of all ranks' `sent`, without descriptors, shape (ranks, n)."""
        with self._call.stage(stage):
            self._seal(sent)
            received = sent.new_empty((self._transport.world_size, sent.shape[1]))
            self._transport.all_gather(received.view(-1), sent.view(-1))
            self._call.wire_bytes += sent.numel() * (len(received) - 1)
            return self._opened(stage, received)

    def verdict(self, numbers: Any = None) -> Verdict:
        """What is wrong with the messages since the last one, and `numbers`, int64.

        They are copied to the host after what is queued on the device now.
        """
        verdicts, self._verdicts = self._verdicts, []
        pieces = [wrong for _, wrong in verdicts] + ([] if numbers is None else [numbers])
        return Verdict([stage for stage, _ in verdicts], PendingHostCopy(torch.cat(pieces)))

    def settle(self, verdict: Verdict) -> list[int]:
        """Wait for a verdict and raise what it says; gives the numbers.

        Raises CollectiveError that names the rank.
        """
        found: list[int] = verdict.arriving.wait(self._transport.timeout).tolist()
        ranks = self._transport.world_size
        for i, stage in enumerate(verdict.stages):
            wrong = found[i * ranks : (i + 1) * ranks]
            if _OTHER in wrong:
                rank = wrong.index(_OTHER)
                detail = f"rank {rank} has other settings or layers, or is at another step"
                detail = f"{detail} than here: {self._facts}"
                raise self._call.failure(stage, detail)
            if _DAMAGED in wrong:
                rank = wrong.index(_DAMAGED)
                raise self._call.failure(stage, f"data from rank {rank} are damaged")
        return found[len(verdict.stages) * ranks :]

    def _seal(self, sent: Any) -> None:
        words = sent.view(torch.int64)
        words[:, 0] = self._digest
        words[:, 1] = _checksum(words[:, 2:])

    def _opened(self, stage: str, received: Any) -> Any:
        words = received.view(torch.int64)
        damaged = words[:, 1] != _checksum(words[:, 2:])
        wrong = torch.where(words[:, 0] == self._digest, damaged * _DAMAGED, _OTHER)
        self._verdicts.append((stage, wrong))
        if not is_cuda(received):
            self.settle(self.verdict())
        return received[:, DESCRIPTOR_NBYTES:]


def digest(text: str) -> int:
    """64 bits that tell a text from others, as a signed number."""
    found = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def _checksum(words: Any) -> Any:
    """The sum modulo 2^64 of int64 words times odd numbers, by row.

    No flipped bit escapes it, nor do two different words that change places, unless the distance of
    their places times their difference is a multiple of 2^63.
    """
    return (words * torch.arange(1, 2 * words.shape[1] + 1, 2, device=words.device)).sum(1)
