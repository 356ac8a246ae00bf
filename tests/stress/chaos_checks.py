"""Numbered invariants that must hold after any run, however it was disturbed. They are checked on the run's
files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from nodes.eventlog import read_log
from nodes.records import ENDED, AnyRecord, Arrived, Cancelled, Completed, Failed, Rejected, Replayed, Token
from nodes.request import EARLIER_TURN_FAILED
from policies.problem import Placement, Problem
from testbed.control.placing import place_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.step_limits import recovery_of
from testbed.records.summary import RunSummary
from testbed.results.logs import RunRecords, read_logs
from tests.stress.chaos_cases import QUIET_S
from tests.stress.slow_links import Watched

_BROKEN_PROTOCOL = re.compile(
    r"differs from the whole|is not \d+ hidden|not the result of|wrong-|bad-frame|unknown-session|"
    r"too-many-steps|a million attempts"
)
"""Reasons of failed requests that no fault of a server or a link can explain."""
_NO_ROOM = re.compile(r"no route covers the model|no-capacity|never-fits")
"""Reasons of failed requests that need no disturbance."""
_AHEAD_BYTES = 13 * 1024**2
"""Most that a connection has on its way or in the kernel when a small frame is sent."""
_ROUNDING_S = 1e-9
_ENDS_S = 1.0
"""A server that leaves ends its connections in less than this."""
_WORD_S = 2.0
"""A client's message that a session has ended takes less than this on any link that is drawn."""


@dataclass(frozen=True)
class Finished:
    """A run that has ended, with the content of its files."""

    experiment: Experiment
    run_dir: Path
    summary: RunSummary
    records: RunRecords
    logs: dict[str, list[AnyRecord]]
    events: list[dict[str, Any]]
    watched: Watched
    is_simulated: bool = False
    """Whether the fast engine has served its scenario, too."""

    @property
    def quiet_from_s(self) -> float:
        """Requests that arrive later are not disturbed: see ``chaos_cases.with_last_requests``."""
        return disturbed_until_s(self.experiment) + QUIET_S / 2


def finished(experiment: Experiment, run_dir: Path, summary: RunSummary, watched: Watched) -> Finished:
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    logs = {path.stem: read_log(path)[0] for path in sorted((run_dir / "events").glob("*.log"))}
    events = [json.loads(line) for line in lines]
    return Finished(experiment, run_dir, summary, read_logs(run_dir), logs, events, watched)


def _ends(run: Finished) -> Iterator[str]:
    """1: each request ends once, with all its tokens, or fails with a reason that a fault can explain."""
    ended: dict[int, int] = {}
    for log in run.logs.values():
        for record in log:
            if isinstance(record, ENDED):
                ended[record.request] = ended.get(record.request, 0) + 1
            if isinstance(record, Failed) and (not record.reason or _BROKEN_PROTOCOL.search(record.reason)):
                yield f"request {record.request} failed: {record.reason!r}"
    for plan in run.experiment.workload.requests:
        if ended.get(plan.index, 0) != 1:
            yield f"request {plan.index} ended {ended.get(plan.index, 0)} times"
    for request in run.records.requests:
        tokens = [token.token for token in request.tokens]
        if tokens != list(range(len(tokens))):
            yield f"request {request.index} has the tokens {tokens}"
        if request.status == "completed" and len(tokens) != request.n_output_tokens:
            yield f"request {request.index} completed with {len(tokens)} of {request.n_output_tokens} tokens"


def _nothing_left(run: Finished) -> Iterator[str]:
    """2: no session, cache or connection is left, no session had to expire, and no log has a traceback."""
    if run.summary["leaks"] is None or any(run.summary["leaks"].values()):
        yield f"left: {run.summary['leaks']}"
    for path in sorted((run.run_dir / "logs").glob("*.log")):
        text = path.read_text(encoding="utf-8")
        if "Traceback" in text or "was never retrieved" in text:
            yield f"{path.name}: {text[-1500:]}"
    if run.watched.expired and not _messages_may_be_late(run):
        yield f"sessions were left to expire: {run.watched.expired}"


def _messages_may_be_late(run: Finished) -> bool:
    """Whether a client's message may take any time: links changed, or a server was stopped."""
    return bool(run.experiment.network.changes) or any(
        fault.kind == "stop" for fault in run.experiment.faults.planned
    )


def _chains_stay_open(experiment: Experiment) -> bool:
    """Whether sessions outlive their requests, for the next turn of a conversation."""
    return experiment.compute.prefix is not None and experiment.compute.prefix.kind == "session"


