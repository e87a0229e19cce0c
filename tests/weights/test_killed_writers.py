"""Writers of versions and checkpoints that are killed at any step, or whose disk is full.

This file is also what the processes run.
"""

from __future__ import annotations

import errno
import json
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import faults
import tightwire as tw
from forked import launch, main

torch = pytest.importorskip("torch")
if not pytest.importorskip("torch.distributed").is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

folders = tw.delta_folders
State = dict[str, Any]
DELTAS = ("save", "publish", "fold", "prune")
WORKS = (*DELTAS, "folders", "checkpoint", "checkpoint again")


def state(version: int) -> State:
    """The tensors of a version."""
    rng = np.random.default_rng(0)
    found = {f"w{i}": rng.normal(0, 0.02, (200, 100)).astype(np.float32) for i in range(2)}
    for step in range(version):
        found["w0"].reshape(-1)[step::50] *= 1.001
    return found | {"steps": np.full(1, version)}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def save_checkpoint(folder: Path, version: int, name: str, base: str | None) -> None:
    tensors = {name: torch.from_numpy(x) for name, x in state(version).items()}
    against = None if base is None else folder / base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = tw.dcp.Writer(folder / name, base=against, threads=1)
        dcp.save(tensors, storage_writer=writer, no_dist=True)


def load_checkpoint(path: Path) -> State:
    tensors = {
        name: torch.zeros(x.shape, dtype=torch.from_numpy(x).dtype) for name, x in state(0).items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=tw.dcp.Reader(path), no_dist=True)
    return {name: x.numpy() for name, x in tensors.items()}


def prepare(work: str, folder: Path) -> None:
    """What is there before."""
    folder.mkdir()
    if work == "folders":
        folders.save(state(1), state(0), folder, version=1, compression="tightwire", threads=1)
    elif work in DELTAS:
        tw.save_delta(state(0), None, folder, threads=1)
        tw.save_delta(state(1), state(0), folder, threads=1)
        tw.save_delta(state(2), state(1), folder, threads=1)
        if work == "prune":
            tw.fold_deltas(folder, 0, 2, threads=1)
            tw.save_delta(state(2), None, folder, threads=1)
            tw.save_delta(state(3), state(2), folder, threads=1)
    else:
        save_checkpoint(folder, 0, "base", None)
        if work == "checkpoint again":
            save_checkpoint(folder, 1, "later", "base")


def perform(work: str, folder: Path) -> None:
    """What is killed."""
    if work == "save":
        tw.save_delta(state(3), folder, folder, chain_limit=2, threads=1)
    elif work == "publish":
        tw.publish(state(3), folder, threads=1).send()
    elif work == "fold":
        tw.fold_deltas(folder, 0, 2, threads=1)
    elif work == "prune":
        tw.prune_deltas(folder, keep=1)
    elif work == "folders":
        folders.save(state(2), state(1), folder, version=2, compression="tightwire", threads=1)
    else:
        save_checkpoint(folder, 2, "later", "base")


def found(work: str, folder: Path) -> int | None:
    """The newest version there, all that is there being whole. None: no version."""
    if work == "folders":
        tensors = state(0)
        version = folders.apply(tensors, folder, since=0)
        assert same(tensors, state(version))
        return version
    if work in DELTAS:
        return found_deltas(work, folder)
    assert same(load_checkpoint(folder / "base"), state(0))
    if not (folder / "later" / ".metadata").exists():
        return None
    tensors = load_checkpoint(folder / "later")
    version = int(tensors["steps"][0])
    assert same(tensors, state(version))
    return version


def found_deltas(work: str, folder: Path) -> int:
    worker = state(2)
    newest = tw.apply_delta(worker, folder)
    # A publisher that starts anew sends a version of its own, of the same tensors.
    assert same(worker, state(min(newest, 3)))
    for version in range(newest + 1):
        try:
            assert same(tw.load_delta(folder, version=version), state(min(version, 3)))
        except ValueError as error:
            # Only what is being removed may be gone.
            assert work == "prune", (version, error)
            assert version < 2, error
    return newest


# What the processes run.


