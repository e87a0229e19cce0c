"""Shared parts of the training hooks: a communicator for several streams, means over ranks."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from ...codec import Codec, as_codec
from ...planning import integer
from ..collectives import tensors
from ..collectives.communicator import Communicator
from ..collectives.communicator import check_options as check_arguments
from ..collectives.nodes import AnyCommunicator, NodeCommunicator
from ..collectives.session import Topology
from ..collectives.side_stream import SideStream, finished_future
from ..errors import CollectiveError
from ..transports.threads import connect
from ..transports.torch_dist import TorchDist
from .error_feedback import ErrorFeedback, Parts


class Channel:
    """A communicator, and on a GPU a stream, that one kind of call has to itself.

    `raw_bytes` and `wire_bytes` add up those of the communicator's trace, which therefore
    must remember a call or two.
    """

    def __init__(self, comm: AnyCommunicator) -> None:
        #: Those who made it know of which kind.
        self.comm: Any = comm
        self.raw_bytes = 0
        self.wire_bytes = 0
        self._stream = SideStream()

    def close(self) -> None:
        """Close the communicator, once the call under way is over."""
        with self._stream.lock:
            self.comm.close()

    def run(self, tensor: Any, call: Callable[[], None], collectives: int = 1) -> Any:
        """A torch Future of `tensor`, which `call()` fills by so many `collectives`.

        See `SideStream.run`.
        """
        return self._stream.run(tensor, lambda: self._counted(call, collectives))

    def run_here(self, tensor: Any, call: Callable[[], None]) -> None:
        """As `run`, of one collective, and the current stream waits for it."""
        self._stream.run_here(tensor, lambda: self._counted(call, 1))

    def _counted(self, call: Callable[[], None], collectives: int) -> None:
        call()
        self.count(collectives)

    def count(self, collectives: int = 1) -> None:
        """Add the bytes of the last calls. `run` and `run_here` do so at the end of theirs."""
        for record in self.comm.trace(last=collectives):
            self.raw_bytes += record.raw_bytes
            self.wire_bytes += record.wire_bytes


def communicator(
    group: Any, device: torch.device, purpose: str = "a communicator", **options: Any
) -> Communicator:
    """A communicator of the ranks of `group`, which all call this, on connections of its own.

    Other ranks take no part. `group` None is the default group, `purpose` is what all ranks want it
    for, `options` are `Communicator`'s. Raises CollectiveError as `TorchDist.new_group`.
    """
    transport = TorchDist.new_group(group, device, purpose=purpose)
    try:
        return Communicator(transport, **{"name": purpose} | options)
    except BaseException:
        transport.close()
        raise


def node_communicator(
    group: Any,
    device: torch.device,
    purpose: str,
    node: int | None,
    within: str | Codec | None,
    **options: Any,
) -> AnyCommunicator:
    """`communicator` for nodes of `node` ranks, between which `options` hold.

    Within them calls are native, or terms of sums encoded by the codec `within`. `node` None: there
    are no nodes. Raises as `TorchDist.new_grid`.
    """
    if node is None:
        return communicator(group, device, purpose, **options)
    near, far = TorchDist.new_grid(node, group, device, purpose=purpose)
    outer = {"name": purpose} | options
    inner: dict[str, Any] = {"algorithm": "native"} if within is None else {"codec": within}
    inner |= {key: outer[key] for key in ("name", "seed", "checksum") if key in outer}
    try:
        return NodeCommunicator(Communicator(near, **inner), Communicator(far, **outer))
    except BaseException:
        near.close()
        far.close()
        raise


def check_nodes(node: int | None, within: str | Codec | None) -> None:
    """Raise TypeError or ValueError for arguments that `communicator` does not take."""
    if node is not None and integer("node", node) < 1:
        raise ValueError(f"node is {node}; allowed: the number of ranks of a node, or None")
    if within is not None:
        if node is None:
            raise ValueError(f"within is {within!r}, node None; needed: both, or node alone")
        check_gradients(as_codec(within))


class Connecting(NamedTuple):
    """What a hook of DistributedDataParallel makes its communicator of, and a copy another one.

    Attributes:
        group: The process group; None: the default one.
        purpose: As in ``communicator``.
        node: As in ``node_communicator``.
        within: As there.
        options: Arguments of ``Communicator``.
    """

    group: Any
    purpose: str
    node: int | None
    within: str | Codec | None
    options: dict[str, Any]

    def connect(self, device: torch.device) -> AnyCommunicator:
        """Make the communicator; all ranks do.

        Args:
            device: The device of this rank.

        Raises:
            CollectiveError: As `TorchDist.new_group`.
        """
        meets = f"{self.purpose}, route 'exact'"
        options = {"name": self.purpose} | self.options
        return node_communicator(self.group, device, meets, self.node, self.within, **options)

    def of_copy(self) -> Connecting:
        """The same for a copy of the hook, which takes the default process group."""
        warn_of_group(self.group)
        return self._replace(group=None)


def warn_of_group(group: Any) -> None:
    """Warn that a copy of a hook has another process group.

    DistributedDataParallel, too, is of the default group when it has been copied.
    """
    if group is not None and group is not dist.group.WORLD:
        warnings.warn(
            "a hook's process group is not copied: the copy uses the default one",
            RuntimeWarning,
            stacklevel=3,
        )


#: What is wrong if a copy that has no communicator is to make calls.
NOT_CONNECTED = (
    "the hook is a copy, which has no communicator. One that was passed to register() is not "
    "copied: register a hook on the model that was copied"
)


def two_communicators(
    purpose: str,
    forward: str | Codec | None,
    backward: str | Codec | None,
    group: Any,
    device: Any,
    options: Mapping[str, Any],
    node: int | None = None,
    within: str | Codec | None = None,
    route: str = "",
) -> tuple[AnyCommunicator, AnyCommunicator]:
    """Communicators of what travels forward and of gradients, each on connections of its own.

    A codec of None leaves a direction uncompressed. A route is compared. Else as
    `node_communicator`.
    """
    check_nodes(node, within)
    place, comms = (group, torch.device(device)), []
    for direction, codec in (("forward", forward), ("backward", backward)):
        path = {"algorithm": "native"} if codec is None else {"codec": codec}
        name = f"{purpose}, {direction}"
        own = {"name": name, **options, **path}
        meets = f"{name}, route {route!r}" if route else name
        comms.append(node_communicator(*place, meets, node, within, **own))
    return comms[0], comms[1]


class Collective(torch.autograd.Function):  # type: ignore[misc]
    """`forward(x)`, whose gradient is `backward(gradient)`.

    Compilers see neither: they would trace into the network.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, forward: Any, backward: Any) -> Any:
        """Call `forward`."""
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        """Call `backward`."""
        return ctx.of_gradient(gradient), None, None


