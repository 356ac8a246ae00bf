"""How many examples Hypothesis draws."""

from hypothesis import settings

from tests.support.effort import register_profiles

register_profiles()
settings.load_profile("testbed")
