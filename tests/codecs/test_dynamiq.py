"""dynamiq: its budget, its widths, error bounds and means, correlated rounding, sums over hops."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples, make_bits
from tightwire.codecs.common.philox import KeyNumbers, random_words
from tightwire.codecs.dynamiq import (
    ANY_STEPS,
    GRIDS,
    GROUPS,
    POW2_STEPS,
    ROUNDINGS,
    SCALES,
    SHARED_STREAM,
    SUPER_GROUPS,
    WIDTHS,
    Dynamiq,
    choose_widths,
    grid_of,
    widths_of,
)
from tightwire.formats.dtypes import BY_NAME, DType

Array = npt.NDArray[Any]
DTYPES = tuple(BY_NAME[name] for name in Dynamiq.dtypes)
KEY = tw.Key(11, 22, 3, 8)
finfo: Any = ml_dtypes.finfo


def spec_of(codec: tw.Codec) -> Dynamiq:
    assert isinstance(codec.spec, Dynamiq)
    return codec.spec


def vnmse(x: Array, y: Array) -> float:
    wide = x.astype(np.float64)
    return float(((y.astype(np.float64) - wide) ** 2).sum() / (wide**2).sum())


def local_data(ranks: int, n: int, spread: float, seed: int = 0) -> Array:
    """Gradients of ranks, float32: Student's t(4), of a scale for each 256 that ranks share."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(spread * rng.standard_normal(-(-n // 256))), 256)[:n]
    x: Array = (rng.standard_t(4, (ranks, n)) * scale).astype(np.float32)
    return x


def ring(codec: tw.Codec, xs: Array, seed: int = 1, backend: str | None = None) -> Array:
    """The sum that travels over all ranks, each of which adds its own and encodes it again."""
    world = len(xs)
    stats = np.sum([codec.measure(x) for x in xs], axis=0, dtype=np.float32)
    buf = codec.encode(xs[0], stats=stats, key=tw.Key(seed, 0, 0, world), backend=backend)
    for rank in range(1, world):
        key = tw.Key(seed, 0, rank, world)
        buf = codec.decode_add_encode(buf, xs[rank], key=key, backend=backend)
    y: Array = tw.decode(buf, backend=backend)
    return y


def ring_error(xs: Array, **params: Any) -> float:
    return vnmse(xs.sum(axis=0, dtype=np.float64), ring(tw.codec("dynamiq", **params), xs))


def largest_errors(buf: tw.Buffer) -> npt.NDArray[np.float64]:
    """The page's bound of every element of a buffer of one chunk, without R."""
    spec, plan = buf.plan.codec, buf.plan
    assert isinstance(spec, Dynamiq)
    data = np.frombuffer(bytes(buf), np.uint8)
    widths = widths_of(spec, plan.chunk(0, data, data[:0]))
    assert widths is not None
    n, at = widths.size, plan.static_offset + plan.layout.sections[0].nbytes
    wide = spec.scales == "wide"
    words = data[at : at + 2 * n * (spec.groups if wide else 1)].view("<u2").astype("<u4")
    scales = (words << 16).astype("<u4").view("<f4").astype(np.float64)
    if not wide:
        at += 2 * n * (1 + spec.center)
        fractions = data[at : at + n * spec.groups].astype(np.float64)
        unit = np.repeat(scales / 255, spec.groups)
        scales = (fractions + (spec.scales == "stochastic")) * unit
    steps = np.array([np.diff(grid_of(spec.grid, int(w))[0]).max() for w in widths])
    found = np.repeat(scales, spec.group) * np.repeat(steps, spec.super_group)
    nearest = 0.5 if spec.rounding == "nearest" else 1.0
    bound: npt.NDArray[np.float64] = found[: plan.nelem] * nearest
    if spec.scales == "stochastic":
        # How far off the scale may be counts in full.
        bound += np.repeat(unit, spec.group)[: plan.nelem]
    return bound


