"""How much tests of drawn cases draw: ``TESTBED_EFFORT`` times as much as usual."""

import os

from hypothesis import settings

_ASKED = float(os.environ.get("TESTBED_EFFORT", "1"))
EFFORT = max(1, int(_ASKED))
"""1: what ``make test`` and ``.ci/run`` have. For tests that can draw more, but not less."""


def n_drawn(n_examples: int) -> int:
    """Returns how many cases a test draws that usually draws ``n_examples``; efforts below 1 make it fewer."""
    return max(2, round(n_examples * _ASKED))


def register_profiles() -> None:
    """Have Hypothesis draw as many examples as this effort has, without deadlines: no test here asserts timing.

    Both where it draws at random and, as ``--hypothesis-profile=ci`` asks, the same every time. A test whose examples
    are expensive states how many (``n_drawn``).
    """
    for name, parent in (("testbed", "default"), ("ci", "ci")):
        how = settings.get_profile(parent)
        settings.register_profile(name, how, deadline=None, max_examples=n_drawn(40))
