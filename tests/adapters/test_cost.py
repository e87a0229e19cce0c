"""The cost model: fits, predictions and choices, and the ratios that are fed back to it."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightwire.adapters.collectives import cost
from tightwire.adapters.collectives.cost import (
    COLLECTIVES,
    DEVICES,
    ENTROPY_RATIOS,
    MARGIN,
    RATIOS,
    Collective,
    Device,
    Line,
    Link,
    Model,
    Ratios,
    codec_lines,
    duration,
    expected_ratio,
    fit,
)

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SIZES = [1 << n for n in range(8, 31, 2)]

alphas = st.floats(1e-7, 1e-3)
betas = st.floats(1e-13, 1e-8)
lines = st.builds(Line, alphas, betas)
links = st.builds(Link, alphas, betas, st.none() | alphas)
models = st.builds(Model, lines, lines, lines, lines) | st.builds(
    Model.of, st.sampled_from(COLLECTIVES), st.integers(2, 1000), links, lines, lines
)
ratios = st.floats(0.05, 1.2)
messages = st.integers(0, 1 << 34)
pieces = st.integers(1, 40)


def close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


# Lines and fits


@pytest.mark.parametrize(("alpha", "beta"), [(-1, 0), (0, -1), (math.nan, 0), (0, math.inf)])
def test_a_line_has_no_other_numbers(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Line(alpha, beta)
    with pytest.raises(ValueError, match="at least 0"):
        Link(0, 0, -1.0)


def test_exchange() -> None:
    assert Link(1.0, 0.5).exchange(peers=4, nbytes=10, rounds=2) == 2 * 4 + 5
    assert Link(1.0, 0.5, gap=0.25).exchange(peers=4, nbytes=10, rounds=2) == 2 * 1.75 + 5
    assert Link(1.0, 0.5).exchange(peers=0, nbytes=10) == 0


@given(lines)
def test_fit_of_exact_samples(line: Line) -> None:
    found = fit([(n, line.seconds(n)) for n in SIZES])
    for n in SIZES:
        assert close(found.seconds(n), line.seconds(n), 1e-6)


@given(lines, st.integers(0, 2**32))
def test_fit_under_noise_and_outliers(line: Line, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [(n, line.seconds(n) * rng.uniform(0.97, 1.03)) for n in SIZES for _ in range(4)]
    # At each of three sizes one sample in four waited for something else.
    for i in rng.choice(len(SIZES), 3, replace=False):
        n, seconds = samples[4 * i]
        samples[4 * i] = n, seconds * rng.uniform(3, 100)
    found = fit(samples)
    for n in SIZES:
        assert close(found.seconds(n), line.seconds(n), 0.06)


def test_small_messages_count_in_a_fit() -> None:
    line = Line(10e-6, 1e-10)
    large = 1 << 30
    found = fit([(n, line.seconds(n)) for n in SIZES] + [(large, 1.1 * line.seconds(large))])
    assert close(found.alpha, line.alpha, 1e-3)


@pytest.mark.parametrize("slope", [-1.0, 0.0, 1.0])
def test_fit_is_never_negative(slope: float) -> None:
    found = fit([(n, (1 << 20) + slope * n) for n in (1, 1 << 10, 1 << 18)])
    assert found.alpha >= 0
    assert found.beta >= 0
    if slope <= 0:
        assert found.beta == 0
    # A line below zero at zero bytes: all is put on the bytes.
    assert fit([(1000, 1.0), (2000, 3.0)]).alpha == 0


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(1, 1.0)],
        [(5, 1.0), (5, 1.1)],
        [(1, 1.0), (2, 0.0)],
        [(1, 1.0), (2, math.nan)],
        [(-1, 1.0), (2, 1.0)],
    ],
)
def test_fit_refuses(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="sample"):
        fit(samples)


# Predictions


@given(models, messages, ratios)
def test_one_piece_is_compressed(model: Model, nbytes: int, ratio: float) -> None:
    parts = model.encode.seconds(nbytes) + model.decode.seconds(nbytes)
    wanted = parts + model.wire.seconds(nbytes * ratio)
    assert close(model.compressed(nbytes, ratio), wanted)
    assert model.pipelined(nbytes, ratio, 1) == model.compressed(nbytes, ratio)


def schedule(encode: float, wire: float, decode: float, pieces: int) -> float:
    """Seconds of a real schedule: the processor encodes one piece ahead, then decodes."""
    processor = network = 0.0
    arrived: list[float] = []
    for i in range(pieces):
        processor += encode
        network = max(network, processor) + wire
        arrived.append(network)
        if i:
            processor = max(processor, arrived[i - 1]) + decode
    return max(processor, arrived[-1]) + decode


@given(models, messages, ratios, pieces)
def test_pipelined_can_be_scheduled(model: Model, nbytes: int, ratio: float, pieces: int) -> None:
    each = nbytes / pieces
    times = model.encode.seconds(each), model.wire.seconds(each * ratio), model.decode.seconds(each)
    predicted = model.pipelined(nbytes, ratio, pieces)
    assert schedule(*times, pieces) <= predicted * (1 + 1e-9)
    encode, wire, decode = times
    assert predicted >= max(pieces * wire, pieces * (encode + decode)) * (1 - 1e-9)


@given(models, messages, messages, ratios, ratios, pieces)
def test_more_bytes_take_longer(
    model: Model, a: int, b: int, r: float, s: float, pieces: int
) -> None:
    (a, b), (r, s) = sorted((a, b)), sorted((r, s))
    slack = 1 + 1e-12
    assert model.native.seconds(a) <= model.native.seconds(b)
    assert model.pipelined(a, r, pieces) <= model.pipelined(b, r, pieces) * slack
    assert model.pipelined(a, r, pieces) <= model.pipelined(a, s, pieces) * slack


# Choices


@given(models, messages, ratios, pieces)
def test_a_choice_is_never_slower_than_native(
    model: Model, nbytes: int, ratio: float, most: int
) -> None:
    choice = model.choose(nbytes, ratio, most)
    assert choice.native_seconds == model.native.seconds(nbytes)
    assert duration(choice.native_seconds) in choice.reason
    fastest = min(model.pipelined(nbytes, ratio, n) for n in (1, 2, 4, 8, 16, 32) if n <= most)
    if choice.algorithm == "native":
        assert (choice.pieces, choice.seconds) == (1, choice.native_seconds)
        if nbytes > 40:
            assert fastest >= choice.native_seconds * (1 - MARGIN)
        return
    assert choice.seconds < choice.native_seconds * (1 - MARGIN)
    assert choice.pieces <= most
    assert (choice.pieces > 1) == (choice.algorithm == "pipelined")
    assert choice.seconds == model.pipelined(nbytes, ratio, choice.pieces)
    # What was left for another margin is at most one margin.
    assert choice.seconds * (1 - MARGIN) <= fastest or nbytes <= 40


@given(models, messages, ratios, ratios)
def test_a_better_ratio_never_stops_compression(
    model: Model, nbytes: int, r: float, s: float
) -> None:
    r, s = sorted((r, s))
    if model.choose(nbytes, s).algorithm != "native":
        assert model.choose(nbytes, r).algorithm != "native"


@given(models, ratios, st.sampled_from([1, 16]))
def test_crossover(model: Model, ratio: float, most: int) -> None:
    at = model.crossover(ratio, most)
    if at is None:
        assert model.choose(1 << 50, ratio, most).algorithm == "native"
        return
    assert model.choose(at, ratio, most).algorithm != "native"
    if at:
        assert model.choose(at - 1, ratio, most).algorithm == "native"
    for size in (1 << n for n in range(51)):
        if size >= at:
            assert model.choose(size, ratio, most).algorithm != "native"


def test_both_answers_happen() -> None:
    """So the properties above are not about one of them alone."""
    link = Link(5e-6, 1 / 25e9)
    model = Model.of("send", 2, link, *codec_lines("h200", "bfloat16"))
    assert model.choose(64, 0.7).algorithm == "native"
    large = model.choose(1 << 28, 0.7)
    assert large.algorithm == "compressed"
    assert large.reason == "compressed 7.78 ms < native 10.7 ms"
    slow = Model.of("send", 2, link, *codec_lines("cpu", "bfloat16"))
    assert slow.choose(1 << 28, 0.7).algorithm == "native"
    assert slow.crossover(0.7) is None
    # Encoding and decoding take as long as the wire: pieces hide the one behind the other.
    even = replace(model, encode=Line(1e-6, 0.35 / 25e9), decode=Line(1e-6, 0.35 / 25e9))
    choice = even.choose(1 << 28, 0.7)
    assert (choice.algorithm, choice.pieces) == ("pipelined", 16)
    assert choice.reason.startswith("pipelined in 16 pieces ")
    assert even.choose(1 << 28, 0.7, max_pieces=1).algorithm == "native"


@pytest.mark.parametrize(
    ("nbytes", "ratio", "most"), [(-1, 0.7, 1), (1, 0.0, 1), (1, math.nan, 1), (1, 0.7, 0)]
)
def test_choose_refuses(nbytes: int, ratio: float, most: int) -> None:
    line = Line(0.0, 1.0)
    with pytest.raises(ValueError, match="allowed"):
        Model(line, line, line, line).choose(nbytes, ratio, most)


# Models


@given(lines, lines, st.floats(0.1, 1.0))
def test_measured_gives_its_samples_back(native: Line, compressed: Line, ratio: float) -> None:
    plain, whole = ([(n, line.seconds(n)) for n in SIZES] for line in (native, compressed))
    model = Model.measured(plain, whole, ratio)
    for n in SIZES:
        assert close(model.native.seconds(n), native.seconds(n), 1e-5)
        assert close(model.compressed(n, ratio), compressed.seconds(n), 1e-5)


@given(links, lines, lines, st.floats(0.1, 1.0), ratios)
def test_measured_predicts_other_ratios(
    link: Link, encode: Line, decode: Line, ratio: float, other: float
) -> None:
    true = Model(Line(link.alpha, link.beta), Line(link.alpha, link.beta), encode, decode)
    plain = [(n, true.native.seconds(n)) for n in SIZES]
    whole = [(n, true.compressed(n, ratio)) for n in SIZES]
    found = Model.measured(plain, whole, ratio)
    for n in SIZES:
        assert close(found.compressed(n, other), true.compressed(n, other), 1e-4)


def test_host_time_hides_no_bytes_beyond_what_was_measured() -> None:
    """Calls take what the host takes, up to the largest; the line through them is flat."""
    sizes = [1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28]
    whole = [(n, max(1e-3, n * 4e-12)) for n in sizes]
    fast = [(n, 20e-6 + n / 280e9) for n in sizes]
    model = Model.measured(fast, whole, 0.7)
    n = 1 << 29
    guess = replace(model, largest=None)
    assert guess.choose(n, 0.7, 1).algorithm == "compressed"
    assert model.choose(n, 0.7, 1).algorithm == "native"
    assert model.choose(n, 0.7, 1).native_seconds == pytest.approx(20e-6 + n / 280e9, rel=0.01)
    slow = [(n, 20e-6 + n / 25e9) for n in sizes]
    assert Model.measured(slow, whole, 0.7).choose(n, 0.7, 1).algorithm == "compressed"


def test_beyond_what_was_measured_more_must_be_gained() -> None:
    sizes = [1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28]
    native = [(n, 20e-6 + n / 250e9) for n in sizes]
    for gain, expected in ((0.9, "native"), (0.8, "compressed")):
        model = Model.measured(native, [(n, gain * s) for n, s in native], 0.7)
        assert model.choose(1 << 28, 0.7, 1).algorithm == "compressed"
        choice = model.choose(1 << 29, 0.7, 1)
        assert choice.algorithm == expected
        assert ("not 15% below" in choice.reason) == (expected == "native")


def test_a_crossover_beyond_what_was_measured_is_found() -> None:
    sizes = [1 << 13, 1 << 17, 1 << 21]
    plain = [(n, 1e-4 + n * 1e-9) for n in sizes]
    model = Model.measured(plain, [(n, 1.1e-3 + n * 0.8e-9) for n in sizes], 0.7)
    assert model.choose(1 << 21, 0.7, 1).algorithm == "native"
    assert model.choose(1 << 26, 0.7, 1).algorithm == "compressed"
    # Where the gain is that of FAR_MARGIN.
    assert model.crossover(0.7, 1) == pytest.approx(20.3e6, rel=0.01)


def test_models_of_one_rank_never_compress() -> None:
    for collective in COLLECTIVES:
        model = Model.of(collective, 1, Link(1e-6, 1e-9), Line(1e-6, 0), Line(1e-6, 0))
        if collective not in ("broadcast", "send"):
            assert model.native == Line(0, 0)
        assert model.crossover(0.5) is None, collective


def test_models_by_hand() -> None:
    link = Link(1.0, 10.0, gap=0.5)
    made = {c: Model.of(c, 4, link, Line(1, 2), Line(3, 4)) for c in COLLECTIVES}
    # A round to three others: 1 + 2 * 0.5.
    assert made["all_gather"] == Model(Line(2, 30), Line(6, 30), Line(1, 2), Line(3, 16))
    assert made["all_to_all"] == Model(Line(2, 7.5), Line(6, 7.5), Line(1, 2), Line(3, 4))
    assert made["reduce_scatter"] == Model(Line(2, 7.5), Line(6, 7.5), Line(1, 2), Line(12, 4))
    assert made["all_reduce"] == Model(Line(4, 15), Line(12, 15), Line(2, 2.5), Line(15, 8))
    assert made["broadcast"] == Model(Line(2, 10), Line(8, 15), Line(1, 2), Line(3, 4))
    assert made["send"] == Model(Line(1, 10), Line(2, 10), Line(1, 2), Line(3, 4))


@pytest.mark.parametrize(("collective", "world"), [("gather", 2), ("send", 0)])
def test_models_refuse(collective: Collective, world: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Model.of(collective, world, Link(0, 1), Line(0, 0), Line(0, 0))


# Constants


def test_nothing_heavy_is_imported() -> None:
    code = """
