"""The mode ``real`` when servers fail: sessions step by step, recovery, and what routers believe.

``docs/faults.md`` says what clients and servers do. An opening covers the whole model for a new session, or
the blocks of hops that were lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.interfaces import Router
from policies.problem import Placement, Problem
from policies.workload import Backoff, RequestPlan
from testbed.simulation.failures import Failures
from testbed.simulation.forwarded import ForwardedRun
from testbed.simulation.hub import FailingRun, HubRun
from testbed.simulation.moving import Online
from testbed.simulation.network import ChangingNetwork, SteadyTimes
from testbed.simulation.servers import OnCache
from testbed.simulation.system import System


def simulate_failing(
    problem: Problem,
    placement: Placement,
    bind: Callable[[Problem, Placement], Router],
    requests: Sequence[RequestPlan],
    failures: Failures,
    *,
    session_setup_s: float = 0.0,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
    serial_compute: bool = False,
    state_age_s: float = 0.0,
    network: ChangingNetwork | None = None,
    on_cache: OnCache | None = None,
    online: Online | None = None,
) -> FailingRun:
    """Serve ``requests`` while servers fail. Deterministic: same arguments, same answer.

    Arguments as of ``testbed.simulation.real.simulate_real``; ``bind`` makes routers, also for parts of the
    model. Raises ``PolicyError`` if a policy breaks a rule.
    """
    system = System(
        problem,
        placement,
        bind,
        failures,
        network or SteadyTimes(problem),
        problem.initial_delay_s + session_setup_s,
        state_age_s,
        on_cache,
    )
    if online is not None:
        system.go_online(placement, online)
    kind = ForwardedRun if problem.forwarding else HubRun
    return kind(system, session_setup_s, backoff, serial_compute).serve(requests)
