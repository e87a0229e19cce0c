"""PyTorch's default device is the user's: what the library makes is where it belongs.

Where there is no GPU the default is "meta", whose tensors have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from prepared_ranks import ROUTES, run

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tightwire.adapters.collectives.prepared import PreparedCalls  # noqa: E402

N = 700


@pytest.fixture(params=["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are, in calls with another default device."""
    if request.param == "meta" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    with torch.device(request.param):
        yield "cpu" if request.param == "meta" else "cuda"


def values(place: str, n: int = N) -> Any:
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    return torch.from_numpy(x).to(place)


def same(x: Any, y: Any) -> bool:
    return x.device == y.device and bool(torch.equal(x.cpu(), y.cpu()))


@pytest.mark.parametrize("backend", ["ref", "cpu", "triton"])
@pytest.mark.parametrize("name", tw.list_codecs())
def test_tensors_come_back(name: str, backend: str, place: str) -> None:
    if backend != "triton" and place == "cuda":
        pytest.skip("of tensors on the host")
    codec = tw.codec(name, **({"hidden": 50} if name == "tahquant" else {}))
    x, options = values(place), {"base": values(place) + 1} if name == "delta" else {}
    key = tw.Key(1) if codec.spec.draws else None
    buf = codec.encode(x, backend=backend, key=key, **options)
    found = tw.decode(buf, backend=backend, **options)
    on_host = {name: v.cpu() for name, v in options.items()}
    expected = codec.encode(x.cpu(), backend="ref", key=key, **on_host)
    assert bytes(buf) == bytes(expected)
    assert found.device == x.device
    if codec.lossless:
        assert same(found, x)
    if name == "delta":
        return
    buffers = codec.encode_many([x, x[:300]], key=key, backend=backend)
    assert same(tw.decode_many(buffers, backend=backend)[0], found)
    assert tw.decode_sum([buf, x], backend=backend).device == x.device


def test_batches_of_nothing(place: str) -> None:
    assert tw.codec("mx").encode_many([]) == []


@pytest.mark.parametrize("route", ROUTES)
def test_prepared_calls(route: str) -> None:
    def gathers(calls: PreparedCalls) -> Any:
        x = torch.full((N,), calls.rank + 1.0, dtype=torch.bfloat16)
        out, total = torch.zeros(2 * N, dtype=torch.bfloat16), torch.zeros_like(x)
        # The default device is a thread's own.
        with torch.device("meta"):
            gather, reduce = calls.all_gather(x), calls.all_reduce(x)
            for _ in range(2):
                gather(x, out).wait()
                reduce(x, total).wait()
        return out.tolist(), total.tolist()

    for out, total in run(2, route, gathers):
        assert out == [1.0] * N + [2.0] * N
        assert total == [3.0] * N
