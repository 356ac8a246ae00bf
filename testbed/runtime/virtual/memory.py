"""A launcher that runs all nodes in this process, on ``netem.memory``."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import aiohttp
from aiohttp import web

from netem.memory import MemoryNetwork
from netem.spec import NetworkError, NetworkSpec, Windows
from nodes import control, node
from nodes.clock import RunClock, run_clock
from nodes.host import Watch
from policies.links import Link
from testbed.errors import RunError
from testbed.runtime.launching import OnExit, OnOneMachine, OpenNetwork
from testbed.runtime.programs import without_namespaces
from testbed.runtime.virtual import wire
from testbed.runtime.virtual.loop import MemoryLoop
from testbed.runtime.virtual.processes import CURRENT, Process

_ENDING_S = 10.0
"""Virtual seconds that nodes have to end after they were asked to stop."""
_MAINS: dict[str, Callable[[Any, Any], Any]] = {"server": node.serve, "client": node.drive}


class _Connector(aiohttp.BaseConnector):
    """Makes aiohttp's connections on the memory network."""

    allowed_protocol_schema_set = aiohttp.TCPConnector.allowed_protocol_schema_set

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        super().__init__(limit=0)
        self._network = network
        self._address = address

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:  # noqa: ASYNC109
        assert req.url.host is not None and req.url.port is not None
        try:
            return await self._network.connect(self._address, req.url.host, req.url.port, self._factory)
        except OSError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error


class _Site(web.BaseSite):
    """Serves an application on the memory network."""

    def __init__(self, runner: web.AppRunner, network: MemoryNetwork, address: str, port: int) -> None:
        super().__init__(runner)
        self._network = network
        self._address, self._port = address, port

    @property
    def name(self) -> str:
        return f"http://{self._address}:{self._port}"

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None
        self._network.listen(self._address, self._port, server)

    async def stop(self) -> None:
        if self._runner.server is not None:
            self._network.stop_listening(self._address, self._port, self._runner.server)
        await super().stop()


class _NoWatch:
    """Nothing to watch: a network in memory cannot be lost on its own."""

    def close(self) -> None:
        """Nothing to stop."""


class _MemoryHost:
    """The host of a node on the memory network (``nodes.host.Host``)."""

    def __init__(self, launcher: MemoryLauncher, network: MemoryNetwork) -> None:
        self._launcher = launcher
        self._network = network

    def clock(self, scale: float) -> RunClock:
        return run_clock(scale)

    def connector(self, address: str) -> aiohttp.BaseConnector:
        return _Connector(self._network, address)

    async def listen(self, runner: web.AppRunner, address: str, port: int) -> int:
        await _Site(runner, self._network, address, port).start()
        return port

    async def control(self, path: Path, handlers: control.Handlers) -> control.Peer:
        return self._launcher.connect(dict(handlers))

    def watch(self, address: str, lost: asyncio.Event) -> Watch:
        return _NoWatch()


class _Log(logging.Handler):
    """Writes a node's log messages to the file that a process of its own would write to."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._files: dict[int, Path] = {}

    def begin(self, process: Process, file: Path) -> None:
        file.touch()
        self._files[process.number] = file

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get() or self._running()
        if process is None:
            if not self._has_others(record) and logging.lastResort is not None:
                logging.lastResort.handle(record)
        elif not process.has_ended:
            self.write(process, self.format(record))

    def _has_others(self, record: logging.LogRecord) -> bool:
        """Whether another handler gets the record, as it would without this one."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False

    @staticmethod
    def _running() -> Process | None:
        """Return the process whose callback runs: asyncio logs uncaught exceptions outside of any context."""
        with contextlib.suppress(RuntimeError):  # no loop runs
            loop = asyncio.get_running_loop()
            return loop.running if isinstance(loop, MemoryLoop) else None
        return None

    def write(self, process: Process, text: str) -> None:
        """Append ``text`` to the file of a node, unless the disk is full: the node ends all the same."""
        with contextlib.suppress(OSError), open(self._files[process.number], "a", encoding="utf-8") as file:
            file.write(text + "\n")


class _Listener:
    """The listener for control connections, which only nodes of this process can open."""

    def __init__(self, serving: set[asyncio.Task[None]]) -> None:
        self._serving = serving

    def close(self) -> None:
        """Nothing to close."""

    async def ended(self) -> None:
        await asyncio.gather(*self._serving, return_exceptions=True)


