"""Runs with real transformer blocks: the same command, servers and network, and the tokens of the whole model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.blocks import need_blocks
from tests.support.runs import (
    Outcome,
    Testbed,
    assert_one_sentence,
    assert_tables_hold_the_whole_log,
    processes,
    rows_of,
    wait_until,
)

need_blocks()

TIMEOUT_S = 300.0
"""Of a command: it imports torch twice, which a busy machine takes its time for."""
SHORT = ("--set", "workload.n_requests=4", "--set", "workload.n_output_tokens=8", "--no-report", "--no-twin")
REAL = ("bloom-tiny", "--compute", "blocks", *SHORT)
LOOPBACK = ("--network", "loopback")

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.fixture(scope="module")
def served(fabric: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One run of the tiny BLOOM on fabric, with --json; not to be changed."""
    testbed = Testbed(tmp_path_factory.mktemp("served"))
    return testbed.up(*REAL, "--network", "fabric", "--json", timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with grouped heads, in three shards."""
    folder = tmp_path_factory.mktemp("llama")
    testbed = Testbed(folder)
    options = ("--family", "llama", "--layers", "6", "--heads", "4", "--kv-heads", "2", "--shards", "3")
    made = testbed("model", "make-tiny", str(folder / "m"), *options, timeout_s=TIMEOUT_S)
    assert made.code == 0, made.stderr
    return str(folder / "m")


def test_the_shipped_scenario_serves_real_blocks_with_the_whole_models_tokens(served: Outcome) -> None:
    assert served.code == 0, served.stderr
    summary = served.json()
    assert (summary["n_completed"], summary["compute"], summary["network"]) == (4, "blocks", "fabric")
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (4 * 8, 0)
    assert_tables_hold_the_whole_log(served.run_dir)
    rows = rows_of(served.run_dir / "requests.parquet")
    assert [len(row["token_ids"]) for row in rows] == [8] * 4
    assert all(" " in row["chain"] for row in rows)  # no server holds the whole model


def test_servers_have_the_memory_that_the_model_counts(served: Outcome) -> None:
    memory = served.json()["memory"]
    assert len(memory["servers"]) == 5
    assert memory["real_bytes"] > 0
    assert memory["difference_ratio"] == pytest.approx(0.0, abs=1e-9)
    plan = json.loads((served.run_dir / "plan.json").read_text(encoding="utf-8"))
    assert plan["memory"] == memory["servers"]


def test_the_model_made_for_a_run_is_a_checkpoint_like_any_other_also_with_steps_in_the_form_of_cuda_graphs(
    served: Outcome, testbed: Testbed
) -> None:
    """On the CPU these steps are computed as they would be recorded."""
    options = ("--model", str(served.run_dir / "model"), "--set", "model={}")
    graphs = ("--set", "compute.cuda_graphs=true")
    again = testbed.up(*REAL, *LOOPBACK, *options, *graphs, "--json", timeout_s=TIMEOUT_S)
    assert again.code == 0, again.stderr
    summary = again.json()
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (4 * 8, 0)
    first, second = (rows_of(run / "requests.parquet") for run in (served.run_dir, again.run_dir))
    assert [row["token_ids"] for row in first] == [row["token_ids"] for row in second]


def test_a_report_made_again_still_knows_that_tokens_were_right(served: Outcome, testbed: Testbed) -> None:
    again = testbed("report", str(served.run_dir), "--json", timeout_s=TIMEOUT_S)
    assert again.code == 0, again.stderr
    assert again.json()["n_tokens_checked"] == 4 * 8


def test_weights_that_servers_make_themselves_are_compared_too(testbed: Testbed) -> None:
    options = ("--random-weights", "--set", "compute.dtype=bfloat16", "--set", "compute.weights=int8")
    outcome = testbed.up(*REAL, *LOOPBACK, *options, "--json", timeout_s=TIMEOUT_S)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["n_tokens_checked"], summary["n_tokens_altered"]) == (4 * 8, 0)
    assert not (outcome.run_dir / "model").exists()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (("--clock", "virtual"), ("real blocks", "virtual", "leave")),
        (
            ("--set", "compute.cuda_graphs=true", "--set", "compute.streams=2"),
            ("compute.streams", "one step at a time"),
        ),
        (
            ("--set", "compute.cuda_graphs=true", "--set", "cache.mode=paged"),
            ("compute.cuda_graphs", 'cache.mode = "reserved"'),
        ),
    ],
)
def test_what_real_blocks_cannot_do_is_one_sentence_and_exit_code_2(
    testbed: Testbed, option: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert_one_sentence(testbed.up(*REAL, *option), *expected)
    assert not testbed.runs.exists()


@pytest.mark.usefixtures("orphans")
def test_a_killed_run_keeps_its_tokens(testbed: Testbed) -> None:
    running = testbed.start_up(
        "bloom-tiny",
        "--compute",
        "blocks",
        "--no-twin",
        *LOOPBACK,
        "--set",
        "workload.n_output_tokens=2000",
        "--set",
        "workload.rate=50",
    )
    run_dir = _serving(running)
    running.kill()
    report = testbed("report", str(run_dir), "--json", timeout_s=TIMEOUT_S)
    assert report.code == 1, "not every request completed"
    assert "did not come to its end" in report.json()["tokens_unchecked_because"]
    rows = rows_of(run_dir / "requests.parquet")
    assert sum(len(row["token_ids"]) for row in rows) >= 20
    assert all(len(row["token_ids"]) == row["n_tokens_done"] for row in rows)
    wait_until(lambda: not processes(run_dir), "the end of all processes")


def test_what_no_server_can_hold_is_said_by_the_orchestrator(testbed: Testbed) -> None:
    outcome = testbed.up(
        *REAL,
        *LOOPBACK,
        "--set",
        'model.block_size="1 kB"',
        "--set",
        'hardware.small.memory="500 kB"',
        timeout_s=TIMEOUT_S,
    )
    assert_one_sentence(outcome, "blocks of 200 kB need", "would fit")
    assert not outcome.run_dir.exists()


def test_generate_answers_tokens_text_times_and_chain(llama: str, testbed: Testbed) -> None:
    arguments = ("generate", "bloom-tiny", *LOOPBACK, "--model", llama, "--set", "model={}")
    arguments += ("--max-new-tokens", "6", "--out", str(testbed.runs / "g"), "--json")
    outcome = testbed(*arguments, "--prompt", "Once upon", timeout_s=TIMEOUT_S)
    assert outcome.code == 0, outcome.stderr
    answer = outcome.json()
    assert len(answer["token_ids"]) == len(answer["token_s"]) == 6
    assert all(seconds > 0 for seconds in answer["token_s"])
    assert answer["ttft_s"] >= answer["token_s"][0]
    hops = [(hop["first_block"], hop["last_block"]) for hop in answer["chain"]]
    assert hops[0][0] == 0 and hops[-1][1] == 6
    assert all(a[1] == b[0] for a, b in itertools.pairwise(hops))
    assert [{key: hop[key] for key in answer["chain"][0]} for hop in answer["hops"]] == answer["chain"]
    on_hops_s = sum(hop["first_network_s"] + hop["first_compute_s"] for hop in answer["hops"])
    assert 0 < on_hops_s < answer["token_s"][0]
    assert (answer["n_tokens_checked"], answer["n_tokens_altered"]) == (6, 0)
    assert answer["text"] == _decoded(llama, answer["token_ids"])
    (row,) = rows_of(testbed.runs / "g" / "requests.parquet")
    assert row["token_ids"] == answer["token_ids"]


def test_generate_shows_the_text_to_people_and_samples_by_its_seed(llama: str, testbed: Testbed) -> None:
    arguments = ("generate", "bloom-tiny", *LOOPBACK, "--model", llama, "--set", "model={}")
    arguments += ("--prompt-ids", "5,6,7", "--max-new-tokens", "5", "--temperature", "1.5", "--seed", "3")
    outcome = testbed(*arguments, "--out", str(testbed.runs / "g"), timeout_s=TIMEOUT_S)
    assert outcome.code == 0, outcome.stderr
    (row,) = rows_of(testbed.runs / "g" / "requests.parquet")
    assert outcome.stdout == _decoded(llama, row["token_ids"]) + "\n"
    assert "all 5 tokens are those of the whole model on one machine" in outcome.stderr


def _serving(running: Any) -> Path:
    from tests.support.runs import logged_tokens, wait_until

    run_dir = wait_until(
        lambda: [Path(line[4:]) for line in running.stderr.splitlines() if line.startswith("run /")],
        "the run directory",
        TIMEOUT_S,
    )[0]
    wait_until(lambda: len(logged_tokens(run_dir)) >= 20, "20 tokens", TIMEOUT_S)
    return Path(run_dir)


def _decoded(folder: str, tokens: list[int]) -> str:
    from nodes.blocks.text import Text

    return Text(Path(folder)).decode(tokens)


@pytest.mark.parametrize("policy", ["Draining", "Cutting"])
def test_servers_that_load_other_blocks_while_sessions_run_leave_the_tokens_alone(
    policy: str, testbed: Testbed
) -> None:
    online = f"policy.online=tests.support.wandering:{policy}"
    # The last request comes after eight seconds, when two servers have moved on a slow machine, too.
    period = ("--set", "policy.online_period=0.5 s", "--set", "workload.n_output_tokens=48")
    period += ("--set", "workload.arrivals=constant", "--set", "workload.rate=0.375")
    outcome = testbed.up(
        *(*REAL, *LOOPBACK, "--json", "--set", online, *period),
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout_s=TIMEOUT_S,
    )
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["n_completed"], summary["n_tokens_checked"], summary["n_tokens_altered"]) == (4, 192, 0)
    assert len(summary["moves"]) >= 2
    assert (summary["n_cuts"] > 0) == (policy == "Cutting")
    assert summary["leaks"] == {"sessions": 0, "cache_bytes": 0, "descriptors": 0, "namespaces": 0}
