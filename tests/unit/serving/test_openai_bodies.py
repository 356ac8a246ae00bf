"""Which requests the endpoint accepts and rejects, and the formats of its responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.blocks.spec import Sampling
from testbed.serving.openai import ApiError, ChatBody, CompletionBody, Writer, read_body

HELLO: dict[str, Any] = {"model": "m", "prompt": "hello"}


def completion(**fields: Any) -> CompletionBody:
    return read_body(json.dumps({**HELLO, **fields}).encode(), CompletionBody)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        completion(**fields).asked()
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("hi", ["hi"]),
        ([1, 2], [[1, 2]]),
        (["hi"], ["hi"]),
        ([[3, 4]], [[3, 4]]),
        (["a", "b"], ["a", "b"]),
        ([[1], "b"], [[1], "b"]),
    ],
)
def test_a_prompt_is_a_text_or_a_list_of_tokens_or_several_of_these(prompt: Any, asked: Any) -> None:
    assert completion(prompt=prompt).asked() == asked


@pytest.mark.parametrize(
    "prompt", ["", [], ["a", 1], [1, "a"], [True], [[]], [""], [1.5], ["a"] * 65, {"a": 1}]
)
def test_a_prompt_of_an_unsupported_type_is_refused(prompt: Any) -> None:
    error = refusal(prompt=prompt)
    assert (error.status, error.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 3}, "model"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
    ],
)
def test_a_parameter_that_is_not_supported_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param)
    body = error.body()["error"]
    assert body["type"] == "invalid_request_error"
    assert param in body["message"]


def test_values_that_change_nothing_and_unknown_fields_are_taken() -> None:
    fields = {"n": 1, "logprobs": None, "echo": False, "presence_penalty": 0, "user": "me", "best_of": 1}
    assert completion(**fields, stop_token_ids=[], use_beam_search=False).asked() == ["hello"]


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    fields = (
        "stream",
        "stream_options",
        "max_tokens",
        "min_tokens",
        "ignore_eos",
        "stop",
        "temperature",
        "top_p",
        "n",
    )
    fields += (
        "logprobs",
        "echo",
        "suffix",
        "best_of",
        "logit_bias",
        "stop_token_ids",
        "user",
        "seed",
        "top_k",
    )
    assert completion(**dict.fromkeys(fields)).asked() == ["hello"]
    assert (
        completion(stream=True, stream_options={"include_usage": None}).usage_in_stream.include_usage is False
    )
    chatted = chat(
        tools=None, response_format=None, messages=[{"role": "user", "content": "a", "name": None}]
    )
    assert chatted.turns() == [("user", "a")]
    assert refusal(prompt=None).status == 400


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0}, None),
        ({"temperature": 0.5, "seed": 3}, Sampling(0.5, 0, 1.0, 3)),
        ({"top_p": 0.9, "top_k": -1, "seed": -1}, Sampling(1.0, 0, 0.9, 2**63 - 1)),
    ],
)
def test_sampling_is_that_of_the_body(fields: dict[str, Any], sampling: Sampling | None) -> None:
    assert completion(**fields).sampling() == sampling


def test_without_a_seed_every_text_has_its_own() -> None:
    first, second = completion().sampling(), completion().sampling()
    assert first is not None and second is not None
    assert first.seed != second.seed


def chat(**fields: Any) -> ChatBody:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return read_body(json.dumps(body).encode(), ChatBody)


def test_a_chat_has_turns_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).turns() == [("system", "be short"), ("user", "ab")]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for wrong in (picture, []):
        with pytest.raises(ApiError, match=r"messages|only text"):
            chat(messages=wrong).turns()


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert chat(max_tokens=5).limit() == 5
    assert chat(max_tokens=5, max_completion_tokens=7).limit() == 7


def test_no_tools_are_taken() -> None:
    assert chat(tools=[], tool_choice="none").turns() == [("user", "hi")]


@pytest.mark.parametrize("fields", [{"tools": [{}]}, {"response_format": {"type": "json_object"}}])
def test_tools_and_forms_of_answers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="is not supported here"):
        chat(**fields)


@pytest.mark.parametrize(("data", "param"), [(b'{"prompt": "a"}', "model"), (b'{"model": "m"}', "prompt")])
def test_a_parameter_that_is_missing_is_named(data: bytes, param: str) -> None:
    with pytest.raises(ApiError, match=f"^{param} is missing") as caught:
        read_body(data, CompletionBody)
    assert caught.value.param == param


@pytest.mark.parametrize("data", [b'{"model": "m"', rb'{"model": "m", "prompt": "\ud800"}'])
def test_a_body_that_ends_too_early_or_has_half_a_surrogate_pair_is_refused_with_both_causes(
    data: bytes,
) -> None:
    with pytest.raises(ApiError, match="it ends too early, or a text has half a surrogate pair"):
        read_body(data, CompletionBody)


@given(st.binary(max_size=200))
def test_no_body_breaks_anything(data: bytes) -> None:
    for kind in (CompletionBody, ChatBody):
        with pytest.raises(ApiError) as caught:
            read_body(data, kind)
        assert caught.value.status == 400


def test_a_body_that_is_nested_deeply_is_refused() -> None:
    with pytest.raises(ApiError):
        read_body(b'{"model": "m", "prompt": ' + b"[" * 100_000, CompletionBody)


def test_a_chunk_of_a_chat_says_who_speaks_once_and_the_last_one_only_has_the_usage() -> None:
    writer = Writer(is_chat=True, key="k", model="m", created=5, n_prompt=3)
    chunks = [writer.chunk(0, "a", None, None), writer.chunk(0, "b", "length", 2), writer.last(2)]
    first, second, last = (json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks)
    assert first["id"] == "chatcmpl-k"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert "usage" not in first
    assert second["choices"][0]["delta"] == {"content": "b"}
    assert second["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert second["usage"] == last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
