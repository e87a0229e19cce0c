"""A ``torch.distributed`` backend that compresses large calls of gloo and NCCL.

Importing this module registers the backend ``"tightwire"``:

    import torch.distributed as dist
    import tightwire.adapters.collectives.process_group

    dist.init_process_group("tightwire")

A policy says which calls are compressed; all others go to gloo (tensors on the CPU) and NCCL (on a
GPU) as they are. The default policy is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from ..transports.aborting import own_store
from ..transports.base import Transport
from ..transports.torch_groups import timeout_of
from . import group_calls
from .compressed_calls import CompressedCalls, Compressing, compare_policies, connect
from .group_calls import GroupCall
from .policy import Policy, Rule
from .torch_backend import register

__all__ = ["Policy", "Rule", "TightwireGroup", "create", "policy", "set_policy"]

_current: list[Policy] = []


def set_policy(rules: Policy | Iterable[Rule]) -> None:
    """Set the policy of process groups that are made from now on; all ranks set the same.

    Args:
        rules: Rules, of which the first that is for a call decides. Empty: nothing is compressed.

    Raises:
        TypeError: If a rule is something else.
    """
    _current[:] = [_policy_of(rules)]


def policy() -> Policy:
    """The policy of process groups that are made now.

    Returns:
        What ``set_policy`` was given; else that of the environment variable ``TIGHTWIRE_POLICY``;
        else the default, which compresses floats losslessly from 1 MiB on.

    Raises:
        TypeError: If a value in the variable has a wrong type.
        ValueError: If the variable is not JSON, or a value in it is not allowed.
    """
    return _current[0] if _current else Policy.from_environment()


def _policy_of(rules: Any) -> Policy:
    return rules if isinstance(rules, Policy) else Policy(rules)


def create(given: Any, options: Any) -> TightwireGroup:
    """Make a group, as ``torch.distributed`` asks a backend to; all its ranks do so together.

    Args:
        given: Store, rank, size and timeout.
        options: The ``pg_options`` of the caller: a policy, a list of rules, options of NCCL or
            None.

    Raises:
        CollectiveError: On all ranks, if their policies differ, or if one does not come in time.
        TypeError: If a rule is something else.
    """
    given.store = own_store(given.store, given.group_rank)
    is_policy = isinstance(options, (Policy, list, tuple))
    found = _policy_of(options) if is_policy else policy()
    compare_policies(found, given.store, given.group_rank, given.group_size, given.timeout)
    return TightwireGroup(given, found, None if is_policy else options)


def _compressible(name: str, describe: Callable[..., GroupCall | None]) -> Any:
    """The method `name` of a group, which makes calls that `describe` and the policy allow."""

    def method(self: TightwireGroup, *args: Any, **named: Any) -> Any:
        work = None if named else self._compressed(describe(*args))
        return getattr(self._native, name)(*args, **named) if work is None else work

    method.__name__ = name
    return method


class TightwireGroup(Compressing, dist.ProcessGroup):  # type: ignore[misc]
    """A process group of the backend ``"tightwire"``, as ``dist.new_group`` returns it.

    Compressed calls have connections of their own, and keep their order. On the CPU a thread makes
    them, and the connections before the first: with ``async_op=True`` the caller goes on. On a GPU
    a stream has them; the caller queues them, and waits for connections and, where the codec is
    lossless, for sizes.

    Sums and means of compressed calls are made in float32 (float64 for float64), in the order of
    ranks; see ``tightwire.Communicator``.

    Args:
        given: What ``torch.distributed`` gives to backends: store, rank, size, timeout.
        policy: Which calls are compressed.
        options: Options of NCCL, or None.

    Raises:
        CollectiveError: By calls and by ``wait()``, if anything goes wrong on the wire. Its number
            is that of a compressed call.
    """

    def __init__(self, given: Any, policy: Policy, options: Any = None) -> None:
        # The constructor that takes the store makes an object whose methods C++ does not find.
        super().__init__(given.group_rank, given.group_size)
        self._calls = CompressedCalls(policy, given.group_rank)
        self._given = given
        self._store = dist.PrefixStore("compressed", given.store)
        self._native = dist.ProcessGroup(given.store, given.group_rank, given.group_size)
        self._devices: list[str] = []
        #: NCCL's, for messages to lower ranks: see `_one_way`.
        self._downward: Any = None
        if dist.is_gloo_available():
            self._add("cpu", "gloo", _gloo(given))
        if torch.cuda.is_available() and dist.is_nccl_available():
            self._add("cuda", "nccl", _nccl(given, options, "nccl"))
            self._downward = _nccl(given, options, "nccl, downward")
        #: Works of compressed calls since coalescing was started; None: it was not.
        self._coalesced: list[Any] | None = None

    def _add(self, device: str, kind: str, backend: Any) -> None:
        which = getattr(dist.ProcessGroup.BackendType, kind.upper())
        self._devices.append(device)
        for group in (self, self._native):
            # The last one is the default: NCCL, where there is a GPU.
            group._set_default_backend(which)
            group._register_backend(torch.device(device), which, backend)

    allreduce = _compressible("allreduce", group_calls.all_reduce)
    allreduce_coalesced = _compressible("allreduce_coalesced", group_calls.all_reduce)
    broadcast = _compressible("broadcast", group_calls.broadcast)
    allgather = _compressible("allgather", group_calls.all_gather_list)
    reduce_scatter = _compressible("reduce_scatter", group_calls.reduce_scatter_list)
    # Each under the name of PyTorch 2.13, and that of versions before.
    all_gather_single = _compressible("all_gather_single", group_calls.all_gather)
    _allgather_base = _compressible("_allgather_base", group_calls.all_gather)
    all_gather_single_coalesced = _compressible(
        "all_gather_single_coalesced", group_calls.all_gathers
    )
    allgather_into_tensor_coalesced = _compressible(
        "allgather_into_tensor_coalesced", group_calls.all_gathers
    )
    reduce_scatter_single = _compressible("reduce_scatter_single", group_calls.reduce_scatter)
    _reduce_scatter_base = _compressible("_reduce_scatter_base", group_calls.reduce_scatter)
    reduce_scatter_single_coalesced = _compressible(
        "reduce_scatter_single_coalesced", group_calls.reduce_scatters
    )
    reduce_scatter_tensor_coalesced = _compressible(
        "reduce_scatter_tensor_coalesced", group_calls.reduce_scatters
    )
    all_to_all_single = _compressible("all_to_all_single", group_calls.all_to_all)
    alltoall_base = _compressible("alltoall_base", group_calls.all_to_all)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        """Send a tensor as it is; ``dist.isend`` calls this.

        Args:
            tensors: The tensor, in a list.
            to: Number of the other rank in the group.
            tag: What the receiver names too.

        Returns:
            The work.

        Raises:
            RuntimeError: If the network fails.
        """
        return self._one_way(tensors, self.rank(), to).send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        """Receive a tensor as it is; ``dist.irecv`` calls this.

        Args:
            tensors: The tensor to fill, in a list.
            source: Number of the other rank in the group.
            tag: What the sender names too.

        Returns:
            The work.

        Raises:
            RuntimeError: If the network fails.
        """
        return self._one_way(tensors, source, self.rank()).recv(tensors, source, tag)

    def _one_way(self, tensors: Any, source: int, to: int) -> Any:
        """What moves a message.

        ``dist.batch_isend_irecv`` makes one launch of its messages only for groups that are not of
        a subclass. Two ranks that send to each other would wait for ever on one stream of NCCL, so
        that each direction has its own.
        """
        on_gpu = tensors[0].device.type != "cpu"
        return self._downward if on_gpu and source > to else self._native

    def _start_coalescing(self, device: Any) -> None:
        self._native._start_coalescing(device)
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:
        works, self._coalesced = self._coalesced or [], None
        native = self._native._end_coalescing(device)
        return _Works([native, *works]) if works else native

    def split_group(
        self,
        ranks: Iterable[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> TightwireGroup | None:
        """Make a group of some ranks, with this group's policy; only these have to call it.

        Args:
            ranks: Numbers of the ranks in this group, in the order of their new numbers.
            timeout: Of the new group. None: that of this group.
            opts: Options of NCCL, or None.
            group_name: Its name. None: one that is made of the name of this group and the ranks.
            group_desc: Its description, which rules may be for. None: as for the name.
            device_types: Not used: the new group is for the devices of this one.

        Returns:
            The group; None if this rank is not in it.

        Raises:
            RuntimeError: If the network fails.
        """
        # PyTorch's own looks for a store in the object of C++, which has none. That of gloo changes
        # the options of the group that is split, and may read past their end.
        members = list(ranks)
        if self.rank() not in members:
            return None
        part, rank = f"split:{members}", members.index(self.rank())
        above = self._given.global_ranks_in_group or range(self.size())
        given = SimpleNamespace(
            store=own_store(dist.PrefixStore(part, self._given.store), rank),
            group_rank=rank,
            group_size=len(members),
            timeout=self._given.timeout if timeout is None else timeout,
            global_ranks_in_group=[above[member] for member in members],
            group_id=group_name or f"{self.group_name}:{part}",
        )
        found = TightwireGroup(given, self.policy, opts)
        found._set_group_name(given.group_id)
        found._set_group_desc(group_desc or f"{self.group_desc}:{part}")
        return found

    def get_group_store(self) -> Any:
        """The store of this group's ranks."""
        return self._given.store

    def shutdown(self) -> None:
        """End all connections, once the compressed calls under way are over."""
        self._calls.close()
        self._native.shutdown()
        if self._downward is not None:
            self._downward.shutdown()

    def abort(self) -> None:
        """End all connections at once.

        On the CPU compressed calls under way fail, here and on the other ranks, and those that
        have not begun raise a CollectiveError by ``wait()``.
        """
        self._calls.abort()
        self._native.abort()
        if self._downward is not None:
            self._downward.abort()

    def _compressed(self, call: GroupCall | None) -> Any:
        """The work of a call that the policy has compressed; None for other calls."""
        if call is None or self.size() == 1 or call.device.type not in self._devices:
            return None
        work = self._calls.begin(call, self.group_desc, self._connect)
        if work is not None and self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _connect(self, device: torch.device, number: int) -> Transport:
        timeout = timeout_of(self, device)
        place = self._store, self.rank(), self.size()
        return connect(*place, timeout, device, number, self.group_desc)


class _Works(Work):
    """Several works."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _gloo(given: Any) -> Any:
    store = dist.PrefixStore("gloo", given.store)
    found = dist.ProcessGroupGloo(store, given.group_rank, given.group_size, timeout=given.timeout)
    found.options.global_ranks_in_group = given.global_ranks_in_group
    found.options.group_name = given.group_id
    found._set_sequence_number_for_group()
    return found


def _nccl(given: Any, asked: Any, name: str) -> Any:
    options = dist.ProcessGroupNCCL.Options() if asked is None else asked
    options._timeout = given.timeout
    options.global_ranks_in_group = given.global_ranks_in_group
    options.group_name = given.group_id
    store = dist.PrefixStore(name, given.store)
    found = dist.ProcessGroupNCCL(store, given.group_rank, given.group_size, options)
    found._set_sequence_number_for_group()
    return found


register()
