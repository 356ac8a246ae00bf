"""Models by name: their bytes are those of the published checkpoints, and mixtures read what tokens choose."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from policies.checks import check_placement
from policies.problem import BlockRange, Hop, ModelSpec, RequestSpec, decode_step_s, service_s
from policies.steps import StepTimes
from testbed.control.placing import place_experiment
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.catalogue import DTYPES, gpu_named, gpus, models, sizes_of_table
from testbed.experiments.families import make_config
from testbed.experiments.profiles import named_model
from testbed.experiments.roofline import BLOCK_OVERHEAD_S, MEMORY_EFFICIENCY, Block, block_of, roofline
from testbed.inspect.hardware import hardware_command, model_command
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from tests.unit.experiments.conftest import Complain, Load

VISION_BYTES = {"gemma-3-4b": 2560, "gemma-3-12b": 3840, "gemma-3-27b": 5376}
"""Hidden sizes; the checkpoint also has SigLIP (416,866,032 values) and a projection of its 1,152 values."""


def seen(name: str, n_values: int) -> int:
    """The bytes of a checkpoint of Gemma 3 in 16 bits without what it sees with."""
    return 2 * (n_values - 416_866_032 - 1152 * VISION_BYTES[name] - 1152)


# Bytes of all tensors, and where they are published: `total_size` of model.safetensors.index.json, or the
# number of values that the hub lists for the checkpoint's tensors ("safetensors"), here by type.
CHECKPOINTS = {
    "qwen3-4b": (2 * 4_022_468_096, "Qwen/Qwen3-4B, values in bf16"),
    "qwen3-8b": (16_381_470_720, "Qwen/Qwen3-8B, total_size"),
    "qwen3-14b": (29_536_614_400, "Qwen/Qwen3-14B, total_size"),
    "qwen3-32b": (2 * 32_762_123_264, "Qwen/Qwen3-32B, values in bf16"),
    "qwen3-30b-a3b": (61_064_245_248, "Qwen/Qwen3-30B-A3B, total_size"),
    "qwen3-235b-a22b": (470_187_269_120, "Qwen/Qwen3-235B-A22B, total_size"),
    "gpt-oss-20b": (13_761_264_768, "openai/gpt-oss-20b, total_size"),
    "gpt-oss-120b": (65_248_815_744, "openai/gpt-oss-120b, bytes of tensors"),
    "deepseek-v3": (
        2 * 3_918_786_560 + 680_571_043_840 + 4 * 41_555_600,
        "deepseek-ai/DeepSeek-V3, values in bf16, fp8 and fp32",
    ),
    "deepseek-r1": (
        2 * 3_918_786_560 + 680_571_043_840 + 4 * 41_555_600,
        "deepseek-ai/DeepSeek-R1, values in bf16, fp8 and fp32",
    ),
    "mixtral-8x7b": (93_405_585_408, "mistralai/Mixtral-8x7B-v0.1, total_size"),
    "mixtral-8x22b": (2 * 140_620_634_112, "mistralai/Mixtral-8x22B-v0.1, values in bf16"),
    "llama-4-scout": (
        2 * (108_641_793_536 - 871_932_416),
        "meta-llama/Llama-4-Scout-17B-16E, values in bf16 without those of pictures",
    ),
    "llama-4-maverick": (
        2 * 400_711_848_960,
        "meta-llama/Llama-4-Maverick-17B-128E, values in bf16 without those of pictures",
    ),
    "gemma-3-1b": (2 * 999_885_952, "google/gemma-3-1b-it, values in bf16"),
    "gemma-3-4b": (seen("gemma-3-4b", 4_300_079_472), "google/gemma-3-4b-it, values in bf16"),
    "gemma-3-12b": (seen("gemma-3-12b", 12_187_325_040), "google/gemma-3-12b-it, values in bf16"),
    "gemma-3-27b": (seen("gemma-3-27b", 27_432_406_640), "google/gemma-3-27b-it, values in bf16"),
    # The hub lists 31,273,088,876 values, with those of pictures.
    "gemma-4-31b": (2 * 30_697_345_340, "transformers 5.23, parameters of Gemma4ForCausalLM"),
    # What corrects the router is in 32 bits: 2 bytes more for 160 experts of 90 blocks, 128 of 46.
    "glm-4.5": (2 * 358_337_791_296 + 2 * 90 * 160, "zai-org/GLM-4.5, values in bf16"),
    "glm-4.5-air": (2 * 110_468_824_832 + 2 * 46 * 128, "zai-org/GLM-4.5-Air, values in bf16"),
    "llama-3-8b": (2 * 8_030_261_248, "meta-llama/Meta-Llama-3-8B, values in bf16"),
    "llama-3-70b": (2 * 70_553_706_496, "meta-llama/Meta-Llama-3-70B, values in bf16"),
    "mistral-7b": (2 * 7_248_023_552, "mistralai/Mistral-7B-v0.3, values in bf16"),
    "qwen2.5-0.5b": (2 * 494_032_768, "Qwen/Qwen2.5-0.5B, values in bf16"),
    "qwen2.5-72b": (2 * 72_706_203_648, "Qwen/Qwen2.5-72B, values in bf16"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_models_checkpoint_has_the_published_bytes(name: str) -> None:
    assert model_command(name, None)[0]["checkpoint_bytes"] == CHECKPOINTS[name][0]


def test_kimis_checkpoint_has_the_published_bytes_but_for_a_small_table_per_block() -> None:
    """moonshotai/Kimi-K2-Instruct lists 1,029,173,256,720: 56 values more per block, of a kind unknown here."""
    assert model_command("kimi-k2", None)[0]["checkpoint_bytes"] == 1_029_173_256_720 - 2 * 61 * 56


def test_every_mixture_of_the_catalogue_is_held_to_its_checkpoint() -> None:
    mixtures = {name for name, table in models().items() if table.experts or table.window}
    assert mixtures == {name for name in (*CHECKPOINTS, "kimi-k2") if name in mixtures}


def test_a_mixture_says_what_a_token_reads_and_lists_where_blocks_differ() -> None:
    qwen, _ = model_command("qwen3-235b-a22b", None)
    # "22B activated", 0.62 G of them in the embedding.
    assert qwen["active_bytes_per_token"] == pytest.approx(2 * (22.14e9 - 151936 * 4096), rel=3e-3)
    assert qwen["block_bytes"] == (470_187_269_120 - 2 * (2 * 151936 + 1) * 4096) / 94
    assert qwen["cache_bytes_per_token"] == 2 * 4 * 128 * 2
    deepseek, text = model_command("deepseek-v3", None)
    assert len(deepseek["block_bytes"]) == deepseek["n_blocks"] == 61
    assert deepseek["block_bytes"][2] < deepseek["block_bytes"][3] == deepseek["block_bytes"][60]
    assert deepseek["cache_bytes_per_token"] == 576 * 2
    assert "8 of 256 experts" in text and "583.642 to 11511.947 MB" in text
    gemma, text = model_command("gemma-4-31b", None)
    assert gemma["cache_bytes_per_token"][:6] == 5 * [2 * 16 * 256 * 2] + [2 * 4 * 512 * 2]
    assert gemma["cache_window_tokens"][:6] == 5 * [1024] + [None]
    assert "in 50 blocks of the last 1024 tokens only" in text
    json.dumps([qwen, deepseek, gemma])


def block(name: str, dtype: str | None = None) -> Block:
    found = block_of(named_model(name, dtype))
    assert found is not None
    return found


def test_a_mixtures_step_reads_the_experts_that_its_tokens_choose() -> None:
    gpu, qwen = gpus()["h100"], block("qwen3-235b-a22b")
    times = roofline(gpu, qwen)
    expert_bytes, memory = 3 * 4096 * 1536 * 2, 3350e9 * MEMORY_EFFICIENCY
    assert qwen.experts_bytes == 128 * expert_bytes
    shared_bytes = qwen.block_bytes - 128 * expert_bytes

    def reads_s(n_tokens: int) -> float:
        n_touched = 128 * (1 - (1 - 8 / 128) ** n_tokens)
        return BLOCK_OVERHEAD_S + (shared_bytes + n_touched * expert_bytes) / memory

    assert times.decode_s == pytest.approx(reads_s(1), rel=1e-5)
    for n in (1, 2, 16, 200):
        computes_s = times.session_slope_s * (n - 1)
        assert times.batch_s(1, [0] * n, range(0)) == pytest.approx(reads_s(n) + computes_s, rel=1e-4)
    assert times.prefill_s(1) == pytest.approx(reads_s(1), rel=1e-5)
    assert times.prefill_s(20) == pytest.approx(reads_s(20), rel=1e-4)
    # Reading every expert for one token would take ten times as long.
    assert 8 < times.batch_s(1, [0] * 400, range(0)) / times.decode_s < 12


def test_a_token_is_computed_with_its_own_experts() -> None:
    qwen = block("qwen3-30b-a3b")
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    assert qwen.values == attention + 128 * 2048 + 8 * 3 * 2048 * 768


def test_kernels_that_multiply_as_they_read_write_nothing_out() -> None:
    gpu = gpus()["h100"]
    int8, fp8, int4 = (roofline(gpu, block("llama-3-70b", dtype)) for dtype in ("int8", "fp8", "int4"))
    assert fp8.decode_s == pytest.approx(int8.decode_s, rel=1e-3)
    assert fp8.prefill_base_s == int4.prefill_base_s == BLOCK_OVERHEAD_S < int8.prefill_base_s / 5
    reads_s = [times.decode_s - BLOCK_OVERHEAD_S for times in (int4, fp8)]
    assert reads_s[0] == pytest.approx((4 + 20 / 128) / 8 * reads_s[1], rel=1e-3)


def test_int4_is_what_awq_and_gptq_store_and_goes_by_their_names() -> None:
    sizes = sizes_of_table(models()["llama-3-70b"])
    assert sizes is not None
    # 4 bits, and for 128 values a scale of 16 bits and a zero point of 4.
    assert sizes.block_bytes(DTYPES["int4"][1], 2) == pytest.approx(855.638e6 * (4 + 20 / 128) / 8, rel=1e-4)
    assert model_command("llama-3-70b", "awq")[0] == model_command("llama-3-70b", "int4")[0]


def test_a_gpus_name_may_add_the_memory_that_it_has() -> None:
    assert gpu_named("h100-80gb") is gpus()["h100"] and gpu_named("h100-80gb-pcie") is gpus()["h100-pcie"]
    assert gpu_named("h100-40gb") is None and gpu_named("a100-80gb") is gpus()["a100-80gb"]
    assert hardware_command("l4-24gb", None, None)[0]["hardware"][0]["name"] == "l4"


def test_mxfp4_leaves_all_but_a_mixtures_experts_in_16_bits() -> None:
    sizes = sizes_of_table(named_model("gpt-oss-20b"))
    assert sizes is not None
    one = sizes.blocks[0]
    assert one.shared_bytes("mxfp4", 2) == one.shared_bytes("plain", 2)
    assert one.expert_bytes("mxfp4", 2) == pytest.approx(3 * 2880 * 2880 * 4.25 / 8, rel=2e-3)


MIXTURE = """
name = "mixture"
[model]
profile = "qwen3-30b-a3b"
n_blocks = 8
[[servers]]
hardware = "l4"
site = "A"
count = 2
memory = "8 GB"
[clients]
site = "A"
count = 2
[network]
kind = "clusters"
pairs = [{ sites = ["A", "A"], rtt = "0.2 ms", rate = "1000000 Gbit/s" }]
[compute]
batching = "continuous"
[workload]
rate = 12
n_requests = 24
n_input_tokens = 40
n_output_tokens = 24
[policy]
name = "proposed"
queue = "fifo"
"""


def test_the_engines_agree_on_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "mixture.toml"
    path.write_text(MIXTURE)
    case = Case(load_experiment(str(path)))
    assert all(server.experts_s > 0 for server in case.experiment.problem.servers)
    fast, virtual = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True)
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    for one, other in zip(fast.rows, virtual.rows, strict=True):
        assert one.chain == other.chain != ""
        assert one.times.ttft_s == pytest.approx(other.times.ttft_s, abs=1e-6)
        assert one.times.e2e_s == pytest.approx(other.times.e2e_s, abs=1e-6)
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(case.experiment))
    assert load_experiment(str(stored)).problem == case.experiment.problem
    # Steps are shared, and those cost more than the first session's experts.
    alone = StepTimes(4e-4, 0.0, 0.0)
    assert alone.further_s(5) == 0 < case.experiment.problem.servers[0].further_s(5)


DIFFERENT = MIXTURE.replace(
    'profile = "qwen3-30b-a3b"\nn_blocks = 8',
    'family = "gpt_oss"\nn_blocks = 6\nhidden_size = 1024\nheads = 16\nhead_size = 64\nvocab = 1000\n'
    'feed_forward = 2048\ndtype = "bf16"\nexperts = 16\nexperts_per_token = 2\ndense_blocks = 2\nwindow = 48\n'
    "full_every = 3",
)
"""Two dense blocks, and four mixtures; the third and the sixth attend to all tokens, the others to 48."""


@pytest.mark.parametrize("options", [(), ('compute.batching="none"',)], ids=["step by step", "closed form"])
@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_the_engines_agree_on_blocks_that_differ(
    options: tuple[str, ...], communication: str, tmp_path: Path
) -> None:
    path, plan = tmp_path / "different.toml", tmp_path / "plan.json"
    path.write_text(DIFFERENT.replace('name = "proposed"\n', ""))
    plan.write_text("[[1, 4], [5, 2]]")
    fixed = (f"policy.placement='fixed:{plan}'", "policy.routing='ws-rr'")
    experiment = load_experiment(str(path), [f"policy.communication='{communication}'", *fixed, *options])
    problem = experiment.problem
    server, hops = problem.servers[0], (Hop(0, 0, 4), Hop(1, 4, 6))
    assert server.pattern == (1, 1, 0, 2, 2, 0) and [law.window_tokens for law in server.others] == [48, 48]
    case = Case(experiment)
    fast, virtual = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True)
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    for one, other in zip(fast.rows, virtual.rows, strict=True):
        assert one.chain == other.chain != ""
        assert one.times.ttft_s == pytest.approx(other.times.ttft_s, abs=1e-6)
        assert one.times.e2e_s == pytest.approx(other.times.e2e_s, abs=1e-6)
    if options:  # each session as if alone: that is the closed form
        request = RequestSpec(0, 40, 24)
        first_s, all_s = service_s(problem, request, hops)
        lone = fast.rows[0].times
        assert lone.e2e_s is not None and lone.ttft_s is not None
        assert lone.e2e_s - lone.ttft_s == pytest.approx(all_s - first_s, rel=1e-4)
        decodes_s = [decode_step_s(problem, request, hops, 40 + n) for n in range(23)]
        assert sum(decodes_s) == pytest.approx(all_s - first_s, rel=1e-9)
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(experiment))
    assert load_experiment(str(stored)).problem == problem


def test_blocks_that_differ_take_their_own_memory_and_time(tmp_path: Path) -> None:
    path = tmp_path / "different.toml"
    path.write_text(DIFFERENT)
    problem = load_experiment(str(path)).problem
    model, server = problem.model, problem.servers[0]
    dense, mixture = 2 * (2 * 1024 * 1024 + 2 * 1024**2 + 3 * 1024 * 2048), 2 * 16 * 3 * 1024 * 2048
    assert model.range_bytes(BlockRange(0, 2)) == pytest.approx(2 * dense, rel=2e-3)
    assert model.range_bytes(BlockRange(2, 4)) > 2 * mixture
    assert problem.room_bytes([BlockRange(0, 2), BlockRange(2, 6)])[0] == server.memory_bytes - sum(
        model.blocks_bytes[:2]
    )
    # A batch of many reads all experts of a mixture; the dense blocks and one session do not.
    alone_s, many_s = (server.batch_s(range(0, 2), [8] * n, range(0)) for n in (1, 20))
    assert many_s - alone_s < 0.2 * alone_s
    alone_s, many_s = (server.batch_s(range(2, 4), [8] * n, range(0)) for n in (1, 20))
    assert many_s > 3 * alone_s
    # Block 2 attends to all tokens, block 3 to 48.
    beyond = [
        server.decode_of_s(1000, range(n, n + 1)) - server.decode_of_s(48, range(n, n + 1)) for n in (2, 3)
    ]
    assert beyond[0] > 0 == beyond[1]
    assert server.prefill_of_s(4000, range(3, 4)) < server.prefill_of_s(4000, range(2, 3))
    chunked = [range(0, 30), range(30, 70), range(70, 100)]
    curves_s = [server.attended(chunk.stop) - server.attended(chunk.start) for chunk in chunked]
    assert sum(curves_s) == server.attended(100)


def test_as_many_blocks_are_placed_as_fit_wherever_they_are() -> None:
    heavy_and_light = ModelSpec("m", 6, 8, 10.0, 1.0, blocks_bytes=(1.0, 10.0, 1.0, 10.0, 1.0, 10.0))
    assert [heavy_and_light.worst_bytes(n) for n in range(5)] == [0, 10, 11, 21, 22]
    # As if each were the largest, two would fit; one more does wherever it is.
    assert heavy_and_light.most_blocks(21.0) == 3 == heavy_and_light.most_blocks(21.9)
    assert heavy_and_light.most_blocks(22.0) == 4 and heavy_and_light.most_blocks(22.0, 1.0) == 2
    assert heavy_and_light.best_blocks(12.0) == 3 > heavy_and_light.most_blocks(12.0)
    assert heavy_and_light.most_blocks(1000.0) == 6 and heavy_and_light.most_blocks(0.5) == 0
    alike = ModelSpec("m", 6, 8, 10.0, 1.0)
    assert alike.most_blocks(32.9, 1.0) == 2 and alike.most_blocks(33.0, 1.0) == 3 == alike.best_blocks(
        33.0, 1.0
    )


@pytest.mark.parametrize("policy", ["proposed", "petals", "parallax", "helix", "swarm", "chain-composition"])
def test_a_mixture_in_every_second_block_is_placed_on_what_it_needs(policy: str, tmp_path: Path) -> None:
    """Each server holds four blocks, of which two are mixtures; as if all were, it would hold two."""
    path = tmp_path / "maverick.toml"
    text = MIXTURE.replace('profile = "qwen3-30b-a3b"', 'profile = "llama-4-maverick"')
    text = text.replace('hardware = "l4"', 'hardware = "h200"').replace('"8 GB"', '"80 GB"')
    path.write_text(text.replace('name = "proposed"\n', f'name = "{policy}"\n'))
    experiment = load_experiment(str(path))
    problem = experiment.problem
    found = place_experiment(experiment).placement
    check_placement(problem, found)
    assert [held.n_blocks for held in found.ranges] == [4, 4]
    assert found.uncovered(8) == []


def test_a_catalogues_model_whose_blocks_differ_is_placed_and_served(tmp_path: Path) -> None:
    path = tmp_path / "deepseek.toml"
    path.write_text(
        MIXTURE.replace('profile = "qwen3-30b-a3b"\nn_blocks = 8', 'profile = "deepseek-v3"\nn_blocks = 6')
        .replace('hardware = "l4"', 'hardware = "h200"')
        .replace('memory = "8 GB"\n', "")
    )
    simulation = simulate(Case(load_experiment(str(path))), "testbed")
    assert all(row.chain for row in simulation.rows)


ON_THE_HUB: dict[str, dict[str, object]] = {
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": {
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "sliding_window": None,
    },
    "gpt-oss-20b": {
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}
"""What the models' own ``config.json`` have beside the usual sizes."""


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_mixtures_checkpoint_has_the_times_of_its_name(name: str, tmp_path: Path) -> None:
    table = models()[name]
    assert table.family and table.n_blocks and table.hidden_size and table.heads and table.vocab
    config = make_config(
        *(table.family, table.n_blocks, table.hidden_size, table.heads, table.vocab, table.kv_heads),
        feed_forward=table.feed_forward,
        more=ON_THE_HUB[name],
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "mixture.toml"
    text = MIXTURE.replace('memory = "8 GB"', "").replace('"l4"', '"h200"')
    path.write_text(text.replace('profile = "qwen3-30b-a3b"\nn_blocks = 8', 'dtype = "bf16"'))
    named = load_experiment(str(path), [f"model.profile={name}"])
    read = load_experiment(str(path), [f"compute.model={tmp_path}"])
    assert read.problem.servers == named.problem.servers
    assert all(server.experts_s > 0 for server in read.problem.servers)
    about = {"name": name, "petals_cache_tokens": 0}
    assert replace(read.problem.model, **about) == replace(named.problem.model, **about)
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(read))
    assert load_experiment(str(stored)).problem == read.problem


