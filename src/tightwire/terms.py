"""The terms of a sum: which are buffers, and whether they fit one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import arrays
from .apart import Spans, check_apart, span_of, spans_of
from .arguments import ADDED, check_out, need_float, need_no_base, numbered
from .buffer import Buffer
from .codecs.common.base import Plan
from .engine import Parsed
from .formats.dtypes import BY_NAME
from .formats.errors import FormatError

_UINT8 = BY_NAME["uint8"]


def split(terms: Sequence[Any]) -> tuple[list[int], int | None]:
    """Numbers of the buffers, at least one, and of the tensor, if there is one."""
    tensors = []
    for i, x in enumerate(terms):
        with of_term(i, False):
            if _is_tensor(x):
                tensors.append(i)
    buffers = [i for i in range(len(terms)) if i not in tensors]
    if not buffers or len(tensors) > 1:
        raise ValueError(
            f"terms are {len(buffers)} buffers and {len(tensors)} tensors; allowed: at least one "
            "buffer, at most one tensor"
        )
    return buffers, tensors[0] if tensors else None


def _is_tensor(x: Any) -> bool:
    if isinstance(x, (Buffer, Parsed)):
        return False
    if arrays.is_array(x) and not arrays.is_bytes(x):
        return arrays.describe(x).dtype != _UINT8
    arrays.bytes_view(x, "bytes, a Buffer or a uint8 array")
    return False


@contextmanager
def of_term(number: int, several: bool) -> Iterator[None]:
    """Errors within are of term `number`; FormatErrors say so if there are `several` buffers."""
    try:
        yield
    except FormatError as error:
        raise (error.of_buffer(number) if several else error) from None
    except (TypeError, ValueError) as error:
        raise numbered(error, f"terms[{number}]") from None


def check_plans(numbers: Sequence[int], plans: Sequence[Plan]) -> None:
    """Raise TypeError or ValueError unless buffers of these plans, terms by number, add up."""
    first = plans[0]
    need_float(first.dtype, "the buffer")
    for number, plan in zip(numbers, plans, strict=True):
        if plan is first and number != numbers[0]:
            continue
        need_no_base(plan.codec, "sums", "decode it by itself")
        if _alike(plan) != _alike(first):
            raise ValueError(
                f"terms[{number}] is {_text(plan)}; needed: {_text(first)}, as terms[{numbers[0]}]"
            )


def _alike(plan: Plan) -> tuple[Any, ...]:
    """What is equal in all buffers of a sum."""
    return plan.codec, plan.dtype, plan.shape, plan.chunks


def _text(plan: Plan) -> str:
    return f"{plan.codec} of {plan.dtype.name}{list(plan.shape)} in {plan.chunks} chunks"


def check_decoded_apart(terms: Sequence[Any], out: Any, scratch: Any) -> None:
    """ValueError if the sum that is decoded to `out`, or `scratch`, overlaps a term."""
    if out is not None or scratch is not None:
        written: dict[str, Spans] = {"out": [span_of(out)], "scratch": [span_of(scratch)]}
        check_apart(written, {"terms[{}]": spans_of(terms)})


def check_encoded_apart(
    plan: Plan, terms: Sequence[Any], tensor: Any, out: Any, stats: Any, scratch: Any
) -> None:
    """As `check_decoded_apart`, of a sum that is encoded: `out` may be memory of buffers."""
    check_out(plan, out, {ADDED: tensor, "stats": stats}, scratch)
    if scratch is not None:
        check_apart({"scratch": [span_of(scratch)]}, {"terms[{}]": spans_of(terms)})
