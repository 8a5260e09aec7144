"""What this machine is: the GPU, its driver, versions, and what Triton needs to compile."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seer.doctor.report_lines import Figure, Report

_QUERY = (
    "name", "driver_version", "pcie.link.gen.current", "pcie.link.width.current", "clocks.sm", "clocks.mem",
    "power.limit", "compute_mode", "memory.used",
)  # fmt: skip


_DRIVER = "install the driver that torch's CUDA needs (from 580 on for CUDA 13), or a CPU build of torch"


def check(report: Report) -> None:
    """Describe the machine; fail where a GPU is there that cannot be used."""
    import torch

    from seer.doctor.device import GPU, INTERPRETED

    report.note(
        "versions", python=platform.python_version(), cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 2), cuda=torch.version.cuda,
        **{name: _version(name) for name in ("torch", "triton", "numpy", "msgspec", "vllm")},
    )  # fmt: skip
    listed = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    driver = _nvidia_smi()
    if not GPU:
        if listed:
            report.expect(False, f"a GPU is listed, but torch {torch.__version__} cannot use it", _DRIVER)
        else:
            report.skip("no GPU: checks run on the CPU where they apply")
    else:
        found = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        report.note(
            "GPU", **driver, capability=f"{found.major}.{found.minor}", gpus=torch.cuda.device_count(),
            processors=found.multi_processor_count, free_gib=free / 2**30, total_gib=total / 2**30,
        )  # fmt: skip
    if GPU or INTERPRETED:
        _check_compiler(report)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    report.note(
        "limits, bytes", locked_memory=locked, shared_memory=_free("/dev/shm"),  # noqa: S108 - asked for its size
        temporary=_free(tempfile.gettempdir()),
    )  # fmt: skip


def _check_compiler(report: Report) -> None:
    compiler = os.environ.get("CC") or next((c for c in ("gcc", "clang", "cc") if shutil.which(c)), None)
    report.expect(
        compiler is not None, "a C compiler for Triton's launchers", "install gcc", compiler=compiler
    )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    report.expect(header.exists(), "Python's headers for Triton's launchers", f"install what has {header}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _free(folder: str) -> int | None:
    return shutil.disk_usage(folder).free if Path(folder).is_dir() else None


def _nvidia_smi() -> dict[str, Figure]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(
        zip((name.replace(".", "_") for name in _QUERY), done.stdout.strip().split(", "), strict=False)
    )
