"""Simulates requests on servers that share their time among sessions, without simulating single steps.

Between one arrival or end and the next, every session proceeds at the pace that ``policies.sharing`` expects
for the number of sessions on its servers. It is for trials of placements; the engines simulate steps.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from policies.interfaces import Router
from policies.link_rates import Passage, Queue
from policies.link_waits import LinkWaits, Pace, Way
from policies.problem import (
    Hop,
    Placement,
    PolicyError,
    Problem,
    RequestSpec,
    Route,
    hop_times_s,
    return_times_s,
    service_s,
)
from policies.replay import ReplayedRequest
from policies.sharing import Cycle, SharedSteps, Sharing
from policies.state import SystemState
from policies.waiting import fits
from policies.workload import RequestPlan

NOTICED_RATIO = 0.03
"""If a step's time changes by a smaller share, sessions keep their pace."""


class _Alone(NamedTuple):
    """The seconds of a kind of request on a path where nobody else is."""

    service_s: float
    """Until its last token."""
    rtt_s: float
    """The longest round trip of its hops."""
    prompts_s: tuple[tuple[float, float], ...]
    """Of each hop: (the way there and the prompt, the prompt alone)."""
    return_s: float
    """The way back of its first token, where servers forward."""


@dataclass(slots=True, eq=False)
class _Path:
    """A client's chain: what is the same for all sessions on it."""

    on_links_s: float
    """Seconds that each further token spends outside servers."""
    on: tuple[tuple[int, int], ...]
    """(Server, number of blocks) of its hops."""
    servers: frozenset[int]
    ways: tuple[tuple[int, ...], ...]
    """The ways of its tokens where they may wait for links, as the numbers of these."""
    n_sessions: int = 0
    token_s: float = 0.0
    """Seconds per token at the present pace."""
    alone: dict[tuple[RequestSpec, int], _Alone] = field(default_factory=dict)
    """By what routing knows of a request, and the length of its prompt."""
    decoding: list[tuple[float, int, _Session]] = field(default_factory=list)
    """Heap of its sessions that decode: (``n_decoded`` when the last token is there, index, session)."""
    n_decoded: float = 0.0
    """The tokens of a session that has decoded since the first of them began to."""


@dataclass(slots=True, eq=False)
class _Session:
    """A request that is being served."""

    plan: RequestPlan
    route: Route
    path: _Path
    asked_at_s: float
    """When it was opened."""
    ttft_s: float


def replay_shared(
    problem: Problem,
    placement: Placement,
    router: Router,
    requests: Sequence[RequestPlan],
    sharing: Sharing | None = None,
    waits: LinkWaits | None = None,
    on_end: Callable[[ReplayedRequest], None] | None = None,
) -> list[ReplayedRequest]:
    """Serves ``requests`` (ascending arrivals); those without room wait, first come, first served.

    ``sharing`` is that of ``problem``; it can be passed to several replays, as it keeps its results. ``waits``: messages
    also wait for links. ``on_end`` is called with each request that is completed; what it raises ends the replay.
    Raises ``PolicyError`` if a request has no chain.
    """
    found = {}
    for done in shared_ends(problem, placement, router, requests, sharing or Sharing(problem), waits):
        found[done.plan.index] = done
        if on_end is not None:
            on_end(done)
    return [found[plan.index] for plan in requests]


def shared_ends(
    problem: Problem,
    placement: Placement,
    router: Router,
    requests: Sequence[RequestPlan],
    sharing: Sharing,
    waits: LinkWaits | None = None,
) -> Iterator[ReplayedRequest]:
    """As ``replay_shared``, but returns requests as they end, and replays no further than is asked for."""
    return _Run(problem, placement, router, sharing, waits).serve(requests)


