import gzip
import json
import logging
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scenarios
from testbed.errors import ScenarioError, UserError
from testbed.experiments import dump_toml, load_experiment, traces
from testbed.experiments.problems import KeyedError
from testbed.experiments.traces import read_trace
from testbed.inspect.workload import make_command, show_command

SCENARIOS = Path(scenarios.__file__).parent
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
    assert read_trace(_file(tmp_path, lines)).requests == [[0, 6955, 52], [pytest.approx(3.053), 6472, 26]]


def test_blank_lines_spaces_in_a_header_and_commas_at_the_end_do_no_harm(tmp_path: Path) -> None:
    line = '\n \n{"timestamp": 0, "input_length": 5, "output_length": 6}\n'
    assert read_trace(_file(tmp_path, line)).requests == [[0, 5, 6]]
    azure = read_trace(_file(tmp_path, AZURE)).requests
    assert read_trace(_file(tmp_path, "\n  \n" + AZURE)).requests == azure
    assert read_trace(_file(tmp_path, AZURE.replace(",", ", "))).requests == azure
    assert read_trace(_file(tmp_path, AZURE.replace("109", "109,"))).requests == azure
    with pytest.raises(KeyedError, match="line 4 cannot be read: ContextTokens must be a number, not"):
        read_trace(_file(tmp_path, "\n\n" + AZURE.replace("374", "x")))


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
    assert read_trace(path).requests == [[0.0, 30, 7], [pytest.approx(2.5), 45, 9]]


def test_azure_rows_are_read(tmp_path: Path) -> None:
    assert read_trace(_file(tmp_path, AZURE)).requests == [[0, 374, 44], [pytest.approx(1.5), 396, 109]]


@pytest.fixture(params=["UTC0", "CET-1CEST,M3.5.0,M10.5.0/3"], ids=["UTC", "Berlin"])
def time_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The machine's time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.usefixtures("time_zone")
def test_a_byte_order_mark_and_time_zones_do_no_harm(tmp_path: Path) -> None:
    header, first, second = AZURE.splitlines()
    text = "\ufeff" + AZURE
    assert read_trace(_file(tmp_path, text)).requests[1] == [pytest.approx(1.5), 396, 109]
    first, second = (
        re.sub(r"\d,", "+00:00,", line, count=1) for line in (first, second)
    )  # six digits, and a zone
    zoned = "\n".join([header, first, second])
    assert read_trace(_file(tmp_path, zoned)).requests[1] == [pytest.approx(1.5), 396, 109]
    mixed = "\n".join([header, first, AZURE.splitlines()[2]])
    with pytest.raises(KeyedError, match="line 3 cannot be read: some times have a zone and others do not"):
        read_trace(_file(tmp_path, mixed))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("10.7", "must be a whole number, not 10.7"),
        ('"10.7"', 'must be a whole number, not "10.7"'),
        ("true", "must be a number, not true"),
        ("null", "is missing"),
        ('""', "is missing"),
        ("[1]", "must be a number, not [1]"),
    ],
)
def test_lengths_are_whole_numbers_in_every_format(tmp_path: Path, value: str, said: str) -> None:
    line = f'{{"timestamp": 0, "input_length": {value}, "output_length": 5}}\n'
    with pytest.raises(KeyedError) as caught:
        read_trace(_file(tmp_path, line))
    assert caught.value.what.endswith(f"line 1 cannot be read: input_length {said}")
    text = str(json.loads(value)) if value not in ("null", "[1]") else ""
    rows = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,5,5\n2024-01-01 00:00:01,{text},5\n"
    with pytest.raises(KeyedError, match="line 3 cannot be read: ContextTokens"):
        read_trace(_file(tmp_path, rows))
    if value in ("10.7", "true", "null"):
        path = tmp_path / "requests.parquet"
        columns = {"arrival_at_s": [0.5], "n_input_tokens": [json.loads(value)], "n_output_tokens": [5]}
        pq.write_table(pa.table(columns), path)
        with pytest.raises(KeyedError, match=f"line 1 cannot be read: n_input_tokens {said}"):
            read_trace(path)


def test_whole_numbers_may_be_written_with_a_fraction_of_zero(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 10.0, "output_length": "5"}\n'
    assert read_trace(_file(tmp_path, line)).requests == [[0, 10, 5]]
    text = BURSTGPT.replace(",472,", ",472.0,")
    assert text != BURSTGPT
    assert read_trace(_file(tmp_path, text)).requests[0] == [0, 472, 18]


