"""A checkpoint on the network of a scenario that was made for another model: sizes its servers, measures block times."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nodes.blocks.memory import amount
from policies.problem import ModelSpec, ServerSpec
from testbed.errors import UserError
from testbed.experiments import Change, Override, load_experiment
from testbed.experiments.families import VALUE_BYTES, ModelSizes
from testbed.experiments.sources import override, read_source
from testbed.experiments.units import counted
from testbed.runtime.blocks import require_blocks
from testbed.studies.calibrate.backend import Device
from testbed.studies.calibrate.backend import read_source as read_model
from testbed.studies.calibrate.quick import quick_profile
from testbed.terminal import say

DEFAULT = "wan"
"""The scenario whose network is used if none is named."""
_HARDWARE = "this-machine"
_SESSIONS, _TOKENS = 4, 4096
"""A server has room for the caches of so many sessions of so many tokens beside its blocks."""


def fitted(model: str, network: str | None, given: Sequence[Override]) -> tuple[str, list[Override]]:
    """Return a scenario and what to change of it, so that ``model`` is served on its network.

    The scenario is ``network``, or the default one. Each server gets the share of the blocks that it could hold of the
    scenario's own model, rounded up, and room for caches. Their times are those of a block of ``model`` on this machine,
    which are measured. Of ``given``, the user's own changes, only ``compute`` matters here. Raises ``UserError``.
    """
    scenario = network or DEFAULT
    source = read_source(scenario)
    own = copy.deepcopy({key: source.document.get(key) for key in ("servers", "hardware")})
    override(source, given)
    if any(source.document.get(key) != value for key, value in own.items()):
        raise UserError(
            f"servers are sized to the checkpoint here: leave out --set of servers and hardware, or give {scenario} as "
            "the scenario, with sizes of your own"
        )
    device = _device(source.document.get("compute", {}))
    checkpoint = read_model(model, random_weights=False)
    require_blocks("--model without a scenario")
    problem = load_experiment(scenario).problem
    held = [_share(server, problem.model, checkpoint.sizes) for server in problem.servers]
    block_bytes = checkpoint.sizes.block_bytes(device.weights, VALUE_BYTES[device.dtype])
    n_tokens = min(_TOKENS, checkpoint.sizes.max_tokens or _TOKENS)
    cache_bytes = _SESSIONS * n_tokens * checkpoint.sizes.cache_values * VALUE_BYTES[device.dtype]
    say(
        f"{checkpoint.name}: {counted(checkpoint.sizes.n_blocks, 'blocks')} of {amount(block_bytes)} on the "
        f"{counted(len(held), 'servers')} of {scenario}, at most {_counts(held)} on each; measuring their times here"
    )
    profile = quick_profile(checkpoint, device)
    times = profile.hardware
    client = f", the client's part {profile.hub_token}" if profile.hub_token else ""
    say(
        f"measured on {device.name}: {times['decode']} per block and token, {times['step_base']} per step, "
        f"{times['prefill_per_token']} per block and token of a prompt{client}; plans, model and twin use these times"
    )
    hardware = {
        f"{_HARDWARE}-{n}": {
            **times,
            "memory": f"{math.ceil(n * (block_bytes + cache_bytes))} B",
            "block_cap": n,
        }
        for n in sorted(set(held))
    }
    compute = {"backend": "blocks", "model": model}
    if profile.hub_token:
        compute["hub_token"] = profile.hub_token
    return scenario, [
        Change("model", {}),
        Change("compute", compute),
        Change("calibration", {"set": "none"}),
        Change("time_scale", 1),
        Change("hardware_files", []),
        Change("hardware", hardware),
        Change("servers", _servers(own["servers"] or [], problem.servers, held)),
    ]


def _device(compute: Mapping[str, Any]) -> Device:
    """Return how the first server computes."""
    device = compute.get("device") or "cpu"
    if isinstance(device, list):
        device = device[0]
    if device == "auto":
        raise UserError(
            'compute.device "auto" has no times to measure: give --set compute.device=cuda or cpu'
        )
    return Device(
        device,
        compute.get("dtype") or "float32",
        compute.get("weights") or "plain",
        compute.get("threads") or 1,
        1,
    )


def _share(server: ServerSpec, model: ModelSpec, sizes: ModelSizes) -> int:
    """Return how many blocks of ``sizes`` are the same share of the model as those that ``server`` can hold."""
    n_held = min(
        int(server.memory_bytes / model.block_bytes), model.n_blocks, server.block_cap or model.n_blocks
    )
    return max(1, math.ceil(n_held * sizes.n_blocks / model.n_blocks))


def _servers(
    groups: Sequence[Mapping[str, Any]], servers: Sequence[ServerSpec], held: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a ``[[servers]]`` table per server, with its old name and other hardware."""
    sites = [group for group in groups for _ in range(group.get("count", 1))]
    return [
        {
            **{key: value for key, value in group.items() if key not in ("memory", "count")},
            "name": server.name,
            "hardware": f"{_HARDWARE}-{n_held}",
        }
        for group, server, n_held in zip(sites, servers, held, strict=True)
    ]


def _counts(held: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(set(held))))
