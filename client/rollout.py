"""One rollout: the groups that arrived, and the prompts that failed.

Invariants:
- every prompt ends exactly once: with one complete group, or with one error that names it;
- a group has n responses, each of at least one token, generated with the parameters of this rollout and the
  same weights as its first group; anything else is an error, not a result;
- answers to another submission of the rollout's id change nothing;
- iteration yields every finished group first and raises only then.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from seer.client.prompts import Prepared, batches, with_images
from seer.client.results import Group, Noise, group_of, malformed
from seer.client.text import Tokenizer
from seer.client.used_noise import Claim
from seer.common.errors import InvalidField, RequestRefused, RolloutFailed, Unreachable
from seer.common.ids import params_digest
from seer.common.types import SamplingParams
from seer.common.wire import GroupDone, Progress, Submit

T = TypeVar("T")

_SHOWN = 8
"""Most reasons, and prompt ids per reason, that an error's text lists; its `prompt_ids` has all ids."""


class BufferLost(RolloutFailed, Unreachable):
    """The buffer does not answer any more; these prompts were not finished."""

    code = "buffer_lost"


class Arriving(ABC):
    """Results that come one by one. `_wake` wakes whoever waits for `_changed`: one is there, or all are."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    async def _as_they_come(
        self, after: Callable[[int], Sequence[T]], ended: Callable[[], bool]
    ) -> AsyncIterator[T]:
        """Yield results, `after(n)` those after the first n, until `ended`; then raise what went wrong."""
        yielded = 0
        while (came := after(yielded)) or not ended():
            for each in came:
                yield each
            yielded += len(came)
            if not came:
                await self._changed.wait()
        self._raise_failure()

    @abstractmethod
    def _raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Rollout(Arriving):
    """Iterate over groups as they finish, or `in_order()`; or await `result()`.

    `on_progress` is called in the client's loop with every `Progress`; it must not raise.
    `finish_times` are seconds since submission, one per finished request. `weight_version` is the one that
    was asked for, or that the buffer chose; -1: not known yet. `submission` is the number that the buffer's
    answers repeat. It `expects` its weights to be live.
    """

    def __init__(
        self,
        rollout_id: str,
        rollout_number: int,
        seed: int,
        n: int,
        sampling: SamplingParams,
        prompts: dict[str, Prepared],
        submission: int,
        weight_version: int,
        cancel: Callable[[Rollout, Sequence[str]], Awaitable[None]],
        claims: dict[str, Claim],
        expects: bool = False,
    ) -> None:
        super().__init__()
        self.id = rollout_id
        self.rollout_number = rollout_number
        self.seed = seed
        self.n = n
        self.sampling = sampling
        self.prompts = prompts
        self.submission = submission
        self.weight_version, self.expects = weight_version, expects
        self._params_digest = params_digest(seed, rollout_number, n, sampling)
        self.progress: Progress | None = None
        self.on_progress: Callable[[Progress], None] | None = None
        self.finish_times: list[float] = []
        self._cancel = cancel
        self._unfinished = claims
        self._groups: dict[str, Group] = {}
        self._finished: list[Group] = []
        self._failures: dict[str, tuple[type[RequestRefused], str]] = {}

    @property
    def groups(self) -> list[Group]:
        """The groups finished so far, in the order in which they finished."""
        return list(self._finished)

    @property
    def unfinished(self) -> list[str]:
        """Ids of prompts that neither finished nor failed yet, in input order."""
        return list(self._unfinished)

    @property
    def ended(self) -> bool:
        """Whether every prompt has finished or failed."""
        return not self._unfinished

    @property
    def waiting(self) -> bool:
        """Whether an answer of the buffer is awaited."""
        return bool(self._unfinished)

    @property
    def has_failures(self) -> bool:
        """Whether a prompt failed."""
        return bool(self._failures)

    @property
    def failure(self) -> RequestRefused | None:
        """One error that names every prompt that failed so far; of the errors' class, if they share one."""
        if not self._failures:
            return None
        classes = {cls for cls, _ in self._failures.values()}
        cls = classes.pop() if len(classes) == 1 else RolloutFailed
        failed = tuple(prompt_id for prompt_id in self.prompts if prompt_id in self._failures)
        return cls(f"{len(failed)} of {len(self.prompts)} prompts: {summary_of(self.failures)}", failed)

    @property
    def failures(self) -> dict[str, str]:
        """Why each prompt failed that did so far, by prompt id."""
        return {prompt_id: why for prompt_id, (_, why) in list(self._failures.items())}

    def __aiter__(self) -> AsyncIterator[Group]:
        """Yield groups as they finish; then raise `failure`, if any."""
        return self._as_they_come(lambda first: self._finished[first:], lambda: self.ended)

    async def in_order(self) -> AsyncIterator[Group]:
        """Yield groups in input order, each as soon as it can be; then raise `failure`, if any."""
        for prompt_id in self.prompts:
            while prompt_id in self._unfinished:
                await self._changed.wait()
            if prompt_id in self._groups:
                yield self._groups[prompt_id]
        self._raise_failure()

    async def result(self) -> list[Group]:
        """Wait for every prompt and return all groups in input order, or raise `failure`.

        What finished before a failure is still in `groups`.
        """
        return [group async for group in self.in_order()]

    async def changed(self) -> None:
        """Wait until another prompt has finished or failed."""
        await self._changed.wait()

    async def cancel(self, prompt_ids: Sequence[str] = ()) -> None:
        """Give up these unfinished prompts, or all: they end in `RolloutCancelled`.

        Finished ones stay. Raises `InvalidField` for an id that the rollout does not have.
        """
        for position, prompt_id in enumerate(prompt_ids):
            if prompt_id not in self.prompts:
                raise InvalidField(f"prompt_ids[{position}]", prompt_id, "is not a prompt of this rollout")
        await self._cancel(self, prompt_ids)

    def _raise_failure(self) -> None:
        failure = self.failure
        if failure is not None:
            raise failure

    # --- for the client ------------------------------------------------------------------

    def matches(self, submission: int) -> bool:
        """Return whether an answer is to this submission."""
        return submission == self.submission

    def began(self, weight_version: int) -> None:
        """Set the weight version that the buffer chose: prompts that are submitted again ask for it."""
        if self.weight_version < 0:
            self.weight_version = weight_version

    def deliver(self, message: GroupDone, tokenizer: Tokenizer | None) -> None:
        """Add a finished group; one that was added before changes nothing."""
        if message.prompt_id not in self._unfinished:
            return
        self.began(message.weight_version)
        prompt = self.prompts[message.prompt_id]
        problem = self._mismatch(message) or malformed(message, self.n, prompt, self.sampling)
        if problem:
            self.fail([message.prompt_id], RolloutFailed, f"the buffer sent a malformed group: {problem}")
            return
        noise = Noise(self.seed, self.rollout_number, prompt.id)
        group = group_of(message, prompt, tokenizer, self.sampling, noise)
        self._groups[prompt.id] = group
        self._finished.append(group)
        self._unfinished.pop(prompt.id).ended(len(each.token_ids) for each in group.responses)
        self._wake()

    def _mismatch(self, message: GroupDone) -> str:
        """Return why a group does not belong to this rollout; empty if it does."""
        expected, images = self._params_digest, self.prompts[message.prompt_id].places
        if images:
            expected = params_digest(self.seed, self.rollout_number, self.n, self.sampling, images=images)
        if message.params_digest not in ((expected,) if images else (0, expected)):
            return "generated for another seed, rollout number, n, sampling or images"
        if message.weight_version != self.weight_version:
            return f"generated by weight version {message.weight_version}, not {self.weight_version}"
        return ""

    def fail(self, prompt_ids: Iterable[str], cls: type[RequestRefused], message: str) -> None:
        """End those of `prompt_ids` that are unfinished in an error."""
        for prompt_id in prompt_ids:
            if prompt_id in self._unfinished:
                self._unfinished.pop(prompt_id).failed()
                self._failures[prompt_id] = (cls, message)
        self._wake()

    def prepared(self, prompt_ids: Iterable[str]) -> list[Prepared]:
        """Return those of these prompts that are unfinished."""
        return [self.prompts[prompt_id] for prompt_id in prompt_ids if prompt_id in self._unfinished]

    def report(self, progress: Progress) -> None:
        """Update the counters."""
        self.progress = progress
        self.finish_times += progress.finish_times
        if self.on_progress is not None:
            self.on_progress(progress)


