"""The whole command on a tiny model of real blocks; times are not looked at."""

from __future__ import annotations

import asyncio
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from nodes.compute import ComputeError
from policies.steps import StepTimes
from testbed.errors import RunError, UserError
from testbed.experiments import load_experiment
from testbed.experiments.catalogue import sizes_of_table
from testbed.experiments.experiment import Experiment
from testbed.experiments.profiles import named_model
from testbed.experiments.stub import stub_profile
from testbed.studies.calibrate import command
from testbed.studies.calibrate.backend import read_source
from testbed.studies.calibrate.command import Backend, Options, _Measured, calibrate_command, numbers
from testbed.studies.calibrate.plan import make_plan
from tests.support.blocks import need_blocks
from tests.support.full_disk import files_no_longer_than
from tests.unit.calibrate.conftest import run_plan

CONFIG = {
    "model_type": "bloom",
    "hidden_size": 16,
    "n_layer": 4,
    "n_head": 2,
    "vocab_size": 64,
    "seq_length": 64,
}
SMALL = Options(
    model="",
    random_weights=True,
    name="mine",
    lengths=(4, 8, 16),
    sessions=(1, 2),
    n_output_tokens=10,
    rounds=1,
    pause_s=0.0,
    keep_cpus_awake=False,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a ``config.json`` and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.mark.renders
def test_a_calibration_leaves_samples_results_profile_report_and_figures(model: Path, tmp_path: Path) -> None:
    need_blocks()
    out = tmp_path / "out"
    answer, text = calibrate_command(replace(SMALL, model=str(model), out=out))
    assert answer["subject"]["n_blocks"] == 4 and n_findings(answer) == 7
    assert all(sentence in text for sentence in answer["verdict"])
    assert answer == {**json.loads((out / "calibration.json").read_text(encoding="utf-8")), "out": str(out)}
    with (out / "measurements.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["round"] for row in rows} == {"-1", "0"}
    assert {int(row["n_blocks"]) for row in rows} == {1, 2, 4}
    names = {path.stem for path in (out / "figures").iterdir()}
    assert names == {
        "prefill",
        "decode_blocks",
        "decode_context",
        "decode_output",
        "decode_sessions",
        "memory",
    }
    assert {path.suffix for path in (out / "figures").iterdir()} == {".png", ".pdf"}
    report = (out / "report.md").read_text(encoding="utf-8")
    assert "\nCPUs may sleep, as asked for.\n" in report
    assert all(sentence in report for sentence in answer["verdict"])
    assert all(
        (out / line.split("(")[-1].rstrip(")")).is_file() for line in report.split("\n") if line[:2] == "!["
    )
    assert answer["memory"]["block_bytes"]["value"] == pytest.approx(4 * (12 * 16**2 + 13 * 16))
    assert answer["memory"]["cache_bytes_per_token"]["value"] == pytest.approx(2 * 16 * 4)
    with (out / "client.csv").open() as file:
        tokens = list(csv.DictReader(file))
    # Two rounds, the first to warm up; prompts of 4 and of 16 tokens, twice; eight tokens each.
    assert len(tokens) == 2 * 2 * 2 * 8 and {row["n_tokens"] for row in tokens} == {"1", "4", "16"}
    with (out / "batches.csv").open() as file:
        batches = list(csv.DictReader(file))
    # On four blocks and on two: one and two decodes with either contexts, and prompts beside none or two.
    assert {int(row["n_blocks"]) for row in batches} == {2, 4}
    assert {int(row["n_decodes"]) for row in batches} == {0, 1, 2}
    assert answer["batches"]["held_out_mean_error"] <= answer["batches"]["held_out_max_error"]
    client = answer["client"]
    assert client["token"]["n_samples"] == 2 * 2 * 7
    assert [prompt["n_tokens"] for prompt in client["prompts"]] == [4, 16]
    experiment = experiment_beside(out)
    assert experiment.problem.hub_token_s == pytest.approx(client["token"]["time_s"], rel=1e-5)
    stub = stub_profile(experiment, 0)
    better = answer["better"]
    decode_s = better["step_base_s"]["value"] + 3 * (
        better["decode_s"]["value"] + 8 * better["context_slope_s"]["value"]
    )
    assert stub.times.step_s(8, 1, 3) == pytest.approx(decode_s, rel=1e-4)


def n_findings(answer: dict[str, Any]) -> int:
    """Without the warning that this machine was busy."""
    return sum(not line.startswith("Noise") for line in answer["verdict"])


def experiment_beside(out: Path) -> Experiment:
    """That of a scenario beside the profile."""
    scenario = out / "scenario.toml"
    scenario.write_text(
        """
        hardware_files = ["profile.toml"]
        model = { name = "m", n_blocks = 4, hidden_size = 16, block_size = "13 kB", value_bytes = 4 }
        servers = [{ hardware = "mine", site = "A" }]
        clients = { site = "A" }
        workload = { rate = 1, n_requests = 2, n_input_tokens = 4, n_output_tokens = 4 }
        [network]
        kind = "clusters"
        pairs = [{ sites = ["A", "A"], rtt = "1 ms", rate = "1 Gbit/s" }]
        """,
        encoding="utf-8",
    )
    return load_experiment(str(scenario))


def test_a_client_without_room_for_its_part_leaves_the_blocks_calibration_as_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_blocks()

    def refuse(source: object, device: object) -> None:
        raise ComputeError("its embeddings and head may need 7 GB and 1 GB are free")

    monkeypatch.setattr(command, "open_hub", refuse)
    out, said = tmp_path / "out", list[str]()
    answer, text = calibrate_command(replace(SMALL, model=str(model), out=out), said.append)
    assert answer["client"] is None and n_findings(answer) == 6 and "client (per" not in text
    assert "[hub]" not in (out / "profile.toml").read_text(encoding="utf-8")
    for where in ((out / "report.md").read_text(encoding="utf-8"), "".join(said)):
        assert "its embeddings and head may need 7 GB and 1 GB are free" in where
    assert experiment_beside(out).problem.hub_token_s == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute": "stub"}, "--compute must be blocks"),
        ({"model": "nowhere"}, "no folder nowhere"),
        ({"n_blocks": 5}, "--blocks must be from 1 to the model's 4, not 5"),
        ({"name": "a b"}, '--name "a b" must consist of letters'),
        (
            {"lengths": (60,)},
            "more than the 64 tokens of the model's longest session; give shorter --lengths",
        ),
        ({"sessions": (0,)}, "at least 1, not 0"),
        (
            {"model": "deepseek-v3", "random_weights": True},
            "blocks of the family deepseek_v3 cannot be computed; valid families: bloom, llama, mistral, ",
        ),
        (
            {"model": "bloom-1", "random_weights": True},
            "--model bloom-1: there is no such folder, and unknown model",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_sentence(
    model: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        calibrate_command(replace(Options(model=str(model)), **changes))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, "--dtype must be one of float32, bfloat16, float16"),
        ({"weights": "int3"}, "--weights must be one of plain, int8, nf4"),
        ({"n_threads": 0}, "--threads must be at least 1"),
        ({"n_streams": 0}, "--streams must be at least 1"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_a_device_that_cannot_compute_so_is_refused_in_one_sentence(
    model: Path, changes: dict[str, object], words: str
) -> None:
    need_blocks()
    with pytest.raises(UserError, match=words) as caught:
        calibrate_command(replace(Options(model=str(model), random_weights=True), **changes))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["bloom-560m", "llama-3-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-4b", "mixtral-8x7b", "gpt-oss-20b"],
)
def test_a_model_by_name_has_the_blocks_of_its_name(name: str) -> None:
    need_blocks()
    import torch

    from nodes.blocks.family import family_of, kinds_of, window_of
    from nodes.blocks.loading import empty_block, planned_bytes

    table = named_model(name, "fp32")
    sizes = sizes_of_table(table)
    assert sizes is not None
    source = read_source(name, random_weights=True)
    assert source.sizes.blocks == sizes.blocks
    family, config = family_of(source.weights.config)
    block = empty_block(family, family.block_config(config), sizes.n_blocks - 1)
    assert planned_bytes(block, torch.float32, "plain") == table.block_size
    assert [window_of(config, kind) for kind in kinds_of(config)] == [one.window for one in sizes.blocks]


def test_a_folder_that_holds_something_is_left_alone(model: Path) -> None:
    with pytest.raises(UserError, match="holds something already"):
        calibrate_command(Options(model=str(model), out=model))


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> NoReturn:
        pytest.fail("measured, though the profile has no place")

    monkeypatch.setattr(command, "measured_backend", measured)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="runs is a file, but a folder belongs there"):
        calibrate_command(replace(SMALL, model=str(model)))


def test_a_full_disk_leaves_no_file_of_a_calibration_in_part(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, samples = asyncio.run(
        run_plan(
            make_plan(4, 64, lengths=(4, 16), sessions=(1,), n_output_tokens=2, rounds=1),
            StepTimes(0.01, 0.02, 0.001),
        )
    )
    backend = Backend(64, 0.0, _Measured([], samples, []))
    monkeypatch.setattr(command, "measured_backend", lambda *_: backend)
    out = tmp_path / "out"
    with files_no_longer_than(200), pytest.raises(RunError, match=r"cannot write to .*out: .*; make"):
        calibrate_command(replace(SMALL, model=str(model), out=out, batches=False))
    assert list(out.iterdir()) == []


def test_lists_of_numbers_are_read_and_everything_else_refused() -> None:
    assert numbers("--lengths", "16, 64") == (16, 64)
    assert numbers("--lengths", None) is None
    with pytest.raises(UserError, match='--lengths must be whole numbers such as 16,64,256, not "a,b"'):
        numbers("--lengths", "a,b")
