"""Where routing decisions are taken: one object per run that knows which sessions hold cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.problem import Hop, Placement, Problem, RequestSpec, service_s
from policies.state import SystemState
from policies.workload import RequestPlan
from testbed.experiment import Calibration
from testbed.placing import CheckedRouter


class Coordinator:
    """Answers clients' questions for a chain, and keeps the router's view of the servers.

    A session counts from the moment that its chain is handed out until it ends or is refused; its
    expected completion is the modelled one. ``now_s`` gives scenario time.
    """

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        router: CheckedRouter,
        calibration: Calibration,
        requests: tuple[RequestPlan, ...],
        now_s: Callable[[], float],
    ) -> None:
        self._problem = problem
        self._router = router
        self._calibration = calibration
        self._requests = {r.index: r for r in requests}
        self._now_s = now_s
        self._state = SystemState(placement.cache_bytes)

    def route(self, index: int) -> dict[str, Any] | None:
        """The chain for request ``index`` now: ``{hops, wait_s, decision_s}``, ``None`` if there is none.

        Raises ``policies.problem.PolicyError`` when a policy fails or answers a chain that breaks a rule.
        """
        plan = self._requests[index]
        request = RequestSpec(plan.client, plan.n_input_tokens, plan.n_output_tokens)
        now_s = self._now_s()
        self._state.close(index)
        route = self._router.route(request, self._state, now_s)
        if route is None:
            return None
        decision_s = self._router.decisions_s[-1]
        self._hold(index, request, route.hops, now_s)
        return {"hops": [list(hop) for hop in route.hops], "wait_s": route.wait_s, "decision_s": decision_s}

    def _hold(self, index: int, request: RequestSpec, hops: tuple[Hop, ...], now_s: float) -> None:
        setup_s = self._problem.initial_delay_s + self._calibration.session_setup_s
        ends_at_s = now_s + setup_s + service_s(self._problem, request, hops)[1]
        bytes_per_block = self._problem.model.cache_bytes(request.n_tokens)
        self._state.open(index, hops, bytes_per_block, ends_at_s)

    def release(self, index: int) -> None:
        """The session has ended or was refused."""
        self._state.close(index)
