"""No test is gated on wall time: machines stall."""

import signal

from hypothesis import settings

settings.register_profile("seer", deadline=None)
settings.load_profile("seer")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job: what tests start would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
