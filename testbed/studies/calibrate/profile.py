"""The hardware profile that a calibration writes: TOML tables that scenarios load with ``hardware_files``.

``NAME`` has the better model, ``NAME-paper`` the paper's, for comparison, and ``NAME-batched`` that of steps
of several sessions. ``[hub]`` has the client's time per output token. ``decode`` of ``NAME`` is the time of a
block with an empty cache and without the cost per step; from it a scenario computes the tau that its policies
use, for its own lengths (``ServerSpec``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from policies.steps import StepTimes
from testbed.experiments.catalogue import dtype_of
from testbed.experiments.roofline import PETALS_ASSUMED_BPS, PETALS_PROMPT_TOKENS
from testbed.experiments.units import DURATION, SIZE
from testbed.studies.calibrate.batches import BatchFit
from testbed.studies.calibrate.client import ClientFit
from testbed.studies.calibrate.fit import Fit, time_s
from testbed.studies.calibrate.linear import LinearFit
from testbed.studies.calibrate.points import Point

_DIGITS = 6


@dataclass(frozen=True)
class Subject:
    """The model and device that were calibrated. ``memory_bytes``: the device's memory for blocks and
    caches.
    """

    backend: str
    model: str
    family: str
    n_blocks: int
    hidden_size: int
    token_bytes: int
    device: str
    dtype: str
    weights: str
    threads: int | None
    memory_bytes: float
    block_values: int
    """Number of values in the matrices of a block."""
    heads_width: int
    """Number of values of all attention heads of a block together."""
    has_graphs: bool = False

    @property
    def words(self) -> str:
        """The model and device in one line, for headings."""
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else ""
        graphs = ", CUDA graphs" if self.has_graphs else ""
        kind = self.dtype if self.weights == "plain" else f"{self.dtype} with {self.weights} weights"
        return f"{self.model} ({self.family}, hidden size {self.hidden_size}), {kind} on {self.device}{threads}{graphs}"


def profile_text(
    name: str,
    fit: Fit,
    subject: Subject,
    client: ClientFit | None = None,
    batches: BatchFit | None = None,
) -> str:
    """Returns the text of the file.

    It has ``[hardware.NAME]`` and ``[hardware.NAME-paper]``, with ``batches`` also
    ``[hardware.NAME-batched]``, and with ``client`` also ``[hub]``.
    """
    better, paper = fit.better.times, fit.paper.times
    contention = fit.contention
    serial = contention is not None and contention.is_one_at_a_time
    lines = [
        f"# Hardware profile from `testbed calibrate`: {subject.words}.",
        '# A scenario loads it with hardware_files = ["profile.toml"] and names it with hardware = "..." of a server.',
        "# StepTimes are per block of this model; `memory` is the device's, to be replaced by what a server may use.",
        "",
        f"# The better model. Decode {_quality(fit.better.decode)}; prefill {_quality(fit.better.prefill)}.",
        "# `decode` is a block's time with nothing cached: policies see it at the scenario's own lengths.",
    ]
    if serial:
        lines.append("# Steps wait for each other: give [compute] serial = true in the scenario.")
    lines += [f"[hardware.{name}]", *_common(subject, better)]
    lines += [
        f"step_base = {_seconds(better.step_base_s)}",
        f"context_slope = {_seconds(better.context_slope_s)}",
        f"prefill_curve = {_seconds(better.prefill_curve_s)}",
    ]
    if contention is not None and not serial:
        lines.append(f"contention = {_digits(contention.ratio.value)!r}")
    if batches is not None:
        lines.append(f"session_slope = {_seconds(batches.times.session_slope_s)}  # as in {name}-batched")
    lines += [
        "",
        f"# The paper's model. Decode {_quality(fit.paper.decode)}; prefill {_quality(fit.paper.prefill)}.",
        f"[hardware.{name}-paper]",
        *_common(subject, paper),
    ]
    if batches is not None:
        times = batches.times
        lines += [
            "",
            '# Steps of several sessions, for [compute] batching = "continuous": fitted to batches alone.',
            f"# {batch_quality(batches)}.",
            f"[hardware.{name}-batched]",
            *_common(subject, times),
            f"step_base = {_seconds(times.step_base_s)}",
            f"context_slope = {_seconds(times.context_slope_s)}",
            f"prefill_curve = {_seconds(times.prefill_curve_s)}",
            f"session_slope = {_seconds(times.session_slope_s)}",
        ]
    if client is not None:
        lines += [
            "",
            "# What the client computes per output token; a scenario's own [compute] hub_token replaces it.",
            "[hub]",
            f"token = {_seconds(client.token.time_s)}",
        ]
    return "\n".join(lines) + "\n"


def _common(subject: Subject, times: StepTimes) -> list[str]:
    prompt = Point("prefill", 1, PETALS_PROMPT_TOKENS, 0.0, 1, 1, 0.0, 0.0, 0.0)
    forward_rps = PETALS_PROMPT_TOKENS / time_s(times, prompt)
    network_rps = PETALS_ASSUMED_BPS / (8 * subject.token_bytes)
    about = {
        "model": json.dumps(subject.model),
        "dtype": f'"{dtype_of(subject.dtype, subject.weights)}"',
        "block_values": subject.block_values,
        "heads_width": subject.heads_width,
    }
    return [
        f"measured = {{ {', '.join(f'{key} = {value}' for key, value in about.items())} }}",
        f'memory = "{SIZE.format(max(1.0, round(subject.memory_bytes / 1e6)) * 1e6)}"',
        f"decode = {_seconds(times.decode_s)}",
        f"prefill_base = {_seconds(times.prefill_base_s)}",
        f"prefill_per_token = {_seconds(times.prefill_slope_s)}",
        f"petals_forward_rps = {_digits(forward_rps)!r}  # {PETALS_PROMPT_TOKENS} tokens on one block, by the fit",
        f"petals_network_rps = {_digits(network_rps)!r}  # what PETALS assumes unmeasured: 100 Mbit/s",
    ]


def batch_quality(batches: BatchFit) -> str:
    """Returns in words how well the fit of batches predicts the points that it has not seen."""
    n_held_out = len(batches.errors_ratio())
    return (
        f"R² {batches.fit.r2:.4f} on {len(batches.points) - n_held_out} points; on {n_held_out} others, which the fit has "
        f"not seen, off by {100 * batches.mean_error_ratio:.1f} % in the mean and {100 * batches.max_error_ratio:.1f} % at "
        "most"
    )


def _quality(fit: LinearFit) -> str:
    return f"R² {fit.r2:.4f}, off by at most {100 * fit.max_ratio:.1f} % (rms {100 * fit.rms_ratio:.1f} %)"


def _digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _seconds(value_s: float) -> str:
    return f'"{DURATION.format(_digits(value_s))}"'
