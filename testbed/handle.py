"""The orchestrator's end of the launcher: starts it, asks it, hears when a node process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from testbed.errors import RunError, UserError

RUN_VARIABLE = "TESTBED_RUN"
"""Every process of a run carries the run's directory in this environment variable."""


class LauncherHandle:
    """Starts ``testbed.launcher`` at once; it imports its modules while the caller goes on.

    With ``n_threads`` these are also those of real blocks, of which each node computes with so many threads.
    """

    def __init__(self, run_dir: Path, n_threads: int | None = None) -> None:
        # Libraries take these when they are loaded, and would otherwise take every CPU in every node.
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if n_threads is not None else ()
        threads = {"OPENBLAS_NUM_THREADS": "1", **dict.fromkeys(names, str(n_threads))}
        extras = ["blocks"] if n_threads is not None else []
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        log = open(run_dir / "logs" / "launcher.log", "ab")
        with theirs, log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "testbed.launcher", str(theirs.fileno()), str(os.getpid()), *extras],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, RUN_VARIABLE: str(run_dir), **threads},
                start_new_session=True,
            )
        self._connection = Connection(mine.detach())
        self._log_path = run_dir / "logs" / "launcher.log"
        self._answers: asyncio.Queue[tuple[Any, ...] | None] | None = None
        self._lock = asyncio.Lock()
        self._on_exit: Callable[[str, int], None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def listen(self, on_exit: Callable[[str, int], None]) -> None:
        """Attach to the running loop; ``on_exit(name, status)`` is called when a node ends."""
        self._answers = asyncio.Queue()
        self._on_exit = on_exit
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._receive)

    def _receive(self) -> None:
        assert self._answers is not None and self._on_exit is not None
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._answers.put_nowait(None)
            self._on_exit("launcher", 1)
            return
        if message[0] == "exited":
            self._on_exit(message[1], message[3])
        else:
            self._answers.put_nowait(message)

    async def ask(self, command: str, *arguments: Any) -> Any:
        """Execute one of the launcher's commands. Raises ``UserError`` or ``RunError``."""
        assert self._answers is not None, "ask before listen"
        async with self._lock:
            self._connection.send((command, *arguments))
            # Whoever gives up waiting must not leave an answer behind for the next one to take as its own.
            answer = await asyncio.shield(asyncio.ensure_future(self._answers.get()))
        if answer is None:
            raise RunError(f"the launcher ended unexpectedly; see {self._log_path}")
        if answer[0] == "error":
            raise (UserError if answer[2] else RunError)(answer[1])
        return answer[1]

    def close(self) -> None:
        """Have the launcher end every node, remove the network and end itself."""
        if self._answers is not None:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
