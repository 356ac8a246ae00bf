"""``testbed links``: measures the emulated network itself, without any sessions.

No measurement disturbs another: round trips are measured on several pairs at once only as long as all of them
together send few messages, and rates of bulk transfers on one pair at a time. Under load, each pair is
measured while separate processes exchange tokens' hidden states on other pairs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from netem.networks import NETWORKS, instead, named
from nodes import control
from nodes.messages import A, Question
from nodes.node import DATA_PORT, NodeConfig
from nodes.probe import KeepBusy, Measure, Measured, ProbePlan, Rest
from policies.links import Link, Pair
from testbed.errors import RunError, UserError
from testbed.experiments.experiment import Experiment
from testbed.results.requests import stats
from testbed.rundir import check_new_folder, scratch
from testbed.runtime import wiring
from testbed.runtime.processes import Processes
from testbed.runtime.stage import real_launcher
from testbed.studies.links.report import links_text, write_links

_BULK_S = 0.25
_BULK_ROUND_TRIPS = 4
_MIN_BULK_BYTES = 50_000
_MAX_BULK_BYTES = 64_000_000
_START_LIMIT_S = 30.0
_ECHO_LIMIT_S = 10.0
_BULK_SLACK_S = 10.0
_ECHOES_PER_S = 100.0
"""Limit on the messages per second of all pairs measured at once: the network is then busy 1 % of the
time.
"""
_MAX_AT_ONCE = 16
_MAX_BUSY = 20
"""The most other pairs that are busy under load: as many as a loaded hub has concurrent sessions."""
_BUSY_INTERVAL_S = 0.01
"""Real seconds between the starts of a busy pair's echoes; a server of ten blocks computes for longer than
this.
"""

Announce = Callable[[str], None]


def links_command(
    experiment: Experiment,
    pairs: int | None,
    echoes: int,
    *,
    load: bool = False,
    out: Path | None = None,
    announce: Announce = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """Measure the first ``pairs`` client-server pairs (None: all), with ``echoes`` round trips each.

    ``load``: also measure each pair while others are busy. ``out``: a new folder for the report. Returns the
    object for ``--json`` and the text for the terminal. Raises ``UserError`` for invalid options,
    ``RunError`` if the emulation fails.
    """
    network = named(experiment.network.backend)
    if network is not None and not network.nodes_are_processes:
        others = instead(each for each in NETWORKS.values() if each.nodes_are_processes and each.emulates)
        raise UserError(f"the {network.name} network has nothing to measure: give --network {others}")
    if out is not None:
        check_new_folder(out)
    with scratch("links") as run_dir:
        (run_dir / "logs").mkdir()

        async def measure() -> dict[str, Any]:
            return await _Links(experiment, run_dir, announce).measure(pairs, echoes, load)

        answer = uvloop.run(measure())
    if out is not None:
        write_links(out, answer)
    return answer, links_text(answer)


def batches(
    pairs: Sequence[Pair], rtt_s: Callable[[Pair], float], at_most: int = _MAX_AT_ONCE
) -> Iterator[list[Pair]]:
    """Yields batches of consecutive pairs to measure at once: at most ``at_most`` pairs, which together send
    at most ``_ECHOES_PER_S`` echoes.

    ``rtt_s`` returns a pair's round-trip time in real seconds; a pair sends its echoes one after another.
    """
    batch: list[Pair] = []
    rate = 0.0
    for pair in pairs:
        own = 1 / max(rtt_s(pair), 1e-3)
        if batch and (rate + own > _ECHOES_PER_S or len(batch) == at_most):
            yield batch
            batch, rate = [], 0.0
        batch.append(pair)
        rate += own
    if batch:
        yield batch


def _at_once_under_load(all_pairs: Sequence[Pair]) -> int:
    """Returns how many pairs are measured at once under load: at most a quarter, since the others are to be
    busy.
    """
    return min(max(1, len(all_pairs) // 4), _MAX_AT_ONCE)


def _busy(client: str) -> str:
    """Returns the name of the client's process that keeps pairs busy."""
    return f"{client}-busy"


