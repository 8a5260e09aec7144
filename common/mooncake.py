"""What Mooncake needs and does wherever it is used: CUDA's runtime before its import, and its first words.

Invariants:
- neither torch nor Mooncake is imported here;
- where no CUDA runtime was installed with pip, nothing is loaded: Mooncake for CPUs needs none.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path

CUDA_RUNTIME = Path("cu13", "lib", "libcudart.so.13")
"""Where CUDA's wheels have the runtime, in the folder `nvidia` of the installed packages."""

HARMLESS = (b"Local segment descriptor not found", b"Logging before InitGoogleLogging")
"""In lines at the level of errors that Mooncake writes whenever a store is set up well."""


_LAST_LINE_SECONDS = 1.0
_PIPE_BYTES = 2**20


def load_cuda_runtime() -> None:
    """Load CUDA's runtime where pip installed it; call this before Mooncake is imported without torch.

    Mooncake's libraries look for it in their own folder and in the system's, where only a CUDA toolkit puts
    it. A library of the same name that is loaded already serves them, too.
    """
    found = importlib.util.find_spec("nvidia")
    for folder in (found and found.submodule_search_locations) or ():
        library = Path(folder) / CUDA_RUNTIME
        if library.is_file():
            with contextlib.suppress(OSError):  # Mooncake's own error says what is missing
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return


@contextlib.contextmanager
def without_harmless_lines() -> Iterator[None]:
    """Keep the lines `HARMLESS` off the process's stderr; all others pass as they come.

    What is started inside, and goes on, keeps the filter.
    """
    read, write = os.pipe()
    real = os.dup(2)
    with contextlib.suppress(OSError):  # the call may keep the reader from running; a user may have no more
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.dup2(write, 2)
    os.close(write)
    reader = threading.Thread(target=_pass_on, args=(read, os.dup(real)), daemon=True)
    reader.start()
    try:
        yield
    finally:
        os.dup2(real, 2)
        os.close(real)
        reader.join(_LAST_LINE_SECONDS)


def _pass_on(read: int, to: int) -> None:
    with os.fdopen(read, "rb") as lines, os.fdopen(to, "wb", buffering=0) as out:
        for line in lines:
            with contextlib.suppress(OSError):  # nobody reads it
                if not any(each in line for each in HARMLESS):
                    out.write(line)
