"""Calls of kernels merged into one launch of each."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import tightwire as tw  # noqa: E402
from tightwire.codecs.common import frame_triton, merged_triton  # noqa: E402
from tightwire.codecs.common.launch_triton import (  # noqa: E402
    Variant,
    kernel,
    options,
    program,
    programs,
)
from tightwire.codecs.common.record_triton import record  # noqa: E402


@kernel  # type: ignore[untyped-decorator]
def _note_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    sums_ptr,
    a: tl.int32,
    b: tl.int64,
    c: tl.uint64,
    d: tl.float32,
    FACTOR: tl.constexpr,
    DOUBLED: tl.constexpr,
    member=None,
):
    """What a program is, and what it was given, as words behind `sums_ptr`."""
    at = sums_ptr + program(member) * 8
    tl.store(at, program(member).to(tl.int64))
    tl.store(at + 1, programs(member).to(tl.int64))
    tl.store(at + 2, a.to(tl.int64))
    tl.store(at + 3, b)
    tl.store(at + 4, c.to(tl.int64, bitcast=True))
    tl.store(at + 5, (d * 4).to(tl.int64))
    word = tl.load(x_ptr).to(tl.int64) * FACTOR
    if DOUBLED:
        word = word * 2
    tl.store(at + 6, word)


_ONE = Variant(_note_kernel, options(1), FACTOR=3, DOUBLED=True)
_OTHER = Variant(_note_kernel, options(1), FACTOR=5, DOUBLED=False)
NUMBERS = -7, -(1 << 40), (1 << 64) - 3, -2.25


def expected(pids: int, a: int, word: int) -> list[list[int]]:
    return [[pid, pids, a, -(1 << 40), -3, -9, word, -1] for pid in range(pids)]


def test_arguments_of_every_kind(place: str) -> None:
    """Calls by two plans, on memory that starts anywhere, have rows of one launch."""
    small, large = (tw.codec("raw").plan((n,), "uint8") for n in (3, 50))
    plans = [small, large, small, large]
    memory = torch.arange(64, dtype=torch.uint8, device=place)
    xs = [memory[at : at + 1] for at in (1, 16, 5, 32)]
    outs = torch.full((4, 40, 8), -1, dtype=torch.int64, device=place)
    names: list[Any] = []

    def call(plan: Any, x: Any, out: Any, own: Any) -> Any:
        names.append((plan, own))
        programs_of = 2 if plan is small else 40
        _ONE.launch(programs_of, (x, out), own, *NUMBERS[1:])
        return out[1:]

    found = merged_triton.launch_merged(plans, (xs, outs), call, alike=[-7, 8, -7, 8])
    assert names == [(small, -7), (large, 8)], "a call for each plan"
    assert found.tolist() == [out[1:].data_ptr() for out in outs]
    for out, plan, x in zip(outs.tolist(), plans, (1, 16, 5, 32), strict=True):
        n, a = (2, -7) if plan is small else (40, 8)
        assert out[:n] == expected(n, a, 6 * x)
        assert all(word == -1 for row in out[n:] for word in row)


def test_steps_stay_in_the_order_of_each_call(place: str) -> None:
    """Some calls have more steps than others; a step without programs is no launch."""
    plans = [tw.codec("raw").plan((n,), "uint8") for n in (1, 2, 3)]
    xs = torch.ones((3, 16), dtype=torch.uint8, device=place)
    outs = torch.full((3, 1, 8), -1, dtype=torch.int64, device=place)

    def call(plan: Any, x: Any, out: Any, _: Any) -> None:
        variants = [_ONE, _OTHER, _ONE][: plan.nelem]
        for variant in variants:
            variant.launch(1, (x, out), *NUMBERS)
        _OTHER.launch(0, (x, out), *NUMBERS)

    steps = record(lambda: merged_triton.launch_merged(plans, (xs, outs), call))
    assert bool((outs == -1).all()), "nothing was done yet"
    for step in steps:
        step()
    assert [out[0][6] for out in outs.tolist()] == [6, 5, 6]
    # ONE of all, OTHER of two, ONE of one.
    assert len(steps) == 3


def test_memory_of_calls_is_kept_by_a_record(place: str) -> None:
    plans = [tw.codec("huffman").plan((5000,), "bfloat16") for _ in range(2)]

    def launch() -> None:
        work = merged_triton.Work(plans, torch.device(place))
        assert [len(w) >= p.scratch_nbytes for w, p in zip(work, plans, strict=True)] == [True] * 2
        assert work.addresses.tolist() == [w.data_ptr() for w in work]

        def call(plan: Any, scratch: Any, _: Any) -> None:
            x = scratch.view(torch.int64)
            _ONE.launch(1, (scratch, x), *NUMBERS)

        merged_triton.launch_merged(plans, (work,), call, kept=work.whole)

    (step,) = record(launch)
    others = [torch.zeros(1 << 20, dtype=torch.uint8, device=place) for _ in range(8)]
    step()
    assert not any(bool(other.any()) for other in others)


def test_words_of_numbers() -> None:
    assert merged_triton._word(-1, "tl.int64") == -1
    assert merged_triton._word((1 << 64) - 1, "tl.uint64") == -1
    assert merged_triton._word(1 << 63, "tl.uint64") == -(1 << 63)
    bits = merged_triton._word(-0.5, "tl.float32")
    assert np.array(bits, np.int64).astype(np.int32).view(np.float32) == -0.5


def test_the_memory_that_a_pointer_is_in() -> None:
    spans = [(100, 400), (0, 0), (300, 340), (400, 500)]
    for pointer, expected in (
        (100, (1, 0)),
        (299, (1, 199)),
        (300, (3, 0)),
        (339, (3, 39)),
        (340, (1, 240)),
        (400, (4, 0)),
        (500, (0, 500)),
        (0, (0, 0)),
    ):
        assert merged_triton._place_in(spans, pointer) == expected


@pytest.mark.parametrize("name", ["huffman", "omnireduce", "lhc", "tahquant", "dynamiq"])
@pytest.mark.fast_cases(2)
def test_tensors_behind_buffers_in_the_same_array(name: str, place: str) -> None:
    """Decoded to where the array of a buffer goes on, and encoded from there."""
    codec, key = tw.codec(name, **({"hidden": 64} if name == "tahquant" else {})), tw.Key(1)
    rng = np.random.default_rng(0)
    # huffman's decoder is interpreted element by element.
    n = 400 if name == "huffman" else 4000
    xs = [torch.from_numpy(rng.standard_normal(n).astype(np.float32)).to(place) for _ in "ab"]
    plan = codec.plan((n,), "float32")
    room = -(-plan.nbytes // 128) * 128
    arrays = [torch.full((room + 4 * n,), 0xA5, dtype=torch.uint8, device=place) for _ in xs]
    inside = [array[room:].view(torch.float32) for array in arrays]
    for y, x in zip(inside, xs, strict=True):
        y.copy_(x)
    expected = [codec.encode(x, key=key) for x in xs]
    buffers = codec.encode_many(inside, out=arrays, key=key, backend="triton")
    assert list(map(bytes, buffers)) == list(map(bytes, expected))
    for y in inside:
        y.fill_(7)
    tw.decode_many(buffers, out=inside)
    for buffer, y, wanted in zip(buffers, inside, expected, strict=True):
        buffer.check()
        assert y.equal(tw.decode(wanted))


@pytest.mark.parametrize("name", ["huffman", "omnireduce"])
def test_tables_of_a_graph_are_there_when_they_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph whose plans were not used before has tables of its own, which launches read."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    made: list[Any] = []
    alive: list[bool] = []

    def on(self: Any, device: Any) -> Any:
        table = frame_triton.table_of(self.words, device)
        made.append(weakref.ref(table))
        return table

    launch_all = merged_triton._launch_all

    def launch(*args: Any) -> Any:
        alive.extend(table() is not None for table in made)
        return launch_all(*args)

    monkeypatch.setattr(frame_triton.Table, "on", on)
    monkeypatch.setattr(merged_triton, "_launch_all", launch)
    xs = [torch.arange(n).bfloat16() for n in (640, 700, 704)]
    found = tw.codec(name).encode_many(xs, backend="triton")
    assert len(alive) >= 3
    assert all(alive)
    wanted = [tw.codec(name).encode(x, backend="ref") for x in xs]
    assert list(map(bytes, found)) == list(map(bytes, wanted))
