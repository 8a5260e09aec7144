"""Whether an engine drafts at all: by the tokens/s that its steps with and without drafts were seen to bring.

Invariants (tests/property/test_draft_switch.py asserts them):
- in the long run the tokens/s are at least 0.99 of the better way's, 0.97 where steps vary by a quarter; in a
  run of 400 steps, begun with a wrong prior, at least 0.98 where the worse way has 0.7;
- what turns out to be better later on is found;
- how many requests run, how long their responses are, the prompts of those that join, and single slow steps
  do not count as an effect of drafts.

What a step really costs is in no profile: chunks that come and go, streams, the interpreter, other processes.
So steps run in slices that all draft, or all do not. Of two slices in a row that differ, the second is
compared with the first: what else has changed between them is little, and has the opposite sign next time.
The better way runs, and the other is tried now and then, as often as a fixed share of the time allows: what a
try loses is known from the comparisons before, so one that loses more is tried less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

TRY_SHARE, FIRST_SHARE, FIRST_SLICES = 0.004, 0.006, 64
"""Share of the time that tries of the worse way may lose, and the share in a situation's first slices: drafts
get better then, as trees fill and what is right in them is learnt."""

FIRST_TRIES = 0.2
"""What they may lose beforehand, in slices: enough to be sure within the first steps."""

SLICE_STEPS, SLICE_TOKENS = 8, 64
"""Least steps of a slice, and least tokens of it if every request had one a step: with few requests, how many
drafts are right varies more from step to step."""

SETTLE_STEPS, SETTLE_AHEAD = 2, 3
"""Steps after a change that do not count: the first ones still verify drafts, or have none to verify yet. One
more where steps are scheduled before the last one is read."""

SLOW_SHARE = 0.25
"""Share of a slice's steps that may be slow by chance: they count as the slowest of the others."""

GUESS, LEAST_LOSS = 0.1, 0.015
"""What a try is taken to lose, as a share of its time: unless something is known, and at least."""

UNSURE, UNSURE_LOSS = 4, 0.3
"""With fewer comparisons than that, it is taken to lose no more than this."""

LATEST = 0.3
"""Least weight of the latest comparison in the estimate of the gain."""

DOUBT, SURE = 0.06, 9
"""Drafts are taken to be better if they gain more than the first by the root of the number of comparisons, of
which the second count: one may be off by as much, and where drafts hardly gain, little is lost without."""

PROMPTS_KEPT, MOST_PREFILL = 0.95, 0.9
"""How much of what was learnt of a prompt's tokens stays after a slice, and most of a step that they take."""

LARGEST = math.log(1.5)
"""By how much more a single comparison may differ from the estimate before it."""


@dataclass(slots=True)
class _Situation:
    """What is known for so many requests with responses so long.

    `drafts`: whether steps with drafts are better; `gain`: ln(tokens/s with drafts ÷ those without).
    """

    drafts: bool
    gain: float = 0.0
    comparisons: int = 0
    slices: int = 0
    seconds: float = 0.0  # of a slice
    allowed: float = 0.0  # seconds that tries may lose

    @property
    def loss(self) -> float:
        """The share of its time that a try loses."""
        if not self.comparisons:
            return GUESS
        loss = max(LEAST_LOSS, 1 - math.exp(-abs(self.gain)))
        return min(loss, UNSURE_LOSS) if self.comparisons < UNSURE else loss

    def try_now(self) -> bool:
        """Whether the next slice may be a try."""
        return 0 < self.seconds * self.loss <= self.allowed

    def add_slice(self, seconds: float, *, was_try: bool) -> None:
        """Count the time of a slice."""
        if not self.seconds:
            self.allowed = FIRST_TRIES * seconds
        self.seconds = seconds
        self.slices += 1
        self.allowed += (TRY_SHARE if self.slices > FIRST_SLICES else FIRST_SHARE) * seconds
        if was_try:
            self.allowed -= self.loss * seconds

    def add_gain(self, gain: float) -> None:
        """Count a comparison."""
        if self.comparisons > 1:
            gain = min(max(gain, self.gain - LARGEST), self.gain + LARGEST)
        self.comparisons += 1
        self.gain += (gain - self.gain) * max(LATEST, 2 / (1 + self.comparisons))
        self.drafts = self.gain > DOUBT / math.sqrt(min(self.comparisons, SURE))


@dataclass(slots=True)
class _Slice:
    """Steps in a row that all draft, or all do not."""

    situation: _Situation
    running: int
    drafts: bool
    steps: int
    settle: int
    tokens: int = 0
    whole: float = 0.0
    seconds: list[float] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)

    def rate(self, prompt: float) -> float:
        """Tokens/s, as if no step had been slow by chance, or for prompts, of `prompt` seconds a token."""
        times = sorted(
            each - min(prompt * tokens, MOST_PREFILL * each)
            for each, tokens in zip(self.seconds, self.prefilled, strict=True)
        )
        usual = times[math.ceil(len(times) * (1 - SLOW_SHARE)) - 1]
        return self.tokens / sum(min(each, usual) for each in times)


