"""The launcher: a small pre-loaded process that owns the emulated network and forks the nodes.

It is a process of its own because making namespaces needs a single thread, and because forking a
pre-loaded process starts 60 nodes as fast as two new interpreters. It holds the namespaces by descriptor:
when it dies, its children die, too (death signal), and the kernel removes the namespaces.

The orchestrator sends it commands over a private socket pair (see ``LauncherHandle``). Requests are
``(command, *arguments)``, answers ``("ok", value)`` or ``("error", message, is_user_error)``. Whenever a
child ends, it sends ``("exited", name, pid, status)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from netem.backend import Backend
from netem.networks import choose
from netem.probe import become_network_admin
from netem.programs import end_all_in, exec_program
from netem.spec import Endpoint, NetworkError, NetworkSpec, NetworkUnavailable, Windows
from netem.syscalls import set_death_signal, set_process_name, set_timer_slack
from nodes.clock import NS
from policies.links import Link
from testbed.runtime.launching import Endpoints, OpenNetwork
from testbed.runtime.real.awake import cpus_to_keep_awake, hurry, spin
from testbed.runtime.real.still import Span, Spans, watch
from testbed.runtime.virtual.keeper import Keeper
from testbed.runtime.virtual.page import ABSENT, BUSY, STOPPED, Page, SharedLoop

if TYPE_CHECKING:
    from nodes.host import Host

_NODE_NICENESS = -10
"""Priority of nodes: other processes of the machine should wait for them and not distort results."""

_NO_PROGRAM = 127
"""Exit status of a program that could not be started, as in shells."""

NODE_KINDS: dict[str, Callable[[Any], None]] = {}
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _preload(blocks: bool, page: Page | None = None) -> None:
    """Import everything that nodes need, so that forked nodes share it.

    ``blocks``: also torch, which takes seconds.

    ``page`` keeps the time if it is virtual. No import may start a thread (making namespaces needs a single
    one) or use a GPU (which a forked process could not use then).
    """
    from nodes.host import KernelHost
    from nodes.node import drive, serve
    from nodes.probe import run_echo, run_prober

    if blocks:
        with _without("sklearn"):
            import nodes.blocks.compute
            import nodes.blocks.hub  # noqa: F401
            from nodes.blocks.family import family_named

            family_named("bloom")  # With any family's module comes what all families' modules import.

    def on_host(main: Callable[[Any, Host], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
        def run(config: Any) -> None:
            with asyncio.Runner(loop_factory=_loop_of(page, config.name)) as runner:
                runner.run(main(config, KernelHost()))

        return run

    NODE_KINDS.update(server=on_host(serve), client=on_host(drive), echo=run_echo, prober=run_prober)


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Makes module ``name`` appear as not installed meanwhile, unless it has been imported already.

    Some versions of transformers import scikit-learn if they can, and with it pandas and pyarrow: a second of CPU
    time, and threads.
    """
    is_hidden = name not in sys.modules
    if is_hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[name]


