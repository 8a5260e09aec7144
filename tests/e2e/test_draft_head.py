"""A trained head drafts beside trees: no token changes, whatever the head, and an update brings its weights."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ahead import check_on_two_ranks
from engine_cases import chunk, engine_of, run
from heads import HEAD, changed_head, head_tensors, model_with
from safetensors.torch import save_file
from shared_engines import MODEL, SharedEngines, tensors, texts
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from ways import BLOCKS, WAYS, Results, in_one_go, prompt, siblings

from seer.client import RolloutClient, SamplingParams
from seer.common.config import DraftsConfig
from seer.common.errors import EngineError
from seer.common.policy.draft_budget import DraftBudget
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.drafts.head_speculator import TRIES, HeadSpeculator

MOST = 4


@pytest.fixture(scope="module", params=["now", "ahead"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=MOST, head=str(HEAD), cache=str(tmp_path_factory.mktemp("profiles")))
    with engine_of(MODEL, drafts, kv_blocks=BLOCKS, async_scheduling=request.param == "ahead") as engine:
        engine._drafting.start_always()
        yield engine


def speculator(backend: VllmBackend) -> HeadSpeculator:
    return backend.core.engine_core.model_executor.driver_worker.worker.model_runner.speculator


def made_by(backend: VllmBackend) -> dict[str, torch.Tensor]:
    """Return what parts of a head make of one input: packed weights cannot be read."""
    head = speculator(backend).model
    given = torch.full((2, 128), 0.1)
    with torch.inference_mode():
        return {
            "fc.weight": head.model.fc(given.repeat(1, 3)),
            "lm_head.weight": head.compute_logits(given),
            "embed_tokens.weight": head.model.embed_tokens(torch.tensor([3, 4])),
        }


def expected_of(head: dict[str, torch.Tensor], embeddings: torch.Tensor) -> dict[str, torch.Tensor]:
    given = torch.full((2, 128), 0.1)
    return {
        "fc.weight": given.repeat(1, 3) @ head["fc.weight"].float().T,
        "lm_head.weight": given @ head["lm_head.weight"].float().T,
        "embed_tokens.weight": embeddings[3:5],
    }


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


def accepted(backend: VllmBackend) -> float:
    """Return how many drafted tokens of a step and request were right."""
    before = backend.stats()
    run(backend, siblings(8))
    after = backend.stats()
    steps = after.verifications - before.verifications
    return (after.accepted_tokens - before.accepted_tokens) / steps


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tokens_are_those_without_drafts(
    backend: VllmBackend, expected_ways: dict[str, Results], way: Callable[[VllmBackend], Results]
) -> None:
    before = backend.stats()
    assert way(backend) == expected_ways[way.__name__]
    after = backend.stats()
    assert after.accepted_tokens > before.accepted_tokens
    assert after.free_blocks == BLOCKS


def test_an_update_brings_the_heads_weights(backend: VllmBackend, tmp_path: Path) -> None:
    plain, good = in_one_go(backend), accepted(backend)
    old, new, model = head_tensors(HEAD), changed_head(), tensors()
    assert close(made_by(backend), expected_of(old, model["model.embed_tokens.weight"]))
    with_head = model_with(tmp_path / "with", 1.01, new)
    backend.load_weights(with_head, "with")
    changed = made_by(backend)
    assert backend.stats().head_behind == 0
    assert close(changed, expected_of(new, tensors(1.01)["model.embed_tokens.weight"]))
    backend.load_weights(model_with(tmp_path / "without", 1.0, {}), "without")
    assert backend.stats().head_behind == 1
    assert close(made_by(backend), expected_of(new, model["model.embed_tokens.weight"]))  # the old model's
    assert in_one_go(backend) == plain
    poor = accepted(backend)
    assert poor < 0.8 * good
    backend.lay_out_weights(with_head, "with")
    while backend.lays_out():
        time.sleep(0.01)
    assert backend.core._laid_out == "with"
    backend.load_weights(with_head, "with")
    assert close(made_by(backend), changed)
    assert backend.stats().head_behind == 0
    backend.load_weights(model_with(tmp_path / "back", 1.0, old), "back")
    assert in_one_go(backend) == plain
    assert accepted(backend) > 1.5 * poor  # scheduled ahead, drafts may be late, as before, too


@pytest.mark.parametrize("saved", [0.0, 1e9])
def test_a_head_drafts_while_it_pays(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch, saved: float
) -> None:
    if backend.core.ahead:
        pytest.skip("all ranks draft what the engine chose before")
    drafter, choose = speculator(backend), DraftBudget.choose
    monkeypatch.setattr(
        DraftBudget, "choose", lambda *given, **named: replace(choose(*given, **named), saves=saved)
    )
    tried: list[int] = []
    propose = MTPSpeculator.propose
    monkeypatch.setattr(
        MTPSpeculator, "propose",
        lambda *given, **named: tried.append(named["num_speculative_tokens"]) or propose(*given, **named),
    )  # fmt: skip
    backend._drafting.flush()
    drafter._always = False
    try:
        run(backend, siblings(8, length=220))
    finally:
        drafter._always = True
    later = tried[2 * TRIES :]
    assert len(later) > TRIES
    share = sum(each > 0 for each in later) / len(later)
    assert share == 1.0 if saved else share < 0.2, "".join(map(str, tried))


def test_an_engine_without_a_head_passes_by_its_weights(
    expected_ways: dict[str, Results], tmp_path: Path
) -> None:
    with engine_of(MODEL, kv_blocks=BLOCKS) as backend:
        backend.load_weights(model_with(tmp_path / "with", 1.0, changed_head()), "with")
        assert in_one_go(backend) == expected_ways["in_one_go"]


def test_the_heads_kv_lies_in_the_models_blocks(backend: VllmBackend) -> None:
    """So whatever moves, saves and frees blocks does so with the head's KV, too."""
    (group,) = backend.core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    heads = speculator(backend).draft_attn_layer_names
    assert len(heads) == 1
    assert heads < set(group.layer_names)
    assert len(group.layer_names) == 4 + 1


