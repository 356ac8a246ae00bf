"""The fast engine on links beside the testbed itself in virtual time, on random small scenarios."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from testbed.experiments import load_experiment
from testbed.experiments.sources import Document
from testbed.simulator.cases import Case
from testbed.simulator.engine import FAST, simulate
from tests.support.effort import n_drawn
from tests.support.small_model import SMALL_HARDWARE, SMALL_MODEL

BASE: dict[str, Any] = {
    "name": "links",
    "model": SMALL_MODEL,
    "hardware": {"small": SMALL_HARDWARE},
    "servers": [{"hardware": "small", "site": site} for site in ("B", "C")],
    "clients": [{"site": "A"}, {"site": "B"}],
    "workload": {"arrivals": "poisson", "n_requests": 6},
    "policy": {"name": "proposed", "design_concurrency": 1},
}
LITTLE_ROOM = {
    "small": SMALL_HARDWARE | {"memory": "203 MB"},
    "tight": SMALL_HARDWARE | {"memory": "201.3 MB"},
}
RATES = (8, 40, 200, 1000, 10_000)
"""Mbit/s."""
TIMES = ("queue_s", "setup_s", "ttft_s", "e2e_s")
WITHIN_S = 5e-8
"""Sums of instants in another order: nanoseconds. One byte more or less takes 0.8 ns or more, and an acknowledgement 42 ns."""
HUB_SPOKE, FORWARDING = "hub-spoke", "server-to-server"
OVERHEADS = {"token_overhead": "30 ms", "input_overhead_base": "5 ms", "input_overhead_per_token": "0.1 ms"}


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """Clients at distances, and servers with half of the model each, on links that are fast or busy, with prompts of one to
    some dozen messages. What else happens is drawn, too.
    """
    pairs = [
        {
            "from": a,
            "to": b,
            "delay": f"{draw(st.integers(1, 90))} ms",
            "rate": f"{draw(st.sampled_from(RATES))} Mbit/s",
        }
        for a in "ABC"
        for b in "ABC"
    ]
    n_servers, n_clients = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    workload = BASE["workload"] | {
        "arrivals": draw(st.sampled_from(["poisson", "constant"])),
        "rate": draw(st.sampled_from([0.5, 2, 10])),
        "n_input_tokens": draw(st.sampled_from([1, 7, 20, 130, 300])),
        "n_output_tokens": draw(st.integers(4, 12)),
    }
    scenario = BASE | {
        "servers": [{"hardware": "small", "site": "B" if n % 2 else "C"} for n in range(n_servers)],
        "clients": [{"site": site} for site in "ABC"[:n_clients]],
        "network": {"kind": "clusters", "pairs": pairs},
        "workload": workload,
        "policy": BASE["policy"] | {"communication": draw(st.sampled_from([HUB_SPOKE, FORWARDING]))},
        "compute": {"batching": draw(st.sampled_from(["none", "continuous"]))},
        "tcp": draw(st.sampled_from([{}, {"warm": False}, {"warm": False, "slow_start_after_idle": True}])),
        "calibration": draw(st.sampled_from([{}, OVERHEADS])),
        "seed": draw(st.integers(0, 9)),
    }
    for add in draw(st.sets(st.sampled_from([uplinks, slower_link, lost_server, little_room]), max_size=2)):
        add(draw, scenario)
    draw(st.sampled_from([lambda _: None, drafts, growing_caches, conversations]))(scenario)
    return scenario


def uplinks(draw: st.DrawFn, scenario: dict[str, Any]) -> None:
    """All of a site's connections share its uplink and its downlink."""
    up, down = (f"{draw(st.sampled_from(RATES))} Mbit/s" for _ in range(2))
    scenario["sites"] = [*scenario.get("sites", ()), {"name": "B", "up": up, "down": down}]


def at_ms(draw: st.DrawFn) -> float:
    """Any instant, or one at which requests may arrive."""
    return draw(st.integers(1, 4000).map(lambda ms: ms + 0.0713) | st.sampled_from([500, 1000, 1500, 2000]))


def slower_link(draw: st.DrawFn, scenario: dict[str, Any]) -> None:
    at, for_ = at_ms(draw), draw(st.integers(1, 3000) | st.sampled_from([500, 1000]))
    change = draw(st.sampled_from([{"rate": "20 Mbit/s"}, {"rtt": "150 ms"}, {"down": True}]))
    link = {"at": f"{at} ms", "for": f"{for_} ms", "link": ["B", "C"], **change}
    scenario["network"] |= {"event": [link]}


