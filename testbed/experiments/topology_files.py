"""Reads topology files of other tools into the form of ``testbed.experiments.topologies.TopologyFile``.

These are GraphML and GML of the Internet Topology Zoo, ``.xml`` and ``.txt`` of SNDlib, and ``.graph`` of
REPETITA. REPETITA's links have delays, and those of GraphML and GML may; for others a scenario needs ``delays = "fibre"``,
which computes them from coordinates. A link's rate may be in its label. Links without one are left without a rate.

All formats alike: two nodes may have several links; a link of a node to itself is left out; coordinates that are not
degrees are those of a drawing, so that no place is known.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from xml.parsers import expat

from testbed.errors import ScenarioError
from testbed.experiments.sndlib import SndLink, SndNode, read_sndlib_native, read_sndlib_xml
from testbed.experiments.speeds import speed_bps

_Line = tuple[int, list[str]]
"""A line's number (from 1) and its words."""
_Reader = Callable[[Path, str | None], dict[str, Any]]
_GRAPH = re.compile(r"\bgraph\s*\[", re.IGNORECASE)
_MULTIGRAPH = re.compile(r"^\s*multigraph\s+[01]\s*$|\[\s*multigraph\s+[01]\b", re.IGNORECASE | re.MULTILINE)
_TEXT_OR_WHOLE = re.compile(r'"[^"]*"|(?<=\s)[+-]?\d+(?=[eE][+-]?\d+\b)')
"""A text of GML, or the digits before an exponent: networkx reads 1.e9, but not 1e9."""
_EAST, _NORTH = ("longitude", "long", "lon", "lng"), ("latitude", "lat")
"""Names of coordinates, in small letters."""


def read_foreign(path: Path, delay_unit: str | None = None) -> dict[str, Any] | None:
    """Return the topology in ``path`` as ``TopologyFile`` data; ``None`` if its ending is not one of these.

    ``delay_unit``: that of the links' delays. Without it those of REPETITA are microseconds, and others are not read,
    since their files do not state it. Raises ``ScenarioError`` with the file and what is wrong.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        return None
    try:
        return reader(path, delay_unit)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    except ScenarioError:
        raise
    except Exception as error:  # parsers raise many kinds of errors
        raise ScenarioError(f"{path}: cannot be read in the format of its ending ({error})") from error


def _graphml(path: Path, delay_unit: str | None) -> dict[str, Any]:
    import networkx as nx

    _refuse_definitions(path)
    return _of_graph(path, nx.read_graphml(path), delay_unit)


def _gml(path: Path, delay_unit: str | None) -> dict[str, Any]:
    import networkx as nx

    text = path.read_text(encoding="utf-8-sig", errors="replace")
    text = _TEXT_OR_WHOLE.sub(lambda found: found[0] if found[0][0] == '"' else f"{found[0]}.", text)
    if not _MULTIGRAPH.search(text):  # as published, files with parallel links do not say that they have some
        text = _GRAPH.sub(r"\g<0> multigraph 1 ", text, count=1)
    return _of_graph(path, nx.parse_gml(text, label="id"), delay_unit)


def _of_graph(path: Path, graph: Any, delay_unit: str | None) -> dict[str, Any]:
    """Returns the topology of a networkx graph with the attributes of the Topology Zoo, or the usual ones of others."""
    of_nodes = {node: _named(data) for node, data in graph.nodes(data=True)}
    labels = [str(_first(of, "label", "name") or node) for node, of in of_nodes.items()]
    places = [(_number(_first(of, *_EAST)), _number(_first(of, *_NORTH))) for of in of_nodes.values()]
    nodes = _nodes(labels, places)
    name_of = {node: row["name"] for node, row in zip(of_nodes, nodes, strict=True)}
    for row, of in zip(nodes, of_nodes.values(), strict=True):
        if _number(of.get("hyperedge")) == 1 or _number(of.get("internal")) == 0:
            row["internal"] = False
    links = []
    for a, b, data in graph.edges(data=True):
        of = _named(data)
        link: dict[str, Any] = {"nodes": [name_of[a], name_of[b]]}
        rate_bps = _rate_bps(of)
        if rate_bps:
            link["rate"] = f"{rate_bps:.0f} bit/s"
        delay = _number(_first(of, "delay", "latency"))
        if delay_unit is not None and delay is not None:
            link["delay"] = f"{Decimal(delay):f} {delay_unit}"
        links.append(link)
    return _document(path, nodes, links)


def _named(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attributes by their names in small letters: tools write "Longitude" and "longitude"."""
    return {str(key).lower(): value for key, value in data.items()}


def _first(of: Mapping[str, Any], *keys: str) -> Any:
    return next((of[key] for key in keys if of.get(key) not in (None, "")), None)


def _rate_bps(of: Mapping[str, Any]) -> float | None:
    """Returns the rate that a link's attributes state: as a number with a unit, or in words."""
    raw_bps = _number(of.get("linkspeedraw"))
    if raw_bps:
        return raw_bps
    texts = [f"{of.get('linkspeed', '')}{of.get('linkspeedunits', '')}"]
    texts += [
        str(of.get(key, "")) for key in ("linklabel", "label", "linktype", "bandwidth", "capacity", "speed")
    ]
    return next(filter(None, map(speed_bps, texts)), None)


