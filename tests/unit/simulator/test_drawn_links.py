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
