"""Which calls of a process group are compressed, and how."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from ...codec import Codec, as_codec
from ...codec import codec as make_codec
from ...formats.dtypes import BY_NAME
from ...planning import integer
from ..transports.base import Transport
from ..transports.threads import connect
from .communicator import Communicator
from .measurements_file import absolute
from .path_selection import Algorithm
from .session import Topology
from .sums import wire_dtype
from .torch_backend import VARIABLE

#: Calls that a rule may name.
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_v", "broadcast")
#: Those of a rule that names none. Ranks of an unequal all-to-all do not know one another's sizes.
DEFAULT_OPS = tuple(op for op in OPS if op != "all_to_all_v")
_SUMS = ("all_reduce", "reduce_scatter")

#: What a policy may be called in place of JSON: the default one.
LOSSLESS = "lossless"


@dataclass(frozen=True)
class Rule:
    """Calls of a process group, and the codec that they are compressed with.

    A rule is for calls that match all of ``ops``, ``dtypes``, ``groups`` and ``min_bytes``. Only
    tensors of a dtype that the codec compresses match.

    Args:
        codec: A codec or its name; None: such calls are not compressed.
        ops: Names of ``OPS``. Empty: all except ``"all_to_all_v"`` (all-to-alls with lists of
            splits), whose rule is for all sizes; on the CPU that of ``"all_to_all"`` too, if it
            names both: ranks may then differ in whether they give splits. A rule that loses
            anything must name its calls.
        dtypes: Names of dtypes. Empty: all that the codec compresses.
        groups: Patterns of group descriptions, as in file names. ``"default_pg"`` is the default
            group, ``"mesh_dp"`` the dimension ``"dp"`` of a DeviceMesh; other groups have the
            ``group_desc`` of ``new_group``, ``"undefined"`` if none was given.
        min_bytes: Least number of bytes of a rank's input. Of coalesced tensors their sum.
        wire: ``"bfloat16"`` or ``"float16"``: dtype that wider floats are rounded to before they
            travel in sums. None: their own.
        algorithm: As in ``tightwire.Communicator``.
        topology: As in ``tightwire.Communicator``.
        measurements: As in ``tightwire.Communicator``. It becomes an absolute path.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is not allowed.
    """

    codec: str | Codec | None = "zipccl"
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("*",)
    min_bytes: int = 1 << 20
    wire: str | None = None
    algorithm: Algorithm = "compressed"
    topology: Topology = "two-shot"
    #: Ranks that compare their rules may have other paths.
    measurements: str | os.PathLike[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check what is given."""
        for name, allowed in (("ops", OPS), ("dtypes", tuple(BY_NAME)), ("groups", None)):
            object.__setattr__(self, name, _names(name, getattr(self, name), allowed))
        if integer("min_bytes", self.min_bytes) < 0:
            raise ValueError(f"min_bytes is {self.min_bytes}; allowed: at least 0")
        if self.codec is None:
            return
        found = as_codec(self.codec)
        object.__setattr__(self, "codec", found)
        self.communicator(connect(1)[0], "").close()
        if self.measurements is not None:
            object.__setattr__(self, "measurements", absolute(self.measurements))
        wire_dtype(self.wire, BY_NAME["float32"], 1)
        if not self.ops and (not found.lossless or self.wire is not None):
            lossy = found.name if not found.lossless else f"wire {self.wire}"
            raise ValueError(
                f"ops is empty, and {lossy} loses data; allowed with it: some of {OPS}"
            )
        if self.wire is not None and not set(self.ops) <= set(_SUMS):
            raise ValueError(f"ops is {self.ops}; allowed with wire: {_SUMS}")

    def communicator(self, transport: Transport, name: str) -> Communicator:
        """Make what compresses calls of this rule; all ranks of the transport do so together.

        Args:
            transport: Moves the bytes.
            name: As in ``tightwire.Communicator``.

        Raises:
            CollectiveError: If ranks differ.
            ValueError: If the codec is not for collectives, or not for the topology.
        """
        return Communicator(
            transport,
            self.codec or "raw",
            algorithm=self.algorithm,
            topology=self.topology,
            measurements=self.measurements,
            name=name,
        )

    def applies(self, op: str, dtype: str, nbytes: int, group: str) -> bool:
        """Tell whether the rule is for a call.

        Args:
            op: Name of the call, of ``OPS``.
            dtype: Name of the dtype.
            nbytes: Bytes of this rank's input.
            group: Description of the group.

        Returns:
            True if it is.
        """
        if isinstance(self.codec, Codec) and dtype not in self.codec.dtypes:
            return False
        return (
            op in (self.ops or DEFAULT_OPS)
            and (not self.dtypes or dtype in self.dtypes)
            and (nbytes >= self.min_bytes or op == "all_to_all_v")
            and any(fnmatchcase(group, pattern) for pattern in self.groups)
        )


