"""SkyRL's classes with Seer: groups, turns, phases, weights, refusals."""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

if "SEER_ENDPOINT" not in os.environ:
    pytest.skip("make skyrl-test runs this", allow_module_level=True)
if sys.version_info < (3, 12):
    pytest.skip("skyrl 0.3.0 needs Python 3.12", allow_module_level=True)
# SkyRL's worker imports this, and calls it on GPUs alone; it cannot be built without one.
sys.modules.setdefault("flash_attn.bert_padding", MagicMock())

import skyrl_gym  # noqa: E402
import torch  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.engine_utils import (  # noqa: E402
    get_sampling_params_for_backend,
)
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.generators.utils import prepare_generator_input  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from seer.client import Prompt, RolloutClient, SamplingParams  # noqa: E402
from seer.common.errors import InvalidField, RequestRefused, SeerError  # noqa: E402
from seer.integrations.skyrl.client import SeerInferenceClient  # noqa: E402
from seer.integrations.skyrl.generator import SeerGenerator  # noqa: E402
from seer.integrations.skyrl.main import SeerExp, SeerTrainer, check_config  # noqa: E402
from seer.integrations.skyrl.weights import policy_worker  # noqa: E402
from seer.services.engine.replay.backend import made_up_routes  # noqa: E402

ENDPOINT, MODEL = os.environ["SEER_ENDPOINT"], os.environ["SEER_MODEL"]
N, TOKENS, SEED = 3, 12, 42


class TwoTurns(BaseTextEnv):
    """Answers a first turn, and rewards the second with the number of letters of both."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.said = ""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.said += action
        more = [{"role": "user", "content": "1"}] if self.turns == 1 else []
        return BaseTextEnvStepOutput(
            observations=more, reward=float(len(self.said)), done=self.turns == 2, metadata={}
        )


class OneTurn(TwoTurns):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})


skyrl_gym.register(id="two", entry_point=TwoTurns)
skyrl_gym.register(id="one", entry_point=OneTurn)


def config(*changes: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={MODEL}",
            "trainer.placement.colocate_all=false",
            f"generator.inference_engine.external_proxy_url={ENDPOINT}",
            f"generator.n_samples_per_prompt={N}",
            f"generator.sampling_params.max_generate_length={TOKENS}",
            "generator.max_input_length=100",
            *changes,
        ]
    )


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
async def client(tokenizer):
    made = SeerInferenceClient(ENDPOINT, tokenizer, MODEL, SEED)
    yield made
    await made.teardown()


def batch(cfg: SkyRLTrainConfig, env: str, step: int = 1, phase: str = "train"):
    prompts = [
        {"prompt": [{"role": "user", "content": text}], "env_class": env, "env_extras": {}, "uid": uid}
        for uid, text in (("7", "1 2"), ("9", "3"))
    ]
    params = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    return prepare_generator_input(prompts, N, params, env, phase, step)[0]


def generator(cfg: SkyRLTrainConfig, client: SeerInferenceClient, tokenizer) -> SeerGenerator:
    return SeerExp.get_generator(SimpleNamespace(), cfg, tokenizer, client)


async def asked_for_again(tokens: list[int], group: str, index: int, n: int = 1) -> list[tuple[list, list]]:
    """What another client gets for a place in a group: tokens and logprobs."""
    async with RolloutClient(ENDPOINT) as other:
        rollout = other.open_rollout()
        prompt = rollout.submit(
            Prompt("x", token_ids=tokens), n=n, sampling=SamplingParams(max_tokens=TOKENS, min_tokens=1),
            seed=SEED, rollout_number=1, group=group, first_index=index,
        )  # fmt: skip
        group = await prompt.result()
        return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in group.responses]


@pytest.mark.parametrize("batched", [False, True])
async def test_first_turns_are_whole_groups(client, tokenizer, batched):
    cfg = config(f"generator.batched={str(batched).lower()}")
    given = batch(cfg, "one")
    got = await generator(cfg, client, tokenizer).generate(given, disable_tqdm=True)
    validate_generator_output(len(given["prompts"]), got)
    for position, uid in ((0, "7"), (N, "9")):
        [prompt] = {tuple(ids) for ids in got["prompt_token_ids"][position : position + N]}
        whole = await asked_for_again(list(prompt), f"skyrl-train-0-{uid}", 0, N)
        mine = zip(got["response_ids"], got["rollout_logprobs"], strict=True)
        assert list(mine)[position : position + N] == whole
        assert len({tuple(tokens) for tokens, _ in whole}) > 1
    assert got["loss_masks"] == [[1] * len(ids) for ids in got["response_ids"]]
    assert set(got["stop_reasons"]) <= {"stop", "length"}


async def test_experts_of_all_tokens_but_the_last_are_returned_to_who_asks(tokenizer):
    endpoint = os.environ["SEER_EXPERTS_ENDPOINT"]
    asking = SeerInferenceClient(endpoint, tokenizer, MODEL, SEED, routed_experts=True)
    cfg = config("generator.inference_engine.enable_return_routed_experts=true")
    got = await generator(cfg, asking, tokenizer).generate(batch(cfg, "one"), disable_tqdm=True)
    for prompt, response, experts in zip(
        got["prompt_token_ids"], got["response_ids"], got["rollout_expert_indices"], strict=True
    ):
        assert experts == made_up_routes([*prompt, *response][:-1]).tolist()
    await asking.teardown()


async def test_turns_of_environments(client, tokenizer):
    cfg = config("generator.max_turns=2")
    got = await generator(cfg, client, tokenizer).generate(batch(cfg, "two"), disable_tqdm=True)
    validate_generator_output(2 * N, got)
    rows = zip(
        got["prompt_token_ids"], got["response_ids"], got["loss_masks"], got["rollout_logprobs"], strict=True
    )
    for position, (prompt, response, mask, logprobs) in enumerate(rows):
        uid, index = ("7", "9")[position // N], position % N
        shown = mask.index(0)
        later = len(mask) - mask[::-1].index(0)
        assert mask == [1] * shown + [0] * (later - shown) + [1] * (len(mask) - later)
        for start, end in ((0, shown), (later, len(response))):
            tokens = prompt + response[:start]
            [again] = await asked_for_again(tokens, f"skyrl-train-0-{uid}", index)
            assert (response[start:end], logprobs[start:end]) == again
    assert all(sum(reward) > 0 for reward in got["rewards"])
    *_, trajectories = await client._connected()
    assert (trajectories.turns, trajectories.segments, len(trajectories)) == (4 * N, 0, 0)


async def test_calls_and_phases_differ_and_can_be_repeated(client, tokenizer):
    cfg = config()
    make = generator(cfg, client, tokenizer)
    calls = [(1, "train"), (1, "train"), (1, "eval"), (2, "train")]
    got = [
        (await make.generate(batch(cfg, "one", *call), disable_tqdm=True))["response_ids"] for call in calls
    ]
    assert max(Counter(map(str, got)).values()) == 1
    again = generator(cfg, SeerInferenceClient(ENDPOINT, tokenizer, MODEL, SEED), tokenizer)
    assert (await again.generate(batch(cfg, "one"), disable_tqdm=True))["response_ids"] == got[0]
    await again.inference_engine_client.teardown()


async def test_failures_are_raised(client, tokenizer):
    cfg = config("generator.sampling_params.max_generate_length=5000")
    with pytest.raises(RequestRefused, match="fit"):
        await generator(cfg, client, tokenizer).generate(batch(cfg, "one"), disable_tqdm=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling_params": {"bad_words": ["a"]}}, "bad_words"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"prompt_token_ids": None, "prompts": [[]]}, "prompts"),
        ({"mm_features": [{}]}, "mm_features"),
        ({"session_ids": ["1_0", "1_1"]}, "session_ids"),
    ],
)
async def test_requests_are_refused_by_name(client, changes, named):
    with pytest.raises(InvalidField, match=named):
        await client.generate({"prompt_token_ids": [[4]], "session_ids": ["1_0"]} | changes)


async def test_other_calls_are_refused(client):
    for call in (client.chat_completion({}), client.sleep(), client.get_world_size()):
        with pytest.raises(SeerError, match="seer gateway"):
            await call


@pytest.mark.parametrize(
    "change",
    [
        "trainer.placement.colocate_all=true",
        "trainer.fully_async.enabled=true",
        "trainer.policy.model.lora.rank=8",
        "generator.vision_language_generator=true",
        "generator.inference_engine.external_proxy_url=http://head:7110",
    ],
)
def test_settings_are_refused_by_name(change):
    with pytest.raises(InvalidField, match=change.partition("=")[0]):
        check_config(config(change))
    check_config(config())


# --- weights ----------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """One process that is a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