def check_options(call: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for options of `call` that no `Communicator` takes.

    Those that `call` itself names are allowed too. Nothing is sent.
    """
    own = [p.name for p in inspect.signature(call).parameters.values() if p.kind == p.KEYWORD_ONLY]
    check_arguments(options, own)
    check_gradients(Communicator(connect(1)[0], **options).codec)


def check_gradients(codec: Codec) -> None:
    """Raise ValueError for a codec that is not fit for dense gradients."""
    if codec.spec.ruins_dense:
        raise ValueError(
            f"codec is {codec.name!r}; {codec.spec.ruins_dense}. Allowed: codecs for dense "
            "gradients, such as 'mx', 'nvfp4' and 'dynamiq'"
        )


class Closing:
    """A context manager that ends with ``close()``, which closes the communicators of a hook."""

    #: Why a model cannot make another step, if it has not ended its last.
    _unended: CollectiveError | None = None
    #: Whether it was closed, perhaps before it had a communicator.
    _ended = False

    def _refuses(self) -> CollectiveError | None:
        """What every later call will raise, if ranks are out of step."""
        for channel in self._open():
            problem: CollectiveError | None = channel.comm.refusal("backward")
            if problem is not None:
                return problem
        return None

    def _give_up(self) -> None:
        """Tell the other ranks that this one makes no more steps, as far as they wait for it."""

    def _open(self) -> Iterable[Channel]:
        raise NotImplementedError

    def close(self) -> None:
        """Close the communicators: their threads, connections and memory are freed.

        Later calls raise CollectiveError; counts and traces stay. Closing again does nothing. A
        hook whose model is garbage-collected closes by itself.
        """
        self._ended = True
        for channel in self._open():
            channel.close()

    def _connect_copy(self, own: Connecting | None, device: torch.device) -> AnyCommunicator:
        """Make the communicator of a copy; `own` is None if one was passed to the original."""
        if own is None:
            raise TypeError(NOT_CONNECTED)
        if self._ended:
            raise CollectiveError(dist.get_rank(), own.purpose, 0, "start", "the hook is closed")
        return own.connect(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()


def distributed(model: Any) -> DistributedDataParallel:
    """`model`; raises TypeError if it is not a DistributedDataParallel."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model is a {type(model).__name__}; allowed: DistributedDataParallel")
    return model


def trained_device(model: DistributedDataParallel) -> torch.device:
    """Where the gradients of a model are, which DistributedDataParallel wants to be one place."""
    return next(p.device for p in model.parameters() if p.requires_grad)


def install(model: DistributedDataParallel, state: Closing, hook: Callable[..., Any]) -> None:
    """Register the communication hook `hook` of `state` on `model`."""
    model.register_comm_hook(state, hook)
    model.register_forward_pre_hook(functools.partial(_go_on, state))


def _go_on(state: Closing, model: Any, args: Any) -> None:
    """Raise before a step if the last has not been ended, which the model would complain of."""
    if state._unended is not None and torch.is_grad_enabled() and model.require_backward_grad_sync:
        raise state._unended


