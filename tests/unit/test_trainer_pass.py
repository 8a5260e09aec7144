"""The engines' logprobs beside a trainer's: what differs, by how much, and from which layer on."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import numpy as np
import pytest

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from tiny_families import tiny

from seer.client.results import Group, Response
from seer.common.errors import InvalidField
from seer.common.types import SamplingParams
from seer.integrations.replayed_routing import routers
from seer.verify.trainer_pass import check, differences, first_other_layer, layer_outputs

PROMPT, OUTPUT = [3, 4, 5, 6], [9, 8, 7, 21, 33, 40]
HOT = SamplingParams(temperature=1.5)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny("qwen3-moe")


def sampled(model: torch.nn.Module, temperature: float = 1.5) -> Response:
    """A response whose logprobs and routes are the model's own."""
    ids, routes = torch.tensor([PROMPT + OUTPUT]), np.zeros((len(PROMPT + OUTPUT) - 1, 2, 2), np.uint8)
    hooks = [
        router.register_forward_hook(
            lambda _, __, out, at=at: routes.__setitem__((..., at, slice(None)), out[2][:-1])
        )
        for at, router in routers(model).items()
    ]
    with torch.inference_mode():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1].double() / temperature
    for hook in hooks:
        hook.remove()
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(OUTPUT)[:, None])[:, 0].numpy()
    return Response(0, np.array(OUTPUT, np.int32), logprobs.astype(np.float32), None, "stop", "", routes)


def passes(model: torch.nn.Module, response: Response, sampling: SamplingParams = HOT):
    group = Group("p", np.array(PROMPT, np.int32), {}, 0, "", (response,), 1, 0, 0)
    return differences(model, [group], sampling)


def test_what_the_trainer_computes_alike_differs_by_rounding(model: torch.nn.Module) -> None:
    found = passes(model, sampled(model))
    assert found.tokens == len(OUTPUT)
    assert max(found.own.largest, found.replayed.largest) < 1e-5
    assert (found.routes, found.other_routes) == (2 * (len(PROMPT + OUTPUT) - 1), 0)
    assert found.verdict(1e-3).endswith("apart")
    assert (
        passes(model, sampled(model, 1.0), SamplingParams(temperature=1.5, logprobs="raw")).own.largest < 1e-5
    )
    assert passes(model, sampled(model, 1.0), SamplingParams(temperature=0.0)).own.largest < 1e-5


def test_a_wrong_logprob_is_named_and_counted(model: torch.nn.Module) -> None:
    response = sampled(model)
    response.logprobs[3] -= 0.5
    found = passes(model, response).own
    assert (found.prompt_id, found.index, found.position) == ("p", 0, 3)
    assert found.largest == pytest.approx(0.5, abs=1e-5)
    assert found.mean == pytest.approx(0.5 / 6, abs=1e-5)
    assert found.kl == pytest.approx((math.exp(0.5) - 1.5) / 6, abs=1e-5)
    response.logprobs[1] = np.nan
    assert passes(model, response).own.largest == math.inf
    assert "MORE THAN" in passes(model, response).verdict(1.0)


def test_engines_that_routed_otherwise_agree_once_their_routes_are_replayed(model: torch.nn.Module) -> None:
    from seer.integrations.replayed_routing import padded_experts, replayed_routing

    response = sampled(model)
    routes = response.routed_experts.copy()
    routes[5, 1] = [each for each in range(8) if each not in routes[5, 1]][:2]
    with torch.inference_mode(), replayed_routing(model, padded_experts([routes], 10)):
        logits = model(torch.tensor([PROMPT + OUTPUT])).logits[0, len(PROMPT) - 1 : -1].double() / 1.5
    engine = torch.log_softmax(logits, -1).gather(-1, torch.tensor(OUTPUT)[:, None])[:, 0].numpy()
    found = passes(model, replace(response, logprobs=engine.astype(np.float32), routed_experts=routes))
    assert found.replayed.largest < 1e-5 < 1e-3 < found.own.largest
    assert found.other_routes == 1
    assert found.margin > 0
    assert found.best is found.replayed


def test_the_first_layer_that_differs_by_more_than_rounding_is_named(model: torch.nn.Module) -> None:
    outputs = layer_outputs(model, lambda: model(torch.tensor([PROMPT])))
    assert {layer: each.shape for layer, each in outputs.items()} == {0: (4, 64), 1: (4, 64)}
    assert first_other_layer(outputs, outputs, "float32") == -1
    rounded = {layer: each * (1 + 1e-6) for layer, each in outputs.items()}
    assert first_other_layer(outputs, rounded, "float32") == -1
    other = outputs | {1: outputs[1] + 0.01}
    assert first_other_layer(outputs, other, "float32") == 1
    assert first_other_layer(outputs, outputs | {0: outputs[0] * np.nan}, "float32") == 0


def test_what_a_trainer_does_not_recompute_is_refused_by_name() -> None:
    check(SamplingParams(), images=False)
    for sampling, images, backend in (
        (SamplingParams(logprobs="processed"), False, "vllm"),
        (SamplingParams(), True, "vllm"),
        (SamplingParams(), False, "replay"),
    ):
        with pytest.raises(InvalidField, match="--trainer"):
            check(sampling, images=images, backend=backend)
