"""Element types: wire ids, sizes, bit fields and the names other formats use (specs/buffer.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class DType:
    """One element type. `exponent` and `mantissa` are field widths in bits, 0 for non-floats.

    There is one instance per type, so identity is equality.
    """

    id: int
    name: str
    itemsize: int
    safetensors: str | None
    exponent: int = 0
    mantissa: int = 0

    @cached_property
    def bits(self) -> np.dtype[Any]:
        """Dtype of one element's bits: an unsigned integer, or plain bytes beyond 64 bits."""
        return np.dtype(f"<u{self.itemsize}" if self.itemsize <= 8 else f"V{self.itemsize}")

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; bfloat16 and the 8-bit floats come from ml_dtypes."""
        if self.name in _ML_DTYPES:
            import ml_dtypes

            dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
            return dtype
        return np.dtype(self.name)

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        return dtype_named, (self.name,)

    @property
    def is_float(self) -> bool:
        """True for signed floats whose bits are sign, exponent, mantissa from the top."""
        return self.exponent > 0


_ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

DTYPES = (
    DType(1, "bool", 1, "BOOL"),
    DType(2, "uint8", 1, "U8"),
    DType(3, "int8", 1, "I8"),
    DType(4, "uint16", 2, "U16"),
    DType(5, "int16", 2, "I16"),
    DType(6, "uint32", 4, "U32"),
    DType(7, "int32", 4, "I32"),
    DType(8, "uint64", 8, "U64"),
    DType(9, "int64", 8, "I64"),
    DType(16, "float16", 2, "F16", 5, 10),
    DType(17, "bfloat16", 2, "BF16", 8, 7),
    DType(18, "float32", 4, "F32", 8, 23),
    DType(19, "float64", 8, "F64", 11, 52),
    DType(20, "float8_e4m3fn", 1, "F8_E4M3", 4, 3),
    DType(21, "float8_e5m2", 1, "F8_E5M2", 5, 2),
    DType(22, "float8_e4m3fnuz", 1, "F8_E4M3FNUZ", 4, 3),
    DType(23, "float8_e5m2fnuz", 1, "F8_E5M2FNUZ", 5, 2),
    DType(24, "float8_e8m0fnu", 1, "F8_E8M0"),
    DType(32, "complex64", 8, "C64"),
    DType(33, "complex128", 16, None),
)

BY_ID = {d.id: d for d in DTYPES}
BY_NAME = {d.name: d for d in DTYPES}
BY_SAFETENSORS = {d.safetensors: d for d in DTYPES if d.safetensors}


def dtype_named(name: str) -> DType:
    """The `DType` called `name` (NumPy's spelling); TypeError lists what is allowed."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise TypeError(
            f"dtype {name!r} is not supported; supported: {', '.join(BY_NAME)}"
        ) from None
