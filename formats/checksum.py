"""The payload checksum (specs/buffer.md, "Checksum"): a position-keyed sum modulo 2**64.

Every 32-bit word is multiplied by an odd key that depends on its position alone, and the products
are added. Sums commute, so any number of threads or GPU programs add their shares in any order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Key of word i is (KEY_STEP * i + 1) mod 2**32: odd, and distinct over 2**31 positions.
KEY_STEP = 0x3C6EF372
MASK64 = (1 << 64) - 1

# Odd 64-bit factors for the fields that are not payload words.
F_NELEM = 0x9E3779B97F4A7C15
F_DYNAMIC = 0xC2B2AE3D27D4EB4F
F_FLAGS = 0x165667B19E3779F9
F_IDENTITY = 0xD6E8FEB86659FD93
F_CONSTANT = 0xA0761D6478BD642F
F_INFO = 0xE7037ED1A0B428DB

_BLOCK = 1 << 15


def identity_term(codec_id: int, codec_version: int, dtype_id: int, nelem: int) -> int:
    """Contribution of what the planned header says about a chunk of `nelem` elements."""
    identity = codec_id | codec_version << 16 | dtype_id << 24
    return (F_CONSTANT + identity * F_IDENTITY + nelem * F_NELEM) & MASK64


def record_term(dynamic_nbytes: int, flags: int, ordinal: int, info: int) -> int:
    """Contribution of the chunk's result record."""
    fields = dynamic_nbytes * F_DYNAMIC + (flags | ordinal << 32) * F_FLAGS + info * F_INFO
    return fields & MASK64


def ordinal_terms(ordinals: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """What ordinals add to `record_term` of records that are alike else: uint64, modulo 2**64."""
    return (ordinals << np.uint64(32)) * np.uint64(F_FLAGS)


def words_sum(data: npt.NDArray[np.uint8], first_word: int = 0) -> int:
    """Keyed sum of `data` (uint8, 1-D) read as little-endian words from position `first_word`.

    A last partial word is padded with zeros.
    """
    whole = data.size // 4
    words = data[: 4 * whole].view("<u4")
    keys = np.arange(min(whole, _BLOCK), dtype=np.uint32) * np.uint32(KEY_STEP)
    total = 0
    for start in range(0, whole, _BLOCK):
        block = words[start : start + _BLOCK].astype(np.uint64)
        shift = np.uint32((KEY_STEP * (first_word + start) + 1) & 0xFFFFFFFF)
        block *= keys[: block.size] + shift
        total += int(block.sum(dtype=np.uint64))
    if data.size % 4:
        last = int.from_bytes(data[4 * whole :].tobytes(), "little")
        total += last * ((KEY_STEP * (first_word + whole) + 1) & 0xFFFFFFFF)
    return total & MASK64
