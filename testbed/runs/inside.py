"""``testbed exec`` and ``testbed shell``: run a user's program on a node of a running testbed.

The program has the node's network, the names of all nodes, and the caller's files, terminal and environment.
This process waits for it, forwards signals to it, and ends it when the testbed has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from netem.programs import end_all_in, exec_program
from netem.syscalls import CLONE_NEWUSER, set_death_signal, setns
from testbed.control.live import keeps_virtual_time, running_testbed
from testbed.errors import RunError, UserError
from testbed.experiments.problems import unknown
from testbed.rundir import HOSTS, NETWORK, NODE_VARIABLE, OWNER, marks, owner_alive, process_start

_FAILED = 126
"""Exit status of a child that could not start the program; it has printed why."""
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""The terminal sends these to the program, too; this process ignores them."""
_END_MS = 500
"""How long a testbed that has ended a program may take to end itself."""


@dataclass(frozen=True)
class NodeNamespaces:
    """Descriptors of a node's namespaces, by which a program can enter them.

    ``network``: its network namespace. ``user``: its user namespace, or None if that is the caller's own.
    """

    run_dir: Path
    node: str
    network: int
    user: int | None
    holder: int
    """A pidfd of the process that holds the namespaces; it becomes readable when the process has ended."""

    @classmethod
    def open(cls, run: Path | None, node: str) -> NodeNamespaces:
        """Open the namespaces of ``node`` of the running testbed ``run`` (``running_testbed``).

        Raises ``UserError`` if the node cannot be entered, ``RunError`` if the testbed has just ended.
        """
        run_dir = running_testbed(run)
        document = _whereabouts(run_dir)
        if node not in document["nodes"]:
            raise UserError(unknown("node", node, document["nodes"]))
        namespace = document["nodes"][node]["namespace"]
        if namespace is None and any(there["namespace"] is not None for there in document["nodes"].values()):
            raise UserError(
                f"{node} is on another machine of this run: run the program on a node of this machine"
            )
        if namespace is None:
            raise UserError(
                f"{_no_namespace(document['name'])}; start a testbed with `testbed up SCENARIO --hold "
                "--network fabric`"
            )
        pid = document["holder"]["pid"]
        try:
            holder = os.pidfd_open(pid)
            network = os.open(f"/proc/{pid}/fd/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
            user: int | None = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError as error:
            raise UserError(
                f"the testbed of {run_dir} is another user's: run this as the user who started it, or as root"
            ) from error
        except OSError as error:
            raise RunError(f"the testbed of {run_dir} has just ended") from error
        if process_start(pid) != document["holder"]["started"]:
            raise RunError(f"the testbed of {run_dir} has just ended")
        assert user is not None
        if os.path.samestat(os.fstat(user), Path("/proc/self/ns/user").stat()):
            os.close(user)
            user = None
        return cls(run_dir, node, network, user, holder)

    def enter(self) -> None:
        """Move the calling process, which must be single-threaded, into the node. Raises ``OSError``."""
        if self.user is not None:
            setns(self.user, CLONE_NEWUSER)
        setns(self.network)


def _whereabouts(run_dir: Path) -> dict[str, Any]:
    """Return the content of ``network.json``. Raises ``UserError`` if the testbed has no such network."""
    if keeps_virtual_time(run_dir):
        raise UserError(
            f"the testbed of {run_dir} keeps virtual time, in which your programs cannot run; start another "
            "one with --hold"
        )
    try:
        document: dict[str, Any] = json.loads((run_dir / NETWORK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"the testbed of {run_dir} has no network yet: try again") from None
    return document


def _no_namespace(network: str) -> str:
    return f"on the network {network} a node has no namespace of its own to run a program in"


def shell_command(node: str, run: Path | None) -> int:
    """Run the user's shell ($SHELL, or /bin/sh) as ``exec_command`` does."""
    return exec_command(node, [os.environ.get("SHELL") or "/bin/sh"], run)


def exec_command(node: str, command: Sequence[str], run: Path | None) -> int:
    """Run ``command`` on ``node`` of a running testbed; returns its exit status, or 128 + its signal.

    Raises ``UserError`` if the node or the program does not exist, ``RunError`` if the testbed has ended.
    """
    namespaces = NodeNamespaces.open(run, node)
    if shutil.which(command[0]) is None:
        raise UserError(f"there is no program {command[0]!r} on this machine; install it, or give its path")
    owner = json.loads((namespaces.run_dir / OWNER).read_text(encoding="utf-8"))["pid"]
    environment = {**os.environ, **marks(namespaces.run_dir.resolve(), owner), NODE_VARIABLE: node}
    sys.stdout.flush()
    with _passing_on() as pass_to:
        pid = os.fork()
        if pid == 0:
            _become(namespaces, command, environment)
        pass_to(pid)
        return _until_ended(pid, namespaces)


def _become(namespaces: NodeNamespaces, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Enter the node's namespaces and execute ``command``, in a forked child; never returns."""
    try:
        parent = os.getppid()
        namespaces.enter()
        set_death_signal(signal.SIGKILL)  # last: a change of credentials clears it
        if os.getppid() != parent:
            os._exit(_FAILED)
        exec_program(namespaces.node, namespaces.run_dir / HOSTS, command, environment)
    except OSError as error:
        print(f"testbed: cannot run {command[0]} on {namespaces.node}: {error}", file=sys.stderr)
    finally:
        os._exit(_FAILED)


@contextlib.contextmanager
def _passing_on() -> Iterator[Callable[[int], None]]:
    """Forward SIGTERM and SIGHUP to the program, and ignore SIGINT and SIGQUIT in the body.

    The terminal sends the latter to the program itself. Yields a function to call with the program's pid.
    """
    pids: list[int] = []

    def forward_signal(number: int, _: object) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_THE_TERMINAL}
    before |= {number: signal.signal(number, forward_signal) for number in _PASSED_ON}
    try:
        yield pids.append
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until_ended(pid: int, namespaces: NodeNamespaces) -> int:
    """Wait for the program; returns its exit status, or 128 + signal.

    If the testbed ends first, ends all processes in the node.
    """
    program = os.pidfd_open(pid)
    poller = select.poll()
    for descriptor in (program, namespaces.holder):
        poller.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poller.poll()]
    if program not in ready:
        end_all_in([namespaces.network])
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    has_ended = program not in ready
    if not has_ended and status in (-signal.SIGTERM, -signal.SIGKILL):
        # The network ends programs before it ends itself, and may do so while its owner is still ending.
        poller.unregister(program)
        has_ended = bool(poller.poll(_END_MS)) or not owner_alive(namespaces.run_dir)
    if has_ended:
        print(
            f"testbed: the testbed of {namespaces.run_dir} has ended, and with it {namespaces.node}",
            file=sys.stderr,
        )
    return status if status >= 0 else 128 - status
