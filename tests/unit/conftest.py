"""How Hypothesis runs: no test here asserts timing, so examples have no deadline."""

from hypothesis import settings

settings.register_profile("testbed", deadline=None)
settings.load_profile("testbed")
