"""Real transformer blocks on two machines of a Ray cluster: the tokens are those of the whole model on one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.blocks import need_blocks
from tests.support.ray_cluster import cluster, need_ray

need_blocks()
need_ray()
pytestmark = pytest.mark.timeout(400)


def test_real_blocks_on_two_machines_give_the_same_tokens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "testbed", "up", "bloom-tiny", "--compute", "blocks", "--hosts", "ray"]
    command += [
        "--network",
        "hosts",
        "--no-page",
        "--no-report",
        "--no-twin",
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    command += ["--set", "workload.n_requests=4", "--set", "workload.n_output_tokens=20"]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        cluster(Path(folder), n_machines=2, ahead_s=500) as machines,
    ):
        run = subprocess.run(machines[0].inside(command), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert (summary["n_completed"], summary["n_tokens_checked"], summary["n_tokens_altered"]) == (4, 80, 0)
    assert sum(machine["n_nodes"] for machine in summary["machines"]) > 0
