"""Settings that every unit test shares."""

from hypothesis import settings

# The same examples on every run, and no verdict that depends on how busy the machine is.
settings.register_profile("outrider", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("outrider")
