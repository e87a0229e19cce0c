"""What a first use compiles, and tiny tensors that do not wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import tightwire as tw
from support import write_safetensors
from tightwire import planning
from tightwire.codecs.common.compile_cache import (
    NotCompiledError,
    cached,
    kernels_taken,
    only_compiled,
)
from tightwire.planning import TINY_NBYTES, call_tiny

TINY = np.linspace(-1, 1, 500, dtype=np.float32)
LARGE = np.linspace(-1, 1, TINY_NBYTES // 4, dtype=np.float32)

#: Prints, after each step, the functions that Numba was asked to compile so far.
COUNT = """
import sys
import ml_dtypes, numpy as np
import tightwire as tw
from numba.core import event

class Listener(event.Listener):
    compiled = 0
    def on_start(self, event):
        pass
    def on_end(self, event):
        Listener.compiled += 1

event.register("numba:compile", Listener())
name, dtype = sys.argv[1:]
key = tw.Key(0)
large = np.linspace(-1, 1, 1 << 16, dtype=np.float32).astype(getattr(ml_dtypes, dtype, dtype))
tiny = large[:500]
for x in (tiny, large, tiny):
    buf = tw.encode(x, name, key=key)
    print(Listener.compiled)
    tw.decode(bytes(buf))
    print(Listener.compiled)
tw.decode(buf, out=np.empty_like(x))
print(Listener.compiled)
"""

#: Prints the kernels that were compiled or loaded on the clock of a demo of the file that is named.
DEMO = """
import sys
from tightwire import demo
from tightwire.codecs.common import compile_cache

timed, taken = demo._round_trips, []

def watched(*args):
    before = compile_cache.kernels_taken()
    rows = timed(*args)
    taken.append(compile_cache.kernels_taken() - before)
    return rows

demo._round_trips = watched
demo.demo_file(*sys.argv[1:])
print(*taken)
"""


def counts(folder: Path, name: str, dtype: str) -> list[int]:
    """Of a process with its cache in `folder`: tiny, large, tiny; encode and decode of each.

    At last of a decode of the buffer itself, which may be written to.
    """
    return run(folder, COUNT, name, dtype)


def run(folder: Path, *arguments: str) -> list[int]:
    """What a program prints whose cache is in `folder`."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return [int(line) for line in found.stdout.split()]


@pytest.mark.slow
def test_a_demo_compiles_nothing_on_the_clock(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 500_000), np.float32)
    model, folder = tmp_path / "model.safetensors", tmp_path / "work"
    write_safetensors(model, {f"x{i}": row for i, row in enumerate(x)}, {})
    folder.mkdir()
    assert run(tmp_path, DEMO, str(model), str(folder)) == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("zipccl", "bfloat16", 30),
        ("zipccl", "float32", 30),
        ("mx", "bfloat16", 26),
        ("nvfp4", "bfloat16", 26),
        ("taco", "bfloat16", 26),
    ],
)
def test_functions_that_a_first_use_compiles(
    tmp_path: Path, name: str, dtype: str, most: int
) -> None:
    """Branches for other dtypes, one more kind of array, a call of NumPy's each add some."""
    tiny_encode, tiny_decode, encode, decode, *rest = counts(tmp_path, name, dtype)
    assert tiny_encode == tiny_decode == 0
    assert 0 < encode < decode <= most
    assert rest == [decode] * 3
    # A second process loads them, for tiny tensors too.
    assert counts(tmp_path, name, dtype) == [0] * 7


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """A process that has not coded tiny tensors yet."""
    waiting: dict[Any, Any] = {}
    monkeypatch.setattr(planning, "_waiting", waiting)
    return waiting


class Kernel:
    """What `call_tiny` calls; without its kernel it raises, as kernels in `only_compiled` do."""

    def __init__(self) -> None:
        self.compiled = False
        self.calls: list[str | None] = []

    def __call__(self, backend: str | None) -> str | None:
        self.calls.append(backend)
        if backend is None and not self.compiled:
            from tightwire.codecs.common.compile_cache import _this_thread

            if not getattr(_this_thread, "may_compile", True):
                raise NotCompiledError("kernel")
            self.compiled = True
        return backend


def plan_of(x: Any) -> Any:
    return tw.codec("zipccl").plan(x.shape, x.dtype)


def test_numpy_codes_tiny_tensors_until_it_has_taken_too_long(
    fresh: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, plan = Kernel(), plan_of(TINY)
    # The second call does not ask again: nothing has been compiled or loaded meanwhile.
    assert [call_tiny(plan, "encode", kernel) for _ in range(3)] == ["ref"] * 3
    assert kernel.calls == [None, "ref", "ref", "ref"]
    monkeypatch.setattr(planning, "PATIENCE_S", 0.0)
    assert call_tiny(plan, "encode", kernel) is None
    assert kernel.compiled
    monkeypatch.undo()


def test_kernels_that_others_had_compiled_are_taken(
    fresh: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightwire.codecs.common import compile_cache

    kernel, plan = Kernel(), plan_of(TINY)
    assert call_tiny(plan, "decode", kernel) == "ref"
    kernel.compiled = True
    assert call_tiny(plan, "decode", kernel) == "ref"
    monkeypatch.setattr(compile_cache, "_taken_last", kernels_taken() + 1)
    assert [call_tiny(plan, "decode", kernel) for _ in range(2)] == [None, None]
    assert fresh == {(plan.codec, "float32", "decode"): None}


def test_only_tiny_tensors_without_a_named_backend_wait(
    fresh: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buf = tw.encode(LARGE, "raw")
    tw.decode(buf)
    tw.decode(tw.encode(TINY, "raw", backend="cpu"), backend="cpu")
    tw.decode(tw.encode(TINY[:0], "raw"))
    assert not fresh
    assert bytes(tw.encode(TINY, "raw")) == bytes(tw.encode(TINY, "raw", backend="ref"))
    assert [key[2] for key in fresh] == ["encode"]


@pytest.mark.parametrize("name", ["zipccl", "mx"])
def test_numpy_calls_no_kernel_where_numba_has_coded(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Backends share plans, which remember the single calls of Numba."""
    plan = tw.codec(name).plan(TINY.shape, TINY.dtype)
    data = bytes(tw.encode(TINY, name, backend="cpu"))
    decoded = tw.decode(data, backend="cpu")
    one = plan.__dict__["_one"]

    def called(*args: Any) -> int:
        raise AssertionError("NumPy called a kernel")

    broken = one._replace(encode=called, decode=called)
    monkeypatch.setitem(plan.__dict__, "_one", broken)
    assert bytes(tw.encode(TINY, name, backend="ref")) == data
    assert tw.decode(data, backend="ref").tobytes() == decoded.tobytes()
    with pytest.raises(AssertionError, match="called a kernel"):
        tw.encode(TINY, name, backend="cpu")


def test_kernels_are_not_compiled_within() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    double.__code__ = double.__code__.replace(co_name=f"double_{os.getpid()}")
    kernel = cached()(double)
    kernel._cache._cache_file.flush()
    with only_compiled(), pytest.raises(NotCompiledError):
        kernel(2)
    taken = kernels_taken()
    assert kernel(2) == 4
    assert kernels_taken() != taken
    with only_compiled():
        assert kernel(3) == 6
