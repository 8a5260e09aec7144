"""Which finished groups are sent to which trainer, and not acknowledged yet: pure.

Finished groups are in the store, bounded by `buffer.result_bytes`. For each trainer only a window of them is
passed to the network until they are acknowledged: for a trainer that stops reading, at most `WINDOW_BYTES`,
or one group, are in queues and sockets, however many groups have finished.

Invariants (tests/property/test_deliveries.py):
- the groups sent to one trainer and not acknowledged have at most `WINDOW_BYTES`, or are one group;
- an added group is sent once, in the order of adding, unless it is forgotten before; it is sent again only if
  it is added again, as when the trainer submits it again;
- nothing is stored about forgotten groups, nor about trainers that nothing is sent to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_BYTES = 2**26

Sent = tuple[bytes, str]
"""The incarnation of the trainer that a group is sent to, and the group's id."""


@dataclass(slots=True)
class _Window:
    waiting: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def remove(self, group_id: str) -> None:
        self.waiting.pop(group_id, None)
        self.bytes -= self.sent.pop(group_id, 0)


class Deliveries:
    """Groups by the incarnation of the trainer that waits for them."""

    def __init__(self) -> None:
        self._windows: dict[bytes, _Window] = {}
        self._owner: dict[str, bytes] = {}

    def add(self, address: bytes, group_id: str, size: int) -> list[Sent]:
        """Add a group of `size` bytes for `address`; return what is to be sent now."""
        ready = self.forget(group_id)
        self._owner[group_id] = address
        self._windows.setdefault(address, _Window()).waiting[group_id] = size
        return ready + self._ready(address)

    def forget(self, group_id: str) -> list[Sent]:
        """Remove a group that was acknowledged or no longer exists; return what is to be sent now."""
        address = self._owner.pop(group_id, b"")
        if address not in self._windows:
            return []
        self._windows[address].remove(group_id)
        return self._ready(address)

    def reset(self, address: bytes) -> None:
        """Forget all groups of an incarnation that lost messages: the client submits again what it needs."""
        window = self._windows.pop(address, None)
        for group_id in (*window.sent, *window.waiting) if window else ():
            del self._owner[group_id]

    def _ready(self, address: bytes) -> list[Sent]:
        window = self._windows[address]
        ready: list[Sent] = []
        while window.waiting:
            group_id, size = next(iter(window.waiting.items()))
            if window.sent and window.bytes + size > WINDOW_BYTES:
                break
            del window.waiting[group_id]
            window.sent[group_id] = size
            window.bytes += size
            ready.append((address, group_id))
        if not window.sent:
            del self._windows[address]
        return ready
