"""Analysis of a soak's samples: how fast memory grows per role, and its figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SERVER = "server"
_N_FLOORS = 10
"""The time is divided into so many parts, each with a floor, the least value in it."""
_LOW = 0.1
AGE_CLASSES_S = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Upper ends of the classes of processes' ages. Memory grows while a process begins to work, so only
processes of similar age are compared.
"""


class Sample(NamedTuple):
    """One process at one instant. ``elapsed_s`` counts real seconds since the soak began."""

    elapsed_s: float
    name: str
    role: str
    pid: int
    age_s: float
    rss_bytes: int
    pss_bytes: int
    n_descriptors: int
    load: float


@dataclass(frozen=True)
class Slope:
    """Growth per hour of a straight line through samples, and the ends of its 95 % interval."""

    per_hour: float
    low: float
    high: float
    n: int


def slope(at_s: Array, values: Array) -> Slope:
    """Fits a straight line by least squares.

    Neighbouring samples are not independent, so the interval is that of n (1 - r) / (1 + r) independent
    samples, where r is the correlation of neighbouring residuals (an autoregressive process of order 1).
    Raises ``ValueError`` for fewer than three samples, or if all are at one instant.
    """
    from scipy import stats

    n = len(values)
    if n < 3 or np.ptp(at_s) == 0:
        raise ValueError("a slope needs three samples or more, not all at one instant")
    hours = at_s / 3600
    deviation = hours - hours.mean()
    per_hour = float(deviation @ values / (deviation @ deviation))
    residuals = values - values.mean() - per_hour * deviation
    squares = float(residuals @ residuals)
    likeness = max(0.0, float(residuals[1:] @ residuals[:-1]) / squares) if squares > 0 else 0.0
    freedom = max(1.0, n * (1 - likeness) / (1 + likeness) - 2)
    error = math.sqrt(squares / freedom / float(deviation @ deviation))
    reach = float(stats.t.ppf(0.975, freedom)) * error
    return Slope(per_hour, per_hour - reach, per_hour + reach, n)


def without_age(ages_s: Array, values: Array) -> Array:
    """Returns ``values`` minus the mean of their age class plus the mean of all, which removes the effect of
    age.
    """
    classes = np.digitize(ages_s, AGE_CLASSES_S)
    rest = values.copy()
    for number in np.unique(classes):
        rest[classes == number] -= values[classes == number].mean()
    rest += values.mean()
    return rest


def series(samples: Sequence[Sample], role: str, what: str) -> tuple[Array, Array]:
    """Returns (instants, values) of one quantity over time, of all processes of a role.

    For servers, which are killed and begin again, the effect of age is removed; their values are means per
    instant.
    """
    chosen = [sample for sample in samples if sample.role == role]
    at_s = np.array([sample.elapsed_s for sample in chosen])
    values = np.array([float(getattr(sample, what)) for sample in chosen])
    if role == SERVER and len(chosen):
        values = without_age(np.array([sample.age_s for sample in chosen]), values)
        instants = np.unique(at_s)  # the servers of one instant count as one sample
        values = np.array([values[at_s == instant].mean() for instant in instants])
        at_s = instants
    return at_s, values


def floors(at_s: Array, values: Array) -> tuple[Array, Array]:
    """Returns (instants, values) of the least value in each part of the time. Temporary peaks do not change
    these.
    """
    ends = np.linspace(at_s.min(), at_s.max(), _N_FLOORS + 1)[1:-1]
    parts = np.digitize(at_s, ends, right=True)
    lowest = [np.flatnonzero(parts == part)[values[parts == part].argmin()] for part in np.unique(parts)]
    return at_s[lowest], values[lowest]


def warmed_up(samples: Iterable[Sample], warm_up_s: float) -> list[Sample]:
    return [sample for sample in samples if sample.elapsed_s >= warm_up_s]


def roles(samples: Iterable[Sample], n_instants: int = 1) -> list[str]:
    """Returns the roles that were sampled at ``n_instants`` or more instants, in the order of their first
    samples.
    """
    instants: dict[str, set[float]] = {}
    for sample in samples:
        instants.setdefault(sample.role, set()).add(sample.elapsed_s)
    return [role for role, found in instants.items() if len(found) >= n_instants]


def growth(samples: Sequence[Sample], role: str) -> dict[str, object]:
    """Returns one role's slopes of memory (MB per hour) and of descriptors (per hour), and first and last
    values.

    Slopes are those of ``floors``: after a burst of work memory returns to the same floor, but a leak raises
    it. ``floor_mb``, ``floor_descriptors``: the lowest decile in the first half of the time (``before``) and
    in the second (``last``); a decile, since the lowest sample depends on chance.
    """
    at_s, rss = series(samples, role, "rss_bytes")
    _, pss = series(samples, role, "pss_bytes")
    _, descriptors = series(samples, role, "n_descriptors")
    is_before = at_s <= (at_s.min() + at_s.max()) / 2

    def halves(values: Array) -> dict[str, float]:
        return {
            "before": float(np.quantile(values[is_before], _LOW)),
            "last": float(np.quantile(values[~is_before], _LOW)),
        }

    return {
        "rss_mb_per_hour": asdict(slope(*floors(at_s, rss / 1e6))),
        "pss_mb_per_hour": asdict(slope(*floors(at_s, pss / 1e6))),
        "descriptors_per_hour": asdict(slope(*floors(at_s, descriptors))),
        "rss_mb": {"first": rss[0] / 1e6, "last": rss[-1] / 1e6, "max": rss.max() / 1e6},
        "floor_mb": halves(rss / 1e6),
        "floor_descriptors": halves(descriptors),
        "descriptors": {"first": descriptors[0], "last": descriptors[-1], "max": descriptors.max()},
    }


def draw(path: Path, samples: Sequence[Sample], warm_up_s: float) -> None:
    """Draws memory and descriptors over time: one line per role, and one dot per sample of a server, coloured
    by age.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(8, 9), sharex=True, constrained_layout=True)
    for role in roles(samples):
        for axis, what, unit in ((axes[0], "rss_bytes", 1e6), (axes[2], "n_descriptors", 1.0)):
            at_s, values = series(samples, role, what)
            label = f"{role} (mean, similar ages)" if role == SERVER else role
            axis.plot(at_s / 60, values / unit, label=label, lw=1.2)
    servers = [sample for sample in samples if sample.role == SERVER]
    if servers:  # on the network ``memory`` servers are not processes
        dots = axes[1].scatter(
            [sample.elapsed_s / 60 for sample in servers],
            [sample.rss_bytes / 1e6 for sample in servers],
            c=np.maximum([sample.age_s for sample in servers], 1.0),
            norm="log",
            s=4,
        )
        figure.colorbar(dots, ax=axes[1], label="age of the process, s")
    axes[0].set_ylabel("resident memory, MB")
    axes[1].set_ylabel("each server's, MB")
    axes[2].set_ylabel("open descriptors")
    axes[2].set_xlabel("minutes of real time")
    for axis in axes:
        axis.axvspan(0, warm_up_s / 60, color="#eeeeee", zorder=0)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
