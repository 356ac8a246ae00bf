"""The numbers of a comparison, its settings, its text and its files."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from testbed.errors import RunError, UserError
from testbed.studies.compare import compare_command
from testbed.studies.compare.files import _write_csv
from testbed.studies.compare.notes import spans
from testbed.studies.compare.text import decimals, percent
from tests.support.full_disk import files_no_longer_than
from tests.support.run_tables import MakeRun, failed, hops_of, request


def test_a_run_beside_itself_differs_in_nothing(make_run: MakeRun) -> None:
    a = make_run("a", [request(0), request(1)])
    answer, text = compare_command(a, a, None)
    assert answer["headline"]["per_token_s"] == {
        "a": 0.6,
        "b": 0.6,
        "difference_s": 0.0,
        "difference_ratio": 0.0,
    }
    assert answer["scenario_differences"] == []
    assert all(sample["paired"]["mean_abs_s"] == 0 for sample in answer["tokens"].values())
    assert "the scenarios are the same" in text
    assert "differ most" not in text


def test_runs_of_different_code_are_named_with_both_versions(make_run: MakeRun) -> None:
    old, new = (make_run(name, [request(0)], code=f"testbed {name}") for name in ("old", "new"))
    before_there_was_one = make_run("none", [request(0)])
    assert "different code: A testbed old; B testbed new" in compare_command(old, new, None)[1]
    for other in (old, before_there_was_one):
        assert "different code" not in compare_command(old, other, None)[1]


def test_differences_are_b_minus_a_and_ratios_of_a(make_run: MakeRun) -> None:
    a = make_run("a", [request(0), request(1, per_token_s=0.2)])
    b = make_run("b", [request(0, per_token_s=0.9), request(1, per_token_s=0.1, queue_s=0.4)])
    answer, text = compare_command(a, b, None)
    headline = answer["headline"]["per_token_s"]
    assert headline == pytest.approx({"a": 0.4, "b": 0.5, "difference_s": 0.1, "difference_ratio": 0.25})
    assert "A 0.4000 s, B 0.5000 s, B - A +0.1000 s (+25.0 % of A); 2 requests compared" in text
    assert answer["metrics"]["per_token_s"]["paired"] == pytest.approx(
        {"n": 2, "mean_abs_s": 0.2, "p99_abs_s": 0.298}
    )
    first, second = answer["requests"]
    assert first["per_token_difference_s"] == pytest.approx(0.3)
    assert first["per_token_ratio"] == pytest.approx(1.5)
    assert (second["queue_difference_s"], second["queue_ratio"]) == (0.4, None)
    assert answer["metrics"]["queue_s"]["difference_ratio"]["mean"] is None


def test_a_metric_that_a_request_has_not_is_left_empty(make_run: MakeRun) -> None:
    one = [request(0, n_output_tokens=1, tpot_s=None)]
    answer, text = compare_command(make_run("a", one), make_run("b", one), None)
    assert answer["metrics"]["tpot_s"]["a"] == {"mean": None, "p50": None, "p99": None, "n": 0}
    assert answer["requests"][0]["tpot_ratio"] is None
    assert "TPOT" not in text


def test_a_tokens_time_is_the_sum_of_the_parts_of_its_hops(make_run: MakeRun) -> None:
    rows = [request(0)]
    second = [{**row, "hop": 1, "server": "b"} for row in hops_of(rows, hop_network_s=0.2)]
    a = make_run("a", rows, [*hops_of(rows), *second])
    b = make_run("b", rows, hops_of(rows, hop_compute_s=0.6))
    tokens = compare_command(a, b, None)[0]["tokens"]
    for kind, n in (("prefill", 1), ("decode", 2)):
        assert tokens[kind]["a"]["mean"] == pytest.approx(0.5 + 0.6)
        assert tokens[kind]["b"]["mean"] == pytest.approx(0.8)
        assert tokens[kind]["paired"]["n"] == n
        assert tokens[kind]["paired"]["mean_abs_s"] == pytest.approx(0.3)


def test_hops_are_grouped_by_the_servers_names_whatever_their_order(make_run: MakeRun) -> None:
    rows = [request(0), request(1)]
    on_x, on_y = hops_of(rows[:1], "x"), hops_of(rows[1:], "y", hop_compute_s=0.8)
    slower_x = hops_of(rows[:1], "x", hop_compute_s=0.33)
    a, b = make_run("a", rows, [*on_x, *on_y]), make_run("b", rows, [*on_y, *slower_x])
    hops = {(row["server"], row["kind"]): row for row in compare_command(a, b, None)[0]["hops"]}
    assert list(dict.fromkeys(server for server, _ in hops)) == ["all", "x", "y"]
    compute = {key: row["hop_compute_s"] for key, row in hops.items()}
    assert compute["x", "decode"]["difference_ratio"]["mean"] == pytest.approx(0.1)
    assert compute["x", "decode"]["difference_s"]["p99"] == pytest.approx(0.03)
    assert compute["y", "decode"]["paired"] == {"n": 2, "mean_abs_s": 0.0, "p99_abs_s": 0.0}
    assert compute["all", "prefill"]["a"]["n"] == compute["all", "prefill"]["b"]["n"] == 2
    assert compute["all", "prefill"]["a"]["mean"] == pytest.approx(0.55)


def test_a_server_that_served_in_one_run_only_is_shown(make_run: MakeRun) -> None:
    rows = [request(0)]
    a, b = make_run("a", rows, hops_of(rows, "x")), make_run("b", rows, hops_of(rows, "y"))
    answer, text = compare_command(a, b, None)
    hops = {(row["server"], row["kind"]): row for row in answer["hops"]}
    assert hops["x", "decode"]["hop_compute_s"]["b"]["n"] == 0
    assert hops["y", "decode"]["n_blocks"] == {"a": None, "b": 4.0}
    assert hops["all", "decode"]["hop_compute_s"]["paired"]["n"] == 0
    assert "y " in text


def test_the_text_says_of_how_many_hops_a_paired_difference_is(make_run: MakeRun) -> None:
    rows = [request(0), request(1)]
    a = make_run("a", rows, hops_of(rows, "x"))
    b = make_run("b", rows, [*hops_of(rows[:1], "x"), *hops_of(rows[1:], "y")])
    _, text = compare_command(a, b, None)
    assert re.search(r"^hop compute, prefill .* \(1 of 2\)$", text, re.MULTILINE)
    _, same = compare_command(a, a, None)
    assert " of 2)" not in same


def test_servers_with_other_blocks_are_named_and_their_hops_not_paired(make_run: MakeRun) -> None:
    rows = [request(0)]
    a, b = make_run("a", rows, hops_of(rows, "x")), make_run("b", rows, hops_of(rows, "x", n_blocks=3))
    answer, text = compare_command(a, b, None)
    assert "hops on x had another number of blocks" in text
    assert {row["hop_compute_s"]["paired"]["n"] for row in answer["hops"]} == {0}


@pytest.mark.renders
def test_simulations_without_hops_are_compared_by_request(make_run: MakeRun, tmp_path: Path) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(0)], hops=None, engine="simulation")
    answer, text = compare_command(a, b, tmp_path / "out")
    assert answer["hops"] is None
    assert answer["tokens"] is None
    assert "hops were not compared" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "compare.json",
        "requests.csv",
        "tokens.pdf",
        "tokens.png",
    ]


SCENARIO = """
seed = {seed}
[policy]
placement = "{placement}"
[[network.pairs]]
sites = ["Here", "There"]
rtt = "{rtt}"
[[network.pairs]]
sites = ["Here", "Here"]
rtt = "5 ms"
{more}
"""


def test_settings_that_differ_are_listed_by_key(make_run: MakeRun) -> None:
    text_a = SCENARIO.format(seed=0, placement="cg-bp", rtt="100 ms", more="")
    text_b = SCENARIO.format(seed=0, placement="petals", rtt="60 ms", more='[compute]\nmodel = "[bold]x"')
    a, b = make_run("a", [request(0)], scenario=text_a), make_run("b", [request(0)], scenario=text_b)
    answer, text = compare_command(a, b, None)
    assert answer["scenario_differences"] == [
        {"key": "policy.placement", "a": "cg-bp", "b": "petals"},
        {"key": "network.pairs[Here, There].rtt", "a": "100 ms", "b": "60 ms"},
        {"key": "compute.model", "a": None, "b": "[bold]x"},
    ]
    assert "network.pairs[Here, There].rtt" in text
    assert "[bold]x" in text


def test_a_scenario_beside_an_instance_has_no_settings_in_common(make_run: MakeRun) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(0)], engine="simulation")
    (b / "scenario.toml").unlink()
    (b / "instance.json").write_text('{"servers": []}')
    answer, text = compare_command(a, b, None)
    assert answer["scenario_differences"] is None
    assert "settings were not compared" in text


@pytest.mark.renders
def test_the_files_hold_what_is_printed(make_run: MakeRun, tmp_path: Path) -> None:
    rows = [request(0), request(1)]
    a = make_run("a", [*rows, failed(2, "timeout")])
    b = make_run("b", [*rows, request(2)], hops_of(rows, hop_compute_s=0.36))
    out = tmp_path / "new" / "out"
    answer, _ = compare_command(a, b, out)
    assert json.loads((out / "compare.json").read_text()) == json.loads(json.dumps(answer))
    with open(out / "requests.csv", newline="") as file:
        requests = list(csv.DictReader(file))
    assert [row["request"] for row in requests] == ["0", "1"]
    assert float(requests[0]["e2e_ratio"]) == 1
    with open(out / "hops.csv", newline="") as file:
        hops = {(row["server"], row["kind"], row["part"]): row for row in csv.DictReader(file)}
    assert len(hops) == 2 * 2 * 3
    assert float(hops["a", "decode", "hop_compute"]["mean_difference_ratio"]) == pytest.approx(0.2)
    for name in ("tokens", "hops"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_folder_that_holds_something_is_not_written_to(make_run: MakeRun, tmp_path: Path) -> None:
    a = make_run("a", [request(0)])
    with pytest.raises(UserError, match="holds something already"):
        compare_command(a, a, tmp_path)


def test_a_folder_that_cannot_be_written_is_one_sentence(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make_run("a", [request(0)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("testbed.studies.compare.files.write_json", full)
    with pytest.raises(RunError, match=r"cannot write to .* \(No space left on device\); make room"):
        compare_command(a, a, tmp_path / "out")


def test_numbers_show_the_digits_that_matter() -> None:
    assert [decimals(values) for values in ([1.8], [0.0123], [1e-9], [0.0, None])] == [3, 5, 6, 3]
    assert [percent(ratio) for ratio in (0.0012, -0.123, 1.5, -1e-9, None)] == [
        "+0.12",
        "-12.3",
        "+150",
        "0.00",
        "-",
    ]
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_a_full_disk_leaves_no_table_in_part(tmp_path: Path) -> None:
    with files_no_longer_than(10), pytest.raises(OSError, match="File too large"):
        _write_csv(tmp_path / "requests.csv", [{"request": 1, "ttft_s": 0.5}])
    assert list(tmp_path.iterdir()) == []
