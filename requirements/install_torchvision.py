"""Install torchvision, which vision-language models need, in the build for this environment's torch.

    .venv/bin/python requirements/install_torchvision.py

For torch with CUDA, that is the build of the package index, which `cuda13.lock` has. For torch on CPUs it
is PyTorch's build for CPUs, where pip is configured with an index that has it. Where it is not, the package
index's build is installed, and its registrations of operators are taken out: they name operators that only
exist with CUDA, so to import it fails with "operator torchvision::nms does not exist". Neither processors of
images nor vLLM use these operators.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

VERSION = "0.28.0"
"""The release for the torch that vLLM pins: `cuda13.lock` has it, too."""

REGISTRATIONS = ("_autograd_registrations.py", "_meta_registrations.py")

REASON = '"""Emptied: this build is for CUDA, and what it registers does not exist in a torch for CPUs."""\n'


def main() -> int:
    """Install what is missing; return the exit status."""
    import torch

    if _loads():
        return 0
    for_cpus = torch.version.cuda is None
    if for_cpus and _pip(f"torchvision=={VERSION}+cpu") and _loads():
        return 0
    if for_cpus:
        print("pip finds no torchvision for CPUs: taking that for CUDA, without its operators", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pin = Path(folder) / "torchvision.txt"
        pin.write_text(pinned())
        _pip("--require-hashes", "-r", str(pin))
    if for_cpus:
        empty_registrations(Path(str(metadata.distribution("torchvision").locate_file("torchvision"))))
    if _loads():
        return 0
    print(f"torchvision {VERSION} does not load with torch {torch.__version__}", file=sys.stderr)
    return 1


def pinned() -> str:
    """Return the package index's build with its hashes, as `cuda13.lock` has it."""
    lock = (Path(__file__).parent / "cuda13.lock").read_text()
    found = re.search(rf"^torchvision=={VERSION}[^\n]*\n(    --hash[^\n]*\n)+", lock, re.MULTILINE)
    if found is None:
        raise SystemExit(f"cuda13.lock does not pin torchvision {VERSION}")
    return found[0]


def empty_registrations(package: Path) -> None:
    """Take the registrations of operators out of an installed torchvision. Raises `OSError`."""
    for name in REGISTRATIONS:
        file = package / name
        file.stat()  # of another release: nothing is written beside it
        file.unlink()  # the file may be a hard link to one that other environments use
        file.write_text(REASON)


def _loads() -> bool:
    """Return whether torchvision can be imported, in a process of its own: a failed import leaves traces."""
    command = [sys.executable, "-c", "import torchvision"]
    return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0


def _pip(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries=0"]
    done = subprocess.run(
        [*command, "--timeout=15", *arguments], capture_output=True, timeout=600, check=False
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
