"""The images' wheel, made of exactly what their build sees, has all of Seer: no Docker is needed to know."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPO / "compose" / "Dockerfile").read_text()
IGNORE = (REPO / "compose" / "Dockerfile.dockerignore").read_text()
BUILT = REPO / "build" / "image"
"""Kept between runs: native code is compiled again only where it changed."""

ENGINE = "seer.services.engine.vllm"
NEED_EXTRA = {
    "seer.gateway.bearer": "starlette",
    "seer.gateway.openapi": "starlette",
    "seer.integrations.replayed_routing": "torch",
    f"{ENGINE}.cpu_kernels": "torch",
    f"{ENGINE}.nccl_receiver": "torch",
    f"{ENGINE}.read_slices": "torch",
    f"{ENGINE}.cpu_sleep": "torch",
    f"{ENGINE}.decode_results": "vllm",
    f"{ENGINE}.decode_scheduler": "vllm",
    f"{ENGINE}.drafts.device_paths": "torch",
    f"{ENGINE}.drafts.draft_gate": "torch",
    f"{ENGINE}.drafts.head_speculator": "torch",
    f"{ENGINE}.drafts.path_kernels": "triton",
    f"{ENGINE}.drafts.path_ops": "torch",
    f"{ENGINE}.drafts.speculator": "torch",
    f"{ENGINE}.expert_routes": "torch",
    f"{ENGINE}.grammars": "xgrammar",
    f"{ENGINE}.drafts.triton_paths": "torch",
    f"{ENGINE}.slot_sampler": "torch",
    f"{ENGINE}.worker": "torch",
    f"{ENGINE}.kv_pool.connector": "torch",
    f"{ENGINE}.kv_pool.connect": "torch",
    f"{ENGINE}.kv_pool.vllm_patches": "torch",
    f"{ENGINE}.kv_pool.block_copies": "torch",
    f"{ENGINE}.kv_pool.checksummed_buffer": "torch",
    f"{ENGINE}.kv_pool.guarded_store": "torch",
    f"{ENGINE}.sampling.largest_batch": "torch",
    f"{ENGINE}.sampling.sampler": "torch",
    f"{ENGINE}.sampling.slot_rows": "torch",
    f"{ENGINE}.sampling.torch_sampler": "torch",
    f"{ENGINE}.sampling.top_logprobs": "torch",
    f"{ENGINE}.sampling.triton_kernels": "triton",
    f"{ENGINE}.sampling.triton_launch": "torch",
    f"{ENGINE}.sampling.triton_sampler": "torch",
    f"{ENGINE}.sampling.triton_slots": "torch",
    f"{ENGINE}.sampling.vectors": "torch",
    f"{ENGINE}.in_place": "torch",
    "seer.common.weights.broadcast_group": "torch",
    "seer.common.weights.vllm_group": "torch",
    f"{ENGINE}.merging": "torch",
    f"{ENGINE}.self_test": "torch",
    f"{ENGINE}.logit_spread": "torch",
    "seer.doctor.device": "torch",
    "seer.doctor.sample_rows": "torch",
    "seer.doctor.sampler_bits": "torch",
    "seer.gateway.control_routes": "starlette",
    "seer.gateway.generation_routes": "starlette",
    "seer.gateway.generation": "starlette",
    "seer.gateway.supervisor": "starlette",
    "seer.gateway.http": "starlette",
    "seer.observe.exporter": "prometheus_client",
    "seer.observe.metrics": "prometheus_client",
    "seer.spans.collector": "requests",
    "seer.spans.service": "requests",
    "seer.gateway.server": "starlette",
    "seer.gateway.metrics": "prometheus_client",
    "seer.gateway.serving": "uvicorn",
    "seer.gateway.worker": "starlette",
    "seer.integrations.ray": "ray",
    "seer.integrations.ray.process": "ray",
    "seer.integrations.ray.system": "ray",
    "seer.integrations.skyrl.client": "skyrl",
    "seer.integrations.skyrl.generator": "skyrl",
    "seer.integrations.skyrl.main": "ray",
    "seer.integrations.skyrl.weights": "skyrl",
    "seer.integrations.slime": "slime",
    "seer.integrations.slime.rollout": "slime",
    "seer.integrations.slime.settings": "slime",
    "seer.integrations.slime.weights": "slime",
    "seer.integrations.trl.trainers": "accelerate",
    "seer.integrations.verl.manager": "ray",
    "seer.integrations.verl.server": "ray",
    "seer.integrations.verl.weights": "torch",
    "seer.sim.plots": "matplotlib",
}
"""All modules that need an extra, with the one package of it that they miss first."""

BUILD_SECONDS = 800
"""A minute on an idle machine."""


def from_the_image(test):
    """Mark a test that needs the wheel."""
    return pytest.mark.slow(pytest.mark.timeout(BUILD_SECONDS + 100)(test))


_IMPORT_ALL = """
import importlib, json, sys
missing = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing[name] = error.name or str(error)
print(json.dumps(missing))
"""


def copied(dockerfile, ignore):
    """Return what of the context's top the wheel's stage copies into /src, and the names left out below.

    Only what the two files need is understood. Whatever else would bring in other files is an error.
    """
    rules = ignore.split()
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]
    left_out = [rule[3:] for rule in rules if rule.startswith("**/")]
    assert rules == ["*", *(f"!{name}" for name in let_in), *(f"**/{name}" for name in left_out)], rules
    assert not re.search(r"[/?\[\\]", "".join([*let_in, *left_out])), rules
    begins = ("\nFROM ${BASE_IMAGE} AS base\n", "\nFROM base AS builder\n", "\nFROM builder AS wheel\n")
    stages = "\n".join(dockerfile.split(begin)[1].split("\nFROM ")[0] for begin in begins)
    assert stages.rstrip().endswith("pip wheel --no-deps --no-build-isolation --wheel-dir /dist ."), stages
    assert re.findall(r"\bWORKDIR .*", stages) == ["WORKDIR /src"], stages
    names = []
    for line in re.findall(r".*\b(?:COPY|ADD|ONBUILD|VOLUME|FROM|type=bind)\b.*", stages):
        instruction, *sources, target = line.split()
        assert instruction == "COPY", line
        assert target == "./" or sources == [target], line
        names += [source.removesuffix("/") for source in sources]
    assert set(names) <= set(let_in), f"the build does not see {set(names) - set(let_in)}"
    return names, left_out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("COPY sim/ sim/", "COPY sim/ other/"),
        ("COPY sim/ sim/", "COPY bench/ bench/"),
        ("COPY sim/ sim/", "COPY --from=base sim/ sim/"),
        ("COPY sim/ sim/", "COPY sim/* ./"),
        ("COPY sim/ sim/", "COPY $SIM ./"),
        ("COPY sim/ sim/", "COPY common/ sim/ \\\n  client/ ./"),
        ("COPY sim/ sim/", "ADD sim/ sim/"),
        ("COPY sim/ sim/", "RUN --mount=type=bind,source=sim,target=sim true"),
        ("COPY sim/ sim/", "WORKDIR sim"),
        ("--wheel-dir /dist .", "--wheel-dir /dist src"),
        ("!sim\n", "sim\n"),
        ("!sim\n", "!sim\nsim/study.py\n"),
        ("!sim\n", "!sim/s*\n"),
        ("*\n", ""),
        ("**/*.so\n", "**/*.so\n!src\n"),
    ],
)
def test_another_way_to_bring_in_files_is_an_error(old, new):
    assert set(copied(DOCKERFILE, IGNORE)[0]) > {"sim", "src", "README.md", "requirements"}
    with pytest.raises(AssertionError):
        copied(DOCKERFILE.replace(old, new), IGNORE.replace(old, new, 1))


@pytest.fixture(scope="module")
def wheel():
    """The wheel that the Dockerfile's stage of that name builds."""
    names, left_out = copied(DOCKERFILE, IGNORE)
    source, out = BUILT / "src", BUILT / "dist"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for name in names:  # with their times, by which CMake knows what has changed
        if (REPO / name).is_dir():
            left = shutil.ignore_patterns(*left_out)
            shutil.copytree(REPO / name, source / name, symlinks=True, ignore=left)
        else:
            shutil.copy2(REPO / name, source / name)
    for old in out.glob("*.whl"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--config-settings", f"build-dir={BUILT / 'native'}", "--wheel-dir", out, source],
        check=True, capture_output=True, text=True, timeout=BUILD_SECONDS,
    )  # fmt: skip
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """A Python that has nothing but the wheel and what requirements/core.lock pins, linked from here."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    for line in (REPO / "requirements" / "core.lock").read_text().splitlines():
        if line[0] not in "# ":  # a comment, a hash
            link(*line.rstrip(" \\").split("=="), packages)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return folder / "bin" / "python"


def link(name, version, into):
    """Link a package's files, as its RECORD lists them."""
    found = metadata.distribution(name)
    assert found.version == version, f"{name} {found.version} is installed, {version} is pinned: make setup"
    for file in found.files:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            place = into / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file.locate())


