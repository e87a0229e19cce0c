"""Vectors, damaged and random buffers of all codecs on kernels; see kernels.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from kernels import (
    CODED,
    GUARD,
    MARKS,
    POISON,
    Memory,
    Watched,
    assert_same,
    assert_same_buffer,
    raw,
)
from support import vector_key
from tightwire.codecs.zipccl import COLUMNS, TILE, fields_of, tail_columns, tile_count
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import ASSEMBLED, CHECKSUM
from tightwire.planning import device_module, spec_class

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = MARKS

VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors"


def has_kernels(codec: str) -> bool:
    return isinstance(device_module(codec), ModuleType)


def vectors(codec: str) -> list[str]:
    return sorted(f"{codec}/{path.stem}" for path in (VECTORS / codec).glob("*.tw"))


#: The vectors that the interpreter, which is slow, is shown; every one of codecs not named.
SHOWN = {
    "dynamiq": (
        "512_fixed",
        "bfloat16_zeros",
        "wide_center",
        "tiny_stochastic",
        "float16_specials",
        "of_8_ranks",
    ),
    "lhc": ("float32_example", "float16_published", "float16_estimated"),
}
#: Codecs with more vectors than forms: the interpreter is shown every second one.
HALVED = ("zipccl", "taco", "sdp4bit", "tahquant", "delta")
#: Vectors of more elements than the interpreter gets through in time.
LARGE = (
    "delta/bfloat16_33000",
    "delta/bfloat16_empty_chunk",
    "delta/uint8_plain_tile_overwrite",
    "delta/uint8_three_tiles",
)


def is_shown(name: str) -> bool:
    """Whether the interpreter is shown a vector: others of its codec have the same kernels."""
    folder = name.partition("/")[0]
    if "fnuz" in name or name.endswith("_all") or name in LARGE:
        return False
    if folder in SHOWN:
        return name.endswith(SHOWN[folder])
    return folder not in HALVED or vectors(folder).index(name) % 2 == 0


def at_places(names: Sequence[str], shown: Callable[[str], bool]) -> list[Any]:
    """Pairs of a place and a name: on a GPU all, and what the interpreter is `shown`."""
    on_gpu = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names]
    return [*(("cpu", name) for name in names if shown(name)), *on_gpu]


NAMES = [
    name
    for codec in tw.list_codecs()
    if has_kernels(codec)
    for name in vectors(codec)
    if not name.startswith("zipccl/float64_")
    if not (codec == "delta" and "64_" in name)
]


@pytest.mark.fast_cases(12)
@pytest.mark.slow_cases(100)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("place", "name"), at_places(NAMES, is_shown), indirect=["place"])
def test_vectors(place: str, name: str) -> None:
    data = (VECTORS / f"{name}.tw").read_bytes()
    tensor = (VECTORS / f"{name}.bin").read_bytes()
    header = tw.inspect(data).header
    bits = np.frombuffer(tensor, header.dtype.bits)
    memory = Memory(place)
    src = memory.put(np.frombuffer(data, np.uint8), BY_NAME["uint8"])
    base = base_of(VECTORS / f"{name}.base", header, memory)
    out = memory.elements(header.dtype, bits.size).reshape(header.shape)
    if header.required & ASSEMBLED:
        with pytest.raises(ValueError, match="assembled"):
            tw.decode(src, out=out, backend="triton")
        return
    tw.decode(src, base=base, out=out, backend="triton")
    assert raw(out).tobytes() == tensor
    if base is not None:
        live = base.clone()
        tw.decode(src, base=live, out=live, backend="triton")
        assert raw(live).tobytes() == tensor
    codec = tw.Codec(spec_class(header.codec).unpack_params(header.params))
    if not codec.lossless:
        given = VECTORS / f"{name}.input"
        if not given.exists():
            return
        out.reshape(-1).view(torch.uint8).copy_(
            torch.from_numpy(np.frombuffer(given.read_bytes(), np.uint8).copy())
        )
    buf = codec.encode(
        out,
        base=base,
        key=vector_key(name),
        out=memory.take(len(data) + 2 * bits.nbytes + 4096 * header.chunks),
        chunks=header.chunks,
        checksum=bool(header.required & CHECKSUM),
        dynamic_capacity=header.dynamic_stride or None,
        backend="triton",
    )
    if header.dynamic_stride:
        assert_same_buffer(buf.plan, raw(buf.array), np.frombuffer(data, np.uint8))
    elif name != "raw/uint8_newer_minor":
        assert bytes(buf) == data
    memory.check()


def base_of(path: Path, header: Any, memory: Memory) -> Any:
    """The base of a vector, None if it has none."""
    if not path.exists():
        return None
    base = np.frombuffer(path.read_bytes(), header.dtype.bits)
    return memory.put(base, header.dtype).reshape(header.shape)


REASONS: dict[str, str] = json.loads((VECTORS / "invalid" / "reasons.json").read_text())
#: Of an assembled buffer, of float64: the host decodes these.
ON_HOST = {"checksum_of_ordinal", "half_escape"}
INVALID = [
    name
    for name in sorted(set(REASONS) - ON_HOST)
    if not name.startswith(tuple(f"{c}_" for c in tw.list_codecs() if not has_kernels(c)))
]
#: The interpreter is shown every second one of these: the kernels check the others alike.
CHECKED_ALIKE = (*HALVED, *SHOWN, "padding_", "escape_", "order_", "mx_", "nvfp4_")
INVALID_CASES = at_places(
    INVALID, lambda name: not name.startswith(CHECKED_ALIKE) or INVALID.index(name) % 2 == 0
)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(("place", "name"), INVALID_CASES, indirect=["place"])
def test_invalid_vectors(place: str, name: str) -> None:
    data = (VECTORS / "invalid" / f"{name}.tw").read_bytes()
    memory = Memory(place)
    src = memory.put(np.frombuffer(data, np.uint8), BY_NAME["uint8"])
    base = None
    if (path := VECTORS / "invalid" / f"{name}.base").exists():
        try:
            base = base_of(path, tw.inspect(data).header, memory)
        except tw.FormatError:
            pytest.skip("no header, so no base: the host refuses it")
        except ValueError:
            # Of a header of another shape.
            pytest.skip("the base does not fit: a bad call")
    with pytest.raises(tw.FormatError) as caught:
        tw.decode(src, base=base, backend="triton")
    assert caught.value.reason == REASONS[name]
    if base is not None:
        live = base.clone()
        with pytest.raises(tw.FormatError) as caught:
            tw.decode(src, base=live, out=live, backend="triton")
        assert caught.value.reason == REASONS[name]
        assert raw(live).tobytes() == raw(base).tobytes()


def sanitize() -> ModuleType:
    """The module beside this one, which is also a script."""
    if "sanitize" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "sanitize", Path(__file__).with_name("sanitize.py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["sanitize"] = module
        spec.loader.exec_module(module)
    return sys.modules["sanitize"]


def on_host(data: bytes, **options: Any) -> Any:
    """The tensor's bytes, or the reason of the refusal."""
    # The reference need not be compiled; where thousands are decoded, it would take too long.
    backend = "cpu" if torch.cuda.is_available() else "ref"
    try:
        return tw.decode(data, backend=backend, max_nbytes=1 << 28, **options).tobytes()
    except tw.FormatError as error:
        return error.reason


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_damage(place: str, part: int) -> None:
    """With verification the host's reason, or its tensor; without, no access out of bounds."""
    cases = list(sanitize().cases(400 if place == "cuda" else 120))
    for k, case in enumerate(cases[part :: 6 if place == "cuda" else 30]):
        memory = Memory(place)
        array = memory.put(case.data, BY_NAME["uint8"])
        expected = on_host(case.data.tobytes(), base=case.base)
        plan = case.plan
        if case.data[: plan.header.nbytes].tobytes() != plan.header_bytes.tobytes():
            expected = "bad_header"
        found = sanitize().decodes(case, array)
        verified = next(found)
        assert as_bytes(verified) == expected, case.name
        if place == "cuda" or k % 2 == part % 2:
            unverified = as_bytes(next(found))
            if isinstance(expected, bytes):
                assert unverified == expected, case.name
        for _ in found if place == "cuda" else ():
            pass
        assert raw(array).tobytes() == case.data.tobytes()
        memory.check()


