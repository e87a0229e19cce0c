"""Decode compressed files into existing memory: arrays by name, and the tensors of a module."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import arrays, engine
from .arguments import thread_count
from .arrays import ArrayInfo
from .codecs.common.base import Bits
from .contents import Contents, decode_all, naming
from .engine import DEFAULT_MAX_NBYTES
from .formats.container import Entry
from .formats.dtypes import BY_SAFETENSORS, DType
from .formats.errors import integer
from .planning import device_files
from .shards import opened

#: Names that an error lists.
_LISTED = 5


class IncompatibleKeys(NamedTuple):
    """Names that do not match, as ``load_into`` returns them.

    Attributes:
        missing_keys: Names that only the module has.
        unexpected_keys: Names that only the files have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_into(
    model: Any,
    path: Any,
    *,
    strict: bool = True,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> IncompatibleKeys:
    """Load parameters and persistent buffers of a ``torch.nn.Module`` in place.

    Tensors may have another dtype than the file, and each its own device. Contiguous ones of the
    file's dtype are decoded into without a second copy. Hooks of ``load_state_dict`` do not run. A
    name that the files lack counts as present if its memory is that of another name that they have
    (tied weights).

    Args:
        model: The module, whose names are those of ``model.state_dict()``.
        path: As in ``tightwire.load``: a file or a directory.
        strict: Whether names must match.
        max_nbytes: Most bytes that one tensor of the files may have. The default is 64 GiB.
        threads: Most threads; None: every processor.

    Returns:
        The names that do not match; both lists are empty if ``strict``.

    Raises:
        RuntimeError: If names (with ``strict``) or shapes do not match. Names, shapes and headers
            of all files are checked before anything is written.
        FormatError: If a file is damaged. The tensors are then undefined, as after the next two.
        OSError: If a file cannot be read.
        torch.OutOfMemoryError: If a GPU has too little memory.
        TypeError: If ``model`` is not a module, or a name of its state is not a tensor of it.
        ValueError: If a tensor cannot be written to, such as one on the meta device.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    state = state_of(model)
    with opened(path) as files, torch.no_grad():
        found = {name for contents in files for name in contents.names()}
        memories = {name: x is not None and arrays.memory_of(x) for name, x in state.items()}
        loaded = {memory for name, memory in memories.items() if memory and name in found}
        missing = [n for n in state if n not in found and memories[n] not in loaded]
        keys = IncompatibleKeys(missing, sorted(found - state.keys()))
        kind = type(model).__name__
        if strict and any(keys):
            lines = [
                f"{what}: {_listed(names)}"
                for what, names in zip(("missing", "unexpected"), keys, strict=True)
                if names
            ]
            raise RuntimeError(f"{path} does not match {kind}: {'; '.join(lines)}")
        try:
            fill(files, {n: x for n, x in state.items() if n in found}, kind, max_nbytes, threads)
        except _Mismatch as error:
            raise RuntimeError(f"{path} does not match {kind}: {error}") from None
    return keys


def state_of(model: Any) -> dict[str, Any]:
    """Parameters and persistent buffers by their names in the state_dict; None for other state."""
    own = {id(x) for x in (*model.parameters(), *model.buffers())}
    state: dict[str, Any] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if not isinstance(x, sys.modules["torch"].Tensor):
            state[name] = None
        elif id(x) not in own:
            raise TypeError(
                f"{name!r} of the state_dict is neither a parameter nor a buffer: a hook made it. "
                "Allowed: model.load_state_dict(tightwire.load_file(...))"
            )
        elif x.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, which has no memory. Allowed: after "
                "model.to_empty(device=...)"
            )
        else:
            state[name] = x
    return state


def load_files(
    files: Sequence[Contents],
    like: Any,
    out: Mapping[str, Any] | None,
    max_nbytes: int,
    threads: int | None,
) -> dict[str, Any]:
    """The tensors of files, which hold each name once, by all names; see `tightwire.load_file`."""
    if out is not None:
        if like is not None:
            raise ValueError("like and out are given; allowed: one of them")
        return _load_out(files, out, max_nbytes, threads)
    like = "numpy" if like is None else like
    target = arrays.target_of(like)
    gpu_files = device_files() if target.device is not None else None
    if isinstance(gpu_files, ModuleType):
        loaded = gpu_files.load_files(files, target, max_nbytes)
    else:
        loaded = []
        for contents in files:
            with naming(contents.reader.name) if len(files) > 1 else nullcontext():
                loaded.append(decode_all(contents, like, max_nbytes, threads))
    return {name: x for tensors in loaded for name, x in tensors.items()}


def _load_out(
    files: Sequence[Contents], out: Mapping[str, Any], max_nbytes: int, threads: int | None
) -> dict[str, Any]:
    if not isinstance(out, Mapping):
        raise TypeError(f"out is a {type(out).__name__}; allowed: names to arrays")
    names = [name for contents in files for name in contents.names()]
    held = set(names)
    problems = []
    if lacking := [name for name in names if name not in out]:
        problems.append(f"out lacks {_listed(lacking)}")
    if left := [name for name in out if name not in held]:
        problems.append(f"the file lacks {_listed(left)}")
    if problems:
        raise ValueError(f"names do not match: {'; '.join(problems)}")
    try:
        fill(files, out, "out", max_nbytes, threads)
    except _Mismatch as error:
        raise ValueError(str(error)) from None
    return {name: out[name] for name in names}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_LISTED]))
    more = len(names) - _LISTED
    return shown if more <= 0 else f"{shown} and {more} more"


class _Mismatch(ValueError):
    """An array of another shape than the tensor in the file."""


class _Goal(NamedTuple):
    """An array that a tensor of a file goes to. `entry` is that of the tensor."""

    contents: Contents
    entry: Entry
    array: Any
    info: ArrayInfo
    #: What arrays of one memory have in common, None if it is not known.
    memory: Any
    #: True for PyTorch's pairs of 4-bit floats, whose `info` is that of their bytes.
    pairs: bool
    what: str

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape."""
        if shape != self.info.shape:
            ours, theirs = list(self.info.shape), list(shape)
            raise _Mismatch(f"{self.what} has shape {ours}, the tensor in the file {theirs}")


def fill(
    files: Sequence[Contents],
    out: Mapping[str, Any],
    what: str,
    max_nbytes: int,
    threads: int | None,
) -> None:
    """Decode the tensors whose names `out` has into its arrays, which errors call `what`.

    Headers, names and shapes are checked before anything is written. Raises as `load_file` does.
    """
    max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    count = thread_count(threads)
    host: list[_Goal] = []
    gpus: dict[tuple[str, Any], list[_Goal]] = {}
    for goal in _goals(files, out, what):
        device = None if goal.contents.is_plain(goal.entry) else _gpu_of(goal.info)
        goals = host if device is None else gpus.setdefault((goal.info.library, device), [])
        goals.append(goal)
    tasks = [_on_host(goal, max_nbytes, count) for goal in host]
    for (library, device), goals in gpus.items():
        tasks += [_on_gpu(round_, library, device, max_nbytes) for round_ in _rounds(goals)]
    with _inference([*host, *(goal for goals in gpus.values() for goal in goals)]):
        for task in tasks:
            task()


def _inference(goals: Sequence[_Goal]) -> AbstractContextManager[Any]:
    """Inference mode where tensors need it to be written to; others may be written in it too."""
    if any(goal.info.library == "torch" and goal.array.is_inference() for goal in goals):
        return sys.modules["torch"].inference_mode()  # type: ignore[no-any-return]
    return nullcontext()


def _goals(files: Sequence[Contents], out: Mapping[str, Any], what: str) -> Iterator[_Goal]:
    """Every array of `out` once for each tensor that goes there, its shape not checked."""
    for contents in files:
        seen: set[Any] = set()
        for name in contents.names():
            if name not in out:
                continue
            x, label = out[name], f"{what}[{name!r}]"
            pairs = arrays.is_float4(x)
            info = described(x.view(sys.modules["torch"].uint8) if pairs else x, label)
            goal = _Goal(contents, contents.entry(name), x, info, arrays.memory_of(x), pairs, label)
            _check_kind(goal)
            key = goal.entry.name, goal.memory
            if goal.memory is None or key not in seen:
                seen.add(key)
                yield goal


def described(x: Any, what: str) -> ArrayInfo:
    """What an array is that can be written to. Raises TypeError or ValueError."""
    try:
        info = arrays.describe(x)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    arrays.check_writable(x, info, info.dtype, info.shape, what)
    if info.library == "numpy" and not arrays.host_array(x).flags.writeable:
        raise ValueError(f"{what} is read-only")
    if info.library in ("numpy", "torch") and _overlaps(x, info):
        raise ValueError(f"{what} has several elements in one place; allowed: x.contiguous()")
    return info


def _overlaps(x: Any, info: ArrayInfo) -> bool:
    """True if elements of an array may share memory, as in windows that slide over it."""
    if math.prod(info.shape) == 0:
        return False
    if info.library == "torch":
        unit, steps = 1, x.stride()
    else:
        host = arrays.host_array(x)
        unit, steps = host.itemsize, host.strides
    reach = unit
    for step, size in sorted((abs(step), n) for step, n in zip(steps, info.shape, strict=True)):
        if size > 1:
            if step < reach:
                return True
            reach += step * (size - 1)
    return False


def _gpu_of(info: ArrayInfo) -> Any:
    """The torch.device whose kernels decode to such an array, None for the host."""
    if info.device is None:
        return None
    gpu_files = device_files()
    return gpu_files.place_of(info) if isinstance(gpu_files, ModuleType) else None


def _on_host(goal: _Goal, max_nbytes: int, threads: int) -> Callable[[], None]:
    """Check the head of one tensor and its array's shape; what then decodes it."""
    contents, name = goal.contents, goal.entry.name
    with naming(contents.reader.name):
        head = contents.head(name, max_nbytes)
    if head is not None:
        goal.check_shape(head.plan.shape)
    else:
        goal.check_shape(_plain_shape(goal))

    def decode() -> None:
        memory = None if head is None else _memory(goal, head.plan.dtype)
        with naming(contents.reader.name):
            if head is None or memory is None:
                library = "torch" if goal.info.library == "torch" else "numpy"
                _copy(goal, contents.tensor(name, head, library, threads))
                return
            arrays.mark_written(goal.array)
            with naming(f"tensor {name!r}"):
                engine.decode_range(contents.parsed(name, head), memory, 0, threads=threads)

    return decode


def _memory(goal: _Goal, dtype: DType) -> Bits | None:
    """Memory of the host that elements can be decoded straight into, None if there is none."""
    if goal.info.device is not None or goal.info.dtype != dtype:
        return None
    host = arrays.host_array(goal.array)
    if not (host.flags.c_contiguous and host.flags.aligned and host.dtype.isnative):
        return None
    return host.reshape(-1).view(dtype.bits)


def _copy(goal: _Goal, value: Any) -> None:
    """Copy an array of the host to the goal's, converting elements as PyTorch's `copy_` does."""
    if goal.pairs or arrays.is_float4(value):
        byte = sys.modules["torch"].uint8
        goal.array.view(byte).copy_(value.view(byte).reshape(goal.info.shape))
    elif goal.info.library == "torch":
        goal.array.copy_(value)
    elif goal.info.library == "cupy":
        import cupy

        with cupy.cuda.Device(goal.info.device.id):
            cupy.copyto(goal.array, cupy.asarray(value), casting="unsafe")
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(arrays.host_array(goal.array), value, casting="unsafe")


def _plain_shape(goal: _Goal) -> tuple[int, ...]:
    """The shape that an array must have for a tensor that is stored plain.

    Elements of less than a byte go to uint8 of one dimension; F4 also to PyTorch's pairs.
    """
    entry = goal.entry
    if entry.dtype in BY_SAFETENSORS:
        return entry.shape
    if goal.pairs and entry.dtype == "F4" and entry.shape[-1:] != ():
        return (*entry.shape[:-1], entry.shape[-1] // 2)
    return (entry.nbytes,)


def _check_kind(goal: _Goal) -> None:
    """Refuse conversions to and from elements of less than a byte. Raises TypeError."""
    dtype = goal.entry.dtype
    whole = dtype in BY_SAFETENSORS or not goal.contents.is_plain(goal.entry)
    if (goal.pairs and dtype != "F4") or not (
        whole or goal.pairs or goal.info.dtype.name == "uint8"
    ):
        kind = "float4_e2m1fn_x2" if goal.pairs else goal.info.dtype.name
        raise TypeError(f"{goal.what} is {kind}, which {dtype} is not converted to or from")


def _rounds(goals: Sequence[_Goal]) -> list[list[_Goal]]:
    """Groups that are decoded at the same time: in each, no tensor and no memory occurs twice."""
    rounds: list[list[_Goal]] = []
    following: dict[Any, int] = {}
    for goal in goals:
        tensor = id(goal.contents), goal.entry.name
        number = max(following.get(tensor, 0), following.get(goal.memory, 0))
        following[tensor] = number + 1
        if goal.memory is not None:
            following[goal.memory] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(goal)
    return rounds


def _on_gpu(
    goals: Sequence[_Goal], library: str, device: Any, max_nbytes: int
) -> Callable[[], None]:
    """Check heads and shapes of tensors for one GPU; what then decodes them in one pipeline."""
    gpu_files: Any = device_files()
    by_file: dict[int, list[_Goal]] = {}
    for goal in goals:
        by_file.setdefault(id(goal.contents), []).append(goal)
    heads, ordered = [], []
    for group in by_file.values():
        group.sort(key=lambda goal: goal.entry.begin)
        part = gpu_files.Part(group[0].contents, [goal.entry for goal in group])
        head = gpu_files.read_heads(part, max_nbytes)
        for goal, plan in zip(group, head.plans, strict=True):
            goal.check_shape(plan.shape)
        heads.append(head)
        ordered += group

    def decode() -> None:
        for goal in ordered:
            arrays.mark_written(goal.array)
        outs = [(goal.array, goal.info) for goal in ordered]
        gpu_files.load_into(heads, outs, library, device)

    return decode
