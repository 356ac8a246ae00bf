"""Conversations in both engines: the testbed itself in virtual time, and the fast engine where nothing disturbs a session."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.prompts import implied_reuse
from testbed.records.requests import RequestRow
from testbed.runs.serve import ServeOptions, experiment_to_serve
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate

SMALL = """
name = "talk"
[model]
name = "small"
n_blocks = 4
hidden_size = 64
value_bytes = 2
block_size = "100 MB"
cache_per_token = "1 kB"
[hardware.small]
memory = "250 MB"
decode = "1 ms"
prefill_base = "1 ms"
prefill_per_token = "100 us"
[[servers]]
hardware = "small"
site = "B"
[[servers]]
hardware = "small"
site = "C"
[clients]
site = "A"
[network]
kind = "clusters"
pairs = [
    { sites = ["A", "B"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["A", "C"], rtt = "30 ms", rate = "1 Gbit/s" },
    { sites = ["B", "C"], rtt = "10 ms", rate = "1 Gbit/s" },
]
[workload]
arrivals = "constant"
rate = 0.5
n_requests = 6
n_input_tokens = 40
n_output_tokens = 5
turns = 3
think_time = "2 s"
n_further_tokens = 10
[policy]
name = "proposed"
design_concurrency = 1
"""


def served(folder: Path, *overrides: str) -> list[RequestRow]:
    """In virtual time; the fast engine has the same rows, but for some bytes of frames on the links."""
    path = folder / "talk.toml"
    path.write_text(SMALL)
    case = Case(load_experiment(str(path), overrides))
    simulation = simulate(case, "testbed", is_virtual=True)
    fast = simulate(case, "testbed")
    assert (fast.engine == "virtual") == any("after={" in option for option in overrides)
    check_same(fast.rows, simulation.rows, 1e-4)
    return list(simulation.rows)


def check_same(rows: Sequence[RequestRow], others: Sequence[RequestRow], abs_s: float) -> None:
    for row, other in zip(rows, others, strict=True):
        for name in (
            "status",
            "reason",
            "chain",
            "n_cached_tokens",
            "n_rejections",
            "n_recoveries",
            "n_preemptions",
            "preempted_tokens",
        ):
            assert getattr(row, name) == getattr(other, name), name
        for name in ("arrival_at_s", "ended_at_s"):
            assert getattr(row, name) == pytest.approx(getattr(other, name), abs=abs_s), name
        for name in ("queue_s", "setup_s", "ttft_s", "e2e_s"):
            assert row.times[name] == pytest.approx(other.times[name], abs=abs_s), name


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_a_turn_comes_after_the_last_answer_and_the_time_to_think(tmp_path: Path, communication: str) -> None:
    rows = served(tmp_path, f"policy.communication={communication}")
    assert {row.status for row in rows} == {"completed"}
    assert [(row.conversation, row.turn) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for before, row in pairwise(rows):
        if row.turn:
            assert before.ended_at_s is not None
            assert row.arrival_at_s == row.arrived_at_s == pytest.approx(before.ended_at_s + 2, abs=1e-9)


def test_a_failed_turn_ends_its_conversation(tmp_path: Path) -> None:
    """A server is gone for a while in the middle of the second answer."""
    fault = "fault=[{kind='kill',server=['small-1'],after={request=1,tokens=2},for='1 s'}]"
    rows = served(tmp_path, fault, "recovery.mode=off")
    assert [row.status for row in rows[:3]] == ["completed", "failed", "failed"]
    assert rows[2].reason == "an earlier turn of its conversation failed"
    assert rows[2].ended_at_s == rows[1].ended_at_s


SHARED = ("cache.prefix=shared", "cache.page_tokens=8")


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize(
    "options", [[], ["cache.mode=paged"], ["compute.batching=continuous", "compute.chunk_tokens=7"]]
)
def test_a_further_turn_computes_only_what_no_server_has_kept(
    tmp_path: Path, communication: str, options: list[str]
) -> None:
    """Kept: whole pages of 8 of a prompt of 40 tokens and 4 of 5 output tokens, then of 55 and 4, for either."""
    options = [*options, f"policy.communication={communication}"]
    rows, anew = (served(tmp_path, *more, *options) for more in (SHARED, ()))
    assert {row.status for row in rows} == {"completed"}
    assert [row.n_cached_tokens for row in rows] == [0, 40, 56, 0, 40, 56]
    assert [row.n_cached_tokens for row in anew] == 6 * [None]
    for row, full in zip(rows[1:], anew[1:], strict=True):
        assert row.times.ttft_s is not None and full.times.ttft_s is not None
        assert not row.turn or row.times.ttft_s < full.times.ttft_s


def test_the_closed_model_knows_what_was_reused(tmp_path: Path) -> None:
    for row in served(tmp_path, *SHARED, "workload.rate=0.01"):
        assert row.model.ttft_s == pytest.approx(row.times.ttft_s, rel=0.01)


def test_kept_caches_lose_their_room_to_sessions_and_nothing_else_changes(tmp_path: Path) -> None:
    """A server has room for 60 tokens. The second conversation's first turn takes 45 of them while the first one thinks, and
    leaves room for one page of the first.
    """
    options = "workload.turns=2", "workload.n_requests=4", "workload.rate=0.5", "workload.think_time=20 s"
    tight = served(tmp_path, *SHARED, *options, "hardware.small.memory=200.12 MB")
    assert {row.status for row in tight} == {"completed"}
    assert [row.n_cached_tokens for row in tight] == [0, 8, 0, 0]
    assert [row.n_cached_tokens for row in served(tmp_path, *SHARED, *options)] == [0, 40, 0, 40]


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_a_server_that_fails_loses_its_kept_caches_but_no_session(tmp_path: Path, communication: str) -> None:
    fault = "fault=[{kind='kill',server=['small-1'],after={request=1,tokens=2},for='1 s'}]"
    rows = served(tmp_path, *SHARED, fault, f"policy.communication={communication}", "workload.rate=0.01")
    assert {row.status for row in rows} == {"completed"}
    assert [row.n_cached_tokens for row in rows[:3]] == [0, 40, 56]
    assert rows[1].n_recoveries == 1


HELD = ("cache.prefix=session", "workload.rate=0.05")


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("options", [[], ["cache.mode=paged"], ["compute.batching=continuous"]])
def test_a_chain_stays_open_for_the_next_turn(tmp_path: Path, communication: str, options: list[str]) -> None:
    """The cache of the last output token is not there: it was never sent."""
    rows = served(tmp_path, *HELD, *options, f"policy.communication={communication}")
    assert {row.status for row in rows} == {"completed"}
    assert [row.n_cached_tokens for row in rows] == [0, 44, 59, 0, 44, 59]
    assert [row.times.setup_s for row in rows if row.turn] == 4 * [0.0]
    for row in rows:
        assert row.model.ttft_s == pytest.approx(row.times.ttft_s, rel=0.01)


def test_a_chain_that_was_held_for_too_long_is_closed_and_its_room_is_free(tmp_path: Path) -> None:
    """A server has room for one conversation: the second one gets in once the first is no longer held."""
    tight = (
        "hardware.small.memory=200.12 MB",
        "backoff.max=1 s",
        "workload.turns=2",
        "workload.think_time=20 s",
    )
    four = "workload.n_requests=4", "workload.rate=0.5"
    rows = served(tmp_path, *HELD, *tight, *four, "cache.hold=5 s")
    assert {row.status for row in rows} == {"completed"}
    assert [row.n_cached_tokens for row in rows] == [0, 0, 0, 0]
    assert rows[0].ended_at_s is not None and rows[2].times.queue_s is not None
    assert rows[0].ended_at_s + 5 <= rows[2].arrival_at_s + rows[2].times.queue_s < rows[0].ended_at_s + 7


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_a_server_that_fails_while_the_client_thinks_is_replaced_at_the_next_turn(
    tmp_path: Path, communication: str
) -> None:
    fault = "fault=[{kind='kill',server=['small-1'],at='1 s',for='1 s'}]"
    rows = served(tmp_path, *HELD, fault, f"policy.communication={communication}")
    assert {row.status for row in rows} == {"completed"}
    assert [row.n_recoveries for row in rows] == [0, 1, 0, 0, 0, 0]
    assert [row.n_cached_tokens for row in rows[:3]] == [0, 44, 59]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["workload.turns=1"], 'cache.prefix: is "session", and no request comes after another one'),
        (
            ["cache.session_tokens=50"],
            "cache.session_tokens: is 50, and a conversation of the workload has 75",
        ),
        (["cache.page_tokens=8"], 'cache.page_tokens: is only for mode = "paged", or prefix = "shared"'),
        (["cache.prefix=shared", "cache.hold=5 s"], 'cache.hold: is only for prefix = "session"'),
        (["cache.hub_history=1 MB"], 'cache.hub_history: is only for prefix = "shared"'),
        (
            ["cache.prefix=shared", "cache.hub_history=1 MB", "policy.communication=server-to-server"],
            "cache.hub_history: is given, and servers send to each other",
        ),
    ],
)
def test_bad_keys_of_kept_caches_are_refused_in_a_sentence(
    tmp_path: Path, options: list[str], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        served(tmp_path, *HELD, *options)
    assert said in str(refused.value)


@pytest.mark.parametrize("more", [[], ["workload.turns=2"]])
def test_an_endpoint_refuses_chains_that_stay_open_and_says_what_to_take(more: list[str]) -> None:
    with pytest.raises(UserError, match=r'requests from outside keep no chain open; take "shared"'):
        experiment_to_serve("clustered", ["cache.prefix=session", *more], ServeOptions.local(0))


def test_with_unlimited_room_a_trace_hits_exactly_what_its_ids_imply(tmp_path: Path) -> None:
    rng = random.Random(1)
    lines = []
    for number in range(12):
        ids = [at if rng.random() < 0.7 else 1000 + 10 * number + at for at in range(rng.randint(1, 3))]
        line = {
            "timestamp": 60_000 * number,
            "input_length": 512 * len(ids) - rng.randint(0, 500),
            "output_length": 2,
        }
        lines.append(json.dumps({**line, "hash_ids": ids}) + "\n")
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    path = tmp_path / "traced.toml"
    of_trace = '[workload]\narrivals = "trace"\nfile = "trace.jsonl"\n'
    path.write_text(SMALL[: SMALL.index("[workload]")] + of_trace + SMALL[SMALL.index("[policy]") :])
    experiment = load_experiment(str(path), ("cache.prefix=shared",))
    rows = simulate(Case(experiment), "testbed").rows
    check_same(rows, simulate(Case(experiment), "testbed", is_virtual=True).rows, 1e-4)
    implied = implied_reuse(experiment.workload.requests, 16)
    assert [row.n_cached_tokens for row in rows] == implied and len(set(implied)) > 3


ONE_TIGHT = (
    *("workload.turns=2", "workload.n_requests=4", "workload.rate=0.5", "workload.think_time=20 s"),
    "servers.1.memory=200.12 MB",
)


@pytest.mark.parametrize(
    "decoding", ["", "decoding={drafter='model', tokens=3, acceptance=0.5, draft_token='1 ms'}"]
)
def test_a_prompt_that_repeats_a_known_answer_reuses_it(tmp_path: Path, decoding: str) -> None:
    """As in the twin of an endpoint's run, in both engines."""
    repeated = (
        'workload={arrivals="listed", requests=[[0, 20, 14], [5, 40, 3], [9, 40, 3]], prompt_block=16, '
        "prompts=[[-1, -1, 4], [-1, -1, 4, 6], [-1, -1, 4, 7]], answers=[[6], [], []]}"
    )
    rows = served(tmp_path, repeated, "cache.prefix=shared", *filter(None, [decoding]))
    assert [row.n_cached_tokens for row in rows] == [0, 32, 16]


def test_a_hop_that_has_lost_its_pages_is_filled_by_the_hub_which_has_kept_its_inputs(tmp_path: Path) -> None:
    """One server has room for 60 tokens; without the hub's history the whole chain computes what that one has lost."""
    for options, cached in (
        (("cache.hub_history=0 B",), [0, 8, 0, 0]),
        (("cache.hub_history=1 MB",), [0, 40, 0, 40]),
    ):
        rows = served(tmp_path, *SHARED, *ONE_TIGHT, *options)
        assert {row.status for row in rows} == {"completed"}
        assert [row.n_cached_tokens for row in rows] == cached
    small = served(tmp_path, *SHARED, *ONE_TIGHT, "cache.hub_history=1 kB")
    assert [row.n_cached_tokens for row in small] == [0, 8, 0, 0]


def test_a_session_whose_hops_were_filled_goes_on_over_a_server_that_fails(tmp_path: Path) -> None:
    fault = "fault=[{kind='kill',server=['small-1'],after={request=1,tokens=2},for='1 s'}]"
    rows = served(tmp_path, *SHARED, *ONE_TIGHT, "cache.hub_history=1 MB", fault)
    assert {row.status for row in rows} == {"completed"}
    assert (rows[1].n_cached_tokens, rows[1].n_recoveries) == (40, 1)


def test_a_chain_is_chosen_that_has_room_for_what_its_session_reserves(tmp_path: Path) -> None:
    """The nearest server has room for 100 tokens, a request needs at most 75, and its session may reserve 200."""
    pairs = ((("A", "B"), 20), (("A", "C"), 30), (("B", "C"), 10), (("C", "C"), 1))
    links = ", ".join(f"{{sites=['{a}','{b}'],rtt='{ms} ms',rate='1 Gbit/s'}}" for (a, b), ms in pairs)
    near = "{hardware='small',site='B',memory='200.2 MB'}"
    options = (f"servers=[{near}, {{hardware='small',site='C',count=3}}]", f"network.pairs=[{links}]")
    for tokens, uses_nearest in ((75, True), (200, False)):
        rows = served(tmp_path, *options, "cache.prefix=session", f"cache.session_tokens={tokens}")
        assert {row.status for row in rows} == {"completed"}
        servers = {hop.partition(":")[0] for row in rows for hop in str(row.chain).split()}
        assert ("0" in servers) == uses_nearest