def largest(folder: Path) -> int:
    """The size of the largest file below a folder."""
    return max(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def task(case: list[Any], rank: int, store: str, report: Callable[[Any], None]) -> None:
    work, fault, where = case
    folder = Path(store)
    prepare(work, folder)
    if fault == "step":
        steps = faults.Steps(where)
    else:
        faults.limited(where, signal.SIG_IGN if fault == "full" else signal.SIG_DFL)
    try:
        perform(work, folder)
    except (OSError, CheckpointException) as error:
        faults.unlimited()
        failures = getattr(error, "failures", {})
        first: Any = next(iter(failures.values()))[0] if failures else error
        report([first.errno, first.filename])
        return
    faults.unlimited()
    report([steps.names, largest(folder)] if fault == "step" else None)


def warm_up() -> None:
    """Compile before the processes are forked."""
    before, after = state(0)["w0"], state(1)["w0"]
    for codec, given in (("zipccl", {}), ("delta", {"base": before})):
        buffer = tw.encode(after, codec, threads=1, **given)
        assert tw.decode(bytes(buffer), threads=1, **given).tobytes() == after.tobytes()


# The tests.


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".") and p.suffix == ".tmp"]


def goal(work: str) -> int:
    return {"fold": 2, "folders": 2, "checkpoint": 2, "checkpoint again": 2}.get(work, 3)


def earlier(work: str) -> int | None:
    return {"folders": 1, "prune": 3, "checkpoint": None, "checkpoint again": 1}.get(work, 2)


def check(case: list[Any], folder: Path) -> None:
    """The state before or after, whole; and another attempt succeeds."""
    work = case[0]
    before = found(work, folder)
    assert before in (earlier(work), goal(work)), case
    if work != "folders" or before != goal(work):
        perform(work, folder)
    anew = work == "publish" and before == goal(work)
    assert found(work, folder) == goal(work) + anew, case
    assert not leftovers(folder), case
    if work in DELTAS:
        names = {p.name for p in folder.glob("weight*")}
        assert names == files_of(work) if work == "prune" else names >= files_of(work), case


def files_of(work: str) -> set[str]:
    """Files that are there afterwards, whatever was killed."""
    names = {
        "save": ["000003", "000003.from_v000002"],
        "fold": ["000002.from_v000000"],
        "prune": ["000002", "000003.from_v000002"],
    }
    return {f"weight_v{name}.tw.safetensors" for name in names.get(work, [])}


@pytest.mark.slow
def test_killed_at_any_step(tmp_path: Path) -> None:
    for part in ("count", "kill"):
        (tmp_path / part).mkdir()
    counts = [[work, "step", None] for work in WORKS]
    results = launch(__file__, "task", counts, 1, tmp_path / "count", 200)
    steps = {json.loads(text)[0]: result for text, [result] in results.items()}
    for work, (names, _) in steps.items():
        wanted = {"unlink"} if work == "prune" else {"open", "write", "fsync", "replace"}
        assert wanted | ({"rename"} if work == "folders" else set()) <= set(names), (work, names)
    cases = [[work, "step", i] for work, (names, _) in steps.items() for i in range(len(names))]
    results = launch(__file__, "task", cases, 1, tmp_path / "kill", 400)
    for number, case in enumerate(cases):
        assert results[json.dumps(case)] == [None], case
        check([*case, steps[case[0]][0]], tmp_path / "kill" / f"{number}.store")


@pytest.mark.slow
def test_files_that_do_not_fit(tmp_path: Path) -> None:
    """The system refuses what goes beyond a size, or ends the process there."""
    for part in ("count", "full"):
        (tmp_path / part).mkdir()
    works = [work for work in WORKS if work != "prune"]
    counts = [[work, "step", None] for work in works]
    results = launch(__file__, "task", counts, 1, tmp_path / "count", 200)
    sizes = {work: written(work, tmp_path / "count" / f"{i}.store") for i, work in enumerate(works)}
    assert len(results) == len(works)
    cases: list[list[Any]] = [
        [work, fault, place]
        for work, size in sizes.items()
        for place in (0, 1, 1000, size // 2, size - 1)
        for fault in ("full", "killed")
    ]
    results = launch(__file__, "task", cases, 1, tmp_path / "full", 200)
    for number, case in enumerate(cases):
        folder = tmp_path / "full" / f"{number}.store"
        [result] = results[json.dumps(case)]
        if case[1] == "full":
            assert result[0] == errno.EFBIG, (case, result)
            assert Path(result[1]).is_relative_to(folder), (case, result)
            assert not leftovers(folder), case
            assert found(case[0], folder) == earlier(case[0]), case
        else:
            assert result is None, case
        check(case, folder)


def written(work: str, folder: Path) -> int:
    """The size of the largest file that the work writes."""
    names = {
        "save": "weight_v000003.from_v000002.*",
        "publish": "weight_v000003.from_v000002.*",
        "fold": "weight_v000002.from_v000000.*",
        "folders": "weight_v000002/*",
    }
    return max(path.stat().st_size for path in folder.glob(names.get(work, "later/*")))


if __name__ == "__main__":
    main(globals(), warm_up, at_a_time=2)
