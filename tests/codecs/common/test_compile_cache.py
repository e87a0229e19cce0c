"""The cache of compiled functions where several processes, or threads, fill it at once."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core import caching, config
from numba.core.dispatcher import Dispatcher

import tightwire as tw
from tightwire.codecs import mx_cpu, zipccl_cpu
from tightwire.codecs.common import compile_cache
from tightwire.codecs.common.compile_cache import (
    _SOURCES,
    _Cache,
    _Files,
    _fingerprint,
    _sources_digest,
    cached,
    part,
)
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
from tightwire.codecs.common.compile_cache import cached

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


@pytest.mark.slow
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
import tightwire.codecs.common.compile_cache
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


def test_no_function_has_another_cache() -> None:
    kernels = [zipccl_cpu._encoder(7, 0, 1), mx_cpu._decoder(0, 8, 255, 127)]
    functions = [
        value
        for name in tw.list_codecs()
        for value in vars(backend_module(name, "cpu")).values()
        if isinstance(value, Dispatcher)
    ]
    caches = [vars(function)["_cache"] for function in (*functions, *kernels)]
    assert not [c for c in caches if isinstance(c, caching.FunctionCache) and type(c) is not _Cache]
    assert sum(isinstance(c, _Cache) for c in caches) > len(kernels)
    assert all(isinstance(kernel._cache, _Cache) for kernel in kernels)


def test_a_key_says_what_the_functions_of_a_function_were_made_with() -> None:
    """Of two kernels with the same code the factories' numbers differ, here and one call down."""

    def made(factor: int) -> Any:
        @part()
        def times(x: Any) -> Any:
            return x * factor

        def kernel(x: Any) -> Any:
            return times(x)

        return kernel

    assert _fingerprint(made(3)) == _fingerprint(made(3))
    assert _fingerprint(made(3)) != _fingerprint(made(5))


def test_the_sources_of_kernels_have_a_digest(tmp_path: Path) -> None:
    """All files but those of another compiler: names, text, and which file has which text."""
    found = []

    def note(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        _sources_digest.cache_clear()
        found.append(_sources_digest((str(tmp_path), str(tmp_path / "absent"))))

    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("b.py", ""), ("b.py", "x = 2\n")):
        note(name, text)
    note("a.py", "")
    assert len(set(found)) == 5
    note("a_triton.py", "x = 1\n")
    assert found[-1] == found[-2]
    of_kernels = [Path(folder, "minifloat_cpu.py") for folder in _SOURCES]
    assert any(path.is_file() for path in of_kernels)


def test_no_kernel_is_kept_that_was_made_of_other_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called() == 0
    assert called() == 2
    monkeypatch.setattr(compile_cache, "_sources_digest", lambda folders: b"changed")
    assert called() == 0


#: A kernel of one file, with a helper of another one.
CONVERT = """
import numpy as np
from tightwire.codecs.omnireduce_cpu import converted
from tightwire.formats.dtypes import BY_NAME

x = np.arange(1, 9, dtype=np.float32).view(np.uint32)
print(*converted(x, BY_NAME["float32"], BY_NAME["bfloat16"]))
"""


@pytest.mark.slow
def test_a_helper_of_another_file_may_change(tmp_path: Path) -> None:
    """A kernel that was kept with the old helper is compiled again."""
    package = tmp_path / "tightwire"
    home = Path(tw.__file__).parent
    shutil.copytree(home, package, ignore=shutil.ignore_patterns("vectors", "__pycache__"))
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(tmp_path)

    def run() -> list[str]:
        command = [sys.executable, "-c", CONVERT]
        found = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        return found.stdout.split()

    before = run()
    helpers = package / "codecs" / "common" / "minifloat_cpu.py"
    text = helpers.read_text()
    call = "_narrow0(words, out)\n"
    assert text.count(call) == 1
    (indent,) = re.findall(rf"^( *){re.escape(call)}", text, re.MULTILINE)
    helpers.write_text(text.replace(call, f"{call}{indent}out[0] = 0\n"))
    assert run() == ["0", *before[1:]]


