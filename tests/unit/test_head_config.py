"""Which folders are draft heads, and which tensors of an update are a head's."""

import json
from types import SimpleNamespace

import pytest

from seer.common.errors import EngineError
from seer.services.engine.vllm.drafts.head_config import check_head, head_kind, kept_heads, pass_by_heads


@pytest.mark.parametrize(
    ("folder", "architecture", "kind"),
    [
        ("head", "LlamaForCausalLMEagle3", "eagle3"),
        ("head", "Eagle3LlamaForCausalLM", "eagle3"),
        ("head", "EagleLlamaForCausalLM", "eagle"),
        ("EAGLE-LLaMA3-Instruct-8B", "LlamaForCausalLM", "eagle"),
    ],
)
def test_a_heads_kind(tmp_path, folder, architecture, kind):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert head_kind(str(tmp_path / folder)) == kind


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", '{"architectures": null}', '{"architectures": ["Qwen3ForCausalLM"]}']
)
def test_what_is_no_head_is_refused_by_name(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"drafts\.head = .*give"):
        head_kind(str(tmp_path))


@pytest.mark.parametrize("what", ["multi_module", "gemma4", "ranks", "tokens"])
def test_where_a_head_cannot_draft_it_is_refused(what):
    speculative = SimpleNamespace(
        use_multi_module_mtp=lambda: what == "multi_module", use_gemma4_mtp=lambda: what == "gemma4"
    )
    drafts, model = (
        SimpleNamespace(get_vocab_size=lambda size=size: size) for size in (8 + (what == "tokens"), 8)
    )
    speculative.draft_model_config = drafts
    parallel = SimpleNamespace(data_parallel_size=2 if what == "ranks" else 1)
    config = SimpleNamespace(speculative_config=speculative, parallel_config=parallel, model_config=model)
    with pytest.raises(EngineError, match=r"drafts\.head = 'mtp': .*leave it out"):
        check_head("mtp", config)


def test_loads_pass_by_heads_once():
    class Model:
        def load_weights(self, weights):
            return list(weights)

    for _ in range(2):
        pass_by_heads(Model)
    given = [("a", 1), ("draft.fc.weight", 2), ("drafts", 3)]
    assert Model().load_weights(iter(given)) == [("a", 1), ("drafts", 3)]


def test_a_heads_tensors_are_kept_as_they_pass():
    torch = pytest.importorskip("torch")
    drafts = SimpleNamespace(
        method="eagle3", use_ngram=lambda: False, draft_model_config=SimpleNamespace(model="head")
    )
    config = SimpleNamespace(speculative_config=drafts)
    kept, memory = {}, torch.ones(2)
    given = [(name, memory) for name in ("a", "draft.fc", "draft.d2t")]
    assert list(kept_heads(iter(given), kept, config)) == given
    memory.zero_()  # a trainer's, which it goes on with
    assert {name: each.tolist() for name, each in kept.items()} == {"fc": [1.0, 1.0]}
    drafts.method = "mtp"
    config.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2))
    kept.clear()
    names = ["model.layers.1.w", "model.layers.2.w", "lm_head.w", "mtp.fc.w", "draft.fc.w"]
    list(kept_heads(iter((name, memory) for name in names), kept, config))
    assert sorted(kept) == ["model.layers.2.w", "mtp.fc.w"]
    kept.clear()
    for none in (
        None,
        SimpleNamespace(use_ngram=lambda: True),
    ):  # an engine without drafts, or without a head
        config.speculative_config = none
        assert list(kept_heads(iter(given), kept, config)) == given
    assert not kept
