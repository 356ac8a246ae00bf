"""``testbed calibrate``: measures, fits, and writes the profile and the report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from nodes.clock import ScaledClock
from nodes.compute import Compute, ComputeError
from testbed.errors import RunError, UserError
from testbed.experiments.fields import checked_name
from testbed.rundir import check_new_folder, check_writable, write_json, write_text
from testbed.runtime.real.awake import kept_awake
from testbed.studies.calibrate.backend import (
    Device,
    Source,
    default_dtype,
    hidden_states,
    measure_memory,
    open_blocks,
    open_hub,
    read_source,
)
from testbed.studies.calibrate.batches import (
    BatchSample,
    fit_batches,
    measure_batches,
    plan_batches,
)
from testbed.studies.calibrate.client import ClientSample, fit_client, measure_client
from testbed.studies.calibrate.fit import fit_times
from testbed.studies.calibrate.measure import Sample, measure
from testbed.studies.calibrate.memory import MemorySample, fit_memory
from testbed.studies.calibrate.plan import OUTPUT_TOKENS, PAUSE_S, ROUNDS, SESSIONS, Plan, make_plan
from testbed.studies.calibrate.points import points_of
from testbed.studies.calibrate.profile import Subject, profile_text
from testbed.studies.calibrate.report import report_markdown, report_text
from testbed.studies.calibrate.tables import answer_of, samples_csv

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options of the command line. ``n_blocks`` None: all blocks of the model; ``lengths`` None: the
    default ones.
    """

    model: str
    compute: str = "blocks"
    device: str = "cpu"
    dtype: str | None = None
    weights: str = "plain"
    n_threads: int = 1
    n_streams: int = 1
    has_graphs: bool = False
    name: str | None = None
    out: Path | None = None
    n_blocks: int | None = None
    lengths: tuple[int, ...] | None = None
    sessions: tuple[int, ...] = SESSIONS
    n_output_tokens: int = OUTPUT_TOKENS
    rounds: int = ROUNDS
    pause_s: float = PAUSE_S
    random_weights: bool = False
    batches: bool = True
    """Measure steps of several sessions, too."""
    batch_sessions: tuple[int, ...] | None = None
    """How many sessions such steps have; None: ``sessions``."""
    keep_cpus_awake: bool = True
    """As ``network.keep_cpus_awake`` of the runs that the profile is for."""


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parses whole numbers such as ``1,2,4``, the value of ``option``. Raises ``UserError`` if they
    are none.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f'{option} must be whole numbers such as 16,64,256, not "{text}"') from None


def calibrate_command(options: Options, announce: Announce = lambda _: None) -> tuple[dict[str, Any], str]:
    """Calibrate and write all files. Returns the object for ``--json`` and the text for the terminal.

    Raises ``UserError`` for invalid options, ``RunError`` if the backend fails or a file cannot be written.
    """
    if options.compute != "blocks":
        raise UserError(
            f'--compute must be blocks, not "{options.compute}": only transformer blocks are calibrated; '
            "the timing stub uses the times of its profile"
        )
    from testbed.studies.calibrate.figures import draw_figures

    source = read_source(options.model, random_weights=options.random_weights)
    name = _name(options, source)
    if options.out is not None:
        check_new_folder(options.out)
    else:
        check_writable(Path("runs"))
    sizes = source.sizes
    if options.n_blocks is not None and not 1 <= options.n_blocks <= sizes.n_blocks:
        raise UserError(f"--blocks must be from 1 to the model's {sizes.n_blocks}, not {options.n_blocks}")
    plan = make_plan(
        options.n_blocks or sizes.n_blocks,
        sizes.max_tokens,
        lengths=options.lengths,
        sessions=options.sessions,
        n_output_tokens=options.n_output_tokens,
        rounds=options.rounds,
        pause_s=options.pause_s,
    )
    dtype = options.dtype or default_dtype(source.config)
    device = Device(
        options.device, dtype, options.weights, options.n_threads, options.n_streams, options.has_graphs
    )
    began_at_s = time.monotonic()
    with kept_awake(options.keep_cpus_awake) as about_sleep:
        backend = measured_backend(source, device, plan, announce)
        measured = backend.measured
        batched = _batched(options, plan, source, device, announce) if options.batches else []
    subject = subject_of(source, device, backend.token_bytes, backend.memory_bytes)
    fit, memory = fit_times(points_of(measured.steps)), fit_memory(measured.memory)
    client = fit_client(measured.client) if measured.client else None
    batches = fit_batches(batched) if batched else None
    answer = answer_of(name, subject, fit, memory, client, batches)
    how = [*_how(plan, measured, batched, time.monotonic() - began_at_s), "", f"{about_sleep}."]
    files = {
        "profile.toml": profile_text(name, fit, subject, client, batches),
        "measurements.csv": samples_csv(Sample, measured.steps),
        "batches.csv": samples_csv(BatchSample, batched),
        "client.csv": samples_csv(ClientSample, measured.client),
    }
    folder = options.out or Path("runs") / f"calibrate-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_text(folder / file, text)
        write_json(folder / "calibration.json", answer)
        drawn = draw_figures(folder / "figures", fit, measured.steps, memory)
        figures = [(str(path.relative_to(folder)), caption) for path, caption in drawn]
        report = report_markdown(name, subject, fit, memory, client, figures, how, batches)
        write_text(folder / "report.md", report)
    except OSError as error:
        raise RunError(
            f"cannot write to {folder}: {error.strerror}; make room, or choose another with --out"
        ) from error
    answer["out"] = str(folder)
    written = f"written to {folder}: {', '.join(files)}, report.md, calibration.json, figures/"
    return answer, report_text(subject, fit, client, [written], batches)


