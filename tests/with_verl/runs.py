"""`make verl-test`: veRL's own trainer with Seer on CPUs: tokens, groups, weights, turns, sleep, errors.

Every run starts Ray, and takes one to two minutes on two cores.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from up import Up
from with_verl.trainer import BATCH, EXAMPLE, PROMPTS, STEPS, TOKENS, WHOLE, N, Run, train

from seer.client import Prompt, SamplingParams, SyncRolloutClient
from seer.common.wire import Status
from seer.integrations.verl.groups import GroupKey, prompt_id

pytestmark = pytest.mark.timeout(900)

SEED = 42
"""veRL's default of `rollout.seed`."""

ONE_STEP = {"trainer.total_training_steps": 1, "trainer.val_before_train": False}


def system(instances: int, *settings: str, model: Path = EXAMPLE / "model") -> Iterator[Up]:
    up = Up(model, instances, "engine.max_model_len=400", "engine.kv_blocks=800", *settings)
    try:
        up.wait()
        yield up
    finally:
        up.stop()


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[Up]:
    yield from system(2, "buffer.chunk_size=16")


@pytest.fixture(scope="module")
def two_steps(small_chunks: Up, tmp_path_factory: pytest.TempPathFactory) -> Run:
    changes = WHOLE | {
        "actor_rollout_ref.rollout.agent.num_workers": 2,
        "trainer.v1.sampler.custom_sampler.path": Path(__file__).with_name("countdown.py"),
        "trainer.v1.sampler.custom_sampler.name": "PromptSampler",
    }
    return succeeded(small_chunks, tmp_path_factory.mktemp("verl") / "run", changes)


def succeeded(system: Up, folder: Path, changes: Mapping[str, object]) -> Run:
    run = train(folder, system.endpoint, changes)
    assert run.status == 0, run.said[-5000:]
    return run


def asked_for_again(endpoint: str) -> Counter[tuple[str, str]]:
    """Return what a client gets that submits step 1's groups itself, as text without special tokens."""
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    ids = [tuple(tokenizer.encode(text).ids) for text in PROMPTS[:BATCH]]
    given = [
        Prompt(prompt_id(GroupKey(1, False, str(index), 0), tokens), token_ids=tokens)
        for index, tokens in enumerate(ids)
    ]
    with SyncRolloutClient(endpoint) as client:
        sampling = SamplingParams(max_tokens=TOKENS)
        groups = client.submit(given, n=N, sampling=sampling, seed=SEED, rollout_number=1).result()
    return Counter(
        (tokenizer.decode(group.prompt_token_ids.tolist()), tokenizer.decode(response.token_ids.tolist()))
        for group in groups
        for response in group.responses
    )


def test_two_steps_are_on_policy(two_steps):
    for step in range(1, STEPS + 1):
        metrics = two_steps.metrics(step)
        assert metrics["training/rollout_probs_diff_mean"] < 0.003  # the actor computes in bfloat16
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert metrics["training/off_policy/trajectory_staleness/max"] == 0
        assert metrics["response/aborted_ratio"] == 0
        assert sum(two_steps.responses(step).values()) == N * BATCH
        shown = ("gen", "old_log_prob", "update_actor", "update_weights", "step")
        print(f"step {step}:", ", ".join(f"{name} {metrics[f'timing_s/{name}']:.2f} s" for name in shown))
    assert two_steps.metrics(1)["actor/grad_norm"] > 0


def test_every_group_is_submitted_whole(two_steps):
    whole = f"{BATCH} whole groups; weights of step"
    validated = f"{STEPS * BATCH} whole groups; weights of step 0"
    assert two_steps.submitted == [validated, f"{whole} 0", f"{whole} 1"]


def test_the_same_tokens_with_another_chunk_size_and_from_another_client(two_steps, tmp_path):
    for other in system(1, "buffer.chunk_size=64"):
        again = asked_for_again(other.endpoint)
        run = succeeded(other, tmp_path / "run", WHOLE)
    assert two_steps.responses(1) == again
    for step in range(1, STEPS + 1):
        assert run.responses(step) == two_steps.responses(step)


