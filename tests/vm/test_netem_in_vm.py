"""The ``netem`` backend on a kernel that has netem: one boot, as root and as an unprivileged user."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.vm.lane import GuestResult, missing, run_in_vm

_COMMAND = """
status=0
python3 -m pytest -p no:cacheprovider -o asyncio_mode= -W ignore -k 'netem or fabric' tests/contract/test_network_contract.py \\
    -o addopts= -o timeout= --color=no -rs -q || status=1
echo "@@contract-root $status"
python3 -m tests.vm.guest_accuracy || status=1
setuidgid_status=0
python3 -c "
import os, sys
os.setgid(1000); os.setuid(1000); os.environ['HOME'] = '/tmp'
os.execvp('python3', ['python3', '-m', 'pytest', '-p', 'no:cacheprovider', '-o', 'asyncio_mode=', '-W', 'ignore',
    '-k', 'netem or fabric', 'tests/contract/test_network_contract.py', '-o', 'addopts=', '-o', 'timeout=', '--color=no', '-rs', '-q'])
" || setuidgid_status=1
echo "@@contract-rootless $setuidgid_status"
exit $((status + setuidgid_status))
"""


@pytest.fixture(scope="module")
def guest() -> GuestResult:
    lacking = missing()
    if lacking is not None:
        if "vm" in os.environ.get("TESTBED_REQUIRE", "").split(","):
            pytest.fail(f"the VM lane must run here, but: {lacking}")
        pytest.skip(f"VM lane: {lacking}")
    return run_in_vm(_COMMAND, timeout_s=400)


@pytest.mark.timeout(600)
def test_netem_keeps_the_contract_as_root(guest: GuestResult) -> None:
    part = guest.output.partition("@@contract-root")[0]
    assert "@@contract-root 0" in guest.output, guest.output[-6000:]
    assert re.search(r"\b10 passed", part), part[-3000:]
    assert "skipped" not in part, part[-3000:]


@pytest.mark.timeout(600)
def test_netem_keeps_the_contract_for_an_unprivileged_user(guest: GuestResult) -> None:
    part = guest.output.partition("@@contract-root ")[2].partition("@@contract-rootless")[0]
    assert "@@contract-rootless 0" in guest.output, guest.output[-6000:]
    assert re.search(r"\b10 passed", part), part[-3000:]
    assert "skipped" not in part, part[-3000:]


@pytest.mark.timeout(600)
def test_netem_delays_and_rates_are_what_was_asked_within_what_emulation_allows(guest: GuestResult) -> None:
    found = re.search(r"@@accuracy (.*)", guest.output)
    assert found, guest.output[-6000:]
    for row in json.loads(found.group(1)):
        for size in (64, 28_672):
            assert abs(row[f"echo_{size}_error_ms"]) < 5, row
        large = row["echo_573440_error_ms"] / row["echo_573440_asked_ms"]
        assert abs(large) < 0.10, row
