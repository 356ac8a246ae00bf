"""The summary of a run as text for the terminal."""

from __future__ import annotations

import io

from rich.table import Table

from netem.networks import IN_PROCESS, NETWORKS
from testbed.experiments.units import counted
from testbed.records.links import busy_text
from testbed.records.summary import ErrorFigures, RunSummary
from testbed.results.bounds import bounds_text, in_ms, proof_text
from testbed.results.clients import clients_text
from testbed.results.conversations import conversations_text
from testbed.results.costs import COSTS, costs_text
from testbed.results.errors import DISTRIBUTIONS
from testbed.results.failures import failure_text
from testbed.results.slo import objectives_of
from testbed.results.speculation import speculation_text
from testbed.results.summary import RANDOM_LOSS
from testbed.results.unused import unused_text
from testbed.results.verified import verdict
from testbed.terminal import console_to

_ROWS = (
    ("per_token_s", "per token, all tokens"),
    ("ttft_s", "first token (TTFT)"),
    ("tpot_s", "each remaining token (TPOT)"),
    ("token_gap_s", "single token gaps"),
    ("e2e_s", "whole request"),
    ("queue_s", "queue (admission)"),
)

VIRTUAL_TIME = (
    "virtual time shows an ideal machine: the testbed's own overhead and routing decisions take none of it, "
    "and what links lose is sent again by a rule, not by TCP's own timers; --clock real measures the rest"
)
"""What virtual time cannot show, for the report of a run in virtual time; the terminal has a shorter text."""

_CARRIES_BPS, _CARRIES_BETWEEN_BPS = 5e9, 2.5e9
"""Bits per real second that a forwarder carries on one machine, and between machines."""
_UNDERLAY_RATIO = 1e-3
"""A larger share of packets that come late over the network between machines is reported."""
_LATE_S, _BUSY_RATIO = 1e-3, 0.9
"""Real seconds, and a share of a second: above these the forwarder adds much to a token's network time."""

_FINE_RATIO = 1e-3
"""Errors below this ratio are shown with one more digit."""

_SHOWN_RATIO = 5e-6
"""Errors below this ratio are shown as 0."""

_LAG_S = 0.1
"""A request that arrives more than this many real seconds late is reported."""

_BUSY_S = 1.5e-3
"""Overhead per hop, in real seconds, above which the machine is too busy to measure on."""


def summary_text(summary: RunSummary, width: int = 110) -> str:
    """Return the summary as a few lines and one table: measured, twin or model, error in percent."""
    buffer = io.StringIO()
    console = console_to(buffer, width)
    policy = summary.policy
    designed = f", |R| = {policy.design_concurrency}" if policy.design_concurrency else ""
    console.print(
        f"{summary.scenario}: {summary.n_completed} of {summary.n_requests} requests completed"
        + (f", {summary.n_failed} failed" if summary.n_failed else "")
        + (f", {summary.n_cancelled} cancelled" if summary.n_cancelled else "")
        + (f", {summary.n_interrupted} interrupted" if summary.n_interrupted else "")
        + (f", {summary.n_not_started} not started" if summary.n_not_started else "")
    )
    console.print(
        f"placement {policy.placement}, routing {policy.routing}{designed}; network "
        f"{summary.network}, compute {summary.compute}, "
        + (f"time scale {summary.time_scale:g}, " if summary.time_scale != 1 else "")
        + f"seed {summary.seed}"
    )
    if summary.workload:
        console.print(f"requests: {summary.workload}")
    if _has_times(summary):
        console.print(_table(summary))
    console.print(_footer(summary))
    return buffer.getvalue().rstrip()


def _has_times(summary: RunSummary) -> bool:
    return any(summary.metrics[metric].n for metric, _ in _ROWS)


def _table(summary: RunSummary) -> Table:
    """Return the table: measured times beside the twin's, or in virtual time the closed model's."""
    truth, truths = ("twin", summary.twin) if summary.twin else ("model", summary.model)
    errors = summary.emulation_error
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scenario seconds")
    is_part = summary.n_completed < summary.n_requests
    for name in (*(("of",) if is_part else ()), "mean", "p50", "p99", f"{truth} mean", f"{truth} p99"):
        table.add_column(name, justify="right")
    for name in ("error mean", "error p99") if errors else ():
        table.add_column(name, justify="right")
    for metric, label in _ROWS:
        measured, true = summary.metrics[metric], truths[metric]
        if not measured.n:
            continue
        table.add_row(
            label,
            *((_sample(metric, measured.n, summary.n_requests),) if is_part else ()),
            *(_number(measured[key]) for key in ("mean", "p50", "p99")),
            *(_number(true[key]) for key in ("mean", "p99")),
            *(_errors(errors[metric]) if errors and metric in errors else ()),
        )
    return table


