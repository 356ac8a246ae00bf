"""Topologies of scenarios: reads their files, draws nodes by seed, and computes a run's matrix."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from netem.topology import Path as TopologyPath
from netem.topology import Topology, TopologyError, TopologyLink, TopologyNode
from testbed.experiments.fields import BitsPerSecond, Name, Seconds, Table
from testbed.experiments.filesread import note_file
from testbed.experiments.network import Node
from testbed.experiments.network_tables import MatrixTable, NetworkTable, TopologyNetworkTable
from testbed.experiments.problems import KeyedError, explain, key_in_document, nearest
from testbed.experiments.sources import read_toml
from testbed.experiments.topology_files import read_foreign
from testbed.experiments.units import RATE
from testbed.experiments.workload import stream

ANY = "any"
"""The site name that stands for a node drawn with the scenario's seed."""
DEFAULT_DETOUR = 1.5
"""Cables follow roads and coasts: they are about half longer than the direct path."""
DEFAULT_RATE = "1 Gbit/s"
"""Rate of links that have none in their file."""
KEY = ("network", "topology")

_log = logging.getLogger(__name__)


class NodeRow(Table):
    """A row of ``nodes``; coordinates are in degrees, east and north positive.

    ``internal`` is false for what is no place of this network, where no node is drawn: a point at which several links
    meet, or a node of another network. ``label`` is what another tool's file calls the node, where that could not be its name.
    """

    name: Name
    longitude: Annotated[float, Field(ge=-180, le=180)] | None = None
    latitude: Annotated[float, Field(ge=-90, le=90)] | None = None
    internal: bool = True
    label: str = ""


class LinkRow(Table):
    """A row of ``links``: both directions between two nodes."""

    nodes: Annotated[list[Name], Field(min_length=2, max_length=2)]
    delay: Seconds | None = None
    rate: BitsPerSecond | None = None


class TopologyFile(Table):
    """A topology file: nodes in order, and links that carry both directions.

    A link's ``delay`` is one way. If a link has none, scenarios must compute it from coordinates
    (``delays = "fibre"``). One without a ``rate`` has ``default_rate`` of the network.
    """

    name: Name
    description: str = ""
    nodes: Annotated[list[NodeRow], Field(min_length=1)]
    links: Annotated[list[LinkRow], Field(min_length=1)]


def shipped_topologies() -> list[str]:
    """Return the names of the topologies that are installed with the tool."""
    folder = resources.files("scenarios") / "topologies"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def load_topology(
    name_or_path: str,
    folder: Path = Path(),
    default_bps: float = RATE.parse(DEFAULT_RATE),
    delay_unit: str | None = None,
) -> Topology:
    """Return a shipped topology by name, or the one in a file, whose path may be relative to ``folder``.

    ``default_bps`` is the rate of links that have none, ``delay_unit`` see ``read_foreign``. A file is TOML (``TopologyFile``), or a format of ``testbed.experiments.topology_files`` by its ending.
    Raises ``KeyedError`` with the file and what is wrong in it, and ``ScenarioError`` if the file cannot be
    read.
    """
    shipped = shipped_topologies()
    if name_or_path in shipped:
        resource = resources.files("scenarios") / "topologies" / f"{name_or_path}.toml"
        note_file(Path(str(resource)))
        document = tomllib.loads(resource.read_text(encoding="utf-8"))
        return _topology(document, resource.name, default_bps)
    path = folder / name_or_path
    if not path.is_file():
        raise KeyedError(
            KEY,
            f'"{name_or_path}" is neither a shipped topology{nearest(name_or_path, shipped)} '
            f"nor a file; shipped: {', '.join(shipped)}",
        )
    if path.suffix.lower() in (".csv", ".json"):
        raise KeyedError(
            KEY,
            f'{path} is not a topology by its ending; if it is a matrix, use kind = "matrix" and file = '
            f'"{path.name}"',
        )
    foreign = read_foreign(note_file(path), delay_unit)
    if foreign is None and delay_unit is not None:
        raise KeyedError(
            ("network", "delay_unit"),
            f"is for files that do not state their delays' unit, but those of {path} have one; leave it out",
        )
    return _topology(read_toml(path) if foreign is None else foreign, str(path), default_bps)


