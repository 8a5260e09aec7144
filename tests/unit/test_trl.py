"""SeerRollout, and the session that trainers share, against a trainer and a client that only remember."""

from __future__ import annotations

import asyncio
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from seer.client import (
    DeadlineExceeded,
    Group,
    InvalidField,
    Prompt,
    Response,
    RolloutFailed,
    SamplingParams,
    WeightsLive,
)
from seer.common.structured_outputs import StructuredOutputs
from seer.integrations.trl import SeerRollout, ranks
from seer.integrations.trl import session as integration
from seer.integrations.trl.rollout_func import token_ids
from seer.integrations.trl.session import Session
from seer.integrations.trl.settings import check_config, sampling_params
from seer.integrations.trl.turns import Context, Sample

G = 4
NEVER, FAILS = 1000, 1001
"""First tokens of prompts that never end, and of those that fail."""


class Client:
    def __init__(self) -> None:
        self.version = 0
        self.updates: list[tuple[int, object]] = []
        self.rollouts: list[Rollout] = []

    @property
    def submitted(self) -> list[tuple[Prompt, dict]]:
        return [each for rollout in self.rollouts for each in rollout.submitted]

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(weight_version=self.version)

    def update_weights(self, version: int, source: object) -> WeightsLive:
        assert version > self.version
        self.version = version
        self.updates.append((version, source))
        return WeightsLive(version=version, digest="d")

    def run(self, work):
        return asyncio.run(work(self))

    def open_rollout(self, *, repeat: bool) -> SimpleNamespace:
        self.rollouts.append(Rollout(self))
        return self.rollouts[-1]


