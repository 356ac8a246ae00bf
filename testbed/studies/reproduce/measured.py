"""What the authors measured on their own system, beside their simulation, ours, and the testbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from testbed.results.intervals import Mean
from testbed.studies.reproduce.markdown import table
from testbed.studies.reproduce.paper import METRICS, PRINTED_POLICIES, printed_s
from testbed.studies.reproduce.runs import Results
from testbed.studies.reproduce.settings import CLOSEST, COLUMNS, PLACES, STATED, labels
from testbed.studies.reproduce.tables import HEADER

SOURCES = {
    "printed": "the paper's simulation",
    "closest": "our simulation, closest settings",
    "stated": "our simulation, stated settings",
    "emulated": "the testbed, stated settings",
}
"""What is held against the measured cells, by its key in ``--json``."""


class Cell(NamedTuple):
    """A measured cell of the paper's tables in seconds, and the same by each of ``SOURCES`` that has it.

    ``bare_s``: our simulation under the stated settings, without session setups.
    """

    metric: str
    place: str
    policy: str
    column: int
    measured_s: float
    by_source_s: dict[str, float]
    bare_s: float | None

    @property
    def n_output_tokens(self) -> int:
        return COLUMNS[self.column][1]

    def ratio(self, source: str) -> float | None:
        """Returns the source's time / the measured one - 1; None if it has none."""
        found_s = self.by_source_s.get(source)
        return None if found_s is None else found_s / self.measured_s - 1


class Fit(NamedTuple):
    """Two constants, the seconds before every first token under each policy, and what they predict of other cells.

    They fit one half of the cells of time per token, with least squares of the relative errors, on top of our
    simulation without session setups. ``ratios`` are the errors on the other half.
    """

    fitted_on: str
    constants_s: dict[str, float]
    ratios: tuple[float, ...]


def measured_cells(results: Results) -> list[Cell]:
    """Returns all cells that the authors measured."""
    found = []
    for metric in METRICS:
        for place in PLACES:
            for policy in PRINTED_POLICIES:
                for column in range(len(COLUMNS)):
                    stated, closest = STATED.cells[place, column], CLOSEST.cells[place, column]
                    means: dict[str, Mean | None] = {
                        "closest": results.mean(closest, policy, "reference", metric),
                        "stated": results.mean(stated, policy, "reference", metric),
                        "emulated": results.mean(stated, policy, "emulated", metric),
                    }
                    by_source_s = {"printed": printed_s(metric, place, policy, column)}
                    by_source_s |= {name: mean.mean for name, mean in means.items() if mean is not None}
                    bare = results.mean(stated, policy, "none", metric)
                    measured_s = printed_s(metric, place, policy, column, "measured")
                    bare_s = None if bare is None else bare.mean
                    found.append(Cell(metric, place, policy, column, measured_s, by_source_s, bare_s))
    return found


def fits(cells: Sequence[Cell]) -> list[Fit]:
    """Returns the fits on each half of the cells of time per token: by output tokens, and by rate."""
    halves: dict[str, Callable[[Cell], bool]] = {
        "64 output tokens": lambda cell: COLUMNS[cell.column][1] == 64,
        "128 output tokens": lambda cell: COLUMNS[cell.column][1] == 128,
        "0.1 requests/s": lambda cell: COLUMNS[cell.column][0] == 0.1,
        "0.5 requests/s": lambda cell: COLUMNS[cell.column][0] == 0.5,
    }
    of_tokens = [cell for cell in cells if cell.metric == "per_token_s" and cell.bare_s is not None]
    found = []
    for name, is_in in halves.items():
        constants_s = {
            policy: fitted_constant_s([c for c in of_tokens if is_in(c) and c.policy == policy])
            for policy in PRINTED_POLICIES
        }
        ratios = tuple(
            ((c.bare_s or 0.0) + constants_s[c.policy] / c.n_output_tokens) / c.measured_s - 1
            for c in of_tokens
            if not is_in(c)
        )
        found.append(Fit(name, constants_s, ratios))
    return found


def fitted_constant_s(cells: Sequence[Cell]) -> float:
    """Returns the seconds per request that make ``bare_s`` most like the measured times, in relative terms; 0 without cells."""
    pairs = [
        (1 / (c.n_output_tokens * c.measured_s), 1 - c.bare_s / c.measured_s)
        for c in cells
        if c.bare_s is not None
    ]
    square = sum(x * x for x, _ in pairs)
    return sum(x * y for x, y in pairs) / square if square else 0.0


def spread(ratios: Sequence[float]) -> str:
    """Returns in words how far cells are from the measured ones."""
    if not ratios:
        return "no cells"
    sizes = [abs(ratio) for ratio in ratios]
    within = ", ".join(f"{sum(s <= limit for s in sizes)} within {limit:.0%}" for limit in (0.1, 0.2, 0.3))
    return f"of {len(sizes)} cells {within}; median {median(sizes):.0%}, from {min(ratios):+.0%} to {max(ratios):+.0%}"


def summary(cells: Sequence[Cell]) -> list[str]:
    """Returns a sentence per source on its distance from the measured times per token, and one per fit."""
    lines = []
    for source, words in SOURCES.items():
        ratios = [
            ratio
            for cell in cells
            if cell.metric == "per_token_s" and (ratio := cell.ratio(source)) is not None
        ]
        lines.append(f"Measured time per token, {words}: {spread(ratios)}.")
    for fit in fits(cells):
        constants = " and ".join(f"{s:.0f} s for {labels()[policy]}" for policy, s in fit.constants_s.items())
        lines.append(
            f"Two constants fitted on {fit.fitted_on} ({constants}) predict the others: {spread(fit.ratios)}."
        )
    return lines


def measured_lines(results: Results) -> Iterator[str]:
    """Yields Markdown: every measured cell and how far each source is from it."""
    cells = measured_cells(results)
    yield "## What the authors measured"
    yield (
        "The first number is the authors' measurement on their own system, with BLOOM-176B on real A100 and MIG. Then come, "
        f"as deviations from it, {', '.join(SOURCES.values())}. All have the published session setups."
    )
    yield "\n".join(f"- {line}" for line in summary(cells))
    for metric, title in METRICS.items():
        rows = []
        for place in PLACES:
            for policy in PRINTED_POLICIES:
                own = [c for c in cells if (c.metric, c.place, c.policy) == (metric, place, policy)]
                rows.append([place, labels()[policy], *map(_text, own)])
        yield f"### {title} [s], measured"
        yield table(["", "", *HEADER], rows)


def _text(cell: Cell) -> str:
    ratios = (cell.ratio(source) for source in SOURCES)
    return f"{cell.measured_s:.2f}: " + ", ".join("-" if r is None else f"{r:+.0%}" for r in ratios)
