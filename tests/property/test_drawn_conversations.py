"""Conversations on random small scenarios: the fast engine is as the testbed itself in virtual time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from pytest import approx

from testbed.experiments import load_experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from tests.support.effort import n_drawn
from tests.unit.simulator.test_conversations import SMALL, check_same

WIDE = tuple(f"network.pairs.{pair}.rate='1000000 Gbit/s'" for pair in range(3))
"""Messages take their links' delays alone."""


@st.composite
def changes(draw: st.DrawFn) -> list[str]:
    """Conversations with caches that are kept in all ways, on servers with room for some or for all of them."""
    prefix = draw(st.sampled_from(["none", "session", "shared"]))
    communication = draw(st.sampled_from(["hub-spoke", "server-to-server"]))
    is_paged = draw(st.booleans())
    page_tokens = draw(st.sampled_from([2, 8]))
    found = [
        *(f"cache.prefix={prefix}", f"policy.communication={communication}"),
        f"policy.routing={draw(st.sampled_from(['ws-rr', 'sticky', 'prefix-aware']))}",
        f"workload.turns={draw(st.integers(2, 4))}",
        f"workload.think_time={draw(st.sampled_from([0, 0.05, 2, 20]))} s",
        f"workload.rate={draw(st.sampled_from([0.5, 3, 20]))}",
        f"workload.n_requests={draw(st.integers(5, 9))}",
        f"workload.n_input_tokens={draw(st.sampled_from([5, 20]))}",
        f"workload.n_output_tokens={draw(st.sampled_from([2, 5, 30]))}",
        f"workload.n_further_tokens={draw(st.sampled_from([1, 10]))}",
        f"hardware.small.memory={draw(st.sampled_from([200.4, 200.5, 250]))} MB",
        f"seed={draw(st.integers(0, 99))}",
    ]
    if is_paged:
        replay = draw(st.sampled_from(["at_once", "step_by_step"]))
        found += ["cache.mode=paged", "cache.high_water=0.95", f"recovery.replay={replay}"]
    if is_paged or prefix == "shared":
        found.append(f"cache.page_tokens={page_tokens}")
    if prefix == "session":
        found += [f"cache.hold={draw(st.sampled_from([0.5, 100]))} s", "cache.session_tokens=180"]
    if prefix == "shared" and not is_paged and communication == "hub-spoke":
        found.append(f"cache.hub_history={draw(st.sampled_from(['1 kB', '20 kB', '1 MB']))}")
    for option in (
        ["compute.batching=continuous"],
        ["decoding.drafter=ngram", "decoding.acceptance=0.7", "decoding.tokens=1"],
        ["backoff.give_up=3 s"],
        ["policy.queue=fifo"],
        ["workload.lengths=hidden"],
    ):
        found += option if draw(st.booleans()) else []
    return found


GIVES_UP = [
    *("cache.prefix=session", "policy.routing=ws-rr", "workload.turns=2", "workload.think_time=0 s"),
    *("workload.rate=20", "workload.n_requests=5", "workload.n_input_tokens=5", "workload.n_output_tokens=2"),
    *("workload.n_further_tokens=1", "hardware.small.memory=200.4 MB", "seed=0", "cache.hold=0.5 s"),
    *("cache.session_tokens=180", "backoff.give_up=3 s"),
]
"""A request gives up after a server has refused it; its reason says why."""


SOON_AFTER_ITS_CHAIN = [
    *("cache.prefix=session", "policy.routing=ws-rr", "workload.turns=2", "workload.think_time=0.505 s"),
    *(
        "workload.rate=0.5",
        "workload.n_requests=4",
        "workload.n_input_tokens=5",
        "workload.n_output_tokens=2",
    ),
    *("hardware.small.memory=250 MB", "seed=0", "cache.hold=0.5 s", "cache.session_tokens=180"),
]
"""The next turn comes before the servers have confirmed that the chain which was kept for it is closed."""


