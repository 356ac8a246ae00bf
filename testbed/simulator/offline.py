"""Solves offline instances: all requests are known from the start, and only decode steps count.

The policies are ``milp`` and ``milp-paper`` (the optimum by two programs), ``cg-bprr`` and ``lp-rounding``. Every result has lower bounds of the
optimum, and Theorem 1's upper bound of CG-BPRR.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from policies.milp import BprrAnswer, Program, relaxation_s, round_bprr, solve_bprr
from policies.milp_model import BprrModel
from policies.milp_paper import PaperModel
from policies.offline import cg_bprr, knapsack_lower_bound_s, lower_bound_s
from policies.problem import (
    BlockRange,
    Hop,
    InfeasiblePlacement,
    ModelSpec,
    PolicyError,
    Problem,
    RequestSpec,
    ServerSpec,
)
from testbed.errors import UserError
from testbed.experiments.fields import NOT_TINY
from testbed.experiments.json_files import read_json
from testbed.experiments.limits import (
    MAX_BLOCKS,
    MAX_DURATION_S,
    MAX_NODES,
    MAX_REQUESTS,
    MAX_SIZE_BYTES,
    MAX_TOKENS,
)
from testbed.experiments.problems import explain
from testbed.simulator.instance import InstanceTable

Memory = Annotated[float, Field(ge=0, le=MAX_SIZE_BYTES)]
PositiveMemory = Annotated[float, Field(gt=0, le=MAX_SIZE_BYTES), NOT_TINY]
Milliseconds = Annotated[float, Field(ge=0, le=MAX_DURATION_S * 1e3)]
Count = Annotated[int, Field(ge=1, le=MAX_NODES)]


Lengths = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=2, max_length=2)]
"""The input and the output tokens of a request."""


class _Document(InstanceTable):
    """The keys that are read; others (expected results, conventions) are ignored."""

    id: str
    n_server: Count
    n_client: Count
    L: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    sm: PositiveMemory
    sc: PositiveMemory
    M: list[Memory]
    tau: list[Milliseconds]
    RTT: list[list[Milliseconds]]
    request_clients: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=MAX_REQUESTS)
    request_lengths: list[Lengths] | None = None


@dataclass(frozen=True)
class OfflineInstance:
    """A problem, with the file's own unit of memory in place of bytes, and its requests, all at time 0.

    Without ``request_lengths`` a request has one output token: its time is the time per token. With them the
    file's cache per block is that of the longest request, and the others have less in proportion.
    """

    id: str
    problem: Problem
    requests: tuple[RequestSpec, ...]


def load_offline_instance(path: Path) -> OfflineInstance:
    """Read an offline instance file. Raises ``UserError`` with the file and the key that is wrong."""
    document = read_json(path, "give an offline instance file, see docs/instances.md")
    return parse_offline_instance(document, str(path))


def parse_offline_instance(document: Mapping[str, Any], source: str) -> OfflineInstance:
    """Make an offline instance from its JSON data. Raises ``UserError`` with ``source`` and the wrong key."""
    workload = document.get("workload") if isinstance(document, dict) else None
    if isinstance(workload, dict) and "inter_arrival_ms" in workload:
        raise UserError(f"{source}: is not an offline instance; use `testbed simulate`")
    try:
        data = _Document.model_validate(document)
    except ValidationError as error:
        wrong = explain(error)
        where = ".".join(map(str, wrong.key)) or "the file"
        raise UserError(f"{source}: {where}: {wrong.what}") from error
    _check_shapes(data, source)
    rtt_s = tuple(tuple(t / 1e3 for t in row) for row in data.RTT)
    nothing = ((0.0,) * data.n_server,) * data.n_client
    lengths = data.request_lengths or [[0, 1]] * len(data.request_clients)
    n_input_tokens, n_output_tokens = max(lengths, key=sum)
    problem = Problem(
        model=ModelSpec(data.id, data.L, 1, data.sm, data.sc / (n_input_tokens + n_output_tokens)),
        servers=tuple(
            # Messages count servers by hardware: "2 more such servers would do".
            ServerSpec(f"server {j}", "such", memory, tau_ms / 1e3, 0.0, 0.0, 1.0, 1.0)
            for j, (memory, tau_ms) in enumerate(zip(data.M, data.tau, strict=True))
        ),
        clients=tuple(f"client {c}" for c in range(data.n_client)),
        raw_rtt_s=rtt_s,
        token_rtt_s=rtt_s,
        input_rtt_base_s=nothing,
        input_rtt_slope_s=nothing,
        server_rtt_s=((0.0,) * data.n_server,) * data.n_server,
        n_input_tokens=n_input_tokens,
        n_output_tokens=n_output_tokens,
        request_rate=1.0,
        join_order=tuple(range(data.n_server)),
    )
    requests = (
        RequestSpec(c, n_in, n_out) for c, (n_in, n_out) in zip(data.request_clients, lengths, strict=True)
    )
    return OfflineInstance(data.id, problem, tuple(requests))


def _check_shapes(data: _Document, source: str) -> None:
    for key, values in (("M", data.M), ("tau", data.tau)):
        if len(values) != data.n_server:
            raise UserError(
                f"{source}: {key}: has {len(values)} values but needs {data.n_server}, one for each server"
            )
    if len(data.RTT) != data.n_client:
        raise UserError(
            f"{source}: RTT: has {len(data.RTT)} rows but needs {data.n_client}, one for each client"
        )
    for c, row in enumerate(data.RTT):
        if len(row) != data.n_server:
            raise UserError(
                f"{source}: RTT.{c}: has {len(row)} values but needs {data.n_server}, one for each server"
            )
    for i, client in enumerate(data.request_clients):
        if client >= data.n_client:
            raise UserError(
                f"{source}: request_clients.{i}: is {client}, but clients are numbered 0 to "
                f"{data.n_client - 1}"
            )
    if data.request_lengths is None:
        return
    n_requests = len(data.request_clients)
    if len(data.request_lengths) != n_requests:
        raise UserError(
            f"{source}: request_lengths: has {len(data.request_lengths)} entries but needs {n_requests}, one for "
            "each request"
        )
    for i, (_, n_output_tokens) in enumerate(data.request_lengths):
        if not n_output_tokens:
            raise UserError(f"{source}: request_lengths.{i}.1: must be at least 1 output token, not 0")


class _Decision(NamedTuple):
    """What a policy decided, with its objective in seconds.

    ``search`` is the answer of a search for the optimum, ``None`` for other policies.
    """

    ranges: Sequence[BlockRange]
    chains: Sequence[Sequence[Hop]]
    objective_s: float
    search: BprrAnswer | None = None


def _search(instance: OfflineInstance, program: type[Program]) -> _Decision:
    # As in the instances' stated optimum, every server with enough memory holds at least one block.
    answer = solve_bprr(instance.problem, instance.requests, decode_only=True, min_blocks=1, program=program)
    return _Decision(answer.ranges, answer.chains, answer.objective_s, answer)


def _by_milp(instance: OfflineInstance) -> _Decision:
    return _search(instance, BprrModel)


def _by_milp_paper(instance: OfflineInstance) -> _Decision:
    return _search(instance, PaperModel)


def _by_lp_rounding(instance: OfflineInstance) -> _Decision:
    answer = round_bprr(instance.problem, instance.requests, decode_only=True, min_blocks=1)
    return _Decision(answer.ranges, answer.chains, answer.objective_s)


def _by_cg_bprr(instance: OfflineInstance) -> _Decision:
    answer = cg_bprr(instance.problem, instance.requests, decode_only=True)
    return _Decision(answer.ranges, answer.chains, answer.objective_s)


OFFLINE_POLICIES: dict[str, Callable[[OfflineInstance], _Decision]] = {
    "milp": _by_milp,
    "milp-paper": _by_milp_paper,
    "cg-bprr": _by_cg_bprr,
    "lp-rounding": _by_lp_rounding,
}


def offline_command(paths: Sequence[Path], policy: str) -> list[dict[str, Any]]:
    """Solve every instance file with ``policy``; returns one JSON object each, in the order given.

    ``{id, policy, feasible, error?, objective_ms, placement, routes, bounds, proven_optimal?, gap?, decision_s}``:
    ``placement`` is ``[first block, blocks]`` per server, 1-based, ``[0, 0]`` for none; ``routes`` are lists
    of 0-based servers per request. If infeasible, these and the objective are ``None``. Times in ms are sums
    over the requests, and over their output tokens where the file has ``request_lengths``. ``gap`` is the share
    of the objective by which the optimum may be less. Raises ``UserError`` for a wrong file or policy before anything is solved, and for an
    instance that is too large.
    """
    if policy not in OFFLINE_POLICIES:
        near = difflib.get_close_matches(policy, OFFLINE_POLICIES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"there is no offline policy {policy!r}; {hint}valid: {', '.join(OFFLINE_POLICIES)}")
    instances = [(path, load_offline_instance(path)) for path in paths]
    answers = []
    for path, instance in instances:
        try:
            answers.append(_solve(instance, policy))
        except PolicyError as error:
            raise UserError(f"{path}: {error}") from error
    return answers


def _solve(instance: OfflineInstance, policy: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": instance.id, "policy": policy, "feasible": True}
    began_s = time.perf_counter()
    try:
        decision = OFFLINE_POLICIES[policy](instance)
    except InfeasiblePlacement as error:
        answer |= {"feasible": False, "error": str(error)}
        answer |= {"objective_ms": None, "placement": None, "routes": None}
    else:
        answer["objective_ms"] = decision.objective_s * 1e3
        answer["placement"] = [[r.first + 1, r.n_blocks] if r.n_blocks else [0, 0] for r in decision.ranges]
        answer["routes"] = [[hop.server for hop in chain] for chain in decision.chains]
        if decision.search is not None:
            answer["proven_optimal"] = decision.search.proven_optimal
            answer["gap"] = decision.search.gap_ratio
    answer["decision_s"] = time.perf_counter() - began_s
    program = {"milp-paper": PaperModel, "cg-bprr": None}.get(policy, BprrModel)
    answer["bounds"] = _bounds(instance, program)
    return answer


def _bounds(instance: OfflineInstance, program: type[Program] | None) -> dict[str, float | None]:
    """Return bounds in ms, summed over the requests; ``None`` where no placement exists.

    ``theorem1_ms`` is an upper bound of CG-BPRR. Lower bounds of the optimum are ``lower_bound_ms`` (T^o: a
    server used in part costs that part), ``lower_bound_knapsack_ms`` (whole hops) and ``lp_relaxation_ms``, that of
    ``program`` (left out without one). ``ratio`` is Theorem 1's bound divided by T^o.
    """
    problem, requests = instance.problem, instance.requests
    fractional_ms = lower_bound_s(problem, requests, decode_only=True) * 1e3
    knapsack_ms = knapsack_lower_bound_s(problem, requests, decode_only=True) * 1e3
    theorem1_ms = _ms_if_feasible(lambda: cg_bprr(problem, requests, decode_only=True).theorem1_s)
    bounds = {
        "theorem1_ms": theorem1_ms,
        "lower_bound_ms": fractional_ms if math.isfinite(fractional_ms) else None,
        "lower_bound_knapsack_ms": knapsack_ms if math.isfinite(knapsack_ms) else None,
        "ratio": theorem1_ms / fractional_ms if theorem1_ms is not None and fractional_ms > 0 else None,
    }
    if program is not None:
        chosen = program
        bounds["lp_relaxation_ms"] = _ms_if_feasible(
            lambda: relaxation_s(problem, requests, decode_only=True, min_blocks=1, program=chosen)
        )
    return bounds


def _ms_if_feasible(time_s: Callable[[], float]) -> float | None:
    try:
        return time_s() * 1e3
    except InfeasiblePlacement:
        return None
