"""Cases of several ranks each, in processes that are forked from one that has imported all.

A case may kill or stop its ranks: it has processes of its own, which start in no time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import warm

#: What ranks of a case run: the case, the rank, a file for a store, and what writes its result.
Task = Callable[[Any, int, str, Callable[[Any], None]], None]


def launch(
    script: str,
    task: str,
    cases: Sequence[Any],
    world_size: int,
    folder: Path,
    seconds: float,
    warnings: str = "error",
) -> dict[str, list[Any]]:
    """What `task` of the file `script`, which calls `main`, has written of each case, by rank.

    A rank that has written nothing, or is still there when the others have ended, is killed.
    """
    words = [task, json.dumps(list(cases)), str(world_size), str(folder), str(seconds)]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {"PYTHONPATH": path}
    done = warm.run(script, words, env=env, action=warnings, seconds=2 * seconds)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def main(tasks: dict[str, Any], warm_up: Callable[[], None], at_a_time: int = 8) -> None:
    """What the launched process does."""
    name, text, ranks, place, seconds = sys.argv[1:]
    task, cases, world_size, folder = tasks[name], json.loads(text), int(ranks), Path(place)
    warm_up()
    warm.one_thread()
    deadline = time.monotonic() + float(seconds)
    waiting = list(range(len(cases)))
    running: dict[int, dict[int, int]] = {}
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < at_a_time:
            number = waiting.pop(0)
            running[number] = {
                rank: _fork(task, cases[number], rank, folder / str(number))
                for rank in range(world_size)
            }
        for number, pids in list(running.items()):
            if _over(pids, folder / str(number)):
                _kill(running.pop(number))
        time.sleep(0.01)
    for pids in running.values():
        _kill(pids)
    results = {
        json.dumps(case): [_result(folder / f"{number}-{rank}") for rank in range(world_size)]
        for number, case in enumerate(cases)
    }
    print(json.dumps(results))


def _fork(task: Task, case: Any, rank: int, place: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    out = Path(f"{place}-{rank}")

    def report(result: Any) -> None:
        part = Path(f"{out}.part")
        part.write_text(json.dumps(result))
        part.rename(out)

    try:
        task(case, rank, f"{place}.store", report)
    except BaseException:
        report({"unexpected": traceback.format_exc()})
    os._exit(0)


def _over(pids: dict[int, int], place: Path) -> bool:
    """Whether each rank has ended, was stopped, or has written its result."""
    return all(_ended(pid) or Path(f"{place}-{rank}").exists() for rank, pid in pids.items())


def _ended(pid: int) -> bool:
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    return found is not None


def _kill(pids: dict[int, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _result(place: Path) -> Any:
    return json.loads(place.read_text()) if place.exists() else None
