"""The metrics of a serving testbed for Prometheus.

A metric that vLLM has, too, has its name, so that its dashboards show it. Times are scenario seconds, as in
the tables of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nodes.messages import NewToken, ServerStatus
from nodes.records import ENDED, Admitted, Arrived, Completed, Failed, Preempted, Reused, Routed, States
from policies.links import Link

_SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_FIRST_S = (*_SHORT_S, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_GAP_S = (*(t for t in _SHORT_S if t >= 0.01), 20.0, 40.0, 80.0)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_LONG_S = (*_REQUEST_S, 480.0, 960.0, 1920.0, 7680.0)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
"""Upper bounds of histogram buckets: above in scenario seconds, here in tokens."""


@dataclass
class _Open:
    """A request that has not ended; instants are scenario seconds."""

    arrived_at_s: float
    n_prompt: int
    n_asked: int
    asked_at_s: float
    is_admitted: bool = False
    first_at_s: float | None = None
    last_at_s: float = 0.0
    n_tokens: int = 0


class Metrics:
    """Counts what happens to requests. ``model`` is the value of the label ``model_name``."""

    def __init__(self, model: str, time_scale: float) -> None:
        self._open: dict[int, _Open] = {}
        self._n_running = 0
        self._model = model
        self._registry = CollectorRegistry()
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_S
        )
        self._gap = self._histogram("inter_token_latency_seconds", "From one token to the next", _GAP_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens", _GAP_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", _LONG_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the attempt that was admitted", _LONG_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the admitted attempt to the first token", _LONG_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", _LONG_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From the admitted attempt to the last token", _LONG_S
        )
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of prompts", _TOKENS)
        self._sizes = self._histogram("request_generation_tokens", "Tokens of answers", _TOKENS)
        self._asked_sizes = self._histogram(
            "request_params_max_tokens", "Most tokens that a request asked for", _TOKENS
        )
        self._successes = Counter(
            "vllm:request_success",
            "Requests that have ended, by reason",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._successes.labels(model, reason)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._tokens = self._counter("generation_tokens", "Tokens of answers")
        self._preemptions = self._counter("num_preemptions", "Sessions that lost their cache to earlier ones")
        self._queried = self._counter(
            "prefix_cache_queries", "Tokens of admitted prompts, where caches outlive their requests"
        )
        self._hits = self._counter("prefix_cache_hits", "Those of them that were not computed anew")
        self._running = self._gauge("num_requests_running", "Requests with an open chain")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for room")
        self._cache = self._gauge(
            "kv_cache_usage_perc", "Share of all servers' cache room that is used, 0 to 1"
        )
        scale = Gauge("testbed_time_scale", "Scenario seconds per real second", registry=self._registry)
        scale.set(time_scale)
        self._servers = {
            name: Gauge(f"testbed_server_{name}", text, ("server",), registry=self._registry)
            for name, text in (
                ("up", "1 if the server responds"),
                ("sessions", "Sessions on the server"),
                ("cache_used_bytes", "Cache that sessions have reserved"),
                ("cache_capacity_bytes", "Memory of the server for caches"),
                ("hosted_blocks", "Blocks that the server holds"),
                ("steps", "Steps computed since the server started"),
                ("compute_seconds", "Scenario seconds spent computing since the server started"),
            )
        }
        self._links = {
            name: Gauge(f"testbed_link_{name}", text, ("source", "target"), registry=self._registry)
            for name, text in (
                ("delay_seconds", "Delay of the link in this direction"),
                ("rate_bits_per_second", "Rate of the link in this direction"),
            )
        }

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        found = Histogram(
            f"vllm:{name}", text, ("model_name",), buckets=tuple(buckets), registry=self._registry
        )
        return found.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, ("model_name",), registry=self._registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, ("model_name",), registry=self._registry).labels(self._model)

    def recorded(self, record: States) -> None:
        """Count a client's record about a request."""
        if isinstance(record, Arrived):
            self._open[record.request] = _Open(
                record.at_s, record.n_input_tokens, record.n_output_tokens, record.at_s
            )
        elif (request := self._open.get(record.request)) is not None:
            if isinstance(record, Routed):
                request.asked_at_s = record.at_s
            elif isinstance(record, Admitted):
                request.is_admitted = True
                self._n_running += 1
            elif isinstance(record, Reused):
                self._queried.inc(request.n_prompt)
                self._hits.inc(record.tokens)
            elif isinstance(record, Preempted):
                request.is_admitted = False
                self._n_running -= 1
                self._preemptions.inc()
            elif isinstance(record, ENDED):
                self._n_running -= request.is_admitted
                self._ended(self._open.pop(record.request), record)

    def token(self, message: NewToken) -> None:
        """Count a new output token of a request."""
        request = self._open[message.request]
        if request.first_at_s is None:
            request.first_at_s = message.at_s
            self._first.observe(message.at_s - request.arrived_at_s)
            self._queue.observe(request.asked_at_s - request.arrived_at_s)
            self._prefill.observe(message.at_s - request.asked_at_s)
            self._prompt_tokens.inc(request.n_prompt)
        else:
            self._gap.observe(message.at_s - request.last_at_s)
        request.last_at_s, request.n_tokens = message.at_s, message.n_tokens
        self._tokens.inc()

    def _ended(self, request: _Open, record: States) -> None:
        if not isinstance(record, Completed) or request.first_at_s is None:
            self._successes.labels(self._model, "error" if isinstance(record, Failed) else "abort").inc()
            return
        reason = "length" if request.n_tokens == request.n_asked else "stop"
        self._successes.labels(self._model, reason).inc()
        self._whole.observe(request.last_at_s - request.arrived_at_s)
        self._inference.observe(request.last_at_s - request.asked_at_s)
        self._decode.observe(request.last_at_s - request.first_at_s)
        if request.n_tokens > 1:
            self._per_token.observe((request.last_at_s - request.first_at_s) / (request.n_tokens - 1))
        self._prompt_sizes.observe(request.n_prompt)
        self._sizes.observe(request.n_tokens)
        self._asked_sizes.observe(request.n_asked)

    def servers(self, found: Mapping[str, ServerStatus | None]) -> None:
        """Set the gauges of servers by name; None: the server did not respond."""
        used = capacity = 0.0
        for name, status in found.items():
            self._servers["up"].labels(name).set(status is not None)
            if status is None:
                continue
            used += status.cache_used_bytes
            capacity += status.cache_capacity_bytes
            for key, value in (
                ("sessions", status.n_sessions),
                ("cache_used_bytes", status.cache_used_bytes),
                ("cache_capacity_bytes", status.cache_capacity_bytes),
                ("hosted_blocks", status.last_block - status.first_block),
                ("steps", status.steps),
                ("compute_seconds", status.compute_s),
            ):
                self._servers[key].labels(name).set(value)
        self._cache.set(used / capacity if capacity else 0.0)

    def links(self, links: Mapping[tuple[str, str], Link]) -> None:
        """Set the gauges of links, by (sender, receiver)."""
        for (source, target), link in links.items():
            self._links["delay_seconds"].labels(source, target).set(link.delay_s)
            self._links["rate_bits_per_second"].labels(source, target).set(link.rate_bps)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._running.set(self._n_running)
        self._waiting.set(len(self._open) - self._n_running)
        return generate_latest(self._registry)
