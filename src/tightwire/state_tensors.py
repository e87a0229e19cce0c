"""Tensors of a state wherever they are: names to arrays, modules, files, directories of models."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import arrays
from .codecs.common.base import Bits, Bytes
from .contents import naming_call
from .file_tensors import FileTensors, Kind, Tensors, file_tensors
from .formats.container import check_names
from .formats.dtypes import DType
from .lazy import File
from .loading import state_of
from .planning import backend_module
from .shards import model_shards
from .storage import is_path

#: Bytes for which loading Numba does not pay.
_SMALL = 1 << 16
#: Names that an error lists.
_LISTED = 3


class State(Tensors, Protocol):
    """What can be saved, and be what a delta is against."""

    def memory(self, name: str) -> Hashable:
        """What is equal for names of one tensor (tied weights); None if that is not known."""


class ArrayState:
    """Arrays of NumPy, PyTorch, CuPy and JAX by name.

    Raises TypeError for anything else, ValueError for names that are not allowed.
    """

    def __init__(self, tensors: Mapping[str, Any], label: str = "tensors") -> None:
        self.label = label
        self.arrays = dict(tensors)
        check_names(self.arrays)
        self._kinds: dict[str, Kind] = {}
        self._memories: dict[str, Hashable] = {}
        for name, x in self.arrays.items():
            with naming_call(f"{label}[{name!r}]"):
                if arrays.is_float4(x):
                    self._kinds[name] = "F4", (*x.shape[:-1], 2 * x.shape[-1])
                else:
                    info = arrays.describe(x)
                    self._kinds[name] = info.dtype, info.shape

    @property
    def names(self) -> list[str]:
        """See `Tensors`."""
        return list(self.arrays)

    def kind(self, name: str) -> Kind:
        """See `Tensors`."""
        return self._kinds[name]

    def bits(self, name: str, threads: int | None = None) -> Any:
        """See `Tensors`."""
        x, dtype = self.arrays[name], self._kinds[name][0]
        if not isinstance(dtype, DType):
            return arrays.float4_bytes(x)
        return arrays.host_bits(x, dtype)

    def memory(self, name: str) -> Hashable:
        """See `State`."""
        if name not in self._memories:
            self._memories[name] = arrays.memory_of(self.arrays[name])
        return self._memories[name]


class FilesState:
    """The tensors of files, which hold each name once. Raises ValueError for a name in two."""

    def __init__(self, label: str, files: Sequence[FileTensors]) -> None:
        self.label = label
        self._homes: dict[str, FileTensors] = {}
        for tensors in files:
            for name in tensors.names:
                other = self._homes.setdefault(name, tensors)
                if other is not tensors:
                    raise ValueError(f"{name!r} is in {other.label} and in {tensors.label}")

    @property
    def names(self) -> list[str]:
        """See `Tensors`."""
        return list(self._homes)

    def kind(self, name: str) -> Kind:
        """See `Tensors`."""
        return self._homes[name].kind(name)

    def bits(self, name: str, threads: int | None = None) -> Any:
        """See `Tensors`."""
        return self._homes[name].bits(name, threads)

    def memory(self, name: str) -> Hashable:
        """See `State`."""
        home = self._homes[name]
        stored = name if home.contents is None else home.contents.entry(name).name
        return home.label, stored


@contextmanager
def opened_state(source: Any, what: str, max_nbytes: int) -> Iterator[State]:
    """The tensors of `source`, which errors call `what`.

    It may be names to arrays, a module, an open `File`, or the path of a safetensors file or of a
    model's directory, compressed or not.

    Raises FormatError, OSError, TypeError or ValueError.
    """
    with ExitStack() as files:
        if isinstance(source, File):
            source.check_open()
            yield ArrayState({name: x.load() for name, x in source.items()}, what)
        elif isinstance(source, Mapping):
            yield ArrayState(source, what)
        elif is_module(source):
            yield ArrayState(state_of(source), what)
        elif is_path(source):
            folder = os.path.isdir(source)
            paths = model_shards(Path(source)) if folder else [source]
            found = [files.enter_context(file_tensors(path, max_nbytes)) for path in paths]
            yield FilesState(os.fsdecode(source), found)
        else:
            kind = type(source).__name__
            raise TypeError(
                f"{what} is a {kind}; allowed: names to arrays, a torch.nn.Module, the path of a "
                "safetensors file or of a directory of them"
            )


@contextmanager
def opened_target(target: Any, max_nbytes: int) -> Iterator[ArrayState]:
    """The tensors of `target`, names to arrays or a module, which are to be written to.

    Raises TypeError for anything else.
    """
    if not is_module(target) and not isinstance(target, Mapping):
        kind = type(target).__name__
        raise TypeError(f"target is a {kind}; allowed: names to arrays, a torch.nn.Module")
    with opened_state(target, "target", max_nbytes) as state:
        if not isinstance(state, ArrayState):
            raise TypeError("target is an open File; allowed: names to arrays, a torch.nn.Module")
        yield state


def is_module(x: Any) -> bool:
    """True for a module of PyTorch, which is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Module)


def nbytes_of(state: State, name: str) -> int:
    """Bytes of a tensor."""
    dtype, shape = state.kind(name)
    itemsize = dtype.itemsize if isinstance(dtype, DType) else 1
    return int(np.prod(shape, dtype=np.int64)) * itemsize


def bytes_of(state: State, name: str) -> Bytes:
    """The bytes of a tensor, shape (n,), made by one thread."""
    data: Bytes = np.ascontiguousarray(state.bits(name, 1)).reshape(-1).view(np.uint8)
    return data


def digests_of(state: State, threads: int) -> dict[str, str]:
    """The digest of every tensor by name."""
    first: dict[Any, str] = {}
    for name in state.names:
        first.setdefault(memory_key(state, name), name)
    # Here, as kernels go to the stream of the calling thread.
    found = _digests_on_gpu(state, list(first.values()))
    names = [name for name in first.values() if name not in found]
    with ThreadPoolExecutor(threads) as executor:
        made = executor.map(lambda n: digest(state.bits(n, 1)), names)
        found.update(zip(names, made, strict=True))
    return {name: found[first[memory_key(state, name)]] for name in state.names}


def _digests_on_gpu(state: State, names: Sequence[str]) -> dict[str, str]:
    """The digests of those tensors that are on a GPU, found there."""
    if not isinstance(state, ArrayState):
        return {}
    there = {
        name: state.arrays[name]
        for name in names
        if arrays.on_gpu(state.arrays[name]) and isinstance(state.kind(name)[0], DType)
    }
    return dict(zip(there, digests_on_gpu([*there.values()]), strict=True))


def digests_on_gpu(tensors: Sequence[Any]) -> list[str]:
    """As `digest`, of arrays on GPUs. The host waits once for each device and library."""
    if not tensors:
        return []
    from .gpu_together import digests

    return [f"{value:016x}" for value in digests(tensors)]


def memory_key(state: State, name: str) -> Any:
    """What names of one tensor have in common."""
    memory = state.memory(name)
    return name if memory is None else (memory, state.kind(name))


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    """Which names have not the same digest, in words."""
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    shown = ", ".join(map(repr, names[:_LISTED]))
    more = len(names) - _LISTED
    verb = "differs" if len(names) == 1 else "differ"
    return f"{shown} {verb}" if more <= 0 else f"{shown} and {more} more {verb}"


def digest(bits: Bits | Bytes) -> str:
    """Digest of a tensor, 16 hexadecimal digits: that of specs/delta.md of its bytes."""
    module = backend_module("delta", None if bits.nbytes > _SMALL else "ref")
    data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    return f"{module.digest_of(data):016x}"
