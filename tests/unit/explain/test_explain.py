from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testbed.errors import UserError
from testbed.experiments.policy import PolicyChoice
from testbed.simulator.cases import scenario_case
from testbed.simulator.command import Options, simulate_command
from testbed.simulator.engine import simulate
from testbed.studies.explain.account import OF_HOPS, PARTS
from testbed.studies.explain.command import explain_command
from testbed.studies.explain.text import explain_text

SHORT = ("workload.n_requests=30", "workload.n_output_tokens=16", "workload.rate=2")
FULL = ("workload.n_output_tokens=64", "workload.n_requests=60")
VARIANTS: dict[str, tuple[str, ...]] = {
    "alone": (),
    "batches": ("compute.batching=continuous",),
    "one at a time": ("compute.batching=serial",),
    "forwarding": ("policy.communication=server-to-server",),
    "calibrated": ("calibration.token_overhead=30 ms", "calibration.input_overhead_base=50 ms"),
    "drafts": ("decoding.drafter=ngram", "decoding.acceptance=0.7", "decoding.draft_token=3 ms"),
    "a client that computes": ("compute.hub_token=20 ms",),
    "a server that dies": ("fault=[{kind='kill',server='a100-0',at='5 s',for='10 s'}]",),
}


def explain(request: int, *overrides: str, policy: str | None = None) -> dict[str, Any]:
    answer, text = explain_command("clustered", request, policy, [*SHORT, *overrides], None)
    assert f"request {request} of client-0 took {answer['e2e_s']:.3f} s" in text
    return answer


def check_sums(answer: dict[str, Any]) -> None:
    parts = answer["parts"]
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(answer["e2e_s"], abs=1e-9)
    assert abs(parts["rest_s"]) < 1e-6, "everything has a name"
    for name in OF_HOPS:
        assert parts[name] == pytest.approx(sum(hop[name] for hop in answer["hops"]), abs=1e-9)
    assert not (answer["lost_to_others_s"] and answer["lost_to_machine_s"])
    beyond_s = answer["lost_to_others_s"] + answer["lost_to_machine_s"] + parts["compute_slower_s"]
    beyond_s += parts["halted_s"]
    alone_s = answer["own_chain_alone"]["e2e_s"] - answer.get("saved_by_caches_s", 0.0)
    assert beyond_s == pytest.approx(answer["e2e_s"] - alone_s)
    if not answer["down_meanwhile"]:
        assert answer["best_chain_alone"]["e2e_s"] <= answer["own_chain_alone"]["e2e_s"] + 1e-9


