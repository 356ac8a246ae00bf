"""Runs inside the guest: how close netem's times come to what was asked. Prints one JSON object.

The guest is a computer of 500 million instructions per second whose clock no other work disturbs (see
``lane``): what the errors hold beside netem's own is how long that computer takes.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from netem.kernel import NetemBackend
from policies.links import Link
from tests.contract import test_network_contract as contract

RTTS_MS = (5, 20, 100)


def main() -> None:
    rows = []
    for rtt_ms in RTTS_MS:
        link = Link(rtt_ms / 2000, 100e6)
        contract.LINKS = dict.fromkeys(contract.LINKS, link)
        rows.append({"rtt_ms": rtt_ms, **contract.with_network(NetemBackend, _measure(link))})
    print("@@accuracy " + json.dumps(rows))


def _measure(link: Link) -> Any:
    def work(running: contract.Running) -> dict[str, float]:
        answer = {}
        connection = running.connect("hub", "far")
        for size, count in ((64, 30), (28_672, 30), (573_440, 4)):
            contract.echo_s(connection, b"x" * size)
            took = [contract.echo_s(connection, b"x" * size) for _ in range(count)]
            asked = 2 * (link.delay_s + link.transmission_s(size))
            answer[f"echo_{size}_asked_ms"] = 1e3 * asked
            answer[f"echo_{size}_error_p50_ms"] = 1e3 * (statistics.median(took) - asked)
            answer[f"echo_{size}_error_max_ms"] = 1e3 * (max(took) - asked)
        return answer

    return work


if __name__ == "__main__":
    main()
