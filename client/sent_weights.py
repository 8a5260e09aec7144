"""What a client sent last, and whether of its next weights only that is sent which differs.

Of tensors that all ranks of a trainer send, each rank keeps and compares those that it sends.

Invariants (tests/property/test_delta.py, tests/cluster/test_weight_deltas.py):
- what is kept is what the engines have: it changes once an update is live, and not before;
- all ranks decide alike, lay a delta out alike, and find the digest of the same tensors sent by one client;
- memory is that of one copy of the tensors, taken only while twice as much is free;
- a delta is sent if it has at most `PAYS` of the stream's bytes, or if the trainer names its base. After one
  that does not pay, which is logged, nothing is kept or compared for `REST` updates.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from seer.client.tensor_stream import Entry, Tensor, TensorStream, bytes_of, entries_of, hash_of
from seer.common.process.log import get_logger
from seer.common.process.memory_limit import free_bytes
from seer.common.weights.delta import BASE, GAPS, VALUES, WHOLE, Changes, changes
from seer.common.weights.digest import BLAKE3, digest_of
from seer.common.wire import Bytes

PAYS = 0.5
"""Largest share of a stream's bytes for which a delta is sent: making and applying one costs time, too."""

REST = 16
"""Updates without a look at deltas after one that did not pay, as in float32, where each step changes all."""

T = TypeVar("T")

_log = get_logger()


class Together(Protocol):
    """The ranks that send one stream."""

    @property
    def rank(self) -> int:
        """Number of the rank that asks."""

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Return what `work` returns on each rank, or raise on all."""


class Alone:
    """A client that sends all of a stream."""

    rank = 0

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """See `Together.on_all`."""
        return [work()]


ALONE = Alone()


@dataclass(slots=True)
class _Kept:
    """A stream: its name in the spool, its version and header, hash and bytes of own tensors by name.

    `tag`: of the hashes.
    """

    head: Bytes
    tag: str
    hashes: dict[str, bytes]
    data: dict[str, Bytes]
    name: str = ""
    version: int = -1


class _State(NamedTuple):
    """Of one rank: why there can be no delta, what it sent last, for how many updates it rests."""

    why: str
    name: str
    rest: int
    enabled: bool


@dataclass(slots=True)
class Plan:
    """How a stream is sent: its digest, the delta to the stream `base`, if there is one, and `why` not.

    `keep`: deltas to this stream may follow. `kept`: the copy that is to become this stream.
    """

    stream: TensorStream
    digest: str = ""
    delta: TensorStream | None = None
    base: str = ""
    keep: bool = False
    why: str = ""
    kept: _Kept | None = None
    hashes: dict[str, bytes] = field(default_factory=dict)
    found: dict[str, Changes | None] = field(default_factory=dict)
    """By own tensor that differs: how; None: replace the whole tensor."""


class Sending(NamedTuple):
    """Bytes that were sent, of those that a whole stream has, and `why` it was whole; empty: a delta was."""

    sent: int
    of: int
    why: str


class SentWeights:
    """What one client, or several in turn, sent. `enabled` False: nothing is kept, and all is sent whole.

    Functions block.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._sent: _Kept | None = None
        self._rest = 0
        self.last = Sending(0, 0, "nothing was sent yet")
        """How the last tensors that are live were sent."""

    def plan(
        self, stream: TensorStream, base: int | None, ranks: Together = ALONE, tag: str = BLAKE3
    ) -> Plan:
        """Return how to send a stream. `base`: the version that a delta has to be to; None: if it pays.

        `tag`: of the digest.
        """
        states = ranks.on_all(lambda: self._state(stream, base, ranks.rank, tag))
        why = next((each.why for each in states if each.why), "")
        if len({each.name for each in states}) > 1:
            why = why or "not all ranks sent the same tensors last"
        if not why and self._sent is not None:
            plan = self._compared(stream, self._sent, ranks, forced=base is not None)
            if plan.delta is None:
                self._rest, self._sent = REST, None
                _log.info("weights are sent whole", updates=REST + 1, why=plan.why)
            return plan
        rest = max(each.rest for each in states)
        self._rest, self._sent = max(0, rest - 1), None
        keep = all(each.enabled for each in states) and (not rest or base is not None)
        if keep and not _has_room(stream, ranks):
            keep, why = False, f"a copy of {stream.size} bytes to compare with would leave too little memory"
        kept: dict[str, Bytes] = {}

        def look(entry: Entry, data: Bytes) -> bytes:
            if keep:
                kept[entry.name] = data.copy() if _is_view(entry.tensor) else data
            return hash_of(entry, data, tag)

        hashes = ranks.on_all(lambda: stream.each(look, ranks.rank))
        plan = Plan(stream, _digest(hashes, tag), keep=keep, why=why)
        if keep:
            plan.kept = _Kept(stream.head, tag, hashes[ranks.rank], kept)
        return plan

    def live(self, plan: Plan, name: str, version: int, *, whole: bool) -> None:
        """Note that a planned stream is live under a name; `whole`: all of it was sent."""
        size = plan.stream.size
        sent = size if plan.delta is None or whole else plan.delta.size
        why = plan.why or ("the buffer or an engine could not apply the delta" if sent == size else "")
        self.last = Sending(sent, size, why)
        self._sent = None  # if it fails midway
        if (known := plan.kept) is None:
            return
        own = [entry for entry in plan.stream.entries if entry.name in plan.found]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda entry: _renew(known.data[entry.name], plan.found[entry.name], entry), own))
        known.hashes |= plan.hashes
        known.name, known.version = name, version
        self._sent = known

    def forget(self) -> None:
        """Keep nothing: other weights became live."""
        self._sent = None

    def _state(self, stream: TensorStream, base: int | None, rank: int, tag: str) -> _State:
        sent = self._sent
        why, name = "", "" if sent is None else sent.name
        if not self._enabled:
            why = "deltas are switched off"
        elif sent is None:
            rests = "the last delta did not pay" if self._rest and base is None else ""
            why = rests or "no earlier tensors of this client are live"
        elif base not in (None, sent.version):
            why = f"base {base} is not what this client sent last, version {sent.version}"
        elif tag != sent.tag:
            why = "digests of weights are computed by another function than before"
        elif not np.array_equal(sent.head, stream.head) or sent.data.keys() != {
            entry.name for entry in stream.own(rank)
        }:
            why = "names, types, shapes or ranks of tensors changed"
        return _State(why, name, self._rest, self._enabled)

    def _compared(self, stream: TensorStream, sent: _Kept, ranks: Together, *, forced: bool) -> Plan:
        most = stream.size if forced else int(PAYS * stream.size)
        plan = Plan(stream, base=sent.name, keep=True, kept=sent)
        sizes: list[int] = []

        def look(entry: Entry, data: Bytes) -> bytes:
            if sum(sizes) > most and not forced:
                return hash_of(entry, data, sent.tag)
            differs = changes(sent.data[entry.name], data, entry.tensor.dtype.itemsize)
            if differs is not None and not len(differs.gaps):
                return sent.hashes[entry.name]
            plan.found[entry.name] = differs
            sizes.append(entry.size if differs is None else differs.size)
            return hash_of(entry, data, sent.tag)

        def own() -> tuple[dict[str, bytes], int, dict[str, _Shape | None]]:
            hashes = stream.each(look, ranks.rank)
            return hashes, sum(sizes), {name: _shape(each) for name, each in plan.found.items()}

        parts = ranks.on_all(own)
        plan.digest, plan.hashes = _digest([hashes for hashes, *_ in parts], sent.tag), parts[ranks.rank][0]
        if forced or sum(size for _, size, _ in parts) <= most:
            found = {name: each and _blank(*each) for *_, shapes in parts for name, each in shapes.items()}
            plan.delta = _stream_of(stream, found | plan.found, sent.name)
            if forced or plan.delta.size <= most:
                return plan
        why = f"a delta does not pay: it would have more than {most} of {stream.size} bytes"
        return Plan(stream, plan.digest, why=why)


