"""Disturbs whole systems at random in virtual time: ``python -m benchmarks chaos --seeds 10000``.

Each seed draws a scenario and its disturbances (``chaos_cases``), runs it on ``memory`` and checks numbered
invariants (``chaos_checks``). The case of a failing seed is made smaller as long as it breaks the same
invariant, and the command that repeats the seed is printed. ``--keep DIR`` writes the small scenario there,
to be run with ``testbed up``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from nodes.load import LoadGenerator
from nodes.records import Token
from nodes.request import Request
from policies.problem import PolicyError
from testbed.errors import TestbedError, UserError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.runs.session import RunOptions, RunSession, run_quietly
from tests.stress import chaos_cases, chaos_checks, chaos_engines, slow_links
from tests.stress.chaos_cases import Document

ENDED_BADLY = 0
"""The number of the invariant that a run which raised an exception breaks."""
_NOT_THE_SAME = len(chaos_checks.INVARIANTS) + 1
_INTERRUPTED_BADLY = _NOT_THE_SAME + 1
_SIMULATED_OTHERWISE = _INTERRUPTED_BADLY + 1
_EVERY_INTERRUPTED = 4
"""One seed of so many is run again, and interrupted."""
_EVERY_SIMULATED = 2
"""One seed of so many is run again without what the fast engine leaves to the system."""
_EVERY_SAME = 20
"""One seed of so many is run twice; both runs must leave the same bytes."""
_MAX_SHRINKING = 150
_CALM_S = 20.0
"""By this time, in scenario seconds, all arrivals of the drawn workload are over."""


class Unplayable(Exception):
    """The drawn scenario is not valid, or its servers cannot hold the model: there is nothing to check."""


@dataclass
class Outcome:
    """The result of a seed. ``broken``: (invariant, what is wrong). ``document``: the smallest case found
    that breaks the first of these. ``played``: False if the case was ``Unplayable``.
    """

    seed: int
    broken: list[tuple[int, str]] = field(default_factory=list)
    document: Document | None = None
    played: bool = True
    counts: Counter[str] = field(default_factory=Counter)


def scenario_of(document: Document) -> str:
    """Returns the case as a scenario file. Scenarios have no cancelled requests, so these are only
    comments.
    """
    cancels = "".join(
        f"# request {cancel['request']} is cancelled at {cancel['at_s']} s\n"
        for cancel in document.get(chaos_cases.CANCELS, ())
    )
    scale = f"# sizes are {slow_links.SCALE} times as small\n" if chaos_cases.SLOW in document else ""
    rest = {key: value for key, value in document.items() if key not in chaos_cases.NOT_OF_SCENARIOS}
    return scale + cancels + tomli_w.dumps(rest)


@contextlib.contextmanager
def hanging_up(cancels: Sequence[Document]) -> Iterator[None]:
    """Cancels requests at their times while the body runs: their clients end them, as if an endpoint's reader
    hung up.
    """
    begin = LoadGenerator.begin
    at_s = {cancel["request"]: cancel["at_s"] for cancel in cancels}

    def begun(self: LoadGenerator, request: Request) -> None:
        begin(self, request)
        if request.index in at_s:
            after_s = max(0.0, at_s[request.index] - request.arrival_at_s)
            asyncio.get_running_loop().call_later(
                after_s, functools.partial(self.end, request.index, enough=False)
            )

    LoadGenerator.begin = begun  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoadGenerator.begin = begin  # type: ignore[method-assign]


def experiment_of(document: Document, folder: Path) -> Experiment:
    """Returns the experiment of a case. Raises ``Unplayable`` if its scenario is not valid."""
    path = folder / "case.toml"
    path.write_text(scenario_of(document), encoding="utf-8")
    try:
        return load_experiment(str(path))
    except TestbedError as error:
        raise Unplayable(str(error)) from error


@contextlib.contextmanager
def interrupting(session: RunSession, at_s: float) -> Iterator[None]:
    """Interrupts the run of the body at a time, if clients serve requests then."""
    run, interrupt = (
        LoadGenerator.run,
        functools.cache(session.interrupt),
    )  # once, whatever the number of clients

    async def runs(self: LoadGenerator, *requests: Any, **how: Any) -> None:
        after_s = max(0.0, at_s - self._clock.now_s())
        asyncio.get_running_loop().call_later(after_s, interrupt)
        await run(self, *requests, **how)

    LoadGenerator.run = runs  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoadGenerator.run = run  # type: ignore[method-assign]


def _interrupted(document: Document, whole: chaos_checks.Finished) -> list[tuple[int, str]]:
    """Returns the broken invariant if the case does not end well when it is interrupted."""
    at_s = document[chaos_cases.INTERRUPT]
    with tempfile.TemporaryDirectory(prefix="testbed-chaos-") as name:
        folder = Path(name)
        experiment = experiment_of(document, folder)
        session = RunSession(
            experiment, folder / "run", RunOptions(report=False, with_twin=False, live=False)
        )
        with _played(document) as watched, interrupting(session, at_s):
            ended = session.run()
        if ended.error is not None:
            return [(_INTERRUPTED_BADLY, str(ended.error))]
        if ended.summary is None:
            return []
        run = chaos_checks.finished(experiment, ended.run_dir, ended.summary, watched)
        wrong = chaos_checks.interrupted_badly(run, whole, at_s)
        return [] if wrong is None else [(_INTERRUPTED_BADLY, wrong)]


@contextlib.contextmanager
def _played(document: Document) -> Iterator[slow_links.Watched]:
    """Plays in the body what scenarios do not have, and watches."""
    scales = chaos_cases.SLOW in document
    sizes = slow_links.scaled() if scales else contextlib.nullcontext()
    watching = slow_links.watching(slow_links.SCALE if scales else 1)
    with sizes, watching as watched, hanging_up(document.get(chaos_cases.CANCELS, ())):
        yield watched


def play(document: Document) -> tuple[chaos_checks.Finished | None, list[tuple[int, str]], list[bytes]]:
    """Runs a case. Returns the finished run, the invariants that it breaks, and the bytes of its record.

    A run that raised an exception is None and breaks ``ENDED_BADLY``. Raises ``Unplayable``.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-chaos-") as name:
        folder = Path(name)
        experiment = experiment_of(document, folder)
        try:
            with _played(document) as watched:
                summary = run_quietly(experiment, folder / "run")
        except (UserError, PolicyError) as error:
            raise Unplayable(str(error)) from error
        except Exception as error:
            return None, [(ENDED_BADLY, f"{type(error).__name__}: {error}")], []
        run = chaos_checks.finished(experiment, folder / "run", summary, watched)
        names = ("events.jsonl", "hops.parquet", "requests.parquet")
        record = [(folder / "run" / file).read_bytes() for file in names]
        broken = chaos_checks.broken(run)
        wrong = chaos_engines.simulated_otherwise(document, run)
        if wrong:
            broken.append((_SIMULATED_OTHERWISE, wrong))
        run = replace(run, is_simulated=wrong is not None)
        if chaos_cases.INTERRUPT in document:
            broken += _interrupted(document, run)
        return run, broken, record


