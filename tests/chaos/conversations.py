"""Every message type of the wire by the way that it takes, from the unions themselves.

A way is an endpoint and a direction. `missing` lists the types that a campaign never sent, or never
had held up or lost by a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from msgspec.structs import asdict

from seer.common import wire
from seer.common.config import Config

Way = tuple[str, bool, str]
"""Endpoint, whether towards its owner, and the tag of a message."""

COPIES = "copies"
"""The name of all endpoints at which engines send weights on; each incarnation has one of its own."""

UNIONS: dict[tuple[str, bool], object] = {
    ("trainers", True): wire.TrainerToBuffer,
    ("trainers", False): wire.BufferToTrainer,
    ("engines", True): wire.EngineToBuffer,
    ("engines", False): wire.BufferToEngine,
    ("events", False): wire.BufferPublished | wire.Sequenced,
    ("event_snapshots", True): wire.SnapshotAsked,
    ("event_snapshots", False): wire.BufferSnapshotReply,
    ("estimates", False): wire.ContextPublished | wire.Sequenced,  # type: ignore[operator]
    ("estimate_snapshots", True): wire.SnapshotAsked,
    ("estimate_snapshots", False): wire.ContextSnapshotReply,
    ("dgds", True): wire.EngineToDgds,
    ("dgds", False): wire.DgdsToEngine,
    (COPIES, True): wire.EngineToHolder,
    (COPIES, False): wire.HolderToEngine,
}

SELDOM = {(COPIES, False, "Refused")}
"""An engine refuses readers that knew its last incarnation at the same endpoint: no fault need meet that."""

OBSERVED = {
    (name, upward, tag)
    for name in ("event_snapshots", "estimate_snapshots", "dgds")
    for upward, tag in ((True, "StatusRequest"), (False, "ServiceStatus"))
}
"""What observers ask services; nobody else waits for it, and there is none in this world."""

IMAGES = {"OpenImage", "ImageState", "ImageData", "ReadImage"}
"""Of images."""

_NAMES = {endpoint: name for name, endpoint in asdict(Config().endpoints).items()}


def named(way: Way) -> Way:
    """Return a way with its endpoint's name in `[endpoints]`."""
    return _NAMES.get(way[0], COPIES), way[1], way[2]


def every() -> set[Way]:
    """Return all types by way."""
    return {
        (name, upward, each.__name__)
        for (name, upward), union in UNIONS.items()
        for each in (get_args(union) or (union,))
    } - OBSERVED


def missing(ways: Mapping[tuple[str, Way], int]) -> dict[str, list[str]]:
    """Return the types never sent, and those never held up or lost, of these counts by fate and way."""
    seen: dict[str, set[Way]] = {"sent": set(), "held": set(), "lost": set()}
    for fate, way in ways:
        seen[fate].add(named(way))
    lists = {"sent": every() - seen["sent"], "faulted": every() - seen["held"] - seen["lost"] - SELDOM}
    return {
        what: sorted(f"{name} {'up' if up else 'down'} {tag}" for name, up, tag in ways)
        for what, ways in lists.items()
    }
