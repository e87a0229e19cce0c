# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""How Triton kernels are compiled and launched."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    "work_ptr",
)


def kernel(fn):
    """`triton.jit` with one compiled form for all numbers: none is specialised on.

    Kernels that merged_triton launches have a last parameter, `member=None`, and ask `program` and
    `programs` which program they are.
    """
    numbers = [name for name, kind in fn.__annotations__.items() if kind in _NUMBERS]
    return triton.jit(fn, do_not_specialize=numbers)


_NUMBERS = ("tl.int32", "tl.int64", "tl.uint64", "tl.float32")


@triton.jit
def program(member):
    """The number of this program in its call; `member`: that and `programs` of a call of many."""
    if member is None:
        return tl.program_id(0)
    else:
        return member[0]


@triton.jit
def programs(member):
    """How many programs a call has; see `program`."""
    if member is None:
        return tl.num_programs(0)
    else:
        return member[1]


class _ThisThread(threading.local):
    """`record(variant, programs, tensors, numbers)` takes launches instead of the device."""

    record: Callable[..., None] | None = None


_this_thread = _ThisThread()


@contextmanager
def recorded_by(record: Callable[..., None] | None) -> Iterator[None]:
    """Within, in this thread, launches are not made but given to `record`; None: they are made."""
    before = _this_thread.record
    _this_thread.record = record
    try:
        yield
    finally:
        _this_thread.record = before


def is_recording() -> bool:
    """Whether launches of this thread are recorded."""
    return _this_thread.record is not None


class _Form(NamedTuple):
    """A compiled kernel on a device, as it is launched: what `CompiledKernel` would look up."""

    run: Callable[..., None]
    function: Any
    metadata: Any


def _watched() -> bool:
    """Whether somebody, such as a profiler, has asked Triton to tell of launches."""
    runtime = knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Triton has None or a function there, or a chain of functions.
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


class Variant:
    """A kernel with its constexpr values and launch options.

    Parameters of a kernel are pointers (to int64 where the name is in `_WIDE`, else to bytes), then
    numbers, then constexprs. From the second launch on the compiled form is called directly: what
    Triton does anew at every launch, binding and hashing of arguments, would cost more host time
    than all else in a call.

    Attributes:
        kernel, options: What it was made of.
        types: What the pointers point to.
        numbers: Annotations of the numbers.
        values: The constexprs.
    """

    def __init__(self, kernel, options: dict[str, int | bool], **values: Any) -> None:
        names = [name for name in kernel.arg_names if name != "member"]
        self.kernel, self.options = kernel, options
        self.types = [tl.int64 if n in _WIDE else tl.uint8 for n in names if n.endswith("_ptr")]
        self.values = tuple(values[n] for n in names[len(names) - len(values) :])
        between = names[len(self.types) : len(names) - len(values)]
        self.numbers = [kernel.fn.__annotations__.get(name) for name in between]
        self._keywords = values | options
        # `member` is None.
        self._values = (*self.values, *[None] * (len(kernel.arg_names) - len(names)))
        self._forms: dict[Any, _Form] = {}

    def launch(
        self,
        programs: int,
        tensors: Sequence[torch.Tensor],
        *numbers: float,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """Run `programs` programs on torch's current stream and device.

        `offsets` are added to the addresses of `tensors`, in bytes; where they are not 0 these are
        1-D.
        """
        if _this_thread.record is not None:
            _this_thread.record(self, programs, _behind(tensors, offsets), numbers)
            return
        pointers = [t.data_ptr() for t in tensors]
        if offsets is not None:
            pointers = list(map(operator.add, pointers, offsets))
        device = tensors[0].get_device()
        key = _key_of(device, pointers)
        form = self._forms.get(key)
        if form is None or _watched():
            self._launch(key, programs, _behind(tensors, offsets), numbers)
            return
        run, function, metadata = form
        stream = torch._C._cuda_getCurrentRawStream(device)
        # fmt: off
        run(
            programs, 1, 1, stream, function, metadata, None, None, None,
            *pointers, *numbers, *self._values,
        )
        # fmt: on

    def _launch(
        self,
        key: Any,
        programs: int,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        warmup: bool = False,
    ) -> None:
        """As `launch`, by Triton, which compiles the kernel if it has not yet; a `warmup` is no
        more than that.
        """
        if not (INTERPRETED or key in self._forms):
            announce(self.kernel.__module__, "Triton's cache")
        views = [triton.reinterpret(t, k) for t, k in zip(tensors, self.types, strict=True)]
        if warmup:
            form = self.kernel.warmup(*views, *numbers, grid=(programs,), **self._keywords)
        else:
            form = self.kernel[(programs,)](*views, *numbers, **self._keywords)
        # Triton gives none if a hook has kept it from launching.
        if not INTERPRETED and form is not None:
            self._forms[key] = _Form(form.run, form.function, form.packed_metadata)

    def prepared(
        self, programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[float]
    ) -> Callable[[], None]:
        """What launches the kernel with these arguments, which it keeps, on the current stream.

        The kernel is compiled and loaded, so that a captured graph can have the launch.
        """
        pointers = [t.data_ptr() for t in tensors]
        device = tensors[0].get_device()
        key = _key_of(device, pointers)
        if INTERPRETED:
            return functools.partial(self._launch, key, programs, tensors, numbers)
        if key not in self._forms:
            self._launch(key, programs, tensors, numbers, warmup=True)
        run, function, metadata = self._forms[key]
        hooks = None, None, None
        rest = function, metadata, *hooks, *pointers, *numbers, *self._values
        kept = tuple(tensors)

        def launch() -> None:
            if _watched():
                self._launch(key, programs, kept, numbers)
            else:
                run(programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), *rest)

        return launch


def _key_of(device: int, pointers: Sequence[int]) -> Any:
    """What a compiled form depends on: the device, and which pointers are multiples of 16."""
    if functools.reduce(operator.or_, pointers) & 15:
        return (device, *[p & 15 == 0 for p in pointers])
    return device


def _behind(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int] | None
) -> Sequence[torch.Tensor]:
    """Tensors from so many bytes on."""
    if offsets is None:
        return tensors
    return [t.view(torch.uint8)[at:] if at else t for t, at in zip(tensors, offsets, strict=True)]


def options(num_warps: int, maxnreg: int | None = None) -> dict[str, int | bool]:
    """Launch options. Products are never fused into sums: float bytes are part of the format."""
    chosen: dict[str, int | bool] = {"num_warps": num_warps, "enable_fp_fusion": False}
    if maxnreg is not None and CUDA:
        chosen["maxnreg"] = maxnreg
    return chosen
