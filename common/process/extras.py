"""Which extras an installation lacks. Nothing is imported to find out."""

from __future__ import annotations

from importlib.util import find_spec

ENGINE_PACKAGES = ("torch", "vllm")

ENGINE_FIX = "install the extra for this machine: pip install 'seer-rollout[cpu]' (on NVIDIA GPUs: cuda13)"


def missing_for_engines() -> str:
    """Return the first package that engines need and that is not installed; empty: all are."""
    return next((name for name in ENGINE_PACKAGES if find_spec(name) is None), "")