def _topology(document: dict[str, Any], label: str, default_bps: float) -> Topology:
    def wrong(where: KeyedError) -> KeyedError:
        key = ".".join(str(part) for part in key_in_document(document, where.key))
        return KeyedError(KEY, ": ".join(filter(None, (label, key, where.what))))

    try:
        file = TopologyFile.model_validate(document)
        names = [row.name for row in file.nodes]
        for index, row in enumerate(file.nodes):
            _check_node(row, index, names)
        for index, link in enumerate(file.links):
            for end, name in enumerate(link.nodes):
                if name not in names:
                    raise KeyedError(("links", index, "nodes", end), unknown_node(name, file.name, names))
        return Topology(
            file.name,
            tuple(
                TopologyNode(row.name, row.longitude, row.latitude, row.internal, row.label)
                for row in file.nodes
            ),
            tuple(
                TopologyLink(row.nodes[0], row.nodes[1], row.delay, row.rate or default_bps)
                for row in file.links
            ),
            n_without_rate=sum(row.rate is None for row in file.links),
        )
    except ValidationError as error:
        raise wrong(explain(error)) from None
    except KeyedError as where:
        raise wrong(where) from None
    except TopologyError as error:
        raise wrong(KeyedError((), str(error))) from None


def _check_node(row: NodeRow, index: int, names: list[str]) -> None:
    if row.name == ANY:
        raise KeyedError(("nodes", index, "name"), f'"{ANY}" stands for a drawn node; use another name')
    if names.index(row.name) != index:
        first = names.index(row.name)
        raise KeyedError(
            ("nodes", index, "name"), f'"{row.name}" is also the name of nodes.{first}; change one of them'
        )
    if (row.longitude is None) != (row.latitude is None):
        raise KeyedError(("nodes", index), "needs both longitude and latitude, or neither")


def unknown_node(name: str, topology: str, names: Sequence[str]) -> str:
    """Return the error sentence for a node that a topology does not have."""
    listed = ", ".join(names) if len(names) <= 12 else f"{names[0]} to {names[-1]} ({len(names)})"
    return f'unknown node "{name}"{nearest(name, names)}; nodes of {topology}: {listed}'


def choose_nodes(
    topology: Topology, seed: int, servers: Sequence[Node], clients: Sequence[Node]
) -> tuple[list[Node], list[Node]]:
    """Return the same servers and clients, with "any" replaced by drawn nodes of the topology.

    The topology's nodes that no entry names are shuffled: those of its largest part that are internal (see
    ``drawn_from``). Servers use them from the start and clients from
    the end, so that neither moves when the number of the others changes, and more servers keep the places of
    fewer. Each server has a node of its own; clients share nodes with servers, then with each other, only
    when there are too few. Raises ``KeyedError`` for unknown nodes and for more drawn servers than free
    nodes.
    """
    names = topology.node_names
    for node in (*servers, *clients):
        if node.site != ANY and node.site not in names:
            raise KeyedError(node.key, unknown_node(node.site, topology.name, names))
    named = {node.site for node in (*servers, *clients)}
    part = drawn_from(topology) if ANY in named else names
    order = [name for name in part if name not in named]
    stream(seed, "node choice").shuffle(order)
    drawn = [node for node in servers if node.site == ANY]
    if len(drawn) > len(order):
        raise KeyedError(
            drawn[0].key,
            f'is "{ANY}" for {len(drawn)} servers, but {topology.name} has only {len(order)} nodes that '
            "no entry names"
            + (" in its largest part" if len(part) < len(names) else "")
            + "; lower the counts or name sites",
        )
    backwards = order[::-1] or list(part)
    return _placed(servers, order), _placed(clients, backwards)


def drawn_from(topology: Topology) -> tuple[str, ...]:
    """Return the nodes that "any" is drawn from: the internal ones of the part that has most of these.

    Warns if these are not all nodes.
    """
    internal = {node.name for node in topology.nodes if node.is_internal}
    parts = [tuple(name for name in part if name in internal) for part in topology.components()]
    largest = max(parts, key=len)
    n_apart, n_other = len(internal) - len(largest), len(topology.nodes) - len(internal)
    if n_apart or n_other:
        left_out = [f"{n_apart} not connected with these"] if n_apart else []
        left_out += (
            [f"{n_other} no {'places' if n_other > 1 else 'place'} of this network"] if n_other else []
        )
        _log.warning(
            '"%s" is drawn from %d of the %d nodes of %s (without %s)',
            *(ANY, len(largest), len(topology.nodes), topology.name, ", ".join(left_out)),
        )
    return largest


