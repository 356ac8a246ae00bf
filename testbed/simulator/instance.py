"""Reads reference instances: JSON files with one complete problem, its workload and PETALS' join order."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies.problem import ModelSpec, Problem, ServerSpec
from policies.workload import RequestPlan
from testbed.errors import UserError
from testbed.experiments.fields import NOT_TINY, Positive, Tokens, rule
from testbed.experiments.json_files import read_json
from testbed.experiments.limits import (
    MAX_BLOCKS,
    MAX_DURATION_S,
    MAX_HIDDEN_SIZE,
    MAX_REQUESTS,
    MAX_SIZE_BYTES,
    too_late,
)
from testbed.experiments.problems import explain

Milliseconds = Annotated[float, Field(ge=0, le=MAX_DURATION_S * 1e3)]
PositiveMilliseconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S * 1e3)]
GigaBytes = Annotated[float, Field(ge=0, le=MAX_SIZE_BYTES / 1e9)]
PositiveGigaBytes = Annotated[float, Field(gt=0, le=MAX_SIZE_BYTES / 1e9), NOT_TINY]


class InstanceTable(BaseModel):
    """A table with strict types. Unknown keys are ignored, unless they look like a misspelled key."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_misspelled_option(cls, data: Any) -> Any:
        # A misspelled required key is reported as missing; an optional one would change results silently.
        if isinstance(data, dict):
            optional = [
                name
                for name, field in cls.model_fields.items()
                if not field.is_required() and name not in data
            ]
            for key in data:
                near = key not in cls.model_fields and difflib.get_close_matches(
                    str(key).lower(), optional, n=1, cutoff=0.8
                )
                if near:
                    raise rule(f'unknown key; did you mean "{near[0]}"?', str(key))
        return data


class _Model(InstanceTable):
    name: str
    n_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    d_model: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)]
    block_gb: PositiveGigaBytes
    cache_gb_per_block_session: PositiveGigaBytes
    petals_cache_gb_per_block: PositiveGigaBytes


class _Server(InstanceTable):
    type: str
    node: str | None = None
    memory_gb: GigaBytes
    decode_ms: PositiveMilliseconds
    prefill_ms: Milliseconds
    token_rtt_ms: Milliseconds
    input_rtt_ms: Milliseconds
    petals_forward_per_s: Positive
    petals_network_per_s: Positive
    block_cap: Annotated[int, Field(ge=0)] | None = None


class _Workload(InstanceTable):
    rate_per_s: Positive
    n_input_tokens: Tokens
    n_output_tokens: Tokens
    inter_arrival_ms: list[Milliseconds] = Field(min_length=1, max_length=MAX_REQUESTS)


class _PetalsConstants(InstanceTable):
    hop_overhead_ms: Milliseconds = 18.0
    shortage_penalty_ms: Milliseconds = 10_000.0


class _Setup(InstanceTable):
    petals: Milliseconds
    proposed: Milliseconds


class _Client(InstanceTable):
    node: str | None = None


class _Document(InstanceTable):
    """The keys that are read; others (expected results, descriptions) are ignored."""

    id: str
    model: _Model
    servers: list[_Server] = Field(min_length=1)
    raw_rtt_ms: list[list[Milliseconds]]
    workload: _Workload
    petals_join_order: list[int]
    petals_constants: _PetalsConstants = _PetalsConstants()
    initial_delay_ms: Milliseconds = 0.0
    client: _Client = _Client()
    session_setup_ms: _Setup | None = None


@dataclass(frozen=True)
class Instance:
    """One reference instance: a problem with one client, its requests, and PETALS' routing constants.

    ``session_setup_petals_s`` and ``session_setup_proposed_s`` are the constants that the published simulator
    adds to every request's first token, for PETALS with its variants and for other policies. ``sites`` are
    the places of the client and of every server. Requests are all of one client.
    """

    id: str
    problem: Problem
    requests: tuple[RequestPlan, ...]
    hop_overhead_s: float
    shortage_penalty_s: float
    session_setup_petals_s: float
    session_setup_proposed_s: float
    sites: tuple[str, ...]


def load_instance(path: Path) -> Instance:
    """Read an instance file. Raises ``UserError`` with the file and the key that is wrong."""
    return parse_instance(read_json(path, "give an instance file, see docs/instances.md"), str(path))


