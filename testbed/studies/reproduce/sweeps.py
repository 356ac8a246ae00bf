"""The numbers of the sweeps as Markdown tables, in addition to the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from testbed.studies.reproduce.markdown import ms, seconds, table
from testbed.studies.reproduce.paper import METRICS
from testbed.studies.reproduce.runs import Results
from testbed.studies.reproduce.settings import SWEEPS, Setting, Sweep, labels


def sweep_lines(results: Results) -> Iterator[str]:
    """Yields Markdown tables of every sweep and metric, with and without session setups."""
    for sweep in SWEEPS:
        yield f"## {sweep.title}"
        for setup, words in (("reference", "with"), ("none", "without")):
            for metric, title in METRICS.items():
                yield f"### {title} [s], {words} the session-setup constants"
                yield _table(sweep, partial(_cell, results, setup, metric))


def run_time_lines(results: Results) -> Iterator[str]:
    """Yields a Markdown table per sweep: the processor time of all decisions in a run, along the sweep."""
    for sweep in SWEEPS:
        yield f"## {sweep.title}"
        yield _table(
            sweep, lambda setting, policy: ms(results.values(setting, policy, "reference", "decision_s"))
        )


def _table(sweep: Sweep, cell: Callable[[Setting, str], str]) -> str:
    """Returns a table with a row per point of the sweep; ``cell`` returns what stands there for a setting and a policy."""
    rows = [
        [place, f"{value:g}", *(cell(setting, policy) for policy in labels())]
        for place, points in sweep.points.items()
        for value, setting in points
    ]
    return table(["", sweep.x_label, *labels().values()], rows)


def _cell(results: Results, setup: str, metric: str, setting: Setting, policy: str) -> str:
    mean = results.mean(setting, policy, setup, metric)
    n_runs = len(results.runs(setting))
    missing = "" if mean is None or mean.n == n_runs else f" ({mean.n} of {n_runs} runs)"
    return seconds(mean) + missing
