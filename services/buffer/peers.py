"""Who is connected: names by address, and for each name the address of its latest life.

Invariants:
- an earlier life never takes a name from a later one that is still here;
- at most `MAX_PEERS` addresses are known: the longest silent one goes first.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import structs

from seer.common import ids
from seer.common.channel import MAX_PEERS
from seer.common.errors import InvalidField
from seer.common.wire.messages import MAX_ID, Hello, Register

MAX_SIZE = 2**31 - 1
"""Bound on every number of a capacity: blocks, tokens, requests."""

MAX_VERSIONS = 64
"""Bound on the entries of `Register.versions`: they travel with every `Status`."""


class Peers:
    """Fed with every `Hello`; a connected peer repeats it every few seconds."""

    def __init__(self) -> None:
        self._lives: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._at: dict[str, bytes] = {}

    def greet(self, address: bytes, hello: Hello) -> None:
        """Note a life, and give it its name unless a later one has it."""
        first = address not in self._lives
        self._lives[address] = (hello.name, hello.incarnation)
        self._lives.move_to_end(address)
        holder = self._at.get(hello.name)
        if holder is None or (first and ids.not_before(hello.incarnation, self._lives[holder][1])):
            self._at[hello.name] = address
        if len(self._lives) > MAX_PEERS:
            self.leave(next(iter(self._lives)))

    def leave(self, address: bytes) -> None:
        """Forget a life; an unknown one is ignored."""
        name, _ = self._lives.pop(address, ("", 0))
        if self._at.get(name) == address:
            del self._at[name]

    def name(self, address: bytes) -> str | None:
        """Return whose address this is, None if nobody's."""
        return self._lives[address][0] if address in self._lives else None

    def at(self, name: str) -> bytes | None:
        """Return where a name is, None if nowhere."""
        return self._at.get(name)

    def take(self, name: str, address: bytes) -> None:
        """Give a name to this life, whatever others there are."""
        self._at[name] = address


def check_register(register: Register) -> None:
    """Raise `InvalidField` unless the books can be kept with this engine."""
    for name, value in structs.asdict(register.capacity).items():
        if not int(name != "draft_tokens") <= value <= MAX_SIZE:
            raise InvalidField(
                f"capacity.{name}", value, f"must be in [1, {MAX_SIZE}], draft_tokens 0 or more"
            )
    longest = max((len(text) for item in register.versions.items() for text in item), default=0)
    if len(register.versions) > MAX_VERSIONS or longest > MAX_ID:
        fix = f"give at most {MAX_VERSIONS} entries of {MAX_ID} characters"
        raise InvalidField("versions", f"{len(register.versions)} entries", fix)
