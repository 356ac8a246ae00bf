"""The ``loopback`` backend: no namespaces, no root; clients apply the links' delays themselves.

Least faithful: no congestion control at work, no competition for a link between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from netem.backend import Backend
from netem.spec import LinkProfile


class LoopbackBackend(Backend):
    """Everything on 127.0.0.1; works everywhere."""

    name: ClassVar[str] = "loopback"
    delays_in_client: ClassVar[bool] = True
    any_port: ClassVar[bool] = True

    @classmethod
    def missing(cls) -> str | None:
        return None

    def open(self) -> None:
        """Nothing to build."""

    def enter(self, node: str) -> None:
        """Every node is where it was."""

    def address(self, node: str) -> str:
        return "127.0.0.1"

    def update(self, links: Mapping[tuple[str, str], LinkProfile]) -> None:
        """Clients are notified."""

    def close(self) -> None:
        """Nothing to remove."""
