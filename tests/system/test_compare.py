"""``testbed compare`` on runs as the other commands leave them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.runs import FAST, MEMORY, Testbed, assert_one_sentence, rows_of

WORKLOAD = tuple(word for word in FAST if word != "--no-report")


def simulated(testbed: Testbed, name: str, *options: str) -> str:
    out = testbed.folder / name
    outcome = testbed("simulate", "clustered", *WORKLOAD, "--out", str(out), *options)
    assert outcome.code == 0, outcome.stderr
    return str(out)


def test_an_emulation_is_compared_with_its_simulation(testbed: Testbed, tmp_path: Path) -> None:
    emulated = testbed.up("clustered", *MEMORY, *FAST)
    assert emulated.code == 0, emulated.stderr
    simulation = simulated(testbed, "simulated")
    out = tmp_path / "out"
    outcome = testbed("compare", str(emulated.run_dir), simulation, "--out", str(out), "--json", renders=True)
    assert (outcome.code, outcome.stderr) == (0, "")
    answer = outcome.json()
    assert (answer["a"]["engine"], answer["b"]["engine"]) == ("emulation", "simulation")
    assert answer["aligned"]["n_compared"] == 3
    assert answer["aligned"]["n_other_chain"] == 0
    for side, folder in (("a", emulated.run_dir), ("b", Path(simulation))):
        rows = rows_of(folder / "requests.parquet")
        assert [row["per_token_s"] for row in rows] == [r[f"per_token_{side}_s"] for r in answer["requests"]]
        # The model that simulates knows no headers and frames.
        assert [row["per_token_s"] for row in rows] == pytest.approx(
            [row["per_token_a_s"] for row in answer["requests"]], rel=1e-3
        )
    decode = next(r for r in answer["hops"] if (r["server"], r["kind"]) == ("all", "decode"))
    n_hops = sum(row["token"] > 0 for row in rows_of(Path(simulation) / "hops.parquet"))
    assert [decode["hop_compute_s"][key]["n"] for key in ("a", "b", "paired")] == [n_hops] * 3
    differing = {row["key"] for row in answer["scenario_differences"]}
    assert differing == {"network.backend"}
    names = {"compare.json", "requests.csv", "hops.csv", "tokens.png", "tokens.pdf", "hops.png", "hops.pdf"}
    assert {path.name for path in out.iterdir()} == names


def test_a_simulation_with_the_testbeds_own_nodes_is_called_one(testbed: Testbed) -> None:
    fast, by_nodes = simulated(testbed, "fast"), simulated(testbed, "nodes", "--clock", "virtual")
    lines = testbed("compare", fast, by_nodes).stdout.splitlines()
    assert lines[0].startswith(f"A {fast}: clustered, simulation; mode testbed;")
    how = "simulation with the testbed's own nodes; clock virtual, network memory, compute stub;"
    assert lines[1].startswith(f"B {by_nodes}: clustered, {how}")


def test_another_policy_is_shown_as_what_differs(testbed: Testbed) -> None:
    one, other = simulated(testbed, "one"), simulated(testbed, "other", "--policy", "petals")
    outcome = testbed("compare", one, other)
    assert (outcome.code, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith(f"A {one}: clustered, simulation; mode testbed; cg-bp + ws-rr, seed 0; 3 of 3")
    means = [
        sum(row["per_token_s"] for row in rows_of(Path(run) / "requests.parquet")) / 3 for run in (one, other)
    ]
    assert lines[2].startswith(f"mean per-token time    A {means[0]:.3f} s, B {means[1]:.3f} s, B - A +")
    assert any(line.split() == ["policy.placement", "cg-bp", "petals"] for line in lines)
    assert "3 of 3 compared requests had another chain: their hops are of other servers or blocks" in lines


def test_what_cannot_be_compared_is_refused_in_one_sentence(testbed: Testbed) -> None:
    one = simulated(testbed, "one")
    for changed, expected in (
        (("--set", "workload.n_input_tokens=9"), "no request has the same lengths in both runs"),
        (("--policy", "proposed", "--policy", "petals"), "holds 2 runs; name one of them, such as"),
    ):
        other = simulated(testbed, f"other-{len(changed)}", *changed)
        assert_one_sentence(testbed("compare", one, other), expected)
    assert_one_sentence(testbed("compare", one, "nowhere"), "there is no run nowhere")


def test_an_emulation_is_compared_once_report_wrote_its_tables(testbed: Testbed) -> None:
    run = testbed.up("clustered", *MEMORY, *FAST).run_dir
    killed = testbed.folder / "killed"
    shutil.copytree(run, killed)
    for name in ("requests.parquet", "hops.parquet", "summary.json"):
        (killed / name).unlink()
    assert_one_sentence(testbed("compare", str(run), str(killed)), f"`testbed report {killed}`")
    assert testbed("report", str(killed)).code == 0
    answer = testbed("compare", str(run), str(killed), "--json").json()
    assert answer["headline"]["per_token_s"]["difference_s"] == 0
