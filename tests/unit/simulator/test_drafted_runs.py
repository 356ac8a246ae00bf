"""Runs with speculative decoding: the fast engine beside the testbed itself, and both beside the law."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from testbed.errors import ScenarioError, UserError
from testbed.experiments import changed, load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.slo import Objectives
from testbed.page.header import header
from testbed.simulator.cases import Case
from testbed.simulator.command import Options, simulate_command
from testbed.simulator.engine import simulate
from testbed.simulator.summary import summarize_simulation
from tests.unit.simulator.test_engines_agree import ASYMMETRIC
from tests.unit.simulator.test_paged_runs import SCARCE

DRAFTS = ("decoding.drafter=ngram", "decoding.acceptance=0.7", "decoding.draft_token=2 ms")
WIDE = tuple(f"network.pairs.{pair}.rate='1000000 Gbit/s'" for pair in range(6))
EXACTLY = ("request", "token", "hop", "server", "up_bytes", "down_bytes", "replayed_tokens")
NEARLY = ("sent_at_s", "arrived_at_s", "departed_at_s", "received_at_s", "hop_client_s")


def served(folder: Path, clock: str | None, *more: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The summary, and ``requests.parquet`` and ``hops.parquet`` as columns."""
    options = Options((PolicyChoice(),), overrides=more, out=folder, clock=clock)
    assert simulate_command(["clustered"], options, as_json=True) == 0
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    columns: dict[str, list[Any]] = {}
    for table in ("requests", "hops"):
        found = pq.read_table(folder / f"{table}.parquet").to_pydict()
        columns |= {f"{table}.{name}": values for name, values in found.items()}
    return summary, columns


