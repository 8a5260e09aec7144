"""The experts that tokens went to: those of the model's own router, for every token that stands, whatever the schedule."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_plans import script
from engine_cases import CASES, KEY, PROMPT, Response, chunk, clear, engine_of, run
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from seer.common.config import DraftsConfig
from seer.common.types import SamplingParams
from seer.services.engine.vllm.backend import VllmBackend

LAYERS, EXPERTS, EACH = 3, 8, 2
SAMPLING = SamplingParams(max_tokens=60, temperature=1.1, presence_penalty=0.4, ignore_eos=True)


@pytest.fixture(scope="module")
def mixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `tiny_model`, whose layers have experts, but the second."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, mlp_only_layers=[1],
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        num_experts=EXPERTS, num_experts_per_tok=EACH, moe_intermediate_size=32, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, initializer_range=0.25,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


@pytest.fixture(scope="module", params=["now", "ahead"])
def engine(mixture: Path, request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=11, max_paths=3, cache=str(tmp_path_factory.mktemp("profiles")))
    ahead = request.param == "ahead"
    with engine_of(mixture, drafts, kv_blocks=36, routed_experts=True, async_scheduling=ahead) as engine:
        engine._drafting.start_always()
        yield engine


@pytest.fixture
def backend(engine: VllmBackend) -> Iterator[VllmBackend]:
    script(engine, "none")
    yield engine
    clear(engine)
    assert not engine.core.engine_core.scheduler.last_blocks
    assert engine.stats().free_blocks == 36


@pytest.fixture(scope="module")
def router(mixture: Path):
    model = Qwen3MoeForCausalLM.from_pretrained(mixture, dtype=torch.float32)

    def routes(tokens: list[int]) -> np.ndarray:
        """Return [tokens - 1, layers, experts of a token], as transformers route all but the last."""
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        found = np.zeros((len(tokens) - 1, LAYERS, EACH), np.uint8)
        for layer, each in zip((0, 2), logits, strict=True):
            found[:, layer] = each.topk(EACH, dim=-1).indices.numpy()
        return found

    return routes


def wanted(name: str, place: int, **kwargs: object):
    """Return a chunk whose routes are wanted from its first token on, unless others are named."""
    prompt = [1 + place, *PROMPT, *PROMPT]
    fields = {"prompt": prompt, "tokens": prompt, "routes_from": 0, "index": place, "key": KEY + place}
    return chunk(name, SAMPLING, **fields | kwargs)


def check(response: Response, before: list[int], router) -> None:
    (end,) = response.ends
    assert np.array_equal(end.routes, router(before + response.tokens))


def test_each_token_has_the_routers_choice_in_each_layer_but_the_last_token(backend, router):
    one = wanted("r", 0)
    response = run(backend, [one])["r"]
    check(response, one.tokens, router)
    (end,) = response.ends
    assert end.routes.dtype == np.uint8
    assert len(np.unique(end.routes[:, 0])) > EACH, "not everything goes to the same experts"


def test_a_chunk_has_those_that_the_one_before_had_not(backend, router):
    tokens, parts = list(wanted("r", 0).tokens), []
    for size in (1, 7, 31, 100):
        part = wanted("r", 0, tokens=tokens, max_new_tokens=size, routes_from=sum(map(len, parts)))
        response = run(backend, [part])["r"]
        parts.append(response.ends[0].routes)
        tokens += response.tokens
        backend.core.reset_prefix_cache()
    assert np.array_equal(np.concatenate(parts), router(tokens))


def test_cached_blocks_and_preempted_requests_have_theirs(backend, router):
    first = wanted("first", 0)
    check(run(backend, [first])["first"], first.tokens, router)
    before = backend.stats()
    chunks = [wanted(f"r{i}", 0, key=KEY + i, prompt_len=2 * len(PROMPT) + 1) for i in range(16)]
    found = run(backend, chunks)
    after = backend.stats()
    assert after.preemptions > before.preemptions
    assert after.cached_tokens > before.cached_tokens
    ended_with_blocks = [one for one in chunks if found[one.request_id].ends[0].routes is not None]
    for one in ended_with_blocks:
        check(found[one.request_id], one.tokens, router)
    assert len(ended_with_blocks) >= len(chunks) - (after.preemptions - before.preemptions)
    assert ended_with_blocks == chunks or backend.core.ahead


@pytest.mark.parametrize("plan", ["right_first", "right_third", "all_wrong", "forks"])
def test_drafts_that_were_wrong_leave_nothing_and_winners_bring_theirs(backend, router, plan):
    chunks = [wanted(f"r{i}", i) for i in range(4)]
    known = {one.index: run(backend, [one])[one.request_id].tokens for one in chunks}
    backend.core.reset_prefix_cache()
    script(backend, plan, known)
    for name, response in run(backend, chunks).items():
        one = next(each for each in chunks if each.request_id == name)
        assert response.tokens == known[one.index]
        check(response, one.tokens, router)


@pytest.mark.parametrize("case", ["stop_id", "stop_string"])
def test_a_stop_cuts_routes_as_tokens(backend, router, case):
    response = run(backend, [chunk("r", CASES[case](backend), routes_from=0)])["r"]
    assert response.finish[0] == "stop"
    check(response, PROMPT, router)


def test_who_does_not_ask_gets_none_and_dropped_chunks_leave_nothing(backend):
    assert run(backend, [chunk("r", SAMPLING)])["r"].ends[0].routes is None
    backend.add(wanted("dropped", 0))
    backend.step()
    backend.drop("dropped", 0)
