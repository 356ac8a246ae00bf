"""Recorded conversations as workloads: ShareGPT's texts, and sessions as AIPerf replays them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.problems import KeyedError
from testbed.experiments.traces import read_trace
from testbed.inspect.workload import show_command

SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 40},
            {"from": "gpt", "value": "y" * 21},
            {"from": "human", "value": "z"},
            {"from": "gpt", "value": "w" * 8},
        ],
    },
    {
        "id": "b",
        "conversations": [
            {"from": "system", "value": "s" * 4},
            {"from": "human", "value": "q" * 8},
            {"from": "gpt", "value": "a" * 12},
            {"from": "human", "value": "never answered"},
        ],
    },
]
SESSIONS = [
    {"session_id": "a", "timestamp": 1000, "input_length": 30, "output_length": 5},
    {"session_id": "b", "timestamp": 4000, "text": "x" * 80, "output_length": 7},
    {"session_id": "a", "delay": 2500, "input_length": 4, "output_length": 6},
    {"session_id": "b", "timestamp": 9000, "input_length": 3, "output_length": 2},
]
"""The second turn of a comes 2.5 s after an answer, that of b 5 s, as there were between the two timestamps."""
FROM_FILE = (
    "clustered",
    (
        *("workload.n_requests=trace", "workload.rate=trace", "workload.arrivals=trace"),
        *("workload.n_input_tokens=trace", "workload.n_output_tokens=trace"),
    ),
)


def written(folder: Path, rows: Sequence[Any], *, is_list: bool = False) -> Path:
    path = folder / "talks"
    path.write_text(json.dumps(rows) if is_list else "".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("is_list", [True, False])
def test_sharegpt_is_read_as_a_list_or_in_lines_with_four_characters_a_token(
    tmp_path: Path, is_list: bool
) -> None:
    trace = read_trace(written(tmp_path, SHAREGPT, is_list=is_list))
    assert trace.kind == "ShareGPT"
    assert trace.requests == [[0, 10, 6], [0, 17, 2], [0, 3, 3]]
    assert trace.places == [(0, 0, 0.0), (0, 1, 0.0), (1, 0, 0.0)]


def test_sessions_begin_at_their_times_and_go_on_after_answers(tmp_path: Path) -> None:
    path = written(tmp_path, SESSIONS)
    trace = read_trace(path)
    assert trace.requests == [[0, 30, 5], [2.5, 39, 6], [3.0, 20, 7], [8.0, 30, 2]]
    experiment = load_experiment(FROM_FILE[0], (*FROM_FILE[1], f"workload.file={path}"))
    turns = [request.turn for request in experiment.workload.requests]
    assert [(t.conversation, t.number, t.after, t.think_s) for t in turns if t] == [
        *((0, 0, None, 0.0), (0, 1, 0, 2.5), (1, 0, None, 0.0), (1, 1, 2, 5.0))
    ]
    assert len({request.client for request in experiment.workload.requests if request.turn}) <= 8
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(experiment))
    assert load_experiment(str(again)).workload.requests == experiment.workload.requests
    assert "2 conversations, 2.0 turns each" in show_command(path)[1]


def test_a_line_may_be_a_whole_session(tmp_path: Path) -> None:
    turns = [{"text": "abcd", "output_length": 3}, {"texts": ["ab", "cd"], "delay": 500, "output_length": 1}]
    trace = read_trace(written(tmp_path, [{"session_id": 7, "turns": turns}]))
    assert trace.requests == [[0, 1, 3], [0.5, 6, 1]] and trace.places[1].think_s == 0.5


def test_conversations_without_times_begin_at_generated_ones(tmp_path: Path) -> None:
    path = written(tmp_path, SHAREGPT)
    options = (
        f"workload.file={path}",
        "workload.rate=0.5",
        "workload.n_requests=20",
        "workload.think_time=3 s",
    )
    options = (*options, "workload.n_input_tokens=trace", "workload.n_output_tokens=trace")
    experiment = load_experiment("clustered", (*options, "cache.prefix=session"))
    requests = experiment.workload.requests
    assert len(requests) == 20
    assert {(r.n_input_tokens, r.n_output_tokens) for r in requests} == {(10, 6), (17, 2), (3, 3)}
    for before, request in pairwise(requests):
        assert request.turn is not None
        if request.turn.number:
            assert (request.turn.after, request.turn.think_s) == (before.index, 3.0)
            assert request.client == before.client
    assert "conversations drawn from the 2 of ShareGPT trace talks" in experiment.workload.source
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(experiment))
    assert load_experiment(str(again)).workload.requests == requests


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"session_id": 1, "output_length": 3}],
            "line 1 cannot be read: a turn needs input_length, or one of",
        ),
        ([{"session_id": 1, "text": "a"}], "line 1 cannot be read: no 'output_length'"),
        ([{"session_id": [1], "text": "a"}], "session_id must be text or a number, not [1]"),
        ([SESSIONS[0], {**SESSIONS[2], "delay": -1}], "line 2 cannot be read: a delay of -0.001 s is none"),
        (
            [{"conversations": [{"from": "x", "value": "a"}]}],
            'line 1 cannot be read: from is "x"; known are human',
        ),
        ([{"conversations": {}}], 'line 1 cannot be read: it has no list "conversations"'),
        ([{"conversations": [{"from": "human", "value": 3}]}], "a text must be a string, not 3"),
        ([{"conversations": []}], "holds no request with input and output tokens"),
    ],
)
def test_a_bad_conversation_is_refused_in_a_sentence(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(KeyedError) as refused:
        read_trace(written(tmp_path, rows))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (FROM_FILE[1], 'workload.arrivals: is "trace", and the conversations of'),
        (
            ("workload.n_input_tokens=5", "workload.n_output_tokens=trace"),
            "workload.n_input_tokens: is given, and",
        ),
        (
            ("workload.conversations=[[0,0]]",),
            "workload.conversations: is of listed requests or request_lengths",
        ),
    ],
)
def test_bad_keys_of_recorded_conversations_are_refused_in_a_sentence(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    path = written(tmp_path, SHAREGPT)
    file = () if "conversations=" in options[0] else (f"workload.file={path}",)
    with pytest.raises(UserError) as refused:
        load_experiment("clustered", (*file, *options))
    assert said in str(refused.value)
