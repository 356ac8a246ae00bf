"""Makes the requests of a run: arrivals, lengths and clients, each from its own random stream of the seed.

``random.Random`` seeded with text gives the same numbers on every machine and Python version.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from policies.workload import RequestPlan, Turn
from testbed.experiments.conversations import Draws, Message, draw_conversations, some_of
from testbed.experiments.demand import Demand
from testbed.experiments.draws import Sample, drawn
from testbed.experiments.filesread import note_file
from testbed.experiments.lengths import LengthTable, drawer, in_words, longest
from testbed.experiments.limits import MAX_DURATION_S, MAX_NUMBER, MAX_TOKENS, too_late
from testbed.experiments.problems import KeyedError, shown
from testbed.experiments.prompts import MOONCAKE_TOKENS, Prompt, listed, of_rows, with_answers
from testbed.experiments.recorded_talks import Place, by_conversation, drawn_messages, listed_places
from testbed.experiments.recorded_talks import of_rows as of_places
from testbed.experiments.traces import read_trace
from testbed.experiments.workload_tables import ThinkTime, WorkloadTable

Listed = list[list[int | float]]
Lengths = tuple[int, int]
"""(input, output) tokens of a request."""
_MOST_KNOWN = 256
"""Most past requests whose lengths policies know."""


def stream(seed: int, concern: str) -> random.Random:
    """Return the random stream of one concern.

    Streams of different concerns are independent of each other.
    """
    return random.Random(f"{seed}:{concern}")


def join_order(seed: int, n_servers: int) -> tuple[int, ...]:
    """Return the order in which servers join under PETALS: a random permutation."""
    order = list(range(n_servers))
    stream(seed, "join order").shuffle(order)
    return tuple(order)


def _gaps(table: WorkloadTable, rng: random.Random) -> Callable[[], float]:
    """Return a function that draws the seconds to the next arrival, with mean 1 / rate."""
    rate = table.rate or 0.0
    if table.arrivals == "poisson":
        return lambda: rng.expovariate(rate)
    if table.arrivals == "gamma":
        shape = table.shape or 1.0
        return lambda: rng.gammavariate(shape, 1 / (rate * shape))
    return lambda: 1 / rate


def _arrivals_s(table: WorkloadTable, demand: Demand, gap: Callable[[], float], n: int) -> list[float]:
    """Return ``n`` arrivals in s, the first at 0."""
    if table.changes or not demand.is_constant:
        return _warped(table, demand, gap, n)
    return list(accumulate((gap() for _ in range(n - 1)), initial=0.0))


def _warped(table: WorkloadTable, demand: Demand, gap: Callable[[], float], n: int) -> list[float]:
    """Return ``n`` arrivals in s.

    Gaps are drawn for ``table.rate`` and scaled to the rate in force (``changes``, curves).
    """
    assert table.rate is not None, "generated arrivals have a rate"
    changes = _changes(table, table.rate) if table.changes else demand.rates(table.rate)
    at_s, arrivals = 0.0, [0.0]
    (_, rate), following = next(changes), next(changes, None)
    while len(arrivals) < n:
        left = gap() * table.rate  # what is left of a gap with mean 1
        while following is not None and left > (following[0] - at_s) * rate:
            left -= (following[0] - at_s) * rate
            (at_s, rate), following = following, next(changes, None)
        at_s += left / rate
        arrivals.append(at_s)
    return arrivals


def _changes(table: WorkloadTable, rate: float) -> Iterator[tuple[float, float]]:
    """Yield (from when on in s, requests per second), the first from 0 s."""
    yield 0.0, rate
    yield from ((change.at, change.rate) for change in table.changes or ())


def _is_request(row: list[Any]) -> bool:
    if len(row) not in (3, 4, 5) or any(isinstance(value, bool) for value in row):
        return False
    at_s, *lengths = *row[:3], *row[4:]
    in_time = isinstance(at_s, int | float) and 0 <= at_s <= MAX_DURATION_S
    return in_time and all(isinstance(length, int) and 1 <= length <= MAX_TOKENS for length in lengths)


def _checked(listed: list[Any], n_clients: int, is_hidden: bool) -> Listed:
    last_s = 0.0
    for index, row in enumerate(listed):
        if not (isinstance(row, list) and _is_request(row) and row[0] >= last_s):
            raise KeyedError(
                ("workload", "requests", index),
                "must be [arrival in seconds, input tokens, output tokens] with arrivals in order, "
                f"from 0 to {MAX_DURATION_S:,.0f} s, and 1 to {MAX_TOKENS:,} tokens each, "
                f"not {shown(row)}",
            )
        if len(row) > 3 and row[3] not in range(n_clients):
            raise KeyedError(
                ("workload", "requests", index),
                f"has {shown(row[3])} as its client, which must be a client's number from 0 to "
                f"{n_clients - 1}",
            )
        if len(row) == 5 and not is_hidden:
            raise KeyedError(
                ("workload", "requests", index),
                'has its own max_new_tokens, which needs lengths = "hidden"; leave the fifth number out',
            )
        last_s = row[0]
    if not listed:
        raise KeyedError(("workload", "requests"), "needs at least one request")
    return listed


def _recorded(
    table: WorkloadTable, seed: int, folder: Path, keeps_prompts: bool = False
) -> tuple[list[Any], str]:
    """Return the trace's requests with at most ``max_input_tokens``, and in words where they come from.

    ``keeps_prompts``: each has a ``Prompt`` as its last value, if the trace has them. Requests of conversations have their ``Place``.
    """
    trace = read_trace(note_file(folder / (table.file or "")))
    kind = trace.kind
    rows: list[Any] = trace.requests
    if keeps_prompts and trace.prompts:
        trace.check_prompts()
        rows = [[*row, prompt] for row, prompt in zip(rows, trace.prompts, strict=True)]
    if trace.places:
        rows = [[*row, place] for row, place in zip(rows, trace.places, strict=True)]
        for key in ("n_input_tokens", "n_output_tokens", "draw"):
            if getattr(table, key) is not None:
                raise KeyedError(
                    ("workload", key),
                    f"is given, and {table.file} has conversations, whose prompts contain the answers before; leave it out",
                )
    elif table.think_time is not None:
        raise KeyedError(
            ("workload", "think_time"), f"is of conversations, and {table.file} has none; leave it out"
        )
    if table.think_time is not None:
        think_s = _think_s(table.think_time, stream(seed, "think times"))
        rows = [[*row[:3], row[3]._replace(think_s=think_s() if row[3].turn else 0.0)] for row in rows]
    origin, most = f"{kind} trace {Path(table.file or '').name}", table.max_input_tokens
    if most is None:
        return rows, origin
    short = [row for row in rows if row[1] <= most]  # of a conversation those before: each prompt is longer
    if not short:
        raise KeyedError(
            ("workload", "max_input_tokens"), f"is {most:,}, and every recorded prompt is longer; raise it"
        )
    n_out = len(rows) - len(short)
    if n_out:
        origin += (
            f" without {n_out:,} of {len(rows):,} requests, whose prompts have more than {most:,} tokens"
        )
    return [[at_s - short[0][0], *rest] for at_s, *rest in short], origin


def _replayed(
    table: WorkloadTable, seed: int, folder: Path, n_clients: int, keeps_prompts: bool
) -> tuple[list[Any], float, str, Sample | None, list[Lengths]]:
    """Choose recorded requests and stretch their arrivals.

    Returns the requests, their mean rate per second, in words where they come from, how many were recorded,
    and the lengths of the requests that came before them (see ``drawn``). With ``draw`` "first" (the default) the chosen
    requests get the mean rate ``table.rate``. With another ``draw`` the whole recording gets it, so that the
    requests of one run may have a higher or lower rate, as they were recorded.
    """
    if table.arrivals == "trace":
        rows, origin = _recorded(table, seed, folder, keeps_prompts)
        if isinstance(rows[0][-1], Place) and all(row[0] == 0 for row in rows if not row[-1].turn):
            raise KeyedError(
                ("workload", "arrivals"),
                f'is "trace", and the conversations of {table.file} have no times at which they begin; take "poisson", and give '
                "rate and n_requests",
            )
    else:
        rows = _checked(table.requests or [], n_clients, table.lengths == "hidden")
        origin = table.origin or "listed"
        if table.prompts is not None:
            lengths = [int(row[1]) for row in rows]
            prompts = of_rows(table.prompts, lengths, table.prompt_block or MOONCAKE_TOKENS)
            if table.answers is not None:
                both = [(int(row[1]), int(row[2])) for row in rows]
                prompts = with_answers(prompts, table.answers, both)
            rows = [[*row, prompt] for row, prompt in zip(rows, prompts, strict=True)]
        if table.conversations is not None:
            places = of_places(table.conversations, len(rows))
            rows = [[*row, place] for row, place in zip(rows, places, strict=True)]
    sample = None if isinstance(rows[0][-1], Place) else Sample(table.draw, len(rows))
    n = table.n_requests or len(rows)
    if n > len(rows):
        raise KeyedError(
            ("workload", "n_requests"), f"is {n}, but there are only {len(rows)} requests; lower it"
        )
    if table.draw in (None, "first"):
        if n < len(rows):
            rows, which, _ = drawn(rows, n, "first", seed, stream(seed, "draw"))
            origin += f", {which}"
        rows, rate, stretched = _stretched(rows, table.rate)
        return rows, rate, origin + stretched, sample, []
    assert table.draw is not None
    rows, rate, stretched = _stretched(rows, table.rate)
    rows, which, before = drawn(rows, n, table.draw, seed, stream(seed, "draw"))
    span_s = rows[-1][0] - rows[0][0]
    # The rate of the chosen requests: with another, loading the resolved scenario would stretch them again.
    drawn_rate = (n - 1) / span_s if span_s > 0 else rate
    return rows, drawn_rate, f"{origin}{stretched}, {which}", sample, [*map(_lengths_of, before)]


def _lengths_listed(
    table: WorkloadTable, seed: int, folder: Path
) -> tuple[list[list[int]] | list[Message], str | None, list[Lengths]]:
    """Choose [input, output] tokens for requests whose arrivals are generated, or messages of recorded conversations.

    Returns them, in words where they come from, and the lengths of the recorded requests that were not chosen:
    nobody knows before what is about to come. With a trace, each request has both lengths of one recorded
    request, all equally likely, so that long prompts keep their recorded outputs.
    """
    n = table.n_requests or 1
    if table.file is not None:
        rows, origin = _recorded(table, seed, folder)
        rng = stream(seed, "recorded lengths")
        if isinstance(rows[0][-1], Place):
            said = f"conversations drawn from the {len(by_conversation(rows)):,} of {origin}"
            return drawn_messages(rows, n, rng), said, [*map(_lengths_of, rows)]
        chosen = [rng.randrange(len(rows)) for _ in range(n)]
        is_chosen = set(chosen)
        others = [_lengths_of(row) for number, row in enumerate(rows) if number not in is_chosen]
        said = f"lengths drawn from the {len(rows):,} requests of {origin}"
        return [list(_lengths_of(rows[number])) for number in chosen], said, others
    listed = table.request_lengths or []
    if n > len(listed):
        raise KeyedError(
            ("workload", "n_requests"), f"is {n}, but there are only {len(listed)} request_lengths; lower it"
        )
    for index, row in enumerate(listed):
        if not (isinstance(row, list) and len(row) == 2 and _is_request([0, *row])):
            raise KeyedError(
                ("workload", "request_lengths", index),
                f"must be [input tokens, output tokens], 1 to {MAX_TOKENS:,} each, not {shown(row)}",
            )
    if table.conversations is not None:
        places = of_places(table.conversations, len(listed))
        messages = [
            Message(place.conversation, place.turn, place.think_s, *row)
            for place, row in zip(places, listed, strict=True)
        ]
        return messages[:n], table.origin, []
    return listed[:n], table.origin, []


def _stretched(rows: Listed, to_rate: float | None) -> tuple[Listed, float, str]:
    """Stretch ``rows`` to the mean rate ``to_rate`` (default: not at all).

    Returns them, their rate per second, and the change in words. Raises ``KeyedError`` if there is no rate.
    """
    n, span_s = len(rows), rows[-1][0] - rows[0][0]
    if to_rate is None and span_s <= (n - 1) / MAX_NUMBER:
        why = "all requests arrive at the same time" if n > 1 else "one request has no rate of its own"
        raise KeyedError(
            ("workload", "rate"),
            f"is missing; give it, since {why}: the placement is designed for it, and no arrival is moved",
        )
    rate = to_rate or (n - 1) / span_s
    stretch = (n - 1) / rate / span_s if span_s > 0 else 1.0
    # Rounding alone must not move arrivals: a resolved scenario must have the same ones again.
    if math.isclose(stretch, 1.0, rel_tol=1e-9):
        return rows, rate, ""
    return [[at_s * stretch, *rest] for at_s, *rest in rows], rate, f", stretched to {rate:g} per second"


def _lengths_of(row: list[int | float]) -> Lengths:
    return int(row[1]), int(row[2])


def _known_lengths(table: WorkloadTable, seed: int, demand: Demand, recorded: list[Lengths]) -> list[Lengths]:
    """Return lengths of past requests, as an operator knows them; empty if nothing is known.

    ``recorded`` are lengths of the trace's requests: those before what the workload replays, or that it does not draw.
    """
    if table.known_lengths is not None:
        return [(n_input, n_output) for n_input, n_output in table.known_lengths]
    if table.turns is not None:
        drawn_before = draw_conversations(_draws(table, seed, "known "), _MOST_KNOWN)
        return [(message.n_input_tokens, message.n_output_tokens) for message in drawn_before]
    rng, past = stream(seed, "known lengths"), _spread(recorded)
    is_drawn = table.n_input_tokens is not None and table.n_output_tokens is not None
    n = _MOST_KNOWN if is_drawn else len(past)
    clients = demand.usual_clients(n, stream(seed, "known clients"))
    columns = []
    for column, spec in enumerate((table.n_input_tokens, table.n_output_tokens)):
        if spec is None:
            columns.append([lengths[column] for lengths in past])
        else:
            concern = ("known input lengths", "known output lengths")[column]
            columns.append(_drawn(spec, rng, demand.own_lengths(column), (seed, concern), clients))
    return list(zip(*columns, strict=True))


def _drawn(
    spec: LengthTable,
    rng: random.Random,
    own: Mapping[int, LengthTable],
    seeded: tuple[int, str],
    clients: Sequence[int],
) -> list[int]:
    """Draw a length for a request of each of ``clients``: by ``spec``, or by their ``own``, by the client's number.

    ``seeded``: seed and concern of the streams of clients with their own. The others' lengths do not depend on them.
    """
    seed, concern = seeded
    draw = drawer(spec, rng)
    draws = {client: drawer(of, stream(seed, f"{concern} of client {client}")) for client, of in own.items()}
    lengths = [draw() for _ in clients]
    return [
        draws[client]() if client in draws else length
        for client, length in zip(clients, lengths, strict=True)
    ]


def _spread(lengths: list[Lengths]) -> list[Lengths]:
    """Return at most ``_MOST_KNOWN`` of them, evenly spread."""
    n = min(len(lengths), _MOST_KNOWN)
    return [lengths[i * len(lengths) // n] for i in range(n)]


def workload_source(table: WorkloadTable, demand: Demand) -> str:
    """Describe in words where arrivals and lengths of a resolved ``[workload]`` and of its clients come from."""
    if table.arrivals == "listed":
        arrivals = table.origin or "listed"
    else:
        arrivals = f"{table.arrivals}, {table.rate:g} per second" + (
            " at first" if table.changes else " on average over a curve" if table.curve else ""
        )
        if table.origin:
            arrivals += f"; {table.origin}"
    lengths = (
        f"input tokens {in_words(table.n_input_tokens)}, output tokens {in_words(table.n_output_tokens)}"
    )
    if table.lengths == "hidden":
        lengths += f", of which at most {table.max_new_tokens} are known of before"
    n_own = len(demand.own_lengths(0).keys() | demand.own_lengths(1).keys())
    if n_own:
        lengths += f"; {n_own} of {demand.n_clients} clients have lengths of their own"
    if table.turns is not None:
        arrivals += f", in conversations ({in_words(table.turns)} requests each)"
    return f"{arrivals}; {lengths}"


def _think_s(think: ThinkTime | float, rng: random.Random) -> Callable[[], float]:
    """Return what draws the seconds before a further message."""
    return (lambda: rng.expovariate(1 / think.mean)) if isinstance(think, ThinkTime) else (lambda: think)


def _draws(table: WorkloadTable, seed: int, concern: str = "") -> Draws:
    """Return what draws a workload's conversations, each from a random stream of its own."""
    assert table.turns is not None and table.n_input_tokens is not None and table.n_output_tokens is not None
    output = drawer(table.n_output_tokens, stream(seed, f"{concern}output lengths"))
    most = table.max_new_tokens
    return Draws(
        turns=drawer(table.turns, stream(seed, f"{concern}turns")),
        first=drawer(table.n_input_tokens, stream(seed, f"{concern}input lengths")),
        further=drawer(
            table.n_further_tokens or table.n_input_tokens, stream(seed, f"{concern}further lengths")
        ),
        output=output if most is None else lambda: min(output(), most),
        think_s=_think_s(table.think_time or 0.0, stream(seed, f"{concern}think times")),
    )