class MemoryLauncher(OnOneMachine):
    """A ``launching.Launcher`` whose nodes are tasks on a ``MemoryLoop``, each with a ``Process``."""

    def __init__(self) -> None:
        self._on_exit: OnExit = lambda name, status: None
        self._accept: Callable[[control.Peer], Awaitable[None]] | None = None
        self._context = contextvars.Context()
        self._loop_of_run: MemoryLoop | None = None
        self._network: MemoryNetwork | None = None
        self._processes: dict[int, Process] = {}
        self._connections: dict[int, list[control.Peer]] = {}
        self._accepted: set[asyncio.Task[None]] = set()
        self._mains: set[asyncio.Task[None]] = set()
        self._log = _Log()

    @property
    def _loop(self) -> MemoryLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MemoryLoop), (
            "nodes in one process need a loop that keeps virtual time for them"
        )
        return loop

    def new_loop(self) -> MemoryLoop:
        self._loop_of_run = MemoryLoop()
        return self._loop_of_run

    def attach(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._context = contextvars.copy_context()
        logging.getLogger().addHandler(self._log)

    async def listen(self, path: Path, accept: Callable[[control.Peer], Awaitable[None]]) -> _Listener:
        self._accept = accept
        return _Listener(self._accepted)

    def connect(self, handlers: control.Handlers) -> control.Peer:
        """Open a control connection for the node that calls this."""
        process = CURRENT.get()
        assert process is not None and self._accept is not None, (
            "only a node connects, once it is listened to"
        )
        near, far = wire.connect(handlers, self._context)
        self._connections[process.number].append(near)
        task = self._loop.create_task(self._serve(far), context=self._context)
        self._accepted.add(task)
        task.add_done_callback(self._accepted.discard)
        return near

    async def _serve(self, peer: control.Peer) -> None:
        assert self._accept is not None
        with contextlib.suppress(control.ControlError):  # nodes of this process speak the protocol
            await self._accept(peer)

    async def open(self, wanted: str, spec: NetworkSpec, logs: Path, keep_awake: bool) -> OpenNetwork:
        self._network = MemoryNetwork(spec)
        network = self._network.network
        return OpenNetwork(network, network.nature, self._network.addresses)

    async def spawn(self, kind: str, config: Any, log: Path) -> int:
        assert self._network is not None, "spawn before open"
        process = Process(len(self._processes) + 1, config.name, config.address)
        self._log.begin(process, log)
        self._processes[process.number] = process
        self._connections[process.number] = []
        context = self._context.copy()
        context.run(CURRENT.set, process)
        main = _MAINS[kind](config, _MemoryHost(self, self._network))
        task = self._loop.create_task(self._run(process, main), context=context)
        self._mains.add(task)
        task.add_done_callback(self._mains.discard)
        return process.number

    async def _run(self, process: Process, main: Coroutine[Any, Any, None]) -> None:
        status = 0
        try:
            await main
        except SystemExit:  # it has reported why
            status = 1
        except Exception:
            status = 1
            if not process.has_ended:
                self._log.write(process, traceback.format_exc().rstrip())
        if not process.has_ended:
            self._end(process, status)

    def _end(self, process: Process, status: int) -> None:
        """End a process. What its code still sends while it is cancelled is dropped."""
        assert self._network is not None
        process.has_ended = True
        self._network.kill(process.address)
        for peer in self._connections.pop(process.number):
            peer.close()
        self._loop.resume(process)
        for task in list(process.tasks):
            task.cancel()
        self._loop.call_soon(self._on_exit, process.name, status, context=self._context)

    async def run_program(
        self, node: str, command: Sequence[str], environment: Mapping[str, str], hosts: Path, log: Path
    ) -> int:
        raise without_namespaces(MemoryNetwork.network.name)

    async def signal_program(self, process: int, signal: int) -> None:
        raise RunError(f"there is no program {process}")

    async def kill(self, process: int, signal: int) -> None:
        victim = self._processes[process]
        if victim.has_ended:
            raise RunError(f"process {process} is not a node of this run")
        if signal == SIGSTOP:
            victim.parked = [] if victim.parked is None else victim.parked
        elif signal == SIGCONT:
            self._loop.resume(victim)
        else:
            self._end(victim, -signal)

    async def update(self, links: Mapping[tuple[str, str], Link]) -> float:
        assert self._network is not None, "update before open"
        try:
            self._network.update(links)
        except NetworkError as error:
            raise RunError(str(error)) from error
        return self._loop.time()

    async def begin_with(self, windows: Windows) -> None:
        assert self._network is not None, "asked before open"
        self._network.begin_with(windows)

    async def stats(self) -> None:
        return None

    async def stalls(self) -> list[tuple[float, float]]:
        return []

    async def keep_awake(self, on: bool) -> None:
        pass

    def descriptors(self, processes: Mapping[str, int]) -> dict[str, int]:
        assert self._network is not None
        living = {name: self._processes[number] for name, number in processes.items()}
        return {
            name: self._network.n_streams(process.address)
            for name, process in living.items()
            if not process.has_ended
        }

    def busy(self) -> list[str]:
        running = self._loop_of_run.running if self._loop_of_run is not None else None
        return [running.name if running is not None else "the orchestrator"]

    def close(self) -> None:
        self._on_exit = lambda name, status: None
        for process in self._processes.values():
            if not process.has_ended:
                self._end(process, -SIGKILL)
        logging.getLogger().removeHandler(self._log)

    async def end(self) -> None:
        self._on_exit = lambda name, status: None
        for process in self._processes.values():
            if process.parked is not None and not process.has_ended:
                self._end(process, -SIGKILL)
        if self._mains:
            await asyncio.wait(self._mains, timeout=_ENDING_S)
        self.close()

    def dispose(self) -> None:
        self._loop_of_run = None
