"""The cache of compiled functions where several processes, or threads, fill it at once."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core import caching
from numba.core.dispatcher import Dispatcher

import tightwire as tw
from tightwire.numba_cache import _Cache, _Files
from tightwire.planning import backend_module


def test_two_signatures_at_once_get_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock both take the first number, and one finds the other's code."""
    plain = caching.IndexDataCacheFile._save_index

    def slowly(self: Any, overloads: Any) -> None:
        time.sleep(0.2)
        plain(self, overloads)

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_index", slowly)
    start = threading.Barrier(2)

    def save(key: str) -> None:
        # Each has an object of its own, as each process has.
        files = _Files(str(tmp_path), "function", "stamp")
        start.wait()
        files.save(key, f"code of {key}")

    threads = [threading.Thread(target=save, args=(key,)) for key in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = _Files(str(tmp_path), "function", "stamp")
    assert [files.load(key) for key in ("a", "b")] == ["code of a", "code of b"]
    assert files.load("c") is None
    assert _Files(str(tmp_path / "absent"), "function", "stamp").load("a") is None


#: Two functions of a factory, too long to be inlined, and a function that is kept for each.
FACTORY = """
import sys
import numpy as np
from numba import njit
from tightwire.numba_cache import cached

def factory(factor):
    @njit
    def total(x):
        found = 0
        for i in range(x.size):
            for j in range(i):
                if x[j] % 3 == 1: found = found * x[j] % 1001
                if x[j] % 7 == 1: found = found * x[i] % 1001
                if x[j] % 5 == 1: found += found % x[i]
            for j in range(i):
                if x[j] % 4 == 1: found = found * x[j] % 1001
                if x[j] % 9 == 1: found = found * x[i] % 1001
                found += x[i]
        return found * factor
    return total

three, five = factory(3), factory(5)

@cached()
def by_three(x):
    return three(x) + three(x[1:]) * three(x[2:])

@cached()
def by_five(x):
    return five(x) + five(x[1:]) * five(x[2:])

for name in sys.argv[1:]:
    function = {"three": by_three, "five": by_five}[name]
    print(function(np.arange(20)), sum(function.stats.cache_hits.values()))
"""


def test_functions_of_two_processes_keep_their_callees(tmp_path: Path) -> None:
    """Both are the first that their process compiles; a third process loads what they kept."""
    module = tmp_path / "two_of_a_factory.py"
    module.write_text(FACTORY)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def call(*names: str) -> list[list[str]]:
        command = [sys.executable, str(module), *names]
        found = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        return [line.split() for line in found.stdout.splitlines()]

    (three,), (five,) = call("three"), call("five")
    assert three[0] != five[0]
    assert three[1] == five[1] == "0"
    assert call("three", "five") == [[three[0], "1"], [five[0], "1"]]
    assert call("five", "three") == [[five[0], "1"], [three[0], "1"]]


#: Prints the next number here and in two children, forked one after the other.
FORKS = """
import os
import tightwire.numba_cache
from numba.core.bytecode import FunctionIdentity

for _ in range(2):
    child = os.fork()
    if child == 0:
        print(next(FunctionIdentity._unique_ids), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(next(FunctionIdentity._unique_ids))
"""


def test_forked_children_count_on_their_own() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, check=True, text=True
    )
    numbers = [int(line) for line in found.stdout.split()]
    assert len(numbers) == 3
    assert min(abs(a - b) for a, b in itertools.combinations(numbers, 2)) > 1000, numbers


@pytest.mark.parametrize("name", sorted(tw.codecs()))
def test_no_function_has_another_cache(name: str) -> None:
    caches = [
        vars(function)["_cache"]
        for function in vars(backend_module(name, "cpu")).values()
        if isinstance(function, Dispatcher)
    ]
    assert not [c for c in caches if isinstance(c, caching.FunctionCache) and type(c) is not _Cache]
    assert any(isinstance(c, _Cache) for c in caches)
