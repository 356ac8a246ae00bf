"""The same system under either clock: what failures and moves come to does not depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies import BlockRange, Placement, Problem
from testbed.runtime.stage import Stage
from testbed.scenario.experiment import Fault, RecoveryRules
from tests.support.failing import REAL, VIRTUAL, SystemRun, fail, kill, pairs
from tests.support.simulation import Scripted, arrivals

SCALE = 5.0
"""How much faster than life real time runs: a session takes a second, faults come after 0.2 s."""
REQUESTS = [*arrivals(0.0, n_output=20), *arrivals(0.0, 8.0)[1:]]

Case = tuple[tuple[Problem, Placement], tuple[Fault, ...], dict[str, Any], list[str]]


def with_range(server: int, first: int, last: int) -> Placement:
    _, placement = pairs(3)
    ranges = list(placement.ranges)
    ranges[server] = BlockRange(first, last)
    return replace(placement, ranges=tuple(ranges))


def forwarding() -> tuple[Problem, Placement]:
    problem, placement = pairs()
    return replace(problem, forwarding=True), placement


CASES: dict[str, Case] = {
    "nothing": (pairs(), (), {}, []),
    "a kill": (pairs(), (kill(1, 1.0),), {}, ["fault", "detected", "re-routed", "replayed"]),
    "a kill, and back": (
        pairs(1),
        (kill(1, 1.0, 3.0),),
        {"recovery": RecoveryRules(ban_s=0.0)},
        ["fault", "detected", "begun", "re-routed", "replayed"],
    ),
    "a stop for too long": (
        pairs(),
        (Fault("stop", 1, 0.9, for_s=19.0),),
        {"recovery": RecoveryRules(request_timeout_s=5.0)},
        ["fault", "detected", "re-routed", "replayed"],
    ),
    "a slow server": (pairs(), (Fault("slow", 1, 0.5, for_s=1.0, factor=3.0),), {}, ["fault", "fault-over"]),
    "one leaves": (pairs(), (Fault("leave", 1, 0.5),), {}, ["fault", "left"]),
    "no recovery": (
        pairs(),
        (kill(1, 1.0),),
        {"recovery": RecoveryRules("off")},
        ["fault", "detected", "failed"],
    ),
    "servers forward": (forwarding(), (), {}, []),
    "one that forwards dies": (
        forwarding(),
        (kill(1, 0.9),),
        {},
        ["fault", "detected", "re-routed", "replayed"],
    ),
    "one drains": (
        pairs(3),
        (),
        {"online": Scripted({1.0: with_range(0, 2, 4)}), "load_bps": 1e3},
        ["decided", "moving", "drained", "moved"],
    ),
    "one cuts": (
        pairs(3),
        (),
        {"online": Scripted({1.0: with_range(0, 2, 4)}, drains=False), "load_bps": 1e3},
        ["decided", "moving", "detected", "drained", "moved", "re-routed", "replayed"],
    ),
}
"""What happens, and the kinds of its events."""


def kinds(run: SystemRun) -> list[str]:
    return sorted(e["event"] for e in run.events if e["event"] not in ("network", "serving", "stopped"))


@pytest.mark.parametrize("stage", [VIRTUAL, REAL], ids=["virtual time", "real time"])
@pytest.mark.parametrize("case", CASES)
def test_it_comes_to_the_same(case: str, stage: Stage) -> None:
    made, faults, settings, expected = CASES[case]
    scale = SCALE if stage is REAL else 1.0
    run = fail(made, REQUESTS, *faults, stage=stage, time_scale=scale, **settings)
    first = "failed" if "failed" in expected else "completed"
    assert [r.status for r in run.requests] == [first, "completed"]
    assert kinds(run) == sorted(expected)
    assert not any(run.summary["leaks"].values())
    assert run.requests[0].n_replays == expected.count("replayed")
