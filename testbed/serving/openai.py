"""OpenAI's API for completions: reads and checks request bodies, writes responses and chunks of a stream.

Unsupported settings that would change the response are rejected, never ignored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from nodes.blocks.spec import Sampling

Finish = Literal["stop", "length"]
B = TypeVar("B", bound="Body")
_MOST_PROMPTS = 64
"""In one request: each is a session of its own."""
ANY_TOKEN = 2**31
"""More than the size of any vocabulary."""


_MISSING = re.compile("Object missing required field `(.*)`")
_TRUNCATED = "Input data was truncated"
"""Both as msgspec says it; the second also of a text with a surrogate that has no partner."""


class ApiError(Exception):
    """An error response in OpenAI's format, with HTTP ``status``.

    ``param`` names the wrong field of the body. ``retry_after_s``: real seconds, for the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the response's body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(msgspec.Struct):
    """``stream_options``: which events of a stream have the number of tokens so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, kw_only=True):
    """Fields of both kinds of completions. Others are ignored, but for those that would change the answer (``_PLAIN``)."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage_in_stream(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def limit(self) -> int | None:
        """Return the most tokens that the request asks for, or None if it does not say."""
        return self.max_tokens

    def sampling(self) -> Sampling | None:
        """Return how to sample, or None for the most probable token each time.

        A request without a seed is sampled with a new random one.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0:
            return None
        seed = secrets.randbits(62) if self.seed is None else self.seed % 2**63
        top_k = min(max(self.top_k or 0, 0), ANY_TOKEN)  # -1 means all tokens, too
        return Sampling(temperature, top_k, 1.0 if self.top_p is None else self.top_p, seed)

    def check(self) -> None:
        """Raise ``ApiError`` for settings that are invalid."""
        sampling = self.sampling()
        if sampling is not None and (wrong := sampling.wrong()):
            raise ApiError(400, f"{wrong[0]} {wrong[1]}", wrong[0])
        if len(self.stops) > 16 or not all(self.stops):
            raise ApiError(400, "stop must have at most 16 texts, none of them empty", "stop")
        limit = self.limit()
        if limit is not None and limit < 1:
            raise ApiError(400, "max_tokens must be at least 1", "max_tokens")
        if self.min_tokens < 0 or (limit is not None and self.min_tokens > limit):
            raise ApiError(400, "min_tokens must be from 0 to max_tokens", "min_tokens")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream = true", "stream_options")


_PLAIN: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Settings that are not supported, and the values that change nothing. ``null`` is the same as leaving them out."""


class CompletionBody(Body, kw_only=True):
    """The body of ``/v1/completions``. ``prompt``: a text, token ids, or a list of several of these."""

    prompt: str | list[Any]

    def asked(self) -> list[str | list[int]]:
        """Return the prompts, texts or token ids. Raises ``ApiError`` if one is neither, or empty, or they are too many."""
        prompt: Any = self.prompt
        has_several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
        prompts = prompt if has_several else [prompt]
        for one in prompts:
            is_ids = isinstance(one, list) and all(type(token) is int for token in one)
            if not (isinstance(one, str) or is_ids) or not one:
                raise ApiError(
                    400,
                    "prompt must be a text, a list of token ids, or a list of these, none of them empty",
                    "prompt",
                )
        if len(prompts) > _MOST_PROMPTS:
            raise ApiError(400, f"prompt must have at most {_MOST_PROMPTS} texts", "prompt")
        return prompts


