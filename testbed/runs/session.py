"""One whole run, from its checks to its tables: the one place where a run is started.

``RunSession`` goes through the steps. It prints nothing, and works in any thread and inside a running event loop.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path

from policies.problem import Placement, PolicyError
from testbed.control.placing import PlacedExperiment, place_experiment
from testbed.control.steering import Steering, online_policy
from testbed.errors import RunError, TestbedError, UserError
from testbed.experiments.assumed import assumed_batching
from testbed.experiments.experiment import Experiment
from testbed.experiments.slo import Objectives
from testbed.fast.rehearsal import rehearsal
from testbed.page.beside import bind_page, page_beside
from testbed.page.report import write_report
from testbed.records.events import goes_on
from testbed.records.summary import RunSummary
from testbed.results import finish_run, load_run, read_tables
from testbed.results.verified import too_many_ties
from testbed.rundir import make_run_dir
from testbed.runs.twin import run_twin
from testbed.runs.verify import verify_tokens
from testbed.runtime.blocks import BlocksModel, blocks_model, check_fits, check_model, require_blocks
from testbed.runtime.gpus import shared_out
from testbed.runtime.guests import Guests
from testbed.runtime.launching import Launcher
from testbed.runtime.programs import check_programs
from testbed.runtime.running import Outcome, emulate
from testbed.runtime.setup import RunSetup
from testbed.runtime.signals import Interruption, outside_loop
from testbed.runtime.stage import Stage, choose_stage
from testbed.runtime.wiring import check_frames, check_rates

Announce = Callable[[str], None]
"""Called with what a user may want to know, a sentence or a line at a time."""


def silent(text: str) -> None:
    """Announce nothing."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    ``hold``: stay up after the workload until interrupted. ``objectives``: limits in seconds by metric
    (``--slo``). ``with_twin``: repeat a run in real time in virtual time, to compare the two. ``page_port``:
    serve the run's page on this port (0: any free one). ``live``: show progress on a terminal.
    """

    hold: bool = False
    objectives: Objectives | None = None
    report: bool = True
    trace: bool = True
    with_twin: bool = True
    page_port: int | None = None
    live: bool = True


@dataclass(frozen=True)
class Ended:
    """A run that has ended, with its tables.

    ``experiment`` has the requests that came from outside, too. ``summary`` is None if the run was
    interrupted before any session. ``error`` ended the run early.
    """

    run_dir: Path
    experiment: Experiment
    placed: PlacedExperiment
    summary: RunSummary | None = None
    error: TestbedError | None = None
    interrupted: bool = False


class RunSession:
    """One run of ``experiment`` into the new folder ``out`` (None: one in ``runs/``). Use it once.

    ``announce`` is called in the thread of the run. Methods after ``interrupt`` are the steps of the run, in
    their order; other kinds of runs override them.
    """

    missing = "any session"
    """What a run that was interrupted early has not had."""
    stays_open = False
    """Whether it serves until it is interrupted, whatever its workload."""
    stage: Stage
    placed: PlacedExperiment
    run_dir: Path
    blocks: BlocksModel | None = None
    """The model whose real blocks the servers compute; ``None``: the stub."""
    guests: Guests | None = None
    """Send requests from outside until the run is interrupted; ``None``: only the workload is served."""

    def __init__(
        self,
        experiment: Experiment,
        out: Path | None = None,
        options: RunOptions = RunOptions(),
        announce: Announce = silent,
    ) -> None:
        self.experiment = experiment
        self.options = options
        self.announce = announce
        self._out = out
        self._interruption = Interruption()

    def run(self) -> Ended:
        """Run from the checks to the tables.

        In a thread whose event loop is running, another thread does it; signals interrupt the run only in the
        main thread. Raises ``TestbedError`` if no session could begin, or the tables cannot be written. A
        later error is returned in ``Ended.error``.
        """
        return outside_loop(self._run, self.interrupt)

    async def run_async(self) -> Ended:
        """As ``run``, in another thread. If the awaiting task is cancelled, the run is interrupted first."""
        with ThreadPoolExecutor(1, "run") as thread:
            running = asyncio.get_running_loop().run_in_executor(thread, copy_context().run, self._run)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                self.interrupt()
                await asyncio.wait({running})
                raise

    def interrupt(self) -> None:
        """Interrupt the run as Ctrl-C does, from any thread. A policy that decides goes on."""
        self._interruption.request()

    def _run(self) -> Ended:
        self.check()
        self.stage = choose_stage(self.experiment, holds=self.options.hold or self.stays_open)
        self.place()
        listener = bind_page(self.options.page_port)
        self.run_dir = run_dir = make_run_dir(self._out, self.experiment.name)
        with page_beside(run_dir, listener, self.announce):
            with _removed_unless_begun(run_dir), ExitStack() as begun:
                launcher = self.stage.begin(self.experiment, run_dir)
                begun.callback(launcher.close)
                self.blocks = blocks_model(self.experiment, run_dir)
                self.prepare()
                begun.pop_all()
            self.announce(f"run {run_dir}")
            if assumed := assumed_batching(self.experiment):
                self.announce(assumed)
            error, interrupted = self.stage.run(launcher, self.serve(launcher))
            if not _has_begun(run_dir, error):
                self.announce(f"interrupted before {self.missing}; logs are in {run_dir}")
                return Ended(run_dir, self.experiment, self.placed, interrupted=True)
            with _left_to_report(run_dir):
                self.served()
                if error is None and not interrupted:
                    interrupted = not self._check_and_repeat()
                try:
                    summary = self._finish()
                except RunError:
                    if error is not None:
                        self.announce(f"testbed: {error}")
                    raise
        return Ended(run_dir, self.experiment, self.placed, summary, error, interrupted)

    def check(self) -> None:
        """Check that this machine can run the experiment. Raises ``UserError``."""
        if not self.experiment.workload.requests:
            raise UserError("this scenario takes its requests from outside: run it with `testbed serve`")
        check_can_run(self.experiment, self.announce)

    def place(self) -> None:
        """Decide the placement. Raises ``UserError``."""
        self.placed = placed_experiment(self.experiment)

    def prepare(self) -> None:
        """Called when the run directory and the model are there. An exception undoes both."""

    async def serve(self, launcher: Launcher) -> Outcome:
        """Start the nodes, and serve to the end."""
        setup = RunSetup(
            *(self.experiment, self.placed, self.run_dir, self.stage, launcher, self.blocks, self.guests)
        )
        options, interruption = self.options, self._interruption
        return await emulate(
            setup, hold=options.hold, announce=self.announce, live=options.live, interruption=interruption
        )

    def served(self) -> None:
        """Called when sessions have been served, and before anything is made of the logs."""

    def _check_and_repeat(self) -> bool:
        """Compare tokens with those of the whole model, and run the twin; returns whether nothing interrupted that."""
        try:
            if self.blocks is not None:
                verify_tokens(self.run_dir, self.experiment, self.blocks, self.announce)
            if self.options.with_twin and self.stage.has_twin and self.experiment.workload.requests:
                self.announce("running the twin in virtual time (--no-twin leaves it out)")
                run_twin(
                    *(self.experiment, self.placed, self.run_dir, self.announce),
                    trace=self.options.trace,
                    live=self.options.live,
                    interruption=self._interruption,
                )
        except KeyboardInterrupt:
            return False
        return True

    def _finish(self) -> RunSummary:
        options = self.options
        return finish(
            self.run_dir, self.experiment, options.objectives, report=options.report, trace=options.trace
        )


def run_quietly(experiment: Experiment, out: Path, with_twin: bool = False) -> RunSummary:
    """Run ``experiment`` into the new folder ``out`` without a page or report; returns the summary.

    Raises ``TestbedError`` if the run breaks, and ``KeyboardInterrupt`` if it was interrupted.
    """
    options = RunOptions(report=False, with_twin=with_twin, live=False)
    ended = RunSession(experiment, out, options).run()
    if ended.error is not None:
        raise ended.error
    if ended.summary is None or ended.interrupted:
        raise KeyboardInterrupt
    return ended.summary


def exit_code(summary: RunSummary) -> int:
    """Return 0 if every request completed with the right tokens or was cancelled, else 1."""
    is_whole = summary.n_completed + summary.n_cancelled == summary.n_requests
    is_right = not summary.n_tokens_altered and not too_many_ties(
        summary.n_tokens_checked, summary.n_tokens_tied
    )
    return 0 if is_whole and is_right else 1


def check_can_run(experiment: Experiment, announce: Announce = silent) -> None:
    """Check that this machine can run ``experiment``; announces the user's programs and chosen devices.

    Raises ``UserError`` if real blocks cannot be computed here, if messages would be too large or too slow, or if
    a program does not exist.
    """
    check_frames(experiment)
    check_rates(experiment)
    check_programs(experiment, announce)
    if experiment.compute.blocks is not None:
        require_blocks('compute.backend "blocks"')
        check_model(experiment)
        shared_out(experiment, announce)


def placed_experiment(experiment: Experiment) -> PlacedExperiment:
    """Place ``experiment`` by its placement policy.

    Raises ``UserError`` if a policy refuses the scenario, or real blocks do not fit on this machine.
    """
    placed = place_experiment(experiment, rehearsal)
    check_fits(experiment, placed.placement)
    check_online(experiment, placed.placement)
    return placed


def check_online(experiment: Experiment, placement: Placement) -> None:
    """Raise ``UserError`` if the online policy does not exist, or cannot go on from ``placement``."""
    try:
        policy = online_policy(experiment)
        if policy is not None:
            Steering(experiment.problem, placement, policy)
    except PolicyError as error:
        raise UserError(str(error)) from error


def finish(
    run_dir: Path,
    experiment: Experiment,
    objectives: Objectives | None = None,
    *,
    report: bool = True,
    trace: bool = True,
) -> RunSummary:
    """Write tables, summary and, unless switched off, trace and report of a run; returns the summary.

    Raises ``RunError`` if a file cannot be written.
    """
    try:
        tables = read_tables(run_dir, experiment)
        summary = finish_run(run_dir, experiment, objectives, tables, trace)
        if report:
            write_report(run_dir, experiment, tables)
    except OSError as error:
        raise RunError(
            f"cannot write the tables of {run_dir} ({error.strerror}); the logs are intact: make room, then "
            f"`testbed report {run_dir}`"
        ) from error
    return summary


def report_command(run_dir: Path, *, trace: bool = True) -> RunSummary:
    """Write tables, summary, report and, unless switched off, trace of a run that has ended; returns the summary.

    Raises ``UserError`` if the run goes on or its folder holds none, and ``RunError`` if a file cannot be written.
    """
    if goes_on(run_dir):
        raise UserError(
            f"{run_dir} is still running: watch it with `testbed view {run_dir}`, and report it when it has ended"
        )
    return finish(run_dir, load_run(run_dir), trace=trace)


def _has_begun(run_dir: Path, error: TestbedError | None) -> bool:
    """Whether a client has logged anything. Raises ``error``, if there is one, when none has."""
    if any((run_dir / "events").iterdir()):
        return True
    if isinstance(error, UserError):
        shutil.rmtree(run_dir)  # nothing began: the corrected command can use the same folder
    if error is not None:
        raise error
    return False


@contextmanager
def _removed_unless_begun(run_dir: Path) -> Iterator[None]:
    """Prepare a run in the body: if the body raises, ``run_dir`` is removed."""
    try:
        yield
    except BaseException:
        shutil.rmtree(run_dir)
        raise


@contextmanager
def _left_to_report(run_dir: Path) -> Iterator[None]:
    """Complete a served run in the body; Ctrl-C there names the command that completes it later."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after the requests were served: `testbed report {run_dir}` completes the tables and the page"
        ) from None
