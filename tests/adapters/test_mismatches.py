"""Ranks that make different calls, over gloo between processes: errors, and no process ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import tightwire as tw
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.collectives import comparisons, tensors  # noqa: E402
from tightwire.adapters.collectives.path_selection import Measured  # noqa: E402
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

#: In seconds, after which the sender of a message gives up a receiver that has raised.
TIMEOUT = 1.0
#: What a result looks like that nothing was written to.
POISON = 7

Call = Callable[[tw.Communicator], Any]


def message(count: int, dtype: Any = torch.float32, sent: Any = torch.float32) -> Call:
    """From rank 0 100 elements to rank 1, which expects `count`; returns what that has."""

    def call(comm: tw.Communicator) -> Any:
        if comm.rank == 0:
            comm.send(torch.arange(100).to(sent), 1)
            return None
        out = torch.full((count,), POISON).to(dtype)
        try:
            return comm.recv(out, 0)
        finally:
            assert bool((out == POISON).all())

    return call


def gather(*rows: int, dtype: Any = torch.float32, name: str = "all_gather") -> Call:
    """A collective of as many rows as each rank has."""

    def call(comm: tw.Communicator) -> Any:
        kind = dtype if comm.rank else torch.float32
        return getattr(comm, name)(torch.ones(rows[comm.rank], 50).to(kind))

    return call


def crossing(comm: tw.Communicator) -> None:
    """Measurements by which messages of less than a kilobyte are native, larger ones are not."""
    measured = Measured((1 << 10, 1 << 20), [[1e-4, 1e-4, 1e-1], [1e-1, 7.1e-2, 1e-1]], 4, 0.7)
    comm._measure = lambda *_: measured  # type: ignore[method-assign]


#: Codec, options, calls that go well, and one that does not.
CASES: dict[str, tuple[str, dict[str, Any], list[Call], Call]] = {
    "too long": ("zipccl", {"algorithm": "native"}, [], message(120)),
    "too short": ("zipccl", {"algorithm": "native"}, [], message(90)),
    "dtype": ("zipccl", {"algorithm": "native"}, [], message(100, torch.int32)),
    "auto, too short": ("zipccl", {"algorithm": "auto"}, [], message(90)),
    "auto, other path": ("zipccl", {"algorithm": "auto"}, [], message(1 << 20)),
    "auto, first shape": ("zipccl", {"algorithm": "auto"}, [], gather(4, 400)),
    "auto, first dtype": ("zipccl", {"algorithm": "auto"}, [], gather(4, 4, dtype=torch.float64)),
    "auto, later": ("zipccl", {"algorithm": "auto"}, [gather(4, 4)] * 2, gather(4, 400)),
    **{
        f"{name}, native": (
            "zipccl",
            {"algorithm": "native"},
            [gather(4, 4, name=name)] * 2,
            gather(4, 6, name=name),
        )
        for name in ("all_gather", "all_to_all", "all_reduce", "broadcast")
    },
    "between": (
        "zipccl",
        {"sizes": "between"},
        [gather(4, 4, name="all_reduce")],
        gather(40, 400, name="all_reduce"),
    ),
    "fixed": ("mx", {}, [gather(4, 4)], gather(40, 400)),
}


def mismatched(_: Any) -> dict[str, list[str]]:
    """What each case raises on this rank: stage and detail."""
    found = {}
    for case, (codec, options, before, wrong) in CASES.items():
        alone = not before and "first" not in case
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT if alone else 60))
        comm = tw.Communicator(TorchDist(group), codec, **options)
        if "later" in case:
            crossing(comm)
        for call in before:
            call(comm)
        try:
            wrong(comm)
            found[case] = ["", ""]
        except tw.CollectiveError as error:
            found[case] = [error.stage, error.detail]
        dist.barrier()
    return found


@pytest.mark.slow
def test_mismatched_calls_raise_and_no_process_ends(tmp_path: Path) -> None:
    first, second = launch(__file__, "mismatched", 2, tmp_path)
    for case in CASES:
        stage, detail = second[case]
        assert stage in ("sizes", "measure"), (case, second[case])
        assert "ranks [0] make another call, or one with another dtype or shape" in detail, case
        # The sender of a message learns of it when nobody takes its bytes, or not at all.
        if CASES[case][2] or "first" in case:
            assert "ranks [1] make another call" in first[case][1], (case, first[case])
    assert "rank 0: float32 (100,) send; here: float32 (120,) recv" in second["too long"][1]
    assert "rank 0: float32 (100,) send; here: int32 (100,) recv" in second["dtype"][1]
    assert "rank 0: float32 (4, 50) all_gather; here: float32 (6, 50)" in str(second)


if __name__ == "__main__":
    join({"mismatched": mismatched}, sys.argv[1:])


class Noting:
    """A transport that notes its exchanges."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if name not in ("all_gather", "all_to_all", "all_to_all_v"):
            return found

        def noted(*args: Any) -> None:
            self.made.append(name)
            found(*args)

        return noted


class OnGPU:
    """The functions for tensors, as if all were on a GPU."""

    def __getattr__(self, name: str) -> Any:
        return (lambda x: True) if name == "is_cuda" else getattr(tensors, name)


@pytest.mark.parametrize("sizes", ["first", "between"])
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
def test_what_arrives_early_on_one_rank_leaves_no_exchange(
    collective: str, sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where descriptors of a GPU are on the host of one rank before those of another."""
    mine = threading.local()
    monkeypatch.setattr(comparisons, "tensors", OnGPU())
    monkeypatch.setattr(tensors.PendingHostCopy, "on_host", False)
    monkeypatch.setattr(tensors.PendingHostCopy, "done", lambda self: mine.rank == 0)

    def task(transport: ThreadTransport) -> list[str]:
        mine.rank = transport.rank
        noting = Noting(transport)
        comm = tw.Communicator(cast(Any, noting), sizes=sizes)
        shape = (4, 2) if transport.rank == 0 else (2, 4)
        with pytest.raises(tw.CollectiveError, match="make another call"):
            getattr(comm, collective)(np.zeros(shape, np.float32))
        return noting.made

    first, second = run_ranks(2, task, timeout=20.0)
    assert first == second
