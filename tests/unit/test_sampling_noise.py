"""The noise: its definition, its distribution, and the self-test that guards it on an engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from seer.common.errors import EngineError  # noqa: E402 - after torch, which may be missing
from seer.common.types import SamplingParams  # noqa: E402
from seer.services.engine.vllm.sampling import rows as sampling  # noqa: E402
from seer.services.engine.vllm.sampling import torch_sampler  # noqa: E402
from seer.services.engine.vllm.sampling import vectors as sampler_check  # noqa: E402
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable  # noqa: E402
from seer.services.engine.vllm.sampling.sampler import sample_rows  # noqa: E402

pytestmark = pytest.mark.vllm

VECTORS = Path(sampling.__file__).with_name("noise_vectors.json")
LOG_POLY = [np.float32(c) for c in torch_sampler.LOG_POLY]


def philox(counter, key):
    counter, key, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & mask, (a >> 32) ^ counter[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def log32(x, fraction_at_one=None):
    """LOG of the specification, one numpy float32 scalar operation at a time."""
    f32 = np.float32
    bits = (int(f32(x).view(np.uint32)) - 0x3F3504F3) & 0xFFFFFFFF
    e = (bits >> 23) - (512 if bits >> 31 else 0)
    f = np.uint32((bits & 0x7FFFFF) + 0x3F3504F3).view(f32) - f32(1)
    if e == 0 and fraction_at_one is not None:
        f = fraction_at_one
    z, y = f * f, LOG_POLY[0]
    for c in LOG_POLY[1:]:
        y = y * f + c
    y = y * f
    y = y * z
    y = y + f32(e) * f32(-2.12194440e-4)
    y = y - f32(0.5) * z
    return (f + y) + f32(e) * f32(0.693359375)


def gumbel(word):
    f32 = np.float32
    v = min((f32(word) + f32(0.5)) * f32(2**-32), f32(1 - 2**-24))
    return -log32(-log32(f32(1) - v, -v))


def noise(key, position, token):
    mask = 0xFFFFFFFF
    counter = (token // 4, position & mask, position >> 32, 0)
    return gumbel(philox(counter, (key & mask, key >> 32))[token % 4])


def torch_noise(key, position, vocab):
    signed = key - 2**64 if key >= 2**63 else key
    return torch_sampler.gumbel_noise(torch.tensor([signed]), torch.tensor([position]), vocab)[0].numpy()


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(word, key, expected):
    expected = [int(w, 16) for w in expected.split()]
    assert philox([word] * 4, [key & 0xFFFFFFFF, key >> 32]) == expected
    if word == 0:
        zero = torch.zeros(1, dtype=torch.int64)
        assert torch_sampler.philox_words(zero, zero, 4).tolist() == [expected]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 70))
@settings(max_examples=30)
def test_torch_noise_is_the_scalar_definition_bit_for_bit(key, position, vocab):
    expected = [noise(key, position, token) for token in range(vocab)]
    assert bits(torch_noise(key, position, vocab)) == bits(expected)


def test_the_vectors_follow_the_definition():
    for case in json.loads(VECTORS.read_text()):
        expected = [noise(int(case["key"], 16), case["position"], token) for token in case["tokens"]]
        assert [int(b, 16) for b in case["noise"]] == bits(expected)
        assert case["tokens"] == sorted(set(case["tokens"]))
    extremes = [
        noise(0x5EE25EE25EE25EE2, position, token) for position, token in ((1569001, 288), (1562710, 385))
    ]
    assert extremes == [gumbel(0), gumbel(2**32 - 1)]
    listed = {b for case in json.loads(VECTORS.read_text()) for b in case["noise"]}
    assert {f"{b:08x}" for b in bits(extremes)} <= listed


def test_noise_is_accurate_and_reaches_its_range():
    words = [0, 1, 2, 255, 2**20, 2**29, 2**30, 2**31 - 1, 2**31, 3 * 2**30, 2**32 - 129, 2**32 - 1]
    for word in words:
        v = min((word + 0.5) / 2**32, 1 - 2**-24)
        assert gumbel(word) == pytest.approx(-math.log(-math.log1p(-v)), abs=4e-6)
    assert gumbel(0) > 22.8
    assert -2.82 < gumbel(2**32 - 1) < -2.8


def test_noise_has_the_gumbel_distribution():
    g = torch_noise(12345, 678, 200_000).astype(np.float64)
    assert g.mean() == pytest.approx(np.euler_gamma, abs=5 * 1.2825 / math.sqrt(len(g)))
    u = np.sort(np.exp(-np.exp(-g)))  # the cdf: uniform
    ks = np.abs(u - (np.arange(len(u)) + 0.5) / len(u)).max()
    assert ks < 2.2 / math.sqrt(len(u))


# --- self test


@pytest.mark.parametrize("sample", [sample_rows, torch_sampler.sample])
def test_self_test_accepts_both_paths(sample):
    sampler_check.self_test(sample, "cpu")


def test_the_row_vectors_are_the_reference():
    logits, params = sampler_check.row_cases()
    tokens, logprobs = torch_sampler.sample(torch.from_numpy(logits), params)
    vectors = json.loads(VECTORS.with_name("row_vectors.json").read_text())
    assert tokens.tolist() == [vector["token"] for vector in vectors]
    known = [math.nan if vector["logprob"] is None else vector["logprob"] for vector in vectors]
    assert logprobs.tolist() == pytest.approx(known, rel=1e-5, abs=5e-5, nan_ok=True)
    assert (tokens[-3:] == -1).all()
    assert (tokens[:-3] >= 0).all()


NEUTRAL = {
    "temperature": 1, "top_p": 1, "top_k": 0, "log_min_p": -math.inf, "repetition": 1, "frequency": 0,
    "presence": 0, "min_tokens": 0, "bias_len": 0, "logprobs": 0, "prompt_len": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_self_test_sees_a_parameter_that_is_ignored(name):
    def ignores(logits, params):
        params.records[name] = NEUTRAL[name]
        return sample_rows(logits, params)

    with pytest.raises(EngineError, match=r"differs from the reference in \d+ of 96 rows"):
        sampler_check._check_rows(ignores, "cpu")


def test_self_test_refuses_greedy_sampling():
    def greedy(logits, params):
        return logits.argmax(-1).int(), logits.amax(-1)

    with pytest.raises(EngineError, match="reference noise"):
        sampler_check.self_test(greedy, "cpu")


@pytest.mark.parametrize("change", [1, -1])
def test_self_test_sees_one_bit_of_one_token(change):
    def off(logits, params):
        wrong = torch.zeros_like(logits)
        at = 11  # live in the first vector
        word = torch_noise(int(params.records["key"][0]), int(params.records["position"][0]), logits.shape[1])
        if logits.shape[1] == 16:
            wrong[:, at] = float((word[at : at + 1].view(np.int32) + change).view(np.float32)[0] - word[at])
        noisy = torch_sampler.noisy_logits(logits, params)[1] + wrong
        return noisy.argmax(-1).int(), noisy.amax(-1)

    with pytest.raises(EngineError, match=r"1 of 30|[2-9] of 30"):
        sampler_check.self_test(off, "cpu")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(2, 3000), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_native_noise_is_torch_noise_bit_for_bit(key, position, vocab, seed):
    rng = np.random.default_rng(seed)
    g = torch_noise(key, position, vocab)
    pairs = np.sort(rng.integers(0, vocab, (64, 2)), axis=1)
    low, high = pairs[pairs[:, 0] < pairs[:, 1]].T
    logits = np.full((2 * len(low), vocab), -np.inf, np.float32)
    rows = np.arange(len(low))
    logits[rows, low] = logits[rows + len(low), low] = -g[low]
    logits[rows, high] = -g[high]
    logits[rows + len(low), high] = np.nextafter(-g[high], np.float32(np.inf))
    if len(low):
        request = RequestSampling.pack(SamplingParams(), key=key, prompt_len=1, stop_ids=(), vocab=vocab)
        params = SamplingTable([request] * (2 * len(low))).step(position)
        tokens, _ = sample_rows(torch.from_numpy(logits), params)
        assert tokens.tolist() == [*low, *high]
