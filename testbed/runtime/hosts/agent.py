"""A run's agent on another machine: a launcher there, and a relay for its nodes' control connections.

The orchestrator calls the methods. Over a stream of its own, the agent reports the time of its machine and
which processes have ended. An agent that has not heard from the orchestrator for ``SILENCE_S`` seconds treats
the run as lost, and ends everything that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from netem.spec import NetworkSpec
from nodes.node import NodeConfig
from policies.links import Link
from testbed.rundir import scratch
from testbed.runtime.hosts.messages import AgentStream, Exited, GetTime, NodeStream, TimeReply, pack, unpack
from testbed.runtime.hosts.relay import carry
from testbed.runtime.hosts.sealed import AuthenticationError, SealedStream, connect
from testbed.runtime.launching import Endpoints, OpenNetwork
from testbed.runtime.real.handle import LauncherHandle

SILENCE_S = 10.0
_LOG_BYTES = 1024**2
"""Bytes from the end of each log that the orchestrator gets when the run ends."""
_TAIL_BYTES = 4096
"""Bytes from the end of a log that the orchestrator gets when a process ends."""


def usual_priority() -> int:
    """Give this process the niceness 0, since Ray begins its workers with 15; return the one that it has, where it may not.

    Each thread has a niceness of its own. What is started from now on has that of the thread that starts it.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    return os.getpriority(os.PRIO_PROCESS, 0)


@dataclass(frozen=True)
class AgentOptions:
    """An agent's run:

    ``host`` is this machine's name in it, ``address`` and ``port`` are the orchestrator's.
    """

    host: str
    address: str
    port: int
    key: bytes
    n_threads: int | None = None
    """Threads of each node with real blocks; ``None``: the run has no real blocks."""


class Agent:
    """Start it with ``begin``; everything that it started ends with ``end``, or with its process."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._around = contextlib.ExitStack()
        self._over = asyncio.Event()

    async def begin(self) -> None:
        """Start the launcher, and connect to the orchestrator. Raises ``OSError`` and ``AuthenticationError``."""
        self._folder = self._around.enter_context(scratch("agent"))
        (self._folder / "logs").mkdir()
        self._launcher = LauncherHandle(self._folder, self._options.n_threads)
        self._launcher.attach(self._exited)
        self._control = self._folder / "control.sock"
        self._relay = await asyncio.start_unix_server(self._carry, str(self._control))
        self._stream = await self._connect(AgentStream(self._options.host))
        self._watching = asyncio.ensure_future(self._watch())

    async def _connect(self, first: NodeStream | AgentStream) -> SealedStream:
        stream = await connect(self._options.address, self._options.port, self._options.key)
        stream.send(pack(first))
        return stream

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            stream = await self._connect(NodeStream(self._options.host))
        except (OSError, AuthenticationError) as error:
            print(f"a node's control connection: {error}")
            writer.close()
            return
        await carry(reader, writer, stream, print)

    async def _watch(self) -> None:
        """Answer questions for the time; end everything when no more come."""
        with contextlib.suppress(TimeoutError, AuthenticationError, ConnectionError):
            while True:
                async with asyncio.timeout(SILENCE_S):
                    data = await self._stream.receive()
                now = time.monotonic()
                if not data:
                    break
                message = unpack(data)
                if isinstance(message, GetTime):
                    self._stream.send(pack(TimeReply(message.number, now)))
        self._stop()
        self._forget()

    def _exited(self, name: str, status: int) -> None:
        with contextlib.suppress(ConnectionError):
            self._stream.send(pack(Exited(name, status, self._log(name, _TAIL_BYTES))))

    def _log(self, name: str, n_bytes: int) -> bytes:
        """Return the last ``n_bytes`` of a log; empty if it cannot be read."""
        try:
            with open(self._folder / "logs" / f"{name}.log", "rb") as file:
                file.seek(max(0, file.seek(0, 2) - n_bytes))
                return file.read()
        except OSError:
            return b""

    async def bind(self, wanted: str, spec: NetworkSpec, address: str) -> tuple[str, int]:
        return await self._launcher.bind(wanted, spec, self._options.host, address)

    async def open(self, wanted: str, spec: NetworkSpec, keep_awake: bool, others: Endpoints) -> OpenNetwork:
        return await self._launcher.open(wanted, spec, self._folder / "logs", keep_awake, others)

    async def check(self) -> None:
        await self._launcher.check()

    async def spawn(self, kind: str, config: NodeConfig) -> int:
        name = config.process or config.name
        here = replace(config, control_path=self._control)
        return await self._launcher.spawn(kind, here, self._folder / "logs" / f"{name}.log")

    async def kill(self, process: int, signal: int) -> None:
        await self._launcher.kill(process, signal)

    async def update(self, links: Mapping[tuple[str, str], Link]) -> float:
        return await self._launcher.update(links)

    async def stats(self) -> dict[str, float] | None:
        return await self._launcher.stats()

    async def stalls(self) -> Sequence[tuple[float, float]]:
        return await self._launcher.stalls()

    async def keep_awake(self, on: bool) -> None:
        await self._launcher.keep_awake(on)

    async def ended(self) -> None:
        """Wait until the agent has ended. The call fails if the machine is lost."""
        await self._over.wait()

    async def end(self) -> dict[str, bytes]:
        """End every node, the network and the launcher; returns the end of their logs by name."""
        self._watching.cancel()
        self._stop()
        names = sorted(file.removesuffix(".log") for file in os.listdir(self._folder / "logs"))
        logs = {name: self._log(name, _LOG_BYTES) for name in names}
        self._forget()
        return logs

    def _stop(self) -> None:
        self._relay.close()
        self._stream.close()
        self._launcher.close()

    def _forget(self) -> None:
        self._around.close()
        self._over.set()
