"""What an undisturbed run returns, worked out here from the documented rules and from no code under test.

- A request's key is BLAKE2b of seed, rollout number, response index and prompt id (docs/same-tokens.md).
- A modelled engine's token at a position is splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of key and
  position, its length log-normal in (prompt, key); loaded weights mix their digest into the key
  (`services/engine/replay/responses.py` and `replay.py` tell the same rule), and so do names and offsets of
  images.
- Weights digest to BLAKE3 over their tensors' hashes (docs/weights.md).
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from blake3 import blake3

from chaos.plan import Roll
from seer.client.prompts import Prompt
from seer.client.results import Group
from seer.common.config import EngineConfig
from seer.common.types import SamplingParams

Answer = tuple[list[int], list[float], str]
"""Token ids, logprobs and the finish reason of one response."""

_WORD = 2**64 - 1
_SIGMA = 1.0
_PROMPT_SHARE = 0.65


def answers(group: Group) -> list[Answer]:
    """Return a group's responses, in index order."""
    return [
        (response.token_ids.tolist(), response.logprobs.tolist(), response.finish_reason)
        for response in group.responses
    ]


def weights_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the digest of float32 tensors by name."""
    whole = blake3()
    for name in sorted(tensors):
        tensor = tensors[name]
        head = json.dumps([name, "F32", list(tensor.shape)]).encode()
        whole.update(blake3(head + tensor.astype("<f4").tobytes()).digest())
    return "blake3-" + whole.digest(length=16).hex()


def shown_key(key: int, images: Sequence[tuple[str, int]]) -> int:
    """Return the key of a response to a prompt that shows images: their names, and where they begin."""
    if images:
        told = " ".join(f"{name}@{offset}" for name, offset in images)
        key ^= int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little")
    return key


def response(key: int, prompt: Sequence[int], max_tokens: int, vocab_size: int, mean_tokens: int) -> Answer:
    """Return a modelled engine's response to a prompt under a key that has the weights mixed in."""
    words = np.asarray(prompt, dtype="<i4").tobytes()
    of_prompt = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    score = math.sqrt(_PROMPT_SHARE) * _normal(of_prompt) + math.sqrt(1 - _PROMPT_SHARE) * _normal(key)
    mean = math.log(mean_tokens) - _SIGMA**2 / 2
    length = max(1, round(math.exp(mean + _SIGMA * score)))
    total = min(length, max_tokens)
    tell = key ^ int.from_bytes(b"logprobs")
    places = range(len(prompt), len(prompt) + total)
    tokens = [_word(key, place) % vocab_size for place in places]
    logprobs = [(_word(tell, place) >> 41) * -(2.0**-22) for place in places]
    return tokens, logprobs, "length" if total < length else "stop"


def request_key(seed: int, number: int, prompt_id: str, index: int, digest: str) -> int:
    """Return the key of a response, with the weights of `digest` (none: the first ones) mixed in."""
    packed = struct.pack("<qqi", seed, number, index) + prompt_id.encode()
    key = int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"seer-key-v1").digest(), "little")
    if digest:
        key ^= int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=8).digest(), "little")
    return key


def _word(key: int, place: int) -> int:
    word = (key + (place + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return word ^ word >> 31


def _normal(key: int) -> float:
    word = _word(key ^ int.from_bytes(b"lengths!"), 0)
    return statistics.NormalDist().inv_cdf(((word >> 11) + 0.5) * 2.0**-53)


def turn(
    roll: Roll,
    group: str,
    index: int,
    context: Sequence[int],
    most: int,
    config: EngineConfig,
    digest: str,
    images: Sequence[tuple[str, int]] = (),
) -> Answer:
    """Return the turn after `context`, of at most so many tokens, of response `index` of a named group."""
    key = shown_key(request_key(roll.seed, roll.number, group, index, digest), images)
    return response(key, context, most, config.replay.vocab_size, config.replay.mean_tokens)


def difference(got: Sequence[Answer], expected: Sequence[Answer]) -> str:
    """Say how the first response that differs does, for whoever has to find out why."""
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        if mine[0] != theirs[0]:
            pairs = enumerate(zip(mine[0], theirs[0], strict=False))
            place = next(
                (at for at, (one, other) in pairs if one != other), min(map(len, (mine[0], theirs[0])))
            )
            return f"response {index} has other tokens from {place} on"
        if mine[2] != theirs[2]:
            return f"response {index} has the same tokens, and ends by {mine[2]!r}, not {theirs[2]!r}"
        if mine != theirs:
            most = max(abs(one - other) for one, other in zip(mine[1], theirs[1], strict=True))
            return f"response {index} has the same tokens, and logprobs that are off by up to {most:.2g}"
    return f"{len(got)} responses, not {len(expected)}"


class Expected:
    """The responses to every prompt, by prompt id."""

    def __init__(self, answers: dict[str, list[Answer]]) -> None:
        self.answers = answers

    @classmethod
    def of_replay(
        cls,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        config: EngineConfig,
        number: int = 0,
        digest: str = "",
        seed: int = 0,
    ) -> Expected:
        """Compute them for a rollout with the weights of `digest` (none: the first ones)."""

        def answer(prompt: Prompt, index: int) -> Answer:
            key = request_key(seed, number, prompt.id, index, digest)
            key = shown_key(key, [(each.image.name, each.offset) for each in prompt.images])
            vocab, mean = config.replay.vocab_size, config.replay.mean_tokens
            return response(key, prompt.token_ids, sampling.max_tokens, vocab, mean)

        return cls({prompt.id: [answer(prompt, index) for index in range(n)] for prompt in prompts})

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(tokens) for answers in self.answers.values() for tokens, _, _ in answers)

    def changed(self, prompt_id: str, got: Sequence[Answer]) -> int:
        """Count the responses to a prompt that differ from the undisturbed ones."""
        expected = self.answers[prompt_id]
        differing = sum(mine != theirs for mine, theirs in zip(got, expected, strict=False))
        return differing + abs(len(got) - len(expected))
