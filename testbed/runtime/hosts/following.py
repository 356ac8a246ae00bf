"""The clock of another machine, the offsets sent to its nodes, and the largest error of their instants."""

from __future__ import annotations

from netem.hostclock import HostClock


class FollowedClock(HostClock):
    """Another machine's clock, with the offset that each node there was last sent.

    Until it is sent the next one, a node's instants go wrong by as much as the clocks drift apart. Every
    sample checks the offsets that are in use at that time, so the bound holds for all instants that nodes
    wrote, not only for the last ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told_s: dict[str, float] = {}
        self._worst_s = 0.0

    def instant_for(self, node: str, instant: float) -> float:
        """Convert ``instant`` of this machine's clock for ``node``, and record the offset that it is sent.

        The present offset is used, not that at ``instant``: the node's clock has drifted since, and counts
        from there.
        """
        self._told_s[node] = self.offset_s
        return instant + self.offset_s

    def forget(self, node: str) -> None:
        """Drop a node that has ended."""
        self._told_s.pop(node, None)

    def add(self, t0_s: float, t1_s: float, t2_s: float) -> None:
        """See ``HostClock.add``; also checks the offsets that nodes use."""
        super().add(t0_s, t1_s, t2_s)
        for told_s in self._told_s.values():
            self._worst_s = max(self._worst_s, abs(self.offset_s - told_s) + self.uncertainty_s)

    @property
    def uncertainty_of_nodes_s(self) -> float:
        """Largest error in seconds of nodes' instants at any time; at least ``uncertainty_s``."""
        return max(self._worst_s, self.uncertainty_s)
