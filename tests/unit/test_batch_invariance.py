"""`engine.batch_invariant`: what vLLM is told, and that a machine without a GPU refuses it by name."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from seer.common.config import EngineConfig  # noqa: E402 - after torch, which may be missing
from seer.common.errors import EngineError  # noqa: E402
from seer.services.engine.vllm import env  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture
def environ(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("VLLM_BATCH_INVARIANT", None)
    return os.environ


@pytest.mark.parametrize("asked", [True, False])
def test_vllm_on_a_gpu_is_told_what_is_set(environ, monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    env.prepare(EngineConfig(batch_invariant=asked))
    assert environ.get("VLLM_BATCH_INVARIANT") == ("1" if asked else None)


def test_without_a_gpu_it_is_refused_by_name_and_nothing_is_set(environ, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match=r"engine\.batch_invariant = true: .* set it to false"):
        env.prepare(EngineConfig(batch_invariant=True))
    assert "VLLM_BATCH_INVARIANT" not in environ
