"""Runs the placement policy of an experiment and binds its router, with the user's words for failures."""

from __future__ import annotations

import time
from dataclasses import dataclass

from policies.checks import check_placement
from policies.interfaces import Router
from policies.problem import Placement, PolicyError
from policies.registry import resolve_placement, resolve_routing
from testbed.errors import UserError
from testbed.experiment import Experiment


@dataclass(frozen=True)
class PlacedExperiment:
    """A checked placement, the router for it, and the real seconds that deciding took."""

    placement: Placement
    router: Router
    decision_s: float


def place_experiment(experiment: Experiment) -> PlacedExperiment:
    """Place the blocks. Raises ``UserError`` with the policy's reason."""
    started_at = time.perf_counter()
    try:
        placement = resolve_placement(experiment.placement).place(
            experiment.problem, experiment.design_concurrency
        )
        check_placement(experiment.problem, placement)
        router = resolve_routing(experiment.routing).bind(experiment.problem, placement)
    except PolicyError as error:
        raise UserError(str(error)) from error
    return PlacedExperiment(placement, router, time.perf_counter() - started_at)
