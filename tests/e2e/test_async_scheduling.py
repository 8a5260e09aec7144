"""Asynchronous scheduling: a step begins before the tokens of the last one are known, and changes no token.

Invariants:
- whatever runs, and however it is cut, batched, stopped, dropped or preempted, tokens and ends are those of
  synchronous scheduling;
- what the host has of a running request's tokens is not read;
- when all chunks have ended, no step is under way, and all KV blocks are free.
"""

import contextlib
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ahead import scheduling_ahead
from engine_cases import Response, chunk, run

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

from seer.common.config import DraftsConfig, EngineConfig, SharedConfig
from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.sampling.device_histories import Histories

pytestmark = pytest.mark.vllm

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
SHARED = SharedConfig(model=str(MODEL))
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
}  # fmt: skip

Results = dict[str, tuple[list[int], tuple[str, str]]]


def prompt(index: int, length: int = 20) -> list[int]:
    return [3 + (7 * i + 11 * index) % 60 for i in range(length)]


def seen(responses: dict[str, Response]) -> Results:
    return {name: (one.tokens, one.finish) for name, one in sorted(responses.items())}


def in_one_go(backend: VllmBackend) -> Results:
    """Requests of all kinds in one batch: penalised rows beside others, prefills beside decodes."""
    return seen(run(backend, [
        chunk(f"{case} {key}", CASES[case], key=key, prompt=prompt(key, 20 + 9 * key))
        for case in CASES for key in range(3)
    ]))  # fmt: skip


def in_chunks(backend: VllmBackend) -> Results:
    """The same, each cut into chunks of 7 tokens, which do not all end in the same step."""
    done = {f"{case} {key}": Response() for case in CASES for key in range(3)}
    while running := [name for name, one in done.items() if not one.ends or not one.finish[0]]:
        chunks = []
        for name in running:
            case, key = name.rsplit(" ", 1)
            given = prompt(int(key), 20 + 9 * int(key))
            chunks.append(chunk(
                name, CASES[case], key=int(key), prompt=given + done[name].tokens, prompt_len=len(given),
                max_new_tokens=7 - int(key),
            ))  # fmt: skip
        for name, piece in run(backend, chunks).items():
            done[name].tokens += piece.tokens
            done[name].ends += piece.ends
    return seen(done)


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
    in_one_go, in_chunks, with_turns, with_preemptions, with_long_prompts, with_arrivals_and_drops,
]  # fmt: skip


def started(ahead: bool) -> VllmBackend:
    core = str(
        min(os.sched_getaffinity(0))
    )  # one: threads that wait for each other are slow beside other work
    config = EngineConfig(
        kv_blocks=BLOCKS, max_num_seqs=32, max_model_len=256, cpu_cores=core, async_scheduling=ahead
    )
    backend = VllmBackend(config, SHARED)
    backend.start()
    return backend


@pytest.mark.parametrize(
    ("drafts", "reason"), [(None, "does not allow it on this device"), (DraftsConfig(), "drafts.source")]
)
def test_what_cannot_schedule_ahead_is_refused_by_name(drafts: DraftsConfig | None, reason: str) -> None:
    config = EngineConfig(kv_blocks=BLOCKS, max_num_seqs=8, max_model_len=256, async_scheduling=True)
    with pytest.raises(EngineError, match=rf"engine.async_scheduling = true: .*{reason}"):
        VllmBackend(config, SHARED, drafts=drafts).start()


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, Results]]:
    """What each way gives with synchronous scheduling."""
    cores = os.sched_getaffinity(0)
    backend = started(ahead=False)
    assert backend.versions["scheduling"] == "synchronous"
    results = {way.__name__: way(backend) for way in WAYS}
    backend.close()
    gc.collect()
    yield results
    os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module")
def engine(expected: dict[str, Results]) -> Iterator[VllmBackend]:
    with scheduling_ahead():
        backend = started(ahead=True)
        yield backend
        backend.close()


@pytest.fixture
def backend(engine: VllmBackend) -> Iterator[VllmBackend]:
    yield engine
    for request_id, attempt in list(engine._engine_ids):
        engine.drop(request_id, attempt)
    while engine.has_work():
        engine.step()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tokens_are_those_of_synchronous_scheduling(
    backend: VllmBackend, expected: dict[str, Results], way: Callable[[VllmBackend], Results]
) -> None:
    assert way(backend) == expected[way.__name__]
    assert not backend.core.has_steps_under_way
    assert backend.stats().free_blocks == BLOCKS


def test_the_ways_stop_as_they_say(expected: dict[str, Results]) -> None:
    reasons = {finish for _, finish in expected["in_one_go"].values()}
    assert {("stop", str(STOP)), ("length", "")} < reasons
    assert any(reason in CASES["stop strings"].stop for _, reason in reasons)
    assert expected["in_chunks"] == expected["in_one_go"]


def test_a_step_begins_before_the_last_one_is_known(backend: VllmBackend) -> None:
    assert backend.versions["scheduling"] == "asynchronous"
    runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
    backend.add(chunk("one", CASES["repetition"], prompt=prompt(0)))
    outputs = [backend.step() for _ in range(5)]
    assert [len(output.generated) for output in outputs] == [0, 1, 1, 1, 1]
    batch = runner.input_batch
    # Five tokens are drawn, of which the host was given four, and vLLM's own row has none.
    assert batch.num_tokens_no_spec[0] == 25
    assert batch.token_ids_cpu[0, 20:25].tolist() == [-1] * 5


def test_histories_on_the_device_are_what_counts(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what the device appends, nothing is guessed: the step fails."""
    monkeypatch.setattr(Histories, "append", lambda *_: None)
    backend.add(chunk("one", CASES["repetition"], prompt=prompt(0)))
    with pytest.raises(ValueError, match="the device has lost"):
        for _ in range(3):
            backend.step()
    backend.drop("one", 0)
    while backend.has_work():
        with contextlib.suppress(ValueError):
            backend.step()


def test_logits_that_are_no_numbers_end_the_engine_by_name(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seer.services.engine.vllm import runner_v1

    sample = runner_v1.DeviceSampler.__call__
    broken = lambda self, logits, *rest: sample(self, logits * float("nan"), *rest)  # noqa: E731
    monkeypatch.setattr(runner_v1.DeviceSampler, "__call__", broken)
    backend.add(chunk("unlucky", CASES["plain"], prompt=prompt(0)))
    with pytest.raises(EngineError, match=r"request unlucky: .* NaN"):
        for _ in range(3):
            backend.step()


def test_logits_are_captured(backend: VllmBackend) -> None:
    tokens, (logits,) = backend.probe.capture(chunk("one", CASES["plain"], prompt=prompt(0)))
    assert logits.shape == (len(tokens), backend.core.vocab_size)
    assert np.isfinite(logits).all()


def test_an_update_and_sleep_wait_for_the_step_under_way(
    backend: VllmBackend, expected: dict[str, Results]
) -> None:
    for change in (
        lambda: backend.load_weights(MODEL, ""),
        lambda: [backend.sleep(True), backend.sleep(False)],
    ):
        backend.add(chunk("dropped", CASES["plain"], prompt=prompt(0)))
        backend.step()
        assert backend.core.has_steps_under_way
        change()
        assert not backend.has_work()
        assert in_one_go(backend) == expected["in_one_go"]