def check_same(tmp_path: Path, *more: str, abs_s: float) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Served by both engines, with the same tables: times within ``abs_s``, all else exactly."""
    fast, tables = served(tmp_path / "fast", None, *more)
    virtual, system = served(tmp_path / "virtual", "virtual", *more)
    assert (fast["engine"], virtual["engine"]) == ("simulation", "emulation")
    assert fast["speculation"] == virtual["speculation"]
    rounds = ("n_rounds", "n_drafted", "n_accepted", "n_preemptions", "n_tokens_done")
    for name in (*(f"requests.{one}" for one in rounds), *(f"hops.{one}" for one in EXACTLY)):
        assert tables[name] == system[name], name
    for name in ("requests.ttft_s", "requests.e2e_s", *(f"hops.{one}" for one in NEARLY)):
        assert tables[name] == pytest.approx(system[name], abs=abs_s), name
    return fast, tables


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("drafter", ["ngram", "petals"])
def test_the_engines_have_the_same_rounds_and_tables(
    tmp_path: Path, communication: str, drafter: str
) -> None:
    more = f"policy.communication={communication}", f"decoding.drafter={drafter}", "compute.hub_token=3 ms"
    few = "workload.n_requests=5", "workload.n_output_tokens=40", "model.hidden_size=112", "workload.rate=1"
    summary, tables = check_same(tmp_path, *DRAFTS, *WIDE, *few, *more, abs_s=1e-9)
    drafts = summary["speculation"]
    assert drafts["drafter"] == drafter
    assert drafts["n_rounds"] == sum(tables["requests.n_rounds"]) < 0.6 * 5 * 39
    assert drafts["tokens_per_round"] == pytest.approx(5 * 39 / drafts["n_rounds"])
    if drafter == "ngram":
        assert drafts["n_accepted"] == 5 * 39 - drafts["n_rounds"]


def test_a_request_that_ends_before_its_first_round_has_made_none() -> None:
    """Some of these requests have their only token, for the others there is no room."""
    few = "workload.n_requests=10", "workload.rate=1000", "backoff.give_up=50 ms", "model.hidden_size=112"
    long = "workload.n_input_tokens=4000", "workload.n_output_tokens=1"
    case = Case(load_experiment("clustered", [*DRAFTS, *few, *long]))
    for is_virtual in (False, True):
        rows = simulate(case, "testbed", is_virtual=is_virtual).rows
        assert {row.status for row in rows} == {"completed", "failed"}
        assert {(row.n_rounds, row.n_drafted, row.n_accepted) for row in rows} == {(0, 0, 0)}


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("replay", ["at_once", "step_by_step"])
def test_preempted_sessions_replay_their_rounds_and_go_back(
    tmp_path: Path, communication: str, replay: str
) -> None:
    more = f"policy.communication={communication}", f"recovery.replay={replay}"
    summary, tables = check_same(tmp_path, *SCARCE, *DRAFTS, *more, abs_s=1e-8)
    assert summary["preemption"]["n_preemptions"] > 3
    assert all(done == 32 for done in tables["requests.n_tokens_done"])


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_sessions_that_choose_how_much_they_draft_choose_the_same_in_both_engines(
    tmp_path: Path, communication: str
) -> None:
    more = f"policy.communication={communication}", "decoding.tokens=auto"
    summary, _ = check_same(tmp_path, *SCARCE, *DRAFTS, *more, abs_s=1e-8)
    drafts = summary["speculation"]
    assert summary["preemption"]["n_preemptions"] > 3
    assert drafts["n_drafted"] > 2 * drafts["n_rounds"]


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_drafts_are_verified_together_with_other_sessions_steps(tmp_path: Path, communication: str) -> None:
    more = f"policy.communication={communication}", "compute.batching=continuous", "workload.rate=20"
    few = "workload.n_requests=8", "workload.n_output_tokens=40", "model.hidden_size=112"
    slow = "hardware.a100.decode=30 ms", "hardware.a100.base=a100", "hardware.a100.session_slope=1 ms"
    _, tables = check_same(tmp_path, *DRAFTS, *WIDE, *few, *more, *slow, abs_s=1e-9)
    assert max(tables["hops.batch_steps"]) > 2
    assert max(tables["hops.batch_tokens"]) > 2 * 6


def test_messages_of_several_tokens_take_their_links_as_in_the_testbed(tmp_path: Path) -> None:
    path = tmp_path / "drawn.toml"
    path.write_text(ASYMMETRIC)
    for communication in ("hub-spoke", "server-to-server"):
        more = f'policy.communication="{communication}"', "decoding.tokens=3", *DRAFTS
        case = Case(load_experiment(str(path), more))
        fast, virtual = (simulate(case, "testbed", is_virtual=is_virtual) for is_virtual in (False, True))
        for one, other in zip(fast.rows, virtual.rows, strict=True):
            assert one.n_rounds == other.n_rounds
            assert one.times.e2e_s == pytest.approx(other.times.e2e_s, rel=3e-3)
            assert other.times.e2e_s == pytest.approx(other.model.e2e_s, rel=3e-3)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_token_takes_its_share_of_a_round(acceptance: float, tokens: int) -> None:
    """A round's time is that of its closed form, and its tokens are the law's mean, as far as few rounds show it."""
    more = "policy.name=petals", "workload.n_requests=1", "workload.n_output_tokens=2049", *WIDE
    of = f"decoding.acceptance={acceptance}", f"decoding.tokens={tokens}"
    experiment = load_experiment("clustered", [*more, *DRAFTS, *of])
    simulation = simulate(Case(experiment), "testbed")
    drafts, times = summarize_simulation(simulation, Objectives()).speculation, simulation.rows[0].times
    plain = simulate(Case(load_experiment("clustered", more)), "testbed").rows[0]
    assert plain.chain == simulation.rows[0].chain

    def round_s(drafted: int) -> float:
        more_s = 0.0
        for hop in plain.hops if drafted else ():
            server = experiment.problem.servers[hop.server]
            more_s += hop.n_blocks * (server.prefill_s(drafted + 1) - server.decode_s)
        return plain.times.tpot_s + drafted * 0.002 + more_s

    decoding, n_done, expected_s = experiment.problem.decoding, 1, 0.0
    while n_done < 2049:
        drawn = decoding.drawn(0, n_done, min(tokens, 2049 - n_done - 1))  # the last rounds may be cut
        expected_s += round_s(drawn.drafted)
        n_done += drawn.made
    assert 2048 * times.tpot_s == pytest.approx(expected_s, rel=1e-6)
    law = (1 - acceptance ** (tokens + 1)) / (1 - acceptance) if acceptance < 1 else tokens + 1
    assert drafts.tokens_per_round == pytest.approx(law, rel=0.1 if 0 < acceptance < 1 else 0.01)


def test_without_drafts_all_is_as_if_there_were_no_such_table() -> None:
    few = "workload.n_requests=3", "workload.n_output_tokens=8"
    plain = load_experiment("clustered", few)
    none = load_experiment("clustered", [*few, "decoding.drafter=none", "decoding.tokens=3"])
    assert none == plain and none.document == plain.document
    simulation = simulate(Case(none), "testbed")
    assert "speculation" not in summarize_simulation(simulation, Objectives())
    assert "drafts" not in header(none, simulation.plan)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("tokens=3",), "ngram, 3 per round"),
        (("tokens=auto",), "ngram, auto per round"),
        (("tokens=3", "in_flight=2"), "ngram, 3 per round, 2 rounds in flight"),
    ],
)
def test_pages_and_simulations_say_how_clients_draft(keys: tuple[str, ...], words: str) -> None:
    few = "workload.n_requests=2", "workload.n_output_tokens=8", *(f"decoding.{key}" for key in keys)
    experiment = load_experiment("clustered", [*DRAFTS, *few])
    assert header(experiment, simulate(Case(experiment), "testbed").plan)["drafts"] == words


def test_the_reference_has_no_drafts() -> None:
    with pytest.raises(UserError, match=r"decoding\.drafter has no meaning in the reference mode"):
        simulate(Case(load_experiment("clustered", DRAFTS)), "reference")


@pytest.mark.parametrize(("policy", "knows"), [("proposed", True), ("petals", False)])
def test_policies_that_count_drafts_place_and_route_otherwise_and_those_of_others_do_not(
    policy: str, knows: bool
) -> None:
    """Where a token has a small share of a round trip, computing counts: more blocks go to fast servers' hops."""
    many = "decoding.drafter=ngram", "decoding.tokens=16", "decoding.acceptance=1.0"
    chosen = f"policy.name={policy}", "workload.n_requests=1"
    plain, drafting = (
        simulate(Case(load_experiment("clustered", [*chosen, *more])), "testbed") for more in ((), many)
    )
    assert plain.placement is not None and drafting.placement is not None
    assert (plain.placement.ranges != drafting.placement.ranges) == knows
    assert (plain.rows[0].chain != drafting.rows[0].chain) == knows


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["decoding.drafter=ngram"], "acceptance: is missing: the stub drafts no text"),
        (["decoding.tokens=3"], "tokens: is of speculative decoding; name a drafter"),
        ([*DRAFTS, "decoding.acceptance=1.5"], "acceptance: must be a number from 0 to 1, a list"),
        ([*DRAFTS, "decoding.acceptance=[2, -1]"], "acceptance: must be a number from 0 to 1, a list"),
        ([*DRAFTS, "decoding.acceptance=no-such-file"], "acceptance: cannot read .*no-such-file"),
        ([*DRAFTS, "decoding.tokens=129"], "tokens: is 129, but no request has more than 128 output tokens"),
        ([*DRAFTS, "decoding.tokens=0"], 'tokens: must be "auto" or a whole number of at least 1'),
        ([*DRAFTS, "decoding.draft_model=x"], 'draft_model: is only for drafter = "model" or "petals"'),
    ],
)
def test_wrong_keys_are_refused_in_one_sentence(sets: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=rf"decoding\.{message}"):
        load_experiment("clustered", sets)


