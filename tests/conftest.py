"""Settings of all tests. Hypothesis measures no time: a loaded machine is no failure."""

from hypothesis import settings

settings.register_profile("timeless", deadline=None)
settings.load_profile("timeless")
