"""``[[clients]] hardware``: what embedding and head take, in every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies import Hop, RequestSpec, service_s
from testbed.errors import ScenarioError, UserError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from testbed.simulator.hops import hop_table

TEXT = """
name = "hubs"
[model]
profile = "gemma-4-31b"
n_blocks = 4
[[servers]]
hardware = "h100"
site = "A"
[[clients]]
site = "A"
FIRST
[[clients]]
site = "A"
SECOND
[network]
kind = "clusters"
pairs = [{ sites = ["A", "A"], rtt = "0.2 ms", rate = "1000 Gbit/s" }]
[workload]
rate = 0.2
n_requests = 6
n_input_tokens = 20
n_output_tokens = 5
[policy]
name = "proposed"
"""
CPU_S = 262144 * 5376 / 1.2e9 + 50e-6
GPU_S = (262144 * 5376 * 2 + 262144 * 4) / (0.8 * 1008e9) + 50e-6


def hubs(folder: Path, first: str = "", second: str = "", *options: str) -> Experiment:
    path = folder / "hubs.toml"
    path.write_text(TEXT.replace("FIRST", first).replace("SECOND", second))
    return load_experiment(str(path), options)


MIXED = 'hardware = "cpu-8"', 'hardware = "rtx-4090"'


def test_a_client_reads_the_head_once_per_token(tmp_path: Path) -> None:
    problem = hubs(tmp_path, *MIXED).problem
    assert problem.hub_tokens_s == pytest.approx((CPU_S, GPU_S), rel=1e-5)
    assert pytest.approx(1.2, rel=0.03) == CPU_S  # measured: 1.4 G values in 16 bits on such a CPU
    wide = hubs(tmp_path, 'hardware = "cpu-32-avx512"', "").problem
    assert wide.hub_tokens_s[0] < 0.02 and wide.hub_tokens_s[1] == 0


def test_without_hardware_clients_take_what_compute_says(tmp_path: Path) -> None:
    assert not hubs(tmp_path).problem.has_hub_time
    problem = hubs(tmp_path, "", "", "compute.hub_token=3 ms").problem
    assert problem.hub_s(0) == problem.hub_s(1) == 3e-3
    assert hubs(tmp_path, 'hub_token = "2 ms"', "", "compute.hub_token=3 ms").problem.hub_tokens_s == (
        2e-3,
        3e-3,
    )


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("batching", ["none", "continuous"])
def test_the_engines_and_the_closed_form_agree_on_each_clients_time(
    communication: str, batching: str, tmp_path: Path
) -> None:
    options = f"policy.communication='{communication}'", f"compute.batching='{batching}'"
    experiment = hubs(tmp_path, *MIXED, *options)
    found_s = experiment.problem.hub_tokens_s
    case = Case(experiment)
    fast, virtual = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True)
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    for row, other in zip(fast.rows, virtual.rows, strict=True):
        assert row.times.e2e_s == pytest.approx(other.times.e2e_s, abs=1e-4)
        client = experiment.problem.clients.index(row.client)
        request = RequestSpec(client, row.n_input_tokens, row.n_output_tokens)
        first_s, all_s = service_s(experiment.problem, request, [Hop(0, 0, 4)])
        assert row.times.e2e_s is not None and row.times.ttft_s is not None
        assert row.times.e2e_s - row.times.ttft_s == pytest.approx(all_s - first_s, abs=2e-4)
        assert all_s > 5 * experiment.problem.hub_s(client)
    table = hop_table(fast)
    clients = [plan.client for plan in experiment.workload.requests]
    hubs_s = [experiment.problem.hub_s(clients[request]) for request in table.request]
    assert table.model_client_s == pytest.approx(hubs_s)  # every hop is the last
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(experiment))
    assert load_experiment(str(stored)).problem == experiment.problem
    # What follows from the hardware may stand beside it, as where a study changes other clients.
    again = hubs(
        tmp_path, *(f'{keys}\nhub_token = "{1e3 * s} ms"' for keys, s in zip(MIXED, found_s, strict=True))
    )
    assert again.problem.hub_tokens_s == found_s


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        (
            'hardware = "cpu-9"',
            (),
            r'clients\.0\.hardware: unknown hardware "cpu-9"; valid: cpu-8, cpu-32-avx512',
        ),
        ('hardware = "l4"', ("compute.hub_token=1 ms",), r"and so does compute\.hub_token; keep one"),
        ('hardware = "l4"\nhub_token = "1 ms"', (), r"and so does clients\.hub_token; keep one"),
    ],
)
def test_what_contradicts_itself_is_refused(
    keys: str, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError, match=words):
        hubs(tmp_path, keys, "", *options)


def test_the_reference_has_no_clients_that_compute(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hardware of clients has no meaning"):
        simulate(Case(hubs(tmp_path, *MIXED)), "reference")
