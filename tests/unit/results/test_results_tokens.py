"""Tokens in a run's results: which they were, and whether they are right; and the memory of servers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nodes.blocks.spec import WeightSource
from nodes.records import Cancelled, Completed, Interrupted
from testbed.experiments.experiment import BlocksSettings
from testbed.results import finish_run
from testbed.results.text import summary_text
from testbed.results.verified import VERIFY
from testbed.runs import verify
from testbed.runs.session import exit_code
from testbed.runtime.blocks import BlocksModel
from tests.unit.results.conftest import MakeRun, SyntheticRun, perfect_hop

CHAIN = [(0, 0, 4)]
BLOCKS = BlocksSettings(None, {}, False, 0, ("cpu",), "float32", "plain", 1, 1, True)
CHECKED = {"n_tokens_checked": 6, "n_tokens_altered": 0, "altered": [], "tokens_unchecked_because": None}
ALTERED = {
    **CHECKED,
    "n_tokens_altered": 2,
    "altered": [{"request": 1, "token": 2, "is": 7, "should_be": 9}],
}


@pytest.fixture
def real(make_run: MakeRun) -> SyntheticRun:
    """Two requests of three tokens each, both completed, with real blocks."""
    run = make_run(lengths=[(2, 3), (2, 3)])
    run.experiment = replace(
        run.experiment, compute=replace(run.experiment.compute, backend="blocks", blocks=BLOCKS)
    )
    run.serve(0, 0.0, CHAIN)
    run.serve(1, 2.0, CHAIN)
    return run


def finished(run: SyntheticRun, found: dict[str, Any] | None = None) -> dict[str, Any]:
    if found is not None:
        (run.path / VERIFY).write_text(json.dumps(found))
    return finish_run(run.path, run.experiment)


def test_a_killed_run_keeps_the_tokens_that_it_had(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 5), (2, 5), (2, 5)])
    run.arrive(0, 0.0)
    run.admit(0, CHAIN, 0.0, 0.1)
    for token, token_id in enumerate((511, 0, 250_879)):
        hops = [perfect_hop(0, 0, 4, 0.1 + token)]
        run.token(0, token, 0.1 + token, hops, token_id=token_id)
    run.arrive(1, 1.0)
    finish_run(run.path, run.experiment)
    table = pq.read_table(run.path / "requests.parquet")
    assert table.schema.field("token_ids").type == pa.list_(pa.int32())
    assert table.column("token_ids").to_pylist() == [[511, 0, 250_879], [], []]


def test_a_text_that_the_model_ended_is_measured_by_the_tokens_that_came(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 10)])
    end_s = run.serve(0, 0.0, CHAIN, n_tokens=3)
    run.log(Completed(0, end_s))
    finish_run(run.path, run.experiment)
    (row,) = pq.read_table(run.path / "requests.parquet").to_pylist()
    assert (row["n_output_tokens"], row["n_tokens_done"]) == (10, 3)
    assert row["per_token_s"] == pytest.approx(end_s / 3)
    assert row["tpot_s"] == pytest.approx((row["e2e_s"] - row["ttft_s"]) / 2)
    assert row["model_tpot_s"] == pytest.approx(row["tpot_s"])
    for metric in ("e2e_s", "per_token_s", "tpot_s"):  # it was alone
        assert row[f"unqueued_{metric}"] == pytest.approx(row[metric])


def test_bounds_are_of_the_tokens_that_came(make_run: MakeRun) -> None:
    early = make_run(lengths=[(2, 10)])
    early.log(Completed(0, early.serve(0, 0.0, CHAIN, n_tokens=3)))
    found = finished(early)["bounds"]
    shutil.rmtree(early.path)
    whole = make_run(lengths=[(2, 3)])
    whole.serve(0, 0.0, CHAIN)
    expected = finished(whole)["bounds"]["lower_bound_per_token_s"]
    assert found["lower_bound_per_token_s"] == pytest.approx(expected)


def test_a_summary_says_that_every_token_is_the_whole_models(real: SyntheticRun) -> None:
    summary = finished(real, CHECKED)
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (6, 0)
    assert "all 6 tokens are those of the whole model on one machine" in summary_text(summary)
    assert exit_code(summary) == 0


@pytest.mark.parametrize(("n_checked", "n_tied"), [(6, 1), (40, 2)])
def test_ties_are_said_beside_the_tokens_that_are_right(
    real: SyntheticRun, n_checked: int, n_tied: int
) -> None:
    summary = finished(real, {**CHECKED, "n_tokens_checked": n_checked, "n_tokens_tied": n_tied})
    sentence = (
        f"all {n_checked} tokens are those of the whole model on one machine ({n_tied} of them by a tie"
    )
    assert sentence in summary_text(summary)
    assert exit_code(summary) == 0


@pytest.mark.parametrize(("n_checked", "n_tied"), [(6, 2), (39, 2), (100, 6)])
def test_more_ties_than_rounding_explains_make_the_exit_code_1(
    real: SyntheticRun, n_checked: int, n_tied: int
) -> None:
    summary = finished(real, {**CHECKED, "n_tokens_checked": n_checked, "n_tokens_tied": n_tied})
    text = summary_text(summary)
    assert f"{n_tied} of {n_checked} tokens differ from those of the whole model by a tie" in text
    assert "all" not in text.split("by a tie")[0].splitlines()[-1]
    assert exit_code(summary) == 1


def test_tokens_of_requests_that_did_not_complete_are_compared_too(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(lengths=[(2, 3), (2, 3), (2, 3)])
    run.serve(0, 0.0, CHAIN)
    for index, ended in ((1, Cancelled(1, 9.0)), (2, Interrupted(2, 9.0))):
        run.arrive(index, 2.0)
        run.admit(index, CHAIN, 2.0, 2.1)
        run.token(index, 0, 3.0, [perfect_hop(0, 0, 4, 2.1)], token_id=7)
        run.log(ended)
    asked: list[Any] = []

    def whole(*_: Any, **how: Any) -> Any:
        asked.append(json.loads(how["input"]))
        return SimpleNamespace(returncode=0, stdout=json.dumps({**CHECKED, "n_tokens_checked": 5}).encode())

    monkeypatch.setattr(verify, "_needed_bytes", lambda *_: 0.0)
    monkeypatch.setattr("subprocess.run", whole)
    (run.path / "logs").mkdir()
    model = BlocksModel(BLOCKS, WeightSource({}))
    found = verify.verify_tokens(run.path, run.experiment, model, lambda text: None)
    assert [len(entry["tokens"]) for entry in asked[0]["requests"]] == [3, 1, 1]
    assert found.n_tokens_checked == 5


def test_an_altered_token_is_named_and_makes_the_exit_code_1(real: SyntheticRun) -> None:
    summary = finished(real, ALTERED)
    text = summary_text(summary)
    assert "2 of 6 tokens are NOT those of the whole model" in text
    assert "the first is token 2 of request 1: 7, should be 9" in text
    assert exit_code(summary) == 1


def test_a_run_that_broke_off_says_why_nothing_was_compared(real: SyntheticRun) -> None:
    summary = finished(real)
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (None, None)
    assert "tokens were not compared with the whole model's: the run did not" in summary_text(summary)


def test_the_stub_compares_its_own_tokens(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)])
    run.serve(0, 0.0, CHAIN)
    summary = finished(run)
    assert summary["n_tokens_checked"] is None
    assert "the stub's client compares every token" in summary["tokens_unchecked_because"]
    assert "whole model" not in summary_text(summary)
    assert exit_code(summary) == 0


def test_real_memory_stands_beside_the_models(real: SyntheticRun) -> None:
    plan = json.loads((real.path / "plan.json").read_text())
    plan["memory"] = {
        "s0": {"real_bytes": 1.1e6, "model_bytes": 1e6},
        "s1": {"real_bytes": 2.6e6, "model_bytes": 3e6, "n_recorded": 3.0},
        "idle": {"real_bytes": 0.0, "model_bytes": 0.0},
    }
    (real.path / "plan.json").write_text(json.dumps(plan))
    summary = finished(real, CHECKED)
    memory = summary["memory"]
    assert memory["difference_ratio"] == pytest.approx(-0.075)
    assert (memory["worst_server"], memory["worst_difference_ratio"]) == ("s1", pytest.approx(-0.4 / 3))
    assert "took 3.70 MB, -7.5% of what the model counts" in summary_text(summary)
    assert memory["n_recorded"] == 3
    assert "CUDA graphs: the steps of 3 sessions were recorded" in summary_text(summary)
