"""Steps of several sessions: fits them with ``testbed calibrate``, and compares the timing stub with
transformer blocks.

Sessions arrive at one server faster than it completes them; both runs have ``batching = "continuous"``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.gpu_parts.calibration import config_folder
from benchmarks.gpu_parts.commands import up
from benchmarks.gpu_parts.here import SITE, one_place
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, model_of
from testbed.experiments.units import SIZE
from testbed.studies.calibrate.command import Options, calibrate_command

GOAL_RATIO = 0.05
"""Goal for the error of the stub's mean time per token, relative to the blocks'."""
_N_BLOCKS, _NAME = 2, "batches"
_N_INPUT_TOKENS = 20
_BLOCKS_SHARE = 0.6
"""Share of the time that is left."""


def run(record: Record) -> None:
    job = record.job
    model = model_of(job)
    out = job.folder / "batches" / "calibration"
    options = Options(
        model=str(config_folder(job.folder, model)),
        device=job.device,
        dtype=model.dtype,
        name=_NAME,
        out=out,
        n_blocks=_N_BLOCKS,
        lengths=(8, 16, 32) if job.is_small else (16, 256, 1024, 1900),
        sessions=(1, 2),
        batch_sessions=(1, 2, 4) if job.is_small else (1, 2, 4, 8, 16, 32, 64),
        n_output_tokens=8 if job.is_small else 32,
        rounds=2,
        random_weights=True,
        keep_cpus_awake=not job.is_small,
    )
    answer, _ = calibrate_command(options, lambda text: print(text, file=sys.stderr))
    record.put(model=model.name, dtype=model.dtype, n_blocks=_N_BLOCKS, batches=answer["batches"])
    for sentence in answer["verdict"]:
        record.find(sentence)
    if answer["batches"] is None:
        record.fail("Steps of several sessions were not measured.")
        return
    scenario = job.folder / "batches" / "scenario.toml"
    tokens = 24 if job.is_small else 128
    token_s = _N_BLOCKS * answer["better"]["decode_s"]["value"] if "decode_s" in answer["better"] else 0.0
    scenario.write_text(
        tomli_w.dumps(_scenario(model, out / "profile.toml", tokens, token_s)), encoding="utf-8"
    )
    _compare(record, scenario, job.folder / "batches")


def _scenario(model: Model, profile: Path, n_tokens: int, token_s: float) -> dict[str, Any]:
    """Returns a scenario of twelve sessions, half of which arrive before the first one ends."""
    memory = _N_BLOCKS * (model.block_bytes("plain") + 16 * model.cache_bytes(_N_INPUT_TOKENS + n_tokens))
    return {
        "name": "gpu-batches",
        "hardware_files": [str(profile)],
        "model": {**model.table, "n_blocks": _N_BLOCKS},
        "servers": [
            {"hardware": f"{_NAME}-batched", "site": SITE, "memory": SIZE.format(round(1.05 * memory))}
        ],
        **one_place(),
        "policy": {"name": "proposed", "design_concurrency": 16},
        "compute": {"random_weights": True, "dtype": model.dtype, "batching": "continuous", "verify": False},
        "workload": {
            "arrivals": "listed",
            "requests": [
                [3.0 + i * n_tokens * (token_s + 0.003) / 6, _N_INPUT_TOKENS, n_tokens] for i in range(12)
            ],
        },
    }


def _compare(record: Record, scenario: Path, folder: Path) -> None:
    found = {}
    for compute, share in (("blocks", _BLOCKS_SHARE), ("stub", 1.0)):
        options = ["--compute", compute, "--no-twin", "--clock", "real"]
        if compute == "blocks":
            options += ["--set", f"compute.device={record.job.device}"]
        summary = up(scenario, folder / compute, options, share * record.job.left_s)
        found[compute] = summary["metrics"]["tpot_s"]["mean"]
        record.put(**{compute: {key: summary[key] for key in ("n_requests", "n_completed", "metrics")}})
        if summary["n_completed"] < summary["n_requests"]:
            record.fail(f"{compute}: {summary['n_completed']} of {summary['n_requests']} requests completed.")
    error_ratio = found["stub"] / found["blocks"] - 1
    record.put(stub_error_ratio=error_ratio, goal_ratio=GOAL_RATIO)
    record.find(
        f"Batches: {1e3 * found['blocks']:.4g} ms per token after the first with real blocks, "
        f"{1e3 * found['stub']:.4g} ms by the "
        f"calibrated stub ({100 * error_ratio:+.1f} %; the goal is {100 * GOAL_RATIO:g} %)."
    )
