"""A LoRA adapter as a source for `update_weights`: sent alone, merged by each engine.

Invariants (tests/unit/test_lora.py):
- only the adapter is sent; the base is read here for its digest alone, and once while it does not change;
- settings that engines would refuse are refused before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from seer.client.tensor_stream import TensorStream
from seer.common.errors import InvalidField
from seer.common.weights.digest import BLAKE3, digest_of_folder, tag_of
from seer.common.weights.lora import METADATA, digest_of_adapter, parse_config

_DIGEST = re.compile(f"({BLAKE3})?[0-9a-f]{{32}}")


class LoraAdapter:
    """A source for `update_weights`: `adapter` is a folder that all nodes can read, or tensors by name.

    The folder is one that PEFT's `save_pretrained` wrote; the tensors (numpy or torch) are those of PEFT's
    `get_peft_model_state_dict`, and `config` is then the adapter's settings: PEFT's `LoraConfig`, or the
    content of `adapter_config.json`. `base`: folder or digest of the model that the adapter was trained on,
    or its tensors; engines that were started with another model refuse it. A folder needs none: the adapter
    is then merged into the engines' model, if its names and shapes fit. Raises `InvalidField`.
    """

    def __init__(
        self,
        adapter: str | Path | Mapping[str, Any],
        config: object = None,
        *,
        base: str | Path | TensorStream = "",
    ) -> None:
        streamed = isinstance(adapter, Mapping)
        if streamed is (config is None):
            fix = "give the settings of these tensors" if streamed else "leave it out: the folder has it"
            raise InvalidField("config", config, fix)
        if streamed and not str(base):
            fix = "give the folder of the model that the adapter was trained on, or its digest"
            raise InvalidField("base", base, fix)
        self.folder = "" if isinstance(adapter, Mapping) else str(Path(adapter).absolute())
        self.stream: TensorStream | None = None
        self._base = base
        if isinstance(adapter, Mapping):
            text = _encoded(config)
            try:
                self._config = parse_config(text)
            except ValueError as error:
                raise InvalidField("config", "of the adapter", str(error)) from error
            self.stream = TensorStream(adapter, {METADATA: text.decode()})

    def base_digest(self, tag: str = BLAKE3) -> str:
        """Return the base's digest: that given, or by `tag`; empty if no base was. Raises `InvalidField`."""
        if isinstance(self._base, TensorStream):
            self._base = self._base.digest(tag)
        base = str(self._base)
        if not base or _DIGEST.fullmatch(base):
            return base
        try:
            return digest_of_folder(Path(base), tag)
        except (OSError, ValueError) as error:
            raise InvalidField("base", base, f"give a model folder, or a digest: {error}") from error

    def digest(self, tag: str = BLAKE3) -> str:
        """Return the digest of base and adapter, of which all bytes are read; empty for a folder.

        It is by the tag of the base's digest, if that was given.
        """
        if self.stream is None:
            return ""
        base = self.base_digest(tag)
        return digest_of_adapter(base, self.stream.digest(tag_of(base)), self._config)


def _encoded(config: Any) -> bytes:  # noqa: ANN401 - a mapping, or PEFT's own class, which is not imported
    given = config if isinstance(config, Mapping) else config.to_dict()
    try:
        return msgspec.json.encode(dict(given))
    except (TypeError, ValueError) as error:
        raise InvalidField(
            "config", "of the adapter", f"{error}: give what adapter_config.json has"
        ) from error
