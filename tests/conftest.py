"""No test is gated on wall time: machines stall."""

from hypothesis import settings

settings.register_profile("seer", deadline=None)
settings.load_profile("seer")
