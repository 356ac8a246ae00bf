"""Markdown tables, and the format of numbers in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from testbed.results.intervals import Mean, mean_of
from testbed.studies.sweep.documents import markdown


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(header, rows).rstrip("\n")


def seconds(mean: Mean | None) -> str:
    """Returns mean ± half-width of a time in seconds, with 3 decimals below 10 s, else 2."""
    return number(mean, 3 if mean is not None and mean.mean < 10 else 2)


def number(mean: Mean | None, n_digits: int) -> str:
    if mean is None:
        return "infeasible"
    if math.isnan(mean.half_width):
        return f"{mean.mean:.{n_digits}f}"
    return f"{mean.mean:.{n_digits}f} ± {mean.half_width:.{n_digits}f}"


def ms(values_s: Sequence[float]) -> str:
    """Returns mean ± half-width of times, given in seconds and shown in milliseconds."""
    return number(mean_of([value * 1e3 for value in values_s]), 1)
