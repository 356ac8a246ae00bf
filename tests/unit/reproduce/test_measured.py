"""What the authors measured, beside simulations and the testbed."""

from __future__ import annotations

import pytest

from testbed.studies.reproduce.measured import SOURCES, Cell, fits, fitted_constant_s, measured_cells, spread
from testbed.studies.reproduce.runs import EMULATED_EVERY, Results, run_task, task_of
from testbed.studies.reproduce.settings import CLOSEST, STATED, settings_of
from testbed.studies.sweep.runs import Measures, Record


def results(measures: Measures) -> Results:
    """Every run of the tables gives ``measures``."""
    settings = settings_of("tables")
    done = {key: Record(key, measures=measures) for s in settings if (key := task_of(s, 0).key)}
    return Results(done, settings, [0])


def test_the_48_measured_cells_stand_beside_each_source() -> None:
    measures: Measures = {}
    for policy, reference_s, emulated_s, bare_s in (("petals", 6.0, 5.0, 2.0), ("proposed", 2.0, 1.0, 0.5)):
        measures[f"{policy}/reference/per_token_s"] = reference_s
        measures[f"{policy}/emulated/per_token_s"] = emulated_s
        measures[f"{policy}/none/per_token_s"] = bare_s
    cells = [c for c in measured_cells(results(measures)) if c.metric == "per_token_s"]
    assert len(cells) == 48
    first = cells[0]
    assert (first.place, first.policy, first.column, first.measured_s) == ("Cluster0", "petals", 0, 6.23)
    assert first.by_source_s == {"printed": 5.33, "closest": 6.0, "stated": 6.0, "emulated": 5.0}
    assert [first.ratio(source) for source in SOURCES] == pytest.approx(
        [5.33 / 6.23 - 1, 6 / 6.23 - 1, 6 / 6.23 - 1, 5 / 6.23 - 1]
    )
    assert first.bare_s == 2.0


def cell(n_output: int, measured_s: float, bare_s: float, policy: str = "petals") -> Cell:
    column = {64: 0, 128: 1}[n_output]
    return Cell("per_token_s", "Cluster0", policy, column, measured_s, {}, bare_s)


def test_constants_are_fitted_on_one_half_and_judged_on_the_other() -> None:
    cells = [cell(64, 1.0 + 128 / 64, 1.0), cell(128, 1.0 + 256 / 128, 1.0)]
    assert fitted_constant_s(cells[:1]) == pytest.approx(128.0)
    by_half = {fit.fitted_on: fit for fit in fits(cells)}
    assert by_half["64 output tokens"].constants_s["petals"] == pytest.approx(128.0)
    assert by_half["64 output tokens"].ratios == pytest.approx([(1 + 128 / 128) / 3 - 1])
    assert by_half["128 output tokens"].ratios == pytest.approx([(1 + 256 / 64) / 3 - 1])


def test_the_spread_counts_cells_within_limits() -> None:
    assert spread([0.05, -0.15, 0.4]) == (
        "of 3 cells 1 within 10%, 2 within 20%, 2 within 30%; median 15%, from -15% to +40%"
    )


def test_the_testbed_serves_every_fifth_run_of_the_stated_settings_only() -> None:
    stated, closest = STATED.cells["Cluster0", 0], CLOSEST.cells["Cluster0", 0]
    assert [bool(task_of(stated, seed).emulated) for seed in range(EMULATED_EVERY + 1)] == [
        seed % EMULATED_EVERY == 0 for seed in range(EMULATED_EVERY + 1)
    ]
    assert not task_of(closest, 0).emulated


def test_an_emulated_run_has_the_session_setup_of_its_policy() -> None:
    task = task_of(STATED.cells["Cluster0", 0], 0)._replace(policies=(), explained=False)
    measures = run_task(task).measures
    assert {name.split("/")[1] for name in measures} == {"emulated"}
    assert (measures["petals/emulated/ttft_s"] or 0) > 250 > 60 < (measures["proposed/emulated/ttft_s"] or 0)
