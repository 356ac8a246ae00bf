"""Jitter and losses: what a run draws follows from its seed, in every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.experiments import load_experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from tests.unit.simulator.test_late_steps import SLOW

NOISY = {
    "jitter": "jitter = '20 ms', rate = '1 Gbit/s'",
    "loss": "loss = 0.1, rate = '1 Gbit/s'",
}


@pytest.mark.parametrize("is_virtual", [False, True])
@pytest.mark.parametrize("noise", NOISY)
def test_another_seed_is_another_draw_of_every_link(tmp_path: Path, noise: str, is_virtual: bool) -> None:
    """The requests are listed, so that seeds differ in nothing else."""
    path = tmp_path / "noisy.toml"
    path.write_text(SLOW.replace('rate = "8 Mbit/s"', NOISY[noise]), encoding="utf-8")

    def ended_at_s(seed: int) -> list[float | None]:
        case = Case(load_experiment(str(path), [f"seed={seed}"]))
        simulation = simulate(case, "testbed", is_virtual=is_virtual)
        assert simulation.engine == ("virtual" if is_virtual else "fast")
        return [row.ended_at_s for row in simulation.rows]

    first, other = ended_at_s(0), ended_at_s(1)
    assert first == ended_at_s(0)
    assert all(a != b for a, b in zip(first, other, strict=True))


LOSSY = """
name = "lossy"
servers = [{{ hardware = "a100", site = "far" }}]
clients = [{{ site = "near", count = 8 }}]
model = {{ profile = "bloom-176b", n_blocks = 2 }}
compute = {{ batching = "continuous" }}

[network]
kind = "clusters"
pairs = [
    {{ sites = ["near", "near"], rtt = "1 ms", rate = "10 Gbit/s" }},
    {{ sites = ["far", "far"], rtt = "1 ms", rate = "10 Gbit/s" }},
    {{ sites = ["near", "far"], rtt = "{rtt_ms} ms", rate = "10 Gbit/s", loss = {loss} }},
]

[workload]
arrivals = "listed"
rate = 1
requests = [{requests}]
"""
REQUESTS = ", ".join(f"[{0.013 * i:.3f}, 5, 150, {i}]" for i in range(8))


@pytest.mark.parametrize("is_virtual", [False, True])
@pytest.mark.parametrize(
    ("rtt_ms", "loss", "measured_s"),
    [(80, 0.001, 0.0934), (80, 0.005, 0.1952), (80, 0.02, 0.4200), (10, 0.005, 0.0334), (10, 0.02, 0.0735)],
)
def test_losses_cost_what_they_cost_the_kernels_tcp(
    tmp_path: Path, rtt_ms: int, loss: float, measured_s: float, is_virtual: bool
) -> None:
    """Measured: the mean time per token of the same requests in real time; tokens have 20 packets (docs/virtual-time.md)."""
    path = tmp_path / "lossy.toml"
    path.write_text(LOSSY.format(rtt_ms=rtt_ms, loss=loss, requests=REQUESTS), encoding="utf-8")
    simulation = simulate(Case(load_experiment(str(path))), "testbed", is_virtual=is_virtual)
    assert simulation.engine == ("virtual" if is_virtual else "fast")
    found_s = [row.times["tpot_s"] or 0.0 for row in simulation.rows]
    assert sum(found_s) / len(found_s) == pytest.approx(measured_s, rel=0.1)
