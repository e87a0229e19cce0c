"""States of PyTorch objects as plain tensors, and back: what ``publish`` can send.

A state is a mapping of names to objects with ``state_dict()`` and ``load_state_dict()``, as
``torch.distributed.checkpoint`` takes them: modules, optimizers, schedulers, loaders.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

#: The tensor that has everything else of a state.
_REST = "rest"
#: What stands in place of a tensor: this, its name, and of a DTensor its shape and stride.
_TENSOR = "tightwire.tensor"


def tensors_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a state, by names, and one that has the rest.

    Args:
        state: Names to objects with ``state_dict()``.

    Returns:
        Names to tensors, which share the memory of the state's where it is contiguous. Of a
        DTensor it is this rank's shard.
    """
    found: dict[str, Any] = {}

    def take(x: Any, name: str) -> Any:
        mark: tuple[Any, ...] = (_TENSOR, name)
        if isinstance(x, DTensor):
            mark += (tuple(x.shape), x.stride())
            x = x.to_local()
        found[name] = x.detach().contiguous()
        return mark

    rest = {key: _mapped(one.state_dict(), key, take) for key, one in state.items()}
    stream = io.BytesIO()
    torch.save(rest, stream)
    found[_REST] = torch.from_numpy(np.frombuffer(bytearray(stream.getvalue()), np.uint8))
    return found


def load_tensors(state: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Have a state become what ``tensors_of`` gave elsewhere.

    Args:
        state: Names to objects with ``load_state_dict()``, of the same kinds; and sharded in the
            same way, where they have DTensors.
        tensors: The tensors.

    Raises:
        KeyError: If the state has other names.
        pickle.UnpicklingError: If a state has objects that ``torch.load`` takes for unsafe.
    """
    own = [x for one in state.values() for x in _leaves(one.state_dict()) if isinstance(x, DTensor)]

    def put(x: Any, name: str) -> Any:
        if len(x) == 2:
            return tensors[x[1]]
        like = next(d for d in own if tuple(d.shape) == x[2])
        place = like.device_mesh, like.placements
        return DTensor.from_local(tensors[x[1]], *place, shape=torch.Size(x[2]), stride=x[3])

    data = tensors[_REST].numpy().tobytes()
    rest = torch.load(io.BytesIO(data), weights_only=True)
    for key, one in state.items():
        one.load_state_dict(_mapped(rest[key], key, put))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, tuple) and x[:1] == (_TENSOR,))


def _mapped(x: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """A nested state with other tensors."""
    if _is_tensor(x):
        return change(x, name)
    if isinstance(x, Mapping):
        return {key: _mapped(value, f"{name}.{key}", change) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_mapped(value, f"{name}.{i}", change) for i, value in enumerate(x))
    return x


def _leaves(x: Any) -> Iterator[Any]:
    """The tensors of a nested state."""
    found: list[Any] = []
    _mapped(x, "", lambda tensor, _: found.append(tensor))
    return iter(found)
