"""The placement-and-routing problem: what every policy sees and what it answers.

Pure data. Times are float seconds, sizes are bytes, blocks are ``0..n_blocks-1`` and ranges are
half-open. Server and client arguments are indices into ``Problem.servers`` and ``Problem.clients``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from policies.steps import StepLaw

Matrix = tuple[tuple[float, ...], ...]
Batching = Literal["none", "serial", "continuous"]


class PolicyError(Exception):
    """A policy cannot answer, or broke a rule. The message is one sentence for the user."""


class InfeasiblePlacement(PolicyError):
    """No placement of this policy holds every block of the model on these servers."""


class BlockRange(NamedTuple):
    """Consecutive blocks ``[first, last)``; ``first == last`` means none.

    The paper's a_j is ``first + 1`` and its m_j is ``n_blocks``.
    """

    first: int
    last: int

    @property
    def n_blocks(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class ModelSpec:
    """A transformer as placement sees it.

    ``n_blocks`` is L, ``block_bytes`` is s_m. ``cache_bytes_per_token`` is the attention cache of one
    token in one block, so that s_c of a request is ``cache_bytes_per_token * (l_in + l_out)``.
    """

    name: str
    n_blocks: int
    hidden_size: int
    block_bytes: float
    cache_bytes_per_token: float
    value_bytes: int = 2
    petals_cache_tokens: int = 4096

    @property
    def token_bytes(self) -> int:
        """Size of one token's hidden state on the wire."""
        return self.hidden_size * self.value_bytes

    @property
    def petals_cache_bytes(self) -> float:
        """Attention cache that PETALS reserves per hosted block (``cache_per_block``)."""
        return self.cache_bytes_per_token * self.petals_cache_tokens

    @property
    def petals_autograd_bytes(self) -> float:
        """Memory that PETALS keeps free for autograd: 2 GiB x hidden_size / 14336."""
        return 2 * 1024**3 * self.hidden_size / 14336

    def cache_bytes(self, n_tokens: int) -> float:
        """s_c: attention cache of one block for one session of ``n_tokens`` tokens in all."""
        return self.cache_bytes_per_token * n_tokens


