"""Cases of ``chaos`` whose messages take longer than time limits, at a scale at which they are cheap.

Sizes of messages, buffers and windows, and with them hidden states and rates, are ``SCALE`` times as small as in a real
system. So a prompt of 64 MiB at 40 Mbit/s becomes one of 2 MiB at 1.25 Mbit/s: the same seconds for less work.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from aiohttp._websocket.writer import WebSocketWriter

from netem import flows
from netem.tcp import RECEIVE_WINDOW_BYTES, WARM_FLIGHT_BYTES
from nodes import connection, framesizes, server, sessions, wire
from nodes.limits import ServerLimits
from policies import links

Document = dict[str, Any]

SCALE = 32
_HIDDEN_SIZE = 8192 // SCALE
_MSS = 1448


def make_slow(document: Document, rng: random.Random) -> None:
    """Draws prompts of thousands of tokens, slow links, several clients, and connections that begin cold."""
    document["model"] |= {
        "hidden_size": _HIDDEN_SIZE,
        "n_blocks": rng.choice((2, 4, 6)),
        "cache_per_token": rng.choice(("1 kB", "10 kB", "60 kB")),
    }
    for place in document["servers"]:
        place["memory"] = f"{rng.choice((9, 14, 20))} GB"
    sites = sorted({pair["sites"][0] for pair in document["network"]["pairs"]})
    n_clients = rng.choice((1, 1, 2, 4))
    document["clients"] = [{"site": rng.choice(sites), "name": f"c{number}"} for number in range(n_clients)]
    usual = rng.choice((4, 40, 40, 200))
    for pair in document["network"]["pairs"]:
        rate_bps = rng.choice((usual, usual, 1000)) * 1e6 / SCALE
        pair |= {"rate": f"{rate_bps:.0f} bit/s", "rtt": f"{rng.choice((1, 20, 80, 200, 600))} ms"}
        pair["jitter"] = "0 ms"
    prompts = rng.choice(((1, 20), (500, 4000), (3000, 6000), (1, 9000)))
    within_s = rng.choice((1, 10, 60))
    arrivals = sorted(round(rng.uniform(0, within_s), 3) for _ in range(rng.choice((1, 2, 3, 6, 12))))
    document["workload"]["requests"] = [
        [at_s, rng.choice((rng.randint(*prompts), rng.randint(1, 30))), rng.randint(1, 30)]
        for at_s in arrivals
    ]
    if document["workload"].get("lengths") == "hidden":
        document["workload"]["max_new_tokens"] = rng.choice((30, 60))
    document["recovery"] |= {
        "connect_timeout": rng.choice(("2.5 s", "5 s", "5 s", "10 s")),
        "request_timeout": rng.choice(("5 s", "180 s", "180 s", "180 s")),
        "give_up": "300 s",
    }
    document["tcp"] = {"warm": rng.random() < 0.5, "slow_start_after_idle": rng.random() < 0.3}


def cancels_of(document: Document, rng: random.Random, instants: list[float]) -> list[Document]:
    """Returns requests that are cancelled, up to all of them, at ``instants`` or between them."""
    requests = document["workload"]["requests"]
    if rng.random() < 0.2:
        return []
    cancels = []
    for number in sorted(rng.sample(range(len(requests)), rng.randint(1, len(requests)))):
        arrival_at_s = requests[number][0]
        at_s = rng.uniform(arrival_at_s, arrival_at_s + 60)
        if rng.random() < 0.5 and instants:
            at_s = max(arrival_at_s, rng.choice(instants) + rng.choice((-1e-3, -1e-6, 0.0, 1e-9, 1e-6, 1e-3)))
        cancels.append({"request": number, "at_s": at_s})
    return cancels


@contextlib.contextmanager
def scaled() -> Iterator[None]:
    """Runs the body with sizes that are ``SCALE`` times as small."""
    limits = ServerLimits.__init__.__defaults__
    assert limits is not None
    smaller = {
        (wire, "PART_BYTES"): wire.PART_BYTES // SCALE,
        (wire, "SMALL_BYTES"): wire.SMALL_BYTES // SCALE,
        (connection, "WARM_BYTES"): framesizes.WARM_BYTES // SCALE,
        (flows, "UNSENT_BYTES"): links.UNSENT_BYTES // SCALE,
        (flows, "WARM_FLIGHT_BYTES"): max(WARM_FLIGHT_BYTES // SCALE, 3 * _MSS),
        (flows, "RECEIVE_WINDOW_BYTES"): RECEIVE_WINDOW_BYTES // SCALE,
        (flows, "HIGH_WATER_BYTES"): flows.HIGH_WATER_BYTES // SCALE,
        (flows, "LOW_WATER_BYTES"): flows.LOW_WATER_BYTES // SCALE,
        (flows, "BURST_BYTES"): 8 * _MSS,
        (ServerLimits.__init__, "__defaults__"): tuple(
            value // SCALE if value == ServerLimits.max_unread_bytes else value for value in limits
        ),
        (WebSocketWriter.__init__, "__kwdefaults__"): {
            **(WebSocketWriter.__init__.__kwdefaults__ or {}),
            "limit": 2**18 // SCALE,
        },
    }
    with contextlib.ExitStack() as stack:
        for known in (framesizes.step, framesizes.out, framesizes.push, framesizes.result):
            known.cache_clear()
            stack.callback(known.cache_clear)
        for (owner, name), value in smaller.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class Released(NamedTuple):
    """A session that ended on a server."""

    server: str
    session: str
    at_s: float


@dataclass
class Watched:
    """What servers did with sessions: sessions are named ``REQUEST.ATTEMPT``, or ``REQUEST`` at the first attempt."""

    released: list[Released] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)
    """Sessions that nobody closed."""
    scale: int = 1
    """How many times as small messages and buffers are."""
    rejected: list[str] = field(default_factory=list)
    """Why servers closed connections of nodes of ours."""


@contextlib.contextmanager
def watching(scale: int) -> Iterator[Watched]:
    """Watches all servers while the body runs."""
    watched = Watched(scale=scale)
    begin, release = server.Server.__init__, sessions.Sessions._release
    expire, reject = sessions.Sessions._expire, server.Server._reject
    names: dict[sessions.Sessions, str] = {}

    def begun(self: server.Server, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        names[self.sessions] = self.name

    def released(self: sessions.Sessions, of: sessions.Connection, key: str) -> None:
        watched.released.append(Released(names[self], key, self.clock.now_s()))
        release(self, of, key)

    def expired(self: sessions.Sessions, of: sessions.Connection, key: str) -> None:
        watched.expired.append(key)
        expire(self, of, key)

    async def rejected(self: server.Server, of: sessions.Connection, error: wire.FrameError) -> None:
        watched.rejected.append(f"{self.name}: {error.code}: {error}")
        await reject(self, of, error)

    with (
        mock.patch.object(server.Server, "__init__", begun),
        mock.patch.object(sessions.Sessions, "_release", released),
        mock.patch.object(sessions.Sessions, "_expire", expired),
        mock.patch.object(server.Server, "_reject", rejected),
    ):
        yield watched
