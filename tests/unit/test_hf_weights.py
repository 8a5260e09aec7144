"""A model's weights come out as its checkpoint has them, however the trainer holds them."""

import asyncio
import importlib.util
import re
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import torch
import vision_models
from made_up_ranks import MadeUpRanks, on_each
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    HrmTextConfig,
    HrmTextForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import GroupWeightRename, WeightRenaming

from seer.client import SentWeights
from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField, Unreachable, WeightsRefused
from seer.integrations import checkpoint_names
from seer.integrations.checkpoint_names import CheckpointCopy, checkpoint_tensors
from seer.services.engine.weights.manifest import read_manifest

pytestmark = pytest.mark.vllm

SMALL = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1,
}  # fmt: skip


def qwen(folder: Path, tied: bool = False) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    return model


def made(family: str, folder: Path) -> PreTrainedModel:
    """Make a model of a family.

    Mixtral fuses tensors in memory, HRM-Text in its checkpoint; `renamed` has names that depend on others.
    """
    if family == "qwen":
        return qwen(folder, tied=True)
    if family == "renamed":
        model = qwen(folder)
        model._weight_conversions = [
            GroupWeightRename(["attn.j_proj", "attn.k_proj"], ["attn.k_proj", "attn.v_proj"])
        ]
    elif family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2))
    elif family == "hrm":
        small = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
        model = HrmTextForCausalLM(HrmTextConfig(**small, head_dim=8))
    else:
        vision_models.make(family, folder)
        return AutoModelForImageTextToText.from_pretrained(folder)
    model.save_pretrained(folder)
    return model


def assert_same(ours: dict, folder: Path) -> None:
    """What is streamed has the digest of the folder: names, types, shapes and contents."""
    assert ours.keys() == load_file(folder / "model.safetensors").keys()
    assert TensorStream(ours).digest() == read_manifest(folder).digest


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_tied_weights_are_sent_if_the_checkpoint_has_them(tmp_path, prefix):
    """`prefix`: of the name in the checkpoint; Llava's has none in memory."""
    model = qwen(tmp_path, tied=True)
    model._weight_conversions = [WeightRenaming(f"^{prefix}lm_head", "lm_head")]
    ours = checkpoint_tensors(model, model.state_dict(), tmp_path)
    assert "lm_head.weight" not in ours
    assert_same(ours, tmp_path)

    stored = load_file(tmp_path / "model.safetensors")  # as some published checkpoints have it
    lm_head = {f"{prefix}lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(stored | lm_head, tmp_path / "model.safetensors")
    assert_same(checkpoint_tensors(model, model.state_dict(), tmp_path), tmp_path)


def test_wrappers_leave_no_trace(tmp_path):
    model = qwen(tmp_path)
    compiled = torch.compile(model).state_dict()
    assert any(name.startswith("_orig_mod.") for name in compiled)
    assert_same(checkpoint_tensors(model, compiled, tmp_path), tmp_path)
    both = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    assert_same(checkpoint_tensors(model, both, tmp_path), tmp_path)


def test_types_are_the_checkpoints(tmp_path):
    model = qwen(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert_same(checkpoint_tensors(model.float(), model.state_dict(), tmp_path), tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "hrm"])
def test_fused_tensors_are_taken_apart_or_put_together(tmp_path, family):
    model = made(family, tmp_path)
    ours = checkpoint_tensors(model, model.state_dict(), tmp_path)
    assert ours.keys() != model.state_dict().keys()
    assert_same(ours, tmp_path)


def test_a_tensor_of_one_side_alone_is_named(tmp_path):
    model = qwen(tmp_path)
    state = model.state_dict()
    missing = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    with pytest.raises(InvalidField, match=r"has a tensor model\.norm\.weight, which the trainer's lacks"):
        checkpoint_tensors(model, missing, tmp_path)
    with pytest.raises(InvalidField, match=r"lacks a tensor value_head, which the trainer's has"):
        checkpoint_tensors(model, {**state, "value_head": torch.zeros(1)}, tmp_path)


def test_a_folder_that_is_no_plain_checkpoint_is_refused(tmp_path):
    model = qwen(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidField, match="give the folder of safetensors"):
        checkpoint_tensors(model, model.state_dict(), tmp_path / "empty")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "model" / "model.safetensors")
    with pytest.raises(InvalidField, match=r"tensor lm_head\.weight is F8_E4M3"):
        checkpoint_tensors(model, model.state_dict(), tmp_path / "model")


def copy_of(
    model: PreTrainedModel, folder: Path, *, tied: bool = False, ranks: MadeUpRanks | None = None, own=False
) -> CheckpointCopy:
    copy = CheckpointCopy(folder, "trainer.model", tied=tied, model=model if own else None, ranks=ranks)
    for name, tensor in model.state_dict().items():
        copy.add(name, tensor.double())
    return copy


def test_tensors_that_come_one_by_one_are_copied_as_the_checkpoint_has_them(tmp_path):
    model = qwen(tmp_path, tied=True)
    copy = copy_of(model, tmp_path, tied=True)
    with torch.no_grad():
        model.model.norm.weight.add_(1)  # what was handed out is not a view
    assert_same(copy.tensors(), tmp_path)


