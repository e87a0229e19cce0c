# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What kernels take of a plan and of a call that the driver does not launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from .base import Plan
from .frame_triton import frame_of
from .launch_triton import Variant, options


class Selection(NamedTuple):
    """What `decode` of a GPU module is asked for; `tightwire.gpu` says what it means."""

    start: int = 0
    stop: Any = None
    check: bool = True
    dynamic_starts: torch.Tensor | None = None
    store: bool = True
    add: bool = False
    planned: bool = True

    @classmethod
    def of(cls, plan: Plan, options: dict[str, Any]) -> Selection:
        """What `options` ask for; without a `stop`, to the end."""
        found = cls(**options)
        return found if found.stop is not None else found._replace(stop=plan.nelem)

    def check_frame(self, plan: Plan, src, sums, status, summed: bool) -> None:
        """See `Frame.check`."""
        frame_of(plan).check(
            src,
            sums,
            status,
            self.start,
            self.stop,
            whole=self.check,
            summed=summed,
            planned=self.planned,
        )


@functools.cache
def variant_of(kernel, warps: int = 4, **values: int | bool) -> Variant:
    """A kernel with its warps and constexpr values."""
    return Variant(kernel, options(warps), **values)


class Launches:
    """What kernels take of a plan, put together once; codecs add their own.

    Attributes:
        spec: The codec.
        sizes: Elements of the tensor, and of a chunk.
        head: The header, in words.
        static: The first static part, and the distance of static parts, in units of 128 bytes: so
            kernels know the alignment.
        second: Where the second section starts in a static part, in such units.
        parts: Bytes of the parts of the workspace.
    """

    spec: Any
    parts: Sequence[int] = ()

    def __init__(self, plan: Plan) -> None:
        self.spec = plan.codec
        self.sizes = plan.nelem, plan.chunk_nelem
        self.head = plan.header.nbytes // 8
        self.static = plan.static_offset // 128, plan.static_stride // 128
        self.second = plan.layout.sections[0].nbytes // 128

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """That of a plan, made once."""
        found = plan.__dict__.get("_launches")
        if not isinstance(found, cls):
            found = plan.__dict__["_launches"] = cls(plan)
        return found

    def split(self, scratch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the workspace."""
        split: tuple[torch.Tensor, ...] = scratch[: sum(self.parts)].split(list(self.parts))
        return split
