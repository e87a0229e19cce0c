# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""What kernels of zipccl share: words of four elements, and where a chunk lies. specs/zipccl.md.

A lane holds four neighbouring columns: exponents, codes and plane bits of four elements share one
32-bit word, a byte each, and arithmetic works on all four at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.frame_triton import key_ahead, weigh, weigh_bytes
from .common.launch_triton import PTX, options
from .common.minifloat_triton import by_ptx
from .zipccl import COLUMNS, TILE, Zipccl, fields_of, scratch_layout

ONES = tl.constexpr(0x01010101)
LOW7 = tl.constexpr(0x7F7F7F7F)
HIGH = tl.constexpr(0x80808080)
LANES = tl.constexpr(COLUMNS // 4)
WIDTH = tl.constexpr(COLUMNS)


@dataclass(frozen=True)
class Launch:
    """What the kernels know of a call.

    Attributes:
        exponent: Bits of the exponent of the dtype.
        mantissa: Those of its mantissa.
        item: Bytes of an element.
        block: Bytes of a whole tile's block.
        slot: Bytes of a tile's slot of escapes in the workspace.
        mode: Which tiles a launch takes.
        window: 0: each tile's is chosen; 1: its base is among the statistics; 2: it is fixed.
        sums: Sum up checksum terms.
        packed: Dynamic parts are where they are said to start, not in slots.
        store: Decoded elements are wanted.
        add: Bytes of the elements that they are added to; 0: they are stored.
        x_item: Bytes of the elements of a sum's tensor; 0: it has none.
        out_item: Bytes of the elements that a sum is stored as; 4 is float32.
        aligned: Chunks start at multiples of 16 bytes in the tensors of a sum.
        scaled: A sum is multiplied by a number.
        turned: Planes of 8-bit elements are made, and read, by transposing matrices of bits.
        ptx: PTX may be used.
        cvt: The device converts pairs of small floats.
    """

    exponent: int
    mantissa: int
    item: int
    block: int
    slot: int
    mode: int = 0
    window: int = 0
    sums: bool = False
    packed: bool = False
    store: bool = True
    add: int = 0
    x_item: int = 0
    out_item: int = 0
    aligned: bool = True
    scaled: bool = False
    turned: bool = False
    ptx: bool = False
    cvt: bool = False


def launch_of(dtype: DType, **values) -> Launch:
    """The `Launch` of a dtype, with more `values`."""
    f, slot = fields_of(dtype), scratch_layout(dtype, TILE, 1).slot
    values = {"turned": dtype.itemsize == 1, "ptx": PTX} | values
    return Launch(f.exponent, f.mantissa, dtype.itemsize, f.block_nbytes(COLUMNS), slot, **values)


@triton.jit
def popc(x, PTX: tl.constexpr):
    """How many bits of words, uint32, are set."""
    if PTX:
        return by_ptx("popc.b32 $0, $1;", "=r,r", (x,))
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return (x * ONES) >> 24


@triton.jit
def _bytes(a, b, PICK: tl.constexpr, PTX: tl.constexpr):
    """Bytes of `a`, whose numbers are 0 to 3, and `b`, 4 to 7: the digits of PICK, lowest last."""
    if PTX:
        return by_ptx("prmt.b32 $0, $1, $2, 0x" + PICK + ";", "=r,r,r", (a, b))
    elif PICK == "6420":
        low = (a & 0xFF) | ((a >> 8) & 0xFF00)
        return low | ((b & 0xFF) << 16) | ((b << 8) & 0xFF000000)
    elif PICK == "7531":
        return _bytes(a >> 8, b >> 8, "6420", PTX)
    elif PICK == "5140":
        return (a & 0xFF) | ((b & 0xFF) << 8) | ((a & 0xFF00) << 8) | ((b & 0xFF00) << 16)
    else:
        return _bytes(a >> 16, b >> 16, "5140", PTX)


@triton.jit
def lanes():
    """Lane numbers. The hint keeps every access to one lane per thread, so that all tensors have
    one layout and no value changes hands between threads.
    """
    return tl.max_contiguous(tl.arange(0, LANES), 1)


@triton.jit
def items(ptr, ITEM: tl.constexpr):
    """A pointer to bytes as one to element bits of ITEM bytes."""
    return ptr.to(tl.pointer_type(tl.uint8 if ITEM == 1 else tl.uint16 if ITEM == 2 else tl.uint32))


@triton.jit
def load4(x_ptr, at, ok, ITEM: tl.constexpr):
    """Elements `at` to `at` + 3, one by one, uint32; 0 from the `ok`-th on."""
    x = items(x_ptr, ITEM)
    v0 = tl.load(x + at, mask=ok > 0, other=0).to(tl.uint32)
    v1 = tl.load(x + at + 1, mask=ok > 1, other=0).to(tl.uint32)
    v2 = tl.load(x + at + 2, mask=ok > 2, other=0).to(tl.uint32)
    v3 = tl.load(x + at + 3, mask=ok > 3, other=0).to(tl.uint32)
    return v0, v1, v2, v3


@triton.jit
def heads(v0, v1, v2, v3, ITEM: tl.constexpr):
    """Of four elements (head words a, b, low halves as uint64).

    Head words hold the top 16 bits of each element, two to a word; 8-bit elements are all in a.
    """
    if ITEM == 1:
        a = v0 | (v1 << 8) | (v2 << 16) | (v3 << 24)
        return a, a, a.to(tl.uint64)
    elif ITEM == 2:
        a = v0 | (v1 << 16)
        return a, v2 | (v3 << 16), a.to(tl.uint64)
    else:
        low = ((v0 & 0xFFFF) | (v1 << 16)).to(tl.uint64)
        low |= ((v2 & 0xFFFF) | (v3 << 16)).to(tl.uint64) << 32
        return (v0 >> 16) | (v1 & 0xFFFF0000), (v2 >> 16) | (v3 & 0xFFFF0000), low


@triton.jit
def quads(x_ptr, at):
    """All 512 elements of 4 bytes of a row that starts at element `at`, four to a lane."""
    pair = tl.multiple_of(at // 2, 2)
    v = tl.load(x_ptr.to(tl.pointer_type(tl.uint64)) + pair + tl.arange(0, 2 * LANES))
    p, q = tl.split(tl.reshape(v, [LANES, 2]))
    return p.to(tl.uint32), (p >> 32).to(tl.uint32), q.to(tl.uint32), (q >> 32).to(tl.uint32)


@triton.jit
def load4_aligned(x_ptr, at, ITEM: tl.constexpr):
    """As `heads`, for all 512 elements of a row that starts at element `at`, a multiple of 4."""
    if ITEM == 1:
        a = tl.load(x_ptr.to(tl.pointer_type(tl.uint32)) + at // 4 + lanes())
        return a, a, a.to(tl.uint64)
    elif ITEM == 2:
        v = tl.load(x_ptr.to(tl.pointer_type(tl.uint64)) + at // 4 + lanes())
        return v.to(tl.uint32), (v >> 32).to(tl.uint32), v
    else:
        v0, v1, v2, v3 = quads(x_ptr, at)
        return heads(v0, v1, v2, v3, ITEM)


@triton.jit
def exponents(a, b, L: tl.constexpr):
    """Exponent fields of four elements, a byte each."""
    if L.item == 1:
        return (a >> L.mantissa) & (((1 << L.exponent) - 1) * ONES)
    else:
        high = _bytes(a, b, "7531", L.ptx)
        if L.exponent == 8:
            return ((high & LOW7) << 1) | ((_bytes(a, b, "6420", L.ptx) >> 7) & ONES)
        else:
            return (high >> 2) & 0x1F1F1F1F


@triton.jit
def rest(a, b, L: tl.constexpr):
    """(byte stream, extra bits) of sign and mantissa of four elements, a byte each."""
    if L.item == 1:
        MAN: tl.constexpr = ((1 << L.mantissa) - 1) * ONES
        SIGN: tl.constexpr = (1 << L.mantissa) * ONES
        return a, (a & MAN) | ((a >> L.exponent) & SIGN)
    else:
        low = _bytes(a, b, "6420", L.ptx)
        high = _bytes(a, b, "7531", L.ptx)
        if L.exponent == 8:
            return (low & LOW7) | (high & HIGH), low
        else:
            return low, (high & 0x03030303) | ((high >> 5) & 0x04040404)


@triton.jit
def elements(e, s, x, low, L: tl.constexpr):
    """Inverse of `exponents` and `rest`: words v0, v1 with two 16-bit elements each.

    Of 32-bit elements v0 to v3; of 8-bit elements all in v0.
    """
    if L.item == 1:
        MAN: tl.constexpr = ((1 << L.mantissa) - 1) * ONES
        SIGN: tl.constexpr = (1 << L.mantissa) * ONES
        v = (e << L.mantissa) | (x & MAN) | ((x & SIGN) << L.exponent)
        return v, v, v, v
    else:
        if L.exponent == 8:
            byte0 = (s & LOW7) | ((e << 7) & HIGH)
            byte1 = (s & HIGH) | ((e >> 1) & LOW7)
        else:
            byte0 = s
            byte1 = (e << 2) | (x & 0x03030303) | ((x << 5) & HIGH)
        a = _bytes(byte0, byte1, "5140", L.ptx)
        b = _bytes(byte0, byte1, "7362", L.ptx)
        if L.item == 2:
            return a, b, a, b
        else:
            l0 = low.to(tl.uint32)
            l1 = (low >> 32).to(tl.uint32)
            v0 = (l0 & 0xFFFF) | (a << 16)
            v1 = (l0 >> 16) | (a & 0xFFFF0000)
            v2 = (l1 & 0xFFFF) | (b << 16)
            return v0, v1, v2, (l1 >> 16) | (b & 0xFFFF0000)


@triton.jit
def one_by_one(v0, v1, v2, v3, L: tl.constexpr):
    """Four elements, as `elements` gives them, each in a word of its own."""
    if L.item == 1:
        return v0 & 0xFF, (v0 >> 8) & 0xFF, (v0 >> 16) & 0xFF, v0 >> 24
    elif L.item == 2:
        return v0 & 0xFFFF, v0 >> 16, v1 & 0xFFFF, v1 >> 16
    else:
        return v0, v1, v2, v3


@triton.jit
def load_if(ptr, inside):
    """What is at `ptr`, 0 where not `inside`; None: all is."""
    if inside is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=inside, other=0)


@triton.jit
def terms_of(v, key, ahead, inside):
    """Checksum terms of words that lie `ahead` words behind those that `key` belongs to."""
    term = v.to(tl.uint64) * key_ahead(key, ahead).to(tl.uint64)
    if inside is not None:
        term = tl.where(inside, term, 0)
    return term


@triton.jit
def terms_of_pairs(v, key2, ahead, inside):
    """Checksum terms of pairs of words."""
    low = v.to(tl.uint32).to(tl.uint64) * key_ahead(key2, ahead).to(tl.uint64)
    term = low + (v >> 32) * key_ahead(key2, ahead + 1).to(tl.uint64)
    if inside is not None:
        term = tl.where(inside, term, 0)
    return term


@triton.jit
def columns_of(valid):
    """Columns of a tile of `valid` elements."""
    return (valid + 127) // 128 * 16


@triton.jit
def real_of(i, cols, valid):
    """How many of four elements from element `i` of a tile on are real; `cols` columns a row."""
    return tl.where(4 * lanes() < cols, tl.minimum(tl.maximum(valid - i, 0), 4), 0)


@triton.jit
def weigh_items(v, i, ITEM: tl.constexpr):
    """Checksum terms of elements number `i` of a chunk that is stored raw."""
    if ITEM == 4:
        return weigh(v, i)
    else:
        return weigh_bytes(v, i * ITEM)


#: `Part.fixed`: windows differ; they are alike; there are none, as the codec is raw.
ANY, ALIKE, STORED = -1, -2, -3
ALL_RAW = tl.constexpr(STORED)


class Part(NamedTuple):
    """A chunk of a buffer.

    Attributes:
        static_ptr: Its static part.
        dynamic_ptr: Its dynamic part.
        record_ptr: Its record, words of 64 bits.
        chunk: Its number.
        n: Its elements.
        stride: Bytes of the static part.
        slot_nbytes: Most bytes of the dynamic part.
        index_at: Where the index starts in the static part, in bytes.
        fixed: The base of all windows, or what ANY, ALIKE and STORED say.
    """

    static_ptr: Any
    dynamic_ptr: Any
    record_ptr: Any
    chunk: Any
    n: Any
    stride: Any
    slot_nbytes: Any
    index_at: Any
    fixed: Any


@triton.jit
def part_at(ptr, chunk, n, g):
    """A chunk of `n` elements of the buffer at `ptr`; `g` is the geometry of its plan.

    That is where records start, in 8 bytes, and in 128 bytes where static parts start, their
    stride, where the index starts in them, the same two of dynamic parts; and `Part.fixed`.
    """
    head, static_at, static_stride, index_at, dynamic_at, dynamic_stride, fixed = g
    chunk = chunk.to(tl.int64)
    stride, slot_nbytes = static_stride * 128, dynamic_stride * 128
    return Part(
        ptr + static_at * 128 + chunk * stride,
        ptr + dynamic_at * 128 + chunk * slot_nbytes,
        ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4,
        chunk,
        n,
        stride,
        slot_nbytes,
        index_at * 128,
        fixed,
    )


@triton.jit
def packed_part(p, dynamic_ptr, ITEM: tl.constexpr):
    """A chunk whose dynamic part is elsewhere, and as long as it may be."""
    return Part(
        p.static_ptr,
        dynamic_ptr,
        p.record_ptr,
        p.chunk,
        p.n,
        p.stride,
        p.n * ITEM,
        p.index_at,
        p.fixed,
    )


ANY_TILE = options(4)


def fixed_of(spec: Any) -> int:
    """`Part.fixed` of a codec's chunks."""
    if not isinstance(spec, Zipccl):
        return STORED
    if spec.window == "tile":
        return ANY
    return spec.window if isinstance(spec.window, int) else ALIKE
