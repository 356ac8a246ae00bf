"""The connections of a simulated run over the links of its scenario: messages wait for those before them.

The links and TCP are those of the network ``memory`` (``netem.flows``), and so are the connections: one of each client
with each server, and one of each server with each other one that it pushes to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from netem.flows import Tcp
from netem.forwarder_links import SharedLink
from netem.spec import NO_COURSE, draws_name
from nodes import framesizes
from nodes.framesizes import FrameSize
from policies.links import UNLIMITED_BPS, Link
from policies.problem import Hop
from testbed.experiments.courses import courses
from testbed.experiments.experiment import Experiment, NetworkChange, NetworkPart
from testbed.fast.events import EventQueue
from testbed.fast.lazy import LazyPipe
from testbed.fast.lines import Heard, Line, LineState
from testbed.fast.outcome import SimulatedRequest
from testbed.fast.warmed import first_states
from testbed.records.links import LinksUsed, LinkUse, ends_of

_ENDS = ("asks", "answers")
"""Whether the source of a line has opened the connection, or the target."""


class Way(NamedTuple):
    """What carries the messages of a hop: there, and from there to the client."""

    there: Line
    back: Line
    accepts: Line | None
    """On which a server answers a push, before it computes; ``None``: there are no pushes."""
    size_there: Callable[[int], FrameSize]
    """The size of a frame there, by its bytes of hidden states."""
    size_back: Callable[[int], FrameSize]
    """The size of a result to the client."""
    returns: bool
    """Whether the client gets the hop's result, not the next server."""
    forwarding: bool

    @property
    def answered_s(self) -> float:
        """For how long after a message the link to the client is busy with what the server answers at once."""
        if self.accepts is not self.back:
            return 0.0 if self.forwarding else self.back.acknowledgement_s
        wire_s = self.back.idle_s(framesizes.OK) - self.back.delay_s
        return self.back.acknowledgement_s + wire_s


