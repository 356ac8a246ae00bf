"""Parses objectives: ``ttft=5s,tpot=1s`` for each request, ``ttft_p95=5s`` for a statistic over requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from testbed.experiments.units import DURATION

NAMES = ("queue", "setup", "ttft", "tpot", "per_token", "e2e")
_CAN_BE_ZERO = ("queue", "setup")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class Objectives:
    """Limits in seconds by metric, which each request should meet. ``own``: those of clients that have their own, by name."""

    common: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.common or self.own)

    def of(self, client: str) -> Mapping[str, float]:
        """Return the limits for the requests of a client."""
        return self.own.get(client, self.common)

    def in_words(self) -> str:
        """Return all limits as text."""
        parts = [f"{client}: {_in_words(limits_s)}" for client, limits_s in self.own.items()]
        return "; ".join([*([_in_words(self.common)] if self.common else []), *parts])


def _in_words(limits_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} <= {limit_s:g} s" for name, limit_s in limits_s.items())


class Objective(NamedTuple):
    """The ``statistic`` of ``metric`` over all requests must be at most ``limit_s`` seconds."""

    metric: str
    statistic: str
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}"


def parse_objectives(text: str) -> dict[str, float]:
    """Parse ``METRIC=DURATION,...`` into limits in seconds by metric.

    Raises ``ValueError`` with what is wrong.
    """
    return _limits(text, _check_metric)


def parse_statistics(text: str) -> tuple[Objective, ...]:
    """Parse ``METRIC_STATISTIC=DURATION,...``. Raises ``ValueError`` with what is wrong."""
    limits = _limits(text, _check_statistic)
    return tuple(Objective(*_parted(name), limit_s) for name, limit_s in limits.items())


def parse_statistic(name: str) -> tuple[str, str]:
    """Split ``METRIC_STATISTIC`` into its two parts. Raises ``ValueError`` with what is wrong."""
    _check_statistic(name)
    return _parted(name)


def _limits(text: str, check: Callable[[str], None]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        check(name)
        if name in found:
            raise ValueError(f"{name} is given twice; keep one")
        try:
            found[name] = DURATION.parse(value.strip())
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        if not found[name] and not name.startswith(_CAN_BE_ZERO):
            raise ValueError(f"{name} must be more than 0, since every token takes time")
    return found


def _check_metric(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"unknown objective {name!r}; valid: {', '.join(NAMES)}")


def _check_statistic(name: str) -> None:
    metric, statistic = _parted(name)
    if metric not in NAMES or statistic not in STATISTICS:
        raise ValueError(
            f"unknown objective {name!r}; write METRIC_STATISTIC, for example ttft_p95: a metric is "
            f"{', '.join(NAMES)}, a statistic {', '.join(STATISTICS)}"
        )


def _parted(name: str) -> tuple[str, str]:
    metric, _, statistic = name.rpartition("_")
    return metric, statistic
