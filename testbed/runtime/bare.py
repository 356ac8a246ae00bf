"""Runs only the network of a scenario, with the user's programs and no servers or clients."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from nodes.clock import run_clock
from policies.links import Link, Pair
from testbed.control.faults.byhand import Fault
from testbed.control.guarded import guarded
from testbed.control.links import ChangeLink, LinkChanges
from testbed.control.live import LiveSocket
from testbed.experiments.experiment import Experiment
from testbed.experiments.units import counted
from testbed.experiments.whole import whole_network
from testbed.records.events import EventWriter, Holding, NetworkOpened, Stopped
from testbed.runtime import wiring
from testbed.runtime.launching import Launcher
from testbed.runtime.processes import Processes
from testbed.runtime.programs import Programs, check_namespaces
from testbed.runtime.signals import handling
from testbed.runtime.whereabouts import write_whereabouts


async def hold_network(
    experiment: Experiment, run_dir: Path, launcher: Launcher, announce: Callable[[str], None]
) -> None:
    """Open the network, start the programs of ``[[node]]``, and keep both until SIGINT, SIGTERM or SIGHUP.

    Scenario time (of network events) begins when the network is open. Raises the ``TestbedError`` that breaks
    it.
    """
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    with handling(
        lambda *_: loop.call_soon_threadsafe(interrupted.set), signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    ):
        network = _BareNetwork(experiment, run_dir, launcher, interrupted, announce)
        try:
            await network.hold()
        except KeyboardInterrupt:
            return
        finally:
            await network.end()


class _BareNetwork:
    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        launcher: Launcher,
        interrupted: asyncio.Event,
        announce: Callable[[str], None],
    ) -> None:
        self._experiment = experiment
        self._run_dir = run_dir
        self._launcher = launcher
        self._announce = announce
        self._clock = run_clock(experiment.time_scale)
        self._events = EventWriter(run_dir)
        self._programs = Programs(experiment, launcher, run_dir, self._events, self._clock.known_s, announce)
        self._processes = Processes(launcher, run_dir, dict, self._survives, interrupted)
        self._is_ending = False
        self._links = LinkChanges(
            experiment,
            whole_network(experiment),
            self._clock,
            self._change,
            contextlib.nullcontext,
            self._events,
        )
        self._socket = LiveSocket(run_dir, {ChangeLink: self._links.by_hand, Fault: _no_servers})
        self._changing: asyncio.Task[None] | None = None

    async def hold(self) -> None:
        experiment = self._experiment
        spec = wiring.network_spec(experiment, self._run_dir.name)
        network = await self._processes.open(
            experiment.network.backend, spec, experiment.network.keep_cpus_awake
        )
        check_namespaces(network)
        write_whereabouts(self._run_dir, network)
        self._events.write(NetworkOpened(name=network.name, why=network.why))
        self._clock.origin_at = self._clock.instant()
        await self._processes.guard(self._programs.start())
        changing = self._links.run(follows_courses=network.network.follows_courses)
        self._changing = guarded(changing, self._processes.give_up)
        await self._socket.open()
        self._events.write(Holding(at_s=self._clock.now_s()))
        self._announce(
            f"network {network.name} ({network.why}) of {counted(len(spec.nodes), 'nodes')} is up; `testbed exec NODE "
            "-- COMMAND` runs programs on them, Ctrl-C ends it"
        )
        await self._processes.guard(asyncio.Event().wait())

    async def end(self) -> None:
        """End the programs and the network. Can be called in every phase."""
        self._is_ending = True
        self._socket.close()
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)
        await self._programs.end()
        self._events.write(Stopped(at_s=self._clock.known_s()))
        await self._processes.close()
        self._events.close()
        self._clock.close()

    async def _change(self, links: Mapping[Pair, Link]) -> float:
        done_at = await self._launcher.update(wiring.scaled_links(self._experiment, links, False))
        return self._clock.scenario_s(done_at)

    def _survives(self, name: str, status: int) -> bool:
        return self._programs.ended(name, status) or self._is_ending


async def _no_servers(fault: Fault) -> str:
    return f"there is no server {fault.server}: this testbed has only the network"
