"""Steps of several sessions: fits them with ``testbed calibrate``, and compares the timing stub with
transformer blocks.

Sessions arrive at one server faster than it completes them; both runs have ``batching = "continuous"``.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.gpu_parts.calibration import config_folder
from benchmarks.gpu_parts.commands import up
from benchmarks.gpu_parts.here import SITE, one_place
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, blocks_within, model_of
from testbed.experiments.units import SIZE
from testbed.studies.calibrate.command import Options, calibrate_command

GOAL_RATIO = 0.05
"""Goal for the error of the calibrated law's time of a step, relative to the blocks'."""
_NAME = "batches"
_MOST_BLOCKS, _MOST_BLOCKS_SMALL = 8, 2
"""With few blocks a step takes as long as the server's process needs to launch it, beside all else that it does."""
_MEMORY_RATIO = 0.7
"""The share of the free memory for blocks and all sessions' caches."""
_N_INPUT_TOKENS = 20
_BLOCKS_SHARE = 0.6
"""Share of the time that is left."""


def run(record: Record) -> None:
    job = record.job
    model = model_of(job)
    out = job.folder / "batches" / "calibration"
    lengths = (8, 16, 32) if job.is_small else (16, 256, 1024, 1900)
    batch_sessions = (1, 2, 4) if job.is_small else (1, 2, 4, 8, 16, 32, 64)
    n_cached = batch_sessions[-1] * math.ceil(sum(lengths) / len(lengths))
    most_blocks = _MOST_BLOCKS_SMALL if job.is_small else _MOST_BLOCKS
    n_blocks = min(most_blocks, blocks_within(job, model, "plain", _MEMORY_RATIO, n_cached))
    if not n_blocks:
        record.fail(f"Not one block of {model.name} with the caches of {batch_sessions[-1]} sessions fits.")
        return
    options = Options(
        model=str(config_folder(job.folder, model)),
        device=job.device,
        dtype=model.dtype,
        name=_NAME,
        out=out,
        n_blocks=n_blocks,
        lengths=lengths,
        sessions=(1, 2),
        batch_sessions=batch_sessions,
        n_output_tokens=8 if job.is_small else 32,
        rounds=2,
        random_weights=True,
        keep_cpus_awake=not job.is_small,
    )
    answer, _ = calibrate_command(options, lambda text: print(text, file=sys.stderr))
    record.put(model=model.name, dtype=model.dtype, n_blocks=n_blocks, batches=answer["batches"])
    for sentence in answer["verdict"]:
        record.find(sentence)
    if answer["batches"] is None:
        record.fail("Steps of several sessions were not measured.")
        return
    scenario = job.folder / "batches" / "scenario.toml"
    tokens = 24 if job.is_small else 128
    token_s = n_blocks * answer["better"]["decode_s"]["value"] if "decode_s" in answer["better"] else 0.0
    scenario.write_text(
        tomli_w.dumps(_scenario(model, n_blocks, out / "profile.toml", tokens, token_s)), encoding="utf-8"
    )
    _compare(record, scenario, job.folder / "batches")


def _scenario(model: Model, n_blocks: int, profile: Path, n_tokens: int, token_s: float) -> dict[str, Any]:
    """Returns a scenario of twelve sessions, half of which arrive before the first one ends."""
    memory = n_blocks * (model.block_bytes("plain") + 16 * model.cache_bytes(_N_INPUT_TOKENS + n_tokens))
    return {
        "name": "gpu-batches",
        "hardware_files": [str(profile)],
        "model": {**model.table, "n_blocks": n_blocks},
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
        kept = ("n_requests", "n_completed", "metrics", "model")
        record.put(**{compute: {key: summary[key] for key in kept if key in summary}})
        if compute == "blocks":
            _judge(record, summary)
        if summary["n_completed"] < summary["n_requests"]:
            record.fail(f"{compute}: {summary['n_completed']} of {summary['n_requests']} requests completed.")
    error_ratio = found["stub"] / found["blocks"] - 1
    record.put(stub_error_ratio=error_ratio)
    record.find(
        f"Batches: {1e3 * found['blocks']:.4g} ms per token after the first with real blocks, "
        f"{1e3 * found['stub']:.4g} ms by the calibrated stub ({100 * error_ratio:+.1f} %), whose clients compute at the "
        "same time: those with real blocks wait for each other, since one process computes for all of them."
    )


def _judge(record: Record, summary: dict[str, Any]) -> None:
    """Compares what the server took for the blocks' steps with the calibrated law for the same batches."""
    means = {
        part: (summary["metrics"][part]["mean"], summary["model"][part]["mean"])
        for part in ("hop_compute_s", "hop_client_s")
    }
    served_s, law_s = means["hop_compute_s"]
    record.put(law_error_ratio=law_s / served_s - 1, goal_ratio=GOAL_RATIO)
    record.find(
        f"Batches: a step took {1e3 * served_s:.4g} ms at the server, and by the calibrated law for the same batches "
        f"{1e3 * law_s:.4g} ms ({100 * (law_s / served_s - 1):+.1f} %; the goal is {100 * GOAL_RATIO:g} %)."
    )
    took_s, alone_s = means["hop_client_s"]
    record.find(
        f"Batches: a token took {1e3 * took_s:.4g} ms at the client, and {1e3 * alone_s:.4g} ms alone."
    )
