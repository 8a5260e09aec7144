"""Drafts under the real engine: right, wrong, random or cut short, they change no token."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from draft_plans import check_only_reserved_blocks, check_preempted_go_on, draft_always, script
from engine_cases import (
    BASE,
    CASES,
    KEY,
    LENGTH,
    PROMPT,
    Response,
    check_every_cut,
    check_only_the_spoilt_fail,
    chunk,
    engine_of,
    one_go,
    products,
    run,
    sampling_of,
    spoil,
)
from shared_engines import MODEL, ONE_CORE, texts, until_generated

from seer.client import RolloutClient
from seer.common.config import DraftsConfig, load
from seer.common.types import SamplingParams
from seer.local.system import LocalSystem
from seer.services.dgds.client import StreamDelta
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.drafts.draft_script import DraftScript

VOCAB = 200
KINDS = ("right", "wrong", "random", "truncated")


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=5, cache=str(tmp_path_factory.mktemp("profiles")))
    with engine_of(tiny_model, drafts, kv_blocks=36) as engine:
        draft_always(engine, 5)
        yield engine


@pytest.mark.parametrize(("case", "kind"), products(CASES, KINDS, "everything", "right"))
def test_drafts_at_every_offset_change_nothing(backend, case, kind):
    script(backend, "none")
    sampling = sampling_of(backend, case)
    whole = one_go(backend, sampling)
    before = backend.stats()
    # More is known than the response may have: a draft goes on where a stop must cut it.
    script(backend, kind, {0: whole.tokens + [7] * LENGTH})
    check_every_cut(backend, sampling, whole)
    after = backend.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    assert drafted > 0
    if kind == "right":
        assert accepted > drafted / 2
    elif kind == "wrong":
        assert accepted == 0


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_with_drafts_go_on_the_same(backend, kind):
    check_preempted_go_on(backend, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_take_no_block_that_was_not_reserved(backend, kind):
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    chunks = [chunk(f"r{i}", sampling, index=i, key=i, wait_for_room=True) for i in range(12)]
    check_only_reserved_blocks(backend, chunks, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_cannot_be_sampled_fail_alone(backend, monkeypatch, kind):
    chunks = [
        chunk(str(i), CASES["everything"], index=i, key=KEY + i, prompt=PROMPT[: 4 + i]) for i in range(12)
    ]
    script(backend, "none")
    script(backend, kind, {i: one.tokens for i, one in enumerate(run(backend, chunks).values())})
    spoilt = {KEY + 2: 6, KEY + 5: 12, KEY + 6: 17, KEY + 7: 11 + LENGTH - 1}
    check_only_the_spoilt_fail(backend, monkeypatch, chunks, spoilt)


def test_a_draft_that_is_no_number_fails_nothing(backend, monkeypatch):
    script(backend, "none")
    whole = one_go(backend, BASE)
    backend.probe.script_drafts(None)
    one_go(backend, BASE, index=1)  # the sibling, which said the same
    spoil(monkeypatch, {KEY: 0}, by_drafts=True)
    before = backend.stats().drafted_tokens
    with_drafts = one_go(backend, BASE)
    assert backend.stats().drafted_tokens > before
    assert (with_drafts.tokens, with_drafts.finish) == (whole.tokens, whole.finish)
    assert with_drafts.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_what_a_sibling_said_is_drafted(backend):
    script(backend, "none")
    whole = one_go(backend, BASE)
    backend.probe.script_drafts(None)
    backend.forget(["g"])
    backend.add(chunk("again", BASE, index=1))
    backend.feed([StreamDelta("g", 4096, 0, np.array(whole.tokens, np.int32))])
    before = backend.stats()
    again = Response()
    while backend.has_work():
        for generated in backend.step().generated:
            again.tokens += generated.token_ids
    after = backend.stats()
    assert again.tokens == whole.tokens
    assert after.accepted_tokens - before.accepted_tokens > len(whole.tokens) / 2


@pytest.mark.parametrize("seed", range(3))
def test_drafts_may_be_switched_on_and_off_in_any_step(backend, monkeypatch, seed):
    """Rows that draft, verify, prefill and end in steps of both ways: the same tokens, and drafts go on."""
    sampling = SamplingParams(max_tokens=60, temperature=1.1, presence_penalty=0.5, ignore_eos=True)
    chunks = [chunk(str(i), sampling, index=i, key=KEY + i % 3, prompt=PROMPT[: 5 + i]) for i in range(9)]
    script(backend, "none")
    plain = run(backend, chunks)
    backend.probe.script_drafts(None)
    backend.forget(["g"])
    before, dice = backend.stats(), random.Random(seed)
    control = backend._drafting

    def switch(*_: object) -> None:
        control._queue("switch", on=dice.random() < 0.5)
        control.flush()

    monkeypatch.setattr(control, "begin_step", switch)
    switched = run(backend, chunks[:5]) | run(backend, chunks[5:])  # the rest drafts from those that ended
    control._queue("switch", on=True)
    assert {name: each.tokens for name, each in switched.items()} == {
        name: each.tokens for name, each in plain.items()
    }
    after = backend.stats()
    assert after.accepted_tokens > before.accepted_tokens
    assert after.free_blocks == backend.capacity.kv_blocks


def test_steps_without_drafts_make_none_and_have_nothing_to_verify(backend, monkeypatch):
    from seer.services.engine.vllm.drafts.speculator import TreeSpeculator
    from seer.services.engine.vllm.sampling import slot_rows

    whole = one_go(backend, BASE)
    control = backend._drafting
    control._queue("switch", on=False)
    monkeypatch.setattr(TreeSpeculator, "_draft_each", None)
    monkeypatch.setattr(slot_rows, "accept_drafts", None)
    assert one_go(backend, BASE).tokens == whole.tokens
    control._queue("switch", on=True)
    with pytest.raises(TypeError):
        one_go(backend, BASE)


def test_bad_feeds_cost_drafts_alone(backend):
    script(backend, "none")
    whole = one_go(backend, BASE)
    backend.probe.script_drafts(None)
    backend.add(chunk("fed", BASE))
    tokens = np.array(whole.tokens, np.int32)
    backend.feed([
        StreamDelta("unknown", 0, 0, tokens), StreamDelta("g", 1, 50, tokens),
        StreamDelta("g", 2, 0, -tokens), StreamDelta("g", 3, 0, tokens + VOCAB),
        StreamDelta("g", 0, 0, tokens[::-1].copy()),
    ])  # fmt: skip
    got = []
    while backend.has_work():
        for generated in backend.step().generated:
            got += generated.token_ids
    assert got == whole.tokens


def test_two_chunks_under_one_name_draft_as_they_can(backend):
    script(backend, "none")
    keys = [KEY, KEY + 1]
    whole = [one_go(backend, BASE, key=key) for key in keys]
    backend.probe.script_drafts(None)
    both = run(backend, [chunk(str(key), BASE, key=key, index=0) for key in keys])
    assert [both[str(key)].tokens for key in keys] == [response.tokens for response in whole]


def chi_square(backend: VllmBackend) -> float:
    """Compare the first two tokens of 1,280 keys with the model's own probabilities: 15 degrees of freedom."""
    sampling = SamplingParams(max_tokens=3, temperature=1.0, top_k=4, ignore_eos=True)
    counts = np.zeros((4, 4))
    first, expected = best_four(backend, PROMPT)
    seconds = [best_four(backend, [*PROMPT, int(token)]) for token in first]
    odds = np.array([one * second for one, (_, second) in zip(expected, seconds, strict=True)])
    known = {0: [int(first[0]), int(seconds[0][0][0]), 7]}
    backend.probe.script_drafts(DraftScript(kind="right", vocab=VOCAB, known=known, count=2))
    for turn in range(40):
        keys = [turn * 32 + row for row in range(32)]
        drawn = run(backend, [chunk(str(key), sampling, key=key * 7919) for key in keys])
        for response in drawn.values():
            row = first.tolist().index(response.tokens[0])
            counts[row, seconds[row][0].tolist().index(response.tokens[1])] += 1
    return float(((counts - counts.sum() * odds) ** 2 / (counts.sum() * odds)).sum())