def test_drafts_take_no_block_that_was_not_reserved(backend: VllmBackend) -> None:
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    chunks = [
        chunk(f"r{i}", sampling, index=i, key=i, prompt=prompt(i), wait_for_room=True) for i in range(12)
    ]
    before = backend.stats()
    found = run(backend, chunks)
    after = backend.stats()
    assert {len(each.tokens) for each in found.values()} == {150}
    assert after.accepted_tokens > before.accepted_tokens
    assert after.preemptions == before.preemptions


def with_embeddings(folder: Path, embeddings: torch.Tensor, **more: torch.Tensor) -> Path:
    """Write the shipped head with embeddings of its own, and other tensors."""
    shutil.copytree(HEAD, folder)
    save_file(head_tensors(HEAD) | {"embed_tokens.weight": embeddings} | more, folder / "model.safetensors")
    return folder


def test_a_heads_embeddings_do_not_replace_the_models(
    expected_ways: dict[str, Results], tmp_path: Path
) -> None:
    """vLLM has a head share the model's as long as both are equal at the start."""
    head = with_embeddings(tmp_path / "head", tensors()["model.embed_tokens.weight"])
    new = changed_head() | {"embed_tokens.weight": 3 * tensors()["model.embed_tokens.weight"]}
    drafts = DraftsConfig(max_draft=MOST, head=str(head), cache=str(tmp_path))
    with engine_of(MODEL, drafts, kv_blocks=BLOCKS) as backend:
        backend._drafting.start_always()
        backend.load_weights(model_with(tmp_path / "with", 1.0, new), "with")
        assert torch.equal(
            made_by(backend)["embed_tokens.weight"], tensors()["model.embed_tokens.weight"][3:5]
        )
        assert in_one_go(backend) == expected_ways["in_one_go"]
        bad = {"fc.weight": torch.zeros(3, 3, dtype=torch.bfloat16)}  # no check lets this come so far
        backend.load_weights(model_with(tmp_path / "bad", 1.0, bad), "bad")
        assert in_one_go(backend) == expected_ways["in_one_go"]


