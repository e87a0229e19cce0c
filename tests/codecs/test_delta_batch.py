"""Many tensors and buffers of delta at once: the bytes, tensors and refusals of single calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from tightwire.codecs.common import frame_triton  # noqa: E402
from tightwire.codecs.delta_batch_triton import Rows  # noqa: E402
from tightwire.engine import parse  # noqa: E402
from tightwire.formats.dtypes import BY_NAME  # noqa: E402

#: Elements, share that has changed, most units, chunks, elements behind an aligned address.
TENSORS = [
    (900, 0.02, 2, 1, 0),
    (2001, 0.3, 9, 3, 0),
    (33_000, 0.01, 3, 1, 0),
    (777, 0.0, 1, 1, 0),
    (300, 1.0, 1 << 14, 1, 0),  # stored raw
    (1200, 0.9, 9000, 1, 0),
    (1900, 0.4, 0, 2, 0),  # other signs: tiles of planes
]
#: Behind an address that is no multiple of 16.
ODD = (1300, 0.05, 3, 1, 3)


class Case:
    """Tensors, bases, plans, and the bytes that the reference makes of them."""

    def __init__(
        self, dtype: str, place: str, tensors: Any, form: str = "adaptive", checksum: bool = True
    ) -> None:
        self.kind, self.place = BY_NAME[dtype], place
        codec = tw.codec("delta", form=form)
        self.plans, self.xs, self.bases, self.expected = [], [], [], []
        for i, (n, share, most, chunks, first) in enumerate(tensors):
            base, x = self.pair(n, share, most, i)
            options: dict[str, Any] = {"chunks": chunks, "checksum": checksum}
            plan = codec.plan((n,), dtype, **options)
            assert plan.codec.name == "delta"
            self.plans.append(plan)
            self.bases.append(self.tensor(base, first))
            self.xs.append(self.tensor(x, first))
            host = [v.view(self.kind.numpy) for v in (x, base)]
            room = np.full(plan.nbytes, 0x5A, np.uint8)
            self.expected.append(
                codec.encode(host[0], base=host[1], out=room, backend="ref", **options)
            )

    def pair(self, n: int, share: float, most: int, seed: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(seed)
        if self.kind.is_float:
            base = rng.normal(0, 0.02, n).astype(np.float32).astype(self.kind.numpy)
        else:
            base = rng.integers(0, 200, n).astype(self.kind.numpy)
        base = base.view(self.kind.bits)
        x = base.copy()
        chosen = rng.random(n) < share
        if most:
            step = rng.integers(1, most + 1, n) * rng.choice([-1, 1], n)
            x[chosen] += step[chosen].astype(self.kind.bits)
        else:
            x[chosen] ^= self.kind.bits.type(1 << 8 * self.kind.itemsize - 1)
        return base, x

    def tensor(self, bits: Any, first: int) -> Any:
        """A tensor of its own memory, so many elements behind its start."""
        dtype = getattr(torch, self.kind.name)
        room = torch.zeros(bits.size + first, dtype=dtype)[first:]
        room.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
        moved = torch.empty(bits.size + first, dtype=dtype, device=self.place)[first:]
        return moved.copy_(room)

    def outs(self) -> list[Any]:
        """Memory for buffers, in which nothing is 0."""
        return [
            torch.full((p.nbytes,), 0xA5, dtype=torch.uint8, device=self.place) for p in self.plans
        ]

    def decode(self, srcs: list[Any], goal: Any, bases: Any = None, **options: Any) -> Any:
        """The tensors, and what is wrong with each buffer."""
        bases = bases or [b.clone() for b in self.bases]
        outs = [torch.full_like(x, 3) for x in self.xs] if goal == "out" else bases
        statuses = torch.zeros(len(srcs), dtype=torch.int64, device=self.place)
        words = statuses.data_ptr() + 8 * np.arange(len(srcs))
        at = np.array([s.data_ptr() for s in srcs])
        goals: list[Any] = ["check", "base"] if goal == "base" else [goal]
        for one in goals:
            Rows(self.plans, at, outs, bases, words, **options).decode(one)
        problems = [frame_triton.problem(int(word)) for word in statuses]
        return outs, ["" if p is None else p.reason for p in problems]

    def packed(self) -> tuple[list[Any], Any]:
        """The packed buffers on the device, and where their dynamic parts are."""
        data = [
            torch.frombuffer(bytearray(bytes(e)), dtype=torch.uint8).to(self.place)
            for e in self.expected
        ]
        heads = [parse(np.frombuffer(bytes(e), np.uint8)) for e in self.expected]
        starts = [at for head in heads for at in head.dynamic_at]
        used = [r.dynamic_nbytes for head in heads for r in head.records]
        return data, (np.array(starts), np.array(used))


def same(xs: list[Any], ys: list[Any]) -> list[bool]:
    return [
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(xs, ys, strict=True)
    ]


@pytest.mark.fast_cases(0)
@pytest.mark.slow_cases(7)
@pytest.mark.parametrize("form", ["adaptive", "difference", "overwrite"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int16"])
def test_bytes_of_single_calls(dtype: str, form: str, place: str) -> None:
    for tensors in (TENSORS, [TENSORS[0], ODD]):
        case = Case(dtype, place, tensors, form, checksum=form != "overwrite")
        outs = case.outs()
        Rows(case.plans, outs, case.xs, case.bases).encode()
        for plan, out, expected in zip(case.plans, outs, case.expected, strict=True):
            assert bytes(tw.Buffer.wrap(plan, out)) == bytes(expected)
        packed, places = case.packed()
        for goal in ("out", "check", "base"):
            found, problems = case.decode(outs, goal, planned=[True] * len(outs))
            assert not any(problems)
            assert all(same(found, case.bases if goal == "check" else case.xs))
            found, problems = case.decode(packed, goal, packed=places)
            assert not any(problems)
            assert all(same(found, case.bases if goal == "check" else case.xs))


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["base", "out"])
def test_damage_and_wrong_bases_among_others(goal: str, place: str) -> None:
    """Nothing is written over a base that is wrong, or by a buffer that is damaged."""
    case = Case("bfloat16", place, TENSORS)
    packed, places = case.packed()
    # A digest, a static part, a dynamic part, padding behind it.
    packed[0][case.plans[0].static_offset] ^= 1
    packed[2][int(places[0][4]) + 200] ^= 1
    packed[4][-1] ^= 0x40
    bases = [b.clone() for b in case.bases]
    bases[3].view(torch.int16)[700] ^= 1
    before = [b.clone() for b in bases]
    found, problems = case.decode(packed, goal, bases, packed=places)
    alone = []
    for data, base in zip(packed, before, strict=True):
        try:
            tw.decode(data, base=base, verify=True, backend="triton")
            alone.append("")
        except tw.FormatError as error:
            alone.append(error.reason)
    assert problems == alone
    assert [bool(reason) for reason in alone] == [True, False, True, True, True, False, False]
    assert alone[3] == "base_mismatch"
    right = [1, 5, 6]
    assert all(same([found[i] for i in right], [case.xs[i] for i in right]))
    if goal == "base":
        assert all(same([found[i] for i in (0, 2, 3, 4)], [before[i] for i in (0, 2, 3, 4)]))
