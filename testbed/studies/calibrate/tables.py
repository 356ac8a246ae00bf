"""The files of a calibration that other programs read: every sample as CSV, and all results as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from testbed.studies.calibrate.batches import BatchFit
from testbed.studies.calibrate.client import ClientFit
from testbed.studies.calibrate.fit import Fit, ModelFit, time_s
from testbed.studies.calibrate.linear import Estimate, LinearFit
from testbed.studies.calibrate.memory import MemoryFit
from testbed.studies.calibrate.profile import Subject
from testbed.studies.calibrate.verdict import verdict

ESTIMATES = (
    ("tau (decode, per block)", "decode_s"),
    ("tau^I intercept (prefill, per block)", "prefill_base_s"),
    ("tau^I slope (prefill, per block and token)", "prefill_slope_s"),
    ("step base (per step)", "step_base_s"),
    ("context slope (per block and cached token)", "context_slope_s"),
    ("prefill curve (per block and squared token)", "prefill_curve_s"),
)
"""The names of the time models' parameters in tables, in this order, and the fields of ``StepTimes``."""
BATCH_ESTIMATES = (
    ("a_d (decodes, per block)", "decode_s"),
    ("b_d (each further decode, per block)", "session_slope_s"),
    ("a_p (a prompt, per block)", "prefill_base_s"),
    ("b_p (per block and token of a prompt)", "prefill_slope_s"),
    ("prefill curve (per block and squared token)", "prefill_curve_s"),
    ("context slope (per block and cached token)", "context_slope_s"),
    ("step base (per step)", "step_base_s"),
)
"""The same for steps of several sessions."""


def samples_csv(kind: type[Any], samples: Sequence[Any]) -> str:
    """Returns a CSV table with one row per sample, in the given order. ``kind``: the samples' dataclass."""
    file = io.StringIO()
    names = [field.name for field in fields(kind)]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(sample, name) for name in names] for sample in samples)
    return file.getvalue()


def answer_of(
    name: str,
    subject: Subject,
    fit: Fit,
    memory: MemoryFit | None,
    client: ClientFit | None,
    batches: BatchFit | None = None,
) -> dict[str, Any]:
    """Returns the object for ``--json`` and ``calibration.json``. Times are in seconds; ratios have
    no unit.
    """
    contention = fit.contention
    return {
        "name": name,
        "subject": asdict(subject),
        "paper": _model(fit.paper),
        "better": _model(fit.better),
        "spread_ratio": {kind: fit.spread_ratio(kind) for kind in ("decode", "prefill")},
        "own_prefill_base_s": _estimate(fit.own_prefill_base_s),
        "contention": None
        if contention is None
        else {
            "ratio": _estimate(contention.ratio),
            "one_at_a_time": contention.is_one_at_a_time,
            "r2": contention.r2,
            "rms_residual": contention.rms_ratio,
            "measured": [{"n_sessions": n, "times_as_long": ratio} for n, ratio in contention.ratios],
        },
        "memory": None
        if memory is None
        else {
            **{name: _estimate(estimate) for name, estimate in memory.fit.estimates.items()},
            **_quality(memory.fit),
            "samples": [asdict(sample) for sample in memory.samples],
        },
        "client": None
        if client is None
        else {"token": asdict(client.token), "prompts": [asdict(prompt) for prompt in client.prompts]},
        "batches": None
        if batches is None
        else {
            **{name: _estimate(estimate) for name, estimate in batches.fit.estimates.items()},
            **_quality(batches.fit),
            "held_out_mean_error": batches.mean_error_ratio,
            "held_out_max_error": batches.max_error_ratio,
            "points": [{**asdict(point), "fitted_s": batches.fitted_s(point)} for point in batches.points],
        },
        "verdict": verdict(fit, client, batches),
        "points": [
            {
                **asdict(point),
                "paper_s": time_s(fit.paper.times, point),
                "better_s": time_s(fit.better.times, point),
            }
            for point in fit.points
        ],
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "standard_error": estimate.error}


def _quality(fit: LinearFit) -> dict[str, float]:
    return {"r2": fit.r2, "max_residual": fit.max_ratio, "rms_residual": fit.rms_ratio}


def _model(model: ModelFit) -> dict[str, Any]:
    return {
        **{name: _estimate(model.estimate(name)) for _, name in ESTIMATES},
        "decode": _quality(model.decode),
        "prefill": _quality(model.prefill),
    }
