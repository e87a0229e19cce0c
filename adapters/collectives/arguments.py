"""Checks of what callers of a collective give."""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays import ArrayInfo
from ...codec import Codec
from ...planning import integer


def rows_of(info: ArrayInfo) -> tuple[int, tuple[int, ...]]:
    """Number and shape of the rows of x."""
    if not info.shape:
        raise ValueError("x has shape (); allowed: at least one dimension")
    return info.shape[0], info.shape[1:]


def equal_splits(rows: int, ranks: int) -> list[int]:
    """The rows of each rank's equal share."""
    if rows % ranks:
        raise ValueError(f"x has {rows} rows; allowed: a multiple of {ranks}, the ranks")
    return [rows // ranks] * ranks


def splits_of(name: str, splits: Sequence[int], ranks: int) -> list[int]:
    """The argument called `name`: numbers of rows, one for each rank."""
    found = [integer(f"an entry of {name}", n) for n in splits]
    if len(found) != ranks or min(found) < 0:
        raise ValueError(f"{name} is {found}; allowed: {ranks} numbers of rows >= 0")
    return found


def shares_of(
    name: str, given: Sequence[int] | None, what: str, shape: Sequence[int], ranks: int, here: str
) -> list[int]:
    """The rows of every rank in the tensor `what`, by the argument called `name`; `here` is who."""
    rows = shape[0] if len(shape) else 1
    if not given:
        if rows % ranks:
            raise ValueError(
                f"{what} has {rows} rows on {here}; allowed without {name}: a multiple of {ranks}"
            )
        return [rows // ranks] * ranks
    found = [integer(f"an entry of {name}", n) for n in given]
    if len(found) != ranks or min(found) < 0 or sum(found) != rows:
        raise ValueError(
            f"{name} is {found} on {here}, {what} has {rows} rows; needed: {ranks} numbers >= 0 "
            "that add up to these"
        )
    return found


def peer_of(name: str, peer: int, ranks: int, other_than: int | None = None) -> int:
    """The argument called `name`: the number of a rank, of another one than `other_than`."""
    peer = integer(name, peer)
    if not 0 <= peer < ranks or peer == other_than:
        allowed = f"0 to {ranks - 1}" + ("" if other_than is None else f" but {other_than}")
        raise ValueError(f"{name} is {peer}; allowed: {allowed}")
    return peer


def check_collective(codec: Codec) -> None:
    """Raise ValueError for a codec that needs more than the elements of a tensor."""
    spec = codec.spec
    if codec.needs_base:
        raise ValueError(
            f"codec is {spec!r}, which codes a tensor against a base; allowed: codecs whose "
            "needs_base is False"
        )
    if spec.bind((1,)) != spec:
        raise ValueError(
            f"codec is {spec!r}, which takes a parameter from the tensor's shape, and "
            f"collectives flatten tensors; allowed: {codec.name} with all parameters given"
        )


def check_round_trips(codec: Codec) -> None:
    """Raise ValueError for a codec that decodes to another tensor than was encoded."""
    if not codec.round_trips:
        raise ValueError(
            f"codec is {codec.spec!r}, which decodes to another tensor than was encoded; "
            "allowed: codecs whose round_trips is True"
        )
