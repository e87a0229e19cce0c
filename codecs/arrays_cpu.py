# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What kernels do with arrays, in forms that compile fast.

Numba compiles `array.view`, `np.empty`, `min` and `max` as functions of their own, for each type of
argument anew, and slices on both sides of an assignment bring its code for strings along.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array


@intrinsic
def view_as(typingctx, array, dtype):
    """The elements of `array` (1-D, contiguous) as `dtype`, as `array.view(dtype)` has them.

    A last partial element is left out.
    """
    before = array
    after = array.copy(dtype=dtype.dtype)

    def codegen(context, builder, signature, args):
        old = make_array(before)(context, builder, args[0])
        new = make_array(after)(context, builder)
        size = context.get_abi_sizeof(context.get_data_type(after.dtype))
        old_size = context.get_abi_sizeof(context.get_data_type(before.dtype))
        intp = context.get_value_type(types.intp)
        (shape,) = cgutils.unpack_tuple(builder, old.shape)
        nbytes = builder.mul(shape, intp(old_size))
        count = builder.udiv(nbytes, intp(size))
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
        return impl_ret_borrowed(context, builder, after, args[0])

    return after(array), codegen
