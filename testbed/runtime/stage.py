"""What a run takes place on: a clock, a network, and whoever has its nodes.

Virtual time is exact and does not depend on what else the machine does; real time is for what only it can show.
``choose_stage`` decides for a scenario, ``Stage.begin`` brings the launcher, ``Stage.run`` the event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from testbed.errors import UserError
from testbed.runtime.launching import Launcher
from testbed.scenario.experiment import Experiment

T = TypeVar("T")
VIRTUAL_NETWORKS = ("fabric", "memory")
"""Whose links are played in user space."""


@dataclass(frozen=True)
class Stage:
    """``network`` is one backend where the clock is virtual; for real time the launcher may still choose."""

    clock: Literal["real", "virtual"]
    network: str
    why: str
    network_why: str | None = None
    """Why that network; ``None``: as the launcher says."""

    @property
    def is_virtual(self) -> bool:
        return self.clock == "virtual"

    @property
    def has_twin(self) -> bool:
        """Whether virtual time can repeat the run: not what is virtual already, and no network that nobody emulates."""
        return not self.is_virtual and self.network != "hosts"

    def begin(self, experiment: Experiment, run_dir: Path) -> Launcher:
        """The launcher of a run, which already imports what its nodes need."""
        if self.is_virtual and self.network == "memory":
            from testbed.runtime.virtual.memory import MemoryLauncher

            return MemoryLauncher()
        if self.is_virtual:
            from testbed.runtime.real.handle import LauncherHandle
            from testbed.runtime.virtual.page import Page

            page = Page(["the orchestrator", "the launcher", *experiment.nodes])
            return LauncherHandle(run_dir, page=page)
        return real_launcher(experiment, run_dir)

    def run(self, launcher: Launcher, main: Coroutine[Any, Any, T]) -> T:
        """Run the emulation on the event loop that keeps this clock."""
        try:
            with asyncio.Runner(loop_factory=launcher.new_loop) as runner:
                return runner.run(main)
        finally:
            launcher.dispose()


def real_launcher(experiment: Experiment, run_dir: Path) -> Launcher:
    """The launcher of a run in real time, on one machine or several. Raises ``UserError`` if it lacks these."""
    if experiment.machines:
        if find_spec("ray") is None:
            raise UserError(
                "several machines need what is not installed here (ray): pip install '.[ray]' in the checkout"
            )
        from testbed.runtime.hosts.launcher import HostsLauncher

        return HostsLauncher(experiment, run_dir)
    from testbed.runtime.real.handle import LauncherHandle

    return LauncherHandle(run_dir, experiment.blocks.n_threads if experiment.blocks else None)


def choose_stage(experiment: Experiment, *, holds: bool = False) -> Stage:
    """The clock and the network for a run of ``experiment``; ``holds``: it stays up for somebody after its workload.

    Raises ``UserError`` when clock, network and what else the scenario asks for contradict each other.
    """
    reasons = list(_reasons_for_real_time(experiment, holds))
    if experiment.clock == "virtual" and reasons:
        raise UserError(f"clock virtual: {reasons[0]}; leave one of the two out")
    if experiment.network == "memory":
        if experiment.clock == "real":
            raise UserError(
                "the memory network keeps virtual time only; leave out clock real, or take another network"
            )
        if reasons:
            raise UserError(
                f"the memory network keeps virtual time only, but {reasons[0]}; leave one of the two out"
            )
    if experiment.machines:
        return Stage("real", _network_over_machines(experiment), reasons[0])
    if experiment.clock == "real":
        return Stage("real", experiment.network, "asked for")
    if reasons:
        return Stage("real", experiment.network, reasons[0])
    why = "asked for" if experiment.clock == "virtual" else "nothing here needs real time"
    if experiment.network != "auto":
        return Stage("virtual", experiment.network, why)
    missing = _fabric_missing()
    if missing is None:
        return Stage("virtual", "fabric", why, "processes and the kernel's TCP")
    no_fabric = f"no fabric as {missing.partition(':')[0]}, see `testbed doctor`"
    return Stage("virtual", "memory", why, f"all nodes in one process; {no_fabric}")


def _reasons_for_real_time(experiment: Experiment, holds: bool) -> Any:
    if experiment.compute == "blocks":
        yield "real blocks compute in real time"
    if experiment.machines:
        yield "several machines keep real time"
    if experiment.network not in ("auto", *VIRTUAL_NETWORKS):
        yield f"the {experiment.network} network needs real time"
    if experiment.time_scale != 1:
        yield f"a time scale of {experiment.time_scale:g} needs real time"
    if experiment.programs:
        yield "programs of [[node]] run in real time"
    if holds:
        yield "--hold and `serve` keep the testbed up in real time"


def _network_over_machines(experiment: Experiment) -> str:
    """The network between several machines. Raises ``UserError`` for one that only one machine can have."""
    if experiment.network in ("netem", "loopback"):
        raise UserError(
            f"the {experiment.network} network is inside one machine; over several take fabric (links as the scenario "
            "has them) or hosts (the real network between the machines)"
        )
    if experiment.network == "hosts":
        what = (
            ("a time scale other than 1", experiment.time_scale != 1),
            ("[[network.event]]", bool(experiment.changes)),
            ("[[node]]", bool(experiment.programs)),
        )
        for name, is_there in what:
            if is_there:
                raise UserError(
                    f"the hosts network is the real one between the machines, which cannot have {name}: take fabric, or "
                    "leave it out"
                )
    return "fabric" if experiment.network == "auto" else experiment.network


def _fabric_missing() -> str | None:
    """Why the fabric network does not work here; ``None`` if it does."""
    if sys.platform != "linux":
        return "this system has no network namespaces"
    from netem.fabric import FabricBackend

    return FabricBackend.missing()
