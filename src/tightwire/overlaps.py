"""Arrays of a state that have a part of their memory in common, such as views of one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import arrays
from .formats.dtypes import DType
from .patches import Patch
from .state_tensors import ArrayState, digest, memory_key


def overlapping(state: ArrayState) -> list[list[str]]:
    """Groups of names of arrays that overlap in memory.

    Names of one tensor count once, of which one is written to.
    """
    first: dict[Any, str] = {}
    for name in state.names:
        first.setdefault(memory_key(state, name), name)
    ranges = [(arrays.memory_range(state.arrays[name]), name) for name in first.values()]
    groups: list[list[str]] = []
    device, end = "", 0
    for place, name in sorted((place, name) for place, name in ranges if place is not None):
        if place[0] != device or place[1] >= end:
            groups.append([])
            end = 0
        groups[-1].append(name)
        device, end = place[0], max(end, place[2])
    return [group for group in groups if len(group) > 1]


def check_overlaps(
    state: ArrayState,
    groups: Sequence[Sequence[str]],
    patches: Mapping[str, tuple[Any, DType | str, Patch]],
    wanted: Mapping[str, str],
) -> None:
    """Refuse patches after which arrays that overlap would not have the digests `wanted`.

    `groups` are as `overlapping` gives them. Arrays on a GPU are not looked at. Raises ValueError.
    """
    for group in groups:
        names = [name for name in group if name in wanted]
        if patches.keys().isdisjoint(names):
            continue
        views = _copied(state, names)
        for name in patches.keys() & views.keys():
            patch = patches[name][2]
            if patch.places is None:
                views[name][...] = patch.values.reshape(views[name].shape)
            else:
                views[name].flat[patch.places] = patch.values
        for name, view in views.items():
            if digest(view) != wanted[name]:
                detail = f"{name!r} shares memory with others of {sorted(names)}"
                raise ValueError(f"{detail}, and the version has two values there")


def _copied(state: ArrayState, names: list[str]) -> dict[str, Any]:
    """Bits of arrays on the host, in memory where they overlap as these do; none if that fails."""
    hosts: dict[str, Any] = {}
    for name in names:
        x, dtype = state.arrays[name], state.kind(name)[0]
        if arrays.on_gpu(x) or not isinstance(dtype, DType):
            return {}
        host = arrays.host_array(x)
        if not host.dtype.isnative or arrays.memory_range(host) != arrays.memory_range(x):
            # Bytes are swapped, or PyTorch conjugates lazily.
            return {}
        hosts[name] = host.view(dtype.bits)
    places = {name: arrays.memory_range(x) for name, x in hosts.items()}
    known = [place for place in places.values() if place is not None]
    start = min(place[1] for place in known)
    memory = np.zeros(max(place[2] for place in known) - start, np.uint8)
    views: dict[str, Any] = {}
    for name, x in hosts.items():
        at = x.__array_interface__["data"][0] - start
        views[name] = np.ndarray(x.shape, x.dtype, memory, at, x.strides)
        views[name][...] = x
    return views