class _PromptSeconds:
    """Seconds that a step takes longer for each token that it prefills: a slope within slices.

    The less the steps of a slice vary, the more it weighs: one step that was slow by chance says nothing.
    """

    def __init__(self) -> None:
        self._steps = self._slices = self._products = self._squares = 0.0

    def learn(self, ended: _Slice) -> float:
        """Learn from a slice; return what is known now."""
        tokens, seconds = fmean(ended.prefilled), fmean(ended.seconds)
        pairs = [(a - tokens, b - seconds) for a, b in zip(ended.prefilled, ended.seconds, strict=True)]
        varies = sum(b * b for _, b in pairs)
        self._steps = PROMPTS_KEPT * self._steps + len(pairs) - 1
        self._products = PROMPTS_KEPT * self._products + sum(a * b for a, b in pairs) / (varies or 1.0)
        self._squares = PROMPTS_KEPT * self._squares + sum(a * a for a, _ in pairs) / (varies or 1.0)
        self._slices = PROMPTS_KEPT * self._slices + (varies > 0)
        known = self._products**2 * self._steps
        chance = self._squares * self._slices - self._products**2
        if self._products <= 0 or known <= chance:  # nothing is, once all has faded
            return 0.0
        return (1 - chance / known) * self._products / self._squares


class DraftSwitch:
    """One engine's switch. `prior(requests)`: whether drafts are expected to pay, before anything is known.

    For each step: `begin`, then `end` with what it brought, or `ahead` what the step before it brought.
    """

    def __init__(self, prior: Callable[[int], bool], *, ahead: bool = False) -> None:
        self._prior = prior
        self._settle = SETTLE_AHEAD if ahead else SETTLE_STEPS
        self._situations: dict[tuple[int, int], _Situation] = {}
        self._slice: _Slice | None = None
        self._before: _Slice | None = None  # the slice just before, if it ended regularly
        self._prompts = _PromptSeconds()
        self._drafts = True

    def begin(self, running: int, tokens: Callable[[], float]) -> bool:
        """Return whether the next step, of `running` requests, drafts.

        `tokens()`: how many tokens their responses have, on average.
        """
        now = self._slice
        if now is not None and not now.running / 2 <= running <= 2 * now.running:
            now = self._before = None
        if now is None:
            now = self._slice = self._next(max(1, running), tokens())
        self._drafts = now.drafts
        return now.drafts

    def end(self, tokens: int, seconds: float, *, usual: bool = True, prefilled: int = 0) -> None:
        """Count a step of `seconds` that generated `tokens`, and computed `prefilled` of prompts.

        Not `usual`: it filled the batch, or waited.
        """
        now = self._slice
        if now is None:
            return
        now.whole += seconds
        if now.settle:
            now.settle -= 1
        elif usual and seconds > 0:
            now.tokens += tokens
            now.seconds.append(seconds)
            now.prefilled.append(prefilled)
            if len(now.seconds) == now.steps:
                self._close(now)

    def _next(self, running: int, tokens: float) -> _Slice:
        # Responses of a wave all begin at once: their first steps are no situation of their own.
        place = round(math.log2(running)), max(1, round(math.log(1 + tokens, 8)))
        known = self._situations.get(place)
        if known is None:
            known = self._situations[place] = _Situation(self._first_guess(place, running))
        drafts = known.drafts != known.try_now()
        steps = max(SLICE_STEPS, SLICE_TOKENS // running)
        return _Slice(known, running, drafts, steps, self._settle if drafts != self._drafts else 0)

    def _first_guess(self, place: tuple[int, int], running: int) -> bool:
        """Take what is better for as many requests with responses somewhat longer or shorter."""
        near = (self._situations.get((place[0], place[1] + way)) for way in (-1, 1))
        known = next((each for each in near if each is not None and each.comparisons), None)
        return known.drafts if known is not None else self._prior(running)

    def _close(self, ended: _Slice) -> None:
        before, self._before, self._slice = self._before, ended, None
        known, was_try = ended.situation, ended.drafts != ended.situation.drafts
        prompt = self._prompts.learn(ended)
        if (
            before is not None and before.situation is known and before.drafts != ended.drafts
            and before.tokens and ended.tokens
        ):  # fmt: skip
            faster = math.log(ended.rate(prompt) / before.rate(prompt))
            known.add_gain(faster if ended.drafts else -faster)
        known.add_slice(ended.whole, was_try=was_try)
