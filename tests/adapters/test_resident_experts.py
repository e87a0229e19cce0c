"""Experts whose exchanges never wait for the host: ranks as threads, and interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tightwire as tw

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from expert_layers import TOKENS, WIDTH, Expert, dense, tokens  # noqa: E402
from resident_ranks import Alone, by_ends, run_ranks  # noqa: E402
from tightwire.adapters.training import moe, resident_experts  # noqa: E402
from tightwire.adapters.transports import threads  # noqa: E402


def prepared(memory: Any, **options: Any) -> moe.ResidentExperts:
    given: dict[str, Any] = {"experts": 6, "tokens": max(TOKENS), "top_k": 2, "hidden": WIDTH}
    return moe.ResidentExperts(memory, **given | options)


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels interpreted; the ranks run one at a time."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    monkeypatch.setattr(resident_experts, "has_kernels", lambda x: True)


@pytest.mark.parametrize("top_k", [2, 1, 3])
@pytest.mark.parametrize("ranks", [2, 1, 3, 4])
def test_a_layer_is_that_of_one_process(ranks: int, top_k: int) -> None:
    """Tokens, logits and experts get its gradients; one expert has no tokens, one rank neither."""
    count = 2 * ranks if ranks > 1 else 3
    experts = [Expert(i) for i in range(count)]
    wanted = []
    for rank in range(ranks):
        x, logits = tokens(rank, count, torch.float32)
        y = dense(x, logits, experts, top_k)
        y.square().sum().backward()
        wanted.append((y.detach(), x.grad, logits.grad))

    def task(memory: Any) -> Any:
        parallel = prepared(memory, experts=count, top_k=top_k, dtype=torch.float32)
        own = [Expert(i) for i in parallel.local_experts]
        x, logits = tokens(memory.rank, count, torch.float32)
        came = parallel.dispatch(x, moe.route(logits, top_k))
        y = parallel.combine(by_ends(own, came.rows, came.ends), came)
        y.square().sum().backward()
        parallel.check()
        return y.detach(), x.grad, logits.grad, [p.grad for e in own for p in e.parameters()]

    each = count // ranks
    for rank, found in enumerate(run_ranks(ranks, task)):
        for a, b in zip(found[:3], wanted[rank], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        own = [p for e in experts[rank * each : (rank + 1) * each] for p in e.parameters()]
        for gradient, p in zip(found[3], own, strict=True):
            torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [2, 1, 4])
def test_bits_are_those_of_expert_parallel(ranks: int, dtype: Any) -> None:
    count = 2 * ranks

    def trained(parallel: Any, rank: int) -> Any:
        x, logits = tokens(rank, count, dtype)
        came = parallel.dispatch(x, moe.route(logits, 2))
        rows = came.rows * 1.5
        rows.retain_grad()
        y = parallel.combine(rows, came)
        y.square().sum().backward()
        return came.rows.detach(), y.detach(), rows.grad, x.grad, logits.grad

    def there(transport: Any) -> Any:
        comm = tw.Communicator(transport, "raw", algorithm="native")
        return trained(moe.ExpertParallel(comm, experts=count), transport.rank)

    def here(memory: Any) -> Any:
        return trained(prepared(memory, experts=count, dtype=dtype), memory.rank)

    for wanted, found in zip(threads.run_ranks(ranks, there), run_ranks(ranks, here), strict=True):
        for k in (0, 2):
            # What is behind the last row is zeros.
            n = wanted[k].shape[0]
            assert torch.equal(found[k][:n], wanted[k])
            assert not found[k][n:].any()
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(found[3], wanted[3])
        # A sum in another order.
        torch.testing.assert_close(found[4], wanted[4], rtol=2e-2, atol=2e-2)


def everything(memory: Any, codec: Any, hidden: int, dtype: Any, **options: Any) -> list[Any]:
    """Two steps of rank `memory.rank`: all results, bit by bit, and what `check` says."""
    experts, top_k = options.pop("experts"), options.get("top_k", 2)
    count = (7, 0, 3, 5)[memory.rank]
    generator = torch.Generator().manual_seed(memory.rank)
    x = torch.randn(count, hidden, generator=generator).to(dtype).requires_grad_()
    logits = torch.randn(count, experts, generator=generator, requires_grad=True)
    given = {"experts": experts, "hidden": hidden, "dtype": dtype, "tokens": 9} | options
    parallel = prepared(memory, forward=codec, backward=codec, **given)
    found: list[Any] = []
    for _ in range(2):
        came = parallel.dispatch(x, moe.route(logits, top_k))
        rows = came.rows * 1.5
        rows.retain_grad()
        y = parallel.combine(rows, came)
        (y.float().square().sum() + y.sum()).backward()
        said = ""
        try:
            parallel.check()
        except tw.CollectiveError as error:
            said = error.detail
        found += [
            came.rows.detach(),
            *came.layout,
            y.detach(),
            rows.grad,
            x.grad,
            logits.grad,
            said,
        ]
        x.grad = logits.grad = None
    return found


#: Ranks, codec, hidden, dtype, and what else is prepared.
CASES = [
    (2, "raw", 48, torch.bfloat16, {"experts": 6}),
    (3, "mx", 64, torch.bfloat16, {"experts": 6, "capacity": 6}),
    (1, "raw", 48, torch.bfloat16, {"experts": 5}),
    (2, "raw", 33, torch.float32, {"experts": 6}),
    (4, "raw", 2080, torch.float16, {"experts": 8, "top_k": 3}),
    (2, "mx", 40, torch.float16, {"experts": 2, "top_k": 1}),
    (2, "nvfp4", 96, torch.float16, {"experts": 6}),
    (4, "taco", 256, torch.bfloat16, {"experts": 4}),
]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_give_the_same_bits(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch and the public functions, in memory full of other bytes."""
    ranks, codec, hidden, dtype, options = case

    def task(memory: Any) -> list[Any]:
        return everything(memory, codec, hidden, dtype, **options)

    wanted = run_ranks(ranks, task)
    use_kernels(monkeypatch)
    for mine, theirs in zip(run_ranks(ranks, task), wanted, strict=True):
        assert len(mine) == len(theirs) == 20
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if k % 10 == 9:
                assert a == b
                assert ("exceed the capacity" in a) == ("capacity" in options)
            elif k % 10 == 8:
                # Dot products, in another order.
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
            else:
                assert torch.equal(a, b), f"result {k}"