def test_acceptance_may_be_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "rounds.txt").write_text("0\n3\n1\n")
    of_file = load_experiment("clustered", [*DRAFTS, f"decoding.acceptance={tmp_path}/rounds.txt"])
    assert of_file == load_experiment("clustered", [*DRAFTS, "decoding.acceptance=[0, 3, 1]"])
    assert of_file.problem.decoding is not None
    assert of_file.problem.decoding.rates == (2 / 3, 1 / 2, 1.0)


@pytest.mark.parametrize("key", ["tokens=auto", "acceptance=[3, 0, 1]", "drafter=petals"])
def test_what_a_run_stores_has_its_drafts(key: str) -> None:
    experiment = load_experiment("clustered", [*DRAFTS, f"decoding.{key}"])
    assert changed(experiment, {}) == experiment


@pytest.mark.parametrize(("tokens", "acceptance", "warns"), [("5", 0.7, True), ("auto", 0.7, False)])
def test_drafts_that_cost_more_than_they_bring_are_named(
    tokens: str, acceptance: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    how = "decoding.drafter=ngram", f"decoding.tokens={tokens}", f"decoding.acceptance={acceptance}"
    with caplog.at_level(logging.WARNING, logger="testbed"):
        load_experiment("clustered", how)
        assert ("a token takes about 2.3 times as long as without" in caplog.text) is warns
        caplog.clear()
        load_experiment("helix-24", how)
        assert "decoding" not in caplog.text
