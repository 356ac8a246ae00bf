"""A suite: settings on which policies are scored, and the frozen figures of the reference policies.

A suite is a folder: ``suite.toml`` (``SuiteTable``), scenario files beside it, and ``reference.json``
(``Reference``), which ``python -m benchmarks suite`` makes. It never changes under its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field, ValidationError

from testbed.errors import UserError
from testbed.experiments import Change, Override, load_experiment
from testbed.experiments.fields import Table
from testbed.experiments.problems import explain, unknown
from testbed.experiments.sources import read_toml
from testbed.studies.score.marks import Best, Figures
from testbed.studies.score.running import Limits
from testbed.studies.sweep.runs import Run

SUITE, REFERENCE = "suite.toml", "reference.json"


class SettingTable(Table):
    """``[[setting]]``: a scenario with changes (``--set``), and the objective that its requests should meet.

    ``scenario`` is a file in the suite's folder, or a shipped scenario's name. ``quick`` settings are those of
    ``--quick``. ``engine``: the one that serves it, where it was frozen with another than a run would have today. All seeds know the same past requests, so that a policy has one placement for them.
    """

    name: str
    about: str
    scenario: str
    objective: str
    set: list[str] = Field(default_factory=list)
    quick: bool = False
    engine: Literal["virtual"] | None = None


class LimitsTable(Table):
    """``[limits]``: the CPU time that a policy may take, in seconds; see ``Limits``."""

    placement_s: Annotated[float, Field(strict=False, gt=0)] = Limits().placement_s
    route_s: Annotated[float, Field(strict=False, gt=0)] = Limits().route_s
    run_s: Annotated[float, Field(strict=False, gt=0)] = Limits().run_s


class SuiteTable(Table):
    """A suite's file. ``seeds``: the frozen seeds of every setting; ``quick_seeds``: those of ``--quick``. ``set``: changes to all settings. ``references``: the policies whose best figures are 1."""

    name: str
    description: str
    seeds: Annotated[list[int], Field(min_length=1)]
    quick_seeds: Annotated[list[int], Field(min_length=1)]
    references: Annotated[list[str], Field(min_length=1)]
    set: list[str] = Field(default_factory=list)
    limits: LimitsTable = LimitsTable()
    setting: Annotated[list[SettingTable], Field(min_length=1)]


class Reference(msgspec.Struct, frozen=True):
    """The frozen figures: by setting the best of the reference policies (``best``), and those of each policy
    by seed (``policies``: setting -> policy -> a ``Figures`` per seed; none if it has no placement).
    """

    suite: str
    best: dict[str, Best]
    policies: dict[str, dict[str, list[Figures]]]


@dataclass(frozen=True)
class Setting:
    """A setting: a scenario (file or shipped name) and all its changes."""

    name: str
    about: str
    target: str
    changes: tuple[str, ...]
    is_quick: bool
    engine: str | None = None

    def run(self, changes: Sequence[Override], policy: str, seed: int) -> Run:
        """Return a policy's run of the setting with a seed; ``changes``: as ``all_changes``."""
        return Run(tuple(changes), policy, seed, self.target, self.engine)


@dataclass(frozen=True)
class Suite:
    """A suite as it is scored. ``reference`` is ``None`` before it was frozen."""

    name: str
    description: str
    folder: Path
    seeds: tuple[int, ...]
    quick_seeds: tuple[int, ...]
    references: tuple[str, ...]
    settings: tuple[Setting, ...]
    limits: Limits
    reference: Reference | None

    def best(self) -> Mapping[str, Best]:
        """Return the best reference figures by setting. Raises ``UserError`` if some were never frozen."""
        found = {} if self.reference is None else self.reference.best
        missing = [setting.name for setting in self.settings if setting.name not in found]
        if missing:
            raise UserError(
                f"{self.folder / REFERENCE}: has no figures of {missing[0]}; make them with `python -m benchmarks "
                f"suite {self.folder} --out DIR`"
            )
        return found

    def quick_settings(self) -> tuple[Setting, ...]:
        return tuple(setting for setting in self.settings if setting.is_quick)


def all_changes(setting: Setting) -> tuple[Override, ...]:
    """Return a setting's changes with the past requests that every seed knows: those of the scenario's own seed.

    Raises ``UserError`` if the setting is not valid.
    """
    known = load_experiment(setting.target, setting.changes).problem.length_samples
    return (*setting.changes, Change("workload.known_lengths", [list(lengths) for lengths in known]))


def shipped_suites() -> dict[str, Path]:
    """Return the folders of the shipped suites by name."""
    folder = Path(str(resources.files("scenarios"))) / "suites"
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{SUITE}"))}


def read_suite(name: str) -> Suite:
    """Read a shipped suite by its name, or one in a folder. Raises ``UserError`` for whatever is wrong in it."""
    shipped = shipped_suites()
    folder = shipped.get(name, Path(name))
    if not (folder / SUITE).is_file():
        raise UserError(f"--suite: {unknown('suite', name, shipped)}, or a folder with a {SUITE}")
    path = folder / SUITE
    try:
        table = SuiteTable.model_validate(read_toml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error)}") from None
    if table.name in shipped and folder.resolve() != shipped[table.name].resolve():
        raise UserError(
            f"{path}: name: {table.name} is a shipped suite, which is another one; give this one a name of its own"
        )
    names = [setting.name for setting in table.setting]
    for i, setting in enumerate(names):
        if setting in names[:i]:
            raise UserError(f"{path}: two settings are called {setting}; give one another name")
    settings = tuple(
        Setting(
            setting.name,
            setting.about,
            str(folder / setting.scenario) if setting.scenario.endswith(".toml") else setting.scenario,
            (*table.set, *setting.set, f'workload.slo="{setting.objective}"'),
            setting.quick,
            setting.engine,
        )
        for setting in table.setting
    )
    return Suite(
        table.name,
        table.description,
        folder,
        tuple(table.seeds),
        tuple(table.quick_seeds),
        tuple(table.references),
        settings,
        Limits(**table.limits.model_dump()),
        _read_reference(folder / REFERENCE),
    )


def _read_reference(path: Path) -> Reference | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Reference)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{path}: is no table of reference figures ({error}); make it again") from None
