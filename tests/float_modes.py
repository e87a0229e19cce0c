"""Floating-point modes other than the default one, for a while and on the calling thread."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tightwire.codecs.common.float_mode import CAN_CHANGE

#: Of fenv_t as 32-bit words: where the control bits are, those that flush subnormals (inputs as
#: well as results), those of the rounding mode, and FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO.
_LAYOUTS = {
    "x86_64": (7, 0x8040, 0x6000, (0x800, 0x400, 0xC00)),
    "aarch64": (0, 1 << 24, 3 << 22, (0x400000, 0x800000, 0xC00000)),
}
SUPPORTED = CAN_CHANGE and platform.machine() in _LAYOUTS and platform.system() == "Linux"
_ROUNDING = ("upward", "downward", "toward zero")
#: All of them; "raise" is what NumPy does about exceptions.
MODES = ("flush", *_ROUNDING, "raise")


def control() -> int:
    """The bits of this thread's mode: how it rounds, whether it flushes subnormals."""
    at, flush, rounding, _ = _LAYOUTS[platform.machine()]
    environment = (ctypes.c_uint32 * 64)()
    ctypes.CDLL("libm.so.6").fegetenv(environment)
    return int(environment[at]) & (flush | rounding)


@contextmanager
def mode(name: str) -> Iterator[None]:
    """Run the block in the mode `name`, one of MODES; assert that it still is that at the end."""
    libm = ctypes.CDLL("libm.so.6")
    at, flush, _, roundings = _LAYOUTS[platform.machine()]
    before = (ctypes.c_uint32 * 64)()
    libm.fegetenv(before)
    assert control() == 0
    numpy = np.geterr()
    try:
        if name == "flush":
            changed = (ctypes.c_uint32 * 64).from_buffer_copy(before)
            changed[at] |= flush
            libm.fesetenv(changed)
        elif name == "raise":
            np.seterr(all="raise")
        else:
            assert libm.fesetround(roundings[_ROUNDING.index(name)]) == 0
        here = control(), np.geterr()
        yield
        assert (control(), np.geterr()) == here
    finally:
        np.seterr(**numpy)
        libm.fesetenv(before)
