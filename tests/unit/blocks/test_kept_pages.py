"""Sessions of real blocks that begin with the kept caches of earlier ones: the tokens stay those of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from nodes.admission import HostedBlocks
from nodes.compute import ComputeError
from nodes.records import AnyRecord, Plan, Reused, Token
from nodes.request import Generation, Request
from nodes.server import Server
from nodes.session import HubSession, SessionRules
from policies.rules import PagingRules
from tests.support.blocks import BLOOM, CONFIGS, Models, generated, hub_of, need_blocks, served
from tests.support.data_plane import PATIENT, JumpClock, connected
from tests.support.manual_clock import ManualClock

need_blocks()

PAGE, N_TOKENS = 4, 9
SPLIT = ((0, 0, 3), (1, 3, 6))
PROMPT = (5, 9, 200, 11, 7, 8, 30, 31, 32, 33)


async def converse(
    models: Models, name: str, messages: Sequence[tuple[int, ...]], paging: PagingRules | None, **spec: bool
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Serves a conversation; answers the prompts, the answers, and how many tokens of each prompt were reused."""
    records: list[AnyRecord] = []
    clock, source = JumpClock(), models.source(name)

    async def route(request: Request, attempt: int, n_done: int) -> Plan:
        return Plan(list(SPLIT), 0.0, 0.0)  # type: ignore[arg-type]

    async with contextlib.AsyncExitStack() as stack:
        hub = stack.enter_context(contextlib.closing(hub_of(source)))
        servers = []
        for _, first, last in SPLIT:
            compute = await served(source, first, last, **spec)
            stack.enter_context(contextlib.closing(compute))
            hosted = HostedBlocks(first, last, 1e6, 1.0, paging, PAGE, copies_kept=True)
            servers.append(Server("s", hosted, compute, ManualClock()))
        connections = await stack.enter_async_context(connected(servers, clock))
        prompts, answers, history = [], [], ()
        rules = SessionRules(recovery=PATIENT, kept_tokens=PAGE)
        for number, message in enumerate(messages):
            prompt = (*history, *message)
            request = Request(number, 0.0, len(prompt), N_TOKENS, Generation(prompt))
            session = HubSession(
                request, str(number), "c", connections, route, hub, rules, clock, records.append
            )
            await session.run()
            prompts.append(list(prompt))
            answers.append([r.token_id for r in records if isinstance(r, Token) and r.request == number])
            history = tuple(session.tokens)
    return prompts, answers, [r.tokens for r in records if isinstance(r, Reused)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("paging", "spec"),
    [(None, {}), (PagingRules(PAGE), {}), (PagingRules(PAGE), {"is_batched": True})],
    ids=["reserved", "paged", "batched"],
)
async def test_a_conversation_says_what_the_whole_model_says(
    models: Models, name: str, paging: PagingRules | None, spec: dict[str, bool]
) -> None:
    prompts, answers, reused = await converse(models, name, [PROMPT, (7, 3, 9), (4,)], paging, **spec)
    assert [len(prompt) for prompt in prompts] == [10, 22, 32] and reused == [0, 16, 28]
    whole = models.whole(name, "float32")
    assert answers == [generated(whole, prompt, N_TOKENS) for prompt in prompts]


async def test_kept_pages_count_as_memory_in_use_until_they_are_evicted(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 2, memory_bytes=10e6)
    free_bytes = compute._account.free_bytes
    session = compute.new_session("c", 0, 2, 8)
    session.opening.result(20)
    page = compute.kept(session, range(4))
    compute.close_session(session)
    assert compute._account.free_bytes == free_bytes - page.nbytes
    compute.evicted(page)
    assert compute._account.free_bytes == free_bytes
    compute.close()


async def test_a_step_behind_its_kept_pages_is_refused(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 2)
    first, second = (compute.new_session("c", 0, 2, 12) for _ in range(2))
    for session in (first, second):
        session.opening.result(20)
    compute.reuse(second, [compute.kept(first, range(4))])
    with pytest.raises(ComputeError, match="do not follow the session's 4"):
        await compute.step(second, 8, 1, bytes(compute.token_bytes), 0.0)
    compute.close()
