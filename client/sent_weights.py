"""What a client sent last, and whether of its next weights only that is sent which differs.

Invariants (tests/property/test_delta.py, tests/cluster/test_weight_deltas.py):
- what is kept is what the engines have: it changes once an update is live, and not before;
- memory is that of one copy of the tensors, taken only while twice as much is free;
- a delta is sent if it has at most `PAYS` of the stream's bytes, or if the trainer names its base. After one
  that does not pay, which is logged, nothing is kept or compared for `REST` updates.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from seer.client.tensor_stream import Entry, Tensor, TensorStream, bytes_of, hash_of
from seer.common.process.log import get_logger
from seer.common.process.memory_limit import free_bytes
from seer.common.weights.delta import BASE, GAPS, VALUES, WHOLE, Changes, changes
from seer.common.wire import Bytes

PAYS = 0.5
"""Largest share of a stream's bytes for which a delta is sent: making and applying one costs time, too."""

REST = 16
"""Updates without a look at deltas after one that did not pay, as in float32, where each step changes all."""

_log = get_logger()


@dataclass(slots=True)
class _Kept:
    """A stream: its name in the spool, its version and header, each tensor's hash and bytes by name."""

    head: Bytes
    hashes: dict[str, bytes]
    data: dict[str, Bytes]
    name: str = ""
    version: int = -1


@dataclass(slots=True)
class Plan:
    """How a stream is sent: its digest, the delta to the stream `base`, if there is one, and `why` not.

    `keep`: deltas to this stream may follow.
    """

    stream: TensorStream
    digest: str
    delta: TensorStream | None = None
    base: str = ""
    keep: bool = False
    why: str = ""
    hashes: dict[str, bytes] = field(default_factory=dict)
    found: dict[str, Changes | None] = field(default_factory=dict)
    """By tensor that differs: how; None: replace the whole tensor."""


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

    def plan(self, stream: TensorStream, base: int | None) -> Plan:
        """Return how to send a stream. `base`: the version that a delta has to be to; None: if it pays."""
        why = self._obstacle(stream, base)
        if not why and self._sent is not None:
            plan = self._compared(stream, self._sent, forced=base is not None)
            if plan.delta is not None:
                return plan
            self._rest, why = REST, plan.why
            self._sent = None
            _log.info("weights are sent whole", updates=REST + 1, why=why)
            return Plan(stream, plan.digest, why=why)
        resting, self._rest = self._rest > 0 and base is None, max(0, self._rest - 1)
        self._sent = None
        size = stream.size
        keep = self._enabled and not resting and free_bytes() >= 2 * size
        if self._enabled and not resting and not keep:
            why = f"a copy of {size} bytes to compare with would leave too little memory"
        kept: dict[str, Bytes] = {}

        def look(entry: Entry, data: Bytes) -> bytes:
            if keep:
                kept[entry.name] = data.copy() if _is_view(entry.tensor) else data
            return hash_of(entry, data)

        hashes = stream.each(look)
        plan = Plan(stream, stream.digest_by(hashes), keep=keep, why=why)
        if keep:
            self._sent = _Kept(stream.head, dict(zip(stream.names, hashes, strict=True)), kept)
        return plan

    def live(self, plan: Plan, name: str, version: int, *, whole: bool) -> None:
        """Note that a planned stream is live under a name; `whole`: all of it was sent."""
        size = plan.stream.size
        sent = size if plan.delta is None or whole else plan.delta.size
        why = plan.why or ("the buffer or an engine could not apply the delta" if sent == size else "")
        self.last = Sending(sent, size, why)
        known = self._sent
        if known is None:
            return
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda entry: _renew(known.data[entry.name], plan, entry), plan.stream.entries))
        known.hashes |= plan.hashes
        known.name, known.version = name, version

    def forget(self) -> None:
        """Keep nothing: other weights became live."""
        self._sent = None

    def _obstacle(self, stream: TensorStream, base: int | None) -> str:
        """Return why there can be no delta; empty: there can."""
        sent = self._sent
        if not self._enabled:
            return "deltas are switched off"
        if sent is None or not sent.name:
            rests = "the last delta did not pay" if self._rest and base is None else ""
            return rests or "no earlier tensors of this client are live"
        if base not in (None, sent.version):
            return f"base {base} is not what this client sent last, version {sent.version}"
        if not np.array_equal(sent.head, stream.head):
            return "names, types or shapes of tensors changed"
        return ""

    def _compared(self, stream: TensorStream, sent: _Kept, *, forced: bool) -> Plan:
        most = stream.size if forced else int(PAYS * stream.size)
        found: dict[str, Changes | None] = {}
        sizes: list[int] = []

        def look(entry: Entry, data: Bytes) -> bytes:
            if sum(sizes) > most and not forced:
                return hash_of(entry, data)
            differs = changes(sent.data[entry.name], data, entry.tensor.dtype.itemsize)
            if differs is not None and not len(differs.gaps):
                return sent.hashes[entry.name]
            found[entry.name] = differs
            sizes.append(entry.size if differs is None else differs.size)
            return hash_of(entry, data)

        hashes = stream.each(look)
        plan = Plan(stream, stream.digest_by(hashes), base=sent.name, keep=True)
        if forced or sum(sizes) <= most:
            plan.delta = _stream_of(stream, found, sent.name)
        if plan.delta is None or (plan.delta.size > most and not forced):
            plan.why = f"a delta does not pay: it would have more than {most} of {stream.size} bytes"
            plan.delta = None
        plan.hashes, plan.found = dict(zip(stream.names, hashes, strict=True)), found
        return plan


def sent_weights(deltas: SentWeights | bool) -> SentWeights:
    """Return what a client is given as `deltas`: that of an earlier one, or whether to send any."""
    return SentWeights(enabled=deltas) if isinstance(deltas, bool) else deltas


def _stream_of(stream: TensorStream, found: dict[str, Changes | None], base: str) -> TensorStream:
    parts: dict[str, Tensor] = {}
    if not found:  # a stream has at least one tensor
        first = stream.entries[0]
        found = {first.name: Changes(np.empty(0, "u1"), np.empty(0, f"u{first.tensor.dtype.itemsize}"))}
    for entry in stream.entries:
        if entry.name in found:
            differs = found[entry.name]
            if differs is None:
                parts[WHOLE + entry.name] = entry.tensor
            else:
                parts |= {GAPS + entry.name: differs.gaps, VALUES + entry.name: differs.values}
    return TensorStream(parts, {BASE: base})


def _renew(kept: Bytes, plan: Plan, entry: Entry) -> None:
    if entry.name not in plan.found:
        return
    if (differs := plan.found[entry.name]) is None:
        kept[:] = bytes_of(entry.tensor)
    else:
        differs.apply(kept)


def _is_view(tensor: Tensor) -> bool:
    return isinstance(tensor, np.ndarray) or str(tensor.device) == "cpu"
