"""The policies that are compared: one line each in the figures, one row each in the tables."""

from __future__ import annotations

from typing import NamedTuple

from policies.registry import PAIRS


class Line(NamedTuple):
    """A policy pair. ``own_setup``: its session setup is the proposed policy's, else PETALS'.

    ``every``: it takes part in the runs whose seed is a multiple of this.
    """

    name: str
    label: str
    own_setup: bool
    colour: str
    marker: str
    every: int = 1


_LINES = (
    Line("petals", "PETALS", False, "#000000", "o"),
    Line("petals-optimized-number", "Optimized Number", False, "#e69f00", "s"),
    Line("petals-optimized-order", "Optimized Order", False, "#56b4e9", "^"),
    Line("petals-optimized-rr", "Optimized RR", False, "#009e73", "v"),
    Line("proposed", "proposed", True, "#d55e00", "D"),
    # Searching its placement takes a third of a second and more: in all runs it would be most of the whole time.
    Line("foresight", "foresight (ours, every 5th run)", True, "#cc79a7", "P", every=5),
)
"""In the paper's order, then our own. Colours (Okabe and Ito) and markers tell them apart without colour."""

LINES = tuple(line for line in _LINES if line.name in PAIRS)
