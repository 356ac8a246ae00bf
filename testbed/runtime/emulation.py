"""The phases of a run: builds the network, starts the nodes, serves the workload, ends everything.

``testbed.runtime.phases`` goes through them. Coordinator, faults, moves and the nodes meet here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType

from nodes import messages
from nodes.clock import on_tick, run_clock
from nodes.request import Generation, Request
from testbed.control.coordinator import Coordinator
from testbed.control.faults.byhand import Fault
from testbed.control.faults.emulated import Faults
from testbed.control.guarded import guarded
from testbed.control.links import ChangeLink, LinkChanges
from testbed.control.live import LiveSocket
from testbed.control.moves import Moves
from testbed.control.steering import online_policy
from testbed.errors import RunError
from testbed.experiments.whole import whole_network
from testbed.records.events import (
    CpusKeptAwake,
    EventWriter,
    Holding,
    NetworkOpened,
    NodeEnded,
    Serving,
    Stopped,
)
from testbed.records.plan import Stall
from testbed.records.summary import MachineState
from testbed.runtime import wiring
from testbed.runtime.guests import Guests
from testbed.runtime.launching import OpenNetwork
from testbed.runtime.nodeset import NodeSet
from testbed.runtime.processes import Processes
from testbed.runtime.programs import Programs, check_namespaces
from testbed.runtime.progress import Progress
from testbed.runtime.reception import Reception
from testbed.runtime.reports import Reports
from testbed.runtime.servermemory import ServerMemory
from testbed.runtime.setup import RunSetup
from testbed.runtime.whereabouts import write_whereabouts

_PATIENCE_S, _BROKEN_PATIENCE_S = 5.0, 0.5
"""Real seconds that clients have to close their sessions, at the end of a good and of a broken run."""
_ASLEEP_S = 1.0
"""Seconds for which stalls of the machine are measured while CPUs may sleep."""


class Emulation:
    """One run: ``start``, ``serve``, ``stop`` in this order. Use ``run_emulation``."""

    def __init__(self, setup: RunSetup) -> None:
        self.experiment = experiment = setup.experiment
        self._guests = setup.guests
        self.placed = placed = setup.placed
        self.blocks = blocks = setup.blocks
        self.run_dir = run_dir = setup.run_dir
        self.progress = Progress(len(experiment.workload.requests))
        self.interrupted = asyncio.Event()
        self.events = EventWriter(run_dir)
        self.stage = stage = setup.stage
        self.clock = run_clock(experiment.time_scale)
        self._launcher = launcher = setup.launcher
        self.has_served = False
        """Whether the workload has ended.

        After that a signal ends the run, but does not count as an interrupt.
        """
        self._stopping = False
        self._coordinator = coordinator = Coordinator(experiment, placed, self.clock.now_s, self._call_at)
        self.processes = processes = Processes(
            launcher, run_dir, lambda: self._reports.handlers(), self._survives, self.interrupted
        )
        self.nodes = nodes = NodeSet(
            experiment, coordinator, launcher, processes, self.clock, run_dir, blocks
        )
        self.faults = Faults(experiment, nodes, coordinator, self.events, run_dir)
        whole = whole_network(experiment, stage.is_virtual)
        self.links = LinkChanges(
            *(experiment, whole, self.clock, nodes.change_links, self.faults.one_at_a_time, self.events),
            nodes.is_used,
        )
        nodes.link_now = self.links.link
        self._programs = Programs(experiment, launcher, run_dir, self.events, self.clock.known_s)
        self._socket = LiveSocket(run_dir, {Fault: self.faults.by_hand, ChangeLink: self.links.by_hand})
        policy = online_policy(experiment)
        self._moves: Moves | None = None
        if policy is not None:
            self._moves = Moves(experiment, policy, nodes, coordinator, self.events, blocks is not None)
            self.faults.on_death(self._moves.mover.server_died)
        self._reports = Reports(
            *(setup, coordinator, self.faults, self._moves, self.clock, self.events, self.progress),
            processes.give_up,
        )
        self._reception = Reception(experiment, coordinator, nodes, self.links, self.clock, self.progress)
        self.network: OpenNetwork | None = None
        """``None`` until it is open."""
        self._started_at = time.monotonic()
        self.startup_s: dict[str, float] = {}
        self.wall_s: float | None = None
        """Real seconds of serving, set at its end; ``scenario_s`` is the scenario time at that moment."""
        self.scenario_s: float | None = None
        self._serving_since: float | None = None
        self._background: list[asyncio.Task[None]] = []
        self._later: set[asyncio.Task[None]] = set()
        self.memory = ServerMemory(experiment.problem)
        self.forwarder: dict[str, float] | None = None
        """Counters of the user-space forwarder, if the network has one."""
        self.machines: list[MachineState] = []
        """State of the run's other machines at the end."""
        self.stalls: list[Stall] = []
        """When (``at_s``) and for how long (``real_s``) the whole machine stood still while serving."""

    async def start(self, announce: Callable[[str], None] = lambda text: None) -> None:
        """Build the network, start the nodes, connect the clients, agree on time zero.

        ``announce`` is told what takes long.
        """
        experiment = self.experiment
        keep_awake = experiment.network.keep_cpus_awake and not self.stage.is_virtual
        spec = wiring.network_spec(experiment, self.run_dir.name, self.stage.is_virtual)
        self.network = await self.processes.open(self.stage.wanted, spec, keep_awake)
        opened_at = time.monotonic()
        if self.stage.network_why is not None:
            self.network = replace(self.network, why=self.stage.network_why)
        self._mark("network")
        if not self.stage.is_virtual:
            write_whereabouts(self.run_dir, self.network)
            if self.experiment.programs:
                check_namespaces(self.network)
        self.events.write(
            NetworkOpened(name=self.network.name, why=self.network.why, shares_links=self._shares_links())
        )
        if not self.stage.is_virtual:
            await self.processes.guard(self._programs.start())
        if text := self.nodes.about_starting():
            announce(text)
        await self.processes.guard(self.nodes.start())
        self._mark("nodes")
        if text := self.nodes.about_connecting():
            announce(text)
        await self.processes.guard(self.nodes.connect())
        if keep_awake and self.processes.about_sleep is None:
            await self.processes.guard(self._decide_on_sleep(time.monotonic() - opened_at))
        if self.processes.about_sleep is not None:
            self.events.write(CpusKeptAwake(why=self.processes.about_sleep))
        self.faults.begin()
        if not self.stage.is_virtual:  # faults by hand would make runs in virtual time differ
            await self._socket.open()
        if self._moves is not None:
            self._moves.begin()
        self._mark("total")

    async def _decide_on_sleep(self, awake_s: float) -> None:
        """Let CPUs sleep if the machine stalls less often then.

        Stalls are compared with those of the last ``awake_s`` seconds, in which CPUs were kept awake.
        """
        if not (awake := await self._launcher.stalls()):
            return
        await self._launcher.keep_awake(False)
        await asyncio.sleep(_ASLEEP_S)
        asleep = (await self._launcher.stalls())[len(awake) :]
        with_it, without = (
            sum(end - begin for begin, end in stalls) / in_s
            for stalls, in_s in ((awake, awake_s), (asleep, _ASLEEP_S))
        )
        if without >= with_it:
            await self._launcher.keep_awake(True)
        self.processes.about_sleep = (
            f"CPUs {'may sleep' if without < with_it else 'are kept awake'}: before time zero the machine "
            f"stood still {with_it:.0%} of the time with them awake and {without:.0%} of the time without"
        )

    def _shares_links(self) -> bool | UnsetType:
        """Return whether pairs compete for the scenario's shared links; unset if it has none."""
        assert self.network is not None, "asked before the network was open"
        return self.network.network.shares_links if self.experiment.network.shared_bps else UNSET

    def network_text(self) -> str:
        """Return one line on the run's clock and network, and why these were chosen."""
        assert self.network is not None, "asked before the network was open"
        text = (
            f"clock {self.stage.clock} ({self.stage.why}); network {self.network.name} ({self.network.why})"
        )
        if self._shares_links() is False:
            text += ", where every pair has the whole rate of its path: only fabric and memory share links"
        return f"{text}; {self.processes.about_sleep}" if self.processes.about_sleep else text

    async def serve(self) -> None:
        """Serve the workload to its end. Raises ``RunError`` if the emulation breaks meanwhile."""
        self.progress.phase = "serving"
        self.events.write(Serving(at_s=self.clock.now_s()))
        self._in_background(self.links.run(follows_courses=self.nodes.follows_courses))
        self._in_background(self.nodes.keep_time())
        if self.blocks is not None:
            self._in_background(self.memory.watch(self.nodes.peers))
        prefix = self.experiment.compute.prefix
        held_tokens = 0 if prefix is None else prefix.session_tokens
        generations = self.blocks.generations if self.blocks is not None else {}
        for number, client in enumerate(self.experiment.problem.clients):
            requests = [
                Request.of(r, generations.get(r.index, Generation()), held_tokens)
                for r in self.experiment.workload.requests
                if r.client == number
            ]
            if self._guests is None:
                serve = messages.Serve(requests, list(self.faults.watched))
            else:
                serve = messages.Serve(requests, [r.index for r in requests], stays_open=True)
            await self.processes.guard(self.nodes.peers[client].ask(serve))
        self._serving_since = time.monotonic()
        if self._guests is None:
            await self.processes.guard(self._reports.all_done.wait())
        else:
            await self._serve_guests(self._guests)
        self._has_served_until_now()
        await self.processes.guard(self.faults.look_for_leaks())
        self.machines = self._launcher.machines()
        self.forwarder = await self.processes.guard(self._launcher.stats())
        self.stalls = self._in_scenario(await self.processes.guard(self._launcher.stalls()))
        for client, failure in self._reports.done.items():
            if failure and failure != "interrupted":
                raise RunError(f"{client} failed: {failure}; all rows up to then are complete")

    async def _serve_guests(self, guests: Guests) -> None:
        """Serve requests from outside until an interrupt, then interrupt those that are still running."""
        try:
            await self.processes.guard(self.clock.sleep_until_s(0.0))
            await guests.begin(self._reception)
            self.has_served = True
            await self.processes.guard(self._reports.all_done.wait())
        except KeyboardInterrupt:
            if not self.has_served:
                raise
            self.interrupted.clear()  # a second interrupt ends the rest of the run, too
        finally:
            await guests.end()
        await self._finish_clients(_PATIENCE_S)

    async def _finish_clients(self, patience_s: float) -> None:
        """End the workload; requests that still run are interrupted."""
        finished = (client.ask(messages.Finish()) for client in self.nodes.clients)
        await _within_real_s(patience_s, asyncio.gather(*finished, return_exceptions=True))

    def _in_scenario(self, stalls: Sequence[tuple[float, float]]) -> list[Stall]:
        """Return the stalls since serving began: instants in scenario seconds, durations in real seconds."""
        assert self._serving_since is not None, "asked before there was anything to serve"
        now_s, now, scale = self.clock.now_s(), time.monotonic(), self.experiment.time_scale
        return [
            Stall(at_s=now_s - (now - begin) * scale, real_s=end - begin)
            for begin, end in stalls
            if begin >= self._serving_since
        ]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(guarded(work, self.processes.give_up))

    def _has_served_until_now(self) -> None:
        if self._serving_since is not None and self.wall_s is None:
            self.wall_s, self.scenario_s = time.monotonic() - self._serving_since, self.clock.now_s()

    async def hold(self) -> None:
        """Keep everything up until interrupted."""
        self.progress.phase = "holding"
        self.events.write(Holding(at_s=self.clock.now_s()))
        await self.processes.guard(asyncio.Event().wait())

    async def stop(self) -> None:
        """End the workload, the nodes and the network. Can be called in every phase."""
        self._stopping = True
        if self._serving_since is not None:  # clocks are known
            self.machines = self._launcher.machines()
        self._has_served_until_now()
        self.progress.phase = "stopping"
        for task in (*self._background, *self._later):
            task.cancel()
        await asyncio.gather(*self._background, *self._later, return_exceptions=True)
        if self._moves is not None:
            await self._moves.end()
        self._socket.close()
        await self._programs.end()
        await self.faults.end()
        # Clients close their sessions over the network. If the network broke, they wait in vain.
        await self._finish_clients(_BROKEN_PATIENCE_S if self.processes.is_broken else _PATIENCE_S)
        self.events.write(Stopped(at_s=self.clock.known_s()))
        await self.processes.close()
        self.faults.count_namespaces()
        self.events.close()
        self.clock.close()

    def _call_at(self, at_s: float, what: Callable[[], None]) -> None:
        async def later() -> None:
            await self.clock.sleep_until_s(on_tick(at_s))
            what()

        task = guarded(later(), self.processes.give_up)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _survives(self, name: str, status: int) -> bool:
        if self._programs.ended(name, status) or self._stopping or self.faults.node_ended(name, status):
            return True
        self.events.write(NodeEnded(at_s=self.clock.known_s(), node=name, status=status))
        return False

    def sign(self) -> object:
        """Return a value that changes whenever the run makes progress."""
        return self.clock.instant(), len(self.nodes.peers), self.progress.n_told

    @property
    def decisions_s(self) -> list[float]:
        """Real seconds that each routing decision took."""
        return self._coordinator.decisions_s

    def _mark(self, phase: str) -> None:
        self.startup_s[phase] = round(time.monotonic() - self._started_at, 4)


async def _within_real_s(seconds: float, work: asyncio.Future[Any]) -> None:
    """Wait for ``work``, at most so many real seconds, whatever the run's clock is."""
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    timer = threading.Timer(seconds, loop.call_soon_threadsafe, (is_over.set,))
    timer.start()
    limit = asyncio.ensure_future(is_over.wait())
    try:
        await asyncio.wait({work, limit}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        timer.join()
        limit.cancel()
        work.cancel()
        await asyncio.gather(work, limit, return_exceptions=True)
