"""The numbers of the sweeps as Markdown tables, in addition to the figures."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.studies.reproduce.markdown import ms, seconds, table
from testbed.studies.reproduce.paper import METRICS
from testbed.studies.reproduce.runs import Results
from testbed.studies.reproduce.settings import LABELS, SWEEPS, Setting


def sweep_lines(results: Results) -> Iterator[str]:
    """Yields Markdown tables of every sweep and metric, with and without session setups."""
    for sweep in SWEEPS:
        yield f"## {sweep.title}"
        for setup, words in (("reference", "with"), ("none", "without")):
            for metric, title in METRICS.items():
                yield f"### {title} [s], {words} the session-setup constants"
                rows = [
                    [
                        place,
                        f"{value:g}",
                        *(_cell(results, setting, policy, setup, metric) for policy in LABELS),
                    ]
                    for place, points in sweep.points.items()
                    for value, setting in points
                ]
                yield table(["", sweep.x_label, *LABELS.values()], rows)


def run_time_lines(results: Results) -> Iterator[str]:
    """Yields a Markdown table per sweep: the processor time of all decisions in a run, along the sweep."""
    for sweep in SWEEPS:
        yield f"## {sweep.title}"
        rows = [
            [
                place,
                f"{value:g}",
                *(ms(results.values(setting, policy, "reference", "decision_s")) for policy in LABELS),
            ]
            for place, points in sweep.points.items()
            for value, setting in points
        ]
        yield table(["", sweep.x_label, *LABELS.values()], rows)


def _cell(results: Results, setting: Setting, policy: str, setup: str, metric: str) -> str:
    mean = results.mean(setting, policy, setup, metric)
    n_runs = len(results.runs(setting))
    missing = "" if mean is None or mean.n == n_runs else f" ({mean.n} of {n_runs} runs)"
    return seconds(mean) + missing
