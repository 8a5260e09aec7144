"""Trajectories of loops that know no trajectories: each turn comes as a prompt that has the whole context.

A prompt that begins with all tokens of its session is the next turn of the session's trajectory. Any other
begins a new segment, a trajectory of its own: a template may leave out earlier reasoning, and agents may
shorten their history.

The client decides it, and not the buffer as for loops over HTTP: a segment has noise of its own, so its
tokens must not depend on what a buffer that may have started again remembers.

Invariants (tests/unit/test_prefix.py):
- a session's first segment has the noise of the place that the session was given. Each later segment has
  other noise: the segment is named by the content of its first prompt, and by how often that prompt came
  before in the session;
- a prompt that comes while its session is generating begins a segment: nothing waits for anything. That
  segment has one turn;
- the buffer awaits no turn of a segment that no prompt can go on with;
- at most `max_sessions` sessions are known. A forgotten session begins again with a segment.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from seer.client.image_uploads import Placed
from seer.client.open_rollout import OpenRollout, results
from seer.client.prompts import Prompt, token_array
from seer.client.results import Group
from seer.common.types import MAX_CONTEXT, SamplingParams, TurnSpec
from seer.common.wire import Tokens


@dataclass(slots=True)
class _Segment:
    """`context`: all tokens so far; `shown`: the images in it; `turn_id`: the prompt id of the last turn."""

    group: str
    prompt_len: int
    context: Tokens
    shown: tuple[str, ...] = ()
    generated: int = 0
    turns: int = 0
    turn_id: str = ""
    busy: bool = False

    def add(self, turn_id: str, prompt: Tokens, shown: tuple[str, ...], tokens: Tokens) -> None:
        """Go on from a turn that was generated."""
        self.context = np.concatenate([prompt, tokens])
        self.shown = shown
        self.generated += len(tokens)
        self.turns += 1
        self.turn_id = turn_id


@dataclass(slots=True)
class _Session:
    """`begun` counts segments by the digest of their first prompt."""

    segment: _Segment | None = None
    begun: Counter[str] = field(default_factory=Counter)


class PrefixTrajectories:
    """Sessions over one open rollout. `turns` and `segments` count what was asked for.

    A session's segments after its first are in `segments`: what a rewritten history costs is a prefill each.
    """

    def __init__(
        self, rollout: OpenRollout, *, idle_seconds: float = 600.0, max_sessions: int = 10_000
    ) -> None:
        self.turns = 0
        self.segments = 0
        self._rollout = rollout
        self._idle_seconds = idle_seconds
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    async def generate(
        self,
        session: str,
        prompt: Tokens,
        sampling: SamplingParams,
        *,
        group: str,
        index: int = 0,
        seed: int = 0,
        rollout_number: int | None = None,
        weight_version: int | None = None,
        max_context: int = MAX_CONTEXT,
        images: Sequence[Placed] = (),
    ) -> Group:
        """Return the response to a prompt: int32 [length]. It is response `index` of `group`, or goes on.

        `images` are all in it. Siblings have one group and indices of their own. All turns of a session
        must have the same place, seed and rollout number, by default that of the open rollout: begin one for
        each step. `max_context` is how long its context may become, for what may still come of it alone; a
        longer prompt is taken. Raises `InvalidField`, or the error that ended the prompt.
        """
        prompt = token_array(prompt, "prompt")
        shown = _names(images)
        segment = self._segment(session, prompt, shown, group)
        turn_id = f"{session}{segment.group.removeprefix(group)}.{segment.turns}"
        most = max(max_context - segment.prompt_len, segment.generated + sampling.max_tokens)
        asked = self._rollout.submit(
            Prompt(turn_id, token_ids=prompt, images=images), n=1, sampling=sampling, seed=seed,
            rollout_number=rollout_number, weight_version=weight_version, group=segment.group,
            first_index=index,
            turn=TurnSpec(segment.prompt_len, segment.generated, min(most, MAX_CONTEXT), self._idle_seconds),
        )  # fmt: skip
        segment.busy = True
        try:
            [found] = await results([asked])
            segment.add(turn_id, prompt, shown, found.responses[0].token_ids)
        finally:
            segment.busy = False
            if not self._is_known(session, segment):
                self._leave(segment)
        return found

    def goes_on(self, session: str, prompt: Tokens, images: Sequence[Placed] = ()) -> bool:
        """Return whether a prompt would be the next turn of what its session has."""
        known = self._sessions.get(session)
        segment = None if known is None else known.segment
        return segment is not None and not segment.busy and _goes_on(segment, prompt, _names(images))

    def end(self, session: str) -> None:
        """Forget a session that has no more turns, if the session is known."""
        known = self._sessions.pop(session, None)
        if known is not None:
            self._leave(known.segment)

    def end_all(self) -> None:
        """Forget all sessions: none has more turns."""
        for session in list(self._sessions):
            self.end(session)

    # --- segments ----------------------------------------------------------------------------

    def _segment(self, session: str, prompt: Tokens, shown: tuple[str, ...], group: str) -> _Segment:
        """Return the segment that a prompt goes on with, or begin one."""
        self.turns += 1
        known = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._max_sessions:
            self._leave(self._sessions.popitem(last=False)[1].segment)
        segment = known.segment
        if segment is not None and not segment.busy and _goes_on(segment, prompt, shown):
            return segment
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=6).hexdigest()
        name = f"{group}~{digest}.{known.begun[digest]}" if known.begun else group
        self.segments += bool(known.begun)
        known.begun[digest] += 1
        begun = _Segment(name, len(prompt), prompt)
        if segment is None or not segment.busy:
            self._leave(segment)
            known.segment = begun
        return begun

    def _is_known(self, session: str, segment: _Segment) -> bool:
        known = self._sessions.get(session)
        return known is not None and known.segment is segment

    def _leave(self, segment: _Segment | None) -> None:
        """Say that no turn follows; for a session that is generating, once its turn has ended."""
        if segment is not None and segment.turn_id and not segment.busy:
            self._rollout.end_trajectory(segment.turn_id)


def _goes_on(segment: _Segment, prompt: Tokens, shown: tuple[str, ...]) -> bool:
    context, known = segment.context, segment.shown
    begins = len(prompt) >= len(context) and np.array_equal(prompt[: len(context)], context)
    return begins and shown[: len(known)] == known


def _names(images: Sequence[Placed]) -> tuple[str, ...]:
    return tuple(each.image.name for each in images)
