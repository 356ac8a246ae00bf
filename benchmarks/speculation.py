"""What speculative decoding brings by network, acceptance and policy, and how near `tokens = "auto"` is to the best number.

``python -m benchmarks speculation prompts DIR`` drafts with a checkpoint's blocks, by prompt lookup; ``steps MODEL`` measures how
long blocks take for drafts (random weights of a shipped model).
``python -m benchmarks speculation [law] [tokens] [rtt] [policies] [flight]`` prints the tables of docs/speculation.md; all take
about 50 minutes of CPU, most of it ``flight``. Every run is simulated; the same drafted tokens agree in all runs of a table's row.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from nodes.blocks.files import read_config
from nodes.blocks.spec import BlocksSpec, HubSpec, Weights, WeightSource
from nodes.compute import Compute, open_session
from nodes.request import Generation, Request
from policies.decoding import Decoding, Seen
from testbed.control.placing import RememberedPlacements
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from testbed.studies.calibrate.backend import WEIGHTS, Device, hidden_states, open_blocks, read_source

HOMES = """
name = "homes"
[model]
profile = "llama-2-70b"
[hardware.home]
base = "helix-a100"
memory = "160 GiB"
[hardware.slow]
base = "helix-l4"
memory = "160 GiB"
[[servers]]
hardware = "home"
site = "A"
[[servers]]
hardware = "home"
site = "B"
[[servers]]
hardware = "slow"
site = "C"
[clients]
site = "D"
[network]
kind = "clusters"
pairs = [
    { from = "A", to = "D", delay = "15 ms", rate = "40 Mbit/s" },
    { from = "D", to = "A", delay = "15 ms", rate = "200 Mbit/s" },
    { from = "B", to = "D", delay = "20 ms", rate = "40 Mbit/s" },
    { from = "D", to = "B", delay = "20 ms", rate = "200 Mbit/s" },
    { from = "A", to = "B", delay = "15 ms", rate = "40 Mbit/s" },
    { from = "B", to = "A", delay = "15 ms", rate = "40 Mbit/s" },
    { sites = ["C", "D"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["A", "C"], rtt = "30 ms", rate = "40 Mbit/s" },
    { sites = ["B", "C"], rtt = "30 ms", rate = "40 Mbit/s" },
]
[workload]
arrivals = "poisson"
rate = 0.05
n_requests = 20
n_input_tokens = 64
n_output_tokens = 128
[policy]
name = "proposed"
"""
SCENARIOS: dict[str, tuple[str, ...]] = {
    "clustered": ("workload.n_requests=20",),
    "abovenet": ("workload.n_requests=20",),
    "helix-regions": (
        "policy.name=proposed",
        "workload.arrivals=poisson",
        "workload.rate=0.1",
        "workload.n_requests=10",
        "workload.n_input_tokens=64",
        "workload.n_output_tokens=128",
    ),
    "homes": (),
}
ACCEPTANCES = (0.0, 0.3, 0.5, 0.7, 0.9)
FIXED = (1, 2, 3, 5, 8, 12, 16)
_IN_FLIGHT = (1, 2, 3, 4, 5, 8, 11, 16)
_ROUNDS = 1_000_000
_PLACED = RememberedPlacements()


def loaded(scenario: str, *sets: str) -> Experiment:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "homes.toml"
        path.write_text(HOMES, encoding="utf-8")
        target = str(path) if scenario == "homes" else scenario
        return load_experiment(target, [*SCENARIOS[scenario], *sets])


def tpot_s(scenario: str, *sets: str) -> float:
    """Returns the mean seconds per token after the first."""
    rows = simulate(Case(loaded(scenario, *sets)), "testbed", placements=_PLACED).rows
    return fmean(row.times.tpot_s or 0.0 for row in rows)


def drafts(acceptance: float, tokens: int | str) -> tuple[str, ...]:
    return "decoding.drafter=ngram", f"decoding.acceptance={acceptance}", f"decoding.tokens={tokens}"


def law() -> Iterator[str]:
    """Yields a row per acceptance and number of drafted tokens: drawn tokens per round beside the formula."""
    yield "| acceptance | drafted | tokens per round, law | drawn | difference |"
    yield "| --- | --- | --- | --- | --- |"
    for acceptance in (0.0, 0.5, 0.7, 0.9, 1.0):
        for tokens in (1, 4, 16):
            decoding, n_done = Decoding("ngram", tokens, acceptance, seed=1), 1
            for _ in range(_ROUNDS):
                n_done += decoding.drawn(0, n_done, tokens).made
            expected, drawn = decoding.expected_tokens(), (n_done - 1) / _ROUNDS
            yield f"| {acceptance} | {tokens} | {expected:.4f} | {drawn:.4f} | {drawn / expected - 1:+.3%} |"


def tokens() -> Iterator[str]:
    """Yields a row per scenario and acceptance: no drafts, the best fixed number of tokens, and "auto"."""
    yield "| scenario | acceptance | no drafts, ms | best fixed | ms | auto, ms | auto to best | auto to none |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for scenario in SCENARIOS:
        plain_s = tpot_s(scenario)
        for acceptance in ACCEPTANCES:
            fixed = {n: tpot_s(scenario, *drafts(acceptance, n)) for n in FIXED}
            best = min(fixed, key=fixed.__getitem__)
            auto_s = tpot_s(scenario, *drafts(acceptance, "auto"))
            least_s = min(plain_s, fixed[best])
            yield (
                f"| {scenario} | {acceptance} | {plain_s * 1e3:.1f} | {best} | {fixed[best] * 1e3:.1f} | "
                f"{auto_s * 1e3:.1f} | {auto_s / least_s - 1:+.1%} | {auto_s / plain_s - 1:+.1%} |"
            )


def rtt() -> Iterator[str]:
    """Yields a row per scenario and round trip: how many times as fast tokens come, by acceptance."""
    yield f"| scenario | RTT | no drafts, ms | {' | '.join(f'a = {a}' for a in ACCEPTANCES[1:])} |"
    yield f"| --- | --- | --- | {' | '.join('---' for _ in ACCEPTANCES[1:])} |"
    for scenario in ("clustered", "homes"):
        for ms in (2, 10, 30, 100, 300):
            links = tuple(f"network.pairs.{pair}.rtt={ms} ms" for pair in (3, 4, 5))
            if scenario == "homes":
                links = tuple(f"network.pairs.{pair}.delay={ms / 2} ms" for pair in range(6))
            plain_s = tpot_s(scenario, *links)
            gains = (plain_s / tpot_s(scenario, *links, *drafts(a, "auto")) for a in ACCEPTANCES[1:])
            row = f"{plain_s * 1e3:.1f} | {' | '.join(f'{gain:.2f}' for gain in gains)}"
            yield f"| {scenario} | {ms} ms | {row} |"


def policies() -> Iterator[str]:
    """Yields a row per scenario and policy: milliseconds per token without drafts and with "auto"."""
    yield "| scenario | policy | no drafts, ms | a = 0.5 | a = 0.7 | a = 0.9 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for scenario in SCENARIOS:
        first = (
            "swarm" if scenario in ("helix-regions", "homes") else "petals"
        )  # PETALS' own measurements are not there
        for policy in (first, "helix", "proposed", "foresight"):
            chosen = f"policy.name={policy}"
            times_s = [
                tpot_s(scenario, chosen, *more)
                for more in ((), *(drafts(a, "auto") for a in ACCEPTANCES[2:]))
            ]
            yield f"| {scenario} | {policy} | {' | '.join(f'{time_s * 1e3:.1f}' for time_s in times_s)} |"


PROMPTS = (
    "The capital of France is",
    "Write a Python function that returns the sum of two numbers.\n\ndef",
    "Once upon a time, in a small village by the sea,",
    "List the days of the week: Monday, Tuesday,",
    "Question: What is photosynthesis?\nAnswer:",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Translate to French: I like apples. I like pears. I like",
    "Ingredients: flour, sugar, butter, eggs.\nSteps:\n1.",
    "In 1969, the first humans landed on the Moon.",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
)


def flight() -> Iterator[str]:
    """Yields a row per chain, acceptance and time per drafted token: what one, two and three rounds in flight bring.

    Each with the best fixed number of tokens, for requests that are alone.
    """
    yield "| chain | acceptance | `draft_token` | one round, ms | drafted | two, ms | drafted | saved | three, ms | drafted | saved |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    alone = "workload.n_requests=8", "workload.rate=0.005"
    hub_spoke, forwarding = "policy.communication=hub-spoke", "policy.communication=server-to-server"
    chains: list[tuple[str, str, tuple[str, ...]]] = [(name, name, (hub_spoke,)) for name in SCENARIOS]
    chains += [
        (f"{name}, `helix`", name, ("policy.name=helix", forwarding))
        for name in ("clustered", "helix-regions")
    ]
    for chain, scenario, chosen in chains:
        for acceptance in ACCEPTANCES[2:]:
            for draft in ("0 ms", "12 ms"):
                how = *alone, *chosen, f"decoding.draft_token={draft}"
                one, two, three = (
                    min(
                        (tpot_s(scenario, *how, *drafts(acceptance, n), f"decoding.in_flight={most}"), n)
                        for n in _IN_FLIGHT
                    )
                    for most in (1, 2, 3)
                )
                cells = [f"{1e3 * one[0]:.1f} | {one[1]}"]
                cells += [f"{1e3 * tpot:.1f} | {n} | {1 - tpot / one[0]:.1%}" for tpot, n in (two, three)]
                yield f"| {chain} | {acceptance} | {draft} | {' | '.join(cells)} |"


async def _looked_up(folder: str, n_tokens: int, drafted: int) -> AsyncIterator[str]:
    from nodes.blocks.compute import BlocksCompute
    from nodes.blocks.hub import BlocksHub
    from nodes.blocks.text import Text

    source = WeightSource(read_config(Path(folder)), folder)
    n_blocks = source.config["num_hidden_layers"]
    compute = BlocksCompute(BlocksSpec(source, n_threads=2))
    await compute.host(0, n_blocks)
    text = Text(Path(folder))
    decoding = Decoding("ngram", drafted, 0.5)
    for prompt in PROMPTS:
        ids, outputs, figures = tuple(text.encode(prompt)), [], (0, 0, 0)
        for how in (None, decoding):
            hub = BlocksHub(HubSpec(source, n_threads=2, decoding=how))
            sequence = hub.sequence(Request(0, 0.0, len(ids), n_tokens, Generation(ids)))
            session = await open_session(compute, "c", 0, n_blocks, len(ids) + n_tokens)
            made: list[int] = []
            position, n_rounds, seen = 0, 0, Seen()
            while len(made) < n_tokens:
                n_drafted = 0
                if how is not None and position:
                    n_drafted = await sequence.draft(how.n_drafted(n_tokens - len(made), (), seen))
                    n_rounds += 1
                states = await sequence.embed()
                n_sent = len(states) // hub.token_bytes
                new = await sequence.take(
                    (await compute.step(session, position, n_sent, states, 0.0)).payload
                )
                seen.add(n_drafted, sequence.n_accepted)
                position += len(new) if position else n_sent
                made += new
            compute.close_session(session)
            hub.close()
            outputs.append(made)
            figures = n_rounds, seen.n_accepted, seen.n_tested
        n_rounds, n_accepted, n_tested = figures
        same = "yes" if outputs[0] == outputs[1] else "no"
        rate = f"{n_accepted / n_tested:.2f}" if n_tested else "-"
        yield f"| {prompt.splitlines()[0]} | {(n_tokens - 1) / n_rounds:.2f} | {rate} | {same} |"
    compute.close()


def prompts(folder: str, n_tokens: int = 48, drafted: int = 5) -> Iterator[str]:
    """Yields a row per prompt: what prompt lookup brings the model in ``folder``, and whether its tokens stay."""
    yield "| prompt | tokens per round | acceptance | same tokens |"
    yield "| --- | --- | --- | --- |"

    async def all_rows() -> list[str]:
        return [row async for row in _looked_up(folder, n_tokens, drafted)]

    yield from asyncio.run(all_rows())


def steps(model: str) -> Iterator[str]:
    """Yields a row per kind of weights, cached and drafted tokens: how long two blocks take beside the law, on one CPU."""
    yield "| weights | cached | tokens | decode | prompt of so many | measured | law's error |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    source = read_source(model, random_weights=True)

    async def took_ms(compute: Compute, cached: int, n_tokens: int) -> float:
        found = []
        for _ in range(8):
            session = await open_session(compute, "c", 0, 2, cached + n_tokens)
            if cached:
                await compute.step(session, 0, cached, states(cached), 0.0)
            began_at_s = time.perf_counter()
            await compute.step(session, cached, n_tokens, states(n_tokens), 0.0)
            found.append(time.perf_counter() - began_at_s)
            compute.close_session(session)
        return 500 * median(found[1:])

    def states(n_tokens: int) -> bytes:
        return hidden_states(n_tokens, source.sizes.hidden_size, "float32")

    async def rows(weights: Weights, cached: int) -> list[str]:
        compute, _ = open_blocks(source, Device("cpu", "float32", weights, 1, 1))
        await compute.host(0, 2)
        decode_ms, found = await took_ms(compute, cached, 1), []
        for n_tokens in (2, 3, 5, 9, 17, 33):
            prompt_ms = await took_ms(compute, 0, n_tokens)
            measured_ms = await took_ms(compute, cached, n_tokens)
            error = max(decode_ms, prompt_ms) / measured_ms - 1
            times = " | ".join(f"{ms:.1f}" for ms in (decode_ms, prompt_ms, measured_ms))
            found.append(f"| {weights} | {cached} | {n_tokens} | {times} | {error:+.0%} |")
        compute.close()
        return found

    for weights in WEIGHTS:
        for cached in (100, 400):
            yield from asyncio.run(rows(weights, cached))


TABLES = {"law": law, "tokens": tokens, "rtt": rtt, "policies": policies, "flight": flight}
OF_BLOCKS: dict[str, Callable[[str], Iterator[str]]] = {"prompts": prompts, "steps": steps}


def run(arguments: Sequence[str]) -> int:
    """Prints the tables named, or all; ``prompts DIR`` and ``steps MODEL``: those of real blocks."""
    if arguments and arguments[0] in OF_BLOCKS:
        print("\n".join(OF_BLOCKS[arguments[0]](arguments[1])))
        return 0
    for name in arguments or TABLES:
        for line in TABLES[name]():
            print(line, flush=True)
        print()
    return 0
