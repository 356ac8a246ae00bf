"""The placement-and-routing problem: the input and the output of every policy.

Pure data. Times are float seconds, sizes are bytes, blocks are ``0..n_blocks-1`` and ranges are
half-open. Server and client arguments are indices into ``Problem.servers`` and ``Problem.clients``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, repeat
from statistics import median
from typing import Literal, NamedTuple

from policies.decoding import MOST_TOKENS, Decoding, RoundTimes
from policies.link_rates import LinkRates
from policies.places import Places
from policies.rehearsal import Rehearsal
from policies.steps import StepLaw, StepTimes

Matrix = tuple[tuple[float, ...], ...]
Batching = Literal["none", "serial", "continuous"]


class PolicyError(Exception):
    """A policy found no result, or broke a rule. The message is one sentence for the user."""


class InfeasiblePlacement(PolicyError):
    """The policy has no placement in which these servers hold every block of the model."""


class BlockRange(NamedTuple):
    """Consecutive blocks ``[first, last)``; empty if ``first == last``.

    The paper's a_j is ``first + 1`` and its m_j is ``n_blocks``.
    """

    first: int
    last: int

    @property
    def n_blocks(self) -> int:
        return self.last - self.first


Wire = Literal["fp16", "int8"]
"""How hidden states may be sent, if not as they are computed: int8 has rows of one byte per value, with a scale for each row."""
SCALE_BYTES = 4
"""A row's scale."""


def wire_bytes(hidden_size: int, value_bytes: int, wire: Wire | None) -> int:
    """Returns the bytes of one hidden state on the wire. Its values have ``value_bytes`` where they are computed."""
    if wire == "int8":
        return hidden_size + SCALE_BYTES
    return hidden_size * (2 if wire == "fp16" else value_bytes)


@dataclass(frozen=True)
class ModelSpec:
    """A transformer, as far as placement must know it.

    ``n_blocks`` is L and ``block_bytes`` is s_m. ``cache_bytes_per_token`` is the attention cache of one
    token in one block, so s_c of a request is ``cache_bytes_per_token * (l_in + l_out)``. ``value_bytes`` is
    the size of one value of a hidden state. ``petals_cache_tokens`` are the tokens per block that PETALS
    reserves cache for.

    Where blocks differ, ``blocks_bytes`` has the bytes of each, and ``block_bytes`` is the largest.
    """

    name: str
    n_blocks: int
    hidden_size: int
    block_bytes: float
    cache_bytes_per_token: float
    value_bytes: int = 2
    petals_cache_tokens: int = 4096
    blocks_bytes: tuple[float, ...] = ()
    wire: Wire | None = None
    """How hidden states are sent; ``None``: as they are computed."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state on the wire."""
        return wire_bytes(self.hidden_size, self.value_bytes, self.wire)

    @property
    def state_bytes(self) -> int:
        """Bytes of one token's hidden state as it is computed."""
        return self.hidden_size * self.value_bytes

    def range_bytes(self, held: BlockRange) -> float:
        """Returns the bytes of the weights of the blocks ``held``."""
        if not self.blocks_bytes:
            return self.block_bytes * held.n_blocks
        return sum(self.blocks_bytes[held.first : held.last])

    def worst_bytes(self, n_blocks: int) -> float:
        """Returns the bytes of ``n_blocks`` consecutive blocks, wherever they take the most."""
        if not self.blocks_bytes:
            return self.block_bytes * n_blocks
        return _worst_bytes(self.blocks_bytes)[n_blocks]

    def most_blocks(self, memory_bytes: float, cache_bytes: float = 0.0) -> int:
        """Returns how many consecutive blocks fit wherever they are, with ``cache_bytes`` of caches for each.

        At most all; a number of them that lacks a billionth of a block counts as whole.
        """
        each_bytes = self.block_bytes + cache_bytes
        if not self.blocks_bytes:
            return min(math.floor(memory_bytes / each_bytes + 1e-9), self.n_blocks)
        free_bytes = memory_bytes + 1e-9 * each_bytes
        n_fitting = bisect_right(
            range(self.n_blocks + 1), free_bytes, key=lambda n: self.worst_bytes(n) + n * cache_bytes
        )
        return n_fitting - 1

    def best_blocks(self, memory_bytes: float, cache_bytes: float = 0.0) -> int:
        """Returns how many consecutive blocks fit at most, wherever they take the least (``most_blocks``)."""
        if not self.blocks_bytes:
            return self.most_blocks(memory_bytes, cache_bytes)
        free_bytes = memory_bytes + 1e-9 * (self.block_bytes + cache_bytes)
        n_fitting = bisect_right(
            range(self.n_blocks + 1),
            free_bytes,
            key=lambda n: _least_bytes(self.blocks_bytes)[n] + n * cache_bytes,
        )
        return n_fitting - 1

    @property
    def petals_cache_bytes(self) -> float:
        """Bytes of attention cache that PETALS reserves per hosted block (its ``cache_per_block``)."""
        return self.cache_bytes_per_token * self.petals_cache_tokens

    @property
    def petals_autograd_bytes(self) -> float:
        """Bytes that PETALS keeps free for autograd: 2 GiB x hidden_size / 14336."""
        return 2 * 1024**3 * self.hidden_size / 14336

    def cache_bytes(self, n_tokens: int) -> float:
        """Returns s_c: bytes of one block's attention cache for a session of ``n_tokens`` tokens in all."""
        return self.cache_bytes_per_token * n_tokens


