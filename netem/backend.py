"""The interface of every network backend, and the contract that ``tests/contract`` holds it to.

A backend is used by one single-threaded process (the launcher), which is root or root inside its
own user namespace, and which forks the node processes:

1. ``bind()`` and ``join()``, only if nodes are on several machines (``NetworkSpec.spans_machines``): every
   machine has a backend of its own, with the same spec. They are called in the machine's own network.
2. ``open()`` builds everything. If it raises, nothing is left.
3. ``keeper`` is set if time is virtual.
4. ``worker()``: a backend that forwards packets in user space returns a function. The launcher runs it
   in a forked process of its own until the network closes. The other backends return ``None``.
5. ``check()``, only over several machines, after the workers of all machines run.
6. In each forked node, ``enter(node)`` moves the process into the node's network.
7. ``close()`` removes everything; unnamed namespaces also vanish when their last holder dies.

What a backend is able to do is stated in its ``network`` (``netem.networks``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from netem.networks import JOINING, Network
from netem.spec import Endpoint, NetworkError, NetworkSpec, Windows
from policies.links import Link

if TYPE_CHECKING:
    from netem.forwarder_stats import ForwarderStats, MachineStats
    from netem.forwarder_virtual import TimeKeeper


class Backend(ABC):
    """One way to emulate a network. See the module docstring for the order of calls.

    Raises ``NetworkError`` for a ``spec`` over several machines, or in virtual time, if the network has
    neither.
    """

    network: ClassVar[Network]
    """Its entry in ``netem.networks``."""

    def __init__(self, spec: NetworkSpec) -> None:
        name = self.network.name
        if spec.spans_machines and not self.network.joins_machines:
            raise NetworkError(
                f"the {name} network works on one machine only: for several use {JOINING.name}"
            )
        if spec.is_virtual and "virtual" not in self.network.clocks:
            raise NetworkError(f"the {name} network needs real time")
        self.spec = spec
        self.keeper: TimeKeeper | None = None
        """Moves virtual time; ``None`` if time is real."""

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Returns ``None`` if this machine and user can run it, else what is missing and how to get it."""

    def bind(self, machine: str, address: str) -> Endpoint:
        """Begins this machine's part of a network over several; returns its endpoint, for ``join`` elsewhere.

        ``machine`` is this machine's name in ``spec.machines``, ``address`` its IPv4 address in the network
        between them. Raises ``NetworkError``, as all methods do.
        """
        raise self._works_on_one_machine()

    def join(self, endpoints: Mapping[str, Endpoint], key: bytes) -> None:
        """Sets what ``bind`` returned on the other machines, by machine name, and the run's secret ``key``."""
        raise self._works_on_one_machine()

    def check(self) -> Mapping[str, MachineStats]:
        """Raises if the links are impossible between the machines.

        Returns what is known of the other machines, by name; empty if nothing is measured.
        """
        raise self._works_on_one_machine()

    def _works_on_one_machine(self) -> NetworkError:
        return NetworkError(f"the {self.network.name} network works on one machine only")

    @abstractmethod
    def open(self) -> None:
        """Builds the network. Raises ``NetworkUnavailable`` or ``NetworkError``."""

    @abstractmethod
    def enter(self, node: str) -> None:
        """Moves the calling (single-threaded) process into the network of ``node``."""

    @abstractmethod
    def address(self, node: str) -> str:
        """Returns the IPv4 address on which ``node`` listens and from which it connects."""

    def namespaces(self) -> Mapping[str, int]:
        """Returns the descriptors of the nodes' network namespaces, by node; empty if they have none."""
        return {}

    def worker(self) -> Callable[[], None] | None:
        """Returns the function that must run in a process of its own, or ``None`` if there is none."""
        return None

    def stats(self) -> ForwarderStats | None:
        """Returns the counters of the worker, or ``None`` if there is none."""
        return None

    @abstractmethod
    def update(self, links: Mapping[tuple[str, str], Link]) -> None:
        """Changes the profiles of these pairs, which must be links of ``spec``, while packets flow.

        Packets already on their way keep their instants of arrival. Called by the launcher, which
        holds the network open. Raises ``NetworkError``. With ``network.delays_in_client`` nothing is done:
        the clients are notified instead.
        """

    def begin_with(self, windows: Windows) -> None:
        """Has the connections of these pairs that are made from now on begin with these congestion windows.

        The others begin as ``spec.tcp`` has it; with no pair, all do. Only in virtual time, on networks with
        ``network.filling_bytes``.
        """
        raise NetworkError(f"connections on the {self.network.name} network begin as the kernel has it")

    @abstractmethod
    def close(self) -> None:
        """Removes everything that ``open`` made. May be called more than once."""
