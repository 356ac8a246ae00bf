"""Runs of a score: a worker that holds a policy to its time limits."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import FrameType
from typing import NamedTuple, TextIO

from testbed.control.placing import deciding, interrupt_policy, used_cpu_s
from testbed.errors import RunError, UserError
from testbed.experiments.probes import with_outputs_of_others
from testbed.simulator.engine import TESTBED, VIRTUAL, simulate
from testbed.studies.score.marks import Figures
from testbed.studies.score.measures import figures_in, figures_of
from testbed.studies.sweep.runs import FAILED, OK, Record, Run, Runner, Setup, case_of


class Limits(NamedTuple):
    """How much CPU time a policy may take, in seconds.

    - ``placement_s``: a placement; ``route_s``: a routing decision, in the mean over a run
    - ``run_s``: a whole run: a policy without end, or a system in which requests wait without end
    """

    placement_s: float = 30.0
    route_s: float = 0.005
    run_s: float = 120.0


_WALL_FACTOR = 4
"""A run that does not even use the CPU is ended after so many times ``Limits.run_s``."""
_TICK_S = 0.5


class LimitedRunner:
    """Does runs as ``Runner``, in a worker process, and ends those that exceed the limits.

    The policy's own code is interrupted at its next line. A policy that is busy inside of a library for ever
    ends with its process.
    """

    def __init__(self, setup: Setup, limits: Limits) -> None:
        os.dup2(2, 1)  # what a policy prints is not part of the command's output
        self._runner = Runner(setup, figures_of)
        self._limits = limits
        self._trace = open(os.devnull, "w")

    def __call__(self, run: Run) -> Record:
        with self.limited():
            return self._runner(run)

    def limited(self) -> AbstractContextManager[None]:
        """Return what holds its body to the limits."""
        return _limited(self._limits, self._trace)


@contextmanager
def _limited(limits: Limits, trace: TextIO) -> Iterator[None]:
    began_cpu_s, began_s = used_cpu_s(), time.monotonic()

    def check(number: int, frame: FrameType | None) -> None:
        cpu_s, wall_s = used_cpu_s() - began_cpu_s, time.monotonic() - began_s
        is_placing = (deciding() or "").startswith("placement")
        if (
            is_placing and cpu_s > limits.placement_s + 1
        ):  # a little more, so that the measured time says so, too
            interrupt_policy(f"a placement may take {limits.placement_s:g} s of CPU time")
        if cpu_s > limits.run_s or wall_s > _WALL_FACTOR * limits.run_s:
            interrupt_policy()
            raise UserError(f"the run took more than {limits.run_s:g} s of CPU time, and was ended")

    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    faulthandler.dump_traceback_later((_WALL_FACTOR + 1) * limits.run_s, exit=True, file=trace)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


class Check(NamedTuple):
    """A run to repeat, which had these ``figures``; ``None``: to serve with the output lengths of other requests."""

    run: Run
    figures: Figures | None


class Checker:
    """Looks in a process of its own for decisions that follow from more than what a policy is given."""

    def __init__(self, setup: Setup, limits: Limits) -> None:
        self._setup = setup
        self._runner = LimitedRunner(setup, limits)

    def __call__(self, check: Check) -> str:
        """Return what is wrong; empty if nothing is, or if a run failed."""
        return self._foreseen(check.run) if check.figures is None else self._repeated(*check)

    def _repeated(self, run: Run, figures: Figures | None) -> str:
        record = self._runner(run)
        if record.status != OK or figures_in(record) == figures:
            return ""
        return "the same run has other figures when it is repeated; decisions must follow from what a policy is given"

    def _foreseen(self, run: Run) -> str:
        """Serve a run again with the output lengths of other requests: until a first one has ended, no policy can know."""
        try:
            with self._runner.limited():
                case = case_of(self._setup, run)
                other = replace(case, experiment=with_outputs_of_others(case.experiment))
                found = [
                    simulate(each, TESTBED, is_virtual=run.engine == VIRTUAL, live=False)
                    for each in (case, other)
                ]
        except (UserError, RunError):
            return ""
        if found[0].placement != found[1].placement:
            return "the placement depends on output lengths that nobody knows yet"
        if found[0].placement is None:
            return ""
        ends_at_s = [row.ended_at_s for one in found for row in one.rows if row.ended_at_s is not None]
        first_s = min(ends_at_s, default=0.0)
        chains = [[row.chain for row in one.rows if row.arrival_at_s < first_s] for one in found]
        if chains[0] != chains[1]:
            return "routes depend on output lengths that nobody knows yet"
        return ""


def broken_rule(record: Record, limits: Limits) -> str:
    """Return which rule on decision times a run has broken; empty if none."""
    placement_s, route_s = record.placement_cpu_s or 0.0, record.routing_cpu_s or 0.0
    if placement_s > limits.placement_s:
        return f"the placement took {placement_s:.3g} s of CPU time; at most {limits.placement_s:g} s are allowed"
    if route_s > limits.route_s:
        return f"a route took {1e3 * route_s:.3g} ms of CPU time in the mean; at most {1e3 * limits.route_s:g} ms are allowed"
    return ""


def lost(run: Run) -> Record:
    """Return the record of a run whose process ended twice. It is not stored."""
    why = "its process ended twice: by the policy itself, for want of memory, or by the time limit inside of a library"
    return Record("", FAILED, why, run.policy or "", again=True)
