"""The cases to simulate: a scenario or an instance with one policy and one seed."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from netem.networks import IN_PROCESS
from policies.interfaces import RoutingPolicy, session_setup_of
from policies.links import UNLIMITED_BPS, Link
from policies.petals_routing import PetalsRouting
from policies.problem import PolicyError
from policies.registry import pair_name, resolve_pair, shipped_policy
from testbed.control.placing import load_to_run, users_policy
from testbed.errors import UserError
from testbed.experiments import Change, Override, Target, changed
from testbed.experiments.experiment import (
    Calibration,
    ComputePart,
    Experiment,
    NetworkPart,
    PolicyPart,
    WorkloadPart,
)
from testbed.experiments.policy import PolicyChoice
from testbed.fast.outcome import ServerEvent, SimulatedRequest
from testbed.records.events import RecoveryEvent
from testbed.records.links import LinksUsed
from testbed.records.requests import RequestRow
from testbed.records.summary import MoveRow, RunSummary
from testbed.simulator.instance import Instance, load_instance


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
        return pair_name(self.experiment.policy.placement, self.experiment.policy.routing)


class Served(NamedTuple):
    """The results of serving a case.

    ``moves`` are changes of servers' blocks by an online policy, ``routing_s`` the real seconds of each
    routing decision. A run of the system itself has ``rows`` and ``summary``, the other engines have ``outcomes``.
    """

    outcomes: tuple[SimulatedRequest, ...] = ()
    moves: tuple[MoveRow, ...] = ()
    routing_s: tuple[float, ...] = ()
    rows: Sequence[RequestRow] | None = None
    summary: RunSummary | None = None
    steps: array[float] | None = None
    n_steps: int | None = None
    gaps_s: Sequence[float] | None = None
    """These three are as in ``testbed.fast.outcome.FastRun``; without gaps the closed form gives them."""
    links: LinksUsed | None = None
    """Use of every link; ``None``: the engine has none of it, or it is in the run directory."""
    faults: Sequence[ServerEvent | RecoveryEvent] = ()
    """As in ``testbed.fast.outcome.FastRun``."""
    is_undisturbed: bool = True
    """Whether no session lost a server midway, as far as the engine ``fast`` has served the case."""


def is_instance(target: str) -> bool:
    return target.endswith(".json")


def scenario_case(
    target: Target, choice: PolicyChoice, overrides: Sequence[Override], seed: int | None
) -> Case:
    """Return a scenario's case; ``choice`` and ``seed`` replace the scenario's own.

    Raises ``ScenarioError``.
    """
    changes: list[Override] = [*overrides, *choice.overrides()]
    if seed is not None:
        changes.append(Change("seed", seed))
    return Case(load_to_run(target, changes))


def instance_case(
    path: Path,
    choice: PolicyChoice,
    session_setup: bool,
    design_concurrency: int | Literal["searched"] | None = None,
) -> Case:
    """Return an instance file's case under a policy (default: the pair "proposed"). Raises ``UserError``."""
    instance = load_instance(path)
    placement, routing = resolve_pair(choice.pair or "proposed")
    policy = PolicyPart(choice.placement or placement, choice.routing or routing, design_concurrency)
    try:
        experiment = instance_experiment(instance, policy, session_setup)
    except PolicyError as error:
        raise UserError(str(error)) from error
    petals = PetalsRouting(instance.hop_overhead_s, instance.shortage_penalty_s)
    return Case(experiment, {petals.name: petals}, path)


def concurrency_of(text: str | None) -> int | Literal["searched"] | None:
    """Return the sessions at a time to design an instance's placement for; ``None``: its policy chooses.

    ``text``: as of ``--design-concurrency``. Raises ``UserError``.
    """
    if text is None or text == "auto":
        return None
    if text == "searched":
        return "searched"
    if not text.isdigit() or int(text) < 1:
        raise UserError(
            f"--design-concurrency must be auto, searched or a whole number of at least 1, not {text!r}"
        )
    return int(text)


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
    every request's first token, for which a user's placement policy is loaded. Raises ``PolicyError``.
    """
    problem = instance.problem
    setup_s = 0.0
    if session_setup:
        name = policy.placement
        placing = shipped_policy("placement", name) or users_policy("placement", name)
        is_petals = session_setup_of(placing) == "petals"
        setup_s = instance.session_setup_petals_s if is_petals else instance.session_setup_proposed_s
    servers = [server.name for server in problem.servers]
    links: dict[tuple[str, str], Link] = {}
    for client, row in zip(problem.clients, problem.raw_rtt_s, strict=True):
        for server, rtt_s in zip(servers, row, strict=True):
            links[client, server] = links[server, client] = Link(rtt_s / 2, UNLIMITED_BPS)
    for server, row in zip(servers, problem.server_rtt_s, strict=True):
        links.update(
            ((server, other), Link(rtt_s / 2, UNLIMITED_BPS))
            for other, rtt_s in zip(servers, row, strict=True)
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
            session_setup_s=setup_s,
        ),
        network=NetworkPart(IN_PROCESS.name, links),
        compute=ComputePart(),
        policy=policy,
        workload=WorkloadPart(instance.requests),
        tables=None,
    )
