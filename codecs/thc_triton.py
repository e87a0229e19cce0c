# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""thc on a GPU: a pass for norms unless they are given, then one kernel each way. specs/thc.md.

Sixteen threads hold a block: each a run of 64 elements, then, after an exchange, sixteen times four
neighbours, 64 elements apart: what four random words are for, and what fills words of the payload.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Key, Plan
from .common.columns_triton import from_rows, to_columns, to_rows
from .common.driver_triton import Driver, Tiling, many_functions
from .common.frame_triton import weigh
from .common.hadamard_triton import butterflies
from .common.launch_triton import kernel
from .common.merged_triton import Work, launch_merged
from .common.minifloat import INFINITY
from .common.minifloat_triton import as_bits, as_float, halves
from .common.norms_triton import agreed, energies, of_tensor, roots
from .common.philox_triton import philox4
from .common.plans_triton import variant_of
from .common.runs_triton import lanes
from .common.tiles_triton import Format, no_scale
from .thc import (
    BELOW,
    BLOCK,
    COUNT_NBYTES,
    GAPS,
    LEVEL_STREAM,
    LEVELS,
    MIDDLE,
    NAN_NORM,
    NORM_BITS,
    NORMS_AT,
    ROTATE_FACTOR,
    SIGN_STREAM,
    STEPS,
    TOP,
    Thc,
    workspace,
)

