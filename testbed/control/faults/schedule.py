"""The scenario's faults: each at its instant, or as soon as a request has a number of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from testbed.control.faults.machines import Machines
from testbed.experiments.experiment import Fault
from testbed.records.events import BY_SCENARIO


class Schedule:
    """Carries out ``faults`` by ``machines``, when they are due."""

    def __init__(self, faults: Iterable[Fault], machines: Machines) -> None:
        self._machines = machines
        self._timed: list[tuple[float, int, Fault]] = []
        self._after: dict[int, list[Fault]] = {}
        for number, fault in enumerate(faults):
            if fault.after is not None:
                self._after.setdefault(fault.after.request, []).append(fault)
            elif fault.at_s is not None:
                self._timed.append((fault.at_s, number, fault))
        self._timed.sort(key=lambda entry: entry[:2])

    @property
    def watched(self) -> frozenset[int]:
        """Requests whose tokens faults wait for."""
        return frozenset(self._after)

    async def run(self) -> None:
        """Carry out the faults that have an instant; returns when the last one has begun."""
        for at_s, _, fault in self._timed:
            await self._machines.sleep_until_s(at_s)
            self._machines.in_background(self._apply(fault))

    def token(self, request: int, n_tokens: int) -> None:
        """Carry out the faults that are due now that ``request`` has ``n_tokens`` output tokens."""
        due = [
            fault for fault in self._after.get(request, ()) if fault.after and fault.after.tokens <= n_tokens
        ]
        for fault in due:
            self._after[request].remove(fault)
            self._machines.in_background(self._apply(fault))

    async def _apply(self, fault: Fault) -> None:
        await self._machines.apply(
            fault.kind, fault.server, fault.factor, fault.for_s, fault.at_s, by=BY_SCENARIO
        )
