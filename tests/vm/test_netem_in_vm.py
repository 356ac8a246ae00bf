"""The ``netem`` backend on a kernel that has netem: one boot, as root and as an unprivileged user."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Running
from tests.vm.guest import CONTRACT, NOBODY, ON_MEMORY
from tests.vm.lane import ROOT, GuestResult, missing, run_in_vm

GUEST_S = 3600
pytestmark = pytest.mark.timeout(GUEST_S + 100)
as_either_user = pytest.mark.parametrize("user", [0, NOBODY], ids=["root", "rootless"])


@pytest.fixture(scope="module")
def guest() -> GuestResult:
    if "vm" not in os.environ.get("TESTBED_REQUIRE", "").split(","):
        pytest.skip("VM lane: it takes minutes, and runs only where TESTBED_REQUIRE names vm")
    lacking = missing()
    if lacking is not None:
        pytest.fail(f"the VM lane must run here, but: {lacking}")
    return run_in_vm("python3 -m tests.vm.guest", timeout_s=GUEST_S)


def part(guest: GuestResult, name: str) -> str:
    """What the guest printed in a part of its command, which must have succeeded."""
    found = re.search(
        rf"(?:^|@@part [^\n]*\n)((?:(?!@@part ).)*)@@part {name} (\d+)", guest.output, re.DOTALL
    )
    assert found, guest.output[-6000:]
    assert found.group(2) == "0", found.group(1)[-6000:]
    return found.group(1)


def run_of(guest: GuestResult, name: str, user: int) -> dict[str, Any]:
    """What a run of the command line answered on stdout, and all that it said."""
    runs = [json.loads(line) for line in re.findall(r"@@run (.*)", part(guest, "runs"))]
    (run,) = [run for run in runs if (run["run"], run["user"]) == (name, user)]
    assert run["status"] == 0, run["stderr"]
    return {**run, "answer": json.loads(run["stdout"])}


def test_the_kernel_was_told_what_was_asked_and_no_full_link_drops(guest: GuestResult) -> None:
    text = part(guest, "contract-0")
    assert re.search(r"guest_netem\.py::test_\w+ PASSED", text), text
    assert "skipped" not in text, text


@as_either_user
def test_netem_keeps_every_promise_of_the_network_contract(guest: GuestResult, user: int) -> None:
    promised = {
        name
        for path in CONTRACT
        for name in re.findall(r"^def (test_\w+)\(\s*backend_class", (ROOT / path).read_text(), re.MULTILINE)
    }
    kept = set(re.findall(r"::(test_\w+)\[netem\] PASSED", part(guest, f"contract-{user}")))
    assert kept == promised
    assert len(kept) > 10


def test_programs_on_any_two_nodes_find_the_links_of_the_scenario_and_those_set_by_hand(
    guest: GuestResult,
) -> None:
    text = part(guest, "programs")
    found = [float(ms) for ms in re.findall(r"@@rtt \w+ round-trip min/avg/max = [\d.]+/([\d.]+)/", text)]
    for rtt_ms, asked_ms in zip(found, [100, 5, 40, 5], strict=True):
        assert asked_ms <= rtt_ms < asked_ms + 5
    assert re.search(r"^10\.77\.\d+\.\d+ a100-1\s*$", text, re.MULTILINE)


@pytest.mark.parametrize(("name", "user"), [("faults", 0), ("forwarding", NOBODY)])
def test_a_scenario_is_served_over_netem_and_its_sessions_outlive_a_server(
    guest: GuestResult, name: str, user: int
) -> None:
    run = run_of(guest, name, user)
    assert "10 nodes up" in run["stderr"]
    answer = run["answer"]
    assert (answer["network"], answer["n_requests"]) == ("netem", 2)
    assert (answer["n_completed"], answer["n_faults"]) == (2, 1)
    assert answer["n_replays"] >= 1
    assert answer["recovery_s"]["min"] >= 0.9 * answer["recovery_floor_s"]["min"]
    assert answer["leaks"] == {"sessions": 0, "cache_bytes": 0.0, "descriptors": 0, "namespaces": 0}


def test_virtual_time_is_as_exact_on_a_kernel_whose_timers_only_a_route_can_put_off(
    guest: GuestResult, tmp_path: Path
) -> None:
    here = Running([*ON_MEMORY, "--out", str(tmp_path / "run")], tmp_path / "said").wait()
    assert here.code == 0, here.stderr
    answer, memory = run_of(guest, "virtual", NOBODY)["answer"], here.json()
    assert (answer["clock"], answer["network"], memory["network"]) == ("virtual", "fabric", "memory")
    assert answer["n_completed"] == memory["n_completed"] == 2
    assert answer["emulation_error"]["hop_s"]["max_abs_ratio"] < 1e-3
    for metric in ("ttft_s", "e2e_s"):
        assert answer["metrics"][metric]["max"] == pytest.approx(memory["metrics"][metric]["max"], abs=1e-6)


def test_the_links_of_gts_ce_over_netem_are_never_faster_than_asked(guest: GuestResult) -> None:
    answer = run_of(guest, "links", NOBODY)["answer"]
    assert answer["network"] == "netem"
    assert len(answer["pairs"]) == 6, "both directions of three pairs"
    for row in answer["pairs"]:
        assert row["rtt_ms"]["p50"] > row["rtt_ms"]["requested"] - 0.001, row
        assert 0 < row["rate_mbps"]["achieved"] < 1.01 * row["rate_mbps"]["requested"], row


def test_netem_delays_and_rates_are_what_was_asked_within_what_emulation_allows(guest: GuestResult) -> None:
    (rows,) = re.findall(r"@@accuracy (.*)", part(guest, "accuracy"))
    for row in json.loads(rows):
        for size in (64, 28_672):
            assert -0.1 < row[f"echo_{size}_error_p50_ms"] < 2, row
        assert -0.01 < row["echo_573440_error_p50_ms"] / row["echo_573440_asked_ms"] < 0.1, row
