"""What autograd knows of tensors that collectives write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tightwire as tw
from tightwire.adapters.collectives.all_to_all_v import FixedRateAllToAll
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

torch = pytest.importorskip("torch")

RANKS, N = 2, 3000
SPLITS = {"send_splits": [N, N], "receive_splits": [N, N]}


def message(comm: tw.Communicator, x: Any, out: Any) -> None:
    """From rank 0 to rank 1, and back."""
    calls: list[Callable[[], Any]] = [
        lambda: comm.send(x, 1 - comm.rank),
        lambda: comm.recv(out, 1 - comm.rank),
    ]
    for call in calls[:: 1 if comm.rank == 0 else -1]:
        call()


#: Collectives with how many times N elements they read and write.
COLLECTIVES: dict[str, tuple[int, int, Callable[[tw.Communicator, Any, Any], Any]]] = {
    "all_gather": (1, 2, lambda comm, x, out: comm.all_gather(x, out)),
    "all_to_all": (2, 2, lambda comm, x, out: comm.all_to_all(x, out)),
    "all_to_all with splits": (2, 2, lambda comm, x, out: comm.all_to_all(x, out, **SPLITS)),
    "reduce_scatter": (2, 1, lambda comm, x, out: comm.reduce_scatter(x, out)),
    "decoded": (2, 2, lambda comm, x, out: comm.reduce_scatter(x, decoded=out)),
    "all_reduce": (1, 1, lambda comm, x, out: comm.all_reduce(x, out)),
    "all_reduce in place": (1, 1, lambda comm, x, out: comm.all_reduce(out, out)),
    "broadcast": (1, 1, lambda comm, x, out: comm.broadcast(out)),
    "message": (1, 1, message),
}


@pytest.mark.parametrize("algorithm", ["compressed", "native"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_write_as_copy_does(name: str, algorithm: Any) -> None:
    read, written, call = COLLECTIVES[name]

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, algorithm=algorithm)
        x = torch.linspace(-1, 1, read * N)
        for _ in range(3):
            # The third native call of a kind takes a shorter way.
            base = torch.ones(3, written * N)
            w = torch.ones_like(base, requires_grad=True)
            product = (w * base).sum()
            before = base._version
            call(comm, x, base[1])
            assert base._version > before
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        leaf = torch.zeros(written * N, requires_grad=True)
        for out in (leaf, leaf * 1):
            if name == "message":
                with pytest.raises(ValueError, match="requires grad"):
                    comm.recv(out, 1 - comm.rank)
                continue
            with pytest.raises(ValueError, match=r"requires grad.* Allowed: within torch"):
                call(comm, x, out)
        # They were refused before anything was sent.
        with torch.no_grad():
            call(comm, x, leaf)
        assert leaf._version > 0

    run_ranks(RANKS, task)


def test_what_a_dynamic_all_to_all_keeps() -> None:
    """Every launch fills the same tensors."""

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        exchange = FixedRateAllToAll(comm, (100,), "bf16", max_splits=2, capacity=4)
        x = torch.ones(4, 100, dtype=torch.bfloat16)
        splits, indices, lens = torch.tensor([2, 2]), torch.tensor([0, 1]), torch.tensor([1, 1])
        received = exchange.launch(x, splits, indices, lens)
        w = torch.ones_like(received.data, requires_grad=True)
        product = (w * received.data).sum()
        exchange.finish()
        exchange.launch(x, splits, indices, lens)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        exchange.finish()

    run_ranks(RANKS, task)