def _reachable(run: Finished) -> Iterator[str]:
    """3: after all disturbances, each request that the servers which are up can hold is served."""
    problem = run.experiment.problem
    placement, there = _at_the_end(run)
    plans = {plan.index: plan for plan in run.experiment.workload.requests}
    if _is_slow_for_ever(run.experiment):
        return
    prefix, is_paged = run.experiment.compute.prefix, run.experiment.compute.paging is not None
    if (
        _chains_stay_open(run.experiment) and is_paged
    ):  # routers do not know what sessions may need in the end
        return
    for request in run.records.requests:
        is_late = request.arrived_at_s > run.quiet_from_s and request.reason != EARLIER_TURN_FAILED
        if is_late and request.status != "completed":
            plan = plans[request.index]
            held_tokens = 0 if prefix is None or plan.turn is None else prefix.session_tokens
            n_tokens = max(plan.known.n_tokens, held_tokens)
            if chain_exists(problem, placement, there, n_tokens):
                names = [problem.servers[j].name for j in sorted(there)]
                yield f"request {request.index} {request.status} ({request.reason}) with {names} there"


def _is_slow_for_ever(experiment: Experiment) -> bool:
    """Whether a server stays slow: it may exceed the time limits, and the policy may still choose it."""
    return any(fault.kind == "slow" and fault.for_s is None for fault in experiment.faults.planned)


def _at_the_end(run: Finished) -> tuple[Placement, set[int]]:
    """Returns the placement and the servers that are up at the end of the run, according to its events."""
    placement = place_experiment(run.experiment).placement
    names = {spec.name: j for j, spec in enumerate(run.experiment.problem.servers)}
    ranges = list(placement.ranges)
    there = set(range(len(names))) - run.experiment.faults.absent
    for event in run.events:
        server = names.get(event.get("server", ""))
        if server is None:
            continue
        if event["event"] == "fault" and event["applies"] and event["kind"] != "join":
            there.discard(server)  # also a slow one, which may exceed the time limits
        elif event["event"] == "left":
            there.discard(server)
        elif event["event"] in ("begun", "fault-over"):
            there.add(server)
        if event["event"] == "moved":
            ranges[server] = type(ranges[server])(*event["new"])
            there.add(server)
    return replace(placement, ranges=tuple(ranges)), there


def chain_exists(problem: Problem, placement: Placement, servers: set[int], n_tokens: int) -> bool:
    """Whether ``servers`` have room for one session of ``n_tokens``, with each server used up to its last
    block.
    """
    reached, n_blocks = {0}, problem.model.n_blocks
    for block in range(n_blocks):
        if block in reached:
            for j in servers:
                blocks = placement.ranges[j]
                need = (blocks.last - block) * n_tokens * problem.model.cache_bytes_per_token
                if blocks.first <= block < blocks.last and need <= placement.cache_bytes[j]:
                    reached.add(blocks.last)
    return n_blocks in reached


def _faults_once(run: Finished) -> Iterator[str]:
    """4: each planned fault was carried out once, or is counted as one that never came; each change of links
    came.
    """
    planned = [
        (run.experiment.problem.servers[f.server].name, f.kind, f.at_s) for f in run.experiment.faults.planned
    ]
    for fault in set(planned):
        came = sum(
            e["event"] == "fault" and (e["server"], e["kind"], e["planned_at_s"]) == fault for e in run.events
        )
        n_planned = planned.count(fault)
        if came > n_planned or (came < n_planned and fault[2] is not None):
            yield f"{fault} came {came} times, planned {n_planned} times"
    n_came = sum(e["event"] == "fault" and e["by"] == "scenario" for e in run.events)
    if n_came + run.summary["n_faults_never_came"] != len(planned):
        yield f"{n_came} faults came and {run.summary['n_faults_never_came']} did not, of {len(planned)}"
    changes = sum(e["event"] == "network-change" for e in run.events)
    if changes != len(run.experiment.network.changes):
        yield f"{changes} changes of links, planned {len(run.experiment.network.changes)}"


