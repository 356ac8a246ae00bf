"""Several "machines" on this one: network namespaces on a bridge, each with a ``fabric`` backend in a process of its own.

To be used by a single-threaded process that has a network namespace to itself (``netem.probe.become_network_admin``):
the bridge and all that is on it vanish with that.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from netem.fabric import FabricBackend
from netem.spec import NetworkError, NetworkSpec
from netem.syscalls import CLONE_NEWNET, set_death_signal, setns, unshare
from policies.links import Link
from tests.support import machines_work
from tests.support.children import in_child

AHEAD_S = 1000
"""By how much each machine's ``time.monotonic`` is ahead of that of the one before."""
_CLONE_NEWTIME = 0x80
Links = Mapping[tuple[str, str], Link]

_PORT = 7400
_KEY = bytes(range(32))
_SO_ATTACH_FILTER = 26
_LOAD, _LOAD_LENGTH, _JUMP_IF_GREATER, _RETURN = 0x20, 0x80, 0x25, 0x06
"""Of classic BPF."""
_RANDOM = 0xFFFFF000 + 56


def echo_server(address: str, ready: int) -> None:
    """Gives back messages that begin with their length in eight bytes, for ever."""
    listener = socket.create_server((address, _PORT))
    os.write(ready, b"+")

    def serve(connection: socket.socket) -> None:
        while header := connection.recv(8, socket.MSG_WAITALL):
            connection.sendall(connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


class Machine:
    """One of them: a process that does what it is asked by name (``do_…``)."""

    def __init__(self, name: str, number: int, spec: NetworkSpec) -> None:
        self.name = name
        self._is_gone = False
        self._address = f"10.77.0.{number + 1}"
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._here.close()
            self._asked = there
            set_death_signal(signal.SIGKILL)
            self._forked: list[int] = []
            self._ahead_s = number * AHEAD_S
            try:
                self._live(spec)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        there.close()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Raises ``NetworkError`` as the machine does."""
        self._here.send(json.dumps([what, arguments]).encode())
        answer = self._here.recv(1 << 20)
        assert answer, f"the machine {self.name} is gone"
        kind, value = json.loads(answer)
        if kind == "network error":
            raise NetworkError(value)
        assert kind == "ok", value
        return value

    def kill(self) -> None:
        """It is gone when this returns, with all that it forked. May be called more than once."""
        if not self._is_gone:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._here.close()
            self._is_gone = True

    def _live(self, spec: NetworkSpec) -> None:
        unshare(CLONE_NEWNET)
        self._set_clock()
        self._backend = FabricBackend(spec)
        self._n_descriptors = len(os.listdir("/proc/self/fd"))
        while request := self._asked.recv(1 << 20):
            what, arguments = json.loads(request)
            try:
                answer: tuple[str, Any] = "ok", getattr(self, f"do_{what}")(*arguments)
            except NetworkError as error:
                answer = "network error", str(error)
            except BaseException:
                answer = "error", traceback.format_exc()
            self._asked.send(json.dumps(answer).encode())

    def _set_clock(self) -> None:
        """Gives this process and its children a monotonic clock of their own, where the kernel has time namespaces."""
        try:
            unshare(_CLONE_NEWTIME)
        except OSError:
            self._ahead_s = 0
            return
        Path("/proc/self/timens_offsets").write_text(f"monotonic {self._ahead_s} 0\n", encoding="ascii")
        fd = os.open("/proc/self/ns/time_for_children", os.O_RDONLY | os.O_CLOEXEC)
        setns(fd, _CLONE_NEWTIME)
        os.close(fd)

    def _fork(self, run: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            set_death_signal(signal.SIGKILL)
            self._asked.close()
            try:
                run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._forked.append(pid)

    def do_start(self) -> None:
        """The namespace is this process's own now."""

    def do_ahead(self) -> float:
        """By how much this machine's clock is ahead of the test's."""
        return self._ahead_s

    def do_bind(self, device: str) -> tuple[str, int]:
        with IPRoute() as ip:
            for name in ("lo", device):
                ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")
            ip.addr("add", index=ip.link_lookup(ifname=device)[0], address=self._address, prefixlen=24)
        return self._backend.bind(self.name, self._address)

    def do_open(self, endpoints: Mapping[str, list[Any]]) -> None:
        unshare(CLONE_NEWNET)  # as the launcher does: the socket stays where it is
        self._backend.open()
        self._backend.join({name: (address, port) for name, (address, port) in endpoints.items()}, _KEY)
        worker = self._backend.worker()
        assert worker is not None
        self._fork(worker)

    def do_check(self, links: list[Any] | None = None, patience_s: float = 60.0) -> None:
        self._backend.check(_links(links) if links is not None else None, patience_s)

    def do_update(self, links: list[Any]) -> None:
        self._backend.update(_links(links))

    def do_stats(self) -> dict[str, Any]:
        return vars(self._backend.stats())

    def do_underlay(self) -> dict[str, Any]:
        return {name: vars(machine) for name, machine in self._backend.underlay().items()}

    def do_serve(self, node: str) -> None:
        reading, writing = os.pipe()

        def run() -> None:
            self._backend.enter(node)
            echo_server(self._backend.address(node), writing)

        self._fork(run)
        os.close(writing)
        assert os.read(reading, 1) == b"+", "an echo server did not start"
        os.close(reading)

    def do_within(self, node: str, work: str, *arguments: Any) -> Any:
        """What ``work`` of ``tests.support.machines_work`` answers inside ``node``; ``address`` gives peers."""

        def inside() -> Any:
            self._backend.enter(node)
            return getattr(machines_work, work)(self._backend.address, _PORT, *arguments)

        return in_child(inside)

    def do_lose(self, ratio: float) -> None:
        """From now on the machine's forwarder does not get that share of what the underlay brings."""
        self._filter(
            (_LOAD, 0, 0, _RANDOM),
            (_JUMP_IF_GREATER, 1, 0, int(ratio * 0xFFFFFFFF)),
            (_RETURN, 0, 0, 0),
            (_RETURN, 0, 0, 0xFFFFFFFF),
        )

    def do_narrow(self, n_bytes: int) -> None:
        """From now on the machine's forwarder does not get what is longer, as behind a tunnel that nobody knows of."""
        self._filter(
            (_LOAD_LENGTH, 0, 0, 0),
            (_JUMP_IF_GREATER, 0, 1, n_bytes),
            (_RETURN, 0, 0, 0),
            (_RETURN, 0, 0, 0xFFFFFFFF),
        )

    def _filter(self, *program: tuple[int, int, int, int]) -> None:
        """What the program returns is how many bytes of a datagram the machine's forwarder gets."""
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
        sock = self._backend._socket
        assert sock is not None
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code))
        )

    def do_close(self) -> tuple[int, list[str]]:
        """Ends what was forked; how many descriptors more are open now than at the beginning, and which devices are left."""
        for pid in self._forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._backend.close()
        self._backend.close()
        with IPRoute() as ip:
            names = [str(link.get("ifname")) for link in ip.get_links()]
        return len(os.listdir("/proc/self/fd")) - self._n_descriptors, [
            name for name in names if name != "lo"
        ]


