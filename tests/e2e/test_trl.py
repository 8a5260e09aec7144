"""TRL's GRPOTrainer with Seer for its rollouts, against real engines: tokens, logprobs, versions, ranks."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trl_runs
from up import Up

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("trl") is None:
    pytest.skip("needs the engine extra and TRL", allow_module_level=True)

from seer.client import InvalidField, Prompt, SamplingParams, SyncRolloutClient
from seer.integrations.trl import SeerGRPOTrainer, SeerRLOOTrainer, SeerRollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
G = 4
TOKENS = 24
SEED = 11
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PROMPTS = ["ab", "ab", "q", "xy"]
"""The data has one twice."""


@pytest.fixture(scope="module")
def system(tiny_model: Path) -> Iterator[Up]:
    yield from trl_runs.beside_trl(
        tiny_model, 2, "engine.max_model_len=400", "engine.kv_blocks=400", "buffer.chunk_size=16"
    )


class Seen:
    """A run's generations: what was returned to TRL, what TRL made of it, and the model that was asked."""

    def __init__(self, folder: Path, model: Path, client: SyncRolloutClient, **config: object) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.folder = folder
        self.rollout = SeerRollout(client)
        self.calls: list[dict] = []
        # Three micro-steps a step and two a generation: steps with two generations, and with one.
        settings = {
            "output_dir": str(folder / "out"), "num_generations": G, "num_generations_eval": 2,
            "per_device_train_batch_size": 2 * G, "gradient_accumulation_steps": 3, "steps_per_generation": 2,
            "per_device_eval_batch_size": 4, "max_steps": 3, "max_completion_length": TOKENS, "seed": SEED,
            "temperature": 0.9, "learning_rate": 1e-2, "shuffle_dataset": False, "save_strategy": "steps",
            "save_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
            "disable_tqdm": True,
        }  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in 5 * PROMPTS]
        self.trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=lambda completions, **_: [float(len(c[0]["content"]) % 7) for c in completions],
            args=GRPOConfig(**settings | config),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[2:4]),
            processing_class=self._tokenizer(model),
            rollout_func=self._roll,
        )
        generate = self.trainer._generate_and_score_completions
        self.trainer._generate_and_score_completions = lambda inputs: self._scored(generate(inputs))

    def _tokenizer(self, model: Path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        return tokenizer

    def _roll(self, prompts, trainer):
        folder = self.folder / f"weights-{len(self.calls)}"
        trainer.model.save_pretrained(folder)
        out = self.rollout(prompts, trainer)
        assert out["prompt_ids"] == [list(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
        call = {"step": trainer.state.global_step, "training": trainer.model.training, "folder": folder}
        self.calls.append({**call, "live": self.rollout.live, **out})
        return out

    def _scored(self, scored):
        self.calls[-1]["scored"] = scored
        return scored


def keys(calls: list[dict]) -> list[tuple[int, str]]:
    """The rollout number and the start of the prompt ids that each call must have had."""
    found: list[tuple[int, str]] = []
    for call in calls:
        mode = "train" if call["training"] else "eval"
        before = sum(key[0] == call["step"] and key[1].startswith(mode) for key in found)
        found.append((call["step"], f"{mode}-{before}"))
    return found


def asked_again(
    client: SyncRolloutClient, call: dict, key: tuple[int, str], n: int = G
) -> tuple[str, list[list[int]]]:
    """What a client that knows nothing of TRL gets for the same weights, keys and prompts; and their digest."""
    live = client.update_weights(client.status().weight_version + 1, call["folder"])
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.9)
    prompts = [Prompt(f"{key[1]}-{g}", token_ids=ids) for g, ids in enumerate(call["prompt_ids"][::n])]
    rollout = client.submit(prompts, n=n, sampling=sampling, seed=SEED, rollout_number=key[0], repeat=True)
    return live.digest, [r.token_ids.tolist() for group in rollout.result() for r in group.responses]


def test_a_run_is_on_policy_exact_and_resumable(system, tiny_model, tmp_path):
    with SyncRolloutClient(system.endpoint) as client:
        run = Seen(tmp_path / "one", tiny_model, client)
        run.trainer.train()
        run.trainer.evaluate()
        train = [call for call in run.calls if call["training"]]
        assert [call["step"] for call in run.calls] == [0, 0, 1, 2, 2, 3]
        assert [call["live"].version for call in run.calls] == [1, 1, 2, 3, 3, 4]
        assert len({call["live"].digest for call in run.calls}) == 4
        losses = [entry["loss"] for entry in run.trainer.state.log_history if "loss" in entry]
        assert len(losses) == 3
        assert all(map(math.isfinite, losses))

        for call in train:
            assert len(call["prompt_ids"]) == 4 * G
            groups = [call["prompt_ids"][i : i + G] for i in range(0, 4 * G, G)]
            assert all(len({tuple(ids) for ids in group}) == 1 for group in groups)
            assert len({tuple(ids) for ids in call["prompt_ids"]}) == 3
            assert len({tuple(tokens) for tokens in call["completion_ids"]}) == 4 * G
            assert_logprobs_agree(call)
        assert [len(call["prompt_ids"]) for call in run.calls if not call["training"]] == [4]

        resumed = Seen(tmp_path / "two", tiny_model, client)
        resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "out" / "checkpoint-2"))
        assert [call["step"] for call in resumed.calls] == [2, 2]
        assert resumed.calls[0]["live"].version == 5
        for again, before in zip(resumed.calls, train[3:], strict=True):
            assert again["live"].digest == before["live"].digest
            assert again["completion_ids"] == before["completion_ids"]

        for call, key in zip(run.calls, keys(run.calls), strict=True):
            again = asked_again(client, call, key, n=G if call["training"] else 2)
            assert again == (call["live"].digest, call["completion_ids"])


