"""Which noise a client has used: no two of its responses share noise, unless a caller asks for that. Pure.

The noise of a token follows from seed, rollout number, the group's name, the index in it and the position
(docs/same-tokens.md). Neither the prompt before the token nor the weights make a difference.

Invariants (tests/unit/test_used_noise.py):
- a response that is under way, or has come, keeps its noise: whoever asks for the same noise again is
  refused, or says that the request is a repetition. A response that failed or was cancelled gives its noise
  back: asking again is a retry;
- a request that begins where a response ended has noise of its own: turns have one key;
- a rollout number that nobody gave is above all earlier numbers, and follows from the weight version. So
  steps differ, also steps of clients that know nothing of each other, and a step that is run again has its
  numbers again;
- memory is bounded: the noise that was claimed longest ago is forgotten first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from seer.client.prompts import Prepared
from seer.common.bounds import INT64
from seer.common.errors import InvalidField
from seer.common.ids import request_key

ROLLOUTS_PER_VERSION = 2**20
"""Rollout numbers that belong to one weight version."""

MOST_GROUPS = 2**17
"""Groups whose noise is remembered; one of 16 responses takes about 250 bytes."""

_VERSIONS = 2**42
"""Versions whose numbers differ; they fit in 63 bits."""

Place = tuple[int, int]
"""A group, and an index in it."""


class Claim:
    """The noise of responses `first` to `first + n - 1` of a group, from position `start` on."""

    __slots__ = ("_ends", "_places", "_start", "_under_way")

    def __init__(
        self, ends: array[int], under_way: Counter[Place], places: Sequence[Place], start: int
    ) -> None:
        self._ends, self._under_way, self._places, self._start = ends, under_way, places, start
        under_way.update(places)

    def ended(self, lengths: Iterable[int]) -> None:
        """Keep what responses of these lengths, in tokens, have used."""
        for (_, index), length in zip(self._places, lengths, strict=True):
            self._ends[index] = max(self._ends[index], self._start + length)
        self.failed()

    def failed(self) -> None:
        """Give back what is under way: nobody has got the responses."""
        for place in self._places:
            self._under_way[place] -= 1
            if not self._under_way[place]:
                del self._under_way[place]


class UsedNoise:
    """See the module's docstring."""

    def __init__(self, most: int = MOST_GROUPS) -> None:
        self._most = most
        self._next_number = 0
        self._ends: OrderedDict[int, array[int]] = OrderedDict()
        """By group, the position that each of its responses, by index, has come to; 0: none has ended."""
        self._under_way: Counter[Place] = Counter()

    def number(self, given: int | None, weight_version: int) -> int:
        """Return the number of a rollout with these weights (-1: unknown) for which this one was `given`.

        Raises `InvalidField` if none is left above all before it.
        """
        if given is not None:
            return given
        if self._next_number > INT64[1]:
            fix = "was given in this client's lifetime, and no number is above it: give each step its own"
            raise InvalidField("rollout_number", INT64[1], fix)
        return max(self._next_number, max(weight_version, 0) % _VERSIONS * ROLLOUTS_PER_VERSION)

    def took(self, number: int) -> None:
        """Take note that a rollout has this number."""
        self._next_number = max(self._next_number, number + 1)

    def claim(
        self, seed: int, number: int, group: str, first: int, n: int, start: int, *, repeat: bool
    ) -> Claim:
        """Claim the noise of responses to a prompt of `start` tokens. Raises `InvalidField` if it is used."""
        key = request_key(seed, number, group, 0)
        ends = self._ends.setdefault(key, array("i"))
        self._ends.move_to_end(key)
        if len(self._ends) > self._most:
            self._ends.popitem(last=False)
        if (missing := first + n - len(ends)) > 0:
            ends.extend([0] * missing)
        places = [(key, index) for index in range(first, first + n)]
        taken = max(ends[first : first + n]) > start or not self._under_way.keys().isdisjoint(places)
        if taken and not repeat:
            raise InvalidField(
                "rollout_number", number, f"{group!r} has had this noise in this client's lifetime: give "
                "each step a number of its own, or repeat=True if it is to be the same",
            )  # fmt: skip
        return Claim(ends, self._under_way, places, start)

    def claim_prompts(
        self, seed: int, number: int, n: int, prompts: Sequence[Prepared], *, repeat: bool
    ) -> dict[str, Claim]:
        """Claim the noise of n responses to each prompt, by prompt id; none, if it raises `InvalidField`."""
        claims: dict[str, Claim] = {}
        try:
            for prompt in prompts:
                length = prompt.token_ids.size
                claims[prompt.id] = self.claim(seed, number, prompt.id, 0, n, length, repeat=repeat)
        except InvalidField:
            for claim in claims.values():
                claim.failed()
            raise
        return claims
