"""``testbed topology``: describes a topology in numbers and as a map."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from netem.topology import Topology, TopologyError, TopologyLink, TopologyNode
from testbed.errors import ScenarioError, UserError
from testbed.experiments.experiment import Experiment
from testbed.experiments.matrices import matrix_of_file
from testbed.experiments.network import site_links
from testbed.experiments.network_tables import MatrixTable
from testbed.experiments.problems import KeyedError, shown
from testbed.experiments.shared_links import own_links_in_words
from testbed.experiments.topologies import DEFAULT_DETOUR, DEFAULT_RATE, load_topology, without_rate
from testbed.experiments.units import counted
from testbed.results.plots import plotting, save
from testbed.results.requests import stats

MATRICES = (".csv", ".json")
PICTURES = (".png", ".svg", ".pdf")
_WIDEST = 2.0
"""Up to this width over height a map has true proportions."""


def topology_command(
    name: str,
    delays: str | None,
    detour: float | None,
    experiment: Experiment | None,
    picture: Path | None,
    rtt_unit: str | None = None,
    delay_unit: str | None = None,
) -> tuple[dict[str, Any], str]:
    """Describe a topology or an RTT matrix, by name or file; draws ``picture`` if given.

    Returns the answer for ``--json`` and the text for people. The nodes of ``experiment`` are marked.
    ``rtt_unit`` is the unit of a matrix file (.csv, .json), by default the file's own or ms; ``delay_unit`` that of the delays in a file of other
    tools. Without ``delays`` they are those of the file, or if it has none, from coordinates. Raises ``UserError`` for what cannot be read or
    drawn.
    """
    if delays not in ("given", "fibre", None):
        raise UserError(f"--delays must be given or fibre, not {delays!r}")
    if detour is not None and delays != "fibre":
        raise UserError("--detour is only for --delays fibre: give that, too, or leave out --detour")
    if detour is not None and not 1 <= detour <= 100:
        raise UserError(f"--detour must lie between 1 and 100, not {detour:g}")
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise UserError(f"--picture must end in {', '.join(PICTURES)}, not {picture.name!r}")
    one_way_s: list[list[float]] | None = None
    rtt_s: list[list[float | None]]
    try:
        if Path(name).suffix.lower() in MATRICES:
            if delays == "fibre":
                raise UserError("--delays fibre is for topologies: a matrix has no coordinates; leave it out")
            topology, one_way_s = _matrix(Path(name), rtt_unit)
            rtt_s = [[a + b for a, b in zip(*both, strict=True)] for both in _with_transposed(one_way_s)]
        else:
            if rtt_unit is not None:
                raise UserError(f"--rtt-unit is for RTT matrices ({', '.join(MATRICES)}): leave it out")
            topology = load_topology(name, delay_unit=delay_unit)
            if delays is None and all(link.delay_s is None for link in topology.links):
                delays = "fibre"
            if delays == "fibre":
                topology = topology.with_fibre_delays(DEFAULT_DETOUR if detour is None else detour)
            rtt_s = rtt_matrix_s(topology)
    except KeyedError as error:
        raise ScenarioError(error.what) from None
    except TopologyError as error:
        raise UserError(f"{error} (--delays fibre)" if "fibre" in str(error) else str(error)) from None
    delays = delays or "given"
    places = _places(topology, experiment)
    answer = topology_answer(topology, rtt_s, delays, places)
    for row in experiment.network.sites if experiment is not None else ():
        node = answer["nodes"][topology.node_names.index(row.name)]
        node |= {"up_bps": row.up, "down_bps": row.down, "own_links": own_links_in_words(row)}
    if one_way_s is not None:
        answer["one_way_ms"] = [[1e3 * value for value in row] for row in one_way_s]
    if picture is not None:
        try:
            draw_map(picture, topology, rtt_s, places)
        except OSError as error:
            raise UserError(f"cannot write {picture}: {error.strerror}; choose another --picture") from error
    remarks = [topology.too_fast() if delays == "given" else None]
    remarks.append(without_rate(topology) if topology.n_without_rate else None)
    return answer, "\n".join([topology_text(answer), *filter(None, remarks)])


def _matrix(path: Path, rtt_unit: str | None) -> tuple[Topology, list[list[float]]]:
    """Read a matrix file: its sites with a link per pair, and the one-way delays in seconds.

    A delay's row is the sender and its column the receiver. Raises ``KeyedError``.
    """
    table = {"kind": "matrix", "file": str(path)} | ({} if rtt_unit is None else {"rtt_unit": rtt_unit})
    supplied = {("network", "rtt_unit"): {"rtt_unit": "ms"}, ("network", "rate"): {"rate": DEFAULT_RATE}}
    while True:
        try:
            matrix = matrix_of_file(MatrixTable.model_validate(table), Path())
            break
        except KeyedError as error:
            if error.key not in supplied or error.key[1] in table:
                raise
            table |= supplied[error.key]
    links = site_links(matrix)
    sites = matrix.sites
    assert sites is not None, "a matrix that was read has sites"
    topology = Topology(
        path.stem,
        tuple(TopologyNode(site) for site in sites),
        tuple(
            TopologyLink(
                a,
                b,
                (links[a, b].delay_s + links[b, a].delay_s) / 2,
                min(links[a, b].rate_bps, links[b, a].rate_bps),
            )
            for i, a in enumerate(sites)
            for b in sites[i + 1 :]
        ),
    )
    return topology, [[links[a, b].delay_s if a != b else 0.0 for b in sites] for a in sites]


def _with_transposed(rows: list[list[float]]) -> Iterator[tuple[list[float], tuple[float, ...]]]:
    """Yield every row with the column of the same number."""
    return zip(rows, zip(*rows, strict=True), strict=True)


def rtt_matrix_s(topology: Topology) -> list[list[float | None]]:
    """Return the RTT of every ordered pair of nodes in seconds; None where there is no path."""
    number = {name: i for i, name in enumerate(topology.node_names)}
    rtt_s: list[list[float | None]] = [[None] * len(number) for _ in number]
    for component in topology.components():
        for a, row in zip(component, topology.rtt_matrix_s(component), strict=True):
            for b, value in zip(component, row, strict=True):
                rtt_s[number[a]][number[b]] = value
    return rtt_s


def topology_answer(
    topology: Topology,
    rtt_s: Sequence[Sequence[float | None]],
    delays: str,
    places: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return the answer of ``testbed topology --json``; ``rtt_ms`` is in the order of ``nodes``.

    ``places`` has the names of the experiment's nodes by the topology's nodes.
    """
    pairs_ms = [
        1e3 * value
        for i, row in enumerate(rtt_s)
        for j, value in enumerate(row)
        if i < j and value is not None
    ]
    nodes = []
    for node in topology.nodes:
        entry: dict[str, Any] = {
            "name": node.name,
            "longitude": node.longitude_deg,
            "latitude": node.latitude_deg,
            "internal": node.is_internal,
        }
        if node.label:
            entry["label"] = node.label
        if node.name in places:
            entry["runs"] = list(places[node.name])
        nodes.append(entry)
    return {
        "name": topology.name,
        "n_nodes": len(topology.nodes),
        "n_links": len(topology.links),
        "n_default_rates": topology.n_without_rate,
        "components": topology.components(),
        "delays": delays,
        "nodes": nodes,
        "links": [
            {
                "nodes": [link.a, link.b],
                "delay_ms": 1e3 * (link.delay_s or 0.0),
                "rate_mbps": link.rate_bps / 1e6,
            }
            for link in topology.links
        ],
        "rtt_ms": [[None if value is None else 1e3 * value for value in row] for row in rtt_s],
        "statistics": {
            "n_nodes": len(topology.nodes),
            "n_links": len(topology.links),
            "n_components": len(topology.components()),
            "rtt_ms": _spread(pairs_ms),
            "n_without_rate": topology.n_without_rate,
            "without_place": [node.name for node in topology.nodes if node.latitude_deg is None],
            "delay_not_from_coordinates": list(topology.without_coordinates) if delays == "fibre" else None,
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = stats(values)
    return {name: float(found[name] or 0.0) for name in ("min", "p50", "mean", "p90", "max")}


def topology_text(answer: Mapping[str, Any]) -> str:
    """Return the answer as a few lines for the terminal."""
    found = answer["statistics"]
    parts = f" in {found['n_components']} parts that are not connected" if found["n_components"] > 1 else ""
    lines = [
        f"{answer['name']}: {counted(found['n_nodes'], 'nodes')}, {counted(found['n_links'], 'links')}{parts}"
    ]
    spread = found["rtt_ms"]
    if spread:
        how = (
            "as given"
            if answer["delays"] == "given"
            else "from coordinates, by the speed of light in fibre and the detour"
        )
        along = "" if "one_way_ms" in answer else " along delay-shortest paths"
        lines.append(
            f"RTT between two nodes{along}: {spread['min']:.3f} to {spread['max']:.3f} ms, "
            f"mean {spread['mean']:.3f}, median {spread['p50']:.3f} (delays {how})"
        )
    if len(found["without_place"]) == found["n_nodes"]:
        lines.append("no coordinates are known")
    elif found["without_place"]:
        lines.append(f"without known place: {', '.join(found['without_place'])}")
    if other := [node["name"] for node in answer["nodes"] if not node["internal"]]:
        lines.append(f"no places of this network: {', '.join(other)}")
    if changed := [
        f"{shown(node['label'])} is {node['name']}" for node in answer["nodes"] if "label" in node
    ]:
        lines.append(f"names changed: {', '.join(changed)}")
    lines.append(f"nodes: {', '.join(node['name'] for node in answer['nodes'])}")
    for node in answer["nodes"]:
        if "runs" in node:
            own = f" ({node['own_links']})" if "own_links" in node else ""
            lines.append(f"  {node['name']}{own}: {', '.join(node['runs'])}")
    return "\n".join(lines)


def _places(topology: Topology, experiment: Experiment | None) -> dict[str, list[str]]:
    """Return the experiment's servers and clients by node of the topology.

    Raises ``UserError`` if one is at no node of the topology.
    """
    places: dict[str, list[str]] = {}
    if experiment is not None:
        for name, site in experiment.sites.items():
            if site not in topology.node_names:
                raise UserError(
                    f"{experiment.name} puts {name} at {site}, which is no node of {topology.name}: give the "
                    "scenario's own topology"
                )
            places.setdefault(site, []).append(name)
    return places


def draw_map(
    path: Path,
    topology: Topology,
    rtt_s: Sequence[Sequence[float | None]],
    places: Mapping[str, Sequence[str]],
) -> None:
    """Draw a map, or a layout if no coordinates are known, with a histogram of the RTTs beside it."""
    with plotting({}) as plt:
        at, is_map = _positions(topology)
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), width_ratios=(3, 1.2))
        for link in topology.links:
            (x0, y0), (x1, y1) = at[link.a], at[link.b]
            left.plot([x0, x1], [y0, y1], color="#b8c4d0", linewidth=0.8, zorder=1)
        known = {node.name for node in topology.nodes if node.latitude_deg is not None}
        groups = [
            ("node", "#5c6b7a", 14, "o", [n for n in topology.node_names if n not in places]),
            ("server", "#1f5a99", 46, "s", [n for n in places if _runs_server(places[n])]),
            ("client", "#d1762b", 60, "^", [n for n in places if not _runs_server(places[n])]),
        ]
        for label, colour, size, marker, names in groups:
            for is_known, fill in ((True, colour), (False, "white")):
                some = [at[n] for n in names if (n in known) == is_known]
                if some:
                    text = label if is_known or not is_map else f"{label}, place not known"
                    x, y = zip(*some, strict=True)
                    left.scatter(
                        x, y, s=size, marker=marker, color=fill, edgecolors=colour, zorder=2, label=text
                    )
        if len(topology.nodes) <= 30 or places:
            for name in places or topology.node_names:
                text = ", ".join(places[name]) if name in places else name
                left.annotate(text, at[name], xytext=(4, 3), textcoords="offset points", fontsize=7)
        left.set_title(
            f"{topology.name}: {counted(len(topology.nodes), 'nodes')}, {counted(len(topology.links), 'links')}"
        )
        if is_map:
            left.set(xlabel="longitude (degrees east)", ylabel="latitude (degrees north)")
            x, y = np.array(list(at.values())).T
            stretch = 1 / max(math.cos(math.radians(float(y.mean()))), 0.2)
            if np.ptp(x) < _WIDEST * stretch * max(np.ptp(y), 1e-9):
                left.set_aspect(stretch)  # a wider map fills the height of the figure
        else:
            left.set(xticks=[], yticks=[], xlabel="no coordinates are known: positions mean nothing")
        left.legend(fontsize=8, frameon=False, loc="best")
        pairs_ms = [1e3 * value for i, row in enumerate(rtt_s) for value in row[i + 1 :] if value is not None]
        right.hist(pairs_ms, bins=30, color="#1f5a99")
        right.set(xlabel="RTT between two nodes (ms)", ylabel="pairs of nodes")
        for side in ("top", "right"):
            left.spines[side].set_visible(False)
            right.spines[side].set_visible(False)
        figure.tight_layout()
        try:
            save(figure, path)
        finally:
            plt.close(figure)


