"""TRL: `GRPOTrainer(..., rollout_func=SeerRollout("tcp://head:7101"))`.

Invariants:
- one completion for each prompt, in the same order. Copies of a prompt are distinct samples: the k-th is
  response k % num_generations of that prompt's group k // num_generations, counted over all processes;
- noise keys depend on the seed, the global step (the rollout number), and the call's number within that step,
  not on processes, resumption or weight versions;
- every completion is generated with the trainer's current weights;
- only the main process talks to Seer; its errors are raised in every process.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from seer.client import Prompt, RolloutFailed, SamplingParams, SyncRolloutClient, WeightsLive
from seer.common.errors import InvalidField
from seer.integrations.hf import checkpoint_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from trl import GRPOTrainer

T = TypeVar("T")
Ids = tuple[int, ...]

GENERATION_KWARGS = {
    "frequency_penalty", "logit_bias", "min_tokens", "presence_penalty", "stop", "stop_token_ids",
}  # fmt: skip
"""Allowed keys of `GRPOConfig.generation_kwargs`: sampling parameters for which GRPOConfig has no field."""


class SeerRollout:
    """A `rollout_func`. `client` is the buffer's endpoint, or a client that the caller closes.

    `model` is the folder that the engines were started with, by default the trainer's; `seed` is by default
    the trainer's. A rollout that takes longer than `deadline_seconds` raises `DeadlineExceeded`. `live` is
    the result of the last weight update. Use in a `with`, or `close()` it.
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
        self._given = client
        self._own: SyncRolloutClient | None = None
        self._model = model
        self._seed = seed
        self._deadline_seconds = deadline_seconds
        self._state: object = None
        self._step = -1
        self._calls: Counter[str] = Counter()
        self.live: WeightsLive | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from the buffer; idempotent. A later call connects again."""
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Generate completions for prompts (strings or lists of messages); TRL calls this.

        Returns `prompt_ids`, `completion_ids` and `logprobs`: a list for each completion. Logprobs are of the
        temperature-scaled distribution, before truncation. Raises `InvalidField` for unsupported settings,
        and the client's errors.
        """
        check_supported(trainer)
        sampling = sampling_params(trainer)
        everyone = _gathered(trainer, token_ids(prompts, trainer))
        self._sync_weights(trainer)
        mode = "train" if trainer.model.training else "eval"
        size = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        given = sum(map(len, everyone))
        if mode == "train" and given * size == trainer.args.generation_batch_size:
            # By TRL's documentation prompts come once each, but its code repeats them: count them.
            everyone = [[ids for ids in theirs for _ in range(size)] for theirs in everyone]
        wanted = [ids for theirs in everyone for ids in theirs]
        sampled = _on_main(trainer, lambda: self._sample(trainer, mode, wanted, size, sampling))
        rank = trainer.accelerator.process_index
        start = sum(map(len, everyone[:rank]))
        mine = sampled[start : start + len(everyone[rank])]
        return {
            "prompt_ids": [list(ids) for ids in everyone[rank]],
            "completion_ids": [tokens for tokens, _ in mine],
            "logprobs": [logprobs for _, logprobs in mine],
        }

    def _sample(
        self, trainer: GRPOTrainer, mode: str, prompts: list[Ids], size: int, sampling: SamplingParams
    ) -> list[tuple[list[int], list[float]]]:
        """Return the tokens and logprobs for each prompt, in order."""
        call = f"{mode}-{self._calls[mode]}"
        self._calls[mode] += 1
        groups, places = arrange(prompts, size)
        rollouts = [
            self._client.submit(
                [Prompt(f"{call}-{g}", token_ids=ids) for g, (ids, n) in enumerate(groups) if n == copies],
                n=copies,
                sampling=sampling,
                seed=trainer.args.seed if self._seed is None else self._seed,
                rollout_number=trainer.state.global_step,
                deadline_seconds=self._deadline_seconds,
            )
            for copies in sorted({n for _, n in groups})
        ]
        done = {group.prompt_id: group for rollout in rollouts for group in rollout.result()}
        responses = [done[f"{call}-{g}"].responses[index] for g, index in places]
        return [(response.token_ids.tolist(), response.logprobs.tolist()) for response in responses]

    # --- weights -------------------------------------------------------------------------

    def _sync_weights(self, trainer: GRPOTrainer) -> None:
        """Update the engines' weights unless they have the trainer's."""
        state, step = trainer.state, trainer.state.global_step
        live_version = _on_main(trainer, lambda: self._client.status().weight_version)
        moved = state is not self._state or step != self._step  # each train() has a state of its own
        if not moved and self.live is not None and self.live.version == live_version:
            return
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # all processes take part
        # The live version may be higher than our step: after a resumption, or by another trainer.
        version = max(step, live_version) + 1
        self.live = _on_main(trainer, lambda: self._send(trainer, version, weights))
        if moved:
            self._state, self._step = state, step
            self._calls.clear()

    def _send(self, trainer: GRPOTrainer, version: int, weights: Mapping[str, Tensor]) -> WeightsLive:
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
        folder = Path(self._model or model.name_or_path)
        if not folder.is_dir():
            raise InvalidField("model", str(folder), "give the folder that the engines were started with")
        return self._client.update_weights(version, checkpoint_tensors(model, weights, folder))

    @property
    def _client(self) -> SyncRolloutClient:
        if not isinstance(self._given, str):
            return self._given
        if self._own is None:
            self._own = SyncRolloutClient(self._given).__enter__()
        return self._own


