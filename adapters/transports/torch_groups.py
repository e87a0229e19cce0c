"""Process groups of torch.distributed: their parts, and how ranks connect or compare facts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...planning import integer
from . import aborting

#: What rank 0 has to tell the others that somebody did not come.
_GRACE = timedelta(seconds=5)


def check_node(node: int, rank: int, size: int, purpose: str) -> None:
    """Raise for nodes that the ranks of a group do not fill.

    Args:
        node: Ranks of a node.
        rank: Number of this rank in the group.
        size: Ranks of the group.
        purpose: How the error calls what nodes are for.

    Raises:
        TypeError: If ``node`` is not an integer.
        ValueError: If nodes would be uneven.
    """
    if integer("node", node) < 1 or size % node:
        raise ValueError(
            f"node is {node}; rank {rank} is in a group of {size} ranks, {purpose}; allowed: a "
            f"divisor of {size}, as nodes have equally many ranks"
        )


def member_of(group: Any, device: Any) -> tuple[Any, torch.device]:
    """The process group, and the device of its tensors.

    Args:
        group: A process group; None: the default one.
        device: A device; None: with NCCL this process's current GPU, else the host.

    Raises:
        ValueError: If there is no such group, or this process is not in it.
    """
    found = dist.group.WORLD if group is None else group
    if found is None or found == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("no process group, or this process is not in it")
    if found not in dist.distributed_c10d._world.pg_map:
        raise ValueError("the process group has been destroyed")
    if device is None:
        on_gpu = dist.get_backend(found) == "nccl"
        device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return found, device


def need_connection(group: Any, device: torch.device) -> None:
    """Check that the ranks of a group can be connected once more.

    Args:
        group: The process group.
        device: A device that it serves.

    Raises:
        TypeError: If its backend is not one of ``CONNECT``.
    """
    kind = backend_of(group, device).name()
    if kind not in CONNECT:
        raise TypeError(f"group has the backend {kind!r}; allowed: {sorted(CONNECT)}")


def backend_of(group: Any, device: torch.device) -> Any:
    """What a group moves tensors of a device by; TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.

    Args:
        group: The process group.
        device: A device that it serves.

    Returns:
        The backend, such as a ``ProcessGroupGloo``.

    Raises:
        RuntimeError: If the group has none for the device.
    """
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def timeout_of(group: Any, device: torch.device) -> float:
    """Seconds after which calls of a group on a device give up: as ``TorchDist`` without a timeout.

    Args:
        group: The process group; None: the default one.
        device: The device.

    Returns:
        The seconds.

    Raises:
        RuntimeError: If the group has no backend for the device.
    """
    given = dist.group.WORLD if group is None else group
    return asked_timeout(given, device, None).total_seconds()


def asked_timeout(group: Any, device: torch.device, asked: float | None) -> timedelta:
    """How long calls of a transport over a group wait.

    Args:
        group: The process group.
        device: A device that it serves.
        asked: Seconds; None: the group's own timeout, or if that was not given the default group's.

    Raises:
        ValueError: If it is not above 0.
        RuntimeError: If the group has no backend for the device.
    """
    if asked is not None:
        if not asked > 0:
            raise ValueError(f"timeout is {asked}; allowed: seconds above 0, or None")
        return timedelta(seconds=asked)
    own, is_default = _timeout_of(group, device)
    if not is_default:
        return own
    world = dist.group.WORLD
    devices = [d for d in world._device_types if d.type == device.type] or world._device_types
    inherited, is_default = _timeout_of(world, devices[0])
    return own if is_default else inherited


def _timeout_of(group: Any, device: torch.device) -> tuple[timedelta, bool]:
    """The timeout of a group's backend, and whether it is what PyTorch takes if none is given."""
    backend = backend_of(group, device)
    found: timedelta = backend.options._timeout
    return found, found == dist.distributed_c10d._get_default_timeout(backend.name())


def store_of(group: Any) -> Any:
    """The key-value store by which a group's ranks have met; every group has keys of its own.

    Args:
        group: The process group.

    Returns:
        The store.

    Raises:
        KeyError: If there is no such group.
    """
    return dist.PrefixStore("tightwire", dist.distributed_c10d._get_process_group_store(group))


#: Of the groups that have been met.
_failures: weakref.WeakKeyDictionary[Any, aborting.Failures] = weakref.WeakKeyDictionary()
_meeting = threading.Lock()


def failures_of(group: Any) -> aborting.Failures:
    """What the ranks of a process group say of their failures. All of them ask, at least once.

    Args:
        group: The process group.

    Returns:
        The same at every call.

    Raises:
        KeyError: If there is no such group.
    """
    with _meeting:
        found = _failures.get(group)
        if found is None:
            found = _failures[group] = aborting.Failures(store_of(group), group.rank())
        return found


def disagreement(store: Any, rank: int, size: int, facts: str, timeout: timedelta) -> str:
    """Compare what ranks say by a store, before they have connections.

    Args:
        store: A store of these ranks, with keys of its own for this comparison.
        rank: Number of this rank.
        size: Number of ranks.
        facts: What this rank says.
        timeout: How long ranks wait for one another.

    Returns:
        What is wrong if ranks differ or do not come, the same on all of them; else "".

    Raises:
        RuntimeError: If the store does not answer.
    """
    store.set(f"facts/{rank}", facts)
    late = f"rank 0 has not come in {timeout.total_seconds():g} s"
    if rank != 0:
        # Rank 0 may come when this rank gives up: who is first to say so decides.
        in_time = _told(store, ["facts/0"], timeout)
        if not in_time and store.compare_set("first", "", "late") == b"late":
            return late
        # It waits as long for the others.
        if _told(store, ["verdict"], timeout + _GRACE):
            return str(store.get("verdict").decode())
        return late
    keys = [f"facts/{r}" for r in range(size)]
    if store.compare_set("first", "", "in time") == b"late":
        problem = "rank 0 has not come in time, other ranks have given up"
    elif _told(store, keys, timeout):
        said = [store.get(key).decode() for key in keys]
        groups = {text: [r for r in range(size) if said[r] == text] for text in said}
        differ = "; ".join(f"ranks {ranks}: {text}" for text, ranks in groups.items())
        problem = f"ranks differ: {differ}" if len(groups) > 1 else ""
    else:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        problem = f"ranks {missing} have not come in {timeout.total_seconds():g} s"
    store.set("verdict", problem)
    return problem


def _told(store: Any, keys: list[str], timeout: timedelta) -> bool:
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        # Stores differ in what they raise when time is up.
        return bool(store.check(keys))
    return True


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


#: How to connect the ranks of a group once more, by backend. Not `dist.new_group()`, which wants
#: all ranks of the default group, or (`use_local_synchronization`) ranks that have made equally
#: many groups before, and with NCCL splits the default group, which its other ranks have to join.
CONNECT: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}
