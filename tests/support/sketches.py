"""Figures that are made but not rendered: rendering takes several times as long as all else of a small study or report.

A test that is about what figures look like has the mark ``renders``.
"""

from __future__ import annotations

from typing import Any, BinaryIO, Protocol

from testbed.results import plots

_BLANK = {
    "png": bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
        "0000000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
    ),
    "pdf": b"%PDF-1.4\n%%EOF\n",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>\n',
}


class SetAttribute(Protocol):
    """``setattr``, or a ``MonkeyPatch``'s, which is undone."""

    def __call__(self, target: Any, name: str, value: Any, /) -> None: ...


def sketch(set_attribute: SetAttribute) -> None:
    """From here on a figure is made with all that it shows, but its file is a blank of its format.

    Imports matplotlib only when a figure is made.
    """
    real = plots._pyplot

    def pyplot() -> Any:
        plt = real()
        set_attribute(plt.Figure, "savefig", _save_blank)
        set_attribute(plt.Figure, "tight_layout", lambda *_, **__: None)
        return plt

    set_attribute(plots, "_pyplot", pyplot)
    set_attribute(plots, "_tight_box", lambda _: None)


def _save_blank(figure: Any, file: BinaryIO, *, format: str, **_: Any) -> None:
    file.write(_BLANK[format])
