"""Buffers that follow one another on a stream: a pipe, a socket or a file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import numpy as np

from .codecs.common.base import Bytes
from .formats.errors import FormatError
from .formats.header import DEFAULT_MAX_NBYTES, Header

#: Read at a time: what a sender claims takes no memory before it comes.
_STEP = 1 << 20


def read_buffers(stream: Any, *, max_nbytes: int = DEFAULT_MAX_NBYTES) -> Iterator[Bytes]:
    """Read the buffers that were written to a stream one after another.

    No byte is read before it is needed, and none after the buffer that is returned: ``next()``
    takes one buffer from a stream that continues with something else. The iterator ends where the
    stream ends between two buffers. Only headers are checked; ``decode`` checks the rest.

    Args:
        stream: A binary file object, whose reads may be short: ``sys.stdin.buffer``, a pipe,
            ``sock.makefile("rb")``.
        max_nbytes: Most bytes of one buffer.

    Yields:
        Each buffer as a NumPy array, uint8, shape ``(nbytes,)``.

    Raises:
        FormatError: If the bytes are not a buffer; with the reason ``"truncated"`` if the stream
            ends within one, and ``"limit_exceeded"`` for one of more than ``max_nbytes`` bytes.
        TypeError: If ``max_nbytes`` is not an integer.
        OSError: If reading fails; BlockingIOError if the stream does not block.

    Example:
        >>> import io
        >>> import numpy as np
        >>> import tightwire as tw
        >>> xs = [np.arange(n, dtype=np.float32) for n in (2, 3)]
        >>> stream = io.BytesIO(b"".join(bytes(tw.encode(x)) for x in xs))
        >>> [tw.decode(buf).tolist() for buf in tw.read_buffers(stream)]
        [[0.0, 1.0], [0.0, 1.0, 2.0]]
    """
    while (start := _read_start(stream, max_nbytes)) is not None:
        head, nbytes = start
        data = np.empty(nbytes, np.uint8)
        data[: len(head)] = np.frombuffer(head, np.uint8)
        at = len(head)
        while at < nbytes:
            piece = _read(stream, min(nbytes - at, _STEP))
            if not piece:
                raise FormatError("truncated", f"the stream ends at {at} of {nbytes} bytes")
            data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        yield data


def _read_start(stream: Any, max_nbytes: int) -> tuple[bytes, int] | None:
    """First bytes of a buffer and the size that they tell; None at the end of the stream."""
    head = b""
    while (peek := Header.peek(head, max_nbytes=max_nbytes)).nbytes is None:
        piece = _read(stream, peek.needed - len(head))
        if not piece and not head:
            return None
        if not piece:
            raise FormatError("truncated", f"the stream ends at {len(head)} bytes of a buffer")
        head += piece
    return head, peek.nbytes


def _read(stream: Any, nbytes: int) -> bytes:
    piece: bytes | None = stream.read(nbytes)
    if piece is None:
        raise BlockingIOError(errno.EAGAIN, "the stream is non-blocking and has no bytes yet")
    return piece