#: Encodes and decodes, and says what was warned of, and what was logged.
FIRST_CALL = """
import logging, sys, warnings
import numpy as np

records = []
handler = logging.Handler()
handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
logging.getLogger("tightwire").addHandler(handler)
logging.getLogger("tightwire").setLevel("INFO")

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tightwire as tw

    x = np.arange(1 << 16, dtype=np.float32)
    for _ in range(2):
        y = tw.decode(bytes(tw.encode(x, "lhc")))
        assert y.shape == x.shape
for warning in caught:
    print("warned", warning.category.__name__, warning.message)
for record in records:
    print("logged", *record)
"""


def first_call(folder: Path) -> list[str]:
    """Lines of FIRST_CALL in a process with the cache in `folder`."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout.splitlines()


#: What can become of a file: an empty one, one cut, zeros after a crash, a bit.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-9],
    "zeros": lambda data: bytes(len(data)),
    "bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}


def damage(folder: Path, suffix: str, how: str) -> None:
    files = list(folder.rglob(f"*{suffix}"))
    assert files
    for file in files:
        file.write_bytes(DAMAGES[how](file.read_bytes()))


@pytest.mark.slow
def test_what_processes_say_of_a_cache_empty_warm_and_damaged(tmp_path: Path) -> None:
    (line,) = first_call(tmp_path)
    assert line.startswith("logged INFO compiling the kernels of lhc (backend cpu)")
    assert str(tmp_path) in line
    assert first_call(tmp_path) == []
    damage(tmp_path, ".nbc", "bit")
    warned, logged = first_call(tmp_path)
    assert warned.startswith("warned RuntimeWarning")
    assert "is damaged" in warned
    assert str(tmp_path) in warned
    assert logged == line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where functions are kept, in a process that has not warned yet."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_first_warning", threading.Lock())
    return tmp_path / "cache"


def called() -> int:
    """Cache hits of a function that was declared, compiled or loaded, and called."""

    @cached()
    def plus_one(x: Any) -> Any:
        return x + 1

    assert [plus_one(x) for x in (1, 1.5, 2)] == [2, 2.5, 3]
    hits: int = sum(plus_one.stats.cache_hits.values())
    return hits


@pytest.mark.parametrize(
    ("suffix", "how"),
    # An index with another bit may be an index of other files.
    [(s, how) for s in (".nbi", ".nbc") for how in DAMAGES if (s, how) != (".nbi", "bit")],
)
def test_damaged_files_are_a_warning_and_are_replaced(folder: Path, suffix: str, how: str) -> None:
    assert called() == 0
    assert called() == 2
    damage(folder, suffix, how)
    with pytest.warns(RuntimeWarning, match=re.escape(str(folder))) as caught:
        assert called() == 0
    assert len(caught) == 1
    assert called() == 2


def test_a_full_disk_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, path: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", full)
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        assert called() == called() == 0
    assert len(caught) == 1
    assert str(folder) in str(caught[0].message)


def test_no_folder_that_can_be_written_to_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    folder.write_text("no folder")
    with pytest.warns(RuntimeWarning, match="no locator available") as caught:
        assert called() == 0
    assert len(caught) == 1
    assert str(folder) in str(caught[0].message)


def test_a_folder_that_is_lost_is_a_warning(folder: Path) -> None:
    """Between the declaration of a function and its first call."""

    @cached()
    def plus_two(x: Any) -> Any:
        return x + 2

    shutil.rmtree(folder)
    folder.write_text("no folder")
    with pytest.warns(RuntimeWarning, match=re.escape(str(folder))):
        assert plus_two(1) == 3


START = """
import sys
import numpy as np
from tightwire.codecs.common.compile_cache import cached

@cached(nogil=True)
def total(x):
    found = 0
    for value in x:
        found += value
    return found

assert total(np.arange(5)) == 10
print("numba.np.arraymath" in sys.modules)
"""


@pytest.mark.slow
def test_a_function_from_the_cache_starts_without_the_compiler(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert found == ["True", "False"]
