"""Reads the files of Helix' artifact: the log of a run, its cluster, and the measured times of its GPUs.

The files are not the testbed's own: anything wrong in them raises ``UserError`` with one sentence.
"""

from __future__ import annotations

import ast
import csv
import gzip
import math
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policies.problem import Hop
from policies.steps import Blocks
from testbed.errors import UserError

_UNITS = {"mbps": 1e6, "kbps": 1e3, "gbps": 1e9, "bps": 1.0, "MilliSec": 1e-3, "Sec": 1.0, "MicroSec": 1e-6}
"""Units as the artifact's code uses them, in bytes per second and seconds: its "mbps" is a million *bytes*
per second.
"""
_MAX_LAYERS = 10_000


@dataclass
class LoggedQuery:
    """A query of the log, which may end after the log does.

    ``sent_at_s`` and ``came_at_s``: when each pass through its chain was sent and came back, first that of
    the prompt.
    """

    n_input: int
    n_output: int
    hops: tuple[Hop, ...]
    sent_at_s: list[float] = field(default_factory=list)
    came_at_s: list[float] = field(default_factory=list)


def read_log(folder: Path) -> dict[int, LoggedQuery]:
    """Reads the queries that were sent, by their number, from ``query_route.txt`` and ``events.txt`` (or
    ``.gz``).

    Raises ``UserError`` if a file is missing or malformed.
    """
    queries = {}
    for where, row in _tuples(folder, "query_route.txt"):
        number, n_input, n_output, nodes, starts, ends = _route(where, row)
        chain = zip(nodes, starts, ends, strict=True)
        hops = tuple(Hop(node - 1, first, last) for node, first, last in chain if node != 0)
        queries[number] = LoggedQuery(n_input, n_output, hops)
    for where, row in _tuples(folder, "events.txt"):
        at_s, number, way, *_ = _event(where, row)
        if number not in queries:
            raise UserError(f"{where}: query {number} has no route in query_route.txt")
        query = queries[number]
        (query.sent_at_s if way == "out" else query.came_at_s).append(at_s)
        if len(query.came_at_s) > len(query.sent_at_s):
            raise UserError(f"{where}: query {number} came back without having been sent")
    return {number: query for number, query in queries.items() if query.sent_at_s}


