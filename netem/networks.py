"""The networks that there are: what each can do, and which one ``auto`` takes.

A network is its entry in ``NETWORKS`` and the module that the entry names. Whoever needs to know something
about a network asks its ``Network``, never its name. Importing this module imports none of theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from netem import tcp
from netem.spec import NetworkError, NetworkUnavailable

if TYPE_CHECKING:
    from netem.backend import Backend

Clock = Literal["real", "virtual"]
CLOCKS: tuple[Clock, ...] = ("virtual", "real")
AUTO = "auto"
"""In place of a network's name: the first in ``NETWORKS`` that can do what is needed and works here."""


@dataclass(frozen=True)
class Network:
    """One way to carry the links, and what callers must know of it."""

    name: str
    nature: str
    """What carries the links, in a few words."""
    implementation: str
    """``module:Class``; see ``load``."""
    clocks: tuple[Clock, ...] = ("real",)
    """The clocks that its links can follow."""
    nodes_are_processes: bool = True
    """False: all nodes are in the process that holds the network."""
    has_namespaces: bool = False
    """Every node has a network namespace, in which programs can run. Needs Linux, and root or user namespaces."""
    has_forwarder: bool = False
    """A process of its own, with the network's name, plays the links (``Backend.worker``)."""
    emulates: bool = True
    """False: it has no links of its own that could be slowed, changed, or compared with the scenario's."""
    delays_in_client: bool = False
    """It delays nothing: clients apply the links' delays, and are notified of changes."""
    shares_links: bool = False
    """Pairs compete for the links in ``spec.shared``; else every pair has links of its own."""
    follows_courses: bool = False
    """It transmits what is queued by the planned changes of links (``spec.courses``)."""
    halves_windows: bool = False
    """In virtual time TCP's windows are halved, too, where links lose packets."""
    filling_bytes: int | None = None
    """What must arrive at each end of a connection until its receive window is whole, if connections begin with larger
    windows in virtual time (``Backend.begin_with``); ``None`` if they cannot."""
    joins_machines: bool = False
    """Nodes may be on several machines (``spec.machines``)."""
    here: str = "works here"
    """What ``testbed doctor`` reports where it works."""
    caveat: str | None = None
    """What a reader of a run's results must know about it."""

    @property
    def any_port(self) -> bool:
        """Whether nodes share an address, so that each listens on any free port."""
        return self.nodes_are_processes and not self.has_namespaces

    @property
    def has_packets(self) -> bool:
        """Whether real packets pass through its links: jitter, loss and changes happen to each of them."""
        return self.emulates and self.has_namespaces

    def missing(self) -> str | None:
        """Returns ``None`` if this machine and user can run it, else what is missing and how to get it.

        Call it from a single-threaded process: it may probe in forked children.
        """
        if self.has_namespaces and sys.platform != "linux":
            return "this system has no network namespaces"
        found: str | None = self.load().missing()
        return found

    def load(self) -> Any:
        """Imports and returns the class: a ``Backend``, or one like ``netem.memory.MemoryNetwork``."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)

    def backend(self) -> type[Backend]:
        """Returns the ``Backend`` of a network whose nodes are processes. Raises ``NetworkError`` for others."""
        if not self.nodes_are_processes:
            raise NetworkError(f"the {self.name} network has all nodes in one process")
        backend: type[Backend] = self.load()
        return backend


NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (
        Network("netem", "the kernel's own emulation", "netem.kernel:NetemBackend", has_namespaces=True),
        Network(
            "fabric",
            "processes and the kernel's TCP",
            "netem.fabric:FabricBackend",
            clocks=("real", "virtual"),
            has_namespaces=True,
            has_forwarder=True,
            shares_links=True,
            follows_courses=True,
            filling_bytes=tcp.FILLING_BYTES,
            joins_machines=True,
        ),
        Network(
            "memory",
            "all nodes in one process",
            "netem.memory:MemoryNetwork",
            clocks=("virtual",),
            nodes_are_processes=False,
            shares_links=True,
            follows_courses=True,
            halves_windows=True,
            filling_bytes=0,
            here="works everywhere; all nodes in one process, virtual time only",
        ),
        Network(
            "loopback",
            "clients apply the delays",
            "netem.loopback:LoopbackBackend",
            delays_in_client=True,
            caveat="clients apply the delays, which is the least faithful of all networks",
        ),
        Network(
            "hosts",
            "the real network between the machines",
            "netem.hosts:HostsBackend",
            emulates=False,
            joins_machines=True,
            caveat="the real network between the machines; the model uses the scenario's links, which nothing "
            "emulates",
        ),
    )
}
"""By name, from most to least faithful. ``auto`` takes only networks that emulate."""
IN_PROCESS = next(network for network in NETWORKS.values() if not network.nodes_are_processes)
"""Plays whole runs in one process, on every machine."""
JOINING = next(network for network in NETWORKS.values() if network.joins_machines and network.emulates)
"""Carries a scenario's links between several machines."""


