"""Links that several pairs of sites share: those of a topology or matrix, and each site's own (``[[sites]]``).

A pair passes the uplink of its first site, the shared links of its path, and the downlink of its second site.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from policies.links import Link, Pair
from testbed.experiments.network_tables import ClustersTable, MatrixTable, SiteTable
from testbed.experiments.problems import KeyedError, unknown
from testbed.experiments.units import RATE


@dataclass(frozen=True)
class SharedLinks:
    """Rates in bit/s by the name of a shared link, and the names on the path of each ordered pair that has any."""

    rates_bps: Mapping[str, float] = field(default_factory=dict)
    paths: Mapping[Pair, tuple[str, ...]] = field(default_factory=dict)

    def narrowest_bps(self) -> dict[Pair, float]:
        """Return the smallest rate on the path of each pair that has one."""
        return {pair: min(self.rates_bps[name] for name in path) for pair, path in self.paths.items()}


def shared_links(
    table: ClustersTable | MatrixTable, own: Sequence[SiteTable], sites: Collection[str]
) -> SharedLinks:
    """Return the shared links between ``sites``. Nodes inside a site do not use its own links.

    Raises ``KeyedError`` for a shared link of the matrix that has the name of a site's own.
    """
    rates_bps: dict[str, float] = {}
    paths: dict[Pair, tuple[str, ...]] = {}
    if isinstance(table, MatrixTable):
        rates_bps |= table.shared or {}
        paths |= {(row.from_, row.to): tuple(row.links) for row in table.paths or ()}
    for row in own:
        ends = ((f"{row.name} up", row.up), (f"{row.name} down", row.down))
        for way, (name, rate_bps) in enumerate(ends):
            if rate_bps is None:
                continue
            if name in rates_bps:
                raise KeyedError(
                    ("network", "shared"), f'"{name}" is the name of a site\'s own link; use another'
                )
            rates_bps[name] = rate_bps
            for other in sites:
                if other == row.name:
                    continue
                pair = (other, row.name) if way else (row.name, other)
                path = paths.get(pair, ())
                paths[pair] = (*path, name) if way else (name, *path)
    return SharedLinks(rates_bps, paths)


def narrowed(links: Mapping[Pair, Link], most_bps: Mapping[Pair, float]) -> dict[Pair, Link]:
    """Return ``links`` with rates of at most ``most_bps``, which has the narrowest shared link of pairs with one."""
    return {
        pair: replace(link, rate_bps=most_bps[pair])
        if most_bps.get(pair, link.rate_bps) < link.rate_bps
        else link
        for pair, link in links.items()
    }


def between_nodes(shared: SharedLinks, sites: Mapping[str, str]) -> SharedLinks:
    """Return the shared links of pairs of nodes; ``sites`` has the site of each node."""
    if not shared.paths:
        return shared
    return SharedLinks(
        shared.rates_bps,
        {
            (a, b): shared.paths[sites[a], sites[b]]
            for a in sites
            for b in sites
            if a != b and (sites[a], sites[b]) in shared.paths
        },
    )


def own_links_in_words(row: SiteTable) -> str:
    """Return the rates of a site's own links, such as "40 Mbit/s up, 200 Mbit/s down"."""
    ways = ((row.up, "up"), (row.down, "down"))
    return ", ".join(f"{RATE.format(rate_bps)} {way}" for rate_bps, way in ways if rate_bps is not None)


def check_sites(own: Sequence[SiteTable], known: Collection[str], of_nodes: Collection[str]) -> None:
    """Raise ``KeyedError`` for a row of ``[[sites]]`` that is a second one, or whose links nothing uses.

    ``known`` are the sites of the network, ``of_nodes`` those with a node.
    """
    first: dict[str, int] = {}
    for index, row in enumerate(own):
        key = ("sites", index, "name")
        if row.name in first:
            raise KeyedError(key, f'"{row.name}" is also in sites.{first[row.name]}; keep one of the two')
        first[row.name] = index
        if row.name not in known:
            raise KeyedError(key, unknown("site", row.name, sorted(known)))
        if row.name not in of_nodes:
            raise KeyedError(
                key, f'no server, client or node is at "{row.name}"; put one there, or leave this site out'
            )
        if len(of_nodes) == 1 and row.has_links:
            raise KeyedError(
                key, f'all nodes are at "{row.name}", so nothing uses its links; leave this site out'
            )
