"""Weight transfer through a directory: what publishers and subscribers say of one that changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import tightwire as tw
from tightwire.delta_files import writing_to
from transfers import State, same


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def weights(value: float = 0) -> State:
    return {"w": np.arange(2000, dtype=np.float32) + np.float32(value)}


def test_a_directory_that_was_begun_anew(tmp_path: Path) -> None:
    folder, target = tmp_path / "versions", weights(9)
    publisher = tw.publish(weights(), folder)
    subscriber = tw.subscribe(target, folder, timeout=0)
    for _ in range(3):
        publisher.send()
    assert subscriber.update() == 2
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"has no version: it was begun anew\. Make a new pub"):
        publisher.send()
    with pytest.raises(TimeoutError, match=r"after 2 .* it has none, .* Make a new subscriber"):
        subscriber.update()

    source = weights(1)
    assert tw.publish(source, folder).send() == 0
    with pytest.raises(
        ValueError, match=r"version 2, .* has 0: it was begun anew\. Make a new pub"
    ):
        publisher.send()
    with pytest.raises(TimeoutError, match="it has version 0, so it was begun anew"):
        subscriber.update()
    # What the messages say helps.
    assert tw.subscribe(target, folder, timeout=0).update() == 0
    assert same(target, source)
    assert tw.publish(weights(2), folder).send() == 1


def test_a_second_publisher_and_a_prune(tmp_path: Path) -> None:
    first, second = weights(), weights(1)
    publisher, other = tw.publish(first, tmp_path), tw.publish(second, tmp_path)
    assert publisher.send() == 0
    # It goes on from the newest version, and the first one is refused from then on.
    assert other.send() == 1
    with pytest.raises(ValueError, match=r"sent version 0, and .* has 1: another one writes there"):
        publisher.send()
    assert other.send() == 2
    # A prune and a send do not go together; the one that failed is called again.
    with writing_to(tmp_path):
        with pytest.raises(BlockingIOError, match="try again"):
            other.send()
        with pytest.raises(BlockingIOError, match="try again"):
            tw.prune_deltas(tmp_path)
    second["w"][7] += 1
    assert other.send() == 3
    assert tw.prune_deltas(tmp_path) == []
    assert same(tw.load_delta(tmp_path), second)
