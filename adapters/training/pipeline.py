"""Pipeline parallelism whose activations and gradients travel encoded, after TahQuant.

``connect`` gives the ranks of a pipeline what they send by. Its ``stage`` is for the schedules of
``torch.distributed.pipelining``; ``send`` and ``receive`` are for loops of your own, and autograd
differentiates them:

    from tightwire import pipeline

    boundary = pipeline.connect("tahquant", "tahquant")
    if boundary.rank == 0:
        sent = boundary.send(first(x), to=1)
        sent.backward()                     # waits for the gradient of what was sent
    else:
        y = boundary.receive((8, 256), torch.bfloat16, source=0)
        second(y).sum().backward()          # sends the gradient of y
    boundary.flush()

An encoded tensor is one message, of a size that both sides know from its shape and dtype. So
messages are as non-blocking as those of PyTorch, and the same schedules work. Codecs whose size
depends on the data (lossless ones) are not for them.

``send`` puts a header in front, with the number of the message. So gradients find the activation
that they belong to, whatever the order in which ranks go backward.
"""

from __future__ import annotations

import os
import struct
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...codec import Codec, as_codec
from ...codecs.tahquant import Tahquant
from ...decoding import decode
from ...formats.errors import FormatError
from ..collectives.calls import rounding_key
from ..errors import CollectiveError
from ..transports.torch_groups import check_node

#: Works of sends that nobody has waited for, of one direction, beyond which the oldest is.
_PENDING = 64
#: Most dimensions of a tensor that a header describes.
_DIMENSIONS = 32
#: A header: number, whether a gradient is wanted, dimensions, dtype, shape.
_HEADER = struct.Struct(f"<qqq24s{_DIMENSIONS}q")
#: Tags of messages with headers: gloo keeps them apart from others, and both directions.
_FORWARD, _BACKWARD = 1, 2
#: Bytes at the end of memory that show whether it was filled.
_MARK = 16


