"""What an undisturbed run returns: the replay engine's responses are a function of their keys alone."""

from __future__ import annotations

from collections.abc import Sequence

from seer.client.prompts import Prompt
from seer.client.rollout import Group
from seer.common import ids
from seer.common.config import EngineConfig
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.replay import salt_of
from seer.services.engine.responses import MadeUp

Answer = tuple[list[int], list[float], str]
"""Token ids, logprobs and the finish reason of one response."""


def answers(group: Group) -> list[Answer]:
    """Return a group's responses, in index order."""
    return [
        (response.token_ids.tolist(), response.logprobs.tolist(), response.finish_reason)
        for response in group.responses
    ]


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
    ) -> Expected:
        """Compute them for rollout `number` with seed 0 and the weights of `digest` (none: the first ones)."""
        salt = salt_of(digest) if digest else 0
        responses = MadeUp(config.replay_vocab_size, config.replay_mean_tokens)

        def answer(prompt: Prompt, index: int) -> Answer:
            chunk = Chunk(
                request_id="", group_id="", attempt=0, key=ids.request_key(0, number, prompt.id, index) ^ salt,
                prompt_len=len(prompt.token_ids), max_new_tokens=sampling.max_tokens, sampling=sampling,
                tokens=list(prompt.token_ids),
            )  # fmt: skip
            length = responses.length(chunk)
            total = min(length, sampling.max_tokens)
            return (*responses.part(chunk, 0, total), "length" if total < length else "stop")

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
