"""A session that is cancelled, at any moment, once or again while it ends, leaves nothing on its servers."""

from __future__ import annotations

import asyncio

import pytest

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


async def _steps(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)
