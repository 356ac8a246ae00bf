"""A request's time, divided into parts that add up to it, and the time of the best chain on idle servers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from policies.chains import Chains
from policies.prefixes import saved_s
from policies.problem import BlockRange, Hop, RequestSpec, decode_step_s, service_s
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile
from testbed.faultkinds import KINDS
from testbed.records.events import OF_FAULTS, Detected, FaultHappened, LinksChanged, Replayed, read_events
from testbed.records.plan import REFERENCE, Plan, find_plan, read_plan
from testbed.records.requests import RequestRow
from testbed.records.summary import read_summary
from testbed.results.errors import REQUESTS
from testbed.results.model import model_setup_s
from testbed.results.slow import HaltedServers, SlowServers
from testbed.rundir import TWIN, parquet_path
from testbed.studies.compare.load import load_run
from testbed.studies.explain.waits import hop_waits

OF_HOPS = (
    *("propagation_s", "transmission_s", "link_wait_s", "network_rest_s"),
    *("compute_alone_s", "compute_shared_s", "compute_slower_s", "halted_s"),
    *("behind_s", "client_s", "ahead_s"),
)
"""The parts that are measured per hop, in scenario seconds.

``link_wait_s``: messages that met others on a link took so much longer than with nothing else there, at most what the
link needs for these others. ``network_rest_s``: network time that neither this nor the links' delays and rates explain (jitter, losses, changed
links, a connection that lets only a part of a prompt through at once). ``compute_alone_s``: steps as long as the profile says for a
session alone; ``compute_shared_s``: the time beyond that of steps that met other sessions on their server;
``compute_slower_s``: that of steps that met none, and what a slowed server takes for those that did. ``halted_s``: the
time in which the hop's server was halted, of what a message or a step took beyond all this. With several rounds of
drafts in flight, ``behind_s`` is the time of a round on a server until earlier ones were computed there; ``ahead_s``, below 0,
is how much earlier it was sent than the token before it was known.
"""
PARTS = ("queue_s", "setup_s", "setup_wait_s", *OF_HOPS, "replays_s", "preempted_s", "rest_s")
"""All parts. They add up to ``e2e_s``; ``rest_s`` is the time that is in none of the others.

