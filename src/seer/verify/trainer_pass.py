"""The engines' logprobs beside those of a trainer's forward pass: `seer verify --trainer hf`.

A trainer computes once more, with other kernels, what the engines have computed. What differs is what
importance weights see. Transformers reads the reference's responses, in a mixture of experts twice: it routes
tokens by itself, and as the engines did.

Invariants (tests/unit/test_trainer_pass.py):
- the passes have the tokens, the temperature and the type of the engines;
- differences are trainer - engine, of the sampled tokens;
- where one is more than rounding makes, the first layer whose output differs by more is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from seer.client.mismatch import divergence
from seer.client.results import Group, Response
from seer.common.config import Config
from seer.common.errors import InvalidField, SeerError
from seer.common.types import SamplingParams
from seer.verify.compare import to_logits

if TYPE_CHECKING:
    import torch

    from seer.services.engine.vllm.backend import VllmBackend

ROUNDING = {"float32": 2.0**-14, "float16": 2.0**-6, "bfloat16": 2.0**-3}
"""Share of a layer's largest output by which rounding may change its outputs, by dtype."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")

Floats = npt.NDArray[np.float64]


class Difference(msgspec.Struct, kw_only=True):
    """What one pass gave. The `largest` difference is that of `prompt_id#index` at `position`.

    `kl`: nats a token, from the engines' distribution to the trainer's, estimated by the sampled tokens
    (`seer.client.mismatch`).
    """

    mean: float
    largest: float
    kl: float
    prompt_id: str
    index: int
    position: int


class TrainerPass(msgspec.Struct, kw_only=True):
    """What the passes gave for `tokens` sampled tokens. `replayed`: routed as the engines did, if they tell.

    `routes` counts tokens in layers, `other_routes` those that the trainer's own routers send elsewhere; the
    scores of these experts and of the engines' are at most `margin` apart. `layer` is the first that differs;
    -1: none does, or none was looked for.
    """

    tokens: int
    own: Difference
    replayed: Difference | None = None
    routes: int = 0
    other_routes: int = 0
    margin: float = 0.0
    layer: int = -1

    @property
    def best(self) -> Difference:
        """What a trainer sees that replays routes, if it can."""
        return self.replayed or self.own

    def verdict(self, tolerance: float) -> str:
        """Return one line; `tolerance` is the largest difference of logprobs that passes."""
        best = self.best
        text = (
            f"trainer: {self.tokens} tokens differ by {best.mean:.1e} on average, {best.largest:.1e} at most"
        )
        text += f", KL {best.kl:.1e}"
        if self.replayed is not None:
            elsewhere = self.other_routes / max(1, self.routes)
            text += (
                f"; routed by itself {self.own.largest:.1e}, KL {self.own.kl:.1e}, other experts for "
                f"{elsewhere:.2%} of tokens, scores up to {self.margin:.1e} apart"
            )
        if best.largest <= tolerance:
            return text
        where = (
            f"layer {self.layer} is the first to differ" if self.layer >= 0 else "no layer differs by itself"
        )
        return f"{text}: MORE THAN {tolerance:.0e}, {best.prompt_id}#{best.index} at {best.position}; {where}"


def check(sampling: SamplingParams, *, images: bool, backend: str = "vllm") -> None:
    """Raise `InvalidField` for what a trainer does not recompute."""
    if backend != "vllm":
        raise InvalidField("--trainer", "hf", f"engine.backend = {backend!r} has no model: leave it out")
    if sampling.logprobs == "processed":
        raise InvalidField("--trainer", "hf", "it recomputes no processed logprobs: give scaled or raw ones")
    if images:
        raise InvalidField("--trainer", "hf", "prompts with images are not compared: leave it out")


