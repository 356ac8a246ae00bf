"""Writes the files of ``--out``: compare.json, requests.csv, hops.csv and the figures."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.errors import RunError
from testbed.rundir import replacing, write_json
from testbed.studies.compare.align import Alignment
from testbed.studies.compare.contrast import STATISTICS
from testbed.studies.compare.load import PARTS, Run


def write_comparison(out: Path, answer: dict[str, Any], a: Run, b: Run, alignment: Alignment) -> None:
    """Write the files of a comparison to the folder ``out``. Raises ``RunError`` if they cannot be
    written.
    """
    from testbed.studies.compare.figures import draw_comparison

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "compare.json", answer)
        _write_csv(out / "requests.csv", answer["requests"])
        if answer["hops"] is not None:
            _write_csv(out / "hops.csv", list(_hop_rows(answer["hops"])))
        draw_comparison(out, answer, a, b, alignment)
    except OSError as error:
        raise RunError(
            f"cannot write to {out} ({error.strerror}); make room, and choose another --out"
        ) from error


def _hop_rows(hops: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields one flat row per server, kind and part."""
    for row in hops:
        for part in PARTS:
            flat = {"server": row["server"], "kind": row["kind"], "part": part.removesuffix("_s")}
            flat |= {f"n_blocks_{side}": row["n_blocks"][side] for side in "ab"}
            flat |= {f"n_{side}": row[part][side]["n"] for side in "ab"}
            for name in STATISTICS:
                flat |= {f"{name}_{side}_s": row[part][side][name] for side in "ab"}
                flat[f"{name}_difference_s"] = row[part]["difference_s"][name]
                flat[f"{name}_difference_ratio"] = row[part]["difference_ratio"][name]
            yield flat


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
