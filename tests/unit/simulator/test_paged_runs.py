"""Caches that grow: what the fast engine says and writes beside the testbed itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from testbed.control.steering import online_policy
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.simulator.cases import Case
from testbed.simulator.command import Options, simulate_command
from testbed.simulator.engine import _engine, simulate

SCARCE = (
    'cache.mode="paged"',
    "cache.page_tokens=4",
    "cache.high_water=1.0",
    "cache.expected_output=4",
    "workload.rate=4",
    "workload.n_requests=12",
    "workload.n_output_tokens=32",
    "policy.design_concurrency=2",
    "policy.queue=fifo",
    # Small on wide links, so that messages take the delay alone.
    "model.hidden_size=112",
    *(f"network.pairs.{pair}.rate='1000000 Gbit/s'" for pair in range(6)),
)


def served(folder: Path, clock: str | None, *more: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The summary, and ``requests.parquet`` and ``hops.parquet`` as columns."""
    options = Options((PolicyChoice(),), overrides=(*SCARCE, *more), out=folder, clock=clock)
    assert simulate_command(["clustered"], options, as_json=True) == 0
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    columns: dict[str, list[Any]] = {}
    for table in ("requests", "hops"):
        found = pq.read_table(folder / f"{table}.parquet").to_pydict()
        columns |= {f"{table}.{name}": values for name, values in found.items()}
    return summary, columns


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("replay", ["at_once", "step_by_step"])
def test_the_fast_engine_has_the_preemptions_the_replays_and_the_tables_of_the_testbed(
    tmp_path: Path, communication: str, replay: str
) -> None:
    more = f"policy.communication={communication}", f"recovery.replay={replay}"
    fast, tables = served(tmp_path / "fast", None, *more)
    virtual, system = served(tmp_path / "virtual", "virtual", *more)
    assert fast["preemption"]["n_preemptions"] > 3
    for name in ("n_preemptions", "n_requests", "tokens"):
        assert fast["preemption"][name] == virtual["preemption"][name], name
    assert fast["n_hop_rows"] == len(tables["hops.server"]) == len(system["hops.server"])
    exactly = ("request", "token", "hop", "server", "up_bytes", "down_bytes", "replayed_tokens")
    for name in ("requests.n_preemptions", "requests.preempted_tokens", *(f"hops.{one}" for one in exactly)):
        assert tables[name] == system[name], name
    nearly = ("sent_at_s", "arrived_at_s", "departed_at_s", "received_at_s", "hop_client_s")
    for name in ("requests.preempted_s", "requests.e2e_s", *(f"hops.{one}" for one in nearly)):
        assert tables[name] == pytest.approx(system[name], abs=1e-8), name


def test_which_engine_serves_is_said_and_the_reference_has_no_such_caches() -> None:
    case = Case(load_experiment("clustered", [*SCARCE, "workload.n_requests=3"]))
    simulation = simulate(case, "testbed")
    assert (simulation.engine, simulation.why) == (
        "fast",
        "nothing disturbs a session midway; step by step, since caches grow",
    )
    moving = Case(load_experiment("clustered", [*SCARCE, 'policy.online="two-time-scale"']))
    assert _engine(moving, "testbed", online_policy(moving.experiment)) == (
        "virtual",
        "policy.online two-time-scale, where caches grow, can disturb a session midway",
    )
    serial = Case(load_experiment("clustered", [*SCARCE, "workload.n_requests=3", "compute.serial=true"]))
    assert simulate(serial, "testbed").engine == "virtual"
    with pytest.raises(UserError, match=r"has no meaning in the reference mode; add --mode testbed"):
        simulate(Case(load_experiment("clustered", ['cache.mode="paged"'])), "reference")
