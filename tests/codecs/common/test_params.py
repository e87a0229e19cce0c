"""Parameters as they are declared: what is allowed, and their bytes in the header."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import tightwire as tw
from support import BASE_PARAMS, CODEC_PARAMS
from tightwire.codecs.common.base import CodecSpec
from tightwire.codecs.common.params import choice, declared, fraction, integer, log2, params_nbytes
from tightwire.planning import spec_class


@dataclass(frozen=True)
class Toy(CodecSpec):
    """A parameter of each kind."""

    name: ClassVar[str] = "toy"
    fixed_params: ClassVar[Mapping[int, int]] = {5: 9}

    mode: str = choice(0, ("a", "b"))
    group: int = choice(1, (32, 64), default=64, number=log2)
    flag: bool = choice(2, (True, False), default=False, number=int)
    rate: float = fraction(3, 2, per=16, least=1, most=512, default=8)
    size: int = integer(8, 4, least=1, most=1000, default=0)


def test_bytes() -> None:
    assert Toy().pack_params() == bytes.fromhex("00 06 00 8000 09 0000  00000000 00000000")
    toy = Toy("b", 32, True, 2.25, 1000)
    assert toy.pack_params() == bytes.fromhex("01 05 01 2400 09 0000  e8030000 00000000")
    assert Toy.unpack_params(toy.pack_params()) == toy
    assert params_nbytes(Toy) == 16
    assert params_nbytes(spec_class("raw")) == 0


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (0, "02"),  # no such number
        (1, "04"),
        (2, "02"),
        (3, "0000"),  # below the least
        (3, "0102"),  # 513 steps
        (5, "00"),  # the fixed byte
        (6, "01"),  # bytes of no parameter
        (12, "01"),
        (8, "00000000"),  # the default, which is replaced before it is stored
        (8, "e9030000"),
    ],
)
def test_bytes_of_no_encoder(at: int, new: str) -> None:
    data = bytearray(Toy("b", 32, True, 2.25, 1000).pack_params())
    data[at : at + len(new) // 2] = bytes.fromhex(new)
    with pytest.raises(tw.FormatError, match="toy parameters") as caught:
        Toy.unpack_params(bytes(data))
    assert caught.value.reason == "bad_header"


@pytest.mark.parametrize("nbytes", [0, 8, 15, 24])
def test_another_length(nbytes: int) -> None:
    with pytest.raises(tw.FormatError, match=f"toy has 16 parameter bytes, found {nbytes}"):
        Toy.unpack_params(bytes(nbytes))


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"mode": "c"}, ValueError, "mode is 'c'; allowed: str, one of 'a', 'b'"),
        ({"mode": 1}, TypeError, "mode is 1; allowed: str"),
        ({"group": True}, TypeError, "group is True; allowed: int, one of 32, 64"),
        ({"flag": 1}, TypeError, "flag is 1; allowed: bool, one of True, False"),
        ({"rate": "8"}, TypeError, "rate is '8'; allowed: 0.0625 to 32 in steps of 1/16"),
        ({"rate": True}, TypeError, "rate is True"),
        ({"rate": 2.26}, ValueError, "rate is 2.26"),
        ({"rate": 0}, ValueError, "rate is 0"),
        ({"rate": 32.0625}, ValueError, "rate is 32.0625"),
        ({"rate": float("nan")}, ValueError, "rate is nan"),
        ({"rate": float("inf")}, ValueError, "rate is inf"),
        ({"rate": 10**400}, ValueError, "rate is 1000"),
        ({"size": 1.0}, TypeError, "size is 1.0; allowed: int, 0 to 1000"),
        ({"size": True}, TypeError, "size is True"),
        ({"size": -1}, ValueError, "size is -1"),
        ({"size": 1001}, ValueError, "size is 1001"),
    ],
)
def test_values_that_are_not_allowed(
    params: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Toy(**params)


def test_numbers_of_numpy_become_those_of_python() -> None:
    """Ranks compare parameters as text."""
    assert repr(Toy(rate=np.float32(2.25))) == repr(Toy(rate=2.25))  # type: ignore[arg-type]
    assert repr(tw.codec("lhc", ratio=np.float64(2.5)).spec).count("ratio=2.5,") == 1


@pytest.mark.parametrize("name", tw.list_codecs())
def test_parameters_of_codecs_share_no_byte(name: str) -> None:
    params = declared(spec_class(name)).values()
    taken = [at for p in params for at in range(p.at, p.at + p.nbytes)]
    taken += spec_class(name).fixed_params
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize("name", tw.list_codecs())
def test_every_byte_of_the_parameters_counts(name: str) -> None:
    """Other bytes are other parameters or refused."""
    cls = spec_class(name)
    for params in (CODEC_PARAMS | BASE_PARAMS)[name]:
        spec = cls(**params)
        data = spec.bind((3, 5)).pack_params()
        assert cls.unpack_params(data) == spec.bind((3, 5))
        for at in range(len(data)):
            for value in (*range(10), 127, 255):
                other = data[:at] + bytes([value]) + data[at + 1 :]
                try:
                    found = cls.unpack_params(other)
                except tw.FormatError as error:
                    assert error.reason == "bad_header"
                else:
                    assert found.pack_params() == other
