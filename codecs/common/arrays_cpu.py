# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What kernels do with arrays, in forms that compile fast.

Numba compiles `array.view`, `np.empty`, `min` and `max` as functions of their own, for each type of
argument anew, and slices on both sides of an assignment bring its code for strings along. What
intrinsics need of Numba is imported when something is compiled: kernels are loaded without it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

_LINE = 64


def with_scratch(kernel: Callable[..., Any], nbytes: int) -> Callable[..., Any]:
    """`kernel` with `nbytes` of memory, from the start of a line of the cache, as first argument.

    A kernel that allocates counts references: code that takes as long to compile as the rest. Each
    thread keeps the memory, as no kernel calls another.
    """

    @functools.wraps(kernel)
    def call(*args: Any) -> Any:
        space = _this_thread.spaces.get(nbytes)
        return kernel(_new_space(nbytes) if space is None else space, *args)

    return call


class _ThisThread(threading.local):
    """Memory that kernels work in, by its size."""

    def __init__(self) -> None:
        self.spaces: dict[int, npt.NDArray[np.uint8]] = {}


_this_thread = _ThisThread()


def _new_space(nbytes: int) -> npt.NDArray[np.uint8]:
    memory = np.empty(nbytes + _LINE, np.uint8)
    start = -memory.__array_interface__["data"][0] % _LINE
    space = _this_thread.spaces[nbytes] = memory[start : start + nbytes]
    return space


def as_read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view that is not written to: kernels are compiled for one kind of what they read."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


@intrinsic
def view_as(typingctx, array, dtype):
    """The elements of `array` (1-D, contiguous) as `dtype`, as `array.view(dtype)` has them.

    A last partial element is left out.
    """
    if not isinstance(array, types.Array) or array.ndim != 1 or array.layout != "C":
        return None
    before = array
    after = array.copy(dtype=dtype.dtype)

    def codegen(context, builder, signature, args):
        from numba.core import cgutils
        from numba.core.imputils import impl_ret_borrowed
        from numba.np.arrayobj import make_array, populate_array

        old = make_array(before)(context, builder, args[0])
        new = make_array(after)(context, builder)
        intp = context.get_value_type(types.intp)
        size, old_size = after.dtype.bitwidth // 8, before.dtype.bitwidth // 8
        (shape,) = cgutils.unpack_tuple(builder, old.shape)
        count = builder.udiv(builder.mul(shape, intp(old_size)), intp(size))
        populate_array(
            new,
            data=builder.bitcast(old.data, new.data.type),
            shape=[count],
            strides=[intp(size)],
            itemsize=intp(size),
            meminfo=old.meminfo,
        )
        return impl_ret_borrowed(context, builder, after, new._getvalue())

    return after(array, dtype), codegen


@intrinsic
def read_only(typingctx, array):
    """`array` in the type of arrays that are not written to."""
    after = array.copy(readonly=True)

    def codegen(context, builder, signature, args):
        from numba.core.imputils import impl_ret_borrowed

        return impl_ret_borrowed(context, builder, after, args[0])

    return after(array), codegen