``setup_s``: opening the chain, as long as it takes on idle links; ``setup_wait_s``: what it took beyond that.
"""
_TAKE_AWAY = {kind.name for kind in KINDS.values() if kind.takes_away}


def account(run_dir: Path, request: int) -> dict[str, Any]:
    """Returns the parts of the time of ``request`` (scenario seconds), per hop and in total.

    Raises ``UserError`` if the run has no such request, the request did not complete, or a table is missing.
    """
    run = load_run(run_dir)
    if run.form != "scenario":
        raise UserError(
            f"{run_dir} comes from an instance file, which has no links; give a run of a scenario"
        )
    if request not in run.requests:
        raise UserError(f"there is no request {request}: they are {min(run.requests)} to {max(run.requests)}")
    row = run.requests[request]
    times = row.times
    if not row.is_completed or times.e2e_s is None or times.ttft_s is None:
        why = f": {row.reason}" if row.reason else ""
        raise UserError(
            f"request {request} did not complete (it is {row.status}{why}), so there is no time to explain; "
            "choose one that completed"
        )
    if run.hops is None:
        raise UserError(
            f"{run_dir} has no hops.parquet, since it would be too large; simulate fewer requests"
        )
    experiment = load_experiment(str(run_dir / "scenario.toml"))
    table = pq.read_table(parquet_path(run_dir / "hops.parquet"), filters=[("request", "==", request)])
    hops = table.to_pylist()
    plan = find_plan(run_dir)
    is_closed_form = plan is not None and plan.mode == REFERENCE
    _add_waits(experiment, run_dir, run.requests, row, hops)
    plain, replayed = (
        [r for r in hops if bool(r["replayed_tokens"]) == is_replay] for is_replay in (False, True)
    )
    per_hop = _per_hop(
        experiment, row, plain, _Slower(experiment, run_dir, plan), is_closed_form=is_closed_form
    )
    replays_s = math.fsum(r["hop_client_s"] + r["hop_network_s"] + r["hop_compute_s"] for r in replayed)
    preempted_s = min(row.preempted_s, replays_s)
    down = _down(run_dir, row)
    own_hops, best_hops = _chains(experiment, run_dir, row, down)
    alone = partial(
        _alone, experiment, row, rounds=_rounds(experiment, row, plain), is_reference=is_closed_form
    )
    own, best = alone(own_hops), None if best_hops is None else alone(best_hops)
    setup_s = times.setup_s or 0.0
    parts: dict[str, float] = {"queue_s": times.queue_s or 0.0, "setup_s": min(setup_s, own["setup_s"])}
    parts["setup_wait_s"] = setup_s - parts["setup_s"]
    parts |= {name: math.fsum(hop[name] for hop in per_hop) for name in OF_HOPS}
    parts |= {"replays_s": replays_s - preempted_s, "preempted_s": preempted_s}
    parts["rest_s"] = times.e2e_s - math.fsum(parts.values())
    losses = _losses(run_dir, request)
    kept_s = _saved_by_kept_caches_s(experiment, row, own["setup_s"] - setup_s)
    twin = _twin(experiment, run_dir, request)
    slow = parts if twin is None else twin["parts"]  # what a run takes beyond its twin is the machine's
    slow_s = slow["compute_slower_s"] + slow["halted_s"] + slow["behind_s"] + slow["ahead_s"]
    beyond_s = times.e2e_s - (own["e2e_s"] - kept_s) - slow_s
    end_s = math.inf if row.ended_at_s is None else row.ended_at_s
    has_changed = any(change.at_s < end_s for change in experiment.network.changes)
    has_changed |= any((event.at_s or 0.0) < end_s for event in read_events(run_dir, LinksChanged))
    has_company = bool(losses or down) or has_changed or _has_met(row, run.requests)
    machine_s = 0.0 if twin is None else times.e2e_s - twin["e2e_s"]
    return {
        "request": request,
        "client": row.client,
        "n_input_tokens": row.n_input_tokens,
        "n_output_tokens": row.n_tokens_done,
        "arrival_at_s": row.arrival_at_s,
        "e2e_s": times.e2e_s,
        "ttft_s": times.ttft_s,
        "n_attempts": row.n_rejections + 1,
        "n_recoveries": row.n_recoveries,
        "n_preemptions": row.n_preemptions,
        **({"n_rounds": row.n_rounds, "n_accepted": row.n_accepted} if row.n_rounds else {}),
        **(
            {"n_cached_tokens": row.n_cached_tokens, "saved_by_caches_s": kept_s}
            if row.n_cached_tokens
            else {}
        ),
        "parts": parts,
        "hops": per_hop,
        "own_chain_alone": own,
        "best_chain_alone": best,
        "losses": losses,
        "down_meanwhile": sorted(down),
        "links_changed": has_changed,
        "in_real_time": plan is not None and plan.is_in_real_time,
        "twin_e2e_s": None if twin is None else twin["e2e_s"],
        "twin_parts": None if twin is None else twin["parts"],
        "lost_to_others_s": beyond_s - machine_s if has_company else 0.0,
        "lost_to_machine_s": machine_s if has_company else beyond_s,
        "lost_to_chain_s": None if best is None else own["e2e_s"] - kept_s - best["e2e_s"],
    }


def _twin(experiment: Experiment, run_dir: Path, request: int) -> dict[str, Any] | None:
    """Returns the account of ``request`` in the twin of a run in real time, if nothing but the machine makes a difference.

    ``None``: there is no twin, its requests had other company, its servers are not the run's (real blocks), or the request
    did not complete there.
    """
    if experiment.compute.backend != "stub" or experiment.workload.endpoint_tokens:
        return None
    if read_summary(run_dir).emulation_error_pairing != REQUESTS:
        return None
    try:
        return account(run_dir / TWIN, request)
    except UserError:
        return None


def _saved_by_kept_caches_s(experiment: Experiment, row: RequestRow, less_setup_s: float) -> float:
    """Returns how much less the request took alone since its chain had the cache of its prompt's beginning.

    ``less_setup_s``: how much less its setup took than opening a chain: that is spared where the chain stayed open.
    """
    if not row.n_cached_tokens:
        return 0.0
    request = RequestSpec(_client(experiment, row), row.n_input_tokens, row.n_tokens_done)
    return saved_s(experiment.problem, request, row.hops, row.n_cached_tokens) + max(less_setup_s, 0.0)


def _has_met(row: RequestRow, requests: Mapping[int, RequestRow]) -> bool:
    """Returns whether another request of the run was there between the request's arrival and its end."""

    def begin_s(one: RequestRow) -> float:
        return one.arrival_at_s if one.arrived_at_s is None else one.arrived_at_s

    def end_s(one: RequestRow) -> float:
        return math.inf if one.ended_at_s is None else one.ended_at_s

    others = (other for other in requests.values() if other.request != row.request)
    return any(begin_s(other) < end_s(row) and end_s(other) > begin_s(row) for other in others)


def _add_waits(
    experiment: Experiment,
    run_dir: Path,
    requests: Mapping[int, RequestRow],
    row: RequestRow,
    hops: Sequence[dict[str, Any]],
) -> None:
    """Adds the columns of ``HopWaits`` to the request's rows of ``hops.parquet``."""
    clients = {number: _client(experiment, other) for number, other in requests.items()}
    ended_at_s = math.inf if row.ended_at_s is None else row.ended_at_s
    waits = hop_waits(experiment, run_dir, clients, row.request, ended_at_s)
    for hop, *values in zip(hops, *(column.tolist() for column in waits), strict=True):
        hop |= dict(zip(waits._fields, values, strict=True))


