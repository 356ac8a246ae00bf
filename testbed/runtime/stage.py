"""The stage of a run: its clock, its network, and its launcher.

Virtual time is exact and does not depend on what else the machine does. Real time is needed for real blocks,
users' programs, several machines and the kernel's own behaviour. ``choose_stage`` decides for a scenario,
``Stage.begin`` returns the launcher, ``Stage.run`` runs the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from netem.networks import AUTO, JOINING, NETWORKS, Clock, Network, choose, named
from netem.spec import TcpSpec
from testbed.errors import UserError
from testbed.experiments.experiment import Experiment
from testbed.runtime.launching import Launcher
from testbed.runtime.signals import held_back

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """A clock and a network, each with the reason.

    With a real clock ``network`` may be ``None``: the launcher chooses.
    """

    clock: Clock
    network: Network | None
    why: str
    network_why: str | None = None
    """Why that network; ``None``: the launcher gives the reason."""

    @property
    def is_virtual(self) -> bool:
        return self.clock == "virtual"

    @property
    def has_twin(self) -> bool:
        """Whether virtual time can repeat the run: it is in real time, and its network is emulated."""
        return not self.is_virtual and (self.network is None or self.network.emulates)

    @property
    def wanted(self) -> str:
        """What the launcher is asked for: the network's name, or "auto"."""
        return AUTO if self.network is None else self.network.name

    def begin(self, experiment: Experiment, run_dir: Path) -> Launcher:
        """Return the launcher of a run; it begins to import what the nodes need."""
        if self.network is not None and not self.network.nodes_are_processes:
            from testbed.runtime.virtual.memory import MemoryLauncher

            return MemoryLauncher()
        if self.is_virtual:
            from testbed.runtime.real.handle import LauncherHandle
            from testbed.runtime.virtual.page import Page

            page = Page(["the orchestrator", "the launcher", *experiment.nodes])
            return LauncherHandle(run_dir, page=page)
        return real_launcher(experiment, run_dir)

    def run(self, launcher: Launcher, main: Coroutine[Any, Any, T]) -> T:
        """Run the emulation ``main`` on an event loop that keeps this clock; returns its result.

        Signals wait until ``main`` calls ``let_through``.
        """
        try:
            with held_back(), asyncio.Runner(loop_factory=launcher.new_loop) as runner:
                return runner.run(main)
        finally:
            launcher.dispose()


def real_launcher(experiment: Experiment, run_dir: Path) -> Launcher:
    """Return the launcher of a run in real time, on one machine or several.

    Raises ``UserError`` without Ray.
    """
    if experiment.machines:
        if find_spec("ray") is None:
            raise UserError(
                "several machines need the package ray, which is not installed: pip install '.[ray]' in the "
                "checkout"
            )
        from testbed.runtime.hosts.launcher import HostsLauncher

        return HostsLauncher(experiment, run_dir)
    from testbed.runtime.real.handle import LauncherHandle

    return LauncherHandle(run_dir, experiment.compute.blocks.n_threads if experiment.compute.blocks else None)


def choose_stage(experiment: Experiment, *, holds: bool = False) -> Stage:
    """Choose the clock and the network for a run of ``experiment``.

    ``holds``: the run stays up for its users after the workload. Raises ``UserError`` if clock, network and
    other keys of the scenario contradict each other.
    """
    network = named(experiment.network.backend)
    reasons = list(_reasons_for_real_time(experiment, network, holds))
    if experiment.clock == "virtual" and reasons:
        raise UserError(f"the clock cannot be virtual, since {reasons[0]}; leave one of the two out")
    if network is not None and "real" not in network.clocks:
        only = f"the {network.name} network has only virtual time"
        if experiment.clock == "real":
            raise UserError(f"{only}; leave out clock real, or use another network")
        if reasons:
            raise UserError(f"{only}, but {reasons[0]}; leave one of the two out")
    if experiment.machines:
        return Stage("real", _network_over_machines(experiment, network), reasons[0])
    if experiment.clock == "real":
        return Stage("real", network, "asked for")
    if reasons:
        return Stage("real", network, reasons[0])
    why = "asked for" if experiment.clock == "virtual" else "nothing here needs real time"
    if network is not None:
        return Stage("virtual", network, why)
    network, network_why = choose(AUTO, "virtual", losing=experiment.network.loses)
    return Stage("virtual", network, why, network_why)


def _reasons_for_real_time(experiment: Experiment, network: Network | None, holds: bool) -> Iterator[str]:
    """Yield why the run must be in real time, in words; nothing if it can be virtual."""
    if experiment.compute.backend == "blocks":
        yield "real blocks compute in real time"
    if experiment.machines:
        yield "several machines run in real time"
    if network is not None and "virtual" not in network.clocks:
        yield f"the {network.name} network needs real time"
    congestion_control = experiment.network.tcp.congestion_control
    if congestion_control != TcpSpec.congestion_control:
        yield f"TCP's congestion control {congestion_control} follows the machine's clock"
    if experiment.time_scale != 1:
        yield f"a time scale of {experiment.time_scale:g} needs real time"
    if experiment.programs:
        yield "programs of [[node]] run in real time"
    if holds:
        yield "--hold and `serve` run in real time"


def _network_over_machines(experiment: Experiment, network: Network | None) -> Network:
    """Return the network between several machines.

    Raises ``UserError`` for one that works on one machine only.
    """
    if network is None:
        return JOINING
    if not network.joins_machines:
        what = "the scenario's links"
        others = " or ".join(
            f"{each.name} ({what if each.emulates else each.nature})"
            for each in NETWORKS.values()
            if each.joins_machines
        )
        raise UserError(f"the {network.name} network works on one machine only; with several use {others}")
    if not network.emulates:
        lacking = (
            ("a time scale other than 1", experiment.time_scale != 1),
            ("[[network.event]] or [[network.trace]]", bool(experiment.network.changes)),
            ("[[node]]", bool(experiment.programs)),
        )
        for name, is_there in lacking:
            if is_there:
                raise UserError(
                    f"the {network.name} network is the real one between the machines and cannot have {name}; "
                    f"use {JOINING.name}, or leave it out"
                )
    return network
