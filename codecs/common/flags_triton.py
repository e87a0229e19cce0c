# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Flags in memory that GPUs of a host read: how their kernels wait for one another."""

from __future__ import annotations

import triton
import triton.language as tl

#: Looks at flags after which a rank is late, without a clock.
_LOOKS = tl.constexpr(1 << 20)


@triton.jit
def _now(PTX: tl.constexpr):
    """Nanoseconds of the device's clock; 0 without PTX."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.full([], 0, tl.int64)


@triton.jit
def _looked(mine, used, number, ahead, SHIFT: tl.constexpr, SEM: tl.constexpr):
    """(flags of the ranks; which of them do not have a number from `number` to `ahead` more)."""
    zero = tl.zeros(mine.shape, tl.int64)
    seen = tl.atomic_add(mine, zero, mask=used, sem=SEM, scope="sys")
    numbers = seen >> SHIFT
    return seen, used & ((numbers < number) | (numbers > number + ahead))


@triton.jit
def tell(theirs, used, flag):
    """Give `flag` to ranks, who find behind it what all threads of the program have written.

    Args:
        theirs: By rank, where its flag of this rank is: pointers to int64.
        used: Which of them are ranks.
        flag: An int64: a number that grows, above some bits of any kind.
    """
    tl.debug_barrier()
    word = tl.zeros(theirs.shape, tl.int64) + flag
    tl.atomic_xchg(theirs, word, mask=used, sem="release", scope="sys")


@triton.jit
def wait_for(mine, used, number, ahead, late_ptr, limit_ns, SHIFT: tl.constexpr, PTX: tl.constexpr):
    """Wait for the flags of ranks, for `limit_ns` at most.

    Behind it all threads of the program find what those ranks had written before.

    Args:
        mine: By rank, where this rank's flag of it is: pointers to int64.
        used: Which of them are ranks.
        number: What flags have above SHIFT bits when they have come.
        ahead: How much more they may have. A rank that is further has given this one up.
        late_ptr: Where the first rank is kept that has not come. If there is one, nobody is waited
            for any more.
        limit_ns: Nanoseconds.
        SHIFT: Bits of a flag below its number.
        PTX: The device's clock is read. Else it is counted how often flags are looked at.

    Returns:
        (The flags; 0, or 1 + that rank.)
    """
    seen, missing = _looked(mine, used, number, ahead, SHIFT, "relaxed")
    known = tl.load(late_ptr)
    until = _now(PTX) + limit_ns
    looks = tl.where(known > 0, 0, _LOOKS)
    while (tl.max(missing.to(tl.int32), 0) > 0) & (looks > 0):
        seen, missing = _looked(mine, used, number, ahead, SHIFT, "relaxed")
        if PTX:
            looks = tl.where(_now(PTX) < until, looks, 0)
        else:
            looks -= 1
    # Once, not with every look: it has what was read before forgotten.
    seen, missing = _looked(mine, used, number, ahead, SHIFT, "acquire")
    late = tl.max(tl.where(missing, tl.arange(0, mine.shape[0]) + 1, 0), 0).to(tl.int64)
    if late > 0:
        # The first one is named: later it may have kept others from coming.
        first = tl.atomic_cas(late_ptr, late * 0, late)
        late = tl.where(first > 0, first, late)
    tl.debug_barrier()
    return seen, late
