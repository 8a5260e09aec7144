"""Chunks and the ways to run them: what tests of the real engine share."""

import contextlib
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import torch
from _pytest.mark import ParameterSet
from ahead import scheduling_ahead

from seer.common.config import DraftsConfig, EngineConfig, SharedConfig
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk, ChunkEnd
from seer.services.engine.vllm.backend import VllmBackend

LENGTH = 24
KEY = 0xFEED_FACE_CAFE_F00D
PROMPT = [1, *(3 + (7 * i) % 190 for i in range(20))]
EOS = 2
BASE = SamplingParams(max_tokens=LENGTH)
"""EOS counts, and 21 + 24 tokens cross a block of 32."""


@contextlib.contextmanager
def engine_of(model: Path, drafts: DraftsConfig | None = None, **settings: Any) -> Iterator[VllmBackend]:
    """Have an engine of 32 requests, of 256 tokens each, on one core.

    Threads that wait for each other are slow beside other work, and prove nothing more.
    """
    cores = os.sched_getaffinity(0)
    usual = {"max_num_seqs": 32, "max_model_len": 256, "cpu_cores": str(min(cores))}
    config = EngineConfig(**usual | settings)
    with scheduling_ahead() if config.async_scheduling else contextlib.nullcontext():
        backend = VllmBackend(config, SharedConfig(model=str(model)), None, drafts)
        backend.start()
        yield backend
        backend.close()
    os.sched_setaffinity(0, cores)


def clear(backend: VllmBackend) -> None:
    """Drop all chunks, end the steps under way, and draft from empty trees again."""
    if backend._drafting is not None:
        backend.probe.script_drafts(None)
        backend.forget(["g"])
    for request_id, attempt in list(backend._engine_ids):
        backend.drop(request_id, attempt)
    while backend.has_work():
        backend.step()


class Response(msgspec.Struct):
    tokens: list[int] = []
    logprobs: list[float] = []
    ends: list[ChunkEnd] = []
    failures: list[str] = []
    beside: list[dict[str, Any]] = []

    @property
    def finish(self) -> tuple[str, str]:
        return self.ends[-1].finish, self.ends[-1].stop_reason


def chunk(
    name: str, sampling: SamplingParams, *, key: int = KEY, prompt: list[int] = PROMPT, **kwargs
) -> Chunk:
    fields = {"tokens": prompt, "prompt_len": len(prompt), "max_new_tokens": 10_000, "attempt": 0}
    return Chunk(request_id=name, key=key, sampling=sampling, **{"group_id": "g"} | fields | kwargs)


def run(
    backend: VllmBackend, chunks: list[Chunk], told: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Response]:
    """Run chunks at once to their ends; some are `told` to end where they stand, at so many tokens."""
    responses: dict[str, Response] = defaultdict(Response)
    for one in chunks:
        backend.add(one)
    while backend.has_work():
        output = backend.step()
        for generated in output.generated:
            assert len(generated.token_ids) == len(generated.logprobs) > 0
            responses[generated.request_id].tokens += generated.token_ids
            responses[generated.request_id].logprobs += generated.logprobs
            responses[generated.request_id].beside.append(generated.beside)
        for end in output.ended:
            responses[end.request_id].ends.append(end)
        for name, count in told.items():
            if len(responses[name].tokens) >= count:
                backend.end(name, 0)
        for failure in output.failed:
            responses[failure.request_id].failures.append(str(failure.error))
    found = [responses[one.request_id] for one in chunks]
    assert all(len(each.ends) + len(each.failures) == 1 for each in found)
    return responses


def spoil(monkeypatch: pytest.MonkeyPatch, positions: dict[int, int], *, by_drafts: bool = False) -> None:
    """Have the logits of these requests, by key, be no numbers from these positions on.

    `by_drafts`: only in steps that verify drafts of them, as when a draft's own values overflow.
    """
    from seer.services.engine.vllm.sampling import slot_rows
    from seer.services.engine.vllm.sampling.sampler import sample_rows

    def spoilt(logits, params):
        keys, at = params.records["key"].tolist(), params.records["position"].tolist()
        bad = [at[row] >= positions.get(key, 2**62) for row, key in enumerate(keys)]
        if by_drafts:
            drafted = {key for key, extra in zip(keys, params.records["extra_len"], strict=True) if extra}
            bad = [each and key in drafted for each, key in zip(bad, keys, strict=True)]
        return sample_rows(logits.masked_fill(torch.tensor(bad)[:, None], math.nan), params)

    monkeypatch.setattr(slot_rows, "sample_rows", spoilt)