class _Run:
    """One replay."""

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        router: Router,
        sharing: Sharing,
        waits: LinkWaits | None,
    ) -> None:
        self._problem = problem
        self._n_blocks = [held.n_blocks for held in placement.ranges]
        self._router = router
        self._sharing = sharing
        self._waits = waits
        self._links: list[Queue] = []
        self._number_of: dict[Queue, int] = {}
        self._link_s: list[float] = []
        """Seconds that a token waits for a link at present, by its number."""
        self._n_using: list[int] = []
        """How many sessions use a link."""
        self._link_pace = Pace(0.0, 0.0, 0)
        """As ``_cycle``, for waits on links."""
        self._state = SystemState(placement.cache_bytes)
        self._paths: dict[tuple[int, tuple[Hop, ...]], _Path] = {}
        self._used: dict[_Path, None] = {}
        """The paths that have sessions now."""
        self._decoding: dict[_Path, None] = {}
        """Those of them on which some session decodes."""
        self._waiting: deque[RequestPlan] = deque()
        self._prompts: list[tuple[float, int, _Session]] = []
        """Heap of (instant of the first token, index, session)."""
        self._block_s = [0.0] * problem.n_servers
        """Seconds per block of a step over all of a server's blocks, at present."""
        self._steps: SharedSteps = sharing.at(Cycle(0.0, 0.0))
        """The steps on the newest session's chain; they stand for those of all sessions."""
        self._uneven: set[int] = set()
        """The servers whose times have changed since sessions' paces were computed."""
        self._links_uneven = False
        """Whether the waits for some links have."""
        self._now_s = 0.0
        self._known: dict[int, RequestSpec] = {}
        """What routing knows of requests, by their index."""

    def serve(self, requests: Sequence[RequestPlan]) -> Iterator[ReplayedRequest]:
        coming, n_left = deque(requests), len(requests)
        self._known = {plan.index: plan.known for plan in requests}
        while n_left:
            arrives_at_s = coming[0].arrival_at_s if coming else math.inf
            decodes_at_s = self._prompts[0][0] if self._prompts else math.inf
            on, ends_at_s = self._next_end()
            self._go_on(min(arrives_at_s, decodes_at_s, ends_at_s))
            if on is not None and self._now_s == ends_at_s:
                n_left -= 1
                yield self._end(on)
            elif self._now_s == decodes_at_s:
                self._decode(heappop(self._prompts)[2])
            else:
                self._waiting.append(coming.popleft())
                if len(self._waiting) == 1:
                    self._let_in()

    def _next_end(self) -> tuple[_Path | None, float]:
        """Returns the path whose first session ends before all others at the present pace, and when."""
        first, first_left_s = None, math.inf
        for path in self._decoding:
            left = path.decoding[0][0] - path.n_decoded
            left_s = left * path.token_s if left > 0.0 else 0.0
            if left_s < first_left_s:
                first, first_left_s = path, left_s
        return first, self._now_s + first_left_s

    def _go_on(self, to_s: float) -> None:
        passed_s = to_s - self._now_s
        for path in self._decoding:
            path.n_decoded += passed_s / path.token_s
        self._now_s = to_s

    def _decode(self, session: _Session) -> None:
        path, plan = session.path, session.plan
        if not path.decoding:
            path.n_decoded = 0.0
            self._decoding[path] = None
        heappush(path.decoding, (path.n_decoded + plan.n_output_tokens - 1, plan.index, session))

    def _let_in(self) -> None:
        n_before = len(self._waiting)
        while self._waiting:
            plan = self._waiting[0]
            request = self._known[plan.index]
            route = self._router.route(request, self._state, self._now_s)
            if route is None:
                raise PolicyError(f"request {plan.index} of {request.n_tokens} tokens has no chain")
            if route.wait_s or not self._has_room(request, route.hops):
                break
            self._waiting.popleft()
            self._open(plan, route)
        if len(self._waiting) < n_before:
            self._pace()

    def _has_room(self, request: RequestSpec, hops: Sequence[Hop]) -> bool:
        block_bytes = self._problem.model.cache_bytes(request.n_tokens)
        return all(fits(self._state.free_bytes(hop.server), hop.n_blocks * block_bytes) for hop in hops)

    def _open(self, plan: RequestPlan, route: Route) -> None:
        problem, request, hops = self._problem, self._known[plan.index], route.hops
        steps = self._steps = self._sharing.on(plan.client, hops)
        path = self._path(plan, hops)
        found = self._alone(plan, path, hops)
        ends_at_s = self._now_s + found.service_s
        waited_s, passages = 0.0, tuple[Passage, ...]()
        if self._waits is not None:
            sent_at_s = self._now_s + problem.initial_delay_s
            waited_s, more_s, passages = self._waits.of_request(request, hops, self._state, sent_at_s)
            ends_at_s += more_s
            self._link_pace = self._waits.pace(plan.client, hops)
        self._state.open(plan.index, hops, problem.model.cache_bytes(request.n_tokens), ends_at_s, passages)
        self._changed(hops, path.ways, 1)
        ttft_s = waited_s + problem.initial_delay_s + found.rtt_s
        ttft_s += problem.hub_s(plan.client)
        n_of = self._state.all_active()
        for hop, (on_way_s, prompt_s) in zip(hops, found.prompts_s, strict=True):
            server, n_active = hop.server, n_of[hop.server]
            n_blocks = self._n_blocks[server]
            ahead = steps.prompts_ahead(server, n_blocks, n_active)
            ttft_s += on_way_s + n_blocks * self._block_s[server] / 3 + ahead * prompt_s / 2
        ttft_s += found.return_s
        session = _Session(plan, route, path, self._now_s, ttft_s)
        path.n_sessions += 1
        path.token_s = self._token_s(path)
        self._used[path] = None
        heappush(self._prompts, (self._now_s + ttft_s, plan.index, session))

    def _alone(self, plan: RequestPlan, path: _Path, hops: tuple[Hop, ...]) -> _Alone:
        problem, request = self._problem, self._known[plan.index]
        key = request, plan.n_input_tokens
        if (found := path.alone.get(key)) is not None:
            return found
        prompts_s = []
        previous: int | None = None
        for hop in hops:
            input_s = hop_times_s(problem, request, previous, hop.server)[0]
            prompt_s = hop.n_blocks * problem.servers[hop.server].prefill_s(plan.n_input_tokens)
            prompts_s.append((input_s + prompt_s, prompt_s))
            previous = hop.server
        found = path.alone[key] = _Alone(
            service_s(problem, request, hops)[1],
            max(problem.raw_rtt_s[plan.client][hop.server] for hop in hops),
            tuple(prompts_s),
            0.0 if previous is None else return_times_s(problem, request, previous)[0],
        )
        return found

    def _path(self, plan: RequestPlan, hops: tuple[Hop, ...]) -> _Path:
        if (path := self._paths.get((plan.client, hops))) is not None:
            return path
        problem, request = self._problem, self._known[plan.index]
        ways = [] if self._waits is None else self._waits.ways(plan.client, hops)
        on_links_s = problem.hub_s(plan.client)
        previous: int | None = None
        for hop in hops:
            token_s = hop_times_s(problem, request, previous, hop.server)[1]
            on_links_s += token_s - problem.servers[hop.server].step_base_s
            previous = hop.server
        if previous is not None:
            on_links_s += return_times_s(problem, request, previous)[1]
        on = tuple((hop.server, hop.n_blocks) for hop in hops)
        servers = frozenset(hop.server for hop in hops)
        path = self._paths[plan.client, hops] = _Path(
            on_links_s, on, servers, tuple(map(self._numbers, ways))
        )
        return path

    def _numbers(self, way: Way) -> tuple[int, ...]:
        for queue in way:
            if queue not in self._number_of:
                self._number_of[queue] = len(self._links)
                self._links.append(queue)
                self._link_s.append(0.0)
                self._n_using.append(0)
        return tuple(self._number_of[queue] for queue in way)

    def _end(self, path: _Path) -> ReplayedRequest:
        """Ends the first session of a path."""
        session = heappop(path.decoding)[2]
        plan = session.plan
        waited_s = session.asked_at_s - plan.arrival_at_s
        done = ReplayedRequest(
            plan, session.route, waited_s, waited_s + session.ttft_s, self._now_s - plan.arrival_at_s
        )
        if not path.decoding:
            del self._decoding[path]
        path.n_sessions -= 1
        if not path.n_sessions:
            del self._used[path]
        self._state.close(plan.index)
        self._changed(session.route.hops, path.ways, -1)
        self._let_in()
        self._pace()
        return done

    def _changed(self, hops: Sequence[Hop], ways: Sequence[tuple[int, ...]], n_more: int) -> None:
        """Updates the times of these servers and links after their number of sessions changed by ``n_more``."""
        if self._waits is not None:
            for link in itertools.chain.from_iterable(ways):
                self._n_using[link] += n_more
                n_others = max(self._n_using[link] - 1, 0)
                self._link_s[link] = self._waits.token_wait_s(self._links[link], n_others, self._link_pace)
                self._links_uneven = True
        n_of = self._state.all_active()
        for hop in hops:
            server, n_active = hop.server, n_of[hop.server]
            n_blocks = self._n_blocks[server]
            if n_active:
                block_s = self._steps.step_s(server, n_blocks, n_active) / n_blocks
                if abs(block_s - self._block_s[server]) > NOTICED_RATIO * block_s:
                    self._block_s[server] = block_s
                    self._uneven.add(server)

    def _pace(self) -> None:
        uneven = self._uneven
        if not (uneven or self._links_uneven):
            return
        for path in self._used:
            if self._links_uneven or not uneven.isdisjoint(path.servers):
                path.token_s = self._token_s(path)
        self._uneven, self._links_uneven = set(), False

    def _token_s(self, path: _Path) -> float:
        token_s, block_s = path.on_links_s, self._block_s
        for server, n_blocks in path.on:
            token_s += n_blocks * block_s[server]
        link_s = self._link_s.__getitem__
        for way in path.ways:
            token_s += max(map(link_s, way))
        return token_s
