"""Compares the tokens of a run with real blocks with those of the whole model on one machine.

The result is written to ``verify.json`` in the run directory, so that a report made later has it, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from nodes.request import Generation
from policies.workload import RequestPlan
from testbed.experiments.experiment import Experiment
from testbed.records.base import data_of
from testbed.records.summary import Verification
from testbed.results.logs import RequestRecord, read_logs
from testbed.results.verified import VERIFY, unchecked
from testbed.rundir import marks, write_json
from testbed.runtime.blocks import BlocksModel, available_bytes

_HEADROOM_RATIO = 1.2
"""Free memory over the whole model's size that the comparison needs."""


def verify_tokens(
    run_dir: Path, experiment: Experiment, blocks: BlocksModel, announce: Callable[[str], None]
) -> Verification:
    """Compare every token that arrived, also of requests that did not complete; writes and returns the result, or why there is none.

    Raises ``KeyboardInterrupt`` if the comparison was interrupted.
    """
    try:
        found = _verify(run_dir, experiment, blocks, announce)
    except KeyboardInterrupt:
        write_json(run_dir / VERIFY, data_of(unchecked("the comparison was interrupted")))
        raise
    write_json(run_dir / VERIFY, data_of(found))
    return found


def _verify(
    run_dir: Path, experiment: Experiment, blocks: BlocksModel, announce: Callable[[str], None]
) -> Verification:
    if not blocks.settings.verify:
        return unchecked("compute.verify is false")
    wire = experiment.problem.model.wire
    if wire is not None and (wire, blocks.settings.dtype) != ("fp16", "float16"):
        return unchecked(f'network.wire is "{wire}": hidden states are not sent as they are computed')
    requests = [r for r in read_logs(run_dir).requests if r.tokens]
    if not requests:
        return unchecked("no token arrived")
    spec = blocks.blocks_spec(0, 0.0)
    needed, there = _needed_bytes(experiment, blocks), available_bytes()
    if spec.device == "cpu" and needed * _HEADROOM_RATIO > there:
        return unchecked(
            f"the whole model needs {needed / 1e9:.3g} GB, and {there / 1e9:.3g} GB of memory are free here"
        )
    announce("comparing the tokens with those of the whole model on one machine")
    plans = {plan.index: plan for plan in experiment.workload.requests}
    job = {
        "spec": dataclasses.asdict(spec),  # with its number of threads, which can change the last bit
        "requests": [_entry(r, blocks, plans.get(r.index)) for r in requests],
    }
    with open(run_dir / "logs" / "whole.log", "ab") as log:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "nodes.blocks.whole"],
            input=json.dumps(job).encode(),
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **marks(run_dir)},
            check=False,
        )
    if done.returncode:
        return unchecked(f"the whole model could not be computed here; see {run_dir / 'logs' / 'whole.log'}")
    return msgspec.json.decode(done.stdout, type=Verification)


def _entry(record: RequestRecord, blocks: BlocksModel, plan: RequestPlan | None) -> dict[str, Any]:
    """Return a request for ``nodes.blocks.whole``. ``plan`` is ``None`` for a request from outside."""
    turn = None if plan is None else plan.turn
    return {
        "after": None if turn is None else turn.after,
        "block_ids": () if plan is None else plan.block_ids,
        "block_tokens": 0 if plan is None else plan.block_tokens,
        "index": record.index,
        "generation": msgspec.to_builtins(blocks.generations.get(record.index, Generation())),
        "n_input_tokens": record.n_input_tokens,
        "tokens": [token.token_id for token in record.tokens],
    }


def _needed_bytes(experiment: Experiment, blocks: BlocksModel) -> float:
    """Return the bytes of all blocks, the embeddings and a head, as if the head had its own weights."""
    model, sizes = experiment.problem.model, blocks.sizes
    vocabulary = 2 * sizes.vocabulary * sizes.hidden_size * model.value_bytes
    return model.n_blocks * model.block_bytes + vocabulary
