"""Chooses the recorded requests that a run uses: the first, a window of its own, or a block bootstrap.

Runs with several seeds over one recording are independent samples only if each uses other requests.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Literal, NamedTuple

Draw = Literal["first", "windows", "bootstrap"]
Rows = list[list[int | float]]


class Sample(NamedTuple):
    """How a run's requests were chosen from ``n_recorded`` recorded ones.

    ``draw`` is ``None`` if the scenario does not set it; then they are the first ones.
    """

    draw: Draw | None
    n_recorded: int


def drawn(rows: Rows, n: int, draw: Draw, seed: int, rng: random.Random) -> tuple[Rows, str, Rows]:
    """Return ``n`` of the recorded ``rows`` ([arrival in s, ...]), in words which ones they are, and those before them.

    What came before is what an operator can know: nothing before the first requests. Blocks of a bootstrap have no order in
    time; there they are all requests that are not drawn.

    "first": the first ``n``, unchanged. "windows": ``n`` consecutive requests, moved to begin at 0 s.
    Consecutive seeds use windows that share no request, spread over the recording, until all windows are
    used. "bootstrap": blocks of ``ceil(sqrt(n))`` consecutive requests from random places (after the last
    request comes the first), with the recorded gap before each request; the recording's first request has
    none, and gets the mean gap.
    """
    if draw == "first":
        return rows[:n], f"the first {n:,} of {len(rows):,} requests", []
    if draw == "windows":
        order = list(range(len(rows) // n))
        # The same order for all seeds: otherwise two seeds could use the same window.
        random.Random(f"windows:{len(rows)}:{n}").shuffle(order)
        first = order[seed % len(order)] * n
        window = rows[first : first + n]
        start_s = window[0][0]
        which = f"requests {first + 1:,} to {first + n:,} of {len(rows):,}"
        return [[at_s - start_s, *rest] for at_s, *rest in window], which, rows[:first]
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
    is_drawn = set(chosen[:n])
    others = [row for index, row in enumerate(rows) if index not in is_drawn]
    return found, f"{n:,} of {len(rows):,} requests drawn in blocks of {block}", others
