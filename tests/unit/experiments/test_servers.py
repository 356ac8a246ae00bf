"""``[[servers]]``: several GPUs, memory that is kept free, and types of weights of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from policies.checks import check_placement
from policies.problem import BlockRange
from testbed.control.placing import place_experiment
from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.assumed import assumed_batching
from testbed.experiments.catalogue import gpus
from testbed.experiments.experiment import Experiment
from testbed.experiments.parallel import INTERCONNECTS, all_reduce_s, parallel
from testbed.experiments.profiles import named_model
from testbed.experiments.roofline import BLOCK_OVERHEAD_S, MEMORY_EFFICIENCY, block_of, roofline
from testbed.inspect.validity import validate_command
from testbed.simulator.answer import answer as answer_of
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate

Several = Callable[..., Experiment]

TEXT = """
name = "several"
[model]
profile = "llama-3-70b"
n_blocks = 8
[[servers]]
hardware = "l4"
site = "A"
count = 2
KEYS
[clients]
site = "A"
count = 2
[network]
kind = "clusters"
pairs = [{ sites = ["A", "A"], rtt = "0.2 ms", rate = "1000000 Gbit/s" }]
[compute]
batching = "continuous"
[workload]
rate = 1
n_requests = 16
n_input_tokens = 40
n_output_tokens = 16
[policy]
name = "proposed"
queue = "fifo"
"""


@pytest.fixture
def several(tmp_path: Path) -> Several:
    def load(*keys: str) -> Experiment:
        path = tmp_path / "several.toml"
        path.write_text(TEXT.replace("KEYS", "\n".join(keys)))
        return load_experiment(str(path))

    return load


def test_several_gpus_share_what_one_computes_and_pay_two_all_reduces_per_block(several: Several) -> None:
    one = several().problem.servers[0]
    four = several("gpus = 4", 'interconnect = "pcie"').problem.servers[0]
    token_bytes = 8192 * 2
    assert four.memory_bytes == 4 * one.memory_bytes == pytest.approx(4 * 0.9 * 24e9)
    # A ring of four: three quarters of the bytes twice, at 32 GB/s.
    reduce_s = 20e-6 + 1.5 * token_bytes / (0.8 * 32e9)
    assert all_reduce_s(4, "pcie", token_bytes) == pytest.approx(reduce_s)
    alone_s, shared_s = one.decode_at_s(0), four.decode_at_s(0)
    expected_s = BLOCK_OVERHEAD_S + (alone_s - BLOCK_OVERHEAD_S) / 4 + 2 * reduce_s
    assert shared_s == pytest.approx(expected_s, rel=1e-4)
    assert four.decode_at_s(4000) - shared_s == pytest.approx((one.decode_at_s(4000) - alone_s) / 4)
    thousand_s = [server.prefill_s(3000) - server.prefill_s(2000) for server in (one, four)]
    reduces_s = 1000 * 2 * 1.5 * token_bytes / (0.8 * 32e9)
    assert thousand_s[1] == pytest.approx(thousand_s[0] / 4 + reduces_s, rel=1e-4)
    # A short prompt, a chunk and the further tokens of a draft take as long as reading, and exchange theirs.
    short_s = [server.prefill_s(20) - server.prefill_s(10) for server in (one, four)]
    assert short_s == pytest.approx([0.0, reduces_s / 100])
    assert four.extend_s(0, 4) - four.extend_s(0, 2) == pytest.approx(reduces_s / 500)
    drafted_s = four.batch_s(1, [1, 1], range(0), [4, 1]) - four.batch_s(1, [1, 1], range(0), [2, 1])
    assert drafted_s == pytest.approx(reduces_s / 500)


def test_an_nvlink_costs_less_than_pcie_and_caches_of_few_heads_are_read_by_more_gpus(
    several: Several,
) -> None:
    block = block_of(named_model("llama-3-70b"))
    assert block is not None
    times = roofline(gpus()["h100"], block)
    decodes_s = [parallel(times, 8, kind, block.token_bytes, 8).decode_s for kind in INTERCONNECTS]
    assert decodes_s[0] < decodes_s[1] < times.decode_s
    assert parallel(times, 8, "nvlink", block.token_bytes, 4).context_slope_s == times.context_slope_s / 4
    assert parallel(times, 8, "nvlink", block.token_bytes, None).context_slope_s == times.context_slope_s
    assert several("gpus = 2").problem == several("gpus = 2", 'interconnect = "nvlink"').problem


@pytest.mark.parametrize(
    "keys",
    [("gpus = 4",), ("gpus = 2", 'interconnect = "pcie"', "memory_reserve = 0.2"), ('dtype = "int4"',)],
    ids=" ".join,
)
def test_the_engines_agree_and_a_resolved_scenario_is_the_same(
    keys: tuple[str, ...], several: Several, tmp_path: Path
) -> None:
    experiment = several(*keys)
    fast, virtual = (simulate(Case(experiment), "testbed", is_virtual=is_it) for is_it in (False, True))
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    for row, other in zip(fast.rows, virtual.rows, strict=True):
        assert row.chain == other.chain != ""
        assert row.times.e2e_s == pytest.approx(other.times.e2e_s, abs=1e-6)
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(experiment))
    assert load_experiment(str(stored)).problem == experiment.problem


def test_a_gpu_by_name_keeps_a_tenth_of_its_memory_free_and_a_memory_of_ones_own_nothing(
    several: Several,
) -> None:
    def memory_gb(*keys: str) -> float:
        return several(*keys).problem.servers[0].memory_bytes / 1e9

    assert memory_gb() == pytest.approx(0.9 * 24)
    assert several().document["servers"][0]["memory_reserve"] == 0.1
    assert memory_gb('memory = "20 GB"') == 20
    assert memory_gb("memory_reserve = 0.5") == 12
    assert memory_gb('memory = "20 GB"', "memory_reserve = 0.1") == pytest.approx(18)
    clustered = load_experiment("clustered").problem.servers
    assert {server.hardware: server.memory_bytes for server in clustered} == {
        "a100": 79.13e9,
        "mig-1g": 8.2e9,
    }


def test_a_measured_profile_has_no_more_memory_than_the_gpu_that_was_measured() -> None:
    with pytest.raises(
        ScenarioError, match=r"servers\.1\.memory: is 90 GB, and a100-80gb has 80 GB; give less"
    ):
        load_experiment("clustered", ["servers.1.memory=90 GB"])


def test_servers_that_can_hold_no_block_are_named(caplog: pytest.LogCaptureFixture) -> None:
    load_experiment("clustered", ["servers.0.memory=1 GB"])
    load_experiment("clustered", ["servers.0.memory=1 GB", "servers.0.count=1"])
    load_experiment("clustered", ["hardware.mig-1g.memory=1 GB"])
    many, one = "mig-1g-0 to mig-1g-6 can hold no block, which takes 1.32 GB:", "1 GB for blocks and caches"
    assert [text.removeprefix("servers: ") for text in caplog.messages] == [
        f"{many} their own memory has {one}",
        f"mig-1g-0 can hold no block, which takes 1.32 GB: its own memory has {one}",
        f"{many} mig-1g has {one}",
    ]


def test_a_server_may_have_a_type_of_its_own(several: Several) -> None:
    with pytest.raises(ScenarioError, match="t4 does not support bf16"):
        several().problem and load_experiment(
            "clustered", ["model={profile='llama-3-8b'}", "servers.0.hardware=t4"]
        )
    other = load_experiment(
        "clustered", ["model={profile='llama-3-8b'}", "servers.0.hardware=t4", "servers.0.dtype=fp16"]
    )
    block = block_of(named_model("llama-3-8b"))
    assert block is not None
    read_s = block.block_bytes / (gpus()["t4"].bandwidth_bytes_per_s * MEMORY_EFFICIENCY)
    assert other.problem.servers[0].decode_at_s(0) == pytest.approx(BLOCK_OVERHEAD_S + read_s, rel=1e-4)


def test_a_server_with_smaller_weights_holds_more_blocks(several: Several) -> None:
    plain, small = several(), several('dtype = "int4"')
    for experiment in (plain, small):
        check_placement(experiment.problem, place_experiment(experiment).placement)
    stored = small.problem.stored(0)
    assert stored.block_bytes == named_model("llama-3-70b", "int4").block_size
    assert small.problem.model == plain.problem.model == plain.problem.stored(0)
    memory_bytes = plain.problem.servers[0].memory_bytes
    held = BlockRange(0, 8)
    assert small.problem.room_bytes([held])[0] == memory_bytes - 8 * stored.block_bytes
    assert stored.most_blocks(memory_bytes) == 8 and plain.problem.model.most_blocks(memory_bytes / 3) == 4
    assert stored.most_blocks(memory_bytes / 3) == 8
    assert small.problem.servers[0].decode_s < 0.35 * plain.problem.servers[0].decode_s


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("gpus = 9",), r"servers\.0\.gpus: must be at most 8"),
        (("gpus = 3",), r"servers\.0\.gpus: is 3, which must divide the model's 64 heads"),
        (('interconnect = "nvlink"',), r"servers\.0\.interconnect: connects several GPUs; give gpus"),
        (("gpus = 2", 'interconnect = "ethernet"'), r"servers\.0\.interconnect"),
        (('memory = "40 GB"',), r"servers\.0\.memory: is 40 GB, and l4 has 24 GB; give less, or hardware of"),
        (("gpus = 2", 'memory = "60 GB"'), r"l4 has 24 GB on each of 2 GPUs"),
        (("memory_reserve = 1",), r"servers\.0\.memory_reserve"),
        (('dtype = "fp32"',), r"servers\.0\.dtype: is \"fp32\", whose hidden states have 4 bytes"),
    ],
)
def test_what_no_server_has_is_refused(keys: tuple[str, ...], words: str, several: Several) -> None:
    with pytest.raises(ScenarioError, match=words):
        several(*keys)


def test_a_cards_gigabytes_may_be_of_1024s(several: Several) -> None:
    assert several('memory = "24 GiB"').problem.servers[0].memory_bytes == 24 * 1024**3


def test_what_is_assumed_of_batching_is_said_with_what_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "unsaid.toml"
    path.write_text(TEXT.replace("KEYS", "").replace('[compute]\nbatching = "continuous"\n', ""))
    answer, text = validate_command(str(path), ["workload.rate=50"])
    words = r'"none" is assumed.*with "continuous", the first 16 requests would have (\S+) ms per token after the first in place of (\S+) ms'
    found = re.search(words, text)
    assert found is not None and answer["assumed_batching"] in text
    assert float(found[1]) > 1.05 * float(found[2])
    assert answer_of(simulate(Case(load_experiment(str(path))), "testbed"))["assumed"] == assumed_batching(
        load_experiment(str(path))
    )
    stated = load_experiment(str(path), ['compute.batching="none"'])
    assert assumed_batching(stated) is None
    assert validate_command(str(path), ['compute.batching="none"'])[0]["assumed_batching"] is None
    assert "session_slope" in validate_command("clustered", [])[0]["assumed_batching"]
