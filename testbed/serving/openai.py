"""OpenAI's API for completions: reads and checks request bodies, writes responses and chunks of a stream.

Unsupported settings that would change the response are rejected, never ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from nodes.blocks.spec import Sampling

Finish = Literal["stop", "length"]
B = TypeVar("B", bound="Body")
ANY_TOKEN = 2**31
"""More than the size of any vocabulary."""


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
    """Fields of both kinds of completions. Fields that are not listed here are ignored."""

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
    # Rejected unless they have a value that changes nothing (_PLAIN).
    n: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None

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
        """Raise ``ApiError`` for settings that are invalid or not supported."""
        for name, plain in _PLAIN.items():
            value = getattr(self, name, None)
            counts_from_0 = name == "logprobs" and type(value) is int  # 0 asks for the chosen token's, too
            if value not in (None, *plain) or counts_from_0:
                raise ApiError(400, f"{name} is not supported here; leave it out", name)
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
}
"""Settings that are not supported, and the values that change nothing."""


class CompletionBody(Body, kw_only=True):
    """The body of ``/v1/completions``. ``prompt``: a text, token ids, or a list of exactly one of these."""

    prompt: str | list[Any]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def asked(self) -> str | list[int]:
        """Return the prompt, a text or token ids. Raises ``ApiError`` if it is neither, or empty."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not (isinstance(prompt, str) or is_ids) or not prompt:
            raise ApiError(400, "prompt must be one text or one list of token ids, and not empty", "prompt")
        return prompt  # type: ignore[no-any-return]  # as just checked


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
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

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
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`") or None
        raise ApiError(400, text if param is None else f"{param}: {text}", param) from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not JSON: a text in it is not UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    body.check()
    return body


class Writer:
    """Writes the response to one request, whole or as chunks of a stream.

    ``key`` is the request's id, ``created`` is in seconds since 1970, ``n_prompt`` is the prompt's tokens.
    """

    def __init__(self, *, is_chat: bool, key: str, model: str, created: int, n_prompt: int) -> None:
        self._is_chat = is_chat
        self._n_prompt = n_prompt
        kinds = ("chat.completion", "chat.completion.chunk") if is_chat else ("text_completion",) * 2
        prefix = "chatcmpl" if is_chat else "cmpl"
        rest = {"created": created, "model": model}
        self._whole = {"id": f"{prefix}-{key}", "object": kinds[0], **rest}
        self._chunk = {"id": f"{prefix}-{key}", "object": kinds[1], **rest}
        self._has_begun = False

    def usage(self, n_tokens: int) -> dict[str, int]:
        """Return the numbers of tokens of a response with ``n_tokens`` output tokens."""
        return {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": self._n_prompt + n_tokens,
        }

    def whole(self, text: str, finish: Finish, n_tokens: int) -> dict[str, Any]:
        """Return the response to a request that does not stream."""
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self._whole, "choices": [choice], "usage": self.usage(n_tokens)}

    def chunk(self, text: str, finish: Finish | None, n_tokens: int | None) -> bytes:
        """Return one event of a stream; with ``n_tokens``, it has the usage so far."""
        content: dict[str, Any]
        if self._is_chat:
            content = {
                "delta": {"content": text} if self._has_begun else {"role": "assistant", "content": text}
            }
        else:
            content = {"text": text}
        self._has_begun = True
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
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
