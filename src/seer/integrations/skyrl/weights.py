"""How SkyRL's policy workers send their weights to Seer.

Invariants:
- every rank takes part in gathering the weights, and copies and sends its share of them;
- names and types are those of the checkpoint in `trainer.policy.model.path`; a tensor that only SkyRL or only
  the checkpoint has is an error that names the tensor;
- each update has a version of its own, above the live one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skyrl.backends.skyrl_train.weight_sync import (
    BroadcastTransferStrategy,
    WeightChunk,
    WeightTransferSender,
)
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from transformers import AutoConfig

from seer.common.errors import InvalidField
from seer.integrations.checkpoint_names import CheckpointCopy, all_ranks

MODEL = "trainer.policy.model.path"


class SeerWeightSender(WeightTransferSender):
    """Streams weights to the buffer at `endpoint`; `folder` has the checkpoint, which the engines run.

    Raises `InvalidField` if there is no such folder.
    """

    def __init__(self, endpoint: str, folder: Path) -> None:
        if not folder.is_dir():
            raise InvalidField(MODEL, str(folder), "give the folder that the engines were started with")
        self._endpoint = endpoint
        self._folder = folder

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list[Any]] | None = None
    ) -> None:
        """Send the weights; returns when they are live. All ranks call it: `chunks` are collective.

        Together the ranks hold one copy in host memory. Raises `InvalidField`, `Unreachable`.
        """
        tied = getattr(AutoConfig.from_pretrained(self._folder), "tie_word_embeddings", False)
        copy = CheckpointCopy(self._folder, MODEL, tied=tied, ranks=all_ranks())
        for chunk in chunks:
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                copy.add(name, tensor)
        await copy.send(self._endpoint)

    def teardown(self) -> None:
        """Do nothing: nothing is kept."""


class SeerWeightSync(PolicyWorkerBase):
    """Comes after a strategy's worker among the bases, and before `PolicyWorkerBase` in their order."""

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Prepare to send weights to Seer; there is no group of processes to form."""
        folder = Path(self.cfg.policy.model.path)
        self._transfer_strategy_cls = BroadcastTransferStrategy  # workers ask for it: tensors come singly
        self._weight_transfer_sender = SeerWeightSender(inference_engine_client.endpoint, folder)


def policy_worker(strategy: str) -> type[SeerWeightSync]:
    """Return the worker's class for `trainer.strategy`, `fsdp` or `megatron`."""
    if strategy == "fsdp":
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase as Worker
    else:
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import (
            MegatronPolicyWorkerBase as Worker,
        )

    class SeerPolicyWorker(Worker, SeerWeightSync):
        """Trains as SkyRL's own, and sends its weights to Seer."""

    return SeerPolicyWorker
