"""Which blocks a rank proposes to the codec omnireduce, so that as many are agreed on as fit.

    tops = LocalTop(codec.plan(x.shape, x.dtype))       # one for each tensor, kept between steps
    stats = all_reduce_max(tops.propose(codec.measure(x)))
    tops.update(stats)
    buf = codec.encode(x, stats=stats)

After DynamiQ, appendix C, equation 1. specs/omnireduce.md, "Encoding" says what encoding makes of
fewer or more proposals than there are slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import arrays
from .codecs.base import Plan
from .codecs.float_mode import default_floats
from .codecs.omnireduce import Omnireduce, largest

Floats = npt.NDArray[np.float32]


class LocalTop:
    """How many of its largest blocks each rank proposes; adapted from step to step.

    `k` starts as the number of slots, `target`, which the union of what ranks propose is led to:
    `k = momentum * k + (1 - momentum) * k * target / union`. It is at least 1 and at most the
    number of blocks. Ranks that update with the same stats have the same `k`.
    """

    def __init__(self, plan: Plan, momentum: float = 0.8) -> None:
        """For the tensors of a plan.

        Raises ValueError if it is not of omnireduce or `momentum` is not from 0 to 1.
        """
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
        """`norms` (of `Codec.measure`), float32, all but the largest k, rounded, set to 0.

        Of equal ones the first stay. Raises ValueError for another number of norms.
        """
        given = self._checked(norms)
        found = np.zeros_like(given)
        kept = largest(given, round(self.k))
        found[kept] = given[kept]
        return found

    @default_floats()
    def update(self, agreed: Any) -> int:
        """Adapt k to the maximum of what ranks proposed; the number of blocks in their union.

        A union of none, of zeros, changes nothing. Raises ValueError for another number of norms.
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