@cache
def _worst_bytes(blocks_bytes: tuple[float, ...]) -> tuple[float, ...]:
    """Returns for every number of consecutive blocks the most bytes that so many have."""
    return tuple(max(sums) for sums in _sums_bytes(blocks_bytes))


@cache
def _least_bytes(blocks_bytes: tuple[float, ...]) -> tuple[float, ...]:
    """Returns for every number of consecutive blocks the least bytes that so many have."""
    return tuple(min(sums) for sums in _sums_bytes(blocks_bytes))


def _sums_bytes(blocks_bytes: tuple[float, ...]) -> Iterator[list[float]]:
    """Yields for every number of consecutive blocks, from 0 to all, the bytes of each such range."""
    before = (0.0, *accumulate(blocks_bytes))
    n_blocks = len(blocks_bytes)
    for n in range(n_blocks + 1):
        yield [before[first + n] - before[first] for first in range(n_blocks - n + 1)]


@dataclass(frozen=True)
class ServerSpec(StepLaw):
    """A server's capacity and speed.

    ``memory_bytes`` is M_j. ``StepLaw`` defines the times (``decode_s`` is tau_j).
    ``block_cap`` limits the number of blocks, for policies that honour it (the reference simulator caps
    MIG servers at 4). ``petals_*`` are PETALS' own throughput measurements, in tokens per second.

    The fields from ``step_base_s`` on are not in the paper's model and 0 by default.
    ``decode_context_tokens`` is the mean over a request of the lengths that placement is designed for.
    ``stored`` is the model as this server stores it, if in another type of weights than ``Problem.model``.
    Policies see ``step_base_s`` only as part of ``Problem.token_rtt_s`` and ``Problem.input_rtt_base_s``. No
    policy uses ``contention_ratio``.
    """

    name: str
    hardware: str
    memory_bytes: float
    decode_s: float
    prefill_base_s: float
    prefill_slope_s: float
    petals_forward_rps: float
    petals_network_rps: float
    block_cap: int | None = None
    step_base_s: float = 0.0
    context_slope_s: float = 0.0
    decode_context_tokens: float = 0.0
    prefill_curve_s: float = 0.0
    contention_ratio: float = 0.0
    session_slope_s: float = 0.0
    prefill_least_s: float = 0.0
    experts_s: float = 0.0
    experts_ratio: float = 0.0
    exchange_s: float = 0.0
    window_tokens: int = 0
    others: tuple[StepTimes, ...] = ()
    pattern: tuple[int, ...] = ()
    stored: ModelSpec | None = None


