"""The ``loopback`` backend: needs no namespaces and no root; clients apply the links' delays themselves.

It is the least faithful one: congestion control has no effect, and processes do not compete for links.
"""

from __future__ import annotations

from collections.abc import Mapping

from netem.backend import Backend
from netem.networks import NETWORKS
from policies.links import Link


class LoopbackBackend(Backend):
    """All nodes are on 127.0.0.1; works everywhere."""

    network = NETWORKS["loopback"]

    @classmethod
    def missing(cls) -> str | None:
        return None

    def open(self) -> None:
        """Does nothing: there is nothing to build."""

    def enter(self, node: str) -> None:
        """Does nothing: nodes stay in the machine's network."""

    def address(self, node: str) -> str:
        return "127.0.0.1"

    def update(self, links: Mapping[tuple[str, str], Link]) -> None:
        """Does nothing: clients are notified of new delays and apply them."""

    def close(self) -> None:
        """Does nothing: there is nothing to remove."""
