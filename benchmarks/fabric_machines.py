"""A ``fabric`` network over two "machines": network namespaces of this process, joined by a veth pair."""

from __future__ import annotations

import os
from collections.abc import Callable

from pyroute2 import IPRoute

from netem.fabric import FabricBackend
from netem.spec import NetworkSpec
from netem.syscalls import inside, new_network_namespace

_ADDRESSES = {"m0": "10.77.0.1", "m1": "10.77.0.2"}


def open_two(spec: NetworkSpec, fork: Callable[[Callable[[], None]], None]) -> dict[str, FabricBackend]:
    """Opens the backends of ``m0`` and ``m1``, forks their forwarders and connects them. Returns the
    backends.

    The process must be single-threaded and have a network namespace of its own, which ends with the process.
    """
    homes = {name: new_network_namespace() for name in _ADDRESSES}
    with IPRoute() as ip:
        ip.link("add", ifname="m0", kind="veth", peer="m1")
        for name, home in homes.items():
            ip.link("set", index=ip.link_lookup(ifname=name)[0], net_ns_fd=home)
    backends, endpoints = {}, {}
    for name, address in _ADDRESSES.items():
        with inside(homes[name]), IPRoute() as ip:
            index = ip.link_lookup(ifname=name)[0]
            ip.addr("add", index=index, address=address, prefixlen=24)
            ip.link("set", index=index, state="up")
            backends[name] = FabricBackend(spec)
            endpoints[name] = backends[name].bind(name, address)
    key = os.urandom(32)
    for backend in backends.values():
        backend.open()
        backend.join(endpoints, key)
        worker = backend.worker()
        assert worker is not None
        fork(worker)
    for backend in backends.values():
        backend.check()
    for home in homes.values():  # from here on the sockets keep the namespaces alive
        os.close(home)
    return backends