@dataclass(frozen=True)
class Policy:
    """Rules, of which the first that is for a call decides; calls without a rule stay as they are.

    Args:
        rules: The rules. The default compresses floats losslessly from 1 MiB on.

    Raises:
        TypeError: If a rule is something else.
    """

    rules: tuple[Rule, ...] = field(default_factory=lambda: (Rule(),))

    def __post_init__(self) -> None:
        """Check what is given."""
        if isinstance(self.rules, str) or not isinstance(self.rules, Iterable):
            raise TypeError(f"rules is {self.rules!r}; allowed: a list of Rule")
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"a rule is {rule!r}; allowed: Rule")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Make a policy of JSON: a list of objects with the arguments of ``Rule``.

        ``"params"`` are the parameters of a codec.

        Args:
            text: Such as ``[{"codec": "dynamiq", "params": {"bits": 5}, "ops": ["all_reduce"]}]``;
                or ``lossless``, the default policy.

        Raises:
            TypeError: If a value has a wrong type.
            ValueError: If it is not JSON, or a value is not allowed.
        """
        if text == LOSSLESS:
            return cls()
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"the policy {text!r} is not JSON: {error}; allowed: JSON, or {LOSSLESS!r}"
            ) from error
        if not isinstance(found, list):
            raise TypeError(f"the policy is {found!r}; allowed: a list of objects")
        return cls(tuple(_rule(entry) for entry in found))

    @classmethod
    def from_environment(cls) -> Policy:
        """The policy of the environment variable ``TIGHTWIRE_POLICY``, or the default.

        Raises:
            TypeError: If a value in it has a wrong type.
            ValueError: If it is not JSON, or a value in it is not allowed.
        """
        text = os.environ.get(VARIABLE, "")
        return cls.parse(text) if text else cls()

    def number(self, op: str, dtype: str, nbytes: int, group: str) -> int | None:
        """Find the rule of a call.

        Args:
            op: Name of the call, of ``OPS``.
            dtype: Name of the dtype.
            nbytes: Bytes of this rank's input.
            group: Description of the group.

        Returns:
            Its number from 0, or None if the call is not compressed.
        """
        for number, rule in enumerate(self.rules):
            if rule.applies(op, dtype, nbytes, group):
                return None if rule.codec is None else number
        return None

    def all_to_alls(self, dtype: str, group: str) -> tuple[int | None, int | None]:
        """Find the rules of all-to-alls of any size, without splits and with splits.

        Args:
            dtype: Name of the dtype.
            group: Description of the group.

        Returns:
            The number of each, or None if such calls are not compressed.
        """
        return (
            self.number("all_to_all", dtype, sys.maxsize, group),
            self.number("all_to_all_v", dtype, 0, group),
        )


def _rule(entry: Any) -> Rule:
    if not isinstance(entry, Mapping):
        raise TypeError(f"a rule is {entry!r}; allowed: an object")
    values = dict(entry)
    params = values.pop("params", {})
    allowed = [*(known.name for known in fields(Rule)), "params"]
    if unknown := sorted(set(entry) - set(allowed)):
        raise ValueError(f"a rule has {unknown}; allowed: {allowed}")
    if params:
        values["codec"] = make_codec(values.get("codec", "zipccl"), **params)
    return Rule(**values)


def _names(what: str, values: Any, allowed: tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{what} is {values!r}; allowed: a list of names")
    found = tuple(values)
    for value in found:
        if not isinstance(value, str):
            raise TypeError(f"an entry of {what} is {value!r}; allowed: names")
        if allowed is not None and value not in allowed:
            raise ValueError(f"an entry of {what} is {value!r}; allowed: {allowed}")
    return found
