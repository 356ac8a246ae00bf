"""Small run directories, made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testbed.records.summary import SIMULATED
from tests.support.run_tables import MakeRun, hops_of, request


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run directory; ``hops=None`` leaves them out as a long simulation does."""

    def make(
        name: str,
        requests: Sequence[dict[str, Any]],
        hops: Sequence[dict[str, Any]] | None = (),
        scenario: str = "seed = 0\n",
        engine: str = "emulation",
        code: str | None = None,
    ) -> Path:
        path = tmp_path / name
        path.mkdir()
        summary = {"scenario": "hand-made", "engine": engine, "n_requests": len(requests), "seed": 0}
        summary |= {
            "code": code,
            "network": "loopback",
            "compute": "stub",
            "time_scale": 1.0,
            "hops_left_out": hops is None,
            "n_completed": sum(row["status"] == "completed" for row in requests),
            "policy": {"placement": "cg-bp", "routing": "ws-rr"},
            "metrics": {},
        }
        (path / "summary.json").write_text(json.dumps(summary))
        network = "fabric" if engine == "emulation" else SIMULATED
        (path / "plan.json").write_text(
            json.dumps({"placement": {"ranges": [], "cache_bytes": []}, "network": network})
        )
        (path / "scenario.toml").write_text(scenario)
        pq.write_table(pa.Table.from_pylist(list(requests)), path / "requests.parquet")
        if hops is not None:
            rows = hops or hops_of([r for r in requests if r["status"] == "completed"])
            schema = None if rows else pa.Table.from_pylist(hops_of([request(0)])).schema
            pq.write_table(pa.Table.from_pylist(rows, schema), path / "hops.parquet", row_group_size=2)
        return path

    return make
