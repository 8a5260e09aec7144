"""Messages whose form is right and whose meaning is odd, made from the types of the wire, by seed.

What a field may hold follows from its type, so that new messages and fields are covered by themselves; what
it means follows from small pools by its name, so that messages meet each other. Most submissions, and parts
of streams and images, are made to fit: else none would get beyond the first check.
"""

from __future__ import annotations

import json
import math
import random
import struct
from functools import cache
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect

from seer.common import prepared_image, wire
from seer.common.blobs import checksum
from seer.common.types import MAX_IMAGE_BYTES, Placed
from seer.common.wire import codec
from seer.common.wire.version import MAJOR

LONG = "n" * 201
"""Longer than what addresses have of a name."""

NAMES = ("h", "t", "t-1", f"{LONG}a", f"{LONG}b", "a/b", "é" * 150, "x" * 512, "buffer", "¦", "\0", "")
TEXTS = ("", "p", "/", "#", "¦", "é" * 300, "x" * 512, "\0", "a/b#1")
"""Of fields without a pool, and now and then of any."""

POOLS: dict[str, tuple[str, ...]] = {
    "rollout_id": ("r", "r", "s", "honest", "p#0", "r" * 450, "é" * 200),
    "prompt_ids": ("p", "q", "0", "p#0", "/", "p/q", ""),
    "groups": ("", "g", "/g", "p", "g/0", "/", "/r/0"),
    "sessions": ("", "s", "t"), "trajectory": ("",),
    "base": ("", "v1", "v2", "v2.delta"),
    "source": ("spool:v1", "spool:v2", "lora::spool:v1", "lora:d:/nowhere", "inplace:v1", "spool:", "/dev/zero", ""),
    "role": ("trainer",), "schema_hash": ("",), "client": ("", "h", "honest"),
    "streams": ("v1", "v2", "v1.part0", "v1.part1", "v2.delta", "v2.delta.part0", "v", "../v"),
}  # fmt: skip
NUMBERS: dict[str, tuple[int, ...]] = {
    "n": (1, 1, 1, 2, 3), "submission": (0, 1, 1, 2, 3, 2**63 - 1), "weight_version": (-1, -1, -1, 0, 1, 2, 7),
    "version": (0, 1, 2, 3, 2**63 - 1), "max_tokens": (1, 2, 7, 40, 40, 300), "seed": (0, 1, 2**63 - 1, -(2**63)),
    "first_indices": (0, 0, 1, 2, 4095), "rollout_number": (0, 1, -1, 2**63 - 1), "prompt_len": (1, 1, 2),
    "incarnation": (0, 1, 2, 2**31, 2**62, -1), "sent": (0, 1, 2, 2**31), "wish": (0, 0, 0, 1, 2, 2**63 - 1),
    "generated": (0, 0, 0, 1, 2), "cap": (1, 40, 2**24), "min_tokens": (0, 1), "top_k": (0, 1, 5),
    "top_logprobs": (0, 2, 20), "prompt_logprobs": (0, 2, 20), "routed_experts_from": (0, 1, 300),
}  # fmt: skip
REALS: dict[str, tuple[float, ...]] = {
    "idle_seconds": (0.0, 1.0, 60.0, 86_400.0), "temperature": (0.0, 1.0), "top_p": (0.5, 1.0), "min_p": (0.0, 0.1),
    "repetition_penalty": (1.0, 2.0), "frequency_penalty": (0.0, 2.0), "presence_penalty": (0.0, -2.0),
}  # fmt: skip
INTS = (0, 0, 1, 1, 2, 3, 7, 64, -1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, 1.0, 1.0, 0.5, 2.0, -1.0, 1e-9, 60.0, 1e308, math.nan, math.inf, -math.inf)
DIMENSIONS = (0, 0, 1, 1, 2, 3, 2**13, 2**20, 2**26, 2**26 + 1, 2**31, 2**40, 2**63 - 1, -1)
RARELY = 0.04
"""How often a field of a pool is anything at all: a message has many, and should get beyond the first."""