def test_damage_is_made_of_every_lossless_codec() -> None:
    codecs = {case.plan.codec.name for case in sanitize().cases(400)}
    assert codecs >= {name for name in tw.list_codecs() if tw.codec(name).lossless}


def as_bytes(result: Any) -> Any:
    return result if isinstance(result, str) else raw(result).tobytes()


def random_case(
    rng: np.random.Generator, place: str, most: int
) -> tuple[tw.Codec, dict[str, Any], Any]:
    """Codec, options of encode, and at most `most` elements made at `place`."""
    name = CODED[rng.integers(0, len(CODED))]
    dtype = BY_NAME[name]
    sizes = (rng.integers(0, most + 1), rng.integers(0, 9000), TILE * rng.integers(0, 40))
    n = min(int(rng.choice(sizes)), most)
    offset = int(rng.choice([0, 0, 1, 7]))
    x = torch.empty(n + offset, dtype=getattr(torch, name), device=place)[offset:]
    generator = torch.Generator(device=place).manual_seed(int(rng.integers(0, 1 << 62)))
    kind = rng.integers(0, 6)
    if kind == 0:
        x.view(torch.uint8).random_(0, 256, generator=generator)
    else:
        spread = float(2.0 ** rng.integers(-12, 3)) * (1 if dtype.itemsize > 1 else 64)
        values = torch.empty(n, device=place).normal_(0, spread, generator=generator)
        chance = torch.empty(n, device=place).uniform_(generator=generator)
        if kind >= 3:
            values.masked_fill_(chance < float(rng.random()), 0.0)
        if kind == 4:
            values[n // 3 : n // 2] *= float(2.0 ** rng.integers(-20, 20))
        if kind == 5:
            rare = float(10.0 ** -rng.integers(1, 5))
            value = float(rng.choice([-0.0, 1e-4, float("nan"), float("-inf")]))
            values.masked_fill_(chance > 1 - rare, value)
        x.copy_(values)
    few = name in ("bfloat16", "float16")
    window: Any = "tile"
    if few and rng.random() < 0.3:
        base = int(rng.integers(0, fields_of(dtype).max_base + 1))
        window = ("sigma", "histogram", base)[rng.integers(0, 3)]
    options = {
        "chunks": int(rng.choice([1, 1, 2, 3, 7, 40])),
        "checksum": not few or bool(rng.random() < 0.7),
    }
    return tw.codec("zipccl", window=window), options, x


def check_random_case(seed: int, place: str, most: int = 200_000) -> None:
    rng = np.random.default_rng(seed)
    codec, options, x = random_case(rng, place, most)
    dtype = BY_NAME[str(x.dtype).removeprefix("torch.")]
    plan = codec.plan(tuple(x.shape), dtype, **options)
    out = torch.full((plan.nbytes + GUARD,), POISON, dtype=torch.uint8, device=place)
    scratch = torch.full((plan.scratch_nbytes,), POISON, dtype=torch.uint8, device=place)
    buf = codec.encode(x, out=out, scratch=scratch, backend="triton", **options)
    first = int(rng.choice([0, 0, 1])) * dtype.itemsize
    room = torch.full((first + x.nbytes + GUARD,), POISON, dtype=torch.uint8, device=place)
    y = room[first : first + x.nbytes].view(x.dtype)
    tw.decode(buf, out=y, scratch=scratch.fill_(POISON), backend="triton")
    host = raw(x).view(dtype.numpy)
    expected = bytes(codec.encode(host, threads=1, backend="cpu", **options))
    what = f"seed {seed}: {dtype.name}, {plan.nelem} elements, {codec}, {options}"
    try:
        packed = bytes(buf)
    except tw.FormatError as error:
        pytest.fail(f"{what}: {error}")
    assert packed == expected, what
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8)), what
    assert (out[plan.nbytes :] == POISON).all(), what
    assert (room[:first] == POISON).all(), what
    assert (room[first + x.nbytes :] == POISON).all(), what


