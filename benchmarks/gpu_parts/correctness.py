"""Compares chains of servers on this device with transformers on the same device.

It covers both families, and all dtypes and kinds of weights that the device supports. Three sessions of
different lengths decode at the same time on random chains over four servers; one session moves to another
chain half-way. Servers compute steps on several streams (``streams``), in some cases also as CUDA graphs
(``graphs``) and as batches of sessions (``batches``).

On a GPU several processes compute the cases: launching kernels takes longer there than computing them.

Tokens must be those of ``generate`` on the whole model, except for ties (``nodes.blocks.whole``). Hidden
states at the end of each hop must be those of the whole model within ``TOLERANCES``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.gpu_parts.chains import Hop, Servers, Walk, start_servers
from benchmarks.gpu_parts.record import Job, Record
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.device import from_bytes
from nodes.blocks.family import family_named
from nodes.blocks.hub import BlocksHub
from nodes.blocks.spec import BlocksSpec, HubSpec, Weights, WeightSource
from nodes.blocks.tiny import make_tiny
from nodes.blocks.whole import TIE_RATIO, WholeModel
from nodes.compute import ComputeError
from testbed.experiments.provenance import n_cpus
from testbed.results.verified import too_many_ties

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS: tuple[Weights, ...] = ("plain", "int8", "nf4")
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.005}
"""The largest allowed difference of a value, relative to the largest value: a few rounding errors of the
dtype.
"""
STEPS: dict[str, dict[str, Any]] = {
    "streams": {"n_streams": 3},
    "graphs": {"has_graphs": True},
    "batches": {"is_batched": True},
}
"""How servers compute steps, as keys of ``BlocksSpec``."""
_VOCABULARY, _N_PROMPT = 300, 9
_MOST_PROCESSES = 6


def configs(is_small: bool) -> dict[str, dict[str, Any]]:
    """Returns family -> ``config.json`` of its model."""
    n_blocks, hidden = (4, 64) if is_small else (12, 512)
    return {
        "bloom": {
            "model_type": "bloom",
            "hidden_size": hidden,
            "n_layer": n_blocks,
            "n_head": hidden // 16,
            "vocab_size": _VOCABULARY,
            "seq_length": 256,
        },
        "llama": {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": n_blocks,
            "num_attention_heads": hidden // 16,
            "num_key_value_heads": hidden // 32,
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": 256,
        },
    }


def cases_of(is_small: bool) -> list[tuple[str, str, str, Weights]]:
    """Returns (kind of steps, family, dtype, weights) of all cases, most telling first."""
    return [
        (steps, family, dtype, weights)
        for steps in STEPS
        for weights in WEIGHTS
        for dtype in DTYPES
        for family in configs(is_small)
        if steps == "streams" or (weights, dtype) == ("plain", "float32") or not is_small
    ]


def run(record: Record) -> None:
    job = record.job
    n_tokens = 8 if job.is_small else 48
    record.put(tolerances=TOLERANCES, tie_ratios=TIE_RATIO, n_tokens=n_tokens, cases=[])
    sources = {
        family: _made(family, job.is_small, job.folder / "models" / family)
        for family in configs(job.is_small)
    }
    cases = cases_of(job.is_small)
    todo = list(enumerate(cases))
    found: dict[int, dict[str, Any]] = {}
    running: dict[Future[tuple[float, dict[str, Any]]], int] = {}
    longest_s = 0.0
    n_processes = _n_processes(job)
    with _executor(n_processes) as executor:
        while todo or running:
            while todo and len(running) < n_processes:
                if job.left_s < 1.5 * longest_s:
                    record.leave(f"Out of time after {len(cases) - len(todo)} of {len(cases)} cases.")
                    todo.clear()
                    break
                number, (steps, family, dtype, weights) = todo.pop(0)
                spec = BlocksSpec(sources[family], job.device, dtype, weights, **STEPS[steps])
                running[executor.submit(_timed, spec, n_tokens)] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    took_s, row = future.result()
                except BrokenProcessPool:  # all that were running end so, whichever of their processes died
                    took_s, row = 0.0, {"status": "failed", "why": "a process that computed cases died"}
                    if todo:
                        record.leave(f"A process died: {len(todo)} of {len(cases)} cases were not begun.")
                        todo.clear()
                longest_s = max(longest_s, took_s)
                about = dict(zip(("steps", "family", "dtype", "weights"), cases[number], strict=True))
                found[number] = about | row
                record.put(cases=[found[number] for number in sorted(found)])
    _conclude(record)


def _n_processes(job: Job) -> int:
    if job.is_small or job.device == "cpu":
        return 1
    return max(1, min(_MOST_PROCESSES, n_cpus() // 2))


def _executor(n_processes: int) -> Executor:
    """Computes cases in so many new processes; one: in this process."""
    if n_processes == 1:
        return ThreadPoolExecutor(1, initializer=logging.disable_progress_bar)
    context = multiprocessing.get_context("spawn")  # a forked process could not use the device
    return ProcessPoolExecutor(n_processes, context, logging.disable_progress_bar)


def _timed(spec: BlocksSpec, n_tokens: int) -> tuple[float, dict[str, Any]]:
    """Returns the seconds that a case took, and its row."""
    began_at_s = time.monotonic()
    row = _served(spec, n_tokens)
    return time.monotonic() - began_at_s, row


def _made(family: str, is_small: bool, folder: Path) -> WeightSource:
    make_tiny(folder, configs(is_small)[family], seed=4, n_shards=3, is_deep=not is_small)
    return WeightSource(json.loads((folder / "config.json").read_text(encoding="utf-8")), str(folder))


def _served(spec: BlocksSpec, n_tokens: int) -> dict[str, Any]:
    try:
        BlocksCompute(spec).close()
    except ComputeError as error:  # what the device or the installation does not have
        return {"status": "not here", "why": str(error)}
    try:
        return asyncio.run(_case(spec, n_tokens))
    except ComputeError as error:
        return {"status": "failed", "why": str(error)}


async def _case(spec: BlocksSpec, n_tokens: int) -> dict[str, Any]:
    chance = random.Random(f"{spec.dtype} {spec.weights}")
    whole = WholeModel(dataclasses.replace(spec, n_streams=1))
    hub = BlocksHub(HubSpec(spec.source, spec.device, spec.dtype))
    with contextlib.closing(hub):
        servers = await start_servers(spec, hub.config.num_hidden_layers)
        with contextlib.closing(servers):
            prompts = [[chance.randrange(_VOCABULARY) for _ in range(_N_PROMPT + i)] for i in range(3)]
            sessions = [
                _generate(servers, hub, prompt, n, chance.random(), moves=n == n_tokens)
                for prompt, n in zip(prompts, lengths(n_tokens), strict=True)
            ]
            answers = await asyncio.gather(*sessions)
            found = [whole.judge(*pair) for pair in zip(prompts, answers, strict=True)]
            apart = await _states(
                servers, hub, whole, prompts[0] + answers[0][:-1], chance, 3 if spec.is_batched else 1
            )
            left_bytes = sum(compute.memory()["cache_bytes"] for compute in servers.computes)
            n_recorded = sum(compute.n_recorded for compute in servers.computes)
    is_recorded = n_recorded > 0 or not spec.has_graphs or hub.device.type == "cpu"
    is_right = apart <= TOLERANCES[spec.dtype] and not left_bytes and is_recorded
    n_altered, n_tied = (sum(len(getattr(one, kind)) for one in found) for kind in ("altered", "tied"))
    return {
        "status": "right" if is_right and not n_altered else "wrong",
        "n_tokens_checked": sum(map(len, answers)),
        "n_tokens_altered": n_altered,
        "n_tokens_tied": n_tied,
        "hidden_states_apart_ratio": apart,
        "cache_bytes_left": left_bytes,
        "n_recorded": n_recorded,
    }


def lengths(n_tokens: int) -> list[int]:
    """How many tokens the sessions have of which the longest has ``n_tokens``."""
    return [n_tokens * i // 3 for i in (3, 2, 1)]


async def _generate(
    servers: Servers, hub: BlocksHub, prompt: list[int], n_tokens: int, seed: float, *, moves: bool
) -> list[int]:
    chance = random.Random(seed)
    walk = Walk(hub, servers.chain(chance), prompt, n_tokens)
    with contextlib.closing(walk):
        if moves:
            await walk.go(n_tokens // 2)
            await walk.move(servers.chain(chance))
        await walk.go(n_tokens - len(walk.tokens))
    return walk.tokens


async def _states(
    servers: Servers,
    hub: BlocksHub,
    whole: WholeModel,
    tokens: list[int],
    chance: random.Random,
    n_walks: int,
) -> float:
    """Returns the largest difference of a chain's hidden states to the whole model's at the end of any hop,
    relative to the largest value; infinite if there is a nan.

    The chain computes the first half of ``tokens`` at once and the others one after another, as it decodes, the
    whole model all at once. ``n_walks`` sessions do so at the same time.
    """
    chain = servers.chain(chance)
    theirs = _block_outputs(whole, tokens)
    half = len(tokens) // 2
    parts = (tokens[:half], *([token] for token in tokens[half:]))
    apart = 0.0
    for steps in await asyncio.gather(*(_walked(hub, chain, parts) for _ in range(n_walks))):
        for (_, _, last), answers in zip(chain, zip(*steps, strict=True), strict=True):
            answer = b"".join(answers)
            states = from_bytes([answer], len(tokens), hub.dtype, hub.device).float()
            expected = theirs[last - 1]
            ratio = float((states - expected).abs().max() / expected.abs().max())
            apart = max(apart, math.inf if math.isnan(ratio) else ratio)
    return apart


async def _walked(hub: BlocksHub, chain: Sequence[Hop], parts: Sequence[list[int]]) -> list[list[bytes]]:
    """Returns the results of each hop for the steps of one session, which computes ``parts`` one after another."""
    walk = Walk(hub, chain, [token for part in parts for token in part], 1)
    with contextlib.closing(walk):
        return [await walk.forward(hub.embed(part)) for part in parts]


def _block_outputs(whole: WholeModel, tokens: list[int]) -> list[torch.Tensor]:
    """Returns the hidden states ``[tokens, hidden size]`` after each block, in float32."""
    base = whole.model.base_model
    outputs: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        outputs.append(states.reshape(len(tokens), -1).float())

    hooks = [
        block.register_forward_hook(keep)
        for block in getattr(base, family_named(whole.config.model_type).blocks)
    ]
    try:
        with torch.inference_mode():
            base(torch.tensor([tokens], device=whole.device))
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _conclude(record: Record) -> None:
    rows = record.values["cases"]
    tried = [row for row in rows if row["status"] in ("right", "wrong")]
    missing = sorted({f"{row['dtype']}/{row['weights']}" for row in rows if row["status"] == "not here"})
    if tried:
        checked, altered, tied = (
            sum(row[f"n_tokens_{kind}"] for row in tried) for kind in ("checked", "altered", "tied")
        )
        record.find(
            f"{len(tried)} combinations of family, dtype, weights and kind of steps: {checked - altered} of {checked} tokens are those of "
            f"transformers on this device, {tied} of them by a tie of two logits."
        )
        for dtype in DTYPES:
            apart = [row["hidden_states_apart_ratio"] for row in tried if row["dtype"] == dtype]
            if apart:
                record.find(
                    f"Hidden states in {dtype}: at most {max(apart):.2g} of the largest apart, "
                    f"{TOLERANCES[dtype]:g} allowed."
                )
        if many := too_many_ties(checked, tied):
            record.fail(f"{many}.")
    if missing:
        record.find(f"Not here: {', '.join(missing)}.")
    for row in rows:
        what = f"{row['family']} in {row['dtype']}/{row['weights']}, {row['steps']}"
        if row["status"] == "failed":
            record.fail(f"{what}: {row['why']}.")
        elif row["status"] == "wrong" and row["n_recorded"] == 0 and row["steps"] == "graphs":
            record.fail(f"{what}: no step was recorded; the log of this part says why.")
        elif row["status"] == "wrong":
            record.fail(f"{what}: not what transformers computes.")
    if not tried and not record.unreached:
        record.fail("Nothing could be computed.")
