"""The benchmark for a GPU at its small size on the CPU: that it is right and whole, not how fast anything is."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_parts.figures import draw_serving, draw_streams
from benchmarks.gpu_parts.run import SHARES, Options, run_parts
from testbed.experiments import load_experiment
from tests.support.blocks import need_blocks, source_of
from tests.support.runs import PATIENCE_S, Outcome, Running, processes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def benchmark(folder: Path, *arguments: str) -> Outcome:
    """The command, in ``folder``."""
    return Running(arguments, folder, program=str(SCRIPT)).wait()


def left_in(folder: Path) -> list[str]:
    """What is in ``folder`` beside what the command read and said."""
    return sorted({path.name for path in folder.iterdir()} - {"stdin", "stdout", "stderr"})


@pytest.mark.timeout(900)
def test_a_small_run_is_right_in_every_part_and_leaves_its_files_and_no_process(tmp_path: Path) -> None:
    need_blocks()
    folder = tmp_path / "out"
    # With time enough for a machine that does many other things: nothing here is about speed.
    arguments = ("--device", "cpu", "--minutes", "60", "--out", str(folder), "--json")
    done = Running(arguments, tmp_path / "command", program=str(SCRIPT)).wait(800)
    assert done.code == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert not processes(tmp_path)
    check_results(folder)
    check_correctness(part(folder, "correctness"))
    check_streams(folder, part(folder, "streams"))
    check_graphs(part(folder, "graphs"))
    check_steps(part(folder, "steps"))
    check_models(part(folder, "models"))
    check_memory_of_a_block(folder)
    check_serving(folder, part(folder, "serving"))
    check_batches(folder, part(folder, "batches"))
    check_cluster(part(folder, "cluster"))
    check_endpoint(part(folder, "endpoint"))


def part(folder: Path, name: str) -> dict[str, Any]:
    value = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def check_results(folder: Path) -> None:
    """Every part's file and findings, and what they were measured with."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["status"] == "ok"
    assert list(results["parts"]) == list(SHARES)
    for name, about in results["parts"].items():
        assert about["status"] == "ok" and about["error"] is None
        assert about["findings"] == part(folder, name)["findings"] != []
        assert (folder / about["log"]).is_file()
        assert "as asked for" in part(folder, name)["kept_awake"], "no CPU is kept busy at the small size"
    machine = results["machine"]
    assert machine["name"] and machine["versions"]["torch"] and machine["versions"]["transformers"]
    assert machine["driver"] is None  # a CPU has none


