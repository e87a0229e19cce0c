"""What the training hooks share: a communicator in turns, and the mean over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import tensors
from .collectives import Communicator
from .error_feedback import ErrorFeedback, Parts
from .group import Topology
from .torch_dist import TorchDist


class Channel:
    """A communicator, and on a GPU a stream, that one kind of call has to itself.

    Calls come from the main thread and from autograd's, and from several streams; here they take
    turns. `raw_bytes` and `wire_bytes` add up those of the communicator's trace, which therefore
    must remember a call or two.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.raw_bytes = 0
        self.wire_bytes = 0
        self._lock = threading.Lock()
        self._streams: dict[torch.device, Any] = {}

    def run(self, tensor: Any, call: Callable[[], None], collectives: int = 1) -> Any:
        """A torch Future of `tensor`, which `call()` fills by so many `collectives`.

        On a GPU `call` is queued on the channel's own stream, behind the current one; who waits for
        the future has his current stream wait. Work memory thus never changes streams.
        """
        with self._lock:
            if tensor.device.type != "cuda":
                return self._done(tensor, call, collectives, None)
            own = self._streams.get(tensor.device)
            if own is None:
                own = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
            own.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(own):
                return self._done(tensor, call, collectives, [tensor.device])

    def _done(self, tensor: Any, call: Callable[[], None], collectives: int, devices: Any) -> Any:
        call()
        for record in self.comm.trace(last=collectives):
            self.raw_bytes += record.raw_bytes
            self.wire_bytes += record.wire_bytes
        future: Any = torch.futures.Future(devices=devices)
        future.set_result(tensor)
        return future


def communicator(group: Any, device: torch.device, **options: Any) -> Communicator:
    """A communicator on a new process group of the ranks of `group`, which all call this.

    Other ranks take no part. `group` None is the default group; `options` are `Communicator`'s.
    """
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=dist.get_backend(group),
        timeout=timedelta(seconds=TorchDist(group, device).timeout),
        use_local_synchronization=True,
    )
    return Communicator(TorchDist(own, device), **options)


def collectives_of_average(topology: Topology) -> int:
    """In two shots a reduce-scatter and an all-gather; else an all-reduce."""
    return 2 if topology == "two-shot" else 1


def check_feedback(feedback: ErrorFeedback | None, comm: Communicator) -> None:
    """Raise TypeError for what is no error feedback, ValueError where it would have no say.

    A lossless codec loses nothing, and but in two shots nobody decodes a rank's own tensor.
    """
    if feedback is None:
        return
    if not isinstance(feedback, ErrorFeedback):
        raise TypeError(f"error_feedback is {feedback!r}; allowed: an ErrorFeedback() or None")
    if comm.topology != "two-shot":
        raise ValueError(
            f"error_feedback is given, topology is {comm.topology!r}; allowed with it: 'two-shot'"
        )
    if comm.codec.lossless:
        raise ValueError(
            f"error_feedback is given, codec is {comm.codec.spec!r}; allowed with it: lossy codecs"
        )


def average(
    comm: Communicator,
    x: Any,
    feedback: ErrorFeedback | None = None,
    parts: Parts = (),
) -> None:
    """Overwrite the 1-D floating-point tensor `x` with its mean over all ranks.

    That is as many collectives as `collectives_of_average` says. By hops and by cells it is an
    all-reduce, whose terms are divided in float32 (float64); by hops partial sums are rounded to
    the dtype of `x` at each. In two shots it is as `two_shots` says. Raises TypeError for another
    dtype and for sparse tensors, ValueError for `feedback` but in two shots of a lossy codec.
    """
    if x.layout != torch.strided or not x.dtype.is_floating_point:
        raise TypeError(f"x is {x.dtype}, {x.layout}; allowed: dense floating-point tensors")
    check_feedback(feedback, comm)
    if comm.topology != "two-shot":
        comm.all_reduce(x, x, op="mean")
        return
    two_shots(comm, x, x, feedback, parts, divisor=comm.world_size)


def two_shots(
    comm: Communicator,
    x: Any,
    out: Any,
    feedback: ErrorFeedback | None,
    parts: Parts,
    divisor: int = 1,
) -> None:
    """Fill `out`, 1-D, with the sum over all ranks' `x`, as long, divided by `divisor`.

    A reduce-scatter and an all-gather. Sums are made in float32 (float64 in float64) in the order
    of ranks, divided there and rounded once; all ranks get the same bits. `out` may be `x`, and is
    of its dtype. With `feedback` it may be of another, which then is what travels, and the
    residuals of `parts`, which `x` is made of, are added to what this rank sends, and become what
    its encoding loses of that, and of this rank's share of the sum.
    """
    padding = -x.numel() % comm.world_size
    each = (x.numel() + padding) // comm.world_size
    total = wide(each, x)
    scatter(comm, x, total, feedback, parts, padding, out.dtype)
    tensors.change(lambda v: v.div_(divisor), total)
    result = tensors.cast(total, tensors.dtype_of(out))
    if feedback is None and not padding:
        comm.all_gather(result, out)
        return
    gathered = comm.all_gather(result)
    if feedback is not None:
        first = comm.rank * each
        # A share of the sum is in the hands of one rank, which makes good for all.
        own = gathered[first : first + each]
        tensors.change(lambda v, w: v.sub_(w).mul_(divisor), total, own)
        feedback.add(parts, first, total)
    out.copy_(gathered[: x.numel()])


def scatter(
    comm: Communicator,
    x: Any,
    total: Any,
    feedback: ErrorFeedback | None,
    parts: Parts,
    padding: int = 0,
    dtype: Any = None,
) -> None:
    """Fill `total` with this rank's share, by rows, of the sum of `x`, and of zeros behind it.

    With `padding` zeros `x` is 1-D. `feedback` as `two_shots` says, but for losses of the sum; with
    it `dtype` is what travels, None for that of `x`.
    """
    if feedback is None:
        comm.reduce_scatter(_padded(x, padding), total)
        return
    corrected = feedback.corrected(x.reshape(-1), parts)
    sent = _padded(corrected.reshape(x.shape), padding)
    decoded = torch.empty_like(sent)
    wire = str(dtype or x.dtype).removeprefix("torch.")
    comm.reduce_scatter(sent, total, wire=wire, decoded=decoded)
    feedback.keep(parts, corrected, decoded.reshape(-1)[: x.numel()])


def gather(comm: Communicator, x: Any, out: Any, feedback: ErrorFeedback, parts: Parts) -> None:
    """Fill `out`, 1-D, with all ranks' `x`, 1-D, each with the residuals of its `parts` added.

    These become what encoding loses of that. The dtype of `out` is what travels; `x` may lie in it.
    """
    corrected = feedback.corrected(x, parts)
    comm.all_gather(corrected.to(out.dtype), out)
    first = comm.rank * x.numel()
    feedback.keep(parts, corrected, out[first : first + x.numel()])


def _padded(x: Any, padding: int) -> Any:
    return torch.nn.functional.pad(x, (0, padding)) if padding else x


def wide(n: int, like: Any) -> Any:
    """An uninitialised tensor of n sums of such elements."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return like.new_empty(n, dtype=dtype)