def _earliest_s(starts_s: list[float], messages: list[Message]) -> list[float]:
    """Return when each message arrives if answers take no time."""
    at_s: list[float] = []
    for message in messages:
        at_s.append(at_s[-1] + message.think_s if message.number else starts_s[message.conversation])
    return at_s


@dataclass
class _Coming:
    """Requests as far as they are known, in order: when they arrive, and what was recorded of them.

    ``update``: keys of the resolved ``[workload]``. ``rows``: recorded requests; ``None``: they are generated. ``pairs``:
    their recorded [input, output] tokens. ``prompts``, ``places``, ``messages``: one per request, or none. ``past``:
    lengths of recorded requests that are not among them.
    """

    arrives_at_s: list[float]
    update: dict[str, Any]
    rows: list[Any] | None = None
    pairs: list[list[int]] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    sample: Sample | None = None
    past: list[Lengths] = field(default_factory=list)


class Made(NamedTuple):
    """The requests of a run with what is known about them.

    ``workload``: the resolved table. ``design_lengths``: the (input, output) tokens that the placement is designed for:
    the longest prompt, and the longest output that can occur or, if lengths are hidden, that a request may ask for.
    ``sample``: how recorded requests were chosen (``None`` if generated). ``known_lengths``: those of past requests.
    """

    workload: WorkloadTable
    requests: tuple[RequestPlan, ...]
    design_lengths: Lengths
    sample: Sample | None
    known_lengths: tuple[Lengths, ...]


