"""A trainer's connection to Seer: weights there, samples back.

Invariants:
- every response is of the trainer's current weights, or an error;
- weights are sent once for each optimizer step, and again if another trainer sent weights since; an adapter
  is sent alone if engines then have the bits that merging here would give;
- processes send whole weights side by side, each its share; only the main process sends adapters and first
  turns, and errors are raised in every process; each process asks for its own later turns, as processes may
  have different numbers of turns;
- a wait ends with `deadline_seconds`, if given, and what is unfinished is given up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import msgspec

from seer.client import (
    Placed,
    Prompt,
    RolloutClient,
    SamplingParams,
    SyncRolloutClient,
    WeightsLive,
    WeightsRefused,
)
from seer.client.open_rollout import results
from seer.common.bounds import check_seconds
from seer.common.errors import InvalidField
from seer.common.prepared_image import PreparedImage, read
from seer.integrations.checkpoint_names import CheckpointCopy, all_ranks, checkpoint_tensors
from seer.integrations.trl.ranks import gathered, merged_on_main, on_each, on_main
from seer.integrations.trl.settings import sampling_params
from seer.integrations.trl.turns import Context, Sample, Submission, first_turns, later_turn
from seer.integrations.trl.weights import (
    NO_ADAPTER,
    adapter_alone,
    base_stream,
    gathered_adapter,
    handed_out,
    whole_weights,
    why_merged,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

_log = logging.getLogger(__name__)

Sampled = tuple[list[int], list[float]]
"""A response's token ids and logprobs, which are of the temperature-scaled distribution before truncation."""


class Keys(TypedDict):
    """What the samples of a call have in common, besides the parameters."""

    seed: int
    rollout_number: int
    weight_version: int


