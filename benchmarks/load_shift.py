"""Draws the effect of moving blocks: per-token times of requests by their arrival, with and without moves.

``python -m benchmarks.load_shift WITH WITHOUT FIGURE``: two run directories of ``scenarios/load-shift.toml``
(emulated or simulated), and the file of the figure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_WITH, _WITHOUT, _MOVE = "#1f5a99", "#d1762b", "#7a3d8a"


def draw(adapted: Path, fixed: Path, figure: Path) -> None:
    """Draws one dot per request of either run, and bands for the times at which servers moved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pyarrow.parquet as pq

    canvas, axes = plt.subplots(figsize=(7.5, 3.6))
    for folder, label, colour in ((fixed, "fixed placement", _WITHOUT), (adapted, "two-time-scale", _WITH)):
        rows: list[dict[str, Any]] = pq.read_table(folder / "requests.parquet").to_pylist()
        done = [row for row in rows if row["per_token_s"] is not None]
        x, y = ([row[key] for row in done] for key in ("arrival_at_s", "per_token_s"))
        axes.plot(x, y, "o", markersize=3, color=colour, label=label, linestyle="")
    for move in json.loads((adapted / "summary.json").read_text(encoding="utf-8"))["moves"]:
        axes.axvspan(move["closed_at_s"], move["open_at_s"], color=_MOVE, alpha=0.12, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("arrival of the request [s]")
    axes.set_ylabel("time per token, waiting included [s]")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    canvas.savefig(figure, dpi=110, bbox_inches="tight")
    plt.close(canvas)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    draw(*map(Path, sys.argv[1:]))
