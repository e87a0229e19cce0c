"""Measurements of ``algorithm="auto"`` and ``route="auto"`` in files: also what processes run."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from processes import join, launch
from tightwire.adapters.collectives import measurements_file, measuring
from tightwire.adapters.collectives.faster import Faster
from tightwire.adapters.collectives.kept_measurements import KeptMeasurements
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

pytest.importorskip("filelock")
X = np.linspace(0, 1, 6000, dtype=np.float32)
#: Of both sizes and all paths: the compressed one takes twice as long as the native one, or half.
NATIVE = [[8192, 65536], [[1e-3, 2e-3, 3e-3], [8e-3, 16e-3, 24e-3]], 4, 0.8]
COMPRESSED = [[8192, 65536], [[2e-3, 1e-3, 3e-3], [16e-3, 8e-3, 24e-3]], 4, 0.8]


class Timed(Counter[str]):
    """What has been timed, by the rank that is asked."""

    def note(self, rank: int, what: str) -> None:
        if rank == 0:
            self[what] += 1


def watched(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Has the paths of collectives and of messages measured fast, and counted."""
    found = Timed()
    timed, message = measuring._timed, measuring._time_message

    def of_collective(run: Any, steps: Any, call: Any, *rest: Any) -> Any:
        found.note(steps.session.rank, call.collective)
        return timed(run, steps, call, *rest)

    def of_message(session: Any, *rest: Any) -> float:
        found.note(session.rank, "message")
        return message(session, *rest)

    monkeypatch.setattr(measuring, "_timed", of_collective)
    monkeypatch.setattr(measuring, "_time_message", of_message)
    monkeypatch.setattr(measuring, "_MEASURED_HOST", (1 << 12, 1 << 13))
    monkeypatch.setattr(measuring, "_MESSAGES_HOST", (1 << 12, 1 << 13))
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written without a pause."""
    monkeypatch.setattr(measurements_file, "_PAUSE", 0.01)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    return watched(monkeypatch)


def program(
    path: Callable[[int], Any], world: int = 2, codec: Any = "zipccl", **options: Any
) -> list[list[str]]:
    """A program of some calls on every rank; the paths that they took."""

    def task(transport: ThreadTransport) -> list[str]:
        own = path(transport.rank)
        comm = tw.Communicator(transport, codec, algorithm="auto", measurements=own, **options)
        comm.all_gather(X)
        comm.all_reduce(X)
        splits = [[3000 + 100 * r, *[100] * (world - 1)] for r in range(world)]
        mine, receives = splits[comm.rank], [row[comm.rank] for row in splits]
        comm.all_to_all(X[: sum(mine)], send_splits=mine, receive_splits=receives)
        large = np.zeros(1 << 18, np.float32)
        if comm.rank == 1:
            comm.send(large, 0)
        elif comm.rank == 0:
            comm.recv(large, 1)
        comm.close()
        return [record.algorithm.split(",")[0] for record in comm.trace()]

    found: list[list[str]] = run_ranks(world, task)
    return found


def everywhere(path: Path) -> Callable[[int], Path]:
    return lambda rank: path


def gathers(path: Callable[[int], Any], world: int = 2, **options: Any) -> list[str]:
    """The path of an all-gather on every rank."""

    def task(transport: ThreadTransport) -> str:
        own = path(transport.rank)
        comm = tw.Communicator(transport, algorithm="auto", measurements=own, **options)
        comm.all_gather(X)
        comm.close()
        return str(comm.trace()[0].algorithm.split(",")[0])

    found: list[str] = run_ranks(world, task)
    return found


def write(path: Path, measured: Any) -> None:
    """Has the file of rank 0 say this of an all-gather."""

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, algorithm="auto", measurements=path)
        assert comm.session.measurements is not None
        comm.session.measurements.put("all_gather  float32 host", measured)
        comm.close()

    run_ranks(2, task)


def test_a_second_program_measures_nothing(tmp_path: Path, timed: Timed) -> None:
    path = tmp_path / "kept"
    first = program(everywhere(path))
    kinds = {"all_gather", "all_reduce", "all_to_all_v", "message"}
    assert set(timed) == kinds
    timed.clear()
    assert program(everywhere(path)) == first
    assert not timed
    # What a file says decides.
    write(path, NATIVE)
    assert gathers(everywhere(path)) == ["native"] * 2
    write(path, COMPRESSED)
    assert gathers(everywhere(path)) == ["all-gather"] * 2
    assert not timed


@pytest.mark.parametrize(
    "change",
    [
        *("version", "host", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME", "UCX_TLS"),
        *("world", "codec", "parameter", "checksum", "sizes", "verify"),
    ],
)
def test_other_programs_measure_anew(
    change: str, tmp_path: Path, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = everywhere(tmp_path / "kept")
    codec = "dynamiq" if change == "parameter" else "zipccl"
    gathers(path, codec=codec)
    timed.clear()
    world = 2
    options: dict[str, Any] = {"codec": codec}
    if change == "version":
        monkeypatch.setattr(tw, "__version__", "another")
    elif change == "host":
        monkeypatch.setattr(platform, "node", lambda: "another")
    elif "_" in change:
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        gathers(path, **options)
        assert not timed
        monkeypatch.setenv(change, "1")
    elif change == "world":
        world = 3
    elif change == "codec":
        options["codec"] = "huffman"
    elif change == "parameter":
        options["codec"] = tw.codec("dynamiq", bits=6)
    else:
        options |= {change: {"checksum": False, "sizes": "between", "verify": True}[change]}
    gathers(path, world, **options)
    assert timed == {"all_gather": 1}
    timed.clear()
    gathers(path, world, **options)
    assert not timed
    monkeypatch.undo()
    watched(monkeypatch)
    # The first ones are still there.
    gathers(path, codec=codec)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty", "list", "number", "flat"])
def test_a_damaged_file_is_measured_anew_and_replaced(
    damage: str, tmp_path: Path, timed: Timed
) -> None:
    path = tmp_path / "kept"
    write(path, NATIVE)
    data = path.read_bytes()
    at = data.index(b"8192")
    damaged = {
        "cut": data[:-20],
        "flipped": data[:at] + b"9" + data[at + 1 :],
        "other": b"\x00\xff" * 100,
        "empty": b"",
        # Of a right checksum.
        "list": measurements_file.packed([1, 2]),
        "number": measurements_file.packed({"x": 3}),
        "flat": measurements_file.packed({"x": {"0": 3}}),
    }
    path.write_bytes(damaged[damage])
    with pytest.warns(RuntimeWarning, match="kept' is damaged or no file of measurements"):
        gathers(everywhere(path))
    assert timed == {"all_gather": 1}
    timed.clear()
    gathers(everywhere(path))
    assert not timed


def test_the_file_of_rank_0_decides(tmp_path: Path, timed: Timed) -> None:
    paths = [tmp_path / name for name in ("native", "compressed", "none")]
    write(paths[0], NATIVE)
    write(paths[1], COMPRESSED)
    timed.clear()
    assert gathers(lambda rank: paths[rank]) == ["native"] * 2
    assert gathers(lambda rank: paths[1 - rank]) == ["all-gather"] * 2
    assert gathers(lambda rank: paths[2 * rank]) == ["native"] * 2
    assert not timed
    # What rank 0 does not know is measured by all; then it knows.
    assert gathers(lambda rank: paths[2 - rank])[0] in ("native", "all-gather")
    assert timed == {"all_gather": 1}
    gathers(lambda rank: paths[2 - rank])
    assert timed == {"all_gather": 1}


def test_the_file_of_the_sender_has_its_messages(tmp_path: Path, timed: Timed) -> None:
    def mine(rank: int) -> Path:
        return tmp_path / f"kept {rank}"

    first = program(mine)
    assert "message" not in mine(0).read_text()
    assert "message to 0" in mine(1).read_text()
    timed.clear()
    assert program(mine) == first
    assert not timed
    mine(1).unlink()
    program(mine)
    assert set(timed) == {"message"}


@pytest.mark.parametrize("what", ["nowhere/kept", "", ".", "/", "a\0b", "damaged"])
def test_a_file_that_cannot_be_is_an_error_on_all_ranks(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Warnings are errors here.
    Path("damaged").write_bytes(b"hello")

    def task(transport: ThreadTransport) -> str:
        path = what if transport.rank == 1 else tmp_path / "kept"
        with pytest.raises(tw.CollectiveError) as caught:
            tw.Communicator(transport, algorithm="auto", measurements=path)
        return str(caught.value)

    for text in run_ranks(3, task, 10):
        assert f"rank 1: measurements is {what!r}" in text


def test_arguments_that_name_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measurements is ''; allowed: the path"):
        run_ranks(1, lambda t: tw.Communicator(t, algorithm="auto", measurements=""))
    with pytest.raises(TypeError, match="measurements is 5; allowed: the path of a file"):
        run_ranks(1, lambda t: tw.Communicator(t, algorithm="auto", measurements=5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="algorithm 'native'; allowed with it: 'auto'"):
        run_ranks(1, lambda t: tw.Communicator(t, algorithm="native", measurements="x"))

    def differ(transport: ThreadTransport) -> None:
        path = tmp_path / "kept" if transport.rank else None
        with pytest.raises(tw.CollectiveError, match="ranks differ"):
            tw.Communicator(transport, algorithm="auto", measurements=path)

    run_ranks(2, differ)
    # One rank measures nothing.
    run_ranks(1, lambda t: tw.Communicator(t, algorithm="auto", measurements="/nowhere/x"))


def test_what_cannot_be_written_is_a_warning_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "kept"

    def task(transport: ThreadTransport) -> Any:
        kept = KeptMeasurements(path, transport, "")
        transport.barrier()
        if transport.rank == 0:
            path.mkdir()
        transport.barrier()
        for key in ("a", "b"):
            kept.put(key, [1.5, 2])
            kept.finish()
        return kept.get("a")

    with pytest.warns(RuntimeWarning, match="not kept in .*the next program measures") as warned:
        assert run_ranks(2, task) == [[1.5, 2]] * 2
    assert len(warned) == 1
    path.rmdir()

    def more(transport: ThreadTransport) -> None:
        kept = KeptMeasurements(path, transport, "")
        assert kept.get("b") == [1.5, 2]
        kept.finish()

    run_ranks(2, more)
    assert all(f'"{key}"' in path.read_text() for key in "ab")


def test_a_warning_that_is_an_error_leaves_no_rank_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def task(transport: ThreadTransport) -> None:
        kept = KeptMeasurements(tmp_path / "kept", transport, "")
        if transport.rank == 0:
            (tmp_path / "kept").mkdir()
        kept.put("a", 1)
        kept.finish()
        transport.barrier()

    run_ranks(2, task)
    assert [one.exc_type for one in told] == [RuntimeWarning]


def test_a_lock_that_another_program_holds_holds_up_no_call(
    tmp_path: Path, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    path = tmp_path / "kept"
    monkeypatch.setattr(measurements_file, "_MOMENT", 0.1)
    with FileLock(tmp_path / "kept.lock"):
        start = time.monotonic()
        found = gathers(everywhere(path))
        assert time.monotonic() - start < 5
        # Of this process others know it already.
        timed.clear()
        assert gathers(everywhere(path)) == found
        assert not timed
        assert not path.exists()
    file = measurements_file.measurements_file(path)
    monkeypatch.setattr(measurements_file, "_MOMENT", 10)
    file.finish()
    assert path.exists()


def test_a_path_means_one_file_whatever_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the working directory changes, or links lead to it."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        Path(name).symlink_to(tmp_path / "kept")

    def task(transport: ThreadTransport) -> None:
        names = ("kept", "first", "second")
        kept = [KeptMeasurements(name, transport, "") for name in names]
        transport.barrier()
        os.chdir("other")
        for name, one in zip(names, kept, strict=True):
            one.put(name, 1)
            one.finish()

    run_ranks(1, task)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("kept", "kept.lock", "first", "second", "other")
    }
    assert not list((tmp_path / "other").iterdir())
    assert all(f'"{name}"' in (tmp_path / "kept").read_text() for name in ("kept", "second"))


def test_a_hook_is_given_a_path_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tightwire.adapters.training.prepared_hooks import PreparedHook

    with pytest.raises(ValueError, match="measurements is ''; allowed"):
        PreparedHook("auto", measurements="")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    hook = PreparedHook("auto", measurements="kept")
    monkeypatch.chdir("other")

    def task(transport: ThreadTransport) -> None:
        kept = hook._earlier(PreparedCalls(transport))
        assert kept is not None
        kept.put("a", 1)
        kept.finish()

    run_ranks(2, task)
    assert (tmp_path / "kept").exists()


def test_programs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    def task(transport: ThreadTransport) -> None:
        kept = KeptMeasurements(tmp_path / "kept", transport, "")
        for n in range(10):
            # Each rank is the owner of some.
            for owner in range(transport.world_size):
                kept.put(f"{owner} {n}", n, owner)
        kept.finish()

    run_ranks(4, task)

    def read(transport: ThreadTransport) -> None:
        kept = KeptMeasurements(tmp_path / "kept", transport, "")
        for owner in range(4):
            assert [kept.get(f"{owner} {n}", owner) for n in range(10)] == list(range(10))
        other = KeptMeasurements(tmp_path / "kept", transport, "something else")
        assert other.get("0 0") is None

    run_ranks(4, read)


def test_what_is_faster_is_kept(tmp_path: Path) -> None:
    made: list[str] = []

    def task(transport: ThreadTransport) -> list[bool]:
        kept = KeptMeasurements(tmp_path / "kept", transport, "")
        switch = Faster(transport, again=3, kept=kept)
        way = {name: lambda name=name: made.append(name) for name in ("native", "ours")}
        key = ("cpu", 5)
        found = [switch.native(key, way["native"], way["ours"], X) for _ in range(3)]
        kept.finish()
        return found

    first = run_ranks(2, task)
    assert first[0] == first[1]
    assert made
    made.clear()
    assert run_ranks(2, task) == first
    assert not made

    def again(transport: ThreadTransport) -> None:
        kept = KeptMeasurements(tmp_path / "kept", transport, "")
        switch = Faster(transport, again=1, kept=kept)
        for _ in range(2):
            switch.native(("cpu", 5), lambda: made.append("native"), lambda: None, X)
        kept.finish()

    run_ranks(2, again)
    # Not for ever.
    assert made


def test_another_look_has_a_budget_of_its_own() -> None:
    made: list[str] = []

    def task(transport: ThreadTransport) -> None:
        switch = Faster(transport, budget=1e-9)
        for spent in (False, True):
            made.clear()
            switch.native("a", lambda: made.append("native"), lambda: None, X)
            assert made
            transport.barrier()
            # Nothing is left for keys that have not been measured.
            made.clear()
            transport.barrier()
            switch.native("b" + str(spent), lambda: made.append("native"), lambda: None, X)
            assert not made
            transport.barrier()
            switch.look_again()

    run_ranks(2, task)


def everything(device: Any) -> list[Any]:
    """What a rank of a real group measures: by a communicator and by hooks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from tightwire import ddp, fsdp
    from tightwire.adapters.transports.torch_dist import TorchDist

    with pytest.MonkeyPatch.context() as patch:
        timed = watched(patch)
        measured = Faster._measured

        def noted(self: Faster, *what: Any) -> bool:
            timed.note(dist.get_rank(), "hook")
            return measured(self, *what)

        patch.setattr(Faster, "_measured", noted)
        # Ranks have files of their own, which the next program finds.
        path = Path(sys.argv[-1]).parents[1] / f"kept {dist.get_rank()}"
        comm = tw.Communicator(TorchDist(dist.new_group()), algorithm="auto", measurements=path)
        comm.all_gather(torch.ones(3000))
        model = torch.nn.Linear(64, 64)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fsdp.compress(model, route="auto", measurements=path)
        model(torch.ones(2, 64)).sum().backward()
        other = DistributedDataParallel(torch.nn.Linear(64, 64))
        ddp.register(other, route="auto", measurements=path)
        other(torch.ones(2, 64)).sum().backward()
        # This process ends without a look at its threads.
        measurements_file.measurements_file(path).finish()
        return [dict(timed), comm.trace()[0].algorithm]


@pytest.mark.slow
def test_between_processes(tmp_path: Path) -> None:
    """The file of rank 1 is lost in between: that of rank 0 decides."""
    pytest.importorskip("torch")
    found = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        found.append(launch(__file__, "everything", 2, folder))
        (tmp_path / "kept 1").unlink(missing_ok=True)
    for (timed, path), (timed_again, path_again) in zip(*found, strict=True):
        assert path_again == path
        assert not timed_again
        assert set(timed) in ({"all_gather", "hook"}, set())
    assert found[0][0][0]["hook"] == 3
    assert "gloo" in (tmp_path / "kept 0").read_text()


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
