"""Commands as forks of one process that has imported everything: a command's own imports take longer than most commands.

Each is a process like any other: with its own pid, signals, exit code, files, folder and environment. It differs from
one that is begun anew in what only an interpreter's start decides: the seed of hashes, and variables such as
``PYTHONHASHSEED`` or a ``sitecustomize`` on ``PYTHONPATH``. A test that is about those begins its command anew.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

COMMAND = str(Path(sys.executable).with_name("testbed"))

_PACKAGES = ("testbed", "policies", "netem", "nodes")
_LAZY = (
    "pyarrow.parquet",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "scipy.optimize",
    "highspy",
)
_EXTRAS = ("nodes.blocks", "testbed.cluster", "testbed.runtime.hosts", "testbed.studies.sweep.on_ray")
"""What imports torch or ray: they may not be installed, and have threads."""


class Forked:
    """A command that was forked; what tests use of ``subprocess.Popen``."""

    def __init__(self, args: Sequence[str], pid: int, ended: socket.socket) -> None:
        self.args, self.pid, self.returncode = list(args), pid, None
        self._ended = ended
        self.returncode: int | None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._ended.recv(16))
            self._ended.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forker:
    """The process that forks; begun with the first command, and ended with this one."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads are not forked
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._here.close()
        self.process.wait()

    def fork(
        self, arguments: Sequence[str], folder: Path, env: Mapping[str, str], out: BinaryIO, err: BinaryIO
    ) -> Forked:
        ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = json.dumps([list(arguments), str(folder), dict(env)]).encode()
        with theirs:
            socket.send_fds(self._here, [asked], [out.fileno(), err.fileno(), theirs.fileno()])
        pid = ended.recv(16)
        assert pid, "the process that forks commands has ended"
        return Forked([COMMAND, *arguments], int(pid), ended)


_forker: _Forker | None = None


def fork_command(
    arguments: Sequence[str], folder: Path, env: Mapping[str, str], out: BinaryIO, err: BinaryIO
) -> Forked:
    """Begin ``testbed`` with these arguments in ``folder``; it writes to ``out`` and ``err``."""
    global _forker
    if _forker is None:
        _forker = _Forker()
    return _forker.fork(arguments, folder, env, out, err)


def serve(descriptor: int) -> None:
    """Fork a command for each message on the socket ``descriptor``, until that is closed. In a command, runs it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    _import_everything()
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=descriptor)
    ends: dict[int, tuple[int, socket.socket]] = {}
    waiting = select.poll()
    waiting.register(asked, select.POLLIN)
    while True:
        for number, _ in waiting.poll():
            if number in ends:
                waiting.unregister(number)
                pid, theirs = ends.pop(number)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with theirs, contextlib.suppress(OSError):  # nobody waits for it
                    theirs.send(str(status).encode())
                os.close(number)
                continue
            message, descriptors, _, _ = socket.recv_fds(asked, 1 << 20, 3)
            if not message:
                return
            out, err, answer = descriptors
            pid = os.fork()
            if pid == 0:
                _become(*json.loads(message), out, err)
                _run()
            os.close(out)
            os.close(err)
            theirs = socket.socket(fileno=answer)
            theirs.send(str(pid).encode())
            number = os.pidfd_open(pid)
            ends[number] = (pid, theirs)
            waiting.register(number, select.POLLIN)


def _import_everything() -> None:
    def walk(name: str) -> None:
        module = importlib.import_module(name)
        for found in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
            if not found.name.startswith(_EXTRAS) and not found.name.endswith("__main__"):
                walk(found.name)

    for name in (*_PACKAGES, *_LAZY):
        walk(name) if name in _PACKAGES else importlib.import_module(name)


def _become(arguments: list[str], folder: str, env: dict[str, str], out: int, err: int) -> None:
    """Be what a new process would be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 1 << 16)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    path = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = [str(Path(COMMAND).parent), *path]
    sys.argv[:] = [COMMAND, *arguments]
    sys.modules["__main__"].__file__ = COMMAND  # what processes that it spawns begin with


def _run() -> NoReturn:
    from testbed.__main__ import main

    main()
    raise SystemExit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
