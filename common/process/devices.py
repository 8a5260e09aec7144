"""NVIDIA devices of this machine, as `nvidia-smi` lists them.

Invariants:
- no CUDA context is opened, and neither torch nor a CUDA library is imported;
- only devices that `CUDA_VISIBLE_DEVICES` shows are returned, in its order, as CUDA numbers them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from seer.common.policy.device_defaults import Device

QUERY_SECONDS = 20.0
"""Deadline of `nvidia-smi`: it takes seconds where the driver is not kept loaded."""

FIELDS = "index,uuid,name,memory.total,memory.free,compute_cap"

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""The loaded driver says here what it is."""


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[Device]:
    """Return the devices that CUDA may use here; one of which nothing is known has no memory and no name."""
    listed = _listed()
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return listed
    devices = []
    for name in (part.strip() for part in wanted.split(",")):
        if not name or name == "-1":  # CUDA stops there, too
            break
        found = [d for d in listed if d.name == name or (name.startswith("GPU-") and d.uuid.startswith(name))]
        known = found[0] if len(found) == 1 else Device(name=name)
        devices.append(replace(known, name=name))  # as it was written: what it means depends on CUDA alone
    return devices


def driver_version() -> str:
    """Return the version of the loaded NVIDIA driver, as 580.159.04; empty if none is loaded."""
    try:
        words = DRIVER_FILE.read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdecimal()), "")


def _listed() -> list[Device]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [_device(line) for line in answer.splitlines() if line.count(",") == FIELDS.count(",")]


def _device(line: str) -> Device:
    index, uuid, model, total, free, capability = (part.strip() for part in line.split(","))
    major = capability.partition(".")[0]
    return Device(
        name=index, uuid=uuid, model=model, total_bytes=_mebibytes(total), free_bytes=_mebibytes(free),
        generation=int(major) if major.isdecimal() else 0,
    )  # fmt: skip


def _mebibytes(text: str) -> int:
    """Return bytes; 0 for what `nvidia-smi` does not know, as "[N/A]"."""
    return int(text) * 2**20 if text.isdecimal() else 0
