# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""How Triton kernels are compiled and launched."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from .compiling import announce

INTERPRETED = knobs.runtime.interpret
CUDA = torch.version.hip is None
#: Kernels may use PTX; else its portable twin.
PTX = CUDA and not INTERPRETED


_WIDE = (
    "sums_ptr",
    "status_ptr",
    "starts_ptr",
    "stats_ptr",
    "counts_ptr",
    "base_ptr",
    "key_ptr",
    "plan_ptr",
    "sources_ptr",
)


def kernel(fn):
    """`triton.jit` with one compiled form for all numbers: none is specialised on."""
    numbers = [name for name, kind in fn.__annotations__.items() if kind in _NUMBERS]
    return triton.jit(fn, do_not_specialize=numbers)


_NUMBERS = ("tl.int32", "tl.int64", "tl.uint64", "tl.float32")


class Variant:
    """A kernel with its constexpr values and launch options.

    Parameters of a kernel are pointers (to int64 where the name is in `_WIDE`, else to bytes), then
    numbers, then constexprs. From the second launch on the compiled form is called directly: what
    Triton does anew at every launch, binding and hashing of arguments, would cost more host time
    than all else in a call.
    """

    def __init__(self, kernel, options: dict[str, int | bool], **values: Any) -> None:
        names = list(kernel.arg_names)
        self._kernel = kernel
        self._keywords = values | options
        self._types = [tl.int64 if n in _WIDE else tl.uint8 for n in names if n.endswith("_ptr")]
        self._values = tuple(values[n] for n in names[len(names) - len(values) :])
        self._forms: dict[tuple[int | bool, ...], Any] = {}

    def launch(self, programs: int, tensors: tuple[torch.Tensor, ...], *numbers: float) -> None:
        """Run `programs` programs on torch's current stream and device."""
        pointers = [t.data_ptr() for t in tensors]
        # What a compiled form depends on: the device, and which pointers are multiples of 16.
        key = (tensors[0].get_device(), *[p & 15 == 0 for p in pointers])
        form = None if INTERPRETED else self._forms.get(key)
        if form is not None:
            form[(programs, 1, 1)](*pointers, *numbers, *self._values)
            return
        if not INTERPRETED:
            announce(self._kernel.__module__, "Triton's cache")
        views = [triton.reinterpret(t, k) for t, k in zip(tensors, self._types, strict=True)]
        self._forms[key] = self._kernel[(programs,)](*views, *numbers, **self._keywords)


def options(num_warps: int, maxnreg: int | None = None) -> dict[str, int | bool]:
    """Launch options. Products are never fused into sums: float bytes are part of the format."""
    chosen: dict[str, int | bool] = {"num_warps": num_warps, "enable_fp_fusion": False}
    if maxnreg is not None and CUDA:
        chosen["maxnreg"] = maxnreg
    return chosen
