"""What servers cost, and the energy and carbon dioxide of their tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.hours import Hours
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.slo import Objectives
from testbed.results.costs import costs_of, costs_text
from testbed.simulator import command, engine, summary
from testbed.simulator.cases import Case
from testbed.simulator.command import Options, simulate_command
from testbed.simulator.engine import simulate
from testbed.simulator.hops import hop_table
from testbed.simulator.summary import summarize_simulation
from testbed.studies.sweep.command import sweep_command
from testbed.studies.sweep.measures import measures_of
from testbed.studies.sweep.study import Options as SweepOptions

SERVER = "hardware='a100', site='Cluster1'"
ASKED = (
    "policy.name='proposed'",
    "workload.n_requests=6",
    "workload.n_output_tokens=20",
    "workload.rate=0.5",
)


def loaded(*keys: str, options: tuple[str, ...] = ()) -> Experiment:
    servers = ", ".join("{" + f"{SERVER}, name='s{i}', {each}" + "}" for i, each in enumerate(keys))
    return load_experiment("clustered", [f"servers=[{servers}]", *ASKED, *options])


def test_cost_is_of_all_servers_from_the_first_arrival_to_the_last_end_per_token() -> None:
    simulation = simulate(Case(loaded("cost_per_hour=3.0", "cost_per_hour=1.5")), "testbed")
    rows = simulation.rows
    span_s = max(row.ended_at_s or 0.0 for row in rows) - min(row.arrival_at_s for row in rows)
    expected = 4.5 * span_s / 3600 / (6 * 20) * 1e6
    summary = summarize_simulation(simulation, Objectives())
    assert summary.get("cost_per_million_tokens") == pytest.approx(expected)
    assert "energy_j_per_token" not in summary and "carbon_g_per_million_tokens" not in summary
    assert measures_of(simulation, Objectives())["cost_per_million_tokens"] == pytest.approx(expected)


def test_a_server_is_paid_from_the_first_arrival_and_while_its_hours_last() -> None:
    experiment = loaded(
        "cost_per_hour=3.0, hours='07:00-23:59'",  # leaves after a minute
        "cost_per_hour=1.5, hours='09:00-17:00', time_zone='+09:00'",  # comes after two
        "cost_per_hour=0.7",
        options=("begins_at='23:58'", "workload.arrivals='constant'", "workload.rate=0.05"),
    )
    rows = simulate(Case(experiment), "testbed").rows[1:]
    began_s, ended_s = rows[0].arrived_at_s, max(row.ended_at_s or 0.0 for row in rows)
    assert began_s is not None and 0 < began_s < 60 and ended_s > 120
    expected = 3.0 * (60 - began_s) + 1.5 * (ended_s - 120) + 0.7 * (ended_s - began_s)
    found = costs_of(experiment, rows, None)
    assert found["cost_per_million_tokens"] == pytest.approx(expected / 3600 / (5 * 20) * 1e6)


def test_a_run_that_made_no_token_has_no_figures_and_no_line() -> None:
    experiment = loaded("cost_per_hour=3.0")
    assert costs_of(experiment, [], None) == {"cost_per_million_tokens": None}
    assert costs_text({"cost_per_million_tokens": None}) == []
    assert costs_text({"cost_per_million_tokens": 12345.6, "energy_j_per_token": None}) == [
        "cost 1.235e+04 per million output tokens"
    ]


def test_energy_is_idle_power_all_the_time_and_the_rest_while_a_server_has_a_step(tmp_path: Path) -> None:
    power = "power_idle='60 W', power_busy='400 W'"
    sites = "sites=[{name='Cluster1', carbon_g_per_kwh=500.0}]"
    case = Case(loaded(power, power, options=(sites,)))
    simulation = simulate(case, "testbed", folder=tmp_path)
    rows, hops = simulation.rows, hop_table(simulation)
    span_s = max(row.ended_at_s or 0.0 for row in rows) - min(row.arrival_at_s for row in rows)
    busy_s = 0.0
    for server in range(2):
        until_s = 0.0
        for hop in sorted(
            (a, d)
            for s, a, d in zip(hops.server, hops.arrived_at_s, hops.departed_at_s, strict=True)
            if s == server
        ):
            busy_s += max(0.0, hop[1] - max(hop[0], until_s))
            until_s = max(until_s, hop[1])
    expected_j = (2 * 60 * span_s + 340 * busy_s) / (6 * 20)
    summary = summarize_simulation(simulation, Objectives())
    assert busy_s > 1
    assert summary.get("energy_j_per_token") == pytest.approx(expected_j)
    assert summary.get("carbon_g_per_million_tokens") == pytest.approx(expected_j * 1e6 / 3.6e6 * 500)
    virtual = simulate(case, "testbed", is_virtual=True, folder=tmp_path / "virtual")
    of_system = summarize_simulation(virtual, Objectives())
    for name in ("energy_j_per_token", "carbon_g_per_million_tokens"):
        assert of_system.get(name) == pytest.approx(summary.get(name), rel=0.01)


def test_a_run_with_too_many_hops_says_that_energy_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (engine, command, summary):
        monkeypatch.setattr(module, "MAX_STEPS", 10)
    power = "servers=[{hardware='a100', site='Cluster1', count=2, power_idle='60 W', power_busy='400 W'}]"
    given = (power, *ASKED)
    assert simulate_command(["clustered"], Options((PolicyChoice(),), overrides=given), as_json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"proposed: \d+ hops of tokens are more than the .* kept: no hops.parquet, and no energy", said
    )
    _, text, _ = sweep_command("clustered", SweepOptions(overrides=given, n_runs=2), tmp_path, "local", 1)
    assert "Energy is not known of 2 runs" in text


def test_without_prices_and_powers_there_is_nothing() -> None:
    simulation = simulate(Case(load_experiment("clustered", ASKED)), "testbed")
    assert not [
        name for name in summarize_simulation(simulation, Objectives()) if "cost_" in name or "energy" in name
    ]
    assert "energy_j_per_token" not in measures_of(simulation, Objectives())


def test_the_busy_power_of_a_gpu_by_name_is_its_data_sheets() -> None:
    gpus = "[{hardware='h100', site='Cluster1', count=2, gpus=4, power_idle='600 W'}]"
    sized = ("model={profile='llama-2-70b', dtype='bf16'}",)
    experiment = load_experiment("clustered", [f"servers={gpus}", *ASKED, *sized])
    assert experiment.costs.power_w == ((600.0, 2800.0),) * 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("cost_per_hour=1.0", "count=1"), "servers: have cost_per_hour in some tables and not in others"),
        (("power_idle='60 W', power_busy='90 W'", "count=1"), "servers: have power_idle in some tables"),
        (("power_busy='90 W'",), "power_idle: is missing beside power_busy"),
        (("power_idle='60 W', power_busy='50 W'",), "power_busy: must be at least power_idle"),
        (("power_idle='60 W'",), "power_busy: is missing, and no data sheet of a100 states it"),
        (("power_idle=60",), 'power_idle: must be text with a unit such as "300 W"'),
    ],
)
def test_what_is_missing_is_said(keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        loaded(*keys)


def test_time_is_paid_while_hours_last() -> None:
    day_s = 86400.0
    hours = Hours(6 * 3600.0, 10 * 3600.0)
    assert [hours.open_until_s(h * 3600.0) for h in (0, 6, 8, 16, 24, 30, 40)] == [
        h * 3600.0 for h in (0, 0, 2, 10, 10, 10, 20)
    ]
    wraps = Hours(20 * 3600.0, 10 * 3600.0)
    assert wraps.open_until_s(2 * 3600.0) == 2 * 3600.0 and wraps.open_until_s(day_s) == 10 * 3600.0
