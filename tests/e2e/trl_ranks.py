"""One process of a GRPOTrainer under torchrun; writes what it got to <folder>/<rank>.json. See test_trl.py."""

import json
import sys
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from seer.client import SeerError, SyncRolloutClient
from seer.integrations.trl import SeerRollout

endpoint, model, folder = sys.argv[1:]
rollout = SeerRollout(endpoint)
calls = []


def remember(prompts, trainer):
    if calls and trainer.accelerator.is_main_process:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(Path(folder) / "second")
    out = rollout(prompts, trainer)
    deltas = rollout._session._client._of.deltas
    own = deltas._sent and sum(tensor.nbytes for tensor in deltas._sent.data.values())
    calls.append({**out, "digest": rollout.live.digest, "sending": deltas.last, "own": own})
    return out


trainer = GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
    args=GRPOConfig(
        output_dir=folder, num_generations=4, per_device_train_batch_size=6, max_steps=2, seed=11,
        max_completion_length=24, temperature=0.9, learning_rate=1e-2, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False,
    ),
    train_dataset=Dataset.from_list([{"prompt": text} for text in ("ab", "q", "xy")]),
    rollout_func=remember,
)  # fmt: skip
for name, tensor in trainer.model.named_parameters():
    tensor.requires_grad_("layers.0.mlp" in name)  # so little changes that a delta pays
trainer.train()
if trainer.accelerator.is_main_process:
    rollout._session._seed = 2**64  # refused, in the main process alone
rank = trainer.accelerator.process_index
refused = []
for cut_off in (False, True):
    if cut_off:
        rollout.close()
        rollout._session.live = None
        rollout._session._given = SyncRolloutClient(endpoint) if rank else endpoint  # that is not entered
    try:
        rollout(["ab"] * 4, trainer)
    except (SeerError, RuntimeError) as error:
        refused.append(repr(error))
(Path(folder) / f"{rank}.json").write_text(json.dumps({"calls": calls, "refused": refused}))
rollout.close()
