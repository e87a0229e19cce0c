"""sdp4bit and tahquant: the kernels against the reference; see kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from kernels import MARKS, Memory, check_decode, check_encode, decoded_bits, raw, sums_agree
from support import KEY, PATTERNS, make_bits
from tightwire.codecs.zipccl import TILE
from tightwire.formats.dtypes import BY_NAME

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = MARKS

#: Pairs of codecs: of a buffer, and of the sum that is made of it.
SDP4BIT = {
    "two_levels": (
        tw.codec("sdp4bit", bits=8, rotate="encode"),
        tw.codec("sdp4bit", rotate="decode", rounding="stochastic"),
    ),
    "weights": (
        tw.codec("sdp4bit", rotate="none", group=4096),
        tw.codec("sdp4bit", bits=8, group=32, rounding="stochastic"),
    ),
}


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("pair", SDP4BIT.values(), ids=SDP4BIT)
def test_sdp4bit_sums(
    place: str, pair: tuple[tw.Codec, tw.Codec], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoded by one codec, added in one pass to what the other encodes, and that decoded."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, (source, codec) = BY_NAME[name], pair
    for pattern, n, chunks, first in (("special", TILE + 700, 1, 0), ("normal", 1301, 2, 1)):
        bits, other = make_bits(pattern, dtype, n), make_bits("scales", dtype, n, seed=1)
        memory = Memory(place)
        src = check_encode(memory, bits, dtype, source, chunks=chunks)
        x = memory.put(other, dtype, first)
        out, scratch = memory.take(src.plan.nbytes + 4096), memory.take(src.plan.scratch_nbytes)
        total = codec.decode_add_encode(
            src, x, key=KEY, out=out, scratch=scratch, chunks=chunks, backend="triton"
        )
        src.check()
        expected = codec.decode_add_encode(
            bytes(src), other.view(dtype.numpy), key=KEY, chunks=chunks, backend="ref"
        )
        assert bytes(total) == bytes(expected)
        check_decode(memory, total, decoded_bits(expected, bits), dtype, start=40, stop=n - 1)
        memory.check()
    src.array[200] ^= 1
    codec.decode_add_encode(src, x, key=KEY, chunks=chunks, backend="triton")
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        src.check()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "params", "n", "chunks", "first"),
    [
        ("float32", {}, TILE + 700, 1, 0),
        ("bfloat16", {"hidden": 1024}, 6 * 1024, 1, 0),
        ("float16", {"hidden": 399}, 4500, 2, 0),
        ("bfloat16", {"hidden": 400}, 3 * 2800, 3, 1),
        ("float32", {"direction": "backward", "hidden": 100}, TILE + 700, 1, 0),
        ("bfloat16", {"direction": "backward"}, 2 * (TILE + 64), 2, 0),
    ],
)
def test_tahquant(
    place: str,
    name: str,
    params: dict[str, Any],
    n: int,
    chunks: int,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways, in part, added to float32, and added and encoded again without a temporary sum."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, kind, codec = BY_NAME[name], BY_NAME["float32"], tw.codec("tahquant", **params)
    for pattern in PATTERNS if place == "cuda" else ("special",):
        bits, other = make_bits(pattern, dtype, n), make_bits("scales", dtype, n, seed=1)
        memory = Memory(place)
        buf = check_encode(memory, bits, dtype, codec, first=first, chunks=chunks)
        assert buf.plan.codec.name == "tahquant"
        expected = decoded_bits(buf, bits)
        for start, stop in ((0, None), (100, n - 9), (n // 2, n // 2 + 70)):
            check_decode(memory, buf, expected, dtype, first=first, start=start, stop=stop)
        check_decode(memory, buf, expected, dtype, start=n - 3, stop=n, verify=True)
        sums = make_bits("normal", kind, n, seed=2).view(np.float32)
        acc = memory.put(sums.view(np.uint32), kind)
        codec.decode_add(buf, acc)
        buf.check()
        codec.decode_add(bytes(buf), sums)
        assert sums_agree(raw(acc).view(np.float32), sums)
        out, scratch = memory.take(buf.plan.nbytes), memory.take(buf.plan.scratch_nbytes)
        x = memory.put(other, dtype, first)
        total = codec.decode_add_encode(
            buf, x, out=out, scratch=scratch, chunks=chunks, backend="triton"
        )
        buf.check()
        again = codec.decode_add_encode(
            bytes(buf), other.view(dtype.numpy), chunks=chunks, backend="ref"
        )
        assert bytes(total) == bytes(again)
        memory.check()


def test_tahquant_logarithms_of_numbers_of_8_bits() -> None:
    """Between powers of two the polynomial gives what the page's whole numbers do, fused or not."""
    from tightwire.codecs import tahquant_ranks_triton
    from tightwire.codecs.tahquant import LOG

    f = np.arange(128) << 9
    h = LOG[0] - ((LOG[1] - (LOG[2] * f >> 16)) * f >> 16)
    expected = (f + ((f * (65536 - f) >> 16) * h >> 16) >> 4) - (f >> 4)
    a, b, c, d = (np.float32(x) for x in tahquant_ranks_triton.SHORT_LOG)
    less = np.float32(tahquant_ranks_triton._SHORT_LESS.value)
    for kind in (np.float32, np.float64):
        # Products and sums of float64 are exact enough to be rounded once, as if fused.
        m: Any = (1 + f / 65536).astype(kind)
        p = (kind(d) * m + kind(c)).astype(np.float32)
        p = (p.astype(kind) * m + kind(b)).astype(np.float32)
        p = (p.astype(kind) * m + kind(a)).astype(np.float32)
        assert np.array_equal(np.floor(p.astype(kind) * m - kind(less)), expected)


