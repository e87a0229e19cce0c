"""Selection of the parameters that are sent by sketch. TAGC (EuroMLSys '25), section 3.2."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...planning import integer

#: What queries, keys and values are called, alone, together and in two steps of low rank.
_INPUT = (
    r"(?:(?:w|to|linear|lin|fc|proj)_?)?"
    r"(?:(?:q|k|v|qk|kv|qkv|query|key|value|query_key_value)(?:_[ab])?|in(?=_proj)|c_attn)"
    r"(?:_?(?:proj|projection|lin|linear|layer|net))?(?:_with_mqa)?(?:_weight)?"
)
#: What the projection after attention is called, within the module of attention.
_OUTPUT = (
    r"(?:attn_|attention_)?"
    r"(?:(?:(?:w|to|linear|lin|fc|proj)_?)?(?:o|out|output)(?:_?(?:proj|projection|lin|linear|net))?"
    r"|c_proj|proj|projection|dense)"
)
#: Behind a layer's own name, that of its tensor, and in a Sequential a number.
_END = r"(?:\.\d+)*(?:\.[^.\d][^.]*)?$"
#: Layers so called, or in a module of attention and not the projection behind it.
ATTENTION = (
    rf"(?i)^(?:.*\.)?{_INPUT}{_END}"
    rf"|^(?!(?:.*\.)?{_OUTPUT}{_END})(?:.*\.)?[^.]*(?:attn|attention)[^.]*\."
)


@dataclass(frozen=True)
class Rule:
    """Selects parameters by name, size and number of dimensions.

    The default selects all large matrices except those of attention: what is named like queries,
    keys and values ("q", "to_kv", "q_proj", "in_proj_weight"), and all in a module whose name has
    "attn" or "attention", apart from the projection after it ("o_proj", "c_proj", "dense"). That
    leaves feed-forward layers, embeddings, the head and that projection.

    Source: TAGC (EuroMLSys 2025), section 3.2, "Selective Compressing".

    Args:
        include: Regular expression that is searched for in the name.
        exclude: Regular expression that must not be found in the name; None: no name is excluded.
        nelem: Least number of elements.
        dimensions: Number of dimensions; None: any.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a regular expression is not valid, or a number is negative.
    """

    include: str = ""
    exclude: str | None = ATTENTION
    nelem: int = 1 << 16
    dimensions: int | None = 2

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for what is not allowed."""
        for field, pattern in (("include", self.include), ("exclude", self.exclude)):
            if pattern is None and field == "exclude":
                continue
            if not isinstance(pattern, str):
                none = ", or None" if field == "exclude" else ""
                raise TypeError(f"{field} is {pattern!r}; allowed: a regular expression{none}")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"{field} is {pattern!r}, {error}; allowed: regular expressions"
                ) from error
        if integer("nelem", self.nelem) < 0:
            raise ValueError(f"nelem is {self.nelem}; allowed: at least 0")
        if self.dimensions is not None and integer("dimensions", self.dimensions) < 0:
            raise ValueError(f"dimensions is {self.dimensions}; allowed: at least 0, or None")

    def __call__(self, name: str, shape: Sequence[int]) -> bool:
        """True if the parameter of this name and (unsharded) shape goes by sketch."""
        if self.dimensions not in (None, len(shape)) or math.prod(shape) < self.nelem:
            return False
        if self.exclude is not None and re.search(self.exclude, name):
            return False
        return re.search(self.include, name) is not None
