"""Reads network files of SNDlib (https://sndlib.put.poznan.pl), in its XML and its native format.

The readers return nodes with coordinates and links with installed capacity; demands, costs and modules are
ignored. Both raise ``ValueError`` with what is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_FIRST_LINE = "?SNDlib native format; type: network"
_UNITS_BPS = {"KBITPERSEC": 1e3, "MBITPERSEC": 1e6, "GBITPERSEC": 1e9}
_ROWS = {
    "META": re.compile(r"(\S+)\s*=\s*(.*)"),
    "NODES": re.compile(r"(\S+)(?:\s*\(\s*(\S+)\s+(\S+)\s*\))?"),
    "LINKS": re.compile(r"\S+\s*\(\s*(\S+)\s+(\S+)\s*\)\s*(\S+).*"),
}
"""The rows of each section: key and value; a node's name, x and y; a link's two nodes and its capacity."""


@dataclass(frozen=True)
class SndNode:
    """A node. ``place`` is (longitude, latitude), if they are degrees; ``None`` if unknown, or said to be in pixels."""

    name: str
    place: tuple[float, float] | None


@dataclass(frozen=True)
class SndLink:
    """A link between two nodes.

    ``rate_bps`` is ``None`` without an installed capacity, or if its unit is unknown.
    """

    ends: tuple[str, str]
    rate_bps: float | None


def read_sndlib_xml(path: Path) -> tuple[list[SndNode], list[SndLink]]:
    """Return the nodes and links of an XML file."""
    root = ElementTree.parse(path).getroot()
    nodes, links = (root.find(f"{{*}}networkStructure/{{*}}{name}") for name in ("nodes", "links"))
    if nodes is None or links is None:
        raise ValueError("it has no networkStructure with nodes and links")
    in_degrees = nodes.get("coordinatesType", "geographical") == "geographical"
    unit = root.findtext("{*}meta/{*}unit", "")
    found_nodes, found_links = [], []
    for node in nodes.iterfind("{*}node"):
        x, y = (node.findtext(f"{{*}}coordinates/{{*}}{axis}") for axis in "xy")
        place = (float(x), float(y)) if in_degrees and x is not None and y is not None else None
        found_nodes.append(SndNode(node.get("id", ""), place))
    for link in links.iterfind("{*}link"):
        source, target = (link.findtext(f"{{*}}{end}", "").strip() for end in ("source", "target"))
        capacity = link.findtext("{*}preInstalledModule/{*}capacity", "0")
        found_links.append(SndLink((source, target), _rate_bps(capacity, unit)))
    return found_nodes, found_links


def read_sndlib_native(path: Path) -> tuple[list[SndNode], list[SndLink]]:
    """Return the nodes and links of a native (text) file.

    A section goes from ``TITLE (`` to ``)`` and has one row per line. The format does not state the unit of
    coordinates.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or not lines[0].startswith(_FIRST_LINE):
        raise ValueError(f"its first line must begin with {_FIRST_LINE!r}")
    rows: dict[str, list[tuple[str, ...]]] = {}
    title = None
    for number, line in enumerate(lines[1:], 2):
        words = line.partition("#")[0].strip()
        if title is None and words.endswith("("):
            title = words[:-1].strip()
            rows[title] = []
        elif words == ")":
            title = None
        elif words and title in _ROWS:
            if (row := _ROWS[title].fullmatch(words)) is None:
                raise ValueError(f"line {number} is not a row of the section {title}")
            rows[title].append(row.groups())
    if not rows.keys() >= {"NODES", "LINKS"}:
        raise ValueError("it has no sections NODES and LINKS")
    unit = next((value for key, value in rows.get("META", []) if key == "unit"), "")
    nodes = [SndNode(name, None if x is None else (float(x), float(y))) for name, x, y in rows["NODES"]]
    return nodes, [SndLink((a, b), _rate_bps(capacity, unit)) for a, b, capacity in rows["LINKS"]]


def _rate_bps(capacity: str, unit: str) -> float | None:
    value = float(capacity)
    return value * _UNITS_BPS[unit] if value > 0 and unit in _UNITS_BPS else None
