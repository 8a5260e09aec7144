"""Ways to run requests of all kinds on an engine: what comes, is cut, stops, waits, is dropped or preempted.

Engines of the shipped model with `BLOCKS` KV blocks, so that some are preempted, run each of `WAYS`; whatever
the engine, results must be equal.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from engine_cases import Response, check_only_the_spoilt_fail, chunk, run

from seer.common.structured_outputs import StructuredOutputs
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.backend import VllmBackend

BLOCKS = 40

STOP = 55
"""The token of "=": the model writes it every ten tokens or so."""

CASES = {
    "plain": SamplingParams(max_tokens=40, temperature=1.2, ignore_eos=True),
    "stop ids": SamplingParams(max_tokens=40, temperature=1.3, stop_token_ids=(STOP, 57)),
    "stop strings": SamplingParams(
        max_tokens=40, temperature=1.1, min_tokens=3, stop=("= 1", "! 2", "47 -", "- 1", "+ 1"),
        ignore_eos=True,
    ),
    "repetition": SamplingParams(max_tokens=40, repetition_penalty=1.8, ignore_eos=True),
    "frequency": SamplingParams(max_tokens=40, frequency_penalty=1.5, temperature=0.7, ignore_eos=True),
    "everything": SamplingParams(
        max_tokens=40, temperature=1.2, top_p=0.95, top_k=40, min_p=0.01, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=0.2, logit_bias={30: 1.0}, min_tokens=5, stop_token_ids=(STOP,),
    ),
    "grammar": SamplingParams(
        max_tokens=40, temperature=1.3, presence_penalty=0.4,
        structured_outputs=StructuredOutputs(regex="([0-9]{1,2}[-+*]){3,9}[0-9]{1,2}=ans"),
    ),
}  # fmt: skip

Results = dict[str, tuple[list[int], tuple[str, str]]]


def prompt(index: int, length: int = 20) -> list[int]:
    return [3 + (7 * i + 11 * index) % 60 for i in range(length)]


def seen(responses: dict[str, Response]) -> Results:
    return {name: (one.tokens, one.finish) for name, one in sorted(responses.items())}


def siblings(count: int, length: int = 60) -> list[Chunk]:
    """Return responses of one group, to prompts of their own."""
    sampling = SamplingParams(max_tokens=length, temperature=1.1, presence_penalty=0.4, ignore_eos=True)
    return [chunk(f"r{i}", sampling, index=i, key=i, prompt=prompt(i)) for i in range(count)]


def check_rows_fail_alone(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil some rows of requests of all kinds, at prefills and later: no other has other tokens."""
    chunks = [
        chunk(f"{case} {key}", CASES[case], key=17 * key + place, prompt=prompt(key))
        for place, case in enumerate(CASES) for key in range(3)
    ]  # fmt: skip
    check_only_the_spoilt_fail(backend, monkeypatch, chunks, {0: 20, 3: 25, 17 + 3: 40, 34 + 5: 22})


def in_one_go(backend: VllmBackend) -> Results:
    """Requests of all kinds in one batch: penalised rows beside others, prefills beside decodes."""
    return seen(run(backend, [
        chunk(f"{case} {key}", CASES[case], key=key, prompt=prompt(key, 20 + 9 * key))
        for case in CASES for key in range(3)
    ]))  # fmt: skip


def in_chunks(backend: VllmBackend, *, told: bool = False) -> Results:
    """The same, each cut into chunks of 7 tokens or fewer, which do not all end in the same step.

    `told`: each is told to end where it stands then, or was told before it had a token.
    """
    done = {f"{case} {key}": Response() for case in CASES for key in range(3)}
    while running := [name for name, one in done.items() if not one.ends or not one.finish[0]]:
        chunks = []
        for name in running:
            case, key = name.rsplit(" ", 1)
            given = prompt(int(key), 20 + 9 * int(key))
            chunks.append(chunk(
                name, CASES[case], key=int(key), prompt=given + done[name].tokens, prompt_len=len(given),
                max_new_tokens=40 if told else 7 - int(key),
            ))  # fmt: skip
        ends = {name: 7 * int(name[-1]) for name in running} if told else {}
        for name, piece in run(backend, chunks, ends).items():
            done[name].tokens += piece.tokens
            done[name].ends += piece.ends
    return seen(done)


def told_to_end(backend: VllmBackend) -> Results:
    """See `in_chunks`."""
    return in_chunks(backend, told=True)


def with_turns(backend: VllmBackend) -> Results:
    """Turns that park: each begins with all tokens before it and some of an environment."""
    contexts = {f"{case} {key}": prompt(key) for case in ("stop ids", "everything") for key in range(3)}
    results: Results = {}
    for turn in range(3):
        chunks = [
            chunk(
                name, CASES[name.rsplit(" ", 1)[0]], key=int(name[-1]), prompt=context, prompt_len=20,
                turn_start=len(context) if turn else 0, parks=True,
            )
            for name, context in contexts.items()
        ]  # fmt: skip
        for name, response in run(backend, chunks).items():
            contexts[name] = contexts[name] + response.tokens + [9, 10 + turn]
            results[f"{name}, turn {turn}"] = (response.tokens, response.finish)
    return results


def with_preemptions(backend: VllmBackend) -> Results:
    """More than fits into memory, with penalties: what was preempted begins again in the midst."""
    before = backend.stats().preemptions
    sampling = msgspec.structs.replace(CASES["frequency"], max_tokens=90)
    plain = msgspec.structs.replace(CASES["plain"], max_tokens=90)
    responses = run(backend, [
        chunk(str(i), sampling if i % 3 else plain, key=i, prompt=prompt(i, 50 + i)) for i in range(14)
    ])  # fmt: skip
    assert backend.stats().preemptions > before
    return seen(responses)


def with_long_prompts(backend: VllmBackend) -> Results:
    """Prefills that take several steps beside requests that decode."""
    sampling = CASES["repetition"]
    return seen(run(backend, [
        *(chunk(f"short {i}", sampling, key=i, prompt=prompt(i)) for i in range(4)),
        *(chunk(f"long {i}", sampling, key=i, prompt=prompt(i, 200)) for i in range(3)),
    ]))  # fmt: skip


def with_arrivals_and_drops(backend: VllmBackend) -> Results:
    """Chunks come at every step, wait for room, are dropped in mid-step, and come back as other attempts."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, tuple[str, str]] = {}
    sampling, step = CASES["everything"], 0
    waiting = [(2 * i, f"r{i}", i, 0) for i in range(8)]
    while waiting or backend.has_work():
        for one in [one for one in waiting if one[0] <= step]:
            waiting.remove(one)
            _, name, key, attempt = one
            backend.add(
                chunk(name, sampling, key=key, prompt=prompt(key), attempt=attempt, wait_for_room=True)
            )
        if step in (6, 9, 12):
            name = f"r{step // 3}"
            backend.drop(name, 0)
            tokens.pop(name, None)
            waiting.append((step + 3, name, step // 3, 1))
        output = backend.step()
        for generated in output.generated:
            tokens.setdefault(generated.request_id, []).extend(generated.token_ids)
        ends |= {end.request_id: (end.finish, end.stop_reason) for end in output.ended}
        step += 1
    return {name: (tokens[name], ends[name]) for name in sorted(tokens)}


WAYS: list[Callable[[VllmBackend], Results]] = [
    in_one_go, in_chunks, told_to_end, with_turns, with_preemptions, with_long_prompts, with_arrivals_and_drops,
]  # fmt: skip
