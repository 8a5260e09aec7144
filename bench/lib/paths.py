"""Where scripts find what is shipped: the repository's root, the tests' helpers, the example."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
EXAMPLE = ROOT / "examples" / "countdown"
