"""Topologies: sites joined by links, and the delay and rate of delay-shortest paths between them.

Pure: reads no files and calls nothing of the system. ``testbed.experiments.topologies`` reads them from files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from netem.spec import NetworkError

FIBRE_KM_PER_S = 200_000.0
"""Speed of light in fibre: about two thirds of the speed in vacuum."""
EARTH_RADIUS_KM = 6371.0
_SHORT_KM = 100.0
"""Coordinates are too coarse to judge the delays of shorter links."""
_SHORTEST_S = 1e-4
"""Less than 20 km of fibre: no network between cities has such delays alone."""
_TOO_FAST_RATIO = 0.1
"""Published delays are down to a third of what light in fibre needs (those of REPETITA); a wrong unit is far below."""


class TopologyError(NetworkError):
    """The topology contradicts itself, or lacks a needed node, path or delay. The message is one sentence."""


@dataclass(frozen=True)
class TopologyNode:
    """A site. Coordinates are in degrees, east and north positive; both are ``None`` if unknown.

    Unless ``is_internal`` it is no place of this network: a point where several links meet, or a node of another network.
    ``label``: what its file calls it, where that could not be its name.
    """

    name: str
    longitude_deg: float | None = None
    latitude_deg: float | None = None
    is_internal: bool = True
    label: str = ""


@dataclass(frozen=True)
class TopologyLink:
    """A link between nodes ``a`` and ``b``, with the same one-way delay and rate in both directions.

    ``delay_s`` is ``None`` if the source states no delay; ``Topology.with_fibre_delays`` derives it.
    """

    a: str
    b: str
    delay_s: float | None
    rate_bps: float


@dataclass(frozen=True)
class Path:
    """A delay-shortest path: its nodes in order, its one-way delay and the rate of its slowest link."""

    nodes: tuple[str, ...]
    delay_s: float
    rate_bps: float


@dataclass(frozen=True)
class Topology:
    """Nodes in a fixed order, and undirected links; two nodes may have several links.

    ``without_coordinates`` is filled by ``with_fibre_delays``: the nodes whose missing coordinates left a
    link without a delay of its own. ``n_without_rate`` links have a default rate, since their source states none.
    Raises ``TopologyError`` for two nodes of one name, for a link from a
    node to itself, and for a link to an unknown node.
    """

    name: str
    nodes: tuple[TopologyNode, ...]
    links: tuple[TopologyLink, ...]
    without_coordinates: tuple[str, ...] = ()
    n_without_rate: int = 0

    def __post_init__(self) -> None:
        known = set(self.node_names)
        if len(known) != len(self.nodes):
            twice = next(name for name in self.node_names if self.node_names.count(name) > 1)
            raise TopologyError(f"topology {self.name} has two nodes named {twice}")
        for link in self.links:
            for end in (link.a, link.b):
                if end not in known:
                    raise TopologyError(f"topology {self.name} has a link to {end}, which is no node of it")
            if link.a == link.b:
                raise TopologyError(f"topology {self.name} has a link from {link.a} to itself")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @property
    def max_rate_bps(self) -> float:
        return max(link.rate_bps for link in self.links)

    def with_fibre_delays(self, detour: float = 1.0) -> Topology:
        """Returns the same topology with every link's delay derived from the coordinates of its ends.

        delay = great-circle distance x ``detour`` / (200 km/ms). A link that has an end without coordinates
        keeps its delay. If it has no delay, the end is assumed to lie in the middle of its neighbours.
        ``without_coordinates`` of the result names those ends, in node order. Raises ``TopologyError``
        if a link still has no delay.
        """
        by_name = {node.name: node for node in self.nodes}
        guessed = self._between_neighbours() if any(link.delay_s is None for link in self.links) else {}
        links = []
        unplaced: set[str] = set()
        for link in self.links:
            ends = by_name[link.a], by_name[link.b]
            distance_km = great_circle_km(*ends)
            if distance_km is None:
                unplaced.update(end.name for end in ends if end.latitude_deg is None)
                if link.delay_s is None:
                    distance_km = great_circle_km(*(guessed.get(end.name, end) for end in ends))
                    if distance_km is None:
                        raise TopologyError(
                            f"topology {self.name} has neither a delay for the link {link.a} to {link.b} nor "
                            "coordinates near it; add one of them"
                        )
            delay_s = link.delay_s if distance_km is None else distance_km * detour / FIBRE_KM_PER_S
            links.append(replace(link, delay_s=delay_s))
        names = tuple(name for name in self.node_names if name in unplaced)
        return replace(self, links=tuple(links), without_coordinates=names)

    def too_fast(self) -> str | None:
        """Returns what is wrong with delays that are too short: for the distance (see ``too_fast``), or all of them."""
        by_name = {node.name: node for node in self.nodes}
        known = [(link, link.delay_s) for link in self.links if link.delay_s is not None]
        wrong = too_fast((by_name[link.a], by_name[link.b], delay_s) for link, delay_s in known)
        longest_s = max((delay_s for _, delay_s in known), default=math.inf)
        if wrong is None and 0 < longest_s < _SHORTEST_S:
            wrong = (
                f"all delays of {self.name} are below {1e3 * _SHORTEST_S:g} ms (the longest is {1e3 * longest_s:.3g} ms); "
                "check their unit"
            )
        return wrong

    def placed_nodes(self) -> tuple[TopologyNode, ...]:
        """Returns the nodes; one without coordinates is put in the middle of its neighbours where possible."""
        guessed = self._between_neighbours()
        return tuple(guessed.get(node.name, node) for node in self.nodes)

    def components(self) -> list[tuple[str, ...]]:
        """Returns the connected components, largest first; the nodes of each are in the topology's order."""
        import networkx as nx

        graph = nx.Graph([(link.a, link.b) for link in self.links])
        graph.add_nodes_from(self.node_names)
        found = [
            tuple(name for name in self.node_names if name in part) for part in nx.connected_components(graph)
        ]
        return sorted(found, key=lambda part: (-len(part), self.node_names.index(part[0])))

    def _between_neighbours(self) -> dict[str, TopologyNode]:
        """Returns nodes without coordinates, each put in the middle of its placed neighbours.

        Repeats with the guessed nodes as placed, until no further node has a placed neighbour.
        """
        neighbours: dict[str, list[str]] = {name: [] for name in self.node_names}
        for link in self.links:
            neighbours[link.a].append(link.b)
            neighbours[link.b].append(link.a)
        placed = {node.name: node for node in self.nodes if node.latitude_deg is not None}
        guessed: dict[str, TopologyNode] = {}
        while True:
            new = {}
            for node in self.nodes:
                around = [placed[name] for name in neighbours[node.name] if name in placed]
                if node.name not in placed and around:
                    new[node.name] = middle(node.name, around)
            if not new:
                return guessed
            placed |= new
            guessed |= new

    def paths(self, chosen: Sequence[str]) -> dict[tuple[str, str], Path]:
        """Returns the delay-shortest path of every ordered pair of different ``chosen`` nodes.

        Both directions of a pair use the same path. Of parallel links only the one with the shortest delay
        is used; of equal ones the fastest. Raises ``TopologyError`` if a node is unknown, a pair is not
        connected, or a link has no delay.
        """
        import networkx as nx

        for name in chosen:
            if name not in self.node_names:
                raise TopologyError(f"topology {self.name} has no node {name}")
        # In the topology's order, so that ties do not depend on the order of the choice.
        names = [name for name in self.node_names if name in chosen]
        graph = nx.Graph()
        graph.add_nodes_from(self.node_names)
        for link in self.links:
            if link.delay_s is None:
                raise TopologyError(
                    f"topology {self.name} states no delay for its links (such as {link.a} to {link.b}); use "
                    'delays = "fibre", which derives them from coordinates, or state the unit of a file that has delays '
                    "(delay_unit)"
                )
        for link in sorted(self.links, key=lambda link: (link.delay_s or 0.0, -link.rate_bps)):
            if not graph.has_edge(link.a, link.b):
                graph.add_edge(link.a, link.b, delay_s=link.delay_s, rate_bps=link.rate_bps)

        found: dict[tuple[str, str], Path] = {}
        for position, start in enumerate(names):
            delays_s, routes = nx.single_source_dijkstra(graph, start, weight="delay_s")
            for end in names[position + 1 :]:
                if end not in routes:
                    raise TopologyError(f"topology {self.name} has no path from {start} to {end}")
                route = tuple(routes[end])
                rate_bps = min(graph.edges[hop]["rate_bps"] for hop in pairwise(route))
                found[start, end] = Path(route, delays_s[end], rate_bps)
                found[end, start] = Path(route[::-1], delays_s[end], rate_bps)
        return found

    def rtt_matrix_s(self, chosen: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        """Returns the RTTs between ``chosen`` nodes as a square matrix in their order.

        An RTT is twice the one-way delay; the diagonal is 0. Raises ``TopologyError`` as ``paths`` does.
        """
        paths = self.paths(chosen)
        return tuple(tuple(0.0 if a == b else 2 * paths[a, b].delay_s for b in chosen) for a in chosen)


def great_circle_km(a: TopologyNode, b: TopologyNode) -> float | None:
    """Returns the distance along the Earth's surface (haversine), or ``None`` if a node has no coordinates."""
    if a.longitude_deg is None or a.latitude_deg is None or b.longitude_deg is None or b.latitude_deg is None:
        return None
    north_a, north_b = math.radians(a.latitude_deg), math.radians(b.latitude_deg)
    east = math.radians(b.longitude_deg - a.longitude_deg)
    h = (
        math.sin((north_b - north_a) / 2) ** 2
        + math.cos(north_a) * math.cos(north_b) * math.sin(east / 2) ** 2
    )
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(min(h, 1.0)))


