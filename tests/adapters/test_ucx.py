"""The collectives over UCX, between processes on one machine: this file is also what they run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from prepared_ranks import check_prepared
from ranks import DTYPES, SOME_DTYPES, check_collectives
from support import needs
from tightwire.adapters.transports.rendezvous import meet
from tightwire.arrays import Target
from transports import (
    BOUND,
    PATIENCE,
    check_communicator,
    check_sizes,
    check_survivors,
    check_transport,
    free_port,
    launch,
    survive,
)

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from tightwire.adapters.transports.ucx import Ucx

Join = Callable[..., "Ucx"]


def every_collective(join: Join, dtypes: tuple[str, ...]) -> list[list[int]]:
    """All checks over the whole group, and of rank 0 alone."""
    transport = join()
    for library in ("numpy", "torch"):
        check_transport(transport, Target(library), adds=False)
    sizes = check_communicator(transport, ("torch", "numpy"), dtypes=dtypes)
    check_prepared(transport)
    if transport.rank == 0:
        from tightwire.adapters.transports.ucx import Ucx

        alone = Ucx(0, 1, ("127.0.0.1", free_port()))
        check_transport(alone, Target("numpy"), adds=False)
        check_collectives(alone, "torch", "bfloat16", "first")
    transport.barrier()
    if transport.rank == 0:
        transport.send(np.zeros(9, np.uint8), transport.world_size - 1)
    elif transport.rank == transport.world_size - 1:
        with pytest.raises(ConnectionError, match=r"rank 0 .* sent too much"):
            transport.recv(np.empty(8, np.uint8), 0)
    return sizes


def two_ranks(join: Join) -> Any:
    """The checks; then the last rank is silent."""
    sizes = every_collective(join, DTYPES)
    transport = join(PATIENCE)
    assert transport.timeout == PATIENCE
    x = torch.ones(100_000, dtype=torch.bfloat16)
    return {"sizes": sizes, "error": survive(transport, x, lambda: time.sleep(100))}


def three_ranks(join: Join) -> Any:
    """The checks; then the last rank is killed, and does not come to a second group."""
    sizes = every_collective(join, SOME_DTYPES)
    x = np.ones(100_000, np.float32)
    error = survive(join(), x, lambda: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(OSError, match=r"ranks \[.*2\] (have|did) not|rank 0 .*left|timed out"):
        join(PATIENCE)
    return {"sizes": sizes, "error": error, "took": time.monotonic() - start}


def in_peace(join: Join) -> Any:
    """All ranks end as programs do, and nobody has an error of it."""
    transport = join()
    transport.all_reduce(np.ones(3))
    return "done"


def run(task: str, world_size: int) -> list[Any]:
    return launch(__file__, task, world_size, str(free_port()))


@pytest.mark.slow
@needs("ucxx")
def test_every_collective_and_a_silent_rank() -> None:
    found = run("two_ranks", 2)
    check_sizes(found[0]["sizes"])
    check_survivors([found[0]["error"]], ("TimeoutError",))
    assert "ranks [1] did not answer within 2 s" in str(found[0]["error"])


@pytest.mark.slow
@needs("ucxx")
def test_every_collective_and_a_killed_rank() -> None:
    found = run("three_ranks", 3)
    for result in found:
        check_sizes(result["sizes"])
        assert result["took"] < BOUND
    check_survivors([result["error"] for result in found], ("ConnectionError",))
    assert "rank 2 is gone" in str(found)


@pytest.mark.long
@needs("ucxx")
def test_ranks_leave_in_peace() -> None:
    assert run("in_peace", 3) == ["done", "done"]


def meeting(*hellos: tuple[int, int], timeout: float = 5.0) -> list[Any]:
    """What the ranks of a meeting get or raise, in threads; a hello is rank and world size."""
    address = ("127.0.0.1", free_port())

    def come(rank: int, world_size: int) -> Any:
        try:
            return meet(rank, world_size, address, bytes([rank] * rank), timeout)
        except (OSError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(len(hellos)) as pool:
        return list(pool.map(lambda hello: come(*hello), hellos))


def test_ranks_meet() -> None:
    assert meeting((2, 3), (0, 3), (1, 3)) == [[b"", b"\1", b"\2\2"]] * 3
    assert meeting((0, 1)) == [[b""]]
    assert all(isinstance(error, TimeoutError) for error in meeting((1, 2), timeout=0.2))
    (error,) = meeting((0, 3), timeout=0.2)
    assert "ranks [1, 2] have not connected" in str(error)
    zero, one = meeting((0, 2), (1, 3))
    assert "rank 1 of 3 has connected" in str(zero)
    assert isinstance(one, ConnectionError)
    errors = meeting((0, 3), (1, 3), (1, 3))
    assert "rank 1 of 3 has connected; ranks [0, 1] of 3 are here" in str(errors[0])
    assert all(isinstance(error, ConnectionError) for error in errors[1:])
    with pytest.raises(ValueError, match="rank is 3; allowed: 0 to 2"):
        meet(3, 3, ("127.0.0.1", 1), b"")


def main(task: str, rank: str, world_size: str, port: str) -> None:
    """Run the task, which joins the group; print what it returns."""
    from tightwire.adapters.transports.ucx import Ucx

    torch.set_num_threads(1)

    def join(timeout: float = BOUND) -> Ucx:
        return Ucx(int(rank), int(world_size), ("127.0.0.1", int(port)), timeout)

    sys.stdout.write(json.dumps(globals()[task](join)))
    sys.stdout.flush()
    # Silent and killed ranks leave a group in pieces.
    if task != "in_peace":
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
