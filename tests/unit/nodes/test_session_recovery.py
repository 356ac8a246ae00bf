"""Sessions whose servers die, stop or lose them: their tokens stay the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from nodes.compute import ComputeError
from nodes.request import SessionError
from policies.rules import RecoveryRules
from tests.support.data_plane import PATIENT, TOKEN_BYTES, JumpClock, drive, until
from tests.support.farm import Farm, Session, expected_tokens, farm
from tests.support.manual_clock import ManualClock

RANGES = [(0, 2), (2, 5), (5, 6), (0, 2), (2, 4), (4, 6), (2, 5)]
"""Three preferred servers, and others for parts of them, of different lengths, so that chains differ."""
TOKENS = expected_tokens(6)


class Kill:
    """Kills ``victims`` once, when ``server`` is about to compute at ``position``."""

    def __init__(self, servers: Farm, server: int, position: int, victims: list[int]) -> None:
        self._servers, self._when, self._victims = servers, (server, position), victims
        self.has_happened = False

    def __call__(self, server: int, position: int, n_tokens: int) -> None:
        if (server, position) == self._when and not self.has_happened:
            self.has_happened = True
            for victim in self._victims:
                self._servers.kill(victim)


@pytest.mark.parametrize("position", [0, 5, 7], ids=["in the prefill", "at the first decode", "at the last"])
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["first hop", "middle hop", "last hop"])
async def test_a_server_that_dies_changes_no_token_and_only_its_blocks_are_replayed(
    victim: int, position: int
) -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, victim, position, [victim])
        session = Session(servers, clock, range(7))
        log = await session.run()
    assert log.token_ids == TOKENS
    first, last = RANGES[victim]
    n_done = max(0, position - 4)
    assert session.asked == [(first, last, n_done)]
    healthy = [j for j in (0, 1, 2) if j != victim]
    for j in healthy:
        steps = [(at, n) for server, at, n in servers.steps if server == j]
        assert steps == [(0, 5), (5, 1), (6, 1), (7, 1)], "a healthy hop sees every token once"
    (replayed,) = log.of("replayed")
    n_all = position + 1 if position else 5
    assert replayed["tokens"] == n_all
    replacements = [server for server, _, _ in replayed["hops"]]
    replays = [(server, n) for server, at, n in servers.steps if at == 0 and server in replacements]
    assert replays == [(j, n_all) for j in replacements], "the whole history goes in one message"
    marked = [[row.server for row in rows if row.replayed_tokens] for rows in log.rows]
    assert marked == [replacements if i == n_done else [] for i in range(4)]
    assert clock.waits_s == [], "the first attempt to replace a hop is made at once"


@pytest.mark.parametrize("position", [0, 5, 7], ids=["in the prefill", "at the first decode", "at the last"])
async def test_step_by_step_replacements_are_sent_the_prompt_and_then_every_token_on_its_own(
    position: int,
) -> None:
    clock = JumpClock()
    rules = replace(PATIENT, replay="step_by_step")
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, 1, position, [1, 6])  # two replacements, one after the other
        log = await Session(servers, clock, range(7), recovery=rules).run()
    assert log.token_ids == TOKENS
    for server in (4, 5):
        steps = [(at, n) for j, at, n in servers.steps if j == server]
        assert steps == [(0, 5), (5, 1), (6, 1), (7, 1)], "each step is as it was on the lost server"
    for j in (0, 2):
        assert [(at, n) for server, at, n in servers.steps if server == j] == [(0, 5), (5, 1), (6, 1), (7, 1)]
    (replayed,) = log.of("replayed")
    n_all = position + 1 if position else 5
    assert (replayed["tokens"], replayed["hops"]) == (n_all, [(4, 2, 4), (5, 4, 5)])
    n_done = max(0, position - 4)
    pieces = [5] + [1] * n_done
    marked = [[(row.server, row.replayed_tokens) for row in rows if row.replayed_tokens] for rows in log.rows]
    sent = [(server, n) for server in (4, 5) for n in pieces]
    assert marked == [sent if i == n_done else [] for i in range(4)]
    assert [row.up_bytes for row in log.rows[n_done] if row.server == 4] == [n * TOKEN_BYTES for n in pieces]


@pytest.mark.parametrize("at", [0, 5, 6])
async def test_a_replacement_that_dies_in_the_middle_of_its_steps_changes_no_token(at: int) -> None:
    clock = JumpClock()
    rules = replace(PATIENT, replay="step_by_step")
    async with farm(RANGES, clock) as servers:
        first, second = Kill(servers, 1, 7, [1]), Kill(servers, 6, at, [6])
        servers.happens = lambda *step: (first(*step), second(*step))[0]
        log = await Session(servers, clock, [0, 1, 2, 6, 4, 5, 3], recovery=rules).run()
        assert second.has_happened
    assert log.token_ids == TOKENS
    assert len(log.of("detected")) == 2 and len(log.of("replayed")) == 1
    assert [(j, p, n) for j, p, n in servers.steps if j == 4] == [(4, 0, 5), (4, 5, 1), (4, 6, 1), (4, 7, 1)]


async def test_the_output_of_the_first_replacement_is_the_input_of_the_next() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1, 6])
        log = await Session(servers, clock, range(7)).run()
        assert log.token_ids == TOKENS
        assert log.of("replayed")[0]["hops"] == [(4, 2, 4), (5, 4, 5)]
        assert [step for step in servers.steps if step[0] in (4, 5)][:2] == [(4, 0, 7), (5, 0, 7)]


@pytest.mark.parametrize("victims", [[0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("position", [0, 6])
async def test_several_servers_that_die_at_once_change_no_token(victims: list[int], position: int) -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, victims[0], position, victims)
        log = await Session(servers, clock, range(7)).run()
    assert log.token_ids == TOKENS


async def test_neighbours_that_are_known_to_be_lost_are_replaced_by_one_decision() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:

        async def happens(server: int, position: int, n_tokens: int) -> None:
            if (server, position) == (0, 6) and 2 in servers.up:
                servers.kill(1)
                servers.kill(2)
                await until(lambda: not servers.connections[2].has(1) and not servers.connections[1].has(1))

        servers.happens = happens
        session = Session(servers, clock, range(7))
        log = await session.run()
    assert log.token_ids == TOKENS
    assert session.asked == [(2, 6, 2)]
    assert [d["servers"] for d in log.of("detected")] == [[1, 2]]


@pytest.mark.parametrize("second", [4, 5], ids=["first replacement", "second replacement"])
async def test_a_replacement_that_dies_during_the_replay_is_replaced_as_well(second: int) -> None:
    clock = JumpClock()
    async with farm([*RANGES, (2, 4), (4, 6)], clock) as servers:
        first_kill = Kill(servers, 1, 6, [1, 6])
        second_kill = Kill(servers, second, 0, [second])

        def happens(*step: int) -> None:
            first_kill(*step)
            second_kill(*step)

        servers.happens = happens
        session = Session(servers, clock, range(9))
        log = await session.run()
    assert log.token_ids == TOKENS
    assert session.asked == [(2, 5, 2), {4: (2, 4, 2), 5: (4, 5, 2)}[second]]
    assert len(log.of("detected")) == 2
    (replayed,) = log.of("replayed")
    assert replayed["detected_at_s"] == log.of("detected")[0]["at_s"], "it is one standstill"
    assert replayed["hops"] == [(7 if second == 4 else 4, 2, 4), (8 if second == 5 else 5, 4, 5)]


async def test_a_replacement_that_dies_later_is_replaced_from_its_own_inputs() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        first_kill, second_kill = Kill(servers, 1, 5, [1]), Kill(servers, 6, 7, [6])

        def happens(*step: int) -> None:
            first_kill(*step)
            second_kill(*step)

        servers.happens = happens
        session = Session(servers, clock, [0, 1, 2, 3, 6, 4, 5])
        log = await session.run()
    assert log.token_ids == TOKENS
    assert session.asked == [(2, 5, 1), (2, 5, 3)]
    assert [r["tokens"] for r in log.of("replayed")] == [6, 8]


async def test_a_server_that_holds_another_part_of_the_session_can_be_its_own_neighbours_replacement() -> (
    None
):
    clock = JumpClock()
    async with farm([(0, 3), (2, 6), (0, 6)], clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1])
        session = Session(servers, clock, [0, 1, 2])
        session.prefer = [0, 1, 2]
        second = Kill(servers, 0, 7, [0])
        first = servers.happens

        def happens(*step: int) -> None:
            first(*step)
            second(*step)

        servers.happens = happens
        log = await session.run()
    assert log.token_ids == TOKENS
    assert [hop[0] for hop in log.of("replayed")[1]["hops"]] == [2], "server 2 holds both parts by now"


async def test_a_session_that_its_server_could_not_compute_goes_on_elsewhere() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:

        def happens(server: int, position: int, n_tokens: int) -> None:
            if (server, position) == (1, 6):
                raise ComputeError("out of memory")

        servers.happens = happens
        session = Session(servers, clock, range(7))
        session.believed = lambda: servers.up - ({1} if session.log.of("detected") else set())
        log = await session.run()
    assert log.token_ids == TOKENS
    assert "compute-failed: out of memory" in log.of("detected")[0]["reason"]


async def test_a_session_can_go_on_at_the_very_server_that_lost_it() -> None:
    clock = JumpClock()
    async with farm([(0, 6)], clock) as servers:

        def happens(server: int, position: int, n_tokens: int) -> None:
            if position == 6 and len(servers.steps) == 3:
                raise ComputeError("lost")

        servers.happens = happens
        log = await Session(servers, clock, [0]).run()
    assert log.token_ids == TOKENS
    assert log.of("re-routed")[0]["hops"] == [[0, 0, 6]]
    assert len(log.of("reachable")) == 1


async def test_a_server_that_was_restarted_serves_the_session_again() -> None:
    clock = JumpClock()
    async with farm([(0, 3), (3, 6)], clock) as servers:
        session = Session(servers, clock, [0, 1])
        revived: list[asyncio.Task[None]] = []
        session.believed = lambda: servers.up | {1}

        def happens(server: int, position: int, n_tokens: int) -> None:
            if (server, position) == (1, 6) and not revived:
                servers.kill(1)
                revived.append(asyncio.ensure_future(servers.begin(1)))

        servers.happens = happens
        log = await session.run()
        assert servers.connections[1].generation == 2
    assert log.token_ids == TOKENS


async def test_without_a_replacement_it_waits_longer_and_longer_and_asks_again() -> None:
    clock = JumpClock()
    async with farm([(0, 3), (3, 6)], clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1])
        session = Session(servers, clock, [0, 1])
        reroute = session.hub._recovery._reroute

        async def waiting(*args: Any) -> Any:
            if len(session.asked) == 8:
                await servers.begin(1)
            assert reroute is not None
            return await reroute(*args)

        session.hub._recovery._reroute = waiting
        log = await session.run()
    assert log.token_ids == TOKENS
    assert clock.waits_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert log.of("replayed")[0]["attempts"] == 9


async def test_a_replacement_that_cannot_be_reached_is_reported_and_the_next_one_tried() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1, 6])
        session = Session(servers, clock, [0, 1, 2, 3, 6, 4, 5])
        session.believed = lambda: (
            set(range(7))
            - {
                server
                for event, details in session.log.events
                if event in ("detected", "unreachable")
                for server in details["servers"]
            }
        )
        log = await session.run()
    assert log.token_ids == TOKENS
    assert log.of("unreachable")[0]["servers"] == [6]
    assert clock.waits_s == [1.0]


async def test_with_nobody_to_replace_it_the_request_fails_in_time_with_the_reason() -> None:
    clock = JumpClock()
    async with farm([(0, 3), (3, 6)], clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1])
        session = Session(servers, clock, [0, 1], recovery=replace(PATIENT, give_up_s=10.0))
        with pytest.raises(
            SessionError,
            match=r"^blocks \[3, 6\) could not be replaced within 10 s \(no route covers blocks \[3, 6\)\)$",
        ):
            await session.run()
        await until(servers.is_free)
    assert clock.waits_s == [1.0, 2.0, 4.0]
    assert len(session.log.token_ids) == 2


async def test_recovery_that_is_off_fails_the_request_at_the_first_failure() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1])
        session = Session(servers, clock, range(7), recovery=replace(PATIENT, mode="off"))
        with pytest.raises(SessionError, match=r"^server 1: the connection to "):
            await session.run()
        await until(servers.is_free)
    assert session.asked == []
    assert session.log.of("detected")[0]["servers"] == [1]


async def test_as_in_petals_last_commit_no_replacement_ever_works_above_position_0() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1])
        session = Session(servers, clock, range(7), recovery=replace(PATIENT, mode="head", give_up_s=5.0))
        with pytest.raises(SessionError, match=r"\(server 4: a new session cannot start at position 6\)$"):
            await session.run()
        await until(servers.is_free)
    assert [details["servers"] for details in session.log.of("unreachable")] == [[4]] * 3


async def test_as_in_petals_last_commit_a_failure_in_the_prefill_can_be_mended() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, 1, 0, [1])
        log = await Session(servers, clock, range(7), recovery=replace(PATIENT, mode="head")).run()
    assert log.token_ids == TOKENS


class Halted:
    """A server that computes nothing from ``position`` on, until it is allowed to go on."""

    def __init__(self, server: int, position: int) -> None:
        self._when = (server, position)
        self.is_halted = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def __call__(self, server: int, position: int, n_tokens: int) -> None:
        if (server, position) == self._when and not self.goes_on.is_set():
            self.is_halted.set()
            await self.goes_on.wait()


async def test_an_answer_that_is_overdue_is_a_failure_and_the_late_answer_changes_nothing() -> None:
    clock = ManualClock()
    async with farm(RANGES, clock) as servers:
        halted = servers.happens = Halted(1, 6)
        rules = RecoveryRules(request_timeout_s=180.0, connect_timeout_s=5.0)
        session = Session(servers, clock, range(7), recovery=rules)
        session.believed = lambda: servers.up - ({1} if halted.is_halted.is_set() else set())
        run = asyncio.ensure_future(session.run())
        await asyncio.wait_for(halted.is_halted.wait(), 10)
        await clock.advance(179.0)
        assert not session.log.of("detected")
        await clock.advance(1.0)
        await until(lambda: bool(session.log.of("replayed")))
        halted.goes_on.set()
        await drive(clock, run)
    log = run.result()
    assert log.token_ids == TOKENS
    assert log.of("detected")[0]["reason"] == "no answer for 180 s"
    assert log.of("detected")[0]["is_overdue"]


async def test_ending_does_not_wait_for_a_server_that_has_halted() -> None:
    clock = ManualClock()
    async with farm(RANGES, clock) as servers:
        halted = servers.happens = Halted(1, 6)
        rules = RecoveryRules("off", request_timeout_s=180.0, connect_timeout_s=5.0)
        run = asyncio.ensure_future(Session(servers, clock, range(7), recovery=rules).hub.run())
        await asyncio.wait_for(halted.is_halted.wait(), 10)
        await drive(clock, run, 10.0) if not run.done() else None
        with pytest.raises(SessionError, match=r"^server 1: no answer for 180 s$"):
            run.result()
        halted.goes_on.set()
        await until(servers.is_free)


async def test_where_no_server_is_left_a_new_session_gives_up_as_the_recovery_says() -> None:
    clock = JumpClock()
    async with farm([(0, 6)], clock) as servers:
        servers.kill(0)
        await until(lambda: not servers.connections[0].has(1))
        session = Session(servers, clock, [0], recovery=replace(PATIENT, give_up_s=6.0))
        session.believed = lambda: {0}
        with pytest.raises(SessionError, match=r"^no room at the last attempt within 6 s \(http://127"):
            await session.run()
    assert clock.waits_s == [1.0, 2.0]
    assert [details["servers"] for details in session.log.of("unreachable")] == [[0]] * 3


async def test_cancelling_a_session_during_its_replay_frees_everything() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        kill, halted = Kill(servers, 1, 6, [1, 6]), Halted(4, 0)

        async def happens(*step: int) -> None:
            kill(*step)
            await halted(*step)

        servers.happens = happens
        run = asyncio.ensure_future(Session(servers, clock, range(7)).run())
        await asyncio.wait_for(halted.is_halted.wait(), 10)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(servers.is_free)


async def test_sessions_of_one_client_recover_independently_of_each_other() -> None:
    clock = JumpClock()
    async with farm(RANGES, clock) as servers:
        servers.happens = Kill(servers, 1, 6, [1])
        sessions = [Session(servers, clock, range(7), index=i, n_output_tokens=6) for i in range(8)]
        logs = await asyncio.gather(*(session.hub.run() for session in sessions))
        await until(servers.is_free)
    assert len(logs) == 8
    for i, session in enumerate(sessions):
        assert session.log.token_ids == expected_tokens(6, n_output_tokens=6, index=i)