def _placed(nodes: Sequence[Node], places: Sequence[str]) -> list[Node]:
    placed = []
    n_drawn = 0
    for node in nodes:
        if node.site == ANY:
            placed.append(replace(node, site=places[n_drawn % len(places)]))
            n_drawn += 1
        else:
            placed.append(node)
    return placed


def topology_of(table: TopologyNetworkTable, folder: Path) -> Topology:
    """Return the topology that ``[network]`` names, with the delays that it asks for.

    Warns of links that have a default rate unasked, and of delays that are too short for the distance.
    """
    default_bps = RATE.parse(DEFAULT_RATE) if table.default_rate is None else table.default_rate
    topology = load_topology(table.topology, folder, default_bps, table.delay_unit)
    if topology.n_without_rate and table.default_rate is None:
        _log.warning("network.topology: %s; set network.default_rate to choose it", without_rate(topology))
    if table.delays == "given" and (wrong := topology.too_fast()) is not None:
        _log.warning('network.topology: %s (network.delay_unit), or set delays = "fibre"', wrong)
    if table.delays == "fibre":
        return topology.with_fibre_delays(DEFAULT_DETOUR if table.detour is None else table.detour)
    return topology


def without_rate(topology: Topology) -> str:
    """Return in words how many links have no rate in the topology's file, which count as ``DEFAULT_RATE``."""
    return (
        f"{topology.n_without_rate:,} of {len(topology.links):,} links of {topology.name} have no rate in their file "
        f"and count as {DEFAULT_RATE}"
    )


def as_matrix(table: TopologyNetworkTable, topology: Topology, sites: Iterable[str]) -> MatrixTable:
    """Return the topology as a matrix over ``sites`` only, as a resolved scenario stores it.

    Inside a site the delay is 0 and the rate that of the topology's fastest link. With ``share_links`` every
    direction ``a>b`` of a link is shared by the pairs whose paths contain it. Raises ``KeyedError`` if two
    sites are not connected.
    """
    used = set(sites)
    chosen = [name for name in topology.node_names if name in used]
    try:
        paths = topology.paths(chosen)
    except TopologyError as error:
        raise KeyedError(KEY, str(error)) from None
    rates_bps = [[topology.max_rate_bps if a == b else paths[a, b].rate_bps for b in chosen] for a in chosen]
    one_rate = len({rate for row in rates_bps for rate in row}) == 1
    document = table.model_dump(by_alias=True, exclude_none=True, include=set(NetworkTable.model_fields))
    document |= {
        "kind": "matrix",
        "sites": chosen,
        "rtt": [[0.0 if a == b else 2 * paths[a, b].delay_s for b in chosen] for a in chosen],
        "rtt_unit": "s",
        "rate": RATE.format(rates_bps[0][0]) if one_rate else rates_bps,
    }
    known = {
        node.name: [node.longitude_deg, node.latitude_deg]
        for node in topology.nodes
        if node.longitude_deg is not None
    }
    known |= document.pop("places", {})
    known = {name: place for name, place in known.items() if name in used}
    if known:
        document["places"] = known
    if not one_rate:
        document["rate_unit"] = "bit/s"
    if table.share_links and paths:
        document |= _shared(topology, paths)
    return MatrixTable.model_validate(document)


def _shared(topology: Topology, paths: Mapping[tuple[str, str], TopologyPath]) -> dict[str, Any]:
    """Return ``shared`` and ``paths`` of a matrix.

    Of parallel links, paths use the shortest, then the fastest.
    """
    rate_of: dict[frozenset[str], float] = {}
    for link in sorted(topology.links, key=lambda link: (link.delay_s or 0.0, -link.rate_bps)):
        rate_of.setdefault(frozenset((link.a, link.b)), link.rate_bps)
    shared = {}
    rows = []
    for (a, b), path in paths.items():
        hops = list(pairwise(path.nodes))
        shared.update({f"{x}>{y}": RATE.format(rate_of[frozenset((x, y))]) for x, y in hops})
        rows.append({"from": a, "to": b, "links": [f"{x}>{y}" for x, y in hops]})
    return {"shared": shared, "paths": rows}