def test_a_head_of_other_tokens_is_refused(tmp_path: Path) -> None:
    table = torch.zeros(8, dtype=torch.int64)
    table[3] = 66
    head = with_embeddings(tmp_path / "head", tensors()["model.embed_tokens.weight"], d2t=table)
    config = json.loads((head / "config.json").read_text()) | {"draft_vocab_size": 8}
    (head / "config.json").write_text(json.dumps(config))
    tensors_of = head_tensors(head)
    tensors_of["lm_head.weight"] = tensors_of["lm_head.weight"][:8].clone()
    save_file(tensors_of, head / "model.safetensors")
    drafts = DraftsConfig(head=str(head), cache=str(tmp_path))
    with pytest.raises(EngineError, match=r"drafts\.head .*d2t"), engine_of(MODEL, drafts, kv_blocks=BLOCKS):
        pass


TWO_RANKS = """
import sys
from pathlib import Path

from engine_cases import engine_of
from heads import HEAD
from shared_engines import MODEL
from ways import BLOCKS, in_one_go

from seer.common.config import DraftsConfig

if __name__ == "__main__":
    found = []
    for head in ("", str(HEAD)):
        drafts = DraftsConfig(max_draft=4, head=head, source="own", cache=sys.argv[1])
        with engine_of(MODEL, drafts, kv_blocks=BLOCKS, tensor_parallel=2, cpu_cores="") as backend:
            backend._drafting.start_always()
            found.append((in_one_go(backend), backend.stats().accepted_tokens))
    (plain, few), (headed, many) = found
    assert many > few, (many, few)
    print("the same" if plain == headed else "different", flush=True)
"""


@pytest.mark.breadth
def test_ranks_run_the_head_together(tmp_path: Path) -> None:
    check_on_two_ranks(tmp_path, TWO_RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_moving_chunk_brings_the_heads_kv(pair: SharedEngines) -> None:
    pytest.importorskip("mooncake.store", reason="needs Mooncake and libibverbs1", exc_type=ImportError)
    settings = {
        "engine.max_model_len": 400, "engine.kv_blocks": 300, "engine.max_num_seqs": 16, "drafts.source": "own",
        "drafts.head": HEAD, "pool.kind": "mooncake", "pool.pull_tokens": 0, "pool.dram_gib": 0.25,
    }  # fmt: skip
    sampling = SamplingParams(max_tokens=160, ignore_eos=True)

    async def rolled(address: str, weights: dict[str, torch.Tensor] | None = None) -> list[list[int]]:
        async with RolloutClient(address, tokenizer=MODEL) as client:
            if weights is not None:
                await client.update_weights((await client.status()).weight_version + 1, weights)
            rollout = await client.submit(texts(6), n=4, sampling=sampling, rollout_number=0)
            found = [each.token_ids.tolist() for group in await rollout.result() for each in group.responses]
            await asyncio.sleep(1.5)
            stats.extend(each.stats for each in (await client.status()).instances)
            return found

    stats: list = []
    expected = await rolled(await asyncio.to_thread(pair.anew, policy="static"))
    stats.clear()
    engines = await asyncio.to_thread(
        SharedEngines, MODEL, 2, *(f"{key}={value}" for key, value in settings.items())
    )
    try:
        address = engines.anew(chunk_size=32, policy="migrate")
        assert await rolled(address) == expected
        good = stats.copy()
        with_head = tensors() | {f"draft.{name}": each.float() for name, each in changed_head().items()}
        assert await rolled(address, with_head) == expected  # the same weights, and a poor head
    finally:
        await asyncio.to_thread(engines.close)
    assert sum(each.pool_tokens for each in good) > 0
    assert not any(each.pool_failures or each.pool_corrupt for each in stats)
    assert sum(each.accepted_tokens for each in good) > 0
