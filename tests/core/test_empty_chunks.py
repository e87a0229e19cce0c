"""Chunks without elements: as many as there may be cost next to nothing, and are checked."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from support import ALONE, make_bits
from tightwire import engine
from tightwire.engine import Parsed
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import backend_module

KEY = tw.Key(1)
MANY = 1 << 16


def all_chunks(self: Parsed, chunks: range) -> range:
    """`Parsed.distinct`, of buffers whose chunks are all looked at."""
    return chunks


def few_empty() -> Any:
    """Of 300 chunks of 129 elements the last two have none, and the one before has 88."""
    return make_bits("scales", BY_NAME["float32"], 38401).view(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_every_empty_chunk_is_a_chunk(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = few_empty()
    buffer = tw.encode(x, name, key=KEY, chunks=300, backend=backend)
    assert buffer.plan.filled_chunks == 298
    found = tw.decode(bytes(buffer), backend=backend)
    other = tw.codec(name).decode_add(bytes(buffer), np.zeros_like(x))
    monkeypatch.setattr(Parsed, "distinct", all_chunks)
    for data in (bytes(buffer), bytes(buffer.array)):
        assert tw.decode(data, backend=backend).tobytes() == found.tobytes()
        tw.verify(data)
    assert tw.codec(name).decode_add(buffer, np.zeros_like(x)).tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 5])
def test_as_many_as_there_may_be(n: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs see the chunks that have elements, and one that has none."""
    seen = []
    module = backend_module("raw", backend)
    for name in ("encode_chunk", "decode_chunk"):
        plain = getattr(module, name)

        def counted(*arguments: Any, plain: Any = plain, **options: Any) -> Any:
            seen.append(plain)
            return plain(*arguments, **options)

        monkeypatch.setattr(module, name, functools.wraps(plain)(counted))
    x = np.arange(n, dtype=np.float32)
    data = bytes(tw.encode(x, "raw", chunks=MANY, backend=backend))
    assert len(seen) == n + 1
    assert tw.inspect(data).header.chunks == MANY
    assert tw.decode(data, backend=backend).tobytes() == x.tobytes()
    assert len(seen) == 2 * (n + 1)


@pytest.mark.slow
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("name", ["raw", "mx"])
def test_damage_of_any_is_found_as_if_there_were_no_other(
    name: str, checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = tw.encode(few_empty(), name, key=KEY, chunks=300, checksum=checksum)
    plan, original = buffer.plan, bytes(buffer)
    records = plan.header.nbytes + 32 * 298
    statics = plan.static_offset + plan.static_stride * 298
    places = [*range(records, records + 64, 4), *range(statics, plan.dynamic_offset, 149)]

    def outcomes() -> list[str]:
        found = []
        for at in places:
            data = bytearray(original)
            data[at] ^= 1
            try:
                found.append(tw.decode(data).tobytes().hex())
            except tw.FormatError as error:
                found.append(str(error))
        return found

    quick = outcomes()
    monkeypatch.setattr(Parsed, "distinct", all_chunks)
    assert quick == outcomes()
    assert not checksum or all("_" in outcome for outcome in quick)


def test_records_out_of_place_are_found_among_many() -> None:
    data = bytearray(bytes(tw.encode(np.zeros(5, np.float32), "raw", chunks=1000)))
    nbytes = int.from_bytes(data[8:12], "little")
    for field, value in ((16, 1), (16, 2), (16, 4), (20, 9), (8, 1), (24, 1)):
        damaged = data.copy()
        damaged[nbytes + 32 * 900 + field] = value
        with pytest.raises(tw.FormatError) as caught:
            engine.parse(np.frombuffer(bytes(damaged), np.uint8))
        few = bytearray(bytes(tw.encode(np.zeros(5, np.float32), "raw", chunks=20)))
        few[nbytes + 32 * 8 + field] = value
        with pytest.raises(tw.FormatError) as wanted:
            engine.parse(np.frombuffer(bytes(few), np.uint8))
        assert caught.value.reason == wanted.value.reason
