"""Selections of damaged buffers: what specs/buffer.md, "Partial decoding", and the pages list.

And sums of damaged buffers, which are damaged as a whole.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tightwire as tw
from support import ALONE, make_bits, repair
from tightwire.engine import parse
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import HOST_BACKENDS

Range = tuple[int, int]
VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors"


class Damage(NamedTuple):
    """Bytes that are wrong in chunk 0 of a tensor, and the elements that they spoil."""

    codec: tw.Codec
    pattern: str
    chunk_nelem: int
    section: int
    at: int
    new: str
    spoilt: Range
    dtype: str = "bfloat16"


ZIPCCL, SIGMA = tw.codec("zipccl"), tw.codec("zipccl", window="sigma")
SDP4BIT, TACO = tw.codec("sdp4bit"), tw.codec("taco")
TAHQUANT, DYNAMIQ = tw.codec("tahquant", hidden=144), tw.codec("dynamiq", rounding="nearest")
OMNIREDUCE = tw.codec("omnireduce", block=64)
HUFFMAN = tw.codec("huffman")
CASES = {
    "raw": Damage(tw.codec("raw"), "normal", 900, 0, 7, "ff", (0, 0)),
    "zipccl_first_offset": Damage(ZIPCCL, "normal", 12288, 1, 0, "01", (0, 4096)),
    "zipccl_offset": Damage(ZIPCCL, "normal", 12288, 1, 4, "ffffffff", (0, 8192)),
    "zipccl_window": Damage(ZIPCCL, "normal", 12288, 1, 14, "ffff", (4096, 8192)),
    "zipccl_one_window": Damage(SIGMA, "normal", 12288, 1, 16, "0100", (8192, 12288)),
    "mx": Damage(tw.codec("mx", element="e3m2"), "normal", 501, 0, 375, "80", (500, 501)),
    "nvfp4_scale": Damage(tw.codec("nvfp4"), "normal", 501, 1, 0, "00000000", (0, 501)),
    "nvfp4_tail": Damage(tw.codec("nvfp4"), "normal", 501, 0, 250, "ff", (500, 501)),
    "taco_scale": Damage(TACO, "normal", 900, 1, 8, "00000000", (256, 512)),
    "taco_code": Damage(TACO, "normal", 900, 0, 300, "7f", (256, 512)),
    "sdp4bit_scale": Damage(SDP4BIT, "normal", 501, 1, 4, "00000000", (128, 256)),
    "sdp4bit_code": Damage(SDP4BIT, "normal", 501, 0, 100, "88", (128, 256)),
    "sdp4bit_tail": Damage(SDP4BIT, "normal", 501, 0, 250, "11", (500, 501)),
    "tahquant_index": Damage(TAHQUANT, "normal", 1008, 2, 0, "7f", (0, 1008)),
    "tahquant_tile": Damage(TAHQUANT, "normal", 1008, 1, 16, "007c", (208, 272)),
    "dynamiq_width": Damage(DYNAMIQ, "normal", 768, 2, 0, "00", (0, 768)),
    "dynamiq_scale": Damage(DYNAMIQ, "normal", 768, 1, 2, "0100", (256, 512)),
    "dynamiq_rows": Damage(DYNAMIQ, "zero", 768, 0, 400, "01", (767, 768)),
    "thc_count": Damage(tw.codec("thc"), "normal", 2048, 0, 2048, "00", (0, 2048)),
    "thc_norm": Damage(tw.codec("thc"), "normal", 2048, 1, 20, "01000000", (0, 2048)),
    "thc_cell": Damage(tw.codec("thc"), "normal", 2048, 0, 1500, "ff", (1024, 2048)),
    "omnireduce": Damage(OMNIREDUCE, "normal", 400, 1, 0, "80", (0, 400)),
    "huffman_offset": Damage(HUFFMAN, "normal", 40000, 0, 4, "ffffffff", (0, 40000)),
    "huffman_planes": Damage(HUFFMAN, "normal", 40000, 0, 8, "07", (0, 40000)),
    "lhc": Damage(tw.codec("lhc"), "one_hot", 3001, 1, 375, "80", (0, 3001)),
}


def tensor(case: Damage) -> Any:
    kind = BY_NAME[case.dtype]
    nelem = 2 * case.chunk_nelem
    return make_bits(case.pattern, kind, nelem).view(kind.numpy)


def encoded(case: Damage, checksum: bool = True) -> tw.Buffer:
    """Two chunks, without damage."""
    return case.codec.encode(tensor(case), chunks=2, key=tw.Key(1), checksum=checksum)


def damaged(case: Damage, checksum: bool = True) -> bytes:
    """Two chunks, the first with its damage; checksums are right, or there are none."""
    data = bytearray(bytes(encoded(case, checksum)))
    plan = parse(np.frombuffer(bytes(data), np.uint8)).plan
    assert plan.codec.name == case.codec.name
    at = plan.static_offset + case.at
    at += sum(s.nbytes for s in plan.layout.sections[: case.section])
    new = bytes.fromhex(case.new)
    assert data[at : at + len(new)] != new
    data[at : at + len(new)] = new
    repair(data)
    return bytes(data)


def outcome(data: Any, start: int, stop: int, backend: str, verify: bool | None = None) -> Any:
    """The elements' bytes, or the reason of the refusal."""
    source = data
    if backend == "triton":
        source = pytest.importorskip("torch").frombuffer(bytearray(data), dtype=_uint8())
    try:
        y = tw.decode(source, start=start, stop=stop, backend=backend, verify=verify)
    except tw.FormatError as error:
        return error.reason
    return y.view(_uint8()).numpy().tobytes() if backend == "triton" else y.tobytes()