def named(name: str) -> Network | None:
    """Returns the network called ``name``, or ``None`` for ``auto``. Raises ``NetworkError`` for others."""
    if name == AUTO:
        return None
    if name not in NETWORKS:
        raise NetworkError(f"there is no network {name!r}: use one of {AUTO}, {', '.join(NETWORKS)}")
    return NETWORKS[name]


def one_of(networks: Iterable[Network]) -> str:
    """Returns the networks' names for a sentence: "a, b or c"."""
    *names, last = (network.name for network in networks)
    return f"{', '.join(names)} or {last}" if names else last


def instead(networks: Iterable[Network]) -> str:
    """Returns the names of networks to use instead: first those that can keep more clocks."""
    return one_of(sorted(networks, key=lambda network: -len(network.clocks)))


def choose(
    wanted: str, clock: Clock = "real", *, sharing: bool = False, joining: bool = False, losing: bool = False
) -> tuple[Network, str]:
    """Returns the network called ``wanted``, or for ``auto`` the first that works here, and one sentence why.

    ``sharing``: pairs share links, so ``auto`` tries the networks that can emulate this before all others.
    ``joining``: nodes are on several machines, so ``auto`` tries only networks that can join machines.
    ``losing``: links lose packets, so ``auto`` tries in virtual time those that halve windows before all others.

    Raises ``NetworkUnavailable`` if the wanted network, or for ``auto`` every network, does not work on this
    machine, and ``NetworkError`` for an unknown name. Call it from a single-threaded process: see ``missing``.
    """
    asked_for = named(wanted)
    if asked_for is not None:
        missing = asked_for.missing()
        if missing is not None:
            raise NetworkUnavailable(f"the {wanted} network does not work here: {missing}")
        return asked_for, "asked for"
    reasons: list[str] = []
    able = [each for each in NETWORKS.values() if each.emulates and clock in each.clocks]
    halving = losing and clock == "virtual"

    def lacks(each: Network) -> bool:
        return (sharing and not each.shares_links) or (halving and not each.halves_windows)

    for network in sorted(able, key=lacks):
        if joining and not network.joins_machines:
            continue
        missing = network.missing()
        if missing is not None:
            reasons.append(f"no {network.name} because {missing.partition(':')[0]}, see `testbed doctor`")
        elif clock == "virtual":
            if halving and network.halves_windows:
                reasons.append("links lose packets, and it alone halves TCP's windows then")
            return network, "; ".join((network.nature, *reasons))
        else:
            if joining:
                reasons.append("nodes are on several machines, which it alone joins")
            if sharing and network.shares_links:
                reasons.append("pairs share links, which it alone emulates")
            return network, "; ".join(reasons) or "the most faithful one works here"
    raise NetworkUnavailable("; ".join(reasons))
