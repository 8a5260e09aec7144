"""Alternatives of tokens: those of the model itself, of every token that stands, whatever the schedule."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_plans import script
from engine_cases import CASES, KEY, PROMPT, Response, chunk, clear, engine_of, run
from msgspec import structs
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from seer.common.beside import PROMPT_LOGPROBS, TOP_LOGPROBS
from seer.common.config import DraftsConfig
from seer.common.types import SamplingParams
from seer.services.engine.vllm.backend import VllmBackend

PLAIN = SamplingParams(max_tokens=40, temperature=1.1, presence_penalty=0.4, ignore_eos=True)
ASKING = structs.replace(PLAIN, top_logprobs=5, prompt_logprobs=3)


@pytest.fixture(scope="module", params=["now", "ahead"])
def engine(tiny_model: Path, request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=11, max_paths=3, cache=str(tmp_path_factory.mktemp("profiles")))
    with engine_of(tiny_model, drafts, kv_blocks=36, async_scheduling=request.param == "ahead") as engine:
        engine._drafting.start_always()
        yield engine


@pytest.fixture
def backend(engine: VllmBackend) -> Iterator[VllmBackend]:
    script(engine, "none")
    yield engine
    clear(engine)


@pytest.fixture(scope="module")
def model(tiny_model: Path):
    loaded = Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def logprobs(tokens: list[int], temperature: float = 1.0) -> np.ndarray:
        """Return [tokens, vocabulary]: of what follows on each token."""
        with torch.no_grad():
            logits = loaded(torch.tensor([tokens])).logits[0].float() / temperature
        return logits.log_softmax(dim=-1).numpy()

    return logprobs


def has(response: Response, word: str) -> np.ndarray | None:
    """Return all that came of a word, in order; None: nothing did."""
    parts = [each[word] for each in response.beside if word in each]
    return np.concatenate(parts) if parts else None


def check_alike(found: np.ndarray, tokens: list[int], expected: np.ndarray) -> None:
    """Compare alternatives of `tokens` with the logprobs [tokens, vocabulary] in the place of each."""
    own = np.take_along_axis(expected, np.array(tokens)[:, None], 1)
    assert found[:, 1, 0] == pytest.approx(own[:, 0], abs=1e-4)
    lower, upper = (expected > own + 1e-4).sum(1), (expected >= own - 1e-4).sum(1)
    assert ((found[:, 0, 0] > lower) & (found[:, 0, 0] <= upper)).all(), "ranks"
    best = -np.sort(-expected)[:, : found.shape[2] - 1]
    assert found[:, 1, 1:] == pytest.approx(best, abs=1e-4)
    ids = found[:, 0, 1:].astype(int)
    assert np.take_along_axis(expected, ids, 1) == pytest.approx(best, abs=1e-4)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def check(response: Response, prompt: list[int], sampling: SamplingParams, model) -> None:
    divisor = 1.0 if sampling.logprobs == "raw" else sampling.temperature or 1.0
    tops = has(response, TOP_LOGPROBS)
    assert tops.shape == (len(response.tokens), 2, 1 + sampling.top_logprobs)
    check_alike(tops, response.tokens, model(prompt + response.tokens, divisor)[len(prompt) - 1 : -1])
    assert tops[:, 1, 0].tolist() == response.logprobs
    assert set(response.beside[0]) >= {TOP_LOGPROBS}


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("changes", [{"logprobs": "raw"}, {}, {"temperature": 0.0}])
def test_alternatives_are_the_models(backend, model, top, changes):
    sampling = structs.replace(PLAIN, top_logprobs=top, **changes)
    response = run(backend, [chunk("r#0", sampling)])["r#0"]
    check(response, PROMPT, sampling, model)
    assert has(response, PROMPT_LOGPROBS) is None
    plain = structs.replace(sampling, top_logprobs=None)
    assert run(backend, [chunk("r#0", plain)])["r#0"].tokens == response.tokens


@pytest.mark.parametrize("top", [0, 20])
def test_logprobs_of_a_prompt_come_once_and_cached_kv_does_not_hide_them(backend, model, top):
    prompt, sampling = [*PROMPT, *PROMPT, *PROMPT], structs.replace(PLAIN, prompt_logprobs=top)
    for _ in range(2):
        response = run(backend, [chunk("r#0", sampling, prompt=prompt)])["r#0"]
        found = has(response, PROMPT_LOGPROBS)
        assert found.shape == (len(prompt) - 1, 2, 1 + top)
        check_alike(found, prompt[1:], model(prompt)[:-1])
        assert [set(each) for each in response.beside] == [
            {PROMPT_LOGPROBS},
            *[set()] * (len(response.beside) - 1),
        ]
    cached = backend.stats().cached_tokens
    sibling, later, one = (
        chunk("r#1", sampling, prompt=prompt),
        chunk("r#0", sampling, tokens=[*prompt, *response.tokens[:9]], prompt_len=len(prompt)),
        chunk("one#0", sampling, prompt=prompt[:1]),
    )
    for other in (sibling, later, one):
        assert has(run(backend, [other])[other.request_id], PROMPT_LOGPROBS) is None
    assert backend.stats().cached_tokens > cached, "only who has logprobs of the prompt computes all of it"


def test_chunks_have_what_one_go_has(backend, model):
    whole = run(backend, [chunk("r#0", ASKING)])["r#0"]
    tokens, parts = list(PROMPT), []
    for _ in range(6):
        part = run(backend, [chunk("r#0", ASKING, tokens=tokens, prompt_len=len(PROMPT), max_new_tokens=7)])
        parts.append(part["r#0"])
        tokens += parts[-1].tokens
    assert tokens == PROMPT + whole.tokens
    for word in (TOP_LOGPROBS, PROMPT_LOGPROBS):
        found = np.concatenate([has(part, word) for part in parts if has(part, word) is not None])
        assert found == pytest.approx(has(whole, word), abs=1e-4)


@pytest.mark.parametrize("plan", ["right_first", "right_third", "all_wrong", "forks"])
def test_drafts_have_those_of_what_was_accepted(backend, model, plan):
    chunks = [
        chunk(f"r{i}#0", ASKING if i % 2 else structs.replace(PLAIN, top_logprobs=i), index=i, key=KEY + i)
        for i in range(4)
    ]
    chunks.append(chunk("plain#0", PLAIN, index=4, key=KEY + 4))
    known = {one.index: run(backend, [one])[one.request_id].tokens for one in chunks}
    script(backend, plan, known)
    found = run(backend, chunks)
    for one in chunks[:-1]:
        assert found[one.request_id].tokens == known[one.index]
        check(found[one.request_id], PROMPT, one.sampling, model)
    assert found["plain#0"].tokens == known[4]
    assert not any(found["plain#0"].beside)


def test_preempted_requests_have_theirs(backend, model):
    prompts = [[1 + i, *PROMPT, *PROMPT] for i in range(16)]
    before = backend.stats().preemptions
    chunks = [chunk(f"r{i}#0", ASKING, key=KEY + i, prompt=prompt) for i, prompt in enumerate(prompts)]
    found = run(backend, chunks)
    assert backend.stats().preemptions > before
    for one, prompt in zip(chunks, prompts, strict=True):
        check(found[one.request_id], prompt, ASKING, model)
        check_alike(has(found[one.request_id], PROMPT_LOGPROBS), prompt[1:], model(prompt)[:-1])


@pytest.mark.parametrize("case", ["stop_id", "stop_string"])
def test_a_stop_cuts_them_as_tokens(backend, model, case):
    sampling = structs.replace(CASES[case](backend), top_logprobs=2)
    response = run(backend, [chunk("r#0", sampling)])["r#0"]
    assert response.finish[0] == "stop"
    check(response, PROMPT, sampling, model)