def check_correctness(found: dict[str, Any]) -> None:
    """Both families, all dtypes and weights, and every kind of steps: tokens and hidden states of transformers."""
    cases = {(row["steps"], row["family"], row["dtype"], row["weights"]): row for row in found["cases"]}
    assert len(cases) == len(found["cases"]) == 2 * 3 * 3 + 2 * 2
    for (_, _, dtype, weights), row in cases.items():
        if row["status"] == "not here":
            assert weights == "nf4" and "bitsandbytes" in row["why"]
            continue
        assert row["status"] == "right"
        n_tokens = sum(found["n_tokens"] * i // 3 for i in (1, 2, 3))
        assert (row["n_tokens_checked"], row["n_tokens_altered"]) == (n_tokens, 0)
        assert row["hidden_states_apart_ratio"] <= found["tolerances"][dtype]


def check_streams(folder: Path, found: dict[str, Any]) -> None:
    """Queue and streams with the same sessions, and one of them chosen."""
    assert "plain" in found["weights"]
    for weights, rows in found["weights"].items():
        pairs = [(row["n_streams"], row["n_sessions"]) for row in rows]
        assert pairs == [(n_streams, n) for n_streams in (1, 8) for n in (1, 2, 4, 8)]
        assert all(row["tokens_per_s"] > 0 and 0 < row["step_p50_s"] <= row["step_p99_s"] for row in rows)
        assert found["verdict"][weights]["best_n_streams"] in (1, 8)
    assert [row["n_tokens"] for row in found["copies"]] == [1, 20]
    assert all((folder / figure).is_file() for figure in found["figures"])


def check_graphs(found: dict[str, Any]) -> None:
    """Both kinds of steps of each kind of weights, on few and on many blocks, and their roofline."""
    measured = {(row["weights"], row["n_blocks"]) for row in found["rows"]}
    assert {("plain", 4), ("plain", 8), ("int8", 4), ("int8", 8)} <= measured
    assert len(measured) == len(found["rows"])
    for row in found["rows"]:
        assert min(row[key] for key in ("without_s", "with_s", "recorded_s", "roofline_s")) > 0
        assert row["roofline_ratio"] == min(row["without_s"], row["with_s"]) / row["roofline_s"]
    products = [row for row in found["products"] if row["weights"] == "int8"]
    assert [row["n_tokens"] for row in products] == [1, 2, 4, 5, 8, 16]
    assert all(row["torch_s"] > 0 and row["matrix_s"] > 0 for row in products)


def check_steps(found: dict[str, Any]) -> None:
    """One and several sessions and a prompt at each context, and what bounds them; the paper's constants for one session."""
    rows = [row for row in found["rows"] if row["weights"] == "plain"]
    assert [(row["n_sessions"], row["context"]) for row in rows] == [
        (n, context) for context in (4, 16) for n in (1, 4, 0)
    ]
    for row in found["rows"]:
        assert row["roofline_ratio"] == pytest.approx(row["block_s"] / row["roofline_s"])
        assert row["roofline_s"] > 0 and row["block_s"] > 0
    (one,) = [row for row in rows if (row["n_sessions"], row["context"]) == (1, 4)]
    assert one["a100_s"] == pytest.approx(3.2197e-3)
    (prompt,) = [row for row in rows if (row["n_sessions"], row["context"]) == (0, 16)]
    assert prompt["mig-1g_s"] == pytest.approx(206.3547e-3 + 16 * 0.1041e-3)


def check_models(found: dict[str, Any]) -> None:
    """Quantised blocks of the small model on three servers."""
    (row,) = found["rows"]
    assert (row["dtype"], row["weights"], row["n_servers"], row["n_blocks"]) == ("bfloat16", "int8", 3, 6)
    assert (row["n_completed"], row["n_tokens_checked"], row["n_tokens_altered"]) == (3, 3 * 8, 0)


def check_memory_of_a_block(folder: Path) -> None:
    """What was measured of a block is what the model says."""
    model = load_experiment(str(folder / "serving" / "scenario.toml")).problem.model
    served = part(folder, "serving")["weights"]
    memory = part(folder, "calibration")[served]["memory"]
    assert memory["block_bytes"]["value"] == pytest.approx(model.block_bytes)
    assert memory["cache_bytes_per_token"]["value"] == pytest.approx(model.cache_bytes_per_token)


def check_serving(folder: Path, found: dict[str, Any]) -> None:
    """The whole model's tokens, within every server's memory, and the stub beside them."""
    served = found["blocks"]
    assert served["n_completed"] == served["n_requests"] == 3
    assert found["tokens"]["n_tokens_altered"] == 0
    assert found["tokens"]["n_tokens_checked"] == 8 + 2 * found["n_output_tokens"]
    servers = served["memory"]["servers"].values()
    assert len(servers) == found["n_servers"]
    for server in servers:
        assert 0 < server["real_bytes"] == server["model_bytes"] <= server["limit_bytes"]
    assert [row["request"] for row in found["requests"]] == [1, 2]
    for row in found["requests"]:
        assert len(row["blocks_gaps_s"]) == len(row["stub_gaps_s"]) == found["n_output_tokens"] - 1
    assert (folder / "serving" / "compare" / "compare.json").is_file()
    assert all((folder / figure).is_file() for figure in found["figures"])


def check_batches(folder: Path, found: dict[str, Any]) -> None:
    """The law of several sessions, and both runs with it."""
    assert found["batches"]["points"] and found["batches"]["held_out_mean_error"] > 0
    blocks, stub = (found[name]["metrics"]["tpot_s"]["mean"] for name in ("blocks", "stub"))
    assert found["stub_error_ratio"] == pytest.approx(stub / blocks - 1)
    assert load_experiment(str(folder / "batches" / "scenario.toml")).problem.batching == "continuous"


def check_cluster(found: dict[str, Any]) -> None:
    """Every token the whole model's, whatever was killed."""
    assert found["n_completed"] == found["n_requests"] == 6
    assert found["n_faults"] > 0
    assert (found["n_tokens_checked"], found["n_tokens_altered"]) == (6 * 24, 0)


def check_endpoint(found: dict[str, Any]) -> None:
    assert found["n_equal"] == len(found["texts"]) == len(found["streams"]) == 3
    assert (found["tokens"]["n_tokens_checked"], found["tokens"]["n_tokens_altered"]) == (3 * 16, 0)
    assert all(row["n_events"] > 1 for row in found["streams"])


def test_figures_can_be_rendered(tmp_path: Path) -> None:
    row = {"n_streams": 8, "n_sessions": 2, "tokens_per_s": 9.0, "step_p50_s": 0.1, "step_p99_s": 0.2}
    drawn = draw_streams(tmp_path / "figures", {"weights": {"plain": [row], "nf4": []}})
    drawn += draw_serving(
        tmp_path / "figures", [{"request": 1, "blocks_gaps_s": [0.1], "stub_gaps_s": [0.2]}]
    )
    assert drawn == ["figures/streams.png", "figures/serving.png"]
    assert all((tmp_path / figure).stat().st_size > 10_000 for figure in drawn)


PARTS = """
import json, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name, out = given["--part"], pathlib.Path(given["--out"])
failures = ["two and two are five"] if name == "streams" else []
found = {"part": name, "findings": ["f"], "failures": failures, "unreached": ["u"] * (name == "models")}
(out / f"{name}.json").write_text(json.dumps(found))
(out / "model.safetensors").touch()
if name == "correctness":
    raise SystemExit("the device is on fire")
if name == "calibration":
    time.sleep(600)
"""


def test_what_becomes_of_one_part_stops_no_other_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LEAST_S", "_STOP_S"):
        monkeypatch.setattr(f"benchmarks.gpu_parts.run.{name}", 1.0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
    began_at_s = time.monotonic()
    archive = tmp_path.with_name("results.tar.gz")
    options = Options("cpu", True, tmp_path, 0.5, archive=archive)
    answer = run_parts(options, [sys.executable, str(tmp_path / "parts.py")])
    assert time.monotonic() - began_at_s < 300
    parts = answer["parts"]
    assert {name: about["status"] for name, about in parts.items()} == {
        "machine": "ok",
        "tests": "ok",
        "correctness": "failed",
        "streams": "wrong",
        "graphs": "ok",
        "steps": "ok",
        "models": "not reached",
        "batches": "ok",
        "calibration": "not reached",
        "serving": "ok",
        "cluster": "ok",
        "endpoint": "ok",
    }
    assert parts["correctness"]["error"] == "the device is on fire"
    assert parts["streams"]["failures"] == ["two and two are five"]
    assert parts["calibration"]["findings"] == ["f"]  # what it had found until then
    assert answer["status"] == "failed"
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == answer
    with tarfile.open(archive) as packed:
        names = {name.removeprefix(f"{tmp_path.name}/") for name in packed.getnames()}
    assert {"results.json", "calibration.json", "endpoint.json", "logs/endpoint.log"} <= names
    assert "model.safetensors" not in names


def test_a_part_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
    options = Options("cpu", True, tmp_path, 0.01, ("machine", "tests", "endpoint"))
    answer = run_parts(options, [sys.executable, str(tmp_path / "parts.py")])
    assert [about["status"] for about in answer["parts"].values()] == ["ok", "not reached", "not reached"]
    assert answer["status"] == "not reached" and not (tmp_path / "tests.json").exists()


CUT = """
import signal, sys
from pathlib import Path
from benchmarks.gpu import _interrupt
from benchmarks.gpu_parts.figures import draw_serving, draw_streams
from benchmarks.gpu_parts.run import Options, run_parts
folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, _interrupt)
parts = ("machine", "calibration", "endpoint")
options = Options("cpu", True, folder, 10, parts, folder.with_name("cut.tar.gz"))
run_parts(options, [sys.executable, str(folder / "parts.py")])
"""


def test_a_command_that_is_cut_leaves_what_it_has_as_one_archive(tmp_path: Path) -> None:
    need_blocks()
    folder = tmp_path / "out"
    (folder / "logs").mkdir(parents=True)
    (folder / "parts.py").write_text(PARTS, encoding="utf-8")
    with subprocess.Popen([sys.executable, "-c", CUT, str(folder)], cwd=ROOT) as command:
        while not (folder / "calibration.json").exists():
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(signal.SIGTERM)
        assert command.wait(PATIENCE_S) == 0
    assert not processes(folder)
    with tarfile.open(tmp_path / "cut.tar.gz") as packed:
        member = packed.extractfile("out/results.json")
        assert member is not None
        results = json.load(member)
        assert "out/calibration.json" in packed.getnames()
    assert results["is_cut"] and results["parts"]["calibration"]["findings"] == ["f"]
    statuses = {name: about["status"] for name, about in results["parts"].items()}
    assert statuses == {"machine": "ok", "calibration": "not reached", "endpoint": "not reached"}


def test_a_device_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    need_blocks()
    done = benchmark(tmp_path, "--device", "cuda:99", "--out", str(tmp_path / "out"))
    assert done.code == 2
    assert 'the device "cuda:99" cannot be used' in done.stderr
    assert "Traceback" not in done.stderr and "correctness" not in done.stderr


def test_a_plan_says_what_each_part_does_and_how_much_fits_and_measures_nothing(tmp_path: Path) -> None:
    need_blocks()
    done = benchmark(tmp_path, "--plan", "--minutes", "8", "--only", "steps,models,serving")
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        "machine",
        "steps",
        "models",
        "serving",
        "H100 80 GB",
        "H200 141 GB",
    ]
    assert sum(float(line.split()[2]) for line in lines[1:5]) == pytest.approx(8 * 60, abs=2)
    h100, h200 = ([int(n) for n in re.findall(r"(\d+) in ", line)] for line in lines[5:])
    assert 12 <= h100[0] <= 14, "blocks in bf16 on an H100"
    assert all(more > less for less, more in zip(h100, h200, strict=True)) and max(h200) <= 70
    assert not left_in(tmp_path)


def test_bad_arguments_say_what_to_change(tmp_path: Path) -> None:
    need_blocks()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    for arguments, sentence in (
        (("--minutes", "0"), "--minutes must be more than 0"),
        (("--only", "copies"), "--only must be of machine, tests, correctness"),
        (("--out", "full"), "holds something already"),
        (("--plan",), "--plan says in sentences what the full size does"),
    ):
        done = benchmark(tmp_path, "--device", "cpu", *arguments)
        assert done.code == 2 and sentence in done.stderr
    assert left_in(tmp_path) == ["full"]


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Another One", None),
    ],
)
def test_a_devices_data_sheet_is_found_by_its_drivers_name(name: str, sheet: str | None) -> None:
    need_blocks()
    from benchmarks.gpu_parts.limits import sheet_of

    found = sheet_of(name)
    assert (found.name if found else None) == sheet


