"""The ``fabric`` backend: a TUN device in every node's namespace and one forwarding process.

Needs namespaces and TUN, nothing else of the kernel: real TCP, with delay and rate in user space.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from pyroute2 import IPRoute

from netem import tcp
from netem.backend import Backend
from netem.forwarder import Forwarder
from netem.forwarder_changes import ChangeChannel
from netem.forwarder_stats import ForwarderStats, Lateness, StatsPage
from netem.forwarder_virtual import TimeKeeper, VirtualForwarder
from netem.probe import probe_tun
from netem.spec import LinkProfile, NetworkError, NetworkSpec, NetworkUnavailable
from netem.syscalls import inside, new_network_namespace, setns
from netem.tun import open_tun

DEVICE = "testbed0"

_CLOSERS = 32

EARLY_S = 60e-6
"""Delay per direction that the kernel's wake-ups and the forwarder add (see docs/accuracy.md)."""


class FabricBackend(Backend):
    """TUN devices and a user-space forwarder; works on kernels without netem."""

    name: ClassVar[str] = "fabric"
    shares_links: ClassVar[bool] = True

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self._namespaces: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self._page: StatsPage | None = None
        self._changes: ChangeChannel | None = None
        self._index = {node: i for i, node in enumerate(spec.nodes)}
        self.keeper: TimeKeeper | None = None
        """Needed for virtual time, before ``worker``."""

    @classmethod
    def missing(cls) -> str | None:
        return probe_tun()

    def open(self) -> None:
        try:
            self._page = StatsPage()
            self._changes = ChangeChannel(self.spec.links)
            for node in self.spec.nodes:
                self._namespaces[node] = new_network_namespace()
                with inside(self._namespaces[node]):
                    self._devices[node] = open_tun(DEVICE)
                    self._configure(node)
        except PermissionError as error:
            self.close()
            raise NetworkUnavailable(f"the fabric network needs root or user namespaces: {error}") from error
        except OSError as error:
            self.close()
            raise NetworkError(f"cannot build the fabric network: {error}") from error
        except BaseException:
            self.close()
            raise

    def _configure(self, node: str) -> None:
        tcp.configure_namespace(self.spec)
        with IPRoute() as ip:
            ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
            index = ip.link_lookup(ifname=DEVICE)[0]
            ip.addr("add", index=index, address=self.address(node), prefixlen=32)
            ip.link("set", index=index, state="up", mtu=self.spec.mtu, txqlen=10000)
            ip.route("add", dst=str(self.spec.subnet), oif=index, **tcp.route_options(self.spec))

    def enter(self, node: str) -> None:
        setns(self._namespaces[node])
        self._close_devices()
        self._close_changes()

    def namespaces(self) -> Mapping[str, int]:
        return self._namespaces

    def address(self, node: str) -> str:
        return str(self.spec.subnet[1 + self._index[node]])

    def worker(self) -> Callable[[], None]:
        assert self._page is not None and self._changes is not None, "worker() before open()"
        addresses = {node: socket.inet_aton(self.address(node)) for node in self.spec.nodes}
        if self.spec.is_virtual:
            forwarder = VirtualForwarder(self.spec, self._devices, addresses, self._page, self._changes)
            assert self.keeper is not None, "virtual time without anybody who keeps it"
            forwarder.keeper = self.keeper
            return forwarder.run
        return Forwarder(self.spec, self._devices, addresses, self._page, self._changes, EARLY_S).run

    def update(self, links: Mapping[tuple[str, str], LinkProfile]) -> None:
        assert self._changes is not None, "update() before open()"
        self._changes.send(links)

    def stats(self) -> ForwarderStats:
        """The forwarder's counters, at most 0.1 s old (0.5 s while no packet is under way)."""
        assert self._page is not None, "stats() before open()"
        return self._page.read()

    def lateness(self) -> Lateness:
        """How late packets were so far, as old as ``stats``."""
        assert self._page is not None, "lateness() before open()"
        return self._page.lateness()

    def _close_devices(self) -> None:
        """Gives up this process's hold; a device goes with its last holder."""
        for fd in self._devices.values():
            os.close(fd)
        self._devices.clear()

    def _remove_devices(self) -> None:
        """Removing a device waits 20 ms for the kernel's other CPUs: all wait at the same time."""
        with ThreadPoolExecutor(_CLOSERS) as closers:
            deque(closers.map(os.close, self._devices.values()), maxlen=0)
        self._devices.clear()

    def _close_changes(self) -> None:
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def close(self) -> None:
        if self._devices:
            self._remove_devices()
        self._close_changes()
        for fd in self._namespaces.values():
            os.close(fd)
        self._namespaces.clear()
        if self._page is not None:
            self._page.close()
            self._page = None