@contextmanager
def watched(endpoint: str) -> Iterator[list[Status]]:
    """Collect the buffer's states, one every tenth of a second."""
    found: list[Status] = []
    over = threading.Event()

    def watch() -> None:
        with SyncRolloutClient(endpoint) as client:
            while not over.wait(0.1):
                found.append(client.status())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def sleep_and_updates(log: Path) -> list[str]:
    """Return what trainers asked of all engines, in order, as the buffer logged it."""
    found = []
    for path in sorted(log.iterdir()):
        for _, event, _ in map(json.loads, path.read_text().splitlines()[1:]):
            match event:
                case ["FromTrainer", _, {"type": "Sleep", "asleep": True, "level": level}, *_]:
                    found.append(f"sleep {level}")
                case ["FromTrainer", _, {"type": "Sleep", "tags": tags}, *_]:
                    found.append(f"wake {' '.join(tags)}")
                case ["FromTrainer", _, {"type": "UpdateWeights"}, *_]:
                    found.append("update")
    return found


def test_tools_sleep_and_two_ranks(tmp_path):
    changes = ONE_STEP | WHOLE | {
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path": Path(__file__).with_name("countdown.py"),
        "actor_rollout_ref.rollout.multi_turn.format": "wrong",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 2,
        "+actor_rollout_ref.rollout.engine_kwargs.seer.sleep": True,
        "trainer.n_gpus_per_node": 2,
    }  # fmt: skip
    for other in system(2, "buffer.chunk_size=16", f"buffer.log={tmp_path / 'log'}"):
        with watched(other.endpoint) as states:
            run = succeeded(other, tmp_path / "run", changes)
    order = ["sleep 2", "wake weights", "update", "wake kv_cache"]
    assert sleep_and_updates(tmp_path / "log") == 2 * order
    turns = sum(" x ans" in response for _, response in run.responses(1).elements())
    assert turns > BATCH
    assert run.submitted == [f"{N * BATCH} first turns, {turns} later turns; weights of step 0"]
    assert run.metrics(1)["training/rollout_probs_diff_mean"] < 0.003
    assert [asleep for asleep, _ in groupby(state.asleep for state in states)] == 2 * [False, True] + [False]
    assert not any(state.asleep and state.requests_running for state in states)


def test_without_the_manager_all_requests_are_single(small_chunks, tmp_path):
    run = succeeded(small_chunks, tmp_path / "run", ONE_STEP)
    assert run.submitted == [f"{N * BATCH} requests of unknown groups; weights of step 0"]
    assert min(Counter(text for text, _ in run.responses(1).elements()).values()) == N
    assert len(run.responses(1)) > 0.9 * N * BATCH  # distinct samples


def test_a_wrong_endpoint_ends_the_run(tmp_path):
    run = train(tmp_path / "run", "ipc:///nowhere", WHOLE)
    assert "Unreachable: ipc:///nowhere did not answer" in failed(run)


def test_another_vocabulary_ends_the_run(tmp_path):
    for other in system(1, model=another_model(tmp_path / "other")):
        run = train(tmp_path / "run", other.endpoint, WHOLE)
    assert "run/model': start Seer with the same model; weight version 1: " in failed(run)


def test_lora_ends_the_run(small_chunks, tmp_path):
    run = train(tmp_path / "run", small_chunks.endpoint, WHOLE | {"actor_rollout_ref.model.lora_rank": 4})
    assert "Seer takes whole weights here: set actor_rollout_ref.model.lora.merge=True" in failed(run)


@pytest.mark.parametrize(("when", "requests"), [("training", N), ("validation", 1)])
def test_one_failed_prompt_ends_the_run(small_chunks, tmp_path, when, requests):
    """It has a token that the tokenizer knows and the model does not."""
    texts = [*PROMPTS[: BATCH - 1], "<bos> 3 3 2 > 3 \n", *PROMPTS[BATCH:]]
    changes = WHOLE | {"trainer.val_before_train": when == "validation"}
    run = train(tmp_path / "run", small_chunks.endpoint, changes, texts)
    why = "1 of 1 prompts: tokens = 66: token ids must be in [0, 66)"
    assert f"RolloutFailed: {requests} requests failed; the first: {why}" in failed(run)


def failed(run: Run) -> str:
    """Return the error that a run ended with, which must not have trained a step."""
    assert run.status != 0
    assert "step:1" not in run.said
    return run.said[run.said.index("Error executing job") :]


def another_model(folder: Path) -> Path:
    """Make a model like the shipped one that knows four more tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(EXAMPLE / "model", folder)
    config = AutoConfig.from_pretrained(folder, vocab_size=70)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
