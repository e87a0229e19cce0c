"""The GPU's frame and driver, with a small codec of the tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from tightwire.codecs.common import frame_triton, tiles_triton  # noqa: E402
from tightwire.codecs.common.launch_triton import Variant  # noqa: E402
from tightwire.codecs.common.sums import sum_of  # noqa: E402
from tightwire.formats import codec_ids  # noqa: E402
from tightwire.formats.dtypes import BY_NAME  # noqa: E402
from tightwire.planning import device_module  # noqa: E402

SIZES = (1, 63, 64, 4095, 4096, 9001)


def load(name: str) -> Any:
    """A module beside this one."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def codec() -> Iterator[tw.Codec]:
    """The codec, known to the library while the tests of this module run."""
    reference = load("blocks8")
    tw.register_codec(reference, triton=load("blocks8_triton"))
    yield tw.codec("blocks8")
    del codec_ids.CODEC_IDS["blocks8"], codec_ids.NAMES_BY_ID[reference.SPEC.id]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def values(n: int, dtype: str, place: str, seed: int = 0) -> Any:
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 3
    return torch.from_numpy(x).to(getattr(torch, dtype)).to(place)


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)))


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.fast_cases(6)
def test_bytes_are_those_of_the_reference(
    codec: tw.Codec, n: int, dtype: str, chunks: int, checksum: bool, place: str
) -> None:
    x = values(n, dtype, place)
    out = torch.full((codec.plan((n,), dtype, chunks=chunks).nbytes,), 0xA5, dtype=torch.uint8)
    options: dict[str, Any] = {"chunks": chunks, "checksum": checksum}
    buf = codec.encode(x, out=out.to(place), backend="triton", **options)
    reference = codec.encode(x.cpu(), backend="ref", **options)
    assert bytes(buf) == bytes(reference)
    decoded = tw.decode(buf, backend="triton")
    assert same(decoded, tw.decode(reference, backend="ref"))
    if buf.header.codec == "blocks8" and n > 64:
        part = tw.decode(buf, start=n // 3, stop=n // 3 + 50, backend="triton")
        assert same(part, decoded[n // 3 : n // 3 + 50])


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("accumulator", ["bfloat16", "float32"])
def test_sums(codec: tw.Codec, accumulator: str, aligned: bool, place: str) -> None:
    n = 9001
    x, y = values(n + 1, accumulator, place, 1), values(n, "bfloat16", place, 2)
    x = x[:-1] if aligned else x[1:]
    buf = codec.encode(y, backend="triton")
    decoded = tw.decode(buf, backend="triton")
    expected = (x.float() + decoded.float()).to(x.dtype)
    total = codec.encode(expected.bfloat16(), backend="triton")
    acc = x.clone()
    codec.decode_add(buf, acc)
    assert same(acc, expected)
    fused = codec.decode_add_encode(buf, x)
    assert bytes(fused) == bytes(total)


def driver_of(plan: Any) -> Any:
    """The kernels of a plan."""
    module: Any = device_module(plan.codec.name)
    return module.driver_of(plan)


def bits_of(x: Any, dtype: str) -> Any:
    return x.cpu().view(torch.uint8).numpy().view(BY_NAME[dtype].bits)


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize(("local", "factor"), [(None, None), (0, 0.375), (2, 1 / 3), (3, None)])
@pytest.mark.parametrize(("n", "together"), [(9001, 1), (9001, 2), (4096, 1)])
@pytest.mark.parametrize(
    "name",
    ["blocks8", "sdp4bit", "mx", "taco", pytest.param("tahquant", marks=pytest.mark.slow), "raw"],
)
@pytest.mark.fast_cases(3)
@pytest.mark.slow_cases(20)
def test_sums_of_several_buffers(
    codec: tw.Codec,
    name: str,
    n: int,
    together: int,
    local: int | None,
    factor: float | None,
    encoded: bool,
    place: str,
) -> None:
    made = codec if name == "blocks8" else tw.codec(name)
    if name == "tahquant":
        # Tokens that have ranks, some whose tiles are padded, and gradients without ranks.
        made = tw.codec(name, hidden=200 if n % 64 else 256)
        if local == 2:
            made = tw.codec(name, direction="backward", hidden=100)
    options: dict[str, Any] = {"chunks": 2, "backend": "triton"}
    buffers = [made.encode(values(n, "bfloat16", place, i), **options) for i in range(3)]
    plan = buffers[0].plan
    terms = [bits_of(tw.decode(buf, backend="triton"), "bfloat16") for buf in buffers]
    x = None
    if local is not None:
        x = values(n, "float32" if local == 2 else "bfloat16", place, 9)
        terms.insert(local, bits_of(x, "float32" if local == 2 else "bfloat16"))
    sums = torch.full((3, plan.chunks), -1, dtype=torch.int64, device=place)
    statuses = torch.zeros(3, dtype=torch.int64, device=place)
    memories: list[Any] = [cast(Any, buf._memory).data for buf in buffers]
    places = frame_triton.places_of(memories, sums, statuses)
    given: dict[str, Any] = {"x": x, "place": local or 0, "factor": factor}
    target = BY_NAME["bfloat16" if encoded or local else "float32"]
    expected = sum_of(terms, BY_NAME["bfloat16"], factor, target)
    driver = driver_of(plan)
    tiling = (driver.adding or driver.tilings[2])._replace(together=together)
    driver = driver._replace(adding=tiling)
    if encoded:
        out = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8, device=place)
        driver.sum(plan, places, out, encoded=True, **given)
        total = torch.from_numpy(expected.view(np.int16)).view(torch.bfloat16)
        assert bytes(out.cpu().numpy()) == bytes(made.encode(total, chunks=2, backend="ref"))
    else:
        out = torch.full((n,), 7, dtype=getattr(torch, target.name), device=place)
        driver.sum(plan, places, out, **given)
        assert np.array_equal(bits_of(out, target.name), expected)
    assert not statuses.any()
    memories[1][plan.static_offset + 64] ^= 1
    driver_of(plan).sum(plan, places, out, encoded=encoded, **given)
    assert [int(word) != 0 for word in statuses] == [False, True, False]


@pytest.mark.parametrize(
    ("at", "byte", "reason"),
    [
        (130, 0x80, "checksum_mismatch"),
        (4090, 0x80, "bad_payload"),  # a code that no encoder writes
        (4100, 1, "reserved_not_zero"),  # behind the codes
        (-1, 1, "reserved_not_zero"),  # behind the scales
    ],
)
def test_damage(codec: tw.Codec, at: int, byte: int, reason: str, place: str) -> None:
    """At an offset from the start of the chunk's static part, or from its end."""
    n = 4099
    checksum = reason == "checksum_mismatch"
    buf = codec.encode(values(n, "float32", place), checksum=checksum, backend="triton")
    data = torch.from_numpy(np.frombuffer(bytes(buf), np.uint8).copy()).to(place)
    data[buf.plan.static_offset + at if at >= 0 else at] = byte
    for backend in ("ref", "triton"):
        source = bytes(data.cpu().numpy()) if backend == "ref" else data
        with pytest.raises(tw.FormatError) as caught:
            tw.decode(source, like=torch.empty(0, device=place), backend=backend)
        assert caught.value.reason == reason


def test_a_wrong_code_elsewhere_does_not_matter(codec: tw.Codec, place: str) -> None:
    buf = codec.encode(values(9001, "float32", place), checksum=False, backend="triton")
    data = np.frombuffer(bytes(buf), np.uint8).copy()
    data[buf.plan.static_offset + 5000] = 0x80
    source = torch.from_numpy(data).to(place)
    tw.decode(source, start=0, stop=4000, like=source, backend="triton")
    with pytest.raises(tw.FormatError, match="bad_payload"):
        tw.decode(source, start=4990, stop=5010, like=source, backend="triton")


def test_a_part_is_decoded_by_the_programs_of_its_tiles(
    codec: tw.Codec, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf = codec.encode(values(36000, "bfloat16", place), chunks=2, backend="triton")
    decoded = tw.decode(buf, backend="triton")
    launch, programs = Variant.launch, []

    def note(self: Variant, number: int, *args: Any, **options: Any) -> None:
        if self.kernel is tiles_triton.decode_kernel:
            programs.append(number)
        launch(self, number, *args, **options)

    monkeypatch.setattr(Variant, "launch", note)
    size = buf.plan.chunk_nelem
    for start, stop, tiles in ((0, 1, 1), (4095, 4097, 2), (size - 9, size + 9, 2)):
        part = tw.decode(buf, start=start, stop=stop, backend="triton")
        assert same(part, decoded[start:stop])
        assert programs.pop() == tiles
    assert not programs


def test_runs_that_no_kernel_has() -> None:
    for run in (0, 4, 24, 128):
        with pytest.raises(ValueError, match=f"run is {run}; allowed: 8, 16, 32, 64"):
            tiles_triton.Launch(128, run, 8, 2, 2, True)


def test_lines_of_a_new_codec() -> None:
    """A block codec is little work on a GPU."""
    code = Path(__file__).with_name("blocks8_triton.py").read_text().splitlines()
    assert len([line for line in code if line.strip()]) <= 60


@pytest.mark.parametrize("n", [3000, 2 * 4096])
@pytest.mark.slow
def test_sums_of_buffers_with_widths(n: int, place: str) -> None:
    """Buffers of dynamiq, each with its own widths; those of the sum are the first one's, or what
    stats ask for.
    """
    made = tw.codec("dynamiq", rounding="nearest")
    options: dict[str, Any] = {"chunks": 2, "backend": "triton"}
    inputs = [values(n, "bfloat16", place, i) for i in range(3)]
    for i, x in enumerate(inputs):
        x[i * n // 4 : i * n // 4 + 300] *= 64
    x, buffers = inputs.pop(), [made.encode(x, **options) for x in inputs]
    plan = buffers[0].plan
    statuses = torch.zeros(2, dtype=torch.int64, device=place)
    sums = torch.full((2, plan.chunks), -1, dtype=torch.int64, device=place)
    memories: list[Any] = [cast(Any, buf._memory).data for buf in buffers]
    places = frame_triton.places_of(memories, sums, statuses)
    dtype = BY_NAME["bfloat16"]
    terms = [bits_of(tw.decode(buf, backend="triton"), "bfloat16") for buf in buffers]
    terms.append(bits_of(x, "bfloat16"))
    expected = sum_of(terms, dtype, 0.5, BY_NAME["float32"])
    out = torch.full((n,), 7, dtype=torch.float32, device=place)
    driver_of(plan).sum(plan, places, out, x=x, place=2, factor=0.5)
    assert np.array_equal(bits_of(out, "float32"), expected)
    total = torch.from_numpy(sum_of(terms, dtype, None, dtype).view(np.int16)).view(torch.bfloat16)
    out = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8, device=place)
    stats = made.measure(x, backend="triton")
    driver_of(plan).sum(plan, places, out, x=x, place=2, encoded=True, stats=stats)
    wanted = made.encode(total, chunks=2, backend="ref", stats=stats.cpu().numpy())
    assert bytes(out.cpu().numpy()) == bytes(wanted)
    one = frame_triton.places_of(memories[:1], sums[:1], statuses[:1])
    driver_of(plan).sum(plan, one, out, x=x, place=1, encoded=True)
    wanted = made.decode_add_encode(buffers[0], x, chunks=2)
    assert bytes(out.cpu().numpy()) == bytes(wanted)
    assert not statuses.any()
    memories[1][plan.static_range(1).stop - 128] ^= 1
    driver_of(plan).sum(plan, places, out, x=x, place=2, encoded=True)
    errors = [frame_triton.problem(int(status)) for status in statuses.tolist()]
    assert errors[0] is None
    assert errors[1] is not None
    assert errors[1].reason == "checksum_mismatch"
