"""The rollout class of veRL's actors: sends their weights to Seer.

Invariants:
- every rank takes part in gathering the weights, and rank 0 alone sends them;
- names and types are those of the checkpoint that veRL and the engines were started with; a tensor that
  only veRL or only the checkpoint has is an error that names it;
- each update has a version of its own, above the live one; the server knows which step it is of.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from seer.client import RolloutClient
from seer.common.errors import InvalidField, WeightsRefused
from seer.integrations.hf import checkpoint_types
from seer.integrations.verl.config import settings
from seer.integrations.verl.server import find_server

MODEL = "actor_rollout_ref.model.path"


class SeerRollout(BaseRollout):
    """One per rank of the actor."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: `update_weights` wakes engines that sleep."""

    async def release(self) -> None:
        """Do nothing: the server has engines sleep."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: object = None,
        **_: object,
    ) -> None:
        """Send the weights of a step; returns when they are live.

        All ranks call this with the same `weights`, which are collective. Rank 0 holds a copy in host memory.
        Raises `InvalidField`, `Unreachable`, `WeightsRefused`.
        """
        if wire_format != "named_tensors":
            raise InvalidField("wire_format", wire_format, "Seer takes whole tensors: named_tensors")
        if peft_config is not None:
            fix = "Seer takes whole weights here: set actor_rollout_ref.model.lora.merge=True, or use no LoRA"
            raise InvalidField("peft_config", peft_config, fix)
        leads = torch.distributed.get_rank() == 0
        folder = Path(self.model_config.local_path)
        types = checkpoint_types(folder) if leads else {}
        found: dict[str, torch.Tensor] = {}
        extra: list[str] = []
        async for name, tensor in ensure_async_iterator(weights):
            if name in types:
                found[name] = tensor.detach().to("cpu", types[name], copy=True)
            elif leads:
                extra.append(name)
        if leads:
            self._check_names(folder, types.keys() - found.keys(), extra)
            await self._send(found, global_steps)

    def _check_names(self, folder: Path, missing: Iterable[str], extra: Iterable[str]) -> None:
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        for name in sorted(missing):
            raise InvalidField(MODEL, str(folder), f"has a tensor {name}, which veRL does not send")
        for name in extra:
            if not (tied and name == "lm_head.weight"):  # checkpoints store tied tensors once
                raise InvalidField(MODEL, str(folder), f"lacks a tensor {name}, which veRL sends")

    async def _send(self, tensors: dict[str, torch.Tensor], global_steps: int | None) -> None:
        server = find_server()
        await server.wake_up.remote()
        async with RolloutClient(settings(self.config.engine_kwargs).endpoint) as client:
            version = (await client.status()).weight_version + 1
            try:
                await client.update_weights(version, tensors)
            except WeightsRefused as error:
                fix = f"start Seer with the same model; {error}"
                raise InvalidField(MODEL, self.model_config.local_path, fix) from error
        await server.weights_live.remote(version, global_steps)
