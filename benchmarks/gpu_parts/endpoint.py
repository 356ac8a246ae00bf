"""A whole checkpoint on three servers that share the device, behind the endpoint, with OpenAI's own client.

The model has the size of BLOOM-560m and random weights; at small size it is a tiny one. With ``--checkpoint`` it
is that one, and is asked in words. Streamed texts must be those of the run's tokens. At its end the run compares
these with the whole checkpoint's, on the same device.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.gpu_parts.commands import serving
from benchmarks.gpu_parts.here import GUESSED, SITE, one_place
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, launch_bound_model, model_in, model_of
from nodes.blocks.tiny import make_tiny
from testbed.results.logs import read_logs
from testbed.results.verified import VERIFY

_N_SERVERS, _N_STREAMS = 3, 3
_PROMPT = tuple(range(10, 30))
_QUESTIONS = ("The capital of France is", "Water boils at a temperature of", "Once upon a time there was")


def run(record: Record) -> None:
    job = record.job
    if importlib.util.find_spec("openai") is None:
        record.find("Not here: OpenAI's client (pip install openai).")
        return
    n_tokens = 16 if job.is_small else 96
    folder = job.folder / "endpoint"
    folder.mkdir()
    if job.checkpoint is not None:
        checkpoint, model = job.checkpoint, model_in(job.checkpoint)
    else:
        checkpoint, model = folder / "model", model_of(job) if job.is_small else launch_bound_model()
        make_tiny(checkpoint, model.config, seed=4, n_shards=3)
    scenario = folder / "scenario.toml"
    scenario.write_text(tomli_w.dumps(_scenario(model, n_tokens)), encoding="utf-8")
    record.put(model=model.name, dtype=model.dtype, n_tokens=n_tokens)
    options = ["--compute", "blocks", "--model", str(checkpoint), "--set", f"compute.device={job.device}"]
    options += ["--set", f"compute.dtype={model.dtype}"]
    with serving(scenario, folder / "run", options, job.left_s) as url:
        texts = _ask(record, url, n_tokens)
    _compare(record, checkpoint, folder / "run", model, texts)


def _scenario(model: Model, n_tokens: int) -> dict[str, Any]:
    """Returns a scenario in which each server has memory for a third of the blocks, one more, and the
    sessions.
    """
    n_each = model.n_blocks // _N_SERVERS + 1
    room = n_each * (model.block_bytes("plain") + 8 * model.cache_bytes(len(_PROMPT) + n_tokens))
    return {
        "name": "gpu-endpoint",
        "model": {},
        "servers": [{"hardware": "shared", "site": SITE, "count": _N_SERVERS}],
        "hardware": {"shared": {**GUESSED, "memory": f"{round(1.05 * room)} B"}},
        **one_place(),
        "policy": {"name": "proposed", "design_concurrency": _N_STREAMS},
        "workload": {"n_input_tokens": len(_PROMPT), "n_output_tokens": n_tokens, "n_requests": 1, "rate": 1},
    }


def _ask(record: Record, url: str, n_tokens: int) -> list[str]:
    """Requests the streams one after another, and records when their events arrived. Returns their texts."""
    import openai

    texts = []
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        for number in range(_N_STREAMS):
            sent_at_s, came_at_s, text = time.monotonic(), [], ""
            prompt = (
                [token + number for token in _PROMPT] if record.job.checkpoint is None else _QUESTIONS[number]
            )
            for chunk in client.completions.create(
                model=name,
                prompt=prompt,
                max_tokens=n_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                if chunk.choices:
                    came_at_s.append(time.monotonic() - sent_at_s)
                    text += chunk.choices[0].text
            texts.append(text)
            record.append(
                "streams", {"n_events": len(came_at_s), "ttft_s": came_at_s[0], "came_at_s": came_at_s}
            )
    return texts


def _compare(record: Record, checkpoint: Path, run_dir: Path, model: Model, texts: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    own_texts = [
        tokenizer.decode([token.token_id for token in request.tokens], skip_special_tokens=True)
        for request in read_logs(run_dir).requests
    ]
    n_equal = sum(text == own for text, own in zip(texts, own_texts, strict=True))
    found = json.loads((run_dir / VERIFY).read_text(encoding="utf-8"))
    record.put(n_equal=n_equal, texts=texts, tokens=found)
    last = record.values["streams"][-1]
    gap_s = (last["came_at_s"][-1] - last["ttft_s"]) / max(1, last["n_events"] - 1)
    record.find(
        f"A checkpoint of {model.name}'s size on {_N_SERVERS} servers: {n_equal} of {len(texts)} texts that "
        "were "
        "streamed to OpenAI's client are those of the run's tokens; "
        f"first event after {1e3 * last['ttft_s']:.4g} ms, then one each {1e3 * gap_s:.4g} ms."
    )
    if n_equal < len(texts):
        record.fail(f"{len(texts) - n_equal} texts are not those of the run's tokens.")
    record.say_tokens(found)
