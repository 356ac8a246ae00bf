"""Prompts that begin alike, as Mooncake's and Qwen-Bailian's traces record them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nodes.hub import StubHub
from nodes.prefixes import page_ids, split_ids
from nodes.request import Generation, Request, known_answer, made_up_prompt
from policies.workload import RequestPlan, Turn
from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.prompts import implied_reuse
from testbed.inspect.workload import show_command

REPLAY = ("cache.prefix=shared", "workload.rate=trace", "workload.n_requests=trace")


@pytest.fixture
def traced(tmp_path: Path, small: str) -> Path:
    path = tmp_path / "traced.toml"
    path.write_text(
        small[: small.index("[workload]")] + '[workload]\narrivals = "trace"\nfile = "trace.jsonl"\n'
    )
    return path


def write(traced: Path, lines: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps({"output_length": 3, **line}) + "\n" for line in lines)
    (traced.parent / "trace.jsonl").write_text(text)


def loaded(traced: Path, *options: str) -> Experiment:
    return load_experiment(str(traced), (*REPLAY, *options))


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "hash_ids": [7, 8, 9]},
    {"timestamp": 1000, "input_length": 1600, "hash_ids": [7, 8, 30, 31]},
    {"timestamp": 2000, "input_length": 1024, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 600, "hash_ids": [50, 8]},
]


def test_mooncakes_blocks_say_which_prompts_begin_alike(traced: Path) -> None:
    """Of two whole blocks the last page is computed if nothing follows; a block after another one is not the same."""
    write(traced, MOONCAKE)
    requests = loaded(traced).workload.requests
    assert [r.block_ids for r in requests] == [(7, 8, 9), (7, 8, 30, 31), (7, 8), (50, 8)]
    assert implied_reuse(requests, 16) == [0, 1024, 1008, 0]
    assert implied_reuse(requests, 512) == [0, 1024, 512, 0]
    answer, text = show_command(traced.parent / "trace.jsonl")
    assert answer["prefix"] == {"tokens_reused": 2032, "hit_ratio": 2032 / 4324}
    assert "46.99% of the input tokens begin as an earlier prompt did" in text


def test_what_ids_imply_is_what_pages_of_the_stubs_tokens_have_in_common() -> None:
    rng = random.Random(3)
    plans = []
    for index in range(60):
        n_blocks = rng.randint(1, 5)
        ids = tuple(100 * at + rng.randint(0, 1) for at in range(n_blocks))
        plans.append(
            RequestPlan(index, 0, 0.0, rng.randint(8 * n_blocks - 7, 8 * n_blocks), 1, None, None, ids, 8)
        )
    seen: set[bytes] = set()
    found = []
    for plan in plans:
        tokens = StubHub(8, 1).sequence(Request.of(plan, Generation())).tokens
        pages, n_found = split_ids(page_ids(tokens, 4)), 0
        while n_found < min(len(pages), (len(tokens) - 1) // 4) and pages[n_found] in seen:
            n_found += 1
        found.append(4 * n_found)
        seen.update(pages)
    assert implied_reuse(plans, 4) == found and sum(found) > 0


def test_bailians_chats_are_conversations_with_turns(traced: Path) -> None:
    def chat(at_s: int, number: int, parent: int, turn: int, *ids: int) -> dict[str, Any]:
        lengths = {"timestamp": at_s, "input_length": 16 * len(ids)}
        return {**lengths, "chat_id": number, "parent_chat_id": parent, "turn": turn, "hash_ids": ids}

    write(
        traced,
        [
            chat(0, 5, -1, 1, 1, 2),
            chat(1, 6, -1, 1, 9),
            chat(2, 7, 5, 2, 1, 2, 3),
            chat(3, 8, 7, 3, 1, 2, 3, 4),
        ],
    )
    experiment = loaded(traced)
    requests = experiment.workload.requests
    assert [r.turn for r in requests] == [Turn(0, 0), Turn(1, 0), Turn(0, 1), Turn(0, 2)]
    assert implied_reuse(requests, 16) == [0, 0, 32, 48]
    path = traced.parent / "again.toml"
    path.write_text(dump_toml(experiment))
    assert load_experiment(str(path)).workload.requests == requests


def test_without_kept_caches_the_ids_are_left_out(traced: Path) -> None:
    write(traced, MOONCAKE)
    assert [r.block_ids for r in loaded(traced, "cache.prefix=none").workload.requests] == 4 * [()]


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ({"input_length": 1100, "hash_ids": [7, 8]}, (), ""),
        ({"input_length": 300, "hash_ids": []}, (), ""),
        (
            {"input_length": 1100, "hash_ids": [7]},
            (),
            "the request 0 s after the first contradicts itself: hash_ids has 1 blocks, but a prompt of 1100 tokens has 3 of 512",
        ),
        ({"input_length": 9, "hash_ids": "x"}, (), 'hash_ids must be a list of whole numbers, not "x"'),
        ({"input_length": 9}, (), "the trace needs hash_ids"),
        ({"input_length": 9, "hash_ids": [1]}, ("workload.n_input_tokens=5",), "its own lengths of prompts"),
    ],
)
def test_ids_that_contradict_lengths_or_are_not_there_are_refused_in_a_sentence(
    traced: Path, line: dict[str, Any], options: tuple[str, ...], said: str
) -> None:
    write(traced, [{"timestamp": 0, **line}, {"timestamp": 9, **line}])
    if not said:
        assert len(loaded(traced, *options).workload.requests) == 2
        return
    with pytest.raises(ScenarioError) as refused:
        loaded(traced, *options)
    assert said in str(refused.value)


ANSWERED = (
    'workload={arrivals="listed", requests=[[0, 20, 14], [5, 40, 3]], prompts=[[-1, -1, 4], [-1, -1, 4, 6]], '
    "prompt_block=16, answers=[[6], []]}"
)


def test_an_answers_blocks_are_known_when_it_has_ended(traced: Path) -> None:
    """They begin with the rest of the prompt; what the twin of an endpoint's run reuses by them."""
    loaded_again = load_experiment(str(traced), ("cache.prefix=shared", ANSWERED))
    first, second = loaded_again.workload.requests
    assert (first.block_ids, first.answer_ids, second.answer_ids) == ((4,), (6,), ())
    assert made_up_prompt(first, ()) == made_up_prompt(second, ())[:20]
    assert made_up_prompt(first, ()) + known_answer(first) == made_up_prompt(second, ())[:32]
    path = traced.parent / "again.toml"
    path.write_text(dump_toml(loaded_again))
    assert load_experiment(str(path)).workload.requests == loaded_again.workload.requests


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("[[6], []]", "[[6]]", "answers: has 1 rows, and there are 2 requests; give one for each"),
        ("[[6], []]", "[[6, 7], []]", "answers.0: must be at most 1 ids of blocks, whole numbers, not [6, 7]"),
        ("[[6], []]", '["x", []]', 'answers.0: must be at most 1 ids of blocks, whole numbers, not "x"'),
        ("[-1, -1, 4],", "[-1, -1, 4, 5],", "answers.0: comes after a prompt that does not end with its last whole block"),
        ('prompts=[[-1, -1, 4], [-1, -1, 4, 6]], prompt_block=16, ', "", "is of workload.prompts"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_are_refused_in_a_sentence(
    traced: Path, before: str, after: str, said: str
) -> None:
    wrong = ANSWERED.replace(before, after)
    assert wrong != ANSWERED
    with pytest.raises(ScenarioError) as refused:
        load_experiment(str(traced), ("cache.prefix=shared", wrong))
    assert said in str(refused.value)
