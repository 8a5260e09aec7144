"""Which trained head drafts (`drafts.head`), and which tensors of an update are the head's."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from seer.common.errors import EngineError
from seer.services.engine.weights.draft_heads import PREFIX, TABLES, predicts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    Tensors = Iterator[tuple[str, torch.Tensor]]

MTP = "mtp"
"""A model's own layers of multi-token prediction, as `drafts.head`."""


def head_kind(folder: str) -> str:
    """Return vLLM's name for the kind of a head, `eagle3` or `eagle`. Raises `EngineError` for others."""
    try:
        architectures = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        name = " ".join([*architectures, Path(folder).name]).lower()
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        fix = f"give {MTP}, or the folder of a head whose config.json names its architectures"
        raise EngineError(f"drafts.head = {folder!r}: {type(error).__name__}: {error}; {fix}") from error
    kind = next((kind for kind in ("eagle3", "eagle") if kind in name), "")
    if not kind:
        fix = f"give an EAGLE or EAGLE-3 head; for a model's own layers of multi-token prediction, set {MTP}"
        raise EngineError(f"drafts.head = {folder!r} is of {architectures}: {fix}")
    return kind


def check_head(head: str, config: VllmConfig) -> None:
    """Raise `EngineError` where a head cannot draft."""
    why = ""
    if config.speculative_config.use_multi_module_mtp() or config.speculative_config.use_gemma4_mtp():
        why = "this model's layers of prediction are of a kind that is not known here"
    elif (drafts := config.speculative_config.draft_model_config.get_vocab_size()) != (
        known := config.model_config.get_vocab_size()
    ):
        why = f"it has {drafts} tokens, the model {known}"
    elif config.parallel_config.data_parallel_size > 1:
        why = "the heads of data-parallel ranks would wait for each other"
    if why:
        raise EngineError(f"drafts.head = {head!r}: {why}; leave it out, and trees draft alone")


def head_folder(config: VllmConfig) -> Path | None:
    """Return where an engine's head was read from, which may be the model's folder; None: it has no head."""
    speculative = config.speculative_config
    return (
        None if speculative is None or speculative.use_ngram() else Path(speculative.draft_model_config.model)
    )


def pass_by_heads(kind: type[torch.nn.Module]) -> None:
    """Have loads of this class of models pass by tensors of heads."""
    load = kind.load_weights
    if hasattr(load, "passes_by_heads"):
        return

    @functools.wraps(load)
    def passing(model: torch.nn.Module, weights: Tensors, *given: object, **named: object) -> object:
        own = ((name, tensor) for name, tensor in weights if not name.startswith(PREFIX))
        return load(model, own, *given, **named)

    passing.passes_by_heads = True  # type: ignore[attr-defined]
    kind.load_weights = passing


def kept_heads(tensors: Tensors, heads: dict[str, torch.Tensor], config: VllmConfig) -> Tensors:
    """Return the tensors; copies of the head's, if there is a head, are put into `heads` as they come."""
    for name, tensor in tensors:
        if is_heads(name, config):
            heads[name.removeprefix(PREFIX)] = tensor.clone()
        yield name, tensor


def heads_in(folder: Path, config: VllmConfig) -> Tensors:
    """Return the head's tensors in a weights folder, by the names that its loader knows."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if is_heads(name, config):
                    yield name.removeprefix(PREFIX), tensors.get_tensor(name)


def is_heads(name: str, config: VllmConfig) -> bool:
    """Whether a tensor is the head's that an engine has; tables of its tokens stay as they are."""
    if head_folder(config) is None:
        return False
    if config.speculative_config.method == MTP:
        return predicts(name, config.model_config.hf_text_config.num_hidden_layers)
    return name.startswith(PREFIX) and not name.endswith(TABLES)
