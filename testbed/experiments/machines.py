"""``[[hosts]]``: the machines of a Ray cluster that a run's servers are on."""

from __future__ import annotations

from typing import Literal

from netem.networks import named
from testbed.experiments.experiment import Machine
from testbed.experiments.problems import KeyedError
from testbed.experiments.schema import HostTable, Scenario

HERE = "this-machine"
"""The name in the network of the machine of the command, which has no table."""
ANY_SHARE = 0.001
"""Amount asked of a resource that only identifies a machine, so that many runs can ask for it at once."""


def machines_of(scenario: Scenario) -> tuple[Machine, ...] | Literal["ray"]:
    """Return the machines of ``[[hosts]]``: empty without any, "ray" for all machines of the cluster.

    Raises ``KeyedError`` for a name or an address that another machine has, and for a network that exists only between machines.
    """
    network = named(scenario.network.backend)
    if scenario.hosts is None and network is not None and not network.emulates:
        raise KeyedError(
            ("network", "backend"),
            f'is "{network.name}", the network between several machines; name them in [[hosts]], or add '
            "--hosts ray",
        )
    if not scenario.hosts:
        return () if scenario.hosts is None else "ray"
    names = [host.name or f"host-{number}" for number, host in enumerate(scenario.hosts)]
    for number, name in enumerate(names):
        if name in (HERE, *names[:number]):
            raise KeyedError(
                ("hosts", number, "name"), f"{name!r} is also the name of another machine; change one of them"
            )
    addresses = [host.address for host in scenario.hosts]
    for number, address in enumerate(addresses):
        if address is not None and address in addresses[:number]:
            raise KeyedError(
                ("hosts", number, "address"),
                f"{address} is also the address of another machine, but all are different; leave one of the two out",
            )
    return tuple(
        Machine(name, _resources(host), tuple(host.servers or ()))
        for name, host in zip(names, scenario.hosts, strict=True)
    )


def _resources(host: HostTable) -> dict[str, float]:
    """Return what the run asks of Ray for this machine, by Ray's names."""
    found = {"CPU": host.cpus, **host.resources}
    if host.address is not None:
        found[f"node:{host.address}"] = ANY_SHARE
    if host.gpus:
        found["GPU"] = host.gpus
    if host.accelerator_type is not None:
        found[f"accelerator_type:{host.accelerator_type}"] = ANY_SHARE
    return found
