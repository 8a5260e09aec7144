"""Who is connected: names by address, and for each name the address of the life that has it.

Invariants:
- an earlier life never takes a name from a later one that is still here: not gone, and not silent for
  `SILENT_SECONDS`. Which is later only clocks tell, and one that was set back makes a new life seem an
  old one: it gets the name once the other is gone or silent;
- one's own stall is not the silence of others: a life counts as silent only to one that went on
  talking meanwhile, as both would be read in turns;
- at most `MAX_PEERS` addresses are known: the longest silent one goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec
from msgspec import structs

from seer.common import ids
from seer.common.errors import InvalidField
from seer.common.net.handshake import CHECK_SECONDS
from seer.common.net.hub import MAX_PEERS
from seer.common.wire import MAX_ID, Hello, Register

MAX_SIZE = 2**31 - 1
"""Bound on every number of a capacity: blocks, tokens, requests."""

MAX_VERSIONS = 64
"""Bound on the entries of `Register.versions`: they travel with every `Status`."""


SILENT_SECONDS = 15.0
"""A life that says no `Hello` for this long has lost its name to one that does: they come every 5 s."""

SILENT_HELLOS = 3
"""And only if the other said this many since."""


class _Life(msgspec.Struct):
    """`since` and `heard`: its first and last Hello. `unanswered` counts its Hellos since `last`, the
    latest one of the life that has its name.
    """

    name: str
    incarnation: int
    since: float
    heard: float
    hellos: int = 0
    last: tuple[int, int] = (0, 0)
    unanswered: int = 0


class Peers:
    """Fed with every `Hello`; a connected peer repeats it every few seconds.

    `registered` has the session of the hub in which a life registered last.
    """

    def __init__(self) -> None:
        self.registered: dict[bytes, int] = {}
        self._lives: OrderedDict[bytes, _Life] = OrderedDict()
        self._at: dict[str, bytes] = {}

    def greet(self, address: bytes, hello: Hello, now: float) -> bytes | None:
        """Note a life, and give it its name if that is its due; else return the address of who has it."""
        life = self._lives.get(address)
        first = life is None
        life = life or _Life(hello.name, hello.incarnation, now, now)
        life.heard, life.hellos = now, life.hellos + 1
        self._lives[address] = life
        self._lives.move_to_end(address)
        at = self._at.get(hello.name)
        if at is None or at == address or self._takes(life, self._lives[at], first):
            self._at[hello.name] = at = address
        if len(self._lives) > MAX_PEERS:
            self.leave(next(iter(self._lives)))
        return None if at == address else at

    def _takes(self, life: _Life, holder: _Life, first: bool) -> bool:
        if first and ids.not_before(life.incarnation, holder.incarnation):
            return True
        last = holder.incarnation, holder.hellos
        life.unanswered = life.unanswered + 1 if life.last == last else 1
        life.last = last
        return life.heard - holder.heard >= SILENT_SECONDS and life.unanswered >= SILENT_HELLOS

    def doubtful(self, address: bytes) -> bool:
        """Say whether another life has this one's name, and may be gone for all it said since this one came.

        What a dead one said last can arrive after that, where the road was cut for a while.
        """
        life = self._lives[address]
        at = self._at.get(life.name)
        return at is not None and at != address and self._lives[at].heard < life.since + CHECK_SECONDS

    def leave(self, address: bytes) -> None:
        """Forget a life; an unknown one is ignored."""
        life = self._lives.pop(address, None)
        self.registered.pop(address, None)
        if life is not None and self._at.get(life.name) == address:
            del self._at[life.name]

    def name(self, address: bytes) -> str | None:
        """Return whose address this is, None if nobody's."""
        return self._lives[address].name if address in self._lives else None

    def at(self, name: str) -> bytes | None:
        """Return where a name is, None if nowhere."""
        return self._at.get(name)

    def take(self, name: str, address: bytes) -> None:
        """Give a name to this life, whatever others there are."""
        self._at[name] = address


def life_of(address: bytes) -> int:
    """Return a number for the life of the peer at an address: another life has another address."""
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little")


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
