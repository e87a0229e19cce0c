# mypy: allow-untyped-decorators
"""PyTorch custom operators: `torch.ops.tightwire.encode_into` and `decode_into`.

Import this module to register them. They work on host and CUDA tensors, under torch.compile, and
on CUDA without waiting for the device.
"""

from __future__ import annotations

import torch

from .arrays import describe
from .buffer import Buffer
from .codec import codec as codec_named
from .codec import decode


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
    """Encode `x` into `out`: uint8, contiguous, on the device of `x`, at least `plan.nbytes`.

    A graph may send the first `plan.nbytes` bytes of `out` as they are: what encoding leaves alone
    of the dynamic slots is zeroed. With a `dynamic_capacity` that is little. The plan is
    `tightwire.codec(codec).plan(x.shape, x.dtype, chunks=..., ...)`. Raises TypeError or ValueError
    for bad calls.
    """
    used = codec_named(codec)
    plan = used.plan(
        x.shape, x.dtype, chunks=chunks, dynamic_capacity=dynamic_capacity, checksum=checksum
    )
    if out.is_cuda and out.dtype == torch.uint8 and out.is_contiguous():
        # How much of a slot is used is known on the device alone.
        from .device import check_apart

        check_apart("the array that is encoded", x, "out", out)
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
    """Decode `src` into `out`; returns a status, int64, shape (1,).

    `src` is uint8 on the device of `out` with what `encode_into` writes for a tensor of `out`'s
    shape and dtype and the same arguments. On the host damage is raised as FormatError and the
    status is 0. On a GPU nothing is raised and nothing waits: a status other than 0 says that `src`
    is damaged and `out` undefined, and `problem` of the module tightwire.codecs.device gives the
    FormatError. Raises ValueError if `out` requires grad.
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