def make_requests(
    table: WorkloadTable, seed: int, demand: Demand, folder: Path, *, keeps_prompts: bool = False
) -> Made:
    """Make the requests of ``[workload]``; the first generated one arrives at 0 s.

    Each request is of a client drawn by the ``demand`` of all, unless a list says which. ``keeps_prompts``: what a trace
    has of prompts that begin alike is kept. A relative trace file is looked for in ``folder``. Raises ``KeyedError``.
    """
    if table.arrivals in ("trace", "listed"):
        keeps_prompts = keeps_prompts and table.n_input_tokens is None
        coming = _replay(table, seed, folder, demand.n_clients, keeps_prompts)
    else:
        coming = _generate(table, seed, demand, folder)
    wrong = too_late(max(coming.arrives_at_s))
    if wrong is not None:
        raise KeyedError(("workload", "rate"), wrong)
    clients = demand.clients(coming.arrives_at_s, stream(seed, "client choice"))
    turns = _turns(coming, clients)
    inputs, outputs = (_column(table, seed, demand, coming, clients, column) for column in (0, 1))
    longest_input, longest_output = (
        max(longest(spec, seen) for spec in demand.lengths_in_use(column, common))
        for column, common, seen in ((0, table.n_input_tokens, inputs), (1, table.n_output_tokens, outputs))
    )
    if coming.messages:
        longest_input = max(inputs)
    limits: list[int | None] = [None] * len(clients)
    update = coming.update
    if table.lengths == "hidden":
        update["max_new_tokens"] = table.max_new_tokens or longest_output
        limits = [update["max_new_tokens"]] * len(clients)
    for index, row in enumerate(coming.rows or ()):
        limits[index] = int(row[4]) if len(row) > 4 else limits[index]
    blocks = [(prompt.ids, prompt.block_tokens, prompt.answer_ids) for prompt in coming.prompts]
    blocks = blocks or [((), 0, ())] * len(clients)
    requests = tuple(
        RequestPlan(
            index, client, at_s, n_in, n_out if limit is None else min(n_out, limit), limit, turn, *of
        )
        for index, (client, at_s, n_in, n_out, limit, turn, of) in enumerate(
            zip(clients, coming.arrives_at_s, inputs, outputs, limits, turns, blocks, strict=True)
        )
    )
    if coming.rows is not None:
        update["requests"] = [
            [r.arrival_at_s, r.n_input_tokens, r.n_output_tokens, *row[3:]]
            for r, row in zip(requests, coming.rows, strict=True)
        ]
    if table.lengths == "hidden":
        longest_output = max(r.known.n_output_tokens for r in requests)
    known = _known_lengths(table, seed, demand, coming.past)
    if (coming.rows is not None or coming.pairs) and table.known_lengths is None and known:
        update["known_lengths"] = [list(lengths) for lengths in known]
    resolved = table.model_copy(update=update)
    return Made(resolved, requests, (longest_input, longest_output), coming.sample, tuple(known))


