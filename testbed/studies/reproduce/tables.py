"""The paper's tables as Markdown: its printed numbers, the testbed's ("ours"), and the deviation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from testbed.studies.reproduce.markdown import ms, seconds, table
from testbed.studies.reproduce.paper import (
    METRICS,
    PRINTED_POLICIES,
    mismatches,
    printed_blocks,
    printed_decision_s,
    printed_s,
)
from testbed.studies.reproduce.runs import Results
from testbed.studies.reproduce.settings import CLOSEST, COLUMNS, PLACES, STATED, TABLES, TableVariant, labels
from testbed.studies.sweep.runs import Measures

HEADER = [f"{rate:g}/s, {n_output} tokens" for rate, n_output in COLUMNS]


class Deviation(NamedTuple):
    """A printed cell of the paper's tables and ours. ``ratio``: ours / printed - 1."""

    variant: str
    metric: str
    place: str
    policy: str
    column: int
    printed_s: float
    ours_s: float
    half_width_s: float

    @property
    def ratio(self) -> float:
        return self.ours_s / self.printed_s - 1


def deviations(results: Results, variant: TableVariant) -> list[Deviation]:
    """Returns all cells that the paper prints and we have, with session setups as in the reference
    simulator.
    """
    found = []
    for metric in METRICS:
        for (place, column), setting in variant.cells.items():
            for policy in PRINTED_POLICIES:
                mean = results.mean(setting, policy, "reference", metric)
                if mean is not None:
                    printed = printed_s(metric, place, policy, column)
                    cell = (variant.name, metric, place, policy, column)
                    found.append(Deviation(*cell, printed, mean.mean, mean.half_width))
    return found


def table_lines(results: Results) -> Iterator[str]:
    """Yields Markdown of all variants of the tables."""
    for variant in TABLES:
        yield f"## {variant.title}"
        yield variant.note
        yield summary(deviations(results, variant))
        for metric, title in METRICS.items():
            yield f"### {title} [s], with the session-setup constants"
            yield "printed (simulated) → ours ± 95 % (deviation)"
            yield _against_paper(results, variant, metric)
        for metric, title in METRICS.items():
            yield f"### {title} [s], without the session-setup constants"
            yield _without(results, variant, metric)
        for setup, words in (("reference", "with"), ("none", "without")):
            yield f"### Time per token of all policies [s], {words} the session-setup constants"
            yield _all_policies(results, variant, setup)