def _sample(metric: str, n: int, n_requests: int) -> str:
    """Return the sample of a row's figures; requests that did not complete are not in it."""
    return f"{n:,} tokens" if metric == "token_gap_s" else f"{n:,} of {n_requests:,}"


def _errors(error: ErrorFigures) -> tuple[str, str]:
    """Return the mean and p99 error in percent, or if the truth is 0 the mean in seconds."""
    if error.mean_abs_ratio is None and error.mean_abs_s:
        return f"{error.mean_abs_s:.3f} s", "-"
    return _percent(error.mean_abs_ratio), _percent(error.p99_abs_ratio)


def _is_shown(error: ErrorFigures) -> bool:
    """Whether ``_errors`` is more than 0."""
    if error.mean_abs_ratio is None:
        return bool(error.mean_abs_s)
    return max(error.mean_abs_ratio, error.p99_abs_ratio or 0.0) >= _SHOWN_RATIO


def _machine_lines(summary: RunSummary) -> list[str]:
    """Return a line per other machine: how exactly its clock is known, and if that is enough for one way."""
    lines = []
    way_s = (summary.metrics["hop_network_s"].p50 or 0.0) / 2 / summary.time_scale
    for machine in summary.machines or ():
        uncertainty_s = machine.uncertainty_s
        text = (
            f"machine {machine.name}: {counted(machine.n_nodes, 'nodes')}, its clock known to "
            f"+-{uncertainty_s * 1e3:.3f} ms (round trip {machine.rtt_s * 1e3:.3f} ms)"
        )
        if machine.is_lost:
            text += "; it was lost"
        if uncertainty_s > way_s > 0:
            text += (
                f", more than the {way_s * 1e3:.3f} ms of one way (p50): what a single direction took (in "
                "hops.parquet and trace.json) is not to be trusted; clients' times, and those of round "
                "trips, need one clock only"
            )
        lines.append(text)
    return lines


def _n_decisions(summary: RunSummary) -> int:
    """Return the number of routing decisions, with those for parts of chains.

    If a run was cut short, only decisions for whole chains are known.
    """
    n_decisions = summary.decisions.n_decisions if summary.decisions is not None else 0
    return n_decisions or summary.decision.routing_s.n


def _start(summary: RunSummary) -> str:
    started_s = summary.startup_s
    text = "the testbed did not begin to serve" if not started_s else f"started in {started_s:.2f} s"
    return f"{text}; {_n_decisions(summary)} routing decisions"


