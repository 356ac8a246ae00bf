"""The links of an experiment over time: which is in force when, and when one that is cut is up again."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from testbed.scenario.experiment import Experiment, Link, NetworkChange

Pair = tuple[str, str]
_TO_ITSELF = Link(0.0, math.inf)
"""A server that forwards to itself, as the next hop of a chain, sends nothing over any link."""


class Timeline:
    """Looks up the links of ``experiment`` at instants; scenario seconds.

    Its ``changes`` happen as planned unless others are given, in the order of time.
    """

    def __init__(self, experiment: Experiment, changes: Sequence[NetworkChange] | None = None) -> None:
        self._base = experiment.links
        self._since_s: dict[Pair, list[float]] = {}
        self._links: dict[Pair, list[Link]] = {}
        for change in experiment.changes if changes is None else changes:
            for pair, link in change.links.items():
                self._since_s.setdefault(pair, []).append(change.at_s)
                self._links.setdefault(pair, [self._base[pair]]).append(link)

    def link(self, pair: Pair, at_s: float) -> Link:
        """The link of ``pair`` in force at ``at_s``."""
        if pair[0] == pair[1]:
            return _TO_ITSELF
        since_s = self._since_s.get(pair)
        return self._base[pair] if since_s is None else self._links[pair][bisect_right(since_s, at_s)]

    def is_cut(self, pair: Pair, at_s: float) -> bool:
        """Whether the link of ``pair`` carries nothing at ``at_s``."""
        return self.link(pair, at_s).loss_ratio >= 1

    def up_at_s(self, pair: Pair, at_s: float) -> float:
        """The first instant from ``at_s`` on at which ``pair`` is not cut; infinite if there is none."""
        since_s = self._since_s.get(pair)
        if since_s is None:
            return at_s if self.link(pair, at_s).loss_ratio < 1 else math.inf
        links = self._links[pair]
        first = bisect_right(since_s, at_s)
        if links[first].loss_ratio < 1:
            return at_s
        later = (since_s[i - 1] for i in range(first + 1, len(links)) if links[i].loss_ratio < 1)
        return next(later, math.inf)
