"""Rows to sample with every parameter, and logits with ties, masks and every scale."""

from __future__ import annotations

import numpy as np
import torch

from seer.common.types import SamplingParams
from seer.services.engine.vllm.sampling.rows import RequestSampling


def pack(vocab, *, key=1, prompt_len=1, stop_ids=(), **fields):
    params = SamplingParams(max_tokens=2**20, **fields)
    return RequestSampling.pack(params, key=key, prompt_len=prompt_len, stop_ids=stop_ids, vocab=vocab)


def random_batch(rng, vocab, rows):
    requests = []
    for _ in range(rows):
        pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731 - reads best here
        bias_ids = rng.integers(0, vocab, pick(0, 0, 3))
        requests.append(
            pack(
                vocab,
                key=int(rng.integers(0, 2**64 - 1, dtype=np.uint64, endpoint=True)),
                prompt_len=int(rng.integers(0, 20)),
                stop_ids=tuple(rng.integers(0, vocab + 2, 3).tolist()) if vocab > 4 else (),
                temperature=pick(1.0, 1.0, 0.0, 0.3, 0.7, 1.7, 1e-4),
                top_p=pick(1.0, 1.0, 0.95, 0.5, 1e-6, float(rng.random()) or 0.5),
                top_k=pick(0, 0, 1, 2, 50, vocab, 10**6),
                min_p=pick(0.0, 0.0, 0.05, 0.9, 1.0),
                repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
                frequency_penalty=pick(0.0, 0.0, 0.4, -0.4),
                presence_penalty=pick(0.0, 0.0, 1.1),
                min_tokens=pick(0, 0, 5, 100),
                logit_bias={int(t): float(rng.normal() * 5) for t in bias_ids},
                logprobs=pick("scaled", "raw", "processed"),
            )
        )
    return requests


def random_logits(rng, vocab, rows):
    scale = rng.choice([1e-30, 0.01, 1.0, 3.0, 20.0, 1e4, 1e9, 1e25])
    x = rng.normal(size=(rows, vocab)) * scale
    if rng.random() < 0.4:
        x = np.round(x * rng.choice([1, 4]))  # ties, and zeros of both signs
    if rng.random() < 0.3:
        x[rng.random(x.shape) < 0.3] = -np.inf
    if rng.random() < 0.3:
        x[np.arange(rows), rng.integers(0, vocab, rows)] += 15 * scale
    return torch.from_numpy(x.astype(np.float32))
