"""Decides which node is on which machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testbed.errors import UserError
from testbed.experiments.experiment import Machine


def spread(
    clients: Sequence[str],
    servers: Sequence[str],
    sites: Mapping[str, str],
    machines: Sequence[tuple[Machine, float]],
) -> dict[str, int]:
    """Return the number of every node's machine; -1 is the machine of this process, where all clients are.

    Each of the ``machines`` has a weight: its CPUs, or its GPUs if blocks are computed on these. A machine
    that names servers or sites gets these. The other machines share the remaining servers in proportion to
    their weights. Raises ``UserError`` for an unknown name, a server named by two machines, and servers left
    without a machine.
    """
    where = dict.fromkeys(clients, -1)
    for number, (machine, _) in enumerate(machines):
        for name in machine.servers:
            named = [server for server in servers if name in (server, sites[server])]
            if not named:
                raise UserError(f"hosts.{number}.servers: there is no server or site {name!r}")
            for server in named:
                if where.setdefault(server, number) != number:
                    raise UserError(
                        f"hosts.{number}.servers: {server} is also on another machine; name it once"
                    )
    left = [server for server in servers if server not in where]
    open_to_all = [number for number, (machine, _) in enumerate(machines) if not machine.servers]
    if left and not open_to_all:
        raise UserError(
            f"hosts: no machine has {', '.join(left)}; name them in servers of a machine, or leave servers "
            "out of one"
        )
    load = dict.fromkeys(open_to_all, 0)
    for server in left:
        best = min(open_to_all, key=lambda number: ((load[number] + 1) / machines[number][1], number))
        where[server] = best
        load[best] += 1
    return where
