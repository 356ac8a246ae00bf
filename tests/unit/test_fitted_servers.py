"""``--model DIR`` without a scenario: servers that are sized to the checkpoint, with times that were measured."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from testbed.control.placing import place_experiment
from testbed.errors import UserError
from testbed.experiments import Change, load_experiment
from testbed.experiments.families import make_config
from testbed.runtime.blocks import make_checkpoint
from testbed.studies import fitted as module
from testbed.studies.calibrate.command import subject_of
from testbed.studies.calibrate.quick import QuickProfile, quick_profile
from testbed.studies.fitted import fitted
from tests.support.blocks import need_blocks

need_blocks()

DECODE_S = 0.0035


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("c") / "m"
    make_checkpoint(folder, make_config("llama", 30, 16, 2, 300), 1)
    return str(folder)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are known, in place of measured ones."""

    def quick(source: Any, device: Any) -> QuickProfile:
        subject = subject_of(source, device, 0, 0.0)
        about = {
            "model": source.name,
            "dtype": "fp32" if device.dtype == "float32" else "bf16",
            "block_values": subject.block_values,
            "heads_width": subject.heads_width,
        }
        times = {"decode": f"{DECODE_S} s", "step_base": "0 s", "prefill_base": "1 ms"}
        return QuickProfile({**times, "prefill_per_token": "1 ms", "measured": about}, "5 ms")

    monkeypatch.setattr(module, "quick_profile", quick)


def experiment_of(checkpoint: str, network: str | None, *given: str) -> Any:
    scenario, changes = fitted(checkpoint, network, given)
    return load_experiment(scenario, [*changes, *given])


@pytest.mark.parametrize("network", [None, "clustered", "bloom-tiny", "abovenet"])
def test_every_network_holds_the_checkpoint_with_its_servers_names(
    network: str | None, checkpoint: str, known: None, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = experiment_of(checkpoint, network)
    own = load_experiment(network or "wan")
    assert [server.name for server in experiment.problem.servers] == [s.name for s in own.problem.servers]
    assert experiment.network.links.keys() == own.network.links.keys()
    assert experiment.problem.model.n_blocks == 30
    assert {server.decode_s for server in experiment.problem.servers} == {DECODE_S}
    assert experiment.problem.hub_token_s == 0.005
    assert experiment.compute.blocks is not None and experiment.compute.is_measured
    with caplog.at_level(logging.WARNING):
        placement = place_experiment(experiment).placement
    assert {block for held in placement.ranges for block in range(held.first, held.last)} == set(range(30))
    shares = [held.n_blocks / 30 for held in placement.ranges]
    most = [
        min(s.memory_bytes / own.problem.model.block_bytes, s.block_cap or 1e9) / own.problem.model.n_blocks
        for s in own.problem.servers
    ]
    assert all(share <= could + 1 / 30 for share, could in zip(shares, most, strict=True))


def test_servers_are_sized_in_the_dtype_that_is_given(checkpoint: str, known: None) -> None:
    full, half = (experiment_of(checkpoint, None, *given) for given in ((), ("compute.dtype=bfloat16",)))
    assert half.problem.servers[0].memory_bytes == pytest.approx(full.problem.servers[0].memory_bytes / 2)
    assert half.compute.blocks.dtype == "bfloat16" and half.compute.is_measured


def test_the_times_of_other_blocks_are_not_measured_ones(checkpoint: str, known: None) -> None:
    other = [Change("compute", {"backend": "blocks", "model": checkpoint}), Change("model", {})]
    assert not load_experiment("wan", other).compute.is_measured
    experiment = experiment_of(checkpoint, None)
    again = load_experiment(_document(experiment))
    assert again.compute.is_measured, "a stored run knows it, too"


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("mixtral", {"num_local_experts": 4, "sliding_window": 5}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2}),
        ("gpt_oss", {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"] * 3}),
    ],
)
def test_the_times_of_a_mixtures_blocks_are_known_as_its_own(
    family: str, more: dict[str, Any], known: None, tmp_path: Path
) -> None:
    config = make_config(family, 6, 16, 2, 300, more={"num_experts_per_tok": 2, **more})
    (tmp_path / "config.json").write_text(json.dumps(config))
    experiment = experiment_of(str(tmp_path), None)
    assert experiment.compute.is_measured
    assert load_experiment(_document(experiment)).compute.is_measured


def test_times_that_are_changed_by_hand_are_not_measured_ones(checkpoint: str, known: None) -> None:
    scenario, changes = fitted(checkpoint, None, [])
    for key, is_measured in (("memory", True), ("decode", False)):
        own = {"base": "this-machine-10", key: "400 MB" if key == "memory" else "1 ms"}
        renamed = [Change("hardware.own", own), Change("servers.0.hardware", "own")]
        assert load_experiment(scenario, [*changes, *renamed]).compute.is_measured is is_measured


def _document(experiment: Any) -> Any:
    from testbed.experiments.sources import Document

    return Document(dict(experiment.document))


def test_own_sizes_of_servers_contradict_it(checkpoint: str, known: None) -> None:
    with pytest.raises(UserError, match="leave out --set of servers"):
        fitted(checkpoint, None, ["servers.0.count=2"])


def test_a_folder_without_a_model_and_an_unknown_network_are_refused(tmp_path: Path, checkpoint: str) -> None:
    with pytest.raises(UserError, match="is not a checkpoint"):
        fitted(str(tmp_path), None, [])
    with pytest.raises(UserError, match="no such file or shipped scenario"):
        fitted(checkpoint, "no-such-network", [])
    with pytest.raises(UserError, match='"auto" has no times to measure'):
        fitted(checkpoint, None, ["compute.device=auto"])


def test_a_quick_profile_has_all_times_of_a_block(checkpoint: str) -> None:
    from testbed.studies.calibrate.backend import Device, read_source

    profile = quick_profile(
        read_source(checkpoint, random_weights=False), Device("cpu", "float32", "plain", 1, 1)
    )
    hardware = Change("hardware", {"here": {**profile.hardware, "block_cap": 10}})
    servers = Change("servers", [{"hardware": "here", "site": "London", "count": 3}])
    compute = Change("compute", {"backend": "blocks", "model": checkpoint})
    experiment = load_experiment("wan", [Change("model", {}), compute, hardware, servers])
    assert experiment.compute.is_measured
    assert experiment.problem.servers[0].decode_s > 0 and experiment.problem.servers[0].prefill_slope_s >= 0
    assert profile.hub_token is not None
