"""The hops of a run's tokens, measured and by the closed model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nodes.records import BATCH

Array = NDArray[np.float64]


class TokenSums(NamedTuple):
    """Columns with one row per token."""

    request: NDArray[np.int64]
    token: NDArray[np.int64]
    model_s: Array
    has_replay: NDArray[np.bool_]


def _none() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


@dataclass
class HopTable:
    """Columns with one row per token and hop, ordered by request and then as logged; scenario seconds.

    ``network_s`` is propagation, transmission and queueing on both links, ``model_link_queue_s`` only the
    queueing. ``compute_s`` includes the calibration's overheads.
    """

    request: NDArray[np.int64]
    token: NDArray[np.int64]
    hop: NDArray[np.int64]
    server: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    sent_at_s: Array
    arrived_at_s: Array
    departed_at_s: Array
    received_at_s: Array
    up_bytes: NDArray[np.int64]
    down_bytes: NDArray[np.int64]
    client_s: Array
    """The client's time before it sent this hop; its time after the last hop is ``tail_s``."""
    tail_s: Array
    model_network_s: Array
    model_link_queue_s: Array
    model_compute_s: Array
    replayed_tokens: NDArray[np.int64] = field(default_factory=_none)
    """Hidden states in a message of a replay; 0 in all other rows. Default: all 0."""
    batch_steps: NDArray[np.int64] = field(default_factory=_none)
    batch_tokens: NDArray[np.int64] = field(default_factory=_none)
    batch_context_tokens: NDArray[np.int64] = field(default_factory=_none)
    batch_prompt_end: NDArray[np.int64] = field(default_factory=_none)
    batch_blocks: NDArray[np.int64] = field(default_factory=_none)
    batch_began_at_s: Array = field(default_factory=lambda: np.zeros(0))
    """What the server computed together with this step (``nodes.batching.Composition``). Default: all 0."""
    model_client_s: Array = field(default_factory=lambda: np.zeros(0))
    """The client's computing for the token, in the row of its last hop. Default: all 0."""
    model_opened_at_s: dict[int, float] = field(default_factory=dict)
    """By request: when its chain should have been open, given when the client sent the opening."""
    model_attempts_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By request and number: the seconds that a refused attempt should have taken, where the model knows what its messages waited for."""
    model_links: Literal["in turn", "in parts"] = "in turn"
    """How the model's links carry messages: in turn, or in parts (``testbed.results.model_links``)."""
    links_lack: list[str] = field(default_factory=list)
    """What the run's links have and the model's have not, in words."""

    def __post_init__(self) -> None:
        for name in ("replayed_tokens", *BATCH, "model_client_s"):
            if not len(getattr(self, name)):
                setattr(self, name, np.zeros(len(self.request), dtype=getattr(self, name).dtype))

    def only(self, requests: Collection[int]) -> HopTable:
        """Return the rows of these requests."""
        is_wanted = np.isin(self.request, list(requests))
        columns: dict[str, Any] = {
            name: value[is_wanted] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, **columns)

    def begins_token(self) -> NDArray[np.bool_]:
        """Return which rows are the first of their tokens."""
        begins: NDArray[np.bool_] = (np.diff(self.request, prepend=-1) != 0) | (
            np.diff(self.token, prepend=-1) != 0
        )
        return begins

    def tokens(self) -> TokenSums:
        """Sum the hops of each token, in the order of the rows."""
        if not len(self.request):
            return TokenSums(self.request, self.token, np.zeros(0), np.zeros(0, dtype=bool))
        begins = np.flatnonzero(self.begins_token())
        return TokenSums(
            self.request[begins],
            self.token[begins],
            np.add.reduceat(self.model_s, begins),
            np.logical_or.reduceat(self.is_replay, begins),
        )

    @property
    def is_replay(self) -> NDArray[np.bool_]:
        """Rows of replays; their ``client_s`` includes the detection of the failure and the new routing."""
        return self.replayed_tokens > 0

    @property
    def network_s(self) -> Array:
        return (self.arrived_at_s - self.sent_at_s) + (self.received_at_s - self.departed_at_s)

    @property
    def compute_s(self) -> Array:
        return self.departed_at_s - self.arrived_at_s

    @property
    def model_s(self) -> Array:
        return self.model_network_s + self.model_compute_s + self.model_client_s

    @property
    def measured_s(self) -> Array:
        """The hop's whole time with the client's part; the hops of a token sum to the token's time."""
        return self.client_s + self.network_s + self.compute_s + self.tail_s
