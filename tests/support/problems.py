"""Small problems for tests of policies: hand-made ones and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from policies import BlockRange, Hop, ModelSpec, Placement, Problem, RequestSpec, ServerSpec, SystemState
from policies.problem import Linear, Transmissions


def make_problem(
    memory: Sequence[float],
    *,
    n_blocks: int = 4,
    block_bytes: float = 10.0,
    cache_bytes_per_token: float = 0.5,
    decode_s: Sequence[float] | None = None,
    rtt_s: Sequence[Sequence[float]] | None = None,
    input_rtt_s: float = 0.0,
    prefill_slope_s: float = 0.0,
    server_rtt_s: Sequence[Sequence[float]] | None = None,
    n_input_tokens: int = 1,
    n_output_tokens: int = 1,
    request_rate: float = 1.0,
    join_order: Sequence[int] | None = None,
    block_caps: Sequence[int | None] | None = None,
    hardware: Sequence[str] | None = None,
    forward_rps: Sequence[float] | None = None,
    petals_cache_tokens: int = 4,
) -> Problem:
    """Servers of ``memory`` bytes; s_c is ``cache_bytes_per_token * (n_input + n_output)``."""
    n = len(memory)
    rtt = tuple(tuple(row) for row in (rtt_s if rtt_s is not None else [[0.1] * n]))
    decode = decode_s or [0.01] * n
    caps = block_caps or [None] * n
    kinds = hardware or ["gpu"] * n
    forward = forward_rps or [100.0] * n
    return Problem(
        # hidden_size 0: PETALS keeps no memory for autograd, which is a matter of GiB.
        model=ModelSpec(
            "tiny", n_blocks, 0, block_bytes, cache_bytes_per_token, petals_cache_tokens=petals_cache_tokens
        ),
        servers=tuple(
            ServerSpec(
                f"s{j}", kinds[j], memory[j], decode[j], 0.0, prefill_slope_s, forward[j], 1e9, caps[j]
            )
            for j in range(n)
        ),
        clients=tuple(f"c{c}" for c in range(len(rtt))),
        raw_rtt_s=rtt,
        token_rtt_s=rtt,
        input_rtt_base_s=tuple((input_rtt_s,) * n for _ in rtt),
        input_rtt_slope_s=tuple((0.0,) * n for _ in rtt),
        server_rtt_s=tuple(tuple(r) for r in (server_rtt_s or [[0.02] * n for _ in range(n)])),
        n_input_tokens=n_input_tokens,
        n_output_tokens=n_output_tokens,
        request_rate=request_rate,
        join_order=tuple(join_order if join_order is not None else range(n)),
    )


def placed(problem: Problem, ranges: Sequence[tuple[int, int]], cache: Sequence[float]) -> Placement:
    return Placement("by hand", tuple(BlockRange(*r) for r in ranges), tuple(cache))


def with_one_for_all(problem: Problem, cache_bytes: float) -> Problem:
    """The problem, with a first server that holds the whole model and ``cache_bytes`` of caches for each block."""
    memory_bytes = problem.model.n_blocks * (problem.model.block_bytes + cache_bytes)
    first = replace(problem.servers[0], memory_bytes=memory_bytes, block_cap=None)
    return replace(problem, servers=(first, *problem.servers[1:]))


@st.composite
def problems(
    draw: st.DrawFn, max_servers: int = 6, max_blocks: int = 10, max_memory: int = 120, **fixed: Any
) -> Problem:
    """Up to six servers of up to three kinds, up to three clients, up to ten blocks."""
    n = draw(st.integers(1, max_servers))
    kinds = draw(st.lists(st.tuples(st.integers(5, max_memory), st.integers(1, 30)), min_size=1, max_size=3))
    chosen = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=n, max_size=n))
    rtt = st.lists(st.integers(1, 200).map(lambda ms: ms / 1e3), min_size=n, max_size=n)
    values: dict[str, Any] = {
        "memory": [float(kinds[k][0]) for k in chosen],
        "decode_s": [kinds[k][1] / 1e3 for k in chosen],
        "hardware": [f"kind-{k}" for k in chosen],
        "n_blocks": draw(st.integers(1, max_blocks)),
        "cache_bytes_per_token": draw(st.sampled_from([0.05, 0.125, 0.3])),
        "rtt_s": draw(st.lists(rtt, min_size=1, max_size=3)),
        "server_rtt_s": draw(st.lists(rtt, min_size=n, max_size=n)),
        "input_rtt_s": 0.05,
        "prefill_slope_s": 0.002,
        "n_input_tokens": draw(st.integers(1, 4)),
        "n_output_tokens": draw(st.integers(2, 6)),
        "join_order": draw(st.permutations(range(n))),
        "block_caps": draw(st.lists(st.sampled_from([None, None, 1, 3]), min_size=n, max_size=n)),
        "forward_rps": draw(st.lists(st.sampled_from([50.0, 90.0, 333.3]), min_size=n, max_size=n)),
        "petals_cache_tokens": 10,
    }
    return make_problem(**{**values, **fixed})


def linear(token_s: Sequence[Sequence[float]]) -> Linear:
    """Transmissions of one hidden state, a quarter of which is for the first one alone."""
    base_s, slope_s = (tuple(tuple(t * ratio for t in row) for row in token_s) for ratio in (1 / 4, 3 / 4))
    return Linear(base_s, slope_s)


def forwarded(problem: Problem, *, over_links: bool = False) -> Problem:
    """The same with server-to-server forwarding; its communication is propagation and 50 ms, as in the field.

    ``over_links``: part of the 50 ms is transmission, different on every link.
    """
    n = problem.n_servers
    return replace(
        problem,
        forwarding=True,
        transmissions=Transmissions(
            up=linear([[j / 512 for j in range(n)] for _ in problem.clients]),
            down=linear([[(c + j) / 1024 for j in range(n)] for c in range(len(problem.clients))]),
            across=linear([[(i + 2 * j) / 2048 for j in range(n)] for i in range(n)]),
            counts_down=True,
        )
        if over_links
        else None,
        token_rtt_s=tuple(tuple(t + 0.05 for t in row) for row in problem.raw_rtt_s),
        input_rtt_base_s=tuple(tuple(t + 0.05 for t in row) for row in problem.raw_rtt_s),
    )


@st.composite
def placements(draw: st.DrawFn, problem: Problem) -> Placement:
    """Any ranges at all, empty ones and gaps included, with any cache room."""
    blocks = st.integers(0, problem.model.n_blocks)
    pair = st.tuples(blocks, blocks).map(lambda p: (min(p), max(p)))
    n = problem.n_servers
    ranges = draw(st.lists(pair, min_size=n, max_size=n))
    cache = draw(st.lists(st.integers(0, 60).map(float), min_size=n, max_size=n))
    return placed(problem, ranges, cache)


@st.composite
def states(draw: st.DrawFn, problem: Problem, placement: Placement) -> SystemState:
    """Sessions that hold cache at time 0, more than there is room for included."""
    state = SystemState(placement.cache_bytes)
    for key in range(draw(st.integers(0, 8))):
        server = draw(st.integers(0, problem.n_servers - 1))
        n_blocks = draw(st.integers(1, problem.model.n_blocks))
        ends_at_s = draw(st.integers(1, 40)) / 4
        state.open(key, [Hop(server, 0, n_blocks)], draw(st.sampled_from([0.5, 1.0, 2.5])), ends_at_s)
    return state


@st.composite
def requests(draw: st.DrawFn, problem: Problem) -> RequestSpec:
    client = draw(st.integers(0, len(problem.clients) - 1))
    return RequestSpec(client, draw(st.integers(1, 4)), draw(st.integers(1, 6)))


def every_chain(placement: Placement, n_blocks: int) -> list[tuple[Hop, ...]]:
    """All chains from block 0 to the last, found by trying everything."""
    chains: list[tuple[Hop, ...]] = []

    def extend(hops: tuple[Hop, ...], position: int) -> None:
        if position == n_blocks:
            chains.append(hops)
            return
        for j, (first, last) in enumerate(placement.ranges):
            if first <= position < last:
                extend((*hops, Hop(j, position, last)), last)

    extend((), 0)
    return chains
