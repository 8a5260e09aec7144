"""Test vectors that show whether a sampler returns the reference's tokens on its device.

Invariants:
- noise that is one bit off at any token of noise_vectors.json fails;
- row_vectors.json holds the reference's samples for rows with every parameter, ties, masked tokens and
  rows that cannot be sampled; their logits are the same bits on every machine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.services.engine.vllm.sampling.rows import RequestSampling, RowParams, SamplingTable
from seer.services.engine.vllm.sampling.torch_sampler import SampleFunction, philox_words

_ROWS, _VOCAB = 96, 2_051  # a full block of the GPU's kernel and three tokens
_LOGPROB_ERROR = 1e-3
"""Logprobs are accurate to about 1e-5; a wrong distribution is further off."""


def self_test(sample: SampleFunction, device: torch.device | str) -> None:
    """Raise `EngineError` unless `sample` returns the vectors' tokens.

    `sample` takes logits [rows, vocab] on `device` and `RowParams`, and should be the function that the
    engine itself calls; it must not raise for rows that cannot be sampled.
    """
    _check_noise(sample, device)
    _check_rows(sample, device)


def _check_noise(sample: SampleFunction, device: torch.device | str) -> None:
    """Two tokens of each row are not masked. Their logits are the negated noise: both sums are zero, and
    the lower id wins; with the other's logit one bit higher, the other wins.
    """
    for case in _vectors("noise"):
        ids = np.array(case["tokens"])
        negated = -np.array([int(bits, 16) for bits in case["noise"]], np.uint32).view(np.float32)
        pairs = len(ids) - 1
        logits = np.full((2 * pairs, case["vocab"]), -np.inf, np.float32)
        logits[:, ids[0]] = negated[0]
        rows = np.arange(pairs)
        logits[rows, ids[1:]] = negated[1:]
        logits[rows + pairs, ids[1:]] = np.nextafter(negated[1:], np.float32(np.inf))
        request = RequestSampling.pack(
            SamplingParams(), key=int(case["key"], 16), prompt_len=1, stop_ids=(), vocab=case["vocab"]
        )
        params = SamplingTable([request] * (2 * pairs)).step(case["position"])
        tokens, _ = sample(torch.from_numpy(logits).to(device), params)
        expected = np.concatenate([np.full(pairs, ids[0]), ids[1:]])
        wrong = np.flatnonzero(tokens.cpu().numpy() != expected)
        if len(wrong):
            raise EngineError(
                f"the sampler on {device} does not reproduce the reference noise: {len(wrong)} of "
                f"{2 * pairs} samples differ at position {case['position']}; is vLLM using its own sampler?"
            )


def _check_rows(sample: SampleFunction, device: torch.device | str) -> None:
    logits, params = row_cases()
    tokens, logprobs = sample(torch.from_numpy(logits).to(device), params)
    vectors = _vectors("row")
    expected = np.array([vector["token"] for vector in vectors])
    known = np.array([vector["logprob"] for vector in vectors], np.float64)  # null is NaN
    drawn = tokens.cpu().numpy()
    shown = logprobs.cpu().numpy()
    equal = (drawn == expected) & np.isclose(shown, known, rtol=1e-5, atol=_LOGPROB_ERROR, equal_nan=True)
    if not equal.all():
        row = int(np.argmin(equal))
        raise EngineError(
            f"the sampler on {device} differs from the reference in {(~equal).sum()} of {len(equal)} rows of "
            f"row_vectors.json: row {row} has token {drawn[row]} with logprob {shown[row]:.4f}, not "
            f"{expected[row]} with {known[row]:.4f}; its tokens would differ from other engines'"
        )


def _vectors(kind: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads(Path(__file__).with_name(f"{kind}_vectors.json").read_text())
    return vectors


def row_cases(rows: int = _ROWS, vocab: int = _VOCAB) -> tuple[npt.NDArray[np.float32], RowParams]:
    """Return logits [rows, vocab] and parameters; those of the defaults have samples in row_vectors.json.

    Needs 8 rows and 128 tokens. The last three rows cannot be sampled.
    """
    words = philox_words(torch.arange(rows), torch.zeros(rows, dtype=torch.int64), vocab).numpy()
    logits = ((words >> 16) + (words & 0xFFFF) - 0xFFFF).astype(np.float32) * np.float32(2.0**-13)  # +-8
    logits[1::4] = np.rint(logits[1::4])  # ties
    logits[2::4][words[2::4] % 3 == 0] = -math.inf
    peaked = np.arange(3, rows, 4)
    logits[peaked, 7 * peaked % vocab] = 14.0
    logits[-3:, 5] = math.nan, math.inf, -math.inf
    logits[-1] = -math.inf
    history = np.where(words[:, :96] & 1, np.arange(96), words[:, :96] % vocab).astype(np.int32)
    history[:, 3::4] = logits.argmax(axis=1)[:, None]  # so that penalties count, in prompt and output
    positions = 40 + np.arange(rows) % 50
    table = SamplingTable([row_request(row, vocab) for row in range(rows)])
    return logits, table.step(positions, history)


def row_request(row: int, vocab: int) -> RequestSampling:
    """Return the parameters of one row; its prompt has 20 tokens."""

    # The lengths of the lists share few factors, so that the rows hold most combinations.
    def of(*options: Any) -> Any:  # noqa: ANN401 - fields of several types
        return options[row % len(options)]

    sampling = SamplingParams(
        max_tokens=1000,
        temperature=of(1.0, 0.7, 0.0, 1.7, 1e-4, 1.0, 3.0),
        top_p=of(1.0, 1.0, 0.95, 0.5, 1e-6),
        top_k=of(0, 0, 0, 50, 0, 1, 0, 1_000, 10**6),
        min_p=of(0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        repetition_penalty=of(1.0, 1.0, 1.3, 1.0, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        frequency_penalty=of(0.0, 0.4, 0.0, 0.0, -0.4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        presence_penalty=of(0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        min_tokens=of(0, 100, 0, 0, 0, 0),
        logit_bias=of({}, {}, {}, {11: 9.5, vocab - 1: 3.25}, {}, {}, {}, {}, {}, {}),
        logprobs=of("scaled", "raw", "processed"),
    )
    key = row * 0x9E3779B97F4A7C15 % 2**64
    return RequestSampling.pack(sampling, key=key, prompt_len=20, stop_ids=(7 * row, 5), vocab=vocab)
