"""What autograd knows of tensors that are decoded into: as much as of those of `Tensor.copy_`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tightwire as tw

torch = pytest.importorskip("torch")

N = 3000
CODEC = tw.codec("zipccl")


def source() -> tw.Buffer:
    return CODEC.encode(torch.linspace(-1, 1, N))


def through_the_operator(x: Any) -> None:
    from tightwire import torch_ops

    torch_ops.decode_into(source().array.to(x.device), x, "zipccl")


WRITES: dict[str, Callable[[Any], Any]] = {
    "decode": lambda x: tw.decode(source(), out=x),
    "decode of bytes": lambda x: tw.decode(bytes(source()), out=x),
    "decode by a codec": lambda x: CODEC.decode(source(), out=x),
    "decode of a part": lambda x: tw.decode(source(), out=x[:100], start=7, stop=107),
    "decode_add": lambda x: CODEC.decode_add(source(), x),
    "encode": lambda x: CODEC.encode(torch.ones(N, device=x.device), out=x.view(torch.uint8)),
    "operator": through_the_operator,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors are."""
    return str(request.param)


@pytest.mark.parametrize("write", WRITES)
def test_a_backward_pass_that_needs_what_was_overwritten_raises(write: str, device: str) -> None:
    x = torch.full((2 * N if write == "encode" else N,), 2.0, device=device)
    w = torch.ones_like(x, requires_grad=True)
    product = (w * x).sum()
    WRITES[write](x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("write", WRITES)
def test_views_share_the_version_counter(write: str, device: str) -> None:
    base = torch.zeros(3, 2 * N, device=device)
    before = base._version
    WRITES[write](base[1] if write == "encode" else base[1, :N])
    assert base._version > before


@pytest.mark.parametrize("write", [name for name in WRITES if name != "encode"])
def test_what_requires_grad_is_refused(write: str, device: str) -> None:
    """Views and inner tensors as well: `copy_` would become a part of their graph."""
    leaf = torch.zeros(N, requires_grad=True, device=device)
    for x in (leaf, leaf[:], leaf * 1):
        with pytest.raises(ValueError, match=r"(out|acc) requires grad.* Allowed"):
            WRITES[write](x)
        assert not x.detach().any()
    with torch.no_grad():
        WRITES[write](leaf.detach() if write == "operator" else leaf)
    assert leaf.detach().any()


def test_inference_mode(device: str) -> None:
    """Inference tensors have no counter; normal ones keep theirs."""
    leaf = torch.zeros(N, requires_grad=True, device=device)
    with torch.inference_mode():
        x = torch.zeros(N, device=device)
        tw.decode(source(), out=x)
        tw.decode(source(), out=leaf)
    assert x.is_inference()
    assert leaf._version == 1
    tw.decode(bytes(CODEC.encode(torch.ones(N))), out=x)
    assert x.eq(1).all()
    assert torch.equal(leaf.detach().cpu(), torch.linspace(-1, 1, N))


def test_a_refused_call_leaves_the_counter_alone() -> None:
    x = torch.zeros(N)
    for bad in (x[:-1], x.double()):
        with pytest.raises(ValueError, match="needed"):
            tw.decode(source(), out=bad)
    with pytest.raises(tw.FormatError):
        tw.decode(b"no buffer", out=x)
    assert x._version == 0
