"""What tests of kernels share. The kernels have to agree with the reference.

The same bytes, the same tensors, the same refusals: without a GPU the Triton interpreter runs the
kernels on host memory, and every access is checked to be aligned and inside the tensors that the
launch was given. With `-m gpu` the same tests run compiled, on more cases, and with them random
cases and a tensor of more than 2**31 elements. What is written is poisoned before, and has guard
bytes around it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from support import KEY, make_bits
from tightwire.codecs.common.base import Plan
from tightwire.formats.dtypes import DType
from tightwire.formats.header import OVERFLOW, RECORD

torch = pytest.importorskip("torch")

# Squares of huge numbers are infinite in specs/taco.md, and elements that are not finite go through
# taco's kernels up to the codes: of both NumPy, which interprets, warns.
MARKS = [
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
    # The interpreter is slow.
    pytest.mark.fast_cases(1),
    pytest.mark.usefixtures("watched"),
]
#: One dtype of each kind that kernels tell apart.
CODED = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
SIZES = (641, 1301, 2048, 4095, 4096, 4097, 12289, 70001)
GUARD = 512
POISON = 0xA5


class Watched:
    """The interpreter's memory accesses, each checked against the tensors of the launch."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.spans: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def check(self, pointers: Any, mask: Any, size: int) -> None:
        at = np.asarray(pointers)[np.asarray(mask, bool)].astype(np.int64)
        if at.size:
            assert not (at % size).any(), f"an address is no multiple of {size}"
            inside = np.zeros(at.shape, bool)
            for start, stop in self.spans:
                inside |= (at >= start) & (at <= stop - size)
            assert inside.all(), f"{np.count_nonzero(~inside)} accesses out of bounds"

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check(pointers, mask, np.dtype(dtype).itemsize)
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check(pointers, mask, value.dtype.itemsize)
        return self.real.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self.check(pointers, mask, value.dtype.itemsize)
        return self.real.atomic_rmw(op, pointers, value, mask, order)


def watch(monkeypatch: pytest.MonkeyPatch) -> Watched | None:
    """Watch the interpreter; None on a GPU."""
    if torch.cuda.is_available():
        return None
    from triton.runtime import interpreter

    found = Watched(interpreter._interpreter)
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        tensors = [getattr(a, "base", a) for a in args if hasattr(a, "data_ptr")]
        found.spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        return run(self, *args, **options)

    monkeypatch.setattr(interpreter, "_interpreter", found)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return found


