"""Writes clients' records of failures and replays to ``events.jsonl``, with recovery times and floors."""

from __future__ import annotations

from typing import Protocol

from nodes import records
from nodes.records import Detected, Reachable, Replayed, Rerouted, Unreachable
from nodes.wire import SESSION_MOVED
from policies.problem import Hop, service_s
from testbed.control.coordinator import Coordinator
from testbed.experiments.experiment import Experiment
from testbed.records import events
from testbed.records.events import RecoveryEvent


class Servers(Protocol):
    """The run's servers: their ``names``, and when each last ended or was stopped."""

    names: list[str]

    def failed_at_s(self, server: int) -> float: ...


class Writer(Protocol):
    """Takes the lines."""

    def write(self, event: RecoveryEvent) -> None: ...


class Recoveries:
    """Bans servers that failed a client, and writes how its sessions recover to ``events.jsonl``."""

    def __init__(
        self, experiment: Experiment, machines: Servers, coordinator: Coordinator, events: Writer
    ) -> None:
        self._problem = experiment.problem
        self._rules = experiment.faults.recovery
        self._machines = machines
        self._coordinator = coordinator
        self._events = events
        self._failed_at_s: dict[int, float] = {}

    def notify(self, record: records.Recoveries) -> None:
        """Process a client's ``record``."""
        request, line = record.request, record.details()
        if isinstance(record, Reachable):
            self._coordinator.served(request, record.servers)
            return
        line |= {"at_s": record.at_s, "request": request}
        line["client"] = self._problem.clients[self._coordinator.requests[request].client]
        names = self._machines.names
        if isinstance(record, Detected | Unreachable):
            # A server that moves has not failed: it reports that its blocks have gone.
            if not (isinstance(record, Detected) and record.reason.startswith(SESSION_MOVED)):
                self._coordinator.failed(request, record.servers)
            line["servers"] = [names[server] for server in record.servers]
        else:
            line["hops"] = [(names[j], first, last) for j, first, last in record.hops]
        match record:
            case Detected():
                self._events.write(events.Detected(**line, failed_at_s=self._failed(record)))
            case Unreachable():
                self._events.write(events.Unreachable(**line))
            case Rerouted():
                self._events.write(events.Rerouted(**line))
            case Replayed():
                line["failed_at_s"] = failed_at_s = self._failed_at_s.pop(request, record.failed_at_s)
                floor_s = record.detected_at_s - failed_at_s + self._replay_s(record)
                recovery_s = record.at_s - failed_at_s
                self._events.write(events.Replayed(**line, recovery_s=recovery_s, floor_s=floor_s))

    def ended(self, request: int) -> None:
        self._failed_at_s.pop(request, None)

    def _failed(self, record: Detected) -> float:
        """Returns when the hop failed for the session: not before the session sent a request to it."""
        failed_at_s = record.sent_at_s
        if not record.is_overdue:  # else the time limit counts from the request, whenever the server stopped
            failed_at_s = max(failed_at_s, self._machines.failed_at_s(record.servers[0]))
        return self._failed_at_s.setdefault(record.request, failed_at_s)

    def _replay_s(self, record: Replayed) -> float:
        """Returns the least time of a recovery after detection: one round trip and the modelled replay."""
        plan = self._coordinator.requests[record.request]
        chain = [Hop(*hop) for hop in record.hops]
        connection_s = max(self._problem.raw_rtt_s[plan.client][hop.server] for hop in chain)
        replayed = self._rules.replayed(plan, record.tokens)
        # A replay ends when the servers have answered; the client's own part comes after it.
        hub_s = replayed.n_output_tokens * self._problem.hub_s(plan.client)
        return connection_s + service_s(self._problem, replayed, chain)[1] - hub_s