def arrange(prompts: Sequence[Ids], size: int) -> tuple[list[tuple[Ids, int]], list[tuple[int, int]]]:
    """Put copies of prompts into groups of at most `size`.

    Returns each group's prompt and number of copies, and for each prompt given its group and the
    index of its response there.
    """
    seen: Counter[Ids] = Counter()
    groups: list[tuple[Ids, int]] = []
    places: list[tuple[int, int]] = []
    latest: dict[Ids, int] = {}
    for ids in prompts:
        index = seen[ids] % size
        seen[ids] += 1
        if index == 0:
            latest[ids] = len(groups)
            groups.append((ids, 0))
        groups[latest[ids]] = (ids, index + 1)
        places.append((latest[ids], index))
    return groups, places


def sampling_params(trainer: GRPOTrainer) -> SamplingParams:
    """Return GRPOConfig's sampling parameters. Raises `InvalidField` for those that Seer does not have."""
    args = trainer.args
    extra = dict(args.generation_kwargs or {})
    for name in extra.keys() - GENERATION_KWARGS:
        fix = f"has a field of its own or is not known to Seer; it may be one of {sorted(GENERATION_KWARGS)}"
        raise InvalidField(f"GRPOConfig.generation_kwargs[{name!r}]", extra[name], fix)
    if args.max_completion_length is None:
        raise InvalidField("GRPOConfig.max_completion_length", None, "give a number of tokens")
    extra["stop_token_ids"] = [*trainer.eos_token_ids, *extra.get("stop_token_ids", ())]
    given = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
    }
    try:
        sampling = msgspec.convert({**given, **extra}, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidField("GRPOConfig", {**given, **extra}, str(error)) from error
    sampling.check("GRPOConfig")
    return sampling


def check_supported(trainer: GRPOTrainer) -> None:
    """Raise `InvalidField` for settings of the trainer that Seer does not support."""
    if trainer.use_vllm:
        raise InvalidField("GRPOConfig.use_vllm", True, "Seer has the engines: leave it False")
    if trainer.tools:
        raise InvalidField("tools", trainer.tools, "TRL generates what follows a tool call itself: give none")
    if hasattr(trainer.processing_class, "tokenizer"):
        kind = type(trainer.processing_class).__name__
        raise InvalidField("processing_class", kind, "Seer takes text only: give a tokenizer")
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise InvalidField("model", "a PEFT adapter", "Seer takes whole weights: train the model itself")


def token_ids(prompts: Sequence[Any], trainer: GRPOTrainer) -> list[Ids]:
    """Return the ids of strings or of lists of messages, exactly as TRL tokenizes them for its own
    engines.
    """
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


def _gathered(trainer: GRPOTrainer, mine: list[Ids]) -> list[list[Ids]]:
    """Return the prompts of each process, by rank."""
    if trainer.accelerator.num_processes == 1:
        return [mine]
    from accelerate.utils import gather_object

    everyone: list[list[Ids]] = gather_object([mine])
    return everyone


def _on_main(trainer: GRPOTrainer, work: Callable[[], T]) -> T:
    """Run `work` in the main process and return its result in all processes.

    If it raises, the other processes raise `RolloutFailed`, so that none waits for ever.
    """
    if trainer.accelerator.num_processes == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    sent: list[Any] = [None, "the main process was interrupted"]
    try:
        if trainer.accelerator.is_main_process:
            sent = [work(), ""]
    except Exception as error:
        sent[1] = f"the main process failed: {error!r}"
        raise
    finally:
        broadcast_object_list(sent)
    if sent[1]:
        raise RolloutFailed(sent[1])
    result: T = sent[0]
    return result