@pytest.mark.usefixtures("time_zone")
def test_times_are_as_far_apart_when_summer_time_begins(tmp_path: Path) -> None:
    rows = ["2024-03-31 01:59:00,5,5", "2024-03-31 03:01:00,5,5"]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    assert [row[0] for row in read_trace(_file(tmp_path, text)).requests] == [0, 62 * 60]


def test_burstgpt_rows_without_tokens_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_trace(_file(tmp_path, BURSTGPT)).requests == [[0, 472, 18], [113, 417, 276]]
    assert "left out 1 of 3 requests that have no input or no output tokens" in caplog.text


def test_requests_out_of_order_are_sorted(tmp_path: Path) -> None:
    header, first, second = AZURE.splitlines()
    assert read_trace(_file(tmp_path, "\n".join([header, second, first]))).requests[0][1] == 374


def test_the_requests_of_a_run_are_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    columns = {"arrival_at_s": [0.5, 2.0], "n_input_tokens": [20, 21], "n_output_tokens": [5, 6], "x": [1, 2]}
    pq.write_table(pa.table(columns), path)
    assert read_trace(path).requests == [[0, 20, 5], [1.5, 21, 6]]
    ends = {"status": ["completed", "failed"], "n_tokens_done": [3, 1]}  # the first text ended early
    pq.write_table(pa.table(columns | ends), path)
    assert read_trace(path).requests == [[0, 20, 3], [1.5, 21, 6]]
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(KeyedError, match="cannot be read as requests of a run"):
        read_trace(path)
    many = 65_540  # more than one batch of rows
    broken = {"arrival_at_s": [float(i) for i in range(many)], "n_input_tokens": [20] * (many - 1) + [None]}
    pq.write_table(pa.table({**broken, "n_output_tokens": [5] * many}), path)
    with pytest.raises(KeyedError, match=f"{many}"):
        read_trace(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(KeyedError, match="cannot be read as requests of a run"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "is not a known kind of trace"),
        ("", "is not a known kind of trace"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1 cannot be read: no 'output_length'"),
        ('\n{"timestamp": \n', "line 2 cannot be read: Expecting value"),
        ('[{"timestamp": 1, "input_length": 3, "output_length": 3}]', "write another format as JSON lines"),
        (AZURE.replace("396", "many"), "line 3 cannot be read"),
        (AZURE.replace("396", "1,000"), "line 3 cannot be read: it has more cells than the header"),
        (AZURE.replace("396", "-396"), "line 3 cannot be read: -396 tokens are fewer than 0"),
        (AZURE.splitlines()[0], "holds no request"),
        (BURSTGPT.replace("45.5", "nan"), "line 3 cannot be read: arrival nan is not a finite time"),
    ],
)
def test_a_bad_trace_is_refused_with_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(KeyedError) as caught:
        read_trace(_file(tmp_path, text, "bad"))
    assert said in caught.value.what
    assert "bad" in caught.value.what and "(char" not in caught.value.what


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "line 1 cannot be read: it is nested too deeply"),
        ("1" + "0" * 30, "line 1 cannot be read: 1e+30 tokens are more than 10,000,000"),
        ("1e999", "line 1 cannot be read: output_length must be a whole number, not inf"),
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
    plans = load_experiment("clustered", [*options, *as_recorded]).workload.requests
    assert [(r.arrival_at_s, r.n_input_tokens, r.n_output_tokens) for r in plans] == [
        (0.0, 374, 44),
        (pytest.approx(1.5), 396, 109),
    ]
    with pytest.raises(ScenarioError, match=r'workload\.rate: may only be "trace" with arrivals'):
        load_experiment("clustered", ["workload.rate=trace"])


@pytest.mark.parametrize(
    ("kind", "found"), [("azure", "Azure"), ("burstgpt", "BurstGPT"), ("mooncake", "Mooncake")]
)
def test_a_workload_that_is_written_as_a_trace_is_read_as_it_was(
    tmp_path: Path, kind: str, found: str
) -> None:
    file = tmp_path / "made"
    answer, text = make_command(
        file, "clustered", kind, ["workload.n_requests=30", "workload.n_input_tokens=77"]
    )
    assert (answer["kind"], answer["n_requests"]) == (found, 30)
    assert (answer["n_input_tokens"]["mean"], answer["n_output_tokens"]["max"]) == (77, 128)
    assert f"{found}, 30 requests" in text
    assert text.startswith(
        "requests of the scenario clustered, seed 0: poisson, 0.1 per second; input tokens 77"
    )
    assert f"requests of the scenario {answer['origin']}\n" in text
    replayed = load_experiment("trace-replay", [f"workload.file={file}"])
    made = load_experiment("clustered", ["workload.n_requests=30", "workload.n_input_tokens=77"])
    assert [r.arrival_at_s for r in replayed.workload.requests] == pytest.approx(
        [r.arrival_at_s for r in made.workload.requests], abs=1e-6
    )
    assert {(r.n_input_tokens, r.n_output_tokens) for r in replayed.workload.requests} == {(77, 128)}
    with pytest.raises(UserError, match="exists; give the name of a new file"):
        make_command(file, "clustered", kind, [])


