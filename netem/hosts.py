"""The ``hosts`` backend: nodes are processes on several machines, joined by the machines' real network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from netem.backend import Backend
from netem.networks import NETWORKS
from netem.spec import Endpoint, NetworkError, NetworkSpec
from policies.links import Link

if TYPE_CHECKING:
    from netem.forwarder_stats import MachineStats


class HostsBackend(Backend):
    """Emulates nothing: every node listens on its machine's address, on any free port."""

    network = NETWORKS["hosts"]

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self._addresses: dict[str, str] = {}

    @classmethod
    def missing(cls) -> str | None:
        return None

    def bind(self, machine: str, address: str) -> Endpoint:
        """Returns the endpoint of this machine's nodes: ``address`` and port 0, as each uses any free port."""
        return address, 0

    def join(self, endpoints: Mapping[str, Endpoint], key: bytes) -> None:
        """Stores what ``bind`` returned on all machines, by machine name. ``key`` is not used."""
        self._addresses = {machine: address for machine, (address, _) in endpoints.items()}

    def open(self) -> None:
        """Does nothing: there is nothing to build."""

    def enter(self, node: str) -> None:
        """Does nothing: nodes stay in the machine's network."""

    def address(self, node: str) -> str:
        return self._addresses[self.spec.machines[node]]

    def check(self) -> Mapping[str, MachineStats]:
        """Returns nothing: there are no wanted delays to compare the real network with."""
        return {}

    def update(self, links: Mapping[tuple[str, str], Link]) -> None:
        raise NetworkError("the links of the hosts network are real and cannot be changed")

    def close(self) -> None:
        """Does nothing: there is nothing to remove."""
