"""The policies that are compared: each is one line in the figures, and one row in the tables."""

from __future__ import annotations

from typing import NamedTuple

from policies.registry import PAIRS


class Line(NamedTuple):
    """A pair of policies and how it is drawn. ``own_setup``: it has the session setup of the proposed policy,
    else that of PETALS. ``every``: it takes part only in runs whose seed is a multiple of this.
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
    # Its search for a placement takes a third of a second or more: in all runs it would be most of the time.
    Line("foresight", "foresight (ours, every 5th run)", True, "#cc79a7", "P", every=5),
)
"""In the paper's order, then the testbed's own. Colours are Okabe and Ito's; markers distinguish the lines
without colour.
"""

LINES = tuple(line for line in _LINES if line.name in PAIRS)
