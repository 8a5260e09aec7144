"""The rollout class of veRL's actors: sends their weights to Seer.

Invariants:
- every rank takes part in gathering the weights, and copies and sends its share of them;
- names and types are those of the checkpoint that veRL and the engines were started with; a tensor that only
  veRL or only the checkpoint has is an error that names the tensor;
- each update has a version of its own, above the live one; the server knows the step of each version;
- engines that sleep wake in veRL's order: the weights' memory, the update of the weights, then the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from seer.common.errors import InvalidField
from seer.integrations.checkpoint_names import CheckpointCopy, all_ranks
from seer.integrations.verl.config import settings
from seer.integrations.verl.server import find_server

MODEL = "actor_rollout_ref.model.path"


class SeerRollout(BaseRollout):
    """One per rank of the actor."""

    async def resume(self, tags: list[str]) -> None:
        """Wake these tags of engines that sleep: `weights` before the update, `kv_cache` after the update."""
        if self._has_engines_sleep():
            await find_server().wake_up.remote(tags)

    async def release(self) -> None:
        """Have engines free weights and KV, if they are to; see `SeerServer.sleep`."""
        if self._has_engines_sleep():
            await find_server().sleep.remote()

    def _has_engines_sleep(self) -> bool:
        return settings(self.config.engine_kwargs).sleep and torch.distributed.get_rank() == 0

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: object = None,
        **_: object,
    ) -> None:
        """Send the weights of a step; returns when they are live.

        All ranks call this with the same `weights`, which are collective. Together they hold one copy in host
        memory. Raises `InvalidField`, `Unreachable`, `WeightsRefused`.
        """
        if wire_format != "named_tensors":
            raise InvalidField("wire_format", wire_format, "Seer takes whole tensors: named_tensors")
        if peft_config is not None:
            fix = "Seer takes whole weights here: set actor_rollout_ref.model.lora.merge=True, or use no LoRA"
            raise InvalidField("peft_config", peft_config, fix)
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        copy = CheckpointCopy(Path(self.model_config.local_path), MODEL, tied=tied, ranks=all_ranks())
        async for name, tensor in ensure_async_iterator(weights):
            copy.add(name, tensor)
        version = await copy.send(settings(self.config.engine_kwargs).endpoint)
        if torch.distributed.get_rank() == 0:
            await find_server().weights_live.remote(version, global_steps)
