"""Real transformer blocks on two machines of a Ray cluster: the tokens are those of the whole model on one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.blocks import need_blocks
from tests.support.ray_cluster import HEAD, PORT, cluster, need_ray
from tests.support.runs import Testbed

need_blocks()
need_ray()
pytestmark = pytest.mark.timeout(400)


def test_real_blocks_on_two_machines_give_the_same_tokens(testbed: Testbed) -> None:
    options = ("--compute", "blocks", "--hosts", "ray", "--network", "hosts", "--no-twin", "--json")
    options += ("--no-page", "--no-report")
    options += ("--set", "workload.n_requests=4", "--set", "workload.n_output_tokens=20")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        cluster(Path(folder), n_machines=2, ahead_s=500) as machines,
    ):
        # Of the first machine it has the network alone, so that it can be forked.
        how = {"wrapper": machines[0].entered(), "env": {"RAY_ADDRESS": f"{HEAD}:{PORT}"}}
        run = testbed.up("bloom-tiny", *options, timeout_s=300, **how)
    assert run.code == 0, run.stderr
    summary = run.json()
    assert (summary["n_completed"], summary["n_tokens_checked"], summary["n_tokens_altered"]) == (4, 80, 0)
    assert sum(machine["n_nodes"] for machine in summary["machines"]) > 0
