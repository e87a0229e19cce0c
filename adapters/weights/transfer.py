"""Weights go from a trainer to workers: ``tightwire.publish``, ``tightwire.subscribe``.

One rank of a transport publishes, or a process that writes to a delta directory. The others receive
what has changed, or everything if they lack the version before. Nothing is written before all of it
has been checked.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...codec import Codec, as_lossless
from ...codec import codec as make_codec
from ...delta_apply import Update
from ...delta_directory import CHAIN_LIMIT
from ...engine import DEFAULT_MAX_NBYTES
from ...file_tensors import check_chain_limit
from ...formats.errors import integer
from ...storage import PathLike, is_path
from ..transports.base import Transport
from .publishing import DirectoryPublisher, TransportPublisher
from .subscribing import DirectorySubscriber, Hold, TransportSubscriber

#: Seconds that a subscriber waits for a version in a directory.
TIMEOUT = 600.0


class Publisher(Protocol):
    """Sends versions of weights; ``tightwire.publish`` makes it.

    Attributes:
        version: The version that was sent last; None before the first.
    """

    version: int | None

    def send(self, version: int | None = None) -> int:
        """Send the tensors as they are now, which must not change during the call.

        Over a transport all other ranks call ``receive`` or ``update`` meanwhile. Ranks that have
        what was sent last get what has changed, the others everything, and those that have these
        tensors already nothing. It returns when all have checked what they got: either all of them
        may write it, or all raise.

        Args:
            version: The number of the version. None: the one after the newest that any rank has.

        Returns:
            The number of the version.

        Raises:
            BlockingIOError: If another process writes to the directory.
            CollectiveError: If a rank is gone or silent, found what it got damaged, or cannot take
                it, or several ranks publish. It says which, and whether another round may follow.
            FormatError: If a file of the directory is damaged.
            OSError: If a file of the directory cannot be written.
            TypeError: If ``version`` is not an integer.
            ValueError: If ``version`` is not a later one, or the directory has got a version from
                somebody else.
        """


class Subscriber(Protocol):
    """Receives versions of weights; ``tightwire.subscribe`` makes it."""

    @property
    def version(self) -> int | None:
        """The version that was written last; None before the first."""

    def receive(self) -> Update:
        """Receive a version, and check all of it; nothing is written.

        Meanwhile others may read the tensors: they only have to pause for ``Update.write``. The
        tensors must not change before. An earlier update that was not written is dropped.

        Returns:
            An update. Its ``write`` is left to be called, and ``version`` is what the tensors are
            then.

        Raises:
            CollectiveError: As in ``Publisher.send``, on the same rounds.
            FormatError: If a file of the directory is damaged.
            OSError: If a file of the directory cannot be read; ``TimeoutError`` if it gets no newer
                version within ``timeout``.
            TypeError: If the tensors cannot be written to.
            ValueError: If names, dtypes or shapes of a module are not those of the version.
        """

    def update(self) -> int:
        """Receive a version and write it.

        Returns:
            The version.

        Raises:
            CollectiveError: As ``receive``.
            FormatError: As ``receive``.
            OSError: As ``receive``.
            TypeError: As ``receive``.
            ValueError: As ``receive``.
        """


def publish(
    source: Any,
    where: Transport | PathLike,
    *,
    codec: str | Codec = "zipccl",
    form: str = "adaptive",
    keep: bool = True,
    bucket_nbytes: int | None = None,
    chain_limit: int | None = None,
    threads: int | None = None,
) -> Publisher:
    """Make this rank the one that sends weights to the others of a transport, or to a directory.

    A copy of what was sent last is kept where the tensors are: it takes as much memory as they do.

    Args:
        source: Names to arrays of any library, or a ``torch.nn.Module``. What it holds at the time
            of ``send`` is sent. Names that share memory (tied weights) are sent once.
        where: A transport, for this alone, or the path of a delta directory (``save_delta``), which
            is created if it does not exist.
        codec: A lossless codec or its name, for tensors that are sent whole.
        form: That of codec ``delta``, as in ``save_delta``.
        keep: Whether the copy is kept. Without it every version is sent whole over a transport; in
            a directory its newest version is read again in place of it.
        bucket_nbytes: Bytes of tensors that share a message of a transport, twice as many where
            differences are sent. While one travels, the next ones are encoded, unless they are of
            CuPy or JAX. None: 32 MiB, and 256 MiB if any tensor is on a GPU.
        chain_limit: Most deltas in a row in a directory, as in ``save_delta``. None: 16.
        threads: Most threads; None: every processor.

    Returns:
        The publisher.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is not allowed.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> from tightwire.adapters.transports.threads import run_ranks
        >>> def task(transport):
        ...     weights = {"w": np.full(1000, transport.rank, np.float32)}
        ...     if transport.rank == 0:
        ...         weights["w"][7] = 5
        ...         return tw.publish(weights, transport).send()
        ...     tw.subscribe(weights, transport).update()
        ...     return float(weights["w"].sum())
        >>> run_ranks(3, task)
        [0, 5.0, 5.0]
    """
    chosen = as_lossless(codec)
    delta = make_codec("delta", form=form)
    if not isinstance(keep, bool):
        raise TypeError(f"keep is {keep!r}; allowed: True, False")
    nbytes = None if bucket_nbytes is None else integer("bucket_nbytes", bucket_nbytes, least=1)
    if is_path(where):
        path: Any = where
        _check_unused("bucket_nbytes", nbytes, "messages are of transports")
        limit = CHAIN_LIMIT if chain_limit is None else chain_limit
        check_chain_limit(limit)
        return DirectoryPublisher(source, path, chosen, form, keep, limit, threads)
    _check_unused("chain_limit", chain_limit, "versions are not stored")
    transport = _transport(where)
    return TransportPublisher(source, transport, chosen, delta, keep, nbytes, threads)


def subscribe(
    target: Any,
    where: Transport | PathLike,
    *,
    hold: Hold | None = None,
    timeout: float | None = None,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> Subscriber:
    """Have tensors follow the versions that another rank or process publishes.

    Args:
        target: Names to arrays of NumPy, PyTorch or CuPy, which are written in place, or a
            ``torch.nn.Module``. Of a dict, entries are added, removed and replaced where the
            version has other names, dtypes or shapes.
        where: The transport, or the path of the delta directory.
        hold: What an update over a transport holds until it is written. ``"elements"``: new
            elements, so that the pause is short. ``"buffers"``: the bytes that came, which are
            checked, and decoded once more over the tensors: less memory for whole versions. None:
            buffers on GPUs, which decode at the rate of a copy, elements on the host. From a
            directory it is always elements.
        timeout: Seconds to wait for a newer version in a directory. None: 600. A transport has a
            timeout of its own.
        max_nbytes: Most bytes that one tensor may have. The default is 64 GiB.
        threads: Most threads; None: every processor.

    Returns:
        The subscriber.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is not allowed.
    """
    if hold not in (None, "elements", "buffers"):
        raise ValueError(f"hold is {hold!r}; allowed: 'elements', 'buffers', None")
    max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    if is_path(where):
        seconds = TIMEOUT if timeout is None else timeout
        path: Any = where
        _check_unused("hold", hold, "an update from a directory holds elements")
        return DirectorySubscriber(target, path, seconds, max_nbytes, threads)
    _check_unused("timeout", timeout, "the transport has its own")
    return TransportSubscriber(target, _transport(where), hold, max_nbytes, threads)


def _check_unused(name: str, value: Any, why: str) -> None:
    """Refuse an argument that would have no effect."""
    if value is not None:
        raise ValueError(f"{name} is {value!r}; allowed: None, as {why}")


def _transport(where: Any) -> Transport:
    if not all(hasattr(where, name) for name in ("all_gather", "broadcast", "world_size")):
        kind = type(where).__name__
        raise TypeError(f"where is a {kind}; allowed: a transport, the path of a directory")
    found: Transport = where
    return found