class Rollout:
    """An open rollout: a token says which prompt, step, group and response it is of."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.submitted: list[tuple[Prompt, dict]] = []
        self.unfinished: list[str] = []
        self.cancelled: list[str] = []
        self.closed = False

    def submit(self, prompt: Prompt, **options: object) -> SimpleNamespace:
        assert not self.closed
        assert options["weight_version"] == self.client.version
        assert prompt.id not in self.unfinished
        self.submitted.append((prompt, options))
        self.unfinished.append(prompt.id)
        ended = asyncio.Event()
        if prompt.token_ids[0] != NEVER:
            ended.set()

        async def result() -> Group:
            await ended.wait()
            self.unfinished.remove(prompt.id)
            if prompt.token_ids[0] == FAILS:
                raise RolloutFailed("engines died", (prompt.id,))
            return self._group(prompt, **options)

        async def cancel() -> None:
            if prompt.id in self.unfinished:
                self.cancelled.append(prompt.id)

        request = SimpleNamespace(prompt=prompt)
        return SimpleNamespace(result=result, cancel=cancel, ended=ended.is_set(), request=request)

    def close(self) -> None:
        self.closed = True

    def _group(self, prompt, n, rollout_number, group, first_index, **_) -> Group:
        key = int((group or prompt.id).partition(".")[0].split("-")[-1])
        responses = tuple(
            Response(
                i,
                np.array([*prompt.token_ids, rollout_number, key, first_index + i]),
                np.array([-first_index - i], np.float32),
                None,
                "stop",
                "",
            )
            for i in range(n)
        )
        return Group(prompt.id, np.array(prompt.token_ids), {}, self.client.version, "d", responses, 1, 0, 0)


class Tokenizer:
    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in one] for one in text]}

    def apply_chat_template(self, conversation, **options) -> dict[str, list[list[int]]]:
        assert options["add_generation_prompt"] is True
        assert options["thinking"] is False
        return self(["".join(message["content"] for message in messages) for messages in conversation])


class GRPOConfig(SimpleNamespace):
    pass


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(integration, "checkpoint_tensors", lambda model, weights, folder: weights)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    model = SimpleNamespace(training=True, name_or_path="/")
    accelerator = SimpleNamespace(
        state=SimpleNamespace(),
        num_processes=1,
        process_index=0,
        is_main_process=True,
        unwrap_model=lambda model, **_: model,
        get_state_dict=lambda model: f"weights at {found.state.global_step}",
    )
    args = GRPOConfig(
        use_vllm=False, use_transformers_continuous_batching=False, vllm_structured_outputs_regex=None, seed=7, generation_batch_size=2 * G, generation_kwargs=None, max_completion_length=99,
        temperature=0.8, top_p=0.9, top_k=0, min_p=None, repetition_penalty=1.1,
    )  # fmt: skip
    found = SimpleNamespace(
        state=SimpleNamespace(global_step=0), args=args, model=model, model_wrapped=model,
        accelerator=accelerator, num_generations=G, num_generations_eval=2, tools=[],
        processing_class=Tokenizer(), chat_template=None, chat_template_kwargs={"thinking": False},
        eos_token_ids=[2],
    )  # fmt: skip
    return found


@pytest.fixture
def client() -> Client:
    return Client()


def adapted(base: SimpleNamespace) -> SimpleNamespace:
    """A model with an adapter."""
    return SimpleNamespace(
        training=True, peft_config={}, merge_adapter=None, get_base_model=lambda: base, name_or_path="/"
    )


def distinct(completions: list[list[int]]) -> int:
    return len({tuple(tokens) for tokens in completions})


@pytest.mark.parametrize(
    "prompts",
    [
        ["a"] * G + ["b"] * G,
        ["a", "b"] * G,
        ["a"] * 2 * G,  # a prompt that the data has twice
        ["a"] * G + ["b"] * 3 + ["c"],  # of groups that a batch cuts
        ["c", "a", "b", "b", "a"],
    ],
)
def test_each_prompt_given_gets_a_completion_of_its_own_in_order(prompts, trainer, client):
    out = SeerRollout(client)(prompts, trainer)
    assert out.keys() == {"prompt_ids", "completion_ids", "logprobs"}
    assert out["prompt_ids"] == [[ord(prompt)] for prompt in prompts]
    assert [tokens[:1] for tokens in out["completion_ids"]] == out["prompt_ids"]
    assert distinct(out["completion_ids"]) == len(prompts)
    assert out["logprobs"] == [[-tokens[-1]] for tokens in out["completion_ids"]]
    assert max(options["n"] for _, options in client.submitted) <= G


def test_a_group_is_one_prompt_with_num_generations_responses(trainer, client):
    SeerRollout(client)(["a"] * G + ["b"] * G, trainer)
    submitted = [(prompt.id, prompt.token_ids) for prompt, _ in client.submitted]
    assert submitted == [("train-0-0", (97,)), ("train-0-1", (98,))]
    for _, options in client.submitted:
        assert options == {
            "n": G,
            "group": "",
            "first_index": 0,
            "seed": 7,
            "rollout_number": 0,
            "weight_version": 1,
            "sampling": sampling_params(trainer),
        }
    assert [rollout.closed for rollout in client.rollouts] == [True]


def test_prompts_that_come_once_are_each_sampled_num_generations_times(trainer, client):
    out = SeerRollout(client)(["a", "b"], trainer)
    assert out["prompt_ids"] == [[97]] * G + [[98]] * G
    assert distinct(out["completion_ids"]) == 2 * G


def test_keys_follow_from_the_step_and_the_call_within_it(trainer, client):
    rollout = SeerRollout(client, seed=3)
    for step, training in [(0, True), (0, True), (0, False), (1, True), (1, False), (1, False)]:
        trainer.state.global_step, trainer.model.training = step, training
        rollout(["a"] * (G if training else 2), trainer)
    keys = [(options["rollout_number"], prompt.id) for prompt, options in client.submitted]
    assert keys == [
        (0, "train-0-0"), (0, "train-1-0"), (0, "eval-0-0"), (1, "train-0-0"), (1, "eval-0-0"), (1, "eval-1-0"),
    ]  # fmt: skip
    assert [options["n"] for _, options in client.submitted] == [G, G, 2, G, 2, 2]
    assert {options["seed"] for _, options in client.submitted} == {3}

    again = SeerRollout(client, seed=3)  # a trainer that was killed and resumes at step 1
    trainer.state = SimpleNamespace(global_step=1)
    trainer.model.training = True
    again(["a"] * G, trainer)
    prompt, options = client.submitted[-1]
    assert (options["rollout_number"], prompt.id) == (1, "train-0-0")


def test_weights_are_sent_when_they_may_have_changed_under_rising_versions(trainer, client):
    rollout = SeerRollout(client)
    for step in (0, 0, 3):
        trainer.state.global_step = step
        rollout(["a"] * G, trainer)
    assert client.updates == [(1, "weights at 0"), (4, "weights at 3")]
    assert rollout.live.version == 4

    client.version = 9  # another trainer had its turn
    rollout(["a"] * G, trainer)
    assert client.updates[2:] == [(10, "weights at 3")]
    assert client.submitted[-1][0].id == "train-1-0"

    trainer.state = SimpleNamespace(global_step=3)  # a second train() at the same step
    rollout(["a"] * G, trainer)
    assert client.updates[3:] == [(11, "weights at 3")]

    SeerRollout(client)(["a"] * G, trainer)  # resumed behind what is live
    assert client.updates[4:] == [(12, "weights at 3")]


def test_an_update_that_fails_is_tried_again(trainer, client):
    rollout = SeerRollout(client)
    trainer.model.name_or_path = "organisation/name"
    with pytest.raises(InvalidField, match=r"organisation/name.*folder that the engines were started with"):
        rollout(["a"] * G, trainer)
    assert not client.submitted
    trainer.model.name_or_path = "/"
    rollout(["a"] * G, trainer)
    assert client.updates == [(1, "weights at 0")]


def test_sampling_is_what_the_config_says(trainer):
    expected = {"max_tokens": 99, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    assert sampling_params(trainer) == SamplingParams(**expected, stop_token_ids=(2,))
    trainer.args.min_p, trainer.args.top_k = 0.1, 20
    trainer.args.generation_kwargs = {"stop": ["x"], "stop_token_ids": [5], "min_tokens": 3}
    assert sampling_params(trainer) == SamplingParams(
        **expected, min_p=0.1, top_k=20, stop=("x",), stop_token_ids=(2, 5), min_tokens=3
    )


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("max_completion_length", None, "max_completion_length = None: give a number"),
        ("temperature", -1.0, "temperature = -1.0: must be in"),
        ("repetition_penalty", 1e-38, "repetition_penalty = 1e-38: must be in"),
        ("top_k", -1, "top_k = -1: must be in"),
        ("generation_kwargs", {"num_beams": 2}, r"generation_kwargs\['num_beams'\] = 2: .*known to Seer"),
        (
            "generation_kwargs",
            {"temperature": 2},
            r"generation_kwargs\['temperature'\] = 2: .*field of its own",
        ),
        (
            "generation_kwargs",
            {"return_routed_experts": True},
            r"generation_kwargs\['return_routed_experts'\] = True",
        ),
        ("generation_kwargs", {"stop": 5}, r"Expected `array`.*stop"),
    ],
)
def test_sampling_that_seer_does_not_do_is_refused_by_name(field, value, told, trainer, client):
    setattr(trainer.args, field, value)
    with pytest.raises(InvalidField, match=told):
        SeerRollout(client)(["a"] * G, trainer)
    assert not client.updates


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tools": [print]}, "tools.*use SeerGRPOTrainer"),
        (
            {"processing_class": SimpleNamespace(tokenizer=Tokenizer())},
            "processing_class.*use SeerGRPOTrainer",
        ),
        ({"model": SimpleNamespace(training=True, peft_config={})}, "peft_config.*that PEFT can merge"),
        ({"model": adapted(SimpleNamespace(is_quantized=True))}, "model.*not quantized"),
        (
            {
                "model": adapted(SimpleNamespace()),
                "accelerator": {"fsdp_plugin": SimpleNamespace(fsdp_version=1)},
            },
            r"fsdp_config\['version'\] = 1: .*set it to 2",
        ),
    ],
)
def test_trainers_that_seer_cannot_serve_are_refused(change, told, trainer, client):
    vars(trainer.accelerator.state).update(change.pop("accelerator", {}))
    vars(trainer).update(change)
    with pytest.raises(InvalidField, match=told):
        SeerRollout(client)(["a"] * G, trainer)
    assert not client.updates


def test_a_regex_constrains_what_is_generated(trainer):
    assert sampling_params(trainer).structured_outputs is None
    trainer.args.vllm_structured_outputs_regex = "a+"
    assert sampling_params(trainer).structured_outputs == StructuredOutputs(regex="a+")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_vllm": True}, "GRPOConfig.use_vllm = True: Seer has the engines"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        (
            {
                "loss_type": "vespo",
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "sequence_mask",
            },
            "vllm_importance_sampling_mode = 'sequence_mask': the vespo loss needs",
        ),
    ],
)
def test_configurations_of_other_ways_to_generate_are_refused(change, told, trainer):
    check_config(trainer.args)
    vars(trainer.args).update(change)
    with pytest.raises(InvalidField, match=told):
        check_config(trainer.args)


def contexts(*prompts: tuple[int, ...]) -> list[Context]:
    return [Context(prompt) for prompt in prompts for _ in range(G)]


def tokens(sampled: list) -> list[list[int]]:
    return [tokens for tokens, _ in sampled]


def test_later_turns_are_of_groups_of_their_own_with_what_is_left_to_generate(trainer, client):
    session = Session(client, None, None, None)
    trainer.state.global_step = 3
    session.first_turns(trainer, contexts((5, 6), (7,)), G, {})
    samples = [
        Sample([5, 6], 1, 2) + [8] * 9 + [9],
        Sample([7], 6, 1) + [8] * 99,
        Sample([7], 7, 1) + [8] * 98,
    ]
    none = [Context(tuple(sample)) for sample in samples]
    assert tokens(session.later_turns(trainer, 1, samples, none, {})) == [
        [*samples[0], 3, 1, 1], [], [*samples[2], 3, 1, 3]
    ]  # fmt: skip
    session.later_turns(trainer, 2, samples[:1], none[:1], {})
    later = client.rollouts[1].submitted + client.rollouts[2].submitted
    assert [(o["group"], o["first_index"], o["n"]) for _, o in later] == [
        ("/trl-3-train-0-0-1", 1, 1), ("/trl-3-train-0-1-1", 3, 1), ("/trl-3-train-0-0-2", 1, 1)
    ]  # fmt: skip
    assert [options["sampling"].max_tokens for _, options in later] == [89, 1, 89]
    assert {(o["rollout_number"], o["seed"], o["weight_version"]) for _, o in later} == {(3, 7, 4)}
    assert client.updates == [(4, "weights at 3")]
    assert session.later_turns(trainer, 3, samples[1:2], none[:1], {}) == [([], [])]


def test_a_turn_ends_at_the_deadline_and_what_is_unfinished_is_cancelled(trainer, client):
    session = Session(client, None, None, 1e-3)
    with pytest.raises(DeadlineExceeded, match=r"1 prompts were unfinished after 0\.001 s") as raised:
        session.first_turns(trainer, [Context((5,)), Context((NEVER,))], 1, {})
    assert raised.value.prompt_ids == ("train-0-1",)
    assert client.rollouts[0].cancelled == ["train-0-1"]
    assert client.rollouts[0].closed
    with pytest.raises(InvalidField, match="deadline_seconds = 0: must be positive"):
        Session(client, None, None, 0)


def test_a_prompt_that_fails_ends_the_turn_and_the_others_are_cancelled(trainer, client):
    with pytest.raises(RolloutFailed, match="engines died"):
        Session(client, None, None, None).first_turns(trainer, [Context((FAILS,)), Context((5,))], 1, {})
    assert client.rollouts[0].cancelled == ["train-0-1"]


def test_what_fails_in_one_process_raises_in_each(monkeypatch):
    told = ["", "ValueError('a tool')"]
    monkeypatch.setattr(ranks, "gathered", lambda accelerator, mine: [told[0] or mine, told[1]])
    with pytest.raises(RolloutFailed, match=r"process 1 failed: ValueError\('a tool'\)"):
        ranks.on_each(None, lambda: 5)
    told[1] = ""
    assert ranks.on_each(None, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        ranks.on_each(None, lambda: 1 / 0)


def test_messages_go_through_the_chat_template(trainer):
    messages = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]]
    assert token_ids(messages, trainer) == [(97, 98), (99,)]
    with pytest.raises(InvalidField, match=r"prompts\[1\] = 'c'"):
        token_ids([messages[0], "c"], trainer)


def test_without_trl_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'seer-rollout\[trl\]'"):
        SeerRollout("tcp://127.0.0.1:1")
