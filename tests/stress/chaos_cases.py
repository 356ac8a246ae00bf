"""Random scenarios for ``chaos``: systems, workloads and disturbances, all drawn from one seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from policies.registry import PAIRS as REGISTERED
from testbed.experiments.units import SIZE
from tests.stress import slow_links

Document = dict[str, Any]
"""A scenario as TOML data."""

SITES = ("a", "b", "c")
PAIRS = ("petals", "proposed", "petals-optimized-rr", "petals-optimized-order", "foresight")
MORE_PAIRS = tuple(name for name in REGISTERED if "milp" not in name and "rehearsed" not in name)
"""Those that decide in little time."""
CANCELS = "cancel"
"""The table of a case that scenarios do not have: requests that are cancelled, and at which times."""
SLOW = "slow_links"
"""The key of a case that scenarios do not have: it is played at the scale of ``slow_links``."""
INTERRUPT = "interrupted_at_s"
"""The key of a case that scenarios do not have: when its run is interrupted, in scenario seconds."""
NOT_OF_SCENARIOS = (CANCELS, SLOW, INTERRUPT)
QUIET_S = 2000.0
"""The last requests arrive so long after the last disturbance, in scenario seconds."""
_N_LAST, _BETWEEN_LAST_S = 2, 200.0
_HORIZON_S = 40.0
_SLOW_RATIO = 0.3
"""Share of the cases whose messages take longer than time limits."""
_KEPT_RATIO = 0.4
"""Share of the others whose servers keep caches."""
_DRAFTS_RATIO, _TALKS_RATIO = 0.25, 0.4
"""Shares of all whose clients draft tokens, and of the rest whose requests are turns of conversations."""
_WIDER_RATIO = 0.15
"""Share of all for each of the ways in which cases differ from most."""
_NEAR_S = (-1e-3, -1e-6, 0.0, 1e-9, 1e-6, 1e-3)


def draw(seed: int) -> Document:
    """Returns a system and its workload, without disturbances."""
    rng = random.Random(f"chaos:{seed}")
    n_servers, n_clients = rng.randint(2, 6), rng.choice((1, 1, 1, 2))
    n_requests = rng.randint(2, 10)
    joins = rng.random() < 0.25
    servers: list[Document] = [
        {
            "hardware": "drawn",
            "site": rng.choice(SITES),
            "name": f"s{number}",
            "memory": f"{rng.choice((4, 6, 9, 14, 20))} GB",
        }
        for number in range(n_servers)
    ]
    if joins:
        servers.append({"hardware": "drawn", "site": "a", "name": "late", "memory": "9 GB", "present": False})
    within_s = rng.choice((1, 5, 15))
    arrivals = sorted(round(rng.uniform(0, within_s), rng.choice((0, 3))) for _ in range(n_requests))
    document: Document = {
        "name": f"chaos-{seed}",
        "seed": rng.randint(0, 1000),
        "clock": "virtual",
        "model": {
            "name": "drawn",
            "n_blocks": rng.randint(2, 8),
            "hidden_size": 32,
            "value_bytes": 2,
            "petals_cache_tokens": 64,
            "block_size": "1 GB",
            "cache_per_token": rng.choice(("100 kB", "10 MB", "40 MB", "60 MB")),
        },
        "hardware": {"drawn": {"base": "a100", "decode": rng.choice(("1 ms", "20 ms"))}},
        "servers": servers,
        "clients": [{"site": rng.choice(SITES), "name": f"c{number}"} for number in range(n_clients)],
        "network": {"backend": "memory", "kind": "clusters", "pairs": list(_pairs(rng))},
        "workload": {
            "arrivals": "listed",
            "requests": [[at_s, rng.randint(1, 12), rng.randint(1, 10)] for at_s in arrivals],
        },
        "policy": {
            "name": rng.choice(PAIRS),
            "communication": rng.choice(("hub-spoke", "hub-spoke", "server-to-server")),
            "design_concurrency": rng.choice(("auto", 1, 2, 4)),
        },
        "compute": {"serial": rng.random() < 0.3},
        "backoff": {"first": "1 s", "max": "8 s", "give_up": "1000 s", "jitter": rng.choice(("0 %", "30 %"))},
        "recovery": {
            "mode": rng.choice(("replay",) * 8 + ("head", "off")),
            "request_timeout": rng.choice(("3 s", "180 s")),
            "connect_timeout": rng.choice(("4 s", "10 s")),
            "ban": rng.choice(("0 s", "15 s")),
            "give_up": rng.choice(("20 s", "300 s")),
            "replay": rng.choice(("at_once", "step_by_step")),
        },
    }
    if rng.random() < 0.3:
        document["membership"] = {
            "kind": "announced",
            "announce_period": "5 s",
            "expiry": "12 s",
            "refresh": "4 s",
        }
    if rng.random() < 0.25:
        document["policy"] |= {"online": rng.choice(("two-time-scale", "petals-rebalancing"))}
        document["policy"] |= {"online_period": "6 s", "load_rate": rng.choice(("10 Gbit/s", "1 Gbit/s"))}
    if rng.random() < 0.15:
        document["policy"]["state_age"] = "3 s"
    # Generators of their own: what a seed draws otherwise does not depend on these.
    batching = random.Random(f"chaos:{seed}:batching")
    if batching.random() < 0.3:
        document["compute"] = {"batching": "continuous"}
        document["hardware"]["drawn"]["session_slope"] = batching.choice(("0 s", "3 ms"))
        if batching.random() < 0.3:
            document["compute"]["chunk_tokens"] = batching.randint(1, 8)
    room = random.Random(f"chaos:{seed}:room")
    if room.random() < 0.3:
        document["policy"] |= {"queue": room.choice(("fifo", "backfill")), "queue_age": "5 s"}
    if room.random() < 0.4:
        document["workload"] |= {"lengths": "hidden", "max_new_tokens": room.choice((10, 20))}
        document["cache"] = {"mode": "paged", "page_tokens": room.randint(1, 4)}
        document["cache"]["high_water"] = room.choice((0.5, 0.9, 1.0))
    slow = random.Random(f"chaos:{seed}:slow")
    if slow.random() < _SLOW_RATIO:
        document[SLOW] = True
        slow_links.make_slow(document, slow)
    kept = random.Random(f"chaos:{seed}:kept")
    if kept.random() < _KEPT_RATIO and SLOW not in document:
        _begin_alike(document, kept)
    drafts = random.Random(f"chaos:{seed}:drafts")
    if drafts.random() < _DRAFTS_RATIO:
        document["decoding"] = {
            "drafter": drafts.choice(("ngram", "petals")),
            "tokens": drafts.choice((1, 1, 2, "auto")),
            "acceptance": drafts.choice((0.0, 0.6, 1.0)),
        }
    talks = random.Random(f"chaos:{seed}:talks")
    if talks.random() < _TALKS_RATIO and SLOW not in document and "prompts" not in document["workload"]:
        _converse(document, talks)
    flight = random.Random(f"chaos:{seed}:flight")
    one_at_a_time = "hub_history" in document.get("cache", {})
    if document.get("decoding", {}).get("drafter") == "ngram" and not one_at_a_time:
        document["decoding"]["in_flight"] = flight.choice((1, 2, 4))
    wider = random.Random(f"chaos:{seed}:wider")
    links = () if SLOW in document else (_own_links,)
    others = _unequal, _past_lengths, _to_the_byte, _by_hours
    for add in (_other_policies, _moves, _own_times, *links, *others):
        if wider.random() < _WIDER_RATIO:
            add(document, wider)
    return document


def _other_policies(document: Document, rng: random.Random) -> None:
    """Has any pair of policies that decides in little time, and clients that wait in other ways."""
    if "name" in document["policy"]:
        document["policy"]["name"] = rng.choice(MORE_PAIRS)
    document["recovery"] |= {
        "retry_first": rng.choice(("0.1 s", "2 s")),
        "jitter": rng.choice(("0 %", "30 %")),
        "ban_failed_servers": rng.random() < 0.5,
    }


def _moves(document: Document, rng: random.Random) -> None:
    """Has servers move all the time, whatever the load: some wait for their sessions, others cut them."""
    document["policy"] |= {
        "online": f"tests.support.wandering:{rng.choice(('Draining', 'Cutting'))}",
        "online_period": rng.choice(("1 s", "5 s")),
        "load_rate": rng.choice(("100 Gbit/s", "10 Gbit/s")),
    }


def _own_times(document: Document, rng: random.Random) -> None:
    """Has clients, servers and the calibration take times of their own."""
    document["calibration"] = {
        "token_overhead": "30 ms",
        "input_overhead_base": rng.choice(("1 ms", "90 ms")),
    }
    document["compute"]["hub_token"] = rng.choice(("1 ms", "50 ms"))
    document["hardware"]["drawn"] |= {"step_base": "2 ms", "context_slope": "50 us"}
    if document["compute"].get("batching") != "continuous":
        document["hardware"]["drawn"]["contention"] = rng.choice((0, 0.5))
    if "decoding" in document:
        document["decoding"]["draft_token"] = "5 ms"


def _own_links(document: Document, rng: random.Random) -> None:
    """Has directions that differ, an uplink that a site's links share, loss, and hidden states that are narrow on the wire."""
    network = document["network"]
    for pair in list(network["pairs"]):
        one, other = pair.pop("sites")
        rtt_ms = float(pair.pop("rtt").removesuffix(" ms"))
        pair |= {"from": one, "to": other, "delay": f"{rtt_ms / 2} ms"}
        if one != other:
            back = {
                "from": other,
                "to": one,
                "delay": f"{rtt_ms} ms",
                "rate": rng.choice(("100 kbit/s", "1 Gbit/s")),
            }
            network["pairs"].append(back)
    site = document["servers"][0]["site"]
    document["sites"] = [{"name": site, "up": rng.choice(("100 kbit/s", "10 Mbit/s")), "down": "10 Mbit/s"}]
    network |= {"loss": rng.choice(("0 %", "2 %")), "wire": rng.choice(("int8", "fp16"))}


