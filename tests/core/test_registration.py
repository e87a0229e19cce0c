"""Codecs from outside of the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import tightwire as tw
from tightwire.codecs.common.base import ChunkDecoded, ChunkResult, CodecSpec
from tightwire.codecs.common.sections import Array
from tightwire.formats import codec_ids
from tightwire.registration import forget


@dataclass(frozen=True)
class Nibbles(CodecSpec):
    """The upper four bits of each byte."""

    name: ClassVar[str] = "nibbles"
    id: ClassVar[int] = 32770
    dtypes: ClassVar[tuple[str, ...]] = ("uint8",)
    lossless: ClassVar[bool] = False
    max_nelem: ClassVar[int] = 1 << 37

    def arrays(self, dtype: Any, nelem: int) -> tuple[Array, ...]:
        """Two codes a byte, the first in the low bits."""
        return (Array("payload", 4, nelem),)


def encode_chunk(
    spec: Any, chunk: Any, bits: Any, *, stats: Any = None, key: Any = None, threads: int = 1
) -> ChunkResult:
    (payload,) = spec.static_arrays(chunk)
    codes = np.zeros(2 * payload.size, np.uint8)
    codes[: bits.size] = bits >> 4
    payload[:] = codes[::2] | codes[1::2] << 4
    return ChunkResult(0)


def decode_chunk(
    spec: Any, chunk: Any, out: Any, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    (payload,) = spec.static_arrays(chunk)
    at = np.arange(start, start + out.size)
    out[:] = (payload[at // 2] >> (at % 2 * 4).astype(np.uint8) & 15) << 4
    return ChunkDecoded()


def module(**changes: Any) -> Any:
    """A module, of which some names are changed, or missing if they are None."""
    found = ModuleType("nibbles")
    names = {"SPEC": Nibbles, "encode_chunk": encode_chunk, "decode_chunk": decode_chunk} | changes
    vars(found).update({name: value for name, value in names.items() if value is not None})
    return found


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """The process knows the codecs of the library alone after each test."""
    ids, names = dict(codec_ids.CODEC_IDS), dict(codec_ids.NAMES_BY_ID)
    yield
    for name in set(codec_ids.CODEC_IDS) - set(ids):
        del codec_ids.CODEC_IDS[name]
    for number in set(codec_ids.NAMES_BY_ID) - set(names):
        del codec_ids.NAMES_BY_ID[number]
    for name in [name for name in sys.modules if name.startswith("tightwire.codecs.nibbles")]:
        del sys.modules[name]
    forget()


X = np.arange(1001, dtype=np.uint32).astype(np.uint8)


@pytest.mark.parametrize("backend", ["ref", None])
def test_a_codec_without_a_compiled_form(backend: str | None) -> None:
    tw.register_codec(module())
    assert "nibbles" in tw.list_codecs()
    for chunks in (1, 3):
        buf = tw.codec("nibbles").encode(X, chunks=chunks, backend=backend)
        assert buf.header.codec == "nibbles"
        assert np.array_equal(tw.decode(bytes(buf), backend=backend), X & 0xF0)
        assert np.array_equal(tw.decode(bytes(buf), start=333, stop=335), X[333:335] & 0xF0)
    with pytest.raises(ValueError, match="no compiled form"):
        tw.encode(X, "nibbles", backend="cpu")


def test_a_module_that_comes_later_is_found() -> None:
    tw.register_codec(module())
    with pytest.raises(ValueError, match="Allowed: backend 'ref' or None"):
        tw.encode(X, "nibbles", backend="cpu")
    tw.register_codec(module(), cpu=module())
    assert bytes(tw.encode(X, "nibbles", backend="cpu")) == bytes(tw.encode(X, "nibbles"))


@pytest.mark.parametrize("backend", ["ref", None])
def test_bits_behind_the_last_code_are_refused_by_the_library(backend: str | None) -> None:
    """Kernels refuse them too, so codecs need no check of their own."""
    tw.register_codec(module())
    buf = tw.codec("nibbles").encode(X, checksum=False)
    data = bytearray(bytes(buf))
    data[buf.plan.static_offset + X.size // 2] |= 0x10
    with pytest.raises(tw.FormatError) as caught:
        tw.decode(data, backend=backend)
    assert caught.value.reason == "bad_payload"
    with pytest.raises(tw.FormatError):
        tw.verify(data)
    assert np.array_equal(tw.decode(data, start=0, stop=1000), X[:1000] & 0xF0)


def test_sums_refuse_them_too() -> None:
    pytest.importorskip("numba")

    class Floats(Nibbles):
        dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    def halves(spec: Any, chunk: Any, out: Any, start: int = 0, *, threads: int = 1) -> Any:
        out[:] = 0
        return ChunkDecoded()

    def nothing(spec: Any, chunk: Any, bits: Any, **options: Any) -> ChunkResult:
        return ChunkResult(0)

    tw.register_codec(module(SPEC=Floats, encode_chunk=nothing, decode_chunk=halves))
    x = np.zeros(1001, np.float32)
    good = tw.encode(x, "nibbles", checksum=False)
    assert not tw.decode_sum([good, good]).any()
    data = bytearray(bytes(good))
    data[good.plan.static_offset + 500] |= 0x10
    with pytest.raises(tw.FormatError):
        tw.decode_sum([good, data])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"SPEC": None}, TypeError, "nibbles has no SPEC, which 'ref' needs"),
        ({"decode_chunk": None}, TypeError, "no decode_chunk"),
        ({"SPEC": Nibbles()}, TypeError, "a subclass of CodecSpec"),
        ({"SPEC": type("Low", (Nibbles,), {"id": 14})}, ValueError, "32768 to 65534"),
        ({"SPEC": type("High", (Nibbles,), {"id": 65535})}, ValueError, "32768 to 65534"),
        ({"SPEC": type("Mine", (Nibbles,), {"name": "mx"})}, ValueError, "a codec of the library"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tw.register_codec(module(**changes))
    assert "nibbles" not in tw.list_codecs()


def test_kernels_and_compiled_forms_are_looked_at() -> None:
    with pytest.raises(TypeError, match="no encode, decode, which 'triton' needs"):
        tw.register_codec(module(), triton=module())
    with pytest.raises(TypeError, match="no encode_chunk, decode_chunk, which 'cpu' needs"):
        tw.register_codec(module(), cpu=SimpleNamespace())  # type: ignore[arg-type]


def test_an_id_belongs_to_one_name() -> None:
    tw.register_codec(module())
    with pytest.raises(ValueError, match="id 32770 is that of 'nibbles'"):
        tw.register_codec(module(SPEC=type("Other", (Nibbles,), {"name": "other"})))
    # Registered again, with another id: the old one is free.
    tw.register_codec(module(SPEC=type("Again", (Nibbles,), {"id": 32771})))
    assert codec_ids.NAMES_BY_ID.get(32770) is None
    buf = tw.encode(X, "nibbles")
    assert np.array_equal(tw.decode(bytes(buf)), X & 0xF0)