@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_tensors_that_come_under_names_in_memory_are_those_of_the_checkpoint(tmp_path, family):
    """As veRL hands them out; Qwen2-VL has other names in memory than in checkpoints."""
    vision_models.make(family, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert_same(copy_of(model, tmp_path).tensors(), tmp_path)


@pytest.mark.parametrize(
    ("family", "own"),
    [*product(["qwen", "mixtral", "hrm", *vision_models.FAMILIES], [False, True]), ("renamed", True)],
)
def test_ranks_to_which_all_comes_copy_and_send_a_share_each(tmp_path, family, own):
    """`own`: the copy is given the model, as TRL's are."""
    model = made(family, tmp_path)
    tied = family == "qwen" and not own
    copies = on_each(
        MadeUpRanks.all_of(3), lambda rank: copy_of(model, tmp_path, tied=tied, ranks=rank, own=own)
    )
    shards = on_each(copies, CheckpointCopy.source)
    [digest] = set(on_each(shards, lambda each: SentWeights().plan(each.stream, None, each).digest))
    assert digest == read_manifest(tmp_path).digest
    sent = [sum(entry.size for entry in each.stream.own(rank)) for rank, each in enumerate(shards)]
    assert sum(sent) == sum(each.nbytes for each in load_file(tmp_path / "model.safetensors").values())
    assert max(sent) < 0.6 * sum(sent) or family == "hrm"  # whose parts wait for each other on one rank

    copies[1].add("added.weight", torch.zeros(1))  # to one rank, which has no more names than its share
    assert not any(isinstance(each, Exception) for each in on_each(copies, CheckpointCopy.source))
    copies[0].add("added.weight", torch.zeros(1))
    found = on_each(copies, CheckpointCopy.source)
    assert all("lacks a tensor added.weight" in str(each) for each in found), found


def test_what_one_rank_cannot_copy_is_an_error_of_all_once_all_was_handed_out(tmp_path):
    """A rank that raised at once would leave the others in what hands out the next tensor."""
    model = qwen(tmp_path)
    copies = on_each(MadeUpRanks.all_of(2), lambda rank: copy_of(model, tmp_path, ranks=rank))
    copies[1].add("model.norm.weight", None)
    found = on_each(copies, CheckpointCopy.source)
    assert all(re.search("tensors of rank 1.*detach", str(each)) for each in found), found


@pytest.mark.parametrize("has", ["none", "another"])
def test_a_rank_with_another_checkpoint_or_none_says_so_to_all_before_tensors_are_handed_out(tmp_path, has):
    """To hand them out is collective: a rank that raised alone would leave the others in there."""
    qwen(tmp_path / "0")
    (tmp_path / "1").mkdir()
    if has == "another":
        qwen(tmp_path / "1").half().save_pretrained(tmp_path / "1")
    found = on_each(
        MadeUpRanks.all_of(2),
        lambda rank: CheckpointCopy(tmp_path / str(rank.rank), "trainer.model", tied=False, ranks=rank),
    )
    why = "tensors of rank 1.*trainer.model.*safetensors" if has == "none" else "the same checkpoint"
    assert all(isinstance(each, InvalidField) and re.search(why, str(each)) for each in found), found


class Client:
    """`errors`: by endpoint, what connecting fails with; by engine, why all updates are refused."""

    def __init__(self, errors, endpoint, deltas):
        self.errors, self.endpoint = errors, endpoint

    async def __aenter__(self):
        if self.endpoint in self.errors:
            raise self.errors[self.endpoint]
        return self

    async def __aexit__(self, *_):
        pass

    async def status(self):
        return SimpleNamespace(weight_version=3)

    async def update_weights(self, version, source):
        raise WeightsRefused(version, self.errors)


@pytest.mark.parametrize(("whose", "kind"), [("engine-0", InvalidField), ("", WeightsRefused)])
async def test_another_model_is_named_only_if_an_engine_refused_the_weights(
    tmp_path, monkeypatch, whose, kind
):
    monkeypatch.setattr(checkpoint_names, "RolloutClient", partial(Client, {whose: "the reason"}))
    with pytest.raises(kind, match="the reason") as found:
        await copy_of(qwen(tmp_path), tmp_path).send("here")
    assert ("start Seer with the same model" in str(found.value)) == bool(whose)


@pytest.mark.parametrize("error", [Unreachable("there is no buffer"), OSError("too many open files")])
async def test_a_rank_that_cannot_update_says_so_to_all(tmp_path, monkeypatch, error):
    monkeypatch.setattr(checkpoint_names, "RolloutClient", partial(Client, {"cut off": error}))
    model = qwen(tmp_path)
    copies = on_each(MadeUpRanks.all_of(2), lambda rank: copy_of(model, tmp_path, ranks=rank))
    sent = [copy.send(endpoint) for copy, endpoint in zip(copies, ("here", "cut off"), strict=True)]
    found = await asyncio.gather(*sent, return_exceptions=True)
    why = f"rank 1 cannot update: {error}"
    assert all(isinstance(each, Unreachable) and why in str(each) for each in found), found


def test_tensors_that_only_one_side_has_are_named_at_the_end(tmp_path):
    model = qwen(tmp_path)
    lacking = CheckpointCopy(tmp_path, "trainer.model", tied=False)
    with pytest.raises(InvalidField, match=r"trainer.model.*has a tensor lm_head.weight"):
        lacking.source()
    copy = copy_of(model, tmp_path)
    copy.add("added.weight", torch.zeros(1))
    with pytest.raises(InvalidField, match=r"trainer.model.*lacks a tensor added.weight"):
        copy.source()
    with pytest.raises(InvalidField, match=r"trainer.model"):
        CheckpointCopy(tmp_path / "none", "trainer.model", tied=False)