def summary(cells: list[Deviation]) -> str:
    """Returns one sentence on how many cells are within which deviation, the median and the largest
    deviation.
    """
    sizes = sorted(abs(cell.ratio) for cell in cells)
    within = ", ".join(f"{sum(s <= limit for s in sizes)} within {limit:.0%}" for limit in (0.02, 0.05, 0.1))
    median = (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
    by_metric = ", ".join(
        f"{title.lower()} {sum(abs(cell.ratio) <= 0.02 for cell in cells if cell.metric == metric)}"
        for metric, title in METRICS.items()
    )
    worst = max(cells, key=lambda cell: abs(cell.ratio))
    rate, n_output = COLUMNS[worst.column]
    return (
        f"Of {len(cells)} printed cells {within} (within 2%: {by_metric}); median deviation {median:.1%}; largest {worst.ratio:+.1%} "
        f"({worst.place}, {labels()[worst.policy]}, {rate:g}/s, {n_output} tokens, {METRICS[worst.metric].lower()})."
    )


def _against_paper(results: Results, variant: TableVariant, metric: str) -> str:
    rows = []
    for place in _places(variant):
        for policy in PRINTED_POLICIES:
            cells = []
            for column in range(len(COLUMNS)):
                mean = results.mean(variant.cells[place, column], policy, "reference", metric)
                printed = printed_s(metric, place, policy, column)
                deviation = "" if mean is None else f" ({mean.mean / printed - 1:+.1%})"
                cells.append(f"{printed:.2f} → {seconds(mean)}{deviation}")
            rows.append([place, labels()[policy], *cells])
    return table(["", "", *HEADER], rows)


def _without(results: Results, variant: TableVariant, metric: str) -> str:
    """Returns a table of our times without session setups, and of the gain from PETALS to the proposed
    policy.

    The gain is shown without session setups, with them, and as printed.
    """
    rows = []
    for place in _places(variant):
        settings = [variant.cells[place, column] for column in range(len(COLUMNS))]
        for policy in PRINTED_POLICIES:
            means = [results.mean(setting, policy, "none", metric) for setting in settings]
            rows.append([place, labels()[policy], *map(seconds, means)])
        gains = []
        for column, setting in enumerate(settings):
            ours = [
                gain(*(results.mean(setting, policy, setup, metric) for policy in PRINTED_POLICIES))
                for setup in ("none", "reference")
            ]
            petals_s, proposed_s = (printed_s(metric, place, policy, column) for policy in PRINTED_POLICIES)
            gains.append(
                f"{percent(ours[0])} (with: {percent(ours[1])}; printed: {1 - proposed_s / petals_s:.0%})"
            )
        rows.append([place, "gain", *gains])
    return table(["", "", *HEADER], rows)


def gain(before: object, after: object) -> float:
    """Returns 1 - after / before of two ``Mean``; nan if one of them is None."""
    means = (getattr(before, "mean", math.nan), getattr(after, "mean", math.nan))
    return 1 - means[1] / means[0]


def percent(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.0%}"


def _all_policies(results: Results, variant: TableVariant, setup: str) -> str:
    rows = []
    for place in _places(variant):
        for policy, label in labels().items():
            means = [
                results.mean(variant.cells[place, column], policy, setup, "per_token_s")
                for column in range(len(COLUMNS))
            ]
            rows.append([place, label, *map(seconds, means)])
    return table(["", "", *HEADER], rows)


def _places(variant: TableVariant) -> list[str]:
    return [place for place in PLACES if (place, 0) in variant.cells]


def mismatch_lines() -> Iterator[str]:
    """Yields one sentence per printed number that contradicts other printed numbers."""
    for m in mismatches():
        yield (
            f"The printed {m.printed_s:.2f} s per token of {labels()[m.policy]} on {m.place} ({m.rate:g}/s, "
            f"{m.n_output_tokens} tokens) contradicts the first and remaining tokens printed for the same cell, "
            f"which give {m.from_parts_s:.2f} s."
        )


def block_lines(results: Results) -> Iterator[str]:
    """Yields Markdown: the numbers of blocks on an A100 and on a MIG, and those that the paper reports."""
    printed = {policy: printed_blocks(policy) for policy in PRINTED_POLICIES}
    yield "## Blocks per server"
    yield (
        "On an A100 and on a MIG; ranges are over the runs. The paper reports "
        + " and ".join(f"{a} and {b} for {labels()[policy]}" for policy, (a, b) in printed.items())
        + ", and does not state for which setting."
    )
    for variant in (CLOSEST, STATED):
        rows = []
        for place in _places(variant):
            for policy in PRINTED_POLICIES:
                cells = []
                for column in range(len(COLUMNS)):
                    runs = results.runs(variant.cells[place, column])
                    cells.append(
                        " and ".join(_range(runs, f"{policy}/blocks/{kind}") for kind in ("a100", "mig"))
                    )
                rows.append([place, labels()[policy], *cells])
        yield f"### {variant.title}"
        yield table(["", "", *HEADER], rows)


def _range(runs: Sequence[Measures], beginning: str) -> str:
    values = [int(value or 0) for run in runs for name, value in run.items() if name.startswith(beginning)]
    if not values:
        return "-"
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def run_time_table(results: Results) -> str:
    """Returns a table of the processor time (ms) of all decisions in a run of 100 requests, and of the
    paper's MATLAB.
    """
    rows = []
    groups = {"clustered": PLACES[:3], **{place: (place,) for place in PLACES[3:]}}
    for group, places in groups.items():
        cells = []
        for policy in labels():
            values = [
                value
                for place in places
                for column in range(len(COLUMNS))
                for value in results.values(STATED.cells[place, column], policy, "reference", "decision_s")
            ]
            cells.append(ms(values))
        printed = []
        for policy in PRINTED_POLICIES:
            mean_s, plus_minus_s = printed_decision_s(group, policy)
            printed.append(f"{mean_s * 1e3:.1f} ± {plus_minus_s * 1e3:.1f}")
        rows.append([group, *printed, *cells])
    header = ["", *(f"MATLAB: {labels()[policy]}" for policy in PRINTED_POLICIES)]
    return table([*header, *labels().values()], rows)
