"""Servers that compute several sessions together: the fast engine beside the testbed itself, and the model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nodes.batching import Composition
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.simulator.cases import Case
from testbed.simulator.command import Options, simulate_command
from testbed.simulator.engine import Simulation, simulate

BUSY = (
    'compute.batching="continuous"',
    "workload.rate=1",
    "workload.n_requests=20",
    "workload.n_output_tokens=24",
    "hardware.a100.session_slope='0.4 ms'",
    "hardware.mig-1g.session_slope='2 ms'",
)


def simulated(*options: str, is_virtual: bool = False, folder: Path | None = None) -> Simulation:
    return simulate(
        Case(load_experiment("clustered", [*BUSY, *options])), "testbed", is_virtual=is_virtual, folder=folder
    )


def mean(values: object) -> float:
    return float(np.mean(values))  # type: ignore[arg-type]


CHUNKS = ("compute.chunk_tokens=8",)
PAGED = ('cache.mode="paged"', "cache.page_tokens=4", "cache.high_water=1.0", "cache.expected_output=4")
FORWARDING = ('policy.communication="server-to-server"',)


@pytest.mark.parametrize(
    "options",
    [
        (),
        CHUNKS,
        FORWARDING,
        PAGED,
        (*PAGED, *FORWARDING),
        (*FORWARDING, "calibration.set='petals-clustered'", "workload.n_output_tokens=20"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("queue", ["none", "fifo"])
def test_the_fast_engine_takes_every_step_as_the_testbed_does(options: tuple[str, ...], queue: str) -> None:
    few = "workload.n_output_tokens=16", "workload.rate=0.6"
    options = (*few, *options, f"policy.queue={queue}", "backoff.give_up=60 s")
    fast, virtual = simulated(*options), simulated(*options, is_virtual=True)
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    for one, other in zip(fast.rows, virtual.rows, strict=True):
        for name in ("status", "n_rejections", "n_preemptions", "chain"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.times.ttft_s == pytest.approx(other.times.ttft_s, abs=5e-8)
        assert one.times.e2e_s == pytest.approx(other.times.e2e_s, abs=5e-8)
    assert any(row.n_rejections or row.times.queue_s for row in fast.rows)
    assert any(row.n_preemptions for row in fast.rows) == (PAGED[0] in options)


def test_sessions_share_steps_and_that_costs_less_than_one_after_another() -> None:
    together = simulated()
    alone = simulated('compute.batching="serial"')
    free = simulated('compute.batching="none"')
    times = [mean([row.times.e2e_s for row in run.rows]) for run in (free, together, alone)]
    assert times[0] < times[1] < 0.8 * times[2]


def test_the_model_gives_every_steps_end_from_the_arrivals_and_the_tables_say_what_went_together(
    tmp_path: Path,
) -> None:
    simulated(is_virtual=True, folder=tmp_path / "virtual")
    table = pq.read_table(tmp_path / "virtual" / "hops.parquet").to_pydict()
    measured, model = np.array(table["hop_compute_s"]), np.array(table["model_compute_s"])
    assert np.max(np.abs(measured - model)) < 1e-6
    steps, tokens = np.array(table["batch_steps"]), np.array(table["batch_tokens"])
    assert steps.min() == 1 and steps.max() >= 4
    assert np.all(tokens >= steps)


@pytest.mark.parametrize("engine", ["fast", "virtual"])
@pytest.mark.parametrize("chunks", [(), ("compute.chunk_tokens=3",)], ids=["whole prompts", "chunks"])
def test_what_a_step_was_composed_of_gives_how_long_it_took(
    tmp_path: Path, engine: str, chunks: tuple[str, ...]
) -> None:
    of_times = ("context_slope='20 us'", "step_base='4 ms'", "prefill_curve='3 us'")
    overrides = (*BUSY, *chunks, *(f"hardware.a100.{one}" for one in of_times))
    clock = "virtual" if engine == "virtual" else None
    options = Options((PolicyChoice(),), overrides=overrides, out=tmp_path / "run", clock=clock)
    assert simulate_command(["clustered"], options, as_json=True) == 0
    experiment = load_experiment("clustered", list(overrides))
    laws = {server.name: server for server in experiment.problem.servers}
    n_input = {request.index: request.n_input_tokens for request in experiment.workload.requests}
    hops = pq.read_table(tmp_path / "run" / "hops.parquet").to_pylist()
    of_steps = defaultdict(list)
    for hop in hops:
        together = Composition(**{name: hop[f"batch_{name}"] for name in Composition._fields})
        # Only the sum of what the decodes have in their caches counts.
        cached = [together.context_tokens, *[0] * together.decodes][: together.decodes]
        took_s = laws[hop["server"]].batch_s(together.blocks, cached, together.prompt)
        assert together.began_at_s + took_s == pytest.approx(hop["departed_at_s"], abs=1e-6)
        of_steps[hop["server"], together].append(hop)
    # A step's sessions are the rows with its server and its beginning, but for a prompt that goes on in the next step.
    assert len(of_steps) == len({(server, together.began_at_s) for server, together in of_steps})
    for (_, together), ended in of_steps.items():
        decodes = [hop for hop in ended if hop["token"]]
        assert len(decodes) == together.decodes
        contexts = (n_input[hop["request"]] + hop["token"] - 1 for hop in decodes)
        assert sum(contexts) == together.context_tokens
        assert len(ended) == together.steps or chunks
    assert max(together.context_tokens for _, together in of_steps) > 100


def test_the_fast_engine_writes_the_steps_that_it_made(tmp_path: Path) -> None:
    options = Options((PolicyChoice(),), overrides=BUSY, out=tmp_path / "run")
    assert simulate_command(["clustered"], options, as_json=True) == 0
    hops = pq.read_table(tmp_path / "run" / "hops.parquet").to_pylist()
    requests = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    last = {hop["request"]: hop["received_at_s"] for hop in hops}
    for request in requests:
        assert last[request["request"]] == pytest.approx(request["arrival_at_s"] + request["e2e_s"])
    assert max(hop["batch_steps"] for hop in hops) >= 4
    keys = [(hop["request"], hop["token"], hop["hop"]) for hop in hops]
    assert keys == sorted(keys)


def test_what_contradicts_itself_or_has_no_meaning_is_refused() -> None:
    for options, words in (
        (["compute.serial=true", 'compute.batching="continuous"'], "leave serial out"),
        (["compute.chunk_tokens=8"], 'only for batching = "continuous"'),
        (
            ['compute.backend="blocks"', "compute.streams=2", 'compute.batching="continuous"'],
            "compute.streams: is 2, but with batching",
        ),
    ):
        with pytest.raises(UserError, match=words):
            load_experiment("bloom-tiny", options)
    with pytest.raises(UserError, match=r"compute.batching has no meaning in the reference mode"):
        simulate(Case(load_experiment("clustered", BUSY)), "reference")


def test_serial_is_a_way_to_say_batching_serial() -> None:
    assert load_experiment("clustered", ["compute.serial=true"]).compute.batching == "serial"
    assert load_experiment("clustered", ['compute.batching="serial"']).compute.batching == "serial"
    assert load_experiment("clustered").compute.batching == "none"
