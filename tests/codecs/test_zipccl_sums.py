"""Sums of zipccl buffers on a GPU against codecs/common/sums.py: the same bits."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from support import make_bits  # noqa: E402
from tightwire.codecs.common import frame_triton  # noqa: E402
from tightwire.codecs.common.sums import sum_of  # noqa: E402
from tightwire.formats.dtypes import BY_NAME  # noqa: E402
from tightwire.planning import device_module  # noqa: E402

FLOAT32 = BY_NAME["float32"]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")


def elements(bits: Any, dtype: str, place: str, first: int = 0) -> Any:
    """A tensor of these bits, `first` elements behind an aligned address."""
    room = torch.full((bits.size + first,), 7, dtype=getattr(torch, dtype), device=place)[first:]
    room.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
    return room


def bits_of(x: Any, dtype: str) -> Any:
    return x.cpu().view(torch.uint8).numpy().view(BY_NAME[dtype].bits)


class Terms:
    """Buffers of one plan, where they are, and their elements' bits."""

    def __init__(
        self,
        dtype: str,
        patterns: list[Any],
        n: int,
        place: str,
        packed: bool = False,
        window: Any = "tile",
        **options: Any,
    ) -> None:
        codec = tw.codec("zipccl", window=window)
        self.kind, self.place = BY_NAME[dtype], place
        self.bits = [
            make_bits(p, self.kind, n, seed=i) if isinstance(p, str) else p
            for i, p in enumerate(patterns)
        ]
        buffers = [codec.encode(b.view(self.kind.numpy), **options) for b in self.bits]
        self.plan = buffers[0].plan
        self.starts = None
        self.sizes = [b.sizes for b in buffers]
        hosts = [
            np.frombuffer(bytes(b) if packed else cast(Any, b)._bytes, np.uint8) for b in buffers
        ]
        if packed:
            used = np.array(self.sizes)
            padded = -(-used // 128) * 128
            starts = self.plan.dynamic_offset + padded.cumsum(1) - padded
            self.starts = torch.from_numpy(starts).to(place)
        self.data = [torch.from_numpy(h.copy()).to(place) for h in hosts]
        self.sums = torch.full((len(buffers), self.plan.chunks), -1, device=place)
        self.statuses = torch.zeros(len(buffers), dtype=torch.int64, device=place)
        self.places = frame_triton.places_of(self.data, self.sums, self.statuses)

    def sum(self, out: Any, **options: Any) -> list[str]:
        """Sum up into `out`; what is wrong with each buffer."""
        self.statuses.zero_()
        kernels: Any = device_module("zipccl")
        options = {"planned": self.starts is None, "starts": self.starts} | options
        kernels.sum(self.plan, self.places, out, **options)
        problems = [frame_triton.problem(int(word)) for word in self.statuses]
        return ["" if p is None else p.reason for p in problems]

    def check(
        self,
        x: Any = None,
        place: int = 0,
        factor: float | None = None,
        wide: bool = False,
        first: int = 0,
    ) -> None:
        """Sum up all, and `x`, bits of the dtype or of float32: the reference's bits must come."""
        target = FLOAT32 if wide else self.kind
        terms = list(self.bits)
        options: dict[str, Any] = {"place": place, "factor": factor}
        if x is not None:
            terms.insert(place, x)
            own = x.dtype == self.kind.bits
            options["x"] = elements(x, self.kind.name if own else "float32", self.place, first)
        n = self.bits[0].size
        out = elements(np.full(n, 0xA5, target.bits), target.name, self.place, first)
        assert self.sum(out, **options) == [""] * len(self.bits)
        expected = sum_of(terms, self.kind, factor, target)
        wrong = np.flatnonzero(bits_of(out, target.name) != expected)
        assert not wrong.size, f"{wrong.size} elements differ, the first is {wrong[0]}"


PATTERNS = ["normal", "mixed_zeros", "special"]


@pytest.mark.parametrize(("n", "chunks"), [(2700, 1), (4096, 1), (9001, 2), (12301, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.fast_cases(1)
def test_sums(dtype: str, n: int, chunks: int, place: str) -> None:
    terms = Terms(dtype, PATTERNS, n, place, chunks=chunks)
    kind = BY_NAME[dtype]
    terms.check()
    terms.check(make_bits("normal", kind, n, seed=7), place=0, factor=1 / 3)
    terms.check(make_bits("normal", FLOAT32, n, seed=8), place=2, wide=True)
    terms.check(make_bits("normal", kind, n, seed=9), place=3, factor=0.375, first=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.fast_cases(2)
def test_chunks_that_are_raw(packed: bool, dtype: str, place: str) -> None:
    """The second buffer; its second chunk only."""
    n, kind = 4096 + 1400, BY_NAME[dtype]
    halves = [make_bits("normal", kind, n // 2), make_bits("random", kind, n // 2)]
    for pattern, chunks in (("random", 1), (np.concatenate(halves), 2)):
        terms = Terms(dtype, ["normal", pattern, "normal"], n, place, packed, chunks=chunks)
        assert terms.plan.raw_dynamic(0) in terms.sizes[1].tolist()
        terms.check(make_bits("normal", FLOAT32, n), place=1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.fast_cases(1)
def test_one_buffer_without_checksums(packed: bool, place: str) -> None:
    terms = Terms("bfloat16", ["special"], 5001, place, packed, checksum=False, chunks=2)
    terms.check()
    terms.check(factor=-2.0, wide=True)


@pytest.mark.parametrize("window", [120, "histogram"])
def test_one_window(window: Any, place: str) -> None:
    Terms("bfloat16", ["normal", "mixed_zeros"], 3000, place, window=window).check()


@pytest.mark.parametrize(
    ("section", "checksum", "reason"),
    [
        ("tile", True, "checksum_mismatch"),
        ("index", False, "bad_payload"),
        ("gap", False, "reserved_not_zero"),
        ("record", True, "bad_record"),
        ("header", True, "bad_header"),
    ],
)
@pytest.mark.fast_cases(2)
def test_damage_has_the_status_word_of_its_buffer(
    section: str, checksum: bool, reason: str, place: str
) -> None:
    terms = Terms("bfloat16", ["normal"] * 3, 4800, place, checksum=checksum)
    plan = terms.plan
    index = plan.static_offset + plan.layout.sections[0].nbytes
    at = {
        "tile": plan.static_offset + 5,
        "index": index + 4,
        "gap": plan.dynamic_offset - 1,
        "record": plan.header.nbytes + 15,
        "header": 40,
    }[section]
    terms.data[1][at] ^= 0x55
    out = torch.empty(4800, dtype=torch.bfloat16, device=place)
    assert terms.sum(out) == ["", reason, ""]


def test_sums_encoded_again(place: str) -> None:
    terms = Terms("bfloat16", PATTERNS, 4800, place)
    kernels: Any = device_module("zipccl")
    out = torch.full((terms.plan.nbytes,), 0xA5, dtype=torch.uint8, device=place)
    kernels.encode_sum(terms.plan, terms.places, out, factor=0.5)
    total = sum_of(terms.bits, terms.kind, 0.5, terms.kind)
    expected = tw.codec("zipccl").encode(total.view(terms.kind.numpy), backend="ref")
    assert bytes(tw.Buffer.wrap(terms.plan, out)) == bytes(expected)
