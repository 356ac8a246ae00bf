from __future__ import annotations

from typing import Any

import pytest

from testbed.experiments.sources import value_of
from testbed.studies.reproduce.paper import (
    METRICS,
    PRINTED_POLICIES,
    mismatches,
    printed_decision_s,
    printed_s,
)
from testbed.studies.reproduce.settings import (
    CLOSEST,
    COLUMNS,
    DRAWN,
    PLACES,
    STATED,
    SWEEPS,
    TOPOLOGIES,
    Setting,
    settings_of,
)
from testbed.studies.sweep.runs import Setup, case_of
from testbed.studies.sweep.study import Options, parts_of, read_study


def changes(setting: Setting) -> dict[str, Any]:
    """What the setting changes in its scenario."""
    texts = (change.partition("=") for change in setting.run(0).changes)
    return {key: value_of(text) for key, _, text in texts}


def test_both_full_versions_of_the_tables_have_a_setting_for_every_printed_cell() -> None:
    every = {(place, column) for place in PLACES for column in range(len(COLUMNS))}
    assert set(CLOSEST.cells) == set(STATED.cells) == every
    assert set(DRAWN.cells) == {cell for cell in every if cell[0] not in TOPOLOGIES}


def test_every_sweep_has_at_least_five_ascending_values_on_every_topology() -> None:
    assert len(SWEEPS) == 6
    for sweep in SWEEPS:
        assert tuple(sweep.points) == TOPOLOGIES
        for points in sweep.points.values():
            values = [value for value, _ in points]
            assert len(values) >= 5 and values == sorted(set(values))


def test_settings_have_names_of_their_own_and_only_chooses_between_them() -> None:
    everything = [setting.id for setting in settings_of(None)]
    assert len(set(everything)) == len(everything)
    assert everything == [setting.id for only in ("tables", "figures") for setting in settings_of(only)]


@pytest.mark.parametrize("setting", settings_of(None), ids=lambda setting: setting.id)
def test_every_setting_is_a_valid_scenario_that_keeps_what_it_says(setting: Setting) -> None:
    experiment = case_of(Setup(""), setting.run(3)).experiment
    stated = changes(setting)
    assert len(experiment.workload.requests) == stated["workload.n_requests"]
    assert experiment.problem.request_rate == stated.get("policy.planned_rate", stated["workload.rate"])
    assert experiment.problem.n_output_tokens == stated["workload.n_output_tokens"]
    assert experiment.calibration.session_setup_s == 0
    if "policy.join_order" in stated:
        assert list(experiment.problem.join_order) == stated["policy.join_order"]


def test_the_stated_tables_send_a_hundred_requests_at_the_rate_of_the_column() -> None:
    for (_, column), setting in STATED.cells.items():
        rate, n_output = COLUMNS[column]
        stated = changes(setting)
        assert stated["workload.n_requests"] == 100
        assert stated["workload.rate"] == setting.rate == rate
        assert stated["workload.n_output_tokens"] == n_output


def test_large_networks_have_the_longer_session_setup_of_petals_in_the_tables() -> None:
    key = "calibration.session_setup_petals"
    assert {changes(STATED.cells[place, 0]).get(key, "250 s") for place in PLACES[:4]} == {"250 s"}
    assert {changes(STATED.cells[place, 0])[key] for place in PLACES[4:]} == {"350 s"}


def test_the_planned_rate_is_given_only_where_the_actual_one_is_swept() -> None:
    planned = {
        sweep.name: {changes(s).get("policy.planned_rate") for s in sweep.settings} for sweep in SWEEPS
    }
    assert planned.pop("actual-rate") == {0.5}
    assert set(map(frozenset, planned.values())) == {frozenset({None})}


def test_every_part_of_the_study_is_computed_whole() -> None:
    points = sum(read_study(f"paper:{part}", Options()).n_points for part in parts_of("paper"))
    assert len(settings_of(None)) == points == 140


def test_printed_numbers_are_there_for_every_cell_and_kind() -> None:
    for metric in METRICS:
        for place in PLACES:
            for policy in PRINTED_POLICIES:
                for column in range(len(COLUMNS)):
                    for kind in ("simulated", "measured"):
                        assert printed_s(metric, place, policy, column, kind) > 0
    assert printed_s("per_token_s", "GTS-CE", "proposed", 1) == 0.91
    assert printed_decision_s("clustered", "petals") == (0.0186, 0.0013)


def test_the_one_printed_number_that_contradicts_its_parts_is_found() -> None:
    (found,) = mismatches()
    assert found[:5] == ("AboveNet", "petals", 0.1, 128, 3.88)
    assert found.from_parts_s == pytest.approx((316.21 + 127 * 0.92) / 128)
