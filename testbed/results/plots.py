"""Draws and saves figures, each file whole or not at all. Imports matplotlib only when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from testbed.rundir import replacing

DPI = 130
LINES: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "legend.frameon": False,
}
"""The style of figures with lines over a parameter."""
_METADATA: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
"""Leaves out dates, so that a figure that is drawn again has the same bytes."""


@contextmanager
def plotting(style: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield ``matplotlib.pyplot`` without a display, with ``style`` as its settings in the body."""
    plt = _pyplot()
    with plt.rc_context(dict(style)):
        yield plt


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_both(plt: Any, figure: Any, folder: Path, name: str, *, dpi: int = DPI, tight: bool = False) -> Path:
    """Write ``figure`` as PNG and PDF, and close it; returns the PNG's path. Raises ``OSError``."""
    try:
        for ending in ("png", "pdf"):
            save(figure, folder / f"{name}.{ending}", dpi=dpi, tight=tight)
    finally:
        plt.close(figure)
    return folder / f"{name}.png"


def save(figure: Any, path: Path, *, dpi: int = DPI, tight: bool = False) -> None:
    """Write ``figure`` in the format of the path's ending. Raises ``OSError``."""
    # Into memory first: if the disk is full, matplotlib would hide that error behind others.
    image, ending = BytesIO(), path.suffix.lower()
    box = {"bbox_inches": "tight"} if tight else {}
    figure.savefig(image, format=ending[1:] or "png", dpi=dpi, metadata=_METADATA.get(ending, {}), **box)
    with replacing(path) as temporary:
        # A copy: a view would live on in the traceback of an error, and an image with a view cannot be closed.
        temporary.write_bytes(image.getvalue())
