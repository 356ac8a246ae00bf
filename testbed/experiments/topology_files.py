"""Reads topology files of other tools into the form of ``testbed.experiments.topologies.TopologyFile``.

These are GraphML and GML of the Internet Topology Zoo, ``.xml`` and ``.txt`` of SNDlib, and ``.graph`` of
REPETITA. Only REPETITA's links have delays; for the others a scenario needs ``delays = "fibre"``, which
computes them from coordinates. Links without a rate are left without one.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.parsers import expat

from testbed.errors import ScenarioError
from testbed.experiments.sndlib import SndLink, SndNode, read_sndlib_native, read_sndlib_xml

_Line = tuple[int, list[str]]
"""A line's number (from 1) and its words."""


def read_foreign(path: Path) -> dict[str, Any] | None:
    """Return the topology in ``path`` as ``TopologyFile`` data; ``None`` if its ending is not one of these.

    Raises ``ScenarioError`` with the file and what is wrong.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        return None
    try:
        return reader(path)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    except ScenarioError:
        raise
    except Exception as error:  # parsers raise many kinds of errors
        raise ScenarioError(f"{path}: cannot be read in the format of its ending ({error})") from error


def _networkx(read: str) -> Callable[[Path], dict[str, Any]]:
    def reader(path: Path) -> dict[str, Any]:
        import networkx as nx

        if read == "graphml":
            _refuse_definitions(path)
        graph = nx.read_gml(path, label="id") if read == "gml" else nx.read_graphml(path)
        names = unique_names(str(data.get("label", node)) for node, data in graph.nodes(data=True))
        name_of = dict(zip(graph.nodes, names, strict=True))
        nodes = []
        for node, data in graph.nodes(data=True):
            row: dict[str, Any] = {"name": name_of[node]}
            east, north = _number(data.get("Longitude")), _number(data.get("Latitude"))
            if east is not None and north is not None and (east, north) != (0.0, 0.0):
                row |= {"longitude": east, "latitude": north}
            nodes.append(row)
        links = []
        for a, b, data in graph.edges(data=True):
            if a == b:
                continue  # the Zoo has a few links from a node to itself
            link: dict[str, Any] = {"nodes": [name_of[a], name_of[b]]}
            rate_bps = _number(data.get("LinkSpeedRaw"))
            if rate_bps:
                link["rate"] = f"{rate_bps:.0f} bit/s"
            links.append(link)
        return _document(path, nodes, links)

    return reader


def _refuse_definitions(path: Path) -> None:
    """Raise ``ScenarioError`` for a document type: a few lines of XML entities can expand to gigabytes."""

    def refuse(*_: object) -> None:
        raise ScenarioError(f"{path}: has a document type (<!DOCTYPE ...>), which is not allowed; remove it")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    with path.open("rb") as file:
        parser.ParseFile(file)


def _repetita(path: Path) -> dict[str, Any]:
    """Read a ``.graph`` file of REPETITA.

    It has ``NODES n``, a heading and n rows ``label x y``, then ``EDGES m``, a heading and m rows
    ``label src dest weight bw delay``, with rates in kbit/s and delays in microseconds. Each row is one
    direction: two rows that differ only in direction become one link.
    """
    lines = [
        (number, line.split())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip()
    ]
    node_rows, lines = _section(path, lines, "NODES", 3)
    link_rows, _ = _section(path, lines, "EDGES", 6)
    names = unique_names(row[0] for _, row in node_rows)
    nodes = []
    for name, (number, row) in zip(names, node_rows, strict=True):
        east, north = _number(row[1]), _number(row[2])
        if east is None or north is None:
            raise ScenarioError(
                f"{path}:{number}: the node {row[0]} must have two numbers, its longitude and latitude"
            )
        known = (east, north) != (0.0, 0.0)
        nodes.append({"name": name, "longitude": east, "latitude": north} if known else {"name": name})
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
        links.append({"nodes": ends, "delay": f"{delay} us", "rate": f"{rate} kbit/s"})
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


def _sndlib(read: Callable[[Path], tuple[list[SndNode], list[SndLink]]]) -> Callable[[Path], dict[str, Any]]:
    def reader(path: Path) -> dict[str, Any]:
        if path.suffix.lower() == ".xml":
            _refuse_definitions(path)
        found_nodes, found_links = read(path)
        names = unique_names(node.name for node in found_nodes)
        name_of = dict(zip((node.name for node in found_nodes), names, strict=True))
        nodes = [
            {"name": name}
            | ({} if node.place is None else {"longitude": node.place[0], "latitude": node.place[1]})
            for name, node in zip(names, found_nodes, strict=True)
        ]
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


_READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".graphml": _networkx("graphml"),
    ".gml": _networkx("gml"),
    ".graph": _repetita,
    ".xml": _sndlib(read_sndlib_xml),
    ".txt": _sndlib(read_sndlib_native),
}


def _document(path: Path, nodes: list[dict[str, Any]], links: list[dict[str, Any]]) -> dict[str, Any]:
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
