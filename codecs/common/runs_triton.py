# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Runs of 32 elements, one to a thread, for the codecs that pack codes of such runs into words.

A thread loads its run 16 bytes at a time and makes whole words of its codes: but for what a group
has in common no value changes hands. Elements are tuples of columns, one tensor for each place in
the runs of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .columns_triton import from_columns, to_columns
from .frame_triton import STATUS_TOP, accumulator, add_to, float_of, round_bfloat16
from .minifloat_triton import add_pair, elements_at, halves

RUN = tl.constexpr(32)
#: Added to a number below 2^22, rounds it; its code is then in the lowest bits.
ANCHOR = tl.constexpr(float(3 << 22))
#: Bits of 2^23.
_TWO_23 = tl.constexpr(0x4B000000)


@triton.jit
def lanes(RUNS: tl.constexpr):
    """Numbers of a tile's runs. The hint keeps one to a thread, in every tensor."""
    return tl.max_contiguous(tl.arange(0, RUNS), 1)


@triton.jit
def load_words(x, here, RUNS: tl.constexpr, ITEM: tl.constexpr, SIZE: tl.constexpr = 32):
    """Columns of words of the runs of SIZE elements at `x`, a pointer to bytes, a multiple of 16.

    `here`: None, or which runs there are; others are 0.
    """
    columns = ()
    words = x.to(tl.pointer_type(tl.uint32))
    COUNT: tl.constexpr = SIZE * ITEM // 4
    for k in tl.static_range(0, COUNT, 4):
        i = lanes(RUNS)[:, None] * COUNT + k + tl.arange(0, 4)[None, :]
        if here is None:
            four = tl.load(words + i)
        else:
            four = tl.load(words + i, mask=here[:, None], other=0)
        columns = columns + to_columns(four, RUNS, 4, 2)
    return columns


@triton.jit
def word_values(words, EXP: tl.constexpr, ITEM: tl.constexpr):
    """float32 columns of the elements of words."""
    columns = ()
    for k in tl.static_range(len(words)):
        if ITEM == 4:
            columns = columns + (words[k].to(tl.float32, bitcast=True),)
        else:
            columns = columns + halves(words[k], EXP)
    return columns


@triton.jit
def load_elements(
    x,
    at,
    inside,
    RUNS: tl.constexpr,
    ITEM: tl.constexpr,
    SIZE: tl.constexpr = 32,
):
    """Columns of the bits of elements anywhere, uint32: numbers `at` from `x` on, shape [RUNS,
    SIZE]; 0 where not `inside`.
    """
    bits = tl.load(elements_at(x, ITEM) + at, mask=inside, other=0).to(tl.uint32)
    LOG: tl.constexpr = 3 + SIZE // 16 - SIZE // 64
    return to_columns(bits, RUNS, SIZE, LOG)


@triton.jit
def column_bits(x, at, count, ITEM: tl.constexpr, SIZE: tl.constexpr):
    """As `load_elements`, of runs that begin at elements `at` and have `count` of them: column by
    column, which takes few registers.
    """
    columns = ()
    for k in tl.static_range(SIZE):
        bits = tl.load(elements_at(x, ITEM) + at + k, mask=k < count, other=0)
        columns = columns + (bits.to(tl.uint32),)
    return columns


@triton.jit
def load_columns(x, at, count, EXP: tl.constexpr, ITEM: tl.constexpr, SIZE: tl.constexpr):
    """float32 columns of `column_bits`."""
    columns = ()
    bits = column_bits(x, at, count, ITEM, SIZE)
    for k in tl.static_range(SIZE):
        columns = columns + (float_of(bits[k], EXP, ITEM),)
    return columns


@triton.jit
def store_columns(out, at, lo, hi, words, ITEM: tl.constexpr):
    """Store elements `lo` to `hi` of words of runs that begin at `at`, column by column."""
    for k in tl.static_range(len(words)):
        if ITEM == 4:
            tl.store(elements_at(out, ITEM) + at + k, words[k], mask=(k >= lo) & (k < hi))
        else:
            for j in tl.static_range(2):
                use = (2 * k + j >= lo) & (2 * k + j < hi)
                half = (words[k] >> (16 * j)).to(tl.uint16)
                tl.store(elements_at(out, ITEM) + at + (2 * k + j), half, mask=use)


