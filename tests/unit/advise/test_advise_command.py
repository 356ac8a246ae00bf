from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import simulate
from testbed.studies.advise import command
from testbed.studies.advise.candidates import Fleet, parse_candidates
from testbed.studies.advise.command import RUNS, Options, advise_command
from testbed.studies.advise.text import advise_text
from testbed.studies.capacity.measures import load_measures

BATCH = (
    *("model.n_blocks=10", "policy.queue=fifo", "policy.design_concurrency=1", "workload.arrivals=listed"),
    "workload.requests=[[0,20,128],[0,20,128],[0,20,128],[0,20,128]]",
    *("workload.n_input_tokens=trace", "workload.n_output_tokens=trace", "workload.n_requests=4"),
)
"""Four requests at once."""
ONE_SERVER = (*BATCH, 'servers=[{hardware="a100",site="Cluster1",count=1,memory="13.4 GB"}]')
"""With room for one session at a time."""
PARTS = (
    *BATCH,
    "hardware.part.base=a100",
    "hardware.part.memory=6.7 GB",
    'servers=[{hardware="part",site="Cluster1",count=1}]',
)
"""With room for five of the blocks."""
SHORT = ("workload.n_requests=12", "workload.n_output_tokens=16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs are kept there


HOME = """
model = { profile = "bloom-176b", n_blocks = 4 }
servers = [
    { hardware = "a100", name = "near", site = "home", count = 1, memory = "9 GB" },
    { hardware = "a100", name = "far", site = "cloud", count = 1, memory = "9 GB" },
]
clients = [{ site = "out", count = 1 }]
policy = { name = "petals" }
[workload]
arrivals = "listed"
requests = [[0, 400, 1]]
rate = 0.1
[network]
kind = "clusters"
pairs = [
    { sites = ["out", "home"], rtt = "2 ms", rate = "1 Gbit/s" },
    { sites = ["out", "cloud"], rtt = "900 ms", rate = "1 Gbit/s" },
    { sites = ["home", "home"], rtt = "2 ms", rate = "1 Gbit/s" },
    { sites = ["home", "cloud"], rtt = "900 ms", rate = "1 Gbit/s" },
]
[[sites]]
name = "home"
up = "10 Mbit/s"
"""
"""One prompt of 400 tokens, whose answer passes a home's uplink."""


@pytest.fixture
def home(tmp_path: Path) -> str:
    (tmp_path / "home.toml").write_text(HOME, encoding="utf-8")
    return str(tmp_path / "home.toml")


def advise(
    candidates: str, budget: str, *overrides: str, target: str = "clustered", **options: Any
) -> dict[str, Any]:
    chosen = Options(budget, candidates, overrides=overrides, **{"jobs": 1, "n_runs": 2, **options})
    answer, text = advise_command(target, chosen)
    return {**answer, "text": text}


def mean_s(outcome: dict[str, Any]) -> float:
    return float(outcome["values"]["e2e_mean"]["value_s"])


def test_servers_that_take_one_session_each_are_worth_what_the_queue_says() -> None:
    """Four requests wait for 0, 1, 2, 3 sessions at one server; for 0, 0, 1, 1 at two; for 0, 0, 0, 1 at three."""
    case = scenario_case("clustered", PolicyChoice(), [*ONE_SERVER, "workload.n_requests=1"], None)
    time_s = simulate(case, "testbed").rows[0].times.e2e_s
    assert time_s is not None
    answer = advise("a100-0@Cluster1=1", "3", *ONE_SERVER)
    assert (answer["method"], answer["n_combinations"], answer["n_tried"]) == ("exact", 4, 4)
    assert answer["best"]["add"] == {"a100-0@Cluster1": 3} and answer["best"]["cost"] == 3
    by_hand = [2.5, 1.5, 1.25, 1.0]
    assert [mean_s(row) / time_s for row in answer["tried"]] == pytest.approx(by_hand, rel=0.003)
    (first,), (less,) = answer["first"], answer["best"]["without_one"]
    assert first["difference"]["e2e_mean"]["mean_s"] == pytest.approx(-time_s, rel=0.003)
    assert less["difference"]["e2e_mean"]["mean_s"] == pytest.approx(0.25 * time_s, rel=0.01)
    assert answer["losses"] == [], "it is the only one"


def test_an_objective_is_reached_for_the_least_cost() -> None:
    answer = advise("a100-0@Cluster1=1,a100@Cluster1=2.5", "5", *ONE_SERVER, slo="queue_p99=10ms")
    assert answer["best"]["add"] == {"a100@Cluster1": 1}, "the whole memory has room for all four"
    assert answer["best"]["is_kept"] and answer["now"]["is_kept"] is False
    assert answer["n_tried"] < answer["n_combinations"] and "others cost more" in answer["text"]
    answer = advise("a100-0@Cluster1=1", "2", *ONE_SERVER, slo="queue_p99=10ms")
    assert answer["best"]["is_kept"] is False and answer["best"]["cost"] == 2
    assert "no combination keeps the objectives; the nearest" in answer["text"]


def test_the_best_is_measured_with_other_seeds_than_those_that_chose_it() -> None:
    answer = advise("mig-1g@Cluster0=1", "1", *SHORT, seed=2, losses=False)
    assert (answer["seeds"], answer["search_seeds"]) == ([2, 3], [4, 5])
    earlier = advise("mig-1g@Cluster0=1", "1", *SHORT, seed=0, losses=False)
    assert earlier["search_seeds"] == answer["seeds"]
    (best,) = (row for row in earlier["tried"] if row["add"] == answer["best"]["add"])
    assert {key: answer["best"][key] for key in ("values", "difference")} == {
        key: best[key] for key in ("values", "difference")
    }
    assert answer["best"]["values"] != earlier["best"]["values"]


def test_objectives_that_are_kept_with_the_seeds_that_chose_the_best_alone_are_not_called_kept() -> None:
    busy = ("workload.n_requests=50", "workload.n_output_tokens=16", "workload.rate=0.5")
    answer = advise("mig-1g@Cluster0=1", "1", *busy, slo="queue_p99=10s", losses=False)
    assert answer["best"]["add"] == {} and answer["best"]["is_kept_in_search"]
    assert not answer["best"]["is_kept"] and not answer["now"]["is_kept"] and answer["tried"][0]["is_kept"]
    assert "keeps the objectives with seeds 2 to 3, but with seeds 0 to 1 it does not" in answer["text"]


def recorded(tmp_path: Path) -> tuple[str, ...]:
    """Overrides with a recording of four windows of five requests, with 1, 2, 4 and 8 tokens out."""
    lines = [
        {"timestamp": 10_000 * i, "input_length": 10, "output_length": 2 ** (i // 5), "hash_ids": []}
        for i in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return (
        *("workload.arrivals=trace", f"workload.file={trace}", "workload.n_requests=5"),
        *("workload.rate=trace", "workload.n_input_tokens=trace", "workload.n_output_tokens=trace"),
    )


def test_the_best_is_measured_with_other_requests_of_a_recording_than_those_that_chose_it(
    tmp_path: Path,
) -> None:
    for n_runs in (1, 2, 3):
        answer = advise("mig-1g@Cluster0=1", "1", *recorded(tmp_path), n_runs=n_runs, losses=False)
        (searched,) = (row for row in answer["tried"] if not row["add"])
        assert searched["values"] != answer["now"]["values"]
        assert answer["drawn"]["draw"] == ("windows" if n_runs < 3 else "bootstrap")
        said = "a window of its own" if n_runs < 3 else "draws 5 requests, in blocks,"
        assert f"each run {'uses ' * (n_runs < 3)}{said}" in answer["text"]
    with pytest.raises(UserError, match="6 seeds need as many windows of 5 requests, but 20 recorded"):
        advise("mig-1g@Cluster0=1", "1", *recorded(tmp_path), "workload.draw=windows", n_runs=3)


@pytest.mark.parametrize("most", [100, 0])
def test_two_more_are_needed_before_blocks_have_a_place(most: int) -> None:
    """Fifteen blocks, five to a server: one more than there is does nothing."""
    answer = advise("part-0@Cluster1=1", "4", *PARTS, "model.n_blocks=15", most=most)
    assert answer["method"] == ("exact" if most else "greedy")
    assert answer["best"]["add"] == {"part-0@Cluster1": 2} and answer["best"]["share_without_placement"] == 0
    assert answer["now"]["share_without_placement"] == 1 and mean_s(answer["best"]) > 0
    assert answer["first"][0]["values"]["e2e_mean"]["value_s"] is None
    assert "no placement" in answer["text"]


def test_a_server_that_makes_it_worse_is_not_added_and_that_is_said() -> None:
    """Helix' placement takes every server into its chain: each of 16 tokens makes one more round trip of 100 ms."""
    scenario = ("servers.1.count=3", "servers.0.count=0", *SHORT)
    answer = advise("mig-1g@Cluster2=1", "1", *scenario, policy="helix")
    (first,) = answer["first"]
    assert first["difference"]["e2e_mean"]["verdict"] == "worse"
    assert first["difference"]["e2e_mean"]["mean_s"] > 16 * 0.1
    assert answer["best"]["add"] == {} and answer["best"]["cost"] == 0
    assert "mig-1g@Cluster2 alone makes it worse" in answer["text"]
    assert "add nothing: no combination is better" in answer["text"]


def test_what_was_better_with_the_other_seeds_only_is_said() -> None:
    few = "workload.n_requests=6", "workload.n_output_tokens=4"
    answer = advise("a100@Cluster1=1", "1", *few, target="churn", losses=False)
    assert answer["best"]["add"] == {"a100@Cluster1": 1}
    assert answer["best"]["difference"]["e2e_mean"]["verdict"] == "equal"
    said = "that was better with seeds 2 to 3, but changes nothing with seeds 0 to 1 (--runs sets more seeds)"
    assert said in answer["text"]
    (better,) = (of for of in answer["best"]["difference"].values())
    worse = {**better, "verdict": "worse", "mean_s": 1.0, "ci95_s": 0.5, "ratio": 0.2}
    answer["best"]["difference"] = answer["first"][0]["difference"] = {"e2e_mean": worse}
    assert "but makes it worse with seeds 0 to 1" in advise_text(answer)
    answer["now"]["n_failed"] = 2.0
    text = advise_text(answer)
    assert "makes it worse" not in text, "two requests more are served, which counts before their times"


def test_a_single_addition_that_costs_less_and_is_not_shown_to_be_worse_is_named() -> None:
    answer = advise("a100@Cluster1=3.5,mig-1g@Cluster0=0.5", "4", *SHORT, policy="petals", losses=False)
    assert answer["best"]["add"] == {"a100@Cluster1": 1}
    best, cheap = answer["first"]
    assert best["against_best"]["e2e_mean"]["mean_s"] == 0
    more_s = mean_s(cheap) - mean_s(answer["best"])
    assert cheap["against_best"]["e2e_mean"]["mean_s"] == pytest.approx(more_s)
    assert cheap["against_best"]["e2e_mean"]["verdict"] == "unresolved"
    said = "not shown to be worse than that over these seeds: 1 mig-1g@Cluster0 alone, for 0.5\n"
    assert said in answer["text"]
    answer = advise("a100-0@Cluster1=1", "2", *ONE_SERVER)
    assert answer["first"][0]["against_best"]["e2e_mean"]["mean_s"] > 1
    assert "not shown to be worse" not in answer["text"]


def test_each_combination_has_the_costs_of_its_tokens_where_servers_have_prices() -> None:
    priced = (*ONE_SERVER, "servers.0.cost_per_hour=2")
    answer = advise("a100@Cluster1=1", "1", *priced, losses=False)
    now, best = (answer[key]["costs"]["cost_per_million_tokens"]["value"] for key in ("now", "best"))
    alone, two = simulate(scenario_case("clustered", PolicyChoice(), [*priced], 0), "testbed"), 2
    span_s = max(row.ended_at_s for row in alone.rows) - min(row.arrived_at_s for row in alone.rows)
    assert now == pytest.approx(2 / 3600 * span_s / (4 * 128) * 1e6)
    assert 0 < best < two * now, "the added server has the price of the one of its hardware"
    assert "cost/1e6 tokens" in answer["text"]
    with pytest.raises(
        UserError, match="the servers have cost_per_hour, and no server is a mig-1g; add a server"
    ):
        advise("mig-1g@Cluster1=1", "1", *priced)
    unpriced = advise("a100@Cluster1=1", "1", *ONE_SERVER, losses=False)
    assert "costs" not in unpriced["now"] and "cost/1e6" not in unpriced["text"]


def test_losses_are_sorted_by_what_they_cost_and_alike_servers_count_once() -> None:
    answer = advise("mig-1g@Cluster0=1", "1", *SHORT)
    assert [(row["server"], row["n_alike"]) for row in answer["losses"]] == [("a100-1", 2), ("mig-1g-6", 7)]
    assert mean_s(answer["losses"][0]) > 1.5 * mean_s(answer["now"])
    answer = advise("mig-1g@Cluster0=1", "1", *SHORT, "servers.1.count=1")
    assert answer["losses"][0]["server"] == "a100-0" and answer["losses"][0]["share_without_placement"] == 1
    assert advise("mig-1g@Cluster0=1", "1", "workload.n_requests=5", losses=False)["losses"] == []


def test_a_server_with_a_fault_hours_or_links_of_its_own_counts_by_itself() -> None:
    killed = "fault=[{kind='kill',server='a100-1',at='0 s'}]"
    losses = advise("mig-1g@Cluster0=1", "1", *SHORT, killed)["losses"]
    assert [(row["server"], row["n_alike"]) for row in losses] == [
        ("a100-0", 1),
        ("mig-1g-6", 7),
        ("a100-1", 1),
    ]
    assert losses[0]["n_failed"] > 0 and losses[2]["reason"], "the one that is left matters most"
    slow = "network.event=[{at='0 s',link=['client-0','a100-0'],rtt='900 ms'}]"
    by_night = "servers=[{hardware='a100',site='Cluster1',hours='20:00-08:00',name='night'},{hardware='a100',site='Cluster1',count=2}]"
    for change, alike in (
        (slow, {"a100-0": 1, "a100-1": 1, "mig-1g-6": 7}),
        (by_night, {"night": 1, "a100-1": 2}),
    ):
        losses = advise("mig-1g@Cluster0=1", "1", *SHORT, change)["losses"]
        assert {row["server"]: row["n_alike"] for row in losses} == alike


def test_nothing_else_moves_when_a_server_is_added_at_a_place_that_the_seed_draws() -> None:
    base = load_experiment("bellcanada", ["seed=3"])
    fleet = Fleet.of(base)
    candidates = parse_candidates("a100@bellcanada-47=1,mig-1g-large-2@a100-large-0=1")
    same = load_experiment("bellcanada", ["seed=3", *fleet.changes(candidates, (0, 0))])
    assert (same.sites, same.problem, same.network.links) == (base.sites, base.problem, base.network.links)
    more = load_experiment("bellcanada", ["seed=3", *fleet.changes(candidates, (1, 1))])
    assert {name: more.sites[name] for name in base.sites} == base.sites
    assert more.sites["a100-0"] == "bellcanada-47"
    assert more.sites["mig-1g-large-21"] == base.sites["a100-large-0"]
    assert more.workload.requests == base.workload.requests
    less = load_experiment("bellcanada", ["seed=3", *fleet.changes(candidates, (0, 0), lost=25)])
    assert set(base.sites) - set(less.sites) == {base.problem.servers[25].name}


def test_a_copy_has_the_memory_of_its_server_and_a_profile_its_own() -> None:
    answer = advise("a100-0@client-0=1,a100@Cluster2=2", "1", *ONE_SERVER)
    copied, named = answer["candidates"]
    assert copied["memory_bytes"] == 13.4e9 and copied["site"] == "Cluster0"
    assert named["memory_bytes"] == 79.13e9 and named["site"] == "Cluster2"
    assert [row["is_paid"] for row in answer["first"]] == [True, False]


def test_what_is_measured_is_kept_and_workers_change_nothing(tmp_path: Path) -> None:
    given = ("a100-0@Cluster1=1", "2", *ONE_SERVER)
    one = advise(*given, out=tmp_path / "kept")
    n_runs = (tmp_path / "kept" / RUNS).read_bytes().count(b"\n")
    assert n_runs == 3 * 2 * 2 == one["n_computed"], "seeds that choose, and as many that measure"
    again, anew = advise(*given, out=tmp_path / "kept", jobs=2), advise(*given, jobs=2)
    assert (again["n_computed"], again["n_found"], anew["n_found"]) == (0, n_runs, 0)
    about_runs = ("out", "n_computed", "n_found", "text")
    of = [{key: value for key, value in each.items() if key not in about_runs} for each in (one, again, anew)]
    assert of[0] == of[1] == of[2]
    assert (tmp_path / "kept" / RUNS).read_bytes().count(b"\n") == n_runs
    (tmp_path / "letter.txt").write_text("")
    with pytest.raises(UserError, match="holds something else already"):
        advise(*given, out=tmp_path)


def test_a_wider_uplink_is_worth_what_its_rates_say(home: str) -> None:
    alone = "servers=[{hardware='a100',name='near',site='home',memory='9 GB'}]"
    answer = advise("uplink@home=100 Mbit/s=2", "2", alone, target=home, n_runs=1)
    n_bits = 8 * 400 * load_experiment(home).problem.model.token_bytes
    (first,) = answer["first"]
    saved_s = n_bits * (1 / 10e6 - 1 / 100e6)
    assert first["difference"]["e2e_mean"]["mean_s"] == pytest.approx(-saved_s, rel=0.05), (
        "and packets have headers"
    )
    assert answer["best"]["add"] == {"uplink@home=100 Mbit/s": 1} and answer["best"]["cost"] == 2
    (described,) = answer["candidates"]
    assert (described["link"], described["site"]) == ("uplink", "home")
    assert (described["now_bps"], described["rate_bps"]) == (10e6, 100e6)
    assert "add 1 uplink@home=100 Mbit/s for 2" in answer["text"]
    assert answer["engine"] == "fast" and f"engine fast: {answer['engine_why']}" in answer["text"]


@pytest.mark.parametrize("most", [100, 0])
def test_one_link_is_widened_once_whatever_names_its_site(home: str, most: int) -> None:
    given = "uplink@home=20 Mbit/s,uplink@near=100 Mbit/s,near@home=1"
    answer = advise(given, "3", target=home, n_runs=1, most=most, losses=False)
    adds = [row["add"] for row in answer["tried"]]
    assert answer["method"] == ("exact" if most else "greedy")
    assert {"uplink@near=100 Mbit/s": 1, "near@home": 2} in adds, (
        "beside servers, of which there may be several"
    )
    assert all(sum(add.get(name, 0) for name in given.split(",")[:2]) <= 1 for add in adds)


def test_the_loss_of_a_site_s_last_server_takes_its_links_along(home: str) -> None:
    answer = advise("uplink@home=20 Mbit/s", "1", target=home, n_runs=1)
    assert {row["server"]: row["reason"] for row in answer["losses"]} == {"near": None, "far": None}
    assert answer["best"]["without_one"][0]["candidate"] == "uplink@home=20 Mbit/s"


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ("uplink@home", "must be LINK@PLACE=RATE=COST, for example uplink@home=100 Mbit/s=2"),
        ("uplink=100 Mbit/s", "must be LINK@PLACE=RATE=COST"),
        ("uplink@home=3", '"3" has no unit'),
        ("uplink@home=0 Mbit/s", "the uplink of home has 10 Mbit/s already; give a higher rate"),
        ("uplink@near=10 Mbit/s", "the uplink of home has 10 Mbit/s already; give a higher rate"),
        ("uplink@home=1 Gbit/s=0", "the cost of uplink@home must be a number above 0"),
        ("uplink@hom=1 Gbit/s", 'unknown site "hom" (did you mean "home"?); valid: cloud, home, out'),
        ("uplink@cloud=1 Gbit/s", "cloud has no uplink of its own to widen; valid: home"),
        ("downlink@home=1 Gbit/s", "home has no downlink of its own to widen; give it one in [[sites]]"),
        ("uplink@home=1 Gbit/s,uplink@home=1000 Mbit/s", "uplink@home=1 Gbit/s is given twice"),
    ],
)
def test_a_link_that_cannot_be_widened_is_one_sentence(home: str, candidate: str, said: str) -> None:
    with pytest.raises(UserError) as wrong:
        advise(candidate, "4", target=home)
    sentence = str(wrong.value)
    assert sentence.startswith("--candidates: ") and said in sentence and "\n" not in sentence


def test_advice_that_is_stopped_says_how_to_go_on(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_left = 3

    def measure(*given: Any) -> dict[str, Any]:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise KeyboardInterrupt
        return load_measures(*given)

    monkeypatch.setattr(command, "load_measures", measure)
    given = ("uplink@home=20 Mbit/s", "1")
    with pytest.raises(KeyboardInterrupt, match=r"stopped; runs/advise-home-\w+ keeps 3 runs: the same"):
        advise(*given, target=home)
    monkeypatch.undo()
    monkeypatch.chdir(Path(home).parent)
    answer = advise(*given, target=home)
    assert answer["n_found"] == 3 and answer["n_computed"] > 0


@pytest.mark.parametrize(
    ("candidates", "budget", "options", "said"),
    [
        ("a100@Cluster1", "4", {}, "LIKE@PLACE=COST"),
        ("a100=1", "4", {}, "LIKE@PLACE=COST"),
        ("", "4", {}, "LIKE@PLACE=COST"),
        ("a100@Cluster1=0", "4", {}, "must be a number above 0"),
        ("a100@Cluster1=x", "4", {}, "must be a number above 0"),
        ("a100@Cluster1=1e999999999", "4", {}, "must be a number above 0"),
        ("a100@Cluster1=1", "nan", {}, "must be a number above 0"),
        ("a100@Cluster1=1,a100@Cluster1=2", "4", {}, "given twice"),
        ("a100@Cluster1=1", "-1", {}, "--budget must be a number above 0"),
        (
            "a100@Cluster1=3.5",
            "3",
            {},
            "--budget 3 pays none of the candidates: the cheapest, a100@Cluster1, costs 3.5",
        ),
        ("a101@Cluster1=1", "4", {}, "--candidates: a101@Cluster1: unknown hardware"),
        ("a100@Cluster9=1", "4", {}, '--candidates: a100@Cluster9: unknown site "Cluster9"'),
        (
            "a100@Cluster1=1",
            "4",
            {"metric": "ttft"},
            "--metric: unknown objective 'ttft'; write METRIC_STATISTIC",
        ),
        ("a100@Cluster1=1", "4", {"slo": "ttft=5s"}, "--slo: unknown objective 'ttft'"),
        ("a100@Cluster1=1", "4", {"slo": "ttft_p95=5s", "metric": "ttft_p95"}, "not both"),
        ("a100@Cluster1=1", "4", {"n_runs": 0}, "--runs must be at least 1"),
        ("a100@Cluster1=1", "4", {"policy": "petal"}, "policy petal"),
    ],
)
def test_options_of_advise_that_cannot_be_are_refused_before_anything_runs(
    candidates: str, budget: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        advise(candidates, budget, **options)