def _unequal(document: Document, rng: random.Random) -> None:
    """Has two kinds of servers, one of which reads experts, and clients that differ."""
    reads = {"experts_read": "40 ms", "experts_share": 0.25, "prefill_least": "60 ms"}
    document["hardware"]["other"] = document["hardware"]["drawn"] | reads
    for server in document["servers"]:
        server["hardware"] = rng.choice(("drawn", "other"))
    for client in document["clients"]:
        client["hub_token"] = rng.choice(("1 ms", "30 ms"))


def _past_lengths(document: Document, rng: random.Random) -> None:
    """Has nobody know how long outputs become, but how long others were."""
    workload = document["workload"]
    workload |= {
        "lengths": "hidden",
        "known_lengths": [[rng.randint(1, 12), rng.randint(1, 10)] for _ in range(3)],
    }
    workload.setdefault("max_new_tokens", max(n_output for _, _, n_output in workload["requests"]))
    if document.get("cache", {}).get("mode") == "paged":
        document["cache"]["expected_output"] = rng.choice((1, 5))


def _to_the_byte(document: Document, rng: random.Random) -> None:
    """Has servers whose memory is that of their blocks and the caches of one or two of the longest sessions, to the byte."""
    model, workload, n_sessions = document["model"], document["workload"], rng.choice((1, 2))
    most = workload.get("max_new_tokens", 0)
    n_tokens = max(n_input + max(n_output, most) for _, n_input, n_output in workload["requests"])
    n_bytes = SIZE.parse(model["block_size"]) + n_sessions * n_tokens * SIZE.parse(model["cache_per_token"])
    document["policy"]["design_concurrency"] = n_sessions
    for server in document["servers"]:
        server["memory"] = f"{rng.randint(-(-model['n_blocks'] // 2), model['n_blocks']) * n_bytes:.0f} B"


