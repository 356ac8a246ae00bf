"""``testbed serve`` with real blocks: the text is the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.blocks import need_blocks
from tests.support.runs import rows_of
from tests.support.serving import serving

need_blocks()

OPTIONS = ("--compute", "blocks", "--network", "loopback", "--no-report", "--no-twin")
PROMPT = "The chain of servers"


@pytest.mark.parametrize("temperature", [0, 0.8], ids=["greedy", "sampled"])
def test_the_text_is_that_of_the_whole_model(temperature: float, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with serving(tmp_path / "run", "bloom-tiny", *OPTIONS) as testbed:
        body = {
            "model": testbed.ask("/v1/models").json["data"][0]["id"],
            "prompt": PROMPT,
            "max_tokens": 16,
            "temperature": temperature,
            "seed": 11,
            "ignore_eos": True,
        }
        whole = testbed.ask("/v1/completions", body).json
        events = testbed.ask("/v1/completions", {**body, "stream": True}).events
        said = testbed.end()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    torch.manual_seed(11)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    expected = model.generate(ids, max_new_tokens=16, eos_token_id=None, **how)[0, ids.shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert whole["choices"][0]["text"] == text
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert whole["usage"] == {
        "prompt_tokens": ids.shape[1],
        "completion_tokens": 16,
        "total_tokens": ids.shape[1] + 16,
    }
    first, second = rows_of(tmp_path / "run" / "requests.parquet")
    assert list(first["token_ids"]) == list(second["token_ids"]) == expected.tolist()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (32, 0), said
