"""LoRA adapters as trainers, buffer and engines exchange them: their sources, settings and digests.

Settings are those that PEFT writes into `adapter_config.json`; a stream has them in its header.

Invariants (tests/unit/test_lora.py):
- a setting that engines do not merge exactly as PEFT is refused by name, also one that is not known here;
- an adapter's digest is a function of its base's digest, its tensors, and the settings that say how it is
  merged; the order in which PEFT lists modules does not count;
- patterns of module names cannot take long to match.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from seer.common.errors import NOT_DECODED
from seer.common.weights.digest import tag_of, tagged
from seer.common.weights.in_place import SCHEME as IN_PLACE_SCHEME
from seer.common.weights.in_place import is_in_place
from seer.common.weights.safetensors import metadata, open_regular

SCHEME = "lora:"
"""Prefix of a `source` of weights that is an adapter: `lora:<digest of its base>:<folder or stream>`."""

CONFIG = "adapter_config.json"

METADATA = "adapter_config"
"""The settings' name in a stream's header."""

MAX_CONFIG_BYTES = 2**20

_NEUTRAL = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "modules_to_save",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
})  # fmt: skip
"""Settings that say how an adapter is trained or which tensors it has: the tensors show that themselves."""

_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""

_PATTERN = re.compile(r"[\w.^$\\\[\]|+*-]{1,200}")
_NESTED = re.compile(r"\[\^?\]?[^\]]*(\[|--|\|\|)")
"""What Python will read as a set of characters within another, and now warns of."""

_MAX_REPEATS = 2
"""Repetitions in a pattern: each multiplies the time of a match by the length of a name."""

N = TypeVar("N", int, float)

_Rank = Annotated[int, msgspec.Meta(ge=1, le=2**16)]


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of PEFT's `LoraConfig` that say how an adapter is merged; make it with `parse_config`."""

    r: _Rank
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank(self, module: str) -> int:
        """Return the rank of a module's pair of matrices."""
        return _of(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor of the product of a module's pair."""
        rank = self.rank(module)
        alpha = _of(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def source_of(inner: str, base: str) -> str:
    """Return the source of an adapter in a folder or stream; `base`: digest of its base, empty: unknown."""
    return f"{SCHEME}{base}:{inner}"


def is_adapter(source: str) -> bool:
    """Return whether a source of weights is an adapter."""
    return source.startswith(SCHEME)


def base_of(source: str) -> str:
    """Return the digest of the base that an adapter's source names; empty: it names none."""
    return source.removeprefix(SCHEME).partition(":")[0]


def inner_source(source: str) -> str:
    """Return the folder or stream that holds an adapter or a plan; another source is returned as it is."""
    if is_in_place(source):
        return source.removeprefix(IN_PLACE_SCHEME)
    return source.removeprefix(SCHEME).partition(":")[2] if is_adapter(source) else source


def digest_of_adapter(base: str, tensors: str, config: LoraConfig) -> str:
    """Return the digest of the weights that a base and an adapter make, by the tag of both their digests."""
    # The first pattern that matches counts, so their order does, too.
    patterns = [list((each or {}).items()) for each in (config.rank_pattern, config.alpha_pattern)]
    merged = [base, tensors, config.r, config.lora_alpha, config.use_rslora, *patterns]
    return tagged(json.dumps(merged).encode(), tag_of(tensors))


def read_config(folder: Path) -> LoraConfig:
    """Return the settings of the adapter in a folder. Raises `ValueError` or `OSError`."""
    try:
        with open_regular(folder / CONFIG) as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        found = [metadata(file).get(METADATA) for file in sorted(folder.glob("*.safetensors"))]
        if len(found) != 1 or found[0] is None:
            raise ValueError(f"has no {CONFIG}: give a folder that PEFT's save_pretrained wrote") from None
        text = found[0].encode()
    return parse_config(text)


def parse_config(text: bytes) -> LoraConfig:
    """Return the settings in the text of PEFT's `adapter_config.json`. Raises `ValueError`."""
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        given = msgspec.json.decode(text, type=dict[str, object])
        config = msgspec.convert(given, LoraConfig)
    except NOT_DECODED as error:
        raise ValueError(f"{CONFIG}: {error}") from error
    own = {field.name for field in msgspec.structs.fields(LoraConfig)}
    for name, value in given.items():
        if name not in own | _NEUTRAL and not _is_supported(name, value):
            raise ValueError(f"{CONFIG}: {name} = {str(value)[:80]!r} is not supported: send merged weights")
    _check_patterns("rank_pattern", config.rank_pattern or ())
    _check_patterns("alpha_pattern", config.alpha_pattern or ())
    return config


def _is_supported(name: str, value: object) -> bool:
    match name:
        case "peft_type":
            return value == "LORA"
        case "bias":
            return value == "none"
        case "init_lora_weights":
            return value in _INITIAL
    return not value  # PEFT's defaults of all others, which change what an adapter does


def _check_patterns(field: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        repeats = pattern.count("*") + pattern.count("+")
        try:
            simple = _PATTERN.fullmatch(pattern) is not None and repeats <= _MAX_REPEATS
            simple = simple and _NESTED.search(pattern) is None and bool(re.compile(pattern))
        except re.error:
            simple = False
        if not simple:
            fix = (
                "give names of modules, with at most two of * and +, and no brackets but [ ], none in others"
            )
            raise ValueError(f"{CONFIG}: {field}: the pattern {pattern[:80]!r} cannot be used: {fix}")


def _of(patterns: dict[str, N], module: str, default: N) -> N:
    """Return the value of the first pattern that a module's name, or the end of it, matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
