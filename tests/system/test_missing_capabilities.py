"""Machines that lack something: one sentence that says how to get it, and a fallback that works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.runs import FAST, REAL, Testbed

WITHOUT_TUN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/net && exec "$@"', "sh")
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
"""Root in name only: it may neither make namespaces nor map itself into a user namespace."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes privileges away, so needs to be root")


@pytest.mark.parametrize("clock", [(), REAL], ids=["virtual time", "real time"])
@pytest.mark.parametrize(
    ("wrapper", "words"),
    [(WITHOUT_TUN, "/dev/net/tun does not exist"), (WITHOUT_PRIVILEGES, "network namespaces cannot be made")],
    ids=["no TUN", "no privileges"],
)
def test_a_network_that_cannot_work_here_is_refused_with_what_to_do(
    testbed: Testbed, wrapper: tuple[str, ...], words: str, clock: tuple[str, ...]
) -> None:
    outcome = testbed.up("clustered", *FAST, *clock, "--network", "fabric", wrapper=wrapper)
    assert outcome.code == 2
    last = outcome.stderr.strip().splitlines()[-1]
    assert last.startswith("testbed: the fabric network does not work here: ")
    assert words in last
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("wrapper", [WITHOUT_TUN, WITHOUT_PRIVILEGES], ids=["no TUN", "no privileges"])
def test_auto_falls_back_to_memory_in_virtual_time(testbed: Testbed, wrapper: tuple[str, ...]) -> None:
    outcome = testbed.up("clustered", *FAST, "--json", wrapper=wrapper)
    assert outcome.code == 0, outcome.stderr
    assert (outcome.json()["network"], outcome.json()["clock"]) == ("memory", "virtual")
    assert "network memory (all nodes in one process; no fabric because" in outcome.stderr


@pytest.mark.parametrize("wrapper", [WITHOUT_TUN, WITHOUT_PRIVILEGES], ids=["no TUN", "no privileges"])
def test_auto_falls_back_to_loopback_and_says_why(testbed: Testbed, wrapper: tuple[str, ...]) -> None:
    outcome = testbed.up("clustered", *FAST, *REAL, "--json", wrapper=wrapper)
    assert outcome.code == 0, outcome.stderr
    assert outcome.json()["network"] == "loopback"
    assert "network loopback (no netem because " in outcome.stderr
    assert "; no fabric because " in outcome.stderr


def test_the_doctor_says_what_is_missing(testbed: Testbed) -> None:
    outcome = testbed("doctor", "--json", wrapper=WITHOUT_TUN, anew=True)
    assert outcome.code == 0
    rows = {row["name"]: row for row in outcome.json()["capabilities"]}
    assert not rows["tun"]["works"]
    assert "modprobe tun" in rows["tun"]["detail"]
    assert rows["network loopback"]["works"] and rows["network memory"]["works"]
    assert rows["virtual time"]["detail"].startswith("network auto takes memory")
    assert rows["real time"]["detail"].startswith("network auto takes loopback")


@pytest.mark.usefixtures("fabric")
def test_what_lies_in_the_current_folder_is_no_code_of_the_tool(testbed: Testbed, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    for name in ("aiohttp", "msgspec", "pyroute2", "select"):
        (planted / f"{name}.py").write_text(f"raise SystemExit('planted {name} ran')\n")
    there = ("sh", "-c", f'cd {planted} && exec "$0" "$@"')
    short = ("--set", "workload.n_requests=1", "--set", "workload.n_output_tokens=4", "--no-report")
    outcome = testbed.up("clustered", "--network", "fabric", *short, wrapper=there, anew=True)
    assert outcome.code == 0, outcome.stderr
    assert "planted" not in outcome.stderr.replace(str(planted), "")
