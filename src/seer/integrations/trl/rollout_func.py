"""TRL: `GRPOTrainer(..., rollout_func=SeerRollout("tcp://head:7101"))`.

Invariant: one completion for each prompt, in the same order; what it is, `session.py` and `turns.py` say.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from seer.client import SyncRolloutClient, WeightsLive
from seer.common.errors import InvalidField
from seer.integrations.trl.ranks import on_each
from seer.integrations.trl.session import Session
from seer.integrations.trl.settings import check_supported
from seer.integrations.trl.turns import Context, Ids

if TYPE_CHECKING:
    from trl import GRPOTrainer


class SeerRollout:
    """A `rollout_func`. `client` is the buffer's endpoint, or, in each process, one that the caller closes.

    `model` is the folder that the engines were started with, by default the trainer's; `seed` is by default
    the trainer's. A rollout that takes longer than `deadline_seconds` raises `DeadlineExceeded`. Use in a
    `with`, or `close()` it.
    """

    def __init__(
        self,
        client: str | SyncRolloutClient,
        *,
        model: str | Path | None = None,
        seed: int | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        if importlib.util.find_spec("trl") is None:
            raise ImportError("SeerRollout works with TRL: pip install 'seer-rollout[trl]'")
        self._session = Session(client, model, seed, deadline_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from the buffer; idempotent. A later call connects again."""
        self._session.close()

    @property
    def live(self) -> WeightsLive | None:
        """The result of the last weight update."""
        return self._session.live

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Generate completions for prompts (strings or lists of messages); TRL calls this.

        Returns `prompt_ids`, `completion_ids` and `logprobs`: a list for each completion. Logprobs are of the
        temperature-scaled distribution, before truncation. Raises `InvalidField` for unsupported settings,
        and the client's errors.
        """
        mine = on_each(trainer.accelerator, lambda: self._checked(prompts, trainer))
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        batch = trainer.args.generation_batch_size // trainer.accelerator.num_processes
        if training and len(mine) * size == batch:
            # By TRL's documentation prompts come once each, but its code repeats them: count them.
            mine = [ids for ids in mine for _ in range(size)]
        sampled = self._session.first_turns(trainer, [Context(ids) for ids in mine], size, {})
        return {
            "prompt_ids": [list(ids) for ids in mine],
            "completion_ids": [tokens for tokens, _ in sampled],
            "logprobs": [logprobs for _, logprobs in sampled],
        }

    def _checked(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> list[Ids]:
        check_supported(trainer, images=False)
        if trainer.tools:
            raise InvalidField("tools", trainer.tools, "use SeerGRPOTrainer: a rollout_func cannot have them")
        return token_ids(prompts, trainer)


def token_ids(prompts: Sequence[Any], trainer: GRPOTrainer) -> list[Ids]:
    """Return the ids of strings or of lists of messages, exactly as TRL tokenizes for its own engines."""
    if all(isinstance(prompt, str) for prompt in prompts):
        return [tuple(ids) for ids in trainer.processing_class(text=list(prompts))["input_ids"]]
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, list) or not all(isinstance(m, dict) and "role" in m for m in prompt):
            raise InvalidField(f"prompts[{position}]", prompt, "give all strings, or all lists of messages")
    rendered = trainer.processing_class.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [tuple(ids) for ids in rendered["input_ids"]]
