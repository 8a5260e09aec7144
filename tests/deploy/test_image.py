"""The images' wheel, made of exactly what their build sees, has all of Seer: no Docker is needed to know."""

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from deploy.build_context import Ignored, NotUnderstood, copied, files, instructions, lay_out, stage

REPO = Path(__file__).resolve().parents[2]
DOCKERFILE = REPO / "compose" / "Dockerfile"
BUILT = REPO / "build" / "image"
"""Kept between runs: native code is compiled again only where it changed."""

ENGINE = "seer.services.engine.vllm"
NEED_EXTRA = {
    "seer.gateway.bearer": "starlette",
    f"{ENGINE}.cpu_kernels": "torch",
    f"{ENGINE}.cpu_sleep": "torch",
    f"{ENGINE}.decode_results": "vllm",
    f"{ENGINE}.decode_scheduler": "vllm",
    f"{ENGINE}.drafts.device_paths": "torch",
    f"{ENGINE}.drafts.draft_gate": "torch",
    f"{ENGINE}.drafts.path_kernels": "triton",
    f"{ENGINE}.drafts.path_ops": "torch",
    f"{ENGINE}.drafts.speculator": "torch",
    f"{ENGINE}.drafts.triton_paths": "torch",
    f"{ENGINE}.runner_v2": "torch",
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
    f"{ENGINE}.sampling.triton_kernels": "triton",
    f"{ENGINE}.sampling.triton_launch": "torch",
    f"{ENGINE}.sampling.triton_sampler": "torch",
    f"{ENGINE}.sampling.triton_slots": "torch",
    f"{ENGINE}.sampling.vectors": "torch",
    f"{ENGINE}.in_place": "torch",
    "seer.common.weights.broadcast_group": "torch",
    f"{ENGINE}.merging": "torch",
    f"{ENGINE}.self_test": "torch",
    f"{ENGINE}.logit_spread": "torch",
    "seer.doctor.device": "torch",
    "seer.doctor.sample_rows": "torch",
    "seer.doctor.sampler_bits": "torch",
    "seer.gateway.control_routes": "starlette",
    "seer.gateway.generation_routes": "starlette",
    "seer.gateway.generation": "starlette",
    "seer.gateway.supervisor": "uvicorn",
    "seer.gateway.http": "starlette",
    "seer.observe.exporter": "prometheus_client",
    "seer.observe.metrics": "prometheus_client",
    "seer.gateway.server": "uvicorn",
    "seer.gateway.metrics": "prometheus_client",
    "seer.gateway.serving": "uvicorn",
    "seer.gateway.worker": "uvicorn",
    "seer.integrations.ray": "ray",
    "seer.integrations.ray.process": "ray",
    "seer.integrations.ray.system": "ray",
    "seer.integrations.skyrl.client": "skyrl",
    "seer.integrations.skyrl.generator": "skyrl",
    "seer.integrations.skyrl.main": "ray",
    "seer.integrations.skyrl.weights": "torch",
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


@pytest.fixture(scope="module")
def wheel():
    """The wheel that the Dockerfile's stage of that name builds."""
    there = copied(REPO, DOCKERFILE, "wheel")
    last = stage(DOCKERFILE.read_text(), "wheel")[-1]
    assert last[0] == "RUN"
    assert last[1].endswith("pip wheel --no-deps --no-build-isolation --wheel-dir /dist ."), last
    source, out = BUILT / "src", BUILT / "dist"
    lay_out(REPO, there, "/src", source)
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


# --- what a build sees ------------------------------------------------------------------------------


@pytest.fixture
def context(tmp_path):
    """A context with a Dockerfile that copies `a/` and `top.txt`, but neither `b/` nor caches."""
    for name in (
        "a/one.py",
        "a/deep/two.py",
        "a/__pycache__/one.pyc",
        "a/x.so",
        "b/three.py",
        "top.txt",
        "off.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def seen(context, dockerfile, ignore, name="last"):
    file = context / "Dockerfile"
    file.write_text(dockerfile)
    (context / "Dockerfile.dockerignore").write_text(ignore)
    return copied(context, file, name)


IGNORE = "*\n!a\n!top.txt\n**/__pycache__\n**/*.so\n"


def test_copies_go_where_docker_puts_them(context):
    text = """
        ARG BASE=x  # not ours
        FROM ${BASE} AS first
        WORKDIR /src
        COPY a/ a/
        FROM first AS last
        COPY top.txt \\
             a/one.py ./
        COPY top.txt /etc/name
        WORKDIR sub
        COPY a .
        FROM first AS other
        COPY nothing nothing
    """
    assert seen(context, text, IGNORE) == {
        "/src/a/one.py": "a/one.py",
        "/src/a/deep/two.py": "a/deep/two.py",
        "/src/top.txt": "top.txt",
        "/src/one.py": "a/one.py",
        "/etc/name": "top.txt",
        "/src/sub/one.py": "a/one.py",
        "/src/sub/deep/two.py": "a/deep/two.py",
    }


@pytest.mark.parametrize("source", ["b", "b/three.py", "off.txt", "a/x.so", "nothing"])
def test_what_a_build_does_not_see_cannot_be_copied(context, source):
    with pytest.raises(FileNotFoundError, match=source):
        seen(context, f"FROM x AS last\nCOPY {source} /there\n", IGNORE)


@pytest.mark.parametrize(
    "line",
    [
        "ADD a a", "COPY --from=x /a /a", "COPY --chown=1 a a", 'COPY ["a", "b"]', "COPY a* b", "COPY $A b",
        "COPY a top.txt there", "COPY <<EOF /a", "RUN --mount=type=bind,source=b,target=/b true", "ONBUILD COPY a a",
        "VOLUME /src", "FROM x", "FROM --platform=y x AS z", "COPY a \\",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(context, line):
    with pytest.raises(NotUnderstood):
        seen(context, f"FROM x AS last\n{line}\n", IGNORE)


@pytest.mark.parametrize(
    "text", ["# syntax=other\nFROM x AS last", "# escape=`\nFROM x AS last", "FROM x AS a", "RUN x"]
)
def test_files_of_another_kind_are_refused(context, text):
    with pytest.raises(NotUnderstood):
        seen(context, text, IGNORE)


@pytest.mark.parametrize("pattern", ["a?", "[ab]", "a\\b", "../a", "a**", "!**"])
def test_patterns_that_are_not_understood_are_refused(pattern):
    with pytest.raises(NotUnderstood):
        Ignored(pattern)


@pytest.mark.parametrize(
    ("rules", "path", "out"),
    [
        ("*", "a/b", True),
        ("*\n!a", "a/b", False),
        ("*\n!a\na/b", "a/b/c", True),
        ("*\n!a\na/b\n!a/b/c", "a/b/c/d", False),
        ("/a/", "a/b", True),
        ("a", "b/a", False),
        ("**/a", "a", True),
        ("**/a", "b/c/a/d", True),
        ("**/*.so", "x.so", True),
        ("*.so", "a/x.so", False),
        ("a/*/c", "a/b/c", True),
        ("a/*/c", "a/b/b/c", False),
        ("# a\n\n  a  ", "a", True),
        ("!a", "a", False),
        ("./a/../b", "b", True),
    ],
)
def test_the_rules_of_ignore_files(rules, path, out):
    """https://docs.docker.com/build/concepts/context/#dockerignore-files"""
    assert Ignored(rules)(path) is out


def test_no_folder_is_passed_over_that_something_is_let_in_from(context):
    for ignore in ("*\n!a/deep/two.py\n", "a\n!**/two.py\nb\n*.txt\nDocker*\n"):
        assert list(files(context, Ignored(ignore))) == ["a/deep/two.py"]


def test_unchanged_files_are_laid_out_once_and_others_go(context, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    lay_out(
        context, {"/src/a.py": "a/one.py", "/src/x/b.py": "b/three.py", "/etc/c": "top.txt"}, "/src", folder
    )
    first = (folder / "a.py").stat().st_mtime_ns
    lay_out(context, {"/src/a.py": "a/one.py", "/src/y/b.py": "top.txt"}, "/src", folder)
    assert (folder / "a.py").stat().st_mtime_ns == first
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["a.py", "b.py"]
    assert (folder / "y" / "b.py").read_text() == "top.txt"


def test_comments_between_continued_lines_are_none_of_an_instruction():
    assert instructions("RUN a \\\n# no\n  b\n") == [("RUN", "a b")]