@triton.jit
def store_runs(out, words, RUNS: tl.constexpr, STAGED: tl.constexpr):
    """Store words of runs at `out`, a pointer to bytes, a multiple of 16.

    STAGED: by way of shared memory, so that neighbouring threads store neighbouring bytes.
    """
    COUNT: tl.constexpr = len(words)
    to = out.to(tl.pointer_type(tl.uint32))
    if STAGED:
        i = lanes(RUNS)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
        tl.store(to + i, from_columns(words, COUNT, 4 if COUNT == 16 else 5))
    else:
        for k in tl.static_range(0, COUNT, 4):
            i = lanes(RUNS)[:, None] * COUNT + k + tl.arange(0, 4)[None, :]
            four = from_columns((words[k], words[k + 1], words[k + 2], words[k + 3]), 4, 2)
            tl.store(to + i, four)


@triton.jit
def in_rows(columns):
    """8, 16, 32 or 64 columns as one tensor, shape [RUNS, columns]."""
    N: tl.constexpr = len(columns)
    return from_columns(columns, N, 3 + N // 16 - N // 64)


@triton.jit
def store_elements(out, at, words, use, RUNS: tl.constexpr, ITEM: tl.constexpr):
    """Store the elements of words of runs where `at` and `use`, shape [RUNS, elements], say."""
    if ITEM == 4:
        tl.store(elements_at(out, ITEM) + at, in_rows(words), mask=use)
    else:
        halves = ()
        for k in tl.static_range(len(words)):
            halves = halves + (words[k].to(tl.uint16), (words[k] >> 16).to(tl.uint16))
        tl.store(elements_at(out, ITEM) + at, in_rows(halves), mask=use)


@triton.jit
def add_elements(
    out,
    at,
    y,
    use,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    CVT: tl.constexpr,
    LIMIT: tl.constexpr = True,
):
    """Add float32 columns, rounded to the dtype as by `rounded_pair`, to elements of ADD bytes."""
    values = ()
    for k in tl.static_range(0, len(y), 2):
        values = values + rounded_pair(y[k], y[k + 1], EXP, ITEM, LIMIT, CVT)
    add_to(accumulator(out, EXP, ADD) + at, in_rows(values), use, EXP, ADD)


@triton.jit
def negative_zero(SHAPE: tl.constexpr):
    """What changes no number that is added to it: the start of a sum.

    `tl.full` makes a positive zero of -0.0.
    """
    return tl.full(SHAPE, 0x80000000, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def limited(y, EXP: tl.constexpr, ITEM: tl.constexpr):
    """`y` in the finite range of the dtype, or NaN."""
    if EXP == 5:
        top = 65504.0
    else:
        TOP: tl.constexpr = 0x7F7F0000 if ITEM == 2 else 0x7F7FFFFF
        top = tl.full([], TOP, tl.uint32).to(tl.float32, bitcast=True)
    y = tl.where(y > top, top, y)
    return tl.where(y < -top, -top, y)


@triton.jit
def narrow_pair(a, b, lost, EXP: tl.constexpr, CVT: tl.constexpr, LIMIT: tl.constexpr = True):
    """Bits of two values in a word, `a` lower; rounded to a dtype of 16 bits, with LIMIT in its
    finite range.

    NaN, which is any otherwise, is the quiet one where they are `lost`.
    """
    if CVT:
        PAIR: tl.constexpr = "f16x2" if EXP == 5 else "bf16x2"
        word = tl.inline_asm_elementwise(
            "cvt.rn." + ("satfinite." if LIMIT else "") + PAIR + ".f32 $0, $2, $1;",
            "=r,r,r",
            [a, b],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        if LIMIT:
            a, b = limited(a, EXP, 2), limited(b, EXP, 2)
        if EXP == 5:
            low = a.to(tl.float16).to(tl.uint16, bitcast=True)
            high = b.to(tl.float16).to(tl.uint16, bitcast=True)
        else:
            low, high = round_bfloat16(a), round_bfloat16(b)
        word = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    if lost is not None:
        word = tl.where(lost, 0x7E007E00 if EXP == 5 else 0x7FC07FC0, word)
    return word


@triton.jit
def _quiet_pair(word, a, b, EXP: tl.constexpr, CVT: tl.constexpr):
    """A word that `narrow_pair` made of `a` and `b` with the quiet NaN for every NaN."""
    if CVT:
        # What the device makes of NaN is positive and above all numbers.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 nan; mov.b32 nan, "
            + ("0x7E007E00" if EXP == 5 else "0x7FC07FC0")
            + "; min.s16x2 $0, $1, nan; }",
            "=r,r",
            [word],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        NAN: tl.constexpr = 0x7E00 if EXP == 5 else 0x7FC0
        word = tl.where(a != a, (word & 0xFFFF0000) | NAN, word)
        return tl.where(b != b, (word & 0xFFFF) | (NAN << 16), word)


@triton.jit
def rounded_pair(
    a, b, EXP: tl.constexpr, ITEM: tl.constexpr, LIMIT: tl.constexpr, CVT: tl.constexpr
):
    """Two values rounded to the dtype, as float32; with LIMIT in its finite range, or NaN."""
    if CVT and ITEM == 2:
        ROUND: tl.constexpr = "cvt.rn.satfinite." if LIMIT else "cvt.rn."
        WIDEN: tl.constexpr = (
            "f16x2.f32 two, $3, $2; mov.b32 {low, high}, two; "
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;"
            if EXP == 5
            else "bf16x2.f32 two, $3, $2; shl.b32 $0, two, 16; and.b32 $1, two, -65536;"
        )
        return tl.inline_asm_elementwise(
            "{ .reg .b32 two; .reg .b16 low, high; " + ROUND + WIDEN + " }",
            "=&r,=&r,r,r",
            [a, b],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        if LIMIT:
            a, b = limited(a, EXP, ITEM), limited(b, EXP, ITEM)
        if ITEM == 2:
            if EXP == 5:
                a, b = a.to(tl.float16).to(tl.float32), b.to(tl.float16).to(tl.float32)
            else:
                a = float_of(round_bfloat16(a).to(tl.uint32), EXP, ITEM)
                b = float_of(round_bfloat16(b).to(tl.uint32), EXP, ITEM)
        return a, b


@triton.jit
def element_words(
    y, lost, EXP: tl.constexpr, ITEM: tl.constexpr, CVT: tl.constexpr, LIMIT: tl.constexpr = True
):
    """Columns of words of what float32 columns round to in a dtype, as by `narrow_pair`.

    The quiet NaN stands in runs that are `lost`, or if that is None for every NaN.
    """
    words = ()
    for k in tl.static_range(0, len(y), 4 // ITEM):
        if ITEM == 4:
            value = y[k]
            if LIMIT:
                value = limited(value, EXP, ITEM)
            bits = value.to(tl.uint32, bitcast=True)
            if lost is None:
                bits = tl.where(value != value, 0x7FC00000, bits)
            else:
                bits = tl.where(lost, 0x7FC00000, bits)
            words = words + (bits,)
        else:
            word = narrow_pair(y[k], y[k + 1], lost, EXP, CVT, LIMIT)
            if lost is None:
                word = _quiet_pair(word, y[k], y[k + 1], EXP, CVT)
            words = words + (word,)
    return words


@triton.jit
def sum_runs(
    y, v, EXP: tl.constexpr, ITEM: tl.constexpr, CVT: tl.constexpr, LIMIT: tl.constexpr = True
):
    """float32 columns `y`, rounded to the dtype as by `rounded_pair`, plus `v`, rounded again."""
    sums = ()
    for k in tl.static_range(0, len(y), 2):
        a, b = rounded_pair(y[k], y[k + 1], EXP, ITEM, LIMIT, CVT)
        sums = sums + rounded_pair(a + v[k], b + v[k + 1], EXP, ITEM, False, CVT)
    return sums


@triton.jit
def sum_pairs(y, words, EXP: tl.constexpr, LIMIT: tl.constexpr = True):
    """As `sum_runs`, of words of two elements of 16 bits, and by the device's own sums of them."""
    sums = ()
    for k in tl.static_range(len(words)):
        decoded = narrow_pair(y[2 * k], y[2 * k + 1], None, EXP, True, LIMIT)
        sums = sums + (add_pair(decoded, words[k], EXP),)
    return sums


@triton.jit
def report_any(status_ptr, code, wrong):
    """`report` without a look at all of the program's elements first: no thread waits."""
    status = tl.zeros_like(wrong.to(tl.int64)) + (STATUS_TOP - code)
    tl.atomic_max(status_ptr + wrong.to(tl.int32) * 0, status, mask=wrong, sem="relaxed")


@triton.jit
def exact_product_plus(x, y, z, PTX: tl.constexpr):
    """The sum x * y + z, rounded once, of float32 numbers whose product is exact: fused or not."""
    if PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [x, y, z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return x * y + z


@triton.jit
def code_values(word, BITS: tl.constexpr, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """float32 values of the codes of 4 or 8 bits in a word, the lowest first.

    They are unsigned, or with OFFSET, 2^(BITS - 1), in two's complement. Each code becomes bits of
    the significand of a number between 2^23 and 2^24.
    """
    values = ()
    for half in tl.static_range(2):
        h = word >> (16 * half)
        for k in tl.static_range(0, 16, BITS):
            bits = (h & (((1 << BITS) - 1) << k)) ^ (_TWO_23 + (OFFSET << k))
            x = bits.to(tl.float32, bitcast=True)
            less = -(2.0 ** (23 - k) + OFFSET)
            values = values + (exact_product_plus(x, 2.0**-k, less, PTX),)
    return values


@triton.jit
def code_word(
    numbers, FIRST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, SIGNED: tl.constexpr
):
    """The word of 32 / BITS codes, every STEP-th of whole numbers plus `ANCHOR`, from FIRST on.

    Bits of such a sum are those of the anchor plus the code: what anchors add up to is subtracted,
    and negative codes, which borrow from the next, are lifted meanwhile.
    """
    LAST: tl.constexpr = 32 // BITS - 1
    word = numbers[FIRST + LAST * STEP].to(tl.uint32, bitcast=True)
    for k in tl.static_range(LAST - 1, -1, -1):
        word = (word << BITS) + numbers[FIRST + k * STEP].to(tl.uint32, bitcast=True)
    # 0x4B400000 times 1 + 2^4 + 2^8 + ..., or 1 + 2^8 + ...
    word -= 0x3F400000 if BITS == 4 else 0x8B400000
    if SIGNED:
        LIFT: tl.constexpr = 0x88888888 if BITS == 4 else 0x80808080
        word = (word + LIFT) ^ LIFT
    return word


@triton.jit
def transpose_bits(words, LOG: tl.constexpr):
    """2^LOG words whose lanes of 2^LOG bits are rows of matrices, transposed: bit i of a lane of
    word j becomes bit j of that lane of word i.
    """
    for k in tl.static_range(LOG):
        words = _transpose_blocks(words, 1 << (LOG - 1 - k))
    return words


@triton.jit
def _transpose_blocks(words, SIZE: tl.constexpr):
    """Words in whose matrices of 2 by 2 blocks of SIZE bits two blocks traded places."""
    # The lower half of the bits of each row.
    LOW: tl.constexpr = 0x55555555 if SIZE == 1 else (0x33333333 if SIZE == 2 else 0x0F0F0F0F)
    transposed = ()
    for i in tl.static_range(len(words)):
        if (i // SIZE) % 2 == 0:
            transposed = transposed + ((words[i] & LOW) | ((words[i + SIZE] & LOW) << SIZE),)
        else:
            transposed = transposed + (
                ((words[i - SIZE] >> SIZE) & LOW) | (words[i] & (LOW << SIZE)),
            )
    return transposed
