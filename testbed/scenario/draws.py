"""Which of the recorded requests a run takes: the first, a window of its own, or a block bootstrap.

Runs of several seeds over one recording are samples only if each takes other requests.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Literal, NamedTuple

Draw = Literal["first", "windows", "bootstrap"]
Rows = list[list[int | float]]


class Sample(NamedTuple):
    """How a run's requests were taken from ``n_recorded`` recorded ones; ``draw`` ``None``: nobody said, so the first."""

    draw: Draw | None
    n_recorded: int


def drawn(rows: Rows, n: int, draw: Draw, seed: int, rng: random.Random) -> tuple[Rows, str]:
    """``n`` of the recorded ``rows`` (arrival in s, ...), the first at 0 s, and which they are, for people.

    "windows": consecutive requests. Seeds that follow each other take windows that share no request, as long as there
    are any, spread over the recording. "bootstrap": blocks of ``ceil(sqrt(n))`` consecutive requests from
    anywhere (from the end on to the beginning), with the gaps between them as recorded; what came before the first
    one nobody knows, so it gets the mean gap.
    """
    if draw == "first":
        return rows[:n], f"the first {n:,} of {len(rows):,} requests"
    if draw == "windows":
        order = list(range(len(rows) // n))
        random.Random(f"windows:{len(rows)}:{n}").shuffle(
            order
        )  # the same for all seeds, or windows would meet
        first = order[seed % len(order)] * n
        window = rows[first : first + n]
        start_s = window[0][0]
        which = f"requests {first + 1:,} to {first + n:,} of {len(rows):,}"
        return [[at_s - start_s, *rest] for at_s, *rest in window], which
    gaps_s = [now[0] - before[0] for before, now in pairwise(rows)]
    gaps_s.insert(0, math.fsum(gaps_s) / len(gaps_s) if gaps_s else 0.0)
    block = math.ceil(math.sqrt(n))
    chosen: list[int] = []
    while len(chosen) < n:
        start = rng.randrange(len(rows))
        chosen += [(start + i) % len(rows) for i in range(block)]
    found: Rows = []
    at_s = 0.0
    for index in chosen[:n]:
        at_s += gaps_s[index] if found else 0.0
        found.append([at_s, *rows[index][1:]])
    return found, f"{n:,} of {len(rows):,} requests drawn in blocks of {block}"
