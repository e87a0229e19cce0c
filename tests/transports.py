"""What tests of transports between processes share: how ranks start, and what they all must do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from ranks import DESIGNS, DTYPES, Ranks, check_collectives, exact
from tightwire.adapters.transports.base import Op, Transport
from tightwire.arrays import Target, from_bits, host_array
from tightwire.formats.dtypes import BY_NAME

#: In seconds, of the group whose last rank does not come.
PATIENCE = 2.0
#: In seconds, what any error may take, on a busy machine too.
BOUND = 30.0


def environment() -> dict[str, str]:
    """For a rank's process: the modules that are known here, one thread, UCX on one machine."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    settings = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self,sm",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return os.environ | settings


def free_port() -> int:
    """A TCP port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launch(
    script: str, task: str, world_size: int, *words: str, warnings: str = "error"
) -> list[Any]:
    """What `script task rank world_size words` prints, as JSON, on every rank but the last.

    A last rank that is still there when the others are done is killed.
    """
    processes = []
    try:
        for rank in range(world_size):
            process = subprocess.Popen(
                [sys.executable, "-W", warnings, script, task, str(rank), str(world_size), *words],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        deadline = time.monotonic() + 240
        results = []
        for rank, process in enumerate(processes[: max(1, world_size - 1)]):
            out, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            assert process.returncode == 0, f"rank {rank}: {errors}"
            results.append(json.loads(out))
        return results
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def array(values: np.ndarray[Any, Any], target: Target) -> Any:
    """`values` in the library under test."""
    dtype = BY_NAME[values.dtype.name]
    bits = np.ascontiguousarray(values).reshape(-1).view(dtype.bits)
    return from_bits(bits.copy(), dtype, values.shape, target)


def check_transport(
    transport: Transport,
    target: Target,
    *,
    adds: bool = True,
    ops: tuple[Op, ...] = ("sum", "max", "or"),
) -> None:
    """Every method of a transport; `adds` False: it has no `reduce_scatter`."""
    n, me = transport.world_size, transport.rank
    rng = np.random.default_rng(7)
    for name in ("float32", "float64", "int32", "int64"):
        for shape in ((), (3, 5), (0, 2), (1,), (1009,)):
            everyone = (rng.standard_normal((n, *shape)) * 1000).astype(name)
            reduce = {"sum": np.add, "max": np.maximum, "or": np.bitwise_or}
            for op in ops:
                if op == "or" and name[0] != "i":
                    continue
                x = array(everyone[me], target)
                transport.all_reduce(x, op)
                wanted = reduce[op].reduce(everyone, axis=0, dtype=name)
                found = host_array(x)
                assert (found.shape, found.dtype) == (shape, wanted.dtype)
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-3)
                mine = array(found.reshape(-1).view(np.uint8), target)
                out = array(np.full(n * mine.shape[0], 0xAB, np.uint8), target)
                transport.all_gather(out, mine)
                assert host_array(out).tobytes() == n * found.tobytes()
        for size in (0, 1, 1009):
            everyone = (rng.standard_normal((n, n * size)) * 1000).astype(name)
            out, x = array(np.full(size, 77, name), target), array(everyone[me], target)
            if adds:
                transport.reduce_scatter(out, x)
                wanted = everyone.sum(axis=0, dtype=name)[me * size : (me + 1) * size]
                np.testing.assert_allclose(host_array(out), wanted, rtol=1e-5, atol=1e-3)
            else:
                with pytest.raises(NotImplementedError, match="has no reduce_scatter"):
                    transport.reduce_scatter(out, x)
            assert np.array_equal(host_array(x), everyone[me])
    check_bytes(transport, target)
    transport.barrier()
    assert transport.empty(5).shape == (5,)


def check_bytes(transport: Transport, target: Target) -> None:
    """Equal and unequal shares of odd sizes at odd addresses, into poisoned memory."""
    n, me = transport.world_size, transport.rank

    def data(source: int, to: int, size: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([source, to, size]).integers(0, 256, size, np.uint8)

    for size in (0, 1, 4097, 300_001):
        room = array(np.full(n * size + 2, 0xAB, np.uint8), target)
        x = array(np.concatenate([data(me, j, size) for j in range(n)]), target)
        transport.all_to_all(room[1:-1], x)
        wanted = np.concatenate([data(i, me, size) for i in range(n)])
        assert host_array(room).tobytes() == b"\xab" + wanted.tobytes() + b"\xab"
    for root, size in ((0, 1), (n - 1, 4097), (n // 2, 2_500_001)):
        room = array(np.full(size + 2, 0xAB, np.uint8), target)
        if me == root:
            room[1:-1] = array(data(root, 0, size), target)
        transport.broadcast(room[1:-1], root)
        assert host_array(room).tobytes() == b"\xab" + data(root, 0, size).tobytes() + b"\xab"
    # From rank i to rank j: pieces of i + j, 0 and 50_000 i bytes.
    sizes = [[(i + j, 0, 50_000 * i) for j in range(n)] for i in range(n)]
    outs = [[array(np.full(s, 0xAB, np.uint8), target) for s in sizes[i][me]] for i in range(n)]
    xs = [[array(data(me, j, s), target) for s in sizes[me][j]] for j in range(n)]
    transport.all_to_all_v(outs, xs)
    for i in range(n):
        for out, s in zip(outs[i], sizes[i][me], strict=True):
            assert np.array_equal(host_array(out), data(i, me, s))


def check_communicator(
    transport: Transport,
    libraries: tuple[str, ...],
    device: Any = None,
    dtypes: tuple[str, ...] = DTYPES,
) -> list[list[int]]:
    """All collectives over the whole group, and disagreements; raw and wire bytes of some calls."""
    n, me = transport.world_size, transport.rank
    for i, dtype in enumerate(dtypes):
        check_collectives(
            transport, libraries[i % len(libraries)], dtype, DESIGNS[i % 2], 2, 641, device=device
        )
    check_collectives(transport, libraries[0], "bfloat16", "between", 2, 300, device=device)
    comm = tw.Communicator(transport)
    strided = Ranks(n, libraries[0], "float32", device)
    x = strided.array(me, (60, 90))[::3, 10:50].T
    wanted = [strided.host(r, (60, 90))[::3, 10:50].T for r in range(n)]
    exact(comm.all_gather(x), np.concatenate(wanted))
    weights = Ranks(1, libraries[0], "bfloat16", device).array(0, (n * 30_000,))
    for call in (comm.all_gather, comm.all_to_all, comm.reduce_scatter, comm.all_reduce):
        call(weights)
    sizes = [[r.raw_bytes, r.wire_bytes] for r in comm.trace()[1:]]
    if n > 1:
        start = time.monotonic()
        with pytest.raises(tw.CollectiveError, match=r"ranks \[0\]: .*ranks \[1"):
            tw.Communicator(transport, "raw" if me == 0 else "zipccl")
        comm = tw.Communicator(transport)
        with pytest.raises(tw.CollectiveError, match=r"ranks \[.*\] make another call"):
            comm.all_gather(strided.array(0, (4, 2) if me == 0 else (2, 4)))
        assert time.monotonic() - start < BOUND
    return sizes


def check_sizes(sizes: list[list[int]]) -> None:
    """Fewer bytes travelled than without compression, and some did."""
    assert len(sizes) == 4
    for raw, wire in sizes:
        assert raw > 0
        assert wire < 0.74 * raw


def survive(transport: Transport, x: Any, leave: Callable[[], Any]) -> list[Any]:
    """The last rank leaves between two calls; what the others say of it, and after how long."""
    comm = tw.Communicator(transport)
    comm.all_reduce(x)
    if comm.rank == comm.world_size - 1:
        leave()
    start = time.monotonic()
    with pytest.raises(tw.CollectiveError) as caught:
        comm.all_reduce(x)
    took = time.monotonic() - start
    with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
        comm.all_reduce(x)
    error = caught.value
    cause = type(error.__cause__).__name__
    return [error.rank, error.collective, error.sequence, error.stage, cause, str(error), took]


def check_survivors(found: list[list[Any]], causes: tuple[str, ...]) -> None:
    """Every survivor's error names the call, and came in time."""
    for me, (rank, collective, sequence, stage, cause, message, took) in enumerate(found):
        assert (rank, collective, sequence) == (me, "all_reduce", 1)
        assert stage in ("sizes", "payload", "static", "dynamic")
        assert cause in causes, message
        assert took < BOUND
