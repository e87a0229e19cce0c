"""Statistics from elsewhere: the bytes of the reference, or a ValueError; never a crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from support import make_bits
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import HOST_BACKENDS

#: Elements: of more than one super-group of dynamiq and block of thc and omnireduce.
N = 4096
KEY = tw.Key(3)
CODECS = [tw.codec("zipccl", window="sigma"), tw.codec("thc", norm="tensor")]
CODECS += [tw.codec(name) for name in tw.list_codecs() if tw.codec(name).reduce_op is not None]


def tensor() -> Any:
    return make_bits("scales", BY_NAME["float32"], N).view(np.float32)


def outcome(codec: tw.Codec, x: Any, stats: Any, backend: str) -> Any:
    """The packed bytes, or the message of the ValueError."""
    try:
        buffer = codec.encode(x, stats=stats, key=KEY, backend=backend)
    except ValueError as error:
        assert "allowed" in str(error)
        return str(error)
    decoded = tw.decode(bytes(buffer), backend=backend)
    assert decoded.shape == x.shape
    return bytes(buffer)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name} {c.reduce_op}")
def test_sizes_and_dtypes_that_are_none_of_the_codec(codec: tw.Codec) -> None:
    x = tensor()
    stats = codec.measure(x)
    assert stats is not None
    signed = np.int8 if stats.dtype == np.uint8 else np.complex64
    wrong = [stats[:0], np.append(stats, stats[:1]), stats[None], stats.astype(signed)]
    wrong += [stats.astype(np.float64), stats.astype(bool), np.full(stats.shape, "1")]
    for bad in wrong:
        for backend in HOST_BACKENDS:
            with pytest.raises(ValueError, match="allowed"):
                codec.encode(x, stats=bad, key=KEY, backend=backend)
    assert bytes(codec.encode(x, stats=stats, key=KEY)) == bytes(codec.encode(x, key=KEY))


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name} {c.reduce_op}")
def test_values_from_none_to_the_largest_there_are(codec: tw.Codec) -> None:
    """Those that the codec takes, and they are many, give the same bytes on every backend."""
    x = tensor()
    stats = codec.measure(x)
    assert stats is not None
    values: list[Any]
    if stats.dtype.kind == "f":
        largest = np.finfo(np.float32).max
        values = [0.0, -1.0, 1e-45, 1e-38, 1e-20, 1.0, 1e20, largest, np.inf, np.nan]
    else:
        values = [0, 1, 5, 117, 255, 1 << 23, 1 << 29, 0x7F7FFFFF, -1]
        values = [v for v in values if np.iinfo(stats.dtype).min <= v <= np.iinfo(stats.dtype).max]
    coded = 0
    for value in values:
        filled = np.full(stats.shape, value, stats.dtype)
        mixed = np.where(np.arange(stats.size) % 3 == 0, filled, stats)
        for given in (filled, mixed):
            found = [outcome(codec, x, given, backend) for backend in HOST_BACKENDS]
            assert found[0] == found[1]
            coded += isinstance(found[0], bytes)
    assert coded >= 2
