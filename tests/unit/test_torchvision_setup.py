"""The set-up's torchvision: which release, and what is taken out of a build for CUDA."""

import importlib.util
import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "seer_torchvision", REPO / "requirements" / "install_torchvision.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_engines_on_cpus_and_gpus_have_the_same_release(script):
    pinned = script.pinned()
    assert pinned.startswith(f"torchvision=={script.VERSION} ")
    assert pinned.count("--hash=sha256:") >= 1
    assert pinned.count("==") == 1, "nothing but torchvision"


def test_registrations_are_taken_out_of_this_environment_alone(script, tmp_path):
    shared, package = tmp_path / "shared", tmp_path / "torchvision"
    for folder in (shared, package):
        folder.mkdir()
    for name in (*script.REGISTRATIONS, "ops.py"):
        (shared / name).write_text("import torch\n")
        os.link(shared / name, package / name)
    script.empty_registrations(package)
    for name in script.REGISTRATIONS:
        assert (package / name).read_text() == script.REASON
        assert (shared / name).read_text() == "import torch\n", "another environment's file"
    assert (package / "ops.py").read_text() == "import torch\n"


def test_another_release_is_left_as_it_is(script, tmp_path):
    (tmp_path / "ops.py").write_text("import torch\n")
    with pytest.raises(FileNotFoundError):
        script.empty_registrations(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["ops.py"]
