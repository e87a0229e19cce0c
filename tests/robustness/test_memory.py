"""Memory that decoding takes, Numba's and threads' included: that of the tensor and a tenth."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tightwire.codecs.common.threads import cpu_count

#: The arguments: codec, form, share of changed elements, whether in place, threads.
SCRIPT = """
import sys
import ml_dtypes, numpy as np, tightwire as tw

name, form, share, in_place, threads = sys.argv[1:]
threads, step = int(threads), int(1 / float(share))

def pair(n):
    x = np.random.default_rng(0).normal(0, 0.02, n).astype(np.float32).astype(ml_dtypes.bfloat16)
    base = x.copy()
    base.view(np.uint16)[::step] ^= 1
    return base, x

def read(data, base):
    if name == "huffman":
        return tw.decode(data, threads=threads)
    return tw.decode(data, base=base, out=base if in_place == "True" else None, threads=threads)

def encoded(base, x):
    if name == "huffman":
        return bytes(tw.encode(x, name))
    return bytes(tw.codec(name, form=form).encode(x, base=base))

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

for n in (1 << 20, 1 << 25):
    base, x = pair(n)
    data = encoded(base, x)
    wanted = x[-1].tobytes(), x.nbytes
    del x
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    y = read(data, base)
    assert y[-1].tobytes() == wanted[0]
    extra = status("VmHWM") - before
print(extra / wanted[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "form", "share", "in_place"),
    [
        ("huffman", "", 0.5, False),
        ("delta", "adaptive", 0.01, False),
        ("delta", "adaptive", 0.01, True),
        ("delta", "adaptive", 0.1, True),
        ("delta", "adaptive", 0.5, True),
        ("delta", "difference", 0.5, True),
        ("delta", "overwrite", 0.01, True),
        ("delta", "overwrite", 0.5, True),
        ("delta", "overwrite", 0.5, False),
    ],
)
def test_peak(name: str, form: str, share: float, in_place: bool) -> None:
    words = (name, form, share, in_place, cpu_count())
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, words)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    # In place the base is the tensor.
    assert float(run.stdout) <= (0.11 if in_place else 1.11)


#: The arguments: form, first byte, how it is read.
LONG_TILE = """
import sys, time
import numpy as np, tightwire as tw
from support import repair
from tightwire.codecs.delta import index_of
from tightwire.engine import parse

form, first, how = sys.argv[1:]

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

def made(n):
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, n, dtype=np.uint8)
    x = base.copy()
    x[: n * 9 // 10] = rng.integers(0, 256, n * 9 // 10)
    data = bytearray(bytes(tw.codec("delta", form=form).encode(x, base=base, backend="cpu")))
    parsed = parse(np.frombuffer(data, np.uint8))
    words = parsed.chunk(0).dynamic.size // 4
    at = parsed.plan.static_offset + 16
    offsets = np.full(index_of(parsed.chunk(0)).offsets.size, words, "<u4")
    offsets[0] = 0
    data[at : at + offsets.nbytes] = offsets.tobytes()
    at = parsed.plan.dynamic_offset
    data[at : at + 4 * words] = bytes([int(first)]) + b"\\xff" * (4 * words - 1)
    repair(data)
    return bytes(data), base

def read(data, base):
    backend, kind = how.split()
    options = {"backend": backend, "base": base}
    if kind == "in_place":
        options["out"] = base
    if kind == "part":
        options |= {"start": 5, "stop": 9}
    try:
        tw.decode(data, **options)
    except tw.FormatError as error:
        return error.reason

read(*made(1 << 17))
data, base = made(1 << 24)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before, start = status("VmRSS"), time.perf_counter()
assert read(data, base) == "bad_payload"
print((status("VmHWM") - before) / base.nbytes, time.perf_counter() - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("first", [0xFE, 0xFF])
@pytest.mark.parametrize("form", ["adaptive", "difference", "overwrite"])
@pytest.mark.parametrize("how", ["cpu whole", "cpu in_place", "cpu part", "ref whole"])
def test_a_tile_that_says_to_be_all_of_the_buffer(form: str, first: int, how: str) -> None:
    """It is refused by the offsets: nothing is read of it."""
    run = subprocess.run(
        [sys.executable, "-c", LONG_TILE, form, str(first), how],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == 0, run.stderr
    memory, seconds = map(float, run.stdout.split())
    assert memory <= 1.11
    # It took 13 s and more. The digest of the base is what takes time.
    assert seconds < 3
