# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Calls for many tensors at once, made of calls for one: each kernel is launched once for all.

The launches of a call are noted, and not made. Those of calls by equal plans differ in addresses
alone, so one call is noted for all of them, and its addresses are moved. What a launch of one call
takes is a row of a table: a kernel for any kernel looks up its program's row and runs the other.

Such a call may do nothing on the device but launch kernels that have `member` (`launch_triton`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ...formats.header import ALIGN, align
from .base import Plan
from .batch_triton import addresses, map_of, row_of
from .frame_triton import Words, fill, new_table, pointer_of
from .launch_triton import INTERPRETED, Variant, kernel, recorded_by

#: Kinds of arguments: numbers by their annotations, then pointers; 2 more at multiples of 16.
_NUMBERS = {"tl.int64": 0, "tl.int32": 1, "tl.uint64": 2, "tl.float32": 3}
_BYTES, _WORDS = tl.constexpr(4), tl.constexpr(5)
#: VALUES as arguments: constexprs in a tuple stay such in the compiler's own tuples alone.
_values_of = tuple if INTERPRETED else tl.tuple


@triton.jit
def _argument(word, KIND: tl.constexpr):
    """What a word of a row stands for: a number, or a pointer to bytes or to words."""
    if KIND == 1:
        found = word.to(tl.int32)
    elif KIND == 2:
        found = word.to(tl.uint64, bitcast=True)
    elif KIND == 3:
        found = word.to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == _BYTES:
        found = word.to(tl.pointer_type(tl.uint8))
    elif KIND == _BYTES + 2:
        found = pointer_of(word)
    elif KIND == _WORDS:
        found = word.to(tl.pointer_type(tl.int64))
    elif KIND == _WORDS + 2:
        found = tl.multiple_of(word.to(tl.pointer_type(tl.int64)), 16)
    else:
        found = word
    return found


@kernel
def merged_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    kept_ptr,
    BODY: tl.constexpr,
    KINDS: tl.constexpr,
    VALUES: tl.constexpr,
    HASHES: tl.constexpr,
):
    """A program of one of several calls of kernel BODY, whose constexprs are VALUES.

    A row has the number of the call's first program, how many it has, and the arguments, of KINDS.
    `kept_ptr` is not read: who records launches keeps what they take. HASHES: see `_hashes`.
    """
    pid = tl.program_id(0)
    FIELDS: tl.constexpr = len(KINDS) + 2
    row_ptr = row_of(sources_ptr, firsts_ptr, owners_ptr, pid, FIELDS)
    member = pid - tl.load(row_ptr).to(tl.int32), tl.load(row_ptr + 1).to(tl.int32)
    arguments = ()
    for k in tl.static_range(len(KINDS)):
        arguments = arguments + (_argument(tl.load(row_ptr + (2 + k)), KINDS[k]),)
    BODY(*arguments, *_values_of(VALUES), member)


class _Step(NamedTuple):
    """A launch of calls by one plan.

    Attributes:
        variant: The kernel.
        row: A row, but for addresses in the calls' memory: those are offsets in it.
        columns: Of each pointer the memory that it is in, by number, from 1 on; 0: none of the
            call's own.
        calls: Numbers of the calls.
    """

    variant: Variant
    row: list[int]
    columns: list[int]
    calls: list[int]


class Work(Sequence[torch.Tensor]):
    """Work memory of calls, one behind the other in one allocation.

    Attributes:
        whole: The allocation, uint8.
        addresses: Where each is, shape (n,).
    """

    def __init__(self, plans: Sequence[Plan], device: torch.device) -> None:
        sizes = [align(plan.scratch_nbytes) for plan in plans]
        self._ends = list(accumulate(sizes, initial=0))
        self.whole = torch.empty(max(self._ends[-1], ALIGN), dtype=torch.uint8, device=device)
        self.addresses = np.array(self._ends[:-1], np.int64) + self.whole.data_ptr()

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, i):
        return self.whole[self._ends[i] : self._ends[i + 1]]


