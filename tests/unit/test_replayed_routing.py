"""A forward pass that routes as it is told: the trainer's own numbers for the engines' choice of experts."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch and transformers", allow_module_level=True)

import torch
from tiny_families import tiny

from seer.common.errors import SeerError
from seer.integrations.replayed_routing import OWN, padded_experts, replayed_routing, routers

IDS = torch.arange(3, 43).view(2, 20)


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt-oss", "deepseek"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return tiny(request.param)


def chosen(model: torch.nn.Module) -> torch.Tensor:
    """What the routers choose by themselves: [batch, tokens, layers, experts of a token]."""
    found: dict[int, torch.Tensor] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, out, layer=layer: found.__setitem__(layer, out[2]))
        for layer, router in routers(model).items()
    ]
    model(IDS)
    for hook in hooks:
        hook.remove()
    whole = torch.full((2, 20, model.config.num_hidden_layers, found[max(found)].shape[-1]), OWN)
    for layer, experts in found.items():
        whole[:, :, layer] = experts.view(2, 20, -1)
    return whole


def test_replaying_its_own_choice_or_none_changes_nothing(model: torch.nn.Module) -> None:
    plain, own = model(IDS).logits, chosen(model)
    for experts in (own, torch.full_like(own, OWN)):
        with replayed_routing(model, experts):
            assert torch.equal(model(IDS).logits, plain)
    assert torch.equal(model(IDS).logits, plain)


def test_a_token_goes_where_it_is_sent_and_gradients_reach_its_router(model: torch.nn.Module) -> None:
    plain, experts = model(IDS).logits.detach(), chosen(model)
    last = max(routers(model))
    experts[1, 7, last] = torch.tensor([6, 7]) if 6 not in experts[1, 7, last] else torch.tensor([0, 1])
    with replayed_routing(model, experts):
        logits = model(IDS).logits
    moved = (logits - plain).abs().amax(-1)
    assert moved[1, 7] > 1e-3
    moved[1, 7] = 0.0
    assert moved.max() < 1e-5, "in the last layer nobody else reads it"
    logits[1, 7].sum().backward()
    assert routers(model)[last].weight.grad.abs().sum() > 0
    model.zero_grad()


def test_a_model_without_routers_is_refused_and_a_broken_pass_leaves_the_model_as_it_was() -> None:
    dense = tiny("llama")
    with pytest.raises(SeerError, match="no routers"), replayed_routing(dense, torch.full((1, 2, 2, 2), OWN)):
        pass
    mixture = tiny("qwen3-moe")
    with pytest.raises(ZeroDivisionError), replayed_routing(mixture, torch.full((2, 20, 2, 2), OWN)):
        raise ZeroDivisionError
    assert not any("forward" in vars(router) for router in routers(mixture).values())


def test_experts_of_several_responses_are_padded_with_the_router_s_own() -> None:
    short, long = (np.full((count, 2, 2), count, np.uint8) for count in (1, 3))
    padded = padded_experts([short, long], 4)
    assert padded.dtype == torch.int64
    assert padded[0, 0].eq(1).all()
    assert padded[0, 1:].eq(OWN).all()
    assert padded[1, :3].eq(3).all()
    assert padded[1, 3].eq(OWN).all()