def _runs_server(names: Sequence[str]) -> bool:
    return any(not name.startswith("client") for name in names)


def _positions(topology: Topology) -> tuple[dict[str, tuple[float, float]], bool]:
    """Return (x, y) of each node, and whether that is (longitude, latitude) in degrees or a layout."""
    placed = topology.placed_nodes()
    at = {
        node.name: (node.longitude_deg, node.latitude_deg)
        for node in placed
        if node.longitude_deg is not None and node.latitude_deg is not None
    }
    if len(at) == len(topology.nodes):
        return _cut_at_the_widest_gap(at), True
    import networkx as nx

    graph = nx.Graph([(link.a, link.b) for link in topology.links])
    graph.add_nodes_from(topology.node_names)
    layout = nx.spring_layout(graph, seed=0)
    return {name: (float(x), float(y)) for name, (x, y) in layout.items()}, False


def _cut_at_the_widest_gap(at: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Shift longitudes beyond 180 degrees where that keeps neighbours together, as across the Pacific."""
    east = sorted(x for x, _ in at.values())
    gaps = [(b - a, b) for a, b in pairwise([*east, east[0] + 360])]
    first = max(gaps)[1] % 360
    start = first if first <= 180 else first - 360
    return {name: (x if x >= start else x + 360, y) for name, (x, y) in at.items()}
