"""omnireduce.md."""

import struct
from typing import NamedTuple

from .common import DTYPES, Dtype, Header, Section, ceil_div, check, lossy_sections
from .floats import stored

ID = 10

# omnireduce.md, "Parameters" and "Layout"


class Omnireduce(NamedTuple):
    """What the parameters say; `values` is a dtype."""

    steps: int
    block: int
    values: Dtype

    def slots(self, chunk_nelem: int) -> int:
        """K."""
        blocks = ceil_div(chunk_nelem, self.block)
        return min(max(blocks * self.steps // (128 * self.values.nbytes), 1), blocks)

    def payload(self, chunk_nelem: int) -> int:
        """Bytes of the section with the payload elements."""
        return self.slots(chunk_nelem) * self.block * self.values.nbytes


def parameters(params: bytes, dtype: Dtype) -> Omnireduce:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"omnireduce has 8 parameter bytes, not {len(params)}")
    steps, log_block, values, zero = struct.unpack("<HBBI", params)
    check(1 <= steps <= 512, "bad_header", f"budget {steps}")
    check(6 <= log_block <= 12, "bad_header", f"blocks of 2^{log_block}")
    check(values <= 2 and zero == 0, "bad_header", "parameters")
    return Omnireduce(steps, 2**log_block, DTYPES[16 + values])


def sections(omni: Omnireduce, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where omnireduce takes the dtype and number of elements."""
    sizes = {1: omni.payload(chunk_nelem), 3: ceil_div(ceil_div(chunk_nelem, omni.block), 8)}
    return lossy_sections("omnireduce", dtype, chunk_nelem, 2**36, sizes)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    omni: Omnireduce = h.params
    payload = omni.payload(h.chunk_nelem)
    return [(0, payload), (payload, payload + ceil_div(ceil_div(nelem, omni.block), 8))]


# omnireduce.md, "Decoding"


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    omni: Omnireduce = h.params
    size = omni.values.nbytes
    (_, payload), span = used(h, nelem)
    blocks = ceil_div(nelem, omni.block)
    index = int.from_bytes(static[slice(*span)], "little")
    kept = [b for b in range(index.bit_length()) if index >> b & 1]
    check(index >> blocks == 0, "bad_payload", "bits of the index behind the last block")
    check(len(kept) <= omni.slots(h.chunk_nelem), "bad_payload", "blocks without a slot")
    out = bytearray(nelem * h.dtype.nbytes)
    at = 0
    for b in kept:
        for i in range(b * omni.block, min((b + 1) * omni.block, nelem)):
            value_bytes = static[at : at + size]
            if omni.values != h.dtype:
                wide = b"\0\0" + value_bytes if omni.values.name == "bfloat16" else value_bytes
                value = struct.unpack("<e" if omni.values.name == "float16" else "<f", wide)[0]
                value_bytes = stored(value, h.dtype)
            out[h.dtype.nbytes * i : h.dtype.nbytes * (i + 1)] = value_bytes
            at += size
    check(not any(static[at:payload]), "bad_payload", "a payload element that no element has")
    return bytes(out)
