"""Many tensors and buffers of zipccl at once: the bytes, tensors and refusals of single calls."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from support import make_bits  # noqa: E402
from tightwire.codecs import zipccl_batch_triton  # noqa: E402
from tightwire.codecs.common import frame_triton  # noqa: E402
from tightwire.formats.dtypes import BY_NAME  # noqa: E402

#: Pattern, elements, chunks, elements behind an aligned address.
TENSORS = [
    ("normal", 4096, 1, 0),
    ("normal", 9001, 2, 0),
    ("random", 4800, 1, 0),  # stored raw
    ("mixed_zeros", 2700, 1, 1),
    ("scales", 8192, 1, 3),
    ("normal", 9001, 2, 0),
    ("half_escaped", 4200, 1, 0),
]


class Case:
    """Tensors, their plans, and the bytes that the reference makes of them."""

    def __init__(self, dtype: str, place: str, window: Any = "tile", checksum: bool = True) -> None:
        self.kind, self.place = BY_NAME[dtype], place
        self.codec = tw.codec("zipccl", window=window)
        self.plans, self.xs, self.expected, self.rooms = [], [], [], []
        for i, (pattern, n, chunks, first) in enumerate(TENSORS):
            bits = patterned(pattern, self.kind, n, i)
            options: dict[str, Any] = {"chunks": chunks, "checksum": checksum}
            plan = self.codec.plan((n,), dtype, **options)
            assert plan.codec.name == "zipccl"
            self.plans.append(plan)
            self.xs.append(self.tensor(bits, first))
            room = np.full(plan.nbytes, 0x5A, np.uint8)
            host = bits.view(self.kind.numpy)
            self.expected.append(self.codec.encode(host, out=room, backend="ref", **options))
            self.rooms.append(room)

    def tensor(self, bits: Any, first: int) -> Any:
        room = torch.zeros(bits.size + first, dtype=getattr(torch, self.kind.name))[first:]
        room.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
        # On a GPU, too, behind an aligned address.
        moved = torch.empty(bits.size + first, dtype=room.dtype, device=self.place)[first:]
        return moved.copy_(room)

    def decode(self, srcs: list[Any], **options: Any) -> tuple[list[Any], list[str]]:
        """The tensors, and what is wrong with each buffer."""
        outs = [torch.full_like(x, 3) for x in self.xs]
        statuses = torch.zeros(len(srcs), dtype=torch.int64, device=self.place)
        zipccl_batch_triton.decode_places(
            self.kind,
            self.plans,
            np.array([s.data_ptr() for s in srcs]),
            outs,
            statuses.data_ptr() + 8 * np.arange(len(srcs)),
            **options,
        )
        problems = [frame_triton.problem(int(word)) for word in statuses]
        return outs, ["" if p is None else p.reason for p in problems]

    def same(self, outs: list[Any]) -> list[bool]:
        return [
            torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            for x, y in zip(self.xs, outs, strict=True)
        ]


def patterned(pattern: str, kind: Any, n: int, seed: int) -> Any:
    if pattern != "half_escaped":
        return make_bits(pattern, kind, n, seed=seed)
    bits = make_bits("normal", kind, n, seed=seed)
    sign_and_mantissa = bits & ~np.array(((1 << kind.exponent) - 1) << kind.mantissa, bits.dtype)
    steps = np.arange(n) % 16
    exponents = np.where(steps < 4, steps % 3, (1 << kind.exponent) - 2).astype(bits.dtype)
    return sign_and_mantissa | exponents << bits.dtype.type(kind.mantissa)


@pytest.mark.parametrize("window", ["tile", "histogram", 5])
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]
)
@pytest.mark.fast_cases(1)
def test_bytes_of_single_calls(dtype: str, window: Any, place: str) -> None:
    case = Case(dtype, place, window, checksum=window != 5)
    outs = [torch.full((p.nbytes,), 0xA5, dtype=torch.uint8, device=place) for p in case.plans]
    stats = None
    if window == "histogram":
        stats = [torch.from_numpy(case.codec.measure(x.cpu())).to(place) for x in case.xs]
    zipccl_batch_triton.encode_many(case.plans, case.xs, outs, stats)
    for plan, out, expected in zip(case.plans, outs, case.expected, strict=True):
        assert bytes(tw.Buffer.wrap(plan, out)) == bytes(expected)
    statuses = list(torch.zeros(len(outs), 1, dtype=torch.int64, device=place))
    found = [torch.full_like(x, 3) for x in case.xs]
    zipccl_batch_triton.decode_many(case.plans, outs, found, statuses, [True] * len(outs))
    assert not any(statuses)
    assert all(case.same(found))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.fast_cases(1)
def test_damaged_buffers_among_others(packed: bool, place: str) -> None:
    case = Case("bfloat16", place)
    srcs, starts, used = [], [], []
    for plan, expected, room in zip(case.plans, case.expected, case.rooms, strict=True):
        data = np.frombuffer(bytes(expected), np.uint8) if packed else room
        srcs.append(torch.from_numpy(data.copy()).to(place))
        sizes = expected.sizes
        padded = -(-sizes // 128) * 128
        starts.append(plan.dynamic_offset + padded.cumsum() - padded)
        used.append(sizes)
    options: dict[str, Any] = {"planned": None if packed else np.ones(len(srcs), bool)}
    if packed:
        options["packed"] = np.concatenate(starts), np.concatenate(used)
    outs, problems = case.decode(srcs, **options)
    assert problems == [""] * len(srcs)
    assert all(case.same(outs))
    srcs[1][case.plans[1].static_offset + 100] ^= 1
    srcs[4][case.plans[4].header.nbytes + 15] = 0x7F  # dynamic bytes in the record
    outs, problems = case.decode(srcs, **options)
    assert problems == ["", "checksum_mismatch", "", "", "bad_record", "", ""]
    assert [same for i, same in enumerate(case.same(outs)) if i not in (1, 4)] == [True] * 5
    if packed:
        return
    srcs[3][40] ^= 1
    assert case.decode(srcs, **options)[1][3] == "bad_header"


def test_wide_raw_units(place: str) -> None:
    """Buffers of the raw codec, of elements of 8 bytes, by the kernels of 4."""
    x = torch.arange(700, dtype=torch.int64)
    buf = tw.codec("raw").encode(x.numpy(), chunks=3)
    src = torch.from_numpy(np.frombuffer(bytes(buf), np.uint8).copy()).to(place)
    out = torch.zeros(700, dtype=torch.int64, device=place)
    status = torch.zeros(1, dtype=torch.int64, device=place)
    starts = np.full(3, cast(Any, buf).plan.dynamic_offset)
    zipccl_batch_triton.decode_places(
        zipccl_batch_triton.RAW_AS[4],
        [buf.plan],
        np.array([src.data_ptr()]),
        [out],
        np.array([status.data_ptr()]),
        packed=(starts, starts * 0),
    )
    assert not status.any()
    assert torch.equal(out.cpu(), x)
