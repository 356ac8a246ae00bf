"""Draws and saves figures, each file whole or not at all. Imports matplotlib only when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

from testbed.rundir import replacing

Writing = Callable[[Path], AbstractContextManager[object]]

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
_MARGIN = 0.1
"""Inches around what a figure fills."""
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


def save_both(
    plt: Any,
    figure: Any,
    folder: Path,
    name: str,
    *,
    dpi: int = DPI,
    tight: bool = False,
    writing: Writing = nullcontext,
) -> Path:
    """Write ``figure`` as PNG and PDF, and close it; returns the PNG's path.

    Raises ``OSError``, or what ``writing`` of the path raises for one.
    """
    try:
        box = _tight_box(figure) if tight else None
        for ending in ("png", "pdf"):
            with writing(path := folder / f"{name}.{ending}"):
                save(figure, path, dpi=dpi, box=box)
    finally:
        plt.close(figure)
    return folder / f"{name}.png"


def _tight_box(figure: Any) -> Any:
    """Return what ``figure`` fills, in inches: as matplotlib's "tight", which draws a figure once more for each file."""
    figure.draw_without_rendering()
    return figure.get_tightbbox().padded(_MARGIN)


def save(figure: Any, path: Path, *, dpi: int = DPI, box: Any = None) -> None:
    """Write ``figure``, or the part in ``box``, in the format of the path's ending. Raises ``OSError``."""
    # Into memory first: if the disk is full, matplotlib would hide that error behind others.
    image, ending = BytesIO(), path.suffix.lower()
    metadata = _METADATA.get(ending, {})
    figure.savefig(image, format=ending[1:] or "png", dpi=dpi, metadata=metadata, bbox_inches=box)
    with replacing(path) as temporary:
        # A copy: a view would live on in the traceback of an error, and an image with a view cannot be closed.
        temporary.write_bytes(image.getvalue())
