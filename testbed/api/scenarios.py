"""``testbed.scenario``: a scenario as an object, from a file, a shipped one, or a dict of the same keys."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.experiments import Change, Target, dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.problems import shown
from testbed.experiments.sources import Document

_DEEPEST = 50
"""No scenario has tables within so many others."""


@dataclass(frozen=True, repr=False)
class Scenario:
    """A scenario that has been checked; ``scenario`` makes it. No policy's code has run yet.

    ``target`` is what was given, and ``changes`` are the changes to it.
    """

    target: Target
    changes: tuple[Change, ...] = ()

    @cached_property
    def _experiment(self) -> Experiment:
        return load_experiment(self.target, self.changes)

    @property
    def name(self) -> str:
        """The scenario's name: its file's, or its key ``name``."""
        return self._experiment.name

    @property
    def description(self) -> str:
        """What the file says of itself."""
        return self._experiment.description

    @property
    def tables(self) -> dict[str, Any]:
        """The resolved scenario: every name looked up, every unit converted (as `testbed show` prints)."""
        return copy.deepcopy(dict(self._experiment.document))

    @property
    def toml(self) -> str:
        """The resolved scenario as TOML text, which is a scenario file."""
        return dump_toml(self._experiment)

    def changed(self, changes: Mapping[str, Any]) -> Scenario:
        """Return this scenario with other values, by key path. Raises ``UserError``."""
        return scenario(self, changes)

    def __repr__(self) -> str:
        changes = {change.key: change.value for change in self.changes}
        return f"scenario({str(self.target)!r}{f', {changes}' if changes else ''})"


Given = Scenario | str | os.PathLike[str] | Mapping[str, Any]
"""What a scenario may be given as."""


def scenario(source: Given, changes: Mapping[str, Any] | None = None) -> Scenario:
    """Return a checked scenario.

    ``source``: the path of a scenario file, a shipped scenario's name, a dict of the same keys, or a scenario.
    ``changes``: other values by key path, ``{"workload.rate": 0.5, "servers.0.count": 3}``, as `--set` has them.
    Raises ``UserError`` with one sentence: file, key path, what is wrong.
    """
    if isinstance(source, Scenario):
        target, before = source.target, source.changes
    elif isinstance(source, Mapping):
        tables = plain(source, "scenario")
        target, before = Document(tables, str(tables.get("name", "scenario"))), ()
    elif isinstance(source, str | os.PathLike):
        target, before = os.fspath(source), ()
    else:
        raise UserError(f"a scenario is a name, a file, a dict or a Scenario, not {source!r}")
    if not isinstance(changes or {}, Mapping):
        raise UserError(f"changes are a dict of values by key path, not {changes!r}")
    new = tuple(Change(str(key), plain(value, str(key))) for key, value in (changes or {}).items())
    made = Scenario(target, (*before, *new))
    _ = made.name  # which checks it
    return made


def plain(value: Any, key: str) -> Any:
    """Return ``value`` as TOML data: numbers of numpy, tuples and paths are made plain.

    ``key`` names it in messages. Raises ``UserError`` for what no scenario file can hold.
    """
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{key}: {value!r} is no text that a file can hold: it has half of a character"
            ) from None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{key}: {shown(value)} does not fit into 64 bits, as whole numbers of a file do")
    if isinstance(value, bool | int | float | str):
        return value
    if key.count(".") > _DEEPEST:
        raise UserError(f"{key[:60]}...: tables are nested too deep, or contain themselves")
    if isinstance(value, Mapping):
        return {str(name): plain(one, f"{key}.{name}") for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, f"{key}.{number}") for number, one in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return plain(value.tolist(), key)
    raise UserError(
        f"{key}: a scenario has no values such as {value!r} ({type(value).__name__}); give a number, a text, "
        "true or false, or a list or table of these"
    )


def whole(value: Any, name: str) -> int | None:
    """Return a whole number, of numpy too, or ``None``. Raises ``UserError`` for anything else."""
    try:
        if not isinstance(value, bool):
            return None if value is None else operator.index(value)
    except TypeError:
        pass
    raise UserError(f"{name} must be a whole number, not {value!r}")


def flag(value: Any, name: str) -> bool:
    """Return what is true or false. Raises ``UserError`` for anything else."""
    if isinstance(value, bool):
        return value
    raise UserError(f"{name} must be True or False, not {value!r}")


def slo_text(slo: str | Mapping[str, float] | None) -> str | None:
    """Return objectives as ``--slo`` has them; ``None`` if there are none. Raises ``UserError``."""
    if slo is None or isinstance(slo, str):
        return slo or None
    if not isinstance(slo, Mapping):
        raise UserError(f"slo must be a text or a dict of seconds by metric, not {slo!r}")
    limits_s = {metric: plain(limit, f"slo: {metric}") for metric, limit in slo.items()}
    for metric, limit in limits_s.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise UserError(f"slo: {metric} must be a number of seconds, not {slo[metric]!r}")
    return ",".join(f"{metric}={limit_s}s" for metric, limit_s in limits_s.items()) or None
