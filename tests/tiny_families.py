"""Tiny random models of families other than the shipped one's, of `bench/correctness/tiny_models.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SCRIPT = Path(__file__).parents[1] / "bench" / "correctness" / "tiny_models.py"


def tiny(family: str) -> torch.nn.Module:
    """Return transformers' model of a family, in float32, always the same."""
    import torch

    sys.path.insert(0, str(SCRIPT.parent))  # where its `lib` lies
    try:
        spec = importlib.util.spec_from_file_location("tiny_models", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    torch.manual_seed(5)
    return module.FAMILIES[family]().float().eval()
