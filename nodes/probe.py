"""Measures the emulated network itself: an echo service on servers, a prober on clients.

It uses plain TCP and no aiohttp, so that it measures the network and not the data plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import uvloop

from nodes import control
from nodes.messages import Hello, Question, Stop
from nodes.node import NodeConfig

_HEADER = struct.Struct("!QQ")
"""(number of bytes that follow, number of bytes to send back)."""
_MAX_THREADS = 64


@dataclass(frozen=True)
class ProbePlan:
    """How to measure one pair of nodes, in real seconds. Parts with 0 echoes or bytes are left out.

    ``echo_limit_s`` ends each of the two series of echoes early, but not before two echoes. All transfers
    together may take ``bulk_limit_s``. ``up`` and ``down`` are (delay, seconds per byte) where the client
    itself plays the links.
    """

    address: str
    port: int
    n_echoes: int
    echo_bytes: int
    bulk_bytes_up: int
    bulk_bytes_down: int
    echo_limit_s: float
    bulk_limit_s: float
    busy_interval_s: float = 0.0
    up: tuple[float, float] | None = None
    down: tuple[float, float] | None = None


class Measured(msgspec.Struct):
    """What was measured of one pair of nodes, in real seconds.

    ``rtt_s`` are the times of one-byte echoes, ``echo_s`` those of echoes of ``echo_bytes`` each way.
    ``up_s`` and ``down_s`` are the times of a bulk transfer on a warm connection, one round trip included;
    ``None`` if none was made. ``failure`` is the reason why figures are missing; ``None`` if none is.
    """

    rtt_s: list[float] = []
    echo_s: list[float] = []
    up_s: float | None = None
    down_s: float | None = None
    failure: str | None = None


class Measure(Question[Measured], frozen=True):
    """Measure one pair of nodes."""

    plan: ProbePlan


class KeepBusy(Question[None], frozen=True):
    """Exchange echoes with each of these pairs until ``Rest``, at most one per ``busy_interval_s``."""

    plans: list[ProbePlan]


class Rest(Question[int], frozen=True):
    """Stop what ``KeepBusy`` began. The answer is the number of echoes."""


def run_echo(config: NodeConfig) -> None:
    """Runs an echo service until the orchestrator sends ``Stop`` or is gone."""
    uvloop.run(_run_node(config, _Echo()))


def run_prober(config: NodeConfig) -> None:
    """Runs a prober until the orchestrator sends ``Stop`` or is gone."""
    uvloop.run(_run_node(config, _Prober(config)))


class _Echo:
    """Reads a header and its payload, and sends back the number of bytes that the header has.

    Each connection has a thread. Sockets block on both ends, because an event loop would add its own time to
    what is measured.
    """

    def prepare(self, config: NodeConfig) -> int:
        listener = socket.create_server((config.address, config.port), backlog=64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def handlers(self) -> control.Handlers:
        return {}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):  # the prober has left
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                follow, wanted = _HEADER.unpack(_receive(connection, _HEADER.size))
                _discard(connection, follow)
                connection.sendall(bytes(wanted))


class _Prober:
    """Measures pairs, and keeps pairs busy while another prober measures. Blocking sockets in threads."""

    def __init__(self, config: NodeConfig) -> None:
        self._address = config.address
        self._resting = threading.Event()
        self._busy: list[asyncio.Future[int]] = []
        self._threads = ThreadPoolExecutor(_MAX_THREADS)

    def prepare(self, config: NodeConfig) -> int:
        return 0

    def handlers(self) -> control.Handlers:
        return {Measure: self.measure, KeepBusy: self.busy, Rest: self.rest}

    async def measure(self, message: Measure) -> Measured:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._measure, message.plan)

    async def busy(self, message: KeepBusy) -> None:
        self._resting.clear()
        loop = asyncio.get_running_loop()
        self._busy = [loop.run_in_executor(self._threads, self._keep_busy, plan) for plan in message.plans]

    async def rest(self, _: Rest) -> int:
        self._resting.set()
        counts = await asyncio.gather(*self._busy)
        self._busy = []
        return sum(counts)

    def _connect(self, plan: ProbePlan) -> _Pair:
        source = None if plan.up else (self._address, 0)
        end = (plan.address, plan.port)
        return _Pair(socket.create_connection(end, timeout=plan.echo_limit_s, source_address=source), plan)

    def _measure(self, plan: ProbePlan) -> Measured:
        result = Measured(failure="connecting took too long")
        with contextlib.suppress(TimeoutError), self._connect(plan) as pair:  # result.failure has the reason
            for what, took_s, n_bytes in (
                ("a byte", result.rtt_s, 1),
                ("a token", result.echo_s, plan.echo_bytes),
            ):
                result.failure = f"the echo of {what} took too long"
                pair.echoes(n_bytes, took_s)
            pair.limit(plan.bulk_limit_s)
            result.failure = "the transfer there took too long"
            if plan.bulk_bytes_up > 1:
                result.up_s = pair.bulk(plan.bulk_bytes_up, 1)
            result.failure = "the transfer back took too long"
            if plan.bulk_bytes_down > 1:
                result.down_s = pair.bulk(1, plan.bulk_bytes_down)
            result.failure = None
        return result

    def _keep_busy(self, plan: ProbePlan) -> int:
        count = 0
        with contextlib.suppress(TimeoutError), self._connect(plan) as pair:  # too slow to be kept busy
            resting = False
            while not resting:
                pair.limit(plan.echo_limit_s)
                took_s = pair.exchange(plan.echo_bytes, plan.echo_bytes)
                count += 1
                resting = self._resting.wait(max(plan.busy_interval_s - took_s, 0))
        return count


class _Pair:
    """A connection to one echo service. Its methods raise ``TimeoutError`` when the limit has passed."""

    def __init__(self, connection: socket.socket, plan: ProbePlan) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._plan = plan
        self._ends_at = 0.0
        self.limit(plan.echo_limit_s)

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def limit(self, seconds: float) -> None:
        """Lets all exchanges from now on together take at most ``seconds``."""
        self._ends_at = time.monotonic() + seconds

    def echoes(self, n_bytes: int, took_s: list[float]) -> None:
        """Appends to ``took_s`` the times of the plan's echoes; a first one does not count."""
        plan = self._plan
        if not plan.n_echoes:
            return
        self.limit(2 * plan.echo_limit_s)
        stop_at = time.monotonic() + plan.echo_limit_s
        self.exchange(n_bytes, n_bytes)
        while len(took_s) < 2 or (len(took_s) < plan.n_echoes and time.monotonic() < stop_at):
            took_s.append(self.exchange(n_bytes, n_bytes))

    def bulk(self, n_up: int, n_down: int) -> float:
        """As ``exchange``, after a first one that opens TCP's windows as far as this link needs."""
        self.exchange(n_up, n_down)
        return self.exchange(n_up, n_down)

    def exchange(self, n_up: int, n_down: int) -> float:
        """Sends ``n_up`` bytes and reads the ``n_down`` bytes sent back for them.

        Returns the real seconds it took.
        """
        message = _HEADER.pack(n_up, n_down) + bytes(n_up)
        started_at = time.monotonic()
        self._connection.settimeout(max(self._ends_at - started_at, 1e-3))
        _hold(self._plan.up, len(message))
        self._connection.sendall(message)
        _discard(self._connection, n_down, self._ends_at)
        _hold(self._plan.down, n_down)
        return time.monotonic() - started_at


def _hold(link: tuple[float, float] | None, n_bytes: int) -> None:
    """Waits as long as ``link`` takes for ``n_bytes``; not at all if the network itself delays them."""
    if link is not None:
        time.sleep(link[0] + n_bytes * link[1])


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        part = connection.recv(n_bytes - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def _discard(connection: socket.socket, n_bytes: int, ends_at: float = math.inf) -> None:
    buffer = memoryview(bytearray(min(max(n_bytes, 1), 1 << 20)))
    while n_bytes:
        if time.monotonic() > ends_at:
            raise TimeoutError
        got = connection.recv_into(buffer[: min(n_bytes, len(buffer))])
        if not got:
            raise ConnectionError("closed")
        n_bytes -= got


async def _run_node(config: NodeConfig, node: _Echo | _Prober) -> None:
    port = node.prepare(config)
    stopped = asyncio.Event()

    async def stop(_: Stop) -> None:
        stopped.set()

    peer = await control.connect(config.control_path, {Stop: stop, **node.handlers()})
    peer.notify(Hello(config.process or config.name, os.getpid(), port))
    await control.until_stopped(peer, stopped)
