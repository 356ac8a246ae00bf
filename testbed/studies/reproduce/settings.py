"""The paper's experiments: points of the shipped study ``paper``, by the cell or curve that each computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
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
    clustered: str
    """The part with the clustered rows."""
    n_requests: int | None
    """Of the scattered rows; None: there are none."""

    @cached_property
    def cells(self) -> Mapping[tuple[str, int], Setting]:
        """(place, index into ``COLUMNS``) -> setting. Columns may share a setting."""
        cells = {}
        for place in PLACES[:3] if self.n_requests is None else PLACES:
            for column, (rate, n_output) in enumerate(COLUMNS):
                at: dict[str, Any] = {"workload.n_output_tokens": n_output, "workload.rate": rate}
                if place in TOPOLOGIES:
                    study = part("scattered")
                    at |= {SCENARIO: place.lower(), "workload.n_requests": self.n_requests}
                else:
                    study = part(self.clustered)
                    at |= {"clients.site": place}
                texts = {key: toml_text(value) for key, value in at.items() if key in study.keys}
                [point] = [point for point in study.points if texts.items() <= point.items()]
                words = [self.name, place, *([rate] if "workload.rate" in texts else []), n_output]
                cells[place, column] = Setting(
                    "/".join(map(str, words)), study, point, self.name != "drawn", self.name == "stated"
                )
        return cells

    @property
    def settings(self) -> list[Setting]:
        return list({setting.id: setting for setting in self.cells.values()}.values())


@dataclass(frozen=True)
class Sweep:
    """One parameter varied on every topology; ``name`` is the part's."""

    name: str

    @property
    def title(self) -> str:
        return part(self.name).description

    @property
    def x_label(self) -> str:
        return words_of(self._key)

    @property
    def _key(self) -> str:
        [key] = [key for key in part(self.name).keys if key.startswith(LABEL)]
        return key

    @cached_property
    def points(self) -> Mapping[str, list[tuple[float, Setting]]]:
        """Topology -> (value, setting), with ascending values."""
        study = part(self.name)
        points: dict[str, list[tuple[float, Setting]]] = {place: [] for place in TOPOLOGIES}
        for point in study.points:
            [place] = [place for place in TOPOLOGIES if place.lower() == value_of(point[SCENARIO])]
            value = float(point[self._key])
            points[place].append((value, Setting(f"{self.name}/{place}/{value:g}", study, point)))
        return points

    @property
    def settings(self) -> list[Setting]:
        return [setting for points in self.points.values() for _, setting in points]


@cache
def part(name: str) -> Study:
    return read_study(f"paper:{name}", Options())


CLOSEST = TableVariant(
    "closest",
    "Settings that come closest to the printed numbers",
    "Clustered rows: the reference simulator's clustered branch as published (50 requests at 1 request/s in "
    "every column, 10 input tokens, its own constants, one join order: an A100 early, the other last). "
    "Scattered rows: 50 requests at the column's rate, 20 input tokens.",
    "closest",
    50,
)
STATED = TableVariant(
    "stated",
    "Settings as the paper states them",
    "100 requests at the column's rate, 20 input tokens, join orders drawn; the scattered branch's constants "
    "everywhere.",
    "clustered",
    100,
)
DRAWN = TableVariant(
    "drawn",
    "The clustered branch with join orders drawn",
    "As the clustered rows above it, but every run draws the order in which servers join, as in the scattered rows.",
    "drawn",
    None,
)
TABLES = (CLOSEST, DRAWN, STATED)
SWEEPS = tuple(map(Sweep, ("servers", "a100-share", "rate", "length", "servers-and-rate", "actual-rate")))


@cache
def labels() -> Mapping[str, str]:
    """Policy -> its name in tables and figures: each is one row, or one line."""
    study = CLOSEST.settings[0].study
    return {policy: study.label(policy) for policy in study.policies}


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
