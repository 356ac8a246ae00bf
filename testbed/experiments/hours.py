"""Resolves ``hours`` of ``[[servers]]``: when servers are there, as planned faults of the kinds leave and join.

A server leaves at the end of its hours and is started again at their beginning. One that is away when the run
begins is absent at the start, and joins when its hours begin.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from policies.problem import ModelSpec, Placement, ServerSpec
from testbed.experiments.experiment import Experiment
from testbed.experiments.fault_tables import ChurnTable, FaultTable
from testbed.experiments.faults import MAX_FAULTS
from testbed.experiments.problems import Key, KeyedError, shown
from testbed.experiments.schema import Scenario, ServersTable
from testbed.faultkinds import Join, Leave, SlowDown

DAY_S = 86400.0
_HOURS = re.compile(r"(\d\d:\d\d)\s*-\s*(\d\d:\d\d)", re.ASCII)
_CLOCK = re.compile(r"(\d\d):(\d\d)", re.ASCII)
_ZONE = re.compile(r"([+-])(\d\d:\d\d)", re.ASCII)


class Hours(NamedTuple):
    """When a server is there on every day, in seconds after the run's beginning: from ``opens_s`` for ``open_s``."""

    opens_s: float
    open_s: float

    def is_open(self, at_s: float) -> bool:
        """Whether the server is there at ``at_s``."""
        return (at_s - self.opens_s) % DAY_S < self.open_s

    def open_until_s(self, at_s: float) -> float:
        """Return for how many seconds the server is there from the run's beginning until ``at_s``."""
        since_s = (-self.opens_s) % DAY_S  # after it opened last, at the run's beginning
        days, rest_s = divmod(since_s + at_s, DAY_S)
        return days * self.open_s + min(rest_s, self.open_s) - min(since_s, self.open_s)

    @property
    def closes_s(self) -> float:
        """The first end of the hours after the run's beginning."""
        return (self.opens_s + self.open_s) % DAY_S or DAY_S


def time_of_day(text: str) -> float | None:
    """Return the seconds after midnight of ``text`` such as 22:00, up to 24:00; ``None`` if it is no time of day."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        return None
    at_s = 3600.0 * int(found[1]) + 60.0 * int(found[2])
    return at_s if int(found[2]) < 60 and at_s <= DAY_S else None


def time_in_words(at_s: float) -> str:
    """Return the time of day ``at_s`` seconds after midnight, to the minute."""
    minutes = math.floor(at_s % DAY_S / 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def zone_s(text: str, key: Key) -> float:
    """Return the seconds that a time zone such as +09:00 is ahead of UTC. Raises ``KeyedError`` of ``key`` if it is none."""
    found = _ZONE.fullmatch(text)
    ahead_s = None if found is None else time_of_day(found[2])
    if found is None or ahead_s is None or ahead_s > 14 * 3600:
        raise KeyedError(key, f'must be an offset from UTC such as "+09:00" or "-05:30", not {shown(text)}')
    return ahead_s if found[1] == "+" else -ahead_s


def hours_of(group: ServersTable, index: int, begins_at: str) -> Hours | None:
    """Return the hours of ``group`` for a run that begins at ``begins_at`` UTC; ``None`` if it is always there.

    Raises ``KeyedError`` for what is no time, and for keys that contradict it.
    """
    begin_s = time_of_day(begins_at)
    if begin_s is None or begin_s == DAY_S:
        raise KeyedError(
            ("begins_at",), f'must be a time of day in UTC such as "08:30", not {shown(begins_at)}'
        )
    if group.hours is None:
        if group.time_zone is not None:
            raise KeyedError(("servers", index, "time_zone"), "is that of hours; give them, or leave it out")
        return None
    ahead_s = zone_s(group.time_zone or "+00:00", ("servers", index, "time_zone"))
    found = _HOURS.fullmatch(group.hours.strip())
    opens_s, closes_s = (time_of_day(found[1]), time_of_day(found[2])) if found else (None, None)
    key = ("servers", index, "hours")
    if opens_s is None or closes_s is None:
        raise KeyedError(key, f'must be two times of a day such as "22:00-18:00", not {shown(group.hours)}')
    if (closes_s - opens_s) % DAY_S == 0:
        raise KeyedError(
            key,
            f"are {shown(group.hours)}, which begin when they end; leave them out for a server that stays",
        )
    if not group.present:
        raise KeyedError(key, "say when the server is there, and so does present; leave present out")
    return Hours((opens_s - ahead_s - begin_s) % DAY_S, (closes_s - opens_s) % DAY_S)


def hours_by_server(scenario: Scenario) -> dict[int, Hours]:
    """Return the hours of those servers, by index, that have any. Raises ``KeyedError``."""
    found: dict[int, Hours] = {}
    n_before = 0
    for index, group in enumerate(scenario.servers):
        hours = hours_of(group, index, scenario.begins_at)
        if hours is not None:
            found |= dict.fromkeys(range(n_before, n_before + group.count), hours)
        n_before += group.count
    return found


def check_alone(hours: Mapping[int, Hours], servers: Sequence[str], faults: Sequence[FaultTable]) -> None:
    """Raise ``KeyedError`` if a server with hours has other faults that end or begin it."""
    names = {servers[j] for j in hours}
    for index, fault in enumerate(faults):
        twice = names.intersection(fault.server)
        if twice and fault.kind != SlowDown.name:
            raise KeyedError(
                ("fault", index, "server"),
                f'names "{min(twice)}", whose hours say when it is there; leave out one of the two',
            )


def check_no_churn(hours: Mapping[int, Hours], servers: Sequence[str], churn: ChurnTable | None) -> None:
    """Raise ``KeyedError`` if servers with hours may fail at random, too."""
    if churn is None:
        return
    names = {servers[j] for j in hours}
    twice = names if churn.servers is None else names.intersection(churn.servers)
    if twice:
        raise KeyedError(
            ("churn", "servers"),
            f"{'include' if churn.servers else 'are all by default, with'} {min(twice)}, whose hours say when it is "
            "there; name servers without hours",
        )


def faults_of_hours(
    hours: Mapping[int, Hours], servers: Sequence[str], last_arrival_at_s: float
) -> list[FaultTable]:
    """Return the faults that make servers come and go until the last arrival, in the order of time.

    A server that is away then comes back, and one that was not there yet joins. Raises ``KeyedError`` for too
    many.
    """
    n_faults = len(hours) * (last_arrival_at_s / DAY_S + 1)
    if n_faults > MAX_FAULTS:
        raise KeyedError(
            ("servers",),
            f"come and go some {n_faults:,.0f} times by their hours, but at most {MAX_FAULTS:,} are allowed; "
            "shorten the workload",
        )
    tables = []
    for j, each in hours.items():
        name = servers[j]
        closes_s = each.closes_s
        if not each.is_open(0.0):
            tables.append(FaultTable.model_construct(kind=Join.name, server=[name], at=each.opens_s))
            closes_s = each.opens_s + each.open_s
        while closes_s <= last_arrival_at_s:
            away_s = DAY_S - each.open_s
            tables.append(
                FaultTable.model_construct(kind=Leave.name, server=[name], at=closes_s, for_=away_s)
            )
            closes_s += DAY_S
    return sorted(tables, key=lambda table: table.at or 0.0)


def check_is_held(
    hours: Mapping[int, Hours], servers: Sequence[ServerSpec], model: ModelSpec, begins_at: str
) -> None:
    """Raise ``KeyedError`` if the servers that are there at the run's beginning cannot hold the whole model."""
    if not hours:
        return
    begin_s = time_of_day(begins_at) or 0.0
    n_held = dict.fromkeys(_moments(hours), 0)
    for j, server in enumerate(servers):
        n_blocks = (server.stored or model).best_blocks(server.memory_bytes)
        for at_s in n_held:
            n_held[at_s] += n_blocks if j not in hours or hours[j].is_open(at_s) else 0
    if n_held[0.0] >= model.n_blocks:
        return
    whole_s = next((at_s for at_s, n in n_held.items() if n >= model.n_blocks), None)
    if whole_s is None:
        best_s = max(n_held, key=lambda at_s: n_held[at_s])
        raise KeyedError(
            ("servers",),
            f"never hold the whole model by their hours: most at {time_in_words(begin_s + best_s)} UTC, with "
            f"{n_held[best_s]} of {model.n_blocks} blocks; give them more hours or memory",
        )
    raise KeyedError(
        ("begins_at",),
        f"is {begins_at} UTC, when the servers that are there hold at most {n_held[0.0]} of {model.n_blocks} blocks; "
        f"begin at {time_in_words(begin_s + whole_s)}, or give them more hours",
    )


