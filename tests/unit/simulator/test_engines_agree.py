"""The fast engine beside the testbed itself in virtual time, where links' directions differ or overheads stand for them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from testbed.errors import ScenarioError
from testbed.experiments import load_experiment
from testbed.experiments.slo import Objectives
from testbed.records.requests import flat
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate
from testbed.simulator.gaps import token_gaps_s
from testbed.simulator.hops import hop_table
from testbed.simulator.summary import summarize_simulation

ASYMMETRIC = """
name = "asymmetric"
[model]
name = "small"
n_blocks = 4
hidden_size = 4096
value_bytes = 2
block_size = "100 MB"
cache_per_token = "1 kB"
[hardware.small]
memory = "250 MB"
decode = "1 ms"
prefill_base = "1 ms"
prefill_per_token = "10 us"
[[servers]]
hardware = "small"
site = "B"
[[servers]]
hardware = "small"
site = "C"
[clients]
site = "A"
[network]
kind = "clusters"
pairs = [
    { from = "A", to = "B", delay = "10 ms", rate = "1 Gbit/s" },
    { from = "B", to = "A", delay = "90 ms", rate = "1 Gbit/s" },
    { from = "B", to = "C", delay = "10 ms", rate = "1 Gbit/s" },
    { from = "C", to = "B", delay = "90 ms", rate = "1 Gbit/s" },
    { from = "C", to = "A", delay = "10 ms", rate = "10 Mbit/s" },
    { from = "A", to = "C", delay = "90 ms", rate = "100 Mbit/s" },
]
[workload]
arrivals = "constant"
rate = 0.1
n_requests = 3
n_input_tokens = 10
n_output_tokens = 20
[policy]
name = "proposed"
design_concurrency = 1
"""


def both(text: str, *overrides: str, folder: Path) -> tuple[Simulation, Simulation]:
    """By the fast engine, and in virtual time into ``folder / "virtual"``."""
    path = folder / "drawn.toml"
    path.write_text(text)
    case = Case(load_experiment(str(path), overrides))
    fast = simulate(case, "testbed", folder=folder / "fast")
    return fast, simulate(case, "testbed", is_virtual=True, folder=folder / "virtual")


def check_times(fast: Simulation, virtual: Simulation, rel: float) -> None:
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    for one, other in zip(fast.rows, virtual.rows, strict=True):
        assert one.chain == other.chain != ""
        for name in ("setup_s", "ttft_s", "e2e_s"):
            assert one.times[name] == pytest.approx(other.times[name], rel=rel), name


def test_a_chain_of_servers_takes_each_link_in_its_own_direction(tmp_path: Path) -> None:
    """A to B to C and back are 10 ms each; the other way round it would be 90."""
    (tmp_path / "plan.json").write_text("[[1, 2], [3, 2]]")
    placed = (f"policy.placement='fixed:{tmp_path}/plan.json'", "policy.routing='ws-rr'")
    communication = 'policy.communication="server-to-server"'
    fast, virtual = both(ASYMMETRIC, communication, *placed, folder=tmp_path)
    check_times(fast, virtual, 3e-3)
    one = fast.rows[0].times
    assert one.e2e_s is not None and one.ttft_s is not None
    # Three ways, four blocks, and 8,192 bytes over the slow link and two fast ones.
    sent_s = 8 * 8192 * (1e-7 + 2e-9)
    assert (one.e2e_s - one.ttft_s) / 19 == pytest.approx(0.030 + 0.004 + sent_s, rel=0.01)


@pytest.mark.parametrize(
    "options", [(), ('compute.batching="continuous"',)], ids=["closed form", "step by step"]
)
@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_steps_reach_servers_when_the_way_there_is_done(
    communication: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Not after half of the round trip, nor of what is sent both ways: one direction is slow, and the other is long."""
    fast, virtual = both(ASYMMETRIC, f'policy.communication="{communication}"', *options, folder=tmp_path)
    check_times(fast, virtual, 3e-3)
    table, measured = hop_table(fast), pq.read_table(tmp_path / "virtual" / "hops.parquet").to_pydict()
    for name in ("sent_at_s", "arrived_at_s", "departed_at_s", "received_at_s"):
        assert getattr(table, name) == pytest.approx(measured[name], abs=3e-3), name
    for name in ("up_bytes", "down_bytes"):
        assert getattr(table, name).tolist() == measured[name], name