class OddMessages:
    """Makes messages about a few images and streams of weights, and the weights in the folder `model`.

    Some are earlier ones with other values in a field or two: orders that no client sends.
    """

    def __init__(self, rng: random.Random, model: str) -> None:
        self.rng = rng
        self.model, self.version = model, 0
        self.said: list[wire.Message] = []
        self.images = [self._image() for _ in range(16)]
        self.weights = self._model()

    def any_of(self, union: Any, weights: dict[str, int]) -> wire.Message:
        """Return a message of one of the types, which are as likely as `weights` say, 2 by default."""
        types = union.__args__
        earlier = [each for each in self.said[-60:] if isinstance(each, types)]
        if earlier and self.rng.random() < 0.3:
            changed = self.rng.choice(earlier)
            fields = self._fields(type(changed))
            few = self.rng.sample(list(fields), min(len(fields), self.rng.choice((0, 0, 1, 1, 2))))
            return msgspec.structs.replace(changed, **{name: fields[name] for name in few})
        (cls,) = self.rng.choices(types, [weights.get(cls.__name__, 2) for cls in types])
        self.said.append(self.message(cls))
        return self.said[-1]

    def message(self, cls: type[wire.Message]) -> wire.Message:
        """Return a message whose fields, each by itself, are what their types allow."""
        fields = self._fields(cls)
        if self.rng.random() < 0.9:
            self._fit(cls, fields)
        return cls(**fields)

    # --- what fits together ----------------------------------------------------------------

    def _fit(self, cls: type, fields: dict[str, Any]) -> None:
        if cls is wire.Hello:
            fields |= {"major": MAJOR, "config_hash": "", "name": self.rng.choice(NAMES)}
        elif "lengths" in fields and "prompt_ids" in fields:
            self._fit_submit(fields)
            if cls is wire.NextPrompts and self.rng.random() < 0.8:
                fields |= {key: [] for key in ("groups", "first_indices", "turns", "sessions", "images")}
        elif cls is wire.UpdateWeights and self.rng.random() < 0.7:
            self.version += 1
            fields |= {"version": self.version, "digest": ""}
            fields["source"] = self.rng.choice((self.model, fields["source"]))
        elif cls in (wire.OpenImage, wire.ImageData, wire.ReadImage):
            name, data = self.rng.choice(self.images)
            start = self.rng.choice((0, 0, 0, 8, len(data)))
            end = self.rng.choice((len(data), len(data), 8, start + 1))
            whole = {"name": name, "size": len(data), "offset": start, "data": data[start:end]}
            fields |= {key: value for key, value in whole.items() if key in fields}
        elif cls in (wire.OpenSpool, wire.SpoolData, wire.ReadSpool):
            self._fit_spool(fields)

    def _fit_spool(self, fields: dict[str, Any]) -> None:
        rng, whole = self.rng, self.weights
        size = rng.choice((*[len(whole)] * 4, len(whole) // 2, 0, 1))
        start = rng.choice((0, 0, 0, len(whole) // 2, 1, len(whole)))
        data = whole[start : rng.choice((len(whole), len(whole), len(whole) // 2, start + 1))]
        fields["name"] = rng.choice(POOLS["streams"]) if rng.random() < 0.5 else "v1"
        part = wire.SPOOL_PART in fields["name"]
        fitting = {
            "size": size, "offset": start, "data": data, "checksum": checksum(data), "start": start * part,
            "whole_size": len(whole) * part, "base": fields.get("base", "") if rng.random() < 0.3 else "",
        }  # fmt: skip
        fields |= {key: value for key, value in fitting.items() if key in fields}

    def _fit_submit(self, fields: dict[str, Any]) -> None:
        rng = self.rng
        fields["prompt_ids"] = ids = list(dict.fromkeys(fields["prompt_ids"]))
        fields["lengths"] = [rng.choice((1, 1, 2, 3, 9, 40)) for _ in ids]
        # The same tokens again and again: turns go on from each other, groups and sessions are shared.
        fields["tokens"] = np.concatenate(
            [np.arange(1, 1 + each, dtype=np.int32) for each in fields["lengths"]] or [np.zeros(0, np.int32)]
        )
        fields["sampling"] = self._sampling(fields["sampling"])
        for name in ("groups", "first_indices", "turns", "sessions", "images"):
            kind = _info(wire.Submit)[name]
            few = [self._value(name, kind.item_type) for _ in ids]
            fields[name] = few if rng.random() < 0.4 else []
        if fields["turns"] or fields["sessions"]:
            fields["n"], fields["open"] = 1, True
            fields["groups"] = [rng.choice(("g", "/g", "p")) for _ in ids]
            fields[rng.choice(("turns", "sessions"))] = []
        names = [name for name, _ in self.images]
        fields["images"] = [
            [Placed(rng.choice(names), 0, rng.choice((1, 1, length)))] for length in fields["lengths"]
        ] if fields["images"] else []  # fmt: skip

    def _sampling(self, odd: Any) -> Any:
        """Return parameters of which most are the usual ones: each odd one would be refused alone."""
        usual = type(odd)(max_tokens=odd.max_tokens)
        names = odd.__struct_fields__
        kept = self.rng.sample(names, self.rng.choice((0, 0, 0, 1, 2)))
        return msgspec.structs.replace(usual, **{name: getattr(odd, name) for name in kept})

    def _image(self) -> tuple[str, np.ndarray]:
        """Return an image's name and bytes; mostly with a sound header, of whatever shapes."""
        rng = self.rng
        tensors = [
            prepared_image._Described(rng.choice("abc"), rng.choice(("F32", "I64")), self._shape())
            for _ in range(rng.choice((1, 1, 1, 2)))
        ]
        tensors.sort(key=prepared_image._rank)
        head = prepared_image._head(prepared_image._Header("image", tensors))
        sizes = [math.prod(each.shape) * (4 if each.dtype == "F32" else 8) for each in tensors]
        size = sum(sizes) if 0 <= sum(sizes) < 4096 else 8
        data = np.frombuffer(head + bytes(size), np.uint8)
        return prepared_image.name_of(data), data

    def _shape(self) -> list[int]:
        pool = self.rng.choice((DIMENSIONS, (0, 1, 2), (0, 2**20, MAX_IMAGE_BYTES)))
        return [self.rng.choice(pool) for _ in range(self.rng.choice((0, 1, 2, 2, 3, 3, 8)))]

    def _model(self) -> np.ndarray:
        """Return a safetensors file, sound or nearly so."""
        rng = self.rng
        dtype, shape = rng.choice(("F32", "F32", "BF16", "X")), rng.choice(([4], [2, 2], [4], self._shape()))
        described = {"dtype": dtype, "shape": shape, "data_offsets": [0, 16]}
        text = json.dumps({rng.choice(("w", "w", "", "x" * 600)): described}).encode()
        return np.frombuffer(struct.pack("<Q", len(text)) + text + bytes(16), np.uint8)

    # --- values by type --------------------------------------------------------------------

    def _fields(self, cls: type) -> dict[str, Any]:
        return {name: self._value(name, kind) for name, kind in _info(cls).items()}

    def _pool(self, pools: dict[str, tuple[Any, ...]], name: str, any_: tuple[Any, ...]) -> tuple[Any, ...]:
        return any_ if self.rng.random() < RARELY else pools.get(name, pools.get(f"{name}s", any_))

    def _within(self, pool: tuple[Any, ...], least: Any, most: Any) -> Any:
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        return self.rng.choice([x for x in pool if low <= x <= high or (low, high) == (-math.inf, math.inf)])

    def _value(self, name: str, kind: Any) -> Any:  # noqa: C901 - a case per type
        rng = self.rng
        few = range(rng.choice((0, 1, 1, 2, 3)))
        match kind:
            case inspect.IntType(gt=None, ge=least, le=most, lt=below):
                most = below - 1 if most is None and below is not None else most
                return self._within(self._pool(NUMBERS, name, INTS), least, most)
            case inspect.FloatType(ge=least, le=most):
                return self._within(self._pool(REALS, name, FLOATS), least, most)
            case inspect.StrType(max_length=most):
                pool = self._pool(POOLS, name, TEXTS)
                return rng.choice([x for x in pool if most is None or len(x) <= most] or ["x" * most])
            case inspect.BoolType():
                return rng.random() < 0.4
            case inspect.LiteralType(values=choices):
                return rng.choice(choices)
            case inspect.NoneType():
                return None
            case inspect.UnionType(types=kinds):
                return self._value(name, rng.choice(kinds))
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                values = [self._value(name, item) for _ in few]
                return values if isinstance(kind, inspect.ListType) else tuple(values)
            case inspect.TupleType(item_types=items):
                return tuple(self._value(name, item) for item in items)
            case inspect.DictType(key_type=key, value_type=value):
                return {self._value(name, key): self._value(name, value) for _ in few}
            case inspect.StructType(cls=cls):
                return cls(**self._fields(cls))
            case str():  # an array of this type
                return np.array([rng.choice((0, 1, 5, 2**7)) for _ in few]).astype(kind)
        raise AssertionError(f"no values for {name}: {kind}")


@cache
def _info(cls: type) -> dict[str, Any]:
    """Return the types of fields by name; of an array, its dtype."""
    arrays = {field.name: codec._DTYPE_OF_FIELD.get(field.type) for field in msgspec.structs.fields(cls)}
    return {field.name: arrays[field.name] or field.type for field in inspect.type_info(cls).fields}
