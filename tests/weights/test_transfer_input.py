"""Weight transfer from publishers that say or send something wrong: nothing is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.adapters.transports.threads import ThreadTransport
from tightwire.adapters.weights import rounds
from tightwire.adapters.weights.announcement import Announced, Announcement, state_digest
from tightwire.state_tensors import ArrayState, digests_of
from transfers import blank, first_state, ranks, same


def announced(**changes: Any) -> dict[str, Any]:
    row = {"names": ["w"], "dtype": "float32", "shape": [10], "digest": "0" * 16, "before": None}
    return {"bucket_nbytes": 100, "tensors": [list((row | changes).values())]}


BAD: dict[str, Any] = {
    "not JSON": b"{",
    "not UTF-8": b"\xff",
    "too deep": b"[" * 100_000,
    "no object": b"[]",
    "another key": {"bucket_nbytes": 1, "tensors": [], "x": 0},
    "no number": {"bucket_nbytes": True, "tensors": []},
    "0 bytes": {"bucket_nbytes": 0, "tensors": []},
    "no list": {"bucket_nbytes": 1, "tensors": {}},
    "no row": {"bucket_nbytes": 1, "tensors": [3]},
    "a short row": {"bucket_nbytes": 1, "tensors": [[["w"], "float32"]]},
    "no names": announced(names=[]),
    "a number as name": announced(names=[3]),
    "a name twice": announced(names=["w", "w"]),
    "metadata": announced(names=["__metadata__"]),
    "a surrogate": announced(names=["\ud800"]),
    "another dtype": announced(dtype="float31"),
    "a list as dtype": announced(dtype=["float32"]),
    "half a pair": announced(dtype="F4", shape=[3]),
    "a negative size": announced(shape=[-1]),
    "a float as size": announced(shape=[1.0]),
    "true as size": announced(shape=[True]),
    "33 dimensions": announced(shape=[1] * 33),
    "a huge tensor": announced(shape=[1 << 62, 1 << 62]),
    "more than max_nbytes": announced(shape=[1 << 20]),
    "a short digest": announced(digest="0"),
    "no digest": announced(digest=None),
    "another digest": announced(before="x" * 16),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_announcements_are_refused(what: str) -> None:
    data = BAD[what] if isinstance(BAD[what], bytes) else json.dumps(BAD[what]).encode()
    with pytest.raises(tw.FormatError):
        Announcement.parse(data, 1 << 20)


def test_a_good_announcement_is_read() -> None:
    state = ArrayState(first_state())
    digests = digests_of(state, 1)
    found = Announcement.of(state, digests, state, digests, 5000)
    read = Announcement.parse(found.pack(), 1 << 20)
    assert read.tensors == found.tensors
    assert state_digest(read, read.digests) == state_digest(state, digests)
    assert read.memory("embed") == read.memory("head")
    assert list(read.messages(["delta"])) == []
    buckets = [bucket for _, bucket in read.messages(["whole"])]
    assert [t for bucket in buckets for t in bucket] == list(read.tensors)
    assert all(len(b) == 1 or sum(t.nbytes for t in b) <= 5000 for b in buckets)
    four = Announced(("f",), "F4", (3, 6), "0" * 16, None)
    assert (four.nbytes, four.is_plain, four.fits(9), four.fits(10)) == (9, True, True, False)


def hostile(pack: Callable[[Announcement], bytes] = Announcement.pack, **changes: Any) -> Any:
    """What a rank with a good target says of a publisher that says something else."""

    def task(transport: ThreadTransport) -> Any:
        state = {"w": np.arange(3000, dtype=np.float32)}
        if transport.rank:
            target = blank(state)
            subscriber = tw.subscribe(target, transport)
            try:
                return subscriber.update()
            except tw.CollectiveError as error:
                assert same(target, blank(state))
                return error
            finally:
                transport.close()
        group = rounds.Group(transport)
        arrays = ArrayState(state)
        digests = digests_of(arrays, 1)
        announcement = Announcement.of(arrays, digests, None, {}, 1 << 20)
        data = np.frombuffer(bytearray(pack(announcement)), np.uint8)
        digest = hashlib.blake2b(data.tobytes(), digest_size=16).digest()
        status = rounds.Status(
            True, -1, state_digest(arrays, digests), -1, data.size, text=digest
        )._replace(**{k: v for k, v in changes.items() if k in rounds.Status._fields})
        try:
            meeting = group.meet(status)
            group.spread("announce", data, data.size, 0)
            group.agree("announce")
            buffer = np.frombuffer(bytearray(bytes(tw.encode(state["w"]))), np.uint8)
            message = rounds.Message([buffer.size], [False], buffer)
            group.send(message._replace(**changes.get("message", {})))
            group.agree("verify")
        except tw.CollectiveError as error:
            return error
        return meeting.version

    return ranks(2, task, 10.0)


@pytest.mark.parametrize(
    ("changes", "stage", "text"),
    [
        ({"asked": -7}, "meet", "version -7"),
        ({"asked": 1 << 62}, "meet", "allowed: at most"),
        ({"nbytes": 0}, "meet", "announcement of 0 bytes"),
        ({"nbytes": 1 << 62}, "meet", "announcement of"),
        ({"text": bytes(16)}, "announce", "damaged in transit"),
        ({"state": bytes(16)}, "announce", "another state than is offered"),
        ({"message": {"sizes": [1 << 50]}}, "receive", "of 12000 bytes comes in"),
        ({"message": {"sizes": [-4]}}, "receive", "of 12000 bytes comes in -4"),
        ({"message": {"sizes": [0]}}, "receive", "of 12000 bytes comes in 0"),
        ({"message": {"data": np.zeros(12160, np.uint8), "sizes": [12160]}}, "verify", "bad_magic"),
    ],
)
def test_hostile_publishers(changes: dict[str, Any], stage: str, text: str) -> None:
    publisher, subscriber = hostile(**changes)
    assert isinstance(publisher, tw.CollectiveError)
    assert isinstance(subscriber, tw.CollectiveError)
    assert subscriber.stage == stage
    assert text in subscriber.detail


def test_a_publisher_by_hand() -> None:
    """What the tests of hostile ones change is good otherwise."""
    assert hostile() == [0, 0]
    assert hostile(version=-5, asked=7) == [7, 7]
    _, error = hostile(lambda found: b"[]")
    assert error.stage == "announce"


@pytest.mark.parametrize("kind", ["another tensor", "a base", "other values"])
def test_hostile_buffers(kind: str) -> None:
    x = np.arange(3000, dtype=np.float32)
    buffer = {
        "another tensor": tw.encode(x.view(np.int32)),
        "a base": tw.encode(x, "delta", base=x + 1),
        "other values": tw.encode(x + 1),
    }[kind]
    data = np.frombuffer(bytearray(bytes(buffer)), np.uint8)
    publisher, subscriber = hostile(message={"data": data, "sizes": [data.size]})
    assert publisher.stage == subscriber.stage == "verify"
    assert "ranks [1]: FormatError" in publisher.detail
