"""Whatever dies when and where: a session that completes has the whole model's tokens, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.compute import ComputeError
from nodes.request import SessionError
from nodes.session import HubSession
from tests.support.data_plane import JumpClock, until
from tests.support.effort import n_drawn
from tests.support.farm import Farm, Session, expected_tokens, farm

N_BLOCKS, N_INPUT, N_OUTPUT = 6, 4, 5
BASE = [(0, 2), (1, 4), (2, 5), (3, 6), (0, 3), (5, 6)]


class Misfortune:
    """At numbered steps of the whole farm: servers die, lose the session or begin again."""

    def __init__(self, servers: Farm, plan: dict[int, tuple[str, int]]) -> None:
        self._servers = servers
        self._plan = plan
        self._tasks: list[asyncio.Task[None]] = []

    def __call__(self, server: int, position: int, n_tokens: int) -> None:
        what, other = self._plan.get(len(self._servers.steps), ("", 0))
        if what == "kill self":
            self._servers.kill(server)
        elif what == "kill other":
            self._servers.kill(other % len(self._servers.ranges))
        elif what == "lose":
            raise ComputeError("lost")
        elif what == "revive":
            self.revive()

    def revive(self) -> None:
        for number in range(len(self._servers.ranges)):
            if number not in self._servers.up:
                self._servers.up.add(number)  # believed to be there from now on
                self._tasks.append(asyncio.ensure_future(self._servers.begin(number)))

    async def settle(self) -> None:
        await asyncio.gather(*self._tasks)


MISFORTUNES = st.dictionaries(
    st.integers(1, 60),
    st.tuples(st.sampled_from(["kill self", "kill self", "kill other", "lose", "revive"]), st.integers(0, 9)),
    max_size=12,
)


async def one_case(
    plan: dict[int, tuple[str, int]],
    prefer: list[int],
    n_sessions: int,
    make_farm: Callable[..., AbstractAsyncContextManager[Farm]] = farm,
    kind: type[HubSession] = HubSession,
) -> None:
    clock = JumpClock()
    lengths = {"n_input_tokens": N_INPUT, "n_output_tokens": N_OUTPUT}
    async with make_farm(BASE, clock) as servers:
        misfortune = servers.happens = Misfortune(servers, plan)
        sessions = [Session(servers, clock, prefer, **lengths, index=i, kind=kind) for i in range(n_sessions)]
        for session in sessions:
            _revive_when_nothing_is_left(session, misfortune)
        ends = await asyncio.gather(*(s.hub.run() for s in sessions), return_exceptions=True)
        await misfortune.settle()
        for index, (session, end) in enumerate(zip(sessions, ends, strict=True)):
            tokens = expected_tokens(N_BLOCKS, N_INPUT, N_OUTPUT, index)
            done = session.log.token_ids
            assert done == tokens[: len(done)], "a token was altered"
            if end is None:
                assert len(done) == N_OUTPUT
            else:
                assert type(end) is SessionError, end
        await until(servers.is_free)
        assert not any(server.sessions.forwarding.n_places for server in servers.all_servers)


def _revive_when_nothing_is_left(session: Session, misfortune: Misfortune) -> None:
    """Otherwise sessions would only wait: servers come back as soon as a part cannot be served."""
    chain = session._chain

    def reviving(first: int, last: int) -> dict[str, Any] | None:
        answer = chain(first, last)
        if answer is None:
            misfortune.revive()
        return answer

    session._chain = reviving  # type: ignore[method-assign]


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(limited())


@settings(max_examples=n_drawn(25), deadline=None)
@given(MISFORTUNES, st.permutations(range(len(BASE))), st.integers(1, 3))
def test_no_failure_changes_a_token_and_every_account_returns_to_zero(
    plan: dict[int, tuple[str, int]], prefer: list[int], n_sessions: int
) -> None:
    run(one_case(plan, prefer, n_sessions))