def _footer(summary: RunSummary) -> str:
    lines = [f"{count} failed: {reason}" for reason, count in summary.failed_because.items()]
    lines += failure_text(summary)
    lines += clients_text(summary.clients)
    lines += speculation_text(summary.speculation)
    lines += costs_text({name: summary.get(name) for name in COSTS if name in summary})
    lines += busy_text(summary.links or ())
    lines += unused_text(summary.unused_blocks)
    if summary.bounds:
        lines.append(bounds_text(in_ms(summary.bounds), summary.policy.design_concurrency))
        lines += proof_text(summary.bounds)
    lines += _clock_lines(summary)
    if summary.compute == "blocks":
        lines.append(f"model and twin use the compute times of the hardware profiles; {_start(summary)}")
    elif summary.clock == "virtual":
        lines.append(_start(summary))
    elif overhead_s := summary.overhead_per_hop_s:
        lines.append(f"own overhead per hop {overhead_s * 1e3:.2f} ms real (p50); {_start(summary)}")
        if overhead_s > _BUSY_S:
            lines.append(
                "that is far above the 0.3 ms of an idle machine: the machine was busy, so do not trust "
                "these times"
            )
    lines += conversations_text(summary.prefix, summary.turns)
    if n_preempted := summary.preemption.n_preemptions:
        preemption = summary.preemption
        lines.append(
            f"{counted(n_preempted, 'preemptions')} of {counted(preemption.n_requests, 'requests')}, "
            f"which lost {preemption.tokens:,} cached tokens and were without a chain for "
            f"{_number(preemption.waited_s.mean)} s (mean)"
        )
    n_never, waited_s = summary.admission.n_never_admitted, summary.admission.waited_s
    if n_never and waited_s.max:
        others = "the queue above is that of completed requests; " if summary.metrics["queue_s"].n else ""
        lines.append(
            f"{counted(n_never, 'requests')} did not get admitted: {others}all requests together waited "
            f"{_number(waited_s.mean)} s (mean), {_number(waited_s.max)} s (max)"
        )
    stalls = summary.stalls
    if stalls and stalls.n:
        lines.append(
            f"the machine stood still {counted(stalls.n, 'times')}, for {stalls.max_real_s:.2f} s "
            "(real) at most: its host takes its CPUs away; network.keep_cpus_awake = false may help, a "
            "higher time scale does not"
        )
    lag_s = summary.metrics["schedule_lag_s"].max
    if lag_s is not None and lag_s / summary.time_scale > _LAG_S:
        lines.append(
            f"requests arrived up to {lag_s:.3g} s after their time: the machine was busy, and planned "
            "events met other requests than they should have"
        )
    objectives = objectives_of(summary)
    if objectives and summary.goodput_rps is not None:
        lines.append(f"goodput {summary.goodput_rps:.4f} requests/s met {objectives.in_words()}")
    if summary.time_scale != 1:
        lines.append(
            f"time ran {summary.time_scale:g} times faster: a real delay of 1 ms counts as "
            f"{summary.time_scale:g} ms"
        )
    network = NETWORKS.get(summary.network)  # none if simulated
    has_loss = RANDOM_LOSS in summary.closed_model_lacks
    if summary.time_scale != 1 and has_loss and network is not None and network.has_packets:
        lines.append(
            "links lose packets, and TCP's timers do not follow the time scale: the shortest, 0.2 s (real), counts as "
            f"{0.2 * summary.time_scale:g} s; use a time scale of 1, or virtual time, where no timer fires"
        )
    if has_loss and summary.clock == "virtual" and network is not None and not network.halves_windows:
        lines.append(
            f"links lose packets, and in virtual time TCP's windows are not halved on network {network.name}: messages of "
            f"many packets come too early; use network {IN_PROCESS.name}, or --clock real"
        )
    if network is not None and network.caveat is not None:
        lines.append(f"{network.name} network: {network.caveat}")
    lines += _machine_lines(summary)
    if without := summary.without_session_setup:
        lines.append(
            f"session_setup adds {summary.calibration.session_setup_s:g} s to every first token; "
            f"without it TTFT {_number(without.ttft_s.mean)}, per token "
            f"{_number(without.per_token_s.mean)}"
        )
    lines += _blocks_lines(summary)
    forwarder = summary.forwarder
    if forwarder and forwarder["dropped"]:
        lines.append(
            f"the forwarder dropped {forwarder['dropped']} of {forwarder['packets']} packets: this machine "
            "is too slow for these rates and this time scale, so do not trust these times"
        )
    if forwarder and (
        forwarder.get("late_p99_s", 0) > _LATE_S or forwarder.get("busy_max_ratio", 0) > _BUSY_RATIO
    ):
        lines.append(
            f"the forwarder could not keep up: 1 packet in 100 left it {forwarder['late_p99_s'] * 1e3:.1f} "
            f"ms or more (real) after its time, and it was busy for up to {forwarder['busy_max_ratio']:.0%} "
            "of a second; lower the time scale, the rates or the load, or free the machine"
        )
    if forwarder and forwarder.get("underlay_late", 0) > _UNDERLAY_RATIO * forwarder["packets"]:
        lines.append(
            f"{forwarder['underlay_late']} of {forwarder['packets']} packets came over the network between "
            "the machines after their time: it is slower than the emulated links; use longer delays, or put "
            "these nodes on one machine"
        )
    if forwarder and forwarder.get("underlay_lost"):
        lines.append(
            f"the network between the machines lost {forwarder['underlay_lost']} datagrams, which cost "
            "packets that no link lost"
        )
    carries_bps = _CARRIES_BETWEEN_BPS if summary.machines else _CARRIES_BPS
    if summary.clock == "real" and forwarder and forwarder.get("asked_max_bps", 0) > carries_bps:
        lines.append(
            f"links of up to {forwarder['asked_max_bps'] / 1e9:g} Gbit/s (real) were asked: long transfers "
            f"there run at about {carries_bps / 1e9:g} Gbit/s, what the forwarder carries on a machine such "
            "as docs/accuracy.md states"
        )
    if summary.dropped_log_bytes:
        lines.append(f"{summary.dropped_log_bytes} bytes of an unfinished log record were dropped")
    return "\n".join(lines)


