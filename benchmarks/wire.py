"""`python -m benchmarks wire DIR`: what narrower hidden states do to the tokens of the model in ``DIR``, and what zlib saves.

The blocks are held by as many servers as ``--servers`` states, so that hidden states are sent that many times and back.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.speculation import PROMPTS
from nodes.blocks.spec import BlocksSpec, HubSpec, WeightSource
from nodes.compute import open_session
from nodes.request import Generation, Request
from policies.problem import Wire
from testbed.experiments.checkpoints import read_config

WIRES: tuple[Wire | None, ...] = (None, "fp16", "int8")


async def texts(
    folder: str, wire: Wire | None, dtype: str, n_servers: int, n_tokens: int
) -> tuple[list[list[int]], list[bytes], list[bytes]]:
    """Returns the greedy tokens after each of the prompts, and all payloads that were sent, those of prompts first."""
    from nodes.blocks.compute import BlocksCompute
    from nodes.blocks.hub import BlocksHub
    from nodes.blocks.text import Text

    source = WeightSource(read_config(folder), folder)
    n_blocks = source.config["num_hidden_layers"]
    ends = [n_blocks * i // n_servers for i in range(n_servers + 1)]
    servers = [
        BlocksCompute(BlocksSpec(source, dtype=dtype, n_threads=2, wire=wire)) for _ in range(n_servers)
    ]
    for i, server in enumerate(servers):
        await server.host(ends[i], ends[i + 1])
    hub, text = BlocksHub(HubSpec(source, dtype=dtype, n_threads=2, wire=wire)), Text(Path(folder))
    made: list[list[int]] = []
    of_prompts: list[bytes] = []
    of_tokens: list[bytes] = []
    for prompt in PROMPTS:
        ids = tuple(text.encode(prompt))
        sequence = hub.sequence(Request(0, 0.0, len(ids), n_tokens, Generation(ids)))
        sessions = [
            await open_session(server, "c", ends[i], ends[i + 1], len(ids) + n_tokens)
            for i, server in enumerate(servers)
        ]
        new: list[int] = []
        position = 0
        while len(new) < n_tokens:
            states = await sequence.embed()
            n_sent = len(states) // hub.token_bytes
            for server, session in zip(servers, sessions, strict=True):
                (of_tokens if position else of_prompts).append(states)
                states = (await server.step(session, position, n_sent, states, 0.0)).payload
            new += await sequence.take(states)
            position += n_sent
        made.append(new)
        for server, session in zip(servers, sessions, strict=True):
            server.close_session(session)
    hub.close()
    for server in servers:
        server.close()
    return made, of_prompts, of_tokens


def _zipped(payloads: Sequence[bytes]) -> str:
    began_s, n_bytes = time.process_time(), sum(map(len, payloads))
    ratio = sum(len(zlib.compress(payload, 1)) for payload in payloads) / n_bytes
    return f"{ratio:.1%} | {n_bytes / (time.process_time() - began_s) / 1e6:.0f} MB/s"


def table(folder: str, dtype: str, n_servers: int, n_tokens: int) -> Iterator[str]:
    """Yields a row per width of the wire."""
    yield (
        "| wire | bytes per token | tokens as without | before the first other one | prompts after zlib | | tokens after zlib | |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    whole: list[list[int]] = []
    for wire in WIRES:
        made, of_prompts, of_tokens = asyncio.run(texts(folder, wire, dtype, n_servers, n_tokens))
        whole = whole or made
        pairs = [list(zip(one, other, strict=True)) for one, other in zip(whole, made, strict=True)]
        n_same = sum(a == b for pair in pairs for a, b in pair)
        until = [next((i for i, (a, b) in enumerate(pair) if a != b), n_tokens) for pair in pairs]
        n_all = n_tokens * len(PROMPTS)
        yield (
            f"| {wire or f'as computed ({dtype})'} | {len(of_tokens[0]):,} | {n_same / n_all:.1%} | {sum(until) / n_all:.1%} "
            f"| {_zipped(of_prompts)} | {_zipped(of_tokens)} |"
        )


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wire", description=__doc__)
    parser.add_argument("folder", help="a checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    for line in table(options.folder, options.dtype, options.servers, options.tokens):
        print(line, flush=True)
    return 0
