"""What clients tell of failures and replays, as lines of ``events.jsonl`` with times and floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nodes.recovery import DETECTED, REACHABLE, REPLAYED, UNREACHABLE
from nodes.wire import SESSION_MOVED
from policies.problem import Hop, service_s
from testbed.control.coordinator import Coordinator
from testbed.control.faults.machines import Machines
from testbed.rundir import EventWriter
from testbed.scenario.experiment import Experiment


class Recoveries:
    """Bans the servers that failed a client, and writes down how its sessions live on."""

    def __init__(
        self, experiment: Experiment, machines: Machines, coordinator: Coordinator, events: EventWriter
    ) -> None:
        self._problem = experiment.problem
        self._plans = {r.index: r for r in experiment.requests}
        self._rules = experiment.recovery
        self._machines = machines
        self._coordinator = coordinator
        self._events = events
        self._failed_at_s: dict[int, float] = {}

    def notify(self, event: str, request: int, at_s: float, details: Mapping[str, Any]) -> None:
        """One of the events of ``nodes.recovery``."""
        servers = details.get("servers", ())
        if event == REACHABLE:
            self._coordinator.served(request, servers)
            return
        # A server that moves has not failed anybody: it says what became of its blocks.
        has_moved = str(details.get("reason", "")).startswith(SESSION_MOVED)
        if event in (DETECTED, UNREACHABLE) and not has_moved:
            self._coordinator.failed(request, servers)
        line = dict(details)
        if servers:
            line["servers"] = [self._machines.names[server] for server in servers]
        if "hops" in line:
            line["hops"] = [[self._machines.names[j], first, last] for j, first, last in line["hops"]]
        if event == DETECTED:
            line["failed_at_s"] = self._failed(request, servers[0], line)
        elif event == REPLAYED:
            line["failed_at_s"] = failed_at_s = self._failed_at_s.pop(request, line["failed_at_s"])
            line["recovery_s"] = at_s - failed_at_s
            line["floor_s"] = line["detected_at_s"] - failed_at_s
            line["floor_s"] += self._replay_s(request, details["hops"], line["tokens"])
        client = self._problem.clients[self._plans[request].client]
        self._events.write(event, at_s, client=client, request=request, **line)

    def ended(self, request: int) -> None:
        self._failed_at_s.pop(request, None)

    def _failed(self, request: int, server: int, line: Mapping[str, Any]) -> float:
        """When the session's hop failed it, though not before the session needed it."""
        failed_at_s = float(line["sent_at_s"])
        if not line["is_overdue"]:  # else, however late it halted, the limit counts from the question
            failed_at_s = max(failed_at_s, self._machines.failed_at_s(server))
        return self._failed_at_s.setdefault(request, failed_at_s)

    def _replay_s(self, request: int, hops: Sequence[Sequence[int]], n_tokens: int) -> float:
        """One connection and the modelled replay: what no client can avoid once it has noticed."""
        plan = self._plans[request]
        chain = [Hop(*hop) for hop in hops]
        connection_s = max(self._problem.raw_rtt_s[plan.client][hop.server] for hop in chain)
        replayed = self._rules.replayed(plan, n_tokens)
        # A replay is over when the servers have answered: the client's own part comes later.
        hub_s = replayed.n_output_tokens * self._problem.hub_token_s
        return connection_s + service_s(self._problem, replayed, chain)[1] - hub_s