@dataclass(frozen=True)
class ServerSpec(StepLaw):
    """A server's capacity: ``memory_bytes`` is M_j; ``StepLaw`` says what the times mean (``decode_s`` is tau_j).

    ``block_cap`` limits the number of blocks where a policy honours it (the reference simulator caps
    MIG servers at 4). ``petals_*`` are PETALS' own throughput measurements, in tokens per second.

    Beyond the paper's model, all 0 by default: ``decode_context_tokens`` is the mean over a request of the
    lengths that placement is designed for. Policies see ``step_base_s`` in ``Problem.token_rtt_s`` and
    ``input_rtt_base_s``; no policy knows of ``contention_ratio``.
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

    def mean_decode_s(self, request: RequestSpec) -> float:
        """Decode time per block, averaged over the further tokens of ``request``."""
        if not self.context_slope_s:
            return self.decode_s
        return self.decode_at_s(mean_cached_tokens(request.n_input_tokens, request.n_output_tokens))


def mean_cached_tokens(n_input_tokens: int, n_output_tokens: int) -> float:
    """Tokens cached before a decode step, averaged over a request: l_in to l_in + l_out - 2."""
    return n_input_tokens + max(0, n_output_tokens - 2) / 2


class Linear(NamedTuple):
    """Seconds for l hidden states from row to column: ``base_s + slope_s * l``."""

    base_s: Matrix
    slope_s: Matrix

    def of(self, row: int, column: int, n_tokens: int) -> float:
        return self.base_s[row][column] + self.slope_s[row][column] * n_tokens


@dataclass(frozen=True)
class Transmissions:
    """What hidden states take on each link beside propagation: client to server, back, server to server.

    ``counts_down``: t_cj and t^I_cj count both ways on the client's link; else the one to the server.
    """

    up: Linear
    down: Linear
    across: Linear
    counts_down: bool

    def instead_s(self, client: int, previous: int | None, server: int, n_tokens: int) -> float:
        """The way from ``previous`` (``None``: the client) less what t_cj, t^I_cj count."""
        up_s = self.up.of(client, server, n_tokens)
        sent_s = up_s if previous is None else self.across.of(previous, server, n_tokens)
        return sent_s - up_s - (self.down.of(client, server, n_tokens) if self.counts_down else 0.0)


class Ways(NamedTuple):
    """Propagation in one direction, in seconds: client to server, back (both [client][server]), server to server."""

    up_s: Matrix
    down_s: Matrix
    across_s: Matrix


@dataclass(frozen=True)
class Problem:
    """Servers, clients, the model, and the times between them.

    ``raw_rtt_s[c][j]`` is pure propagation; ``token_rtt_s[c][j]`` is t_cj (what one decode step on j takes
    however many blocks it has: communication, serialisation, the server's ``step_base_s``);
    ``input_rtt_base_s + input_rtt_slope_s * l`` is t^I_cj(l).
    ``server_rtt_s[i][j]`` is the raw RTT between servers. ``ways`` is propagation in one direction; ``None``: half
    of the round trip. ``n_input_tokens`` and
    ``n_output_tokens`` are the lengths that placement is designed for (the maxima).
    ``length_samples`` are (input, output) lengths of past requests, as an operator knows them; none: nothing is known
    but these maxima. ``reserved_output_tokens`` is the output that every session's caches have room for, or, where caches
    grow, probably will have; ``None``: as much as comes. ``request_rate`` is lambda in requests per second, all clients together.
    ``join_order`` is the order in which servers join under PETALS. ``forwarding``: servers send hidden
    states straight to the next server and the last one to the client; otherwise (hub-spoke) every hop
    goes through the client. ``transmissions``, for forwarding, are those of the links; ``None``: what t_cj has
    beyond propagation stands for them. ``hub_token_s`` is what the client itself computes per output token
    (embedding, head, choice): the same for every chain, so it is in ``service_s`` and in no policy's choice.
    ``batching`` is how a server computes several sessions: "none", each as if alone; "serial", one step after another;
    "continuous", all that wait in one step (``StepLaw.batch_s``). ``objectives_s`` are (metric, limit in seconds) that
    requests should meet: queue, ttft, tpot, per_token, e2e; others are not for policies.
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
    length_samples: tuple[tuple[int, int], ...] = ()
    reserved_output_tokens: int | None = None
    batching: Batching = "none"
    objectives_s: tuple[tuple[str, float], ...] = ()
    ways: Ways | None = None

    @property
    def n_servers(self) -> int:
        return len(self.servers)

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Input and output of a mean request in whole tokens, rounded up; the design lengths if no more is known."""
        n = len(self.length_samples)
        if not n:
            return self.n_input_tokens, self.n_output_tokens
        n_input, n_output = (sum(column) for column in zip(*self.length_samples, strict=True))
        return -(-n_input // n), -(-n_output // n)

    def free_bytes(self, ranges: Sequence[BlockRange]) -> tuple[float, ...]:
        """What blocks in these ranges leave of every server's memory."""
        return tuple(
            server.memory_bytes - self.model.block_bytes * held.n_blocks
            for server, held in zip(self.servers, ranges, strict=True)
        )

    @property
    def design_cache_bytes(self) -> float:
        """s_c at the design lengths."""
        return self.model.cache_bytes(self.n_input_tokens + self.n_output_tokens)

    def up_s(self, client: int, server: int) -> float:
        """Propagation from a client to a server."""
        if self.ways is None:
            return self.raw_rtt_s[client][server] / 2
        return self.ways.up_s[client][server]

    def down_s(self, client: int, server: int) -> float:
        """Propagation from a server back to a client."""
        if self.ways is None:
            return self.raw_rtt_s[client][server] / 2
        return self.ways.down_s[client][server]

    def across_s(self, server: int, other: int) -> float:
        """Propagation from a server to another."""
        if self.ways is None:
            return self.server_rtt_s[server][other] / 2
        return self.ways.across_s[server][other]

    def input_rtt_s(self, client: int, server: int, n_tokens: int) -> float:
        """t^I_cj(l): what a prompt of ``n_tokens`` tokens takes on j however many blocks: as ``token_rtt_s``."""
        return self.input_rtt_base_s[client][server] + self.input_rtt_slope_s[client][server] * n_tokens


@dataclass(frozen=True)
class Placement:
    """Where the blocks are: one range per server, and the cache room that the policy leaves there.

    ``cache_bytes[j]`` is what sessions may use on server j: ``M_j - s_m m_j`` for CG-BP, the fixed
    ``m_j * cache_per_block`` for PETALS. ``bounds`` holds what the policy can prove, by name.
    """

    policy: str
    ranges: tuple[BlockRange, ...]
    cache_bytes: tuple[float, ...]
    design_concurrency: int | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)

    def uncovered(self, n_blocks: int) -> list[int]:
        """Blocks that no server holds."""
        held = {b for r in self.ranges for b in range(r.first, r.last)}
        return [b for b in range(n_blocks) if b not in held]


