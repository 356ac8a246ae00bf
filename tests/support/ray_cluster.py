"""A Ray cluster of machines that are namespaces, without a way out of them.

Each has processes and mounts of its own: killed, it ends as if its power were off. Its clock may show another time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.forked import asking, fork_command
from tests.support.runs import require, wait_until

HEAD = "10.77.0.1"
PORT = 6379
IMPORTED = (
    "ray.scripts.scripts",
    "ray._private.workers.default_worker",
    "testbed.studies.sweep.on_ray",
    "testbed.runtime.hosts.launcher",
)
"""What Ray, its workers and the testbed's commands import."""
_PROGRAM = Path(__file__).with_name("ray_machine.py")


def need_ray() -> None:
    """Skips the module, by name, where there is no Ray or no machine for it can be made; fails where there has to be."""
    missing = None
    if importlib.util.find_spec("ray") is None:
        missing = "ray is not installed"
    elif os.geteuid() != 0:
        missing = "namespaces of machines need root"
    require("ray", missing)


class Machine:
    """A node of the cluster, which has begun as soon as it says so. Its monotonic clock is ``ahead_s`` ahead."""

    def __init__(self, address: str, n_cpus: int, folder: Path, ahead_s: int = 0) -> None:
        self.address, self._log = address, folder / "log"
        folder.mkdir()
        # Ray asks clouds and a usage host about itself otherwise.
        (folder / "ray_bootstrap_config.yaml").write_text("{}", encoding="utf-8")
        # Without what scales clusters and gathers logs, which nobody here asks for, either.
        how = ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
        if address != HEAD:
            how = [f"--address={HEAD}:{PORT}"]
        how += ["--include-log-monitor=false"]
        how += [f"--node-ip-address={address}", f"--num-cpus={n_cpus}", "--object-store-memory=80000000"]
        how += [f"--temp-dir={folder / 'ray'}", "--block"]
        told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {
            "HOME": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "1",  # not 15, with which nothing begins beside other tests
            "RAY_prestart_worker_first_driver": "0",
            "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_health_check_period_ms": "200",
            "RAY_health_check_timeout_ms": "500",
            "RAY_health_check_failure_threshold": "10",
            # Without its head, a machine's Ray ends, and the machine: long after our command, however slow this one is.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "40",
        }
        begins = [address, f"{HEAD}:{PORT}", str(ahead_s), *how]
        with told, theirs, open(self._log, "wb") as log:
            files = (theirs, log, log)
            self._process = fork_command(begins, folder, env, files, program=str(_PROGRAM), imports=IMPORTED)
            theirs.close()
            (self.forker,) = socket.recv_fds(told, 1, 1)[1]
        self.pid = wait_until(self._first, "the machine's first process")

    def _first(self) -> int | None:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def wait(self) -> None:
        """Until it is part of the cluster."""

        def is_up() -> bool:
            said = self._log.read_text(encoding="utf-8")
            assert self._process.poll() is None, said
            return "Ray runtime started" in said

        wait_until(is_up, f"Ray on {self.address}")

    def entered(self, *command: str) -> list[str]:
        """``command`` with this machine's network."""
        return ["nsenter", "-t", str(self.pid), "-n", *command]

    def inside(self, command: Sequence[str]) -> list[str]:
        """``command`` as a program on this machine."""
        where = ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", f"--wd={Path.cwd()}"]
        return [*where, "env", f"RAY_ADDRESS={HEAD}:{PORT}", *command]

    def begin(self, program: str, *arguments: str, said: str = "") -> subprocess.Popen[str]:
        """A fork as a program on this machine; ``program``: ``testbed``, or ``-`` for Python code that is ``said``."""
        inside = self.inside([*asking(self.forker)[0], program, *arguments])
        process = subprocess.Popen(
            inside,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[self.forker],
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(said)
        process.stdin = None
        return process

    def kill(self) -> None:
        """Its power goes off."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(20)

    @property
    def is_on(self) -> bool:
        return self._process.poll() is None

    def workers(self) -> list[int]:
        """The processes on it that do tasks."""
        found, left = [], [self.pid]
        while left:
            pid = left.pop()
            with contextlib.suppress(OSError):  # it has just ended
                left += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                if b"_Actor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found


def _fails(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode != 0


class Cluster:
    """The head, and machines that join it; all end with the block, the head last."""

    def __init__(self, folder: Path, n_cpus: int, stack: contextlib.ExitStack, ahead_s: int = 0) -> None:
        self._folder, self._n_cpus, self._stack, self._ahead_s = folder, n_cpus, stack, ahead_s
        self.machines: list[Machine] = []
        self.head = self._begin()

    def _begin(self) -> Machine:
        number = len(self.machines)
        folder, ahead_s = self._folder / str(number), number * self._ahead_s
        machine = Machine(f"10.77.0.{number + 1}", self._n_cpus, folder, ahead_s)
        self._stack.callback(machine.kill)
        self.machines.append(machine)
        return machine

    @property
    def others(self) -> list[Machine]:
        """Those beside the head that are on."""
        return [machine for machine in self.machines[1:] if machine.is_on]

    def begin_other(self) -> Machine:
        """A machine beside the head, with a link to it; it has yet to begin, as the head may."""
        machine, end = self._begin(), f"v{len(self.machines) - 1}"
        ends = [f"/proc/{other.pid}/ns/net" for other in (self.head, machine)]
        wait_until(lambda: not _fails(self.head.entered("ip", "link", "show", "b0")), "the head's bridge")
        pair = ["ip", "link", "add", end, "netns", ends[0], "type", "veth", "peer", "name", "v0"]
        for command in (
            [*pair, "netns", ends[1]],
            self.head.entered("ip", "link", "set", end, "master", "b0", "up"),
        ):
            subprocess.run(command, check=True, capture_output=True)
        return machine


class Lasting:
    """A cluster for several tests, which may kill its machines: what one lacks is begun anew. Each machine has one CPU."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._found: Cluster | None = None

    def close(self) -> None:
        self._stack.close()

    def alone(self) -> Cluster:
        """Its head, and no other machine that is on."""
        if self._found is None or not self._found.head.is_on:
            self.close()
            # Ray's sockets are below it: their paths may have 107 characters.
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            self._found = Cluster(Path(folder), 1, self._stack)
            self._found.head.wait()
        for machine in self._found.others:
            machine.kill()
        return self._found

    def two(self) -> list[Machine]:
        """Its head and one other machine."""
        if self._found is None or not self._found.head.is_on or not self._found.others:
            self.alone().begin_other().wait()
        assert self._found is not None
        return [self._found.head, *self._found.others]


@contextlib.contextmanager
def cluster(folder: Path, n_cpus: int = 1, n_machines: int = 2, ahead_s: int = 0) -> Iterator[list[Machine]]:
    """The head and other nodes with ``n_cpus`` each, all of which have begun.

    The clock of each is ``ahead_s`` ahead of the one before.
    """
    with contextlib.ExitStack() as stack:
        found = Cluster(folder, n_cpus, stack, ahead_s)
        for _ in range(n_machines - 1):
            found.begin_other()
        for machine in found.machines:
            machine.wait()
        yield found.machines
