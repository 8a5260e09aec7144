"""What must be loaded before Mooncake's wheel for CUDA can be imported.

Invariants:
- neither torch nor Mooncake is imported here;
- where no CUDA runtime was installed with pip, nothing is loaded: Mooncake for CPUs needs none.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from pathlib import Path

CUDA_RUNTIME = Path("cu13", "lib", "libcudart.so.13")
"""Where CUDA's wheels have the runtime, in the folder `nvidia` of the installed packages."""


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
