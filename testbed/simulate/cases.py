"""The cases to simulate: a scenario or an instance with one policy and one seed."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from policies.interfaces import RoutingPolicy
from policies.petals_routing import PetalsRouting
from policies.registry import PAIRS, resolve_pair
from testbed.fast.outcome import CompletedMove, SimulatedRequest
from testbed.scenario import Change, Override, changed, load_experiment
from testbed.scenario.experiment import (
    Calibration,
    ComputePart,
    Experiment,
    Link,
    NetworkPart,
    PolicyPart,
    WorkloadPart,
)
from testbed.scenario.policy import PolicyChoice, has_petals_setup
from testbed.simulate.instance import Instance, load_instance

_WIRE_BPS = 1e15
"""Rate of an instance's links in bit/s, practically infinite: the instance's times contain the transfer."""


@dataclass(frozen=True)
class Case:
    """One simulation. ``stand_ins`` are routing policies by name, with constants of this case."""

    experiment: Experiment
    stand_ins: Mapping[str, RoutingPolicy] = field(default_factory=dict)
    source: Path | None = None
    """The instance file that the case comes from."""

    @property
    def policy(self) -> str:
        """The policy pair's name, or ``placement+routing`` if it has none."""
        halves = (self.experiment.policy.placement, self.experiment.policy.routing)
        return next((name for name, pair in PAIRS.items() if pair == halves), "+".join(halves))


class Served(NamedTuple):
    """The results of serving a case.

    ``moves`` are changes of servers' blocks by an online policy, ``routing_s`` the real seconds of each
    routing decision. ``summary`` exists only for a run of the system itself.
    """

    requests: tuple[SimulatedRequest, ...] = ()
    moves: tuple[CompletedMove, ...] = ()
    routing_s: tuple[float, ...] = ()
    summary: dict[str, Any] | None = None
    steps: array[float] | None = None
    n_steps: int | None = None
    gaps_s: Sequence[float] | None = None
    """These three are as in ``testbed.fast.engine.FastRun``; without gaps the closed form gives them."""


def is_instance(target: str) -> bool:
    return target.endswith(".json")


def scenario_case(target: str, choice: PolicyChoice, overrides: Sequence[Override], seed: int | None) -> Case:
    """Return a scenario's case; ``choice`` and ``seed`` replace the scenario's own.

    Raises ``ScenarioError``.
    """
    changes: list[Override] = [*overrides, *choice.overrides()]
    if seed is not None:
        changes.append(Change("seed", seed))
    return Case(load_experiment(target, changes))


def instance_case(
    path: Path,
    choice: PolicyChoice,
    session_setup: bool,
    design_concurrency: int | Literal["searched"] | None = None,
) -> Case:
    """Return an instance file's case under a policy (default: the pair "proposed"). Raises ``UserError``."""
    instance = load_instance(path)
    placement, routing = resolve_pair(choice.pair or "proposed")
    experiment = instance_experiment(
        instance,
        PolicyPart(choice.placement or placement, choice.routing or routing, design_concurrency),
        session_setup,
    )
    petals = PetalsRouting(instance.hop_overhead_s, instance.shortage_penalty_s)
    return Case(experiment, {petals.name: petals}, path)


def without_setup(case: Case) -> Case:
    """Return the case with no session setup on any request's first token."""
    if case.source is None:
        return Case(changed(case.experiment, {"calibration.session_setup": False}), case.stand_ins)
    policy = case.experiment.policy
    choice = PolicyChoice(None, policy.placement, policy.routing)
    return instance_case(case.source, choice, False, policy.design_concurrency)


def instance_experiment(instance: Instance, policy: PolicyPart, session_setup: bool) -> Experiment:
    """Return the experiment that an instance describes.

    Its links have half of the raw RTT in each direction. ``session_setup`` adds the published constant to
    every request's first token.
    """
    problem = instance.problem
    setup_s = (
        instance.session_setup_petals_s
        if has_petals_setup(policy.placement)
        else instance.session_setup_proposed_s
    )
    servers = [server.name for server in problem.servers]
    links: dict[tuple[str, str], Link] = {}
    for client, row in zip(problem.clients, problem.raw_rtt_s, strict=True):
        for server, rtt_s in zip(servers, row, strict=True):
            links[client, server] = links[server, client] = Link(rtt_s / 2, _WIRE_BPS)
    for server, row in zip(servers, problem.server_rtt_s, strict=True):
        links.update(
            ((server, other), Link(rtt_s / 2, _WIRE_BPS)) for other, rtt_s in zip(servers, row, strict=True)
        )
    return Experiment(
        name=instance.id,
        description="an explicit instance",
        seed=0,
        time_scale=1.0,
        problem=problem,
        sites=dict(zip((*problem.clients, *servers), instance.sites, strict=True)),
        calibration=Calibration(
            name="instance",
            initial_delay_s=problem.initial_delay_s,
            session_setup_s=setup_s if session_setup else 0.0,
        ),
        network=NetworkPart("loopback", links),
        compute=ComputePart(),
        policy=policy,
        workload=WorkloadPart(instance.requests),
        tables=None,
    )
