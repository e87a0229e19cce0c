"""Writers of versions and checkpoints that are killed at any step, or whose disk is full.

This file is also what the processes run.
"""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import faults
import tightwire as tw
from forked import launch, main

pytest.importorskip("torch")
if not pytest.importorskip("torch.distributed").is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint.api import CheckpointException

from versions import (
    DELTAS,
    WORKS,
    earlier,
    found,
    goal,
    perform,
    prepare,
    state,
)

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
        # What is renamed is on the disk before.
        renames = [i for i, name in enumerate(names) if name in ("replace", "rename")]
        assert all(names[i - 1] == "fsync" for i in renames), (work, names)
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
