"""Messages to frames and back: frame 0 is the msgpack header, each array is a frame of its own.

Invariants:
- arrays are never copied: `encode` returns views of them, `decode` returns read-only views of the received
  frames (except unaligned frames, and arrays above `SPLIT_BYTES`, which are joined);
- whatever bytes arrive, `decode` returns a message of its union or raises `WireError`;
- every frame is accounted for: exactly one array refers to it, with the dtype its field names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from seer.common import wire
from seer.common.errors import NOT_DECODED, WireError
from seer.common.net.transport.base import Frame

M = TypeVar("M")

_Array = npt.NDArray[Any]
_MAX_TEXT = 200
"""Most characters of msgspec's error texts: they quote what was received."""

_DTYPE_OF_FIELD: dict[object, str] = {wire.Tokens: "i4", wire.Logprobs: "f4", wire.Bytes: "u1"}
_DTYPES = ("<i4", "<f4", "|u1")
_UNIONS = (
    wire.TrainerToBuffer,
    wire.BufferToTrainer,
    wire.EngineToBuffer,
    wire.BufferToEngine,
    wire.Sequenced,
    wire.BufferPublished,
    wire.ContextPublished,
    wire.SnapshotAsked,
    wire.BufferSnapshotReply,
    wire.ContextSnapshotReply,
    wire.EngineToDgds,
    wire.DgdsToEngine,
    wire.NodeToLeader,
    wire.LeaderToNode,
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what one message may make a reader hold. Bytes and counts."""

    max_header_bytes: int = 16 * 2**20
    max_frames: int = 64
    max_frame_bytes: int = 64 * 2**20


_DEFAULT = Limits()

OF_SERVER = Limits(max_frames=2**16)
"""A client trusts its server: a buffer bounds results as a whole, and one may have many arrays of GiBs."""

SPLIT_BYTES = 32 * 2**20
"""Larger arrays are sent in several frames: libzmq holds at most one frame of an unknown peer at once."""


def encode(message: wire.Message) -> list[Frame]:
    """Return the header and one zero-copy view per array; do not change the arrays afterwards.

    Raises `WireError` for an array that is not one-dimensional int32, float32 or uint8.
    """
    frames: list[Frame] = [b""]

    def refer(value: object) -> tuple[int, str] | tuple[int, str, int]:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} has no wire form")
        data, first, dtype = _bytes_of(value), len(frames), value.dtype.str[1:]
        frames.extend(data[at : at + SPLIT_BYTES] for at in range(0, max(1, len(data)), SPLIT_BYTES))
        return (first, dtype) if len(frames) == first + 1 else (first, dtype, len(frames) - first)

    try:
        frames[0] = msgspec.msgpack.encode(message, enc_hook=refer)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot encode {type(message).__name__}: {error}") from error
    return frames


def _bytes_of(array: _Array) -> memoryview:
    if array.ndim != 1 or array.dtype.str not in _DTYPES:
        raise TypeError(
            f"array of {array.dtype} {array.shape}: give one dimension of int32, float32 or uint8"
        )
    return np.ascontiguousarray(array).view(np.uint8).data


class Decoder(Generic[M]):
    """Reads one direction's messages; `union` is a message type or a union of them."""

    def __init__(self, union: object, limits: Limits = _DEFAULT) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union, dec_hook=self._resolve)
        self._limits = limits
        self._unread: dict[int, Frame] = {}

    def decode(self, frames: Sequence[Frame]) -> M:
        """Return the message; raises `WireError` saying what is wrong with it and where."""
        self._check_sizes(frames)
        self._unread = dict(enumerate(frames[1:], start=1))
        try:
            message = self._decoder.decode(frames[0])
        except NOT_DECODED as error:
            raise WireError(f"malformed message: {str(error)[:_MAX_TEXT]}") from error
        else:
            if self._unread:
                raise WireError(f"malformed message: no array refers to frames {sorted(self._unread)}")
            return message
        finally:
            self._unread = {}

    def _check_sizes(self, frames: Sequence[Frame]) -> None:
        limits = self._limits
        if not 1 <= len(frames) <= limits.max_frames:
            raise WireError(f"message of {len(frames)} frames: must have 1 to {limits.max_frames}")
        bound = limits.max_header_bytes
        for index, frame in enumerate(frames):
            if len(frame) > bound:
                raise WireError(f"frame {index} of {len(frame)} bytes: at most {bound} are accepted")
            bound = limits.max_frame_bytes

    def _resolve(self, field: object, reference: object) -> _Array:
        # msgspec turns ValueError into a ValidationError that names the field's path.
        dtype = _DTYPE_OF_FIELD[field]
        match reference:
            case [int() as index, str() as sent] if sent == dtype and index in self._unread:
                frame = self._unread.pop(index)
            case [int() as index, str() as sent, int() as count] if (
                sent == dtype
                and 1 < count <= len(self._unread)
                and all(part in self._unread for part in range(index, index + count))
            ):
                frame = b"".join(self._unread.pop(part) for part in range(index, index + count))
            case _:
                raise ValueError(f"{str(reference)[:80]} does not refer to an unread frame of {dtype}")
        width = int(dtype[1:])
        if len(frame) % width:
            raise ValueError(f"frame {index} of {len(frame)} bytes: must be a multiple of {width}")
        array = np.frombuffer(frame, dtype=f"<{dtype}")
        if not array.flags.aligned:
            array = array.copy()
        array.flags.writeable = False
        return array


def _schema_hash() -> str:
    # Descriptions are docstrings: rewording one changes nothing on the wire.
    schemas = msgspec.json.schema_components(_UNIONS, schema_hook=lambda _: {"type": "array"})
    text = json.dumps(_without_descriptions(schemas), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _without_descriptions(node: object) -> object:
    if isinstance(node, dict):
        return {
            key: _without_descriptions(value)
            for key, value in node.items()
            if not (key == "description" and isinstance(value, str))
        }
    if isinstance(node, list | tuple):
        return [_without_descriptions(item) for item in node]
    return node


SCHEMA_HASH = _schema_hash()
"""Digest of every message's schema; peers of one major that differ in it are told apart in logs."""
