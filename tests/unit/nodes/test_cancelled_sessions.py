"""A session that is cancelled, at any moment, once or again while it ends, leaves nothing on its servers."""

from __future__ import annotations

import asyncio

import pytest

from nodes.rounds import Answer, Round, Rounds
from tests.support.data_plane import JumpClock, until
from tests.support.farm import Session
from tests.unit.nodes.test_drafting_sessions import KINDS, drafting
from tests.unit.nodes.test_session_recovery import RANGES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
async def test_a_session_that_is_cancelled_leaves_nothing_on_its_servers(kind: str, drafts: bool) -> None:
    session_kind, make = KINDS[kind]
    model = drafting() if drafts else None
    n_sessions = n_steps = 0
    has_ended = False
    async with make(RANGES, JumpClock()) as servers:
        while not has_ended:
            for again_after in (None, 0, 1, 2):  # steps of the event loop
                options = {"n_output_tokens": 3, "index": n_sessions, "kind": session_kind, "model": model}
                run = asyncio.ensure_future(Session(servers, JumpClock(), range(3), **options).hub.run())
                await _steps(n_steps)
                has_ended = run.done()
                run.cancel()
                if again_after is not None:
                    await _steps(again_after)
                    run.cancel()
                await asyncio.wait({run})
                await until(servers.is_free)
                n_sessions += 1
            n_steps += 1
    assert n_steps > 30


@pytest.mark.parametrize("n_steps", range(8))
async def test_a_session_that_ends_as_it_gives_up_rounds_behind_a_lost_hop_ends_the_oldest_round_too(
    n_steps: int,
) -> None:
    lost, done = asyncio.Event(), []

    async def draft(behind: Round | None) -> Round | None:
        position = 0 if behind is None else behind.end
        return Round(position, 1, 0, b"") if position < 2 else None

    async def step(round_: Round) -> Answer:
        if round_.position:
            await asyncio.Event().wait()
        await lost.wait()
        await rounds.alone(round_)
        await _steps(10)
        done.append("replaced the hop")
        return b"", []

    rounds = Rounds(2, draft, lambda: True, step, lambda *_: None)
    work = asyncio.ensure_future(rounds.next())
    await _steps(5)
    lost.set()
    await _steps(n_steps)
    work.cancel()
    await asyncio.wait({work})
    await rounds.end()
    await _steps(20)
    assert not done


async def _steps(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)
