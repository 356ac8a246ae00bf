"""The orchestrator's side of the launcher: starts it, sends it commands, notices when node processes end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from netem.spec import NetworkSpec, Windows
from nodes import control
from policies.links import Link
from testbed.errors import RunError, UserError
from testbed.rundir import marks
from testbed.runtime.launching import Endpoints, Listener, OnExit, OnOneMachine, OpenNetwork
from testbed.runtime.virtual.page import BUSY, IDLE, LAUNCHER, ORCHESTRATOR, Page, SharedLoop

_END_TIMEOUT_S = 10.0


def open_descriptors(pids: Mapping[str, int]) -> dict[str, int]:
    """Return how many descriptors each process has open, by name; ended ones are left out."""
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            found[name] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Libraries that start threads when they are imported do not with these in their environment."""


class LauncherHandle(OnOneMachine):
    """A ``testbed.runtime.launching.Launcher`` whose nodes are processes.

    Starts ``testbed.runtime.real.launcher`` at once, which imports its modules while the caller continues.
    With ``n_threads`` nodes can have real blocks, each with so many threads. With ``page`` time is virtual,
    and kept there.
    """

    def __init__(self, run_dir: Path, n_threads: int | None = None, page: Page | None = None) -> None:
        # Libraries read these when they are loaded. Without them every node would use every CPU.
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if n_threads is not None else ()
        threads = {**SINGLE_THREADED, **dict.fromkeys(names, str(n_threads))}
        extras = ["blocks"] if n_threads is not None else []
        shared: tuple[int, ...] = ()
        if page is not None:
            shared = page.descriptors
            extras = [f"virtual={','.join(map(str, shared))}", *page.names]
            page.place(ORCHESTRATOR, BUSY)
        self._page = page
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        log = open(run_dir / "logs" / "launcher.log", "ab")
        with theirs, log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "testbed.runtime.real.launcher",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    *extras,
                ],
                pass_fds=[theirs.fileno(), *shared],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **marks(run_dir), **threads},
                start_new_session=True,
            )
        self._connection = Connection(mine.detach())
        self._log_path = run_dir / "logs" / "launcher.log"
        self._answers: asyncio.Queue[tuple[Any, ...] | None] | None = None
        self._lock = asyncio.Lock()
        self._on_exit: OnExit | None = None

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return SharedLoop(self._page, ORCHESTRATOR) if self._page is not None else uvloop.new_event_loop()

    def attach(self, on_exit: OnExit) -> None:
        self._answers = asyncio.Queue()
        self._on_exit = on_exit
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._receive)
        # libuv has made it non-blocking, but the description of a large network exceeds the socket's buffer.
        os.set_blocking(self._connection.fileno(), True)

    def _receive(self) -> None:
        assert self._answers is not None and self._on_exit is not None
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._answers.put_nowait(None)
            self._on_exit("launcher", self._ended())
            return
        if message[0] == "exited":
            self._on_exit(message[1], message[3])
        else:
            if self._page is not None:
                self._page.enter(LAUNCHER, IDLE)
            self._answers.put_nowait(message)

    async def listen(self, path: Path, accept: Callable[[control.Peer], Awaitable[None]]) -> Listener:
        return await control.listen(path, accept)

    async def bind(self, wanted: str, spec: NetworkSpec, machine: str, address: str) -> tuple[str, int]:
        """Begin a network over several machines; returns (address, port) of the part on ``machine``."""
        endpoint: tuple[str, int] = await self._ask("bind", wanted, spec, machine, address)
        return endpoint

    async def open(
        self, wanted: str, spec: NetworkSpec, logs: Path, keep_awake: bool, others: Endpoints | None = None
    ) -> OpenNetwork:
        network: OpenNetwork = await self._ask("open", wanted, spec, logs, keep_awake, others)
        return network

    async def check(self) -> None:
        """After ``open`` on all machines: raise ``UserError`` if the links are impossible between them."""
        await self._ask("check")

    async def spawn(self, kind: str, config: Any, log: Path) -> int:
        return int(await self._ask("spawn", kind, config, log))

    async def run_program(
        self, node: str, command: Sequence[str], environment: Mapping[str, str], hosts: Path, log: Path
    ) -> int:
        return int(await self._ask("program", node, command, environment, hosts, log))

    async def signal_program(self, process: int, signal: int) -> None:
        await self._ask("kill_group", process, signal)

    async def kill(self, process: int, signal: int) -> None:
        await self._ask("kill", process, signal)

    async def update(self, links: Mapping[tuple[str, str], Link]) -> float:
        return float(await self._ask("update", links))

    async def begin_with(self, windows: Windows) -> None:
        await self._ask("begin_with", windows)

    async def stats(self) -> dict[str, float] | None:
        found: dict[str, float] | None = await self._ask("stats")
        return found

    async def stalls(self) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = await self._ask("stalls")
        return found

    async def keep_awake(self, on: bool) -> None:
        await self._ask("keep_awake", on)

    def descriptors(self, processes: Mapping[str, int]) -> dict[str, int]:
        return open_descriptors(processes)

    def busy(self) -> list[str]:
        return self._page.busy() if self._page is not None else []

    async def _ask(self, command: str, *arguments: Any) -> Any:
        assert self._answers is not None, "asked before attached"
        async with self._lock:
            if self._page is not None:  # the launcher has no event loop that could do this
                self._page.enter(LAUNCHER, BUSY)
            with contextlib.suppress(ConnectionError):  # it has ended, which is the answer
                self._connection.send((command, *arguments))
            # Shielded: a cancelled caller must not leave its answer for the next caller.
            answer = await asyncio.shield(asyncio.ensure_future(self._answer(self._answers)))
        if answer is None:
            raise RunError(f"the launcher ended unexpectedly; see {self._log_path}")
        if answer[0] == "error":
            raise (UserError if answer[2] else RunError)(answer[1])
        return answer[1]

    async def _answer(self, answers: asyncio.Queue[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
        """Return the next answer; ``None`` for ever once the launcher has ended."""
        answer = await answers.get()
        if answer is None:
            answers.put_nowait(None)
        return answer

    def close(self) -> None:
        """Have the launcher end every node, remove the network and end itself."""
        if self._answers is not None:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        self._ended()

    def _ended(self) -> int:
        """Wait for the launcher to end, and kill it after ``_END_TIMEOUT_S``; returns its exit status."""
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            return self._process.wait()

    async def end(self) -> None:
        self.close()

    def dispose(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None