def compared(
    config: Config,
    groups: Sequence[Group],
    sampling: SamplingParams,
    dtype: str,
    tolerance: float,
    engine: Callable[[Config], AbstractContextManager[VllmBackend]],
) -> TrainerPass:
    """Load the model into transformers, and compare; `engine` opens an engine in this process.

    `tolerance`: of logprobs, in raw logits. Raises `SeerError` if transformers cannot load the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(config.shared.model, dtype=getattr(torch, dtype)).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SeerError(f"--trainer hf: transformers cannot load {config.shared.model}: {error}") from error
    found = differences(model, groups, sampling)
    if to_logits(found.best.largest, sampling.temperature) > tolerance and config.engine.tensor_parallel == 1:
        tokens = _context(groups, found.best)
        with engine(config) as backend, torch.inference_mode():
            worker = backend.core.engine_core.model_executor.driver_worker.worker
            theirs = layer_outputs(worker.model_runner.get_model(), lambda: backend.probe.logits(tokens))
            ours = layer_outputs(model, lambda: model(torch.tensor([tokens])))
        found.layer = first_other_layer(ours, theirs, dtype)
    return found


def differences(model: torch.nn.Module, groups: Sequence[Group], sampling: SamplingParams) -> TrainerPass:
    """Run the passes over all responses; `model` is transformers', of the engines' weights and type."""
    from seer.integrations.replayed_routing import routers

    temperature = 1.0 if sampling.logprobs == "raw" else sampling.temperature or 1.0
    own: dict[tuple[str, int], Floats] = {}
    replayed: dict[tuple[str, int], Floats] = {}
    margins: list[float] = []
    known, routes = routers(model), 0
    for group in groups:
        for response in group.responses:
            place, experts = (group.prompt_id, response.index), response.routed_experts
            tokens = [*group.prompt_token_ids.tolist(), *response.token_ids.tolist()]
            with _looking(known, experts, margins):
                own[place] = _logprobs(model, tokens, response, temperature, None) - response.logprobs
            if experts is not None and known:
                routes += len(known) * len(experts)
                given = _logprobs(model, tokens, response, temperature, experts)
                replayed[place] = given - response.logprobs
    return TrainerPass(
        tokens=sum(map(len, own.values())), own=_difference(own),
        replayed=_difference(replayed) if replayed else None,
        routes=routes, other_routes=len(margins), margin=max(margins, default=0.0),
    )  # fmt: skip


def _logprobs(
    model: torch.nn.Module,
    tokens: list[int],
    response: Response,
    temperature: float,
    experts: npt.NDArray[Any] | None,
) -> Floats:
    """Return the trainer's logprobs of a response [length], its tokens routed to `experts` if given."""
    import torch

    from seer.integrations.replayed_routing import padded_experts, replayed_routing

    ids, count = torch.tensor([tokens]), len(response.token_ids)
    routing: AbstractContextManager[None] = nullcontext()
    if experts is not None:
        routing = replayed_routing(model, padded_experts([experts], len(tokens)))
    with torch.inference_mode(), routing:
        logits = model(ids).logits[0, -count - 1 : -1].double() / temperature
    found: Floats = torch.log_softmax(logits, -1).gather(-1, ids[0, -count:, None])[:, 0].numpy()
    return found


@contextmanager
def _looking(
    routers: dict[int, torch.nn.Module], experts: npt.NDArray[Any] | None, margins: list[float]
) -> Iterator[None]:
    """Add how far apart scores are where routers choose others than `experts` [tokens, layers, k]."""

    def looking(theirs: npt.NDArray[Any]) -> Callable[..., None]:
        def look(_: object, __: object, out: tuple[torch.Tensor, ...]) -> None:
            scores, chosen = (each.reshape(-1, each.shape[-1])[: len(theirs)] for each in (out[0], out[2]))
            mine = chosen.numpy()
            for token in np.flatnonzero(np.any(np.sort(mine) != np.sort(theirs), axis=-1)):
                only = np.setdiff1d(mine[token], theirs[token]), np.setdiff1d(theirs[token], mine[token])
                ours, other = (scores[token][each.astype(np.int64)].float() for each in only)
                margins.append(float(ours.max() - other.min()))

        return look

    hooks = []
    if experts is not None:
        hooks = [
            router.register_forward_hook(looking(experts[:, layer])) for layer, router in routers.items()
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _difference(found: dict[tuple[str, int], Floats]) -> Difference:
    every = np.concatenate(list(found.values()))
    (prompt_id, index), worst = max(found.items(), key=lambda each: _largest(each[1]))
    return Difference(
        mean=float(np.abs(every).mean()), largest=_largest(worst), kl=divergence(every),
        prompt_id=prompt_id, index=index, position=int(np.argmax(np.abs(worst))),
    )  # fmt: skip


def _largest(values: Floats) -> float:
    largest = float(np.abs(values).max())
    return math.inf if math.isnan(largest) else largest


def _context(groups: Sequence[Group], worst: Difference) -> list[int]:
    """Return what a model reads before the token that differs most."""
    group = next(group for group in groups if group.prompt_id == worst.prompt_id)
    output = group.responses[worst.index].token_ids[: worst.position]
    return [*group.prompt_token_ids.tolist(), *output.tolist()]


def layer_outputs(model: torch.nn.Module, run: Callable[[], object]) -> dict[int, Floats]:
    """Return the output of each decoder layer in a run: [tokens, hidden size]."""
    import torch

    kept: dict[int, Floats] = {}

    def keeping(layer: int) -> Callable[..., None]:
        def keep(_: object, __: object, out: object) -> None:
            parts = out if isinstance(out, tuple) else (out,)
            # vLLM's layers return what they add, and the residual to which that is to be added.
            tensors = [each.double() for each in parts[:2] if isinstance(each, torch.Tensor)]
            whole = sum(tensors[1:], start=tensors[0])
            kept[layer] = whole.reshape(-1, whole.shape[-1]).detach().cpu().numpy().copy()

        return keep

    named = [(module, _LAYER.search(name)) for name, module in model.named_modules()]
    hooks = [module.register_forward_hook(keeping(int(found[1]))) for module, found in named if found]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def first_other_layer(ours: dict[int, Floats], theirs: dict[int, Floats], dtype: str) -> int:
    """Return the first layer of which the last token's output differs by more than rounding; -1: none."""
    most = ROUNDING.get(dtype, ROUNDING["float32"])
    for layer in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[layer][-1], theirs[layer][-1]
        if not np.abs(mine - other).max() <= most * np.abs(mine).max():
            return layer
    return -1
