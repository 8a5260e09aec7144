"""The client's unfinished rollouts: takes the buffer's messages, returns those to send. No IO.

Invariants:
- every group that arrives is acknowledged, needed or not; it is delivered once, and only to the submission
  that it answers;
- work that this client gave up is cancelled, again if the buffer still runs it; never the work of another
  submission or process;
- a rollout with a deadline waits for the successor of a buffer that drained until that deadline.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from seer.client.image_uploads import Placed
from seer.client.open_rollout import OpenRollout
from seer.client.results import streamed
from seer.client.rollout import Rollout
from seer.client.text import Tokenizer
from seer.common.errors import DeadlineExceeded, InvalidField, RequestRefused, RolloutCancelled, RolloutFailed
from seer.common.net.identity import error_of
from seer.common.wire import (
    MAX_PROMPTS,
    Accepted,
    Acknowledge,
    Cancel,
    GroupDone,
    Progress,
    Refused,
    Submit,
    TokensGenerated,
)

GIVEN_UP = 1_000
"""Submissions remembered as given up: if the buffer still runs one, it is cancelled again."""


AnyRollout = Rollout | OpenRollout


def _parts(prompt_ids: Sequence[str]) -> list[list[str]]:
    """Return the ids in lists of what one message should name; one list at least."""
    most = range(0, len(prompt_ids) or 1, MAX_PROMPTS)
    return [list(prompt_ids[start : start + MAX_PROMPTS]) for start in most]


class ActiveRollouts:
    """`tokenizer` decodes the text of responses; None: they have no text. `draining`: the buffer last was."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._active: dict[str, AnyRollout] = {}
        self._latest: weakref.WeakValueDictionary[str, AnyRollout] = weakref.WeakValueDictionary()
        self._deadlines: dict[str, float] = {}
        self._acknowledge: dict[tuple[str, int], list[str]] = {}
        self._given_up: OrderedDict[int, str] = OrderedDict()
        self._cancel_again: set[int] = set()
        self.draining = False

    def __bool__(self) -> bool:
        return any(rollout.waiting for rollout in self._active.values())

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._active

    def __iter__(self) -> Iterator[AnyRollout]:
        return iter(list(self._active.values()))

    @property
    def open(self) -> list[OpenRollout]:
        """The rollouts that take prompts as they come."""
        return [rollout for rollout in self._active.values() if isinstance(rollout, OpenRollout)]

    def add(self, rollout: AnyRollout, deadline: float | None) -> None:
        """Wait for a rollout's results, until `deadline` in the loop's time if there is one."""
        self._latest[rollout.id] = self._active[rollout.id] = rollout
        if deadline is not None:
            self._deadlines[rollout.id] = deadline

    def expire(self, rollout: AnyRollout, now: float) -> None:
        """End a rollout at once, as if its deadline had passed."""
        self._deadlines[rollout.id] = now

    def next_deadline(self, otherwise: float) -> float:
        """Return the earliest deadline, or `otherwise` where that is earlier."""
        return min([otherwise, *self._deadlines.values()])

    def take(self, message: Accepted | GroupDone | TokensGenerated | Progress | Refused) -> None:
        """Take what the buffer says of a rollout."""
        match message:
            case Accepted():
                self._accepted(message)
            case GroupDone():
                self._finished(message)
            case TokensGenerated():
                for part, tokens in streamed(message):
                    rollout = self._waiting(part.rollout_id, part.submission)
                    if isinstance(rollout, OpenRollout):
                        rollout.generated(part.prompt_id, tokens, part.submission, message.weight_version)
            case Progress():
                self._progressed(message)
            case Refused():
                self._refused(message)

    @property
    def owes(self) -> bool:
        """Whether `owed` has messages to send."""
        return bool(self._acknowledge or self._cancel_again)

    def owed(self) -> Iterator[Acknowledge | Cancel]:
        """Yield acknowledgements of groups that arrived, and cancels of work that still runs."""
        while self._acknowledge:
            (rollout_id, submission), prompt_ids = self._acknowledge.popitem()
            for part in _parts(prompt_ids):
                yield Acknowledge(rollout_id=rollout_id, prompt_ids=part, submission=submission)
        while self._cancel_again:
            submission = self._cancel_again.pop()
            if rollout_id := self._given_up.get(submission, ""):
                yield Cancel(rollout_id=rollout_id, submission=submission)

    def expired(self, now: float) -> Iterator[Cancel]:
        """Fail rollouts whose deadline passed; yield their cancels."""
        for rollout_id in [key for key, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[rollout_id]
            rollout = self._active.get(rollout_id)
            if rollout is not None:
                rollout.fail(rollout.unfinished, DeadlineExceeded, "unfinished when the deadline passed")
                self.settle(rollout)
                yield Cancel(rollout_id=rollout_id, submission=rollout.submission)

    def cancel(self, rollout: AnyRollout, prompt_ids: Sequence[str]) -> Iterator[Cancel]:
        """Give up these unfinished prompts, or all; yield the cancel, unless the rollout has ended."""
        if self._active.get(rollout.id) is rollout:
            rollout.fail(prompt_ids or rollout.unfinished, RolloutCancelled, "cancelled by the trainer")
            self.settle(rollout)
            for part in _parts(prompt_ids):
                yield Cancel(rollout_id=rollout.id, prompt_ids=part, submission=rollout.submission)

    def images_of(self, message: Submit) -> list[Placed]:
        """Return the images of the prompts of a message that are unfinished."""
        rollout = self._active.get(message.rollout_id)
        prompts = rollout.prepared(message.prompt_ids) if rollout is not None else []
        return [each for prompt in prompts for each in prompt.images]

    def lose_image(self, name: str, why: str) -> Iterator[Cancel]:
        """Fail the prompts that show an image which the buffer does not take; yield their cancels."""
        for rollout in self:
            prompts = rollout.prepared(rollout.unfinished)
            if prompt_ids := [prompt.id for prompt in prompts if prompt.shows(name)]:
                rollout.fail(prompt_ids, RequestRefused, f"images: {name}: {why}")
                self.settle(rollout)
                for part in _parts(prompt_ids):
                    yield Cancel(rollout_id=rollout.id, prompt_ids=part, submission=rollout.submission)

    def lose(self, cls: type[RequestRefused], reason: str) -> None:
        """End all rollouts in an error, as their buffer is silent: it drained, or is lost."""
        why = f"{reason}; it was draining, and no successor answered" if self.draining else reason
        for rollout in self:
            if not (self.draining and rollout.id in self._deadlines):
                rollout.fail(rollout.unfinished, cls, why)
                self.settle(rollout)

    def fail(self, cls: type[RequestRefused], reason: str) -> None:
        """End all rollouts in an error."""
        for rollout in self:
            rollout.fail(rollout.unfinished, cls, reason)
            self.settle(rollout)

    def _waiting(self, rollout_id: str, submission: int) -> AnyRollout | None:
        """Return the rollout that an answer is meant for, if anybody waits for it."""
        rollout = self._active.get(rollout_id)
        return rollout if rollout is not None and rollout.matches(submission) else None

    def _accepted(self, message: Accepted) -> None:
        rollout = self._waiting(message.rollout_id, message.submission)
        if rollout is not None:
            rollout.began(message.weight_version)

    def _finished(self, message: GroupDone) -> None:
        rollout = self._waiting(message.rollout_id, message.submission)
        self._acknowledge.setdefault((message.rollout_id, message.submission), []).append(message.prompt_id)
        if rollout is not None:
            rollout.deliver(message, self._tokenizer)
            self.settle(rollout)

    def _progressed(self, progress: Progress) -> None:
        self.draining = progress.draining
        rollout = self._latest.get(progress.rollout_id)
        if rollout is not None and rollout.matches(progress.submission):
            rollout.report(progress)
        if progress.submission in self._given_up and progress.finished < progress.requests:
            self._cancel_again.add(progress.submission)  # the first cancel did not arrive

    def _refused(self, message: Refused) -> None:
        rollout = self._waiting(message.rollout_id, message.submission)
        if rollout is None:
            return
        error = error_of(message)
        cls = RequestRefused if message.code == InvalidField.code else RolloutFailed
        if isinstance(error, RequestRefused):
            cls = type(error)
        names = message.prompt_ids or rollout.unfinished
        if isinstance(rollout, OpenRollout):
            names = rollout.meant(names, message.submission)
            rollout.discard(names, dict(zip(message.prompt_ids, message.discarded, strict=False)))
        rollout.fail(names, cls, message.message)
        self.settle(rollout)

    def settle(self, rollout: AnyRollout) -> None:
        """Wait for a rollout no longer if it has ended."""
        if rollout.ended and self._active.get(rollout.id) is rollout:
            del self._active[rollout.id]
            self._deadlines.pop(rollout.id, None)
            if rollout.has_failures:  # a buffer that hung, or did not get the cancel, may go on with it
                self._give_up(rollout)

    def _give_up(self, rollout: AnyRollout) -> None:
        self._given_up[rollout.submission] = rollout.id
        while len(self._given_up) > GIVEN_UP:
            self._given_up.popitem(last=False)