def _monotone(run: Finished) -> Iterator[str]:
    """5: times never decrease, in any log, any token and any hop. A round of drafts may be sent ahead of its token's begin."""
    decoding = run.experiment.problem.decoding
    is_ahead = decoding is not None and decoding.in_flight > 1
    for name, log in run.logs.items():
        for before, after in pairwise(record for record in log if not isinstance(record, Token)):
            if after.at_s < before.at_s - _ROUNDING_S and after.kind != "opening":
                yield f"{name}: {after.kind} at {after.at_s} after {before.kind} at {before.at_s}"
    timed = [e for e in run.events if e.get("at_s") is not None and e["event"] not in ("moved", "decided")]
    for earlier, later in pairwise(timed):
        if (
            later["at_s"] < earlier["at_s"] - _ROUNDING_S
            and "request" not in later
            and "request" not in earlier
        ):
            yield f"events: {later['event']} at {later['at_s']} after {earlier['event']} at {earlier['at_s']}"
    arrived_at_s = {request.index: request.arrived_at_s for request in run.records.requests}
    for token in (record for log in run.logs.values() for record in log if isinstance(record, Token)):
        if not arrived_at_s[token.request] <= token.ready_at_s <= token.at_s:
            yield f"request {token.request}, token {token.token}: {token.ready_at_s} to {token.at_s}"
        for hop in token.hops:
            instants = (hop.sent_at_s, hop.arrived_at_s, hop.departed_at_s, hop.received_at_s)
            begins_at_s = arrived_at_s[token.request] if is_ahead else token.ready_at_s
            if any(b < a - _ROUNDING_S for a, b in pairwise((begins_at_s, *instants, token.at_s))):
                yield f"request {token.request}, token {token.token}, server {hop.server}: {instants}"


def _counted(run: Finished) -> Iterator[str]:
    """6: the counts of the summary are those of the logs."""
    log = [record for records in run.logs.values() for record in records]

    def count(kind: type[AnyRecord]) -> int:
        return sum(isinstance(record, kind) for record in log)

    wanted = {
        "n_requests": count(Arrived),
        "n_completed": count(Completed),
        "n_failed": count(Failed),
        "n_cancelled": count(Cancelled),
        "n_replays": count(Replayed),
        "n_faults": sum(e["event"] == "fault" and e["applies"] and e["kind"] != "cont" for e in run.events),
    }
    for key, value in wanted.items():
        if run.summary[key] != value:
            yield f"{key} is {run.summary[key]}, the logs have {value}"
    rejections = {r.index: r.n_rejections for r in run.records.requests}
    logged: dict[int, int] = dict.fromkeys(rejections, 0)
    for record in log:
        if isinstance(record, Rejected):
            logged[record.request] += 1
    if rejections != logged:
        yield f"rejections are {rejections}, the logs have {logged}"


def _served_by_the_untouched(run: Finished) -> Iterator[str]:
    """7: if undisturbed servers have room for all requests at once, each request completes or is
    cancelled.
    """
    experiment = run.experiment
    touched = {fault.server for fault in experiment.faults.planned} | experiment.faults.absent
    recovery = experiment.faults.recovery
    if experiment.network.changes or experiment.policy.online is not None or recovery.mode != "replay":
        return
    if _chains_stay_open(experiment):  # and hold more than their requests need
        return
    # In the worst case the faults follow each other: each is noticed after a timeout, and each ban is longer.
    noticed_s = sum(
        recovery.request_timeout_s + recovery.ban_s * 2**n for n, _ in enumerate(experiment.faults.planned)
    )
    if _is_slow_for_ever(experiment) or noticed_s > recovery.give_up_s:
        return
    untouched = set(range(experiment.problem.n_servers)) - touched
    n_tokens = sum(plan.known.n_tokens for plan in experiment.workload.requests)
    if chain_exists(experiment.problem, place_experiment(experiment).placement, untouched, n_tokens):
        for request in run.records.requests:
            if request.status not in ("completed", "cancelled") and not _is_overdue(
                experiment, request.index
            ):
                yield f"request {request.index} {request.status} ({request.reason}) beside {sorted(untouched)}"


def _is_overdue(experiment: Experiment, request: int) -> bool:
    """Whether the chunks of other prompts, which a server computes first, may take longer than a step's limit.

    A step's limit has the time of its own chunks. Its client then gives up a server that works, as behind a slow one.
    """
    if experiment.compute.chunk_tokens is None:
        return False
    rules = recovery_of(experiment)
    n_others = sum(plan.n_input_tokens for plan in experiment.workload.requests if plan.index != request)
    return rules.token_s * n_others > rules.request_timeout_s


