"""The output of ``testbed links``: a text table in which the worst pairs are marked, Markdown, CSV, and a
plot.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.errors import RunError
from testbed.rundir import write_json, write_text
from testbed.studies.links.plot import draw_links, rate_error_percent

Row = dict[str, Any]

_COLUMNS = (
    ("RTT asked", 9, 3, lambda row: row["rtt_ms"]["requested"]),
    ("p50", 9, 3, lambda row: row["rtt_ms"]["p50"]),
    ("p99", 9, 3, lambda row: row["rtt_ms"]["p99"]),
    ("echo asked", 10, 3, lambda row: row["echo_ms"]["requested"]),
    ("p50", 9, 3, lambda row: row["echo_ms"]["p50"]),
    ("p99", 9, 3, lambda row: row["echo_ms"]["p99"]),
    ("Mbit/s asked", 12, 1, lambda row: row["rate_mbps"]["requested"]),
    ("achieved", 9, 1, lambda row: row["rate_mbps"]["achieved"]),
    ("error %", 7, 1, rate_error_percent),
)
_ERRORS: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("RTT p50", lambda row: row["rtt_ms"]["error_p50"]),
    ("RTT p99", lambda row: row["rtt_ms"]["error_p99"]),
    ("rate", rate_error_percent),
)
_UNITS = {"RTT p50": "ms", "RTT p99": "ms", "rate": "%"}


def worst(rows: Sequence[Row]) -> Iterator[tuple[str, int, float]]:
    """Yields (kind of error, index of the row, error) for the largest error of each kind; the first row of
    equals.
    """
    for what, error_of in _ERRORS:
        errors = [
            (abs(error), -i, error) for i, row in enumerate(rows) if (error := error_of(row)) is not None
        ]
        if errors:
            _, number, error = max(errors)
            yield what, -number, error


def _parts(answer: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """Yields (title, rows) for idle links, and for links under load if these were measured."""
    yield "idle", answer["pairs"]
    load = answer["load"]
    if load is not None:
        rows = [{**row, **row["under_load"]} for row in answer["pairs"]]
        yield (
            f"under load: {load['busy_pairs']} other pairs busy, {load['echoes_per_s']:.0f} echoes/s together",
            rows,
        )


def _notes(rows: Sequence[Row]) -> list[str]:
    """Returns a note on each row: why it failed, and which errors are the largest; empty for most."""
    notes = [[row["failure"]] if row["failure"] else [] for row in rows]
    for what, number, _ in worst(rows):
        notes[number].append(f"worst {what}")
    return [", ".join(note) for note in notes]


def _worst_line(rows: Sequence[Row]) -> str:
    if not list(worst(rows)):
        return "no pair could be measured"
    return "largest errors: " + "; ".join(
        f"{what} {error:+.3g} {_UNITS[what]} ({rows[number]['from']} to {rows[number]['to']})"
        for what, number, error in worst(rows)
    )


def links_text(answer: dict[str, Any]) -> str:
    """Returns the tables for the terminal."""
    lines = [
        f"network {answer['network']} ({answer['why']}), time scale {answer['time_scale']:g}",
        f"RTT of one byte, echo of {answer['echo_bytes']} bytes each way (ms), rate with headers",
    ]
    width = max(len(row[key]) for row in answer["pairs"] for key in ("from", "to"))
    for title, rows in _parts(answer):
        head = " ".join(f"{name:>{wide}}" for name, wide, _, _ in _COLUMNS)
        lines += ["", title, f"{'from':<{width}} {'to':<{width}} {head}"]
        for row, note in zip(rows, _notes(rows), strict=True):
            cells = " ".join(_cell(value(row), wide, digits) for _, wide, digits, value in _COLUMNS)
            mark = f"  <- {note}" if note else ""
            lines.append(f"{row['from']:<{width}} {row['to']:<{width}} {cells}{mark}")
        lines.append(_worst_line(rows))
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def links_markdown(answer: dict[str, Any]) -> str:
    """Returns the same tables in Markdown."""
    lines = [
        f"# Links of {answer['scenario']}: asked and achieved",
        "",
        f"Network `{answer['network']}` ({answer['why']}), time scale {answer['time_scale']:g}. RTT: echoes of "
        f"one byte. Echo: {answer['echo_bytes']} bytes each way. Milliseconds; rates with headers.",
    ]
    head = ["from", "to", *(name for name, *_ in _COLUMNS), "note"]
    for title, rows in _parts(answer):
        lines += ["", f"## {title.capitalize()}", "", f"| {' | '.join(head)} |"]
        lines.append("| --- | --- |" + " ---: |" * len(_COLUMNS) + " --- |")
        for row, note in zip(rows, _notes(rows), strict=True):
            cells = [_cell(value(row), 0, digits) for _, _, digits, value in _COLUMNS]
            lines.append(f"| {row['from']} | {row['to']} | {' | '.join(cells)} | {note} |")
        worst = _worst_line(rows)
        lines += ["", f"{worst[0].upper()}{worst[1:]}."]
    return "\n".join(lines) + "\n"


def links_csv(answer: dict[str, Any]) -> str:
    """Returns a CSV table with one row per direction and state (idle, load). A missing value is an empty
    cell.
    """
    file = io.StringIO()
    head = ["from", "to", "state"]
    measures = {
        "rtt_ms": ("requested", "p50", "p99", "n"),
        "echo_ms": ("requested", "p50", "p99", "n"),
        "rate_mbps": ("requested", "achieved", "goodput"),
    }
    head += [f"{measure}_{key}" for measure, keys in measures.items() for key in keys]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*head, "jitter_ms", "loss_ratio", "failure"])
    for state, (_, rows) in zip(("idle", "load"), _parts(answer), strict=False):
        for row in rows:
            values = [row[measure][key] for measure, keys in measures.items() for key in keys]
            writer.writerow(
                [row["from"], row["to"], state, *values, row["jitter_ms"], row["loss_ratio"], row["failure"]]
            )
    return file.getvalue()


def write_links(folder: Path, answer: dict[str, Any]) -> None:
    """Make ``folder`` and write ``links.json``, ``links.md``, ``links.csv``, ``links.png`` and ``links.pdf``
    there.

    Raises ``RunError`` if they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "links.json", answer)
        write_text(folder / "links.md", links_markdown(answer))
        write_text(folder / "links.csv", links_csv(answer))
        draw_links(folder, answer)
    except OSError as error:
        raise RunError(
            f"cannot write to {folder} ({error.strerror}); make room, or choose another --out"
        ) from error
