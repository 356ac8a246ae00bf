"""Which engines served the runs of a study, and why: as `testbed simulate` states it of each run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from testbed.experiments.units import counted
from testbed.studies.sweep.runs import Record


class EngineShare(NamedTuple):
    """An engine, how many of a study's runs it served, why it served the first of them, and whether that is so of all."""

    engine: str
    engine_why: str
    n_runs: int
    is_of_all: bool


def engines_of(records: Iterable[Record]) -> list[EngineShare]:
    """Returns the engines that served ``records``, that of most runs first. A run that failed has none."""
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record.engine:
            reasons.setdefault(record.engine, []).append(record.engine_why)
    shares = [
        EngineShare(engine, whys[0], len(whys), len(set(whys)) == 1) for engine, whys in reasons.items()
    ]
    return sorted(shares, key=lambda share: -share.n_runs)


def engines_text(shares: Sequence[EngineShare]) -> list[str]:
    """Returns a line per engine: its name, for how many runs if there are several engines, and why."""
    lines = []
    for share in shares:
        part = f" ({counted(share.n_runs, 'runs')})" if len(shares) > 1 else ""
        whose = "" if share.is_of_all else " (the first run's reason)"
        lines.append(f"engine {share.engine}{part}: {share.engine_why}{whose}")
    return lines
