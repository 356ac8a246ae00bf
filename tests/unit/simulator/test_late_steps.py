"""Steps that are answered late: a client gives a server up of which it hears nothing, and only that one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from testbed.simulator.hops import hop_table

SLOW = """
name = "late"
servers = [{ hardware = "a100", site = "far" }]
clients = [{ site = "near" }]
model = { profile = "bloom-176b", n_blocks = 8 }

[network]
kind = "clusters"
pairs = [
    { sites = ["near", "near"], rtt = "1 ms", rate = "1 Gbit/s" },
    { sites = ["far", "far"], rtt = "1 ms", rate = "1 Gbit/s" },
    { sites = ["near", "far"], rtt = "100 ms", rate = "8 Mbit/s" },
]

[workload]
arrivals = "listed"
requests = [[0.0, 5, 12], [0.2, 400, 3], [0.3, 5, 12]]
"""


def loaded(folder: Path, *options: str) -> Experiment:
    """A prompt of 11.5 MB is on its way while two other requests decode."""
    path = folder / "late.toml"
    path.write_text(SLOW, encoding="utf-8")
    return load_experiment(str(path), options)


def test_a_client_that_gives_up_a_server_behind_a_long_prompt_does_so_in_a_simulation(tmp_path: Path) -> None:
    """What a new connection sends at once, 868,800 bytes, is ahead of a step for 0.9 s, and nothing is confirmed meanwhile."""
    cold = ("tcp.warm=false", "tcp.slow_start_after_idle=false", "recovery.request_timeout='300 ms'")
    simulation = simulate(Case(loaded(tmp_path, *cold)), "testbed")
    assert simulation.engine == "virtual"
    assert "nothing is heard of a100-0 for 1.05 s after a step was sent to it" in simulation.why
    assert [row.n_recoveries for row in simulation.rows] == [1, 0, 1]


def test_a_late_step_is_no_reason_as_long_as_the_server_confirms_parts_of_a_prompt(tmp_path: Path) -> None:
    experiment = loaded(tmp_path, "recovery.request_timeout='200 ms'")
    fast = simulate(Case(experiment), "testbed", folder=tmp_path)
    virtual = simulate(Case(experiment), "testbed", is_virtual=True)
    hops = hop_table(fast)
    decodes_s = np.asarray(hops.received_at_s - hops.sent_at_s)[np.asarray(hops.token) > 0]
    assert decodes_s.max() > 0.2
    assert fast.engine == "fast"
    assert [row.ended_at_s for row in fast.rows] == pytest.approx(
        [row.ended_at_s for row in virtual.rows], abs=1e-7
    )
    assert [row.n_recoveries for row in virtual.rows] == [0, 0, 0]


def test_with_forwarding_a_result_that_is_late_is_left_to_the_testbed_itself(tmp_path: Path) -> None:
    """Clients ask servers there whether they are alive, which is not simulated."""
    given = ("policy.communication='server-to-server'", "recovery.request_timeout='200 ms'")
    simulation = simulate(Case(loaded(tmp_path, *given)), "testbed")
    assert simulation.engine == "virtual" and "after a step was sent to it" in simulation.why
