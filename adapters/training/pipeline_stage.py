"""A stage of ``torch.distributed.pipelining`` whose activations and gradients travel encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from .pipeline import Boundary, Messages


class Stage(PipelineStage):  # type: ignore[misc]
    """A ``PipelineStage`` that sends encoded tensors; ``Boundary.stage`` makes it.

    All schedules work as they are: in place of a tensor they send its encoded bytes, and receive
    those, which the stage decodes before it computes. Tensors between stages of one rank or
    node, and the shapes that stages tell each other first, are not encoded.

    Args:
        boundary: What encodes.
        module: What the stage computes.
        index: Number of the stage, from 0.
        count: Number of stages.
        device: Where it computes.
        **options: Other arguments of ``PipelineStage``, except ``group``.

    Raises:
        CollectiveError: By schedules, if bytes are damaged.
    """

    def __init__(
        self, boundary: Boundary, module: Any, index: int, count: int, device: Any, **options: Any
    ) -> None:
        super().__init__(module, index, count, device, group=boundary.forward.group, **options)
        self._boundary = boundary
        #: Encoded bytes under way, and the tensors that they are for, by direction and microbatch.
        self._receiving: dict[tuple[str, int], list[tuple[Any, Any, int]]] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """What PyTorch sends of a microbatch, encoded."""
        return _encoded(self._boundary.forward, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """What PyTorch sends of a microbatch's gradients, encoded."""
        return _encoded(self._boundary.backward, super().get_bwd_send_ops(bwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """What PyTorch receives of a microbatch, as bytes."""
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        return self._receive(self._boundary.forward, ("forward", fwd_chunk_id), ops)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """What PyTorch receives of a microbatch's gradients, as bytes."""
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._receive(self._boundary.backward, ("backward", bwd_chunk_id), ops)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Decode what was received, and compute."""
        self._decode(self._boundary.forward, ("forward", fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Decode the gradients that were received, and compute those of inputs."""
        self._decode(self._boundary.backward, ("backward", bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def _receive(self, messages: Messages, which: tuple[str, int], ops: list[Any]) -> list[Any]:
        held = self._receiving[which] = []

        def bytes_of(op: Any) -> Any:
            memory = messages.memory_for(op.tensor, op.group_peer)
            if memory is None:
                return op.tensor
            held.append((memory, op.tensor, op.peer))
            return memory

        return _replaced(ops, bytes_of)

    def _decode(self, messages: Messages, which: tuple[str, int]) -> None:
        for memory, out, peer in self._receiving.pop(which, []):
            source = f"global rank {peer}, stage {self.stage_index}, microbatch {which[1]}"
            messages.decode(memory, out, source)


def _encoded(messages: Messages, ops: list[Any]) -> list[Any]:
    return _replaced(ops, lambda op: messages.encode(op.tensor, op.group_peer))


def _replaced(ops: list[Any], tensor_of: Callable[[Any], Any]) -> list[Any]:
    """The same messages with other tensors."""
    return [dist.P2POp(op.op, tensor_of(op), op.peer, op.group, op.tag) for op in ops]
