"""The sampler: the native kernel against torch, both against naive references."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sampling_rows import pack, random_batch, random_logits  # noqa: E402 - after torch, which may be missing

from seer import _native  # noqa: E402
from seer.common.errors import InvalidField  # noqa: E402
from seer.common.types import SamplingParams  # noqa: E402
from seer.services.engine.vllm.sampling import rows as sampling  # noqa: E402
from seer.services.engine.vllm.sampling import torch_sampler  # noqa: E402
from seer.services.engine.vllm.sampling.rows import SamplingTable  # noqa: E402
from seer.services.engine.vllm.sampling.sampler import sample_rows  # noqa: E402

pytestmark = pytest.mark.vllm


def same(logits, params):
    """Sample on both paths, assert that they agree, and return the result."""
    tokens, logprobs = sample_rows(logits, params)
    other, other_logprobs = torch_sampler.sample(logits, params)
    assert tokens.tolist() == other.tolist()
    # torch's float32 log_softmax itself is off by 2e-5; the native one is held to float64 below
    torch.testing.assert_close(logprobs, other_logprobs, atol=5e-5, rtol=2e-4, equal_nan=True)
    return tokens, logprobs


# --- native against torch


@given(st.integers(0, 2**32 - 1), st.one_of(st.integers(1, 200), st.integers(1, 5000)), st.integers(1, 6))
@settings(max_examples=150)
def test_native_and_torch_choose_the_same_tokens(seed, vocab, rows):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, vocab, rows)
    before = logits.clone()
    table = SamplingTable(random_batch(rng, vocab, rows))
    history = rng.integers(-1, vocab + 1, (rows, 80)).astype(np.int32)
    positions = rng.integers(20, 80, rows)
    same(logits, table.step(positions, history))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [32_768, 151_936])
def test_native_and_torch_agree_on_large_vocabularies(vocab):
    rng = np.random.default_rng(vocab)
    x = torch.from_numpy(rng.normal(size=(8, vocab)).astype(np.float32) * 3)
    x[4:, 77] = 30.0
    x[3] = 0.0
    kinds = [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_p": 0.9, "top_k": 20_000}] * 2
    requests = [pack(vocab, key=i, logprobs="processed", **kind) for i, kind in enumerate(kinds)]
    same(x, SamplingTable(requests).step(9))


def test_every_instruction_set_chooses_the_same_tokens(tmp_path):
    rng = np.random.default_rng(5)
    rows, vocab = 64, 3001
    params = SamplingTable(random_batch(rng, vocab, rows)).step(
        rng.integers(20, 80, rows), np.zeros((rows, 80), np.int32)
    )
    logits = (rng.normal(size=(rows, vocab)) * 4).astype(np.float32)
    arguments = tmp_path / "arguments.npz"
    np.savez(
        arguments,
        logits,
        params.records.view(np.dtype((np.uint8, (sampling.RECORD.itemsize,)))),
        params.stop_ids, params.bias_ids, params.bias_values, params.history, params.extra,
    )  # fmt: skip
    code = """
