"""``testbed up``: builds the network, starts the nodes, serves the workload, keeps the record.

``Emulation`` holds the phases of one run; ``run_emulation`` is the whole of it. Whatever happens
(an error, Ctrl-C, a node that dies), the network and the processes go and the record stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nodes import control
from nodes.clock import ScaledClock
from policies.problem import PolicyError
from testbed import wiring
from testbed.coordinator import Coordinator
from testbed.errors import RunError, TestbedError, UserError
from testbed.experiment import Experiment, NetworkChange
from testbed.faults.emulated import Faults
from testbed.handle import LauncherHandle
from testbed.moving.emulated import Mover
from testbed.moving.steering import online_policy
from testbed.peering import Ends, Peering
from testbed.placing import PlacedExperiment, placement_data
from testbed.real import RealModel
from testbed.rundir import NETWORK_CHANGE, EventWriter, write_json
from testbed.servermemory import ServerMemory

_START_LEAD_S = 0.1
_NODE_START_TIMEOUT_S, _LOADING_TIMEOUT_S = 30.0, 3600.0
_LOG_TAIL_LINES = 5
_ENDED = ("completed", "failed", "interrupted")
_PATIENCE_S, _BROKEN_PATIENCE_S = 5.0, 0.5
"""How long clients may take to close their sessions, at the end of a good and of a broken run."""


@dataclass
class Progress:
    """What the live view shows; updated as clients report."""

    n_requests: int
    phase: str = "starting"
    states: dict[int, str] = field(default_factory=dict)
    """Of requests that have not ended; those that have are only counted."""
    n_ended: Counter[str] = field(default_factory=Counter)
    n_tokens: dict[str, int] = field(default_factory=dict)
    ttft_s: float = 0.0
    gap_s: float = 0.0
    scenario_s: float = 0.0

    def count(self, *states: str) -> int:
        n_open = sum(state in states for state in self.states.values())
        return n_open + sum(self.n_ended[state] for state in states)

    def told(self, request: int, state: str) -> None:
        """``request`` is in ``state`` now."""
        if state in _ENDED:
            self.states.pop(request, None)
            self.n_ended[state] += 1
        else:
            self.states[request] = state


class Emulation:
    """One run: ``start``, ``serve``, ``stop`` in this order. Use ``run_emulation``."""

    def __init__(
        self,
        experiment: Experiment,
        placed: PlacedExperiment,
        run_dir: Path,
        launcher: LauncherHandle,
        real: RealModel | None = None,
    ) -> None:
        self.experiment = experiment
        self.placed = placed
        self.real = real
        """The model whose real blocks the servers compute; ``None``: the stub."""
        self.run_dir = run_dir
        self.progress = Progress(len(experiment.requests))
        self.interrupted = asyncio.Event()
        self.events = EventWriter(run_dir)
        self.network: dict[str, Any] = {}
        self._launcher = launcher
        self._control_path = run_dir / "control.sock"
        self._peers: dict[str, control.Peer] = {}
        self._ports: dict[str, int] = {}
        self._hello: asyncio.Event = asyncio.Event()
        self._begun: dict[str, asyncio.Event] = {}
        self._listener: asyncio.AbstractServer | None = None
        self.pids: dict[str, int] = {}
        self._stopping = False
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done: dict[str, str] = {}
        self._all_done = asyncio.Event()
        self._origin_at = 0.0
        self._changing: asyncio.Task[None] | None = None
        self._coordinator = Coordinator(experiment, placed, self.now_s)
        self.faults = Faults(experiment, self, self._coordinator, self.events, run_dir)
        policy = online_policy(experiment)
        self._mover = (
            Mover(experiment, policy, self, self._coordinator, self.events, real is not None)
            if policy
            else None
        )
        self._peering = Peering(experiment, self._peers, self.now_s)
        self._started_at = time.monotonic()
        self.startup_s: dict[str, float] = {}
        self._watching: asyncio.Task[None] | None = None
        self.memory = ServerMemory(experiment.problem)
        self.forwarder: dict[str, float] | None = None
        """Counters of the user-space forwarder, if the network has one."""

    def now_s(self) -> float:
        """Scenario time."""
        return (time.monotonic() - self._origin_at) * self.experiment.time_scale

    async def start(self) -> None:
        """Build the network, fork the nodes, connect the clients, agree on time zero."""
        experiment = self.experiment
        self._launcher.listen(self._node_ended)
        self._listener = await control.listen(self._control_path, self._accept)
        self.network = await self._guard(
            self._launcher.ask(
                "open",
                experiment.network,
                wiring.network_spec(experiment, self.run_dir.name),
                self.run_dir / "logs",
                experiment.keep_cpus_awake,
            )
        )
        self._mark("network")
        self.events.write("network", name=self.network["name"], why=self.network["why"], **self._sharing())
        await self._guard(self._spawn_nodes())
        self._mark("nodes")
        await self._guard(self._connect_clients())
        await self.faults.begin(self._origin_at, self.pids)
        if self._mover is not None:
            self._mover.begin(self._origin_at)
        self._mark("total")

    def _sharing(self) -> dict[str, bool]:
        """Whether pairs compete for the links that the scenario says they share; empty if there are none."""
        return {"shares_links": self.network["name"] == "fabric"} if self.experiment.shared_bps else {}

    def network_text(self) -> str:
        """Which network carries the run and why, in one line."""
        text = f"network {self.network['name']} ({self.network['why']})"
        if self._sharing().get("shares_links") is False:
            text += ", which gives every pair the whole rate of its path: only fabric shares links"
        return text

    async def _spawn_nodes(self) -> None:
        experiment, addresses = self.experiment, self.network["addresses"]
        logs = self.run_dir / "logs"
        for number in range(experiment.problem.n_servers):
            if number not in experiment.absent:
                await self._spawn_server(number)
        for client in experiment.problem.clients:
            log = self.run_dir / "events" / f"{client}.log"
            client_config = wiring.client_config(
                experiment, client, self._control_path, addresses[client], log, self.real
            )
            await self._spawn("client", client, client_config, logs)
        async with asyncio.timeout(self._start_timeout_s()):
            while len(self._peers) < len(experiment.nodes) - len(experiment.absent):
                self._hello.clear()
                await self._hello.wait()

    def _start_timeout_s(self) -> float:
        """Weights take their time to load; a node that cannot load them says so, and one that dies is seen."""
        return _NODE_START_TIMEOUT_S if self.real is None else _LOADING_TIMEOUT_S

    async def _spawn_server(self, server: int) -> None:
        name = self.experiment.problem.servers[server].name
        config = wiring.server_config(
            self.experiment,
            self._coordinator.placement,
            server,
            self._control_path,
            self.network["addresses"][name],
            self.network["delays_in_client"],
            self.real,
        )
        if name in self._ports:  # it is where it was
            config = replace(config, port=self._ports[name])
        await self._spawn("server", name, config, self.run_dir / "logs")

    async def begin_server(self, server: int) -> None:
        """Spawn a server that is not there; returns when it serves and the clients know where."""
        name = self.experiment.problem.servers[server].name
        if self._mover is not None:
            self._mover.begins(server)
        self._begun[name] = asyncio.Event()
        await self._spawn_server(server)
        try:
            async with asyncio.timeout(self._start_timeout_s()):
                await self._begun[name].wait()
        except TimeoutError:
            raise RunError(f"{name} did not begin again in {self._start_timeout_s():g} s") from None
        await self._peers[name].ask("start", self._origin_at)
        address = self.network["addresses"][name]
        for client in self.experiment.problem.clients:
            await self._peers[client].ask("reach", server, address, self._ports[name])
        await self._peering.begun(server, self._ends(), self.network["delays_in_client"])

    async def signal_server(self, server: int, number: int) -> None:
        """Raises ``RunError`` if its process has ended."""
        name = self.experiment.problem.servers[server].name
        await self._launcher.ask("kill", self.pids[name], number)

    async def ask_server(self, server: int, method: str, *params: Any) -> Any:
        return await self._peers[self.experiment.problem.servers[server].name].ask(method, *params)

    def tell_server(self, server: int, method: str, *params: Any) -> None:
        self._peers[self.experiment.problem.servers[server].name].tell(method, *params)

    async def _spawn(self, kind: str, name: str, config: Any, logs: Path) -> None:
        self.pids[name] = await self._launcher.ask("spawn", kind, config, logs / f"{name}.log")

    async def _connect_clients(self) -> None:
        experiment, ends = self.experiment, self._ends()
        delays_in_client = self.network["delays_in_client"]
        n_bytes = max((r.n_input_tokens for r in experiment.requests), default=1)
        n_bytes *= experiment.problem.model.token_bytes
        for client in experiment.problem.clients:
            links = experiment.links if delays_in_client else None
            view = wiring.node_view(experiment, client, ends, links)
            try:
                await self._peers[client].ask("connect", view)
                if experiment.tcp_warm and not delays_in_client:
                    await self._peers[client].ask("warm", n_bytes)
            except control.ControlError as error:
                raise RunError(f"{client} cannot reach the servers: {error}") from error
        await self._peering.begin(ends, self._coordinator.placement, delays_in_client, n_bytes)
        self._origin_at = time.monotonic() + _START_LEAD_S
        for peer in self._peers.values():
            await peer.ask("start", self._origin_at)

    def _ends(self) -> Ends:
        addresses = self.network["addresses"]
        return {name: (addresses[name], self._ports.get(name, 0)) for name in self.experiment.nodes}

    async def serve(self) -> None:
        """Run the workload to its end. Raises ``RunError`` when the emulation breaks on the way."""
        self.progress.phase = "serving"
        self.events.write("serving", self.now_s())
        self._changing = asyncio.create_task(self._change_links())
        if self.real is not None:
            self._watching = asyncio.create_task(self.memory.watch(self._peers))
        prompts = self.real.prompts if self.real is not None else {}
        for number, client in enumerate(self.experiment.problem.clients):
            requests = [
                [r.index, r.arrival_at_s, r.n_input_tokens, r.n_output_tokens, prompts.get(r.index, ())]
                for r in self.experiment.requests
                if r.client == number
            ]
            await self._peers[client].ask("serve", requests, list(self.faults.watched))
        await self._guard(self._all_done.wait())
        await self._guard(self.faults.look_for_leaks(self.pids))
        self.forwarder = await self._guard(self._launcher.ask("stats"))
        for client, failure in self._done.items():
            if failure and failure != "interrupted":
                raise RunError(f"{client}: {failure}; all rows up to then are intact")

    async def _change_links(self) -> None:
        """Carry out the scenario's changes, each at its time, until the run ends."""
        clock = ScaledClock(self._origin_at, self.experiment.time_scale)
        try:
            for change in self.experiment.changes:
                await clock.sleep_until_s(change.at_s)
                done_at_s = await self._apply(change)
                self.events.write(
                    NETWORK_CHANGE,
                    done_at_s,
                    planned_at_s=change.at_s,
                    late_s=done_at_s - change.at_s,
                    why=change.why,
                    n_links=len(change.links),
                )
        except control.ControlError as error:
            self._break(RunError(f"a client did not take its new links: {error}"))
        except TestbedError as error:
            self._break(error)
        finally:
            clock.close()

    async def _apply(self, change: NetworkChange) -> float:
        """Answers when it was done, by the clock of whoever did it (the last, if clients did)."""
        experiment = self.experiment
        if not self.network["delays_in_client"]:
            links = wiring.scaled_links(experiment, change.links)
            done_at = await self._launcher.ask("update", links)
            return float((done_at - self._origin_at) * experiment.time_scale)
        changed = {
            client: wiring.changed_links(experiment, client, change.links)
            for client in experiment.problem.clients
        }
        self._peering.change(change.links)
        done_at_s = await asyncio.gather(
            *(self._peers[client].ask("links", links) for client, links in changed.items())
        )
        return float(max(done_at_s))

    async def hold(self) -> None:
        """Keep everything up until interrupted."""
        self.progress.phase = "holding"
        await self._guard(asyncio.Event().wait())

    async def stop(self) -> None:
        """End the workload and the nodes. Safe in every phase."""
        self._stopping = True
        self.progress.phase = "stopping"
        for task in filter(None, (self._changing, self._watching)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._mover is not None:
            await self._mover.end()
        await self.faults.end()
        # Clients close their sessions over the network, which answers nobody if it is what broke.
        patience_s = _BROKEN_PATIENCE_S if self._broken.done() else _PATIENCE_S
        clients = [self._peers[name] for name in self.experiment.problem.clients if name in self._peers]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await asyncio.gather(*(peer.ask("finish") for peer in clients), return_exceptions=True)
        for peer in self._peers.values():
            with contextlib.suppress(control.ControlError):  # it is gone already
                peer.tell("stop")
        self.events.write("stopped", self.now_s() if self._origin_at else None)
        self._launcher.close()
        for peer in self._peers.values():
            peer.close()
        if self._listener is not None:
            self._listener.close()
            self._control_path.unlink(missing_ok=True)
        self.faults.count_namespaces()
        self.events.close()

    async def _guard(self, work: Any) -> Any:
        """Await ``work``, but not past a broken node or an interrupt."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.interrupted.wait())
        try:
            await asyncio.wait({task, stop, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            if task.done():
                return task.result()
            raise KeyboardInterrupt
        except TimeoutError:
            missing = [name for name in self.experiment.nodes if name not in self._peers]
            raise RunError(f"{', '.join(missing)} did not start in {self._start_timeout_s():g} s") from None
        finally:
            task.cancel()
            stop.cancel()

    async def _accept(self, peer: control.Peer) -> None:
        handlers: dict[str, control.Handler] = {
            "route": self._on_route,
            "reroute": self._on_reroute,
            "recovery": self._on_recovery,
            "token": self._on_token,
            "state": self._on_state,
            "tokens": self._on_tokens,
            "done": self._on_done,
            "phase": self._on_phase,
        }

        async def hello(name: str, pid: int, port: int) -> None:
            self._peers[name] = peer
            self._ports[name] = port
            self._hello.set()
            if name in self._begun:
                self._begun[name].set()

        async def unfit(name: str, reason: str) -> None:
            self._break(UserError(f"{name}: {reason}"))

        peer.handlers.update(handlers, hello=hello, unfit=unfit)
        await peer.serve()

    async def _on_route(self, index: int, attempt: int) -> dict[str, Any] | None:
        try:
            return self._coordinator.route(index)
        except PolicyError as error:
            self._break(UserError(f"request {index}: {error}"))
            return None

    async def _on_reroute(self, index: int, first: int, last: int, n_done: int) -> dict[str, Any] | None:
        try:
            return self._coordinator.reroute(index, first, last, n_done)
        except PolicyError as error:
            self._break(UserError(f"request {index}: {error}"))
            return None

    async def _on_recovery(self, event: str, index: int, at_s: float, details: dict[str, Any]) -> None:
        self.faults.told(event, index, at_s, details)

    async def _on_token(self, index: int, n_tokens: int) -> None:
        self.faults.token(index, n_tokens)

    async def _on_state(self, index: int, state: str, at_s: float) -> None:
        self.progress.told(index, state)
        if self._mover is not None:
            self._mover.state(state)
        if state in ("completed", "failed", "interrupted", "rejected"):
            self._coordinator.release(index)
        if state in _ENDED:
            self.faults.ended(index)
        if state in ("failed", "rejected", "interrupted"):
            self.events.write(state, at_s, request=index)

    async def _on_phase(self, server: str, phase: str, at_s: float) -> None:
        if self._mover is not None:
            numbers = {spec.name: number for number, spec in enumerate(self.experiment.problem.servers)}
            self._mover.phase(numbers[server], phase, at_s)

    async def _on_tokens(self, client: str, n_tokens: int, ttft_s: float, gap_s: float) -> None:
        self.progress.n_tokens[client] = n_tokens
        self.progress.ttft_s, self.progress.gap_s = ttft_s, gap_s
        self.progress.scenario_s = self.now_s()

    async def _on_done(self, client: str, failure: str) -> None:
        self._done[client] = failure
        if len(self._done) == len(self.experiment.problem.clients):
            self._all_done.set()

    def _node_ended(self, name: str, status: int) -> None:
        if self._stopping or self.faults.survives(name, status):
            return
        self.events.write("node-ended", self.now_s() if self._origin_at else None, node=name, status=status)
        tail = _log_tail(self.run_dir / "logs" / f"{name}.log")
        self._break(RunError(f"{name} ended unexpectedly (status {status}){tail}"))

    def broke(self, error: TestbedError) -> None:
        """The run cannot go on."""
        self._break(error)

    def _break(self, error: TestbedError) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # retrieved here too: nobody may be waiting yet

    def _mark(self, phase: str) -> None:
        self.startup_s[phase] = round(time.monotonic() - self._started_at, 4)


def _log_tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return ": " + " | ".join(lines[-_LOG_TAIL_LINES:]) if lines else ""


def plan_document(emulation: Emulation) -> dict[str, Any]:
    """``plan.json``: the placement, who made it, and how long starting took."""
    problem, placement = emulation.experiment.problem, emulation.placed.placement
    return {
        "placement": placement_data(placement),
        "routing": emulation.experiment.routing,
        "servers": [s.name for s in problem.servers],
        "clients": list(problem.clients),
        "placement_decision_s": emulation.placed.decision_s,
        "network": emulation.network.get("name", emulation.experiment.network),
        "startup_s": emulation.startup_s,
        "forwarder": emulation.forwarder,
        "memory": emulation.memory.largest,
        "decisions": emulation.faults.decisions,
        "leaks": emulation.faults.leaks,
    }


async def run_emulation(
    emulation: Emulation, hold: bool, announce: Callable[[str], None]
) -> TestbedError | None:
    """The whole run; answers what broke it, if anything. An interrupt ends it cleanly (no error)."""
    try:
        plan = emulation.run_dir / "plan.json"
        write_json(plan, plan_document(emulation))
        await emulation.start()
        write_json(plan, plan_document(emulation))
        announce(
            f"{emulation.network_text()}; "
            f"{len(emulation.experiment.nodes)} nodes up in {emulation.startup_s['total']:.2f} s"
        )
        await emulation.serve()
        write_json(plan, plan_document(emulation))
        if hold:
            announce("the workload is done; holding the testbed up, Ctrl-C ends it")
            await emulation.hold()
    except KeyboardInterrupt:
        emulation.events.write("interrupted", emulation.now_s())
        emulation.interrupted.set()
    except TestbedError as error:
        emulation.events.write("broken", emulation.now_s(), reason=str(error))
        return error
    except OSError as error:
        emulation.events.write("broken", emulation.now_s(), reason=str(error))
        return RunError(f"the run ended: {error}")
    finally:
        await emulation.stop()
    return _written(plan, emulation)


def _written(plan: Path, emulation: Emulation) -> TestbedError | None:
    """Write the plan for the last time: what is left of the run is known now."""
    try:
        write_json(plan, plan_document(emulation))
    except OSError as error:
        return RunError(f"cannot write {plan}: {error.strerror}")
    return None
