"""`testbed reproduce helix`: simulates a logged run, with its arrivals, lengths and routes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodes.batching import Batches
from policies.workload import RequestPlan
from testbed.errors import UserError
from testbed.fast.delays import ChainDelays, HopDelays
from testbed.fast.events import EventQueue
from testbed.fast.steps import COLUMNS, ChainSession, Part, Steps
from testbed.results.requests import stats
from testbed.studies.reproduce.helix_files import Cluster, LoggedQuery, read_cluster, read_log, read_times

TOKEN_BYTES = 8192 * 2
"""Size of a token's hidden state of LLaMA-70B."""
STEP_BASE_S = 0.004
"""Time of a step besides its layers. It is fitted to the public log alone (docs/validation.md); other logs
judge it.
"""
_HUB = -1
Passes = dict[int, list[tuple[float, float]]]
"""Query -> (sent, received) of each pass through its chain, in seconds of the log."""


def helix_command(
    log: Path, cluster: Path, tables: Path, warm_up_s: float, base_s: float = STEP_BASE_S
) -> tuple[dict[str, Any], str]:
    """Returns the object for ``--json`` and the text for the terminal.

    ``log``, ``cluster`` and ``tables`` are files of Helix' artifact, see ``helix_files``. Passes sent before
    ``warm_up_s`` are not counted. ``base_s``: time of a step besides its layers. Raises ``UserError`` for
    invalid options and files.
    """
    for name, value_s in (("--warm-up", warm_up_s), ("--step-base", base_s)):
        if not 0 <= value_s < math.inf:
            raise UserError(f"{name} must be 0 or more seconds, not {value_s:g}")
    queries, machines = read_log(log), read_cluster(cluster)
    measured = {
        number: list(zip(query.sent_at_s, query.came_at_s, strict=False)) for number, query in queries.items()
    }
    last_at_s = max((came for passes in measured.values() for _, came in passes), default=0.0)
    if warm_up_s >= last_at_s:
        raise UserError(f"--warm-up {warm_up_s:g} leaves nothing: the log ends at {last_at_s:.0f} s")
    simulated = replay(queries, machines, tables, base_s, last_at_s)
    window = warm_up_s, last_at_s
    answer: dict[str, Any] = {
        "log": str(log),
        "n_queries": len(queries),
        "window_s": list(window),
        "step_base_s": base_s,
        "measured": _figures(measured, *window),
        "simulated": _figures(simulated, *window),
    }
    return answer, "\n".join(_lines(answer))


def replay(
    queries: Mapping[int, LoggedQuery], cluster: Cluster, tables: Path, base_s: float, until_s: float
) -> Passes:
    """Simulate each query from the time its prompt was sent, with its logged route and length, up to
    ``until_s``.

    Raises ``UserError`` if a route uses a node or a link that the cluster does not have.
    """
    for number, query in queries.items():
        for hop in query.hops:
            if hop.server >= len(cluster.kinds):
                raise UserError(
                    f"query {number} passes node {hop.server + 1}, which the cluster does not have"
                )
    times = {kind: read_times(tables, kind, base_s) for kind in set(cluster.kinds)}
    queue = EventQueue()
    batches = [Batches(times[kind]) for kind in cluster.kinds]
    steps = Steps(queue, TOKEN_BYTES, hub_s=[0.0], batches=batches, forwarding=True, most=10**9)
    n_left = len(queries)

    def ended(_: float) -> None:
        nonlocal n_left
        n_left -= 1
        if not n_left:
            queue.stop()

    for number, query in queries.items():
        plan = RequestPlan(number, 0, query.sent_at_s[0], query.n_input, query.n_output)
        delays = ChainDelays(*(_delays(cluster, query, n_tokens) for n_tokens in (query.n_input, 1)))
        session = ChainSession(plan, (number, 0), tuple(query.hops), delays, (), ended)
        session.parts, session.ready_at_s = (Part(0, query.n_input),), plan.arrival_at_s
        queue.at(plan.arrival_at_s, steps.begin, session, plan.arrival_at_s)
    if n_left:
        queue.run(until_s)
    return _passes(steps)


def _delays(cluster: Cluster, query: LoggedQuery, n_tokens: int) -> list[HopDelays]:
    nodes = [_HUB, *(hop.server for hop in query.hops)]
    delays = [HopDelays(_way_s(cluster, *pair, n_tokens), 0.0, 0.0) for pair in itertools.pairwise(nodes)]
    # The last node returns one token or one hidden state, also after a prompt.
    delays[-1] = delays[-1]._replace(down_s=_way_s(cluster, nodes[-1], _HUB, 1))
    return delays


def _way_s(cluster: Cluster, source: int, target: int, n_tokens: int) -> float:
    link = cluster.links.get((source, target)) or cluster.links.get((target, source))
    if link is None:
        raise UserError(f"the cluster has no link between nodes {source + 1} and {target + 1} (0 is the hub)")
    bytes_per_s, latency_s = link
    return latency_s + n_tokens * TOKEN_BYTES / bytes_per_s


def _passes(steps: Steps) -> Passes:
    assert steps.rows is not None, "they were asked for"
    width = len(COLUMNS)
    request, token, hop = (COLUMNS.index(name) for name in ("request", "token", "hop"))
    sent, received = COLUMNS.index("sent_at_s"), COLUMNS.index("received_at_s")
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for at in range(0, len(steps.rows), width):
        row = steps.rows[at : at + width]
        key = int(row[request]), int(row[token])
        spans[key] = (row[sent] if row[hop] == 0 else spans[key][0]), row[received]
    passes: Passes = {}
    for (number, _), span in sorted(spans.items()):
        passes.setdefault(number, []).append(span)
    return passes


def _figures(passes: Passes, from_s: float, until_s: float) -> dict[str, Any]:
    """Returns statistics of latencies, and tokens per second, between ``from_s`` and ``until_s``.

    Latencies cover the passes that were sent and received in this time.
    """
    prompt_s: list[float] = []
    decode_s: list[float] = []
    for spans in passes.values():
        for number, (sent, came) in enumerate(spans):
            if from_s <= sent and came <= until_s:
                (decode_s if number else prompt_s).append(came - sent)
    n_came = sum(from_s <= came <= until_s for spans in passes.values() for _, came in spans[1:])
    return {
        "prompt_s": stats(prompt_s),
        "decode_s": stats(decode_s),
        "tokens_per_s": n_came / (until_s - from_s),
    }


def _lines(answer: Mapping[str, Any]) -> Sequence[str]:
    measured, simulated = answer["measured"], answer["simulated"]
    begin, end = answer["window_s"]
    lines = [
        f"{answer['n_queries']} queries, from {begin:.0f} to {end:.0f} s: prompts and decode steps that "
        "were sent "
        "and came back in this time",
        f"{'':28}{'measured':>10}{'simulated':>11}{'differs':>9}",
    ]
    rows = [
        (f"{name} {key}", measured[f"{which}_s"][key], simulated[f"{which}_s"][key])
        for which, name in (("prompt", "prompt latency, s:"), ("decode", "decode latency, s:"))
        for key in ("mean", "p50", "p95", "p99")
    ]
    rows.append(("decode tokens per second", measured["tokens_per_s"], simulated["tokens_per_s"]))
    lines += [
        f"{name:28}{one:10.3f}{other:11.3f}{100 * (other / one - 1):+8.1f} %"
        if one and other
        else f"{name:28}{'none':>10}"
        for name, one, other in rows
    ]
    return lines
