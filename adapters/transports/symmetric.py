# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Memory of GPUs of one host that all of them read: ``PeerMemory`` by PyTorch's symmetric memory.

Multicast is not used. Set ``TORCH_SYMM_MEM_DISABLE_MULTICAST=1`` where a driver cannot make it.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
import triton
import triton.language as tl

from ...codecs.common.flags_triton import tell, wait_for
from ...codecs.common.launch_triton import PTX, Variant, kernel, options
from ..errors import described
from .attempts import attempt
from .peer import PeerMemoryError

#: Bytes at the end of a rank's memory for its flags, one int64 for each rank.
_FLAGS_NBYTES = 1024
_MOST_RANKS = _FLAGS_NBYTES // 8


@kernel
def barrier_kernel(
    flags_ptr,
    peers_ptr,
    count_ptr,
    late_ptr,
    rank: tl.int32,
    limit_ns: tl.int64,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Tell all ranks that this one is here, and wait for them, for `limit_ns` at most.

    `flags_ptr` has this rank's flags, int64, one that each rank writes; `peers_ptr` has the
    addresses of all ranks' flags. `count_ptr` has the number of barriers so far; see `wait_for`
    for `late_ptr`, which is that of other memory, too.
    """
    flags_ptr = flags_ptr.to(tl.pointer_type(tl.int64))
    peers_ptr = peers_ptr.to(tl.pointer_type(tl.int64))
    count_ptr = count_ptr.to(tl.pointer_type(tl.int64))
    late_ptr = late_ptr.to(tl.pointer_type(tl.int64))
    number = tl.load(count_ptr) + 1
    tl.store(count_ptr, number)
    i = tl.arange(0, SIZE)
    used = i < RANKS
    peers = tl.load(peers_ptr + i, used, 0) + rank * 8
    theirs = peers.to(tl.pointer_type(tl.int64), bitcast=True)
    tell(theirs, used, number)
    # A rank that this one has told may be at the next barrier.
    wait_for(flags_ptr + i, used, number, 1, late_ptr, limit_ns, 0, PTX)


class SymmetricRegion:
    """A ``Region`` in the memory of GPUs. All ranks make it together.

    Args:
        memory: What this rank has of it, with space for flags behind.
        group: The process group.
        late: Who did not come to a barrier of any region: see `Region.late`.
        timeout: Seconds after which waiting ends.
    """

    def __init__(self, memory: Any, group: Any, late: Any, timeout: float) -> None:
        device, nbytes = memory.device, memory.shape[0] - _FLAGS_NBYTES
        self._memory = memory
        self._handle = symm.rendezvous(self._memory, group.group_name)
        ranks = range(self._handle.world_size)
        self._rank: int = self._handle.rank
        self._parts = [
            self._memory[:nbytes]
            if rank == self._rank
            else self._handle.get_buffer(rank, (nbytes,), torch.uint8)
            for rank in ranks
        ]
        self._flags = self._memory[nbytes:].view(torch.int64)
        addresses = [self._handle.buffer_ptrs[rank] + nbytes for rank in ranks]
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        #: Barriers so far.
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._late = late
        values = {"RANKS": len(ranks), "SIZE": triton.next_power_of_2(len(ranks)), "PTX": PTX}
        barrier = Variant(barrier_kernel, options(1), **values)
        tensors = self._flags, self._peers, self._count, self._late
        numbers = self._rank, round(timeout * 1e9)
        with torch.cuda.device(device):
            self._meet = barrier.prepared(1, tensors, numbers)
            # Calls may be made on other streams.
            torch.cuda.current_stream().synchronize()

    @property
    def parts(self) -> list[Any]:
        """See ``Region``."""
        return self._parts

    def barrier(self) -> None:
        """See ``Region``; one small kernel, which a CUDA graph can hold."""
        self._meet()

    def late(self) -> Any:
        """See ``Region``."""
        return self._late

    def number(self) -> Any:
        """See ``Region``."""
        return self._count


class SymmetricMemory:
    """``PeerMemory`` of a process group whose ranks are on GPUs of one host.

    All ranks of the group make it together. It opens no connections: the group's store is used.

    Args:
        group: The process group. None: the default one.
        device: The GPU. None: the current one.
        timeout: Seconds after which waiting ends.

    Raises:
        PeerMemoryError: If a rank is on another host, or its GPU cannot be read from here: on all
            ranks, which says why.
    """

    def __init__(self, group: Any = None, device: Any = None, *, timeout: float = 30.0) -> None:
        self._group = group if group is not None else dist.group.WORLD
        index = None if device is None else torch.device(device).index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._timeout = timeout
        #: A call with several barriers, in several regions, waits once for a rank that is late.
        self._late: Any = None
        problem = why_not(self._group, self._device)
        if problem:
            raise PeerMemoryError(f"no peer memory: {problem}")

    @property
    def rank(self) -> int:
        """See ``PeerMemory``."""
        return int(self._group.rank())

    @property
    def world_size(self) -> int:
        """See ``PeerMemory``."""
        return int(self._group.size())

    @property
    def timeout(self) -> float:
        """See ``PeerMemory``."""
        return self._timeout

    def region(self, nbytes: int) -> SymmetricRegion:
        """See ``PeerMemory``."""
        # A rank without memory must not leave the others waiting for it.
        memory = attempt(self._group, self._device, lambda: self._zeros(nbytes))
        return attempt(
            self._group,
            self._device,
            lambda: SymmetricRegion(memory, self._group, self._late, self._timeout),
        )

    def _zeros(self, nbytes: int) -> Any:
        """Memory of this rank that others can be given, for so many bytes and the flags."""
        memory = symm.empty(nbytes + _FLAGS_NBYTES, dtype=torch.uint8, device=self._device)
        memory.zero_()
        if self._late is None:
            self._late = torch.zeros(1, dtype=torch.int64, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        return memory


def why_not(group: Any, device: torch.device, problem: str = "") -> str:
    """Why the ranks of a group cannot read one another's memory, the same on all; else ``""``.

    All ranks call it.

    Args:
        group: The process group.
        device: This rank's GPU.
        problem: Why this rank does not want to; ``""`` if it does.
    """
    uuid = ""
    # What fails here must not leave the others waiting.
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    except Exception as error:
        problem = problem or described(error)
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), uuid), group=group)
    try:
        problem = problem or _problem(places, device)
    except Exception as error:
        problem = described(error)
    problems: list[Any] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    return next((p for p in problems if p), "")


def _problem(places: list[tuple[str, str]], device: torch.device) -> str:
    hosts = sorted({host for host, _ in places})
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts: {', '.join(hosts)}"
    uuids = [uuid for _, uuid in places]
    if len(set(uuids)) < len(uuids):
        return "several ranks use one GPU"
    if len(places) > _MOST_RANKS:
        return f"there are {len(places)} ranks; allowed: at most {_MOST_RANKS}"
    here = range(torch.cuda.device_count())
    known = {str(torch.cuda.get_device_properties(i).uuid): i for i in here}
    for rank, uuid in enumerate(uuids):
        other = known.get(uuid)
        # A process may see its own GPU alone; then the rendezvous finds out.
        if other in (None, device.index):
            continue
        if not torch.cuda.can_device_access_peer(device.index, other):
            return f"{device} cannot read the memory of rank {rank}'s GPU"
    return ""