@dataclass(frozen=True)
class RequestSpec:
    """What routing needs to know of a request."""

    client: int
    n_input_tokens: int
    n_output_tokens: int

    @property
    def n_tokens(self) -> int:
        return self.n_input_tokens + self.n_output_tokens


class Hop(NamedTuple):
    """One server of a chain and the blocks ``[first, last)`` that it processes for the session."""

    server: int
    first: int
    last: int

    @property
    def n_blocks(self) -> int:
        return self.last - self.first


class Route(NamedTuple):
    """A chain of servers that covers ``[0, n_blocks)``.

    ``wait_s`` is the largest waiting time among its hops as the policy expects it (0: room
    everywhere now); ``cost_s`` is the value that the policy minimised.
    """

    hops: tuple[Hop, ...]
    wait_s: float
    cost_s: float


def hop_times_s(
    problem: Problem, request: RequestSpec, previous: int | None, server: int
) -> tuple[float, float]:
    """What one hop takes however many blocks it has: (for the prompt, for every further token).

    Hub-spoke: t^I_cj(l) and t_cj. Forwarding: the round trip's propagation is replaced by the one-way
    delay from ``previous`` (``None``: the client), and its transmission likewise if the problem tells the
    links' ``transmissions``; what else t_cj has beyond propagation stays.
    """
    client = request.client
    input_s = problem.input_rtt_s(client, server, request.n_input_tokens)
    token_s = problem.token_rtt_s[client][server]
    if not problem.forwarding:
        return input_s, token_s
    way_s = problem.up_s(client, server) if previous is None else problem.across_s(previous, server)
    less_s = problem.raw_rtt_s[client][server] - way_s
    input_s, token_s = input_s - less_s, token_s - less_s
    sent = problem.transmissions
    if sent is not None:
        input_s += sent.instead_s(client, previous, server, request.n_input_tokens)
        token_s += sent.instead_s(client, previous, server, 1)
    return input_s, token_s


def return_times_s(problem: Problem, request: RequestSpec, server: int) -> tuple[float, float]:
    """From the last server back to the client: (for the prompt, for every further token); 0 with hub-spoke."""
    if not problem.forwarding:
        return 0.0, 0.0
    client, sent = request.client, problem.transmissions
    way_s = problem.down_s(client, server)
    if sent is None:
        return way_s, way_s
    input_s, token_s = (sent.down.of(client, server, n) for n in (request.n_input_tokens, 1))
    return way_s + input_s, way_s + token_s


def returns_s(problem: Problem, request: RequestSpec, server: int) -> float:
    """All of a request's ways back from its last server together."""
    input_s, token_s = return_times_s(problem, request, server)
    return input_s + (request.n_output_tokens - 1) * token_s


def service_s(problem: Problem, request: RequestSpec, hops: Sequence[Hop]) -> tuple[float, float]:
    """Modelled (first-token, whole-request) time of a chain without queue and setup.

    First token: sum over hops of t^I_cj + k_j tau^I_j. All: that plus
    ``(l_out - 1) * sum(t_cj + k_j tau_j)``, tau_j at the request's own mean context; see ``hop_times_s``
    for forwarding. Every token also takes ``hub_token_s``. Contention is not counted.
    """
    prefill = decode = problem.hub_token_s
    previous: int | None = None
    for hop in hops:
        server = problem.servers[hop.server]
        input_s, token_s = hop_times_s(problem, request, previous, hop.server)
        prefill += input_s
        prefill += hop.n_blocks * server.prefill_s(request.n_input_tokens)
        decode += token_s + hop.n_blocks * server.mean_decode_s(request)
        previous = hop.server
    if previous is not None:
        input_s, token_s = return_times_s(problem, request, previous)
        prefill, decode = prefill + input_s, decode + token_s
    return prefill, prefill + (request.n_output_tokens - 1) * decode


def decode_step_s(problem: Problem, request: RequestSpec, hops: Sequence[Hop], cached_tokens: int) -> float:
    """Modelled time of one further token of a chain with ``cached_tokens`` in its caches; see ``service_s``."""
    step_s = problem.hub_token_s
    previous: int | None = None
    for hop in hops:
        step_s += hop_times_s(problem, request, previous, hop.server)[1]
        step_s += hop.n_blocks * problem.servers[hop.server].decode_at_s(cached_tokens)
        previous = hop.server
    return step_s + (0.0 if previous is None else return_times_s(problem, request, previous)[1])
