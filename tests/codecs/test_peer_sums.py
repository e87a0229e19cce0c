"""Sums over ranks by one launch on each. Ranks are processes, or on a GPU streams."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
triton = pytest.importorskip("triton")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from tightwire.codecs.common import flags_triton  # noqa: E402
from tightwire.codecs.common.frame_triton import problem  # noqa: E402
from tightwire.codecs.common.peer_sums_triton import PeerSum, takes  # noqa: E402
from tightwire.planning import device_module  # noqa: E402

CODECS = {
    "mx": tw.codec("mx"),
    "mx e2m1": tw.codec("mx", element="e2m1"),
    "taco": tw.codec("taco"),
    "taco none": tw.codec("taco", transform="none"),
    "raw": tw.codec("raw"),
    "sdp4bit": tw.codec("sdp4bit"),
}
#: Codec, dtype, elements, whether tiles have checksums, the dtype of sums, what they are scaled by.
CASES = (
    ("mx", "bfloat16", 4096, True, "bfloat16", None),
    ("mx", "bfloat16", 9001, True, "float32", 0.5),
    ("mx", "float32", 3001, False, "float32", None),
    ("mx e2m1", "float16", 5000, True, "float16", None),
    ("taco", "bfloat16", 8192 + 31, True, "bfloat16", None),
    ("taco none", "float32", 1, True, "float32", 0.25),
    ("raw", "bfloat16", 2049, True, "bfloat16", None),
    ("sdp4bit", "bfloat16", 700, True, "bfloat16", None),
)
ON_GPUS = (
    *CASES,
    *[
        (codec, dtype, n, checksum, dtype, None)
        for codec in CODECS
        for dtype in ("bfloat16", "float32")
        for n in (1, 31, 4097, 70_001, 1 << 20)
        for checksum in (True, False)
    ],
)
CALLS = 3


def values(rank: int, n: int, dtype: str, call: int) -> Any:
    x = np.random.default_rng([rank, n, call]).standard_normal(n).astype(np.float32)
    return torch.from_numpy(x * 2.0 ** (2 * rank + call)).to(getattr(torch, dtype))


def made(case: tuple[Any, ...], device: Any, ranks: int, rank: int) -> PeerSum:
    name, dtype, n, checksum, *_ = case
    plan = CODECS[name].plan((n,), dtype, chunks=1 + n % 2, checksum=checksum)
    kernels: Any = device_module(plan.codec.name)
    driver = kernels.driver_of(plan)
    assert takes(driver, plan)
    return PeerSum(driver, plan, device, ranks, rank)


def expected(case: tuple[Any, ...], ranks: int, call: int) -> Any:
    name, dtype, n, _, total, scale = case
    codec = CODECS[name]
    terms = [codec.encode(values(r, n, dtype, call), chunks=1 + n % 2) for r in range(ranks)]
    out = torch.empty(n, dtype=getattr(torch, total))
    tw.decode_sum(terms, scale=scale, dtype=total, out=out)
    return out


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)))


# Ranks as processes.


def shared(nbytes: int) -> list[Any]:
    """Memory of all ranks, zero, in files that all of them map."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    paths = [Path(names[0]) / str(number) for number in range(ranks)]
    paths[rank].write_bytes(bytes(nbytes))
    dist.barrier()
    parts = [torch.from_file(str(p), shared=True, size=nbytes, dtype=torch.uint8) for p in paths]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(names[0])
    return parts


def sums(device: Any) -> list[str]:
    """Every case; what was found wrong."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    late = torch.zeros(1, dtype=torch.int64)
    for case in CASES if ranks == 2 else CASES[:3]:
        one = made(case, device, ranks, rank)
        one.begin(shared(one.nbytes), late, 60)
        for call in range(CALLS):
            status = torch.zeros(ranks + 1, dtype=torch.int64)
            out = torch.full((case[2],), float("nan"), dtype=getattr(torch, case[4]))
            x = values(rank, case[2], case[1], call)
            kept = x.clone()
            one.sum(x, out, status, case[5])
            good = same(out, expected(case, ranks, call)) and same(x, kept)
            if not good or status.any() or late.any():
                wrong.append(f"{case}, call {call}: {status.tolist()}, late {late.tolist()}")
    return wrong


def unequal(device: Any) -> list[str]:
    """Rank 1 tells checksums of zero: the others are told of its tiles alone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    case = ("mx", "bfloat16", 5000, rank != 1, "bfloat16", None)
    one = made(case, device, ranks, rank)
    one.begin(shared(one.nbytes), torch.zeros(1, dtype=torch.int64), 60)
    status = torch.zeros(ranks + 1, dtype=torch.int64)
    one.sum(values(rank, 5000, "bfloat16", 0), torch.empty(5000).bfloat16(), status)
    dist.barrier()
    return [str(problem(int(word))) for word in status[:-1]]


