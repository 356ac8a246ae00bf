"""The client's time per output token with the stub, on clocks that the test drives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nodes.forwarding_session import ForwardingSession
from nodes.hub import StubHub
from nodes.node import StubHubSpec
from nodes.request import Request, WrongTokenError
from nodes.session import HubSession
from testbed.experiments import load_experiment
from testbed.runtime.wiring import client_config
from tests.support.data_plane import TOKEN_BYTES, JumpClock
from tests.support.farm import Session, expected_tokens
from tests.support.forwarding import forwarding_farm
from tests.support.manual_clock import ManualClock

RANGES = [(0, 2), (2, 5), (5, 6)]


class TickingClock(JumpClock):
    """Every reading takes a second, as work would."""

    def now_s(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.mark.parametrize("kind", [HubSession, ForwardingSession], ids=["hub-spoke", "forwarding"])
async def test_a_token_is_there_the_clients_time_after_the_last_hops_answer(kind: type[HubSession]) -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:
        model = StubHub(TOKEN_BYTES, 6, clock=clock, token_s=0.25)
        log = await Session(servers, clock, range(3), kind=kind, model=model).run()
    assert log.token_ids == expected_tokens(6)
    received_s = [rows[-1][6] for rows in log.rows]
    sent_s = [rows[0][3] for rows in log.rows]
    assert [sent - received for sent, received in zip(sent_s[1:], received_s, strict=False)] == [0.25] * 3
    assert clock.waits_s == [0.25] * 4, "four tokens, the last one's included, and nothing else takes time"


async def test_a_client_without_a_time_never_waits() -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:
        log = await Session(servers, clock, range(3), model=StubHub(TOKEN_BYTES, 6, clock=clock)).run()
    assert (log.token_ids, clock.waits_s) == (expected_tokens(6), [])


async def test_what_the_stub_needs_itself_is_part_of_the_clients_time() -> None:
    clock = TickingClock()
    sequence = StubHub(TOKEN_BYTES, 1, verify=False, clock=clock, token_s=10.0).sequence(
        Request(0, 0.0, 2, 2)
    )
    payload = await sequence.embed()  # from 1 to 2
    await sequence.take(payload)  # begins at 3
    assert clock._now_s == 3.0 + 10.0 - 1.0


async def test_sessions_of_a_client_do_not_wait_for_each_other() -> None:
    clock = ManualClock()
    hub = StubHub(TOKEN_BYTES, 1, verify=False, clock=clock, token_s=2.0)
    ended_at_s: list[float] = []

    async def one(index: int, begins_at_s: float) -> None:
        await clock.sleep_until_s(begins_at_s)
        sequence = hub.sequence(Request(index, 0.0, 1, 1))
        await sequence.take(await sequence.embed())
        ended_at_s.append(clock.now_s())

    work = asyncio.gather(one(0, 0.0), one(1, 0.5))
    await clock.advance(5.0)
    await work
    assert ended_at_s == [2.0, 2.5]


async def test_a_wrong_token_is_known_at_once() -> None:
    clock = JumpClock()
    sequence = StubHub(TOKEN_BYTES, 4, clock=clock, token_s=10.0).sequence(Request(0, 0.0, 2, 2))
    await sequence.embed()
    with pytest.raises(WrongTokenError):
        await sequence.take(bytes(TOKEN_BYTES))
    assert clock.waits_s == []


def test_a_hub_that_takes_time_needs_a_clock() -> None:
    with pytest.raises(AssertionError, match="needs a clock"):
        StubHub(TOKEN_BYTES, 4, token_s=1.0)


def test_the_stubs_client_is_told_its_time_of_the_scenario() -> None:
    experiment = load_experiment("clustered", ['compute.hub_token="1.5 ms"'])
    config = client_config(experiment, "client-0", Path("control"), "10.0.0.1", Path("log"))
    model = experiment.problem.model
    assert config.model == StubHubSpec(model.token_bytes, model.n_blocks, 1.5e-3)
