"""Copies by few programs: the bytes, nothing else, in accesses of 16 bytes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import MARKS, POISON, Memory  # noqa: E402
from tightwire.adapters.collectives import resident_copy_triton as resident  # noqa: E402

#: Bytes of a program's block.
BLOCK = 4 * resident._WORDS
pytestmark = [mark for mark in MARKS if mark.name != "fast_cases"]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of programs that were launched; every size is worth a launch, of few programs."""
    found: list[int] = []
    launch = resident._COPY.launch

    def noted(programs: int, *args: Any) -> None:
        found.append(programs)
        launch(programs, *args)

    monkeypatch.setattr(resident._COPY, "launch", noted)
    monkeypatch.setattr(resident, "LEAST_NBYTES", 1)
    monkeypatch.setattr(resident, "PROGRAMS", 3)
    return found


def copy(memory: Memory, nbytes: int, first: int = 0, dtype: Any = torch.uint8) -> None:
    """Copy random bytes to poisoned memory, `first` bytes behind a multiple of 512 bytes."""
    bits = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    x, out = memory.take(nbytes), memory.take(nbytes, first)
    x.copy_(torch.from_numpy(bits))
    resident.resident_copy(out.view(dtype), x.view(dtype))
    assert (out.cpu().numpy() == bits).all()
    assert (x.cpu().numpy() == bits).all()
    memory.check()


SIZES = [1, 15, 16, 1023, 1024, 1025, 4100, BLOCK - 1, BLOCK, BLOCK + 1]
SIZES += [3 * BLOCK, 3 * BLOCK + 17, 4 * BLOCK - 3, 7 * BLOCK + 5000]


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_are_copied(nbytes: int, place: str, launches: list[int]) -> None:
    """One block, several, none; tails of programs with and without blocks."""
    copy(Memory(place), nbytes)
    assert launches == [min(3, -(-nbytes // BLOCK))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_dtypes(dtype: Any, place: str, launches: list[int]) -> None:
    copy(Memory(place), BLOCK + 40 * 8, 16, dtype)
    assert launches


@pytest.mark.parametrize("first", [1, 2, 4, 8, 24])
def test_what_is_not_aligned_is_copied_by_torch(
    first: int, place: str, launches: list[int]
) -> None:
    copy(Memory(place), BLOCK + 8, first)
    assert launches == []


def test_what_is_small_is_copied_by_torch(place: str, launches: list[int]) -> None:
    resident.LEAST_NBYTES = 5000
    copy(Memory(place), 4999)
    assert launches == []
    copy(Memory(place), 5000)
    assert launches == [1]
    copy(Memory(place), 0)


@pytest.mark.gpu
def test_large_tensors_in_graphs() -> None:
    """Offsets of more than 32 bits, and a replay."""
    x = torch.randint(0, 256, ((1 << 32) + 4097,), dtype=torch.uint8, device="cuda")
    out = torch.full_like(x, POISON)
    resident.resident_copy(out, x)
    assert torch.equal(out, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        resident.resident_copy(out, x)
    out.fill_(POISON)
    graph.replay()
    assert torch.equal(out, x)


PTX = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tightwire.adapters.collectives import resident_copy_triton as resident

kernel, variant = resident._copy_kernel, resident._COPY
types = {"x_ptr": "*u8", "out_ptr": "*u8", "nbytes": "i64", "WORDS": "constexpr"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
source = ASTSource(kernel, types, constexprs={(3,): variant.values[0]}, attrs=aligned)
target = GPUTarget("cuda", int(sys.argv[1]), 32)
print(compile(source, target=target, options=variant.options).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_accesses_of_16_bytes(capability: str, tmp_path: Any) -> None:
    """Eight loads of a thread are queued before the first store; memory is far away."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-c", PTX, capability]
    run = subprocess.run(words, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    wide = re.findall(r"(ld|st)\.global\S*\.v4\.b32", run.stdout)
    assert wide == ["ld"] * 8 + ["st"] * 8
