"""Step by step: sessions on servers that compute several of them together (``nodes.batching``)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from nodes.batching import Batch, Batches, BatchTimes, Step
from nodes.records import HopRecord
from policies.problem import Hop, RequestSpec, hop_times_s, return_times_s
from policies.workload import RequestPlan
from testbed.fast.events import EventQueue
from testbed.scenario.experiment import Experiment

COLUMNS = ("request", "token", "hop", *HopRecord._fields)
"""Of ``Steps.rows``."""


class Leg(NamedTuple):
    """One hop's way there and back and what the calibration adds, in seconds."""

    up_s: float
    down_s: float
    added_s: float


class Legs(NamedTuple):
    """The hops' legs for the prompt, and for every further token."""

    prompt: Sequence[Leg]
    later: Sequence[Leg]


@dataclass(slots=True, eq=False)
class _Walk:
    """A session that has been opened: its next step is ``token`` on ``hops[at]``."""

    plan: RequestPlan
    hops: Sequence[Hop]
    legs: Legs
    ended: Callable[[float], None]
    token: int = 0
    at: int = 0
    sent_at_s: float = 0.0
    first_at_s: float = 0.0

    @property
    def leg(self) -> Leg:
        return (self.legs.later if self.token else self.legs.prompt)[self.at]


class Steps:
    """All servers' steps, with the servers' ``times``. Every token takes its client ``hub_token_s``.

    ``rows`` has one for each step, in the order of ``COLUMNS``, unless there are more than ``most``.
    """

    def __init__(
        self,
        queue: EventQueue,
        times: Sequence[BatchTimes],
        token_bytes: int,
        *,
        hub_token_s: float = 0.0,
        chunk_tokens: int | None = None,
        most: int = 0,
    ) -> None:
        self._queue = queue
        self._batches = [Batches(one, chunk_tokens) for one in times]
        self._is_busy = [False] * len(times)
        self._walks: dict[Step, _Walk] = {}
        self._token_bytes = token_bytes
        self._hub_token_s = hub_token_s
        self.rows: array[float] | None = array("d") if most else None
        self._most_values = most * len(COLUMNS)

    def walk(
        self,
        plan: RequestPlan,
        hops: Sequence[Hop],
        legs: Legs,
        ready_at_s: float,
        ended: Callable[[float], None],
    ) -> None:
        """Serve a request from ``ready_at_s`` on; ``ended(first_at_s)`` is called with its last token."""
        self._send(_Walk(plan, hops, legs, ended), ready_at_s)

    def _send(self, walk: _Walk, at_s: float) -> None:
        walk.sent_at_s = at_s
        self._queue.at(at_s + walk.leg.up_s, self._arrive, walk)

    def _arrive(self, walk: _Walk) -> None:
        hop, n_input, token = walk.hops[walk.at], walk.plan.n_input_tokens, walk.token
        position, n_tokens = (n_input + token - 1, 1) if token else (0, n_input)
        step = Step(self._queue.now_s, position, n_tokens, hop.n_blocks)
        self._walks[step] = walk
        self._batches[hop.server].add(step)
        if not self._is_busy[hop.server]:
            self._begin(hop.server)

    def _begin(self, server: int) -> None:
        batch = self._batches[server].next()
        self._is_busy[server] = batch is not None
        if batch is not None:
            self._queue.at(batch.end_at_s, self._end, server, batch)

    def _end(self, server: int, batch: Batch) -> None:
        for step in batch.ended:
            self._computed(self._walks.pop(step), step, batch)
        self._begin(server)

    def _computed(self, walk: _Walk, step: Step, batch: Batch) -> None:
        plan, hop, leg = walk.plan, walk.hops[walk.at], walk.leg
        departed_at_s = self._queue.now_s + leg.added_s
        received_at_s = departed_at_s + leg.down_s
        if self.rows is not None:
            n_bytes = step.n_tokens * self._token_bytes
            instants = walk.sent_at_s, step.arrived_at_s, departed_at_s, received_at_s
            row = HopRecord(*hop, *instants, n_bytes, n_bytes, 0, batch.n_steps, batch.n_tokens)
            self.rows.extend((plan.index, walk.token, walk.at, *row))
            if len(self.rows) > self._most_values:
                self.rows = None
        walk.at += 1
        if walk.at < len(walk.hops):
            self._send(walk, received_at_s)
            return
        done_at_s = received_at_s + self._hub_token_s
        if walk.token == 0:
            walk.first_at_s = done_at_s
        walk.token += 1
        walk.at = 0
        if walk.token < plan.n_output_tokens:
            self._send(walk, done_at_s)
        else:
            self._queue.free_at(done_at_s, partial(walk.ended, walk.first_at_s))


def legs_of(experiment: Experiment, request: RequestSpec, hops: Sequence[Hop]) -> Legs:
    """As the experiment's problem has them.

    Hub-spoke: both ways take equally long. Forwarding: the way there from the server before, and from the last one
    back to the client.
    """
    problem, calibration = experiment.problem, experiment.calibration
    added_s = calibration.input_overhead_s(request.n_input_tokens), calibration.token_overhead_s
    found: tuple[list[Leg], list[Leg]] = [], []
    previous: int | None = None
    for hop in hops:
        base_s = problem.servers[hop.server].step_base_s
        for of, hop_s, more_s in zip(
            found, hop_times_s(problem, request, previous, hop.server), added_s, strict=True
        ):
            network_s = hop_s - base_s - more_s
            ways_s = (network_s, 0.0) if problem.forwarding else (network_s / 2, network_s / 2)
            of.append(Leg(*ways_s, more_s))
        previous = hop.server
    if previous is not None:
        for of, back_s in zip(found, return_times_s(problem, request, previous), strict=True):
            of[-1] = of[-1]._replace(down_s=of[-1].down_s + back_s)
    return Legs(*found)
