"""A node's port is reachable inside its own emulated network, and from nowhere else."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from netem.syscalls import setns
from tests.support.runs import FAST, REAL, Testbed, node_pid, processes

PORT = 7000
PATIENCE_S = 1.0


def _in_namespace_of(pid: int | None, what: Callable[[], str]) -> str:
    """``what()`` in the network of a process (``None``: this one's own), in a child that ends with it."""
    out, back = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if pid is not None:
                setns(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
            os.write(back, what().encode())
        finally:
            os._exit(0)
    os.close(back)
    with open(out, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def _asked(address: str) -> Callable[[], str]:
    """Who answers at ``address``: a server's name, or nobody."""

    def ask() -> str:
        try:
            with socket.create_connection((address, PORT), PATIENCE_S) as line:
                line.settimeout(PATIENCE_S)
                line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer = b""
                while part := line.recv(65536):
                    answer += part
            return str(json.loads(answer.partition(b"\r\n\r\n")[2])["name"])
        except (OSError, ValueError, KeyError):  # the host's own gateway may answer for any address
            return "nobody"

    return ask


def _addresses(pid: int) -> list[str]:
    """The addresses on which a process's network listens on the data plane's port."""
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, port = local.split(":")
        if state == "0A" and int(port, 16) == PORT:
            found.append(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="entering another namespace needs root")
def test_a_server_is_reached_by_its_own_run_and_by_nobody_else(fabric: None, testbed: Testbed) -> None:
    how = ("--network", "fabric", *FAST, *REAL, "--hold", "--no-page")
    runs = [testbed.start_up("clustered", *how, *more) for more in ((), ("--set", "servers.0.count=4"))]
    one, two = (run.serving(1) for run in runs)
    names = sorted(name.removeprefix("tb:") for name in processes(one).values() if name.startswith("tb:"))
    servers = [name for name in names if name.startswith(("mig-", "a100-"))]
    assert len(servers) >= 6
    own, foreign = (node_pid(run, next(n for n in names if n.startswith("client"))) for run in (one, two))
    last = servers[-1]
    (address,) = _addresses(node_pid(one, last))
    assert _in_namespace_of(own, _asked(address)) == last
    assert _in_namespace_of(None, _asked(address)) == "nobody", "the host's own network leads to a node"
    # Another run has addresses of its own, which may be the same: whoever answers there is one of its own.
    for name in (*servers[:2], last):
        (address,) = _addresses(node_pid(one, name))
        served = _in_namespace_of(foreign, _asked(address))
        assert served == "nobody" or address in {
            a for pid, comm in processes(two).items() if comm == f"tb:{served}"[:15] for a in _addresses(pid)
        }
    n_one = len(servers)
    beyond = [_in_namespace_of(foreign, _asked(f"198.18.0.{i}")) for i in range(n_one, n_one + 3)]
    assert "nobody" in beyond, "the smaller run has no such node, and reaches no other's"


def test_on_the_loopback_network_servers_listen_on_127_0_0_1_only(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--network", "loopback", *FAST, *REAL, "--hold", "--no-page").serving(
        1
    )
    pids = {pid for pid, name in processes(run).items() if name.startswith("tb:")}
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink()) if entry.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append((table, fields[1].partition(":")[0]))
    assert len(listening) >= 9
    assert set(listening) == {("tcp", "0100007F")}
