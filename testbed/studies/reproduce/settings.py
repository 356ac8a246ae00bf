"""The paper's experiments: points of the shipped study ``paper``, by the cell or curve that each computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from testbed.experiments.changes import toml_text
from testbed.experiments.sources import value_of
from testbed.studies.sweep.axes import LABEL, SCENARIO, Point, words_of
from testbed.studies.sweep.runs import Run
from testbed.studies.sweep.study import Options, Study, read_study

PLACES = ("Cluster0", "Cluster1", "Cluster2", "AboveNet", "BellCanada", "GTS-CE")
"""Rows of the paper's tables: the clients' site, or the topology."""
TOPOLOGIES = PLACES[3:]
COLUMNS = ((0.1, 64), (0.1, 128), (0.5, 64), (0.5, 128))
"""Columns of the paper's tables: requests per second, output tokens."""


@dataclass(frozen=True)
class Setting:
    """One experiment: a point of a part of the study.

    ``explained``: with the sources of the gain, too. ``emulated``: served by the testbed, too, for comparison with what
    the authors measured.
    """

    id: str
    study: Study = field(repr=False)
    point: Point
    explained: bool = False
    emulated: bool = False

    def run(self, seed: int) -> Run:
        run = self.study.run(self.point, None, seed)
        return run._replace(scenario=run.scenario or str(self.study.target))

    @property
    def rate(self) -> float:
        """Requests per second."""
        return float(dict(str(change).split("=", 1) for change in self.run(0).changes)["workload.rate"])


@dataclass(frozen=True)
class TableVariant:
    """One version of the paper's tables, with a setting for each cell."""

    name: str
    title: str
    note: str
    cells: Mapping[tuple[str, int], Setting]
    """(place, index into ``COLUMNS``) -> setting. Columns may share a setting."""

    @property
    def settings(self) -> list[Setting]:
        return list({setting.id: setting for setting in self.cells.values()}.values())


@dataclass(frozen=True)
class Sweep:
    """One parameter varied on every topology. ``points``: topology -> (value, setting), with ascending
    values.
    """

    name: str
    title: str
    x_label: str
    points: Mapping[str, list[tuple[float, Setting]]] = field(repr=False)

    @property
    def settings(self) -> list[Setting]:
        return [setting for points in self.points.values() for _, setting in points]


@cache
def part(name: str) -> Study:
    return read_study(f"paper:{name}", Options())


def _table(name: str, title: str, note: str, clustered: str, n_requests: int | None) -> TableVariant:
    """Returns a version of the tables.

    ``clustered``: the part with the clustered rows. ``n_requests``: of the scattered rows; None: there are
    none.
    """
    cells = {}
    for place in PLACES[:3] if n_requests is None else PLACES:
        for column, (rate, n_output) in enumerate(COLUMNS):
            at: dict[str, Any] = {"workload.n_output_tokens": n_output, "workload.rate": rate}
            if place in TOPOLOGIES:
                study = part("scattered")
                at |= {SCENARIO: place.lower(), "workload.n_requests": n_requests}
            else:
                study = part(clustered)
                at |= {"clients.site": place}
            texts = {key: toml_text(value) for key, value in at.items() if key in study.keys}
            [point] = [point for point in study.points if texts.items() <= point.items()]
            words = [name, place, *([rate] if "workload.rate" in texts else []), n_output]
            cells[place, column] = Setting(
                "/".join(map(str, words)), study, point, name != "drawn", name == "stated"
            )
    return TableVariant(name, title, note, cells)


CLOSEST = _table(
    "closest",
    "Settings that come closest to the printed numbers",
    "Clustered rows: the reference simulator's clustered branch as published (50 requests at 1 request/s in "
    "every column, 10 input tokens, its own constants, one join order: an A100 early, the other last). "
    "Scattered rows: 50 requests at the column's rate, 20 input tokens.",
    "closest",
    50,
)
STATED = _table(
    "stated",
    "Settings as the paper states them",
    "100 requests at the column's rate, 20 input tokens, join orders drawn; the scattered branch's constants "
    "everywhere.",
    "clustered",
    100,
)
DRAWN = _table(
    "drawn",
    "The clustered branch with join orders drawn",
    "As the clustered rows above it, but every run draws the order in which servers join, as in the scattered rows.",
    "drawn",
    None,
)
TABLES = (CLOSEST, DRAWN, STATED)
LABELS = {policy: CLOSEST.settings[0].study.label(policy) for policy in CLOSEST.settings[0].study.policies}
"""Policy -> its name in tables and figures: each is one row, or one line."""


def _sweep(name: str) -> Sweep:
    study = part(name)
    [key] = [key for key in study.keys if key.startswith(LABEL)]
    points: dict[str, list[tuple[float, Setting]]] = {place: [] for place in TOPOLOGIES}
    for point in study.points:
        [place] = [place for place in TOPOLOGIES if place.lower() == value_of(point[SCENARIO])]
        value = float(point[key])
        points[place].append((value, Setting(f"{name}/{place}/{value:g}", study, point)))
    return Sweep(name, study.description, words_of(key), points)


SWEEPS = tuple(map(_sweep, ("servers", "a100-share", "rate", "length", "servers-and-rate", "actual-rate")))


def settings_of(only: str | None) -> list[Setting]:
    """Returns the settings that ``--only tables``, ``--only figures`` or (None) both need, in a fixed
    order.
    """
    groups: list[TableVariant | Sweep] = []
    if only != "figures":
        groups += TABLES
    if only != "tables":
        groups += SWEEPS
    return [setting for group in groups for setting in group.settings]