_BLOCK = tl.constexpr(BLOCK)
#: Elements of a thread's run, and threads of a block.
_RUN, _LANES = tl.constexpr(64), tl.constexpr(BLOCK // 64)
_INFINITY, _NAN_NORM = tl.constexpr(INFINITY), tl.constexpr(NAN_NORM)
_NORM_LOW, _NORM_HIGH = (tl.constexpr(bits) for bits in NORM_BITS)
_COUNT_WORDS, _NORMS_AT = tl.constexpr(COUNT_NBYTES // 4), tl.constexpr(NORMS_AT // 4)
_LEVEL_STREAM, _SIGN_STREAM = tl.constexpr(LEVEL_STREAM), tl.constexpr(SIGN_STREAM)
_FACTOR, _STEPS = tl.constexpr(ROTATE_FACTOR), tl.constexpr(STEPS)
_MIDDLE, _TOP = tl.constexpr(MIDDLE), tl.constexpr(TOP)
#: Two bits for each whole number of steps: how far the level below is, and what lies between the
#: levels next to it.
_BEHIND = tl.constexpr(sum((w - int(b)) << 2 * w for w, b in enumerate(BELOW)))
_GAPS = tl.constexpr(sum(int(gap) << 2 * w for w, gap in enumerate(GAPS)))
#: Bits of 2^23, in whose binade floats are 1 apart.
_TWO_23 = tl.constexpr(0x4B000000)

#: Energies that a program adds up at once.
_FOLDED = tl.constexpr(8192)

#: Launch parameters.
ENCODE = Tiling(128, 4)
DECODE = Tiling(128, 4, registers=168)
DECODE_ADD_ENCODE = Tiling(128, 4)


@dataclass(frozen=True)
class Cells(Format):
    """What the kernels know of a codec.

    Attributes:
        bits: Bits of a payload element.
        per_block: Blocks have norms of their own.
        ranks: The most ranks of a sum.
    """

    bits: int
    per_block: bool
    ranks: int


@triton.jit
def _exchanged(parts, ROWS: tl.constexpr):
    """Sixteen columns of four values a thread, of sixteen threads: thread m's column g becomes
    thread g's column m.
    """
    x = tl.reshape(from_rows(parts, 16, 4), [16, 4, ROWS // _LANES, 16])
    x = tl.reshape(tl.permute(x, [3, 1, 2, 0]), [16, 4 * ROWS])
    return to_rows(x, 4 * ROWS, 16, 4)


@triton.jit
def _rotated(runs, ROWS: tl.constexpr):
    """The transform of blocks given as columns of runs: sixteen columns, of four values a thread.

    Value q in column g of a block's thread m, in row q of threads, is its element 64 g + 4 m + q.
    Fewer, longer tensors are what compiles in less time.
    """
    v = butterflies(runs, 64, 2)
    parts = ()
    for m in tl.static_range(16):
        four = from_rows((v[4 * m], v[4 * m + 1], v[4 * m + 2], v[4 * m + 3]), 4, 2)
        parts = parts + (tl.reshape(four, [4 * ROWS]),)
    return butterflies(_exchanged(butterflies(parts, 16, 4), ROWS), 16, 4)


@triton.jit
def _to_runs(parts, ROWS: tl.constexpr):
    """Columns of runs, of what `_rotated` gives."""
    parts = _exchanged(parts, ROWS)
    runs = ()
    for m in tl.static_range(16):
        runs = runs + to_rows(tl.reshape(parts[m], [4, ROWS]), ROWS, 4, 2)
    return runs


@triton.jit
def _to_fours(parts, ROWS: tl.constexpr):
    """Of what `_rotated` gives the four values that lie side by side: tensors, shape (16, ROWS)."""
    x = tl.reshape(from_rows(parts, 16, 4), [16, 4, ROWS])
    x = to_rows(tl.reshape(tl.permute(x, [1, 0, 2]), [4, 16 * ROWS]), 16 * ROWS, 4, 2)
    fours = ()
    for q in tl.static_range(4):
        fours = fours + (tl.reshape(x[q], [16, ROWS]),)
    return fours


@triton.jit
def _sign_words(seed, step, run):
    """Two words whose bits change the signs of a run, by its number in the chunk."""
    w0, w1, w2, w3 = philox4(seed, step, seed * 0, _SIGN_STREAM, run // 2)
    second = run % 2 != 0
    return tl.where(second, w2, w0), tl.where(second, w3, w1)


@triton.jit
def _change_signs_of_pairs(words, signs):
    """As `_change_signs`, of words of two elements."""
    changed = ()
    for k in tl.static_range(4):
        # Of 16 bits the even ones to the lower half of a word, the odd ones to the upper half.
        w = signs[k // 2] << (16 - 16 * (k % 2))
        both = (w & 0xFFFF0000) | ((w >> 15) & 0xFFFF)
        for j in tl.static_range(8):
            changed = changed + (words[8 * k + j] ^ ((both << (14 - 2 * j)) & 0x80008000),)
    return changed


@triton.jit
def _norm_words(bits):
    """Words of norms, of their bits."""
    words = tl.where(bits < _NORM_LOW, 0, bits)
    return tl.where(bits >= _INFINITY, _NAN_NORM, words)


def _level_asm() -> str:
    """PTX of `_levels` for $1 to $4, random words $5 to $8 and factors $9."""
    table = [sum(v << 8 * i for i, v in enumerate(LEVELS[k : k + 4])) for k in range(0, 16, 4)]
    lines = [".reg .f32 u, d, p, w;", ".reg .b32 sum, bits, low, high;"]
    for k in (4, 3, 2, 1):
        lines += [
            # (v * r + 15) / 32, at least 0; whole 2^-16 below that, in steps; less 15 and 2^-16.
            f"mul.rn.f32 u, ${k}, $9;",
            "add.rn.sat.f32 u, u, 0f3EF00000;",
            "fma.rm.f32 u, u, 0f42000000, 0f43000000;",
            "add.rn.f32 d, u, 0fC30F0001;",
            "min.f32 d, d, 0f416FFFF0;",
            # Twice the place among the levels, but for its sign: levels are 1 apart in places.
            "abs.f32 u, d;",
            "add.rn.sat.f32 p, u, 0fBF800000;",
            "add.rn.f32 u, u, p;",
            "fma.rn.sat.f32 p, u, 0f3EAAAAAB, 0fC08AAAAB;",
            "sub.rn.f32 w, u, p;",
            # The place from 1/2 on, plus 2^-16 / 6, less the random number.
            "mov.b32 bits, d;",
            "lop3.b32 bits, bits, 0x80000000, 0x3F000000, 0xEA;",
            "mov.b32 d, bits;",
            "fma.rn.f32 w, w, d, 0f3F00002B;",
            f"prmt.b32 bits, ${k + 4}, 0x43000000, 0x7432;",
            "mov.b32 u, bits;",
            "add.rn.f32 u, u, 0fC3000000;",
            "sub.rn.f32 w, w, u;",
            "add.rm.f32 w, w, 0f4B000008;",
            "mov.b32 bits, w;",
        ]
        if k == 4:
            lines.append("mov.b32 sum, bits;")
        else:
            lines.append("shl.b32 sum, sum, 4; add.u32 sum, sum, bits;")
    lines += [
        # A code of 8 or more gives 0 in the first, one below 8 in the second.
        f"prmt.b32 low, {table[0]}, {table[1]}, sum;",
        "xor.b32 sum, sum, 0x8888;",
        f"prmt.b32 high, {table[2]}, {table[3]}, sum;",
        "or.b32 $0, low, high;",
    ]
    return "{ " + " ".join(lines) + " }"


_LEVEL_ASM = tl.constexpr(_level_asm())


@triton.jit
def _levels(v, drawn, r, PTX: tl.constexpr):
    """Four levels at random, in the bytes of a word, of values times `r`, by four random words.

    In PTX all of it is float arithmetic, exact where it counts: t + g is chosen if (u - 2^-16 - t)
    / g is not below floor(w / 2^16) / 2^16. What is left of that, u - 2^-16 through a function
    with slopes 1 / g, is the number of a level in whole numbers. 2^-16 / 6 makes up for roundings.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _LEVEL_ASM,
            "=&r,r,r,r,r,r,r,r,r,r",
            [v[0], v[1], v[2], v[3], drawn[0], drawn[1], drawn[2], drawn[3], r * 0.03125],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        word = drawn[0] * 0
        for k in tl.static_range(4):
            u = v[k] * r + _MIDDLE
            u = tl.where(u < _TOP, u, _TOP)
            u = tl.where(u > 0, u, 0)
            steps = (u * 65536.0).to(tl.uint32)
            whole = steps >> 16
            twice = (2 * whole).to(tl.uint64)
            behind = (((twice * 0 + _BEHIND) >> twice) & 3).to(tl.uint32)
            gap = (((twice * 0 + _GAPS) >> twice) & 3).to(tl.uint32)
            below = whole - behind
            above = steps - (below << 16) > (drawn[k] >> 16) * gap
            word |= (below + tl.where(above, gap, 0)) << (8 * k)
        return word


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Encode a tile's blocks; the first tile also writes count, seed and shared norm."""
    BITS: tl.constexpr = F.bits
    ROWS: tl.constexpr = L.rows
    seed, step, rank = draw
    row = lanes(ROWS)
    run = t.tile * ROWS + row
    block = run // _LANES
    here = block < (t.n + _BLOCK - 1) // _BLOCK
    norms = (t.nelem + _BLOCK - 1) // _BLOCK
    if F.per_block:
        norm = _norm_words(agreed(stats_ptr, norms, t.first, block, here, _BLOCK))
    else:
        norm = _norm_words(tl.where(here, of_tensor(stats_ptr), 0))
    coded = (norm != 0) & (norm != _NAN_NORM)
    signs = _sign_words(seed, step, run)
    if len(v) == _RUN:
        scaled = _scaled_signed(v, tl.full([ROWS], _FACTOR, tl.float32), signs, L.ptx)
    else:
        changed = _change_signs_of_pairs(v, signs)
        scaled = ()
        for k in tl.static_range(32):
            a, b = halves(changed[k], L.exponent)
            scaled = scaled + (a * _FACTOR, b * _FACTOR)
    values = _to_fours(_rotated(scaled, ROWS), ROWS)
    # All of a block is infinite or NaN if one of its elements is, and else nothing.
    top = tl.max(as_bits(values[0]) & 0x7FFFFFFF, 0)
    flag = t.record_ptr + 2 + row * 0
    found = coded & (top >= _INFINITY)
    tl.atomic_or(flag, (row * 0 + 2).to(tl.int64), mask=found, sem="relaxed")

    divisor = as_float(tl.where(coded, norm, 127 << 23))
    r = tl.div_rn(tl.full([ROWS], _STEPS, tl.float32), divisor)
    # Fours of random words, or of cells, before each of the thread's.
    four = (block * (_BLOCK // 4) + row % _LANES)[None, :] + 16 * tl.arange(0, 16)[:, None]
    before = t.chunk * ((t.at - 1) // BITS) * (_BLOCK // 4)
    drawn = philox4(seed, step, rank, _LEVEL_STREAM, before + four)
    word = tl.where(coded[None, :], _levels(values, drawn, r[None, :], L.ptx), 0)
    payload = t.static_ptr.to(tl.pointer_type(tl.uint32))
    if BITS == 8:
        tl.store(payload + four, word, mask=here[None, :])
        terms = weigh(word, four)
    else:
        low = (word & 0xFF) | ((word & 0xFF00) << 8)
        high = ((word >> 16) & 0xFF) | ((word >> 8) & 0xFF0000)
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        tl.store(payload.to(tl.pointer_type(tl.uint64)) + four, both, mask=here[None, :])
        terms = weigh(low, 2 * four) + weigh(high, 2 * four + 1)
    norms_at = t.at * 32 + _NORMS_AT
    if F.per_block:
        own = here & (row % _LANES == 0)
        tl.store(payload + norms_at + block, norm.to(tl.uint32, bitcast=True), mask=own)
    total = tl.zeros([], tl.uint64)
    if L.sums:
        sums = tl.sum(terms, 0)
        if F.per_block:
            norm_words = norm.to(tl.uint32, bitcast=True)
            sums += tl.where(own, weigh(norm_words, norms_at + block), 0)
        total += tl.sum(sums, 0)
    if t.tile == 0:
        total += _write_head(payload, t, seed, step, stats_ptr, norms_at, F)
    return total


@triton.jit
def _write_head(payload, t, seed, step, stats_ptr, norms_at, F: tl.constexpr):
    """What a chunk has once: its count, seed and shared norm. Gives their checksum terms."""
    count_at = t.at * 32 - _COUNT_WORDS
    one = tl.full([], 1, tl.uint32)
    tl.store(payload + count_at, one)
    total = weigh(one, count_at)
    i = tl.arange(0, 4)
    part = tl.where(i == 0, seed, tl.where(i == 1, seed >> 32, tl.where(i == 2, step, 0)))
    tl.store(payload + t.at * 32 + i, part.to(tl.uint32))
    total += tl.sum(weigh(part.to(tl.uint32), t.at * 32 + i), 0)
    if F.per_block == 0:
        norm = _norm_words(of_tensor(stats_ptr)).to(tl.uint32, bitcast=True)
        tl.store(payload + norms_at, norm)
        total += weigh(norm, norms_at)
    return total


def _cell_asm(bits: int) -> str:
    """PTX of `_cell_values` for a word and what is added to its even and to its odd bytes."""
    n = 32 // bits
    lines = [f".reg .b32 h, b; .reg .f32 x; mov.b32 h, ${n};"]
    for i in range(n):
        k = i * bits % 16
        if i == n // 2:
            lines.append("shr.b32 h, h, 16;")
        lines += [
            f"lop3.b32 b, h, {((1 << bits) - 1) << k}, {_TWO_23.value}, 0x6A;",
            "mov.b32 x, b;",
            f"fma.rn.f32 ${i}, x, 0f{(127 - k) << 23:08X}, ${n + 1 + k // 8};",
        ]
    return "{ " + " ".join(lines) + " }"


_CELL_ASM_8, _CELL_ASM_16 = tl.constexpr(_cell_asm(8)), tl.constexpr(_cell_asm(16))


@triton.jit
def _cell_values(word, center, BITS: tl.constexpr, PTX: tl.constexpr):
    """float32 values of a word's cells less `center`. Each cell becomes bits of the significand of
    a number between 2^23 and 2^24.
    """
    even, odd = -8388608.0 - center, -32768.0 - center
    if PTX:
        if BITS == 8:
            values = tl.inline_asm_elementwise(
                _CELL_ASM_8,
                "=&f,=&f,=&f,=&f,r,f,f",
                [word, even, odd],
                (tl.float32, tl.float32, tl.float32, tl.float32),
                True,
                1,
            )
        else:
            values = tl.inline_asm_elementwise(
                _CELL_ASM_16, "=&f,=&f,r,f", [word, even], (tl.float32, tl.float32), True, 1
            )
    else:
        values = ()
        for half in tl.static_range(2):
            h = word >> (16 * half)
            for k in tl.static_range(0, 16, BITS):
                bits = (h & (((1 << BITS) - 1) << k)) ^ _TWO_23
                x = bits.to(tl.float32, bitcast=True)
                values = values + (x * 2.0**-k + (even if k == 0 else odd),)
    return values


_SIGNED_ASM = tl.constexpr(
    "{ .reg .b32 s, x; .reg .f32 y; "
    + " ".join(
        f"shl.b32 s, $8, {3 - j}; mul.rn.f32 y, ${4 + j}, $9; mov.b32 x, y; "
        f"lop3.b32 x, s, 0x80000000, x, 0x6A; mov.b32 ${j}, x;"
        for j in range(4)
    )
    + " }"
)


@triton.jit
def _scaled_signed(v, scale, signs, PTX: tl.constexpr):
    """Columns of a run times `scale`, whose signs the bits of two words then change."""
    changed = ()
    for k in tl.static_range(0, 64, 4):
        # The lowest bit of the four to bit 28.
        word = signs[k // 32] << (28 - k % 32)
        if PTX:
            four = tl.inline_asm_elementwise(
                _SIGNED_ASM,
                "=&f,=&f,=&f,=&f,f,f,f,f,r,f",
                [v[k], v[k + 1], v[k + 2], v[k + 3], word, scale],
                (tl.float32, tl.float32, tl.float32, tl.float32),
                True,
                1,
            )
        else:
            four = ()
            for j in tl.static_range(4):
                bits = (v[k + j] * scale).to(tl.uint32, bitcast=True)
                bits ^= (word << (3 - j)) & 0x80000000
                four = four + (bits.to(tl.float32, bitcast=True),)
        changed = changed + four
    return changed


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's blocks, NaN where lost. What is wrong counts in the number of ranks, in
    norms, and in blocks that hold some of the elements `lo` to `hi`.
    """
    BITS: tl.constexpr = F.bits
    ROWS: tl.constexpr = L.rows
    COUNT: tl.constexpr = _RUN * BITS // 32
    row = lanes(ROWS)
    run = t.tile * ROWS + row
    block = run // _LANES
    here = block < (t.n + _BLOCK - 1) // _BLOCK
    payload = t.static_ptr.to(tl.pointer_type(tl.uint32))
    ranks = tl.load(payload + t.at * 32 - _COUNT_WORDS + row * 0) & ((1 << BITS) - 1)
    norms_at = t.at * 32 + _NORMS_AT
    terms = tl.zeros([ROWS], tl.uint64)
    if F.per_block:
        norm = tl.load(payload + norms_at + block, mask=here, other=0)
        if L.sums:
            terms += tl.where(row % _LANES == 0, weigh(norm, norms_at + block), 0)
    else:
        norm = tl.load(payload + norms_at + row * 0)
    lost = norm == _NAN_NORM
    good = (norm >= _NORM_LOW) & (norm <= _NORM_HIGH)
    wrong = (ranks == 0) | (ranks > F.ranks) | ((good | lost | (norm == 0)) == 0)
    most = (ranks * _MIDDLE).to(tl.int32).to(tl.float32)
    center = tl.where(good, most, 0.0)
    v = ()
    for k in tl.static_range(0, COUNT, 4):
        i = run[:, None] * COUNT + k + tl.arange(0, 4)[None, :]
        if MASKED:
            four = tl.load(payload + i, mask=here[:, None], other=0)
        else:
            four = tl.load(payload + i)
        words = to_columns(four, ROWS, 4, 2)
        for j in tl.static_range(4):
            if L.sums:
                terms += weigh(words[j], run * COUNT + k + j)
            v = v + _cell_values(words[j], center, BITS, L.ptx)
    top = v[0]
    for k in tl.static_range(1, 64):
        top = tl.maximum(top, v[k])
    wanted = (block * _BLOCK < hi) & ((block + 1) * _BLOCK > lo)
    wrong = wrong | (wanted & (top > center))
    value = tl.where(good | lost, norm, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(value, tl.full([ROWS], _STEPS, tl.float32))
    x = _to_runs(_rotated(v, ROWS), ROWS)
    # The transform of no cells is +0, and stays that.
    head = payload + t.at * 32
    seed = tl.load(head).to(tl.uint64) | (tl.load(head + 1).to(tl.uint64) << 32)
    signs = _sign_words(seed, tl.load(head + 2).to(tl.uint64), run)
    signs = tl.where(good, signs[0], 0), tl.where(good, signs[1], 0)
    return _scaled_signed(x, scale, signs, L.ptx), wrong, terms


@kernel
def _fold_kernel(memory_ptr, blocks: tl.int64, nelem: tl.int64, member=None):
    """The norm of a tensor at `memory_ptr`, by the energies of its blocks, 16 bytes behind that.

    They are added up by halves, as if there were a power of two of them.
    """
    sums = (memory_ptr + 16).to(tl.pointer_type(tl.float64))
    size = blocks * 0 + 1
    while size < blocks:
        size *= 2
    count = blocks
    while size > 1:
        size = size // 2
        at = size * 0
        while at < size:
            i = at + tl.arange(0, _FOLDED)
            other = tl.load(sums + size + i, mask=(i < size) & (size + i < count), other=0.0)
            v = tl.load(sums + i, mask=i < size, other=0.0)
            tl.store(sums + i, v + other, mask=i < size)
            at += _FOLDED
        count = size
        tl.debug_barrier()
    total = tl.load(sums, mask=blocks > 0, other=0.0)
    norm = tl.sqrt(total / tl.maximum(nelem, 1).to(tl.float64)).to(tl.float32)
    tl.store(memory_ptr.to(tl.pointer_type(tl.float32)), norm)


@functools.cache
def _driver(spec: Thc) -> Driver:
    form = Cells(
        run=int(_RUN.value),
        limited=True,
        pairs=True,
        checked=True,
        once=True,
        bits=spec.bits,
        per_block=spec.norm == "block",
        ranks=spec.max_ranks,
    )
    return Driver(_pack, _unpack, no_scale, form, (ENCODE, DECODE, DECODE_ADD_ENCODE))


def measure(spec: Thc, dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """As `Thc.measure`, float32, on the device of `x`."""
    memory = torch.empty(workspace(spec, x.numel(), 1)[1], dtype=torch.uint8, device=x.device)
    return _measured(spec, dtype, x, memory).clone()


def _measured(spec: Thc, dtype: DType, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The norms of `x`, in `memory`, the second part of the workspace."""
    blocks = spec.blocks(x.numel())
    if spec.norm == "block":
        found = memory.view(torch.float32)[:blocks]
        roots(dtype, x, BLOCK, 1 / BLOCK, found)
        return found
    energies(dtype, x, BLOCK, memory[16:].view(torch.float64))
    variant_of(_fold_kernel, 16).launch(1, (memory,), blocks, x.numel())
    return memory[:4].view(torch.float32)


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract.

    Chunks with an element that is not finite where `stats` are get marked as overflowed.
    """
    spec: Thc = plan.codec
    if stats is None:
        stats = _measured_for(plan, x, scratch)
    else:
        _check_norms(plan, stats)
    _driver(spec).encode(plan, x, out, stats=stats, key=key, draws=True)


def _measured_for(plan: Plan, x, scratch, own=None) -> torch.Tensor:
    spec: Thc = plan.codec
    used, nbytes = workspace(spec, plan.chunk_nelem, plan.chunks)
    return _measured(spec, plan.dtype, x.detach(), scratch[used : used + nbytes])


def _check_norms(plan: Plan, stats: torch.Tensor) -> None:
    norms = plan.codec.blocks(plan.nelem) if plan.codec.norm == "block" else 1
    if stats.numel() != norms:
        raise ValueError(f"stats have {stats.numel()} norms; allowed: {norms} for {plan.shape}")


def encode_many(plans, xs, outs, stats=None, key: Key | None = None) -> None:
    """Encode tensors into buffers; see `tightwire.gpu_many` for the contract."""
    if stats is None:
        work = Work(plans, xs[0].device)
        stats = launch_merged(plans, (xs, work), _measured_for, kept=work.whole)
    else:
        for plan, own in zip(plans, stats, strict=True):
            _check_norms(plan, own)
    _driver(plans[0].codec).encode_many(plans, xs, outs, stats=stats, key=key, draws=True)


def decode(plan: Plan, src, out, scratch, status, **selection) -> None:
    """Decode elements into `out`; see `Driver.decode`."""
    _driver(plan.codec).decode(plan, src, out, scratch, status, **selection)


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _driver(plan.codec)


_, decode_many, sum, _ = many_functions(driver_of)
