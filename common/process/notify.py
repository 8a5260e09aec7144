"""Tells systemd the state of a service (sd_notify(3)), and whoever looks at the file `SEER_ALIVE_FILE`.

Without either nothing is sent.

Invariants:
- while a service starts, its start timeout is extended as long as the event loop runs: a model may load for
  minutes, but a hung start is noticed;
- once ready, the event loop feeds the watchdog at twice the rate that systemd asks for, so a hung loop is
  noticed;
- the file says `starting` or `ready`, and is written every `BEAT_SECONDS` for as long as the event loop runs:
  probes of Kubernetes read it, which start no Python and ask no other service;
- what cannot be sent is dropped: nothing here delays a service or makes it fail;
- processes that the service starts do not inherit the environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

BEAT_SECONDS = 5.0
"""Interval of extensions of the start timeout, and of writes of the file."""

START_GRACE_SECONDS = 60.0
"""A start without an extension for this long has failed; importing torch may block the loop for seconds."""


class Notifier:
    """Takes `NOTIFY_SOCKET`, `WATCHDOG_*` and `SEER_ALIVE_FILE` out of `environ`.

    Run `beat` as a task, from the start.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        for_us = usec.isdecimal() and pid in ("", str(os.getpid()))
        self._watchdog_seconds = int(usec) / 1e6 if for_us else 0.0
        self._address = "\0" + address[1:] if address.startswith("@") else address
        file = environ.pop("SEER_ALIVE_FILE", "")
        self._file = Path(file) if file else None
        self._ready = asyncio.Event()
        self._write_file()  # an earlier incarnation may have left one that says `ready`
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self) -> None:
        """Tell systemd that the service is ready; from now on the watchdog applies."""
        self._send("READY=1")
        self._ready.set()
        self._write_file()

    def stopping(self) -> None:
        """Tell systemd that the service is stopping."""
        self._send("STOPPING=1")

    async def beat(self) -> None:
        """Send extensions, then watchdog messages, for ever; return at once where nobody waits for them."""
        while not self._ready.is_set() and (self._socket or self._file):
            self._send(f"EXTEND_TIMEOUT_USEC={int(START_GRACE_SECONDS * 1e6)}")
            self._write_file()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._ready.wait()
        while self._watchdog_seconds > 0 or self._file:
            self._send("WATCHDOG=1")
            self._write_file()
            await asyncio.sleep(self._watchdog_seconds / 2 or BEAT_SECONDS)

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._socket is not None:
            self._socket.close()

    def _send(self, state: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(state.encode(), self._address)

    def _write_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write_text("ready\n" if self._ready.is_set() else "starting\n")
