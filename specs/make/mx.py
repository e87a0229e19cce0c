"""mx.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.codecs.common import minifloat
from tightwire.engine import encode_into
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import ALIGN, RAW

from . import common, data

ELEMENTS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")


def all_codes(element: str, dtype: str) -> tuple[str, bytes, bytes]:
    """Every code at seven scales, also those that no encoder writes."""
    codec = tw.codec("mx", element=element)
    n = 256 * 7
    parts = common.Parts.of(codec.encode(np.zeros(n, BY_NAME[dtype].numpy), backend="ref"))
    spec: Any = codec.spec
    codes = np.resize(np.arange(1 << spec.format.bits), n).astype(np.uint8)
    common.put(parts, 0, 0, minifloat.pack(codes, spec.format).tobytes())
    scales = np.repeat(np.array([0, 1, 105, 127, 130, 254, 255], np.uint8), 8)
    common.put(parts, 0, parts.header.sections[0].nbytes, scales.tobytes())
    return common.decoded(f"mx/{dtype}_{element}_all_codes", parts.join())


def valid() -> common.Vectors:
    """Vectors of codec mx."""
    x = np.zeros(257, BY_NAME["bfloat16"].numpy)
    x[:2] = 1.0, -3.0
    yield common.lossy("bfloat16_e2m1_example", x, tw.codec("mx", element="e2m1"))
    for i, element in enumerate(ELEMENTS):
        for j, dtype in enumerate(("bfloat16", "float16", "float32")):
            rule = ("floor", "ceil")[(i + j) % 2]
            codec = tw.codec("mx", element=element, scale_rule=rule)
            n = 321 + 7 * i + j
            yield common.lossy(
                f"{dtype}_{element}_{rule}", data.scaled_blocks(80 + n, dtype, n), codec
            )
        for dtype in ("bfloat16", "float16", "float32")[i % 3 :][:1]:
            yield all_codes(element, dtype)
    x = data.scaled_blocks(81, "float32", 1601)
    yield common.lossy("float32_e3m2_5_chunks", x, tw.codec("mx", element="e3m2"), chunks=5)
    x = data.bell(82, "bfloat16", 2002).reshape(26, 77)
    yield common.lossy("bfloat16_e2m1_4_chunks", x, tw.codec("mx", element="e2m1"), chunks=4)
    yield common.lossy(
        "bfloat16_no_checksum", data.bell(83, "bfloat16", 500), tw.codec("mx"), checksum=False
    )
    x, codec = data.scaled_blocks(84, "float32", 1601), tw.codec("mx", scale_rule="agreed")
    yield common.lossy("float32_e4m3_agreed_3_chunks", x, codec, chunks=3)


def make_parts(element: str = "e2m1") -> common.Parts:
    """Two chunks of 501 and 500 elements; e2m1 has 251 and 250 bytes of codes, scales at 256."""
    x = data.bell(84, "bfloat16", 1001)
    return common.Parts.of(tw.codec("mx", element=element).encode(x, chunks=2, backend="ref"))


def small(n: int) -> bytes:
    """A header of a size that an encoder leaves to raw, with everything that belongs to it."""
    spec: Any = tw.codec("mx").spec
    plan = tw.Plan(spec, BY_NAME["bfloat16"], (n,), 1, spec.layout(BY_NAME["bfloat16"], n), 0)
    out = np.zeros(plan.nbytes, np.uint8)
    encode_into(plan, data.bits_of(data.bell(85, "bfloat16", n)), out, backend="ref")
    return bytes(out)


def invalid() -> common.Invalid:
    """What is wrong in mx buffers only."""
    sections = make_parts().header.sections
    wrong = {
        "element_6": (0, b"\6"),
        "scale_rule_3": (1, b"\3"),
        "block_16": (2, b"\4"),
        "parameters_reserved": (3, b"\1"),
        "parameters_end": (7, b"\1"),
        "other_element": (0, b"\3"),
    }
    larger = (replace(sections[0], nbytes=sections[0].nbytes + ALIGN), sections[1])
    bad_header = {
        "of_float64": common.changed(make_parts(), dtype=BY_NAME["float64"]),
        "of_uint16": common.changed(make_parts(), dtype=BY_NAME["uint16"]),
        "sections_swapped": common.sectioned(make_parts(), 1, 0),
        "one_section": common.sectioned(make_parts(), 0),
        "payload_too_large": common.changed(make_parts(), sections=larger),
        "dynamic_stride": common.changed(make_parts(), dynamic_stride=ALIGN),
        "gains_nothing": small(100),
        "no_elements": small(0),
    }
    bad_record = {
        "raw_flag": common.edited(make_parts, lambda p: common.record(p, 1, "flags", RAW)),
        "dynamic": common.edited(make_parts, lambda p: common.grow(p, 1, 1)),
        "info": common.edited(make_parts, lambda p: common.record(p, 0, "info", 1)),
    }
    nonzero = {
        "padding_of_payload": common.edited(make_parts, lambda p: common.put(p, 1, 250, b"\1")),
        "padding_of_scales": common.edited(make_parts, lambda p: common.put(p, 0, 256 + 16, b"\1")),
    }

    def tail(element: str, chunk: int, at: int, bit: int) -> bytes:
        parts = make_parts(element)
        common.put(parts, chunk, at, bytes([parts.static[chunk][at] | bit]))
        return parts.join()

    bad_payload = {
        "tail_of_4_bits": tail("e2m1", 0, 250, 16),
        "tail_of_6_bits": tail("e3m2", 0, 375, 128),
    }
    coded = make_parts().join()
    return common.named(
        "mx",
        common.with_params(make_parts, wrong),
        common.refused("bad_header", bad_header),
        {"version_2": (common.changed(make_parts(), codec_version=2), "unsupported_version")},
        common.refused("bad_record", bad_record),
        {"checksum": (common.poked(coded, 300, bytes([coded[300] ^ 1])), "checksum_mismatch")},
        common.refused("reserved_not_zero", nonzero),
        common.refused("bad_payload", bad_payload),
    )