class Memory:
    """Tensors at one place, with guard bytes on both sides."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.taken: list[tuple[Any, int, int]] = []

    def take(self, nbytes: int, offset: int = 0) -> Any:
        """Poisoned memory, uint8, shape (nbytes,), `offset` bytes behind a multiple of 512."""
        start = GUARD + offset
        block = torch.full((start + nbytes + GUARD,), POISON, dtype=torch.uint8, device=self.place)
        self.taken.append((block, start, start + nbytes))
        return block[start : start + nbytes]

    def elements(self, dtype: DType, n: int, first: int = 0) -> Any:
        """Poisoned memory for n elements, `first` elements behind a multiple of 512 bytes."""
        taken = self.take(n * dtype.itemsize, first * dtype.itemsize)
        return taken.view(getattr(torch, dtype.name))

    def put(self, bits: npt.NDArray[Any], dtype: DType, first: int = 0) -> Any:
        """A tensor of `bits`."""
        x = self.elements(dtype, bits.size, first)
        x.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
        return x

    def check(self) -> None:
        for block, start, stop in self.taken:
            assert (block[:start] == POISON).all()
            assert (block[stop:] == POISON).all()


def raw(x: Any) -> npt.NDArray[np.uint8]:
    host: npt.NDArray[np.uint8] = x.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return host


def assert_same(found: npt.NDArray[Any], expected: npt.NDArray[Any], what: str) -> None:
    assert found.size == expected.size, what
    wrong = np.flatnonzero(found != expected)
    assert not wrong.size, f"{what}: {wrong.size} bytes differ, the first at {wrong[0]}"


def assert_same_buffer(plan: Plan, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """The same bytes, but for slack; of chunks that overflowed their slots only the records."""
    cut = plan.header.nbytes + RECORD.itemsize * plan.chunks
    records = expected[plan.header.nbytes : cut].view(RECORD)
    assert found[plan.header.nbytes : cut].view(RECORD).tolist() == records.tolist()
    assert_same(found[:cut], expected[:cut], "header")
    assert_same(found[cut : plan.static_offset], expected[cut : plan.static_offset], "padding")
    for i, record in enumerate(records):
        if record["flags"] & OVERFLOW:
            continue
        part = plan.static_range(i)
        assert_same(found[part], expected[part], f"static part of chunk {i}")
        at = plan.dynamic_offset + i * plan.dynamic_stride
        part = slice(at, at + int(record["dynamic_nbytes"]))
        assert_same(found[part], expected[part], f"dynamic part of chunk {i}")


def check_encode(
    memory: Memory,
    bits: npt.NDArray[Any],
    dtype: DType,
    codec: tw.Codec,
    *,
    shape: tuple[int, ...] | None = None,
    first: int = 0,
    key: tw.Key = KEY,
    **options: Any,
) -> tw.Buffer:
    """Encode where `memory` is; every byte must be the reference's. Returns that buffer."""
    host = bits.view(dtype.numpy).reshape(bits.shape if shape is None else shape)
    plan = codec.plan(host.shape, dtype.name, **options)
    room = np.full(plan.nbytes, 0x5A, np.uint8)
    options |= {"key": key}
    expected = codec.encode(host, out=room, backend="ref", **options)
    x = memory.put(bits, dtype, first)
    out, scratch = memory.take(plan.nbytes), memory.take(plan.scratch_nbytes)
    buf = codec.encode(x.reshape(host.shape), out=out, scratch=scratch, backend="triton", **options)
    assert buf.array.data_ptr() == out.data_ptr()
    assert_same_buffer(plan, raw(out), room)
    assert buf.overflowed == expected.overflowed
    if not expected.overflowed:
        assert_same(np.frombuffer(bytes(buf), np.uint8), np.asarray(expected.packed()), "packed")
    assert raw(x).tobytes() == bits.tobytes()
    memory.check()
    return buf


def check_decode(
    memory: Memory,
    src: Any,
    bits: npt.NDArray[Any],
    dtype: DType,
    *,
    first: int = 0,
    start: int = 0,
    stop: int | None = None,
    **options: Any,
) -> None:
    """Decode elements `start` to `stop` into poisoned memory: `bits` must come back."""
    expected = bits[start:stop]
    out = memory.elements(dtype, expected.size, first)
    whole = (start, stop) == (0, None)
    if whole and isinstance(src, tw.Buffer):
        out = out.reshape(src.plan.shape)
    if not whole:
        options |= {"start": start, "stop": stop}
    if isinstance(src, tw.Buffer):
        options["scratch"] = memory.take(src.plan.scratch_nbytes)
        before = raw(src.array).copy()
    assert tw.decode(src, out=out, backend="triton", **options) is out
    assert_same(raw(out), expected.view(np.uint8), f"elements {start} to {stop}")
    if isinstance(src, tw.Buffer):
        src.check()
        assert_same(raw(src.array), before, "the buffer that was decoded")
    memory.check()


def there_and_back(
    place: str, bits: npt.NDArray[Any], dtype: DType, codec: tw.Codec | None = None, **options: Any
) -> tw.Buffer:
    memory = Memory(place)
    buf = check_encode(memory, bits, dtype, codec or tw.codec("zipccl"), **options)
    check_decode(memory, buf, decoded_bits(buf, bits), dtype)
    return buf


def decoded_bits(buf: tw.Buffer, bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What must come out of `buf`: `bits`, or what the reference makes of it."""
    if buf.plan.codec.lossless:
        return bits
    values: npt.NDArray[Any] = tw.decode(bytes(buf), backend="ref").reshape(-1)
    return values.view(bits.dtype)


def patterns(names: tuple[str, ...], dtype: DType, n: int) -> npt.NDArray[Any]:
    """`n` elements of each pattern, one after the other."""
    return np.concatenate([make_bits(name, dtype, n, seed=i) for i, name in enumerate(names)])


def sums_agree(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    """Bit by bit the same, but for what is in a NaN: devices make others than hosts."""
    both = np.isnan(found) & np.isnan(expected)
    width = f"u{found.itemsize}"
    return bool((both | (found.view(width) == expected.view(width))).all())
