"""Whole runs with real processes and namespaces; every test also proves that it left nothing."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.fabric import FabricBackend
from netem.probe import try_in_child
from tests.support.runs import FAST, Outcome, Testbed, clean_testbed, require


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[Testbed]:
    """The command, in a folder of this test's own. No process and no device may outlive the test."""
    with clean_testbed(tmp_path) as testbed:
        yield testbed


@pytest.fixture
def orphans() -> Iterator[None]:
    """For tests of what a killed run leaves: no other such test goes on meanwhile, since `clean` ends all that it finds."""
    with open(Path(tempfile.gettempdir()) / "tests-of-orphans.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def fabric() -> None:
    """Skips the test, by name, where the fabric network does not work."""
    require("fabric", try_in_child(FabricBackend.missing))


@pytest.fixture(scope="session", params=["fabric", "memory"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One complete run of the proposed policies in virtual time, with --json; not to be changed."""
    if request.param == "fabric":
        request.getfixturevalue("fabric")
    testbed = Testbed(tmp_path_factory.mktemp("finished"))
    return testbed.up("clustered", "--network", request.param, "--json", "--slo", "ttft=60s", *FAST)


@pytest.fixture(params=["fabric", "memory"])
def virtual(request: pytest.FixtureRequest) -> str:
    """A network that keeps virtual time: the test runs on each."""
    if request.param == "fabric":
        request.getfixturevalue("fabric")
    return str(request.param)


@pytest.fixture
def two_sites(tmp_path: Path) -> str:
    """A scenario of three servers with a client at either site."""
    path = tmp_path / "two-sites.toml"
    path.write_text(TWO_SITES, encoding="utf-8")
    return str(path)


TWO_SITES = """
seed = 3
model = { profile = "bloom-176b", n_blocks = 6 }
servers = [
    { hardware = "mig-1g", site = "Here", count = 2 },
    { hardware = "a100", site = "There" },
]
clients = [{ site = "Here" }, { site = "There" }]

[network]
kind = "clusters"
pairs = [
    { sites = ["Here", "Here"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["There", "There"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["Here", "There"], rtt = "60 ms", rate = "100 Mbit/s" },
]

[workload]
arrivals = "constant"
rate = 2
n_requests = 4
n_input_tokens = 5
n_output_tokens = 3
"""