def mean_cached_tokens(n_input_tokens: int, n_output_tokens: int) -> float:
    """Returns the mean number of tokens cached before a request's decode steps: l_in to l_in + l_out - 2."""
    return n_input_tokens + max(0, n_output_tokens - 2) / 2


class Linear(NamedTuple):
    """Seconds to send l hidden states from a row's node to a column's: ``base_s + slope_s * l``."""

    base_s: Matrix
    slope_s: Matrix

    def of(self, row: int, column: int, n_tokens: int) -> float:
        return self.base_s[row][column] + self.slope_s[row][column] * n_tokens


@dataclass(frozen=True)
class Transmissions:
    """The transmission times of hidden states, without propagation.

    ``up``: client to server, ``down``: server to client (both [client][server]); ``across``: server to
    server. ``counts_down``: whether t_cj and t^I_cj include the transmission back to the client. They always
    include the one to the server.
    """

    up: Linear
    down: Linear
    across: Linear
    counts_down: bool

    def instead_s(self, client: int, previous: int | None, server: int, n_tokens: int) -> float:
        """Returns the seconds to send from ``previous`` (``None``: the client) minus those in t_cj, t^I_cj."""
        up_s = self.up.of(client, server, n_tokens)
        sent_s = up_s if previous is None else self.across.of(previous, server, n_tokens)
        return sent_s - up_s - (self.down.of(client, server, n_tokens) if self.counts_down else 0.0)


class SharedRounds(NamedTuple):
    """Rounds of speculative decoding: each sends ``n_sent`` hidden states, and makes ``n_made`` tokens on average."""

    n_sent: int = 1
    n_made: float = 1.0


class OneWayDelays(NamedTuple):
    """One-way propagation delays in seconds.

    ``up_s``: client to server, ``down_s``: server to client (both [client][server]); ``across_s``: server to
    server, [from][to].
    """

    up_s: Matrix
    down_s: Matrix
    across_s: Matrix


