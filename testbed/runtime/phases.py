"""Goes through the phases of one run, and writes ``plan.json``.

Whatever happens (an error, Ctrl-C, a node that dies), the network and the processes end and the record remains.
"""

from __future__ import annotations

from collections.abc import Callable

from nodes import control
from testbed.errors import RunError, TestbedError
from testbed.records.base import data_of
from testbed.records.events import Broken, Interrupted
from testbed.records.plan import PLAN, Clock, PlacementRow, Plan
from testbed.rundir import write_json
from testbed.runtime.emulation import Emulation


def plan_of(emulation: Emulation, has_ended: bool = False) -> Plan:
    """Return the plan: the placement, start-up times, and at the end also decisions and leaks."""
    problem, placement = emulation.experiment.problem, emulation.placed.placement
    blocks = emulation.blocks
    return Plan(
        placement=PlacementRow.of(placement),
        routing=emulation.experiment.policy.routing,
        servers=[s.name for s in problem.servers],
        clients=list(problem.clients),
        devices=None
        if blocks is None
        else [blocks.settings.device_of(number) for number in range(problem.n_servers)],
        placement_decision_s=emulation.placed.decision_s,
        network=emulation.network.name if emulation.network else emulation.experiment.network.backend,
        clock=Clock(name=emulation.stage.clock, why=emulation.stage.why),
        wall_s=emulation.wall_s,
        scenario_s=emulation.scenario_s,
        startup_s=emulation.startup_s,
        forwarder=emulation.forwarder,
        machines=emulation.machines,
        stalls=emulation.stalls,
        memory=emulation.memory.largest,
        decisions=emulation.faults.decisions if has_ended else None,
        routing_decisions_s=[round(took_s, 7) for took_s in emulation.decisions_s] if has_ended else None,
        leaks=emulation.faults.leaks,
    )


async def run_emulation(
    emulation: Emulation, hold: bool, announce: Callable[[str], None]
) -> TestbedError | None:
    """Run all phases; returns the error that broke the run, or ``None``.

    An interrupt is not an error: it ends the run cleanly, also one that is held up after its workload.
    """
    try:
        _write_plan(emulation)
        await emulation.start(announce)
        _write_plan(emulation)
        announce(
            f"{emulation.network_text()}; "
            f"{len(emulation.experiment.nodes)} nodes up in {emulation.startup_s['total']:.2f} s"
        )
        await emulation.serve()
        emulation.has_served = True
        _write_plan(emulation, has_ended=True)
        if hold:
            announce("the workload is done; holding the testbed up, Ctrl-C ends it")
            await emulation.hold()
    except KeyboardInterrupt:
        if not emulation.has_served:
            emulation.events.write(Interrupted(at_s=emulation.clock.known_s()))
        emulation.interrupted.set()
    except TestbedError as error:
        emulation.events.write(Broken(at_s=emulation.clock.known_s(), reason=str(error)))
        return error
    except (OSError, control.ControlError) as error:
        emulation.events.write(Broken(at_s=emulation.clock.known_s(), reason=str(error)))
        return RunError(f"the run ended: {error}")
    finally:
        await emulation.stop()
    try:
        _write_plan(emulation, has_ended=True)  # with the leaks, which are known now
    except RunError as error:
        return error
    if emulation.events.failure is not None:
        return RunError(
            f"{emulation.events.failure}; events of the run are missing there: make room, and run it again"
        )
    return None


def _write_plan(emulation: Emulation, has_ended: bool = False) -> None:
    """Write what is known of the plan. Raises ``RunError``."""
    plan = emulation.run_dir / PLAN
    try:
        write_json(plan, data_of(plan_of(emulation, has_ended)))
    except OSError as error:
        raise RunError(f"cannot write {plan}: {error.strerror}; make room") from error
