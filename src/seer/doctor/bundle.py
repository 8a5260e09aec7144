"""One file for a bug report: what the doctor found, what it ran on, and what its checks printed.

Invariants (tests/unit/test_doctor_bundle.py asserts them):
- of the environment only what `ENVIRONMENT` lists is in it; values of variables whose names look like secrets
  are cut out of all texts, and the home folder is written as ~;
- every part is at most `MAX_PART` bytes, its end; no prompt, response or weight is in it.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CC", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "TMPDIR",
    "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NCCL_DEBUG", "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF", "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT", "VLLM_LOGGING_LEVEL", "VLLM_WORKER_MULTIPROC_METHOD",
)  # fmt: skip

MAX_PART = 256 * 1024
COMMANDS = (("uname", "-srmv"), ("lscpu",), ("free", "-m"), ("nvidia-smi",), ("nvidia-smi", "topo", "-m"))
COMMAND_SECONDS = 20.0
KERNEL_LINES = 100

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_SHORTEST_SECRET = 6
_KERNEL = re.compile(r"NVRM|Xid|oom|out of memory|segfault|killed process", re.IGNORECASE)
_LEFT_OUT = "[left out]"


def write_bundle(
    file: Path, report: str, config: str, logs: Path, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Write a .tar.gz of the `report` (JSON) and more; return the names of its parts. Raises `OSError`."""
    packages = sorted(f"{dist.metadata['Name']}=={dist.version}" for dist in metadata.distributions())
    allowed = [f"{name}={environ[name]}" for name in ENVIRONMENT if name in environ]
    parts = {
        "doctor.json": report,
        "config.toml": config,
        "packages.txt": "\n".join(packages),
        "environment.txt": "\n".join(allowed),
        "system.txt": "\n\n".join(map(_output, COMMANDS)),
        "kernel.txt": _kernel_lines(_output(("dmesg",))),
        **{f"logs/{log.name}": _end_of(log) for log in sorted(logs.glob("*.log"))},
    }
    with tarfile.open(file, "w:gz") as archive:
        for name, text in parts.items():
            data = cleaned(text, environ).encode(errors="replace")[-MAX_PART:]
            member = tarfile.TarInfo(f"seer-doctor/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return list(parts)


def cleaned(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without the values of secrets, longest first, and without the path of the home folder."""
    secrets = {
        value for name, value in environ.items() if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET
    }
    for escaped in (True, False):  # as reports and configurations have it
        secrets |= {json.dumps(secret, ensure_ascii=escaped)[1:-1] for secret in secrets}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _LEFT_OUT)
    home = environ.get("HOME", "").rstrip("/")
    return text.replace(home, "~") if home else text


def _end_of(file: Path) -> str:
    with file.open("rb") as read:
        cut = read.seek(max(0, file.stat().st_size - MAX_PART))
        text = read.read().decode(errors="replace")
    return whole_lines(text) if cut else text


def whole_lines(text: str) -> str:
    """Return a text whose beginning was cut off from its next line on: it may begin amid a secret."""
    return text.partition("\n")[2] or text


def _output(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"$ {' '.join(command)}\n{error}"
    return f"$ {' '.join(command)}\n{done.stdout}{done.stderr}"


def _kernel_lines(text: str) -> str:
    """Return the kernel's last lines about GPUs and killed processes."""
    return "\n".join([line for line in text.splitlines() if _KERNEL.search(line)][-KERNEL_LINES:])