def test_wrong_tokens_and_wrong_hidden_states_are_noticed(tmp_path: Path) -> None:
    need_blocks()
    import torch

    from benchmarks.gpu_parts import correctness
    from benchmarks.gpu_parts.chains import start_servers
    from nodes.blocks.hub import BlocksHub
    from nodes.blocks.spec import BlocksSpec, HubSpec
    from nodes.blocks.tiny import make_tiny
    from nodes.blocks.whole import WholeModel

    sources = []
    for seed in (1, 2):
        make_tiny(tmp_path / str(seed), correctness.configs(True)["bloom"], seed)
        sources.append(source_of(tmp_path / str(seed)))
    whole, hub = WholeModel(BlocksSpec(sources[0])), BlocksHub(HubSpec(sources[0]))
    prompt = [5, 6, 7]
    tokens = whole.tokens(prompt, 4)
    assert not whole.judge(prompt, tokens).altered
    other = [*tokens[:2], (tokens[2] + 1) % 300, tokens[3]]
    assert whole.judge(prompt, other).altered[0] == 2

    async def apart(which: int, *, broken: str = "", n_walks: int = 1) -> float:
        servers = await start_servers(BlocksSpec(sources[which], is_batched=n_walks > 1), 4)
        for one in servers.computes:
            if broken == "blocks":
                for block in one._blocks.values():
                    block.input_layernorm.weight = torch.nn.Parameter(torch.full((64,), math.nan))
            elif broken == "batches":
                forward = one._ragged.forward
                one._ragged.forward = lambda parts, forward=forward: [
                    states * (len(parts) < 2) for states in forward(parts)
                ]
        try:
            return await correctness._states(servers, hub, whole, prompt, random.Random(0), n_walks)
        finally:
            servers.close()

    tolerance = correctness.TOLERANCES["float32"]
    assert asyncio.run(apart(0)) <= tolerance < asyncio.run(apart(1))
    assert asyncio.run(apart(0, broken="blocks")) == math.inf
    assert asyncio.run(apart(0, n_walks=3)) <= tolerance < asyncio.run(apart(0, broken="batches", n_walks=3))
    hub.close()


