# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Reads and writes of memory at any address, for kernels that know their bounds.

One instruction each, where indices and slices of arrays take many to compile.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic


def _pointer(context, builder, signature, array, at, kind):
    """A pointer to a number of a type, at byte `at` of an array."""
    from numba.np.arrayobj import make_array

    data = make_array(signature.args[0])(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), context.get_value_type(kind).as_pointer())


def _loads(kind):
    @intrinsic
    def load(typingctx, array, at):
        def codegen(context, builder, signature, args):
            return builder.load(
                _pointer(context, builder, signature, args[0], args[1], kind), align=1
            )

        return kind(array, types.int64), codegen

    return load


def _stores(kind):
    @intrinsic
    def store(typingctx, array, at, value):
        def codegen(context, builder, signature, args):
            builder.store(
                args[2], _pointer(context, builder, signature, args[0], args[1], kind), align=1
            )
            return context.get_dummy_value()

        return types.void(array, types.int64, kind), codegen

    return store


# A number from byte `at` of an array on. Nothing is checked.
load2, load8 = _loads(types.uint16), _loads(types.uint64)
store4, store8 = _stores(types.uint32), _stores(types.uint64)


@intrinsic
def copy_bytes(typingctx, target, to, source, start, n):
    """Copy `n` bytes, at least 0, between arrays that do not overlap. Nothing is checked."""

    def codegen(context, builder, signature, args):
        from numba.core.cgutils import raw_memcpy
        from numba.np.arrayobj import make_array

        kinds = signature.args
        places = [
            builder.gep(make_array(kinds[i])(context, builder, args[i]).data, [args[i + 1]])
            for i in (0, 2)
        ]
        raw_memcpy(builder, *places, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), codegen


@intrinsic
def fill_bytes(typingctx, target, to, n, value):
    """Write `n` bytes, at least 0, of one value (uint8). Nothing is checked."""

    def codegen(context, builder, signature, args):
        from numba.core.cgutils import memset
        from numba.np.arrayobj import make_array

        data = make_array(signature.args[0])(context, builder, args[0]).data
        memset(builder, builder.gep(data, [args[1]]), args[2], args[3])
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64, types.uint8), codegen


@intrinsic
def item(typingctx, array, at):
    """The item number `at` of an array. Unlike `array[at]`, nothing is added to a negative one."""

    def codegen(context, builder, signature, args):
        from numba.np.arrayobj import make_array

        data = make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return array.dtype(array, types.int64), codegen


@intrinsic
def leading_zeros(typingctx, word):
    """How many of the highest bits of a word are 0."""

    def codegen(context, builder, signature, args):
        from numba.core.cgutils import ir

        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen
