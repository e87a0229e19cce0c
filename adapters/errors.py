"""The error of calls between ranks."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A collective failed on this rank. ``__cause__`` is what the transport or the decoder raised.

    If the ranks are still in step (all data had been exchanged, only decoding failed), the
    communicator can be used on; else it refuses every later call.

    Args:
        rank: This rank.
        collective: Name of the collective.
        sequence: Number of the call among the collectives of the group; for messages, among those
            of the pair of ranks.
        stage: The stage of the call that failed, such as ``"agree"`` or ``"decode"``.
        detail: What went wrong. In sums over hops it names the hop, counted from 0, and its sender,
            or the gather of the sums after the last hop.

    Raises:
        RuntimeError: Never here; it is the base class.
    """

    def __init__(self, rank: int, collective: str, sequence: int, stage: str, detail: str) -> None:
        super().__init__(rank, collective, sequence, stage, detail)
        self.rank = rank
        self.collective = collective
        self.sequence = sequence
        self.stage = stage
        self.detail = detail

    def __str__(self) -> str:
        call = f"{self.collective} #{self.sequence}"
        return f"rank {self.rank}: {call} failed in stage {self.stage!r}: {self.detail}"


def described(error: BaseException) -> str:
    """An error as other ranks are told of it: with its type, where its text says too little.

    Args:
        error: The error.

    Returns:
        The text; the name of the type if the error raises instead of giving one.
    """
    try:
        text = str(error)
    except Exception:
        return type(error).__name__
    own = isinstance(error, CollectiveError)
    return text if own else f"{type(error).__name__}: {text}".removesuffix(": ")
