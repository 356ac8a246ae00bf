from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.simulator.answer import answer
from testbed.simulator.cases import PolicyChoice, instance_case
from testbed.simulator.engine import simulate
from testbed.simulator.instance import load_instance, parse_instance
from testbed.simulator.offline import offline_command

SERVER = {
    "type": "A100",
    "memory_gb": 79.13,
    "decode_ms": 3.2,
    "prefill_ms": 34.5,
    "token_rtt_ms": 110.0,
    "input_rtt_ms": 90.0,
    "petals_forward_per_s": 20000.0,
    "petals_network_per_s": 3000.0,
    "block_cap": None,
}
DOCUMENT: dict[str, Any] = {
    "id": "example",
    "model": {
        "name": "BLOOM-176B",
        "n_blocks": 70,
        "d_model": 14336,
        "block_gb": 1.3233976672,
        "cache_gb_per_block_session": 0.008486912,
        "petals_cache_gb_per_block": 0.234881024,
    },
    "workload": {
        "rate_per_s": 0.5,
        "n_input_tokens": 20,
        "n_output_tokens": 128,
        "inter_arrival_ms": [0.0, 2500.0, 500.0],
    },
    "servers": [SERVER, {**SERVER, "type": "MIG", "block_cap": 4}],
    "raw_rtt_ms": [[0.0, 10.0, 20.0], [0.0, 0.0, 5.0], [0.0, 6.0, 0.0]],
    "petals_join_order": [1, 0],
    "initial_delay_ms": 70.0,
}


def test_an_instance_becomes_a_problem_in_seconds_and_bytes() -> None:
    instance = parse_instance(DOCUMENT, "here")
    problem = instance.problem
    assert problem.model.cache_bytes_per_token == pytest.approx(57344)
    assert problem.model.petals_cache_bytes == pytest.approx(0.234881024e9)
    assert problem.raw_rtt_s == ((0.01, 0.02),)
    assert problem.server_rtt_s == ((0.0, 0.005), (0.006, 0.0))
    assert problem.input_rtt_s(0, 1, 20) == 0.09
    assert [(s.hardware, s.block_cap) for s in problem.servers] == [("a100", None), ("mig-1g", 4)]
    assert [r.arrival_at_s for r in instance.requests] == [0.0, 2.5, 3.0]
    assert (instance.hop_overhead_s, instance.shortage_penalty_s) == (0.018, 10.0)


def _drop_row(d: dict[str, Any]) -> None:
    d["raw_rtt_ms"].pop()


def _shorten_row(d: dict[str, Any]) -> None:
    d["raw_rtt_ms"][1].pop()


def _join_twice(d: dict[str, Any]) -> None:
    d["petals_join_order"] = [0, 0]


def _negative_decode(d: dict[str, Any]) -> None:
    d["servers"][1]["decode_ms"] = -1


def _no_model(d: dict[str, Any]) -> None:
    del d["model"]


def _unknown_server(d: dict[str, Any]) -> None:
    d["petals_join_order"] = [0, 2]


def _unsorted(d: dict[str, Any]) -> None:
    d["workload"]["inter_arrival_ms"] = [0.0, 20.0, -5.0]


def _not_a_number(d: dict[str, Any]) -> None:
    d["servers"][0]["token_rtt_ms"] = math.nan