@pytest.mark.gpu
@pytest.mark.parametrize("batch", range(20))
def test_ten_thousand_random_cases(batch: int) -> None:
    """Packed bytes are the cpu backend's, and the tensor comes back; 500 cases in each batch."""
    for seed in range(500 * batch, 500 * batch + 500):
        check_random_case(seed, "cuda")


def test_a_few_random_cases() -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU runs thousands")
    for seed in range(4):
        check_random_case(seed, "cpu", 2300)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    n = (1 << 31) + 4099
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    for at in range(0, n, 1 << 28):
        x[at : at + (1 << 28)].normal_(0, 0.02, generator=generator)
    buf = tw.encode(x)
    y = torch.full_like(x, 3.0)
    tw.decode(buf, out=y, verify=True)
    for at in range(0, n, 1 << 28):
        assert torch.equal(x[at : at + (1 << 28)], y[at : at + (1 << 28)])
    check_tiles(buf, x, 0, 3)
    check_tiles(buf, x, (1 << 31) // TILE - 2, 3)
    check_tiles(buf, x, tile_count(n) - 2, 2)
    part = tw.decode(buf, start=(1 << 31) - 5000, stop=(1 << 31) + 4000)
    assert torch.equal(part, x[(1 << 31) - 5000 : (1 << 31) + 4000])
    y.fill_(3.0)
    bytes_ = tw.encode(x.view(torch.uint8), tw.codec("raw"), chunks=3)
    tw.decode(bytes_, out=y.view(torch.uint8), verify=True)
    for at in range(0, n, 1 << 28):
        assert torch.equal(x[at : at + (1 << 28)], y[at : at + (1 << 28)])


def check_tiles(buf: tw.Buffer, x: Any, first: int, count: int) -> None:
    """Tiles of a buffer of one chunk are those that the reference makes of their elements."""
    plan = buf.plan
    f = fields_of(plan.dtype)
    part = x[first * TILE : (first + count) * TILE]
    host = raw(part).view(plan.dtype.numpy)
    expected = tw.encode(host, backend="ref")
    block = f.block_nbytes(COLUMNS)
    size = part.numel() // TILE * block + f.block_nbytes(tail_columns(part.numel()))
    at = plan.static_offset + first * block
    small = np.asarray(expected.array)[expected.plan.static_offset :]
    assert_same(raw(buf.array[at : at + size]), small[:size], f"tile {first}")
    index = plan.static_offset + plan.layout.sections[0].nbytes
    small_index = expected.plan.layout.sections[0].nbytes
    entries = index + 4 * tile_count(plan.nelem) + 2 * first
    assert_same(
        raw(buf.array[entries : entries + 2 * count]),
        small[small_index + 4 * count :][: 2 * count],
        f"windows from tile {first}",
    )
    offsets = raw(buf.array[index + 4 * first : index + 4 * (first + count)]).view("<u4")
    small_offsets = small[small_index : small_index + 4 * count].view("<u4")
    assert (offsets - offsets[0]).tolist() == small_offsets.tolist()
    escapes = np.asarray(expected.dynamic(0))
    start = plan.dynamic_offset + int(offsets[0])
    assert_same(raw(buf.array[start : start + escapes.size]), escapes, f"escapes of tile {first}")


def test_the_watch_sees_what_it_should(watched: Watched | None) -> None:
    if watched is None:
        pytest.skip("the interpreter does not run here")
    watched.spans = [(1024, 1032), (4096, 8192)]
    on = np.ones(2, bool)
    watched.check(np.array([1024, 8188], np.uint64), on, 4)
    watched.check(np.array([0, 4096], np.uint64), np.array([False, True]), 4)
    for bad in ([1024, 8192], [1020, 4096], [1028, 1032]):
        with pytest.raises(AssertionError, match="out of bounds"):
            watched.check(np.array(bad, np.uint64), on, 4)
    with pytest.raises(AssertionError, match="no multiple"):
        watched.check(np.array([1026, 4096], np.uint64), on, 4)