class Links:
    """All connections of a run, each from its first use on. Clients and servers are named by their numbers.

    ``network``: in place of the experiment's.
    """

    def __init__(
        self,
        queue: EventQueue,
        experiment: Experiment,
        network: NetworkPart | None = None,
        *,
        hears: bool = False,
    ) -> None:
        self._queue = queue
        self._experiment = experiment
        self._network = network = network or experiment.network
        self._tcp = Tcp.of(network.tcp, network.mtu)
        self._shared = {name: SharedLink(rate_bps) for name, rate_bps in network.shared_bps.items()}
        self._pipes: dict[tuple[str, str], LazyPipe] = {}
        self._lines: dict[tuple[str, str, str], Line] = {}
        self._heard: defaultdict[tuple[str, str], Heard] = defaultdict(partial(Heard, always=hears))
        """By client and server."""
        self._lost_lines: list[tuple[str, str, Line]] = []
        """Those of connections that were lost and made again: (source, target, line)."""
        self._servers = [server.name for server in experiment.problem.servers]
        self._clients = frozenset(experiment.problem.clients)
        self._sources = [*experiment.problem.clients, *self._servers]
        changing = network.links.items() if network.changes else ()
        used = {pair: link for pair, link in changing if experiment.uses(pair)}
        self._courses = courses(network.changes, used, 1.0)
        self._present: dict[tuple[str, str], Link] = {}
        """Links that have changed."""
        self._changed_at_s = 0.0
        """When links changed last."""

    def follow(self, changes: Sequence[NetworkChange]) -> None:
        """Gives pairs other links when that is due, one change planned after another, as in the system."""
        self._queue.one_by_one(
            deque((change.at_s, partial(self._change, change.links)) for change in changes)
        )

    def _change(self, links: Mapping[tuple[str, str], Link]) -> None:
        self._changed_at_s = self._queue.now_s
        for pair, link in links.items():
            if pair not in self._courses:
                continue
            self._present[pair] = link
            if (pipe := self._pipes.get(pair)) is not None:
                pipe.change(link, self._queue.now_s)
                pipe.release()
            for end in _ENDS:
                if (line := self._lines.get((*pair, end))) is not None:
                    line.change(link)

    def up(self, source: int, server: int) -> Line:
        """Returns the line from a source to a server: a client, or a server as in ``testbed.fast.sending``."""
        return self._line(self._sources[source], self._servers[server], "asks")

    def down(self, source: int, server: int) -> Line:
        """Returns the line from a server back to a source."""
        return self._line(self._servers[server], self._sources[source], "answers")

    def heard(self, client: int, server: int) -> Heard:
        """Returns what a client hears of a server."""
        return self._heard[self._sources[client], self._servers[server]]

    def reconnect(self, source: int, server: int) -> None:
        """Lets a source have a new connection with a server, in place of one that is lost."""
        name, other = self._sources[source], self._servers[server]
        ends = (name, other, "asks"), (other, name, "answers")
        for begin, end, which in ends:
            if (lost := self._lines.pop((begin, end, which), None)) is not None:
                self._lost_lines.append((begin, end, lost))
        for of in ends:
            self._line(*of).begin(LineState(self._tcp.first_flight_bytes))

    def ways(self, client: int, hops: Sequence[Hop]) -> list[Way]:
        """Returns the connections of a client's chain, hop by hop."""
        found, forwarding, n_hops = [], self._experiment.problem.forwarding, len(hops)
        for at, hop in enumerate(hops):
            there, back = self.up(client, hop.server), self.down(client, hop.server)
            accepts = back if forwarding else None
            if forwarding and at:
                source, target = self._servers[hops[at - 1].server], self._servers[hop.server]
                there, accepts = self._line(source, target, "asks"), self._line(target, source, "answers")
            size_there = framesizes.there(at, forwarding=forwarding)
            size_back = framesizes.back(n_hops, forwarding=forwarding)
            returns = not forwarding or at + 1 == n_hops
            found.append(Way(there, back, accepts, size_there, size_back, returns, forwarding))
        return found

    def note(self, request: SimulatedRequest) -> None:
        """Counts the steps of a request that has waited for nothing, without sending them."""
        plan, route = request.plan, request.route
        if route is None or request.time_s is None or request.ttft_s is None:
            return
        token_bytes = self._experiment.problem.model.token_bytes
        first_at_s, ended_at_s = plan.arrival_at_s + request.ttft_s, plan.arrival_at_s + request.time_s
        began_at_s = plan.arrival_at_s + request.waiting_s + (request.setup_s or 0.0)
        for way in self.ways(plan.client, route.hops):
            for n_tokens, n_times, since_s, until_s in (
                (plan.n_input_tokens, 1, began_at_s, first_at_s),
                (1, plan.n_output_tokens - 1, first_at_s, ended_at_s),
            ):
                if n_times:
                    n_bytes = n_tokens * token_bytes
                    way.there.note(way.size_there(n_bytes), n_times, since_s, until_s)
                    if way.returns:
                        way.back.note(way.size_back(n_bytes), n_times, since_s, until_s)

    def use(self, until_s: float) -> LinksUsed:
        """Returns the use of every link that has carried hidden states from 0 to ``until_s``."""
        network = self._network
        uses: dict[tuple[str, str], LinkUse] = {}
        shared: dict[str, LinkUse] = {}
        lines = [(source, target, line) for (source, target, _), line in self._lines.items()]
        for source, target, line in lines + self._lost_lines:
            pair = source, target
            names = network.shared_paths.get(pair, ())
            on = [(shared.setdefault(name, LinkUse()), 8 / network.shared_bps[name]) for name in names]
            line.count(uses.setdefault(pair, LinkUse()), on)
        found = [(*pair, use) for pair, use in uses.items()]
        return LinksUsed([*found, *((*ends_of(name), use) for name, use in shared.items())], until_s)

    def _line(self, source: str, target: str, end: str) -> Line:
        """``end``: see ``_ENDS``."""
        line = self._lines.get((source, target, end))
        if line is None:
            pipes = self._pipe(source, target), self._pipe(target, source)
            pair, confirms, heard = (source, target), None, None
            if end == "asks":
                confirms = self._line(target, source, "answers")
            else:
                pair = target, source
                heard = self._heard[pair] if target in self._clients else None
            link = self._link((source, target))
            line = Line(self._queue, pipes, link, self._tcp, confirms, heard)
            line.begin(first_states(self._experiment, pair)[_ENDS.index(end)])
            self._lines[source, target, end] = line
        return line

    def _pipe(self, source: str, target: str) -> LazyPipe:
        pipe = self._pipes.get((source, target))
        if pipe is None:
            network = self._network
            route = tuple(self._shared[name] for name in network.shared_paths.get((source, target), ()))
            course = self._courses.get((source, target), NO_COURSE)
            name = draws_name(self._experiment.seed, (source, target))
            pipe = LazyPipe(self._queue, name, network.links[source, target], route, course)
            pipe.place(self._changed_at_s)
            if (present := self._present.get((source, target))) is not None:
                pipe.change(present, self._queue.now_s)
            self._pipes[source, target] = pipe
        return pipe

    def _link(self, pair: tuple[str, str]) -> Link:
        return self._present.get(pair) or self._network.links[pair]


def never_wait(experiment: Experiment) -> bool:
    """Returns whether links take their delay alone, as those of an instance file, or there are none."""
    return not experiment.network.changes and all(
        link.rate_bps >= UNLIMITED_BPS and not link.jitter_s and not link.loss_ratio
        for pair, link in experiment.network.links.items()
        if experiment.uses(pair)
    )
