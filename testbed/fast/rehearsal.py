"""Rehearsals of placements in the fast engine, for placement policies that want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.checks import check_made_up
from policies.interfaces import RoutingPolicy
from policies.outcomes import Outcome, Times, WhoAsks, outcome_of
from policies.problem import Placement, PolicyError
from policies.workload import RequestPlan
from testbed.control.placing import place
from testbed.experiments.experiment import Experiment
from testbed.experiments.probes import with_requests, without_the_unknown
from testbed.fast.disturbances import disturbance
from testbed.fast.engine import simulate_fast
from testbed.fast.outcome import Disturbed, SimulatedRequest
from testbed.records.requests import COMPLETED


@dataclass(frozen=True)
class FastRehearsal:
    """See ``policies.rehearsal.Rehearsal``. Two of them are equal if they answer alike."""

    experiment: Experiment
    """Without what nobody knows before it happens, and without requests."""
    stand_ins: Mapping[str, RoutingPolicy]
    """As in ``testbed.control.placing.place``."""
    seen: tuple[int, ...]
    """The servers that the policy sees, in the order of its numbers."""

    @property
    def keeps_caches(self) -> bool:
        return self.experiment.compute.prefix is not None

    def __hash__(self) -> int:
        return hash((self.experiment.problem, self.experiment.policy))

    def __call__(self, placement: Placement, requests: Sequence[RequestPlan]) -> Sequence[Outcome]:
        name = self.experiment.policy.placement
        if not isinstance(placement, Placement):
            raise PolicyError(f"placement policy {name} rehearses {placement!r}; give a Placement")
        check_made_up(requests, len(self.experiment.problem.clients), name)
        experiment = with_requests(self.experiment, requests)
        try:
            run = simulate_fast(experiment, place(experiment, self.stand_ins, decided=placement))
        except Disturbed as disturbed:
            raise PolicyError(
                f"placement policy {name} cannot rehearse this placement: {disturbed}"
            ) from disturbed
        number = {j: i for i, j in enumerate(self.seen)}
        return [_outcome(one, number) for one in run.requests]


def rehearsal(
    experiment: Experiment, stand_ins: Mapping[str, RoutingPolicy], seen: Sequence[int]
) -> FastRehearsal | None:
    """Returns what rehearses placements of an experiment; ``None`` if the fast engine cannot serve it.

    ``stand_ins`` and ``seen`` are those of ``FastRehearsal``.
    """
    known = without_the_unknown(experiment)
    return None if disturbance(known, None) else FastRehearsal(known, stand_ins, tuple(seen))


def _outcome(request: SimulatedRequest, number: Mapping[int, int]) -> Outcome:
    """``number``: of each server in the problem that the policy sees."""
    plan, arrived_at_s = request.plan, request.plan.arrival_at_s
    has_failed = request.status != COMPLETED
    turn = plan.turn
    hops = () if request.route is None else request.route.hops
    return outcome_of(
        WhoAsks(
            plan.index,
            None if turn is None else turn.conversation,
            0 if turn is None else turn.number,
            arrived_at_s,
        ),
        plan.client,
        tuple(hop._replace(server=number[hop.server]) for hop in hops),
        plan.n_input_tokens,
        Times(
            None if request.setup_s is None else arrived_at_s + request.waiting_s,
            None if request.ttft_s is None else arrived_at_s + request.ttft_s,
            request.n_done if has_failed else plan.n_output_tokens,
        ),
        arrived_at_s + request.ended_s,
        has_failed=has_failed,
    )