def _replay(table: WorkloadTable, seed: int, folder: Path, n_clients: int, keeps_prompts: bool) -> _Coming:
    """Return recorded requests."""
    rows, rate, origin, sample, past = _replayed(table, seed, folder, n_clients, keeps_prompts)
    prompts: list[Prompt] = []
    places: list[Place] = []
    update: dict[str, Any] = {}
    if isinstance(rows[0][-1], Prompt):
        prompts, rows = [row[-1] for row in rows], [row[:-1] for row in rows]
        update = {"prompts": listed(prompts), "prompt_block": prompts[0].block_tokens}
        if table.answers is not None:
            update["answers"] = [list(prompt.answer_ids) for prompt in prompts]
    if isinstance(rows[0][-1], Place):
        places, rows = [row[-1] for row in rows], [row[:-1] for row in rows]
        update = {"conversations": listed_places(places), "think_time": None}
    update |= {
        "arrivals": "listed",
        "file": None,
        "max_input_tokens": None,
        "rate": rate,
        "n_requests": len(rows),
        "origin": origin,
        "draw": None,
    }
    return _Coming(
        [float(row[0]) for row in rows],
        update,
        rows,
        pairs=[[*_lengths_of(row)] for row in rows],
        prompts=prompts,
        places=places,
        sample=sample,
        past=past,
    )


