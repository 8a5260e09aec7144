"""Seconds by phase of an iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what runs inside."""
        started = time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - started
