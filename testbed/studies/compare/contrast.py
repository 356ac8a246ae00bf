"""Compares two samples: their statistics, and the differences of these."""

from __future__ import annotations

from typing import Any

import numpy as np

from testbed.results.requests import stats
from testbed.studies.compare.load import Array

STATISTICS = ("mean", "p50", "p99")


def contrast(a: Array, b: Array, paired: tuple[Array, Array] | None = None) -> dict[str, Any]:
    """Returns ``{"a", "b", "difference_s", "difference_ratio", "paired"}`` of two samples in seconds.

    - ``a``, ``b``: mean, p50, p99 and n of each sample
    - ``difference_s``: b - a of each statistic, None if a sample is empty; ``difference_ratio``: (b - a) / a,
      None also if a is 0
    - ``paired``: n, mean and p99 of |b - a|, entry by entry, of the two arrays of the argument ``paired``
    """
    of_a, of_b = _statistics(a), _statistics(b)
    values = {name: difference(of_a[name], of_b[name]) for name in STATISTICS}
    one, other = paired if paired is not None else (np.zeros(0), np.zeros(0))
    apart = _statistics(np.abs(other - one))
    return {
        "a": of_a,
        "b": of_b,
        "difference_s": {name: value["difference_s"] for name, value in values.items()},
        "difference_ratio": {name: value["difference_ratio"] for name, value in values.items()},
        "paired": {"n": apart["n"], "mean_abs_s": apart["mean"], "p99_abs_s": apart["p99"]},
    }


def difference(a: float | None, b: float | None) -> dict[str, float | None]:
    """Returns ``{"a", "b", "difference_s", "difference_ratio"}`` of two values in seconds, as in
    ``contrast``.
    """
    apart = None if a is None or b is None else b - a
    return {
        "a": a,
        "b": b,
        "difference_s": apart,
        "difference_ratio": apart / a if apart is not None and a else None,
    }


def _statistics(values: Array) -> dict[str, Any]:
    found = stats(values)
    return {name: found[name] for name in (*STATISTICS, "n")}
