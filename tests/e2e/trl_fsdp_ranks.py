"""One process of a SeerGRPOTrainer with FSDP on CPUs under torchrun; see test_trl.py.

It writes what it got to <folder>/<rank>.pickle. The second process has more turns than the first; in the end
either fails alone, and the second while weights are handed out. With a fourth argument it trains an adapter,
which is sent `alone` or `merged`, and whose whole weights it leaves to others.
"""

import os
import pickle
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from trl import GRPOConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import trl_runs

from seer.client import SeerError
from seer.integrations.checkpoint_names import CheckpointCopy
from seer.integrations.trl import SeerGRPOTrainer

endpoint, model, folder = sys.argv[1], *map(Path, sys.argv[2:4])
adapter = None
if sys.argv[4:]:
    bias = {"alone": "none", "merged": "all"}[sys.argv[4]]  # engines take none, and this model has none
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], bias=bias)
rank = int(os.environ["RANK"])
config = GRPOConfig(
    **trl_runs.settings(
        folder, per_device_train_batch_size=6, max_tool_calling_iterations=1 + rank, fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    )
)  # fmt: skip
# Accelerate leaves FSDP out on CPUs; any other kind of device will do.
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_HPU
trainer = SeerGRPOTrainer(
    model=str(model),
    reward_funcs=lambda completion_ids, **_: [float(len(ids) % 7) for ids in completion_ids],
    args=config,
    train_dataset=trl_runs.rows("ab", "q", "xy"),
    processing_class=trl_runs.tokenizer(model),
    tools=[trl_runs.look],
    peft_config=adapter,
    seer_endpoint=endpoint,
)
assert trainer.is_fsdp_enabled
if adapter:
    trl_runs.save = lambda trainer, folder: None
else:
    for name, tensor in trainer.model.named_parameters():
        tensor.requires_grad_("layers.0.mlp" in name)  # so little changes that a delta pays
calls = trl_runs.record(trainer, folder)
trainer.train()
deltas = trainer._seer._client._of.deltas
own = deltas._sent and sum(tensor.nbytes for tensor in deltas._sent.data.values())
state = {
    name: tensor.numpy() for name, tensor in trainer.accelerator.get_state_dict(trainer.model_wrapped).items()
}
refused = []
for failing in (1, 0):
    trainer._seer._deadline_seconds = 1e-9 if rank == failing else None
    try:
        trainer._generate([[{"role": "user", "content": "ab"}] for _ in range(6)])
    except SeerError as error:
        refused.append(repr(error))
trainer._seer._deadline_seconds = trainer._seer.live = None
add, added = CheckpointCopy._add, []


def failing(self, name, tensor):
    added.append(name)
    if rank and len(added) == 3:
        raise MemoryError("no room")
    add(self, name, tensor)


CheckpointCopy._add = failing
try:
    trainer._seer._sync_weights(trainer)
except SeerError as error:
    refused.append(repr(error))
for call in calls:
    call.scored = {}
found = calls, refused, state, trainer.state.log_history, (deltas.last, own)
(folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
