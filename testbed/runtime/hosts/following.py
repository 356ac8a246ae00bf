"""What the nodes of another machine are told of this one's clock, and how far their instants are off at most."""

from __future__ import annotations

from netem.hostclock import HostClock


class FollowedClock(HostClock):
    """Another machine's clock, with the offset that each node there was told to take off.

    Until it is told the next one, a node's instants move off by what the clocks drift apart meanwhile. Every sample
    judges what is told at the time, so the bound is of the instants as they were written, not only of the last ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told_s: dict[str, float] = {}
        self._worst_s = 0.0

    def tell(self, node: str, instant: float) -> float:
        """What ``instant`` of this machine's clock is for ``node`` from now on, by the offset of now.

        The offset of now, and not of then: a node counts from there by a clock that has drifted since.
        """
        self._told_s[node] = self.offset_s
        return instant + self.offset_s

    def forget(self, node: str) -> None:
        """It has ended."""
        self._told_s.pop(node, None)

    def add(self, t0_s: float, t1_s: float, t2_s: float) -> None:
        """As ``HostClock.add``."""
        super().add(t0_s, t1_s, t2_s)
        for told_s in self._told_s.values():
            self._worst_s = max(self._worst_s, abs(self.offset_s - told_s) + self.uncertainty_s)

    @property
    def uncertainty_of_nodes_s(self) -> float:
        """How far nodes' instants were off at most, at any time; no less than ``uncertainty_s``."""
        return max(self._worst_s, self.uncertainty_s)
