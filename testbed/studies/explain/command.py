"""``testbed explain``: explains a request of a run directory, or of a scenario, which is simulated first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.control.choice import chosen
from testbed.errors import UserError
from testbed.records.summary import read_summary
from testbed.rundir import scratch
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import VIRTUAL, engine_of, simulate
from testbed.simulator.summary import summarize_simulation
from testbed.simulator.tables import write_simulation
from testbed.studies.explain.account import account
from testbed.studies.explain.text import explain_text


def explain_command(
    target: str, request: int, policy: str | None, overrides: Sequence[str], seed: int | None
) -> tuple[dict[str, Any], str]:
    """Returns the object for ``--json``, and the text for the terminal.

    ``target``: a run directory or a scenario. Raises ``UserError`` if the request cannot be explained.
    """
    if Path(target).is_dir():
        if policy is not None or overrides or seed is not None:
            raise UserError(
                f"{target} is a finished run, which options cannot change: leave out --policy, --set and "
                "--seed"
            )
        found = account(Path(target), request)
        answer = {"target": target, "engine": engine_of(read_summary(Path(target))), **found}
        return answer, explain_text(answer)
    case = scenario_case(target, chosen(policy), overrides, seed)
    with scratch("study") as folder:
        run_dir = folder / "run"
        simulation = simulate(case, "testbed", folder=run_dir, live=False)
        if simulation.placement is None:
            raise UserError(f"{case.experiment.name}: {simulation.error}")
        if simulation.engine != VIRTUAL:
            write_simulation(
                run_dir, simulation, summarize_simulation(simulation, case.experiment.objectives)
            )
        answer = {"target": target, "engine": simulation.engine, **account(run_dir, request)}
    return answer, explain_text(answer)
