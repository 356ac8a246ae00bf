"""A chain of server processes that share the device, compared with the prediction of the calibrated stub.

The model is all 70 blocks of BLOOM-176B with random weights in nf4, or as many as fit into memory. It is
served by ``testbed up`` with transformer blocks, where each server has a memory limit of its own, as a MIG
instance has. Then the same scenario is served with the stub and the profile of ``calibration``, and ``testbed
compare`` compares both.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.gpu_parts.calibration import profile_of, uses_graphs
from benchmarks.gpu_parts.commands import Here, up
from benchmarks.gpu_parts.figures import draw_serving
from benchmarks.gpu_parts.here import GUESSED, SITE, one_place
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, model_of, quantised_here
from nodes.blocks.device import available_bytes, open_device
from nodes.blocks.memory import amount, workspace_bytes
from nodes.blocks.spec import Weights
from testbed.experiments import load_experiment
from testbed.experiments.families import VALUE_BYTES
from testbed.experiments.units import SIZE
from testbed.records.base import data_of
from testbed.runs.verify import verify_tokens
from testbed.runtime.blocks import blocks_model
from testbed.studies.compare import compare_command
from testbed.studies.compare.load import load_run
from testbed.studies.compare.tables import is_decode, token_times

N_SERVERS, _N_SERVERS_SMALL = 5, 3
_N_INPUT_TOKENS, _N_WARM_UP_TOKENS = 20, 8
_CONCURRENCY = 2
"""Sessions for which memory is kept: one may open before the last one has closed everything."""
_MEMORY_RATIO = 0.95
CONTEXT_BYTES = 0.8e9
"""Memory of a GPU that a process uses before it computes anything."""
_SPARE_RATIO = 1.02
_BLOCKS_SHARE = 0.6
"""Share of the time for the run with transformer blocks."""
_WARM_UP_S = {"cpu": 1.0, "cuda": 8.0}
"""Time for the first request, in which the device loads its libraries."""
_N_WARM_UP = 1
"""Number of requests that are not measured."""
_KEPT = ("n_requests", "n_completed", "network", "startup_s", "memory", "metrics", "overhead_per_hop_s")
"""Keys of the summary of the run with transformer blocks that are recorded."""


@dataclass(frozen=True)
class Shape:
    """``n_servers`` servers of ``n_each`` blocks, each with ``server_bytes`` of memory for blocks and
    sessions.
    """

    n_servers: int
    n_each: int
    server_bytes: float
    n_output_tokens: int
    weights: Weights

    @property
    def n_blocks(self) -> int:
        return self.n_servers * self.n_each


def run(record: Record) -> None:
    job = record.job
    model = model_of(job)
    weights: Weights = "nf4" if quantised_here() else "plain"
    n_servers, n_output_tokens = (_N_SERVERS_SMALL, 24) if job.is_small else (N_SERVERS, 128)
    shape = shape_of(job.device, model, weights, n_servers, n_output_tokens)
    if not shape.n_each:
        record.fail(f"Not one block of {model.name} on each of {shape.n_servers} servers fits.")
        return
    record.put(
        model=model.name,
        dtype=model.dtype,
        weights=shape.weights,
        n_blocks=shape.n_blocks,
        n_blocks_of_model=model.n_blocks,
        n_servers=shape.n_servers,
        server_bytes=shape.server_bytes,
        n_input_tokens=_N_INPUT_TOKENS,
        n_output_tokens=shape.n_output_tokens,
    )
    name, profile = profile_of(job.folder, shape.weights)
    is_calibrated = profile.is_file()
    folder = job.folder / "serving"
    folder.mkdir()
    scenario = folder / "scenario.toml"
    calibrated = profile if is_calibrated else None
    table = scenario_of(job.device, model, shape, name, calibrated, has_graphs=uses_graphs(job.device))
    write_scenario(scenario, table)
    summary = _up("blocks", scenario, folder, _BLOCKS_SHARE * job.left_s)
    _say_served(record, shape, summary)
    # The stub leaves the device to the whole model.
    with Here() if job.is_small else ThreadPoolExecutor(1) as beside:
        stub = beside.submit(_up, "stub", scenario, folder, job.left_s) if is_calibrated else None
        _check_tokens(record, scenario, folder / "blocks")
    if stub is None:
        record.fail("Nothing to compare with: the calibration wrote no profile.")
        return
    stub.result()
    _compare(record, folder)


def shape_of(device_name: str, model: Model, weights: Weights, n_servers: int, n_output_tokens: int) -> Shape:
    """Returns the shape with as many blocks as fit into the device's memory."""
    device, _ = open_device(device_name, model.dtype)
    return shape_in(available_bytes(device), device.type, model, weights, n_servers, n_output_tokens)


