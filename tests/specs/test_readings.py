"""Wrong readings of the pages: each fails a vector. And statements that no vector can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from decoders import common as decoder
from decoders.buffer import decode as decode_of_the_pages
from decoders.common import FormatError
from support import KEY, vector_key
from tightwire.codecs import dynamiq, sdp4bit, tahquant, thc
from tightwire.codecs.common import norms, philox
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import spec_class

VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors"
F32 = np.float32
Wrong = Callable[[Any], Callable[..., Any]]


def encoded_again(name: str) -> tuple[bytes, bytes]:
    """What the reference makes of a vector's input, and the vector."""
    data = (VECTORS / f"{name}.tw").read_bytes()
    header = tw.inspect(data).header
    x = np.frombuffer((VECTORS / f"{name}.input").read_bytes(), header.dtype.numpy)
    key = vector_key(name)
    codec = tw.Codec(spec_class(header.codec).unpack_params(header.params))
    x = x.reshape(header.shape)
    return bytes(codec.encode(x, chunks=header.chunks, key=key, backend="ref")), data


def tensor_bits(name: str) -> npt.NDArray[Any]:
    """The bits of a vector's tensor."""
    header = tw.inspect((VECTORS / f"{name}.tw").read_bytes()).header
    return np.frombuffer((VECTORS / f"{name}.bin").read_bytes(), header.dtype.bits)


def two_additions(right: Any) -> Callable[..., Any]:
    """sdp4bit: (v + Q) + 1 in place of v + D."""

    def wrong(v: Any, largest: int, words: Any) -> Any:
        steps = (((v + F32(largest)) + F32(1)) * F32(1 << 16)).astype(np.uint32)
        whole = (steps + (words >> np.uint32(16))) >> np.uint32(16)
        return (whole.astype(np.int16) - (largest + 1)).astype(np.int8)

    return wrong


