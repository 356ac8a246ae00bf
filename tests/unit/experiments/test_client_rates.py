"""Clients with rates or shares of their own, and lengths by quantiles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from tests.unit.experiments.conftest import SMALL

CLIENTS = '[clients]\nsite = "B"'


def loaded(folder: Path, clients: str, *options: str, rate: str = "", n: int = 3000) -> Experiment:
    path = folder / "clients.toml"
    text = SMALL.replace(CLIENTS, clients).replace("rate = 0.5\n", rate)
    path.write_text(text.replace("n_requests = 10", f"n_requests = {n}"))
    return load_experiment(str(path), options)


RATES = '[[clients]]\nsite = "B"\ncount = 2\nrate = 0.4\n[[clients]]\nsite = "A"\nrate = 0.2'


def shares(experiment: Experiment) -> list[float]:
    counts = Counter(request.client for request in experiment.workload.requests)
    return [counts[client] / counts.total() for client in range(3)]


def test_each_client_sends_at_its_rate_and_the_workloads_is_the_sum(tmp_path: Path) -> None:
    experiment = loaded(tmp_path, RATES)
    assert experiment.problem.request_rate == pytest.approx(1.0)
    assert shares(experiment) == pytest.approx([0.4, 0.4, 0.2], abs=0.03)
    last_s = experiment.workload.requests[-1].arrival_at_s
    assert last_s == pytest.approx(3000, rel=0.06)
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(experiment))
    again = load_experiment(str(stored))
    assert again.workload.requests == experiment.workload.requests and again.problem == experiment.problem


def test_shares_are_of_the_workloads_rate_and_so_are_rates_beside_it(tmp_path: Path) -> None:
    of_shares = loaded(tmp_path, RATES.replace("rate", "share"), rate="rate = 5\n")
    of_rates = loaded(tmp_path, RATES, rate="rate = 5\n")
    assert of_shares.problem.request_rate == of_rates.problem.request_rate == 5
    assert of_shares.workload.requests == of_rates.workload.requests
    assert shares(of_shares) == pytest.approx([0.4, 0.4, 0.2], abs=0.03)
    assert loaded(tmp_path, RATES, "workload.rate=2").problem.request_rate == 2


@pytest.mark.parametrize(
    ("clients", "rate", "words"),
    [
        (RATES.replace("rate = 0.2", ""), "", "rate or share in some tables and not in others"),
        (RATES.replace("rate = 0.2", "rate = 0.2\nshare = 1"), "", "and share say the same of a client"),
        (RATES.replace("rate = 0.2", "rate = 0"), "rate = 1\n", r"clients\.1\.rate"),
        (RATES.replace("rate", "share"), "", r"workload\.rate: is missing"),
    ],
)
def test_what_contradicts_itself_is_refused(clients: str, rate: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=words):
        loaded(tmp_path, clients, rate=rate)


def test_lengths_have_the_quantiles_that_are_given(tmp_path: Path) -> None:
    experiment = loaded(tmp_path, RATES, "workload.n_input_tokens={p50=900, p95=4000}")
    lengths = [request.n_input_tokens for request in experiment.workload.requests]
    assert np.quantile(lengths, [0.5, 0.95]) == pytest.approx([900, 4000], rel=0.08)
    # The placement is designed for what one request in 1,000 would exceed, and none does.
    assert (
        14_000 < experiment.problem.n_input_tokens < 16_000
        and max(lengths) <= experiment.problem.n_input_tokens
    )
    shorter = loaded(tmp_path, RATES, "workload.n_input_tokens={p50=900, p95=4000, max=5000}")
    assert shorter.problem.n_input_tokens == 5000
    with pytest.raises(ScenarioError, match=r"p95: must be at least p50 \(900\), not 90"):
        loaded(tmp_path, RATES, "workload.n_input_tokens={p50=900, p95=90}")
    with pytest.raises(ScenarioError, match="max: is missing, and one request in 1,000 would exceed"):
        loaded(tmp_path, RATES, "workload.n_input_tokens={p50=1, p95=100000}")


def test_arrivals_follow_a_curve_whose_mean_is_the_rate(tmp_path: Path) -> None:
    options = "workload.curve=[0, 1, 3]", 'workload.curve_period="300 s"', "workload.arrivals=constant"
    experiment = loaded(tmp_path, CLIENTS, *options, rate="rate = 0.5\n", n=600)
    at_s = np.array([request.arrival_at_s for request in experiment.workload.requests][1:])
    assert not np.any(at_s % 300 < 100)
    second, third = (np.sum((at_s % 300 >= low) & (at_s % 300 < low + 100)) for low in (100, 200))
    assert third / second == pytest.approx(3, rel=0.05)
    assert len(at_s) / (300 * np.ceil(at_s[-1] / 300)) == pytest.approx(0.5, rel=0.02)
    assert experiment.problem.request_rate == 0.5
    doubled = loaded(tmp_path, CLIENTS, *options, rate="rate = 1\n", n=600)
    assert doubled.workload.requests[-1].arrival_at_s < 0.6 * at_s[-1]
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(experiment))
    assert load_experiment(str(stored)).workload.requests == experiment.workload.requests


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("workload.curve=[1, -1]", r"workload\.curve\.1"),
        ("workload.curve=[0, 0]", "is 0 at all times"),
        ("workload.curve_period=1 h", "is of a curve; give workload.curve"),
    ],
)
def test_a_curve_that_is_none_is_refused(option: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=words):
        loaded(tmp_path, CLIENTS, option, rate="rate = 0.5\n")
    changes = 'workload.changes=[{at="9 s", rate=2.0}]'
    with pytest.raises(ScenarioError, match="sets the rates, and so does changes; keep one"):
        loaded(tmp_path, CLIENTS, "workload.curve=[1, 2]", changes, rate="rate = 0.5\n")
