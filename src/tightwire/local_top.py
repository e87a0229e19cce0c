"""Which blocks a rank proposes to the codec omnireduce, so that those agreed on fill its budget.

A step::

    tops = LocalTop(codec.plan(x.shape, x.dtype))       # one for each tensor, kept between steps
    stats = all_reduce_max(tops.propose(codec.measure(x))) tops.update(stats) buf = codec.encode(x,
    stats=stats)

Source: DynamiQ, appendix C, equation 1. specs/omnireduce.md, "Encoding", says what happens to fewer
or more proposals than the buffer has blocks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import arrays
from .codecs.common.base import Plan
from .codecs.common.float_mode import default_floats
from .codecs.omnireduce import Omnireduce, largest

Floats = npt.NDArray[np.float32]


class LocalTop:
    """How many of its largest blocks each rank proposes, adapted from step to step.

    ``k`` starts as ``target``, the number of blocks that a buffer has memory for. The union of the
    proposals is led to it: ``k = momentum * k + (1 - momentum) * k * target / union`` (DynamiQ,
    appendix C, equation 1), at least 1 and at most the number of blocks. Ranks that update with the
    same statistics have the same ``k``.

    Args:
        plan: The plan of the tensor, with the codec omnireduce.
        momentum: Weight of the old ``k``, 0 to 1.

    Raises:
        ValueError: If the plan is not of omnireduce, or ``momentum`` is not from 0 to 1.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> from tightwire.local_top import LocalTop
        >>> codec = tw.codec("omnireduce", bits=4)
        >>> x = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)
        >>> tops = LocalTop(codec.plan(x.shape, x.dtype))
        >>> int(np.count_nonzero(tops.propose(codec.measure(x))))
        64
    """

    def __init__(self, plan: Plan, momentum: float = 0.8) -> None:
        spec = plan.codec
        if not isinstance(spec, Omnireduce):
            raise ValueError(f"the plan is of {spec.name}; allowed: omnireduce")
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum is {momentum!r}; allowed: 0 to 1")
        self.momentum = momentum
        self.blocks = spec.blocks(plan.nelem)
        slots, ranges = spec.slots(plan.chunk_nelem), map(plan.chunk_range, range(plan.chunks))
        self.target = sum(min(slots, spec.blocks(hi - lo)) for lo, hi in ranges)
        self.k = float(self.target)

    @default_floats()
    def propose(self, norms: Any) -> Floats:
        """The norms of the ``k`` largest blocks, with zeros for the others.

        Args:
            norms: The result of ``Codec.measure``: float32, shape ``(blocks,)``.

        Returns:
            float32, shape ``(blocks,)``. Among equal norms the first are kept.

        Raises:
            ValueError: If there is another number of norms.
        """
        given = self._checked(norms)
        found = np.zeros_like(given)
        kept = largest(given, round(self.k))
        found[kept] = given[kept]
        return found

    @default_floats()
    def update(self, agreed: Any) -> int:
        """Adapt ``k`` to the maximum of the proposals of all ranks.

        A union without blocks changes nothing.

        Args:
            agreed: The elementwise maximum of all proposals: float32, shape ``(blocks,)``.

        Returns:
            The number of blocks in the union.

        Raises:
            ValueError: If there is another number of norms.
        """
        union = int(np.count_nonzero(self._checked(agreed)))
        if union:
            wanted = self.k * self.target / union
            k = self.momentum * self.k + (1 - self.momentum) * wanted
            self.k = min(max(k, 1.0), float(self.blocks))
        return union

    def _checked(self, norms: Any) -> Floats:
        found = arrays.host_array(norms)
        if found.dtype != np.float32 or found.shape != (self.blocks,):
            given = f"{found.dtype}{list(found.shape)}"
            raise ValueError(f"norms are {given}; allowed: float32[{self.blocks}]")
        return found
