"""dynamiq: the kernels against the reference; see kernels.py."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from kernels import (
    MARKS,
    Memory,
    assert_same_buffer,
    check_decode,
    check_encode,
    decoded_bits,
    raw,
    sums_agree,
)
from support import KEY, make_bits
from tightwire import engine
from tightwire.codecs.common.base import Plan
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import device_module

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = MARKS

DYNAMIQ: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "super_group": 128,
        "group": 64,
        "center": True,
        "grid": "signed",
        "scales": "stochastic",
        "rounding": "stochastic",
    },
    "wide": {"widths": "pow2", "scales": "wide", "super_group": 1024, "center": True},
    "fixed": {"widths": "fixed", "grid": "uniform", "rounding": "nearest", "group": 8, "bits": 8},
}


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "params", "pattern", "n", "chunks", "first"),
    [
        ("bfloat16", "default", "scales", 8192 + 700, 1, 0),
        ("float16", "default", "special", 2 * 2051 - 1, 2, 1),
        ("float32", "paper", "special", 2 * 2051, 2, 1),
        ("float16", "wide", "scales", 5001, 1, 0),
        ("bfloat16", "fixed", "mixed_zeros", 3 * 1304 - 5, 3, 0),
    ],
)
def test_dynamiq(
    place: str,
    name: str,
    params: str,
    pattern: str,
    n: int,
    chunks: int,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways, in part, added to float32, and added and encoded again without a temporary sum."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, kind, codec = BY_NAME[name], BY_NAME["float32"], tw.codec("dynamiq", **DYNAMIQ[params])
    bits, other = make_bits(pattern, dtype, n), make_bits("scales", dtype, n, seed=1)
    key, memory = tw.Key(KEY.seed, 7, 4, 5), Memory(place)
    buf = check_encode(memory, bits, dtype, codec, first=first, key=key, chunks=chunks)
    assert buf.plan.codec.name == "dynamiq"
    expected = decoded_bits(buf, bits)
    check_decode(memory, buf, expected, dtype, first=first)
    check_decode(memory, buf, expected, dtype, start=n // 2 + 3, stop=n - 9, verify=True)
    sums = make_bits("normal", kind, n, seed=2).view(np.float32)
    acc = memory.put(sums.view(np.uint32), kind)
    codec.decode_add(buf, acc, scratch=memory.take(buf.plan.scratch_nbytes))
    buf.check()
    codec.decode_add(bytes(buf), sums)
    assert sums_agree(raw(acc).view(np.float32), sums)
    out, scratch = memory.take(buf.plan.nbytes), memory.take(buf.plan.scratch_nbytes)
    x = memory.put(other, dtype, first)
    total = codec.decode_add_encode(
        buf, x, key=key, out=out, scratch=scratch, chunks=chunks, backend="triton"
    )
    buf.check()
    again = codec.decode_add_encode(
        bytes(buf), other.view(dtype.numpy), key=key, chunks=chunks, backend="ref"
    )
    assert bytes(total) == bytes(again)
    assert raw(x).tobytes() == other.tobytes()
    memory.check()


def test_dynamiq_chunks_of_hardly_any_elements(place: str) -> None:
    """A plan that the planner would leave to raw, with chunks of 2, 1 and 0 elements."""
    from tightwire.codecs.dynamiq import Dynamiq, decode_chunk

    dtype, spec = BY_NAME["bfloat16"], Dynamiq(rounding="nearest")
    plan = Plan(spec, dtype, (5,), 4, spec.layout(dtype, 2), 0)
    kernels: Any = device_module("dynamiq")
    bits = make_bits("normal", dtype, 5)
    expected = np.full(plan.nbytes, 0x5A, np.uint8)
    engine.encode_into(plan, bits, expected, backend="ref")
    memory = Memory(place)
    out = memory.take(plan.nbytes)
    kernels.encode(plan, memory.put(bits, dtype), out, memory.take(plan.scratch_nbytes))
    assert_same_buffer(plan, raw(out), expected)
    y, status = memory.elements(dtype, 5), torch.zeros(1, dtype=torch.int64, device=place)
    kernels.decode(plan, out, y, memory.take(plan.scratch_nbytes), status)
    assert status.tolist() == [0]
    found = raw(y).view(np.uint16)
    for i in range(4):
        lo, hi = plan.chunk_range(i)
        decoded = np.empty(hi - lo, np.uint16)
        problem = decode_chunk(spec, plan.chunk(i, expected, expected[:0]), decoded).problem
        assert problem is None
        assert found[lo:hi].tolist() == decoded.tolist()
    memory.check()


@pytest.mark.slow
def test_dynamiq_stats(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, given from the host or the device, of another tensor, for a sum; and wrong ones."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, codec, n = BY_NAME["bfloat16"], tw.codec("dynamiq", rounding="nearest"), 3001
    bits, other = make_bits("scales", dtype, n), make_bits("normal", dtype, n, seed=3)
    memory = Memory(place)
    x = memory.put(bits, dtype)
    expected = codec.measure(other.view(dtype.numpy))
    stats = codec.measure(memory.put(other, dtype), backend="triton")
    assert raw(stats).tobytes() == expected.tobytes()
    assert stats.dtype == torch.float32
    host = codec.encode(bits.view(dtype.numpy), stats=expected)
    for given in (stats, expected):
        assert bytes(codec.encode(x, stats=given, backend="triton")) == bytes(host)
    mine = codec.encode(x, backend="triton")
    total = codec.decode_add_encode(mine, x, stats=stats, backend="triton")
    sums = (tw.decode(bytes(mine)).astype(np.float32) + bits.view(dtype.numpy)).astype(dtype.numpy)
    assert bytes(total) == bytes(codec.encode(sums, stats=expected))
    for bad in (stats[:-1], stats.double(), stats.reshape(1, -1), -expected, expected[None]):
        with pytest.raises(ValueError, match="stats"):
            codec.encode(x, stats=bad, backend="triton")
    # Nobody reads those on the device: they count as 0, or as the largest number.
    strange = stats.clone()
    strange[:4] = torch.tensor([math.nan, -1.0, math.inf, 1e-40])
    clean = expected.copy()
    clean[:4] = 0, 0, np.finfo(np.float32).max, 0
    host = codec.encode(bits.view(dtype.numpy), stats=clean)
    assert bytes(codec.encode(x, stats=strange, backend="triton")) == bytes(host)
    memory.check()


@pytest.mark.slow
@pytest.mark.parametrize("widths", ["any", "pow2"])
def test_dynamiq_widths_of_many_super_groups(place: str, widths: str) -> None:
    """More than a block of them, chunks that cut some in two, ties, zeros; back from an index."""
    from tightwire.codecs import dynamiq, dynamiq_codes_triton
    from tightwire.codecs.common.driver_triton import Reads
    from tightwire.codecs.dynamiq_widths_triton import Widths

    chunks, groups = 2, 4500
    codec = tw.codec("dynamiq", widths=widths, super_group=128, bits=4, rounding="nearest")
    plan = codec.plan((2 * (groups * 128 - 40),), "bfloat16", chunks=chunks)
    spec = plan.codec
    assert isinstance(spec, dynamiq.Dynamiq)
    rng = np.random.default_rng(1)
    g = Widths.of(plan)
    assert g.blocks > 2
    tables = dynamiq_codes_triton.tables_of(spec.grid, torch.device(place))
    for spread in (0.3, 40.0):
        stats = np.exp(spread * rng.standard_normal(g.stats)).astype(np.float32)
        stats[rng.random(g.stats) < 0.3] = np.float32(1.5)
        stats[rng.random(g.stats) < 0.1] = 0
        memory = Memory(place)
        energies = memory.put(stats.view(np.uint32), BY_NAME["float32"])
        _, _, state, counts, work = g.parts_of(memory.take(plan.scratch_nbytes), 1, tables.device)
        g.choose(energies, state, counts, work, tables, (4, 3))
        data = np.zeros(plan.nbytes, np.uint8)
        wanted = []
        for i in range(chunks):
            chunk = plan.chunk(i, data, data[:0])
            units = spec.units(chunk.nelem)
            found = dynamiq.choose_widths(spec, dynamiq.chunk_energies(spec, chunk, stats), units)
            dynamiq.store_widths(dynamiq.static_views(spec, chunk), found)
            index_at = sum(section.nbytes for section in plan.layout.sections[:2]) // 128
            head = [found.sum(), units, index_at]
            wanted.append((head, dynamiq.first_rows(found) << 4 | found))
        status = torch.zeros(1, dtype=torch.int64, device=place)
        sums = torch.zeros(chunks, dtype=torch.int64, device=place)
        src = memory.put(data, BY_NAME["uint8"])
        g.read(Reads(src, sums, status, 0, chunks, True), chunks, counts, work, tables, (1, 0))
        assert status.tolist() == [0]
        assert raw(work)[: tables.nbytes].tobytes() == raw(tables).tobytes()
        size = 2 * chunks * (dynamiq.WORK_HEAD + groups)
        left = raw(work).view(np.int64)[dynamiq.TABLES :][:size].reshape(2, chunks, -1)
        for k, shares in enumerate(([4, 3], [1, 0])):
            for i, (head, expected) in enumerate(wanted):
                assert left[k, i, :5].tolist() == head + shares
                assert np.array_equal(left[k, i, dynamiq.WORK_HEAD :], expected)
        memory.check()


@pytest.mark.parametrize("grid", ["balanced", "signed", "uniform"])
def test_dynamiq_finds_the_place_in_a_grid_from_an_estimate(grid: str) -> None:
    """Numbers next to all values, and between them: less than half a step off, by any log2."""
    from tightwire.codecs import dynamiq, dynamiq_codes_triton

    table = dynamiq_codes_triton.tables_of(grid, torch.device("cpu")).numpy()
    for width in range(2, 9):
        half = dynamiq.grid_of(grid, width)[0][1 << width - 1 :].astype(np.float64)
        shapes = table[dynamiq_codes_triton.SHAPES.value + 8 * width :].astype(np.float64)
        v = np.concatenate([np.linspace(a, b, 9) for a, b in itertools.pairwise(half)])
        exact = np.interp(v, half, np.arange(half.size))
        for (offset, slope, factor), ahead in ((shapes[:3], 0.0), (shapes[4:7], 0.5)):
            assert np.abs(np.log2(offset + v * slope) * factor - ahead - exact).max() < 0.4
        # Below the first value of a balanced grid.
        least = np.log2(shapes[0]) * shapes[2]
        assert -0.9 < least < 0 if grid == "balanced" else -0.4 < least < 0.4


@pytest.mark.parametrize("grid", ["balanced", "signed", "uniform"])
def test_dynamiq_bounds_are_the_least_numbers_rounded_up(grid: str) -> None:
    from tightwire.codecs import dynamiq, dynamiq_codes_triton

    half = np.float32(0.5)
    for width in range(2, 9):
        values, inverse = dynamiq.grid_of(grid, width)
        bounds = dynamiq_codes_triton._bounds(values, inverse)
        below = np.nextafter(bounds, np.float32(-2))
        up = (bounds - values[:-1]) * inverse[:-1] > half
        assert np.all(up | (bounds == values[1:]))
        assert not np.any((below - values[:-1]) * inverse[:-1] > half)
        assert np.all(below < values[1:])
        assert np.all((bounds > values[:-1]) | (bounds == 0))


@pytest.mark.parametrize(
    ("at", "value", "checksum", "reason"),
    [
        (200, 1, True, "checksum_mismatch"),
        (88, 4, True, "bad_record"),
        (-128, 9, False, "bad_payload"),
        (-128, 0x88, False, "bad_payload"),
        (-120, 1, False, "bad_payload"),
        (-119, 1, False, "reserved_not_zero"),
        ("words", 0x7F, False, "bad_payload"),
        ("rows", 1, False, "bad_payload"),
    ],
)
def test_dynamiq_finds_damage(
    place: str, at: int | str, value: int, checksum: bool, reason: str
) -> None:
    """Also in what is decoded, added to and encoded; widths that are too many stay inside."""
    dtype, codec = BY_NAME["bfloat16"], tw.codec("dynamiq", rounding="nearest")
    bits = make_bits("zero" if at == "rows" else "normal", dtype, 17 * 256)
    data = np.frombuffer(
        bytes(codec.encode(bits.view(dtype.numpy), checksum=checksum)), np.uint8
    ).copy()
    plan = codec.plan((bits.size,), dtype.name, checksum=checksum)
    payload = plan.static_offset + plan.layout.sections[0].nbytes
    where = {"words": payload + 1, "rows": payload - 128 - 40}.get(str(at), at)
    assert isinstance(where, int)
    data[where] = data[where] ^ value if checksum else value
    with pytest.raises(tw.FormatError, match=reason):
        tw.decode(data.tobytes(), backend="ref")
    memory = Memory(place)
    src = tw.Buffer.wrap(plan, memory.put(data, BY_NAME["uint8"]))
    x, out = memory.put(bits, dtype), memory.take(plan.nbytes)
    with pytest.raises(tw.FormatError, match=reason):
        # At once, as the interpreter's memory is the host's, or when it is asked for.
        codec.decode_add_encode(src, x, out=out, checksum=checksum, backend="triton")
        src.check()
    memory.check()
    if at != 200:
        with pytest.raises(tw.FormatError, match=reason):
            tw.decode(src, backend="triton", verify=True)


def test_dynamiq_keys_on_the_device(place: str) -> None:
    dtype, codec = BY_NAME["bfloat16"], tw.codec("dynamiq", super_group=1024, scales="stochastic")
    bits = make_bits("normal", dtype, 2048)
    x = Memory(place).put(bits, dtype)
    seed = torch.tensor([-5], dtype=torch.int64, device=place)
    expected = codec.encode(bits.view(dtype.numpy), key=tw.Key((1 << 64) - 5, 9, 4, 6))
    found = codec.encode(x, key=tw.Key(seed, 9, 4, 6), backend="triton")
    assert bytes(found) == bytes(expected)
    for key in (tw.Key(seed, 0, 0, 0), tw.Key(seed, 0, -1, 2), tw.Key(1, 2, 3, 1.5)):  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match="allowed"):
            codec.encode(x, key=key, backend="triton")
    with pytest.raises(ValueError, match="needs key"):
        codec.encode(x, backend="triton")
