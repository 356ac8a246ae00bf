"""What a soak's samples say: how fast memory grows per role, and how that looks."""

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
"""So many parts of the time have a floor each: the least value in it."""
_LOW = 0.1
AGE_CLASSES_S = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Upper ends: a process takes memory as it begins to work, so only those of like age are compared."""


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

    @property
    def is_growth(self) -> bool:
        """Whether the interval is above 0."""
        return self.low > 0


def slope(at_s: Array, values: Array) -> Slope:
    """Least squares; the interval is that of n (1 - r) / (1 + r) samples, since neighbours are alike.

    r is the correlation of neighbouring residuals (an autoregressive process of order 1). Needs three samples at
    more than one instant, else ``ValueError``.
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
    """``values`` less the mean of their age class, plus the mean of all: processes of like age compared."""
    classes = np.digitize(ages_s, AGE_CLASSES_S)
    rest = values.copy()
    for number in np.unique(classes):
        rest[classes == number] -= values[classes == number].mean()
    rest += values.mean()
    return rest


def series(samples: Sequence[Sample], role: str, what: str) -> tuple[Array, Array]:
    """(instants, values) of one quantity of all processes of a role, in the order of time.

    Servers, which are killed and begin again, are compared by age.
    """
    chosen = [sample for sample in samples if sample.role == role]
    at_s = np.array([sample.elapsed_s for sample in chosen])
    values = np.array([float(getattr(sample, what)) for sample in chosen])
    if role == SERVER and len(chosen):
        values = without_age(np.array([sample.age_s for sample in chosen]), values)
        instants = np.unique(at_s)  # those of one instant are no samples of their own
        values = np.array([values[at_s == instant].mean() for instant in instants])
        at_s = instants
    return at_s, values


def floors(at_s: Array, values: Array) -> tuple[Array, Array]:
    """(instants, values): the least value in every part of the time. What comes and goes leaves them as they are."""
    ends = np.linspace(at_s.min(), at_s.max(), _N_FLOORS + 1)[1:-1]
    parts = np.digitize(at_s, ends, right=True)
    lowest = [np.flatnonzero(parts == part)[values[parts == part].argmin()] for part in np.unique(parts)]
    return at_s[lowest], values[lowest]


def warmed_up(samples: Iterable[Sample], warm_up_s: float) -> list[Sample]:
    return [sample for sample in samples if sample.elapsed_s >= warm_up_s]


def roles(samples: Iterable[Sample], n_instants: int = 1) -> list[str]:
    """Those that were sampled at so many instants or more, in the order of their first."""
    instants: dict[str, set[float]] = {}
    for sample in samples:
        instants.setdefault(sample.role, set()).add(sample.elapsed_s)
    return [role for role, found in instants.items() if len(found) >= n_instants]


def growth(samples: Sequence[Sample], role: str) -> dict[str, object]:
    """Of one role: slopes of memory (MB per hour) and of descriptors (per hour), and the first and last values.

    Slopes are of floors (see ``floors``): bursts of work come back to the same floor, what is lost for good lifts
    it. ``floor_mb``, ``floor_descriptors``: the lowest decile in the first half of the time (``before``) and in the
    other; a single low sample is chance.
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
    """Memory and descriptors over time, a line per role; servers by age class."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(8, 9), sharex=True, constrained_layout=True)
    for role in roles(samples):
        for axis, what, unit in ((axes[0], "rss_bytes", 1e6), (axes[2], "n_descriptors", 1.0)):
            at_s, values = series(samples, role, what)
            label = f"{role} (mean, like ages)" if role == SERVER else role
            axis.plot(at_s / 60, values / unit, label=label, lw=1.2)
    servers = [sample for sample in samples if sample.role == SERVER]
    if servers:  # on memory they are no processes of their own
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
