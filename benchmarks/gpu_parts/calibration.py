"""Times and memory of blocks with random weights, measured and fitted by ``testbed calibrate``.

Writes ``calibration-KIND/`` with a hardware profile for each kind of weights; ``serving`` predicts with
these.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, blocks_within, model_of, quantised_here
from nodes.blocks.memory import amount
from nodes.blocks.spec import Weights
from testbed.errors import TestbedError
from testbed.rundir import write_json
from testbed.studies.calibrate.command import Options, calibrate_command
from testbed.studies.calibrate.verdict import show_s

_MEMORY_RATIO = 0.5
"""Share of the free memory for the blocks that are calibrated together."""
MOST_BLOCKS = {"nf4": 14, "plain": 4}
"""The most blocks to calibrate. In nf4 they are as many as a server has in ``serving``."""


def uses_graphs(device: str) -> bool:
    """Whether blocks are calibrated and served with CUDA graphs: without them a step with one token in nf4 takes as long
    as the CPU needs to launch its kernels, which varies more than what the device needs to compute them.
    """
    return device != "cpu"


def profile_of(folder: Path, weights: str) -> tuple[str, Path]:
    """Returns (name, file) of the hardware profile that this part writes for a kind of weights."""
    return f"calibrated-{weights}", folder / f"calibration-{weights}" / "profile.toml"


def run(record: Record) -> None:
    model = model_of(record.job)
    record.put(model=model.name, dtype=model.dtype, hidden_size=model.hidden_size)
    # First the kind of weights that ``serving`` uses, since it needs that profile.
    kinds: list[Weights] = ["nf4", "plain"] if quantised_here() else ["plain"]
    if len(kinds) == 1:
        record.find("Not here: weights in nf4, which need bitsandbytes.")
    took_s = 0.0
    for weights in kinds:
        if record.job.left_s < took_s:
            record.leave(f"Out of time before {weights} weights.")
            break
        began_at_s = time.monotonic()
        try:
            _calibrate(record, model, weights)
        except TestbedError as error:
            record.fail(f"{weights}: {error}")
        took_s = time.monotonic() - began_at_s
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _calibrate(record: Record, model: Model, weights: Weights) -> None:
    job = record.job
    n_blocks = min(MOST_BLOCKS[weights], blocks_within(job, model, weights, _MEMORY_RATIO))
    if not n_blocks:
        record.fail(f"{weights}: not one block of {model.name} fits.")
        return
    name, profile = profile_of(job.folder, weights)
    options = Options(
        model=str(config_folder(job.folder, model)),
        device=job.device,
        dtype=model.dtype,
        weights=weights,
        has_graphs=uses_graphs(job.device),
        name=name,
        out=profile.parent,
        n_blocks=min(2, n_blocks) if job.is_small else n_blocks,
        lengths=(8, 16, 32) if job.is_small else (16, 64, 256),
        sessions=(1, 2) if job.is_small else (1, 2, 4, 8),
        n_output_tokens=16 if job.is_small else 128,
        rounds=2 if job.is_small else 1,  # each range of blocks has steps of its own in a round
        random_weights=True,
        batches=False,  # the time of this part is too short for them
        keep_cpus_awake=not job.is_small,
    )
    began_at_s = time.monotonic()
    answer, _ = calibrate_command(options, lambda text: print(f"{weights}: {text}", file=sys.stderr))
    record.put(**{weights: _figures(answer, profile, time.monotonic() - began_at_s)})
    _say(record, model, weights, answer)


def config_folder(folder: Path, model: Model) -> Path:
    """Makes a folder with only ``config.json``, which is all that a model with random weights needs. Returns
    it.
    """
    path = folder / "models" / model.name
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", model.config)
    return path


def _figures(answer: dict[str, Any], profile: Path, took_s: float) -> dict[str, Any]:
    return {
        "took_s": round(took_s, 1),
        "profile": str(profile.relative_to(profile.parents[1])),
        **{
            key: answer[key]
            for key in ("subject", "paper", "better", "contention", "client", "memory", "verdict")
        },
    }


def _say(record: Record, model: Model, weights: str, answer: dict[str, Any]) -> None:
    paper, memory = answer["paper"], answer["memory"]
    kind = model.dtype if weights == "plain" else f"{weights} weights, {model.dtype}"
    record.find(
        f"A block of {model.name} in {kind}: tau {show_s(paper['decode_s']['value'])}, tau^I(l) = "
        f"{show_s(paper['prefill_slope_s']['value'])} l + {show_s(paper['prefill_base_s']['value'])} "
        f"(R² {paper['decode']['r2']:.3f} and {paper['prefill']['r2']:.3f})."
    )
    if memory is not None:
        s_m, s_c = memory["block_bytes"]["value"], memory["cache_bytes_per_token"]["value"]
        record.find(
            f"{weights}: a block takes {amount(s_m)} ({amount(model.block_bytes(weights))} by the model), a token "
            f"in its cache {amount(s_c)} ({amount(model.cache_bytes(1))} by the model)."
        )
    for sentence in answer["verdict"]:
        record.find(f"{weights}: {sentence}")
