"""Sessions that wait for nothing: their times on idle links, which are those step by step to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nodes.clock import NS
from policies.problem import Hop, RequestSpec
from policies.remember import remember
from testbed.experiments.experiment import Experiment
from testbed.fast.delays import ChainDelays, HopDelays, delays_of, overheads_of
from testbed.fast.events import EventQueue
from testbed.fast.links import Links, Way, never_wait
from testbed.fast.meetings import SessionsMeet

_MAX_KNOWN = 65536
"""At most this many service times are kept: one per chain and kind of request."""

_ROUNDING_S = 1e-12


class IdleTimes:
    """Times of sessions that are alone on the lines of ``links``. Every part of a step is rounded as an event is."""

    def __init__(self, experiment: Experiment, links: Links) -> None:
        self._experiment = experiment
        self._links = links
        self._known_s: dict[tuple[RequestSpec, tuple[Hop, ...]], tuple[float, float]] = {}

    def delays(self, request: RequestSpec, hops: Sequence[Hop]) -> ChainDelays:
        """Returns the delays of a chain's messages, with what the calibration adds to them.

        Raises ``SessionsMeet`` where even a session alone waits for what answers its own messages.
        """
        problem = self._experiment.problem
        found: list[list[HopDelays]] = []
        ways = self._links.ways(request.client, hops)
        overheads = overheads_of(self._experiment, request, hops)
        for position, n_tokens, added in zip(
            (0, request.n_input_tokens), (request.n_input_tokens, 1), overheads, strict=True
        ):
            n_bytes = n_tokens * problem.model.token_bytes
            found.append([])
            for hop, way, overhead in zip(hops, ways, added, strict=True):
                there_s = way.there.idle_s(way.size_there(n_bytes))
                if position and len(hops) == 1:  # it follows a result from the same server
                    there_s += max(0.0, way.there.acknowledgement_s - problem.hub_s(request.client))
                back_s = 0.0
                if way.returns:
                    busy_s = (
                        problem.servers[hop.server].step_s(position, n_tokens, hop.blocks) + overhead.added_s
                    )
                    back_s = way.back.idle_s(way.size_back(n_bytes)) + max(0.0, way.answered_s - busy_s)
                    self._check(way, n_bytes, busy_s, problem.hub_s(request.client))
                found[-1].append(HopDelays(there_s, back_s, overhead.added_s))
        return ChainDelays(*found)

    def _check(self, way: Way, n_bytes: int, server_s: float, client_s: float) -> None:
        """Raises ``SessionsMeet`` if more than the last answer to a message is on a link when the next message follows it there."""
        there, back = way.there, way.back
        follow = []
        if way.accepts in (None, back):
            follow.append((there, way.size_there(n_bytes), back, way.answered_s, server_s))
        if not way.forwarding or way.accepts is back:
            follow.append((back, way.size_back(n_bytes), there, there.acknowledgement_s, client_s))
        for line, size, other, last_s, next_s in follow:
            more_s = line.answering_s(size, other) - other.acknowledgement_s
            if more_s > _ROUNDING_S and more_s + last_s > next_s:
                raise SessionsMeet(
                    "acknowledgements wait for each other on links that are far slower than those back"
                )

    def of(self, request: RequestSpec, hops: tuple[Hop, ...]) -> tuple[float, float]:
        """Returns the seconds of (the first token, the whole request), as ``policies.problem.service_s``."""
        known = self._known_s.get((request, hops))
        if known is None:
            known = remember(self._known_s, (request, hops), self._of(request, hops), _MAX_KNOWN)
        return known

    def _of(self, request: RequestSpec, hops: tuple[Hop, ...]) -> tuple[float, float]:
        problem, n_input = self._experiment.problem, request.n_input_tokens
        prompt, later = self.delays(request, hops)
        first_ns = hub_ns = round(problem.hub_s(request.client) * NS)
        for hop, delay in zip(hops, prompt, strict=True):
            busy_s = problem.servers[hop.server].step_s(0, n_input, hop.blocks)
            first_ns += _ns(*delay, busy_s)
        all_ns = first_ns + (request.n_output_tokens - 1) * hub_ns
        cached = range(n_input, n_input + request.n_output_tokens - 1)
        for hop, delay in zip(hops, later, strict=True):
            server = problem.servers[hop.server]
            all_ns += len(cached) * _ns(*delay)
            if server.grows_with_context(hop.blocks):
                all_ns += sum(_ns(server.step_s(position, 1, hop.blocks)) for position in cached)
            elif cached:
                all_ns += len(cached) * _ns(server.step_s(n_input, 1, hop.blocks))
        return first_ns / NS, all_ns / NS


def _ns(*parts_s: float) -> int:
    return sum(round(part_s * NS) for part_s in parts_s)


def closed_delays(experiment: Experiment) -> Callable[[RequestSpec, Sequence[Hop]], ChainDelays]:
    """Returns the delays with which the closed form of the engine ``fast`` serves, as a function of (request, chain)."""
    if never_wait(experiment):
        return lambda request, hops: delays_of(experiment, request, hops)
    return IdleTimes(experiment, Links(EventQueue(), experiment)).delays
