"""How long a chain takes to serve a request: in closed form, or token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import NamedTuple, Protocol

from nodes.compute import Turns
from policies.problem import Hop, Problem, RequestSpec, return_times_s
from policies.replay import ServiceTimes
from testbed.simulation.events import EventQueue
from testbed.simulation.network import ChangingNetwork, LostError, busy_s, way_times_s

_MAX_KNOWN = 65536
"""Service times that are kept: chains times kinds of request."""


class Course(Protocol):
    """A session while a chain serves it. ``first_at_s`` is when its first token there comes, once known."""

    first_at_s: float | None

    def cut(self, now_s: float) -> int:
        """The chain is lost: answer how many tokens it had finished. The session is not done any more."""
        ...


class Serving(Protocol):
    """Serves requests on chains."""

    def start(
        self,
        request: RequestSpec,
        hops: tuple[Hop, ...],
        ready_at_s: float,
        done: Callable[[], None],
        lost: Callable[[str], None],
    ) -> Course:
        """Send the prompt at ``ready_at_s``.

        ``done`` is called when the last token is there, ``lost`` with the reason if that can never be.
        """
        ...

    def restart(self, server: int) -> None:
        """``server`` is idle from now on: what it was computing is lost."""
        ...


@dataclass(slots=True)
class _Timed:
    """A course whose times are all known."""

    first_at_s: float | None
    token_s: float
    n_tokens: int
    is_cut: bool = False

    def cut(self, now_s: float) -> int:
        self.is_cut = True
        assert self.first_at_s is not None
        if now_s < self.first_at_s:
            return 0
        # It was not done yet, so at least one token is missing, whatever rounding says.
        finished = 1 + floor((now_s - self.first_at_s) / self.token_s) if self.token_s else self.n_tokens
        return min(finished, self.n_tokens - 1)


class ClosedForm:
    """Sessions do not slow each other. One event per request."""

    def __init__(self, times: ServiceTimes, queue: EventQueue) -> None:
        self._times = times
        self._queue = queue

    def start(
        self,
        request: RequestSpec,
        hops: tuple[Hop, ...],
        ready_at_s: float,
        done: Callable[[], None],
        lost: Callable[[str], None],
    ) -> Course:
        first_s, all_s = self._times.of(request, hops)
        n_rest = request.n_output_tokens - 1
        token_s = (all_s - first_s) / n_rest if n_rest else 0.0
        course = _Timed(ready_at_s + first_s, token_s, request.n_output_tokens)
        self._queue.free_at(ready_at_s + all_s, self._finish, course, done)
        return course

    def restart(self, server: int) -> None:
        """Nothing to forget."""

    @staticmethod
    def _finish(course: _Timed, done: Callable[[], None]) -> None:
        if not course.is_cut:
            done()


class _Stage(NamedTuple):
    """One hop: (way there, compute, way back) of the prompt and of the second token, in seconds.

    Every token after that computes for ``context_s`` longer than the one before.
    """

    server: int
    prefill_s: tuple[float, float, float]
    decode_s: tuple[float, float, float]
    context_s: float


@dataclass(slots=True)
class _Stepped:
    """A course that is found out step by step. The latest finished token may still be on its way back."""

    request: RequestSpec
    hops: tuple[Hop, ...]
    stages: tuple[_Stage, ...]
    done: Callable[[], None]
    lost: Callable[[str], None]
    n_finished: int = 0
    finished_at_s: float = 0.0
    first_at_s: float | None = None
    is_cut: bool = False

    def cut(self, now_s: float) -> int:
        self.is_cut = True
        return self.n_finished - (self.n_finished > 0 and self.finished_at_s > now_s)


class SteppedServers:
    """Every step of every token: one event per token and hop.

    With ``is_serial`` a server computes one step at a time, first come first served, as ``nodes.compute``
    with ``serial``: a step is the whole hop, prompts included. Otherwise servers' contention counts as there
    (``nodes.compute.Turns``). With ``network`` messages take what its links
    give when they are sent. A step reaches the server after half of its communication time (all of it with
    forwarding) and comes back after the other half; only the blocks' compute time occupies the server.
    100,000 requests of 128 tokens and 4 hops are 51 million events: minutes, where the closed form takes
    seconds.
    """

    def __init__(
        self,
        problem: Problem,
        queue: EventQueue,
        network: ChangingNetwork | None = None,
        *,
        is_serial: bool = True,
    ) -> None:
        self._problem = problem
        self._queue = queue
        self._network = network
        self._is_serial = is_serial
        self._turns = [self._idle(number) for number in range(problem.n_servers)]
        self._known: dict[tuple[RequestSpec, tuple[Hop, ...]], tuple[_Stage, ...]] = {}

    def start(
        self,
        request: RequestSpec,
        hops: tuple[Hop, ...],
        ready_at_s: float,
        done: Callable[[], None],
        lost: Callable[[str], None],
    ) -> Course:
        stages = self._known.get((request, hops))
        if stages is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            stages = self._known[request, hops] = self._stages(request, hops)
        course = _Stepped(request, hops, stages, done, lost)
        self._send(course, 0, ready_at_s)
        return course

    def restart(self, server: int) -> None:
        self._turns[server] = self._idle(server)

    def _idle(self, server: int) -> Turns:
        return Turns(self._is_serial, self._problem.servers[server].contention_ratio)

    def _stages(self, request: RequestSpec, hops: tuple[Hop, ...]) -> tuple[_Stage, ...]:
        stages = []
        previous: int | None = None
        for number, hop in enumerate(hops, 1):
            input_s, token_s = way_times_s(self._problem, request, previous, hop.server)
            if not self._problem.forwarding:
                ways_s = (input_s / 2, token_s / 2)
                back_s = ways_s
            else:
                ways_s = (input_s, token_s)
                is_last = number == len(hops)
                back_s = return_times_s(self._problem, request, hop.server) if is_last else (0.0, 0.0)
            prefill_s = busy_s(self._problem, hop, 0, request.n_input_tokens)
            decode_s = busy_s(self._problem, hop, request.n_input_tokens, 1)
            stages.append(
                _Stage(
                    hop.server,
                    (ways_s[0], prefill_s, back_s[0]),
                    (ways_s[1], decode_s, back_s[1]),
                    hop.n_blocks * self._problem.servers[hop.server].context_slope_s,
                )
            )
            previous = hop.server
        return tuple(stages)

    def _send(self, course: _Stepped, number: int, at_s: float) -> None:
        stage = course.stages[number]
        if self._network is None:
            arrives_at_s = at_s + (stage.decode_s if course.n_finished else stage.prefill_s)[0]
        else:
            previous = course.hops[number - 1].server if number else None
            try:
                arrives_at_s = self._network.step_arrives_at_s(
                    course.request, previous, stage.server, at_s, not course.n_finished
                )
            except LostError as lost:
                self._queue.at(lost.at_s, self._lose, course, str(lost))
                return
        self._queue.at(arrives_at_s, self._compute, course, number)

    def _compute(self, course: _Stepped, number: int) -> None:
        if course.is_cut:
            return
        stage = course.stages[number]
        is_last = number + 1 == len(course.stages)
        _, takes_s, back_s = stage.decode_s if course.n_finished else stage.prefill_s
        if course.n_finished:
            takes_s += stage.context_s * (course.n_finished - 1)
        start_at_s, takes_s = self._turns[stage.server].take(self._queue.now_s, takes_s)
        done_at_s = start_at_s + takes_s
        if self._network is None:
            back_at_s = done_at_s + back_s
        else:
            try:
                back_at_s = self._network.step_returns_at_s(
                    course.request, stage.server, done_at_s, not course.n_finished, is_last
                )
            except LostError as lost:
                self._queue.at(lost.at_s, self._lose, course, str(lost))
                return
        if not is_last:
            self._send(course, number + 1, back_at_s)
            return
        course.finished_at_s = back_at_s + self._problem.hub_token_s
        if course.first_at_s is None:
            course.first_at_s = course.finished_at_s
        course.n_finished += 1
        if course.n_finished < course.request.n_output_tokens:
            self._send(course, 0, course.finished_at_s)
        else:
            self._queue.free_at(course.finished_at_s, self._finish, course)

    @staticmethod
    def _finish(course: _Stepped) -> None:
        if not course.is_cut:
            course.done()

    @staticmethod
    def _lose(course: _Stepped, reason: str) -> None:
        if not course.is_cut:
            course.lost(reason)
