"""A row per request: ``requests.parquet``, and the metrics that it is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from policies.problem import Hop
from testbed.records.base import Record, column, columns_of

COMPLETED, FAILED, NOT_STARTED = "completed", "failed", "not-started"


class Times(Record, kw_only=True):
    """The metrics of a request, in scenario seconds. None: the request did not get that far."""

    queue_s: Annotated[
        float | None,
        column(
            "from arrival to the start of the attempt in which every hop admitted the session, so waiting and "
            "backoff; only for requests that were admitted",
            "s",
        ),
    ] = None
    setup_s: Annotated[
        float | None,
        column(
            "from the end of `queue_s` until the prefill starts: opening all hops, the calibration's initial delay "
            "and session setup",
            "s",
        ),
    ] = None
    ttft_s: Annotated[float | None, column("arrival to the first output token at the client", "s")] = None
    tpot_s: Annotated[
        float | None,
        column(
            "(end - first token) / (number of output tokens - 1); earlier versions wrote `rest_s`, too", "s"
        ),
    ] = None
    per_token_s: Annotated[
        float | None,
        column(
            '(end - arrival) / number of output tokens, the paper\'s "inference time per token, all tokens"',
            "s",
        ),
    ] = None
    e2e_s: Annotated[
        float | None, column("end - arrival; the end is the last output token at the client", "s")
    ] = None

    @classmethod
    def of(
        cls, queue_s: float, setup_s: float | None, ttft_s: float | None, e2e_s: float | None, n_tokens: int
    ) -> Times:
        """Return the metrics that follow from these; ``n_tokens`` is the number of output tokens of the whole request.

        This is the one place where a request's metrics are computed.
        """
        if ttft_s is None:
            return cls(queue_s=queue_s)
        times = cls(queue_s=queue_s, setup_s=setup_s, ttft_s=ttft_s)
        if e2e_s is not None:
            times.e2e_s, times.per_token_s = e2e_s, e2e_s / n_tokens
            if n_tokens > 1:
                times.tpot_s = (e2e_s - ttft_s) / (n_tokens - 1)
        return times


METRICS = Times.__struct_fields__


_IF_ANY = "only if the scenario has conversations"
"""Which runs have a column that is left out of tables where it is null in all rows (``OPTIONAL``)."""


class RequestRow(Record, kw_only=True):
    """What became of one request. In tables, the metrics are columns: as they are, ``model_*`` and ``unqueued_*``."""

    request: Annotated[int, column("the request's number, from 0 in the order of the workload")]
    client: Annotated[str, column("name of the client that sent it")]
    status: Annotated[
        str,
        column(
            "`completed`, `failed` (with `reason`), `cancelled` (the caller at the endpoint has gone), `interrupted`, "
            "`unfinished` (killed), `not-started`"
        ),
    ]
    reason: Annotated[str, column("why it failed; empty if it did not")] = ""
    arrival_at_s: Annotated[float, column("instant at which the workload has it arrive", "s")]
    arrived_at_s: Annotated[float | None, column("instant at which its client began to serve it", "s")]
    ended_at_s: Annotated[
        float | None,
        column(
            "instant at which it ended, or the latest that is known of it. A text that the endpoint ended at a `stop` "
            "sequence ended a little after its last token",
            "s",
        ),
    ]
    n_input_tokens: Annotated[int, column("tokens of its prompt")]
    n_output_tokens: Annotated[int, column("output tokens that the workload has for it")]
    max_new_tokens: Annotated[
        int,
        column(
            "what was known of the output's length beforehand ([workloads.md](workloads.md)); equal to "
            "`n_output_tokens` where that is known"
        ),
    ]
    n_tokens_done: Annotated[
        int,
        column(
            "output tokens that arrived. A model may end a request before `n_output_tokens` (only `testbed generate` "
            "allows this); its metrics then count these"
        ),
    ] = 0
    n_rejections: Annotated[
        int,
        column("attempts to open a chain that were refused, without the one after which it gave up"),
    ] = 0
    n_recoveries: Annotated[
        int,
        column(
            "failures of hops after which the request went on: see [Failures](#failures-summaryjson-eventsjsonl)"
        ),
    ] = 0
    n_preemptions: Annotated[
        int, column('with `cache.mode = "paged"`: how often the session lost its cache to earlier requests')
    ] = 0
    preempted_tokens: Annotated[int, column("cached tokens that it lost by preemptions")] = 0
    preempted_s: Annotated[
        float, column("time from preemptions until it had a chain again, in total", "s")
    ] = 0.0
    schedule_lag_s: Annotated[
        float | None,
        column("actual minus intended arrival; it is large if the load generator falls behind", "s"),
    ] = None
    decision_s: Annotated[
        float | None,
        column(
            "time in the routing policy; 0 in virtual time, where decisions take no time",
            "real s",
            "emulation; null in simulations, whose tables are the same bytes for the same seed",
        ),
    ] = None
    asked_s: Annotated[
        float | None,
        column(
            "time of the whole control-plane round trip, without the wait in the coordinator's queue",
            "real s",
            "as `decision_s`",
        ),
    ] = None
    wait_expected_s: Annotated[
        float | None,
        column("wait for room that the routing policy expected, the longest of its attempts", "s"),
    ] = None
    wsrr_cost_s: Annotated[
        float | None,
        column(
            "what routing minimised for the request when it first asked. WS-RR: the waits for room at all hops, added, and "
            "the chain's own time; other routings: their own cost",
            "s",
        ),
    ] = None
    completion_bound_s: Annotated[
        float | None,
        column(
            "what `e2e_s` is at most by the paper's guarantee, if nobody has to ask again for room; null where it does "
            "not apply ([below](#bounds))",
            "s",
        ),
    ] = None
    chain: Annotated[
        str,
        column(
            "the chain that it was admitted on: `server:first-last` per hop, numbers and half-open blocks from 0"
        ),
    ] = ""
    token_ids: Annotated[
        list[int] | None,
        column(
            "ids of the output tokens (`list<int32>`), as many as arrived; the stub's are made up",
            engines="emulation; null in simulations",
        ),
    ] = None
    n_cached_tokens: Annotated[
        int | None,
        column(
            "tokens of its prompt that were not computed, because the servers of its chain had kept their caches "
            "([conversations.md](conversations.md)); null if it was never admitted",
            engines="only with `cache.prefix`",
        ),
    ] = None
    conversation: Annotated[int | None, column("number of its conversation, from 0", engines=_IF_ANY)] = None
    turn: Annotated[int | None, column("its number in the conversation, from 0", engines=_IF_ANY)] = None
    n_rounds: Annotated[
        int | None,
        column(
            "rounds of speculative decoding, which are all steps but the prompt's ([speculation.md](speculation.md)); the "
            "column is absent without `[decoding]`"
        ),
    ] = None
    n_drafted: Annotated[int | None, column("tokens that the client drafted in them")] = None
    n_accepted: Annotated[int | None, column("drafted tokens that agreed with the model's")] = None
    n_given_up: Annotated[
        int | None,
        column(
            "rounds that were sent ahead in vain; the column is absent unless `decoding.in_flight` is above 1"
        ),
    ] = None
    times: Annotated[Times, column("the metrics, measured or simulated")] = msgspec.field(
        default_factory=Times
    )
    model: Annotated[
        Times,
        column(
            "the closed model's value of the same metric, with waiting on links ([below](#the-model)); in simulations "
            "equal to the metric"
        ),
    ] = msgspec.field(default_factory=Times)
    unqueued: Annotated[
        Times,
        column(
            "the paper's closed form for a request that is alone in the system: it waits for no room and behind no message"
        ),
    ] = msgspec.field(default_factory=Times)

    @property
    def is_completed(self) -> bool:
        return self.status == COMPLETED

    @property
    def waited_s(self) -> float | None:
        """Seconds from its arrival until it was admitted, or until its end if it never was; None: it never arrived."""
        if self.times.queue_s is not None or self.ended_at_s is None or self.arrived_at_s is None:
            return self.times.queue_s
        return self.ended_at_s - self.arrived_at_s

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops of ``chain``."""
        return hops_of(self.chain)