def _links(links: list[Any]) -> dict[tuple[str, str], Link]:
    return {(source, target): Link(*values) for source, target, values in links}


def as_list(links: Links) -> list[Any]:
    """For ``update`` and ``check``."""
    return [[source, target, list(astuple(profile))] for (source, target), profile in links.items()]


class Machines:
    """All of ``spec.machines``, open and known to each other. ``missing``: those that never start."""

    def __init__(self, spec: NetworkSpec, missing: tuple[str, ...] = ()) -> None:
        names = sorted(set(spec.machines.values()))
        self._by_name = {name: Machine(name, number, spec) for number, name in enumerate(names)}
        with IPRoute() as ip:
            ip.link("add", ifname="bridge", kind="bridge")
            bridge = ip.link_lookup(ifname="bridge")[0]
            ip.link("set", index=bridge, state="up")
            for number, machine in enumerate(self._by_name.values()):
                machine.ask("start")
                ip.link("add", ifname=f"port{number}", kind="veth", peer=f"m{number}")
                port, end = (ip.link_lookup(ifname=f"{kind}{number}")[0] for kind in ("port", "m"))
                ip.link("set", index=end, net_ns_pid=machine.pid)
                ip.link("set", index=port, master=bridge, state="up")
        endpoints = {
            name: machine.ask("bind", f"m{number}")
            for number, (name, machine) in enumerate(self._by_name.items())
        }
        for name, machine in self._by_name.items():
            if name not in missing:
                machine.ask("open", endpoints)

    def __getitem__(self, name: str) -> Machine:
        return self._by_name[name]

    def check(self) -> None:
        for machine in self._by_name.values():
            machine.ask("check")

    def kill(self) -> None:
        for machine in self._by_name.values():
            machine.kill()
