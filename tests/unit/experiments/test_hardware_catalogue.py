"""GPUs and models by name in scenarios: what follows from them, and which times win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.steps import StepTimes
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.catalogue import gpus, models, sizes_of_table
from testbed.experiments.families import ConfigError, make_config, sizes_of
from testbed.experiments.profiles import measured_profiles, named_model
from testbed.experiments.roofline import (
    BLOCK_OVERHEAD_S,
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Block,
    RooflineError,
    block_of,
    roofline,
)
from tests.unit.experiments.conftest import Complain, Load

# Parameters of all blocks, in billions: what the makers publish, less embeddings and heads.
PUBLISHED = {
    "bloom-7b1": 7.069 - 250880 * 4096 / 1e9,
    "bloom-176b": 176.247 - 250880 * 14336 / 1e9,
    "llama-2-70b": 68.977 - 2 * 32000 * 8192 / 1e9,
    "llama-3-8b": 8.030 - 2 * 128256 * 4096 / 1e9,
    "llama-3-405b": 405.853 - 2 * 128256 * 16384 / 1e9,
    "mistral-7b": 7.248 - 2 * 32768 * 4096 / 1e9,
    "mistral-nemo-12b": 12.248 - 2 * 131072 * 5120 / 1e9,
    "mistral-small-24b": 23.572 - 2 * 131072 * 5120 / 1e9,
    "mistral-large-123b": 122.610 - 2 * 32768 * 12288 / 1e9,
    "qwen2.5-0.5b": 0.494 - 151936 * 896 / 1e9,
    "qwen2.5-7b": 7.616 - 2 * 152064 * 3584 / 1e9,
    "qwen2.5-72b": 72.706 - 2 * 152064 * 8192 / 1e9,
    "qwen3-8b": 8.191 - 2 * 151936 * 4096 / 1e9,
    "qwen3-32b": 32.762 - 2 * 151936 * 5120 / 1e9,
}


# Of data sheets: gigabytes, GB/s, dense TFLOPS of fp32 and of fp16 with sums in fp32; docs/hardware.md says what was checked.
SHEETS = {
    "a100-40gb": (40, 1555, 19.5, 312),
    "a100-80gb": (80, 2039, 19.5, 312),
    "a100-80gb-pcie": (80, 1935, 19.5, 312),
    "h100": (80, 3350, 67, 1979 / 2),
    "h100-pcie": (80, 2000, 51, 1513 / 2),
    "h200": (141, 4800, 67, 1979 / 2),
    "l4": (24, 300, 30.3, 242 / 2),
    "l40s": (48, 864, 91.6, 362.05),
    "rtx-3090": (24, 936, 35.6, 71),
    "rtx-4090": (24, 1008, 82.6, 330.4 / 2),
    "t4": (16, 320, 8.1, 65),
    "v100-16gb": (16, 900, 15.7, 125),
    "v100-32gb": (32, 900, 15.7, 125),
    "v100-16gb-pcie": (16, 900, 14, 112),
    "v100-32gb-pcie": (32, 900, 14, 112),
}
SLICES = {
    "a100-40gb-mig-1g": ("a100-40gb", 14 / 108, 1 / 8),
    "a100-80gb-mig-1g": ("a100-80gb", 14 / 108, 1 / 8),
    "a100-80gb-mig-2g": ("a100-80gb", 28 / 108, 2 / 8),
    "a100-80gb-mig-3g": ("a100-80gb", 42 / 108, 4 / 8),
    "h100-mig-1g": ("h100", 16 / 132, 1 / 8),
    "h100-mig-3g": ("h100", 60 / 132, 4 / 8),
}


@pytest.mark.parametrize("name", SHEETS)
def test_a_gpu_has_the_figures_of_its_data_sheet_without_sparsity(name: str) -> None:
    gpu, (memory_gb, bandwidth_gbps, fp32, fp16) = gpus()[name], SHEETS[name]
    assert gpu.memory_bytes == memory_gb * 1e9 and gpu.bandwidth_bytes_per_s == bandwidth_gbps * 1e9
    assert gpu.flops["fp32"] == fp32 * 1e12 and gpu.flops["fp16"] == pytest.approx(fp16 * 1e12)
    assert gpu.flops.get("bf16") == (None if name.startswith(("t4", "v100")) else gpu.flops["fp16"])


@pytest.mark.parametrize("name", SLICES)
def test_every_slice_has_its_share_of_the_figures(name: str) -> None:
    gpu, (whole_name, compute, memory) = gpus()[name], SLICES[name]
    whole = gpus()[whole_name]
    assert gpu.memory_bytes == pytest.approx(whole.memory_bytes * memory)
    assert gpu.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s * memory)
    assert gpu.flops == pytest.approx({dtype: flops * compute for dtype, flops in whole.flops.items()})


def test_every_gpu_of_the_catalogue_is_held_to_its_data_sheet() -> None:
    assert gpus().keys() == {*SHEETS, *SLICES}


def block(model: str, dtype: str | None = None) -> Block:
    found = block_of(named_model(model, dtype))
    assert found is not None
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_models_blocks_have_as_many_values_as_its_makers_publish(name: str) -> None:
    sizes = sizes_of_table(models()[name])
    assert sizes is not None
    assert sizes.n_blocks * sizes.block_bytes("plain", 1) / 1e9 == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_a_block_is_as_large_as_its_type_says() -> None:
    sizes = {dtype: named_model("llama-3-70b", dtype).block_size for dtype in ("fp32", "fp16", "bf16", "nf4")}
    assert sizes["fp32"] == 2 * 855_654_400 * 2
    assert sizes["fp16"] == sizes["bf16"] == 855_654_400 * 2
    assert sizes["nf4"] == pytest.approx(855_654_400 * 0.516, rel=1e-3)


def test_caches_hold_the_keys_and_values_of_grouped_heads() -> None:
    assert named_model("llama-3-70b").cache_per_token == 2 * 8 * 128 * 2
    assert named_model("qwen3-32b").cache_per_token == 2 * 8 * 128 * 2
    assert named_model("llama-2-7b", "fp32").cache_per_token == 2 * 4096 * 4


def test_the_papers_model_keeps_the_papers_numbers_unless_its_type_is_another() -> None:
    assert named_model("bloom-176b").block_size == 1.3233976672e9
    assert named_model("bloom-176b", "bf16").block_size == 2 * 2_466_437_120


def test_a_family_whose_blocks_cannot_be_computed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'mamba', which is not supported; it must be bloom or llama or "):
        sizes_of({**make_config("llama", 2, 64, 4, 300), "model_type": "mamba"})


def test_decode_reads_the_weights_once() -> None:
    gpu, one = gpus()["l4"], block("llama-3-70b")
    times = roofline(gpu, one)
    read_s = one.block_bytes / (300e9 * MEMORY_EFFICIENCY)
    assert times.decode_s == pytest.approx(read_s + BLOCK_OVERHEAD_S, rel=1e-5)
    assert times.decode_at_s(1000) - times.decode_s == pytest.approx(
        1000 * one.cache_bytes_per_token / (300e9 * MEMORY_EFFICIENCY), rel=1e-5
    )


def test_a_prefill_takes_the_larger_of_reading_and_computing() -> None:
    gpu, one = gpus()["l4"], block("llama-3-70b")
    times = roofline(gpu, one)
    assert times.prefill_s(1) == times.prefill_s(100) == times.decode_s
    attention = 2 * one.width * 2000**2
    computing_s = (2 * one.values * 2000 + attention) / (gpu.flops["bf16"] * COMPUTE_EFFICIENCY)
    assert times.prefill_s(2000) == pytest.approx(computing_s + BLOCK_OVERHEAD_S, rel=1e-4)


def test_nf4_decodes_faster_and_is_written_out_for_a_prefill() -> None:
    gpu, plain, nf4 = gpus()["a100-80gb"], block("llama-3-70b"), block("llama-3-70b", "nf4")
    fast, slow = roofline(gpu, nf4), roofline(gpu, plain)
    assert fast.decode_s < slow.decode_s / 3
    assert fast.prefill_s(20) > slow.prefill_s(20)
    assert fast.prefill_slope_s == slow.prefill_slope_s


def test_a_slice_has_its_share_of_the_gpu() -> None:
    whole, part = gpus()["a100-80gb"], gpus()["a100-80gb-mig-1g"]
    assert part.memory_bytes * 8 == whole.memory_bytes
    assert part.bandwidth_bytes_per_s * 8 == whole.bandwidth_bytes_per_s
    assert part.flops["bf16"] == pytest.approx(whole.flops["bf16"] * 14 / 108)


def test_every_gpu_names_its_source_and_has_fp16() -> None:
    for gpu in gpus().values():
        assert "NVIDIA" in gpu.source
        assert gpu.flops["fp16"] > gpu.flops["fp32"]
        assert 1e11 < gpu.bandwidth_bytes_per_s < 1e13


def test_a_type_that_the_hardware_has_not_is_refused() -> None:
    with pytest.raises(RooflineError, match="t4 does not support bf16; use one of fp32, fp16, int8, nf4"):
        roofline(gpus()["t4"], block("llama-3-8b"))
    assert roofline(gpus()["t4"], block("llama-3-8b", "nf4")).decode_s > 0


def test_a_scenario_names_a_gpu_and_a_model(load: Load) -> None:
    experiment = load("model={profile='llama-3-8b'}", "servers.0.hardware=l4")
    server, model = experiment.problem.servers[0], experiment.problem.model
    law = roofline(gpus()["l4"], block("llama-3-8b"))
    assert (model.n_blocks, model.hidden_size) == (32, 4096)
    assert server.memory_bytes == 0.9 * 24e9
    assert server.prefill_s(20) == law.prefill_s(20)
    assert server.decode_at_s(0) == pytest.approx(law.decode_s)
    assert server.petals_forward_rps == pytest.approx(1024 / law.prefill_s(1024))


def test_a_model_by_family_states_its_type_and_feed_forward_size(load: Load) -> None:
    document = load("model={profile='llama-3-8b', dtype='nf4'}", "servers.0.hardware=l4").document
    assert document["model"]["dtype"] == "nf4"
    assert document["model"]["feed_forward"] == 14336
    made = load(
        "model={family='llama', n_blocks=4, hidden_size=1024, heads=8, vocab=512}", "servers.0.hardware=l4"
    )
    assert (made.document["model"]["dtype"], made.document["model"]["feed_forward"]) == ("fp32", 2736)


def test_a_resolved_scenario_with_a_gpu_gives_the_same_experiment(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "scenario.toml"
    for hardware in ("rtx-4090", "a100"):
        experiment = load("model={profile='qwen3-32b', dtype='nf4'}", f"servers.0.hardware={hardware}")
        path.write_text(dump_toml(experiment), encoding="utf-8")
        caplog.clear()
        again = load_experiment(str(path))
        assert again.problem == experiment.problem
        assert again.document == experiment.document
        assert not caplog.messages


def test_a_profile_of_another_model_is_scaled_and_said(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    server = load("model={profile='llama-3-70b'}").problem.servers[0]
    [said] = caplog.messages
    assert said.startswith('hardware "a100" was measured for bloom-176b (nf4): its times are scaled to')
    measured = measured_profiles()["a100"]
    old = roofline(measured.gpu, measured.block)
    new = roofline(measured.gpu, block("llama-3-70b"))
    assert server.decode_s == pytest.approx(3.2197e-3 * new.decode_s / old.decode_s, rel=1e-4)
    assert server.prefill_slope_s == pytest.approx(
        0.0743e-3 * new.prefill_slope_s / old.prefill_slope_s, rel=1e-4
    )
    assert server.memory_bytes == 79.13e9


def test_the_measured_model_keeps_its_times_however_many_blocks_it_has(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    for options in ((), ("model.n_blocks=8",), ("model.name=mine",), ("model.block_size=1 GB",)):
        assert load(*options).problem.servers[0].decode_s == 3.2197e-3
    assert not caplog.messages
    assert load("model.dtype=bf16").problem.servers[0].decode_s > 6e-3
    assert len(caplog.messages) == 1


def test_times_of_the_scenarios_own_are_never_scaled(load: Load) -> None:
    server = load("model={profile='llama-3-70b'}", "hardware.a100={decode='1 ms'}").problem.servers[0]
    assert server.decode_s == 1e-3


def test_a_model_given_by_bytes_alone_is_told_whose_times_it_has(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    bare = "model={name='x', n_blocks=4, hidden_size=512, block_size='1 GB'}"
    assert load(bare).problem.servers[0].decode_s == 3.2197e-3
    [said] = caplog.messages
    assert "was measured for bloom-176b (nf4), and its times are used unchanged" in said


def test_a_gpu_needs_a_model_with_sizes(complaint: Complain) -> None:
    bare = "model={name='x', n_blocks=4, hidden_size=512, block_size='1 GB'}"
    assert '"l4" is a GPU, whose times are computed' in complaint(bare, "servers.0.hardware=l4")
    assert "t4 does not support bf16" in complaint("model={profile='llama-3-8b'}", "servers.0.hardware=t4")


def test_measured_times_win_over_derived_ones(load: Load) -> None:
    options = ("model={profile='llama-3-70b', dtype='fp16'}", "servers.0.count=12")
    l4 = load(*options, "servers.0.hardware=l4").problem.servers[0]
    assert l4.decode_s == 6.9e-3
    assert l4.prefill_slope_s == 0.033426e-3
    assert l4.petals_forward_rps == pytest.approx(1024 / l4.prefill_s(1024))
    h100 = load(*options, "servers.0.hardware=h100").problem.servers[0]
    law = roofline(gpus()["h100"], block("llama-3-70b", "fp16"))
    assert h100.prefill_slope_s == law.prefill_slope_s


def test_petals_numbers_are_asked_for_only_where_petals_uses_them_and_all_at_once(
    load: Load, complaint: Complain
) -> None:
    own = (
        "hardware.x={memory='80 GB', decode='1 ms', prefill_base='1 ms', prefill_per_token='1 us'}",
        "servers.0.hardware=x",
    )
    server = load(*own).problem.servers[0]
    assert server.petals_forward_rps == pytest.approx(1024 / (1e-3 + 1024e-6))
    assert server.petals_network_rps == pytest.approx(100e6 / (8 * 28672))
    assert "hardware.x: petals_forward_rps and petals_network_rps are missing" in complaint(
        *own, "policy.name=petals"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("model={profile='llama-3-8b', dtype='fp6'}",), 'model.dtype: unknown value "fp6"'),
        (("model.feed_forward=7",), "model.feed_forward: is 7, but family bloom has 4 x hidden_size"),
        (("model.head_size=7",), "model.head_size: is not for family bloom"),
        (("model={name='x'}",), "model: n_blocks, hidden_size and block_size are missing"),
        (
            ("model={profile='qwen3-8b'}", "compute.backend=blocks"),
            'model.family: is "qwen3", whose blocks cannot be computed',
        ),
        (
            ("model={profile='llama-3-8b', dtype='nf4'}", "compute.backend=blocks"),
            'model.dtype: is "nf4", but real blocks are computed in float32 with plain weights',
        ),
    ],
)
def test_models_and_types_that_cannot_be_are_refused_in_one_sentence(
    complaint: Complain, options: tuple[str, ...], words: str
) -> None:
    assert words in complaint(*options)


def test_a_step_is_never_shorter_than_reading_the_weights() -> None:
    times = StepTimes(decode_s=1.0, prefill_base_s=0.5, prefill_slope_s=0.25, prefill_least_s=4.0)
    assert [times.prefill_s(n) for n in (1, 14, 20)] == [4.0, 4.0, 5.5]
    assert times.batch_s(2, [], range(3)) == times.step_s(0, 3, 2) == 8.0
    without = replace(times, prefill_least_s=0.0)
    assert without.batch_s(2, [], range(3)) == without.step_s(0, 3, 2) == 2.5