def _by_hours(document: Document, rng: random.Random) -> None:
    """Has some servers leave after a minute, for two, or be there from then on; requests arrive about that time."""
    document["begins_at"] = "12:00"
    for server in document["servers"][1:]:
        if server.get("present", True) and rng.random() < 0.5:
            server |= {"hours": rng.choice(("15:03-15:01", "15:01-15:00")), "time_zone": "+03:00"}
    for request in document["workload"]["requests"]:
        request[0] += 55


def _return_to_caches(document: Document, rng: random.Random) -> None:
    """Routes requests to where the beginnings of their prompts are kept."""
    del document["policy"]["name"]
    document["policy"] |= {
        "routing": rng.choice(("sticky", "prefix-aware")),
        "placement": rng.choice(("petals", "cg-bp")),
    }


def _converse(document: Document, rng: random.Random) -> None:
    """Makes the requests turns of some conversations: each comes after the answer before it, and repeats what was said."""
    workload, said = document["workload"], dict[int, int]()
    n_talks = rng.randint(1, 3)
    workload["conversations"] = []
    for request in workload["requests"]:
        talk = rng.randrange(n_talks)
        request[1] += said.get(talk, 0)
        said[talk] = request[1] + request[2]
        workload["conversations"].append([talk, rng.choice((0, 0.05, 2, 30))])
    prefix = rng.choice(("none", "session", "shared"))
    if prefix != "none":
        document.setdefault("cache", {})["prefix"] = prefix
    if prefix == "session":
        document["cache"] |= {
            "hold": rng.choice(("1 s", "300 s")),
            "session_tokens": max(said.values()) + rng.choice((0, 0, 20)),
        }
    if prefix == "shared" and rng.random() < 0.5:
        _return_to_caches(document, rng)


