"""The algorithms of sums, by name: the one table of them, and which one makes a sum."""

from __future__ import annotations

from ...formats.dtypes import DType
from .compressed import Compressed
from .hops import HopSums
from .in_network import InNetworkSums
from .native import Native
from .session import TOPOLOGIES, Topology
from .statistics import Statistics
from .steps import Steps
from .sums import SumAlgorithm
from .two_shot import TwoShot


class SumAlgorithms:
    """The algorithms of one communicator.

    To add one, write a ``SumAlgorithm``, name it in ``session.Topology``, and put it in the table.
    """

    def __init__(
        self, steps: Steps, compressed: Compressed, native: Native, statistics: Statistics
    ) -> None:
        self._session = steps.session
        hops = HopSums(steps, statistics)
        self._table: dict[Topology, SumAlgorithm] = {
            "two-shot": TwoShot(steps, compressed, native),
            "ring": hops,
            "butterfly": hops,
            "in-network": InNetworkSums(steps, statistics),
        }

    def __getitem__(self, topology: Topology) -> SumAlgorithm:
        return self._table[topology]

    def names(self) -> tuple[Topology, ...]:
        """What the table has."""
        return tuple(self._table)

    def check(self, topology: Topology) -> None:
        """Raise ValueError if the codec or the group does not sum like this."""
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology is {topology!r}; allowed: {TOPOLOGIES}")
        session, codec = self._session, self._session.codec
        allowed = [name for name, algorithm in self._table.items() if algorithm.allowed]
        if topology not in allowed:
            why = "" if session.fixed else ", whose sizes depend on the data"
            raise ValueError(
                f"topology is {topology!r}, codec {codec.name!r}{why}; allowed: {allowed}"
            )
        most = self._table[topology].max_ranks
        if most is not None and session.size > most:
            raise ValueError(
                f"{codec.spec!r} adds up at most {most} ranks; the group has {session.size}"
            )

    def chosen(self, topology: Topology, sent: DType, nelem: int) -> Topology:
        """What sums parts of `nelem` elements that travel as `sent`, where `topology` is asked for.

        What the codec does not compress, or the algorithm does not sum, takes two-shot.
        """
        coded = sent.is_float and sent.name in self._session.codec.dtypes
        return topology if coded and self._table[topology].sums(sent, nelem) else "two-shot"
