"""How much tests of drawn cases draw: ``TESTBED_EFFORT`` times as much as usual."""

import os

from hypothesis import settings

EFFORT = int(os.environ.get("TESTBED_EFFORT", "1"))
"""1: what ``make test`` and ``.ci/run`` have."""


def register_profiles() -> None:
    """Have Hypothesis draw as many examples as this effort has, without deadlines: no test here asserts timing.

    Both where it draws at random and, as ``--hypothesis-profile=ci`` asks, the same every time. A test whose examples
    are expensive states how many, times ``EFFORT``.
    """
    for name, parent in (("testbed", "default"), ("ci", "ci")):
        how = settings.get_profile(parent)
        settings.register_profile(name, how, deadline=None, max_examples=40 * EFFORT)