class _Beyond(NamedTuple):
    """Seconds of a hop: its server was halted while a message or its step was there, its server is slower than its profile,
    it met other sessions, and those of the session's own drafts in flight that are given up: a server ends what it has
    begun of them.
    """

    halted_on_network_s: float
    halted_s: float
    slower_s: float
    shared_s: float
    own_s: float


class _Slower:
    """Divides what a step took beyond its profile."""

    def __init__(self, experiment: Experiment, run_dir: Path, plan: Plan | None) -> None:
        is_real = plan is not None and plan.is_in_real_time
        compute = experiment.compute
        self._all_meet = is_real or compute.batching != "none" or compute.backend != "stub"
        self._servers = {server.name: number for number, server in enumerate(experiment.problem.servers)}
        decoding = experiment.problem.decoding
        self._waits_for_own = not is_real and decoding is not None and decoding.in_flight > 1
        self._contention = [server.contention_ratio for server in experiment.problem.servers]
        faults = read_events(run_dir, OF_FAULTS)
        self._slow, self._halted = SlowServers(faults, list(self._servers)), HaltedServers(faults)

    def of(self, hop: Mapping[str, Any], alone_s: float, network_rest_s: float) -> _Beyond:
        """Returns what ``hop`` took beyond ``alone_s``, which the profile gives it, and on the network otherwise."""
        name = hop["server"]
        server = self._servers[name]
        slow_s = alone_s * (self._slow.factor(server, hop["arrived_at_s"]) - 1.0)
        beyond_s = float(hop["hop_compute_s"]) - alone_s
        there_s, here_s = (
            min(self._halted.within_s(name, hop[since], hop[until]), max(rest_s, 0.0))
            for since, until, rest_s in (
                ("sent_at_s", "arrived_at_s", network_rest_s),
                ("arrived_at_s", "departed_at_s", beyond_s - slow_s),
            )
        )
        beyond_s -= here_s
        if hop["has_met"] and (self._all_meet or self._contention[server]):
            return _Beyond(there_s, here_s, slow_s, beyond_s - slow_s, 0.0)
        if self._waits_for_own:
            return _Beyond(there_s, here_s, slow_s, 0.0, beyond_s - slow_s)
        return _Beyond(there_s, here_s, beyond_s, 0.0, 0.0)


def _per_hop(
    experiment: Experiment,
    row: RequestRow,
    hops: Sequence[dict[str, Any]],
    slower: _Slower,
    *,
    is_closed_form: bool,
) -> list[dict[str, Any]]:
    """Returns the time that all tokens together spent on each hop, in the order in which the hops were used.

    After a recovery the hops of all chains are included. ``hops``: rows of ``hops.parquet`` with ``HopWaits``, without
    replays. ``is_closed_form``: the run is of the engine ``reference``. Its network time is propagation and transmission
    alone, and its compute time has the calibration's overheads, which in published figures contain the transmission.
    """
    numbers = {server.name: j for j, server in enumerate(experiment.problem.servers)}
    profiles = {name: stub_profile(experiment, numbers[name]) for name in {hop["server"] for hop in hops}}
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    free_at_s: dict[str, float] = {}
    for hop in hops:
        name = hop["server"]
        behind_s = max(free_at_s.get(name, -math.inf) - hop["arrived_at_s"], 0.0)
        free_at_s[name] = hop["departed_at_s"]
        hop["hop_compute_s"] -= behind_s
        total = found.setdefault(
            (name, hop["first_block"], hop["last_block"]),
            {
                "server": name,
                "first_block": hop["first_block"],
                "last_block": hop["last_block"],
                "n_tokens": 0,
                **dict.fromkeys(OF_HOPS, 0.0),
            },
        )
        n_input, token = row.n_input_tokens, hop["token"]
        n_tokens = 1
        if not token or experiment.problem.decoding is not None:  # of a prompt what no server has kept
            n_tokens = hop["up_bytes"] // experiment.problem.model.token_bytes
        position = n_input + token - 1 if token else n_input - n_tokens
        profile = profiles[name]
        alone_s = profile.times.step_s(position, n_tokens, range(hop["first_block"], hop["last_block"]))
        if is_closed_form:
            calibration = experiment.calibration
            alone_s += calibration.token_overhead_s if token else calibration.input_overhead_s(n_input)
            hop |= {"transmission_s": hop["hop_network_s"] - hop["propagation_s"], "link_wait_s": 0.0}
        else:
            alone_s += profile.overhead_s(row.client, position, n_tokens)
        explained_s = hop["propagation_s"] + hop["transmission_s"] + hop["link_wait_s"]
        network_rest_s = hop["hop_network_s"] - explained_s
        beyond = slower.of(hop, alone_s, network_rest_s)
        total["n_tokens"] += 1
        for part, value_s in (
            *((part, hop[part]) for part in ("propagation_s", "transmission_s", "link_wait_s")),
            ("network_rest_s", network_rest_s - beyond.halted_on_network_s),
            ("compute_alone_s", alone_s),
            ("compute_shared_s", beyond.shared_s),
            ("compute_slower_s", beyond.slower_s),
            ("halted_s", beyond.halted_on_network_s + beyond.halted_s),
            ("behind_s", behind_s + beyond.own_s),
            ("client_s", max(hop["hop_client_s"], 0.0)),
            ("ahead_s", min(hop["hop_client_s"], 0.0)),
        ):
            total[part] += value_s
    return list(found.values())