def _clock_lines(summary: RunSummary) -> list[str]:
    """Return lines on the clock, on errors, and on changes by hand."""
    lines = []
    if summary.wall_s and summary.scenario_s and summary.scenario_s > 0:
        speed = summary.scenario_s / summary.wall_s
        lines.append(
            f"clock {summary.clock} ({summary.clock_why}): {f'{summary.scenario_s:.0f}' if summary.scenario_s >= 100 else f'{summary.scenario_s:.1f}'} s served in "
            f"{summary.wall_s:.1f} s, {f'{speed:,.0f}' if speed >= 100 else f'{speed:.3g}'} times real "
            "time"
        )
    if _has_times(summary):
        lines += _error_lines(summary)
    if n_by_hand := summary.n_link_changes_by_hand:
        text = f"{counted(n_by_hand, 'changes')} of links by hand: the closed model has them"
        lines.append(f"{text}, the twin does not" if summary.emulation_error_of == "twin" else text)
    if summary.n_faults_by_hand and summary.emulation_error_of == "twin":
        n_faults = counted(summary.n_faults_by_hand, "faults")
        lines.append(f"{n_faults} by hand, which the twin does not have: the errors contain what it changed")
    return lines


def _error_lines(summary: RunSummary) -> list[str]:
    """Return lines on what errors are measured against."""
    lines = []
    if summary.emulation_error_of == "closed model":
        lines.append(
            "error: against the closed model, given when messages were sent; virtual time shows an ideal "
            "machine, --clock real measures this one"
        )
        if summary.closed_model_links == "in parts" and summary.network == IN_PROCESS.name:
            lines.append(
                "messages overtake each other or share links, so the model has the simulator's links; network memory has "
                "the same code, fabric the kernel's TCP"
            )
    elif summary.emulation_error_of == "twin":
        text = "error: against the run's twin in virtual time"
        if summary.emulation_error_pairing == DISTRIBUTIONS:
            text += (
                "; the twin admitted requests in another order or to other chains, so distributions are "
                "compared, not requests"
            )
        lines.append(text)
    elif summary.twin:
        lines.append(
            "no errors are stated: the twin has the hardware profiles' times, which are not measured with blocks of this "
            "model; `testbed calibrate` measures them, and so does --model without a scenario"
        )
    else:
        lines.append("no errors are stated: the run has no twin")
    if not summary.twin:
        lines += _model_lines(summary)
    return lines


def model_lacks(summary: RunSummary) -> str:
    """Return in words what the run has and the closed model has not; empty if there is nothing."""
    lacks = summary.closed_model_lacks
    return f"the closed model has no {' and no '.join(lacks)}" if lacks else ""


def _model_lines(summary: RunSummary) -> list[str]:
    """Return lines on what the closed model, which the table's columns have, leaves out."""
    lines = []
    has_errors = any(map(_is_shown, (summary.emulation_error or {}).values()))
    if text := model_lacks(summary):
        lines.append(f"{text}: most of the errors come from that" if has_errors else text)
    if summary.n_replays:
        text = "the closed model has no failures: its columns have recovered requests as if nothing failed"
        lines.append(f"{text}, and the errors leave them out" if summary.emulation_error_of else text)
    return lines


def _blocks_lines(summary: RunSummary) -> list[str]:
    """Return lines on a run with real blocks: whether its tokens are right, and how much memory it took."""
    if summary.compute != "blocks":
        return []
    lines = [verdict(summary)]
    if summary.n_tokens_altered and summary.altered:
        first = summary.altered[0]
        lines.append(
            f"the first is token {first.token} of request {first.request}: {first.is_}, should be "
            f"{first.should_be}"
        )
    memory = summary.memory
    if memory and memory.difference_ratio is not None:
        lines.append(
            f"blocks and caches of all servers took {memory.real_bytes / 1e6:.2f} MB, "
            f"{memory.difference_ratio:+.1%} of what the model counts; {memory.worst_server} "
            f"{memory.worst_difference_ratio:+.1%}"
            + (f"; the processes grew by {memory.grown_bytes / 1e6:.2f} MB" if memory.grown_bytes else "")
        )
    if memory and memory.n_recorded is not None:
        lines.append(f"CUDA graphs: the steps of {counted(memory.n_recorded, 'sessions')} were recorded")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.3f} %" if abs(value) < _FINE_RATIO else f"{100 * value:.2f} %"
