from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments.changes import toml_text
from testbed.experiments.slo import Objectives
from testbed.experiments.sources import shipped_files, value_of
from testbed.studies.sweep.axes import (
    Span,
    checked_axis,
    combined,
    drawn_axis,
    parse_over,
    value_range,
)
from testbed.studies.sweep.study import Options, read_study


def values(text: str) -> list[str]:
    return [value for (value,) in parse_over(text).values]


def test_a_range_ends_with_its_end_and_no_value_drifts() -> None:
    assert values("workload.rate=0.1:0.7:0.1") == ["0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7"]
    assert values("workload.rate=0:1:0.4") == ["0", "0.4", "0.8"]
    assert values("servers.0.count=10:1:-3") == ["10", "7", "4", "1"]
    assert values("workload.rate=1e-3:3e-3:1e-3") == ["0.001", "0.002", "0.003"]
    assert values("workload.n_requests=100:300:100") == ["100", "200", "300"]
    assert len(value_range("0.1:2:0.1", "")) == 20


def test_a_list_is_split_outside_of_brackets_and_quotes() -> None:
    assert values('clients.site="a,b",Cluster1') == ['"a,b"', "Cluster1"]
    assert values("workload.rate=0.05, 1:2:0.5") == ["0.05", "1", "1.5", "2"]
    table = '{ distribution = "uniform", low = 1, high = 9 }'
    assert values(f"workload.n_input_tokens={table},20") == [table, "20"]


def test_names_with_colons_are_no_ranges() -> None:
    assert values("policy.placement=fixed:plan.json,module:Class") == ["fixed:plan.json", "module:Class"]
    assert values("network.file=a:b:c") == ["a:b:c"]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("workload.rate", "must have the form KEY=VALUES"),
        ("=1,2", "must have the form KEY=VALUES"),
        ("workload.rate=", "must have the form KEY=VALUES"),
        ("workload.rate=1,,2", "a value is empty"),
        ("workload.rate=2:1:0.1", "is empty; exchange start and stop"),
        ("workload.rate=1:2:0", "a step other than 0"),
        ("workload.rate=1:2", "must be start:stop:step"),
        ("workload.rate=1:2:x", "must have three numbers"),
        ("workload.rate=1:2:1e-9", "more than 100,000 values"),
        ("workload.rate=1:1e999999:1", "more than 100,000 values"),
        ("workload.rate=1,2,1", "1 is given twice"),
        ("workload.rate=1,2,1.0", "1.0 is given twice"),
        ("seed=1,2", "seeds come from --runs and --seed"),
        ("policy.name=petals", 'policies by name are the axis "policy"'),
    ],
)
def test_a_malformed_axis_gets_one_sentence(over: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse_over(over)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, 3, 0.25, "5 ms", 'a "b"\\', [1, "x"], {"low": 1, "kind": "uniform"}])
def test_a_value_of_a_file_means_the_same_as_text(value: object) -> None:
    assert value_of(toml_text(value)) == value


def test_designs_stay_in_their_box_and_are_the_same_for_the_same_seed() -> None:
    spans = {"a": Span(0.1, 10, log=True), "b": Span(1, 6, integer=True), "c": Span(-1, 1)}
    for kind in ("random", "sobol"):
        axis = drawn_axis(kind, 50, 7, spans, "here")  # type: ignore[arg-type]
        assert axis.is_drawn and len(axis.values) == 50
        numbers = [[float(text) for text in value] for value in axis.values]
        assert all(0.1 <= a <= 10 and b in range(1, 7) and -1 <= c <= 1 for a, b, c in numbers)
        assert {b for _, b, _ in numbers} == set(range(1, 7))
        assert sum(a < 1 for a, _, _ in numbers) in range(15, 36), "evenly in the logarithm"
        assert axis == drawn_axis(kind, 50, 7, spans, "here")  # type: ignore[arg-type]
        assert axis != drawn_axis(kind, 50, 8, spans, "here")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (Span(2, 1), "low must be less than high"),
        (Span(0, 1, log=True), "low must be more than 0"),
        (Span(1, 2.5, integer=True), "whole numbers"),
    ],
)
def test_a_box_that_is_none_gets_one_sentence(span: Span, said: str) -> None:
    with pytest.raises(UserError, match=said):
        drawn_axis("random", 4, 0, {"a": span}, "here")


def test_axes_are_combined_the_last_one_fastest() -> None:
    two = [checked_axis(("a", "b"), [("1", "x"), ("2", "y")], ""), checked_axis(("c",), [("3",), ("4",)], "")]
    assert [tuple(point.values()) for point in combined(two)] == [
        ("1", "x", "3"),
        ("1", "x", "4"),
        ("2", "y", "3"),
        ("2", "y", "4"),
    ]
    assert list(combined([])) == [{}]