import sys
import tightwire.adapters.collectives.cost, tightwire.adapters.collectives.simulate
print(sorted({"torch", "numba", "jax", "triton", "scipy", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_recorded_speeds_are_those_of_the_records() -> None:
    recorded = json.loads((RESULTS / "gpu.json").read_text())
    found: dict[str, list[tuple[int, ...]]] = {}
    for case in recorded["cases"]:
        speeds = {
            t["op"]: round(t["GB/s"])
            for t in case["timings"]
            if t["how"] == "cold" and not t["checksum"] and t["op"] in ("encode", "decode")
        }
        if case["data"] == "gaussian":
            row = case["mib"], speeds["encode"], speeds["decode"]
            found.setdefault(case["dtype"], []).append(row)
    assert {dtype: tuple(sorted(rows)) for dtype, rows in found.items()} == cost._H200
    recorded = json.loads((RESULTS / "cpu.json").read_text())
    speeds = {b["name"]: b["extra_info"]["GB/s"] for b in recorded["benchmarks"]}
    for dtype, pair in cost._CPU.items():
        named = (f"test_encode[1-{dtype}]", f"test_decode[1-{dtype}]")
        assert pair == tuple(round(speeds[name], 2) for name in named)


def test_lines_fit_the_records() -> None:
    encode, decode = codec_lines("h200", "bfloat16")
    for mib in (2, 1024):
        ((encoded, decoded),) = [row[1:] for row in cost._H200["bfloat16"] if row[0] == mib]
        nbytes = mib << 20
        assert close(encode.seconds(nbytes), nbytes / (encoded * 1e9), 0.1)
        assert close(decode.seconds(nbytes), nbytes / (decoded * 1e9), 0.1)
    encode, decode = codec_lines("cpu", "float32")
    assert close(encode.seconds(1 << 26), (1 << 26) / 5.99e9, 1e-6)
    assert close(decode.seconds(1024), 37e-6, 1e-6)


@pytest.mark.parametrize(
    ("device", "dtype"), [("h200", "float64"), ("cpu", "int32"), ("tpu", "bfloat16")]
)
def test_speeds_without_a_record(device: Device, dtype: str) -> None:
    with pytest.raises(ValueError, match=r"recorded|allowed"):
        codec_lines(device, dtype)
    assert "tpu" not in DEVICES


def test_expected_ratios() -> None:
    assert expected_ratio("zipccl", "bfloat16") == RATIOS["bfloat16"]
    assert expected_ratio("zipccl", "float8_e4m3fnuz") == RATIOS["float8_e4m3fn"]
    assert expected_ratio("zipccl", "int32") == 1.0
    assert expected_ratio("huffman", "bfloat16") == ENTROPY_RATIOS["bfloat16"]
    assert expected_ratio("raw", "bfloat16") == 1.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (5e-6, "5 us"), (0.0081, "8.1 ms"), (1.5, "1.5 s"), (12345.6, "12346 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Ratios


@given(st.lists(st.floats(0.01, 1.1), min_size=1, max_size=20), st.floats(0.01, 1))
def test_a_mean_lies_between_its_values(values: list[float], weight: float) -> None:
    found = Ratios(weight)
    for value in values:
        found.update("zipccl", "bfloat16", 5000, value)
    assert min(values) - 0.006 <= found.ratio("zipccl", "bfloat16", 4096) <= max(values) + 0.006


keys = st.tuples(
    st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]), st.sampled_from([0, 1, 3, 4])
)


@given(st.lists(st.tuples(keys, ratios | st.none()), max_size=60))
def test_equal_calls_get_equal_answers(calls: list[tuple[tuple[str, str, int], float]]) -> None:
    ranks = Ratios(patience=3), Ratios(patience=3)
    for key, value in calls:
        if value is None:
            a, b = (rank.ratio(*key) for rank in ranks)
            assert a == b
            assert a == round(a, 2)
        else:
            for rank in ranks:
                rank.update(*key, value)


def test_classes_are_apart() -> None:
    found = Ratios()
    for i, key in enumerate(itertools.product("ab", "xy", (1, 2, 4, 8))):
        found.update(*key, (i + 1) / 20)
    for i, key in enumerate(itertools.product("ab", "xy", (1, 2, 4, 8))):
        assert found.ratio(*key) == (i + 1) / 20
    assert found.ratio("a", "x", 16) == 1.0


def test_the_newest_value_has_the_weight() -> None:
    found = Ratios(0.25)
    for value in (0.6, 1.0, 0.5):
        found.update("zipccl", "bfloat16", 100, value)
    # 0.6, then 0.7, then 0.65.
    assert found.ratio("zipccl", "bfloat16", 100) == 0.65


def test_an_old_mean_is_forgotten() -> None:
    found = Ratios(patience=3)
    found.update("zipccl", "bfloat16", 100, 1.0)
    asked = [found.ratio("zipccl", "bfloat16", 100) for _ in range(5)]
    assert asked == [1.0, 1.0, 1.0, RATIOS["bfloat16"], RATIOS["bfloat16"]]
    for weight, patience in ((0.0, 1), (1.1, 1), (0.5, 0)):
        with pytest.raises(ValueError, match="allowed"):
            Ratios(weight, patience)
