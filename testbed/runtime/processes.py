"""An open network and the node processes on it: starts them, connects them, notices their ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from netem.spec import NetworkSpec
from nodes import control
from nodes.messages import Hello, Stop
from nodes.node import NodeConfig
from testbed.control.guarded import unexpected
from testbed.errors import RunError, TestbedError, UserError
from testbed.runtime.launching import Launcher, Listener, OpenNetwork
from testbed.runtime.quota import why_cpus_may_sleep

T = TypeVar("T")
_LOG_TAIL_LINES = 5
_REPORT_S = 5.0
"""The launcher reports the end of a process within this time, also on a busy machine."""


class Processes:
    """The nodes of one run directory.

    ``handlers`` returns the handlers of the messages that nodes may send. ``survives(name, status)`` returns
    whether the run continues after a process has ended. ``interrupted`` ends every wait in ``guard``. Methods
    raise ``TestbedError``.
    """

    def __init__(
        self,
        launcher: Launcher,
        run_dir: Path,
        handlers: Callable[[], control.Handlers],
        survives: Callable[[str, int], bool],
        interrupted: asyncio.Event,
    ) -> None:
        self._launcher = launcher
        self._run_dir = run_dir
        self._handlers = handlers
        self._survives = survives
        self._interrupted = interrupted
        self.control_path = run_dir / "control.sock"
        self.network: OpenNetwork | None = None
        """``None`` until it is open."""
        self.about_sleep: str | None = None
        """A note on CPUs if they are not simply kept awake as asked for; ``None`` otherwise."""
        self.pids: dict[str, int] = {}
        self.peers: dict[str, control.Peer] = {}
        """Control connections of the nodes that have connected, by name."""
        self._ports: dict[str, int] = {}
        self._here: set[str] = set()
        self._hello = asyncio.Event()
        self._listener: Listener | None = None
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, wanted: str, spec: NetworkSpec, keep_awake: bool) -> OpenNetwork:
        """Build the network; with ``keep_awake`` no CPU sleeps. Nodes can be started from now on."""
        if keep_awake and (why_not := why_cpus_may_sleep()) is not None:
            self.about_sleep, keep_awake = why_not, False
        self._launcher.attach(self._ended)
        self._listener = await self._launcher.listen(self.control_path, self._accept)
        logs = self._run_dir / "logs"
        self.network = await self.guard(self._launcher.open(wanted, spec, logs, keep_awake))
        return self.network

    def address(self, node: str) -> str:
        """Return the IP address of a node."""
        assert self.network is not None, "asked before the network was open"
        return self.network.addresses[node]

    def port(self, name: str) -> int:
        """Return the port where a process listens, or listened before it ended; 0 if it has never started."""
        return self._ports.get(name, 0)

    async def spawn(self, kind: str, config: NodeConfig) -> None:
        """Start a node of ``kind`` "server" or "client". Raises ``UserError`` if its log cannot be written."""
        name = config.process or config.name
        self._here.discard(name)
        log = self._run_dir / "logs" / f"{name}.log"
        try:
            log.touch()
        except OSError as error:
            raise UserError(
                f"cannot write {log}: {error.strerror}; make room, or choose another --out"
            ) from error
        self.pids[name] = await self._launcher.spawn(kind, config, log)

    async def all_here(self, names: Iterable[str], patience_s: float) -> None:
        """Wait until these nodes have connected since their start.

        Raises ``RunError`` after ``patience_s`` seconds.
        """
        names = list(names)
        try:
            async with asyncio.timeout(patience_s):
                while not self._here.issuperset(names):
                    self._hello.clear()
                    await self._hello.wait()
        except TimeoutError:
            missing = ", ".join(name for name in names if name not in self._here)
            raise RunError(f"{missing} did not start within {patience_s:g} s") from None

    def descriptors(self) -> Mapping[str, int]:
        """Return how many descriptors each process has open, by name; ended ones are left out."""
        return self._launcher.descriptors(self.pids)

    async def guard(self, work: Awaitable[T]) -> T:
        """Await ``work``. Raises the error that breaks the run meanwhile, and ``KeyboardInterrupt``."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._interrupted.wait())
        try:
            ends: set[asyncio.Future[Any]] = {stop, self._broken}
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if _is_unconnected(task):  # of a process that has died: the launcher says which one, maybe later
                await asyncio.wait(ends, timeout=_REPORT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            if task.done():
                return task.result()
            raise KeyboardInterrupt
        finally:
            task.cancel()
            stop.cancel()

    def give_up(self, error: TestbedError) -> None:
        """Break the run with ``error``, unless it is broken already."""
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # marks it as retrieved: nobody may be waiting for it yet

    @property
    def is_broken(self) -> bool:
        return self._broken.done()

    async def close(self) -> None:
        """Stop all nodes and remove the network. Can be called in every phase."""
        for peer in self.peers.values():
            with contextlib.suppress(control.ControlError):  # it has ended already
                peer.notify(Stop())
        await self._launcher.end()
        for peer in self.peers.values():
            peer.close()
        if self._listener is not None:
            self._listener.close()
            await self._listener.ended()
            self.control_path.unlink(missing_ok=True)

    def log_tail(self, name: str) -> str:
        """Return the last lines of a process's log, to be appended to a sentence."""
        try:
            text = (self._run_dir / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        lines = text.splitlines()[-_LOG_TAIL_LINES:]
        return ": " + " | ".join(lines) if lines else ""

    async def _accept(self, peer: control.Peer) -> None:
        async def hello(message: Hello) -> None:
            self.peers[message.name] = peer
            self._ports[message.name] = message.port
            self._here.add(message.name)
            self._hello.set()

        handlers: control.Handlers = {Hello: hello, **self._handlers()}
        peer.take({kind: self._carried_out(handler) for kind, handler in handlers.items()})
        await peer.serve()

    def _carried_out(self, handler: control.Handler) -> control.Handler:
        """Return ``handler`` such that its failure breaks the run; nothing else would notice it."""

        async def carry_out(message: Any) -> Any:
            try:
                return await handler(message)
            except Exception as error:
                self.give_up(unexpected(error))
                raise

        return carry_out

    def _ended(self, name: str, status: int) -> None:
        if not self._survives(name, status):
            self.give_up(RunError(f"{name} ended unexpectedly (status {status}){self.log_tail(name)}"))


def _is_unconnected(task: asyncio.Future[Any]) -> bool:
    """Whether a node did not answer, or could not reach another node."""
    if not task.done() or task.cancelled():
        return False
    error = task.exception()
    return error is not None and any(isinstance(e, control.ControlError) for e in (error, error.__cause__))
