"""torch.distributed as a transport: any process group, NCCL or gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .transport import Op, Transport


class TorchDist(Transport):
    """The ranks of a process group, the default one if `group` is None.

    Arrays are tensors on the group's device, or with gloo NumPy arrays; both are used in place.
    Give the communicator a group of its own (`dist.new_group()`): other traffic on it must not come
    between. All-gathers and equal all-to-alls take tensors of any shape and `plain_dtypes`. gloo
    raises after the group's timeout; NCCL's own watchdog ends the process.
    """

    #: Dtypes that the backends know: small calls of them need not become uint8 first.
    plain_dtypes = frozenset(
        {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        | {torch.int8, torch.uint8, torch.int32, torch.int64}
    )

    def __init__(self, group: Any = None, device: Any = None) -> None:
        """`device` None: the current GPU for NCCL, else the CPU. Raises ValueError off the group.

        dist.init_process_group() comes first.
        """
        self._group = dist.group.WORLD if group is None else group
        if self._group is None or self._group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("no process group, or this process is not in it")
        if device is None:
            on_gpu = dist.get_backend(self._group) == "nccl"
            device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        self._device = torch.device(device)
        self._rank: int = self._group.rank()
        self._ranks: list[int] = dist.get_process_group_ranks(self._group)
        options = self._group._get_backend(self._device).options
        self._timeout: float = options._timeout.total_seconds()
        self._gather = _in_order(dist.distributed_c10d.AllgatherOptions)
        self._swap = _in_order(dist.AllToAllOptions)
        self._nothing = self.empty(0)

    @property
    def rank(self) -> int:
        """See `Transport`: the rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See `Transport`."""
        return len(self._ranks)

    @property
    def timeout(self) -> float:
        """See `Transport`: the group's; a tenth less where NCCL's watchdog ends the process."""
        return self._timeout if self._device.type == "cpu" else 0.9 * self._timeout

    def empty(self, nbytes: int) -> Any:
        """See `Transport`; a tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    # The methods of the group itself, and not the functions of torch.distributed: these are renamed
    # (all_gather_into_tensor), and take global ranks.

    def all_gather(self, out: Any, x: Any) -> None:
        """See `Transport`."""
        _finish(self._group._allgather_base(_tensor(out), _tensor(x), self._gather))

    def all_to_all(self, out: Any, x: Any) -> None:
        """See `Transport`."""
        _finish(self._group.alltoall_base(_tensor(out), _tensor(x), [], [], self._swap))

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """See `Transport`; NCCL makes one launch of the first pieces, one of the second."""
        if self._device.type != "cpu":
            for into, pieces in itertools.zip_longest(_rounds(outs), _rounds(xs)):
                got = self._pieces(into), self._pieces(pieces)
                _finish(self._group.alltoall(*got, self._swap))
            return
        # gloo's own all-to-all takes one tensor a side: it would need all pieces side by side.
        works = []
        for peer, (receives, sends) in enumerate(zip(outs, xs, strict=True)):
            if peer == self._rank:
                for out, x in zip(receives, sends, strict=True):
                    _tensor(out).copy_(_tensor(x))
                continue
            for move, arrays in ((self._group.recv, receives), (self._group.send, sends)):
                works += [move([_tensor(x)], peer, 0) for x in arrays if x.shape[0]]
        for work in works:
            work.wait()

    def _pieces(self, pieces: Sequence[Any] | None) -> list[Any]:
        """A tensor for every rank, empty where there is none."""
        found = pieces or [None] * self.world_size
        return [self._nothing if piece is None else _tensor(piece) for piece in found]

    def send(self, x: Any, to: int) -> None:
        """See `Transport`."""
        self._group.send([_tensor(x)], to, 0).wait()

    def recv(self, out: Any, source: int) -> None:
        """See `Transport`."""
        self._group.recv([_tensor(out)], source, 0).wait()

    def all_reduce(self, x: Any, op: Op = "sum") -> None:
        """See `Transport`; NCCL has no "or"."""
        options = _in_order(dist.AllreduceOptions)
        options.reduceOp = {
            "sum": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "or": dist.ReduceOp.BOR,
        }[op]
        _finish(self._group.allreduce([_tensor(x)], options))

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """See `Transport`."""
        options = _in_order(dist.ReduceScatterOptions)
        _finish(self._group._reduce_scatter_base(_tensor(out), _tensor(x), options))

    def barrier(self) -> None:
        """See `Transport`."""
        self._group.barrier().wait()


def _rounds(pieces: Sequence[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """The first pieces of all ranks, then the second; None for those that have no more."""
    return itertools.zip_longest(*pieces)


def _in_order(kind: Any) -> Any:
    """Options of a call that NCCL queues on the caller's stream, where nobody waits for another."""
    options = kind()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    """Wait for what has not been queued on the caller's stream."""
    if work is not None:
        work.wait()


def _tensor(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    # PyTorch warns about memory that it may not write to.
    return torch.from_numpy(x if x.flags.writeable else x.copy())
