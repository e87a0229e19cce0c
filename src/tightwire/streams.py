"""Buffers that follow one another on a stream: a pipe, a socket, a file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import numpy as np

from .codecs.base import Bytes
from .formats.errors import FormatError
from .formats.header import DEFAULT_MAX_NBYTES, Header

#: Read at a time: what a sender claims takes no memory before it comes.
_STEP = 1 << 20


def read_buffers(stream: Any, *, max_nbytes: int = DEFAULT_MAX_NBYTES) -> Iterator[Bytes]:
    """The buffers that were written to `stream` one after another, each as uint8, shape (n,).

    `stream` is a binary file object, whose reads may be short: `sys.stdin.buffer`, a pipe,
    `sock.makefile("rb")`. Of it no byte is read before it is needed, and none behind the buffer
    that is given: `next()` takes one buffer from a stream that goes on with something else. The
    iterator ends where the stream ends between two buffers.

    Only headers are checked; `decode` checks the rest. Raises FormatError for bytes that are no
    buffer, with the reason "truncated" where the stream ends within one, and "limit_exceeded" for a
    buffer of more than `max_nbytes` bytes.
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
        raise BlockingIOError(errno.EAGAIN, "the stream has no bytes yet, and does not wait")
    return piece