def assert_logprobs_agree(call: dict) -> None:
    """Those of the engine against those that TRL recomputed with the trainer's model."""
    scored = call["scored"]
    for row, logprobs in enumerate(call["logprobs"]):
        ours = scored["sampling_per_token_logps"][row][: len(logprobs)].tolist()
        theirs = scored["old_per_token_logps"][row][: len(logprobs)].tolist()
        assert ours == pytest.approx(logprobs, abs=1e-6)
        assert theirs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.breadth
def test_two_processes_share_whole_groups_and_every_error(system, tiny_model, tmp_path):
    """Three groups of four over two processes of six: one group is cut."""
    run([*TWO_PROCESSES, str(HERE / "trl_ranks.py"), system.endpoint, str(tiny_model), str(tmp_path)])
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert "seed" in ranks[0]["refused"][0]
    assert re.match(r"RolloutFailed.*the main process failed: InvalidField.*seed = ", ranks[1]["refused"][0])
    assert re.match(r"RolloutFailed.*process 1 failed: RuntimeError.*with block", ranks[0]["refused"][1])
    assert "with block" in ranks[1]["refused"][1]
    calls = [
        {
            name: [entry for rank in ranks for entry in rank["calls"][i][name]]
            for name in ("prompt_ids", "completion_ids")
        }
        for i in range(2)
    ]
    assert [len(rank["calls"][i]["completion_ids"]) for rank in ranks for i in range(2)] == [6] * 4
    for i, folder in enumerate((tiny_model, tmp_path / "second")):
        first, second = (rank["calls"][i] for rank in ranks)
        assert_shared((first["sending"], first["own"]), (second["sending"], second["own"]), delta=i == 1)
        assert len({tuple(tokens) for tokens in calls[i]["completion_ids"]}) == 3 * G
        with SyncRolloutClient(system.endpoint) as client:
            digest, again = asked_again(client, {**calls[i], "folder": folder}, (i, "train-0"))
        assert digest == first["digest"] == second["digest"]
        assert again == calls[i]["completion_ids"]
    assert ranks[0]["calls"][0]["digest"] != ranks[0]["calls"][1]["digest"]


def assert_shared(first: tuple, second: tuple, *, delta: bool) -> None:
    """Each of two processes had and sent about half: see `SentWeights.last`, and the bytes that it kept."""
    (sent, whole, why), own = first
    assert list(second[0]) == [sent, whole, why]
    assert 0.95 * whole < own + second[1] < whole  # which has a header
    assert 0.45 < own / whole < 0.55
    assert (0 < sent < 0.5 * whole and not why) if delta else sent == whole


