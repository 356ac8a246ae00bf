"""Runs the placement policy of an experiment and binds its router, with the user's words for failures."""

from __future__ import annotations

from policies.checks import check_placement
from policies.interfaces import Router
from policies.problem import Placement, PolicyError
from policies.registry import resolve_placement, resolve_routing
from testbed.errors import UserError
from testbed.experiment import Experiment


def place_experiment(experiment: Experiment) -> tuple[Placement, Router]:
    """The placement and a router for it. Raises ``UserError`` with the policy's reason."""
    try:
        placement = resolve_placement(experiment.placement).place(
            experiment.problem, experiment.design_concurrency
        )
        check_placement(experiment.problem, placement)
        return placement, resolve_routing(experiment.routing).bind(experiment.problem, placement)
    except PolicyError as error:
        raise UserError(str(error)) from error