def _batched(
    options: Options, plan: Plan, source: Source, device: Device, announce: Announce
) -> list[BatchSample]:
    """Measures steps of several sessions, on a second backend that computes them together.

    Returns no samples if the model's sessions are too short.
    """
    batches = plan_batches(plan, options.batch_sessions or options.sessions, source.sizes.max_tokens)
    if batches is None:
        announce(
            "calibrating: steps of several sessions are left out: the model's longest session is too short "
            "for them"
        )
        return []
    announce(f"calibrating: steps of several sessions, {batches.rounds} rounds of {len(batches.cases)} cases")
    compute, _ = open_blocks(source, device, is_batched=True)

    async def run() -> list[BatchSample]:
        clock = ScaledClock()
        try:
            await compute.host(0, batches.max_blocks)
            payload = partial(hidden_states, hidden_size=source.sizes.hidden_size, dtype=device.dtype)
            return await measure_batches(
                batches, compute, clock, payload, close=compute.close_session, fill=compute.fill
            )
        finally:
            clock.close()

    try:
        return uvloop.run(run())
    except ComputeError as error:
        raise RunError(f"the calibration failed: {error}") from error
    finally:
        compute.close()


def _name(options: Options, source: Source) -> str:
    usual = f"{source.name}-{options.device}"
    name = options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", usual).strip("-._") or "calibrated"
    try:
        return checked_name(name)
    except ValueError as error:
        raise UserError(f"--name {error}") from None


@dataclass(frozen=True)
class _Measured:
    """All samples. ``client_unmeasured``: why there are none of the client."""

    memory: list[MemorySample]
    steps: list[Sample]
    client: list[ClientSample]
    client_unmeasured: str = ""


@dataclass(frozen=True)
class Backend:
    """A backend that was measured: bytes of a token's hidden state, and its device's free memory before (0: unknown)."""

    token_bytes: int
    memory_bytes: float
    measured: _Measured


def measured_backend(
    source: Source, device: Device, plan: Plan, announce: Announce = lambda _: None
) -> Backend:
    """Opens blocks on ``device``, carries out ``plan``, and closes them again.

    Raises ``UserError`` if the blocks cannot be opened, ``RunError`` if the measurement fails.
    """
    compute, memory_bytes = open_blocks(source, device)
    try:
        measured = uvloop.run(_measure(compute, plan, source, device, announce))
    except ComputeError as error:
        raise RunError(f"the calibration failed: {error}") from error
    finally:
        compute.close()
    return Backend(compute.token_bytes, memory_bytes, measured)


async def _measure(
    compute: Compute, plan: Plan, source: Source, device: Device, announce: Announce
) -> _Measured:
    clock = ScaledClock()
    announce(f"calibrating: {plan.rounds} rounds of {len(plan.cases)} cases, and {plan.n_warm_up} to warm up")

    def progress(done: int, total: int) -> None:
        n_done = done // len(plan.cases) - plan.n_warm_up
        if done % len(plan.cases) == 0 and n_done > 0:
            announce(f"calibrating: round {n_done} of {plan.rounds} done")

    try:
        memory = await measure_memory(compute, plan)
        samples = await measure(
            plan,
            compute,
            clock,
            lambda n_tokens: hidden_states(n_tokens, source.sizes.hidden_size, device.dtype),
            close=compute.close_session,
            progress=progress,
        )
        # Last, so that the hub's memory is not counted with the blocks' and leaves them enough.
        try:
            hub = open_hub(source, device)
        except ComputeError as error:
            announce(f"calibrating: the client's part is left out: {error}")
            return _Measured(memory, samples, [], str(error))
        announce("calibrating: the client's part")
        try:
            client = await measure_client(plan, hub, compute, clock)
        finally:
            hub.close()
    finally:
        clock.close()
    return _Measured(memory, samples, client)


def subject_of(source: Source, device: Device, token_bytes: int, memory_bytes: float) -> Subject:
    """Returns what was calibrated."""
    return Subject(
        backend="blocks",
        model=source.name,
        family=source.sizes.family,
        block_values=source.sizes.largest.active_values,
        heads_width=source.sizes.n_heads * source.sizes.head_size,
        n_blocks=source.sizes.n_blocks,
        hidden_size=source.sizes.hidden_size,
        token_bytes=token_bytes,
        device=device.name,
        dtype=device.dtype,
        weights=device.weights,
        threads=device.n_threads if device.name == "cpu" else None,
        has_graphs=device.has_graphs,
        memory_bytes=memory_bytes,
    )


def _how(plan: Plan, measured: _Measured, batched: Sequence[BatchSample], took_s: float) -> list[str]:
    samples = measured.steps
    n_used = sum(sample.is_used for sample in samples)
    lines = [
        f"Measured in {took_s:.0f} s: {len(plan.cases)} cases in {plan.rounds} rounds of different order after "
        f"{plan.n_warm_up} to warm up, {1e3 * plan.pause_s:g} ms idle before every step of a session alone; "
        f"{len(samples)} samples, {n_used} used.",
    ]
    if batched:
        lines += ["", f"Steps of several sessions: {len(batched)} samples, warm-up included."]
    if measured.client_unmeasured:
        lines += ["", f"The client's part was not measured: {measured.client_unmeasured}."]
    return lines