def best_four(backend: VllmBackend, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    logits = backend.probe.logits(tokens).astype(np.float64)
    best = np.argsort(logits)[-4:]
    odds = np.exp(logits[best] - logits[best].max())
    return best, odds / odds.sum()


def test_sampling_with_drafts_keeps_the_distribution(backend, monkeypatch):
    """As vLLM's own rejection sampler does not on CPUs (vllm-project/vllm#55005), which never runs here."""
    from vllm.v1.sample import rejection_sampler  # only once an engine prepared vLLM's environment

    from seer.services.engine.vllm.sampling import slot_rows

    limit = 60.0  # exceeded once in a million
    before = backend.stats()
    assert chi_square(backend) < limit
    assert backend.stats().accepted_tokens > before.accepted_tokens
    monkeypatch.setattr(rejection_sampler, "rejection_sample", None)
    assert chi_square(backend) < limit
    accept_drafts = slot_rows.accept_drafts

    def all_accepted(tokens, logprobs, counts, drafts):
        owners = np.repeat(np.arange(len(counts)), counts + 1)
        last = np.append(owners[1:] != owners[:-1], True)
        tokens[~last] = drafts
        return accept_drafts(tokens, logprobs, counts, drafts)

    monkeypatch.setattr(slot_rows, "accept_drafts", all_accepted)
    with pytest.raises((ValueError, AssertionError)):
        assert chi_square(backend) < limit


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_siblings_draft_across_engines_and_a_killed_dgds_costs_drafts_alone(pair):
    async def roll(endpoint: str, kill: Callable[[], None] | None = None) -> tuple[list[list[int]], int]:
        async with RolloutClient(endpoint, tokenizer=MODEL) as client:
            rollout = await client.submit(
                texts(3), n=8,
                sampling=SamplingParams(max_tokens=160, ignore_eos=True), rollout_number=0,
            )  # fmt: skip
            done = asyncio.create_task(rollout.result())
            if kill:
                await until_generated(client, 3 * 8 * 60)
                kill()
            groups = await done
            await asyncio.sleep(2.0)  # for the last reports
            stats = [instance.stats for instance in (await client.status()).instances]
            tokens = [response.token_ids.tolist() for group in groups for response in group.responses]
            return tokens, sum(each.accepted_tokens for each in stats)

    plain, none = await roll(pair.anew(chunk_size=32, policy="migrate"))
    assert none == 0
    settings = [
        f"shared.model={MODEL}", "engine.max_model_len=400", "engine.max_num_seqs=8",
        "buffer.chunk_size=32", "buffer.policy=migrate", "pool.kind=none", "drafts.source=grouped",
    ]  # fmt: skip
    async with LocalSystem(load(None, {}, settings), 2) as system:
        disturbed, accepted = await roll(
            system.endpoint, lambda: os.kill(system.pids["dgds"], signal.SIGKILL)
        )
        assert system.restarts["dgds"] >= 1
    assert disturbed == plain
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_ran_ahead_is_drafted_after_the_update_and_changes_no_token(pair):
    """Weights stay as they are, so all that ran ahead is right; each prompt comes once.

    Few requests run at once, so that the engine finds drafts worth their time on any machine.
    """
    asked = {"n": 2, "sampling": SamplingParams(max_tokens=160, ignore_eos=True), "rollout_number": 0}
    prompts = texts(16)

    async def roll(client: RolloutClient, prompts: list[str]) -> list[list[int]]:
        groups = await (await client.submit(prompts, repeat=True, **asked)).result()
        return [response.token_ids.tolist() for group in groups for response in group.responses]

    async def counts(client: RolloutClient) -> np.ndarray:
        """Return how many tokens were generated ahead, drafted, and right."""
        await asyncio.sleep(2.0)  # for the last reports
        [engine] = (await client.status()).instances
        stats = engine.stats
        return np.array([stats.ahead_tokens, stats.drafted_tokens, stats.accepted_tokens])

    async with RolloutClient(pair.anew(chunk_size=32), tokenizer=MODEL) as client:
        plain = [await roll(client, part) for part in (prompts[:8], prompts[8:])]
    settings = [
        f"shared.model={MODEL}", "engine.max_model_len=400", "engine.max_num_seqs=4",
        "buffer.chunk_size=32", "pool.kind=none", "drafts.source=grouped", *ONE_CORE,
    ]  # fmt: skip
    async with (
        LocalSystem(load(None, {}, settings), 1) as system,
        RolloutClient(system.endpoint, tokenizer=MODEL) as client,
    ):
        assert await roll(client, prompts[:8]) == plain[0]
        _, drafted, right = await counts(client)
        await client.next_prompts(prompts[8:], **asked)
        async with asyncio.timeout(120):
            while (before := await counts(client))[0] < 16 * 160:
                pass
        await client.update_weights(1, MODEL)  # trees are dropped: what is known is what the dgds remembers
        assert await roll(client, prompts[8:]) == plain[1]
        _, drafted_after, right_after = await counts(client) - before
        assert right_after / drafted_after > 1.5 * right / drafted
