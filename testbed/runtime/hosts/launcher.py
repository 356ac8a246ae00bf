"""A launcher over several machines: the local launcher, and an agent on every other machine.

It implements ``testbed.runtime.launching.Launcher``. Clients are on this machine, and so are their logs:
measurements survive the loss of other machines. ``spread`` decides where servers are. Nodes on other machines
follow this machine's clock as closely as it can be measured (``instant_at``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from signal import SIGKILL
from typing import Any

from netem.spec import NetworkError, NetworkSpec, Windows
from nodes import control
from policies.links import Link
from testbed.errors import MachineLostError, RunError, UserError
from testbed.experiments.experiment import Experiment
from testbed.experiments.machines import HERE
from testbed.records.summary import MachineState
from testbed.runtime.hosts.agent import SILENCE_S, AgentOptions
from testbed.runtime.hosts.cluster import Cluster, Host
from testbed.runtime.hosts.following import FollowedClock
from testbed.runtime.hosts.messages import Exited, GetTime, NodeStream, TimeReply, pack, unpack, unpack_first
from testbed.runtime.hosts.relay import carry
from testbed.runtime.hosts.sealed import STRANGER_S, AuthenticationError, SealedStream, accept, new_key
from testbed.runtime.hosts.spread import spread
from testbed.runtime.launching import Listener, OnExit, OpenNetwork
from testbed.runtime.real.handle import LauncherHandle
from testbed.terminal import say

_ASK_TIME_S = 0.1
"""Seconds between two questions for another machine's time."""
_SYNCED_SAMPLES = 20
"""Answers from each machine that are awaited before time zero."""
_ELSEWHERE = 2**32
"""Ids of processes on other machines begin here, above all process ids of this machine."""


@dataclass(eq=False)
class _Remote:
    """Another machine: its agent's stream, its clock, and its nodes."""

    host: Host
    clock: FollowedClock = field(default_factory=FollowedClock)
    streams: set[SealedStream] = field(default_factory=set)
    """Its agent's, and one of each node: none of them ends by itself if the machine is cut off."""
    here: asyncio.Event = field(default_factory=asyncio.Event)
    nodes: set[str] = field(default_factory=set)
    asked_at: dict[int, float] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def name(self) -> str:
        return self.host.machine.name

    @property
    def label(self) -> str:
        """Its name, and its address if that differs."""
        address = self.host.address
        return self.name if self.name == address else f"{self.name} ({address})"

    def abort(self) -> None:
        """End all of its streams, whether or not the machine can be reached."""
        for stream in self.streams:
            stream.abort()