def parse_instance(document: Mapping[str, Any], source: str) -> Instance:
    """Make an instance from its JSON data. Raises ``UserError`` with ``source`` and the key that is wrong."""
    if isinstance(document, dict) and "request_clients" in document:
        raise UserError(f"{source}: is an offline instance; use `testbed solve`")
    try:
        data = _Document.model_validate(document)
    except ValidationError as error:
        wrong = explain(error)
        where = ".".join(map(str, wrong.key)) or "the file"
        if wrong.key[:2] == ("workload", "inter_arrival_ms") and "at least 0" in wrong.what:
            raise UserError(
                f"{source}: {where}: {wrong.what}; give the gaps between requests in the order of their "
                "arrival"
            ) from error
        raise UserError(f"{source}: {where}: {wrong.what}") from error
    _check_shapes(data, source)
    arrivals_ms = list(accumulate(data.workload.inter_arrival_ms))
    late = too_late(arrivals_ms[-1] / 1e3)
    if late is not None:
        raise UserError(f"{source}: workload.inter_arrival_ms: {late}")
    workload = data.workload
    requests = tuple(
        RequestPlan(i, 0, at_ms / 1e3, workload.n_input_tokens, workload.n_output_tokens)
        for i, at_ms in enumerate(arrivals_ms)
    )
    setup = data.session_setup_ms or _published_setup(data)
    return Instance(
        id=data.id,
        problem=_problem(data),
        requests=requests,
        hop_overhead_s=data.petals_constants.hop_overhead_ms / 1e3,
        shortage_penalty_s=data.petals_constants.shortage_penalty_ms / 1e3,
        session_setup_petals_s=setup.petals / 1e3,
        session_setup_proposed_s=setup.proposed / 1e3,
        sites=(data.client.node or "client", *(s.node or f"server {j}" for j, s in enumerate(data.servers))),
    )


_LARGE_SCRIPT_PER_S = (2555.208925125856, 1636.225130062161)
"""PETALS' network throughput of A100 and MIG in the published script for large topologies."""


def _published_setup(data: _Document) -> _Setup:
    """Return the constants of the published script the instance is from, found by its throughputs."""
    large = any(server.petals_network_per_s in _LARGE_SCRIPT_PER_S for server in data.servers)
    return _Setup(petals=350_000.0 if large else 250_000.0, proposed=60_000.0)


def _check_shapes(data: _Document, source: str) -> None:
    n_nodes = len(data.servers) + 1
    if len(data.raw_rtt_ms) != n_nodes:
        raise UserError(
            f"{source}: raw_rtt_ms: has {len(data.raw_rtt_ms)} rows but needs {n_nodes}, one for the client "
            f"and one for each of the {n_nodes - 1} servers"
        )
    for i, row in enumerate(data.raw_rtt_ms):
        if len(row) != n_nodes:
            raise UserError(
                f"{source}: raw_rtt_ms.{i}: has {len(row)} values but needs {n_nodes}, one for each node"
            )
    for position, server in enumerate(data.petals_join_order):
        if not 0 <= server < n_nodes - 1:
            raise UserError(
                f"{source}: petals_join_order.{position}: there is no server {server}; servers are numbered "
                f"0 to {n_nodes - 2}"
            )
    if sorted(data.petals_join_order) != list(range(n_nodes - 1)):
        raise UserError(
            f"{source}: petals_join_order: must name each of the servers 0 to {n_nodes - 2} exactly once"
        )


def _problem(data: _Document) -> Problem:
    workload, model = data.workload, data.model
    n_tokens = workload.n_input_tokens + workload.n_output_tokens
    token_bytes = model.cache_gb_per_block_session * 1e9 / n_tokens
    return Problem(
        model=ModelSpec(
            name=model.name,
            n_blocks=model.n_blocks,
            hidden_size=model.d_model,
            block_bytes=model.block_gb * 1e9,
            cache_bytes_per_token=token_bytes,
            petals_cache_tokens=round(model.petals_cache_gb_per_block * 1e9 / token_bytes),
        ),
        servers=tuple(_server(j, server) for j, server in enumerate(data.servers)),
        clients=("client",),
        raw_rtt_s=(tuple(t / 1e3 for t in data.raw_rtt_ms[0][1:]),),
        token_rtt_s=(tuple(s.token_rtt_ms / 1e3 for s in data.servers),),
        input_rtt_base_s=(tuple(s.input_rtt_ms / 1e3 for s in data.servers),),
        input_rtt_slope_s=((0.0,) * len(data.servers),),
        server_rtt_s=tuple(tuple(t / 1e3 for t in row[1:]) for row in data.raw_rtt_ms[1:]),
        n_input_tokens=workload.n_input_tokens,
        n_output_tokens=workload.n_output_tokens,
        request_rate=workload.rate_per_s,
        join_order=tuple(data.petals_join_order),
        initial_delay_s=data.initial_delay_ms / 1e3,
    )


_HARDWARE: dict[str, Literal["mig-1g", "a100"]] = {"MIG": "mig-1g", "A100": "a100"}
"""Hardware profiles by the type names in instances."""


def _server(number: int, server: _Server) -> ServerSpec:
    hardware = _HARDWARE.get(server.type, server.type.lower())
    return ServerSpec(
        name=f"{hardware}-{number}",
        hardware=hardware,
        memory_bytes=server.memory_gb * 1e9,
        decode_s=server.decode_ms / 1e3,
        prefill_base_s=server.prefill_ms / 1e3,
        prefill_slope_s=0.0,
        petals_forward_rps=server.petals_forward_per_s,
        petals_network_rps=server.petals_network_per_s,
        block_cap=server.block_cap,
    )
