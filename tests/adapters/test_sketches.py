"""Sums by index and sketch over threads as ranks: values, traffic, reports, bad input."""

from __future__ import annotations

import importlib
import math
import re
import warnings
from fractions import Fraction
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

torch = pytest.importorskip("torch")

from tightwire.adapters.training import sketch_messages  # noqa: E402
from tightwire.adapters.training.layers import Rule  # noqa: E402
from tightwire.adapters.training.sketch_messages import DESCRIPTOR_NBYTES  # noqa: E402
from tightwire.adapters.training.sketches import Report, Sketches, State, Tagc  # noqa: E402

Floats = npt.NDArray[np.float32]

#: Bits an element and rank of figure 2 (TAGC), where uncompressed is 32: index twice, sketch once.
FIGURE_2: dict[tuple[float, str], float] = {
    (2, "or"): 18.0,
    (4, "or"): 10.0,
    (10, "or"): 5.2,
    (2, "1bit"): 18.0,
    (4, "1bit"): 10.0,
    (10, "1bit"): 5.2,
    (2, "4bit"): 24.0,
    (4, "4bit"): 16.0,
    (10, "4bit"): 11.2,
}


class Reference:
    """All ranks of one layer in NumPy, written from algorithm 1."""

    def __init__(self, theta: float, dtype: Any, accumulate: bool = True) -> None:
        self.theta, self.dtype, self.accumulate = theta, dtype, accumulate
        self.e: Floats | None = None
        #: Of float16, so that sums do not overflow.
        self.scale = 1.0

    def step(self, xs: Floats) -> Floats:
        """The sums, shape (ranks, m), of gradients of shape (ranks, ranks, m)."""
        corrected = xs if self.e is None else xs + self.e
        if self.dtype == torch.float16:
            self.scale = 0.5 ** math.ceil(math.log2(len(xs)))
        sent = np.zeros_like(corrected)
        keep = xs.shape[2] - math.ceil(Fraction(str(self.theta)) * xs.shape[2])
        for rank in np.ndindex(*xs.shape[:2]):
            most = np.argsort(-np.abs(corrected[rank]), kind="stable")[:keep]
            sent[rank][most] = self.rounded(corrected[rank][most])
        if self.accumulate:
            self.e = corrected - sent
        total = np.zeros_like(xs[0])
        for part in sent:
            total += part
        return self.rounded(total)

    def rounded(self, x: Floats) -> Floats:
        cells = torch.from_numpy(x * np.float32(self.scale)).to(self.dtype)
        found: Floats = cells.float().numpy() / np.float32(self.scale)
        return found


class Counted(ThreadTransport):
    """Counts the bytes that go to other ranks, and damages message number `damage`."""

    def __init__(self, inner: ThreadTransport, damage: int = -1) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.sent = 0
        self.messages = 0
        self.damage = damage

    def all_to_all(self, out: Any, x: Any) -> None:
        self.sent += x.shape[0] // self.world_size * (self.world_size - 1)
        super().all_to_all(out, x)
        self._arrived(out)

    def all_gather(self, out: Any, x: Any) -> None:
        self.sent += x.shape[0] * (self.world_size - 1)
        super().all_gather(out, x)
        self._arrived(out)

    def _arrived(self, out: Any) -> None:
        self.messages += 1
        if self.messages == self.damage:
            out[-9] ^= 4