class HostsLauncher:
    """A ``testbed.runtime.launching.Launcher`` for ``experiment.machines``.

    Raises ``UserError`` if there is no Ray cluster.
    """

    def __init__(self, experiment: Experiment, run_dir: Path) -> None:
        self._experiment = experiment
        self._run_dir = run_dir
        self.n_threads = experiment.compute.blocks.n_threads if experiment.compute.blocks else None
        self._local = LauncherHandle(run_dir, self.n_threads)
        try:
            self._cluster: Cluster | None = Cluster()
        except BaseException:
            self._local.close()
            raise
        self.key = new_key()
        # A separate key, since data connections send it unprotected.
        self._data_key = blake2b(b"data plane", key=self.key, digest_size=16).hexdigest()
        self._remotes: dict[str, _Remote] = {}
        self._where: dict[str, _Remote | None] = {}
        self._elsewhere: dict[int, tuple[_Remote, int]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_exit: OnExit | None = None
        self._is_ending = False

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return self._local.new_loop()

    def attach(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._local.attach(on_exit)

    async def listen(self, path: Path, accept: Callable[[control.Peer], Awaitable[None]]) -> Listener:
        self._control_path = path
        return await self._local.listen(path, accept)

    async def open(self, wanted: str, spec: NetworkSpec, logs: Path, keep_awake: bool) -> OpenNetwork:
        """Open the network's part on every machine, when all agents are connected and their clocks known."""
        assert self._cluster is not None, "opened after it was closed"
        experiment, problem = self._experiment, self._experiment.problem
        by_gpu = experiment.compute.blocks is not None and set(experiment.compute.blocks.devices) != {"cpu"}
        hosts = await self._cluster.machines(experiment.machines, by_gpu)
        self._server = await asyncio.start_server(self._accept, self._cluster.address, 0)
        port = self._server.sockets[0].getsockname()[1]
        servers = [server.name for server in problem.servers]
        weights = [(host.machine, host.weight) for host in hosts]
        where = spread(problem.clients, servers, experiment.sites, weights)
        remotes = [_Remote(host) if host.actor is not None else None for host in hosts]
        self._where = {node: remotes[number] if number >= 0 else None for node, number in where.items()}
        used = set(self._where.values())
        self._remotes = {remote.name: remote for remote in remotes if remote is not None and remote in used}
        there = list(self._remotes.values())
        await asyncio.gather(*(self._begin(remote, port) for remote in there))
        spec = self._over_machines(spec)
        endpoints = await self._everywhere(
            self._local.bind(wanted, spec, HERE, self._cluster.address),
            lambda remote: remote.host.call("bind", wanted, spec, remote.host.address),
        )
        others = dict(zip((HERE, *self._remotes), endpoints, strict=True)), self.key
        opened: list[OpenNetwork] = await self._everywhere(
            self._local.open(wanted, spec, logs, keep_awake, others),
            lambda remote: remote.host.call("open", wanted, spec, keep_awake, others),
        )
        await self._everywhere(self._local.check(), lambda remote: remote.host.call("check"))
        on = ", ".join(["this machine", *(remote.label for remote in there)])
        return replace(opened[0], why=f"{opened[0].why}; on {on}")

    def _over_machines(self, spec: NetworkSpec) -> NetworkSpec:
        """Return ``spec`` with every node's machine.

        Raises ``UserError`` for a shared link over several machines.
        """
        where = {node: self._where.get(node) for node in spec.nodes}
        names = {node: HERE if remote is None else remote.name for node, remote in where.items()}
        try:
            return replace(spec, machines=names)
        except NetworkError as error:
            raise UserError(f"hosts: {error}") from error

    async def _everywhere(
        self, here: Awaitable[Any], there: Callable[[_Remote], Awaitable[Any]]
    ) -> list[Any]:
        """Run on this machine and all others at the same time; returns the results, this machine's first."""
        return await asyncio.gather(here, *(there(remote) for remote in self._there()))

    async def _begin(self, remote: _Remote, port: int) -> None:
        assert self._cluster is not None, "asked after it was closed"
        options = AgentOptions(remote.name, self._cluster.address, port, self.key, self.n_threads)
        niceness = await remote.host.call("begin_for", options)
        if niceness > 0:
            say(
                f"{remote.label}: its nodes yield the CPUs to all other programs there (niceness {niceness}); start Ray "
                "with RAY_worker_niceness=0"
            )
        try:
            async with asyncio.timeout(SILENCE_S):
                await remote.here.wait()
        except TimeoutError:
            raise RunError(
                f"{remote.label} cannot reach this machine at {self._cluster.address}:{port}; check "
                "firewalls and addresses"
            ) from None
        self._begin_task(self._until_gone(remote))

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a stream of another machine: an agent's own, or a node's control connection.

        Close all others.
        """
        try:
            async with asyncio.timeout(STRANGER_S):
                stream = await accept(reader, writer, self.key)
                first = unpack_first(await stream.receive())
        except (AuthenticationError, TimeoutError):
            writer.close()
            return
        remote = self._remotes.get(first.host)
        if remote is None or remote.is_lost:
            stream.close()
        elif isinstance(first, NodeStream):
            remote.streams.add(stream)
            try:
                near = await asyncio.open_unix_connection(str(self._control_path))
                await carry(*near, stream, say)
            finally:
                remote.streams.discard(stream)
        else:
            remote.streams.add(stream)
            asking = asyncio.ensure_future(self._ask_time(remote, stream))
            try:
                why = await self._hear(remote, stream)
            finally:
                asking.cancel()
            self._lost(remote, why)

    async def _ask_time(self, remote: _Remote, stream: SealedStream) -> None:
        number = 0
        with contextlib.suppress(ConnectionError):
            while True:
                number += 1
                remote.asked_at[number] = time.monotonic()
                stream.send(pack(GetTime(number)))
                await stream.drain()
                await asyncio.sleep(_ASK_TIME_S if number > _SYNCED_SAMPLES else _ASK_TIME_S / 20)

    async def _hear(self, remote: _Remote, stream: SealedStream) -> str:
        """Read an agent's messages until its stream ends; returns why it has ended."""
        with contextlib.suppress(AuthenticationError):
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        data = await stream.receive()
                except TimeoutError:
                    return f"nothing has come from it for {SILENCE_S:g} s"
                now = time.monotonic()
                if not data:
                    break
                message = unpack(data)
                if isinstance(message, TimeReply) and message.number in remote.asked_at:
                    remote.clock.add(remote.asked_at.pop(message.number), message.at, now)
                    if remote.clock.n_samples >= _SYNCED_SAMPLES:
                        remote.here.set()
                elif isinstance(message, Exited):
                    self._exited(remote, message)
        return "its agent has ended"

    def _exited(self, remote: _Remote, message: Exited) -> None:
        if message.name == "launcher":
            self._lost(remote, f"its launcher has ended (status {message.status})")
            return
        remote.nodes.discard(message.name)
        remote.clock.forget(message.name)
        self._keep_log(message.name, message.log)
        if self._on_exit is not None:
            self._on_exit(message.name, message.status)

    async def _until_gone(self, remote: _Remote) -> None:
        with contextlib.suppress(RunError):
            await remote.host.call("ended")
        self._lost(remote, "it has left the cluster")

    def _lost(self, remote: _Remote, why: str) -> None:
        """Report that all nodes of a lost machine have ended, and end their control connections."""
        if remote.is_lost or self._is_ending:
            return
        remote.is_lost = True
        say(f"the machine {remote.label} is lost: {why}")
        remote.abort()
        assert self._on_exit is not None, "lost before attached"
        for name in sorted(remote.nodes):
            self._on_exit(name, -SIGKILL)

    def _keep_log(self, name: str, log: bytes) -> None:
        with contextlib.suppress(OSError):
            (self._run_dir / "logs" / f"{name}.log").write_bytes(log)

    async def spawn(self, kind: str, config: Any, log: Path) -> int:
        remote = self._where.get(config.name)
        config = replace(config, key=self._data_key)
        if remote is None:
            return await self._local.spawn(kind, config, log)
        if remote.is_lost:
            raise MachineLostError(f"the machine {remote.label} is lost")
        process = await remote.host.call("spawn", kind, config)
        remote.nodes.add(config.process or config.name)
        number = _ELSEWHERE + len(self._elsewhere)
        self._elsewhere[number] = remote, process
        return number

    async def run_program(
        self, node: str, command: Sequence[str], environment: Mapping[str, str], hosts: Path, log: Path
    ) -> int:
        return await self._local.run_program(node, command, environment, hosts, log)

    async def signal_program(self, process: int, signal: int) -> None:
        await self._local.signal_program(process, signal)

    async def kill(self, process: int, signal: int) -> None:
        if process in self._elsewhere:
            remote, there = self._elsewhere[process]
            await self._asked(remote, "kill", there, signal)
        else:
            await self._local.kill(process, signal)

    async def update(self, links: Mapping[tuple[str, str], Link]) -> float:
        """Send the links to all machines, each of which changes its own; see ``Launcher.update``."""
        done_at: list[float | None] = await self._everywhere(
            self._local.update(links), lambda remote: self._updated(remote, links)
        )
        return max(at for at in done_at if at is not None)

    async def begin_with(self, windows: Windows) -> None:
        raise RunError("connections begin with given windows in virtual time only, which one machine has")

    async def _updated(self, remote: _Remote, links: Mapping[tuple[str, str], Link]) -> float | None:
        done_at: float | None = await self._asked(remote, "update", links)
        return None if done_at is None else remote.clock.to_local(done_at)

    async def _asked(self, remote: _Remote, method: str, *arguments: Any) -> Any:
        """Return what a machine's agent does; ``None`` if the machine is lost meanwhile, without which a run goes on."""
        try:
            return await remote.host.call(method, *arguments)
        except MachineLostError:
            self._lost(remote, "it has left the cluster")
            return None

    async def stats(self) -> dict[str, float] | None:
        """Return the sums of all forwarders' counters and seconds, and the largest of other values."""
        found = await self._everywhere(self._local.stats(), lambda remote: self._asked(remote, "stats"))
        each: list[dict[str, float]] = [stats for stats in found if stats is not None]
        return (
            {
                key: (sum if _adds_up(key, value) else max)(stats[key] for stats in each)
                for key, value in each[0].items()
            }
            if each
            else None
        )

    async def stalls(self) -> list[tuple[float, float]]:
        """Return the stalls of all machines, by this machine's clock."""
        remotes = self._there()
        found = await self._everywhere(self._local.stalls(), lambda remote: self._asked(remote, "stalls"))
        stalls = list(found[0])
        for remote, theirs in zip(remotes, found[1:], strict=True):
            stalls += [
                (remote.clock.to_local(begin), remote.clock.to_local(end)) for begin, end in theirs or ()
            ]
        return sorted(stalls)

    async def keep_awake(self, on: bool) -> None:
        await self._everywhere(
            self._local.keep_awake(on), lambda remote: self._asked(remote, "keep_awake", on)
        )

    def _there(self) -> list[_Remote]:
        return [remote for remote in self._remotes.values() if not remote.is_lost]

    def instant_at(self, node: str, instant: float) -> float:
        remote = self._where.get(node)
        return instant if remote is None else remote.clock.instant_for(node, instant)

    def machines(self) -> list[MachineState]:
        return [
            MachineState(
                name=remote.name,
                address=remote.host.address,
                n_nodes=sum(where is remote for where in self._where.values()),
                rtt_s=remote.clock.rtt_min_s,
                offset_s=remote.clock.offset_s,
                drift=remote.clock.drift,
                uncertainty_s=remote.clock.uncertainty_of_nodes_s,
                is_lost=remote.is_lost,
            )
            for remote in self._remotes.values()
        ]

    def descriptors(self, processes: Mapping[str, int]) -> dict[str, int]:
        """Return the open descriptors of the nodes on this machine."""
        return self._local.descriptors(
            {name: process for name, process in processes.items() if process not in self._elsewhere}
        )

    def busy(self) -> list[str]:
        return []

    def close(self) -> None:
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for remote in self._remotes.values():
            remote.abort()
        self._local.close()
        self._leave()

    async def end(self) -> None:
        """Have agents end their nodes and send their logs. A machine that does not answer is ended by Ray."""
        self._is_ending = True
        for remote in self._there():
            try:
                async with asyncio.timeout(SILENCE_S):
                    logs = await remote.host.call("end")
            except (TimeoutError, RunError) as error:
                say(f"the logs of {remote.name} are missing: {str(error) or 'it does not answer'}")
                continue
            for name, log in logs.items():
                self._keep_log(name if name in self._where else f"{remote.name}-{name}", log)
        self.close()

    def dispose(self) -> None:
        self._leave()
        self._local.dispose()

    def _leave(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _adds_up(key: str, value: float) -> bool:
    return isinstance(value, int) or key in ("late_total_s", "cpu_s", "spun_s")