def lost_server(draw: st.DrawFn, scenario: dict[str, Any]) -> None:
    """It comes back. Hub-spoke: with forwarding, sessions that hear of it at one instant may go on in another order.

    Connections are warm: where a prompt waits for acknowledgements of a server that is lost, one may come in another order.
    """
    scenario["tcp"] = {}
    scenario["policy"] |= {"communication": HUB_SPOKE}
    at = f"{at_ms(draw)} ms"
    scenario["fault"] = [{"kind": "restart", "server": f"small-{draw(st.integers(0, 1))}", "at": at}]
    scenario["recovery"] = {"jitter": 0.2}


def little_room(draw: st.DrawFn, scenario: dict[str, Any]) -> None:
    """Servers refuse sessions of a routing that does not look whether they have room, while prompts keep an uplink busy.

    One server has room for fewer, so that others have accepted what it refuses.
    """
    scenario["hardware"] = LITTLE_ROOM
    scenario["servers"] = [*scenario["servers"], {"hardware": "tight", "site": "C"}]
    scenario["policy"] = {
        **{"placement": "cg-bp", "design_concurrency": 1},
        **{"routing": draw(st.sampled_from(["shortest-path", "swarm"]))},
        **{"communication": scenario["policy"]["communication"]},
    }
    up = f"{draw(st.sampled_from([4, 8, 40]))} Mbit/s"
    scenario["sites"] = [*scenario.get("sites", ()), {"name": "A", "up": up}]


def drafts(scenario: dict[str, Any]) -> None:
    scenario["decoding"] = {"drafter": "ngram", "tokens": 3, "acceptance": 0.7}


def growing_caches(scenario: dict[str, Any]) -> None:
    """Room for some hundred tokens, so that sessions wait for it and lose it."""
    scenario["cache"] = {"mode": "paged"}
    scenario["workload"] |= {"lengths": "hidden", "max_new_tokens": 14}
    scenario["hardware"] = {name: SMALL_HARDWARE | {"memory": "201 MB"} for name in scenario["hardware"]}


def conversations(scenario: dict[str, Any]) -> None:
    scenario["workload"] |= {"turns": 2, "think_time": "1 s"}
    scenario["cache"] = {"prefix": "session" if scenario["seed"] % 2 else "shared"}


@settings(max_examples=n_drawn(12), deadline=None)
@given(scenarios())
def test_every_request_takes_what_it_takes_in_the_system(scenario: dict[str, Any]) -> None:
    event(assert_alike(scenario))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "network": {
                "event": [
                    {"site": "B", "at": at, "rtt": rtt} for at, rtt in (("0.9 s", "90 ms"), ("1 s", "300 ms"))
                ]
            }
        },
        {
            "fault": [
                {"kind": "kill", "server": name, "at": at}
                for name, at in (("small-3", "0.6 s"), ("small-0", "1 s"))
            ]
        },
        {"decoding": {"drafter": "ngram", "tokens": 3, "acceptance": 0.7}, "calibration": OVERHEADS},
    ],
    ids=["links", "servers", "drafts"],
)
def test_so_do_those_that_come_with_a_change_and_drafts_with_overheads(changes: dict[str, Any]) -> None:
    sites = (("A", "B", 40), ("A", "C", 60), ("B", "C", 30), ("B", "B", 4), ("C", "C", 4))
    pairs = [{"sites": [a, b], "rtt": f"{rtt_ms} ms", "rate": "40 Mbit/s"} for a, b, rtt_ms in sites]
    lengths = {"arrivals": "constant", "rate": 2, "n_input_tokens": 7, "n_output_tokens": 8}
    network = {"kind": "clusters", "pairs": pairs} | changes.get("network", {})
    servers = [*BASE["servers"], *BASE["servers"]]
    scenario = BASE | {"servers": servers, "workload": BASE["workload"] | lengths}
    assert_alike(scenario | changes | {"network": network})


@pytest.mark.parametrize(("batching", "seed"), [("none", 0), ("none", 3), ("continuous", 4)])
def test_so_do_prompts_of_eighty_parts_that_meet(batching: str, seed: int) -> None:
    """What is written when, with headers and confirmations, decides which of two messages goes first."""
    sites = (("A", "A", 4), ("A", "B", 40), ("A", "C", 60), ("B", "C", 30), ("B", "B", 4), ("C", "C", 4))
    pairs = [{"sites": [a, b], "rtt": f"{rtt_ms} ms", "rate": "40 Mbit/s"} for a, b, rtt_ms in sites]
    lengths = {"n_requests": 5, "rate": 2, "n_input_tokens": 600, "n_output_tokens": 8}
    changes = {"network": {"kind": "clusters", "pairs": pairs}, "workload": BASE["workload"] | lengths}
    assert_alike(BASE | changes | {"compute": {"batching": batching}, "seed": seed})


