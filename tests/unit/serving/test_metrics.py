"""The metrics of requests and servers for Prometheus."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from nodes.messages import NewToken, ServerStatus
from nodes.records import (
    Admitted,
    Arrived,
    Cancelled,
    Completed,
    Failed,
    Preempted,
    Rejected,
    Resumed,
    Routed,
)
from testbed.serving.metrics import Metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Return samples by name and by all labels but the model, without buckets."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = [v for k, v in sorted(sample.labels.items()) if k != "model_name"]
            if not sample.name.endswith("_bucket"):
                found[" ".join([sample.name, *labels])] = sample.value
    return found


def serve(metrics: Metrics, request: int, n_tokens: int) -> None:
    """A request that arrives at 1 s, is admitted at 3 s, and has its tokens from 4 s on, 0.5 s apart."""
    for record in (
        Arrived(request, 1.0, "c", 1.0, 20, 3),
        Routed(request, 1.1, [], 0.0, 0.0, 0.0),
        Rejected(request, 1.2, 0, "full", 1.8, [0], []),
        Routed(request, 3.0, [], 0.0, 0.0, 0.0),
        Admitted(request, 3.1, []),
    ):
        metrics.recorded(record)
    for number in range(n_tokens):
        metrics.token(NewToken(request, number + 1, 7, 4.0 + number / 2))


def test_times_are_those_of_the_run() -> None:
    metrics = Metrics("m", 2.0)
    serve(metrics, 0, 3)
    metrics.recorded(Completed(0, 5.0))
    found = values(metrics)
    for name, value in (
        ("time_to_first_token_seconds", 3.0),
        ("request_queue_time_seconds", 2.0),
        ("request_prefill_time_seconds", 1.0),
        ("request_decode_time_seconds", 1.0),
        ("request_inference_time_seconds", 2.0),
        ("e2e_request_latency_seconds", 4.0),
        ("request_time_per_output_token_seconds", 0.5),
        ("request_prompt_tokens", 20),
        ("request_generation_tokens", 3),
    ):
        assert (found[f"vllm:{name}_sum"], found[f"vllm:{name}_count"]) == (value, 1), name
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert (found["vllm:prompt_tokens_total"], found["vllm:generation_tokens_total"]) == (20, 3)
    assert found["vllm:request_success_total length"] == 1
    assert found["testbed_time_scale"] == 2


def test_every_end_is_counted_by_its_reason_and_nothing_is_left() -> None:
    metrics = Metrics("m", 1.0)
    ends = (Completed(0, 5.0), Cancelled(1, 5.0), Failed(2, 5.0, "lost"))
    for end in ends:
        serve(metrics, end.request, 2)
    metrics.recorded(Arrived(9, 1.0, "c", 1.0, 20, 3))
    found = values(metrics)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 1)
    for end in (*ends, Cancelled(9, 2.0)):
        metrics.recorded(end)
    found = values(metrics)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (0, 0)
    reasons = {reason: found[f"vllm:request_success_total {reason}"] for reason in ("stop", "abort", "error")}
    assert reasons == {"stop": 1, "abort": 2, "error": 1}
    assert metrics._open == {}


def test_a_preempted_request_waits_until_it_has_a_chain_again() -> None:
    metrics = Metrics("m", 1.0)
    serve(metrics, 0, 2)
    metrics.recorded(Preempted(0, 5.0, 1, 21))
    found = values(metrics)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (0, 1)
    assert found["vllm:num_preemptions_total"] == 1
    metrics.recorded(Admitted(0, 6.0, []))
    metrics.recorded(Resumed(0, 6.0, 22))
    found = values(metrics)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (1, 0)
    metrics.recorded(Completed(0, 7.0))
    assert values(metrics)["vllm:num_requests_running"] == 0


def test_servers_that_do_not_answer_are_down_and_the_others_share_the_cache() -> None:
    metrics = Metrics("m", 1.0)
    status = ServerStatus("a", 0, 4, "serving", 2, 30.0, 120.0, 5, 0, 3, 0, 0, 7, 0, 1, 1.5, {})
    metrics.servers({"a": status, "b": None})
    found = values(metrics)
    assert (found["testbed_server_up a"], found["testbed_server_up b"]) == (1, 0)
    assert found["testbed_server_hosted_blocks a"] == 4
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert "testbed_server_sessions b" not in found
