"""Which parameters go by sketch: TAGC (EuroMLSys '25), section 3.2, "Selective Compressing"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Parts of names that queries, keys and values have in common models.
ATTENTION = (
    r"(^|[._])(qkv|query_key_value|in_proj|c_attn|[qkv]_?proj|w[qkv]|query|key|value)([._]|$)"
)


@dataclass(frozen=True)
class Rule:
    """Parameters of two dimensions or more with `nelem` elements or more, called so.

    `include` and `exclude` are regular expressions, searched for in the name. By default all but
    the queries, keys and values of attention: feed-forward layers, embeddings, the head, and
    the projection after attention, as in the paper.
    """

    include: str = ""
    exclude: str | None = ATTENTION
    nelem: int = 1 << 16
    dimensions: int = 2

    def __call__(self, name: str, shape: Sequence[int]) -> bool:
        """True if the parameter of this name and (unsharded) shape goes by sketch."""
        if len(shape) < self.dimensions or math.prod(shape) < self.nelem:
            return False
        if self.exclude is not None and re.search(self.exclude, name):
            return False
        return re.search(self.include, name) is not None