def launch_merged(
    plans: Sequence[Plan],
    memory: Sequence[Sequence[torch.Tensor] | torch.Tensor | None],
    call: Callable[..., torch.Tensor | None],
    *,
    statuses: Sequence[torch.Tensor] | Words | None = None,
    alike: Sequence[Hashable] | None = None,
    kept: torch.Tensor | None = None,
) -> Words:
    """Make the launches of `call(plan, *tensors, own)` for each plan, by as many as one makes.

    They are more if calls differ: by the alignment of tensors, or where plans take other kernels.

    Args:
        plans: Plans of one codec, dtype and device.
        memory: What the calls get: of each tensor n of them, one a plan; None: they get None.
        call: Makes launches. Its calls do not depend on each other.
        statuses: Status words, which calls get last of all memory.
        alike: What else calls depend on, and get as `own`, one a plan.
        kept: Memory that the launches use and nobody else keeps.

    Returns:
        Where what `call` returns is, of each.
    """
    given = [column for column in memory if column is not None]
    # Nothing depends on the alignment of status words.
    even = [addresses(column) % 16 == 0 for column in given]
    if statuses is not None:
        memory = *memory, statuses
        given.append(statuses)
    # Before them what stays where it is.
    at = np.stack([np.zeros(len(plans), np.int64), *map(addresses, given)], 1)
    groups: dict[Any, list[int]] = {}
    others = repeat(None) if alike is None else alike
    for i, key in enumerate(zip(map(id, plans), zip(*even, strict=True), others, strict=False)):
        groups.setdefault(key, []).append(i)
    calls, results = [], np.zeros(len(plans), np.int64)
    # Launches have addresses alone: what they read, as tables of a captured graph, is kept here.
    all_noted: list[list[Any]] = []
    for numbers in groups.values():
        one = numbers[0]
        tensors = [None if column is None else column[one] for column in memory]
        noted: list[Any] = []
        all_noted.append(noted)
        with recorded_by(functools.partial(_note, noted)):
            found = call(plans[one], *tensors, None if alike is None else alike[one])
        spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t is not None]
        calls.append([_step(launch, spans, numbers) for launch in noted])
        if found is not None:
            column, offset = _place_in(spans, found.data_ptr())
            results[numbers] = at[numbers, column] + offset
    _launch_all(_in_order(calls), at, given[0][0].device, kept)
    return results


def _note(noted: list[Any], *launch: Any) -> None:
    noted.append(launch)


def _place_in(spans: Sequence[tuple[int, int]], pointer: int) -> tuple[int, int]:
    """(the memory that a pointer is in, by number from 1 on, and where); 0 if it is in none.

    The array of a buffer may go on behind the buffer, and have other memory there: so it is the one
    that starts last. What starts where memory ends is not in it.
    """
    inside = [(start, k) for k, (start, end) in enumerate(spans, 1) if start <= pointer < end]
    start, column = max(inside, default=(0, 0))
    return column, pointer - start


def _step(launch: Any, spans: Sequence[tuple[int, int]], calls: list[int]) -> _Step:
    """A launch of a call whose memory is at `spans`, as it is of others."""
    variant, programs, tensors, numbers = launch
    places = [_place_in(spans, tensor.data_ptr()) for tensor in tensors]
    words = map(_word, numbers, variant.numbers)
    row = [0, programs, *[offset for _, offset in places], *words]
    return _Step(variant, row, [column for column, _ in places], calls)


def _word(number: float, kind: str) -> int:
    """A number as a word of a row."""
    if kind == "tl.float32":
        return int(np.float32(number).view(np.int32))
    whole = int(number)
    return whole - (1 << 64) if whole >> 63 > 0 else whole


def _in_order(calls: list[list[_Step]]) -> list[list[_Step]]:
    """Launches that make all steps of calls in their order, those of several at a time."""
    launches = []
    left = [steps for steps in calls if steps]
    while left:
        variant = max(left, key=len)[0].variant
        launches.append([steps.pop(0) for steps in left if steps[0].variant is variant])
        left = [steps for steps in left if steps]
    return launches