@dataclass(frozen=True)
class Problem:
    """Servers, clients, the model, the times between them, and the load.

    Times:

    - ``raw_rtt_s[c][j]``: the round trip between client c and server j, propagation only.
    - ``token_rtt_s[c][j]``: t_cj, the part of a decode step on j that does not depend on its number of
      blocks: communication, serialisation and the server's ``step_base_s``.
    - ``input_rtt_base_s + input_rtt_slope_s * l``: t^I_cj(l), the same for a prompt of l tokens.
    - ``server_rtt_s[i][j]``: the round trip between servers, propagation only.
    - ``one_way``: one-way propagation; ``None``: half of the round trip each.
    - ``transmissions``: the links' transmission times, for forwarding; ``None``: those that t_cj contains are
      used.
    - ``hub_token_s``: what a client computes per output token (embedding, head, choice), and
      ``hub_tokens_s`` that of each client if they differ. It is the same for every chain, so it is in
      ``service_s`` but affects no policy's choice of one.
    - ``initial_delay_s``: added once to every request.
    - ``links``: the rates of the links, on which messages wait for each other (``policies.link_waits``);
      ``None``: messages take the times above, however many there are.

    Requests:

    - ``n_input_tokens``, ``n_output_tokens``: the lengths that placement is designed for (the maxima).
    - ``length_samples``: (input, output) lengths of past requests that the operator knows; empty: only the
      maxima are known.
    - ``reserved_output_tokens``: the output tokens for which every session reserves cache (or probably needs
      it, if caches grow); ``None``: each session's own number.
    - ``request_rate``: lambda, requests per second of all clients together.
    - ``objectives_s``: (metric, limit in seconds) that requests should meet. Metrics for policies are queue,
      ttft, tpot, per_token and e2e. ``own_objectives_s[c]``: those of client c in their place (``None``: it has none of
      its own; empty: no client has). ``objectives_of`` returns those that count.

    The system:

    - ``join_order``: the order in which servers join under PETALS.
    - ``forwarding``: a server sends hidden states directly to the next one, and the last server to the
      client. Otherwise (hub-spoke) every hop goes through the client.
    - ``caps_limit_concurrency``: whether an |R| that the policy chooses is one at which all blocks fit in spite of
      ``ServerSpec.block_cap``. The reference simulator knows no such limit, and then finds no placement.
    - ``batching``: how a server computes several sessions. "none": each as if alone; "serial": one step after
      another; "continuous": all waiting ones in one step (``StepLaw.batch_s``).
    - ``decoding``: how clients draft tokens, which servers verify together; ``None``: a step makes one token.
    - ``further_token_s[c][j]``: what every hidden state after the first adds to a decode step's messages; empty: nothing.
    - ``shared``: see ``by_token``.
    - ``places``, ``seed``, ``rehearsal``: only for policies that want them (``policies.interfaces``). ``rehearsal`` is
      ``None``, too, where the fast engine cannot serve the scenario, and for later decisions of an online policy.
    """

    model: ModelSpec
    servers: tuple[ServerSpec, ...]
    clients: tuple[str, ...]
    raw_rtt_s: Matrix
    token_rtt_s: Matrix
    input_rtt_base_s: Matrix
    input_rtt_slope_s: Matrix
    server_rtt_s: Matrix
    n_input_tokens: int
    n_output_tokens: int
    request_rate: float
    join_order: tuple[int, ...]
    initial_delay_s: float = 0.0
    forwarding: bool = False
    transmissions: Transmissions | None = None
    hub_token_s: float = 0.0
    hub_tokens_s: tuple[float, ...] = ()
    length_samples: tuple[tuple[int, int], ...] = ()
    reserved_output_tokens: int | None = None
    batching: Batching = "none"
    decoding: Decoding | None = None
    further_token_s: Matrix = ()
    shared: SharedRounds = SharedRounds()  # noqa: RUF009 - immutable
    objectives_s: tuple[tuple[str, float], ...] = ()
    own_objectives_s: tuple[tuple[tuple[str, float], ...] | None, ...] = ()
    one_way: OneWayDelays | None = None
    links: LinkRates | None = None
    caps_limit_concurrency: bool = True
    places: Places | None = None
    seed: int | None = None
    rehearsal: Rehearsal | None = None

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each server the first one with the same times."""
        first: dict[ServerSpec, int] = {}
        times = (replace(s, name="", hardware="", memory_bytes=0.0, block_cap=None) for s in self.servers)
        return tuple(first.setdefault(server, j) for j, server in enumerate(times))

    @cached_property
    def by_token(self) -> Problem:
        """The same problem without ``decoding``, in which a token's times are its share of a round's.

        A round makes ``Decoding.expected_tokens`` tokens on average. All times of a decode step, on links, servers and
        clients, are those of a round divided by that; times of prompts are unchanged.
        """
        decoding = self.decoding
        if decoding is None:
            return self
        n_drafted = self._n_drafted
        n_sent, n_made = decoding.n_sent(n_drafted), decoding.expected_tokens(n_drafted)

        def per_token(times_s: Sequence[float], more_s: Sequence[float]) -> tuple[float, ...]:
            pairs = zip(times_s, more_s, strict=True)
            return tuple((time_s + (n_sent - 1) * each_s) / n_made for time_s, each_s in pairs)

        no_time = (0.0,) * self.n_servers
        draft_s = n_drafted * decoding.draft_token_s
        return replace(
            self,
            servers=tuple(server.by_token(n_sent, n_made) for server in self.servers),
            token_rtt_s=tuple(map(per_token, self.token_rtt_s, self.further_token_s or repeat(no_time))),
            hub_token_s=(self.hub_token_s + draft_s) / n_made,
            hub_tokens_s=tuple((hub_s + draft_s) / n_made for hub_s in self.hub_tokens_s),
            decoding=None,
            shared=SharedRounds(n_sent, n_made),
        )

    @property
    def _n_drafted(self) -> int:
        """The drafted tokens per round. Where sessions choose it, what is best on a chain of servers of medium speed."""
        decoding = self.decoding
        if decoding is None or not decoding.is_auto:
            return 0 if decoding is None else decoding.tokens
        return decoding.best_tokens(self.usual_round_s, decoding.acceptance)

    @property
    def usual_round_s(self) -> RoundTimes:
        """How long rounds take alone on a chain of servers of medium speed, with up to ``Decoding.tokens`` drafted tokens."""
        decoding = self.decoding
        assert decoding is not None, "clients draft"
        least_bytes = self.model.cache_bytes_per_token
        n_held = median(self.model.most_blocks(s.memory_bytes, least_bytes) for s in self.servers)
        n_hops = max(1.0, self.model.n_blocks / max(n_held, 1))
        n_blocks, context = self.model.n_blocks, self.servers[0].decode_context_tokens

        def on_chain_s(rows: Matrix) -> float:
            return n_hops * median(time_s for row in rows for time_s in row)

        one_s = median(map(self.hub_s, range(len(self.clients)))) + on_chain_s(self.token_rtt_s)
        further_s = on_chain_s(self.further_token_s or ((0.0,),))
        return tuple(
            one_s
            + n * decoding.draft_token_s
            + (n_sent - 1) * further_s
            + n_blocks * median(server.extend_s(context, n_sent) for server in self.servers)
            for n, n_sent in enumerate(map(decoding.n_sent, range(decoding.tokens + 1)))
        )

    def as_seen(self, *, counts_drafts: bool) -> Problem:
        """Returns the problem without ``decoding``: ``by_token`` for policies that count drafts."""
        if self.decoding is None:
            return self
        return self.by_token if counts_drafts else replace(self, decoding=None)

    def stored(self, server: int) -> ModelSpec:
        """Returns the model with the bytes of its blocks on a server."""
        return self.servers[server].stored or self.model

    def hub_s(self, client: int) -> float:
        """Returns the seconds that a client computes per output token."""
        return self.hub_tokens_s[client] if self.hub_tokens_s else self.hub_token_s

    @property
    def has_hub_time(self) -> bool:
        """Whether any client computes."""
        return any(self.hub_tokens_s) or self.hub_token_s > 0

    @property
    def n_servers(self) -> int:
        return len(self.servers)

    def objectives_of(self, client: int) -> tuple[tuple[str, float], ...]:
        """Returns (metric, limit in seconds) that a client's requests should meet."""
        own = self.own_objectives_s[client] if self.own_objectives_s else None
        return self.objectives_s if own is None else own

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Mean (input, output) tokens of ``length_samples``, rounded up; the design lengths without any."""
        n = len(self.length_samples)
        if not n:
            return self.n_input_tokens, self.n_output_tokens
        n_input, n_output = (sum(column) for column in zip(*self.length_samples, strict=True))
        return -(-n_input // n), -(-n_output // n)

    def room_bytes(self, ranges: Sequence[BlockRange]) -> tuple[float, ...]:
        """Returns the room of every server: the bytes of its memory that blocks in these ranges leave.

        A server without blocks has no room, because no session can use it. Nor has one whose blocks exceed
        its memory.
        """
        return tuple(
            max(self.servers[j].memory_bytes - self.stored(j).range_bytes(held), 0.0)
            if held.n_blocks
            else 0.0
            for j, held in zip(range(self.n_servers), ranges, strict=False)  # ``check_placement`` counts them
        )

    @property
    def design_cache_bytes(self) -> float:
        """s_c at the design lengths, in bytes."""
        return self.model.cache_bytes(self.n_input_tokens + self.n_output_tokens)

    def up_s(self, client: int, server: int) -> float:
        """Returns the propagation delay in seconds from a client to a server."""
        if self.one_way is None:
            return self.raw_rtt_s[client][server] / 2
        return self.one_way.up_s[client][server]

    def down_s(self, client: int, server: int) -> float:
        """Returns the propagation delay in seconds from a server back to a client."""
        if self.one_way is None:
            return self.raw_rtt_s[client][server] / 2
        return self.one_way.down_s[client][server]

    def across_s(self, server: int, other: int) -> float:
        """Returns the propagation delay in seconds from a server to another one."""
        if self.one_way is None:
            return self.server_rtt_s[server][other] / 2
        return self.one_way.across_s[server][other]

    def input_rtt_s(self, client: int, server: int, n_tokens: int) -> float:
        """Returns t^I_cj(l): the part of a prompt's step on j that does not depend on its number of blocks."""
        return self.input_rtt_base_s[client][server] + self.input_rtt_slope_s[client][server] * n_tokens


