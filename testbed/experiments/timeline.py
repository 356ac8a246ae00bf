"""The links of an experiment over time: which link is in force when, and when a cut link is up again."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from policies.links import Link, Pair
from testbed.experiments.experiment import Experiment, NetworkChange

_TO_ITSELF = Link(0.0, math.inf)
"""The link of a server to itself: as two hops in a row it sends nothing over the network."""


class Timeline:
    """Looks up the links of ``experiment`` at instants in scenario seconds.

    ``changes`` (in the order of time) default to those that the scenario plans.
    """

    def __init__(self, experiment: Experiment, changes: Sequence[NetworkChange] | None = None) -> None:
        self._base = experiment.network.links
        self._since_s: dict[Pair, list[float]] = {}
        self._links: dict[Pair, list[Link]] = {}
        for change in experiment.network.changes if changes is None else changes:
            for pair, link in change.links.items():
                self._since_s.setdefault(pair, []).append(change.at_s)
                self._links.setdefault(pair, [self._base[pair]]).append(link)

    def link(self, pair: Pair, at_s: float) -> Link:
        """Return the link of ``pair`` in force at ``at_s``."""
        if pair[0] == pair[1]:
            return _TO_ITSELF
        since_s = self._since_s.get(pair)
        return self._base[pair] if since_s is None else self._links[pair][bisect_right(since_s, at_s)]

    def is_cut(self, pair: Pair, at_s: float) -> bool:
        """Whether the link of ``pair`` carries nothing at ``at_s``."""
        return self.link(pair, at_s).loss_ratio >= 1

    def through_at_s(self, pair: Pair, at_s: float, n_wire_bytes: int, arrived_at_s: float) -> float:
        """Return when a message of ``n_wire_bytes`` with all headers that begins at ``at_s`` has left on ``pair``.

        The rate may change meanwhile.
        A cut holds what is left of it, but not one that ends only after it ``arrived_at_s``.
        """
        since_s, n_bits = self._since_s.get(pair, ()), 8.0 * n_wire_bytes
        for n in range(bisect_right(since_s, at_s), len(since_s)):
            next_s, link = since_s[n], self._links[pair][n]
            if link.loss_ratio < 1 or next_s > arrived_at_s:
                if at_s + n_bits / link.rate_bps <= next_s:
                    return at_s + n_bits / link.rate_bps
                n_bits -= (next_s - at_s) * link.rate_bps
            at_s = next_s
        return at_s + n_bits / self.link(pair, at_s).rate_bps

    def up_at_s(self, pair: Pair, at_s: float) -> float:
        """Return the first instant from ``at_s`` on when ``pair`` is not cut; infinite if there is none."""
        since_s = self._since_s.get(pair)
        if since_s is None:
            return at_s if self.link(pair, at_s).loss_ratio < 1 else math.inf
        links = self._links[pair]
        first = bisect_right(since_s, at_s)
        if links[first].loss_ratio < 1:
            return at_s
        later = (since_s[i - 1] for i in range(first + 1, len(links)) if links[i].loss_ratio < 1)
        return next(later, math.inf)