def _nodes(
    labels: Sequence[str], places: Sequence[tuple[float | None, float | None]]
) -> list[dict[str, Any]]:
    """Returns the rows of nodes, with their labels where these could not be their names.

    No place is known where both coordinates are 0, nor anywhere if one is no degree.
    """
    known = [(x, y) for x, y in places if x is not None and y is not None]
    in_degrees = all(abs(x) <= 180 and abs(y) <= 90 for x, y in known)
    rows: list[dict[str, Any]] = []
    for label, name, (x, y) in zip(labels, unique_names(labels), places, strict=True):
        row: dict[str, Any] = {"name": name} if name == label else {"name": name, "label": label}
        if in_degrees and x is not None and y is not None and (x, y) != (0.0, 0.0):
            row |= {"longitude": x, "latitude": y}
        rows.append(row)
    return rows


def _refuse_definitions(path: Path) -> None:
    """Raise ``ScenarioError`` for a document type: a few lines of XML entities can expand to gigabytes."""

    def refuse(*_: object) -> None:
        raise ScenarioError(f"{path}: has a document type (<!DOCTYPE ...>), which is not allowed; remove it")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    with path.open("rb") as file:
        parser.ParseFile(file)


def _repetita(path: Path, delay_unit: str | None) -> dict[str, Any]:
    """Read a ``.graph`` file of REPETITA.

    It has ``NODES n``, a heading and n rows ``label x y``, then ``EDGES m``, a heading and m rows
    ``label src dest weight bw delay``, with rates in kbit/s and delays in microseconds (some sets have milliseconds). Each row is one
    direction: two rows that differ only in direction become one link.
    """
    lines = [
        (number, line.split())
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1)
        if line.strip()
    ]
    node_rows, lines = _section(path, lines, "NODES", 3)
    link_rows, _ = _section(path, lines, "EDGES", 6)
    places = []
    for number, row in node_rows:
        east, north = _number(row[1]), _number(row[2])
        if east is None or north is None:
            raise ScenarioError(
                f"{path}:{number}: the node {row[0]} must have two numbers, its longitude and latitude"
            )
        places.append((east, north))
    nodes = _nodes([row[0] for _, row in node_rows], places)
    names = [row["name"] for row in nodes]
    links, waiting = [], dict[tuple[str, str, str, str], int]()
    for number, row in link_rows:
        _, source, target, _, rate, delay = row[:6]
        for end in (source, target):
            if not (end.isdecimal() and int(end) < len(names)):
                raise ScenarioError(
                    f"{path}:{number}: there is no node {end}; nodes are 0 to {len(names) - 1}"
                )
        back = (target, source, rate, delay)
        if waiting.get(back):
            waiting[back] -= 1
            continue
        key = (source, target, rate, delay)
        waiting[key] = waiting.get(key, 0) + 1
        ends = [names[int(source)], names[int(target)]]
        links.append({"nodes": ends, "delay": f"{delay} {delay_unit or 'us'}", "rate": f"{rate} kbit/s"})
    return _document(path, nodes, links)


def _section(path: Path, lines: list[_Line], title: str, n_columns: int) -> tuple[list[_Line], list[_Line]]:
    """Return the rows of a section of a ``.graph`` file, and the lines after it."""
    head = lines[0][1] if lines else []
    if len(head) != 2 or head[0] != title or not head[1].isdecimal():
        where = f"{path}:{lines[0][0]}" if lines else str(path)
        raise ScenarioError(f"{where}: expected {title} and their number, such as {title} 10")
    end = 2 + int(head[1])
    rows = lines[2:end]
    if len(lines) < end:
        raise ScenarioError(f"{path}: has {len(rows)} rows of {title}, but states {head[1]}")
    for number, row in rows:
        if len(row) < n_columns:
            raise ScenarioError(f"{path}:{number}: has {len(row)} columns, but {title} need {n_columns}")
    return rows, lines[end:]


def _sndlib(read: Callable[[Path], tuple[list[SndNode], list[SndLink]]]) -> _Reader:
    def reader(path: Path, delay_unit: str | None) -> dict[str, Any]:
        if path.suffix.lower() == ".xml":
            _refuse_definitions(path)
        found_nodes, found_links = read(path)
        labels = [node.name for node in found_nodes]
        nodes = _nodes(labels, [node.place or (None, None) for node in found_nodes])
        name_of = {label: row["name"] for label, row in zip(labels, nodes, strict=True)}
        links = []
        for link in found_links:
            unknown = next((end for end in link.ends if end not in name_of), None)
            if unknown is not None:
                raise ScenarioError(
                    f"{path}: a link ends at {unknown!r}, which is not one of the file's nodes"
                )
            rate = {} if link.rate_bps is None else {"rate": f"{link.rate_bps:.0f} bit/s"}
            links.append({"nodes": [name_of[end] for end in link.ends], **rate})
        return _document(path, nodes, links)

    return reader


_READERS: dict[str, _Reader] = {
    ".graphml": _graphml,
    ".gml": _gml,
    ".graph": _repetita,
    ".xml": _sndlib(read_sndlib_xml),
    ".txt": _sndlib(read_sndlib_native),
}


def _document(path: Path, nodes: list[dict[str, Any]], links: list[dict[str, Any]]) -> dict[str, Any]:
    links = [link for link in links if link["nodes"][0] != link["nodes"][1]]
    return {"name": unique_names([path.stem])[0].lower(), "nodes": nodes, "links": links}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def unique_names(labels: Iterable[str]) -> list[str]:
    """Turn labels into names of nodes:

    ASCII letters, digits, ".", "_" and "-", with numbers to make them unique.
    """
    names: list[str] = []
    taken, counts = {"any"}, dict[str, int]()
    for label in labels:
        plain = unicodedata.normalize("NFKD", label).encode("ascii", "ignore").decode()
        name = tried = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:48] or "node"
        while tried in taken:
            counts[name] = counts.get(name, 1) + 1
            tried = f"{name}-{counts[name]}"
        taken.add(tried)
        names.append(tried)
    return names
