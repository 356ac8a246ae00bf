"""The same system under either clock: what failures and moves come to does not depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies import BlockRange, Placement, Problem
from policies.rules import RecoveryRules
from testbed.experiments.experiment import After, Fault
from testbed.runtime.stage import Stage
from tests.support.failing import REAL, VIRTUAL, SystemRun, fail, pairs
from tests.support.simulation import Scripted, arrivals

SCALE = 2.5
"""How much faster than life real time runs: the first session takes four seconds, so that no busy machine is too late."""
REQUESTS = [*arrivals(0.0, n_output=40), *arrivals(0.0, 11.0)[1:]]

Case = tuple[tuple[Problem, Placement], tuple[Fault, ...], dict[str, Any], list[str]]


def with_range(server: int, first: int, last: int) -> Placement:
    _, placement = pairs(3)
    ranges = list(placement.ranges)
    ranges[server] = BlockRange(first, last)
    return replace(placement, ranges=tuple(ranges))


def after(kind: str, **details: Any) -> Fault:
    """Something happens to s1 while it holds the first session, however late that began."""
    return Fault(kind, 1, after=After(0, 4), **details)


def forwarding() -> tuple[Problem, Placement]:
    problem, placement = pairs()
    return replace(problem, forwarding=True), placement


CASES: dict[str, Case] = {
    "nothing": (pairs(), (), {}, []),
    "a kill": (pairs(), (after("kill"),), {}, ["fault", "detected", "re-routed", "replayed"]),
    "a kill, and back": (
        pairs(1),
        (after("kill", for_s=3.0),),
        {"recovery": RecoveryRules(ban_s=0.0)},
        ["fault", "detected", "begun", "re-routed", "replayed"],
    ),
    "a stop for too long": (
        pairs(),
        (after("stop", for_s=19.0),),
        {"recovery": RecoveryRules(request_timeout_s=5.0)},
        ["fault", "detected", "re-routed", "replayed"],
    ),
    "a slow server": (pairs(), (after("slow", for_s=1.0, factor=3.0),), {}, ["fault", "fault-over"]),
    "one leaves": (pairs(), (after("leave"),), {}, ["fault", "left"]),
    "no recovery": (
        pairs(),
        (after("kill"),),
        {"recovery": RecoveryRules("off")},
        ["fault", "detected", "failed"],
    ),
    "servers forward": (forwarding(), (), {}, []),
    "one that forwards dies": (
        forwarding(),
        (after("kill"),),
        {},
        ["fault", "detected", "re-routed", "replayed"],
    ),
    "one drains": (
        pairs(3),
        (),
        {"online": Scripted({2.0: with_range(0, 2, 4)}), "load_bps": 1e3},
        ["decided", "moving", "drained", "moved"],
    ),
    "one cuts": (
        pairs(3),
        (),
        {"online": Scripted({2.0: with_range(0, 2, 4)}, drains=False), "load_bps": 1e3},
        ["decided", "moving", "detected", "drained", "moved", "re-routed", "replayed"],
    ),
}
"""What happens, and the kinds of its events."""


def kinds(run: SystemRun) -> list[str]:
    return sorted(e["event"] for e in run.events if e["event"] not in ("network", "serving", "stopped"))


def is_late(run: SystemRun) -> bool:
    """Whether the first session had ended before what was to happen to it."""
    ended_at_s = run.ended_at_s()[0]
    return ended_at_s is not None and any(e["at_s"] > ended_at_s for e in run.of_kind("fault", "moving"))


REAL_TOO = ("nothing", "a kill", "a kill, and back", "one that forwards dies", "one cuts")
"""Cases that take their seconds in real time."""


@pytest.mark.parametrize(
    ("case", "stage"),
    [*((case, VIRTUAL) for case in CASES), *((case, REAL) for case in REAL_TOO)],
    ids=lambda value: value if isinstance(value, str) else f"{value.clock} time",
)
def test_each_misfortune_has_its_events_under_either_clock(case: str, stage: Stage) -> None:
    made, faults, settings, expected = CASES[case]
    scale = SCALE if stage is REAL else 1.0
    run = fail(made, REQUESTS, *faults, stage=stage, time_scale=scale, **settings)
    first = "failed" if "failed" in expected else "completed"
    assert [r.status for r in run.requests] == [first, "completed"]
    happened = kinds(run)
    if stage is REAL:  # on a busy machine a session may ask once more, or have ended before what happens
        happened = [kind for kind in happened if kind != "rejected"]
        if is_late(run):
            assert set(happened) <= set(expected)
            return
    assert happened == sorted(expected)
    assert not any(run.summary["leaks"].values())
    assert run.requests[0].n_recoveries == expected.count("replayed")
