"""Whose rollout an id means: an id belongs to its trainer, by name, so two trainers may use the same one.

Inside the buffer ids are unique: of two trainers, the one that comes second has its name behind the id. Which
one that is depends on who comes first, also after a restart of the buffer; no token does.

Invariants (tests/unit/test_rollout_ids.py):
- a trainer's id means the same rollout as long as this buffer runs, and never another trainer's;
- a trainer hears the id that it gave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeVar

from msgspec import structs

from seer.common import wire
from seer.common.errors import InvalidField
from seer.services.buffer.requests.state import RolloutState
from seer.services.buffer.requests.turn_placement import Away

SEPARATOR = "¦"

MAX_NAME = 64
"""Characters of a name behind an id: if two names begin with the same ones, the later one is refused."""

MAX_KNOWN = 10_000
"""Bound on the ids that are remembered to have a name behind them, and on those that have none."""

Key = TypeVar("Key")
Value = TypeVar("Value")
Named = TypeVar("Named", bound=wire.Submit | wire.Cancel | wire.Acknowledge)


class RolloutIds:
    """`rollouts` and `away` are the registry's: what the buffer has now."""

    def __init__(self, rollouts: Mapping[str, RolloutState], away: Mapping[str, Away]) -> None:
        self._rollouts, self._away = rollouts, away
        self._apart: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._plain: OrderedDict[str, str] = OrderedDict()  # who used an id last without a name behind it

    def here(self, trainer: str, message: Named) -> Named:
        """Return a trainer's message with the id inside the buffer. Raises `InvalidField` for such an id."""
        given = message.rollout_id
        if SEPARATOR in given:
            raise InvalidField("rollout_id", given, f"give one without {SEPARATOR!r}")
        mine = (trainer, given)
        begins = isinstance(message, wire.Submit) and self._is_anothers(given, trainer)
        if mine not in self._apart and not begins:
            if isinstance(message, wire.Submit):
                _remember(self._plain, given, trainer)
            return message
        here = f"{given}{SEPARATOR}{trainer[:MAX_NAME].replace('/', '_')}"
        if len(here) > wire.MAX_ID:  # the log could not be read again
            raise InvalidField("rollout_id", given, f"give at most {wire.MAX_ID - MAX_NAME - 1} characters")
        _remember(self._apart, mine, None)
        return structs.replace(message, rollout_id=here)

    def _is_anothers(self, rollout_id: str, trainer: str) -> bool:
        rollout = self._rollouts.get(rollout_id)
        if rollout is not None:
            return rollout.trainer != trainer
        if self._plain.get(rollout_id) == trainer:  # all that is away is not looked at for each turn
            return False
        return any(
            away.key[0] not in ("", trainer) and group_id.startswith(f"{rollout_id}/")
            for group_id, away in self._away.items()
        )


def _remember(known: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > MAX_KNOWN:
        known.popitem(last=False)


def given(message: wire.BufferToTrainer) -> wire.BufferToTrainer:
    """Return a message to a trainer with the ids that the trainer gave."""
    match message:
        case wire.TokensGenerated(parts=parts) if any(SEPARATOR in part.rollout_id for part in parts):
            named = [structs.replace(part, rollout_id=_given(part.rollout_id)) for part in parts]
            return structs.replace(message, parts=named)
        case wire.Accepted() | wire.GroupDone() | wire.Progress() | wire.Refused() if (
            SEPARATOR in message.rollout_id
        ):
            return structs.replace(message, rollout_id=_given(message.rollout_id))
    return message


def _given(rollout_id: str) -> str:
    return rollout_id.partition(SEPARATOR)[0]