def _generate(table: WorkloadTable, seed: int, demand: Demand, folder: Path) -> _Coming:
    """Return requests with generated arrivals, and with the recorded lengths or conversations that they may have."""
    gap, n = _gaps(table, stream(seed, "arrivals")), table.n_requests or 1
    coming = _Coming([], {})
    if table.turns is not None:
        coming.messages = draw_conversations(_draws(table, seed), n)
    elif None in (table.n_input_tokens, table.n_output_tokens):
        chosen, origin, coming.past = _lengths_listed(table, seed, folder)
        if isinstance(chosen[0], Message):
            coming.messages = chosen
        coming.pairs = [list(each.lengths) if isinstance(each, Message) else each for each in chosen]
        coming.update = {
            "file": None,
            "max_input_tokens": None,
            "origin": origin,
            "request_lengths": coming.pairs,
        }
        if coming.messages:
            rows = [[message.conversation, message.think_s] for message in coming.messages]
            coming.update |= {"conversations": rows, "think_time": None}
    if not coming.messages:
        coming.arrives_at_s = _arrivals_s(table, demand, gap, n)
        return coming
    n_begun = coming.messages[-1].conversation + 1
    if table.arrivals == "poisson":
        starts_s = some_of(_arrivals_s(table, demand, gap, n), n_begun, stream(seed, "conversations"))
    else:
        starts_s = _arrivals_s(table, demand, lambda: gap() * n / n_begun, n_begun)
    coming.arrives_at_s = _earliest_s(starts_s, coming.messages)
    return coming