def gradients(ranks: int, m: int, dtype: Any, seed: int = 0) -> Any:
    """Of all ranks, shape (ranks, ranks, m), heavy-tailed."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_t(3, (ranks, ranks, m)).astype(np.float32)).to(dtype)


def one(
    tagc: Tagc, xs: Any, everywhere: bool = False, steps: int = 1
) -> list[tuple[Any, Report, State]]:
    """Like steps of one layer on every rank: the sum of all, the last report and the state."""

    def task(transport: ThreadTransport) -> tuple[Any, Report, State]:
        state = State()
        sums = Sketches(tw.Communicator(transport), tagc, state)
        found = sums.sums([("w", xs[transport.rank])], everywhere)[0]
        for _ in range(steps - 1):
            found += sums.sums([("w", xs[transport.rank])], everywhere)[0]
        return found, state.reports[-1], state

    return run_ranks(len(xs), task)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 9))
def test_sums_are_those_of_numpy(ranks: int) -> None:
    """Two layers, three steps, an index mode and a dtype; every other time for all ranks."""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[ranks % 3]
    tagc = Tagc(ratio=(2, 4, 10)[ranks // 3], index=("or", "4bit")[ranks % 2])
    theta, everywhere = tagc.share_zeroed(ranks), ranks % 2 == 0
    sizes = {"a": 16 * 1024 + 5, "b": 20 * 1024}
    steps = [
        {name: gradients(ranks, m, dtype, seed) for name, m in sizes.items()} for seed in range(3)
    ]

    def task(transport: ThreadTransport) -> Any:
        state = State()
        sums = Sketches(tw.Communicator(transport), tagc, state)
        found = []
        for xs in steps:
            layers = [(name, x[transport.rank].clone()) for name, x in xs.items()]
            found.append(sums.sums(layers, everywhere))
            for name, x in layers:
                assert torch.equal(x, xs[name][transport.rank])
        return found, state

    results = run_ranks(ranks, task)
    references = {name: Reference(theta, dtype) for name in sizes}
    for i, xs in enumerate(steps):
        for j, (name, x) in enumerate(xs.items()):
            wanted = references[name].step(x.float().numpy())
            for rank, (found, _) in enumerate(results):
                mine = wanted if everywhere else wanted[rank]
                np.testing.assert_array_equal(found[i][j].numpy(), mine)
    for rank, (_, state) in enumerate(results):
        for name, reference in references.items():
            assert reference.e is not None
            e = state.residuals.residual(name).numpy()
            np.testing.assert_array_equal(e, reference.e[rank].reshape(-1))
        assert [(r.name, r.step) for r in state.reports] == [
            (name, step) for step in range(3) for name in sizes
        ]
        for report in state.reports:
            assert (report.ratio, report.reason, report.estimated) == (tagc.ratio, "", 0)
            share = report.nelem // ranks
            assert report.kept == ranks * (share - math.ceil(Fraction(str(theta)) * share))
            assert report.kept <= report.density * report.nelem <= ranks * report.kept


@pytest.mark.filterwarnings("ignore:.*index '1bit' lost")
@pytest.mark.parametrize(("ratio", "index"), FIGURE_2)
def test_bytes_are_those_of_figure_2(ratio: float, index: str) -> None:
    """As many of uncompressed: an all-to-all sends (ranks - 1) / ranks of the tensor."""
    ranks, m = 4, 20 * 1024
    xs = gradients(ranks, m, torch.float32)

    def task(transport: ThreadTransport) -> None:
        counted = Counted(transport)
        comm = tw.Communicator(counted)
        before = counted.sent
        sums = Sketches(comm, Tagc(ratio=ratio, index=index), State())
        sums.sums([("w", xs[comm.rank])])
        assert sums.wire_bytes == counted.sent - before
        (record,) = sums.trace()
        assert (record.wire_bytes, record.raw_bytes) == (sums.wire_bytes, sums.raw_bytes)
        assert record.algorithm == "reduce-scatter of sketches, lhc"
        assert set(record.seconds) == {"sparsify", "index", "encode", "sketch", "add", "decode"}
        payload = sums.wire_bytes - 3 * DESCRIPTOR_NBYTES * (ranks - 1)
        share = ranks * m * (ranks - 1) / ranks
        assert 8 * payload / share == FIGURE_2[ratio, index]
        assert 8 * sums.raw_bytes / share == 32
        # For all ranks, as in figure 1, the sketches go twice.
        sums.sums([("w", xs[comm.rank])], everywhere=True)
        twice = sums.wire_bytes - payload - (3 + 4) * DESCRIPTOR_NBYTES * (ranks - 1)
        assert 8 * twice / share == pytest.approx(FIGURE_2[ratio, index] + 32 / ratio)

    run_ranks(ranks, task)


@pytest.mark.parametrize("sketch", ["bfloat16", "float16"])
def test_cells_of_16_bits_keep_their_rounding_for_the_next_step(sketch: str) -> None:
    xs = gradients(2, 16 * 1024, torch.float32)
    dtype = getattr(torch, sketch)
    tagc = Tagc(ratio=4, sketch=sketch)
    reference = Reference(tagc.share_zeroed(2), dtype)
    wanted = reference.step(xs.numpy())
    assert reference.e is not None
    for rank, (found, _, state) in enumerate(one(tagc, xs)):
        np.testing.assert_array_equal(found.numpy(), wanted[rank])
        e = state.residuals.residual("w").numpy()
        np.testing.assert_array_equal(e, reference.e[rank].reshape(-1))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device whose kernels make sketches: without a GPU the interpreter has the host's."""
    pytest.importorskip("triton")
    from tightwire import gpu, homomorphic, sparsify_triton

    if torch.cuda.is_available():
        return "cuda"
    codec, sparsify = (importlib.import_module(f"tightwire.{n}") for n in ("codec", "sparsify"))
    for module in (codec, homomorphic):
        monkeypatch.setattr(module, "device_for", lambda *_: gpu)
    monkeypatch.setattr(sparsify, "_kernels", lambda *_: sparsify_triton)
    monkeypatch.setattr(sketch_messages, "is_cuda", lambda _: True)
    return "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("index", ["or", "1bit"])