class Session:
    """`client` is the buffer's endpoint, or, in each process, a client that the caller closes.

    `model` is the folder that the engines were started with, by default the trainer's; `seed` is by default
    the trainer's. `live` is the result of the last weight update.
    """

    def __init__(
        self,
        client: str | SyncRolloutClient,
        model: str | Path | None,
        seed: int | None,
        deadline_seconds: float | None,
    ) -> None:
        check_seconds("deadline_seconds", deadline_seconds)
        self._given = client
        self._own: SyncRolloutClient | None = None
        self._model = model
        self._seed = seed
        self._deadline_seconds = deadline_seconds
        self._state: object = None
        self._step = -1
        self._calls: Counter[tuple[str, int]] = Counter()
        """By mode and step: `train()` counts steps anew each time that it is called."""
        self._call = ""
        self._size = 1
        self._start = 0
        self.live: WeightsLive | None = None
        self._merged: str | None = None
        """Why the adapter is merged before it is sent; empty: it is not; None: not decided yet."""
        self._base = ""
        """The digest of the adapter's base, once engines have taken the adapter alone."""

    def close(self) -> None:
        """Disconnect from the buffer; idempotent. A later call connects again."""
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def first_turns(
        self, trainer: GRPOTrainer, prompts: Sequence[Context], size: int, images: Mapping[str, PreparedImage]
    ) -> list[Sampled]:
        """Return a sample for each prompt of this process; `size` in a row, over all of them, are a group.

        `images` are the prompts' images, by name.
        """
        sampling = sampling_params(trainer)
        everyone = gathered(trainer.accelerator, list(prompts))
        shown = (
            images_on_main(trainer.accelerator, images) if any(c.images for p in everyone for c in p) else {}
        )
        self._sync_weights(trainer)
        mode = "train" if trainer.model.training else "eval"
        self._call = f"{mode}-{self._calls[mode, self._step]}"
        self._calls[mode, self._step] += 1
        self._size = size
        self._start = sum(map(len, everyone[: trainer.accelerator.process_index]))
        flat = [prompt for theirs in everyone for prompt in theirs]
        wanted = first_turns(self._call, flat, size, sampling.max_tokens)
        sampled = on_main(trainer.accelerator, lambda: self._generate(trainer, wanted, sampling, shown))
        return sampled[self._start : self._start + len(prompts)]

    def later_turns(
        self,
        trainer: GRPOTrainer,
        turn: int,
        samples: Sequence[Sample],
        contexts: Sequence[Context],
        images: Mapping[str, PreparedImage],
    ) -> list[Sampled]:
        """Return the next tokens of some of this process's samples, at their turn `turn` >= 1.

        `contexts` are the samples with their `images`, by name.
        """
        sampling = sampling_params(trainer)
        wanted = [
            later_turn(
                self._step, self._call, self._start + sample.number, self._size, turn, sample,
                sampling.max_tokens, context.images,
            )
            for sample, context in zip(samples, contexts, strict=True)
        ]  # fmt: skip
        asked = iter(self._generate(trainer, [each for each in wanted if each.max_tokens], sampling, images))
        return [next(asked) if each.max_tokens else ([], []) for each in wanted]

    def _generate(
        self,
        trainer: GRPOTrainer,
        wanted: Sequence[Submission],
        sampling: SamplingParams,
        images: Mapping[str, PreparedImage],
    ) -> list[Sampled]:
        if not wanted:
            return []
        keys: Keys = {
            "seed": trainer.args.seed if self._seed is None else self._seed,
            "rollout_number": self._step,
            "weight_version": self.live.version if self.live else -1,
        }
        deadline = self._deadline_seconds
        return self._client.run(lambda client: generate(client, wanted, sampling, keys, deadline, images))

    # --- weights -------------------------------------------------------------------------

    def _sync_weights(self, trainer: GRPOTrainer) -> None:
        """Update the engines' weights unless they have the trainer's."""
        state, step = trainer.state, trainer.state.global_step
        live_version = on_main(trainer.accelerator, lambda: self._client.status().weight_version)
        moved = state is not self._state or step != self._step  # each train() has a state of its own
        if not moved and self.live is not None and self.live.version == live_version:
            return
        # The live version may be higher than our step: after a resumption, or by another trainer.
        version = max(step, live_version) + 1
        self.live = self._update_adapter(trainer, version) or self._update_all(trainer, version)
        if moved:
            self._state, self._step = state, step

    def _update_all(self, trainer: GRPOTrainer, version: int) -> WeightsLive:
        accelerator = trainer.accelerator
        with whole_weights(trainer) as (model, weights):
            if not handed_out(accelerator):
                return on_main(
                    accelerator,
                    lambda: self._client.update_weights(
                        version, checkpoint_tensors(model, weights, self._folder(model))
                    ),
                )
            # Who cannot update says so before the others wait for its share.
            folder, _ = on_each(accelerator, lambda: (self._folder(model), self._client.status()))
            copy = CheckpointCopy(folder, "model", model=model, ranks=all_ranks())
            for name, tensor in weights.items():
                sharded = hasattr(tensor, "full_tensor")  # as a DTensor, and maybe in host memory
                copy.add(name, tensor.to(accelerator.device).full_tensor() if sharded else tensor)
            return self._client.update_weights(version, copy.source())

    def _update_adapter(self, trainer: GRPOTrainer, version: int) -> WeightsLive | None:
        """Update by the adapter alone; None if the adapter has to be merged, which is decided once."""
        if self._merged is None:
            self._merge(trainer, why_merged(trainer))
        if self._merged:
            return None
        model, state = gathered_adapter(trainer)
        sent = on_main(trainer.accelerator, lambda: self._send_adapter(model, version, state))
        if isinstance(sent, str):
            self._merge(trainer, sent)
            return None
        return sent

    def _merge(self, trainer: GRPOTrainer, why: str) -> None:
        """Merge the adapter from now on, for this reason; empty: send it alone."""
        self._merged = why
        if why not in ("", NO_ADAPTER) and trainer.accelerator.is_main_process:
            _log.warning("the adapter is merged before it is sent: %s", why)

    def _send_adapter(self, model: PeftModel, version: int, state: Mapping[str, Tensor]) -> WeightsLive | str:
        """Return the result, or, the first time, why engines do not take the adapter alone."""
        if self._base:
            return self._client.update_weights(version, adapter_alone(model, state, self._base))
        try:
            base = base_stream(model, state, self._folder(model.get_base_model()))
            adapter = adapter_alone(model, state, base)
            live = self._client.update_weights(version, adapter)
        except (InvalidField, WeightsRefused) as error:
            return str(error)
        self._base = adapter.base_digest()
        _log.info("the adapter is sent alone")
        return live

    def _folder(self, model: PreTrainedModel) -> Path:
        folder = Path(self._model or model.name_or_path)
        if not folder.is_dir():
            raise InvalidField("model", str(folder), "give the folder that the engines were started with")
        return folder

    @property
    def _client(self) -> SyncRolloutClient:
        if not isinstance(self._given, str):
            return self._given
        if self._own is None:
            self._own = SyncRolloutClient(self._given).__enter__()
        return self._own


def images_on_main(accelerator: Accelerator, mine: Mapping[str, PreparedImage]) -> dict[str, PreparedImage]:
    """Return the images of all processes, by name, in the main process; they travel there alone."""
    everyone = merged_on_main(accelerator, {name: each.data for name, each in mine.items()})
    return {name: mine[name] if name in mine else read(name, data) for name, data in everyone.items()}


async def generate(
    client: RolloutClient,
    wanted: Sequence[Submission],
    sampling: SamplingParams,
    keys: Keys,
    deadline_seconds: float | None,
    images: Mapping[str, PreparedImage],
) -> list[Sampled]:
    """Return the responses to all submissions, in order. Raises the error of the first that fails."""
    rollout = client.open_rollout(repeat=True)  # by a trainer that is resumed; no call of a session repeats
    asked = (
        rollout.submit(
            Prompt(
                each.prompt_id,
                token_ids=each.tokens,
                images=[Placed(images[shown.name], shown.offset, shown.length) for shown in each.images],
            ),
            n=each.n,
            sampling=msgspec.structs.replace(sampling, max_tokens=each.max_tokens),
            group="" if each.whole else each.group,
            first_index=each.first,
            **keys,
        )
        for each in wanted
    )
    try:
        groups = await results(asked, deadline_seconds)
    finally:
        rollout.close()
    responses = [response for group in groups for response in group.responses]
    return [(response.token_ids.tolist(), response.logprobs.tolist()) for response in responses]