@dataclass(frozen=True)
class Placement:
    """Which blocks each server holds: one range per server, and the room for caches there.

    ``cache_bytes[j]`` is what sessions may use on server j: ``M_j - s_m m_j`` for CG-BP, the fixed ``m_j *
    cache_per_block`` for PETALS. ``design_concurrency`` is |R|, the number of sessions that the placement is
    designed for, if it is for any. ``bounds`` contains figures that the policy computed or proved, by name.
    """

    policy: str
    ranges: tuple[BlockRange, ...]
    cache_bytes: tuple[float, ...]
    design_concurrency: int | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)

    def uncovered(self, n_blocks: int) -> list[int]:
        """Returns the blocks that no server holds, ascending."""
        held = {b for r in self.ranges for b in range(r.first, r.last)}
        return [b for b in range(n_blocks) if b not in held]


@dataclass(frozen=True)
class RequestSpec:
    """A request, as far as routing must know it. ``client`` is an index into ``Problem.clients``.

    ``held_tokens``: its servers hold cache for at least so many, as for all turns of a conversation.
    """

    client: int
    n_input_tokens: int
    n_output_tokens: int
    held_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        return self.n_input_tokens + self.n_output_tokens

    @property
    def cache_tokens(self) -> int:
        """The tokens that each of its servers reserves cache for."""
        return max(self.n_tokens, self.held_tokens)


