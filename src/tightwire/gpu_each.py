"""Buffers of a batch that take a call each where a GPU is, as no kernel takes them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import arrays, gpu
from .apart import Spans, check_apart, span_of, spans_of
from .arguments import need_no_base_in_batch, numbered, source_target
from .arrays import ArrayInfo
from .buffer import Buffer, parsed_source
from .codecs.common.base import Plan
from .decoding import decode
from .formats.errors import FormatError
from .gpu_arrays import _output, _place
from .planning import DEVICE_BACKEND


def check_each(
    numbers: Iterable[int],
    buffers: Sequence[Any],
    outs: Sequence[Any],
    *,
    max_nbytes: int | None,
    required: bool,
) -> tuple[list[int], dict[int, FormatError]]:
    """Numbers of the buffers that can be decoded, and what is wrong with headers of others.

    Raises TypeError or ValueError, with a number, if an argument does not fit. Nothing is decoded.
    """
    sound: list[int] = []
    failed: dict[int, FormatError] = {}
    for i in numbers:
        src, out = buffers[i], outs[i]
        try:
            plan = _plan_of(src, max_nbytes)
            need_no_base_in_batch(plan)
            if required:
                gpu._kernels(plan, True)
        except FormatError as error:
            failed[i] = error
            continue
        except (TypeError, ValueError) as error:
            raise numbered(error, f"buffers[{i}]") from None
        sound.append(i)
        if out is not None:
            _check_out(f"out[{i}]", out, plan, required)
        elif required:
            target = source_target(src)
            _place(target.library, target.device, f"the result of buffers[{i}]")
    return sound, failed


def decode_many(
    buffers: Sequence[Any],
    numbers: Sequence[int],
    out: Sequence[Any] | None,
    results: list[Any],
    *,
    max_nbytes: int | None,
    required: bool,
    **options: Any,
) -> dict[int, FormatError]:
    """As `tightwire.gpu_many.decode_many`, which needs Triton."""
    limits: dict[str, Any] = {"max_nbytes": max_nbytes, "required": required}
    sound, failed = check_each(numbers, buffers, results, **limits)
    written: dict[str, Spans] = {"out[{}]": spans_of(results)}
    written["scratch"] = [span_of(options["scratch"])]
    check_apart(written, {"buffers[{}]": spans_of(buffers)})
    return failed | decode_each(sound, buffers, results, **limits, **options)


def _plan_of(src: Any, max_nbytes: int | None) -> Plan:
    if isinstance(src, Buffer):
        return src.plan
    if arrays.on_gpu(src):
        return gpu.head(src).plan
    return parsed_source(src, max_nbytes).plan


def _check_out(name: str, out: Any, plan: Plan, required: bool) -> None:
    try:
        info: ArrayInfo = arrays.describe(out)
    except TypeError as error:
        raise numbered(error, name) from None
    place = _place(info.library, info.device, name if required else None)
    if place is None:
        arrays.writable_bits(out, plan.dtype, plan.shape, name)
    else:
        _output(out, info, plan.dtype, plan.shape, name, place)


def decode_each(
    numbers: Iterable[int],
    buffers: Sequence[Any],
    results: list[Any],
    *,
    required: bool,
    **options: Any,
) -> dict[int, FormatError]:
    """Decode buffers to `results`, arrays or None in their places; what is wrong with others."""
    failed: dict[int, FormatError] = {}
    backend = DEVICE_BACKEND if required else None
    for i in numbers:
        try:
            results[i] = decode(buffers[i], out=results[i], backend=backend, **options)
        except FormatError as error:
            failed[i] = error
        except ValueError as error:
            raise numbered(error, f"buffers[{i}]") from None
    return failed
