"""Which tensors of an update are a draft head's: an update may have them, or lack them. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection

PREFIX = "draft."
"""What the names of a head's tensors begin with in an update; a model's own layers keep theirs."""

TABLES = (".d2t", ".t2d")
"""How the names of a head's tables of its tokens end, which no update changes."""

_MODEL = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"
_LAYER, _PREDICTION = re.compile(rf"{_MODEL}layers\.(\d+)\."), re.compile(rf"{_MODEL}mtp\.")


def predicts(name: str, layers: int) -> bool:
    """Whether a tensor is of layers of multi-token prediction: behind the `layers`, or named `mtp`."""
    layer = _LAYER.match(name)
    return _PREDICTION.match(name) is not None or (layer is not None and int(layer[1]) >= layers)


def lacking(optional: Collection[str], given: Collection[str]) -> str:
    """Return a tensor that an update must have, since it has others of the same head; empty: none."""
    for own in (True, False):  # of a model's own layers, and of a folder
        names = [name for name in optional if name.startswith(PREFIX) != own and not name.endswith(TABLES)]
        if any(name in given for name in names):
            return next((name for name in sorted(names) if name not in given), "")
    return ""