@example(GIVES_UP, True)
@example(SOON_AFTER_ITS_CHAIN, True)
@given(changes(), st.booleans())
@settings(max_examples=n_drawn(5), deadline=None)
def test_conversations_take_the_same_times_in_both_engines(found: list[str], is_wide: bool) -> None:
    """To the nanosecond where messages take their links' delays alone. Else frames differ by some bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "talk.toml"
        path.write_text(SMALL.replace('name = "proposed"', 'placement = "cg-bp"'))
        case = Case(load_experiment(str(path), [*found, *(WIDE if is_wide else ())]))
    fast, virtual = (simulate(case, "testbed", is_virtual=is_virtual) for is_virtual in (False, True))
    assert fast.engine == "fast"
    event(f"preempted: {any(row.n_preemptions for row in fast.rows)}")
    event(f"reused: {any(row.n_cached_tokens for row in fast.rows)}")
    if is_wide:
        check_same(fast.rows, virtual.rows, 2e-9)
    elif not any(row.n_rejections or row.n_preemptions for row in virtual.rows):
        check_same(fast.rows, virtual.rows, 3e-3)


SPARED = SMALL.replace('name = "proposed"', 'placement = "cg-bp"').replace(
    'hardware = "small"\nsite', 'hardware = "small"\ncount = 2\nsite'
)
SPARED = SPARED.replace(
    "pairs = [",
    """pairs = [
    { sites = ["B", "B"], rtt = "1 ms", rate = "1 Gbit/s" },
    { sites = ["C", "C"], rtt = "1 ms", rate = "1 Gbit/s" },""",
)
"""Four servers, of which any one can be spared."""


@st.composite
def disturbed(draw: st.DrawFn) -> list[str]:
    """Conversations that return to kept caches, and servers that are killed."""
    killed = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    faults = ", ".join(
        f'{{kind = "kill", server = "small-{server}", at = "{draw(st.integers(1, 1200))}0 ms", '
        f'for = "{draw(st.sampled_from([1, 4, 15]))} s"}}'
        for server in killed
    )
    found = [
        f"fault=[{faults}]",
        f"policy.communication={draw(st.sampled_from(['hub-spoke', 'server-to-server']))}",
        f"policy.routing={draw(st.sampled_from(['sticky', 'prefix-aware', 'foresight']))}",
        f"workload.turns={draw(st.integers(2, 4))}",
        f"workload.think_time={draw(st.sampled_from([0, 0.05, 2]))} s",
        f"workload.rate={draw(st.sampled_from([0.5, 3]))}",
        f"workload.n_requests={draw(st.integers(6, 12))}",
        f"workload.n_input_tokens={draw(st.sampled_from([5, 20]))}",
        f"workload.n_output_tokens={draw(st.sampled_from([5, 30]))}",
        f"seed={draw(st.integers(0, 99))}",
        "cache.prefix=shared",
    ]
    for option in (["compute.batching=continuous"], ["cache.mode=paged", "cache.high_water=0.95"]):
        found += option if draw(st.booleans()) else []
    return found


RETURNS_TO_A_REPLACED_HOP = [
    'fault=[{kind = "kill", server = "small-0", at = "18 ms", for = "4 s"}]',
    *("policy.communication=hub-spoke", "policy.routing=prefix-aware", "workload.turns=4"),
    *("workload.think_time=2 s", "workload.rate=3", "workload.n_requests=10", "workload.n_input_tokens=20"),
    *("workload.n_output_tokens=30", "seed=47", "cache.prefix=shared"),
]
"""The next turn returns to a chain whose first hop was replaced."""


@example(RETURNS_TO_A_REPLACED_HOP)
@given(disturbed())
@settings(max_examples=n_drawn(4), deadline=None)
def test_conversations_go_on_where_servers_were_lost(found: list[str]) -> None:
    """With the same chains in both engines, and the same times but for some bytes of frames."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "talk.toml"
        path.write_text(SPARED, encoding="utf-8")
        case = Case(load_experiment(str(path), found))
    fast, virtual = (simulate(case, "testbed", is_virtual=is_virtual) for is_virtual in (False, True))
    event(f"recovered: {any(row.n_recoveries for row in virtual.rows)}")
    event(f"reused: {any(row.n_cached_tokens for row in virtual.rows)}")
    for row, other in zip(fast.rows, virtual.rows, strict=True):
        assert (row.status, row.chain, row.n_cached_tokens) == (
            other.status,
            other.chain,
            other.n_cached_tokens,
        )
        assert row.ended_at_s == approx(other.ended_at_s, abs=3e-3)
