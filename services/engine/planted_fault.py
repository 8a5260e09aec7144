"""The fault that `seer verify --plant-fault` plants into engines that it starts: a token drawn wrongly."""

from __future__ import annotations

import os

PLANTED = "SEER_PLANTED_FAULT"
"""Environment variable with an absolute position; engines of rollouts have none."""


def planted_position() -> int | None:
    """Return the absolute position that this process's engine is to sample wrongly; None: it has no fault."""
    text = os.environ.get(PLANTED, "")
    return int(text) if text else None
