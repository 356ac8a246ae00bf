"""Runs one emulation: signal handlers, the live view, and an end for virtual runs that make no progress."""

from __future__ import annotations

import _thread
import asyncio
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from testbed.control.placing import PlacedExperiment, deciding, interrupt_policy
from testbed.errors import RunError, TestbedError
from testbed.experiments import dump_toml
from testbed.experiments.experiment import Experiment
from testbed.experiments.inputs import keep_policies
from testbed.experiments.provenance import PROVENANCE, provenance
from testbed.rundir import write_json
from testbed.runtime.emulation import Emulation
from testbed.runtime.gpus import find_gpus
from testbed.runtime.launching import Launcher
from testbed.runtime.live import shown
from testbed.runtime.phases import run_emulation
from testbed.runtime.setup import RunSetup
from testbed.runtime.signals import STOPS, Interruption, handling, in_main_thread, let_through
from testbed.runtime.stage import Stage
from testbed.runtime.virtual.stall import StallWatch


class Outcome(NamedTuple):
    """How a run ended: the error that broke it, and whether it was interrupted before its workload ended."""

    error: TestbedError | None
    interrupted: bool


async def emulate(
    setup: RunSetup,
    *,
    hold: bool = False,
    announce: Callable[[str], None] = lambda text: None,
    live: bool = True,
    interruption: Interruption | None = None,
) -> Outcome:
    """Run in ``setup.run_dir`` until the workload has ended, or guests are interrupted.

    ``hold``: stay up after the workload until interrupted. ``live``: show progress. Signals interrupt the run
    if this is the main thread, and ``interruption`` does in any case. Raises ``RunError`` if the run
    directory cannot be written.
    """
    experiment, run_dir, stage, launcher = setup.experiment, setup.run_dir, setup.stage, setup.launcher
    try:
        (run_dir / "scenario.toml").write_text(dump_toml(experiment), encoding="utf-8")
        gpus = [] if setup.blocks is None else [str(gpu) for gpu in find_gpus()]
        write_json(run_dir / PROVENANCE, provenance(experiment, gpus))
        keep_policies(run_dir, experiment)
        emulation = Emulation(setup)
    except OSError as full:
        launcher.close()
        shutil.rmtree(run_dir)  # nothing began: the same command can use the same folder
        raise RunError(
            f"cannot write to {run_dir}: {full.strerror}; make room, or choose another --out"
        ) from full
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        emulation.interrupted.set()

    stalls: list[str] = []

    def signalled(number: int, _: FrameType | None) -> None:
        if not stalls:
            loop.call_soon_threadsafe(interrupt)
        interrupt_policy()

    def stalled(text: str) -> None:
        stalls.append(text)
        loop.call_soon_threadsafe(emulation.processes.give_up, RunError(text))
        if has_signals:
            _thread.interrupt_main()

    has_signals = in_main_thread()
    with ExitStack() as around:
        if interruption is not None:
            around.enter_context(interruption.calling(partial(loop.call_soon_threadsafe, interrupt)))
        around.enter_context(handling(signalled, *STOPS))
        let_through()
        if live:
            around.enter_context(shown(emulation.progress))
        if stage.is_virtual:
            watch = StallWatch(emulation.sign, lambda: busy_text(launcher), stalled, may_exit=has_signals)
            around.enter_context(watch)
        error = await run_emulation(emulation, hold, announce)
    return Outcome(error, interrupted.is_set() and not emulation.has_served)


def run_to_end(
    experiment: Experiment,
    placed: PlacedExperiment,
    run_dir: Path,
    stage: Stage,
    *,
    live: bool = True,
    interruption: Interruption | None = None,
) -> None:
    """Run with stubs to the end; ``live``: show progress.

    Raises the ``TestbedError`` that broke the run, or ``KeyboardInterrupt`` if it was interrupted.
    """
    launcher = stage.begin(experiment, run_dir)
    setup = RunSetup(experiment, placed, run_dir, stage, launcher)
    error, interrupted = stage.run(launcher, emulate(setup, live=live, interruption=interruption))
    if error is not None:
        raise error
    if interrupted:
        raise KeyboardInterrupt


def busy_text(launcher: Launcher) -> str:
    """Return which processes keep a run in virtual time from progressing, in words."""
    who = launcher.busy()
    text = "all processes wait"
    if who:
        text = f"{', '.join(who)} {'is' if len(who) == 1 else 'are'} busy or halted"
    policy = deciding()
    return f"the {policy} has not decided yet ({text})" if policy is not None else text
