"""The Triton interpreter without what it does again and again to no effect: a third of the time."""

from __future__ import annotations

from typing import Any


def hasten() -> None:
    """Patch the interpreter of this process; results stay as they are."""
    from triton.language import core
    from triton.runtime import interpreter

    # Sums are checked for overflow by an assertion that is made with debug=True alone.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options

    # Else the language is patched for every call of one kernel function in another, and not undone.
    call, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: dict[str, Any] = {}

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        try:
            return call(self, *args, **options)
        finally:
            patched.clear()

    def patch_once(fn: Any) -> Any:
        if fn.__module__ not in patched:
            patched[fn.__module__] = patch(fn)
        return patched[fn.__module__]

    interpreter.GridExecutor.__call__ = launch
    interpreter._patch_lang = patch_once

    # Types and shapes are made anew for every value, though there are few.
    np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def np_dtype_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(kind)
        return np_dtypes[name]

    interpreter._get_np_dtype = np_dtype_once

    make_block, blocks = core.block_type.__init__, {}

    def block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(n, "value", n) for n in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key])

    core.block_type.__init__ = block_once

    make_tensor, shapes = core.tensor.__init__, {}

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core.tensor.__init__ = tensor_once
