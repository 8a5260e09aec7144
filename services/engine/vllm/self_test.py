"""Proves at start that our sampler samples the tokens which leave the engine.

Invariants:
- an engine starts only if the noise of every rank equals the reference, bit for bit;
- it starts only if its output equals what the reference implementation samples from the same logits. Another
  model runner, or a hook that vLLM no longer calls, fails that test;
- if its model has images, it starts only if two of them give other logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from seer.common.errors import EngineError
from seer.common.image_models import ImageModel
from seer.common.prepared_image import PreparedImage, make
from seer.common.types import Placed, SamplingParams
from seer.services.engine.backend import Chunk, PlacedImage
from seer.services.engine.vllm.probe import Probe
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.torch_sampler import noisy_logits

_KEY = 0x5EED_0F_5EE2_7E57
_SAMPLING = SamplingParams(max_tokens=8, temperature=100.0, ignore_eos=True)
"""A high temperature, so that the noise decides: an engine that samples greedily cannot pass."""


def check(probe: Probe, images: ImageModel | None = None) -> None:
    """Raise `EngineError` when any rank's noise, or the engine's output, is not the reference's.

    `images`: what those of the model are; None: it has none.
    """
    for rank, problem in enumerate(probe.noise_errors()):
        if problem:
            raise EngineError(f"self-test, rank {rank}: {problem}")
    _check_output(probe, ())
    if images is not None:
        one, two = (_check_output(probe, (made_up(images, seed),), images.placeholder) for seed in (0, 1))
        if np.array_equal(one, two):
            raise EngineError(
                "self-test: two images give the same logits: vLLM does not show them to the model"
            )


def made_up(images: ImageModel, seed: int) -> PreparedImage:
    """Return an image of noise, of four tokens."""
    side = 2 * images.merge
    pixels = np.random.default_rng(seed).standard_normal((side * side, images.patch_numbers), np.float32)
    return make("image", {"image_grid_thw": np.array([[1, side, side]]), "pixel_values": pixels})


def _check_output(probe: Probe, images: Sequence[PreparedImage], placeholder: int = 0) -> np.ndarray:
    """Compare what the engine samples with the reference; return the first rank's first logits."""
    prompt = [token % probe.core.plain_tokens for token in (3, 1, 4, 1, 5)]
    placed = []
    for image in images:
        placed.append(PlacedImage(Placed(image.name, len(prompt), 4), image))
        prompt += [placeholder] * 4 + [prompt[0]]
    chunk = Chunk(
        request_id="self-test", group_id="", attempt=0, key=_KEY, prompt_len=len(prompt),
        max_new_tokens=_SAMPLING.max_tokens, sampling=_SAMPLING, tokens=prompt, images=tuple(placed),
    )  # fmt: skip
    tokens, ranks = probe.capture(chunk)
    for rank, logits in enumerate(ranks):
        if len(logits) != len(tokens):
            raise EngineError(
                f"self-test, rank {rank}: the engine produced {len(tokens)} tokens, our sampler sampled "
                f"{len(logits)}: vLLM samples by another path (is VLLM_USE_V2_MODEL_RUNNER overridden?)"
            )
        expected = _reference(logits, len(prompt), probe.core.vocab_size)
        if tokens != expected:
            raise EngineError(
                f"self-test, rank {rank}: the engine produced tokens {tokens} where the reference "
                f"sampler samples {expected} from the same logits"
            )
    first: np.ndarray = ranks[0][0]
    return first


def _reference(logits: np.ndarray, first_position: int, vocab: int) -> list[int]:
    request = RequestSampling.pack(_SAMPLING, key=_KEY, prompt_len=first_position, stop_ids=(), vocab=vocab)
    positions = first_position + np.arange(len(logits))
    params = SamplingTable([request] * len(logits)).step(positions)
    noisy = noisy_logits(torch.from_numpy(logits), params)[1]
    tokens: list[int] = noisy.argmax(dim=-1).tolist()
    return tokens
