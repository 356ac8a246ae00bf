"""The load generator over real servers: arrivals, failures and the log that it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from nodes.clock import Clock
from nodes.compute import Computed, StubCompute, StubProfile
from nodes.connection import Connection
from nodes.digest import DIGEST_BYTES, apply_blocks, embed, token_of
from nodes.eventlog import EventLog, LogFullError
from nodes.hub import StubHub
from nodes.load import LoadGenerator
from nodes.records import (
    ENDED,
    Admitted,
    AnyRecord,
    Arrived,
    Completed,
    Failed,
    HopRecord,
    Interrupted,
    Opening,
    Plan,
    Routed,
    Token,
)
from nodes.request import Request
from nodes.session import HubSession, SessionRules
from policies.steps import StepTimes
from policies.workload import Turn
from tests.support.data_plane import (
    INSTANT,
    PATIENT,
    TOKEN_BYTES,
    JumpClock,
    connected,
    drive,
    make_server,
    until,
)
from tests.support.manual_clock import ManualClock

RULES = SessionRules(recovery=PATIENT)
MODEL = StubHub(TOKEN_BYTES, 4)
HOPS = [(0, 0, 2), (1, 2, 4)]


async def route(request: Request, attempt: int, n_done: int) -> Plan:
    return Plan(HOPS, 0.0, 0.25)


class Load:
    """A load generator, and the records that its observer got."""

    def __init__(
        self, clock: Clock, log: EventLog, connections: Sequence[Connection], hold_s: float | None = None
    ) -> None:
        self.observed: list[AnyRecord] = []
        self.log = log

        def make(request: Request, generator: LoadGenerator, after: HubSession | None) -> HubSession:
            key, observe = str(request.index), generator.record
            return HubSession(
                request, key, "c", connections, route, MODEL, RULES, clock, observe, after=after
            )

        self.generator = LoadGenerator(clock, log, make, self.observed.append, "hub", hold_s)

    def count_of(self, request: int, kind: str) -> int:
        return sum((record.request, record.kind) == (request, kind) for record in self.observed)

    def count(self, kind: str) -> int:
        return sum(record.kind == kind for record in self.observed)

    def records(self) -> list[AnyRecord]:
        with self.log.path.open("rb") as file:
            return [msgspec.convert(record, AnyRecord) for record in msgpack.Unpacker(file)]


def tokens_of(prompt: list[int], n_tokens: int, n_blocks: int) -> list[int]:
    """Returns the tokens of the whole toy model after ``prompt``."""
    caches, tokens = [0] * n_blocks, list(prompt)
    values = [apply_blocks(embed(token, i), 0, caches) for i, token in enumerate(prompt)]
    while len(tokens) < len(prompt) + n_tokens:
        tokens.append(token_of(values[-1]))
        values.append(apply_blocks(embed(tokens[-1], len(tokens) - 1), 0, caches))
    return tokens[len(prompt) :]


async def test_the_log_holds_every_record_of_a_request_in_order(tmp_path: Path) -> None:
    clock = JumpClock()
    async with connected([make_server(0, 2), make_server(2, 4)], clock) as connections:
        load = Load(clock, EventLog(tmp_path / "log"), connections)
        await load.generator.run([Request(7, 2.5, 3, 2)])
        load.log.close()
    n_up = 3 * TOKEN_BYTES
    tokens = tokens_of([7, 8, 9], 2, 4)
    hops = [[HopRecord(*hop, 2.5, 0.0, 0.0, 2.5, size, size, 0) for hop in HOPS] for size in (n_up, 64)]
    assert load.records() == [
        Arrived(7, 2.5, "hub", 2.5, 3, 2),
        Routed(7, 2.5, HOPS, 0.0, 0.25, 0.0),
        Admitted(7, 2.5, HOPS),
        Opening(7, 2.5, 2.5),
        Token(7, 2.5, 0, 2.5, hops[0], tokens[0]),
        Token(7, 2.5, 1, 2.5, hops[1], tokens[1]),
        Completed(7, 2.5),
    ]
    assert load.observed == load.records()
    assert load.generator.n_tokens == 2


async def test_arrivals_do_not_wait_for_slow_sessions(tmp_path: Path) -> None:
    clock, server_clock = JumpClock(), ManualClock()
    slow = StubProfile(TOKEN_BYTES, StepTimes(100.0, 100.0, 0.0))
    chain = [make_server(0, 2, clock=server_clock, profile=slow), make_server(2, 4)]
    requests = [Request(i, 0.5 * i, 3, 2) for i in range(20)]
    async with connected(chain, clock) as connections:
        load = Load(clock, EventLog(tmp_path / "log"), connections)
        work = asyncio.create_task(load.generator.run(requests))
        await until(lambda: load.count("admitted") == 20)
        arrived = [(r.request, r.at_s) for r in load.observed if isinstance(r, Arrived)]
        assert arrived == [(i, 0.5 * i) for i in range(20)]
        assert load.count("completed") == 0
        await drive(server_clock, work, 50.0)
        assert load.count("completed") == 20
        load.log.close()
    completed = [record.request for record in load.records() if isinstance(record, Completed)]
    assert sorted(completed) == list(range(20))


class _WrongForOne(StubCompute):
    """Computes wrong values for the prompt of one request."""

    def __init__(self, index: int) -> None:
        super().__init__(INSTANT, ManualClock())
        self._prompt = embed(index, 0).to_bytes(DIGEST_BYTES, "little")

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        computed = await super().step(session, position, n_tokens, payload, arrived_at_s)
        return Computed(bytes(len(payload))) if payload.startswith(self._prompt) else computed


async def test_a_request_that_fails_is_logged_with_the_reason_and_the_others_complete(tmp_path: Path) -> None:
    clock = JumpClock()
    chain = [make_server(0, 2, compute=_WrongForOne(20)), make_server(2, 4)]
    async with connected(chain, clock) as connections:
        load = Load(clock, EventLog(tmp_path / "log"), connections)
        await load.generator.run([Request(i, float(i), 3, 2) for i in (10, 20, 30)])
        load.log.close()
        assert all(server.account.used_bytes == 0.0 for server in chain)
    ends = {
        record.request: (record.kind, record.details())
        for record in load.records()
        if isinstance(record, Completed | Failed)
    }
    assert ends == {
        10: ("completed", {}),
        20: ("failed", {"reason": "token 0 differs from the whole model's"}),
        30: ("completed", {}),
    }


class _LimitedLog(EventLog):
    """A log that is full after some records."""

    def __init__(self, path: Path, n_records: int) -> None:
        super().__init__(path)
        self._left = n_records

    def write(self, record: AnyRecord) -> None:
        if not self._left:
            raise LogFullError("no space left for the log")
        self._left -= 1
        super().write(record)


@pytest.mark.parametrize("n_records", [0, 1, 4, 9, 20])
async def test_a_full_disk_ends_the_run_and_every_server_is_free_once_the_client_has_left(
    tmp_path: Path, n_records: int
) -> None:
    clock = JumpClock()
    chain = [make_server(0, 2), make_server(2, 4)]
    async with connected(chain, clock) as connections:
        load = Load(clock, _LimitedLog(tmp_path / "log", n_records), connections)
        with pytest.raises(LogFullError, match="no space left for the log"):
            await load.generator.run([Request(i, float(i), 3, 20) for i in range(5)])
        load.log.close()
        await asyncio.gather(*(connection.close() for connection in connections))
        await until(lambda: all(server.account.used_bytes == 0.0 for server in chain))
    assert len(load.records()) == n_records


async def test_requests_that_are_running_when_the_run_is_stopped_are_logged_as_interrupted(
    tmp_path: Path,
) -> None:
    clock, server_clock = ManualClock(), ManualClock()
    slow = StubProfile(TOKEN_BYTES, StepTimes(100.0, 100.0, 0.0))
    chain = [make_server(0, 2, clock=server_clock, profile=slow), make_server(2, 4)]
    async with connected(chain, clock) as connections:
        load = Load(clock, EventLog(tmp_path / "log"), connections)
        requests = [Request(0, 0.0, 3, 2), Request(1, 1.0, 3, 2), Request(2, 1e6, 3, 2)]
        work = asyncio.create_task(load.generator.run(requests))
        await clock.advance(1.0)
        await until(lambda: load.count("admitted") == 2)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        load.log.close()
        assert all(server.account.used_bytes == 0.0 for server in chain)
    assert [record for record in load.records() if record.kind == "interrupted"] == [
        Interrupted(0, 1.0),
        Interrupted(1, 1.0),
    ]


async def test_every_request_that_has_arrived_has_one_end_whenever_the_run_is_stopped(tmp_path: Path) -> None:
    clock = JumpClock()
    chain = [make_server(0, 2), make_server(2, 4)]
    async with connected(chain, clock) as connections:
        n_steps, has_ended = 0, False
        while not has_ended:
            load = Load(clock, EventLog(tmp_path / f"log{n_steps}"), connections)
            work = asyncio.create_task(load.generator.run([Request(i, 0.0, 3, 2) for i in range(2)]))
            for _ in range(n_steps):
                await asyncio.sleep(0)
            has_ended = work.done()
            work.cancel()
            await asyncio.wait({work})
            load.log.close()
            ends = [record.request for record in load.observed if isinstance(record, ENDED)]
            assert sorted(ends) == [record.request for record in load.observed if isinstance(record, Arrived)]
            n_steps += 1
    assert n_steps > 10


async def test_a_run_that_is_stopped_between_two_turns_closes_the_chain_that_waits(tmp_path: Path) -> None:
    clock = ManualClock()
    chain = [make_server(0, 2), make_server(2, 4)]
    first, second = Turn(0, 0, None, 0.0), Turn(0, 1, 0, 100.0)
    held = [Request(0, 0.0, 3, 2, turn=first), Request(1, 0.0, 6, 2, turn=second)]
    async with connected(chain, clock) as connections:
        n_steps, has_ended = 0, False
        while not has_ended:  # it is cancelled again after so many steps of the event loop
            load = Load(clock, EventLog(tmp_path / f"log{n_steps}"), connections, hold_s=300.0)
            work = asyncio.create_task(load.generator.run([*held, Request(2, 0.0, 3, 1000)]))
            await until(lambda load=load: load.count("completed") == 1)  # type: ignore[misc]
            assert all(server.account.used_bytes > 0.0 for server in chain)
            work.cancel()
            for _ in range(n_steps):
                await asyncio.sleep(0)
            has_ended = work.done()
            work.cancel()
            await asyncio.wait({work})
            assert work.cancelled()
            load.log.close()
            await until(lambda: all(server.account.used_bytes == 0.0 for server in chain))
            assert load.count("arrived") == 2
            assert [record.request for record in load.observed if isinstance(record, Interrupted)] == [2]
            n_steps += 1
    assert n_steps > 10


async def test_the_progress_view_gets_the_latest_first_token_and_the_latest_gap(tmp_path: Path) -> None:
    clock = ManualClock()
    load = Load(clock, EventLog(tmp_path / "log"), [])
    generator = load.generator
    generator.record(Arrived(0, 0.0, "c", 0.0, 3, 3))
    generator.record(Token(0, 4.0, 0, 1.0, [], 11))
    assert (generator.n_tokens, generator.last_ttft_s) == (1, 4.0)
    generator.record(Token(0, 4.5, 1, 4.0, [], 12))
    assert (generator.n_tokens, generator.last_ttft_s, generator.last_gap_s) == (2, 4.0, 0.5)
    load.log.close()


async def test_requests_that_come_later_are_served_until_there_is_enough_or_nobody_waits(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    chain = [make_server(0, 2), make_server(2, 4)]
    async with connected(chain, clock) as connections:
        load = Load(clock, EventLog(tmp_path / "c.log"), connections)
        work = asyncio.create_task(load.generator.run([], stays_open=True))
        await asyncio.sleep(0)
        for index in range(3):
            load.generator.begin(Request(index, 0.0, 3, 1000))
        await until(lambda: all(load.count_of(index, "token") >= 2 for index in range(3)))
        load.generator.end(0, enough=True)
        load.generator.end(1, enough=False)
        load.generator.end(1, enough=True)  # too late: the request is ending already
        load.generator.end(77, enough=True)  # an unknown request
        load.generator.begin(Request(3, 0.0, 3, 1000))
        load.generator.end(3, enough=False)  # its user has gone before its first step
        load.generator.begin(Request(4, 0.0, 3, 1000))
        load.generator.end(4, enough=False, reason="there is no room")
        await until(lambda: sum(map(load.count, ("completed", "cancelled", "failed"))) == 4)
        assert not work.done()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        load.log.close()
        await until(lambda: all(server.account.used_bytes == 0.0 for server in chain))
    ends = {record.request: record.kind for record in load.records() if isinstance(record, ENDED)}
    assert ends == {0: "completed", 1: "cancelled", 2: "interrupted", 3: "cancelled", 4: "failed"}
    assert [record.reason for record in load.records() if isinstance(record, Failed)] == ["there is no room"]


async def test_a_request_that_is_ended_interrupts_no_other_of_a_workload(tmp_path: Path) -> None:
    clock = ManualClock()
    chain = [make_server(0, 2), make_server(2, 4)]
    async with connected(chain, clock) as connections:
        load = Load(clock, EventLog(tmp_path / "c.log"), connections)
        requests = [Request(0, 0.0, 3, 1000), Request(1, 0.0, 3, 20)]
        work = asyncio.create_task(load.generator.run(requests))
        await until(lambda: load.count_of(0, "token") >= 2)
        load.generator.end(0, enough=False)
        await work
        load.log.close()
    assert [load.count_of(0, "cancelled"), load.count_of(1, "completed")] == [1, 1]


async def test_what_breaks_a_later_request_ends_the_run(tmp_path: Path) -> None:
    load = Load(ManualClock(), EventLog(tmp_path / "c.log"), [])  # without the connections that a chain needs
    work = asyncio.create_task(load.generator.run([], stays_open=True))
    await asyncio.sleep(0)
    load.generator.begin(Request(0, 0.0, 3, 5))
    with pytest.raises(IndexError):
        await asyncio.wait_for(work, 60)
    load.log.close()


async def test_requests_that_have_ended_are_not_kept(tmp_path: Path) -> None:
    clock = JumpClock()
    log = EventLog(tmp_path / "c.log")
    async with connected([make_server(0, 2), make_server(2, 4)], clock) as connections:
        load = Load(clock, log, connections)
        await load.generator.run([Request(i, float(i), 2, 2) for i in range(5)])
    assert load.count("completed") == 5
    assert load.generator._arrived_at_s == {}
    log.close()