def trained(trainer_class, config_class, system, model, folder, *, evaluate=False, others=None, **config):
    """Train two steps; return the trainer and what it generated."""
    trainer = trainer_class(
        model=str(model),
        args=config_class(**trl_runs.settings(folder, **config)),
        train_dataset=trl_runs.rows("ab", "q", "xy", "c"),
        eval_dataset=trl_runs.rows("dd"),
        processing_class=trl_runs.tokenizer(model),
        seer_endpoint=system.endpoint,
        **{"reward_funcs": lambda completion_ids, **_: [float(len(ids) % 7) for ids in completion_ids]}
        | (others or {}),
    )
    calls = trl_runs.record(trainer, folder)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    assert len({call.live for call in calls}) == len(calls)
    with SyncRolloutClient(system.endpoint) as client:
        for call in calls:
            trl_runs.again(client, call)
    return trainer, calls


def test_tools_evaluation_and_importance_sampling(system, tiny_model, tmp_path):
    from trl import GRPOConfig

    trainer, calls = trained(
        SeerGRPOTrainer, GRPOConfig, system, tiny_model, tmp_path, evaluate=True,
        others={"tools": [trl_runs.look]}, max_tool_calling_iterations=3,
        vllm_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    assert [(call.step, call.mode) for call in calls] == [(0, "train"), (1, "train"), (2, "eval")]
    for call in calls[:2]:
        turns = [turn for _, turn, *_ in call.turns()]
        assert len(call.prompts) == 2 * G
        assert 2 in turns  # three turns; and not all call the tool
        assert turns.count(1) < 2 * G
    for call in calls:
        mask = call.scored["completion_mask"] * call.scored["tool_mask"]
        apart = (call.scored["sampling_per_token_logps"] - call.scored["old_per_token_logps"]) * mask
        assert apart.abs().max() < 1e-4
        assert call.scored["importance_sampling_ratio"] == pytest.approx(1, abs=1e-4)
    logged = trainer.state.log_history
    assert len([entry for entry in logged if "sampling/sampling_logp_difference/max" in entry]) == 2
    assert all(entry["tools/call_frequency"] > 0 for entry in logged if "tools/call_frequency" in entry)


def test_environments_whose_siblings_see_different_prompts(system, tiny_model, tmp_path):
    from trl import GRPOConfig

    _, calls = trained(
        SeerGRPOTrainer, GRPOConfig, system, tiny_model, tmp_path,
        others={"environment_factory": trl_runs.Room, "reward_funcs": None},
    )  # fmt: skip
    for call in calls:
        assert [len({tuple(ids) for ids in call.prompts[i : i + G]}) for i in (0, G)] == [2, 2]
        assert max(turn for _, turn, *_ in call.turns()) > 0


@pytest.mark.parametrize("bias", ["none", pytest.param("all", marks=pytest.mark.breadth)])
def test_adapters_are_sent_alone_or_merged_and_leave_no_trace(system, tiny_model, tmp_path, bias):
    import torch
    from peft import LoraConfig
    from safetensors.torch import load_file
    from trl import GRPOConfig

    trainer, calls = trained(
        SeerGRPOTrainer, GRPOConfig, system, tiny_model, tmp_path,
        others={"peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], bias=bias)},
    )  # fmt: skip
    assert {call.adapter for call in calls} == {bias == "none"}
    base = trainer.model.get_base_model().state_dict()
    for name, before in load_file(tiny_model / "model.safetensors").items():
        owner, _, leaf = name.rpartition(".")
        after = base.get(name, base.get(f"{owner}.base_layer.{leaf}"))
        assert torch.equal(after, before), name


def test_what_seer_does_not_do_is_refused_before_trl_looks_for_a_vllm(tiny_model, tmp_path):
    from trl import GRPOConfig, RLOOConfig

    given = {"model": str(tiny_model), "reward_funcs": len, "seer_endpoint": "ipc:///none"}
    for trainer_class, config_class in ((SeerGRPOTrainer, GRPOConfig), (SeerRLOOTrainer, RLOOConfig)):
        args = config_class(**trl_runs.settings(tmp_path, use_vllm=True))
        with pytest.raises(InvalidField, match=f"{config_class.__name__}.use_vllm = True"):
            trainer_class(args=args, **given)
    with pytest.raises(InvalidField, match=r"rollout_func.*Seer generates"):
        SeerGRPOTrainer(rollout_func=print, **given)


def test_rloo(system, tiny_model, tmp_path):
    from trl import RLOOConfig

    trainer, calls = trained(SeerRLOOTrainer, RLOOConfig, system, tiny_model, tmp_path, evaluate=True)
    assert [(call.step, call.mode) for call in calls] == [(0, "train"), (1, "train"), (2, "eval")]
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 2


@pytest.mark.breadth
def test_two_processes_with_fsdp_may_have_different_numbers_of_turns(system, tiny_model, tmp_path):
    """Three groups of four over two processes of six: one group is cut."""
    first, second = with_fsdp(system, tiny_model, tmp_path)
    assert_shared(first[-1], second[-1], delta=True)
    for each in (first, second):
        assert re.match("InvalidField.*tensors of rank 1.*no room", each[1][2])
    assert re.match(r"RolloutFailed.*process 1 failed: DeadlineExceeded", first[1][0])
    assert re.match("DeadlineExceeded", first[1][1])
    assert re.match("DeadlineExceeded", second[1][0])
    assert re.match(r"RolloutFailed.*the main process failed: DeadlineExceeded", second[1][1])
    with SyncRolloutClient(system.endpoint) as client:
        for ours, theirs in zip(first[0][:2], second[0][:2], strict=True):
            assert len(ours.prompts) == len(theirs.prompts) == 6
            assert max(turn for _, turn, *_ in ours.turns()) == 1
            assert max(turn for _, turn, *_ in theirs.turns()) == 2
            ours.prompts += theirs.prompts
            ours.completions += theirs.completions
            ours.masks += theirs.masks
            trl_runs.again(client, ours)
    assert first[0][0].live != first[0][1].live


@pytest.mark.breadth
@pytest.mark.parametrize("how", ["alone", "merged"])
def test_adapters_with_fsdp_are_sent_alone_or_merged_and_leave_no_trace(system, tiny_model, tmp_path, how):
    from safetensors.numpy import load_file

    (calls, _, state, logged, _), _ = with_fsdp(system, tiny_model, tmp_path, how)
    assert calls[0].live != calls[1].live
    assert calls[0].adapter is calls[1].adapter is (how == "alone")
    apart = [entry["sampling/sampling_logp_difference/max"] for entry in logged if "loss" in entry]
    assert len(apart) == 2
    assert max(apart) < 1e-4  # of what the trainer computes with the adapter, and the engines without
    assert all(tensor.any() for name, tensor in state.items() if "lora_B" in name)
    for name, before in load_file(tiny_model / "model.safetensors").items():
        owner, _, leaf = f"base_model.model.{name}".rpartition(".")
        after = state.get(f"{owner}.{leaf}", state.get(f"{owner}.base_layer.{leaf}"))
        assert (after == before).all(), name


def with_fsdp(system: Up, model: Path, folder: Path, *options: str) -> list[tuple]:
    """What each of two processes wrote: see trl_fsdp_ranks.py."""
    script = str(HERE / "trl_fsdp_ranks.py")
    run([*TWO_PROCESSES, script, system.endpoint, str(model), str(folder), *options])
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.mark.breadth
def test_the_example_of_the_docs_runs(pair, tmp_path):
    endpoint = pair.anew()
    with SyncRolloutClient(endpoint) as client:
        before = client.status().weight_version
        (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trainers/trl.md").read_text(), re.DOTALL)
        assert text.count("tcp://127.0.0.1:7101") == text.count("runs/trl") == 1
        text = text.replace("tcp://127.0.0.1:7101", endpoint).replace("runs/trl", str(tmp_path))
        (tmp_path / "example.py").write_text(text)
        out = run([str(tmp_path / "example.py")], HF_DATASETS_CACHE=str(tmp_path / "cache"))
        assert len(re.findall(r"'loss': ", out)) == 3
        assert client.status().weight_version == before + 3


def run(command: list[str], **environ: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", **environ}
    whole = [sys.executable, *command]
    done = subprocess.run(
        whole, capture_output=True, text=True, timeout=250, check=False, cwd=ROOT, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