STUDY = """
scenario = "clustered"
policies = ["petals", "proposed"]
runs = 3
slo = "ttft=5s"
metrics = ["e2e_s", "ttft_s_p95"]
pareto = ["goodput_rps", "e2e_s"]

[set]
"workload.n_requests" = 5

[[axis]]
key = "workload.rate"
range = "0.1:0.3:0.1"

[[axis]]
zip = { "servers.0.count" = [7, 8], "clients.site" = ["Cluster0", "Cluster1"] }

[design]
kind = "sobol"
n = 3
over = { "workload.n_output_tokens" = { low = 8, high = 64, integer = true } }
"""


def study_file(folder: Path, text: str) -> str:
    path = folder / "study.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_study_file_says_what_the_command_line_may_change(tmp_path: Path) -> None:
    file = study_file(tmp_path, STUDY)
    study = read_study(file, Options())
    assert (study.target, study.n_runs, study.objectives) == ("clustered", 3, Objectives({"ttft": 5.0}))
    assert study.keys == ("workload.rate", "servers.0.count", "clients.site", "workload.n_output_tokens")
    assert len(study.points) == 3 * 2 * 3
    assert study.metrics == ("e2e_s_mean", "ttft_s_p95")
    assert study.pareto == ("goodput_rps", "e2e_s_mean")
    assert study.fixed == ("workload.n_requests=5",)
    other = read_study(
        file,
        Options(
            over=("workload.rate=1", "policy=foresight"),
            overrides=("workload.n_requests=6",),
            n_runs=2,
            seed=4,
        ),
    )
    assert (other.policies, other.n_runs, other.seed, len(other.points)) == (("foresight",), 2, 4, 1 * 2 * 3)
    assert other.fixed == ("workload.n_requests=5", "workload.n_requests=6"), "the later one counts"


def test_a_study_s_own_scenario_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        shipped_files()["clustered"].read_text(encoding="utf-8"), encoding="utf-8"
    )
    assert read_study(study_file(tmp_path, 'scenario = "mine.toml"'), Options()).target == str(
        tmp_path / "mine.toml"
    )


def test_a_scenario_may_need_what_only_an_axis_gives(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.csv" for name in "ab"]
    for number, file in enumerate(files):
        file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,{20 + number},8\n")
    over = (f"workload.file={','.join(map(str, files))}",)
    study = read_study(
        "clustered", Options(over=over, overrides=("workload.arrivals=trace", "workload.n_requests=1"))
    )
    assert [request.n_input_tokens for request in study.experiment().workload.requests] == [20]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scenario = 3", "scenario: must be text in quotes, not 3"),
        ('scenario = "clustered"\nrun = 3', r'run: unknown key \(did you mean "runs"\?\)'),
        ('scenario = "clustered"\nengine = "quick"', 'engine: unknown value "quick"'),
        ('scenario = "clustered"\n[[axis]]\nkey = "a"', "axis.0: give one of values, range and zip"),
        ('scenario = "clustered"\n[[axis]]\nvalues = [1]', "axis.0: key is missing"),
        ('scenario = "clustered"\n[[axis]]\nkey = "a"\nvalues = []', "there are no values"),
        ('scenario = "clustered"\n[[axis]]\nzip = { a = [1, 2], b = [1] }', "the same number of values"),
        ('scenario = "clustered"\n[design]\nkind = "random"\nn = 2\nover = {}', "at least 1"),
        ('scenario = "clustered"\nset = { seed = 3 }', "seeds come from --runs and --seed"),
        ('scenario = "clustered"\nmetrics = ["speed"]', 'unknown metric "speed"'),
        ('scenario = "clustered"\nmetrics = ["goodput_rps"]', "needs objectives"),
        ('scenario = "clustered"\npareto = ["ttft_s"]', "a Pareto front needs two metrics"),
        (
            'scenario = "clustered"\npareto = ["ttft_s", "length_fairness_ratio"]',
            "length_fairness_ratio is best at 1 and makes no Pareto front",
        ),
        ('scenario = "clustered"\npolicies = ["petalz"]', "there is no policy pair 'petalz'"),
        (
            'scenario = "clustered"\npolicies = ["petals"]\nbaseline = "proposed"',
            "is none of the policies compared",
        ),
    ],
)
def test_a_study_file_with_a_mistake_gets_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read_study(study_file(tmp_path, text), Options())
    assert "\n" not in str(caught.value)


def test_axes_of_the_same_key_are_refused() -> None:
    with pytest.raises(UserError, match=r"the axis workload\.rate is given twice"):
        read_study("clustered", Options(over=("workload.rate=1,2", "workload.rate=3,4", "workload.rate=3,4")))


@pytest.mark.parametrize(("text", "value"), [(".5", 0.5), ("-.25", -0.25), ("3.", 3.0), (".5 ms", ".5 ms")])
def test_a_number_without_a_zero_is_a_number(text: str, value: object) -> None:
    assert value_of(text) == value
