"""The user's programs of a scenario (``[[node]]``): starts them when the network is open, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from netem.networks import NETWORKS, instead
from testbed.errors import RunError, UserError
from testbed.experiments.experiment import Experiment, Program
from testbed.records.events import EventWriter, ProgramBegun, ProgramEnded
from testbed.rundir import HOSTS, NODE_VARIABLE, marks
from testbed.runtime.launching import Launcher, OpenNetwork

_WAIT_S = 5.0
"""Seconds that programs have to end after SIGTERM, and again after SIGKILL."""
_RESTART_AFTER_S = 1.0


def check_programs(experiment: Experiment, announce: Callable[[str], None]) -> None:
    """Announce the programs of the scenario. Raises ``UserError`` for one that this machine does not have."""
    for program in experiment.programs:
        if not program.command:
            continue
        path = program.environment.get("PATH", os.environ.get("PATH"))
        if shutil.which(program.command[0], path=path) is None:
            raise UserError(
                f"node {program.node}: there is no program {program.command[0]!r} here; install it (the "
                "scenario's file may say how), or give its path in command"
            )
        announce(f"node {program.node} will run {shlex.join(program.command)}")


def check_namespaces(network: OpenNetwork) -> None:
    """Raises ``UserError`` if nodes have no namespaces on ``network`` for programs to run in."""
    if not network.namespaces:
        raise without_namespaces(network.name)


def without_namespaces(network: str) -> UserError:
    """Return the error for programs on a network whose nodes have no namespaces."""
    others = instead(each for each in NETWORKS.values() if each.has_namespaces)
    return UserError(
        f"nodes have no namespaces on the network {network}, but programs need them; use --network {others}"
    )


class Programs:
    """The programs of one run. Their begin and end are in ``events.jsonl``, their output is in ``logs``."""

    def __init__(
        self,
        experiment: Experiment,
        launcher: Launcher,
        run_dir: Path,
        events: EventWriter,
        known_s: Callable[[], float | None],
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._programs = experiment.program_nodes
        self._launcher = launcher
        self._run_dir = run_dir
        self._events = events
        self._known_s = known_s
        self._announce = announce
        self._running: dict[str, int | None] = {}
        """Process id by node; ``None`` until it is known."""
        self._restarts: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._is_ending = False

    async def start(self) -> None:
        """Start all programs. The network must be open and its ``hosts`` file written."""
        for program in self._programs.values():
            if program.command:
                await self._begin(program)

    async def _begin(self, program: Program) -> None:
        own = {**marks(self._run_dir), NODE_VARIABLE: program.node}
        environment = {**os.environ, **program.environment, **own}
        log = self._run_dir / "logs" / f"{program.node}.log"
        self._running[program.node] = None
        self._events.write(ProgramBegun(at_s=self._known_s(), node=program.node))
        try:
            process = await self._launcher.run_program(
                program.node, program.command, environment, self._run_dir / HOSTS, log
            )
        except BaseException:  # if it runs, nobody knows its process: it ends with the launcher
            self._running.pop(program.node, None)
            raise
        if program.node in self._running:  # else it has ended already
            self._running[program.node] = process

    def ended(self, node: str, status: int) -> bool:
        """Record that the process ``node`` has ended. Returns False if it is not one of the programs."""
        if node not in self._programs:
            return False
        program = self._programs[node]
        self._running.pop(node, None)
        self._ended.set()
        self._events.write(ProgramEnded(at_s=self._known_s(), node=node, status=status))
        if not self._is_ending:
            is_again = status != 0 and program.restarts_on_failure
            what = "begins again" if is_again else "is not begun again"
            self._announce(
                f"the program of {node} ended with status {status} and {what}: see logs/{node}.log"
            )
            if is_again:
                task = asyncio.ensure_future(self._begin_again(program))
                self._restarts.add(task)
                task.add_done_callback(self._restarts.discard)
        return True

    async def _begin_again(self, program: Program) -> None:
        await asyncio.sleep(_RESTART_AFTER_S)
        await self._begin(program)

    async def end(self) -> None:
        """End all: SIGTERM to their process groups, later SIGKILL. Can be called in every phase."""
        self._is_ending = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        for number in (signal.SIGTERM, signal.SIGKILL):
            await self._signal(number)
            if self._running:
                with contextlib.suppress(TimeoutError):  # some programs ignore SIGTERM
                    await asyncio.wait_for(self._all_ended(), _WAIT_S)

    async def _all_ended(self) -> None:
        while self._running:
            self._ended.clear()
            await self._ended.wait()

    async def _signal(self, number: int) -> None:
        for node, process in list(self._running.items()):
            try:
                if process is not None:
                    await self._launcher.signal_program(process, number)
            except RunError:  # it has just ended, or the launcher has
                self._running.pop(node, None)
