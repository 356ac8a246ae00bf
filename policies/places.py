"""Where the nodes of a problem are, and what its servers cost: for policies that want "places"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Places(NamedTuple):
    """Sites and regions by the numbers of servers and clients.

    A site without a region is a region of its own, of the same name. ``cost_per_hour`` is the price of each server, in the
    scenario's currency; empty if the scenario gives no prices.
    """

    server_sites: tuple[str, ...]
    client_sites: tuple[str, ...]
    server_regions: tuple[str, ...]
    client_regions: tuple[str, ...]
    cost_per_hour: tuple[float, ...] = ()

    def among(self, servers: Sequence[int]) -> Places:
        """Return the places with only ``servers``, renumbered 0, 1, ..."""
        sites, _, regions, _, costs = self
        return self._replace(
            server_sites=tuple(sites[j] for j in servers),
            server_regions=tuple(regions[j] for j in servers),
            cost_per_hour=tuple(costs[j] for j in servers) if costs else (),
        )
