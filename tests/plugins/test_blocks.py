"""Blocks of caches, which all plug-ins for caches have in common; no engine is needed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from tightwire import prepared
from tightwire.adapters.weights.plugins.blocks import Blocks

SHAPE = (3, 70, 33)


def block(seed: int = 0, scale: float = 1.0) -> npt.NDArray[np.uint8]:
    x = np.random.default_rng(seed).normal(0, scale, SHAPE).astype(ml_dtypes.bfloat16)
    return x.reshape(-1).view(np.uint8)


def noise() -> npt.NDArray[np.uint8]:
    """Elements that no codec makes smaller."""
    return np.random.default_rng(5).integers(0, 256, block().size, np.uint8)


@pytest.mark.parametrize("ratio", [None, 0.75, 2.0])
@pytest.mark.parametrize("codec", ["zipccl", "huffman", "raw"])
def test_a_block_comes_back(codec: str, ratio: float | None) -> None:
    blocks, x = Blocks(codec, ratio=ratio), block()
    plan = blocks.plan(SHAPE, "bfloat16")
    memory = np.full(plan.nbytes + 500, 0xA5, np.uint8)
    nbytes = blocks.encode(plan, x, memory)
    assert nbytes <= plan.nbytes
    assert (memory[plan.nbytes :] == 0xA5).all()
    if ratio is not None:
        assert nbytes == plan.nbytes
    if codec != "raw":
        assert nbytes <= 0.75 * x.size or ratio == 2.0
    out = np.full_like(x, 0x5A)
    # Decoders need not know how it was encoded, nor where it ends.
    assert Blocks().decode(plan, memory, out) == nbytes
    assert np.array_equal(out, x)


def test_blocks_of_a_ratio_depend_on_the_elements_alone() -> None:
    blocks = Blocks(ratio=0.75)
    plan = blocks.plan(SHAPE, "bfloat16")
    assert plan.nbytes <= 0.75 * block().size
    found = []
    for poison in (0, 0xFF):
        memory = np.full(plan.nbytes, poison, np.uint8)
        blocks.encode(plan, block(), memory)
        found.append(memory.tobytes())
    assert found[0] == found[1]


def test_a_block_that_does_not_fit_the_ratio_is_refused() -> None:
    blocks = Blocks(ratio=0.75)
    plan = blocks.plan(SHAPE, "bfloat16")
    with pytest.raises(ValueError, match=r"does not fit in \d+ bytes, which ratio=0.75"):
        blocks.encode(plan, noise(), np.empty(plan.nbytes, np.uint8))
    free = Blocks()
    plan, out = free.plan(SHAPE, "bfloat16"), np.empty_like(block())
    memory = np.empty(plan.nbytes, np.uint8)
    free.decode(plan, memory[: free.encode(plan, noise(), memory)], out)
    assert np.array_equal(out, noise())


def test_integers_take_what_any_data_fits_in() -> None:
    blocks = Blocks(ratio=0.5)
    plan = blocks.plan((1000,), "int8")
    assert 1000 < plan.nbytes < 1500
    memory, out = np.empty(plan.nbytes, np.uint8), np.empty(1000, np.uint8)
    x = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    blocks.encode(plan, x, memory)
    blocks.decode(plan, memory, out)
    assert np.array_equal(out, x)


def test_damaged_blocks_and_those_of_another_shape_are_refused() -> None:
    blocks = Blocks(ratio=0.75)
    plan = blocks.plan(SHAPE, "bfloat16")
    memory, out = np.empty(plan.nbytes, np.uint8), np.empty_like(block())
    blocks.encode(plan, block(), memory)
    for at in (0, 40, 300, plan.static_offset + 9, plan.dynamic_offset + 1):
        bad = memory.copy()
        bad[at] ^= 0x10
        with pytest.raises(tw.FormatError):
            blocks.decode(plan, bad, out)
    with pytest.raises(tw.FormatError):
        blocks.decode(plan, memory[:-128], out)
    for shape, dtype in (((70, 3, 33), "bfloat16"), (SHAPE, "float16")):
        with pytest.raises(tw.FormatError, match="a block of bfloat16"):
            blocks.decode(blocks.plan(shape, dtype), memory, out)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="codec is 'mx'"):
        Blocks("mx")
    with pytest.raises(ValueError, match="codec is 'delta'"):
        Blocks("delta")
    with pytest.raises(ValueError, match="ratio is 0"):
        Blocks(ratio=0)
    with pytest.raises(TypeError, match="ratio is '1'"):
        Blocks(ratio="1")  # type: ignore[arg-type]
    blocks = Blocks()
    plan = blocks.plan(SHAPE, "bfloat16")
    with pytest.raises(ValueError, match="block has"):
        blocks.encode(plan, block()[:-2], np.empty(plan.nbytes, np.uint8))
    with pytest.raises(ValueError, match="out has"):
        blocks.encode(plan, block(), np.empty(plan.nbytes - 1, np.uint8))


@pytest.mark.parametrize("threads", [1, 2])
def test_prepared_calls_of_blocks_see_all_damage(threads: int) -> None:
    """Calls after the first take a shorter way."""
    plans = [tw.codec("zipccl").plan((n,), "bfloat16") for n in (40_000, 9_001)]
    rng = np.random.default_rng(0)
    xs = [rng.normal(0, 1, plan.shape).astype(ml_dtypes.bfloat16) for plan in plans]
    memory = [np.full(plan.nbytes, 0xA5, np.uint8) for plan in plans]
    encode = prepared.prepare_encode_many(plans, xs, memory, threads=threads)
    encode()
    kept = [bytes(tw.Buffer.wrap(plan, data)) for plan, data in zip(plans, memory, strict=True)]
    for data in memory:
        data[:] = 0x5A
    encode()
    for x, plan, data, packed in zip(xs, plans, memory, kept, strict=True):
        found = tw.Buffer.wrap(plan, data)
        assert bytes(found) == packed == bytes(tw.encode(x))
    outs = [np.zeros(x.shape, x.dtype) for x in xs]
    decode = prepared.prepare_decode_many(plans, memory, outs, threads=threads)
    single = prepared.prepare_decode(plans[1], memory[1], outs[1], threads=threads)
    for call in (decode, single, decode, single):
        outs[1][:] = 0
        call()
        call.check()
        assert outs[1].tobytes() == xs[1].tobytes()
    assert outs[0].tobytes() == xs[0].tobytes()
    plan = plans[1]
    for at in (0, 70, 260, plan.header.nbytes, plan.static_offset, plan.dynamic_offset):
        memory[1][at] ^= 4
        for call in (decode, single):
            call()
            assert call.statuses.any()
            with pytest.raises(tw.FormatError):
                call.check()
        memory[1][at] ^= 4
    single()
    single.check()