def record_of(folder: Path, name: str, device: str = "cpu") -> Any:
    from benchmarks.gpu_parts.record import Job, Record

    return Record(Job(device, True, folder, time.monotonic() + 600), name)


def test_a_case_that_breaks_while_it_computes_is_a_failure_and_one_that_cannot_begin_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_blocks()
    from benchmarks.gpu_parts import correctness
    from nodes.compute import ComputeError

    def compute(spec: Any) -> Any:
        if spec.dtype == "float16":
            raise ComputeError("the device does not compute in float16")
        return SimpleNamespace(close=lambda: None)

    async def case(spec: Any, n_tokens: int) -> dict[str, Any]:
        raise ComputeError("memory ran out while computing 9 tokens")

    monkeypatch.setattr(correctness, "BlocksCompute", compute)
    monkeypatch.setattr(correctness, "_case", case)
    record = record_of(tmp_path, "correctness")
    correctness.run(record)
    statuses = {(row["dtype"], row["status"]) for row in record.values["cases"]}
    assert statuses == {("float32", "failed"), ("bfloat16", "failed"), ("float16", "not here")}
    assert "bloom in float32/plain, streams: memory ran out while computing 9 tokens." in record.failures


def test_cases_can_be_spread_over_processes_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_blocks()
    from benchmarks.gpu_parts import correctness

    cases = [("streams", "bloom", dtype, "plain") for dtype in correctness.DTYPES]
    monkeypatch.setattr(correctness, "cases_of", lambda is_small: cases)
    monkeypatch.setattr(correctness, "_n_processes", lambda job: 2)
    record = record_of(tmp_path, "correctness")
    correctness.run(record)
    rows = record.values["cases"]
    assert [(row["steps"], row["family"], row["dtype"], row["weights"]) for row in rows] == cases
    assert {row["status"] for row in rows} == {"right"} and not record.failures + record.unreached