def test_tahquant_with_more_tokens_than_a_program_looks_at(place: str) -> None:
    """Some thousand tokens, equal ones among them, in the kernels that rank them."""
    from tightwire.codecs import tahquant_ranks_triton
    from tightwire.codecs.tahquant import Tahquant

    dtype, hidden, tokens = BY_NAME["bfloat16"], 64, 5000
    assert tokens > tahquant_ranks_triton._TOKENS.value
    codec = tw.codec("tahquant", hidden=hidden)
    plan = codec.plan((tokens * hidden,), dtype.name)
    bits = make_bits("normal", dtype, tokens * hidden)
    expected = np.frombuffer(bytes(codec.encode(bits.view(dtype.numpy))), np.uint8)
    index = slice(plan.dynamic_offset - plan.layout.sections[2].nbytes, plan.dynamic_offset)
    spec = plan.codec
    narrow = np.unpackbits(expected[index], bitorder="little")[:tokens].astype(np.int64)
    assert isinstance(spec, Tahquant)
    memory = Memory(place)
    src = memory.put(expected, BY_NAME["uint8"])
    # Behind the table's words three rows of int32: ranks, those of a second buffer, entropies.
    stats = memory.elements(BY_NAME["int32"], 32 + 3 * tokens)
    status = memory.put(np.zeros(1, np.uint64), BY_NAME["int64"])
    tahquant_ranks_triton.read_ranks(plan, src, stats.view(torch.uint8), status, 0, 1)
    ranks = 2 * (np.cumsum(narrow) - narrow) + narrow
    assert raw(stats).view(np.int32)[32 : 32 + tokens].tolist() == ranks.tolist()
    assert int(status.item()) == 0
    entropies = np.where(narrow != 0, 7, 1000 + np.arange(tokens) % 3)
    entropies[np.flatnonzero(narrow)[-1]] = 1000
    stats[32 + 2 * tokens :] = torch.from_numpy(entropies.astype(np.int32))
    out = memory.take(plan.nbytes)
    table = tahquant_ranks_triton.table_on(plan, out.device)
    tahquant_ranks_triton._SELECT.launch(2, (out, stats.view(torch.uint8), table), 2)
    chosen = np.zeros(tokens, np.int64)
    chosen[np.argsort(entropies, kind="stable")[: tokens // 5]] = 1
    found = np.unpackbits(raw(out)[index][: tokens // 8], bitorder="little")[:tokens]
    assert found.tolist() == chosen.tolist()
    ranks = 2 * (np.cumsum(chosen) - chosen) + chosen
    assert raw(stats).view(np.int32)[32 : 32 + tokens].tolist() == ranks.tolist()
    memory.check()


@pytest.mark.parametrize(("at", "reason"), [(300, "checksum_mismatch"), (104, "bad_record")])
def test_tahquant_decode_add_encode_finds_damage(place: str, at: int, reason: str) -> None:
    dtype, codec = BY_NAME["bfloat16"], tw.codec("tahquant")
    memory = Memory(place)
    x = memory.put(make_bits("normal", dtype, TILE + 700), dtype)
    src = codec.encode(x, backend="triton")
    src.array[at] ^= 4
    codec.decode_add_encode(src, x, backend="triton")
    with pytest.raises(tw.FormatError, match=reason):
        src.check()