def chain_text(hops: Sequence[tuple[int, int, int]]) -> str:
    """Return hops (server, first block, last block) in the form of ``RequestRow.chain``."""
    return " ".join(f"{server}:{first}-{last}" for server, first, last in hops)


@lru_cache(maxsize=4096)
def hops_of(chain: str) -> tuple[Hop, ...]:
    """Return the hops of a chain's text (``chain_text``). Most requests of a run have one of few chains."""
    return tuple(
        Hop(int(server), *map(int, blocks.split("-")))
        for server, _, blocks in (part.partition(":") for part in chain.split())
    )


OPTIONAL = ("n_cached_tokens", "conversation", "turn", "n_rounds", "n_drafted", "n_accepted", "n_given_up")
"""Columns that tables have only if a row has a value."""
PREFIXES = {"times": "", "model": "model_", "unqueued": "unqueued_"}
"""Fields of ``RequestRow`` that are several columns, with the prefix of these."""


def left_out(rows: Iterable[RequestRow]) -> set[str]:
    """Return the optional columns that a table of ``rows`` does not have, since all their values would be null."""
    lacking = set(OPTIONAL)
    for row in rows:
        if not lacking:
            break
        lacking -= {name for name in lacking if getattr(row, name) is not None}
    return lacking


def request_columns() -> dict[str, tuple[Any, msgspec.Meta]]:
    """Return the columns of ``requests.parquet`` in order: (type, meaning) by name."""
    found: dict[str, tuple[Any, msgspec.Meta]] = {}
    for name, about in columns_of(RequestRow).items():
        if name in PREFIXES:
            found |= {f"{PREFIXES[name]}{metric}": of for metric, of in columns_of(Times).items()}
        else:
            found[name] = about
    return found


