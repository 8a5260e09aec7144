"""The benchmarks of a GPU's kernels, copies and streams (bench/gpu/kernels.py), where there is no GPU."""

import ast
import json
import sys
from dataclasses import replace

import pytest
from gpu_kit import FOLDER, loaded

from seer.doctor.checkup import CHECKS

ON_A_GPU = ("compiled", "steps", "slabs", "streams", "graph", "copies", "gathers", "overlap", "ipc")


def test_every_check_has_a_name_of_its_own_and_a_function(monkeypatch):
    kernels = loaded("kernels", monkeypatch)
    assert len({check.name for check in kernels.CHECKS}) == len(kernels.CHECKS)
    for check in kernels.CHECKS:
        module, _, function = check.function.partition(":")
        if module.startswith("seer."):
            assert check in CHECKS, "the doctor has it, too"
            continue
        tree = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text())
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.vllm
def test_all_checks_run_on_a_cpu(tmp_path, monkeypatch):
    """In one process: eleven would import torch eleven times."""
    pytest.importorskip("torch")
    file = tmp_path / "lines.json"
    names = ("machine", "repeats", *ON_A_GPU)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = loaded("kernels", monkeypatch)
    monkeypatch.setattr(kernels, "CHECKS", [replace(check, process="all") for check in kernels.CHECKS])
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--json", str(file), "--only", ",".join(names)])
    assert kernels.main() == 0
    found = {(line["check"], line["status"]) for line in json.loads(file.read_text())["lines"]}
    assert ("repeats", "pass") in found
    for name in ON_A_GPU:
        assert (name, "skip") in found