def _tuples(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Yields (file and line number, content) of each line that is not empty."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise UserError(f"{folder} has no {name} (nor {name}.gz)")
    try:
        opened = (
            gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
        )
        with opened as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", _literal(f"{path}, line {number}", line)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _literal(where: str, line: str) -> Any:
    try:
        return ast.literal_eval(line.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UserError(f"{where}: not a tuple of numbers, words and lists") from None


def _route(where: str, row: Any) -> tuple[int, int, int, list[int], list[int], list[int]]:
    match row:
        case (int(number), int(n_input), int(n_output), list(nodes), list(starts), list(ends)):
            columns = nodes, starts, ends
            if min(n_input, n_output) >= 1 and len({len(column) for column in columns}) == 1:
                whole = all(isinstance(value, int) for column in columns for value in column)
                if whole and all(
                    node == 0 or (node > 0 and 0 <= first < last <= _MAX_LAYERS)
                    for node, first, last in zip(*columns, strict=True)
                ):
                    return number, n_input, n_output, nodes, starts, ends
    raise UserError(
        f"{where}: a route is (query, input tokens, output tokens, nodes, their first layers, their end layers)"
    )


def _event(where: str, row: Any) -> tuple[float, int, str]:
    match row:
        case (float() | int() as at_s, int(number), "out" | "in" as way, "prompt" | "decode", *_):
            if math.isfinite(at_s):
                return float(at_s), number, way
    raise UserError(f'{where}: an event is (seconds, query, "out" or "in", "prompt" or "decode", ...)')


@dataclass(frozen=True)
class Cluster:
    """A cluster of Helix.

    ``kinds``: the GPU of each compute node. ``links``: (source, target) -> (bytes per second, latency in
    seconds), where -1 is the hub. A link that exists in only one direction stands for both.
    """

    kinds: Sequence[str]
    links: dict[tuple[int, int], tuple[float, float]]


def read_cluster(path: Path) -> Cluster:
    """Reads an ``ini`` file with sections ``ComputeNode-n`` and ``Link-from-to`` (``source`` and ``sink`` are
    the hub).

    Raises ``UserError`` if it is malformed.
    """
    parser = ConfigParser(interpolation=None)
    try:
        with path.open(encoding="utf-8") as file:
            parser.read_file(file)
        kinds = {
            int(name.removeprefix("ComputeNode-")): parser[name]["type"].strip()
            for name in parser.sections()
            if name.startswith("ComputeNode-")
        }
        links = {}
        for name in parser.sections():
            if name.startswith("Link-"):
                ends = name.split("-")[1:]
                source, target = (-1 if end in ("source", "sink") else int(end) for end in ends)
                bandwidth, latency = (
                    _quantity(path, name, parser[name][key]) for key in ("bandwidth", "latency")
                )
                links[source, target] = bandwidth, latency
    except (OSError, UnicodeDecodeError, ConfigError, KeyError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{path} is not a cluster of Helix' artifact: {why}") from error
    if sorted(kinds) != list(range(len(kinds))) or not kinds:
        raise UserError(f"{path}: its compute nodes must be numbered 0, 1, ...")
    return Cluster([kinds[n] for n in range(len(kinds))], links)


def _quantity(path: Path, section: str, text: str) -> float:
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*\*\s*(\w+)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise UserError(f"{path}: [{section}] has {text!r}, which is not a number with a unit")
    return float(found[1]) * _UNITS[found[2]]


Table = Sequence[tuple[float, float]]
"""(size of a batch, seconds per layer), sorted by size."""


class MeasuredTimes:
    """Times of one kind of GPU from its tables, a ``nodes.batching.BatchTimes``.

    Between measured sizes of batches, times are interpolated linearly; above the largest they are
    extrapolated. Below the smallest, a prompt is interpolated to zero; but no decode or prompt takes less
    than the smallest measured decode, since each reads the layer's weights once. Each step takes ``base_s``
    more.
    """

    def __init__(self, prompt: Table, decode: Table, base_s: float = 0.0) -> None:
        self._base_s = base_s
        self._decode = decode
        self._prompt = prompt
        self._least_s = decode[0][1]

    def batch_s(
        self, blocks: Blocks, positions: Sequence[int], prompt: range, sizes: Sequence[int] = ()
    ) -> float:
        layer_s = 0.0
        if prompt:
            layer_s += max(self._least_s, _at([(0.0, 0.0), *self._prompt], len(prompt)))
        if positions:
            layer_s += max(self._least_s, _at(self._decode, len(positions)))
        return self._base_s + (blocks if isinstance(blocks, int) else len(blocks)) * layer_s


def _at(table: Table, size: float) -> float:
    at = min(max(1, bisect_left(table, (size, 0.0))), len(table) - 1)
    (x0, y0), (x1, y1) = table[at - 1], table[at]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def read_times(folder: Path, kind: str, base_s: float = 0.0) -> MeasuredTimes:
    """Reads ``{kind}_prompt.csv`` (tokens, milliseconds per layer) and ``{kind}_decode.csv`` (sequences, the
    same).
    """
    prompt, decode = (_read_table(folder / f"{kind.lower()}_{phase}.csv") for phase in ("prompt", "decode"))
    return MeasuredTimes(prompt, decode, base_s)


def _read_table(path: Path) -> list[tuple[float, float]]:
    rows = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                if row:
                    size, milliseconds = (float(value) for value in row)
                    rows.append((size, milliseconds / 1e3))
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path} must have lines of two numbers, a batch's size and milliseconds: {error}"
        ) from error
    rows = sorted(row for row in rows if row[0] != 0)  # an empty batch is not measured
    sizes = [size for size, _ in rows]
    if (
        len(rows) < 2
        or len(set(sizes)) < len(sizes)
        or not all(math.isfinite(v) and v >= 0 for row in rows for v in row)
    ):
        raise UserError(f"{path} must have two or more different sizes, with times of 0 or more")
    return rows