def _leaves_without_delay(run: Finished) -> Iterator[str]:
    """8: a server that leaves, or drains in order to move, does so as soon as its last session has ended there."""
    if any(fault.kind == "stop" for fault in run.experiment.faults.planned):  # then it can do nothing
        return
    for event in run.events:
        if event["event"] == "left":
            began_s, gone_s = event["at_s"] - event["took_s"], event["at_s"]
        elif event["event"] == "moved":
            began_s, gone_s = event["closed_at_s"], event["drained_at_s"]
        else:
            continue
        ended_at_s = (at_s for server, _, at_s in run.watched.released if server == event["server"])
        freed_at_s = (at_s for at_s in ended_at_s if at_s <= gone_s)
        last_s = max((began_s, *freed_at_s))
        if gone_s > last_s + (_ENDS_S if event["event"] == "left" else _ROUNDING_S):
            yield f"{event['server']} {event['event']} at {gone_s}, its last session ended at {last_s}"


def _undisturbed_by_others(run: Finished) -> Iterator[str]:
    """9: no server hangs up on a node of the run, no request is interrupted, and in a run without disturbances none
    fails, however long messages wait for links.
    """
    if run.watched.rejected:
        yield run.watched.rejected[0]
    is_calm = not run.experiment.network.changes and not run.experiment.faults.planned
    for request in run.records.requests:
        if request.status == "interrupted":
            yield f"request {request.index} was interrupted"
        fails_alone = request.status == "failed" and request.reason != EARLIER_TURN_FAILED
        is_explained = _NO_ROOM.search(request.reason or "") or _is_overdue(run.experiment, request.index)
        if is_calm and fails_alone and not is_explained:
            yield f"request {request.index} failed in a calm run: {request.reason}"


def _closed_in_time(run: Finished) -> Iterator[str]:
    """10: a session outlives its request by no more than its closing needs behind what is on its way."""
    if _messages_may_be_late(run) or _chains_stay_open(run.experiment):
        return
    ended_at_s = {
        record.request: record.at_s
        for log in run.logs.values()
        for record in log
        if isinstance(record, ENDED)
    }
    slowest_bps = min(link.rate_bps for link in run.experiment.network.links.values())
    longest_s = max(link.delay_s for link in run.experiment.network.links.values())
    # An opening that is cancelled is closed when its answer has come: twice there, once back.
    limit_s = 3 * 8 * _AHEAD_BYTES / run.watched.scale / slowest_bps + 6 * longest_s + _WORD_S
    for _, session, at_s in run.watched.released:
        late_s = at_s - ended_at_s[int(session.partition(".")[0])]
        if late_s > limit_s:
            yield f"session {session} outlived its request by {late_s:g} s, more than {limit_s:g} s"


INVARIANTS: tuple[Callable[[Finished], Iterator[str]], ...] = (
    *(_ends, _nothing_left, _reachable, _faults_once, _monotone, _counted, _served_by_the_untouched),
    *(_leaves_without_delay, _undisturbed_by_others, _closed_in_time),
)


def broken(run: Finished) -> list[tuple[int, str]]:
    """Returns (number of the invariant, what is wrong) for each broken invariant, with its first finding."""
    found = []
    for number, invariant in enumerate(INVARIANTS, 1):
        wrong = next(invariant(run), None)
        if wrong is not None:
            found.append((number, wrong))
    return found


def interrupted_badly(run: Finished, whole: Finished, at_s: float) -> str | None:
    """Returns what is wrong with a run that was interrupted ``at_s``; ``whole`` is the same run without that.

    12: every request that had arrived has one end, no log has a traceback, no session was left to expire, and up to then it is
    the run that it would have been.
    """
    for name, log in run.logs.items():
        arrived = sorted(record.request for record in log if isinstance(record, Arrived))
        ended = sorted(record.request for record in log if isinstance(record, ENDED))
        if ended != arrived:
            return f"{name}: requests {arrived} arrived, {ended} ended"
        kept, before = (
            [r for r in of if isinstance(r, (Token, *ENDED)) and r.at_s < at_s]
            for of in (log, whole.logs[name])
        )
        if kept != before:
            return f"{name}: {len(kept)} tokens and ends before the interrupt, {len(before)} without it"
    # Nobody looks for what sessions have left in a run that is interrupted: its servers are ended.
    return next((wrong for wrong in _nothing_left(run) if not wrong.startswith("left: ")), None)


def disturbed_until_s(experiment: Experiment) -> float:
    """Returns the time of the last disturbance, or of the last arrival before the undisturbed last
    requests.
    """
    ends = [change.at_s for change in experiment.network.changes]
    ends += [(fault.at_s or 0.0) + (fault.for_s or 0.0) for fault in experiment.faults.planned]
    arrivals = sorted(request.arrival_at_s for request in experiment.workload.requests)
    before = (early for early, late in pairwise(arrivals) if late - early > QUIET_S / 2)
    return max((0.0, *ends, *before))