class Messages:
    """Non-blocking messages between the ranks of a process group, in one direction of a pipeline.

    Tensors of a dtype that the codec does not compress travel as they are, and those that it would
    not make smaller, and those to a rank of the same node. Receivers know shape and dtype.

    Args:
        codec: A codec; None: nothing is encoded.
        group: The process group; None: the default one.
        seed: Seed of codecs that round at random.
        name: How errors call them.
        node: Ranks of a node, whose numbers in the group are consecutive. None: each rank is in a
            node of its own.

    Raises:
        ValueError: If the size of what the codec encodes depends on the data, or nodes would be
            uneven.
    """

    def __init__(
        self,
        codec: Codec | None,
        group: Any = None,
        *,
        seed: int = 0,
        name: str = "messages",
        node: int | None = None,
    ) -> None:
        if codec is not None:
            _check_fixed(codec)
        self.codec = codec
        self.group = dist.group.WORLD if group is None else group
        self.rank: int = self.group.rank()
        self.world_size: int = self.group.size()
        self.name = name
        if node is not None:
            check_node(node, self.rank, self.world_size, name)
        self._node = node or 1
        #: Bytes of tensors that this rank has sent to other nodes, and of what was sent of them.
        self.raw_bytes = self.wire_bytes = 0
        self._seed = seed
        self._counts: Counter[str] = Counter()

    def memory_for(self, like: Any, peer: int) -> Any:
        """Make memory for what is encoded of a tensor.

        Args:
            like: A tensor: its shape, dtype and device count.
            peer: Number of the other rank in the group.

        Returns:
            A tensor, uint8; None if such tensors travel as they are.
        """
        if self.codec is None or not like.numel() or self._is_near(peer):
            return None
        dtype = str(like.dtype).removeprefix("torch.")
        if dtype not in self.codec.dtypes:
            return None
        nbytes = self.codec.plan(tuple(like.shape), dtype).nbytes
        if nbytes >= like.numel() * like.element_size():
            return None
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)

    def encode(self, x: Any, to: int) -> Any:
        """Encode a tensor that is about to be sent.

        Args:
            x: The tensor.
            to: Number of the receiver in the group.

        Returns:
            A contiguous tensor of uint8, or ``x`` if it travels as it is.
        """
        x = x.detach()
        memory = self.memory_for(x, to)
        if memory is None or self.codec is None:
            x = x.contiguous()
            memory = x
        else:
            number = self._counts["encoded"]
            self._counts["encoded"] += 1
            key = rounding_key(self._seed, number, 0, self.rank, self.world_size)
            self.codec.encode(x, key=key, out=memory)
        if not self._is_near(to):
            self.raw_bytes += x.numel() * x.element_size()
            self.wire_bytes += memory.numel() * memory.element_size()
        return memory

    def decode(self, data: Any, out: Any, source: int | str) -> None:
        """Decode what was received.

        Args:
            data: What ``memory_for`` returned, filled.
            out: The tensor to fill.
            source: The sender, for the error.

        Raises:
            CollectiveError: If the bytes are damaged, or encoded by another codec.
        """
        try:
            decode(data, out=out.detach())
        except (FormatError, ValueError, TypeError) as error:
            raise self._failure("recv", "decode", f"from {_named(source)}: {error}") from error

    def isend(self, x: Any, to: int) -> Message:
        """Begin to send a tensor, which may be overwritten at once unless it travels as it is.

        Args:
            x: The tensor.
            to: Number of the receiver in the group.

        Returns:
            What to wait for.

        Raises:
            CollectiveError: If the network fails.
        """
        return self._isend([self.encode(x, to)], to, 0)

    def irecv(self, out: Any, source: int) -> Message:
        """Begin to receive a tensor, which is right when the message was waited for.

        Args:
            out: A contiguous tensor of the shape and dtype that the sender has.
            source: Number of the sender in the group.

        Returns:
            What to wait for.

        Raises:
            CollectiveError: If the network fails.
            ValueError: If ``out`` is not contiguous.
        """
        return self._irecv(out, source, 0)

    def sendrecv(self, x: Any, to: int, out: Any, source: int) -> None:
        """Send a tensor and receive another one; ranks that do so to each other do not deadlock.

        Args:
            x: The tensor to send.
            to: Number of its receiver in the group.
            out: The tensor to fill, contiguous.
            source: Number of its sender.

        Raises:
            CollectiveError: If the network fails, bytes are damaged, or on the CPU fewer arrive
                than ``out`` takes.
            ValueError: If ``out`` is not contiguous. Nothing has been sent then.
        """
        into, data = self._memory(out, source), self.encode(x, to)
        mark = _marked(into)
        # NCCL makes one launch of them: separate ones would wait for each other.
        ops = [
            dist.P2POp(dist.isend, data, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, into.detach(), group=self.group, group_peer=source),
        ]
        with self._naming("sendrecv", f"to rank {to}, from rank {source}"):
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        self._finish(into, out, mark, source)

    def _isend(self, data: list[Any], to: int, tag: int) -> Message:
        """Begin to send tensors as they are, which are one message."""
        with self._naming("send", f"to rank {to}"):
            works = [self.group.send([part], to, tag) for part in data]
        return Message(self, works, "send", to, data)

    def _irecv(self, out: Any, source: int, tag: int) -> Message:
        into = self._memory(out, source)
        mark = _marked(into)
        with self._naming("recv", f"from rank {source}"):
            work = self.group.recv([into.detach()], source, tag)
        return Message(self, [work], "recv", source, [into, out, mark])

    def _memory(self, out: Any, source: int) -> Any:
        """What the network fills: memory for encoded bytes, or the tensor's own."""
        if not out.is_contiguous():
            raise ValueError(
                f"out, {_described(out)}, is not contiguous; needed: contiguous memory"
            )
        memory = self.memory_for(out, source)
        return out if memory is None else memory

    def _finish(self, into: Any, out: Any, mark: bytes | None, source: int) -> None:
        """Decode what has arrived, if it is encoded."""
        if mark is not None and _end(into).tobytes() == mark:
            detail = f"from rank {source}: fewer bytes arrived than {_described(out)} takes"
            raise self._failure("recv", "payload", detail)
        if into is not out:
            self.decode(into, out, source)

    def _isend_described(self, x: Any, to: int, about: _About, tag: int) -> Message:
        """Begin to send a tensor behind a header."""
        dtype = str(x.dtype).removeprefix("torch.").encode()
        shape = [*x.shape, *[0] * (_DIMENSIONS - x.dim())]
        text = _HEADER.pack(about.number, about.is_wanted, x.dim(), dtype, *shape)
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(x.device)
        if not self._is_near(to):
            self.wire_bytes += len(text)
        return self._isend([header, self.encode(x, to)], to, tag)

    def _receive_described(self, source: int, device: Any, tag: int) -> tuple[_About, Any]:
        """Receive a header, and the tensor that it describes."""
        header = torch.empty(_HEADER.size, dtype=torch.uint8, device=device)
        with self._naming("recv", f"from rank {source}"):
            self.group.recv([header], source, tag).wait()
        number, is_wanted, count, name, *shape = _HEADER.unpack(header.cpu().numpy().tobytes())
        dtype = getattr(torch, name.rstrip(b"\0").decode())
        # Memory of the sender's size: gloo ends the process if less is given to it.
        x = torch.empty(shape[:count], dtype=dtype, device=device)
        self._irecv(x, source, tag).wait()
        return _About(number, bool(is_wanted)), x

    def _is_near(self, peer: int) -> bool:
        """Whether a rank is another one of this node."""
        return peer != self.rank and peer // self._node == self.rank // self._node

    @contextmanager
    def _naming(self, what: str, peer: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failure(what, "payload", f"{peer}: {error}") from error

    def _failure(self, what: str, stage: str, detail: str) -> CollectiveError:
        return CollectiveError(self.rank, what, self._counts[what], stage, f"{self.name} {detail}")


class Message:
    """A message under way, which ``Messages`` returns.

    Args:
        of: What it is one of.
        works: PyTorch's works.
        what: ``"send"`` or ``"recv"``.
        peer: Number of the other rank.
        held: Memory that the network reads or writes; of what is received also where it belongs,
            and the mark at its end.
    """

    def __init__(
        self, of: Messages, works: list[Any], what: str, peer: int, held: list[Any]
    ) -> None:
        self._of, self._works, self._what, self._peer = of, works, what, peer
        self._held = held

    def wait(self) -> None:
        """Wait until the tensor was sent, or is received and decoded. Again: nothing happens.

        Raises:
            CollectiveError: If the network fails, bytes are damaged, or on the CPU fewer arrive
                than the tensor takes; it names the other rank.
        """
        if not self._works:
            return
        peer = f"{'to' if self._what == 'send' else 'from'} rank {self._peer}"
        with self._of._naming(self._what, peer):
            for work in self._works:
                work.wait()
        self._of._counts[self._what] += 1
        self._works = []
        held, self._held = self._held, []
        if self._what == "recv":
            into, out, mark = held
            self._of._finish(into, out, mark, self._peer)


class _About(NamedTuple):
    """What a header says of a message: its number, and whether its gradient is to be sent."""

    number: int
    is_wanted: bool


class _Gradients:
    """Gradients of one activation that arrived; it lives as long as backward may ask for them."""

    def __init__(self) -> None:
        self.arrived: deque[Any] = deque()


class Boundary:
    """What the ranks of a pipeline send by; ``connect`` makes it.

    Args:
        forward: Messages of activations.
        backward: Messages of their gradients, between the same ranks.

    Raises:
        ValueError: If the groups are not of the same ranks.
    """

    def __init__(self, forward: Messages, backward: Messages) -> None:
        places = [(m.rank, m.world_size) for m in (forward, backward)]
        if places[0] != places[1]:
            raise ValueError(f"rank and world size are {places[0]} forward, {places[1]} backward")
        self.forward = forward
        self.backward = backward
        self._sent: deque[Message] = deque()
        #: Numbers of the next activations to and from each rank.
        self._to: Counter[int] = Counter()
        self._from: Counter[int] = Counter()
        #: Where gradients go, by rank and number. Those that nobody can ask for are dropped.
        self._awaited: WeakValueDictionary[tuple[int, int], _Gradients] = WeakValueDictionary()

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.forward.rank

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensors that this rank has sent so far, with nodes those to others."""
        return self.forward.raw_bytes + self.backward.raw_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent so far, with nodes those to others."""
        return self.forward.wire_bytes + self.backward.wire_bytes

    def stage(self, module: Any, index: int, count: int, device: Any, **options: Any) -> Any:
        """Make a stage for the schedules of ``torch.distributed.pipelining``.

        Args:
            module: What the stage computes.
            index: Number of the stage, from 0.
            count: Number of stages.
            device: Where it computes.
            **options: Other arguments of ``torch.distributed.pipelining.PipelineStage``, except
                ``group``.

        Returns:
            A ``PipelineStage`` whose messages are encoded.

        Raises:
            TypeError: If an option is not one of ``PipelineStage``.
        """
        from .pipeline_stage import Stage

        return Stage(self, module, index, count, torch.device(device), **options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def send(self, x: Any, to: int) -> Any:
        """Send an activation; backward receives its gradient.

        Gradients that arrive for other activations are kept until their backward, so ranks may go
        backward in any order. If ``x`` requires no gradient, none is sent.

        Args:
            x: The activation.
            to: Number of the rank that calls ``receive``.

        Returns:
            A tensor without dimensions, 0. Call its ``backward()``, or add it to a loss. It
            requires a gradient if ``x`` does and gradients are on.

        Raises:
            CollectiveError: If the network fails.
            ValueError: If ``x`` has more than 32 dimensions, or is on a GPU and both directions
                have the same group.
        """
        if x.dim() > _DIMENSIONS:
            raise ValueError(f"x has {x.dim()} dimensions; allowed: at most {_DIMENSIONS}")
        _check_groups(self, x.device)
        return _Send.apply(x, self, to, x.requires_grad and torch.is_grad_enabled())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, device: Any = "cpu"
    ) -> Any:
        """Receive an activation; backward sends its gradient, if the sender needs one.

        The host waits for it.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            source: Number of the rank that calls ``send``.
            device: Where it is to be.

        Returns:
            The activation, which requires a gradient where gradients are on.

        Raises:
            CollectiveError: If the network fails, bytes are damaged, or the sender has sent another
                shape or dtype.
            ValueError: If it is to be on a GPU, and both directions have the same group.
        """
        device = torch.device(device)
        _check_groups(self, device)
        anchor = torch.empty(0, device="cpu", requires_grad=torch.is_grad_enabled())
        return _Receive.apply(anchor, self, torch.Size(shape), dtype, source, device)

    def flush(self) -> None:
        """Wait for everything that was sent, at the end of a step.

        Raises:
            CollectiveError: If the network fails.
        """
        while self._sent:
            self._sent.popleft().wait()

    def keep(self, message: Message) -> None:
        """Keep a message for ``flush``; of many the oldest is waited for.

        Args:
            message: What was sent.

        Raises:
            CollectiveError: If the network fails.
        """
        self._sent.append(message)
        if len(self._sent) > _PENDING:
            self._sent.popleft().wait()

    def _send_activation(self, x: Any, to: int, is_wanted: bool) -> tuple[int, _Gradients]:
        """Send an activation: its number, and where its gradients will be."""
        number = self._to[to]
        self.keep(self.forward._isend_described(x, to, _About(number, is_wanted), _FORWARD))
        self._to[to] += 1
        gradients = self._awaited[to, number] = _Gradients()
        return number, gradients

    def _receive_activation(
        self, shape: Any, dtype: torch.dtype, source: int, device: Any
    ) -> tuple[_About, Any]:
        """Receive the next activation of a rank, and what its header says."""
        about, x = self.forward._receive_described(source, device, _FORWARD)
        expected = self._from[source]
        if about.number != expected:
            detail = f"from rank {source}: message {about.number} came, {expected} is next"
            raise self._disagreement(self.forward, expected, detail)
        self._from[source] += 1
        if (x.shape, x.dtype) != (shape, dtype):
            detail = (
                f"from rank {source}: message {expected} is {_described(x)}; receive was called "
                f"for {dtype} of shape {tuple(shape)}"
            )
            raise self._disagreement(self.forward, expected, detail)
        return about, x

    def _send_gradient(self, gradient: Any, source: int, number: int) -> None:
        about = _About(number, is_wanted=False)
        self.keep(self.backward._isend_described(gradient, source, about, _BACKWARD))

    def _receive_gradient(self, gradients: _Gradients, number: int, to: int, device: Any) -> Any:
        """Receive the gradient of an activation; those of others that arrive before it are kept."""
        while not gradients.arrived:
            about, x = self.backward._receive_described(to, device, _BACKWARD)
            if about.number >= self._to[to]:
                detail = (
                    f"from rank {to}: a gradient of message {about.number} came where that of "
                    f"{number} is awaited; {self._to[to]} were sent to it"
                )
                raise self._disagreement(self.backward, number, detail)
            found = self._awaited.get((to, about.number))
            if found is not None:
                found.arrived.append(x)
        return gradients.arrived.popleft()

    def _disagreement(self, messages: Messages, number: int, detail: str) -> CollectiveError:
        return CollectiveError(self.rank, "recv", number, "agree", f"{messages.name} {detail}")


def connect(
    forward: str | Codec | None = "tahquant",
    backward: str | Codec | None = "tahquant",
    *,
    group: Any = None,
    backward_group: Any = None,
    seed: int = 0,
    node: int | None = None,
) -> Boundary:
    """Make what the ranks of a pipeline send by; all of them call it.

    Args:
        forward: Codec of activations; None: they travel as they are.
        backward: Codec of their gradients. The name ``"tahquant"`` means its own codec for them.
        group: The process group of the pipeline; None: the default one.
        backward_group: Another group of the same ranks, for gradients. None: the same group, which
            ``send`` and ``receive`` do not allow over NCCL, where each would wait for the other.
        seed: Seed of codecs that round at random.
        node: Ranks of a node, whose numbers in the group are consecutive: messages travel as they
            are within nodes, and encoded between nodes. None: all are encoded.

    Returns:
        The boundary.

    Raises:
        CollectiveError: On all ranks, if their codecs or nodes differ.
        TypeError: If a codec is something else.
        ValueError: If the size of what a codec encodes depends on the data, nodes would be uneven,
            or the groups differ.
    """
    there = None if forward is None else as_codec(forward)
    back = None if backward is None else as_codec(backward)
    if backward == "tahquant":
        back = Codec(replace(Tahquant(), direction="backward"))
    found = Boundary(
        Messages(there, group, seed=seed, name="forward", node=node),
        Messages(back, backward_group or group, seed=seed + 1, name="backward", node=node),
    )
    text = f"forward {there and there.spec!r}, backward {back and back.spec!r}, seed {seed}"
    if node is not None:
        text += f", nodes of {node}"
    texts: list[Any] = [None] * found.forward.world_size
    dist.all_gather_object(texts, text, group=found.forward.group)
    if len(set(texts)) > 1:
        groups = {t: [rank for rank, other in enumerate(texts) if other == t] for t in texts}
        differ = "; ".join(f"ranks {ranks}: {t}" for t, ranks in groups.items())
        raise CollectiveError(found.rank, "connect", 0, "agree", f"ranks differ: {differ}")
    return found


def _check_fixed(codec: Codec) -> None:
    """Raise ValueError for a codec whose messages have sizes that receivers do not know."""
    dtype = "float32" if "float32" in codec.dtypes else codec.dtypes[0]
    fixed = not codec.needs_base and not codec.plan((4096,), dtype).dynamic_stride
    if not fixed or not codec.round_trips or codec.spec.ruins_dense:
        raise ValueError(
            f"codec is {codec.name!r}; allowed: codecs for dense tensors whose number of bytes "
            "follows from the shape, such as 'tahquant', 'mx' and 'taco', or None"
        )


def _named(peer: int | str) -> str:
    return f"rank {peer}" if isinstance(peer, int) else peer


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


def _end(memory: Any) -> Any:
    """The last bytes of contiguous memory on the CPU, as NumPy, which autograd does not see."""
    return memory.detach().view(-1).view(torch.uint8).numpy()[-_MARK:]


def _marked(memory: Any) -> bytes | None:
    """Write random bytes to the end of memory; if they are still there, it was not filled.

    gloo does not say how much arrived. On a GPU the host would have to wait to look.
    """
    nbytes = memory.numel() * memory.element_size()
    if memory.device.type != "cpu" or nbytes < _MARK or not memory.is_contiguous():
        return None
    mark = os.urandom(_MARK)
    _end(memory)[:] = np.frombuffer(mark, np.uint8)
    return mark


def _check_groups(boundary: Boundary, device: Any) -> None:
    if device.type != "cpu" and boundary.forward.group is boundary.backward.group:
        raise ValueError(
            "backward_group is that of activations; needed on a GPU: another group of these ranks"
        )


class _Send(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, boundary: Boundary, to: int, is_wanted: bool) -> Any:
        ctx.boundary, ctx.to, ctx.device = boundary, to, x.device
        ctx.number, ctx.gradients = boundary._send_activation(x, to, is_wanted)
        return x.new_zeros(())

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: Any) -> Any:
        found = ctx.boundary._receive_gradient(ctx.gradients, ctx.number, ctx.to, ctx.device)
        return found, None, None, None


class _Receive(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Any,
        boundary: Boundary,
        shape: Any,
        dtype: torch.dtype,
        source: int,
        device: Any,
    ) -> Any:
        ctx.boundary, ctx.source = boundary, source
        ctx.about, x = boundary._receive_activation(shape, dtype, source, device)
        return x

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.about.is_wanted:
            ctx.boundary._send_gradient(gradient, ctx.source, ctx.about.number)
        return None, None, None, None, None, None
