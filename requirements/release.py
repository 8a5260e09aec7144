"""Make a release: `make release`. Writes wheels, their source, lists of parts and checksums to dist/.

Invariants:
- what is built and what is tried comes from the lock files, by hash;
- a wheel is only kept once it was installed and ran where no compiler can be found;
- an image is only built on a base that is named by its digest, and must run.

`dist/` gets a wheel for each Python, with the oldest glibc that it runs on in its name; the source; an SBOM
(CycloneDX) for each set of requirements; `SHA256SUMS`. `--image BASE` also builds images, `core` and `cpu`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = ROOT / "build" / "release" / "bin"
"""What `release.lock` pins; `make release` installs it."""

SBOMS = {
    "core": ("core",),
    "gateway": ("core", "gateway"),
    "cpu": ("core", "cpu", "torch-cpu"),
    "cuda13": ("core", "cuda13"),
}
"""By image or extra: the lock files that it is installed from."""

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "ld")

TRIAL = """
import asyncio, subprocess, sys, json, pathlib
from seer._native import GroupTree
from seer.client import RolloutClient
folder = pathlib.Path(sys.argv[1])
lines = [json.dumps({"id": str(i), "prompt_token_ids": [1, 2, i + 3]}) for i in range(4)]
(folder / "prompts.jsonl").write_text("\\n".join(lines))
seer = pathlib.Path(sys.executable).with_name("seer")
command = [seer, "rollout", folder / "prompts.jsonl", "--out", folder / "out.jsonl", "--backend", "replay",
           "-n", "2", "--max-tokens", "32", "--set", "engine.replay.step_seconds=0.001"]
subprocess.run(command, check=True, timeout=120)
groups = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
assert len(groups) == 4 and all(len(group["responses"]) == 2 for group in groups), groups
"""
"""Run with a wheel installed: the native part loads, and a whole system of processes makes a rollout."""


def main() -> None:
    """Make everything, or end with what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12", "python3.13"])
    parser.add_argument("--image", default="", metavar="BASE", help="name@sha256:... to build images on")
    parser.add_argument("--docker-options", default="", help="of `docker build`, e.g. pip's indexes")
    options = parser.parse_args()
    pythons = [_python(name) for name in options.pythons]
    if options.image and not re.search(r".@sha256:[0-9a-f]{64}$", options.image):
        sys.exit(f"--image {options.image}: name the base by its digest, NAME@sha256:...")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    _run(TOOLS / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)
    (source,) = DIST.glob("*.tar.gz")
    for python in pythons:
        _wheel(python, source)
    for name, locks in SBOMS.items():
        _sbom(name, locks)
    if options.image:
        _images(options.image, shlex.split(options.docker_options))
    files = sorted(file for file in DIST.iterdir() if file.is_file())
    sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (DIST / "SHA256SUMS").write_text("".join(sums))
    for file in files:
        print(f"{file.stat().st_size:>10,}  dist/{file.name}")


def _python(name: str) -> str:
    found = shutil.which(name)
    if found is None or subprocess.run([found, "-c", ""], check=False).returncode:
        sys.exit(f"{name} does not run: install it, or choose others (make release PYTHONS='...')")
    return found


def _wheel(python: str, source: Path) -> None:
    """Build a wheel from the source, name the glibc that it needs, and try it."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        pip = _environment(python, folder / "build")
        _run(*pip, "install", "--quiet", "--no-deps", "--require-hashes", *_locks("core", "build"))
        _run(
            *pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source,
            environ={"PATH": f"{folder / 'build' / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip
        (built,) = folder.glob("*.whl")
        tools = {"PATH": f"{TOOLS}:{os.environ['PATH']}"}
        _run(TOOLS / "auditwheel", "repair", "--wheel-dir", folder / "named", built, environ=tools)
        (named,) = (folder / "named").iterdir()
        _try(python, named, folder)
        shutil.copy(named, DIST)


def _try(python: str, wheel: Path, folder: Path) -> None:
    """Install a wheel as users do, where there is no compiler, and make a rollout with it."""
    pip = _environment(python, folder / "tried")
    (folder / "trial.py").write_text(TRIAL)
    steps = [
        [*pip, "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", *_locks("core")],
        [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
        [str(folder / "tried" / "bin" / "python"), "-m", "pip", "check"],
        [str(folder / "tried" / "bin" / "python"), str(folder / "trial.py"), str(folder)],
    ]
    for step in steps:
        _run(*_without_compilers(), *step, cwd=folder)


def _without_compilers() -> list[str]:
    """Return what to put before a command so that it finds no compiler: covering them takes root."""
    hidden = sorted({str(path) for name in COMPILERS for path in _programs(name)})
    covered = " && ".join(f"mount --bind /dev/null {path}" for path in hidden) or "true"
    return ["unshare", "--mount", "sh", "-c", f'{covered} && ! c++ --version 2> /dev/null && exec "$@"', "sh"]


def _programs(name: str) -> list[Path]:
    """Return every program of this name, or this name and a version, on the PATH."""
    folders = {Path(folder).resolve() for folder in os.environ["PATH"].split(":") if Path(folder).is_dir()}
    exact = re.compile(rf"([a-z0-9_]+-linux-gnu-)?{re.escape(name)}(-[0-9.]+)?")
    return [path.resolve() for folder in folders for path in folder.iterdir() if exact.fullmatch(path.name)]


def _sbom(name: str, locks: tuple[str, ...]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as joined:
        joined.write("".join((ROOT / "requirements" / f"{lock}.lock").read_text() for lock in locks))
        joined.flush()
        _run(
            TOOLS / "cyclonedx-py", "requirements", joined.name, "--pyproject", ROOT / "pyproject.toml",
            "--mc-type", "application", "--output-reproducible", "--of", "JSON", "-o",
            DIST / f"sbom-{name}.json",
        )  # fmt: skip


def _images(base: str, options: list[str]) -> None:
    docker = os.environ.get("DOCKER", "docker")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for target in ("core", "cpu"):
        _run(
            docker, "build", "--file", ROOT / "compose" / "Dockerfile", "--target", target,
            "--tag", f"seer:{target}", "--tag", f"seer:{version}-{target}",
            "--iidfile", DIST / f"image-{target}.id", "--build-arg", f"BASE_IMAGE={base}", *options, ROOT,
            environ={"DOCKER_BUILDKIT": "1"},
        )  # fmt: skip
        _run(docker, "run", "--rm", "--network", "none", f"seer:{version}-{target}", "--version")


def _environment(python: str, folder: Path) -> list[str]:
    _run(python, "-m", "venv", folder)
    return [str(folder / "bin" / "python"), "-m", "pip"]


def _locks(*names: str) -> list[str]:
    return [part for name in names for part in ("-r", str(ROOT / "requirements" / f"{name}.lock"))]


def _run(*command: object, environ: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [str(word) for word in command], env=os.environ | (environ or {}), cwd=cwd, capture_output=True,
        text=True, timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
