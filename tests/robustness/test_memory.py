"""Memory that decoding takes, Numba's and threads' included: that of the tensor and a tenth."""

from __future__ import annotations

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
