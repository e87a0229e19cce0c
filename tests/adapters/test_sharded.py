"""Weight differences and sums in two levels, against results by hand: this file is also a rank."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from processes import join, launch
from tightwire.adapters.collectives.calls import rounding_key
from tightwire.adapters.errors import CollectiveError
from tightwire.adapters.training import sharded
from tightwire.adapters.training.sharded import WeightDifferences
from tightwire.adapters.transports.threads import ThreadTransport, run_grid, run_ranks
from tightwire.arrays import Target, from_bits
from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]

RANKS, NELEM = 3, 2 * 1237
WEIGHTS = tw.codec("sdp4bit", bits=4, group=2048, rotate="none")
#: The largest relative error of rounding to a dtype; of float32 the difference is rounded too.
HALF_ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def shards(dtype: str, steps: int = 5, size: int = NELEM) -> list[list[Array]]:
    """Of each step the shards of all ranks: weights that move a little."""
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, (RANKS, size)).astype(np.float32)
    found = []
    for _ in range(steps):
        found.append([row.astype(BY_NAME[dtype].numpy) for row in weights])
        weights = weights + rng.normal(0, 1e-3, weights.shape).astype(np.float32)
    return found


def as_array(x: Array, library: str) -> Any:
    name = "bfloat16" if x.dtype == BY_NAME["bfloat16"].numpy else x.dtype.name
    dtype = BY_NAME[name]
    return from_bits(x.reshape(-1).view(dtype.bits), dtype, x.shape, Target(library))


def bits(x: Any) -> bytes:
    return np.asarray(tw.decode(bytes(tw.encode(x, "raw")))).tobytes()


def advanced(replica: Array, now: list[Array]) -> Array:
    """The replica after a gather of differences, by the page."""
    total = replica.astype(np.float32)
    rows = total.reshape(len(now), -1)
    for row, shard in zip(rows, now, strict=True):
        difference = shard.reshape(-1).astype(np.float32) - row
        row += tw.decode(bytes(WEIGHTS.encode(difference)))
    return total.astype(replica.dtype)


@pytest.mark.parametrize(
    ("dtype", "library"), [("float32", "numpy"), ("bfloat16", "torch"), ("float16", "numpy")]
)
def test_replicas_follow_the_weights(dtype: str, library: str) -> None:
    """Bit for bit what the page says, on all ranks; errors do not add up; inputs stay."""
    if library == "torch":
        pytest.importorskip("torch")
    steps = shards(dtype)

    def task(transport: ThreadTransport) -> tuple[list[bytes], list[tuple[str, int, int]]]:
        gathers = WeightDifferences(tw.Communicator(transport))
        found: list[bytes] = []
        for now in steps:
            mine = now[transport.rank].reshape(2, -1)
            x, before = as_array(mine, library), mine.tobytes()
            out = as_array(np.full((2 * RANKS, NELEM // 2), 171, mine.dtype), library)
            # Memory of inference mode could not be written to later.
            torch: Any = sys.modules["torch"] if library == "torch" and not found else None
            with torch.inference_mode() if torch else contextlib.nullcontext():
                assert gathers.gather("w", x, out) is out
            found.append(bits(out))
            assert bits(x) == before
        # The result is no view of the replica.
        out[...] = 0
        again = gathers.gather("w", x)
        assert tuple(again.shape) == (2 * RANKS, NELEM // 2)
        found.append(bits(again))
        return found, [(r.reason, r.raw_bytes, r.wire_bytes) for r in gathers.trace()]

    ranks = run_ranks(RANKS, task)
    replica = np.concatenate(steps[0])
    wanted = [replica.tobytes()]
    errors = []
    for now in steps[1:]:
        true = np.concatenate(now).astype(np.float64)
        largest = np.abs(true - replica).max()
        replica = advanced(replica, now)
        wanted.append(replica.tobytes())
        errors.append(float(np.abs(replica - true).max()))
        rounding = np.abs(true).max() * HALF_ULP[dtype]
        assert errors[-1] <= 1.003 * largest / 14 + rounding
    # A step is N(0, 1e-3), of which a hundred million numbers have none beyond 6e-3.
    assert errors[-1] < 1e-3
    wanted.append(wanted[-1])
    raw = (RANKS - 1) * steps[0][0].nbytes
    for found, trace in ranks:
        assert found == wanted
        reasons = ["as they are", *["differences"] * 4, "nothing is sent"]
        assert [reason for reason, _, _ in trace] == reasons
        assert {nbytes for _, nbytes, _ in trace} == {raw}
        # What ranks agree on, a descriptor, codes, the scales of two groups.
        each = [24 + 48 + 1280 + 128] * 4
        assert [n // (RANKS - 1) for _, _, n in trace[1:]] == [*each, 24]


def test_replicas_that_differ_are_sent_anew() -> None:
    """Missing on one rank, another one, a NaN, a new shape: exact on all ranks, and said so."""
    steps = shards("float32", 9, 301)

    def task(transport: ThreadTransport) -> tuple[list[bytes], list[str]]:
        me, found = transport.rank, []
        gathers = WeightDifferences(tw.Communicator(transport))

        def gather(step: int) -> None:
            found.append(gathers.gather("w", steps[step][me]).tobytes())

        gather(0)
        gather(1)
        state = gathers.state_dict()
        gather(2)
        # All have the replica of step 1 again: step 2 gives the same bits.
        gathers = WeightDifferences(tw.Communicator(transport))
        gathers.load_state_dict(state)
        gather(2)
        # One rank has none; then one has an older one.
        if me == 1:
            gathers.reset()
        gather(3)
        if me == 2:
            gathers.load_state_dict(state)
        gather(4)
        gather(5)
        if me == 0:
            steps[6][0][5] = np.nan
        gather(6)
        gather(7)
        gathers.reset()
        gather(8)
        assert gathers.gather("w", steps[0][me][:9]).shape == (27,)
        return found, [r.reason for r in gathers.trace()]

    ranks = run_ranks(RANKS, task)
    steps[6][0][5] = np.nan
    wholes = [np.concatenate(now) for now in steps]
    first = advanced(wholes[0], steps[1])
    second = advanced(first, steps[2])
    wanted = [wholes[0], first, second, second, wholes[3], wholes[4], advanced(wholes[4], steps[5])]
    wanted += [wholes[6], wholes[7], wholes[8]]
    whole, less = "as they are", "differences"
    for found, reasons in ranks:
        assert found == [x.tobytes() for x in wanted]
        assert reasons == [less, whole, whole, less, whole, whole, whole, whole]


def test_replicas_are_for_as_many_ranks() -> None:
    """With other ranks they would be of other shards, in another order, and of the same size."""

    def save(transport: ThreadTransport) -> Any:
        gathers = WeightDifferences(tw.Communicator(transport))
        gathers.gather("w", np.arange(8, dtype=np.float32))
        return gathers.state_dict()

    def load(transport: ThreadTransport, state: Any) -> None:
        gathers = WeightDifferences(tw.Communicator(transport))
        with pytest.raises(ValueError, match="state is of 2 ranks; allowed: of 4 ranks, or none"):
            gathers.load_state_dict(state)
        with pytest.raises(ValueError, match="state says no world_size; allowed: of 4 ranks"):
            gathers.load_state_dict(state["replicas"])
        assert not gathers.state_dict()["replicas"]

    state = run_ranks(2, save)[0]
    run_ranks(4, lambda transport: load(transport, state))


def test_other_dtypes_are_sent_as_they_are() -> None:
    def task(transport: ThreadTransport) -> Any:
        gathers = WeightDifferences(tw.Communicator(transport))
        x = np.arange(5, dtype=np.int32) + transport.rank
        assert gathers.gather("w", x).tolist() == gathers.gather("w", x).tolist()
        empty = [gathers.gather("none", np.empty((0, 3), np.float32)).shape for _ in range(2)]
        scalar = [gathers.gather("one", np.float32(transport.rank)).tolist() for _ in range(2)]
        return (
            gathers.gather("w", x).tolist(),
            empty,
            scalar,
            list(gathers.state_dict()["replicas"]),
        )

    wanted = [0, 1, 2, 3, 4, 1, 2, 3, 4, 5], [(0, 3)] * 2, [[0.0, 1.0]] * 2, ["none", "one"]
    assert run_ranks(2, task) == [wanted] * 2


def test_what_ranks_gather_must_be_the_same() -> None:
    def task(transport: ThreadTransport) -> list[str]:
        found = []
        calls: list[tuple[str, int, str]] = [
            ("xyz"[transport.rank], 5, "float32"),
            ("w", 5 + transport.rank // 2, "float32"),
            ("w", 5, "float16" if transport.rank else "float32"),
        ]
        for name, n, dtype in calls:
            gathers = WeightDifferences(tw.Communicator(transport))
            with pytest.raises(CollectiveError, match="gather another name") as caught:
                gathers.gather(name, np.zeros(n, dtype))
            found.append(f"{caught.value.stage} {caught.value.detail.split(' gather')[0]}")
        with pytest.raises(ValueError, match="lossless"):
            WeightDifferences(tw.Communicator(transport, "mx"))
        return found

    found = run_ranks(3, task)
    assert found[0] == ["agree ranks [1, 2]", "agree ranks [2]", "agree ranks [1, 2]"]
    assert found[2] == ["agree ranks [0, 1]", "agree ranks [0, 1]", "agree ranks [0]"]


class Damaged(ThreadTransport):
    """Flips a bit of the last array that comes in an exchange, while `on` is true."""

    def __init__(self, inner: ThreadTransport) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.on = False

    def all_to_all_v(self, outs: Any, xs: Any) -> None:
        super().all_to_all_v(outs, xs)
        if self.on:
            outs[-1][-1][7] ^= 16

    def all_gather(self, out: Any, x: Any) -> None:
        super().all_gather(out, x)
        # Behind what ranks agree on, and descriptors.
        if self.on and out.size > 512:
            out.reshape(self.world_size, -1)[-1, 7] ^= 16


@pytest.mark.parametrize("damaged", [{1}, {0, 1, 2}])
def test_after_damage_a_replica_is_sent_anew(damaged: set[int]) -> None:
    """Damage of weights that go as they are, then of differences; ranks stay in step."""
    steps = shards("float32", 5, 301)

    def task(inner: ThreadTransport) -> tuple[list[bytes], list[str]]:
        transport, me = Damaged(inner), inner.rank
        gathers = WeightDifferences(tw.Communicator(transport, "raw"))
        found = []
        for step, now in enumerate(steps):
            transport.on = step in (0, 2) and me in damaged
            if transport.on:
                with pytest.raises(CollectiveError, match=r"gather #. failed in stage 'decode'"):
                    gathers.gather("w", now[me])
            else:
                found.append(gathers.gather("w", now[me]).tobytes())
        return found[-2:], [r.reason for r in gathers.trace()]

    whole = np.concatenate(steps[3])
    wanted = [whole.tobytes(), advanced(whole, steps[4]).tobytes()]
    reasons = [*["as they are"] * 2, "differences", "as they are", "differences"]
    assert run_ranks(RANKS, task) == [(wanted, reasons)] * RANKS


def two_levels(
    within: ThreadTransport,
    between: ThreadTransport,
    rounding: str = "nearest",
    seed: int = 0,
) -> tw.NodeCommunicator:
    """Eight bits within nodes, four between."""
    near, far = (
        tw.Communicator(transport, tw.codec("sdp4bit", bits=bits, rounding=rounding), seed=seed)
        for transport, bits in ((within, 8), (between, 4))
    )
    return tw.NodeCommunicator(near, far)


def gradients(ranks: int, shape: tuple[int, ...], dtype: str = "float32") -> list[Array]:
    """Normal values with outliers."""
    found = []
    for rank in range(ranks):
        rng = np.random.default_rng(100 + rank)
        x = rng.normal(0, 1e-3, shape) * np.where(rng.random(shape) < 0.01, 20, 1)
        found.append(x.astype(BY_NAME[dtype].numpy))
    return found


def by_hand(
    xs: list[Array], nodes: int, size: int, rounding: str = "nearest", call: int = 0
) -> Array:
    """The sums of all shares, one behind the other, encoded at both levels."""
    within = tw.codec("sdp4bit", bits=8, rounding=rounding)
    between = tw.codec("sdp4bit", bits=4, rounding=rounding)
    ranks, terms = nodes * size, []
    for rank, x in enumerate(xs):
        m, n = divmod(rank, size)
        key = rounding_key(2 * m + 1 << 32, call, 0, n, size)
        # What is for one rank of the node lies together.
        turned: Array = x.reshape(nodes, size, -1).swapaxes(0, 1).reshape(-1)
        if size > 1:
            buf = within.encode(turned, chunks=size, key=key)
            turned = np.asarray(tw.decode(bytes(buf)))
        term: Array = turned.astype(np.float32).reshape(size, nodes, -1)
        terms.append(term.swapaxes(0, 1).reshape(ranks, -1))
    shares = np.zeros_like(terms[0])
    for m in range(nodes):
        for n in range(size):
            total = np.full_like(shares[n::size], -0.0)
            for term in terms[m * size : (m + 1) * size]:
                total += term[n::size]
            key = rounding_key(2 * n + 2 << 32, call, 0, m, nodes)
            buf = between.encode(total.reshape(-1), chunks=nodes, key=key)
            shares[n::size] += np.asarray(tw.decode(bytes(buf))).reshape(nodes, -1)
    return shares


@pytest.mark.parametrize(
    ("nodes", "size", "dtype", "library", "rounding"),
    [
        (2, 2, "float32", "numpy", "stochastic"),
        (2, 3, "bfloat16", "torch", "nearest"),
        (3, 1, "float16", "numpy", "nearest"),
    ],
)
def test_sums_in_two_levels(nodes: int, size: int, dtype: str, library: str, rounding: str) -> None:
    """Bit for bit sums of what is decoded, where rank m * N + l owns that share."""
    if library == "torch":
        pytest.importorskip("torch")
    ranks = nodes * size
    xs = gradients(ranks, (2 * ranks, 151), dtype)

    def task(within: ThreadTransport, between: ThreadTransport) -> tuple[bytes, bytes]:
        levels = two_levels(within, between, rounding=rounding)
        assert levels.rank == between.rank * size + within.rank
        x = as_array(xs[levels.rank], library)
        out = as_array(np.full((2, 151), 171, np.float32), library)
        assert levels.reduce_scatter(x, out) is out
        narrow = levels.reduce_scatter(x)
        assert tuple(narrow.shape) == (2, 151)
        assert str(narrow.dtype).endswith(dtype)
        assert bits(x) == xs[levels.rank].tobytes()
        levels.check()
        return bits(out), bits(narrow)

    wide, narrow = (by_hand(xs, nodes, size, rounding, call) for call in range(2))
    for rank, found in enumerate(run_grid(nodes, size, task)):
        assert found[0] == wide[rank].tobytes()
        assert found[1] == narrow[rank].astype(xs[0].dtype).tobytes()


def test_errors_of_two_levels() -> None:
    """Near to one level in 4 bits, far from none in 8 bits; fewer bytes leave a node."""
    ranks, n = 4, 4 * 8001
    xs = gradients(ranks, (n,))
    true = np.sum(np.stack(xs), axis=0, dtype=np.float64).astype(np.float32)

    def task(within: ThreadTransport, between: ThreadTransport) -> tuple[Array, int]:
        levels = two_levels(within, between)
        share = levels.reduce_scatter(xs[levels.rank])
        return share, levels.trace()[-1].wire_bytes

    def one_level(width: int, transport: ThreadTransport) -> tuple[Array, int]:
        comm = tw.Communicator(transport, tw.codec("sdp4bit", bits=width))
        return comm.reduce_scatter(xs[comm.rank]), comm.trace()[-1].wire_bytes

    found = run_grid(2, 2, task)
    two = tw.error(true, np.concatenate([x for x, _ in found])).vnmse
    plain = {}
    for width in (4, 8):
        one = run_ranks(4, functools.partial(one_level, width))
        plain[width] = tw.error(true, np.concatenate([x for x, _ in one])).vnmse
        if width == 4:
            sent = one[0][1]
    assert plain[8] < 1e-4 < 5e-3 < plain[4] < 2e-2
    assert 0.8 * plain[4] < two < 1.2 * plain[4]
    # Of one level two thirds of what a rank sends go to the other node.
    assert found[0][1] < 0.52 * sent * 2 / 3


def test_all_ranks_get_the_same_sum() -> None:
    """All-reduce of an odd size with random rounding; bits are equal, errors small."""
    xs = gradients(4, (3, 1333), "bfloat16")
    true = np.sum([x.astype(np.float32) for x in xs], axis=0)

    def task(within: ThreadTransport, between: ThreadTransport) -> tuple[bytes, bytes, bytes]:
        levels = two_levels(within, between, rounding="stochastic", seed=7)
        x = xs[levels.rank]
        wide = levels.all_reduce(x.astype(np.float32))
        again = levels.all_reduce(x)
        assert again.dtype == x.dtype
        scalar = levels.all_reduce(np.float32(levels.rank))
        return wide.tobytes(), again.tobytes(), scalar.tobytes()

    found = run_grid(2, 2, task)
    assert len(set(found)) == 1
    wide = np.frombuffer(found[0][0], np.float32).reshape(true.shape)
    # Of terms and of the sum.
    assert tw.error(true, wide).vnmse < 8e-2
    # Another call draws other numbers.
    assert wide.astype(xs[0].dtype).tobytes() != found[0][1]
    assert abs(np.frombuffer(found[0][2], np.float32)[0] - 6) < 0.5


def test_a_rank_that_is_not_finite_makes_its_group_nan() -> None:
    xs = gradients(4, (4 * 300,))
    xs[3][130] = np.inf

    def task(within: ThreadTransport, between: ThreadTransport) -> Array:
        levels = two_levels(within, between)
        share: Array = levels.reduce_scatter(xs[levels.rank])
        return share

    lost = np.flatnonzero(np.isnan(np.concatenate(run_grid(2, 2, task))))
    assert lost.tolist() == list(range(128, 256))


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = inspect.cleandoc(sharded.__doc__ or "").splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in lines if line.startswith("    ")), names)
    assert capsys.readouterr().out == "(10000,)\n(5000,)\n"


def test_hooks_refuse_what_does_not_go_together() -> None:
    pytest.importorskip("torch.distributed.fsdp")
    from tightwire.adapters.training import fsdp

    with pytest.raises(ValueError, match="lossless"):
        fsdp.DifferenceGather(codec="mx")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"node": 0}, "node is 0; allowed"),
        ({"within": "mx"}, "within is 'mx', node None; needed"),
        ({"node": 2, "within": "lhc"}, "codec is 'lhc'"),
        ({"node": 2, "route": "network"}, "allowed with those: 'exact'"),
    ]
    for options, match in bad:
        with pytest.raises(ValueError, match=match):
            fsdp.compress(None, **options)


def train(device: Any) -> dict[str, Any]:
    """FSDP with both, on nodes of two ranks, against gathers and sums by hand."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tightwire.adapters.training import fsdp

    mesh = init_device_mesh(device.type, (4,))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(61, 127), torch.nn.ReLU(), torch.nn.Linear(127, 5))
    model.to(device)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    # Raw: zipccl would take a second of each process to load.
    near, far = (tw.codec("sdp4bit", bits=bits) for bits in (8, 4))
    hooks = fsdp.compress(
        model, weight_differences=True, node=2, within=near, gradients=far, codec="raw"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    x, y = torch.randn(64, 61).to(device), torch.randn(64, 5).to(device)
    mine = slice(16 * dist.get_rank(), 16 * (dist.get_rank() + 1))
    losses = []
    for _ in range(8):
        loss = (model(x[mine]) - y[mine]).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        losses.append((model(x[mine]) - y[mine]).square().mean().item())
    model[0].unshard()
    seen = [p.detach().clone() for p in model[0].parameters()]
    model[0].reshard()
    shards = [p.full_tensor().detach() for p in model[0].parameters()]
    return {
        "losses": losses,
        "off": max((a - b).abs().max().item() for a, b in zip(seen, shards, strict=True)),
        "seen": hashlib.sha256(b"".join(p.cpu().numpy().tobytes() for p in seen)).hexdigest(),
        "reasons": [record.reason for record in hooks.all_gather.trace()],
        "bytes": [[hook.raw_bytes, hook.wire_bytes] for hook in hooks],
        "sums": len(hooks.reduce_scatter.trace()),
    }


TASKS = {"train": train}


@pytest.mark.slow
def test_training_on_two_nodes(tmp_path: Path) -> None:
    """Real processes: the loss falls, weights are the same on all ranks and near to the true."""
    torch = pytest.importorskip("torch")
    if not hasattr(getattr(torch.distributed, "fsdp", None), "FSDPModule"):
        pytest.importorskip("torch.distributed.fsdp")
    check_training(launch(__file__, "train", 4, tmp_path))


@pytest.mark.multi_gpu
def test_training_on_gpus(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    check_training(launch(__file__, "train", 4, tmp_path, "cuda", "default"))


def check_training(found: list[Any]) -> None:
    losses = np.mean([f["losses"] for f in found], axis=0)
    assert losses[-1] < 0.9 * losses[0]
    assert len({f["seen"] for f in found}) == 1
    assert len({tuple(f["reasons"]) for f in found}) == 1
    assert 0 < found[0]["off"] < 1e-3
    reasons = found[0]["reasons"]
    # Of two modules: each step's gather, for backward another; an evaluation; a look at the first.
    assert reasons[:2] == ["as they are"] * 2
    assert reasons.count("as they are") == 2
    assert reasons.count("differences") == 16
    assert reasons.count("nothing is sent") == len(reasons) - 18 == 17
    for gathers, sums in (f["bytes"] for f in found):
        assert gathers[1] < 0.35 * gathers[0]
        assert sums[1] < 0.35 * sums[0]
    assert {f["sums"] for f in found} == {2 * 8}


if __name__ == "__main__":
    join(TASKS, sys.argv[1:])
