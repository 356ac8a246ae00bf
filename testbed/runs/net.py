"""``testbed net``: emulates only a scenario's network, with the programs of its ``[[node]]`` tables."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from netem.networks import named
from testbed.errors import RunError, TestbedError, UserError
from testbed.experiments import dump_toml
from testbed.experiments.experiment import Experiment
from testbed.rundir import make_run_dir
from testbed.runtime.bare import hold_network
from testbed.runtime.programs import check_programs, without_namespaces
from testbed.runtime.real.handle import LauncherHandle
from testbed.terminal import say


def net_command(experiment: Experiment, out: Path | None) -> None:
    """Hold the network of ``experiment`` until interrupted. Raises ``TestbedError``."""
    network = named(experiment.network.backend)
    if network is not None and not network.has_namespaces:
        raise without_namespaces(network.name)
    if experiment.clock == "virtual":
        raise UserError(
            "programs run in real time, but the scenario's clock is virtual: change it with --set clock=real"
        )
    if experiment.machines:
        raise UserError(
            "testbed net holds a network on this machine only: leave out [[hosts]], or hold the whole testbed on several "
            "machines with testbed up --hold"
        )
    check_programs(experiment, say)
    run_dir = make_run_dir(out, experiment.name)
    launcher = LauncherHandle(run_dir)
    try:
        (run_dir / "scenario.toml").write_text(dump_toml(experiment), encoding="utf-8")
    except OSError as full:
        launcher.close()
        raise RunError(f"cannot write to {run_dir}: {full.strerror}; choose another --out") from full
    say(f"run {run_dir}")
    try:
        with asyncio.Runner(loop_factory=launcher.new_loop) as runner:
            runner.run(hold_network(experiment, run_dir, launcher, say))
    except UserError:
        shutil.rmtree(run_dir)  # nothing began: the corrected command may take the same folder
        raise
    except TestbedError as error:
        raise RunError(f"{error}; logs are in {run_dir}") from error
    finally:
        launcher.dispose()
    say(f"the network has ended; the programs' output is in {run_dir / 'logs'}")
