"""The scripts of bench/gpu, loaded as modules of a test."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "bench" / "gpu"


def loaded(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"kit_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"kit_{name}", module)
    spec.loader.exec_module(module)
    return module