class Hop(NamedTuple):
    """One server of a chain and the blocks ``[first, last)`` that it processes for the session."""

    server: int
    first: int
    last: int

    @property
    def n_blocks(self) -> int:
        return self.last - self.first

    @property
    def blocks(self) -> range:
        return range(self.first, self.last)


class Route(NamedTuple):
    """A chain of servers that covers ``[0, n_blocks)``.

    ``wait_s`` is the longest wait for cache among its hops, as the policy expects it (0: there is room
    everywhere now). ``cost_s`` is the value that the policy minimised.
    """

    hops: tuple[Hop, ...]
    wait_s: float
    cost_s: float


def hop_times_s(
    problem: Problem, request: RequestSpec, previous: int | None, server: int
) -> tuple[float, float]:
    """Returns a hop's seconds that do not depend on its blocks: (for the prompt, for every further token).

    Hub-spoke: t^I_cj(l) and t_cj. Forwarding: the round trip's propagation is replaced by the one-way
    delay from ``previous`` (``None``: the client). If the problem has ``transmissions``, the transmission is
    replaced likewise. All else in t_cj stays.
    """
    input_s = hop_input_s(problem, request, previous, server)
    return input_s, hop_token_s(problem, request.client, previous, server)


def hop_input_s(problem: Problem, request: RequestSpec, previous: int | None, server: int) -> float:
    """Returns the seconds for the prompt (``hop_times_s``)."""
    client = request.client
    input_s = problem.input_rtt_s(client, server, request.n_input_tokens)
    if problem.forwarding:
        input_s -= _saved_s(problem, client, previous, server)
        if (sent := problem.transmissions) is not None:
            input_s += sent.instead_s(client, previous, server, request.n_input_tokens)
    return input_s


def hop_token_s(problem: Problem, client: int, previous: int | None, server: int) -> float:
    """Returns the seconds for every further token (``hop_times_s``)."""
    token_s = problem.token_rtt_s[client][server]
    if problem.forwarding:
        n_sent, n_made = problem.shared
        token_s -= _saved_s(problem, client, previous, server) / n_made
        if (sent := problem.transmissions) is not None:
            token_s += sent.instead_s(client, previous, server, n_sent) / n_made
    return token_s


def _saved_s(problem: Problem, client: int, previous: int | None, server: int) -> float:
    """Returns by how many seconds the way to a server is shorter than the round trip to the client."""
    way_s = problem.up_s(client, server) if previous is None else problem.across_s(previous, server)
    return problem.raw_rtt_s[client][server] - way_s


