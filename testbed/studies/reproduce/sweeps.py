"""The numbers of the sweeps as Markdown tables, in addition to the figures."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.studies.reproduce.collect import Results
from testbed.studies.reproduce.lines import LINES
from testbed.studies.reproduce.markdown import seconds, table
from testbed.studies.reproduce.paper import METRICS
from testbed.studies.reproduce.settings import SWEEPS, Setting


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
                        *(_cell(results, setting, line.name, setup, metric) for line in LINES),
                    ]
                    for place, points in sweep.points.items()
                    for value, setting in points
                ]
                label = sweep.x_label.replace("$l_{max}$", "l_max")
                yield table(["", label, *(line.label for line in LINES)], rows)


def _cell(results: Results, setting: Setting, policy: str, setup: str, metric: str) -> str:
    mean = results.mean(setting, policy, setup, metric)
    n_runs = len(results.records(setting))
    missing = "" if mean is None or mean.n == n_runs else f" ({mean.n} of {n_runs} runs)"
    return seconds(mean) + missing
