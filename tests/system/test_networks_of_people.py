"""Runs on links as people have them: a site's own uplink (``[[sites]]``), recordings (``[[network.trace]]``)."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from random import Random
from typing import Any

import pytest

from policies.links import Link
from tests.support.runs import Testbed, rows_of

N_TOKENS, TOKEN_BYTES, UP_BPS = 100, 28_672, 40e6
SCENARIO = f"""
model = {{ profile = "bloom-176b", n_blocks = 4 }}
servers = [{{ hardware = "a100", name = "s", site = "Home", count = 2, memory = "5.33 GB" }}]
clients = [{{ site = "Out", count = 2 }}]
policy = {{ name = "petals" }}
[workload]
arrivals = "listed"
requests = [[0, {N_TOKENS}, 1, 0], [0.73, {N_TOKENS}, 1, 1]]
[network]
kind = "clusters"
pairs = [
    {{ sites = ["Home", "Home"], rtt = "1 ms", rate = "1 Gbit/s" }},
    {{ from = "Out", to = "Home", delay = "10 ms", rate = "1 Gbit/s" }},
    {{ from = "Home", to = "Out", delay = "10 ms", rate = "RATE" }},
]
"""
ALONE_S = Link(0.0, UP_BPS).transmission_s(N_TOKENS * TOKEN_BYTES)


@pytest.mark.parametrize("shares", [True, False])
def test_answers_of_two_servers_wait_for_each_other_only_on_an_uplink_of_their_site(
    testbed: Testbed, tmp_path: Path, shares: bool
) -> None:
    path = tmp_path / "home.toml"
    path.write_text(SCENARIO.replace("RATE", "1 Gbit/s" if shares else "40 Mbit/s"), encoding="utf-8")
    options = ("--set", 'sites=[{name="Home", up="40 Mbit/s"}]') if shares else ()
    outcome = testbed("up", str(path), "--network", "memory", *options)
    assert outcome.code == 0, outcome.stderr
    hops: list[dict[str, Any]] = rows_of(outcome.run_dir / "hops.parquet")
    sent = sorted(
        (row["departed_at_s"], row["received_at_s"] - 0.01, row["server"], row["request"]) for row in hops
    )
    _, (began_s, one_s, one, asked), (also_s, other_s, other, of), _ = sent
    assert {one, other} == {"s-0", "s-1"} and asked != of
    assert also_s - began_s < 0.1 * ALONE_S
    if shares:
        assert max(one_s, other_s) - began_s == pytest.approx(2 * ALONE_S, rel=0.02)
    else:
        assert [one_s - began_s, other_s - also_s] == pytest.approx([ALONE_S] * 2, rel=0.02)


def test_a_prompt_over_a_packet_trace_arrives_when_the_trace_has_let_it_through(
    testbed: Testbed, tmp_path: Path
) -> None:
    rng, opportunities_ms = Random(1), list[int]()
    for second in range(12):  # from 0.2 to 25 Mbit/s, changing every second
        gap_ms = rng.choice([0.5, 1, 5, 60])
        opportunities_ms += [round(1000 * second + (n + 1) * gap_ms) for n in range(int(1000 / gap_ms))]
    (tmp_path / "up.trace").write_text("".join(f"{ms}\n" for ms in opportunities_ms), encoding="utf-8")
    path = tmp_path / "trace.toml"
    table = '[[network.trace]]\nlink = ["Out", "Home"]\ndirection = "forward"\nkind = "mahimahi"\nfile = "up.trace"\n'
    path.write_text(SCENARIO.replace("RATE", "1 Gbit/s") + table, encoding="utf-8")
    outcome = testbed(
        "up",
        str(path),
        "--network",
        "memory",
        "--set",
        f"workload.requests=[[0, {2 * N_TOKENS}, 1, 0], [90, 1, 1, 0]]",
    )
    assert outcome.code == 0, outcome.stderr
    hop = min(rows_of(outcome.run_dir / "hops.parquet"), key=lambda row: row["sent_at_s"])
    n_packets = -(-hop["up_bytes"] // 1448)
    first = bisect_left(opportunities_ms, 1e3 * hop["sent_at_s"])
    through_s = opportunities_ms[first + n_packets - 1] / 1e3
    assert through_s - hop["sent_at_s"] > 2
    assert hop["arrived_at_s"] - 0.01 == pytest.approx(through_s, abs=0.1)
