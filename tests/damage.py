"""Checksums that are right in buffers that are not."""

from __future__ import annotations

import numpy as np

import tightwire as tw
from tightwire.formats import checksum
from tightwire.formats.header import RECORD, header_crc, parse_header
from tightwire.planning import plan_of_header


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
