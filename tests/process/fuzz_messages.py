"""Messages that no honest peer sends, made from the types of the honest ones, by seed.

Headers are plain maps, so that anything can stand anywhere; what a message may hold follows from its
class, so that new messages and fields are covered by themselves. Left out is what an open network cannot
tell from the truth: a later incarnation of a real peer, an engine that can hold work and lies about it, and,
unless `whole`, an update of the weights and a wish that engines sleep.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect

from seer.common import wire
from seer.common.blobs import checksum
from seer.common.net.identity import Identity
from seer.common.wire.version import MAJOR
from seer.services.dgds.packing import group_digest

Frames = list[bytes]

UNIONS: dict[str, Any] = {
    "trainers": wire.TrainerToBuffer,
    "engines": wire.EngineToBuffer,
    "event_snapshots": wire.SnapshotAsked,
    "estimate_snapshots": wire.SnapshotAsked,
    "dgds": wire.EngineToDgds,
}
"""What each ROUTER takes."""

MUTE = {"trainers": wire.StatusRequest, "engines": wire.EngineStatus, "dgds": wire.Fetch}
"""What makes a server answer; elsewhere a `SnapshotRequest` does."""

INTS = (0, 1, -1, 2, 7, 63, 64, 100, 2**16, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e308, float("nan"), float("inf"), float("-inf"))
TRUE = ("UpdateWeights", "Sleep")
"""Types that an open network cannot tell from the truth."""

TRAINERS_WEIGHTS = ("OpenSpool", "SpoolData", "UpdateWeights", "Sleep")
ENGINES_WEIGHTS = ("OpenSpool", "ReadSpool", "WeightsPrepared", "WeightsLoaded", "Slept")
STREAMS = ("v1", "v2", "vx.y", "../v", "")
STREAM_BYTES = 2**16
IMAGES = ("a" * 64, "b" * 64, "../" + "c" * 61, "")

JUNK = (None, True, "x", b"\xff", [], {}, [[]], 1.5, -1)
NOWHERE = {"kv_blocks": 1, "block_size": 1, "max_num_seqs": 1, "max_model_len": 1}
"""A capacity that holds no request, whatever one byte of it becomes."""


class Maker:
    """`known` are ids of real groups, requests and names; grows while they come to be.

    `types` counts messages by type before anything was done to them.
    """

    def __init__(self, rng: random.Random, known: Sequence[str], *, whole: bool = False) -> None:
        self.rng = rng
        self.known = known
        self.types: Counter[str] = Counter()
        left_out = () if whole else TRUE
        self.members = {
            name: [cls for cls in _members(union) if cls.__name__ not in left_out]
            for name, union in UNIONS.items()
        }
        every = [cls for members in self.members.values() for cls in members]
        self.harmless = [cls for cls in every if cls is not wire.Register]  # whatever bit flips
        self.history: list[Frames] = []

    # --- single messages -----------------------------------------------------------------

    def hello(self, who: Identity, **changes: object) -> Frames:
        """Return a Hello, correct but for `changes`."""
        fields = msgspec.structs.asdict(who.hello()) | changes
        return [msgspec.msgpack.encode({"type": "Hello", **fields})]

    def bad_hello(self, who: Identity) -> Frames:
        """Return a Hello of another version, another configuration, another's name, or nonsense."""
        changes: tuple[dict[str, object], ...] = (
            {"major": MAJOR + 1}, {"major": -1}, {"config_hash": "f" * self.rng.choice((16, 5000))},
            {"schema_hash": "s" * 5000}, {"name": "background"}, {"name": "e0"}, {"name": "n" * 513},
            {"incarnation": self.rng.choice(INTS)}, {"sent": self.rng.choice(INTS)}, {"role": "engine"},
        )  # fmt: skip
        return self.hello(who, **self.rng.choice(changes))

    def message(self, cls: type[wire.Message]) -> Frames:
        """Return a message of this type with hostile values."""
        self.types[cls.__name__] += 1
        frames = [b""]
        header = self._struct(_info(cls), frames)
        if cls is wire.Register:
            bad = {self.rng.choice(tuple(NOWHERE)): self.rng.choice((0, -1, 2**31, 2**64 - 1))}
            header |= {"weight_version": 0, "weights_digest": "", "weights_source": "", "wish": 0}
            header["capacity"] = NOWHERE | (bad if self.rng.random() < 0.5 else {})
        frames[0] = msgspec.msgpack.encode({"type": cls.__name__, **header})
        return frames

    def sound(self, socket: str) -> Frames:
        """Return a message that the socket's server acts upon."""
        rng = self.rng
        ids = [rng.choice(self.known) for _ in range(rng.randrange(1, 4))]
        count = rng.randrange(1, 5)
        tokens = b"".join(rng.randrange(100).to_bytes(4, "little") for _ in range(count))
        ref, logprobs = [1, "i4"], [2, "f4"]
        groups, packed = [group_digest(each) for each in ids], tokens[: 3 * count]
        attempt = rng.choice((0, 1, 2, rng.choice(INTS)))
        result = [ids[0], attempt, count, rng.choice(("", "stop", "x")), "", 0, 0]
        submit = {
            "rollout_id": f"f{rng.random()}", "rollout_number": 0, "seed": 0, "n": 1,
            "sampling": {"max_tokens": 2}, "prompt_ids": ["p"], "lengths": [count], "tokens": ref,
        }  # fmt: skip
        some: dict[str, list[tuple[str, dict[str, object], Frames]]] = {
            "trainers": [
                ("Submit", submit, [tokens]),
                ("Cancel", {"rollout_id": ids[0].partition("/")[0], "prompt_ids": []}, []),
                ("Acknowledge", {"rollout_id": ids[0].partition("/")[0], "prompt_ids": ["p0", "p1"]}, []),
            ],
            "engines": [
                ("EngineStatus", {"stats": {}}, []),
                ("ChunkFailed", {"request_id": ids[0], "attempt": attempt, "code": "", "message": "", "fatal": True}, []),
                ("ChunksDone", {"weight_version": 0, "results": [result], "tokens": ref, "logprobs": logprobs},
                 [tokens, tokens]),
            ],
            "dgds": [
                ("AppendBatch", {"appends": [[groups[0], 0, attempt, 0, count]], "tokens": [1, "u1"]}, [packed]),
                ("RegisterGroups", {"groups": [[group, group] for group in groups], "ttl_seconds": 5.0}, []),
                ("Fetch", {"groups": [[groups[0], {0: [rng.choice(INTS), rng.choice(INTS)]}]]}, []),
            ],
        }  # fmt: skip
        some["trainers"] += self._of_weights(*TRAINERS_WEIGHTS)
        some["engines"] += self._of_weights(*ENGINES_WEIGHTS)
        name = rng.choice(IMAGES)
        begun = {"name": name, "size": 4 * count, "offset": rng.choice((0, 0, 4))}
        opened = {"name": name, "size": rng.choice((4 * count, 2**26))}
        placed = [rng.choice(IMAGES), rng.choice((0, 1, -1)), rng.choice((1, count, 2**62))]
        some["trainers"] += [
            ("OpenImage", opened, []),
            ("ImageData", {**begun, "data": [1, "u1"]}, [tokens]),
            ("Submit", {**submit, "images": rng.choice(([[placed]], [], [[placed] * 3]))}, [tokens]),
        ]
        some["engines"].append(("ReadImage", {"name": name, "offset": rng.choice((0, 1, 2**26))}, []))
        tag, fields, arrays = rng.choice(some.get(socket, [("SnapshotRequest", {}, [])]))
        self.types[tag] += 1
        return [msgspec.msgpack.encode({"type": tag, **fields}), *arrays]

    def _of_weights(self, *tags: str) -> list[tuple[str, dict[str, object], Frames]]:
        """Return messages about a stream of weights, and updates, that fit each other now and then."""
        rng = self.rng
        name, size = rng.choice(STREAMS), STREAM_BYTES
        data = rng.randbytes(rng.choice((1, 1000, size // 4)))
        offset, version = rng.choice((0, 1, 1000, size // 4, size)), rng.choice((0, 1, 2, 2**62))
        source = rng.choice((f"spool:{name}", "/nowhere", "/dev/zero", "/proc", "rdma:x"))
        part = np.frombuffer(data, np.uint8)
        sums = rng.choice((checksum(part), 0))
        every: dict[str, tuple[dict[str, object], Frames]] = {
            "OpenSpool": ({"name": name, "size": rng.choice((size, 0, 2**62))}, []),
            "SpoolData": ({"name": name, "offset": offset, "checksum": sums, "data": [1, "u1"]}, [data]),
            "ReadSpool": ({"name": name, "offset": offset}, []),
            "WeightsPrepared": ({"version": version, "digest": rng.choice(("", "d" * 32))}, []),
            "WeightsLoaded": ({"version": version}, []),
            "Slept": ({"asleep": rng.random() < 0.5}, []),
            "UpdateWeights": ({"version": version, "source": source}, []),
            "Sleep": ({"asleep": rng.random() < 0.5}, []),
        }
        allowed = {cls.__name__ for members in self.members.values() for cls in members}
        return [(tag, *every[tag]) for tag in tags if tag in allowed]

    # --- what can be done to them ----------------------------------------------------------

    def made(self, kind: str, socket: str, who: Identity) -> Frames:
        """Return one message of a kind for a socket."""
        frames = self._made(kind, socket, who)
        if len(frames) < 8 and sum(map(len, frames)) < 10_000:
            keep = self.rng.randrange(2000)
            self.history[keep : keep + 1] = [frames]
        return frames

    def _made(self, kind: str, socket: str, who: Identity) -> Frames:
        rng = self.rng
        match kind:
            case "random":
                return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 5))]
            case "hostile":
                return self.message(rng.choice(self.members[socket]))
            case "wrong union":
                return self.sound(rng.choice(tuple(UNIONS)))
            case "replayed" if self.history:
                return rng.choice(self.history)
            case "bad hello":
                return self.bad_hello(who)
            case "oversized":
                return rng.choice(([bytes(2**24 + 1)], [b"x"] * 65, [b""] * 1000, [b"x", bytes(2**24)]))
        frames = self.message(rng.choice(self.harmless)) if rng.random() < 0.5 else self.sound(socket)
        place = rng.randrange(len(frames))
        frame = bytearray(frames[place])
        if kind == "truncated":
            del frame[rng.randrange(len(frame) + 1) :]
        elif kind == "flipped":
            for _ in range(rng.randrange(1, 4)):
                if frame:
                    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        frames[place] = bytes(frame)
        if rng.random() < 0.1:
            rng.shuffle(frames)
        return frames[: rng.randrange(1, len(frames) + 1)] if rng.random() < 0.1 else frames

    # --- values ----------------------------------------------------------------------------

    def _struct(self, info: Any, frames: Frames) -> dict[str, Any]:
        fields = {}
        for field in info.fields:
            chance = self.rng.random()
            if chance > 0.02:
                fields[field.name] = (
                    self.rng.choice(JUNK) if chance > 0.98 else self._value(field.type, frames)
                )
        return fields

    def _value(self, kind: Any, frames: Frames) -> Any:  # noqa: C901 - a case per type
        rng = self.rng
        few = range(rng.choice((0, 1, 1, 2, 3)))
        match kind:
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.IntType():
                return rng.choice(INTS)
            case inspect.FloatType():
                return rng.choice(FLOATS)
            case inspect.StrType():
                return rng.choice((rng.choice(self.known), "", "/", "#", "a/b#1", "é" * 300, "x" * 600))
            case inspect.LiteralType(values=choices):
                return rng.choice((*choices, "nonsense"))
            case inspect.NoneType():
                return None
            case inspect.AnyType() | inspect.RawType():
                return rng.choice(JUNK)
            case inspect.BytesType() | inspect.ByteArrayType():
                return rng.randbytes(rng.choice((0, 8, 600)))
            case inspect.EnumType(cls=choices):
                return rng.choice((*(each.value for each in choices), "nonsense"))
            case inspect.UnionType(types=kinds):
                return self._value(rng.choice(kinds), frames)
            case inspect.SetType(item_type=item) | inspect.FrozenSetType(item_type=item):
                return [self._value(item, frames) for _ in few]
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                return [self._value(item, frames) for _ in few]
            case inspect.TupleType(item_types=items):
                return [self._value(item, frames) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                return {self._value(key, frames): self._value(value, frames) for _ in few}
            case inspect.StructType(array_like=array_like) as inner:
                fields = self._struct(_info(inner.cls), frames)
                return list(fields.values()) if array_like else fields
            case inspect.CustomType():
                return self._array(frames)
        raise AssertionError(f"no values for {kind}")

    def _array(self, frames: Frames) -> Any:
        frames.append(self.rng.randbytes(self.rng.choice((0, 4, 8, 64, 5))))
        index = len(frames) - (self.rng.random() > 0.02)
        return [index, self.rng.choice(("i4", "i4", "i4", "f4", "f4", "u1", "u1", "f8", "O"))]


def _members(union: Any) -> list[type[wire.Message]]:
    return list(getattr(union, "__args__", (union,)))


@cache
def _info(cls: type) -> Any:
    return inspect.type_info(cls)
