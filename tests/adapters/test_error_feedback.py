"""Residuals: values bit for bit, new buckets, checkpoints, infinities, means over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from lossy import CODECS, Residuals, inputs
from ranks import exact
from support import examples
from tightwire.adapters.collectives import pipelined
from tightwire.adapters.collectives.calls import rounding_key
from tightwire.adapters.training.error_feedback import ErrorFeedback
from tightwire.adapters.transports.threads import ThreadTransport, connect, run_ranks
from tightwire.arrays import Target, from_bits, host_array
from tightwire.formats.dtypes import BY_NAME

PLAIN = [codec for codec in CODECS if getattr(codec.spec, "rounding", "nearest") == "nearest"]


def array(values: Any, library: str) -> Any:
    dtype = BY_NAME[values.dtype.name]
    return from_bits(values.reshape(-1).view(dtype.bits), dtype, values.shape, Target(library))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_lost_goes_with_the_next(library: str, dtype: str) -> None:
    pytest.importorskip(library)
    codec, feedback = tw.codec("nvfp4"), ErrorFeedback()
    e = np.zeros((7, 143), np.float32)
    sent = np.zeros_like(e)
    steps = inputs(codec, dtype, 9, 7 * 143)
    for x in steps:
        x = x.reshape(7, 143)
        given = array(x.copy(), library)
        buffer = feedback.encode(codec, given, "w")
        exact(given, x)
        corrected = x.astype(np.float32) + e
        decoded = tw.decode(bytes(codec.encode(corrected.astype(x.dtype))))
        exact(tw.decode(buffer), decoded)
        e = corrected - decoded.astype(np.float32)
        exact(feedback.residual("w"), e.reshape(-1))
        sent += decoded.astype(np.float32)
    total = np.sum([x.astype(np.float32) for x in steps], axis=0).reshape(7, 143)
    np.testing.assert_allclose(sent + e, total, rtol=1e-4, atol=1e-4)
    # Nothing is lost for long, as it would be without.
    plain = sum(tw.decode(codec.encode(x)).astype(np.float32) for x in steps).reshape(7, 143)
    assert np.abs(sent - total).mean() < 0.5 * np.abs(plain - total).mean()


@examples(30)
@given(st.data())
def test_buckets_may_be_cut_anew_in_any_order(data: st.DataObject) -> None:
    sizes = {name: data.draw(st.integers(0, 40), name) for name in "abcde"}
    feedback = ErrorFeedback()
    residuals = {name: np.zeros(n, np.float32) for name, n in sizes.items()}
    rng = np.random.default_rng(0)
    for _ in range(4):
        order = data.draw(st.permutations("abcde"))
        cut = data.draw(st.integers(1, 4))
        for names in (order[:cut], order[cut:]):
            parts = [(name, sizes[name]) for name in names]
            x = rng.standard_normal(sum(sizes[n] for n in names), np.float32)
            corrected = feedback.corrected(x, parts)
            exact(corrected, x + np.concatenate([residuals[n] for n in names]))
            decoded = np.round(corrected)
            feedback.keep(parts, corrected, decoded)
            lost, at = corrected - decoded, 0
            for name, n in parts:
                residuals[name] = lost[at : at + n]
                at += n
        if data.draw(st.booleans()):
            saved, feedback = feedback.state_dict(), ErrorFeedback()
            feedback.load_state_dict(saved)
    for name, e in residuals.items():
        exact(feedback.residual(name), e)


def test_checkpoints_are_copies_and_cross_libraries() -> None:
    torch = pytest.importorskip("torch")
    feedback = ErrorFeedback()
    x = torch.arange(5.0)
    feedback.keep([("a", 5)], x, x / 2)
    weights = torch.nn.Parameter(torch.ones(2, 3))
    feedback.encode(tw.codec("mx"), weights, "w")
    assert not feedback.residual("w").requires_grad
    state = feedback.state_dict()
    feedback.keep([("a", 5)], x, x)
    saved = state["residuals"]["a"]
    assert saved.tolist() == [0, 0.5, 1, 1.5, 2]
    other = ErrorFeedback()
    other.load_state_dict(state)
    exact(other.corrected(np.ones(5, np.float32), [("a", 5)]), 1 + host_array(saved))
    # As states once were.
    other.load_state_dict({"a": host_array(saved)})
    assert torch.equal(other.corrected(torch.zeros(5), [("a", 5)]), saved)
    other.reset()
    with pytest.raises(KeyError):
        other.residual("a")
    assert saved.tolist() == [0, 0.5, 1, 1.5, 2]


@pytest.mark.parametrize("hook", ["scatter", "gather", "average", "sketches"])
def test_a_state_is_for_as_many_ranks(hook: str) -> None:
    """With more ranks the elements of a residual would be of others, and of the same number."""
    pytest.importorskip("torch")
    from tightwire.adapters.training import hooks, sketches

    n = 1 << 17 if hook == "sketches" else 3200

    def call(transport: ThreadTransport, feedback: ErrorFeedback) -> None:
        comm, parts = tw.Communicator(transport, "mx"), [("a", n)]
        x = array(np.linspace(0, 1, n, dtype=np.float32), "torch")
        if hook == "scatter":
            hooks.scatter(comm, x, hooks.wide(n // comm.world_size, x), feedback, parts)
        elif hook == "gather":
            hooks.gather(comm, x, x.new_empty(n * comm.world_size), feedback, parts)
        elif hook == "average":
            hooks.average(comm, x, feedback, parts)
        else:
            state = sketches.State()
            state.residuals = feedback
            sums = sketches.Sketches(comm, sketches.Tagc(ratio=4), state)
            sums.sums([("a", x.view(comm.world_size, -1))])

    def save(transport: ThreadTransport) -> Any:
        feedback = ErrorFeedback()
        call(transport, feedback)
        return feedback.state_dict()

    def load(transport: ThreadTransport, states: Any, error: str) -> None:
        feedback = ErrorFeedback()
        feedback.load_state_dict(states[transport.rank % 2])
        with pytest.raises(ValueError, match=error):
            call(transport, feedback)
        feedback.reset()
        call(transport, feedback)
        before = feedback.state_dict()
        with pytest.raises(ValueError, match=error):
            feedback.load_state_dict(states[transport.rank % 2])
        exact(feedback.residual("a"), host_array(before["residuals"]["a"]))

    states = run_ranks(2, save)
    assert [state["ranks"]["a"] for state in states] == [(0, 2), (1, 2)]

    def go_on(transport: ThreadTransport) -> None:
        feedback = ErrorFeedback()
        feedback.load_state_dict(states[transport.rank])
        call(transport, feedback)

    run_ranks(2, go_on)
    other = r"'a' is of rank [01] of 2, this is rank . of 4; allowed: .* as many ranks, or none"
    run_ranks(4, lambda transport: load(transport, states, other))
    # Of another rank, and as states once were.
    run_ranks(2, lambda transport: load(transport, states[::-1], "this is rank [01] of 2"))
    old = [state["residuals"] for state in states]
    run_ranks(2, lambda transport: load(transport, old, "is of an unknown rank, this is rank"))


def test_another_size_starts_anew() -> None:
    feedback = ErrorFeedback()
    one = np.ones(4, np.float32)
    feedback.keep([("a", 4)], one, 0 * one)
    exact(feedback.corrected(one[:3], [("a", 3)]), one[:3])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_step_that_overflowed_leaves_no_trace(library: str) -> None:
    pytest.importorskip(library)
    feedback, codec = ErrorFeedback(), tw.codec("mx")
    x = np.linspace(-1, 1, 96, dtype=np.float32)
    x[40], x[70] = np.inf, np.nan
    feedback.encode(codec, array(x, library), "a")
    e = host_array(feedback.residual("a"))
    assert np.isfinite(e).all()
    assert e[:32].any()
    assert not e[64:].any()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_residuals_that_others_have_made(library: str) -> None:
    """They are taken as they are, without a copy, and whatever parts come next find them."""
    pytest.importorskip(library)
    feedback = ErrorFeedback()
    zeros = array(np.zeros(5, np.float32), library)
    feedback.corrected(zeros, [("a", 2), ("b", 3)])
    e = array(np.arange(5, dtype=np.float32), library)
    feedback.replace([("b", 3), ("c", 2)], e)
    e[0] = 7
    exact(feedback.residual("b"), np.array([7, 1, 2], np.float32))
    exact(feedback.corrected(zeros, [("a", 2), ("b", 3)]), np.array([0, 0, 7, 1, 2], np.float32))
    exact(feedback.residual("c"), np.array([3, 4], np.float32))
    with pytest.raises(ValueError, match="e has shape"):
        feedback.replace([("a", 4)], e)


def test_parts_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="different names"):
        ErrorFeedback().corrected(np.zeros(4, np.float32), [("a", 2), ("a", 2)])


@pytest.mark.parametrize("rotate", ["encode", "decode"])
def test_codecs_that_decode_to_another_tensor(rotate: str) -> None:
    codec, x = tw.codec("sdp4bit", rotate=rotate), np.ones(640, np.float32)
    assert not codec.round_trips
    assert tw.codec("sdp4bit", rotate="none").round_trips
    with pytest.raises(ValueError, match="allowed: codecs whose round_trips"):
        ErrorFeedback().encode(codec, x, "x")


@pytest.mark.parametrize("feedback", [ErrorFeedback, True, {}])
def test_hooks_take_nothing_else_for_feedback(feedback: Any) -> None:
    pytest.importorskip("torch")
    from tightwire.adapters.training import ddp, fsdp

    comm = tw.Communicator(connect(1)[0], "mx")
    with pytest.raises(TypeError, match="allowed: an ErrorFeedback"):
        ddp.DdpHook(comm, feedback, {})
    with pytest.raises(TypeError, match="allowed: an ErrorFeedback"):
        fsdp.compress(None, error_feedback=feedback)


def test_hooks_take_feedback_only_where_something_is_lost() -> None:
    pytest.importorskip("torch")
    from tightwire.adapters.training import ddp, fsdp

    feedback, one, wrong = ErrorFeedback(), connect(1)[0], cast(Any, True)
    hops: dict[str, Any] = {"codec": "mx", "topology": "ring"}
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r"codec is Zipccl\(", lambda: ddp.DdpHook(tw.Communicator(one), feedback, {})),
        (r"codec is Zipccl\(", lambda: fsdp.compress(None, error_feedback=feedback)),
        (r"codec is Zipccl\(", lambda: fsdp.compress(None, parameter_feedback=feedback)),
        (r"codec is Zipccl\(", lambda: fsdp.AllGather().with_feedback(feedback, "a", None)),
        (r"codec is Zipccl\(", lambda: fsdp.DifferenceGather().with_feedback(feedback, "a", None)),
        (r"codec is Zipccl\(", lambda: fsdp.ReduceScatter().with_feedback(feedback, "a")),
        (r"codec is Zipccl\(", lambda: fsdp.AllReduce(None).with_feedback(feedback, "a")),
        ("topology is 'ring'", lambda: fsdp.AllReduce(None, **hops).with_feedback(feedback, "a")),
        ("topology is 'ring'", lambda: fsdp.ReduceScatter(**hops).with_feedback(feedback, "a")),
    ]
    for found, call in calls:
        with pytest.raises(ValueError, match=found + ".*allowed with it: "):
            call()
    with pytest.raises(ValueError, match="weight_differences is given with parameter_feedback"):
        fsdp.compress(None, weight_differences=True, parameter_feedback=feedback, codec="mx")
    with pytest.raises(TypeError, match="allowed: an ErrorFeedback"):
        fsdp.AllGather(codec="mx").with_feedback(wrong, "a", None)


def test_bad_calls() -> None:
    feedback = ErrorFeedback()
    with pytest.raises(TypeError, match="x is int32; allowed: float dtypes"):
        feedback.corrected(np.zeros(3, np.int32), [("a", 3)])
    with pytest.raises(ValueError, match=r"x has shape \(3,\); its parts have 4 elements"):
        feedback.corrected(np.zeros(3, np.float32), [("a", 3), ("b", 1)])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("algorithm", ["compressed", "pipelined", "native"])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_what_arrives_of_ones_own(
    library: str, algorithm: Any, wire: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    monkeypatch.setattr(pipelined, "_PIECE", 256)
    codec = CODECS[4]
    xs = inputs(codec, "float32", 2, 2 * 401)
    cuts = [(0, 256), (256, 401)] if algorithm == "pipelined" else [(0, 401)]

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, codec, algorithm=algorithm, pieces=2)
        me = transport.rank
        x, decoded = array(xs[me], library), array(np.full(802, 9, np.float32), library)
        comm.reduce_scatter(x, wire=wire, decoded=decoded)
        # Natively nothing is rounded.
        travels = "float32" if wire is None or algorithm == "native" else wire
        sent = xs[me].astype(BY_NAME[travels].numpy).reshape(2, -1)
        wanted = np.empty((2, 401), np.float32)
        for k, (a, b) in enumerate(cuts):
            piece = sent[:, a:b].reshape(-1)
            if algorithm != "native":
                piece = tw.decode(codec.encode(piece, chunks=2, key=rounding_key(0, 0, k, me, 2)))
            wanted[:, a:b] = piece.reshape(2, -1)
        exact(decoded, wanted.reshape(-1))
        with pytest.raises(ValueError, match="decoded is"):
            comm.reduce_scatter(x, decoded=decoded[:5])

    run_ranks(2, task)


class SumsNothing(ThreadTransport):
    """A network that has no sum of its own, as UCX."""

    def reduce_scatter(self, out: Any, x: Any) -> None:
        raise NotImplementedError("no sum")


def test_what_arrives_where_the_network_sums_nothing() -> None:
    """What travels is rounded then, also natively."""
    xs = [np.linspace(1, 2, 202, dtype=np.float32) * (r + 1) for r in range(2)]
    rounded = [x.astype(BY_NAME["bfloat16"].numpy).astype(np.float32) for x in xs]

    def task(transport: ThreadTransport) -> None:
        transport.__class__ = SumsNothing
        comm = tw.Communicator(transport, "mx", algorithm="native")
        me, decoded = transport.rank, np.empty(202, np.float32)
        share = comm.reduce_scatter(xs[me], wire="bfloat16", decoded=decoded)
        exact(decoded, rounded[me])
        exact(share, sum(rounded)[me * 101 :][:101])  # type: ignore[index]

    run_ranks(2, task)


@examples(12)
@given(
    world_size=st.integers(1, 4),
    codec=st.sampled_from(PLAIN),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    sizes=st.tuples(st.integers(1, 400), st.integers(0, 5), st.integers(1, 700)),
)
def test_means_with_feedback(
    world_size: int, codec: tw.Codec, dtype: str, sizes: tuple[int, int, int]
) -> None:
    pytest.importorskip("torch")
    from tightwire.adapters.training.hooks import average

    parts = list(zip("abc", sizes, strict=True))
    reference = Residuals(codec, world_size)
    orders = [parts, [parts[1]], parts[::-1]]
    given = [
        [x[: sum(n for _, n in order)] for x in inputs(codec, dtype, world_size, sum(sizes))]
        for order in orders
    ]
    wanted = [reference.average(xs, order) for xs, order in zip(given, orders, strict=True)]

    def task(transport: ThreadTransport) -> None:
        comm, feedback = tw.Communicator(transport, codec), ErrorFeedback()
        for xs, order, mean in zip(given, orders, wanted, strict=True):
            x = array(xs[comm.rank].copy(), "torch")
            average(comm, x, feedback, order)
            exact(x, mean)
        for name, e in reference.e[comm.rank].items():
            exact(feedback.residual(name), e)

    run_ranks(world_size, task)


def test_nothing_is_lost_for_long() -> None:
    """What all ranks have got after many steps is the sum of the means but for the residuals."""
    pytest.importorskip("torch")
    from tightwire.adapters.training.hooks import average

    codec, n, count = tw.codec("nvfp4"), 999, 20
    steps = [
        np.random.default_rng([k, 1]).standard_normal((2, n)).astype(np.float32)
        for k in range(count)
    ]
    total = np.sum([xs.mean(axis=0) for xs in steps], axis=0)

    def task(transport: ThreadTransport) -> tuple[Any, Any, Any]:
        comm, feedback = tw.Communicator(transport, codec), ErrorFeedback()
        sums = np.zeros((2, n))
        for xs in steps:
            for k, used in enumerate((feedback, None)):
                x = array(xs[comm.rank].copy(), "torch")
                average(comm, x, used, [("a", n)])
                sums[k] += host_array(x)
        return sums[0], sums[1], host_array(feedback.residual("a"))

    (got, plain, e0), (same, _, e1) = run_ranks(2, task)
    assert np.array_equal(got, same)
    np.testing.assert_allclose(got + (e0 + e1) / 2, total, atol=1e-4)
    assert np.abs(got - total).mean() < 0.5 * np.abs(plain - total).mean()