class Launcher:
    """Executes the orchestrator's commands one after another."""

    def __init__(self, connection: Connection, page: Page | None = None) -> None:
        self._connection = connection
        self._page = page
        """Keeps virtual time; ``None``: time is real."""
        self._slots = {name: slot for slot, name in enumerate(page.names)} if page is not None else {}
        self._stopped: dict[int, tuple[int, int]] = {}
        """The (state, deadline) of a stopped node before it was stopped, by slot."""
        self._backend: Backend | None = None
        self._why = ""
        self._children: dict[int, str] = {}
        self._awake: list[int] = []
        """Processes that keep CPUs awake."""
        self._still = Spans()
        self._wakeup_in, self._wakeup_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Execute commands until the orchestrator closes the connection or ends."""
        try:
            while True:
                ready, _, _ = select.select([self._connection.fileno(), self._wakeup_in], [], [])
                if self._wakeup_in in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup_in, 4096)
                    self._reap()
                if self._connection.fileno() in ready:
                    self._answer(self._connection.recv())
        except (EOFError, ConnectionError):
            return
        finally:
            self._close()

    def _answer(self, request: tuple[Any, ...]) -> None:
        command, *arguments = request
        try:
            value = getattr(self, f"_do_{command}")(*arguments)
        except (NetworkError, OSError) as error:
            self._connection.send(("error", str(error), isinstance(error, NetworkUnavailable)))
        except Exception as error:
            traceback.print_exc()
            self._connection.send(("error", f"{type(error).__name__}: {error}", False))
        else:
            self._connection.send(("ok", value))

    def _do_bind(self, wanted: str, spec: NetworkSpec, machine: str, address: str) -> Endpoint:
        """Choose a network over several machines; returns (address, port) of the part on this ``machine``."""
        self._backend = self._chosen(wanted, spec, joining=True)
        return self._backend.bind(machine, address)

    def _chosen(self, wanted: str, spec: NetworkSpec, *, joining: bool = False) -> Backend:
        network, self._why = choose(wanted, sharing=bool(spec.shared), joining=joining)
        return network.backend()(spec)

    def _do_open(
        self, wanted: str, spec: NetworkSpec, logs: Path, keep_awake: bool, others: Endpoints | None = None
    ) -> OpenNetwork:
        """Choose and build the network (unless ``bind`` chose it), and fork its forwarder if it has one.

        ``keep_awake``: fork processes that spin at idle priority, so that no CPU sleeps. ``others``: the
        results of ``bind`` on all machines, and the run's key.
        """
        if self._backend is None:
            self._backend = self._chosen(wanted, spec)
        backend, network = self._backend, self._backend.network
        if others is not None:  # before this process leaves the machine's own network
            backend.join(*others)
        if network.has_namespaces:
            become_network_admin()
        backend.open()
        if self._page is not None:
            backend.keeper = Keeper(self._page)
        worker = backend.worker()
        if worker is not None:
            self._fork(network.name, logs / f"{network.name}.log", worker, None)
        gc.collect()
        gc.freeze()
        for cpu in cpus_to_keep_awake(os.sched_getaffinity(0)) if keep_awake else ():
            self._awake.append(
                self._fork(f"awake-{cpu}", logs / "launcher.log", functools.partial(spin, cpu), None)
            )
        if self._page is None:
            self._fork("still", logs / "launcher.log", functools.partial(watch, self._still), None)
        addresses = {node: backend.address(node) for node in spec.nodes}
        return OpenNetwork(network, self._why, addresses, dict(backend.namespaces()), os.getpid())

    def _do_check(self) -> None:
        """Raise ``NetworkUnavailable`` if the links are impossible between the machines.

        All have opened the network.
        """
        assert self._backend is not None, "check before open"
        try:
            self._backend.check()
        except NetworkError as error:  # of the links or the machines that were asked for
            raise NetworkUnavailable(str(error)) from error

    def _do_spawn(self, kind: str, config: Any, log: Path) -> int:
        """Fork one node into its network; returns its process id."""
        run = NODE_KINDS[kind]
        if self._page is not None:
            self._page.place(self._slots[config.name], BUSY)
        return self._fork(config.name, log, lambda: run(config), config.name)

    def _do_program(
        self, node: str, command: Sequence[str], environment: Mapping[str, str], hosts: Path, log: Path
    ) -> int:
        """Fork a program of the user's into the network of ``node``; returns its process id."""

        def run() -> None:
            os.setsid()
            set_timer_slack(0)  # back to the default: it is not one of the testbed's nodes
            try:
                exec_program(node, hosts, command, environment)
            except OSError as error:
                print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
                sys.exit(_NO_PROGRAM)

        return self._fork(node, log, run, node, is_ours=False)

    def _do_kill_group(self, pid: int, number: int) -> None:
        """Send a signal to the process group of a program."""
        if pid not in self._children:
            raise NetworkError(f"process {pid} is not a program of this run")
        os.killpg(pid, number)

    def _do_stats(self) -> dict[str, float] | None:
        """Return the forwarder's counters; ``None`` if the network has none."""
        stats = self._backend.stats() if self._backend is not None else None
        return vars(stats) if stats is not None else None

    def _do_stalls(self) -> list[Span]:
        """Return when the whole machine stood still; empty in virtual time."""
        return self._still.read()

    def _do_keep_awake(self, on: bool) -> None:
        """Let the processes that keep CPUs awake continue, or stop them."""
        for pid in self._awake:
            if pid in self._children:
                os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)

    def _do_update(self, links: Mapping[tuple[str, str], Link]) -> float:
        """Change links; returns when that was done (``time.monotonic``), before any node is notified."""
        assert self._backend is not None, "update before open"
        self._backend.update(links)
        return time.monotonic() if self._page is None else self._page.now_ns / NS

    def _do_begin_with(self, windows: Windows) -> None:
        """Have connections begin with these windows from now on."""
        assert self._backend is not None, "asked before open"
        self._backend.begin_with(windows)

    def _do_kill(self, pid: int, number: int) -> None:
        """Send a signal to a child of this launcher."""
        if pid not in self._children:
            raise NetworkError(f"process {pid} is not a node of this run")
        if self._page is None:
            os.kill(pid, number)
        else:
            self._signal_at_once(self._page, pid, number)

    def _signal_at_once(self, page: Page, pid: int, number: int) -> None:
        """Send a signal and wait until it has taken effect, so that virtual time does not pass before."""
        slot = self._slots[self._children[pid]]
        if number == signal.SIGCONT and slot in self._stopped:
            page.place(slot, *self._stopped.pop(slot))
        os.kill(pid, number)
        if number == signal.SIGKILL:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self._reap()
        elif number == signal.SIGSTOP and slot not in self._stopped:
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            self._stopped[slot] = page.state(slot)
            page.place(slot, STOPPED)

    def _fork(
        self, name: str, log: Path, run: Callable[[], None], node: str | None, is_ours: bool = True
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._become_child(name, log, node, parent, is_ours)
                run()
                status = 0
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 1
            except NetworkError as error:
                print(error, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        self._children[pid] = name
        return pid

    def _become_child(self, name: str, log: Path, node: str | None, parent: int, is_ours: bool) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()
        os.close(self._wakeup_in)
        os.close(self._wakeup_out)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        if node is not None:
            assert self._backend is not None, "spawn before open"
            with contextlib.suppress(PermissionError):  # only root may; others run at normal priority
                if self._page is None and is_ours:
                    os.setpriority(os.PRIO_PROCESS, 0, _NODE_NICENESS)
            self._backend.enter(node)
        set_timer_slack(1)
        set_process_name(f"tb:{name}")
        set_death_signal(signal.SIGKILL)
        if os.getppid() != parent:  # the launcher died before the death signal was set
            os._exit(1)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                name = self._children.pop(pid)
                with contextlib.suppress(ConnectionError):
                    self._connection.send(("exited", name, pid, os.waitstatus_to_exitcode(status)))
                if name in self._slots:
                    assert self._page is not None
                    self._stopped.pop(self._slots[name], None)
                    self._page.place(self._slots[name], ABSENT)

    def _close(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        hurry(self._children.keys() & self._awake)
        if self._backend is not None and self._page is None:
            end_all_in(
                self._backend.namespaces().values()
            )  # the user's programs, and what these have started
        for pid in self._children:
            os.waitpid(pid, 0)
        self._children.clear()
        if self._backend is not None:
            self._backend.close()


def main() -> None:
    """Entry point: ``python -m testbed.runtime.real.launcher FD PARENT [blocks | virtual=FDS NAME...]``."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name("tb:launcher")
    extras, page = sys.argv[3:], None
    if extras and extras[0].startswith("virtual="):
        memory, changed, told, announce = map(int, extras[0].partition("=")[2].split(","))
        page = Page(extras[1:], (memory, changed, told, announce))
        # Only one of these processes works at a time, and waking the next is fastest on the same CPU.
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[os.getpid() % len(cpus)]})
    _preload(extras == ["blocks"], page)
    Launcher(Connection(descriptor), page).run()


def _loop_of(page: Page | None, name: str) -> LoopFactory:
    if page is None:
        return uvloop.new_event_loop
    return lambda: SharedLoop(page, page.names.index(name))


if __name__ == "__main__":
    main()
