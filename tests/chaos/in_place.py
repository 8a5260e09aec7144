"""Weights in place in a virtual run: a plan for each version, and no bytes behind it."""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from seer.client import SharedTensors
from seer.client.tensor_stream import TensorStream
from seer.common.weights.in_place import PLAN, Bucket, Plan, PlannedTensor, SharedFile

NO_BYTES = "bucket 1 of 1: the trainer sends nothing"
"""What an engine says now and then, as if that were so."""


class Planned(SharedTensors):
    """The weights of a version; all tries of it have one plan, so that a version has one digest."""

    def __init__(self, version: int) -> None:
        super().__init__({})
        self._version = version

    def offer(self, name: str) -> TensorStream:
        """See `InPlace.offer`."""
        return planned(self._version)


@functools.cache
def planned(version: int) -> TensorStream:
    """Return the stream with the plan of a version."""
    tensor = PlannedTensor("w", "F32", (1000,), 0)
    plan = Plan(f"v{version}", "shared", [Bucket(4000, [tensor], SharedFile("psm_none"))])
    return TensorStream({PLAN: np.frombuffer(msgspec.json.encode(plan), np.uint8)})
