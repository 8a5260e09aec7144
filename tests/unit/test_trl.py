"""SeerRollout against a trainer and a client that only remember: order, copies, keys, versions. No torch."""

from __future__ import annotations

import importlib.util
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.client import Group, InvalidField, Response, SamplingParams, WeightsLive
from seer.integrations import trl as integration
from seer.integrations.trl import SeerRollout, arrange, sampling_params, token_ids

G = 4


class Client:
    """Answers at once: a token says which prompt, step and response it is of."""

    def __init__(self) -> None:
        self.version = 0
        self.updates: list[tuple[int, object]] = []
        self.submitted: list[tuple[list, dict]] = []

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(weight_version=self.version)

    def update_weights(self, version: int, source: object) -> WeightsLive:
        assert version > self.version
        self.version = version
        self.updates.append((version, source))
        return WeightsLive(version=version, digest="d")

    def submit(self, prompts: list, **options: object) -> SimpleNamespace:
        self.submitted.append((prompts, options))
        groups = [self._group(prompt, options["n"], options["rollout_number"]) for prompt in prompts]
        return SimpleNamespace(result=lambda: groups)

    def _group(self, prompt, n: int, step: int) -> Group:
        key = int(prompt.id.rpartition("-")[2])
        responses = tuple(
            Response(
                i, np.array([*prompt.token_ids, step, key, i]), np.array([-i], np.float32), None, "stop", ""
            )
            for i in range(n)
        )
        return Group(prompt.id, np.array(prompt.token_ids), {}, self.version, "d", responses, 1, 0, 0)


class Tokenizer:
    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in one] for one in text]}

    def apply_chat_template(self, conversation, **options) -> dict[str, list[list[int]]]:
        assert options["add_generation_prompt"] is True
        assert options["thinking"] is False
        return self(["".join(message["content"] for message in messages) for messages in conversation])


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(integration, "checkpoint_tensors", lambda model, weights, folder: weights)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    model = SimpleNamespace(training=True, name_or_path="/")
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        is_main_process=True,
        unwrap_model=lambda model, **_: model,
        get_state_dict=lambda model: f"weights at {found.state.global_step}",
    )
    args = SimpleNamespace(
        seed=7, generation_batch_size=2 * G, generation_kwargs=None, max_completion_length=99,
        temperature=0.8, top_p=0.9, top_k=0, min_p=None, repetition_penalty=1.1,
    )  # fmt: skip
    found = SimpleNamespace(
        state=SimpleNamespace(global_step=0), args=args, model=model, model_wrapped=model,
        accelerator=accelerator, num_generations=G, num_generations_eval=2, use_vllm=False, tools=[],
        processing_class=Tokenizer(), chat_template=None, chat_template_kwargs={"thinking": False},
        eos_token_ids=[2],
    )  # fmt: skip
    return found


@pytest.fixture
def client() -> Client:
    return Client()


def distinct(completions: list[list[int]]) -> int:
    return len({tuple(tokens) for tokens in completions})


@given(st.lists(st.integers(0, 4).map(lambda x: (x,)), max_size=60), st.integers(1, 5))
def test_copies_fill_groups_in_order(prompts, size):
    groups, places = arrange(prompts, size)
    assert [groups[g][0] for g, _ in places] == prompts
    assert len(set(places)) == len(places)
    assert Counter(g for g, _ in places) == {g: copies for g, (_, copies) in enumerate(groups)}
    seen: Counter = Counter()
    for ids, (_, index) in zip(prompts, places, strict=True):
        assert index == seen[ids] % size
        seen[ids] += 1
    for ids, count in seen.items():
        sizes = [copies for group, copies in groups if group == ids]
        assert sizes == [size] * (count // size) + [count % size] * (count % size > 0)


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
    ((prompts, options),) = client.submitted
    assert [(prompt.id, prompt.token_ids) for prompt in prompts] == [
        ("train-0-0", (97,)),
        ("train-0-1", (98,)),
    ]
    assert options == {
        "n": G,
        "seed": 7,
        "rollout_number": 0,
        "deadline_seconds": None,
        "sampling": sampling_params(trainer),
    }


def test_prompts_that_come_once_are_each_sampled_num_generations_times(trainer, client):
    out = SeerRollout(client)(["a", "b"], trainer)
    assert out["prompt_ids"] == [[97]] * G + [[98]] * G
    assert distinct(out["completion_ids"]) == 2 * G


def test_keys_follow_from_the_step_and_the_call_within_it(trainer, client):
    rollout = SeerRollout(client, seed=3)
    for step, training in [(0, True), (0, True), (0, False), (1, True), (1, False), (1, False)]:
        trainer.state.global_step, trainer.model.training = step, training
        rollout(["a"] * (G if training else 2), trainer)
    keys = [(options["rollout_number"], prompts[0].id) for prompts, options in client.submitted]
    assert keys == [
        (0, "train-0-0"), (0, "train-1-0"), (0, "eval-0-0"), (1, "train-0-0"), (1, "eval-0-0"), (1, "eval-1-0"),
    ]  # fmt: skip
    assert [options["n"] for _, options in client.submitted] == [G, G, 2, G, 2, 2]
    assert {options["seed"] for _, options in client.submitted} == {3}

    again = SeerRollout(client, seed=3)  # a trainer that was killed and resumes at step 1
    trainer.state = SimpleNamespace(global_step=1)
    trainer.model.training = True
    again(["a"] * G, trainer)
    prompts, options = client.submitted[-1]
    assert (options["rollout_number"], prompts[0].id) == (1, "train-0-0")


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
    assert client.submitted[-1][0][0].id == "train-1-0"

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
        ("top_k", -1, "top_k = -1: must be in"),
        ("generation_kwargs", {"num_beams": 2}, r"generation_kwargs\['num_beams'\] = 2: .*known to Seer"),
        (
            "generation_kwargs",
            {"temperature": 2},
            r"generation_kwargs\['temperature'\] = 2: .*field of its own",
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
        ({"use_vllm": True}, "use_vllm"),
        ({"tools": [print]}, "tools"),
        ({"processing_class": SimpleNamespace(tokenizer=Tokenizer())}, "processing_class.*text only"),
        ({"model": SimpleNamespace(training=True, peft_config={})}, "PEFT"),
    ],
)
def test_trainers_that_seer_cannot_serve_are_refused(change, told, trainer, client):
    vars(trainer).update(change)
    with pytest.raises(InvalidField, match=told):
        SeerRollout(client)(["a"] * G, trainer)
    assert not client.updates


def test_messages_go_through_the_chat_template(trainer):
    messages = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]]
    assert token_ids(messages, trainer) == [(97, 98), (99,)]
    with pytest.raises(InvalidField, match=r"prompts\[1\] = 'c'"):
        token_ids([messages[0], "c"], trainer)


def test_without_trl_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'seer-rollout\[trl\]'"):
        SeerRollout("tcp://127.0.0.1:1")
