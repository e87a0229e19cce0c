"""Weight transfer over UCX, between processes on one machine: this file is also what they run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import faults
import tightwire as tw
from support import needs
from transfers import blank, copied, first_state, same, step
from transports import BOUND, free_port, launch

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from tightwire.adapters.transports.ucx import Ucx

Join = Callable[..., "Ucx"]


def digest(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, x in state.items():
        found.update(name.encode() + np.asarray(x).tobytes())
    return found.hexdigest()


def of_all(transport: Ucx, state: dict[str, Any]) -> list[str]:
    """The digest of each rank's state."""
    own = np.frombuffer(bytes.fromhex(digest(state)), np.uint8)
    out = np.empty((transport.world_size, own.size), np.uint8)
    transport.all_gather(out, own)
    return [row.tobytes().hex() for row in out]


def side_of(transport: Ucx, weights: Any, **options: Any) -> Any:
    """The publisher of weights on rank 0, a subscriber elsewhere."""
    if transport.rank == 0:
        return tw.publish(weights, transport, **options)
    return tw.subscribe(weights, transport)


def versions_of_numpy(join: Join) -> Any:
    """Whole versions and differences; a worker whose weights were changed gets everything."""
    transport = join()
    state = first_state()
    mine = state if transport.rank == 0 else blank(state)
    side = side_of(transport, mine, bucket_nbytes=1 << 14)
    found = []
    for number in range(4):
        if transport.rank == 0:
            side.send()
        else:
            if number == 2 and transport.rank == 1:
                mine["v"] += 1
            update = side.receive()
            changed = number == 2 and transport.rank == 1
            assert update.since == (None if changed or not number else number - 1)
            update.write()
        found.append(of_all(transport, mine))
        if transport.rank == 0:
            step(mine, number)
    return found


def versions_of_torch(join: Join) -> Any:
    """Modules, with tied weights."""
    transport = join()
    torch.manual_seed(transport.rank)
    model = torch.nn.Sequential(torch.nn.Linear(90, 80), torch.nn.Linear(90, 80)).bfloat16()
    model[1].weight = model[0].weight
    side = side_of(transport, model)
    found = []
    for _ in range(3):
        version = side.send() if transport.rank == 0 else side.update()
        bits = {name: x.view(torch.int16).numpy() for name, x in model.state_dict().items()}
        found.append([version, *of_all(transport, bits)])
        if transport.rank == 0:
            with torch.no_grad():
                model[0].weight.view(-1)[::40] *= 1.5
    return found


def killed(join: Join) -> Any:
    """The last worker is killed between messages; the others keep their weights and go on."""
    transport = join()
    state = first_state()
    mine = state if transport.rank == 0 else blank(state)
    side = side_of(transport, mine, bucket_nbytes=1 << 14)
    if transport.rank == 0:
        side.send()
        step(mine, 1)
    else:
        side.update()
    before = copied(mine)
    if transport.rank == 2:
        calls, broadcast = [0], transport.broadcast

        def dying(*args: Any) -> None:
            calls[0] += 1
            if calls[0] == 3:
                faults.kill()
            broadcast(*args)

        setattr(transport, "broadcast", dying)  # noqa: B010
    with pytest.raises(tw.CollectiveError, match="Make a new transport of the ranks that are left"):
        side.send() if transport.rank == 0 else side.receive()
    assert same(mine, before)
    left = join(2, 1)
    side = side_of(left, mine)
    version = side.send(version=8) if left.rank == 0 else side.update()
    return [version, *of_all(left, mine)]


def run(task: str) -> list[Any]:
    return launch(__file__, task, 3, str(free_port()), str(free_port()))


@pytest.mark.slow
@needs("ucxx")
@pytest.mark.parametrize("task", ["versions_of_numpy", "versions_of_torch"])
def test_workers_follow_over_ucx(task: str) -> None:
    publisher, worker = run(task)
    assert publisher == worker
    digests = [set(row[-3:]) for row in publisher]
    assert all(len(found) == 1 for found in digests)
    assert len(set.union(*digests)) == len(digests)
    if task == "versions_of_torch":
        assert [row[0] for row in publisher] == [0, 1, 2]


@pytest.mark.slow
@needs("ucxx")
def test_a_killed_worker_over_ucx() -> None:
    publisher, worker = run("killed")
    assert publisher == worker
    version, *digests = publisher
    assert version == 8
    assert len(digests) == 2
    assert len(set(digests)) == 1


def main(task: str, rank: str, world_size: str, *ports: str) -> None:
    """Run the task, which joins groups; print what it returns."""
    from tightwire.adapters.transports.ucx import Ucx

    torch.set_num_threads(1)

    def join(size: int = int(world_size), group: int = 0) -> Ucx:
        return Ucx(int(rank), size, ("127.0.0.1", int(ports[group])), BOUND)

    sys.stdout.write(json.dumps(globals()[task](join)))
    sys.stdout.flush()
    # A killed rank leaves a group in pieces.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