def too_fast(links: Iterable[tuple[TopologyNode, TopologyNode, float]]) -> str | None:
    """Returns what is wrong with one-way delays of less than a tenth of what light in fibre needs.

    ``links`` are two nodes each, and the delay between them in s; those without coordinates or shorter than 100
    km are not judged. ``None``: nothing is wrong. A delay in the wrong unit is a thousand times too short.
    """
    n_judged, found = 0, []
    for a, b, delay_s in links:
        distance_km = great_circle_km(a, b)
        if distance_km is None or distance_km < _SHORT_KM:
            continue
        n_judged += 1
        light_s = distance_km / FIBRE_KM_PER_S
        if delay_s < _TOO_FAST_RATIO * light_s:
            found.append((delay_s / light_s, a.name, b.name, delay_s, light_s))
    if not found:
        return None
    _, a_name, b_name, delay_s, light_s = min(found)
    return (
        f"the delays of {len(found):,} of {n_judged:,} links are less than a tenth of what light in fibre needs, such "
        f"as {a_name} to {b_name}: {1e3 * delay_s:.3g} ms one way, where light needs {1e3 * light_s:.3g} ms; check "
        "their unit"
    )


def middle(name: str, around: Sequence[TopologyNode]) -> TopologyNode:
    """Returns a node called ``name`` in the middle of ``around``, which must have coordinates.

    The middle is the mean of their directions from the Earth's centre.
    """
    x = y = z = 0.0
    for node in around:
        east, north = math.radians(node.longitude_deg or 0.0), math.radians(node.latitude_deg or 0.0)
        x += math.cos(north) * math.cos(east)
        y += math.cos(north) * math.sin(east)
        z += math.sin(north)
    longitude_deg, latitude_deg = (
        math.degrees(math.atan2(y, x)),
        math.degrees(math.atan2(z, math.hypot(x, y))),
    )
    return TopologyNode(name, longitude_deg, latitude_deg)
