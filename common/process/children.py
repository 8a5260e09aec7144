"""How a child process ends: with its parent, and by what."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)
"""Opened before any fork: nothing may be loaded between fork and exec."""


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os._exit(1)


def how_ended(code: int) -> str:
    """Return a text of a code, as `subprocess` gives it: below 0 for a signal, which may have no name."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"
