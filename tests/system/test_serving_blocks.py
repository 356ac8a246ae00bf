"""``testbed serve`` with real blocks: the text is the model's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.blocks import need_blocks
from tests.support.runs import rows_of
from tests.support.serving import serving

need_blocks()

OPTIONS = ("--compute", "blocks", "--network", "loopback", "--no-report", "--no-twin")
PROMPT = "The chain of servers"
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}


@dataclass(frozen=True)
class Asked:
    """What one endpoint answered, whole and as a stream, by the name of the temperature, and how its run ended."""

    run_dir: Path
    whole: dict[str, Any]
    events: dict[str, list[Any]]
    said: str


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    run_dir = tmp_path_factory.mktemp("serving") / "run"
    whole, events = {}, {}
    with serving(run_dir, "bloom-tiny", *OPTIONS) as testbed:
        model = testbed.ask("/v1/models").json["data"][0]["id"]
        for name, temperature in TEMPERATURES.items():
            body = {
                "model": model,
                "prompt": PROMPT,
                "max_tokens": 16,
                "temperature": temperature,
                "seed": 11,
                "ignore_eos": True,
            }
            whole[name] = testbed.ask("/v1/completions", body).json
            events[name] = testbed.ask("/v1/completions", {**body, "stream": True}).events
        return Asked(run_dir, whole, events, testbed.end())


@pytest.mark.parametrize("name", TEMPERATURES)
def test_the_text_is_that_of_the_whole_model(name: str, asked: Asked) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.run_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(asked.run_dir / "model").eval()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    torch.manual_seed(11)
    temperature = TEMPERATURES[name]
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    expected = model.generate(ids, max_new_tokens=16, eos_token_id=None, **how)[0, ids.shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert asked.whole[name]["choices"][0]["text"] == text
    assert "".join(event["choices"][0]["text"] for event in asked.events[name][:-1]) == text
    assert asked.whole[name]["usage"] == {
        "prompt_tokens": ids.shape[1],
        "completion_tokens": 16,
        "total_tokens": ids.shape[1] + 16,
    }
    begin = 2 * list(TEMPERATURES).index(name)
    first, second = rows_of(asked.run_dir / "requests.parquet")[begin : begin + 2]
    assert list(first["token_ids"]) == list(second["token_ids"]) == expected.tolist()


def test_the_run_compares_every_token_with_the_whole_models(asked: Asked) -> None:
    summary = json.loads((asked.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (4 * 16, 0), asked.said
