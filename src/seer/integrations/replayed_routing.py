"""A forward pass of transformers that sends tokens to the experts to which the engines sent them.

Without it, rounding alone sends a few tokens in a thousand elsewhere, and the trainer's logprobs are those of
another function than the one that was sampled from (R3, arXiv 2510.11370).

Invariants (tests/unit/test_replayed_routing.py):
- the weights of the experts are the trainer's own: gradients reach routers;
- tokens without replayed experts go where the model's own routers send them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from seer.common.errors import SeerError

OWN = -1
"""In the place of an expert id: the router chooses."""

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class _Replay(TorchFunctionMode):  # type: ignore[misc]
    """Has a router's choice among all experts be the given one, [tokens, experts of a token]."""

    def __init__(self, experts: int, given: torch.Tensor) -> None:
        super().__init__()
        self._experts, self._given = experts, given
        self.used = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        found: Any = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._experts:
            return found
        _, own = found
        if own.shape != self._given.shape:
            return found
        self.used = True
        chosen = torch.where(self._given == OWN, own, self._given)
        return type(found)((args[0].gather(-1, chosen), chosen))


def routers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return a model's routers by their layers: what has `top_k` and `num_experts`, and no experts below."""
    found = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(f"{name}.")
        if (
            layer
            and hasattr(module, "top_k")
            and hasattr(module, "num_experts")
            and not list(module.children())
        ):
            found[int(layer[1])] = module
    return found


@contextmanager
def replayed_routing(model: torch.nn.Module, experts: torch.Tensor) -> Iterator[None]:
    """Replay experts in forward passes: int64 [batch, tokens, layers, experts of a token].

    Raises `SeerError` for a model whose routers are not found, or do not choose by `topk`.
    """
    found = routers(model)
    if not found:
        raise SeerError(
            f"{type(model).__name__} has no routers that are known: layers with top_k and num_experts"
        )
    flat = experts.flatten(0, 1)

    def replaying(layer: int, router: torch.nn.Module) -> Callable[..., object]:
        forward = router.forward

        def call(*args: object, **kwargs: object) -> object:
            with _Replay(router.num_experts, flat[:, layer]) as replay:
                out = forward(*args, **kwargs)
            if not replay.used:
                raise SeerError(f"the router of layer {layer} ({type(router).__name__}) chose without topk")
            return out

        return call

    try:
        for layer, router in found.items():
            router.forward = replaying(layer, router)
        yield
    finally:
        for router in found.values():
            vars(router).pop("forward", None)


def padded_experts(responses: Sequence[npt.NDArray[Any]], tokens: int) -> torch.Tensor:
    """Return `Response.routed_experts` of several responses as `replayed_routing` takes them.

    Each begins at its first token; `tokens`: the length to which they are padded on the right.
    """
    shape = len(responses), tokens, *responses[0].shape[1:]
    whole = np.full(shape, OWN, np.int64)
    for row, experts in zip(whole, responses, strict=True):
        row[: len(experts)] = experts
    return torch.from_numpy(whole)
