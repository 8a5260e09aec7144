"""GPUs and their driver, what compiles kernels for them, and folders for what is compiled.

Invariants (tests/unit/test_doctor_machine.py asserts them):
- a GPU that is listed and cannot be used fails, with the driver's version and what torch was built for;
- a compiler, headers and folders that allow code are demanded where kernels are compiled: on GPUs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from seer.common.errors import EngineError
from seer.common.policy.device_defaults import Device
from seer.common.process.devices import driver_version, visible_devices
from seer.common.process.scratch import cache_folder
from seer.doctor.report_lines import Report
from seer.services.engine.vllm import env

CPU_BUILD = (
    "install the extra cuda13 (pip install 'seer-rollout[cuda13]'), or set CUDA_VISIBLE_DEVICES= to use CPUs"
)

NO_LIST = "put nvidia-smi on the PATH; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"

LEAST_GENERATION = 8
"""bfloat16 and FlashAttention need Ampere or later."""


def devices(report: Report) -> None:
    """Check that engines can use the GPUs that are there."""
    import torch

    judge_devices(report, visible_devices(), torch.version.cuda, torch.cuda.is_available())
    if torch.cuda.is_available():
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    unit = torch.backends.cpu.get_cpu_capability()
    report.note("engines run on CPUs", cores=cores, vector_unit=unit, load=round(os.getloadavg()[0], 1))


def judge_devices(report: Report, listed: Sequence[Device], cuda: str | None, usable: bool) -> None:
    """Judge the devices listed, by the CUDA that torch is built for and whether it can use any."""
    if not usable and cuda is not None:
        report.expect(False, *env.no_device(cuda).rsplit(": ", 1))
    elif not usable and listed:
        models = ", ".join(device.model or device.name for device in listed)
        driver = driver_version() or "none"
        report.expect(
            False, f"GPUs are listed ({models}; driver {driver}), but torch is a CPU build", CPU_BUILD
        )
    elif not usable:
        report.skip("no GPU is listed")
    elif not listed:
        text = "torch can use a GPU that nvidia-smi does not list: engines are planned as on CPUs"
        report.expect(False, text, NO_LIST)
    else:
        report.expect(True, "torch can use the GPU", "", gpus=len(listed), driver=driver_version(), cuda=cuda)
    for device in listed if usable else ():
        old = 0 < device.generation < LEAST_GENERATION
        report.prefer(
            not old, f"GPU {device.name}: {device.model}", "give engine.dtype = float16: it has no bfloat16",
            free_gib=round(device.free_bytes / 2**30, 1), total_gib=round(device.total_bytes / 2**30, 1),
        )  # fmt: skip


def compilers(report: Report) -> None:
    """Check what compiles kernels, and where they are kept."""
    import torch

    judge_compilers(report, torch.cuda.is_available(), cache_folder())


def judge_compilers(report: Report, gpu: bool, cache: Path) -> None:
    """Judge the compiler for a GPU's kernels, and the folder of what is kept between starts."""
    if gpu:
        try:
            env.check_compiler(cache)
        except EngineError as error:
            report.expect(False, *_split(str(error)))
        else:
            report.expect(True, "a C compiler, Python's headers and folders that allow code", "")
    else:
        report.skip("no GPU: engines compile nothing")
    problem = problem_of_writing(cache)
    text = f"{cache} cannot be written to ({problem}): engines measure and compile at each start"
    kept = f"what engines measure and compile is kept in {cache}"
    report.prefer(
        not problem, text if problem else kept, "set XDG_CACHE_HOME to a folder that can be written to"
    )


def problem_of_writing(folder: Path) -> str:
    """Return why no file can be made in a folder, which is made if it is missing; empty if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _split(error: str) -> tuple[str, str]:
    """Return what is wrong and what to do, which errors have behind their last semicolon."""
    text, _, fix = error.rpartition("; ")
    return text, fix