def test_the_format_of_a_workload_follows_from_its_name(tmp_path: Path) -> None:
    found = [
        make_command(tmp_path / name, "clustered", kind, ["workload.n_requests=3"])[0]["kind"]
        for name, kind in (("w.jsonl", None), ("w.csv", None), ("azure.jsonl", "azure"))
    ]
    assert found == ["Mooncake", "Azure", "Azure"]


def test_the_shipped_trace_is_what_the_shipped_scenario_says_makes_it(tmp_path: Path) -> None:
    text = (SCENARIOS / "trace-replay.toml").read_text(encoding="utf-8")
    said = shlex.split(" ".join(line.removeprefix("#").strip(" \\") for line in text.splitlines()[2:6]))
    assert said[:3] == ["testbed", "workload", "make"]
    at = said.index("--like")
    overrides = [said[i + 1] for i, word in enumerate(said) if word == "--set"]
    make_command(
        tmp_path / "again.csv", said[at + 1], "azure", [f"seed={said[said.index('--seed') + 1]}", *overrides]
    )
    assert (tmp_path / "again.csv").read_bytes() == (SCENARIOS / "traces" / said[3]).read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Azure trace bursty-chat.csv; input tokens as recorded, output tokens as recorded"),
        (
            ["workload.n_requests=9", "workload.rate=2", "workload.n_output_tokens=5"],
            "Azure trace bursty-chat.csv, the first 9 of 100 requests, stretched to 2 per second; "
            "input tokens as recorded, output tokens 5",
        ),
    ],
)
def test_where_a_workload_comes_from_is_kept(options: list[str], said: str, tmp_path: Path) -> None:
    experiment = load_experiment("trace-replay", options)
    assert experiment.workload.source == said
    resolved = _file(tmp_path, dump_toml(experiment), "resolved.toml")
    assert load_experiment(str(resolved)).workload.source == said
    again = load_experiment(str(resolved), ["workload.rate=7"])
    assert again.workload.source.startswith(said.partition(";")[0] + ", stretched to 7 per second")


def test_a_generated_workload_is_described_as_it_is_now(tmp_path: Path) -> None:
    lengths = 'workload.n_input_tokens={distribution="uniform",low=3,high=5}'
    experiment = load_experiment("clustered", [lengths])
    assert experiment.workload.source == "poisson, 0.1 per second; input tokens 3 to 5, output tokens 128"
    resolved = _file(tmp_path, dump_toml(experiment), "resolved.toml")
    assert load_experiment(str(resolved), ["workload.rate=3"]).workload.source.startswith(
        "poisson, 3 per second;"
    )


@pytest.mark.parametrize(
    "text", [AZURE, BURSTGPT, '{"timestamp": 5, "input_length": 3, "output_length": 2}\n']
)
def test_text_packed_with_gzip_is_read_as_if_it_were_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read_trace(path) == read_trace(_file(tmp_path, text, "plain"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(AZURE.encode(), mtime=0)[:-9], "cannot be unpacked"),
        (b"\x1f\x8b and no more", "cannot be unpacked"),
        (gzip.compress(b"\xff\xfe" * 9, mtime=0), "is neither text nor Parquet"),
    ],
    ids=["cut short", "header alone", "not text"],
)
def test_a_trace_that_cannot_be_unpacked_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        show_command(path)


def test_arrivals_are_described_where_there_are_any_and_with_few_digits(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "yes"}, {"from": "gpt", "value": "no"}]
    _, text = show_command(_file(tmp_path, json.dumps([{"conversations": talk}])))
    assert "no arrivals: this format has no times" in text
    _, text = show_command(_file(tmp_path, BURSTGPT.replace("118", "1e300")))
    assert "arrivals over 1e+300 s" in text


