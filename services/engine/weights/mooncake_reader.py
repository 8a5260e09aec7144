"""Reads weights from a trainer's memory, with Mooncake's transfer engine, in a process of its own.

Invariants:
- a call into Mooncake that hangs or crashes takes down the reader process alone, never an engine: within an
  engine it could not be ended, nor could the memory that it writes to be freed;
- nothing waits longer than `SILENCE_SECONDS` for a part; a reader ends when its engine died;
- all of the blob is there, or `fetch` raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from seer.common.errors import NOT_DECODED, SeerError
from seer.common.weights.mooncake import RegisteredMemory, TransferEngine, open_engine, own_address

if TYPE_CHECKING:  # a reader starts without it
    from seer.common.blobs import Blob

PART_BYTES = 2**24
"""Bytes per read. On loopback smaller ones are slower; larger ones, or two at a time, are not faster."""

SILENCE_SECONDS = 90.0
"""Longest wait for a part: longer than Mooncake's own over TCP (61 s for a first answer, then 30)."""

_PART, _DONE = b"part\n", b"done\n"
"""Lines that the reader prints; any other line says why it failed."""


class TrainerMemory:
    """A source of the stream at `address`, a `RegisteredMemory` as JSON. Raises `ValueError` for another."""

    def __init__(self, address: str) -> None:
        try:
            self._memory = msgspec.json.decode(address, type=RegisteredMemory)
        except NOT_DECODED as error:
            raise ValueError(f"is not an address in a trainer's memory: {error}") from error
        self._address = address
        self.size = self._memory.size

    async def fetch(self, blob: Blob) -> None:
        """See `blobs.Source`: all of it, whatever is there."""
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, self._address, str(blob.file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={"MC_LOG_LEVEL": "ERROR", **os.environ},
        )  # fmt: skip
        last = line = b""
        try:
            while line != _DONE:
                async with asyncio.timeout(SILENCE_SECONDS):
                    line = await cast("asyncio.StreamReader", reader.stdout).readline()
                if not line:
                    died = "the process that read the trainer's memory died: see the log"
                    raise ValueError(died if last in (b"", _PART) else last.decode().strip())
                last = line
        except TimeoutError as error:
            why = f"the trainer at {self._memory.session} sent nothing for {SILENCE_SECONDS:g} s"
            raise ValueError(why) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                reader.kill()
            await reader.wait()
        blob.came(0, self.size)


# --- the process that reads ------------------------------------------------------------------


def read(engine: TransferEngine, memory: RegisteredMemory, file: Path) -> None:
    """Copy a stream; print a line after each part. Raises `OSError`."""
    buffer = mmap.mmap(-1, PART_BYTES)
    view, start = memoryview(buffer), ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if code := engine.register_memory(start, PART_BYTES):
        raise OSError(f"Mooncake cannot register {PART_BYTES} bytes (code {code}): see its log")
    opened = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    for offset in range(0, memory.size, PART_BYTES):
        length = min(PART_BYTES, memory.size - offset)
        if engine.transfer_sync_read(memory.session, start, memory.pointer + offset, length):
            raise OSError(
                f"the trainer at {memory.session} sent no bytes {offset} to {offset + length}:"
                " it must be running, still hold these weights, and be reachable from this machine"
            )
        if (written := os.write(opened, view[:length])) < length:
            raise OSError(f"only {written} of {length} bytes fit into {file.parent}")
        signal.alarm(int(2 * SILENCE_SECONDS))
        os.write(1, _PART)
    os.close(opened)


def main() -> None:
    """Read as the command line says: a `RegisteredMemory` as JSON, and a file."""
    # An alarm ends this process even within a call, and when its engine has died.
    signal.alarm(int(2 * SILENCE_SECONDS))
    text, file = sys.argv[1:]
    try:
        memory = msgspec.json.decode(text, type=RegisteredMemory)
        engine = open_engine(own_address(memory.session), memory.protocol)
        read(engine, memory, Path(file))
        last = _DONE
    except (OSError, ValueError, SeerError) as error:
        last = " ".join(str(error).split()).encode() + b"\n"
    os.write(1, last)
    os._exit(0)  # without destroying `engine`: that takes a second, or hangs like its calls


if __name__ == "__main__":
    main()