def own_block_only(right: Any) -> Callable[..., Any]:
    """thc, omnireduce: the short last block of a chunk keeps the norm of the one it lies on."""

    def wrong(measured: Any, first: int, blocks: int, block: int) -> Any:
        found = right(measured, first, blocks, block).copy()
        found[-1] = measured[first // block + blocks - 1]
        return found

    return wrong


def blocks_in_order(right: Any) -> Callable[..., Any]:
    """thc: the sums of blocks added one after the other."""
    return lambda energy: float(np.add.accumulate(energy)[-1])


def neighbouring_blocks(right: Any) -> Callable[..., Any]:
    """thc: the sums of neighbours added, then those of pairs, and so on."""

    def wrong(energy: Any) -> float:
        while energy.size > 1:
            energy = np.append(energy, np.zeros(energy.size % 2))
            energy = energy[0::2] + energy[1::2]
        return float(energy[0])

    return wrong


def limit_excluded(right: Any) -> Any:
    """dynamiq: the mean is 0 above 2^110, not from there on."""
    return np.nextafter(right, np.inf)


def world_not_rounded_up(right: Any) -> Callable[..., Any]:
    """dynamiq: as many strata as ranks."""

    def wrong(spec: Any, key: Any) -> Any:
        how, strata, turn = right(spec, key)
        return how, key.world if strata > 1 else 1, turn

    return wrong


def rank_not_reduced(right: Any) -> Callable[..., Any]:
    """dynamiq: the rank in place of rank mod W."""
    return lambda spec, key: (*right(spec, key)[:2], key.rank)


def sum_of_neighbours(right: Any) -> Callable[..., Any]:
    """dynamiq: taco's order of addition."""

    def wrong(x: Any) -> Any:
        while x.shape[1] > 1:
            x = x[:, 0::2] + x[:, 1::2]
        return x[:, 0]

    return wrong


def sum_in_order(right: Any) -> Callable[..., Any]:
    """dynamiq: elements added one after the other."""
    return lambda x: np.add.accumulate(x, axis=1, dtype=F32)[:, -1]


def sum_in_double(right: Any) -> Callable[..., Any]:
    """dynamiq: the sum in double precision."""
    return lambda x: x.astype(np.float64).sum(axis=1).astype(F32)


def later_steps_that_fit(right: Any) -> Callable[..., Any]:
    """dynamiq: steps behind the first that does not fit are taken where they fit."""

    def wrong(spec: Any, energies: Any, units: int) -> Any:
        widths = right(spec, energies, units)
        gains = energies * F32(dynamiq.POW2_STEPS[0][2])
        last = gains[widths > dynamiq.MIN_WIDTH].min()
        for j in np.flatnonzero((gains == last) & (widths == dynamiq.MIN_WIDTH)):
            if widths.sum() + 2 <= units:
                widths[j] = 4
        return widths

    return wrong


def negative_means_are_small(right: Any) -> Callable[..., Any]:
    """dynamiq: the quotient, not its magnitude, is compared with 2^-100."""

    def wrong(spec: Any, bits: Any, dtype: Any) -> Any:
        x, lost, means = right(spec, bits, dtype)
        return x, lost, np.where(means >> 15 == 1, np.uint16(0), means)

    return wrong


def least_value_is_minus_zero(right: Any) -> Callable[..., Any]:
    """tahquant: m keeps the sign of a zero."""

    def wrong(spec: Any, words: Any, most: Any) -> Any:
        codes, scales, pivots = right(spec, words, most)
        x = words.view(F32)
        minus = ((x == 0) & np.signbit(x)).any(axis=1) & (x.min(axis=1) == 0) & (pivots == 0)
        return codes, np.where(minus, scales | np.uint32(0x8000), scales), pivots

    return wrong


READINGS: list[tuple[str, Any, str, Wrong]] = [
    ("sdp4bit/float32_8_one_addition", sdp4bit, "round_to_code", two_additions),
    ("sdp4bit/float32_4_one_addition", sdp4bit, "round_to_code", two_additions),
    ("thc/float32_short_blocks", norms, "of_chunk", own_block_only),
    ("thc/float32_order_of_norms", norms, "total", blocks_in_order),
    ("thc/float32_order_of_norms", norms, "total", neighbouring_blocks),
    ("omnireduce/bfloat16_short_blocks", norms, "of_chunk", own_block_only),
    ("dynamiq/bfloat16_of_3_ranks", dynamiq, "shares_of", world_not_rounded_up),
    ("dynamiq/float16_of_5_ranks", dynamiq, "shares_of", world_not_rounded_up),
    ("dynamiq/bfloat16_of_3_ranks", dynamiq, "shares_of", rank_not_reduced),
    *(
        (f"dynamiq/float32_order_of_{what}", dynamiq, "_tree_sum", wrong)
        for what in ("energies", "means")
        for wrong in (sum_of_neighbours, sum_in_order, sum_in_double)
    ),
    ("dynamiq/bfloat16_step_that_does_not_fit", dynamiq, "choose_widths", later_steps_that_fit),
    ("dynamiq/float32_center_limit", dynamiq, "CENTER_LIMIT", limit_excluded),
    ("dynamiq/float16_center", dynamiq, "_load", negative_means_are_small),
    ("tahquant/float16_minus_zeros", tahquant, "_encode_tiles", least_value_is_minus_zero),
    ("tahquant/float16_backward_minus_zeros", tahquant, "_encode_tiles", least_value_is_minus_zero),
]


@pytest.mark.parametrize(
    ("name", "module", "function", "wrong"),
    READINGS,
    ids=[f"{name.replace('/', '-')}-{wrong.__name__}" for name, _, _, wrong in READINGS],
)
def test_wrong_reading_fails_a_vector(
    name: str, module: Any, function: str, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, vector = encoded_again(name)
    assert made == vector
    monkeypatch.setattr(module, function, wrong(getattr(module, function)))
    made, _ = encoded_again(name)
    assert made != vector


def test_short_blocks_lie_on_one_block_of_the_tensor() -> None:
    for name, block in (
        ("thc/float32_short_blocks", 1024),
        ("omnireduce/bfloat16_short_blocks", 64),
    ):
        header = tw.inspect((VECTORS / f"{name}.tw").read_bytes()).header
        first, stop = (k * -(-header.nelem // header.chunks) for k in (1, 2))
        assert first % block
        last = first + (stop - first - 1) // block * block
        assert last // block == (stop - 1) // block
        assert -(-header.nelem // block) > last // block + 1


def test_chunks_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (VECTORS / "thc/bfloat16_unlike_chunks_sum.tw").read_bytes()
    tensor = (VECTORS / "thc/bfloat16_unlike_chunks_sum.bin").read_bytes()
    assert tw.decode(data, backend="ref").tobytes() == tensor
    first = philox.key_numbers(KEY)
    monkeypatch.setattr(thc, "seed_of", lambda views: first)
    assert tw.decode(data, backend="ref").tobytes() != tensor


@pytest.mark.parametrize(
    "name",
    ["sdp4bit/float16_minus_zeros", "thc/float32_specials", "omnireduce/float32_minus_zeros"],
)
def test_zeros_that_decode_may_be_negative(name: str) -> None:
    bits = tensor_bits(name)
    assert (bits == 1 << 8 * bits.itemsize - 1).any()


def test_lost_super_groups_may_have_any_codes_and_a_finite_mean() -> None:
    for name, mean in (
        ("bfloat16_balanced", False),
        ("float16_signed", True),
        ("float32_uniform", False),
    ):
        buffer = tw.codec("dynamiq", bits=8, super_group=128, center=mean)
        data = (VECTORS / f"dynamiq/{name}_all_codes.tw").read_bytes()
        header = tw.inspect(data).header
        spec: Any = spec_class("dynamiq").unpack_params(header.params)
        assert (spec.bits, spec.center) == (8, mean)
        assert buffer.plan(header.shape, header.dtype.name).header.sections == header.sections
        scales = np.frombuffer(data[128 + header.sections[0].nbytes :], np.uint8)
        assert scales[10:12].tobytes() == b"\xc0\x7f"
        at = 14 * (1 + mean) + 5 * 8
        assert scales[at : at + 8].any()
    with pytest.raises(tw.FormatError, match="mean"):
        tw.decode((VECTORS / "invalid/dynamiq_mean_nan.tw").read_bytes())


SMALL = (0.0, 2.0**-149, -(2.0**-140))


@pytest.mark.parametrize("transform", ["ash", "hadamard", "none"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_zeros_of_taco(transform: str, format: str, rounding: str) -> None:
    codec = tw.codec("taco", block=32, transform=transform, format=format, rounding=rounding)
    x = np.resize(np.array([*SMALL, -0.0], F32), 320)
    assert not tw.decode(codec.encode(x, key=KEY)).any()
    x[::7] = np.linspace(1, 2, 46)
    y = tw.decode(codec.encode(x, key=KEY))
    small = np.abs(x) < 1
    if transform == "none":
        assert not y[small].any()
        signs = np.signbit(x[small]) if format != "int8" else False
        assert (np.signbit(y[small]) == signs).all()
    else:
        assert y[small].any()


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("grid", ["balanced", "signed", "uniform"])
@pytest.mark.parametrize("scales", ["up", "stochastic", "wide"])
def test_zeros_of_dynamiq(center: bool, grid: str, scales: str) -> None:
    codec = tw.codec("dynamiq", center=center, grid=grid, scales=scales, group=64)
    x = np.linspace(1, 2, 1024).astype(F32)
    x[::50] = 9
    x[64:128], x[200::7] = -0.0, 0.0
    y = tw.decode(codec.encode(x, key=KEY))
    group, single = y[64:128], y[200::7]
    if center:
        assert single.any()
        return
    assert (group.view(np.uint32) == 0).all()
    assert (single.view(np.uint32) == 0).all() == (grid != "balanced")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tiles_of_one_value(dtype: str, direction: str) -> None:
    values = np.array([1.5, -3, 2.0**-20, -(2.0**-14), 60000, 0.0, -0.0], F32)
    x = np.repeat(values.astype(np.float16).astype(BY_NAME[dtype].numpy), 64)
    buffer = tw.codec("tahquant", direction=direction, hidden=64).encode(x)
    y = tw.decode(buffer)
    kept = x.astype(np.float16) == x
    assert (y[kept] == x[kept]).all()
    assert not np.signbit(y[-128:].astype(F32)).any()
    index = buffer.header.sections[2]
    assert (index.kind, index.nbytes > 0) == (3, direction == "forward")


@pytest.mark.parametrize("codec", ["huffman", "delta"])
def test_float8_e8m0fnu_has_no_exponent_bits(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that takes its 8 bits for an exponent fails a vector."""
    right = decoder.DTYPES[24]
    monkeypatch.setitem(decoder.DTYPES, 24, right._replace(exponent=8))
    failed = []
    for path in (VECTORS / codec).glob("float8_e8m0fnu_*.tw"):
        base = path.with_suffix(".base").read_bytes() if codec == "delta" else None
        try:
            found = decode_of_the_pages(path.read_bytes(), base=base)[2]
        except FormatError:
            found = b""
        if found != path.with_suffix(".bin").read_bytes():
            failed.append(path.stem)
    assert failed