def _instants(run: chaos_checks.Finished) -> Iterator[float]:
    """Yields all times at which something happened to a session, in scenario seconds."""
    for log in run.logs.values():
        for record in log:
            yield record.at_s
            for hop in record.hops if isinstance(record, Token) else ():
                yield from (hop.sent_at_s, hop.arrived_at_s, hop.departed_at_s, hop.received_at_s)


def is_slow(seed: int) -> bool:
    """Returns whether the messages of a seed's case take longer than time limits."""
    return chaos_cases.SLOW in chaos_cases.draw(seed)


def case_of(seed: int) -> Document:
    """Returns the whole case of a seed. Raises ``Unplayable``.

    If already the undisturbed case breaks an invariant, that case is returned.
    """
    calm = chaos_cases.draw(seed)
    undisturbed = chaos_cases.with_last_requests(calm, _CALM_S)
    run, found, _ = play(undisturbed)
    if run is None or found:
        return undisturbed
    instants = [at_s for at_s in _instants(run) if at_s < run.quiet_from_s]
    disturbed = chaos_cases.disturb(seed, calm, instants)
    with tempfile.TemporaryDirectory(prefix="testbed-chaos-") as folder:
        # With the last requests: a workload whose requests all arrive at once has no rate, and is refused.
        whole = experiment_of(chaos_cases.with_last_requests(disturbed, _CALM_S), Path(folder))
        ends_s = chaos_checks.disturbed_until_s(whole)
    return chaos_cases.with_last_requests(disturbed, ends_s)


