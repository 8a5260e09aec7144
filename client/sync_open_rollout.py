"""Open rollouts without asyncio.

Invariant: every call runs in the client's thread and raises what the asyncio rollout raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seer.client.groups import Group
from seer.client.loop_thread import LoopThread, iterate
from seer.client.open_rollout import Counts, Delta, OpenRollout, PromptInFlight
from seer.client.prompts import Prompt
from seer.common.types import SamplingParams
from seer.common.wire import Tokens


class SyncPromptInFlight:
    """See `PromptInFlight`."""

    def __init__(self, prompt: PromptInFlight, thread: LoopThread) -> None:
        self._prompt = prompt
        self._thread = thread

    @property
    def ended(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._prompt.ended

    def result(self) -> Group:
        """Wait for the group. Raises the error that ended the prompt."""
        return self._thread.call(self._prompt.result())

    def tokens(self) -> Iterator[Delta]:
        """Yield tokens as chunks end, if it was submitted with `stream`; then raise the prompt's error."""
        return iterate(self._thread, self._prompt.tokens())

    def cancel(self) -> None:
        """Give it up."""
        self._thread.call(self._prompt.cancel())


class SyncOpenRollout:
    """See `OpenRollout`."""

    def __init__(self, rollout: OpenRollout, thread: LoopThread) -> None:
        self._rollout = rollout
        self._thread = thread

    @property
    def id(self) -> str:
        """The rollout's id at the buffer."""
        return self._rollout.id

    @property
    def rollout_number(self) -> int:
        """That of prompts that name no other."""
        return self._rollout.rollout_number

    @property
    def counts(self) -> Counts:
        """What became of its prompts so far."""
        return self._rollout.counts

    def submit(
        self,
        prompt: Prompt | str | Sequence[int] | Tokens,
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        rollout_number: int | None = None,
        weight_version: int | None = None,
        group: str = "",
        first_index: int = 0,
        stream: bool = False,
    ) -> SyncPromptInFlight:
        """See `OpenRollout.submit`."""

        async def submitted() -> PromptInFlight:
            return self._rollout.submit(
                prompt,
                n=n,
                sampling=sampling,
                seed=seed,
                rollout_number=rollout_number,
                weight_version=weight_version,
                group=group,
                first_index=first_index,
                stream=stream,
            )

        return SyncPromptInFlight(self._thread.call(submitted()), self._thread)

    def close(self) -> None:
        """Take no more prompts; the rollout ends with its last one."""

        async def closed() -> None:
            self._rollout.close()

        self._thread.call(closed())