class _Links:
    def __init__(self, experiment: Experiment, run_dir: Path, announce: Announce) -> None:
        self._experiment = experiment
        self._run_dir = run_dir
        self._announce = announce
        self._stopping = False
        self._processes = Processes(
            real_launcher(experiment, run_dir), run_dir, dict, lambda *_: self._stopping, asyncio.Event()
        )

    async def measure(self, pairs: int | None, echoes: int, load: bool) -> dict[str, Any]:
        experiment, problem = self._experiment, self._experiment.problem
        all_pairs = [(c, s.name) for c in problem.clients for s in problem.servers]
        wanted = all_pairs[:pairs]
        try:
            await self._start(load)
            network = self._network
            expected_s = self._expected_s(wanted, echoes, _MAX_AT_ONCE)
            if load:
                expected_s += self._expected_s(wanted, echoes, _at_once_under_load(all_pairs))
            self._announce(
                f"network {network.name}: {len(wanted)} pairs{', idle and under load' if load else ''}; "
                f"about {expected_s:.0f} s"
            )
            started_at = time.monotonic()
            rows = await self._processes.guard(self._idle(wanted, echoes))
            loaded = None
            if load:
                loaded = await self._processes.guard(self._under_load(wanted, all_pairs, rows, echoes))
            took_s = time.monotonic() - started_at
        finally:
            self._stopping = True
            await self._processes.close()
        return {
            "scenario": experiment.name,
            "network": network.name,
            "why": network.why,
            "time_scale": experiment.time_scale,
            "echo_bytes": problem.model.token_bytes,
            "took_s": round(took_s, 2),
            "load": loaded,
            "pairs": [row for pair in wanted for row in rows[pair]],
        }

    async def _start(self, load: bool) -> None:
        """Start the network, an echo service per server, and one prober per client, two under load."""
        experiment, problem, processes = self._experiment, self._experiment.problem, self._processes
        spec = wiring.network_spec(experiment, self._run_dir.name)
        self._network = network = await processes.open(
            experiment.network.backend, spec, experiment.network.keep_cpus_awake
        )
        names = [(c, process, "prober") for c in problem.clients for process in (c, _busy(c))[: 1 + load]]
        names += [(s.name, s.name, "echo") for s in problem.servers]
        for name, process, kind in names:
            port = 0 if network.network.any_port or kind == "prober" else DATA_PORT
            address = processes.address(name)
            config = NodeConfig(name, processes.control_path, address, port, 1.0, process=process)
            await processes.spawn(kind, config)
        await processes.guard(processes.all_here((process for _, process, _ in names), _START_LIMIT_S))

    def _rtt_s(self, pair: Pair) -> float:
        """Returns the propagation time of a pair's round trip in real seconds."""
        up, down = self._links(pair)
        return up.delay_s + down.delay_s

    def _links(self, pair: Pair) -> tuple[Link, Link]:
        links, scale = self._experiment.network.links, self._experiment.time_scale
        return links[pair].scaled(scale), links[pair[::-1]].scaled(scale)

    def _expected_s(self, pairs: Sequence[Pair], echoes: int, at_most: int) -> float:
        plans = {pair: self._plan(pair, echoes) for pair in pairs}
        bulk_s = sum(plan.bulk_limit_s - _BULK_SLACK_S for plan in plans.values())
        echo_s = sum(
            max(2 * min(echoes * (self._rtt_s(pair) + 1e-3), _ECHO_LIMIT_S) for pair in batch)
            for batch in batches(pairs, self._rtt_s, at_most)
        )
        return bulk_s + echo_s

    async def _idle(self, pairs: Sequence[Pair], echoes: int) -> dict[Pair, list[dict[str, Any]]]:
        rows: dict[Pair, list[dict[str, Any]]] = {}
        for batch in batches(pairs, self._rtt_s):
            for pair, result in zip(batch, await self._measure_batch(batch, echoes), strict=True):
                rows[pair] = self._rows(pair, result)
        return rows

    async def _under_load(
        self,
        pairs: Sequence[Pair],
        all_pairs: Sequence[Pair],
        rows: dict[Pair, list[dict[str, Any]]],
        echoes: int,
    ) -> dict[str, float]:
        """Add ``under_load`` to every row. Returns the number of busy pairs, and their echoes per scenario
        second.
        """
        n_busy, n_echoes, started_at = 0, 0, time.monotonic()
        for batch in batches(pairs, self._rtt_s, _at_once_under_load(all_pairs)):
            first = all_pairs.index(batch[-1]) + 1
            others = [pair for pair in [*all_pairs[first:], *all_pairs[:first]] if pair not in batch]
            busy = others[:_MAX_BUSY]
            by_client: dict[str, list[ProbePlan]] = {}
            for pair in busy:
                by_client.setdefault(pair[0], []).append(self._plan(pair, echoes))
            for client, plans in by_client.items():
                await self._ask(_busy(client), KeepBusy(plans))
            results = await self._measure_batch(batch, echoes)
            for client in by_client:
                n_echoes += await self._ask(_busy(client), Rest())
            for pair, result in zip(batch, results, strict=True):
                for row, under_load in zip(rows[pair], self._rows(pair, result), strict=True):
                    keys = ("rtt_ms", "echo_ms", "rate_mbps", "failure")
                    row["under_load"] = {key: under_load[key] for key in keys}
            n_busy = max(n_busy, len(busy))
        real_s = time.monotonic() - started_at
        return {"busy_pairs": n_busy, "echoes_per_s": n_echoes / real_s / self._experiment.time_scale}

    async def _measure_batch(self, batch: Sequence[Pair], echoes: int) -> list[Measured]:
        """Measure echoes on all pairs of the batch at once, then bulk transfers on one pair after another."""

        async def later(number: int, pair: Pair) -> Measured:
            # Without this, pairs of equal RTT would always send at the same instants.
            await asyncio.sleep(self._rtt_s(pair) * number / len(batch))
            return await self._probe(pair, self._plan(pair, echoes, bulk=False))

        results = await asyncio.gather(*(later(number, pair) for number, pair in enumerate(batch)))
        for pair, result in zip(batch, results, strict=True):
            if result.failure is None:
                bulk = await self._probe(pair, self._plan(pair, 0))
                result.up_s, result.down_s, result.failure = bulk.up_s, bulk.down_s, bulk.failure
        return list(results)

    def _plan(self, pair: Pair, echoes: int, bulk: bool = True) -> ProbePlan:
        mtu, links = self._experiment.network.mtu, self._links(pair)
        sizes = [self._bulk_bytes(pair, link) for link in links]
        delays: list[tuple[float, float] | None] = [None, None]
        if self._network.network.delays_in_client:
            delays = [(link.delay_s, link.transmission_s(1_000_000, mtu) / 1_000_000) for link in links]
        sending_s = sum(2 * link.transmission_s(size, mtu) for size, link in zip(sizes, links, strict=True))
        return ProbePlan(
            address=self._network.addresses[pair[1]],
            port=self._processes.port(pair[1]),
            n_echoes=echoes,
            echo_bytes=self._experiment.problem.model.token_bytes,
            bulk_bytes_up=sizes[0] if bulk else 0,
            bulk_bytes_down=sizes[1] if bulk else 0,
            echo_limit_s=_ECHO_LIMIT_S,
            busy_interval_s=_BUSY_INTERVAL_S,
            bulk_limit_s=sending_s + 4 * self._rtt_s(pair) + _BULK_SLACK_S,
            up=delays[0],
            down=delays[1],
        )

    def _bulk_bytes(self, pair: Pair, link: Link) -> int:
        """Returns the size of a transfer: ``_BULK_S`` seconds, and enough round trips for TCP to find the
        rate.
        """
        seconds = _BULK_S + _BULK_ROUND_TRIPS * self._rtt_s(pair)
        return int(min(max(link.rate_bps / 8 * seconds, _MIN_BULK_BYTES), _MAX_BULK_BYTES))

    async def _probe(self, pair: Pair, plan: ProbePlan) -> Measured:
        try:
            return await self._ask(pair[0], Measure(plan))
        except RunError as error:
            raise RunError(f"{pair[0]} could not measure {pair[1]}: {error}") from error

    async def _ask(self, prober: str, question: Question[A]) -> A:
        try:
            return await self._processes.peers[prober].ask(question)
        except control.ControlError as error:
            raise RunError(f"{error}{self._processes.log_tail(prober)}") from error

    def _rows(self, pair: Pair, result: Measured) -> list[dict[str, Any]]:
        """Returns one row per direction of a pair, in scenario time."""
        scale, mtu = self._experiment.time_scale, self._experiment.network.mtu
        token_bytes = self._experiment.problem.model.token_bytes
        links = self._links(pair)
        rtt_s = self._rtt_s(pair)
        # The scenario does not have the delays between real machines: the shortest measured RTT is used.
        is_real = not self._network.network.emulates
        ways_s = min(result.rtt_s, default=0.0) if is_real else rtt_s
        wire_s = sum(link.transmission_s(token_bytes, mtu) for link in links)
        rows = []
        for (source, target), link, took_s in zip(
            (pair, pair[::-1]), links, (result.up_s, result.down_s), strict=True
        ):
            n_bytes = self._bulk_bytes(pair, link)
            rate: dict[str, float | None] = {
                "requested": link.rate_bps / scale / 1e6,
                "achieved": None,
                "goodput": None,
            }
            if took_s is not None:
                # The measured time contains one propagation delay there and one for the reply.
                sending_s = max(took_s - ways_s, 1e-9) * scale
                rate["achieved"] = link.transmission_s(n_bytes, mtu) * link.rate_bps / sending_s / 1e6
                rate["goodput"] = n_bytes * 8 / sending_s / 1e6
            rows.append(
                {
                    "from": source,
                    "to": target,
                    "rtt_ms": _milliseconds(rtt_s * scale, np.array(result.rtt_s) * scale),
                    "echo_ms": _milliseconds((rtt_s + wire_s) * scale, np.array(result.echo_s) * scale),
                    "rate_mbps": rate,
                    "jitter_ms": link.jitter_s * scale * 1e3,
                    "loss_ratio": link.loss_ratio,
                    "failure": result.failure,
                    "under_load": None,
                }
            )
        return rows


def _milliseconds(requested_s: float, measured_s: Any) -> dict[str, float | int | None]:
    requested = requested_s * 1e3
    measured = stats(1e3 * np.asarray(measured_s))
    row: dict[str, float | int | None] = {"requested": requested, "n": measured["n"]}
    for name in ("p50", "p99"):
        value = row[name] = measured[name]
        row[f"error_{name}"] = None if value is None else value - requested
    return row