def _moments(hours: Mapping[int, Hours]) -> list[float]:
    """Return the instants of a day at which any server comes or goes, and 0, in order."""
    ends_s = {each.closes_s % DAY_S for each in hours.values()}
    return sorted({0.0, *(each.opens_s for each in hours.values()), *ends_s})


def has_hours(experiment: Experiment) -> bool:
    """Whether any server comes and goes by its hours."""
    scenario = experiment.tables
    return isinstance(scenario, Scenario) and bool(hours_by_server(scenario))


def _are_away(names: Sequence[str]) -> str:
    if not names:
        return "no servers are away"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} away"


def hours_in_words(experiment: Experiment, placement: Placement | None) -> list[str]:
    """Return who is away at the beginning by its hours, and which blocks of ``placement`` are on no server when."""
    scenario = experiment.tables
    if not isinstance(scenario, Scenario):
        return []
    hours = hours_by_server(scenario)
    if not hours:
        return []
    names = [server.name for server in experiment.problem.servers]
    away = [names[j] for j, each in hours.items() if not each.is_open(0.0)]
    remarks = [f"when the run begins, at {scenario.begins_at} UTC, by their hours {_are_away(away)}"]
    if placement is not None:
        begin_s = time_of_day(scenario.begins_at) or 0.0
        remarks += [
            f"from {time_in_words(begin_s + from_s)} to {time_in_words(begin_s + to_s)} UTC nobody has {blocks}: "
            "requests wait"
            for from_s, to_s, blocks in _gaps(hours, experiment.problem.model, placement)
        ]
    return remarks


def _gaps(
    hours: Mapping[int, Hours], model: ModelSpec, placement: Placement
) -> Iterator[tuple[float, float, str]]:
    """Yield (from, to, blocks in words) while the servers that began and are there lack blocks, and none has joined."""
    moments = _moments(hours)
    joiners = [each for each in hours.values() if not each.is_open(0.0)]
    for from_s, to_s in zip(moments, [*moments[1:], DAY_S], strict=True):
        if any(each.is_open(from_s) for each in joiners):
            continue
        held: set[int] = set()
        for j, blocks in enumerate(placement.ranges):
            if j not in hours or hours[j].is_open(from_s):
                held.update(range(*blocks))
        lost = [block for block in range(model.n_blocks) if block not in held]
        if lost:
            most = "" if len(lost) == lost[-1] - lost[0] + 1 else f", {len(lost)} of them"
            yield from_s, to_s, f"blocks {lost[0]} to {lost[-1]}{most}"
