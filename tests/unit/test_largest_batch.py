"""The batch that stands for all others while memory is measured has as much of everything as any can have."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from seer.services.engine.vllm.sampling import largest_batch  # noqa: E402 - after torch
from seer.services.engine.vllm.sampling.largest_batch import LargestBatch  # noqa: E402
from seer.services.engine.vllm.sampling.sampler import sample_rows  # noqa: E402

VOCAB = 50


def runner(requests, tokens, longest=100):
    logits = lambda hidden: torch.rand(len(hidden), VOCAB, dtype=hidden.dtype)  # noqa: E731
    return SimpleNamespace(
        max_num_reqs=requests, max_num_tokens=tokens, max_model_len=longest,
        model=SimpleNamespace(compute_logits=logits),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "tokens", "drafts", "rows"),
    [(6, 2048, 0, 6), (6, 2048, 3, 24), (6, 20, 8, 18), (6, 4, 8, 4), (1, 1, 0, 1)],
)
def test_it_has_all_rows_that_a_step_can_have(monkeypatch, requests, tokens, drafts, rows):
    seen = []
    monkeypatch.setattr(
        largest_batch, "sample_rows", lambda *given: seen.append(given) or sample_rows(*given)
    )
    batch = LargestBatch(runner(requests, tokens), drafts)
    drawn = batch(torch.zeros(3, 7, dtype=torch.bfloat16))
    ((logits, params),) = seen
    assert batch.rows == len(drawn) == len(logits) == len(params.records) == rows
    assert (drawn >= 0).all()
    assert rows <= tokens
    assert logits.dtype == torch.bfloat16
    assert params.penalised.all()
    records = params.records
    for name in ("bias_len", "stop_len", "top_k", "min_tokens"):
        assert (records[name] > 0).all(), name
    assert (records["top_p"] < 1).all()


def test_too_little_memory_names_what_to_lower(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(largest_batch, "sample_rows", full)
    with pytest.raises(
        RuntimeError, match=r"24 rows of logits: lower engine.max_num_seqs or drafts.max_draft"
    ):
        LargestBatch(runner(6, 2048), 3)(torch.zeros(1, 7))


def test_a_loaded_engine_says_what_its_largest_batch_takes(monkeypatch):
    engine = runner(6, 2048)
    engine.model_config = SimpleNamespace(get_hidden_size=lambda: 7, get_vocab_size=lambda: VOCAB)
    engine.device, engine.dtype = torch.device("cpu"), torch.bfloat16
    in_use = iter([1_000, 1_700])
    monkeypatch.setattr(largest_batch, "_memory", lambda device, reset: next(in_use))
    found = largest_batch.measured(engine, 3)
    assert (found["rows"], found["logits_bytes"], found["peak_bytes"]) == (24, 24 * VOCAB * 2, 700)
    assert found["seconds"] > 0


GROWS = """
import torch
from seer.services.engine.vllm.sampling.largest_batch import _memory
cpu, taken = torch.device("cpu"), 64 * 2**20
for _ in range(2):  # what was in use before does not count
    before = _memory(cpu, reset=True)
    torch.ones(taken // 4)
    assert 0.9 * taken < _memory(cpu, reset=False) - before < 2 * taken  # the kernel counts in batches
"""


def test_memory_that_was_taken_for_a_moment_is_seen():
    subprocess.run([sys.executable, "-c", GROWS], check=True, timeout=60)