def _losses(run_dir: Path, request: int) -> list[dict[str, Any]]:
    """Returns which servers the request lost at which time, and when it went on without them (None:
    never).
    """
    found: list[dict[str, Any]] = []
    kinds: tuple[type[Detected | Replayed], ...] = (Detected, Replayed)
    for event in read_events(run_dir, kinds):
        if event.request != request:
            continue
        if isinstance(event, Detected):
            found.append({"at_s": event.at_s, "servers": event.servers, "on_again_at_s": None})
        else:
            for loss in found:
                loss["on_again_at_s"] = loss["on_again_at_s"] or event.at_s
    return found


def _down(run_dir: Path, row: RequestRow) -> set[str]:
    """Returns the servers that were down at some time between the request's arrival and its end."""
    since_s: dict[str, float] = {}
    found: set[str] = set()
    for event in read_events(run_dir, OF_FAULTS):
        at_s = event.at_s or 0.0
        if at_s > (row.ended_at_s or 0.0):
            break
        if not isinstance(event, FaultHappened):
            if since_s.pop(event.server, None) is not None and at_s > row.arrival_at_s:
                found.add(event.server)
        elif event.kind in _TAKE_AWAY and event.applies:
            since_s.setdefault(event.server, at_s)
    return found | since_s.keys()


def _chains(
    experiment: Experiment, run_dir: Path, row: RequestRow, down: Collection[str]
) -> tuple[tuple[Hop, ...], tuple[Hop, ...] | None]:
    """Returns the request's first chain, and the fastest chain of the run's placement on idle servers.

    The latter uses no server of ``down``; None if there is none.
    """
    placement = read_plan(run_dir).placement.placement()
    ranges = tuple(
        BlockRange(0, 0) if server.name in down else held
        for server, held in zip(experiment.problem.servers, placement.ranges, strict=True)
    )
    placement = replace(placement, ranges=ranges)
    known = RequestSpec(_client(experiment, row), row.n_input_tokens, row.max_new_tokens)
    best = Chains(experiment.problem, placement).of(known).idle
    return row.hops, None if best is None else best.hops


def _client(experiment: Experiment, row: RequestRow) -> int:
    return experiment.problem.clients.index(row.client)


def _rounds(
    experiment: Experiment, row: RequestRow, hops: Sequence[Mapping[str, Any]]
) -> list[tuple[int, int]]:
    """Returns (cached tokens, drafted tokens) of the request's rounds of speculative decoding; empty without it."""
    decoding, token_bytes = experiment.problem.decoding, experiment.problem.model.token_bytes
    if decoding is None:
        return []
    sent = {hop["token"]: hop["up_bytes"] // token_bytes for hop in hops if hop["token"]}
    before = row.n_input_tokens - 1
    return [(before + token, n_sent - decoding.n_sent(1) + 1) for token, n_sent in sent.items()]


def _alone(
    experiment: Experiment,
    row: RequestRow,
    hops: tuple[Hop, ...],
    rounds: Sequence[tuple[int, int]],
    *,
    is_reference: bool,
) -> dict[str, Any]:
    """Returns the times (seconds) that the request would take on ``hops`` without any other request.

    With speculative decoding it has the same ``rounds`` there. ``is_reference``: the run is of that mode.
    """
    request = RequestSpec(_client(experiment, row), row.n_input_tokens, row.n_tokens_done)
    setup_s = model_setup_s(experiment, row.client, hops, is_reference=is_reference)
    first_s, all_s = service_s(experiment.problem, request, hops)
    if rounds:
        all_s = first_s + math.fsum(
            decode_step_s(experiment.problem, request, hops, *round_) for round_ in rounds
        )
    names = [server.name for server in experiment.problem.servers]
    return {
        "hops": [{"server": names[h.server], "first_block": h.first, "last_block": h.last} for h in hops],
        "setup_s": setup_s,
        "ttft_s": setup_s + first_s,
        "e2e_s": setup_s + all_s,
    }
