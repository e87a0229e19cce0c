"""New values for some elements of an array, found before the first of them is written."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import arrays
from .codecs.common.base import Bits
from .formats.dtypes import BY_NAME, DType
from .loading import described

#: A patch lists places where fewer than one in so many elements is new.
SPARSE = 8
#: Elements that are compared at a time: few enough for a cache.
_BLOCK = 1 << 16
#: PyTorch's integers by size, for elements that are moved and not looked at.
_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Patch(NamedTuple):
    """Elements that are new: where, as flat indices, and their bits. Without places: all."""

    places: npt.NDArray[np.int64] | None
    values: Bits

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes + (0 if self.places is None else self.places.nbytes)


def patch_of(old: Bits, new: Bits) -> Patch | None:
    """What makes `new` of `old`, bits of shape (n,); None if they are equal. `new` may be kept."""
    parts, count = [], 0
    for start in range(0, new.size, _BLOCK):
        places = _differing(old[start : start + _BLOCK], new[start : start + _BLOCK])
        count += places.size
        if count * SPARSE > new.size:
            return Patch(None, new)
        parts.append(places + start)
    if not count:
        return None
    places = np.concatenate(parts)
    return Patch(places, new[places])


def _differing(old: Bits, new: Bits) -> npt.NDArray[np.int64]:
    if old.dtype.kind == "V":
        # Elements of more than 8 bytes: NumPy compares their halves.
        pairs = (old.view("<u8") != new.view("<u8")).reshape(old.size, -1)
        return np.flatnonzero(pairs.any(axis=1))
    return np.flatnonzero(old != new)


def check_writable(x: Any, what: str) -> None:
    """Refuse an array that cannot be written to. Raises TypeError or ValueError."""
    described(x.view(sys.modules["torch"].uint8) if arrays.is_float4(x) else x, what)


def write_patch(x: Any, dtype: DType | str, patch: Patch) -> None:
    """Write to an array of NumPy, PyTorch or CuPy, which `check_writable` has allowed."""
    if not isinstance(dtype, DType):
        # Pairs of 4-bit floats.
        x, dtype = x.view(sys.modules["torch"].uint8), BY_NAME["uint8"]
    library = arrays.library_of(x)
    if library == "torch" and _write_words(x, dtype, patch):
        return
    memory = host_memory(x, dtype)
    if memory is not None:
        arrays.mark_written(x)
        _put(memory, patch)
        return
    bits = arrays.host_bits(x, dtype).copy()
    _put(bits, patch)
    value = arrays.from_bits(bits, dtype, tuple(x.shape), arrays.Target("numpy"))
    if library == "torch":
        x.copy_(arrays.from_bits(bits, dtype, tuple(x.shape), arrays.Target("torch")))
    elif library == "cupy":
        x.set(value)
    else:
        np.copyto(arrays.host_array(x), value, casting="equiv")


def host_memory(x: Any, dtype: DType) -> Bits | None:
    """The memory of an array on the host as bits, shape (n,); None where they do not lie so."""
    if arrays.on_gpu(x):
        return None
    host = arrays.host_array(x)
    if not (host.flags.c_contiguous and host.flags.aligned and host.dtype.isnative):
        return None
    return host.reshape(-1).view(dtype.bits)


def _put(bits: Bits, patch: Patch) -> None:
    if patch.places is None:
        bits[:] = patch.values
    else:
        bits[patch.places] = patch.values


def _write_words(x: Any, dtype: DType, patch: Patch) -> bool:
    """Write to a tensor on a GPU where it is. False for tensors that this cannot be done with."""
    if not x.is_cuda or patch.places is None or dtype.itemsize not in _WORDS:
        return False
    if not x.is_contiguous():
        return False
    torch = sys.modules["torch"]
    words = getattr(torch, _WORDS[dtype.itemsize])
    values = torch.from_numpy(patch.values.view(np.uint8)).view(words)
    flat = x.detach().view(-1).view(words)
    flat[torch.from_numpy(patch.places).to(x.device)] = values.to(x.device)
    return True


def writing(values: list[Any]) -> AbstractContextManager[Any]:
    """The mode of PyTorch in which these arrays, which may be tensors of it, are written to."""
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    if any(x.is_inference() for x in tensors):
        mode: AbstractContextManager[Any] = torch.inference_mode()
        return mode
    mode = torch.no_grad()
    return mode
