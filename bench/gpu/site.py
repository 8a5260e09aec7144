"""The Python packages that an engine needs, made small enough to carry to a bare GPU machine.

    python bench/gpu/site.py wheels build/wheels       # download what requirements/cuda13.lock pins, 4 GB
    python bench/gpu/site.py make build/wheels build/site
    python bench/gpu/site.py seer build/site           # Seer itself, as it is in this checkout
    python bench/gpu/site.py unpack build/site /tmp/seer      # there

`make` and `seer` write parts (`parts.py`) that fit beside the checkout into what may be sent at once. They
can be sent one by one: `unpack` names those that are missing. When all are there it lays them outside the
checkout, links the CUDA libraries that the machine's own torch brings, checks that torch and vLLM can be
imported, and prints the PYTHONPATH to use. GPU code is cut to one architecture (`fatbin.py`).
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import fatbin
import parts

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
ARCH = 90
PART_BYTES = 34 * parts.MIB
"""Of a part: 64 MiB may be sent at once, and the checkout, 25 MiB, goes along."""

MANYLINUX = range(5, 36)
"""Minor versions of glibc 2 whose wheels may be taken, as in requirements/lock.py."""

OWN_CUDA = {
    "nvidia-cublas", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13",
    "nvidia-cufft", "nvidia-cufile", "nvidia-curand", "nvidia-cusolver", "nvidia-cusparse",
    "nvidia-cusparselt-cu13", "nvidia-nvjitlink", "nvidia-nvshmem-cu13", "nvidia-nvtx",
}  # fmt: skip
"""Comes with the machine's own torch, which has CUDA 13, too."""

OWN = {
    "cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-python", "cuda-toolkit", "llvmlite", "numba",
    "nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-nvvm", "opencv-python-headless",
}  # fmt: skip
"""The machine has these, or a compiler in their place."""

UNUSED = {
    "anthropic", "cuda-tile", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor",
    "mooncake-transfer-engine-cuda13", "nccl-extensions", "nccl4py", "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13", "pynvvideocodec", "quack-kernels",
    "tilelang", "tokenspeed-mla", "tokenspeed-triton", "torchaudio", "torchcodec", "z3-solver",
}  # fmt: skip
"""Nothing that the kit runs needs these. vLLM would import FlashInfer at each start, to tune kernels that no
dense bfloat16 model has."""

DROPPED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",  # PTX alone for this GPU: minutes of compiling
    "triton/backends/amd/lib/*", "triton/backends/nvidia/bin/ptxas-blackwell", "triton/_C/libproton.so",
    "triton/backends/nvidia/lib/cupti/*", "vllm/vllm-rs", "*.a",
)  # fmt: skip
"""Files of the rest that no engine on this GPU reads."""


def pins(lock: str) -> Iterator[str]:
    """Yield the pins of a lock file that are for `PYTHON`, with their hashes."""
    for line in lock.replace("\\\n", " ").splitlines():
        pin, _, hashes = line.partition("--hash")
        name, _, marker = pin.partition(" ;")
        if name and not name.startswith("#") and (not marker or f"'{PYTHON}'" in marker):
            yield f"{name.strip()} --hash{hashes}"


def wheels(folder: Path) -> None:
    """Download all wheels that the lock files pin; those that are there stay."""
    tags = [*(f"manylinux_2_{minor}" for minor in MANYLINUX), "manylinux2014", "manylinux2010", "linux"]
    wanted = [
        pin for name in ("core", "cuda13") for pin in pins((ROOT / f"requirements/{name}.lock").read_text())
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted))
        file.flush()
        subprocess.run([
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
            "--only-binary=:all:", *(f"--platform={tag}_x86_64" for tag in tags),
            f"--python-version={PYTHON}", f"--dest={folder}", f"--requirement={file.name}",
        ], check=True)  # fmt: skip


def package(wheel: Path) -> str:
    """Return the name of a wheel's package, as lock files write it."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def place(name: str) -> str | None:
    """Return where a file of a wheel goes; None for one that stays behind."""
    first, _, rest = name.partition("/")
    if first.endswith(".data"):
        kind, _, rest = rest.partition("/")
        return rest if kind in ("purelib", "platlib") else None
    return None if any(fnmatch(name, pattern) for pattern in DROPPED) else name


def lay(wheel: Path, tree: Path, arch: int) -> tuple[int, int]:
    """Lay a wheel's files into a folder; return the bytes of its GPU code before and after it is cut."""
    before = after = 0
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            where = place(info.filename)
            if where is None or info.is_dir():
                continue
            data = bytearray(archive.read(info))
            found = fatbin.cut(data, arch) if ".so" in Path(where).name else (0, 0)
            before, after = before + found[0], after + found[1]
            file = tree / where
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(0o755 if info.external_attr >> 16 & 0o100 else 0o644)
    return before, after