@examples(120)
@given(
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from((5, 4.5, 8)),
    group=st.sampled_from((16, 32, 64)),
    super_group=st.sampled_from(SUPER_GROUPS),
    choices=st.tuples(*map(st.sampled_from, (WIDTHS, GRIDS, SCALES, ROUNDINGS))),
    center=st.booleans(),
    n=st.integers(1, 6000),
    power=st.floats(-80, 127),
    spread=st.floats(0, 6),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_error_is_within_the_bound_of_the_page(
    dtype: DType,
    bits: float,
    group: int,
    super_group: int,
    choices: tuple[str, str, str, str],
    center: bool,
    n: int,
    power: float,
    spread: float,
    zeros: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    scale = np.repeat(2.0 ** (power + spread * rng.standard_normal(-(-n // 100))), 100)[:n]
    largest = float(finfo(dtype.numpy).max)
    values = np.clip(rng.standard_normal(n) * scale, -largest, largest)
    values[rng.random(n) < zeros] = 0
    x = values.astype(dtype.numpy)
    params = dict(zip(("widths", "grid", "scales", "rounding"), choices, strict=True))
    codec = tw.codec(
        "dynamiq", bits=bits, group=group, super_group=super_group, center=center, **params
    )
    buf = codec.encode(x, key=KEY)
    y = tw.decode(buf).astype(np.float64)
    if buf.header.codec == "raw":
        assert y.astype(dtype.numpy).tobytes() == x.tobytes()
        return
    assert np.isfinite(y).all()
    wide = x.astype(np.float64)
    info = finfo(dtype.numpy)
    rounded = np.abs(y) * float(info.eps) / 2 + float(info.smallest_subnormal) / 2
    bound = 1.0001 * largest_errors(buf) + rounded + 2.0**-99
    # The scale of a super-group with a magnitude beyond bfloat16 is the largest there is.
    bound += np.where(np.abs(wide) > 3.38e38, np.abs(wide) * 2.0**-8, 0)
    # About a mean, values are subtracted and added in single precision.
    bound += center * (np.abs(wide) + np.abs(y)) * 2.0**-22
    wrong = np.flatnonzero(np.abs(y - wide) > bound)
    assert not wrong.size, (wide[wrong[:3]], y[wrong[:3]], bound[wrong[:3]])


@examples(150)
@given(
    energies=st.lists(st.sampled_from((0.0, 1.0, 2.0, 2.5, 10.0, 1e-20, 1e20, 3e38)), max_size=40),
    widths=st.sampled_from(("any", "pow2")),
    bits=st.sampled_from((3.0, 4.0, 5.0, 6.5, 8.0)),
)
def test_widths_are_those_of_the_steps_that_gain_most(
    energies: list[float], widths: str, bits: float
) -> None:
    """By a queue of steps, as the page's bound has it: the largest gains first, until none fits."""
    spec = Dynamiq(bits=bits, widths=widths)
    found = choose_widths(spec, np.array(energies, np.float32), spec.units(256 * len(energies)))
    steps = ANY_STEPS if widths == "any" else POW2_STEPS
    expected = [2] * len(energies)
    left = spec.units(256 * len(energies)) - 2 * len(energies)
    queue = [
        (-float(np.float32(energy) * np.float32(gain)), j, k)
        for j, energy in enumerate(energies)
        for k, (_, _, gain) in enumerate(steps)
        if energy > 0
    ]
    heapq.heapify(queue)
    while queue:
        _, j, k = heapq.heappop(queue)
        width, cost, _ = steps[k]
        if cost > left:
            break
        expected[j] = width
        left -= cost
    assert found.tolist() == expected


@pytest.mark.parametrize("bits", [3, 4.25, 5, 6, 8])
def test_a_buffer_keeps_to_its_budget(bits: float) -> None:
    n = 1 << 16
    for spread in (0.0, 2.0):
        x = local_data(1, n, spread)[0]
        for widths in WIDTHS:
            buf = tw.codec("dynamiq", bits=bits, widths=widths).encode(x, key=KEY)
            assert 8 * (buf.nbytes - 128) <= n * bits + 8 * 3 * 128


def test_a_bit_more_is_a_third_of_the_error() -> None:
    x = local_data(1, 1 << 15, 0.0)[0]
    codecs = [tw.codec("dynamiq", bits=bits) for bits in (3, 4, 5, 6, 7, 8)]
    errors = [vnmse(x, tw.decode(codec.encode(x, key=KEY))) for codec in codecs]
    assert all(more < less / 2.9 for less, more in itertools.pairwise(errors))


def test_flat_energies_give_neighbouring_widths() -> None:
    spec = Dynamiq()
    widths = choose_widths(spec, np.full(100, 3.5, np.float32), spec.units(25600))
    assert (widths.min(), widths.max(), widths.sum()) == (4, 5, spec.units(25600))
    noisy = np.random.default_rng(0).uniform(0.8, 1.25, 100).astype(np.float32)
    assert set(choose_widths(spec, noisy, spec.units(25600))) == {4, 5}
    assert set(choose_widths(spec, np.zeros(100, np.float32), 800)) == {2}


def test_ring_of_eight_ranks() -> None:
    """The vNMSE that the notes ask for on data with locality, log-sigma 1.6, at 5 bits."""
    worst: dict[str, float] = {}
    for seed in range(2):
        xs = local_data(8, 1 << 17, 1.6, seed)
        for widths in ("any", "pow2"):
            worst[widths] = max(worst.get(widths, 0), ring_error(xs, widths=widths))
        mx, exact = tw.codec("mx"), xs.sum(axis=0, dtype=np.float64)
        total = mx.encode(xs[0])
        for x in xs[1:]:
            total = mx.decode_add_encode(total, x)
        assert worst["any"] < vnmse(exact, tw.decode(total)) / 4
    assert worst["any"] <= 7e-4
    assert worst["pow2"] <= 1.3e-3


def test_every_component_helps_where_data_has_locality() -> None:
    xs = local_data(8, 1 << 17, 1.6, 3)
    whole = ring_error(xs)
    for other in (
        {"widths": "pow2"},
        {"grid": "signed"},
        {"rounding": "stochastic"},
        {"scales": "wide", "group": 32},
    ):
        assert ring_error(xs, **other) > 1.05 * whole, other
    assert ring_error(xs, widths="fixed") > 10 * whole
    assert ring_error(xs, grid="uniform") > 1.05 * ring_error(xs, grid="signed")


def test_means_help_where_there_are_some() -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(1 << 14) + 5).astype(np.float32)
    error = [
        vnmse(x, tw.decode(tw.codec("dynamiq", center=center).encode(x, key=KEY)))
        for center in (False, True)
    ]
    assert error[1] < error[0] / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scales", "world"), [("up", 1), ("stochastic", 1), ("wide", 1), ("up", 8)]
)
def test_rounding_is_unbiased(scales: str, world: int) -> None:
    """Means over seeds lie within 6 standard errors, and their error falls as their number grows.

    Each of the 4096 elements is within the bound with a chance above 1 - 2e-8, if errors were
    normal; the keys are fixed, so the test never wavers.
    """
    x = local_data(1, 4096, 1.0, 4)[0]
    codec = tw.codec("dynamiq", scales=scales, group=32)
    draws = 600
    keys = [tw.Key(seed, rank=3, world=world) for seed in range(draws)]
    ys = np.stack([tw.decode(codec.encode(x, key=key)) for key in keys])
    error = ys.astype(np.float64) - x
    mean, deviation = error.mean(axis=0), error.std(axis=0)
    # What hardly ever goes up may not have done so yet: a tenth of the largest step.
    step = largest_errors(codec.encode(x, key=KEY))
    assert (np.abs(mean) <= 6 * deviation / draws**0.5 + step / 30).all()
    ratio = (mean**2).sum() / (deviation**2).sum() * draws
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize("world", [2, 5, 8])
def test_errors_of_correlated_ranks_cancel(world: int) -> None:
    """Ranks with the same values round up as often as their sum asks, one time more or less."""
    x = local_data(1, 5888, 0.5, 5)[0]
    codec = tw.codec("dynamiq")
    bufs = [codec.encode(x, key=tw.Key(1, 2, rank, world)) for rank in range(world)]
    total = np.sum([tw.decode(buf) for buf in bufs], axis=0, dtype=np.float64)
    step = largest_errors(bufs[0])
    # Of an odd number one stratum, of world + 1, has no rank.
    most = 1.0 if world % 2 == 0 else 2 - 2 / (world + 1)
    assert (np.abs(total - world * x.astype(np.float64)) <= most * 1.001 * step).all()
    apart = tw.codec("dynamiq", rounding="stochastic")
    keys = [tw.Key(1, 2, rank, world) for rank in range(world)]
    alone = np.sum([tw.decode(apart.encode(x, key=key)) for key in keys], axis=0, dtype=np.float64)
    assert vnmse(x, np.asarray(total / world)) < 0.7 * vnmse(x, np.asarray(alone / world))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(8, 256), (5, 128)])
def test_strata_are_shared_by_eight_neighbours_of_a_row(
    world: int, size: int, backend: str
) -> None:
    """Of numbers k / n of the way to the next code, those in the first k strata go up."""
    params = {"widths": "fixed", "grid": "uniform", "scales": "wide", "group": 64}
    codec = tw.codec("dynamiq", bits=3, super_group=size, **params)
    strata = world + world % 2
    steps = np.arange(5 * size - 35) % strata
    x = (steps / strata).astype(np.float32)
    # Of whole groups, whose scales are 1, in both chunks.
    x[::7] = 1
    chunks = 2
    for rank in range(world):
        buf = codec.encode(x, key=tw.Key(5, 6, rank, world), chunks=chunks, backend=backend)
        y = tw.decode(buf)
        assert set(y) == {0.0, 1.0}
        for e in np.flatnonzero(x < 1).tolist():
            first = e // buf.plan.chunk_nelem * buf.plan.chunk_nelem
            group = first // size + (e - first) // size
            row, column = divmod((e - first) % size, size // 8)
            number = (group * size // 64 + column // 8) * 4 + row // 2
            word = int(random_words(KeyNumbers(5, 6, 0), number, 1, SHARED_STREAM)[0])
            f = (word >> 16 * (row % 2) & 0xFFFF) * strata >> 16
            s = (rank // 2 + f // 2) % (strata // 2)
            s = strata - 1 - s if (f + rank) % 2 else s
            assert y[e] == (s < steps[e]), (rank, e)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_a_super_group_with_a_bad_value_is_lost_and_no_other(
    dtype: DType, bad: float, backend: str
) -> None:
    for scales, center in itertools.product(SCALES, (False, True)):
        codec = tw.codec("dynamiq", scales=scales, group=32, super_group=128, center=center)
        x = make_bits("normal", dtype, 1500).view(dtype.numpy).copy()
        stats = codec.measure(x)
        expected = tw.decode(codec.encode(x, stats=stats, key=KEY, backend=backend))
        x[700] = bad
        assert np.isfinite(codec.measure(x)).all()
        buf = codec.encode(x, stats=stats, key=KEY, backend=backend)
        y = tw.decode(buf, backend=backend)
        lost = np.arange(1500) // 128 == 700 // 128
        nan = ((1 << dtype.exponent + 1) - 1) << dtype.mantissa - 1
        assert (y.view(dtype.bits)[lost] == nan).all()
        assert y[~lost].tobytes() == expected[~lost].tobytes()


def test_zeros_and_largest_numbers() -> None:
    for grid, scales in itertools.product(GRIDS, SCALES):
        codec = tw.codec("dynamiq", grid=grid, scales=scales, group=32)
        for x in (np.zeros(3000), np.full(3000, -0.0), np.full(3000, 1e-41)):
            y = tw.decode(codec.encode(x.astype(np.float32), key=KEY))
            assert not y.any()
            assert not np.signbit(y).any()
        for dtype in DTYPES:
            x = np.full(3001, finfo(dtype.numpy).max, dtype.numpy)
            x[1::2] *= -1
            y = tw.decode(codec.encode(x, key=KEY))
            ratio = y.astype(np.float64) / x.astype(np.float64)
            assert np.isfinite(y).all()
            assert (np.abs(ratio - 1) < 0.25).all()
    # Of groups of zeros beside others.
    x = np.repeat(np.tile([1.0, 0.0], 100), 16).astype(np.float32)
    assert not tw.decode(tw.encode(x, "dynamiq", key=KEY)).reshape(-1, 16)[1::2].any()


def test_ranks_whose_stats_differ_decode_the_same(backend: str) -> None:
    """Widths are in the buffer: nothing depends on what a reader has measured."""
    xs = local_data(2, 4096, 1.0)
    codec = tw.codec("dynamiq")
    stats = [codec.measure(x) for x in xs]
    bufs = [codec.encode(xs[0], stats=s, key=KEY, backend=backend) for s in stats]
    assert bytes(bufs[0]) != bytes(bufs[1])
    for buf in bufs:
        assert vnmse(xs[0], tw.decode(bytes(buf), backend=backend)) < 0.02


def test_stats_are_energies() -> None:
    x = local_data(1, 868, 1.0)[0]
    squares = np.append(x.astype(np.float64) ** 2, np.zeros(156)).reshape(-1, 256)
    codec = tw.codec("dynamiq")
    assert codec.reduce_op == "sum"
    stats = codec.measure(x)
    assert stats.dtype == np.float32
    assert np.allclose(stats, squares.sum(axis=1), rtol=1e-5)
    centered = tw.codec("dynamiq", center=True).measure(x + 100)
    spread = np.array([np.var(x[i : i + 256]) * x[i : i + 256].size for i in range(0, x.size, 256)])
    # Means are rounded to 8 bits.
    assert (centered < spread * 1.01 + 256 * 0.26**2).all()
    for bad, error in (
        (stats[:-1], "shape"),
        (np.append(stats, stats[:1]), "shape"),
        (stats.astype(np.float64), "float64"),
        (stats.reshape(1, -1), "allowed: float32"),
        (-stats, "negative"),
        (stats * np.float32(np.nan), "not finite"),
    ):
        with pytest.raises(ValueError, match=error):
            codec.encode(x, stats=bad, key=KEY)
    assert tw.codec("dynamiq").measure(np.ones(3000)) is None


def test_chunks_take_the_widths_of_their_place() -> None:
    """A loud super-group gets its bits in whichever chunk it lies, also across its border."""
    x = local_data(1, 4096, 0.0, 7)[0]
    x[1280:1536] *= 1000
    codec = tw.codec("dynamiq")
    spec = spec_of(codec)
    for chunks in (1, 2, 3, 5):
        buf = codec.encode(x, chunks=chunks, key=KEY)
        data = np.frombuffer(bytes(buf), np.uint8)
        loud = []
        for i in range(chunks):
            chunk = buf.plan.chunk(i, data, data[:0])
            widths = widths_of(spec, chunk)
            assert widths is not None
            starts = chunk.first + 256 * np.arange(widths.size)
            touches = (starts < 1536) & (starts + 256 > 1280)
            loud += widths[touches].tolist()
            assert not touches.any() or widths[~touches].max() <= widths[touches].min()
        assert min(loud) >= 6


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"bits": 2.9375}, ValueError),
        ({"bits": 8.5}, ValueError),
        ({"bits": 4.4}, ValueError),
        ({"bits": float("nan")}, ValueError),
        ({"bits": True}, TypeError),
        ({"bits": "5"}, TypeError),
        ({"group": 4}, ValueError),
        ({"group": 16.0}, TypeError),
        ({"super_group": 64}, ValueError),
        ({"super_group": True}, TypeError),
        ({"widths": "all"}, ValueError),
        ({"grid": 1}, TypeError),
        ({"scales": "down"}, ValueError),
        ({"rounding": None}, TypeError),
        ({"center": 1}, TypeError),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("dynamiq", **params)


@pytest.mark.parametrize("codec", ["dynamiq", "omnireduce"])
def test_budgets_of_numpy_are_those_of_python(codec: str) -> None:
    for kind in (np.int64, np.float32, np.float64, np.uint8):
        # All ranks compare the text.
        assert repr(tw.codec(codec, bits=kind(5))) in {
            repr(tw.codec(codec, bits=5)),
            repr(tw.codec(codec, bits=5.0)),
        }


def test_remarks() -> None:
    rng = np.random.default_rng(0)
    flat = rng.uniform(1, 1.5, 300).astype(np.float32)
    small = np.full(300, 2.0**-101, np.float32)
    for widths, said in (
        ("any", "their widths are equal or neighbours"),
        ("pow2", "widths 'any' have less error"),
    ):
        spec = Dynamiq(widths=widths)
        start = "energies are flat, nine of ten within a factor of 4: "
        assert spec.remark(flat) == start + said
        assert spec.remark(flat * np.float32(10) ** np.arange(-30, 30, 0.2)) is None
        for stats in (small, small * 0):
            assert spec.remark(stats) == "energies are all below 2^-100: widths are the least"
        assert spec.remark(np.append(small, np.float32(1))) == start + said
    assert Dynamiq(widths="fixed").remark(flat) is None


def test_values_whose_squares_do_not_count_get_the_least_widths() -> None:
    """Though there are bits for more; scaled up they get them."""
    codec = tw.codec("dynamiq")
    x = np.random.default_rng(0).standard_normal(1 << 14).astype(np.float32)
    errors = []
    for scale in (1e-12, 1e-19):
        y = x * np.float32(scale)
        found = tw.decode(codec.encode(y, key=KEY)).astype(np.float64)
        errors.append(float(((found - y) ** 2).sum() / (y.astype(np.float64) ** 2).sum()))
    assert errors[0] < 0.01 < 0.1 < errors[1]


def test_budgets_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the least is 3\.078125"):
        tw.codec("dynamiq", bits=3, group=8)
    assert spec_of(tw.codec("dynamiq", bits=3.125, group=8)).units(2560) >= 20
    with pytest.raises(ValueError, match="the least is"):
        tw.codec("dynamiq", bits=3, scales="wide")


def test_parameters_come_back() -> None:
    sizes = itertools.product((4.0, 5.0625, 8.0), GROUPS, SUPER_GROUPS)
    choices = itertools.product(WIDTHS, GRIDS, SCALES, ROUNDINGS, (False, True))
    for (bits, group, size), chosen in zip(sizes, itertools.cycle(choices), strict=False):
        if chosen[2] == "wide" and group < 32:
            continue
        spec = Dynamiq(bits, group, size, *chosen)
        assert Dynamiq.unpack_params(spec.pack_params()) == spec


def test_codes_follow_the_number_of_ranks(backend: str) -> None:
    codec = tw.codec("dynamiq", scales="stochastic")
    x = make_bits("scales", BY_NAME["bfloat16"], 9000).view(ml_dtypes.bfloat16)
    keys = (KEY, KEY._replace(world=6))
    assert len({bytes(codec.encode(x, key=key, backend=backend)) for key in keys}) == 2
    for world, error in ((0, ValueError), (65537, ValueError), ("8", TypeError), (True, TypeError)):
        allowed = "1 to 65536" if error is ValueError else "an integer"
        with pytest.raises(error, match=f"world of the key is .*; allowed: {allowed}$"):
            codec.encode(x, key=tw.Key(1, 2, 3, world), backend=backend)  # type: ignore[arg-type]