def sent_weights(deltas: SentWeights | bool) -> SentWeights:
    """Return what a client is given as `deltas`: that of an earlier one, or whether to send any."""
    return SentWeights(enabled=deltas) if isinstance(deltas, bool) else deltas


def _digest(hashes: list[dict[str, bytes]], tag: str) -> str:
    return digest_of({name: each for own in hashes for name, each in own.items()}, tag)


def _has_room(stream: TensorStream, ranks: Together) -> bool:
    """Return whether on each machine its ranks' copies would leave as much memory free."""
    size = sum(entry.size for entry in stream.own(ranks.rank))
    found = ranks.on_all(lambda: (platform.node(), size, free_bytes()))
    return all(
        free >= 2 * sum(other for there, other, _ in found if there == node) for node, _, free in found
    )


_Shape = tuple[str, str, int]
"""Of a tensor's changes: types of gaps and values, and how many there are."""


def _shape(differs: Changes | None) -> _Shape | None:
    if differs is None:
        return None
    return differs.gaps.dtype.str, differs.values.dtype.str, len(differs.gaps)


def _blank(gaps: str, values: str, count: int) -> Changes:
    """Return what stands for changes that another rank sends; it takes no memory."""
    return Changes(np.broadcast_to(np.zeros((), gaps), count), np.broadcast_to(np.zeros((), values), count))


def _stream_of(stream: TensorStream, found: dict[str, Changes | None], base: str) -> TensorStream:
    if not found:  # a stream has at least one tensor
        first = stream.entries[0]
        found = {first.name: Changes(np.empty(0, "u1"), np.empty(0, f"u{first.tensor.dtype.itemsize}"))}
    parts: list[Entry] = []
    owners: dict[str, int] = {}
    for entry in stream.entries:
        if entry.name not in found:
            continue
        if (differs := found[entry.name]) is None:
            own = [replace(entry, name=WHOLE + entry.name)]
        else:
            own = entries_of({GAPS + entry.name: differs.gaps, VALUES + entry.name: differs.values})
        parts += own
        owners |= {each.name: stream.owners[entry.name] for each in own}
    return TensorStream(parts, {BASE: base}, owners)


def _renew(kept: Bytes, differs: Changes | None, entry: Entry) -> None:
    if differs is None:
        kept[:] = bytes_of(entry.tensor)
    else:
        differs.apply(kept)


def _is_view(tensor: Tensor) -> bool:
    return isinstance(tensor, np.ndarray) or str(tensor.device) == "cpu"
