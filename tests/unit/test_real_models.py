"""The settings that nodes get for a real model, and the errors if there cannot be one."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodes.blocks.spec import BlocksSpec, HubSpec, Sampling, WeightSource
from testbed.cli.options import changes
from testbed.control.placing import place_experiment
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.checkpoints import read_config, require_weights
from testbed.experiments.experiment import Experiment
from testbed.experiments.families import make_config
from testbed.inspect.machine import _blocks_rows
from testbed.inspect.model import make_tiny_command, show_command
from testbed.inspect.validity import validate_command
from testbed.runs.generate import GenerateOptions, generate_command
from testbed.runs.session import check_can_run, placed_experiment
from testbed.runtime import wiring
from testbed.runtime.blocks import BlocksModel, blocks_model
from testbed.studies.fitted import fitted
from tests.support.blocks import need_blocks

NOTHING = GenerateOptions(None, None, 4, None, None, None, None)
CONTROL = Path("control.sock")


def blocks(*options: str) -> Experiment:
    return load_experiment("bloom-tiny", ["compute.backend=blocks", *options])


def config_file(folder: Path, **sizes: Any) -> str:
    config = {"model_type": "bloom", "n_layer": 8, "hidden_size": 64, "n_head": 4, "vocab_size": 512, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def random_model(*options: str) -> tuple[Experiment, BlocksModel]:
    experiment = blocks("compute.random_weights=true", *options)
    real = blocks_model(experiment, Path())
    assert real is not None
    return experiment, real


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_devices_go_round_the_servers_and_every_server_has_its_memory_as_a_limit() -> None:
    experiment, real = random_model('compute.device=["cuda:0", "cuda:1"]', "compute.threads=3")
    placement = place_experiment(experiment).placement
    devices = []
    for number, server in enumerate(experiment.problem.servers):
        config = wiring.server_config(experiment, placement, number, CONTROL, "10.0.0.1", False, real)
        assert isinstance(config.compute, BlocksSpec)
        assert config.compute.memory_bytes == server.memory_bytes == 20e6
        assert config.compute.n_threads == 3
        devices.append(config.compute.device)
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


def test_a_client_has_its_part_of_the_same_model_on_the_first_device() -> None:
    experiment, real = random_model('compute.device=["cuda:0", "cuda:1"]', "model.seed=9")
    config = wiring.client_config(experiment, "client-0", CONTROL, "10.0.0.1", Path("log"), real)
    assert isinstance(config.model, HubSpec)
    assert config.model.source == WeightSource(make_config("bloom", 8, 64, 4, 512), None, 9)
    assert config.model.device == "cuda:0"


def test_the_stub_has_no_real_model() -> None:
    assert blocks_model(load_experiment("bloom-tiny"), Path()) is None


def test_a_large_model_is_not_made_on_the_way_into_a_run(tmp_path: Path) -> None:
    need_blocks()
    experiment = blocks('model={profile="bloom-176b", n_blocks=2}', 'hardware.small.memory="90 GB"')
    with pytest.raises(
        UserError, match=r"a model of 34\.\d GB is too large to be made for one run; .*--random-weights"
    ):
        check_can_run(experiment)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_has_changed_since_the_run_was_recorded_is_refused(tmp_path: Path) -> None:
    experiment = blocks()
    assert experiment.compute.blocks is not None
    other = config_file(tmp_path, n_layer=9)
    changed = replace(
        experiment,
        compute=replace(experiment.compute, blocks=replace(experiment.compute.blocks, checkpoint=other)),
    )
    with pytest.raises(UserError, match="has 9 blocks of hidden size 64, but the scenario has 8 of 64"):
        blocks_model(changed, tmp_path)


LLAMA = make_config("llama", 2, 32, 4, 300)
MIXTURE = make_config("gpt_oss", 2, 32, 4, 300, more={"num_local_experts": 4, "num_experts_per_tok": 2})
SCALED = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (LLAMA | SCALED, (), "rotary embeddings of type 'dynamic' are not supported"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, (), r"quantised already \(gptq\)"),
        (MIXTURE, ("compute.weights=nf4",), "the experts of a gpt_oss model are not quantised: give weights"),
        (LLAMA, (), r"holds neither model\.safetensors nor"),
    ],
)
def test_a_checkpoint_that_servers_would_refuse_is_refused_before_they_start(
    config: dict[str, Any], options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    need_blocks()
    given = [f"compute.model={config_file(tmp_path, **config)}", "model={}", *options]
    with pytest.raises(UserError, match=words):
        check_can_run(blocks(*given))
    with pytest.raises(UserError, match=words):
        validate_command("bloom-tiny", ["compute.backend=blocks", *given])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (SCALED, "rotary embeddings of type 'dynamic' are not supported"),
        ({"rope_scaling": {"type": ["linear"]}}, "rotary embeddings of type ['linear'] are not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised already (mxfp4) are not supported"),
        (
            {"layer_types": 2 * ["linear_attention"]},
            "blocks of the kind 'linear_attention' are not supported",
        ),
    ],
)
def test_a_checkpoint_that_servers_would_refuse_is_shown_as_such_and_not_measured(
    more: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_file(tmp_path, **LLAMA | more)
    answer, text = show_command(folder, None, None)
    assert words in answer["problem"] and f"its blocks cannot be loaded: {answer['problem']}" in text
    with pytest.raises(UserError, match=re.escape(words)):
        fitted(folder, None, [])
    assert "measuring" not in capsys.readouterr().err


def test_weights_are_not_checked_without_safetensors_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    folder = config_file(tmp_path, **LLAMA)
    (tmp_path / "model.safetensors").touch()
    answer, _ = show_command(folder, None, None)
    assert answer["problem"].endswith(
        "model.safetensors needs safetensors: pip install '.[blocks]' in the checkout"
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_checkpoints_file_that_is_nested_too_deeply_is_one_sentence(name: str, tmp_path: Path) -> None:
    folder = config_file(tmp_path, **LLAMA)
    (tmp_path / name).write_text(100_000 * "[")
    with pytest.raises(UserError, match=rf"{name} .*recursion"):
        read_config(folder)
        require_weights(folder, 2)


def test_the_sizes_of_a_checkpoint_are_a_range_where_blocks_differ(tmp_path: Path) -> None:
    more = {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    answer, text = show_command(
        config_file(tmp_path, **make_config("qwen3_moe", 3, 32, 4, 300, more=more)), None, None
    )
    dense, mixed, *_ = answer["block_bytes"]
    assert answer["block_bytes"] == [dense, mixed, mixed] and dense < mixed
    assert (
        f"s_m {dense / 1e6:.3f} to {mixed / 1e6:.3f} MB; s_c {answer['cache_bytes_per_token']} B per token"
        in text
    )


def test_experts_that_no_server_quantises_have_no_size(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the experts of a gpt_oss model are not quantised"):
        show_command(config_file(tmp_path, **MIXTURE), None, "nf4")


@pytest.mark.parametrize(("more", "words"), [({}, "holds neither model.safetensors"), (SCALED, "rotary")])
def test_a_draft_model_that_cannot_be_loaded_is_refused_before_anything_starts(
    more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    need_blocks()
    folder = config_file(tmp_path, **LLAMA | more)
    drafts = ('decoding.drafter="model"', f"decoding.draft_model={folder}")
    with pytest.raises(UserError, match=f"^decoding.draft_model: .*{words}"):
        check_can_run(blocks("compute.random_weights=true", *drafts))


def test_requests_longer_than_the_model_is_made_for_are_refused(tmp_path: Path) -> None:
    experiment = blocks("workload.n_input_tokens=2000", "workload.n_output_tokens=49")
    assert experiment.compute.blocks is not None
    checkpoint = config_file(tmp_path, seq_length=2048)
    given = replace(
        experiment,
        compute=replace(experiment.compute, blocks=replace(experiment.compute.blocks, checkpoint=checkpoint)),
    )
    with pytest.raises(UserError, match="2049 tokens, input and output, but the model is made for 2048"):
        blocks_model(given, tmp_path)


def test_a_request_whose_steps_a_gpus_server_has_no_room_for_is_refused_where_the_scenario_is_read() -> None:
    long = ("compute.random_weights=true", "workload.n_input_tokens=200000", "workload.n_output_tokens=8")
    words = r"200008 tokens, input and output: one of its steps needs 12\.8 MB of a GPU's memory, but a server sets aside 7\.19 MB"
    with pytest.raises(UserError, match=words):
        blocks("compute.device=cuda", *long)
    blocks("compute.device=cpu", *long)
    blocks("compute.device=cuda", "compute.random_weights=true")


def test_without_torch_one_sentence_says_what_to_install(no_torch: None, tmp_path: Path) -> None:
    for attempt in (
        lambda: check_can_run(blocks()),
        lambda: generate_command(
            "bloom-tiny", [], NOTHING, tmp_path, as_json=True, report=False, echo=lambda _: None
        ),
        lambda: make_tiny_command(tmp_path / "m", "bloom", 1, 8, 2, 300, 0, n_kv_heads=None, n_shards=1),
    ):
        with pytest.raises(UserError, match=r"\(torch.*\): pip install '\.\[blocks\]' in the checkout$"):
            attempt()
    check_can_run(load_experiment("bloom-tiny"))  # the stub works without
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_reports_that_torch_is_missing(no_torch: None) -> None:
    blocks_row, gpu = _blocks_rows()
    assert (blocks_row["name"], blocks_row["works"]) == ("blocks", False)
    assert "torch" in blocks_row["detail"] and "pip install" in blocks_row["detail"]
    assert (gpu["name"], gpu["works"]) == ("gpu", False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "either --prompt TEXT or --prompt-ids"),
        ({"prompt": "a", "prompt_ids": "1"}, "either --prompt TEXT or --prompt-ids"),
        ({"prompt_ids": "1,x"}, "must be whole numbers such as 1,2,3"),
        ({"prompt_ids": ""}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        (
            {"prompt_ids": "1,512"},
            "token 512 of the prompt is not in the model's vocabulary: give ids from 0 to 511",
        ),
        ({"prompt_ids": "-1"}, "token -1 of the prompt"),
        ({"prompt_ids": "1", "max_new_tokens": 2048}, "more than the model's limit of 2048"),
        (
            {"prompt": "a", "max_new_tokens": 2048},
            "limit of 2048: shorten the prompt, or lower --max-new-tokens",
        ),
        ({"prompt_ids": "1", "seed": 3}, "--seed is for sampling"),
    ],
)
def test_a_prompt_that_is_none_of_this_model_is_refused_before_anything_starts(
    change: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # as if all were installed
    options = replace(NOTHING, **change)
    with pytest.raises(UserError, match=words):
        generate_command(
            "bloom-tiny", [], options, tmp_path / "run", as_json=True, report=False, echo=lambda _: None
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "sampling"),
    [
        ({}, None),
        ({"temperature": 0.0, "top_k": 5}, None),
        ({"temperature": 0.7}, Sampling(0.7, 0, 1.0, 0)),
        ({"top_k": 5, "seed": 2}, Sampling(1.0, 5, 1.0, 2)),
        ({"top_p": 0.9}, Sampling(1.0, 0, 0.9, 0)),
    ],
)
def test_tokens_are_sampled_only_if_one_of_the_samplings_settings_is_given(
    change: dict[str, Any], sampling: Sampling | None
) -> None:
    assert replace(NOTHING, **change).sampling() == sampling


def test_the_name_of_a_model_is_text_whatever_it_looks_like() -> None:
    assert [str(change) for change in changes(None, {}, "176", True)] == [
        'compute.model="176"',
        "compute.random_weights=true",
    ]
    assert changes(None, {}) == []


def test_blocks_that_the_machines_memory_cannot_hold_are_refused_before_any_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All servers load at once, so each would find room for its own blocks."""
    experiment = blocks("compute.random_weights=true")
    n_held = sum(held.n_blocks for held in place_experiment(experiment).placement.ranges)
    n_bytes = n_held * experiment.problem.model.block_bytes
    monkeypatch.setattr("testbed.runtime.blocks.available_bytes", lambda: n_bytes)
    placed_experiment(experiment)
    monkeypatch.setattr("testbed.runtime.blocks.available_bytes", lambda: 0.99 * n_bytes)
    with pytest.raises(
        UserError, match=rf"the servers' {n_held} blocks on the CPU need .* but this machine has"
    ):
        placed_experiment(experiment)
    placed_experiment(load_experiment("bloom-tiny"))  # the stub holds none
