"""Sampling parameters are checked at every door by the same check: each refuses what float32 cannot hold, by name.

The command line's door is in tests/process/test_bad_input.py, TRL's in tests/unit/test_trl.py. SkyRL's and slime's
adapters hand their fields to `seer.integrations.sampling`; their own modules need their packages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from seer.client.prompts import check_request
from seer.common import wire
from seer.common.errors import InvalidField
from seer.common.types import GREEDY_BELOW, MAX_STOP_CHARACTERS, MAX_TOKEN_ID, SamplingParams
from seer.gateway.errors import HttpError
from seer.gateway.request_bodies import CompletionBody, GenerateBody, read_body
from seer.integrations import sampling
from seer.integrations.verl import config as verl
from seer.services.buffer import submissions
from seer.services.engine.chunks import start_chunk

Fields = Mapping[str, Any]
"""What a caller gives: names of `SamplingParams`."""

TOKENS = np.array([1, 2], np.int32)


def client(fields: Fields) -> None:
    check_request(1, SamplingParams(**fields), 0, 0)


def buffer(fields: Fields) -> None:
    submissions.prompts(
        wire.Submit(
            rollout_id="r", rollout_number=0, seed=0, n=1, sampling=SamplingParams(**fields), prompt_ids=["p"],
            lengths=[2], tokens=TOKENS,
        )
    )  # fmt: skip


def engine(fields: Fields) -> None:
    order = wire.RunChunk(
        request_id="r/p#0", group_id="r/p", attempt=1, key=0, prompt_len=2, max_new_tokens=1,
        sampling=SamplingParams(**fields), tokens=TOKENS,
    )  # fmt: skip
    start_chunk(order, 1)


def completions(fields: Fields) -> None:
    read_body(CompletionBody, json.dumps({"prompt": [1], **fields}).encode()).sampling("scaled")


def generate(fields: Fields) -> None:
    body = read_body(GenerateBody, json.dumps({"token_ids": [1], "sampling_params": fields}).encode())
    body.sampling_params.sampling("scaled", "sampling_params.")


DOORS: dict[str, Callable[[Fields], object]] = {
    "client": client,
    "buffer": buffer,
    "engine": engine,
    "/v1/completions": completions,
    "/inference/v1/generate": generate,
    "SkyRL, slime": sampling.sampling_params,
    "veRL": lambda fields: verl.sampling_params(fields, 2, verl.Limits(8, 8)),
}

REFUSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1e-38},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 0.0099},
    {"repetition_penalty": -0.0},
    {"repetition_penalty": 100.1},
    {"temperature": -5e-324},
    {"temperature": 3.5e38},
    {"temperature": True},
    {"top_p": -0.0},
    {"top_k": 2**31},
    {"top_k": 10**400},
    {"top_k": 1.5},
    {"min_p": 1e300},
    {"frequency_penalty": -3e38},
    {"presence_penalty": 10**400},
    {"logit_bias": {MAX_TOKEN_ID + 1: 1.0}},
    {"logit_bias": {5: -1e39}},
    {"stop": ["x" * (MAX_STOP_CHARACTERS + 1)]},
    {"stop_token_ids": [2**31]},
    {"stop_token_ids": [2**70]},
    {"min_tokens": False},
    {"ignore_eos": 1},
]  # fmt: skip

ACCEPTED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": -0.0},
    {"temperature": 1e-38},
    {"temperature": GREEDY_BELOW},
    {"temperature": 0.01, "repetition_penalty": 0.01},
    {"temperature": 100},
    {"top_p": 1e-300},
    {"min_p": 5e-324},
    {"repetition_penalty": 100, "frequency_penalty": -2, "presence_penalty": 2},
    {"logit_bias": {MAX_TOKEN_ID: -100.0, 0: 100}},
]  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED, ids=lambda fields: repr(fields)[:60])
@pytest.mark.parametrize("door", DOORS)
def test_what_float32_cannot_hold_is_refused_by_name(door: str, fields: dict[str, Any]) -> None:
    with pytest.raises((InvalidField, HttpError)) as refused:
        DOORS[door](fields)
    (name,) = fields
    assert name in str(refused.value)
    if isinstance(refused.value, HttpError):
        assert refused.value.status == 400


@pytest.mark.parametrize("fields", ACCEPTED, ids=repr)
@pytest.mark.parametrize("door", DOORS)
def test_what_it_holds_is_accepted(door: str, fields: dict[str, Any]) -> None:
    DOORS[door](fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": np.float32(0.5)},
        {"temperature": Decimal("0.5")},
        {"temperature": Decimal("NaN")},
        {"temperature": None},
        {"temperature": "1"},
        {"max_tokens": 5.0},
        {"max_tokens": np.int64(5)},
        {"logprobs": "all"},
        {"stop": "text"},
        {"stop": ("half of a pair: \ud83d",)},
        {"stop": (b"x",)},
        {"stop_token_ids": (1.0,)},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: math.inf}},
        {"logit_bias": {5: Decimal(1)}},
    ],
    ids=repr,
)
@pytest.mark.parametrize("door", ["client", "buffer", "engine"])
def test_what_could_not_be_sent_is_refused_before(door: str, fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidField, match=rf"^sampling\.{name}\b"):
        DOORS[door](fields)
