"""Which finished groups are on their way to whom: pure.

A group that is done lies in the store, bounded by `buffer.result_bytes`. Only a window of them is handed
to the network for each trainer, until it says that it has them: who stops reading holds up `WINDOW_BYTES`
and one group, whatever is done.

Invariants (tests/property/test_deliveries.py):
- what is on its way to one trainer has at most `WINDOW_BYTES`, or is one group;
- a group that was added is handed out once, in the order of adding, unless it is forgotten before; once
  more if it is added again, as when the trainer asks for it again;
- nothing is remembered of a group that is forgotten, nor of a trainer to whom nothing is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_BYTES = 2**26

Sent = tuple[bytes, str]
"""The life that a group goes to, and the group's id."""


@dataclass(slots=True)
class _Window:
    waiting: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def drop(self, group_id: str) -> None:
        self.waiting.pop(group_id, None)
        self.bytes -= self.sent.pop(group_id, 0)


class Deliveries:
    """Groups by the life of the trainer that waits for them."""

    def __init__(self) -> None:
        self._windows: dict[bytes, _Window] = {}
        self._owner: dict[str, bytes] = {}

    def add(self, life: bytes, group_id: str, size: int) -> list[Sent]:
        """Take a group of `size` bytes that `life` asked for; return what is to be sent now."""
        ready = self.forget(group_id)
        self._owner[group_id] = life
        self._windows.setdefault(life, _Window()).waiting[group_id] = size
        return ready + self._ready(life)

    def forget(self, group_id: str) -> list[Sent]:
        """Drop a group that arrived, or is no more; return what is to be sent now in its place."""
        life = self._owner.pop(group_id, b"")
        if life not in self._windows:
            return []
        self._windows[life].drop(group_id)
        return self._ready(life)

    def reset(self, life: bytes) -> None:
        """Forget what is under way to a life that lost something: it asks again for what it still wants."""
        window = self._windows.pop(life, None)
        for group_id in (*window.sent, *window.waiting) if window else ():
            del self._owner[group_id]

    def _ready(self, life: bytes) -> list[Sent]:
        window = self._windows[life]
        ready: list[Sent] = []
        while window.waiting:
            group_id, size = next(iter(window.waiting.items()))
            if window.sent and window.bytes + size > WINDOW_BYTES:
                break
            del window.waiting[group_id]
            window.sent[group_id] = size
            window.bytes += size
            ready.append((life, group_id))
        if not window.sent:
            del self._windows[life]
        return ready