@pytest.mark.parametrize("up", ["2 Mbit/s", "4 Mbit/s"])
def test_after_a_refusal_a_client_waits_only_so_long_for_the_others_to_close(up: str) -> None:
    """Its closing waits for a prompt on the uplink for longer than ``recovery.connect_timeout``."""
    sites = (("A", "B", 20), ("A", "C", 40), ("B", "C", 30))
    pairs = [{"sites": [a, b], "rtt": f"{rtt_ms} ms", "rate": "40 Mbit/s"} for a, b, rtt_ms in sites]
    scenario = BASE | {
        "hardware": LITTLE_ROOM,
        "servers": [{"hardware": "small", "site": "B"}, {"hardware": "tight", "site": "C"}],
        "clients": [{"site": "A"}],
        "sites": [{"name": "A", "up": up}],
        "network": {"kind": "clusters", "pairs": pairs},
        "workload": BASE["workload"] | {"rate": 1, "n_input_tokens": 300, "n_output_tokens": 4},
        "policy": {"placement": "cg-bp", "design_concurrency": 1, "routing": "shortest-path"},
    }
    assert_alike(scenario)


@pytest.mark.parametrize(
    ("there", "back", "n_tokens"),
    [(1, 1000, 25), (5, 10_000, 2), (1000, 1, 300)],
    ids=["tokens", "headers", "prompts"],
)
def test_so_does_a_session_alone_whose_acknowledgements_wait_on_a_link_far_slower_than_the_one_back(
    there: int, back: int, n_tokens: int
) -> None:
    """They are on the link when the next token, or the answer to a prompt, follows."""
    ends = (("A", "B", there), ("B", "A", back))
    pairs = [{"from": a, "to": b, "delay": "5 ms", "rate": f"{mbps} Mbit/s"} for a, b, mbps in ends]
    lengths = {"n_requests": 1, "rate": 1, "n_input_tokens": n_tokens, "n_output_tokens": 4}
    scenario = BASE | {
        "model": SMALL_MODEL | {"hidden_size": 14336},
        "hardware": {"small": SMALL_HARDWARE | {"memory": "4 GB"}},
        "servers": [{"hardware": "small", "site": "B"}],
        "clients": [{"site": "A"}],
        "network": {"kind": "clusters", "pairs": pairs},
        "workload": BASE["workload"] | lengths,
    }
    assert assert_alike(scenario) == "step by step"


def test_so_do_answers_that_take_more_of_the_window_than_their_prompts_as_each_part_has_a_segment_for_its_header() -> (
    None
):
    pairs = [
        {"from": "A", "to": "B", "delay": "50 ms", "rate": "10 Gbit/s"},
        {"from": "B", "to": "A", "delay": "150 ms", "rate": "1 Gbit/s"},
    ]
    scenario = BASE | {
        "model": SMALL_MODEL | {"hidden_size": 14336},
        "hardware": {"small": SMALL_HARDWARE | {"memory": "4 GB"}},
        "servers": [{"hardware": "small", "site": "B"}],
        "clients": [{"site": "A"}],
        "network": {"kind": "clusters", "pairs": pairs, "mtu": 9000},
        "workload": BASE["workload"]
        | {"n_requests": 1, "rate": 1, "n_input_tokens": 400, "n_output_tokens": 2},
    }
    assert_alike(scenario)


def test_so_do_tokens_that_are_passed_on_before_the_acknowledgement_of_the_prompt_has_come() -> None:
    """Servers are farther from each other than over the client."""
    sites = (("A", "B", 20), ("A", "C", 20), ("B", "C", 300))
    pairs = [{"sites": [a, b], "rtt": f"{rtt_ms} ms", "rate": "1 Gbit/s"} for a, b, rtt_ms in sites]
    scenario = BASE | {
        "model": SMALL_MODEL | {"hidden_size": 14336},
        "clients": [{"site": "A"}],
        "network": {"kind": "clusters", "pairs": pairs, "mtu": 9000},
        "tcp": {"warm": False},
        "workload": BASE["workload"]
        | {"n_requests": 1, "rate": 1, "n_input_tokens": 2, "n_output_tokens": 4},
        "policy": BASE["policy"] | {"communication": FORWARDING},
    }
    assert_alike(scenario)


def assert_alike(scenario: dict[str, Any]) -> str:
    """Returns how the fast engine served it."""
    case = Case(load_experiment(Document(scenario)))
    fast, system = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True, live=False)
    for one, other in zip(fast.rows, system.rows, strict=True):
        assert (one.chain, one.status, one.reason) == (other.chain, other.status, other.reason)
        assert (one.n_rejections, one.n_recoveries, one.n_preemptions) == (
            other.n_rejections,
            other.n_recoveries,
            other.n_preemptions,
        )
        for name in TIMES:
            assert one.times[name] == pytest.approx(other.times[name], abs=WITHIN_S), name
    return fast.why.partition("; ")[2].partition(",")[0] if fast.engine == FAST else fast.engine
