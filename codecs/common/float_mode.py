"""The floating-point mode that the library computes in, whatever mode its caller has set.

Codecs promise the same bytes everywhere. They need IEEE 754's default: subnormal numbers are kept,
results are rounded to nearest, ties to even, and no exception traps. A caller may have set another
mode, as by `torch.set_flush_denormal(True)`, by C's `fesetround`, or by loading a library that was
linked with `-ffast-math`. A mode belongs to a thread; a new thread has that of its creator.

The mode is changed by C's `fegetenv` and `fesetenv`, which glibc, musl and macOS have. Elsewhere,
on Windows too, only what NumPy does about exceptions is set, and results depend on the caller's
mode. On ARM, glibc's default leaves FPCR's bits AH, DN and AHP as they are.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

import numpy as np

#: At least as long as the environment of any platform, 8-byte aligned.
_Environment = ctypes.c_uint64 * 32
#: FE_DFL_ENV is the address of one of these where the C library has it, else -1 on Linux.
_DEFAULTS = ("_FE_DFL_ENV", "__fe_dfl_env")

Call = Callable[..., Any]


def _find_control() -> tuple[Call, Call, Any] | None:
    """`fegetenv`, `fesetenv` and FE_DFL_ENV; None where they cannot be called."""
    if sys.platform not in ("linux", "darwin"):
        return None
    for name in (None, "libm.so.6"):
        try:
            # Under the GIL: both are faster than letting it go.
            library = ctypes.PyDLL(name)
            get, put = library.fegetenv, library.fesetenv
        except (AttributeError, OSError):
            continue
        for symbol in _DEFAULTS:
            if hasattr(library, symbol):
                return get, put, ctypes.byref(ctypes.c_char.in_dll(library, symbol))
        if sys.platform == "linux":
            return get, put, ctypes.c_void_p(-1)
    return None


def _nothing(environment: Any) -> None:
    pass


_control = _find_control()
#: Whether the mode of a thread can be changed here.
CAN_CHANGE = _control is not None
_get, _put, _DEFAULT = _control or (_nothing, _nothing, None)


class default_floats(ContextDecorator):
    """Compute in the default mode; afterwards, also after an exception, in the one before.

    For the thread that enters it. NumPy does not warn or raise within. May be nested. As a
    decorator it does so for each call of a function.
    """

    def _recreate_cm(self) -> default_floats:
        return default_floats()

    def __enter__(self) -> None:
        before = _Environment()
        _get(before)
        _put(_DEFAULT)
        self._before = before
        self._numpy = np.errstate(all="ignore")
        self._numpy.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._numpy.__exit__(kind, error, traceback)
        _put(self._before)