def submissions(rollout: Rollout) -> Iterator[Submit]:
    """Yield messages of bounded size with all prompts that are unfinished at that time."""
    unfinished = [rollout.prompts[prompt_id] for prompt_id in rollout.unfinished]
    for planned in batches(unfinished, lambda prompt: prompt.token_ids.size):
        batch = [prompt for prompt in planned if prompt.id in rollout._unfinished]
        if not batch:
            continue
        submit = Submit(
            rollout_id=rollout.id,
            rollout_number=rollout.rollout_number,
            seed=rollout.seed,
            n=rollout.n,
            sampling=rollout.sampling,
            prompt_ids=[prompt.id for prompt in batch],
            lengths=[prompt.token_ids.size for prompt in batch],
            tokens=np.concatenate([prompt.token_ids for prompt in batch]),
            weight_version=rollout.weight_version,
            submission=rollout.submission,
            expects=rollout.expects,
        )
        yield with_images(submit, batch)


def summary_of(reasons: Mapping[str, str]) -> str:
    """Return a text with the reasons and their prompts, given reasons by prompt id; long lists are cut."""
    prompts: dict[str, list[str]] = {}
    for prompt_id, reason in reasons.items():
        prompts.setdefault(reason, []).append(prompt_id)
    return _shown([f"{reason} (prompts {_shown(ids)})" for reason, ids in prompts.items()], "; ")


def _shown(items: Sequence[str], separator: str = ", ") -> str:
    more = [f"… {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return separator.join([*items[:_SHOWN], *more])
