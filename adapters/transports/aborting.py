"""How a rank over torch.distributed gives up: the others hear at once, and why."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

#: Key of a group's store: which rank gave up first, and why.
_KEY = "gave up"
#: A tag that no message has.
_TAG = 0x7469
#: Seconds that the store may take. It may be a rank's that has stopped: then it never answers.
_PATIENCE = 2.0


def patiently(ask: Callable[[], None], seconds: float = _PATIENCE) -> None:
    """Call what asks a store, and go on without it if that takes longer or fails."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            ask()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def tell(store: Any, rank: int, why: str) -> str:
    """Say by the store of a group that this rank gives up; the first one is heard.

    Returns:
        What another rank has said before; ``""`` if none has.
    """
    own = f"rank {rank} gave up: "
    first: str = store.compare_set(_KEY, "", own + why).decode()
    return "" if first.startswith(own) else first


def heard(store: Any) -> str:
    """What the first rank that gave up has said; ``""`` if none has."""
    return str(store.get(_KEY).decode()) if store.check([_KEY]) else ""


def cut(group: Any, rank: int, size: int) -> None:
    """Close a rank's connections of a gloo group, so that the calls of the others fail at once.

    gloo has no call for it, but closes all of them when a message does not come in time. A
    connection that is closed already raises without waiting, so that each of them is tried.
    """
    for peer in range(size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TAG)
                work.wait(timedelta(milliseconds=1))
