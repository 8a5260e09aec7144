"""GRPO's training step: group advantages, the clipped token loss, one AdamW step. Plain torch.

Invariants:
- a step is a function of the weights, the tokens, the rewards and the number of threads: neither the order in
  which groups finished nor the last bits of the engines' logprobs reach the weights;
- one optimizer step per rollout, so the weights that made the tokens are those that are trained;
- prompt tokens and padding carry no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from seer.client.mismatch import divergence
from seer.integrations.checkpoint_names import checkpoint_tensors
from seer.integrations.replayed_routing import padded_experts, replayed_routing

THREADS = 2
"""Part of what makes a step repeatable."""

BATCH_TOKENS = 8192

ROUNDING = 1e-3
"""Difference of a logprob, in nats, that is put down to rounding: kernels sum in another order for another
batch. In float32 it is about 1e-6; beyond this bound the token is corrected by its importance ratio."""

CLIP = 0.2
"""How far an importance ratio may leave 1 before the token's gradient is cut (PPO)."""

GRADIENT_NORM = 1.0
"""Longest gradient; longer ones are scaled down to it."""


@dataclass(frozen=True)
class Sample:
    """One response. `token_ids`: of prompt and response; `logprobs`: the engine's, of the response alone.

    `loss_mask`: False where a token of the response was not generated, but said by a tool; None: all were.
    `images`: `pixel_values` and `image_grid_thw` as the processor returned them, if the prompt has images.
    `experts`: `Response.routed_experts`, which the forward pass replays; None: it routes by itself.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    advantage: float
    loss_mask: NDArray[np.bool_] | None = None
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)
    experts: NDArray[Any] | None = None

    @property
    def tokens(self) -> int:
        """Tokens that carry loss."""
        return self.logprobs.size if self.loss_mask is None else int(self.loss_mask.sum())


@dataclass(frozen=True)
class StepStats:
    """What a step saw. `gap`: mean |trainer's - engine's logprob|; `corrected`: share beyond `ROUNDING`.

    `kl`: nats a token, from the engines to the trainer, estimated by the sampled tokens.
    """

    loss: float
    gradient_norm: float
    gap: float
    corrected: float
    kl: float
    samples: int


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group less their mean, over their standard deviation; zeros when all are equal."""
    spread = np.std(rewards)
    if spread == 0:
        return [0.0] * len(rewards)
    return [float(each) for each in (np.asarray(rewards) - np.mean(rewards)) / spread]


def batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    """Yield samples of like length together: one, or as many as fit `max_tokens` with padding."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda each: each.token_ids.size, reverse=True):
        if batch and (len(batch) + 1) * batch[0].token_ids.size > max_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def pad(batch: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return `ids` [rows, length] and, of tokens from the second on, `mask`, `logprobs`, `advantages`."""
    length = batch[0].token_ids.size
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    mask, logprobs = torch.zeros(len(batch), length - 1), torch.zeros(len(batch), length - 1)
    for row, sample in enumerate(batch):
        end = sample.token_ids.size
        start = end - sample.logprobs.size
        ids[row, :end] = torch.tensor(sample.token_ids)
        mask[row, start - 1 : end - 1] = 1.0 if sample.loss_mask is None else torch.tensor(sample.loss_mask)
        logprobs[row, start - 1 : end - 1] = torch.tensor(sample.logprobs)
    advantage = torch.tensor([[sample.advantage] for sample in batch])
    return {"ids": ids, "mask": mask, "logprobs": logprobs, "advantages": advantage.expand_as(mask)}


def shown(batch: Sequence[Sample], ids: torch.Tensor, placeholder: int | None) -> dict[str, torch.Tensor]:
    """Return what a model with images takes beside the ids: the batch's images, in order of its rows."""
    images = [sample.images for sample in batch if sample.images]
    if not images:
        return {}
    tensors = {name: torch.cat([each[name] for each in images]) for name in images[0]}
    return {**tensors, "mm_token_type_ids": (ids == placeholder).int()}


def token_loss(logprobs: torch.Tensor, engine: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Return PPO's clipped loss of each token; all shapes alike.

    Engine and trainer hold the same weights, so the ratio is 1 up to rounding, and is taken as 1 there:
    rounding differs with the schedule, and would make another curve of the same seed.
    """
    same = (logprobs.detach() - engine).abs() < ROUNDING
    ratio = torch.exp(logprobs - torch.where(same, logprobs.detach(), engine))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


class Learner:
    """A model in float32 and its optimizer. `placeholder`: the token that stands for images; None: none."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(THREADS)
        torch.use_deterministic_algorithms(True)
        self._folder = model
        self.placeholder: int | None = getattr(AutoConfig.from_pretrained(model), "image_token_id", None)
        kind = AutoModelForCausalLM if self.placeholder is None else AutoModelForImageTextToText
        self.model = kind.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights as engines have them: by the names and types of the model's files."""
        return checkpoint_tensors(self.model, self.model.state_dict(), self._folder)

    def step(self, samples: Sequence[Sample], learning_rate: float) -> StepStats:
        """Take one optimizer step on the mean loss over tokens; samples without advantage are skipped."""
        used = [sample for sample in samples if sample.advantage]
        tokens = sum(sample.tokens for sample in used)
        loss, off = 0.0, [torch.zeros(0)]
        self.optimizer.zero_grad()
        for batch in batches(used, BATCH_TOKENS):
            padded = pad(batch)
            mask, engine = padded["mask"], padded["logprobs"]
            with self._routing(batch):
                logprobs = self._logprobs(padded["ids"], shown(batch, padded["ids"], self.placeholder))
            part = (token_loss(logprobs, engine, padded["advantages"]) * mask).sum() / tokens
            part.backward()
            loss += part.item()
            off.append((logprobs.detach() - engine)[mask.bool()])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if used:  # AdamW would move the weights without a gradient, too
            self.optimizer.step()
        every = torch.cat(off).double()
        gap, corrected = every.abs().sum().item(), (every.abs() >= ROUNDING).sum().item()
        share = 1 / max(tokens, 1)
        kl = divergence(every.numpy()) if used else 0.0
        return StepStats(loss, float(norm), share * gap, share * corrected, kl, len(used))

    def _routing(self, batch: Sequence[Sample]) -> AbstractContextManager[None]:
        """Have the forward pass send tokens to the experts that the engines chose, if they are known."""
        experts = [sample.experts for sample in batch if sample.experts is not None]
        if not experts:
            return nullcontext()
        return replayed_routing(self.model, padded_experts(experts, batch[0].token_ids.size))

    def _logprobs(self, ids: torch.Tensor, images: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        # Padding sits on the right, so a causal mask is all the masking needed.
        logits = self.model(input_ids=ids, use_cache=False, **(images or {})).logits[:, :-1]
        return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
