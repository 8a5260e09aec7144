"""A tiny random model, made anew for each session, and what tests share of the shipped one.

All tests of this folder have the mark `vllm`, and are collected where the engine extra is.
"""

from __future__ import annotations

import gc
import importlib.util
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shared_engines import MODEL, SharedEngines

if TYPE_CHECKING:
    from ways import Results

    from seer.services.engine.vllm.backend import VllmBackend

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

TINY_VOCAB = 200
TINY_EOS = 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, before `-m` chooses among all."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)


def _make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=TINY_VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=TINY_EOS,
        initializer_range=0.25,  # ten times the usual: distributions that are neither flat nor certain
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    pieces = ["<pad>", "<bos>", "<eos>", *letters, *(a + b for a in letters for b in letters)]
    tokenizer = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces[:TINY_VOCAB])}, unk_token="<pad>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(pieces[:3])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>").save_pretrained(
        folder
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained two-layer Qwen3 of 200 tokens (a-z, then two-letter pieces), float32."""
    folder = tmp_path_factory.mktemp("tiny_model")
    _make_model(folder)
    _make_tokenizer(folder)
    return folder


@pytest.fixture
def backend(engine: VllmBackend) -> Iterator[VllmBackend]:
    """The engine of a file, with nothing of the test before."""
    from engine_cases import clear  # needs the engine extra

    yield engine
    clear(engine)


@pytest.fixture(scope="session")
def pair() -> Iterator[SharedEngines]:
    """Two engines of the shipped model, for tests that need none of their own; begin with `pair.anew()`."""
    in_place = "engine.in_place_updates=true", "engine.in_place_seconds=8"
    shared = SharedEngines(MODEL, 2, "engine.max_model_len=400", "engine.kv_blocks=400", *in_place)
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def expected_ways() -> dict[str, Results]:
    """What each of `WAYS` gives an engine of the shipped model, one step at a time and without drafts."""
    from engine_cases import engine_of  # needs the engine extra
    from interpreted import take_masks_of_any_type
    from ways import BLOCKS, WAYS

    take_masks_of_any_type()
    with engine_of(MODEL, kv_blocks=BLOCKS) as backend:
        assert backend.versions["scheduling"] == "synchronous"
        results = {way.__name__: way(backend) for way in WAYS}
    gc.collect()
    return results
