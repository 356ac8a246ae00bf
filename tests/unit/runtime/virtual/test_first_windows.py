"""Connections on ``memory`` begin with the windows that they have after a prompt, which nobody has to send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from netem.networks import NETWORKS
from netem.tcp import FILLING_BYTES
from nodes import node, peering
from nodes.connection import Connection, warm
from nodes.wire import PART_BYTES
from testbed.experiments import load_experiment
from testbed.runs.session import run_quietly
from testbed.runtime import nodeset
from testbed.runtime.warming import Warming, warming_by_windows

SHORT = ("workload.n_requests=2", "workload.n_output_tokens=3", "workload.rate=1")
SHORT += ("model.n_blocks=8", "servers.0.count=2", "servers.1.count=0", "policy.design_concurrency=10")
"""A chain of two servers."""
ONE_EACH = ("clients.count=2", "seed=1")
"""Each client has a request."""
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

    async def noted(connections: Iterable[Connection], n_bytes: int, at_once_bytes: int) -> None:
        asked.append(n_bytes)
        await warm(connections, n_bytes, at_once_bytes)

    for module in (node, peering):
        monkeypatch.setattr(module, "warm", noted)
    return asked


@pytest.mark.parametrize(
    ("most_pings", "more"),
    [
        (0, [LARGE, "policy.communication=hub-spoke"]),
        (0, [LARGE, "policy.communication=server-to-server"]),
        (0, [LARGE, "sites=[{name='Cluster2', up='40 Mbit/s', down='200 Mbit/s'}]", *ONE_EACH]),
        (4, ["workload.n_input_tokens=200", "policy.communication=server-to-server"]),
    ],
    ids=["hub-spoke", "server-to-server", "clients that share a site's link", "written bytes count on"],
)
def test_a_run_is_the_one_that_it_is_when_prompts_are_sent_first(
    most_pings: int, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmed: list[int]
) -> None:
    begun = up(tmp_path / "set", *more)
    assert len({row["client"] for row in begun[0]}) == (2 if set(ONE_EACH) <= set(more) else 1)
    assert max(warmed, default=0) == most_pings * PART_BYTES
    monkeypatch.setattr(nodeset, "warming_by_windows", lambda *_: None)
    assert_agree(up(tmp_path / "sent", *more), begun)
    assert max(warmed) > 50 * PART_BYTES


def test_prompts_are_sent_where_slow_start_begins_anew(tmp_path: Path, warmed: list[int]) -> None:
    up(tmp_path / "run", LARGE, "tcp.slow_start_after_idle=true")
    assert max(warmed) > 50 * PART_BYTES


def test_cold_connections_have_the_first_window(tmp_path: Path, warmed: list[int]) -> None:
    cold = up(tmp_path / "cold", LARGE, "tcp.warm=false")
    assert sum(warmed) == 0 and cold != up(tmp_path / "warm", LARGE)


def by_windows(n_tokens: int, network: str, pairs: Sequence[tuple[str, str]]) -> Warming | None:
    experiment = load_experiment("clustered", [f"workload.n_input_tokens={n_tokens}"])
    return warming_by_windows(experiment, NETWORKS[network], pairs)


TO_SERVERS = [("client-0", "a100-0"), ("client-0", "mig-1g-0")]
BETWEEN_SERVERS = [("a100-0", "a100-1"), ("a100-1", "a100-0")]


@pytest.mark.parametrize("n_tokens", [130, 200, 333, 900, 5000])
def test_the_kernels_connections_receive_what_fills_their_windows(n_tokens: int) -> None:
    found, on_memory = (by_windows(n_tokens, network, TO_SERVERS) for network in ("fabric", "memory"))
    assert found is not None and on_memory is not None
    assert FILLING_BYTES <= found.n_bytes < FILLING_BYTES + 6 * PART_BYTES
    assert (found.n_bytes - on_memory.n_bytes) % (5 * PART_BYTES) == 0  # a process looks after every fifth
    assert found.windows == on_memory.windows
    assert all(size > 2 * found.at_once_bytes for sizes in found.windows.values() for size in sizes)


def test_a_short_prompt_is_sent() -> None:
    assert by_windows(20, "fabric", TO_SERVERS) is None and by_windows(1, "memory", TO_SERVERS) is None


def test_a_route_has_one_window() -> None:
    """What a server asks another for takes the same route as what it answers, which leaves a larger window."""
    assert by_windows(200, "fabric", BETWEEN_SERVERS) is None
    assert by_windows(200, "memory", BETWEEN_SERVERS) is not None
    assert by_windows(900, "fabric", BETWEEN_SERVERS) is not None


@pytest.mark.parametrize("network", ["netem", "loopback", "hosts"])
def test_other_networks_connections_begin_as_the_kernel_has_it(network: str) -> None:
    assert by_windows(900, network, TO_SERVERS) is None
