# mypy: allow-untyped-decorators
"""PyTorch custom operators: ``torch.ops.tightwire.encode_into`` and ``decode_into``.

Import this module to register them. They work on host and CUDA tensors, under ``torch.compile``,
and on CUDA without waiting for the device.

Example:
    >>> import torch
    >>> import tightwire as tw
    >>> import tightwire.torch_ops
    >>> x = torch.linspace(-1, 1, 4096)
    >>> wire = torch.empty(tw.codec("mx").plan(x.shape, x.dtype).nbytes, dtype=torch.uint8)
    >>> torch.ops.tightwire.encode_into(x, wire, "mx")
    >>> y = torch.empty_like(x)
    >>> int(torch.ops.tightwire.decode_into(wire, y, "mx"))
    0
"""

from __future__ import annotations

import torch

from .arguments import ENCODED, check_out
from .arrays import describe
from .buffer import Buffer
from .codec import codec as codec_named
from .decoding import decode


@torch.library.custom_op(
    "tightwire::encode_into",
    mutates_args={"out"},
    schema="(Tensor x, Tensor(a!) out, str codec, int chunks=1, int? dynamic_capacity=None, "
    "bool checksum=True) -> ()",
)
def encode_into(
    x: torch.Tensor,
    out: torch.Tensor,
    codec: str,
    chunks: int = 1,
    dynamic_capacity: int | None = None,
    checksum: bool = True,
) -> None:
    """Encode a tensor into memory that the caller has allocated.

    The unused bytes of the dynamic slots are zeroed, so that a graph may send the first
    ``plan.nbytes`` bytes of ``out`` as they are; with a ``dynamic_capacity`` the slots are small.
    The plan is ``tightwire.codec(codec).plan(x.shape, x.dtype, chunks=..., dynamic_capacity=...,
    checksum=...)``.

    Args:
        x: The tensor, on the host or a CUDA device.
        out: uint8, contiguous, on the device of ``x``, at least ``plan.nbytes`` bytes.
        codec: Name of the codec, with default parameters.
        chunks: Number of chunks.
        dynamic_capacity: Bytes of each chunk's dynamic slot; None: enough for any data.
        checksum: Whether the buffer has checksums.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is not allowed, or ``out`` does not fit.
    """
    used = codec_named(codec)
    plan = used.plan(
        x.shape, x.dtype, chunks=chunks, dynamic_capacity=dynamic_capacity, checksum=checksum
    )
    if out.is_cuda and out.dtype == torch.uint8 and out.is_contiguous():
        # How much of a slot is used is known on the device alone.
        check_out(plan, out, {ENCODED: x})
        out.view(-1)[plan.dynamic_offset : plan.nbytes].zero_()
    buffer = used.encode(
        x, out=out, chunks=chunks, dynamic_capacity=dynamic_capacity, checksum=checksum
    )
    if buffer._memory is None:
        buffer.zero_slack()


@encode_into.register_fake
def _(
    x: torch.Tensor,
    out: torch.Tensor,
    codec: str,
    chunks: int = 1,
    dynamic_capacity: int | None = None,
    checksum: bool = True,
) -> None:
    return None


@torch.library.custom_op(
    "tightwire::decode_into",
    mutates_args={"out"},
    schema="(Tensor src, Tensor(a!) out, str codec, int chunks=1, int? dynamic_capacity=None, "
    "bool checksum=True) -> Tensor",
)
def decode_into(
    src: torch.Tensor,
    out: torch.Tensor,
    codec: str,
    chunks: int = 1,
    dynamic_capacity: int | None = None,
    checksum: bool = True,
) -> torch.Tensor:
    """Decode the bytes of ``encode_into`` into a tensor that the caller has allocated.

    Args:
        src: uint8 on the device of ``out``: what ``encode_into`` writes for a tensor of the shape
            and dtype of ``out`` and the same arguments.
        out: The tensor to fill.
        codec: Name of the codec.
        chunks: Number of chunks.
        dynamic_capacity: Bytes of each chunk's dynamic slot.
        checksum: Whether the buffer has checksums.

    Returns:
        A status, int64, shape ``(1,)``. On a GPU nothing is raised for damage and nothing waits. A
        status other than 0 means that ``src`` is damaged and ``out`` undefined;
        ``tightwire.codecs.common.frame_triton.problem`` makes the FormatError of it. On the host it
        is 0.

    Raises:
        FormatError: If ``src`` is damaged and on the host.
        TypeError: If an argument has a wrong type.
        ValueError: If ``out`` requires grad, or a value is not allowed.
    """
    if out.requires_grad:
        # Whether gradients are off is not known within an operator.
        raise ValueError("out requires grad. Allowed: out.detach(), within torch.no_grad()")
    info = describe(out)
    plan = codec_named(codec).plan(
        info.shape, info.dtype, chunks=chunks, dynamic_capacity=dynamic_capacity, checksum=checksum
    )
    buffer = Buffer.wrap(plan, src)
    decode(buffer, out=out)
    if buffer._memory is None:
        return torch.zeros(1, dtype=torch.int64, device=out.device)
    return buffer._memory.status


@decode_into.register_fake
def _(
    src: torch.Tensor,
    out: torch.Tensor,
    codec: str,
    chunks: int = 1,
    dynamic_capacity: int | None = None,
    checksum: bool = True,
) -> torch.Tensor:
    return src.new_empty((1,), dtype=torch.int64)
