"""The ``hosts`` backend: nodes are processes on several machines, and the network between these is the real one.

Used as ``netem.fabric`` over several machines: ``bind``, ``open``, ``join``, ``check``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from netem.backend import Backend
from netem.spec import LinkProfile, NetworkError, NetworkSpec


class HostsBackend(Backend):
    """Nothing is emulated: every node of this machine listens on its address, on any free port."""

    name: ClassVar[str] = "hosts"
    any_port: ClassVar[bool] = True
    joins_machines: ClassVar[bool] = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self._addresses: dict[str, str] = {}

    @classmethod
    def missing(cls) -> str | None:
        return None

    def bind(self, machine: str, address: str) -> tuple[str, int]:
        """This machine is called ``machine``, and its nodes listen on ``address``; they choose their ports."""
        return address, 0

    def join(self, endpoints: Mapping[str, tuple[str, int]], key: bytes) -> None:
        """What ``bind`` has returned on all machines, by their names. ``key``: for nodes, not for this."""
        self._addresses = {machine: address for machine, (address, _) in endpoints.items()}

    def open(self) -> None:
        """Nothing to build."""

    def enter(self, node: str) -> None:
        """Every node is where it was."""

    def address(self, node: str) -> str:
        return self._addresses[self.spec.machines[node]]

    def check(self) -> None:
        """Nobody knows what the links should be."""

    def update(self, links: Mapping[tuple[str, str], LinkProfile]) -> None:
        raise NetworkError("the links of the hosts network are real: nobody can change them")

    def close(self) -> None:
        """Nothing to remove."""
