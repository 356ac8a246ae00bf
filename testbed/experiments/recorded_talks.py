"""Reads recorded conversations: those of ShareGPT, which have texts only, and sessions as AIPerf replays them.

A conversation's further message comes after the answer before it and some seconds of thinking, and its prompt is all that was said.
Texts are counted as a token for every ``CHARACTERS`` characters: no tokenizer is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from testbed.experiments.conversations import Message
from testbed.experiments.limits import MAX_DURATION_S
from testbed.experiments.problems import KeyedError, shown

CHARACTERS = 4
_HUB_ROLES = ("human", "user", "system", "tool", "function_response", "observation")
_MODEL_ROLES = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call")
_TEXTS = ("text", "text_input", "texts")


class Place(NamedTuple):
    """Where a request stands: its conversation and turn, from 0, and the seconds after the answer before it."""

    conversation: int
    turn: int
    think_s: float


Row = tuple[float, int, int, Place]
"""Arrival in seconds if answers took no time, input tokens with all that was said before, output tokens."""


def n_tokens(text: Any) -> int:
    """Returns the tokens of a text, or of several."""
    if isinstance(text, list):
        return sum(map(n_tokens, text))
    if not isinstance(text, str):
        raise ValueError(f"a text must be a string, not {shown(text)}")
    return -(-len(text) // CHARACTERS)


def sharegpt() -> Callable[[Any], Sequence[Row]]:
    """Returns a reader of one file's conversations: ``{"conversations": [{"from": "human", "value": text}, ...]}``."""
    numbers = iter(range(1 << 62))

    def read(record: Any) -> Sequence[Row]:
        said = record.get("conversations") if isinstance(record, Mapping) else None
        if not isinstance(said, list):
            raise ValueError(
                'it has no list "conversations", as ShareGPT needs; write another format as JSON lines'
            )
        number, rows = next(numbers), list[Row]()
        n_history = n_new = 0
        for message in said:
            if not isinstance(message, Mapping):
                raise ValueError(f"a message must be an object, not {shown(message)}")
            role, n = message["from"], n_tokens(message["value"])
            if role not in (*_HUB_ROLES, *_MODEL_ROLES):
                raise ValueError(
                    f"from is {shown(role)}; known are {', '.join((*_HUB_ROLES, *_MODEL_ROLES))}"
                )
            if role in _MODEL_ROLES and n and n_history + n_new:
                rows.append((0.0, n_history + n_new, n, Place(number, len(rows), 0.0)))
                n_history, n_new = n_history + n_new + n, 0
            else:
                n_new += n
        return rows

    return read


class _Said(NamedTuple):
    """A conversation so far."""

    number: int
    n_turns: int
    at_s: float
    n_history: int


def sessions(
    whole: Callable[[Mapping[str, Any], str], int], number: Callable[..., float]
) -> Callable[[Any], Sequence[Row]]:
    """Returns a reader of one file's lines: a turn each, or a session with all ``turns``.

    ``whole`` and ``number`` read a field of a record.
    """
    known: dict[Any, _Said] = {}

    def turn(session: Any, record: Any) -> Row:
        if not isinstance(record, Mapping):
            raise ValueError(f"a turn must be an object, not {shown(record)}")
        before = known.get(session)
        texts = [record[name] for name in _TEXTS if name in record]
        if "input_length" in record:
            n_new = whole(record, "input_length")
        elif texts:
            n_new = sum(map(n_tokens, texts))
        else:
            raise ValueError(f"a turn needs input_length, or one of {', '.join(_TEXTS)}")
        n_output = whole(record, "output_length")
        if n_new < 1 or n_output < 1:
            raise ValueError("a turn needs input and output tokens")
        has_time = record.get("timestamp") is not None
        at_s = number(record, "timestamp") / 1000 if has_time else 0.0
        think_s = 0.0
        if before is not None:
            if record.get("delay") is not None:
                think_s = number(record, "delay") / 1000
            elif has_time:
                think_s = max(0.0, at_s - before.at_s)
            at_s = before.at_s + think_s
        if not 0 <= think_s <= MAX_DURATION_S:
            raise ValueError(f"a delay of {think_s:g} s is none from 0 to {MAX_DURATION_S:,.0f} s")
        place = Place(len(known), 0, 0.0) if before is None else Place(before.number, before.n_turns, think_s)
        n_input = n_new + (0 if before is None else before.n_history)
        known[session] = _Said(place.conversation, place.turn + 1, at_s, n_input + n_output)
        return at_s, n_input, n_output, place

    def read(record: Any) -> Sequence[Row]:
        if not isinstance(record, Mapping):
            raise ValueError("it is no JSON object")
        session, turns = record["session_id"], record.get("turns")
        if not isinstance(session, str | int):
            raise ValueError(f"session_id must be text or a number, not {shown(session)}")
        if turns is None:
            return [turn(session, record)]
        if not isinstance(turns, list):
            raise ValueError(f"turns must be a list, not {shown(turns)}")
        return [turn(session, each) for each in turns]

    return read


def listed_places(places: Sequence[Place]) -> list[list[float]]:
    """Return places as rows of a resolved scenario: [conversation, seconds of thinking]."""
    return [[place.conversation, place.think_s] for place in places]


def of_rows(rows: Sequence[object], n_requests: int) -> list[Place]:
    """Return the places of ``listed_places``. Raises ``KeyedError``."""
    if len(rows) != n_requests:
        raise KeyedError(
            ("workload", "conversations"),
            f"has {len(rows)} rows, and there are {n_requests} requests; give one for each",
        )
    n_turns: dict[int, int] = {}
    found = []
    for index, row in enumerate(rows):
        if not (
            isinstance(row, list)
            and len(row) == 2
            and not any(isinstance(each, bool) for each in row)
            and isinstance(row[0], int)
            and isinstance(row[1], int | float)
            and 0 <= row[1] <= MAX_DURATION_S
        ):
            raise KeyedError(
                ("workload", "conversations", index),
                f"must be [conversation's number, seconds after the answer before], not {shown(row)}",
            )
        found.append(Place(row[0], n_turns.get(row[0], 0), float(row[1])))
        n_turns[row[0]] = found[-1].turn + 1
    return found


def by_conversation(rows: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """Return rows that end with their ``Place``, conversation by conversation."""
    found: dict[int, list[Sequence[Any]]] = {}
    for row in rows:
        found.setdefault(row[-1].conversation, []).append(row)
    return list(found.values())


def drawn_messages(rows: Sequence[Sequence[Any]], n: int, rng: Random) -> list[Message]:
    """Return ``n`` messages of recorded conversations, each drawn whole, uniformly and with replacement; the last may be cut."""
    talks, found = by_conversation(rows), list[Message]()
    while len(found) < n:
        number = found[-1].conversation + 1 if found else 0
        talk = talks[rng.randrange(len(talks))][: n - len(found)]
        found += (
            Message(number, turn, place.think_s, int(n_input), int(n_output))
            for turn, (_, n_input, n_output, place) in enumerate(talk)
        )
    return found