def test_two_layers_share_memory() -> None:
    """Any order of exchanges is right: each takes the other half."""

    def task(memory: Any) -> bool:
        parallel = prepared(memory, experts=4, dtype=torch.float32)
        fine = True
        for step in range(3):
            x, logits = tokens(memory.rank, 4, torch.float32)
            a = parallel.dispatch(x, moe.route(logits, 2))
            b = parallel.dispatch(2 * x, moe.route(-logits, 2))
            y, z = parallel.combine(a.rows * 1, a), parallel.combine(b.rows * 1, b)
            fine &= torch.allclose(y, x, atol=1e-5) and torch.allclose(z, 2 * x, atol=1e-5)
            (y.sum() + z.sum()).backward()
            fine &= torch.allclose(x.grad, torch.full_like(x, 3.0), atol=1e-5)
            if step == 1:
                # An odd number of them.
                parallel.dispatch(x, moe.route(logits, 2))
        parallel.check()
        return fine

    assert run_ranks(2, task) == [True, True]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("what", ["range", "weights", "capacity"])
def test_what_is_wrong_names_ranks(
    what: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks; nothing is read that is not there, and the next call is fine."""
    if kernels:
        use_kernels(monkeypatch)

    def task(memory: Any) -> Any:
        parallel = prepared(memory, experts=4, tokens=6, hidden=32, dtype=torch.float32, capacity=9)
        x = torch.ones(6, 32) + memory.rank
        numbers = torch.tensor([[0, 2], [1, 3], [0, 3], [1, 2], [0, 2], [1, 3]])[:4]
        x, weights = x[:4], torch.full((4, 2), 0.5)
        if memory.rank == 1 and what == "range":
            numbers[0, 1], numbers[2, 0], numbers[3, 1] = -1, 4, 1 << 62
        if memory.rank == 1 and what == "weights":
            weights[1, 1] = torch.nan
        if what == "capacity":
            numbers[:, 0] = memory.rank % 2
            numbers[:, 1] = 1 - memory.rank % 2
        came = parallel.dispatch(x, (numbers, weights))
        y = parallel.combine(came.rows, came)
        with pytest.raises(tw.CollectiveError) as caught:
            parallel.check()
        parallel.check()
        fine = torch.tensor([[0, 2], [1, 3], [0, 3], [1, 2]])
        came = parallel.dispatch(x, (fine, torch.full((4, 2), 0.5)))
        assert torch.equal(parallel.combine(came.rows, came), x)
        parallel.check()
        return caught.value, y, x

    found = run_ranks(2, task)
    texts = {
        "range": "on ranks [1] numbers of experts are out of range",
        "weights": "on ranks [1] router weights are not all finite",
        "capacity": "on ranks [0] rows exceed the capacity",
    }
    for rank, (error, y, x) in enumerate(found):
        assert (error.rank, error.detail) == (rank, texts[what])
        if rank == 0 and what != "capacity":
            assert torch.equal(y, x)
    y, x = found[1][1:]
    if what == "range":
        # A copy that went nowhere counts as zeros.
        halves = torch.tensor([0.5, 1.0, 0.5, 0.5])[:, None]
        assert torch.equal(y, halves * x)
    if what == "weights":
        assert y[1].isnan().all()
        assert torch.equal(y[[0, 2, 3]], x[[0, 2, 3]])


def test_damaged_rows_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that no encoder writes; in a dispatch, and in a combine."""
    use_kernels(monkeypatch)
    memory = Alone(1)
    parallel = prepared(memory, experts=2, tokens=2, hidden=512, forward="taco")
    kernels: Any = parallel._exchanges
    at, half = (kernels._memory[k] for k in (3, 2))

    def damage(part: Any) -> None:
        for begin in (at, half + at):
            part[begin : begin + 8] = 0xFF

    x, routing = torch.ones(2, 512).bfloat16(), (torch.zeros(2, 2).long(), torch.ones(2, 2))
    came = parallel.dispatch(x, routing)
    parallel.check()
    memory.damage = damage
    parallel.dispatch(x, routing)
    with pytest.raises(tw.CollectiveError, match="rows that this rank has read are damaged"):
        parallel.check()
    parallel.combine(came.rows, came)
    with pytest.raises(tw.CollectiveError, match="rows that this rank has read are damaged"):
        parallel.check()


@pytest.mark.parametrize("seed", range(3))
def test_damaged_numbers_read_nothing_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ranks have told, places are those of rows that there are."""
    use_kernels(monkeypatch)
    generator = torch.Generator().manual_seed(seed)

    def damage(part: Any) -> None:
        noise = torch.randint(0, 256, part.shape, generator=generator, dtype=torch.uint8)
        if seed:
            # Small numbers, which are taken for counts.
            noise.view(torch.int64)[:] %= 5 * seed
        part.copy_(noise)

    memory = Alone(3)
    parallel = prepared(memory, experts=6, tokens=5, hidden=32, capacity=11)
    x, routing = torch.ones(5, 32).bfloat16(), (torch.zeros(5, 2).long(), torch.ones(5, 2))
    memory.damage = damage
    came = parallel.dispatch(x, routing)
    for places, rows in ((came.layout.sources, 5), (came.layout.targets, 11)):
        there = places[places >= 0]
        assert ((there >> 32) < 3).all()
        assert ((there & 0xFFFFFFFF) < rows).all()
    assert ((came.ends >= 0) & (came.ends <= 11)).all()
    parallel.combine(came.rows, came)
    with pytest.raises(tw.CollectiveError):
        parallel.check()


def test_ranks_that_differ_say_so() -> None:
    def task(memory: Any) -> str:
        with pytest.raises(tw.CollectiveError) as caught:
            prepared(memory, tokens=5 + memory.rank)
        return str(caught.value)

    found = run_ranks(2, task)
    assert "stage 'agree': ranks [1] prepare something else; here: 6 experts, 5 tokens" in found[0]
    assert "ranks [0] prepare" in found[1]


def test_a_late_rank_ends_the_object() -> None:
    def task(memory: Any) -> str:
        parallel = prepared(memory, tokens=4, dtype=torch.float32)
        if memory.rank:
            return ""
        x, routing = torch.ones(4, WIDTH), (torch.zeros(4, 2).long(), torch.ones(4, 2))
        with pytest.raises(tw.CollectiveError) as caught:
            parallel.dispatch(x, routing)
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            parallel.dispatch(x, routing)
        return str(caught.value)

    assert "did not come within 0.2 s" in run_ranks(2, task, timeout=0.2)[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"experts": 0}, "experts is 0"),
        ({"experts": 510}, "experts is 510"),
        ({"tokens": 0}, "tokens is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"hidden": 0}, "hidden is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        ({"forward": "zipccl"}, "forward is Zipccl"),
        ({"backward": tw.codec("taco", rounding="stochastic")}, "rounded to nearest"),
        ({"tokens": 1 << 30, "capacity": 5}, "fewer copies"),
    ],
    ids=str,
)
def test_what_cannot_be_prepared(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prepared(Alone(1), **options)


def test_arguments_that_do_not_fit() -> None:
    parallel = prepared(Alone(1), tokens=4, hidden=32)
    x, numbers = torch.zeros(4, 32).bfloat16(), torch.zeros(4, 2, dtype=torch.int64)
    weights = torch.ones(4, 2)
    wrong: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (x, numbers.int(), weights, TypeError, "experts are torch.int32"),
        (x, numbers, numbers, TypeError, "weights torch.int64"),
        ("x", numbers, weights, TypeError, "x, experts and weights are str"),
        (x.float(), numbers, weights, ValueError, "x has shape"),
        (torch.zeros(5, 32).bfloat16(), numbers, weights, ValueError, "up to 4, 32"),
        (x[:3], numbers, weights, ValueError, "needed: .3, 2. twice"),
        (x, numbers.to("meta"), weights, ValueError, "experts on meta"),
    ]
    for a, b, c, kind, text in wrong:
        with pytest.raises(kind, match=text):
            parallel.dispatch(a, (b, c))
    came = parallel.dispatch(x.requires_grad_(), (numbers, weights))
    with pytest.raises(TypeError, match="y is a list"):
        parallel.combine([], came)
    with pytest.raises(ValueError, match="y has shape"):
        parallel.combine(came.rows[:2], came)
    with pytest.raises(ValueError, match="does not depend"):
        parallel.combine(torch.zeros_like(came.rows), came)
    with pytest.raises(ValueError, match="device is cpu"):
        moe.connect_resident(2, tokens=1, top_k=1, hidden=1, device="cpu")


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Names of PyTorch's operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("codec", "more"), [("raw", 0), ("mx", 0), ("taco", 0), ("nvfp4", 1)])
def test_as_many_launches_for_any_number_of_ranks(
    codec: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of kernels, barriers among them, and nothing of PyTorch's but new memory."""
    use_kernels(monkeypatch)
    from tightwire.codecs.common.launch_triton import Variant

    kernels: list[str] = []
    note = lambda self, *args, **options: kernels.append(self.kernel.__name__)  # noqa: E731
    monkeypatch.setattr(Variant, "launch", note)

    def counted(memory: Alone, call: Callable[[], Any]) -> tuple[Any, int, list[str]]:
        kernels.clear()
        before = memory.barriers
        with Operations() as operations:
            found = call()
        return found, len(kernels) + memory.barriers - before, operations.names

    def launched(ranks: int) -> Any:
        memory = Alone(ranks)
        options: dict[str, Any] = {"experts": 2 * ranks, "tokens": 8, "hidden": 512}
        parallel = prepared(memory, forward=codec, backward=codec, **options)
        x = torch.zeros(8, 512, dtype=torch.bfloat16).requires_grad_()
        weights = torch.full((8, 2), 0.5, requires_grad=True)
        routing = torch.zeros(8, 2, dtype=torch.int64), weights
        came, there, first = counted(memory, lambda: parallel.dispatch(x, routing))
        y, back, second = counted(memory, lambda: parallel.combine(came.rows, came))
        gradient = torch.ones_like(y)
        _, backward, third = counted(memory, lambda: y.backward(gradient))
        assert not {name for name in first + second if "copy" in name or "index" in name}
        return (there, back, backward), first, second, third

    everywhere = [launched(ranks) for ranks in (4, 16, 64)]
    assert everywhere[0] == everywhere[1] == everywhere[2]
    # Of backward 5 for results and weights, and 3 for tokens.
    assert everywhere[0][0] == (6 + more, 3 + more, 8 + 2 * more)
