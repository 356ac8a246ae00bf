"""Connections on ``memory`` begin with the windows that they have after a prompt, which nobody has to send."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from nodes import node, peering
from nodes.connection import Connection, warm
from testbed.experiments import load_experiment
from testbed.runs.session import run_quietly
from testbed.runtime.nodeset import NodeSet

SHORT = ("workload.n_requests=4", "workload.n_output_tokens=3", "workload.rate=1")
SHORT += ("model.n_blocks=8", "servers.0.count=2", "servers.1.count=0", "policy.design_concurrency=10")
"""A chain of two servers."""
TABLES = ("requests.parquet", "hops.parquet", "links.parquet")
LARGE = "workload.n_input_tokens=900"
"""Fills the windows: they grow with what is sent to warm connections."""


def up(folder: Path, *options: str) -> list[list[dict[str, Any]]]:
    """The rows of the run's tables."""
    run_quietly(load_experiment("clustered", [*SHORT, *options, "network.backend=memory"]), folder)
    return [pq.read_table(folder / name).to_pylist() for name in TABLES]


def assert_agree(tables: list[list[dict[str, Any]]], others: list[list[dict[str, Any]]]) -> None:
    """To a nanosecond, to which instants are rounded: time zero comes later where something is sent before."""
    for rows, other_rows in zip(tables, others, strict=True):
        assert len(rows) == len(other_rows) > 0
        for row, other in zip(rows, other_rows, strict=True):
            for name, value in row.items():
                is_close = isinstance(value, float) and other[name] == pytest.approx(value, rel=0, abs=1e-8)
                assert is_close or other[name] == value, name


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that nodes are asked to send over every connection and back."""
    asked: list[int] = []

    async def noted(connections: Iterable[Connection], n_bytes: int) -> None:
        asked.append(n_bytes)
        await warm(connections, n_bytes)

    for module in (node, peering):
        monkeypatch.setattr(module, "warm", noted)
    return asked


@pytest.mark.parametrize(
    "more",
    [
        ["policy.communication=hub-spoke"],
        ["policy.communication=server-to-server"],
        ["sites=[{name='Cluster2', up='40 Mbit/s', down='200 Mbit/s'}]", "clients.count=3"],
    ],
    ids=["hub-spoke", "server-to-server", "clients that share a site's link"],
)
def test_a_run_is_the_one_that_it_is_when_prompts_are_sent_first(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmed: list[int]
) -> None:
    options = (LARGE, *more)
    begun = up(tmp_path / "set", *options)
    assert sum(warmed) == 0
    monkeypatch.setattr(NodeSet, "_windows", {})
    assert_agree(up(tmp_path / "sent", *options), begun)
    assert sum(warmed) > 0


@pytest.mark.parametrize(
    "options",
    [
        ["workload.n_input_tokens=200"],
        [LARGE, "tcp.slow_start_after_idle=true"],
    ],
    ids=["part of it counts when a process next waits for the kernel", "slow start begins anew"],
)
def test_prompts_are_sent_where_they_leave_more_than_windows(
    options: list[str], tmp_path: Path, warmed: list[int]
) -> None:
    up(tmp_path / "run", *options)
    assert sum(warmed) > 0


def test_cold_connections_have_the_first_window(tmp_path: Path, warmed: list[int]) -> None:
    cold = up(tmp_path / "cold", LARGE, "tcp.warm=false")
    assert sum(warmed) == 0 and cold != up(tmp_path / "warm", LARGE)