def return_times_s(problem: Problem, request: RequestSpec, server: int) -> tuple[float, float]:
    """Returns the seconds from the last server back to the client: (for the prompt, for every further token).

    Both are 0 with hub-spoke, where the hops contain them.
    """
    if not problem.forwarding:
        return 0.0, 0.0
    client, sent = request.client, problem.transmissions
    n_sent, n_made = problem.shared
    way_s = problem.down_s(client, server)
    if sent is None:
        return way_s, way_s / n_made
    input_s, token_s = (sent.down.of(client, server, n) for n in (request.n_input_tokens, n_sent))
    return way_s + input_s, (way_s + token_s) / n_made


def returns_s(problem: Problem, request: RequestSpec, server: int) -> float:
    """Returns the seconds that all tokens of a request together take from the last server to the client."""
    input_s, token_s = return_times_s(problem, request, server)
    return input_s + (request.n_output_tokens - 1) * token_s


def service_s(problem: Problem, request: RequestSpec, hops: Sequence[Hop]) -> tuple[float, float]:
    """Returns the modelled seconds of a request on a chain: (until its first token, until its last one).

    Without queueing, session setup and contention. With ``Problem.decoding``, the mean over all that drafts may come to,
    as if no round had to be cut at the request's end (``Problem.by_token``). First token: the sum over hops of t^I_cj + k_j tau^I_j.
    Last token: that plus ``(l_out - 1) * sum(t_cj + k_j tau_j)``, with tau_j at the request's own mean
    context. For forwarding see ``hop_times_s``. Every token also takes ``hub_s``.
    """
    prefill, problem = problem.hub_s(request.client), problem.by_token
    decode = problem.hub_s(request.client)
    n_input = request.n_input_tokens
    previous: int | None = None
    for hop in hops:
        server = problem.servers[hop.server]
        input_s, token_s = hop_times_s(problem, request, previous, hop.server)
        prefill += input_s
        prefill += server.prefill_of_s(request.n_input_tokens, hop.blocks)
        decode += token_s + server.mean_decode_of_s(n_input, request.n_output_tokens - 1, hop.blocks)
        previous = hop.server
    if previous is not None:
        input_s, token_s = return_times_s(problem, request, previous)
        prefill, decode = prefill + input_s, decode + token_s
    return prefill, prefill + (request.n_output_tokens - 1) * decode


def round_times_s(problem: Problem, request: RequestSpec, hops: Sequence[Hop]) -> RoundTimes:
    """Returns how long rounds of speculative decoding take a request on a chain: see ``decode_step_s``."""
    return tuple(
        decode_step_s(problem, request, hops, request.n_input_tokens, n) for n in range(MOST_TOKENS + 1)
    )


def decode_step_s(
    problem: Problem, request: RequestSpec, hops: Sequence[Hop], cached_tokens: int, n_drafted: int = 0
) -> float:
    """Returns the modelled seconds of a decode step with ``cached_tokens`` in the caches (``service_s``).

    With ``Problem.decoding`` it is a round with ``n_drafted`` drafted tokens.
    """
    step_s, n_sent = problem.hub_s(request.client), 1
    if problem.decoding is not None:
        n_sent = problem.decoding.n_sent(n_drafted)
        step_s += n_drafted * problem.decoding.draft_token_s
        problem = replace(problem, decoding=None, shared=SharedRounds(n_sent))
    previous: int | None = None
    for hop in hops:
        step_s += hop_times_s(problem, request, previous, hop.server)[1]
        server = problem.servers[hop.server]
        if n_sent == 1:
            step_s += server.decode_of_s(cached_tokens, hop.blocks)
        else:
            if problem.further_token_s:
                step_s += (n_sent - 1) * problem.further_token_s[request.client][hop.server]
            step_s += server.extend_of_s(cached_tokens, n_sent, hop.blocks)
        previous = hop.server
    return step_s + (0.0 if previous is None else return_times_s(problem, request, previous)[1])