def make(folder: Path, out: Path, leave: set[str], limit: int, name: str = "site") -> None:
    """Pack the wheels of a folder, but those of `leave`, and say what they have become."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        packages = {}
        for wheel in sorted(folder.glob("*.whl")):
            if package(wheel) not in leave:
                before, after = lay(wheel, Path(scratch), ARCH)
                packages[package(wheel)] = {
                    "version": wheel.name.split("-")[1], "gpu_code_bytes": before, "cut_to_bytes": after,
                }  # fmt: skip
        described = parts.pack(Path(scratch), out, name, limit, {"arch": ARCH, "packages": packages})
    sizes = [part["bytes"] for part in described["parts"]]
    cut = [sum(each[key] for each in packages.values()) for key in ("gpu_code_bytes", "cut_to_bytes")]
    print(json.dumps({
        "packages": len(packages), "gpu_code_bytes": cut[0], "cut_to_bytes": cut[1],
        "unpacked_bytes": described["bytes"], "parts": len(sizes), "packed_bytes": sum(sizes),
    }))  # fmt: skip


def seer(out: Path, python: str, limit: int) -> None:
    """Pack a wheel of this checkout, built for the machine's Python."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)],
            check=True,
        )
        make(Path(folder), out, set(), limit, "seer")


CHECK = """
import importlib
import torch, vllm, seer
print(torch.__version__, vllm.__version__, seer.__version__)
for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator",
             "vllm.vllm_flash_attn._vllm_fa3_C", "vllm.vllm_flash_attn.flash_attn_interface", "seer._native"):
    try:
        importlib.import_module(name)
        print(name, "is there")
    except Exception as error:
        print(name, "fails:", str(error)[:300])
try:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    print("FlashAttention", get_flash_attn_version())
except Exception as error:
    print("FlashAttention fails:", str(error)[:300])
"""
"""Run where a site was unpacked: a library that was cut badly would else be found as an engine starts."""


def link_cuda(site: Path, own: Sequence[str]) -> list[str]:
    """Link what the site leaves out of `nvidia` from the machine's own; return what was linked."""
    linked = []
    for folder in (Path(each) for each in own):
        for found in sorted(folder.iterdir()):
            here = site / "nvidia" / found.name
            if found.is_dir() and not here.exists():
                here.parent.mkdir(exist_ok=True)
                here.symlink_to(found)
                linked.append(found.name)
    return linked


def unpack(out: Path, to: Path) -> None:
    """Lay out everything that is packed, and check it. Exits with 3 where parts are missing."""
    names = [file.stem for file in sorted(out.glob("*.json"))]
    lost = [part for name in names for part in parts.missing(out, name)]
    if lost or not names:
        print(json.dumps({"missing": lost or ["*.json"]}))
        sys.exit(3)
    for name in names:
        parts.unpack(out, name, to)
    if (to / "site").is_dir():
        nvidia = importlib.util.find_spec("nvidia")
        link_cuda(to / "site", list(nvidia.submodule_search_locations or ()) if nvidia else [])
    for name in names:  # once, on all cores: else each side of a comparison compiles what it imports first
        compileall.compile_dir(to / name, quiet=2, workers=0)
    path = os.pathsep.join(str(to / name) for name in sorted(names))
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        print(json.dumps({"unpacked": names, "error": done.stderr[-2000:]}))
        sys.exit(1)
    versions, *imports = done.stdout.splitlines()
    print(json.dumps({"unpacked": names, "versions": versions, "imports": imports}))
    print(f"export PYTHONPATH={path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, names in (
        ("wheels", ["wheels"]), ("make", ["wheels", "out"]), ("seer", ["out"]), ("unpack", ["out", "to"]),
    ):  # fmt: skip
        command = commands.add_parser(name)
        for each in names:
            command.add_argument(each, type=Path)
        command.add_argument("--part-mib", type=int, default=PART_BYTES // parts.MIB)
    commands.choices["make"].add_argument("--keep", nargs="+", default=[], help="packages otherwise left out")
    commands.choices["seer"].add_argument("--python", default=f"python{PYTHON}")
    given = parser.parse_args()
    limit = given.part_mib * parts.MIB
    if given.command == "wheels":
        wheels(given.wheels)
    elif given.command == "make":
        given.out.mkdir(parents=True, exist_ok=True)
        make(given.wheels, given.out, (OWN_CUDA | OWN | UNUSED) - set(given.keep), limit)
    elif given.command == "seer":
        seer(given.out, given.python, limit)
    else:
        unpack(given.out, given.to.resolve())


if __name__ == "__main__":
    main()