def test_gaps_between_tokens_have_frames_and_end_growing_at_windows(tmp_path: Path) -> None:
    """At 1 Mbit/s frames and headers are much of a token, and blocks with a window of 512 tokens soon read no more."""
    text = (
        f"{ASYMMETRIC.partition('[model]')[0]}[model]\nprofile = 'gemma-3-1b'\n"
        "[[servers]]\nhardware = 't4'\ndtype = 'fp16'\nsite = 'B'\n[clients]\nsite = 'A'\n"
        "[network]\nkind = 'clusters'\npairs = [{ sites = ['A', 'B'], rtt = '1 ms', rate = '1 Mbit/s' }]\n"
        "[workload]\narrivals = 'listed'\nrate = 1\nrequests = [[0, 400, 300]]\n"
        "[policy]\nname = 'proposed'\n"
    )
    fast, virtual = both(text, folder=tmp_path)
    assert "in closed form" in fast.why
    assert token_gaps_s(fast) == pytest.approx(token_gaps_s(virtual), rel=1e-4)
    assert len(token_gaps_s(fast)) == 299


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_overheads_of_ones_own_stand_for_the_transmission_as_published_ones_do(
    communication: str, tmp_path: Path
) -> None:
    overheads = [f"calibration.{name}" for name in ("token_overhead=30 ms", "input_overhead_base=100 ms")]
    fast, virtual = both(ASYMMETRIC, f'policy.communication="{communication}"', *overheads, folder=tmp_path)
    check_times(fast, virtual, 3e-3)
    one = fast.rows[0].times
    assert one.e2e_s is not None and one.ttft_s is not None
    if communication == "hub-spoke":  # two round trips of 100 ms, whatever the links' rates
        assert (one.e2e_s - one.ttft_s) / 19 == pytest.approx(0.2 + 2 * 0.03 + 0.004, rel=1e-3)


def test_overheads_of_tokens_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ScenarioError, match=r"calibration\.token_overhead: is given without input_overhead_base"
    ):
        both(ASYMMETRIC, "calibration.token_overhead=30 ms", folder=tmp_path)


def test_a_request_alone_and_sessions_at_a_time_are_the_same_in_both(tmp_path: Path) -> None:
    """Where sessions meet on servers, and where some wait: neither is what the run itself took."""
    busy = (
        'compute.batching="continuous"',
        "workload.arrivals=poisson",
        "workload.rate=3",
        "policy.queue=fifo",
    )
    # Room for four at a time, which slow each other.
    busy += ("workload.n_requests=12", "model.cache_per_token=200 kB", "hardware.small.decode=60 ms")
    busy += ("hardware.small.session_slope=20 ms",)
    fast, virtual = both(ASYMMETRIC, *busy, folder=tmp_path)
    fast_summary = summarize_simulation(fast, Objectives())
    rows, measured = (
        [flat(row) for row in fast.rows],
        pq.read_table(tmp_path / "virtual" / "requests.parquet").to_pylist(),
    )
    alone_s = rows[0]["unqueued_e2e_s"]
    for row, other in zip(rows, measured, strict=True):
        assert row["unqueued_tpot_s"] == pytest.approx(other["unqueued_tpot_s"])
        for name in ("queue_s", "setup_s", "e2e_s"):
            assert row[f"unqueued_{name}"] == pytest.approx(other[f"unqueued_{name}"]), name
        assert row["unqueued_queue_s"] == 0 and row["unqueued_e2e_s"] == pytest.approx(alone_s, rel=1e-3)
    assert any(row["tpot_s"] > 1.01 * row["unqueued_tpot_s"] for row in rows)
    assert any(row["queue_s"] > 1 for row in rows)
    one, other = (
        dict(summary.achieved_concurrency)
        for summary in (fast_summary, summarize_simulation(virtual, Objectives()))
    )
    assert one == pytest.approx(other, rel=0.02)
    own = json.loads((tmp_path / "virtual" / "summary.json").read_text())["achieved_concurrency"]
    assert own == pytest.approx(other, rel=1e-9)