def die(spec: Any, n_tokens: int) -> Any:
    os._exit(1)


def test_a_process_that_dies_is_a_failure_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_blocks()
    from benchmarks.gpu_parts import correctness

    monkeypatch.setattr(correctness, "_n_processes", lambda job: 2)
    monkeypatch.setattr(correctness, "_timed", die)
    record = record_of(tmp_path, "correctness")
    correctness.run(record)
    assert record.failures == [
        f"{family} in float32/plain, streams: a process that computed cases died."
        for family in ("bloom", "llama")
    ]
    assert record.unreached == ["A process died: 20 of 22 cases were not begun."]


@pytest.mark.parametrize(
    ("free_gb", "at_once"), [(139, 3), (78, 2)], ids=["all of BLOOM-7B1's", "two of BLOOM-7B1's"]
)
def test_whole_models_run_at_once_as_far_as_memory_allows_and_the_largest_alone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gb: int, at_once: int
) -> None:
    need_blocks()
    from benchmarks.gpu_parts import models
    from benchmarks.gpu_parts.record import Job, Record

    running: list[Any] = []
    begun: dict[Any, list[Any]] = {}

    def serve(job: Any, case: Any, shape: Any, folder: Path) -> Any:
        running.append(case)
        time.sleep(0.2)
        begun[int(folder.name)] = [case, len(running)]
        running.remove(case)
        return SimpleNamespace(took_s=0.2)

    monkeypatch.setattr(models, "available_bytes", lambda device: free_gb * 2.0**30)
    monkeypatch.setattr(models, "quantised_here", lambda: True)
    monkeypatch.setattr(models, "_serve", serve)
    monkeypatch.setattr(models, "_say", lambda record, served: None)
    models.run(Record(Job("cpu", False, tmp_path, time.monotonic() + 600), "models"))
    names = [case[0].name for _, (case, _) in sorted(begun.items())]
    assert names == ["bloom-560m"] * 3 + ["bloom-7b1"] * 3 + ["bloom-176b"] * 6
    most = [n for _, (_, n) in sorted(begun.items())]
    assert max(most[:3]) == 3 and max(most[3:6]) == at_once and set(most[6:]) == {1}


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cuda", "2,3", "2,3"), ("cuda:1", "", "1"), ("cuda:1", "2,3", "3"), ("MIG-07ab", "2,3", "MIG-07ab")],
)
def test_the_gpus_tests_run_on_the_device_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, visible: str, expected: str
) -> None:
    from benchmarks.gpu_parts import tests

    asked: list[tuple[list[str], str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        asked.append((command, env["CUDA_VISIBLE_DEVICES"]))
        return SimpleNamespace(stdout="12 passed", returncode=0)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(tests.subprocess, "run", run)
    record = record_of(tmp_path, "tests", device)
    tests.run(record)
    assert [env for _, env in asked] == [expected] * 2
    assert any("tests/unit/blocks/test_preloading.py" in command for command, _ in asked)
    assert len(record.findings) == 2 and not record.failures


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({(1, 1): 100, (1, 8): 100, (8, 1): 100, (8, 8): 200}, 8),
        ({(1, 1): 100, (1, 8): 100, (8, 1): 100, (8, 8): 103}, 1),
        ({(1, 1): 100, (1, 8): 100, (8, 1): 80, (8, 8): 200}, 1),
        ({(1, 1): 100, (1, 8): 200, (8, 1): 100, (8, 8): 100}, 1),
    ],
)
def test_streams_are_chosen_only_where_many_sessions_gain_and_one_alone_does_not_lose(
    rates: dict[tuple[int, int], float], best: int
) -> None:
    need_blocks()
    from benchmarks.gpu_parts.streams import verdict

    rows = [
        {"n_streams": n_streams, "n_sessions": n, "tokens_per_s": rate, "step_p99_s": 0.01}
        for (n_streams, n), rate in rates.items()
    ]
    assert verdict(rows)["best_n_streams"] == best
