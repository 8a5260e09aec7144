"""Whatever `SamplingParams.check` accepts, float32 holds: every row of finite logits has a token.

Invariants, for logits up to `MAX_LOGIT` in magnitude, some of them masked:
- C++ and torch draw the same token, from the vocabulary, and its logprob is a number;
- no processed logit is NaN or infinite, but for those that a mask or a cut takes out: -inf;
- without a mask or a cut every token stays.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from seer.common.errors import InvalidField  # noqa: E402 - after torch, which may be missing
from seer.common.types import GREEDY_BELOW, MAX_LOGIT, SamplingParams  # noqa: E402
from seer.services.engine.vllm.sampling import torch_sampler  # noqa: E402
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable  # noqa: E402
from seer.services.engine.vllm.sampling.sampler import sample_rows  # noqa: E402

pytestmark = pytest.mark.vllm

VOCAB = 8
HISTORY = 40


def accepted(**field: object) -> bool:
    try:
        SamplingParams(**field).check()
    except InvalidField:
        return False
    return True


def of(name: str, *bounds: float) -> st.SearchStrategy[float]:
    """Numbers of all kinds that this field may have, those beside each of these bounds among them."""
    beside = [
        f(bound) for bound in bounds for f in (float, np.float32, lambda x: math.nextafter(x, math.inf))
    ]
    hostile = [*map(float, beside), 5e-324, 1e-300, 1e-45, 1.2e-38, 1e-38, 1e-5, 9.9e-6, 0.01, -0.0, 1.0]
    fitting = [each for each in hostile if accepted(**{name: each})]
    usual = st.floats(bounds[0], bounds[-1]).filter(lambda each: accepted(**{name: each}))
    return st.sampled_from(fitting) | usual


PARAMS = st.builds(
    SamplingParams,
    temperature=of("temperature", 0.0, GREEDY_BELOW, 100.0),
    top_p=of("top_p", 0.0, 1.0),
    top_k=st.sampled_from([0, 1, 3, VOCAB, 2**31 - 1]),
    min_p=of("min_p", 0.0, 1.0),
    repetition_penalty=of("repetition_penalty", 0.0, 0.01, 100.0),
    frequency_penalty=of("frequency_penalty", -2.0, 2.0),
    presence_penalty=of("presence_penalty", -2.0, 2.0),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100.0, 100.0), max_size=3),
    logprobs=st.sampled_from(["scaled", "raw", "processed"]),
)
LOGIT = st.sampled_from([MAX_LOGIT, -MAX_LOGIT, 0.0, -0.0, 1e-45, -1e-38, 1.0, -math.inf]) | st.floats(
    -MAX_LOGIT, MAX_LOGIT, width=32
)


@given(
    PARAMS,
    st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB),
    st.integers(1, HISTORY),
    st.integers(0, 2**64 - 1),
)
@example(
    SamplingParams(
        temperature=GREEDY_BELOW, repetition_penalty=0.01, frequency_penalty=-2.0, presence_penalty=-2.0,
        logit_bias={0: 100.0, 1: -100.0}, top_p=1e-300,
    ),
    [MAX_LOGIT, -MAX_LOGIT] + [0.0] * 6, 2, 7,
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_every_row_has_a_token(sampling: SamplingParams, logits: list[float], prompt: int, key: int) -> None:
    assume(max(logits) > -math.inf)
    request = RequestSampling.pack(sampling, key=key, prompt_len=prompt, stop_ids=(), vocab=VOCAB)
    history = (np.arange(2 * HISTORY, dtype=np.int32) % 3)[None]  # tokens 0 to 2, many times
    params = SamplingTable([request]).step([2 * HISTORY], history)
    rows = torch.tensor([logits], dtype=torch.float32)

    tokens, logprobs = sample_rows(rows, params)
    assert 0 <= tokens[0] < VOCAB
    assert math.isfinite(logprobs[0])
    assert torch_sampler.sample(rows, params)[0].tolist() == tokens.tolist()
    processed, noisy, valid = torch_sampler.noisy_logits(rows, params)
    assert valid.all()
    assert not noisy.isnan().any()
    assert (processed < math.inf).all()
    if not params.truncated:
        assert torch.equal(processed.isfinite(), rows.isfinite())


def test_counts_of_the_longest_output_stay_in_range() -> None:
    """2^24 tokens of one kind: as many as `max_tokens` allows, which no example above has."""
    worst = (np.float32(MAX_LOGIT) + np.float32(100)) * np.float32(100)
    worst = (worst + np.float32(2) * np.float32(2**24) + np.float32(2)) / np.float32(GREEDY_BELOW)
    assert np.isfinite(worst)
    assert np.isfinite(worst + worst)
    assert 2.0**123 < worst < 2.0**124