def absent(device: Any) -> list[int]:
    """Rank 1 comes to no call. Whom the others name, and once more."""
    flags_triton._LOOKS = triton.language.constexpr(50)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    one = made(CASES[0], device, ranks, rank)
    late = torch.zeros(1, dtype=torch.int64)
    found: list[int] = []
    one.begin(shared(one.nbytes), late, 0.1)
    for call in range(2 if rank != 1 else 0):
        status = torch.zeros(ranks + 1, dtype=torch.int64)
        one.sum(values(rank, 4096, "bfloat16", call), torch.empty(4096).bfloat16(), status)
        found += [int(late), int(status[-1])]
    dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_of_processes(ranks: int, tmp_path: Path) -> None:
    for wrong in launch(__file__, "sums", ranks, tmp_path):
        assert wrong == []


@pytest.mark.slow
def test_a_tile_that_differs_from_its_checksum(tmp_path: Path) -> None:
    first, second, third = launch(__file__, "unequal", 3, tmp_path)
    assert first == third
    assert first[0] == first[2] == "None"
    assert "checksum_mismatch" in first[1]
    assert second == ["None"] * 3


@pytest.mark.slow
def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    first, second = launch(__file__, "absent", 2, tmp_path)
    assert (first, second) == ([2] * 4, [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "float8_e4m3fn", "int32"])
@pytest.mark.parametrize("name", ["raw", "mx", "nvfp4", "dynamiq", "zipccl"])
def test_what_is_summed_so(name: str, dtype: str) -> None:
    plan = tw.codec(name).plan((1000,), dtype)
    kernels: Any = device_module(plan.codec.name)
    summed = hasattr(kernels, "driver_of") and takes(kernels.driver_of(plan), plan)
    assert summed == (name in ("raw", "mx") and dtype in ("bfloat16", "float32"))


def ahead(device: Any) -> list[int]:
    """Rank 0 goes on without rank 1, which finds flags of later calls, and does not take them."""
    flags_triton._LOOKS = triton.language.constexpr(50)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    one = made(CASES[0], device, ranks, rank)
    late = torch.zeros(1, dtype=torch.int64)
    one.begin(shared(one.nbytes), late, 0.1)
    status = torch.zeros(ranks + 1, dtype=torch.int64)
    for number in range(ranks):
        if rank == number:
            for call in range(3 - 2 * rank):
                one.sum(values(rank, 4096, "bfloat16", call), torch.empty(4096).bfloat16(), status)
        dist.barrier()
    return [int(late), int(status[-1])]


@pytest.mark.slow
def test_flags_of_later_calls_are_not_taken(tmp_path: Path) -> None:
    assert launch(__file__, "ahead", 2, tmp_path) == [[2, 2], [1, 1]]


# Ranks as streams of a GPU.


def on_streams(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            task()
    torch.cuda.synchronize()


def words(ranks: int) -> Any:
    """Status words; other alignment would be another kernel, which one rank waits for."""
    return torch.zeros(ranks + 1, dtype=torch.int64, device="cuda")


def begun(case: tuple[Any, ...], ranks: int, seconds: float) -> tuple[list[PeerSum], Any]:
    device, late = torch.device("cuda", 0), torch.zeros(1, dtype=torch.int64, device="cuda")
    them = [made(case, device, ranks, rank) for rank in range(ranks)]
    nbytes = them[0].nbytes
    parts = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
    for one in them:
        one.begin(parts, late, seconds)
    torch.cuda.synchronize()
    return them, late


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_streams(ranks: int) -> None:
    for case in ON_GPUS if ranks == 2 else CASES:
        them, late = begun(case, ranks, 5)
        for call in range(CALLS):
            xs = [values(rank, case[2], case[1], call).cuda() for rank in range(ranks)]
            total = getattr(torch, case[4])
            outs = [torch.full((case[2],), float("nan"), dtype=total).cuda() for _ in xs]
            status = [words(ranks) for _ in xs]
            rows = zip(them, xs, outs, status, strict=True)
            on_streams([functools.partial(e.sum, x, o, s, case[5]) for e, x, o, s in rows])
            assert not torch.cat(status).any(), (case, call)
            assert not late.any(), (case, call)
            assert all(same(out, expected(case, ranks, call)) for out in outs), (case, call)


@pytest.mark.gpu
def test_sums_in_place_in_graphs() -> None:
    """An odd number of replays: which set of memory is used is known on the device alone."""
    case = ("mx", "bfloat16", 40_000, True, "bfloat16", None)
    them, late = begun(case, 2, 5)
    status = [words(2) for _ in them]
    xs = [values(rank, case[2], case[1], 0).cuda() for rank in range(2)]
    rows = zip(them, xs, status, strict=True)
    on_streams([functools.partial(e.sum, x, x.clone(), s) for e, x, s in rows])
    graphs = []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            them[rank].sum(xs[rank], xs[rank], status[rank])
        graphs.append(graph)
    for call in range(3):
        for rank in range(2):
            xs[rank].copy_(values(rank, case[2], case[1], call))
        on_streams([graph.replay for graph in graphs])
        assert all(same(x, expected(case, 2, call)) for x in xs), call
    assert not torch.cat(status).any()
    assert not late.any()


@pytest.mark.gpu
def test_a_stream_that_does_not_come() -> None:
    them, late = begun(CASES[0], 2, 0.2)
    x, status = values(0, 4096, "bfloat16", 0).cuda(), words(2)
    for _ in range(2):
        them[0].sum(x, torch.empty_like(x), status)
    assert late.tolist() == [2]
    assert status.tolist()[-1] == 2


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
