"""The Triton interpreter without what it does again and again: a quarter of the time."""

from __future__ import annotations

from typing import Any


def hasten() -> None:
    """Patch the interpreter of this process; kernels do, and may do, what they did before."""
    from triton.runtime import interpreter

    # What sums that overflow are checked by is an assertion that is made with debug=True alone.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    keep_types()
    patched, constants = patch_once(), keep_constants()
    call = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        constants.clear()
        try:
            return call(self, *args, **options)
        finally:
            patched.clear()
            constants.clear()

    interpreter.GridExecutor.__call__ = launch


def patch_once() -> dict[str, Any]:
    """Patch the language once for each module, and not for every call of a kernel's functions."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: dict[str, Any] = {}

    def kept(fn: Any) -> Any:
        if fn.__module__ not in patched:
            patched[fn.__module__] = patch(fn)
        return patched[fn.__module__]

    interpreter._patch_lang = kept
    return patched


def keep_types() -> None:
    """Types and shapes of values, of which there are few, are made once."""
    from triton.language import core
    from triton.runtime import interpreter

    np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def kept_np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(kind)
        return np_dtypes[name]

    block = core.block_type.__init__
    blocks: dict[Any, Any] = {}

    def kept_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(n, "value", n) for n in shape)
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key])

    tensor = core.tensor.__init__
    shapes: dict[Any, Any] = {}

    def kept_shape(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    interpreter._get_np_dtype = kept_np_dtype
    core.block_type.__init__ = kept_block
    core.tensor.__init__ = kept_shape


def keep_constants() -> dict[Any, Any]:
    """Operands of one type and shape are fit as they are; integers are spread out once a launch."""
    from triton.language import core, semantic

    fit = semantic.TritonSemantic.binary_op_type_checking_impl
    constants: dict[Any, Any] = {}

    def kept(
        self: Any,
        x: Any,
        y: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        key = None
        if type(x) is core.tensor and not x.dtype.is_ptr() and not div_or_mod:
            if type(y) is core.tensor and x.dtype is y.dtype and x.shape is y.shape:
                return x, y
            if type(y) is int:
                key = y, x.dtype.name, id(x.shape), arithmetic_check
                if key in constants:
                    return x, constants[key]
        found = fit(self, x, y, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if key is not None and found[0] is x:
            constants[key] = found[1]
        return found

    semantic.TritonSemantic.binary_op_type_checking_impl = kept
    return constants