def test_sums_by_kernels(
    index: str, defers: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, two steps, with one wait before the sketches and one at the end.

    Where sums are left for later, the second step waits for nothing before `settle`.

    By one rank: the interpreter, whose memory stands for a GPU's, has no threads.
    """
    waits: list[list[str]] = []
    settle = sketch_messages.Wire.settle

    def counted(self: Any, verdict: Any) -> list[int]:
        waits.append(verdict.stages)
        return settle(self, verdict)

    monkeypatch.setattr(sketch_messages.Wire, "settle", counted)
    tagc, state = Tagc(ratio=4, index=index), State()
    sizes = {"a": 3 * 1024 + 5, "b": 2 * 1024}
    references = {name: Reference(tagc.share_zeroed(1), torch.float32) for name in sizes}

    def task(transport: ThreadTransport) -> None:
        sums = Sketches(tw.Communicator(transport), tagc, state)
        sums.defers = defers
        for step in range(2):
            xs = {name: gradients(1, m, torch.float32, step) for name, m in sizes.items()}
            layers = [(name, x[0].to(kernels)) for name, x in xs.items()]
            for found, (name, x) in zip(sums.sums(layers), xs.items(), strict=True):
                wanted = references[name].step(x.numpy())
                np.testing.assert_array_equal(found.cpu().numpy(), wanted[0])
            if defers:
                assert len(state.reports) == len(sums.trace()) * 2 == step * 2
                assert waits[2 * step :] == [["index", "index"]][step:]
            sums.settle()
            assert len(state.reports) == len(sums.trace()) * 2 == step * 2 + 2

    run_ranks(1, task)
    for name, reference in references.items():
        assert reference.e is not None
        e = state.residuals.residual(name).cpu().numpy()
        np.testing.assert_array_equal(e, reference.e.reshape(-1))
    assert waits == [["index", "index"], ["sketch"]] * 2
    for report in state.reports:
        assert report.diagnosis is not None
        assert report.diagnosis.rounds > 1
        assert (report.estimated, report.lost) == (0, 0)
        assert report.kept == report.diagnosis.occupied


def test_without_accumulation_what_is_zeroed_is_gone() -> None:
    tagc = Tagc(ratio=4, theta=0.95, accumulate=False)
    wanted = Reference(0.95, torch.float32, accumulate=False)
    xs = gradients(3, 16 * 1024, torch.float32)
    total = wanted.step(xs.numpy())
    for rank, (found, report, state) in enumerate(one(tagc, xs)):
        np.testing.assert_array_equal(found.numpy(), total[rank])
        assert state.residuals.state_dict()["residuals"] == {}
        assert report.kept == 3 * (16 * 1024 - math.ceil(0.95 * 16 * 1024))


def test_a_sum_of_bits_loses_values_that_stay_with_their_ranks() -> None:
    """With "1bit", entries that two ranks keep; nothing disappears between sum and residuals.

    One warning says so. Run alone, since filters of warnings are the process's.
    """
    rng = np.random.default_rng(0)
    xs = torch.from_numpy(rng.integers(-9, 10, (3, 3, 16 * 1024)).astype(np.float32))
    xs[1] = xs[0]
    text = r"w: index '1bit' lost .* values that this rank kept; .* take index='or', or '4bit'"
    with pytest.warns(RuntimeWarning, match=text) as warned:
        results = one(Tagc(ratio=4, index="1bit"), xs, everywhere=True, steps=2)
    # Of each rank one, in both steps together.
    assert len(warned) == 3
    kept = sum(state.residuals.residual("w") for _, _, state in results).view(3, -1)
    for found, report, _ in results:
        assert torch.equal(found + kept, 2 * xs.sum(0))
        assert report.estimated == 0
    lost = [report.lost for _, report, _ in results]
    assert lost[0] == lost[1] > 0
    assert f"'1bit' lost {lost[0]} of this rank's values" in results[0][1].reason


@pytest.mark.filterwarnings("ignore:.*index '1bit' lost")
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_a_sum_of_bits_tells_of_lost_nan(accumulate: bool, alone: bool) -> None:
    """Entries that both ranks keep, of which the index has nothing; alone, nor anything else."""
    xs = torch.zeros(2, 2, 16 * 1024)
    # The last bit of a byte, whose carry is gone.
    xs[:, 1, 7], xs[0, 1, 15], xs[1, 1, 15] = 1, math.inf, 2
    if not alone:
        xs[1, 0, 100] = 5
    results = one(Tagc(ratio=4, index="1bit", accumulate=accumulate), xs)
    for _, report, state in results:
        assert report.lost == 2
        if accumulate:
            assert state.residuals.residual("w").isfinite().all()
    found = torch.stack([found for found, _, _ in results])
    assert found.isnan().nonzero().tolist() == [[0, 0 if alone else 100]]
    assert not found.nan_to_num(0).any()


def test_a_finite_mean_of_float16_arrives() -> None:
    """Sums of three ranks are above what float16 has; a small entry loses bits to the residual."""
    xs = torch.zeros(3, 3, 16 * 1024, dtype=torch.float16)
    xs[:, :, 5], xs[:, :, 9], xs[0, :, 6] = 49152, -40000, 2.0**-24
    for rank, (found, _, state) in enumerate(one(Tagc(ratio=4), xs)):
        assert found[[5, 9, 6]].tolist() == [3 * 49152, -120000, 0]
        e = state.residuals.residual("w").view(3, -1)
        assert e[:, 6].tolist() == [0 if rank else 2.0**-24] * 3
        assert torch.count_nonzero(e) == (0 if rank else 3)


def test_too_dense_an_index_is_warned_of_once() -> None:
    """Run alone, since filters of warnings are the process's."""
    x = gradients(1, 16 * 1024, torch.float32)[0]
    state = State()

    def task(transport: ThreadTransport) -> None:
        sums = Sketches(tw.Communicator(transport), Tagc(ratio=4, theta=0.5), state)
        with pytest.warns(RuntimeWarning, match=r"w: .* estimated.*take a ratio of at most 1\.5"):
            sums.sums([("w", x)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sums.sums([("w", x)])

    run_ranks(1, task)
    for report in state.reports:
        assert report.density == 0.5
        assert report.diagnosis is not None
        assert report.diagnosis.limit == 0.75 / 4
        assert 0.9 < report.estimated <= 1 == report.estimated + report.peeled


def test_fall_back_to_the_highest_ratio_that_peels() -> None:
    xs = gradients(2, 16 * 1024, torch.float32)
    for theta, ratio in ((0.9, 2), (0.2, None)):
        tagc = Tagc(ratio=10, theta=theta, fallback=(1.5, 2, 8))
        # Uncompressed nothing is zeroed either.
        reference = Reference(theta if ratio else 0, torch.float32)
        total = reference.step(xs.numpy())
        assert reference.e is not None
        for rank, (found, report, state) in enumerate(one(tagc, xs)):
            np.testing.assert_array_equal(found.numpy(), total[rank])
            assert (report.ratio, report.estimated) == (ratio, 0)
            assert "take a ratio of at most" in report.reason or "uncompressed" in report.reason
            e = state.residuals.residual("w").numpy()
            np.testing.assert_array_equal(e, reference.e[rank].reshape(-1))
    for found, report, _ in one(tagc, xs, everywhere=True):
        np.testing.assert_array_equal(found.numpy(), total)
        assert report.ratio is None

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        sums = Sketches(comm, tagc, State())
        before = len(comm.trace())
        sums.sums([("w", xs[comm.rank])])
        # Nothing is counted twice: the index here, the layer in the communicator's trace.
        assert sums.raw_bytes == sums.trace()[-1].raw_bytes == 0
        assert 0 < sums.wire_bytes < 4 * 16 * 1024
        assert [r.raw_bytes for r in comm.trace()[before:]] == [4 * 16 * 1024]

    run_ranks(2, task)


def test_nan_and_infinity_arrive_and_leave_no_residual() -> None:
    xs = gradients(2, 16 * 1024, torch.float32)
    xs[0, 0, 5], xs[1, 0, 6], xs[0, 1, 7], xs[1, 1, 7] = math.nan, -math.inf, math.inf, -math.inf
    reference = Reference(0.95, torch.float32)
    with np.errstate(invalid="ignore"):
        # NaN has to count as largest.
        order = xs.nan_to_num(nan=1e38).numpy()
        total = reference.step(order)
    total[0, 5], total[1, 7] = math.nan, math.nan
    total[0, 6] = -math.inf
    for rank, (found, report, state) in enumerate(one(Tagc(ratio=4, theta=0.95), xs)):
        np.testing.assert_array_equal(found.numpy(), total[rank])
        assert report.estimated == 0
        assert state.residuals.residual("w").isfinite().all()


def test_all_zero_and_nothing_kept() -> None:
    xs = torch.zeros(2, 2, 16 * 1024)
    for found, report, _ in one(Tagc(), xs):
        assert not found.any()
        assert (report.density, report.kept, report.peeled) == (0, 0, 1)
    for found, report, _ in one(Tagc(index="1bit"), xs):
        assert not found.any()
        # An entry that would tell of a NaN.
        assert report.density * report.nelem == 1


@pytest.mark.parametrize(
    ("tagc", "ranks"), [(Tagc(ratio=1000), 8), (Tagc(theta=1), 1), (Tagc(theta=0.99999), 1)]
)
def test_a_layer_of_which_nothing_would_be_kept_is_refused(tagc: Tagc, ranks: int) -> None:
    text = "theta .* keeps none of a rank's 8192 elements; take a lower theta or ratio"
    assert not tagc.pays(8192, torch.float32, ranks=ranks)
    assert re.search(text, tagc.obstacle(8192, torch.float32, ranks=ranks))
    comm = Mock(world_size=ranks, rank=0, topology="two-shot")
    sums = Sketches(comm, tagc, State())
    with pytest.raises(ValueError, match=text):
        sums.sums([("w", torch.zeros(ranks, 8192))])
    assert not tagc.obstacle(1 << 20, torch.float32, ranks=ranks) or tagc.theta == 1


@pytest.mark.filterwarnings("ignore:.*index '1bit' lost")
@examples(25)
@given(st.data())
def test_nothing_disappears(data: st.DataObject) -> None:
    """Sums and residuals add up to the gradients, whatever the size and settings."""
    ranks = data.draw(st.integers(1, 3))
    m = data.draw(st.integers(700, 3000))
    tagc = Tagc(
        ratio=data.draw(st.sampled_from([1.5, 3, 10])),
        theta=data.draw(st.none() | st.floats(0, 1)),
        index=data.draw(st.sampled_from(["or", "4bit", "1bit"])),
        mapping=data.draw(st.sampled_from(["rotated", "published"])),
        fallback=(1.2,),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    xs = torch.from_numpy(rng.integers(-99, 99, (ranks, ranks, m)).astype(np.float32))
    if not tagc.pays(m, xs.dtype, ranks=ranks):
        return
    results = one(tagc, xs)
    left = sum(state.residuals.residual("w") for _, _, state in results).view(ranks, m)
    total = torch.stack([found for found, _, _ in results])
    assert torch.equal(total + left, xs.sum(0))


def errors(change: Any) -> list[str]:
    """What ranks raise that differ as `change(rank)` says: settings, layers, damaged message."""
    xs = gradients(3, 16 * 1024, torch.float32)
    found = [""] * 3

    def task(transport: ThreadTransport) -> None:
        tagc, names, damage = change(transport.rank)
        counted = Counted(transport)
        sums = Sketches(tw.Communicator(counted), tagc, State())
        counted.messages, counted.damage = 0, damage
        layers = [(name, xs[transport.rank]) for name in names]
        try:
            sums.sums(layers)
        except tw.CollectiveError as error:
            found[transport.rank] = str(error)
            with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
                sums.sums(layers)
            # The others need not wait.
            transport.close()

    run_ranks(3, task)
    return found


@pytest.mark.parametrize(
    "other", [Tagc(theta=0.99), Tagc(mapping="published"), Tagc(accumulate=False)]
)
def test_other_settings_are_named(other: Tagc) -> None:
    found = errors(lambda rank: (other if rank == 1 else Tagc(), ["w"], -1))
    assert all("other settings or layers" in text for text in found)
    assert "rank 1 has" in found[0]
    assert "rank 1 has" in found[2]


def test_other_layers_are_named() -> None:
    found = errors(lambda rank: (Tagc(), ["v" if rank == 2 else "w"], -1))
    assert "rank 2 has other settings or layers" in found[0]
    found = errors(lambda rank: (Tagc(), ["w", "w2"] if rank == 2 else ["w"], -1))
    assert all("failed in stage 'index'" in text for text in found)


def test_a_choice_of_other_layers_is_named() -> None:
    """Before anything else is sent, also where a rank has chosen none."""

    def task(transport: ThreadTransport) -> None:
        counted = Counted(transport)
        sums = Sketches(tw.Communicator(counted), Tagc(), State())
        sums.agree(["a", "b"], ["b"])
        sent = counted.sent
        sums.agree(["a", "b"], ["b"])
        assert counted.sent == sent
        chosen = [] if transport.rank == 1 else ["d"]
        others = r"\[0, 2\]" if transport.rank == 1 else r"\[1\]"
        layers = r"\['d'\] on rank 0, \[\] here" if transport.rank == 1 else r"\[\] on rank 1"
        text = f"ranks {others} have .* layers of c to d: layers: {layers}"
        with pytest.raises(tw.CollectiveError, match=text):
            sums.agree(["c", "d"], chosen)

    run_ranks(3, task)


def test_settings_that_differ_are_named() -> None:
    """And those that mean the same are the same."""
    settings = (
        Tagc(ratio=10, fallback=[4, 2]),
        Tagc(ratio=10.0, fallback=(4.0, 2)),
        Tagc(ratio=10, fallback=(4,), index="1bit"),
    )
    assert settings[0] == settings[1]

    def task(transport: ThreadTransport) -> str:
        for some in (settings[:2] + settings[:1], settings):
            sums = Sketches(tw.Communicator(transport), some[transport.rank], State())
            try:
                sums.agree(["a"], ["a"])
            except tw.CollectiveError as error:
                return str(error)
        return ""

    found = run_ranks(3, task)
    for text in found[:2]:
        assert "ranks [2] have" in text
        assert "index: '1bit' on rank 2, 'or' here" in text
        assert "fallback: [4.0] on rank 2, [4.0, 2.0] here" in text
        assert "ratio" not in text
        assert "theta" not in text
    assert "index: 'or' on rank 0, '1bit' here" in found[2]


@pytest.mark.parametrize("defers", [False, True])
def test_damage_that_kernels_find_is_raised(
    defers: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding writes a word, which is read with the reports."""
    from tightwire import homomorphic

    decode = homomorphic.Sketched.decode

    def damaged(self: Any, start: int, stop: int) -> Any:
        self.buffer._memory.data[self.plan.header.nbytes] ^= 1
        return decode(self, start, stop)

    def task(transport: ThreadTransport) -> None:
        sums = Sketches(tw.Communicator(transport), Tagc(), State())
        sums.defers = defers
        layers = [("w", gradients(1, 3 * 1024, torch.float32)[0].to(kernels))]
        sums.sums(layers)
        sums.settle()
        monkeypatch.setattr(homomorphic.Sketched, "decode", damaged)
        if defers:
            sums.sums(layers)
        later: Any = sums.settle if defers else lambda: sums.sums(layers)
        with pytest.raises(tw.CollectiveError, match="the record of chunk 0, found on the device"):
            later()
        assert len(sums.state.reports) == 1
        assert [bool(record.error) for record in sums.trace()] == [False, True]
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            sums.sums(layers)

    run_ranks(1, task)


def test_what_changes_places_changes_the_checksum() -> None:
    words = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (2, 3000)))
    before = sketch_messages._checksum(words)
    for a, b in ((0, 1), (5, 1000), (2048, 2999)):
        changed = words.clone()
        changed[0, [a, b]] = changed[0, [b, a]]
        assert (sketch_messages._checksum(changed) != before).tolist() == [True, False]
    for bit in (0, 33, 63):
        changed = words.clone()
        changed[1, 77] ^= -(2**63) if bit == 63 else 1 << bit
        assert (sketch_messages._checksum(changed) != before).tolist() == [False, True]


@pytest.mark.parametrize(("message", "stage"), [(1, "index"), (2, "index"), (3, "sketch")])
def test_damage_is_noticed(message: int, stage: str) -> None:
    found = errors(lambda rank: (Tagc(), ["w"], message if rank == 0 else -1))
    assert f"failed in stage {stage!r}: data from rank 2 are damaged" in found[0]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ratio": 1}, ValueError, "allowed: 1.001 to 1000"),
        ({"ratio": "10"}, TypeError, "ratio is '10'; allowed"),
        ({"theta": 1.5}, ValueError, "theta is 1.5; allowed: 0 to 1, or None"),
        ({"theta": "x"}, TypeError, "theta is 'x'; allowed: a number from 0 to 1, or None"),
        ({"theta": True}, TypeError, "theta is True"),
        ({"index": "xor"}, ValueError, "mode is 'xor'; allowed: or, 4bit, 1bit"),
        ({"sketch": "int8"}, ValueError, "allowed"),
        ({"mapping": "none"}, ValueError, "allowed"),
        ({"accumulate": "no"}, TypeError, "accumulate is 'no'; allowed: True or False"),
        ({"fallback": (20,)}, ValueError, "fallback has 20; allowed: ratios below 10"),
        ({"fallback": (10,)}, ValueError, "fallback has 10; allowed: ratios below 10"),
        ({"fallback": 4}, TypeError, "fallback is 4; allowed: a tuple of ratios"),
        ({"fallback": "42"}, TypeError, "fallback is '42'; allowed: a tuple of ratios"),
        ({"layers": None}, TypeError, r"layers is None; allowed: a Rule\(\)"),
    ],
)
def test_no_settings(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Tagc(**options)


def test_bad_calls() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        with pytest.raises(ValueError, match="'4bit' for 16 ranks; allowed: at most 15"):
            Sketches(comm, Tagc(index="4bit"), State())
        by_hops = tw.Communicator(transport, "mx", topology="ring")
        with pytest.raises(ValueError, match="topology is 'ring'; allowed with them: 'two-shot'"):
            Sketches(by_hops, Tagc(fallback=(2,)), State())
        assert Sketches(by_hops, Tagc(), State()).wire_bytes == 0

    run_ranks(16, task)


def test_what_pays() -> None:
    assert Tagc().pays(4096, torch.float32)
    # One row of cells for less than a row of elements, and no sketch of float64.
    assert not Tagc().pays(1000, torch.float32)
    assert not Tagc().pays(1 << 20, torch.float64)
    assert not Tagc().pays(0, torch.float32)
    # 8 of 16 bits are index.
    assert Tagc(ratio=4, index="4bit").pays(1 << 20, torch.bfloat16)
    assert not Tagc(ratio=2, index="4bit").pays(1 << 20, torch.bfloat16)


#: By models that have such names: of attention, and what is not.
IN_ATTENTION = """
    attn.Wqkv attention.wqkv attn1.to_q SelfAttention.q attention.q_lin self_attn.q_a_proj
    self_attn.kv_b_proj x.kv_a_proj_with_mqa self_attn.in_proj_weight in_proj_weight attn.q_net
    attn.kv_proj attention.self.key cross.to_kv attn.W_Q mha.linear_q QProj attention.wk
    h.3.attn.c_attn h.c_attn layers.1.self_attn.q_proj encoder.layer.0.attention.self.query
    attn.in_proj_weight blocks.0.qkv mixer.Wqkv self_attn.W_pack 0.to_q.0 x.q_proj_weight
    attention.query_key_value self_attn.q_proj.lora_A.default EncDecAttention.v
"""
OUTSIDE = """
    value_head value_net.fc1 value.fc1 layers.0.key_fc query_embed monkey blocks.0.up
    h.3.attn.c_proj layers.1.self_attn.o_proj attention.dense attention.output.dense attn.proj
    SelfAttention.o attention.out_lin attn1.to_out.0 attn.W_O attn.out_proj mha.linear_out
    attention.wo attn_out proj mlp.gate_proj lm_head wte head
"""


def test_the_rule_by_names() -> None:
    rule, big = Rule(), (256, 256)
    for name in IN_ATTENTION.split():
        assert not rule(name, big), name
        assert not rule(f"{name}.weight", big), name
    for name in OUTSIDE.split():
        assert rule(f"{name}.weight", big), name


def test_the_rule() -> None:
    big, rule = (512, 512), Rule()
    assert not rule("up.weight", (255, 256))
    assert rule("up.weight", (256, 256))
    assert not rule("up.bias", (1 << 20,))
    assert not rule("convolution.weight", (512, 512, 3, 3))
    assert Rule(dimensions=None)("convolution.weight", (512, 512, 3, 3))
    assert Rule(include="qkv|up", exclude=None)("qkv.weight", big)
    assert not Rule(include="qkv|up", exclude=None)("down.weight", big)
    assert Rule(nelem=1, dimensions=1)("norm.weight", (3,))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"include": "("}, ValueError, r"include is '\('.*allowed: regular expressions"),
        ({"include": None}, TypeError, "include is None; allowed: a regular expression"),
        ({"exclude": 3}, TypeError, "exclude is 3; allowed: a regular expression, or None"),
        ({"nelem": "a"}, TypeError, "nelem is 'a'; allowed: an integer"),
        ({"dimensions": -1}, ValueError, "dimensions is -1; allowed: at least 0, or None"),
    ],
)
def test_no_rule(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Rule(**options)
