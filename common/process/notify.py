"""Tells systemd how a service fares (sd_notify(3)); elsewhere nothing is sent.

Invariants:
- while a service starts, its start deadline moves on for as long as the event loop turns: a model
  may load for minutes, a hung start is noticed;
- once ready, the watchdog is fed by the event loop, at twice the rate asked for, so a hung loop is
  noticed;
- what cannot be sent is dropped: nothing here delays or fails a service;
- processes that the service starts inherit none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping

START_BEAT_SECONDS = 5.0
"""Interval of signs of life while starting."""

START_GRACE_SECONDS = 60.0
"""A start that shows none for this long has failed; importing torch may hold the loop for seconds."""


class Notifier:
    """Takes `NOTIFY_SOCKET` and `WATCHDOG_*` out of `environ`. Run `beat` as a task, from the start."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        meant = usec.isdecimal() and pid in ("", str(os.getpid()))
        self._watchdog_seconds = int(usec) / 1e6 if meant else 0.0
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._ready = asyncio.Event()
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self) -> None:
        """Say that the service serves; from now on the watchdog counts."""
        self._send("READY=1")
        self._ready.set()

    def stopping(self) -> None:
        """Say that the service takes no new work."""
        self._send("STOPPING=1")

    async def beat(self) -> None:
        """Show that the event loop turns, for ever; return when nobody wants to know."""
        if self._socket is None:
            return
        while not self._ready.is_set():
            self._send(f"EXTEND_TIMEOUT_USEC={int(START_GRACE_SECONDS * 1e6)}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_BEAT_SECONDS):
                    await self._ready.wait()
        while self._watchdog_seconds > 0:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_seconds / 2)

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._socket is not None:
            self._socket.close()

    def _send(self, state: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(state.encode(), self._address)