_ALWAYS = (
    "request",
    "client",
    "status",
    "reason",
    "arrival_at_s",
    "n_input_tokens",
    "n_output_tokens",
    "chain",
)
_PLAIN = tuple(name for name in RequestRow.__struct_fields__ if name not in PREFIXES)


def flat(row: RequestRow) -> dict[str, Any]:
    """Return a row's columns by name."""
    found = {name: getattr(row, name) for name in _PLAIN}
    for name, prefix in PREFIXES.items():
        times = getattr(row, name)
        for metric in METRICS:
            found[prefix + metric] = getattr(times, metric)
    return found


def row_of(columns: dict[str, Any]) -> RequestRow:
    """Return the row with these columns; those of earlier versions that are no more are left out.

    Raises ``ValueError`` if a column is missing that all versions have.
    """
    if lacking := next((name for name in _ALWAYS if name not in columns), None):
        raise ValueError(f"it has no column {lacking}")
    times = {
        name: Times(**{metric: columns.get(prefix + metric) for metric in METRICS})
        for name, prefix in PREFIXES.items()
    }
    known: dict[str, Any] = {
        "arrived_at_s": columns["arrival_at_s"],
        "max_new_tokens": columns["n_output_tokens"],
        **{name: columns[name] for name in _PLAIN if name in columns},
    }
    if "ended_at_s" not in known:  # earlier versions did not write it
        spans_s = (times["times"].e2e_s, times["times"].ttft_s, times["times"].queue_s, 0.0)
        began_at_s = known.get("arrived_at_s")
        span_s = next(span_s for span_s in spans_s if span_s is not None)
        known["ended_at_s"] = None if began_at_s is None else began_at_s + span_s
    return RequestRow(**(known | times))
