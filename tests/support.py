"""Data that all tests share."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings

import tightwire as tw
from tightwire.formats import checksum
from tightwire.formats.container import Entry, directory_bytes
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.formats.header import RECORD, header_crc, parse_header
from tightwire.planning import plan_of_header

FLOATS = [d.name for d in BY_NAME.values() if d.is_float]
#: The key of all vectors; `vector_key` has the number of ranks of each.
KEY = tw.Key(0x0123456789ABCDEF, step=7, rank=3)
PATTERNS = ("normal", "zero", "one_hot", "special", "random", "mixed_zeros", "scales")

ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")
#: Parameters of every codec, the default ones first.
CODEC_PARAMS: dict[str, list[dict[str, Any]]] = {
    "raw": [{}],
    "mx": [
        *({"element": e, "scale_rule": r} for e in ELEMENTS for r in ("floor", "ceil")),
        {"element": "e2m3", "scale_rule": "agreed"},
    ],
    "nvfp4": [{}],
    "zipccl": [{}, {"window": "sigma"}, {"window": "histogram"}, {"window": 5}],
    "sdp4bit": [
        {},
        {"bits": 8, "group": 32},
        {"group": 2048, "rotate": "none"},
        {"bits": 8, "group": 4096, "rounding": "stochastic"},
        {"group": 64, "rotate": "none", "rounding": "stochastic"},
    ],
    "taco": [
        {},
        {"format": "e5m2", "transform": "hadamard", "scales": "merged", "block": 128},
        {"format": "int8", "block": 32},
        {"transform": "none", "scales": "merged", "block": 512},
        {"rounding": "stochastic"},
        {"rounding": "stochastic", "format": "int8", "transform": "none", "block": 64},
    ],
    "dynamiq": [
        {},
        {"widths": "pow2", "grid": "signed", "scales": "stochastic", "group": 8},
        {"widths": "fixed", "grid": "uniform", "scales": "wide", "rounding": "nearest", "bits": 8},
        {"center": True, "super_group": 1024, "group": 64, "rounding": "stochastic"},
        {"bits": 3.5, "super_group": 128, "rounding": "nearest"},
    ],
    "tahquant": [{}, {"hidden": 256}, {"hidden": 199}, {"direction": "backward", "hidden": 199}],
    "thc": [{}, {"norm": "tensor"}, {"bits": 16}],
    "omnireduce": [{}, {"block": 64, "bits": 3}, {"values": "float16"}, {"values": "float32"}],
    "lhc": [
        {},
        {"ratio": 2.5, "mapping": "published"},
        {"sketch": "float16"},
        {"sketch": "float32"},
    ],
    "huffman": [{}],
}

#: As `CODEC_PARAMS`, of the codecs that need a base.
BASE_PARAMS: dict[str, list[dict[str, Any]]] = {
    "delta": [{}, {"form": "overwrite"}, {"form": "difference"}]
}
#: Codecs that code a tensor by itself.
ALONE = [name for name in tw.list_codecs() if name not in BASE_PARAMS]


def needs(package: str, version: tuple[int, ...] = ()) -> pytest.MarkDecorator:
    """Skip where `package` is not installed, or is older than `version`; CI does not allow these
    skips in the slow tier.
    """
    if importlib.util.find_spec(package) is None:
        return pytest.mark.skipif(True, reason=f"could not import {package!r}")
    numbers = re.findall(r"\d+", importlib.metadata.version(package)) if version else []
    found = tuple(int(number) for number in numbers[: len(version)])
    wanted = ".".join(map(str, version))
    return pytest.mark.skipif(found < version, reason=f"could not import {package!r} {wanted}")


def examples(n: int) -> settings:
    """Settings of a property: of `n` examples the share that the profile asks for."""
    return settings(max_examples=n * settings().max_examples // 100)


def vector_key(name: str) -> tw.Key:
    """The key with which the vector `name` was encoded."""
    ranks = re.search(r"_of_(\d+)_ranks$", name)
    return KEY._replace(world=int(ranks[1]) if ranks else 1)


def make_bits(pattern: str, dtype: DType, n: int, seed: int = 0) -> npt.NDArray[Any]:
    """Element bits, shape (n,), of a named pattern; every pattern is deterministic."""
    rng = np.random.default_rng([seed, n, dtype.id])
    if pattern == "random" or not dtype.is_float:
        data = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
        if dtype.name == "bool":
            data &= 1
        return data.view(dtype.bits)
    values = np.zeros(n)
    if pattern == "one_hot":
        values[n // 2 : n // 2 + 1] = 1.0
    elif pattern != "zero":
        values = rng.standard_normal(n) * (16.0 if dtype.itemsize == 1 else 0.02)
    if pattern == "mixed_zeros":
        values[rng.random(n) < 0.65] = 0.0
    if pattern == "scales":
        values *= 2.0 ** (np.arange(n) // 700 % 5 - 2)
    bits: npt.NDArray[Any] = values.astype(dtype.numpy).view(dtype.bits)
    if pattern == "special":
        top = (1 << dtype.exponent) - 1 << dtype.mantissa
        sign = 1 << 8 * dtype.itemsize - 1
        chosen = np.array([0, sign, 1, sign | 1, top, sign | top, top | 1, sign | top | 1, top - 1])
        at = np.flatnonzero(rng.random(n) < 0.2)
        bits[at] = chosen[rng.integers(0, chosen.size, at.size)].astype(dtype.bits)
    return bits


def repair(data: bytearray) -> None:
    """Make the header CRC and, as far as sizes allow, the chunk checksums right again."""
    nbytes = int.from_bytes(data[8:12], "little")
    if not 32 <= nbytes <= len(data):
        return
    data[28:32] = header_crc(bytes(data[:nbytes])).to_bytes(4, "little")
    try:
        header = parse_header(memoryview(data))
        plan = plan_of_header(header)
    except tw.FormatError:
        return
    if plan.dynamic_offset > len(data) or not plan.checksum:
        return
    at = plan.dynamic_offset
    for i in range(plan.chunks):
        record_at = nbytes + i * RECORD.itemsize
        record = np.frombuffer(bytes(data[record_at : record_at + RECORD.itemsize]), RECORD)[0]
        used = int(record["dynamic_nbytes"])
        if at + used > len(data):
            return
        start = plan.static_offset + i * plan.static_stride
        static = np.frombuffer(bytes(data[start : start + plan.static_stride]), np.uint8)
        dynamic = np.frombuffer(bytes(data[at : at + used]), np.uint8)
        total = checksum.words_sum(static) + checksum.words_sum(dynamic, static.size // 4)
        total += plan.identity_term(i)
        flags, ordinal, info = (int(record[k]) for k in ("flags", "ordinal", "info"))
        total += checksum.record_term(used, flags, ordinal, info)
        data[record_at : record_at + 8] = (total & checksum.MASK64).to_bytes(8, "little")
        at += header.dynamic_stride or -(-used // 128) * 128


def write_safetensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]
) -> Path:
    """A plain safetensors file, tensors in this order."""
    entries, at = [], 0
    for name, x in tensors.items():
        kind = BY_NAME[x.dtype.name].safetensors
        assert kind is not None
        entries.append(Entry(name, kind, x.shape, at, at + x.nbytes))
        at += x.nbytes
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(directory_bytes(entries, metadata) + data)
    return path
