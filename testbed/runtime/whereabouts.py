"""Writes where the nodes of a running testbed are, for programs that are started on them from outside.

``network.json`` has every node's address, and the descriptor of its namespace in the process that holds it.
``hosts`` maps names to addresses, like ``/etc/hosts``.
"""

from __future__ import annotations

from pathlib import Path

from testbed.rundir import HOSTS, NETWORK, process_start, replacing, write_json
from testbed.runtime.launching import OpenNetwork


def write_whereabouts(run_dir: Path, network: OpenNetwork) -> None:
    """Write both files. Raises ``OSError``."""
    with replacing(run_dir / HOSTS) as temporary:
        lines = ["127.0.0.1 localhost", *(f"{address} {node}" for node, address in network.addresses.items())]
        temporary.write_text("\n".join(lines) + "\n", encoding="ascii")
    holder = network.holder
    nodes = {
        node: {"address": address, "namespace": network.namespaces.get(node)}
        for node, address in network.addresses.items()
    }
    document = {
        "name": network.name,
        "holder": {"pid": holder, "started": process_start(holder)} if holder is not None else None,
        "nodes": nodes,
    }
    write_json(run_dir / NETWORK, document)
