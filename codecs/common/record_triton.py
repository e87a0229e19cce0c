# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Calls of GPU modules recorded: what they launch, to be launched again with the same arguments.

As of a CUDA graph the memory is fixed: that of the caller, and what the call has allocated, which
the record keeps. Tables that the host makes (`frame_triton.fill`) are written when it is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .launch_triton import is_recording, recorded_by

_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty)
_ZEROS = (_aten.zeros, _aten.zeros_like, _aten.new_zeros)

Step = Callable[[], object]


def record(call: Callable[[], object]) -> tuple[Step, ...]:
    """What `call` does on the device, in its order; each step waits for nothing and makes it anew.

    Nothing of it is done here but the writing of tables, by torch's current stream.

    Raises:
        ValueError: If the call waits for the device.
    """
    recorder = _Recorder()
    # What it allocates is written to wherever it is launched.
    with torch.inference_mode(False), recorded_by(recorder.launch), recorder:
        call()
    return tuple(recorder.steps)


class _Recorder(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Takes launches, and PyTorch's own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def launch(self, variant, programs, tensors, numbers) -> None:
        self.steps.append(variant.prepared(programs, tensors, numbers))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if not is_recording():
            return func(*args, **kwargs)
        if func.overloadpacket is _aten._local_scalar_dense:
            raise ValueError("a call that waits for the device cannot be prepared")
        if func._schema.is_mutable:
            self.steps.append(functools.partial(func, *args, **kwargs))
            return kwargs.get("out", args[0])
        found = func(*args, **kwargs)
        kind = func.overloadpacket
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        # What comes from the host is a table.
        is_table = kind is _aten._to_copy and args[0].device.type != found.device.type
        if not (is_view or is_table or kind in _EMPTY):
            self.steps.append(_again(func, args, kwargs, found))
        return found


def _again(func, args, kwargs, found) -> Step:
    """What writes the result of an operation to where it is."""
    kind = func.overloadpacket
    if kind in _ZEROS:
        return functools.partial(found.zero_)
    if kind is _aten.full:
        return functools.partial(found.fill_, args[1])
    if kind is _aten._to_copy:
        return functools.partial(found.copy_, args[0])
    if kind is _aten.cat:
        return functools.partial(torch.cat, *args, **kwargs, out=found)

    def copy() -> None:
        found.copy_(func(*args, **kwargs))

    return copy