@pytest.mark.parametrize("prefix", ["session", "shared"])
def test_what_kept_caches_save_is_no_gain_from_others(prefix: str) -> None:
    talk = ("workload.n_requests=3", "workload.turns=3", "workload.think_time=5 s")
    answer = explain(2, *talk, "workload.n_further_tokens=80", f"cache.prefix={prefix}")
    check_sums(answer)
    assert answer["n_cached_tokens"] > 100 and answer["saved_by_caches_s"] > 1
    assert answer["lost_to_others_s"] == 0 and answer["lost_to_machine_s"] == pytest.approx(0, abs=2e-3)
    assert (
        f"tokens of its prompt were kept there: that saved {answer['saved_by_caches_s']:.3f} s"
        in explain_text(answer)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parts_add_up_to_the_request(variant: str) -> None:
    answer = explain(12, *VARIANTS[variant])
    check_sums(answer)
    assert answer["hops"] and answer["hops"][0]["first_block"] == 0
    if variant in ("batches", "one at a time"):
        assert answer["parts"]["compute_shared_s"] > 0.1
    elif variant != "a server that dies":
        assert abs(answer["parts"]["compute_shared_s"]) < 1e-9 and answer["parts"]["transmission_s"] >= -1e-9
    assert abs(answer["parts"]["compute_slower_s"]) < 1e-9
    if variant == "a client that computes":
        assert answer["parts"]["client_s"] == pytest.approx(16 * 0.02)


def test_a_request_alone_takes_what_its_chain_takes_alone() -> None:
    answer = explain(0, "workload.n_requests=1")
    check_sums(answer)
    assert answer["n_attempts"] == 1 and answer["parts"]["queue_s"] == 0
    assert answer["lost_to_others_s"] == 0
    assert answer["lost_to_machine_s"] == pytest.approx(0, abs=2e-3)  # what frames have beside hidden states
    assert "due to others" not in explain_text(answer)
    for name in ("setup_wait_s", "link_wait_s", "network_rest_s", "compute_slower_s"):
        assert answer["parts"][name] == pytest.approx(0, abs=1e-4), name


def test_a_request_whose_text_ended_early_is_alone_for_the_tokens_that_came(tmp_path: Path) -> None:
    simulate_command(["clustered"], Options((PolicyChoice(),), overrides=SHORT, out=tmp_path), as_json=True)
    before, _ = explain_command(str(tmp_path), 12, None, [], None)
    table = pq.read_table(tmp_path / "requests.parquet")
    asked_for = pa.array([100] * table.num_rows)
    place = table.column_names.index("n_output_tokens")
    pq.write_table(table.set_column(place, "n_output_tokens", asked_for), tmp_path / "requests.parquet")
    after, text = explain_command(str(tmp_path), 12, None, [], None)
    assert after == before and "16 out" in text


def test_a_request_of_the_mode_reference_is_not_said_to_open_its_chain(tmp_path: Path) -> None:
    one = ("workload.n_requests=1",)
    options = Options((PolicyChoice(),), mode="reference", overrides=one, out=tmp_path / "run")
    simulate_command(["clustered"], options, as_json=True)
    answer, _ = explain_command(str(tmp_path / "run"), 0, None, [], None)
    check_sums(answer)
    assert answer["own_chain_alone"]["e2e_s"] == pytest.approx(answer["e2e_s"])
    (row,) = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert row["unqueued_e2e_s"] == pytest.approx(row["e2e_s"])


def test_waiting_counts_attempts_and_hindsight_shows_a_worse_chain() -> None:
    case = scenario_case("clustered", PolicyChoice("petals"), [*SHORT, *FULL], None)
    asked = max(simulate(case, "testbed").rows, key=lambda row: row.n_rejections)
    answer = explain(asked.request, *FULL, policy="petals")
    check_sums(answer)
    assert answer["n_attempts"] == asked.n_rejections + 1 > 1
    assert answer["parts"]["queue_s"] == pytest.approx(asked.times.queue_s)
    others_s = sum(answer["parts"][name] for name in ("queue_s", "link_wait_s", "setup_wait_s"))
    assert answer["lost_to_others_s"] == pytest.approx(others_s, abs=0.01)
    assert answer["parts"]["link_wait_s"] > 0.1, "messages met on links"
    said = explain_text(answer)
    assert "s are due to others" in said and "failures" not in said


LONG = (
    *("workload.n_requests=5", "workload.n_input_tokens=300"),
    *("workload.n_output_tokens=3", "workload.rate=5"),
)


def test_long_prompts_wait_for_links_in_both_engines(tmp_path: Path) -> None:
    case = scenario_case("clustered", PolicyChoice(), LONG, None)
    simulate(case, "testbed", is_virtual=True, folder=tmp_path / "run", live=False)
    for number in (0, 4):
        answer, text = explain_command("clustered", number, None, LONG, None)
        of_system, _ = explain_command(str(tmp_path / "run"), number, None, [], None)
        for found in (answer, of_system):
            check_sums(found)
            assert abs(found["parts"]["compute_shared_s"]) < 1e-9 and found["parts"]["network_rest_s"] < 0.05
        waited_s = of_system["parts"]["link_wait_s"]
        # Where two results share a window, in which order their parts leave differs by some of them: 23 ms of 8 s.
        assert answer["parts"]["link_wait_s"] == pytest.approx(waited_s, rel=0.05, abs=1e-3)
        assert ("waiting for links" in text) == (waited_s > 5e-4)
        assert waited_s > 0.5 or number == 0
        waited_s = of_system["parts"]["setup_wait_s"]
        assert answer["parts"]["setup_wait_s"] == pytest.approx(waited_s, rel=0.02, abs=1e-3)
        assert waited_s > 0.1 or number == 0
        assert answer["hops"][0]["link_wait_s"] == pytest.approx(
            of_system["hops"][0]["link_wait_s"], rel=0.05, abs=1e-3
        )


CHANGES = {
    "slower": "{at='0 s',link=['Cluster0','Cluster1'],rate='10 Mbit/s'}",
    "cut": "{at='4 s',for='5 s',link=['Cluster0','Cluster1'],down=true}",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_simulation_s_folder_has_the_parts_of_the_run_s_where_links_change(
    change: str, tmp_path: Path
) -> None:
    options = ("workload.n_requests=2", "workload.n_output_tokens=16", f"network.event=[{CHANGES[change]}]")
    case = scenario_case("clustered", PolicyChoice(), options, None)
    answers = []
    for engine, is_virtual in (("fast", False), ("virtual", True)):
        folder = tmp_path / engine
        if is_virtual:
            simulate(case, "testbed", is_virtual=True, folder=folder, live=False)
        else:
            command = Options((PolicyChoice(),), overrides=options, out=folder)
            simulate_command(["clustered"], command, as_json=True)
        answers.append(explain_command(str(folder), 0, None, [], None)[0])
    fast, system = answers
    assert fast["parts"] == pytest.approx(system["parts"], abs=1e-6)
    # The prompt's 20 hidden states and 15 of tokens, each way on two hops; while the link is cut nothing is transmitted.
    at_rest_s = 2 * 2 * (20 + 15) * 28_672 * 8 / 100e6
    factor = 10 if change == "slower" else 1
    assert fast["parts"]["transmission_s"] == pytest.approx(factor * at_rest_s, rel=0.05)
    if change == "cut":
        assert fast["parts"]["network_rest_s"] > 4.9


SLOW = "fault=[{kind='slow',server='a100-0',at='0 s',factor=3}]"


@pytest.mark.parametrize("batching", ["none", "continuous"])
def test_what_a_slowed_server_takes_has_a_name_of_its_own(batching: str) -> None:
    alone = explain(0, "workload.n_requests=1", f"compute.batching={batching}", SLOW)
    check_sums(alone)
    hop = next(hop for hop in alone["hops"] if hop["server"] == "a100-0")
    assert hop["compute_slower_s"] == pytest.approx(2 * hop["compute_alone_s"]) and hop["compute_alone_s"] > 1
    assert alone["parts"]["compute_slower_s"] == pytest.approx(hop["compute_slower_s"], abs=1e-9)
    assert alone["parts"]["compute_shared_s"] == pytest.approx(0, abs=1e-9)
    assert alone["lost_to_others_s"] == pytest.approx(0, abs=2e-3)
    said = explain_text(alone)
    assert "slower than the profile" in said and "to servers slower than their profile" in said
    if batching == "continuous":
        shared = explain(12, f"compute.batching={batching}", SLOW)
        check_sums(shared)
        assert shared["parts"]["compute_slower_s"] > 1 < shared["parts"]["compute_shared_s"]


@pytest.mark.parametrize("batching", ["none", "continuous"])
def test_the_time_in_which_a_server_was_halted_is_not_blamed_on_others_or_its_speed(batching: str) -> None:
    halt = "fault=[{kind='stop',server='a100-0',at='5 s',for='2 s'}]"
    alone = explain(0, "workload.n_requests=1", f"compute.batching={batching}", halt)
    check_sums(alone)
    # It halts while a step is there, which would have ended meanwhile.
    assert 1.5 < alone["parts"]["halted_s"] <= 2
    assert alone["parts"]["compute_slower_s"] == pytest.approx(0, abs=1e-9)
    assert alone["lost_to_others_s"] == pytest.approx(0, abs=5e-3)
    assert "s to halted servers" in explain_text(alone)
    if batching == "continuous":
        shared = explain(3, "workload.rate=2", f"compute.batching={batching}", halt)
        check_sums(shared)
        assert shared["parts"]["halted_s"] > 1 < shared["parts"]["compute_shared_s"]


def test_a_session_that_outlived_a_server_has_its_replays_named(tmp_path: Path) -> None:
    overrides = (*SHORT, *VARIANTS["a server that dies"])
    options = Options((PolicyChoice(),), overrides=overrides, out=tmp_path / "run")
    simulate_command(["clustered"], options, as_json=True)
    answers = [explain_command(str(tmp_path / "run"), n, None, [], None)[0] for n in range(8)]
    hit = [answer for answer in answers if answer["n_recoveries"]]
    assert hit, "the fault met a session"
    for answer in hit:
        check_sums(answer)
        assert answer["parts"]["replays_s"] > 0
        (loss,) = answer["losses"]
        (server,) = loss["servers"]
        assert answer["down_meanwhile"] == [server] and loss["on_again_at_s"] > loss["at_s"]
        assert server in {hop["server"] for hop in answer["own_chain_alone"]["hops"]}
        best = answer["best_chain_alone"]
        assert best is None or server not in {hop["server"] for hop in best["hops"]}
        said = explain_text(answer)
        assert (
            f"it lost {server} at {loss['at_s']:.3f} s, and went on at {loss['on_again_at_s']:.3f} s" in said
        )
        assert "s are due to others and to failures" in said
        assert f"without {server}, down meanwhile" in said and "alone on its first chain" in said
        without_any = {**answer, "best_chain_alone": None, "lost_to_chain_s": None}
        assert f"without {server}, down meanwhile, holds all blocks and has room" in explain_text(without_any)


def test_a_run_s_folder_says_the_same_as_its_scenario(tmp_path: Path) -> None:
    options = Options((PolicyChoice("petals"),), overrides=SHORT, out=tmp_path / "run")
    simulate_command(["clustered"], options, as_json=True)
    of_run, _ = explain_command(str(tmp_path / "run"), 12, None, [], None)
    of_scenario = explain(12, policy="petals")
    assert of_run["engine"] == "fast"
    for answer in (of_run, of_scenario):
        del answer["target"]
    assert of_run == json.loads(json.dumps(of_scenario))
    assert not of_run["in_real_time"] and "this machine" not in explain_text(of_run)
    with pytest.raises(UserError, match="is a finished run, which options cannot change"):
        explain_command(str(tmp_path / "run"), 12, "petals", [], None)
    with pytest.raises(UserError, match="there is no request 30: they are 0 to 29"):
        explain_command(str(tmp_path / "run"), 30, None, [], None)


def test_what_the_machine_took_of_a_run_in_real_time_is_the_difference_to_its_twin(tmp_path: Path) -> None:
    run, twin = tmp_path / "run", tmp_path / "run" / "twin"
    options = Options((PolicyChoice("petals"),), overrides=[*SHORT, "compute.batching=continuous"], out=run)
    simulate_command(["clustered"], options, as_json=True)
    of_others, _ = explain_command(str(run), 12, None, [], None)
    shutil.copytree(run, twin)
    rows = pq.read_table(twin / "requests.parquet").to_pydict()
    rows["e2e_s"][12] -= 0.25
    pq.write_table(pa.table(rows), twin / "requests.parquet")
    for name, changes in (
        ("plan.json", {"network": "fabric", "clock": {"name": "real", "why": "asked for"}}),
        ("summary.json", {"emulation_error_pairing": "requests"}),
    ):
        (run / name).write_text(json.dumps(json.loads((run / name).read_bytes()) | changes))
    answer, text = explain_command(str(run), 12, None, [], None)
    assert answer["twin_e2e_s"] == pytest.approx(answer["e2e_s"] - 0.25)
    assert answer["lost_to_machine_s"] == pytest.approx(0.25)
    assert answer["lost_to_others_s"] == pytest.approx(of_others["lost_to_others_s"] - 0.25)
    assert f"0.250 s to this machine (its twin took {answer['twin_e2e_s']:.3f} s)" in " ".join(text.split())
    shutil.rmtree(twin)  # by hand: then nobody knows what is the machine's
    assert explain_command(str(run), 12, None, [], None)[0] == answer | {
        "twin_e2e_s": None,
        "twin_parts": None,
        "lost_to_machine_s": 0.0,
        "lost_to_others_s": of_others["lost_to_others_s"],
    }


def test_steps_that_the_machine_prolonged_count_once(tmp_path: Path) -> None:
    run, twin = tmp_path / "run", tmp_path / "run" / "twin"
    options = Options((PolicyChoice("petals"),), overrides=[*SHORT, "workload.rate=0.3"], out=run)
    simulate_command(["clustered"], options, as_json=True)
    of_twin, _ = explain_command(str(run), 12, None, [], None)
    shutil.copytree(run, twin)
    requests, hops = (pq.read_table(run / f"{name}.parquet").to_pydict() for name in ("requests", "hops"))
    last = max(i for i, request in enumerate(hops["request"]) if request == 12)
    for table, row, names in (
        (requests, 12, ("e2e_s", "ended_at_s")),
        (hops, last, ("departed_at_s", "received_at_s", "hop_compute_s")),
    ):
        for name in names:
            table[name][row] += 0.25
    pq.write_table(pa.table(requests), run / "requests.parquet")
    pq.write_table(pa.table(hops), run / "hops.parquet")
    (run / "summary.json").write_text(
        json.dumps(json.loads((run / "summary.json").read_bytes()) | {"emulation_error_pairing": "requests"})
    )
    answer, text = explain_command(str(run), 12, None, [], None)
    assert answer["parts"]["compute_slower_s"] == pytest.approx(0.25)
    assert answer["lost_to_machine_s"] == pytest.approx(0.25)
    assert answer["lost_to_others_s"] == pytest.approx(of_twin["lost_to_others_s"])
    assert answer["twin_parts"] == pytest.approx(of_twin["parts"])
    assert "s to this machine" in text and "to servers slower than their profile" not in text


def test_what_cannot_be_explained_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did not complete \(it is failed: no room.*\), so"):
        explain_command("clustered", 99, "petals", ["workload.rate=2", "backoff.give_up=1 s"], None)
    with pytest.raises(UserError, match="on no server"):
        explain_command("clustered", 0, None, ["servers.1.count=0"], None)
    with pytest.raises(UserError, match="policy petal"):
        explain_command("clustered", 0, "petal", [], None)
    with pytest.raises(UserError, match="not a run directory"):
        explain_command(str(tmp_path), 0, None, [], None)


def test_a_request_with_drafts_is_compared_with_its_own_rounds_on_an_idle_chain() -> None:
    drafts = "decoding.drafter=ngram", "decoding.acceptance=0.9", "decoding.tokens=auto"
    answer, text = explain_command("clustered", 1, None, [*SHORT, *drafts, "workload.rate=0.01"], None)
    assert answer["own_chain_alone"]["e2e_s"] == pytest.approx(answer["e2e_s"], rel=1e-3)
    assert 0 < answer["n_rounds"] < 15
    assert f"came in {answer['n_rounds']} rounds: {answer['n_accepted']} drafted tokens agreed" in text
    assert re.search(rf"blocks +steps .*\n.* {answer['n_rounds'] + 1} ", text)


def test_of_a_prompt_only_what_no_server_has_kept_is_computed() -> None:
    answer = explain(
        13,
        "cache.prefix=shared",
        "workload.turns=3",
        "workload.think_time=1 s",
        "workload.n_further_tokens=9",
    )
    check_sums(answer)
    for part in ("compute_slower_s", "compute_shared_s"):
        assert answer["parts"][part] == pytest.approx(0.0, abs=1e-9)
    assert answer["e2e_s"] < answer["own_chain_alone"]["e2e_s"], "which computes all of the prompt"


def test_links_that_change_are_neither_the_machines_nor_below_zero() -> None:
    trace = "{link=['client-0','a100-0'],kind='listed',times=[0,4],rates=[2e6,4e6],length='10 s',repeat=true}"
    answer = explain(0, "workload.n_requests=1", f"network.trace=[{trace}]")
    check_sums(answer)
    assert answer["links_changed"] and answer["lost_to_machine_s"] == 0 < answer["lost_to_others_s"]
    assert all(answer["parts"][name] > -1e-9 for name in ("transmission_s", "network_rest_s", "rest_s"))


def test_what_is_lost_on_the_way_is_not_taken_for_waiting_behind_others() -> None:
    parts = explain(12, "network.loss=1 %")["parts"]
    assert parts["network_rest_s"] > 3 * parts["link_wait_s"] > 0, (
        "each loss holds a message up for much longer"
    )