def try_seed(seed: int, shrinks: bool = True) -> Outcome:
    """Draws, runs and checks one seed. ``shrinks``: a failing case is made smaller."""
    outcome = Outcome(seed)
    try:
        document = case_of(seed)
        run, outcome.broken, record = play(document)
        if run is not None and not outcome.broken and seed % _EVERY_SAME == 0:
            outcome.broken = _not_the_same(document, record)
        if run is not None and not outcome.broken and seed % _EVERY_INTERRUPTED == 0:
            document[chaos_cases.INTERRUPT] = chaos_cases.interruption_s(seed, list(_instants(run)))
            outcome.broken = _interrupted(document, run)
        if run is not None and not outcome.broken and seed % _EVERY_SIMULATED == 0:
            document = _simulated_too(document, outcome)
    except Unplayable:
        outcome.played = False
        return outcome
    if run is not None:
        outcome.counts.update(request.status for request in run.records.requests)
        outcome.counts["refusals"] += sum(request.n_rejections for request in run.records.requests)
        outcome.counts["faults"] += run.summary["n_faults"]
        outcome.counts["changes of links"] += len(run.experiment.network.changes)
        outcome.counts["recoveries"] += run.summary["n_replays"]
        outcome.counts["moves"] += len(run.summary["moves"])
    if outcome.broken:
        outcome.document = shrink(document, outcome.broken[0][0]) if shrinks else document
    return outcome


def _simulated_too(document: Document, outcome: Outcome) -> Document:
    """Plays what the fast engine serves of a case, too. Returns that, if it breaks an invariant, else the case."""
    carried = chaos_engines.carried(document)
    try:
        run, broken, _ = play(carried)
    except Unplayable:
        return document
    outcome.counts["seeds simulated, too"] += run is not None and run.is_simulated
    outcome.broken = broken
    return carried if broken else document


def shrink(document: Document, invariant: int) -> Document:
    """Returns the smallest case found that breaks the same invariant, after at most
    ``_MAX_SHRINKING`` runs.
    """
    n_tried, goes_on = 0, True
    while goes_on:
        goes_on = False
        for candidate in chaos_cases.smaller(document):
            n_tried += 1
            if n_tried > _MAX_SHRINKING:
                return document
            try:
                run, found, record = play(candidate)
                if run is not None and not found and invariant == _NOT_THE_SAME:
                    found = _not_the_same(candidate, record)
            except Unplayable:
                continue
            if any(number == invariant for number, _ in found):
                document, goes_on = candidate, True
                break
    return document


def _not_the_same(document: Document, record: list[bytes]) -> list[tuple[int, str]]:
    """Returns the broken invariant if another run of the case leaves another record."""
    return [(_NOT_THE_SAME, "two runs left different records")] if play(document)[2] != record else []


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds; default 200")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default 0")
    parser.add_argument(
        "--slow", action="store_true", help="only seeds whose messages take longer than time limits"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes")
    parser.add_argument("--keep", type=Path, help="a folder for the scenarios of failing seeds")
    parser.add_argument("--no-shrinking", action="store_true", help="leave failing cases as they are")
    parser.add_argument("--json", action="store_true", help="print one object at the end, and no lines")
    options = parser.parse_args(arguments)
    # Else every case warns that its times are another model's.
    logging.getLogger("testbed").setLevel(logging.ERROR)
    if options.seeds < 1 or options.first < 0 or options.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1, --first at least 0")
    started_at = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    play_seed = functools.partial(try_seed, shrinks=not options.no_shrinking)
    drawn = (seed for seed in itertools.count(options.first) if not options.slow or is_slow(seed))
    seeds = itertools.islice(drawn, options.seeds)
    with ProcessPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(play_seed, seeds, chunksize=4):
            counts.update(outcome.counts)
            counts["seeds"] += 1
            counts["seeds whose system cannot hold its model"] += not outcome.played
            if not outcome.broken:
                continue
            command = f"python -m benchmarks chaos --seeds 1 --first {outcome.seed}"
            failures.append({"seed": outcome.seed, "broken": outcome.broken, "command": command})
            if not options.json:
                number, text = outcome.broken[0]
                print(f"FAILED: {command}: invariant {number}: {text}", flush=True)
            if options.keep is not None and outcome.document is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                path = options.keep / f"chaos-{outcome.seed}.toml"
                path.write_text(scenario_of(outcome.document), encoding="utf-8")
    took_s = time.monotonic() - started_at
    if options.json:
        print(json.dumps({"seeds": options.seeds, "took_s": took_s, "counts": counts, "failures": failures}))
    else:
        totals = ", ".join(f"{key} {count}" for key, count in sorted(counts.items()))
        print(f"{len(failures)} of {options.seeds} seeds failed in {took_s:.0f} s ({totals})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
