"""Encoded messages between the stages of a pipeline, and autograd through them, in one process."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest

import tightwire as tw
from tightwire.adapters.transports.threads import run_ranks

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from tightwire.adapters.training import pipeline  # noqa: E402


class Work:
    def __init__(self, group: Group, source: int, out: Any) -> None:
        self.group, self.source, self.out = group, source, out

    def wait(self) -> None:
        if self.source >= 0:
            queue = self.group.queues[self.source, self.group.number]
            if not queue:
                raise RuntimeError("Connection closed by peer")
            self.out.copy_(queue.popleft())


class Group:
    """One of two ranks that take turns in a thread: what is sent waits in a queue."""

    def __init__(self, number: int, queues: Any) -> None:
        self.number, self.queues = number, queues

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Any], to: int, tag: int) -> Work:
        self.queues[self.number, to].append(tensors[0].clone())
        return Work(self, -1, None)

    def recv(self, tensors: list[Any], source: int, tag: int) -> Work:
        tensors[0].fill_(171)
        return Work(self, source, tensors[0])


def pair(forward: Any, backward: Any) -> tuple[list[pipeline.Boundary], Any]:
    queues: Any = defaultdict(deque)
    boundaries = []
    for rank in range(2):
        group = Group(rank, queues)
        there = pipeline.Messages(forward, group, name="forward")
        boundaries.append(pipeline.Boundary(there, pipeline.Messages(backward, group)))
    return boundaries, queues


def tensor(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_crosses_the_boundary(dtype: Any) -> None:
    forward = tw.codec("tahquant")
    backward = tw.codec("tahquant", direction="backward")
    (first, last), _ = pair(forward, backward)
    x = tensor(5, 7, 96, dtype=dtype).requires_grad_()
    token = first.send(x * 2, to=1)
    y = last.receive((5, 7, 96), dtype, source=0)
    assert torch.equal(y, tw.decode(forward.encode(x.detach() * 2)))
    weight = tensor(5, 7, 96, dtype=dtype) * 0.01
    (y * weight).sum().backward()
    (token + 1.5).backward()
    assert torch.equal(x.grad, tw.decode(backward.encode(weight)) * 2)
    for boundary, bits in ((first, 6.0), (last, 8.0)):
        boundary.flush()
        # Rows of 96 are two tiles of 64 forward, and three of 32 backward.
        assert boundary.wire_bytes < bits / 8 / x.element_size() * boundary.raw_bytes + 1024
        assert boundary.raw_bytes == x.numel() * x.element_size()


def test_nothing_is_encoded_where_it_does_not_pay_or_may_not() -> None:
    (first, last), queues = pair(tw.codec("mx"), None)
    for x in (torch.arange(500), tensor(3), tensor(0, 4), tensor(40, 40).double()):
        first.forward.isend(x, 1).wait()
        assert queues[0, 1][0].dtype == x.dtype
        out = torch.full_like(x, 7)
        message = last.forward.irecv(out, 0)
        message.wait()
        message.wait()
        assert torch.equal(out, x)
    last.backward.isend(tensor(64, 64), 0)
    assert queues[1, 0][0].dtype == torch.float32
    assert last.raw_bytes == last.wire_bytes == 64 * 64 * 4


def test_without_gradients_nothing_is_recorded() -> None:
    (first, last), _ = pair(None, None)
    with torch.no_grad():
        first.send(tensor(4, 4), 1)
        assert not last.receive((4, 4), torch.float32, 0).requires_grad


@pytest.mark.parametrize("codec", [None, "mx"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)])
def test_backward_in_any_order_finds_the_activation(order: Any, codec: Any) -> None:
    codec = codec and tw.codec(codec)
    (first, last), _ = pair(codec, codec)
    xs = [torch.ones(40 + n, 64, requires_grad=True) for n in range(3)]
    for _ in range(2):
        tokens = [first.send(x, 1) for x in xs]
        ys = [last.receive(x.shape, x.dtype, 0) for x in xs]
        for number in order:
            (ys[number] * 2.0**number).sum().backward()
        sum(tokens).backward()
        for number, x in enumerate(xs):
            assert torch.equal(x.grad, torch.full_like(x, 2.0**number))
            x.grad = None


@pytest.mark.parametrize("why", ["frozen", "no_grad"])
def test_a_gradient_that_nobody_wants_is_not_sent(why: str) -> None:
    (first, last), queues = pair(None, None)
    x = torch.ones(4, 4, requires_grad=True)
    with torch.set_grad_enabled(why != "no_grad"):
        assert not first.send(x.detach() if why == "frozen" else x, 1).requires_grad
    y = last.receive((4, 4), x.dtype, 0)
    y.sum().backward()
    assert not queues[1, 0]
    token = first.send(x, 1)
    (last.receive((4, 4), x.dtype, 0) * 3).sum().backward()
    token.backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_gradients_of_what_has_no_backward_any_more_are_dropped() -> None:
    (first, last), queues = pair(None, None)
    x = torch.ones(4, 4, requires_grad=True)
    tokens = [first.send(x, 1) for _ in range(2)]
    for scale in (2, 3):
        (last.receive((4, 4), x.dtype, 0) * scale).sum().backward()
    del tokens[0]
    tokens[0].backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert not queues[1, 0]


def test_gradients_of_two_backwards_add_up() -> None:
    (first, last), _ = pair(None, None)
    xs = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]
    tokens = [first.send(x, 1) for x in xs]
    ys = [last.receive((4, 4), x.dtype, 0).sum() for x in xs]
    for scale in (2, 3):
        (ys[1] * scale).backward(retain_graph=True)
    ys[0].backward()
    tokens[0].backward()
    for _ in range(2):
        tokens[1].backward(retain_graph=True)
    for x, wanted in zip(xs, (1.0, 5.0), strict=True):
        assert torch.equal(x.grad, torch.full_like(x, wanted))


@pytest.mark.parametrize("codec", [None, "mx"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 128), torch.float32), ((64, 32), torch.float32), ((64, 64), torch.bfloat16)],
)
def test_another_shape_or_dtype_is_named_and_the_next_is_right(
    shape: Any, dtype: Any, codec: Any
) -> None:
    (first, last), _ = pair(codec and tw.codec(codec), None)
    for _ in range(2):
        first.send(torch.ones(64, 64), 1)
    with pytest.raises(tw.CollectiveError) as caught:
        last.receive(shape, dtype, 0)
    assert str(caught.value) == (
        "rank 1: recv #0 failed in stage 'agree': forward from rank 0: message 0 is torch.float32 "
        f"of shape (64, 64); receive was called for {dtype} of shape {shape}"
    )
    assert torch.equal(last.receive((64, 64), torch.float32, 0), torch.ones(64, 64))


def test_messages_that_are_not_in_turn_are_errors() -> None:
    (first, last), _ = pair(None, None)
    x = torch.ones(4, 4, requires_grad=True)
    for _ in range(2):
        first.send(x, 1)
    last.receive((4, 4), x.dtype, 0)
    last.receive((4, 4), x.dtype, 0).sum().backward()
    # Another boundary of the same group, which has sent less.
    other = pipeline.Boundary(first.forward, first.backward)
    with pytest.raises(tw.CollectiveError, match=r"rank 0: recv #0 .*from rank 1: a gradient of "):
        other.send(x, 1).backward()
    with pytest.raises(tw.CollectiveError, match=r"rank 1: recv #2 .*message 0 came, 2 is next"):
        last.receive((4, 4), x.dtype, 0)


def test_what_headers_do_not_describe_is_refused() -> None:
    (first, _), queues = pair(None, None)
    with pytest.raises(ValueError, match=r"x has 33 dimensions; allowed: at most 32"):
        first.send(torch.ones([1] * 33), 1)
    assert not queues[0, 1]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.float64]
)
def test_activations_of_any_dtype(dtype: Any) -> None:
    (first, last), _ = pair(tw.codec("mx"), None)
    x = torch.arange(200).view(50, 4).to(dtype)
    first.send(x, 1)
    assert torch.equal(last.receive((50, 4), dtype, 0).view(torch.uint8), x.view(torch.uint8))


def test_messages_within_a_node_are_as_they_are() -> None:
    class OfFour(Group):
        def size(self) -> int:
            return 4

    queues: Any = defaultdict(deque)
    ranks = [pipeline.Messages(tw.codec("mx"), OfFour(r, queues), node=2) for r in range(4)]
    x = tensor(64, 64)
    for source, to in ((0, 1), (1, 0), (1, 2), (2, 3), (3, 0)):
        near = source // 2 == to // 2
        before = ranks[source].raw_bytes, ranks[source].wire_bytes
        ranks[source].isend(x, to).wait()
        sent = ranks[source].raw_bytes - before[0], ranks[source].wire_bytes - before[1]
        assert (queues[source, to][0].dtype == torch.float32) == near
        out = torch.zeros_like(x)
        ranks[to].irecv(out, source).wait()
        assert torch.equal(out, x) == near
        assert torch.equal(out, x if near else tw.decode(tw.codec("mx").encode(x)))
        # Counted is what leaves a node.
        assert sent == ((0, 0) if near else (4 * 4096, ranks[to].memory_for(x, source).numel()))
    with pytest.raises(ValueError, match=r"node is 3; rank 1 is in a group of 4 ranks, messages"):
        pipeline.Messages(None, OfFour(1, queues), node=3)


def test_random_rounding_differs_from_message_to_message() -> None:
    (first, _), queues = pair(tw.codec("thc"), None)
    for _ in range(2):
        first.forward.isend(tensor(64, 64), 1)
    one, other = queues[0, 1]
    assert not torch.equal(one, other)


def test_damage_and_peers_that_are_gone_name_the_rank() -> None:
    (first, last), queues = pair(tw.codec("mx"), tw.codec("mx"))
    out = torch.zeros(64, 64)
    first.forward.isend(tensor(64, 64), 1)
    queues[0, 1][0][2000] ^= 1
    with pytest.raises(tw.CollectiveError, match=r"stage 'decode': forward from rank 0") as caught:
        last.forward.irecv(out, 0).wait()
    assert isinstance(caught.value.__cause__, tw.FormatError)
    with pytest.raises(tw.CollectiveError, match=r"recv #\d.*from rank 0: Connection closed"):
        last.forward.irecv(out, 0).wait()


@pytest.mark.parametrize("codec", ["zipccl", "huffman", "delta", "lhc", "omnireduce"])
def test_codecs_whose_sizes_the_receiver_does_not_know_are_refused(codec: str) -> None:
    with pytest.raises(ValueError, match=f"codec is {codec!r}; allowed: .*'tahquant'"):
        pair(tw.codec(codec), None)


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_send_in_a_ring_do_not_deadlock(codec: str, ranks: int) -> None:
    def task(transport: Any) -> None:
        comm = tw.Communicator(transport, codec)
        for step in (1, ranks - 1):
            x, out = tensor(100, 10 + comm.rank), torch.zeros(100, 10 + (comm.rank - step) % ranks)
            found = comm.sendrecv(x, (comm.rank + step) % ranks, out, (comm.rank - step) % ranks)
            assert found is out
            wanted = tensor(*out.shape)
            if codec != "zipccl":
                wanted = tw.decode(tw.codec(codec).encode(wanted.flatten())).view(out.shape)
            assert torch.equal(out, wanted)
        with pytest.raises(ValueError, match="out may overlap x"):
            comm.sendrecv(x, (comm.rank + 1) % ranks, x, (comm.rank - 1) % ranks)

    run_ranks(ranks, task)
