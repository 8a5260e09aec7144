"""What veRL's settings and sampling fields mean for Seer. No veRL."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from seer.client import InvalidField, SamplingParams
from seer.integrations.verl.config import (
    Limits,
    Settings,
    check_rollout,
    check_trainer,
    sampling_params,
    settings,
)

LIMITS = Limits(prompt_length=32, response_length=100)
VERL = {"temperature": 0.8, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""What veRL's agent loops send."""


def trainer_config(**changes: object) -> SimpleNamespace:
    given = {"name": "seer", "use_v1": True, "trainer_mode": "sync"} | changes
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name=given["name"])),
        trainer=SimpleNamespace(
            use_v1=given["use_v1"], v1=SimpleNamespace(trainer_mode=given["trainer_mode"])
        ),
    )


def test_settings():
    assert settings({"seer": {"endpoint": "tcp://h:1"}, "vllm": {"x": 1}}) == Settings(endpoint="tcp://h:1")
    given = {"endpoint": "tcp://h:1", "sleep": True, "deadline_seconds": 9.5}
    assert settings({"seer": given}) == Settings(**given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "seer.endpoint = None: give the buffer's endpoint"),
        ({"seer": None}, "seer.endpoint"),
        ({"seer": {"endpoint": ""}}, "seer.endpoint"),
        ({"seer": {"endpoint": "tcp://h:1", "slep": True}}, "slep.*it may have endpoint, sleep"),
        ({"seer": {"endpoint": "tcp://h:1", "sleep": "x"}}, r"\$.sleep"),
        ({"seer": {"endpoint": "tcp://h:1", "deadline_seconds": 0}}, "deadline_seconds = 0.0: must be pos"),
    ],
)
def test_settings_are_refused_by_name(given, named):
    with pytest.raises(InvalidField, match=named):
        settings(given)


def test_sampling_of_an_agent_loop():
    assert sampling_params(VERL, 32, LIMITS) == SamplingParams(max_tokens=100, temperature=0.8, top_p=0.9)


def test_every_field_of_seer_passes():
    given = {
        "temperature": 0, "top_k": 5, "min_p": 0.1, "stop": ["a"], "stop_token_ids": [3], "min_tokens": 2,
        "logit_bias": {4: 1.5}, "frequency_penalty": 0.5, "presence_penalty": 0.25, "top_p": None,
        "repetition_penalty": 1.1, "ignore_eos": True,
    }  # fmt: skip
    assert sampling_params(given, 5, LIMITS) == SamplingParams(
        max_tokens=100, temperature=0, top_k=5, min_p=0.1, stop=("a",), stop_token_ids=(3,), min_tokens=2,
        logit_bias={4: 1.5}, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.1,
        ignore_eos=True,
    )  # fmt: skip


def test_the_rollout_section_gives_defaults():
    limits = Limits.of({"prompt_length": 32, "response_length": 100, "ignore_eos": True, "n": 8})
    assert limits == Limits(prompt_length=32, response_length=100, ignore_eos=True)
    assert sampling_params({}, 5, limits).ignore_eos
    assert not sampling_params({"ignore_eos": False}, 5, limits).ignore_eos


@pytest.mark.parametrize(
    ("given", "prompt_tokens", "limits", "expected"),
    [
        ({}, 10, LIMITS, 100),
        ({}, 60, LIMITS, 72),  # a later turn: what is left of prompt and response length
        ({}, 140, LIMITS, 1),
        ({"max_tokens": 7}, 10, LIMITS, 7),
        ({"max_new_tokens": 7}, 10, LIMITS, 7),
        ({"max_tokens": 500}, 10, LIMITS, 122),
        ({"max_tokens": 500}, 10, Limits(32, 100, max_model_len=300), 290),
        ({}, 10, Limits(32, 100, max_model_len=50), 40),
    ],
)
def test_max_tokens(given, prompt_tokens, limits, expected):
    assert sampling_params(given, prompt_tokens, limits).max_tokens == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"seed": 4}, "'seed'.* = 4: Seer does not have it; it may be one of .*top_k"),
        ({"n": 2}, "'n'"),
        ({"temperature": -1.0}, "sampling_params.temperature = -1.0"),
        ({"top_k": -2}, "sampling_params.top_k = -2"),
        ({"top_p": "x"}, r"\$.top_p"),
    ],
)
def test_sampling_is_refused_by_name(given, named):
    with pytest.raises(InvalidField, match=named):
        sampling_params(given, 5, LIMITS)


def test_a_prompt_that_fills_the_model_is_refused():
    with pytest.raises(InvalidField, match="max_model_len = 20: raise it: the prompt alone has 20 tokens"):
        sampling_params({}, 20, Limits(32, 100, max_model_len=20))


def test_other_trainers_are_refused():
    check_trainer(trainer_config())
    for field, value, named in (
        ("name", "vllm", "rollout.name = 'vllm'.*set it to seer"),
        ("use_v1", False, "trainer.use_v1 = False.*set it to True"),
        ("trainer_mode", "separate_async", "trainer_mode = 'separate_async'.*set it to sync"),
    ):
        with pytest.raises(InvalidField, match=named):
            check_trainer(trainer_config(**{field: value}))


def test_routing_replay_asks_for_the_experts_of_all_tokens():
    for replays, first in ((False, None), (True, 0)):
        section = {"prompt_length": 8, "response_length": 8, "enable_rollout_routing_replay": replays}
        assert sampling_params({}, 4, Limits.of(section)).routed_experts_from == first


def test_sleep_is_refused_where_verl_would_never_wake():
    check_rollout(rollout(free_cache_engine=False))
    check_rollout(rollout(sleep=True))
    with pytest.raises(InvalidField, match=r"seer.sleep = True: .*free_cache_engine=False"):
        check_rollout(rollout(sleep=True, free_cache_engine=False))


def rollout(*, sleep=False, **changes):
    """Return veRL's `rollout` section."""
    kwargs = {"seer": {"endpoint": "tcp://h:1", "sleep": sleep}}
    usual = {"enable_rollout_routing_replay": False, "free_cache_engine": True, "engine_kwargs": kwargs}
    return SimpleNamespace(**usual | changes)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"quantization": "fp8"}, r"rollout\.quantization = 'fp8': .*engine\.vllm\.quantization"),
        ({"quantization_config_file": "q.json"}, r"rollout\.quantization_config_file = 'q\.json'"),
        ({"qat": {"enable": True}}, r"rollout\.qat\.enable = True"),
    ],
)
def test_weights_that_verls_own_engines_would_quantize_are_refused(setting, named):
    check_rollout(rollout(quantization=None, quantization_config_file=None, qat={"enable": False}))
    with pytest.raises(InvalidField, match=named):
        check_rollout(rollout(**setting))
