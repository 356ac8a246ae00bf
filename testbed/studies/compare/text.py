"""The output of ``testbed compare`` on the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from testbed.records.summary import SIMULATED
from testbed.studies.compare.contrast import STATISTICS
from testbed.studies.compare.load import PARTS
from testbed.studies.compare.notes import notes
from testbed.studies.compare.tables import ALL, KINDS
from testbed.terminal import console_to

_METRICS = {
    "per_token_s": "per token, all tokens",
    "ttft_s": "first token (TTFT)",
    "tpot_s": "remaining tokens (TPOT)",
    "e2e_s": "whole request",
    "queue_s": "queue (admission)",
}
_PART_NAMES = {"hop_compute_s": "compute", "hop_network_s": "network", "hop_client_s": "client"}
_MOST_HOP_ROWS, _MOST_REQUESTS, _MOST_SETTINGS = 40, 5, 20
_LONGEST_VALUE = 40


def comparison_text(answer: dict[str, Any], width: int = 200) -> str:
    """Returns the text: headline, tables and notes, with ``width`` columns so that no number is cut.

    Times are scenario seconds, differences B - A, percentages relative to A.
    """
    buffer = io.StringIO()
    console = console_to(buffer, width, markup=False)
    for name in ("a", "b"):
        console.print(f"{name.upper()} {_about(answer[name])}", soft_wrap=True)
    for line in _headline(answer):
        console.print(line)
    console.print()
    console.print(_overview(answer))
    if answer["hops"]:
        console.print()
        console.print(_hops(answer["hops"]))
        n_more = len(_server_rows(answer["hops"])) - _MOST_HOP_ROWS
        if n_more > 0:
            console.print(f"and {n_more} rows more: --json, or hops.csv with --out")
    if any(row["per_token_difference_s"] for row in answer["requests"]):
        console.print()
        console.print(_requests(answer["requests"]))
    if answer["scenario_differences"]:
        console.print()
        console.print(_settings(answer["scenario_differences"]))
        n_more = len(answer["scenario_differences"]) - _MOST_SETTINGS
        if n_more > 0:
            console.print(f"and {n_more} keys more: --json, or compare.json with --out")
    console.print()
    for line in notes(answer):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def _about(about: dict[str, Any]) -> str:
    policy = about["policy"] or {}
    is_simulated = about["clock_why"] == SIMULATED  # by the engine ``virtual``
    parts = ["simulation with the testbed's own nodes" if is_simulated else about["engine"]]
    if about["mode"]:
        parts.append(f"mode {about['mode']}")
    elif about["network"]:
        parts.append(
            f"clock {about['clock'] or 'real'}, network {about['network']}, compute {about['compute']}"
            + (f", time scale {about['time_scale']:g}" if about["time_scale"] != 1 else "")
        )
    parts.append(f"{policy.get('placement')} + {policy.get('routing')}, seed {about['seed']}")
    parts.append(f"{about['n_completed']} of {about['n_requests']} requests completed")
    if about["overhead_per_hop_s"] is not None:
        parts.append(f"own overhead per hop {1e3 * about['overhead_per_hop_s']:.2f} ms")
    return f"{about['path']}: {about['scenario']}, {'; '.join(parts)}"


def _headline(answer: dict[str, Any]) -> Iterator[str]:
    n = answer["aligned"]["n_compared"]
    yield f"mean per-token time    {_pair(answer['headline']['per_token_s'])}; {n} requests compared"
    for kind, value in answer["headline"].get("hop_compute_s", {}).items():
        yield f"hop compute, {kind:<9} {_pair(value)}"


def _pair(value: dict[str, Any]) -> str:
    if value["difference_s"] is None:
        return f"A {_seconds(value['a'], 4)}, B {_seconds(value['b'], 4)}"
    digits = decimals([value["a"], value["b"]])
    return (
        f"A {value['a']:.{digits}f} s, B {value['b']:.{digits}f} s, B - A {_signed(value['difference_s'], digits)} s"
        f" ({percent(value['difference_ratio'])} % of A)"
    )


def _overview(answer: dict[str, Any]) -> Table:
    table = _table("scenario seconds")
    for name in (
        "A mean",
        "B mean",
        "B - A",
        "% of A",
        "A p50",
        "B p50",
        "% of A",
        "A p99",
        "B p99",
        "% of A",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mean |B - A|", justify="right", no_wrap=True)
    samples = [(label, answer["metrics"][name]) for name, label in _METRICS.items()]
    if answer["tokens"]:
        samples += [(f"single tokens, {kind}", answer["tokens"][kind]) for kind in KINDS]
    for row in answer["hops"] or ():
        if row["server"] == ALL:
            samples += [(f"hop {_PART_NAMES[part]}, {row['kind']}", row[part]) for part in PARTS]
    for label, sample in samples:
        if sample["a"]["n"] or sample["b"]["n"]:
            table.add_row(label, *_cells(sample))
    return table


def _cells(sample: dict[str, Any]) -> Iterator[str]:
    digits = decimals([sample[side][name] for side in "ab" for name in STATISTICS])
    for name in STATISTICS:
        yield _seconds(sample["a"][name], digits)
        yield _seconds(sample["b"][name], digits)
        if name == "mean":
            apart = sample["difference_s"][name]
            yield "-" if apart is None else _signed(apart, digits)
        yield percent(sample["difference_ratio"][name])
    paired = sample["paired"]
    n_most = max(sample["a"]["n"], sample["b"]["n"])
    of = f" ({paired['n']} of {n_most})" if paired["n"] < n_most else ""
    yield _seconds(paired["mean_abs_s"], digits) + of


def _server_rows(hops: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in hops if row["server"] != ALL]


def _hops(hops: Sequence[dict[str, Any]]) -> Table:
    """Returns the table of means by server and kind. A server with other numbers of blocks in the runs shows
    both.
    """
    table = _table("mean per hop, s")
    table.add_column("", no_wrap=True)
    for name in ("hops A", "hops B", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in PARTS:
        for name in (f"{_PART_NAMES[part]} A", "B", "%"):
            table.add_column(name, justify="right", no_wrap=True)
    for row in _server_rows(hops)[:_MOST_HOP_ROWS]:
        cells = []
        for part in PARTS:
            a, b = row[part]["a"]["mean"], row[part]["b"]["mean"]
            digits = decimals([a, b])
            cells += [
                _seconds(a, digits),
                _seconds(b, digits),
                percent(row[part]["difference_ratio"]["mean"]),
            ]
        counts = (str(row["hop_compute_s"][side]["n"]) for side in "ab")
        table.add_row(row["server"], row["kind"], *counts, _blocks(row["n_blocks"]), *cells)
    return table


def _blocks(n_blocks: dict[str, float | None]) -> str:
    a, b = ("-" if value is None else f"{value:.3g}" for value in (n_blocks["a"], n_blocks["b"]))
    return a if a == b else f"{a} | {b}"


def _requests(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table("differ most, s per token")
    for name in ("A", "B", "B - A", "% of A", "queue A", "queue B", "chain"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -abs(row["per_token_difference_s"] or 0.0))[:_MOST_REQUESTS]:
        a, b = row["per_token_a_s"], row["per_token_b_s"]
        digits = decimals([a, b])
        table.add_row(
            f"request {row['request']}",
            _seconds(a, digits),
            _seconds(b, digits),
            _signed(row["per_token_difference_s"], digits),
            percent(row["per_token_ratio"] - 1 if row["per_token_ratio"] is not None else None),
            _seconds(row["queue_a_s"], 3),
            _seconds(row["queue_b_s"], 3),
            "the same" if row["chain_a"] == row["chain_b"] else "another",
        )
    return table


def _settings(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table("settings that differ")
    for name in ("A", "B"):
        table.add_column(name, overflow="fold")
    for row in rows[:_MOST_SETTINGS]:
        table.add_row(row["key"], _value(row["a"]), _value(row["b"]))
    return table


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column(first, no_wrap=True)
    return table


def _value(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def decimals(values: Sequence[float | None]) -> int:
    """Returns how many decimals show four digits of the smallest of ``values``, at least 3 and at most 6."""
    sizes = [abs(value) for value in values if value]
    if not sizes:
        return 3
    return min(6, max(3, 3 - math.floor(math.log10(min(sizes)))))


def percent(ratio: float | None) -> str:
    """Returns a ratio in percent, with a sign and at least three digits: ``+0.12``, ``-12.3``, ``+123``."""
    if ratio is None:
        return "-"
    size = abs(100 * ratio)
    return _signed(100 * ratio, 0 if size >= 100 else 1 if size >= 10 else 2)


def _signed(value: float, digits: int) -> str:
    """Formats ``value`` with a sign, but without one if it is rounded to 0."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]


def _seconds(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
