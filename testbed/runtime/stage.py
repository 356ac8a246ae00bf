"""What a run takes place on: a clock, a network, and whoever has its nodes.

Virtual time is exact and does not depend on what else the machine does; real time is for what only it can show.
``choose_stage`` decides for a scenario, ``Stage.begin`` brings the launcher, ``Stage.run`` the event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
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

    def begin(self, experiment: Experiment, run_dir: Path) -> Launcher:
        """The launcher of a run, which already imports what its nodes need."""
        if self.is_virtual and self.network == "memory":
            from testbed.runtime.virtual.memory import MemoryLauncher

            return MemoryLauncher()
        from testbed.runtime.real.handle import LauncherHandle

        if self.is_virtual:
            from testbed.runtime.virtual.page import Page

            page = Page(["the orchestrator", "the launcher", *experiment.nodes])
            return LauncherHandle(run_dir, page=page)
        return LauncherHandle(run_dir, experiment.blocks.n_threads if experiment.blocks else None)

    def run(self, launcher: Launcher, main: Coroutine[Any, Any, T]) -> T:
        """Run the emulation on the event loop that keeps this clock."""
        try:
            with asyncio.Runner(loop_factory=launcher.new_loop) as runner:
                return runner.run(main)
        finally:
            launcher.dispose()


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
    if experiment.network not in ("auto", *VIRTUAL_NETWORKS):
        yield f"the {experiment.network} network needs real time"
    if experiment.time_scale != 1:
        yield f"a time scale of {experiment.time_scale:g} needs real time"
    if experiment.programs:
        yield "programs of [[node]] run in real time"
    if holds:
        yield "--hold and `serve` keep the testbed up in real time"


def _fabric_missing() -> str | None:
    """Why the fabric network does not work here; ``None`` if it does."""
    if sys.platform != "linux":
        return "this system has no network namespaces"
    from netem.fabric import FabricBackend

    return FabricBackend.missing()