def _turns(coming: _Coming, clients: list[int]) -> list[Turn | None]:
    """Return each request's turn in its conversation; a conversation's ``clients``, and those of a list, become one."""
    turns: list[Turn | None] = [None] * len(clients)
    for index, message in enumerate(coming.messages):
        is_further = message.number > 0
        clients[index] = clients[index - 1] if is_further else clients[index]
        after = index - 1 if is_further else None
        turns[index] = Turn(message.conversation, message.number, after, message.think_s)
    for index, prompt in enumerate(coming.prompts):
        turns[index] = Turn(prompt.conversation, prompt.turn) if prompt.conversation >= 0 else None
    last: dict[int, int] = {}
    for index, place in enumerate(coming.places):
        before = last.get(place.conversation)
        clients[index] = clients[index] if before is None else clients[before]
        turns[index] = Turn(place.conversation, place.turn, before, 0.0 if before is None else place.think_s)
        last[place.conversation] = index
    for index, row in enumerate(coming.rows or ()):
        clients[index] = int(row[3]) if len(row) > 3 else clients[index]
    return turns


def _column(
    table: WorkloadTable, seed: int, demand: Demand, coming: _Coming, clients: Sequence[int], column: int
) -> list[int]:
    """Return the input (``column`` 0) or output tokens (1) of all requests."""
    spec = (table.n_input_tokens, table.n_output_tokens)[column]
    if coming.messages:
        return [message.lengths[column] for message in coming.messages]
    if spec is None:
        return [pair[column] for pair in coming.pairs]
    concern = ("input lengths", "output lengths")[column]
    return _drawn(spec, stream(seed, concern), demand.own_lengths(column), (seed, concern), clients)
