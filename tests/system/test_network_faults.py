"""What happens to a network while it is used: parts that die or vanish, networks of the host, many runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from netem.fabric import DEVICE
from tests.support.runs import (
    FAST,
    LONG,
    REAL,
    Outcome,
    Testbed,
    all_namespaces,
    assert_tables_hold_the_whole_log,
    cleaned,
    logged_tokens,
    namespaces,
    node_pid,
    processes,
    require,
    rows_of,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("fabric")


def assert_ends_with_a_complete_record(outcome: Outcome, run_dir: Path, before: set[tuple[int, int]]) -> None:
    """Exit code 1, all that was logged is in the tables, and the summary counts what did not complete."""
    assert outcome.code == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert_tables_hold_the_whole_log(run_dir)
    assert before <= set(logged_tokens(run_dir))
    rows = rows_of(run_dir / "requests.parquet")
    assert len(rows) == 60
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["n_completed"] == sum(row["status"] == "completed" for row in rows) < 60


def test_a_network_that_dies_is_named_and_leaves_a_complete_record(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--network", "fabric", *LONG)
    run_dir = run.serving()
    before = set(logged_tokens(run_dir))
    os.kill(node_pid(run_dir, "fabric"), signal.SIGKILL)
    outcome = run.wait()
    assert outcome.stderr.splitlines()[-1] == "testbed: fabric ended unexpectedly (status -9)"
    assert_ends_with_a_complete_record(outcome, run_dir, before)


@pytest.mark.parametrize("node", ["a100-0", "client-0"])
def test_a_device_that_vanishes_ends_the_run_with_a_complete_record(node: str, testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--network", "fabric", *LONG)
    run_dir = run.serving()
    before = set(logged_tokens(run_dir))
    rootless = ["--user", "--preserve-credentials"] if os.geteuid() else []
    enter = ["nsenter", "--target", str(node_pid(run_dir, node)), *rootless, "--net"]
    deleted = subprocess.run([*enter, "ip", "link", "delete", DEVICE])
    assert deleted.returncode in (0, -signal.SIGTERM), "a run that has ended ends programs on its nodes"
    outcome = run.wait()
    last = outcome.stderr.splitlines()[-1]
    # Whoever notices first: the forwarder, or the node.
    assert (
        f"the network device of {node} is gone" in last
        or f"{node} ended unexpectedly (status 1): its net" in last
    )
    assert_ends_with_a_complete_record(outcome, run_dir, before)


def test_links_says_which_part_of_the_network_died(testbed: Testbed, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = testbed.start("links", "clustered", "--network", "fabric", env={"TMPDIR": str(temporary)})
    run.says("9 pairs")
    os.kill(node_pid(temporary, "fabric"), signal.SIGKILL)
    outcome = run.wait()
    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr.splitlines()[-1].startswith("testbed: ")
    assert "fabric ended unexpectedly (status -9)" in outcome.stderr.splitlines()[-1]
    assert list(temporary.iterdir()) == []


HOST = """
set -e
exec 2>"$0/host-errors"
ip link set lo up
ip link add host0 type veth peer name host1
for end in host0 host1; do echo 1 >/proc/sys/net/ipv6/conf/$end/disable_ipv6; done
ip addr add 198.18.0.1/15 dev host0
ip link set host0 up; ip link set host1 up
ip neigh add 198.18.0.2 lladdr 02:00:00:00:00:01 nud permanent dev host0
state() { ip -o addr; ip route; ip neigh show nud permanent; }
for _ in $(seq 500); do ip route | grep -q linkdown || break; sleep 0.02; done  # the link comes up by itself
state >"$0/before"
grep host0: /proc/net/dev >"$0/sent-before"
python3 -m http.server --bind 198.18.0.1 --directory "$0" 80 >/dev/null 2>&1 &
server=$!
trap 'kill $server' EXIT
code=0
"${@:1}" >"$0/stdout" 2>"$0/stderr" || code=$?
grep host0: /proc/net/dev >"$0/sent-after"
state >"$0/after"
python3 - "$0" <<'END'
import sys, urllib.request
folder = sys.argv[1]
text = urllib.request.urlopen("http://198.18.0.1/before", timeout=10).read()
open(f"{folder}/served", "wb").write(text)
END
exit $code
"""
"""A host with an address and a route in the testbed's own range, and a service on it."""


@pytest.mark.parametrize("clock", [(), REAL], ids=["virtual time", "real time"])
def test_a_host_that_uses_the_same_addresses_keeps_them_and_hears_nothing_of_a_run(
    clock: tuple[str, ...], testbed: Testbed, tmp_path: Path
) -> None:
    rootless = ["--user", "--map-root-user"] if os.geteuid() else []
    namespace = ["unshare", *rootless, "--net"]
    veth = subprocess.run(
        [*namespace, "ip", "link", "add", "host0", "type", "veth"], capture_output=True, text=True
    )
    require("veth", veth.stderr if veth.returncode else None)
    host = tmp_path / "host"
    host.mkdir()
    outcome = testbed.up(
        *("clustered", "--network", "fabric", *FAST, *clock),
        wrapper=[*namespace, "bash", "-c", HOST, str(host)],
    )
    errors = (host / "host-errors").read_text()
    assert (outcome.code, errors) == (0, "")
    assert "3 of 3 requests completed" in (host / "stdout").read_text()
    before = (host / "before").read_text()
    assert "198.18.0.1/15" in before and "198.18.0.0/15 dev host0" in before
    assert (host / "after").read_text() == before == (host / "served").read_text()
    assert (host / "sent-after").read_text() == (host / "sent-before").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="hides /dev/net/tun, so needs to be root")
def test_the_doctor_says_what_jitter_loss_and_changes_need(testbed: Testbed) -> None:
    wrapper = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/net && exec "$@"', "sh"]
    for lacking in (False, True):
        rows = testbed("doctor", "--json", wrapper=wrapper if lacking else ()).json()["capabilities"]
        found = {row["name"]: row for row in rows}
        expected = found["network fabric"]["works"] or found["network netem"]["works"]
        assert found["jitter, loss"]["works"] is expected
        if not expected:
            assert "modprobe tun" in found["jitter, loss"]["detail"]


@pytest.mark.usefixtures("orphans")
def test_runs_in_a_row_leave_no_object_behind(testbed: Testbed, two_sites: str, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    held: set[str] = set()
    own = all_namespaces()
    for clock in [(), REAL] * 2:
        run = testbed.start_up(
            two_sites, "--network", "fabric", "--no-report", *clock, env={"TMPDIR": str(temporary)}
        )
        run.says("nodes up")
        held |= namespaces(list(processes(run.run_dir()))) - own
        assert run.wait().code == 0
    assert len(held) >= 5
    wait_until(lambda: not processes(tmp_path), "the end of every process")
    wait_until(lambda: not held & all_namespaces(), "the end of the runs' namespaces")
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]
    assert not [line for line in Path("/proc/net/unix").read_text().splitlines() if str(tmp_path) in line]
    assert list(temporary.iterdir()) == []
    answer = testbed("clean", "--out", str(testbed.runs))
    assert (answer.code, cleaned(answer.stdout, tmp_path)) == (0, "nothing was left")
