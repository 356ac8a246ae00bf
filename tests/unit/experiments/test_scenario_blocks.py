"""``[compute]`` and ``[model]`` of scenarios with real blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.families import FAMILIES, MIXTURES, make_config

Checkpoint = Callable[..., str]
NO_MODEL = "model={}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A folder with a ``config.json``: all that a scenario reads of a checkpoint."""

    def make(config: Any) -> str:
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return str(folder)

    return make


def blocks(*options: str) -> Experiment:
    return load_experiment("bloom-tiny", ["compute.backend=blocks", *options])


def complaint(*options: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        blocks(*options)
    return str(caught.value)


def test_every_size_follows_from_the_family() -> None:
    model = load_experiment("bloom-tiny").problem.model
    assert model.block_bytes == 4 * (12 * 64**2 + 13 * 64)
    assert model.token_bytes == 4 * 64
    assert model.cache_bytes_per_token == 2 * 4 * 64


def test_the_stub_needs_to_know_nothing_of_real_blocks() -> None:
    assert load_experiment("bloom-tiny").compute.blocks is None


def test_sizes_in_bytes_follow_the_dtype_and_how_weights_are_held() -> None:
    model = blocks("compute.dtype=bfloat16", "compute.weights=int8").problem.model
    assert model.value_bytes == 2
    assert model.cache_bytes_per_token == 2 * 2 * 64
    assert model.block_bytes == 12 * 64**2 + 4 * 9 * 64 + 2 * 13 * 64


def test_a_checkpoint_gives_the_sizes_that_the_scenario_leaves_out(checkpoint: Checkpoint) -> None:
    folder = checkpoint(make_config("llama", 6, 48, 4, 300, n_kv_heads=2))
    experiment = blocks(f"compute.model={folder}", NO_MODEL)
    model = experiment.problem.model
    assert (model.n_blocks, model.hidden_size) == (6, 48)
    assert model.cache_bytes_per_token == 2 * 2 * 12 * 4  # two heads of keys and values, not four
    assert experiment.compute.blocks is not None and experiment.compute.blocks.checkpoint == folder


@pytest.mark.parametrize(
    ("key", "ours", "theirs"),
    [
        ("n_blocks", "7", "8"),
        ("hidden_size", "128", "64"),
        ("vocab", "300", "512"),
        ("family", "llama", "bloom"),
    ],
)
def test_a_checkpoints_sizes_win_over_the_scenarios_which_is_said(
    key: str, ours: str, theirs: str, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(make_config("bloom", 8, 64, 4, 512))
    as_it_is = blocks(f"compute.model={folder}")
    assert not caplog.messages
    others = blocks(f"compute.model={folder}", f"model.{key}={ours}", "model.block_size=1 MB", "model.name=x")
    assert caplog.messages == [f"{folder}: the checkpoint's sizes are used: {key} {theirs} (not {ours})"]
    assert others.problem.model == as_it_is.problem.model


def test_a_shipped_scenario_of_another_model_serves_a_checkpoint(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(make_config("bloom", 10, 64, 4, 512))
    model = load_experiment("clustered", [f"compute.model={folder}"]).problem.model
    assert (model.n_blocks, model.hidden_size, model.value_bytes) == (10, 64, 4)
    assert model.block_bytes < 1e6
    said, *scaled = caplog.messages
    assert [text.split('"')[1] for text in scaled] == ["mig-1g", "a100"]
    assert "n_blocks 10 (not 70), hidden_size 64 (not 14336)" in said


def test_a_record_of_the_stub_says_where_its_checkpoint_lies(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(checkpoint(make_config("bloom", 8, 64, 4, 512)))
    monkeypatch.chdir(folder.parent)
    experiment = load_experiment("clustered", [f"compute.model={folder.name}"])
    assert f'model = "{folder}"' in dump_toml(experiment)


def test_a_record_is_not_repeated_with_another_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(make_config("bloom", 8, 64, 4, 512))
    record = tmp_path / "scenario.toml"
    record.write_text(dump_toml(blocks(f"compute.model={folder}")), encoding="utf-8")
    (Path(folder) / "config.json").write_text(json.dumps(make_config("bloom", 9, 64, 4, 512)))
    with pytest.raises(
        ScenarioError, match=r"model.n_blocks: is 8, .* has 9; a run's own scenario.toml needs"
    ):
        load_experiment(str(record))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, "has model_type 'gpt2', which is not supported; it must be bloom or llama"),
        ("{", "cannot be read"),
        ("[]", "is not a model's configuration"),
        ({"model_type": "bloom", "n_layer": 8, "n_head": 4, "vocab_size": 5}, "does not have hidden_size"),
    ],
)
def test_a_checkpoint_that_is_none_of_ours_is_refused(
    config: Any, words: str, checkpoint: Checkpoint
) -> None:
    assert words in complaint(f"compute.model={checkpoint(config)}")


def test_a_folder_that_is_not_there_is_named_with_what_to_give(tmp_path: Path) -> None:
    assert "there is no folder nowhere; give" in complaint("compute.model=nowhere")
    assert f"{tmp_path} is not a checkpoint: it has no config.json" in complaint(f"compute.model={tmp_path}")


def test_a_folder_may_be_relative_to_the_scenario_file(tmp_path: Path, checkpoint: Checkpoint) -> None:
    folder = checkpoint(make_config("bloom", 8, 64, 4, 512))
    text = (Path(__file__).parents[3] / "scenarios/bloom-tiny.toml").read_text(encoding="utf-8")
    text = text.replace('backend = "stub"', 'backend = "blocks"\nmodel = "checkpoint"')
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    experiment = load_experiment(str(tmp_path / "mine.toml"))
    assert experiment.compute.blocks is not None and experiment.compute.blocks.checkpoint == folder


def test_a_recorded_run_can_be_read_without_its_checkpoint(tmp_path: Path, checkpoint: Checkpoint) -> None:
    folder = checkpoint(make_config("bloom", 8, 64, 4, 512))
    experiment = blocks(f"compute.model={folder}", NO_MODEL, "compute.dtype=float16")
    (tmp_path / "scenario.toml").write_text(dump_toml(experiment))
    assert load_experiment(str(tmp_path / "scenario.toml")) == experiment
    (Path(folder) / "config.json").unlink()
    again = load_experiment(str(tmp_path / "scenario.toml"))
    assert again.problem == experiment.problem


@pytest.mark.parametrize(
    "options",
    [
        ("compute.random_weights=true",),
        ('compute.device=["cuda:0", "cuda:1"]', "compute.weights=nf4", "compute.dtype=bfloat16"),
        (
            'model={profile="bloom-176b", n_blocks=2}',
            "compute.random_weights=true",
            'servers.0.memory="99 GB"',
        ),
    ],
)
def test_a_resolved_scenario_is_the_same_experiment_again(options: tuple[str, ...], tmp_path: Path) -> None:
    experiment = blocks(*options)
    (tmp_path / "again.toml").write_text(dump_toml(experiment))
    assert load_experiment(str(tmp_path / "again.toml")) == experiment


@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_of_every_familys_checkpoint_can_be_read(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if family in MIXTURES else {}
    folder = checkpoint(make_config(family, 4, 32, 4, 300, more=more))
    experiment = blocks(f"compute.model={folder}", NO_MODEL)
    (tmp_path / "again.toml").write_text(dump_toml(experiment))
    assert load_experiment(str(tmp_path / "again.toml")) == experiment


def test_random_weights_have_the_size_of_the_model_that_is_named() -> None:
    experiment = blocks(
        'model={profile="bloom-176b", n_blocks=2}', "compute.random_weights=true", "compute.dtype=bfloat16"
    )
    assert experiment.compute.blocks is not None
    assert experiment.compute.blocks.config["n_layer"] == 2
    assert experiment.compute.blocks.config["hidden_size"] == 14336
    assert experiment.problem.model.block_bytes == 2 * 2_466_437_120  # not the profile's, which is in NF4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("time_scale=20",), "time_scale: is 20, but real blocks compute in real time; it must be 1"),
        ((NO_MODEL,), "compute: needs a model"),
        (("compute.device=tpu",), '"cpu", "cuda", "cuda:0"'),
        (("compute.device=[]",), '"cpu", "cuda", "cuda:0"'),
        (("compute.dtype=int4",), "compute.dtype"),
        (("compute.threads=0",), "compute.threads"),
        (("model.heads=5",), "model.heads: is 5, but must divide hidden_size 64"),
        (("model.kv_heads=2",), "model.kv_heads: is not for family bloom"),
        (
            ("model.value_bytes=2",),
            "model.value_bytes: is 2, but values of compute.dtype float32 have 4 bytes",
        ),
        (
            ("compute.model=.", "compute.random_weights=true"),
            "compute.random_weights: is only for a model without",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_sentence(options: tuple[str, ...], words: str) -> None:
    assert words in complaint(*options)


def test_one_step_after_another_unless_there_are_several_streams() -> None:
    assert blocks().compute.batching == "serial"
    assert blocks("compute.streams=4").compute.batching == "none"