def set_at(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        here: Any = document
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = value

    return change


def renamed(old: str, new: str, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        here: Any = document
        for part in path:
            here = here[part]
        here[new] = here.pop(old)

    return change


def _text(d: dict[str, Any]) -> None:
    d["workload"]["rate_per_s"] = "0.5"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop_row, "here: raw_rtt_ms: has 2 rows but needs 3"),
        (_shorten_row, "here: raw_rtt_ms.1: has 2 values but needs 3"),
        (_join_twice, "here: petals_join_order: must name each of the servers 0 to 1 exactly once"),
        (_negative_decode, "here: servers.1.decode_ms: must be more than 0, not -1"),
        (_unknown_server, "here: petals_join_order.1: there is no server 2; servers are numbered 0 to 1"),
        (
            _unsorted,
            "here: workload.inter_arrival_ms.2: must be at least 0, not -5.0; give the gaps between requests",
        ),
        (_not_a_number, "here: servers.0.token_rtt_ms: must be a finite number, not nan"),
        (_text, 'here: workload.rate_per_s: must be a number, not "0.5"'),
        (_no_model, "here: model: is missing"),
        (set_at(10**9, "model", "n_blocks"), "here: model.n_blocks: must be at most 10,000, not 1000000000"),
        (
            set_at(10**9, "workload", "n_output_tokens"),
            "here: workload.n_output_tokens: must be at most 10,000,000, not 1000000000",
        ),
        (
            set_at([0.0, 1e308, 1e308], "workload", "inter_arrival_ms"),
            "here: workload.inter_arrival_ms.1: must be at most 1e+12, not 1e+308",
        ),
        (
            set_at([0.0, 6e11, 6e11], "workload", "inter_arrival_ms"),
            "here: workload.inter_arrival_ms: puts the last request at 1.2e+09 s; arrivals must end within "
            "1,000,000,000 s, about 30 years",
        ),
        (set_at(1e308, "servers", 0, "memory_gb"), "here: servers.0.memory_gb: must be at most 1e+09"),
        (set_at(1e308, "servers", 0, "decode_ms"), "here: servers.0.decode_ms: must be at most 1e+12"),
        (set_at(1e308, "raw_rtt_ms", 0, 1), "here: raw_rtt_ms.0.1: must be at most 1e+12, not 1e+308"),
        (
            set_at(1e-320, "model", "cache_gb_per_block_session"),
            "here: model.cache_gb_per_block_session: must be at least 1e-15",
        ),
        (
            renamed("initial_delay_ms", "initial_delay"),
            'here: initial_delay: unknown key; did you mean "initial_delay_ms"?',
        ),
        (
            renamed("block_cap", "blockcap", "servers", 1),
            'here: servers.1.blockcap: unknown key; did you mean "block_cap"?',
        ),
        (
            set_at({"petals": 1.0, "proposed": 1.0}, "session_setup"),
            'here: session_setup: unknown key; did you mean "session_setup_ms"?',
        ),
        (
            set_at({"hop_overhead": 1.0}, "petals_constants"),
            'here: petals_constants.hop_overhead: unknown key; did you mean "hop_overhead_ms"?',
        ),
    ],
)
def test_a_malformed_instance_is_refused_with_the_key_that_is_wrong(
    spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = copy.deepcopy(DOCUMENT)
    spoil(document)
    with pytest.raises(UserError) as caught:
        parse_instance(document, "here")
    assert str(caught.value).startswith(message)


def test_a_file_that_is_missing_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        load_instance(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.json: is not JSON"):
        load_instance(tmp_path / "bad.json")
    (tmp_path / "good.json").write_text(json.dumps(DOCUMENT), encoding="utf-8")
    assert load_instance(tmp_path / "good.json").id == "example"
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UserError, match=r"deep\.json: is nested too deeply; give an instance file"):
        load_instance(tmp_path / "deep.json")
    (tmp_path / "digits.json").write_text("1" * 5000, encoding="utf-8")
    with pytest.raises(UserError, match=r"digits\.json: cannot be read \(Exceeds the limit"):
        load_instance(tmp_path / "digits.json")


def test_keys_that_describe_are_left_alone() -> None:
    described = {
        "group": "small",
        "topology": "ring",
        "units": {"time": "ms"},
        "design_concurrency": 3,
        "design_concurrency_bound": 9,
        "single_request_ms": 5000.0,
        "expected": {"with_constants": {}},
        "petals_placement_rounding_sensitive": False,
        "clients": "beside client, a misspelling it cannot be",
        "client": {"node": "3", "note": "the hub"},
    }
    assert (
        parse_instance({**DOCUMENT, **described}, "here").requests == parse_instance(DOCUMENT, "x").requests
    )


def test_a_document_that_is_no_table_is_shown_by_its_beginning() -> None:
    with pytest.raises(UserError) as caught:
        parse_instance([DOCUMENT] * 50, "here")  # type: ignore[arg-type]
    said = str(caught.value)
    assert said.startswith("here: the file: must be a table, not [{")
    assert len(said) < 120


MANUAL = (Path(__file__).parents[3] / "docs" / "instances.md").read_text(encoding="utf-8")
ONLINE_EXAMPLE, OFFLINE_EXAMPLE = re.findall(r"```json\n(.*?)```", MANUAL, re.DOTALL)


@pytest.mark.parametrize("policy", ["proposed", "petals"])
def test_the_instance_in_the_manual_can_be_simulated(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "two-servers.json"
    path.write_text(ONLINE_EXAMPLE, encoding="utf-8")
    found = answer(simulate(instance_case(path, PolicyChoice(policy), session_setup=True), "reference"))
    assert found["feasible"] and len(found["requests"]) == 3
    assert found["session_setup_ms"] == {"proposed": 60_000, "petals": 250_000}[policy]
    for key in (*found, *found["requests"][0], *found["mean"]):
        assert f"`{key}`" in MANUAL


@pytest.mark.parametrize("policy", ["milp", "milp-paper", "cg-bprr", "lp-rounding"])
def test_the_offline_instance_in_the_manual_can_be_solved(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(OFFLINE_EXAMPLE, encoding="utf-8")
    (found,) = offline_command([path], policy)
    assert found["feasible"]
    for key in (*found, *found["bounds"]):
        assert f"`{key}`" in MANUAL


def test_only_the_keys_that_the_manual_calls_optional_can_be_left_out() -> None:
    example = json.loads(ONLINE_EXAMPLE)
    for key in example:
        with pytest.raises(UserError, match=f"here: {key}: is missing"):
            parse_instance({k: v for k, v in example.items() if k != key}, "here")
    for key in example["servers"][1]:
        short = {k: v for k, v in example["servers"][1].items() if k != key}
        with pytest.raises(UserError, match=rf"here: servers\.1\.{key}: is missing"):
            parse_instance({**example, "servers": [example["servers"][0], short]}, "here")


@pytest.mark.parametrize(
    ("network_per_s", "petals_s"), [(3138.1, 250.0), (2555.208925125856, 350.0), (1636.225130062161, 350.0)]
)
def test_the_session_setup_is_told_by_the_network_throughput(network_per_s: float, petals_s: float) -> None:
    server = {**SERVER, "petals_network_per_s": network_per_s}
    instance = parse_instance({**DOCUMENT, "servers": [SERVER, server]}, "here")
    assert (instance.session_setup_petals_s, instance.session_setup_proposed_s) == (petals_s, 60.0)
    given = {**DOCUMENT, "servers": [SERVER, server], "session_setup_ms": {"petals": 5.0, "proposed": 7.0}}
    instance = parse_instance(given, "here")
    assert (instance.session_setup_petals_s, instance.session_setup_proposed_s) == (0.005, 0.007)
