"""Sums of gradients by the codec dynamiq, around a ring and by a butterfly, beside other ways.

Run it with `python examples/dynamiq_sum.py`. Four threads are the ranks; with processes or GPUs
only the transport is another. It prints the error and the bytes of each way.
"""

import functools

import numpy as np

import tightwire as tw
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

RANKS = 4


def gradients(rank: int) -> np.ndarray:
    """A rank's gradients, whose size differs from layer to layer, as it does in a model."""
    rng = np.random.default_rng(rank)
    layers = np.repeat(4.0 ** -np.arange(8), 4096)
    return (rng.standard_normal(layers.size) * layers).astype(np.float32)


def task(codec: tw.Codec, topology: str, transport: ThreadTransport) -> tuple[np.ndarray, int]:
    """What one rank does: its share of the sum, and the bytes that it sent."""
    with tw.Communicator(transport, codec, topology=topology) as comm:
        total = comm.all_reduce(gradients(comm.rank))
        return total, comm.trace()[-1].wire_bytes


exact = sum(gradients(rank).astype(np.float64) for rank in range(RANKS))
ways = [
    ("zipccl (lossless)", tw.codec("zipccl"), "two-shot"),
    ("mx, 8 bits, ring", tw.codec("mx", element="e4m3"), "ring"),
    ("mx, 4 bits, ring", tw.codec("mx", element="e2m1"), "ring"),
    ("dynamiq, 5 bits, ring", tw.codec("dynamiq", bits=5), "ring"),
    ("dynamiq, 5 bits, butterfly", tw.codec("dynamiq", bits=5), "butterfly"),
]
errors = {}
for name, codec, topology in ways:
    results = run_ranks(RANKS, functools.partial(task, codec, topology))
    totals = [total for total, _ in results]
    assert all(np.array_equal(totals[0], other) for other in totals), "same bits on all ranks"
    errors[name] = tw.error(exact.astype(np.float32), totals[0]).vnmse
    print(f"{name:28} vNMSE {errors[name]:.1e}, {results[0][1]} bytes from rank 0")

assert errors["zipccl (lossless)"] < 1e-12
assert all(error < 0.01 for name, error in errors.items() if "dynamiq" in name)