import sys, numpy as np
from seer import _native
saved = np.load(sys.argv[1])
tokens, _ = _native.sample(*(saved[name] for name in saved.files))
print(_native.INSTRUCTION_SET, *tokens)
"""
    expected = sample_rows(torch.from_numpy(logits), params)[0].tolist()
    for wanted in ("base", ""):
        env = os.environ | {"SEER_INSTRUCTION_SET": wanted}
        run = [sys.executable, "-c", code, str(arguments)]
        out = subprocess.run(
            run, env=env, capture_output=True, check=True, timeout=120, text=True
        ).stdout.split()
        assert [int(token) for token in out[1:]] == expected
        assert out[0] == (wanted or _native.INSTRUCTION_SET)


def test_a_row_does_not_depend_on_its_batch_or_on_calls_before():
    rng = np.random.default_rng(3)
    vocab, rows = 700, 12
    requests = random_batch(rng, vocab, rows)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32))
    history = rng.integers(0, vocab, (rows, 60)).astype(np.int32)
    positions = rng.integers(20, 60, rows)
    whole, _ = sample_rows(logits, SamplingTable(requests).step(positions, history))
    for row in reversed(range(rows)):
        params = SamplingTable([requests[row]], [row]).step(positions[row : row + 1], history)
        assert sample_rows(logits[row : row + 1], params)[0].item() == whole[row]


def test_row_strides_and_other_dtypes():
    x = torch.randn(4, 300)
    params = SamplingTable([pack(200, key=i) for i in range(4)]).step(5)
    expected = sample_rows(x[:, :200].contiguous(), params)[0]
    assert torch.equal(sample_rows(x[:, :200], params)[0], expected)
    assert torch.equal(sample_rows(x[:, :200].t().contiguous().t(), params)[0], expected)
    half = x[:, :200].bfloat16()
    assert torch.equal(sample_rows(half, params)[0], sample_rows(half.float(), params)[0])


def test_an_empty_batch_gives_nothing():
    params = SamplingTable([]).step([])
    tokens, logprobs = sample_rows(torch.empty(0, 10), params)
    assert (tokens.shape, logprobs.shape) == ((0,), (0,))


# --- distribution


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}])
def test_tokens_follow_the_processed_softmax(fields):
    draws, vocab = 40_000, 37
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)) * 2
    params = SamplingTable([pack(vocab, key=99, **fields)] * draws).step(np.arange(draws))
    tokens, _ = sample_rows(logits.expand(draws, vocab), params)
    x, _, _ = torch_sampler.noisy_logits(logits, params.part(0, 1))
    p = x[0].double().softmax(-1).numpy()
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts[p == 0].sum() == 0
    live = p * draws >= 5
    chi2 = ((counts - p * draws)[live] ** 2 / (p * draws)[live]).sum()
    freedom = live.sum() - 1
    assert abs(chi2 - freedom) / math.sqrt(2 * freedom) < 4.5


def test_keys_and_positions_give_independent_draws():
    vocab, rows = 64, 4096
    logits = torch.zeros(rows, vocab)
    by_position = sample_rows(logits, SamplingTable([pack(vocab)] * rows).step(np.arange(rows)))[0]
    by_key = sample_rows(logits, SamplingTable([pack(vocab, key=k) for k in range(rows)]).step(0))[0]
    for tokens in (by_position, by_key):
        pairs = np.bincount((tokens[:-1] * 8 // vocab * 8 + tokens[1:] * 8 // vocab).numpy(), minlength=64)
        expected = (rows - 1) / 64
        assert abs(((pairs - expected) ** 2 / expected).sum() - 63) / math.sqrt(126) < 4.5


# --- processors against naive references


def kept(logits, request):
    """Which tokens survive the cuts, by torch; native agrees as the property above says."""
    x, _, _ = torch_sampler.noisy_logits(logits[None], SamplingTable([request]).step(3))
    return set(torch.isfinite(x[0]).nonzero()[:, 0].tolist())


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 0.98))
@settings(max_examples=60)
def test_top_p_is_the_smallest_set_that_reaches_the_mass(seed, top_p):
    x = np.random.default_rng(seed).normal(size=500) * 2
    logits = torch.from_numpy(x.astype(np.float32))
    p = logits.double().softmax(-1)
    order = p.argsort(descending=True)
    mass = p[order].cumsum(-1)
    if ((mass - top_p).abs() < 1e-6).any():
        return  # a tie: float64 and the integer weights may differ
    expected = set(order[: int((mass < top_p).sum()) + 1].tolist())
    assert kept(logits, pack(500, top_p=top_p)) == expected


@pytest.mark.parametrize(("half", "expected"), [(-0.5, {0}), (0.5, {0, 1})])
def test_top_p_rounds_the_needed_mass_up(half, expected):
    logits = torch.tensor([[0.0, -0.5]]).expand(64, 2)
    weights = (torch_sampler._exp(logits[0]) * 2.0**30).long().tolist()
    top_p = (weights[0] + half) / sum(weights)  # half a unit short of or past the first token's
    params = SamplingTable([pack(2, top_p=top_p)] * 64).step(np.arange(64))
    assert set(same(logits, params)[0].tolist()) == expected


def test_top_k_keeps_ties_and_min_p_keeps_its_share():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert kept(logits, pack(5, top_k=1)) == {1}
    assert kept(logits, pack(5, top_k=2)) == {1, 2, 3}
    assert kept(logits, pack(5, top_k=9)) == set(range(5))
    assert kept(logits, pack(5, min_p=0.3)) == {1, 2, 3}  # e^-1 = 0.37 of the maximum
    assert kept(logits, pack(5, min_p=0.3, top_p=0.5)) == {1}


def naive_penalties(x, prompt, output, s):
    x = x.astype(np.float64)
    for token in set(prompt) | set(output):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    return x


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(0, 30), st.integers(0, 4))
@settings(max_examples=60)
def test_penalties_count_prompt_output_and_drafts(seed, prompt_len, outputs, drafts):
    rng = np.random.default_rng(seed)
    vocab = 23
    fields = {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "presence_penalty": -0.8}
    tokens = rng.integers(0, vocab, prompt_len + outputs + drafts).astype(np.int32)
    known = prompt_len + outputs
    history = np.zeros((3, 64), np.int32)
    history[2, :known] = tokens[:known]
    table = SamplingTable([pack(vocab, prompt_len=prompt_len, temperature=0.0, **fields)], slots=[2])
    params = table.step([known], history, [drafts], tokens[known:])
    logits = torch.from_numpy(rng.normal(size=(drafts + 1, vocab)).astype(np.float32))
    x, _, _ = torch_sampler.noisy_logits(logits, params)
    for row in range(drafts + 1):
        output = tokens[prompt_len : known + row].tolist()
        expected = naive_penalties(
            logits[row].numpy(), tokens[:prompt_len].tolist(), output, SamplingParams(**fields)
        )
        np.testing.assert_allclose(x[row], expected, atol=1e-5)
    assert same(logits, params)[0].tolist() == x.argmax(-1).tolist()


def test_draft_rows_are_the_rows_of_later_steps():
    vocab = 50
    rng = np.random.default_rng(8)
    requests = [
        pack(vocab, key=k, prompt_len=3, frequency_penalty=1.0, min_tokens=4, stop_ids=(k,)) for k in (1, 2)
    ]
    table = SamplingTable(requests)
    history = rng.integers(0, vocab, (2, 20)).astype(np.int32)
    logits = torch.from_numpy(rng.normal(size=(5, vocab)).astype(np.float32))
    drafts = history[0, 5:8].copy()
    at_once, _ = sample_rows(logits, table.step([5, 9], history, [3, 0], drafts))
    first = SamplingTable(requests[:1])
    for row in range(4):
        token, _ = sample_rows(logits[row : row + 1], first.step([5 + row], history))
        assert token.item() == at_once[row]
    token, _ = sample_rows(logits[4:], SamplingTable(requests[1:], [1]).step([9], history))
    assert token.item() == at_once[4]


def test_min_tokens_masks_stop_ids_and_bias_moves_logits():
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    request = pack(3, prompt_len=4, temperature=0.0, min_tokens=2, stop_ids=(0, 99))
    assert [same(logits, SamplingTable([request]).step([p]))[0].item() for p in (4, 5, 6)] == [1, 1, 0]
    biased = pack(3, temperature=0.0, logit_bias={2: 20.0})
    assert same(logits, SamplingTable([biased]).step([4]))[0].item() == 2


# --- logprobs


def test_logprobs_are_of_the_distribution_asked_for():
    torch.manual_seed(4)
    vocab = 400
    x = torch.randn(6, vocab) * 3
    modes = ("scaled", "raw", "processed")
    requests = [
        pack(vocab, key=i, temperature=t, top_k=7, logit_bias={3: 2.0}, logprobs=mode)
        for i, (t, mode) in enumerate([(t, m) for t in (0.5, 0.0) for m in modes])
    ]
    params = SamplingTable(requests).step(11)
    tokens, logprobs = same(x, params)
    processed, _, _ = torch_sampler.noisy_logits(x, params)
    for row, divisor in enumerate((0.5, 0.5, 0.5, 1.0, 1.0, 1.0)):
        shown = (x[row] / divisor, x[row], processed[row])[row % 3]
        expected = shown.double().log_softmax(-1)[tokens[row]]
        assert logprobs[row] == pytest.approx(expected.item(), abs=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20_000), st.sampled_from([0.01, 1.0, 4.0, 15.0]))
@settings(max_examples=40)
def test_native_logprobs_are_accurate(seed, vocab, scale):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy((rng.normal(size=(2, vocab)) * scale).astype(np.float32))
    x[0, rng.integers(vocab)] += 20.0
    params = SamplingTable([pack(vocab, key=seed, temperature=t) for t in (1.0, 0.7)]).step(3)
    tokens, logprobs = sample_rows(x, params)
    for row, temperature in enumerate((1.0, np.float32(0.7))):
        expected = (x[row].double() / float(temperature)).log_softmax(-1)[tokens[row]].item()
        assert logprobs[row] == pytest.approx(expected, abs=5e-6)


# --- bad input


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3, [math.nan] * 3])
def test_rows_that_cannot_be_sampled_say_so(row):
    logits = torch.tensor([[1.0, 2.0, 3.0], row])
    params = SamplingTable([pack(3), pack(3, key=0xABC)]).step([7, 8])
    tokens, logprobs = same(logits, params)
    assert tokens[0] >= 0
    assert tokens[1] == -1
    assert math.isnan(logprobs[1])


def test_a_row_of_which_every_token_is_masked_cannot_be_sampled():
    params = SamplingTable([pack(2, min_tokens=9, stop_ids=(0, 1))]).step([1])
    assert same(torch.zeros(1, 2), params)[0].tolist() == [-1]


def test_parameters_are_checked():
    with pytest.raises(InvalidField, match="vocabulary has 10"):
        pack(10, logit_bias={10: 1.0})
    with pytest.raises(InvalidField, match="top_p"):
        pack(10, top_p=0.0)
    assert np.frombuffer(pack(10, temperature=1e-6).record, sampling.RECORD)["temperature"] == 0


def test_native_refuses_what_does_not_fit():
    assert sampling.RECORD.itemsize == _native.RECORD_SIZE
    penalised = SamplingTable([pack(4, presence_penalty=1.0)])
    logits = torch.zeros(1, 4)
    short = np.zeros((1, 3), np.int32)
    for params in (penalised.step([2]), penalised.step([4], short), penalised.step([2], short, [1])):
        with pytest.raises(ValueError, match=r"row [01]: "):
            sample_rows(logits.expand(len(params.records), 4), params)
        with pytest.raises(ValueError, match=r"row [01]: "):
            torch_sampler.sample(logits.expand(len(params.records), 4), params)
    with pytest.raises(ValueError, match="rows"):
        sample_rows(torch.zeros(2, 4), SamplingTable([pack(4)]).step([1]))