def test_a_trace_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"x" * 100_000))
    monkeypatch.setattr(traces, "MAX_FILE_BYTES", 50_000)
    with pytest.raises(UserError, match="unpacks to more than 50,000 bytes"):
        show_command(path)


LONG = "".join(
    json.dumps({"timestamp": 1000 * i, "input_length": n, "output_length": 4, "hash_ids": []}) + "\n"
    for i, n in enumerate((9000, 20, 30, 70000, 40))
)
MOONCAKE = ("workload.arrivals=trace", *(f"workload.{key}=trace" for key in ("rate", "n_requests")))
LENGTHS = tuple(f"workload.{key}=trace" for key in ("n_input_tokens", "n_output_tokens"))


def test_recorded_prompts_that_are_too_long_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    file = f"workload.file={_file(tmp_path, LONG, 'long.jsonl')}"
    cut = load_experiment("clustered", [*MOONCAKE, *LENGTHS, file, "workload.max_input_tokens=100"])
    assert [(r.arrival_at_s, r.n_input_tokens) for r in cut.workload.requests] == [(0, 20), (1, 30), (3, 40)]
    said = "Mooncake trace long.jsonl without 2 of 5 requests, whose prompts have more than 100 tokens"
    assert cut.workload.source.startswith(said)
    again = load_experiment(str(_file(tmp_path, dump_toml(cut), "resolved.toml")))
    assert again.workload.requests == cut.workload.requests and again.workload.source == cut.workload.source
    every = load_experiment("clustered", [*MOONCAKE, *LENGTHS, file, "workload.max_input_tokens=70000"])
    assert len(every.workload.requests) == 5 and "without" not in every.workload.source
    with pytest.raises(ScenarioError, match="is 10, and every recorded prompt is longer"):
        load_experiment("clustered", [*MOONCAKE, *LENGTHS, file, "workload.max_input_tokens=10"])
    drawn = ["workload.n_requests=30", *LENGTHS, file, "workload.max_input_tokens=100"]
    assert {r.n_input_tokens for r in load_experiment("clustered", drawn).workload.requests} == {20, 30, 40}
    with pytest.raises(ScenarioError, match=r"is only for requests of a trace; name one in workload\.file"):
        load_experiment("clustered", ["workload.max_input_tokens=10"])
    listed = ["workload.arrivals=listed", "workload.requests=[[0, 1, 1], [1, 1, 1]]", "workload.rate=trace"]
    with pytest.raises(ScenarioError, match="is only for requests of a trace; leave it out"):
        load_experiment("clustered", [*listed, *LENGTHS, "workload.max_input_tokens=10"])


def test_lengths_that_are_known_of_before_are_of_recorded_requests_that_the_run_does_not_draw(
    tmp_path: Path,
) -> None:
    """No operator knows the lengths of what is about to come."""
    lines = [{"timestamp": 1000 * i, "input_length": 10 + i, "output_length": 4} for i in range(60)]
    path = _file(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "sixty.jsonl")
    options = ["workload.n_requests=30", *LENGTHS, f"workload.file={path}"]
    workload = load_experiment("clustered", options).document["workload"]
    drawn, known = ({n for n, _ in workload[key]} for key in ("request_lengths", "known_lengths"))
    assert drawn and known and drawn | known == set(range(10, 70))
    assert not drawn & known


@pytest.mark.parametrize("seed", range(3))
def test_what_is_known_of_before_a_window_came_before_it(tmp_path: Path, seed: int) -> None:
    lines = [{"timestamp": 1000 * i, "input_length": 10 + i, "output_length": 4} for i in range(60)]
    path = _file(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "sixty.jsonl")
    options = [*MOONCAKE[:2], "workload.n_requests=20", *LENGTHS, f"workload.file={path}", f"seed={seed}"]
    window = load_experiment("clustered", [*options, "workload.draw=windows"])
    first = window.workload.requests[0].n_input_tokens
    assert [n for n, _ in window.problem.length_samples] == list(range(10, first))
    assert load_experiment("clustered", options).problem.length_samples == (), (
        "nothing came before the first ones"
    )


def test_an_origin_of_ones_own_is_not_for_lengths_of_a_trace(tmp_path: Path) -> None:
    file = f"workload.file={_file(tmp_path, LONG, 'long.jsonl')}"
    with pytest.raises(
        ScenarioError, match="describes listed requests or lengths, but the workload has none"
    ):
        load_experiment("clustered", ["workload.n_requests=3", *LENGTHS, file, "workload.origin=mine"])
