"""The ``fabric`` backend: a TUN device in every node's namespace and one forwarder process.

It needs only namespaces and TUN of the kernel. TCP is real; delays and rates are applied in user space.

**Over several machines** (``NetworkSpec.machines``) every machine has a backend of its own, with the same
spec, for the nodes on that machine. Their forwarders exchange packets in UDP (``forwarder_far``,
``forwarder_underlay``). The network between the machines is called the underlay. On each machine:

    backend = FabricBackend(spec)
    endpoint = backend.bind("m1", "10.77.0.2")  # before any other namespace is entered: (address, port)
    become_network_admin()                      # a new namespace; the socket stays in the machine's network
    backend.open()                              # makes the devices of the nodes on m1 only
    backend.join({"m0": ("10.77.0.1", 40001), …}, key)  # endpoints of all other machines; 32 random bytes
    worker = backend.worker()                   # run by the launcher in a forked process
    backend.check()                             # after the workers of all machines run
    backend.update({("a", "b"): profile})       # the same call on every machine: each applies its own links
    backend.underlay()                          # {"m0": MachineStats, …}

``check`` waits until every other machine has answered. It raises ``NetworkError`` if a machine does not
answer, or if a link has a shorter delay than the underlay. It can also check profiles that will be used
later. ``enter`` and ``namespaces`` are for this machine's nodes only, ``address`` for all. ``close`` also
closes the socket.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from pyroute2 import IPRoute

from netem import tcp
from netem.backend import Backend
from netem.forwarder import Forwarder
from netem.forwarder_changes import ChangeChannel
from netem.forwarder_far import FarForwarder
from netem.forwarder_stats import ForwarderStats, Lateness, MachineStats, StatsPage
from netem.forwarder_underlay import SETTLED_SAMPLES, Underlay, bind_socket, piece_bytes_to
from netem.forwarder_virtual import VirtualForwarder
from netem.networks import NETWORKS
from netem.probe import probe_tun
from netem.spec import Endpoint, NetworkError, NetworkSpec, NetworkUnavailable, Windows
from netem.syscalls import inside, new_network_namespace, setns
from netem.tun import open_tun
from policies.links import Link

DEVICE = "testbed0"

_CLOSERS = 32
_LOOK_S = 0.02

EARLY_S = 60e-6
"""Seconds that the kernel's wake-ups and the forwarder add to a link's delay (see docs/accuracy.md)."""


class FabricBackend(Backend):
    """TUN devices and a user-space forwarder; works on kernels without netem."""

    network = NETWORKS["fabric"]

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self._machine = ""
        """This machine's name, if there are several. Machines are numbered in the order of their names."""
        self._machine_numbers = {name: i for i, name in enumerate(sorted(set(spec.machines.values())))}
        self._socket: socket.socket | None = None
        self._probe: socket.socket | None = None
        """Asks the kernel for routes and MTUs in the machine's own network."""
        self._underlay: Underlay | None = None
        self._namespaces: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self._page: StatsPage | None = None
        self._changes: ChangeChannel | None = None
        self._index = {node: i for i, node in enumerate(spec.nodes)}

    @classmethod
    def missing(cls) -> str | None:
        return probe_tun()

    def bind(self, machine: str, address: str, port: int = 0) -> Endpoint:
        """Opens this machine's UDP socket; returns its endpoint, which the other machines need for ``join``.

        ``machine`` is this machine's name in ``spec.machines``, ``address`` its IPv4 address in the underlay.
        Call it before ``open``, in the network namespace of the underlay. Raises ``NetworkError``.
        """
        if machine not in self._machine_numbers:
            raise NetworkError(f"no node is on machine {machine}: leave the machine out")
        self._close_underlay()
        self._machine = machine
        self._socket = bind_socket(address, port)
        self._probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        bound: Endpoint = self._socket.getsockname()
        return bound

    def join(self, endpoints: Mapping[str, Endpoint], key: bytes) -> None:
        """Sets the endpoints of the other machines' forwarders, by machine name, and the run's key.

        ``key`` is the same on all machines: 16 to 64 secret bytes. Call it after ``bind`` and before
        ``worker``. Raises ``NetworkError`` for a machine without endpoint or that cannot be reached.
        """
        probe = self._probe
        if self._socket is None or probe is None:
            raise NetworkError(
                "nodes are on several machines: call bind() with this machine's name before join()"
            )
        others = {}
        for name, number in self._machine_numbers.items():
            if name == self._machine:
                continue
            if name not in endpoints:
                raise NetworkError(f"the forwarder of machine {name} has no address: call bind() there first")
            others[number] = endpoints[name]
        pieces = {number: piece_bytes_to(probe, endpoint) for number, endpoint in others.items()}
        self._underlay = Underlay(self._socket, self._machine_numbers[self._machine], others, pieces, key)

    def _is_here(self, node: str) -> bool:
        return not self.spec.spans_machines or self.spec.machines[node] == self._machine

    def open(self) -> None:
        if self.spec.spans_machines and self._socket is None:
            raise NetworkError(
                "nodes are on several machines: call bind() with this machine's name before open()"
            )
        try:
            self._page = StatsPage(len(self._machine_numbers))
            self._changes = ChangeChannel(pair for pair in self.spec.links if self._is_here(pair[0]))
            for node in filter(self._is_here, self.spec.nodes):
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
            self._set_route(ip)

    def _set_route(self, ip: IPRoute, window_bytes: int | None = None) -> None:
        """Leads to all nodes from the present namespace. ``window_bytes``: see ``tcp.route_options``."""
        index, options = ip.link_lookup(ifname=DEVICE)[0], tcp.route_options(self.spec, window_bytes)
        ip.route("replace", dst=str(self.spec.subnet), oif=index, **options)

    def begin_with(self, windows: Windows) -> None:
        of_nodes = tcp.windows_of_nodes(windows)
        assert of_nodes is not None, "a route holds one window"
        for node, namespace in self._namespaces.items():
            with inside(namespace), IPRoute() as ip:
                self._set_route(ip, of_nodes.get(node))

    def enter(self, node: str) -> None:
        setns(self._namespaces[node])
        self._close_devices()
        if self._changes is not None:
            # Keep the attribute: resetting it would write to memory that all nodes share (copy on write).
            self._changes.close()
        self._close_underlay()

    def namespaces(self) -> Mapping[str, int]:
        return self._namespaces

    def address(self, node: str) -> str:
        return str(self.spec.subnet[1 + self._index[node]])

    def worker(self) -> Callable[[], None]:
        assert self._page is not None and self._changes is not None, "worker() before open()"
        addresses = {node: socket.inet_aton(self.address(node)) for node in self.spec.nodes}
        if self.spec.is_virtual:
            forwarder = VirtualForwarder(self.spec, self._devices, addresses, self._page, self._changes)
            assert self.keeper is not None, "worker() before a keeper of virtual time is set"
            forwarder.keeper = self.keeper
            return forwarder.run
        if self.spec.spans_machines:
            assert self._underlay is not None, "worker() before join()"
            return FarForwarder(
                self.spec,
                self._devices,
                addresses,
                self._page,
                self._changes,
                EARLY_S,
                self._underlay,
                {node: self._machine_numbers[machine] for node, machine in self.spec.machines.items()},
            ).run
        return Forwarder(self.spec, self._devices, addresses, self._page, self._changes, EARLY_S).run

    def update(self, links: Mapping[tuple[str, str], Link]) -> None:
        assert self._changes is not None, "update() before open()"
        elsewhere = {pair for pair in links if pair in self.spec.links and not self._is_here(pair[0])}
        self._changes.send({pair: profile for pair, profile in links.items() if pair not in elsewhere})

    def underlay(self) -> dict[str, MachineStats]:
        """Returns the statistics of the other machines, by name; they are as old as those of ``stats``."""
        assert self._page is not None, "underlay() before open()"
        return {
            name: self._page.machine(number)
            for name, number in self._machine_numbers.items()
            if self.spec.spans_machines and name != self._machine
        }

    def check(
        self, links: Mapping[tuple[str, str], Link] | None = None, patience_s: float = 10.0
    ) -> dict[str, MachineStats]:
        """Waits until the other machines' clocks are known; then checks that the underlay is fast enough.

        ``links`` are those of ``spec`` by default; other profiles may be checked, such as those of later
        changes. Pairs whose sender is on another machine are ignored. Returns ``underlay()``. Raises
        ``NetworkError`` for a machine whose clock is not known after ``patience_s`` real seconds, or that has answered
        short datagrams only. Raises it also if links have a shorter delay than the underlay, and then names the link
        that lacks most: at once if the underlay was never faster, else after ``patience_s``, since a machine may be
        busy for a moment.
        """
        own = {
            pair: profile.delay_s
            for pair, profile in (self.spec.links if links is None else links).items()
            if self.spec.machines.get(pair[0], "") == self._machine
        }

        def lacking_s(rtts_s: Mapping[str, float]) -> dict[tuple[str, str], float]:
            """By how much the delays of links are shorter than what packets need with these RTTs."""
            needed_s = {
                pair: rtts_s[machine] / 2 + EARLY_S
                for pair in own
                if (machine := self.spec.machines.get(pair[1], "")) in rtts_s
            }
            return {pair: s - own[pair] for pair, s in needed_s.items() if s > own[pair]}

        until_s = time.monotonic() + patience_s
        while True:
            seen = self.underlay()
            silent = [name for name, other in seen.items() if other.n_samples < SETTLED_SAMPLES]
            is_over = time.monotonic() > until_s
            if silent and is_over and seen[silent[0]].n_samples == SETTLED_SAMPLES - 1:
                raise NetworkError(
                    f"short packets get from {self._machine} to machine {silent[0]} and back, but none as long as their "
                    "networks' MTUs: something on the way drops them, such as a tunnel; give both machines the MTU of "
                    "the way between them (ip link set DEVICE mtu BYTES)"
                )
            if silent and is_over:
                raise NetworkError(
                    f"the forwarder of machine {silent[0]} does not answer: check that it runs, with the "
                    f"same key, and that UDP packets from {self._machine} get there and back"
                )
            if not silent:
                short = lacking_s({name: other.rtt_s for name, other in seen.items()})
                # A machine that is busy for a moment is slow for a moment: only its best RTT says that it always is.
                if not short or is_over or lacking_s({name: other.rtt_min_s for name, other in seen.items()}):
                    break
            time.sleep(_LOOK_S)
        if short:
            (source, target), by_s = max(short.items(), key=lambda item: (item[1], item[0]))
            delay_s = own[source, target]
            machine = self.spec.machines[target]
            others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
            raise NetworkError(
                f"the link from {source} to {target}{others} has a delay of {1e3 * delay_s:.3g} ms, but "
                f"packets from machine {self._machine} to {machine} take {1e3 * (delay_s + by_s):.3g} ms "
                f"(RTT {1e3 * seen[machine].rtt_s:.3g} ms between their forwarders): put both nodes on one "
                "machine, give the link a longer delay, or use a smaller time_scale"
            )
        return seen

    def stats(self) -> ForwarderStats:
        """Returns the forwarder's counters.

        They are at most 0.1 s old, or 0.5 s while no packet is under way. In virtual time they are those of
        the instant before time last moved.
        """
        assert self._page is not None, "stats() before open()"
        return self._page.read()

    def lateness(self) -> Lateness:
        """Returns the histogram of how late packets were delivered so far; as old as ``stats``."""
        assert self._page is not None, "lateness() before open()"
        return self._page.lateness()

    def _close_devices(self) -> None:
        """Closes this process's descriptors; a device vanishes with its last descriptor."""
        for fd in self._devices.values():
            os.close(fd)
        self._devices.clear()

    def _remove_devices(self) -> None:
        """Removes all devices at the same time: for each, the kernel waits 20 ms for its other CPUs."""
        with ThreadPoolExecutor(_CLOSERS) as closers:
            deque(closers.map(os.close, self._devices.values()), maxlen=0)
        self._devices.clear()

    def _close_changes(self) -> None:
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def _close_underlay(self) -> None:
        for sock in (self._socket, self._probe):
            if sock is not None:
                sock.close()
        self._socket = self._probe = None

    def close(self) -> None:
        if self._devices:
            self._remove_devices()
        self._close_changes()
        self._close_underlay()
        for fd in self._namespaces.values():
            os.close(fd)
        self._namespaces.clear()
        if self._page is not None:
            self._page.close()
            self._page = None
