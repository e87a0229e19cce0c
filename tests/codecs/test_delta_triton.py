"""delta's kernels by public calls, under the interpreter: bases, places in memory, damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from support import repair
from tightwire.engine import parse
from tightwire.formats.dtypes import BY_NAME

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tightwire import gpu  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("kernels are compiled for the GPU here", allow_module_level=True)

FORMS = ("adaptive", "difference", "overwrite")
Bits = npt.NDArray[Any]


def pair(dtype: str, n: int, share: float, most: int, seed: int = 0) -> tuple[Bits, Bits]:
    """Bits of a base, and of a tensor of which a share differs by up to so many units, or in signs
    and other bits if that is 0.
    """
    rng = np.random.default_rng(seed)
    kind = BY_NAME[dtype]
    if kind.is_float:
        base = rng.normal(0, 0.02, n).astype(np.float32).astype(kind.numpy).view(kind.bits)
    else:
        base = rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8).view(kind.bits)
    x = base.copy()
    chosen = rng.random(n) < share
    if most == 0:
        # Tiles of planes: signs, a bit of nearly all, and one of a few.
        x[chosen] ^= kind.bits.type(1 << 8 * kind.itemsize - 1)
        x[rng.random(n) < 0.95] ^= kind.bits.type(2)
        x[rng.random(n) < 0.05] ^= kind.bits.type(1)
        return base, x
    step = rng.integers(1, most + 1, n) * rng.choice([-1, 1], n)
    x[chosen] += step[chosen].astype(kind.bits)
    return base, x


def tensor(bits: Bits, dtype: str) -> Any:
    """A tensor of its own memory."""
    kind = getattr(torch, dtype)
    return torch.from_numpy(bits.view(np.uint8).copy()).view(kind)


CASES = [
    ("bfloat16", 900, 0.02, 2, 1),
    ("bfloat16", 1, 1.0, 2, 1),
    ("bfloat16", 1301, 0.7, 60, 3),
    ("float16", 800, 0.95, 9000, 1),
    ("float32", 700, 0.3, 3, 1),
    ("float32", 257, 0.9, 1 << 30, 1),
    ("float8_e4m3fn", 1100, 0.1, 9, 2),
    ("float8_e5m2", 600, 0.5, 100, 1),
    ("int8", 999, 0.2, 100, 1),
    ("int32", 300, 0.4, 1 << 30, 1),
    ("bool", 800, 0.0, 1, 1),
    ("bfloat16", 1301, 0.5, 0, 3),
    ("float32", 500, 0.3, 0, 1),
    ("float8_e5m2", 1030, 0.1, 0, 2),
    ("int8", 600, 0.45, 0, 1),
]


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "n", "share", "most", "chunks"), CASES)
def test_the_bytes_of_the_host(
    form: str, dtype: str, n: int, share: float, most: int, chunks: int
) -> None:
    base, x = pair(dtype, n, share, most)
    if dtype == "bool":
        base, x = base & 1, x & 1
    codec = tw.codec("delta", form=form)
    old, new = tensor(base, dtype), tensor(x, dtype)
    buf = codec.encode(new, base=old, chunks=chunks, backend="triton")
    host = codec.encode(new, base=old, chunks=chunks, backend="ref")
    assert bytes(buf) == bytes(host)
    for src in (buf, bytes(host)):
        y = tw.decode(src, base=old, like=old, backend="triton")
        assert torch.equal(y.view(torch.uint8), new.view(torch.uint8))
    live = old.clone()
    assert tw.decode(buf, base=live, out=live, backend="triton") is live
    buf.check()
    assert torch.equal(live.view(torch.uint8), new.view(torch.uint8))
    if form == "overwrite":
        tw.decode(buf, base=live, out=live, backend="triton")
        buf.check()
        assert torch.equal(live.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.fast_cases(0)
@pytest.mark.slow_cases(1)
@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.5), ("float32", 0.2), ("int8", 0.1)])
def test_several_tiles_of_planes(dtype: str, share: float) -> None:
    """One that is whole, at an address that is no multiple of 16 too, and in part."""
    base, x = pair(dtype, 33_333, share, 0)
    old, new = tensor(base, dtype), tensor(x, dtype)
    codec = tw.codec("delta")
    buf = codec.encode(new, base=old, backend="triton")
    data = bytes(codec.encode(new, base=old, backend="cpu"))
    assert bytes(buf) == data
    odd = torch.zeros(33_334, dtype=old.dtype)[1:]
    odd[:] = old
    for given in (old.clone(), odd):
        y = tw.decode(data, base=given, like=old, backend="triton")
        assert torch.equal(y.view(torch.uint8), new.view(torch.uint8))
        tw.decode(data, base=given, out=given, backend="triton")
        assert torch.equal(given.view(torch.uint8), new.view(torch.uint8))
    part = tw.decode(data, base=old, like=old, start=9, stop=32_801, backend="triton")
    assert torch.equal(part.view(torch.uint8), new[9:32_801].view(torch.uint8))


@pytest.mark.slow
def test_several_tiles() -> None:
    base, x = pair("bfloat16", 33_000, 0.01, 2)
    old, new = tensor(base, "bfloat16"), tensor(x, "bfloat16")
    buf = tw.encode(new, "delta", base=old, backend="triton")
    assert bytes(buf) == bytes(tw.encode(new, "delta", base=old))
    assert torch.equal(tw.decode(buf, base=old, backend="triton"), new)
    part = tw.decode(buf, base=old, start=32_700, stop=32_900, backend="triton")
    assert torch.equal(part, new[32_700:32_900])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rate"), [("bfloat16", 3e-7), ("bfloat16", 7e-7), ("float8_e4m3fn", 1e-5)]
)
def test_steps_that_change_most_of_the_small_elements(dtype: str, rate: float) -> None:
    """Of whole tiles lists have what has not changed, too; the more, the larger the step."""
    rng = np.random.default_rng(5)
    kind = BY_NAME[dtype]
    masters = rng.normal(0, 0.02 if kind.itemsize > 1 else 16, 33_100).astype(np.float32)
    moves = rng.normal(0, rate * (1 if kind.itemsize > 1 else 3e3), masters.size)
    old, new = (
        tensor(v.astype(np.float32).astype(kind.numpy).view(kind.bits), dtype)
        for v in (masters, masters + moves)
    )
    codec = tw.codec("delta")
    buf = codec.encode(new, base=old, backend="triton")
    assert bytes(buf) == bytes(codec.encode(new, base=old, backend="cpu"))
    y = tw.decode(buf, base=old, backend="triton")
    assert torch.equal(y.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "share", "most"), [("bfloat16", 0.08, 3), ("float32", 0.03, 900), ("int8", 0.3, 9)]
)
def test_more_changes_than_are_listed(dtype: str, share: float, most: int) -> None:
    base, x = pair(dtype, 33_000, share, most)
    old, new = tensor(base, dtype), tensor(x, dtype)
    codec = tw.codec("delta")
    data = bytes(codec.encode(new, base=old, backend="cpu"))
    # Memory that no word starts with, too.
    apart, odd = (torch.zeros(33_001, dtype=old.dtype)[1:] for _ in range(2))
    odd[:] = old
    for given, out in ((old, None), (odd, apart), (old.clone(), ...), (odd, ...)):
        target = given if out is ... else out
        y = tw.decode(data, base=given, out=target, like=old, backend="triton")
        assert torch.equal(y.view(torch.uint8), new.view(torch.uint8))
    part = tw.decode(data, base=old, like=old, start=9, stop=32_801, backend="triton")
    assert torch.equal(part.view(torch.uint8), new[9:32_801].view(torch.uint8))


def test_a_wrong_base_is_refused_before_anything_is_written() -> None:
    base, x = pair("bfloat16", 900, 0.02, 2)
    old, new = tensor(base, "bfloat16"), tensor(x, "bfloat16")
    data = bytes(tw.encode(new, "delta", base=old, chunks=3))
    other = old.clone()
    other.view(torch.int16)[-1] ^= 1
    live, out = other.clone(), torch.full_like(other, 7.0)
    for given, target in ((live, live), (other, out)):
        with pytest.raises(tw.FormatError) as caught:
            tw.decode(data, base=given, out=target, backend="triton")
        assert caught.value.reason == "base_mismatch"
    assert torch.equal(live.view(torch.int16), other.view(torch.int16))
    assert (out == 7).all()
    # A Buffer tells when it is asked.
    buf = tw.encode(new, "delta", base=old, backend="triton")
    tw.decode(buf, base=live, out=live, backend="triton")
    with pytest.raises(tw.FormatError, match="base_mismatch"):
        buf.check()
    assert torch.equal(live.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64])
def test_damage_of_what_is_stored_raw_leaves_the_base_alone(dtype: Any) -> None:
    old, new = torch.zeros(100, dtype=dtype), torch.ones(100, dtype=dtype)
    buf = tw.encode(new, "delta", base=old, backend="triton")
    assert buf.header.codec == "raw"
    for verify in (None, True):
        live = old.clone()
        tw.decode(buf, base=live, out=live, verify=verify, backend="triton")
        assert torch.equal(live, new)
    array = torch.as_tensor(buf.array).clone()
    array[buf.plan.static_offset] ^= 1
    damaged, live = gpu.wrap(buf.plan, array), old.clone()
    tw.decode(damaged, base=live, out=live, backend="triton")
    assert torch.equal(live, old)
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        damaged.check()
    for src in (damaged, array):
        with pytest.raises(tw.FormatError, match="checksum_mismatch"):
            tw.decode(src, base=live, out=live, verify=True, backend="triton")
        assert torch.equal(live, old)
    with pytest.raises(ValueError, match="overlaps"):
        tw.decode(buf, base=old, out=buf.array[: old.nbytes].view(dtype), backend="triton")


def test_calls_that_cannot_be() -> None:
    base, x = pair("bfloat16", 900, 0.02, 2)
    old, new = tensor(base, "bfloat16"), tensor(x, "bfloat16")
    buf = tw.encode(new, "delta", base=old, backend="triton")
    memory = torch.zeros(1000, dtype=torch.bfloat16)
    for call, message in (
        (lambda: tw.encode(new, "delta", backend="triton"), "Needed: base"),
        (lambda: tw.decode(buf, backend="triton"), "Needed: base"),
        (lambda: tw.decode(buf, base=old[1:], backend="triton"), "base is bfloat16"),
        (lambda: tw.encode(new, "delta", base=old.float(), backend="triton"), "base is float32"),
        (
            lambda: tw.decode(buf, base=memory[:900], out=memory[8:908], backend="triton"),
            "overlaps base",
        ),
        (
            lambda: tw.encode(new, "delta", base=old, out=old.view(torch.uint8), backend="triton"),
            "out",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes of the parts changed, and checksums right again."""
    found = bytearray(data)
    plan = parse(np.frombuffer(data, np.uint8)).plan
    for _ in range(int(rng.integers(1, 4))):
        start = plan.dynamic_offset if rng.random() < 0.9 else plan.static_offset
        at = int(rng.integers(start, len(found)))
        found[at] ^= 1 << int(rng.integers(8))
    repair(found)
    return bytes(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype", "n", "most"),
    [(form, *about) for form in FORMS for about in (("bfloat16", 500, 3), ("int8", 300, 90))]
    + [("adaptive", "bfloat16", 400, 0), ("adaptive", "float32", 200, 0)],
)
def test_damage_that_checksums_do_not_tell(form: str, dtype: str, n: int, most: int) -> None:
    base, x = pair(dtype, n, 0.1, most)
    data = bytes(tw.codec("delta", form=form).encode(tensor(x, dtype), base=tensor(base, dtype)))
    rng = np.random.default_rng(0)
    reasons = set()
    for _ in range(40):
        damaged = mutated(data, rng)
        results = []
        for backend in ("cpu", "triton"):
            live = tensor(base, dtype)
            try:
                tw.decode(damaged, base=live, out=live, backend=backend)
                results.append(live.view(torch.uint8).numpy().tobytes())
            except tw.FormatError as error:
                results.append(error.reason)
                assert torch.equal(live.view(torch.uint8), tensor(base, "uint8"))
        assert results[0] == results[1]
        reasons.add(results[0] if isinstance(results[0], str) else "decoded")
    assert "bad_payload" in reasons