def check_only_the_spoilt_fail(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, chunks: list[Chunk], positions: dict[int, int]
) -> None:
    """Run chunks with and without spoilt logits: all others have their tokens, logprobs and ends."""
    undisturbed = run(backend, chunks)
    with monkeypatch.context() as patch:
        spoil(patch, positions)
        disturbed = run(backend, chunks)
    failed = {one.request_id: positions[one.key] for one in chunks if one.key in positions}
    assert {name for name, response in disturbed.items() if response.failures} == set(failed)
    for name, response in undisturbed.items():
        if name in failed:
            (problem,) = disturbed[name].failures
            assert f"request {name}: no token can be sampled at position {failed[name]}: " in problem
            assert response.tokens[: len(disturbed[name].tokens)] == disturbed[name].tokens
        else:
            assert disturbed[name].tokens == response.tokens
            assert disturbed[name].logprobs == pytest.approx(response.logprobs, abs=1e-4)
            assert disturbed[name].finish == response.finish
    assert backend.stats().free_blocks == backend.capacity.kv_blocks
    again = run(backend, chunks)
    assert {name: each.tokens for name, each in again.items()} == {
        name: each.tokens for name, each in undisturbed.items()
    }


def one_go(backend: VllmBackend, sampling: SamplingParams, **kwargs) -> Response:
    return run(backend, [chunk("one", sampling, **kwargs)])["one"]


def in_chunks(
    backend: VllmBackend, plans: list[list[int]], sampling: SamplingParams, prompt: list[int] = PROMPT
) -> list[Response]:
    """Run the same response once per plan, all side by side; a plan lists its chunks' sizes."""
    done = [Response() for _ in plans]
    for turn in itertools.count():
        open_plans = [i for i, response in enumerate(done) if not response.ends or not response.finish[0]]
        if not open_plans:
            return done
        pieces = run(backend, [
            chunk(
                str(i), sampling, tokens=prompt + done[i].tokens, prompt_len=len(prompt),
                max_new_tokens=plans[i][min(turn, len(plans[i]) - 1)],
            ) for i in open_plans
        ])  # fmt: skip
        for i in open_plans:
            done[i].tokens += pieces[str(i)].tokens
            done[i].logprobs += pieces[str(i)].logprobs
            done[i].ends += pieces[str(i)].ends
    raise AssertionError


def check_every_cut(backend: VllmBackend, sampling: SamplingParams, whole: Response) -> None:
    """Cut a response at every offset, and into chunks of 1 and of 5 tokens: all is as in one go."""
    plans = [[size, LENGTH] for size in range(1, LENGTH)] + [[1], [5]]
    for plan, response in zip(plans, in_chunks(backend, plans, sampling), strict=True):
        assert response.tokens == whole.tokens, plan
        assert response.finish == whole.finish, plan
        assert response.logprobs == pytest.approx(whole.logprobs, abs=1e-4), plan


def with_stop_id(backend: VllmBackend) -> SamplingParams:
    tokens = one_go(backend, BASE).tokens
    return msgspec.structs.replace(BASE, stop_token_ids=(tokens[12],))


def with_stop_string(backend: VllmBackend) -> SamplingParams:
    text = piece_texts(one_go(backend, BASE).tokens)
    return msgspec.structs.replace(BASE, stop=("ZZ", text[11][-1] + text[12] + text[13][:1]))


def with_min_tokens(backend: VllmBackend) -> SamplingParams:
    tokens = one_go(backend, BASE).tokens
    early = tuple(tokens[:9])
    return msgspec.structs.replace(BASE, stop_token_ids=early, stop=(piece_texts(tokens)[3],), min_tokens=11)


def piece_texts(tokens: list[int]) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["", "", "", *letters, *(a + b for a in letters for b in letters)]
    return [pieces[token] for token in tokens]


CASES = {
    "temperature": SamplingParams(max_tokens=LENGTH, temperature=1.3),
    "greedy": SamplingParams(max_tokens=LENGTH, temperature=0.0),
    "top_p": SamplingParams(max_tokens=LENGTH, top_p=0.7),
    "top_k": SamplingParams(max_tokens=LENGTH, top_k=7, logprobs="processed"),
    "min_p": SamplingParams(max_tokens=LENGTH, min_p=0.2, logprobs="raw"),
    "repetition": SamplingParams(max_tokens=LENGTH, repetition_penalty=1.8),
    "frequency": SamplingParams(max_tokens=LENGTH, frequency_penalty=1.5, temperature=0.7),
    "presence": SamplingParams(max_tokens=LENGTH, presence_penalty=2.0, logprobs="processed"),
    "logit_bias": SamplingParams(max_tokens=LENGTH, logit_bias={7: 3.0, 9: -50.0}),
    "stop_id": with_stop_id,
    "stop_string": with_stop_string,
    "min_tokens": with_min_tokens,
    "everything": SamplingParams(
        max_tokens=LENGTH, temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=0.2, logit_bias={30: 1.0}, min_tokens=5, ignore_eos=True,
    ),
}  # fmt: skip


def sampling_of(backend: VllmBackend, case: str) -> SamplingParams:
    """Return a case's sampling; where that stops depends on what the engine says."""
    sampling = CASES[case]
    return sampling(backend) if callable(sampling) else sampling


def products(cases: Iterable[str], kinds: Iterable[str], case: str, kind: str) -> list[ParameterSet]:
    """Every pair for `parametrize`; those with neither this `case` nor this `kind` are breadth."""
    breadth = pytest.mark.breadth
    return [
        pytest.param(one, other, marks=() if one == case or other == kind else breadth)
        for one in cases
        for other in kinds
    ]