def shape_in(
    free_bytes: float,
    device_type: str,
    model: Model,
    weights: Weights,
    n_servers: int,
    n_output_tokens: int,
) -> Shape:
    """Returns the shape with as many blocks as fit into ``free_bytes`` of a device of type "cpu" or "cuda".

    Each process also needs memory for its context, its workspace and its sessions. ``n_each`` is 0 if no
    block fits.
    """
    free_bytes = _MEMORY_RATIO * free_bytes - model.client_bytes
    matrix_bytes = 0 if weights == "plain" else 4 * model.hidden_size**2 * VALUE_BYTES[model.dtype]
    beside_bytes = workspace_bytes(model.hidden_size, matrix_bytes, n_streams=1)
    beside_bytes += CONTEXT_BYTES if device_type == "cuda" else 0.0
    caches_bytes = _CONCURRENCY * model.cache_bytes(_N_INPUT_TOKENS + n_output_tokens)
    with_caches = model.block_bytes(weights) + caches_bytes
    fits = int((free_bytes / n_servers - beside_bytes) / (with_caches * _SPARE_RATIO))
    n_each = max(0, min(model.n_blocks // n_servers, fits))
    return Shape(n_servers, n_each, n_each * with_caches * _SPARE_RATIO, n_output_tokens, weights)


def scenario_of(
    device: str, model: Model, shape: Shape, name: str, profile: Path | None, *, has_graphs: bool = False
) -> dict[str, Any]:
    """Returns the scenario, with arrivals that ``write_scenario`` replaces.

    ``name``: hardware of the servers, from ``profile``, or with guessed times if that is None.
    """
    memory = SIZE.format(round(shape.server_bytes))
    table: dict[str, Any] = {
        "name": "gpu-chain",
        # The size that blocks really have: a profile's is PETALS', which counts 4 % more.
        "model": {
            **model.table,
            "n_blocks": shape.n_blocks,
            "block_size": SIZE.format(round(model.block_bytes(shape.weights))),
        },
        "servers": [{"hardware": name, "site": SITE, "count": shape.n_servers, "memory": memory}],
        **one_place(),
        "policy": {"name": "proposed", "design_concurrency": _CONCURRENCY},
        "compute": {
            "random_weights": True,
            "device": device,
            "dtype": model.dtype,
            "weights": shape.weights,
            "cuda_graphs": has_graphs,
        },
        "workload": {
            "arrivals": "listed",
            "requests": [
                [float(i), _N_INPUT_TOKENS, shape.n_output_tokens if i >= _N_WARM_UP else _N_WARM_UP_TOKENS]
                for i in range(_N_WARM_UP + 2)
            ],
        },
    }
    if profile is None:
        return {**table, "hardware": {name: {**GUESSED, "memory": memory}}}
    return {"hardware_files": [str(profile)], **table}


def write_scenario(path: Path, table: dict[str, Any]) -> None:
    """Writes the scenario, with arrivals so far apart, according to the hardware profile, that no requests
    overlap.
    """
    arrivals = table["workload"]["requests"]
    warm_up_s = _WARM_UP_S["cpu" if table["compute"]["device"] == "cpu" else "cuda"]
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    problem = load_experiment(str(path)).problem
    server, [row] = problem.servers[0], problem.token_rtt_s
    token_s = problem.model.n_blocks * server.decode_s + sum(row)
    gap_s = 1.5 * problem.n_output_tokens * token_s + 1.0
    for number, request in enumerate(arrivals[_N_WARM_UP:]):
        request[0] = warm_up_s + number * gap_s
    path.write_text(tomli_w.dumps(table), encoding="utf-8")


def _up(compute: str, scenario: Path, folder: Path, allowed_s: float) -> dict[str, Any]:
    # Tokens are compared separately and at the end, since this may take longest; nothing is compared with a twin.
    options = ["--compute", compute, "--set", "compute.verify=false", "--no-twin"]
    return up(scenario, folder / compute, options, allowed_s)


def _say_served(record: Record, shape: Shape, summary: dict[str, Any]) -> None:
    record.put(blocks={key: summary[key] for key in _KEPT if key in summary})
    record.find(
        f"{shape.n_blocks} of {record.values['n_blocks_of_model']} blocks of {record.values['model']} in "
        f"{shape.weights}, {shape.n_each} on each of {shape.n_servers} processes that share the device with "
        f"{amount(shape.server_bytes)} each, on {summary['network']}: up in {summary['startup_s']:.1f} s."
    )
    if summary["n_completed"] < summary["n_requests"]:
        n_lost = summary["n_requests"] - summary["n_completed"]
        record.fail(f"{n_lost} of {summary['n_requests']} requests did not complete.")
    memory = summary.get("memory")
    if memory is not None and memory["difference_ratio"] is not None:
        record.find(
            f"Blocks and caches of all servers: {amount(memory['real_bytes'])}, "
            f"{100 * memory['difference_ratio']:+.2f} % against the model's."
        )


def _compare(record: Record, folder: Path) -> None:
    answer, _ = compare_command(folder / "stub", folder / "blocks", folder / "compare")
    rows = []
    for request in [row["request"] for row in answer["requests"]][_N_WARM_UP:]:
        row: dict[str, Any] = {"request": request}
        for name in ("stub", "blocks"):
            hops = load_run(folder / name).hops
            assert hops is not None, "a run of the testbed has hops"
            keys, times_s = token_times(hops.of([request]))
            gaps_s = times_s[is_decode(keys)]
            row[f"{name}_first_s"] = float(times_s[0])
            row[f"{name}_gaps_s"] = gaps_s.tolist()
            row[f"{name}_token_s"] = float(gaps_s.mean())
        row["stub_error_ratio"] = row["stub_token_s"] / row["blocks_token_s"] - 1
        row["stub_first_error_ratio"] = row["stub_first_s"] / row["blocks_first_s"] - 1
        rows.append(row)
    record.put(requests=rows)
    record.put(figures=draw_serving(record.job.folder / "figures", rows))
    for row in rows:
        record.find(
            f"Request {row['request']}: {row['blocks_token_s'] * 1e3:.4g} ms per token after the first with real "
            f"blocks, {row['stub_token_s'] * 1e3:.4g} ms by the calibrated stub "
            f"({100 * row['stub_error_ratio']:+.1f} %); first token {row['blocks_first_s'] * 1e3:.4g} and "
            f"{row['stub_first_s'] * 1e3:.4g} ms."
        )


def _check_tokens(record: Record, scenario: Path, run_dir: Path) -> None:
    """Compares the tokens with the whole model's on the same device, which nothing else uses now."""
    found = tokens_of(scenario, run_dir)
    record.put(tokens=found)
    record.say_tokens(found)


def tokens_of(scenario: Path, run_dir: Path) -> dict[str, Any]:
    """Compares a run's tokens with the whole model's. Returns the counts of checked, altered and tied
    tokens.
    """
    experiment = load_experiment(str(scenario), ["compute.backend=blocks"])
    real = blocks_model(experiment, run_dir)
    assert real is not None, "the scenario has real blocks"
    return data_of(verify_tokens(run_dir, experiment, real, lambda text: print(text, file=sys.stderr)))