def in_backward(state: Closing, tensor: Any, call: Callable[[], Any]) -> Any:
    """The Future that `call()` returns for a bucket, or one of `tensor` as it is if it fails.

    Then backward() raises in the end what failed first. Raised at once, it would leave
    DistributedDataParallel in the middle of a step, and other ranks waiting for later buckets.
    """
    try:
        return call()
    except Exception as error:
        raise_at_the_end(state, error)
        return finished_future(tensor, [tensor.device] if tensor.device.type == "cuda" else None)


def raise_at_the_end(state: Closing, error: Exception) -> None:
    """Have backward() raise `error` behind all callbacks that it knows when it comes to them.

    DistributedDataParallel queues its own, which ends the step, when the last bucket is ready. If
    ranks are out of step `error` comes before it: with find_unused_parameters=True it waits for a
    collective of all ranks, and would raise what gloo says of that.
    """

    def raise_it() -> None:
        raise error

    def choose() -> None:
        problem = state._refuses()
        if problem is None:
            queue(raise_it)
            return
        state._unended = problem
        state._give_up()
        raise_it()

    queue = torch.autograd.Variable._execution_engine.queue_callback
    try:
        queue(choose)
    except RuntimeError:
        # Nobody is in backward().
        raise error from None


def collectives_of_average(topology: Topology) -> int:
    """Two for two-shot, a reduce-scatter and an all-gather; else one, an all-reduce."""
    return 2 if topology == "two-shot" else 1


def check_feedback(feedback: ErrorFeedback | None, comm: AnyCommunicator) -> None:
    """Raise TypeError if `feedback` is not an ErrorFeedback, ValueError if it has no effect.

    A lossless codec loses nothing, and only two-shot sums decode a rank's own tensor.
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
    comm: AnyCommunicator,
    x: Any,
    feedback: ErrorFeedback | None = None,
    parts: Parts = (),
) -> None:
    """Overwrite the 1-D floating-point tensor `x` with its mean over all ranks.

    That is as many collectives as `collectives_of_average` says. Over hops and
    in-network it is an all-reduce, whose terms are divided in float32 (float64); over hops partial
    sums are rounded to the dtype of `x` at each. Two-shot is as `two_shots` says. Raises TypeError
    for another dtype and for sparse tensors, ValueError for `feedback` that has no effect.
    """
    if x.layout != torch.strided or not x.dtype.is_floating_point:
        raise TypeError(f"x is {x.dtype}, {x.layout}; allowed: dense floating-point tensors")
    check_feedback(feedback, comm)
    if comm.topology != "two-shot":
        comm.all_reduce(x, x, op="mean")
        return
    two_shots(comm, x, x, feedback, parts, divisor=comm.world_size)


def two_shots(
    comm: AnyCommunicator,
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

    If decoding terms fails on a rank, that rank raises CollectiveError, and the others get NaN for
    its share; all stay in step.
    """
    padding = -x.numel() % comm.world_size
    each = (x.numel() + padding) // comm.world_size
    total = wide(each, x)
    try:
        scatter(comm, x, total, feedback, parts, padding, out.dtype)
    except CollectiveError:
        if comm.refusal("all_gather") is None:
            # The others go on to the all-gather, and are not to add damaged sums unnoticed.
            comm.all_gather(total.fill_(math.nan).to(out.dtype))
        raise
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
    comm: AnyCommunicator,
    x: Any,
    total: Any,
    feedback: ErrorFeedback | None,
    parts: Parts,
    padding: int = 0,
    dtype: Any = None,
) -> None:
    """Fill `total` with this rank's share, by rows, of the sum of `x`, and of zeros behind it.

    With `padding` zeros `x` is 1-D. `feedback` as `two_shots` says, except for losses of the sum;
    with it `dtype` is what travels, None for that of `x`.
    """
    if feedback is None:
        comm.reduce_scatter(_padded(x, padding), total)
        return
    feedback.belongs((name for name, _ in parts), comm.rank, comm.world_size)
    corrected = feedback.corrected(x.reshape(-1), parts)
    sent = _padded(corrected.reshape(x.shape), padding)
    decoded = torch.empty_like(sent)
    wire = str(dtype or x.dtype).removeprefix("torch.")
    comm.reduce_scatter(sent, total, wire=wire, decoded=decoded)
    feedback.keep(parts, corrected, decoded.reshape(-1)[: x.numel()])


def gather(comm: AnyCommunicator, x: Any, out: Any, feedback: ErrorFeedback, parts: Parts) -> None:
    """Fill `out`, 1-D, with all ranks' `x`, 1-D, each with the residuals of its `parts` added.

    These become what encoding loses of that. The dtype of `out` is what travels; `x` may lie in it.
    """
    feedback.belongs((name for name, _ in parts), comm.rank, comm.world_size)
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


def finished(done: Any, async_op: bool) -> Any:
    """Return ``done``, the work of a collective, if ``async_op``; else wait for it."""
    if async_op:
        return _create_work_from_future(done)
    done.wait()
    return None