def _uint8() -> Any:
    return pytest.importorskip("torch").uint8


def selections(case: Damage) -> list[Range]:
    """Single elements at all the places where the verdict may change, runs and empty ranges."""
    n = case.chunk_nelem
    edges = {0, n // 2, n - 1, *(e + d for e in case.spoilt for d in (-1, 0) if 0 <= e + d < n)}
    runs = [(0, n // 3), (n // 3, n - 1), (n - 2, n + 2)]
    return [(e, e + 1) for e in sorted(edges)] + runs + [(e, e) for e in (0, 1, n // 2, n, 2 * n)]


def test_every_codec_has_a_case() -> None:
    assert {case.codec.name for case in CASES.values()} == set(ALONE)


@pytest.mark.parametrize("name", CASES)
def test_a_part_is_refused_for_what_it_touches(name: str, backend: str) -> None:
    check_case(CASES[name], backend, selections(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_part_is_refused_for_what_it_touches_on_a_device(name: str) -> None:
    pytest.importorskip("triton")
    case = CASES[name]
    lo, hi = case.spoilt
    n = case.chunk_nelem
    beside = (hi, hi + 1) if hi < n else (max(lo - 1, 0), lo)
    check_case(case, "triton", [(lo, min(lo + 1, hi)), (hi - 1, hi) if hi else (5, 9), beside])


def check_case(case: Damage, backend: str, ranges: list[Range]) -> None:
    data = damaged(case)
    lo, hi = case.spoilt
    n = case.chunk_nelem
    for start, stop in ranges:
        spoilt = max(start, lo) < min(stop, hi)
        found = outcome(data, start, stop, backend)
        assert (found == "bad_payload") == spoilt, (start, stop, found)
        assert isinstance(found, str) == spoilt
    if lo < hi:
        assert outcome(data, 0, n, backend) == "bad_payload"
        assert outcome(data, n - 1, n, backend, verify=True) == "bad_payload"
        assert outcome(data, 0, 1, backend, verify=True) == "bad_payload"
    whole = outcome(data, n, 2 * n, backend)
    assert whole == tw.decode(encoded(case))[n:].tobytes()
    assert outcome(data, 0, 0, backend, verify=True) == b""


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_added_from_a_damaged_buffer(name: str) -> None:
    case = CASES[name]
    x = tensor(case)
    # A bit of the last chunk, and what only the codec finds.
    flipped = bytearray(bytes(encoded(case)))
    plan = parse(np.frombuffer(bytes(flipped), np.uint8)).plan
    flipped[plan.static_offset + plan.static_stride + 3] ^= 1
    buffers = [(bytes(flipped), "checksum_mismatch", True)]
    if case.spoilt[0] < case.spoilt[1]:
        buffers += [
            (damaged(case, checksum), "bad_payload", checksum) for checksum in (True, False)
        ]
    for data, reason, checksum in buffers:
        acc = np.ones(x.size, np.float32)
        with pytest.raises(tw.FormatError, match=reason):
            case.codec.decode_add(data, acc)
        # A bad payload may be found when other chunks have been added.
        assert (acc[: case.chunk_nelem] == 1).all()
        assert reason == "bad_payload" or (acc == 1).all()
        options: dict[str, Any] = {"key": tw.Key(1), "checksum": checksum}
        for chunks, backend in itertools.product((1, 2), HOST_BACKENDS):
            with pytest.raises(tw.FormatError, match=reason):
                case.codec.decode_add_encode(data, x, chunks=chunks, backend=backend, **options)


@pytest.mark.slow
def test_both_host_backends_judge_parts_alike() -> None:
    """Bytes of the payload damaged at random; checksums right and wrong."""
    rng = np.random.default_rng(0)
    refused = 0
    for name, case in CASES.items():
        original = bytes(encoded(case))
        first = parse(np.frombuffer(original, np.uint8)).plan.static_offset
        n = 2 * case.chunk_nelem
        borders = [0, 1, n // 4, n // 2 - 1, n // 2, n // 2 + 1, n - 1, n]
        for k in range(24):
            data = bytearray(original)
            at = int(rng.integers(first if k % 2 else max(first, len(data) - 600), len(data)))
            data[at] = int(rng.choice([0, 1, 127, 128, 255, data[at] ^ 1]))
            if k % 4:
                repair(data)
            ends = rng.choice(borders, 2) if k % 3 == 0 else rng.integers(0, n + 1, 2)
            start, stop = sorted(ends.tolist())
            verify = (None, None, False, True)[k // 3 % 4]
            found = outcome(bytes(data), start, stop, "ref", verify)
            where = (name, at, start, stop, verify)
            assert outcome(bytes(data), start, stop, "cpu", verify) == found, where
            refused += isinstance(found, str)
    assert refused > 50


def test_an_empty_selection_reads_no_chunk(backend: str) -> None:
    data = bytes(encoded(CASES["sdp4bit_tail"]))
    first = parse(np.frombuffer(data, np.uint8)).plan.static_offset
    spoilt = data[:first] + b"\xff" * (len(data) - first)
    for at in (0, 7, 501, 1002):
        assert outcome(spoilt, at, at, backend) == b""
    assert outcome(spoilt[:-128], 7, 7, backend) == "truncated"


DELTA_TILE = 32768


def of_delta(form: str) -> tuple[bytes, Any, Any]:
    """Two chunks of three tiles each, damaged in the second tile; the base, and the tensor."""
    kind = BY_NAME["bfloat16"]
    x = make_bits("normal", kind, 6 * DELTA_TILE).view(kind.numpy)
    base = x.copy()
    base.view(kind.bits)[::500] ^= 1
    buffer = tw.codec("delta", form=form).encode(x, base=base, chunks=2, backend="ref")
    data = bytearray(bytes(buffer))
    plan = parse(np.frombuffer(bytes(data), np.uint8)).plan
    words = int(np.frombuffer(bytes(data), "<u4", 3, plan.static_offset + 16)[1])
    at = plan.dynamic_offset + 4 * words
    # Almost any bits may be a center and a scale, but no number of changes starts so.
    data[at : at + 12] = bytes(12)
    repair(data)
    return bytes(data), base, x


@pytest.mark.parametrize("form", ["adaptive", "difference", "overwrite"])
def test_a_part_of_a_delta_is_refused_for_what_it_touches(form: str, backend: str) -> None:
    data, base, x = of_delta(form)
    n = 3 * DELTA_TILE

    def part(start: int, stop: int, against: Any, verify: bool | None = None) -> Any:
        options: dict[str, Any] = {"start": start, "stop": stop, "verify": verify}
        try:
            return tw.decode(data, base=against, backend=backend, **options).tobytes()
        except tw.FormatError as error:
            return error.reason

    sound = (0, 1), (5, DELTA_TILE), (2 * DELTA_TILE, n), (n - 1, n + 9), (n, 2 * n), (7, 7)
    spoilt = (DELTA_TILE - 1, DELTA_TILE + 1), (DELTA_TILE, DELTA_TILE + 1), (3, n - 1), (0, 2 * n)
    for start, stop in sound:
        assert part(start, stop, base) == x[start:stop].tobytes(), (start, stop)
    for start, stop in spoilt:
        assert part(start, stop, base) == "bad_payload", (start, stop)
    assert part(0, 1, base, verify=True) == "bad_payload"
    # The digest is that of the whole chunk of the base, and of no other.
    other = base.copy()
    other.view(np.uint16)[n - 1] ^= 1
    for start, stop in (*sound[:4], *spoilt):
        for verify in (None, False, True):
            assert part(start, stop, other, verify) == "base_mismatch", (start, stop)
    assert part(n, 2 * n, other) == x[n:].tobytes()


@pytest.mark.parametrize("name", ["differences", "new_values", "planes"])
def test_a_tile_longer_than_plain_is_refused_where_it_is_touched(name: str, backend: str) -> None:
    path = VECTORS / "invalid" / f"delta_long_{name}.tw"
    data, base = path.read_bytes(), np.fromfile(path.with_suffix(".base"), np.uint8)
    sound = tw.decode(data, base=base, backend=backend, start=7, stop=DELTA_TILE)
    assert sound.tobytes() == base[7:DELTA_TILE].tobytes()
    for start in (7, DELTA_TILE + 5):
        with pytest.raises(tw.FormatError, match="bad_payload"):
            tw.decode(data, base=base, backend=backend, start=start, stop=DELTA_TILE + 6)
