"""Sums of ranks whose floating-point modes differ: those of the default mode, on every rank."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import float_modes
import tightwire as tw
from float_modes import mode
from tightwire.adapters.training.error_feedback import ErrorFeedback
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks
from tightwire.arrays import Target, from_bits
from tightwire.formats.dtypes import BY_NAME

pytestmark = pytest.mark.skipif(not float_modes.SUPPORTED, reason="modes are not known here")

#: More elements than PyTorch computes on one thread.
N = 3 << 15
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"algorithm": "native"},
    {"codec": "mx"},
    {"codec": "mx", "topology": "ring"},
    {"codec": "omnireduce", "topology": "in-network"},
)


def array(rank: int, library: str, dtype: str) -> Any:
    """Values about the least normal number, so that many are subnormal, of the library."""
    kind = BY_NAME[dtype]
    least = 2.0 ** (2 - (1 << kind.exponent - 1))
    values = np.random.default_rng(rank).standard_normal(N) * least
    return from_bits(values.astype(kind.numpy).view(kind.bits), kind, (N,), Target(library))


def sums(library: str, dtype: str, form: dict[str, Any], modes: tuple[str, ...]) -> list[bytes]:
    """Of each rank, which is in its mode of `modes`: a sum, a mean, a share, residuals."""

    def task(transport: ThreadTransport) -> bytes:
        x = array(transport.rank, library, dtype)
        feedback = ErrorFeedback()
        with mode(modes[transport.rank]) if modes else nullcontext():
            comm = tw.Communicator(transport, **form)
            found = [comm.all_reduce(x), comm.all_reduce(x, op="mean"), comm.reduce_scatter(x)]
            for _ in range(2):
                found.append(tw.decode(feedback.encode(tw.codec("mx"), x, "x")))
            found.append(feedback.residual("x"))
        return b"".join(bytes(tw.encode(y, "raw")) for y in found)

    return run_ranks(2, task)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_in_different_modes(library: str, dtype: str, form: dict[str, Any]) -> None:
    pytest.importorskip(library)
    wanted = sums(library, dtype, form, ())
    assert sums(library, dtype, form, ("flush", "upward")) == wanted


#: PyTorch's threads are made, and flush ever after; then they compute beside the caller's thread.
THREADS = """
import torch
from tightwire.adapters.collectives import tensors

torch.set_num_threads(2)
assert torch.set_flush_denormal(True)
n = 1 << 20
x = torch.full((n,), 1000, dtype=torch.int32).view(torch.float32)
words = lambda v: v.view(torch.int32)
assert (words(x + x) == 0).all()
torch.set_flush_denormal(False)
assert 0 < (words(x + x) == 2000).sum() < n
total = x.clone()
tensors.add(total, x)
assert (words(total) == 2000).all()
assert (words(tensors.elementwise(lambda v: v * 3, x)) == 3000).all()
tensors.put(total, torch.full((n,), 1000 * 2.0**-149, dtype=torch.float64))
assert (words(total) == 1000).all()
"""


@pytest.mark.slow
def test_pytorchs_own_threads_flush() -> None:
    pytest.importorskip("torch")
    run = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