def _rows(steps: list[_Step], at: Words) -> Words:
    """The rows of a launch that have programs; `at`: where the calls' memory is."""
    counts = [len(step.calls) for step in steps]
    calls = [call for step in steps for call in step.calls]
    rows: Words = np.array([step.row for step in steps], np.int64).repeat(counts, 0)
    columns = np.array([step.columns for step in steps], np.int64).repeat(counts, 0)
    rows[:, 2 : 2 + columns.shape[1]] += at[np.array(calls)[:, None], columns]
    return rows[rows[:, 1] > 0]


def _launch_all(
    launches: list[list[_Step]], at: Words, device: torch.device, kept: torch.Tensor | None
) -> None:
    """Put the rows of launches in a table on the device, and make them."""
    pieces: list[Any] = []
    merged = []
    for steps in launches:
        rows, variant = _rows(steps, at), steps[0].variant
        if len(rows):
            end = rows[:, 1].cumsum()
            rows[:, 0] = end - rows[:, 1]
            merged.append((_merged(variant, _kinds(variant, rows)), int(end[-1])))
            pieces += [rows.reshape(-1), *map_of(rows[:, 0], merged[-1][1])]
    if not merged:
        return
    # Each at a multiple of 16 bytes.
    padded = [np.pad(x, (0, -x.size % (16 // x.itemsize))).view(np.int64) for x in pieces]
    table = new_table(sum(x.size for x in padded), device)
    fill(table, np.concatenate(padded))
    starts = [8 * at for at in accumulate((x.size for x in padded), initial=0)]
    tensors = table, table, table, table if kept is None else kept
    for number, (variant, programs) in enumerate(merged):
        variant.launch(programs, tensors, offsets=(*starts[3 * number : 3 * number + 3], 0))


def _kinds(variant: Variant, rows: Words) -> tuple[int, ...]:
    """KINDS of rows. Where status words are is not asked: kernels have one form for all."""
    pointers = rows[:, 2 : 2 + len(variant.types)]
    even = (pointers % 16 == 0).all(0).tolist()
    kinds = [int((_BYTES if kind == tl.uint8 else _WORDS).value) for kind in variant.types]
    names = zip(variant.kernel.arg_names, even, strict=False)
    more = [2 if is_even and name != "status_ptr" else 0 for name, is_even in names]
    return *map(sum, zip(kinds, more, strict=False)), *map(_NUMBERS.__getitem__, variant.numbers)


@functools.cache
def _merged(variant: Variant, kinds: tuple[int, ...]) -> Variant:
    values = variant.values
    return Variant(
        merged_kernel,
        variant.options,
        BODY=variant.kernel,
        KINDS=kinds,
        VALUES=values if INTERPRETED else tuple(map(tl.constexpr, values)),
        HASHES=_hashes(values),
    )


def _hashes(values: tuple[Any, ...]) -> str:
    """Of functions among constexprs what they are: Triton's cache tells them by it, but not those
    in a tuple.
    """
    return " ".join(str(getattr(value, "cache_key", "")) for value in values)


class MergedFunctions(NamedTuple):
    """`encode_many` and `decode_many` of a codec; see `tightwire.gpu_many`."""

    encode_many: Callable[..., None]
    decode_many: Callable[..., None]


def merged_functions(encode: Callable[..., None], decode: Callable[..., None]) -> MergedFunctions:
    """Those of a codec by its `encode` and `decode`, which launch kernels with `member` alone."""

    def encode_many(plans, xs, outs, stats=None, key=None) -> None:
        work = Work(plans, xs[0].device)

        def call(plan, x, out, scratch, own, _) -> None:
            encode(plan, x.detach(), out, scratch, own, key)

        # Statistics of a wrong size are refused, whosever they are.
        sizes = None if stats is None else [own.numel() for own in stats]
        launch_merged(plans, (xs, outs, work, stats), call, alike=sizes, kept=work.whole)

    def decode_many(plans, srcs, outs, statuses, planned) -> None:
        work = Work(plans, outs[0].device)

        def call(plan, src, out, scratch, status, own) -> None:
            decode(plan, src, out, scratch, status, planned=own)

        options = {"statuses": statuses, "alike": planned, "kept": work.whole}
        launch_merged(plans, (srcs, outs, work), call, **options)

    return MergedFunctions(encode_many, decode_many)
