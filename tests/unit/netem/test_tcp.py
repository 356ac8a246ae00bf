import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from netem.spec import NetworkError, NetworkSpec, TcpSpec
from netem.syscalls import inside, new_network_namespace
from netem.tcp import configure_namespace, route_options

SEND_CONGESTION_WINDOW_OFFSET = 80  # tcpi_snd_cwnd in struct tcp_info


def network(**tcp: object) -> NetworkSpec:
    return NetworkSpec("test", ("a", "b"), {}, TcpSpec(**tcp))  # type: ignore[arg-type]


@pytest.fixture
def namespace() -> Iterator[int]:
    fd = new_network_namespace()
    yield fd
    os.close(fd)


def sysctl(name: str) -> str:
    return Path("/proc/sys/net/ipv4", name).read_text().strip()


def test_a_namespace_keeps_idle_connections_warm_unless_the_scenario_wants_slow_start(namespace: int) -> None:
    with inside(namespace):
        configure_namespace(network())
        assert sysctl("tcp_slow_start_after_idle") == "0"
        assert sysctl("tcp_congestion_control") == "reno"
        assert sysctl("tcp_no_metrics_save") == "1"
        configure_namespace(network(slow_start_after_idle=True))
        assert sysctl("tcp_slow_start_after_idle") == "1"


def test_a_congestion_control_the_kernel_lacks_is_refused_with_the_file_that_lists_them(
    namespace: int,
) -> None:
    with inside(namespace), pytest.raises(NetworkError, match="tcp_allowed_congestion_control"):
        configure_namespace(network(congestion_control="nonesuch"))


def test_a_cold_connection_gets_no_route_options() -> None:
    assert route_options(network(warm=False)) == {}


def test_a_warm_connection_sends_a_whole_prompt_in_its_first_flight() -> None:
    near, far = new_network_namespace(), new_network_namespace()
    sockets = []
    try:
        spec = network()
        with inside(far), IPRoute() as ip:
            configure_namespace(spec)
            far_listener = socket.create_server(("0.0.0.0", 8000))
            sockets.append(far_listener)
            ip.link("add", ifname="far0", kind="veth", peer={"ifname": "near0", "net_ns_fd": near})
            join(ip, "far0", "198.18.0.2", "198.18.0.1", spec)
        with inside(near), IPRoute() as ip:
            configure_namespace(spec)
            join(ip, "near0", "198.18.0.1", "198.18.0.2", spec)
            sockets.append(socket.create_connection(("198.18.0.2", 8000), timeout=5))
        sockets.append(far_listener.accept()[0])
        for end in sockets[1:]:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            segments = struct.unpack_from("I", info, SEND_CONGESTION_WINDOW_OFFSET)[0]
            assert segments * (spec.mtu - 52) >= 573_440
    finally:
        for end in sockets:
            end.close()
        os.close(near)
        os.close(far)


def join(ip: IPRoute, device: str, own: str, other: str, spec: NetworkSpec) -> None:
    index = ip.link_lookup(ifname=device)[0]
    ip.addr("add", index=index, address=own, prefixlen=32)
    ip.link("set", index=index, state="up")
    ip.route("add", dst=f"{other}/32", oif=index, **route_options(spec))
