"""Plans and work memory of a session, kept from call to call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ...codec import Codec, as_codec
from ...codecs.common.base import Plan
from ...formats.dtypes import BY_NAME, DType
from . import tensors
from .chunk_views import ChunkViews
from .message_views import MessageViews

_INT64 = BY_NAME["int64"]
#: Layouts that are kept: a model has so many sizes of buckets.
_KEPT = 256
#: Memory of messages is made in multiples of its size in so many bits less one.
_STEPS = 4


class WorkMemory:
    """Plans of a codec, and memory by name and device, laid out in chunks."""

    def __init__(self, codec: Codec, checksum: bool, ranks: int) -> None:
        self.codec = codec
        self.raw = as_codec("raw")
        self._checksum = checksum
        self._size = ranks
        self._plans: dict[tuple[DType, int, int, bool], Plan] = {}
        #: Pieces are laid out by the thread that encodes, too.
        self._lock = threading.RLock()
        self._memories: dict[tuple[str, Any], Any] = {}
        self._layouts: dict[tuple[Any, ...], Any] = {}
        #: The layout that each memory has at present.
        self._holders: dict[tuple[str, Any], ChunkViews | MessageViews] = {}
        self._words: dict[Any, Any] = {}

    def plan(self, dtype: DType, nelem: int, chunks: int = 1, *, raw: bool = False) -> Plan:
        """The plan of `nelem` elements in so many chunks, of the raw codec if `raw`."""
        key = dtype, nelem, chunks, raw
        plan = self._plans.get(key)
        if plan is None:
            codec = self.raw if raw else self.codec
            plan = codec.plan((nelem,), dtype, chunks=chunks, checksum=self._checksum)
            with self._lock:
                if len(self._plans) >= _KEPT:
                    self._plans.clear()
                    self._layouts.clear()
                plan = self._plans.setdefault(key, plan)
        return plan

    @tensors.kept
    def scratch(self, name: str, nbytes: int, like: Any) -> Any:
        """The session's own memory called `name`, which grows."""
        with self._lock:
            key = name, tensors.device_of(like)
            memory = self._memories.get(key)
            if memory is None or memory.shape[0] < nbytes:
                # The old one goes first, with all views: both may not fit.
                self._memories.pop(key, None)
                self._holders.pop(key, None)
                self._layouts = {k: s for k, s in self._layouts.items() if k[:2] != key}
                memory = self._memories[key] = tensors.empty_bytes(nbytes, like)
            return memory

    @tensors.kept
    def chunks(self, name: str, plans: Sequence[Plan], like: Any) -> ChunkViews:
        """The chunks of these plans, which `plan` has made, in the memory called `name`."""
        with self._lock:
            # Plans are kept as long as their layouts, so that ids tell them apart.
            ids = tuple(map(id, plans))
            key = (name, tensors.device_of(like), ids)
            found: ChunkViews | None = self._layouts.get(key)
            if found is None:
                if len(self._layouts) >= _KEPT:
                    self._layouts.clear()
                memory = self.scratch(name, sum(plan.nbytes for plan in plans), like)
                found = self._layouts[key] = ChunkViews(list(plans), memory)
            return found

    @tensors.kept
    def messages(
        self,
        name: str,
        plans: Sequence[Plan],
        like: Any,
        prefix: bool,
        spare: tuple[int, int] = (0, 0),
    ) -> MessageViews:
        """Messages of these plans, which `plan` has made, in the memory called `name`, laid out.

        What is `spare` follows from the name and the plans.
        """
        with self._lock:
            key = (name, tensors.device_of(like), tuple(map(id, plans)), prefix)
            found: MessageViews | None = self._layouts.get(key)
            if found is None:
                if len(self._layouts) >= _KEPT:
                    self._layouts.clear()
                nbytes = MessageViews.nbytes_of(plans, prefix) + sum(spare)
                # Sizes differ from call to call: not each that is a little larger takes new memory.
                before = self._memories.get(key[:2])
                memory = self.scratch(name, tensors.rounded(nbytes, _STEPS), like)
                if memory is not before:
                    # Bytes between parts are sent, too.
                    memory[:] = 0
                found = self._layouts[key] = MessageViews(list(plans), memory, prefix, spare)
            self.hold(name, found)
            return found

    def hold(self, name: str, shares: ChunkViews | MessageViews) -> bool:
        """Lay the memory called `name` out as `shares`; True if it was something else."""
        key = name, tensors.device_of(shares.memory)
        changed = self._holders.get(key) is not shares
        self._holders[key] = shares
        return changed

    def receive(self, name: str, plans: Sequence[Plan], like: Any) -> ChunkViews:
        """Memory for the chunks to receive, with their headers written."""
        shares = self.chunks(name, plans, like)
        if self.hold(name, shares):
            shares.write_headers()
        return shares

    @tensors.kept
    def status_words(self, like: Any) -> Any:
        """What decoding finds, int64, shape (world_size,), on the device of `like`."""
        device = tensors.device_of(like)
        words = self._words.get(device)
        if words is None:
            words = tensors.empty((self._size,), _INT64, like)
            words[...] = 0
            self._words[device] = words
        return words

    def clear(self) -> None:
        """Free the memory and its layouts; plans stay."""
        for kept in (self._memories, self._layouts, self._holders):
            kept.clear()

    def close(self) -> None:
        """Free everything."""
        self.clear()
        self._words.clear()
        self._plans.clear()
