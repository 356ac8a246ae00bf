"""The interface of every network backend, and the contract that ``tests/contract`` holds it to.

A backend is used by one single-threaded process (the launcher), which is root or root inside its
own user namespace, and which forks the node processes:

1. ``open()`` builds everything. After it fails or raises, nothing is left.
2. ``worker()``: a backend that forwards packets in user space answers a function that the launcher
   runs in a forked process of its own until the network closes; the kernel's own answer ``None``.
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
    """True when the kernel delays nothing and clients must apply the links' delays themselves."""
    any_port: ClassVar[bool] = False
    """True when nodes share an address, and each listens on any free port."""
    shares_links: ClassVar[bool] = False
    """True when pairs compete for the links that ``spec.shared`` names; else every pair is emulated by itself."""

    joins_machines: ClassVar[bool] = False
    """True when nodes may be on several machines (``spec.machines``)."""

    def __init__(self, spec: NetworkSpec) -> None:
        if spec.spans_machines and not self.joins_machines:
            raise NetworkError(f"the {self.name} network is one machine's: over several machines take fabric")
        self.spec = spec

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """``None`` if this machine and this user can run it, else one sentence: what is missing and how to get it."""

    @abstractmethod
    def open(self) -> None:
        """Build the network. Raises ``NetworkUnavailable`` or ``NetworkError``."""

    @abstractmethod
    def enter(self, node: str) -> None:
        """Move the calling (single-threaded) process into the network of ``node``."""

    @abstractmethod
    def address(self, node: str) -> str:
        """IPv4 address on which ``node`` listens and from which it connects."""

    def namespaces(self) -> Mapping[str, int]:
        """Descriptors of the nodes' network namespaces, by node; empty if they have none of their own."""
        return {}

    def worker(self) -> Callable[[], None] | None:
        """What to run in a process of its own, if anything."""
        return None

    @abstractmethod
    def update(self, links: Mapping[tuple[str, str], LinkProfile]) -> None:
        """Give these pairs, which must be links of ``spec``, new profiles while packets flow.

        Packets that are already on their way keep what they were given. Called by the launcher, which
        holds the network open. Raises ``NetworkError``. A backend with ``delays_in_client`` does nothing:
        clients are notified.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove everything that ``open`` made. May be called more than once."""
