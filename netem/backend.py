"""The interface of every network backend, and the contract that ``tests/contract`` holds it to.

A backend is used by one single-threaded process (the launcher), which is root or root inside its
own user namespace, and which forks the node processes:

1. ``open()`` builds everything. If it raises, nothing is left.
2. ``worker()``: a backend that forwards packets in user space returns a function. The launcher runs it
   in a forked process of its own until the network closes. The other backends return ``None``.
3. In each forked node, ``enter(node)`` moves the process into the node's network.
4. ``close()`` removes everything; unnamed namespaces also vanish when their last holder dies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from netem.spec import LinkProfile, NetworkError, NetworkSpec


class Backend(ABC):
    """One way to emulate a network. See the module docstring for the order of calls."""

    name: ClassVar[str]
    delays_in_client: ClassVar[bool] = False
    """True if the network delays nothing and clients must apply the links' delays themselves."""
    any_port: ClassVar[bool] = False
    """True if nodes share an address, and each listens on any free port."""
    shares_links: ClassVar[bool] = False
    """True if pairs compete for the links in ``spec.shared``; else every pair has links of its own."""

    joins_machines: ClassVar[bool] = False
    """True if nodes may be on several machines (``spec.machines``)."""

    def __init__(self, spec: NetworkSpec) -> None:
        if spec.spans_machines and not self.joins_machines:
            raise NetworkError(f"the {self.name} network works on one machine only: for several use fabric")
        self.spec = spec

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Returns ``None`` if this machine and user can run it, else what is missing and how to get it."""

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

    @abstractmethod
    def update(self, links: Mapping[tuple[str, str], LinkProfile]) -> None:
        """Changes the profiles of these pairs, which must be links of ``spec``, while packets flow.

        Packets already on their way keep their instants of arrival. Called by the launcher, which
        holds the network open. Raises ``NetworkError``. A backend with ``delays_in_client`` does nothing:
        the clients are notified instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Removes everything that ``open`` made. May be called more than once."""
