"""Runs veRL's own trainer, `python -m verl.trainer.main_ppo`, on CPUs in the environment of `make verl-test`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / "build" / "verl-venv" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "countdown"
SECONDS = 500
MANAGER = "seer.integrations.verl.manager.SeerAgentLoopManager"
N, BATCH, STEPS, TOKENS = 8, 8, 2, 200
PROMPTS = [json.loads(row)["prompt"] for row in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]
PROMPTS = PROMPTS[: STEPS * BATCH]

OPTIONS = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": BATCH,
    "data.val_batch_size": STEPS * BATCH,
    "data.max_prompt_length": 32,
    "data.max_response_length": TOKENS,
    "data.shuffle": False,
    "data.dataloader_num_workers": 0,
    "data.filter_overlong_prompts": False,
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.optim.lr": 1e-4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": BATCH,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.rollout.name": "seer",
    "actor_rollout_ref.rollout.n": N,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "reward.custom_reward_function.path": HERE / "countdown.py",
    "reward.custom_reward_function.name": "compute_score",
    "reward.num_workers": 1,
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.logger": "[console]",
    "trainer.total_training_steps": STEPS,
    "trainer.val_before_train": True,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "disable",
    "trainer.balance_batch": False,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "ray_kwargs.ray_init.num_cpus": 12,
    "+ray_kwargs.ray_init.num_gpus": 2,  # what `cpu_platform` calls a GPU
    "+ray_kwargs.ray_init.include_dashboard": False,
    "+ray_kwargs.ray_init.object_store_memory": 300_000_000,
}
WHOLE = {"+actor_rollout_ref.rollout.agent.agent_loop_manager_class": MANAGER}


@dataclass
class Run:
    """A run that has ended: its exit status, all that it said, and what it dumped by step."""

    status: int
    said: str
    folder: Path

    def metrics(self, step: int) -> dict[str, float]:
        """Return what veRL logged of a step."""
        [line] = re.findall(rf"\bstep:{step} - (.*)", self.said)
        found = re.findall(r"([\w/.@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)", line)
        return {name: float(value) for name, value in found}

    def responses(self, step: int) -> Counter[tuple[str, str]]:
        """Return prompt and response of each sample of a step, as text without special tokens."""
        rows = (self.folder / "dump" / f"{step}.jsonl").read_text().splitlines()
        return Counter((row["input"], row["output"]) for row in map(json.loads, rows))

    @property
    def submitted(self) -> list[str]:
        """What Seer says after each rollout."""
        return re.findall(r"Seer: submitted (.*)", self.said)


def make_model(folder: Path) -> Path:
    """Copy the shipped model, with what veRL needs: a chat template, and Qwen's two separators as tokens."""
    shutil.copytree(EXAMPLE / "model", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_data(file: Path, texts: Iterable[str]) -> None:
    """Write prompts as veRL's datasets have them."""
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "countdown",
            "reward_model": {"style": "rule", "ground_truth": text},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, endpoint: str, changes: Mapping[str, object], texts: Iterable[str] = PROMPTS) -> Run:
    """Train and validate on the prompts, with some of veRL's options changed."""
    folder.mkdir()
    model = make_model(folder / "model")
    write_data(folder / "data.jsonl", texts)
    options = OPTIONS | {
        "actor_rollout_ref.model.path": model,
        "data.train_files": folder / "data.jsonl",
        "data.val_files": folder / "data.jsonl",
        "trainer.rollout_data_dir": folder / "dump",
        "+actor_rollout_ref.rollout.engine_kwargs.seer.endpoint": endpoint,
    } | changes  # fmt: skip
    environ = os.environ | {
        "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "cpu_platform", "PYTHONPATH": str(HERE),
        "VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "NO_COLOR": "1",
    }  # fmt: skip
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            [PYTHON, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in options.items())],
            cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS, check=False,
        )  # fmt: skip
    said = re.sub(r"\x1b\[\d+m", "", (folder / "log").read_text(errors="replace"))
    return Run(done.returncode, said, folder)
