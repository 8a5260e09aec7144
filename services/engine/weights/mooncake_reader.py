"""Reads weights from a trainer's memory, with Mooncake's transfer engine, in a process of its own.

Invariants:
- a call into Mooncake that hangs, or crashes, costs this process and no engine: it cannot be ended,
  nor the memory be freed that it writes to;
- nothing waits longer than `SILENCE_SECONDS` for a part; a reader whose engine died ends as well;
- a file is whole, or `fetch` raises.
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
from typing import cast

import msgspec

from seer.common.errors import SeerError
from seer.common.weights.mooncake import RegisteredMemory, TransferEngine, open_engine, own_address

PART_BYTES = 2**24
"""Read at once. On loopback smaller ones are slower; larger ones, or two at a time, are not faster."""

SILENCE_SECONDS = 90.0
"""Longest wait for a part. Mooncake's own over TCP, 61 s for a peer's first answer, then 30, come first."""

_PART, _DONE = b"part\n", b"done\n"
"""What the reader says; anything else is why it failed."""


def size_of(address: str) -> int:
    """Return the size of a stream. Raises `ValueError`."""
    return _memory(address).size


def _memory(address: str) -> RegisteredMemory:
    try:
        return msgspec.json.decode(address, type=RegisteredMemory)
    except msgspec.DecodeError as error:
        raise ValueError(f"is no place in a trainer's memory: {error}") from error


async def fetch(address: str, file: Path) -> None:
    """Copy a stream (`address`: a `RegisteredMemory`, as JSON). Raises `OSError` or `ValueError`."""
    memory = _memory(address)
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, address, str(file),
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
                died = last in (b"", _PART)
                raise ValueError(
                    "the reader of its memory died: see the log" if died else last.decode().strip()
                )
            last = line
    except TimeoutError as error:
        why = f"the trainer at {memory.session} sent nothing for {SILENCE_SECONDS:g} s"
        raise ValueError(why) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            reader.kill()
        await reader.wait()


# --- the process that reads ------------------------------------------------------------------


def read(engine: TransferEngine, memory: RegisteredMemory, file: Path) -> None:
    """Copy a stream, and say so after each part. Raises `OSError`."""
    room = mmap.mmap(-1, PART_BYTES)
    view, start = memoryview(room), ctypes.addressof(ctypes.c_char.from_buffer(room))
    if code := engine.register_memory(start, PART_BYTES):
        raise OSError(f"Mooncake cannot register {PART_BYTES} bytes (code {code}): see its log")
    opened = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    for offset in range(0, memory.size, PART_BYTES):
        length = min(PART_BYTES, memory.size - offset)
        if engine.transfer_sync_read(memory.session, start, memory.pointer + offset, length):
            raise OSError(
                f"the trainer at {memory.session} gave no bytes {offset} to {offset + length}:"
                " it must be there, hold these weights still, and be reached from this machine"
            )
        if (written := os.write(opened, view[:length])) < length:
            raise OSError(f"only {written} of {length} bytes fit into {file.parent}")
        signal.alarm(int(2 * SILENCE_SECONDS))
        os.write(1, _PART)
    os.close(opened)


def main() -> None:
    """Read as the command line says: a `RegisteredMemory` as JSON, and a file."""
    # Ends this process even within a call, and when its engine is no more.
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
    os._exit(0)  # while `engine` is held: taking it down takes a second, or hangs with its calls


if __name__ == "__main__":
    main()