def modules(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist() if name.startswith("seer/")]
    dotted = [".".join(name.with_suffix("").parts) for name in names if name.suffix == ".py"]
    return sorted({name.removesuffix(".__init__") for name in dotted} - {"seer.__main__"} | {"seer._native"})


@from_the_image
def test_every_file_of_the_package_is_in_the_wheel(wheel):
    wanted = {
        str((Path(folder) / name).relative_to(REPO / "src"))
        for folder, _, names in os.walk(REPO / "src", followlinks=True)
        for name in names
        if not name.endswith((".pyc", ".so"))
    }
    assert {"seer/common/ids.py", "seer/services/buffer/server.py"} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())


@from_the_image
def test_every_module_that_needs_no_extra_imports_in_a_bare_environment(wheel, bare):
    found = subprocess.run(
        [bare, "-I", "-c", _IMPORT_ALL, json.dumps(modules(wheel))],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert json.loads(found.stdout) == NEED_EXTRA


@from_the_image
def test_a_rollout_runs_in_a_bare_environment(bare, tmp_path):
    """What the image's users run: services as processes, and all that is imported only then."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "prompt_token_ids": [1, 2]}))
    done = subprocess.run(
        [bare, "-m", "seer.cli.main", "rollout", "prompts.jsonl", "--out", "out.jsonl", "-n", "2", "--max-tokens", "8",
         "--backend", "replay"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "out.jsonl").read_text())["responses"]) == 2
