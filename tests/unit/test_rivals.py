from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import rivals
from benchmarks.rivals import PARTS, placeable, run, settings_of
from testbed.experiments import load_experiment
from testbed.studies.sweep.command import RUNS

FEW = ("--scenarios", "clustered", "--workloads", "own", "--loads", "1", "--requests", "8", "--seeds", "2")
PAIRS = ("--pairs", "proposed", "exo", "whole-model", "--beside", "proposed")


def trace(folder: Path) -> Path:
    path = folder / "made.jsonl.gz"
    lines = (
        {"timestamp": 900 * i, "input_length": 9000 if i % 5 == 0 else 10 + i, "output_length": 3 + i % 7}
        for i in range(60)
    )
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def test_the_tables_are_a_sweep_s_and_stand_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "clustered", PARTS["clustered"]._replace(most_requests=10))
    monkeypatch.setattr(rivals, "SATURATION_RUNS", 2)
    page = tmp_path / "rivals.md"
    page.write_text("# Rivals\n\nWho wins.\n\n## The tables\n\nstale\n")
    asked = (*FEW, *PAIRS, "--out", str(tmp_path / "out"), "--trace", f"Made={trace(tmp_path)}")
    assert run([*asked, "--trace-load", "Made=0.25", "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# Rivals\n\nWho wins.\n\n## The tables\n") and "stale" not in text
    for said in (
        "### clustered, own, 1 times its rate (0.1/s)\n\n2 seeds of 8 requests.",
        "### clustered, Made, 0.25 times its rate (0.025/s)\n\n2 windows of 8 requests. Mooncake trace made.jsonl.gz "
        "without 12 of 60 requests, whose prompts have more than 8,192 tokens.",
        "No figures of `whole-model`: whole-model needs a server that holds all 70 blocks",
        "### clustered: ttft_p90=10s,tpot_p90=0.9s",
        "no rate keeps it: at 0.0015625 requests/s, the lowest tried, tpot_p90 is missed",
    ):
        assert said in text
    own = text.partition("### clustered, own")[2].partition("###")[0]
    (line,) = (line for line in own.splitlines() if line.startswith("| `exo` | 0 |"))
    assert line.count("worse") == 3, "constant lengths: all seeds say the same"
    files = [tmp_path / "out" / "clustered" / name / RUNS for name in ("own", "Made")]
    files.append(tmp_path / "out" / "clustered" / "saturation" / rivals.SATURATION)
    before = [file.read_bytes() for file in files]
    assert run([*asked, "--trace-load", "Made=0.25", "--into", str(page)]) == 0
    assert [file.read_bytes() for file in files] == before and page.read_text() == text


def test_a_pair_that_the_scenario_has_no_numbers_for_is_left_out_with_why() -> None:
    found, without = placeable("helix-24", settings_of("helix-24", (), 5), ["petals", "proposed"])
    assert found == ["proposed"] and "petals_forward_rps" in without["petals"]


def test_all_seeds_know_the_same_past_requests() -> None:
    settings = settings_of("helix-24", (), 5)
    problems = [load_experiment("helix-24", [*settings, f"seed={seed}"]).problem for seed in (0, 1)]
    assert problems[0].length_samples == problems[1].length_samples != ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--trace", "Azure"), "--trace Azure: must be NAME=FILE"),
        (("--trace", "=file"), "--trace =file: must be NAME=FILE"),
        (("--trace", "Azure=nowhere.csv"), "--trace Azure=nowhere.csv: there is no file nowhere.csv"),
        (("--trace-load", "Azure=0.5"), "--trace-load Azure=0.5: no --trace Azure"),
        (("--pairs", "best"), "policy best: "),
        (("--beside", "helix"), "the baseline helix is none of the policies compared"),
        (("--requests", "0"), "workload.n_requests: must be at least 1, not 0"),
        (("--into", "nowhere.md"), "--into nowhere.md: No such file"),
    ],
)
def test_a_mistake_is_said_in_a_sentence_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], said: str
) -> None:
    assert run([*FEW, *PAIRS, "--out", str(tmp_path / "out"), *given]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob(RUNS))


def test_a_page_without_a_place_for_tables_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Else\n")
    assert run([*FEW, *PAIRS, "--out", str(tmp_path / "out"), "--into", str(page)]) == 2
    assert 'has no line "## The tables"' in capsys.readouterr().err and page.read_text() == "# Else\n"