def _begin_alike(document: Document, rng: random.Random) -> None:
    """Has servers keep caches, for prompts that begin with some of a few blocks of two tokens."""
    cache = document.setdefault("cache", {})
    cache |= {"prefix": "shared", "page_tokens": rng.randint(1, 4)}
    if document["policy"]["communication"] == "hub-spoke" and rng.random() < 0.5:
        cache["hub_history"] = rng.choice(("1 kB", "1 MB"))
    if rng.random() < 0.5:
        _return_to_caches(document, rng)
    document["workload"]["prompt_block"] = 2
    document["workload"]["prompts"] = [
        [rng.choice((-1, 0, 1)), 0, *(10 * at + rng.choice((0, 0, 0, 1)) for at in range(-(-n_input // 2)))]
        for _, n_input, *_ in document["workload"]["requests"]
    ]


def _pairs(rng: random.Random) -> Iterator[Document]:
    for i, one in enumerate(SITES):
        for other in SITES[i:]:
            rtt_ms = rng.choice((0, 5, 80, 300))
            yield {
                "sites": [one, other],
                "rtt": f"{rtt_ms} ms",
                "rate": rng.choice(("50 kbit/s", "10 Mbit/s", "1 Gbit/s")),
                "jitter": f"{rng.choice((0, 0, rtt_ms / 8))} ms",
            }


def disturb(seed: int, document: Document, instants: Iterable[float]) -> Document:
    """Returns the same system with disturbances, many of them at or close to ``instants`` of the undisturbed
    run.
    """
    rng = random.Random(f"chaos:{seed}:faults")
    known = sorted(set(instants)) or [0.0]
    names = [s["name"] for s in document["servers"] if s.get("present", True) and "hours" not in s]
    sites = sorted({place["site"] for place in (*document["servers"], *document["clients"])})
    disturbed = copy.deepcopy(document)

    def at() -> str:
        if rng.random() < 0.3:
            return f"{rng.uniform(0, _HORIZON_S):.6f} s"
        if rng.random() < 0.2:
            return f"{rng.randint(0, 20)} s"
        return f"{max(0.0, rng.choice(known) + rng.choice(_NEAR_S)):.9f} s"

    makers: list[Callable[[], Document]] = [
        lambda: _fault(rng, "kill", names, at(), rng.random() < 0.8),
        lambda: _fault(rng, "stop", names, at(), rng.random() < 0.9),
        lambda: _fault(rng, "slow", names, at(), rng.random() < 0.7),
        lambda: _fault(rng, "restart", names, at(), False),
        lambda: _fault(rng, "leave", names, at(), False),
        lambda: _event(rng, sites, at()),
    ]
    weights = (5, 4, 2, 2, 2, 4)
    faults: list[Document] = []
    events: list[Document] = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        made = rng.choices(makers, weights)[0]()
        (faults if "kind" in made else events).append(made)
    if any(not server.get("present", True) for server in document["servers"]):
        faults.append({"kind": "join", "server": "late", "at": at()})
    if rng.random() < 0.15:
        request = rng.randrange(len(document["workload"]["requests"]))
        fault = {"kind": "kill", "server": rng.choice(names), "for": "4 s"}
        faults.append(fault | {"after": {"request": request, "tokens": rng.randint(1, 4)}})
    _vary(faults, events, len(document["workload"]["requests"]), random.Random(f"chaos:{seed}:varied"))
    churn = random.Random(f"chaos:{seed}:churn")
    if churn.random() < _WIDER_RATIO:
        disturbed["churn"] = _churn(churn, names, document["workload"]["requests"][-1][0])
    if faults:
        disturbed["fault"] = faults
    if events:
        disturbed["network"]["event"] = events
    cancels = _cancels(seed, len(document["workload"]["requests"]), known)
    if (
        "conversations" in document["workload"]
    ):  # callers who hang up are an endpoint's, and no turn waits for theirs
        cancels = []
    if SLOW in document:
        cancels = slow_links.cancels_of(document, random.Random(f"chaos:{seed}:slow cancels"), known)
    if cancels:
        disturbed[CANCELS] = cancels
    return disturbed


def _cancels(seed: int, n_requests: int, known: list[float]) -> list[Document]:
    """Returns requests that are cancelled, most of them at or close to ``known`` times. It has its own
    generator.
    """
    rng = random.Random(f"chaos:{seed}:cancels")
    if rng.random() < 0.5:
        return []
    cancels = []
    for request in sorted(rng.sample(range(n_requests), rng.randint(1, min(3, n_requests)))):
        at_s = rng.uniform(0, _HORIZON_S)
        if rng.random() < 0.7:
            at_s = max(0.0, rng.choice(known) + rng.choice(_NEAR_S))
        cancels.append({"request": request, "at_s": at_s})
    return cancels


def interruption_s(seed: int, known: list[float]) -> float:
    """Returns when a run is interrupted: at or close to one of ``known`` times, in whole nanoseconds as these. It has its own
    generator.
    """
    rng = random.Random(f"chaos:{seed}:interrupt")
    return max(0.0, round(rng.choice(known) + rng.choice(_NEAR_S), 9))


def _fault(rng: random.Random, kind: str, names: list[str], at: str, ends: bool) -> Document:
    fault: Document = {"kind": kind, "server": rng.choice(names), "at": at}
    if ends:
        fault["for"] = f"{rng.choice((0.001, 0.5, 5, 30, 200))} s"
    if kind == "slow":
        fault["factor"] = rng.choice((2, 50))
    return fault


def _churn(rng: random.Random, names: list[str], last_at_s: float) -> Document:
    return {
        "kind": rng.choice(("kill", "stop")),
        "mtbf": rng.choice(("2 s", "10 s")),
        "mttr": rng.choice(("0.5 s", "8 s")),
        "distribution": rng.choice(("exponential", "constant")),
        "until": f"{last_at_s + 10} s",
        "servers": names,
    }


def _event(rng: random.Random, sites: list[str], at: str) -> Document:
    event: Document = {"at": at, "for": f"{rng.choice((0.001, 0.3, 4, 60))} s"}
    where = rng.choice(("link", "site", "partition"))
    if where == "partition" and len(sites) > 1:
        return event | {"partition": [rng.choice(sites)]}
    if where == "link" and len(sites) > 1:
        event["link"] = rng.sample(sites, 2)
    else:
        event["site"] = rng.choice(sites)
    effects: tuple[Document, ...] = (
        {"down": True},
        {"loss": "20 %"},
        {"rate_factor": rng.choice((0.1, 10))},
        {"rtt_factor": rng.choice((0.2, 5))},
        {"jitter": "1 ms"},
    )
    return event | rng.choice(effects)


def _vary(faults: list[Document], events: list[Document], n_requests: int, rng: random.Random) -> None:
    """Has some servers that leave or join do so for a while, other faults come after a token, and links change otherwise."""
    for fault in faults:
        if fault["kind"] in ("leave", "join"):
            if rng.random() < 0.4:
                fault["for"] = f"{rng.choice((0.5, 5, 30))} s"
        elif "at" in fault and rng.random() < 0.15:
            del fault["at"]
            fault["after"] = {"request": rng.randrange(n_requests), "tokens": rng.randint(1, 4)}
    for event in events:
        if "link" in event and rng.random() < 0.5:
            event["direction"] = "forward"
        if "partition" not in event and "rtt_factor" not in event and rng.random() < 0.4:
            event |= rng.choice(({"rtt": "250 ms"}, {"rtt_to": "400 ms"}))


def with_last_requests(document: Document, quiet_from_s: float) -> Document:
    """Returns the case with two more requests, long after all disturbances: the servers that are up must
    serve them.
    """
    asked = copy.deepcopy(document)
    for number in range(_N_LAST):
        asked["workload"]["requests"].append([quiet_from_s + QUIET_S + _BETWEEN_LAST_S * number, 3, 3])
        if "prompts" in asked["workload"]:
            asked["workload"]["prompts"].append([-1, -1, 0, 10])
        if "conversations" in asked["workload"]:
            asked["workload"]["conversations"].append([1000 + number, 0])
    return asked


def smaller(document: Document) -> Iterator[Document]:
    """Yields the case with one thing less: first without a disturbance each, then a request, then a
    setting.
    """
    for path in (("fault",), ("network", "event"), (CANCELS,), ("workload", "requests")):
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        for index in range(len(holder.get(path[-1], ()))):
            copied = copy.deepcopy(document)
            inner = copied
            for key in path[:-1]:
                inner = inner[key]
            del inner[path[-1]][index]
            for beside in ("prompts", "conversations"):
                if path[-1] == "requests" and beside in inner:
                    del inner[beside][index]
            if not inner[path[-1]]:
                if path[-1] == "requests":
                    continue
                del inner[path[-1]]
            yield copied
    for key in ("churn", "membership", "backoff", "compute", "decoding", "calibration", "sites"):
        if key in document:
            yield {name: value for name, value in document.items() if name != key}
    for key in ("online", "state_age"):
        if key in document["policy"]:
            policy = {
                k: v for k, v in document["policy"].items() if k not in (key, "online_period", "load_rate")
            }
            yield document | {"policy": policy}
    for index, fault in enumerate(document.get("fault", ())):
        if "for" in fault:
            copied = copy.deepcopy(document)
            del copied["fault"][index]["for"]
            yield copied
