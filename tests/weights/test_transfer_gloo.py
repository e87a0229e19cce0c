"""Weight transfer between processes over gloo: modules, a group within the group, ranks that go."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from processes import join, launch

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from tightwire.adapters.transports.torch_dist import TorchDist

#: In seconds: what the survivors of a group wait.
PATIENCE = 10.0


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(500, 96), torch.nn.Linear(96, 96), torch.nn.Linear(96, 500)
    ).bfloat16()
    model[1] = model[1].float()
    model[2].weight = model[0].weight
    return model


def train(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.view(torch.int16)[::9, 5] += 1
        model[1].bias += 1e-3


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for name, x in model.state_dict().items():
        found.update(name.encode() + bytes(tw.encode(x, "raw")))
    return found.hexdigest()


def transfers(device: Any) -> list[str]:
    """Digests after each of some rounds, of which the last rank misses one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = TorchDist.new_group()
    some = dist.new_group(list(range(world - 1)))
    model = make_model(rank)
    found = []
    if rank == 0:
        publisher = tw.publish(model, everybody, bucket_nbytes=1 << 16)
        for _ in range(4):
            publisher.send()
            found.append(digest(model))
            train(model)
        # What the last rank misses.
        tw.publish(model, TorchDist(some)).send(version=10)
        train(model)
        publisher.send()
        found.append(digest(model))
        return found
    subscriber = tw.subscribe(model, everybody)
    for _ in range(4):
        subscriber.update()
        found.append(digest(model))
    if rank < world - 1:
        tw.subscribe(model, TorchDist(some)).update()
    update = subscriber.receive()
    update.write()
    # Those that took part in it do not have what the publisher sent here last.
    assert update.since == (None if rank < world - 1 else 3)
    found.append(digest(model))
    return found


def dies(device: Any) -> list[str]:
    """The publisher goes between messages; the others go on among themselves."""
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = TorchDist.new_group(timeout=PATIENCE)
    left = dist.new_group(list(range(1, world)))
    model = make_model(rank)
    before = digest(model)
    if rank == 0:
        original, calls = TorchDist.broadcast, [0]

        def broadcast(self: Any, x: Any, root: int) -> None:
            calls[0] += 1
            if calls[0] == 5:
                self.close()
            original(self, x, root)

        TorchDist.broadcast = broadcast  # type: ignore[method-assign]
        with pytest.raises(tw.CollectiveError, match="closed"):
            tw.publish(model, transport, bucket_nbytes=1 << 14).send()
        return []
    subscriber = tw.subscribe(model, transport)
    with pytest.raises(tw.CollectiveError, match="Make a new transport"):
        subscriber.receive()
    assert digest(model) == before
    if rank == 1:
        assert tw.publish(model, TorchDist(left)).send() == 0
    else:
        assert tw.subscribe(model, TorchDist(left)).update() == 0
    return [digest(model)]


TASKS = {"transfers": transfers, "dies": dies}


@pytest.mark.slow
def test_modules_follow(tmp_path: Path) -> None:
    first, *others = launch(__file__, "transfers", 3, tmp_path)
    assert len(set(first)) == 5
    assert others == [first, first]


@pytest.mark.slow
def test_a_publisher_that_goes(tmp_path: Path) -> None:
    gone, first, second = launch(__file__, "dies", 3, tmp_path)
    assert gone == []
    assert first == second != []


if __name__ == "__main__":
    join(TASKS, sys.argv[1:])