def test_a_mixture_made_by_hand_lacks_nothing_and_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "mixture.toml"
    path.write_text(
        MIXTURE.replace(
            'profile = "qwen3-30b-a3b"\nn_blocks = 8',
            'family = "mixtral"\nn_blocks = 8\nhidden_size = 1024\nheads = 8\nvocab = 1000\ndtype = "bf16"\n'
            "experts = 16\nexperts_per_token = 2\nexpert_feed_forward = 2048",
        )
    )
    server = load_experiment(str(path)).problem.servers[0]
    assert server.experts_ratio == 1 / 8
    assert server.experts_s == pytest.approx(16 * 3 * 1024 * 2048 * 2 / (300e9 * MEMORY_EFFICIENCY), rel=1e-5)


MIXED = {"family": "mixtral", "experts": 8, "experts_per_token": 2}


@pytest.mark.parametrize(
    "more", [{"dense_blocks": 3}, {"experts_every": 4}, {"dense_blocks": 1, "experts_every": 2}]
)
def test_one_block_of_a_mixture_with_experts_is_enough(more: dict[str, int], load: Load) -> None:
    sizes = {"n_blocks": 4, "hidden_size": 64, "heads": 4, "vocab": 100, "dtype": "bf16"}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**MIXED, **sizes, **more}.items())
    assert load(replace=('profile = "bloom-176b"', lines)).document["model"]["experts"] == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"experts": 8}, r"model\.experts: is not for family llama"),
        ({"family": "mixtral", "experts": 8}, r"experts_per_token: is missing"),
        ({"family": "mixtral", "experts": 8, "experts_per_token": 9}, r"is 9, more than the 8 experts"),
        ({"experts_per_token": 2}, r"experts_per_token: is of a mixture of experts; give model\.experts"),
        ({"experts_every": 2}, r"experts_every: is of a mixture of experts; give model\.experts"),
        (
            {"family": "qwen3_moe"},
            r"model\.experts: is missing; give how many experts a block of family qwen3_moe has",
        ),
        (
            {**MIXED, "dense_blocks": 2},
            r"dense_blocks: is 2, but must be below n_blocks 2: at least one block must",
        ),
        (
            {**MIXED, "experts_every": 3},
            r"experts_every: is 3, but must divide a number from 1 to 2: at least one",
        ),
        (
            {**MIXED, "n_blocks": 4, "dense_blocks": 3, "experts_every": 3},
            r"experts_every: is 3, but must divide a number from 4 to 4: at least one",
        ),
        ({**MIXED, "family": "deepseek_v3", "kv_rank": 64}, r"q_rank: is missing; MLA"),
    ],
)
def test_a_mixture_that_contradicts_itself_is_refused(
    keys: dict[str, object], words: str, complaint: Complain
) -> None:
    llama = {"family": "llama", "n_blocks": 2, "hidden_size": 64, "heads": 4, "vocab": 100, "dtype": "bf16"}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**llama, **keys}.items())
    assert re.search(words, complaint(replace=('profile = "bloom-176b"', lines)))
