"""Notes below a comparison: what was left out, and what limits its meaning. One sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from testbed.studies.compare.tables import ALL


def notes(answer: dict[str, Any]) -> Iterator[str]:
    """Yields the notes: which requests were left out and why, what else differs, and what the times
    contain.
    """
    aligned = answer["aligned"]
    for side in "ab":
        if aligned[f"only_{side}"]:
            numbers = aligned[f"only_{side}"]
            yield f"left out: {_count(numbers)} in {side.upper()} alone ({spans(numbers)})"
    if aligned["other_lengths"]:
        numbers = [row["request"] for row in aligned["other_lengths"]]
        yield f"left out: {_count(numbers)} with other lengths in the two runs ({spans(numbers)})"
    yield from _not_completed(aligned["not_completed"])
    yield from _otherwise(aligned)
    yield from _hop_notes(answer)
    if answer["scenario_differences"] is None:
        yield "settings were not compared: one run was made from a scenario, the other from an instance file"
    elif not answer["scenario_differences"]:
        yield "the scenarios are the same"
    code_a, code_b = answer["a"]["code"], answer["b"]["code"]
    if code_a and code_b and code_a != code_b:
        yield f"different code: A {code_a}; B {code_b}"
    for side in "ab":
        scale = answer[side]["time_scale"]
        if scale not in (None, 1):
            yield (
                f"{side.upper()} ran {scale:g} times faster than real time: "
                f"a real delay of 1 ms counts as {scale:g} ms in it"
            )
    yield "all times are scenario seconds; single tokens and hops are those of the compared requests"


def _not_completed(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields one line per pair of outcomes in the two runs."""
    ends: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        ends.setdefault((_end(row["a"]), _end(row["b"])), []).append(row["request"])
    for (in_a, in_b), numbers in ends.items():
        yield f"left out: {_count(numbers)}, {in_a} in A, {in_b} in B ({spans(numbers)})"


def _end(end: dict[str, str]) -> str:
    return f"{end['status']} [{end['reason']}]" if end["reason"] else end["status"]


def _otherwise(aligned: dict[str, Any]) -> Iterator[str]:
    n = aligned["n_compared"]
    for key, what in (
        ("n_other_client", "come from another client"),
        ("n_other_arrival", "arrive at another time: their waiting times cannot be compared one by one"),
        ("n_other_chain", "had another chain: their hops are of other servers or blocks"),
    ):
        if aligned[key]:
            yield f"{aligned[key]} of {n} compared requests {what}"


def _hop_notes(answer: dict[str, Any]) -> Iterator[str]:
    if answer["hops"] is None:
        yield "hops were not compared: a simulation with very many hops does not write them"
        return
    others = sorted(
        {
            row["server"]
            for row in answer["hops"]
            if row["server"] != ALL and None not in row["n_blocks"].values()
            if row["n_blocks"]["a"] != row["n_blocks"]["b"]
        }
    )
    if others:
        shown = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
        yield f"hops on {shown} had another number of blocks on average, which also changes their compute"


def _count(numbers: Sequence[int]) -> str:
    return f"{len(numbers)} request{'s' if len(numbers) > 1 else ''}"


def spans(numbers: Iterable[int]) -> str:
    """Returns ascending whole numbers as text, with consecutive ones joined: ``0-2, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
