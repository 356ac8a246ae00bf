import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testbed.errors import ScenarioError
from testbed.scenario import load_experiment
from testbed.scenario.problems import KeyedError
from testbed.scenario.traces import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:05.4799600,396,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
118,ChatGPT,417,276,693,Conversation log
"""


def _file(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46]}\n\n'
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}\n'
    )
    assert read_trace(_file(tmp_path, lines)) == [[0, 6955, 52], [pytest.approx(3.053), 6472, 26]]


def test_qwen_bailian_lines_count_seconds(tmp_path: Path) -> None:
    turns = [
        {
            "chat_id": 1,
            "parent_chat_id": -1,
            "timestamp": 61.2,
            "input_length": 30,
            "output_length": 7,
            "turn": 1,
        },
        {
            "chat_id": 2,
            "parent_chat_id": 1,
            "timestamp": 63.7,
            "input_length": 45,
            "output_length": 9,
            "turn": 2,
        },
    ]
    path = tmp_path / "bailian.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    assert read_trace(path) == [[0.0, 30, 7], [pytest.approx(2.5), 45, 9]]


def test_azure_rows_are_read(tmp_path: Path) -> None:
    assert read_trace(_file(tmp_path, AZURE)) == [[0, 374, 44], [pytest.approx(1.5), 396, 109]]


def test_a_byte_order_mark_and_time_zones_do_no_harm(tmp_path: Path) -> None:
    text = "\ufeff" + AZURE.replace("9799600,", "979960+00:00,")
    assert read_trace(_file(tmp_path, text))[1] == [pytest.approx(1.5), 396, 109]


def test_burstgpt_rows_without_tokens_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_trace(_file(tmp_path, BURSTGPT)) == [[0, 472, 18], [113, 417, 276]]
    assert "left out 1 of 3 requests that have no input or no output tokens" in caplog.text


def test_requests_out_of_order_are_sorted(tmp_path: Path) -> None:
    header, first, second = AZURE.splitlines()
    assert read_trace(_file(tmp_path, "\n".join([header, second, first])))[0][1] == 374


def test_the_requests_of_a_run_are_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    columns = {"arrival_at_s": [0.5, 2.0], "n_input_tokens": [20, 21], "n_output_tokens": [5, 6], "x": [1, 2]}
    pq.write_table(pa.table(columns), path)
    assert read_trace(path) == [[0, 20, 5], [1.5, 21, 6]]
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(KeyedError, match="cannot be read as requests of a run"):
        read_trace(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(KeyedError, match="cannot be read as requests of a run"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "is no known trace"),
        ("", "is no known trace"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1 cannot be read: no 'output_length'"),
        ('{"timestamp": \n', "line 1 cannot be read"),
        (AZURE.replace("396", "many"), "line 3 cannot be read"),
        (AZURE.splitlines()[0], "holds no request"),
        (BURSTGPT.replace("45.5", "nan"), "line 3 cannot be read: arrival nan is not a finite time"),
    ],
)
def test_a_bad_trace_is_refused_with_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(KeyedError) as caught:
        read_trace(_file(tmp_path, text, "bad"))
    assert said in caught.value.what
    assert "bad" in caught.value.what


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "line 1 cannot be read: it is nested too deeply"),
        ("1" + "0" * 30, "line 1 cannot be read: 1e+30 tokens are more than 10,000,000"),
        ("1e999", "line 1 cannot be read: cannot convert float infinity to integer"),
    ],
    ids=["deep", "large", "infinite"],
)
def test_a_trace_with_an_absurd_value_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    line = f'{{"timestamp": 1, "input_length": 3, "output_length": {text}}}\n'
    with pytest.raises(KeyedError) as caught:
        read_trace(_file(tmp_path, line, "bad"))
    assert said in caught.value.what


def test_a_trace_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(KeyedError, match="No such file or directory"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(KeyedError, match="neither text nor Parquet"):
        read_trace(tmp_path / "binary")


def test_a_trace_keeps_what_the_file_would_replace_where_an_option_says_so(tmp_path: Path) -> None:
    trace = _file(tmp_path, AZURE, "azure.csv")
    options = ["workload.arrivals=trace", f"workload.file={trace}"]
    as_recorded = [
        f"workload.{key}=trace" for key in ("rate", "n_requests", "n_input_tokens", "n_output_tokens")
    ]
    plans = load_experiment("clustered", [*options, *as_recorded]).requests
    assert [(r.arrival_at_s, r.n_input_tokens, r.n_output_tokens) for r in plans] == [
        (0.0, 374, 44),
        (pytest.approx(1.5), 396, 109),
    ]
    with pytest.raises(ScenarioError, match=r'workload\.rate: may only be "trace" with arrivals'):
        load_experiment("clustered", ["workload.rate=trace"])
