"""How much tests of drawn cases draw: ``TESTBED_EFFORT`` times as much as usual."""

import os

EFFORT = int(os.environ.get("TESTBED_EFFORT", "1"))
"""1: some 40 s of CPU for chaos and fuzzing together. ``.ci/run`` has 3."""
