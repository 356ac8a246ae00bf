"""A row per token and hop: ``hops.parquet``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from nodes.records import BATCH
from testbed.records.base import Record, column, columns_of

_BATCHED = 'with `compute.batching = "continuous"`'


class HopRow(Record, kw_only=True):
    """One visit of a token's hidden state to one server, or a replay. Instants and times are scenario seconds."""

    request: Annotated[int, column("the request's number")]
    token: Annotated[int, column("the output token's number, from 0; token 0 is the prefill")]
    hop: Annotated[int, column("the hop's number in the chain, from 0")]
    server: Annotated[str, column("name of the server")]
    first_block: Annotated[int, column("first block that it computed, from 0")]
    last_block: Annotated[int, column("the block after the last one that it computed")]
    sent_at_s: Annotated[float, column("instant at which the message was sent to the server", "s")]
    arrived_at_s: Annotated[float, column("instant at which it had arrived there", "s")]
    departed_at_s: Annotated[float, column("instant at which the server sent its result", "s")]
    received_at_s: Annotated[float, column("instant at which the result had arrived", "s")]
    up_bytes: Annotated[
        int,
        column("size of the hidden states that were sent to the server, without frames and headers", "bytes"),
    ]
    down_bytes: Annotated[
        int,
        column(
            "size of those that came back, likewise; 0 if the server sent them on to another one", "bytes"
        ),
    ]
    replayed_tokens: Annotated[
        int, column("tokens of the session's history that the message replayed; 0: it was no replay")
    ]
    hop_client_s: Annotated[
        float,
        column(
            "part of the hop's time in the client; below 0 for a round of drafts that was sent ahead ([speculation.md](speculation.md))",
            "s",
        ),
    ]
    hop_network_s: Annotated[float, column("part on the network, both ways", "s")]
    hop_compute_s: Annotated[float, column("part at the server, from its receive to its send", "s")]
    model_network_s: Annotated[float, column("the closed model's time on the network", "s")]
    model_link_queue_s: Annotated[
        float, column("part of `model_network_s`: waiting behind other messages on the links", "s")
    ]
    model_compute_s: Annotated[float, column("the closed model's time at the server", "s")]
    batch_steps: Annotated[
        int | UnsetType,
        column(
            "how many sessions' steps were in the server's step, at most one of them a prompt's (or a replay's)",
            engines=_BATCHED,
        ),
    ] = UNSET
    batch_tokens: Annotated[
        int | UnsetType,
        column(
            "their tokens: one of each decode (with `[decoding]` those that it verifies), and those of the prompt or its "
            "chunk",
            engines=_BATCHED,
        ),
    ] = UNSET
    batch_context_tokens: Annotated[
        int | UnsetType,
        column(
            "tokens that the decodes had in their caches before, summed: the sum that `context_slope` is for",
            engines=_BATCHED,
        ),
    ] = UNSET
    batch_prompt_end: Annotated[
        int | UnsetType,
        column(
            "where the prompt's tokens end, counted from the session's first; 0: no prompt. Without `[decoding]` there are "
            "`batch_tokens` - `batch_steps` + 1 of them, and `batch_steps` - 1 decodes",
            engines=_BATCHED,
        ),
    ] = UNSET
    batch_blocks: Annotated[
        int | UnsetType, column("k, the number of blocks of the longest of these steps", engines=_BATCHED)
    ] = UNSET
    batch_began_at_s: Annotated[
        float | UnsetType, column("instant at which the step began", "s", engines=_BATCHED)
    ] = UNSET
    model_client_s: Annotated[
        float | UnsetType,
        column("the closed model's time in the client", "s", engines="where `compute.hub_token` is not 0"),
    ] = UNSET


def hop_columns(*, is_batched: bool, has_client: bool) -> dict[str, tuple[Any, Meta]]:
    """Return the columns of ``hops.parquet`` in order: (type, meaning) by name.

    ``is_batched``: those of the batch are among them. ``has_client``: so is ``model_client_s``.
    """
    left_out = {*(() if is_batched else BATCH), *(() if has_client else ("model_client_s",))}
    return {name: about for name, about in columns_of(HopRow).items() if name not in left_out}