class Part(msgspec.Struct):
    """A part of a message; only parts of type "text" are supported."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct):
    """One turn of a chat."""

    role: str
    content: str | list[Part] | None = None


class ChatBody(Body, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def turns(self) -> list[tuple[str, str]]:
        """Return (role, text) of every message. Raises ``ApiError`` for anything but text."""
        if not self.messages:
            raise ApiError(400, "messages must not be empty", "messages")
        turns = []
        for message in self.messages:
            parts = message.content if isinstance(message.content, list) else []
            if any(part.type != "text" for part in parts):
                raise ApiError(400, "messages must be text: images and audio are not supported", "messages")
            text = "".join(part.text for part in parts) if parts else message.content or ""
            turns.append((message.role, str(text)))
        return turns


def read_body(data: bytes, kind: type[B]) -> B:
    """Decode and check a request's body. Raises ``ApiError``."""
    try:
        raw = _without_null(msgspec.json.decode(data))
        body = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`") or None
        if param is None and (missing := _MISSING.fullmatch(text)):
            raise ApiError(400, f"{missing[1]} is missing: the body must have it", missing[1]) from error
        raise ApiError(400, text if param is None else f"{param}: {text}", param) from error
    except msgspec.DecodeError as error:
        why = "it ends too early, or a text has half a surrogate pair" if str(error) == _TRUNCATED else error
        raise ApiError(400, f"the body is not JSON: {why}") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not JSON: a text in it is not UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    for name, plain in _PLAIN.items():
        counts_from_0 = (
            name == "logprobs" and type(raw.get(name)) is int
        )  # 0 asks for the chosen token's, too
        if name in raw and (raw[name] not in plain or counts_from_0):
            raise ApiError(400, f"{name} is not supported here; leave it out", name)
    body.check()
    return body


def _without_null(value: Any) -> Any:
    """Returns decoded JSON without the fields that are ``null``: in OpenAI's API that is the same as none."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):  # not the numbers of a long prompt
        return [_without_null(inner) for inner in value]
    return value


class Writer:
    """Writes the response to one request, whole or as chunks of a stream.

    ``key`` is the request's id, ``created`` is in seconds since 1970, ``n_prompt`` is the tokens of all its prompts. Each
    prompt has a choice, numbered from 0. ``n_cached`` returns how many tokens of the prompts were not computed anew; ``None``: no
    cache outlives its request.
    """

    def __init__(
        self,
        *,
        is_chat: bool,
        key: str,
        model: str,
        created: int,
        n_prompt: int,
        n_cached: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._n_cached = n_cached
        self._is_chat = is_chat
        self._n_prompt = n_prompt
        kinds = ("chat.completion", "chat.completion.chunk") if is_chat else ("text_completion",) * 2
        prefix = "chatcmpl" if is_chat else "cmpl"
        rest = {"created": created, "model": model}
        self._whole = {"id": f"{prefix}-{key}", "object": kinds[0], **rest}
        self._chunk = {"id": f"{prefix}-{key}", "object": kinds[1], **rest}
        self._begun: set[int] = set()

    def usage(self, n_tokens: int) -> dict[str, Any]:
        """Return the numbers of tokens of a response with ``n_tokens`` output tokens."""
        n_cached = self._n_cached()
        return {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": self._n_prompt + n_tokens,
            **({} if n_cached is None else {"prompt_tokens_details": {"cached_tokens": n_cached}}),
        }

    def whole(self, answers: Sequence[tuple[str, Finish]], n_tokens: int) -> dict[str, Any]:
        """Return the response to a request that does not stream: the text of every choice and why it ends."""
        choices = []
        for index, (text, finish) in enumerate(answers):
            content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": finish})
        return {**self._whole, "choices": choices, "usage": self.usage(n_tokens)}

    def chunk(self, index: int, text: str, finish: Finish | None, n_tokens: int | None) -> bytes:
        """Return one event of a stream, for choice ``index``; with ``n_tokens``, it has the usage so far."""
        content: dict[str, Any]
        if self._is_chat:
            has_begun = index in self._begun
            content = {"delta": {"content": text} if has_begun else {"role": "assistant", "content": text}}
        else:
            content = {"text": text}
        self._begun.add(index)
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        return event(self._with_usage([choice], n_tokens))

    def last(self, n_tokens: int) -> bytes:
        """Return the last event of a stream, which has the usage and no text."""
        return event(self._with_usage([], n_tokens))

    def _with_usage(self, choices: Sequence[dict[str, Any]], n_tokens: int | None) -> dict[str, Any]:
        usage = {} if n_tokens is None else {"usage": self.usage(n_tokens)}
        return {**self._chunk, "choices": list(choices), **usage}


def event(data: dict[str, Any]) -> bytes:
    """Encode ``data`` as a server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"
