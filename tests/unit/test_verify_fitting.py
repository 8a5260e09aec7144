"""How cells are fitted to workloads, from one response of one token up."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.config import Config, EngineConfig, PoolConfig, SharedConfig
from seer.verify.cells import CELLS, block_bytes, scarce_pool_bytes
from seer.verify.fitting import DRAFT_SIBLINGS, MOST_RESPONSES, Work, fit, n_for_tokens, peak_blocks

MODEL = {"num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 32}
"""The shipped model's."""

OTHERS = [cell for cell in CELLS.values() if cell.name != "one-go"]
SHORT = Work([8], [[30]])
SIX_BY_FOUR = Work([9] * 6, [[40, 90, 160, 512]] * 6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    engine = EngineConfig(max_model_len=9 + 512 + 32)
    return Config(shared=SharedConfig(model=str(folder)), engine=engine, pool=PoolConfig(kind="mooncake"))


works = st.integers(1, 5).flatmap(
    lambda n: st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(1, 512), min_size=n, max_size=n)),
        min_size=1,
        max_size=16,
    ).map(lambda rows: Work([prompt for prompt, _ in rows], [outputs for _, outputs in rows]))
)


@given(work=works, cell=st.sampled_from(OTHERS))
def test_every_cell_is_fitted_within_bounds_or_has_a_reason(base: Config, work: Work, cell) -> None:
    fitted = fit(cell, base, work, 4)
    if fitted.why:
        assert len(fitted.why) > 10
        return
    prompts = len(work.prompts)
    assert work.n <= fitted.n
    assert fitted.n * prompts <= max(MOST_RESPONSES, work.n * prompts)
    longest = max(map(max, work.outputs))
    size = fitted.cell.buffer.get("chunk_size", 0)
    assert 0 <= size < max(longest, 1)
    assert not cell.exact or size == cell.buffer["chunk_size"]
    assert fitted.cell.needs == cell.needs
    pairs = work.grown(fitted.n)
    if cell.pool:  # some chunk ends between a whole block and the response's end
        ends = [(p + end, o) for p, o in pairs for end in range(size, o, size) if p + end >= 32]
        assert ends
    if cell.scarce and cell.instances == 1 and not cell.disk:
        blocks = fitted.cell.config(base, [p + o for p, o in pairs]).engine.kv_blocks
        assert peak_blocks(pairs, 32) > blocks
    if cell.disk:
        held = scarce_pool_bytes(base) // block_bytes(base, 4)
        assert peak_blocks(pairs, 32, whole=True) > 2 * held


def test_what_failed_where_nothing_failed_is_given_enough_to_do(base: Config) -> None:
    fitted = fit(CELLS["pool-ssd"], base, SIX_BY_FOUR, 4)
    assert fitted.why == ""
    assert 60 <= 6 * fitted.n <= 200  # 24 responses never filled 16 MiB
    two_by_two = Work([8, 8], [[17, 24], [105, 151]])  # as the shipped model answers
    for name in ("preempt", "pool-ssd", "pool-tp-2"):
        assert fit(CELLS[name], base, two_by_two, 4).n > 2


def test_one_short_response_is_enough_for_all_but_what_it_cannot_be(base: Config) -> None:
    fits = {cell.name: fit(cell, base, SHORT, 4) for cell in OTHERS}
    full = "768 such responses at once fit into a KV pool's smallest memory"
    assert {name: each.why for name, each in fits.items() if each.why} == {
        "chunk-64": "no response is longer than 64 tokens",
        "pool-ssd": full,
    }
    assert fits["two-instances"].n >= 2
    assert fits["drafts-right"].n >= DRAFT_SIBLINGS
    assert fits["migrate"].cell.buffer["chunk_size"] == 15
    assert fits["tp-2"].n == 1


def test_what_has_one_token_or_no_whole_block_is_left_out_by_reason(base: Config) -> None:
    one = Work([8, 8], [[1], [1]])
    whys = {cell.name: fit(cell, base, one, 4).why for cell in OTHERS}
    assert whys["chunk-1"] == "no response is longer than 1 tokens"
    assert whys["migrate"] == "no response is longer than one token"
    assert whys["pool-warm"] == "no sequence outgrows a KV block of 32 tokens: there is nothing to share"
    assert not whys["tp-2"]
    assert not whys["preempt"]
    long = msgspec.structs.replace(base, engine=EngineConfig(max_model_len=400_000))
    why = fit(CELLS["preempt"], long, one, 4).why
    assert why == "768 such responses at once fit into the KV memory of one longest sequence"


def test_tokens_are_made_enough_of_within_bounds() -> None:
    assert n_for_tokens(SHORT, 30) == 1
    assert n_for_tokens(SHORT, 300) == 12
    assert n_for_tokens(SHORT, 10**9) == MOST_RESPONSES
    assert n_for_tokens(Work([1] * 1000, [[5]] * 1000), 10**9) == 1


def test_the_most_blocks_at_once() -> None:
    assert peak_blocks([(8, 25)], 32) == 1
    assert peak_blocks([(8, 30)], 32) == 1  # looked at every half block
    assert peak_blocks([(32, 64)] * 3, 32) == 9
    assert peak_blocks([(32, 64)] * 3, 32, whole=True) == 6
    assert peak_blocks([(8, 1)] * 5, 32, whole=True) == 0
