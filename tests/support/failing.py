"""Short ways to run the simulator on small problems whose servers fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies import BlockRange, Placement, Problem, Router
from policies.membership import MembershipRules
from policies.workload import RequestPlan
from policies.wsrr import WsRr
from testbed.experiment import Fault, RecoveryRules
from testbed.simulation.failing import simulate_failing
from testbed.simulation.failures import Failures
from testbed.simulation.hub import FailingRun
from tests.support.problems import make_problem

Bind = Callable[[Problem, Placement], Router]


def pairs(n_pairs: int = 2, **options: Any) -> tuple[Problem, Placement]:
    """Servers s0, s2, ... hold the blocks [0, 2), s1, s3, ... [2, 4), with room for many sessions.

    A step of one token takes 0.12 s on a hop (0.05 s each way, 0.02 s of compute), a prompt of n tokens
    0.1 + 0.01 n s, an opening 0.1 s.
    """
    options = {"input_rtt_s": 0.1, "prefill_slope_s": 0.005, **options}
    problem = make_problem([1000.0] * 2 * n_pairs, **options)
    ranges = (BlockRange(0, 2), BlockRange(2, 4)) * n_pairs
    return problem, Placement("pairs", ranges, (900.0,) * 2 * n_pairs)


def fail(
    made: tuple[Problem, Placement],
    requests: Sequence[RequestPlan],
    *faults: Fault,
    rules: RecoveryRules | None = None,
    membership: MembershipRules | None = None,
    absent: frozenset[int] = frozenset(),
    bind: Bind | None = None,
    **options: Any,
) -> FailingRun:
    """Serve ``requests`` under ``faults`` with WS-RR or with what ``bind`` makes."""
    problem, placement = made
    failures = Failures(tuple(faults), rules or RecoveryRules(), membership or MembershipRules(), absent)
    return simulate_failing(problem, placement, bind or WsRr().bind, requests, failures, **options)


def kill(server: int, at_s: float, for_s: float | None = None) -> Fault:
    return Fault("kill", server, at_s, for_s=for_s)
