"""A backend of torchcomms that compresses large calls of another backend of it.

Importing this module registers the backend ``"tightwire"``; torchcomms does so itself where the
package is installed, by an entry point of ``torchcomms.backends``:

    import torchcomms

    hints = {"tightwire::backend": "ncclx", "tightwire::policy": "lossless"}
    comm = torchcomms.new_comm("tightwire", device, "main", hints=hints)

Which calls are compressed, and how, is as in a process group: see ``process_group``. All others go
to the other backend. The interface is that of torchcomms in August 2026. **This has not been run
with torchcomms itself**, only with a module of the same interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..transports.aborting import own_store
from ..transports.base import Transport
from . import group_calls, process_group
from .compressed_calls import CompressedCalls, Compressing, compare_policies, connect
from .group_calls import GroupCall
from .policy import Policy
from .torch_backend import NAME

try:
    from torchcomms import TorchCommBackend, new_comm, register_backend
except ImportError as error:
    raise ImportError(
        "the backend of torchcomms needs torchcomms with register_backend; the package of that "
        "name on PyPI may be a placeholder: install it as "
        f"https://github.com/meta-pytorch/torchcomms says ({error})"
    ) from error

__all__ = ["TightwireBackend"]

#: Of the names of hints that are not for the other backend.
_PREFIX = f"{NAME}::"
#: Backends that are wrapped if no hint names one, by type of device.
_USUAL = {"cpu": "gloo", "cuda": "nccl"}
#: Reductions that a communicator has, by their names in torchcomms.
_REDUCTIONS = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG}


def _native(name: str) -> Any:
    """The method `name`, which the other backend makes."""

    def method(self: TightwireBackend, *args: Any) -> Any:
        work = getattr(self._comm, name)(*args)
        # For torchcomms a work in Python is under way until it is waited for.
        return work if args[-1] else None

    method.__name__ = name
    return method


def _compressible(name: str, describe: Callable[..., GroupCall | None]) -> Any:
    """The method `name`, which makes calls that `describe` and the policy allow."""
    native = _native(name)

    def method(self: TightwireBackend, *args: Any) -> Any:
        *given, asynchronous = args
        work = self._compressed(describe(*given))
        if work is None:
            return native(self, *args)
        if asynchronous:
            return work
        work.wait()
        return None

    method.__name__ = name
    return method


def _all_reduce(tensor: Any, op: Any) -> GroupCall | None:
    return _reduced(group_calls.all_reduce, dist.AllreduceOptions, op, [tensor])


def _reduce_scatter(output: Any, tensors: Any, op: Any) -> GroupCall | None:
    call = group_calls.reduce_scatter_list
    return _reduced(call, dist.ReduceScatterOptions, op, [output], [tensors])


def _reduce_scatter_single(output: Any, x: Any, op: Any) -> GroupCall | None:
    return _reduced(group_calls.reduce_scatter, dist.ReduceScatterOptions, op, output, x)


def _reduced(
    call: Callable[..., GroupCall | None], kind: Any, op: Any, *tensors: Any
) -> GroupCall | None:
    """A call that sums, with the options that ``torch.distributed`` would give to it."""
    if op.type.name not in _REDUCTIONS:
        return None
    options = kind()
    options.reduceOp = _REDUCTIONS[op.type.name]
    return call(*tensors, options)


def _broadcast(tensor: Any, root: int) -> GroupCall | None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group_calls.broadcast([tensor], options)


def _all_gather(outputs: Any, tensor: Any) -> GroupCall | None:
    return group_calls.all_gather_list([outputs], [tensor])


def _all_to_all_v(
    output: Any, x: Any, out_splits: Sequence[int], in_splits: Sequence[int]
) -> GroupCall | None:
    # Rows behind the last split belong to nobody.
    if sum(out_splits) != len(output) or sum(in_splits) != len(x):
        output, x = output[: sum(out_splits)], x[: sum(in_splits)]
    return group_calls.all_to_all(output, x, out_splits, in_splits)


class TightwireBackend(Compressing, TorchCommBackend):  # type: ignore[misc]
    """What ``get_backend_impl()`` of a communicator of the backend ``"tightwire"`` returns.

    torchcomms makes it, and calls ``init``. Compressed calls have connections of their own, over
    gloo on the CPU and NCCL on a GPU, which ``torch`` must have been built with; see
    ``process_group.TightwireGroup``.

    Raises:
        CollectiveError: By calls and by ``wait()``, if anything goes wrong on the wire of a
            compressed call.
    """

    def init(self, device: Any, name: str, options: Any) -> None:
        """Connect the ranks by the other backend; all of them do so together.

        Args:
            device: The device of all tensors: the CPU or a GPU.
            name: Name of the communicator, which patterns in ``groups`` of a rule are for.
            options: What ``torchcomms.new_comm`` was given. Of its hints ``"tightwire::backend"``
                names the other backend (default: gloo on the CPU, NCCL on a GPU), and
                ``"tightwire::policy"`` is a text as ``Policy.parse`` takes it (default:
                ``process_group.policy()``). The other backend gets the other hints.

        Raises:
            CollectiveError: On all ranks, if their policies differ.
            TypeError: If a value in the policy has a wrong type.
            ValueError: If the device, a hint or a value in the policy is not allowed.
        """
        where = torch.device(device)
        if where.type not in _USUAL:
            raise ValueError(f"device is {where}; allowed: {sorted(_USUAL)}")
        own, hints = _hints(options, ("backend", "policy"))
        found = Policy.parse(own["policy"]) if "policy" in own else process_group.policy()
        comm = new_comm(
            own.get("backend", _USUAL[where.type]),
            where,
            f"{name}/wrapped",
            abort_process_on_timeout_or_error=options.abort_process_on_timeout_or_error,
            timeout=options.timeout,
            store=options.store,
            hints=hints,
        )
        store = options.store
        if store is None:
            store = _new_store(comm, where, options.timeout)
        self._start(comm, name, found, dist.PrefixStore(f"{NAME}/{name}", store), options.timeout)

    def _start(self, comm: Any, name: str, policy: Policy, store: Any, timeout: timedelta) -> None:
        self._comm, self._name, self._timeout = comm, name, timeout
        self._store = own_store(store, comm.get_rank())
        self._calls = CompressedCalls(policy, comm.get_rank())
        #: How many parts have been made: their stores have names of their own.
        self._splits = 0
        try:
            compare_policies(policy, self._store, comm.get_rank(), comm.get_size(), timeout)
        except BaseException:
            comm.finalize()
            raise

    def finalize(self) -> None:
        """End all connections, once the compressed calls under way are over."""
        self._calls.close()
        self._comm.finalize()

    def get_rank(self) -> int:
        """Number of this rank."""
        return int(self._comm.get_rank())

    def get_size(self) -> int:
        """Number of ranks."""
        return int(self._comm.get_size())

    def get_backend_name(self) -> str:
        """Always ``"tightwire"``."""
        return NAME

    def get_comm_name(self) -> str:
        """The name that the communicator was given."""
        return self._name

    def split(self, ranks: Sequence[int], name: str, options: Any) -> TightwireBackend | None:
        """Make a communicator of some ranks; all ranks call this, each with the ranks of its part.

        Args:
            ranks: Numbers of the ranks of the part. Empty: this rank is in none.
            name: Name of the part.
            options: What ``split`` was given. A part has the policy of the whole, or that of the
                hint ``"tightwire::policy"``; the other backend gets the other hints.

        Returns:
            The part's backend; None if ``ranks`` is empty.

        Raises:
            CollectiveError: On all ranks of the part, if their policies differ.
            RuntimeError: If this rank is not among ``ranks``.
            TypeError: If a value in the policy has a wrong type.
            ValueError: If a hint or a value in the policy is not allowed.
        """
        own, hints = _hints(options, ("policy",))
        found = Policy.parse(own["policy"]) if "policy" in own else self.policy
        comm = self._comm.split(list(ranks), name, hints=hints, timeout=options.timeout)
        self._splits += 1
        if comm is None:
            return None
        store = dist.PrefixStore(f"part {self._splits}: {list(ranks)}", self._store)
        part = type(self)()
        part._start(comm, name, found, store, options.timeout)
        return part

    all_reduce = _compressible("all_reduce", _all_reduce)
    reduce_scatter = _compressible("reduce_scatter", _reduce_scatter)
    reduce_scatter_single = _compressible("reduce_scatter_single", _reduce_scatter_single)
    all_gather = _compressible("all_gather", _all_gather)
    all_gather_single = _compressible("all_gather_single", group_calls.all_gather)
    all_to_all_single = _compressible("all_to_all_single", group_calls.all_to_all)
    all_to_all_v_single = _compressible("all_to_all_v_single", _all_to_all_v)
    broadcast = _compressible("broadcast", _broadcast)

    send = _native("send")
    recv = _native("recv")
    reduce = _native("reduce")
    reduce_scatter_v = _native("reduce_scatter_v")
    all_gather_v = _native("all_gather_v")
    all_to_all = _native("all_to_all")
    scatter = _native("scatter")
    gather = _native("gather")
    barrier = _native("barrier")

    def _compressed(self, call: GroupCall | None) -> Any:
        """The work of a call that the policy has compressed; None for other calls."""
        if call is None or self._comm.get_size() == 1:
            return None
        if call.device.type != self._comm.get_device().type:
            return None
        return self._calls.begin(call, self._name, self._connect)

    def _connect(self, device: torch.device, number: int) -> Transport:
        place = self._store, self._comm.get_rank(), self._comm.get_size()
        return connect(*place, self._timeout.total_seconds(), device, number, self._name)


def _hints(options: Any, allowed: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """The hints for this backend, without the prefix of their names, and those for the other."""
    own, other = {}, {}
    for name, value in options.hints.items():
        if name.startswith(_PREFIX):
            own[name.removeprefix(_PREFIX)] = value
        else:
            other[name] = value
    if unknown := sorted(set(own) - set(allowed)):
        names = [_PREFIX + name for name in allowed]
        raise ValueError(f"hints have {_PREFIX + unknown[0]!r}; allowed of this prefix: {names}")
    return own, other


def _new_store(comm: Any, device: torch.device, timeout: timedelta) -> Any:
    """A store of a communicator's ranks, on a port of its own, which rank 0 tells the others.

    The port of the environment is only for the time in which backends of torchcomms connect. As
    for these, rank 0 is at ``MASTER_ADDR``.
    """
    host = os.environ["MASTER_ADDR"]
    port = torch.zeros(1, dtype=torch.int64, device=device)
    if comm.get_rank() == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        comm.broadcast(port.fill_(store.port), 0, False).wait()
        return store
    comm.broadcast(port, 0, False).wait()
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


register_backend(NAME, TightwireBackend)
