"""Runs the placement policy of an experiment and binds its router, with the user's words for failures."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@contextmanager
def policy_code(kind: str, name: str) -> Iterator[None]:
    """Runs a policy's code: whatever it raises becomes a ``PolicyError`` that names it and the place."""
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise PolicyError(
            f"{kind} policy {name} failed at {Path(frame.filename).name}:{frame.lineno} with "
            f"{type(error).__name__}: {error}"
        ) from error


def place_experiment(experiment: Experiment) -> PlacedExperiment:
    """Place the blocks. Raises ``UserError`` with the policy's reason."""
    started_at = time.perf_counter()
    if ":" in experiment.placement + experiment.routing and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # module:Class is looked up in the current folder too
    try:
        policy = resolve_placement(experiment.placement)
        with policy_code("placement", experiment.placement):
            placement = policy.place(experiment.problem, experiment.design_concurrency)
        check_placement(experiment.problem, placement, experiment.placement)
        routing = resolve_routing(experiment.routing)
        with policy_code("routing", experiment.routing):
            router = routing.bind(experiment.problem, placement)
    except PolicyError as error:
        raise UserError(str(error)) from error
    return PlacedExperiment(placement, router, time.perf_counter() - started_at)