async def live_version() -> int:
    async with RolloutClient(ENDPOINT) as other:
        return (await other.status()).weight_version


async def send(client: SeerInferenceClient, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have SkyRL's FSDP worker, without the GPU that it is made for, send a model's weights."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    cfg = config("generator.inference_engine.model_dtype=float32")
    worker = object.__new__(policy_worker("fsdp"))
    worker.cfg = cfg.trainer
    worker._is_lora = worker._is_multimodal_lm_only = False
    worker.model = SimpleNamespace(model=model)
    theirs = pickle.loads(pickle.dumps(client))  # as Ray hands it to a worker
    await worker.init_weight_sync_state(theirs, cfg.generator.inference_engine)
    await worker.broadcast_to_inference_engines(theirs, cfg.generator.inference_engine)


async def test_weights_of_skyrls_worker(client, tokenizer, alone, monkeypatch):
    cfg = config()
    make = generator(cfg, client, tokenizer)
    before = await make.generate(batch(cfg, "one"), disable_tqdm=True)
    version = await live_version()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    await send(client, model, monkeypatch)
    after = await make.generate(batch(cfg, "one", step=2), disable_tqdm=True)
    assert await live_version() == version + 1
    for prompt, response, logprobs in zip(
        after["prompt_token_ids"], after["response_ids"], after["rollout_logprobs"], strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        mine = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        assert torch.allclose(mine, torch.tensor(logprobs), atol=1e-3)
    assert before["response_ids"] != after["response_ids"]


async def test_another_model_is_refused_by_name(client, alone, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.model.added = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidField, match=r"trainer.policy.model.path.*model.added.bias"):
        await send(client, model, monkeypatch)


def test_experiment_has_seers_parts(tmp_path, tokenizer, monkeypatch):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "1 2"}], "env_class": "one"}\n' * 2)
    cfg = config(f"data.train_data=[{data}]", "trainer.eval_interval=-1", "trainer.train_batch_size=2")
    check_config(cfg)
    made = SeerExp(cfg)
    client = made.get_inference_client()
    assert (client.endpoint, client.model_name) == (ENDPOINT, MODEL)
    assert isinstance(made.get_generator(cfg, tokenizer, client), SeerGenerator)
    built = []
    monkeypatch.setattr("skyrl.train.trainer.RayPPOTrainer.build_models", lambda *given: built.append(given))
    trainer = object.__new__(SeerTrainer)
    trainer.cfg = cfg
    trainer.build_models("theirs", "critic", "ref")
    [(_, worker, *others)] = built
    assert "SeerPolicyWorker" in str(worker)
    assert others == ["critic", "ref"]
