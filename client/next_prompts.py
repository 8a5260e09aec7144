"""The part of the client that names coming prompts, which idle engines generate for the sake of their drafts.

Invariants (tests/unit/test_client_next_prompts.py):
- each message is answered before the next one is sent, or the call fails by its deadline, and at once
  when the connection ends;
- no noise is claimed, no rollout begins: what is submitted later has the tokens that it would have had.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from seer.client.calls import Calls, answered_within
from seer.client.prompts import Prepared, Prompt, batches, check_request, prepare
from seer.client.text import Tokenizer
from seer.client.used_noise import UsedNoise
from seer.common.errors import InvalidField, RequestRefused
from seer.common.net.channel import Channel
from seer.common.types import SamplingParams
from seer.common.wire import Accepted, BufferToTrainer, NextPrompts, Refused, Tokens, TrainerToBuffer


class NamesNextPrompts:
    """What `RolloutClient` has of it; `_answers` are awaited, by submission."""

    endpoint: str
    tokenizer: Tokenizer | None
    weight_version: int
    _channel: Channel[TrainerToBuffer, BufferToTrainer]
    _noise: UsedNoise
    _version_found: int
    _check_open: Callable[[], None]
    _new_submission: Callable[[], int]

    def __init__(self) -> None:
        self._answers: Calls[Accepted | Refused] = Calls()

    async def next_prompts(
        self,
        prompts: Iterable[Prompt | str | Sequence[int] | Tokens],
        *,
        n: int = 8,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        rollout_number: int | None = None,
        timeout_seconds: float = 10.0,
    ) -> None:
        """Name the prompts of the next `submit`: engines that idle until then generate them, for drafts.

        Nothing comes back, and no token of any response depends on it; it ends with this client's next
        submission and with any update of weights, sleep or the end of the buffer, in the place of what was
        named before. Give all parameters of the next `submit`: responses then have its noise, and drafts are
        right until the weights make a difference. `rollout_number` is by default that of the version after
        the live one. Raises `InvalidField`, `RequestRefused` with the buffer's reason (as where the dgds
        remembers nothing), `Unreachable` as the connection ends, or after `timeout_seconds`, as from a
        buffer before protocol 3.9.
        """
        self._check_open()
        sampling = sampling or SamplingParams()
        live = max(self.weight_version, self._version_found)
        number = self._noise.number(None, live + 1) if rollout_number is None else rollout_number
        check_request(n, sampling, seed, number)
        prepared = list(prepare(prompts, self.tokenizer).values())
        for position, prompt in enumerate(prepared):
            if prompt.images:
                raise InvalidField(f"prompts[{position}].images", len(prompt.images), "name prompts of text")
        async with answered_within(timeout_seconds, f"{self.endpoint} did not answer"):
            for message in self._messages(prepared, n, sampling, seed, number):
                answer = await self._answers.ask(message.submission, self._channel.send(message))
                if isinstance(answer, Refused):
                    raise RequestRefused(answer.message, tuple(answer.prompt_ids))

    def _messages(
        self, prepared: Sequence[Prepared], n: int, sampling: SamplingParams, seed: int, number: int
    ) -> Iterator[NextPrompts]:
        rollout_id = secrets.token_hex(8)
        for batch in batches(prepared, lambda prompt: prompt.token_ids.size):
            yield NextPrompts(
                rollout_id=rollout_id,
                rollout_number=number,
                seed=seed,
                n=n,
                sampling=sampling,
                prompt_ids=[prompt.id for prompt in batch],
                lengths=[prompt.token_ids.size for prompt in batch],
                tokens=np.concatenate([prompt.token_ids for prompt in batch]),
                submission=self._new_submission(),
            )
