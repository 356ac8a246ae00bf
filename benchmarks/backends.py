"""Finds the networks that run on this machine, and measures netem in the VM lane if it does not.

The lane is a virtual machine without hardware support (``tests/vm``), in which everything takes 1 to 2 ms
longer. Its figures show that netem applies the requested delays, but not how exact it is on real hardware.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

from benchmarks.figure import figure
from netem.networks import NETWORKS
from netem.probe import try_in_child

_VM_TIMEOUT_S = 300.0
_SIZES = (64, 28_672, 573_440)


def networks_here() -> list[str]:
    """Returns the names of the network backends that work on this machine."""
    return [
        network.name
        for network in NETWORKS.values()
        if network.emulates and network.nodes_are_processes and try_in_child(network.missing) is None
    ]


def netem_in_vm() -> list[dict[str, Any]]:
    """Measures the errors of echoes over netem in the VM lane.

    Returns no figures if the lane cannot run, and prints the reason.
    """
    lane = importlib.import_module("tests.vm.lane")  # tests are not type-checked
    lacking = lane.missing()
    if lacking is not None:
        print(f"netem is not measured, neither here nor in the VM lane: {lacking}", file=sys.stderr)
        return []
    guest = lane.run_in_vm("python3 -m tests.vm.guest_accuracy", _VM_TIMEOUT_S)
    found = re.search(r"@@accuracy (.*)", guest.output)
    assert found, f"the guest printed no figures; its console ends with:\n{guest.output[-3000:]}"
    return [
        figure(
            f"netem in the VM: echo of {size} B at {row['rtt_ms']:g} ms and 100 Mbit/s, error p50",
            row[f"echo_{size}_error_p50_ms"],
            "ms",
            "+-5" if size < 100_000 else "",
        )
        for row in json.loads(found.group(1))
        for size in _SIZES
    ]
