"""The output of ``testbed score`` on the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from testbed.studies.score.marks import Best
from testbed.terminal import console_to

_WIDTH = 140


def headline(answer: Mapping[str, Any]) -> str:
    """Return a policy's score and its seeds in one line."""
    quick = " (quick)" if answer["quick"] else ""
    score = _score(answer["combined_score"], answer["interval"])
    return f"{answer['policy']} on {answer['suite']}{quick}: score {score} on seeds {_seeds(answer['seeds'])}"


def score_text(answer: dict[str, Any], best: Mapping[str, Best]) -> str:
    """Return the score, then a row per setting: its score, and the figures beside the best of the references."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True)
    for title in (
        "score",
        "met",
        "best",
        "given up",
        "TTFT p95",
        "best",
        "TPOT p95",
        "best",
        "place CPU",
        "route CPU",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    notes = []
    for row in answer["settings"]:
        of = best[row["name"]]
        table.add_row(
            row["name"],
            f"{row['score']:.3f}",
            _percent(row["met_ratio"]),
            _percent(of.met_ratio),
            _percent(row["given_up_ratio"]),
            _seconds(row["ttft_p95_s"]),
            _seconds(_p95_s(of.ttft_rate)),
            _seconds(row["tpot_p95_s"]),
            _seconds(_p95_s(of.tpot_rate)),
            _seconds(row["place_cpu_s"]),
            "-" if row["route_cpu_ms"] is None else f"{row['route_cpu_ms']:.2g} ms",
        )
        if row["why"]:
            notes.append(f"{row['name']}: {row['why']}")
    buffer = io.StringIO()
    console = console_to(buffer, _WIDTH)
    console.print(headline(answer))
    if answer["fresh_score"] is not None:
        fresh = _score(answer["fresh_score"], answer["fresh_interval"])
        console.print(f"on fresh seeds {_seeds(answer['fresh_seeds'])}: {fresh}")
    console.print(
        "1 is the best of the reference policies on the frozen seeds, setting by setting; docs/score.md has the formula."
    )
    console.print(table)
    for note in notes:
        console.print(note)
    if not answer["valid"]:
        console.print(f"not valid: {answer['why']}")
    return buffer.getvalue().rstrip()


def leaderboard_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the leaderboard's table."""
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    buffer = io.StringIO()
    console_to(buffer, _WIDTH).print(table)
    return buffer.getvalue().rstrip()


def _score(score: float, interval: list[float] | None) -> str:
    return f"{score:.3f}" + ("" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})")


def _seeds(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))


def _p95_s(rate: float) -> float | None:
    return 1 / rate if rate else None


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"
