"""What runs beside the current stream of a GPU: encoding while bytes travel, and their arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .rounds import Message

T = TypeVar("T")


class Made(NamedTuple):
    """A message, or None, and the event behind what makes it; None: it is made."""

    message: Message | None
    done: Any

    def take(self) -> Message | None:
        """The message; the current stream waits for it."""
        if self.message is not None and self.done is not None:
            import torch

            stream = torch.cuda.current_stream(self.message.data.device)
            stream.wait_event(self.done)
            self.message.data.record_stream(stream)
        return self.message

    def taken(self) -> Message:
        """As `take`, of one that is not None."""
        found = self.take()
        assert found is not None
        return found


class Aside:
    """A stream of PyTorch beside the current one, for calls that make messages.

    It is one for all rounds, as memory and tables of a stream are used again by that stream alone.
    Until `begin`, and without a device, calls are made on the current stream.
    """

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}
        self._stream: Any = None

    def begin(self, device: Any) -> None:
        """Calls come behind what is on the current stream of `device` now; None: no stream."""
        self._stream = None
        if device is not None and device.type == "cuda":
            import torch

            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._stream = self._streams[device]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def end(self) -> None:
        """What follows on the current stream comes behind all calls, whose memory is free then."""
        if self._stream is not None:
            import torch

            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._stream = None

    @property
    def overlaps(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    def run(self, call: Callable[[], T]) -> T:
        """Make a call, in which the host waits for this stream alone."""
        if self._stream is None:
            return call()
        import torch

        with torch.cuda.stream(self._stream):
            return call()

    def message(self, call: Callable[[], Message | None]) -> Made:
        """Make a call that makes a message."""
        message = self.run(call)
        return Made(message, None if self._stream is None else self._stream.record_event())
