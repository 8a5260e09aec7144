"""Which images the buffer keeps, awaits and drops: counts and names, never bytes.

Invariants (tests/property/test_image_machine.py):
- all images together have at most `max_bytes`, counting each whole from the moment it is begun;
- an image is not begun if the images in use of every trainer that needs it would have over three quarters of
  that; a trainer that has none may have any;
- an image that a group refers to is never dropped; of the others, those that were not used for longest go,
  and only when their room is needed, or when they are incomplete and do not grow;
- an image is there once its bytes were checked against its name, and not before;
- a group that waits for images is reported once nothing of its trainer's images has come for `STALL` seconds.
  Its own may be the last of many, so one that does not grow is no sign.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from seer.common.types import IMAGE_NAME
from seer.common.wire import IMAGE_STALL_SECONDS as STALL


@dataclass(slots=True)
class Kept:
    """An image of `size` bytes, of which `have` are there. `checked`: all are, and its name is theirs.

    `used`: when it was begun, grew, or was asked for last. Monotonic seconds.
    """

    size: int
    used: float
    have: int = 0
    checked: bool = False


@dataclass(slots=True)
class _Group:
    trainer: str
    share: str
    names: Sequence[str]
    since: float


class ImageMachine:
    """See the module's docstring. All times are monotonic seconds."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # the least recently used first
        self._users: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by image: groups by share
        self._groups: dict[str, _Group] = {}
        self._waiting: dict[str, None] = {}  # groups that may lack images
        self._heard: dict[str, float] = {}  # by trainer: when something of its images came

    def get(self, name: str) -> Kept | None:
        """Return an image, which is not used by that; None: it is not kept."""
        return self._kept.get(name)

    # --- groups --------------------------------------------------------------------------

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those that are not there, each once."""
        return [name for name in dict.fromkeys(names) if not self._is_there(name)]

    def refer(self, group_id: str, trainer: str, share: str, names: Sequence[str], now: float) -> None:
        """Keep images for a group, which was not known, until `release`; they count to `share`'s."""
        if names:
            self._groups[group_id] = _Group(trainer, share, names, now)
            self._waiting[group_id] = None
            for name in names:
                self._users[name][share] += 1

    def release(self, group_id: str) -> None:
        """Note that a group needs its images no longer; one without any is ignored."""
        group = self._groups.pop(group_id, None)
        self._waiting.pop(group_id, None)
        if group is not None:
            for name in group.names:
                users = self._users[name]
                users[group.share] -= 1
                if not users[group.share]:
                    del users[group.share]
                if not users:
                    del self._users[name]

    # --- images --------------------------------------------------------------------------

    def heard(self, trainer: str, now: float) -> None:
        """Note that a part of a trainer's images came, or that one which it named is there already."""
        self._heard[trainer] = now

    def found(self, sizes: Mapping[str, int], now: float) -> list[str]:
        """Take over files of an earlier incarnation, the least recently used first, still to be checked.

        Return those for which there is no room.
        """
        for name, size in sizes.items():
            self._keep(name, Kept(size, now, size))
        return self._make_room(0)

    def begin(self, name: str, size: int, now: float) -> list[str]:
        """Begin an image that is not kept; return which images were dropped for it. Raises `ValueError`."""
        if not IMAGE_NAME.fullmatch(name):
            raise ValueError("is not the name of an image: give 64 hexadecimal digits")
        if size < 1:
            raise ValueError("has no bytes")
        used, most = self._size(self._kept.keys() & self._users.keys()), self._max_bytes
        if used + size > most:
            raise ValueError(_no_room(size, "", used, most))
        of = {
            share: self._size(other for other in self._kept if share in self._users.get(other, ()))
            for share in self._users.get(name, ())
        }
        most = most * 3 // 4
        if of and all(used and used + size > most for used in of.values()):
            share, used = next(iter(of.items()))
            raise ValueError(_no_room(size, f" of trainer {share!r}", used, most))
        dropped = self._make_room(size)
        self._keep(name, Kept(size, now))
        return dropped

    def _size(self, names: Iterable[str]) -> int:
        return sum(self._kept[name].size for name in names)

    def use(self, name: str, now: float) -> Kept:
        """Return an image that is kept, which is the most recently used one now."""
        self._kept.move_to_end(name)
        kept = self._kept[name]
        kept.used = now
        return kept

    def drop(self, name: str) -> None:
        """Forget an image: its room is needed, its file is lost, or has other bytes."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.bytes -= kept.size

    # --- time ----------------------------------------------------------------------------

    def stalled(self, now: float) -> list[str]:
        """Return groups that have waited for images in vain, each once."""
        groups = []
        for group_id in list(self._waiting):
            group = self._groups[group_id]
            if not self.missing(group.names):
                del self._waiting[group_id]
            elif now - max(group.since, self._heard.get(group.trainer, 0.0)) > STALL:
                groups.append(group_id)
                del self._waiting[group_id]
        self._heard = {name: last for name, last in self._heard.items() if now - last <= STALL}
        return groups

    def abandoned(self, now: float) -> list[str]:
        """Return incomplete images that do not grow, and that no group refers to."""
        return [
            name
            for name, kept in self._kept.items()
            if kept.have < kept.size and now - kept.used > STALL and name not in self._users
        ]

    def _is_there(self, name: str) -> bool:
        kept = self._kept.get(name)
        return kept is not None and kept.checked

    def _keep(self, name: str, kept: Kept) -> None:
        self._kept[name] = kept
        self.bytes += kept.size

    def _make_room(self, size: int) -> list[str]:
        """Forget unused images until there is room for `size` bytes, and return them."""
        dropped = []
        for name in [name for name in self._kept if name not in self._users]:
            if self.bytes + size <= self._max_bytes:
                break
            self.drop(name)
            dropped.append(name)
        return dropped


def _no_room(size: int, whose: str, used: int, most: int) -> str:
    """Return why an image cannot be begun beside images in use."""
    fix = "submit fewer at a time, or raise buffer.image_bytes"
    return f"{size} bytes do not fit: images in use{whose} have {used} and may have {most}: {fix}"
