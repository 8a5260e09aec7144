"""The likeliest tokens of some rows: those of torch's own log-softmax, however rows are cut into slabs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seer.services.engine.vllm.sampling import top_logprobs as module  # noqa: E402 - after torch

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slab", [1, 150, 1 << 22])
def test_alternatives_and_ranks_are_those_of_all_logprobs(monkeypatch, slab, dtype):
    monkeypatch.setattr(module, "SLAB_ELEMENTS", slab)
    rng = torch.Generator().manual_seed(3)
    logits = (torch.randn(9, 50, generator=rng) * 4).to(dtype)
    logits[4, 7] = -torch.inf
    before = logits.clone()
    rows, tokens = torch.tensor([8, 4, 4, 0]), torch.tensor([3, 7, 1, 49])
    by = torch.tensor([1.0, 0.5, 1.7, 1.0])
    ids, values, ranks = module.top_logprobs(logits, rows, by, tokens, 20)
    expected = (logits[rows].float() / by[:, None]).log_softmax(dim=-1)
    assert torch.equal(logits, before)
    assert torch.allclose(values, expected.sort(dim=-1, descending=True).values[:, :20], atol=1e-5)
    assert torch.allclose(values, expected.gather(1, ids), atol=1e-5)
    own = logits[rows].gather(1, tokens[:, None])
    assert ranks.tolist() == (logits[rows] >= own).sum(dim=-1).tolist()
    assert ranks[1] == 50


def test_raw_and_greedy_logprobs_have_no_temperature():
    found = module.divisors(np.float32([0, 0.7, 0.7]), np.array([False, False, True]))
    assert found.tolist() == np.float32([1, 0.7, 1]).tolist()
