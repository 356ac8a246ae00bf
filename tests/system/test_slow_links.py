"""Messages that take longer than time limits, and readers who hang up meanwhile: nothing is lost, stuck or left.

Played in virtual time at the scale of ``tests.stress.slow_links``: a prompt of 4,000 tokens takes 13 s at 40 Mbit/s.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.stress import chaos, chaos_cases, slow_links
from tests.stress.chaos_checks import Finished

SLOW, FAST, HUGE = (f"{1e6 * mbit / slow_links.SCALE:.0f} bit/s" for mbit in (40, 1000, 10_000))
LONG = 4000
SHORT = 20
PROMPT_S = 13.2
"""Seconds that a prompt of ``LONG`` tokens takes to cross a link of rate ``SLOW``."""
NEVER_LONG_S = 3.0
"""A closing waits for what is on its way: at most a receive window at rate ``SLOW``."""


def case(
    requests: list[tuple[float, int, int]],
    *,
    cancels: dict[int, float] | None = None,
    rate: str = SLOW,
    near: bool = False,
    prefill: str | None = None,
    **tables: Any,
) -> Finished:
    """Plays the requests (arrival, prompt tokens, output tokens), with server s0 at home and, if ``near``, s1 beside
    the user's fast link. ``cancels``: when readers hang up. No invariant of ``chaos`` may break.
    """
    rates = {("home", "user"): rate, ("near", "user"): FAST, ("near", "home"): FAST}
    rates |= tables.pop("rates", {})
    sites = ("home", "near", "user")
    pairs = [{"sites": list(pair), "rtt": "20 ms", "rate": bps} for pair, bps in rates.items()]
    pairs += [{"sites": [site, site], "rtt": "1 ms", "rate": FAST} for site in sites]
    places = [("s0", "home"), ("s1", "near")] if near else [("s0", "home")]
    document: dict[str, Any] = {
        "name": "slow",
        "seed": 0,
        "clock": "virtual",
        "model": {
            "name": "small",
            "n_blocks": 2,
            "hidden_size": 8192 // slow_links.SCALE,
            "value_bytes": 2,
            "petals_cache_tokens": 64,
            "block_size": "20 GB" if near else "1 GB",
            "cache_per_token": "32 kB",
        },
        "servers": [
            {"hardware": "a100", "site": site, "name": name, "memory": "40 GB"} for name, site in places
        ],
        "clients": [{"site": "user", "name": "c0"}],
        "network": {"backend": "memory", "kind": "clusters", "pairs": pairs},
        "workload": {"arrivals": "listed", "requests": [list(request) for request in requests]},
        "policy": {"name": "proposed", "design_concurrency": 8},
        chaos_cases.CANCELS: [{"request": number, "at_s": at_s} for number, at_s in (cancels or {}).items()],
        chaos_cases.SLOW: True,
    }
    if prefill is not None:
        document["hardware"] = {"slow": {"base": "a100", "prefill_per_token": prefill}}
        document["servers"][0]["hardware"] = "slow"
    for name, table in tables.items():
        document[name] = document.get(name, {}) | table if isinstance(table, dict) else table
    run, broken, _ = chaos.play(document)
    assert run is not None and not broken, broken
    return run


def statuses(run: Finished) -> list[str]:
    return [request.status for request in run.records.requests]


def ended_s(run: Finished, request: int) -> float:
    """When the last token of a request came."""
    return run.records.requests[request].tokens[-1].at_s


def released_s(run: Finished, request: int) -> float:
    """When the last server released a request."""
    return max(at_s for _, key, at_s in run.watched.released if key.split(".")[0] == str(request))


def found(run: Finished, event: str) -> int:
    return sum(e["event"] == event for e in run.events)


def test_a_session_is_opened_between_the_parts_of_a_prompt() -> None:
    run = case([(0, LONG, 2), (1, SHORT, 2)])
    first = run.records.requests[1].tokens[0].at_s
    assert first < 2 * NEVER_LONG_S + 1.0, (
        "its opening and its prompt wait for that; the prompt before it takes 13 s"
    )
    assert ended_s(run, 0) < 2 * PROMPT_S + 10


@pytest.mark.parametrize("at_s", [2.0, 3.0, 13.6])
def test_a_closing_passes_what_its_own_prompt_and_others_have_queued(at_s: float) -> None:
    """Close was never sent, or came after the rest of the prompt, and counted as a leak."""
    run = case([(0, SHORT, 60), (1, LONG, 2), (30, SHORT, 2)], cancels={1: at_s})
    assert statuses(run) == ["completed", "cancelled", "completed"]
    assert released_s(run, 1) <= at_s + NEVER_LONG_S


def test_a_prompt_in_chunks_has_as_long_as_its_chunks_take() -> None:
    """Every chunk reads the weights again: the limit counted this once for the whole prompt, and a healthy server failed."""
    chunks = {"batching": "continuous", "chunk_tokens": 8}
    run = case(
        [(0, LONG, 2), (300, SHORT, 2)], rate=HUGE, compute=chunks, recovery={"request_timeout": "5 s"}
    )
    assert statuses(run) == ["completed", "completed"] and not found(run, "detected")
    assert ended_s(run, 0) > 30, "500 chunks"


def test_a_session_that_decodes_is_closed_while_anothers_prompt_is_on_its_way() -> None:
    run = case([(0, SHORT, 2000), (1, LONG, 2)], cancels={0: 3.0})
    assert statuses(run) == ["cancelled", "completed"]
    assert released_s(run, 0) <= 3.0 + NEVER_LONG_S


def test_one_hang_up_ends_no_other_request() -> None:
    """With aiohttp 3.14 all senders of a connection wait for one future: who was cancelled, cancelled all."""
    run = case([(0, LONG, 2), (0, LONG, 2), (5, SHORT, 2), (60, SHORT, 2)], cancels={0: 3.0})
    assert statuses(run) == ["cancelled", "completed", "completed", "completed"]
    assert ended_s(run, 1) < 3.0 + 2 * PROMPT_S + 10


def test_a_time_limit_begins_when_the_last_byte_has_left() -> None:
    requests = [(0.001 * number, LONG, 2) for number in range(5)]
    run = case([*requests, (500, SHORT, 2)], recovery={"request_timeout": "20 s"})
    assert statuses(run) == ["completed"] * 6
    assert found(run, "detected") == found(run, "unreachable") == 0
    assert ended_s(run, 4) < 6 * PROMPT_S + 10, "nothing is sent twice"


def test_a_short_limit_does_not_hold_for_what_is_on_its_way() -> None:
    run = case([(0, SHORT, 200), (1, 5000, 2)], recovery={"request_timeout": "2 s"})
    assert statuses(run) == ["completed", "completed"]
    assert found(run, "detected") == 0


def test_eight_prompts_on_a_slow_link_call_nobody_unreachable() -> None:
    run = case([(5 * number, LONG, 2) for number in range(8)])
    assert statuses(run) == ["completed"] * 8
    assert found(run, "unreachable") == found(run, "detected") == found(run, "rejected") == 0
    assert ended_s(run, 7) < 135, (
        "the link needs 8 times 13 s, and 13 s for the last answer; small parts add 6 %"
    )
    assert ended_s(run, 0) < 36, "and the first is not held back by the others"


def test_hops_that_are_open_already_are_closed_when_an_opening_is_cancelled() -> None:
    requests = [(0, LONG, 2), (0.001, LONG, 2), (0.002, 16, 2), (3.5, 30, 2), (4, 30, 2), (4.5, 30, 2)]
    run = case(
        [*requests, (200, SHORT, 40)],
        cancels={0: 6.0, 3: 3.51, 4: 4.01},
        near=True,
        compute={"batching": "serial"},
        recovery={"connect_timeout": "10 s"},
    )
    assert statuses(run) == [
        "cancelled",
        "completed",
        "completed",
        "cancelled",
        "cancelled",
        "completed",
        "completed",
    ]
    assert max(released_s(run, request) for request in (3, 4)) < 4.01 + 2 * NEVER_LONG_S, (
        "first the opening must arrive"
    )


@pytest.mark.parametrize("batching", ["continuous", "serial"])
def test_steps_of_closed_sessions_do_not_occupy_a_server(batching: str) -> None:
    """Four prompts whose readers have gone: only the one that is being computed may be ended first."""
    long = [(0.1 * number, LONG, 2) for number in range(4)]
    run = case(
        [*long, (5, SHORT, 2)],
        cancels=dict.fromkeys(range(4), 3.0),
        rate=HUGE,
        prefill="5 ms",
        compute={"batching": batching},
    )
    assert statuses(run) == ["cancelled"] * 4 + ["completed"]
    assert ended_s(run, 4) < 45, "one prompt takes 40 s"


def test_the_answer_to_a_closed_session_does_not_occupy_the_link() -> None:
    run = case([(0, LONG, 2), (16.0, SHORT, 20)], cancels={0: 14.5})
    assert statuses(run) == ["cancelled", "completed"]
    assert found(run, "unreachable") == 0
    assert ended_s(run, 1) < 16 + NEVER_LONG_S + 3


def test_what_servers_push_to_each_other_may_take_longer_than_a_limit() -> None:
    run = case(
        [(0, 5000, 2), (0.5, 5000, 2), (1, 5000, 2), (1.5, SHORT, 40)],
        near=True,
        rates={("home", "user"): FAST, ("near", "home"): SLOW},
        compute={"batching": "serial"},
        policy={"communication": "server-to-server"},
        recovery={"request_timeout": "10 s"},
    )
    assert statuses(run) == ["completed"] * 4
    assert found(run, "detected") == 0


@pytest.mark.parametrize("cancels", [{}, {1: 3.0}])
def test_a_server_dies_while_prompts_are_on_their_way(cancels: dict[int, float]) -> None:
    """Requests that had stopped waiting left errors that nobody looked at."""
    run = case(
        [(0, 5000, 2), (0.001, 5000, 2), (0.002, 5000, 2)],
        cancels=cancels,
        fault=[{"kind": "kill", "server": "s0", "at": "5 s", "for": "2 s"}],
    )
    assert statuses(run) == ["cancelled" if number in cancels else "completed" for number in range(3)]
