"""The servers and clients of an emulation: starts them, connects them, and sends them messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from nodes import control
from nodes.clock import RunClock
from nodes.messages import A, Connect, Links, Message, Question, Reach, Start, Warm
from policies.links import Link, Pair
from testbed.control.coordinator import Coordinator
from testbed.errors import RunError
from testbed.experiments.experiment import Experiment
from testbed.runtime import wiring
from testbed.runtime.blocks import BlocksModel
from testbed.runtime.launching import Launcher, OpenNetwork
from testbed.runtime.peering import Ends, Peering
from testbed.runtime.processes import Processes
from testbed.runtime.warming import Warming, warming_by_sending, warming_by_windows

_START_LEAD_S, _MAX_LEAD_S = 0.1, 5.0
_KEEP_TIME_S = 1.0
"""Seconds between two corrections of the time of nodes on other machines."""
_NODE_START_TIMEOUT_S, _LOADING_TIMEOUT_S = 30.0, 3600.0
_SHORT_S = 2.0
"""Nobody is told about a wait that is shorter."""


async def agree_on_zero(peers: Mapping[str, control.Peer], clock: RunClock, launcher: Launcher) -> None:
    """Agree with all nodes on the instant of time zero, and set it in ``clock``.

    It is a little in the future, so that all nodes know it before it comes. If a busy machine was too slow
    for that, a later instant is agreed on. In virtual time it is a whole second, so that no rounding depends
    on how long starting took.
    """
    lead_s = _START_LEAD_S
    while True:
        origin_at = clock.instant() + lead_s
        if clock.is_virtual:
            origin_at = math.ceil(origin_at)
        told = (peer.ask(Start(launcher.instant_at(name, origin_at))) for name, peer in peers.items())
        await asyncio.gather(*told)
        if clock.instant() < origin_at - lead_s / 2 or lead_s >= _MAX_LEAD_S:
            clock.origin_at = origin_at
            return
        lead_s *= 4


class NodeSet:
    """The servers and clients of one run, on ``processes``."""

    def __init__(
        self,
        experiment: Experiment,
        coordinator: Coordinator,
        launcher: Launcher,
        processes: Processes,
        clock: RunClock,
        run_dir: Path,
        blocks: BlocksModel | None,
    ) -> None:
        self._experiment = experiment
        self._coordinator = coordinator
        self._launcher = launcher
        self._processes = processes
        self.clock = clock
        self._run_dir = run_dir
        self._blocks = blocks
        self.broke = processes.give_up
        self.peers = processes.peers
        self.link_now: Callable[[Pair], Link] = experiment.network.links.__getitem__
        """Called with a pair of nodes; returns its link that is in force."""
        self._peering = Peering(experiment, self.peers, lambda pair: self.link_now(pair))

    def now_s(self) -> float:
        """Return the scenario time in seconds."""
        return self.clock.now_s()

    @property
    def clients(self) -> list[control.Peer]:
        """Control connections of the clients that have connected."""
        return [self.peers[name] for name in self._experiment.problem.clients if name in self.peers]

    async def start(self) -> None:
        """Start all nodes but absent servers; returns when all have connected.

        Raises ``RunError`` if one of them does not in time.
        """
        experiment, problem = self._experiment, self._experiment.problem
        for server in range(problem.n_servers):
            if server not in experiment.faults.absent:
                await self._spawn_server(server)
        for client in problem.clients:
            log = self._run_dir / "events" / f"{client}.log"
            control, address = self._processes.control_path, self._processes.address(client)
            config = wiring.client_config(
                *(experiment, client, control, address, log, self._blocks),
                sends_times=self._coordinator.observes,
            )
            await self._processes.spawn("client", config)
        absent = {problem.servers[server].name for server in experiment.faults.absent}
        names = (name for name in experiment.nodes if name not in absent)
        await self._processes.all_here(names, self._patience_s)

    @property
    def _patience_s(self) -> float:
        """Seconds that nodes have to start.

        Long with real blocks, whose weights must be loaded; failures are noticed.
        """
        return _NODE_START_TIMEOUT_S if self._blocks is None else _LOADING_TIMEOUT_S

    async def connect(self) -> None:
        """Connect the clients to the servers and agree on time zero.

        Raises ``RunError`` if a node is unreachable.
        """
        experiment, ends = self._experiment, self._ends()
        delays_in_client, warming = self._delays_in_client, self._warming
        if warming.windows:
            await self._launcher.begin_with(warming.windows)

        async def connect(client: str) -> None:
            links = experiment.network.links if delays_in_client else None
            view = wiring.node_view(experiment, client, ends, links)
            try:
                await self.peers[client].ask(Connect(view))
                if warming.n_bytes:
                    await self.peers[client].ask(Warm(warming.n_bytes, warming.at_once_bytes))
            except control.ControlError as error:
                raise RunError(f"{client} cannot reach the servers: {error}") from error

        await asyncio.gather(*map(connect, experiment.problem.clients))
        await self._peering.begin(ends, self._coordinator.placement, delays_in_client, warming)
        if warming.windows:
            await self._launcher.begin_with({})
        await agree_on_zero(self.peers, self.clock, self._launcher)

    @cached_property
    def _warming(self) -> Warming:
        experiment, network = self._experiment, self._network.network
        by_windows = None
        if self.clock.is_virtual:
            servers = [server.name for server in experiment.problem.servers]
            to_servers = itertools.product(experiment.problem.clients, servers)
            pairs = (*to_servers, *self._peering.pairs(self._coordinator.placement))
            by_windows = warming_by_windows(experiment, network, pairs)
        return by_windows or warming_by_sending(experiment, network)

    def about_starting(self) -> str:
        """Returns what starting waits for; "" if that is nothing that takes long."""
        if self._blocks is None:
            return ""
        return f"waiting until {self._experiment.problem.n_servers} servers have loaded their blocks"

    def about_connecting(self) -> str:
        """Returns what connecting waits for; "" if that takes less than two seconds on the slowest link."""
        experiment, n_bytes = self._experiment, self._warming.n_bytes
        if not n_bytes:
            return ""
        slowest_s = max(
            8 * n_bytes / link.rate_bps + 2 * link.delay_s
            for pair, link in experiment.network.links.items()
            if experiment.uses(pair)
        )
        if 2 * slowest_s < _SHORT_S:
            return ""
        return (
            f"sending {n_bytes / 1e6:.1f} MB over every connection and back, as if it had carried prompts before: "
            f"{2 * slowest_s:.0f} s on the slowest link, longer where connections share it "
            "(network.tcp.warm = false leaves it out)"
        )

    async def keep_time(self) -> None:
        """Correct the time of nodes on other machines by this machine's clock, until cancelled."""
        while self._launcher.machines():
            await asyncio.sleep(_KEEP_TIME_S)
            here = self.clock.origin_at
            for name, peer in list(self.peers.items()):
                if (there := self._launcher.instant_at(name, here)) != here:
                    with contextlib.suppress(control.ControlError):  # ended: the launcher reports it
                        await peer.ask(Start(there))

    @property
    def _delays_in_client(self) -> bool:
        return self._network.network.delays_in_client

    @property
    def follows_courses(self) -> bool:
        """Whether the network transmits what is queued by the planned changes of links."""
        return self._network.network.follows_courses

    @property
    def _network(self) -> OpenNetwork:
        assert self._processes.network is not None, "asked before the network was open"
        return self._processes.network

    def _ends(self) -> Ends:
        processes = self._processes
        return {name: (processes.address(name), processes.port(name)) for name in self._experiment.nodes}

    def _name(self, server: int) -> str:
        return self._experiment.problem.servers[server].name

    async def _spawn_server(self, server: int) -> None:
        name = self._name(server)
        config = wiring.server_config(
            self._experiment,
            self._coordinator.placement,
            server,
            self._processes.control_path,
            self._processes.address(name),
            self._network.network.any_port,
            self._blocks,
        )
        if self._processes.port(name):  # a server that begins again keeps its port
            config = replace(config, port=self._processes.port(name))
        await self._processes.spawn("server", config)

    async def begin_server(self, server: int) -> None:
        """Start a server that is absent or has ended; returns when it serves and clients can reach it."""
        name = self._name(server)
        await self._spawn_server(server)
        await self._processes.all_here([name], self._patience_s)
        await self.peers[name].ask(Start(self._launcher.instant_at(name, self.clock.origin_at)))
        for client in self.clients:
            await client.ask(Reach(server, *self._ends()[name]))
        await self._peering.begun(server, self._ends(), self._delays_in_client)

    def is_used(self, pair: Pair) -> bool:
        """Whether packets may go from one node to the other.

        With namespaces always: users' programs may send them.
        """
        return not self._delays_in_client or self._experiment.uses(pair)

    def descriptors(self) -> Mapping[str, int]:
        """Return how many descriptors each node has open, by name; ended nodes are left out."""
        return self._processes.descriptors()

    async def signal_server(self, server: int, number: int) -> None:
        """Send signal ``number`` to a server. Raises ``RunError`` if its process has ended."""
        await self._launcher.kill(self._processes.pids[self._name(server)], number)

    async def ask_server(self, server: int, question: Question[A]) -> A:
        """Send a question to a server and return its answer. Raises ``ControlError`` if there is none."""
        return await self.peers[self._name(server)].ask(question)

    def notify_server(self, server: int, message: Message) -> None:
        self.peers[self._name(server)].notify(message)

    async def change_links(self, links: Mapping[tuple[str, str], Link]) -> float:
        """Replace links; returns the scenario time at which the last of them was replaced."""
        experiment = self._experiment
        if not self._delays_in_client:
            scaled = wiring.scaled_links(experiment, links, self.clock.is_virtual)
            done_at = await self._launcher.update(scaled)
            return self.clock.scenario_s(done_at)
        changed = {
            client: wiring.changed_links(experiment, client, links) for client in experiment.problem.clients
        }
        self._peering.change(links)
        done_at_s = await asyncio.gather(
            *(self.peers[client].ask(Links(own)) for client, own in changed.items())
        )
        return max(done_at_s)
